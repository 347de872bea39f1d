"""Memory and offload of a run, as text. Pure."""

from collections.abc import Sequence

from zeromon.focus import first_counted
from zeromon.memory.reconcile import role_bytes, unattributed_memory
from zeromon.readout.breakdown import workers_text
from zeromon.readout.figures import RISK
from zeromon.readout.text import UNATTRIBUTED_NAMES, memory_unknown
from zeromon.report.table import Column, column_table, table
from zeromon.snapshot import Disk, ExpectedRow, RankSnapshot, RunSnapshot
from zeromon.units import human_bytes, human_rate, human_ratio, human_seconds, signed


def memory(ranks: Sequence[RankSnapshot]) -> str:
    """The memory of each rank at its last sample, and its out-of-memory risk."""
    workers: Column[RankSnapshot] = ("workers", lambda rank: workers_text(rank.workers))
    rows = column_table(
        ranks,
        ("rank", lambda rank: str(rank.rank)),
        ("RSS", lambda rank: human_bytes(rank.rss_bytes)),
        *([workers] if any(rank.workers for rank in ranks) else []),
        ("allocated", lambda rank: human_bytes(m.allocated_bytes) if (m := rank.memory) else "-"),
        ("reserved", lambda rank: human_bytes(m.reserved_bytes) if (m := rank.memory) else "-"),
        ("headroom", lambda rank: human_bytes(m.headroom_bytes) if (m := rank.memory) else "-"),
        ("risk", RISK.text),
    )
    lines = dict.fromkeys(f"  {why}" for rank in ranks if (why := memory_unknown(rank)))
    return "\n".join([f"Memory at the last sample\n{rows}", *lines])


def roles(run: RunSnapshot) -> str:
    """Memory by role on the first rank that told it, measured against predicted; "" without any."""
    rank = first_counted(run.ranks)
    if rank is None:
        return ""
    expected = {row.role: row for row in rank.expected}
    rows: list[tuple[str, ...]] = [
        (name.replace("_", " "), *_places(rank, name), *_compared(expected.get(name)))
        for name in dict.fromkeys([*expected, *(r.role for r in rank.roles)])
    ]
    rows = [row for row in rows if any(cell not in ("-", "0 B") for cell in row[1:])]
    for rest in unattributed_memory(rank):
        cells = ["-", "-", "-"]
        cells[("device", "host").index(rest.place)] = human_bytes(rest.nbytes)
        rows.append((UNATTRIBUTED_NAMES[rest.kind], *cells, "-", "-", "-"))
    header = ("role", "device", "host", "disk", "plain ZeRO", "predicted", "unexplained")
    when = "at the optimizer step; gathered parameters at their peak"
    blocks = [f"Memory of rank {rank.rank} by role ({when})\n{table(header, rows)}"]
    causes = sorted(
        ((cause.nbytes, row.role, cause.text) for row in rank.expected for cause in row.causes),
        reverse=True,
    )
    if causes:
        lines = [
            f"  +{human_bytes(nbytes):>9}  {role.replace('_', ' ')}: {text}"
            for nbytes, role, text in causes[:_MOST_CAUSES]
        ]
        blocks.append("On top of the plain arithmetic of ZeRO\n" + "\n".join(lines))
    return "\n\n".join(blocks)


_MOST_CAUSES = 8


def _places(rank: RankSnapshot, role: str) -> tuple[str, str, str]:
    """The bytes of *role* on device, host and disk."""
    places = role_bytes(rank, role) or (0, 0, 0)
    device, host, disk = (human_bytes(n) if n else "-" for n in places)
    return device, host, disk


def _compared(row: ExpectedRow | None) -> tuple[str, str, str]:
    if row is None:
        return "-", "-", "-"
    unexplained = row.unexplained_bytes
    return (
        human_bytes(row.plain_bytes) if row.plain_bytes else "-",
        human_bytes(row.predicted_bytes),
        "n/a" if unexplained is None else signed(human_bytes, unexplained) if unexplained else "0",
    )


def offload(run: RunSnapshot) -> str:
    """Offloaded state on the move, beside what its way could do; "" without any."""
    rank = next((r for r in run.ranks if r.transfers), None)
    if rank is None:
        return ""
    peaks = {way.path: rank.path_peak(way.path) for way in rank.transfers}
    rows = column_table(
        rank.transfers,
        ("path", lambda way: way.path.replace("_", " ")),
        ("bytes", lambda way: human_bytes(way.nbytes)),
        ("a step", lambda way: human_bytes(way.step_bytes)),
        ("speed", lambda way: human_rate(way.bytes_per_second)),
        ("best", lambda way: human_rate(way.best_bytes_per_second or None)),
        ("at most", lambda way: human_rate(peaks[way.path][0])),
        ("waited", lambda way: human_seconds(way.blocked_seconds) if way.seconds else "n/a"),
    )
    says = dict.fromkeys(
        f"{human_rate(rate)} is what {what}" for rate, what in peaks.values() if rate
    )
    lines = [rows, *(f"  {line}" for line in says), *_disk_lines(rank.disk)]
    return f"Offload of rank {rank.rank}\n" + "\n".join(lines)


def _disk_lines(disk: Disk | None) -> list[str]:
    """Its space, and what it did in the last seconds."""
    if disk is None or disk.free_bytes is None:
        return []
    on = f" ({disk.device})" if disk.device else ""
    free = f"{human_bytes(disk.free_bytes)} of {human_bytes(disk.total_bytes)} free"
    lines = [f"  {disk.path}{on}: {free}"]
    if disk.busy_ratio is not None:
        lines.append(f"  busy {human_ratio(disk.busy_ratio)} of the last ten seconds")
    if disk.busy_bytes_per_second is not None:
        lines.append(
            f"  while busy it moves {human_rate(disk.busy_bytes_per_second)}, with "
            f"{disk.requests_at_once or 0.0:.1f} requests at once; at best it moved "
            f"{human_rate(disk.best_busy_bytes_per_second)}"
        )
    return lines
