"""The end of a process's standard output, where that is a file."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from zeromon.base.errors import SourceError
from zeromon.probes.process import MAX_OUTPUT_BYTES, read_output_tail

SAYS = "import sys; print({!r}); sys.stdout.flush(); sys.stdin.read()"


def running(text: str, out: object) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-c", SAYS.format(text)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=out)  # type: ignore[call-overload, no-any-return]


def until_written(path: Path) -> None:
    while not path.stat().st_size:
        os.sched_yield()


def test_the_end_of_a_file_is_read(tmp_path: Path) -> None:
    path = tmp_path / "train.log"
    with path.open("w") as file, running("step 1 \u2713\nstep 2", file) as process:
        until_written(path)
        assert read_output_tail(process.pid) == (str(path), ("step 1 \u2713", "step 2"))
        process.communicate()


def test_of_a_long_file_only_whole_last_lines_are_read(tmp_path: Path) -> None:
    path = tmp_path / "train.log"
    path.write_text("".join(f"line {n} {'x' * 100}\n" for n in range(2_000)))
    with path.open("a") as file, running("the end", file) as process:
        while not path.read_text().endswith("the end\n"):
            os.sched_yield()
        _, lines = read_output_tail(process.pid)
        process.communicate()
    assert lines[-1] == "the end" and lines[0].startswith("line ")
    assert sum(len(line) + 1 for line in lines) <= MAX_OUTPUT_BYTES


def test_a_pipe_and_a_process_that_is_gone_are_said() -> None:
    with running("x", subprocess.PIPE) as process:
        with pytest.raises(SourceError, match="goes to a pipe, which keeps nothing"):
            read_output_tail(process.pid)
        process.communicate()
    with pytest.raises(SourceError, match="cannot be read"):
        read_output_tail(process.pid)
