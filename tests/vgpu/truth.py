"""The truth of a run: what the device did and when, from the timeline that the device itself writes.

C, K and M are the unions of the communication, compute and copy intervals of a rank over all streams.
Kernels, fills and copies within the device are compute; copies to and from the host are copy.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from zeromon_vgpu.intervals import Intervals, clip, intersect, length, subtract, union
from zeromon_vgpu.timeline import DIRECTIONS, Operation, read_timeline


@dataclass(frozen=True)
class Figures:
    """How a window of time was spent, in nanoseconds."""

    span: int
    compute: int
    """|K|"""
    communication: int
    """|C|"""
    exposed: int
    """|C \\ K|"""
    copy: int
    """|M|"""
    exposed_copy: int
    """|M \\ (C + K)|"""
    idle: int
    """Nothing ran. ``compute + exposed + exposed_copy + idle == span``."""

    @property
    def overlap(self) -> float | None:
        """|C and K| / |C|; None where nothing was communicated."""
        if not self.communication:
            return None
        return (self.communication - self.exposed) / self.communication

    def __add__(self, other: Figures) -> Figures:
        names = [field.name for field in fields(self)]
        return Figures(*(getattr(self, name) + getattr(other, name) for name in names))


NOTHING = Figures(0, 0, 0, 0, 0, 0, 0)


LAUNCH_NS = 6000
"""From a launch by the host to the begin of the kernel, of a GPU that has nothing to do."""
_TRACED = {"kernel": "kernel", "gpu_memcpy": "copy", "gpu_memset": "fill"}
_HALVES = {"HtoD": 1, "DtoH": 2, "DtoD": 3}


def _traced(event: Mapping[str, Any], launches: Mapping[int, int]) -> Operation:
    """An operation from an event of a trace."""
    facts, name = event["args"], event["name"]
    start = round(event["ts"] * 1e3)
    end = start + round(event["dur"] * 1e3)
    kind = "collective" if name.startswith("nccl") else _TRACED[event["cat"]]
    direction = next((DIRECTIONS[number] for half, number in _HALVES.items() if half in name), "")
    launched = launches.get(facts["correlation"], start)
    return Operation(
        kind, facts["device"], facts["stream"], facts["correlation"], launched, start, start, -1, end,
        facts.get("bytes", 0), direction if kind == "copy" else "", ((start, end),) * 2, "", {}, name,
    )  # fmt: skip


@dataclass(frozen=True)
class Timeline:
    """What one rank's devices did."""

    operations: tuple[Operation, ...]

    @classmethod
    def read(cls, folder: Path, rank: int = 0) -> Timeline:
        """The timeline of a rank of the run in *folder*; of all its processes, if it had several."""
        found = read_timeline(folder, f"{rank}-*")
        return cls(tuple(sorted(found, key=lambda one: (one.start, one.end))))

    @classmethod
    def traced(cls, trace: Mapping[str, Any], marks: Sequence[str]) -> Timeline:
        """The timeline of a GPU, from what torch.profiler traced of it and the marks that were set.

        A trace does not say how long a stream waited for an event. It did so where it stood still before
        an operation that the host had enqueued :data:`LAUNCH_NS` before.
        """
        launches: dict[int, int] = {}
        events = [event for event in trace["traceEvents"] if event.get("ph") == "X"]
        for event in events:
            if event["cat"] in ("cuda_runtime", "cuda_driver"):
                launches[event["args"].get("correlation", 0)] = round(event["ts"] * 1e3)
        found = [_traced(event, launches) for event in events if event["cat"] in _TRACED]
        found.sort(key=lambda one: (one.start, one.end))
        spins = (one for one in found if "spin_kernel" in one.name)
        in_order = sorted(spins, key=lambda one: one.enqueued)
        named = {id(one): name for one, name in zip(in_order, marks, strict=True)}
        waits, ends = [], dict[int, int]()
        for at, one in enumerate(found):
            ready = max(ends.get(one.stream, one.start), one.enqueued + LAUNCH_NS)
            if ready < one.start:
                waits.append(replace(one, kind="wait", ready=ready, end=one.start, name=""))
            ends[one.stream] = max(ends.get(one.stream, 0), one.end)
            if id(one) in named:
                found[at] = replace(one, kind="mark", name=named[id(one)])
        return cls(tuple(sorted([*found, *waits], key=lambda one: (one.start, one.end))))

    def of(self, *kinds: str) -> Iterator[Operation]:
        """Operations of these kinds."""
        return (one for one in self.operations if one.kind in kinds)

    @cached_property
    def communication(self) -> Intervals:
        """C."""
        return union(one.span for one in self.of("collective"))

    @cached_property
    def compute(self) -> Intervals:
        """K."""
        return union(one.span for one in self.operations if one.computes)

    @cached_property
    def copies(self) -> Intervals:
        """M."""
        return union(o.span for o in self.of("copy") if o.direction != "on device")

    def figures(self, start: int, end: int) -> Figures:
        """How the device spent the time from *start* to *end*."""
        c, k, m = (clip(all_, start, end) for all_ in (self.communication, self.compute, self.copies))
        exposed, alone = length(subtract(c, k)), length(subtract(m, union([*c, *k])))
        idle = end - start - length(k) - exposed - alone
        return Figures(end - start, length(k), length(c), exposed, length(m), alone, idle)

    # ---- windows ---------------------------------------------------------------------------------

    @cached_property
    def marks(self) -> list[Operation]:
        """The marks that the program set, in the order in which the device came to them."""
        return sorted(self.of("mark"), key=lambda one: (one.end, one.enqueued))

    @cached_property
    def steps(self) -> dict[int, tuple[int, int]]:
        """Start and end of each step: from its mark ``step N`` to the next one's."""
        borders = [
            (int(found[1]), mark.end)
            for mark in self.marks
            if (found := re.match(r"step (\d+)$", mark.name))
        ]
        ends = [start for _, start in borders[1:]]
        return {number: (start, end) for (number, start), end in zip(borders, ends, strict=False)}

    def phases(self, start: int, end: int) -> dict[str, Figures]:
        """How each phase within a window was spent: it lasts from its mark to the next mark."""
        borders = [mark for mark in self.marks if start <= mark.end < end]
        ends = [*(mark.end for mark in borders[1:]), end]
        spent: dict[str, Figures] = {}
        for mark, until in zip(borders, ends, strict=False):
            name = "other" if mark.name.startswith("step ") else mark.name
            spent[name] = spent.get(name, NOTHING) + self.figures(mark.end, until)
        return spent

    def units(self, start: int, end: int) -> dict[str, int]:
        """Exposed communication of each unit: |C of the unit \\ K|."""
        by_unit: dict[str, list[tuple[int, int]]] = {}
        for one in self.of("collective"):
            by_unit.setdefault(one.unit, []).append(one.span)
        compute = clip(self.compute, start, end)
        return {
            unit: length(subtract(clip(union(spans), start, end), compute))
            for unit, spans in by_unit.items()
        }

    def window(self, first: int, last: int) -> tuple[int, int]:
        """From the start of step *first* to the end of step *last*."""
        return self.steps[first][0], self.steps[last][1]

    def optimizer_end(self, step: int) -> int:
        """When the optimizer of *step* had ended: at the mark behind its last mark ``optimizer``."""
        names = [mark.name for mark in self.marks]
        first, behind = names.index(f"step {step}"), names.index(f"step {step + 1}")
        last = max(at for at in range(first, behind) if names[at] == "optimizer")
        return self.marks[last + 1].end

    def blocked(self, start: int, end: int, stream: int) -> int:
        """Time in which a stream waited for an event while a collective ran and it did nothing else."""
        waits = union((o.ready, o.end) for o in self.of("wait") if o.stream == stream)
        return length(intersect(clip(waits, start, end), self.communication))

    def least_exposed(self, start: int, end: int, stream: int) -> int:
        """The part of :meth:`blocked` without a kernel on any stream: exposed by every definition."""
        waits = union((o.ready, o.end) for o in self.of("wait") if o.stream == stream)
        blocked = intersect(clip(waits, start, end), self.communication)
        return length(subtract(blocked, self.compute))
