"""The arithmetic of memory, against the tables that were published."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
from hub_models import from_config

from zeromon.base.errors import PlanError
from zeromon.memory.config_files import changes_of_config
from zeromon.memory.models import from_count
from zeromon.memory.plan import Setup, fewest_fitting_devices
from zeromon.memory.predict import (
    STEP_TEMP,
    Batch,
    During,
    MemoryBreakdown,
    Term,
    head_activation_bytes,
    layer_activation_bytes,
    memory_of,
    sequences_that_fit,
    transformer_activations,
)
from zeromon.memory.sent import communication_bytes, paper_step_bytes, sent_step_bytes
from zeromon.memory.spec import (
    OPTIMIZERS,
    ModelSpec,
    Precision,
    ShardPlan,
    Sizes,
    Transformer,
    Unit,
    ZeroStage,
    optim_named,
)

GB = 1e9
STAGES = [ZeroStage(stage) for stage in range(4)]


def states(params: int, stage: ZeroStage, ranks: int, **more: object) -> float:
    plan = ShardPlan(stage=stage, ranks=ranks, **more)  # type: ignore[arg-type]
    found = memory_of(from_count(params).sizes(plan), plan)
    return found.model_states / GB


@pytest.mark.parametrize(
    ("stage", "gigabytes"), list(zip(STAGES, (120.0, 31.4, 16.6, 1.88), strict=True))
)
def test_figure_1_of_the_zero_paper(stage: ZeroStage, gigabytes: float) -> None:
    """7.5 B parameters on 64 devices, mixed-precision Adam (arXiv 1910.02054)."""
    assert states(7_500_000_000, stage, 64) == pytest.approx(gigabytes, rel=0.005)


@pytest.mark.parametrize(
    ("ranks", "row"),
    [
        (1, (120.0, 120.0, 120.0)),
        (4, (52.5, 41.3, 30.0)),
        (16, (35.6, 21.6, 7.5)),
        (64, (31.4, 16.6, 1.88)),
        (256, (30.4, 15.4, 0.47)),
        (1024, (30.1, 15.1, 0.12)),
    ],
)
def test_table_1_of_the_zero_paper(ranks: int, row: tuple[float, ...]) -> None:
    """7.5 B parameters: per-device memory at stages 1, 2 and 3 by the degree of data parallelism."""
    for stage, gigabytes in zip(STAGES[1:], row, strict=True):
        # printed with three digits, or with two decimals
        assert states(7_500_000_000, stage, ranks) == pytest.approx(gigabytes, rel=0.005, abs=0.006)


def test_seven_billion_on_four() -> None:
    """112 / 49 / 38.5 / 28 GB."""
    found = [states(7_000_000_000, stage, 4) for stage in STAGES]
    assert found == pytest.approx([112, 49, 38.5, 28])


def test_full_precision_is_sixteen_bytes_too() -> None:
    """fp32 Adam: 4 + 4 + 8."""
    assert states(10**9, ZeroStage.NONE, 1, precision=Precision.full()) == pytest.approx(16)


@pytest.mark.parametrize(
    ("name", "each"),
    [
        ("adamw", 8.0), ("sgd", 0.0), ("sgd-momentum", 4.0), ("lion", 4.0),
        ("adam8bit", 2 * (1 + 4 / 256)),
    ],
)  # fmt: skip
def test_states_of_optimizers(name: str, each: float) -> None:
    """Bytes a parameter, without the master."""
    plan = ShardPlan(stage=ZeroStage.NONE, ranks=1, optimizer=OPTIMIZERS[name])
    found = memory_of(from_count(10**6).sizes(plan), plan)
    assert found.role("optimizer_state") == pytest.approx(each * 10**6)


def test_adafactor_keeps_rows_and_columns() -> None:
    """A matrix of 300 x 500 has 800 elements of second moment; a vector all of its own."""
    model = ModelSpec(name="m", units=(Unit("u", ((300, 500), (70,))),))
    plan = ShardPlan(stage=ZeroStage.NONE, ranks=1, optimizer=OPTIMIZERS["adafactor"])
    assert memory_of(model.sizes(plan), plan).role("optimizer_state") == 870 * 4


def test_names_of_optimizers_in_configurations() -> None:
    known = {n: o.name for n in ("AdamW", "FusedAdam", "DeepSpeedCPUAdam") if (o := optim_named(n))}
    assert known == {"AdamW": "adamw", "FusedAdam": "adamw-fused", "DeepSpeedCPUAdam": "adamw-fused"}
    sgd = optim_named("SGD", momentum=0.9)
    assert sgd is not None and sgd.name == "sgd-momentum"
    assert optim_named("MyOwn") is None


def test_partial_training_has_no_gradients_for_what_is_frozen() -> None:
    """LoRA-like: a frozen unit of a million, a trained one of ten thousand."""
    frozen, trained = Unit("f", ((1000, 1000),), trainable=False), Unit("t", ((100, 100),))
    model = ModelSpec(name="m", units=(frozen, trained))
    plan = ShardPlan(stage=ZeroStage.NONE, ranks=1)
    found = memory_of(model.sizes(plan), plan)
    assert found.role("unsharded_param") == 2 * 1_010_000
    assert found.role("unsharded_grad") == 2 * 10_000
    assert found.role("optimizer_state") + found.role("master_param") == 12 * 10_000


def test_offload_moves_a_role_and_does_not_remove_it() -> None:
    """Optimizer to the host, parameters to NVMe: the sum stays, the device is relieved."""
    sizes = from_count(10**6).sizes(ShardPlan(stage=ZeroStage.PARAMETERS, ranks=2))
    on_device = ShardPlan(stage=ZeroStage.PARAMETERS, ranks=2)
    moved = ShardPlan(stage=ZeroStage.PARAMETERS, ranks=2, optimizer_on="host", params_on="nvme")
    before, after = memory_of(sizes, on_device), memory_of(sizes, moved)
    assert before.model_states == after.model_states
    assert before.model_states == before.total() - before.role(STEP_TEMP)
    assert after.total("nvme") == 10**6
    # DeepSpeed keeps the gradients there, too, and once more in fp32
    assert after.total("host") == (12 + 2 + 4) * 10**6 // 2
    assert after.total() == 0


LIKE_LLAMA = Sizes(
    numel=1_221_632, trainable=1_221_632, shard_numel=610_816, trainable_shard_numel=610_816,
    unit_numels=(512_000, 512_000, 11_008, 11_008), largest_tensor_numel=512_000,
)  # fmt: skip
ALIKE = Sizes(
    numel=131_072, trainable=131_072, shard_numel=65_536, trainable_shard_numel=65_536,
    unit_numels=(16_384,) * 4, largest_tensor_numel=16_384,
)  # fmt: skip


@pytest.mark.parametrize(
    ("sizes", "prefetch", "live", "reuse", "gathered"),
    [
        (LIKE_LLAMA, 0, 10**9, 0, 512_000),
        (LIKE_LLAMA, 0, 10**9, 150_000, 512_000),
        (LIKE_LLAMA, 0, 10**9, 10**9, 1_221_632),
        (LIKE_LLAMA, 1000, 1000, 1000, 512_000),
        (LIKE_LLAMA, 3686, 10**9, 0, 1_221_632),
        (LIKE_LLAMA, 62_500, 125_000, 31_250, 632_832),
        (LIKE_LLAMA, 62_500, 125_000, 10**9, 1_221_632),
        (LIKE_LLAMA, 62_500, 540_000, 150_000, 709_632),
        (LIKE_LLAMA, 62_500, 600_000, 0, 709_632),
        (ALIKE, 0, 10**9, 32_768, 16_384),
        (ALIKE, 0, 10**9, 49_152, 32_768),
        (ALIKE, 0, 10**9, 147_456, 81_920),
        (ALIKE, 10_000, 60_000, 0, 65_536),
        (ALIKE, 50_000, 60_000, 150_000, 81_920),
        (ALIKE, 50_000, 70_000, 0, 81_920),
        (ALIKE, 50_000, 130_000, 0, 131_072),
    ],
)
def test_stage_3_gathers_at_once_what_deepspeed_was_seen_to(
    sizes: Sizes, prefetch: int, live: int, reuse: int, gathered: int
) -> None:
    """Measured: the most elements that are not partitioned after a fetch, DeepSpeed 0.19.8 on 2 ranks.

    The Llama shape has four layers of 49,408, between an embedding and a head of its own.
    """
    plan = ShardPlan(
        stage=ZeroStage.PARAMETERS, ranks=2, framework="deepspeed",
        prefetch_numel=prefetch, live_numel=live, reuse_numel=reuse,
    )  # fmt: skip
    terms = memory_of(
        replace(sizes, persistent_numel=0, numel=sizes.numel - sizes.persistent_numel), plan
    )
    assert terms.role("unsharded_param", during=During.LOSS) / 2 == pytest.approx(gathered, rel=0.001)


def test_what_stage_3_adds_is_named() -> None:
    """Persistence, the unit at work, the prefetch, the bucket, the second copy of ZeRO++."""
    layers = Unit("layer", ((1000, 1000), (1000,)), count=4)
    model = ModelSpec(name="m", units=(layers,))
    plan = ShardPlan(
        stage=ZeroStage.PARAMETERS,
        ranks=4,
        persistence_numel=1000,
        prefetch_numel=500_000,
        grad_bucket_numel=100_000,
        secondary_ranks=2,
    )
    found = memory_of(model.sizes(plan), plan)
    causes = {
        t.cause.split(" (")[-1].split(",")[0].rstrip(")"): t.nbytes for t in found.terms if t.cause
    }
    assert causes["stage3_param_persistence_threshold"] == 4 * 1000 * 2
    assert causes["stage3_prefetch_bucket_size"] == 500_000 * 2
    assert causes["reduce_bucket_size"] == 100_000 * 2
    assert causes["zero_hpz_partition_size"] == 4 * 1_000_000 // 2 * 2  # without the persistent
    assert causes["the largest unit while it computes"] == 1_000_000 * 2
    assert found.model_states == sum(t.nbytes for t in found.terms if not t.cause)


def test_fsdp2_shards_along_the_first_dimension() -> None:
    """Seven rows on four ranks: two rows each."""
    model = ModelSpec(name="m", units=(Unit("u", ((7, 10),)),))
    plan = ShardPlan(
        stage=ZeroStage.PARAMETERS, ranks=4, framework="fsdp2", precision=Precision.policy()
    )
    found = memory_of(model.sizes(plan), plan)
    assert found.role("sharded_param") == 2 * 10 * 4
    assert found.role("sharded_grad") == 2 * 10 * 4
    assert found.role("optimizer_state") == pytest.approx(2 * 10 * 8, abs=8)


def test_fsdp2_gathers_in_the_dtype_of_its_policy() -> None:
    """Two units at once by prefetch, in bf16, beside fp32 shards."""
    model = ModelSpec(name="m", units=(Unit("u", ((64, 64),), count=5),))
    plan = ShardPlan(
        stage=ZeroStage.PARAMETERS, ranks=2, framework="fsdp2", precision=Precision.policy()
    )
    assert memory_of(model.sizes(plan), plan).role("unsharded_param") == 2 * 64 * 64 * 2


def test_as_many_units_exist_as_a_script_gathers_ahead() -> None:
    """Of ten equal units; no more than there are."""
    model = ModelSpec(name="m", units=(Unit("u", ((64, 64),), count=10),))
    for ahead, units in ((0, 1), (3, 4), (8, 9), (20, 10)):
        plan = ShardPlan(stage=ZeroStage.PARAMETERS, ranks=2, framework="fsdp2", prefetch_units=ahead)
        gathered = memory_of(model.sizes(plan), plan).role("unsharded_param")
        assert gathered == units * 64 * 64 * 2


def test_a_hybrid_shard_divides_by_its_own_group() -> None:
    """16 ranks in groups of 4."""
    whole = ShardPlan(stage=ZeroStage.PARAMETERS, ranks=4)
    hybrid = ShardPlan(stage=ZeroStage.PARAMETERS, ranks=16, shard_ranks=4)
    model = from_count(10**6)
    assert memory_of(model.sizes(hybrid), hybrid).total() == memory_of(model.sizes(whole), whole).total()


def test_ddp_has_its_buckets_on_top() -> None:
    """As many bytes as the gradients, unless those are views of the buckets."""
    plan = ShardPlan(stage=ZeroStage.NONE, ranks=2, framework="ddp", precision=Precision.full())
    views = ShardPlan(
        stage=ZeroStage.NONE, ranks=2, framework="ddp", precision=Precision.full(), bucket_views=True
    )
    sizes = from_count(1000).sizes(plan)
    assert memory_of(sizes, plan).total() - memory_of(sizes, views).total() == 4000


@pytest.mark.parametrize(("shard_ranks", "fewest"), [(2, 2), (3, 24), (16, 16), (24, 24), (5000, None)])
def test_the_fewest_devices_are_whole_groups_of_a_hybrid_shard(
    shard_ranks: int, fewest: int | None
) -> None:
    """Any of these groups holds 24 MB; up to 4096 devices, and more than a host in whole hosts."""
    plan = ShardPlan(stage=ZeroStage.PARAMETERS, ranks=2 * shard_ranks, shard_ranks=shard_ranks)
    setup = Setup(model=from_count(10**6), plan=plan, device_bytes=13 * 10**6)
    assert fewest_fitting_devices(setup, plan) == fewest
    assert fewest_fitting_devices(replace(setup, device_bytes=1000), plan) is None


# ---- activations ----------------------------------------------------------------------------------

GPT3 = Transformer(layers=96, hidden=12288, heads=96, vocab=51200, ffn=4 * 12288, dropout=True)


def test_equation_1_of_korthikanti() -> None:
    """sbh (34 + 5 a s / h) a layer (arXiv 2205.05198); 34 sbh without the attention scores."""
    s, b, h, a = 2048, 1, 12288, 96
    whole = Batch(sequences=b, length=s, fused_attention=False)
    assert layer_activation_bytes(GPT3, whole) == s * b * h * (34 + 5 * a * s // h)
    fused = Batch(sequences=b, length=s)
    log_sum_exp = 4 * a * s * b
    assert layer_activation_bytes(GPT3, fused) == s * b * h * 34 + log_sum_exp


def test_full_checkpointing_keeps_the_inputs() -> None:
    """2 sbhL (their section 5), one layer computed again, the logits."""
    batch = Batch(sequences=1, length=2048, checkpointing=True)
    found = MemoryBreakdown(transformer_activations(GPT3, batch))
    inputs = 2 * 2048 * 12288 * 96
    assert found.total(during=During.LOSS) == inputs + head_activation_bytes(GPT3, batch)
    # gradients of a tensor of the MLP, and of 3.5 of the layer
    gradients = 2048 * (2 * 4 * 12288 + 7 * 12288)
    again = layer_activation_bytes(GPT3, batch) + gradients
    assert found.total(during=During.BACKWARD) == inputs + again
    assert found.total(during=During.BACKWARD_END) == again


def test_grouped_queries_and_gates_are_counted() -> None:
    """LLaMA-3-8B: fewer keys, four tensors of the MLP's width."""
    llama = Transformer(
        layers=32, hidden=4096, heads=32, kv_heads=8, vocab=128256, ffn=14336, gated=True
    )
    tokens = 8192
    norms, qkv_input, queries, keys, values, output = 2 * 4096, 4096, 4096, 1024, 1024, 4096
    mlp_input, gate, up, activated, product = 4096, 14336, 14336, 14336, 14336
    kept = norms + qkv_input + queries + keys + values + output
    kept += mlp_input + gate + up + activated + product
    nbytes = layer_activation_bytes(llama, Batch(sequences=1, length=tokens))
    assert nbytes == 2 * tokens * kept + 4 * 32 * tokens


def test_the_largest_micro_batch() -> None:
    """What fits is linear in the sequences."""
    batch = Batch(sequences=1, length=2048)
    terms = transformer_activations(GPT3, batch)
    one = MemoryBreakdown(terms).total()
    stands = MemoryBreakdown((Term(role="sharded_param", nbytes=100),))
    assert sequences_that_fit(stands, 100 + 3 * one, terms) == 3
    assert sequences_that_fit(stands, 99 + one, terms) == 0
    in_step = MemoryBreakdown((Term(role=STEP_TEMP, nbytes=4 * one, during=During.STEP),))
    assert sequences_that_fit(in_step, 4 * one, terms) == 4, "activations are freed by then"
    assert sequences_that_fit(in_step, 3 * one, terms) == 0, "no smaller batch makes the step fit"


@pytest.mark.parametrize(
    ("framework", "stage", "optimizer", "extra"),
    [
        # 16 bits: flat gradients and their fp32 copy, or that copy and temporaries less what is freed
        ("deepspeed", 0, "adamw", 8), ("deepspeed", 1, "adamw", 6), ("deepspeed", 2, "adamw", 6),
        ("deepspeed", 2, "adamw-fused", 6), ("deepspeed", 2, "adamw-for-loop", 10),
        ("deepspeed", 3, "adamw", 8), ("deepspeed", 3, "adamw-fused", 6),
        ("fsdp1", 3, "adamw", 4), ("fsdp2", 3, "adamw", 4), ("fsdp2", 3, "adamw-fused", 0),
        ("ddp", 0, "adamw", 4), ("ddp", 0, "adamw-fused", 0), ("ddp", 0, "sgd-momentum", 0),
    ],
)  # fmt: skip
def test_the_optimizers_step_takes_more(framework: str, stage: int, optimizer: str, extra: int) -> None:
    """Bytes an element of the partition; tests/vgpu/test_peaks.py measures them."""
    precision = Precision.mixed() if framework == "deepspeed" else Precision.policy()
    plan = ShardPlan(
        stage=ZeroStage(stage), ranks=4, framework=framework, precision=precision,
        optimizer=OPTIMIZERS[optimizer],
    )  # fmt: skip
    found = memory_of(from_count(10**6).sizes(plan), plan)
    partition = 10**6 // (4 if stage else 1)
    assert found.role(STEP_TEMP) == extra * partition
    # at stage 1 whole gradients exist until then
    assert found.peak_phase() is (During.BACKWARD_END if stage == 1 else During.STEP) or not extra


@pytest.mark.parametrize("sub_group", [50_000, 200_000])
def test_stage_3_updates_one_sub_group_at_a_time(sub_group: int) -> None:
    """DeepSpeed fills the first ones: of a shard of 250,000 elements, the last one may be smaller."""
    plan = ShardPlan(stage=ZeroStage.PARAMETERS, ranks=4, sub_group_numel=sub_group)
    assert memory_of(from_count(10**6).sizes(plan), plan).role(STEP_TEMP) == 8 * sub_group


def test_a_loop_over_tensors_needs_the_largest_twice() -> None:
    """And under FSDP1 the largest unit, whose parameters are one."""
    unit = Unit("layer", ((100, 100), (300, 100)), count=3)
    plan = ShardPlan(
        stage=ZeroStage.PARAMETERS, ranks=2, framework="fsdp2", precision=Precision.policy(),
        optimizer=OPTIMIZERS["adamw-for-loop"],
    )  # fmt: skip
    model = ModelSpec(name="m", units=(unit,))
    flat = replace(plan, framework="fsdp1")
    found = [memory_of(model.sizes(p), p).role(STEP_TEMP) for p in (plan, flat)]
    assert found == [2 * 4 * 30_000 // 2, 2 * 4 * 40_000 // 2]


def test_gradients_and_activations_do_not_meet_without_accumulation() -> None:
    for accumulation, nbytes in ((1, 0), (2, 4 * 10**6 // 2)):
        plan = ShardPlan(
            stage=ZeroStage.PARAMETERS, ranks=2, framework="fsdp2", precision=Precision.policy(),
            accumulation=accumulation,
        )  # fmt: skip
        found = memory_of(from_count(10**6).sizes(plan), plan)
        assert found.role("sharded_grad", during=During.LOSS) == nbytes


def test_norms_and_softmax_of_llama_are_in_fp32() -> None:
    """What autograd keeps in transformers' own Llama and Qwen3, by its storages on torch 2.13."""
    tokens, h, f, kv = 8192, 1024, 2816, 256
    llama = Transformer(
        layers=1, hidden=h, heads=16, kv_heads=4, vocab=8192, ffn=f, gated=True, fp32_norms=True,
        fp32_softmax=True,
    )  # fmt: skip
    batch = Batch(sequences=4, length=2048)
    fused = 16 * h + 4 * h + 4 * kv + 8 * f + 4 * 16
    assert layer_activation_bytes(llama, batch) == tokens * fused
    qwen = replace(llama, query_norms=True)
    assert layer_activation_bytes(qwen, batch) == tokens * (fused + 6 * (h + kv))
    eager = layer_activation_bytes(llama, replace(batch, fused_attention=False))
    assert eager == tokens * (24 * h + 8 * f + 6 * 16 * 2048)
    assert head_activation_bytes(llama, batch) == tokens * (8 * h + 12 * 8192)


# ---- communication --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("stage", "paper", "sent"), list(zip(STAGES, (2, 2, 2, 3), (2, 3, 3, 3), strict=True))
)
def test_section_7_of_the_zero_paper(stage: ZeroStage, paper: int, sent: int) -> None:
    """2 psi up to stage 2, 3 psi at stage 3 (elements; two bytes each).

    DeepSpeed all-reduces whole buckets at stages 1 and 2, and gathers after the step: 3 psi.
    """
    plan = ShardPlan(stage=stage, ranks=1000)
    sizes = from_count(10**6).sizes(plan)
    assert paper_step_bytes(sizes, plan) == pytest.approx(paper * 2 * 10**6, rel=0.002)
    assert communication_bytes(sizes, plan) == pytest.approx(sent * 2 * 10**6, rel=0.002)
    to_each = replace(plan, reduces_whole_buckets=False)
    assert communication_bytes(sizes, to_each) == paper_step_bytes(sizes, plan)


def test_stage_3_gathers_once_what_it_uses_again_soon() -> None:
    """Half of ``stage3_max_reuse_distance`` lies before the end of forward, half behind it."""
    plan = ShardPlan(stage=ZeroStage.PARAMETERS, ranks=2, reuse_numel=10**6)
    sent = [sent_step_bytes(from_count(numel).sizes(plan), plan) for numel in (10**5, 10**6)]
    assert [round(bytes_.gathered_backward) for bytes_ in sent] == [0, 500_000]
    assert [round(bytes_.gathered_forward) for bytes_ in sent] == [10**5, 10**6]


def test_zero_plus_plus_divides_what_is_sent_between_hosts() -> None:
    """Wang et al. 2023 (arXiv 2306.10209), table 1: from 3 M to 0.75 M between hosts."""
    plain = ShardPlan(stage=ZeroStage.PARAMETERS, ranks=1024, host_ranks=8)
    sizes = from_count(10**6).sizes(plain)
    model_bytes = 2 * 10**6

    def between_hosts(**changes: Any) -> float:
        sent = sent_step_bytes(sizes, replace(plain, **changes))
        return (sent.total - sent.within_host) / model_bytes

    assert between_hosts() == pytest.approx(3, rel=0.01)
    assert between_hosts(secondary_ranks=8) == pytest.approx(2, rel=0.01)
    assert between_hosts(quantized_weights=True) == pytest.approx(2, rel=0.01)
    everything = {"secondary_ranks": 8, "quantized_weights": True, "quantized_grads": True}
    # a gather in 8 bits; of the gradients the eight ranks of a host send 0.25 together
    assert between_hosts(**everything) == pytest.approx(0.5 + 0.25 / 8, rel=0.01)
    on_one_host = replace(plain, host_ranks=1024, quantized_grads=True)
    assert sent_step_bytes(sizes, on_one_host).reduced == sent_step_bytes(sizes, plain).reduced


def test_the_type_in_which_gradients_accumulate_is_not_sent() -> None:
    """DeepSpeed reduces in the type of the model; accelerate's policy of FSDP in the half."""
    config = {"zero_optimization": {"stage": 2}, "bf16": {"enabled": True}}
    wide = config | {"data_types": {"grad_accum_dtype": "fp32"}}
    plans = [ShardPlan(ranks=8, **changes_of_config(one)) for one in (config, wide)]
    sent = [communication_bytes(from_count(10**6).sizes(plan), plan) for plan in plans]
    assert sent[0] == sent[1]
    fsdp = changes_of_config(
        {"distributed_type": "FSDP", "mixed_precision": "bf16", "fsdp_config": {"fsdp_version": 2}}
    )
    plan = ShardPlan(ranks=1000, **{key: fsdp[key] for key in ("framework", "stage", "precision")})
    sent_bytes = sent_step_bytes(from_count(10**6).sizes(plan), plan)
    assert sent_bytes.total == pytest.approx(6 * 10**6, rel=0.002)


def test_accumulation_costs_stage_3_in_every_micro_step() -> None:
    """Stage 1 reduces once; stage 3 gathers and reduces each time."""
    sizes = from_count(10**6).sizes(ShardPlan(stage=ZeroStage.NONE, ranks=8))
    sent = {
        stage: [
            communication_bytes(sizes, ShardPlan(stage=stage, ranks=8, accumulation=n)) for n in (1, 4)
        ]
        for stage in STAGES
    }
    assert sent[ZeroStage.OPTIMIZER][1] == sent[ZeroStage.OPTIMIZER][0]
    assert sent[ZeroStage.PARAMETERS][1] == 4 * sent[ZeroStage.PARAMETERS][0]


def test_fsdp_gathers_frozen_parameters_too_where_it_keeps_them_gathered() -> None:
    """A frozen unit of a million elements and a trained one of ten thousand, in bf16 on two ranks."""
    frozen, trained = Unit("f", ((1000, 1000),), trainable=False), Unit("t", ((100, 100),))
    model = ModelSpec(name="m", units=(frozen, trained))
    plan = ShardPlan(stage=ZeroStage.GRADIENTS, ranks=2, framework="fsdp2", reshards=False)
    assert communication_bytes(model.sizes(plan), plan) == 1_010_000 + 10_000


# ---- models ---------------------------------------------------------------------------------------

GPT2 = {"model_type": "gpt2", "n_embd": 768, "n_layer": 12, "n_head": 12, "vocab_size": 50257,
        "n_positions": 1024}  # fmt: skip


@pytest.mark.parametrize(
    "bad",
    [
        {"ranks": 0},
        {"ranks": 6, "shard_ranks": 4},
        {"ranks": 2, "framework": "horovod"},
        {"ranks": 2, "params_on": "host", "stage": ZeroStage.GRADIENTS},
        {"ranks": 2, "optimizer_on": "moon"},
        {"ranks": 2, "optimizer_on": "host", "stage": ZeroStage.NONE},
    ],
)
def test_plans_that_cannot_be(bad: dict[str, object]) -> None:
    with pytest.raises(PlanError) as caught:
        ShardPlan(**({"stage": ZeroStage.PARAMETERS} | bad))  # type: ignore[arg-type]
    assert caught.value.hint


def test_shards_add_up_to_the_whole_and_a_little_more() -> None:
    """Whatever the ranks: padding is less than one row, or one element, a parameter and rank."""
    model = from_config(GPT2)
    for ranks in (2, 3, 7, 8, 64):
        for framework in ("deepspeed", "fsdp1", "fsdp2"):
            plan = ShardPlan(stage=ZeroStage.PARAMETERS, ranks=ranks, framework=framework)
            shard = model.sizes(plan).shard_numel
            tensors = sum(len(u.shapes) * u.count for u in model.units)
            rows = sum(math.prod(s[1:]) * u.count for u in model.units for s in u.shapes)
            slack = {"deepspeed": tensors, "fsdp1": tensors, "fsdp2": rows}[framework]
            assert 0 <= shard - model.params / ranks <= slack
