"""Trains by each strategy on the virtual device: ``table.py [VERSION:RANKS,... ...] [--only TITLE...]``.

A result says what happened on so many ranks of a version of torch: its losses are those of the CPU
(``right``), it trained but the values are not compared (``runs``), or what stopped it. ``--publish``
stores the results of all strategies for docs/evidence/virtual-device.md.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
if __name__ == "__main__":
    sys.path[:0] = [str(ROOT / name) for name in ("tests", "tools", "")]

import torch  # noqa: E402
from evidence_pages import Entry, commit_here, publish, today  # noqa: E402
from torch import nn  # noqa: E402

from vgpu.environment import DEFAULT, Environment, Missing, find  # noqa: E402
from vgpu.programs.train import Block  # noqa: E402
from vgpu.truth import Timeline  # noqa: E402
from zeromon_vgpu.machine import write_machine  # noqa: E402

HEAD = ("strategy", "torch", "ranks", "result")
TRAIN = Path(__file__).parent / "programs" / "train.py"
LAUNCH = ROOT / "tests" / "programs" / "launch.py"
STEPS, LAYERS, HIDDEN = 6, 8, 64
LEARNING_RATE = 1e-4
"""Low, so that rounding to 16 bits stays small in the losses."""
SHAPE = (
    *("--steps", str(STEPS), "--layers", str(LAYERS)),
    *("--hidden", str(HIDDEN), "--lr", str(LEARNING_RATE)),
)
TIMEOUT = 300.0


@dataclass(frozen=True)
class Strategy:
    """One row of the table."""

    title: str
    arguments: tuple[str, ...]
    tolerance: float | None = 1e-4
    """Relative, of losses against the CPU's; None: arithmetic does not reach them, or another batch."""
    least_ranks: int = 2
    has_arithmetic: bool = True
    dtype: torch.dtype = torch.float32
    """Type of the parameters before the first step."""
    batches: int = 0
    """The number of batches in a step, a rank; 0: one batch."""


STRATEGIES = (
    Strategy("DDP", ("ddp",)),
    Strategy("FSDP1", ("fsdp1",), 0.02),
    Strategy("FSDP2", ("fsdp2",), 0.02),
    Strategy("HSDP", ("hsdp",), 0.02, 4),
    Strategy("ZeRO-1", ("zero1",), 0.02, dtype=torch.bfloat16),
    Strategy("ZeRO-2", ("zero2",), 0.02, dtype=torch.bfloat16),
    Strategy("ZeRO-3", ("zero3",), 0.02, dtype=torch.bfloat16),
    Strategy("tensor parallel", ("tp",)),
    Strategy("pipeline", ("pp",), batches=2),
    Strategy("DDP, `torch.compile`", ("ddp", "--compile"), None, has_arithmetic=False),
    Strategy("DDP, CUDA graph", ("ddp", "--graph"), None, has_arithmetic=False),
    Strategy("FSDP2, offload", ("fsdp2", "--offload"), 0.02),
    Strategy("ZeRO-2, offload", ("zero2", "--offload"), 0.02, dtype=torch.bfloat16),
)


@cache
def cpu_losses(dtype: torch.dtype, batches: int) -> list[float]:
    """The losses of programs/train.py by the CPU in one process, its parameters of *dtype*.

    The optimizer has them in 32 bits, which begin as those of 16 bits, as DeepSpeed's do.
    """
    torch.manual_seed(0)
    model = nn.Sequential(*(Block(HIDDEN) for _ in range(LAYERS))).to(dtype)
    exact = [parameter.detach().float() for parameter in model.parameters()]
    optimizer = torch.optim.AdamW(exact, lr=LEARNING_RATE, foreach=True)
    rows = 64 * batches
    x = torch.sin(torch.arange(rows * HIDDEN, dtype=torch.float32)).reshape(rows, HIDDEN).to(dtype)
    losses = []
    for _ in range(STEPS):
        loss = model(x).float().pow(2).mean()
        gradients = torch.autograd.grad(loss, list(model.parameters()))
        for parameter, gradient in zip(exact, gradients, strict=True):
            parameter.grad = gradient.float()
        optimizer.step()
        with torch.no_grad():
            for parameter, copy in zip(exact, model.parameters(), strict=True):
                copy.copy_(parameter)
        losses.append(loss.item())
    return losses


def reason(output: str) -> str:
    """The error that a run ended with, in one line."""
    refused = re.search(r"vgpu: (\w+): has no model", output)
    pattern = r"^(?:\[rank\d+\]: ?)?([\w.]*(?:Error|Exception|Missing): .*)"
    errors = re.findall(pattern, output, re.MULTILINE)
    if errors:
        return str(errors[-1]).partition(". ")[0][:100].replace("|", "\\|")
    return f"`{refused[1]}` has no model" if refused else "no error named"


def try_strategy(environment: Environment, strategy: Strategy, ranks: int) -> str:
    """Trains, and returns the cell of the table."""
    if ranks < strategy.least_ranks:
        return f"n/a (needs {strategy.least_ranks} ranks)"
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_machine(folder)
        variables = {**os.environ, **environment.variables(folder), "OMP_NUM_THREADS": "1"}
        if strategy.has_arithmetic:
            variables["VGPU_ARITHMETIC"] = "1"
        command = [str(environment.python), str(LAUNCH), str(ranks), str(TRAIN)]
        try:
            done = subprocess.run(
                [*command, *strategy.arguments, *SHAPE],
                env=variables, capture_output=True, text=True, timeout=TIMEOUT,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            return f"not within {TIMEOUT:.0f} s"
        output = done.stdout + done.stderr
        if done.returncode:
            return reason(output)
        steps = [sorted(Timeline.read(folder, rank).steps) for rank in range(ranks)]
        if steps != [list(range(STEPS))] * ranks:
            return "incomplete timeline"
    if strategy.tolerance is None:
        return "runs"
    expected = cpu_losses(strategy.dtype, strategy.batches * ranks or 1)
    lists = [json.loads(found) for found in re.findall(r"losses (\[.*?\])", output)]
    lists = [losses for losses in lists if any(losses)]  # a pipeline's last stage has them
    off = max(
        abs(loss - wanted) / wanted
        for losses in lists
        for loss, wanted in zip(losses, expected, strict=True)
    )
    return "right" if off <= strategy.tolerance else f"losses off by {off:.1%}"


def entries_of(rows: Iterable[list[str]]) -> dict[str, Entry]:
    """One entry per version of torch."""
    by_version: defaultdict[str, list[list[str]]] = defaultdict(list)
    for row in rows:
        by_version[row[1]].append(row)
    return {
        f"strategies-{version}": {
            "tool": "tests/vgpu/table.py", "date": today(), "commit": commit_here(),
            "machine": f"virtual H100, torch {version}", "view": "strategies", "head": list(HEAD),
            "rows": rows,
        }
        for version, rows in by_version.items()
    }  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("columns", nargs="*", default=[f"{DEFAULT}:2,4,8"], metavar="VERSION:RANKS")
    parser.add_argument("--only", nargs="*", default=[], help="titles that contain one of these")
    parser.add_argument("--publish", action="store_true", help="store the results for the page")
    given = parser.parse_args()
    if given.publish and given.only:
        parser.error("--publish stores all strategies: leave out --only")
    columns = []
    try:
        for column in given.columns:
            version, _, counts = column.partition(":")
            columns += [(find(version), int(ranks)) for ranks in counts.split(",")]
    except Missing as missing:
        print(missing, file=sys.stderr)
        return 3
    rows = []
    for strategy in STRATEGIES:
        if given.only and not any(word in strategy.title for word in given.only):
            continue
        for environment, ranks in columns:
            result = try_strategy(environment, strategy, ranks)
            rows.append([strategy.title, environment.version, str(ranks), result])
            print(*rows[-1], sep=" | ", flush=True)
    if given.publish:
        publish("virtual-device", entries_of(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
