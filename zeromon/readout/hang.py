"""A collective that does not end, in words. Pure."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from zeromon.base.units import human_count
from zeromon.fold.pauses import waits_for_batch
from zeromon.readout.text import doing, exit_text, group_text, rough_time, short_frame
from zeromon.snapshot import Halt, Hang, HangKind, MemberCall, RankSnapshot, Ras, RunSnapshot

NOT_CALLED = "has not called it"
_MAX_CAUSES = 4
_MAX_LISTED_RANKS = 8


def hang_headline(run: RunSnapshot, hang: Hang) -> str:
    """The stuck collective and who is to blame, in one line; after the end, what hung in which step.

    ``all_reduce in dp is stuck: rank 1 waits, rank 0 has not called it (at ddp.py:41)``;
    ``hung at step 50 for 110 s: rank 1 never called all_gather (t.py:32)``.
    """
    cause = _hang_cause_text(run, hang, _location_of_rank)
    if _hang_is_over(run, hang):
        waited = [rank.step for rank in run.ranks if rank.rank in hang.waiting]
        step = human_count(max(waited, default=0) + 1)
        return f"hung at step {step} for {rough_time(hang.seconds)}: {cause}"
    if cause.startswith(str(hang.kind)):
        return cause
    return f"{hang.op} in {_short_group_name(hang)} {'waits' if hang.pause else 'is stuck'}: {cause}"


def hang_text(run: RunSnapshot, hang: Hang) -> str:
    """The hang as text: the collective, who waits, who is missing, what those do, and on which node."""
    lasts = f"has not ended for {rough_time(hang.seconds)}" if hang.seconds else "broke off"
    if _hang_is_over(run, hang):
        lasts = f"hung for {rough_time(hang.seconds)}"
    sentence = f"{_collective_text(hang)} {lasts}: {_hang_cause_text(run, hang, doing)}"
    return "; ".join((sentence, *_nccl_view_lines(run.ras, hang)))


def _hang_is_over(run: RunSnapshot, hang: Hang) -> bool:
    """Returns whether the ranks that waited in *hang* have ended."""
    waited = [rank.alive for rank in run.ranks if rank.rank in hang.waiting]
    return bool(hang.seconds) and (run.ended or (bool(waited) and not any(waited)))


def _hang_cause_text(run: RunSnapshot, hang: Hang, locate: Callable[[RankSnapshot], str]) -> str:
    """The calls in which members differ, else which ranks wait and for whom."""
    is_over = _hang_is_over(run, hang)
    if HangKind(hang.kind).is_mismatch and hang.calls:
        return _call_mismatch_text(run, hang)
    circle = [h for h in run.hangs if h.kind == HangKind.DEADLOCK]
    if hang in circle:
        waits = (f"{named_ranks(h.waiting)} in {h.op} of {_short_group_name(h)}" for h in circle)
        return f"{hang.kind}: {', '.join(waits)}{_who_is_ahead(run, _calls_in_hangs(run, circle))}"
    if hang.pause and locate is _location_of_rank:
        paused = next((r for r in run.ranks if r.rank in hang.missing and r.stack), None)
        return f"{hang.pause} ({locate(paused)})" if paused is not None else hang.pause
    activities = {peer.rank: peer.doing for peer in run.away}
    activities |= {rank.rank: locate(rank) for rank in run.ranks if rank.rank in hang.missing}
    phrases = [] if is_over and hang.missing + hang.dead else [_waiting_ranks_text(run, hang)]
    for rank in hang.missing[:_MAX_CAUSES]:
        activity = activities.get(rank, "")
        verb = f"never called {hang.op}" if is_over else NOT_CALLED
        activity = activity.removeprefix("at ") if is_over else activity
        phrases.append(f"{named_ranks((rank,), run.node_of)} {verb}{activity and f' ({activity})'}")
    if len(hang.missing) > _MAX_CAUSES:
        phrases.append(f"nor have {human_count(len(hang.missing) - _MAX_CAUSES)} more")
    phrases += [_absent_rank_text(run, rank, is_over) for rank in hang.dead[:_MAX_CAUSES]]
    if hang.elsewhere:
        silent = [node.node for node in run.nodes if node.silent]
        phrases.append(f"{named_ranks(hang.elsewhere, run.node_of)} not heard")
        phrases += [f"no report from node {', '.join(silent[:3])}"] if silent else []
    if not hang.missing and not hang.dead and not hang.elsewhere:
        phrases.append(str(hang.kind))
    return ", ".join([*phrases, hang.pause] if hang.pause else phrases)


def _waiting_ranks_text(run: RunSnapshot, hang: Hang) -> str:
    if run.fleet is not None:
        return f"{human_count(run.fleet.waiting)} ranks wait"
    return f"{named_ranks(hang.waiting, run.node_of)} wait{'s' * (len(hang.waiting) == 1)}"


def _absent_rank_text(run: RunSnapshot, number: int, is_over: bool) -> str:
    """``rank 1 is dead (SIGKILL)``, ``rank 0 has left after step 60 (exit code 0)``."""
    rank_text = named_ranks((number,), run.node_of)
    rank = next((rank for rank in run.ranks if rank.rank == number), None)
    if rank is not None and not rank.failed:
        departure = f"left after step {human_count(rank.step)} ({exit_text(rank)})"
        return f"{rank_text} {'had' if is_over else 'has'} {departure}"
    peer_end = next((peer.ended for peer in run.away if peer.rank == number), "")
    ending = rank.ended if rank is not None else peer_end
    return f"{rank_text} {'was' if is_over else 'is'} dead{ending and f' ({ending})'}"


def _location_of_rank(rank: RankSnapshot) -> str:
    """``at t.py:32``, or why the rank runs nothing, else its phase."""
    if rank.halted is not Halt.NONE or not rank.stack:
        return doing(rank)
    waits = "waits for a batch of the DataLoader, " if waits_for_batch(rank.stack) else ""
    return f"{waits}at {short_frame(rank.stack)}"


def _call_mismatch_text(run: RunSnapshot, hang: Hang) -> str:
    """``mismatched units in dp since #571: rank 0 called all_gather of experts.3, rank 1 of out``."""
    sequence = hang.calls[0].sequence
    is_earlier = 0 <= sequence < hang.sequence and len({c.sequence for c in hang.calls}) == 1
    start = f" since #{sequence}" if is_earlier else ""
    return f"{hang.kind} in {_short_group_name(hang)}{start}: {_calls_text(run, hang)}"


def _calls_text(run: RunSnapshot, hang: Hang) -> str:
    """The call of each rank where they differ, ranks with the same call together."""
    calls = hang.calls
    varies = {
        name: len({getattr(call, name) for call in calls}) > 1 for name in ("sequence", "unit", "phase")
    }
    callers: dict[str, list[int]] = {}
    for call in calls:
        callers.setdefault(_call_text(call, varies), []).append(call.rank)
    sentences = [f"{named_ranks(ranks)} called {call}" for call, ranks in callers.items()]
    return ", ".join(sentences[:_MAX_CAUSES]) + _who_is_ahead(run, calls)


def _call_text(call: MemberCall, varies: Mapping[str, bool]) -> str:
    if call.op == "none":
        return f"an unknown collective #{call.sequence}"
    number = f" #{call.sequence}" if varies["sequence"] else ""
    unit = f" of {call.unit}" if call.unit and varies["unit"] else ""
    size = f" ({call.nbytes:,} B)" if call.nbytes >= 0 else ""
    phase = "" if call.phase in ("", "other") or not varies["phase"] else f" in {call.phase}"
    return f"{call.op}{number}{unit}{size}{phase}"


def _who_is_ahead(run: RunSnapshot, calls: Sequence[MemberCall]) -> str:
    """``; rank 0 is one forward ahead``, or which steps the ranks have ended; "" where neither shows."""
    callers = {call.rank for call in calls}
    members = [rank for rank in run.ranks if rank.rank in callers]
    empty = [rank.rank for rank in members if rank.out_of_batches]
    forward = [call.rank for call in calls if call.phase == "forward" and call.is_repeated]
    outside = [call.rank for call in calls if call.phase == "other"]
    steps = {rank.step for rank in members}
    if 0 < len(empty) < len(calls):
        return f"; {named_ranks(empty)} had no more batches after step {human_count(min(steps))}"
    if len(steps) > 1:
        return f"; they have ended {' and '.join(map(human_count, sorted(steps)))} steps"
    if 0 < len(forward) < len(calls):
        return f"; {named_ranks(forward)} {'are' if forward[1:] else 'is'} one forward ahead"
    if any(call.phase not in ("", "other") for call in calls) and outside:
        no_other = f"{'have' if outside[1:] else 'has'} begun no other"
        return f"; {named_ranks(outside)} ended step {human_count(min(steps))} and {no_other}"
    return ""


def _calls_in_hangs(run: RunSnapshot, hangs: Sequence[Hang]) -> list[MemberCall]:
    """Returns the calls in which the ranks of *hangs* wait."""
    return [
        MemberCall(rank=rank.rank, sequence=call.sequence, op=call.op, phase=call.phase)
        for hang in hangs
        for rank in run.ranks
        if rank.rank in hang.waiting
        for call in rank.in_flight
        if call.group_id == hang.group_id
    ]


def _short_group_name(hang: Hang) -> str:
    return group_text(hang.group, hang.dim, ()).removeprefix("group ")


def _nccl_view_lines(ras: Ras | None, hang: Hang) -> Iterator[str]:
    """Yields NCCL's view of the ranks of a hang, which RAS numbers by their place in the group."""
    if ras is None:
        return
    comm_view = next((comm for comm in ras.communicators if comm.group_id == hang.group_id), None)
    if comm_view is None:
        yield f"NCCL's view is n/a: {ras.note or 'no single communicator has the ranks of this group'}"
        return

    def listed_ranks(positions: Iterable[int]) -> str:
        return named_ranks([hang.members[p] if p < len(hang.members) else p for p in positions])

    for positions, verb in (
        (comm_view.dead, "NCCL gives up"),
        (set(comm_view.unresponsive) - set(comm_view.dead), "NCCL does not reach"),
        (comm_view.failed, "NCCL has met an error in"),
    ):
        if positions:
            yield f"{verb} {listed_ranks(positions)}"
    count = next((row for row in comm_view.counts if row.op == hang.op), None)
    if count is not None and count.behind:
        fewest = min(number for _, number in count.behind)
        late = listed_ranks(position for position, _ in count.behind)
        yield f"NCCL has launched {count.most:,} {count.op}, on {late} {fewest:,}"
    elif count is not None:
        yield f"NCCL has launched {count.most:,} {count.op} on all ranks that answer"


def _collective_text(hang: Hang) -> str:
    """``all_gather #12 of tp (ranks 2, 3; 1,000 B)``; without what is unknown."""
    if hang.nbytes < 0:  # read from Prometheus, which has neither
        return f"{hang.op} in {hang.group}"
    group = group_text(hang.group, hang.dim, hang.members, f"{hang.nbytes:,} B")
    return f"{hang.op} #{abs(hang.sequence)} of {group}"


def named_ranks(ranks: Sequence[int], node_of: Callable[[int], str] = lambda _: "") -> str:
    """``ranks 2, 3 on node-b``; a rank of this node comes without the node's name."""
    by_node: dict[str, list[int]] = {}
    for rank in ranks[:_MAX_LISTED_RANKS]:
        by_node.setdefault(node_of(rank), []).append(rank)
    listing = " and ".join(
        ", ".join(map(str, members)) + (f" on {node}" if node else "")
        for node, members in by_node.items()
    ) + (", ..." if len(ranks) > _MAX_LISTED_RANKS else "")
    return f"rank{'s' if len(ranks) > 1 else ''} {listing}"
