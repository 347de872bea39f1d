"""The pipeline of stages in words. Pure."""

from zeromon.ring.events import StageAction
from zeromon.snapshot import PipelineRow, RunSnapshot
from zeromon.units import human_ratio, human_seconds

ACTIONS = tuple(action.label for action in StageAction if action is not StageAction.CALL)
"""What a stage computes for a micro-batch, in the order of a table's columns."""


def pipeline_text(row: PipelineRow) -> str:
    """``1F1B, 4 stages, 8 micro-batches``."""
    return f"{row.schedule}, {row.stages} stages, {row.micro_batches} micro-batches"


def bubble_text(row: PipelineRow) -> str:
    """``bubble 31.0 %, 27.3 % by its schedule``; ``bubble n/a: ...`` where it is unknown."""
    bubble = row.bubble
    if bubble is None:
        return f"bubble n/a: {row.unknown or 'no other rank is known'}"
    ideal = human_ratio(bubble.ideal_ratio)
    return f"bubble {human_ratio(bubble.measured_ratio)}, {ideal} by its schedule"


def slowest_text(row: PipelineRow) -> str:
    """Which stage computes longest; "" where that is unknown."""
    bubble = row.bubble
    if bubble is None or not 0 <= bubble.slowest_stage < len(row.stage_ranks):
        return ""
    rank = row.stage_ranks[bubble.slowest_stage]
    longest, mean = human_seconds(bubble.slowest_seconds), human_seconds(bubble.mean_seconds)
    return (
        f"stage {bubble.slowest_stage} (rank {rank}) is the slowest: {longest} a micro-batch, "
        f"mean of all stages {mean}"
    )


def pipeline_lines(run: RunSnapshot) -> list[str]:
    """A sentence for each rank of a pipeline, and one for the slowest stage of each pipeline."""
    lines, told = [], set()
    for rank in run.ranks:
        row = rank.pipeline
        if row is None:
            continue
        lines.append(f"rank {rank.rank}: {pipeline_text(row)}; {bubble_text(row)}")
        slowest = slowest_text(row)
        if slowest and row.stage_ranks not in told:
            told.add(row.stage_ranks)
            lines.append(slowest)
    return lines
