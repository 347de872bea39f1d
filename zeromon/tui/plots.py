"""The chart specifications of :mod:`zeromon.readout.charts` as plots for the terminal. Pure."""

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from zeromon.base.units import byte_scale, human_bytes, human_count
from zeromon.readout import charts
from zeromon.readout.charts import FAR, ChartSpec, Forecast, Read
from zeromon.readout.figures import BYTES, RATIO
from zeromon.snapshot import RankSnapshot, StepSummary
from zeromon.storage.step_history.queries import LEAST, MEDIAN, MOST
from zeromon.storage.step_history.rows import NAMES, Series, step_of as summary_of
from zeromon.tui.columns import WHOLE_RUN, DisplayOptions, format_three_digits, nice_ceiling
from zeromon.tui.drawing import Curve, Plot

_MAX_KEPT_STEPS = 4096
_UNSETTLED = 2  # ranks may differ in their newest steps, which are read again
_MAX_READS = 24_000


class MinMedianMax(NamedTuple):
    """The values of one step over all ranks."""

    step: int
    min: float
    median: float
    max: float
    total: float | None
    """The sum; None where a rank has not ended the step."""


class Trend:
    """The bands of one figure of one run.

    Values of earlier steps are kept, so that a snapshot of a thousand ranks costs only its newest steps.
    """

    def __init__(self, reader: Read) -> None:
        self._read = reader
        self._kept: dict[int, MinMedianMax | None] = {}
        self._settled = 0

    def bands(
        self, ranks: Sequence[RankSnapshot], start: int, reads: int = _MAX_READS
    ) -> list[MinMedianMax]:
        """The bands from step *start* on. Reads at most *reads* values, those of the newest steps first.

        The older steps follow with the next snapshots.
        """
        last_step = max((rank.steps.recent[-1].step for rank in ranks if rank.steps.recent), default=0)
        for step in range(last_step, max(0, start) - 1, -1):
            if step not in self._kept or step > self._settled:
                if reads <= 0:
                    break
                self._kept[step] = self._band_of_step(ranks, step)
                reads -= len(ranks)
        self._settled = max(self._settled, last_step - _UNSETTLED)
        while len(self._kept) > _MAX_KEPT_STEPS:
            del self._kept[min(self._kept)]
        bands = (self._kept.get(step) for step in range(max(0, start), last_step + 1))
        return [band for band in bands if band is not None]

    def _band_of_step(self, ranks: Sequence[RankSnapshot], step: int) -> MinMedianMax | None:
        values = []
        for rank in ranks:
            summary = step_of(rank.steps.recent, step)
            value = None if summary is None else self._read(summary)
            if value is not None:
                values.append(value)
        if not values:
            return None
        values.sort()
        total = sum(values) if len(values) == len(ranks) else None
        return MinMedianMax(step, values[0], values[len(values) // 2], values[-1], total)


def step_of(recent: Sequence[StepSummary], step: int) -> StepSummary | None:
    """The summary of *step* in *recent*; None where it is absent."""
    if not recent:
        return None
    # Steps mostly have no gaps, so their place is a subtraction; the search is for lost records
    at = len(recent) - 1 - (recent[-1].step - step)
    if not (0 <= at < len(recent) and recent[at].step == step):
        at = bisect_left(recent, step, key=lambda summary: summary.step)
    return recent[at] if at < len(recent) and recent[at].step == step else None


def points_of(steps: Sequence[StepSummary], reader: Read, start: int) -> list[tuple[float, float]]:
    """(step, value) of *steps*, from step *start* on."""
    return [(s.step, value) for s in steps if s.step >= start and (value := reader(s)) is not None]


# ---- plots -----------------------------------------------------------------------------------

MAX_RANK_LINES = 4
"""Up to this many ranks have a line each."""
_HEADROOM = 1.05
_FORECAST_SHARE = 0.3  # of the chart's width, for the forecast


@dataclass(slots=True)
class Trends:
    """The trends over earlier snapshots; one object for each choice of ranks."""

    whole: dict[int, tuple[StepSummary, ...]] = field(default_factory=dict)
    """Steps of the whole run, of a few ranks; see :func:`steps_by_rank`."""
    _known: dict[Read, Trend] = field(default_factory=dict)

    def of(self, reader: Read) -> Trend:
        """The trend of one figure; the same object for the same *reader*."""
        if reader not in self._known:
            self._known[reader] = Trend(reader)
        return self._known[reader]


@dataclass(frozen=True, slots=True)
class TitledPlot:
    """A chart of some ranks, and its title."""

    plot: Plot
    title: str
    """With the limit, where the chart has one."""
    a_step: str
    """The quantity per step (``share of a step``); "" where that is no question."""


def steps_by_rank(series: Series) -> dict[int, tuple[StepSummary, ...]]:
    """Rank -> its steps in *series*."""
    steps: dict[int, list[StepSummary]] = {}
    for row in zip(*(series[name] for name in NAMES), strict=True):
        steps.setdefault(row[0], []).append(summary_of(row, 0))
    return {rank: tuple(rank_steps) for rank, rank_steps in steps.items()}


def telling_ranks(ranks: Sequence[RankSnapshot], chosen: int | None) -> list[int]:
    """The ranks that get a line of their own: the chosen, fullest, most exposed and slowest one."""
    if len(ranks) <= MAX_RANK_LINES:
        return [rank.rank for rank in ranks]
    reads: tuple[Callable[[RankSnapshot], float], ...] = (
        lambda r: r.rank == chosen,
        lambda r: max((risk.ratio for risk in r.memory.risks), default=0.0),
        lambda r: r.communication.exposed_ratio or 0.0,
        lambda r: r.steps.median_seconds or 0.0,
    )
    return sorted({max(ranks, key=reader).rank for reader in reads})


def plots_by_name(
    ranks: Sequence[RankSnapshot],
    trends: Trends,
    options: DisplayOptions,
    columns: int,
    marks: Sequence[float],
) -> dict[str, TitledPlot]:
    """Every chart of *ranks*, *columns* cells wide, by its name."""
    return {
        spec.name: plot_of(spec, ranks, trends, options, columns, marks)
        for spec in charts.charts_of(ranks)
    }


def plot_of(
    spec: ChartSpec,
    ranks: Sequence[RankSnapshot],
    trends: Trends,
    options: DisplayOptions,
    columns: int,
    marks: Sequence[float],
) -> TitledPlot:
    """One chart of *ranks*: its lines, its limit and its forecast."""
    start, last_step = _drawn_steps(ranks, trends, options, columns)
    reader = spec.share if options.shares and spec.share is not None else spec.read
    curves = _curves_with_gaps(_curves_of_spec(spec, reader, ranks, trends, start), options)
    limit = charts.limit_of(spec, ranks)
    capacity = limit.nbytes if limit is not None else 0
    ahead = _forecast_curve(charts.forecasts_of(limit), (start, last_step))
    heights = [value for curve in curves for _, value in curve.points]
    top, lowest = max(heights, default=0.0), min(heights, default=0.0)
    # The axis begins at 0, but for a loss below it
    low = -nice_ceiling(-lowest) if lowest < 0 else 0.0
    shows_limit = bool(capacity) and (top >= FAR * capacity or ahead is not None or options.shares)
    high = (max(capacity, top) if shows_limit else top) * _HEADROOM
    divisor, unit = _axis_scale(spec, options, high, capacity)
    high = high if shows_limit else nice_ceiling(high / divisor) * divisor
    stop = max([last_step, *(x for x, _ in ahead.points)] if ahead else [last_step])
    plot = Plot(
        curves=(*curves, ahead) if ahead is not None else curves, x=(start, stop), y=(low, high),
        axis=lambda value: format_three_digits(value / divisor), unit=unit, marks=tuple(marks),
        levels=((float(capacity), "capacity"),) if shows_limit else (),
        ticks=(0.0, capacity / 2, capacity) if shows_limit else (low, (low + high) / 2, high),
        foot=(f"step {human_count(start)}", human_count(stop)),
    )  # fmt: skip
    has_limit = capacity and not spec.shared  # that of the host moves
    title = f"{spec.title}; limit {human_bytes(capacity)}" if has_limit else spec.title
    a_step = "" if spec.share is None else "share of a step" if options.shares else "per step"
    return TitledPlot(plot, title, a_step)


def _axis_scale(
    spec: ChartSpec, options: DisplayOptions, high: float, capacity: int
) -> tuple[float, str]:
    """The divisor of values, and the unit that they have then."""
    if spec.unit is BYTES:
        return (capacity / 100, "%") if options.shares and capacity else byte_scale(high)
    unit = RATIO if options.shares and spec.share is not None else spec.unit
    return 1 / unit.scale, unit.symbol


def _covers_all_ranks(ranks: Sequence[RankSnapshot], trends: Trends) -> bool:
    """Returns whether *trends* has steps of all ranks together, and all ranks are drawn."""
    return MOST in trends.whole and len(ranks) > MAX_RANK_LINES


def _drawn_steps(
    ranks: Sequence[RankSnapshot], trends: Trends, options: DisplayOptions, columns: int
) -> tuple[int, int]:
    if _covers_all_ranks(ranks, trends):
        steps = trends.whole[MOST]
        final = steps[-1].step
        return max(steps[0].step, final - options.window + 1 if options.window > 0 else 0), final
    newest_step = max((rank.steps.recent[-1].step for rank in ranks if rank.steps.recent), default=0)
    oldest_step = min((rank.steps.recent[0].step for rank in ranks if rank.steps.recent), default=0)
    if options.window == WHOLE_RUN:
        return min(1, oldest_step), newest_step
    return max(oldest_step, newest_step - (options.window or max(2, columns * 2)) + 1), newest_step


def _curves_of_spec(
    spec: ChartSpec, reader: Read, ranks: Sequence[RankSnapshot], trends: Trends, start: int
) -> tuple[Curve, ...]:
    curves = _curves_of_ranks(ranks, trends, reader, start)
    if len(ranks) == 1 and spec.beside:
        own_curve = Curve(spec.quantity or spec.title, "s0", curves[0].points)
        tones = ("s2", "s1", "s3")
        return (
            own_curve,
            *(
                Curve(name, tone, points_of(ranks[0].steps.recent, side_reader, start))
                for (name, side_reader), tone in zip(spec.beside, tones, strict=False)
            ),
        )
    if spec.shared and len(ranks) > 1 and not trends.whole:
        bands = trends.of(reader).bands(ranks, start)
        sums = [(band.step, band.total) for band in bands if band.total is not None]
        sum_curve = Curve("sum", "s3", sums)
        return (sum_curve, *curves) if len(ranks) < MAX_RANK_LINES else (sum_curve, curves[0])
    return curves


def _curves_of_ranks(
    ranks: Sequence[RankSnapshot], trends: Trends, reader: Read, start: int
) -> tuple[Curve, ...]:
    """A curve for each rank; of many ranks the highest, the median and the lowest value."""
    names = (("max", "s1", MOST), ("median", "s0", MEDIAN), ("min", "s2", LEAST))
    if _covers_all_ranks(ranks, trends):
        return tuple(
            Curve(name, tone, points_of(trends.whole.get(of, ()), reader, start))
            for name, tone, of in names
        )
    recorded = [rank for rank in ranks if rank.rank in trends.whole]
    if recorded or len(ranks) <= MAX_RANK_LINES:
        return tuple(
            Curve(f"rank {rank.rank}", f"s{index}", _points_of_rank(rank, trends, reader, start))
            for index, rank in enumerate(recorded or ranks)
        )
    bands = trends.of(reader).bands(ranks, start)
    return tuple(
        Curve(name, tone, [(band.step, getattr(band, name)) for band in bands])
        for name, tone, _ in names
    )


def _points_of_rank(
    rank: RankSnapshot, trends: Trends, reader: Read, start: int
) -> list[tuple[float, float]]:
    """The points of a rank: those of its record, and the newer ones of the snapshot."""
    recorded = trends.whole.get(rank.rank, ())
    newer = points_of(rank.steps.recent, reader, recorded[-1].step + 1 if recorded else start)
    return points_of(recorded, reader, 0) + newer


def _curves_with_gaps(curves: tuple[Curve, ...], options: DisplayOptions) -> tuple[Curve, ...]:
    """Without colour, curves differ by their gaps."""
    if not options.letters:
        return curves
    gaps = (0, 4, 1, 8)
    return tuple(replace(curve, gap=gaps[i % len(gaps)]) for i, curve in enumerate(curves))


def _forecast_curve(forecasts: Sequence[Forecast], span: tuple[int, int]) -> Curve | None:
    """The expected way to the limit, for a third of the drawn width or until the limit is reached."""
    if not forecasts or not forecasts[0].growth_bytes_per_step:
        return None
    (start, final), forecast = span, forecasts[0]
    steps = min(forecast.steps, max(8.0, (final - start) * _FORECAST_SHARE / (1 - _FORECAST_SHARE)))
    endpoints = [(final, float(forecast.used_bytes)), (final + steps, forecast.after(steps))]
    return Curve(forecast.name, "forecast", endpoints, gap=2)
