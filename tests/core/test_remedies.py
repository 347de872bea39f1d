"""Ways out: each rule fires on the picture that it is about, names a gain, and is silent beside it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from core.build import MS, device_memory, rank, run, summary
from zeromon import offload, precision, remedies
from zeromon.advice import CODES, LINGER_NS, OF_TIME, Settled, advise
from zeromon.report import render
from zeromon.rules import pages
from zeromon.snapshot import (
    Device,
    Disk,
    Finding,
    HostMemory,
    Links,
    Pressure,
    RankSnapshot,
    Risk,
    RoleRow,
    RunSnapshot,
    Setting,
    TrafficRow,
    TransferRow,
)
from zeromon.tui.look import Look
from zeromon.tui.screens.findings import finding_page

MIB, GIB = 1 << 20, 1 << 30
ROOM = HostMemory(headroom_bytes=64 * GIB)
MODEL = {"framework": "fsdp2", "numel": 100 * MIB, "compute_bytes": 4, "blocks": [10, 10 * MIB],
         "units": [10 * MIB] * 4, "kept_numel": 0}  # fmt: skip


def row(
    op: str = "all_gather", unit: str = "layers.0", phase: str = "forward", **more: Any
) -> TrafficRow:
    """10 ms a step of a collective of 10 MiB, all of it exposed."""
    facts: dict[str, Any] = {
        "op": op, "group": "world", "group_size": 8, "nodes": 1, "phase": phase, "unit": unit,
        "count": 100, "calls": 1.0, "nbytes": 10.0 * MIB, "seconds": 0.010,
        "exposed_seconds": 0.010, "exposed_total_seconds": 1.0, "wait_seconds": None,
        "transfer_seconds": None, "algbw_bytes_per_second": 1e9, "busbw_bytes_per_second": 1e9,
        "best_busbw_bytes_per_second": 1e9,
    }  # fmt: skip
    return TrafficRow(**(facts | more))


def units(op: str, phase: str, count: int = 4, **more: Any) -> list[TrafficRow]:
    return [row(op, f"layers.{n}", phase, **more) for n in range(count)]


def one(*traffic: TrafficRow, **facts: Any) -> RankSnapshot:
    """A rank with steps of 200 ms, of which the traffic is what it says."""
    waits = sum(t.exposed_seconds for t in traffic)
    recent = tuple(
        summary(n, start_ns=n * 200 * MS, end_ns=(n + 1) * 200 * MS, exposed_ns=round(waits * 1e9),
                phase_ns=(5 * MS, 70 * MS, 110 * MS, 10 * MS, 0, 0), phase_exposed_ns=(0,) * 6)
        for n in range(40)
    )  # fmt: skip
    base: dict[str, Any] = {
        "traffic": traffic, "recent": recent, "step_seconds": 0.2, "exposed_seconds": waits,
        "exposed_ratio": waits / 0.2, "overlap_ratio": 0.5, "steps": 40, "world_size": 8,
        "host": ROOM, "models": (MODEL,),
    }  # fmt: skip
    return rank(0, **(base | facts))


def found(picture: RankSnapshot, rule: str) -> Finding | None:
    return next((f for f in advise(run(picture)) if f.rule == rule), None)


GATHERS = [*units("all_gather", "forward"), *units("all_gather", "backward")]
REDUCES = units("reduce_scatter", "backward")
FULL = Risk(pool="device", ratio=0.9, cause="static", used_bytes=70 * GIB, capacity_bytes=80 * GIB)
TIGHT = device_memory(free_bytes=1 * GIB)
CPU_STEP = (
    summary(1, end_ns=300 * MS, start_ns=100 * MS, phase_ns=(0, 40 * MS, 60 * MS, 20 * MS, 0, 80 * MS)),
)  # fmt: skip
WAITING = (
    summary(1, end_ns=300 * MS, start_ns=100 * MS, phase_ns=(0, 40 * MS, 60 * MS, 20 * MS, 80 * MS, 0)),
)  # fmt: skip


def role(name: str, nbytes: int) -> RoleRow:
    return RoleRow(role=name, device_bytes=nbytes, host_bytes=0, disk_bytes=0, pinned_bytes=0)


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
    steps = tuple(replace(s, offload_blocked_ns=blocked_ms * MS) for s in base.recent)
    return replace(base, transfers=ways, recent=steps, settings=written)


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
        "device": "cuda:0", "steps": 0, "recent": (), "rss_bytes": 0, "planned": planned,
        "models": (), "host": HostMemory(headroom_bytes=room),
    }  # fmt: skip
    return one(**(base | facts))


TRIED = fp16("." * 40 + "...........xx" * 4)

FIRES: dict[str, RankSnapshot] = {
    "fsdp_prefetch_off": one(*GATHERS),
    "reshard_without_need": one(*GATHERS),
    "whole_model_unit": one(
        models=({**MODEL, "units": [], "kept_numel": 100 * MIB},), unsharded_peak_bytes=400 * MIB
    ),
    "ddp_bucket_large": one(
        row("all_reduce", "bucket 0", "backward", nbytes=40.0 * MIB, exposed_seconds=0.05, seconds=0.05),
        strategy="ddp",
    ),
    "accumulation_communicates": one(
        *units("reduce_scatter", "backward", calls=4.0), recent=(summary(1, micro_steps=4),) * 30
    ),
    "tiny_collectives": one(
        *units("all_gather", "forward", 40, nbytes=1e3, exposed_seconds=0.002, seconds=0.002)
    ),
    "stage_too_high": one(*GATHERS, strategy="deepspeed-zero3"),
    "full_shard_across_nodes": one(
        *units("all_gather", "forward", nodes=2), roles=(role("sharded_param", MIB),)
    ),
    "zero_plus_plus": one(*units("all_gather", "forward", nodes=2), strategy="deepspeed-zero3"),
    "stage_too_low": one(
        strategy="deepspeed-zero1", risks=(FULL,), memory=TIGHT,
        roles=(role("unsharded_grad", 20 * GIB),),
    ),
    "activations_dominate": one(
        risks=(FULL,),
        memory=device_memory(),
        roles=(role("sharded_param", GIB),),
        recent=(summary(1, allocated_bytes=60 * GIB),) * 30,
    ),
    "overlap_comm_off": one(
        *[replace(r, unit=f"bucket {n}") for n, r in enumerate(REDUCES)],
        strategy="deepspeed-zero2", device="cuda:0",
        settings=(Setting(engine=1, name="zero.overlap_comm", effective="false", written=""),),
    ),
    "cpu_optimizer_slow": one(recent=CPU_STEP * 30),
    "offload_without_need": one(
        recent=CPU_STEP * 30, memory=device_memory(),
        roles=(replace(role("optimizer_state", 0), host_bytes=GIB),),
    ),
    "data_wait": one(recent=WAITING * 30),
    "fragmentation": one(
        risks=(replace(FULL, cause="fragmentation"),), memory=device_memory(retries=9)
    ),
    "half_precision_unused": one(device_stats=Device(name="NVIDIA H100 80GB HBM3")),
    "overflow_storm": fp16("." * 30 + "..x.x" * 6),
    "cpu_starved": one(pressure=Pressure(cpu_wait_ratio=0.3, major_faults_per_second=0, cpus=4)),
    "loss_scale_settings": TRIED,
    "offload_waits": offloading(way("disk_read")),
    "host_memory_short": planning(),
    "pinned_memory_off": offloading(
        way("host_to_device", None), blocked_ms=0, settings=PAGEABLE, device="cuda:0", links=ON_PCIE
    ),
    "slow_link": one(
        row(nbytes=64.0 * MIB, exposed_seconds=0.03),
        links=Links(device_bytes_per_second=450e9, device_kind="18 NVLinks"),
    ),
}  # fmt: skip

SILENT: dict[str, RankSnapshot] = {
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
    "zero_plus_plus": one(*GATHERS, strategy="deepspeed-zero3"),
    "stage_too_low": one(
        strategy="deepspeed-zero1", risks=(replace(FULL, cause="growth"),), memory=TIGHT,
        roles=(role("unsharded_grad", 20 * GIB),),
    ),
    "activations_dominate": one(risks=(FULL,), memory=device_memory()),
    "overlap_comm_off": replace(FIRES["overlap_comm_off"], device="cpu"),
    "cpu_optimizer_slow": one(),
    "offload_without_need": replace(FIRES["offload_without_need"], memory=TIGHT),
    "data_wait": one(),
    "fragmentation": one(risks=(FULL,), memory=device_memory(retries=9)),
    "half_precision_unused": one(device_stats=Device(name="Tesla V100")),
    "overflow_storm": fp16("." * 30 + "...........xxx" * 4, hysteresis=3),
    "cpu_starved": one(pressure=Pressure(cpu_wait_ratio=0.1, major_faults_per_second=0, cpus=4)),
    "loss_scale_settings": fp16("." * 30 + "..x.x" * 4),
    "offload_waits": offloading(way("disk_read"), blocked_ms=10),
    "host_memory_short": planning(on="device"),
    "pinned_memory_off": offloading(
        way("host_to_device", None), blocked_ms=0, settings=PAGEABLE, links=ON_PCIE
    ),
    "slow_link": one(
        row(nbytes=64.0 * MIB, best_busbw_bytes_per_second=300e9),
        links=Links(device_bytes_per_second=450e9, device_kind="18 NVLinks"),
    ),
}  # fmt: skip


@pytest.mark.parametrize("rule", FIRES)
def test_a_rule_fires_with_evidence_cause_change_effect_and_price(rule: str) -> None:
    finding = found(FIRES[rule], rule)
    assert finding is not None, [f.rule for f in advise(run(FIRES[rule]))]
    remedy = finding.remedy
    assert remedy is not None
    assert any(letter.isdigit() for letter in finding.text) and remedy.cause and remedy.dialect
    changed = [line[0] for line in remedy.diff.splitlines()]
    assert "+" in changed or "-" in changed
    said = remedy.gain_high_seconds is not None or remedy.frees_bytes or remedy.effect
    assert said and remedy.price
    if remedy.gain_low_seconds is not None and remedy.gain_high_seconds is not None:
        assert 0 <= remedy.gain_low_seconds < remedy.gain_high_seconds <= 0.2
    text = render(run(FIRES[rule], findings=(finding,)))
    assert finding.code in text and "price: " in text and "expected: " in text
    page = ["".join(text for text, _ in line) for line in finding_page(finding, Look(), 200)]
    assert any(remedy.diff.splitlines()[0] in line for line in page)


@pytest.mark.parametrize("rule", SILENT)
def test_a_rule_is_silent_where_its_cause_is_not(rule: str) -> None:
    assert found(SILENT[rule], rule) is None


def test_every_rule_with_a_remedy_is_here() -> None:
    names = {rule.__name__ for rules in (remedies, precision, offload) for rule in rules.RULES}
    two = {"crosses_nodes": {"full_shard_across_nodes", "zero_plus_plus"},
           "cpu_optimizer_slow": {"cpu_optimizer_slow", "offload_without_need"}}  # fmt: skip
    wanted = set().union(*(two.get(name, {name}) for name in names))
    assert wanted == set(FIRES) == set(SILENT)


def test_every_rule_has_its_page() -> None:
    """Under its code, with its name, and with what is meant, changed, paid for and known."""
    known = {found.name: code for code, found in pages().items()}
    for picture in FIRES.values():
        for finding in advise(run(picture)):
            assert known.get(finding.rule) == finding.code, finding.rule
    assert {name: known.get(name) for name in CODES} == CODES
    for code, page in pages().items():
        assert page.summary.endswith("."), code
        for part in (
            "## Why",
            "## What to change",
            "## What it costs",
            "## Where it is known from",
        ):
            assert part in page.text, (code, part)


def test_the_gain_of_prefetch_is_bounded_by_the_compute_it_can_hide_behind() -> None:
    """40 ms of gathers a phase, and only 10 ms of compute in forward, 110 in backward."""
    short = summary(1, start_ns=0, end_ns=200 * MS, phase_ns=(0, 10 * MS, 110 * MS, 0, 0, 0),
                    phase_exposed_ns=(0,) * 6)  # fmt: skip
    finding = found(one(*GATHERS, recent=(short,) * 30), "fsdp_prefetch_off")
    assert finding is not None and finding.remedy is not None
    assert finding.remedy.gain_high_seconds == pytest.approx(0.010 + 0.030)


@pytest.mark.parametrize(
    ("steps", "settings", "says"),
    [
        ("...........xx" * 4, {}, "15.4 % of the steps"),
        ("...........xx" * 3, {}, None),  # two cycles are no rule yet
        ("...........x.x" * 4, {}, "2 skipped each time"),  # not every step overflows
        ("....................." + "x" + "...........x" * 4, {"hysteresis": 1}, "8.3 %"),
        ("...........xxxxx" * 4, {"hysteresis": 5}, "5 skipped each time"),
        ("...........xx........xx...xx.....xx" * 2, {}, None),  # at no distance of its own
        (("." * 201 + "x") * 4, {"loss_scale_window": 200}, None),  # 0.5 %
        ("xxxxxxxxxxx" + "." * 40, {"loss_scale_window": 1000}, "from 2^30 to 2^20"),
        ("xxxxxxxxxxx" + "." * 10, {"loss_scale_window": 1000}, None),  # it may not be over
        ("xxxx" + "." * 40, {"loss_scale_window": 1000}, None),
        ("x" * 30, {}, None),
    ],
)
def test_what_a_loss_scale_costs_is_read_from_where_the_overflows_are(
    steps: str, settings: dict[str, int], says: str | None
) -> None:
    finding = found(fp16(steps, **settings), "loss_scale_settings")
    assert (finding is None) == (says is None)
    assert finding is None or (says or "") in finding.text


def test_a_scale_that_can_never_fall_is_named() -> None:
    finding = found(fp16("x" * 30, hysteresis=0), "overflow_storm")
    assert finding is not None and finding.remedy is not None
    assert finding.remedy.diff == '- "hysteresis": 0\n+ "hysteresis": 2'


@pytest.mark.parametrize("odd", ["", "x", "nan", "inf", "-5", "0", "1e999", "1e18"])
def test_settings_that_make_no_sense_are_no_crash(odd: str) -> None:
    settings = tuple(replace(setting, effective=odd) for setting in TRIED.settings)
    assert found(replace(TRIED, settings=settings), "loss_scale_settings") is None


DISK = Disk(
    path="/nvme", device="nvme0n1", busy_ratio=0.4, busy_bytes_per_second=2e9, requests_at_once=2.0
)


@pytest.mark.parametrize(
    ("rate", "disk", "because", "change"),
    [
        # of what the disk moves while it is busy: a quarter
        (500e6, DISK, "75.0 % of that time nvme0n1 has nothing to do", '"queue_depth": 32'),
        (1.8e9, DISK, "busy, and has only 2.0 requests at once", '"queue_depth": 32'),
        (1.8e9, replace(DISK, requests_at_once=30.0), "busy all of that time", '"device": "cpu"'),
        (95e6, replace(DISK, read_limit_bytes_per_second=100e6), "allows no more than 100 MB/s",
         '"device": "cpu"'),
        (20e6, replace(DISK, read_limit_bytes_per_second=100e6), "99.0 % of that time", "queue_depth"),
        (500e6, None, "not asked for enough at once, or gives no more", '"queue_depth": 32'),
        (500e6, Disk(path="/nvme"), "or gives no more", '"queue_depth": 32'),
    ],
)  # fmt: skip
def test_a_disk_that_is_not_used_is_told_from_one_that_is_used_up(
    rate: float, disk: Disk | None, because: str, change: str
) -> None:
    roles = (replace(role("sharded_param", 0), disk_bytes=GIB),)
    finding = found(offloading(way("disk_read", rate), disk=disk, roles=roles), "offload_waits")
    assert finding is not None and finding.remedy is not None
    assert because in finding.remedy.cause
    assert change in finding.remedy.diff


def test_settings_that_are_there_are_not_advised_again() -> None:
    settings = {"aio.queue_depth": "128", "aio.block_size": "1048576", "aio.single_submit": "true"}
    finding = found(offloading(way("disk_read"), disk=DISK, settings=settings), "offload_waits")
    assert finding is not None and finding.remedy is not None
    assert finding.remedy.diff == (
        '- "aio": {"block_size": 1048576, "intra_op_parallelism": 1, "single_submit": true}\n'
        '+ "aio": {"block_size": 8388608, "intra_op_parallelism": 8, "single_submit": false}'
    )


def test_what_does_not_fit_on_the_host_is_moved_for_more_samples() -> None:
    busy = replace(DISK, requests_at_once=30.0)
    facts: dict[str, Any] = {
        "disk": busy,
        "roles": (replace(role("optimizer_state", 0), disk_bytes=100 * GIB),),
        "settings": {"gradient_accumulation_steps": "3"},
    }
    finding = found(offloading(way("disk_write", 2e9), **facts), "offload_waits")
    assert finding is not None and finding.remedy is not None
    assert '+ "gradient_accumulation_steps": 6' in finding.remedy.diff


def test_two_ranks_share_a_disk_and_each_device_has_its_own_link() -> None:
    """Together they use up what one of them does not."""
    both = [
        replace(offloading(way("disk_read", 900e6), disk=DISK), rank=number) for number in (0, 1)
    ]
    (finding,) = (f for f in advise(run(*both)) if f.rule == "offload_waits")
    assert finding.remedy is not None
    assert "requests at once" in finding.remedy.cause


def test_copies_of_a_device_are_held_against_its_link() -> None:
    """4 GiB at 31.5 GB/s need 136 ms of a step of 200 ms, though nobody is seen to wait."""
    out, back = way("device_to_host", None, step_bytes=4.0 * GIB), way("host_to_device", None)
    facts: dict[str, Any] = {"blocked_ms": 0, "device": "cuda:0", "links": ON_PCIE}
    finding = found(offloading(out, back, **facts), "offload_waits")
    assert finding is not None
    assert "4.0 GiB a step go one way" in finding.text
    assert "PCIe 4 x16 can do that takes 136.3 ms at least, 68.2 %" in finding.text
    assert found(offloading(back, **facts), "offload_waits") is None
    assert found(offloading(out, **(facts | {"links": None})), "offload_waits") is None


def test_on_a_cpu_offload_copies_within_the_host() -> None:
    finding = found(offloading(way("device_to_host")), "offload_waits")
    assert finding is not None and finding.remedy is not None
    assert '- "offload_optimizer": {"device": "cpu"}' in finding.remedy.diff


# ---- memory of the host ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("picture", "severity"),
    [
        (planning(room=10 * GIB), "critical"),
        (planning(room=round(18.5 * 10**9)), "warning"),  # 18 GB, and programs come on top
        (planning(room=20 * GIB), None),
        (planning(room=10 * GIB, rss_bytes=10 * GIB), None),  # some of it is there already
        (planning(steps=2), None),  # it was made, and it did fit
        (planning(host=None, host_available_bytes=-1), None),
        (planning(planned={"stage": "x", "numel": -1}), None),
        (planning(on="device", device="cpu"), "critical"),  # the device is the host
        (planning(alive=False, host=HostMemory(limit_bytes=10 * GIB, headroom_bytes=9 * GIB)),
         "critical"),
        (planning(alive=False, host=HostMemory(limit_bytes=20 * GIB, headroom_bytes=0)), None),
    ],
)  # fmt: skip
def test_what_will_not_fit_on_the_host_is_told_before_it_is_there(
    picture: RankSnapshot, severity: str | None
) -> None:
    finding = found(picture, "host_memory_short")
    assert (finding.severity if finding else None) == severity


def test_the_ranks_of_a_node_share_its_memory() -> None:
    """Each of two would fit alone."""
    alone = planning(room=30 * GIB)
    assert found(alone, "host_memory_short") is None
    (finding,) = (
        f for f in advise(run(alone, replace(alone, rank=1))) if f.rule == "host_memory_short"
    )
    # 4 master, 8 states, 2 gradients and their fp32 copies, 2 of updated parameters: each of 10^9
    assert "2 ranks take 33.5 GiB of this host, and it has 30.0 GiB" in finding.text


@pytest.mark.parametrize(
    ("change", "diff"),
    [
        ({}, '"device": "nvme"'),
        ({"optimizer_on": "device", "stage": 1}, '+ "stage": 2'),
        (
            {"framework": "fsdp2", "stage": 3, "params_on": "host", "param_bytes": 4},
            "CPUOffload",
        ),
    ],
)
def test_it_is_sent_where_there_is_room(change: dict[str, Any], diff: str) -> None:
    facts = {**planning().planned, **change}
    finding = found(planning(planned=facts, device="cpu"), "host_memory_short")
    assert finding is not None and finding.remedy is not None
    assert diff in finding.remedy.diff
    alone = found(planning(on="device", device="cpu", world_size=1), "host_memory_short")
    assert alone is not None and alone.remedy is None  # nobody to divide it with


# ---- a host without CPUs ---------------------------------------------------------------------------


def test_every_rule_of_time_is_a_rule() -> None:
    names = {page.name for page in pages().values()}
    assert names >= OF_TIME


@pytest.mark.parametrize("waits", [0.05, 0.4])
def test_what_waits_for_cpus_is_no_fault_of_communication(waits: float) -> None:
    """Where ranks have no CPU, or had none within a minute, what is timed is only information."""
    pressure = Pressure(
        cpu_wait_ratio=0.05, major_faults_per_second=0, most_cpu_wait_ratio=waits, cpus=2
    )
    waiting = one(*[replace(r, exposed_seconds=0.02) for r in GATHERS], pressure=pressure)
    finding = found(waiting, "fsdp_prefetch_off")
    assert finding is not None
    assert finding.severity == ("warning" if waits < 0.15 else "info")
    assert finding.text.endswith("ranks lack CPUs, which may be why (ZM605)") == (waits >= 0.15)
    full = replace(FIRES["stage_too_low"], pressure=pressure)
    memory = found(full, "stage_too_low")
    assert memory is not None and memory.severity == "warning"  # that has another cause


def test_fewer_workers_are_advised_where_they_are_what_takes_the_cpus() -> None:
    finding = found(replace(FIRES["cpu_starved"], loader={"num_workers": 8}), "cpu_starved")
    assert finding is not None and finding.remedy is not None
    assert finding.remedy.diff.splitlines()[1] == "+ DataLoader(data, num_workers=3)"
    plain = found(FIRES["cpu_starved"], "cpu_starved")
    assert plain is not None and plain.remedy is not None
    assert plain.remedy.diff == "+ OMP_NUM_THREADS=4"


# ---- without flapping -----------------------------------------------------------------------------

FINDING = Finding(rule="data_wait", severity="info", text="x", rank=0)


def test_a_finding_comes_at_once_and_goes_when_it_has_not_held_for_a_while() -> None:
    settled = Settled()
    assert settled.shown([FINDING], 0) == (FINDING,)
    assert settled.shown([], LINGER_NS - 1) == (FINDING,)
    newer = replace(FINDING, text="y")
    assert settled.shown([newer], LINGER_NS) == (newer,)
    assert settled.shown([], 2 * LINGER_NS - 1) == (newer,)
    assert settled.shown([], 2 * LINGER_NS) == ()


def test_one_at_the_edge_of_its_rule_does_not_flap() -> None:
    settled = Settled()
    shown = [settled.shown([FINDING] if n % 3 == 0 else [], n * 10**9) for n in range(60)]
    assert all(found == (FINDING,) for found in shown)


def test_a_rule_that_is_said_once_is_not_shown_for_two_ranks_in_turn() -> None:
    """The worst rank changes from second to second; of two that hold at once both are shown."""
    settled, other = Settled(), replace(FINDING, rank=1)
    assert settled.shown([FINDING], 0) == (FINDING,)
    assert settled.shown([other], 10**9) == (other,)
    assert settled.shown([], 2 * 10**9) == (other,)
    assert settled.shown([FINDING, other], 3 * 10**9) == (FINDING, other)


def healthy() -> RunSnapshot:
    return run(one(*[replace(r, exposed_seconds=0.0005) for r in GATHERS]))


def test_a_healthy_run_is_left_alone() -> None:
    assert advise(healthy()) == ()
