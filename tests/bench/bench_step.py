"""Step time with and without the agent, alternating in one process: `python tests/bench/bench_step.py`.

Two gloo ranks, steps of 100 ms and more. Beside the figure stands what the same arithmetic says of
steps without the agent against steps without it. The agent's own live figure stands beside it.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from support import ROOT, TORCHRUN, Node, Result

STEPS = 400
PATTERN = [True, False, False, True]
SIZE = ["--width", "192", "--layers", "4", "--batch", "4", "--length", "128"]
ZERO_3 = ["--config", str(ROOT / "examples/deepspeed/zero3.json"), "--no-compile"]
PROGRAMS = {
    "fsdp2": ("train_gpt.py", ["--strategy", "fsdp2"]),
    "ddp": ("train_gpt.py", ["--strategy", "ddp"]),
    "zero3": ("train_gpt_deepspeed.py", ZERO_3),
}


def ratio(pairs: list[tuple[int, int]]) -> tuple[float, float]:
    """By how much the first of a pair exceeds the second: the median, and its standard error."""
    ratios = [first / second - 1 for first, second in pairs]
    middle = statistics.median(ratios)
    spread = 1.4826 * statistics.median(abs(r - middle) for r in ratios)
    return middle, 1.253 * spread / len(ratios) ** 0.5


def without_errors(result: Result) -> Result:
    """Ends the benchmark where a hook has failed on any rank, for a failing hook costs less."""
    errors = {rank.rank: rank.errors for rank in result.snapshot.ranks if rank.errors}
    if errors:
        raise SystemExit(f"hook calls failed, by rank: {errors}\n{result.output[-2000:]}")
    return result


def quads(times: list[tuple[int, int]]) -> list[list[int]]:
    """Steps in fours of on, off, off, on."""
    start = next(i for i in range(4) if [m > 0 for m, _ in times[i : i + 4]] == PATTERN)
    whole = range(start, len(times) - 3, 4)
    return [[t for _, t in times[i : i + 4]] for i in whole]


def measure(strategy: str, steps: int) -> dict[str, float]:
    """On against off, off against off, and the live figure."""
    node = Node(Path(tempfile.mkdtemp(prefix="zeromon-bench-")))
    name, arguments = PROGRAMS[strategy]
    arguments = [*arguments, "--steps", str(steps), *SIZE]
    program = [*TORCHRUN, "2", str(ROOT / "tests/bench/step_program.py")]
    alternating = without_errors(
        node.run([*program, *arguments], timeout=600, DS_ACCELERATOR="cpu")
    )
    line = next((x for x in alternating.output.splitlines() if x.startswith("TIMES ")), None)
    assert line is not None, alternating.output
    fours = quads(json.loads(line.removeprefix("TIMES ")))
    cost, cost_noise = ratio([(on1 + on2, off1 + off2) for on1, off1, off2, on2 in fours])
    # the same arithmetic on steps without the agent: off, off of one four against those of the next
    idle, idle_noise = ratio(
        [(a[1] + b[2], a[2] + b[1]) for a, b in zip(fours[::2], fours[1::2], strict=False)]
    )
    example = [*TORCHRUN, "2", str(ROOT / "examples" / name), *arguments, "--log-every", "1000"]
    plain = without_errors(node.run(example, timeout=600, DS_ACCELERATOR="cpu"))
    rank = plain.snapshot.ranks[0]
    node.close()
    return {
        "collectives": sum(row.count for row in rank.collectives) / max(rank.steps, 1),
        "step_ms": statistics.median(four[1] for four in fours) / 1e6,
        "on_off": cost,
        "on_off_noise": cost_noise,
        "off_off": idle,
        "off_off_noise": idle_noise,
        "live": rank.overhead_ratio if rank.overhead_ratio is not None else float("nan"),
        "live_noise": rank.overhead_noise_ratio or float("nan"),
    }


def main() -> None:
    """Prints one line a strategy, and JSON on the last line."""
    steps = int(sys.argv[1]) if len(sys.argv) > 1 else STEPS
    found = {}
    for strategy in PROGRAMS:
        began = time.monotonic()
        row = found[strategy] = measure(strategy, steps)
        print(
            f"{strategy:6} step {row['step_ms']:.0f} ms, {row['collectives']:.0f} collectives: "
            f"agent {row['on_off']:+.2%} ±{row['on_off_noise']:.2%} (target 0.5 %; "
            f"off against off {row['off_off']:+.2%} ±{row['off_off_noise']:.2%}); "
            f"live figure {row['live']:+.2%} ±{row['live_noise']:.2%} "
            f"[{time.monotonic() - began:.0f} s]",
            flush=True,
        )
    print(json.dumps(found))


if __name__ == "__main__":
    main()
