"""The parser and the options of every verb: help that fits, and errors that name what was typed."""

import argparse
import difflib
import importlib
import itertools
import re
import sys
import textwrap
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn

from zeromon.base.errors import ExportError, ZeromonError, os_errors_as, package_install_hint
from zeromon.base.units import printable
from zeromon.cli.terminal import BOLD, is_coloured, paint_text
from zeromon.ring.files import replace_file


def add_option(
    group: argparse._ActionsContainer,
    names: str,
    metavar: str,
    help: str,
    type: Callable[[str], Any] = str,
    default: Any = None,
    **extra: Any,
) -> None:
    """Adds an option with a value; its *help* tells the *default*, unless that is empty."""
    note = f" (default: {default})" if default and "default" not in help else ""
    group.add_argument(
        *names.split(), metavar=metavar, help=help + note, type=type, default=default, **extra
    )


def add_list(
    group: argparse._ActionsContainer, names: str, metavar: str, help: str, **extra: Any
) -> None:
    """Adds an option with a value that may be given again: a list."""
    group.add_argument(*names.split(), metavar=metavar, help=help, action="append", default=[], **extra)


def add_flag(group: argparse._ActionsContainer, names: str, help: str) -> None:
    """Adds an option without a value."""
    group.add_argument(*names.split(), action="store_true", help=help)


def add_server(group: argparse._ActionsContainer) -> None:
    """``--prometheus URL``"""
    purpose = "read from this server: http://host:9090, https://host/prometheus (ZEROMON_PROMETHEUS)"
    add_option(group, "--prometheus", "URL", purpose)


def positive(typed: str) -> int:
    """Parses the value of an option that is a positive whole number."""
    number = int(typed)
    if not 0 < number < 1 << 40:
        raise argparse.ArgumentTypeError(f"must be a positive number, not {typed}")
    return number


def whole(typed: str) -> int:
    """Parses the value of an option that is a whole number, 0 or more; ``5e8`` is one, too."""
    number = float(typed)
    # The bound comes first: int() of infinity raises OverflowError, which argparse lets through
    if not 0 <= number < 1 << 40 or number != int(number):
        raise argparse.ArgumentTypeError(f"must be a whole number, not {typed}")
    return int(number)


def tcp_port(typed: str) -> int:
    """Parses the value of an option that is the number of a TCP port; 0: any free one."""
    if not typed.isdecimal() or int(typed) > 65535:
        raise argparse.ArgumentTypeError(f"must be a port, 0 to 65535, not {typed}")
    return int(typed)


def in_range(low: float, high: float = 1e18, *, above: bool = False) -> Callable[[str], float]:
    """Returns the parser of an option that is a number from *low*, or *above* it, to *high*."""

    def parse_number(typed: str) -> float:
        value = float(typed)
        # As a negation, because NaN is neither below nor above a bound
        if not low <= value <= high or (above and value == low):
            bottom = f"above {low:g}" if above else f"{low:g} or more"
            top = f" and at most {high:g}" if high < 1e18 else ""
            raise argparse.ArgumentTypeError(f"must be {bottom}{top}, not {typed}")
        return value

    return parse_number


# ---- the output of verbs that make a document ---------------------------------------------------


def check_format(path: str | None, *suffixes: str) -> None:
    """Raises :class:`ExportError` for a file whose name promises a format that is not written."""
    suffix = Path(path or "").suffix.lower()
    if suffix and suffix not in suffixes:
        formats = " and ".join(suffixes)
        raise ExportError(
            f"{printable(str(path))}: {suffix} is not a format of -o", f"It writes {formats}."
        )


def import_extra(module: str, purpose: str, extra: str) -> Any:
    """Imports *module* for *purpose*; raises :class:`ZeromonError` where a package is missing."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        message = f"{purpose} needs a package that is not installed ({error.name})"
        raise ZeromonError(message, package_install_hint(extra)) from error


def draw_module(module: str) -> Any:
    """A module of zeromon_dashboard that draws."""
    return import_extra(f"zeromon_dashboard.{module}", "-o", "dashboard")


def write_text(content: str, output: str | None) -> None:
    """Writes *content* to the file *output*, or prints it; raises :class:`ExportError`."""
    if output is None:
        sys.stdout.write(content)
        return
    with os_errors_as(ExportError, f"write {printable(output)}"):
        replace_file(Path(output), content, private=False)
    sys.stderr.write(f"zeromon: wrote {printable(output)}\n")


# ---- the parser of every verb --------------------------------------------------------------------

_NAMES = re.compile(r"argument (-[^:]*): (.*)", re.DOTALL)
_WRAP: Any = {"break_long_words": False, "break_on_hyphens": False}
_WHOLE = {"int", "positive", "whole"}
"""The types of options that are whole numbers; all others that raise ValueError are numbers."""


class Help(argparse.RawDescriptionHelpFormatter):
    """Prose is wrapped to the terminal, examples stay; a positional is in capitals."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:  # noqa: ARG002
        groups = itertools.groupby(text.strip("\n").split("\n"), lambda row: row[:1].strip() == "")
        return "\n".join(
            row
            for is_kept, rows in groups
            for row in (
                itertools.chain.from_iterable(_wrap_help_example(row, width) for row in rows)
                if is_kept
                else textwrap.wrap(" ".join(rows), width, **_WRAP)
            )
        )

    def _get_default_metavar_for_positional(self, action: argparse.Action) -> str:
        return action.dest.upper()

    def start_section(self, heading: str | None) -> None:
        """Begins a part of the help; its heading is bold at a terminal."""
        coloured = is_coloured(sys.stdout)
        super().start_section(paint_text(heading, BOLD) if heading and coloured else heading)


def _wrap_help_example(example: str, width: int) -> list[str]:
    """An example in lines of at most *width*: its remark on a line below, its command continued."""
    if len(example) <= width:
        return [example]
    indent = example[: len(example) - len(example.lstrip())]
    command, *remark = re.split(r" {3,}", example.strip(), maxsplit=1)
    rows = textwrap.wrap(
        command, width - 2, initial_indent=indent, subsequent_indent=f"{indent}    ", **_WRAP
    )
    go_on = "" if command.startswith("{") else " \\"
    return [*(row + go_on for row in rows[:-1]), rows[-1], *(f"{indent}    # {r}" for r in remark)]


class Parser(argparse.ArgumentParser):
    """As argparse has it, but for help, errors and suggestions."""

    def __init__(self, *positional: Any, **named: Any) -> None:
        named.setdefault("formatter_class", Help)
        super().__init__(*positional, **named)
        self._words: Sequence[str] = ()

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Refuses unknown words here, where the verb is known, and not in the parser above it."""
        self._words = list(sys.argv[1:] if args is None else args)
        namespace, unknown = super().parse_known_args(self._words, namespace)
        if unknown:
            self._refuse_unknown(unknown)
        return namespace, unknown

    def _refuse_unknown(self, unknown: Sequence[str]) -> NoReturn:
        option = next((option for option in unknown if option.startswith("-")), "")
        option_names = [
            name
            for action in self._actions
            if action.help is not argparse.SUPPRESS
            for name in action.option_strings
        ]
        if option:
            option = option.partition("=")[0]  # its value may be a secret
            if option in option_names:
                self.error(f"{option} stands after --, where options end; put it in front of --")
            self.error(f"unknown option {option}{suggest_names(option, option_names)}")
        self.error(f"unexpected argument: {unknown[0]}")

    def error(self, message: str) -> NoReturn:
        """Two lines: what is wrong, and where help is."""
        if match := _NAMES.fullmatch(message):
            message = f"{self._as_typed(match[1].split('/'))}: {match[2]}"
        self.exit(2, f"{self.prog}: {message}\n  Run `{self.prog} --help` for usage.\n")

    def _as_typed(self, names: Sequence[str]) -> str:
        typed = [name.partition("=")[0] for name in self._words]
        return next((name for name in typed if name in names), names[-1])

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is None or value in action.choices:
            return
        choices = [str(choice) for choice in action.choices]
        if isinstance(action, argparse._SubParsersAction):
            kind = str(action.metavar or "command").lower()
            self.error(f"unknown {kind} {str(value)!r}{suggest_names(str(value), choices)}")
        hint = suggest_names(str(value), choices) or f"; there are {', '.join(choices)}"
        raise argparse.ArgumentError(action, f"there is no {value}{hint}")

    def _get_value(self, action: argparse.Action, arg_string: str) -> Any:
        try:
            return super()._get_value(action, arg_string)
        except argparse.ArgumentError as error:
            # argparse names the converter ("invalid positive value"), which says nothing to a user
            if error.message.startswith("invalid "):
                is_whole = getattr(action.type, "__name__", "") in _WHOLE
                error.message = f"{arg_string!r} is not a {'whole ' if is_whole else ''}number"
            raise


_OTHER_NAMES = {"--ranks": "--devices", "--gpus": "--devices", "--world-size": "--devices"}
"""Options of other tools -> ours of that meaning, which difflib would not find."""


def suggest_names(typed: str, names: Collection[str]) -> str:
    """``; did you mean attach?``; "" where nothing is near."""
    other_name = _OTHER_NAMES.get(typed)
    if other_name in names:
        return f"; did you mean {other_name}?"
    matches = difflib.get_close_matches(typed, list(names), n=2)
    return f"; did you mean {' or '.join(matches)}?" if matches else ""


# ---- the script that completes the command: verbs, options, choices, files and the names of runs ---

SHELLS = ("bash", "zsh", "fish")
_STORE = "${ZEROMON_STORE:-${XDG_STATE_HOME:-$HOME/.local/state}/zeromon}/runs"
_PREAMBLE = {
    "bash": f'_zeromon_runs() {{ compgen -W "$(command ls "{_STORE}" 2>/dev/null)" -- "$1"; }}',
    "zsh": f'_zeromon_runs() {{ compadd -- ${{(f)"$(command ls "{_STORE}" 2>/dev/null)"}} }}',
    "fish": "function _zeromon_runs; zeromon runs --json 2>/dev/null"
    ' | string match -ra \'(?<="run":")[^"]+\'; end',
}
_RUNS = {"bash": "_zeromon_runs", "zsh": "_zeromon_runs", "fish": "(_zeromon_runs)"}
_OF_RUNS = {"run", "runs", "target", "job"}
"""Where the name of a run is expected: the destinations of the arguments."""
_OF_FILES, _OF_FOLDERS = {"FILE", "PATH", "CONFIG"}, {"DIR"}


def completion_script(parser: argparse.ArgumentParser, shell: str) -> str:
    """The script for *shell* of the command that *parser* reads."""
    shtab = import_extra("shtab", "--completion", "completion")
    for action in walk_parser_actions(parser):
        if action.dest in _OF_RUNS and action.choices is None:
            action.complete = _RUNS  # type: ignore[attr-defined]
        elif action.metavar in _OF_FILES or action.dest in ("files", "config"):
            action.complete = shtab.FILE  # type: ignore[attr-defined]
        elif action.metavar in _OF_FOLDERS:
            action.complete = shtab.DIRECTORY  # type: ignore[attr-defined]
    script: str = shtab.complete(parser, shell, preamble=_PREAMBLE)
    return script


def walk_parser_actions(parser: argparse.ArgumentParser) -> Iterator[argparse.Action]:
    """Every argument of *parser* and of its verbs."""
    for action in parser._actions:
        yield action
        if isinstance(action, argparse._SubParsersAction):
            for sub in action.choices.values():
                yield from walk_parser_actions(sub)
