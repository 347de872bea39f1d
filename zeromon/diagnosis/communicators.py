"""Which process group a communicator of NCCL belongs to, and what RAS says of it. Pure.

torch does not give a communicator's hash. Its ranks are known by their processes, and a process group
whose members have the same places is its own, where there is just one. torch makes further communicators
for sends and receives; those have launched no collective.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

from zeromon.probes.nccl_ras import Answer, Communicator, RasRank
from zeromon.ring.codes import operation_by_name
from zeromon.snapshot import RankSnapshot
from zeromon.snapshot.communication import GroupProgress, InspectorRow, Ras, RasCommunicator, RasCount

_NOT_OURS = "NCCL's RAS answers for another job, or for processes of another name space"


def group_of(
    size: int, members: Mapping[int, int], ranks: Sequence[RankSnapshot]
) -> GroupProgress | None:
    """The one group in which rank ``places[p]`` is member p for all p; None for none and several."""
    matches = {
        group.group_id: group
        for rank in ranks
        if rank.rank in members.values()
        for group in rank.communication.groups
        if len(group.ranks) == size
        and all(0 <= member < size and group.ranks[member] == r for member, r in members.items())
    }
    return next(iter(matches.values())) if len(matches) == 1 else None


def with_groups(
    ranks: Sequence[RankSnapshot], rows: Mapping[int, tuple[InspectorRow, ...]]
) -> tuple[RankSnapshot, ...]:
    """Returns *ranks* with their *rows*, each with the process group that it belongs to."""
    members: dict[tuple[str, int], dict[int, int]] = {}
    for rank, rank_rows in rows.items():
        for row in rank_rows:
            members.setdefault((row.communicator, row.size), {})[row.place] = rank
    groups = {key: group_of(key[1], key_members, ranks) for key, key_members in members.items()}

    def add_group(row: InspectorRow) -> InspectorRow:
        group = groups[row.communicator, row.size]
        return row if group is None else replace(row, group_id=group.group_id, group=group.label)

    return tuple(
        rank.with_communication(inspected=tuple(map(add_group, rows[rank.rank])))
        if rows.get(rank.rank)
        else rank
        for rank in ranks
    )


def ras_of(answer: Answer, ranks: Sequence[RankSnapshot], is_here: Callable[[str], bool]) -> Ras:
    """Returns RAS's answer on the communicators of this job; *is_here*: is an address this node's?"""
    if answer.note:
        return Ras(note=answer.note)
    by_pid, local = {rank.pid: rank.rank for rank in ranks}, dict[str, bool]()

    def rank_of(ras_rank: RasRank) -> int | None:
        # is_here() binds a socket: without this, once for each of thousands of ranks
        if ras_rank.host not in local:
            local[ras_rank.host] = is_here(ras_rank.host)
        # Process ids repeat on other nodes: only those of this node name a rank
        return by_pid.get(ras_rank.pid) if local[ras_rank.host] else None

    rows, is_ours = [], False
    for communicator in answer.communicators:
        members = [*communicator.ranks, *communicator.missing_ranks]
        ours = {member.rank: rank for member in members if (rank := rank_of(member)) is not None}
        is_ours = is_ours or bool(ours)
        # torch's communicators for sends and receives have no collective: each would be an empty row
        if ours and (
            communicator.missing_ranks
            or any(any(peer.collective_counts.values()) for peer in communicator.ranks)
        ):
            group = group_of(communicator.size, ours, ranks)
            rows.append(_ras_row(communicator, group.group_id if group is not None else ""))
    # Two communicators that fit one group cannot be distinguished: neither gets its name
    group_ids = [row.group_id for row in rows]
    return Ras(
        note="" if is_ours else _NOT_OURS,
        communicators=tuple(
            replace(row, group_id="") if group_ids.count(row.group_id) > 1 else row for row in rows
        ),
    )


def _ras_row(communicator: Communicator, group_id: str) -> RasCommunicator:
    missing = communicator.missing_ranks
    # A nonblocking communicator reports ncclInProgress while it works, which is no failure
    failed = (
        peer.rank for peer in communicator.ranks
        if peer.status.abort_flag or peer.status.async_error not in (0, _IN_PROGRESS)
    )  # fmt: skip
    return RasCommunicator(
        communicator=communicator.hash,
        group_id=group_id,
        size=communicator.size,
        counts=tuple(_operation_counts(communicator.ranks)),
        unresponsive=tuple(sorted(peer.rank for peer in missing if peer.status.unresponsive)),
        dead=tuple(sorted(peer.rank for peer in missing if peer.status.considered_dead)),
        failed=tuple(sorted(failed)),
    )


_IN_PROGRESS = 7
"""ncclInProgress."""


def _operation_counts(ranks: Sequence[RasRank]) -> Iterable[RasCount]:
    for name in dict.fromkeys(name for peer in ranks for name in peer.collective_counts):
        counts = {peer.rank: peer.collective_counts.get(name, 0) for peer in ranks}
        max_count = max(counts.values())
        if max_count:
            lagging = tuple(sorted((member, n) for member, n in counts.items() if n < max_count))
            yield RasCount(op=operation_by_name(name).label, most=max_count, behind=lagging)
