"""The last steps of each rank as spans on one timeline: phases, collectives, who came last. Pure.

The spans are those of the Chrome trace, cut into steps as the fold does it: a record belongs to the step
whose mark follows it. A wait whose moment the ring does not hold, and a collective without a time, are
counted and are not drawn.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from zeromon.ring.events import (
    BackwardComm,
    Counted,
    Done,
    Event,
    Flag,
    Issued,
    PhaseSpan,
    Stall,
    StepMark,
)
from zeromon.ring.model_metadata import BACKGROUND
from zeromon.ring.slices import RingEvents
from zeromon.snapshot.lanes import Lanes, LaneSpan, LaneStep, LateArrival, Stream

MOST_STEPS, MOST_RANKS, MOST_SPANS = 20, 64, 4_000
LAG_STEPS = 10
"""By how many steps one rank may be ahead of another in :func:`lanes_of`."""
_SAME_CLOCK_NS = 1_000_000_000
SPENT, WAITS, COMMUNICATION = range(3)
"""The kinds of :func:`spans`."""


def spans(ring: RingEvents, e: Event) -> Iterator[tuple[int, int, int, str, dict[str, Any]]]:
    """(kind, start and end in nanoseconds, name, arguments) of what lasted."""
    if isinstance(e, PhaseSpan):
        inferred = {"inferred": True} if e.flags & Flag.INFERRED else {}
        yield SPENT, e.start_ns, e.t_ns, e.phase.label, inferred
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
    spans: list[tuple[LaneSpan, _Key | None]] = field(default_factory=list)

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


def shifts_of(rings: Iterable[RingEvents]) -> dict[int, int]:
    """Rank -> 0 for the ranks of one node, the one with most ranks: they share a monotonic clock.

    Rings are of one node where their clocks have been set off from the wall clock alike.
    """
    nodes: list[list[RingEvents]] = []
    for ring in sorted(rings, key=lambda one: one.wall_minus_mono_ns):
        is_same = (
            nodes and ring.wall_minus_mono_ns - nodes[-1][0].wall_minus_mono_ns < _SAME_CLOCK_NS
        )
        if is_same:
            nodes[-1].append(ring)
        else:
            nodes.append([ring])
    return dict.fromkeys((ring.rank for ring in max(nodes, key=len, default=[])), 0)


def _newest(rings: Iterable[RingEvents]) -> dict[int, RingEvents]:
    """The ring of each rank that was written last; earlier attempts have rings, too."""
    found: dict[int, RingEvents] = {}
    for ring in sorted(rings, key=lambda one: one.wall_ns):
        found[ring.rank] = ring
    return dict(sorted(found.items()))


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'s' * (number != 1)}"


def lanes_of(
    rings: Iterable[RingEvents],
    shifts: Mapping[int, int],
    *,
    steps: int = 1,
    ranks: Iterable[int] = (),
    most_spans: int = MOST_SPANS,
) -> Lanes:
    """Returns the last *steps* steps that all shown ranks have ended.

    *shifts*: rank -> nanoseconds from its node's monotonic clock to the common one, 0 on one node; a
    rank that is not in it has no known clock and is left out. *ranks*: whom to show; () is all.
    """
    left_out: list[str] = []
    wanted = set(ranks)
    chosen = _newest(ring for ring in rings if not wanted or ring.rank in wanted).values()
    known = [ring for ring in chosen if ring.rank in shifts]
    if len(known) < len(chosen):
        left_out.append(
            f"{_count(len(chosen) - len(known), 'rank')} of other nodes: the clocks are not aligned"
        )
    if len(known) > MOST_RANKS:
        left_out.append(
            f"{_count(len(known) - MOST_RANKS, 'rank')}: at most {MOST_RANKS} are shown"
        )
    if steps > MOST_STEPS:
        left_out.append(f"{_count(steps - MOST_STEPS, 'step')}: at most {MOST_STEPS} are shown")
    found = {ring.rank: _steps(ring, shifts[ring.rank]) for ring in known[:MOST_RANKS]}
    silent = [rank for rank, own in found.items() if not own]
    if silent:
        left_out.append(f"{_count(len(silent), 'rank')}: no whole step in the ring")
    found = {rank: own for rank, own in found.items() if own}
    common = set.intersection(*(set(own) for own in found.values())) if found else set()
    if found and not common:
        left_out.append("all steps: the rings have no step in common")
    last = sorted(common)[-min(max(1, steps), MOST_STEPS) :]
    return _timeline([own[n] for own in found.values() for n in last], most_spans, left_out)


def _timeline(kept: list[_Step], most_spans: int, left_out: list[str]) -> Lanes:
    zero = min((step.begin_ns for step in kept), default=0)
    keyed = [pair for step in kept for pair in step.spans]
    shown = sorted((span for span, _ in keyed), key=lambda s: s.begin_ns - s.end_ns)[:most_spans]
    if len(shown) < len(keyed):
        left_out.append(
            f"{_count(len(keyed) - len(shown), 'span')}: the {most_spans} longest are shown"
        )
    return Lanes(
        zero_ns=zero,
        steps=tuple(step.mark() for step in kept),
        spans=tuple(sorted(shown, key=lambda s: (s.rank, s.begin_ns, -s.end_ns))),
        arrivals=_late(keyed),
        left_out=tuple(left_out),
    )


def _late(keyed: Iterable[tuple[LaneSpan, _Key | None]]) -> tuple[LateArrival, ...]:
    """The last rank of each collective that all ranks of its group are shown in."""
    inside: defaultdict[_Key, list[LaneSpan]] = defaultdict(list)
    for span, key in keyed:
        if key is not None:
            inside[key].append(span)
    found = []
    for (_, ranks, _), members in inside.items():
        if len(members) < 2 or {one.rank for one in members} != set(ranks):
            continue
        first, last = (choose(members, key=lambda s: s.begin_ns) for choose in (min, max))
        found.append(
            LateArrival(
                name=last.name, unit=last.unit, group=last.group, step=last.step,
                rank=last.rank, first_rank=first.rank,
                at_ns=last.begin_ns, first_ns=first.begin_ns,
            )
        )  # fmt: skip
    return tuple(sorted(found, key=lambda one: one.at_ns))


# ---- one rank ---------------------------------------------------------------------------------------


def _steps(ring: RingEvents, shift: int) -> dict[int, _Step]:
    """The whole steps of a ring by number, without the first: the ring may not hold its beginning."""
    found: dict[int, _Step] = {}
    pending: list[Event] | None = None
    for event in ring.events:
        previous = next(reversed(found.values()), None)
        if isinstance(event, StepMark):
            continued = bool(event.flags & Flag.CONTINUED)
            if pending is not None and (event.step in found or not continued):
                step = found.setdefault(event.step, _Step(ring.rank, event.step))
                step.begin_ns = step.begin_ns or event.start_ns + shift
                step.end_ns = event.t_ns + shift
                for one in pending:
                    _add(ring, step, one, shift)
            pending = []
        elif previous and type(event) is BackwardComm and event.start_ns + shift < previous.end_ns:
            _add(ring, previous, event, shift)
        elif pending is not None:
            pending.append(event)
    return found


def _add(ring: RingEvents, step: _Step, event: Event, shift: int) -> None:
    """Adds an event to its step, and counts it as the fold does."""
    drawn = _drawn(ring, event, step.step, shift)
    step.spans += drawn
    if isinstance(event, Counted):
        step.collectives += event.calls
    elif isinstance(event, Stall):
        step.unplaced_ns += event.blocked_ns
    elif isinstance(event, BackwardComm):
        step.timed += event.buckets
    elif isinstance(event, Issued) and ring.units.get(event.unit) != BACKGROUND:
        step.collectives += not event.flags & Flag.INFERRED
    elif isinstance(event, Done):
        step.timed += any(span.stream is Stream.COMMUNICATION for span, _ in drawn)


def _drawn(
    ring: RingEvents, event: Event, step: int, shift: int
) -> list[tuple[LaneSpan, _Key | None]]:
    """The spans of an event; a wait is the exposed part of its collective."""
    parts = {kind: (begin, end, name, args) for kind, begin, end, name, args in spans(ring, event)}
    waited = parts.pop(WAITS, None)
    found: list[tuple[LaneSpan, _Key | None]] = []
    for kind in (SPENT, COMMUNICATION):
        if kind not in parts:
            continue
        begin, end, name, args = parts[kind]
        unit = str(args.get("unit", ""))
        span = LaneSpan(
            rank=ring.rank, step=step, name=name, unit=unit, group=str(args.get("group", "")),
            stream=_stream(event, kind, unit),
            begin_ns=begin + shift, end_ns=max(begin, end) + shift,
            exposed_ns=max(0, waited[1] - waited[0]) if waited else 0,
            nbytes=int(args.get("bytes", 0)),
            on_device=isinstance(event, Done) and bool(event.flags & Flag.DEVICE),
        )  # fmt: skip
        found.append((span, _key(ring, event)))
    return found


def _stream(event: Event, kind: int, unit: str) -> Stream:
    if unit == BACKGROUND or (getattr(event, "flags", 0) & Flag.ASYNC and kind == SPENT):
        return Stream.BACKGROUND
    return Stream.COMPUTE if kind == SPENT else Stream.COMMUNICATION


def _key(ring: RingEvents, event: Event) -> _Key | None:
    """Returns the key of a collective at all its ranks; groups do not number sends and receives."""
    if not isinstance(event, Done) or event.sequence <= 0:
        return None
    if ring.units.get(event.unit) == BACKGROUND:
        return None
    name, ranks = ring.members.get(event.group, ("", ()))
    return (name, ranks, event.sequence) if ranks else None
