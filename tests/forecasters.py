"""The forecast and two baselines on the labelled series of forecast_series.py."""

from __future__ import annotations

import statistics

from forecast_series import CAPACITY, Alarm, Score, Series, evaluate, labelled_set, recorded, window

from zeromon.memory.forecast import device_memory_risk
from zeromon.snapshot import StepSummary

_made: tuple[Series, dict[int, StepSummary]] | None = None
"""The newest series, and its summaries by step."""


def summaries(series: Series, step: int) -> list[StepSummary]:
    """The series up to *step* as the collector keeps it."""
    global _made
    if _made is None or _made[0] is not series:
        _made = series, _summaries(series)
    made = _made[1]
    return [made[s] for s, _ in window(series.allocated, step)]


def _summaries(series: Series) -> dict[int, StepSummary]:
    reserved, others = dict(series.reserved), dict(series.others)
    return {
        s: StepSummary(
            step=s, start_ns=0, end_ns=0, idle=False, micro_steps=1, phase_ns=(), collectives=0,
            collective_bytes=0, communication_ns=0, exposed_ns=0, allocated_bytes=used,
            reserved_bytes=reserved.get(s, used), rss_bytes=-1, other_bytes=others.get(s, -1),
        )
        for s, used in series.allocated
    }  # fmt: skip


def zeromon(series: Series, step: int) -> bool:
    """An alarm is a risk of one half and more."""
    risk = device_memory_risk(summaries(series, step), CAPACITY)
    return risk is not None and risk.ratio >= 0.5


def over_90(series: Series, step: int) -> bool:
    """Baseline: more than 90 % of the capacity is reserved."""
    last = (series.reserved or series.allocated)[step - 1]
    return last[1] > 0.9 * CAPACITY


def linear(series: Series, step: int) -> bool:
    """Baseline: a least-squares line over the last 100 steps reaches the capacity within 1,000."""
    points = window(series.reserved or series.allocated, step)[-100:]
    if len(points) < 20:
        return False
    slope, _ = statistics.linear_regression([s for s, _ in points], [u for _, u in points])
    return slope > 0 and (CAPACITY - points[-1][1]) / slope < 1000


FORECASTERS: dict[str, Alarm] = {"zeromon": zeromon, "over 90 %": over_90, "linear, 100 steps": linear}


def run(
    each: int, seed: int = 1, only: tuple[str, ...] = tuple(FORECASTERS)
) -> dict[str, dict[str, Score]]:
    """Forecaster -> family -> score."""
    found: dict[str, dict[str, Score]] = {name: {} for name in only}
    for series in (*labelled_set(each, seed), *recorded()):
        for name in only:
            score = evaluate(series, FORECASTERS[name])
            found[name].setdefault(series.family, Score()).add(score)
    return found
