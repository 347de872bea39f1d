"""Snapshots that hold the evidence of one rule each, made by hand, and their healthy counterparts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from builders import MS, changed, device_memory, pipelined, rank, run, short_of_cpus, summary

from zeromon.diagnosis.engine import advise
from zeromon.ring.codes import Phase
from zeromon.snapshot import CollectiveStatsRow, Finding, RankSnapshot
from zeromon.snapshot.communication import Dimension, Links
from zeromon.snapshot.host import Device, HostMemory, WorkerMemory
from zeromon.snapshot.ledger import ActivityRow, Cause, LedgerRow
from zeromon.snapshot.memory import Risk, RoleRow, TransferRow
from zeromon.snapshot.rank import Setting

MIB, GIB = 1 << 20, 1 << 30
ROOM = HostMemory(headroom_bytes=64 * GIB)
MODEL = {"framework": "fsdp2", "numel": 100 * MIB, "compute_bytes": 4, "blocks": [10, 10 * MIB],
         "units": [10 * MIB] * 4, "kept_numel": 0}  # fmt: skip


def row(
    op: str = "all_gather", unit: str = "layers.0", phase: str = "forward", **more: Any
) -> CollectiveStatsRow:
    """10 ms per step of a collective of 10 MiB, all of it exposed."""
    facts: dict[str, Any] = {
        "op": op, "group": "world", "group_size": 8, "nodes": 1, "phase": phase, "unit": unit,
        "count": 100, "calls": 1.0, "nbytes": 10.0 * MIB, "seconds": 0.010,
        "exposed_seconds": 0.010, "exposed_total_seconds": 1.0, "wait_seconds": None,
        "transfer_seconds": None, "algbw_bytes_per_second": 1e9, "busbw_bytes_per_second": 1e9,
        "best_busbw_bytes_per_second": 1e9,
    }  # fmt: skip
    return CollectiveStatsRow(**(facts | more))


def units(op: str, phase: str, count: int = 4, **more: Any) -> list[CollectiveStatsRow]:
    return [row(op, f"layers.{n}", phase, **more) for n in range(count)]


def one(*traffic: CollectiveStatsRow, **facts: Any) -> RankSnapshot:
    """A rank with steps of 200 ms, of which the traffic is what it says."""
    waits = sum(t.exposed_seconds for t in traffic)
    recent = tuple(
        summary(n, start_ns=n * 200 * MS, end_ns=(n + 1) * 200 * MS, exposed_ns=round(waits * 1e9),
                phase_ns=(5 * MS, 70 * MS, 110 * MS, 10 * MS, 0, 0), phase_exposed_ns=(0,) * 6)
        for n in range(40)
    )  # fmt: skip
    base: dict[str, Any] = {
        "traffic": traffic, "recent": recent, "median_seconds": 0.2, "exposed_seconds": waits,
        "exposed_ratio": waits / 0.2, "overlap_ratio": 0.5, "watched_steps": 40, "world_size": 8,
        "host": ROOM, "models": (MODEL,),
    }  # fmt: skip
    return rank(0, **(base | facts))


def found(snapshot: RankSnapshot, rule: str) -> Finding | None:
    return next((f for f in advise(run(snapshot)) if f.rule == rule), None)


GATHERS = [*units("all_gather", "forward"), *units("all_gather", "backward")]
TP_FAR = (Dimension(name="tp", size=8, nodes=2, used=True),)
REDUCES = units("reduce_scatter", "backward")
TINY = units("all_gather", "forward", 40, nbytes=1e3, exposed_seconds=0.002, seconds=0.002)
FULL = Risk(pool="device", ratio=0.9, cause="static", used_bytes=70 * GIB, capacity_bytes=80 * GIB)
TIGHT = device_memory(free_bytes=1 * GIB)
CPU_STEP = (
    summary(1, end_ns=300 * MS, start_ns=100 * MS, phase_ns=(0, 40 * MS, 60 * MS, 20 * MS, 0, 80 * MS)),
)  # fmt: skip
WAITING = (
    summary(1, end_ns=300 * MS, start_ns=100 * MS, phase_ns=(0, 40 * MS, 60 * MS, 20 * MS, 80 * MS, 0)),
)  # fmt: skip


def pausing(phase: Phase, every: int, ms: int, **facts: Any) -> RankSnapshot:
    """Steps of 200 ms long after the start; every so many is longer by *ms* of *phase*."""
    base = one(**({"watched_steps": 400} | facts))
    steps, now = [], 0
    for number, step in enumerate(base.steps.recent, 361):
        more = 0 if number % every else ms * MS
        phases = [*step.phase_ns, *[0] * (len(Phase) - len(step.phase_ns))]
        phases[phase] += more
        end = now + 200 * MS + more
        spent = tuple(phases)
        steps.append(replace(step, step=number, start_ns=now, end_ns=end, phase_ns=spent))
        now = end
    return one(**({"watched_steps": 400} | facts | {"recent": tuple(steps)}))


def enqueued(starved_ms: int) -> RankSnapshot:
    """Steps of 100 ms of a device, of which so much waits for the host that enqueues them."""
    launches = (0, 30 * MS, 45 * MS, 10 * MS)
    steps = (summary(n, starved_ns=starved_ms * MS, launch_ns=launches) for n in range(30))
    return one(recent=tuple(steps))


def role(name: str, nbytes: int) -> RoleRow:
    return RoleRow(role=name, device_bytes=nbytes, host_bytes=0, disk_bytes=0, pinned_bytes=0)


def saved(*, ago_s: float, cost_s: float = 30.0, count: int = 4) -> RankSnapshot:
    """A rank of 8 that saves, whose last steps so long are not in a checkpoint."""
    save = ActivityRow(phase="checkpoint", activity="save", background=False, count=2 * count,
                       seconds=cost_s * count, longest_seconds=cost_s, nbytes=0, last_ns=0)  # fmt: skip
    spent = LedgerRow(cause=Cause.COMPUTE, seconds=4 * 3600.0)
    return one(unsaved_seconds=ago_s, unsaved_steps=round(ago_s / 0.2), checkpoints=count,
               activities=(save,), ledger_rows=(spent,))  # fmt: skip


SCALER = {"initial_scale_power": 30, "loss_scale_window": 10, "hysteresis": 2}


def fp16(steps: str, **settings: int) -> RankSnapshot:
    """Steps from the first one on, x for a skipped one, as DeepSpeed's scaler makes them."""
    return one(
        recent=tuple(summary(n, skipped=s == "x") for n, s in enumerate(steps, 1)),
        settings=tuple(
            Setting(engine=1, name=f"fp16.{name}", effective=str(value), written="")
            for name, value in (SCALER | settings).items()
        ),
    )


def offloading(
    *ways: TransferRow, blocked_ms: int = 60, settings: dict[str, str] | None = None, **facts: Any
) -> RankSnapshot:
    """Steps of 200 ms, so many of which the training thread stands still for *ways*."""
    base = one(**facts)
    written = tuple(
        Setting(engine=1, name=name, effective=value, written=value)
        for name, value in (settings or {}).items()
    )
    steps = tuple(replace(s, offload_blocked_ns=blocked_ms * MS) for s in base.steps.recent)
    return changed(base, transfers=ways, recent=steps, settings=written)


def way(path: str, rate: float | None = 500e6, **more: Any) -> TransferRow:
    """A GiB a step, which the training thread waits for where a rate is known."""
    facts: dict[str, Any] = {
        "path": path, "nbytes": 40 * GIB, "seconds": 4.0 if rate else 0.0,
        "blocked_seconds": 2.0 if rate else 0.0, "bytes_per_second": rate,
        "best_bytes_per_second": rate or 0.0, "step_bytes": float(GIB),
    }  # fmt: skip
    return TransferRow(**(facts | more))


ON_PCIE = Links(host_bytes_per_second=31.5e9, host_kind="PCIe 4 x16")
PAGEABLE = {
    "zero_optimization.offload_optimizer.pin_memory": "false",
    "zero_optimization.offload_optimizer.device": "cpu",
}


def planning(on: str = "host", room: int = 10 * GIB, **facts: Any) -> RankSnapshot:
    """An engine of ZeRO-2 for 10^9 parameters, whose optimizer will be *on*: 16 GB where it is."""
    planned = {
        "framework": "deepspeed", "stage": 2, "ranks": 1, "numel": 10**9, "trainable": 10**9,
        "shard_numel": 10**9, "trainable_shard_numel": 10**9, "param_bytes": 2, "compute_bytes": 2,
        "grad_bytes": 2, "has_master": True, "optimizer": "adamw", "optimizer_on": on,
    }  # fmt: skip
    base: dict[str, Any] = {
        "device": "cuda:0", "watched_steps": 0, "recent": (), "rss_bytes": 0, "planned": planned,
        "models": (), "host": HostMemory(headroom_bytes=room),
    }  # fmt: skip
    return one(**(base | facts))


MANY_THREADS: Any = {"variables": {"OMP_NUM_THREADS": ""}, "threads": 8}
TRIED = fp16("." * 40 + "...........xx" * 4)

VARIES: Any = {
    "frames": 9, "recompiles": 8, "recompile_reasons": ["8 x tensor 'x' size mismatch at index 0"],
}  # fmt: skip
DEAD_PATH = {"offload_optimizer.device": "cpu", "offload_optimizer.nvme_path": "/local_nvme"}

IN_BF16 = ({**MODEL, "compute_dtype": "bfloat16"},)


def normed(*spikes: int, norm: float = 50.0, **facts: Any) -> RankSnapshot:
    """Steps whose gradient norm is about 1, and *norm* in the *spikes*."""
    return one(
        recent=tuple(
            summary(n, grad_norm=norm if n in spikes else 1.0 + n % 5 / 20) for n in range(1, 61)
        ),
        **facts,
    )


GROWING = WorkerMemory(
    count=4, nbytes=1228 * MIB, grown_bytes=400 * MIB, growth_bytes_per_step=21.0 * MIB, forked=True
)

FIRES: dict[str, RankSnapshot] = {
    "launch_bound": enqueued(80),
    "workers_grow": one(workers=GROWING),
    "checkpoint_interval": saved(ago_s=24 * 3600.0),
    "fsdp_prefetch_off": one(*GATHERS),
    "reshard_without_need": one(*GATHERS),
    "whole_model_unit": one(
        models=({**MODEL, "units": [], "largest_unit_numel": 100 * MIB},), unsharded_peak_bytes=400 * MIB
    ),
    "ddp_bucket_large": one(
        row("all_reduce", "bucket 0", "backward", nbytes=40.0 * MIB, exposed_seconds=0.05, seconds=0.05),
        strategy="ddp",
    ),
    "accumulation_communicates": one(
        *units("reduce_scatter", "backward", calls=4.0), recent=(summary(1, micro_steps=4),) * 30
    ),
    "tiny_collectives": one(*TINY, models=({**MODEL, "units": [1000] * 4},)),
    "stage_too_high": one(*GATHERS, strategy="deepspeed-zero3"),
    "full_shard_across_nodes": one(
        *units("all_gather", "forward", nodes=2), roles=(role("sharded_param", MIB),)
    ),
    "tensor_parallel_across_nodes": one(
        *units("all_reduce", "forward", dim="tp", nodes=2), dimensions=TP_FAR
    ),
    "zero_plus_plus": one(*units("all_gather", "forward", nodes=2), strategy="deepspeed-zero3"),
    "stage_too_low": one(
        strategy="deepspeed-zero1", risks=(FULL,), memory_device=TIGHT,
        roles=(role("unsharded_grad", 20 * GIB),),
    ),
    "activations_dominate": one(
        risks=(FULL,),
        memory_device=device_memory(),
        roles=(role("sharded_param", GIB),),
        recent=(summary(1, allocated_bytes=60 * GIB),) * 30,
    ),
    "overlap_comm_off": one(
        *[replace(r, unit=f"bucket {n}") for n, r in enumerate(REDUCES)],
        strategy="deepspeed-zero2", device="cuda:0",
        settings=(Setting(engine=1, name="zero.overlap_comm", effective="false", written=""),),
    ),
    "reduce_scatter_off": one(
        strategy="deepspeed-zero2",
        settings=(
            Setting(engine=1, name="zero_optimization.reduce_scatter", effective="false", written=""),
        ),
    ),
    "no_effect": offloading(settings=DEAD_PATH, strategy="deepspeed-zero2"),
    "cpu_optimizer_slow": one(recent=CPU_STEP * 30),
    "offload_without_need": one(
        recent=CPU_STEP * 30, memory_device=device_memory(),
        roles=(replace(role("optimizer_state", 0), host_bytes=GIB),),
    ),
    "data_wait": one(recent=WAITING * 30, loader={"num_workers": 0}),
    "garbage_collection": pausing(Phase.GARBAGE_COLLECTION, 4, 120),
    "recompilations": pausing(Phase.COMPILE, 10, 900, compiled=VARIES),
    "slow_steps": pausing(
        Phase.DATA_WAIT, 20, 2000, loader={"num_workers": 4, "persistent_workers": False}
    ),
    "fragmentation": one(
        risks=(replace(FULL, cause="fragmentation"),), memory_device=device_memory(retries=9)
    ),
    "half_precision_unused": one(machine_device=Device(name="NVIDIA H100 80GB HBM3")),
    "bf16_emulated": one(machine_device=Device(name="Tesla V100-SXM2-32GB"), models=IN_BF16),
    "grad_norm_spikes": normed(40),
    "whole_model_on_every_rank": one(models=({**MODEL, "built_bytes": 28 * 10**9},)),
    "overflow_storm": fp16("." * 30 + "..x.x" * 6),
    "cpu_starved": one(
        pressure=short_of_cpus(0.3, cpus=4), process=MANY_THREADS
    ),
    "loss_scale_settings": TRIED,
    "offload_waits": offloading(way("disk_read")),
    "host_memory_short": planning(),
    "pinned_memory_off": offloading(
        way("host_to_device", None), blocked_ms=0, settings=PAGEABLE, device="cuda:0", links=ON_PCIE
    ),
    "pipeline_bubble": one(pipeline=pipelined()),
    "slow_link": one(
        row(nbytes=64.0 * MIB, exposed_seconds=0.03),
        links=Links(device_bytes_per_second=450e9, device_kind="18 NVLinks"),
    ),
}  # fmt: skip

SILENT: dict[str, RankSnapshot] = {
    "launch_bound": enqueued(10),
    "workers_grow": one(workers=replace(GROWING, grown_bytes=20 * MIB)),
    "garbage_collection": pausing(Phase.GARBAGE_COLLECTION, 20, 60),
    "recompilations": pausing(Phase.COMPILE, 36, 900),
    "slow_steps": pausing(Phase.BACKWARD, 20, 2000),
    "checkpoint_interval": saved(ago_s=15 * 3600.0),
    "fsdp_prefetch_off": one(*[replace(r, exposed_seconds=0.002) for r in GATHERS]),
    "reshard_without_need": one(*GATHERS, host=HostMemory(headroom_bytes=100 * MIB)),
    "whole_model_unit": one(unsharded_peak_bytes=80 * MIB),
    "ddp_bucket_large": one(
        *[row("all_reduce", f"bucket {n}", "backward") for n in range(6)], strategy="ddp"
    ),
    "accumulation_communicates": one(*REDUCES),
    "tiny_collectives": one(*units("all_gather", "forward", 40, exposed_seconds=0.002)),
    "stage_too_high": one(*GATHERS, strategy="deepspeed-zero3", host=HostMemory(headroom_bytes=GIB)),
    "full_shard_across_nodes": one(*GATHERS),
    "tensor_parallel_across_nodes": one(
        *units("all_reduce", "forward", dim="tp"),
        dimensions=(replace(TP_FAR[0], nodes=1),),
    ),
    "zero_plus_plus": one(*GATHERS, strategy="deepspeed-zero3"),
    "stage_too_low": one(
        strategy="deepspeed-zero1", risks=(replace(FULL, cause="growth"),), memory_device=TIGHT,
        roles=(role("unsharded_grad", 20 * GIB),),
    ),
    "activations_dominate": one(risks=(FULL,), memory_device=device_memory()),
    "overlap_comm_off": replace(FIRES["overlap_comm_off"], device="cpu"),
    "reduce_scatter_off": one(strategy="deepspeed-zero2"),
    "no_effect": offloading(
        settings=DEAD_PATH | {"offload_optimizer.nvme_path": "null"}, strategy="deepspeed-zero2"
    ),
    "cpu_optimizer_slow": one(),
    "offload_without_need": changed(FIRES["offload_without_need"], memory_device=TIGHT),
    "data_wait": one(),
    "fragmentation": one(risks=(FULL,), memory_device=device_memory(retries=9)),
    "half_precision_unused": one(machine_device=Device(name="Tesla V100")),
    "bf16_emulated": one(machine_device=Device(name="NVIDIA A100-SXM4-80GB"), models=IN_BF16),
    "grad_norm_spikes": normed(40, norm=2.5),
    "whole_model_on_every_rank": one(models=({**MODEL, "built_bytes": 0},)),
    "overflow_storm": fp16("." * 30 + "...........xxx" * 4, hysteresis=3),
    "cpu_starved": one(pressure=short_of_cpus(0.1, cpus=4)),
    "loss_scale_settings": fp16("." * 30 + "..x.x" * 4),
    "offload_waits": offloading(way("disk_read"), blocked_ms=10),
    "host_memory_short": planning(on="device"),
    "pinned_memory_off": offloading(
        way("host_to_device", None), blocked_ms=0, settings=PAGEABLE, links=ON_PCIE
    ),
    "pipeline_bubble": one(pipeline=pipelined(doubled_seconds=0.175)),
    "slow_link": one(
        row(nbytes=64.0 * MIB, best_busbw_bytes_per_second=300e9),
        links=Links(device_bytes_per_second=450e9, device_kind="18 NVLinks"),
    ),
}  # fmt: skip
