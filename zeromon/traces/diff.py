"""Differences between the traces of two runs: parts of a step, collectives, units, kernels. Pure.

Each step of each rank is one sample. A difference counts where it is beyond the 99 % interval of the
samples, beyond a tenth of the figure, and beyond a hundredth of a step; with one sample a side the noise
is unknown, and a difference counts from half of the figure on. What makes all kernels longer alike, as
another clock rate or a busy host does, is said once (:attr:`TraceDiff.common_ratio`).
"""

import statistics
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple, TypeVar

from zeromon.stats.intervals import Interval, intersection, length, subtract, union
from zeromon.stats.noise import Estimate, half_width
from zeromon.traces.analysis import of_collective
from zeromon.traces.events import STEP_MARK, UNIT_MARK, DeviceEvent, Kind, Mark, TraceData, family

LEAST_FAMILIES = 8
LEAST_OF_FIGURE, LEAST_OF_STEP, LEAST_UNKNOWN = 0.1, 0.01, 0.5


class What(str, Enum):
    """The subject of a row of a diff."""

    PART = "part of the step"
    COLLECTIVE = "collective"
    UNIT = "unit"
    KERNEL = "kernel family"


class Change(str, Enum):
    """How a row differs."""

    APPEARED = "appeared"
    GONE = "gone"
    MORE = "more calls"
    FEWER = "fewer calls"
    LONGER = "longer"
    SHORTER = "shorter"
    EXPOSED = "less hidden"
    HIDDEN = "more hidden"


OF_CALLS = (Change.APPEARED, Change.GONE, Change.MORE, Change.FEWER)
"""Two runs of one program do not differ so."""


class Usage(NamedTuple):
    """Calls and seconds of one thing, per step."""

    calls: float = 0.0
    seconds: float = 0.0
    exposed_seconds: float = 0.0
    """Communication that no compute hides; 0 for compute."""


Key = tuple[What, str]
Sample = dict[Key, Usage]
"""The parts of one step of one rank."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One thing in both traces; means a step."""

    what: What
    name: str
    before: Usage
    after: Usage
    noise_seconds: float | None
    """Half of the 99 % interval of the difference in time; None with one sample a side."""
    change: Change | None
    """None: no difference beyond noise."""

    @property
    def weight(self) -> float:
        """By how many seconds a step differs, to order rows."""
        moved = self.change in (Change.EXPOSED, Change.HIDDEN)
        name = "exposed_seconds" if moved else "seconds"
        return abs(float(getattr(self.after, name)) - float(getattr(self.before, name)))


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceDiff:
    """The rows of two runs, those with the largest difference first."""

    samples: tuple[int, int]
    """Steps times ranks before and after."""
    parts: tuple[Row, ...]
    rows: tuple[Row, ...]
    """All but the parts."""
    common_ratio: float | None
    """Median of time after by time before over the kernel families of both; None with few of them."""

    @property
    def changed(self) -> tuple[Row, ...]:
        """The rows that differ."""
        return tuple(row for row in (*self.parts, *self.rows) if row.change is not None)


def diff(before: Sequence[Sample], after: Sequence[Sample]) -> TraceDiff:
    """Compares samples of two runs; each has at least one."""
    keys = {key: None for sample in (*before, *after) for key in sample}
    step = statistics.fmean(s[STEP].seconds for s in (*before, *after))
    common = _common_ratio(before, after, keys)
    rows = [_row(key, before, after, step, common) for key in keys]
    rows.sort(key=lambda row: -row.weight)
    return TraceDiff(
        samples=(len(before), len(after)),
        parts=tuple(_row(key, before, after, step, None) for key in keys if key[0] is What.PART),
        rows=tuple(row for row in rows if row.what is not What.PART),
        common_ratio=common,
    )


def _common_ratio(
    before: Sequence[Sample], after: Sequence[Sample], keys: Iterable[Key]
) -> float | None:
    ratios = []
    for key in keys:
        old, new = _mean(before, key), _mean(after, key)
        if key[0] is What.KERNEL and old.seconds and new.seconds and old.calls == new.calls:
            ratios.append(new.seconds / old.seconds)
    return statistics.median(ratios) if len(ratios) >= LEAST_FAMILIES else None


def _mean(samples: Sequence[Sample], key: Key) -> Usage:
    found = [sample.get(key, Usage()) for sample in samples]
    return Usage(*(statistics.fmean(values) for values in zip(*found, strict=True)))


def _estimate(samples: Sequence[Sample], key: Key, of: Callable[[Usage], float]) -> Estimate:
    values = [of(sample.get(key, Usage())) for sample in samples]
    if len(values) < 2:
        return Estimate(values[0], None, 0)
    error = statistics.stdev(values) / len(values) ** 0.5
    return Estimate(statistics.fmean(values), error, len(values) - 1)


def _row(
    key: Key, before: Sequence[Sample], after: Sequence[Sample], step: float, common: float | None
) -> Row:
    old, new = _mean(before, key), _mean(after, key)
    factor = common if common is not None and key[0] is What.KERNEL else 1.0
    least = LEAST_OF_STEP * step

    def differs(of: Callable[[Usage], float], least: float, factor: float = 1.0) -> float:
        """The difference where it counts; else 0."""
        one = _estimate(before, key, of).scaled(factor)
        two = _estimate(after, key, of)
        noise = half_width(one, two)
        least_of_figure = LEAST_UNKNOWN if noise is None else LEAST_OF_FIGURE
        change = two.value - one.value
        floor = max(least, least_of_figure * max(one.value, two.value))
        return change if abs(change) > max(noise or 0.0, floor) else 0.0

    calls = differs(lambda usage: usage.calls, 0.4)
    seconds = differs(lambda usage: usage.seconds, least, factor)
    exposed = differs(lambda usage: usage.exposed_seconds, least)
    change: Change | None = None
    if not any(key in sample for sample in before) and all(key in s for s in after):
        change = Change.APPEARED
    elif not any(key in sample for sample in after) and all(key in s for s in before):
        change = Change.GONE
    elif calls and key[0] is not What.PART:
        change = Change.MORE if calls > 0 else Change.FEWER
    elif seconds:
        change = Change.LONGER if seconds > 0 else Change.SHORTER
    elif exposed:
        change = Change.EXPOSED if exposed > 0 else Change.HIDDEN
    spent = [_estimate(samples, key, lambda usage: usage.seconds) for samples in (before, after)]
    return Row(
        what=key[0], name=key[1], before=old, after=new, noise_seconds=half_width(*spent),
        change=change,
    )  # fmt: skip


# ---- samples ---------------------------------------------------------------------------------------

STEP: Key = (What.PART, "step")


def samples_of(data: TraceData) -> list[Sample]:
    """The steps of one rank, by the profiler's annotations; the whole trace where it has none."""
    windows = _windows(data)
    events, marks = _cut(data.device, windows), _cut(data.marks, windows)
    found = zip(windows, events, marks, strict=True)
    return [_sample(window, own, marked) for window, own, marked in found if own]


Timed = TypeVar("Timed", DeviceEvent, Mark)


def _cut(items: Iterable[Timed], windows: Sequence[Interval]) -> list[list[Timed]]:
    """The items that begin in each of *windows*."""
    found: list[list[Timed]] = [[] for _ in windows]
    starts = [start for start, _ in windows]
    for item in items:
        at = bisect_right(starts, item.start_ns) - 1
        if at >= 0 and item.start_ns < windows[at][1]:
            found[at].append(item)
    return found


def _windows(data: TraceData) -> list[Interval]:
    by_place: dict[bool, list[Interval]] = {True: [], False: []}
    for mark in data.marks:
        if STEP_MARK.match(mark.name):
            by_place[mark.on_device].append((mark.start_ns, mark.end_ns))
    found = sorted(by_place[True] or by_place[False])
    if found or not data.device:
        return found
    return [(min(e.start_ns for e in data.device), max(e.end_ns for e in data.device))]


def _sample(window: Interval, events: Sequence[DeviceEvent], marks: Sequence[Mark]) -> Sample:
    of_kind = {
        kind: union((e.start_ns, e.end_ns) for e in events if e.kind is kind) for kind in Kind
    }
    compute, communication, copies = (of_kind[kind] for kind in Kind)
    busy = union([*compute, *communication])
    parts = {
        "compute": length(compute),
        "exposed communication": length(subtract(communication, compute)),
        "exposed copies": length(subtract(copies, busy)),
        "idle": length(subtract([window], union([*busy, *copies]))),
    }
    sample: Sample = {STEP: Usage(1, (window[1] - window[0]) / 1e9)}
    sample |= {(What.PART, name): Usage(1, ns / 1e9) for name, ns in parts.items()}
    spans: dict[Key, list[Interval]] = defaultdict(list)
    families = {name: family(name) for name in {event.name for event in events}}
    for event in events:
        if event.kind is Kind.COMMUNICATION:
            name = " ".join(of_collective(event)).strip()
            spans[(What.COLLECTIVE, name)].append((event.start_ns, event.end_ns))
        else:
            key = (What.KERNEL, families[event.name])
            calls, seconds, _ = sample.get(key, Usage())
            sample[key] = Usage(calls + 1, seconds + (event.end_ns - event.start_ns) / 1e9)
    for mark in marks:
        unit = UNIT_MARK.match(mark.name)
        if unit and mark.on_device and unit.group(2):
            spans[(What.UNIT, unit.group(2))].append((mark.start_ns, mark.end_ns))
    for key, own in spans.items():
        covered = union(own)
        if key[0] is What.UNIT:
            covered = intersection(covered, communication)
        exposed = length(subtract(covered, compute)) / 1e9
        sample[key] = Usage(len(own), length(covered) / 1e9, exposed)
    return sample
