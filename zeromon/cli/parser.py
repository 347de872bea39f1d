"""The parser of every verb: help that fits the terminal, and errors that name what was typed."""

import argparse
import difflib
import itertools
import re
import sys
import textwrap
from collections.abc import Iterable, Sequence
from typing import Any, NoReturn

from zeromon.cli.terminal import BOLD, is_coloured, painted

_NAMES = re.compile(r"argument (-[^:]*): (.*)", re.DOTALL)
_WRAP: Any = {"break_long_words": False, "break_on_hyphens": False}
_WHOLE = {"int", "positive", "whole"}
"""The types of options that are whole numbers; all others that raise ValueError are numbers."""


class Help(argparse.RawDescriptionHelpFormatter):
    """Prose is wrapped to the terminal, examples stay; a positional is in capitals."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:  # noqa: ARG002
        parts = itertools.groupby(text.strip("\n").split("\n"), lambda line: line[:1].strip() == "")
        return "\n".join(
            line
            for is_kept, lines in parts
            for line in (
                itertools.chain.from_iterable(_kept(line, width) for line in lines)
                if is_kept
                else textwrap.wrap(" ".join(lines), width, **_WRAP)
            )
        )

    def _get_default_metavar_for_positional(self, action: argparse.Action) -> str:
        return action.dest.upper()

    def start_section(self, heading: str | None) -> None:
        """Begins a part of the help; its heading is bold at a terminal."""
        coloured = is_coloured(sys.stdout)
        super().start_section(painted(heading, BOLD) if heading and coloured else heading)


def _kept(line: str, width: int) -> list[str]:
    """An example in lines of at most *width*: its remark on a line below, its command continued."""
    if len(line) <= width:
        return [line]
    indent = line[: len(line) - len(line.lstrip())]
    command, *remark = re.split(r" {3,}", line.strip(), maxsplit=1)
    parts = textwrap.wrap(
        command, width - 2, initial_indent=indent, subsequent_indent=f"{indent}    ", **_WRAP
    )
    go_on = "" if command.startswith("{") else " \\"
    return [
        *(part + go_on for part in parts[:-1]),
        parts[-1],
        *(f"{indent}    # {r}" for r in remark),
    ]


class Parser(argparse.ArgumentParser):
    """As argparse has it, but for help, errors and suggestions."""

    def __init__(self, *positional: Any, **named: Any) -> None:
        named.setdefault("formatter_class", Help)
        super().__init__(*positional, **named)
        self._words: Sequence[str] = ()

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Refuses unknown words here, where the verb is known, and not in the parser above it."""
        self._words = list(sys.argv[1:] if args is None else args)
        namespace, rest = super().parse_known_args(self._words, namespace)
        if rest:
            self._refuse(rest)
        return namespace, rest

    def _refuse(self, rest: Sequence[str]) -> NoReturn:
        word = next((word for word in rest if word.startswith("-")), "")
        shown = [
            name
            for action in self._actions
            if action.help is not argparse.SUPPRESS
            for name in action.option_strings
        ]
        if word:
            word = word.partition("=")[0]  # its value may be a secret
            if word in shown:
                self.error(f"{word} stands after --, where options end; put it in front of --")
            self.error(f"there is no option {word}{suggestion(word, shown)}")
        self.error(f"nothing takes the argument {rest[0]}")

    def error(self, message: str) -> NoReturn:
        """Two lines: what is wrong, and where help is."""
        if found := _NAMES.fullmatch(message):
            message = f"{self._as_typed(found[1].split('/'))}: {found[2]}"
        self.exit(2, f"{self.prog}: {message}\n  {self.prog} --help describes the arguments.\n")

    def _as_typed(self, names: Sequence[str]) -> str:
        words = [word.partition("=")[0] for word in self._words]
        return next((word for word in words if word in names), names[-1])

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is None or value in action.choices:
            return
        known = [str(choice) for choice in action.choices]
        if isinstance(action, argparse._SubParsersAction):
            what = str(action.metavar or "command").lower()
            self.error(f"there is no {what} {value}{suggestion(str(value), known)}")
        near = suggestion(str(value), known) or f"; there are {', '.join(known)}"
        raise argparse.ArgumentError(action, f"there is no {value}{near}")

    def _get_value(self, action: argparse.Action, text: str) -> Any:
        try:
            return super()._get_value(action, text)
        except argparse.ArgumentError as error:
            if error.message.startswith("invalid "):
                whole = getattr(action.type, "__name__", "") in _WHOLE
                error.message = f"{text!r} is not a {'whole ' if whole else ''}number"
            raise


def suggestion(word: str, known: Iterable[str]) -> str:
    """``; did you mean attach?``; "" where nothing is near."""
    near = difflib.get_close_matches(word, list(known), n=2)
    return f"; did you mean {' or '.join(near)}?" if near else ""
