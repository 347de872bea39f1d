"""A training job that never loaded zeromon, for the tests and the benchmark of attach."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from support import PROGRAMS, ROOT, clean_environment, train_command, wait_for

from zeromon.attach.inject.parked import read_mappings
from zeromon.attach.rank_processes import Process, ranks_of, running_processes


class Job:
    """tests/programs/joined.py on two ranks, or on one process without a group."""

    def __init__(
        self, kind: str, out: Path, *arguments: str, around: Sequence[str] = (), **environment: str
    ) -> None:
        self.out = out
        out.mkdir(parents=True, exist_ok=True)
        program, words = "joined.py", [kind, str(out), *arguments]
        command = (
            [sys.executable, str(PROGRAMS / program), *words]
            if kind == "plain"
            else train_command(2, *words, program=program)
        )
        self.log = out / "log"
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                [*around, *command],
                env=clean_environment() | {"DS_ACCELERATOR": "cpu", **environment},
                cwd=ROOT,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    @property
    def step(self) -> int:
        """About how far it is."""
        with suppress(OSError, ValueError):
            return int((self.out / "step").read_text())
        return 0

    def wait_until(self, step: int) -> None:
        """Until it has come to *step*."""
        wait_for(lambda: self.step >= step or self.process.poll() is not None)
        assert self.alive, self.log.read_text()

    @property
    def alive(self) -> bool:
        return self.process.poll() is None

    def ranks(self) -> list[Process]:
        """Its ranks, as attach finds them."""
        return ranks_of(self.process.pid, running_processes())

    def finish(self, timeout: float = 120.0) -> list[dict[str, Any]]:
        """Lets it end; what each rank says."""
        partial = self.out / ".stop"
        partial.write_text(str(self.step + 60))
        partial.rename(self.out / "stop")
        code = self.process.wait(timeout=timeout)
        assert code == 0, self.log.read_text()
        paths = sorted(self.out.glob("*.json"))
        return [json.loads(path.read_text()) for path in paths]

    def kill(self) -> None:
        """Ends it, whatever state it is in."""
        if self.alive:
            with suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGTERM)
            try:
                self.process.wait(timeout=10)
            except subprocess.TimeoutExpired:
                os.killpg(self.process.pid, signal.SIGKILL)
                self.process.wait(timeout=10)
        for rank in self._left_over():
            with suppress(ProcessLookupError):
                os.kill(rank, signal.SIGKILL)

    def _left_over(self) -> list[int]:
        """Ranks have sessions of their own, and a launcher that was killed leaves them."""
        wanted = str(self.out)  # of this job alone: nobody else's command names this folder
        return [
            p.pid for p in running_processes().values() if wanted in p.command and p.pid != os.getpid()
        ]


def code_of(pid: int) -> int:
    """Bytes that are mapped executable: what an injection must not add to."""
    return sum(m.end - m.start for m in read_mappings(pid) if "x" in m.mode)


# ---- targets without torch ---------------------------------------------------------------------------

BUSY = """
UP
while True:
    x = 0.0
    for i in range(1000):
        x += i * 0.25
    assert x == 124875.0, x
"""
SLEEPS = "import time\nUP\nwhile True: time.sleep(0.05)"


@contextmanager
def running(code: str, *before: str, python: str = sys.executable) -> Iterator[subprocess.Popen[str]]:
    """A Python that runs *code*, from where it says UP."""
    process = subprocess.Popen(
        [*before, python, "-c", code.replace("UP", "print('up', flush=True)")],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "up\n", process.stderr and process.stderr.read()
        yield process
    finally:
        process.kill()
        process.communicate()


def line(code: str) -> str:
    """*code* as a line that never raises."""
    body = code.replace("\n", "\n ")
    text = f"try:\n {body}\nexcept BaseException:\n pass"
    return f"exec({text!r},{{}})"


def writes(sign: Path) -> str:
    return line(f"f=open({str(sign)!r},'a')\nf.write('x')\nf.close()")


def has_run(sign: Path, times: int) -> Callable[[], bool]:
    return lambda: sign.exists() and len(sign.read_text()) >= times
