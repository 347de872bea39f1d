"""Traces as text: what a capture made, and the time of each rank's device by activity. Pure."""

import statistics
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path

from zeromon.report.table import fitted, table
from zeromon.snapshot import Capture, CaptureState
from zeromon.traces.analysis import RankTrace
from zeromon.traces.critical import CriticalPath
from zeromon.traces.diff import LEAST_OF_FIGURE, OF_CALLS, Row, TraceDiff, What
from zeromon.traces.idle import IdleTime
from zeromon.traces.products import overall
from zeromon.units import (
    human_bytes,
    human_calls,
    human_count,
    human_rate,
    human_ratio,
    human_seconds,
    signed,
)

_MOST_ROWS, _FIRST_ROWS = 10, 6

SECTIONS: Mapping[str, str] = {
    "kernels": "more families of kernels",
    "gemm": "matrix products and attention by shape, against a roofline",
    "idle": "idle time by cause and the queue of launches, by stream",
}
"""What ``zeromon trace analyze`` shows in place of the details of a first look -> help."""


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


def as_text(
    ranks: Sequence[RankTrace], sections: Collection[str] = (), rank: int | None = None
) -> str:
    """The breakdown by rank, then the *sections* of *rank*: by default what a first look needs.

    Without *rank*, the details are of the one with the most exposed communication.
    """
    blocks = [_ranks(ranks)]
    one = max(ranks, key=lambda r: r.exposed_seconds or 0.0)
    one = next((r for r in ranks if r.rank == rank), one)
    if not sections:
        blocks += [_ops(one)] if one.ops else []
        blocks += [_units(one)] if one.units else []
    if "kernels" in sections or not sections:
        blocks += [_families(one, bool(sections))] if one.families else []
    if "gemm" in sections:
        blocks.append(_products(one))
    if "idle" in sections:
        blocks.append(_idle(one))
    if "critical-path" in sections and one.critical_path is not None:
        blocks.append(_critical_path(one.rank, one.critical_path))
    notes = [f"  rank {r.rank} ({r.file}): {note}" for r in ranks for note in r.notes]
    if notes:
        blocks.append("Notes\n" + "\n".join(notes))
    return "\n\n".join(blocks) + "\n"


def _ranks(ranks: Sequence[RankTrace]) -> str:
    """One row a rank, of many ranks those that compute more or less than the others."""
    usual = _median(ranks, lambda r: r.compute_seconds)
    apart = sorted(ranks, key=lambda r: -abs((r.compute_seconds or 0.0) - usual))[:_MOST_ROWS]
    rows = [
        (
            str(r.rank),
            human_seconds(r.span_seconds),
            *(
                human_ratio(part / r.span_seconds if r.span_seconds and part is not None else None)
                for part in (
                    r.compute_seconds, r.exposed_seconds, r.exposed_copy_seconds, r.idle_seconds
                )
            ),
            human_seconds(r.communication_seconds),
            human_ratio(r.overlap_ratio),
            human_seconds(r.wait_seconds),
        )
        for r in ranks if r in apart
    ]  # fmt: skip
    header = ("rank", "span", "compute", "exposed", "copies", "idle", "comm", "overlap", "waits")
    lines = ["Where the time of the device went, shares of the span", table(header, rows)]
    if len(rows) < len(ranks):
        lines.append(f"  and {len(ranks) - len(rows)} ranks nearer to the median: --json has all")
    idlest = max(ranks, key=lambda r: r.idle_seconds or 0.0)
    if idlest.idle is not None and idlest.idle.seconds:
        lines.append(f"  idle of rank {idlest.rank}: {_causes(idlest.idle)}")
    lines += [f"  {sentence}" for sentence in _differences(ranks)]
    return "\n".join(lines)


_CAUSES = (
    ("host", "until the host launches"), ("kernels", "from kernel to kernel"),
    ("communication", "for communication"), ("streams", "for another stream"),
    ("other", "for another cause"), ("unknown", "unknown (launch not recorded)"),
)  # fmt: skip


def _causes(idle: IdleTime) -> str:
    """The causes of idle time from the largest on."""
    parts = sorted(((getattr(idle, name), text) for name, text in _CAUSES), reverse=True)
    return ", ".join(
        f"{human_ratio(seconds / idle.seconds)} {text}" for seconds, text in parts if seconds
    )


def _median(ranks: Sequence[RankTrace], of: Callable[[RankTrace], float | None]) -> float:
    known = [value for value in map(of, ranks) if value is not None]
    return statistics.median(known) if known else 0.0


_REASONS: tuple[tuple[str, Callable[[RankTrace], float | None]], ...] = (
    ("it computes", lambda r: r.compute_seconds),
    ("its device is idle", lambda r: r.idle_seconds),
    ("it copies", lambda r: r.exposed_copy_seconds),
)


def _differences(ranks: Sequence[RankTrace]) -> list[str]:
    """Whom the ranks wait for and why, where they differ by more than a hundredth of the span."""
    least = _median(ranks, lambda r: r.span_seconds) / 100
    if len(ranks) < 2 or not least:
        return []
    waited = [(r.wait_seconds, r.rank, r) for r in ranks if r.wait_seconds is not None]
    if waited and max(waited)[0] - min(waited)[0] > least:
        late = min(waited)[2]
        others = _median([r for r in ranks if r is not late], lambda r: r.wait_seconds)
        return [
            f"rank {late.rank} comes last: it waits {human_seconds(late.wait_seconds)}, "
            f"the others {human_seconds(others)}{_why(late, ranks, least)}"
        ]
    told = [] if waited else ["waits n/a: the files do not have the same collectives"]
    for text, of in _REASONS:
        most = max(ranks, key=lambda r: of(r) or 0.0)
        more = (of(most) or 0.0) - _median(ranks, of)
        if more > least:
            told.append(f"rank {most.rank}: {text} {human_seconds(more)} longer than the median")
    return told or ["the ranks differ by less than 1 % of the span"]


def _why(late: RankTrace, ranks: Sequence[RankTrace], least: float) -> str:
    """What the late rank does longer than the median of the others."""
    others = [r for r in ranks if r is not late]
    more, text = max(((of(late) or 0.0) - _median(others, of), text) for text, of in _REASONS)
    return f"; {text} {human_seconds(more)} longer than they" if more > least else ""


def _products(rank: RankTrace) -> str:
    """Matrix products and attention: what they reach of the peak and of the roofline."""
    title = f"Matrix products of rank {rank.rank}"
    if not rank.products:
        return f"{title}: n/a, the trace has no operators, or none that launched a kernel"
    speed, peak, roofline = overall(rank.products)
    seconds = sum(one.seconds for one in rank.products)
    share = human_ratio(seconds / rank.span_seconds if rank.span_seconds else None)
    rows = [
        (
            one.op.replace("_attention", "").replace("_backward", " bwd"),
            one.shape or "n/a",
            _DTYPES.get(one.dtype, one.dtype) or "n/a",
            human_count(one.count),
            human_seconds(one.seconds),
            _tera(one.flops / one.seconds if one.flops and one.seconds else None),
            human_ratio(one.peak_ratio),
            human_ratio(one.roofline_ratio),
        )
        for one in rank.products[:_MOST_ROWS]
    ]
    header = ("operator", "MxNxK", "type", "calls", "time", "TFLOP/s", "peak", "roof")
    lines = [
        f"{title}, {human_seconds(seconds)}, {share} of the span",
        f"  on {rank.device_name or 'an unknown device'}: {_tera(speed)} TFLOP/s, "
        f"{human_ratio(peak)} of the peak, {human_ratio(roofline)} of the roofline",
        table(header, rows),
    ]
    if len(rank.products) > _MOST_ROWS:
        lines.append(f"  and {human_count(len(rank.products) - _MOST_ROWS)} more: --json has all")
    lines += [f"  n/a: {why}" for why in dict.fromkeys(p.unknown for p in rank.products) if why]
    return "\n".join(lines)


_DTYPES = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32", "float64": "fp64"}


def _tera(flops: float | None) -> str:
    return "n/a" if flops is None else f"{flops / 1e12:.1f}"


def _idle(rank: RankTrace) -> str:
    """The streams of a rank: why they are idle, and how far the host is ahead."""
    if not rank.streams:
        return f"Idle streams of rank {rank.rank}: n/a, the trace has no launches of the host"
    streams = rank.streams[:_MOST_ROWS]
    causes = [name for name, _ in _CAUSES if any(getattr(one.idle, name) for one in streams)]
    shares = [
        (
            f"{one.device}/{one.stream}",
            human_count(one.events),
            human_ratio(one.idle.seconds / one.span_seconds if one.span_seconds else None),
            *(
                human_ratio(
                    getattr(one.idle, name) / one.idle.seconds if one.idle.seconds else None
                )
                for name in causes
            ),
        )
        for one in streams
    ]
    queues = [
        (
            f"{one.device}/{one.stream}",
            "n/a" if one.queue_mean is None else f"{one.queue_mean:.1f}",
            "n/a" if one.queue_most is None else human_count(one.queue_most),
            human_ratio(one.queue_empty_ratio),
            human_seconds(one.delay_seconds),
        )
        for one in streams
    ]
    idle = table(("stream", "events", "idle", *causes), shares)
    queue = table(("stream", "mean", "most", "empty", "launch to start"), queues)
    return (
        f"Idle streams of rank {rank.rank}, and what the next event waited for\n{idle}\n\n"
        f"Launched and not begun, of rank {rank.rank}\n{queue}"
    )


def _critical_path(rank: int, path: CriticalPath) -> str:
    """What the moments of a step waited for, by kind, then by name."""

    def share(seconds: float) -> str:
        return human_ratio(seconds / path.seconds if path.seconds else None)

    kinds = ", ".join(f"{share(seconds)} {kind}" for kind, seconds in path.kinds.items())
    rows = [
        (
            part.name,
            part.kind,
            human_count(part.count),
            human_seconds(part.seconds),
            share(part.seconds),
        )
        for part in path.parts[:_MOST_ROWS]
    ]
    lines = [
        f"Critical path of step {path.step} of rank {rank}, {human_seconds(path.seconds)}",
        f"  {kinds}",
        fitted(("name", "what", "parts", "time", "share"), rows, 0),
    ]
    if path.inferred:
        lines.append(
            f"  {human_count(path.inferred)} waits for another stream are inferred: the trace has no "
            "cuda_sync events (enable_cuda_sync_events)"
        )
    return "\n".join(lines)


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
    return signed(human_seconds, change), noise


def _changes(rows: Sequence[Row]) -> str:
    cells = [
        (
            row.name,
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
    return fitted(header, cells, 0) + left_out


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


def _families(rank: RankTrace, all_of_them: bool) -> str:
    rows = [
        (
            one.name,
            human_count(one.count),
            human_seconds(one.seconds),
            human_ratio(one.seconds / rank.span_seconds if rank.span_seconds else None),
        )
        for one in rank.families[: None if all_of_them else _FIRST_ROWS]
    ]
    header = ("family", "calls", "time", "of span")
    return f"Kernels of rank {rank.rank} by family\n{fitted(header, rows, 0)}"
