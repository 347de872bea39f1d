"""Traces as text: what a capture made, and the time of each rank's device by activity. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from zeromon.report.table import table
from zeromon.snapshot import Capture, CaptureState
from zeromon.traces.analysis import RankTrace
from zeromon.traces.diff import LEAST_OF_FIGURE, OF_CALLS, Row, TraceDiff, What
from zeromon.units import (
    human_bytes,
    human_calls,
    human_count,
    human_rate,
    human_ratio,
    human_seconds,
)

_MOST_ROWS = 10


def captured(made: Capture, ranks: Sequence[RankTrace]) -> str:
    """The result of a capture, with the analysis of its traces."""
    if made.state == CaptureState.FAILED:
        return f"trace {made.number} failed: {made.note}\n"
    last = made.first + made.steps - 1
    steps = f"step {made.first}" if made.steps == 1 else f"steps {made.first} to {last}"
    lines = [f"Trace {made.number}: {steps} of {len(made.files)} ranks, in {made.folder}"]
    lines += [f"  {Path(file).name}" for file in made.files]
    if made.note:
        lines.append(f"  {made.note}")
    blocks = ["\n".join(lines)]
    if made.checks:
        blocks.append(checks(made))
    if ranks:
        blocks.append(as_text(ranks).rstrip("\n"))
    return "\n\n".join(blocks) + "\n"


def checks(made: Capture) -> str:
    """The live figures beside the trace's."""
    rows = [
        (
            str(rank),
            ", ".join(map(str, check.steps)),
            human_seconds(check.live_exposed_seconds),
            human_seconds(check.trace_exposed_seconds),
            "n/a" if check.error_ratio is None else f"{check.error_ratio * 100:+.1f} %",
            human_seconds(check.live_communication_seconds),
            human_seconds(check.trace_communication_seconds),
        )
        for rank, check in sorted(made.checks.items())
    ]
    header = ("rank", "steps", "exposed live", "in trace", "error", "comm live", "in trace")
    return f"The live figures against the trace\n{table(header, rows)}"


def as_text(ranks: Sequence[RankTrace]) -> str:
    """The breakdown by rank, then the details of the rank with the most exposed communication."""
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
                _part(part, r.span_seconds)
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
    worst = max(ranks, key=lambda r: r.exposed_seconds or 0.0)
    if worst.ops:
        blocks.append(_ops(worst))
    if worst.units:
        blocks.append(_units(worst))
    if worst.families:
        blocks.append(_families(worst))
    notes = [f"  rank {r.rank} ({r.file}): {note}" for r in ranks for note in r.notes]
    if notes:
        blocks.append("Notes\n" + "\n".join(notes))
    return "\n\n".join(blocks) + "\n"


def as_diff(names: Sequence[str], found: TraceDiff) -> str:
    """What differs between the traces *names*; only the differences beyond noise have a row."""
    heads = [
        f"{letter}  {name}: {human_count(count)} step{'s' * (count != 1)} of a rank"
        for letter, name, count in zip("AB", names, found.samples, strict=True)
    ]
    rows = [
        (
            row.name,
            human_seconds(row.before.seconds),
            human_seconds(row.after.seconds),
            *_difference(row),
        )
        for row in found.parts
    ]
    header = ("a step", "A", "B", "difference", "99 %")
    blocks = ["\n".join(heads), table(header, rows)]
    changed = [row for row in found.rows if row.change is not None]
    if changed:
        blocks.append(_changes(changed))
    elif not found.changed:
        blocks.append("Nothing differs beyond noise.")
    if found.changed and not any(row.change in OF_CALLS for row in found.changed):
        blocks.append("Both make the same calls: they differ in time alone.")
    ratio = found.common_ratio
    if ratio is not None and abs(ratio - 1) > LEAST_OF_FIGURE:
        way = f"{human_ratio(abs(ratio - 1))} {'longer' if ratio > 1 else 'shorter'}"
        blocks.append(f"All kernels are {way} (median of the families): rows are beyond that.")
    if min(found.samples) < 2:
        blocks.append(
            "One step a side has no known noise: what differs by less than half has no row."
        )
    return "\n\n".join(blocks) + "\n"


def _difference(row: Row) -> tuple[str, str]:
    """The difference in time, and its uncertainty."""
    change = row.after.seconds - row.before.seconds
    noise = "n/a" if row.noise_seconds is None else f"± {human_seconds(row.noise_seconds)}"
    return f"{'-' if change < 0 else '+'}{human_seconds(abs(change))}", noise


def _changes(rows: Sequence[Row]) -> str:
    cells = [
        (
            row.name if len(row.name) <= 60 else f"{row.name[:57]}...",
            row.what.value,
            str(row.change.value) if row.change is not None else "",
            *(
                f"{human_calls(one.calls)} x, {human_seconds(one.seconds)}"
                + (f", {human_seconds(one.exposed_seconds)} exposed" if communicates else "")
                for one in (row.before, row.after)
            ),
            *_difference(row),
        )
        for row in rows[: 2 * _MOST_ROWS]
        for communicates in (row.what is not What.KERNEL,)
    ]
    more = len(rows) - 2 * _MOST_ROWS
    header = ("what differs, a step", "kind", "how", "A", "B", "difference", "99 %")
    left_out = f"\n  and {human_count(more)} more: --json has all" if more > 0 else ""
    return table(header, cells) + left_out


def _part(seconds: float | None, span: float | None) -> str:
    """A part of the span and its share."""
    if seconds is None:
        return human_seconds(None)
    return f"{human_seconds(seconds)} {human_ratio(seconds / span if span else None)}"


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


def _families(rank: RankTrace) -> str:
    rows = [
        (
            one.name if len(one.name) <= 60 else f"{one.name[:57]}...",
            one.kind,
            human_count(one.count),
            human_seconds(one.seconds),
            human_ratio(one.seconds / rank.span_seconds if rank.span_seconds else None),
        )
        for one in rank.families[:_MOST_ROWS]
    ]
    header = ("family", "kind", "calls", "time", "of the span")
    return f"Kernels of rank {rank.rank} by family\n{table(header, rows)}"
