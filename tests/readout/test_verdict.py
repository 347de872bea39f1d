"""The verdict on a run, and that every view begins with it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from builders import changed, device_memory, rank, run, short_of_cpus
from first_lines import first_lines

from zeromon.diagnosis.engine import FindingHistory, advise
from zeromon.readout.verdict import Health, judge_run
from zeromon.snapshot import Finding, Hang, RunSnapshot, Severity
from zeromon.snapshot.communication import GroupProgress, Straggler
from zeromon.snapshot.memory import KILLED_FOR_MEMORY, Risk
from zeromon.snapshot.rank import DETACHED
from zeromon.tui import status_text
from zeromon.tui.columns import DisplayOptions


def _found(code: str, rule: str, severity: Severity, text: str, **more: Any) -> Finding:
    return Finding(code=code, rule=rule, severity=severity, text=text, **more)


def _two(first: dict[str, Any] | None = None, **facts: Any) -> RunSnapshot:
    ranks = (rank(0, **(first or {})), rank(1))
    return run(*ranks, **facts)


def _risk(ratio: float, pool: str = "device") -> Risk:
    return Risk(
        pool=pool, ratio=ratio, cause="growth", used_bytes=95 << 20, capacity_bytes=100 << 20,
        steps_left=40, growth_bytes_per_step=1 << 20, since_step=9, grown_bytes=60 << 20,
        growing_ranks=(0,) if pool == "host" else (),
    )  # fmt: skip


def _advised(shown: RunSnapshot) -> RunSnapshot:
    return replace(shown, findings=advise(shown))


def _ended(live: RunSnapshot, *deaths: dict[str, Any]) -> RunSnapshot:
    """*live* after the end, as a collector shows it: its ranks finished, or ended as *deaths* say."""
    memory = FindingHistory()
    memory.shown(live, advise(live))
    ends = deaths or ({"ended": "finished"},) * len(live.ranks)
    ranks = (changed(r, alive=False, **end) for r, end in zip(live.ranks, ends, strict=True))
    over = replace(live, ended=True, ranks=tuple(ranks))
    return replace(over, findings=memory.shown(over, advise(over)))


_SIGTERM = {"failed": True, "ended": "SIGTERM"}
_OOM_KILL = {"failed": True, "ended": KILLED_FOR_MEMORY}


_HANG = Hang(
    kind="missing", op="all_reduce", group="world", group_id="0", sequence=7, nbytes=4,
    seconds=40.0, waiting=(0,), elsewhere=(), calls=(), missing=(1,), dead=(),
)  # fmt: skip
_LATE = _found("ZM309", "straggler", Severity.WARNING, "rank 1 is late", share=0.4)
_EXPOSED = _found("ZM301", "exposed_communication", Severity.WARNING, "exposed is 45.0 %", share=0.45)
_STRAGGLER = Straggler(
    rank=1, late_seconds=0.05, share=0.5, since_step=1, phases=("forward",), longer_seconds=0.05
)
_NAN = _found("ZM409", "not_finite", Severity.CRITICAL, "the loss is NaN since step 25", rank=1)
_DEAD = {"alive": False, "failed": True, "ended": "SIGKILL"}


@pytest.mark.parametrize(
    ("share", "lack", "health", "tone"),
    [
        (0.05, 0.0, Health.HEALTHY, "good"),
        (0.15, 0.0, Health.HEALTHY, ""),
        (0.40, 0.0, Health.SLOW, "warn"),
        (0.40, 0.2, Health.HEALTHY, ""),
    ],
)
def test_exposed_communication_has_the_colour_of_the_verdict(
    share: float, lack: float, health: Health, tone: str
) -> None:
    """*lack*: the share of the time without a CPU, which the finding does not count."""
    pressure = short_of_cpus(lack)
    made = run(rank(0, exposed_ratio=share, overlap_ratio=0.9, pressure=pressure))
    made = replace(made, findings=advise(made))
    assert judge_run(made).health is health
    shown = {name: shade for name, _, shade in status_text.run_figures(made, DisplayOptions())}
    assert shown["exposed"] == tone


SITUATIONS: dict[str, tuple[RunSnapshot, Health, str]] = {
    "healthy": (_two(), Health.HEALTHY, "of a step"),
    "slow loader": (
        _two(findings=(_found("ZM601", "data_wait", Severity.WARNING, "batches", share=0.8),)),
        Health.SLOW, "batches",
    ),
    "straggler": (_two(findings=(_EXPOSED, _LATE)), Health.SLOW, "rank 1 is late"),
    "poor overlap": (
        _two(findings=(_EXPOSED, replace(_LATE, share=0.06))), Health.SLOW, "exposed is 45.0 %",
    ),
    "leak": (
        _advised(_two({"risks": (_risk(0.6),)})), Health.AT_RISK,
        "rank 0 runs out of device memory at about step 60, in 4 s: use grows 1.0 MiB per step",
    ),
    "leak of one rank on the host": (
        _advised(run(*(rank(n, risks=(_risk(0.6, "host"),)) for n in (0, 1)))), Health.AT_RISK,
        "host memory at about step 60, in 4 s: use of rank 0 grows 1.0 MiB per step since step 9",
    ),
    "at the limit": (
        _advised(_two({"risks": (_risk(0.95),)})), Health.AT_RISK, "rank 0 runs out",
    ),
    "leak, then finished": (
        _ended(_two({"risks": (_risk(0.6),)})), Health.FINISHED,
        "use grew 1.0 MiB per step since step 9",
    ),
    "leak, then killed for memory": (
        _ended(_two({"risks": (_risk(0.9, "host"),)}), _OOM_KILL, _SIGTERM), Health.DEAD,
        "rank 0 ran out of host memory: use of rank 0 grew 1.0 MiB per step since step 9; it was to be "
        "full at about step 60; rank 0: killed by the kernel",
    ),
    "straggler, then finished": (
        _ended(_two(stragglers=(_STRAGGLER,))), Health.FINISHED, "rank 1",
    ),
    "hang, then stopped": (
        _ended(replace(_two(), hangs=(_HANG,)), _SIGTERM, _SIGTERM), Health.STOPPED, "all_reduce",
    ),
    "wrong results, then stopped": (
        _two({**_DEAD, **_SIGTERM}, ended=True, findings=(_NAN,)), Health.STOPPED, "NaN",
    ),
    "stall": (
        _two(findings=(_found("ZM014", "stalled", Severity.CRITICAL, "no step for 60 s"),)),
        Health.STALLED, "no step for 60 s",
    ),
    "hang": (replace(_two(), hangs=(_HANG,)), Health.STALLED, "all_reduce in"),
    "a rank killed": (_two(_DEAD), Health.DYING, "died: rank 0, SIGKILL"),
    "all killed": (_two(_DEAD, ended=True), Health.DEAD, "died: rank 0, SIGKILL"),
    "an exception": (
        _advised(_two({
            **_DEAD, "ended": "exception", "exception": "ValueError at t.py:32: bad sample 4711",
        }, ended=True)),
        Health.DEAD, "rank 0: ValueError at t.py:32: bad sample 4711 (after step 20",
    ),
    "killed on another node": (
        _two(_DEAD, findings=(
            _found("ZM016", "node_lost", Severity.CRITICAL, "node c has not reported"),
            _found("ZM010", "rank_died", Severity.CRITICAL, "SIGKILL on node b", rank=2),
        )),
        Health.DYING, "SIGKILL on node b",
    ),
    "Ctrl-C": (
        _two({**_DEAD, "ended": "exception", "exception": "KeyboardInterrupt: "}, ended=True),
        Health.STOPPED, "of a step",
    ),
    "restart": (_two(attempt=2), Health.HEALTHY, "of a step"),
    "finished": (_two(ended=True), Health.FINISHED, "of a step"),
    "first step": (
        run(rank(0, watched_steps=0, recent=(), stack=("/home/me/train.py:21 in main",), phase="other")),
        Health.STARTING, "no step has ended after 30.00 s; rank 0 is in own code, at ",
    ),
    "first step, where ranks wait for the one that has called less": (
        run(*(
            rank(number, watched_steps=0, recent=(), stack=("/home/me/train.py:21 in main",),
                 phase="other", groups=(GroupProgress(
                     group_id="0", label="world", ranks=(0, 1), sequence=3 - number),))
            for number in (0, 1)
        )),
        Health.STARTING, "no step has ended after 30.00 s; rank 1 is in own code, at ",
    ),
    "first step of another attempt": (
        run(rank(0, watched_steps=0, recent=(), started_ns=0), attempt=2, taken_ns=3_000_000_000),
        Health.STARTING, "no step of attempt 2 has ended after 3.00 s",
    ),
    "stopped in the first step": (
        run(rank(0, watched_steps=0, recent=(), stack=("/home/me/train.py:21 in main",), phase="other",
                 alive=False, failed=True, ended="SIGTERM", started_ns=0,
                 last_event_ns=16_000_000_000), ended=True),
        Health.STOPPED, "no step had ended after 16.00 s; rank 0 was in own code, at ",
    ),
    "stopped because another rank has not joined": (
        run(rank(1, watched_steps=0, recent=(), alive=False, failed=True, ended="SIGTERM", started_ns=0,
                 last_event_ns=4_000_000_000, world_size=2, process={"local_world_size": 2}),
            ended=True, attempt=2),
        Health.STOPPED, "no step of attempt 2 had ended after 4.00 s; rank 0 never left init_process_",
    ),
    "another rank has not joined": (
        run(rank(1, watched_steps=0, recent=(), world_size=2, process={"local_world_size": 2})),
        Health.STARTING, "no step has ended after 30.00 s; rank 0 still in init_process_group",
    ),
    "a rank of another node has not joined": (
        run(rank(1, watched_steps=0, recent=(), world_size=4, process={"local_world_size": 2})),
        Health.STARTING, "no step has ended after 30.00 s",
    ),
    "pauses, which the script's own code makes": (
        _two(findings=(
            _found("ZM609", "own_code", Severity.WARNING, "own code", share=0.43),
            _found("ZM608", "slow_steps", Severity.WARNING, "pauses for 1 s", share=0.34),
        )),
        Health.SLOW, "pauses for 1 s",
    ),
    "late beside a busy machine": (
        _two(findings=(
            _found("ZM605", "cpu_starved", Severity.WARNING, "no CPU for 60.0 %"),
            _found("ZM301", "exposed_communication", Severity.WARNING, "exposed", share=0.26),
        )),
        Health.SLOW, "exposed",
    ),
    "a busy machine alone": (
        _two(findings=(_found("ZM605", "cpu_starved", Severity.WARNING, "no CPU for 60.0 %"),)),
        Health.SLOW, "no CPU",
    ),
    "detached": (
        run(rank(0, ended=DETACHED)), Health.NOT_WATCHED, "is not known",
    ),
    "no rank yet": (run(), Health.STARTING, "no rank has reported after 30.00 s"),
    "restarting": (
        run(rank(0, alive=False, failed=True, ended="exit code 17"), restarting=2),
        Health.RESTARTING, "attempt 2",
    ),
    "a first step that others wait for": (
        replace(
            run(*(rank(n, watched_steps=0, recent=(), stack=("train.py:9 in main",)) for n in (0, 1))),
            hangs=(replace(_HANG, pause="rank 1 has not ended its first step"),),
        ),
        Health.STARTING, "all_reduce in world waits: rank 1 has not ended its first step (at train.py:9",
    ),
    "memory that could save time": (
        _two(findings=(_found("ZM202", "stage_too_high", Severity.WARNING, "gathers", share=0.2),)),
        Health.SLOW, "gathers",
    ),
    "unknown": (run(ended=True, note="no rank ever reported"), Health.UNKNOWN, "no rank ever"),
    "wrong results": (
        _two(findings=(_found("ZM411", "same_batches", Severity.WARNING, "the same batches"),)),
        Health.AT_RISK, "the same batches",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", SITUATIONS)
def test_every_view_begins_with_the_same_verdict(name: str) -> None:
    """Terminal, page, plain text, report and Prometheus name the situation first."""
    shown, health, cause = SITUATIONS[name]
    judged = first_lines(shown)
    assert judged.health is health and cause in judged.cause


def test_a_run_in_danger_has_the_colour_of_danger() -> None:
    almost, near = (judge_run(_advised(_two({"risks": (_risk(ratio),)}))) for ratio in (0.95, 0.6))
    assert (almost.severity, near.severity) == (Severity.CRITICAL, Severity.WARNING)
    assert judge_run(_two()).severity is None
    green = {health for health in Health if health.severity is None}
    assert green == {Health.HEALTHY}


def test_a_finished_run_with_wrong_results_is_not_calm() -> None:
    judged = judge_run(_two(ended=True, findings=(_NAN,)))
    assert (judged.health, judged.severity) == (Health.FINISHED, Severity.CRITICAL)
    assert judged.cause == "rank 1: the loss is NaN since step 25"


def test_a_preflight_says_that_it_fits_unless_its_memory_runs_out() -> None:
    """Before its waits; of a leak that fills the device, the leak alone."""

    def cause(findings: tuple[Finding, ...] = (), **facts: Any) -> str:
        virtual = rank(0, memory_device=device_memory(), **facts)
        made = run(replace(virtual, device="cuda:0 (virtual)"))
        over = _ended(made, {"ended": "finished"})
        return judge_run(replace(over, findings=(*over.findings, *findings))).cause

    assert cause().startswith("fits, with a peak of ")
    exposed = cause((_EXPOSED,))
    assert exposed.startswith("fits, with a peak of ") and exposed.endswith("exposed is 45.0 %")
    assert "fits" not in cause(risks=(_risk(0.95),))


def test_a_death_does_not_hide_what_threatened_the_run_before() -> None:
    """A rank that was late all along, and an abort of the processes at their end."""
    late = _two(stragglers=(_STRAGGLER,))
    judged = judge_run(_ended(late, {"failed": True, "ended": "SIGABRT"}, {"ended": "finished"}))
    assert judged.health is Health.DEAD
    death, _, before = judged.cause.partition("; before: ")
    assert "SIGABRT" in death and before.startswith("rank 1: late by")
    raised = {"failed": True, "ended": "exception", "exception": "ValueError: 3"}
    assert "late" not in judge_run(_ended(late, raised, {"ended": "finished"})).cause


def test_what_zeromon_could_not_record_is_no_fault_of_the_run() -> None:
    lost = _found("ZM005", "events_dropped", Severity.WARNING, "events were dropped")
    assert judge_run(_two(findings=(lost,))).health is Health.HEALTHY


def test_a_straggler_of_another_source_is_named() -> None:
    """Prometheus knows no share of a step."""
    late = Straggler(rank=1, late_seconds=0.1, share=0.4, since_step=1, phases=(), longer_seconds=0.0)
    shown = _two(findings=(replace(_LATE, share=None),), stragglers=(late,))
    assert judge_run(shown).cause == "rank 1 is late"
