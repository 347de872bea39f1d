"""Which rank of a run matters most. Pure.

Every rule, view and alert that names "the worst rank" takes it from here, so that all of them name the
same one. The questions are three: which rank waits most for its communication (:func:`most_exposed`),
which is closest to running out of memory (:func:`nearest_oom`), and which failed first
(:func:`first_failed`).

Exposed communication is compared as a share of a step, not in seconds: the thresholds, the metric
``zeromon_exposed_communication_ratio``, its alert and the headline figure of every view are shares, and
PromQL can answer the question in the same way (``topk(1, ...)``). Ranks of a synchronous run have steps
of the same length, so seconds decide only between equal shares.
"""

from collections.abc import Sequence

from zeromon.snapshot import Hang, Pool, RankSnapshot, RunSnapshot
from zeromon.snapshot.communication import HangKind
from zeromon.snapshot.levels import OOM
from zeromon.snapshot.memory import KILLED_FOR_MEMORY, Risk
from zeromon.snapshot.rank import CTRL_C
from zeromon.snapshot.run import DeathRole

SETTLED_STEPS = 10
"""A rank with fewer steps is compared only where no rank has more: first steps are exceptional."""
MIN_STEPS = 20
"""A rank with fewer steps is not judged by its medians."""


def most_exposed(ranks: Sequence[RankSnapshot]) -> RankSnapshot | None:
    """The rank that waits most for its communication, as a share of a step; None without any rank.

    Ranks with :data:`SETTLED_STEPS` come before all others, ranks whose communication was timed before
    those without; between equals the longer exposed time decides, then the longer step, then the lower
    rank.
    """
    return min(ranks, key=_order_by_exposure, default=None)


def worst_rank(run: RunSnapshot) -> RankSnapshot | None:
    """The most exposed rank, once it has enough steps to judge by."""
    rank = most_exposed(run.ranks)
    is_ready = rank is not None and rank.steps.watched_steps >= MIN_STEPS and rank.steps.median_seconds
    return rank if is_ready else None


def most_exposed_of(ranks: Sequence[RankSnapshot], count: int) -> list[RankSnapshot]:
    """The *count* ranks that wait most, by the order of :func:`most_exposed`; sorted by rank."""
    if len(ranks) <= count:
        return list(ranks)
    return sorted(sorted(ranks, key=_order_by_exposure)[:count], key=lambda rank: rank.rank)


def _order_by_exposure(rank: RankSnapshot) -> tuple[bool, float, float, float, int]:
    share = -1.0 if rank.communication.exposed_ratio is None else rank.communication.exposed_ratio
    return (
        rank.steps.watched_steps < SETTLED_STEPS,
        -share,
        -(rank.communication.exposed_seconds or 0.0),
        -(rank.steps.median_seconds or 0.0),
        rank.rank,
    )


def highest_exposed_ratio(ranks: Sequence[RankSnapshot]) -> float | None:
    """The largest exposed share of a step; None where no rank knows its own."""
    ratios = (rank.communication.exposed_ratio for rank in ranks)
    return max((ratio for ratio in ratios if ratio is not None), default=None)


def nearest_oom(ranks: Sequence[RankSnapshot]) -> tuple[RankSnapshot, Risk] | None:
    """The rank with the highest out-of-memory risk, and that risk; None while no risk is known.

    Ranks share the risk of the host: a rank that grows comes before the others.
    """
    pairs = [(rank, risk) for rank in ranks for risk in rank.memory.risks]
    return max(
        pairs,
        key=lambda pair: (
            pair[1].ratio,
            pair[1].growth_bytes_per_step or 0.0,
            pair[0].rank in pair[1].growing_ranks,
        ),
        default=None,
    )


def pool_of(rank: RankSnapshot, pool: Pool) -> Pool:
    """The memory of *rank* that *pool* is: a CPU's device memory is the host's."""
    return Pool.HOST if rank.device == "cpu" else pool


def is_running_out(ranks: Sequence[RankSnapshot], pool: Pool) -> bool:
    """Returns whether a memory of *ranks* is nearly full, or a trend leads there."""
    return any(
        risk.pool == pool and (risk.ratio >= OOM.warning or risk.steps_left is not None)
        for rank in ranks
        for risk in rank.memory.risks
    )


def first_counted(ranks: Sequence[RankSnapshot]) -> RankSnapshot | None:
    """The first rank with a memory census, which stands for all in memory by role; None without any."""
    return next((rank for rank in ranks if rank.memory.roles), None)


_LOST_PEER = (
    "connection closed by peer", "connection reset by peer", "broken pipe", "pair closure",
    "remote process exited", "communicator was aborted", "connection was likely closed",
    "recvvalue failed", "sendbytes failed",
)  # fmt: skip
"""Parts of errors of gloo, NCCL and TCPStore when another rank is gone, in lower case."""
_PEER_LOST = "peer_lost"
_UNEXPLAINED = ("SIGKILL", "SIGTERM", "unknown")
"""How a launcher may end the ranks that are left, as :func:`death_cause` has it."""
HOST_OOM, DEVICE_OOM = "host_oom", "device_oom"
"""The causes of a death by memory, as :func:`death_cause` has them."""


_FROM_OUTSIDE = ("SIGKILL", HOST_OOM)
"""Deaths that a wait for another rank cannot cause."""
_FIRST_ENDED = 8
"""Ranks that ended first: only these are asked whether a later one died of them."""
_FOLLOWS_NS = 5_000_000_000
"""A rank that dies so much later than the first is taken for its victim."""


def death_roles(
    ranks: Sequence[RankSnapshot],
    *,
    elsewhere: bool = False,
    hangs: Sequence[Hang] = (),
    unread: bool = False,
) -> dict[int, DeathRole]:
    """Role of each failed rank, and of one that left without an error while others needed it.

    The first deviation in time is the cause. A launcher sends SIGTERM to the other ranks when one fails,
    a backend raises where a peer is gone or has never come: such ranks are victims. What follows a
    Ctrl-C is part of the stop. *elsewhere*: another node has the culprit. *unread*: the record of a
    rank cannot be read, so a rank is a culprit only where its own end says so.
    """
    failed = [rank for rank in ranks if rank.status.failed]
    stop_ns = min(
        (rank.status.last_event_ns for rank in failed if rank.status.stopped == CTRL_C), default=None
    )
    blamed = _ranks_to_blame(ranks, failed, hangs)
    if stop_ns is not None:
        blamed = [rank for rank in blamed if rank.status.last_event_ns < stop_ns]
    if unread:
        blamed = [rank for rank in blamed if death_cause(rank) not in _UNEXPLAINED]
    if not blamed and not elsewhere:
        # With no failed rank, all() is true: the run ends here, and min() below always has a rank
        if stop_ns is not None or (not unread and all(rank.status.stopped for rank in failed)):
            return {rank.rank: DeathRole.STOPPED for rank in failed}
        if not unread:
            lost = [rank for rank in failed if not rank.status.stopped]
            blamed = [min(lost, key=lambda rank: rank.status.last_event_ns)]  # as far as is known
    roles = {rank.rank: DeathRole.VICTIM for rank in failed}
    return roles | {rank.rank: DeathRole.CULPRIT for rank in blamed}


def _ranks_to_blame(
    ranks: Sequence[RankSnapshot], failed: Sequence[RankSnapshot], hangs: Sequence[Hang]
) -> list[RankSnapshot]:
    """The ranks that ended the run, by what is known of each; [] where that is of none."""
    if all(rank.status.stopped for rank in failed):
        return []
    # In a mismatch, as in all that broke off, each member has called: nobody is absent
    absent = {
        rank for hang in hangs
        if hang.seconds and not HangKind(hang.kind).is_mismatch
        for rank in hang.missing or hang.dead
    }  # fmt: skip
    if absent:
        missing = [rank for rank in ranks if rank.rank in absent and not rank.status.alive]
        # A timeout of those that wait is the missing rank's doing; a kill from outside is not
        end_ns = max((rank.status.last_event_ns for rank in missing), default=0) + _FOLLOWS_NS
        killed = [
            rank for rank in failed
            if death_cause(rank) in _FROM_OUTSIDE and rank.status.last_event_ns <= end_ns
        ]  # fmt: skip
        return killed if killed and all(rank.status.stopped for rank in missing) else missing
    ended_ranks = sorted(
        (r for r in ranks if not r.status.alive), key=lambda rank: rank.status.last_event_ns
    )
    suspects = [
        rank for rank in failed
        if not rank.status.stopped and not _has_lost_peer(rank)
        and not _waits_for_absent(rank, ended_ranks[:_FIRST_ENDED])
    ]  # fmt: skip
    first_ns = min((rank.status.last_event_ns for rank in suspects), default=0)
    suspects = [rank for rank in suspects if rank.status.last_event_ns <= first_ns + _FOLLOWS_NS]
    last_ns = max(rank.status.last_event_ns for rank in failed)
    return suspects or [
        rank for rank in ended_ranks[:_FIRST_ENDED]
        if has_left(rank) and rank.status.last_event_ns <= last_ns
        and any(_waits_on(peer, rank) or _has_lost_peer(peer) for peer in failed)
    ]  # fmt: skip


def roles_of(run: RunSnapshot) -> dict[int, DeathRole]:
    """:func:`death_roles` of all ranks of *run* that are seen from here."""
    elsewhere = any(rank.failed for rank in run.away)
    return death_roles(run.ranks, elsewhere=elsewhere, hangs=run.hangs, unread=bool(run.unread))


def has_left(rank: RankSnapshot) -> bool:
    """Returns whether *rank* has ended without an error."""
    return not (rank.status.alive or rank.status.failed or rank.status.detached or rank.status.silent)


def is_ending(run: RunSnapshot) -> bool:
    """Returns whether a rank of *run* finished after as many steps as the others, and none failed."""
    if run.ended or any(rank.status.failed for rank in run.ranks):
        return False
    has_one_left = any(rank.status.leaving or has_left(rank) for rank in run.ranks)
    return has_one_left and len({rank.steps.last_step for rank in run.ranks}) == 1


def _waits_for_absent(rank: RankSnapshot, absent: Sequence[RankSnapshot]) -> bool:
    """Returns whether *rank* died in a collective that one of *absent*, ended before, never called."""
    return any(
        peer.status.last_event_ns < rank.status.last_event_ns and _waits_on(rank, peer)
        for peer in absent
    )


def _waits_on(rank: RankSnapshot, peer: RankSnapshot) -> bool:
    """Returns whether *rank* is in a collective that *peer*, a member of its group, has not called."""
    # The default of get() spares a peer outside the group. Numbers below 0 are sends and receives, which
    # only two ranks share
    sequences = {group.group_id: group.sequence for group in peer.communication.groups}
    return any(
        sequences.get(entry.group_id, entry.sequence) < entry.sequence
        for entry in rank.communication.in_flight
        if entry.sequence >= 0
    )


def _has_lost_peer(rank: RankSnapshot) -> bool:
    """Returns whether the error that ended *rank* says that another rank is gone."""
    error = rank.status.exception.lower()
    return rank.status.ended == _PEER_LOST or any(phrase in error for phrase in _LOST_PEER)


def death_cause(rank: RankSnapshot) -> str:
    """How a failed rank ended, as a short text of few values: the label of a metric."""
    if rank.status.stopped == CTRL_C:
        return "SIGINT"
    if not rank.status.failed:
        return "left"
    if rank.status.ended == "exception":
        if _has_lost_peer(rank):
            return _PEER_LOST
        return DEVICE_OOM if "OutOfMemoryError" in rank.status.exception else "exception"
    if rank.status.ended == KILLED_FOR_MEMORY:
        return HOST_OOM
    return rank.status.ended if " without " not in rank.status.ended else "unknown"


def first_failed(ranks: Sequence[RankSnapshot], hangs: Sequence[Hang] = ()) -> RankSnapshot | None:
    """The rank that ended the run, by its last event: a culprit before all others; None without one.

    Of a run that was stopped, one that the stop itself ended.
    """
    roles = death_roles(ranks, hangs=hangs)
    return min(
        (rank for rank in ranks if rank.rank in roles),
        key=lambda rank: (
            roles[rank.rank] is not DeathRole.CULPRIT,
            roles[rank.rank] is DeathRole.STOPPED and rank.status.stopped != CTRL_C,
            not rank.status.stopped,
            rank.status.last_event_ns,
        ),
        default=None,
    )
