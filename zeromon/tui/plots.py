"""Pictures of a run as plots: memory with capacity and forecast, exposed communication. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from zeromon.history import LEAST, MEDIAN, MOST, NAMES, Series, step_of
from zeromon.snapshot import RankSnapshot, Risk, StepSummary
from zeromon.tui.draw.chart import Curve, Plot
from zeromon.tui.look import WHOLE, Look, nice_ceiling, short
from zeromon.tui.trend import Read, Trend, points
from zeromon.units import human_count

MOST_LINES = 4
"""Up to so many ranks are drawn one by one."""
_ROOM = 1.05
_FAR = 0.4  # a capacity that is further away would flatten the lines
_AHEAD = 0.3  # of the chart's width, for what is to come


def _exposed(step: StepSummary) -> float | None:
    if step.idle or step.end_ns <= step.start_ns:
        return None
    return 100 * step.exposed_ns / (step.end_ns - step.start_ns)


def _exposed_ms(step: StepSummary) -> float | None:
    return None if step.idle else step.exposed_ns / 1e6


def _seconds(step: StepSummary) -> float | None:
    return step.seconds


def _reserved(step: StepSummary) -> float | None:
    return step.reserved_bytes if step.reserved_bytes >= 0 else None


def _allocated(step: StepSummary) -> float | None:
    return step.allocated_bytes if step.allocated_bytes >= 0 else None


def _resident(step: StepSummary) -> float | None:
    return step.rss_bytes if step.rss_bytes >= 0 else None


@dataclass(slots=True)
class Trends:
    """What is kept from picture to picture; one for each choice of ranks."""

    whole: dict[int, tuple[StepSummary, ...]] = field(default_factory=dict)
    """Steps of the whole run, of a few ranks; see :func:`steps_of`."""

    exposed: Trend = field(default_factory=lambda: Trend(_exposed))
    exposed_ms: Trend = field(default_factory=lambda: Trend(_exposed_ms))
    seconds: Trend = field(default_factory=lambda: Trend(_seconds))
    reserved: Trend = field(default_factory=lambda: Trend(_reserved))
    resident: Trend = field(default_factory=lambda: Trend(_resident))


def steps_of(series: Series) -> dict[int, tuple[StepSummary, ...]]:
    """Rank -> its steps in *series*."""
    found: dict[int, list[StepSummary]] = {}
    for row in zip(*(series[name] for name in NAMES), strict=True):
        found.setdefault(row[0], []).append(step_of(row, 0))
    return {rank: tuple(steps) for rank, steps in found.items()}


def telling(ranks: Sequence[RankSnapshot], chosen: int | None) -> list[int]:
    """The ranks that are worth a line of their own: the chosen, the fullest, most exposed, slowest."""
    if len(ranks) <= MOST_LINES:
        return [rank.rank for rank in ranks]
    reads: tuple[Callable[[RankSnapshot], float], ...] = (
        lambda r: r.rank == chosen,
        lambda r: max((risk.ratio for risk in r.risks), default=0.0),
        lambda r: r.exposed_ratio or 0.0,
        lambda r: r.step_seconds or 0.0,
    )
    return sorted({max(ranks, key=read).rank for read in reads})


def _of_all(ranks: Sequence[RankSnapshot], trends: Trends) -> bool:
    """Whether what is kept is of all ranks together, and all are meant."""
    return MOST in trends.whole and len(ranks) > MOST_LINES


def _span(
    ranks: Sequence[RankSnapshot], trends: Trends, look: Look, columns: int
) -> tuple[int, int]:
    """First and last step that are shown."""
    if _of_all(ranks, trends):
        steps = trends.whole[MOST]
        last = steps[-1].step
        return max(steps[0].step, last - look.window + 1 if look.window > 0 else 0), last
    newest = max((rank.recent[-1].step for rank in ranks if rank.recent), default=0)
    oldest = min((rank.recent[0].step for rank in ranks if rank.recent), default=0)
    if look.window == WHOLE:
        return min(1, oldest), newest
    return max(oldest, newest - (look.window or max(2, columns * 2)) + 1), newest


def _curves(
    ranks: Sequence[RankSnapshot], trends: Trends, trend: Trend, read: Read, first: int
) -> tuple[Curve, ...]:
    if _of_all(ranks, trends):
        names = (("most", "s1", MOST), ("median", "s0", MEDIAN), ("least", "s2", LEAST))
        return tuple(
            Curve(name, tone, _from(trends.whole.get(of, ()), read, first))
            for name, tone, of in names
        )
    if trends.whole and MOST not in trends.whole:
        mine = [rank for rank in ranks if rank.rank in trends.whole]
        return tuple(
            Curve(f"rank {rank.rank}", f"s{index}", _wholly(rank, trends.whole[rank.rank], read))
            for index, rank in enumerate(mine)
        )
    if len(ranks) <= MOST_LINES:
        return tuple(
            Curve(f"rank {rank.rank}", f"s{index}", points(rank, read, first))
            for index, rank in enumerate(ranks)
        )
    bands = trend.bands(ranks, first)
    return (
        Curve("most", "s1", [(band.step, band.most) for band in bands]),
        Curve("median", "s0", [(band.step, band.median) for band in bands]),
        Curve("least", "s2", [(band.step, band.least) for band in bands]),
    )


def _from(steps: Sequence[StepSummary], read: Read, first: int) -> list[tuple[float, float]]:
    return [(s.step, value) for s in steps if s.step >= first and (value := read(s)) is not None]


def _told_apart(curves: tuple[Curve, ...], look: Look) -> tuple[Curve, ...]:
    """Without colour by their gaps."""
    if not look.letters:
        return curves
    gaps = (0, 4, 1, 8)
    return tuple(replace(curve, gap=gaps[i % len(gaps)]) for i, curve in enumerate(curves))


def _wholly(
    rank: RankSnapshot, steps: Sequence[StepSummary], read: Read
) -> list[tuple[float, float]]:
    """Of a whole run: what is kept, and what has come since."""
    last = steps[-1].step if steps else 0
    newer = points(rank, read, last + 1)
    return [(s.step, value) for s in steps if (value := read(s)) is not None] + newer


def _top(curves: Sequence[Curve]) -> float:
    return max((value for curve in curves for _, value in curve.points), default=0.0)


def _foot(first: float, last: float) -> tuple[str, str]:
    return f"step {human_count(first)}", human_count(last)


def exposed_plot(
    ranks: Sequence[RankSnapshot], trends: Trends, look: Look, columns: int, marks: Sequence[float]
) -> Plot:
    """Exposed communication a step: as a share of it, or in milliseconds."""
    first, last = _span(ranks, trends, look, columns)
    trend, read = (trends.exposed, _exposed) if look.shares else (trends.exposed_ms, _exposed_ms)
    curves = _curves(ranks, trends, trend, read, first)
    high = nice_ceiling(_top(curves) * _ROOM)
    return Plot(
        curves=_told_apart(curves, look), x=(first, last), y=(0.0, high), ticks=(0.0, high / 2, high),
        axis=short, unit="%" if look.shares else "ms", marks=tuple(marks),
        foot=_foot(first, last),
    )  # fmt: skip


def seconds_plot(
    ranks: Sequence[RankSnapshot], trends: Trends, look: Look, columns: int, marks: Sequence[float]
) -> Plot:
    """The length of a step, milliseconds."""
    first, last = _span(ranks, trends, look, columns)
    curves = tuple(
        Curve(c.name, c.tone, [(step, value * 1e3) for step, value in c.points])
        for c in _curves(ranks, trends, trends.seconds, _seconds, first)
    )
    high = nice_ceiling(_top(curves) * _ROOM)
    return Plot(
        curves=_told_apart(curves, look), x=(first, last), y=(0.0, high), ticks=(0.0, high / 2, high),
        axis=short, unit="ms", marks=tuple(marks), foot=_foot(first, last),
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class MemoryPlot:
    """A plot and what it is of."""

    plot: Plot
    title: str


def memory_plot(
    ranks: Sequence[RankSnapshot], trends: Trends, look: Look, columns: int, marks: Sequence[float]
) -> MemoryPlot:
    """Reserved bytes of devices, or the hosts' resident sets, with the limit and where they lead."""
    first, last = _span(ranks, trends, look, columns)
    device = any(rank.memory is not None for rank in ranks)
    if device:
        curves = _curves(ranks, trends, trends.reserved, _reserved, first)
        if len(ranks) == 1:
            used = Curve("allocated", "s2", points(ranks[0], _allocated, first))
            curves = (Curve("reserved", "s0", curves[0].points), used)
    else:
        curves = _host_curves(ranks, trends, first)
    found = _risk(ranks, "device" if device else "host")
    title = "device memory" if device else "host memory (RSS)"
    return _limited(curves, found, (first, last), look, title, marks)


def _host_curves(ranks: Sequence[RankSnapshot], trends: Trends, first: int) -> tuple[Curve, ...]:
    """Ranks share the host: their sum is what meets its limit."""
    curves = _curves(ranks, trends, trends.resident, _resident, first)
    if len(ranks) < 2 or trends.whole:
        return curves
    bands = trends.resident.bands(ranks, first)
    sums = [(band.step, band.total) for band in bands if band.total is not None]
    whole = Curve("sum", "s3", sums)
    return (whole, *curves) if len(ranks) < MOST_LINES else (whole, curves[0])


def _risk(ranks: Sequence[RankSnapshot], pool: str) -> Risk | None:
    found = [risk for rank in ranks for risk in rank.risks if risk.pool == pool]
    return max(found, key=lambda risk: risk.ratio, default=None)


def _limited(
    curves: tuple[Curve, ...],
    found: Risk | None,
    span: tuple[int, int],
    look: Look,
    title: str,
    marks: Sequence[float],
) -> MemoryPlot:
    first, last = span
    top = _top(curves)
    limit = found.capacity_bytes if found is not None and found.capacity_bytes > 0 else 0
    ahead = _ahead(found, span)
    shows_limit = bool(limit) and (top >= _FAR * limit or ahead is not None or look.shares)
    high = max(limit, top) * _ROOM if shows_limit else top * _ROOM
    divisor, unit = (limit / 100, "%") if look.shares and limit else look.scale(high)
    high = high if shows_limit else nice_ceiling(high / divisor) * divisor
    curves = _told_apart(curves, look)
    if ahead is not None:
        curves = (*curves, ahead)
    end = max([last, *(x for x, _ in ahead.points)] if ahead else [last])
    marked = f"; limit {look.size(limit)}" if limit else ""
    plot = Plot(
        curves=curves, x=(first, end), y=(0.0, high), axis=lambda value: short(value / divisor),
        levels=((float(limit), "capacity"),) if shows_limit else (), marks=tuple(marks), unit=unit,
        ticks=(0.0, limit / 2, limit) if shows_limit else (0.0, high / 2, high),
        foot=_foot(first, end),
    )  # fmt: skip
    return MemoryPlot(plot, f"{title}{marked}")


def _ahead(found: Risk | None, span: tuple[int, int]) -> Curve | None:
    """Where the trend leads, as far as a third of what is shown, or until it is full."""
    if found is None or not found.growth_bytes_per_step or found.steps_left is None:
        return None
    first, last = span
    steps = min(found.steps_left, max(8.0, (last - first) * _AHEAD / (1 - _AHEAD)))
    used = float(found.used_bytes)
    goal = min(float(found.capacity_bytes), used + steps * found.growth_bytes_per_step)
    return Curve("forecast", "forecast", [(last, used), (last + steps, goal)], gap=2)
