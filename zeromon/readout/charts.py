"""The charts over a run's steps, as data: what is read of a step, unit, limit and forecast. Pure.

The terminal view (``zeromon/tui/plots.py``) and the page (``zeromon_dashboard/charts.py``, which the
HTML report uses, too) each have one renderer that draws any :class:`ChartSpec`. A new chart is a
function that reads a step, and a line in :data:`CHARTS`.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, NamedTuple

from zeromon.readout import figures
from zeromon.ring.codes import Scalar
from zeromon.snapshot import Pool, RankSnapshot, RunSnapshot, StepSummary
from zeromon.snapshot.memory import Risk
from zeromon.snapshot.step import NOT_TIMED


class StepRow(NamedTuple):
    """A row of a step history, with the attributes of a ``StepSummary`` that charts read.

    Smaller than a ``StepSummary``, because a page draws ten thousand rows a second.
    """

    step: int
    flags: int
    duration_us: int
    communication_us: int
    exposed_us: int
    offload_blocked_us: int
    collectives: int
    micro_steps: int
    collective_bytes: int
    allocated_bytes: int
    reserved_bytes: int
    rss_bytes: int
    other_bytes: int
    loss: float | None
    grad_norm: float | None
    samples: float | None
    tokens: float | None

    @property
    def timed(self) -> bool:
        """True if the communication of the step is known."""
        return not self.flags & NOT_TIMED

    @property
    def seconds(self) -> float:
        """The duration."""
        return self.duration_us / 1e6

    @property
    def communication_ns(self) -> int:
        """Length of the union of the timed collectives."""
        return self.communication_us * 1000

    @property
    def exposed_ns(self) -> int:
        """The part of the communication during which nothing was computed."""
        return self.exposed_us * 1000

    @property
    def offload_blocked_ns(self) -> int:
        """How long the training thread waited for offloaded state to move."""
        return self.offload_blocked_us * 1000


def rows_of(columns: Mapping[str, Sequence[Any]]) -> list[StepRow]:
    """The rows of a step history's columns; see :data:`zeromon.storage.step_history.rows.COLUMNS`."""
    return [*map(StepRow._make, zip(*(columns[name] for name in StepRow._fields), strict=True))]


FAR = 0.4
"""A capacity further away than this share of it would flatten the lines of a chart."""

Step = StepSummary | StepRow
Read = Callable[[Step], float | None]
"""A step's value in the base unit (seconds, bytes, 0..1); None where unknown."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChartSpec:
    """One chart: a line for each rank, or, of many ranks, their highest, median and lowest value."""

    name: str
    """The chart's name in code and addresses. Of specs that share a name, one applies to a run."""
    title: str
    """For people, in lower case."""
    quantity: str = ""
    """The quantity of the title's subject that is drawn (``reserved``); "" where the title says it."""
    unit: figures.Unit
    read: Read
    share: Read | None = None
    """The value as a share of the step, 0..1, for views that show shares."""
    beside: tuple[tuple[str, Read], ...] = ()
    """Further lines, by name, where a single rank is drawn."""
    pool: Pool | None = None
    """The memory whose capacity and forecast are drawn; "" for none."""
    shared: bool = False
    """The ranks of a node share the quantity: the limit is that of their sum."""
    overview: bool = False
    """Drawn on the terminal's overview, which has room for two or three charts."""
    applies: Callable[[Sequence[RankSnapshot]], bool] = lambda ranks: True  # noqa: ARG005


@dataclass(frozen=True, slots=True)
class Limit:
    """The capacity of a memory, and the rank that is closest to it."""

    rank: RankSnapshot
    risk: Risk

    @property
    def nbytes(self) -> int:
        """The capacity in bytes; 0 where unknown."""
        return max(0, self.risk.capacity_bytes)


@dataclass(frozen=True, slots=True)
class Forecast:
    """A straight line from the newest use of a memory to its capacity."""

    name: str
    steps: float
    """Steps until the capacity is reached."""
    used_bytes: float
    capacity_bytes: float
    growth_bytes_per_step: float

    def after(self, steps: float) -> float:
        """The bytes that are used *steps* later, at most the capacity."""
        return min(self.capacity_bytes, self.used_bytes + steps * self.growth_bytes_per_step)


def charts_of(ranks: Sequence[RankSnapshot]) -> tuple[ChartSpec, ...]:
    """The charts of a run, in the order of :data:`CHARTS`, one of each name."""
    return tuple(spec for spec in CHARTS if spec.applies(ranks))


def list_names(*, overview: bool = False) -> tuple[str, ...]:
    """The names of all charts, or of those on the terminal's overview; one place on a page for each."""
    return tuple(dict.fromkeys(spec.name for spec in CHARTS if spec.overview or not overview))


def limit_of(spec: ChartSpec, ranks: Sequence[RankSnapshot]) -> Limit | None:
    """The limit that the most endangered of *ranks* has; None for a chart without one."""
    pairs = [(rank, risk) for rank in ranks for risk in rank.memory.risks if risk.pool == spec.pool]
    nearest = max(pairs, key=lambda pair: pair[1].ratio, default=None) if spec.pool else None
    return Limit(*nearest) if nearest is not None else None


def forecasts_of(limit: Limit | None) -> tuple[Forecast, ...]:
    """The expected way to the limit, then the earliest and the latest one; () without growth."""
    if limit is None or limit.risk.steps_left is None:
        return ()
    risk = limit.risk
    outcomes = (
        ("forecast", risk.steps_left),
        ("soonest", risk.steps_soonest),
        ("latest", risk.steps_latest),
    )
    return tuple(
        Forecast(name, steps, risk.used_bytes, risk.capacity_bytes, risk.growth_bytes_per_step or 0.0)
        for name, steps in outcomes
        if steps is not None
    )


# ---- the charts -----------------------------------------------------------------------------------


def _bytes_of(name: str) -> Read:
    getter = attrgetter(name)
    return lambda step: nbytes if (nbytes := getter(step)) >= 0 else None


def _per_second(name: str) -> Read:
    getter = attrgetter(name)

    def rate_of(step: Step) -> float | None:
        count = getter(step)
        return None if count is None or count < 0 or step.seconds <= 0 else count / step.seconds

    return rate_of


def _exposed_time(step: Step) -> float | None:
    """None for a step whose communication was not timed."""
    return step.exposed_ns / 1e9 if step.timed else None


def _exposed_share(step: Step) -> float | None:
    seconds = step.seconds
    return step.exposed_ns / 1e9 / seconds if step.timed and seconds > 0 else None


def _has_device(ranks: Sequence[RankSnapshot]) -> bool:
    return any(rank.memory.device is not None for rank in ranks)


def _counts_tokens(ranks: Sequence[RankSnapshot]) -> bool:
    return any(rank.training.batches is not None and rank.training.batches.tokens for rank in ranks)


def _counts_samples(ranks: Sequence[RankSnapshot]) -> bool:
    """Batches are known, and hold no tokens."""
    return any(rank.training.batches is not None for rank in ranks) and not _counts_tokens(ranks)


def _knows_scalar(scalar: Scalar) -> Callable[[Sequence[RankSnapshot]], bool]:
    """Returns a test whether any rank knows *scalar*: without a logger no place is taken for it."""
    return lambda ranks: any(row.name == scalar.label for rank in ranks for row in rank.training.scalars)


CHARTS: tuple[ChartSpec, ...] = (
    ChartSpec(name="step-time", title="step time", unit=figures.SECONDS, read=attrgetter("seconds"),
              overview=True),
    ChartSpec(name="memory", title="device memory", quantity="reserved", unit=figures.BYTES,
              read=_bytes_of("reserved_bytes"), beside=(("allocated", _bytes_of("allocated_bytes")),),
              pool=Pool.DEVICE, overview=True, applies=_has_device),
    ChartSpec(name="memory", title="host memory (RSS)", unit=figures.BYTES, read=_bytes_of("rss_bytes"),
              pool=Pool.HOST, shared=True, overview=True, applies=lambda ranks: not _has_device(ranks)),
    ChartSpec(name="exposed", title="exposed communication", unit=figures.SECONDS, read=_exposed_time,
              share=_exposed_share),
    ChartSpec(name="throughput", title="tokens/s of a rank", unit=figures.COUNT,
              read=_per_second("tokens"), applies=_counts_tokens),
    ChartSpec(name="throughput", title="samples/s of a rank", unit=figures.COUNT,
              read=_per_second("samples"), applies=_counts_samples),
    ChartSpec(name="loss", title="loss", unit=figures.NUMBER, read=attrgetter("loss"),
              applies=_knows_scalar(Scalar.LOSS)),
    ChartSpec(name="grad-norm", title="gradient norm", unit=figures.NUMBER, read=attrgetter("grad_norm"),
              applies=_knows_scalar(Scalar.GRAD_NORM)),
)  # fmt: skip
"""Every chart, in the order in which views show them."""


# ---- memory of a rank by role over the moments of a record --------------------------------------

EVERYTHING_ELSE = "everything else"


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleBands:
    """Bytes of each role at each moment; the bands of a moment sum to what the rank holds there."""

    rank: int
    place: str
    """``device``: of what the caching allocator has reserved; ``host``: of the resident set."""
    steps: tuple[int, ...]
    bands: dict[str, tuple[int, ...]]
    """Role -> bytes at each of *steps*; last :data:`EVERYTHING_ELSE`, which no role accounts for."""


def role_bands(snapshots: Iterable[RunSnapshot], number: int) -> RoleBands | None:
    """The roles of rank *number* at *snapshots*, in their order; None where none has a memory census."""
    by_step = {
        rank.steps.last_step: rank
        for run in snapshots
        for rank in run.ranks
        if rank.rank == number and rank.memory.roles and figures.held_bytes(rank) is not None
    }
    if not by_step:
        return None
    on_device = any(rank.memory.device is not None for rank in by_step.values())
    # Early snapshots, without a device yet, have bytes of the host: one chart shows one place
    ranks = [rank for rank in by_step.values() if (rank.memory.device is not None) == on_device]
    by_role = [_bytes_by_role(rank) for rank in ranks]
    names = dict.fromkeys(name for row in by_role for name, nbytes in row.items() if nbytes)
    bands = {name: tuple(row.get(name, 0) for row in by_role) for name in names}
    remainders = (
        (figures.held_bytes(rank) or 0) - sum(row.values())
        for rank, row in zip(ranks, by_role, strict=True)
    )
    return RoleBands(
        rank=number,
        place="device" if on_device else "host",
        steps=tuple(rank.steps.last_step for rank in ranks),
        bands=bands | {EVERYTHING_ELSE: tuple(max(0, nbytes) for nbytes in remainders)},
    )


def _bytes_by_role(rank: RankSnapshot) -> dict[str, int]:
    on_device = rank.memory.device is not None
    return {
        row.role.replace("_", " "): row.device_bytes if on_device else row.host_bytes
        for row in rank.memory.roles
    }
