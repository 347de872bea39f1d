"""The ``zeromon`` command: one file a verb.

Data goes to stdout, messages to stderr. Exit codes: 0 success, 1 findings, 2 usage or an error with a
hint.
"""

import argparse
import importlib
import json
import os
import signal
import sys
from collections.abc import Sequence
from importlib.resources import files
from typing import Any

from zeromon import __version__
from zeromon.base.errors import ZeromonError
from zeromon.base.units import printable_lines
from zeromon.cli.parser import SHELLS, Parser, completion_script

_HELP: dict[str, Any] = json.loads(files(__package__).joinpath("verbs.json").read_text())
_GROUPS: dict[str, dict[str, str]] = _HELP["verbs"]
"""Title in the help -> its verbs, each with one line."""
VERBS = {name: summary for group in _GROUPS.values() for name, summary in group.items()}
_MODULES = {"try": "trial"}
"""Verb -> its module, where Python reserves the word."""
AFTER_DASHES = "after_dashes"
"""Attribute of the options of ``check``: the launch command after ``--``."""


class _PrintCompletion(argparse.Action):
    """Prints the script of a shell, and ends."""

    def __call__(self, parser: argparse.ArgumentParser, _: Any, shell: Any, __: Any = None) -> None:
        sys.stdout.write(completion_script(build_parser(), shell))
        parser.exit()


def build_parser(only: str | None = None) -> argparse.ArgumentParser:
    """Returns the parser with all verbs; with *only*, other verbs have a name and nothing more.

    A verb is imported when it is called: the libraries of the others cost time and memory.
    """
    parser = Parser(
        prog="zeromon",
        description="Live OOM risk and exposed communication of ZeRO and FSDP training runs.",
        epilog="\n".join(["examples:", *(f"  {x:<54} {note}" for x, note in _HELP["examples"].items())]),
        add_help=False,
    )
    verbs = parser.add_subparsers(metavar="COMMAND", required=True)
    parser._positionals._group_actions.clear()  # argparse would list all verbs in one group
    for title, group in _GROUPS.items():
        rows = (f"  {name:<12}{summary}" for name, summary in group.items())
        parser.add_argument_group(title, "\n".join(rows))
    general = parser.add_argument_group("options")
    general.add_argument("-h", "--help", action="help", help="show this help, or that of COMMAND")
    general.add_argument("-V", "--version", action="version", version=f"zeromon {__version__}")
    general.add_argument(
        "--completion", choices=SHELLS, action=_PrintCompletion,
        help="print the completion script for bash, zsh or fish",
    )  # fmt: skip
    for name, summary in VERBS.items():
        if only is not None and name != only:
            verbs.add_parser(name, help=summary)
            continue
        verb = importlib.import_module(f"zeromon.cli.{_MODULES.get(name, name)}")
        sub = verbs.add_parser(name, help=summary, description=verb.__doc__)
        verb.add_arguments(sub)
        sub.set_defaults(call=verb.call)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit code."""
    argv = list(sys.argv[1:] if arguments is None else arguments)
    command: list[str] = []
    # argparse drops "--", and would read the words of the launch command as paths
    if argv[:1] == ["check"] and "--" in argv:
        at = argv.index("--")
        argv, command = argv[:at], argv[at + 1 :]
    if argv[:1] == ["help"]:
        argv = [*argv[1:], "--help"]
    parser = build_parser(argv[0] if argv else "")
    if not argv:
        parser.print_help()
        return 0
    try:
        if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:  # as __main__ has left it
            signal.signal(signal.SIGINT, signal.default_int_handler)
        options = parser.parse_args(argv)
        setattr(options, AFTER_DASHES, command)
        code: int = options.call(options)
        # A closed pipe raises here, in the try; at exit Python would print it and return 120
        sys.stdout.flush()
        return code
    except ZeromonError as error:
        tell_user(str(error), error.hint)
        return 2
    except KeyboardInterrupt:
        # 128 + SIGINT, as a shell reports it
        return 130
    except BrokenPipeError:
        # Python flushes stdout again at exit, which would fail a second time
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as error:
        # Without a path, the message would be "None: reason": the traceback says more
        if not isinstance(error.filename, str):
            raise
        tell_user(f"{error.filename}: {error.strerror}")
        return 2


def tell_user(message: str, hint: str = "") -> None:
    """Prints a message to stderr, with its *hint* on the next line."""
    message = printable_lines(message)
    sys.stderr.write(f"zeromon: {message}\n" if not message.startswith(" ") else f"{message}\n")
    if hint:
        tell_user(f"  {hint}")


def user_agrees(question: str) -> bool:
    """Asks at the terminal; only yes is agreement."""
    sys.stderr.write(f"{question} [y/N] ")
    sys.stderr.flush()
    return sys.stdin.readline().strip().lower() in ("y", "yes")


if __name__ == "__main__":
    sys.exit(main())
