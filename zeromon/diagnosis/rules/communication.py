"""Exposed communication, stragglers and distant nodes, whatever the framework. Pure."""

import math
import re
import statistics
from collections.abc import Iterable

from zeromon.base.units import human_ratio, human_seconds
from zeromon.diagnosis.rule import Match, Waits, rule
from zeromon.diagnosis.rules.common import ACROSS_NODES, MIN_SHARE, Gain, exposed_seconds, fill_remedy
from zeromon.readout.breakdown import WINDOW, own_seconds
from zeromon.readout.dimensions import (
    bubble_text,
    exposed_by_dimension,
    of_dimension,
    pipeline_text,
    slowest_text,
)
from zeromon.readout.text import busiest_line, straggler_sentence, unit_name
from zeromon.ring.strategy import Dim, dim_by_name
from zeromon.snapshot import RankSnapshot, RunSnapshot, Severity
from zeromon.snapshot.communication import PipelineBubble, PipelineRow, Straggler
from zeromon.snapshot.finding import Remedy
from zeromon.snapshot.focus import SETTLED_STEPS, most_exposed, worst_rank
from zeromon.snapshot.levels import AVOIDABLE, EXPOSED, LATE, POOR_OVERLAP


@rule("ZM309")
def straggler(run: RunSnapshot) -> Iterable[Match]:
    """The other ranks wait for one rank or node, step after step."""
    for late in run.stragglers:
        prefix = f"{'' if late.whole_node else 'on '}node {late.node}: " if late.node else ""
        lacks = Waits(late.share, LATE, late.rank, excess=True)
        action = _where_it_is_late(run, late)
        yield Match(f"{prefix}{straggler_sentence(late)}", late.rank, waits=lacks, action=action)


_EVEN_SHARE = 0.75  # of the steps have batches of one size, where batches are even


@rule("ZM323")
def uneven_work(run: RunSnapshot) -> Iterable[Match]:
    """The ranks wait for each other by turns, and none is late step after step."""
    settled = [rank for rank in run.ranks if rank.steps.watched_steps >= SETTLED_STEPS]
    waits = [(r.communication.wait_seconds or 0.0) / (r.steps.mean_seconds or math.inf) for r in settled]
    # A rank that is always the last waits for nobody
    if run.stragglers or len(settled) < max(2, len(run.ranks)) or min(waits) < MIN_SHARE:
        return
    share, first = statistics.fmean(waits), settled[0]
    samples = [step.samples for step in first.steps.recent[-WINDOW:] if step.samples > 0] or [0]
    # The last batch of an epoch may be smaller
    is_uneven = samples.count(statistics.mode(samples)) < _EVEN_SHARE * len(samples)
    evidence = f"the ranks wait for each other by turns, {human_ratio(share)} of a step"
    if is_uneven:
        evidence += f"; rank {first.rank} has {min(samples):,} to {max(samples):,} samples per step"
    # Ranks that compute on the cores of one host delay each other by turns, whatever their work
    if share >= LATE.warning and (is_uneven or first.device != "cpu"):
        yield Match(evidence, waits=Waits(share, LATE))


def _where_it_is_late(run: RunSnapshot, late: Straggler) -> str:
    """Returns where to look on a rank or node that is late."""
    rank = next((rank for rank in run.ranks if rank.rank == late.rank), None)
    name = late.straggler_name
    if late.cause:
        return f"Remove what holds up {name}, or run without that node."
    if late.phases[:1] == ("other",) and rank is not None and (line := busiest_line(rank)):
        return f"Look at {line}, where {name} is most often while others wait."
    if "data_wait" in late.phases:
        return f"Look at what {name} loads: longer samples, a slower disk, fewer workers."
    return f"Compare {name} with others: longer batches, a throttled device, other processes."


_FAR_SECONDS = 0.005
"""A round trip that a network within one data centre does not take."""
_FAR_TIMES = 5
"""How many times as long as to the other nodes."""


@rule("ZM316", severity=Severity.WARNING)
def distant_node(run: RunSnapshot) -> Iterable[Match]:
    """A round trip to one node takes much longer than to the others.

    Where the round trips to all nodes are long, the leader is what they have in common.
    """
    trips = {n: n.round_trip_seconds for n in run.nodes if n.round_trip_seconds is not None}
    share = max((rank.communication.exposed_ratio or 0.0 for rank in run.ranks), default=0.0)
    far_trips = {node: trip for node, trip in trips.items() if trip >= _FAR_SECONDS}
    nearer = [trip for node, trip in trips.items() if node not in far_trips]
    if not far_trips or share < EXPOSED.warning or run.ended:
        return
    if not nearer and len(far_trips) > 1:
        far_trips = {run.nodes[0]: statistics.median(far_trips.values())}
    for node, trip in far_trips.items():
        contrast = f", to the others {human_seconds(statistics.median(nearer))}" if nearer else ""
        if not nearer or trip >= _FAR_TIMES * statistics.median(nearer):
            yield Match(
                f"a round trip to node {node.node} takes {human_seconds(trip)}{contrast}; "
                f"{human_ratio(share)} of a step waits for communication",
                node.first_rank,
            )


@rule("ZM317")
def tensor_parallel_across_nodes(run: RunSnapshot) -> Iterable[Match]:
    """A tensor-parallel group spans nodes, and the run waits for it. Reported once."""
    rank = worst_rank(run)
    far_dims = [d for d in rank.dimensions if d.nodes > 1] if rank is not None else []
    dimension = next((d for d in far_dims if d.used and dim_by_name(d.name) is Dim.TP), None)
    if rank is None or dimension is None:
        return
    waits = exposed_seconds(of_dimension(rank, dimension.name))
    share = rank.share_of_step(waits)
    if share < MIN_SHARE:
        return
    evidence = (
        f"{dimension.name} of {dimension.size} ranks spans {dimension.nodes} nodes; its collectives "
        f"wait {human_seconds(waits)} per step ({human_ratio(share)})"
    )
    gain = ACROSS_NODES.seconds(waits)
    remedy = fill_remedy("innermost_dimension", gain, device=rank.device_type, dimension=dimension.name)
    yield Match(evidence, rank.rank, remedy, waits=Waits(share, AVOIDABLE))


@rule("ZM301")
def exposed_communication(run: RunSnapshot) -> Iterable[Match]:
    """The run waits for its communication. Reported once, for the most exposed rank."""
    rank = most_exposed(run.ranks)
    if (
        rank is None
        or rank.communication.exposed_ratio is None
        or rank.steps.watched_steps < SETTLED_STEPS
    ):
        return
    share = rank.communication.exposed_ratio
    if share < EXPOSED.warning:
        return
    top_row = rank.communication.traffic[0] if rank.communication.traffic else None
    detail = ""
    if top_row is not None and top_row.exposed_seconds > 0:
        call = f"{top_row.op}, {top_row.phase.replace('_', ' ')}"
        detail = f"; most in {unit_name(top_row.unit) or 'calls without a unit'} ({call}), "
        detail += human_seconds(top_row.exposed_seconds)
    late = rank.communication.wait_seconds or 0.0
    if late > 0.5 * (rank.communication.exposed_seconds or 0.0):
        detail += f"; {human_seconds(late)} per step waits for late ranks"
    evidence = (
        f"{human_ratio(share)} of a step ({human_seconds(rank.communication.exposed_seconds)}) waits "
        f"for communication{detail}"
    )
    overlap, level = rank.communication.overlap_ratio, EXPOSED
    if overlap is not None and overlap < POOR_OVERLAP and share >= AVOIDABLE.critical:
        level = AVOIDABLE
        hidden = f"{human_ratio(overlap)} of the" if overlap >= 0.0005 else "no"
        evidence += f"; {hidden} communication overlaps with compute"
    if dimensions := exposed_by_dimension(rank):
        evidence += f"; by dimension: {dimensions}"
    yield Match(evidence, rank.rank, _other_backend(rank), waits=Waits(share, level))


_AT_MOST = Gain(0.0, 1.0)


def _other_backend(rank: RankSnapshot) -> Remedy | None:
    """NCCL's earlier backend, where the default one lets the compute stream wait in each bucket.

    Since torch 2.15 "nccl" is another backend, which waits for each future of DDP's reducer.
    """
    torch = rank.config.process.get("packages", {}).get("torch", "")
    is_known = re.match(r"2\.(1[5-9]|[2-9]\d)\.", torch)
    backend = rank.config.process.get("ddp_backend", "")
    if (
        is_known is None
        or re.fullmatch(r"(.*cuda:)?nccl2?", backend) is None
        or not rank.waits_in_each_bucket
    ):
        return None
    hideable = min(
        rank.communication.exposed_seconds or 0.0, own_seconds(rank.steps.recent).get("backward", 0.0)
    )
    return fill_remedy("earlier_backend", _AT_MOST.seconds(hideable))


# ---- the bubble of a pipeline of stages ---------------------------------------------------------


@rule("ZM320")
def pipeline_bubble(run: RunSnapshot) -> Iterable[Match]:
    """The stages of a pipeline idle, and more micro-batches or another split would shorten that.

    Reported once for each pipeline, for the rank with the largest bubble.
    """
    largest: dict[tuple[int, ...], tuple[RankSnapshot, PipelineRow, PipelineBubble]] = {}
    for rank in run.ranks:
        row = rank.communication.pipeline
        if row is None or row.bubble is None or rank.steps.watched_steps < SETTLED_STEPS:
            continue
        previous = largest.get(row.stage_ranks)
        if previous is None or row.bubble.measured_ratio > previous[2].measured_ratio:
            largest[row.stage_ranks] = rank, row, row.bubble
    for rank, row, bubble in largest.values():
        by_more = bubble.ideal_seconds - bubble.doubled_seconds
        by_split = bubble.ideal_seconds - bubble.balanced_seconds
        share = max(by_more, by_split) / bubble.span_seconds
        if share >= MIN_SHARE:
            remedy = _new_split(row, by_split) if by_split > by_more else _add_batches(row, by_more)
            sentences = filter(None, (bubble_text(row), slowest_text(row), pipeline_text(row)))
            evidence = f"pipeline {'; '.join(sentences)}"
            yield Match(evidence, rank.rank, remedy, waits=Waits(share, AVOIDABLE))


def _add_batches(row: PipelineRow, gain: float) -> Remedy:
    count = row.micro_batches
    return fill_remedy("more_micro_batches", _AT_MOST.seconds(gain), count=count, doubled=2 * count)


def _new_split(row: PipelineRow, gain: float) -> Remedy:
    bubble = row.bubble
    assert bubble is not None
    surplus = human_seconds(bubble.slowest_seconds - bubble.mean_seconds)
    seconds, stage = _AT_MOST.seconds(gain), bubble.slowest_stage
    return fill_remedy("move_layers", seconds, stage=stage, surplus=surplus)
