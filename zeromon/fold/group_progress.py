"""How far a rank has come in each process group: what it waits in, and what it has called. Pure.

Three counts meet here. The hooks number what Python issues; the group itself numbers all, also what C++
issues; torch's Flight Recorder lists what is in flight by the group's own numbers. Only the group's own
numbers can be compared between ranks, and an operation is shown only with the number that it has.
"""

from zeromon.fold.collectives import in_flight_calls
from zeromon.fold.state import NO_CALLS, RankState, group_id, group_label
from zeromon.ring.events import OP, PHASE, ExitKind, Flag, Issued, Raw, decode_record
from zeromon.snapshot import CallHistory, GroupProgress, InFlight, MemberCall

REDUCER = "DDP's reducer"
"""The unit of a collective that DDP's reducer issued."""
_INFERRED = int(Flag.INFERRED)  # an IntFlag's own `&` takes a microsecond
_MAX_IN_FLIGHT = 16
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
    of_group = state.group_calls.get(group, NO_CALLS)
    call = _newest_group_call(state, group)
    return GroupProgress(
        group_id=group_id(state, group), label=group_label(state, group),
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
        if group_id(state, group) == group_name
    ]


def in_flight_rows(state: RankState) -> tuple[InFlight, ...]:
    """The oldest collectives in flight; of a rank that an exception ended, also the one that raised."""
    # where training stands still, it may wait for a thread that waits for other ranks
    entries = in_flight_calls(state, background=bool(state.meta.get("stack")))
    if state.exit is not None and state.exit.how == ExitKind.EXCEPTION:
        entries += _raised_calls(state)
    rows = [
        InFlight(
            op=e.op.label, group=group_label(state, e.group), sequence=number,
            unit=state.units.get(e.unit, ""), phase=e.phase.label, nbytes=e.nbytes, issued_ns=e.t_ns,
            group_id=group_id(state, e.group),
        )
        for group in {e.group for e in entries}
        for number, e in _number_entries(state, [e for e in entries if e.group == group]).items()
    ]  # fmt: skip
    return tuple(sorted(rows, key=lambda row: row.issued_ns)[:_MAX_IN_FLIGHT])


def _raised_calls(state: RankState) -> list[Issued]:
    """The calls that raised and were the newest of their group."""
    records = (
        of_group.failed
        for of_group in state.group_calls.values()
        if of_group.failed[4] > 0 and of_group.failed[4] == of_group.last[4]
    )
    return [event for record in records if isinstance(event := decode_record(record), Issued)]


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
