"""What is true of a run: by the marks that the job took on gloo, by the device's own timeline on CUDA.

A truth that depends on the window of steps is one value per window: the last steps, and all but the
first ones. A value is a number, or the least and the most that every definition agrees on.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from monitor import Run
from vgpu.truth import Timeline

from zeromon_vgpu.intervals import clip, length, subtract, union

WINDOW, FAULTY = 20, 1
FIRST = 5
"""The first step of the virtual device's windows: buckets are rebuilt by then."""
COMPUTE_STREAM = 7


class Truth(NamedTuple):
    """The ranges in one of which a right answer lies, and the step of which an error is a share."""

    ranges: tuple[tuple[float, float], ...]
    step: float | None = None

    def error(self, answer: float) -> float | None:
        """Distance of the answer from the nearest range: a ratio of its end, or a share of a step."""
        errors = []
        for low, high in self.ranges:
            distance = max(low - answer, answer - high, 0.0)
            nearest = low if answer < low else high
            if self.step is None and not nearest:
                return None
            signed = -distance if answer < low else distance
            errors.append(signed / (self.step or nearest))
        return min(errors, key=abs)


def of_windows(*values: float, step: float | None = None) -> Truth:
    """One value per window."""
    return Truth(tuple((value, value) for value in values), step)


# ---- gloo -----------------------------------------------------------------------------------------


def gloo_truth(run: Run, facts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """By the marks of rank 0, and of both for a late rank."""
    marks = facts[0]["marks"]
    truth: dict[str, Any] = {}
    for name in ("data", "forward", "backward", "optimizer"):
        times = [mark[name] for mark in marks]
        truth[name] = of_windows(statistics.fmean(times[-WINDOW:]), statistics.fmean(times))
    ends = [mark["end"] for mark in marks]
    truth["step"] = of_windows(
        (ends[-1] - ends[-WINDOW - 1]) / WINDOW, (ends[-1] - ends[0]) / (len(ends) - 1)
    )
    exchanges = [mark["exchange"] for mark in marks]
    truth["exposed"] = of_windows(statistics.fmean(exchanges[-WINDOW:]), statistics.fmean(exchanges))
    before = [
        [mark["data"] + mark["forward"] + mark["optimizer"] for mark in rank["marks"]] for rank in facts
    ]
    later = [theirs - ours for theirs, ours in zip(before[FAULTY], before[1 - FAULTY], strict=True)]
    truth["late by"] = of_windows(statistics.fmean(later[-WINDOW:]), statistics.fmean(later))
    nbytes = facts[0]["parameters"]
    for name in ("parameters", "gradients", "bytes"):
        truth[name] = of_windows(nbytes)
    return truth | {"optimizer state": of_windows(2 * nbytes), "calls": facts[0]["calls"]}


# ---- the virtual CUDA device ----------------------------------------------------------------------


def virtual_truth(
    run: Run, facts: Sequence[Mapping[str, Any]], chosen: tuple[int, int] | None = None
) -> dict[str, Any]:
    """By the timelines of the devices; memory by torch's allocator and the driver.

    *chosen*: the steps of a monitor that chooses them.
    """
    timeline = Timeline.read(run.folder / "device")
    steps = sorted(timeline.steps)
    windows = [(steps[-WINDOW], steps[-1]), (steps[FIRST], steps[-1])]
    windows = [chosen] if chosen else windows
    spent = [_window_figures(timeline, *window) for window in windows]
    truth: dict[str, Any] = {}
    for name in spent[0]:
        in_points = name in ("exposed", "overlap", "utilization")
        step = spent[0]["step"][0] if name == "exposed" else 1.0
        truth[name] = Truth(tuple(one[name] for one in spent), step if in_points else None)
    marks = facts[0]["marks"]
    if marks:
        data = [mark["data"] for mark in marks]
        # what the host waits for, less what the device has to do meanwhile
        truth["data"] = Truth(((spent[0]["idle"][0], statistics.fmean(data[FIRST:])),))
    truth["late by"] = of_windows(*(_late_seconds(timeline, *window) for window in windows))
    truth["peak"] = of_windows(facts[0]["peak"])
    return truth | {"device memory": of_windows(facts[0]["device_used"])}


def _window_figures(timeline: Timeline, first: int, last: int) -> dict[str, tuple[float, float]]:
    """Means per step, as least and most."""
    start, end = timeline.window(first, last)
    steps, figures, phases = last - first + 1, timeline.figures(start, end), timeline.phases(start, end)
    work = timeline.of("kernel", "fill", "copy")
    kernels = union(one.span for one in work if one.stream == COMPUTE_STREAM)
    most = length(subtract(clip(timeline.communication, start, end), kernels))
    least = timeline.least_exposed(start, end, COMPUTE_STREAM)
    nbytes = sum(one.bytes for one in timeline.of("collective") if start <= one.start < end)
    busy = length(clip(union([*timeline.compute, *timeline.communication]), start, end))
    seconds = {
        "step": end - start, "communication": figures.communication, "idle": figures.idle,
        **{name: phase.span for name, phase in phases.items() if name != "other"},
    }  # fmt: skip
    widest = max(figures.communication, 1)
    return {
        **{name: (spent / steps / 1e9,) * 2 for name, spent in seconds.items()},
        "exposed": (least / steps / 1e9, most / steps / 1e9),
        "overlap": (1 - most / widest, 1 - least / widest),
        "utilization": (busy / (end - start),) * 2,
        "bytes": (nbytes / steps,) * 2,
    }  # fmt: skip


def _late_seconds(timeline: Timeline, first: int, last: int) -> float:
    """How long a rank that is not late stands still in a step until the last rank has arrived."""
    start, end = timeline.window(first, last)
    collectives = timeline.of("collective")
    waits = union((one.start, one.transfer) for one in collectives if one.transfer > one.start)
    return length(subtract(clip(waits, start, end), timeline.compute)) / (last - first + 1) / 1e9


def step_seconds(run: Run, first: int = WINDOW, last: int | None = None) -> float:
    """The median step of rank 0 on the device's clock."""
    steps = Timeline.read(run.folder / "device").steps
    chosen = [steps[number] for number in sorted(steps)][first:last]
    return statistics.median(end - start for start, end in chosen) / 1e9
