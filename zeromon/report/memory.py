"""Memory and offload of a run, as text. Pure."""

from collections.abc import Sequence

from zeromon.focus import first_counted
from zeromon.memory.reconcile import role_bytes, unattributed_memory
from zeromon.readout.breakdown import workers_text
from zeromon.readout.figures import RISK
from zeromon.readout.text import UNATTRIBUTED_NAMES, memory_unknown
from zeromon.report.table import table
from zeromon.snapshot import Disk, ExpectedRow, RankSnapshot, RunSnapshot
from zeromon.units import human_bytes, human_rate, human_ratio, human_seconds, signed


def memory(ranks: Sequence[RankSnapshot]) -> str:
    """The memory of each rank at its last sample, and its out-of-memory risk."""
    header: tuple[str, ...] = (
        "rank",
        "RSS",
        "workers",
        "allocated",
        "reserved",
        "headroom",
        "risk",
    )
    rows: list[tuple[str, ...]] = []
    for rank in ranks:
        memory = rank.memory
        rows.append(
            (
                str(rank.rank),
                human_bytes(rank.rss_bytes),
                workers_text(rank.workers),
                human_bytes(memory.allocated_bytes) if memory else "-",
                human_bytes(memory.reserved_bytes) if memory else "-",
                human_bytes(memory.headroom_bytes) if memory else "-",
                RISK.text(rank),
            )
        )
    if not any(rank.workers for rank in ranks):
        header, rows = (*header[:2], *header[3:]), [(*row[:2], *row[3:]) for row in rows]
    lines = dict.fromkeys(f"  {why}" for rank in ranks if (why := memory_unknown(rank)))
    return "\n".join([f"Memory at the last sample\n{table(header, rows)}", *lines])


def roles(run: RunSnapshot) -> str:
    """Memory by role on the first rank that told it, measured against predicted; "" without any."""
    rank = first_counted(run.ranks)
    if rank is None:
        return ""
    rows: list[tuple[str, ...]] = [
        (
            name.replace("_", " "),
            *(_places(rank, name)),
            *_compared(next((e for e in rank.expected if e.role == name), None)),
        )
        for name in dict.fromkeys([*(e.role for e in rank.expected), *(r.role for r in rank.roles)])
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
        "n/a" if row.predicted_bytes is None else human_bytes(row.predicted_bytes),
        "n/a" if unexplained is None else signed(human_bytes, unexplained) if unexplained else "0",
    )


def offload(run: RunSnapshot) -> str:
    """Offloaded state on the move, beside what its way could do; "" without any."""
    rank = next((r for r in run.ranks if r.transfers), None)
    if rank is None:
        return ""
    peaks = {way.path: rank.path_peak(way.path) for way in rank.transfers}
    rows = [
        (
            way.path.replace("_", " "),
            human_bytes(way.nbytes),
            human_bytes(way.step_bytes),
            human_rate(way.bytes_per_second),
            human_rate(way.best_bytes_per_second or None),
            human_rate(peaks[way.path][0]),
            human_seconds(way.blocked_seconds) if way.seconds else "n/a",
        )
        for way in rank.transfers
    ]
    head = ("path", "bytes", "a step", "speed", "best", "at most", "waited")
    says = dict.fromkeys(
        f"{human_rate(rate)} is what {what}" for rate, what in peaks.values() if rate
    )
    lines = [table(head, rows), *(f"  {line}" for line in says), *_disk_lines(rank.disk)]
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
