"""Every command that a page shows can be typed: the shell, the verb and its options, the files exist."""

from __future__ import annotations

import re
import shlex
import subprocess
from pathlib import Path

import pytest
from support import ROOT

from zeromon.cli import build_parser

KINDS = ("tutorials", "how-to", "reference", "explanation")
FOLDERS = ("docs", *(f"docs/{kind}" for kind in KINDS), "zeromon/diagnosis/rules")
PAGES = [ROOT / "README.md", *(page for name in FOLDERS for page in sorted((ROOT / name).glob("*.md")))]
NAMES = [str(page.relative_to(ROOT)) for page in PAGES]
BLOCK = re.compile(r"^```(?:console|sh|bash)\n(.*?)^```", re.MULTILINE | re.DOTALL)
SHELL_WORDS = {"|", "||", "&&", "&", ";", ">"}


def commands(page: Path) -> list[str]:
    """Each command in a block of *page*, joined where it goes on in the next row."""
    blocks = BLOCK.findall(page.read_text())
    rows = (row for block in blocks for row in block.replace("\\\n", " ").splitlines())
    return [command for row in rows if (command := row.strip().removeprefix("$ "))]


def arguments(command: str) -> list[str]:
    """Words after ``zeromon``, up to what only the shell or the launch command reads."""
    words = shlex.split(command, comments=True)[1:]
    ends = [n for n, word in enumerate(words) if word in SHELL_WORDS]
    if words[0] == "check" and "--" in words:
        ends.append(words.index("--"))
    return words[: min(ends, default=len(words))]


def test_the_pages_have_commands() -> None:
    """A pattern that finds none would pass the test below."""
    found = [command for page in PAGES for command in commands(page) if command.startswith("zeromon ")]
    assert len(found) > 80


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_every_command_of_a_page_can_be_typed(page: Path, capsys: pytest.CaptureFixture[str]) -> None:
    wrong = []
    for command in commands(page):
        if command.startswith("zeromon "):
            words = arguments(command)
            try:
                build_parser(words[0]).parse_args(words)
            except SystemExit as ended:
                if ended.code:  # --help and --version end with 0
                    wrong.append(f"{command}: {capsys.readouterr().err}")
        scripts = re.findall(r"(?<![/\w])examples/[\w./-]*\w", command)
        wrong += [path for path in scripts if not (ROOT / path).exists()]
    assert wrong == []


@pytest.mark.parametrize("page", [page for page in PAGES if page.parent.name == "tutorials"])
def test_a_shell_can_read_a_tutorial(page: Path) -> None:
    subprocess.run(["bash", "-n"], input="\n".join(commands(page)), text=True, check=True)


def test_the_readme_is_short() -> None:
    """It shows an answer as the tutorial has it, and leaves the rest to the pages."""
    readme = (ROOT / "README.md").read_text()
    assert readme.count("\n") <= 120
    tutorial = (ROOT / "docs" / "tutorials" / "out-of-memory.md").read_text()
    [answer] = re.findall(r"^```text\n(.*?)^```", readme, re.MULTILINE | re.DOTALL)
    assert set(answer.splitlines()) <= set(tutorial.splitlines())
