"""Which collective does not end, who waits in it, and who has not come. Pure.

A collective of a group hangs when a rank has been in it for longer than a limit. The other members are
found by their own progress in the same group: who has not reached its sequence number is missing. Ranks
of nodes that are not heard are not seen, and are named as such. Sends and receives have numbers below
zero: a rank's own, for its peer is not recorded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

from zeromon.snapshot import GroupProgress, Hang, InFlight, RunSnapshot

LEAST_NS = 10_000_000_000
SILENT_SECONDS = 10.0
"""A node that was not heard for so long is taken for gone."""
TIMES_A_STEP = 10

_SAME_SIZE = frozenset(("all_reduce", "all_gather", "reduce_scatter"))
"""Operations for which every member moves as many bytes."""


def hangs(run: RunSnapshot) -> tuple[Hang, ...]:
    """The collectives that hang now, the oldest first."""
    return hangs_of(run.ranks, run.taken_ns)


class Member(Protocol):
    """A rank, of this node or another: what matters of it here."""

    @property
    def rank(self) -> int:
        """Its number."""

    @property
    def alive(self) -> bool:
        """Whether its process lives."""

    @property
    def failed(self) -> bool:
        """Whether it ended otherwise than by finishing."""

    @property
    def step_seconds(self) -> float | None:
        """Its usual step."""

    @property
    def in_flight(self) -> tuple[InFlight, ...]:
        """What it has called and not left."""

    @property
    def groups(self) -> tuple[GroupProgress, ...]:
        """How far it is in each group."""


def hangs_of(members: Sequence[Member], now_ns: int) -> tuple[Hang, ...]:
    """The same among *members*, whose times are by one clock that says *now_ns*."""
    stuck: dict[tuple[str, int], dict[int, InFlight]] = {}
    for rank in members:
        if rank.alive:
            for entry in rank.in_flight:
                group = (
                    entry.group_id if entry.sequence >= 0 else f"{entry.group_id} of {rank.rank}"
                )
                stuck.setdefault((group, entry.sequence), {})[rank.rank] = entry
    found = []
    for inside in stuck.values():
        oldest = min(inside.values(), key=lambda e: e.issued_ns)
        limit = max(LEAST_NS, TIMES_A_STEP * _step_ns(members, inside))
        if now_ns - oldest.issued_ns > limit:
            found.append(_hang(members, now_ns, inside, oldest))
    found = _deadlocks(sorted(found, key=lambda h: -h.seconds))
    return (*found, *_broken_off(members))


def _broken_off(ranks: Sequence[Member]) -> list[Hang]:
    """Collectives that their members called differently, and that a backend ended with an error.

    What each member called last in a group is compared when one of them has died.
    """
    groups: dict[str, dict[int, GroupProgress]] = {}
    for rank in ranks:
        for group in rank.groups:
            groups.setdefault(group.group_id, {})[rank.rank] = group
    failed = {rank.rank for rank in ranks if rank.failed}
    found = []
    for members in groups.values():
        newest = max(group.sequence for group in members.values())
        last = {r: g for r, g in members.items() if g.sequence == newest and g.op != "none"}
        calls = {rank: (group.op, group.nbytes) for rank, group in last.items()}
        kind = _kind(calls, [], [], [])
        if failed.intersection(last) and kind.startswith("mismatched"):
            first = last[min(last)]
            found.append(
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
                )
            )
    return found


def _in_calls(calls: dict[int, tuple[str, int]]) -> tuple[str, ...]:
    return tuple(f"rank {r}: {op} of {n:,} B" for r, (op, n) in sorted(calls.items()))


def _step_ns(members: Sequence[Member], inside: Iterable[int]) -> float:
    waiting = set(inside)
    steps = [r.step_seconds for r in members if r.rank in waiting and r.step_seconds]
    return max(steps, default=0.0) * 1e9


def _hang(
    ranks: Sequence[Member], now_ns: int, inside: dict[int, InFlight], oldest: InFlight
) -> Hang:
    by_rank = {rank.rank: rank for rank in ranks}
    members = _members(ranks, inside, oldest) if oldest.sequence >= 0 else sorted(inside)
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
        elif _reached(rank, oldest.group_id) < oldest.sequence:
            missing.append(member)
        else:  # it has left already what it called at this number, which may have been another thing
            progress = _progress(rank, oldest.group_id)
            if progress and progress.sequence == oldest.sequence and progress.op != "none":
                calls[member] = (progress.op, progress.nbytes)
    alone = oldest.sequence < 0
    return Hang(
        kind="its peer has not answered" if alone else _kind(calls, missing, dead, elsewhere),
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
    )


def _members(
    ranks: Sequence[Member], inside: dict[int, InFlight], oldest: InFlight
) -> Sequence[int]:
    for rank in ranks:
        group = _progress(rank, oldest.group_id)
        if group is not None and group.ranks:
            return group.ranks
    return sorted(inside)


def _progress(rank: Member, group_id: str) -> GroupProgress | None:
    return next((g for g in rank.groups if g.group_id == group_id), None)


def _reached(rank: Member, group_id: str) -> int:
    """The last sequence number that *rank* has issued in a group; -1 when it does not know it."""
    group = _progress(rank, group_id)
    return group.sequence if group is not None else -1


def _kind(
    calls: dict[int, tuple[str, int]], missing: list[int], dead: list[int], elsewhere: list[int]
) -> str:
    ops = {op for op, _ in calls.values()}
    if len(ops) > 1:
        return "mismatched operations"
    if ops <= _SAME_SIZE and len({nbytes for _, nbytes in calls.values()}) > 1:
        return "mismatched sizes"
    if dead:
        return "a member is dead"
    if missing:
        return "a member has not come"
    if elsewhere:
        return "members on other nodes are not seen"
    return "all members are in it"


def _deadlocks(found: list[Hang]) -> list[Hang]:
    """Ranks that wait for each other in different groups."""
    waits_for: dict[int, set[int]] = {}
    for hang in found:
        for rank in hang.waiting:
            waits_for.setdefault(rank, set()).update(hang.missing)
    circle = {rank for rank in waits_for if _reaches(rank, rank, waits_for)}
    return [
        _as_deadlock(hang) if circle.intersection(hang.waiting) and circle.intersection(hang.missing)
        else hang
        for hang in found
    ]  # fmt: skip


def _reaches(start: int, goal: int, edges: dict[int, set[int]]) -> bool:
    seen: set[int] = set()
    queue = list(edges.get(start, ()))
    while queue:
        rank = queue.pop()
        if rank == goal:
            return True
        if rank not in seen:
            seen.add(rank)
            queue += edges.get(rank, ())
    return False


def _as_deadlock(hang: Hang) -> Hang:
    values = {name: getattr(hang, name) for name in Hang.__dataclass_fields__}
    return Hang(**{**values, "kind": "deadlock of groups"})


def in_words(
    hang: Hang, where: dict[int, str], node_of: Callable[[int], str] = lambda _: ""
) -> str:
    """One line; *where*: what each rank was last seen doing; *node_of*: its node, unless it is here."""
    what = f"{hang.op} #{abs(hang.sequence)} of group {hang.group} ({hang.nbytes:,} B)"
    lasts = f"has not ended for {hang.seconds:.0f} s" if hang.seconds else "broke off"
    parts = [f"{what} {lasts}: {hang.kind}"]
    if hang.kind.startswith("mismatched"):
        parts.append("; ".join(hang.calls))
    else:
        parts.append(f"{_ranks(hang.waiting, node_of)} waiting")
    parts += [
        f"{_ranks((r,), node_of).removesuffix(' is')} has not called it, it is "
        f"{where.get(r, 'unknown')}"
        for r in hang.missing[:4]
    ]
    if len(hang.missing) > 4:
        parts.append(f"nor have {len(hang.missing) - 4} more")
    if hang.dead:
        parts.append(f"{_ranks(hang.dead, node_of)} dead")
    if hang.elsewhere:
        parts.append(f"{_ranks(hang.elsewhere, node_of)} not heard")
    return "; ".join(parts)


def _ranks(ranks: Sequence[int], node_of: Callable[[int], str]) -> str:
    """``ranks 2, 3 on node-b are``; those of this node come without its name."""
    by_node: dict[str, list[int]] = {}
    for rank in ranks[:8]:
        by_node.setdefault(node_of(rank), []).append(rank)
    shown = " and ".join(
        ", ".join(map(str, some)) + (f" on {node}" if node else "")
        for node, some in by_node.items()
    ) + (", ..." if len(ranks) > 8 else "")
    return f"rank{'s' if len(ranks) > 1 else ''} {shown} {'are' if len(ranks) > 1 else 'is'}"
