"""Arrivals of ranks at collectives, matched by group and sequence number. Pure.

A group that spreads over nodes is matched by the leader of the run (:mod:`zeromon.collector.cluster`)
while nodes reach it: each node sends when its own ranks arrived, and receives which rank was last.

A collective begins when its last member arrives. The wait of a rank is the time for which it is blocked
until the last one arrives: as long as it computes, nobody waits. The delay of a straggler is the time
after the second to last arrival in which a rank waits for it; the shortest duration over ranks is the
transfer. Durations do not show delays: in synchronous training every rank is in a collective until it
ends. A rank arrives when it calls the collective on the host; in a DDP bucket, when the gradients of the
bucket are complete.

Collectives overlap in time. So the waits and the delays of a step are unions of intervals, not sums, and
neither is longer than the step.
"""

import statistics
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Final, NamedTuple

from zeromon.fold.state import MAX_ARRIVALS, Arrival
from zeromon.ring.codes import StageAction
from zeromon.snapshot import RankSnapshot
from zeromon.snapshot.communication import (
    PipelineBubble,
    PipelineRow,
    balanced_seconds,
    parse_schedule,
    simulate_schedule,
    with_more,
)
from zeromon.snapshot.intervals import Coverage
from zeromon.snapshot.levels import WINDOW_STEPS

_KEPT_STEPS: Final = 512
_KEPT_PENDING = MAX_ARRIVALS
"""Fewer would lose what one rank of several has called."""


ByRank = Mapping[int, Coverage]
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


NEVER: Final = -(1 << 62)
END_OF_TIME_NS: Final = 1 << 62


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
    """When the first but *last_rank* began to wait; :data:`END_OF_TIME_NS` with one member here."""
    transfer_known: bool = True
    """False where it is only a bound: by the spans of the last rank and of the shortest."""


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
    transfer_known: bool = True


class ArrivalSkew:
    """Matches arrivals. :meth:`record_arrivals` and :meth:`record_match` change it."""

    def __init__(self) -> None:
        self.steps: OrderedDict[int, StepSkew] = OrderedDict()
        self.joined = False
        """True if the leader matches collectives that spread over nodes."""
        self.outgoing: deque[PartialArrival] = deque(maxlen=_KEPT_PENDING)
        self._pending: defaultdict[str, dict[int, Members]] = defaultdict(dict)
        """Group -> sequence number -> the ranks of this node that have arrived."""
        self._kept = 0
        """The number of collectives in :attr:`_pending`."""
        self._waiting: dict[tuple[str, int], Members] = {}
        """Collectives that all ranks of this node are in, until the leader answers."""

    def record_arrivals(
        self, rank: int, groups: dict[int, tuple[str, int, int]], arrivals: Iterable[Arrival]
    ) -> None:
        """Records arrivals of *rank*; *groups*: id -> name, members on this node, and in all."""
        number, group, members, spreads = -1, "", 0, False
        pending: dict[int, Members] = {}
        for arrival in arrivals:
            # Consecutive arrivals are mostly of one group: without this, each looks its group up
            if arrival.group != number:
                number = arrival.group
                group, members, size = groups[number]
                spreads = self.joined and size > members
                pending = self._pending[group] if members > 1 or spreads else {}
            # With one member here and no leader, nothing shows when the other nodes have come
            if members < 2 and not spreads:
                continue
            sequence = arrival.sequence
            inside = pending.get(sequence)
            if inside is None:
                # Where there are too many, the oldest of the group with most of them is removed
                if self._kept >= _KEPT_PENDING:
                    crowded = max(self._pending.values(), key=len)
                    del crowded[next(iter(crowded))]
                else:
                    self._kept += 1
                inside = pending[sequence] = {}
            inside[rank] = arrival
            if len(inside) == members:
                del pending[sequence]
                self._kept -= 1
                partial = partial_arrival(group, groups[number][2], inside)
                if spreads:
                    # A leader that stops answering would let this grow for ever
                    if len(self._waiting) >= _KEPT_PENDING:
                        del self._waiting[next(iter(self._waiting))]
                    self._waiting[group, sequence] = inside
                    self.outgoing.append(partial)
                else:
                    self._record_waits(inside, match_single_node(partial))

    def record_match(self, match: MatchedCollective) -> None:
        """Records the leader's answer, whose times are already by this node's clock."""
        inside = self._waiting.pop((match.group, match.sequence), None)
        if inside is not None:
            self._record_waits(inside, match)

    def _record_waits(self, inside: Members, match: MatchedCollective) -> None:
        """Records how long the members of one collective waited, and its transfer."""
        last_rank, at = match.last_rank, match.last_ns
        # The last rank may be on another node: then a member of this one names the step
        step = (inside.get(last_rank) or next(iter(inside.values()))).step
        skew = self.steps.get(step)
        if skew is None:
            skew = self.steps[step] = StepSkew()
            while len(self.steps) > _KEPT_STEPS:
                self.steps.popitem(last=False)
            for old in islice(reversed(self.steps.values()), 2 * WINDOW_STEPS, 2 * WINDOW_STEPS + 1):
                old.wait.clear()  # no mean reads it any more
        skew.last_ns = max(skew.last_ns, at)
        skew.late[last_rank].add(at - match.late_ns, at)
        # its end is not known: at most the spread of the node's own arrivals earlier
        if match.node_late_ns:
            skew.node_late[last_rank].add(at - match.node_late_ns, at)
        transfer, waits = match.transfer_ns, skew.wait
        for member, call in inside.items():
            row, start, end_ns, blocked = (call.row, call.issued_ns, call.ended_ns, call.blocked_ns)
            busy = end_ns - start if end_ns > start else 0
            wait = waits.get(member)
            if wait is None:
                wait = waits[member] = Coverage()
            wait.add(max(start, call.waits_from_ns), at)
            # a rank whose end was recorded late did not wait all that time
            max_wait, waited = busy - transfer, at - start
            if waited > max_wait:
                waited = max_wait
            moved = 0 if call.is_wait else transfer  # a wait is a part of a transfer
            known = call.nbytes if match.transfer_known and moved else 0
            row.matched(call.timed_step, waited if waited > 0 else 0, moved, known, call.on_device)
            row.matched_ns += blocked
            busy_end = start + busy
            if at > busy_end - blocked and blocked and member != last_rank:
                row.waited_for(last_rank, min(at, busy_end) - max(start, busy_end - blocked))

    def wait_seconds(self, rank: int) -> float | None:
        """Mean seconds a step that *rank* waits for later ranks; None before the first matched step."""
        return self._mean_seconds(rank, lambda s: s.wait)

    def late_seconds(self, rank: int) -> float | None:
        """Mean seconds a step that all others wait for *rank*; None before the first matched step."""
        return self._mean_seconds(rank, lambda s: s.late)

    def _mean_seconds(self, rank: int, by_rank: Callable[[StepSkew], ByRank]) -> float | None:
        reversed_steps = reversed(self.steps.items())
        # Step 1 has the start-up, in which ranks are seconds apart: it counts only where it is alone
        recent = list(islice((s for step, s in reversed_steps if step > 1), WINDOW_STEPS))
        recent = recent or list(islice(reversed(self.steps.values()), WINDOW_STEPS))
        lengths = [0 if (span := by_rank(s).get(rank)) is None else span.length for s in recent]
        return statistics.fmean(lengths) / 1e9 if lengths else None


def partial_arrival(group: str, size: int, inside: Members) -> PartialArrival:
    """Summarizes the arrivals of one node's ranks in one collective."""
    last_rank, sequence, first_ns, transfer = -1, 0, 0, 0
    at, before_ns, last_waits, others_wait = NEVER, NEVER, END_OF_TIME_NS, END_OF_TIME_NS
    shortest = next(iter(inside.values()))
    for rank, call in inside.items():
        waits, start, lasted = (call.waits_from_ns, call.issued_ns, call.ended_ns - call.issued_ns)
        waits = max(waits, start)
        if last_rank < 0:
            last_rank, sequence, first_ns, transfer = rank, call.sequence, start, lasted
            at, last_waits = start, waits
            continue
        if start > at:
            before_ns, at, last_rank = at, start, rank
            waits, last_waits = last_waits, waits
        elif start > before_ns:
            before_ns = start
        others_wait = min(others_wait, waits)
        first_ns = min(first_ns, start)
        if lasted < transfer:
            transfer, shortest = lasted, call
    last_call = inside[last_rank]
    if last_call.is_wait:  # nobody's wait ends before the last has come, whatever the clocks say
        at = min(at, min(call.ended_ns for call in inside.values()))
    transfer_known = last_call.span_known and shortest.span_known
    if last_call.on_host and not transfer_known:  # on a host the begin is known, and one end is enough
        ends_ns = [call.ended_ns for call in inside.values() if call.span_known and call.ended_ns > at]
        transfer_known = bool(ends_ns)
        transfer = min([transfer, *(end_ns - at for end_ns in ends_ns)])
    return PartialArrival(
        group, sequence, size, len(inside), first_ns, at, last_rank, before_ns, max(1, transfer),
        min(last_waits, others_wait), others_wait, transfer_known,
    )  # fmt: skip


def match_single_node(partial: PartialArrival) -> MatchedCollective:
    """The last arrival in a collective whose members are all on one node."""
    at = partial.last_ns
    late = at - max(NEVER, partial.before_ns, partial.others_wait_ns)
    return MatchedCollective(
        partial.group, partial.sequence, at, partial.last_rank, max(0, late), 0, partial.transfer_ns,
        partial.transfer_known,
    )  # fmt: skip


def matched_collective(partials: Sequence[PartialArrival]) -> MatchedCollective:
    """The rank that arrived last of all, and its delay; *partials*, one a node, are by one clock."""
    last_node = max(partials, key=lambda partial: partial.last_ns)
    other_nodes = [partial for partial in partials if partial is not last_node]
    others_ns = max((partial.last_ns for partial in other_nodes), default=NEVER)
    waits = min((partial.waits_ns for partial in other_nodes), default=END_OF_TIME_NS)
    shortest = min(partials, key=lambda partial: partial.transfer_ns)
    since_ns = max(others_ns, last_node.before_ns, min(waits, last_node.others_wait_ns))
    return MatchedCollective(
        group=last_node.group,
        sequence=last_node.sequence,
        last_ns=last_node.last_ns,
        last_rank=last_node.last_rank,
        late_ns=max(0, last_node.last_ns - since_ns),
        # Without ranks on other nodes nobody waits for this node as a whole
        node_late_ns=max(0, last_node.first_ns - max(others_ns, waits)) if others_ns > NEVER else 0,
        transfer_ns=shortest.transfer_ns,
        transfer_known=last_node.transfer_known and shortest.transfer_known,
    )


# ---- bubbles ------------------------------------------------------------------------------------

_ACTIONS = {action.label: action for action in StageAction}


def with_bubbles(ranks: tuple[RankSnapshot, ...]) -> tuple[RankSnapshot, ...]:
    """Returns *ranks* with the bubble of each that is a part of a pipeline, or why it is unknown."""
    rows = {
        rank.rank: rank.communication.pipeline
        for rank in ranks
        if rank.communication.pipeline is not None
    }
    judged: dict[int, PipelineRow] = {}
    for rank, row in rows.items():
        if rank not in judged:
            # The right side wins: a rank that has its row keeps it, where ranks disagree on the pipeline
            judged |= _rows_with_bubbles(row, rows) | judged
    return tuple(
        rank.with_communication(pipeline=judged[rank.rank]) if rank.rank in judged else rank
        for rank in ranks
    )


def _rows_with_bubbles(row: PipelineRow, rows: dict[int, PipelineRow]) -> dict[int, PipelineRow]:
    """The ranks of the pipeline of *row* that are among *rows*, with their bubbles."""
    # In an interleaved schedule a rank has several stages, and stands in the list as often
    members = sorted(set(row.stage_ranks))
    visible = [member for member in members if member in rows]
    if reason := _unknown_reason(row, members, rows):
        return {member: replace(rows[member], unknown=reason) for member in visible}
    bubbles = _pipeline_bubbles([rows[member] for member in members])
    if bubbles is None:
        reason = "its ranks have not recorded whole calls of one schedule"
        return {member: replace(rows[member], unknown=reason) for member in visible}
    return {m: replace(rows[m], bubble=b) for m, b in zip(members, bubbles, strict=True)}


def _unknown_reason(row: PipelineRow, members: Sequence[int], rows: dict[int, PipelineRow]) -> str:
    if row.on_device:
        return "what a stage computes on a device is not timed yet"
    unseen = [member for member in members if member not in rows]
    if unseen:
        return f"this node does not see rank {unseen[0]} of the pipeline"
    if any(not rows[member].span_seconds for member in members):
        return "no call of the schedule has been timed yet"
    return ""


def _pipeline_bubbles(rows: Sequence[PipelineRow]) -> list[PipelineBubble] | None:
    """The bubble of each rank of a pipeline; None where the orders of the ranks do not fit."""
    # A stage that no rank has timed has no seconds to simulate with
    if len({stage.stage for row in rows for stage in row.own}) < rows[0].stages:
        return None
    orders = [parse_schedule(row.order) for row in rows]
    seconds = {
        (stage.stage, _ACTIONS[label]): duration
        for row in rows
        for stage in row.own
        for label, duration in stage.seconds.items()
    }
    ideal = simulate_schedule(orders, seconds)
    balanced_runs = simulate_schedule(orders, balanced_seconds(seconds))
    if ideal is None or balanced_runs is None:
        return None
    span, shortest = max(row.span_seconds or 0.0 for row in rows), max(run.span for run in ideal)
    if not span or not shortest:
        return None
    stages = [stage for row in rows for stage in row.own]
    slowest = max(stages, key=lambda stage: stage.work_seconds)
    return [
        PipelineBubble(
            measured_ratio=1 - (row.busy_seconds or 0.0) / span,
            ideal_ratio=1 - run.busy / shortest,
            span_seconds=span,
            ideal_seconds=shortest,
            doubled_seconds=with_more(shortest, max(run.busy for run in ideal)),
            balanced_seconds=max(run.span for run in balanced_runs),
            slowest_stage=slowest.stage,
            slowest_seconds=slowest.work_seconds,
            mean_seconds=sum(stage.work_seconds for stage in stages) / len(stages),
        )
        for row, run in zip(rows, ideal, strict=True)
    ]
