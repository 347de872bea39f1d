"""What texts on ZeRO and FSDP tuning teach, line by line, and what zeromon says of it.

A line of :data:`LINES` names what is taught. Its cases are the tests of this file that are marked with it;
:data:`ANSWERED` says of a line without a case why zeromon answers otherwise, or not yet. Figures
without another source are those of Rajbhandari et al. 2020 (arXiv 1910.02054), in GB of 10^9 bytes.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from zeromon.cli import main

GB = 1e9
COVERED: dict[str, list[str]] = {}
"""Line -> the tests that show it."""


def taught(*lines: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Marks a test as a case of *lines*."""

    def mark(test: Callable[..., None]) -> Callable[..., None]:
        for line in lines:
            COVERED.setdefault(line, []).append(test.__name__)
        return test

    return mark


@pytest.fixture
def plan(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Callable[..., Any]:
    """Runs ``zeromon plan ... --json``; a dict is written to a file for --config."""

    def planned(*arguments: str, config: dict[str, Any] | None = None) -> Any:
        if config is not None:
            (tmp_path / "ds.json").write_text(json.dumps(config))
            arguments += ("--config", str(tmp_path / "ds.json"))
        main(["plan", *arguments, "--json"])
        return json.loads(capsys.readouterr().out)

    return planned


def row(found: Any, label: str) -> Any:
    return next(r for r in found["rows"] if r["label"] == label)


# ---- bugs -----------------------------------------------------------------------------------------


@taught("B2")
def test_shard_grad_op_of_a_bare_size_keeps_all_parameters_gathered(plan: Any) -> None:
    """16 bytes a parameter over 4 ranks, and 2 bytes a parameter gathered: 28 + 14 GB."""
    found = plan("7B", "--devices", "4", "--framework", "fsdp2", "--memory", "30GiB")
    kept, freed = row(found, "FSDP2 (ZeRO-2)"), row(found, "FSDP2 (ZeRO-3)")
    assert kept["bytes"]["device"] / GB == pytest.approx(42)
    assert freed["bytes"]["device"] / GB == pytest.approx(28)
    assert (kept["fits"], found["recommended"]) == (False, "FSDP2 (ZeRO-3)")


@taught("B3")
@pytest.mark.parametrize(
    ("model", "ranks", "gigabytes"),
    [("7B", "4", (112, 49, 38.5, 28)), ("7.5B", "64", (120, 31.4, 16.6, 1.88))],
)
def test_plain_bytes_are_those_of_the_papers_tables(
    plan: Any, model: str, ranks: str, gigabytes: tuple[float, ...]
) -> None:
    """Stage 1 counted the whole gradients of backward and the shard of the step: 52.5 and 31.64 GB."""
    found = plan(model, "--devices", ranks)
    plain = [row(found, f"ZeRO-{stage}")["plain_bytes"] / GB for stage in range(4)]
    assert plain == pytest.approx(gigabytes, rel=0.005)


@taught("B4", "gradient dtype")
@pytest.mark.parametrize(
    ("stage", "more"), [(1, 7e9 * 2), (2, 7e9 / 4 * 2), (3, 7e9 / 4 * 2)]
)
def test_gradients_that_accumulate_in_fp32_take_twice_their_memory(
    plan: Any, stage: int, more: float
) -> None:
    """ZM208 says so; whole at stage 1 (``BF16_Optimizer``), a shard from stage 2 on."""
    config = {"zero_optimization": {"stage": stage}, "bf16": {"enabled": True}}
    label, options = f"ZeRO-{stage}", ("7B", "--devices", "4")
    low = row(plan(*options, config=config), label)
    wide = config | {"data_types": {"grad_accum_dtype": "fp32"}}
    high = row(plan(*options, config=wide), label)
    assert high["bytes"]["device"] - low["bytes"]["device"] == pytest.approx(more)
    assert high["plain_bytes"] == low["plain_bytes"]
    assert high["communication_bytes"] == low["communication_bytes"]  # reduced in bf16 all the same


@taught("gradient dtype")
def test_gradients_of_another_dtype_without_a_configuration(plan: Any) -> None:
    """18 bytes a parameter: bf16 parameters, fp32 gradients, fp32 Adam with its master."""
    found = plan("1B", "--devices", "1", "--framework", "ddp", "--grad-dtype", "fp32")
    assert sum(
        found["rows"][0]["roles"]["device"][role]
        for role in ("unsharded_param", "unsharded_grad", "optimizer_state", "master_param")
    ) / GB == pytest.approx(18)


@taught("B5")
@pytest.mark.parametrize(
    ("stage", "devices", "memory", "why"),
    [
        (2, 4, "a100", "it is the given strategy, and nothing that fits costs less"),
        (3, 8, "h100", "the given strategy, ZeRO-3, fits too, and sends 34.2 GiB a step"),
        (1, 4, "a100-40", "the given strategy, ZeRO-1, does not fit: it needs 46.6 GiB"),
    ],
)
def test_the_row_of_the_configuration_is_marked_and_compared(
    plan: Any, stage: int, devices: int, memory: str, why: str
) -> None:
    config = {"zero_optimization": {"stage": stage}, "bf16": {"enabled": True},
              "train_micro_batch_size_per_gpu": 1}  # fmt: skip
    found = plan("7B", "--devices", str(devices), "--memory", memory, config=config)
    assert [r["label"] for r in found["rows"] if r["given"]] == [f"ZeRO-{stage}"]
    assert why in found["why"]


def test_the_table_has_a_sign_for_the_given_row(capsys: pytest.CaptureFixture[str]) -> None:
    main(["plan", "7B", "--devices", "8", "--memory", "h100", "--stage", "3"])
    text = capsys.readouterr().out
    assert "\n  = ZeRO-3 " in text and "\n= the given strategy" in text
