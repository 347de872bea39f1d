"""The tutorials are followed: their commands run, and print what the pages show.

`plan` and `rule` are carried out, the first run is trained, and the other trainings are followed in
``make test-long``, where the page of an out-of-memory needs root. ``test_commands.py`` has the rest.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from support import ROOT

from zeromon.cli import main

FOLDER = ROOT / "docs" / "tutorials"
PAGES = {page.stem: page.read_text() for page in sorted(FOLDER.glob("*.md"))}
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```", re.MULTILINE | re.DOTALL)
MAX_WORDS = 900
CGROUP = Path("/sys/fs/cgroup/memory")
VIRTUAL = ROOT / "build" / "vgpu" / "torch-2.13.0"
INSTALLED = ("python3 -m venv", ". try/", "pip ", "make vgpu")
"""Beginnings of the commands that make the environment, which a test has already."""


def commands(text: str) -> list[str]:
    """Every line of the blocks that a reader types."""
    return [
        line for kind, block in BLOCK.findall(text) if kind == "console" for line in block.splitlines()
    ]


def output_after(text: str, command: str) -> list[str]:
    """Rows that the page shows below the block with *command*, without those that it leaves out."""
    blocks = BLOCK.findall(text)
    at = next(n for n, (kind, block) in enumerate(blocks) if kind == "console" and command in block)
    kind, block = blocks[at + 1]
    assert kind == "text"
    return [row for row in block.splitlines() if row not in ("", "...")]


ALL = sorted({(page, command) for page, text in PAGES.items() for command in commands(text)})


@pytest.mark.parametrize("page", PAGES)
def test_a_tutorial_is_short(page: str) -> None:
    assert len(PAGES[page].split()) <= MAX_WORDS


WITHOUT_A_RUN = [
    (page, command) for page, command in ALL if command.startswith(("zeromon plan ", "zeromon rule "))
]


@pytest.mark.parametrize(("page", "command"), WITHOUT_A_RUN)
def test_a_command_without_a_run_prints_what_the_page_shows(
    page: str, command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(shlex.split(command)[1:]) == 0
    printed = capsys.readouterr().out.splitlines()
    assert set(output_after(PAGES[page], command)) <= set(printed)


FINDERS = ("zeromon report", "zeromon preflight")
[KILLED] = [command for _, command in ALL if "leak.py" in command and "--item" not in command]


class Reader:
    """A shell in the folder of the repository, with a store of its own."""

    def __init__(self, store: Path, rings: Path) -> None:
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        self._variables = {**os.environ, "PATH": path, "ZEROMON_STORE": str(store),
                           "ZEROMON_DIR": str(rings)}  # fmt: skip
        self._exports: list[str] = []

    def follow(self, text: str) -> dict[str, str]:
        """Types every command of *text*; returns what each has printed to stdout."""
        printed: dict[str, str] = {}
        for command in commands(text):
            if "export " in command:
                self._exports.append(command)
            elif not command.startswith(INSTALLED):
                done = self._type(command)
                printed[command] = done.stdout
                # 1 are findings; a training that is killed has the code of torchrun
                findings = done.returncode == 1 and command.startswith(FINDERS)
                ends_well = done.returncode == 0 or findings or command == KILLED
                assert ends_well, f"{command}\n{done.stdout}{done.stderr}"
        return printed

    def _type(self, command: str) -> subprocess.CompletedProcess[str]:
        script = "\n".join((*self._exports, command))
        return subprocess.run(
            ["bash", "-c", script], cwd=ROOT, env=self._variables, capture_output=True, text=True,
            timeout=300, check=False,
        )  # fmt: skip


@pytest.fixture
def reader(tmp_path: Path) -> Reader:
    return Reader(tmp_path / "store", tmp_path / "rings")


@pytest.mark.trains
def test_the_first_run_is_followed(reader: Reader) -> None:
    """The report has the parts that the page explains; its losses are those of the page."""
    text = PAGES["first-run"]
    printed = reader.follow(text)
    [trained] = [out for command, out in printed.items() if command.startswith("zeromon run ")]
    losses = {
        row.rsplit("  ", 1)[0] for row in output_after(text, "zeromon run ") if row.startswith("step")
    }
    assert losses <= {row.rsplit("  ", 1)[0] for row in trained.splitlines()}
    for command in ("zeromon report first", "zeromon report"):
        report = printed[command]
        assert report.startswith("run first: finished after 200 steps\n")
        questions = [
            row.split("?")[0] for row in output_after(text, "zeromon report first") if "?" in row
        ]
        assert len(questions) == 3
        assert all(f"\n{question}?" in report for question in questions)
    assert re.search(r"^  first +finished ", printed["zeromon runs"], re.MULTILINE)


@pytest.mark.long
def test_the_slow_run_is_found_and_proven(reader: Reader) -> None:
    printed = reader.follow(PAGES["slow-run"])
    before = printed["zeromon report before"]
    assert "wait for the next batch; no workers prepare it" in before
    assert "+ DataLoader(data, num_workers=4, persistent_workers=True)" in before
    compared = printed["zeromon compare before after"]
    assert re.search(r"step time, median .* -[5-9]\d\.\d %\*", compared)


@pytest.mark.long
@pytest.mark.skipif(
    not (CGROUP / "memory.limit_in_bytes").exists() or os.geteuid() != 0,
    reason="needs root and a memory controller of cgroup version 1",
)
def test_the_leak_is_called_explained_and_fixed(reader: Reader) -> None:
    """The report that a reader asks while the job lives is here that of the end."""
    printed = reader.follow(PAGES["out-of-memory"])
    died = printed["zeromon report leak --full"]
    assert "killed by the kernel for host memory" in died
    assert "kept by each step" in died
    assert "ZM201" in printed["zeromon report leak"]
    assert "Will it run out of memory? no" in printed["zeromon report fixed"]


@pytest.mark.long
@pytest.mark.skipif(not VIRTUAL.exists(), reason="needs the environment of make vgpu")
def test_the_preflight_meets_the_out_of_memory_and_removes_it(reader: Reader) -> None:
    """Memory is that of torch's allocator, to the byte; the modelled step too, as no host is in it."""
    text = PAGES["preflight"]
    printed = reader.follow(text)
    preflights = [row for row in commands(text) if row.startswith("zeromon preflight ")]
    assert len(preflights) == 2
    for command in preflights:
        rows = [row for row in output_after(text, command) if row.startswith(("  ranks ", "  memory "))]
        assert len(rows) == 2
        assert set(rows) <= set(printed[command].splitlines())
