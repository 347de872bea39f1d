"""Does a trial tell the truth? `python tests/bench/bench_try.py` (as root, for the limited link).

Each case of bench_advice.py that a trial covers: the gain that the trial measures in one run, beside
that of pairs of full runs without and with the diff, with its standard error.
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

from zeromon.readout.trial import CHANGES, result_text
from zeromon.snapshot import RunSnapshot, Trial

LEAD_STEPS, SETTLED = 90, 25
PAIRS, STATES = 6, ("before", "after")
"""Full runs in turns."""


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
        if fired and min(rank.steps for rank in run.ranks) >= SETTLED:
            asked.append(
                node.collector.try_change(run.run, case.rule, 6 if case.single else 12).number
            )

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
        made = trial_of(name)
        pairs = [
            [step_of(measure(name, CASES[name], state), CASES[name]) for state in STATES]
            for _ in range(PAIRS)
        ]
        before, after = (statistics.median(side) for side in zip(*pairs, strict=True))
        gains = [first - second for first, second in pairs]
        rerun, spread = statistics.fmean(gains), statistics.stdev(gains) / PAIRS**0.5
        ratio = (made.gain_seconds or 0.0) / rerun if rerun else 0.0
        print(
            f"{name}: in the run {result_text(made)}; full runs {before * 1e3:.1f} -> "
            f"{after * 1e3:.1f} ms, {rerun * 1e3:.1f} ± {spread * 1e3:.1f} ms; "
            f"in the run / full runs {ratio:.2f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
