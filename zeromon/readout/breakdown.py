"""Where the time of a step goes: phases without what they wait for, and that waiting. Pure."""

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from zeromon.levels import DEVICE_BOUND, HOST_BOUND
from zeromon.ring.codes import ENQUEUED
from zeromon.ring.events import Phase
from zeromon.snapshot import LoadingRow, RankSnapshot, StepSummary, WorkerMemory
from zeromon.snapshot.step import settled
from zeromon.units import human_bytes, human_count, human_ratio, human_seconds

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
    """Returns whether one of the last steps was timed by phase."""
    return bool(_timed(settled(rank.recent[-WINDOW:])))


def _timed(steps: Iterable[StepSummary]) -> list[StepSummary]:
    return [step for step in steps if step.timed and step.phase_exposed_ns]


def _mean_parts(steps: Sequence[StepSummary]) -> dict[str, float]:
    if not steps:
        return {}
    each = [step_parts(step) for step in steps]
    return {part: sum(parts[part] for parts in each) / len(steps) / 1e9 for part in PARTS}


# ---- whether a device or the host that enqueues its kernels sets the pace of training -----------


class Pace(NamedTuple):
    """The last steps of a rank whose phases are timed on a device; means per step."""

    step_seconds: float
    compute_seconds: float
    """In forward and backward, exposed communication included."""
    starved_seconds: float
    """The part of it in phases that the device ended right behind the host."""
    launch_seconds: dict[str, float]
    """Phase -> how long the host took for it."""

    @property
    def starved_ratio(self) -> float:
        """Share of forward and backward in which the host set the pace, 0..1."""
        return self.starved_seconds / self.compute_seconds


def pace(rank: RankSnapshot) -> Pace | None:
    """The pace of the last steps; None where no phase was timed on a device."""
    steps = [step for step in settled(rank.recent[-WINDOW:]) if step.launch_ns and not step.idle]
    compute = sum(step.phase_ns[phase] for step in steps for phase in ENQUEUED)
    if not compute:
        return None
    scale = 1e9 * len(steps)
    launched = {
        RECORDED[phase]: sum(step.launch_ns[phase] for step in steps) / scale for phase in ENQUEUED
    }
    return Pace(
        sum(step.seconds for step in steps) / len(steps),
        compute / scale,
        sum(step.starved_ns for step in steps) / scale,
        {name: seconds for name, seconds in launched.items() if seconds},
    )


def launch_text(launch_seconds: dict[str, float]) -> str:
    """``forward 12.0 ms, backward 20.0 ms``: how long the host takes to enqueue each phase."""
    return ", ".join(f"{name} {human_seconds(seconds)}" for name, seconds in launch_seconds.items())


def pace_text(rank: RankSnapshot) -> str:
    """Who sets the pace of a rank; "" where no phase was timed on a device."""
    known = pace(rank)
    if known is None:
        return ""
    starved, launches = human_ratio(known.starved_ratio), launch_text(known.launch_seconds)
    if known.starved_ratio <= DEVICE_BOUND:
        return (
            f"device-bound: kernels were queued at the end of its phases; the host takes {launches}"
        )
    word = "launch-bound" if known.starved_ratio >= HOST_BOUND else "partly launch-bound"
    return (
        f"{word}: the device waited for the host in {starved} of its phases ({launches} to enqueue)"
    )


# ---- what batches are made of -------------------------------------------------------------------

_FROM_STORAGE = 0.1
"""From this share on, what a loader reads comes from storage, and not from the page cache."""
_LEAST_READ = 1 << 20


def parts(made: LoadingRow) -> dict[str, float]:
    """Seconds by part, the longest first; they sum to the time in which batches were made."""
    rest = max(0.0, made.fetch_seconds - made.collate_seconds - (made.transform_seconds or 0.0))
    found = {"collate": made.collate_seconds}
    if made.transform_seconds is None:
        found["read and transform"] = rest
    else:
        found |= {"read": rest, "transform": made.transform_seconds}
    return dict(sorted(found.items(), key=lambda part: -part[1]))


def from_disk(made: LoadingRow) -> float | None:
    """The share of what was read that came from disks; None where next to nothing was read."""
    return made.disk_bytes / _read(made) if _read(made) >= _LEAST_READ else None


def from_nfs(made: LoadingRow) -> float:
    """The largest share of it that NFS servers can have sent: other programs read there, too."""
    return min(1.0, made.nfs_bytes / _read(made)) if _read(made) >= _LEAST_READ else 0.0


def _read(made: LoadingRow) -> int:
    return max(made.read_bytes, made.disk_bytes)


def from_storage(made: LoadingRow) -> float | None:
    """The share from a disk or a server, where it is enough to matter; None: from the page cache."""
    share = max(from_disk(made) or 0.0, from_nfs(made))
    return share if share >= _FROM_STORAGE else None


def workers_text(workers: WorkerMemory | None) -> str:
    """``4 x 307.0 MiB``: the memory of DataLoader workers; ``-`` without any."""
    return f"{workers.count} x {human_bytes(workers.nbytes / workers.count)}" if workers else "-"


def loading_text(rank: RankSnapshot) -> str:
    """``batches: 512, 21 ms each: read and transform 81 %, collate 19 %``; "" where unknown."""
    made = rank.loading
    if made is None or made.fetch_seconds <= 0:
        return ""
    shares = (f"{name} {human_ratio(s / made.fetch_seconds)}" for name, s in parts(made).items())
    text = (
        f"batches: {human_count(made.batches)}, {human_seconds(made.fetch_seconds / made.batches)}"
    )
    text += f" to make each: {', '.join(shares)}"
    disk = from_disk(made)
    if disk is None:
        return text
    text += f"; {human_ratio(disk)} of {human_bytes(_read(made))} that were sampled came from disks"
    return f"{text}, at most {human_ratio(from_nfs(made))} from NFS" if made.nfs_bytes else text
