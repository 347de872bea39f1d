"""Runs that stand still, for real: what is said of each, and after how long."""

from __future__ import annotations

import contextlib
import io
import statistics
from collections.abc import Iterator
from typing import NamedTuple

import pytest
from first_lines import first_lines
from scenarios import CAUSES, STRATEGIES, Outcome, Scenario, drawn, outcomes

from zeromon.cli import main
from zeromon.readout.text import run_state
from zeromon.readout.verdict import Health
from zeromon.snapshot import RunSnapshot

REDUCER = Scenario("ddp", "sleep")
"""Rank 0 waits in an all-reduce that DDP's reducer issued from C++."""
TEN = [*drawn(9), REDUCER]
MOST_SECONDS = 20
"""From a fault to its finding, with steps of at most a second, on a machine that nobody else uses."""


class Seen(NamedTuple):
    """An outcome, and what the other views showed at the same time."""

    outcome: Outcome
    metrics: dict[str, dict[tuple[str, ...], float]]
    doctor: tuple[int, str]
    stacks: str
    """What the doctor prints with ``--stacks``; "" but for one scenario."""

    @property
    def snapshot(self) -> RunSnapshot:
        """The snapshot, which must be there."""
        assert self.outcome.snapshot is not None
        return self.outcome.snapshot


@pytest.fixture(scope="module")
def seen() -> Iterator[dict[Scenario, Seen]]:
    """All at once, for a collective has to wait for ten seconds before it is a hang."""
    found = {}
    for outcome in outcomes(TEN, at_once=len(TEN)):
        assert outcome.node is not None
        text, stacks = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(text):
            code = main(["doctor", outcome.node.address])
        if outcome.scenario == REDUCER:
            with contextlib.redirect_stdout(stacks):
                main(["doctor", outcome.node.address, "--stacks"])
        metrics = outcome.node.metrics("r")
        found[outcome.scenario] = Seen(outcome, metrics, (code, text.getvalue()), stacks.getvalue())
        outcome.node.close()
    yield found


def the(seen: dict[Scenario, Seen], fault: str) -> Seen:
    """The first one with a fault."""
    return next(found for scenario, found in seen.items() if scenario.fault == fault)


@pytest.mark.parametrize("scenario", TEN, ids=lambda scenario: scenario.name)
def test_the_first_line_names_the_cause_and_the_rank(
    seen: dict[Scenario, Seen], scenario: Scenario
) -> None:
    outcome, (code, text) = seen[scenario].outcome, seen[scenario].doctor
    assert outcome.right_seconds is not None, (outcome.first_said, outcome.line)
    assert not run_state(seen[scenario].snapshot).startswith("running")
    judged = first_lines(seen[scenario].snapshot)
    assert judged.health in (Health.STALLED, Health.DYING, Health.DEAD)
    assert code == 1 and "!!" in text


def test_ranks_that_sleep_are_stalled(seen: dict[Scenario, Seen]) -> None:
    """Nothing is in flight and all processes live; the verdict does not say that the run runs."""
    snapshot, metrics = the(seen, "idle").snapshot, the(seen, "idle").metrics
    finding = next(f for f in snapshot.findings if f.rule == "stalled")
    assert finding.severity == "critical" and "in asleep" in finding.text
    assert "ranks 0, 1 are" in finding.text or finding.text.count("faults.py:") == 2
    step = next(s.step for s in seen if s.fault == "idle")
    assert run_state(snapshot) == f"stalled after step {step - 1}"
    assert any(labels[1:] == ("stalled", "critical") for labels in metrics["zeromon_finding"])


def test_a_hang_in_the_reducer_of_ddp_is_named(seen: dict[Scenario, Seen]) -> None:
    """The collective that C++ issued, the rank that waits, and the line at which the other rank is."""
    snapshot = seen[REDUCER].snapshot
    hang = snapshot.hangs[0]
    assert (hang.kind, hang.op, hang.waiting) == ("a member has not come", "all_reduce", (0,))
    assert (hang.missing, hang.nbytes) == ((1,), 4 * (64 * 64 + 64) * 4)
    finding = next(f for f in snapshot.findings if f.rule == "collective_in_flight")
    assert finding.rank == 1 and "in asleep" in finding.text
    _, waiting, missing = seen[REDUCER].stacks.split("Python stack of rank ")
    assert "backward (torch" in waiting and "asleep (faults.py" in missing


def test_a_hung_collective_is_a_metric(seen: dict[Scenario, Seen]) -> None:
    """How long it has been in flight, and each rank's role in it."""
    snapshot, metrics = seen[REDUCER].snapshot, seen[REDUCER].metrics
    hang = snapshot.hangs[0]
    assert metrics["zeromon_collective_in_flight_seconds"]["0",] > 10
    roles = {
        (rank, role)
        for rank, group, kind, op, role in metrics["zeromon_hang"]
        if (group, kind, op) == (hang.group, hang.kind, hang.op)
    }
    assert roles == {("0", "waiting"), ("1", "missing")}


def test_the_doctor_prints_the_stacks(seen: dict[Scenario, Seen]) -> None:
    assert "Python stack of rank" in seen[REDUCER].doctor[1]


@pytest.mark.long
def test_two_hundred_drawn_scenarios() -> None:
    """Prints what was not right at once; 95 of 100 must be."""
    done = list(_carried_out(drawn(200)))
    right = [outcome for outcome in done if outcome.is_right_at_once]
    print(f"{len(right)} of {len(done)} first lines are right with the first critical finding")
    for outcome in done:
        if not outcome.is_right_at_once:
            print(f"  {outcome.scenario.name}: {outcome.first_said!r}, later {outcome.line!r}")
    assert len(right) >= 0.95 * len(done)


@pytest.mark.long
def test_every_strategy_and_fault() -> None:
    """Prints a table of seconds from the fault to the right first line."""
    every = [Scenario(strategy, fault) for strategy in STRATEGIES for fault in CAUSES]
    seconds = {o.scenario: o.right_seconds for o in _carried_out(every)}
    print(f"{'':13}" + "".join(f"{fault:>8}" for fault in CAUSES))
    for strategy in STRATEGIES:
        row = [seconds[Scenario(strategy, fault)] for fault in CAUSES]
        cells = ("none" if s is None else f"{s:.1f}" for s in row)
        print(f"{strategy:13}" + "".join(f"{cell:>8}" for cell in cells))
    known = [s for s in seconds.values() if s is not None]
    print(f"median {statistics.median(known):.1f} s, longest {max(known):.1f} s")
    assert len(known) == len(every) and max(known) <= MOST_SECONDS


def _carried_out(scenarios: list[Scenario]) -> Iterator[Outcome]:
    for outcome in outcomes(scenarios, at_once=3):
        assert outcome.node is not None
        outcome.node.close()
        yield outcome._replace(node=None, snapshot=None)  # two hundred would hold too many files
