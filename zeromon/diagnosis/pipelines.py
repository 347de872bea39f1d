"""Bubbles: what the ranks of a pipeline measured against what their schedule allows. Pure."""

from collections.abc import Sequence
from dataclasses import replace

from zeromon.ring.codes import StageAction
from zeromon.snapshot import PipelineBubble, PipelineRow, RankSnapshot
from zeromon.stats.pipeline import balanced, order_of, simulate, with_more

_ACTIONS = {action.label: action for action in StageAction}


def with_bubbles(ranks: tuple[RankSnapshot, ...]) -> tuple[RankSnapshot, ...]:
    """Returns *ranks* with the bubble of each that is a part of a pipeline, or why it is unknown."""
    rows = {rank.rank: rank.pipeline for rank in ranks if rank.pipeline is not None}
    judged: dict[int, PipelineRow] = {}
    for rank, row in rows.items():
        if rank not in judged:
            judged |= _judged(row, rows) | judged
    return tuple(replace(r, pipeline=judged[r.rank]) if r.rank in judged else r for r in ranks)


def _judged(own: PipelineRow, rows: dict[int, PipelineRow]) -> dict[int, PipelineRow]:
    """The ranks of the pipeline of *own* that are among *rows*, with their bubbles."""
    members = sorted(set(own.stage_ranks))
    seen = [member for member in members if member in rows]
    if why := _unknown(own, members, rows):
        return {member: replace(rows[member], unknown=why) for member in seen}
    bubbles = _bubbles([rows[member] for member in members])
    if bubbles is None:
        why = "its ranks have not recorded whole calls of one schedule"
        return {member: replace(rows[member], unknown=why) for member in seen}
    return {m: replace(rows[m], bubble=b) for m, b in zip(members, bubbles, strict=True)}


def _unknown(own: PipelineRow, members: Sequence[int], rows: dict[int, PipelineRow]) -> str:
    if own.on_device:
        return "what a stage computes on a device is not timed yet"
    away = [member for member in members if member not in rows]
    if away:
        return f"this node does not see rank {away[0]} of the pipeline"
    if any(not rows[member].span_seconds for member in members):
        return "no call of the schedule has been timed yet"
    return ""


def _bubbles(rows: Sequence[PipelineRow]) -> list[PipelineBubble] | None:
    """The bubble of each rank of a pipeline; None where the orders of the ranks do not fit."""
    if len({stage.stage for row in rows for stage in row.own}) < rows[0].stages:
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
    return [
        PipelineBubble(
            measured_ratio=1 - (row.busy_seconds or 0.0) / span,
            ideal_ratio=1 - run.busy / shortest,
            span_seconds=span,
            ideal_seconds=shortest,
            doubled_seconds=with_more(shortest, max(run.busy for run in ideal)),
            balanced_seconds=max(run.span for run in even),
            slowest_stage=slowest.stage,
            slowest_seconds=slowest.work_seconds,
            mean_seconds=sum(stage.work_seconds for stage in stages) / len(stages),
        )
        for row, run in zip(rows, ideal, strict=True)
    ]
