"""The operations of the virtual devices of a rank, as the device itself writes them."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median

from zeromon_vgpu.intervals import clip, length, subtract, union

DIRECTIONS = {1: "to device", 2: "to host", 3: "on device"}


@dataclass(frozen=True, slots=True)
class Operation:
    """One operation of a stream. Times are nanoseconds of CLOCK_MONOTONIC."""

    kind: str
    """``kernel``, ``collective``, ``copy``, ``fill``, ``wait``, ``host`` or ``mark``."""
    device: int
    stream: int
    correlation: int
    enqueued: int
    ready: int
    """When the stream had come to it: a wait lasts from here to ``end``."""
    start: int
    transfer: int
    """The arrival of the last rank of a collective; else -1."""
    end: int
    bytes: int
    direction: str
    unhindered: tuple[tuple[int, int], tuple[int, int]]
    """Start and end with a host that is always ahead, and with one that takes its time; from 0 on."""
    unit: str
    detail: dict[str, str]
    name: str

    @property
    def span(self) -> tuple[int, int]:
        """Start and end."""
        return self.start, self.end

    @property
    def computes(self) -> bool:
        """Kernels, fills and copies within the device; copies to and from the host are none."""
        return self.kind in ("kernel", "fill") or self.direction == "on device"


def parse_operation(row: str) -> Operation:
    """An operation from a line of a timeline."""
    kind, *numbers, unit, detail, name = row.rstrip("\n").split("\t")
    n = [int(number) for number in numbers]
    facts = dict(pair.split("=", 1) for pair in detail.split())
    return Operation(
        kind, n[0], n[1], n[2], n[3], n[4], n[5], n[6], n[7], n[8], DIRECTIONS.get(n[9], ""),
        ((n[10], n[11]), (n[12], n[13])), unit, facts, name,
    )  # fmt: skip


def read_timeline(folder: Path, process: str) -> Iterator[Operation]:
    """The operations of a *process* of the run in *folder*: ``RANK-PID``, or ``RANK-*`` for all.

    A process that was killed leaves half a line.
    """
    for path in sorted((folder / "timeline").glob(f"{process}.tsv")):
        with path.open() as rows:
            yield from (parse_operation(row) for row in rows if row.endswith("\n"))


@dataclass(frozen=True, slots=True)
class StepTime:
    """The median step of a rank, in nanoseconds, for one kind of host."""

    span: float
    communication: float
    exposed: float
    """The part of it in which nothing is computed."""


def unhindered_steps(
    operations: Sequence[Operation], steps: Sequence[tuple[int, int]]
) -> tuple[StepTime, StepTime] | None:
    """The steps of a rank with a host that is always ahead, and with one that takes its time.

    *steps*: when each began and ended on the device, in order; the first only begins the count. None
    where fewer than two have operations.
    """
    finishes = [_last_finish(operations, start, stop) for start, stop in steps]
    kinds = []
    for kind in (0, 1):
        compute = union(op.unhindered[kind] for op in operations if op.computes)
        sent = union(op.unhindered[kind] for op in operations if op.kind == "collective")
        exposed = subtract(sent, compute)
        windows = [
            (previous[kind], this[kind])
            for previous, this in pairwise(finishes)
            if previous is not None and this is not None
        ]
        if not windows:
            return None
        kinds.append(
            StepTime(
                median(stop - start for start, stop in windows),
                median(length(clip(sent, *window)) for window in windows),
                median(length(clip(exposed, *window)) for window in windows),
            )
        )
    return kinds[0], kinds[1]


def _last_finish(operations: Sequence[Operation], start: int, stop: int) -> tuple[int, int] | None:
    """The last end of what began from *start* to *stop*, for both kinds of host."""
    inside = [op.unhindered for op in operations if start <= op.start < stop]
    return (max(u[0][1] for u in inside), max(u[1][1] for u in inside)) if inside else None


def uncovered_nanoseconds(operations: Sequence[Operation], kind: int) -> Iterator[tuple[Operation, int]]:
    """The collectives, each with how long nothing is computed while it runs.

    *kind*: 0 for a host that is always ahead, 1 for one that takes its time.
    """
    compute = union(op.unhindered[kind] for op in operations if op.computes)
    for op in operations:
        if op.kind == "collective":
            start, finish = op.unhindered[kind]
            nearest = max(0, bisect_right(compute, (start, start)) - 1)
            nearby = compute[nearest : bisect_right(compute, (finish, finish))]
            yield op, length(subtract([(start, finish)], nearby))
