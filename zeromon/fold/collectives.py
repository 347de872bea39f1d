"""Folds collectives: counts, bytes, times, exposed communication, and what is in flight."""

from typing import Final

from zeromon.fold.collective_stats import CollectiveStats, OpTotals, size_bucket_index
from zeromon.fold.state import MAX_IN_FLIGHT, NO_CALLS, Arrival, Call, RankState, folds_event
from zeromon.ring.codes import Dtype, ExitKind, Flag, Kind, Op, Untimed
from zeromon.ring.events import (
    OP,
    PHASE,
    Counted,
    Done,
    GroupSequence,
    Issued,
    Raw,
    Stall,
    decode_record,
    pack_call_word,
)
from zeromon.snapshot.communication import SIZE_BOUNDS, CallHistory, GroupProgress, InFlight, MemberCall

_INFERRED: Final = int(Flag.INFERRED)  # an IntFlag's own `&` takes a microsecond
_FAILED: Final = int(Flag.FAILED)
_AHEAD: Final = int(Flag.AHEAD)
_DEVICE: Final = int(Flag.DEVICE)
_SPAN_KNOWN: Final = int(Flag.SPAN_KNOWN)
_QUANTIZED: Final = frozenset((Dtype.INT8, Dtype.FLOAT8_E4M3FN, Dtype.FLOAT8_E5M2))
_QUANTIZED_OPS: Final = frozenset((Op.ALL_GATHER, Op.ALL_TO_ALL, Op.REDUCE_SCATTER))
_ISSUED: Final = int(Kind.ISSUED)
_DONE: Final = int(Kind.DONE)
_MAX_CALLS = 1 << 14


def is_collective_call(record: Raw) -> bool:
    """Returns True if *record* says that a collective was issued or has ended."""
    return record[2] & 255 in (_ISSUED, _DONE)


def shared_call_of(state: RankState, word2: int) -> Call | None:
    """Returns what the collectives with this word 2 have in common; None where it is not known."""
    op, phase, flags = word2 >> 8 & 255, word2 >> 16 & 255, word2 >> 24 & 255
    group, unit = word2 >> 32 & 0xFFFF, word2 >> 48
    # A damaged record, or one of a newer agent: the index would raise and end the fold of the ring
    if op >= len(OP) or phase >= len(PHASE):
        return None
    is_issue = word2 & 255 == _ISSUED
    counts = not flags & (_INFERRED if is_issue else _FAILED)
    if counts:
        row = state.stats_row(OP[op], group, PHASE[phase], unit)
    else:
        # A row of its own: stats_row() would list calls in the traffic that it never counts
        row = CollectiveStats(OP[op], 1, 0, OpTotals())
    # A damaged ring has any number of words, and each would stay in the dict.
    # Cleared in place, because fold_records() holds it
    if len(state.calls) >= _MAX_CALLS:
        state.calls.clear()
    call = state.calls[word2] = Call(
        is_issue, counts, OP[op], PHASE[phase], group, unit, bool(flags & _AHEAD),
        bool(flags & _DEVICE), bool(flags & _SPAN_KNOWN), state.group_calls[group], row,
    )  # fmt: skip
    return call


def fold_call_record(state: RankState, call: Call, record: Raw) -> None:
    """Folds the record of a collective; *call*: what :func:`shared_call_of` returns for it."""
    if call.counts:
        if call.is_issue:
            _fold_issued_call(state, call, record)
        else:
            _fold_ended_call(state, call, record)
    elif call.is_issue:  # kept to show a hang
        call.of_group.inferred[record[4]] = record
    else:
        of_group, sequence = call.of_group, record[6]
        if sequence > of_group.ended:
            of_group.ended = sequence
        if record[2] >> 24 & _INFERRED:
            of_group.inferred.pop(sequence, None)
        elif sequence in of_group.in_flight:
            of_group.failed = of_group.in_flight.pop(sequence)


def _fold_issued_call(state: RankState, call: Call, record: Raw) -> None:
    _, _, _, nbytes, sequence, dtype, engine, _ = record
    of_group, row = call.of_group, call.row
    totals = row.totals
    totals.count += 1
    totals.nbytes += nbytes
    if dtype in _QUANTIZED and call.op in _QUANTIZED_OPS:
        totals.quantized_bytes += nbytes
    if sequence > 0:  # groups do not number sends and receives
        of_group.recent.append(record)
    if nbytes != row.bucket_of:
        row.bucket_of, row.bucket = nbytes, size_bucket_index(nbytes)
    row.sizes[row.bucket] += 1
    row.calls += 1
    row.nbytes += nbytes
    # Without the first test, a call without a unit equals the unknown background unit: both are 0.
    # Without the return, another thread's call counts in the step and sets the phase of training
    if call.unit and call.unit == state.background_unit:
        if len(of_group.background) < MAX_IN_FLIGHT:
            of_group.background[sequence] = record
        return
    if engine:
        of_engine = state.engines[engine]
        of_engine.collectives += 1
        of_engine.nbytes += nbytes
    window = state.window
    window.collectives += 1
    window.nbytes += nbytes
    # Nearly every record passes the test, which costs less than a call of at()
    step_sums = row.now if row.step == state.timed_steps else row.at(state.timed_steps)
    step_sums.calls += 1
    step_sums.nbytes += nbytes
    state.phase = call.phase
    state.unit = call.unit
    # A collective that nobody waits for has no DONE: a loop without steps would add them all
    if len(of_group.in_flight) < MAX_IN_FLIGHT:
        of_group.in_flight[sequence] = record


def _fold_ended_call(state: RankState, call: Call, record: Raw) -> None:
    _, t_ns, _, nbytes, issued_ns, blocked_ns, sequence, _ = record
    of_group, unit, row = call.of_group, call.unit, call.row
    issued = of_group.in_flight.pop(sequence, None)
    # Waits come in any order, and so do their records: the newest number stays
    if sequence > of_group.ended:
        of_group.ended = sequence
    duration = t_ns - issued_ns if t_ns > issued_ns else 0
    totals = row.totals
    totals.timed += 1
    totals.duration_ns += duration
    known_bytes, known_ns = (nbytes, duration) if call.span_known else (0, 0)
    totals.recent_bytes += known_bytes
    totals.recent_unknown_bytes += nbytes - known_bytes
    totals.recent_ns += known_ns
    if unit and unit == state.background_unit:  # its thread has waited, and no step
        of_group.background.pop(sequence, None)
        return
    totals.exposed_ns += blocked_ns
    row.exposed_ns += blocked_ns
    on_device = call.on_device and state.on_device
    # The host is steps ahead: by its count, the times of ten steps of the device fall into one
    timed_steps = state.device_steps if on_device else state.timed_steps
    if on_device:
        step_sums = row.at_device(timed_steps)
    else:
        step_sums = row.now if row.step == timed_steps else row.at(timed_steps)
    step_sums.busy_ns += duration
    step_sums.known_bytes += known_bytes
    step_sums.known_ns += known_ns
    step_sums.exposed_ns += blocked_ns
    window = state.device_window if on_device else state.window
    window.timed += 1
    window.ended.append(record)
    if sequence > 0:
        step = _collective_step(state, issued_ns, on_device=call.on_device)
        (state.step_arrivals if on_device else state.arrivals).append(
            Arrival(
                call.group, sequence, issued_ns, t_ns, nbytes, blocked_ns, t_ns - blocked_ns, step,
                timed_steps, row, on_device, span_known=call.span_known, on_host=not call.on_device,
            )
        )  # fmt: skip
    else:
        state.pipeline.waited_ns += blocked_ns
    if blocked_ns:
        if call.on_device:  # a stream's waits are disjoint; the host's times of issue are not
            window.stall_ns += blocked_ns
        else:
            window.blocked.append(record)
            if blocked_ns > t_ns - issued_ns:
                window.began_before = True
        # At the next border, _fold_device_phase() adds a device's wait: here it would count twice
        window.phase_exposed_ns[call.phase] += 0 if on_device else blocked_ns
        state.exposed_ns += blocked_ns
        if unit:
            state.unit_totals[unit].exposed_ns += blocked_ns
        # A DONE names no DeepSpeed engine; only the record of its issue does
        if issued is not None and issued[6]:
            state.engines[issued[6]].exposed_ns += blocked_ns
    # Only ZeRO-3 reports gathered bytes: without this test each all-gather of FSDP2 counts as late
    if unit and state.gathers and call.op is Op.ALL_GATHER:
        state.gathers.setdefault(call.is_ahead, [0, 0])[1] += blocked_ns
        if not call.is_ahead:
            window.late_ns += blocked_ns


def _collective_step(state: RankState, issued_ns: int, *, on_device: bool) -> int:
    """The step of a collective; of a device that in which it is, for the host is ahead."""
    if on_device and state.history:
        return state.history[-1].step + 1
    return state.step + 1 if issued_ns >= state.step_end_ns else state.step


def _fold_call_event(state: RankState, e: Issued | Done) -> None:
    """Folds the event of a record as the record itself."""
    kind = _ISSUED if isinstance(e, Issued) else _DONE
    word2 = pack_call_word(kind, e.op, e.phase, e.flags, e.group, e.unit)
    call = state.calls.get(word2) or shared_call_of(state, word2)
    if call is not None:
        a, b, c, d = e[6:]
        fold_call_record(state, call, (0, e.t_ns, word2, a, b, c, d, 0))


folds_event(Issued)(_fold_call_event)
folds_event(Done)(_fold_call_event)


@folds_event(Counted)
def _fold_counted_calls(state: RankState, e: Counted) -> None:
    state.untimed[e.group] = state.untimed.get(e.group, 0) + e.calls
    state.window.collectives += e.calls
    if e.why == Untimed.IN_CPP:
        state.in_cpp += e.calls
    # A control step counts calls from Python: they must not erase what DDP's reducer sent last
    if e.why != Untimed.CONTROL_STEP:
        by_reducer = e.why == Untimed.REDUCER and e.op is not Op.NONE
        state.group_calls[e.group].reduced = e if by_reducer else None
    if e.op is Op.NONE:
        state.unattributed[e.group] = state.unattributed.get(e.group, 0) + e.calls
        return
    totals = state.ops[e.op, e.group]
    totals.count += e.calls
    totals.nbytes += e.nbytes
    if e.calls > 0 and e.why != Untimed.CONTROL_STEP:  # of a control step only the sum is known
        # By their size, which is the mean where several came together
        counts = state.sizes.get(e.op)
        if counts is None:
            counts = state.sizes[e.op] = [0] * (len(SIZE_BOUNDS) + 2)
        counts[size_bucket_index(e.nbytes // e.calls)] += e.calls
        counts[-1] += e.nbytes
    if e.dtype in _QUANTIZED and e.op in _QUANTIZED_OPS:
        totals.quantized_bytes += e.nbytes
    if e.engine:
        engine = state.engines[e.engine]
        engine.collectives += e.calls
        engine.nbytes += e.nbytes
    state.window.nbytes += e.nbytes


@folds_event(Stall)
def _fold_stream_stall(state: RankState, e: Stall) -> None:
    window = state.device_window if state.on_device else state.window
    window.timed += e.calls
    window.waited_only += e.calls
    window.stall_ns += e.blocked_ns
    window.phase_exposed_ns[e.phase] += 0 if state.on_device else e.blocked_ns
    state.exposed_ns += e.blocked_ns
    # The reducer's wait is no queue of kernels: in the lag, it makes a launch-bound run device-bound
    state.reducer_wait_ns += e.blocked_ns if e.calls else 0
    if e.unit:
        state.unit_totals[e.unit].exposed_ns += e.blocked_ns
    group = e.group or state.unit_groups.get((e.op, e.unit))
    if group is None:
        return
    state.ops[e.op, group].exposed_ns += e.blocked_ns
    row = state.stats_row(e.op, group, e.phase, e.unit)
    row.exposed_ns += e.blocked_ns
    step_sums = row.at_device(state.device_steps) if state.on_device else row.at(state.timed_steps)
    step_sums.exposed_ns += e.blocked_ns
    row.calls += e.calls
    step_sums.calls += e.calls
    reduced = state.group_calls[group].reduced
    if e.calls and reduced is not None and reduced.calls > 0:  # by the newest step of the host
        step_sums.nbytes += reduced.nbytes * e.calls / reduced.calls
    if not e.sequence or not e.reached_ns:
        return
    if not e.calls:
        _note_stream_wait(state, group, e)
    # Its number is negated: it is the group's own, and must not meet an equal number of a hook
    else:  # the rank has arrived at the last of the calls, and waits
        state.arrivals.append(
            Arrival(
                group, -e.sequence, e.reached_ns, e.reached_ns + e.blocked_ns, 0, e.blocked_ns,
                e.reached_ns, _collective_step(state, e.reached_ns, on_device=True), state.device_steps,
                row, True, True,
            )
        )  # fmt: skip


def _note_stream_wait(state: RankState, group: int, e: Stall) -> None:
    """Notes from when on the rank waited, at collectives that another stream waited for.

    Where a group runs in order, a stream also waits for the collectives before the one it waits for.
    """
    left_ns = e.reached_ns + e.blocked_ns
    for arrival in reversed(state.step_arrivals):
        if arrival.group == group and arrival.sequence <= e.sequence:
            if arrival.ended_ns <= e.reached_ns:  # so have all before it
                return
            is_own = arrival.sequence == e.sequence
            arrival.blocked_ns += e.blocked_ns * is_own
            # One that goes on when the stream leaves does not hold it up
            if is_own or arrival.ended_ns <= left_ns:
                arrival.waits_from_ns = min(arrival.waits_from_ns, e.reached_ns)


@folds_event(GroupSequence)
def _fold_group_sequence(state: RankState, e: GroupSequence) -> None:
    last_sequence, last_seen = state.sequences.get(e.group, (0, 0))
    if e.sequence - e.seen > last_sequence - last_seen:
        of_group = state.group_calls[e.group]
        of_group.before_cpp = of_group.last[4]
    state.sequences[e.group] = (e.sequence, e.seen)


def forget_ended_calls(state: RankState, step_start_ns: int) -> None:
    """Drops collectives that cannot be in flight any more.

    A collective that nobody waited for sends no DONE. It has ended when its step is over and a later
    collective of its group has ended, because a group runs in order. One that was inferred ended with
    its step.
    """
    for of_group in state.group_calls.values():
        of_group.inferred.clear()
        for flying in (of_group.in_flight, of_group.background):
            for sequence, record in list(flying.items()):
                if record[1] < step_start_ns and sequence <= of_group.ended:
                    del flying[sequence]


# ---- how far a rank has come in each process group: what it waits in, and what it has called -----

# Three counts meet here. The hooks number what Python issues; the group itself numbers all, also what
# C++ issues; torch's Flight Recorder lists what is in flight by the group's own numbers. Only the
# group's own numbers can be compared between ranks, and an operation is shown only with the number that
# it has.

REDUCER = "DDP's reducer"
"""The unit of a collective that DDP's reducer issued."""
_MAX_IN_FLIGHT = 16
# The Flight Recorder has wall-clock times, which as CLOCK_MONOTONIC may precede the hook's
_CLOCK_SLACK_NS = 5_000_000
_CALL_NS = 1_000_000_000
"""From a hook to the entry in the Flight Recorder, at most."""


def issued_in_cpp(state: RankState, group: int) -> int:
    """Number of collectives of *group* that the hooks have not counted: C++ issued them.

    The hooks of an attached agent number as the group does, so nothing is to be added there.
    """
    sequence, hook_count = state.sequences.get(group, (0, 0))
    return 0 if state.meta.get("attached") else max(0, sequence - hook_count)


def group_progress_row(state: RankState, group: int, dim: str) -> GroupProgress:
    """How far the rank has come in *group*, with its newest call where that is known."""
    # Not by []: the defaultdict would grow while a snapshot reads it
    of_group = state.group_calls.get(group, NO_CALLS)
    call = _newest_group_call(state, group)
    return GroupProgress(
        group_id=state.group_id(group), label=state.group_label(group),
        ranks=tuple(state.groups[group].get("ranks", ())), sequence=call.sequence, op=call.op,
        nbytes=call.nbytes, unit=call.unit, phase=call.phase, dim=dim,
        step_sequence=of_group.step_until if of_group.step_until > of_group.step_from >= 0 else -1,
    )  # fmt: skip


def _newest_group_call(state: RankState, group: int) -> MemberCall:
    """The newest call in *group*; its operation is ``none`` where only its number is known."""
    of_group, in_cpp = state.group_calls.get(group, NO_CALLS), issued_in_cpp(state, group)
    counted = state.sequences.get(group, (-1, 0))[0]
    number = of_group.last[4]
    reduced, is_from_cpp = of_group.reduced, in_cpp > 0 and number <= of_group.before_cpp
    if is_from_cpp and reduced is not None:
        # Of several buckets the sum is known, which is the size of none of them
        nbytes = reduced.nbytes if reduced.calls == 1 else -1
        return MemberCall(
            rank=state.rank, sequence=counted, op=reduced.op.label, nbytes=nbytes, unit=REDUCER,
            phase=reduced.phase.label,
        )  # fmt: skip
    # of a control step, and of other C++, only the group's own count is known
    if number < 0 or is_from_cpp or counted > number + in_cpp:
        return MemberCall(rank=state.rank, sequence=counted)
    return _member_call(state, of_group.last, in_cpp)


def _member_call(state: RankState, record: Raw, in_cpp: int = 0) -> MemberCall:
    _, _, word2, nbytes, sequence, *_ = record
    return MemberCall(
        rank=state.rank, sequence=sequence + in_cpp, op=OP[word2 >> 8 & 255].label, nbytes=nbytes,
        unit=state.units.get(word2 >> 48, ""), phase=PHASE[word2 >> 16 & 255].label,
    )  # fmt: skip


def group_call_histories(state: RankState, group_name: str) -> list[CallHistory]:
    """The last calls of a rank in the group *group_name*, by the numbers of the hooks; [] for none."""
    return [
        CallHistory(
            rank=state.rank,
            calls=tuple(_member_call(state, record) for record in of_group.recent),
            in_cpp=issued_in_cpp(state, group),
        )
        for group, of_group in state.group_calls.items()
        if state.group_id(group) == group_name
    ]


def in_flight_rows(state: RankState) -> tuple[InFlight, ...]:
    """The oldest collectives in flight; of a rank that an exception ended, also the one that raised."""
    # where training stands still, it may wait for a thread that waits for other ranks
    background = bool(state.meta.get("stack"))
    has_raised = state.exit is not None and state.exit.how == ExitKind.EXCEPTION
    records: list[Raw] = []
    for of_group in state.group_calls.values():
        records += of_group.in_flight.values()
        records += of_group.inferred.values()
        if background:
            records += of_group.background.values()
        # A call that raised and was the newest of its group
        if has_raised and of_group.failed[4] > 0 and of_group.failed[4] == of_group.last[4]:
            records.append(of_group.failed)
    entries = [event for record in records if isinstance(event := decode_record(record), Issued)]
    rows = [
        InFlight(
            op=e.op.label, group=state.group_label(e.group), sequence=number,
            unit=state.units.get(e.unit, ""), phase=e.phase.label, nbytes=e.nbytes, issued_ns=e.t_ns,
            group_id=state.group_id(e.group),
        )
        for group in {e.group for e in entries}
        for number, e in _number_entries(state, [e for e in entries if e.group == group]).items()
    ]  # fmt: skip
    return tuple(sorted(rows, key=lambda row: row.issued_ns)[:_MAX_IN_FLIGHT])


def _number_entries(state: RankState, entries: list[Issued]) -> dict[int, Issued]:
    """Number of the group -> what is in flight, of one group.

    The Flight Recorder has the numbers of all, and names what a backend runs inside; a hook has the
    operation that Python called.
    """
    group = entries[0].group
    in_cpp, counted = issued_in_cpp(state, group), state.sequences.get(group, (0, 0))[0]
    listed = {e.sequence: e for e in entries if e.flags & _INFERRED and e.sequence}
    numbered = dict(listed)
    for entry in entries:
        if not entry.flags & _INFERRED:
            # C++ may have issued calls after this one: the sum of the two counts is then too high
            number = _listed_call_number(entry, listed) if listed and in_cpp else entry.sequence + in_cpp
            if number is not None:
                numbered[number] = entry
        elif not entry.sequence and not listed:  # the newest call of a control step
            numbered[counted] = entry
    return numbered


def _listed_call_number(hooked: Issued, listed: dict[int, Issued]) -> int | None:
    """The number under which the Flight Recorder lists a call; None where it has ended."""
    gaps = {n: e.t_ns - hooked.t_ns for n, e in listed.items()}
    near_gaps = {n: gap for n, gap in gaps.items() if -_CLOCK_SLACK_NS <= gap < _CALL_NS}
    return min(near_gaps, key=lambda number: abs(near_gaps[number]), default=None)
