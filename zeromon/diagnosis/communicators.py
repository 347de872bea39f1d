"""Which process group a communicator of NCCL belongs to, and what RAS says of it. Pure.

torch does not give a communicator's hash. Its ranks are known by their processes, and a process group
whose members have the same places is its own, where there is just one. torch makes further communicators
for sends and receives; those have launched no collective.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

from zeromon.probes.nccl_ras import Answer, Communicator, RasRank
from zeromon.ring.codes import operation_named
from zeromon.snapshot import (
    GroupProgress,
    InspectorRow,
    RankSnapshot,
    Ras,
    RasCommunicator,
    RasCount,
)

_NOT_OURS = "NCCL's RAS answers for another job, or for processes of another name space"


def group_of(
    size: int, places: Mapping[int, int], ranks: Sequence[RankSnapshot]
) -> GroupProgress | None:
    """The one group in which rank ``places[p]`` is member p for all p; None for none and several."""
    found = {
        group.group_id: group
        for rank in ranks
        if rank.rank in places.values()
        for group in rank.groups
        if len(group.ranks) == size
        and all(0 <= place < size and group.ranks[place] == r for place, r in places.items())
    }
    return next(iter(found.values())) if len(found) == 1 else None


def with_groups(
    ranks: Sequence[RankSnapshot], rows: Mapping[int, tuple[InspectorRow, ...]]
) -> tuple[RankSnapshot, ...]:
    """The *ranks* with the *rows* of each rank, of which the process groups are found."""
    places: dict[tuple[str, int], dict[int, int]] = {}
    for rank, own in rows.items():
        for row in own:
            places.setdefault((row.communicator, row.size), {})[row.place] = rank
    groups = {key: group_of(key[1], known, ranks) for key, known in places.items()}

    def named(row: InspectorRow) -> InspectorRow:
        group = groups[row.communicator, row.size]
        return row if group is None else replace(row, group_id=group.group_id, group=group.label)

    return tuple(
        replace(rank, inspected=tuple(map(named, rows[rank.rank]))) if rows.get(rank.rank) else rank
        for rank in ranks
    )


def ras_of(answer: Answer, ranks: Sequence[RankSnapshot], is_here: Callable[[str], bool]) -> Ras:
    """Returns RAS's answer on the communicators of this job; *is_here*: is an address this node's?"""
    if answer.note:
        return Ras(note=answer.note)
    by_pid, local = {rank.pid: rank.rank for rank in ranks}, dict[str, bool]()

    def rank_of(one: RasRank) -> int | None:
        if one.host not in local:
            local[one.host] = is_here(one.host)
        return by_pid.get(one.pid) if local[one.host] else None

    found, own = [], False
    for communicator in answer.communicators:
        members = [*communicator.ranks, *communicator.missing_ranks]
        places = {one.rank: rank for one in members if (rank := rank_of(one)) is not None}
        own = own or bool(places)
        if places and _is_of_note(communicator):
            group = group_of(communicator.size, places, ranks)
            found.append(_row(communicator, group.group_id if group is not None else ""))
    several = [one.group_id for one in found]
    return Ras(
        note="" if own else _NOT_OURS,
        communicators=tuple(
            replace(one, group_id="") if several.count(one.group_id) > 1 else one for one in found
        ),
    )


def _is_of_note(communicator: Communicator) -> bool:
    return bool(communicator.missing_ranks) or any(
        any(one.collective_counts.values()) for one in communicator.ranks
    )


def _row(communicator: Communicator, group_id: str) -> RasCommunicator:
    missing = communicator.missing_ranks
    failed = (
        one.rank for one in communicator.ranks
        if one.status.abort_flag or one.status.async_error not in (0, _IN_PROGRESS)
    )  # fmt: skip
    return RasCommunicator(
        communicator=communicator.hash,
        group_id=group_id,
        size=communicator.size,
        counts=tuple(_counts(communicator.ranks)),
        unresponsive=tuple(sorted(one.rank for one in missing if one.status.unresponsive)),
        dead=tuple(sorted(one.rank for one in missing if one.status.considered_dead)),
        failed=tuple(sorted(failed)),
    )


_IN_PROGRESS = 7
"""ncclInProgress."""


def _counts(ranks: Sequence[RasRank]) -> Iterable[RasCount]:
    for name in dict.fromkeys(name for one in ranks for name in one.collective_counts):
        counts = {one.rank: one.collective_counts.get(name, 0) for one in ranks}
        most = max(counts.values())
        if most:
            behind = tuple(sorted((place, n) for place, n in counts.items() if n < most))
            yield RasCount(op=operation_named(name).label, most=most, behind=behind)
