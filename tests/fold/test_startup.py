"""Start-up is a span of its own and no part of step 1; the first step is in no mean."""

from __future__ import annotations

import pytest
from builders import MS, collective, folded, run, span, step

from zeromon.diagnosis.stragglers import longer_phases
from zeromon.fold.summarize import summarize_rank
from zeromon.readout.breakdown import rank_parts
from zeromon.readout.figures import EXPOSED, EXPOSED_SECONDS, STEP
from zeromon.readout.report import render_run
from zeromon.ring.codes import Phase
from zeromon.ring.events import Event, Start
from zeromon.snapshot import RankSnapshot

SETUP_MS = 7000


def short_run(steps: int = 6) -> RankSnapshot:
    """Seven seconds of set-up, a first step of one second that compiles, and others of 100 ms."""
    events: list[Event] = [
        *collective(5000, 5200, 200, sequence=1),  # the broadcast of the parameters
        span(Phase.DATA_WAIT, 6800, 6990),
        Start(6990 * MS, 0),
        Start(SETUP_MS * MS, 0),
    ]
    begin = float(SETUP_MS)
    for number in range(1, steps + 1):
        end = begin + (1000 if number == 1 else 100)
        events += [
            *collective(begin + 50, begin + 70, 20, sequence=number + 1),
            span(Phase.FORWARD, begin, end - 10),
            step(number, begin, end),
        ]
        begin = end
    return summarize_rank(folded(events))


def test_startup_is_a_span_and_no_part_of_the_first_step() -> None:
    one = short_run()
    assert one.ledger.startup_seconds == SETUP_MS / 1e3
    first = one.steps.recent[0]
    assert (first.seconds, first.collectives, first.exposed_ns) == (1.0, 1, 20 * MS)
    assert one.steps.phase_seconds["data_wait"] == 0
    assert sum(c.count for c in one.communication.collectives) == 7  # no collective is lost
    (row,) = one.communication.traffic
    assert row.calls == pytest.approx(1)
    text = render_run(run(one))
    assert "start-up  7.00 s until the first step" in text
    assert "forward 70.0 %, " in text and "own code 10.0 %" in text


def test_a_row_has_one_statistic_and_its_share_is_of_its_step() -> None:
    """20 of 100 ms: the first step of a second is in neither."""
    one = short_run()
    assert (one.steps.median_seconds, one.steps.mean_seconds, one.communication.exposed_seconds) == (
        0.1,
        0.1,
        0.02,
    )
    assert one.communication.exposed_ratio == pytest.approx(0.2)
    assert sum(rank_parts(one).values()) == pytest.approx(one.steps.mean_seconds)
    assert (STEP.text(one), EXPOSED_SECONDS.text(one)) == ("100.0 ms", "20.0 ms")
    assert EXPOSED.text(one) == "20.0 %"
    assert longer_phases(one, [one], 0.001) == ((), 0.0)


def test_a_run_of_one_step_shows_that_step() -> None:
    assert short_run(1).steps.mean_seconds == 1.0
