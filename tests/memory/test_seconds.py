"""The seconds of a step: formulas of the papers, what hides what, and what is not known."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from builders import MS, device_memory, rank, run, summary
from evidence import row as traffic_row
from hub_models import from_config

from zeromon.base.errors import PlanError
from zeromon.memory import plan as plans
from zeromon.memory.models import from_count
from zeromon.memory.predict import Batch
from zeromon.memory.seconds import (
    Hides,
    Parts,
    Speeds,
    StepTime,
    exposed_by_unit,
    forward_pass_flops,
    parts_of_step,
    schedule_rates,
    step_time,
    update_bytes,
)
from zeromon.memory.spec import ModelSpec, ShardPlan, Sizes, ZeroStage
from zeromon.memory.speeds import (
    DEVICES,
    Machine,
    find_named_device,
    measured_of,
    parse_link_peak,
    speeds_of_machine,
)

GPT3 = {"model_type": "gpt2", "n_embd": 12288, "n_layer": 96, "n_head": 96, "vocab_size": 51200,
        "n_positions": 2048}  # fmt: skip
SPEEDS = Speeds(
    forward_seconds=1.0, backward_seconds=2.0, gather=10e9, reduce=10e9, update=28e9,
    host_update=2.8e9, pcie=1e9, nvme=1e9,
)  # fmt: skip
BILLION = from_count(10**9)


def parts_of(sizes: Sizes, plan: ShardPlan, speeds: Speeds) -> Parts:
    return parts_of_step(sizes, plan, speeds, exposed_by_unit(sizes, plan, schedule_rates(speeds)))


def time_of(stage: int, speeds: Speeds = SPEEDS, model: ModelSpec = BILLION, **changes: Any) -> Parts:
    """A billion parameters on two ranks: an all-reduce in bf16 sends 2 GB, a gather 1 GB."""
    plan = ShardPlan(stage=ZeroStage(stage), ranks=2, **changes)
    return parts_of(model.sizes(plan), plan, speeds)


def test_flops_are_equation_3_of_narayanan() -> None:
    """F = 96 B s l h^2 (1 + s / 6h + V / 16lh), with the layers computed again in backward."""
    b, s, layers, h, v = 3, 2048, 96, 12288, 51200
    whole, again = forward_pass_flops(from_config(GPT3), Batch(sequences=b, length=s))
    published = 96 * b * s * layers * h**2 * (1 + s / (6 * h) + v / (16 * layers * h))
    assert 3 * whole + again == pytest.approx(published)


def test_flops_of_a_bare_size_are_two_a_parameter_and_token() -> None:
    assert forward_pass_flops(BILLION, Batch(sequences=2, length=50)) == (2e11, 2e11)


def test_gpt_3_takes_the_published_time() -> None:
    """34 days for 300 B tokens on 1024 A100, 140 TFLOP/s each (Narayanan et al. 2021, section 5.1)."""
    model = from_config(GPT3)
    plan = ShardPlan(stage=ZeroStage.PARAMETERS, ranks=1024)
    batch = Batch(sequences=3, length=2048, checkpointing=True)
    machine = Machine(device=DEVICES["a100"], efficiency=140 / 312, link=1e15)
    likely, *_ = speeds_of_machine(machine, model, batch, plan)
    each = (likely.forward_seconds or 0) + (likely.backward_seconds or 0) + likely.recompute_seconds
    steps = 300e9 / (3 * 1024 * 2048)
    assert steps * each / 86400 == pytest.approx(34, rel=0.03)


def test_adam_reads_and_writes_28_bytes_a_parameter() -> None:
    """CPU-Adam: 10^10 parameters in 2.57 s are 109 GB/s."""
    assert update_bytes(ShardPlan(stage=ZeroStage.OPTIMIZER, ranks=2)) == 28


def test_recomputation_costs_a_third_of_the_compute() -> None:
    again = time_of(0, replace(SPEEDS, recompute_seconds=1.0))
    assert again.recompute / again.compute == pytest.approx(1 / 3)


@pytest.mark.parametrize(
    ("stage", "settings", "seconds"),
    [
        (0, {}, 0.2),  # half of it a reduce-scatter, half an all-gather
        (1, {}, 0.3),  # DeepSpeed all-reduces whole buckets, and gathers after the step
        (2, {}, 0.3),
        (2, {"accumulation": 2}, 0.5),
        (3, {}, 0.3),
    ],
)
def test_communication_that_nothing_hides(stage: int, settings: dict[str, Any], seconds: float) -> None:
    found = time_of(stage, replace(SPEEDS, hides=Hides.NOTHING), **settings)
    assert found.communication == pytest.approx(seconds)


@pytest.mark.parametrize(
    ("stage", "settings", "gigabytes"),
    [
        (0, {}, 8),  # into buckets of 2 GB and back
        (0, {"framework": "ddp", "bucket_views": True}, 0),
        (2, {"accumulation": 3}, 3 * 4),
        (3, {}, 2 * 6 + 8),  # twice a shard of 1 GB in and 2 GB out; gradients twice
        (3, {"framework": "fsdp2"}, 2 * 6 + 4),
        (2, {"framework": "fsdp2", "reshards": False}, 6 + 4),
        (3, {"framework": "fsdp1"}, 4),
    ],
)
def test_buffers_of_collectives_are_filled_and_emptied(
    stage: int, settings: dict[str, Any], gigabytes: int
) -> None:
    """A copy of N bytes reads and writes them, at the speed of the optimizer: 28 GB/s."""
    assert time_of(stage, **settings).copies == pytest.approx(gigabytes / 28)


def test_overlap_leaves_one_bucket_and_what_follows_the_step() -> None:
    """Ten buckets: a tenth of the reduction, and the gather of updated parameters."""
    found = time_of(2, grad_bucket_numel=10**8, grad_buckets=2)
    assert found.communication == pytest.approx(0.2 / 10 + 0.1)
    assert time_of(2, grad_bucket_numel=10**8).communication == pytest.approx(0.3)


def test_on_a_cpu_the_reducer_of_ddp_alone_communicates_beside_backward() -> None:
    """Without streams the others wait at once; four buckets of 512 MB, the last one is exposed."""
    on_cpu = replace(SPEEDS, hides=Hides.THREADS)
    found = time_of(0, on_cpu, framework="ddp", bucket_cap_bytes=500_000_000)
    assert found.communication == pytest.approx(0.2 / 4, rel=0.01)  # the first bucket has 1 MiB
    assert time_of(2, on_cpu, framework="fsdp2").communication == pytest.approx(0.2)


def test_what_compute_has_no_room_for_is_exposed() -> None:
    """A gather takes 2 s, forward 1 s; a gather and a reduction 4 s, backward 2 s."""
    slow = replace(SPEEDS, gather=0.5e9, reduce=0.5e9)
    found = time_of(3, slow, framework="fsdp2")
    assert found.communication == pytest.approx((2 - 1) + (4 - 2), rel=0.05)


def test_offload_costs_copies_and_the_hosts_adam() -> None:
    """Half a billion a rank: Adam's 14 GB at 2.8 GB/s; a GB of gradients hides behind backward."""
    found = time_of(2, optimizer_on="host")
    assert (found.optimizer, found.offload) == pytest.approx((5.0, 1.0))
    on_disk = time_of(3, optimizer_on="nvme", params_on="nvme")
    assert on_disk.offload - (1 + 2 + 2 - 3) == pytest.approx(1 + 0.5 * (24 + 8))


def test_parameters_on_the_host_cost_copies_beside_an_optimizer_on_the_device() -> None:
    """A shard of 1 GB comes for forward and for backward, and returns once updated, at 1 GB/s."""
    found = time_of(3, replace(SPEEDS, hides=Hides.NOTHING), params_on="host")
    assert (found.offload, found.optimizer) == pytest.approx((1 + 1 + 1, 0.5))


def test_hybrid_sharding_sends_little_between_hosts() -> None:
    plan = ShardPlan(stage=ZeroStage.PARAMETERS, ranks=16, shard_ranks=8, framework="fsdp2")
    fast = replace(SPEEDS, gather=1e15, reduce=1e15, between=1e9, hides=Hides.NOTHING)
    found = parts_of(BILLION.sizes(plan), plan, fast)
    assert found.communication == pytest.approx(2 * 2 / 8 / 2, rel=1e-3)


@pytest.mark.parametrize(
    ("missing", "changes", "words"),
    [
        ("forward_seconds", {}, "--micro-batch"),
        ("gather", {}, "--interconnect"),
        ("pcie", {"optimizer_on": "host"}, "--pcie"),
        ("pcie", {"params_on": "host"}, "--pcie"),
        ("nvme", {"optimizer_on": "nvme", "params_on": "nvme"}, "--nvme-bandwidth"),
    ],
)
def test_an_unknown_speed_is_named(missing: str, changes: dict[str, Any], words: str) -> None:
    plan = ShardPlan(stage=ZeroStage.PARAMETERS, ranks=2, **changes)
    speeds = replace(SPEEDS, **{missing: None})
    found = step_time(BILLION.sizes(plan), plan, (speeds, speeds, speeds))
    assert isinstance(found, str) and words in found


def test_the_interval_has_the_likely_seconds_inside() -> None:
    plan = ShardPlan(stage=ZeroStage.GRADIENTS, ranks=8)
    machine = Machine(device=DEVICES["h100"], link=450e9, ranks_per_host=8)
    batch = Batch(sequences=1, length=2048)
    found = step_time(BILLION.sizes(plan), plan, speeds_of_machine(machine, BILLION, batch, plan))
    assert isinstance(found, StepTime)
    assert found.least < found.seconds < found.most


@pytest.mark.parametrize(
    ("text", "peak"),
    [("25GB/s", 25e9), ("400Gb", 50e9), ("8x400Gb", 400e9), ("100Gbps", 12.5e9), ("ib-ndr", 50e9),
     ("8xib-hdr", 200e9), ("800Mb", 1e8)],
)  # fmt: skip
def test_speeds_of_links_have_bits_and_bytes(text: str, peak: float) -> None:
    assert parse_link_peak(text) == peak


@pytest.mark.parametrize("text", ["", "fast", "0GB", "-1GB", "x400Gb", "25", "²xib-ndr"])
def test_what_is_no_speed_is_refused(text: str) -> None:
    with pytest.raises(PlanError):
        parse_link_peak(text)


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("NVIDIA A100-SXM4-40GB", "a100-40"), ("NVIDIA A100-SXM4-80GB", "a100"),
        ("NVIDIA A100 80GB PCIe", "a100"), ("NVIDIA A100-PCIE-40GB", "a100-40"),
        ("NVIDIA H100 80GB HBM3", "h100"), ("NVIDIA H100 PCIe", "h100"), ("NVIDIA H200", "h200"),
        ("NVIDIA B200", "b200"), ("NVIDIA GB200", "b200"), ("NVIDIA GH200 480GB", "h100"),
        ("NVIDIA L4", "l4"), ("NVIDIA L40S", "l40s"), ("NVIDIA A10", "a10"), ("NVIDIA A10G", "a10"),
        ("Tesla V100-SXM2-16GB", "v100-16"), ("Tesla V100-SXM2-32GB", "v100"),
        ("Tesla V100S-PCIE-32GB", "v100"), ("Tesla T4", "t4"), ("NVIDIA T4G", "t4"),
        ("NVIDIA GeForce RTX 4090", "rtx4090"), ("AMD Instinct MI300X OAM", "mi300x"),
        ("MI300X", "mi300x"), ("A100-40", "a100-40"), ("v100-16", "v100-16"),
    ],
)  # fmt: skip
def test_devices_by_the_name_that_nvml_gives_them(name: str, key: str) -> None:
    assert find_named_device(name) is DEVICES[key]


@pytest.mark.parametrize(
    "name", ["NVIDIA RTX A1000", "NVIDIA T400 4GB", "NVIDIA L40", "NVIDIA H20", "NVIDIA A16", "80GiB"]
)
def test_a_name_that_only_resembles_a_known_device_is_unknown(name: str) -> None:
    assert find_named_device(name) is None


# ---- calibrated -----------------------------------------------------------------------------------

MODEL = {
    "framework": "fsdp2", "stage": 3, "ranks": 2, "numel": 10**8, "trainable": 10**8,
    "shard_numel": 5 * 10**7, "trainable_shard_numel": 5 * 10**7, "param_bytes": 4,
    "compute_bytes": 4, "grad_bytes": 4, "optimizer": "AdamW", "units": [10**7] * 4,
}  # fmt: skip


def trained(**facts: Any) -> Any:
    """A step of 1 s on the CPU."""
    # other, forward, backward, optimizer, data, CPU optimizer
    spent = (50, 260, 520, 140, 30, 0)
    waited = (0, 60, 120, 0, 0, 0)
    steps = tuple(
        summary(n, start_ns=0, end_ns=1000 * MS, phase_ns=tuple(x * MS for x in spent),
                phase_exposed_ns=tuple(x * MS for x in waited))
        for n in range(2, 9)
    )  # fmt: skip
    flow = (
        traffic_row("all_gather", group_size=2, nbytes=8e8, busbw_bytes_per_second=4e9),
        traffic_row("reduce_scatter", group_size=2, nbytes=4e8, busbw_bytes_per_second=2.5e9),
        traffic_row("all_gather", group_size=2, nbytes=8.0, busbw_bytes_per_second=8.0),
        traffic_row("all_gather", group_size=2, nbytes=8e8, busbw_bytes_per_second=None),
    )
    base: dict[str, Any] = {"recent": steps, "traffic": flow, "models": (MODEL,), "memory_device": None}
    return run(rank(0, **(base | facts)))


def test_a_run_gives_its_own_speeds() -> None:
    """A gather copies 0.2 GB in and 0.4 GB out, a reduction 0.4 GB; at 10 GB/s, read and written."""
    found = plans.of_run(trained()).measured
    assert found is not None
    s = found.speeds
    assert s.forward_seconds == pytest.approx(0.2 - 2 * 0.6 / 10)
    assert s.backward_seconds == pytest.approx(0.4 - 2 * 0.6 / 10 - 2 * 0.4 / 10)
    assert (s.gather, s.reduce) == pytest.approx(
        (4e9, 2.5e9)
    )  # small calls show a latency, others nothing
    assert s.update == pytest.approx(5e7 * 28 / 0.14)
    assert (s.hides, s.other_seconds) == (Hides.THREADS, pytest.approx(0.08))


def test_a_run_predicts_itself() -> None:
    """Forward, backward, optimizer and the rest; 2 gathers and a reduction of 400 MB."""
    setup = plans.of_run(trained())
    found = plans.predict_row(setup, setup.plan).time
    assert isinstance(found, StepTime)
    assert found.seconds == pytest.approx(0.2 + 0.4 + 0.14 + 0.08 + 0.2 * 2 / 4 + 0.2 / 2.5)


def test_on_a_device_communication_may_hide() -> None:
    found = plans.of_run(trained(memory_device=device_memory())).measured
    assert found is not None and found.speeds.hides == Hides.STREAMS


def test_without_a_timed_step_a_run_gives_no_speed() -> None:
    steps = tuple(summary(n, untimed=9, collectives=9) for n in range(2, 9))
    snapshot = trained(recent=steps)
    assert plans.of_run(snapshot).measured is None
    plan = ShardPlan(stage=ZeroStage.PARAMETERS, ranks=2)
    assert measured_of("r", snapshot.ranks, BILLION.sizes(plan), plan) is None
