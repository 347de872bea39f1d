"""What the virtual devices of a rank did: each operation, as the device itself writes it."""

from __future__ import annotations

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
    """Of a collective, when the last rank came; else -1."""
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


def parse(line: str) -> Operation:
    """An operation from a line of a timeline."""
    kind, *numbers, unit, detail, name = line.rstrip("\n").split("\t")
    device, stream, correlation, enqueued, ready, start, transfer, end, size, way, *rest = map(
        int, numbers
    )
    facts = dict(word.split("=", 1) for word in detail.split())
    return Operation(
        kind, device, stream, correlation, enqueued, ready, start, transfer, end, size,
        DIRECTIONS.get(way, ""), ((rest[0], rest[1]), (rest[2], rest[3])), unit, facts, name,
    )  # fmt: skip


def read_timeline(folder: Path, process: str) -> Iterator[Operation]:
    """The operations of a *process* of the run in *folder*: ``RANK-PID``, or ``RANK-*`` for all.

    A process that was killed leaves half a line.
    """
    for path in sorted((folder / "timeline").glob(f"{process}.tsv")):
        with path.open() as lines:
            yield from (parse(line) for line in lines if line.endswith("\n"))


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

    *steps*: when the host began and ended each, in their order; the first only begins the count. None
    where fewer than two have operations.
    """
    ends = [_last_end(operations, start, end) for start, end in steps]
    kinds = []
    for kind in (0, 1):
        compute = union(op.unhindered[kind] for op in operations if op.computes)
        sent = union(op.unhindered[kind] for op in operations if op.kind == "collective")
        exposed = subtract(sent, compute)
        windows = [
            (before[kind], after[kind])
            for before, after in pairwise(ends)
            if before is not None and after is not None
        ]
        if not windows:
            return None
        kinds.append(
            StepTime(
                median(end - start for start, end in windows),
                median(length(clip(sent, *window)) for window in windows),
                median(length(clip(exposed, *window)) for window in windows),
            )
        )
    return kinds[0], kinds[1]


def _last_end(operations: Sequence[Operation], start: int, end: int) -> tuple[int, int] | None:
    """The last end of what the host enqueued from *start* to *end*, for both kinds of host."""
    inside = [op.unhindered for op in operations if start <= op.enqueued < end]
    return (max(u[0][1] for u in inside), max(u[1][1] for u in inside)) if inside else None
