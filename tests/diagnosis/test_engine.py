"""Findings: which rule fires on which snapshot, and in which order they are listed."""

from __future__ import annotations

from dataclasses import replace

import pytest
from builders import MS, changed, deepspeed_facts, rank, run, summary

from zeromon.diagnosis.engine import advise
from zeromon.snapshot.communication import GatherRow, InFlight
from zeromon.snapshot.host import Disk
from zeromon.snapshot.memory import Risk, RoleRow
from zeromon.snapshot.rank import EngineRow, Setting

GIB = 1 << 30


# ---- findings -----------------------------------------------------------------------------------


def rules_of(*ranks: object, **facts: object) -> set[str]:
    return {finding.rule for finding in advise(run(*ranks, **facts))}  # type: ignore[arg-type]


def test_a_healthy_run_has_no_findings() -> None:
    """Little exposed, no risk."""
    assert advise(run(rank(0, exposed_ratio=0.02, overlap_ratio=0.9))) == ()


def test_every_rule_can_fire_and_stay_silent() -> None:
    """One snapshot a rule; each rule is in the list."""
    stuck = InFlight(
        op="all_gather", group="world", sequence=9, unit="", phase="forward", nbytes=1,
        issued_ns=0,
    )  # fmt: skip
    risky = Risk(pool="host", ratio=0.9, cause="growth", steps_left=9.0, used_bytes=1, capacity_bytes=2)
    fired = {
        "oom_risk": rank(risks=(risky,)),
        "exposed_communication": rank(exposed_ratio=0.4),
        "rank_died": rank(failed=True, ended="SIGKILL", alive=False),
        "collective_in_flight": rank(in_flight=(stuck,)),
        "events_dropped": rank(dropped=5),
        "agent_errors": rank(errors=2),
        "untimed_collectives": rank(
            untimed_in_cpp=30, recent=tuple(summary(n, untimed=1) for n in range(1, 20))
        ),
    }
    late = 60_000 * MS
    for rule, one in fired.items():
        assert rule in rules_of(changed(one, median_seconds=0.1), taken_ns=late), rule


def test_the_gravest_finding_comes_first() -> None:
    """Critical, warning, info."""
    found = advise(run(rank(0, dropped=1, exposed_ratio=0.12), rank(1, failed=True, ended="x")))
    order = ["critical", "warning", "info"]
    assert [f.severity for f in found] == sorted((f.severity for f in found), key=order.index)
    assert found[0].rank == 1


# ---- report -------------------------------------------------------------------------------------


# ---- store --------------------------------------------------------------------------------------


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


@pytest.mark.parametrize(
    ("bucket", "live", "numel", "larger"),
    [
        ("50000000", "1000000000", 7_000_000_000, {"stage3_prefetch_bucket_size": 200_000_000}),
        ("50000000", "0", 700_000, {"stage3_max_live_parameters": 1_000_000_000}),
        ("50000000", "10000000", 7_000_000_000, {"stage3_max_live_parameters": 1_000_000_000}),
        ("0", "1000000000", 700_000, {"stage3_prefetch_bucket_size": 50_000_000}),
        ("0", "0", 700_000,
         {"stage3_prefetch_bucket_size": 50_000_000, "stage3_max_live_parameters": 1_000_000_000}),
        ("50000000", "1000000000", 700_000, None),
        ("50000000", "700000", 700_000, None),
    ],
)  # fmt: skip
def test_a_starved_prefetch_names_the_setting_that_limits_it(
    bucket: str, live: str, numel: int, larger: dict[str, int] | None
) -> None:
    """A bucket beyond the model limits nothing, and no bucket helps where nothing may stay gathered."""
    values = {"stage3_prefetch_bucket_size": bucket, "stage3_max_live_parameters": live}
    settings = tuple(
        Setting(engine=1, name=f"zero_optimization.{name}", effective=value, written=value)
        for name, value in values.items()
    )
    late = GatherRow(outcome="late", nbytes=80, exposed_seconds=0.3)
    waits = tuple(summary(n, late_gather_ns=15 * MS) for n in range(20))
    member = rank(gathers=(late,), settings=settings, recent=waits, models=({"numel": numel},))
    found = [f for f in advise(run(member)) if f.rule == "starved_prefetch"]
    if larger is None:
        assert not found
        return
    (finding,) = found
    assert finding.remedy is not None
    assert finding.remedy.diff.splitlines() == [
        line
        for name, value in larger.items()
        for line in (f'- "{name}": {values[name]}', f'+ "{name}": {value}')
    ]
    assert all(f"{name} is {values[name]}" in finding.text for name in larger)


def test_a_full_disk_missing_steps_and_unknown_names_are_told() -> None:
    """Each once, and not without need."""
    disk = Disk(path="/nvme", free_bytes=1 << 30, total_bytes=1 << 40)
    found = texts_of(rank(0, disk=disk, backwards_since_step=100, unseen=("X.y",)), rank(1, disk=disk))
    assert "1.0 GiB of 1.0 TiB are free at /nvme" in found["disk_space"]
    assert "100 backward passes" in found["no_step"]
    assert "X.y" in found["unknown_version"]
    newer_torch = texts_of(rank(process={"unknown_collectives": ["shuffle_single"]}))
    assert "shuffle_single" in newer_torch["unknown_version"]
    roomy = replace(disk, free_bytes=1 << 39)
    quiet = texts_of(rank(0, disk=roomy, backwards_since_step=4))
    assert not {"disk_space", "no_step", "unknown_version"} & set(quiet)


def test_growth_names_the_role_that_grows_or_says_that_none_does() -> None:
    risk = Risk(
        pool="host", ratio=0.9, cause="growth", steps_left=50.0, used_bytes=9 * GIB,
        capacity_bytes=10 * GIB, growth_bytes_per_step=1 << 20,
    )  # fmt: skip
    kept = RoleRow(role="optimizer_state", device_bytes=0, host_bytes=GIB, disk_bytes=0, pinned_bytes=0)
    for grown, words in (
        (0, "something else is kept"),
        (64 << 20, "optimizer state grows 1.0 MiB per step"),
    ):
        one = rank(0, risks=(risk,), roles=(replace(kept, grown_bytes=grown),))
        (told,) = [f for f in advise(run(one)) if f.rule == "oom_risk"]
        assert words in told.text
        assert told.remedy is not None and "loss.item()" in told.remedy.diff
