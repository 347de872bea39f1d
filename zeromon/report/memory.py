"""Memory and offload of a run, as text. Pure."""

from collections.abc import Sequence

from zeromon.base.units import human_bytes, human_rate, human_ratio, human_seconds, signed
from zeromon.memory.reconcile import role_bytes, unattributed_memory
from zeromon.readout.breakdown import workers_text
from zeromon.readout.figures import RISK
from zeromon.readout.text import UNATTRIBUTED_NAMES, memory_unknown
from zeromon.report.table import Column, aligned_table, column_table
from zeromon.snapshot import Disk, ExpectedRow, RankSnapshot, RunSnapshot
from zeromon.snapshot.focus import first_counted


def memory_block(ranks: Sequence[RankSnapshot]) -> str:
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
    notes = dict.fromkeys(f"  {reason}" for rank in ranks if (reason := memory_unknown(rank)))
    return "\n".join([f"Memory at the last sample\n{rows}", *notes])


def by_role(run: RunSnapshot) -> str:
    """Memory by role on the first rank that told it, measured against predicted; "" without any."""
    rank = first_counted(run.ranks)
    if rank is None:
        return ""
    expected = {row.role: row for row in rank.expected}
    rows: list[tuple[str, ...]] = [
        (name.replace("_", " "), *_place_cells(rank, name), *_expected_cells(expected.get(name)))
        for name in dict.fromkeys([*expected, *(r.role for r in rank.roles)])
    ]
    rows = [row for row in rows if any(cell not in ("-", "0 B") for cell in row[1:])]
    for leftover in unattributed_memory(rank):
        cells = ["-", "-", "-"]
        cells[("device", "host").index(leftover.place)] = human_bytes(leftover.nbytes)
        rows.append((UNATTRIBUTED_NAMES[leftover.kind], *cells, "-", "-", "-"))
    header = ("role", "device", "host", "disk", "plain ZeRO", "predicted", "unexplained")
    sampled = "at the optimizer step; gathered parameters at their peak"
    blocks = [f"Memory of rank {rank.rank} by role ({sampled})\n{aligned_table(header, rows)}"]
    causes = sorted(
        ((cause.nbytes, row.role, cause.text) for row in rank.expected for cause in row.causes),
        reverse=True,
    )
    if causes:
        cause_lines = [
            f"  +{human_bytes(nbytes):>9}  {role.replace('_', ' ')}: {sentence}"
            for nbytes, role, sentence in causes[:_MAX_CAUSES]
        ]
        blocks.append("Memory beyond the ZeRO formula\n" + "\n".join(cause_lines))
    return "\n\n".join(blocks)


_MAX_CAUSES = 8


def _place_cells(rank: RankSnapshot, role: str) -> tuple[str, str, str]:
    """The bytes of *role* on device, host and disk."""
    sizes = role_bytes(rank, role) or (0, 0, 0)
    device, host, disk = (human_bytes(n) if n else "-" for n in sizes)
    return device, host, disk


def _expected_cells(row: ExpectedRow | None) -> tuple[str, str, str]:
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
    peaks = {move.path: rank.path_peak(move.path) for move in rank.transfers}
    rows = column_table(
        rank.transfers,
        ("path", lambda move: move.path.replace("_", " ")),
        ("bytes", lambda move: human_bytes(move.nbytes)),
        ("a step", lambda move: human_bytes(move.step_bytes)),
        ("speed", lambda move: human_rate(move.bytes_per_second)),
        ("best", lambda move: human_rate(move.best_bytes_per_second or None)),
        ("at most", lambda move: human_rate(peaks[move.path][0])),
        ("waited", lambda move: human_seconds(move.blocked_seconds) if move.seconds else "n/a"),
    )
    limits = dict.fromkeys(
        f"{human_rate(rate)} is what {source}" for rate, source in peaks.values() if rate
    )
    blocks = [rows, *(f"  {sentence}" for sentence in limits), *_offload_disk_lines(rank.disk)]
    return f"Offload of rank {rank.rank}\n" + "\n".join(blocks)


def _offload_disk_lines(disk: Disk | None) -> list[str]:
    """Its space, and what it did in the last seconds."""
    if disk is None or disk.free_bytes is None:
        return []
    device = f" ({disk.device})" if disk.device else ""
    free = f"{human_bytes(disk.free_bytes)} of {human_bytes(disk.total_bytes)} free"
    sentences = [f"  {disk.path}{device}: {free}"]
    if disk.busy_ratio is not None:
        sentences.append(f"  busy {human_ratio(disk.busy_ratio)} of the last ten seconds")
    if disk.busy_bytes_per_second is not None:
        sentences.append(
            f"  while busy it moves {human_rate(disk.busy_bytes_per_second)}, with "
            f"{disk.requests_at_once or 0.0:.1f} requests at once; at best it moved "
            f"{human_rate(disk.best_busy_bytes_per_second)}"
        )
    return sentences
