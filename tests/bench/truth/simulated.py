"""Ranks that are simulated to the nanosecond: what they write into their rings, and what is true of it.

Each rank issues collectives in order and waits for each one after it has issued the next, so that two
are in flight at once. A collective ends some time after its last member arrived. Rank 2 comes later than
the others, and the device memory of rank 0 grows. All times are integers of a seeded generator; the
truth is arithmetic on them, one sweep over starts and ends.
"""

from __future__ import annotations

import os
import random
import statistics
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

from scores import Case, Truth, Values

from zeromon.ring.buffer import NameKind, RingWriter
from zeromon.ring.codes import Dtype, Flag, Kind, Op, Phase
from zeromon.ring.events import pack_head, pack_place

RANKS, STEPS, WINDOW = 3, 120, 20
A_PHASE = 6
"""Collectives of each, forward and backward."""
MIB = 1 << 20
CAPACITY, GROWTH, USED = 80 << 30, 160 * MIB, 30 << 30
RESERVED_MORE, NON_TORCH = 512 * MIB, 1024 * MIB
RSS = 3000 * MIB

Span = tuple[int, int]


class Collective(NamedTuple):
    """One collective as one rank sees it."""

    issued: int
    reached: int
    """When the rank begins to wait for it."""
    end: int
    phase: Phase


class Step:
    """One step of one rank."""

    def __init__(self, start: int) -> None:
        self.start = self.end = start
        self.collectives: list[Collective] = []
        self.phases: dict[Phase, Span] = {}

    @property
    def blocked(self) -> list[Span]:
        """When the rank stood still."""
        return [(c.reached, c.end) for c in self.collectives if c.end > c.reached]


def covered(spans: Iterable[Span]) -> int:
    """The length of what *spans* cover, by one sweep."""
    edges = sorted(edge for start, end in spans for edge in ((start, 1), (end, -1)))
    total = inside = before = 0
    for at, change in edges:
        total += at - before if inside else 0
        inside, before = inside + change, at
    return total


class Simulation:
    """The steps of all ranks, by the seed alone."""

    def __init__(self, seed: int, began: int) -> None:
        self._random = random.Random(seed)
        self._now = [began] * RANKS
        self.steps: list[list[Step]] = [[] for _ in range(RANKS)]
        self.arrivals: list[list[list[int]]] = []
        """Step -> collective -> when each rank issued it."""
        for _ in range(STEPS):
            self._step()

    def _compute(self, least_us: int, most_us: int) -> None:
        for rank in range(RANKS):
            late = self._random.randrange(2_000_000) if rank == 2 else 0
            self._now[rank] += self._random.randrange(least_us * 1000, most_us * 1000) + late

    def _step(self) -> None:
        steps = [Step(now) for now in self._now]
        self.arrivals.append([])
        self._phase(steps, Phase.DATA_WAIT, lambda: self._compute(500, 4000))
        self._compute(10, 100)  # time of no phase
        for phase in (Phase.FORWARD, Phase.BACKWARD):
            self._phase(steps, phase, lambda phase=phase: self._communicate(steps, phase))
        self._phase(steps, Phase.OPTIMIZER, lambda: self._compute(1000, 6000))
        for rank, step in enumerate(steps):
            step.end = self._now[rank]
            self.steps[rank].append(step)

    def _phase(self, steps: list[Step], phase: Phase, body: Callable[[], None]) -> None:
        begins = list(self._now)
        body()
        for step, begin, end in zip(steps, begins, self._now, strict=True):
            step.phases[phase] = begin, end

    def _communicate(self, steps: list[Step], phase: Phase) -> None:
        before: tuple[list[int], int] | None = None
        for _ in range(A_PHASE):
            self._compute(200, 2500)
            issued = list(self._now)
            if before:
                self._compute(0, 1500) if self._random.random() < 0.7 else None
                self._wait(steps, phase, *before)
            before = issued, max(issued) + self._random.randrange(300_000, 4_000_000)
        assert before is not None
        self._wait(steps, phase, *before)

    def _wait(self, steps: list[Step], phase: Phase, issued: list[int], end: int) -> None:
        self.arrivals[-1].append((issued, list(self._now)))
        for rank, step in enumerate(steps):
            reached = self._now[rank]
            step.collectives.append(Collective(issued[rank], reached, end, phase))
            self._now[rank] = max(reached, end)

    # ---- what is true -----------------------------------------------------------------------------

    def case(self, seed: int) -> Case:
        """The figures of the first screen, by arithmetic."""
        last = [steps[-WINDOW:] for steps in self.steps]
        times = [[step.end - step.start for step in steps] for steps in last]
        exposed = [[covered(step.blocked) for step in steps] for steps in last]
        spent = [sum(row) for row in times]
        busy = [
            sum(covered((c.issued, c.end) for c in step.collectives) for step in steps) for steps in last
        ]
        memory = [self.allocated(rank, STEPS) + RESERVED_MORE for rank in range(RANKS)]
        truths = {
            "steps": _counted([len(steps) for steps in self.steps]),
            "step": _seconds([statistics.fmean(row) for row in times]),
            "exposed": _ratios([sum(e) / s for e, s in zip(exposed, spent, strict=True)]),
            "exposed_seconds": _seconds([sum(row) / WINDOW for row in exposed]),
            "overlap": _ratios([1 - sum(e) / b for e, b in zip(exposed, busy, strict=True)]),
            "late": _seconds([self._a_step(self._late, rank) for rank in range(RANKS)]),
            "waits": _seconds([self._a_step(self._waiting, rank) for rank in range(RANKS)]),
            "memory": _bytes(memory),
            "headroom": _bytes([CAPACITY - NON_TORCH - used for used in memory]),
            "risk": _ratios([self._risk(rank) for rank in range(RANKS)]),
            "chart step-time": _series([[ns / 1e9 for ns in row] for row in times], "s"),
            "chart exposed": _series([[ns / 1e9 for ns in row] for row in exposed], "s"),
            "chart memory": _series([
                [self.allocated(rank, STEPS - WINDOW + n + 1) + RESERVED_MORE for n in range(WINDOW)]
                for rank in range(RANKS)
            ], "bytes"),
        }  # fmt: skip
        for part, values in self._parts(last).items():
            truths[f"part {part}"] = _seconds(values)
        step = statistics.median(ns for row in times for ns in row) / 1e9
        return Case(f"simulated {seed}", step, truths)

    def _parts(self, last: list[list[Step]]) -> dict[str, list[float]]:
        """Nanoseconds a step of each rank: the phases without waiting, and the waiting."""
        sums: dict[str, list[float]] = {}
        for rank, steps in enumerate(last):
            mine = dict.fromkeys(("exposed", *(phase.label for phase in Phase)), 0.0)
            for step in steps:
                rest = step.end - step.start
                for phase, (start, end) in step.phases.items():
                    waits = sum(c.end - c.reached for c in step.collectives
                                if c.phase is phase and c.end > c.reached)  # fmt: skip
                    mine[phase.label] = mine.get(phase.label, 0.0) + end - start - waits
                    mine["exposed"] += waits
                    rest -= end - start
                mine["other"] += rest
            for part, spent in mine.items():
                sums.setdefault(part, [0.0] * RANKS)[rank] = spent / len(steps)
        return sums

    def _a_step(self, spans: Callable[[int, list[int], list[int]], Span | None], rank: int) -> float:
        """Nanoseconds a step, over the last steps: what the spans of its collectives cover."""
        return statistics.fmean(
            covered(span for times in step if (span := spans(rank, *times)) and span[0] < span[1])
            for step in self.arrivals[-WINDOW:]
        )

    @staticmethod
    def _late(rank: int, issued: list[int], reached: list[int]) -> Span | None:
        """Where *rank* is the last: since all others arrived, and the first of them began to wait."""
        order = sorted(issued)
        others = [at for other, at in enumerate(reached) if other != rank]
        return (max(order[-2], min(others)), order[-1]) if issued[rank] == order[-1] else None

    @staticmethod
    def _waiting(rank: int, issued: list[int], reached: list[int]) -> Span | None:
        return reached[rank], max(issued)

    @staticmethod
    def allocated(rank: int, step: int) -> int:
        """Device bytes after so many steps: those of rank 0 grow."""
        return USED + GROWTH * step * (rank == 0)

    def _risk(self, rank: int) -> float:
        """docs/decisions/012: growth that needs n steps for the rest is 1 - n / 2000, n <= 1000."""
        if rank:
            return 0.0
        used = self.allocated(0, STEPS)
        steps_left = (CAPACITY - NON_TORCH - used) / GROWTH
        return 1 - steps_left / 2000 if steps_left <= 1000 else 500 / steps_left

    # ---- the rings --------------------------------------------------------------------------------

    def write(self, folder: Path) -> None:
        """The rings of all ranks, as the agents would write them."""
        for rank, steps in enumerate(self.steps):
            ring = RingWriter(folder / f"rank{rank}.{os.getpid()}.ring", rank=rank, capacity=1 << 14)
            meta = {"rank": rank, "local_rank": rank, "world_size": RANKS, "strategy": "fsdp2"}
            ring.name(NameKind.META, {**meta, "device": f"cuda:{rank}"})
            members = {"label": "world", "size": RANKS, "ranks": list(range(RANKS))}
            group = ring.name(NameKind.GROUP, members)
            sequence = 0
            for number, step in enumerate(steps, 1):
                for at, words in sorted(self._records(step, group, sequence), key=lambda r: r[0]):
                    ring.write(at, *words)
                sequence += len(step.collectives)
                used = self.allocated(rank, number)
                free = CAPACITY - NON_TORCH - used - RESERVED_MORE
                held = (used, used, used + RESERVED_MORE, 0)
                ring.write(step.end, pack_head(Kind.MEMORY), 0, *held)
                ring.write(step.end, pack_head(Kind.MEMORY_PEAK), 0, 0, 0, free, CAPACITY)
                ring.write(step.end, pack_head(Kind.HOST), 0, RSS, 1 << 40, 0, 0)
                ring.write(step.end, pack_head(Kind.STEP), 0, number, step.start, 1, 0)

    @staticmethod
    def _records(step: Step, group: int, sequence: int) -> list[tuple[int, tuple[int, ...]]]:
        records = []
        for phase, (start, end) in step.phases.items():
            records.append((end, (pack_head(Kind.PHASE, 0, phase), 0, start, 0, 0, 0)))
        for c in step.collectives:
            sequence += 1
            issued = pack_head(Kind.ISSUED, Op.ALL_REDUCE, c.phase)
            done = pack_head(Kind.DONE, Op.ALL_REDUCE, c.phase, Flag.SPAN_KNOWN)
            at, blocked = pack_place(group), max(0, c.end - c.reached)
            records.append((c.issued, (issued, at, MIB, sequence, Dtype.FLOAT32, 0)))
            records.append((c.end, (done, at, MIB, c.issued, blocked, sequence)))
        return records


def simulation(seed: int) -> Simulation:
    """The steps of *seed*, the last of which has just ended."""
    length = Simulation(seed, 0).steps[0][-1].end
    return Simulation(seed, time.monotonic_ns() - length)


_SOURCE = "arithmetic"


def _values(values: Iterable[float | None]) -> Values:
    return {rank: [value] for rank, value in enumerate(values)}


def _counted(values: Iterable[float]) -> Truth:
    return Truth(_values(values), "", _SOURCE)


def _bytes(values: Iterable[float]) -> Truth:
    return Truth(_values(values), "bytes", _SOURCE)


def _ratios(values: Iterable[float]) -> Truth:
    return Truth(_values(values), "ratio", _SOURCE)


def _seconds(nanoseconds: Iterable[float]) -> Truth:
    return Truth(_values(ns / 1e9 for ns in nanoseconds), "s", _SOURCE)


def _series(values: list[list[float]], unit: str) -> Truth:
    return Truth(dict(enumerate(values)), unit, _SOURCE)
