"""Who comes late: collectives matched across the ranks of a node by group and sequence number.

A group that spreads over nodes is matched at the head of the run (:mod:`zeromon.nodes`) while that can
be reached: each node says when its own ranks came, and hears who was last of all.

A collective begins when its last member arrives. What the last one is behind the second to last is its
lateness; what a rank arrives before the last one is its wait; the shortest duration over ranks is the
transfer. Durations say nothing of lateness: in synchronous training all are in a collective until its
end. Arrival is that of the call on the host; of DDP's buckets, when their gradients were complete.

A rank is a straggler when in at least 16 of the last 20 matched steps it was later than any other, and
its median lateness was at least 2 % of a step: the *score* is that share. It recovers when either fails.
"""

from __future__ import annotations

import statistics
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from zeromon.snapshot import RankSnapshot, StepSummary, Straggler
from zeromon.state import Arrival
from zeromon.units import human_ratio

WINDOW = 20
LEAST_OF_WINDOW = 16
LEAST_SHARE = 0.02
_KEPT_STEPS = 512
_KEPT_PENDING = 8192
_WARM_UP = 3


@dataclass(slots=True)
class StepSkew:
    """Nanoseconds of one step, by rank."""

    late: dict[int, int] = field(default_factory=dict)
    wait: dict[int, int] = field(default_factory=dict)
    node_late: dict[int, int] = field(default_factory=dict)
    """By the rank of the node that came last."""


class Joint(NamedTuple):
    """What the ranks of one node know of a collective that others are in, too. Clocks: the node's."""

    group: str
    sequence: int
    size: int
    """Members of the group, on all nodes."""
    here: int
    """Those of this node."""
    first_ns: int
    last_ns: int
    last_rank: int
    before_ns: int
    """When the last but one came; :data:`NEVER` where it is alone."""
    transfer_ns: int
    """The shortest duration."""


class Match(NamedTuple):
    """What became known of such a collective."""

    group: str
    sequence: int
    last_ns: int
    last_rank: int
    late_ns: int
    """Behind the last but one."""
    node_late_ns: int
    """By how much the first of that rank's node came after the last of all other nodes; 0 or more."""
    transfer_ns: int


NEVER = -(1 << 62)


class Skew:
    """Matches arrivals. Changed by :meth:`arrived` and :meth:`book`; everything else reads."""

    def __init__(self) -> None:
        self.steps: OrderedDict[int, StepSkew] = OrderedDict()
        self.joined = False
        """Whether collectives that spread over nodes are matched at the head."""
        self.outgoing: deque[Joint] = deque(maxlen=_KEPT_PENDING)
        self._pending: _Pending = OrderedDict()
        self._waiting: _Pending = OrderedDict()
        """All ranks of this node have come; the head is asked about the others."""

    def arrived(self, rank: int, group: str, members: int, one: Arrival, size: int = 0) -> None:
        """*rank* was in a collective; *members* of the *size* ranks of the group are on this node."""
        away = self.joined and size > members
        if members < 2 and not away:
            return
        key = group, one.sequence
        inside = self._pending.get(key)
        if inside is None:
            inside = _bounded(self._pending, key)
        inside[rank] = one
        if len(inside) == members:
            del self._pending[key]
            if away:
                _bounded(self._waiting, key).update(inside)
                self.outgoing.append(joint_of(group, size, inside))
            else:
                found = joint_of(group, size, inside)
                self._book(inside, match_of([found]))

    def book(self, match: Match) -> None:
        """The head's answer; its clock is this node's already."""
        inside = self._waiting.pop((match.group, match.sequence), None)
        if inside is not None:
            self._book(inside, match)

    def _book(self, inside: dict[int, Arrival], match: Match) -> None:
        """Books what the members of one collective have waited, and what it took to transfer."""
        last, at = match.last_rank, match.last_ns
        step = (inside.get(last) or next(iter(inside.values()))).step
        skew = self.steps.get(step)
        if skew is None:
            skew = self.steps[step] = StepSkew()
            while len(self.steps) > _KEPT_STEPS:
                self.steps.popitem(last=False)
        skew.late[last] = skew.late.get(last, 0) + match.late_ns
        if match.node_late_ns:
            skew.node_late[last] = skew.node_late.get(last, 0) + match.node_late_ns
        transfer = match.transfer_ns
        for member, one in inside.items():
            wait = max(0, at - one.start_ns)
            skew.wait[member] = skew.wait.get(member, 0) + wait
            # whose end was seen late has not waited all that time
            waited = max(0, min(wait, one.busy_ns - transfer))
            one.traffic.matched(one.timed_step, waited, transfer, one.nbytes)

    def wait_seconds(self, rank: int) -> float | None:
        """Mean wait of *rank* a step for later ranks, over the last matched steps."""
        last = list(self.steps.values())[-WINDOW:]
        return statistics.fmean(s.wait.get(rank, 0) for s in last) / 1e9 if last else None

    def late_seconds(self, rank: int) -> float | None:
        """Mean lateness of *rank* a step."""
        last = list(self.steps.values())[-WINDOW:]
        return statistics.fmean(s.late.get(rank, 0) for s in last) / 1e9 if last else None


_Pending = OrderedDict[tuple[str, int], dict[int, Arrival]]


def _bounded(pending: _Pending, key: tuple[str, int]) -> dict[int, Arrival]:
    """A new entry of *pending*, for which the oldest goes when there are too many."""
    if len(pending) >= _KEPT_PENDING:
        pending.popitem(last=False)
    made: dict[int, Arrival] = {}
    pending[key] = made
    return made


def joint_of(group: str, size: int, inside: dict[int, Arrival]) -> Joint:
    """The arrivals of one node's ranks in one collective."""
    at = before = NEVER
    first = transfer = 1 << 62
    last, sequence = -1, 0
    for member, one in inside.items():
        if one.start_ns > at:
            before, at, last = at, one.start_ns, member
        elif one.start_ns > before:
            before = one.start_ns
        first, transfer = min(first, one.start_ns), min(transfer, one.busy_ns)
        sequence = one.sequence
    return Joint(group, sequence, size, len(inside), first, at, last, before, max(1, transfer))


def match_of(joints: Sequence[Joint]) -> Match:
    """Who came last of all, and how long after the others; *joints*, one a node, are by one clock."""
    last = max(joints, key=lambda joint: joint.last_ns)
    others = max((joint.last_ns for joint in joints if joint is not last), default=NEVER)
    return Match(
        group=last.group,
        sequence=last.sequence,
        last_ns=last.last_ns,
        last_rank=last.last_rank,
        late_ns=last.last_ns - max(others, last.before_ns),
        node_late_ns=max(0, last.first_ns - others) if others > NEVER else 0,
        transfer_ns=min(joint.transfer_ns for joint in joints),
    )


def stragglers(
    skew: Skew,
    ranks: Iterable[RankSnapshot],
    node_of: Callable[[int], str] = lambda _: "",
    error_seconds: float = 0.0,
) -> tuple[Straggler, ...]:
    """The rank that others wait for, step after step, or the node, all of whose ranks come late.

    *node_of*: the node of a rank that is not among *ranks*, "" where it is not known. *error_seconds*:
    of the clocks of nodes against each other; what may be theirs is nobody's lateness.
    """
    known = {rank.rank: rank for rank in ranks}
    steps = [(step, s) for step, s in skew.steps.items() if step > _WARM_UP]
    last = steps[-WINDOW:]
    if (len(known) < 2 and not skew.joined) or len(last) < WINDOW:
        return ()
    step_seconds = max((r.step_seconds or 0.0 for r in known.values()), default=0.0)
    least = max(LEAST_SHARE * step_seconds, 2 * error_seconds)
    rank, late = _most_often(last, lambda s: s.late, lambda rank: rank)
    if step_seconds and rank >= 0 and late >= least:
        return (_of_rank(known, rank, late, step_seconds, steps, node_of(rank)),)
    node_rank, late = _most_often(last, lambda s: s.node_late, node_of)
    if step_seconds and node_rank >= 0 and late >= least:
        since = _since(steps, lambda s: _is_late_node(s, node_of, node_of(node_rank), late * 5e8))
        return (
            Straggler(
                rank=node_rank, late_seconds=late, share=late / step_seconds, since_step=since,
                phase="", longer_seconds=0.0, node=node_of(node_rank), whole_node=True,
            ),
        )  # fmt: skip
    return ()


def _most_often(
    last: list[tuple[int, StepSkew]],
    read: Callable[[StepSkew], dict[int, int]],
    name: Callable[[int], object],
) -> tuple[int, float]:
    """A rank of what was latest in enough of the *last* steps, and its median seconds; -1 for none."""
    latest = [max(read(s), key=lambda rank: read(s)[rank], default=-1) for _, s in last]
    names = [name(rank) if rank >= 0 else None for rank in latest]
    found = max(set(names), key=names.count)
    if found in (None, "") or names.count(found) < LEAST_OF_WINDOW:
        return -1, 0.0
    rank = latest[names.index(found)]
    late = statistics.median(
        sum(ns for other, ns in read(s).items() if name(other) == found) for _, s in last
    )
    return rank, late / 1e9


def _of_rank(
    known: dict[int, RankSnapshot],
    rank: int,
    late: float,
    step_seconds: float,
    steps: list[tuple[int, StepSkew]],
    node: str,
) -> Straggler:
    """What is known of one; of a rank of another node, only when it came."""
    mine, others = known.get(rank), [r for r in known.values() if r.rank != rank]
    phase, longer = longer_phase(mine, others) if mine else ("", 0.0)
    return Straggler(
        rank=rank,
        late_seconds=late,
        share=late / step_seconds,
        since_step=_since(steps, lambda s: _latest(s) == rank and s.late[rank] >= late * 5e8),
        phase=phase,
        longer_seconds=longer,
        cause=cause(mine, others, late / step_seconds) if mine else "",
        node="" if mine else node,
    )


def _latest(s: StepSkew) -> int:
    return max(s.late, key=lambda rank: s.late[rank], default=-1)


def _is_late_node(s: StepSkew, node_of: Callable[[int], str], node: str, least_ns: float) -> bool:
    late = sum(ns for rank, ns in s.node_late.items() if node_of(rank) == node)
    return late >= least_ns


def _since(steps: list[tuple[int, StepSkew]], is_late: Callable[[StepSkew], bool]) -> int:
    """The first step of the stretch in which it was mostly so."""
    since, misses = steps[-1][0], 0
    for step, s in reversed(steps):
        if is_late(s):
            since, misses = step, 0
        else:
            misses += 1
            if misses > WINDOW - LEAST_OF_WINDOW:
                break
    return since


_MANY_FAULTS = 20.0


def cause(late: RankSnapshot, others: list[RankSnapshot], share: float) -> str:
    """What sets a late rank's host or device apart from the others', in words; "" where nothing does."""
    reasons = late.device_stats.throttle_reasons if late.device_stats else ()
    if reasons and not any(r.device_stats and r.device_stats.throttle_reasons for r in others):
        return f"the clocks of its device are held down ({', '.join(reasons)})"
    theirs = [r.pressure for r in others if r.pressure is not None]
    mine = late.pressure
    if mine is None or not theirs:
        return ""
    usual = statistics.median(p.cpu_wait_ratio for p in theirs)
    if mine.cpu_wait_ratio - usual >= max(LEAST_SHARE, share / 2):
        return (
            f"its main thread had no CPU to run on for {human_ratio(mine.cpu_wait_ratio)} of the time, "
            f"the others' {human_ratio(usual)}"
        )
    faults = statistics.median(p.major_faults_per_second for p in theirs)
    if mine.major_faults_per_second >= max(_MANY_FAULTS, 10 * faults):
        return f"{mine.major_faults_per_second:.0f} of its pages a second come from disk"
    return ""


_PHASES = ("other", "forward", "backward", "optimizer", "data_wait", "cpu_optimizer")


def longer_phase(late: RankSnapshot, others: list[RankSnapshot]) -> tuple[str, float]:
    """The phase in which *late* spends most time beyond the others' median, waiting left out."""
    mine = own_seconds(late.recent)
    theirs = [own_seconds(rank.recent) for rank in others if rank.recent]
    if not mine or not theirs:
        return "", 0.0
    more = {
        phase: seconds - statistics.median(t.get(phase, 0.0) for t in theirs)
        for phase, seconds in mine.items()
    }
    phase = max(more, key=lambda name: more[name])
    return (phase, more[phase]) if more[phase] > 0 else ("", 0.0)


def own_seconds(recent: Iterable[StepSummary]) -> Mapping[str, float]:
    """Mean seconds a step by phase, without what was spent waiting for communication."""
    timed = [s for s in list(recent)[-WINDOW:] if not s.idle and s.phase_exposed_ns]
    if not timed:
        return {}
    return {
        name: statistics.fmean(s.phase_ns[i] - s.phase_exposed_ns[i] for s in timed) / 1e9
        for i, name in enumerate(_PHASES)
    }
