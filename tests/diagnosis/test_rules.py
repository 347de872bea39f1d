"""Ways out: each rule fires on the snapshot that it is about, names a gain, and is silent beside it."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from builders import MS, changed, pipelined, run, short_of_cpus, summary
from evidence import (
    FIRES,
    GATHERS,
    GIB,
    MIB,
    ON_PCIE,
    SILENT,
    TINY,
    TRIED,
    WAITING,
    found,
    fp16,
    offloading,
    one,
    pausing,
    planning,
    role,
    row,
    units,
    way,
)

import zeromon
from zeromon.diagnosis import engine
from zeromon.diagnosis.engine import LINGER_SECONDS, FindingHistory, advise
from zeromon.diagnosis.rule import Match, Remaining, all_pages, remaining_remedy, rule
from zeromon.diagnosis.rules import FAMILIES, all_rules, fsdp, health
from zeromon.readout.report import render_run
from zeromon.readout.text import finding_text
from zeromon.ring.codes import Phase
from zeromon.ring.model_metadata import PERSISTENT
from zeromon.ring.strategy import Strategy
from zeromon.snapshot import Finding, RankSnapshot, RunSnapshot, Severity
from zeromon.snapshot.communication import Straggler
from zeromon.snapshot.finding import ConfigFormat, Remedy
from zeromon.snapshot.host import Device, Disk, HostMemory, Pressure
from zeromon.snapshot.ledger import ActivityRow
from zeromon.snapshot.rank import Setting
from zeromon.tui.screens.findings import finding_page

MAX_HEADLINE_COLUMNS = 76
"""A clause that fits 80 columns beside the sign of its severity."""


@pytest.mark.parametrize("rule", FIRES)
def test_a_rule_fires_with_evidence_cause_change_effect_and_price(rule: str) -> None:
    finding = found(FIRES[rule], rule)
    assert finding is not None, [f.rule for f in advise(run(FIRES[rule]))]
    remedy = finding.remedy
    assert remedy is not None
    assert any(letter.isdigit() for letter in finding.text) and remedy.cause and remedy.dialect
    headline = finding_text(finding).partition("; ")[0]
    assert len(headline) <= MAX_HEADLINE_COLUMNS, headline
    changed = [line[0] for line in remedy.diff.splitlines()]
    assert "+" in changed or "-" in changed
    said = remedy.gain_high_seconds is not None or remedy.frees_bytes or remedy.effect
    assert said and remedy.price
    if remedy.gain_low_seconds is not None and remedy.gain_high_seconds is not None:
        assert 0 <= remedy.gain_low_seconds < remedy.gain_high_seconds <= 0.2
    text = render_run(run(FIRES[rule], findings=(finding,)))
    assert finding.code in text and "cost: " in text and "predicted: " in text
    page = ["".join(text for text, _ in line) for line in finding_page(finding, 200)]
    assert any(remedy.diff.splitlines()[0] in line for line in page)


@pytest.mark.parametrize("rule", SILENT)
def test_a_rule_is_silent_where_its_cause_is_not(rule: str) -> None:
    assert found(SILENT[rule], rule) is None


def test_every_rule_with_a_remedy_is_here() -> None:
    without = {
        "agent_errors", "collective_in_flight", "collective_mismatch", "device_idle", "disk_space",
        "distant_node",
        "events_dropped", "exposed_communication", "history_stopped", "no_step", "node_silent",
        "nodes_apart", "not_finite", "own_code", "rank_died", "record_unread",
        "restarted", "stalled",
            "steps_apart",
        "straggler", "uneven_work", "unknown_version", "untimed_collectives",
    }  # fmt: skip
    # test_engine.py, test_strategy_rules.py, test_training_rules.py
    elsewhere = {"oom_risk", "starved_prefetch", "same_samples", "initial_parameters_differ"}
    assert set(FIRES) == set(SILENT)
    assert {one.name for one in all_rules()} - without - elsewhere == set(FIRES)


def test_every_rule_has_its_page() -> None:
    """Under its code, with its name, and with what is meant, changed, paid for and known."""
    names = {code: page.name for code, page in all_pages().items()}
    rules = {one.code: one.name for one in all_rules()}
    assert len(rules) == len(all_rules())
    assert {code: names.get(code) for code in rules} == rules
    for code, page in all_pages().items():
        assert page.summary.endswith("."), code
        for part in ("## Why", "## What to change", "## What it costs", "## Sources"):
            assert part in page.text, (code, part)


def test_every_page_has_a_rule_a_check_or_an_alert() -> None:
    """``zeromon check`` and the alerts name the code of their page themselves."""
    root = Path(zeromon.__file__).parent
    files = [file for part in ("check", "export") for file in (root / part).rglob("*.*")]
    texts = [file.read_text() for file in files if file.suffix in (".py", ".json", ".yaml")]
    checked = {code for text in texts for code in re.findall(r'(?:"|code: )(ZM\d{3})\b', text)}
    explains = {"ZM506"}  # a page against a wrong belief: nothing is reported
    assert set(all_pages()) == checked | explains | {one.code for one in all_rules()}


def test_a_decorated_function_in_its_family_is_all_that_a_rule_needs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In the place of its family: before those of later families, of the same urgency and rank."""

    @rule("ZM999", severity=Severity.WARNING)
    def dummy(run: RunSnapshot) -> list[Match]:
        return [Match("one", 0), Match("two", 0, severity=Severity.CRITICAL), Match("all")]

    dummy.function.__module__ = health.__name__
    monkeypatch.setattr(health, "dummy", dummy, raising=False)
    monkeypatch.setattr(engine, "all_rules", all_rules.__wrapped__)
    families = [one.function.__module__ for one in engine.all_rules()]
    order = [family.__name__ for family in FAMILIES]
    assert families == sorted(families, key=order.index)
    lost = run(one(dropped=3), ended=True)
    findings = [(f.code, f.rule, f.severity, f.rank) for f in advise(lost)]
    assert findings == [
        ("ZM999", "dummy", "critical", 0), ("ZM999", "dummy", "warning", -1),
        ("ZM999", "dummy", "warning", 0), ("ZM005", "events_dropped", "warning", 0),
    ]  # fmt: skip


def test_a_rule_that_another_family_imports_is_taken_once(monkeypatch: pytest.MonkeyPatch) -> None:
    before = [one.code for one in all_rules()]
    monkeypatch.setattr(health, "borrowed", fsdp.fsdp_prefetch_off, raising=False)
    assert [one.code for one in all_rules.__wrapped__()] == before


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
    settings = tuple(replace(setting, effective=odd) for setting in TRIED.config.settings)
    assert found(changed(TRIED, settings=settings), "loss_scale_settings") is None


DISK = Disk(
    path="/nvme", device="nvme0n1", busy_ratio=0.4, busy_bytes_per_second=2e9, requests_at_once=2.0
)


@pytest.mark.parametrize(
    ("rate", "disk", "because", "change"),
    [
        # of what the disk moves while it is busy: a quarter
        (500e6, DISK, "nvme0n1 is idle for 75.0 % of that time", '"queue_depth": 32'),
        (1.8e9, DISK, "busy, and has only 2.0 requests at once", '"queue_depth": 32'),
        (1.8e9, replace(DISK, requests_at_once=30.0), "busy all of that time", '"device": "cpu"'),
        (95e6, replace(DISK, read_limit_bytes_per_second=100e6), "allows no more than 100 MB/s",
         '"device": "cpu"'),
        (20e6, replace(DISK, read_limit_bytes_per_second=100e6), "idle for 99.0 % of that time",
         "queue_depth"),
        (500e6, None, "too few requests at once, or can do no more", '"queue_depth": 32'),
        (500e6, Disk(path="/nvme"), "or can do no more", '"queue_depth": 32'),
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
    both = [replace(offloading(way("disk_read", 900e6), disk=DISK), rank=number) for number in (0, 1)]
    (finding,) = (f for f in advise(run(*both)) if f.rule == "offload_waits")
    assert finding.remedy is not None
    assert "requests at once" in finding.remedy.cause


def test_copies_of_a_device_are_held_against_its_link() -> None:
    """4 GiB at 31.5 GB/s need 136 ms of a step of 200 ms, though nobody is seen to wait."""
    out, back = way("device_to_host", None, step_bytes=4.0 * GIB), way("host_to_device", None)
    facts: dict[str, Any] = {"blocked_ms": 0, "device": "cuda:0", "links": ON_PCIE}
    finding = found(offloading(out, back, **facts), "offload_waits")
    assert finding is not None
    assert finding.text.startswith("68.2 % of a step moves 4.0 GiB one way")
    assert "PCIe 4 x16 can do that takes 136.3 ms at least" in finding.text
    assert found(offloading(back, **facts), "offload_waits") is None
    assert found(offloading(out, **(facts | {"links": None})), "offload_waits") is None


def test_on_a_cpu_offload_copies_within_the_host() -> None:
    finding = found(offloading(way("device_to_host")), "offload_waits")
    assert finding is not None and finding.remedy is not None
    assert '- "offload_optimizer": {"device": "cpu"}' in finding.remedy.diff


# ---- memory of the host ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("snapshot", "severity"),
    [
        (planning(room=10 * GIB), "critical"),
        (planning(room=round(18.5 * 10**9)), "warning"),  # 18 GB, and programs come on top
        (planning(room=20 * GIB), None),
        (planning(room=10 * GIB, rss_bytes=10 * GIB), None),  # some of it is there already
        (planning(watched_steps=2), None),  # it was made, and it did fit
        (planning(host=None, host_available_bytes=-1), None),
        (planning(planned={"stage": "x", "numel": -1}), None),
        (planning(on="device", device="cpu"), "critical"),  # the device is the host
        (planning(alive=False, host=HostMemory(limit_bytes=10 * GIB, headroom_bytes=9 * GIB)),
         "critical"),
        (planning(alive=False, host=HostMemory(limit_bytes=20 * GIB, headroom_bytes=0)), None),
    ],
)  # fmt: skip
def test_what_will_not_fit_on_the_host_is_told_before_it_is_there(
    snapshot: RankSnapshot, severity: str | None
) -> None:
    finding = found(snapshot, "host_memory_short")
    assert (finding.severity if finding else None) == severity


def test_the_ranks_of_a_node_share_its_memory() -> None:
    """Each of two would fit alone."""
    alone = planning(room=30 * GIB)
    assert found(alone, "host_memory_short") is None
    (finding,) = (f for f in advise(run(alone, replace(alone, rank=1))) if f.rule == "host_memory_short")
    # 4 master, 8 states, 2 gradients and their fp32 copies, 2 of updated parameters: each of 10^9
    assert "2 ranks take 33.5 GiB; this host has 30.0 GiB" in finding.text


@pytest.mark.parametrize(
    ("change", "diff"),
    [
        ({}, '"device": "nvme"'),
        ({"optimizer_on": "device", "stage": 1}, '+ "stage": 2'),
        ({"framework": "fsdp2", "stage": 3, "params_on": "host", "param_bytes": 4}, "CPUOffload"),
    ],
)
def test_it_is_sent_where_there_is_room(change: dict[str, Any], diff: str) -> None:
    facts = {**planning().config.planned, **change}
    finding = found(planning(planned=facts, device="cpu"), "host_memory_short")
    assert finding is not None and finding.remedy is not None
    assert diff in finding.remedy.diff
    alone = found(planning(on="device", device="cpu", world_size=1), "host_memory_short")
    assert alone is not None and alone.remedy is None  # nobody to divide it with


# ---- a host without CPUs ---------------------------------------------------------------------------


def starved(share: float) -> Pressure:
    """A rank that has no CPU for *share* of its steps."""
    return short_of_cpus(share, cpus=2)


@pytest.mark.parametrize(
    ("lacks", "severity"), [(0.10, "warning"), (0.20, "warning"), (0.70, "info"), (0.90, "info")]
)
def test_a_lack_of_cpus_is_doubted_by_its_amount(lacks: float, severity: str) -> None:
    """160 of 200 ms are exposed: what is left of them beyond the lack decides."""
    waiting = one(*[replace(r, exposed_seconds=0.02) for r in GATHERS], pressure=starved(lacks))
    finding = found(waiting, "fsdp_prefetch_off")
    assert finding is not None
    assert finding.severity == severity and "CPU" not in finding.text  # ZM605 says it once
    full = changed(FIRES["stage_too_low"], pressure=starved(lacks))
    memory = found(full, "stage_too_low")
    assert memory is not None and memory.severity == "warning"  # that has another cause


@pytest.mark.parametrize(
    ("of_late", "of_others", "severity", "ends"),
    [
        (0.0, 0.3, "warning", "(50.0 %)"),  # it sleeps: a sleeping thread lacks no CPU
        (0.3, 0.3, "warning", "(50.0 %)"),  # all lack as much
        (0.7, 0.0, "info", "(50.0 %)"),
    ],
)
def test_a_straggler_is_doubted_by_what_it_lacks_beyond_the_others(
    of_late: float, of_others: float, severity: str, ends: str
) -> None:
    late = Straggler(rank=1, late_seconds=0.1, share=0.5, since_step=21, phases=(), longer_seconds=0.0)
    ranks = (one(pressure=starved(of_others)), replace(one(pressure=starved(of_late)), rank=1))
    (finding,) = (f for f in advise(run(*ranks, stragglers=(late,))) if f.rule == "straggler")
    assert finding.severity == severity and finding.text.endswith(ends)


def test_a_rank_that_makes_its_own_batches_lacks_only_its_own_cpus() -> None:
    """Its loader sleeps; the rank beside it lacks CPUs. Workers are processes, and may lack them too."""
    loading, beside = FIRES["data_wait"], replace(one(pressure=starved(0.4)), rank=1)
    for workers, severity in ((0, "warning"), (2, "info")):
        ranks = (changed(loading, loader={"num_workers": workers}), beside)
        (finding,) = (f for f in advise(run(*ranks)) if f.rule == "data_wait")
        assert finding.severity == severity


def test_fewer_workers_are_advised_where_they_are_what_takes_the_cpus() -> None:
    finding = found(changed(FIRES["cpu_starved"], loader={"num_workers": 8}), "cpu_starved")
    assert finding is not None and finding.remedy is not None
    assert finding.remedy.diff.splitlines()[1] == "+ DataLoader(data, num_workers=3)"
    waiting = changed(FIRES["cpu_starved"], loader={"num_workers": 8}, recent=WAITING * 30)
    finding = found(waiting, "cpu_starved")  # they may sleep while they read, and the steps need them
    assert finding is not None and finding.remedy is not None
    assert finding.remedy.diff == "+ OMP_NUM_THREADS=4"
    plain = found(FIRES["cpu_starved"], "cpu_starved")
    assert plain is not None and plain.remedy is not None
    assert plain.remedy.diff == "+ OMP_NUM_THREADS=4"


def test_threads_are_not_limited_where_they_are_already() -> None:
    """torchrun sets the variable to 1; a script may set more threads than the variable says."""
    starved = FIRES["cpu_starved"]

    def told(threads: int | None, variable: str = "", cpus: float = 2) -> Finding:
        pressure = short_of_cpus(0.3, cpus=cpus)
        known: Any = {"variables": {"OMP_NUM_THREADS": variable}, "threads": threads}
        rank = changed(starved, pressure=pressure, process=known if threads else {})
        finding = found(rank, "cpu_starved")
        assert finding is not None
        return finding

    ours = told(1, "1")
    assert ours.remedy is None and "2 CPUs; already uses only 1 compute thread" in ours.text
    assert told(2, "2", cpus=4).remedy is None
    assert told(1, "1", cpus=4).remedy is None  # more threads would not help
    assert told(None).remedy is None  # unknown
    fewer, by_script = told(8, "8").remedy, told(8, "1").remedy
    assert fewer is not None and fewer.diff == "- OMP_NUM_THREADS=8\n+ OMP_NUM_THREADS=2"
    assert by_script is not None
    assert by_script.diff == "- torch.set_num_threads(8)\n+ torch.set_num_threads(2)"


def test_gathers_of_persistent_parameters_are_not_merged_by_any_setting() -> None:
    """34 of 35 small calls gather persistent parameters: buckets and thresholds do not touch them."""
    each = units("all_gather", "optimizer", 1, nbytes=34e3, calls=34.0, exposed_seconds=0.08)
    persistent = [replace(row, unit=PERSISTENT, seconds=0.08) for row in each]
    low = Setting(
        engine=1, name="zero_optimization.stage3_param_persistence_threshold", effective="0", written="0"
    )
    rank = one(*persistent, *TINY[:1], strategy="deepspeed-zero3-offload", settings=(low,))
    finding = found(rank, "tiny_collectives")
    assert finding is not None and finding.remedy is None
    assert "; 34 of them gather persistent parameters after the optimizer's step" in finding.text
    others = found(changed(rank, traffic=tuple(TINY)), "tiny_collectives")
    assert others is not None and others.remedy is not None
    assert others.remedy.diff == (
        '- "zero_optimization": {"stage3_param_persistence_threshold": 0}\n'
        '+ "zero_optimization": {"stage3_param_persistence_threshold": 100000}'
    )
    default = replace(low, effective="100000")
    again = found(changed(rank, traffic=tuple(TINY), settings=(default,)), "tiny_collectives")
    assert again is not None and again.remedy is None


def test_of_a_remedy_only_what_is_not_set_is_left() -> None:
    """A value beyond the advised one is not taken back, and a removed line shows what is in effect."""
    diff = (
        '- "stage3_max_live_parameters": 1e9\n+ "stage3_max_live_parameters": 2e8\n'
        '- "stage3_prefetch_bucket_size": 5e7\n+ "stage3_prefetch_bucket_size": 1e7'
    )
    remedy = Remedy(cause="", dialect=ConfigFormat.DEEPSPEED, diff=diff)

    def left(live: str, prefetch: str) -> Remaining:
        values = {"max_live_parameters": live, "prefetch_bucket_size": prefetch}
        rank = one(
            settings=tuple(
                Setting(engine=1, name=f"zero_optimization.stage3_{k}", effective=v, written="")
                for k, v in values.items()
            )
        )
        return remaining_remedy(remedy, rank)

    assert left("100000000", "10000000") == (
        None, ("stage3_max_live_parameters=100000000", "stage3_prefetch_bucket_size=10000000")
    )  # fmt: skip
    half = left("500000000", "1000")
    assert half.remedy is not None and half.already == ("stage3_prefetch_bucket_size=1000",)
    assert half.remedy.diff == (
        '- "stage3_max_live_parameters": 500000000\n+ "stage3_max_live_parameters": 2e8'
    )
    assert remaining_remedy(remedy, one()).remedy == remedy  # nothing is known


def test_a_part_that_is_not_offloaded_is_not_brought_back() -> None:
    settings = {"zero_optimization.offload_optimizer.device": "cpu"}
    finding = found(offloading(way("device_to_host"), settings=settings), "offload_waits")
    assert finding is not None and finding.remedy is not None
    assert finding.remedy.diff == '- "offload_optimizer": {"device": "cpu"}'


@pytest.mark.parametrize(
    ("variables", "diff"),
    [
        ({}, "+ PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"),
        (
            {"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:128,expandable_segments:False"},
            "- PYTORCH_CUDA_ALLOC_CONF=max_split_size_mb:128,expandable_segments:False\n"
            "+ PYTORCH_CUDA_ALLOC_CONF=max_split_size_mb:128,expandable_segments:True",
        ),
        ({"PYTORCH_ALLOC_CONF": "a:1,expandable_segments:True"}, None),
        ({"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}, None),
    ],
)
def test_segments_are_made_expandable_beside_the_options_that_are_set(
    variables: dict[str, str], diff: str | None
) -> None:
    finding = found(changed(FIRES["fragmentation"], process={"variables": variables}), "fragmentation")
    assert finding is not None
    assert (finding.remedy.diff if finding.remedy else None) == diff
    assert ("already set: " in finding.text) == (diff is None)


@pytest.mark.parametrize(
    ("torch", "backend", "hidden_seconds", "is_advised"),
    [
        ("2.15.0+cu132", "nccl", 0.0, True),
        ("2.15.0+cu132", "cpu:gloo,cuda:nccl", 0.0, True),
        ("2.14.1+cu130", "nccl", 0.0, False),  # there it is the default
        ("2.15.0+cu132", "nccl", 0.01, False),  # one of the buckets is hidden
        ("2.15.0+cu132", "nccl-legacy", 0.0, False),
        ("2.15.0", "xccl", 0.0, False),
    ],
)
def test_another_backend_is_advised_where_each_bucket_is_waited_for(
    torch: str, backend: str, hidden_seconds: float, is_advised: bool
) -> None:
    """Smaller buckets are not: the stream would wait for those, too."""
    spent = 0.05
    buckets = [
        row("all_reduce", f"bucket {n}", "backward", nbytes=20.0 * MIB, seconds=spent,
            exposed_seconds=spent - hidden_seconds * n)
        for n in range(2)
    ]  # fmt: skip
    rank = changed(
        one(*buckets, strategy="ddp", process={"packages": {"torch": torch}, "ddp_backend": backend}),
        device="cuda",
        exposed_ratio=0.5, overlap_ratio=hidden_seconds, exposed_seconds=0.1,
    )  # fmt: skip
    finding = found(rank, "exposed_communication")
    assert finding is not None and (finding.remedy is not None) is is_advised
    assert finding.text.endswith("communication overlaps with compute")
    if finding.remedy is not None:
        assert '+ init_process_group("nccl-legacy")' in finding.remedy.diff
    if hidden_seconds == 0:
        assert found(rank, "ddp_bucket_large") is None


@pytest.mark.parametrize(("overlap", "severity"), [(0.1, "warning"), (0.6, "info"), (None, "info")])
def test_a_wait_of_a_fifth_is_a_warning_where_nothing_overlaps(
    overlap: float | None, severity: str
) -> None:
    """What could be hidden is avoidable; an unknown overlap blames nothing."""
    rank = changed(one(), exposed_ratio=0.2, overlap_ratio=overlap, exposed_seconds=0.02)
    finding = found(rank, "exposed_communication")
    assert finding is not None and finding.severity == severity


def test_what_is_on_already_is_not_advised() -> None:
    """Prefetch, small buckets, checkpointing, autocast."""

    def with_model(rule: str, **facts: Any) -> Finding | None:
        rank = FIRES[rule]
        return found(changed(rank, models=({**rank.config.models[0], **facts},)), rule)

    assert with_model("fsdp_prefetch_off", forward_prefetch=True) is None
    assert with_model("ddp_bucket_large", bucket_cap_bytes=5 * MIB) is None
    assert with_model("ddp_bucket_large", bucket_cap_bytes=25 * MIB) is not None
    full = with_model("activations_dominate", recomputes=True)
    assert full is not None and full.remedy is None and "is on already" in full.text
    half = changed(FIRES["half_precision_unused"], process={"autocast": "bfloat16"})
    assert found(half, "half_precision_unused") is None


# ---- without flapping -----------------------------------------------------------------------------

FINDING = Finding(rule="data_wait", severity=Severity.INFO, text="x", rank=0)


def at(second: float, *, alive: bool = True, ended: bool = False) -> RunSnapshot:
    """A run of one rank at *second*."""
    return replace(run(one(alive=alive)), taken_wall=second, ended=ended)


def texts(memory: FindingHistory, of: RunSnapshot, *holding: Finding) -> list[tuple[str, int]]:
    return [(finding.text, finding.rank) for finding in memory.shown(of, holding)]


def test_a_finding_comes_at_once_and_goes_when_it_has_not_held_for_a_while() -> None:
    memory, newer = FindingHistory(), replace(FINDING, text="y")
    assert texts(memory, at(1), FINDING) == [("x", 0)]
    assert texts(memory, at(LINGER_SECONDS)) == [("x", 0)]
    assert memory.shown(at(LINGER_SECONDS + 1), [newer]) == (replace(newer, came=1),)
    assert texts(memory, at(2 * LINGER_SECONDS)) == [("y", 0)]
    assert texts(memory, at(2 * LINGER_SECONDS + 1)) == []


def test_one_at_the_edge_of_its_rule_does_not_flap() -> None:
    memory = FindingHistory()
    shown = [texts(memory, at(n), *[FINDING] * (n % 3 == 0)) for n in range(60)]
    assert all(found == [("x", 0)] for found in shown)


def test_a_severity_at_its_edge_does_not_flap() -> None:
    memory, grave = FindingHistory(), replace(FINDING, severity=Severity.WARNING)
    shown = [memory.shown(at(n), [grave if n % 3 == 0 else FINDING])[0] for n in range(60)]
    assert {finding.severity for finding in shown} == {Severity.WARNING}
    calm = [memory.shown(at(60 + n), [FINDING])[0].severity for n in range(10)]
    assert (calm[0], calm[-1]) == (Severity.WARNING, Severity.INFO)


def test_a_severity_does_not_flap_where_a_rule_moves_from_rank_to_rank() -> None:
    """A grave one of rank 0 and a mild one of rank 1 in turn: the worst rank changes every second."""
    memory, grave = FindingHistory(), replace(FINDING, severity=Severity.WARNING)
    mild = replace(FINDING, rank=1)
    shown = [memory.shown(at(n), [grave if n % 2 else mild])[0] for n in range(1, 60)]
    assert {finding.severity for finding in shown} == {Severity.WARNING}
    assert shown[-1].came == 1


def test_a_rule_that_is_said_once_is_not_shown_for_two_ranks_in_turn() -> None:
    """The worst rank changes from second to second; of two that hold at once both are shown."""
    memory, other = FindingHistory(), replace(FINDING, rank=1)
    assert texts(memory, at(1), FINDING) == [("x", 0)]
    assert memory.shown(at(2), [other]) == (replace(other, came=1),)
    assert texts(memory, at(3)) == [("x", 1)]
    assert texts(memory, at(4), FINDING, other) == [("x", 0), ("x", 1)]


def test_what_stood_while_all_ranks_lived_stays_after_the_end() -> None:
    """What came after the first death is a consequence, and is over with the run."""
    memory = FindingHistory()
    leak = Finding(rule="oom_risk", severity=Severity.CRITICAL, text="grows", rank=1)
    later = Finding(rule="exposed_communication", severity=Severity.INFO, text="later")
    died = Finding(rule="rank_died", severity=Severity.CRITICAL, text="SIGTERM", rank=0)
    memory.shown(at(5), [leak, replace(leak, rule="stalled")])
    assert ("later", -1) in texts(memory, at(9, alive=False), later)
    found = memory.shown(at(30, alive=False, ended=True), [died])
    assert [(one.rule, one.came, one.gone) for one in found] == [
        ("rank_died", 30, 30), ("oom_risk", 5, 9),
    ]  # fmt: skip


def test_a_restarted_collector_goes_on_from_what_stood() -> None:
    late = Finding(rule="straggler", severity=Severity.WARNING, text="x", rank=1, came=5.0)
    assert FindingHistory([late]).shown(at(8), [replace(late, came=0.0)]) == (late,)
    ended = FindingHistory([late]).shown(at(20, alive=False, ended=True), [])
    assert ended == (replace(late, gone=20.0),)


def healthy() -> RunSnapshot:
    return run(one(*[replace(r, exposed_seconds=0.0005) for r in GATHERS]))


def test_a_healthy_run_is_left_alone() -> None:
    assert advise(healthy()) == ()


def test_a_slow_stage_is_to_be_split_and_an_even_pipeline_to_get_more_micro_batches() -> None:
    """Whichever shortens the time of the schedule's order more, by its own simulation."""
    more, split = (
        found(one(pipeline=row), "pipeline_bubble")
        for row in (pipelined(), pipelined(balanced_seconds=0.14))
    )
    assert more is not None and more.remedy is not None
    assert more.remedy.diff == "- n_microbatches=7\n+ n_microbatches=14"
    assert more.remedy.gain_high_seconds == pytest.approx(0.025)
    assert split is not None and split.remedy is not None
    assert "stage 1" in split.remedy.diff
    assert split.remedy.gain_high_seconds == pytest.approx(0.04)


@pytest.mark.parametrize(
    ("recent", "why"),
    [
        (FIRES["data_wait"].steps.recent, "ZM601"),
        (FIRES["cpu_optimizer_slow"].steps.recent, "ZM501"),
        (one().steps.recent, "the host enqueues them too slowly"),
    ],
)
def test_an_idle_device_has_its_cause(recent: Any, why: str) -> None:
    idle = one(machine_device=Device(utilization_ratio=0.12), device="cuda:0", recent=recent)
    finding = found(idle, "device_idle")
    assert finding is not None
    assert "12.0 %" in finding.text and why in finding.text
    for other in (
        changed(idle, machine_device=Device(utilization_ratio=0.9)),
        changed(idle, machine_device=Device()),
        changed(idle, pause="saves or loads a checkpoint"),
    ):
        assert found(other, "device_idle") is None


def test_an_optimizer_on_nvme_is_pipelined_where_it_is_not() -> None:
    settings = {
        "offload_optimizer.device": "nvme", "offload_optimizer.pipeline_read": "false",
        "offload_optimizer.pipeline_write": "true",
    }  # fmt: skip
    finding = found(offloading(way("disk_read"), settings=settings), "offload_waits")
    assert finding is not None and finding.remedy is not None
    assert '+ "pipeline_read": true' in finding.remedy.diff
    assert "pipeline_write" not in finding.remedy.diff


def test_overflows_name_the_learning_rate_and_clipping_where_it_is_off() -> None:
    finding = found(FIRES["overflow_storm"], "overflow_storm")
    assert finding is not None and finding.remedy is not None
    assert "lower the learning rate" in finding.remedy.effect
    assert '"gradient_clipping": 1.0' in finding.remedy.effect
    clips = Setting(engine=1, name="gradient_clipping", effective="1.0", written="1.0")
    limited = changed(
        FIRES["overflow_storm"], settings=(*FIRES["overflow_storm"].config.settings, clips)
    )
    finding = found(limited, "overflow_storm")
    assert finding is not None and finding.remedy is not None
    assert "gradient_clipping" not in finding.remedy.effect


def test_steps_skipped_in_bf16_did_not_overflow() -> None:
    """Their gradients were NaN or infinite, which ZM409 says."""
    wide = Setting(engine=1, name="bf16.enabled", effective="true", written="true")
    stormy = FIRES["overflow_storm"]
    assert found(changed(stormy, settings=(*stormy.config.settings, wide)), "overflow_storm") is None


def test_an_optimizer_on_the_host_is_relieved_by_what_its_stage_allows() -> None:
    for stage, effect, diff in (
        (2, "serves twice as many samples", "gradient_accumulation_steps"),
        (3, "SuperOffload", '"ratio": 0.7'),
    ):
        rank = replace(
            FIRES["cpu_optimizer_slow"], strategy_fields=Strategy.parse(f"deepspeed-zero{stage}-offload")
        )
        finding = found(rank, "cpu_optimizer_slow")
        assert finding is not None and finding.remedy is not None
        assert effect in finding.remedy.effect and diff in finding.remedy.diff


def test_saves_that_stop_the_loop_are_written_by_a_thread() -> None:
    """4 saves of 2 s in 40 steps, of 1 GiB each; one that a thread writes already gets no advice."""
    save = ActivityRow(phase="checkpoint", activity="save", background=False, count=4, seconds=8.0,
                       longest_seconds=2.0, nbytes=4 * GIB, last_ns=0)  # fmt: skip
    rank = pausing(Phase.CHECKPOINT, 10, 2000, activities=(save,), checkpoints=4)
    finding = found(rank, "slow_steps")
    assert finding is not None and finding.remedy is not None
    assert "async_save(state, checkpoint_id=path, process_group=savers)" in finding.remedy.diff
    gains = finding.remedy.gain_low_seconds, finding.remedy.gain_high_seconds
    assert gains == pytest.approx((0.3 * 0.2, 0.9 * 0.2))
    assert "a copy of the state (1.0 GiB on this rank)" in finding.remedy.price
    starved = short_of_cpus(0.3)
    short = found(changed(rank, pressure=starved), "slow_steps")
    assert short is not None and short.remedy is not None and short.remedy.gain_low_seconds == 0
    threads = changed(rank, activities=(save, replace(save, background=True)))
    again = found(threads, "slow_steps")
    assert again is not None and again.remedy is None
