"""Predicted against measured seconds a step: `python tests/bench/bench_seconds.py [ROUNDS]`.

Real runs in fp32 on two gloo ranks: DDP, FSDP2, DeepSpeed's stages 0 to 3, and offload. Each run of a
round calibrates a prediction of every other run of the round, as `zeromon plan --from RUN` does.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from statistics import median

os.environ.setdefault("DS_ACCELERATOR", "cpu")
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from support import ROOT, TORCHRUN, Node

from zeromon.memory.plan import Setup, of_run, row
from zeromon.memory.seconds import StepTime
from zeromon.snapshot.step import settled

RANKS = 2
SIZE = "--width 384 --layers 6 --batch 4 --length 128 --steps 24".split()
TORCH = ("ddp", "fsdp2", "fsdp2-zero2")
DEEPSPEED = ("zero0", "zero1", "zero2", "zero3", "zero2-offload", "zero3-offload")


def command(name: str, folder: Path) -> list[str]:
    """The program of a strategy, DeepSpeed's with its configuration in fp32."""
    if name in TORCH:
        return [str(ROOT / "examples/train_gpt.py"), "--strategy", name]
    config = json.loads((ROOT / f"examples/deepspeed/{name}.json").read_text())
    config.pop("bf16", None)
    path = folder / f"{name}.json"
    path.write_text(json.dumps(config))
    program = str(ROOT / "examples/train_gpt_deepspeed.py")
    return [program, "--config", str(path), "--no-compile"]


def one_round(node: Node, folder: Path) -> dict[str, tuple[float, Setup]]:
    """Name -> median seconds of a step, and the setup of the run."""
    found = {}
    for name in (*TORCH, *DEEPSPEED):
        run = node.run([*TORCHRUN, str(RANKS), *command(name, folder), *SIZE], timeout=300)
        assert run.code == 0, run.output
        steps = settled(run.snapshot.ranks[0].recent)
        found[name] = median(step.seconds for step in steps), of_run(run.snapshot)
    return found


def predictions(name: str, runs: dict[str, tuple[float, Setup]]) -> list[float]:
    """The seconds of *name* by the speeds of each other run."""
    found, (_, setup) = [], runs[name]
    for other, (_, source) in runs.items():
        if other != name:
            time = row(replace(setup, measured=source.measured), setup.plan).time
            if isinstance(time, StepTime):
                found.append(time.seconds)
    return found


def main() -> None:
    """One line a strategy and round, and JSON on the last line."""
    folder = Path(tempfile.mkdtemp(prefix="zeromon-bench-"))
    node = Node(folder)
    errors: dict[str, list[float]] = {}
    for _ in range(int(sys.argv[1]) if len(sys.argv) > 1 else 1):
        runs = one_round(node, folder)
        for name, (measured, _) in runs.items():
            off = [seconds / measured - 1 for seconds in predictions(name, runs)]
            errors.setdefault(name, []).extend(off)
            middle, typical = median(off), median(map(abs, off))
            print(
                f"{name:16} measured {measured * 1e3:7.1f} ms  predicted {middle:+6.1%}  "
                f"error {typical:5.1%} of {len(off)} calibrations",
                flush=True,
            )
    node.close()
    every = [abs(error) for each in errors.values() for error in each]
    print(f"median error {median(every):.1%} (target 15 %)")
    print(json.dumps({name: median(map(abs, off)) for name, off in errors.items()}))


if __name__ == "__main__":
    main()
