"""Folds what the stages of a pipeline compute, and makes a rank's row of the pipeline."""

from collections.abc import Sequence
from statistics import fmean

from zeromon.fold.state import PipelineCall, RankState, folds
from zeromon.ring.events import StageAction, StageRun
from zeromon.snapshot import PipelineRow, StageRow
from zeromon.stats.pipeline import Act, text_of

_MOST_ACTIONS = 20_000


@folds(StageRun)
def _fold_stage(state: RankState, e: StageRun) -> None:
    pipeline = state.pipeline
    call = pipeline.now
    waited, pipeline.waited_ns = pipeline.waited_ns, 0
    if e.action is StageAction.CALL:
        pipeline.now = PipelineCall()
        if e.stage != pipeline.schedule:
            pipeline.schedule = e.stage
            pipeline.last.clear()
        if call.order and state.step:  # the first step connects and infers shapes
            pipeline.last.append(call)
        return
    act = Act(e.stage, e.action, e.micro_batch)
    row = call.spent_ns.setdefault((e.stage, e.action), [0, 0])
    if not call.order:
        call.first_ns = e.start_ns
    if waited:
        place = e.stage, e.micro_batch
        call.waited_ns[place] = call.waited_ns.get(place, 0) + waited
    if not call.order or call.order[-1] != act:  # the loss is a second part of a forward
        if len(call.order) < _MOST_ACTIONS:
            call.order.append(act)
        row[0] += 1
    row[1] += e.t_ns - e.start_ns
    call.busy_ns += e.t_ns - e.start_ns
    call.last_ns = e.t_ns


def pipeline_row(state: RankState) -> PipelineRow | None:
    """The rank's part of its pipeline, as means of the last calls; None without a pipeline."""
    facts = state.meta.get("pipeline")
    if not isinstance(facts, dict):
        return None
    order: Sequence[Act] = max((c.order for c in state.pipeline.last), key=len, default=())
    calls = [call for call in state.pipeline.last if len(call.order) == len(order)]
    return PipelineRow(
        schedule=str(facts.get("schedule", "")),
        stages=int(facts.get("stages", 0)),
        micro_batches=int(facts.get("micro_batches", 0)),
        stage_ranks=tuple(int(rank) for rank in facts.get("stage_ranks", ())),
        on_device=facts.get("device", "cpu") != "cpu",
        own=tuple(_stage_row(stage, calls) for stage in sorted({act.stage for act in order})),
        order=text_of(order),
        busy_seconds=_mean([call.busy_ns for call in calls]),
        span_seconds=_mean([call.span_ns for call in calls]),
    )


def _stage_row(stage: int, calls: Sequence[PipelineCall]) -> StageRow:
    seconds = {}
    for action in StageAction:
        found = [c.spent_ns[stage, action] for c in calls if (stage, action) in c.spent_ns]
        if found:
            seconds[action.label] = sum(ns for _, ns in found) / sum(n for n, _ in found) / 1e9
    chunks = 1 + max(act.micro_batch for act in calls[-1].order if act.stage == stage)
    waits = tuple(
        _mean([call.waited_ns.get((stage, chunk), 0) for call in calls]) or 0.0
        for chunk in range(chunks)
    )
    return StageRow(stage=stage, seconds=seconds, micro_batch_waits=waits)


def _mean(values: Sequence[int]) -> float | None:
    return fmean(values) / 1e9 if values else None
