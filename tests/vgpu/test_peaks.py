"""The peak of each part of a step by `zeromon plan`, against torch's allocator under the frameworks.

The kernels are timed and compute nothing; the allocator, FSDP, DDP and DeepSpeed are their own code.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from peak_plans import PEAK_ERROR, STEP_ERROR, read_measured, read_planned

from vgpu.conftest import CudaRunner

pytestmark = pytest.mark.vgpu

WIDE = ("--batch", "4", "--length", "1024")
"""The most is at the loss or in backward; with the program's default it is in the optimizer's step."""

CASES = [
    ("ddp", ()),
    ("ddp", WIDE),
    ("ddp", ("--family", "gpt2", "--checkpointing", *WIDE)),
    ("fsdp1", ()),
    ("fsdp1", ("--original", *WIDE)),
    ("fsdp2", ()),
    ("fsdp2", ("--family", "gpt2", *WIDE)),
    ("fsdp2", ("--attention", "eager", "--checkpointing", *WIDE)),
    ("fsdp2", ("--keep", *WIDE)),
    ("fsdp2", ("--optimizer", "fused", "--batch", "2")),
    ("zero0", ()),
    ("zero1", ()),
    ("zero1", ("--grad-dtype", "fp32")),
    pytest.param("zero2", (), marks=pytest.mark.short),
    ("zero2", ("--optimizer", "single")),
    ("zero2", ("--family", "qwen2", "--kv-heads", "4", "--checkpointing", *WIDE)),
    ("zero2", ("--overlap", *WIDE)),
    ("zero3", ()),
    ("zero3", ("--attention", "eager", *WIDE)),
    ("zero3", ("--family", "gpt2", "--checkpointing", *WIDE)),
]


@pytest.mark.parametrize(("strategy", "arguments"), CASES, ids=str)
def test_the_peak_is_that_of_the_allocator(
    strategy: str,
    arguments: tuple[str, ...],
    cuda_run: CudaRunner,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    config = tmp_path / "config.json"
    # Workspaces of cuBLAS take 64 MiB on an H100, whatever the model
    run = cuda_run(
        "peaks.py", strategy, *arguments, "--config", str(config), forked=True,
        PRELOAD="transformers", CUBLAS_WORKSPACE_CONFIG=":16:8",
    )  # fmt: skip
    measured = read_measured(run.output)
    row, numel = read_planned(config, strategy, arguments, capsys)
    assert numel == measured["numel"]
    phases = row["device_bytes_by_phase"]
    if "fp32" not in arguments:  # there the engine reduces within the step
        assert phases["optimizer step"] == pytest.approx(measured["step"], rel=STEP_ERROR)
    peak = max(measured[phase] for phase in ("forward", "loss", "backward", "step"))
    assert row["bytes"]["device"] == pytest.approx(peak, rel=PEAK_ERROR)
