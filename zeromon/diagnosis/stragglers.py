"""Which rank arrives late: collectives matched across ranks by group and sequence number. Pure.

A group that spreads over nodes is matched by the leader of the run (:mod:`zeromon.collector.cluster`)
while nodes reach it: each node sends when its own ranks arrived, and receives which rank was last.

A collective begins when its last member arrives. The wait of a rank is the time for which it is blocked
until the last one arrives: as long as it computes, nobody waits. The delay of a straggler is the time
after the second to last arrival in which a rank waits for it; the shortest duration over ranks is the
transfer. Durations do not show delays: in synchronous training every
rank is in a collective until it ends. A rank arrives when it calls the collective on the host; in a DDP
bucket, when the gradients of the bucket are complete.

Collectives overlap in time. So the waits and the delays of a step are unions of intervals, not sums, and
neither is longer than the step.

A rank is a straggler when it arrived last in most matched steps of the window, its median delay is at
least :data:`~zeromon.levels.LATE` of a step, and a reason covers half of that delay: phases that take it
longer than the others, or its host or device. What a lack of CPUs explains moves between identical
ranks, so the rank has to be late for :data:`~zeromon.levels.UNSTEADY_SECONDS` then.
"""

import statistics
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, chain, islice
from typing import Final, NamedTuple

from zeromon.fold.state import MOST_ARRIVALS, Arrival
from zeromon.levels import LATE, LATE_STEPS, REASON, UNSTEADY_SECONDS, WINDOW_SECONDS, WINDOW_STEPS
from zeromon.readout.breakdown import own_seconds
from zeromon.snapshot import RankSnapshot, Straggler
from zeromon.stats.intervals import Coverage, union_length
from zeromon.units import human_ratio

_KEPT_STEPS: Final = 512
_KEPT_PENDING = MOST_ARRIVALS
"""Fewer would lose what one rank of several has called."""
_WARM_UP = 3


_ByRank = Mapping[int, Coverage]
Members = dict[int, Arrival]
"""Rank -> its arrival at a collective."""


@dataclass(slots=True)
class StepSkew:
    """When the ranks of one step were late and when they waited, by rank, nanoseconds."""

    late: defaultdict[int, Coverage] = field(default_factory=lambda: defaultdict(Coverage))
    wait: dict[int, Coverage] = field(default_factory=dict)
    node_late: defaultdict[int, Coverage] = field(default_factory=lambda: defaultdict(Coverage))
    """The delay of a whole node, by the rank of the node that arrived last."""
    last_ns: int = 0
    """When the newest of its collectives began, by this node's clock."""


_Steps = Sequence[tuple[int, StepSkew]]
"""Step numbers, ascending, with who was late in each."""

NEVER: Final = -(1 << 62)
FAR: Final = 1 << 62


class PartialArrival(NamedTuple):
    """The arrivals of one node's ranks in a collective that spreads over nodes, by the node's clock."""

    group: str
    sequence: int
    size: int
    """Members of the group, on all nodes."""
    here: int
    """Members on this node."""
    first_ns: int
    last_ns: int
    last_rank: int
    before_ns: int
    """When the second to last arrived; :data:`NEVER` with one member on the node."""
    transfer_ns: int
    """The shortest duration."""
    waits_ns: int = NEVER
    """When the first of them began to wait."""
    others_wait_ns: int = NEVER
    """The same of all but *last_rank*; :data:`FAR` with one member on the node."""


class MatchedCollective(NamedTuple):
    """The last arrival of all nodes in a collective."""

    group: str
    sequence: int
    last_ns: int
    last_rank: int
    late_ns: int
    """How long somebody waited for it alone: after the second to last; 0 or more."""
    node_late_ns: int
    """How long ranks of other nodes waited for the first rank of that node; 0 or more."""
    transfer_ns: int


class ArrivalSkew:
    """Matches arrivals. :meth:`arrived` and :meth:`book` change it; all other methods only read."""

    def __init__(self) -> None:
        self.steps: OrderedDict[int, StepSkew] = OrderedDict()
        self.joined = False
        """Whether the leader matches collectives that spread over nodes."""
        self.outgoing: deque[PartialArrival] = deque(maxlen=_KEPT_PENDING)
        self._pending: defaultdict[str, dict[int, Members]] = defaultdict(dict)
        """Group -> sequence number -> the ranks of this node that have arrived."""
        self._kept = 0
        """The number of collectives in :attr:`_pending`."""
        self._waiting: dict[tuple[str, int], Members] = {}
        """Collectives that all ranks of this node are in, until the leader answers."""

    def arrived(self, rank: int, group: str, members: int, one: Arrival, size: int = 0) -> None:
        """Records the arrival of *rank*; *members* of the *size* ranks of the group are on this node."""
        self.all_arrived(rank, {one.group: (group, members, size)}, (one,))

    def all_arrived(
        self, rank: int, groups: dict[int, tuple[str, int, int]], arrivals: Iterable[Arrival]
    ) -> None:
        """Records arrivals of *rank*; *groups*: id -> name, members on this node, and in all."""
        number, group, members, spreads = -1, "", 0, False
        pending: dict[int, Members] = {}
        for one in arrivals:
            if one.group != number:
                number = one.group
                group, members, size = groups[number]
                spreads = self.joined and size > members
                pending = self._pending[group] if members > 1 or spreads else {}
            if members < 2 and not spreads:
                continue
            sequence = one.sequence
            inside = pending.get(sequence)
            if inside is None:
                inside = pending[sequence] = self._made_room()
            inside[rank] = one
            if len(inside) == members:
                del pending[sequence]
                self._kept -= 1
                part = partial_arrival(group, groups[number][2], inside)
                if spreads:
                    if len(self._waiting) >= _KEPT_PENDING:
                        del self._waiting[next(iter(self._waiting))]
                    self._waiting[group, sequence] = inside
                    self.outgoing.append(part)
                else:
                    self._book(inside, alone(part))

    def _made_room(self) -> Members:
        """A new entry of the pending collectives.

        Where there are too many, the oldest of the group with most of them is removed.
        """
        if self._kept >= _KEPT_PENDING:
            crowded = max(self._pending.values(), key=len)
            del crowded[next(iter(crowded))]
        else:
            self._kept += 1
        return {}

    def book(self, match: MatchedCollective) -> None:
        """Records the leader's answer, whose times are already by this node's clock."""
        inside = self._waiting.pop((match.group, match.sequence), None)
        if inside is not None:
            self._book(inside, match)

    def _book(self, inside: Members, match: MatchedCollective) -> None:
        """Records how long the members of one collective waited, and its transfer."""
        last, at = match.last_rank, match.last_ns
        step = (inside.get(last) or next(iter(inside.values()))).step
        skew = self.steps.get(step)
        if skew is None:
            skew = self.steps[step] = StepSkew()
            while len(self.steps) > _KEPT_STEPS:
                self.steps.popitem(last=False)
            for old in islice(
                reversed(self.steps.values()), 2 * WINDOW_STEPS, 2 * WINDOW_STEPS + 1
            ):
                old.wait.clear()  # no mean reads it any more
        skew.last_ns = max(skew.last_ns, at)
        skew.late[last].add(at - match.late_ns, at)
        if (
            match.node_late_ns
        ):  # its end is not known: at most the spread of the node's own arrivals earlier
            skew.node_late[last].add(at - match.node_late_ns, at)
        transfer, waits = match.transfer_ns, skew.wait
        for member, one in inside.items():
            row, start, ended, blocked = one.row, one.issued_ns, one.ended_ns, one.blocked_ns
            busy = ended - start if ended > start else 0
            wait = waits.get(member)
            if wait is None:
                wait = waits[member] = Coverage()
            wait.add(max(start, one.waits_from_ns), at)
            # a rank whose end was recorded late did not wait all that time
            most, waited = busy - transfer, at - start
            if waited > most:
                waited = most
            row.matched(one.timed_step, waited if waited > 0 else 0, transfer, one.nbytes)
            row.matched_ns += blocked
            end = start + busy
            if at > end - blocked and blocked and member != last:
                row.waited_for(last, min(at, end) - max(start, end - blocked))

    def wait_seconds(self, rank: int) -> float | None:
        """Mean seconds a step that *rank* waits for later ranks; None before the first matched step."""
        return self._mean_seconds(rank, lambda s: s.wait)

    def late_seconds(self, rank: int) -> float | None:
        """Mean seconds a step that all others wait for *rank*; None before the first matched step."""
        return self._mean_seconds(rank, lambda s: s.late)

    def _mean_seconds(self, rank: int, read: Callable[[StepSkew], _ByRank]) -> float | None:
        newest = reversed(self.steps.items())
        last = list(islice((s for step, s in newest if step > 1), WINDOW_STEPS))
        last = last or list(islice(reversed(self.steps.values()), WINDOW_STEPS))
        lengths = [0 if (known := read(s).get(rank)) is None else known.length for s in last]
        return statistics.fmean(lengths) / 1e9 if lengths else None


def partial_arrival(group: str, size: int, inside: Members) -> PartialArrival:
    """Summarizes the arrivals of one node's ranks in one collective."""
    last, sequence, first, transfer = -1, 0, 0, 0
    at, before, last_waits, others_wait = NEVER, NEVER, FAR, FAR
    for rank, one in inside.items():
        waits, start, lasted = one.waits_from_ns, one.issued_ns, one.ended_ns - one.issued_ns
        waits = max(waits, start)
        if last < 0:
            last, sequence, first, transfer = rank, one.sequence, start, lasted
            at, last_waits = start, waits
            continue
        if start > at:
            before, at, last = at, start, rank
            waits, last_waits = last_waits, waits
        elif start > before:
            before = start
        others_wait = min(others_wait, waits)
        first = min(first, start)
        transfer = min(transfer, lasted)
    return PartialArrival(
        group, sequence, size, len(inside), first, at, last, before, max(1, transfer),
        min(last_waits, others_wait), others_wait,
    )  # fmt: skip


def alone(part: PartialArrival) -> MatchedCollective:
    """The last arrival in a collective whose members are all on one node."""
    at = part.last_ns
    late = at - max(NEVER, part.before_ns, part.others_wait_ns)
    return MatchedCollective(
        part.group, part.sequence, at, part.last_rank, max(0, late), 0, part.transfer_ns
    )


def matched_collective(parts: Sequence[PartialArrival]) -> MatchedCollective:
    """The rank that arrived last of all, and its delay; *parts*, one a node, are by one clock."""
    last = max(parts, key=lambda part: part.last_ns)
    rest = [part for part in parts if part is not last]
    others = max((part.last_ns for part in rest), default=NEVER)
    waits = min((part.waits_ns for part in rest), default=FAR)
    since = max(others, last.before_ns, min(waits, last.others_wait_ns))
    return MatchedCollective(
        group=last.group,
        sequence=last.sequence,
        last_ns=last.last_ns,
        last_rank=last.last_rank,
        late_ns=max(0, last.last_ns - since),
        node_late_ns=max(0, last.first_ns - max(others, waits)) if others > NEVER else 0,
        transfer_ns=min(part.transfer_ns for part in parts),
    )


def stragglers(
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
    known = {rank.rank: rank for rank in ranks}
    steps = [(step, s) for step, s in skew.steps.items() if step > _WARM_UP]
    step_seconds = max((r.step_seconds or 0.0 for r in known.values()), default=0.0)
    if (len(known) < 2 and not skew.joined) or len(steps) < WINDOW_STEPS or not step_seconds:
        return ()
    least = max(LATE.warning * step_seconds, 2 * error_seconds)
    rank, late = _most_often(_last(steps), lambda s: s.late, lambda rank: rank, step_seconds)
    if rank >= 0 and late >= least:
        found = _of_rank(known, rank, late, step_seconds, steps, node_of(rank))
    else:
        rank, late = _most_often(_last(steps), lambda s: s.node_late, node_of, step_seconds)
        if rank < 0 or late < least:
            return ()
        found = _of_node(rank, late, step_seconds, steps, node_of)
    if found is None:
        return ()
    since = [
        s.since_step for s in earlier if s.who == found.who and found.since_step == steps[0][0]
    ]
    return (replace(found, since_step=min((found.since_step, *since))),)


def _last(steps: _Steps, seconds: float = WINDOW_SECONDS) -> _Steps:
    """The steps of the last *seconds*, and at least :data:`~zeromon.levels.WINDOW_STEPS`."""
    begin = steps[-1][1].last_ns - seconds * 1e9
    count = sum(s.last_ns >= begin for _, s in steps)
    return steps[-max(count, WINDOW_STEPS) :]


def _most_often(
    last: _Steps,
    read: Callable[[StepSkew], _ByRank],
    name: Callable[[int], object],
    step_seconds: float,
) -> tuple[int, float]:
    """The rank that was latest in enough of the *last* steps, and its median seconds; -1 for none.

    Where steps of different ranks overlap, the delay may be longer than a step; at most a step counts.
    """
    latest = [_latest(read(s)) for _, s in last]
    names = [name(rank) if rank >= 0 else None for rank in latest]
    usual = max(set(names), key=names.count)
    if usual in (None, "") or names.count(usual) < LATE_STEPS * len(last):
        return -1, 0.0
    rank = latest[names.index(usual)]
    late = statistics.median(_late_ns(read(s), lambda one: name(one) == usual) for _, s in last)
    return rank, min(step_seconds, late / 1e9)


def _of_rank(
    known: dict[int, RankSnapshot],
    rank: int,
    late: float,
    step_seconds: float,
    steps: _Steps,
    node: str,
) -> Straggler | None:
    """The straggler *rank*; None without a reason. Of a rank on another node only arrivals are known."""
    mine, others = known.get(rank), [r for r in known.values() if r.rank != rank]
    phases: tuple[str, ...] = ()
    longer, why = 0.0, ""
    if mine is not None:
        phases, longer = longer_phases(mine, others, REASON * late)
        lacks = lack_of_cpus(mine, others, REASON * late / step_seconds)
        why = lacks or cause(mine, others)
        if (not phases and not why) or (lacks and not _stays(steps, rank, step_seconds)):
            return None
    return Straggler(
        rank=rank,
        late_seconds=late,
        share=late / step_seconds,
        since_step=since_step(
            steps, lambda s: _late_ns(s.late, lambda one: one == rank), late * 1e9
        ),
        phases=phases,
        longer_seconds=longer,
        cause=why,
        node="" if mine else node,
    )


def _of_node(
    rank: int, late: float, step_seconds: float, steps: _Steps, node_of: Callable[[int], str]
) -> Straggler:
    """The node of *rank*, whose ranks all arrive late."""
    node = node_of(rank)
    return Straggler(
        rank=rank,
        late_seconds=late,
        share=late / step_seconds,
        since_step=since_step(
            steps, lambda s: _late_ns(s.node_late, lambda one: node_of(one) == node), late * 1e9
        ),
        phases=(),
        longer_seconds=0.0,
        node=node,
        whole_node=True,
    )


def _stays(steps: _Steps, rank: int, step_seconds: float) -> bool:
    """Whether *rank* is late in most steps of :data:`~zeromon.levels.UNSTEADY_SECONDS`."""
    if steps[-1][1].last_ns - steps[0][1].last_ns < UNSTEADY_SECONDS * 1e9:
        return False
    last = _last(steps, UNSTEADY_SECONDS)
    return _most_often(last, lambda s: s.late, lambda one: one, step_seconds)[0] == rank


def _latest(late: _ByRank) -> int:
    """The rank that was late for longest; -1 for none."""
    return max(late, key=lambda rank: late[rank].length, default=-1)


def _late_ns(late: _ByRank, counts: Callable[[int], bool]) -> int:
    """How long at least one of the ranks that count was late."""
    return union_length(chain.from_iterable(late[rank] for rank in late if counts(rank)))


_LATE_ENOUGH: Final = 0.55
"""A step that is late by this share of the usual delay counts neither for nor against the lateness."""


def since_step(steps: _Steps, late_ns: Callable[[StepSkew], int], usual_ns: float) -> int:
    """The first step of the lateness: the begin of the steps up to the newest that fit it best.

    A step fits by how far it is above :data:`_LATE_ENOUGH` of *usual_ns*, and more than *usual_ns* does
    not fit better: one pause does not make up for steps without lateness.
    """
    fits = [min(1.0, late_ns(s) / usual_ns) - _LATE_ENOUGH for _, s in reversed(steps)]
    sums = list(accumulate(fits))
    return steps[-1 - max(range(len(sums)), key=sums.__getitem__)][0]


_MANY_FAULTS = 20.0
"""Major page faults a second."""


def lack_of_cpus(late: RankSnapshot, others: list[RankSnapshot], least: float) -> str:
    """How much more *late* lacks a CPU than the others, in words; "" below *least* of the time."""
    theirs = [r.pressure.cpu_wait_ratio for r in others if r.pressure is not None]
    if late.pressure is None or not theirs:
        return ""
    mine, usual = late.pressure.cpu_wait_ratio, statistics.median(theirs)
    if mine - usual < least:
        return ""
    return (
        f"its main thread had no CPU to run on for {human_ratio(mine)} of the time, "
        f"the others' {human_ratio(usual)}"
    )


def cause(late: RankSnapshot, others: list[RankSnapshot]) -> str:
    """How the device or the memory of *late* differs from the others', in words; "" if not at all."""
    reasons = late.device_stats.throttle_reasons if late.device_stats else ()
    if reasons and not any(r.device_stats and r.device_stats.throttle_reasons for r in others):
        return f"its device is throttled ({', '.join(reasons)})"
    theirs = [r.pressure.major_faults_per_second for r in others if r.pressure is not None]
    mine = late.pressure.major_faults_per_second if late.pressure is not None else 0.0
    if theirs and mine >= max(_MANY_FAULTS, 10 * statistics.median(theirs)):
        return f"{mine:.0f} of its pages a second come from disk"
    return ""


def longer_phases(
    late: RankSnapshot, others: list[RankSnapshot], least: float
) -> tuple[tuple[str, ...], float]:
    """The phases in which *late* exceeds the others' median, and by how many seconds a step in all.

    The longest first, and no more than make *least* seconds; none where all together make less. Waiting
    is left out.
    """
    mine = own_seconds(late.recent)
    theirs = [own_seconds(rank.recent) for rank in others if rank.recent]
    if not mine or not theirs:
        return (), 0.0
    more = {
        phase: seconds - statistics.median(t.get(phase, 0.0) for t in theirs)
        for phase, seconds in mine.items()
    }
    phases = sorted((name for name in more if more[name] > 0), key=lambda name: -more[name])
    sums = accumulate(more[name] for name in phases)
    enough = next(((count, total) for count, total in enumerate(sums, 1) if total >= least), None)
    if enough is None or sum(more.values()) < least:
        return (), 0.0
    return tuple(phases[: enough[0]]), enough[1]
