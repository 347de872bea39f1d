"""The parser of every verb: help that fits the terminal, and errors that name what was typed."""

import argparse
import difflib
import itertools
import re
import sys
import textwrap
from collections.abc import Iterable, Sequence
from typing import Any, NoReturn

from zeromon.cli.terminal import BOLD, is_coloured, paint_text

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
            if error.message.startswith("invalid "):
                is_whole = getattr(action.type, "__name__", "") in _WHOLE
                error.message = f"{arg_string!r} is not a {'whole ' if is_whole else ''}number"
            raise


def suggest_names(typed: str, names: Iterable[str]) -> str:
    """``; did you mean attach?``; "" where nothing is near."""
    matches = difflib.get_close_matches(typed, list(names), n=2)
    return f"; did you mean {' or '.join(matches)}?" if matches else ""
