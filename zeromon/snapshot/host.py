"""Readings of a rank's machine by probes: device, CPU pressure, host memory, disk."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """Readings of a rank's device from the vendor's library; None where it has none."""

    name: str = ""
    used_bytes: int | None = None
    total_bytes: int | None = None
    own_bytes: int | None = None
    """The part of *used_bytes* that the rank's process holds."""
    processes: int | None = None
    """How many use it: those that the driver lists, or the ranks of this run, whichever are more."""
    utilization_ratio: float | None = None
    sm_active_ratio: float | None = None
    """The share of the time in which streaming multiprocessors were in use, mean of all."""
    tensor_active_ratio: float | None = None
    dram_active_ratio: float | None = None
    power_watts: float | None = None
    energy_joules: float | None = None
    """Since the driver was loaded."""
    temperature_celsius: float | None = None
    pcie_receive_bytes_per_second: float | None = None
    pcie_transmit_bytes_per_second: float | None = None
    nvlink_receive_bytes_per_second: float | None = None
    nvlink_transmit_bytes_per_second: float | None = None
    throttle_reasons: tuple[str, ...] = ()
    ecc_errors: int | None = None
    xid: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Energy:
    """Energy that a node has used since a run on it was first watched."""

    seconds: float
    """How long that is."""
    device_joules: float | None
    """Joules of the devices of the run's ranks, each once; None where no device counts."""
    host_joules: float | None
    """Joules of all processors and their memory, whoever used them; None where unknown."""
    host_note: str = ""
    """Why *host_joules* is unknown."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CodeLine:
    """A line of the script that the training thread runs between the phases of its steps."""

    place: str
    """``train.py:111 in log_metrics``."""
    ratio: float
    """The share of the samples of the thread's stack that show it."""
    communicates: bool = False
    """It waits there in a function of torch.distributed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExtensionLock:
    """A lock file of torch's extension cache, for which processes wait until it is removed."""

    path: str
    age_seconds: float
    owner: int | None
    """The pid of the process of this node that holds it; None where none is known to."""
    is_stale: bool
    """It is this user's, and no process of this node holds it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CpuUser:
    """A process of this node that uses CPUs while a rank lacks them."""

    pid: int
    name: str
    """``python train.py``."""
    cpus: float
    """How many it has used, on average."""
    parent: int
    """The pid of its parent."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pressure:
    """Waits of a process on its host since its first step, over the last steps."""

    cpu_wait_ratio: float
    """The share of the time that its main thread could run and had no CPU."""
    major_faults_per_second: float
    """Pages that had to come from disk."""
    minute_cpu_wait_ratio: float = 0.0
    """:attr:`cpu_wait_ratio` of the last minute."""
    held_cpu_wait_ratio: float = 0.0
    """The largest of such shares of a minute since one was a fifth below it: it does not wobble."""
    cpus: float | None = None
    """CPUs that the process may use; None where unknown."""
    steps_cpu_wait_ratio: float | None = None
    """:attr:`cpu_wait_ratio` over all steps that were watched; None where unknown."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HostMemory:
    """The host's memory around a process, as the kernel accounts it; -1 where unknown."""

    cgroup: str = ""
    """The tightest cgroup with a limit, "" without any."""
    limit_bytes: int = -1
    usage_bytes: int = -1
    headroom_bytes: int = -1
    """Bytes that can still be taken: page cache that is given back counts as free."""
    oom_kills: int = -1
    """Processes of the cgroup that the kernel has killed for memory since it is watched."""
    kills_at_end: int = 0
    """Those that were counted about when this rank ended."""
    oom_kills_everywhere: int = 0
    """:attr:`oom_kills` of the whole machine: evidence only where the cgroup does not count."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerMemory:
    """The memory of a rank's DataLoader workers; no figure of the rank itself contains it."""

    count: int
    nbytes: int
    """Bytes of all; a page that several processes share counts in equal parts in each of them."""
    grown_bytes: int = 0
    """Since these workers have started."""
    growth_bytes_per_step: float | None = None
    forked: bool = False
    """They began with the pages of the rank, and copy those that they write to."""


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
    """Seconds with requests under way, each request by itself."""
    busy_ratio: float | None = None
    """The share of the last ten seconds in which its device had requests under way."""
    requests_at_once: float | None = None
    """Mean over the time in which it had some; of the last ten seconds with enough of that."""
    busy_bytes_per_second: float | None = None
    """Bytes/s that it moved in that time, both ways."""
    best_busy_bytes_per_second: float | None = None
    """The most of that since the run is watched."""
    read_limit_bytes_per_second: float | None = None
    """The limit of the cgroup; None without one."""
    write_limit_bytes_per_second: float | None = None
    process_read_bytes: int | None = None
    process_written_bytes: int | None = None
