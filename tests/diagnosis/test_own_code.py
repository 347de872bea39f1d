"""The script's own code between the phases: a finding with its line where it is much, and only there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from builders import MS, rank, run, summary

from zeromon.diagnosis.engine import advise
from zeromon.readout.text import busiest_line
from zeromon.readout.verdict import Health, judge_run
from zeromon.ring.codes import Phase
from zeromon.snapshot import Finding, RankSnapshot
from zeromon.snapshot.host import CodeLine, Device, Pressure
from zeromon.snapshot.levels import Severity

LOGS = (
    CodeLine(place="/home/me/train.py:111 in log_metrics", ratio=0.3),
    CodeLine(place="/home/me/train.py:90 in <module>", ratio=0.4),
    CodeLine(place="/home/me/train.py:112 in log_metrics", ratio=0.25),
)


def spending(phase: Phase = Phase.OTHER, ms: int = 80, **facts: Any) -> RankSnapshot:
    """Steps of 100 ms, so many of them in *phase*, and the rest in backward."""
    spent = [0] * len(Phase)
    spent[Phase.BACKWARD] += (100 - ms) * MS
    spent[phase] += ms * MS
    steps = tuple(
        summary(n, phase_ns=tuple(spent), phase_exposed_ns=(0,) * len(Phase), exposed_ns=0)
        for n in range(1, 41)
    )
    base: dict[str, Any] = {
        "recent": steps, "watched_steps": 40, "median_seconds": 0.1, "exposed_ratio": 0.0,
        "own_code": LOGS,
    }  # fmt: skip
    return rank(0, **(base | facts))


def findings(*ranks: RankSnapshot) -> Sequence[Finding]:
    return [f for f in advise(run(*ranks)) if f.rule == "own_code"]


def test_own_code_is_told_with_its_share_and_its_line() -> None:
    both = [spending(), replace(spending(), rank=1)]
    (finding,) = findings(*both)
    assert (finding.code, finding.severity, finding.rank) == ("ZM609", Severity.WARNING, -1)
    assert finding.text == (
        "80.0 % of a step (80.0 ms) is the script's own code; mostly at train.py:111 in log_metrics"
    )
    shown = judge_run(run(*both, findings=(finding,)))
    assert shown.health is Health.SLOW and "train.py:111" in shown.text


def test_the_rank_whose_code_takes_long_alone_is_named() -> None:
    (finding,) = findings(spending(ms=5), replace(spending(ms=60), rank=1))
    assert finding.rank == 1


@pytest.mark.parametrize(("ms", "severity"), [(14, None), (16, Severity.INFO), (26, Severity.WARNING)])
def test_the_share_decides_how_urgent_it_is(ms: int, severity: Severity | None) -> None:
    assert [f.severity for f in findings(spending(ms=ms))] == [severity] * (severity is not None)


@pytest.mark.parametrize("phase", [phase for phase in Phase if phase is not Phase.OTHER])
def test_what_another_rule_explains_is_not_own_code(phase: Phase) -> None:
    assert not findings(spending(phase))


def test_a_wait_for_other_ranks_between_the_phases_is_communication() -> None:
    waits = tuple(
        replace(s, phase_exposed_ns=(80 * MS, *s.phase_exposed_ns[1:])) for s in spending().steps.recent
    )
    assert not findings(spending(recent=waits))


@pytest.mark.parametrize(
    ("facts", "told"),
    [
        ({"watched_steps": 10}, False),  # its first steps
        ({"pause": "evaluates"}, False),
        ({"device": "cuda:0"}, False),  # a host that runs ahead waits there for the device
        ({"device": "cuda:0", "machine_device": Device(utilization_ratio=0.9)}, False),
        ({"device": "cuda:0", "machine_device": Device(utilization_ratio=0.1)}, True),
        # a lack of CPUs makes each part of a step longer alike
        ({"pressure": Pressure(cpu_wait_ratio=0.9, major_faults_per_second=0)}, True),
        ({"own_code": ()}, True),
    ],
)
def test_it_is_told_only_where_the_hosts_time_is_the_steps(facts: dict[str, Any], told: bool) -> None:
    assert bool(findings(spending(**facts))) is told


def test_an_idle_device_is_told_once() -> None:
    idle = spending(device="cuda:0", machine_device=Device(utilization_ratio=0.1))
    told = [f.rule for f in advise(run(idle)) if f.rule in ("own_code", "device_idle")]
    assert told == ["own_code"]


@pytest.mark.parametrize(
    ("lines", "line"),
    [
        ((), ""),
        ((CodeLine(place="train.py:5 in log", ratio=1.0, communicates=True),), ""),
        (LOGS[1:2], "train.py:90"),
        ((CodeLine(place="transformers/trainer.py:7 in log", ratio=1.0),),
         "transformers/trainer.py:7 in log"),
    ],
)  # fmt: skip
def test_the_line_of_the_function_with_most_samples_is_shown(
    lines: tuple[CodeLine, ...], line: str
) -> None:
    assert busiest_line(spending(own_code=lines)) == line


def test_a_run_that_ends_well_says_how_much_was_own_code() -> None:
    assert "own code 80.0 % of a step" in judge_run(run(spending(), ended=True)).cause
