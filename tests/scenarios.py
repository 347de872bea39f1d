"""Faults of real runs, drawn at random by a seed: what befalls which rank of which strategy, and when.

Ranks are forked and several runs hang side by side, for a collective has to wait for ten seconds before
it is called a hang. A scenario is judged by the first line that the terminal view shows.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from support import LAUNCH, PROGRAMS, Node, start

from zeromon.snapshot import RunSnapshot
from zeromon.snapshot.levels import Severity
from zeromon.tui.line import plain_text
from zeromon.tui.status_text import verdict_line

STRATEGIES = ("ddp", "ddp-compiled", "fsdp1", "fsdp2", "tp", "zero1", "zero2", "zero3")
CAUSES = {
    "sleep": ("rank {rank} has not called it", "at faults.py:"),
    "loop": ("rank {rank} has not called it", "at faults.py:"),
    "exit": ("rank {rank}: ", "exit code 7|without a final record"),
    "stop": ("rank {rank} has not called it", "suspended by a signal"),
    "loader": ("rank {rank} has not called it", "DataLoader"),
    "op": ("mismatched operations", "rank {rank} called broadcast"),
    "size": ("mismatched sizes", "rank {rank} called all_reduce (128 B)"),
    "groups": ("deadlock of groups", "rank"),
    "idle": ("no step has ended", "in asleep"),
}
"""Fault -> what the first line must say; `idle` befalls all ranks."""
MOMENTS = ("forward", "backward", "optimizer")
PATIENCE_SECONDS = 90.0
SEED = 28420


class Scenario(NamedTuple):
    """A fault before *moment* of a step on a rank; see tests/programs/faults.py."""

    strategy: str
    fault: str
    step: int = 6
    moment: str = "forward"
    rank: int = 1

    @property
    def name(self) -> str:
        """For a folder and a table."""
        return f"{self.strategy}-{self.fault}-{self.step}-{self.moment}-{self.rank}"


class Outcome(NamedTuple):
    """What was said of a scenario."""

    scenario: Scenario
    seconds: float | None
    """From the fault to the first critical finding; None where there was none."""
    first_said: str
    """The first line then."""
    right_seconds: float | None
    """From the fault to a first line that names the cause and the rank; None where there was none."""
    line: str
    """The first line at last."""
    snapshot: RunSnapshot | None
    node: Node | None

    @property
    def is_right_at_once(self) -> bool:
        """Whether the first line was right as soon as a critical finding showed."""
        return _is_right(self.scenario, self.first_said)


def _is_right(scenario: Scenario, line: str) -> bool:
    words = (word.format(rank=scenario.rank) for word in CAUSES[scenario.fault])
    return all(any(text in line for text in word.split("|")) for word in words)


def drawn(count: int, seed: int = SEED) -> list[Scenario]:
    """The first *count* scenarios of a seed; the first nine of SEED have each fault and strategy."""
    pick = random.Random(seed)
    return [
        Scenario(
            pick.choice(STRATEGIES),
            pick.choice(tuple(CAUSES)),
            pick.randint(3, 9),
            pick.choice(MOMENTS),
            pick.randint(0, 1),
        )
        for _ in range(count)
    ]


class _Running:
    """A scenario that is being carried out."""

    def __init__(self, scenario: Scenario) -> None:
        self.scenario = scenario
        self.node = Node(Path(tempfile.mkdtemp(prefix="zeromon-test-")))
        self._began = time.monotonic()
        self._first: tuple[float, str] | None = None
        self._at = self.node.folder / "at"
        environment = {"FAULT_AT": str(self._at)}
        if scenario.strategy.startswith("zero"):
            environment["DS_ACCELERATOR"] = "cpu"
        words = [scenario.strategy, scenario.fault, str(scenario.step), scenario.moment]
        self._process = start(
            [*LAUNCH, "2", str(PROGRAMS / "faults.py"), *words, str(scenario.rank)],
            self.node.environment("r", **environment),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )

    def outcome(self) -> Outcome | None:
        """What is said now; None while that is not right and there is time left."""
        self.node.collector.tick()
        snapshot = self.node.snapshot("r")
        critical = snapshot is not None and any(
            finding.severity is Severity.CRITICAL for finding in snapshot.findings
        )
        line = plain_text(verdict_line(snapshot)) if snapshot is not None else ""
        after = time.monotonic() - float(text) if (text := _read(self._at)) else None
        if critical and after is not None and self._first is None:
            self._first = after, line
        right = after if self._first and _is_right(self.scenario, line) else None
        if right is None and time.monotonic() - self._began < PATIENCE_SECONDS:
            return None
        first = self._first or (None, "")
        return Outcome(self.scenario, *first, right, line, snapshot, self.node)

    def end(self) -> None:
        """Ends the training; the node stays."""
        snapshot = self.node.snapshot("r")
        for rank in snapshot.ranks if snapshot is not None else ():
            with suppress(OSError):
                os.kill(rank.pid, signal.SIGKILL)  # also a suspended one
        self._process.terminate()
        self._process.wait(60)


def outcomes(scenarios: Sequence[Scenario], at_once: int) -> Iterator[Outcome]:
    """Carries out scenarios, *at_once* at a time. The caller closes the outcome's node.

    A run goes on until the caller asks for the next outcome.
    """
    waiting, running = list(reversed(scenarios)), []  # type: ignore[var-annotated]
    try:
        while waiting or running:
            while waiting and len(running) < at_once:
                running.append(_Running(waiting.pop()))
            for one in list(running):
                outcome = one.outcome()
                if outcome is not None:
                    yield outcome
                    running.remove(one)
                    one.end()
            time.sleep(0.2)
    finally:
        for one in running:
            one.end()
            one.node.close()


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
