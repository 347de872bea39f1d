"""One rank at one moment."""

import math
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

from zeromon.ring import model_metadata
from zeromon.ring.codes import TextEnum
from zeromon.ring.strategy import DATA_PARALLEL, SAME_BATCH, Strategy, dim_by_name
from zeromon.snapshot.communication import (
    CollectiveRow,
    CollectiveStatsRow,
    Dimension,
    GatherRow,
    GroupProgress,
    InFlight,
    InspectorRow,
    Links,
    PipelineRow,
    SizeRow,
    UnitRow,
)
from zeromon.snapshot.finding import RankTrial
from zeromon.snapshot.host import (
    CodeLine,
    Device,
    Disk,
    ExtensionLock,
    HostMemory,
    Pressure,
    WorkerMemory,
)
from zeromon.snapshot.ledger import ActivityRow, LedgerRow
from zeromon.snapshot.memory import DeviceMemory, ExpectedRow, OutOfMemory, Risk, RoleRow, TransferRow
from zeromon.snapshot.step import BatchRow, LoadingRow, RankCapture, ScalarRow, StepSummary, TraceCheck

VIRTUAL = " (virtual)"
"""The end of the name of a device that is modelled."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """One setting of a DeepSpeed configuration."""

    engine: int
    name: str
    effective: str
    written: str
    """The value that the user wrote; "" where the default applies."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineRow:
    """One DeepSpeed engine of a rank."""

    engine: int
    strategy: str
    steps: int
    skipped: int
    collectives: int
    nbytes: int
    exposed_seconds: float
    loss_scale: float | None
    hysteresis: int
    """Overflows until the loss scale is lowered; -1 without it."""
    grad_norm: float | None
    """None where the host does not know it, and where it is not finite."""
    nonfinite: int
    """Steps whose gradient norm was infinite or NaN."""
    strategy_fields: Strategy | None = None
    dropped: bool = False
    """The script has let go of it: its model and settings are no longer those of the rank."""


NOT_SEEN = "not seen for"
"""The beginning of :attr:`RankStatus.ended` while Prometheus has no new samples, or where a record has
no end; a time follows."""

DETACHED = "detached"
"""The beginning of :attr:`RankStatus.ended` of a process from which the agent was removed."""
CTRL_C = "Ctrl-C"
"""The value of :attr:`RankStatus.stopped` for a rank that its user interrupted."""


class Halt(TextEnum):
    """Why a live process runs no Python, as the kernel and the age of its last record show it."""

    NONE = ""
    SUSPENDED = "suspended by a signal"
    TRACED = "held by a debugger"
    UNRESPONSIVE = "not running Python: a call holds the GIL, or the agent has stopped"


@dataclass(frozen=True, slots=True, kw_only=True)
class RankStatus:
    """Life of a rank: how it ended, and where it stands still."""

    alive: bool
    ended: str
    """Empty while alive; else how it ended: ``finished``, ``SIGKILL``, ``exit code 1``, ..."""
    failed: bool
    exception: str
    leaving: bool = False
    """Its script has ended well, and its process still runs."""
    joined: bool = False
    """The agent was attached while the process ran, so what was before is unknown."""
    started_ns: int
    last_event_ns: int
    progress_ns: int = 0
    """When the training thread was last seen to do something; 0 where that is not known."""
    stack: tuple[str, ...] = ()
    """The script's call stack, the outermost call first; sent while the rank makes no progress."""
    pause: str = ""
    """The reason for an expected pause of the rank (``saves or loads a checkpoint``); "" for none."""
    halted: Halt = Halt.NONE
    """Why the rank runs no Python, as seen from outside its process."""
    lock: ExtensionLock | None = None
    """The lock of torch's extension cache that it waits for; None without one."""

    @property
    def silent(self) -> bool:
        """True if the present state of the rank is unknown."""
        return self.ended.startswith(NOT_SEEN)

    @property
    def detached(self) -> bool:
        """True if the agent was removed: what the process did since is not known."""
        return self.ended.startswith(DETACHED)

    @property
    def stopped(self) -> str:
        """By what a person or the launcher stopped the rank: Ctrl-C or SIGTERM; "" where nobody did."""
        if self.ended == "SIGINT" or self.exception.startswith("KeyboardInterrupt"):
            return CTRL_C
        return "SIGTERM" if self.ended == "SIGTERM" else ""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankSteps:
    """The steps that a rank has taken, and where its script is."""

    last_step: int
    """Number of the last step, by the optimizer's own count after an attach."""
    watched_steps: int
    """Steps that were watched; views show :attr:`last_step`."""
    median_seconds: float | None
    """Median of the last steps."""
    mean_seconds: float | None = None
    """Mean of the last timed steps, of which the exposed time is a mean, too; without the first step."""
    total_seconds: float
    duration_buckets: tuple[int, ...]
    recent: tuple[StepSummary, ...]
    micro_steps: int = 0
    backwards_since_step: int = 0
    skipped_steps: int = 0
    phase: str
    unit: str
    phase_seconds: dict[str, float]
    own_code: tuple[CodeLine, ...] = ()
    """Where the script is between the phases of its steps, the most frequent line first."""

    @property
    def first_step(self) -> int:
        """Number of the first step that was watched."""
        return self.last_step - self.watched_steps + 1


@dataclass(frozen=True, slots=True, kw_only=True)
class RankCommunication:
    """The collectives of a rank, what it waits for, and who waits for it."""

    overlap_ratio: float | None
    exposed_ratio: float | None
    """Exposed communication as a share of the last timed steps."""
    exposed_seconds: float | None
    """Exposed communication a step, mean of the last timed steps."""
    wait_seconds: float | None = None
    """Seconds a step that the rank waits for ranks that arrive later."""
    late_seconds: float | None = None
    """Seconds a step that all others wait for this rank alone."""
    collectives: tuple[CollectiveRow, ...]
    untimed: dict[str, int]
    untimed_in_cpp: int = 0
    """Collectives of :attr:`untimed` that passed every hook: replayed graphs and other C++, not DDP's
    reducer, which times a backward as a whole."""
    untimed_ratio: float | None = None
    """The share of the collectives of the last steps that were not timed; control steps do not count."""
    unattributed: dict[str, int]
    in_flight: tuple[InFlight, ...]
    groups: tuple[GroupProgress, ...] = ()
    units: tuple[UnitRow, ...]
    traffic: tuple[CollectiveStatsRow, ...] = ()
    """The most exposed first."""
    sizes: tuple[SizeRow, ...] = ()
    gathers: tuple[GatherRow, ...] = ()
    pipeline: PipelineRow | None = None
    """The rank's part of a pipeline of stages; None without one."""
    links: Links | None = None
    inspected: tuple[InspectorRow, ...] = ()
    """Measurements of NCCL's own Inspector; empty where it is off."""
    inspector_note: str = ""
    """Why :attr:`inspected` lacks what Inspector wrote; "" where it does not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankMemory:
    """The memory of a rank on device, host and disk."""

    device: DeviceMemory | None
    host: HostMemory | None = None
    workers: WorkerMemory | None = None
    """None without DataLoader workers."""
    rss_bytes: int
    host_available_bytes: int
    pinned_bytes: int
    risks: tuple[Risk, ...] = ()
    out_of_memory: OutOfMemory | None = None
    """The last allocation that failed."""
    roles: tuple[RoleRow, ...] = ()
    expected: tuple[ExpectedRow, ...] = ()
    """Roles measured against predicted; empty while no model is known."""
    unsharded_peak_bytes: int = -1
    """The most bytes of gathered parameters at once so far; -1 where units do not report them."""
    transfers: tuple[TransferRow, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class RankMachine:
    """Figures of the device, the disk and the kernel of a rank's node."""

    device: Device | None = None
    disk: Disk | None = None
    pressure: Pressure | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RankConfig:
    """The models of a rank, and the settings that its frameworks have in effect."""

    models: tuple[model_metadata.ModelMetadata, ...] = ()
    planned: model_metadata.ModelMetadata = field(default_factory=model_metadata.ModelMetadata)
    """The model of a DeepSpeed engine that is being made."""
    engines: tuple[EngineRow, ...] = ()
    settings: tuple[Setting, ...] = ()
    loader: model_metadata.LoaderMetadata = field(default_factory=model_metadata.LoaderMetadata)
    """Settings of the newest DataLoader."""
    process: model_metadata.ProcessMetadata = field(default_factory=model_metadata.ProcessMetadata)
    """Settings of the process: variables, threads, autocast; empty where unknown."""
    compiled: model_metadata.CompiledMetadata = field(default_factory=model_metadata.CompiledMetadata)
    """Counts from torch.compile; empty where nothing was compiled, and on earlier versions."""
    trackers: model_metadata.TrackersMetadata = field(default_factory=model_metadata.TrackersMetadata)
    """The runs of W&B, MLflow and TensorBoard that the script has open; empty without one."""
    goal: model_metadata.GoalMetadata = field(default_factory=model_metadata.GoalMetadata)
    """How many steps the run will take; empty where nothing in the process says so."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankTraining:
    """Batches of a rank, and the scalars that its script logs."""

    scalars: tuple[ScalarRow, ...] = ()
    """Those that the host knows."""
    batches: BatchRow | None = None
    """Totals of its model's inputs; None where nothing reports them."""
    loading: LoadingRow | None = None
    """Totals of the batches that its DataLoaders made; None where no batch was timed."""
    out_of_batches: bool = False
    """True if its DataLoader had no more when a batch was last asked for."""
    first_batches: tuple[int, ...] = ()
    """Checksums of the first batches of training; () where unknown, and on a device."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankLedger:
    """Causes of a rank's time, and what a failure would lose."""

    rows: tuple[LedgerRow, ...] = ()
    """Every second of the process, or since the agent was attached."""
    totals: dict[str, float] = field(default_factory=dict)
    """Seconds by cause of the set-up and of the steps whose times are complete: they only grow."""
    activities: tuple[ActivityRow, ...] = ()
    startup_seconds: float | None = None
    """From the start of the process to its first step; None where that was not seen."""
    startup_parts: dict[str, float] = field(default_factory=dict)
    """Seconds by part of the set-up, and by phase where one has a cause of its own: they sum to
    :attr:`startup_seconds`."""
    resumed_step: int | None = None
    """Steps that its optimizer had taken when it began; None where it keeps no count."""
    unsaved_seconds: float | None = None
    """Steps since the last checkpoint that was seen to be saved, or since the first step."""
    unsaved_steps: int | None = None
    """The number of those steps."""
    checkpoints: int = 0
    """Saves by the training thread that were seen; several files without a step between them are one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentHealth:
    """Cost of zeromon on a rank, and what it misses."""

    dropped: int
    errors: int
    overhead_ratio: float | None
    """By which share steps exceed control steps; see *overhead_noise_ratio* before you believe it."""
    overhead_noise_ratio: float | None
    """The standard error of *overhead_ratio*."""
    accounted_overhead_ratio: float | None = None
    """The agent's cost as a share of the last minute, by its calls and samples: an upper bound."""
    unseen: tuple[str, ...] = ()
    """Names that this version of a framework lacks; figures that need them are unknown."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankRequests:
    """Requests of a user to a running rank."""

    capture: RankCapture | None = None
    trial: RankTrial | None = None
    check: TraceCheck | None = None
    """Live figures compared with the last trace."""


_WHOLE = 0.98
"""A share of a collective's time; two clocks may divide it a little differently."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankSnapshot:
    """One rank of a run. Bytes and counts are -1, and other figures None, where they are unknown."""

    rank: int
    local_rank: int
    world_size: int
    pid: int
    node: str
    device: str
    strategy: str
    """The label of :attr:`sharding_strategy`, for people and metrics; rules never compare it."""
    strategy_fields: Strategy | None = None
    """None from Prometheus, which has the label alone."""
    dimensions: tuple[Dimension, ...] = ()
    """Those of the process groups that the rank has met."""
    status: RankStatus
    steps: RankSteps
    communication: RankCommunication
    memory: RankMemory
    machine: RankMachine
    config: RankConfig
    training: RankTraining
    ledger: RankLedger
    agent: AgentHealth
    requests: RankRequests

    def with_recent(self, steps: Iterable[StepSummary]) -> "RankSnapshot":
        """The rank with *steps* as its recent ones."""
        return replace(self, steps=replace(self.steps, recent=tuple(steps)))

    def with_status(self, **changes: Any) -> "RankSnapshot":
        """The rank with these *changes* of its status."""
        return replace(self, status=replace(self.status, **changes))

    def with_communication(self, **changes: Any) -> "RankSnapshot":
        """The rank with these *changes* of its communication."""
        return replace(self, communication=replace(self.communication, **changes))

    @property
    def on_virtual_device(self) -> bool:
        """True in a preflight, whose devices take modelled time and compute nothing."""
        return self.device.endswith(VIRTUAL)

    @property
    def sharding_strategy(self) -> Strategy:
        """How the rank shards its model; by the label where no fields are known."""
        return self.strategy_fields or Strategy.parse(self.strategy)

    @property
    def data_parallel_ranks(self) -> int | None:
        """Ranks that train on samples of their own: all, divided by the sizes of tp, pp and cp.

        None where neither a wrapper nor a mesh says how the ranks divide a batch.
        """
        used = [dimension for dimension in self.dimensions if dimension.used]
        sizes = dict.fromkeys(SAME_BATCH, 1)
        for dimension in used:
            dim = dim_by_name(dimension.name)
            if dim in sizes:
                sizes[dim] = max(sizes[dim], dimension.size)
        strategy = self.sharding_strategy
        is_known = strategy != Strategy() or any(dim_by_name(d.name) in DATA_PARALLEL for d in used)
        if not is_known and self.world_size > 1:
            return None
        if any(sizes.get(split_dim) == 1 for split_dim in strategy.parts):
            return None  # a Prometheus without the sizes
        return max(1, self.world_size) // math.prod(sizes.values())

    @property
    def device_type(self) -> str:
        """The type of the device that the rank computes on, by torch's name: ``cuda`` or ``cpu``."""
        return self.device.partition(":")[0] or "cuda"

    @property
    def unsharded_bytes(self) -> int:
        """Bytes of all parameters of the models while they are gathered; 0 without model metadata."""
        return sum(m.get("numel", 0) * m.get("compute_bytes", 4) for m in self.config.models)

    @property
    def bucket_cap_mb(self) -> float | None:
        """The ``bucket_cap_mb`` of the DDP model; None where unknown."""
        caps = (model.get("bucket_cap_bytes") for model in self.config.models)
        return next((cap / (1 << 20) for cap in caps if cap is not None), None)

    def share_of_step(self, seconds: float) -> float:
        """*seconds*, a mean over steps, as a share of the mean step."""
        mean = self.steps.mean_seconds or self.steps.median_seconds
        return min(1.0, seconds / mean) if mean else 0.0

    def unit_rows(self, op: str, phase: str = "") -> list[CollectiveStatsRow]:
        """Rows of one operation that belong to a unit or bucket; of all phases where none is given."""
        rows = (row for row in self.communication.traffic if row.op == op and row.unit)
        return [row for row in rows if phase in ("", row.phase)]

    @property
    def waits_in_each_bucket(self) -> bool:
        """True if DDP sends several buckets a step on a device, and none of them is hidden."""
        buckets = self.unit_rows("all_reduce", "backward")
        waited = [row for row in buckets if row.exposed_seconds >= _WHOLE * row.seconds > 0]
        is_on_device = self.sharding_strategy.is_ddp and self.device != "cpu"
        return is_on_device and len(waited) == len(buckets) > 1

    def path_peak(self, path: str) -> tuple[float | None, str]:
        """The most bytes/s that an offload *path* can do, and what says so; None where nothing does.

        The limit of a disk is that of the rank's cgroup; between device and host it is that of PCIe.
        """
        if path.startswith("disk"):
            disk, reads = self.machine.disk, path == "disk_read"
            if disk is None:
                return None, ""
            limits = disk.read_limit_bytes_per_second, disk.write_limit_bytes_per_second
            return limits[0 if reads else 1], "its cgroup allows"
        if self.communication.links is None:
            return None, ""
        return (
            self.communication.links.host_bytes_per_second,
            f"{self.communication.links.host_kind} can do",
        )
