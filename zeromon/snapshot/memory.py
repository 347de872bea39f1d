"""Memory by role, measured against predicted, the allocator, out-of-memory risk, offload transfers."""

from dataclasses import dataclass

from zeromon.ring.codes import TextEnum


class Pool(TextEnum):
    """A memory that can run out."""

    DEVICE = "device"
    HOST = "host"


class RiskCause(TextEnum):
    """Why a memory may run out."""

    GROWTH = "growth"
    """Each step leaves more behind."""
    SPIKE = "spike"
    """The largest steps, by the tail of their distribution."""
    FRAGMENTATION = "fragmentation"
    """The allocator reserves more than it can use."""
    NON_TORCH = "non-torch"
    """Memory of other libraries and processes grows."""
    STATIC = "static"
    """The peak itself leaves no margin."""
    NONE = "none"

    @classmethod
    def _missing_(cls, _: object) -> "RiskCause":
        """No cause, for the text of another version."""
        return cls.NONE


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
    """Bytes by the paper's arithmetic."""
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
class Unattributed:
    """Bytes that no role accounts for."""

    kind: str
    place: str
    nbytes: int


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
    peak_bytes: int = -1
    """The most that the allocator has handed out."""
    peak_phase: str = ""
    """The phase in which it did; "setup" before the first forward, "" where unknown."""
    peak_step: int = 0
    peaks: tuple[tuple[int, int], ...] = ()
    """The last steps, as the host counts them, in which the peak rose, and to how many bytes."""

    @property
    def headroom_bytes(self) -> int:
        """Capacity - (reserved + non-torch), or -1 while the capacity is unknown."""
        if self.capacity_bytes < 0:
            return -1
        if self.free_bytes < 0:
            return self.capacity_bytes - self.reserved_bytes if self.reserved_bytes >= 0 else -1
        # A limit by set_per_process_memory_fraction() lowers the capacity, and not the free bytes
        return min(self.free_bytes, self.capacity_bytes - self.reserved_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Risk:
    """How close a rank is to running out of one memory. Ranks share the host: there it is of all."""

    pool: Pool
    ratio: float
    """0: none in sight; 1: it is happening."""
    cause: RiskCause
    steps_left: float | None = None
    """Steps until the capacity is reached, where there is a trend."""
    steps_soonest: float | None = None
    steps_latest: float | None = None
    """The interval that the trend supports; None: no end."""
    growth_bytes_per_step: float | None = None
    since_step: int = 0
    """The first step of the growth; 0 without any."""
    grown_bytes: int = 0
    """Since that step."""
    growing_ranks: tuple[int, ...] = ()
    """The ranks whose use of the host grows; () where all do, and on a device."""
    used_bytes: int = -1
    capacity_bytes: int = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class OutOfMemory:
    """An allocation on the device that failed."""

    requested_bytes: int
    free_bytes: int
    total_bytes: int
    largest_block_bytes: int = -1
    """The largest free block in the allocator's cache, -1 where unknown."""
    phase: str = ""
    """The phase that asked; "" between phases."""


KILLED_FOR_MEMORY = "killed by the kernel for host memory"
"""How a rank ended that the OOM killer ended."""
