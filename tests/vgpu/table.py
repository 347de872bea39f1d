"""Trains by each strategy on the virtual device: ``table.py [--versions V ...] [--ranks N ...]``.

It writes its table into docs/vgpu.md. A cell says what happened on so many ranks of a version of torch:
its losses are those of the CPU (``right``), it trained but the values are not compared (``runs``), or
what stopped it.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
if __name__ == "__main__":
    sys.path[:0] = [str(ROOT / "tests"), str(ROOT)]

from vgpu.environment import DEFAULT, Environment, Missing, find  # noqa: E402
from vgpu.machine import write_machine  # noqa: E402
from vgpu.truth import Timeline  # noqa: E402

PAGE = ROOT / "docs" / "vgpu.md"
BEGIN, END = "<!-- begin: tests/vgpu/table.py writes this table -->\n", "<!-- end -->\n"
TRAIN = Path(__file__).parent / "programs" / "train.py"
LAUNCH = ROOT / "tests" / "programs" / "launch.py"
STEPS, LAYERS, HIDDEN = 6, 8, 64
SHAPE = ("--steps", str(STEPS), "--layers", str(LAYERS), "--hidden", str(HIDDEN))
TIMEOUT = 300.0


@dataclass(frozen=True)
class Strategy:
    """One row of the table."""

    title: str
    arguments: tuple[str, ...]
    tolerance: float | None = 1e-4
    """Of losses against the CPU's; None: kernels that arithmetic does not reach, or another batch."""
    least_ranks: int = 2
    has_arithmetic: bool = True


STRATEGIES = (
    Strategy("DDP", ("ddp",)),
    Strategy("FSDP1", ("fsdp1",), 0.05),
    Strategy("FSDP2", ("fsdp2",), 0.05),
    Strategy("HSDP", ("hsdp",), 0.05, 4),
    Strategy("ZeRO-1", ("zero1",), 0.05),
    Strategy("ZeRO-2", ("zero2",), 0.05),
    Strategy("ZeRO-3", ("zero3",), 0.05),
    Strategy("tensor parallel", ("tp",)),
    Strategy("pipeline", ("pp",), None),
    Strategy("DDP, `torch.compile`", ("ddp", "--compile"), None, has_arithmetic=False),
    Strategy("DDP, CUDA graph", ("ddp", "--graph"), None, has_arithmetic=False),
    Strategy("FSDP2, offload", ("fsdp2", "--offload"), 0.05),
    Strategy("ZeRO-2, offload", ("zero2", "--offload"), 0.05),
)


def cpu_losses() -> list[float]:
    """The losses of programs/train.py by the CPU, in one process."""
    import torch
    from torch import nn

    from vgpu.programs.train import Block

    torch.manual_seed(0)
    model = nn.Sequential(*(Block(HIDDEN) for _ in range(LAYERS)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=True)
    x = torch.sin(torch.arange(64 * HIDDEN, dtype=torch.float32)).reshape(64, HIDDEN)
    losses = []
    for _ in range(STEPS):
        loss = model(x).pow(2).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def reason(output: str) -> str:
    """The error that a run ended with, in one line."""
    refused = re.search(r"vgpu: (\w+): has no model", output)
    errors = re.findall(
        r"^(?:\[rank\d+\]: ?)?(\w+(?:\.\w+)*(?:Error|Exception)\b.*)", output, re.MULTILINE
    )
    text = f"`{refused[1]}` has no model" if refused else errors[-1] if errors else "no error named"
    return text[:100].replace("|", "\\|")


def try_strategy(
    environment: Environment, strategy: Strategy, ranks: int, expected: Sequence[float]
) -> str:
    """Trains, and returns the cell of the table."""
    if ranks < strategy.least_ranks:
        return "n/a"
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
    lists = [json.loads(found) for found in re.findall(r"losses (\[.*\])", output)]
    off = max(
        abs(loss - wanted) / wanted
        for losses in lists
        for loss, wanted in zip(losses, expected, strict=True)
    )
    return "right" if off <= strategy.tolerance else f"losses off by {off:.1%}"


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--versions", nargs="*", default=[DEFAULT])
    parser.add_argument("--ranks", nargs="*", type=int, default=[2, 4, 8])
    options = parser.parse_args()
    try:
        environments = [find(version) for version in options.versions]
    except Missing as missing:
        print(missing, file=sys.stderr)
        return 3
    columns = [(one, ranks) for one in environments for ranks in options.ranks]
    heads = [f"{one.version.removesuffix('.0')}, {ranks} ranks" for one, ranks in columns]
    lines = ["| | " + " | ".join(heads) + " |", "|---" * (len(columns) + 1) + "|"]
    expected = cpu_losses()
    for strategy in STRATEGIES:
        cells = [try_strategy(one, strategy, ranks, expected) for one, ranks in columns]
        lines.append(f"| {strategy.title} | " + " | ".join(cells) + " |")
        print(lines[-1], flush=True)
    before, rest = PAGE.read_text().split(BEGIN)
    _, after = rest.split(END)
    PAGE.write_text(before + BEGIN + "\n" + "\n".join(lines) + "\n\n" + END + after)
    return 0


if __name__ == "__main__":
    sys.exit(main())
