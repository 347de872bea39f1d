"""The ``zeromon`` command: one file a verb.

Data goes to stdout, narration to stderr. Exit codes: 0 fine, 1 findings, 2 usage or an error with
a way out.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from zeromon import __version__
from zeromon.errors import ZeromonError

_EPILOG = """\
examples:
  zeromon run -- torchrun --nproc-per-node 2 train.py    watch a run; the script is unchanged
  zeromon attach                                         the live view, from another terminal
  zeromon report                                         what the last run did, and how it ended
  zeromon plan 7B --devices 8 --memory h100              what fits, before the run
  curl localhost:9417/metrics                            what Prometheus scrapes
"""


def build_parser() -> argparse.ArgumentParser:
    """The parser with all verbs."""
    from zeromon.cli import attach, plan, report, run, trace

    parser = argparse.ArgumentParser(
        prog="zeromon",
        description="Live OOM risk and exposed communication of ZeRO and FSDP training runs.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"zeromon {__version__}")
    verbs = parser.add_subparsers(metavar="COMMAND", required=True)
    for verb in (run, attach, report, plan, trace):
        sub = verbs.add_parser(
            verb.__name__.rpartition(".")[2],
            help=verb.HELP,
            description=verb.__doc__,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        verb.add_arguments(sub)
        sub.set_defaults(call=verb.call)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit code."""
    options = build_parser().parse_args(arguments)
    try:
        code: int = options.call(options)
        sys.stdout.flush()
        return code
    except ZeromonError as error:
        say(str(error))
        if error.hint:
            say(f"  {error.hint}")
        return 2
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def say(text: str) -> None:
    """A line of narration."""
    sys.stderr.write(f"zeromon: {text}\n" if not text.startswith(" ") else f"{text}\n")


if __name__ == "__main__":
    sys.exit(main())
