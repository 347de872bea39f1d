"""The peak of each part of a step by `zeromon plan`, against torch's allocator under the frameworks.

The kernels are timed and compute nothing; the allocator, FSDP, DDP and DeepSpeed are their own code.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from vgpu.conftest import CudaRunner
from zeromon.cli import main

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
STEP_ERROR, PEAK_ERROR = 0.01, 0.03


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
        "peaks.py", strategy, *arguments, "--config", str(config), CUBLAS_WORKSPACE_CONFIG=":16:8"
    )
    found = re.search(r"^peaks (.*)", run.output, re.MULTILINE)
    assert found is not None, run.output
    measured: dict[str, int] = json.loads(found[1])
    main(["plan", str(config), *plan_options(strategy, arguments, tmp_path), "--json"])
    planned = json.loads(capsys.readouterr().out)
    assert planned["params"] == measured["numel"]
    stage = {"ddp": 0, "fsdp1": 3, "fsdp2": 2 if "--keep" in arguments else 3}.get(strategy)
    stage = int(strategy[-1]) if stage is None else stage
    framework = "deepspeed" if strategy.startswith("zero") else strategy
    row = next(
        row for row in planned["rows"]
        if (row["framework"], row["stage"], row["optimizer_on"]) == (framework, stage, "device")
    )  # fmt: skip
    phases = row["device_bytes_by_phase"]
    if "fp32" not in arguments:  # there the engine reduces within the step
        assert phases["optimizer step"] == pytest.approx(measured["step"], rel=STEP_ERROR)
    peak = max(measured["forward"], measured["backward"], measured["step"])
    assert row["bytes"]["device"] == pytest.approx(peak, rel=PEAK_ERROR)


def plan_options(strategy: str, arguments: tuple[str, ...], folder: Path) -> list[str]:
    """The options of `zeromon plan` for what the program was told."""
    given = dict(zip(arguments, (*arguments[1:], ""), strict=False))
    options = ["--devices", "2", "--micro-batch", given.get("--batch", "1")]
    options += ["--length", given.get("--length", "512")]
    names = {"single": "adamw-for-loop", "fused": "adamw-fused"}
    options += ["--optimizer", names.get(given.get("--optimizer", ""), "adamw")]
    options += ["--checkpointing"] if "--checkpointing" in given else []
    options += ["--no-fused-attention"] if given.get("--attention") == "eager" else []
    if not strategy.startswith("zero"):
        precision = "fp32" if strategy == "ddp" else "fsdp-mixed"
        options += ["--framework", strategy, "--precision", precision]
        return options
    settings: dict[str, Any] = {
        "bf16": {"enabled": True},
        "zero_optimization": {
            "stage": int(strategy[-1]), "overlap_comm": "--overlap" in given,
            "reduce_bucket_size": 20_000_000,
        },
    }  # fmt: skip
    if "--grad-dtype" in given:
        settings["data_types"] = {"grad_accum_dtype": given["--grad-dtype"]}
    path = folder / "deepspeed.json"
    path.write_text(json.dumps(settings))
    return [*options, "--config", str(path)]
