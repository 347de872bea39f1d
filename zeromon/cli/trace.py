"""Reads Kineto traces: where the time of each rank's device went, to the nanosecond.

  zeromon trace analyze trace.json.gz                 one file, or one a rank
  zeromon trace analyze rank*.json --json             for scripts
  zeromon trace analyze rank*.json --html trace.html  a timeline to zoom into

The parts add up: compute + exposed communication + exposed copies + idle = span. Exposed is what no
compute hides. A file that is cut short gives what is whole, and says so. Exit code 2 when one is none.
"""

from __future__ import annotations

import argparse
import importlib
import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec

from zeromon.errors import TraceError
from zeromon.report import table
from zeromon.tracefile import read
from zeromon.traces import RankTrace, TraceData, analyze, lanes, waits
from zeromon.units import human_bytes, human_count, human_rate, human_ratio, human_seconds

_RANK_IN_NAME = re.compile(r"rank[_-]?(\d+)", re.IGNORECASE)
_MOST_ROWS = 10


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """``zeromon trace analyze FILE... [--json] [--html FILE]``"""
    verbs = parser.add_subparsers(metavar="ACTION", required=True)
    sub = verbs.add_parser(
        "analyze",
        help="where the time went",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    sub.add_argument("files", nargs="+", metavar="FILE", help="Kineto JSON, plain or gzip")
    sub.add_argument("--json", action="store_true", help="the same as JSON")
    sub.add_argument("--html", metavar="FILE", help="a timeline by rank (needs plotly)")
    sub.set_defaults(call=call)


def call(options: argparse.Namespace) -> int:
    """Reads each file, then says what they hold."""
    traces, ranks = [], []
    many = len(options.files) > 1
    for number, file in enumerate(options.files, 1):
        if many and sys.stderr.isatty():
            sys.stderr.write(f"\rzeromon: reading {number} of {len(options.files)} ...")
        data = read(Path(file))
        traces.append(data)
        ranks.append(analyze(data, _rank_of(data, number - 1)))
    if many and sys.stderr.isatty():
        sys.stderr.write("\r\x1b[K")
    ranks = _with_waits(traces, ranks)
    if options.html:
        write_html([(r.rank, data) for r, data in zip(ranks, traces, strict=True)], options.html)
    ranks = _told_apart(ranks)
    if options.json:
        sys.stdout.write(msgspec.json.encode({"ranks": ranks}).decode() + "\n")
    else:
        sys.stdout.write(as_text(ranks))
    return 0


def _rank_of(data: TraceData, otherwise: int) -> int:
    """As the trace says, else as its name says, else by its place on the command line."""
    if data.rank is not None:
        return data.rank
    found = _RANK_IN_NAME.search(data.name)
    return int(found.group(1)) if found else otherwise


def _told_apart(ranks: list[RankTrace]) -> list[RankTrace]:
    """In order of ranks; two files of one rank are both kept, and say so."""
    seen: set[int] = set()
    found = []
    for rank in sorted(ranks, key=lambda r: r.rank):
        note = f"another file says that it is of rank {rank.rank}, too"
        is_twin = rank.rank in seen
        seen.add(rank.rank)
        found.append(replace(rank, notes=(*rank.notes, note)) if is_twin else rank)
    return found


def _with_waits(traces: list[TraceData], ranks: list[RankTrace]) -> list[RankTrace]:
    found = waits(traces)
    if found is None:
        return ranks
    return [replace(r, wait_seconds=ns / 1e9) for r, ns in zip(ranks, found, strict=True)]


# ---- output ---------------------------------------------------------------------------------------


def as_text(ranks: list[RankTrace]) -> str:
    """The split by rank, then of the rank with most exposed communication what is behind it."""
    header = (
        "rank",
        "span",
        "compute",
        "exposed",
        "exposed copy",
        "idle",
        "comm",
        "overlap",
        "waits",
    )
    rows = [
        (
            str(r.rank),
            human_seconds(r.span_seconds),
            *(
                f"{human_seconds(part)} {human_ratio(part / r.span_seconds if r.span_seconds else None)}"
                for part in (
                    r.compute_seconds, r.exposed_seconds, r.exposed_copy_seconds, r.idle_seconds
                )
            ),
            human_seconds(r.communication_seconds),
            human_ratio(r.overlap_ratio),
            human_seconds(r.wait_seconds),
        )
        for r in ranks
    ]  # fmt: skip
    blocks = [f"Where the time of the device went\n{table(header, rows)}"]
    worst = max(ranks, key=lambda r: r.exposed_seconds)
    if worst.ops:
        blocks.append(_ops(worst))
    if worst.units:
        blocks.append(_units(worst))
    if worst.kernels:
        blocks.append(_kernels(worst))
    notes = [f"  rank {r.rank} ({r.file}): {note}" for r in ranks for note in r.notes]
    if notes:
        blocks.append("Notes\n" + "\n".join(notes))
    return "\n\n".join(blocks) + "\n"


def _ops(rank: RankTrace) -> str:
    rows = [
        (
            f"{op.op} {op.group}".strip(),
            human_count(op.count),
            human_bytes(op.nbytes) if op.nbytes else "-",
            human_seconds(op.seconds),
            human_seconds(op.exposed_seconds),
            human_rate(op.busbw_bytes_per_second) if op.busbw_bytes_per_second else "-",
        )
        for op in rank.ops[:_MOST_ROWS]
    ]
    header = ("operation", "calls", "bytes", "time", "exposed", "busbw")
    return f"Communication of rank {rank.rank}\n{table(header, rows)}"


def _units(rank: RankTrace) -> str:
    rows = [
        (
            unit.unit,
            human_count(unit.count),
            human_seconds(unit.communication_seconds),
            human_seconds(unit.exposed_seconds),
        )
        for unit in rank.units[:_MOST_ROWS]
    ]
    return f"FSDP units of rank {rank.rank}\n{table(('unit', 'calls', 'time', 'exposed'), rows)}"


def _kernels(rank: RankTrace) -> str:
    rows = [
        (
            kernel.name if len(kernel.name) <= 60 else f"{kernel.name[:57]}...",
            kernel.kind,
            human_count(kernel.count),
            human_seconds(kernel.seconds),
        )
        for kernel in rank.kernels[:_MOST_ROWS]
    ]
    return (
        f"Longest kernels of rank {rank.rank}\n{table(('kernel', 'kind', 'calls', 'time'), rows)}"
    )


def write_html(traces: list[tuple[int, TraceData]], path: str) -> None:
    """A lane a rank and kind."""
    try:
        figures: Any = importlib.import_module("zeromon_dashboard.figures")
    except ImportError as error:
        raise TraceError("--html needs plotly", "pip install 'zeromon[dashboard]'") from error
    rows = [(f"rank {rank}", lanes(data)) for rank, data in traces]
    try:
        Path(path).write_text(figures.page(figures.timeline(rows)))
    except OSError as error:
        raise TraceError(f"cannot write {path}: {error.strerror}", "") from error
