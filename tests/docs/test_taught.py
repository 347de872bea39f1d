"""What texts on ZeRO and FSDP tuning teach, line by line, and what zeromon says of it.

Each line of the texts has a case here: a test that is marked with it. :data:`ANSWERED` says of a line
why zeromon answers otherwise, :data:`OPEN` what of a line is missing. Figures without another source are
those of Rajbhandari et al. 2020 (arXiv 1910.02054), in GB of 10^9 bytes.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from builders import MS, changed, rank, run, short_of_cpus, summary
from evidence import FIRES, found, role, saved
from hub_models import written

from zeromon.check.problem import Machine, Problem
from zeromon.check.runner import check as check_files
from zeromon.cli import main
from zeromon.diagnosis.engine import advise
from zeromon.diagnosis.rule import all_pages
from zeromon.memory.ladder import ladder_rungs
from zeromon.memory.models import from_count
from zeromon.memory.plan import Setup, parse_size
from zeromon.memory.spec import ShardPlan, Sizes, ZeroStage
from zeromon.readout.breakdown import step_parts
from zeromon.readout.ledger import USEFUL
from zeromon.readout.report import ledger_block as ledger_text
from zeromon.ring.codes import Phase
from zeromon.ring.strategy import Framework, Sharding, Strategy, fsdp1_strategy, fsdp2_strategy
from zeromon.snapshot.host import CpuUser
from zeromon.snapshot.ledger import ActivityRow, Cause
from zeromon.snapshot.run import Attempt
from zeromon.storage.step_history.rows import row_of
from zeromon.storage.step_history.writer import rows_frame
from zeromon.tui.columns import DisplayOptions
from zeromon.tui.line import plain_text
from zeromon.tui.screens.rank import rank_page
from zeromon_dashboard.charts import overlaid_charts

GB = 1e9
COVERED: dict[str, list[str]] = {}
"""Line -> the tests that show it."""


ANSWERED = {
    "zeromon.log": "no call of its own: what Trainer, Lightning, TensorBoard, W&B and DeepSpeed's "
    "monitor get is read where it is, and the learning rate from the optimizer",
    "allgather_bucket_size": "takes no memory and sends no more bytes: parameters are gathered "
    "in place, in one call where torch has all_gather_into_tensor (all_gather_dp_groups of DeepSpeed)",
    "HYBRID_SHARD in a script": "is valid: torch makes one group for each node; ZM307 proposes it",
}
OPEN = {}
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
    strategy = fsdp2_strategy(reshards=not keeps)
    if version is Framework.FSDP1:
        strategy = fsdp1_strategy(Sharding.GRAD_OP if keeps else Sharding.FULL)
    rank = FIRES[rule]
    models = tuple({**model, "framework": str(version)} for model in rank.config.models)
    if keeps:
        rank = changed(rank, roles=(role("unsharded_param", 20 << 30),))
    rank = changed(rank, strategy=strategy.label, strategy_fields=strategy, models=models)
    finding = found(rank, rule)
    assert finding is not None and finding.remedy is not None
    assert says[version is Framework.FSDP2] in finding.remedy.diff


@taught("B2")
def test_shard_grad_op_of_a_bare_size_keeps_all_parameters_gathered(plan: Any) -> None:
    """14 bytes a parameter over 4 ranks, and 2 gathered: gradients come when parameters are freed."""
    found = plan("7B", "--devices", "4", "--framework", "fsdp2", "--gpu", "36GiB")
    kept, freed = row(found, "FSDP2 (ZeRO-2)"), row(found, "FSDP2 (ZeRO-3)")
    assert kept["bytes"]["device"] / GB == pytest.approx(24.5 + 14)
    # in the step: 16 bytes a parameter over 4 ranks, and 4 of AdamW's temporaries
    assert freed["bytes"]["device"] / GB == pytest.approx(28 + 7)
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
@pytest.mark.parametrize(("stage", "phase", "more"), [
    (1, "loss", 7e9 * 4), (2, "end of backward", 7e9 / 4 * 2), (3, "loss", 7e9 / 4 * 2),
])  # fmt: skip
def test_gradients_that_accumulate_in_fp32_take_twice_their_memory(
    plan: Any, stage: int, phase: str, more: float
) -> None:
    """ZM208 says so; whole and always at stage 1 (``BF16_Optimizer``), a shard from stage 2 on."""
    config = {"zero_optimization": {"stage": stage}, "bf16": {"enabled": True}}
    label, options = f"ZeRO-{stage}", ("7B", "--devices", "4")
    low = row(plan(*options, config=config), label)
    wide = config | {"data_types": {"grad_accum_dtype": "fp32"}}
    high = row(plan(*options, config=wide), label)
    wide_bytes, low_bytes = (each["device_bytes_by_phase"][phase] for each in (high, low))
    assert wide_bytes - low_bytes == pytest.approx(more)
    assert high["plain_bytes"] == low["plain_bytes"] or stage == 1
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
        (2, 4, "a100", "it is the given strategy, and nothing that fits costs a tenth less"),
        (3, 8, "h100", "the given strategy, ZeRO-3, fits too, and a step takes 978.3 ms"),
        (1, 4, "a100-40", "the given strategy, ZeRO-1, does not fit: it needs 49.8 GiB"),
    ],
)
def test_the_row_of_the_configuration_is_marked_and_compared(
    plan: Any, stage: int, devices: int, memory: str, why: str
) -> None:
    config = {"zero_optimization": {"stage": stage}, "bf16": {"enabled": True},
              "train_micro_batch_size_per_gpu": 1,
              "gradient_accumulation_steps": 4 if stage == 3 else 1}  # fmt: skip
    found = plan("7B", "--devices", str(devices), "--gpu", memory, config=config)
    assert [r["label"] for r in found["rows"] if r["given"]] == [f"ZeRO-{stage}"]
    assert why in found["why"]


def test_the_table_has_a_sign_for_the_given_row(capsys: pytest.CaptureFixture[str]) -> None:
    main(["plan", "1B", "--devices", "8", "--gpu", "h100", "--stage", "3"])
    text = capsys.readouterr().out
    assert "\n  = ZeRO-3 " in text and "\n= the given strategy" in text


# ---- memory ---------------------------------------------------------------------------------------

LLAMA_2_7B = {
    "model_type": "llama", "hidden_size": 4096, "intermediate_size": 11008, "vocab_size": 32000,
    "num_hidden_layers": 32, "num_attention_heads": 32, "tie_word_embeddings": False,
}  # fmt: skip
OPT_13B = {
    "model_type": "gpt2", "n_embd": 5120, "n_layer": 40, "n_head": 40, "vocab_size": 50272,
    "n_positions": 2048,
}  # fmt: skip
"""Its shape; GPT-2's layers are the same."""


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[dict[str, Any]], str]:
    """Writes a config.json, which hub_models.py describes: a child process takes seconds."""
    return partial(written, tmp_path, monkeypatch)


def nvme(**zero: Any) -> dict[str, Any]:
    """ZeRO-Infinity, changed by settings of its sections."""
    moved = {
        part: {"device": "nvme", "nvme_path": "/n"} for part in ("offload_optimizer", "offload_param")
    }
    for part, more in moved.items():
        more |= zero.pop(part, {})
    return {"zero_optimization": {"stage": 3, **moved, **zero}, "bf16": {"enabled": True}}


INFINITY = "ZeRO-3 + optimizer on nvme + parameters on nvme"


@taught("settings of memory")
def test_buffers_of_the_swappers_are_host_memory(plan: Any) -> None:
    """16 B on 4 ranks: 4 buffers of a sub-group in fp32; 5 of 10^8 elements, one sub-group."""
    options = ("16B", "--devices", "4")
    found = row(plan(*options, config=nvme(offload_param={"max_in_cpu": 0})), INFINITY)
    buffers = 4 * 1e9 * 4 + (5 * 1e8 + 1e9) * 2
    grads = 16e9 / 4 * 2  # DeepSpeed keeps the low-precision gradients on the host
    assert found["roles"]["host"]["sharded_grad"] == pytest.approx(grads)
    rounded = 2**33 - grads  # they are pinned
    assert found["roles"]["host"]["swap_buffer"] == pytest.approx(buffers + rounded)
    small = plan(*options, config=nvme(sub_group_size=1e8, offload_param={"max_in_cpu": 0}))
    less = found["bytes"]["host"] - row(small, INFINITY)["bytes"]["host"]
    assert less == pytest.approx(0.9e9 * (4 * 4 + 2))


@taught("settings of memory")
def test_max_in_cpu_keeps_parameters_of_nvme_on_the_host(plan: Any) -> None:
    """10^9 elements by default: 2 GB less on NVMe."""
    some = row(plan("16B", "--devices", "4", config=nvme()), INFINITY)
    none = row(plan("16B", "--devices", "4", config=nvme(offload_param={"max_in_cpu": 0})), INFINITY)
    assert none["bytes"]["nvme"] - some["bytes"]["nvme"] == pytest.approx(2e9)
    assert some["roles"]["host"]["sharded_param"] == pytest.approx(2e9)


@taught("settings of memory")
@pytest.mark.parametrize(
    ("ratio", "size", "on_device"), [(0.3, 1e9, 0.5), (0.3, 2e9, 0.0), (1.0, 1e8, 0.0), (0.0, 1e9, 1)]
)
def test_offload_plus_plus_divides_by_whole_sub_groups(
    plan: Any, ratio: float, size: float, on_device: float
) -> None:
    """A shard of 1.75 10^9: 0.7 of two sub-groups is one, of one is none, whatever the ratio."""
    zero = {"stage": 3, "sub_group_size": size, "offload_optimizer": {"device": "cpu", "ratio": ratio}}
    config = {"zero_optimization": zero, "bf16": {"enabled": True}}
    found = row(plan("7B", "--devices", "4", config=config), "ZeRO-3 + optimizer on host")
    master = found["roles"]["device"].get("master_param", 0)
    assert master / 7e9 == pytest.approx(on_device)


@taught("settings of memory")
def test_the_pinned_allocator_rounds_up_to_powers_of_two(plan: Any) -> None:
    """ZeRO-Offload of 7 B on 4: master and gradient of 7 GB each take 8 GiB, staging 4 GiB."""
    zero = {"stage": 2, "offload_optimizer": {"device": "cpu"}}
    config = {"zero_optimization": zero, "bf16": {"enabled": True}}
    label, options = "ZeRO-2 + optimizer on host", ("7B", "--devices", "4")
    pinned = row(plan(*options, config=config), label)["bytes"]["host"]
    zero["offload_optimizer"]["pin_memory"] = False  # type: ignore[index]
    paged = row(plan(*options, config=config), label)["bytes"]["host"]
    assert pinned - paged == pytest.approx(2 * (2**33 - 7e9) + 2**32 - 3.5e9)


@taught("settings of memory")
def test_the_reuse_distance_keeps_parameters_beyond_max_live_parameters(plan: Any, model: Any) -> None:
    """Half of the distance lies before the end of forward: 0.5 10^9 elements stay by default.

    In whole matrices of a layer; the head is fetched where just less than the limit is gathered.
    """
    zero = {"stage": 3, "stage3_max_live_parameters": 0.3e9}
    kept: list[int] = []
    for distance in (1e9, 0):
        config = {"zero_optimization": zero | {"stage3_max_reuse_distance": distance},
                  "bf16": {"enabled": True}}  # fmt: skip
        found = row(plan(model(LLAMA_2_7B), "--devices", "8", config=config), "ZeRO-3")
        kept.append(found["device_bytes_by_phase"]["loss"])
    head, matrix = 131_072_000, 45_088_768
    assert kept[0] - kept[1] == 2 * (12 * matrix - (7 * matrix + head - matrix))


@taught("cluster totals")
def test_all_ranks_together_hold_copies(plan: Any) -> None:
    """7 B on 8: 896 GB without partitioning, 112 GB of them unique."""
    found = plan("7B", "--devices", "8")
    whole, full = row(found, "ZeRO-0"), row(found, "ZeRO-3")
    assert (whole["cluster_bytes"] / GB, whole["unique_bytes"] / GB) == (896, 112)
    assert full["cluster_bytes"] / GB == pytest.approx(112)


@taught("fit on NVMe")
def test_nvme_has_a_size(plan: Any) -> None:
    """The optimizer's 12 bytes, fp32 gradients of 4, and parameters that are not on the host."""
    options = ("175B", "--devices", "16", "--gpu", "v100", "--host-memory", "1.5TB")
    config = nvme(sub_group_size=1e8)
    fits = row(plan(*options, "--nvme", "2TB", config=config), INFINITY)
    assert fits["bytes"]["nvme"] * 16 / 175e9 == pytest.approx(16 + 2, rel=0.02)
    assert fits["fits_nvme"]
    short = row(plan(*options, "--nvme", "1TB", config=config), INFINITY)
    assert (short["fits_nvme"], short["fits"]) == (False, False)


@taught("fit on NVMe")
def test_the_fewest_devices_that_do(plan: Any) -> None:
    """16 bytes a parameter over n devices of 39.39 GiB less 6 %, 8 in the step, and 1 GB."""
    found = plan("7B", "--devices", "8", "--gpu", "a100-40", "--fewest")
    assert row(found, "ZeRO-3")["fewest_devices"] == 4
    assert row(found, "ZeRO-0")["fewest_devices"] is None
    assert row(found, "ZeRO-1")["fewest_devices"] == 16
    large = row(plan("175B", "--gpu", "v100", "--fewest"), "ZeRO-3")
    assert large["fewest_devices"] == 128  # 2.8 TB, and 9 GB of a sub-group and a bucket, over 31.0 GB


@taught("fit on NVMe")
def test_the_smallest_of_different_devices_decides(plan: Any) -> None:
    found = plan("7B", "--devices", "4", "--gpu", "a100,a100-40")
    assert found["device_bytes"] == parse_size("39.39GiB")
    assert any("the smallest device decides" in note for note in found["notes"])


@taught("fit on NVMe")
def test_tensor_and_pipeline_parallelism_divide_the_model(plan: Any, model: Any) -> None:
    """What remains is data parallel: 8 of 64 ranks; ZeRO-2 and 3 are refused under a pipeline."""
    found = plan("7.5B", "--devices", "64", "--tp", "4", "--pp", "2")
    assert (found["ranks"], found["devices"]) == (8, 64)
    assert [r["stage"] for r in found["rows"]] == [0, 1]
    assert row(found, "ZeRO-0")["plain_bytes"] == pytest.approx(7.5e9 / 8 * 16)
    # equation 2 of Korthikanti et al.: sbh (10 + 24 / t) a layer; here without dropout: (8 + 24 / t)
    gpt = OPT_13B | {"n_layer": 4}
    kept = []
    for tensor in ("1", "8"):
        options = ("--devices", "8", "--tp", tensor, "--micro-batch", "1", "--length", "2048")
        found = plan(model(gpt), *options)
        phases = found["rows"][0]["device_bytes_by_phase"]
        kept.append(phases["loss"] - phases["backward"])
    # what of equation 2 is in both parts of the step is gone; ReLU has the gradients of two tensors
    tokens, h, vocab = 2048, 5120, 50272
    backward = [tokens * (7 * h + 2 * 2 * 4 * h / t) for t in (1, 8)]
    head = [tokens * (4 * h + 12 * vocab / t) for t in (1, 8)]
    assert kept == pytest.approx([x - y for x, y in zip(head, backward, strict=True)])


@taught("memory of RL loops")
def test_reinforcement_learning_keeps_more_than_the_trained_model(plan: Any, model: Any) -> None:
    """2 bytes a parameter of a reference; 800 KiB per token of keys and values (Kwon et al. 2023)."""
    alone = row(plan("7B", "--devices", "8"), "ZeRO-2")["bytes"]["device"]
    both = row(plan("7B", "--devices", "8", "--reference", "7B"), "ZeRO-2")["bytes"]["device"]
    assert (both - alone) / GB == pytest.approx(14)
    split = plan("7B", "--devices", "8", "--reference", "7B")
    assert row(split, "ZeRO-3")["roles"]["device"]["frozen_param"] / GB == pytest.approx(14 / 8)
    path = model(OPT_13B)
    found = row(plan(path, "--devices", "8", "--rollout", "64", "--length", "1024"), "ZeRO-2")
    assert found["roles"]["device"]["kv_cache"] == 64 * 1024 * 800 * 1024


# ---- time -----------------------------------------------------------------------------------------

ON_H100 = ("--devices", "8", "--gpu", "h100", "--micro-batch", "1", "--length", "2048")


@taught("time of offload and recomputation")
def test_a_row_has_its_seconds(plan: Any) -> None:
    """7 B on 8: CPU-Adam reads and writes 28 bytes a parameter at 109 GB/s a host, 1.8 s."""
    found = plan("7B", *ON_H100)
    on_device, on_host = row(found, "ZeRO-2"), row(found, "ZeRO-2 + optimizer on host")
    assert on_host["step_parts"]["optimizer"] == pytest.approx(7e9 * 28 / 109e9)
    assert on_host["step_seconds"] > 2 * on_device["step_seconds"]
    least, most = on_device["step_seconds_interval"]
    assert least < on_device["step_seconds"] < most
    assert row(found, "ZeRO-3 + optimizer on nvme + parameters on nvme")["step_seconds"] is None
    fast = plan("7B", *ON_H100, "--nvme-bandwidth", "25GB/s")
    assert row(fast, INFINITY)["step_parts"]["offload"] > 10  # 32 bytes a parameter


@taught("time of offload and recomputation")
def test_checkpointing_computes_a_third_more(plan: Any, model: Any) -> None:
    """Korthikanti et al. 2022: 30 to 40 %; less the head, which is not computed again."""
    path = model(LLAMA_2_7B)
    parts = row(plan(path, *ON_H100, "--checkpointing"), "ZeRO-2")["step_parts"]
    assert 0.31 < parts["recompute"] / parts["compute"] < 1 / 3


@taught("more batch, more throughput")
def test_a_larger_micro_batch_gives_more_until_compute_is_all(
    model: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    """Twice the sequences take less than twice the time, and less so the more there are."""
    sweep = ("--sweep", "micro-batch=1,2,4,8")
    main(["plan", model(LLAMA_2_7B), *ON_H100, "--framework", "fsdp2", *sweep, "--json"])
    points = json.loads(capsys.readouterr().out)["points"][1:]
    rates = [one["samples"] / one["step_seconds"] for one in points]
    gains = [later / earlier for earlier, later in pairwise(rates)]
    assert 2 > gains[0] >= gains[1] >= gains[2] >= 1


@taught("slow network")
def test_where_links_are_slow_zero_3_costs_more_than_zero_2(plan: Any) -> None:
    """16 devices on two hosts: unknown without a link, 3 against 2 gathers' worth with a slow one."""
    options = ("7B", "--devices", "16", "--gpu", "h100", "--micro-batch", "1", "--length", "2048",
               "--framework", "fsdp2")  # fmt: skip
    unknown = row(plan(*options), "FSDP2 (ZeRO-2)")
    assert (unknown["step_seconds"], "--interconnect" in unknown["step_seconds_unknown"]) == (None, True)
    found = plan(*options, "--interconnect", "10Gb")
    two, three = (row(found, f"FSDP2 (ZeRO-{n})")["step_parts"]["communication"] for n in (2, 3))
    assert three / two == pytest.approx(3 / 2, rel=0.1)


@taught("OOM ladder")
@pytest.mark.parametrize(
    ("framework", "stage", "rung"),
    [
        ("deepspeed", 1, '"stage": 1 -> 2'),
        ("deepspeed", 2, '"stage": 2 -> 3'),
        ("deepspeed", 3, '"offload_param": {"device": "cpu"}'),
        ("fsdp1", 2, "SHARD_GRAD_OP -> FULL_SHARD"),
        ("fsdp2", 3, "CPUOffloadPolicy()"),
        ("ddp", 0, "gradient_as_bucket_view: False -> True"),
    ],
)
def test_what_does_not_fit_has_a_ladder(plan: Any, framework: str, stage: int, rung: str) -> None:
    """Each rung with the value of now, its bytes and its price."""
    options = ("30B", "--devices", "8", "--gpu", "40GiB", "--framework", framework)
    rungs = plan(*options, "--stage", str(stage))["ladder"]
    one = next(each for each in rungs if rung in each["change"])
    assert one["frees_bytes"] > 0 and one["price"]


@taught("memory-centric tiling")
def test_a_layer_that_is_most_of_what_is_gathered_is_cut_into_tiles() -> None:
    """A linear layer of 2 * 10^9 weights, in bf16, beside one of 10^8: a quarter of it at once.

    3 GB of weights less, and 1 GB of its gradient; the step then takes more than backward.
    """
    small = ShardPlan(
        stage=ZeroStage.PARAMETERS, ranks=8, live_numel=100_000_000, prefetch_numel=10_000_000
    )
    sizes = Sizes(numel=4_000_000_000, trainable=4_000_000_000, shard_numel=500_000_000,
                  trainable_shard_numel=500_000_000, unit_numels=(2_000_000_000, 100_000_000),
                  largest_tensor_numel=2_000_000_000, linear_numel=2_000_000_000)  # fmt: skip
    setup = Setup(model=from_count(4_000_000_000), plan=small, device_bytes=80 << 30, known=sizes)
    [rung] = [one for one in ladder_rungs(setup, None) if "TiledLinear" in one.change]
    assert rung.change.startswith("nn.Linear of 2,000,000,000 weights, 100% of what is gathered")
    assert (rung.frees_bytes or 0) / GB == pytest.approx(4)
    shared = replace(setup, known=replace(sizes, linear_numel=0))  # tied to the embedding
    assert not [one for one in ladder_rungs(shared, None) if "TiledLinear" in one.change]
    alike = replace(sizes, unit_numels=(2_000_000_000, 2_000_000_000))  # an embedding of the same size
    assert not [
        one for one in ladder_rungs(replace(setup, known=alike), None) if "TiledLinear" in one.change
    ]


@taught("slow network")
def test_check_says_what_the_bytes_cost_on_the_link(check: Any) -> None:
    """7 B on 8: 22.8 GiB, with a reduction to each rank, against 33.4 GiB at 80 % of 1.25 GB/s."""
    machine = Machine(devices=8, device_bytes=80 << 30, model=from_count(7_000_000_000), link=1.25e9)
    text = said(check(zero(3), machine=machine), "ZM202")
    assert "24.50 s instead of 35.88 s at 1.00 GB/s" in text
    assert 'ZeRO-2 with "use_multi_rank_bucket_allreduce": false, if' in text


@taught("two runs in one memory chart")
def test_two_runs_in_one_chart_lose_no_peak() -> None:
    """tests/dashboard/test_dash.py has the compare page."""
    steps = [summary(n, rss_bytes=(3 if n == 5001 else 1) << 30) for n in range(1, 10_001)]
    columns = rows_frame([row_of(0, step, 0) for step in steps]).to_dict(as_series=False)
    traces = overlaid_charts([(run(rank(0), run=name), columns) for name in "ab"])["memory"].traces
    assert len(traces) == 2
    for numbers, used in traces.values():
        assert len(numbers) <= 1000 and (5001, 3.0) in zip(numbers, used, strict=True)


@taught("checkpoints")
def test_a_run_says_how_old_its_checkpoint_is_and_what_is_at_risk() -> None:
    """Rank 0 alone saves: the last steps of the others are in its checkpoint, too."""
    saver = saved(ago_s=600.0)
    shown = run(saver, changed(saver, rank=1, activities=(), checkpoints=0, unsaved_seconds=9e9))
    said = "4, 30.00 s each (0.8 % of the time); the last one 2.20 s ago; at risk: 10 min 00 s of "
    page = rank_page(shown, shown.ranks[1], DisplayOptions(), 200)
    for text in (ledger_text([shown]), " ".join(map(plain_text, page))):
        assert f"checkpoints: {said}steps (3,000) since the last checkpoint" in text
    never = run(changed(saver, activities=(), checkpoints=0))
    assert "since the first step, and no checkpoint was seen" in ledger_text([never])


@taught("checkpoints")
def test_the_interval_of_checkpoints_is_youngs() -> None:
    """sqrt(2 * 30 s * 50,000 h / 8 ranks) is 10.2 h; with a restart every hour 7 min 45 s."""
    old = found(saved(ago_s=24 * 3600.0), "checkpoint_interval")
    assert old is not None and old.severity == "info" and old.remedy is not None
    assert "one failure per 6250 h 00 min (assumed), saving (30.00 s) every 10 h 12 min" in old.text
    assert "step % 183712 == 0" in old.remedy.diff
    restarted = Attempt(number=1, started_wall=0.0, ended_wall=3600.0, steps=9, resumed_step=0,
                        lost_steps=1, deaths=())  # fmt: skip
    again = run(saved(ago_s=1200.0), attempts=(restarted,), taken_wall=3600.0)
    [measured] = [f for f in advise(again) if f.rule == "checkpoint_interval"]
    assert (
        measured.severity == "warning" and "(of this run), saving (30.00 s) every 7 min" in measured.text
    )


@taught("checkpoints")
def test_saves_that_take_much_of_the_time() -> None:
    """20 of 180 s in 4 hours: a quarter of the time, where one every 25 h would do."""
    often = found(saved(ago_s=60.0, cost_s=180.0, count=20), "checkpoint_interval")
    assert often is not None and "saves take 25.0 % of the time, one every 12 min 00 s" in often.text
    assert found(saved(ago_s=60.0, cost_s=180.0, count=2), "checkpoint_interval") is None


@taught("phases of an RL loop")
def test_a_rollout_is_a_phase_of_its_own() -> None:
    """tests/agents/hooks/test_generation.py has the hooks, tests/fold/test_ledger.py the arithmetic."""
    step = summary(1, phase_ns=(0,) * Phase.GENERATION + (60 * MS,), start_ns=0, end_ns=100 * MS)
    assert step_parts(step)["generation"] == 60 * MS
    assert Cause.GENERATION in USEFUL


@taught("device idle", "CPU step overlapped", "NVMe prefetch")
@pytest.mark.parametrize(
    ("code", "says"),
    [
        ("ZM321", "share of its last sample period in which a kernel ran"),
        ("ZM501", "the next batch; ZenFlow"),
        ("ZM503", '"pipeline_read": true'),
    ],
)
def test_a_live_rule_says_what_is_taught(code: str, says: str) -> None:
    """What each fires on is in tests/diagnosis/test_rules.py."""
    assert says in all_pages()[code].text


@taught("bf16 on V100 and T4, live", "zero3_init_flag: false")
@pytest.mark.parametrize("rule", ["bf16_emulated", "whole_model_on_every_rank"])
def test_a_live_rule_fires_on_what_is_taught(rule: str) -> None:
    """Agents tell the dtype that a model computes in, and what its rank built before stage 3."""
    assert found(FIRES[rule], rule) is not None


@taught("spikes of the gradient norm", "loss and learning rate", "precision loss")
def test_a_spike_of_the_norm_has_its_step_and_what_calms_it() -> None:
    """tests/agents/hooks/test_loggers.py has a run that logs, with a spike and a NaN on one rank."""
    finding = found(FIRES["grad_norm_spikes"], "grad_norm_spikes")
    assert finding is not None and finding.remedy is not None
    assert "was 50 in step 40, 45.5 times the previous median" in finding.text
    assert "clip_grad_norm_" in finding.remedy.diff and "learning rate" in finding.remedy.effect


@taught("seeds and initial parameters")
@pytest.mark.parametrize(
    ("code", "says"),
    [("ZM411", "the same seed on all ranks"), ("ZM412", "`torch.manual_seed` with the same number")],
)
def test_a_page_says_which_seeds_are_to_be_equal(code: str, says: str) -> None:
    """A run of both mistakes is in tests/agents/hooks/test_loggers.py."""
    assert says in all_pages()[code].text


@taught("same bytes, less memory")
def test_a_row_that_sends_as_much_and_takes_less_is_a_reason(plan: Any) -> None:
    found = plan("7B", "--devices", "8", "--gpu", "h100", "--micro-batch", "1")
    assert found["recommended"] == "ZeRO-1"
    assert "ZeRO-3 costs about as much, and takes 53 % of the memory" in found["why"]


# ---- configurations and scripts -------------------------------------------------------------------


@pytest.fixture
def check(tmp_path: Path) -> Callable[..., list[Problem]]:
    """Checks a file with this text; a machine as --gpu and --model would give it."""

    def checked(text: Any, name: str = "ds.json", machine: Machine | None = None) -> list[Problem]:
        (tmp_path / name).write_text(text if isinstance(text, str) else json.dumps(text))
        return list(check_files([str(tmp_path / name)], machine).problems)

    return checked


def said(problems: list[Problem], code: str) -> str:
    """Message and fix of the one problem with *code*."""
    [problem] = [p for p in problems if p.code == code]
    return f"{problem.message}; fix: {problem.fix}"


def zero(stage: int = 3, **settings: Any) -> dict[str, Any]:
    return {"zero_optimization": {"stage": stage, **settings}, "bf16": {"enabled": True},
            "train_batch_size": "auto"}  # fmt: skip


@taught(
    "contiguous_gradients, reduce_scatter off", "bucket of 5e8 for prefetch",
    "offload to cpu with an nvme_path", "precision loss",
)  # fmt: skip
@pytest.mark.parametrize(
    ("config", "code", "says"),
    [
        (zero(2, contiguous_gradients=False), "ZM205", "fragments the memory"),
        (zero(2, reduce_scatter=False), "ZM319", "twice the bytes"),
        (zero(2, reduce_scatter=False), "ZM319", '"use_multi_rank_bucket_allreduce": false'),
        (zero(3, stage3_prefetch_bucket_size=5e8), "ZM303", "953.7 MiB in half precision"),
        (zero(3, offload_param={"device": "cpu", "nvme_path": "/n"}), "ZM106", "has no effect"),
        (zero(2) | {"bf16": {}, "fp16": {"enabled": True}}, "ZM407", "gradient spikes are applied"),
    ],
)  # fmt: skip
def test_settings_that_were_accepted_in_silence(
    check: Any, config: dict[str, Any], code: str, says: str
) -> None:
    assert says in said(check(config), code)


@taught("bf16 on V100 and T4")
@pytest.mark.parametrize("device", ["v100", "t4"])
def test_bf16_on_a_device_that_emulates_it(check: Any, device: str) -> None:
    machine = Machine(device=device)
    assert "no units for bf16" in said(check(zero(2), machine=machine), "ZM406")
    yaml = "distributed_type: MULTI_GPU\nnum_processes: 8\nmixed_precision: bf16\n"
    assert "mixed_precision: fp16" in said(check(yaml, "a.yaml", machine), "ZM406")
    assert not [p for p in check(zero(2), machine=Machine(device="a100")) if p.code == "ZM406"]


@taught("A8", "C41", "F3")
@pytest.mark.parametrize(("stage", "says"), [
    (1, "missing, and off by default"), (2, "costs a second bucket of 953.7 MiB"), (0, ""), (3, ""),
])  # fmt: skip
def test_overlap_that_a_file_leaves_out_is_off_below_stage_3(check: Any, stage: int, says: str) -> None:
    """DeepSpeed's own default is on at stage 3 alone; the fix names what the overlap costs."""
    problems = check(zero(stage))
    assert says in said(problems, "ZM302") if says else "ZM302" not in {p.code for p in problems}
    if says:
        assert "ZM302" not in {p.code for p in check(zero(stage, overlap_comm=True))}
        assert "ZM302" not in {p.code for p in check(zero(stage), machine=Machine(devices=1))}


@taught("B41", "activation_checkpointing")
@pytest.mark.parametrize(("body", "fires"), [
    ("engine, *_ = deepspeed.initialize(model=m, config='ds.json')", True),
    ("deepspeed.checkpointing.configure(None, deepspeed_config='ds.json')\n"
     "engine, *_ = deepspeed.initialize(model=m, config='ds.json')", False),
])  # fmt: skip
def test_a_section_of_checkpointing_needs_the_call_that_reads_it(
    tmp_path: Path, check: Any, body: str, fires: bool
) -> None:
    section = {"partition_activations": True, "cpu_checkpointing": True}
    config = zero(2) | {"train_batch_size": 8, "activation_checkpointing": section}
    (tmp_path / "ds.json").write_text(json.dumps(config))
    found = [p for p in check(f"{HEAD}{body}\n", "train.py") if p.key == "activation_checkpointing"]
    assert [p.code for p in found] == ["ZM106"] * fires
    if fires:
        assert "deepspeed.checkpointing.checkpoint() in the model" in found[0].fix


LAUNCH = "distributed_type: DEEPSPEED\nnum_processes: 8\nmixed_precision: bf16\ndeepspeed_config:\n"


@taught("zero3_init_flag: false")
def test_every_rank_builds_the_whole_model(check: Any) -> None:
    """7 B in fp32: 28 GB per rank."""
    text = f"{LAUNCH}  zero_stage: 3\n  zero3_save_16bit_model: true\n  zero3_init_flag: false\n"
    machine = Machine(model=from_count(7_000_000_000))
    assert "26.1 GiB in fp32" in said(check(text, "a.yaml", machine), "ZM704")


def dead_keys(check: Any, settings: str) -> tuple[Problem, Any]:
    """The one problem of settings that accelerate ignores, and the JSON that it has for them."""
    text = LAUNCH + "".join(f"  {line.strip()}\n" for line in settings.splitlines())
    [problem] = [p for p in check(text, "a.yaml") if p.code == "ZM102"]
    return problem, json.loads(problem.fix.partition(":\n")[2])


@taught("row C11", "row W2", "dead keys of accelerate")
def test_the_keys_of_a_zero_2_file_that_nobody_reads_get_a_file_of_deepspeeds(check: Any) -> None:
    """5e8 is a text in YAML 1.1, which DeepSpeed refuses; a file excludes what accelerate would set."""
    problem, content = dead_keys(check, """\
        deepspeed_multinode_launcher: standard
        zero3_init_flag: false
        zero_stage: 2
        offload_optimizer_device: none
        gradient_accumulation_steps: 4
        gradient_clipping: 1.0
        overlap_comm: true
        reduce_scatter: true
        allgather_bucket_size: 5e8
        reduce_bucket_size: 5e8""")  # fmt: skip
    assert content == {
        "zero_optimization": {"overlap_comm": True, "reduce_scatter": True, "stage": 2,
                              "allgather_bucket_size": 500_000_000, "reduce_bucket_size": 500_000_000},
        "gradient_accumulation_steps": 4, "gradient_clipping": 1.0, "bf16": {"enabled": True},
        "train_micro_batch_size_per_gpu": "auto",
    }  # fmt: skip
    assert type(content["zero_optimization"]["reduce_bucket_size"]) is int
    assert problem.fix.startswith("set deepspeed_config_file: ds.json, remove overlap_comm, ")
    assert "zero_stage, offload_optimizer_device and mixed_precision, and write" in problem.fix


@taught("row C18", "row W2", "dead keys of accelerate")
def test_the_stage3_keys_of_a_zero_3_file_have_a_home(check: Any) -> None:
    """They are aliases of DeepSpeed's own names. The gather on save is among them, so no ZM701."""
    settings = """\
        zero_stage: 3
        stage3_prefetch_bucket_size: 5e8
        stage3_param_persistence_threshold: 1e6
        stage3_gather_16bit_weights_on_model_save: true
        offload_optimizer_device: none
        offload_param_device: none
        overlap_comm: true
        stage3_max_live_parameters: 1e9
        stage3_max_reuse_distance: 1e9"""
    _, content = dead_keys(check, settings)
    assert content["zero_optimization"] == {
        "stage": 3, "stage3_prefetch_bucket_size": 5 * 10**8,
        "stage3_param_persistence_threshold": 10**6, "overlap_comm": True,
        "stage3_gather_16bit_weights_on_model_save": True, "stage3_max_live_parameters": 10**9,
        "stage3_max_reuse_distance": 10**9,
    }  # fmt: skip
    text = LAUNCH + "".join(f"  {line.strip()}\n" for line in settings.splitlines())
    assert {p.code for p in check(text, "a.yaml")} == {"ZM102"}


@taught("dead keys of accelerate")
def test_dead_keys_beside_a_deepspeed_file_go_into_that_file(check: Any) -> None:
    problem, content = dead_keys(check, "deepspeed_config_file: z3.json\noverlap_comm: true\nfp16: x")
    assert problem.fix.startswith("remove overlap_comm and fp16, and add to z3.json:\n{")
    assert content == {"zero_optimization": {"overlap_comm": True}, "fp16": "x"}


@taught("row F4")
def test_a_fix_of_several_lines_is_printed_as_lines(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The ladder of ZM203, which was one line of 1,100 characters with question marks."""
    (tmp_path / "st0.json").write_text(json.dumps(zero(0) | {"train_batch_size": 8}))
    options = ["check", str(tmp_path / "st0.json"), "--model", "7B", "--devices", "8", "--gpu", "a100"]
    main(options)
    rows = capsys.readouterr().out.splitlines()
    first = next(n for n, line in enumerate(rows) if "cheapest first:" in line)
    assert [line[:12] for line in rows[first + 1 : first + 4]] == [f"         {n}. " for n in (1, 2, 3)]
    assert "?" not in "".join(rows)
    main([*options, "--json"])
    [problem] = json.loads(capsys.readouterr().out)["problems"]
    assert "first:\n1. " in problem["fix"]


@taught("row F4")
def test_a_finding_is_one_sentence_whatever_a_process_is_called() -> None:
    """``python -c`` has its whole program as an argument."""
    user = CpuUser(pid=9, name="python import os\nos.nice(1)", cpus=0.9, parent=1)
    short = changed(rank(0, watched_steps=40), pid=7, pressure=short_of_cpus(0.3))
    [finding] = [f for f in advise(run(short, cpu_users=(user,))) if f.code == "ZM605"]
    assert "python import os os.nice(1) (pid 9)" in finding.text


@taught("row A31")
@pytest.mark.parametrize(("optimizer", "param", "says"), [
    ("cpu", "none", True), ("cpu", "nvme", True), ("nvme", "cpu", True), ("nvme", "nvme", False),
])  # fmt: skip
def test_fast_init_is_for_nvme(check: Any, optimizer: str, param: str, says: bool) -> None:
    """``_create_fp32_partitions`` of DeepSpeed's stage3.py reads it where both are on NVMe."""
    offload: dict[str, dict[str, Any]] = {
        name: {"device": device} | ({"nvme_path": "/n"} if device == "nvme" else {})
        for name, device in (("offload_optimizer", optimizer), ("offload_param", param))
    }
    offload["offload_optimizer"]["fast_init"] = True
    problems = check(zero(3, **offload))
    assert any(p.key.endswith("fast_init") and p.fix == "remove fast_init" for p in problems) is says


@taught("row B39", "ZeRO inference")
def test_the_guide_says_what_applies_to_zero_inference() -> None:
    guide = Path(__file__).resolve().parents[2] / "docs" / "how-to" / "before-the-run.md"
    assert "ZeRO inference (stage 3 with `offload_param`, and no optimizer)" in guide.read_text()


@taught("row A64", "row W4")
def test_the_precision_of_a_trainer_is_not_that_of_its_deepspeed_file(tmp_path: Path) -> None:
    """``--bf16 true`` beside a file without bf16: accelerate adds the section."""
    config, train = tmp_path / "noclip.json", tmp_path / "tiny.py"
    config.write_text('{"zero_optimization": {"stage": 2}, "train_micro_batch_size_per_gpu": "auto"}')
    train.write_text("import transformers\ntransformers.TrainingArguments('o')\n")
    command = f"torchrun --nproc-per-node 2 {train} --bf16 true --deepspeed {config}".split()
    codes = {p.code for p in check_files([str(config), str(train)], None, command).problems}
    assert "ZM405" not in codes
    assert "ZM405" in {p.code for p in check_files([str(config)]).problems}


HEAD = """\
import torch, deepspeed
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP, fully_shard
from torch.distributed.fsdp import CPUOffload, MixedPrecision, ShardingStrategy
from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy
"""


@taught(
    "gather_distributed_parameters", "FSDP arguments that do not exist", "clip_grad_norm_ on FSDP1",
    "FSDP scripts", "torch.load on every rank", "row D28", "row D31", "row D35", "row D36", "row F6",
)  # fmt: skip
@pytest.mark.parametrize(
    ("script", "code", "says"),
    [
        ("with deepspeed.zero.gather_distributed_parameters(m): pass", "ZM107", "GatheredParameters"),
        ("FSDP(m, transformer_layer_cls={B})", "ZM107", "functools.partial"),
        ("FSDP(m, auto_wrap_policy=transformer_auto_wrap_policy)", "ZM107", "functools.partial"),
        ("m = FSDP(m, auto_wrap_policy=p)\ntorch.nn.utils.clip_grad_norm_(m.parameters(), 1.0)",
         "ZM109", "m.clip_grad_norm_(max_norm)"),
        ("MixedPrecision(param_dtype=torch.float16)", "ZM408", "ShardedGradScaler"),
        ("FSDP(m, p, ShardingStrategy.NO_SHARD)", "ZM104", "DistributedDataParallel"),
        ("for name, x in m.named_modules():\n    fully_shard(x)", "ZM312", "many small all-gathers"),
        ("for layer in model.layers:\n    for sublayer in layer:\n        FSDP(sublayer)",
         "ZM312", "many small all-gathers"),
        ("model = FSDP(model, auto_wrap_policy=policy)\nstate_dict = torch.load('checkpoint.pt')\n"
         "model.load_state_dict(state_dict)", "ZM704", "mmap=True"),
        ("torch.manual_seed(seed + rank)\nmodel = Net()\nmodel = FSDP(model, auto_wrap_policy=policy)",
         "ZM412", "from another seed"),
    ],
)  # fmt: skip
def test_scripts_that_were_accepted_in_silence(check: Any, script: str, code: str, says: str) -> None:
    assert says in said(check(HEAD + script, "train.py"), code)


@taught("row D18", "CPUOffload in a script")
def test_offload_of_fsdp_where_the_model_fits_without(check: Any) -> None:
    """7 B on 8 A100 fits three times; tests/check/test_scripts_of_texts.py has the variants."""
    script = f"""{HEAD}
cpu_offload = CPUOffload(offload_params=True)
model = FSDP(model, sharding_strategy=ShardingStrategy.FULL_SHARD, cpu_offload=cpu_offload)
"""
    machine = Machine(devices=8, device_bytes=80 << 30, device="a100", model=from_count(7_000_000_000))
    assert "fits on the devices without offload" in said(check(script, "t.py", machine), "ZM505")


@taught("row D12", "row D34", "row W3", "row F5", "row F6")
@pytest.mark.parametrize("framework", ["fsdp1", "fsdp2"])
def test_one_unit_is_told_where_only_the_root_is_wrapped(framework: str) -> None:
    """Not where each layer is a unit that ZM306 keeps gathered: tests/agents/observe/test_torch_roles.py
    has what agents see of FSDP(model) with and without use_orig_params, and of both ways to reshard."""
    whole = FIRES["whole_model_unit"]
    [model] = whole.config.models
    single = changed(whole, models=({**model, "framework": framework},))
    kept = {**model, "framework": framework, "kept_numel": model["numel"],
            "largest_unit_numel": model["blocks"][1]}  # fmt: skip
    assert found(single, "whole_model_unit") is not None
    assert found(changed(whole, models=(kept,)), "whole_model_unit") is None


@taught("row F7", "row D35")
def test_nothing_is_said_of_seeds_that_a_script_sets_again() -> None:
    """The newest one says nothing of the seed that the model was made with."""
    ranks = [rank(n, world_size=2, strategy="ddp", strategy_fields=Strategy(framework=Framework.DDP),
                  process={"params_mark": n, "params_bytes": 100}) for n in (0, 1)]  # fmt: skip
    [finding] = [f for f in advise(run(*ranks)) if f.rule == "initial_parameters_differ"]
    assert finding.text == "rank 1 began with other parameters than rank 0"


SHARDS = fsdp2_strategy(reshards=True)


@taught("torch.load on every rank")
@pytest.mark.parametrize(
    ("files", "strategy", "fires"),
    [((5, 5), SHARDS, True), ((5, 6), SHARDS, False), ((5, 0), SHARDS, False),
     ((5, 5), Strategy(framework=Framework.DDP), False)],
)  # fmt: skip
def test_ranks_that_load_the_same_file_whole_are_found_live(
    files: tuple[int, ...], strategy: Strategy, fires: bool
) -> None:
    """14 GB on each of two ranks; a shard of its own, and DDP, which keeps all of it, are fine."""
    ranks = [
        rank(n, strategy=strategy.label, strategy_fields=strategy, models=(),
             activities=(ActivityRow(phase="checkpoint", activity="load", background=False, count=1,
                                     seconds=9.0, longest_seconds=9.0, nbytes=14 * 10**9, last_ns=0,
                                     file=file, file_bytes=14 * 10**9 if file else 0),))
        for n, file in enumerate(files)
    ]  # fmt: skip
    said = [f for f in advise(run(*ranks)) if f.code == "ZM704"]
    assert len(said) == fires
    if fires:
        assert "each of 2 ranks loaded the same checkpoint of 13.0 GiB whole" in said[0].text
        assert said[0].remedy is not None and "mmap=True" in said[0].remedy.diff


@taught("FSDP scripts")
def test_a_second_call_of_fsdp_does_not_hide_the_first(check: Any) -> None:
    """Two models, both wrapped as one unit."""
    found = check(f"{HEAD}actor = FSDP(actor)\ncritic = FSDP(critic)\n", "train.py")
    assert [p.code for p in found] == ["ZM206", "ZM206"]


@taught("figures that differ between files")
@pytest.mark.parametrize(
    ("script", "code", "says"),
    [
        ("transformers.TrainingArguments('o', gradient_accumulation_steps=8)", "ZM602",
         "is 8 here, and gradient_accumulation_steps is 4 in {yaml}: Trainer refuses"),
        ("transformers.TrainingArguments('o', max_grad_norm=0.5)", "ZM105",
         "max_grad_norm is 0.5 here, and gradient_clipping is 1.0 in {yaml}: Trainer refuses"),
        ("transformers.TrainingArguments('o', fp16=True)", "ZM105",
         "the precision is fp16 here and bf16 in {yaml}: this script wins"),
        ("accelerate.Accelerator(gradient_accumulation_steps=8)", "ZM602",
         "is 8 here and 4 in {yaml}, which wins"),
        ("accelerate.Accelerator(mixed_precision='fp16')", "ZM105", "this script wins"),
    ],
)  # fmt: skip
def test_a_figure_in_two_files_has_one_winner(tmp_path: Path, script: str, code: str, says: str) -> None:
    """A tutorial's own example accumulates over 4 micro-steps in one file, and over 8 in the other."""
    yaml, train = tmp_path / "a.yaml", tmp_path / "train.py"
    yaml.write_text(
        f"{LAUNCH}  zero_stage: 2\n  gradient_accumulation_steps: 4\n  gradient_clipping: 1.0\n"
    )
    train.write_text(f"import accelerate, transformers\n{script}\n")
    found = check_files([str(yaml), str(train)]).problems
    assert says.format(yaml=yaml) in said(list(found), code)
    same = script.replace("=8", "=4").replace("0.5", "1.0").replace("fp16", "bf16")
    train.write_text(f"import accelerate, transformers\n{same}\n")
    assert code not in {p.code for p in check_files([str(yaml), str(train)]).problems}


@taught("figures of a launch command")
def test_a_launch_command_is_read_with_its_files(tmp_path: Path) -> None:
    """Each figure once, with what wins; tests/check/test_launch.py has the launchers and options."""
    yaml = tmp_path / "a.yaml"
    yaml.write_text(f"{LAUNCH}  zero_stage: 2\n  gradient_accumulation_steps: 4\n")
    command = f"accelerate launch --config_file {yaml} --gradient_accumulation_steps 8 train.py"
    result = check_files([str(yaml)], None, command.split())
    assert "is 8 here and 4 in" in said(list(result.problems), "ZM602")
    [figure] = [f for f in result.figures if f.name == "accumulation"]
    assert (figure.value, figure.source, figure.others) == (8, "the command", ((4, str(yaml)),))


@taught("myths")
@pytest.mark.parametrize(
    "figure",
    ["12: an fp32 copy", "7 B under DDP", "2.9 times", "1 GB in half precision, and twice",
     "18 bytes per parameter", "a third of the compute", "the path is not read", "PowerOf2Ceil"],
)  # fmt: skip
def test_a_page_says_what_holds_with_its_source(figure: str) -> None:
    """tests/docs/test_guide.py holds the figures to those of plan."""
    page = Path(__file__).resolve().parents[2] / "docs" / "explanation" / "findings.md"
    [line] = [line for line in page.read_text().splitlines() if figure in line]
    assert line.count("|") == 4 and line.split("|")[3].strip()


# ---- the list -------------------------------------------------------------------------------------


def test_a_line_is_covered_or_answered_or_open_and_not_two_of_them() -> None:
    assert not COVERED.keys() & ANSWERED.keys()
    assert not COVERED.keys() & OPEN.keys()
    assert not ANSWERED.keys() & OPEN.keys()


# ---- rows of figures: what plan says of bytes, seconds and fits ----------------------------------


@taught("row W1", "row A4", "row A7", "row C29")
def test_sent_bytes_of_stages_1_and_2_are_those_of_deepspeed(plan: Any) -> None:
    """3 psi by default; tests/agents/hooks/test_deepspeed.py holds it against real engines."""
    options = ("7B", "--devices", "8", "--gpu", "a100", "--stage", "2")
    default, to_each = (row(plan(*options, *more), "ZeRO-2") for more in ((), ("--reduce-whole", "no")))
    model_bytes = 7e9 * 2 * 7 / 8
    assert default["communication_bytes"] == pytest.approx(3 * model_bytes)
    assert default["paper_communication_bytes"] == pytest.approx(2 * model_bytes)
    assert to_each["communication_bytes"] == pytest.approx(2 * model_bytes)


@taught("row A53", "row A54", "row C32")
def test_check_and_plan_agree_on_a_slow_network(plan: Any, check: Any) -> None:
    """ZM202 promises what `plan` gives: the same bytes, and about the seconds of the link."""
    machine = Machine(devices=16, device_bytes=80 << 30, model=from_count(7_000_000_000), link=1e9)
    text = said(check(zero(3), machine=machine), "ZM202")
    assert 'ZeRO-2 with "use_multi_rank_bucket_allreduce": false' in text and "32.81 s instead" in text
    options = ("7B", "--devices", "16", "--nodes", "2", "--gpu", "a100", "--micro-batch", "1")
    found = plan(*options, "--interconnect", "1GB/s")
    assert found["settings"][-1] == '"use_multi_rank_bucket_allreduce": false'
    assert "a step takes about 33.07 s" in found["why"]


@taught("row W5", "row D21")
def test_shard_grad_op_has_no_gradients_while_all_is_gathered(plan: Any) -> None:
    """5.5 bytes a parameter at most, by torch's own MemTracker 5 to 5.25, and not 6."""
    found = plan("7B", "--devices", "4", "--framework", "fsdp2", "--stage", "2", "--gpu", "a100")
    assert row(found, "FSDP2 (ZeRO-2)")["bytes"]["device"] / 7e9 < 5.6


@taught("row W6", "row A60")
def test_what_fits_without_partitioning_is_not_partitioned(plan: Any) -> None:
    """As docs/how-to/before-the-run.md says, with a micro-batch and without; it names the cheapest
    better setting."""
    for more in ((), ("--micro-batch", "4")):
        assert plan("350M", "--devices", "8", "--gpu", "a100", *more)["recommended"] == "ZeRO-0"
    found = plan("7B", "--devices", "8", "--gpu", "a100", "--micro-batch", "1")
    assert (found["recommended"], found["settings"]) == ("ZeRO-1", ['"overlap_comm": true'])


@taught("row W7", "row B37")
def test_zero_plus_plus_sends_less_and_is_faster(plan: Any) -> None:
    """Between two hosts: hpZ keeps the second gather inside, qwZ and qgZ quantize."""
    shape = ("7B", "--devices", "16", "--nodes", "2", "--gpu", "a100", "--micro-batch", "1")
    hpz = {"zero_hpz_partition_size": 8}
    quantized = hpz | {"zero_quantized_weights": True, "zero_quantized_gradients": True}
    rows = []
    for keys in ({}, hpz, quantized):
        config = {"bf16": {"enabled": True}, "zero_optimization": {"stage": 3} | keys}
        found = plan(*shape, "--interconnect", "25GB/s", config=config)
        rows.append(row(found, "ZeRO-3"))
    seconds = [r["step_seconds"] for r in rows]
    assert seconds[0] > 1.2 * seconds[1] > 1.5 * seconds[2]
    assert rows[2]["communication_bytes"] < rows[0]["communication_bytes"] / 2
    assert rows[1]["within_host_bytes"] > 0 == rows[0]["within_host_bytes"]


@taught("row W8", "row D17", "row C9")
def test_gradients_are_sent_in_the_type_that_reduces_them(plan: Any) -> None:
    wide, plain = (
        row(plan("7B", "--devices", "4", *more), "ZeRO-2") for more in (("--grad-dtype", "fp32"), ())
    )
    assert wide["communication_bytes"] == plain["communication_bytes"]
    fsdp = {"distributed_type": "FSDP", "mixed_precision": "bf16", "num_processes": 4,
            "fsdp_config": {"fsdp_version": 2}}  # fmt: skip
    sent = row(plan("7B", config=fsdp), "FSDP2 (ZeRO-3)")["communication_bytes"]
    assert sent == pytest.approx(3 * 7e9 * 2 * 3 / 4)


@taught("row W9", "row A21")
def test_what_is_used_again_soon_is_gathered_once(plan: Any) -> None:
    sent = []
    for distance in (0, 10**9):
        zero_3 = {"stage": 3, "stage3_max_reuse_distance": distance}
        config = {"bf16": {"enabled": True}, "zero_optimization": zero_3}
        sent.append(row(plan("7B", "--devices", "8", config=config), "ZeRO-3")["communication_bytes"])
    assert sent[0] - sent[1] == pytest.approx(0.5e9 * 2 * 7 / 8)


@taught("row F1", "row F2")
def test_a_ladder_does_not_repeat_what_is_given(plan: Any) -> None:
    """F1, 0 B that fits, is in tests/cli/test_plan.py."""
    options = ("13B", "--devices", "4", "--gpu", "a100-40", "--stage", "2", "--micro-batch", "1")
    changes = [rung["change"] for rung in plan(*options, "--checkpointing")["ladder"]]
    assert changes and not any("checkpointing" in c or "micro-batch" in c for c in changes)
    assert any("checkpointing" in rung["change"] for rung in plan(*options)["ladder"])
