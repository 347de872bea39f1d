"""The plan of a program of vgpu/programs/peaks.py, by its own arguments."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from zeromon.cli import main

STEP_ERROR, PEAK_ERROR = 0.01, 0.03


def read_measured(output: str) -> dict[str, int]:
    """Phase -> peak bytes, and ``numel``, as rank 0 has printed them."""
    line = re.search(r"^peaks (.*)", output, re.MULTILINE)
    assert line is not None, output
    measured: dict[str, int] = json.loads(line[1])
    return measured


def read_planned(
    config: Path, strategy: str, arguments: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> tuple[dict[str, Any], int]:
    """The row of `zeromon plan` for the program's strategy, and the number of parameters."""
    capsys.readouterr()
    main(["plan", str(config), *plan_options(strategy, arguments, config.parent), "--json"])
    planned = json.loads(capsys.readouterr().out)
    stage = {"ddp": 0, "fsdp1": 3, "fsdp2": 2 if "--keep" in arguments else 3}.get(strategy)
    stage = int(strategy[-1]) if stage is None else stage
    framework = "deepspeed" if strategy.startswith("zero") else strategy
    row = next(
        row for row in planned["rows"]
        if (row["framework"], row["stage"], row["optimizer_on"]) == (framework, stage, "device")
    )  # fmt: skip
    return row, planned["params"]


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
            "reduce_bucket_size": int(given.get("--bucket", 20_000_000)),
        },
    }  # fmt: skip
    if "--grad-dtype" in given:
        settings["data_types"] = {"grad_accum_dtype": given["--grad-dtype"]}
    path = folder / "deepspeed.json"
    path.write_text(json.dumps(settings))
    return [*options, "--config", str(path)]
