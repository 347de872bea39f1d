"""Every sharding strategy that an agent can send, through every rule: who is advised what, and how.

The advice must be in the user's own words: a diff for FSDP1 calls ``FullyShardedDataParallel``, one for
FSDP2 ``fully_shard``, one for DeepSpeed is JSON.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from builders import MS, changed, device_memory, run, short_of_cpus, summary
from evidence import (
    CPU_STEP,
    FIRES,
    FULL,
    GATHERS,
    GIB,
    GROWING,
    MANY_THREADS,
    MIB,
    MODEL,
    REDUCES,
    TIGHT,
    TINY,
    TP_FAR,
    TRIED,
    WAITING,
    found,
    one,
    planning,
    role,
    row,
    units,
)
from strategies import EVERY

from zeromon.diagnosis.engine import advise
from zeromon.diagnosis.rule import settings_in
from zeromon.diagnosis.rules.deepspeed import reduce_scatter_off
from zeromon.ring.model_metadata import ModelMetadata
from zeromon.ring.strategy import (
    Dim,
    Framework,
    Offload,
    Sharding,
    Strategy,
    deepspeed_strategy,
    fsdp1_strategy,
)
from zeromon.snapshot import RankSnapshot
from zeromon.snapshot.communication import GatherRow, Links
from zeromon.snapshot.finding import ConfigFormat
from zeromon.snapshot.host import Device
from zeromon.snapshot.rank import Setting

FAR = units("all_gather", "forward", nodes=2)
SMALL = tuple(
    Setting(engine=1, name=f"zero_optimization.{name}", effective="2500", written="2500")
    for name in ("reduce_bucket_size", "allgather_bucket_size", "stage3_param_persistence_threshold")
)
STATES = ("optimizer_state", "master_param", "unsharded_grad", "unsharded_param")
FSDP1 = [s for s in EVERY if s.framework is Framework.FSDP1 and s.sharding is not Sharding.NONE]


def model_metadata(strategy: Strategy) -> dict[str, Any]:
    """What the agents send of a model under *strategy*, as far as rules read it."""
    framework = str(strategy.framework)
    if strategy.framework is Framework.ZERO_REDUNDANCY or strategy.sharding is Sharding.NONE:
        framework = "ddp"
    return {**MODEL, "framework": framework, "stage": strategy.stage}


def situations(strategy: Strategy) -> Iterator[RankSnapshot]:
    """Ranks under *strategy*, each with the evidence of some rules, whether they concern it or not."""
    model = model_metadata(strategy)

    def made(*traffic: Any, **facts: Any) -> RankSnapshot:
        return one(*traffic, **({"strategy": strategy.label, "models": (model,)} | facts))

    bucket = {"nbytes": 40.0 * MIB, "exposed_seconds": 0.05, "seconds": 0.05}
    held = tuple(role(name, 10 * GIB) for name in STATES)
    yield made(*GATHERS)
    yield made(*FAR, roles=(role("sharded_param", MIB),))
    yield made(*units("all_reduce", "forward", dim="tp", nodes=2), dimensions=TP_FAR)
    small = {**model, "units": [1000] * 4, "bucket_cap_bytes": 1048}
    yield made(*TINY, models=(small,), settings=SMALL if strategy.is_deepspeed else ())
    yield made(row("all_reduce", "bucket 0", "backward", **bucket))
    for op in ("all_reduce", "reduce_scatter"):
        micro_steps = (summary(1, micro_steps=4),) * 30
        yield made(*units(op, "backward", calls=4.0), recent=micro_steps)
    yield made(risks=(FULL,), memory_device=TIGHT, roles=held)
    on_host = tuple(replace(r, device_bytes=0, host_bytes=r.device_bytes) for r in held)
    yield made(risks=(replace(FULL, pool="host"),), roles=on_host)
    yield made(
        risks=(FULL,), memory_device=device_memory(), roles=(role("sharded_param", GIB),),
        recent=(summary(1, allocated_bytes=60 * GIB),) * 30,
    )  # fmt: skip
    yield made(risks=(replace(FULL, cause="fragmentation"),), memory_device=device_memory(retries=9))
    yield made(risks=(replace(FULL, cause="growth"),), memory_device=device_memory())
    whole = {**model, "units": [], "largest_unit_numel": 100 * MIB}
    yield made(models=(whole,), unsharded_peak_bytes=400 * MIB)
    yield made(workers=GROWING)
    yield made(recent=WAITING * 30, loader={"num_workers": 0})
    yield made(recent=FIRES["launch_bound"].steps.recent)
    for pauses in ("garbage_collection", "recompilations", "slow_steps"):
        at = FIRES[pauses]
        yield made(
            recent=at.steps.recent,
            watched_steps=at.steps.watched_steps,
            loader=at.config.loader,
            compiled=at.config.compiled,
        )
    yield made(machine_device=Device(name="NVIDIA H100 80GB HBM3"))
    in_bf16 = ({**model, "compute_dtype": "bfloat16"},)
    yield made(machine_device=Device(name="Tesla T4"), models=in_bf16)
    yield made(recent=FIRES["grad_norm_spikes"].steps.recent)
    yield made(ledger=FIRES["checkpoint_interval"].ledger)
    pressure = short_of_cpus(0.3, cpus=4)
    yield made(pressure=pressure, process=MANY_THREADS)
    links = Links(device_bytes_per_second=450e9, device_kind="18 NVLinks")
    yield made(row(nbytes=64.0 * MIB, exposed_seconds=0.03), links=links)
    yield made(pipeline=FIRES["pipeline_bubble"].communication.pipeline)
    for on, device in (("host", "cuda:0"), ("device", "cpu")):
        planned = {**planning(on=on).config.planned, **{k: model[k] for k in ("framework", "stage")}}
        yield planning(device=device, strategy=strategy.label, planned=planned)
    if strategy.is_deepspeed:
        yield from engines(strategy, made)


def engines(strategy: Strategy, made: Any) -> Iterator[RankSnapshot]:
    """What only a DeepSpeed engine of that stage and with that offload reports."""
    off = Setting(engine=1, name="zero_optimization.overlap_comm", effective="false", written="")
    buckets = [replace(r, unit=f"bucket {n}") for n, r in enumerate(REDUCES)]
    yield made(*buckets, device="cuda:0", settings=(off,))
    reported = [FIRES["overflow_storm"], TRIED, FIRES["reduce_scatter_off"]]
    if strategy.offload:
        reported += [FIRES["offload_waits"], FIRES["pinned_memory_off"], FIRES["no_effect"]]
        yield made(recent=CPU_STEP * 30)
        states = (replace(role("optimizer_state", 0), host_bytes=GIB),)
        yield made(recent=CPU_STEP * 30, memory_device=device_memory(), roles=states)
    if strategy.stage == 3:
        late = GatherRow(outcome="late", nbytes=9, exposed_seconds=0.1)
        waiting = tuple(summary(n, late_gather_ns=30 * MS) for n in range(10, 40))
        yield made(recent=waiting, gathers=(late,))
        yield made(models=({**model_metadata(strategy), "built_bytes": 28 * 10**9},))
    for snapshot in reported:
        yield replace(snapshot, strategy=strategy.label, strategy_fields=strategy)


def advice(strategy: Strategy) -> dict[str, set[str]]:
    """Rule -> the configuration formats of its remedies, over all situations."""
    formats: dict[str, set[str]] = {}
    for snapshot in situations(strategy):
        for finding in advise(run(snapshot)):
            if finding.remedy is not None:
                formats.setdefault(finding.rule, set()).add(finding.remedy.dialect)
    return formats


ALL = {
    "activations_dominate": "Python", "cpu_starved": "environment", "fragmentation": "environment",
    "data_wait": "Python (DataLoader)", "slow_steps": "Python (DataLoader)",
    "garbage_collection": "Python", "recompilations": "Python", "oom_risk": "Python",
    "workers_grow": "Python", "launch_bound": "Python",
    "slow_link": "environment",
    "checkpoint_interval": "Python",
    "pipeline_bubble": "Python (pipelining)",
    "tensor_parallel_across_nodes": "Python", "grad_norm_spikes": "Python",
}  # fmt: skip


def named(form: str, *rules: str) -> dict[str, str]:
    return dict.fromkeys(rules, form)


ANY_FSDP = (
    "accumulation_communicates", "bf16_emulated", "half_precision_unused", "host_memory_short",
    "tiny_collectives",
)  # fmt: skip
GATHERING = ("fsdp_prefetch_off", "full_shard_across_nodes")
OF_FSDP1 = named("Python (FSDP1)", *ANY_FSDP)
OF_FSDP2 = named("Python (FSDP2)", *ANY_FSDP, *GATHERING, "whole_model_unit")
TO_FSDP2 = named("Python (FSDP2)", "host_memory_short", "stage_too_low")
OF_DEEPSPEED = named(
    "DeepSpeed JSON", "bf16_emulated", "grad_norm_spikes", "half_precision_unused",
    "host_memory_short", "loss_scale_settings",
    "overflow_storm", "overlap_comm_off", "tiny_collectives",
)  # fmt: skip
OF_OFFLOAD = named(
    "DeepSpeed JSON",
    "cpu_optimizer_slow",
    "no_effect",
    "offload_waits",
    "offload_without_need",
    "pinned_memory_off",
)
OF_ZERO3 = named("DeepSpeed JSON", "stage_too_high", "starved_prefetch", "zero_plus_plus")
OF_ZERO3 |= named("Python", "whole_model_on_every_rank")
IN_PYTHON = named("Python", "bf16_emulated", "half_precision_unused")


def expected(strategy: Strategy) -> dict[str, str]:
    """The rules that fire for *strategy*, with the configuration format of the remedy."""
    framework, stage = strategy.framework, strategy.stage
    if framework is Framework.UNKNOWN:
        return ALL | IN_PYTHON
    if framework is Framework.DDP:
        of_ddp = ("accumulation_communicates", "ddp_bucket_large", "tiny_collectives")
        return ALL | TO_FSDP2 | named("Python (DDP)", *of_ddp) | IN_PYTHON
    if framework is Framework.ZERO_REDUNDANCY:
        return (
            ALL | TO_FSDP2 | named("Python (DDP)", "tiny_collectives")
            | IN_PYTHON
        )  # fmt: skip
    if framework is Framework.FSDP2:
        only = ("reshard_without_need",) if stage == 3 else ("stage_too_low",)
        return ALL | OF_FSDP2 | named("Python (FSDP2)", *only)
    if framework is Framework.FSDP1:
        gathers = (*GATHERING, "whole_model_unit") if stage else ()
        only = (*gathers, "stage_too_low" if stage < 3 else "reshard_without_need")
        return ALL | OF_FSDP1 | named("Python (FSDP1)", *only)
    higher = named("DeepSpeed JSON", "stage_too_low") if stage < 3 or not strategy.offload else {}
    if stage == 1 and Dim.PP in strategy.parts:
        higher = {}  # DeepSpeed's PipelineEngine refuses stages 2 and 3
    of_stage = OF_ZERO3 if stage == 3 else {}
    of_stage = of_stage | (named("DeepSpeed JSON", "reduce_scatter_off") if stage else {})
    return ALL | OF_DEEPSPEED | higher | of_stage | (OF_OFFLOAD if strategy.offload else {})


@pytest.mark.parametrize("strategy", EVERY, ids=lambda s: str(s.label))
def test_a_strategy_gets_the_rules_and_the_diffs_of_its_framework(strategy: Strategy) -> None:
    assert advice(strategy) == {rule: {form} for rule, form in expected(strategy).items()}


def test_every_rule_with_a_remedy_fires_for_some_strategy() -> None:
    assert set(FIRES) <= {rule for strategy in EVERY for rule in expected(strategy)}


# ---- nothing is advised that is already so ----------------------------------------------------------


@pytest.mark.parametrize("strategy", EVERY, ids=lambda s: str(s.label))
def test_what_was_applied_is_not_advised_again(strategy: Strategy) -> None:
    """Each diff is applied to what the rank reports, and nothing else changes: its lines are gone."""
    compared = 0
    for snapshot in situations(strategy):
        for finding in advise(run(snapshot)):
            remedy = finding.remedy
            if remedy is None or not (lines := settable(remedy.diff, remedy.dialect)):
                continue
            after = snapshot
            for values in lines.values():
                after = with_settings(after, remedy.dialect, values)
            again = found(after, finding.rule)
            left = again.remedy.diff.splitlines() if again and again.remedy else []
            assert not lines.keys() & set(left), (finding.rule, left)
            compared += 1
    assert compared >= 4


def settable(diff: str, dialect: str) -> dict[str, dict[str, str]]:
    """The added lines of *diff* that set what a rank reports, each with what it sets."""
    lines = {line: dict(settings_in(line, dialect)) for line in diff.splitlines() if line[0] == "+"}
    if dialect.startswith("Python"):
        reported = {*ModelMetadata.__annotations__, "bucket_cap_mb", "num_workers", "persistent_workers"}
        lines = {line: {k: v for k, v in at.items() if k in reported} for line, at in lines.items()}
    return {line: values for line, values in lines.items() if values}


def with_settings(rank: RankSnapshot, dialect: str, values: dict[str, str]) -> RankSnapshot:
    """*rank* as it reports itself once *values* are set."""
    if dialect == ConfigFormat.ENVIRONMENT:
        variables = rank.config.process.get("variables", {}) | values
        threads = int(values.get("OMP_NUM_THREADS", rank.config.process.get("threads", 1)))
        return changed(rank, process={"variables": variables, "threads": threads})
    if dialect == ConfigFormat.DEEPSPEED:
        others = [s for s in rank.config.settings if not any(s.name.endswith(name) for name in values)]
        new = [Setting(engine=1, name=k, effective=v, written=v) for k, v in values.items()]
        return changed(rank, settings=(*others, *new))
    if "num_workers" in values:
        stays = values.get("persistent_workers") == "True"
        loader = {"num_workers": int(values["num_workers"]), "persistent_workers": stays}
        return changed(rank, loader=loader)
    facts: dict[str, Any] = {k: True if v == "True" else v for k, v in values.items()}
    if "bucket_cap_mb" in facts:
        facts["bucket_cap_bytes"] = round(float(facts.pop("bucket_cap_mb")) * MIB)
    return changed(rank, models=({**rank.config.models[0], **facts},))


# ---- what the diffs change ------------------------------------------------------------------------


@pytest.mark.parametrize("strategy", FSDP1, ids=lambda s: str(s.label))
def test_fsdp1_is_advised_to_prefetch_whatever_its_sharding_strategy(strategy: Strategy) -> None:
    finding = found(one(*GATHERS, strategy=strategy.label), "fsdp_prefetch_off")
    assert finding is not None and finding.remedy is not None
    assert "forward_prefetch=True" in finding.remedy.diff


@pytest.mark.parametrize("strategy", FSDP1, ids=lambda s: str(s.label))
def test_fsdp1_across_nodes_is_advised_to_shard_within_them(strategy: Strategy) -> None:
    rank = one(*FAR, strategy=strategy.label, roles=(role("sharded_param", MIB),))
    finding = found(rank, "full_shard_across_nodes")
    assert finding is not None and finding.remedy is not None
    keeps = "_HYBRID_SHARD_ZERO2" if strategy.sharding is Sharding.GRAD_OP else ".HYBRID_SHARD"
    assert keeps in finding.remedy.diff


@pytest.mark.parametrize("strategy", [s for s in EVERY if s.is_deepspeed], ids=lambda s: str(s.label))
def test_many_small_collectives_of_zero_are_merged_by_the_setting_of_the_stage(
    strategy: Strategy,
) -> None:
    finding = found(one(*TINY, strategy=strategy.label, settings=SMALL), "tiny_collectives")
    assert finding is not None and finding.remedy is not None
    is_stage_3 = "stage3_param_persistence_threshold" in finding.remedy.diff
    assert is_stage_3 == (strategy.stage == 3)
    assert ("reduce_bucket_size" in finding.remedy.diff) == (strategy.stage < 3)


def test_fsdp1_wraps_larger_units_by_its_policy() -> None:
    facts = {
        "strategy": fsdp1_strategy(Sharding.FULL).label,
        "models": ({**MODEL, "units": [1000] * 4},),
    }
    finding = found(one(*TINY, **facts), "tiny_collectives")
    assert finding is not None and finding.remedy is not None
    assert "auto_wrap_policy" in finding.remedy.diff and "fully_shard" not in finding.remedy.diff


@pytest.mark.parametrize("offload", Offload)
def test_the_next_stage_is_that_of_the_stage_wherever_state_is(offload: Offload) -> None:
    label = deepspeed_strategy(1, offload=offload).label
    rank = replace(FIRES["stage_too_low"], strategy=label, strategy_fields=None)
    finding = found(rank, "stage_too_low")
    assert finding is not None and finding.remedy is not None
    assert finding.remedy.diff == '- "stage": 1\n+ "stage": 2'


def test_the_fields_decide_and_the_label_stands_in_where_there_are_none() -> None:
    """An older record and Prometheus have the label alone."""
    fields = replace(fsdp1_strategy(Sharding.FULL), offload=Offload.HOST, hybrid=True)
    rank = one(strategy=fields.label, strategy_fields=fields)
    assert rank.sharding_strategy is fields
    assert replace(rank, strategy_fields=None).sharding_strategy == fsdp1_strategy(
        Sharding.FULL, hybrid=True
    )
    assert replace(rank, strategy_fields=None, strategy="else").sharding_strategy == Strategy()


def test_hpz_is_not_advised_where_it_is_on() -> None:
    on = deepspeed_strategy(3, hybrid=True, plus_plus=True)
    assert found(one(*FAR, strategy=on.label), "zero_plus_plus") is not None  # by the label alone
    assert found(one(*FAR, strategy=on.label, strategy_fields=on), "zero_plus_plus") is None


def test_zero3_is_advised_to_offload_what_is_on_a_full_device_and_not_what_is_on_a_full_host() -> None:
    states = role("optimizer_state", 40 * GIB)
    facts: dict[str, Any] = {"strategy": deepspeed_strategy(3).label, "memory_device": TIGHT}
    finding = found(one(risks=(FULL,), roles=(states,), **facts), "stage_too_low")
    assert finding is not None and finding.remedy is not None
    assert "stay on the device" in finding.text and "offload_optimizer" in finding.remedy.diff
    on_host = replace(states, device_bytes=0, host_bytes=40 * GIB)
    full_host = (replace(FULL, pool="host"),)
    assert found(one(risks=full_host, roles=(on_host,), **facts), "stage_too_low") is None


def test_whole_buckets_that_a_gpu_waits_for_are_reduced_to_each_rank() -> None:
    """The default of DeepSpeed's stages 1 and 2, which alone is no finding."""
    waiting = FIRES["overlap_comm_off"]
    model = {"framework": "deepspeed", "stage": 2, "reduces_whole_buckets": True}

    def found(rank: RankSnapshot, **facts: Any) -> list[str]:
        matches = reduce_scatter_off(run(changed(rank, models=(model | facts,))))
        return [str(match.remedy.diff) for match in matches if match.remedy is not None]

    assert found(waiting) == ['+ "use_multi_rank_bucket_allreduce": false']
    assert found(waiting, reduces_whole_buckets=False) == []
    assert found(changed(waiting, device="cpu")) == []
    assert found(changed(waiting, traffic=())) == []
