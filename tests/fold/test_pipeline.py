"""A pipeline from its records to the bubble: stages, micro-batches, waits, and what is not known."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from builders import MS, changed, folded, rank, run, span, state, step

from zeromon.diagnosis.arrivals import with_bubbles
from zeromon.export.prometheus.metrics import Writer
from zeromon.fold.summarize import summarize_rank
from zeromon.readout.communication_report import stage_block
from zeromon.readout.dimensions import pipeline_lines
from zeromon.ring.codes import Flag, Op, Phase, StageAction
from zeromon.ring.events import Done, Event, PhaseSpan, StageRun
from zeromon.snapshot import RankSnapshot

FACTS = {
    "schedule": "GPipe", "stages": 2, "micro_batches": 4, "stage_ranks": [0, 1], "device": "cpu"
}  # fmt: skip
STARTS = {0: (0, 5, 10, 15, 40, 50, 60, 70), 1: (5, 10, 15, 20, 30, 40, 50, 60)}
"""GPipe with forwards of 5 ms and backwards of 10: the makespan is 5 x 15 ms."""


def ran(action: StageAction, start_ms: float, end_ms: float, stage: int, chunk: int) -> StageRun:
    return StageRun(round(end_ms * MS), action, round(start_ms * MS), stage, chunk)


def waited(end_ms: float, blocked_ms: float) -> Done:
    """A receive that blocked the rank until *end_ms*; sends and receives are numbered below 0."""
    end, blocked = round(end_ms * MS), round(blocked_ms * MS)
    return Done(end, Op.RECV, Phase.OTHER, Flag.SPAN_KNOWN, 1, 0, 100, end - blocked, blocked, -1)


def calls(stage: int, count: int = 3, schedule: int = 1) -> list[Event]:
    """Calls of GPipe with four micro-batches on the rank of *stage*, one in each step."""
    events: list[Event] = []
    for number in range(1, count + 1):
        begin = number * 100.0
        if stage:
            events.append(waited(begin + 5, 5))
        for at, start in enumerate(STARTS[stage]):
            if at == 4 and not stage:
                events.append(waited(begin + 40, 20))
            action = StageAction.FORWARD if at < 4 else StageAction.BACKWARD
            lasts = 5 if at < 4 else 10
            events.append(ran(action, begin + start, begin + start + lasts, stage, at % 4))
        events += [
            StageRun(round((begin + 80) * MS), StageAction.CALL, round(begin * MS), schedule, 4),
            step(number, begin, begin + 100),
        ]
    return events


def of(number: int, **facts: Any) -> RankSnapshot:
    made = summarize_rank(folded(calls(number), state(pipeline=FACTS | facts)))
    return replace(made, rank=number)


def test_the_bubble_is_measured_against_that_of_the_schedule() -> None:
    ranks = with_bubbles((of(0), of(1)))
    for number, one in enumerate(ranks):
        row = one.communication.pipeline
        assert row is not None and row.bubble is not None
        assert (row.schedule, row.stages, row.micro_batches) == ("GPipe", 2, 4)
        assert row.order.startswith(f"{number}F0 {number}F1") and row.order.endswith(f"{number}B3")
        assert row.own[0].seconds == {"forward": 0.005, "backward": 0.010}
        assert row.busy_seconds == pytest.approx(0.060)
        assert row.bubble.ideal_seconds == pytest.approx(0.075)
        assert row.bubble.ideal_ratio == pytest.approx(1 / 5)  # (p - 1) / (m + p - 1)
        assert row.bubble.measured_ratio == pytest.approx(1 - 60 / 80)  # rank 0 ends after 80 ms
        assert row.bubble.doubled_seconds == pytest.approx(0.0675)
        assert row.bubble.balanced_seconds == pytest.approx(0.075)


def test_waits_for_messages_belong_to_the_stage_and_micro_batch_that_follow() -> None:
    first, second = of(0).communication.pipeline, of(1).communication.pipeline
    assert first is not None and second is not None
    assert first.own[0].micro_batch_waits == pytest.approx((0.020, 0, 0, 0))
    assert second.own[0].micro_batch_waits == pytest.approx((0.005, 0, 0, 0))
    assert second.own[0].wait_seconds == pytest.approx(0.005)


def test_the_first_step_and_control_steps_do_not_count() -> None:
    """The first step connects; a control step writes no record of a stage."""
    into = state(pipeline=FACTS)
    folded(calls(0, 1), into)
    row = summarize_rank(into).communication.pipeline
    assert row is not None and row.span_seconds is None and row.own == ()
    control = [e for e in calls(0, 2)[10:] if not isinstance(e, StageRun)]
    row = summarize_rank(folded(control, into)).communication.pipeline
    assert row is not None and row.span_seconds is None


def test_a_call_whose_records_are_lost_in_part_does_not_count() -> None:
    events = calls(0, 4)
    del events[-4:-2]  # of the last call
    row = summarize_rank(folded(events, state(pipeline=FACTS))).communication.pipeline
    assert row is not None and row.span_seconds == pytest.approx(0.080)
    assert row.order.count(" ") == 7


def test_calls_of_another_schedule_are_forgotten() -> None:
    """Even where that one has more actions than the present."""
    into = folded(calls(0), state(pipeline=FACTS))
    fewer = [e for e in calls(0, 3, 2) if not isinstance(e, StageRun) or e.micro_batch != 3]
    row = summarize_rank(folded(fewer, into)).communication.pipeline
    assert row is not None and row.order == "0F0 0F1 0F2 0B0 0B1 0B2"


@pytest.mark.parametrize(
    ("ranks", "why"),
    [
        ((of(0),), "this node does not see rank 1 of the pipeline"),
        ((of(0, device="cuda"), of(1, device="cuda")), "on a device"),
        ((of(0), replace(of(0, stage_ranks=[1, 0]), rank=1)), "whole calls of one schedule"),
        (
            (
                changed(of(0), pipeline=summarize_rank(state(pipeline=FACTS)).communication.pipeline),
                of(1),
            ),
            "no call",
        ),
    ],
)
def test_an_unknown_bubble_has_a_reason_and_no_figure(ranks: tuple[RankSnapshot, ...], why: str) -> None:
    first = with_bubbles(ranks)[0]
    assert first.communication.pipeline is not None and first.communication.pipeline.bubble is None
    assert why in first.communication.pipeline.unknown
    snapshot = run(*with_bubbles(ranks))
    assert f"bubble n/a: {first.communication.pipeline.unknown}" in stage_block(snapshot)
    assert f"bubble n/a: {first.communication.pipeline.unknown}" in "\n".join(pipeline_lines(snapshot))
    assert "zeromon_pipeline_bubble_ratio{" not in metrics(first)


def metrics(one: RankSnapshot) -> str:
    return Writer().write([run(one)], None, openmetrics=False).decode()


def test_views_show_the_stages_and_the_slowest() -> None:
    ranks = with_bubbles((of(0), of(1)))
    text = stage_block(run(*ranks))
    assert "Pipeline: GPipe, 2 stages, 4 micro-batches" in text
    assert "rank 0: bubble 25.0 % (schedule alone: 20.0 %)" in text
    assert "stage 0 (rank 0) is the slowest: 15.0 ms per micro-batch" in text
    assert 'basis="ideal",' in metrics(ranks[0]) or 'basis="ideal"}' in metrics(ranks[0])
    assert stage_block(run(rank())) == ""


def test_backwards_of_one_micro_step_count_once() -> None:
    """A schedule runs a backward for each micro-batch; all of them are one micro-step."""
    again = PhaseSpan(80 * MS, Phase.BACKWARD, Flag.CONTINUED, 70 * MS)
    made = folded([span(Phase.BACKWARD, 40, 60), again])
    assert made.micro_steps == 1
    assert made.window.phase_ns[Phase.BACKWARD] == 30 * MS
