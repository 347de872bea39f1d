"""What texts on ZeRO and FSDP tuning teach, line by line, and what zeromon says of it.

Each line of the texts has a case here: a test that is marked with it. :data:`ANSWERED` says of a line
why zeromon answers otherwise, :data:`OPEN` what of a line is missing. Figures without another source are
those of Rajbhandari et al. 2020 (arXiv 1910.02054), in GB of 10^9 bytes.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from evidence import FIRES, found, role

from zeromon.cli import main
from zeromon.ring.strategy import Framework, Sharding, fsdp1, fsdp2

GB = 1e9
COVERED: dict[str, list[str]] = {}
"""Line -> the tests that show it."""


ANSWERED = {
    "ZeRO inference": "out of scope: zeromon watches training, and inference has no optimizer state, "
    "gradients or steps, which all figures are about",
}
OPEN = {
    "gather_distributed_parameters": "check of scripts",
    "bf16 on V100 and T4": "rule, check",
    "precision loss": "rule for fp16 without gradient_clipping, for spikes of the norm",
    "checkpoints": "age of the last one, time lost to saves, steps at risk",
    "contiguous_gradients, reduce_scatter off": "rules",
    "settings of memory": "allgather bucket, reuse distance, sub-groups, buffers, max_in_cpu, ratio",
    "time of offload and recomputation": "seconds a step in plan",
    "fit on NVMe": "capacity, fewest devices, heterogeneous devices, tp and pp",
    "OOM ladder": "rungs with bytes",
    "slow network": "--interconnect",
    "device idle": "rule with cause",
    "CPU step overlapped": "ZenFlow, SuperOffload as options of ZM501",
    "memory-centric tiling": "TiledLinear",
    "NVMe prefetch": "pipeline_read, pipeline_write",
    "cluster totals": "redundancy column",
    "dead keys of accelerate": "the fix as a deepspeed_config_file",
    "zero3_init_flag: false": "warning with bytes",
    "offload to cpu with an nvme_path": "ZM106",
    "figures that differ between files": "ZM602 across files",
    "FSDP arguments that do not exist": "check of scripts",
    "clip_grad_norm_ on FSDP1": "check of scripts",
    "FSDP scripts": "ShardedGradScaler, CPUOffload, HYBRID_SHARD, NO_SHARD, nested wrapping",
    "torch.load on every rank": "check of scripts",
    "seeds and initial parameters": "manual_seed, hash by rank",
    "bucket of 5e8 for prefetch": "check",
    "loss and learning rate": "zeromon.log",
    "RL loops": "--reference, --rollout",
    "more batch, more throughput": "a curve",
    "two runs in one memory chart": "compare",
    "myths": "docs/myths.md",
}
"""Line -> what is missing."""


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


@taught("B1", "FSDP out of memory, slow FSDP")
@pytest.mark.parametrize("version", [Framework.FSDP1, Framework.FSDP2])
@pytest.mark.parametrize(
    ("rule", "says"),
    [
        ("fsdp_prefetch_off", ("forward_prefetch=True", "set_modules_to_forward_prefetch")),
        ("reshard_without_need", ("SHARD_GRAD_OP", "reshard_after_forward=False")),
        ("full_shard_across_nodes", ("HYBRID_SHARD", "mesh=mesh")),
        ("accumulation_communicates", ("no_sync()", "set_requires_gradient_sync")),
        ("whole_model_unit", ("auto_wrap_policy", "fully_shard(layer)")),
        ("stage_too_low", ("FULL_SHARD", "fully_shard(layer)")),
    ],
)
def test_live_rules_speak_to_both_versions_of_fsdp(
    version: Framework, rule: str, says: tuple[str, str]
) -> None:
    """They knew FSDP2 alone, or compared with a label that no agent sends."""
    keeps = rule == "stage_too_low"
    strategy = fsdp2(reshards=not keeps)
    if version is Framework.FSDP1:
        strategy = fsdp1(Sharding.GRAD_OP if keeps else Sharding.FULL)
    rank = FIRES[rule]
    models = tuple({**model, "framework": str(version)} for model in rank.models)
    if keeps:
        rank = replace(rank, roles=(role("unsharded_param", 20 << 30),))
    rank = replace(rank, strategy=strategy.label, strategy_fields=strategy, models=models)
    finding = found(rank, rule)
    assert finding is not None and finding.remedy is not None
    assert says[version is Framework.FSDP2] in finding.remedy.diff


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
@pytest.mark.parametrize(("stage", "more"), [(1, 7e9 * 2), (2, 7e9 / 4 * 2), (3, 7e9 / 4 * 2)])
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


# ---- the list -------------------------------------------------------------------------------------


def test_a_line_is_covered_or_answered_or_open_and_not_two_of_them() -> None:
    assert not COVERED.keys() & ANSWERED.keys()
    assert not COVERED.keys() & OPEN.keys()
    assert not ANSWERED.keys() & OPEN.keys()
