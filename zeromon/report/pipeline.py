"""The stages of a pipeline, as text. Pure."""

from zeromon.readout.pipeline import ACTIONS, bubble_text, pipeline_text, slowest_text
from zeromon.report.table import table
from zeromon.snapshot import RunSnapshot
from zeromon.units import human_seconds

_MOST_STAGES = 64


def pipeline(run: RunSnapshot) -> str:
    """What each stage computes and waits for, and the bubble of each rank; "" without a pipeline."""
    parts = [(rank.rank, rank.pipeline) for rank in run.ranks if rank.pipeline is not None]
    if not parts:
        return ""
    stages = sorted(
        ((stage.stage, rank, stage) for rank, row in parts for stage in row.own),
        key=lambda item: item[:2],
    )
    used = [a for a in ACTIONS if any(a in stage.seconds for *_, stage in stages)]
    rows = [
        (
            str(number),
            str(rank),
            *(human_seconds(stage.seconds[a]) if a in stage.seconds else "-" for a in used),
            human_seconds(stage.wait_seconds),
        )
        for number, rank, stage in stages[:_MOST_STAGES]
    ]
    head = ("stage", "rank", *(a.replace("_", " ") for a in used), "messages, a call")
    title = f"Pipeline: {pipeline_text(parts[0][1])} (seconds of one micro-batch, last ten calls)"
    lines = [title, *([table(head, rows)] if rows else [])]
    lines += [f"  rank {rank}: {bubble_text(row)}" for rank, row in parts[:_MOST_STAGES]]
    slowest = {text: None for _, row in parts if (text := slowest_text(row))}
    return "\n".join([*lines, *(f"  {text}" for text in slowest)])
