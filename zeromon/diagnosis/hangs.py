"""Which collective does not end, which ranks wait in it, and which members are missing. Pure.

A collective hangs when a rank has been in it for longer than a limit. A member is missing when its own
progress in the group has not reached the sequence number of the collective. Members on nodes that do not
report are listed apart. Sends and receives have numbers below zero, which a rank counts for itself: the
record does not name the peer.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace

import msgspec

from zeromon.levels import HANG_SECONDS
from zeromon.snapshot import GroupProgress, Hang, HangKind, InFlight, RankSnapshot, RunSnapshot

LEAST_NS = round(HANG_SECONDS * 1e9)
TIMES_A_STEP = 10
"""A collective in flight for less than so many median steps is no hang."""

_SAME_SIZE = frozenset(("all_reduce", "all_gather", "reduce_scatter"))
"""Operations for which every member moves as many bytes."""


def hangs(run: RunSnapshot) -> tuple[Hang, ...]:
    """The collectives that hang now, the oldest first."""
    return hangs_of(run.ranks, run.taken_ns)


class Member(msgspec.Struct, frozen=True, kw_only=True):
    """What the detection reads of a rank that is in no snapshot: of another node, or of a dump."""

    rank: int
    alive: bool = True
    failed: bool = False
    """Whether the process ended otherwise than by finishing."""
    step_seconds: float | None = None
    in_flight: tuple[InFlight, ...] = ()
    groups: tuple[GroupProgress, ...] = ()
    pause: str = ""
    """What the rank is expected to take long for; "" for nothing."""


AnyRank = Member | RankSnapshot


def hangs_of(members: Sequence[AnyRank], now_ns: int) -> tuple[Hang, ...]:
    """The collectives that hang among *members*, whose times are by one clock at *now_ns*."""
    stuck: dict[tuple[str, int], dict[int, InFlight]] = {}
    for rank in members:
        if rank.alive:
            for entry in rank.in_flight:
                group = (
                    entry.group_id if entry.sequence >= 0 else f"{entry.group_id} of {rank.rank}"
                )
                stuck.setdefault((group, entry.sequence), {})[rank.rank] = entry
    hanging = []
    for inside in stuck.values():
        oldest = min(inside.values(), key=lambda e: e.issued_ns)
        limit = max(LEAST_NS, TIMES_A_STEP * _step_ns(members, inside))
        if now_ns - oldest.issued_ns > limit:
            hanging.append(_hang(members, now_ns, inside, oldest))
    hanging = _deadlocks(_oldest_of_groups(sorted(hanging, key=lambda h: -h.seconds)))
    return (*hanging, *_broken_off(members))


def _oldest_of_groups(hanging: Iterable[Hang]) -> list[Hang]:
    """The first hang of each group: what a group has in flight beside it waits for it."""
    first: dict[tuple[str, tuple[int, ...]], Hang] = {}
    for hang in hanging:
        first.setdefault((hang.group_id, hang.waiting if hang.sequence < 0 else ()), hang)
    return list(first.values())


def _broken_off(ranks: Sequence[AnyRank]) -> list[Hang]:
    """Collectives that a backend ended with an error because members called different things.

    When a member has died, the last calls of all members in the group are compared.
    """
    groups: dict[str, dict[int, GroupProgress]] = {}
    for rank in ranks:
        for group in rank.groups:
            groups.setdefault(group.group_id, {})[rank.rank] = group
    failed = {rank.rank for rank in ranks if rank.failed}
    broken = []
    for members in groups.values():
        newest = max(group.sequence for group in members.values())
        last = {r: g for r, g in members.items() if g.sequence == newest and g.op != "none"}
        calls = {rank: (group.op, group.nbytes) for rank, group in last.items()}
        kind = _kind(calls, [], [], [])
        if failed.intersection(last) and kind.is_mismatch:
            first = last[min(last)]
            broken.append(
                Hang(
                    kind=kind,
                    op=first.op,
                    group=first.label,
                    group_id=first.group_id,
                    sequence=first.sequence,
                    nbytes=first.nbytes,
                    seconds=0.0,
                    waiting=tuple(sorted(last)),
                    missing=(),
                    dead=(),
                    elsewhere=(),
                    calls=_in_calls(calls),
                    dim=first.dim,
                    members=first.ranks,
                )
            )
    return broken


def _in_calls(calls: dict[int, tuple[str, int]]) -> tuple[str, ...]:
    return tuple(f"rank {r}: {op} of {n:,} B" for r, (op, n) in sorted(calls.items()))


def _step_ns(members: Sequence[AnyRank], inside: Iterable[int]) -> float:
    waiting = set(inside)
    steps = [r.step_seconds for r in members if r.rank in waiting and r.step_seconds]
    return max(steps, default=0.0) * 1e9


def _hang(
    ranks: Sequence[AnyRank], now_ns: int, inside: dict[int, InFlight], oldest: InFlight
) -> Hang:
    by_rank = {rank.rank: rank for rank in ranks}
    group = _group(ranks, oldest.group_id)
    members = sorted(inside)
    if group is not None and oldest.sequence >= 0:
        members = list(group.ranks)
    calls = {member: (entry.op, entry.nbytes) for member, entry in inside.items()}
    missing, dead, elsewhere = [], [], []
    for member in members:
        if member in inside:
            continue
        rank = by_rank.get(member)
        if rank is None:
            elsewhere.append(member)
        elif not rank.alive:
            dead.append(member)
        else:
            progress = _progress(rank, oldest.group_id)
            reached = -1 if progress is None else progress.sequence
            if reached < oldest.sequence:
                missing.append(member)
            elif progress and reached == oldest.sequence and progress.op != "none":
                # it has left its call of this number, which may have been another operation
                calls[member] = (progress.op, progress.nbytes)
    alone = oldest.sequence < 0
    return Hang(
        kind=HangKind.NO_PEER if alone else _kind(calls, missing, dead, elsewhere),
        op=oldest.op,
        group=oldest.group,
        group_id=oldest.group_id,
        sequence=oldest.sequence,
        nbytes=oldest.nbytes,
        seconds=(now_ns - oldest.issued_ns) / 1e9,
        waiting=tuple(sorted(inside)),
        missing=tuple(missing),
        dead=tuple(dead),
        elsewhere=tuple(elsewhere),
        calls=_in_calls(calls),
        pause="" if dead or elsewhere else _pause([by_rank[rank] for rank in missing]),
        dim=group.dim if group is not None else "",
        members=group.ranks if group is not None else (),
    )


def _pause(missing: Sequence[AnyRank]) -> str:
    """The expected pause for which all others wait, where every missing rank is in one; else ""."""
    if not missing or not all(rank.pause for rank in missing):
        return ""
    return f"rank {missing[0].rank} {missing[0].pause}"


def _group(ranks: Sequence[AnyRank], group_id: str) -> GroupProgress | None:
    """A group with its members, as the first rank has it that knows them."""
    known = (_progress(rank, group_id) for rank in ranks)
    return next((group for group in known if group is not None and group.ranks), None)


def _progress(rank: AnyRank, group_id: str) -> GroupProgress | None:
    return next((g for g in rank.groups if g.group_id == group_id), None)


def _kind(
    calls: dict[int, tuple[str, int]], missing: list[int], dead: list[int], elsewhere: list[int]
) -> HangKind:
    ops = {op for op, _ in calls.values()}
    if len(ops) > 1:
        return HangKind.MISMATCHED_OPERATIONS
    if ops <= _SAME_SIZE and len({nbytes for _, nbytes in calls.values()}) > 1:
        return HangKind.MISMATCHED_SIZES
    if dead:
        return HangKind.DEAD_MEMBER
    if missing:
        return HangKind.MISSING_MEMBER
    if elsewhere:
        return HangKind.UNSEEN_MEMBERS
    return HangKind.ALL_INSIDE


def _deadlocks(hanging: list[Hang]) -> list[Hang]:
    """Marks hangs of ranks that wait for each other in different groups."""
    waits_for: dict[int, set[int]] = {}
    for hang in hanging:
        for rank in hang.waiting:
            waits_for.setdefault(rank, set()).update(hang.missing)
    circle = {rank for rank in waits_for if _reaches(rank, rank, waits_for)}
    return [
        replace(hang, kind=HangKind.DEADLOCK)
        if circle.intersection(hang.waiting) and circle.intersection(hang.missing)
        else hang
        for hang in hanging
    ]  # fmt: skip


def _reaches(start: int, goal: int, edges: dict[int, set[int]]) -> bool:
    visited: set[int] = set()
    queue = list(edges.get(start, ()))
    while queue:
        rank = queue.pop()
        if rank == goal:
            return True
        if rank not in visited:
            visited.add(rank)
            queue += edges.get(rank, ())
    return False
