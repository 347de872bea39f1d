"""Forecast, findings, report, store: from a picture to what people read."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from core.build import MS, deepspeed_facts, device_memory, rank, run, summary
from zeromon import offload, precision, remedies
from zeromon.advice import RULES, advise, risk_in_words
from zeromon.errors import RunAmbiguous, RunNotFound, ZeromonError
from zeromon.forecast import host_capacity, host_risk, rank_risks
from zeromon.report import render, verdict
from zeromon.snapshot import (
    Disk,
    EngineRow,
    GatherRow,
    HostMemory,
    InFlight,
    OutOfMemory,
    Risk,
    RoleRow,
    Setting,
    Stretch,
)
from zeromon.store import Store, decode, encode
from zeromon.tui.words import risk as sentence

GIB = 1 << 30


def test_the_hosts_memory_is_shared_by_the_ranks_of_a_node() -> None:
    """Two ranks that grow by 0.1 GiB a step each; 12 GiB are left to both: 60 steps."""
    recent = tuple(summary(n, rss_bytes=round((1 + 0.1 * n) * GIB)) for n in range(1, 101))
    room = HostMemory(headroom_bytes=12 * GIB)
    ranks = [rank(n, recent=recent, rss_bytes=11 * GIB, host=room) for n in (0, 1)]
    assert host_capacity(ranks) == 34 * GIB
    risk = host_risk(ranks)
    assert risk is not None and risk.cause == "growth"
    assert risk.steps_left == pytest.approx(60, abs=2)
    said = risk_in_words(risk, ranks[0])
    assert "of 34.0 GiB, all ranks together" in said and said.startswith("host memory runs out")
    one = replace(ranks[0], risks=(risk,))
    line = "".join(text for text, _ in sentence(run(one)))
    assert "host" in line and "rank 0" not in line  # the host's memory is that of all
    assert host_risk([replace(one, host=None, host_available_bytes=-1) for one in ranks]) is None
    assert host_risk([replace(one, alive=False) for one in ranks]) is None


def test_device_risk_counts_what_is_not_torchs() -> None:
    """40 reserved and only 36 free of 80: the capacity is 76."""
    recent = tuple(
        summary(n, allocated_bytes=40 * GIB, reserved_bytes=40 * GIB) for n in range(1, 30)
    )
    (device,) = rank_risks(rank(0, memory=device_memory(), recent=recent))
    assert (device.pool, device.capacity_bytes) == ("device", 76 * GIB)


# ---- findings -----------------------------------------------------------------------------------


def rules_of(*ranks: object, **facts: object) -> set[str]:
    return {finding.rule for finding in advise(run(*ranks, **facts))}  # type: ignore[arg-type]


def test_a_healthy_run_has_no_findings() -> None:
    """Little exposed, no risk."""
    assert advise(run(rank(0, exposed_ratio=0.02, overlap_ratio=0.9))) == ()


def test_every_rule_can_fire_and_stay_silent() -> None:
    """One picture a rule; each rule is in the list."""
    stuck = InFlight(
        op="all_gather", group="world", sequence=9, unit="", phase="forward", nbytes=1,
        issued_ns=0,
    )  # fmt: skip
    risky = Risk(
        pool="host", ratio=0.9, cause="growth", steps_left=9.0, used_bytes=1, capacity_bytes=2
    )
    fired = {
        "oom_risk": rank(risks=(risky,)),
        "exposed_communication": rank(exposed_ratio=0.4),
        "poor_overlap": rank(exposed_ratio=0.4, overlap_ratio=0.1),
        "rank_died": rank(failed=True, ended="SIGKILL", alive=False),
        "collective_in_flight": rank(in_flight=(stuck,)),
        "events_dropped": rank(dropped=5),
        "agent_errors": rank(errors=2),
        "untimed_collectives": rank(unattributed={"world": 900}),
    }
    late = 60_000 * MS
    for rule, one in fired.items():
        assert rule in rules_of(replace(one, step_seconds=0.1), taken_ns=late), rule
    # the others are below, in test_nodes, test_skew, test_traffic and test_remedies
    assert len(RULES) == 11 + sum(len(m.RULES) for m in (remedies, precision, offload))


def test_the_gravest_finding_comes_first() -> None:
    """Critical, warning, info."""
    found = advise(run(rank(0, dropped=1, exposed_ratio=0.12), rank(1, failed=True, ended="x")))
    order = ["critical", "warning", "info"]
    assert [f.severity for f in found] == sorted((f.severity for f in found), key=order.index)
    assert found[0].rank == 1


# ---- report -------------------------------------------------------------------------------------


def test_the_report_names_a_death() -> None:
    """Rank, signal, last step, and what it was doing."""
    flying = InFlight(
        op="reduce_scatter", group="world", sequence=77, unit="layers.3", phase="backward",
        nbytes=1, issued_ns=5,
    )  # fmt: skip
    dead = rank(
        1, alive=False, failed=True, ended="SIGKILL", phase="backward", unit="layers.3",
        in_flight=(flying,),
    )  # fmt: skip
    picture = run(rank(0), dead, ended=True)
    text = render(replace(picture, findings=advise(picture)))
    assert verdict(picture) == "died: rank 1, SIGKILL, after step 20"
    assert "rank 1: SIGKILL; last seen in step 21, in backward, unit layers.3" in text
    assert "reduce_scatter #77 of group world in flight" in text


def test_the_cause_is_told_apart_from_what_the_launcher_stopped() -> None:
    """The rank that was killed, not the ones that torchrun then ended, whoever wrote last."""
    stopped = rank(0, failed=True, ended="SIGTERM", alive=False, last_event_ns=1)
    killed = rank(1, failed=True, ended="SIGKILL", alive=False, last_event_ns=2)
    assert verdict(run(stopped, killed)) == "died: rank 1 (and 1 more), SIGKILL, after step 20"
    assert verdict(run(stopped)) == "stopped by SIGTERM after step 20"
    by_hand = replace(killed, ended="exception", exception="KeyboardInterrupt: ")
    assert verdict(run(by_hand)) == "stopped by Ctrl-C after step 20"


def test_the_report_of_a_run_without_ranks_says_why() -> None:
    """Nobody reported."""
    text = render(run(ended=True, note="no rank ever reported"))
    assert "no rank ever reported" in text


def test_the_report_fits_a_terminal_and_cuts_a_thousand_ranks() -> None:
    """No line over 100 columns; the rest is counted."""
    text = render(run(*(rank(n) for n in range(200))))
    assert "and 168 more ranks" in text
    assert max(len(line) for line in text.splitlines()) <= 100


# ---- store --------------------------------------------------------------------------------------


def test_a_picture_survives_json() -> None:
    """Field by field."""
    picture = run(rank(0, memory=device_memory()), rank(1))
    assert decode(encode(picture)) == picture


@pytest.mark.parametrize("text", [b"", b"{", b"[]", b'{"run": 3}', b"\xff\xfe"])
def test_a_broken_record_is_a_clear_error(text: bytes) -> None:
    """With a hint, never a traceback of msgspec."""
    with pytest.raises(ZeromonError) as caught:
        decode(text)
    assert caught.value.hint


def test_the_store_finds_runs_by_name_prefix_and_age(tmp_path: Path) -> None:
    """The newest by default."""
    store = Store(tmp_path)
    with pytest.raises(RunNotFound):
        store.load()
    for name in ("train-a", "train-b", "other"):
        store.save(run(rank(0), run=name))
    assert store.load().run == "other"
    assert store.load("train-a").run == "train-a"
    with pytest.raises(RunAmbiguous):
        store.load("train")
    with pytest.raises(RunNotFound):
        store.load("nope")
    store.prune(keep=1)
    assert store.names() == ["other"]
    assert (tmp_path / "runs" / "other").stat().st_mode & 0o077 == 0


# ---- DeepSpeed ----------------------------------------------------------------------------------


def texts_of(*ranks: object) -> dict[str, str]:
    """Rule -> text."""
    return {f.rule: f.text for f in advise(run(*ranks))}  # type: ignore[arg-type]


def engine(**facts: object) -> EngineRow:
    return replace(deepspeed_facts()["engines"][0], **facts)


def test_an_overflow_storm_is_told_with_the_scale() -> None:
    """12 of 50 steps is a storm; the usual one in a hundred is not; none applied is critical."""
    steps = [summary(n, skipped=n % 4 == 0) for n in range(1, 51)]
    text = texts_of(rank(recent=tuple(steps), engines=(engine(loss_scale=128.0),)))
    assert text["overflow_storm"] == (
        "12 of the last 50 steps were skipped for overflow; the loss scale is down to 128; "
        "the newest: 40, 44, 48"
    )
    floor = rank(recent=tuple(steps), engines=(engine(loss_scale=1.0),))
    assert "down to 1, its floor" in texts_of(floor)["overflow_storm"]
    calm = [summary(n, skipped=n == 7) for n in range(1, 51)]
    assert "overflow_storm" not in texts_of(rank(recent=tuple(calm)))
    dead = rank(recent=tuple(summary(n, skipped=True) for n in range(20)), engines=(engine(),))
    (found,) = [f for f in advise(run(dead)) if f.rule == "overflow_storm"]
    assert found.severity == "critical"


def test_a_starved_prefetch_is_told_with_its_setting() -> None:
    """Most bytes are asked for late, and it costs; the same share at no cost is not told."""
    prefetch = "zero_optimization.stage3_prefetch_bucket_size"
    setting = Setting(engine=1, name=prefetch, effective="1000", written="1000")
    late = GatherRow(outcome="late", nbytes=80, exposed_seconds=0.3)
    waits = tuple(summary(n, late_gather_ns=15 * MS) for n in range(20))
    ahead = GatherRow(outcome="ahead", nbytes=20, exposed_seconds=0.0)
    facts = {"gathers": (late, ahead), "settings": (setting,), "recent": waits}
    text = texts_of(rank(**facts))["starved_prefetch"]
    assert "80.0 %" in text and "15.0 %" in text
    assert "stage3_prefetch_bucket_size is 1000" in text
    cheap = tuple(summary(n, late_gather_ns=1 * MS) for n in range(20))
    assert "starved_prefetch" not in texts_of(rank(**{**facts, "recent": cheap}))
    good = replace(late, nbytes=2)
    assert "starved_prefetch" not in texts_of(rank(**{**facts, "gathers": (good, ahead)}))


def test_a_full_disk_missing_steps_and_unknown_names_are_told() -> None:
    """Each once, and not without need."""
    disk = Disk(path="/nvme", free_bytes=1 << 30, total_bytes=1 << 40)
    found = texts_of(
        rank(0, disk=disk, backwards_since_step=100, unseen=("X.y",)), rank(1, disk=disk)
    )
    assert "1.0 GiB of 1.0 TiB are free at /nvme" in found["disk_space"]
    assert "100 backward passes" in found["no_step"]
    assert "X.y" in found["unknown_version"]
    roomy = replace(disk, free_bytes=1 << 39)
    quiet = texts_of(rank(0, disk=roomy, backwards_since_step=4))
    assert not {"disk_space", "no_step", "unknown_version"} & set(quiet)


def test_the_report_shows_engines_roles_offload_and_configuration() -> None:
    """Written settings with what took effect; defaults only where they explain much."""
    rows = (
        Setting(engine=1, name="zero_optimization.stage", effective="3", written="3"),
        Setting(engine=1, name="zero_optimization.overlap_comm", effective="true", written=""),
        Setting(engine=1, name="zero_optimization.sub_group_size", effective="1", written=""),
        Setting(engine=1, name="train_batch_size", effective="8", written="auto"),
    )
    text = render(run(rank(0, **{**deepspeed_facts(), "settings": rows})))
    for part in (
        "1 deepspeed-zero3", "65536", "master param", "7 B", "disk read", "25 MB/s", "2.0 TiB free",
        "zero_optimization.overlap_comm  true  (default)", "8  (written: auto)",
        "25 MB/s  30 MB/s  100 MB/s", "100 MB/s is what its cgroup allows",
        "while busy it moves 50 MB/s, with 2.0 requests at once; at best it moved 80 MB/s",
    ):  # fmt: skip
        assert part in text, (part, text)
    assert "sub_group_size" not in text


def test_a_failed_allocation_on_the_device_is_explained() -> None:
    """What was asked for, what was free, the largest block, the largest roles, the slack."""
    roles = tuple(
        RoleRow(role=role, device_bytes=n * GIB, host_bytes=0, disk_bytes=0, pinned_bytes=0)
        for role, n in (("optimizer_state", 20), ("sharded_param", 9), ("buffer", 1))
    )
    oom = OutOfMemory(
        requested_bytes=3 * GIB, free_bytes=GIB, total_bytes=80 * GIB, largest_block_bytes=2 * GIB
    )
    recent = tuple(summary(n, allocated_bytes=70 * GIB) for n in range(1, 60))
    one = rank(
        0, memory=device_memory(), roles=roles, out_of_memory=oom, alive=False, failed=True,
        ended="exception", exception="OutOfMemoryError: CUDA out of memory", recent=recent,
        last_event_ns=recent[-1].end_ns,
    )  # fmt: skip
    text = render(run(one))
    assert "asked for 3.0 GiB; 1.0 GiB of 80.0 GiB were free on the device" in text
    assert "the largest block in the cache was 2.0 GiB" in text
    assert "most of it: activation + temp 40.0 GiB, " in text
    assert "optimizer state 20.0 GiB" in text.split("most of it")[1].splitlines()[0]
    assert "reserved and not allocated at the last sample" in text
    assert "before  step" in text


def test_growth_names_the_role_that_grows_or_says_that_none_does() -> None:
    risk = Risk(
        pool="host", ratio=0.9, cause="growth", steps_left=50.0, used_bytes=9 * GIB,
        capacity_bytes=10 * GIB, growth_bytes_per_step=1 << 20,
    )  # fmt: skip
    kept = RoleRow(
        role="optimizer_state", device_bytes=0, host_bytes=GIB, disk_bytes=0, pinned_bytes=0
    )
    for grown, words in (
        (0, "something else is kept"),
        (64 << 20, "what grows is optimizer state"),
    ):
        one = rank(0, risks=(risk,), roles=(replace(kept, grown_bytes=grown),))
        (told,) = [f for f in advise(run(one)) if f.rule == "oom_risk"]
        assert words in told.text
        assert told.remedy is not None and "loss.item()" in told.remedy.diff


def test_a_long_run_is_told_over_time() -> None:
    part = Stretch(
        first_step=1, last_step=5000, step_seconds=0.1, exposed_ratio=0.25, rss_bytes=GIB,
        reserved_bytes=-1,
    )  # fmt: skip
    text = render(run(rank(0)), [part, replace(part, first_step=5001, last_step=9999)])
    assert "Over the whole run" in text
    assert "1 to 5,000" in text and "5,001 to 9,999" in text and "25.0 %" in text
    assert "Over the whole run" not in render(run(rank(0)))
