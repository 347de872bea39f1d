"""The forecast and two baselines on the labelled set: `python tests/bench/bench_forecast.py [EACH]`.

Recall: alarms that were on when memory ran out. Lead: steps from the beginning of that alarm to the end.
False alarms: of healthy runs, and before the trouble of the others began.
"""

from __future__ import annotations

import statistics
import sys
from pathlib import Path

from records import keep

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from forecast_series import Score
from forecasters import run


def main() -> None:
    """One table a forecaster."""
    each = int(sys.argv[1]) if len(sys.argv) > 1 else 20
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
        if name == "zeromon":  # the series are seeded
            keep("recall", total.recall, "", "higher", noise=0)
            keep("recall of leaks", leaks.recall, "", "higher", noise=0)
            keep("median lead of leaks", lead, "steps", "higher", noise=0)
            keep("false alarms", total.false_rate, "in 1,000 steps", noise=0)
        print(
            f"  all: {total.series} series, {total.steps:,} steps; recall {total.recall:.1%}, leaks "
            f"{leaks.recall:.1%} (target 95 %) with a median lead of {lead:.0f} steps (target 50); "
            f"{total.false_rate:.3f} false alarms per 1,000 healthy steps (target 0.1)"
        )


if __name__ == "__main__":
    main()
