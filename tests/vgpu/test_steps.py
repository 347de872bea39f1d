"""Random programs as training steps: each figure of each step is that of the device's timeline."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from bisect import bisect
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from support import ROOT

from vgpu.conftest import CudaRun, CudaRunner
from vgpu.truth import Timeline
from zeromon.ring.codes import Phase
from zeromon.snapshot import StepSummary
from zeromon_vgpu.intervals import Intervals, clip, length, subtract, union
from zeromon_vgpu.timeline import Operation

pytestmark = pytest.mark.vgpu

COMPUTE = 0
"""The program's number of the stream in which the model computes."""
MACHINE = {"node_speed": 2e8, "largest_payload": 0}
"""Collectives take 12 us to 5 ms, as kernels do."""
RATIO, NANOSECONDS = 0.02, 50_000
"""By how much a figure may differ from the timeline's, whichever is more."""
FIRST = 6
"""Steps before this one relate the device's clock to the host's."""
MOST_DRIFTS = 0.05
"""Part of the steps in which a border may turn out to be later than those before it said.

A rank of the virtual device learns late of its peer's arrival where the machine is busy.
"""
PHASES = ("forward", "backward", "other", "optimizer")


@dataclass(frozen=True)
class Bounds:
    """The least and the most that a figure can be, in nanoseconds."""

    least: int = 0
    most: int = 0

    def __add__(self, other: Bounds) -> Bounds:
        return Bounds(self.least + other.least, self.most + other.most)

    def __sub__(self, other: Bounds) -> Bounds:
        return Bounds(self.least - other.most, self.most - other.least)

    def error(self, figure: int) -> int:
        """How far *figure* lies outside, beyond what is tolerated."""
        low = self.least - max(NANOSECONDS, RATIO * self.least)
        high = self.most + max(NANOSECONDS, RATIO * self.most)
        return round(min(0, figure - low) + max(0, figure - high))


@dataclass
class Call:
    """A call of the program that may make a stream wait for a collective, between its two marks."""

    kind: str
    targets: list[tuple[int, int]]
    """Streams that it waits for, each with the number of calls that it waits for."""
    step: int
    start: int
    end: int = 0
    returned: int = 0
    """When the host came back from the call."""
    waits: Intervals = field(default_factory=list)
    """When the stream stood still in it, or ran a collective itself."""


class Program:
    """The calls of each stream, and the borders of the compute stream, from the marks of a timeline."""

    def __init__(self, truth: Timeline) -> None:
        self.calls: dict[int, list[Call]] = defaultdict(list)
        streams = {o.stream: int(o.name[10:]) for o in truth.marks if o.name.startswith("stream is")}
        self.steps: list[StepTruth] = [StepTruth()]
        order: dict[int, list[Operation]] = defaultdict(list)
        for one in truth.of("mark", "wait", "collective"):
            if one.stream in streams:
                order[streams[one.stream]].append(one)
        self.begun = sorted(o.enqueued for o in truth.marks if o.name == "step")
        for stream in sorted(order):
            for one in sorted(order[stream], key=lambda one: one.enqueued):
                self._read(stream, one)

    def _read(self, stream: int, one: Operation) -> None:
        calls, step = self.calls[stream], self.steps[-1]
        kind, *words = one.name.split() if one.kind == "mark" else (one.kind,)
        if kind == "from":
            targets = [tuple(map(int, word.split(":"))) for word in words[1:]]
            calls.append(Call(words[0], targets, self._step_of(one), one.end))
        elif kind == "to":
            calls[-1].end, calls[-1].returned = one.end, one.enqueued
            if stream == COMPUTE:
                step.calls.append(calls[-1])
        elif kind in ("wait", "collective") and calls and not calls[-1].end:
            calls[-1].waits.append((one.ready, one.end))
        elif kind == "nearly":
            self.nearly = one.end
        elif kind == "border":
            step.borders.append((words[0], Bounds(self.nearly, one.end)))
        elif kind == "step":
            self.steps.append(StepTruth())

    def _step_of(self, one: Operation) -> int:
        """The number of the step, from 1, in which the host enqueued an operation."""
        return 1 + bisect(self.begun, one.enqueued)

    def behind(self, call: Call) -> Iterator[Call]:
        """The calls of other streams that a call waits for, the newest first."""
        for stream, count in call.targets:
            if stream != COMPUTE:
                yield from reversed(self.calls[stream][:count])

    def is_known(self, call: Call, idle: set[int]) -> bool:
        """False where it stands still for a wait of another stream in a control step: none is timed."""
        return all(
            one.end <= call.start or (one.step not in idle and self.is_known(one, idle))
            for one in self.behind(call)
        )

    def still(self, call: Call, *, most: bool) -> Intervals:
        """When a stream stood still for a collective: at least, or at *most* between the marks.

        On a stream without a backlog, the time of the host between two events is the difference. A
        collective is launched at some moment of its call: at least, it runs from the end of the call on.
        """
        if call.kind == "collective":
            return [(call.start, call.end)] if most else clip(union(call.waits), call.returned, call.end)
        spans = [(call.start, call.end)] if call.kind == "host" else union(call.waits)
        behind = [
            span
            for one in self.behind(call)
            if one.end > call.start
            for start, end in spans
            for span in clip(self.still(one, most=most), start, end)
        ]
        if most and call.kind == "stream":
            behind += subtract([(call.start, call.end)], spans)
        return union(behind)

    def exposed(self, step: StepTruth) -> Bounds:
        """How long the compute stream stood still for collectives in a step."""
        least, most = (
            sum(length(self.still(call, most=most)) for call in step.calls) for most in (False, True)
        )
        return Bounds(least, most)


@dataclass
class StepTruth:
    """The calls of the compute stream in one step, and where its phases end."""

    calls: list[Call] = field(default_factory=list)
    borders: list[tuple[str, Bounds]] = field(default_factory=list)


def misses(run: CudaRun, rank: int, count: int, compared: Counter[str]) -> Iterator[str]:
    """The figures of a rank that lie outside what its timeline says; counts what was *compared*."""
    program = Program(run.truth(rank))
    recorded = {one.step: one for one in run.record.ranks[rank].steps.recent}
    assert sorted(recorded) == list(range(1, count + 1))
    idle = {number for number, one in recorded.items() if one.idle}
    previous, drifts = Bounds(), []
    for number, step in enumerate(program.steps[:-1], 1):
        end, drift = step.borders[-1][1], ""
        read = recorded[number].end_ns
        if number >= FIRST and read < end.least - NANOSECONDS:
            yield f"step {number}: the device's clock is {(end.least - read) / 1e3:.0f} us early"
        for name, figure, bounds in figures(program, step, recorded[number], previous, idle):
            if number < FIRST:
                continue
            compared[name] += 1
            compared[f"sharp {name}"] += bounds.most - bounds.least < 2 * NANOSECONDS
            if error := bounds.error(figure):
                miss = (
                    f"step {number} {name}: {figure / 1e3:.0f} us,"
                    f" {bounds.least / 1e3:.0f} to {bounds.most / 1e3:.0f} ({error / 1e3:+.0f})"
                )
                if name == "exposed":
                    yield miss
                else:
                    drift = miss
        previous = end
        drifts += [drift] * bool(drift)
    compared["drifts"] += len(drifts)
    if len(drifts) > MOST_DRIFTS * count:
        yield from drifts


def figures(
    program: Program, step: StepTruth, recorded: StepSummary, start: Bounds, idle: set[int]
) -> Iterator[tuple[str, int, Bounds]]:
    """Each figure of a step as zeromon has recorded it, and as it is on the device."""
    yield "step", recorded.end_ns - recorded.start_ns, step.borders[-1][1] - start
    spent: dict[str, Bounds] = defaultdict(Bounds)
    for phase, border in step.borders:
        spent[phase] += border - start
        start = border
    for phase, bounds in spent.items():
        yield phase, recorded.phase_ns[Phase[phase.upper()]], bounds
    if recorded.timed and all(program.is_known(call, idle) for call in step.calls):
        yield "exposed", recorded.exposed_ns, program.exposed(step)


@pytest.mark.parametrize("seed", range(2))
def test_each_figure_of_each_step_is_that_of_the_timeline(cuda_run: CudaRunner, seed: int) -> None:
    """500 steps on two ranks: their ends, their phases, and the waits of the compute stream."""
    count, compared = 250, Counter[str]()
    run = cuda_run("steps.py", str(count), str(seed), changes=MACHINE, watched=True)
    for rank in range(2):
        missed = list(misses(run, rank, count, compared))
        assert not missed, "\n".join(missed)
    print(compared)
    assert compared["step"] == 2 * (count - FIRST + 1)
    assert compared["exposed"] > 0.6 * compared["step"]
    for name in ("step", *PHASES, "exposed"):
        assert compared[f"sharp {name}"] > 0.2 * compared[name], "the programs show too little"


# ---- mutants --------------------------------------------------------------------------------------

SOURCES = ("observe/device_timer.py", "hooks/c10d.py")
MUTANTS = {
    "wait ends before it begins": (
        "round(wait.reached.elapsed_time(wait.left) * 1e6))\n        elapsed",
        "round(wait.left.elapsed_time(wait.reached) * 1e6))\n        elapsed",
    ),
    "waits of other streams are exposed": (
        "        if wait.stream is not None:\n            blocked = 0\n",
        "",
    ),
    "each of several coalesced is waited for": (
        "            blocked = 0  # once, for all of them\n",
        "",
    ),
    "no stream computes": ("return None if is_compute else number", "return None"),
    "window not cut at its end": (
        "        end_ns = min(end_ns, round(origin.elapsed_time(self.left) * 1e6))\n",
        "",
    ),
    "oldest wait first": ("for wait in reversed(self.behind):", "for wait in self.behind:"),
    "waits behind a stream are forgotten": ("setattr(event, _BEHIND, waits)", "pass"),
    "waits are passed by any stream": (
        "        if wait.stream is None:\n            for passed_wait in wait.behind:",
        "        if True:\n            for passed_wait in wait.behind:",
    ),
    "host waits for nothing": (
        "if not other_waits:\n                    return",
        "if True:\n                    return",
    ),
    "events of other streams are used again": (
        "if isinstance(wait, Waited) and wait.stream is None:",
        "if isinstance(wait, Waited):",
    ),
    "milliseconds are cut": (
        "round(float(start_event.elapsed_time(end_event)) * 1e6)",
        "int(start_event.elapsed_time(end_event)) * 10**6",
    ),
    "control steps leave no work": ("self._keep(wait if entries else", "self._keep(wait or"),
    "phase begins with the step": (
        "self._border_ns, 0, 0, max(0, reached",
        "self._step_ns, 0, 0, max(0, reached",
    ),
    "step begins where the host began": ("step, self._step_ns or start,", "step, start,"),
    "device comes to a border when it is read": (
        "self._last_border, border.before_ns\n",
        "self._last_border, time.monotonic_ns()\n",
    ),
    "the host times barriers": ('payload if getattr(payload, "device", None) else None', "None"),
    "control steps forget their collectives": ("open_works[id(work)] = ()", "pass"),
    "control steps forget what they coalesce": (
        "entries or (group.on_device",
        "entries and (group.on_device",
    ),
}
DRIFTS = "clock never catches up"
ALL_MUTANTS = MUTANTS | {
    DRIFTS: (
        "reached = max(reached, self._border_ns + elapsed_ns - elapsed_ns // _DRIFT)",
        "reached = self._border_ns + elapsed_ns",
    )
}
"""What is wrong -> what one of the sources says, and what the mutant says instead."""


def plant_mutant(mutant: str, agents: Path) -> None:
    """Puts what is wrong in *mutant* into the one place of the sources in *agents* that is right."""
    right, wrong = ALL_MUTANTS[mutant]
    sources = [agents / "zeromon_agents" / source for source in SOURCES]
    (source,) = (source for source in sources if right in source.read_text())
    text = source.read_text()
    assert text.count(right) == 1
    source.write_text(text.replace(right, wrong))


def test_the_sources_still_say_what_each_mutant_changes(tmp_path: Path) -> None:
    for mutant in ALL_MUTANTS:
        agents = tmp_path / mutant
        shutil.copytree(ROOT / "agents", agents, ignore=shutil.ignore_patterns("__pycache__"))
        plant_mutant(mutant, agents)


@pytest.mark.long
@pytest.mark.parametrize("mutant", MUTANTS)
def test_a_timer_that_is_wrong_on_purpose_is_found(
    cuda_run: CudaRunner, tmp_path: Path, mutant: str
) -> None:
    agents = tmp_path / "agents"
    shutil.copytree(ROOT / "agents", agents, ignore=shutil.ignore_patterns("__pycache__"))
    plant_mutant(mutant, agents)
    count, changed = 120, {"ZEROMON_AGENTS": str(agents)}
    run = cuda_run("steps.py", str(count), "2", changes=MACHINE, watched=True, **changed)
    found = [miss for rank in range(2) for miss in misses(run, rank, count, Counter())]
    print(len(found), found[:3])
    assert found


@pytest.mark.long
def test_a_clock_that_drifts_is_found_by_the_tests_of_the_timer(tmp_path: Path) -> None:
    """The virtual device's clock does not drift, so no program of it shows that mutant."""
    agents = tmp_path / "agents"
    shutil.copytree(ROOT / "agents", agents, ignore=shutil.ignore_patterns("__pycache__"))
    plant_mutant(DRIFTS, agents)
    tests = ROOT / "tests" / "agents" / "observe" / "test_device_timer.py"
    command = [sys.executable, "-m", "pytest", "-p", "no:xdist", "-k", "drifting", str(tests)]
    environment = os.environ | {"PYTHONPATH": str(agents)}
    assert subprocess.run(command, cwd=ROOT, env=environment, timeout=120).returncode == 1
