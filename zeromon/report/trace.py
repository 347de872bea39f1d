"""Traces as text: what a capture made, and the time of each rank's device by activity. Pure."""

import statistics
import textwrap
from collections.abc import Callable, Collection, Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path

from zeromon.diagnosis.flight import DIFFER, FlightFinding, RankCall
from zeromon.report.table import Column, column_table, fitted, table
from zeromon.snapshot import Capture, CaptureState, TraceCheck
from zeromon.traces.allocations import (
    COMMUNICATION,
    NO_STACK,
    OPTIMIZER_STATE,
    DeviceMemory,
    Grown,
    Holding,
    Peak,
    origin,
)
from zeromon.traces.analysis import RankTrace
from zeromon.traces.critical import CriticalPath
from zeromon.traces.diff import LEAST_OF_FIGURE, OF_CALLS, Row, TraceDiff, Usage, What
from zeromon.traces.idle import IdleTime, StreamTime
from zeromon.traces.products import overall
from zeromon.units import (
    human_bytes,
    human_calls,
    human_count,
    human_rate,
    human_ratio,
    human_seconds,
    human_share,
    signed,
)

_MOST_ROWS, _FIRST_ROWS = 10, 6

SECTIONS: Mapping[str, str] = {
    "kernels": "more families of kernels",
    "gemm": "matrix products and attention by shape, against a roofline",
    "idle": "idle time by cause and the queue of launches, by stream",
}
"""Sections of ``zeromon trace analyze`` in place of the details of a first look -> help."""


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
    check_of = made.checks
    rows = column_table(
        sorted(check_of),
        ("rank", str),
        ("steps", lambda rank: ", ".join(map(str, check_of[rank].steps))),
        ("exposed live", lambda rank: human_seconds(check_of[rank].live_exposed_seconds)),
        ("in trace", lambda rank: human_seconds(check_of[rank].trace_exposed_seconds)),
        ("error", lambda rank: _error(check_of[rank])),
        ("comm live", lambda rank: human_seconds(check_of[rank].live_communication_seconds)),
        ("in trace", lambda rank: human_seconds(check_of[rank].trace_communication_seconds)),
    )
    note = (
        "\nA trace of a launch-bound rank also counts as exposed how long its device waits for the host."
        if any(check.launch_bound for check in check_of.values())
        else ""
    )
    return f"The live figures against the trace\n{rows}{note}"


def _error(check: TraceCheck) -> str:
    if check.error_ratio is not None:
        return f"{check.error_ratio * 100:+.1f} %"
    return "n/a (launch-bound)" if check.launch_bound else "n/a"


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
    rows = column_table(
        [r for r in ranks if r in apart],
        ("rank", lambda r: str(r.rank)),
        ("span", lambda r: human_seconds(r.span_seconds)),
        ("compute", lambda r: human_share(r.compute_seconds, r.span_seconds)),
        ("exposed", lambda r: human_share(r.exposed_seconds, r.span_seconds)),
        ("copies", lambda r: human_share(r.exposed_copy_seconds, r.span_seconds)),
        ("idle", lambda r: human_share(r.idle_seconds, r.span_seconds)),
        ("comm", lambda r: human_seconds(r.communication_seconds)),
        ("overlap", lambda r: human_ratio(r.overlap_ratio)),
        ("waits", lambda r: human_seconds(r.wait_seconds)),
    )
    lines = ["Where the time of the device went, shares of the span", rows]
    if len(apart) < len(ranks):
        lines.append(f"  and {len(ranks) - len(apart)} ranks nearer to the median: --json has all")
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
    """The reason why a rank is late: what it does longer than the median of the others."""
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
    rows = column_table(
        rank.products[:_MOST_ROWS],
        ("operator", lambda p: p.op.replace("_attention", "").replace("_backward", " bwd")),
        ("MxNxK", lambda p: p.shape or "n/a"),
        ("type", lambda p: _DTYPES.get(p.dtype, p.dtype) or "n/a"),
        ("calls", lambda p: human_count(p.count)),
        ("time", lambda p: human_seconds(p.seconds)),
        ("TFLOP/s", lambda p: _tera(p.flops / p.seconds if p.flops and p.seconds else None)),
        ("peak", lambda p: human_ratio(p.peak_ratio)),
        ("roof", lambda p: human_ratio(p.roofline_ratio)),
    )
    lines = [
        f"{title}, {human_seconds(seconds)}, {human_share(seconds, rank.span_seconds)} of the span",
        f"  on {rank.device_name or 'an unknown device'}: {_tera(speed)} TFLOP/s, "
        f"{human_ratio(peak)} of the peak, {human_ratio(roofline)} of the roofline",
        rows,
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
    name: Column[StreamTime] = ("stream", lambda one: f"{one.device}/{one.stream}")
    idle = column_table(
        streams,
        name,
        ("events", lambda one: human_count(one.events)),
        ("idle", lambda one: human_share(one.idle.seconds, one.span_seconds)),
        *(
            (c, lambda one, c=c: human_share(getattr(one.idle, c), one.idle.seconds))
            for c in causes
        ),
    )
    queue = column_table(
        streams,
        name,
        ("mean", lambda one: "n/a" if one.queue_mean is None else f"{one.queue_mean:.1f}"),
        ("most", lambda one: human_count(one.queue_most)),
        ("empty", lambda one: human_ratio(one.queue_empty_ratio)),
        ("launch to start", lambda one: human_seconds(one.delay_seconds)),
    )
    return (
        f"Idle streams of rank {rank.rank}, and what the next event waited for\n{idle}\n\n"
        f"Launched and not begun, of rank {rank.rank}\n{queue}"
    )


def _critical_path(rank: int, path: CriticalPath) -> str:
    """The waits of the moments of a step, by kind, then by name."""
    kinds = ", ".join(
        f"{human_share(seconds, path.seconds)} {kind}" for kind, seconds in path.kinds.items()
    )
    rows = column_table(
        path.parts[:_MOST_ROWS],
        ("name", lambda part: part.name),
        ("what", lambda part: part.kind),
        ("parts", lambda part: human_count(part.count)),
        ("time", lambda part: human_seconds(part.seconds)),
        ("share", lambda part: human_share(part.seconds, path.seconds)),
        cuts=[0],
    )
    lines = [
        f"Critical path of step {path.step} of rank {rank}, {human_seconds(path.seconds)}",
        f"  {kinds}",
        rows,
    ]
    if path.inferred:
        lines.append(
            f"  {human_count(path.inferred)} waits for another stream are inferred: the trace has no "
            "cuda_sync events (enable_cuda_sync_events)"
        )
    return "\n".join(lines)


def as_diff(names: Sequence[str], found: TraceDiff) -> str:
    """The differences between the traces *names*; only those beyond noise have a row."""
    heads = [
        f"{letter}  {name}: {human_count(count)} step{'s' * (count != 1)} of a rank"
        for letter, name, count in zip("AB", names, found.samples, strict=True)
    ]
    rows = column_table(
        found.parts,
        ("a step", lambda row: row.name),
        ("A", lambda row: human_seconds(row.before.seconds)),
        ("B", lambda row: human_seconds(row.after.seconds)),
        *_DIFFERENCE,
    )
    blocks = ["\n".join(heads), rows]
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


_DIFFERENCE: tuple[Column[Row], ...] = (
    ("difference", lambda row: signed(human_seconds, row.after.seconds - row.before.seconds)),
    ("99 %", lambda row: "n/a" if (s := row.noise_seconds) is None else f"± {human_seconds(s)}"),
)
"""The difference in time, and its uncertainty."""


def _changes(rows: Sequence[Row]) -> str:
    def cell(row: Row, one: Usage) -> str:
        text = f"{human_calls(one.calls)} x, {human_seconds(one.seconds)}"
        exposed = f", {human_seconds(one.exposed_seconds)} exposed"
        return text if row.what is What.KERNEL else text + exposed

    cells = column_table(
        rows[: 2 * _MOST_ROWS],
        ("what differs, a step", lambda row: row.name),
        ("kind", lambda row: row.what.value),
        ("how", lambda row: str(row.change.value) if row.change is not None else ""),
        ("A", lambda row: cell(row, row.before)),
        ("B", lambda row: cell(row, row.after)),
        *_DIFFERENCE,
        cuts=[0],
    )
    more = len(rows) - 2 * _MOST_ROWS
    return cells + (f"\n  and {human_count(more)} more: --json has all" if more > 0 else "")


def _ops(rank: RankTrace) -> str:
    rows = column_table(
        rank.ops[:_MOST_ROWS],
        ("operation", lambda op: f"{op.op} {op.group}".strip()),
        ("calls", lambda op: human_count(op.count)),
        ("bytes", lambda op: human_bytes(op.nbytes) if op.nbytes else "-"),
        ("time", lambda op: human_seconds(op.seconds)),
        ("exposed", lambda op: human_seconds(op.exposed_seconds)),
        ("busbw", lambda op: human_rate(rate) if (rate := op.busbw_bytes_per_second) else "-"),
    )
    return f"Communication of rank {rank.rank}\n{rows}"


def _units(rank: RankTrace) -> str:
    rows = column_table(
        rank.units[:_MOST_ROWS],
        ("unit", lambda unit: unit.unit),
        ("calls", lambda unit: human_count(unit.count)),
        ("time", lambda unit: human_seconds(unit.communication_seconds)),
        ("exposed", lambda unit: human_seconds(unit.exposed_seconds)),
    )
    return f"FSDP units of rank {rank.rank}\n{rows}"


def _families(rank: RankTrace, all_of_them: bool) -> str:
    rows = column_table(
        rank.families[: None if all_of_them else _FIRST_ROWS],
        ("family", lambda one: one.name),
        ("calls", lambda one: human_count(one.count)),
        ("time", lambda one: human_seconds(one.seconds)),
        ("of span", lambda one: human_share(one.seconds, rank.span_seconds)),
        cuts=[0],
    )
    return f"Kernels of rank {rank.rank} by family\n{rows}"


# ---- what hangs by the Flight Recorder's dumps, as text -----------------------------------------

_MOST_CALLS = 12
_MOST_SIZES = 3
_LONGEST_RANKS = 10


def flight_text(found: Sequence[FlightFinding], ranks: Sequence[int], notes: Sequence[str]) -> str:
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
    for row, members in list(rows.items())[:_MOST_CALLS]:
        label = spans = _spans(members)
        if len(spans) > _LONGEST_RANKS:
            label = f"{len(members):,} ranks"
            below.append(f"\n  {label}: {textwrap.shorten(spans, 300, placeholder=' ...')}")
        cells.append((label, *row))
    if len(rows) > _MOST_CALLS:
        rest = sum(len(members) for members in list(rows.values())[_MOST_CALLS:])
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


# ---- snapshots of torch's allocator as text -----------------------------------------------------

_MOST_HELD = 10
_SHORT = {OPTIMIZER_STATE: "optimizer", COMMUNICATION: "comm buffers"}


def memory_text(name: str, devices: Sequence[DeviceMemory]) -> str:
    """One file: for each device its segments, roles, the peak, and allocations that failed."""
    blocks = [block for device in devices for block in _device(name, device)]
    return "\n\n".join(blocks or [f"{name} holds no memory"]) + "\n"


def as_growth(names: Sequence[str], rows: Sequence[Grown]) -> str:
    """The stacks that hold more in the second file, and those that hold less."""
    heads = [f"{letter}  {name}" for letter, name in zip("AB", names, strict=True)]
    if not rows:
        return "\n".join([*heads, "", "  every stack holds as much in both"]) + "\n"
    total = sum(row.after_bytes - row.before_bytes for row in rows)
    grown = column_table(
        [*rows[:_MOST_HELD], *rows[_MOST_HELD:][-3:]],
        ("where", lambda row: origin(row.stack)),
        ("role", lambda row: _SHORT.get(row.role, row.role)),
        ("count", lambda row: f"{row.count:+,}"),
        ("B", lambda row: human_bytes(row.after_bytes)),
        ("B - A", lambda row: signed(human_bytes, row.after_bytes - row.before_bytes)),
        cuts=[0],
    )
    return "\n".join([*heads, "", f"{signed(human_bytes, total)} in all", grown]) + "\n"


def _device(name: str, device: DeviceMemory) -> list[str]:
    reserved = device.reserved_bytes
    head = (
        f"Device {device.device} of {name}: {human_bytes(device.allocated_bytes)} allocated of "
        f"{human_bytes(reserved)} reserved"
    )
    rows = column_table(
        device.segments,
        ("segments", lambda row: row.kind or "-"),
        ("count", lambda row: human_count(row.count)),
        ("reserved", lambda row: human_bytes(row.reserved_bytes)),
        ("allocated", lambda row: human_bytes(row.allocated_bytes)),
        ("awaits free", lambda row: human_bytes(row.pending_bytes)),
        ("inactive", lambda row: human_bytes(row.inactive_bytes)),
    )
    share = human_share(device.stranded_bytes, reserved)
    fragments = (
        f"  fragmentation: {human_bytes(device.stranded_bytes)} ({share} of reserved) inactive in "
        f"segments in use\n  largest free block: {human_bytes(device.largest_inactive_bytes)}"
    )
    blocks = [f"{head}\n{rows}\n{fragments}", _roles(device)]
    if device.peak is None:
        blocks.append(
            "The peak is n/a: the file has no history of allocations\n"
            f"  torch.cuda.memory._record_memory_history() records it\n{_holdings(device.held)}"
        )
    else:
        blocks.append(f"{_peak(device.peak)}\n{_holdings(device.peak.held)}")
    if device.ooms:
        blocks.append(_ooms(device))
    return blocks


def _peak(peak: Peak) -> str:
    when = "" if peak.seconds is None else f", {human_seconds(peak.seconds)} after the first"
    text = (
        f"The peak: {human_bytes(peak.nbytes)} allocated of {human_bytes(peak.reserved_bytes)} "
        f"reserved\n  at event {peak.event + 1:,} of {peak.events:,}{when}"
    )
    if peak.untold_bytes:
        text += (
            f"\n  {human_bytes(abs(peak.untold_bytes))} of it belong to no allocation of the file"
        )
    return text


def _roles(device: DeviceMemory) -> str:
    now, most = device.roles["now"], device.roles.get("peak", {})
    rows = [
        (role, human_bytes(most.get(role, 0)) if most else "n/a", human_bytes(now.get(role, 0)))
        for role in dict.fromkeys([*most, *now])
    ]
    return f"By role, as far as stacks tell\n{table(('role', 'at the peak', 'now'), rows)}"


def _holdings(held: Sequence[Holding]) -> str:
    text = column_table(
        held[:_MOST_HELD],
        ("where", lambda one: origin(one.stack)),
        ("role", lambda one: _SHORT.get(one.role, one.role)),
        ("count", lambda one: human_count(one.count)),
        ("bytes", lambda one: human_bytes(one.nbytes)),
        cuts=[0],
    )
    if len(held) > _MOST_HELD:
        rest = held[_MOST_HELD:]
        text += f"\n  and {human_bytes(sum(o.nbytes for o in rest))} of {len(rest):,} other stacks"
    return text


def _ooms(device: DeviceMemory) -> str:
    rows = column_table(
        device.ooms,
        ("where", lambda oom: origin(oom.stack)),
        ("after", lambda oom: human_seconds(oom.seconds)),
        ("asked for", lambda oom: human_bytes(oom.nbytes)),
        ("allocated", lambda oom: human_bytes(oom.allocated_bytes)),
        ("free", lambda oom: human_bytes(oom.device_free_bytes)),
        cuts=[0],
    )
    return f"Allocations that failed, and what the device had free\n{rows}"
