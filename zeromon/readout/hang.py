"""A collective that does not end, in words. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

from zeromon.readout.text import doing, group_text
from zeromon.snapshot import Hang, HangKind, Ras, RunSnapshot
from zeromon.units import human_count

NOT_CALLED = "has not called it"
_MOST_MISSING = 4
_MOST_RANKS = 8


def hang_headline(run: RunSnapshot, hang: Hang) -> str:
    """What hangs, how many ranks wait, and who is missing and why: one line."""
    waiting = len(hang.waiting) if run.fleet is None else run.fleet.waiting
    text = f"{_title(hang)}: {human_count(waiting)} wait"
    if HangKind(hang.kind).is_mismatch and hang.calls:
        return f"{_title(hang)}, {hang.kind}: {'; '.join(hang.calls[:_MOST_MISSING])}"
    if hang.kind == HangKind.DEADLOCK:
        text = f"{_title(hang)}, {hang.kind}: {_ranks(hang.waiting, run.node_of)} waiting"
    if hang.missing:
        text += f", rank {', '.join(map(str, hang.missing[:_MOST_MISSING]))} missing"
        activity = _activity(run).get(hang.missing[0])
        if activity is not None:
            text += f": {hang.pause or activity}"
    elif hang.dead:
        text += f", {_ranks(hang.dead, run.node_of)} dead"
    silent = [node.node for node in run.nodes if node.silent]
    if silent:
        text += f", no report from node {', '.join(silent[:3])}"
    return text


def _activity(run: RunSnapshot) -> dict[int, str]:
    """Rank -> what it was last seen doing, of ranks of this node and of others."""
    activity = {remote.rank: remote.doing for remote in run.away}
    return activity | {rank.rank: doing(rank) for rank in run.ranks}


def hang_kind(hang: Hang) -> str:
    """What hangs, and what is wrong with it."""
    return f"{_title(hang)}: {hang.kind}"


def _title(hang: Hang) -> str:
    ends = "does not end" if hang.seconds else "broke off"
    return f"{hang.op} in {_group(hang).removeprefix('group ')} {ends}"


def _group(hang: Hang, *more: str) -> str:
    return group_text(hang.group, hang.dim, hang.members, *more)


def hang_text(run: RunSnapshot, hang: Hang) -> str:
    """What hangs, who waits, who is missing, what the missing ranks do, and on which node they are."""
    activity = _activity(run)
    lasts = f"has not ended for {hang.seconds:.0f} s" if hang.seconds else "broke off"
    parts = [f"{_collective(hang)} {lasts}: {hang.kind}"]
    if HangKind(hang.kind).is_mismatch and hang.calls:
        parts.append("; ".join(hang.calls))
    elif run.fleet is not None:
        parts.append(f"{human_count(run.fleet.waiting)} ranks are waiting")
    else:
        parts.append(f"{_ranks(hang.waiting, run.node_of)} waiting")
    parts += [
        f"{_ranks((rank,), run.node_of).removesuffix(' is')} {NOT_CALLED}, it is "
        f"{activity.get(rank, 'unknown')}"
        for rank in hang.missing[:_MOST_MISSING]
    ]
    if len(hang.missing) > _MOST_MISSING:
        parts.append(f"nor have {len(hang.missing) - _MOST_MISSING} more")
    if hang.pause:
        parts.append(hang.pause)
    if hang.dead:
        parts.append(f"{_ranks(hang.dead, run.node_of)} dead")
    if hang.elsewhere:
        parts.append(f"{_ranks(hang.elsewhere, run.node_of)} not heard")
    return "; ".join([*parts, *_of_nccl(run.ras, hang)])


def _of_nccl(ras: Ras | None, hang: Hang) -> Iterator[str]:
    """What NCCL says of the ranks of a hang, which RAS numbers by their place in the group."""
    if ras is None:
        return
    own = next((one for one in ras.communicators if one.group_id == hang.group_id), None)
    if own is None:
        yield f"NCCL's view is n/a: {ras.note or 'no single communicator has the ranks of this group'}"
        return

    def ranks(places: Iterable[int]) -> str:
        found = [hang.members[p] if p < len(hang.members) else p for p in places]
        return f"rank{'s' if len(found) > 1 else ''} {', '.join(map(str, found[:_MOST_RANKS]))}"

    for places, what in (
        (own.dead, "NCCL gives up"),
        (set(own.unresponsive) - set(own.dead), "NCCL does not reach"),
        (own.failed, "NCCL has met an error in"),
    ):
        if places:
            yield f"{what} {ranks(places)}"
    count = next((one for one in own.counts if one.op == hang.op), None)
    if count is not None and count.behind:
        fewest = min(number for _, number in count.behind)
        late = ranks(place for place, _ in count.behind)
        yield f"NCCL has launched {count.most:,} {count.op}, on {late} {fewest:,}"
    elif count is not None:
        yield f"NCCL has launched {count.most:,} {count.op} on all ranks that answer"


def _collective(hang: Hang) -> str:
    """``all_gather #12 of tp (ranks 2, 3; 1,000 B)``; without what is unknown."""
    if hang.nbytes < 0:  # read from Prometheus, which has neither
        return f"{hang.op} in {hang.group}"
    return f"{hang.op} #{abs(hang.sequence)} of {_group(hang, f'{hang.nbytes:,} B')}"


def _ranks(ranks: Sequence[int], node_of: Callable[[int], str]) -> str:
    """``ranks 2, 3 on node-b are``; a rank of this node comes without the node's name."""
    by_node: dict[str, list[int]] = {}
    for rank in ranks[:_MOST_RANKS]:
        by_node.setdefault(node_of(rank), []).append(rank)
    shown = " and ".join(
        ", ".join(map(str, some)) + (f" on {node}" if node else "")
        for node, some in by_node.items()
    ) + (", ..." if len(ranks) > _MOST_RANKS else "")
    return f"rank{'s' if len(ranks) > 1 else ''} {shown} {'are' if len(ranks) > 1 else 'is'}"
