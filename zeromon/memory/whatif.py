"""Effects of a change of a setup: step, memory, throughput, and which changes are worth a look. Pure.

A point is one setup, predicted by the same model as a plan (:func:`zeromon.memory.plan.predict_row`).
Two points of the same calibration have its error in common, so that their difference has a narrower
interval than either: it is taken at the likely, the lowest and the highest speeds.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from zeromon.base.errors import PlanError
from zeromon.memory.plan import Row, Setup, of_run, predict_row, sizes_under_plan
from zeromon.memory.predict import ACTIVATION
from zeromon.memory.seconds import StepTime, forward_pass_flops
from zeromon.memory.spec import ZeroStage
from zeromon.snapshot import RunSnapshot


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """The work for a sample of a micro-batch; None where unknown."""

    tokens: float | None = None
    flops: float | None = None
    """FLOP of forward and backward, without what checkpointing repeats."""
    peak: float | None = None
    """Dense peak of a device, FLOP/s."""
    micro_batch: int = 1
    """Samples of a micro-step in the setup without changes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """A setup with its prediction."""

    change: Mapping[str, str]
    """The settings that differ, by the names of the options; empty for the setup as it is."""
    setup: Setup | None
    row: Row | None
    error: str = ""
    """Why there is no such setup."""
    samples: float = 0.0
    """Samples of a step of all ranks."""
    tokens_per_second: float | None = None
    mfu: float | None = None

    @property
    def label(self) -> str:
        """``stage=3 micro_batch=4``."""
        return " ".join(f"{name}={value}" for name, value in self.change.items()) or "as it is"

    @property
    def time(self) -> StepTime | None:
        """The step; None where its seconds are unknown."""
        return self.row.time if self.row is not None and isinstance(self.row.time, StepTime) else None

    @property
    def unknown(self) -> str:
        """Why the seconds are unknown; "" where they are known."""
        if self.row is None:
            return self.error
        return self.row.time if isinstance(self.row.time, str) else ""

    @property
    def sample_seconds(self) -> float | None:
        """Seconds a sample of all ranks: what a step costs, whatever its batch."""
        return None if self.time is None else self.time.seconds / self.samples

    @property
    def is_bound(self) -> bool:
        """True if the memory is at least what is counted: activations or gathered units are unknown."""
        if self.row is None or self.setup is None:
            return False
        gathers = self.row.plan.stage == ZeroStage.PARAMETERS
        units = sizes_under_plan(self.setup, self.row.plan).unit_numels
        return not self.counts_activations or (gathers and not units)

    @property
    def counts_activations(self) -> bool:
        """True if activations are part of the memory."""
        return self.row is not None and bool(self.row.memory.role(ACTIVATION))


def failed_point(change: Mapping[str, str], error: PlanError) -> Point:
    """Returns the point of a setup that does not exist."""
    return Point(change=change, setup=None, row=None, error=str(error))


def point_of(change: Mapping[str, str], setup: Setup, work: Work, micro_batch: int = 0) -> Point:
    """Returns the prediction for *setup*; *micro_batch*: samples of a micro-step, 0: those of *work*."""
    prediction = predict_row(setup, setup.plan)
    samples = float(setup.plan.ranks * setup.plan.accumulation * (micro_batch or work.micro_batch))
    rate = None if isinstance(prediction.time, str) else samples / prediction.time.seconds
    used = None
    if rate is not None and work.flops and work.peak:
        used = work.flops * rate / (work.peak * setup.devices)
    return Point(
        change=change,
        setup=setup,
        row=prediction,
        samples=samples,
        tokens_per_second=None if rate is None or work.tokens is None else rate * work.tokens,
        mfu=used,
    )


def work_of(setup: Setup) -> Work:
    """Returns the work of a sample of a model whose layers are known."""
    if setup.batch is None or setup.batch.length <= 1:
        return Work()
    device, frozen = setup.machine.device, 1 - setup.model.trainable / setup.model.params
    flops = forward_pass_flops(setup.model, setup.batch)[0] * (3 - frozen) / setup.batch.sequences
    model_parts = setup.tensor * setup.pipeline
    return Work(
        tokens=float(setup.batch.length),
        flops=flops * model_parts,
        peak=None if device is None else device.flops(setup.plan.precision.compute_bytes),
        micro_batch=setup.batch.sequences,
    )


def step_difference(base: Point, variant: Point) -> tuple[float, float, float] | None:
    """Returns by how many seconds a step of *variant* is longer: likely, at least, at most."""
    if base.time is None or variant.time is None:
        return None
    bounds = variant.time.least - base.time.least, variant.time.most - base.time.most
    likely = variant.time.seconds - base.time.seconds
    return likely, min(likely, *bounds), max(likely, *bounds)


def shorter_step_by(run: RunSnapshot, **change: Any) -> float | None:
    """Returns by how many seconds a step of *run* is shorter when *change* is made to its plan.

    None where the engine does not know the step, or the change does not exist.
    """
    try:
        setup = of_run(run)
        variant = replace(setup, plan=replace(setup.plan, **change))
        longer = step_difference(point_of({}, setup, Work()), point_of({}, variant, Work()))
    except PlanError:
        return None
    return None if longer is None else -longer[0]


def memory_time_front(points: Sequence[Point]) -> list[Point]:
    """Returns the points that no other beats in both memory and seconds a sample, by memory."""
    timed = [p for p in points if p.row is not None and p.row.fits and p.sample_seconds is not None]
    frontier: list[Point] = []
    fastest = float("inf")
    for cand in sorted(timed, key=lambda p: (p.row.device_bytes if p.row else 0, p.sample_seconds)):
        if cand.sample_seconds is not None and cand.sample_seconds < fastest:
            frontier.append(cand)
            fastest = cand.sample_seconds
    return frontier
