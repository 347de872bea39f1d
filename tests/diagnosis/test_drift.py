"""Ranks that drift apart in steps while their collectives match."""

from __future__ import annotations

from dataclasses import replace

import pytest
from builders import changed, rank, run

from zeromon.diagnosis.engine import advise
from zeromon.diagnosis.stragglers import widest_drift
from zeromon.snapshot import RankSnapshot
from zeromon.snapshot.communication import GroupProgress


def at(number: int, step: int, sequence: int, **facts: bool) -> RankSnapshot:
    """A rank whose last step ended at *sequence*; -1: the step called nothing in the group."""
    base = rank(number, last_step=step, watched_steps=step, **facts)
    group = GroupProgress(
        group_id="w", label="world", ranks=(0, 1), sequence=400, step_sequence=sequence
    )
    return changed(
        base,
        groups=(group,),
        traffic=tuple(replace(row, phase="backward") for row in base.communication.traffic),
    )


@pytest.mark.parametrize(("behind_at", "steps"), [(331, 78), (332, 73)])
def test_a_rank_ahead_in_the_same_collectives_is_named(behind_at: int, steps: int) -> None:
    apart = run(at(0, 80, 331), at(1, steps, behind_at))
    (finding,) = (f for f in advise(apart) if f.code == "ZM016")
    assert (finding.rank, finding.severity) == (0, "critical")
    assert finding.text.startswith(
        f"{80 - steps} steps ahead of rank 1 in the same collectives (80 against {steps})"
    )


@pytest.mark.parametrize(
    "ranks",
    [
        (at(0, 80, 331), at(1, 80, 331)),
        (at(0, 81, 335), at(1, 80, 331)),  # looked at a moment later
        (at(0, 83, 343), at(1, 80, 331)),  # the host of a device runs ahead
        (at(0, 81, -1), at(1, 80, 331)),  # a step without a collective of the group
        (at(0, 80, 331, joined=True), at(1, 73, 331, joined=True)),  # counted since other moments
        (rank(0, last_step=90), rank(1, last_step=20)),  # models of their own
    ],
)
def test_ranks_that_end_a_step_a_little_earlier_are_not_apart(ranks: tuple[RankSnapshot, ...]) -> None:
    assert widest_drift(run(*ranks)) is None
