"""Does a trial tell the truth? `python tests/bench/bench_try.py` (as root, for the limited link).

Each case of bench_advice.py that a trial covers: the gain that trials measure in one run each, beside
that of pairs of full runs without and with the diff, with their standard errors.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench_advice import CASES, measure, step_of
from support import Node, over_link, train_command

from zeromon.readout.remedy import CHANGES, result_text
from zeromon.snapshot import RunSnapshot
from zeromon.snapshot.finding import Trial

LEAD_STEPS, SETTLED = 90, 25
PAIRS, STATES = 8, ("before", "after")
BETWEEN = 2
"""Pairs of full runs in turns, with a trial after the first of every two: a drift of the machine is in
both."""


def trial_of(name: str) -> Trial:
    """One run in which the finding's change is tried."""
    case = CASES[name]
    steps = LEAD_STEPS + (500 if case.single else 300)
    node = Node(Path(tempfile.mkdtemp(prefix="zeromon-bench-")))
    asked: list[int] = []

    def look(run: RunSnapshot) -> None:
        if asked:
            if run.trials[-1:] and run.trials[-1].is_open:
                node.collector.renew_trial(run.run, asked[0], go_on=True)
            return
        fired = any(finding.rule == case.rule for finding in run.findings)
        if fired and min(rank.steps.watched_steps for rank in run.ranks) >= SETTLED:
            asked.append(node.collector.try_change(run.run, case.rule, 6 if case.single else 12).number)

    try:
        command = train_command(2, name, "before", str(steps), program="advised.py")
        command = over_link(command, case.link) if case.link else command
        result = node.run(command, seen=look, timeout=400)
        assert result.code == 0, result.output
        assert result.snapshot.trials, "its rule did not fire"
        return result.snapshot.trials[-1]
    finally:
        node.close()


def main() -> None:
    chosen = sys.argv[1:] or [name for name, case in CASES.items() if case.rule in CHANGES]
    for name in chosen:
        tried, rerun = [], []
        for number in range(PAIRS):
            before, after = (step_of(measure(name, CASES[name], s), CASES[name]) for s in STATES)
            rerun.append(before - after)
            if number % BETWEEN == 0:
                made = trial_of(name)
                print(f"{name}: {result_text(made)}; {before - after:.4f} s of a pair", flush=True)
                tried.append(made.gain_seconds or 0.0)
        ratio = statistics.fmean(tried) / statistics.fmean(rerun)
        print(
            f"{name}: {len(tried)} trials {told(tried)}, {PAIRS} pairs of full runs {told(rerun)}; "
            f"in the run / full runs {ratio:.2f}",
            flush=True,
        )


def told(gains: list[float]) -> str:
    """The mean and its standard error."""
    spread = statistics.stdev(gains) / len(gains) ** 0.5
    return f"{statistics.fmean(gains) * 1e3:.1f} ± {spread * 1e3:.1f} ms"


if __name__ == "__main__":
    main()
