"""Where the time of a step goes."""

from __future__ import annotations

from dataclasses import replace

import pytest
from builders import MS, rank, summary

from zeromon.readout.breakdown import (
    PARTS,
    PHASES,
    exposed_is_known,
    own_seconds,
    rank_parts,
    step_parts,
)
from zeromon.ring.codes import Phase

STEPS = tuple(
    summary(n, phase_ns=(5 * MS, 30 * MS, 50 * MS, 10 * MS, 5 * MS, 0),
            phase_exposed_ns=(0, 4 * MS, 6 * MS, 0, 0, 0))
    for n in range(1, 30)
)  # fmt: skip


def test_the_parts_of_a_step_are_the_step() -> None:
    """Exposed communication is taken out of the phase that it was in, and nothing is counted twice."""
    parts = rank_parts(rank(recent=STEPS))
    assert tuple(parts) == PARTS
    assert sum(parts.values()) == pytest.approx(0.1)
    assert (parts["forward"], parts["backward"]) == (pytest.approx(0.026), pytest.approx(0.044))
    assert parts["exposed"] == pytest.approx(0.010)


def test_where_waiting_was_not_timed_it_stays_in_its_phase() -> None:
    for untimed in ({"phase_exposed_ns": ()}, {"idle": True}):
        one = rank(recent=tuple(replace(step, **untimed) for step in STEPS))  # type: ignore[arg-type]
        parts = rank_parts(one)
        assert (parts["exposed"], parts["forward"]) == (0.0, pytest.approx(0.03))
        assert not exposed_is_known(one)
        assert own_seconds(one.steps.recent) == {}


def test_a_wait_is_never_longer_than_its_phase() -> None:
    parts = step_parts(summary(1, phase_ns=(0, 5, 0, 0, 0, 0), phase_exposed_ns=(0, 9, 0, 0, 0, 0)))
    assert (parts["forward"], parts["exposed"]) == (0, 5)


def test_control_steps_do_not_count_beside_timed_ones() -> None:
    slow = replace(STEPS[0], step=30, idle=True, phase_ns=(0, 900 * MS, 0, 0, 0, 0))
    assert rank_parts(rank(recent=(*STEPS, slow)))["forward"] == pytest.approx(0.026)


def test_own_seconds_are_the_parts_without_waiting() -> None:
    own, parts = own_seconds(STEPS), rank_parts(rank(recent=STEPS))
    assert own == {phase: parts[phase] for phase in PHASES}
    assert rank_parts(rank(recent=())) == {}


def test_every_phase_of_the_ring_has_its_part() -> None:
    assert {phase.label for phase in Phase} == set(PHASES)
