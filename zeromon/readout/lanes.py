"""What the spans of the last steps say: rows by unit, who came last, a sentence for each span. Pure."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from zeromon.readout.text import pause_seconds, pause_text
from zeromon.snapshot import RunSnapshot
from zeromon.snapshot.lanes import Lanes, LaneSpan, LateArrival, Stream
from zeromon.units import human_bytes, human_count, human_seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitLane:
    """The collectives of a rank that have one unit and one name, in the order of their beginnings."""

    unit: str
    name: str
    spans: tuple[LaneSpan, ...]

    @property
    def label(self) -> str:
        """The unit and the collective; the collective alone where no unit is known."""
        return f"{self.unit} {self.name}" if self.unit else self.name


def communication_of(lanes: Lanes, rank: int) -> tuple[LaneSpan, ...]:
    """The collectives of a rank, in the order of their beginnings."""
    return tuple(s for s in lanes.spans if s.rank == rank and s.stream is not Stream.COMPUTE)


def compute_of(lanes: Lanes, rank: int) -> tuple[LaneSpan, ...]:
    """The phases of a rank, in the order of their beginnings."""
    return tuple(s for s in lanes.spans if s.rank == rank and s.stream is Stream.COMPUTE)


def by_unit(spans: Iterable[LaneSpan]) -> list[UnitLane]:
    """The collectives of one rank by unit and name, those that begin first at the top."""
    found: dict[tuple[str, str], list[LaneSpan]] = {}
    for span in spans:
        found.setdefault((span.unit, span.name), []).append(span)
    return [UnitLane(unit=unit, name=name, spans=tuple(own)) for (unit, name), own in found.items()]


def exposed_part(span: LaneSpan) -> tuple[int, int]:
    """From when to when the rank was blocked, nanoseconds; empty where it was not."""
    return max(span.begin_ns, span.end_ns - span.exposed_ns), span.end_ns


def arrival_of(lanes: Lanes, span: LaneSpan) -> LateArrival | None:
    """Who came last to the collective of *span*; None where not all of its ranks are shown."""
    own = (span.name, span.unit, span.group, span.step)
    return next(
        (
            one
            for one in lanes.arrivals
            if (one.name, one.unit, one.group, one.step) == own
            and one.first_ns <= span.begin_ns <= one.at_ns <= span.end_ns
        ),
        None,
    )


def span_text(span: LaneSpan) -> str:
    """A collective or a phase with its size, its length and what of it was exposed."""
    parts = [f"{span.unit} {span.name}".strip(), span.group]
    if span.nbytes:
        parts.append(human_bytes(span.nbytes))
    parts.append(human_seconds((span.end_ns - span.begin_ns) / 1e9))
    if span.stream is not Stream.COMPUTE:
        parts.append(f"{human_seconds(span.exposed_ns / 1e9)} exposed")
    return f"rank {span.rank}, step {span.step}: " + ", ".join(part for part in parts if part)


def arrival_text(one: LateArrival) -> str:
    """Who came last, and by how much."""
    after = human_seconds((one.at_ns - one.first_ns) / 1e9)
    return f"rank {one.rank} came last, {after} after rank {one.first_rank}"


def summary(lanes: Lanes) -> str:
    """Which steps are shown, and the rank that came last most often; "" without a step."""
    steps = sorted({step.step for step in lanes.steps})
    if not steps:
        return ""
    text = f"step {steps[0]}" if len(steps) == 1 else f"steps {steps[0]} to {steps[-1]}"
    if not lanes.arrivals:
        return text
    rank, count = Counter(one.rank for one in lanes.arrivals).most_common(1)[0]
    longest = max(one.at_ns - one.first_ns for one in lanes.arrivals if one.rank == rank)
    return (
        f"{text}: rank {rank} came last to {human_count(count)} of"
        f" {human_count(len(lanes.arrivals))} collectives, by up to {human_seconds(longest / 1e9)}"
    )


def gaps(lanes: Lanes, run: RunSnapshot) -> list[str]:
    """Sentences on what the spans do not show; they are of *run*."""
    missing = [f"left out: {text}" for text in lanes.left_out]
    paused = pause_seconds(run)
    if paused is not None:
        missing.insert(0, f"{pause_text(paused)}: what is under way is not drawn")
    unplaced = sum(step.unplaced_ns for step in lanes.steps) / 1e9
    if unplaced:
        missing.append(f"{human_seconds(unplaced)} of exposed communication have no known moment")
    untimed = sum(step.untimed for step in lanes.steps)
    if untimed:
        missing.append(f"{human_count(untimed)} collectives have no known time and are not drawn")
    return missing
