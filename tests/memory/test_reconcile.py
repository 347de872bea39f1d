"""Measured against predicted, and what no role accounts for."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
from builders import device_memory, rank, run, summary
from evidence import row

from zeromon.memory.reconcile import (
    expected_rows,
    read_model_facts,
    unattributed_memory,
    with_micro_steps,
)
from zeromon.memory.spec import ShardPlan, ZeroStage
from zeromon.readout import report as memory_report
from zeromon.snapshot.host import Device
from zeromon.snapshot.memory import RoleRow

MIB = 1 << 20
NUMEL = 1_000_000


def facts(**more: Any) -> dict[str, Any]:
    """ZeRO-3 on four ranks, as the agent tells it."""
    base = {
        "framework": "deepspeed", "stage": 3, "ranks": 4, "numel": NUMEL, "trainable": NUMEL,
        "shard_numel": NUMEL // 4, "trainable_shard_numel": NUMEL // 4, "units": [100_000, 100_000],
        "param_bytes": 2, "compute_bytes": 2, "grad_bytes": 2, "has_master": True,
        "optimizer": "AdamW", "prefetch_numel": 50_000, "persistent_numel": 3000,
        "persistence_numel": 1000,
    }  # fmt: skip
    return base | more


def roles(**nbytes: int) -> tuple[RoleRow, ...]:
    return tuple(
        RoleRow(role=role, device_bytes=n, host_bytes=0, disk_bytes=0, pinned_bytes=0)
        for role, n in nbytes.items()
    )


def test_a_role_has_its_plain_bytes_its_causes_and_what_is_left() -> None:
    """Shards as predicted; 7,000 bytes of gathered parameters that nothing explains."""
    measured = roles(sharded_param=NUMEL // 2, unsharded_param=6000)
    gathered = (100_000 + 50_000) * 2 + 7000
    rows = {r.role: r for r in expected_rows([facts()], measured, gathered, steps=5)}
    assert rows["sharded_param"].unexplained_bytes == 0
    unsharded = rows["unsharded_param"]
    assert (unsharded.plain_bytes, unsharded.predicted_bytes) == (0, 306_000)
    assert unsharded.unexplained_bytes == 7000
    assert [cause.nbytes for cause in unsharded.causes] == [6000, 200_000, 100_000]
    assert "stage3_param_persistence_threshold" in unsharded.causes[0].text
    assert rows["master_param"].measured_bytes is None
    assert rows["master_param"].unexplained_bytes is None


def test_optimizers_within_backward_leave_the_gradients_of_a_unit() -> None:
    """Those of the others are freed, or not there yet."""
    fsdp = facts(framework="fsdp2", has_master=False, updates_in_backward=True)
    measured = roles(sharded_grad=100_000 // 4 * 2)
    rows = {r.role: r for r in expected_rows([fsdp], measured, -1, steps=5)}
    assert rows["sharded_grad"].unexplained_bytes == 0


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_gradients_have_the_type_in_which_they_accumulate(stage: int) -> None:
    """In fp32; at stage 1 whole, and ``BF16_Optimizer`` has those of backward until the step is over.

    The buckets have the type that is sent.
    """
    gad = facts(stage=stage, grad_bytes=4, reduce_bytes=2, grad_bucket_numel=1000)
    described = read_model_facts(gad)
    assert described is not None and described.plan.precision.sent_grad_bytes == 2
    role, numel = ("unsharded_grad", NUMEL) if stage == 1 else ("sharded_grad", NUMEL // 4)
    measured = numel * (4 + 2 if stage == 1 else 4)
    rows = {r.role: r for r in expected_rows([gad], roles(**{role: measured}), -1, steps=5)}
    assert rows[role].unexplained_bytes == 0
    assert any("grad_accum_dtype" in cause.text for cause in rows[role].causes)


def test_before_the_second_step_no_state_is_expected() -> None:
    rows = expected_rows([facts()], roles(sharded_param=1), -1, steps=1)
    assert "optimizer_state" not in {row.role for row in rows}


def test_an_unknown_optimizer_is_no_prediction_of_nothing() -> None:
    """Its state is measured, and predicted as unknown."""
    rows = expected_rows([facts(optimizer="Mine")], roles(optimizer_state=5), -1, steps=9)
    (row,) = (row for row in rows if row.role == "optimizer_state")
    assert (row.measured_bytes, row.predicted_bytes, row.unexplained_bytes) == (5, None, None)


def test_several_models_add_up() -> None:
    """An actor and a critic."""
    one = {r.role: r for r in expected_rows([facts()], roles(sharded_param=1), -1, steps=9)}
    two = {r.role: r for r in expected_rows([facts()] * 2, roles(sharded_param=1), -1, steps=9)}
    plain = one["master_param"].plain_bytes
    assert plain == NUMEL and two["master_param"].plain_bytes == 2 * plain


@pytest.mark.parametrize(
    "broken",
    [
        {}, facts(stage=7), facts(ranks=0), facts(numel="many"), facts(units=3),
        facts(framework="other"), facts(ranks=6, shard_ranks=4), facts(numel=float("inf")),
        facts(param_bytes=float("nan")), facts(grad_bytes="2"), facts(grad_bytes=None),
        facts(numel=-5), facts(units=[float("inf")]), facts(persistent_numel="3"),
    ],
)  # fmt: skip
def test_facts_that_make_no_sense_are_no_prediction(broken: dict[str, Any]) -> None:
    """Another version of the agent, or a torn record."""
    assert read_model_facts(broken) is None
    assert expected_rows([broken], roles(sharded_param=1), -1, steps=9) == ()


def test_without_a_census_there_is_nothing_to_compare() -> None:
    assert expected_rows([facts()], (), -1, steps=9) == ()
    assert expected_rows([], roles(sharded_param=1), -1, steps=9) == ()


def test_what_no_role_accounts_for_on_a_device() -> None:
    """40 GiB allocated at the peak, 10 of them roles and 2 gathered; 8 reserved beside; NVML says 55."""
    memory = device_memory()
    gib = 1 << 30
    one = rank(
        0,
        memory_device=memory,
        recent=(summary(5, allocated_bytes=memory.allocated_bytes + 2 * gib),),
        roles=roles(sharded_param=10 * gib),
        unsharded_peak_bytes=2 * gib,
        machine_device=Device(used_bytes=memory.reserved_bytes + 3 * gib),
    )
    found = {rest.kind: rest.nbytes for rest in unattributed_memory(one)}
    assert found == {
        "activation_temp": memory.allocated_bytes - 10 * gib,
        "reserved_unallocated": memory.reserved_bytes - memory.allocated_bytes,
        "non_torch": 3 * gib,
    }


def test_ranks_that_share_a_device_are_told_apart() -> None:
    """Where the driver says what each process holds; the rest of the device is another rank's."""
    memory, gib = device_memory(), 1 << 30
    stats = Device(used_bytes=78 * gib, own_bytes=memory.reserved_bytes + gib)
    one = rank(0, memory_device=memory, machine_device=stats)
    assert {r.kind: r.nbytes for r in unattributed_memory(one)}["non_torch"] == gib


@pytest.mark.parametrize(("processes", "known"), [(None, True), (0, True), (1, True), (2, False)])
def test_one_sum_of_several_processes_is_not_taken_for_one_rank(
    processes: int | None, known: bool
) -> None:
    """In a container the driver lists others by numbers of the host: whose the memory is, is n/a."""
    stats = Device(used_bytes=78 << 30, processes=processes)
    one = rank(0, memory_device=device_memory(), machine_device=stats)
    kinds = {r.kind for r in unattributed_memory(one)}
    assert ("non_torch" in kinds) is known


def test_a_dead_process_holds_nothing_beside_what_torch_said_last() -> None:
    stats = Device(used_bytes=0, processes=0)
    one = rank(0, memory_device=device_memory(), machine_device=stats, alive=False)
    assert "non_torch" not in {r.kind for r in unattributed_memory(one)}


def test_an_allocator_that_does_not_count_what_it_reserved_has_no_rest() -> None:
    stats = Device(used_bytes=78 << 30, own_bytes=40 << 30)
    one = rank(0, memory_device=device_memory(reserved_bytes=-1), machine_device=stats)
    assert not {"reserved_unallocated", "non_torch"} & {r.kind for r in unattributed_memory(one)}


def test_without_nvml_and_on_a_cpu_nothing_is_made_up() -> None:
    kinds = {
        r.kind
        for r in unattributed_memory(rank(0, memory_device=device_memory(), roles=roles(buffer=1)))
    }
    assert "non_torch" not in kinds
    host = RoleRow(role="buffer", device_bytes=0, host_bytes=MIB, disk_bytes=0, pinned_bytes=0)
    (rest,) = unattributed_memory(rank(0, roles=(host,), rss_bytes=3 * MIB))
    assert (rest.kind, rest.place, rest.nbytes) == ("other", "host", 2 * MIB)
    assert unattributed_memory(rank(0)) == ()


def test_the_report_says_why_it_is_more() -> None:
    """The table; the causes beside it, the largest first."""
    measured = roles(sharded_param=NUMEL // 2, unsharded_param=6000)
    one = rank(0, roles=measured, expected=expected_rows([facts()], measured, 300_000, steps=5))
    text = memory_report.by_role(run(one))
    assert "plain ZeRO" in text and "unexplained" in text
    causes = [subject for _, subject in memory_report.causes_beyond_formula(one)]
    assert "fp32 copy of the gradients that the optimizer reads" in causes[0]
    assert "the largest unit while it computes" in causes[2]
    assert "stage3_prefetch_bucket_size" in causes[3]
    assert re.search(r"optimizer temp .* n/a$", text, re.MULTILINE), "no census sees it"


@pytest.mark.parametrize(("calls", "each"), [(4.0, True), (1.0, False)])
def test_the_micro_steps_that_were_taken_are_those_of_the_plan(calls: float, each: bool) -> None:
    """No wrapper of torch tells them: a run of 4 micro-steps was planned as one of 1."""
    reduces = row("all_reduce", "bucket 0", "backward", calls=calls)
    one = rank(0, recent=tuple(summary(n, micro_steps=4) for n in range(1, 9)), traffic=(reduces,))
    ddp = ShardPlan(stage=ZeroStage.NONE, ranks=2, framework="ddp")
    found = with_micro_steps(one, ddp)
    assert (found.accumulation, found.reduces_each) == (4, each)
    told = replace(ddp, accumulation=2)
    assert with_micro_steps(one, told) is told
    assert with_micro_steps(rank(0, recent=(summary(1, micro_steps=1),)), ddp) is ddp
