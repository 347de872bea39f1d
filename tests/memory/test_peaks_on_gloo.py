"""The peak of each part of a step by `zeromon plan`, against the CPU allocator under `zeromon run`.

Two ranks on gloo train real models of transformers. torch's profiler reports what the CPU allocator
holds at each allocation of any thread; the plan is that of tests/vgpu/test_peaks.py, made for a GPU.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from peak_plans import PEAK_ERROR, STEP_ERROR, read_measured, read_planned
from support import FORKED, ROOT, Node

SIZES = (
    "--hidden", "256", "--layers", "4", "--heads", "4", "--vocabulary", "1024", "--length", "256",
    "--batch", "2", "--bucket", "1000000", "--steps", "3",
)  # fmt: skip
"""3.7 million parameters; the peak is at the loss."""
FAMILIES = ("llama", "gpt2", "qwen2")
QUICK = {("fsdp2", "qwen2")}
CASES = [
    pytest.param(strategy, family, marks=() if (strategy, family) in QUICK else pytest.mark.long)
    for strategy in ("ddp", "fsdp1", "fsdp2", "zero1", "zero2", "zero3")
    for family in FAMILIES
]


@pytest.mark.parametrize(("strategy", "family"), CASES)
def test_the_peak_is_that_of_the_cpu_allocator(
    strategy: str, family: str, node: Node, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    program = ROOT / "tests" / "vgpu" / "programs" / "peaks.py"
    arguments = (*SIZES, "--family", family)
    config = tmp_path / "config.json"
    command = [*FORKED, "2", str(program), strategy, *arguments, "--config", str(config)]
    variables = {"PRELOAD": f"transformers.models.{family}.modeling_{family}"}
    if strategy.startswith("zero"):
        variables = {"PRELOAD": f"deepspeed {variables['PRELOAD']}", "DS_ACCELERATOR": "cpu"}
    run = node.run(command, **variables)
    assert (run.code, len(run.snapshot.ranks)) == (0, 2), run.output
    measured = read_measured(run.output)
    row, numel = read_planned(config, strategy, arguments, capsys)
    assert numel == measured["numel"]
    parts = row["device_bytes_by_phase"]
    pairs = {
        "loss": (parts["loss"], max(measured["forward"], measured["loss"])),
        "backward": (max(parts["backward"], parts["end of backward"]), measured["backward"]),
        "optimizer step": (parts["optimizer step"], measured["step"]),
    }
    peak = max(actual for _, actual in pairs.values())
    print(
        strategy,
        family,
        {name: f"{(plan - found) / peak:+.1%}" for name, (plan, found) in pairs.items()},
    )
    assert row["bytes"]["device"] == pytest.approx(peak, rel=PEAK_ERROR)
    errors = {name: (planned - actual) / peak for name, (planned, actual) in pairs.items()}
    assert max(map(abs, errors.values())) < PEAK_ERROR, errors
    planned_step, measured_step = pairs["optimizer step"]
    assert planned_step == pytest.approx(measured_step, rel=STEP_ERROR)
