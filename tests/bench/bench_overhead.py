"""The cost that the agent states, against two counts: `python tests/bench/bench_overhead.py`.

Whole runs with and without zeromon in turns (with, without, without, with), timed by the program's own
clock: their difference is what a user pays. And one run whose hooks are timed where they run: the
accounted figure claims to be at least that.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from support import ROOT, TORCHRUN, Node, Result

from zeromon.readout.text import overhead_text
from zeromon.stats.noise import Estimate, half_width

ROUNDS, STEPS = 2, 150
SIZE = ["--width", "192", "--layers", "4", "--batch", "4", "--length", "128", "--log-every", "1000"]
PROGRAM = str(ROOT / "tests/bench/overhead_program.py")


def ran(
    node: Node, strategy: str, steps: int, *, watched: bool, **extra: str
) -> tuple[Result, dict]:
    arguments = ["--strategy", strategy, "--steps", str(steps), *SIZE]
    result = node.run([*TORCHRUN, "2", PROGRAM, *arguments], watched=watched, timeout=600, **extra)
    line = next((x for x in result.output.splitlines() if x.startswith("CLOCK ")), None)
    assert line is not None, result.output
    return result, json.loads(line.removeprefix("CLOCK "))


def measure(strategy: str, rounds: int, steps: int) -> dict[str, object]:
    """The difference of whole runs, the time inside the hooks, and what the agent says."""
    node = Node(Path(tempfile.mkdtemp(prefix="zeromon-bench-")))
    said: list[str] = []
    bounds: list[float] = []
    ratios: list[float] = []
    alike: list[float] = []
    for _ in range(rounds):
        times: dict[bool, list[float]] = {True: [], False: []}
        for watched in (True, False, False, True):
            result, clock = ran(node, strategy, steps, watched=watched)
            times[watched].append(clock["step_ns"])
            if watched:
                said.append(overhead_text(result.snapshot.ranks))
                bounds += [r.accounted_overhead_ratio or 0.0 for r in result.snapshot.ranks]
        ratios.append(sum(times[True]) / sum(times[False]) - 1)
        alike.append(times[False][0] / times[False][1] - 1)
    timed, inside = ran(node, strategy, steps, watched=True, INSIDE="1")
    beside = max(r.accounted_overhead_ratio or 0.0 for r in timed.snapshot.ranks)
    node.close()
    error = statistics.stdev(ratios) / len(ratios) ** 0.5 if len(ratios) > 1 else None
    return {
        "outside": statistics.fmean(ratios),
        "outside_half_width": half_width(Estimate(0.0, error, len(ratios) - 1)),
        "without_against_without": alike,
        "inside": inside["inside"],
        "accounted_beside": beside,
        "accounted": [min(bounds), max(bounds)],
        "said": said,
    }


def main() -> None:
    """Prints one line a strategy, and JSON on the last line."""
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else ROUNDS
    steps = int(sys.argv[2]) if len(sys.argv) > 2 else STEPS
    found = {}
    for strategy in ("ddp", "fsdp2"):
        row = found[strategy] = measure(strategy, rounds, steps)
        lowest, highest = row["accounted"]
        print(
            f"{strategy:6} whole runs {row['outside']:+.1%} (99 %: ± {row['outside_half_width']:.1%}), "
            f"accounted {lowest:.2%} to {highest:.2%}; hooks that are timed inside "
            f"{row['inside']:.2%}, accounted {row['accounted_beside']:.2%}; "
            f"the views say: {row['said'][-1]}",
            flush=True,
        )
    print(json.dumps(found))


if __name__ == "__main__":
    main()
