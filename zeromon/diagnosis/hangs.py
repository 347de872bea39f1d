"""Which collective does not end, which ranks wait in it, and which members are missing. Pure.

A collective hangs when a rank has been in it for longer than a limit. A member is missing when its own
progress in the group has not reached the sequence number of the collective. Members on nodes that do not
report are listed apart. Sends and receives have numbers below zero, which a rank counts for itself: the
record does not name the peer.

After the end a hang is judged as it was when the ranks were stopped. Where members called different
things, the first difference of their last calls is the cause, however much later a call stuck.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

import msgspec

from zeromon.fold.collectives import REDUCER
from zeromon.snapshot import Hang, RankSnapshot, RunSnapshot
from zeromon.snapshot.communication import CallHistory, GroupProgress, HangKind, InFlight, MemberCall
from zeromon.snapshot.focus import has_left
from zeromon.snapshot.levels import HANG_SECONDS
from zeromon.snapshot.rank import Halt

MIN_HANG_NS = round(HANG_SECONDS * 1e9)
TIMES_A_STEP = 10
"""A collective in flight for less than so many median steps is no hang."""
_GONE_NS = 3_000_000_000
"""A heartbeat is a second old at most: a rank whose last event is older had ended before."""

_SUSPENDED = (Halt.SUSPENDED, Halt.TRACED)
"""No thread of such a process runs: what it is in cannot end, also where all others have left it."""

_SAME_SIZE = frozenset(("all_reduce", "all_gather", "reduce_scatter"))
"""Operations for which every member moves as many bytes."""

RecentCalls = Callable[[str], Sequence[CallHistory]]
"""Group -> the last calls of its members."""


def find_hangs(run: RunSnapshot) -> tuple[Hang, ...]:
    """The collectives that hang now, the oldest first."""
    return hangs_of(map(as_member, run.ranks), run.taken_ns)


class Member(msgspec.Struct, frozen=True, kw_only=True):
    """State of a rank that a hang is judged by: of this node, of another one, or of a dump."""

    rank: int
    alive: bool = True
    failed: bool = False
    """True if the process ended otherwise than by finishing."""
    ended: str = ""
    """As :attr:`zeromon.snapshot.rank.RankStatus.ended`."""
    has_left: bool = False
    """True if it finished while others waited for it."""
    halt: Halt = Halt.NONE
    stopped: str = ""
    """By what a person or the launcher stopped it."""
    last_event_ns: int = 0
    """0 where it is unknown."""
    step_seconds: float | None = None
    in_flight: tuple[InFlight, ...] = ()
    groups: tuple[GroupProgress, ...] = ()
    pause: str = ""
    """The reason why the rank is expected to take long; "" for none."""


def as_member(rank: RankSnapshot) -> Member:
    """Returns what a hang is judged by, of a rank of this node."""
    status = rank.status
    return Member(
        rank=rank.rank, alive=status.alive, failed=status.failed, ended=status.ended,
        has_left=has_left(rank), halt=status.halted, stopped=status.stopped,
        last_event_ns=status.last_event_ns, step_seconds=rank.steps.median_seconds,
        in_flight=rank.communication.in_flight, groups=rank.communication.groups, pause=status.pause,
    )  # fmt: skip


def hangs_of(
    ranks: Iterable[Member], now_ns: int, recent: RecentCalls = lambda _: ()
) -> tuple[Hang, ...]:
    """The collectives that hang among *ranks*, whose times are by one clock at *now_ns*.

    Of ranks that have ended, those that hung when they ended.
    """
    members = list(ranks)
    moment_ns = _observed_ns(members, now_ns)
    living_ranks = {rank.rank for rank in members if _is_alive_at(rank, moment_ns, now_ns)}
    stuck: dict[tuple[str, int], dict[int, InFlight]] = {}
    for rank in members:
        for entry in rank.in_flight if rank.rank in living_ranks else ():
            # Sends of several ranks may have one number: without the rank they would be one collective
            group = entry.group_id if entry.sequence >= 0 else f"{entry.group_id} of {rank.rank}"
            stuck.setdefault((group, entry.sequence), {})[rank.rank] = entry
    hanging = []
    for inside in stuck.values():
        age_ns = moment_ns - min(entry.issued_ns for entry in inside.values())
        # A younger call may have ended already: the record of a rank is up to a second behind
        if age_ns > _GONE_NS and not _is_left_behind(members, inside):
            hang = _build_hang(members, living_ranks, inside, moment_ns)
            steps_ns = TIMES_A_STEP * _step_ns(members, inside)
            # Where nobody is left to come, ten seconds of patience only delay the finding
            # Not by the sizes of gathers, which NCCL allows to differ
            differs = hang.kind is HangKind.MISMATCHED_OPERATIONS or (
                hang.kind is HangKind.MISMATCHED_SIZES and hang.op != "all_gather"
            )
            is_certain = differs and set(hang.waiting) == set(hang.members)
            least_ns = steps_ns if is_certain else max(MIN_HANG_NS, steps_ns)
            if age_ns > least_ns or hang.kind == HangKind.LEFT_MEMBER:  # it will not come
                hanging.append(hang)
    # The order counts: the first hang of a group is kept, and must be the oldest
    # What a group has in flight beside its first hang waits for it
    by_group: dict[tuple[str, tuple[int, ...]], Hang] = {}
    for hang in sorted(hanging, key=lambda h: -h.seconds):
        # Sends and receives of other ranks do not wait for each other: each stays a hang of its own
        by_group.setdefault((hang.group_id, hang.waiting if hang.sequence < 0 else ()), hang)
    hanging = _mark_deadlocks(list(by_group.values()))
    hanging = [since_difference(hang, recent) for hang in hanging]
    return (*hanging, *_broken_off_hangs(members, {hang.group_id for hang in hanging}, recent))


def _is_left_behind(members: Sequence[Member], inside: Mapping[int, InFlight]) -> bool:
    """Returns whether nobody waits in a call: only halted ranks are in it, as far as records show.

    The record of a halted rank stands still. The others may have left the call, and wait in a later one.
    """
    halts = [rank.halt for rank in members if rank.rank in inside]
    if Halt.NONE in halts:
        return False
    if all(halt in _SUSPENDED for halt in halts):
        return True
    call = next(iter(inside.values()))
    absent_progress = (_progress_in(rank, call.group_id) for rank in members if rank.rank not in inside)
    return any(of is not None and of.sequence > call.sequence >= 0 for of in absent_progress)


def _observed_ns(members: Sequence[Member], now_ns: int) -> int:
    """When the ranks are looked at: when they were stopped, else now, or when the last one ended."""
    stops = [rank.last_event_ns for rank in members if rank.stopped]
    if stops:
        return min(stops)
    # Ranks of a dump have no last event: the moment of the dump is all that is known
    if any(rank.alive or not rank.last_event_ns for rank in members):
        return now_ns
    return max((rank.last_event_ns for rank in members), default=now_ns)


def _is_alive_at(rank: Member, moment_ns: int, now_ns: int) -> bool:
    """Returns True if *rank* lived at *moment_ns*; one that finished by itself did not."""
    if rank.alive or moment_ns == now_ns or not (rank.failed or rank.stopped):
        return rank.alive
    # A halted process writes no events, so its last one is old although it lived
    return rank.halt is not Halt.NONE or rank.last_event_ns >= moment_ns - _GONE_NS


def _broken_off_hangs(
    ranks: Sequence[Member], hanging: Iterable[str], recent: RecentCalls
) -> list[Hang]:
    """Collectives of other groups than *hanging* that a backend ended with an error.

    Their members called different things. Only a death that nobody asked for is explained so.
    """
    failed = {rank.rank for rank in ranks if rank.failed and not rank.stopped}
    names = dict.fromkeys(group.group_id for rank in ranks for group in rank.groups)
    broken = []
    for name in names if failed else ():
        members = {rank.rank: of for rank in ranks if (of := _progress_in(rank, name)) is not None}
        if name in hanging or not failed.intersection(members):
            continue
        highest = max(group.sequence for group in members.values())
        top_calls = [_member_call(r, g) for r, g in members.items() if g.sequence == highest]
        kind, calls = (
            _first_difference(recent(name))
            or _beside_reducer(ranks, name)
            or (_mismatch_kind(top_calls), top_calls)
        )
        # A difference between ranks that survived does not explain the death
        if kind is None or not failed.intersection(call.rank for call in calls):
            continue
        group = members[min(members)]
        broken.append(
            Hang(
                kind=kind,
                op=calls[0].op,
                group=group.label,
                group_id=name,
                sequence=calls[0].sequence if calls[0].sequence >= 0 else highest,
                nbytes=calls[0].nbytes,
                seconds=0.0,
                waiting=tuple(sorted(call.rank for call in calls)),
                calls=tuple(calls),
                dim=group.dim,
                members=group.ranks,
            )
        )
    return broken


def _beside_reducer(ranks: Sequence[Member], name: str) -> tuple[HangKind, list[MemberCall]] | None:
    """The call that a backend aborted while other ranks were in DDP's reducer, and what they called.

    The reducer issues its calls from C++, so they stand in no history, and the last ones of a rank that
    was ended are not counted: one whose call is missing under the aborted number was in one of them, as
    what is aborted has met another call.
    """
    aborted = [
        _member_call(rank.rank, entry)
        for rank in ranks
        if rank.ended == "SIGABRT"
        for entry in rank.in_flight
        if entry.group_id == name and entry.unit != REDUCER
    ]
    reduced = [
        _member_call(rank.rank, of)
        for rank in ranks
        if (of := _progress_in(rank, name)) is not None and of.unit == REDUCER
    ]
    met = [call for call in reduced if aborted and call.sequence >= aborted[0].sequence - 1]
    if not met:
        return None
    return HangKind.MISMATCHED_UNITS, [replace(c, sequence=-1) for c in (*aborted[:1], *met)]


def _first_difference(recent: Sequence[CallHistory]) -> tuple[HangKind, list[MemberCall]] | None:
    """The first number under which members called different things, and these calls.

    Calls before it must agree, or it may not be the first. Some ranks name other units in each step, so
    a difference of units counts only where more calls agree than follow.
    """
    by_number: dict[int, list[MemberCall]] = {}
    for history in sorted(recent, key=lambda history: history.rank):
        for call in _with_repeats(history.calls):
            by_number.setdefault(call.sequence, []).append(call)
    # A call that one rank alone remembers has nothing to be compared with
    shared = [calls for _, calls in sorted(by_number.items()) if len(calls) > 1]
    for agreed, calls in enumerate(shared):
        if (kind := _mismatch_kind(calls, of_units=True)) is not None:
            is_lasting = kind is not HangKind.MISMATCHED_UNITS or 2 * agreed >= len(shared)
            # Calls from C++ shift the numbers of the hooks, which are then not those of the group
            if any(history.in_cpp for history in recent):
                calls = [replace(call, sequence=-1) for call in calls]
            is_first = agreed > 0 or calls[0].sequence == 1
            return (kind, calls) if is_first and is_lasting else None
    return None


def _with_repeats(calls: Iterable[MemberCall]) -> Iterator[MemberCall]:
    """*calls*, each with whether its phase repeats it: a second forward gathers its units again."""
    phase, called = "", set[tuple[str, str]]()
    for call in calls:
        if call.phase != phase:
            phase, called = call.phase, set()
        key = call.op, call.unit
        yield replace(call, is_repeated=bool(call.unit) and key in called)
        called.add(key)


def _mismatch_kind(calls: Sequence[MemberCall], *, of_units: bool = False) -> HangKind | None:
    """In what *calls* of one number differ; None where they agree, as far as is known."""
    known_calls = [call for call in calls if call.op != "none"]
    ops = {call.op for call in known_calls}
    if len(ops) > 1:
        return HangKind.MISMATCHED_OPERATIONS
    if ops <= _SAME_SIZE and len({call.nbytes for call in known_calls if call.nbytes >= 0}) > 1:
        return HangKind.MISMATCHED_SIZES
    if of_units and len({call.unit for call in known_calls if call.unit}) > 1:
        return HangKind.MISMATCHED_UNITS
    return None


def _step_ns(members: Sequence[Member], inside: Mapping[int, InFlight]) -> float:
    return max((r.step_seconds or 0.0 for r in members if r.rank in inside), default=0.0) * 1e9


def _build_hang(
    ranks: Sequence[Member], living_ranks: set[int], inside: dict[int, InFlight], moment_ns: int
) -> Hang:
    by_rank = {rank.rank: rank for rank in ranks}
    oldest_call = min(inside.values(), key=lambda entry: entry.issued_ns)
    # The group, as the first rank has it that knows its members
    groups = (_progress_in(rank, oldest_call.group_id) for rank in ranks)
    group = next((group for group in groups if group is not None and group.ranks), None)
    is_p2p = oldest_call.sequence < 0
    # A send has one peer, which the record does not name: other members of its group are not missing
    members = sorted(inside) if group is None or is_p2p else list(group.ranks)
    calls = {member: _member_call(member, entry) for member, entry in inside.items()}
    halted = [member for member in sorted(inside) if by_rank[member].halt is not Halt.NONE]
    if len(halted) == len(inside):
        halted = []  # nobody waits for them
    absent = [member for member in members if member not in inside]
    elsewhere = [member for member in absent if member not in by_rank]
    died = [member for member in absent if member in by_rank and member not in living_ranks]
    missing = [*halted]
    for member in (member for member in absent if member in living_ranks):
        progress = _progress_in(by_rank[member], oldest_call.group_id)
        if progress is None or progress.sequence < oldest_call.sequence:
            missing.append(member)
        elif not halted:  # it has left its call of this number, which may have been another operation
            calls[member] = _present_call(by_rank[member], progress)
    kind = HangKind.NO_PEER
    if not is_p2p:
        kind = _hang_kind(
            [*calls.values()], missing=missing, halted=halted, died=died, elsewhere=elsewhere
        )
    if kind == HangKind.DEAD_MEMBER and all(by_rank[member].has_left for member in died):
        kind = HangKind.LEFT_MEMBER
    return Hang(
        kind=kind,
        op=oldest_call.op,
        group=oldest_call.group,
        group_id=oldest_call.group_id,
        sequence=oldest_call.sequence,
        nbytes=oldest_call.nbytes,
        seconds=max(0, moment_ns - oldest_call.issued_ns) / 1e9,
        waiting=tuple(sorted(inside.keys() - halted)),
        missing=tuple(missing),
        dead=tuple(died),
        elsewhere=tuple(elsewhere),
        calls=tuple(calls[member] for member in sorted(calls)),
        # A dead member does not come back, and whether an unseen one pauses is unknown
        pause="" if died or elsewhere else _shared_pause([by_rank[rank] for rank in missing]),
        dim=group.dim if group is not None else "",
        members=group.ranks if group is not None else (),
    )


def since_difference(hang: Hang, recent: RecentCalls) -> Hang:
    """*hang*, and where its members had called different things before, that as its cause."""
    diff = _first_difference(recent(hang.group_id)) if hang.sequence >= 0 else None
    return replace(hang, kind=diff[0], calls=tuple(diff[1])) if diff is not None else hang


def _member_call(member: int, call: InFlight | GroupProgress) -> MemberCall:
    return MemberCall(
        rank=member, sequence=call.sequence, op=call.op, nbytes=call.nbytes, unit=call.unit,
        phase=call.phase,
    )  # fmt: skip


def _present_call(rank: Member, progress: GroupProgress) -> MemberCall:
    """Returns the call that *rank* is in, in a group; else its newest call there."""
    inside = (call for call in rank.in_flight if call.group_id == progress.group_id)
    return _member_call(rank.rank, next((call for call in inside if call.sequence >= 0), progress))


def _shared_pause(missing: Sequence[Member]) -> str:
    """The expected pause for which all others wait, where every missing rank is in one; else ""."""
    if not missing or not all(rank.pause for rank in missing):
        return ""
    return f"rank {missing[0].rank} {missing[0].pause}"


def _progress_in(rank: Member, group_id: str) -> GroupProgress | None:
    return next((g for g in rank.groups if g.group_id == group_id), None)


def _hang_kind(
    calls: Sequence[MemberCall],
    *,
    missing: list[int],
    halted: list[int],
    died: list[int],
    elsewhere: list[int],
) -> HangKind:
    # Mismatches first: a backend ends ranks because of them, and the dead are then the consequence
    if len({call.sequence for call in calls}) > 1:
        return HangKind.MISMATCHED_NUMBERS
    if (mismatch := _mismatch_kind(calls)) is not None:
        return mismatch
    if died:
        return HangKind.DEAD_MEMBER
    if halted:
        return HangKind.HALTED_MEMBER
    if missing:
        return HangKind.MISSING_MEMBER
    if elsewhere:
        return HangKind.UNSEEN_MEMBERS
    return HangKind.ALL_INSIDE if all(call.op != "none" for call in calls) else HangKind.UNKNOWN


def _mark_deadlocks(hanging: list[Hang]) -> list[Hang]:
    """Marks hangs of ranks that wait for each other in different groups."""
    waits_for: dict[int, set[int]] = {}
    for hang in hanging:
        for rank in hang.waiting:
            waits_for.setdefault(rank, set()).update(hang.missing)
    circle = {rank for rank in waits_for if _can_reach(rank, rank, waits_for)}
    return [
        replace(hang, kind=HangKind.DEADLOCK)
        if circle.intersection(hang.waiting) and circle.intersection(hang.missing)
        else hang
        for hang in hanging
    ]  # fmt: skip


def _can_reach(start: int, goal: int, edges: dict[int, set[int]]) -> bool:
    visited: set[int] = set()
    queue = list(edges.get(start, ()))
    while queue:
        rank = queue.pop()
        if rank == goal:
            return True
        # Without the set, a circle that the goal is not part of is followed for ever
        if rank not in visited:
            visited.add(rank)
            queue += edges.get(rank, ())
    return False
