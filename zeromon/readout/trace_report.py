"""Traces as text: what a capture made, and the time of each rank's device by activity. Pure."""

import statistics
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path

from zeromon.base.units import (
    counted,
    human_bytes,
    human_calls,
    human_count,
    human_rate,
    human_ratio,
    human_seconds,
    human_share,
    signed,
)
from zeromon.readout.figures import BYTES, COUNT, INDEX, RATIO, SECONDS
from zeromon.readout.tables import Column, aligned_table, text_table
from zeromon.snapshot.step import Capture, CaptureState, TraceCheck
from zeromon.traces import allocations
from zeromon.traces.analysis import IdleTime, RankTrace, StreamTime, overall_rates
from zeromon.traces.critical import CriticalPath
from zeromon.traces.diff import MIN_FIGURE_SHARE, OF_CALLS, Row, TraceDiff, Usage, What

_MAX_ROWS, _FIRST_ROWS = 10, 6
_MAX_WIDTH, _MAX_CALL_NAME = 80, 40
_MIN_IDLE_SHARE = 0.01

SECTIONS: Mapping[str, str] = {
    "kernels": "more families of kernels",
    "gemm": "matrix products and attention by shape, against a roofline",
    "idle": "idle time by cause and the queue of launches, by stream",
}
"""Sections of ``zeromon trace analyze`` in place of the details of a first look -> help."""


def capture_report(trace: Capture, ranks: Sequence[RankTrace]) -> str:
    """The result of a capture, with the analysis of its traces."""
    if trace.state == CaptureState.FAILED:
        return f"trace {trace.number} failed: {trace.note}\n"
    last_step = trace.first + trace.steps - 1
    steps = f"step {trace.first}" if trace.steps == 1 else f"steps {trace.first} to {last_step}"
    rows = [f"Trace {trace.number}: {steps} of {len(trace.files)} ranks, in {trace.folder}"]
    rows += [f"  {Path(file).name}" for file in trace.files]
    if trace.note:
        rows.append(f"  {trace.note}")
    blocks = ["\n".join(rows)]
    if trace.checks:
        blocks.append(check_table(trace))
    if ranks:
        blocks.append(as_text(ranks).rstrip("\n"))
    return "\n\n".join(blocks) + "\n"


def check_table(trace: Capture) -> str:
    """The live figures beside the trace's."""
    check_of = trace.checks
    rows = text_table(
        sorted(check_of),
        Column("rank", lambda rank: rank, INDEX),
        Column("steps", lambda rank: ", ".join(map(str, check_of[rank].steps))),
        Column("exposed live", lambda rank: check_of[rank].live_exposed_seconds, SECONDS),
        Column("in trace", lambda rank: check_of[rank].trace_exposed_seconds, SECONDS),
        Column("error", lambda rank: _check_error_text(check_of[rank])),
        Column("comm live", lambda rank: check_of[rank].live_communication_seconds, SECONDS),
        Column("in trace", lambda rank: check_of[rank].trace_communication_seconds, SECONDS),
    )
    note = (
        "\nA trace of a launch-bound rank also counts as exposed how long its device waits for the host."
        if any(check.launch_bound for check in check_of.values())
        else ""
    )
    return f"The live figures against the trace\n{rows}{note}"


def _check_error_text(check: TraceCheck) -> str:
    if check.error_ratio is not None:
        return f"{check.error_ratio * 100:+.1f} %"
    return "n/a (launch-bound)" if check.launch_bound else "n/a"


def as_text(ranks: Sequence[RankTrace], sections: Collection[str] = (), rank: int | None = None) -> str:
    """The breakdown by rank, then the *sections* of *rank*: by default what a first look needs.

    Without *rank*, the details are of the one with the most exposed communication.
    """
    blocks = [_rank_time_block(ranks)]
    chosen = max(ranks, key=lambda r: r.exposed_seconds or 0.0)
    chosen = next((r for r in ranks if r.rank == rank), chosen)
    if not sections:
        blocks += [_collective_op_block(chosen)] if chosen.ops else []
        blocks += [_fsdp_unit_block(chosen)] if chosen.units else []
    if "kernels" in sections or not sections:
        blocks += [_kernel_family_block(chosen, bool(sections))] if chosen.families else []
    if "gemm" in sections:
        blocks.append(_matrix_product_block(chosen))
    if "idle" in sections:
        blocks.append(_idle_stream_block(chosen))
    if "critical-path" in sections and chosen.critical_path is not None:
        blocks.append(_critical_path_block(chosen.rank, chosen.critical_path))
    notes = [f"  rank {r.rank} ({r.file}): {note}" for r in ranks for note in r.notes]
    if notes:
        blocks.append("Notes\n" + "\n".join(notes))
    return "\n\n".join(blocks) + "\n"


def _rank_time_block(ranks: Sequence[RankTrace]) -> str:
    """One row a rank, of many ranks those that compute more or less than the others."""
    median = _median_of(ranks, lambda r: r.compute_seconds)
    outer = sorted(ranks, key=lambda r: -abs((r.compute_seconds or 0.0) - median))[:_MAX_ROWS]
    rows = text_table(
        [r for r in ranks if r in outer],
        Column("rank", lambda r: str(r.rank)),
        Column("span", lambda r: r.span_seconds, SECONDS),
        Column("compute", lambda r: human_share(r.compute_seconds, r.span_seconds)),
        Column("exposed", lambda r: human_share(r.exposed_seconds, r.span_seconds)),
        Column("copies", lambda r: human_share(r.exposed_copy_seconds, r.span_seconds)),
        Column("idle", lambda r: human_share(r.idle_seconds, r.span_seconds)),
        Column("comm", lambda r: r.communication_seconds, SECONDS),
        Column("overlap", lambda r: r.overlap_ratio, RATIO),
        Column("waits", lambda r: r.wait_seconds, SECONDS),
    )
    blocks = ["Where the time of the device went, shares of the span", rows]
    if len(outer) < len(ranks):
        blocks.append(f"  and {len(ranks) - len(outer)} ranks nearer to the median: --json has all")
    idlest = max(ranks, key=lambda r: r.idle_seconds or 0.0)
    if idlest.idle is not None and idlest.idle.seconds:
        blocks.append(f"  idle of rank {idlest.rank}: {_idle_cause_text(idlest.idle)}")
        # The calls that the host is in for the largest shares of idle time
        shares = [
            f"{human_ratio(seconds / idlest.idle.seconds)} in {name[:_MAX_CALL_NAME]}"
            for name, seconds in idlest.host_calls.items()
            if seconds > _MIN_IDLE_SHARE * idlest.idle.seconds
        ]
        while len(sentence := f"  the host meanwhile: {', '.join(shares)}") > _MAX_WIDTH:
            shares.pop()
        blocks += [sentence] if shares else []
    blocks += [f"  {sentence}" for sentence in _why_ranks_differ(ranks)]
    return "\n".join(blocks)


_CAUSES = (
    ("host", "until the host launches"), ("kernels", "from kernel to kernel"),
    ("communication", "for communication"), ("streams", "for another stream"),
    ("other", "for another cause"), ("unknown", "unknown (launch not recorded)"),
)  # fmt: skip


def _idle_cause_text(idle: IdleTime) -> str:
    causes = sorted(((getattr(idle, name), phrase) for name, phrase in _CAUSES), reverse=True)
    return ", ".join(
        f"{human_ratio(seconds / idle.seconds)} {phrase}" for seconds, phrase in causes if seconds
    )


def _median_of(ranks: Sequence[RankTrace], of: Callable[[RankTrace], float | None]) -> float:
    values = [value for value in map(of, ranks) if value is not None]
    return statistics.median(values) if values else 0.0


_REASONS: tuple[tuple[str, Callable[[RankTrace], float | None]], ...] = (
    ("it computes", lambda r: r.compute_seconds),
    ("its device is idle", lambda r: r.idle_seconds),
    ("it copies", lambda r: r.exposed_copy_seconds),
)


def _why_ranks_differ(ranks: Sequence[RankTrace]) -> list[str]:
    """Whom the ranks wait for and why, where they differ by more than a hundredth of the span."""
    limit = _median_of(ranks, lambda r: r.span_seconds) / 100
    if len(ranks) < 2 or not limit:
        return []
    waited = [(r.wait_seconds, r.rank, r) for r in ranks if r.wait_seconds is not None]
    if waited and max(waited)[0] - min(waited)[0] > limit:
        late = min(waited)[2]
        peer_wait = _median_of([r for r in ranks if r is not late], lambda r: r.wait_seconds)
        return [
            f"rank {late.rank} comes last: it waits {human_seconds(late.wait_seconds)}, "
            f"the others {human_seconds(peer_wait)}{_why_rank_is_late(late, ranks, limit)}"
        ]
    notes = [] if waited else ["waits n/a: the files do not have the same collectives"]
    for label, of in _REASONS:
        top = max(ranks, key=lambda r: of(r) or 0.0)
        extra = (of(top) or 0.0) - _median_of(ranks, of)
        if extra > limit:
            notes.append(f"rank {top.rank}: {label} {human_seconds(extra)} longer than the median")
    return notes or ["the ranks differ by less than 1 % of the span"]


def _why_rank_is_late(late: RankTrace, ranks: Sequence[RankTrace], limit: float) -> str:
    peers = [r for r in ranks if r is not late]
    extra, label = max(((of(late) or 0.0) - _median_of(peers, of), label) for label, of in _REASONS)
    return f"; {label} {human_seconds(extra)} longer than they" if extra > limit else ""


def _matrix_product_block(rank: RankTrace) -> str:
    """Matrix products and attention: what they reach of the peak and of the roofline."""
    title = f"Matrix products of rank {rank.rank}"
    if not rank.products:
        return f"{title}: n/a, the trace has no operators, or none that launched a kernel"
    speed, peak, roofline = overall_rates(rank.products)
    seconds = sum(product.seconds for product in rank.products)
    rows = text_table(
        rank.products[:_MAX_ROWS],
        Column("operator", lambda p: p.op.replace("_attention", "").replace("_backward", " bwd")),
        Column("MxNxK", lambda p: p.shape or "n/a"),
        Column("type", lambda p: _DTYPES.get(p.dtype, p.dtype) or "n/a"),
        Column("calls", lambda p: p.count, COUNT),
        Column("time", lambda p: p.seconds, SECONDS),
        Column("TFLOP/s", lambda p: _tera_text(p.flops / p.seconds if p.flops and p.seconds else None)),
        Column("peak", lambda p: p.peak_ratio, RATIO),
        Column("roof", lambda p: p.roofline_ratio, RATIO),
    )
    blocks = [
        f"{title}, {human_seconds(seconds)}, {human_share(seconds, rank.span_seconds)} of the span",
        f"  on {rank.device_name or 'an unknown device'}: {_tera_text(speed)} TFLOP/s, "
        f"{human_ratio(peak)} of the peak, {human_ratio(roofline)} of the roofline",
        rows,
    ]
    if len(rank.products) > _MAX_ROWS:
        blocks.append(f"  and {human_count(len(rank.products) - _MAX_ROWS)} more: --json has all")
    blocks += [f"  n/a: {gap}" for gap in dict.fromkeys(p.unknown for p in rank.products) if gap]
    return "\n".join(blocks)


_DTYPES = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32", "float64": "fp64"}


def _tera_text(flops: float | None) -> str:
    return "n/a" if flops is None else f"{flops / 1e12:.1f}"


def _idle_stream_block(rank: RankTrace) -> str:
    """The streams of a rank: why they are idle, and how far the host is ahead."""
    if not rank.streams:
        return f"Idle streams of rank {rank.rank}: n/a, the trace has no launches of the host"
    streams = rank.streams[:_MAX_ROWS]
    causes = [name for name, _ in _CAUSES if any(getattr(lane.idle, name) for lane in streams)]
    name: Column[StreamTime] = Column("stream", lambda lane: f"{lane.device}/{lane.stream}")
    idle = text_table(
        streams,
        name,
        Column("events", lambda lane: lane.events, COUNT),
        Column("idle", lambda lane: human_share(lane.idle.seconds, lane.span_seconds)),
        *map(_idle_share_column, causes),
    )
    queue = text_table(
        streams,
        name,
        Column("mean", lambda lane: "n/a" if lane.queue_mean is None else f"{lane.queue_mean:.1f}"),
        Column("most", lambda lane: lane.queue_most, COUNT),
        Column("empty", lambda lane: lane.queue_empty_ratio, RATIO),
        Column("launch to start", lambda lane: lane.delay_seconds, SECONDS),
    )
    return (
        f"Idle streams of rank {rank.rank}, and what the next event waited for\n{idle}\n\n"
        f"Launched and not begun, of rank {rank.rank}\n{queue}"
    )


def _idle_share_column(cause: str) -> Column[StreamTime]:
    return Column(cause, lambda lane: human_share(getattr(lane.idle, cause), lane.idle.seconds))


def _critical_path_block(rank: int, path: CriticalPath) -> str:
    """The waits of the moments of a step, by kind, then by name."""
    kinds = ", ".join(
        f"{human_share(seconds, path.seconds)} {kind}" for kind, seconds in path.kinds.items()
    )
    rows = text_table(
        path.parts[:_MAX_ROWS],
        Column("name", lambda row: row.name),
        Column("what", lambda row: row.kind),
        Column("parts", lambda row: row.count, COUNT),
        Column("time", lambda row: row.seconds, SECONDS),
        Column("share", lambda row: human_share(row.seconds, path.seconds)),
        cuts=[0],
    )
    blocks = [
        f"Critical path of step {path.step} of rank {rank}, {human_seconds(path.seconds)}",
        f"  {kinds}",
        rows,
    ]
    if path.inferred:
        blocks.append(
            f"  {human_count(path.inferred)} waits for another stream are inferred: the trace has no "
            "cuda_sync events (enable_cuda_sync_events)"
        )
    return "\n".join(blocks)


def as_diff(names: Sequence[str], diff: TraceDiff) -> str:
    """The differences between the traces *names*; only those beyond noise have a row."""
    heads = [
        f"{letter}  {name}: {counted(count, 'step')} of a rank"
        for letter, name, count in zip("AB", names, diff.samples, strict=True)
    ]
    rows = text_table(
        diff.parts,
        Column("a step", lambda row: row.name),
        Column("A", lambda row: row.before.seconds, SECONDS),
        Column("B", lambda row: row.after.seconds, SECONDS),
        *_DIFFERENCE,
    )
    blocks = ["\n".join(heads), rows]
    changed = [row for row in diff.rows if row.change is not None]
    if changed:
        blocks.append(_changed_rows_table(changed))
    elif not diff.changed:
        blocks.append("Nothing differs beyond noise.")
    if diff.changed and not any(row.change in OF_CALLS for row in diff.changed):
        blocks.append("Both make the same calls: they differ in time alone.")
    ratio = diff.common_ratio
    if ratio is not None and abs(ratio - 1) > MIN_FIGURE_SHARE:
        change = f"{human_ratio(abs(ratio - 1))} {'longer' if ratio > 1 else 'shorter'}"
        blocks.append(f"All kernels are {change} (median of the families): rows are beyond that.")
    if min(diff.samples) < 2:
        blocks.append("One step a side has no known noise: what differs by less than half has no row.")
    return "\n\n".join(blocks) + "\n"


_DIFFERENCE: tuple[Column[Row], ...] = (
    Column("difference", lambda row: signed(human_seconds, row.after.seconds - row.before.seconds)),
    Column("99 %", lambda row: "n/a" if (s := row.noise_seconds) is None else f"± {human_seconds(s)}"),
)
"""The difference in time, and its uncertainty."""


def _changed_rows_table(rows: Sequence[Row]) -> str:
    def usage_cell(row: Row, usage: Usage) -> str:
        if row.what is What.HOST:
            return human_seconds(usage.seconds)
        amount = f"{human_calls(usage.calls)} x, {human_seconds(usage.seconds)}"
        exposed = f", {human_seconds(usage.exposed_seconds)} exposed"
        return amount if row.what is What.KERNEL else amount + exposed

    cells = text_table(
        rows[: 2 * _MAX_ROWS],
        Column("what differs, a step", lambda row: row.name),
        Column("kind", lambda row: row.what.value),
        Column("how", lambda row: str(row.change.value) if row.change is not None else ""),
        Column("A", lambda row: usage_cell(row, row.before)),
        Column("B", lambda row: usage_cell(row, row.after)),
        *_DIFFERENCE,
        cuts=[0],
    )
    hidden = len(rows) - 2 * _MAX_ROWS
    return cells + (f"\n  and {human_count(hidden)} more: --json has all" if hidden > 0 else "")


def _collective_op_block(rank: RankTrace) -> str:
    rows = text_table(
        rank.ops[:_MAX_ROWS],
        Column("operation", lambda op: f"{op.op} {op.group}".strip()),
        Column("calls", lambda op: op.count, COUNT),
        Column("bytes", lambda op: human_bytes(op.nbytes) if op.nbytes else "-"),
        Column("time", lambda op: op.seconds, SECONDS),
        Column("exposed", lambda op: op.exposed_seconds, SECONDS),
        Column("busbw", lambda op: human_rate(rate) if (rate := op.busbw_bytes_per_second) else "-"),
    )
    return f"Communication of rank {rank.rank}\n{rows}"


def _fsdp_unit_block(rank: RankTrace) -> str:
    rows = text_table(
        rank.units[:_MAX_ROWS],
        Column("unit", lambda unit: unit.unit),
        Column("calls", lambda unit: unit.count, COUNT),
        Column("time", lambda unit: unit.communication_seconds, SECONDS),
        Column("exposed", lambda unit: unit.exposed_seconds, SECONDS),
    )
    return f"FSDP units of rank {rank.rank}\n{rows}"


def _kernel_family_block(rank: RankTrace, all_of_them: bool) -> str:
    rows = text_table(
        rank.families[: None if all_of_them else _FIRST_ROWS],
        Column("family", lambda family: family.name),
        Column("calls", lambda family: family.count, COUNT),
        Column("time", lambda family: family.seconds, SECONDS),
        Column("of span", lambda family: human_share(family.seconds, rank.span_seconds)),
        cuts=[0],
    )
    return f"Kernels of rank {rank.rank} by family\n{rows}"


# ---- what hangs by the Flight Recorder's dumps, as text -----------------------------------------


# ---- snapshots of torch's allocator as text -----------------------------------------------------

_MAX_HELD = 10
_SHORT = {allocations.OPTIMIZER_STATE: "optimizer", allocations.COMMUNICATION: "comm buffers"}


def memory_text(name: str, devices: Sequence[allocations.DeviceMemory]) -> str:
    """One file: for each device its segments, roles, the peak, and allocations that failed."""
    blocks = [block for device in devices for block in _device_memory_blocks(name, device)]
    return "\n\n".join(blocks or [f"{name} holds no memory"]) + "\n"


def as_growth(names: Sequence[str], rows: Sequence[allocations.Grown]) -> str:
    """The stacks that hold more in the second file, and those that hold less."""
    heads = [f"{letter}  {name}" for letter, name in zip("AB", names, strict=True)]
    if not rows:
        return "\n".join([*heads, "", "  every stack holds as much in both"]) + "\n"
    total = sum(row.after_bytes - row.before_bytes for row in rows)
    grown = text_table(
        # The tail of the rest: rows[-3:] of a short list would repeat rows of the head
        [*rows[:_MAX_HELD], *rows[_MAX_HELD:][-3:]],
        Column("where", lambda row: allocations.stack_origin(row.stack)),
        Column("role", lambda row: _SHORT.get(row.role, row.role)),
        Column("count", lambda row: f"{row.count:+,}"),
        Column("B", lambda row: row.after_bytes, BYTES),
        Column("B - A", lambda row: signed(human_bytes, row.after_bytes - row.before_bytes)),
        cuts=[0],
    )
    return "\n".join([*heads, "", f"{signed(human_bytes, total)} in all", grown]) + "\n"


def _device_memory_blocks(name: str, device: allocations.DeviceMemory) -> list[str]:
    reserved = device.reserved_bytes
    head = (
        f"Device {device.device} of {name}: {human_bytes(device.allocated_bytes)} allocated of "
        f"{human_bytes(reserved)} reserved"
    )
    rows = text_table(
        device.segments,
        Column("segments", lambda row: row.kind or "-"),
        Column("count", lambda row: row.count, COUNT),
        Column("reserved", lambda row: row.reserved_bytes, BYTES),
        Column("allocated", lambda row: row.allocated_bytes, BYTES),
        Column("awaits free", lambda row: row.pending_bytes, BYTES),
        Column("inactive", lambda row: row.inactive_bytes, BYTES),
    )
    share = human_share(device.stranded_bytes, reserved)
    fragments = (
        f"  fragmentation: {human_bytes(device.stranded_bytes)} ({share} of reserved) inactive in "
        f"segments in use\n  largest free block: {human_bytes(device.largest_inactive_bytes)}"
    )
    blocks = [f"{head}\n{rows}\n{fragments}", _memory_role_table(device)]
    if device.peak is None:
        blocks.append(
            "The peak is n/a: the file has no history of allocations\n"
            f"  torch.cuda.memory._record_memory_history() records it\n{_held_table(device.held)}"
        )
    else:
        blocks.append(f"{_memory_peak_text(device.peak)}\n{_held_table(device.peak.held)}")
    if device.ooms:
        rows = text_table(
            device.ooms,
            Column("where", lambda oom: allocations.stack_origin(oom.stack)),
            Column("after", lambda oom: oom.seconds, SECONDS),
            Column("asked for", lambda oom: oom.nbytes, BYTES),
            Column("allocated", lambda oom: oom.allocated_bytes, BYTES),
            Column("free", lambda oom: oom.device_free_bytes, BYTES),
            cuts=[0],
        )
        blocks.append(f"Allocations that failed, and what the device had free\n{rows}")
    return blocks


def _memory_peak_text(peak: allocations.Peak) -> str:
    delay = "" if peak.seconds is None else f", {human_seconds(peak.seconds)} after the first"
    sentence = (
        f"The peak: {human_bytes(peak.nbytes)} allocated of {human_bytes(peak.reserved_bytes)} "
        f"reserved\n  at event {peak.event + 1:,} of {peak.events:,}{delay}"
    )
    if peak.untold_bytes:
        sentence += (
            f"\n  {human_bytes(abs(peak.untold_bytes))} of it belong to no allocation of the file"
        )
    return sentence


def _memory_role_table(device: allocations.DeviceMemory) -> str:
    current, peak = device.roles["now"], device.roles.get("peak")
    rows = [
        (role, _role_bytes_text(peak, role), _role_bytes_text(current, role))
        for role in dict.fromkeys([*(peak or ()), *current])
    ]
    table = aligned_table(("role", "at the peak", "now"), rows)
    is_hidden = any("n/a" in cells[0 if peak else 1 :] for _, *cells in rows)
    note = "\n  n/a: its bytes may be among the unknown ones" if is_hidden else ""
    return f"By role, as far as stacks tell\n{table}{note}"


def _role_bytes_text(bytes_by_role: Mapping[str, int] | None, role: str) -> str:
    """The bytes of a role; n/a, not 0 B, where no stack tells what other bytes are for."""
    if bytes_by_role is None or (role not in bytes_by_role and allocations.UNKNOWN in bytes_by_role):
        return "n/a"
    return human_bytes(bytes_by_role.get(role, 0))


def _held_table(holdings: Sequence[allocations.Holding]) -> str:
    table = text_table(
        holdings[:_MAX_HELD],
        Column("where", lambda item: allocations.stack_origin(item.stack)),
        Column("role", lambda item: _SHORT.get(item.role, item.role)),
        Column("count", lambda item: item.count, COUNT),
        Column("bytes", lambda item: item.nbytes, BYTES),
        cuts=[0],
    )
    if len(holdings) > _MAX_HELD:
        tail = holdings[_MAX_HELD:]
        table += f"\n  and {human_bytes(sum(o.nbytes for o in tail))} of {len(tail):,} other stacks"
    return table
