"""Whether a device or the host that enqueues its kernels sets the pace of training. Pure.

A host that is ahead has enqueued kernels that the device has yet to run. A device that comes to the end
of a phase right behind the host has none: the phase took as long as the host needed to enqueue it.
"""

from typing import NamedTuple

from zeromon.levels import DEVICE_BOUND, HOST_BOUND
from zeromon.readout.breakdown import RECORDED, WINDOW
from zeromon.ring.codes import ENQUEUED
from zeromon.snapshot import RankSnapshot
from zeromon.snapshot.step import settled
from zeromon.units import human_ratio, human_seconds


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
