"""Forecast, findings, report, store: from a picture to what people read."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest

from core.build import MS, device_memory, rank, run, summary
from zeromon.advice import RULES, advise
from zeromon.errors import RunAmbiguous, RunNotFound, ZeromonError
from zeromon.forecast import forecast, growth_per_step, host_capacity, rank_risks
from zeromon.report import render, verdict
from zeromon.state import InFlight, Risk
from zeromon.store import Store, decode, encode

GIB = 1 << 30


def steady(level: float, noise: float, steps: int = 200) -> list[tuple[int, int]]:
    chooser = random.Random(3)
    return [(n, round((level + chooser.uniform(-noise, noise)) * GIB)) for n in range(1, steps)]


def test_a_steady_series_has_no_risk_below_eighty_percent() -> None:
    """Noise is no growth."""
    risk = forecast("device", steady(60, 2), 80 * GIB)
    assert risk == Risk(
        pool="device", ratio=0.0, cause="none", used_bytes=risk.used_bytes if risk else 0,
        capacity_bytes=80 * GIB,
    )  # fmt: skip


def test_a_nearly_full_memory_is_a_risk_by_its_level() -> None:
    """76 of 80 GiB: three quarters of the way from 80 % to full."""
    risk = forecast("device", steady(76, 0), 80 * GIB)
    assert risk is not None
    assert (risk.ratio, risk.cause) == (pytest.approx(0.75), "level")


def test_a_leak_is_seen_with_the_steps_that_are_left() -> None:
    """0.1 GiB a step from 20 GiB: 400 steps to go after 200."""
    leak = [(n, round((20 + 0.1 * n) * GIB)) for n in range(1, 201)]
    risk = forecast("device", leak, 80 * GIB)
    assert risk is not None
    assert risk.cause == "growth"
    assert risk.steps_left == pytest.approx(400, abs=2)
    assert risk.ratio == pytest.approx(0.6, abs=0.01)


def test_warm_up_is_no_leak() -> None:
    """Memory that rises over the first steps and then stays."""
    series = [(n, round(min(40.0, 4.0 * n) * GIB)) for n in range(1, 200)]
    risk = forecast("device", series, 80 * GIB)
    assert risk is not None
    assert risk.ratio == 0.0
    saturating = [(n, round((40 - 30 * 0.97**n) * GIB)) for n in range(1, 200)]
    assert growth_per_step(saturating) is None


def test_unknown_capacity_or_use_is_no_risk_figure() -> None:
    """None, never 0."""
    assert forecast("device", steady(1, 0), -1) is None
    assert forecast("device", [(1, -1)], 80 * GIB) is None


def test_the_hosts_capacity_is_the_rest_of_the_cgroup() -> None:
    """What the other ranks of the node take is not ours; nor is more than is available."""
    one = rank(0, rss_bytes=10 * GIB, host_limit_bytes=64 * GIB, host_available_bytes=-1)
    assert host_capacity(one, 30 * GIB) == 34 * GIB
    free = replace(one, host_available_bytes=5 * GIB)
    assert host_capacity(free, 30 * GIB) == 15 * GIB
    assert host_capacity(replace(one, host_limit_bytes=-1), 0) == -1


def test_device_risk_counts_what_is_not_torchs() -> None:
    """40 reserved and only 36 free of 80: the capacity is 76."""
    recent = tuple(summary(n, reserved_bytes=40 * GIB) for n in range(1, 30))
    device, _ = rank_risks(rank(0, memory=device_memory(), recent=recent))
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
    assert len(RULES) == 6


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
