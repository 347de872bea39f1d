"""What a run is measured by: its figures, with their errors or why they are not known. Pure.

Seconds, bytes, ratios 0..1. Over the ranks of a run, times are means and bytes the most on any of them.
docs/compare.md says what each figure means.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from zeromon import plan
from zeromon.comms import BUS_FACTOR
from zeromon.errors import PlanError
from zeromon.events import Op, Role
from zeromon.expected import Described, micro_batch, read_facts, role_bytes
from zeromon.noise import Estimate, estimate, half_width, typical
from zeromon.snapshot import RankSnapshot, RunSnapshot

Series = Mapping[str, Sequence[float]]
"""Columns of :func:`zeromon.history.by_step`."""

Figure = Estimate | str
"""A figure, or why there is none."""

_IDLE = 1
_WARM_UP_SHARE, _LEAST_WARM_UP, _MOST_WARM_UP = 0.1, 5, 100
_ENOUGH = 2000
_NO_STEP = "it has no step after the warm-up"
_NO_DEVICE = "it ran without a device"
_NO_COMMUNICATION = "no communication was timed"
_UNTOLD_OFFLOAD = "what is offloaded was not told"


# ---- a run -----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """A run, and its steps after the warm-up."""

    picture: RunSnapshot
    seconds: tuple[float, ...]
    exposed: tuple[tuple[float, float], ...]
    """(exposed communication, step) of the steps in which it was timed."""
    data_waits: tuple[tuple[float, float], ...]
    """(waiting for data, step)."""
    offload_waits: tuple[float, ...]
    payload: tuple[float, ...]
    """Bytes of collectives."""
    micro_steps: int
    peaks: Mapping[str, int]
    """``allocated``, ``reserved``, ``rss``, ``other``: the most of all steps, -1 where unknown."""

    @property
    def rank(self) -> RankSnapshot | None:
        """The rank that told of its model, else the first."""
        ranks = self.picture.ranks
        return next((r for r in ranks if r.models), ranks[0] if ranks else None)

    @property
    def described(self) -> Described | None:
        """Its model, None where none was told."""
        rank = self.rank
        return read_facts(rank.models[0]) if rank is not None and rank.models else None

    @property
    def data_parallel(self) -> int:
        """How many ranks train on data of their own."""
        if self.described is not None:
            return self.described.plan.ranks
        return self.rank.world_size if self.rank is not None else 0

    @property
    def has_device(self) -> bool:
        """Whether its ranks told of a device's memory."""
        return any(rank.memory is not None for rank in self.picture.ranks)


def measured(picture: RunSnapshot, series: Series) -> Measured:
    """*picture* with the steps of *series* that count."""
    settled = _settled(series["steps"])

    def column(name: str) -> list[float]:
        return [series[name][i] for i in settled]

    def seconds(name: str) -> list[float]:
        return [us / 1e6 for us in column(name)]

    steps = seconds("duration_us")
    exposed = zip(seconds("exposed_us"), steps, column("flags"), strict=True)
    return Measured(
        picture=picture,
        seconds=tuple(steps),
        exposed=tuple((waits, step) for waits, step, flags in exposed if not int(flags) & _IDLE),
        data_waits=tuple(zip(seconds("data_wait_us"), steps, strict=True)),
        offload_waits=tuple(seconds("offload_blocked_us")),
        payload=tuple(column("collective_bytes")),
        micro_steps=round(statistics.median(column("micro_steps") or [0])),
        peaks={
            name: int(max(series[f"{name}_bytes"], default=-1))
            for name in ("allocated", "reserved", "rss", "other")
        },
    )


def _settled(steps: Sequence[float]) -> list[int]:
    """The rows after the warm-up; those merged of several steps only where the others are few."""
    count = len(steps)
    warm_up = max(_LEAST_WARM_UP, min(_MOST_WARM_UP, round(count * _WARM_UP_SHARE)))
    rows = list(range(min(warm_up, count), count))
    whole = [i for i in rows if steps[i] == 1]
    return whole if len(whole) >= min(_ENOUGH, len(rows) / 2) else rows


def died(run: RunSnapshot) -> bool:
    """Whether it ended otherwise than by finishing or by being stopped."""
    return any(rank.failed and not rank.stopped for rank in run.ranks)


# ---- figures: time ---------------------------------------------------------------------------------


def samples_a_step(m: Measured) -> float | str:
    """The effective batch, or why it is not known."""
    size = micro_batch(m.rank) if m.rank is not None else None
    if size is None:
        return "neither an engine nor a DataLoader told its batch size"
    return size * max(1, m.micro_steps) * m.data_parallel


def tokens_a_step(m: Measured) -> float | str:
    """Tokens of an effective batch, or why they are not known."""
    samples = samples_a_step(m)
    length = m.rank.loader.get("length") if m.rank is not None else None
    if isinstance(samples, str):
        return samples
    if not isinstance(length, int) or length < 1:
        return "its batches do not begin with tokens, or not always with as many"
    return samples * length


def _step_time(m: Measured) -> Figure:
    found = typical(m.seconds) if m.seconds else None
    return found if found is not None and found.value > 0 else _NO_STEP


def _per_second(work: Callable[[Measured], float | str]) -> Callable[[Measured], Figure]:
    """*work* a step, by the mean of all steps: pauses count."""

    def find(m: Measured) -> Figure:
        amount = work(m)
        if isinstance(amount, str) or not sum(m.seconds):
            return amount if isinstance(amount, str) else _NO_STEP
        return estimate(m.seconds, statistics.fmean).inverted().scaled(amount)

    return find


def _share(pairs: Sequence[tuple[float, float]]) -> float:
    whole = sum(step for _, step in pairs)
    return sum(part for part, _ in pairs) / whole if whole else 0.0


def _exposed_share(m: Measured) -> Figure:
    return estimate(m.exposed, _share) if _communicates(m) else _NO_COMMUNICATION


def _exposed_time(m: Measured) -> Figure:
    if not _communicates(m):
        return _NO_COMMUNICATION
    return estimate([waits for waits, _ in m.exposed], statistics.fmean)


def _communicates(m: Measured) -> bool:
    return bool(m.exposed) and any(m.payload)


def _data_wait_share(m: Measured) -> Figure:
    return estimate(m.data_waits, _share) if m.data_waits else _NO_STEP


# ---- figures: bytes that move ----------------------------------------------------------------------


_SENT: Mapping[Op, Callable[[int], float]] = BUS_FACTOR | {
    Op.BROADCAST: lambda n: (n - 1) / n,
    Op.REDUCE: lambda n: (n - 1) / n,
    Op.RECV: lambda _: 0.0,
}
"""Bytes that a rank of a ring of n sends for each byte of payload, mean over the ranks."""


def _sent(m: Measured) -> Figure:
    """What a rank sends: the payload, by what a ring sends for it."""
    if not m.payload:
        return _NO_STEP
    mixes = [
        [(row.op, row.group_size, row.nbytes) for row in rank.traffic or rank.collectives]
        for rank in m.picture.ranks
    ]
    payload = max((sum(nbytes for *_, nbytes in mix) for mix in mixes), default=0.0)
    sent = max((sum(_sent_bytes(*row) for row in mix) for mix in mixes), default=0.0)
    return estimate(m.payload, statistics.median).scaled(sent / payload if payload else 0.0)


def _sent_bytes(op: str, size: int, nbytes: float) -> float:
    factor = _SENT.get(Op[op.upper()])
    return nbytes * factor(size) if factor is not None and size > 1 else 0.0


def _offloads(m: Measured) -> bool | None:
    """Whether state is offloaded; None where nobody told."""
    if any(rank.transfers for rank in m.picture.ranks):
        return True
    if m.described is None:
        return None
    return (m.described.plan.optimizer_on, m.described.plan.params_on) != ("device", "device")


def _offload_bytes(m: Measured) -> Figure:
    rates = [
        sum(way.nbytes for way in rank.transfers) / rank.steps
        for rank in m.picture.ranks
        if rank.transfers and rank.steps
    ]
    if not rates and _offloads(m) is not False:
        return _UNTOLD_OFFLOAD
    return Estimate(max(rates, default=0.0))


def _offload_time(m: Measured) -> Figure:
    if not m.offload_waits or _offloads(m) is None:
        return _UNTOLD_OFFLOAD
    return estimate(m.offload_waits, statistics.fmean)


# ---- figures: memory -------------------------------------------------------------------------------


def _peak(name: str) -> Callable[[Measured], Figure]:
    def find(m: Measured) -> Figure:
        if m.peaks[name] >= 0:
            return Estimate(m.peaks[name])
        return "it was not sampled" if name == "rss" else _NO_DEVICE

    return find


def _headroom(m: Measured) -> Figure:
    """The share of the device that stayed free at the peak."""
    capacities = [
        rank.memory.capacity_bytes
        for rank in m.picture.ranks
        if rank.memory is not None and rank.memory.capacity_bytes > 0
    ]
    if not capacities or m.peaks["reserved"] < 0:
        return "the size of its device is unknown" if m.has_device else _NO_DEVICE
    used = m.peaks["reserved"] + max(0, m.peaks["other"])
    return Estimate(max(0.0, 1 - used / min(capacities)))


def _role(role: str, place: int) -> Callable[[Measured], Figure]:
    def find(m: Measured) -> Figure:
        held = [found[place] for r in m.picture.ranks if (found := role_bytes(r, role)) is not None]
        if held:
            return Estimate(max(held))
        told = any(rank.roles for rank in m.picture.ranks)
        return Estimate(0) if told else "no census of its memory was taken"

    return find


def _largest_micro_batch(m: Measured) -> Figure:
    """What ``zeromon plan --from`` says of the run as it is."""
    if not m.has_device:
        return _NO_DEVICE
    try:
        setup = plan.of_run(m.picture)
    except PlanError:
        return "it did not tell its model"
    found = plan.row(setup, setup.plan).largest_micro_batch
    if found is None or m.rank is None or micro_batch(m.rank) is None:
        return "what a sample takes is not known"
    return Estimate(found)


# ---- figures: events -------------------------------------------------------------------------------


def _retries(m: Measured) -> Figure:
    found = [rank.memory.retries for rank in m.picture.ranks if rank.memory is not None]
    return _events(max(found)) if found else _NO_DEVICE


def _skipped(m: Measured) -> Figure:
    return _events(max((rank.skipped_steps for rank in m.picture.ranks), default=0))


def _events(count: int) -> Estimate:
    """As uncertain as the root of their number."""
    return Estimate(count, math.sqrt(count))


# ---- the rows --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Metric:
    """A row of the table."""

    name: str
    label: str
    unit: str
    """``s``, ``bytes``, ``1/s``, ``ratio`` or ``count``."""
    find: Callable[[Measured], Figure]
    more_is_better: bool = False
    least: float = 0.005
    """The least noise: a share of the first run's figure; of a ratio, in points of it."""

    def noise(self, first: Estimate, other: Estimate) -> float | None:
        """What their difference must exceed to be one; None where that cannot be said."""
        half = half_width(first, other)
        least = self.least * (1.0 if self.unit == "ratio" else abs(first.value))
        return None if half is None else max(half, least)

    def differ(self, first: Estimate, other: Estimate) -> bool:
        """Whether their difference is larger than the noise."""
        noise = self.noise(first, other)
        return noise is not None and abs(other.value - first.value) > noise


_TIME = 0.02
_DEVICE = 0.01
_RSS = 0.03
_POINT = 0.01

# fmt: off
SPEED = Metric(name="speed", label="speed", unit="1/s", find=_step_time, more_is_better=True,
               least=_TIME)
"""Work a second at the median step: what runs are chosen by."""

METRICS = (
    Metric(name="step_time", label="step time (median)", unit="s", find=_step_time, least=_TIME),
    Metric(name="steps_per_second", label="steps/s", unit="1/s", find=_per_second(lambda _: 1.0),
           more_is_better=True, least=_TIME),
    Metric(name="samples_per_second", label="samples/s", unit="1/s", find=_per_second(samples_a_step),
           more_is_better=True, least=_TIME),
    Metric(name="tokens_per_second", label="tokens/s", unit="1/s", find=_per_second(tokens_a_step),
           more_is_better=True, least=_TIME),
    Metric(name="exposed_share", label="exposed share", unit="ratio", find=_exposed_share, least=_POINT),
    Metric(name="exposed_time", label="exposed a step", unit="s", find=_exposed_time, least=_TIME),
    Metric(name="data_wait_share", label="waits for data", unit="ratio", find=_data_wait_share,
           least=_POINT),
    Metric(name="sent_bytes", label="sent a step", unit="bytes", find=_sent),
    Metric(name="offload_bytes", label="offloaded a step", unit="bytes", find=_offload_bytes),
    Metric(name="offload_time", label="waits for offload", unit="s", find=_offload_time, least=_TIME),
    Metric(name="peak_reserved", label="peak reserved", unit="bytes", find=_peak("reserved"),
           least=_DEVICE),
    Metric(name="peak_allocated", label="peak allocated", unit="bytes", find=_peak("allocated"),
           least=_DEVICE),
    Metric(name="peak_rss", label="peak RSS", unit="bytes", find=_peak("rss"), least=_RSS),
    Metric(name="headroom", label="headroom", unit="ratio", find=_headroom, more_is_better=True,
           least=_POINT),
    Metric(name="largest_micro_batch", label="largest micro-batch", unit="count",
           find=_largest_micro_batch, more_is_better=True),
    Metric(name="allocation_retries", label="allocation retries", unit="count", find=_retries),
    Metric(name="skipped_steps", label="skipped steps", unit="count", find=_skipped),
    *(
        Metric(name=f"{place}.{role.label}", label=f"{place}: {role.label.replace('_', ' ')}",
               unit="bytes", find=_role(role.label, at))
        for at, place in enumerate(("device", "host", "disk"))
        for role in Role
    ),
)
# fmt: on

METRIC = {metric.name: metric for metric in METRICS}

PEAK_MEMORY = "peak_memory"


def peak_memory(*, on_device: bool) -> str:
    """The metric that :data:`PEAK_MEMORY` stands for; *on_device*: all runs had one."""
    return "peak_reserved" if on_device else "peak_rss"
