"""Ten simulated hours of two ranks with every pause that is expected alarm nobody; a stall then does.

The detector, the fold's reading of a stack, and the rules are the real ones. The clock, the process
group, the Flight Recorder and the stack are simulated, second by second.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
from builders import changed, rank, run, summary

from zeromon.diagnosis.hangs import as_member, hangs_of
from zeromon.diagnosis.rules.health import collective_in_flight, stalled
from zeromon.fold.summarize import expected_pause_reason
from zeromon.snapshot import RankSnapshot, RunSnapshot
from zeromon.snapshot.communication import GroupProgress, InFlight
from zeromon.snapshot.levels import STALL_SECONDS, STALL_STEPS, Severity
from zeromon_agents.hooks.process_groups import Group
from zeromon_agents.observe import stall_detector
from zeromon_agents.observe.stall_detector import StallDetector

SECOND = 1_000_000_000
HOURS = 10
TRAINS = ("/home/me/train.py:40 in <module>",)
SAVES = (*TRAINS, "/x/site-packages/torch/serialization.py:943 in save")
COMPILES = (*TRAINS, "/x/site-packages/torch/_dynamo/convert_frame.py:1 in compile")
DEBUGS = (*TRAINS, "/usr/lib/python3.11/pdb.py:1700 in interaction")


class Doing(NamedTuple):
    """What both ranks do for some seconds."""

    seconds: float
    steps: int = 0
    """Steps that end within, evenly."""
    collectives: bool = False
    """Whether collectives go on."""
    stack: tuple[str, ...] = TRAINS
    """Rank 0's."""
    evaluates: bool = False
    waits: bool = False
    """Whether rank 1 waits for rank 0 in a collective."""


def day(pick: random.Random) -> Iterator[Doing]:
    """What a long training does, for ever."""
    step = pick.choice((0.05, 0.3, 1.0, 4.0, 20.0))
    while True:
        for _ in range(pick.randint(20, 120)):
            slow = pick.choice((3.0, 2.0)) if pick.random() < 0.02 else 1.0
            took = step * slow * pick.lognormvariate(0, 0.2)
            yield Doing(took, steps=1, collectives=took > 2)
        yield pick.choice(
            (
                Doing(pick.uniform(20, 600), collectives=True, evaluates=True),
                Doing(pick.uniform(20, 600), evaluates=True),
                Doing(pick.uniform(20, 300), stack=SAVES),
                Doing(pick.uniform(20, 300), stack=SAVES, waits=True),
                Doing(pick.uniform(20, 120), stack=COMPILES),
                Doing(pick.uniform(20, 120), stack=COMPILES, waits=True),
                Doing(pick.uniform(20, 600), stack=DEBUGS, waits=True),
                Doing(pick.uniform(5, 12)),
            )
        )


class Rank:
    """A rank whose agent is asked once a second."""

    def __init__(self, number: int) -> None:
        self.number, self.sequence, self.metadata = number, 1, {}  # type: ignore[var-annotated]
        self.stack: tuple[str, ...] = TRAINS
        self.evaluates = self.waits = False
        self.issued_ns = self.progress_ns = 0
        self.ends: list[int] = []
        pg = SimpleNamespace(_get_sequence_number_for_group=lambda: self.sequence, group_name="world")
        self.group = Group(1, lambda: pg, size=2, on_device=False, base=0)
        self.context: Any = SimpleNamespace(
            step=1, phase=0, ring=SimpleNamespace(write=lambda *_: None),
            add_metadata=self.metadata.update,
        )  # fmt: skip
        collectives: Any = SimpleNamespace(groups={1: self.group})
        self.detector = StallDetector(self.context, collectives, lambda: self.evaluates, attached=False)

    def snapshot(self, base: RankSnapshot) -> RankSnapshot:
        """The rank as the collector would show it."""
        stack = tuple(self.metadata.get("stack", ()))
        flying = InFlight(
            op="all_reduce", group="world", group_id="w", sequence=self.sequence, unit="",
            phase="other", nbytes=64, issued_ns=self.issued_ns,
        )  # fmt: skip
        recent = tuple(
            summary(n, start_ns=b, end_ns=e)
            for n, (b, e) in enumerate(zip(self.ends[-9:], self.ends[-8:], strict=False))
        )
        seconds = sorted((s.end_ns - s.start_ns) / 1e9 for s in recent)
        pause = expected_pause_reason(stack, evaluating=bool(self.metadata.get("evaluating")))
        return changed(
            base, rank=self.number, stack=stack, pause=pause, recent=recent,
            median_seconds=seconds[len(seconds) // 2] if seconds else None,
            in_flight=(flying,) if self.waits else (), progress_ns=self.progress_ns,
            groups=(GroupProgress(group_id="w", label="world", ranks=(0, 1), sequence=self.sequence),),
        )  # fmt: skip


class Simulation:
    """Two ranks, a clock, and what the rules say each second."""

    def __init__(self, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
        self.ranks = [Rank(0), Rank(1)]
        self.now = 0.0
        self._asked: Rank | None = None
        self._doing = day(random.Random(seed))
        self._base, self._run = rank(0), run(rank(0))
        clock = SimpleNamespace(monotonic_ns=self._now_ns, time_ns=self._now_ns)
        monkeypatch.setattr(stall_detector, "time", clock)
        monkeypatch.setattr(stall_detector, "in_flight", lambda _: {})
        monkeypatch.setattr(stall_detector, "main_stack", lambda: list(self._asked.stack))  # type: ignore[union-attr]

    def _now_ns(self) -> int:
        return round(self.now * SECOND)

    def alarms(self, seconds: float) -> list[str]:
        """The critical findings of the next seconds."""
        until, found = self.now + seconds, []
        while self.now < until:
            found += self.during(next(self._doing))
        return found

    def during(self, doing: Doing) -> list[str]:
        """The critical findings while both ranks do something."""
        began, found = self.now, []
        first, second = self.ranks
        first.stack, first.evaluates = doing.stack, doing.evaluates
        second.stack, second.evaluates = TRAINS, doing.evaluates
        if not doing.waits:
            second.stack = doing.stack
        else:
            second.waits, second.issued_ns = True, self._now_ns()
            second.sequence += 1
        end = began + doing.seconds
        while self.now < end:
            tick = min(end, float(int(self.now) + 1))
            self.now = tick
            if doing.collectives:
                first.sequence += 1
                second.sequence += 1
            if tick == int(tick):
                found += self._ask()
        if second.waits:
            second.waits, second.progress_ns = False, self._now_ns()
        second.sequence = first.sequence = max(first.sequence, second.sequence)
        for one in self.ranks if doing.steps else ():
            one.ends.append(self._now_ns())
            one.progress_ns = self._now_ns()
            one.context.step += doing.steps
            one.sequence += 1
        return found

    def _ask(self) -> list[str]:
        for one in self.ranks:
            self._asked = one
            one.detector.check()
        ranks = tuple(one.snapshot(self._base) for one in self.ranks)
        now: RunSnapshot = replace(self._run, ranks=ranks, taken_ns=self._now_ns())
        now = replace(now, hangs=hangs_of(map(as_member, ranks), now.taken_ns))
        matches = [(m, Severity.CRITICAL) for m in stalled(now)]
        matches += [(m, Severity.CRITICAL) for m in collective_in_flight(now)]
        return [m.text for m, usual in matches if (m.severity or usual) is Severity.CRITICAL]


@pytest.mark.parametrize(
    "seed", [*range(3), *(pytest.param(seed, marks=pytest.mark.long) for seed in range(3, HOURS))]
)
def test_an_hour_of_expected_pauses_alarms_nobody_and_a_stall_is_seen(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps of 50 ms to 20 s, evaluations, checkpoints, compilations, a debugger, slow batches."""
    simulated = Simulation(seed, monkeypatch)
    assert simulated.alarms(3600) == []
    for _ in range(3):  # a stall begins after a step
        simulated.during(Doing(1.0, steps=1))
    began, step = simulated.now, simulated.ranks[0].snapshot(simulated._base).steps.median_seconds or 0.0
    limit = STALL_SECONDS + STALL_STEPS * step
    assert simulated.during(Doing(limit - 2)) == []
    assert simulated.during(Doing(5.0)), (began, limit)


def test_after_many_stalls_no_rank_keeps_the_stack_of_one_that_is_over(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The name table holds each stack that is written, so their number has a limit."""
    simulated = Simulation(0, monkeypatch)
    for line in range(60):
        simulated.during(Doing(8.0, stack=(f"/home/me/train.py:{line} in <module>",)))
        for _ in range(4):
            simulated.during(Doing(1.0, steps=1))
        assert [one.metadata["stack"] for one in simulated.ranks] == [[], []], line
