"""Predicted against measured seconds a step: `python tests/bench/bench_seconds.py [ROUNDS [NAME ...]]`.

Real runs in fp32 on two gloo ranks: DDP, FSDP2, DeepSpeed's stages 1 to 3, and offload. They train in
turns of five steps, because the load of a machine changes from minute to minute. Each run calibrates a
prediction of every other run, as `zeromon plan --from RUN` does.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median

os.environ.setdefault("DS_ACCELERATOR", "cpu")
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from records import keep
from support import ROOT, TORCHRUN, Node

from zeromon.memory.plan import Setup, of_run, predict_row
from zeromon.memory.seconds import StepTime
from zeromon.snapshot.step import settled_steps

RANKS = 2
SIZE = "--width 384 --layers 4 --batch 4 --length 128 --steps 31".split()
TORCH = ("ddp", "fsdp2")
DEEPSPEED = ("zero1", "zero2", "zero3", "zero2-offload")


def command(name: str, folder: Path) -> list[str]:
    """The program of a strategy, DeepSpeed's with its configuration in fp32."""
    program = [*TORCHRUN, str(RANKS), str(Path(__file__).with_name("turns_program.py")), *SIZE]
    if name in TORCH:
        return [*program, "--strategy", name]
    config = json.loads((ROOT / f"examples/deepspeed/{name}.json").read_text())
    config.pop("bf16", None)
    path = folder / f"{name}.json"
    path.write_text(json.dumps(config))
    return [*program, "--config", str(path), "--no-compile"]


def one_round(
    number: int, names: Sequence[str], node: Node, folder: Path
) -> dict[str, tuple[float, Setup]]:
    """Name -> median seconds of a step, and the setup of the run."""
    turns = folder / f"turns{number}"
    turns.mkdir()
    running = []
    for place, name in enumerate(names):
        given = {"TURNS": str(turns), "PLACE": str(place), "PLACES": str(len(names))}
        environment = node.environment(f"{name}-{number}", **given)
        quiet = subprocess.DEVNULL
        running.append(
            subprocess.Popen(
                command(name, folder), env=environment, cwd=ROOT, stdout=quiet, stderr=quiet
            )
        )
    deadline = time.monotonic() + 540
    while any(one.poll() is None for one in running):
        if time.monotonic() > deadline or any(one.poll() for one in running):
            for one in running:
                one.terminate()
            raise SystemExit("a program failed, or did not end in nine minutes")
        node.collector.tick()
        time.sleep(0.5)
    found = {}
    for name in names:
        run = node.settle(f"{name}-{number}")
        assert run is not None
        found[name] = median(s.seconds for s in settled_steps(run.ranks[0].steps.recent)), of_run(run)
    return found


def predictions(name: str, runs: dict[str, tuple[float, Setup]]) -> list[float]:
    """The seconds of *name* by the speeds of each other run."""
    found, (_, setup) = [], runs[name]
    for other, (_, source) in runs.items():
        if other != name:
            time = predict_row(replace(setup, measured=source.measured), setup.plan).time
            if isinstance(time, StepTime):
                found.append(time.seconds)
    return found


def main() -> None:
    """One line a strategy and round."""
    folder = Path(tempfile.mkdtemp(prefix="zeromon-bench-"))
    node = Node(folder)
    errors: dict[str, list[float]] = {}
    for number in range(int(sys.argv[1]) if len(sys.argv) > 1 else 1):
        runs = one_round(number, sys.argv[2:] or (*TORCH, *DEEPSPEED), node, folder)
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
    for name, off in errors.items():
        keep(name, median(map(abs, off)), "of the step")


if __name__ == "__main__":
    main()
