"""Steps of a rank, ranges of steps of a run, and the last steps as spans on one timeline."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum

from zeromon.ring.codes import TextEnum
from zeromon.snapshot.communication import overlap_ratio
from zeromon.snapshot.levels import UNTIMED as UNTIMED_LEVEL

RECENT_STEPS = 512
"""So many of a rank's last steps a snapshot has."""

IDLE, SKIPPED, UNTIMED = 1, 2, 4
"""Bits of a step's flags in a step history: :attr:`StepSummary.idle`, :attr:`StepSummary.skipped`, and
that too many collectives were not timed."""
NOT_TIMED = IDLE | UNTIMED
"""With any of these bits, the communication of a step is unknown."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSummary:
    """One optimizer step of one rank."""

    step: int
    start_ns: int
    end_ns: int
    idle: bool
    """The timing hooks were idle: communication of this step was counted, not timed."""
    micro_steps: int
    phase_ns: tuple[int, ...]
    """Nanoseconds by :class:`Phase`, in its order."""
    collectives: int
    collective_bytes: int
    communication_ns: int
    """Length of the union of the timed collectives; -1 where only the waits for them are known."""
    exposed_ns: int
    """The part of it during which nothing was computed."""
    allocated_bytes: int
    reserved_bytes: int
    rss_bytes: int
    skipped: bool = False
    """Gradients overflowed, and the parameters are as before."""
    offload_blocked_ns: int = 0
    """How long the training thread stood still for offloaded state to move."""
    other_bytes: int = -1
    """On the device, beside what this process's allocator has reserved; -1 where unknown."""
    phase_exposed_ns: tuple[int, ...] = ()
    """The part of :attr:`phase_ns` that was spent waiting for communication."""
    late_gather_ns: int = 0
    """How long it stood still for parameters that were asked for only when they were needed."""
    untimed: int = 0
    """How many of the collectives were not timed, such as those that C++ or compiled code issues.

    1 where they cannot even be counted: of a process group written in Python."""

    starved_ns: int = 0
    """In forwards and backwards that a device ended right behind the host."""
    launch_ns: tuple[int, ...] = ()
    """The host's nanoseconds by phase, where :attr:`phase_ns` has those of a device."""
    silent_ns: int = 0
    """The part of the step in which the rank made no progress, as a stall or in a hang."""
    samples: int = -1
    """Samples that the model of this rank was called with; -1 where unknown."""
    tokens: int = -1
    """Likewise; -1 also where batches hold none."""

    loss: float | None = None
    """As a logger got it; None where the host does not know it, and where it is not finite."""
    grad_norm: float | None = None
    """Before clipping, likewise."""
    learning_rate: float | None = None

    @property
    def timed(self) -> bool:
        """True if the communication of the step is known."""
        return not self.idle and self.untimed <= UNTIMED_LEVEL * self.collectives

    @property
    def seconds(self) -> float:
        """Duration."""
        return (self.end_ns - self.start_ns) / 1e9

    @property
    def overlap(self) -> float | None:
        """|C ∩ K| / |C|, None without timed communication."""
        return None if not self.timed else overlap_ratio(self.communication_ns, self.exposed_ns)


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchRow:
    """Totals of a rank's model inputs in training."""

    steps: int
    """Steps in which it was seen."""
    samples: int
    tokens: int
    """0 where batches hold none."""
    positions: int
    """Tokens with padding."""
    pairs: int
    """The sum of positions times the length of their sequence."""
    padding: int
    """A :class:`~zeromon.ring.codes.Padding`: whether :attr:`tokens` include it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalarRow:
    """A number of the training itself that the host knows: loss, gradient norm, learning rate."""

    name: str
    """``loss``, ``grad_norm``, ``learning_rate``."""
    value: float | None
    """The newest; None where it is infinite or NaN."""
    step: int
    nonfinite: int
    """Steps in which it was infinite or NaN."""
    first_nonfinite_step: int
    """0 without one."""


def settled_steps(steps: Iterable[StepSummary]) -> list[StepSummary]:
    """*steps* without the first one of the process; all of them where no other is known.

    The first one compiles, allocates and connects what the others use.
    """
    step_list = list(steps)
    start = next((index for index, step in enumerate(step_list) if step.step > 1), 0)
    return step_list[start:]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRange:
    """Some of a run's steps, over all its ranks."""

    first_step: int
    last_step: int
    step_seconds: float
    """Mean."""
    exposed_ratio: float | None
    """Over the steps whose communication was timed."""
    rss_bytes: int
    reserved_bytes: int
    """The most on any rank; -1 where unknown."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadingRow:
    """Totals of the batches that a rank's DataLoaders made, workers included."""

    batches: int
    fetch_seconds: float
    """All of it; several workers spend several seconds a second."""
    transform_seconds: float | None
    """In compositions of torchvision and albumentations; None where none was called."""
    collate_seconds: float
    read_bytes: int
    """Bytes that processes read while they made some of the batches, from wherever."""
    disk_bytes: int
    """Bytes that they read from disks; a network file system may not count."""
    major_faults: int
    """Pages of mapped files that were not in memory."""
    nfs_bytes: int = 0
    """Bytes that the node read from NFS servers meanwhile, for any process."""


# ---- traces on demand ---------------------------------------------------------------------------


class CaptureState(TextEnum):
    """How far a requested trace is, on one rank or on all of them."""

    WAITING = "waiting"
    """For the first step."""
    RECORDING = "recording"
    SAVED = "saved"
    """A rank has written its trace."""
    REFUSED = "refused"
    """A rank does not record."""
    ANALYSING = "analysing"
    """All ranks have answered; the traces are being read."""
    DONE = "done"
    FAILED = "failed"

    @property
    def is_over(self) -> bool:
        """True if nothing more will happen."""
        return self in _OVER


_OVER = (CaptureState.SAVED, CaptureState.REFUSED, CaptureState.DONE, CaptureState.FAILED)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankCapture:
    """How far a rank is with the trace that was asked for last."""

    request: int
    state: CaptureState
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceCheck:
    """Live figures beside those of a trace, over the same steps of one rank."""

    steps: tuple[int, ...]
    live_exposed_seconds: float
    trace_exposed_seconds: float
    live_communication_seconds: float | None
    """None where only the waits for communication are known."""
    trace_communication_seconds: float
    launch_bound: bool = False
    """The trace then also counts as exposed how long the device waits for the host."""

    @property
    def error_ratio(self) -> float | None:
        """Relative error of the live exposed time against the trace; None where they do not compare."""
        if self.trace_exposed_seconds <= 0 or self.launch_bound:
            return None
        return self.live_exposed_seconds / self.trace_exposed_seconds - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Capture:
    """A trace on demand."""

    number: int
    state: CaptureState
    first: int
    """Number of the first step."""
    steps: int
    ranks: tuple[int, ...]
    folder: str
    files: tuple[str, ...] = ()
    note: str = ""
    checks: dict[int, TraceCheck] = field(default_factory=dict)
    """By rank."""

    @property
    def is_open(self) -> bool:
        """True if the capture is still under way."""
        return not self.state.is_over


# ---- the last steps of each rank as spans on one timeline ----------------------------------------


class Stream(str, Enum):
    """The resource of a span. BACKGROUND: a thread beside the training, which no step waits for."""

    COMPUTE = "compute"
    COMMUNICATION = "communication"
    BACKGROUND = "background"


@dataclass(frozen=True, slots=True, kw_only=True)
class LaneSpan:
    """A phase, or a collective from its issue to its end."""

    rank: int
    step: int
    stream: Stream
    name: str
    unit: str
    """Fully qualified name, or the bucket; empty where no unit is known."""
    group: str
    begin_ns: int
    end_ns: int
    exposed_ns: int
    """How long the rank was blocked, up to the end."""
    nbytes: int
    on_device: bool
    """The device's stream was blocked, and not the host."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LaneStep:
    """A step of a rank; ``unplaced_ns`` and ``untimed`` are what its spans do not show."""

    rank: int
    step: int
    begin_ns: int
    end_ns: int
    unplaced_ns: int
    """Exposed time whose moment is not known."""
    untimed: int
    """Collectives whose time is not known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LateArrival:
    """A collective that the other ranks of its group waited for *rank* to issue."""

    name: str
    unit: str
    group: str
    step: int
    rank: int
    """Who came last."""
    first_rank: int
    at_ns: int
    first_ns: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Lanes:
    """One timeline; times are nanoseconds of the common clock."""

    zero_ns: int
    """When the first shown step began."""
    steps: tuple[LaneStep, ...]
    spans: tuple[LaneSpan, ...]
    arrivals: tuple[LateArrival, ...]
    left_out: tuple[str, ...]
    """Sentences that say what a limit left out."""
