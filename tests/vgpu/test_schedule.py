"""Random programs on the device: each time equals that of an independent scheduler."""

from __future__ import annotations

import json
from collections import defaultdict
from functools import cache
from typing import Any

import pytest

from vgpu.conftest import CudaRun, CudaRunner
from zeromon_vgpu.timeline import Operation

pytestmark = [pytest.mark.vgpu, pytest.mark.short]

RANKS, CLOCK, LATENCY_NS, BUS = 2, 1.98e9, 12000, 360e9


class Scheduler:
    """When each operation of one program starts and ends, from when it was enqueued alone."""

    def __init__(self, programs: list[list[Any]], enqueued: list[list[int]]) -> None:
        self.programs, self.enqueued = programs, enqueued

    def before(self, rank: int, place: int) -> int | None:
        """The previous operation of the same stream."""
        stream = self.programs[rank][place][1]
        return next((p for p in range(place - 1, -1, -1) if self.programs[rank][p][1] == stream), None)

    @cache  # noqa: B019
    def start(self, rank: int, place: int) -> int:
        kind, _, argument = self.programs[rank][place]
        times = [self.enqueued[rank][place]]
        if (before := self.before(rank, place)) is not None:
            times.append(self.end(rank, before))
        if kind == "wait":
            events = [p for p, one in enumerate(self.programs[rank]) if one[0] == "event"]
            times.append(self.end(rank, events[argument]))
        return max(times)

    @cache  # noqa: B019
    def end(self, rank: int, place: int) -> int:
        kind, _, argument = self.programs[rank][place]
        if kind == "sleep":
            return self.start(rank, place) + int(argument / CLOCK * 1e9)
        if kind == "collective":  # the same place on each rank
            latest = max(self.start(other, place) for other in range(RANKS))
            bus_bytes = argument * 4 * 2 * (RANKS - 1) / RANKS
            return latest + int(LATENCY_NS + bus_bytes / BUS * 1e9)
        return self.start(rank, place)


def enqueue_times(program: list[Any], operations: list[Operation]) -> list[int]:
    """When each operation was enqueued; of a wait, 0: what follows it in the stream was later."""
    left = iter(operations)
    return [0 if kind == "wait" else next(left).enqueued for kind, *_ in program]


def check_programs(run: CudaRun, count: int) -> None:
    records = [json.loads((run.folder / f"programs-{rank}.json").read_text()) for rank in range(RANKS)]
    timelines = []
    for rank in range(RANKS):
        kinds = ("kernel", "collective", "event")
        found = [one for one in run.truth(rank).of(*kinds) if one.kind != "kernel" or "spin" in one.name]
        timelines.append(sorted(found, key=lambda one: one.enqueued))
    places = [0] * RANKS
    seen: dict[str, int] = defaultdict(int)
    for number in range(count):
        programs = [records[rank][number]["program"] for rank in range(RANKS)]
        operations = []
        for rank, program in enumerate(programs):
            size = sum(kind != "wait" for kind, *_ in program)
            operations.append(timelines[rank][places[rank] : places[rank] + size])
            places[rank] += size
        scheduler = Scheduler(
            programs, [enqueue_times(p, o) for p, o in zip(programs, operations, strict=True)]
        )
        for rank, program in enumerate(programs):
            left, ends = iter(operations[rank]), []
            for place, (kind, *_) in enumerate(program):
                if kind == "wait":
                    continue
                one = next(left)
                wanted = scheduler.start(rank, place), scheduler.end(rank, place)
                assert one.span == wanted, (number, rank, place, kind)
                seen[kind] += 1
                if kind == "event":
                    ends.append(one.end)
            measured = records[rank][number]["elapsed"]
            assert measured == pytest.approx([(end - ends[0]) / 1e6 for end in ends], rel=1e-6)
    assert all(seen[kind] for kind in ("sleep", "collective", "event"))


def test_random_programs_run_as_scheduled(cuda_run: CudaRunner) -> None:
    count = 500
    run = cuda_run("schedules.py", str(count), "7", changes={"log_events": 1})
    check_programs(run, count)
