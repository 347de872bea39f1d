"""Step time with and without the agent: `bench_step.py [STEPS [large|small|whole ...]] [--of STRATEGY]`.

With --publish, the comparisons of small steps and of whole jobs go to docs/evidence/cost.md.

Three comparisons, by default all:

* large: two gloo ranks, steps of 100 ms and more, the agent switched on and off from step to step: the
  time of a step, and the CPU time of rank 0, which a neighbour on the machine disturbs less. Beside them
  stands what the same arithmetic says of steps without the agent against steps without it. On an idle
  machine the interval is about 1 % with 400 steps, and 0.3 % with 6,000 (half an hour);
* small: the same with a small model, of which many more steps fit into the same time, on one rank and on
  two. The agent does the same in such a step, so its cost is known to a millisecond within minutes. What
  the agent accounts for stands beside it;
* whole: fresh jobs of two ranks with nine units, as a user would compare them: with ``zeromon run`` and
  without, in random order. A job is compared with the one beside it: the time from the command to the
  end of the first step, the first 100 steps, and the steps after them, in which the collector has
  started. Beside it stands the cost that zeromon itself states for the run.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.append(str(Path(__file__).resolve().parents[2] / "tools"))

from evidence_pages import measured_here, publish
from records import keep
from support import ROOT, TORCHRUN, Node, Result, clean_environment

STEPS = 400
SMALL_STEPS = 4
"""Times as many of the small model."""
PAIRS, WARM_UP, TRIMMED = int(os.environ.get("PAIRS", "12")), 20, 0.1
WHOLE_SIZE = ("128", os.environ.get("BATCH", "384"), "0")
PATTERN = [True, False, False, True]
SIZE = ["--width", "192", "--layers", "4", "--batch", "4", "--length", "128"]
SMALL = ["--width", "64", "--layers", "4", "--batch", "2", "--length", "64"]
ZERO_3 = ["--config", str(ROOT / "examples/deepspeed/zero3.json"), "--no-compile"]
WHOLE = ("start", "first", "wall", "cpu")
TITLES = {
    "ddp": "DDP", "fsdp1": "FSDP1", "fsdp2": "FSDP2", "zero2": "ZeRO-2", "zero3": "ZeRO-3",
    "trainer": "DDP by Hugging Face's Trainer",
}  # fmt: skip
"""The programs of whole jobs."""
HEAD = [
    "strategy, step", "start", "first 100 steps", "then, time", "then, CPU of the ranks",
    "collector, of a core", "stated by zeromon",
]  # fmt: skip
TURNS_HEAD = ["strategy, ranks, step", "agent, time", "agent, CPU of rank 0", "accounted by the agent"]
PUBLISHED: dict[str, list[list[str]]] = {"turns": [], "whole": []}
"""The rows of the comparisons of small steps and of whole jobs."""
PROGRAMS: dict[str, list[str]] = {
    "fsdp2": ["--strategy", "fsdp2"],
    "ddp": ["--strategy", "ddp"],
    "zero3": ZERO_3,
}


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


class Whole(NamedTuple):
    """A fresh job of two ranks, in nanoseconds; from :attr:`first` on those of a step."""

    start: float
    """From the command to the end of the first step."""
    first: float
    """The first 100 steps."""
    wall: float
    """The steps after them."""
    cpu: float
    """CPU time of both ranks in those."""
    collector: float = 0.0
    """CPU time of the collector in those."""
    stated: float = math.nan
    """The agent's cost as zeromon states it, as a share of a step."""


def timed_run(strategy: str, steps: int, *, watched: bool) -> Whole:
    """Times a job. *watched*: as a user would, by ``zeromon run``."""
    folder = Path(tempfile.mkdtemp(prefix="zeromon-bench-"))
    environment = clean_environment() | {
        "TIMED": str(steps), "DS_ACCELERATOR": "cpu", "BEGAN": str(time.time_ns()),
        "ZEROMON_DIR": str(folder / "rings"), "ZEROMON_STORE": str(folder / "store"),
        "TRAINER_OUTPUT": str(folder / "trainer"),
    }  # fmt: skip
    prefix = [sys.executable, "-m", "zeromon", "run", "--quiet", "--"] if watched else []
    words = [*prefix, *TORCHRUN, "2", str(ROOT / "tests/bench/count_program.py"), strategy, *WHOLE_SIZE]
    job = subprocess.Popen(
        words, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    assert job.stdout is not None
    found, output, collector = [], "", list[float]()
    for line in job.stdout:
        output += line
        if line.startswith("TIMED "):
            found.append([float(word) for word in line.split()[1:]])
            if watched and len(found) in (4, 6):
                collector.append(collector_cpu_ns(folder / "rings"))
    assert job.wait() == 0 and len(found) == 6, output[-3000:]
    start, first, wall = (statistics.fmean(row[0] for row in found[n : n + 2]) for n in (0, 2, 4))
    row = Whole(start, first, wall, sum(row[1] for row in found[4:]))
    if not watched:
        return row
    report = [sys.executable, "-m", "zeromon", "report", "--json", "--wait", "20"]
    said = json.loads(subprocess.run(report, env=environment, capture_output=True, check=False).stdout)
    stated = [rank["agent"]["accounted_overhead_ratio"] for rank in said["ranks"]]
    known = [one for one in stated if one is not None]  # not in the first seconds
    return row._replace(
        collector=(collector[1] - collector[0]) / steps,
        stated=statistics.fmean(known) if known else math.nan,
    )


def collector_cpu_ns(rings: Path) -> float:
    """CPU time that the collector has used."""
    pid = json.loads((rings / "collector.json").read_text())["pid"]
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) * 1e9 / os.sysconf("SC_CLK_TCK")


def whole_runs(strategy: str, steps: int) -> dict[str, Any]:
    """By which share fresh jobs with zeromon take longer than the ones beside them, in random order."""
    chance, pairs = random.Random(0), list[dict[bool, Whole]]()
    for _ in range(PAIRS):
        order = chance.sample([True, False], 2)
        pairs.append({watched: timed_run(strategy, steps, watched=watched) for watched in order})
    row: dict[str, Any] = {"step_ms": statistics.median(pair[False].wall for pair in pairs) / 1e6}
    for name in ("first", "wall", "cpu"):
        ratios = [getattr(pair[True], name) / getattr(pair[False], name) - 1 for pair in pairs]
        row[name], row[f"{name}_interval"] = trimmed(ratios), interval(ratios)
    starts = [(pair[True].start - pair[False].start) / 1e9 for pair in pairs]
    row["start"], row["start_interval"] = trimmed(starts), interval(starts)
    shares = [pair[True].collector / pair[True].wall for pair in pairs]
    stated = [pair[True].stated for pair in pairs if not math.isnan(pair[True].stated)]
    row["stated"] = statistics.median(stated) if stated else math.nan
    return row | {"collector": statistics.median(shares)}


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
        title = f"{TITLES[strategy]}, {ranks}, {row['step_us'] / 1e3:.1f} ms"
        cells = [one.split(" ", 1)[1] for one in times]
        PUBLISHED["turns"].append([title, *cells, f"{row['accounted_us']:.0f} us"])


def compare_whole(strategy: str, steps: int) -> None:
    """Prints and keeps the comparison of whole jobs."""
    row = whole_runs(strategy, steps)
    cells = []
    for name in WHOLE:
        low, high = row[f"{name}_interval"]
        unit = "s" if name == "start" else "of a step"
        form, of, sign = ("+.2f", 1, "s") if name == "start" else ("+.1f", 100, "%")
        cells.append(f"{of * row[name]:{form}} {sign} ({of * low:{form}} to {of * high:{form}})")
        keep(f"{strategy}, whole jobs, {name}", row[name], unit, noise=(high - low) / 2)
    cells += [f"{row['collector']:.1%}".replace("%", " %"), f"{row['stated']:.2%}".replace("%", " %")]
    print(
        f"{strategy:6} {PAIRS} pairs of whole jobs, step {row['step_ms']:.0f} ms: start {cells[0]}, "
        f"first 100 steps {cells[1]}, then {cells[2]}, CPU of the ranks {cells[3]}; "
        f"collector {cells[4]} of a core; stated by zeromon {cells[5]}",
        flush=True,
    )
    PUBLISHED["whole"].append([f"{TITLES[strategy]}, {row['step_ms']:.0f} ms", *cells])


COMPARISONS = {"large": compare_large, "small": compare_small, "whole": compare_whole}


def main() -> None:
    """Makes the comparisons of each strategy."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("steps", nargs="?", type=int, default=STEPS)
    parser.add_argument("comparisons", nargs="*", metavar="large|small|whole")
    parser.add_argument("--of", choices=TITLES, metavar="STRATEGY", help="one of them alone")
    parser.add_argument("--publish", action="store_true", help="write the tables of the page")
    words = parser.parse_args()
    if not set(words.comparisons) <= COMPARISONS.keys():
        parser.error(f"the comparisons are {', '.join(COMPARISONS)}")
    for name in words.comparisons or COMPARISONS:
        known = TITLES if name == "whole" else PROGRAMS
        for strategy in [words.of] if words.of else known:
            COMPARISONS[name](strategy, words.steps)
    heads = {"turns": TURNS_HEAD, "whole": HEAD}
    tables = {
        name: measured_here("tests/bench/bench_step.py", head=heads[name], rows=rows)
        for name, rows in PUBLISHED.items()
        if rows
    }
    if words.publish and tables:
        publish("cost", tables)


if __name__ == "__main__":
    main()
