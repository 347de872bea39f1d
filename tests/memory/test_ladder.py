"""The OOM ladder: its bytes against model and real runs, and one text everywhere."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from builders import device_memory, rank, run
from recordings import replay
from support import Node

from zeromon.check.problem import Machine
from zeromon.check.runner import check
from zeromon.cli import main
from zeromon.diagnosis.engine import advise
from zeromon.memory.ladder import ladder_of_risk, ladder_rungs
from zeromon.memory.models import from_count
from zeromon.memory.plan import Setup, of_run, predict_row
from zeromon.memory.predict import Batch, During, MemoryBreakdown, memory_of, transformer_activations
from zeromon.memory.reconcile import role_bytes
from zeromon.memory.spec import Precision, ShardPlan, Transformer, Unit, ZeroStage
from zeromon.readout.remedy import ladder_lines, remedy_text
from zeromon.readout.report import render_run
from zeromon.snapshot import Pool, RunSnapshot
from zeromon.snapshot.finding import Rung
from zeromon.snapshot.memory import OutOfMemory, Risk, RoleRow

GIB = 1 << 30
SHAPE = Transformer(layers=16, hidden=2048, heads=16, vocab=32000, ffn=8192)
LAYER = Unit("layers", ((2048, 2048),) * 4 + ((2048, 8192),) * 2 + ((2048,),) * 4, count=16)


def setup(framework: str, stage: int, *, length: int = 2048, **plan: Any) -> Setup:
    """A transformer with known layers on 8 devices."""
    model = replace(from_count(10**9), units=(LAYER,), has_units=True, architecture=SHAPE)
    chosen = ShardPlan(stage=ZeroStage(stage), ranks=8, framework=framework, reshards=stage == 3, **plan)
    batch = Batch(sequences=8, length=length)
    return Setup(model=model, plan=chosen, device_bytes=20 * GIB, batch=batch)


def peak(of: Setup, **changes: Any) -> int:
    """The memory model's own bytes of the setup's plan with *changes*."""
    plan = replace(of.plan, **changes)
    assert of.batch is not None
    acts = transformer_activations(SHAPE, of.batch, plan.precision.compute_bytes)
    return memory_of(of.model.sizes(plan), plan, acts).total("device")


BUFFERS: dict[str, Any] = {
    "grad_bucket_numel": 500_000_000, "grad_buckets": 2, "prefetch_numel": 50_000_000,
    "live_numel": 10**9, "reuse_numel": 10**9, "persistence_numel": 100_000,
}  # fmt: skip


@pytest.mark.parametrize(
    ("framework", "stage", "plan", "wanted", "changes"),
    [
        ("ddp", 0, {}, "gradient_as_bucket_view", {"bucket_views": True}),
        ("deepspeed", 1, {}, '"stage": 1 -> 2', {"stage": ZeroStage.GRADIENTS}),
        ("deepspeed", 2, BUFFERS, '"reduce_bucket_size": 500000000 -> 50000000',
         {"grad_bucket_numel": 50_000_000}),
        ("deepspeed", 3, BUFFERS, '"reduce_bucket_size": 500000000 -> 50000000',
         {"grad_bucket_numel": 50_000_000}),
        ("deepspeed", 3, BUFFERS | {"grad_bucket_numel": 0},
         '"stage3_max_live_parameters": 1000000000 -> 100000000, '
         '"stage3_max_reuse_distance": 1000000000 -> 100000000, '
         '"stage3_prefetch_bucket_size": 50000000 -> 10000000',
         {"live_numel": 10**8, "reuse_numel": 10**8, "prefetch_numel": 10**7}),
        ("fsdp1", 2, {"precision": Precision.full()}, "MixedPrecision(param_dtype",
         {"precision": replace(Precision.full(), compute_bytes=2)}),
        ("fsdp2", 3, {"precision": Precision.full()}, "MixedPrecisionPolicy(param_dtype",
         {"precision": replace(Precision.full(), compute_bytes=2)}),
    ],
)  # fmt: skip
def test_the_first_rung_frees_what_the_memory_model_says(
    framework: str, stage: int, plan: dict[str, Any], wanted: str, changes: dict[str, Any]
) -> None:
    here = setup(framework, stage, length=16, **plan)  # what matters is gradients, not activations
    first = ladder_rungs(here, None)[0]
    assert wanted in first.change
    assert first.frees_bytes == peak(here) - peak(here, **changes)


EVERY = [("deepspeed", 1), ("deepspeed", 2), ("deepspeed", 3), ("fsdp1", 2), ("fsdp1", 3),
         ("fsdp2", 2), ("fsdp2", 3), ("ddp", 0)]  # fmt: skip


@pytest.mark.parametrize(("framework", "stage"), EVERY)
def test_rungs_add_up_and_the_first_that_suffices_is_marked(framework: str, stage: int) -> None:
    """Each rung is on top of those above it, so they never free more than there is."""
    here = setup(framework, stage, **(BUFFERS if framework == "deepspeed" else {}))
    rungs = ladder_rungs(here, None)
    freed = [rung.frees_bytes or 0 for rung in rungs]
    assert len(rungs) >= 3 and min(freed) > 0 and sum(freed) <= peak(here)
    assert all(rung.price and rung.change for rung in rungs)
    assert not any(rung.enough for rung in rungs)
    need = freed[0] + freed[1] // 2
    assert [rung.enough for rung in ladder_rungs(here, need)[:3]] == [False, True, False]


def test_a_pipeline_of_deepspeed_is_offered_no_stage_that_divides_gradients() -> None:
    """DeepSpeed's PipelineEngine refuses stages 2 and 3."""
    here = replace(setup("deepspeed", 0), pipeline=2)
    stages = [rung.change for rung in ladder_rungs(here, None) if '"stage"' in rung.change]
    assert stages == ['"stage": 0 -> 1']


def test_a_smaller_micro_batch_keeps_the_global_batch() -> None:
    here = setup("fsdp2", 3)
    rung = next(r for r in ladder_rungs(here, None) if r.change.startswith("micro-batch 8"))
    assert rung.change == "micro-batch 8 -> 4, accumulation 1 -> 2"
    assert here.batch is not None
    assert rung.frees_bytes is not None
    half = transformer_activations(SHAPE, replace(here.batch, sequences=4))
    whole = transformer_activations(SHAPE, here.batch)
    freed = MemoryBreakdown(whole).total() - MemoryBreakdown(half).total()
    grads = predict_row(here, here.plan).memory.role("sharded_grad")
    assert rung.frees_bytes == freed - grads  # which exist beside activations from then on
    assert "more per step" in rung.price  # each micro-step gathers and reduces


def test_what_gathers_units_of_unknown_size_frees_at_most_so_much() -> None:
    here = replace(setup("deepspeed", 2), model=from_count(7 * 10**9), batch=None)
    rungs = ladder_rungs(here, 10 * GIB)
    bound = [rung for rung in rungs if '"stage": 2 -> 3' in rung.change]
    assert bound and bound[0].at_most
    assert not any(rung.enough for rung in rungs[rungs.index(bound[0]) :])
    unknown = [rung for rung in rungs if rung.frees_bytes is None]
    assert len(unknown) == 2 and all("unknown" in rung.price for rung in unknown)


def test_a_full_host_under_offload_has_rungs_of_its_own() -> None:
    here = setup("deepspeed", 3, **BUFFERS, optimizer_on="host", params_on="host", pins=True)
    rungs = ladder_rungs(here, None, ("host",))
    assert rungs[0].change == '"pin_memory": true -> false'
    assert '"nvme"' in rungs[1].change and "nvme_path" in rungs[1].price


# ---- one ladder everywhere ------------------------------------------------------------------------

FACTS: dict[str, Any] = {
    "framework": "deepspeed", "stage": 2, "ranks": 8, "numel": 10**9, "trainable": 10**9,
    "shard_numel": 10**9 // 8, "trainable_shard_numel": 10**9 // 8, "param_bytes": 2,
    "compute_bytes": 2, "grad_bytes": 2, "has_master": True, "optimizer": "AdamW",
    "grad_bucket_numel": 500_000_000, "grad_buckets": 1, "micro_batch": 4,
}  # fmt: skip


def full(**facts: Any) -> RunSnapshot:
    states = RoleRow(
        role="optimizer_state", device_bytes=GIB, host_bytes=0, disk_bytes=0, pinned_bytes=0
    )
    risk = Risk(pool="device", ratio=0.9, cause="static", used_bytes=79 * GIB, capacity_bytes=80 * GIB)
    base = {"models": (FACTS,), "roles": (states,), "risks": (risk,), "memory_device": device_memory()}
    return run(rank(0, **(base | facts)))


def test_a_finding_and_a_death_show_the_same_ladder() -> None:
    """In the JSON of the collector it is the field `rungs` of the remedy."""
    alive = full()
    rungs = ladder_of_risk(alive, Pool.DEVICE, (79 - 0.9 * 80) * GIB)
    assert rungs[0].change == '"reduce_bucket_size": 500000000 -> 50000000'
    assert rungs[0].frees_bytes == 450_000_000 * 2
    finding = next(f for f in advise(alive) if f.code == "ZM201")
    assert finding.remedy is not None and finding.remedy.rungs == rungs
    assert "ZM203" not in {f.code for f in advise(alive)}, "its bytes would stand twice"
    shown = tuple(line.text for line in remedy_text(finding.remedy).diff)
    assert shown == ladder_lines(rungs)
    oom = OutOfMemory(
        requested_bytes=7 * GIB, free_bytes=0, total_bytes=80 * GIB, largest_block_bytes=-1
    )
    dead = full(out_of_memory=oom, alive=False, failed=True, ended="exception", risks=())
    text = render_run(replace(dead, findings=tuple(advise(dead))))
    for line in ladder_lines(ladder_of_risk(dead, Pool.DEVICE, 7 * GIB)):
        assert line in text
    leaked = Risk(pool="device", ratio=1.0, cause="growth", growth_bytes_per_step=GIB)
    dead = full(out_of_memory=oom, alive=False, failed=True, ended="exception", risks=(leaked,))
    (death,) = (f for f in advise(dead) if f.code == "ZM001")
    assert death.remedy is None, "a smaller model would only die later"


def test_the_first_rung_that_is_enough_names_no_others() -> None:
    rung = Rung(change="a -> b", frees_bytes=GIB, price="none", enough=True)
    first, second = ladder_lines((rung, rung))
    assert first.endswith("<- enough") and second.endswith("<- enough, with those above")


def test_a_script_under_autocast_is_not_told_to_use_it() -> None:
    """Parameters of DDP are in fp32 with it and without; only the process says which."""
    facts = {
        **FACTS,
        "framework": "ddp",
        "stage": 0,
        "param_bytes": 4,
        "compute_bytes": 4,
        "grad_bytes": 4,
    }
    plain = full(models=(facts,))
    process = {**plain.ranks[0].config.process, "autocast": "bfloat16"}
    config = replace(plain.ranks[0].config, process=process)
    with_autocast = replace(plain, ranks=(replace(plain.ranks[0], config=config),))
    changes, others = (
        [rung.change for rung in ladder_of_risk(shown, Pool.DEVICE, 7 * GIB)]
        for shown in (plain, with_autocast)
    )
    assert others == [change for change in changes if "torch.autocast" not in change] != changes


def test_growth_and_an_unknown_model_have_no_ladder() -> None:
    grows = replace(full().ranks[0].memory.risks[0], cause="growth", growth_bytes_per_step=1e6)
    remedies = [
        next(f for f in advise(each) if f.code == "ZM201").remedy
        for each in (full(risks=(grows,)), full(models=()))
    ]
    assert remedies[0] is not None and not remedies[0].rungs
    assert remedies[1] is None


@pytest.fixture
def files(tmp_path: Path) -> Callable[[dict[str, Any]], str]:
    def written(config: dict[str, Any]) -> str:
        (tmp_path / "ds.json").write_text(json.dumps(config))
        return str(tmp_path / "ds.json")

    return written


def test_plan_and_check_show_the_same_ladder(
    files: Callable[[dict[str, Any]], str], capsys: pytest.CaptureFixture[str]
) -> None:
    path = files(
        {"zero_optimization": {"stage": 1}, "bf16": {"enabled": True},
         "train_micro_batch_size_per_gpu": 1}
    )  # fmt: skip
    options = ["plan", "7B", "--devices", "8", "--gpu", "32GiB", "--config", path]
    main([*options, "--json"])
    rungs = [Rung(**each) for each in json.loads(capsys.readouterr().out)["ladder"]]
    assert rungs[0].change == '"stage": 1 -> 2' and rungs[0].price == "none"
    main(options)
    text = capsys.readouterr().out
    machine = Machine(devices=8, device_bytes=32 * GIB, model=from_count(7 * 10**9))
    fix = next(p.fix for p in check([path], machine).problems if p.code == "ZM203")
    for line in ladder_lines(rungs):
        assert line in text and line in fix
    main([*options, "--gpu", "80GiB"])
    assert "what frees memory" not in capsys.readouterr().out


# ---- a pair of real runs --------------------------------------------------------------------------


def test_freeing_units_after_forward_frees_what_is_predicted(node: Node) -> None:
    """FSDP2 on gloo, with `reshard_after_forward=False` and without."""
    kept, freed = (replay(node, f"advised-reshard-{state}").snapshot for state in ("after", "before"))
    here = of_run(kept)
    then = replace(here.plan, stage=ZeroStage.PARAMETERS, reshards=True)
    rows = [predict_row(here, plan).memory for plan in (here.plan, then)]
    before, after = (role_bytes(each.ranks[0], "unsharded_param") for each in (kept, freed))
    assert before is not None and after is not None
    frees = rows[0].total(during=During.LOSS) - rows[1].total(during=During.LOSS)
    assert frees == sum(before) - sum(after)
