"""Who comes late: collectives matched across the ranks of a node by group and sequence number.

A collective begins when its last member arrives. What the last one is behind the second to last is its
lateness; what a rank arrives before the last one is its wait; the shortest duration over ranks is the
transfer. Durations say nothing of lateness: in synchronous training all are in a collective until its
end. Arrival is that of the call on the host; of DDP's buckets, when their gradients were complete.

A rank is a straggler when in at least 16 of the last 20 matched steps it was later than any other, and
its median lateness was at least 2 % of a step: the *score* is that share. It recovers when either fails.
"""

from __future__ import annotations

import statistics
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

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


class Skew:
    """Matches arrivals. Changed by :meth:`arrived`; everything else reads."""

    def __init__(self) -> None:
        self.steps: OrderedDict[int, StepSkew] = OrderedDict()
        self._pending: OrderedDict[tuple[str, int], dict[int, Arrival]] = OrderedDict()

    def arrived(self, rank: int, group: str, members: int, one: Arrival) -> None:
        """*rank* was in a collective; *members*: ranks of the group that are on this node."""
        if members < 2:
            return
        key = group, one.sequence
        inside = self._pending.get(key)
        if inside is None:
            inside = self._pending[key] = {}
            if len(self._pending) > _KEPT_PENDING:
                self._pending.popitem(last=False)
        inside[rank] = one
        if len(inside) == members:
            del self._pending[key]
            self._match(inside)

    def _match(self, inside: dict[int, Arrival]) -> None:
        """Books what the members of one collective have waited, and what it took to transfer."""
        at = before = -(1 << 62)
        last, transfer = -1, 1 << 62
        for member, one in inside.items():
            if one.start_ns > at:
                before, at, last = at, one.start_ns, member
            elif one.start_ns > before:
                before = one.start_ns
            transfer = min(transfer, one.busy_ns)
        transfer = max(1, transfer)
        step = inside[last].step
        skew = self.steps.get(step)
        if skew is None:
            skew = self.steps[step] = StepSkew()
            while len(self.steps) > _KEPT_STEPS:
                self.steps.popitem(last=False)
        skew.late[last] = skew.late.get(last, 0) + at - before
        for member, one in inside.items():
            wait = at - one.start_ns
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


def stragglers(skew: Skew, ranks: Iterable[RankSnapshot]) -> tuple[Straggler, ...]:
    """The ranks that others wait for, step after step; none, or one."""
    known = {rank.rank: rank for rank in ranks}
    steps = [(step, s) for step, s in skew.steps.items() if step > _WARM_UP]
    last = steps[-WINDOW:]
    if len(known) < 2 or len(last) < WINDOW:
        return ()
    latest = [_latest(s) for _, s in last]
    rank = max(set(latest), key=latest.count)
    if rank not in known or latest.count(rank) < LEAST_OF_WINDOW:
        return ()
    late = statistics.median(s.late.get(rank, 0) for _, s in last) / 1e9
    step_seconds = max((r.step_seconds or 0.0) for r in known.values())
    if not step_seconds or late / step_seconds < LEAST_SHARE:
        return ()
    phase, longer = longer_phase(known[rank], [r for r in known.values() if r.rank != rank])
    return (
        Straggler(
            rank=rank,
            late_seconds=late,
            share=late / step_seconds,
            since_step=_since(steps, rank, late * 1e9 / 2),
            phase=phase,
            longer_seconds=longer,
            cause=cause(
                known[rank], [r for r in known.values() if r.rank != rank], late / step_seconds
            ),
        ),
    )


def _latest(s: StepSkew) -> int:
    return max(s.late, key=lambda rank: s.late[rank], default=-1)


def _since(steps: list[tuple[int, StepSkew]], rank: int, least_ns: float) -> int:
    """The first step of the stretch in which *rank* was mostly the latest, by *least_ns* and more."""
    since, misses = steps[-1][0], 0
    for step, s in reversed(steps):
        if _latest(s) == rank and s.late[rank] >= least_ns:
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
