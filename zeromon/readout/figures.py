"""The catalogue of figures: what each is called, its unit, how it is read, its metric, its level. Pure.

A view chooses figures from here and decides their order, width and colour. What it does not decide is
how a figure is read from a snapshot, in which unit it is shown and which thresholds it has.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

from zeromon.base.units import (
    human_bytes,
    human_calls,
    human_count,
    human_rate,
    human_ratio,
    human_seconds,
)
from zeromon.readout.breakdown import WINDOW
from zeromon.ring.codes import Scalar
from zeromon.snapshot import RankSnapshot, RunSnapshot
from zeromon.snapshot.levels import EXPOSED as EXPOSED_LEVEL, OOM, Level
from zeromon.snapshot.run import Fleet, FleetNode
from zeromon.snapshot.step import ScalarRow

GIB = 1 << 30
LAST_STEPS = f"last {WINDOW} steps"
"""Text for the window of the means of step time, its parts and exposed communication."""


@dataclass(frozen=True, slots=True)
class Unit:
    """A base unit, and how its values are shown."""

    name: str
    """The base unit, as metric names and file headings have it."""
    symbol: str
    """The unit of a chart's axis or a numeric table."""
    scale: float
    """The factor from the base unit to *symbol*."""
    text: Callable[[float], str]
    """A value with its unit, for people."""

    def scaled(self, value: float | None) -> float | None:
        """*value* in units of *symbol*; None where it is unknown."""
        return None if value is None else self.scale * value


SECONDS = Unit("seconds", "ms", 1e3, human_seconds)
RATIO = Unit("ratio", "%", 100, human_ratio)
BYTES = Unit("bytes", "GiB", 1 / GIB, human_bytes)
COUNT = Unit("", "", 1, human_count)
NUMBER = Unit("", "", 1, "{:.4g}".format)
MEBIBYTES = Unit("bytes", "MiB", 1 / (1 << 20), human_bytes)
"""The unit of amounts that are rarely a GiB: the payload of a collective."""
RATE = Unit("bytes_per_second", "GB/s", 1e-9, human_rate)
CALLS = Unit("per_step", "", 1, human_calls)
INDEX = Unit("", "", 1, str)
"""The number of a rank, which is no amount."""
TEXT = Unit("", "", 1, str)

OfRank = Callable[[RankSnapshot], float | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """One figure of a rank, and of a node or a large run where those have it."""

    name: str
    """A short key, unique in the catalogue."""
    label: str
    """For headings and legends; what follows a comma may be left out."""
    unit: Unit
    of_rank: OfRank
    """None where unknown."""
    field: str = ""
    """Its name in :class:`FleetNode` and :attr:`Fleet.spreads`; "" where those lack it."""
    on_nodes: bool = False
    """True if a :class:`FleetNode` has it: that of the node's worst rank."""
    metrics: tuple[str, ...] = ()
    """Metrics that carry it, without ``zeromon_``; a later one counts where the first is absent."""
    level: Level | None = None

    def of_node(self, node: FleetNode) -> float | None:
        """The value of the node's worst rank; None where unknown."""
        return getattr(node, self.field) if self.on_nodes else None

    def text(self, rank: RankSnapshot) -> str:
        """The value of *rank* for people; ``n/a`` where it is unknown."""
        value = self.of_rank(rank)
        return "n/a" if value is None else self.unit.text(value)

    @property
    def title(self) -> str:
        """The label up to its comma, for a button."""
        return self.label.partition(",")[0]


def held_bytes(rank: RankSnapshot) -> int | None:
    """Reserved on the device, or resident on the host where there is none; None where unknown."""
    nbytes = rank.memory.device.reserved_bytes if rank.memory.device else rank.memory.rss_bytes
    return nbytes if nbytes >= 0 else None


def headroom_bytes(rank: RankSnapshot) -> int | None:
    """Bytes that the device's allocator can still take; None without a device or where unknown."""
    nbytes = rank.memory.device.headroom_bytes if rank.memory.device else -1
    return nbytes if nbytes >= 0 else None


STEPS = Figure(
    name="steps",
    label="steps",
    unit=COUNT,
    of_rank=lambda r: r.steps.last_step,
    metrics=("steps_total",),
)


def mean_step_seconds(rank: RankSnapshot) -> float | None:
    """The mean of the last timed steps, as of every figure of a rank's row; else the median."""
    return rank.steps.median_seconds if rank.steps.mean_seconds is None else rank.steps.mean_seconds


def run_step_seconds(ranks: Sequence[RankSnapshot]) -> float | None:
    """The mean step time of the median rank; None where no step is known."""
    step_times = [seconds for rank in ranks if (seconds := mean_step_seconds(rank))]
    return median(step_times) if step_times else None


STEP = Figure(
    name="step", label=f"step time, mean of the {LAST_STEPS}", unit=SECONDS, of_rank=mean_step_seconds,
    field="step_seconds", on_nodes=True, metrics=("step_seconds",),
)  # fmt: skip
EXPOSED = Figure(
    name="exposed", label=f"exposed communication, {LAST_STEPS}", unit=RATIO,
    of_rank=lambda r: r.communication.exposed_ratio,
    field="exposed_ratio", on_nodes=True, metrics=("exposed_communication_ratio",),
    level=EXPOSED_LEVEL,
)  # fmt: skip
EXPOSED_SECONDS = Figure(
    name="exposed_seconds", label="exposed, per step", unit=SECONDS,
    of_rank=lambda r: r.communication.exposed_seconds,
)  # fmt: skip
OVERLAP = Figure(
    name="overlap", label="overlap", unit=RATIO, of_rank=lambda r: r.communication.overlap_ratio,
    field="overlap_ratio", metrics=("overlap_ratio",),
)  # fmt: skip
LATE = Figure(
    name="late", label="arrives late, per step", unit=SECONDS,
    of_rank=lambda r: r.communication.late_seconds,
    field="late_seconds", on_nodes=True, metrics=("late_seconds",),
)  # fmt: skip
WAITS = Figure(
    name="waits", label="waits for others, per step", unit=SECONDS,
    of_rank=lambda r: r.communication.wait_seconds,
    field="wait_seconds", on_nodes=True, metrics=("wait_for_late_rank_seconds",),
)  # fmt: skip
MEMORY = Figure(
    name="memory", label="memory", unit=BYTES, of_rank=held_bytes, field="memory_bytes",
    on_nodes=True, metrics=("memory_reserved_bytes", "host_memory_rss_bytes"),
)  # fmt: skip
HEADROOM = Figure(
    name="headroom", label="headroom", unit=BYTES, of_rank=headroom_bytes, field="headroom_bytes",
    metrics=("memory_headroom_bytes",),
)  # fmt: skip
RISK = Figure(
    name="risk", label="OOM risk", unit=RATIO, field="risk_ratio", on_nodes=True,
    of_rank=lambda rank: max((risk.ratio for risk in rank.memory.risks), default=None),
    metrics=("oom_risk_ratio",), level=OOM,
)  # fmt: skip

FIGURES = (
    STEPS, STEP, EXPOSED, EXPOSED_SECONDS, OVERLAP, LATE, WAITS, MEMORY, HEADROOM, RISK,
)  # fmt: skip
"""All figures."""

FIGURE = {entry.name: entry for entry in FIGURES}
"""The figures by name."""

MAPPED = (LATE, WAITS, EXPOSED, STEP, MEMORY, RISK)
"""Figures that a map of ranks or nodes can show, the default first."""

SPREAD = (STEP, EXPOSED, OVERLAP, LATE, MEMORY, HEADROOM, RISK)
"""Figures in a table of the spread over all ranks of a large run."""

SPREAD_HEADS = ("min", "5 %", "median", "95 %", "max")


def spread_rows(fleet: Fleet) -> list[tuple[Figure, list[str]]]:
    """The figures of :data:`SPREAD` that are known, with a text for each of :data:`SPREAD_HEADS`."""
    return [
        (entry, [entry.unit.text(v) for v in (s.least, s.p5, s.median, s.p95, s.most)])
        for entry in SPREAD
        if (s := fleet.spreads.get(entry.field)) is not None
    ]


ON_NODES = tuple(entry for entry in FIGURES if entry.on_nodes)
"""Figures that a node of a large run has."""

OVER_RANKS = tuple(entry for entry in FIGURES if entry.field)
"""Figures whose spread over all ranks of a large run is known."""

FIELD_OF_METRIC = {metric: f.field for f in OVER_RANKS for metric in f.metrics}
"""Metric name without ``zeromon_`` -> the name in :class:`FleetNode` and :attr:`Fleet.spreads`."""


# ---- loss, gradient norm and learning rate as text ----------------------------------------------

NAMES = {
    Scalar.LOSS.label: "loss",
    Scalar.GRAD_NORM.label: "gradient norm",
    Scalar.LEARNING_RATE.label: "learning rate",
}


_UNSEEN = "seen only through a logger: W&B, TensorBoard, MLflow, Trainer, Lightning"


def best_informed(run: RunSnapshot) -> RankSnapshot | None:
    """The first of the ranks that know most of their loss, gradient norm and learning rate."""
    return max(run.ranks, key=lambda rank: len(rank.training.scalars), default=None)


def training_text(rank: RankSnapshot) -> str:
    """Loss, gradient norm and learning rate that a logger got on *rank*, and why others are unknown."""
    scalars = {row.name: row for row in rank.training.scalars}
    phrases = [
        f"{called} {value_text(scalars[name])}" for name, called in NAMES.items() if name in scalars
    ]
    missing = [called for name, called in NAMES.items() if name not in scalars]
    if missing:
        names = " and ".join(filter(None, (", ".join(missing[:-1]), missing[-1])))
        phrases.append(f"{names} n/a ({_UNSEEN})")
    return ", ".join(phrases)


def value_text(row: ScalarRow) -> str:
    """The newest value, or since when it is not finite."""
    if row.value is None:
        return f"NaN or infinite (first in step {row.first_nonfinite_step})"
    return NUMBER.text(row.value)
