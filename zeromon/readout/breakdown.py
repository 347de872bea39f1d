"""Where the time of a step goes: phases without what they wait for, and that waiting. Pure."""

import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from zeromon.base.units import human_bytes, human_count, human_ratio, human_seconds
from zeromon.ring.codes import ENQUEUED, Phase
from zeromon.snapshot import RankSnapshot, StepSummary
from zeromon.snapshot.host import WorkerMemory
from zeromon.snapshot.levels import DEVICE_BOUND, HOST_BOUND, SLOW_STEP
from zeromon.snapshot.step import LoadingRow, settled_steps

WINDOW = 20
"""The number of last steps that means are taken over."""

PARTS = (
    "forward", "backward", "optimizer", "cpu_optimizer", "exposed", "data_wait", "generation",
    "evaluation", "checkpoint", "garbage_collection", "compile", "other",
)  # fmt: skip
"""The parts of a step, in the order of every bar, legend and list; ``exposed`` is communication."""

_USUAL = {"forward", "backward", "optimizer", "exposed", "data_wait", "other"}
USUAL = tuple(label for label in PARTS if label in _USUAL)
"""The parts that a view names even where they are zero: most training loops have them."""

PHASES = tuple(label for label in PARTS if label != "exposed")
"""The phases, in the same order."""

RECORDED = tuple(phase.label for phase in Phase)
"""The phases in the order of ``StepSummary.phase_ns``, which is that of the ring's records."""

PART_NAMES = {label: label.replace("_", " ") for label in PARTS} | {
    "cpu_optimizer": "CPU optimizer", "exposed": "exposed communication",
    "hidden": "hidden communication", "compile": "compilation", "other": "own code",
}  # fmt: skip
"""Names for people. Communication is ``hidden`` where it is under way beside a phase; the script's own
code is in no phase."""


def step_parts(step: StepSummary) -> dict[str, int]:
    """Part -> nanoseconds of one step.

    Exposed communication stands apart only where it was timed by phase; elsewhere it is in its phase.
    """
    durations = dict.fromkeys(PARTS, 0)
    durations.update(zip(RECORDED, step.phase_ns, strict=False))
    if step.phase_exposed_ns and step.timed:
        for label, exposed in zip(RECORDED, step.phase_exposed_ns, strict=False):
            waits = min(durations[label], exposed)
            durations[label] -= waits
            durations["exposed"] += waits
    return durations


def busy_ns(step: StepSummary) -> int:
    """The sum of :func:`step_parts` without exposed communication, in nanoseconds."""
    waits_ns = map(min, step.phase_ns, step.phase_exposed_ns) if step.timed else ()
    return sum(step.phase_ns) - sum(waits_ns)


def rank_parts(rank: RankSnapshot) -> dict[str, float]:
    """Part -> seconds a step: the mean of the last steps timed by phase, of all where none was.

    Empty before the first step.
    """
    recent = settled_steps(rank.steps.recent[-WINDOW:])
    return _mean_part_seconds(_timed_steps(recent) or recent)


def own_seconds(recent: Sequence[StepSummary]) -> Mapping[str, float]:
    """Phase -> seconds a step without waiting for communication; empty where none was timed by phase."""
    averages = _mean_part_seconds(_timed_steps(settled_steps(recent[-WINDOW:])))
    return {label: seconds for label, seconds in averages.items() if label != "exposed"}


def exposed_is_known(rank: RankSnapshot) -> bool:
    """Returns whether one of the last steps was timed by phase."""
    return bool(_timed_steps(settled_steps(rank.steps.recent[-WINDOW:])))


def _timed_steps(steps: Iterable[StepSummary]) -> list[StepSummary]:
    return [step for step in steps if step.timed and step.phase_exposed_ns]


def _mean_part_seconds(steps: Sequence[StepSummary]) -> dict[str, float]:
    if not steps:
        return {}
    splits = [step_parts(step) for step in steps]
    return {label: sum(split[label] for split in splits) / len(steps) / 1e9 for label in PARTS}


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
    """The pace of the last steps without pauses; None where no phase was timed on a device."""
    recent = settled_steps(rank.steps.recent[-WINDOW:])
    # While a rank waits out the pause of another, its device keeps up with its host for seconds
    longest = SLOW_STEP * statistics.median(step.seconds for step in recent) if recent else 0.0
    steps = [step for step in recent if step.launch_ns and not step.idle and step.seconds <= longest]
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
    measured = pace(rank)
    if measured is None:
        return ""
    starved, launches = human_ratio(measured.starved_ratio), launch_text(measured.launch_seconds)
    if measured.starved_ratio <= DEVICE_BOUND:
        return f"device-bound: kernels were queued at the end of its phases; the host takes {launches}"
    kind = "launch-bound" if measured.starved_ratio >= HOST_BOUND else "partly launch-bound"
    return f"{kind}: the device waited for the host in {starved} of its phases ({launches} to enqueue)"


# ---- what batches are made of -------------------------------------------------------------------

_FROM_STORAGE = 0.1
"""From this share on, what a loader reads comes from storage, and not from the page cache."""
_MIN_READ = 1 << 20


def load_parts(row: LoadingRow) -> dict[str, float]:
    """Seconds by part, the longest first; they sum to the time in which batches were made."""
    reading = max(0.0, row.fetch_seconds - row.collate_seconds - (row.transform_seconds or 0.0))
    durations = {"collate": row.collate_seconds}
    if row.transform_seconds is None:
        durations["read and transform"] = reading
    else:
        durations |= {"read": reading, "transform": row.transform_seconds}
    return dict(sorted(durations.items(), key=lambda item: -item[1]))


def from_disk(row: LoadingRow) -> float | None:
    """The share of what was read that came from disks; None where next to nothing was read."""
    return row.disk_bytes / _read(row) if _read(row) >= _MIN_READ else None


def from_nfs(row: LoadingRow) -> float:
    """The largest share of it that NFS servers can have sent: other programs read there, too."""
    return min(1.0, row.nfs_bytes / _read(row)) if _read(row) >= _MIN_READ else 0.0


def _read(row: LoadingRow) -> int:
    return max(row.read_bytes, row.disk_bytes)


def from_storage(row: LoadingRow) -> float | None:
    """The share from a disk or a server, where it is enough to matter; None: from the page cache."""
    share = max(from_disk(row) or 0.0, from_nfs(row))
    return share if share >= _FROM_STORAGE else None


def workers_text(workers: WorkerMemory | None) -> str:
    """``4 x 307.0 MiB``: the memory of DataLoader workers; ``-`` without any."""
    return f"{workers.count} x {human_bytes(workers.nbytes / workers.count)}" if workers else "-"


def loading_text(rank: RankSnapshot) -> str:
    """``batches: 512, 21 ms each: read and transform 81 %, collate 19 %``; "" where unknown."""
    row = rank.training.loading
    if row is None or row.fetch_seconds <= 0:
        return ""
    shares = (f"{name} {human_ratio(s / row.fetch_seconds)}" for name, s in load_parts(row).items())
    note = f"batches: {human_count(row.batches)}, {human_seconds(row.fetch_seconds / row.batches)}"
    note += f" to make each: {', '.join(shares)}"
    disk = from_disk(row)
    if disk is None:
        return note
    note += f"; {human_ratio(disk)} of {human_bytes(_read(row))} that were sampled came from disks"
    return f"{note}, at most {human_ratio(from_nfs(row))} from NFS" if row.nfs_bytes else note
