"""Where the time of a step goes: phases without what they wait for, and that waiting. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from zeromon.events import Phase
from zeromon.snapshot import RankSnapshot, StepSummary
from zeromon.tui.tones import PARTS

_LAST = 20


_LABELS = tuple(phase.label for phase in Phase)
_NOTHING = dict.fromkeys((*_LABELS, "exposed"), 0)


def of_step(step: StepSummary) -> dict[str, int]:
    """Part -> nanoseconds; exposed communication only where it was timed by phase."""
    found = _NOTHING.copy()
    for label, spent in zip(_LABELS, step.phase_ns, strict=False):
        found[label] = spent
    if step.phase_exposed_ns and not step.idle:
        for label, exposed in zip(_LABELS, step.phase_exposed_ns, strict=False):
            waits = min(found[label], exposed)
            found[label] -= waits
            found["exposed"] += waits
    return found


def breakdown(rank: RankSnapshot, last: int = _LAST) -> list[tuple[str, float]]:
    """(part, seconds) a step, the mean of the last timed ones; of all, where none was timed."""
    recent: Sequence[StepSummary] = rank.recent[-last:]
    timed = [step for step in recent if not step.idle and step.phase_exposed_ns]
    chosen = timed or list(recent)
    if not chosen:
        return []
    sums = dict.fromkeys(PARTS, 0)
    for step in chosen:
        for name, spent in of_step(step).items():
            sums[name] += spent
    return [(name, total / len(chosen) / 1e9) for name, total in sums.items()]


def exposed_is_known(rank: RankSnapshot) -> bool:
    """Whether some of its last steps were timed by phase."""
    return any(not step.idle and step.phase_exposed_ns for step in rank.recent[-_LAST:])
