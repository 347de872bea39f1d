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

from zeromon.snapshot.intervals import Interval, common_set, set_length, subtract_set, union_set
from zeromon.snapshot.noise import Estimate, half_width
from zeromon.traces.analysis import host_calls_while_idle, operation_and_group, step_windows
from zeromon.traces.events import UNIT_MARK, DeviceEvent, Kind, Mark, TraceData, kernel_family

MIN_FAMILIES = 8
MIN_FIGURE_SHARE, MIN_STEP_SHARE, MIN_UNKNOWN_SHARE = 0.1, 0.01, 0.5


class What(str, Enum):
    """The subject of a row of a diff."""

    PART = "part of the step"
    COLLECTIVE = "collective"
    UNIT = "unit"
    KERNEL = "kernel family"
    HOST = "host call"
    """A call that the host is in while the device waits for its next launch."""


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


def diff_samples(old_samples: Sequence[Sample], new_samples: Sequence[Sample]) -> TraceDiff:
    """Compares samples of two runs; each has at least one."""
    keys = {key: None for sample in (*old_samples, *new_samples) for key in sample}
    step = statistics.fmean(s[STEP].seconds for s in (*old_samples, *new_samples))
    ratios = []
    for key in keys:
        old, new = _mean_usage(old_samples, key), _mean_usage(new_samples, key)
        # Another number of calls changes the time whatever the clock rate is
        if key[0] is What.KERNEL and old.seconds and new.seconds and old.calls == new.calls:
            ratios.append(new.seconds / old.seconds)
    common = statistics.median(ratios) if len(ratios) >= MIN_FAMILIES else None
    rows = [_diff_row(key, old_samples, new_samples, step, common) for key in keys]
    rows.sort(key=lambda row: -row.weight)
    part_rows = tuple(
        _diff_row(key, old_samples, new_samples, step, None) for key in keys if key[0] is What.PART
    )
    # A call of the host explains another idle time; without one, it says nothing of the device
    is_idle_changed = any(row.name == IDLE and row.change for row in part_rows)
    left_out = (What.PART,) if is_idle_changed else (What.PART, What.HOST)
    return TraceDiff(
        samples=(len(old_samples), len(new_samples)),
        parts=part_rows,
        rows=tuple(row for row in rows if row.what not in left_out),
        common_ratio=common,
    )


def _mean_usage(samples: Sequence[Sample], key: Key) -> Usage:
    usages = [sample.get(key, Usage()) for sample in samples]
    return Usage(*(statistics.fmean(values) for values in zip(*usages, strict=True)))


def _estimate_mean(samples: Sequence[Sample], key: Key, of: Callable[[Usage], float]) -> Estimate:
    values = [of(sample.get(key, Usage())) for sample in samples]
    if len(values) < 2:
        return Estimate(values[0], None, 0)
    error = statistics.stdev(values) / len(values) ** 0.5
    return Estimate(statistics.fmean(values), error, len(values) - 1)


def _diff_row(
    key: Key,
    old_samples: Sequence[Sample],
    new_samples: Sequence[Sample],
    step: float,
    common: float | None,
) -> Row:
    old, new = _mean_usage(old_samples, key), _mean_usage(new_samples, key)
    factor = common if common is not None and key[0] is What.KERNEL else 1.0
    min_seconds = MIN_STEP_SHARE * step

    def real_change(of: Callable[[Usage], float], min_change: float, factor: float = 1.0) -> float:
        """The difference where it counts; else 0."""
        old_mean = _estimate_mean(old_samples, key, of).scaled(factor)
        new_mean = _estimate_mean(new_samples, key, of)
        noise = half_width(old_mean, new_mean)
        least_of_figure = MIN_UNKNOWN_SHARE if noise is None else MIN_FIGURE_SHARE
        change = new_mean.value - old_mean.value
        threshold = max(min_change, least_of_figure * max(old_mean.value, new_mean.value))
        return change if abs(change) > max(noise or 0.0, threshold) else 0.0

    calls = real_change(lambda usage: usage.calls, 0.4)
    seconds = real_change(lambda usage: usage.seconds, min_seconds, factor)
    exposed = real_change(lambda usage: usage.exposed_seconds, min_seconds)
    change: Change | None = None
    # How often the device waits for a call differs between two runs of one program
    counts_calls = key[0] not in (What.PART, What.HOST)
    # What only some steps have, as a checkpoint, has not appeared: it must be in every sample
    in_old, in_new = ([key in s for s in samples] for samples in (old_samples, new_samples))
    if counts_calls and not any(in_old) and all(in_new):
        change = Change.APPEARED
    elif counts_calls and not any(in_new) and all(in_old):
        change = Change.GONE
    elif counts_calls and calls:
        change = Change.MORE if calls > 0 else Change.FEWER
    elif seconds:
        change = Change.LONGER if seconds > 0 else Change.SHORTER
    elif exposed:
        change = Change.EXPOSED if exposed > 0 else Change.HIDDEN
    estimates = [
        _estimate_mean(samples, key, lambda usage: usage.seconds)
        for samples in (old_samples, new_samples)
    ]
    return Row(
        what=key[0], name=key[1], before=old, after=new, noise_seconds=half_width(*estimates),
        change=change,
    )  # fmt: skip


# ---- samples ---------------------------------------------------------------------------------------

STEP: Key = (What.PART, "step")
IDLE = "idle"


def samples_of(data: TraceData) -> list[Sample]:
    """The steps of one rank, by the profiler's annotations; the whole trace where it has none."""
    windows = _step_windows(data)
    begin_ns = windows[0][0] if windows else None
    events, marks = _split_by_window(data.device, windows), _split_by_window(data.marks, windows)
    calls = _split_by_window(host_calls_while_idle(data, begin_ns), windows)
    steps = zip(windows, events, marks, calls, strict=True)
    return [_step_sample(*step) for step in steps if step[1]]


Timed = TypeVar("Timed", DeviceEvent, Mark)


def _split_by_window(items: Iterable[Timed], windows: Sequence[Interval]) -> list[list[Timed]]:
    groups: list[list[Timed]] = [[] for _ in windows]
    starts = [start for start, _ in windows]
    for item in items:
        at = bisect_right(starts, item.start_ns) - 1
        if at >= 0 and item.start_ns < windows[at][1]:
            groups[at].append(item)
    return groups


def _step_windows(data: TraceData) -> list[Interval]:
    windows = sorted(window for spans in step_windows(data).values() for window in spans)
    if windows or not data.device:
        return windows
    return [(min(e.start_ns for e in data.device), max(e.end_ns for e in data.device))]


def _step_sample(
    window: Interval, events: Sequence[DeviceEvent], marks: Sequence[Mark], host_calls: Sequence[Mark]
) -> Sample:
    of_kind = {
        kind: union_set((e.start_ns, e.end_ns) for e in events if e.kind is kind) for kind in Kind
    }
    compute, communication, copies = (of_kind[kind] for kind in Kind)
    busy = union_set([*compute, *communication])
    part_ns = {
        "compute": set_length(compute),
        "exposed communication": set_length(subtract_set(communication, compute)),
        "exposed copies": set_length(subtract_set(copies, busy)),
        IDLE: set_length(subtract_set([window], union_set([*busy, *copies]))),
    }
    sample: Sample = {STEP: Usage(1, (window[1] - window[0]) / 1e9)}
    sample |= {(What.PART, name): Usage(1, ns / 1e9) for name, ns in part_ns.items()}
    spans: dict[Key, list[Interval]] = defaultdict(list)
    families = {name: kernel_family(name) for name in {event.name for event in events}}
    for event in events:
        if event.kind is Kind.COMMUNICATION:
            name = " ".join(operation_and_group(event)).strip()
            spans[(What.COLLECTIVE, name)].append((event.start_ns, event.end_ns))
        else:
            key = (What.KERNEL, families[event.name])
            calls, seconds, _ = sample.get(key, Usage())
            sample[key] = Usage(calls + 1, seconds + (event.end_ns - event.start_ns) / 1e9)
    for call in host_calls:
        call_seconds = sample.get((What.HOST, call.name), Usage()).seconds
        sample[What.HOST, call.name] = Usage(1, call_seconds + (call.end_ns - call.start_ns) / 1e9)
    for mark in marks:
        unit = UNIT_MARK.match(mark.name)
        if unit and mark.on_device and unit.group(2):
            spans[(What.UNIT, unit.group(2))].append((mark.start_ns, mark.end_ns))
    for key, intervals in spans.items():
        covered = union_set(intervals)
        if key[0] is What.UNIT:
            # The annotation of a unit also covers copies, which are no communication
            covered = common_set(covered, communication)
        exposed = set_length(subtract_set(covered, compute)) / 1e9
        sample[key] = Usage(len(intervals), set_length(covered) / 1e9, exposed)
    return sample
