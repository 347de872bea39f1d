"""Adds to the wheel what shells and ``man`` read, made from the parser of the command line.

The agent's hooks are compiled (``compiled.py``) where there is a C compiler, else the wheel is pure
Python; ZEROMON_COMPILE=0 asks for that. With ZEROMON_COMPILE=1 the collector's fold is compiled, too;
with the name of a machine, the wheel is one for any Linux of that machine. An editable installation gets
nothing compiled: its sources may change.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from shutil import rmtree
from tempfile import mkdtemp
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

sys.path.insert(0, str(Path(__file__).parent))
import compiled

PLACES = {
    "bash": "share/bash-completion/completions/zeromon",
    "zsh": "share/zsh/site-functions/_zeromon",
    "fish": "share/fish/vendor_completions.d/zeromon.fish",
    "man": "share/man/man1/zeromon.1",
}
"""Shell, or ``man``, and its file below the prefix of an installation."""


class Hook(BuildHookInterface[Any]):
    """Run by hatchling, which names it in pyproject.toml, before it writes a wheel."""

    def dependencies(self) -> list[str]:
        """The packages that compiling needs."""
        cross = [compiled.CROSS] if machine() not in ("", "1") else []
        return [*compiled.NEEDS, *cross] if machine() else []

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Makes the files in folders of their own, and adds them to the wheel."""
        if version == "editable":
            return
        os.environ |= {"COLUMNS": "74", "NO_COLOR": "1"}  # with the indent of a page within 80
        sys.path[:0] = [self.root, str(Path(self.root, "agents"))]
        from zeromon.cli import build_parser
        from zeromon.cli.parser import completion_script

        made = {shell: completion_script(build_parser(), shell) for shell in ("bash", "zsh", "fish")}
        made["man"] = manual(build_parser(), self.metadata.version)
        self.folder = Path(mkdtemp(prefix="zeromon-build-"))
        for name, text in made.items():
            (self.folder / name).write_text(text)
            build_data["shared_data"][str(self.folder / name)] = PLACES[name]
        libraries = self._compiled()
        if libraries and machine() in ("", "1"):
            build_data |= {"pure_python": False, "infer_tag": True}
        elif libraries:
            python = f"cp{sys.version_info.major}{sys.version_info.minor}"
            tag = f"{python}-{python}-manylinux2014_{machine()}"
            build_data |= {"pure_python": False, "tag": tag}
        for library in libraries:
            build_data["force_include"][str(self.folder / library)] = str(library)

    def _compiled(self) -> list[Path]:
        """The libraries in the folder: all that were asked for, or the hooks where possible."""
        if os.environ.get("ZEROMON_COMPILE") == "0":
            return []
        try:
            if machine():
                return compiled.compile_into(self.folder, machine().removeprefix("1"))
            return compiled.compile_hooks(self.folder)
        except RuntimeError as error:
            if not machine():
                print(f"zeromon: its hooks are not compiled: {error}", file=sys.stderr)
                return []
            rmtree(self.folder)
            raise

    def finalize(self, version: str, *_: Any) -> None:
        """Removes that folder; the wheel has its files."""
        if version != "editable":
            rmtree(self.folder)


def machine() -> str:
    """The machine to compile the fold for: "1" is this one; "" where it is not compiled."""
    return os.environ.get("ZEROMON_COMPILE", "").removeprefix("0")


def manual(parser: argparse.ArgumentParser, version: str) -> str:
    """The manual page: the help of the command and of every verb, as they print it."""
    title = f'.TH ZEROMON 1 "" "zeromon {version}" "User Commands"'
    parts = [title, ".SH NAME", rf"zeromon \- {parser.description}"]
    for one in parsers(parser):
        text = one.format_help().rstrip().replace("\\", r"\e").replace("-", r"\-")
        text = re.sub(r"^(?=[.'])", r"\\&", text, flags=re.MULTILINE)
        parts += [f".SH {one.prog.upper()}", ".nf", text, ".fi"]
    return "\n".join(parts) + "\n"


def parsers(parser: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
    """*parser* and those of its verbs."""
    yield parser
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for sub in action.choices.values():
                yield from parsers(sub)
