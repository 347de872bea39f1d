"""What hangs by the Flight Recorder's dumps, as text. Pure."""

import textwrap
from collections.abc import Sequence
from datetime import datetime, timezone

from zeromon.diagnosis.flight import DIFFER, FlightFinding, RankCall
from zeromon.report.table import fitted
from zeromon.traces.allocations import NO_STACK, origin
from zeromon.units import human_seconds

_MOST_ROWS = 12
_MOST_SIZES = 3
_LONGEST_RANKS = 10


def as_text(found: Sequence[FlightFinding], ranks: Sequence[int], notes: Sequence[str]) -> str:
    """A block for each finding; members in the same place share a row."""
    blocks = [_block(one) for one in found]
    if not found:
        blocks = [f"Nothing hangs in the dumps of rank{'s' * (len(ranks) > 1)} {_spans(ranks)}"]
    if notes:
        blocks.append("\n".join(["Notes", *(f"  {note}" for note in notes)]))
    return "\n\n".join(blocks) + "\n"


def _block(one: FlightFinding) -> str:
    since = datetime.fromtimestamp(one.since_ns / 1e9, timezone.utc)
    lasts = (
        "it has ended on all members that called it"
        if one.seconds is None
        else f"{human_seconds(max(0.0, one.seconds))} before the newest dump"
    )
    head = (
        f"!! {one.op} #{abs(one.sequence)} of {one.group}: {one.kind}\n"
        f"   since {since:%Y-%m-%d %H:%M:%S} UTC, {lasts}"
    )
    rows: dict[tuple[str, ...], list[int]] = {}
    for call in one.ranks:
        rows.setdefault(_cells(call, one), []).append(call.rank)
    cells, below = [], []
    for row, members in list(rows.items())[:_MOST_ROWS]:
        label = spans = _spans(members)
        if len(spans) > _LONGEST_RANKS:
            label = f"{len(members):,} ranks"
            below.append(f"\n  {label}: {textwrap.shorten(spans, 300, placeholder=' ...')}")
        cells.append((label, *row))
    if len(rows) > _MOST_ROWS:
        rest = sum(len(members) for members in list(rows.values())[_MOST_ROWS:])
        cells.append((f"and {rest:,} more", "", "", ""))
    text = fitted(("ranks", "state", "call", "where"), cells, 2, 3)
    return f"{head}\n{text}{''.join(below)}"


def _cells(row: RankCall, one: FlightFinding) -> tuple[str, ...]:
    state, call = row.state, row.call
    if call is None:
        return state, "-", NO_STACK
    text = f"{call.op} #{abs(call.sequence)}"
    if call.sequence == one.sequence:
        state = f"{state} ({call.state})"
    else:
        text = f"last {text}"
    if one.kind in DIFFER:
        sizes = call.sizes[0] or call.sizes[1]
        shapes = " ".join(str(list(size)).replace(" ", "") for size in sizes[:_MOST_SIZES])
        more = " ..." if len(sizes) > _MOST_SIZES else ""
        types = call.types[0] or call.types[1]
        text = f"{text} {shapes}{more} {' '.join(sorted(set(types)))}".rstrip()
    return state, text, origin(call.stack, alone=True)


def _spans(ranks: Sequence[int]) -> str:
    """``0, 2-7``."""
    spans: list[list[int]] = []
    for rank in sorted(ranks):
        if spans and rank == spans[-1][1] + 1:
            spans[-1][1] = rank
        else:
            spans.append([rank, rank])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in spans)
