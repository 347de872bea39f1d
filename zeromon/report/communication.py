"""Communication of a run as text: by operation, by unit, by size, and the pipeline's stages. Pure."""

from zeromon.focus import most_exposed
from zeromon.readout.dimensions import (
    ACTIONS,
    bubble_text,
    by_dimension,
    is_worth_showing,
    pipeline_text,
    slowest_text,
)
from zeromon.readout.figures import TRAFFIC
from zeromon.readout.text import exposed_unknown, in_graphs
from zeromon.report.table import column_table, field_table, table
from zeromon.snapshot import CollectiveRow, RankSnapshot, RunSnapshot
from zeromon.snapshot.communication import SIZE_BOUNDS
from zeromon.units import (
    human_bytes,
    human_calls,
    human_count,
    human_rate,
    human_ratio,
    human_seconds,
)


def communication(run: RunSnapshot) -> str:
    """The collectives of the first rank by operation and group, in all."""
    rank = run.ranks[0]
    rows = column_table(
        rank.collectives,
        ("op", lambda row: row.op),
        ("group", lambda row: f"{row.group}({row.group_size})"),
        ("calls", lambda row: human_count(row.count)),
        ("bytes", lambda row: human_bytes(row.nbytes)),
        ("time", lambda row: human_seconds(row.seconds) if row.seconds else "-"),
        ("exposed", lambda row: human_seconds(row.exposed_seconds) if row.seconds else "-"),
        ("busbw", lambda row: human_rate(_bus_bandwidth(rank, row))),
    )
    why = exposed_unknown(rank) if rank.steps else ""
    nothing = f"  n/a: {why}" if why else "  none"
    lines = [f"Communication of rank {rank.rank}", rows if rank.collectives else nothing]
    if rank.untimed:
        unknown = sum(rank.unattributed.values())
        of_them = f", {human_count(unknown)} of them of unknown operation" if unknown else ""
        lines.append(
            f"  {human_count(sum(rank.untimed.values()))} collectives were counted but not timed"
            f" one by one{of_them}"
        )
    if text := in_graphs(rank):
        lines.append(f"  {text}")
    return "\n".join(lines)


def _bus_bandwidth(rank: RankSnapshot, row: CollectiveRow) -> float | None:
    """The bandwidth of the last steps; where calls are timed by bucket, as by DDP, that of all units."""
    units = [
        one for one in rank.traffic
        if (one.op, one.group) == (row.op, row.group) and one.busbw_bytes_per_second
    ]  # fmt: skip
    seconds = sum(one.nbytes / (one.busbw_bytes_per_second or 1.0) for one in units)
    return row.busbw_bytes_per_second or (
        sum(u.nbytes for u in units) / seconds if seconds else None
    )


def dimensions(run: RunSnapshot) -> str:
    """The communication of each dimension of the parallelism; "" where the groups say the same."""
    rank = most_exposed(run.ranks) or run.ranks[0]
    if not is_worth_showing(rank):
        return ""
    rows = column_table(
        by_dimension(rank),
        ("dimension", lambda row: row.dimension.name),
        ("ranks", lambda row: human_count(row.dimension.size)),
        ("nodes", lambda row: human_count(row.dimension.nodes or None)),
        ("calls", lambda row: human_calls(row.calls)),
        ("bytes", lambda row: human_bytes(row.nbytes)),
        ("exposed", lambda row: human_seconds(row.exposed_seconds)),
        ("busbw", lambda row: human_rate(rate) if (rate := row.busbw_bytes_per_second) else "-"),
    )
    parallel = rank.data_parallel_ranks
    count = "an unknown number" if parallel is None else human_count(parallel)
    return (
        f"Dimensions of rank {rank.rank}, a step (timed collectives)\n{rows}\n"
        f"  data-parallel ranks: {count} of {human_count(rank.world_size)}"
    )


_OF_UNITS = ("unit", "op", "phase", "calls", "bytes", "time", "waits", "exposed", "busbw", "best")


def units(run: RunSnapshot, most: int) -> str:
    """The communication by unit or bucket, on the rank that waits most; "" without any."""
    rank = most_exposed(run.ranks)
    if rank is None or not rank.traffic:
        return ""
    lines = [
        f"What rank {rank.rank} waits for, a step (mean of the last ten)",
        field_table(rank.traffic[:most], TRAFFIC, *_OF_UNITS),
    ]
    rest = rank.traffic[most:]
    if rest:
        exposed = sum(row.exposed_seconds for row in rest)
        lines.append(f"  ... and {len(rest)} more, {human_seconds(exposed)} exposed")
    if rank.wait_seconds is not None:
        waits = human_seconds(rank.wait_seconds)
        lines.append(
            f"  in all it waits {waits} a step for ranks that come later; rows may overlap"
        )
    peak = _link_peaks(rank)
    return "\n".join(lines + ([peak] if peak else []))


def _link_peaks(rank: RankSnapshot) -> str:
    links = rank.links
    if links is None:
        return ""
    parts = []
    for rate, what, kind, far in (
        (links.device_bytes_per_second, "between devices", links.device_kind, False),
        (links.network_bytes_per_second, "between nodes", links.network_kind, True),
    ):
        best = max(
            (r.best_busbw_bytes_per_second for r in rank.traffic if (r.nodes > 1) is far), default=0
        )
        if rate and best:
            parts.append(
                f"{human_rate(rate)} {what} ({kind}), of which the best is {human_ratio(best / rate)}"
            )
    return f"  the links' peak: {'; '.join(parts)}" if parts else ""


def sizes(run: RunSnapshot) -> str:
    """How large the collectives of the rank that waits most are; "" without any."""
    rank = most_exposed(run.ranks)
    if rank is None or not rank.sizes:
        return ""
    bounds = [*(f"<= {human_bytes(bound).replace('.0', '')}" for bound in SIZE_BOUNDS), "larger"]
    shown = [i for i in range(len(bounds)) if any(row.calls[i] for row in rank.sizes)]
    rows = [
        (row.op, *(human_count(row.calls[i]) if row.calls[i] else "-" for i in shown))
        for row in rank.sizes
    ]
    header = ("op", *(bounds[i] for i in shown))
    return f"Collectives of rank {rank.rank} by size (timed steps)\n{table(header, rows)}"


def inspected(run: RunSnapshot) -> str:
    """The measurements of NCCL Inspector on the rank that waits most; "" where it is off."""
    rank = most_exposed(run.ranks) or run.ranks[0]
    note = f"  {rank.inspector_note}" if rank.inspector_note else ""
    if not rank.inspected and not note:
        return ""
    rows = column_table(
        rank.inspected,
        ("op", lambda row: row.op),
        ("group", lambda row: f"{row.group or 'n/a'}({row.size})"),
        ("communicator", lambda row: row.communicator),
        ("newest", lambda row: human_count(row.number)),
        ("bytes", lambda row: human_bytes(row.nbytes)),
        ("time", lambda row: human_seconds(row.seconds)),
        ("busbw", lambda row: human_rate(row.busbw_bytes_per_second)),
        ("records", lambda row: human_count(row.records)),
        ("timed by", lambda row: row.timing or "n/a"),
    )
    parts = [f"NCCL Inspector, rank {rank.rank}", rows if rank.inspected else "", note]
    return "\n".join(part for part in parts if part)


def checked(rank: RankSnapshot) -> str:
    """How far the live figure is from the last trace; "" without one."""
    if rank.check is None or rank.check.error_ratio is None:
        return ""
    steps = ", ".join(map(str, rank.check.steps[:4])) + (", ..." if rank.check.steps[4:] else "")
    return (
        f"rank {rank.rank}: the live exposed time is {rank.check.error_ratio * 100:+.1f} % off the "
        f"trace of step {steps}"
    )


_MOST_STAGES = 64


def pipeline(run: RunSnapshot) -> str:
    """The computation and waits of each stage, and the bubble of each rank; "" without a pipeline."""
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
