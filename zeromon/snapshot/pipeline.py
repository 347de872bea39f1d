"""A pipeline of stages as one of its ranks sees it."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class StageRow:
    """One stage of a rank; means of the last calls of the schedule."""

    stage: int
    seconds: dict[str, float]
    """Action (``forward``, ``backward``, ``backward_input``, ``backward_weight``) -> seconds of one."""
    micro_batch_waits: tuple[float, ...]
    """Micro-batch -> seconds a call in which its sends and receives blocked the rank."""

    @property
    def work_seconds(self) -> float:
        """What the stage computes for one micro-batch."""
        return sum(self.seconds.values())

    @property
    def wait_seconds(self) -> float:
        """Seconds a call in which the stage's sends and receives blocked the rank."""
        return sum(self.micro_batch_waits)


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineBubble:
    """The bubble of a rank, and what would shorten that of its pipeline; see diagnosis.pipelines."""

    measured_ratio: float
    ideal_ratio: float
    """What the order of the schedule leaves idle with the measured times, if messages took none."""
    span_seconds: float
    """Of the rank that takes longest from its first action to its last."""
    ideal_seconds: float
    """The same where messages take no time."""
    doubled_seconds: float
    """The same with twice as many micro-batches of half the size."""
    balanced_seconds: float
    """The same where all stages take equally long."""
    slowest_stage: int
    slowest_seconds: float
    """Of one micro-batch on the slowest stage."""
    mean_seconds: float
    """Of one micro-batch on a stage, mean of all stages."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineRow:
    """One rank of a pipeline; means of the last calls of the schedule, without the first step."""

    schedule: str
    """torch's name without ``Schedule``: ``GPipe``, ``1F1B``, ``Interleaved1F1B``, ..."""
    stages: int
    micro_batches: int
    stage_ranks: tuple[int, ...]
    """Stage -> global rank."""
    on_device: bool
    own: tuple[StageRow, ...]
    """The stages of this rank."""
    order: str
    """The actions of a call in torch's notation, such as ``0F0 0F1 0B0``."""
    busy_seconds: float | None
    span_seconds: float | None
    bubble: PipelineBubble | None = None
    unknown: str = ""
    """Why the bubble is not known; "" where it is."""
