"""Communication by dimension of the parallelism: dp_shard, tp, pp and so on. Pure."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from zeromon.base.units import human_ratio, human_seconds
from zeromon.ring.codes import StageAction, operation_by_name
from zeromon.ring.strategy import MODEL_PARALLEL, Dim, dim_by_name
from zeromon.snapshot import CollectiveStatsRow, RankSnapshot, RunSnapshot
from zeromon.snapshot.communication import CollectiveRow, Dimension, PipelineRow, bus_factor
from zeromon.snapshot.levels import UNTIMED


@dataclass(frozen=True, slots=True, kw_only=True)
class DimensionRow:
    """The communication of a rank in one dimension; means per timed step over the last ones."""

    dimension: Dimension
    calls: float
    nbytes: float
    exposed_seconds: float | None
    """None where too many collectives of the dimension are not timed."""
    busbw_bytes_per_second: float | None


def by_dimension(rank: RankSnapshot) -> tuple[DimensionRow, ...]:
    """The dimensions in which *rank* communicates, the most exposed first, unknown ones before."""
    rows = [_dim_row(rank, d) for d in rank.dimensions if d.used and _says_something(rank, d)]
    return tuple(
        sorted(rows, key=lambda r: (r.exposed_seconds is not None, -(r.exposed_seconds or 0.0)))
    )


def _says_something(rank: RankSnapshot, dimension: Dimension) -> bool:
    """Returns whether it has collectives, or splits the model, so that some must be there."""
    return sum(_calls_of(rank, dimension.name)) > 0 or dim_by_name(dimension.name) in MODEL_PARALLEL


def _dim_row(rank: RankSnapshot, dimension: Dimension) -> DimensionRow:
    traffic = of_dimension(rank, dimension.name)
    timed = is_timed(rank, dimension.name)
    return DimensionRow(
        dimension=dimension,
        calls=sum(row.calls for row in traffic),
        nbytes=sum(row.nbytes for row in traffic),
        exposed_seconds=sum(row.exposed_seconds for row in traffic) if timed else None,
        busbw_bytes_per_second=mean_busbw(traffic),
    )


def of_dimension(rank: RankSnapshot, name: str) -> list[CollectiveStatsRow]:
    """The rows of the dimension *name*."""
    return [row for row in rank.communication.traffic if row.dim == name]


def is_timed(rank: RankSnapshot, name: str) -> bool:
    """Returns whether the dimension has collectives, and nearly all are timed or of control steps."""
    timed, untimed = _calls_of(rank, name)
    return timed > 0 and untimed <= UNTIMED * (timed + untimed)


_MAX_CONTROL_SHARE = 0.25
"""At most every eighth step is a control step: where more is not timed, no hook sees it."""


def _calls_of(rank: RankSnapshot, name: str) -> tuple[int, int]:
    """The collectives of the dimension: those that hooks time, and the others."""
    rows = [row for row in rank.communication.collectives if row.dim == name]
    groups = {row.label for row in rank.communication.groups if row.dim == name}
    untimed = sum(rank.communication.unattributed.get(label, 0) for label in groups) + sum(
        map(_missed_in, rows)
    )
    return sum(row.count - _missed_in(row) for row in rows), untimed


def _missed_in(row: CollectiveRow) -> int:
    if not row.seconds:
        return row.count
    missing = row.count - row.timed
    is_ddp = not row.timed  # its reducer times a backward as a whole
    return 0 if is_ddp or missing <= _MAX_CONTROL_SHARE * row.count else missing


def mean_busbw(rows: Iterable[CollectiveStatsRow]) -> float | None:
    """The bus bandwidth of all *rows* together, by the bytes of each; None where none has one."""
    moved = duration = 0.0
    for row in rows:
        factor = bus_factor(operation_by_name(row.op), row.group_size)
        if factor and row.busbw_bytes_per_second:
            moved += factor * row.nbytes
            duration += factor * row.nbytes / row.busbw_bytes_per_second
    return moved / duration if duration > 0 else None


def is_worth_showing(rank: RankSnapshot) -> bool:
    """Returns whether dimensions say more than groups: there are several, or one splits the model."""
    used = [dim for dim in rank.dimensions if dim.used and dim.size > 1]
    return len(used) > 1 or any(dim_by_name(dim.name) in MODEL_PARALLEL for dim in used)


def untimed_dimensions(rank: RankSnapshot) -> list[str]:
    """The names of the dimensions whose exposed time is unknown."""
    return [row.dimension.name for row in by_dimension(rank) if row.exposed_seconds is None]


def exposed_by_dimension(rank: RankSnapshot) -> str:
    """``tp 30.0 ms, dp_shard 5.0 ms``: exposed a step; "" where there is one dimension only."""
    rows = [row for row in by_dimension(rank) if row.exposed_seconds is None or row.exposed_seconds]
    if len(rows) < 2:
        return ""
    return ", ".join(f"{row.dimension.name} {human_seconds(row.exposed_seconds)}" for row in rows)


# ---- metrics: by what a dimension is for, which is bounded, and not by its name --------------------


def dim_groups(rank: RankSnapshot) -> list[tuple[Dim, str, str, str]]:
    """Dimension, label, size and nodes of each process group; "" for an unknown number of nodes."""
    groups = {
        (dim_by_name(row.dim), row.group, str(row.group_size), str(row.nodes or ""))
        for row in rank.communication.collectives
        if row.dim
    }
    return sorted(groups)


def dim_totals(
    rank: RankSnapshot, measure: Callable[[CollectiveRow], float | None]
) -> list[tuple[tuple[Dim], float]]:
    """A total of the collectives, added up over the groups of each dimension."""
    totals: dict[tuple[Dim], float] = {}
    for row in rank.communication.collectives:
        value = measure(row) if row.dim else None
        if value is not None:
            key = (dim_by_name(row.dim),)
            totals[key] = totals.get(key, 0.0) + value
    return sorted(totals.items())


def dim_exposed(rank: RankSnapshot) -> list[tuple[tuple[Dim], float]]:
    """The exposed seconds of each dimension; without those of which too much is not timed."""
    unknown = {
        dim_by_name(name)
        for name in {r.dim for r in rank.communication.collectives}
        if not is_timed(rank, name)
    }
    totals = dim_totals(rank, lambda row: row.exposed_seconds)
    return [(key, seconds) for key, seconds in totals if key[0] not in unknown]


def dim_busbw(rank: RankSnapshot) -> list[tuple[tuple[Dim], float | None]]:
    """The bus bandwidth of each dimension; None without a collective that has one."""
    return [
        (
            (dim,),
            mean_busbw(
                row for row in rank.communication.traffic if row.dim and dim_by_name(row.dim) is dim
            ),
        )
        for dim in Dim
    ]


# ---- the pipeline of stages in words ------------------------------------------------------------

ACTIONS = tuple(action.label for action in StageAction if action is not StageAction.CALL)
"""The actions of a stage on a micro-batch, in the order of a table's columns."""


def pipeline_text(row: PipelineRow) -> str:
    """``1F1B, 4 stages, 8 micro-batches``."""
    return f"{row.schedule}, {row.stages} stages, {row.micro_batches} micro-batches"


def bubble_text(row: PipelineRow) -> str:
    """``bubble 31.0 % (schedule alone: 27.3 %)``; ``bubble n/a: ...`` where it is unknown."""
    bubble = row.bubble
    if bubble is None:
        return f"bubble n/a: {row.unknown or 'no other rank is known'}"
    ideal = human_ratio(bubble.ideal_ratio)
    return f"bubble {human_ratio(bubble.measured_ratio)} (schedule alone: {ideal})"


def slowest_text(row: PipelineRow) -> str:
    """Which stage computes longest; "" where that is unknown."""
    bubble = row.bubble
    if bubble is None or not 0 <= bubble.slowest_stage < len(row.stage_ranks):
        return ""
    rank = row.stage_ranks[bubble.slowest_stage]
    longest, mean = human_seconds(bubble.slowest_seconds), human_seconds(bubble.mean_seconds)
    return (
        f"stage {bubble.slowest_stage} (rank {rank}) is the slowest: {longest} per micro-batch, "
        f"mean of all stages {mean}"
    )


def pipeline_lines(run: RunSnapshot) -> list[str]:
    """A sentence for each rank of a pipeline, and one for the slowest stage of each pipeline."""
    sentences, described = [], set()
    for rank in run.ranks:
        row = rank.communication.pipeline
        if row is None:
            continue
        sentences.append(f"rank {rank.rank}: {pipeline_text(row)}; {bubble_text(row)}")
        slowest = slowest_text(row)
        if slowest and row.stage_ranks not in described:
            described.add(row.stage_ranks)
            sentences.append(slowest)
    return sentences
