"""Which rank arrives late: the lateness of ranks over the last steps, and its reason. Pure.

A rank is a straggler when it arrived last in most matched steps of the window, its median delay is
at least :data:`~zeromon.snapshot.levels.LATE` of a step, and a reason covers half of that delay: phases
that take it longer than the others, or its host or device. A shortage of CPUs hits
identical ranks in turn: such a rank counts after :data:`~zeromon.snapshot.levels.UNSTEADY_SECONDS`.
"""

import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from itertools import accumulate, chain
from typing import Final, NamedTuple

from zeromon.base.units import human_ratio
from zeromon.diagnosis.arrivals import ArrivalSkew, ByRank, StepSkew
from zeromon.diagnosis.rule import cpu_lack
from zeromon.readout.breakdown import own_seconds
from zeromon.snapshot import RankSnapshot, RunSnapshot, levels
from zeromon.snapshot.communication import GroupProgress, Straggler
from zeromon.snapshot.intervals import union_length

_WARM_UP = 3
_SETTLING = 5
"""In the first steps identical ranks differ, too: a lateness that begins in them has to last."""

_Steps = Sequence[tuple[int, StepSkew]]
"""Step numbers, ascending, with who was late in each."""


def find_stragglers(
    skew: ArrivalSkew,
    ranks: Iterable[RankSnapshot],
    node_of: Callable[[int], str] = lambda _: "",
    error_seconds: float = 0.0,
    earlier: Sequence[Straggler] = (),
) -> tuple[Straggler, ...]:
    """The rank that others wait for, step after step, or the node whose ranks all arrive late.

    *node_of*: the node of a rank that is not among *ranks*, "" where unknown. *error_seconds*: the error
    of the nodes' clocks against each other; a delay within twice that error is not reported. *earlier*:
    the stragglers of the previous call, which know since when they are late beyond the kept steps.
    """
    by_rank = {rank.rank: rank for rank in ranks}
    steps = [(step, s) for step, s in skew.steps.items() if step > _WARM_UP]
    step_seconds = max((r.steps.median_seconds or 0.0 for r in by_rank.values()), default=0.0)
    if (len(by_rank) < 2 and not skew.joined) or not step_seconds:
        return ()
    for every in (1, 2):  # optimizers that take turns: a rank is late in every other step only
        turns = _merge_turns(steps, every)
        if len(turns) < levels.WINDOW_STEPS:
            return ()
        straggler = _find_late_rank_or_node(
            by_rank, turns, every * step_seconds, node_of, every * error_seconds
        )
        if straggler is not None:
            is_early = straggler.since_step < _WARM_UP + 1 + _SETTLING
            if is_early and not _spans_seconds(turns, levels.WINDOW_SECONDS):
                return ()
            # Only a lateness that begins with the oldest kept steps may be older than what is kept;
            # the very oldest may be a step in which it was less late
            is_older = straggler.since_step <= turns[_SETTLING][0]
            previous = [s for s in earlier if is_older and s.straggler_name == straggler.straggler_name]
            earliest = min((straggler.since_step, *(s.since_step for s in previous)))
            # A turn has the delays of all its steps, and the figure is per step
            late = straggler.late_seconds / every
            return (replace(straggler, late_seconds=late, since_step=earliest),)
    return ()


def _merge_turns(steps: _Steps, every: int) -> _Steps:
    """*every* steps as one, up to the newest."""
    if every == 1:
        return steps
    turns = []
    for start in range(len(steps) % every, len(steps), every):
        turn = StepSkew(last_ns=steps[start + every - 1][1].last_ns)
        for _, step in steps[start : start + every]:
            for total, by_rank in ((turn.late, step.late), (turn.node_late, step.node_late)):
                for rank, late in by_rank.items():
                    for interval in late:
                        total[rank].add(*interval)
        turns.append((steps[start][0], turn))
    return turns


def _find_late_rank_or_node(
    by_rank: dict[int, RankSnapshot],
    steps: _Steps,
    step_seconds: float,
    node_of: Callable[[int], str],
    error_seconds: float,
) -> Straggler | None:
    """The late rank or node of *steps*; None where none is late enough, or without a reason."""
    limit = max(levels.LATE.warning * step_seconds, 2 * error_seconds)
    straggler = _measure_lateness(steps, lambda s: s.late, lambda rank: rank, step_seconds, limit)
    if straggler is not None:
        # Of a rank on another node only arrivals are known
        rank, mine = straggler.rank, by_rank.get(straggler.rank)
        if mine is None:
            return replace(straggler, node=node_of(rank))
        peers = [r for r in by_rank.values() if r.rank != rank]
        min_share = levels.MIN_EXPLAINED_SHARE * straggler.share
        phases, longer = longer_phases(mine, peers, min_share * (mine.steps.median_seconds or 0.0))
        lacks = lack_of_cpus(mine, peers, min_share)
        reason = lacks or hardware_cause(mine, peers)
        # without CPUs, phases of identical ranks differ, too: several at once, or by less than they lack
        lack = cpu_lack(mine) * (mine.steps.median_seconds or 0.0)
        is_unsteady = lacks or (lack > 0 and (len(phases) > 1 or longer < lack))
        if (not phases and not reason) or (is_unsteady and not _stays_late(steps, rank, step_seconds)):
            return None
        return replace(straggler, phases=phases, longer_seconds=longer, cause=reason)
    straggler = _measure_lateness(steps, lambda s: s.node_late, node_of, step_seconds, limit)
    return straggler and replace(straggler, node=node_of(straggler.rank), whole_node=True)


def _spans_seconds(steps: _Steps, seconds: float) -> bool:
    return bool(steps) and steps[-1][1].last_ns - steps[0][1].last_ns >= seconds * 1e9


def _last_steps(steps: _Steps, seconds: float = levels.WINDOW_SECONDS) -> _Steps:
    """The steps of the last *seconds*, and at least :data:`~zeromon.snapshot.levels.WINDOW_STEPS`."""
    begin_ns = steps[-1][1].last_ns - seconds * 1e9
    count = sum(s.last_ns >= begin_ns for _, s in steps)
    return steps[-max(count, levels.WINDOW_STEPS) :]


def _most_often_late(
    steps: _Steps,
    late_of: Callable[[StepSkew], ByRank],
    name: Callable[[int], object],
    step_seconds: float,
) -> tuple[int, float]:
    """The rank that was latest in enough of the *steps*, and its median seconds; -1 for none.

    Where steps of different ranks overlap, the delay may be longer than a step; at most a step counts.
    """
    latest_ranks = [_latest_rank(late_of(s)) for _, s in steps]
    names = [name(rank) if rank >= 0 else None for rank in latest_ranks]
    common = max(set(names), key=names.count)
    # "" is an unknown node: ranks of several such nodes would count as one
    if common in (None, "") or names.count(common) < levels.LATE_STEPS * len(steps):
        return -1, 0.0
    rank = latest_ranks[names.index(common)]
    late = statistics.median(_late_ns(late_of(s), lambda r: name(r) == common) for _, s in steps)
    return rank, min(step_seconds, late / 1e9)


def _measure_lateness(
    steps: _Steps,
    late_of: Callable[[StepSkew], ByRank],
    name: Callable[[int], object],
    step_seconds: float,
    limit: float,
) -> Straggler | None:
    """The rank that is latest, as :func:`_most_often_late` has it; None below *limit* seconds."""
    rank, late = _most_often_late(_last_steps(steps), late_of, name, step_seconds)
    if rank < 0 or late < limit:
        return None
    late_name = name(rank)
    return Straggler(
        rank=rank,
        late_seconds=late,
        share=late / step_seconds,
        since_step=since_step(
            steps, lambda s: _late_ns(late_of(s), lambda r: name(r) == late_name), late * 1e9
        ),
        phases=(),
        longer_seconds=0.0,
    )


def _stays_late(steps: _Steps, rank: int, step_seconds: float) -> bool:
    """Returns True if *rank* is late in most steps of :data:`.UNSTEADY_SECONDS`."""
    if not _spans_seconds(steps, levels.UNSTEADY_SECONDS):
        return False
    recent = _last_steps(steps, levels.UNSTEADY_SECONDS)
    return _most_often_late(recent, lambda s: s.late, lambda r: r, step_seconds)[0] == rank


def _latest_rank(late: ByRank) -> int:
    """The rank that was late for longest; -1 for none."""
    return max(late, key=lambda rank: late[rank].length, default=-1)


def _late_ns(late: ByRank, counts: Callable[[int], bool]) -> int:
    """How long at least one of the ranks that count was late."""
    return union_length(chain.from_iterable(late[rank] for rank in late if counts(rank)))


_ONSET_SHARE: Final = 0.55
"""A step that is late by this share of the usual delay counts neither for nor against the lateness."""


def since_step(steps: _Steps, late_ns: Callable[[StepSkew], int], usual_ns: float) -> int:
    """The first step of the lateness: the begin of the steps up to the newest that fit it best.

    A step fits by how far it is above :data:`_ONSET_SHARE` of *usual_ns*, and more than *usual_ns* does
    not fit better: one pause does not make up for steps without lateness.
    """
    fits = [min(1.0, late_ns(s) / usual_ns) - _ONSET_SHARE for _, s in reversed(steps)]
    sums = list(accumulate(fits))
    return steps[-1 - max(range(len(sums)), key=sums.__getitem__)][0]


_MANY_FAULTS = 20.0
"""Major page faults a second."""


def lack_of_cpus(late: RankSnapshot, peers: list[RankSnapshot], min_share: float) -> str:
    """How much more *late* lacks a CPU than the others, in words; "" below *min_share* of the time."""
    theirs = [r.machine.pressure.cpu_wait_ratio for r in peers if r.machine.pressure is not None]
    if late.machine.pressure is None or not theirs:
        return ""
    mine, usual_ratio = late.machine.pressure.cpu_wait_ratio, statistics.median(theirs)
    if mine - usual_ratio < min_share:
        return ""
    return (
        f"its main thread had no CPU to run on for {human_ratio(mine)} of the time, "
        f"the others' {human_ratio(usual_ratio)}"
    )


def hardware_cause(late: RankSnapshot, peers: list[RankSnapshot]) -> str:
    """How the device or the memory of *late* differs from the others', in words; "" if not at all."""
    reasons = late.machine.device.throttle_reasons if late.machine.device else ()
    # Where the others are throttled, too, throttling does not explain why one is late
    if reasons and not any(r.machine.device and r.machine.device.throttle_reasons for r in peers):
        return f"its device is throttled ({', '.join(reasons)})"
    theirs = [
        r.machine.pressure.major_faults_per_second for r in peers if r.machine.pressure is not None
    ]
    mine = late.machine.pressure.major_faults_per_second if late.machine.pressure is not None else 0.0
    if theirs and mine >= max(_MANY_FAULTS, 10 * statistics.median(theirs)):
        return f"{mine:.0f} of its pages a second come from disk"
    return ""


def longer_phases(
    late: RankSnapshot, peers: list[RankSnapshot], limit: float
) -> tuple[tuple[str, ...], float]:
    """The phases in which *late* exceeds the others' median, and by how many seconds a step in all.

    The longest first, and no more than make *limit* seconds; none where all together make less. Waiting
    is left out.
    """
    mine = own_seconds(late.steps.recent)
    theirs = [own_seconds(rank.steps.recent) for rank in peers if rank.steps.recent]
    if not mine or not theirs:
        return (), 0.0
    excess = {
        phase: seconds - statistics.median(t.get(phase, 0.0) for t in theirs)
        for phase, seconds in mine.items()
    }
    phases = sorted((name for name in excess if excess[name] > 0), key=lambda name: -excess[name])
    sums = accumulate(excess[name] for name in phases)
    enough = next(((count, total) for count, total in enumerate(sums, 1) if total >= limit), None)
    # Phases that are shorter than the others' count against it: time may only have moved between phases
    if enough is None or sum(excess.values()) < limit:
        return (), 0.0
    return tuple(phases[: enough[0]]), enough[1]


# ---- ranks whose steps drift apart while their collectives match, so that gradients mix ---------


class Drift(NamedTuple):
    """A rank that has ended more steps than another in the same collectives of a group."""

    ahead: RankSnapshot
    behind: RankSnapshot
    group: GroupProgress


def widest_drift(run: RunSnapshot) -> Drift | None:
    """The rank with most steps and the rank furthest behind it in its collectives; None for none."""
    # An attached rank counts its steps from then on, so its number is no drift
    ranks = [rank for rank in run.ranks if not rank.status.joined]
    ahead = max(ranks, key=lambda rank: rank.steps.last_step, default=None)
    if ahead is None:
        return None
    drifts = [
        Drift(ahead, laggard, group)
        for group in ahead.communication.groups
        if group.step_sequence >= 0
        and any(
            # In other groups, as those of an evaluation, a rank may be ahead without mixing gradients
            row.phase == "backward" and row.group == group.label
            for row in ahead.communication.traffic
        )
        for laggard in ranks
        if laggard.steps.last_step < ahead.steps.last_step
        and _reached_number(laggard, group) >= group.step_sequence
    ]
    return max(
        drifts,
        key=lambda drift: drift.ahead.steps.last_step - drift.behind.steps.last_step,
        default=None,
    )


def _reached_number(rank: RankSnapshot, group: GroupProgress) -> int:
    """The number of *group* when the last step of *rank* ended; -1 where that step called none."""
    numbers = (g.step_sequence for g in rank.communication.groups if g.group_id == group.group_id)
    return next(numbers, -1)
