"""Communication of a run as text: by operation, by unit, and the pipeline's stages. Pure."""

from zeromon.base.units import counted, human_count, human_rate, human_ratio, human_seconds
from zeromon.readout.dimensions import (
    ACTIONS,
    bubble_text,
    by_dimension,
    is_worth_showing,
    pipeline_text,
    slowest_text,
)
from zeromon.readout.figures import BYTES, CALLS, COUNT, RATE, SECONDS
from zeromon.readout.tables import TRAFFIC_COLUMNS, Column, aligned_table, pick_columns, text_table
from zeromon.readout.text import busbw_unknown, exposed_unknown, group_name, in_graphs, overlap_unknown
from zeromon.snapshot import RankSnapshot, RunSnapshot
from zeromon.snapshot.communication import CollectiveRow
from zeromon.snapshot.focus import most_exposed


def by_operation(run: RunSnapshot) -> str:
    """The collectives of the first rank by operation and group, in all."""
    rank = run.ranks[0]
    rows = text_table(
        rank.communication.collectives,
        Column("op", lambda row: row.op),
        Column("group", lambda row: f"{group_name(row.group, row.dim)}({row.group_size})"),
        Column("calls", lambda row: row.count, COUNT),
        Column("bytes", lambda row: row.nbytes, BYTES),
        Column("time", lambda row: row.seconds or None, SECONDS, unknown="-"),
        Column("exposed", lambda r: r.exposed_seconds if r.seconds else None, SECONDS, unknown="-"),
        Column("busbw", lambda row: _recent_bus_bandwidth(rank, row), RATE),
    )
    reason = exposed_unknown(rank) if rank.steps.watched_steps else ""
    nothing = f"  n/a: {reason}" if reason else "  none"
    blocks = [f"Communication of rank {rank.rank}", rows if rank.communication.collectives else nothing]
    if unknown := sum(rank.communication.unattributed.values()):
        blocks.append(f"  {counted(unknown, 'collective')} of unknown operation, untimed")
    if note := in_graphs(rank):
        blocks.append(f"  {note}")
    if rank.communication.collectives and (reason := overlap_unknown(rank)):
        blocks.append(f"  overlap n/a: {reason}")
    if reason := busbw_unknown(rank):
        blocks.append(f"  busbw n/a: {reason}")
    return "\n".join(blocks)


def _recent_bus_bandwidth(rank: RankSnapshot, row: CollectiveRow) -> float | None:
    """The bandwidth of the last steps; where calls are timed by bucket, as by DDP, that of all units."""
    units = [
        unit for unit in rank.communication.traffic
        if (unit.op, unit.group) == (row.op, row.group) and unit.busbw_bytes_per_second
    ]  # fmt: skip
    seconds = sum(unit.nbytes / (unit.busbw_bytes_per_second or 1.0) for unit in units)
    return row.busbw_bytes_per_second or (sum(u.nbytes for u in units) / seconds if seconds else None)


def dim_block(run: RunSnapshot) -> str:
    """The communication of each dimension of the parallelism; "" where the groups say the same."""
    rank = most_exposed(run.ranks) or run.ranks[0]
    if not is_worth_showing(rank):
        return ""
    rows = text_table(
        by_dimension(rank),
        Column("dimension", lambda row: row.dimension.name),
        Column("ranks", lambda row: row.dimension.size, COUNT),
        Column("nodes", lambda row: row.dimension.nodes or None, COUNT),
        Column("calls", lambda row: row.calls, CALLS),
        Column("bytes", lambda row: row.nbytes, BYTES),
        Column("exposed", lambda row: row.exposed_seconds, SECONDS),
        Column("busbw", lambda row: row.busbw_bytes_per_second or None, RATE, unknown="-"),
    )
    parallel = rank.data_parallel_ranks
    count = "an unknown number" if parallel is None else human_count(parallel)
    return (
        f"Dimensions of rank {rank.rank}, per step (timed collectives)\n{rows}\n"
        f"  data-parallel ranks: {count} of {human_count(rank.world_size)}"
    )


_OF_UNITS = pick_columns(
    TRAFFIC_COLUMNS, "unit", "op", "phase", "calls", "bytes", "time", "waits", "exposed", "busbw", "best"
)
_MIN_SHOWN = 0.01
"""A unit with less of the exposed time is not listed."""


def by_unit(run: RunSnapshot, limit: int) -> str:
    """The communication by unit or bucket, on the rank that waits most; "" without any."""
    rank = most_exposed(run.ranks)
    if rank is None or not rank.communication.traffic:
        return ""
    traffic = rank.communication.traffic
    total = sum(row.exposed_seconds for row in traffic)
    visible_rows = [row for row in traffic[:limit] if row.exposed_seconds >= _MIN_SHOWN * total]
    blocks = [
        f"Waits of rank {rank.rank} per step (mean of the last ten steps)",
        text_table(visible_rows, *_OF_UNITS),
    ]
    if hidden := len(traffic) - len(visible_rows):
        exposed = total - sum(row.exposed_seconds for row in visible_rows)
        blocks.append(f"  ... and {hidden} more, {human_seconds(exposed)} exposed")
    if rank.communication.wait_seconds is not None:
        waits = human_seconds(rank.communication.wait_seconds)
        blocks.append(f"  total wait for late ranks: {waits} per step; rows may overlap")
    peak = _link_peaks_text(rank)
    return "\n".join(blocks + ([peak] if peak else []))


def _link_peaks_text(rank: RankSnapshot) -> str:
    links = rank.communication.links
    if links is None:
        return ""
    phrases = []
    for rate, span, kind, net in (
        (links.device_bytes_per_second, "between devices", links.device_kind, False),
        (links.network_bytes_per_second, "between nodes", links.network_kind, True),
    ):
        top = max(
            (r.best_busbw_bytes_per_second for r in rank.communication.traffic if (r.nodes > 1) is net),
            default=0,
        )
        if rate and top:
            phrases.append(
                f"{human_rate(rate)} {span} ({kind}), the best collective reaches "
                f"{human_ratio(top / rate)}"
            )
    return f"  the links' peak: {'; '.join(phrases)}" if phrases else ""


def nccl_block(run: RunSnapshot) -> str:
    """The measurements of NCCL Inspector on the rank that waits most; "" where it is off."""
    rank = most_exposed(run.ranks) or run.ranks[0]
    note = f"  {rank.communication.inspector_note}" if rank.communication.inspector_note else ""
    if not rank.communication.inspected and not note:
        return ""
    rows = text_table(
        rank.communication.inspected,
        Column("op", lambda row: row.op),
        Column("group", lambda row: f"{row.group or 'n/a'}({row.size})"),
        Column("communicator", lambda row: row.communicator),
        Column("newest", lambda row: row.number, COUNT),
        Column("bytes", lambda row: row.nbytes, BYTES),
        Column("time", lambda row: row.seconds, SECONDS),
        Column("busbw", lambda row: row.busbw_bytes_per_second, RATE),
        Column("records", lambda row: row.records, COUNT),
        Column("timed by", lambda row: row.timing or "n/a"),
    )
    blocks = [f"NCCL Inspector, rank {rank.rank}", rows if rank.communication.inspected else "", note]
    return "\n".join(block for block in blocks if block)


def check_text(rank: RankSnapshot) -> str:
    """How far the live figure is from the last trace; "" without one."""
    check = rank.requests.check
    if check is None or check.error_ratio is None:
        return ""
    steps = ", ".join(map(str, check.steps[:4])) + (", ..." if check.steps[4:] else "")
    return (
        f"rank {rank.rank}: the live exposed time differs by {check.error_ratio * 100:+.1f} % from "
        f"the trace of step {steps}"
    )


_MAX_STAGES = 64


def stage_block(run: RunSnapshot) -> str:
    """The computation and waits of each stage, and the bubble of each rank; "" without a pipeline."""
    pipes = [
        (rank.rank, rank.communication.pipeline)
        for rank in run.ranks
        if rank.communication.pipeline is not None
    ]
    if not pipes:
        return ""
    stages = sorted(
        ((stage.stage, rank, stage) for rank, row in pipes for stage in row.own),
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
        for number, rank, stage in stages[:_MAX_STAGES]
    ]
    head = ("stage", "rank", *(a.replace("_", " ") for a in used), "messages, a call")
    title = f"Pipeline: {pipeline_text(pipes[0][1])} (seconds of one micro-batch, last ten calls)"
    blocks = [title, *([aligned_table(head, rows)] if rows else [])]
    blocks += [f"  rank {rank}: {bubble_text(row)}" for rank, row in pipes[:_MAX_STAGES]]
    slowest = {sentence: None for _, row in pipes if (sentence := slowest_text(row))}
    return "\n".join([*blocks, *(f"  {sentence}" for sentence in slowest)])
