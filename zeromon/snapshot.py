"""What is known of a run at one moment: frozen pictures that every view reads.

Made by :mod:`zeromon.state` from the records; nothing in here changes or reads a clock. Times are
nanoseconds of CLOCK_MONOTONIC, sizes bytes, ratios 0..1.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from zeromon.comms import overlap_ratio

RECENT_STEPS = 512
"""So many of a rank's last steps a picture has."""


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
    """Length of the union of the timed collectives."""
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
    """Of :attr:`phase_ns`, what was spent waiting for communication."""
    late_gather_ns: int = 0
    """How long it stood still for parameters that were asked for only when they were needed."""

    @property
    def seconds(self) -> float:
        """Duration."""
        return (self.end_ns - self.start_ns) / 1e9

    @property
    def overlap(self) -> float | None:
        """|C ∩ K| / |C|, None without timed communication."""
        return None if self.idle else overlap_ratio(self.communication_ns, self.exposed_ns)


@dataclass(frozen=True, slots=True, kw_only=True)
class Stretch:
    """Some of a run's steps, over all its ranks."""

    first_step: int
    last_step: int
    step_seconds: float
    """Median."""
    exposed_ratio: float | None
    """Over the steps whose communication was timed."""
    rss_bytes: int
    reserved_bytes: int
    """The most on any rank; -1 where unknown."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveRow:
    """Totals of one operation in one group."""

    op: str
    group: str
    group_size: int
    count: int
    timed: int
    nbytes: int
    quantized_bytes: int
    """The part of it that was sent in 8 bits (ZeRO++)."""
    nodes: int
    """Over how many nodes the group spreads; 0 where the launcher does not say."""
    seconds: float
    exposed_seconds: float
    busbw_bytes_per_second: float | None
    """Over the last steps; includes the wait for a late rank. None for what has none (barrier)."""
    best_busbw_bytes_per_second: float


@dataclass(frozen=True, slots=True, kw_only=True)
class TrafficRow:
    """One operation in one group, phase and unit (or bucket); means a timed step over the last ones."""

    op: str
    group: str
    group_size: int
    nodes: int
    """Over how many nodes the group spreads; 0 where the launcher does not say."""
    phase: str
    unit: str
    """An FSDP or ZeRO-3 unit, a gradient bucket; "" where the caller belongs to none."""
    count: int
    """Calls in all timed steps."""
    calls: float
    nbytes: float
    seconds: float
    """From the call to the end: transfer, wait for late ranks, and where the end is known late, more."""
    exposed_seconds: float
    exposed_total_seconds: float
    wait_seconds: float | None
    """For ranks of this node that came later; None while no collective is matched."""
    transfer_seconds: float | None
    """The shortest duration over ranks."""
    algbw_bytes_per_second: float | None
    busbw_bytes_per_second: float | None
    """Of the transfer where it is known, else of the whole time."""
    best_busbw_bytes_per_second: float


@dataclass(frozen=True, slots=True, kw_only=True)
class SizeRow:
    """How large the collectives of one operation are."""

    op: str
    calls: tuple[int, ...]
    """By the bounds of :data:`zeromon.traffic.SIZE_BOUNDS`; the last is of those beyond."""
    nbytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Links:
    """What the links of a rank can do at most, one direction, bytes/s; None where unknown."""

    device_bytes_per_second: float | None = None
    """Between the devices of a node: all NVLinks, else PCIe."""
    device_kind: str = ""
    network_bytes_per_second: float | None = None
    """All network adapters of the node together."""
    network_kind: str = ""
    host_bytes_per_second: float | None = None
    """Between the device and its host: PCIe."""
    host_kind: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitRow:
    """Totals of one FSDP unit."""

    fqn: str
    unshards: int
    reshards: int
    exposed_seconds: float
    peak_allocated_bytes: int
    late_bytes: int
    """Unsharded bytes asked for only when the unit was needed, where the backend says so."""
    ahead_bytes: int
    """Those that were asked for before."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """One setting of a DeepSpeed configuration."""

    engine: int
    name: str
    effective: str
    written: str
    """What the user wrote; empty when it was left to its default."""


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
    """None where it is not known on the host, or not finite."""
    nonfinite: int
    """Steps whose gradient norm was infinite or NaN."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GatherRow:
    """ZeRO-3's gathers of parameters, by whether they were issued ahead of need; timed steps only."""

    outcome: str
    """``ahead`` (a prefetch) or ``late`` (asked for when it was needed)."""
    nbytes: int
    exposed_seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferRow:
    """Offloaded state along one path."""

    path: str
    """``device_to_host``, ``host_to_device``, ``disk_read`` or ``disk_write``."""
    nbytes: int
    seconds: float
    """How long transfers were under way; 0 where only the bytes are known."""
    blocked_seconds: float
    """How long the training thread stood still for them."""
    bytes_per_second: float | None
    """Over the last steps. A lower bound: a wait may come after the end."""
    best_bytes_per_second: float = 0.0
    """The most that was so far."""
    step_bytes: float = 0.0
    """Mean over the last steps."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleRow:
    """Bytes of one role, by place, at the last census."""

    role: str
    device_bytes: int
    host_bytes: int
    disk_bytes: int
    pinned_bytes: int
    grown_bytes: int = 0
    """On device and host, since the first census after the warm-up."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cause:
    """Bytes on top of the plain arithmetic of ZeRO, and why they are there."""

    text: str
    nbytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpectedRow:
    """One role, measured against predicted; on device, host and disk together."""

    role: str
    measured_bytes: int | None
    """None where no census reaches."""
    plain_bytes: int
    """What the paper's arithmetic says."""
    predicted_bytes: int | None
    """With what the framework and its settings put on top; None when it cannot be said."""
    causes: tuple[Cause, ...] = ()

    @property
    def unexplained_bytes(self) -> int | None:
        """Measured, less predicted."""
        if self.measured_bytes is None or self.predicted_bytes is None:
            return None
        return self.measured_bytes - self.predicted_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Rest:
    """Bytes that no role accounts for."""

    kind: str
    place: str
    nbytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupProgress:
    """How far a rank has come in a process group."""

    group_id: str
    """The same on all its members."""
    label: str
    ranks: tuple[int, ...]
    sequence: int
    """Of the last collective that was issued; -1 before the first."""
    op: str = "none"
    """What that was, ``none`` where it is not known."""
    nbytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Hang:
    """A collective that does not end, or broke off; see :mod:`zeromon.hangs`."""

    kind: str
    op: str
    group: str
    group_id: str
    sequence: int
    nbytes: int
    seconds: float
    """0 for one that broke off."""
    waiting: tuple[int, ...]
    """Ranks that are in it."""
    missing: tuple[int, ...]
    """Members that live and have not called it."""
    dead: tuple[int, ...]
    elsewhere: tuple[int, ...]
    """Members on other nodes."""
    calls: tuple[str, ...]
    """What each rank in it has called."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Straggler:
    """A rank that others wait for; see :mod:`zeromon.skew`."""

    rank: int
    late_seconds: float
    """Behind the second to last, a step."""
    share: float
    """The same as a share of a step."""
    since_step: int
    phase: str
    """Where it spends more time than the others, "" where that is not to be seen."""
    longer_seconds: float
    """By how much, a step."""
    cause: str = ""
    """What of its host or device explains it, in words; "" where nothing does."""
    node: str = ""
    """Where it is, when that is another node than this one."""
    whole_node: bool = False
    """All ranks of that node come after all others; *rank* is one of them."""

    @property
    def who(self) -> str:
        """``rank 3``, ``rank 3 on node b``, ``node b``."""
        if self.whole_node:
            return f"node {self.node}"
        return f"rank {self.rank} on node {self.node}" if self.node else f"rank {self.rank}"


@dataclass(frozen=True, slots=True, kw_only=True)
class InFlight:
    """A collective that was issued and has not ended."""

    op: str
    group: str
    sequence: int
    unit: str
    phase: str
    nbytes: int
    issued_ns: int
    group_id: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankCapture:
    """How far a rank is with the trace that was asked for last."""

    request: int
    state: str
    """``waiting``, ``recording``, ``saved``, ``refused`` or ``failed``."""
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceCheck:
    """Live figures beside those of a trace, over the same steps of one rank."""

    steps: tuple[int, ...]
    live_exposed_seconds: float
    trace_exposed_seconds: float
    live_communication_seconds: float
    trace_communication_seconds: float

    @property
    def error_ratio(self) -> float | None:
        """By how much the live exposed time is off, as a share of the trace's; None without any."""
        if self.trace_exposed_seconds <= 0:
            return None
        return self.live_exposed_seconds / self.trace_exposed_seconds - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Capture:
    """A trace on demand."""

    number: int
    state: str
    """``waiting`` for its first step, ``recording``, ``analysing``, ``done`` or ``failed``."""
    first: int
    """Number of the first step."""
    steps: int
    ranks: tuple[int, ...]
    folder: str
    files: tuple[str, ...] = ()
    note: str = ""
    checks: dict[int, TraceCheck] = field(default_factory=dict)
    """By rank."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceMemory:
    """The caching allocator and the device, bytes; -1 where unknown."""

    allocated_bytes: int
    active_bytes: int
    reserved_bytes: int
    inactive_split_bytes: int
    capacity_bytes: int
    free_bytes: int
    retries: int
    ooms: int

    @property
    def headroom_bytes(self) -> int:
        """Capacity - (reserved + non-torch), or -1 while the capacity is unknown."""
        if self.capacity_bytes < 0:
            return -1
        if self.free_bytes < 0:
            return self.capacity_bytes - self.reserved_bytes
        return min(self.free_bytes, self.capacity_bytes - self.reserved_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Risk:
    """How close a rank is to running out of one memory. Ranks share the host: there it is of all."""

    pool: str
    ratio: float
    """0: none in sight; 1: it is happening."""
    cause: str
    """``growth``, ``spike``, ``fragmentation``, ``non-torch``, ``static`` or ``none``."""
    steps_left: float | None = None
    """Steps until the capacity is reached, where there is a trend."""
    steps_soonest: float | None = None
    steps_latest: float | None = None
    """The interval that the trend supports; None: no end."""
    growth_bytes_per_step: float | None = None
    used_bytes: int = -1
    capacity_bytes: int = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class Remedy:
    """A way out of a finding."""

    cause: str
    dialect: str
    """What *diff* changes: ``DeepSpeed JSON``, ``Python (FSDP2)``, ``environment``, ..."""
    diff: str
    """Lines that go begin with ``-``, lines that come with ``+``."""
    gain_low_seconds: float | None = None
    """What a step is expected to become shorter by, at least and at most; None where it will not."""
    gain_high_seconds: float | None = None
    frees_bytes: int | None = None
    """Memory of a rank that is expected to become free."""
    effect: str = ""
    """What else is expected, in words."""
    price: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """Something that a person should know."""

    rule: str
    severity: str
    """``critical``, ``warning`` or ``info``."""
    text: str
    rank: int = -1
    """-1: the whole run."""
    code: str = ""
    """Of the rule's page: ``zeromon rule CODE``."""
    remedy: Remedy | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """What NVML says of a rank's device; None where it does not say."""

    name: str = ""
    used_bytes: int | None = None
    total_bytes: int | None = None
    utilization_ratio: float | None = None
    power_watts: float | None = None
    temperature_celsius: float | None = None
    pcie_receive_bytes_per_second: float | None = None
    pcie_transmit_bytes_per_second: float | None = None
    nvlink_receive_bytes_per_second: float | None = None
    nvlink_transmit_bytes_per_second: float | None = None
    throttle_reasons: tuple[str, ...] = ()
    ecc_errors: int | None = None
    xid: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Pressure:
    """What a process waits for on its host, over the last seconds."""

    cpu_wait_ratio: float
    """The share of the time that its main thread could run and had no CPU."""
    major_faults_per_second: float
    """Pages that had to come from disk."""
    most_cpu_wait_ratio: float = 0.0
    """The largest of such shares in the last minute."""
    cpus: float | None = None
    """That the process may use; None where unknown."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HostMemory:
    """The host's memory around a process, as the kernel accounts it; -1 where unknown."""

    cgroup: str = ""
    """The tightest cgroup with a limit, "" without any."""
    limit_bytes: int = -1
    usage_bytes: int = -1
    headroom_bytes: int = -1
    """What can still be taken: page cache that is given back counts as free."""
    oom_kills: int = -1
    """Processes of the cgroup that the kernel has killed for memory since it is watched."""
    kills_at_end: int = 0
    """Those that were counted about when this rank ended."""
    oom_kills_everywhere: int = 0
    """The same of the whole machine: evidence only where the cgroup does not count."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Disk:
    """The disk that state is offloaded to, and the process's own I/O; None where unknown."""

    path: str = ""
    free_bytes: int | None = None
    total_bytes: int | None = None
    device: str = ""
    device_read_bytes: int | None = None
    """By all processes since boot, as are the next three."""
    device_written_bytes: int | None = None
    device_busy_seconds: float | None = None
    """With requests under way."""
    device_queue_seconds: float | None = None
    """The same, each request by itself."""
    busy_ratio: float | None = None
    """The share of the last ten seconds in which its device had requests under way."""
    requests_at_once: float | None = None
    """Mean over the time in which it had some; of the last ten seconds with enough of that."""
    busy_bytes_per_second: float | None = None
    """What it moved in that time, both ways."""
    best_busy_bytes_per_second: float | None = None
    """The most of that since the run is watched."""
    read_limit_bytes_per_second: float | None = None
    """What the cgroup allows; None without a limit."""
    write_limit_bytes_per_second: float | None = None
    process_read_bytes: int | None = None
    process_written_bytes: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class OutOfMemory:
    """An allocation on the device that failed."""

    requested_bytes: int
    free_bytes: int
    total_bytes: int
    largest_block_bytes: int = -1
    """The largest free block in the allocator's cache, -1 where unknown."""


KILLED_FOR_MEMORY = "killed by the kernel for host memory"
"""How a rank ended that the OOM killer ended."""
NOT_SEEN = "not seen for"
"""How a rank is that Prometheus has no samples of any more; a time follows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankSnapshot:
    """One rank, now."""

    rank: int
    local_rank: int
    world_size: int
    pid: int
    node: str
    device: str
    strategy: str
    alive: bool
    ended: str
    """Empty while alive; else how it ended: ``finished``, ``SIGKILL``, ``exit code 1``, ..."""
    failed: bool
    exception: str
    step: int
    steps: int
    step_seconds: float | None
    """Median of the last steps."""
    steps_seconds_total: float
    step_buckets: tuple[int, ...]
    phase: str
    unit: str
    phase_seconds: dict[str, float]
    collectives: tuple[CollectiveRow, ...]
    untimed: dict[str, int]
    unattributed: dict[str, int]
    overlap_ratio: float | None
    exposed_ratio: float | None
    """Exposed communication as a share of the last timed steps."""
    exposed_seconds: float | None
    """Exposed communication a step, mean of the last timed steps."""
    in_flight: tuple[InFlight, ...]
    units: tuple[UnitRow, ...]
    memory: DeviceMemory | None
    rss_bytes: int
    host_available_bytes: int
    pinned_bytes: int
    dropped: int
    errors: int
    overhead_ratio: float | None
    overhead_noise_ratio: float | None
    started_ns: int
    last_event_ns: int
    recent: tuple[StepSummary, ...]
    risks: tuple[Risk, ...] = ()
    device_stats: Device | None = None
    disk: Disk | None = None
    host: HostMemory | None = None
    pressure: Pressure | None = None
    out_of_memory: OutOfMemory | None = None
    """The last allocation that failed."""
    micro_steps: int = 0
    backwards_since_step: int = 0
    skipped_steps: int = 0
    engines: tuple[EngineRow, ...] = ()
    settings: tuple[Setting, ...] = ()
    gathers: tuple[GatherRow, ...] = ()
    transfers: tuple[TransferRow, ...] = ()
    roles: tuple[RoleRow, ...] = ()
    groups: tuple[GroupProgress, ...] = ()
    wait_seconds: float | None = None
    """How long it waits a step for ranks that arrive later, on this node."""
    late_seconds: float | None = None
    """How long the others wait for it alone."""
    loader: dict[str, Any] = field(default_factory=dict)
    """Settings of its newest DataLoader."""
    models: tuple[dict[str, Any], ...] = ()
    """What the rank told of its models; see :func:`zeromon.expected.read_facts`."""
    planned: dict[str, Any] = field(default_factory=dict)
    """The same of a DeepSpeed engine that is being made."""
    expected: tuple[ExpectedRow, ...] = ()
    """Roles measured against predicted; empty while no model is known."""
    traffic: tuple[TrafficRow, ...] = ()
    """The most exposed first."""
    sizes: tuple[SizeRow, ...] = ()
    capture: RankCapture | None = None
    check: TraceCheck | None = None
    """Of the last trace that was taken."""
    links: Links | None = None
    unsharded_peak_bytes: int = -1
    """Most bytes of gathered parameters at once so far; -1 where units do not say."""
    unseen: tuple[str, ...] = ()
    """Names that this version of a framework lacks: what hangs on them is unknown."""
    stack: tuple[str, ...] = ()
    """Where the script is, the outermost call first; told while a run that was joined stands still."""

    @property
    def silent(self) -> bool:
        """Whether nothing is known of how it is now."""
        return self.ended.startswith(NOT_SEEN)

    @property
    def stopped(self) -> str:
        """By what somebody or the launcher asked it to end; "" where nobody did."""
        if self.ended in ("SIGTERM", "SIGINT"):
            return self.ended
        return "Ctrl-C" if self.exception.startswith("KeyboardInterrupt") else ""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeView:
    """One node of a run, as another sees it."""

    node: str
    address: str
    """Of its collector, ``host:port``; "" where unknown."""
    first_rank: int
    ranks: int
    here: bool = False
    heard_seconds: float | None = None
    """Since its collector was last heard; None before the first time."""
    silent: bool = False
    """For so long that it is taken for gone."""
    round_trip_seconds: float | None = None
    """To the head and back, the shortest of the last exchanges; None for the head."""
    clock_offset_seconds: float | None = None
    """Its monotonic clock less that of the head."""
    clock_error_seconds: float | None = None

    def has(self, rank: int) -> bool:
        """Whether *rank* is one of its own; launchers number them one after another."""
        return self.first_rank <= rank < self.first_rank + self.ranks


@dataclass(frozen=True, slots=True, kw_only=True)
class Away:
    """A rank of another node."""

    rank: int
    node: str
    alive: bool
    failed: bool
    ended: str
    doing: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Health:
    """How a collector does."""

    runs: int
    """Live ones that it follows."""
    ticks: int
    """How often it has read the rings."""
    busy_seconds: float
    """Time that this took."""
    last_tick_wall: float
    """When it did so last, seconds since the epoch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """A figure over all ranks of a run: some of its quantiles, to half a percent."""

    least: float
    p5: float
    median: float
    p95: float
    most: float


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetNode:
    """One node of a large run; figures are those of its worst rank, None where unknown."""

    node: str
    address: str
    """Of its collector, as Prometheus scrapes it."""
    ranks: int
    up: int
    failed: int
    silent_seconds: float = 0.0
    """How long nothing has been heard of it; 0 while it answers."""
    step_seconds: float | None = None
    exposed_ratio: float | None = None
    late_seconds: float | None = None
    wait_seconds: float | None = None
    memory_bytes: float | None = None
    """Reserved on the device, or resident on the host where there is none."""
    risk_ratio: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Fleet:
    """All of a run that is too large to be shown rank by rank: its picture has those that matter."""

    ranks: int
    up: int
    failed: int
    silent: int
    """Ranks of nodes that nothing has been heard of for some time."""
    waiting: int
    """Ranks in a collective that hangs."""
    nodes: tuple[FleetNode, ...]
    spreads: dict[str, Spread]
    """By the names of :class:`FleetNode`, and ``overlap_ratio`` and ``headroom_bytes``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSnapshot:
    """One run on this node, now."""

    run: str
    command: tuple[str, ...]
    node: str
    started_wall: float
    """Seconds since the epoch."""
    taken_wall: float
    taken_ns: int
    """CLOCK_MONOTONIC of the moment that *ranks* describe."""
    ended: bool
    ranks: tuple[RankSnapshot, ...]
    findings: tuple[Finding, ...]
    note: str = ""
    stragglers: tuple[Straggler, ...] = ()
    hangs: tuple[Hang, ...] = ()
    """Collectives that do not end, the oldest first."""
    capture: Capture | None = None
    """The last trace that was asked for."""
    history_note: str = ""
    """Why no history is written any more, "" while it is."""
    alias: str = ""
    """What this node called the run before it had heard of the others."""
    nodes: tuple[NodeView, ...] = ()
    """All nodes of a run that spreads over several, the head first."""
    away: tuple[Away, ...] = ()
    """Ranks of other nodes that failed, or that a hang is about."""
    nodes_note: str = ""
    """Why ranks of other nodes are not seen, "" where they are."""

    def node_of(self, rank: int) -> str:
        """The node of a rank of another node; "" for one of this node, or where it is not known."""
        found = next((node for node in self.nodes if node.has(rank)), None)
        return found.node if found is not None and not found.here else ""

    fleet: Fleet | None = None
    """The whole, where *ranks* are only a part of it."""
    origin: str = ""
    """The Prometheus that it was read from, where a step stands for those of a while; else ""."""
    every_seconds: float = 1.0
    """How often its source learns something new."""
