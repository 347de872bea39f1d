"""Bubbles: what the ranks of a pipeline measured against what their schedule allows. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from zeromon.ring.codes import StageAction
from zeromon.snapshot import PipelineBubble, PipelineRow, RankSnapshot
from zeromon.stats.pipeline import balanced, order_of, simulate, with_more

_ACTIONS = {action.label: action for action in StageAction}


def with_bubbles(ranks: tuple[RankSnapshot, ...]) -> tuple[RankSnapshot, ...]:
    """Returns *ranks* with the bubble of each that is a part of a pipeline, or why it is unknown."""
    rows = {rank.rank: rank.pipeline for rank in ranks if rank.pipeline is not None}
    if not rows:
        return ranks
    return tuple(
        replace(rank, pipeline=_judged(rank.rank, rows)) if rank.rank in rows else rank
        for rank in ranks
    )


def _judged(rank: int, rows: dict[int, PipelineRow]) -> PipelineRow:
    own = rows[rank]
    members = sorted(set(own.stage_ranks))
    if why := _unknown(own, members, rows):
        return replace(own, unknown=why)
    bubble = _bubble(members.index(rank), [rows[member] for member in members])
    if bubble is None:
        return replace(own, unknown="its ranks have not recorded whole calls of one schedule")
    return replace(own, bubble=bubble)


def _unknown(own: PipelineRow, members: Sequence[int], rows: dict[int, PipelineRow]) -> str:
    if own.on_device:
        return "what a stage computes on a device is not timed yet"
    away = [member for member in members if member not in rows]
    if away:
        return f"this node does not see rank {away[0]} of the pipeline"
    if any(not rows[member].span_seconds for member in members):
        return "no call of the schedule has been timed yet"
    return ""


def _bubble(at: int, rows: Sequence[PipelineRow]) -> PipelineBubble | None:
    """The bubble of the rank at position *at*; None where the orders of the ranks do not fit."""
    if len({stage.stage for row in rows for stage in row.own}) < rows[at].stages:
        return None
    orders = [order_of(row.order) for row in rows]
    seconds = {
        (stage.stage, _ACTIONS[label]): spent
        for row in rows
        for stage in row.own
        for label, spent in stage.seconds.items()
    }
    ideal, even = simulate(orders, seconds), simulate(orders, balanced(seconds))
    if ideal is None or even is None:
        return None
    span, shortest = max(row.span_seconds or 0.0 for row in rows), max(run.span for run in ideal)
    if not span or not shortest:
        return None
    stages = [stage for row in rows for stage in row.own]
    slowest = max(stages, key=lambda stage: stage.work_seconds)
    return PipelineBubble(
        measured_ratio=1 - (rows[at].busy_seconds or 0.0) / span,
        ideal_ratio=1 - ideal[at].busy / shortest,
        span_seconds=span,
        ideal_seconds=shortest,
        doubled_seconds=with_more(shortest, max(run.busy for run in ideal)),
        balanced_seconds=max(run.span for run in even),
        slowest_stage=slowest.stage,
        slowest_seconds=slowest.work_seconds,
        mean_seconds=sum(stage.work_seconds for stage in stages) / len(stages),
    )
