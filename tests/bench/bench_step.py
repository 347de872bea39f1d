"""Step time with and without the agent: `bench_step.py [STEPS [large|small|whole ...]] [--of STRATEGY]`.

Three comparisons, by default all:

* large: two gloo ranks, steps of 100 ms and more, the agent switched on and off from step to step: the
  time of a step, and the CPU time of rank 0, which a neighbour on the machine disturbs less. Beside them
  stands what the same arithmetic says of steps without the agent against steps without it. On an idle
  machine the interval is about 1 % with 400 steps, and 0.3 % with 6,000 (half an hour);
* small: the same with a small model, of which many more steps fit into the same time, on one rank and on
  two. The agent does the same in such a step, so its cost is known to a millisecond within minutes. What
  the agent accounts for stands beside it;
* whole: whole runs of one rank in turns, with, without, without, with.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from records import keep
from support import ROOT, TORCHRUN, Node, Result

STEPS = 400
SMALL_STEPS = 4
"""Times as many of the small model."""
ROUNDS, WARM_UP, TRIMMED = 3, 20, 0.1
PATTERN = [True, False, False, True]
SIZE = ["--width", "192", "--layers", "4", "--batch", "4", "--length", "128"]
SMALL = ["--width", "64", "--layers", "4", "--batch", "2", "--length", "64"]
ZERO_3 = ["--config", str(ROOT / "examples/deepspeed/zero3.json"), "--no-compile"]
PROGRAMS = {"fsdp2": ["--strategy", "fsdp2"], "ddp": ["--strategy", "ddp"], "zero3": ZERO_3}


def ratio(pairs: list[tuple[int, int]]) -> tuple[float, float]:
    """By how much the first of a pair exceeds the second: the median, and half its 95 % interval."""
    ratios = [first / second - 1 for first, second in pairs]
    middle = statistics.median(ratios)
    spread = 1.4826 * statistics.median(abs(r - middle) for r in ratios)
    return middle, 1.96 * 1.253 * spread / len(ratios) ** 0.5


def without_errors(result: Result) -> Result:
    """Ends the benchmark where a hook has failed on any rank, for a failing hook costs less."""
    errors = {rank.rank: rank.agent.errors for rank in result.snapshot.ranks if rank.agent.errors}
    if errors:
        raise SystemExit(f"hook calls failed, by rank: {errors}\n{result.output[-2000:]}")
    return result


Step = tuple[int, int, int, int]
"""Mode, duration, what the agent accounts for, and CPU time of the process, in nanoseconds."""
DURATION, ACCOUNTED, CPU = 1, 2, 3


def quads(steps: list[Step]) -> list[list[Step]]:
    """Steps in fours of on, off, off, on."""
    start = next(i for i in range(4) if [m > 0 for m, *_ in steps[i : i + 4]] == PATTERN)
    return [steps[i : i + 4] for i in range(start, len(steps) - 3, 4)]


def trimmed(values: Sequence[float]) -> float:
    """The mean without the tenth at either end: what a neighbour on the machine did."""
    ordered, cut = sorted(values), int(len(values) * TRIMMED)
    return statistics.fmean(ordered[cut : len(ordered) - cut])


def interval(values: Sequence[float]) -> tuple[float, float]:
    """95 % of the trimmed mean, by 1,000 random resamplings of a fixed seed."""
    chance = random.Random(0)
    found = sorted(trimmed(chance.choices(values, k=len(values))) for _ in range(1000))
    return found[25], found[974]


def train(strategy: str, ranks: int, steps: int, size: list[str], **how: Any) -> list[Step]:
    """The steps of rank 0, without those that warm up."""
    node = Node(Path(tempfile.mkdtemp(prefix="zeromon-bench-")))
    program = [*TORCHRUN, str(ranks), str(ROOT / "tests/bench/step_program.py")]
    program += PROGRAMS[strategy]
    program += ["--steps", str(steps + WARM_UP), *size, "--log-every", "100000"]
    result = node.run(program, timeout=900 + steps, DS_ACCELERATOR="cpu", **how)
    if result.newest is not None:
        without_errors(result)
    node.close()
    line = next((x for x in result.output.splitlines() if x.startswith("TIMES ")), None)
    assert line is not None, result.output
    return [tuple(step) for step in json.loads(line.removeprefix("TIMES "))][WARM_UP:]


def alternating(strategy: str, steps: int) -> dict[str, float]:
    """Two ranks: on against off, and off against off, in time and in CPU time."""
    fours = quads(train(strategy, 2, steps, SIZE))
    found = {"step_ms": statistics.median(four[1][DURATION] for four in fours) / 1e6}
    for what, n in (("", DURATION), ("cpu_", CPU)):
        on_off = ratio([(a[n] + d[n], b[n] + c[n]) for a, b, c, d in fours])
        # the same arithmetic on steps without the agent: off, off of one four against those of the next
        pairs = zip(fours[::2], fours[1::2], strict=False)
        off_off = ratio([(a[1][n] + b[2][n], a[2][n] + b[1][n]) for a, b in pairs])
        found |= dict(zip((f"{what}on_off", f"{what}on_off_noise"), on_off, strict=True))
        found |= dict(zip((f"{what}off_off", f"{what}off_off_noise"), off_off, strict=True))
    return found


def small(strategy: str, ranks: int, steps: int) -> dict[str, Any]:
    """What the agent adds to a step, in time and in CPU time, and what it accounts for itself."""
    fours = quads(train(strategy, ranks, steps, SMALL))

    def more(n: int) -> list[float]:
        return [(a[n] + d[n] - b[n] - c[n]) / 2e3 for a, b, c, d in fours]

    return {
        "step_us": trimmed([(b[DURATION] + c[DURATION]) / 2e3 for _, b, c, _ in fours]),
        "cost_us": trimmed(more(DURATION)),
        "cost_interval_us": interval(more(DURATION)),
        "cpu_us": trimmed(more(CPU)),
        "cpu_interval_us": interval(more(CPU)),
        "accounted_us": statistics.fmean(more(ACCOUNTED)),
    }


def whole_runs(strategy: str, steps: int) -> dict[str, Any]:
    """One rank: by which share runs with the agent are longer, and runs without it among themselves."""
    ratios, alike = [], []
    for _ in range(ROUNDS):
        times: dict[bool, list[float]] = {True: [], False: []}
        for watched in PATTERN:
            found = train(strategy, 1, steps, SMALL, watched=watched, WHOLE="1")
            times[watched].append(trimmed([step[1] for step in found]))
        ratios.append(sum(times[True]) / sum(times[False]) - 1)
        alike.append(abs(times[False][0] / times[False][1] - 1))
    return {"ratio": statistics.fmean(ratios), "ratios": ratios, "alike": alike}


def compare_large(strategy: str, steps: int) -> None:
    """Prints and keeps the comparison of large steps."""
    row = alternating(strategy, steps)
    print(
        f"{strategy:6} two ranks, step {row['step_ms']:.0f} ms: "
        f"agent {row['on_off']:+.2%} ±{row['on_off_noise']:.2%} (target 0.5 %; "
        f"off against off {row['off_off']:+.2%} ±{row['off_off_noise']:.2%}), "
        f"CPU {row['cpu_on_off']:+.2%} ±{row['cpu_on_off_noise']:.2%} "
        f"(off against off {row['cpu_off_off']:+.2%} ±{row['cpu_off_off_noise']:.2%})",
        flush=True,
    )
    keep(f"{strategy}, agent", row["on_off"], "of a step", noise=row["on_off_noise"])
    keep(f"{strategy}, agent, CPU", row["cpu_on_off"], "of a step", noise=row["cpu_on_off_noise"])


def compare_small(strategy: str, steps: int) -> None:
    """Prints and keeps the comparison of small steps, on one rank and on two."""
    for ranks in (1, 2):
        row = small(strategy, ranks, steps * SMALL_STEPS)
        times = []
        for what, name in (("cost", "agent"), ("cpu", "CPU")):
            low, high = row[f"{what}_interval_us"]
            times.append(f"{name} {row[f'{what}_us']:.0f} us ({low:.0f} to {high:.0f})")
            title = f"{strategy}, {name}, {'one rank' if ranks == 1 else 'two ranks'}"
            keep(title, row[f"{what}_us"], "us", noise=(high - low) / 2)
        print(
            f"{strategy:6} ranks: {ranks}, step {row['step_us'] / 1e3:.1f} ms: {', '.join(times)}, "
            f"accounted {row['accounted_us']:.0f} us",
            flush=True,
        )


def compare_whole(strategy: str, steps: int) -> None:
    """Prints the comparison of whole runs."""
    row = whole_runs(strategy, steps)
    ratios = ", ".join(f"{ratio:+.1%}" for ratio in row["ratios"])
    print(
        f"{strategy:6} whole runs of one rank: {row['ratio']:+.1%} ({ratios}); "
        f"without against without up to {max(row['alike']):.1%}",
        flush=True,
    )


COMPARISONS = {"large": compare_large, "small": compare_small, "whole": compare_whole}


def main() -> None:
    """Makes the comparisons of each strategy."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("steps", nargs="?", type=int, default=STEPS)
    parser.add_argument("comparisons", nargs="*", metavar="large|small|whole")
    parser.add_argument("--of", choices=PROGRAMS, metavar="STRATEGY", help="one of them alone")
    words = parser.parse_args()
    if not set(words.comparisons) <= COMPARISONS.keys():
        parser.error(f"the comparisons are {', '.join(COMPARISONS)}")
    for strategy in [words.of] if words.of else PROGRAMS:
        for name in words.comparisons or COMPARISONS:
            COMPARISONS[name](strategy, words.steps)


if __name__ == "__main__":
    main()
