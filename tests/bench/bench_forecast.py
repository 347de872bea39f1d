"""The forecast and two baselines on the labelled set: `python tests/bench/bench_forecast.py [EACH]`.

Recall: alarms that were on when memory ran out. Lead: steps from the beginning of that alarm to the end.
False alarms: of healthy runs, and before the trouble of the others began.
"""

from __future__ import annotations

import json
import statistics
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from forecast_series import CAPACITY, Alarm, Score, Series, evaluate, labelled_set, recorded, window

from zeromon.forecast import device_risk
from zeromon.snapshot import StepSummary


def summaries(series: Series, step: int) -> list[StepSummary]:
    """The series as the collector keeps it."""
    reserved, others = dict(series.reserved), dict(series.others)
    return [
        StepSummary(
            step=s, start_ns=0, end_ns=0, idle=False, micro_steps=1, phase_ns=(), collectives=0,
            collective_bytes=0, communication_ns=0, exposed_ns=0, allocated_bytes=used,
            reserved_bytes=reserved.get(s, used), rss_bytes=-1, other_bytes=others.get(s, -1),
        )
        for s, used in window(series.allocated, step)
    ]  # fmt: skip


def zeromon(series: Series, step: int) -> bool:
    """An alarm is a risk of one half and more."""
    risk = device_risk(summaries(series, step), CAPACITY)
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


FORECASTERS: dict[str, Alarm] = {
    "zeromon": zeromon,
    "over 90 %": over_90,
    "linear, 100 steps": linear,
}


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


def main() -> None:
    """One table a forecaster, and JSON on the last line."""
    each = int(sys.argv[1]) if len(sys.argv) > 1 else 20
    totals = {}
    for name, families in run(each).items():
        total, leaks = Score(), Score()
        print(f"{name}:")
        for family, score in families.items():
            total.add(score)
            if family.startswith("leak"):
                leaks.add(score)
            lead = statistics.median(score.leads) if score.leads else 0
            print(
                f"  {family[:40]:40} {score.series:4} series  recall "
                f"{'    -' if not score.failing else f'{score.recall:5.0%}'}  median lead {lead:5.0f}"
                f"  false alarms {score.false_alarms:3}"
            )
        lead = statistics.median(leaks.leads) if leaks.leads else 0
        totals[name] = {
            "series": total.series, "recall": total.recall, "recall_leaks": leaks.recall,
            "median_lead_leaks": lead, "false_per_1000": total.false_rate,
        }  # fmt: skip
        print(
            f"  all: {total.series} series, {total.steps:,} steps; recall {total.recall:.1%}, leaks "
            f"{leaks.recall:.1%} (target 95 %) with a median lead of {lead:.0f} steps (target 50); "
            f"{total.false_rate:.3f} false alarms per 1,000 healthy steps (target 0.1)"
        )
    print(json.dumps(totals))


if __name__ == "__main__":
    main()
