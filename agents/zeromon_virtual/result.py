"""What a virtual step did, as frozen data that becomes JSON."""

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from zeromon_virtual.clock import Issue, Kind
from zeromon_virtual.engine import Engine


@dataclass(frozen=True)
class ExposedRow:
    """Time that the compute stream was blocked by the collectives that one unit issued in one phase."""

    op: str
    unit: str
    phase: str
    seconds: float


@dataclass(frozen=True)
class SpanRow:
    """Work on a stream; seconds since the step began. *unit* and *phase* are those of a collective."""

    stream: str
    kind: str
    name: str
    unit: str
    phase: str
    start_seconds: float
    end_seconds: float


@dataclass(frozen=True)
class Result:
    """The last step of a run.

    On the compute stream, step = compute + exposed + other waits + idle.
    """

    step_seconds: float
    compute_seconds: float
    exposed_seconds: float
    other_wait_seconds: float
    """The compute stream waited for kernels of other streams."""
    idle_seconds: float
    """The compute stream had nothing to do: the host had not launched the next kernel yet."""
    exposed: tuple[ExposedRow, ...]
    peak_bytes: int
    """Allocated, not reserved."""
    peak_bytes_by_place: dict[str, int]
    """At the peak, by where it was allocated."""
    spans: tuple[SpanRow, ...]

    def as_json(self) -> dict[str, Any]:
        """Returns the result as JSON objects and lists."""
        return dataclasses.asdict(self)


def summarize(engine: Engine, began_ns: int, *, with_spans: bool) -> Result:
    """Returns what *engine* did since *began_ns*, when nothing was under way."""
    clock, memory = engine.clock, engine.memory
    rows = sorted((issue, ns) for issue, ns in clock.exposed_ns.items() if ns)
    exposed = sum(ns for _, ns in rows)
    of_kind = dict.fromkeys(Kind, 0)
    for work in clock.compute.schedule:
        of_kind[work.kind] += work.end_ns - work.ready_ns
    step = clock.host_ns - began_ns
    return Result(
        step_seconds=step / 1e9,
        compute_seconds=of_kind[Kind.KERNEL] / 1e9,
        exposed_seconds=exposed / 1e9,
        other_wait_seconds=(of_kind[Kind.COLLECTIVE] + of_kind[Kind.WAIT] - exposed) / 1e9,
        idle_seconds=(step - sum(of_kind.values())) / 1e9,
        exposed=tuple(ExposedRow(*issue, ns / 1e9) for issue, ns in rows),
        peak_bytes=memory.peak_bytes,
        peak_bytes_by_place={key: n for key, n in sorted(memory.peak.items()) if n},
        spans=tuple(_spans(engine, began_ns)) if with_spans else (),
    )


def _spans(engine: Engine, began_ns: int) -> Iterator[SpanRow]:
    for stream in engine.clock.streams:
        for work in stream.schedule:
            issue = work.issue or Issue("", "", "")
            begins, ends = (work.start_ns - began_ns) / 1e9, (work.end_ns - began_ns) / 1e9
            if ends > begins:
                yield SpanRow(
                    stream.name, work.kind.value, work.name, issue.unit, issue.phase, begins, ends
                )
