"""The last steps of each rank as spans on one timeline: phases, collectives, who came last. Pure.

The spans are those of the Chrome trace, cut into steps as the fold does it: a record belongs to the step
whose mark follows it. A wait whose moment the ring does not hold, and a collective without a time, are
counted and are not drawn.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from zeromon.ring.codes import Flag
from zeromon.ring.events import BackwardComm, Counted, Done, Event, Issued, PhaseSpan, Stall, StepMark
from zeromon.ring.model_metadata import BACKGROUND
from zeromon.ring.slices import RingEvents
from zeromon.snapshot.step import Lanes, LaneSpan, LaneStep, LateArrival, Stream

MAX_STEPS, MAX_RANKS, MAX_SPANS = 20, 64, 4_000
LAG_STEPS = 10
"""By how many steps one rank may be ahead of another in :func:`lanes_of_rings`."""
_SAME_CLOCK_NS = 1_000_000_000
SPENT, SPENT_ON_DEVICE, WAITS, COMMUNICATION = range(4)
"""The kinds of :func:`event_spans`."""


def event_spans(ring: RingEvents, e: Event) -> Iterator[tuple[int, int, int, str, dict[str, Any]]]:
    """(kind, start and end in nanoseconds, name, arguments) of what lasted."""
    if isinstance(e, PhaseSpan):
        inferred = {"inferred": True} if e.flags & Flag.INFERRED else {}
        kind = SPENT_ON_DEVICE if e.flags & Flag.DEVICE else SPENT
        yield kind, e.start_ns, e.t_ns, e.phase.label, inferred
    elif isinstance(e, Done) and not e.flags & Flag.FAILED:
        args = {
            "group": ring.groups.get(e.group, ""), "unit": ring.units.get(e.unit, ""),
            "bytes": e.nbytes, "sequence": e.sequence, "phase": e.phase.label,
        }  # fmt: skip
        yield COMMUNICATION, e.issued_ns, e.t_ns, e.op.label, args
        yield WAITS, e.t_ns - e.blocked_ns, e.t_ns, e.op.label, args
    elif isinstance(e, BackwardComm):
        args = {"group": ring.groups.get(e.group, ""), "buckets": e.buckets}
        yield COMMUNICATION, e.start_ns, e.t_ns, "all_reduce of a backward", args
        yield WAITS, max(e.start_ns, e.compute_end_ns), e.t_ns, "all_reduce of a backward", args


@dataclass(slots=True)
class _Step:
    """A step while its records are read."""

    rank: int
    step: int
    begin_ns: int = 0
    end_ns: int = 0
    unplaced_ns: int = 0
    collectives: int = 0
    timed: int = 0
    spans: "list[tuple[LaneSpan, _Key | None]]" = field(default_factory=list)

    def mark(self) -> LaneStep:
        """The step without its spans."""
        return LaneStep(
            rank=self.rank,
            step=self.step,
            begin_ns=self.begin_ns,
            end_ns=self.end_ns,
            unplaced_ns=self.unplaced_ns,
            untimed=max(0, self.collectives - self.timed),
        )


_Key = tuple[str, tuple[int, ...], int]
"""Name and ranks of a group, and the collective's sequence number in it."""


def node_clock_shifts(rings: Iterable[RingEvents]) -> dict[int, int]:
    """Rank -> 0 for the ranks of one node, the one with most ranks: they share a monotonic clock.

    Rings are of one node where their clocks have been set off from the wall clock alike.
    """
    nodes: list[list[RingEvents]] = []
    for ring in sorted(rings, key=lambda r: r.wall_minus_mono_ns):
        # Against the first of the node: against the last, small differences in a row join two nodes
        if nodes and ring.wall_minus_mono_ns - nodes[-1][0].wall_minus_mono_ns < _SAME_CLOCK_NS:
            nodes[-1].append(ring)
        else:
            nodes.append([ring])
    return dict.fromkeys((ring.rank for ring in max(nodes, key=len, default=[])), 0)


def _newest_rings(rings: Iterable[RingEvents]) -> dict[int, RingEvents]:
    """The ring of each rank that was written last; earlier attempts have rings, too."""
    newest = {ring.rank: ring for ring in sorted(rings, key=lambda r: r.wall_ns)}
    return dict(sorted(newest.items()))


def _count_text(number: int, noun: str) -> str:
    return f"{number} {noun}{'s' * (number != 1)}"


def lanes_of_rings(
    rings: Iterable[RingEvents],
    shifts: Mapping[int, int],
    *,
    steps: int = 1,
    ranks: Iterable[int] = (),
    max_spans: int = MAX_SPANS,
) -> Lanes:
    """Returns the last *steps* steps that all shown ranks have ended.

    *shifts*: rank -> nanoseconds from its node's monotonic clock to the common one, 0 on one node; a
    rank that is not in it has no known clock and is left out. *ranks*: whom to show; () is all.
    """
    left_out: list[str] = []
    picked = set(ranks)
    picks = _newest_rings(ring for ring in rings if not picked or ring.rank in picked).values()
    synced = [ring for ring in picks if ring.rank in shifts]
    if len(synced) < len(picks):
        left_out.append(
            f"{_count_text(len(picks) - len(synced), 'rank')} of other nodes: the clocks are not aligned"
        )
    if len(synced) > MAX_RANKS:
        left_out.append(f"{_count_text(len(synced) - MAX_RANKS, 'rank')}: at most {MAX_RANKS} are shown")
    if steps > MAX_STEPS:
        left_out.append(f"{_count_text(steps - MAX_STEPS, 'step')}: at most {MAX_STEPS} are shown")
    by_rank = {ring.rank: _whole_steps(ring, shifts[ring.rank]) for ring in synced[:MAX_RANKS]}
    silent = [rank for rank, by_step in by_rank.items() if not by_step]
    if silent:
        left_out.append(f"{_count_text(len(silent), 'rank')}: no whole step in the ring")
    by_rank = {rank: by_step for rank, by_step in by_rank.items() if by_step}
    # Without a set, set.intersection() raises TypeError
    common = set.intersection(*(set(by_step) for by_step in by_rank.values())) if by_rank else set()
    if by_rank and not common:
        left_out.append("all steps: the rings have no step in common")
    window = sorted(common)[-min(max(1, steps), MAX_STEPS) :]
    return _draw_lanes([by_step[n] for by_step in by_rank.values() for n in window], max_spans, left_out)


def _draw_lanes(lane_steps: list[_Step], max_spans: int, left_out: list[str]) -> Lanes:
    zero = min((step.begin_ns for step in lane_steps), default=0)
    keyed = [pair for step in lane_steps for pair in step.spans]
    longest = sorted((span for span, _ in keyed), key=lambda s: s.begin_ns - s.end_ns)[:max_spans]
    if len(longest) < len(keyed):
        left_out.append(
            f"{_count_text(len(keyed) - len(longest), 'span')}: the {max_spans} longest are shown"
        )
    return Lanes(
        zero_ns=zero,
        steps=tuple(step.mark() for step in lane_steps),
        spans=tuple(sorted(longest, key=lambda s: (s.rank, s.begin_ns, -s.end_ns))),
        arrivals=_late_arrivals(keyed),
        left_out=tuple(left_out),
    )


def _late_arrivals(keyed: Iterable[tuple[LaneSpan, _Key | None]]) -> tuple[LateArrival, ...]:
    """The last rank of each collective that all ranks of its group are shown in."""
    inside: defaultdict[_Key, list[LaneSpan]] = defaultdict(list)
    for span, key in keyed:
        if key is not None:
            inside[key].append(span)
    arrivals = []
    for (_, ranks, _), members in inside.items():
        if len(members) < 2 or {span.rank for span in members} != set(ranks):
            continue
        earliest, final = (choose(members, key=lambda s: s.begin_ns) for choose in (min, max))
        arrivals.append(
            LateArrival(
                name=final.name, unit=final.unit, group=final.group, step=final.step,
                rank=final.rank, first_rank=earliest.rank,
                at_ns=final.begin_ns, first_ns=earliest.begin_ns,
            )
        )  # fmt: skip
    return tuple(sorted(arrivals, key=lambda arrival: arrival.at_ns))


# ---- one rank ---------------------------------------------------------------------------------------


def _whole_steps(ring: RingEvents, shift: int) -> dict[int, _Step]:
    """The whole steps of a ring by number, without the first: the ring may not hold its beginning."""
    by_number: dict[int, _Step] = {}
    pending: list[Event] | None = None
    on_device = any(isinstance(event, StepMark) and event.flags & Flag.DEVICE for event in ring.events)
    for event in _device_events(ring.events) if on_device else ring.events:
        previous = next(reversed(by_number.values()), None)
        if isinstance(event, StepMark):
            continued = bool(event.flags & Flag.CONTINUED)
            # A continued mark whose first part the ring has overwritten is no whole step
            if pending is not None and (event.step in by_number or not continued):
                step = by_number.setdefault(event.step, _Step(ring.rank, event.step))
                step.begin_ns = step.begin_ns or event.start_ns + shift
                step.end_ns = event.t_ns + shift
                for pending_event in pending:
                    _add_event(ring, step, pending_event, shift)
            pending = []
        # DDP reports the times of a backward in the next forward, behind the mark of its step
        elif previous and type(event) is BackwardComm and event.start_ns + shift < previous.end_ns:
            _add_event(ring, previous, event, shift)
        elif pending is not None:
            pending.append(event)
    return by_number


def _device_events(events: Iterable[Event]) -> Iterator[Event]:
    """The *events* of a device's steps: each mark of the device, behind what the host did for that step.

    The host marks a step before the device ends it. It runs ahead, so its own phases would cover those
    of the device.
    """
    enqueued: list[Event] = []
    by_step: defaultdict[int, list[Event]] = defaultdict(list)
    for event in events:
        on_device = bool(getattr(event, "flags", 0) & Flag.DEVICE)
        if isinstance(event, StepMark):
            if on_device:
                yield from by_step.pop(event.step, ())
                yield event
            else:
                by_step[event.step] += enqueued
                enqueued = []
        elif isinstance(event, Issued | Counted):
            enqueued.append(event)
        elif on_device or not isinstance(event, PhaseSpan) or event.flags & Flag.ASYNC:
            yield event


def _add_event(ring: RingEvents, step: _Step, event: Event, shift: int) -> None:
    """Adds an event to its step, and counts it as the fold does."""
    # A wait is the exposed part of its collective
    by_kind = {kind: (t0, t1, name, args) for kind, t0, t1, name, args in event_spans(ring, event)}
    waited = by_kind.pop(WAITS, None)
    drawn: list[tuple[LaneSpan, _Key | None]] = []
    for kind in (SPENT, SPENT_ON_DEVICE, COMMUNICATION):
        if kind not in by_kind:
            continue
        begin_ns, end_ns, name, args = by_kind[kind]
        unit = str(args.get("unit", ""))
        span = LaneSpan(
            rank=ring.rank, step=step.step, name=name, unit=unit, group=str(args.get("group", "")),
            stream=_lane_stream(event, kind, unit),
            begin_ns=begin_ns + shift, end_ns=max(begin_ns, end_ns) + shift,
            exposed_ns=max(0, waited[1] - waited[0]) if waited else 0,
            nbytes=int(args.get("bytes", 0)),
            on_device=isinstance(event, Done) and bool(event.flags & Flag.DEVICE),
        )  # fmt: skip
        drawn.append((span, _collective_key(ring, event)))
    step.spans += drawn
    if isinstance(event, Counted):
        step.collectives += event.calls
    elif isinstance(event, Stall):
        step.unplaced_ns += event.blocked_ns
    elif isinstance(event, BackwardComm):
        step.timed += event.buckets
    elif isinstance(event, Issued) and ring.units.get(event.unit) != BACKGROUND:
        # A call that the Flight Recorder lists is counted with its step as well
        step.collectives += not event.flags & Flag.INFERRED
    elif isinstance(event, Done):
        step.timed += any(span.stream is Stream.COMMUNICATION for span, _ in drawn)


def _lane_stream(event: Event, kind: int, unit: str) -> Stream:
    # A BackwardComm has no flags. ASYNC of a collective means async_op=True, and no other thread
    if unit == BACKGROUND or (getattr(event, "flags", 0) & Flag.ASYNC and kind == SPENT):
        return Stream.BACKGROUND
    return Stream.COMMUNICATION if kind == COMMUNICATION else Stream.COMPUTE


def _collective_key(ring: RingEvents, event: Event) -> _Key | None:
    """Returns the key of a collective at all its ranks; groups do not number sends and receives."""
    if not isinstance(event, Done) or event.sequence <= 0:
        return None
    if ring.units.get(event.unit) == BACKGROUND:
        return None
    name, ranks = ring.members.get(event.group, ("", ()))
    return (name, ranks, event.sequence) if ranks else None
