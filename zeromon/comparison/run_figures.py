"""Computes the figures of a run for comparison, with their uncertainty. Pure.

Units: seconds, bytes, ratios 0..1. Times are means over the ranks of a run, bytes are the maximum over
its ranks. An unknown figure is a text with the reason.
docs/how-to/compare.md defines each figure.
"""

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from zeromon.base.errors import PlanError
from zeromon.memory import plan
from zeromon.memory.reconcile import Described, micro_batch_of_rank, read_model_facts, role_bytes
from zeromon.readout.throughput import samples_per_step, tokens_per_step
from zeromon.ring.codes import Op, Role
from zeromon.snapshot import RankSnapshot, RunSnapshot
from zeromon.snapshot.communication import BUS_FACTOR
from zeromon.snapshot.noise import Estimate, block_estimate, half_width, median_of
from zeromon.snapshot.step import NOT_TIMED

Series = Mapping[str, Sequence[float]]
"""Columns of :func:`zeromon.storage.step_history.queries.by_step`."""

Figure = Estimate | str
"""A figure, or the reason why it is unknown."""

_WARM_UP_SHARE, _MIN_WARM_UP, _MAX_WARM_UP = 0.1, 5, 100
_ENOUGH = 2000
_NO_STEP = "the run has no step after the warm-up"
_NO_DEVICE = "the run used no device"
_NO_COMMUNICATION = "no communication was timed"
_NO_OFFLOAD_REPORT = "the run did not report its offload"


# ---- a run -----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFigures:
    """A run with its steps after the warm-up; one value for each step."""

    snapshot: RunSnapshot
    seconds: tuple[float, ...]
    taken: int
    """All steps that the record has, with the warm-up."""
    exposed: tuple[tuple[float, float], ...]
    """(exposed communication, duration), seconds, of steps with timed communication."""
    data_waits: tuple[tuple[float, float], ...]
    """(wait for data, duration), seconds."""
    offload_waits: tuple[float, ...]
    payload: tuple[float, ...]
    """Payload of the collectives, bytes."""
    micro_steps: int
    peaks: Mapping[str, int]
    """Maximum over all steps of ``allocated``, ``reserved``, ``rss``, ``other``, bytes; -1: unknown."""

    @property
    def rank(self) -> RankSnapshot | None:
        """The first rank that reported its model, else the first rank; None without ranks."""
        ranks = self.snapshot.ranks
        return next((r for r in ranks if r.config.models), ranks[0] if ranks else None)

    @property
    def described(self) -> Described | None:
        """The model of the run; None where no rank reported one."""
        rank = self.rank
        return (
            read_model_facts(rank.config.models[0]) if rank is not None and rank.config.models else None
        )

    @property
    def data_parallel(self) -> int | None:
        """Number of data-parallel ranks; None where unknown."""
        return self.rank.data_parallel_ranks if self.rank is not None else None

    @property
    def has_device(self) -> bool:
        """True if a rank reported device memory."""
        return any(rank.memory.device is not None for rank in self.snapshot.ranks)


def figures_of(snapshot: RunSnapshot, series: Series) -> RunFigures:
    """Returns the figures of a run: *snapshot* with the steps of *series* after the warm-up."""
    rows = _rows_after_warm_up(series["steps"])

    def settled_column(name: str) -> list[float]:
        return [series[name][i] for i in rows]

    def seconds_of(name: str) -> list[float]:
        return [us / 1e6 for us in settled_column(name)]

    steps = seconds_of("duration_us")
    exposed = zip(seconds_of("exposed_us"), steps, settled_column("flags"), strict=True)
    return RunFigures(
        snapshot=snapshot,
        seconds=tuple(steps),
        taken=round(sum(series["steps"])),
        exposed=tuple((waits, step) for waits, step, flags in exposed if not int(flags) & NOT_TIMED),
        data_waits=tuple(zip(seconds_of("data_wait_us"), steps, strict=True)),
        offload_waits=tuple(seconds_of("offload_blocked_us")),
        payload=tuple(settled_column("collective_bytes")),
        micro_steps=round(statistics.median(settled_column("micro_steps") or [0])),
        peaks={
            name: int(max(series[f"{name}_bytes"], default=-1))
            for name in ("allocated", "reserved", "rss", "other")
        },
    )


def _rows_after_warm_up(steps: Sequence[float]) -> list[int]:
    """Returns the rows after the warm-up; rows of several merged steps only if single steps are few."""
    count = len(steps)
    warm_up = max(_MIN_WARM_UP, min(_MAX_WARM_UP, round(count * _WARM_UP_SHARE)))
    rows = list(range(min(warm_up, count), count))
    single_steps = [i for i in rows if steps[i] == 1]
    return single_steps if len(single_steps) >= min(_ENOUGH, len(rows) / 2) else rows


def has_died(run: RunSnapshot) -> bool:
    """Returns whether a rank of the run failed without a stop from outside."""
    return any(rank.status.failed and not rank.status.stopped for rank in run.ranks)


# ---- figures: time ---------------------------------------------------------------------------------


def _step_time(m: RunFigures) -> Figure:
    estimated = median_of(m.seconds) if m.seconds else None
    return estimated if estimated is not None and estimated.value > 0 else _NO_STEP


def _mean_step_time(m: RunFigures) -> Figure:
    return block_estimate(m.seconds, statistics.fmean) if sum(m.seconds) else _NO_STEP


def _per_second(work: Callable[[RunSnapshot], float | str]) -> Callable[[RunFigures], Figure]:
    """Returns a function for the rate of *work*, by the mean step time, which includes pauses."""

    def find_rate(m: RunFigures) -> Figure:
        amount = work(m.snapshot)
        if isinstance(amount, str) or not sum(m.seconds):
            return amount if isinstance(amount, str) else _NO_STEP
        return block_estimate(m.seconds, statistics.fmean).inverted().scaled(amount)

    return find_rate


def _share_of_time(pairs: Sequence[tuple[float, float]]) -> float:
    total = sum(step for _, step in pairs)
    return sum(waited for waited, _ in pairs) / total if total else 0.0


def _exposed_share(m: RunFigures) -> Figure:
    return block_estimate(m.exposed, _share_of_time) if _has_communication(m) else _NO_COMMUNICATION


def _exposed_time(m: RunFigures) -> Figure:
    if not _has_communication(m):
        return _NO_COMMUNICATION
    return block_estimate([waits for waits, _ in m.exposed], statistics.fmean)


def _has_communication(m: RunFigures) -> bool:
    return bool(m.exposed) and any(m.payload)


def _data_wait_share(m: RunFigures) -> Figure:
    return block_estimate(m.data_waits, _share_of_time) if m.data_waits else _NO_STEP


# ---- figures: bytes that move ----------------------------------------------------------------------


_SENT: Mapping[Op, Callable[[int], float]] = BUS_FACTOR | {
    Op.BROADCAST: lambda n: (n - 1) / n,
    Op.REDUCE: lambda n: (n - 1) / n,
    Op.RECV: lambda _: 0.0,
}
"""Bytes sent per byte of payload in a ring of n ranks, mean over the ranks."""


def _sent_per_step(m: RunFigures) -> Figure:
    """Returns the bytes that a rank sends in a step: the payload times the factor of a ring."""
    if not m.payload:
        return _NO_STEP
    mixes = [
        [
            (row.op, row.group_size, row.nbytes)
            for row in rank.communication.traffic or rank.communication.collectives
        ]
        for rank in m.snapshot.ranks
    ]
    payload = max((sum(nbytes for *_, nbytes in mix) for mix in mixes), default=0.0)
    sent = max((sum(_sent_bytes_of_row(*row) for row in mix) for mix in mixes), default=0.0)
    return block_estimate(m.payload, statistics.median).scaled(sent / payload if payload else 0.0)


def _sent_bytes_of_row(op: str, size: int, nbytes: float) -> float:
    factor = _SENT.get(Op.__members__.get(op.upper(), Op.NONE))
    return nbytes * factor(size) if factor is not None and size > 1 else 0.0


def _offloads_state(m: RunFigures) -> bool | None:
    """Returns whether state is offloaded; None where unknown."""
    if any(rank.memory.transfers for rank in m.snapshot.ranks):
        return True
    if m.described is None:
        return None
    return (m.described.plan.optimizer_on, m.described.plan.params_on) != ("device", "device")


def _offload_bytes(m: RunFigures) -> Figure:
    rates = [
        sum(transfer.nbytes for transfer in rank.memory.transfers) / rank.steps.watched_steps
        for rank in m.snapshot.ranks
        if rank.memory.transfers and rank.steps.watched_steps
    ]
    if not rates and _offloads_state(m) is not False:
        return _NO_OFFLOAD_REPORT
    return Estimate(max(rates, default=0.0))


def _offload_time(m: RunFigures) -> Figure:
    if not m.offload_waits or _offloads_state(m) is None:
        return _NO_OFFLOAD_REPORT
    return block_estimate(m.offload_waits, statistics.fmean)


# ---- figures: memory -------------------------------------------------------------------------------


def _peak_of(name: str) -> Callable[[RunFigures], Figure]:
    def find_peak(m: RunFigures) -> Figure:
        if m.peaks[name] >= 0:
            return Estimate(m.peaks[name])
        return "resident memory was not sampled" if name == "rss" else _NO_DEVICE

    return find_peak


def _free_at_peak(m: RunFigures) -> Figure:
    """Returns the share of the device that was free at the peak."""
    capacities = [
        rank.memory.device.capacity_bytes
        for rank in m.snapshot.ranks
        if rank.memory.device is not None and rank.memory.device.capacity_bytes > 0
    ]
    if not capacities or m.peaks["reserved"] < 0:
        return "the size of its device is unknown" if m.has_device else _NO_DEVICE
    used = m.peaks["reserved"] + max(0, m.peaks["other"])
    return Estimate(max(0.0, 1 - used / min(capacities)))


def _role_of(role: str, tier: int) -> Callable[[RunFigures], Figure]:
    def find_bytes(m: RunFigures) -> Figure:
        rank_bytes = [
            sizes[tier] for r in m.snapshot.ranks if (sizes := role_bytes(r, role)) is not None
        ]
        if rank_bytes:
            return Estimate(max(rank_bytes))
        has_census = any(rank.memory.roles for rank in m.snapshot.ranks)
        return Estimate(0) if has_census else "no census of its memory was taken"

    return find_bytes


def _largest_micro_batch(m: RunFigures) -> Figure:
    """Returns the largest micro-batch of ``zeromon plan --from`` for the unchanged run."""
    if not m.has_device:
        return _NO_DEVICE
    try:
        setup = plan.of_run(m.snapshot)
    except PlanError:
        return "the run reported no model metadata"
    largest = plan.predict_row(setup, setup.plan).largest_micro_batch
    if largest is None or m.rank is None or micro_batch_of_rank(m.rank) is None:
        return "the memory of a sample is unknown"
    return Estimate(largest)


# ---- figures: events -------------------------------------------------------------------------------


def _retry_count(m: RunFigures) -> Figure:
    if not m.has_device:
        return _NO_DEVICE
    counts = [rank.memory.device.retries for rank in m.snapshot.ranks if rank.memory.device is not None]
    return _event_count(max(counts)) if min(counts) >= 0 else "the allocator does not count them"


def _event_count(count: int) -> Estimate:
    """Returns a count with Poisson uncertainty, the square root of the count."""
    return Estimate(count, math.sqrt(count))


# ---- the rows --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Metric:
    """A metric of the comparison."""

    name: str
    label: str
    unit: str
    """``s``, ``bytes``, ``1/s``, ``ratio`` or ``count``."""
    find: Callable[[RunFigures], Figure]
    more_is_better: bool = False
    least: float = 0.005
    """Lower bound of the noise: a share of the first run's figure, absolute for a ratio."""

    def noise(self, base: Estimate, target: Estimate) -> float | None:
        """Returns the noise that a significant difference exceeds; None where unknown."""
        width = half_width(base, target)
        min_noise = self.least * (1.0 if self.unit == "ratio" else abs(base.value))
        return None if width is None else max(width, min_noise)

    def differ(self, base: Estimate, target: Estimate) -> bool:
        """Returns whether the difference exceeds the noise."""
        noise = self.noise(base, target)
        return noise is not None and abs(target.value - base.value) > noise


_TIME = 0.02
_DEVICE = 0.01
_RSS = 0.03
_POINT = 0.01

# fmt: off
SPEED = Metric(name="speed", label="speed", unit="1/s", find=_mean_step_time, more_is_better=True,
               least=_TIME)
"""Work per second over all steps; the recommendation uses this metric."""

METRICS = (
    Metric(name="step_time", label="step time, median", unit="s", find=_step_time, least=_TIME),
    Metric(name="mean_step_time", label="step time, mean", unit="s", find=_mean_step_time, least=_TIME),
    Metric(name="steps_per_second", label="steps/s, 1/mean", unit="1/s", find=_per_second(lambda _: 1.0),
           more_is_better=True, least=_TIME),
    Metric(name="samples_per_second", label="samples/s", unit="1/s", find=_per_second(samples_per_step),
           more_is_better=True, least=_TIME),
    Metric(name="tokens_per_second", label="tokens/s", unit="1/s", find=_per_second(tokens_per_step),
           more_is_better=True, least=_TIME),
    Metric(name="exposed_share", label="exposed, all steps", unit="ratio", find=_exposed_share,
           least=_POINT),
    Metric(name="exposed_time", label="exposed per step", unit="s", find=_exposed_time, least=_TIME),
    Metric(name="data_wait_share", label="waits for data", unit="ratio", find=_data_wait_share,
           least=_POINT),
    Metric(name="sent_bytes", label="sent a step", unit="bytes", find=_sent_per_step),
    Metric(name="offload_bytes", label="offloaded a step", unit="bytes", find=_offload_bytes),
    Metric(name="offload_time", label="waits for offload", unit="s", find=_offload_time, least=_TIME),
    Metric(name="peak_reserved", label="peak reserved", unit="bytes", find=_peak_of("reserved"),
           least=_DEVICE),
    Metric(name="peak_allocated", label="peak allocated", unit="bytes", find=_peak_of("allocated"),
           least=_DEVICE),
    Metric(name="peak_rss", label="peak RSS", unit="bytes", find=_peak_of("rss"), least=_RSS),
    Metric(name="headroom", label="headroom", unit="ratio", find=_free_at_peak, more_is_better=True,
           least=_POINT),
    Metric(name="largest_micro_batch", label="largest micro-batch", unit="count",
           find=_largest_micro_batch, more_is_better=True),
    Metric(name="allocation_retries", label="allocation retries", unit="count", find=_retry_count),
    Metric(name="skipped_steps", label="skipped steps", unit="count", find=lambda m: _event_count(
        max((rank.steps.skipped_steps for rank in m.snapshot.ranks), default=0))),
    *(
        Metric(name=f"{tier}.{role.label}", label=f"{tier}: {role.label.replace('_', ' ')}",
               unit="bytes", find=_role_of(role.label, at))
        for at, tier in enumerate(("device", "host", "disk"))
        for role in Role
    ),
)
# fmt: on

METRIC = {metric.name: metric for metric in METRICS}

PEAK_MEMORY = "peak_memory"


def peak_memory(*, on_device: bool) -> str:
    """Returns the metric for :data:`PEAK_MEMORY`; *on_device*: all runs used a device."""
    return "peak_reserved" if on_device else "peak_rss"
