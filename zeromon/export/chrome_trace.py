"""Exports a run as a trace for Perfetto and chrome://tracing, without any guessed event.

Every step of the history is a slice of its rank, with its phases as sums among its arguments, for when
they were is not kept. Of the last steps the ring still knows each phase, collective and wait with its
moments: those are slices, too. Memory and exposed communication are counters. Times are microseconds
since the first step; slices that overlap are spread over lanes, for those of a thread must nest.
"""

import gzip
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack
from typing import IO, Any

import msgspec

from zeromon.export.files import Export, replacement_file
from zeromon.fold.lanes import COMMUNICATION, SPENT, SPENT_ON_DEVICE, WAITS, event_spans
from zeromon.readout.breakdown import PHASES
from zeromon.ring.events import Event, Exit, HostSample, MemorySample, Oom
from zeromon.ring.slices import RingEvents
from zeromon.snapshot import RunSnapshot
from zeromon.snapshot.step import IDLE, NOT_TIMED, SKIPPED, UNTIMED

Slice = tuple[float, float, str, dict[str, Any]]
"""Start and duration in microseconds, name and arguments of a slice."""

TraceEvent = dict[str, Any]

_STEPS = 1
_THREADS = {
    SPENT: (10, "phases"),
    WAITS: (20, "waits for communication"),
    COMMUNICATION: (30, "communication"),
    SPENT_ON_DEVICE: (40, "phases on the device"),
}
"""Thread numbers of a rank and their titles; further lanes of a kind count up from its number."""
_LANES = 9
_ARGUMENTS = (
    *(f"{phase}_us" for phase in PHASES),
    "communication_us", "exposed_us", "offload_blocked_us", "collectives", "collective_bytes",
    "micro_steps",
)  # fmt: skip
_MEMORY = ("rss_bytes", "allocated_bytes", "reserved_bytes")


def write_trace(export: Export) -> str:
    """Writes the trace, packed where the path ends in .gz; returns a note on rows without a slice."""
    import polars as pl

    run, encode, merged = export.run, msgspec.json.Encoder().encode, 0
    # The time 0 of the trace: the start-up before the first step
    firsts = [frame.select(pl.col("start_us").min()).collect().item() for frame in export.steps]
    startup = max((rank.ledger.startup_seconds or 0.0 for rank in run.ranks), default=0.0)
    first_us = min((int(start_us) for start_us in firsts if start_us is not None), default=0)
    first_us -= round(1e6 * startup)
    with ExitStack() as closing:
        path = closing.enter_context(replacement_file(export.path, force=export.force))
        file: IO[bytes] | gzip.GzipFile = closing.enter_context(path.open("wb"))
        if export.path.suffix == ".gz":
            # Without a name: the header would have that of the temporary file
            file = closing.enter_context(gzip.GzipFile("", "wb", 1, file))
        file.write(b'{"displayTimeUnit":"ms","otherData":')
        file.write(encode({"run": run.run, "command": " ".join(run.command), "start_us": first_us}))
        file.write(b',"traceEvents":[\n')
        file.write(b",\n".join(map(encode, process_name_events(run))))
        for row in export.rows():
            merged += row["steps"] > 1
            file.writelines(b",\n" + encode(event) for event in step_events(row, first_us))
        for ring in export.rings:
            file.writelines(b",\n" + encode(event) for event in ring_events(ring, first_us))
        file.write(b"\n]}\n")
    return f"{merged:,} rows are of many steps each: counters, no slices" if merged else ""


def process_name_events(run: RunSnapshot) -> Iterator[TraceEvent]:
    """Yields the names and the order of processes and threads."""
    for rank in run.ranks:
        title = f"rank {rank.rank} ({rank.strategy}, {rank.device}, {rank.node or run.node})"
        yield _name_event("process_name", rank.rank, 0, name=title)
        yield _name_event("process_sort_index", rank.rank, 0, sort_index=rank.rank)
        yield _name_event("thread_name", rank.rank, _STEPS, name="steps")


def _name_event(kind: str, rank: int, thread: int, **args: Any) -> TraceEvent:
    return {"ph": "M", "name": kind, "pid": rank, "tid": thread, "ts": 0, "args": args}


# ---- the history -----------------------------------------------------------------------------------


_FLAGS = (("idle", IDLE), ("skipped", SKIPPED), ("untimed", UNTIMED))


def step_events(row: dict[str, Any], first_us: int) -> Iterator[TraceEvent]:
    """Yields the slice of a step and its counters. A row of many steps has no slice."""
    start, rank = row["start_us"] - first_us, row["rank"]
    if row["steps"] == 1:
        args = {name: row[name] for name in _ARGUMENTS if row[name] is None or row[name] >= 0}
        args |= {name: True for name, bit in _FLAGS if row["flags"] & bit}
        step_slice = (start, row["duration_us"], f"step {row['step']}", args)
        yield _slice_event(rank, _STEPS, "step", step_slice)
    memory = {name: row[name] for name in _MEMORY if row[name] >= 0}
    if memory:
        yield _counter_event(rank, "memory, most of a step (bytes)", start, memory)
    if not row["flags"] & NOT_TIMED:
        waits = {"exposed_us": row["exposed_us"]}
        yield _counter_event(rank, "exposed communication (us a step)", start, waits)


def _slice_event(rank: int, thread: int, kind: str, trace_slice: Slice) -> TraceEvent:
    start, duration, name, args = trace_slice
    return {
        "ph": "X", "cat": kind, "name": name, "pid": rank, "tid": thread, "ts": start,
        "dur": duration, "args": args,
    }  # fmt: skip


def _counter_event(rank: int, name: str, at: float, values: Mapping[str, float]) -> TraceEvent:
    return {"ph": "C", "name": name, "pid": rank, "tid": 0, "ts": at, "args": values}


# ---- the ring --------------------------------------------------------------------------------------


def ring_events(ring: RingEvents, first_us: int) -> Iterator[TraceEvent]:
    """Yields the slices and instants of the events in the ring of a rank."""
    kinds: dict[int, list[Slice]] = {kind: [] for kind in _THREADS}

    def to_us(t_ns: int) -> float:
        return (t_ns + ring.wall_minus_mono_ns - first_us * 1000) / 1000

    for event in ring.events:
        for kind, start_ns, end_ns, name, args in event_spans(ring, event):
            if end_ns > start_ns:
                kinds[kind].append((to_us(start_ns), (end_ns - start_ns) / 1000, name, args))
        yield from _sample_events(ring, event, to_us(event.t_ns))
    for kind, (first_thread, title) in _THREADS.items():
        for thread, slices in enumerate(spread_over_lanes(kinds[kind])[:_LANES], first_thread):
            yield _name_event("thread_name", ring.rank, thread, name=title)
            yield from (_slice_event(ring.rank, thread, title, span) for span in slices)


def _sample_events(ring: RingEvents, e: Event, at: float) -> Iterator[TraceEvent]:
    if isinstance(e, MemorySample):
        values = {"allocated_bytes": e.allocated_bytes, "reserved_bytes": e.reserved_bytes}
        yield _counter_event(ring.rank, "allocator, sampled (bytes)", at, values)
    elif isinstance(e, HostSample) and e.rss_bytes >= 0:
        yield _counter_event(ring.rank, "RSS, sampled (bytes)", at, {"rss_bytes": e.rss_bytes})
    elif isinstance(e, Oom):
        args = {"requested_bytes": e.requested_bytes, "free_bytes": e.free_bytes}
        yield _instant_event(ring.rank, "out of memory", at, args)
    elif isinstance(e, Exit):
        message = ring.texts.get(e.text, "")
        yield _instant_event(
            ring.rank, f"end: {e.how.name.lower()}", at, {"text": message} if message else {}
        )


def _instant_event(rank: int, name: str, at: float, args: dict[str, Any]) -> TraceEvent:
    return {"ph": "i", "s": "p", "name": name, "pid": rank, "tid": _STEPS, "ts": at, "args": args}


def spread_over_lanes(slices: Iterable[Slice]) -> list[list[Slice]]:
    """Distributes slices over as few lanes as keep them from overlapping."""
    by_lane: list[list[Slice]] = []
    end_times: list[float] = []
    for trace_slice in sorted(slices, key=lambda s: (s[0], s[1])):
        free = next(
            (i for i, end_us in enumerate(end_times) if end_us <= trace_slice[0]), len(end_times)
        )
        if free == len(end_times):
            by_lane.append([])
            end_times.append(0.0)
        by_lane[free].append(trace_slice)
        end_times[free] = trace_slice[0] + trace_slice[1]
    return by_lane
