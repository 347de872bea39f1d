"""A collective that does not end, in words. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from zeromon.fold.pauses import waits_for_batch
from zeromon.readout.deaths import MAX_LISTED_MEMBERS, exit_text, numbered
from zeromon.readout.text import doing, group_text, roughly, short_frame
from zeromon.snapshot import Halt, Hang, HangKind, MemberCall, Ras, RunSnapshot
from zeromon.units import human_count

NOT_CALLED = "has not called it"
_MAX_LISTED_RANKS = 8


def hang_headline(run: RunSnapshot, hang: Hang) -> str:
    """What is stuck and who is to blame, in one line; after the end, what hung in which step.

    ``all_reduce in dp is stuck: rank 1 waits, rank 0 has not called it (at ddp.py:41)``;
    ``hung at step 50 for 110 s: rank 1 never called all_gather (t.py:32)``.
    """
    if hang.seconds and has_ended(run, hang):
        waited = [rank.step for rank in run.ranks if rank.rank in hang.waiting]
        begin = f"hung at step {human_count(max(waited, default=0) + 1)}"
        return f"{begin} for {roughly(hang.seconds)}: {_blame_after(run, hang)}"
    if (cause := _cause_between(run, hang)) is not None:
        return cause
    title = f"{hang.op} in {_short_group(hang)}"
    if hang.pause:
        return f"{title} waits: {hang.pause}"
    return f"{title} is stuck: {_waiting(run, hang)}, {_blame(run, hang)}"


def has_ended(run: RunSnapshot, hang: Hang) -> bool:
    """Whether the ranks that waited in *hang* have ended."""
    waited = [rank for rank in run.ranks if rank.rank in hang.waiting]
    return run.ended or (bool(waited) and not any(rank.alive for rank in waited))


def _cause_between(run: RunSnapshot, hang: Hang) -> str | None:
    """What the ranks did to each other, where no single one is missing: a mismatch or a deadlock."""
    if HangKind(hang.kind).is_mismatch and hang.calls:
        return _mismatch_text(run, hang)
    circle = [one for one in run.hangs if one.kind == HangKind.DEADLOCK]
    if hang.kind != HangKind.DEADLOCK or hang not in circle:
        return None
    waits = (
        f"{numbered(one.waiting)} in {one.op} of {_short_group(one)}"
        for one in circle[:MAX_LISTED_MEMBERS]
    )
    return f"{hang.kind}: {', '.join(waits)}"


def _waiting(run: RunSnapshot, hang: Hang) -> str:
    count = len(hang.waiting) if run.fleet is None else run.fleet.waiting
    if count > MAX_LISTED_MEMBERS or not hang.waiting:
        return f"{human_count(count)} ranks wait"
    return f"{numbered(hang.waiting)} wait{'s' * (count == 1)}"


def _blame(run: RunSnapshot, hang: Hang) -> str:
    """For whom the waiting ranks wait, while they do."""
    if hang.missing:
        verb = "has" if len(hang.missing) == 1 else "have"
        place = _place(run, hang.missing[0])
        return f"{numbered(hang.missing)} {verb} not called it{place and f' ({place})'}"
    if hang.dead:
        return " and ".join(_absence(run, rank, "is") for rank in hang.dead[:MAX_LISTED_MEMBERS])
    silent = [node.node for node in run.nodes if node.silent]
    return f"no report from node {', '.join(silent[:3])}" if silent else str(hang.kind)


def _blame_after(run: RunSnapshot, hang: Hang) -> str:
    """What kept the ranks waiting until they ended."""
    if (cause := _cause_between(run, hang)) is not None:
        return cause
    if hang.missing:
        place = _place(run, hang.missing[0]).removeprefix("at ")
        return f"{numbered(hang.missing)} never called {hang.op}{place and f' ({place})'}"
    if hang.dead:
        return " and ".join(_absence(run, rank, "was") for rank in hang.dead[:MAX_LISTED_MEMBERS])
    return f"{hang.op} in {_short_group(hang)}, {hang.kind}"


def _absence(run: RunSnapshot, number: int, verb: str) -> str:
    """``rank 1 is dead (SIGKILL)``, ``rank 0 has left after step 60``."""
    rank = next((rank for rank in run.ranks if rank.rank == number), None)
    if rank is not None and not rank.failed:
        has = "has" if verb == "is" else "had"
        return f"rank {number} {has} left after step {human_count(rank.step)} ({exit_text(rank)})"
    away = next((other.ended for other in run.away if other.rank == number), "")
    how = rank.ended if rank is not None else away
    return f"rank {number} {verb} dead{how and f' ({how})'}"


def _place(run: RunSnapshot, number: int) -> str:
    """``at t.py:32``, or why the rank runs nothing; "" where nothing is known."""
    rank = next((rank for rank in run.ranks if rank.rank == number), None)
    if rank is None:
        return next((other.doing for other in run.away if other.rank == number), "")
    if rank.halted is not Halt.NONE or not rank.stack:
        return doing(rank)
    waits = "waits for a batch of its DataLoader, " if waits_for_batch(rank.stack) else ""
    return f"{waits}at {short_frame(rank.stack)}"


def _are(ranks: Sequence[int]) -> str:
    return "is" if len(ranks) == 1 else "are"


def _mismatch_text(run: RunSnapshot, hang: Hang) -> str:
    """``mismatched units in dp since #571: rank 0 called all_gather of experts.3, rank 1 of out``."""
    first = hang.calls[0].sequence
    is_earlier = 0 <= first < hang.sequence and len({c.sequence for c in hang.calls}) == 1
    since = f" since #{first}" if is_earlier else ""
    return f"{hang.kind} in {_short_group(hang)}{since}: {_calls_text(run, hang)}"


def _calls_text(run: RunSnapshot, hang: Hang) -> str:
    """What each rank called where they differ, ranks with the same call together."""
    calls = hang.calls
    varies = {
        name: len({getattr(call, name) for call in calls}) > 1
        for name in ("sequence", "unit", "phase")
    }
    callers: dict[str, list[int]] = {}
    for call in calls:
        callers.setdefault(_call_text(call, varies), []).append(call.rank)
    told = [f"{numbered(ranks)} called {text}" for text, ranks in callers.items()]
    return ", ".join(told[:MAX_LISTED_MEMBERS]) + _ahead(run, calls)


def _call_text(call: MemberCall, varies: Mapping[str, bool]) -> str:
    if call.op == "none":
        return f"an unknown collective #{call.sequence}"
    number = f" #{call.sequence}" if varies["sequence"] else ""
    unit = f" of {call.unit}" if call.unit and varies["unit"] else ""
    size = f" ({call.nbytes:,} B)" if call.nbytes >= 0 else ""
    phase = "" if call.phase in ("", "other") or not varies["phase"] else f" in {call.phase}"
    return f"{call.op}{number}{unit}{size}{phase}"


def _ahead(run: RunSnapshot, calls: Sequence[MemberCall]) -> str:
    """``; rank 0 is one forward ahead``, or in which steps the ranks are; "" where neither shows."""
    steps = {rank.rank: rank.step for rank in run.ranks}
    known = sorted({steps[call.rank] for call in calls if call.rank in steps})
    if len(known) > 1:
        return f"; they have ended {' and '.join(map(human_count, known))} steps"
    in_step = any(call.phase not in ("", "other") for call in calls)
    forward = [call.rank for call in calls if call.phase == "forward" and call.is_repeated]
    outside = [call.rank for call in calls if call.phase == "other"]
    callers = [call.rank for call in calls]
    over = [rank for rank in run.ranks if rank.rank in callers and rank.out_of_batches]
    if over and len(over) < len(calls):
        ended = f"after step {human_count(over[0].step)}"
        return f"; {numbered([rank.rank for rank in over])} had no more batches {ended}"
    if forward and len(forward) < len(calls):
        return f"; {numbered(forward)} {_are(forward)} one forward ahead"
    if outside and in_step:
        return f"; {numbered(outside)} {_are(outside)} outside of a step"
    return ""


def hang_kind(hang: Hang) -> str:
    """What hangs, and what is wrong with it."""
    return f"{hang.op} in {_group(hang).removeprefix('group ')} {_state(hang)}: {hang.kind}"


def _state(hang: Hang) -> str:
    return f"has not ended for {roughly(hang.seconds)}" if hang.seconds else "broke off"


def _short_group(hang: Hang) -> str:
    return group_text(hang.group, hang.dim, ()).removeprefix("group ")


def _group(hang: Hang, *more: str) -> str:
    return group_text(hang.group, hang.dim, hang.members, *more)


def hang_text(run: RunSnapshot, hang: Hang) -> str:
    """What hangs, who waits, who is missing, what the missing ranks do, and on which node they are."""
    is_over = bool(hang.seconds) and has_ended(run, hang)
    state = f"hung for {roughly(hang.seconds)}" if is_over else _state(hang)
    parts = [f"{_collective(hang)} {state}: {hang.kind}"]
    if HangKind(hang.kind).is_mismatch and hang.calls:
        first = hang.calls[0].sequence
        since = f"since #{first}: " if 0 <= first < hang.sequence else ""
        parts.append(since + _calls_text(run, hang))
    elif run.fleet is not None:
        parts.append(f"{human_count(run.fleet.waiting)} ranks are waiting")
    else:
        waiting = _ranks(hang.waiting, run.node_of)
        parts.append(f"{waiting} {'waited' if is_over else f'{_are(hang.waiting)} waiting'}")
    activity = _activity(run)
    parts += [
        f"{_ranks((rank,), run.node_of)} {'never called it' if is_over else NOT_CALLED}, it "
        f"{'was' if is_over else 'is'} {activity.get(rank, 'unknown')}"
        for rank in hang.missing[:MAX_LISTED_MEMBERS]
    ]
    if len(hang.missing) > MAX_LISTED_MEMBERS:
        parts.append(f"nor have {len(hang.missing) - MAX_LISTED_MEMBERS} more")
    if hang.pause:
        parts.append(hang.pause)
    verb = "was" if is_over else "is"
    parts += [_absence(run, rank, verb) for rank in hang.dead[:MAX_LISTED_MEMBERS]]
    if hang.elsewhere:
        parts.append(f"{_ranks(hang.elsewhere, run.node_of)} {_are(hang.elsewhere)} not heard")
    return "; ".join([*parts, *_of_nccl(run.ras, hang)])


def _activity(run: RunSnapshot) -> dict[int, str]:
    """Rank -> what it was last seen doing, of ranks of this node and of others."""
    activity = {remote.rank: remote.doing for remote in run.away}
    return activity | {rank.rank: doing(rank) for rank in run.ranks}


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
        return (
            f"rank{'s' if len(found) > 1 else ''} {', '.join(map(str, found[:_MAX_LISTED_RANKS]))}"
        )

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
    """``ranks 2, 3 on node-b``; a rank of this node comes without the node's name."""
    by_node: dict[str, list[int]] = {}
    for rank in ranks[:_MAX_LISTED_RANKS]:
        by_node.setdefault(node_of(rank), []).append(rank)
    shown = " and ".join(
        ", ".join(map(str, some)) + (f" on {node}" if node else "")
        for node, some in by_node.items()
    ) + (", ..." if len(ranks) > _MAX_LISTED_RANKS else "")
    return f"rank{'s' if len(ranks) > 1 else ''} {shown}"
