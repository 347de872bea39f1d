"""Where the time of a step goes: phases without what they wait for, and that waiting. Pure."""

from collections.abc import Iterable, Mapping, Sequence

from zeromon.ring.events import Phase
from zeromon.snapshot import RankSnapshot, StepSummary
from zeromon.snapshot.step import settled

WINDOW = 20
"""The number of last steps that means are taken over."""

PARTS = (
    "forward", "backward", "optimizer", "cpu_optimizer", "exposed", "data_wait", "generation",
    "evaluation", "checkpoint", "garbage_collection", "compile", "other",
)  # fmt: skip
"""The parts of a step, in the order of every bar, legend and list; ``exposed`` is communication."""

_USUAL = {"forward", "backward", "optimizer", "exposed", "data_wait", "other"}
USUAL = tuple(part for part in PARTS if part in _USUAL)
"""The parts that a view names even where they are zero: most training loops have them."""

PHASES = tuple(part for part in PARTS if part != "exposed")
"""The phases, in the same order."""

RECORDED = tuple(phase.label for phase in Phase)
"""The phases in the order of ``StepSummary.phase_ns``, which is that of the ring's records."""

PART_NAMES = {part: part.replace("_", " ") for part in PARTS} | {
    "cpu_optimizer": "CPU optimizer", "exposed": "exposed communication",
    "hidden": "hidden communication", "compile": "compilation", "other": "own code",
}  # fmt: skip
"""Names for people. Communication is ``hidden`` where it is under way beside a phase; the script's own
code is in no phase."""


def step_parts(step: StepSummary) -> dict[str, int]:
    """Part -> nanoseconds of one step.

    Exposed communication stands apart only where it was timed by phase; elsewhere it is in its phase.
    """
    parts = dict.fromkeys(PARTS, 0)
    parts.update(zip(RECORDED, step.phase_ns, strict=False))
    if step.phase_exposed_ns and step.timed:
        for label, exposed in zip(RECORDED, step.phase_exposed_ns, strict=False):
            waits = min(parts[label], exposed)
            parts[label] -= waits
            parts["exposed"] += waits
    return parts


def rank_parts(rank: RankSnapshot) -> dict[str, float]:
    """Part -> seconds a step: the mean of the last steps timed by phase, of all where none was.

    Empty before the first step.
    """
    recent = settled(rank.recent[-WINDOW:])
    return _mean_parts(_timed(recent) or recent)


def own_seconds(recent: Sequence[StepSummary]) -> Mapping[str, float]:
    """Phase -> seconds a step without waiting for communication; empty where none was timed by phase."""
    parts = _mean_parts(_timed(settled(recent[-WINDOW:])))
    return {part: seconds for part, seconds in parts.items() if part != "exposed"}


def exposed_is_known(rank: RankSnapshot) -> bool:
    """Whether one of the last steps was timed by phase."""
    return bool(_timed(settled(rank.recent[-WINDOW:])))


def _timed(steps: Iterable[StepSummary]) -> list[StepSummary]:
    return [step for step in steps if step.timed and step.phase_exposed_ns]


def _mean_parts(steps: Sequence[StepSummary]) -> dict[str, float]:
    if not steps:
        return {}
    sums = dict.fromkeys(PARTS, 0)
    for step in steps:
        for part, spent in step_parts(step).items():
            sums[part] += spent
    return {part: total / len(steps) / 1e9 for part, total in sums.items()}
