"""The bubble of a pipeline of stages. Pure."""

from collections.abc import Iterable

from zeromon.diagnosis.rule import Match, Waits, rule
from zeromon.diagnosis.rules.common import LEAST_SHARE
from zeromon.focus import SETTLED_STEPS
from zeromon.levels import AVOIDABLE
from zeromon.readout.pipeline import bubble_text, pipeline_text, slowest_text
from zeromon.snapshot import (
    ConfigFormat,
    PipelineBubble,
    PipelineRow,
    RankSnapshot,
    Remedy,
    RunSnapshot,
)
from zeromon.units import human_seconds


@rule("ZM320")
def pipeline_bubble(run: RunSnapshot) -> Iterable[Match]:
    """The stages of a pipeline idle, and more micro-batches or another split would shorten that.

    Reported once for each pipeline, for the rank with the largest bubble.
    """
    worst: dict[tuple[int, ...], tuple[RankSnapshot, PipelineRow, PipelineBubble]] = {}
    for rank in run.ranks:
        row = rank.pipeline
        if row is None or row.bubble is None or rank.steps < SETTLED_STEPS:
            continue
        known = worst.get(row.stage_ranks)
        if known is None or row.bubble.measured_ratio > known[2].measured_ratio:
            worst[row.stage_ranks] = rank, row, row.bubble
    for rank, row, bubble in worst.values():
        by_more = bubble.ideal_seconds - bubble.doubled_seconds
        by_split = bubble.ideal_seconds - bubble.balanced_seconds
        share = max(by_more, by_split) / bubble.span_seconds
        if share >= LEAST_SHARE:
            remedy = _split(row, by_split) if by_split > by_more else _more(row, by_more)
            text = f"{pipeline_text(row)}: {bubble_text(row)}; {slowest_text(row)}"
            yield Match(text, rank.rank, remedy, waits=Waits(share, AVOIDABLE))


def _more(row: PipelineRow, gain: float) -> Remedy:
    count = row.micro_batches
    return Remedy(
        cause="each stage waits while the pipeline fills and drains, once a call of the schedule",
        dialect=ConfigFormat.PIPELINE,
        diff=f"- n_microbatches={count}\n+ n_microbatches={2 * count}",
        gain_low_seconds=0.0,
        gain_high_seconds=gain,
        price="micro-batches of half the size, which a device may compute less efficiently",
    )


def _split(row: PipelineRow, gain: float) -> Remedy:
    bubble = row.bubble
    assert bubble is not None
    surplus = human_seconds(bubble.slowest_seconds - bubble.mean_seconds)
    return Remedy(
        cause="every stage waits for the slowest one, micro-batch after micro-batch",
        dialect=ConfigFormat.PIPELINE,
        diff=f"- stage {bubble.slowest_stage}: {surplus} a micro-batch more than the mean\n"
        f"+ move that much of its layers to other stages",
        gain_low_seconds=0.0,
        gain_high_seconds=gain,
        price="none, where a layer is small enough to move",
    )
