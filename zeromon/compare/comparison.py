"""Compares runs: significant differences, and a recommendation. Pure.

A column is one run, or repeats of one program; the first column is the baseline. A difference is
significant when it exceeds the noise: the variation of the steps (99 %), and at least the variation of
one program from run to run (:attr:`zeromon.compare.figures.Metric.least`).
docs/decisions/020-compare.md has the reasons.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from zeromon.compare.environment import (
    Environment,
    Machine,
    doubt,
    environment,
    machine_of,
    slack,
    span,
)
from zeromon.compare.figures import (
    METRIC,
    METRICS,
    PEAK_MEMORY,
    SPEED,
    Figure,
    Metric,
    RunFigures,
    died,
    peak_memory,
)
from zeromon.errors import CompareError
from zeromon.memory import plan
from zeromon.memory.models import whole_numel
from zeromon.memory.reconcile import micro_batch
from zeromon.readout.text import run_state
from zeromon.readout.throughput import samples_per_step, tokens_per_step
from zeromon.ring.strategy import Framework, Strategy
from zeromon.stats.noise import Estimate, half_width, pooled
from zeromon.units import human_bytes, human_count, human_params, human_ratio

MOST_POINTS = 400


@dataclass(frozen=True, slots=True, kw_only=True)
class Course:
    """One line for each column of a comparison."""

    metric: str
    """The figure that is drawn: ``peak_reserved`` where all runs used a device, else ``peak_rss``."""
    lines: tuple[tuple[tuple[int, int], ...], ...]
    """(step, bytes of the rank that has most), of the first run of a column; () where unknown."""


def memory_course(columns: Sequence[Sequence[RunFigures]]) -> Course:
    """Returns the memory of *columns* step by step, in which no peak is lost."""
    firsts = [runs[0] for runs in columns]
    on_device = all(run.peaks["reserved"] >= 0 for run in firsts)
    lines = (run.reserved if on_device else run.resident for run in firsts)
    return Course(metric=peak_memory(on_device=on_device), lines=tuple(map(_reduced, lines)))


def _reduced(points: Sequence[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    """The highest point of each range of steps."""
    known = [point for point in points if point[1] >= 0]
    stretch = -(-len(known) // MOST_POINTS) or 1
    ranges = (known[at : at + stretch] for at in range(0, len(known), stretch))
    return tuple(max(part, key=lambda point: point[1]) for part in ranges)


_TIGHT = plan.RESERVE
_WORTH_A_NOTE = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """A figure of one column, compared with the figure of the first column."""

    value: float | None
    why: str = ""
    """The reason for an unknown figure."""
    half_width: float | None = None
    """Half width of the 99 % interval of the figure; None where unknown."""
    difference: float | None = None
    """Figure minus the figure of the first column; None where unknown."""
    noise: float | None = None
    """The noise that the difference must exceed; None where unknown."""
    error: float | None = None
    """The standard error of the figure; None where unknown."""
    slack: float = 0.0
    """By how much a lack of CPUs may have made the figure worse."""
    low: float | None = None
    high: float | None = None
    """The least and the most that the difference may be without what the machine added."""
    doubtful: bool = False
    """The difference exceeds the noise, and the machine may be the reason."""
    marked: bool = False
    """True if the difference is significant."""
    better: bool = False
    """True if a significant difference is an improvement."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A metric with one cell for each column."""

    name: str
    label: str
    unit: str
    """``s``, ``bytes``, ``1/s``, ``ratio`` or ``count``."""
    more_is_better: bool
    cells: tuple[Cell, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """A run, or repeats of one program."""

    runs: tuple[str, ...]
    strategy: str
    params: int | None
    """Number of parameters of the model; None where not reported, as in the following fields."""
    ranks: int | None
    micro_batch: int | None
    micro_steps: int
    effective_batch: float | None
    tokens: float | None
    """Tokens of an effective batch."""
    ended: str
    died: bool
    steps: int
    """Number of steps that the figures cover: those after the warm-up."""
    taken: int
    lacked: float | None = None
    """The largest share of the time of its steps that a rank had no CPU; None where unknown."""
    doubt: str = ""
    """The reason why its times are not comparable with those of the first column; "" where they are."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Advice:
    """The recommended column. Columns are numbers from 0; None without a significant advantage."""

    take: int | None
    fastest: int | None
    smallest: int | None
    text: str
    reasons: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """The comparison of all columns."""

    columns: tuple[Column, ...]
    rows: tuple[Row, ...]
    advice: Advice
    environment: Environment
    memory: Course

    def row(self, name: str) -> Row:
        """Returns the row of a metric, or of :data:`~zeromon.compare.figures.PEAK_MEMORY`."""
        rows = {row.name: row for row in self.rows}
        if name == PEAK_MEMORY:
            on_device = all(cell.value is not None for cell in rows["peak_reserved"].cells)
            name = peak_memory(on_device=on_device)
        return rows[name]


def compare(columns: Sequence[Sequence[RunFigures]]) -> Comparison:
    """Returns the comparison of *columns*; a column is at least one run, or repeats of one program.

    Raises :class:`CompareError` for runs in one column that are not repeats of one program.
    """
    figures = {metric.name: [_figure(metric, runs) for runs in columns] for metric in METRICS}
    machines = [machine_of(runs) for runs in columns]
    rows = {metric.name: row_of(metric, figures[metric.name], machines) for metric in METRICS}
    steps = rows["step_time"].cells
    doubts = [
        doubt(machines[0], machine) if cell.doubtful else ""
        for machine, cell in zip(machines, steps, strict=True)
    ]
    made = tuple(
        replace(_column(runs), lacked=machine.lacked, doubt=why)
        for runs, machine, why in zip(columns, machines, doubts, strict=True)
    )
    return Comparison(
        columns=made,
        rows=tuple(rows.values()),
        advice=advise(made, figures, machines),
        environment=environment([[run.snapshot for run in runs] for runs in columns]),
        memory=memory_course(columns),
    )


def _figure(metric: Metric, runs: Sequence[RunFigures]) -> Figure:
    figures = [metric.find(run) for run in runs]
    unknown = [figure for figure in figures if isinstance(figure, str)]
    return unknown[0] if unknown else pooled([f for f in figures if isinstance(f, Estimate)])


def row_of(metric: Metric, figures: Sequence[Figure], machines: Sequence[Machine]) -> Row:
    """Returns the row of a metric; *figures* and *machines*: one for each column."""
    cells = [_cell(metric, None, figures[0], machines[0], machines[0])]
    for figure, machine in zip(figures[1:], machines[1:], strict=True):
        cells.append(_cell(metric, figures[0], figure, machines[0], machine))
    return Row(
        name=metric.name,
        label=metric.label,
        unit=metric.unit,
        more_is_better=metric.more_is_better,
        cells=tuple(cells),
    )


def _cell(
    metric: Metric, first: Figure | None, figure: Figure, of_first: Machine, machine: Machine
) -> Cell:
    if isinstance(figure, str):
        return Cell(value=None, why=figure)
    own = Cell(
        value=figure.value,
        half_width=half_width(figure),
        error=figure.error,
        slack=slack(metric, machine, figure.value),
    )
    if not isinstance(first, Estimate):
        return own
    difference, noise = figure.value - first.value, metric.noise(first, figure)
    low, high = span(metric, of_first, machine, first.value, figure.value)
    differs = metric.differ(first, figure)
    marked = differs and noise is not None and (low > noise or high < -noise)
    return replace(
        own,
        difference=difference,
        noise=noise,
        low=low,
        high=high,
        marked=marked,
        better=marked and (difference > 0) is metric.more_is_better,
        doubtful=differs and not marked,
    )


def _batch(m: RunFigures) -> tuple[object, ...]:
    """The values that repeats have in common; tokens and the last batch of an epoch may vary."""
    rank = m.rank
    return m.micro_steps, *((micro_batch(rank), rank.loader.get("length")) if rank else ())


def _column(runs: Sequence[RunFigures]) -> Column:
    first = runs[0]
    alike = {(_strategy(m), m.data_parallel, *_batch(m)) for m in runs}
    if len(alike) > 1:
        names = ", ".join(run.snapshot.run for run in runs)
        text = "Repeats have one strategy, batch and number of ranks."
        raise CompareError(f"{names} are not repeats of one program", text)
    dead = [run for run in runs if died(run.snapshot)]
    samples, tokens = samples_per_step(first.snapshot), tokens_per_step(first.snapshot)
    return Column(
        runs=tuple(run.snapshot.run for run in runs),
        strategy=_strategy(first),
        params=whole_numel(first.snapshot)[0],
        ranks=first.data_parallel,
        micro_batch=micro_batch(first.rank) if first.rank is not None else None,
        micro_steps=first.micro_steps,
        effective_batch=None if isinstance(samples, str) else samples,
        tokens=None if isinstance(tokens, str) else tokens,
        ended=run_state((dead or runs)[0].snapshot),
        died=bool(dead),
        steps=sum(len(run.seconds) for run in runs),
        taken=sum(run.taken for run in runs),
    )


def _strategy(m: RunFigures) -> str:
    how = m.rank.sharding_strategy if m.rank is not None else Strategy()
    has_wrapper = how.framework is not Framework.UNKNOWN or not how.parts
    if m.described is None or not has_wrapper:
        return m.rank.strategy if m.rank is not None else "unknown"
    shards = m.described.optimizer_numel is not None
    added = [*(["sharded optimizer"] if shards else []), *how.parts]
    return " + ".join([m.described.plan.label, *added])


# ---- recommendation -------------------------------------------------------------------------------


def letter(number: int) -> str:
    """Returns the letter of a column, ``A``, ``B``, ...; ``#27`` and so on after ``Z``."""
    return chr(ord("A") + number) if number < 26 else f"#{number + 1}"


def names_of(columns: Sequence[Column]) -> list[str]:
    """Returns the names of the columns: ``B (ZeRO-2)``, or ``B (run)`` if strategies repeat."""
    by_strategy = len({column.strategy for column in columns}) == len(columns)
    return [
        f"{letter(i)} ({column.strategy if by_strategy else column.runs[0]})"
        for i, column in enumerate(columns)
    ]


def advise(
    columns: Sequence[Column], figures: Mapping[str, Sequence[Figure]], machines: Sequence[Machine]
) -> Advice:
    """Returns the recommended column: one that finished and whose advantage exceeds the noise."""
    names = names_of(columns)
    living = [i for i, column in enumerate(columns) if not column.died]
    deaths = [f"{names[i]} {column.ended}" for i, column in enumerate(columns) if column.died]
    params = {p for i in living if (p := columns[i].params) is not None}
    if not living or len(params) > 1:
        sizes = ", ".join(map(human_params, sorted(params)))
        why = f"their models differ ({sizes} parameters)" if living else "all of them died"
        return Advice(
            take=None, fastest=None, smallest=None, text=f"take none: {why}", reasons=(*deaths,)
        )
    contest = _contest(columns, figures, living, machines)
    take, text = contest.winner()
    reasons = [*contest.reasons(take), *deaths]
    ranks = sorted({count for i in living if (count := columns[i].ranks) is not None})
    if len(ranks) > 1 and contest.speeds:
        counts = ", ".join(map(str, ranks))
        reasons.append(
            f"speeds are totals over all ranks, and the number of ranks differs ({counts})"
        )
    reasons += [f"{names[i]}: {columns[i].doubt}" for i in living if columns[i].doubt]
    if take is not None:
        reasons += [*_skipped(names[take], columns[take], figures["skipped_steps"][take])]
        reasons.append(_limit(names[take], take, figures))
    return Advice(
        take=take,
        fastest=_alone(contest.fast(contest.speeds)),
        smallest=_alone(contest.small(contest.memory)),
        text=text,
        reasons=tuple(reasons),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Contest:
    """The criteria for columns that did not die: figures by column, empty if one is unknown."""

    names: Sequence[str]
    unit: str
    """The unit of the speeds; without speeds, the reason."""
    speeds: Mapping[int, Estimate]
    """Speed at the median step."""
    achieved: Mapping[int, Estimate]
    """Speed over all steps, pauses included."""
    peak: Metric
    memory: Mapping[int, Estimate]
    headroom: Mapping[int, float]
    machines: Sequence[Machine]

    def fast(self, among: Mapping[int, Estimate]) -> list[int]:
        """Returns the column with the fastest median step, and the columns within its noise."""
        if not among:
            return []
        best = max(among, key=lambda i: among[i].value)
        return [best, *(i for i in among if i != best and not self._slower(i, best))]

    def _slower(self, one: int, best: int) -> bool:
        """Returns whether column *one* is slower than *best* by more than the noise, pauses included.

        What a lack of CPUs or a neighbour may have added to its steps is not counted.
        """
        if self.achieved[one].value > self.achieved[best].value:
            return False
        fast, slow = self.speeds[best], self.speeds[one]
        noise = SPEED.noise(fast, slow)
        most = span(SPEED, self.machines[best], self.machines[one], fast.value, slow.value).high
        return SPEED.differ(fast, slow) and noise is not None and most < -noise

    def small(self, among: Mapping[int, Estimate]) -> list[int]:
        """Returns the column with the lowest peak, and the columns within its noise."""
        if not among:
            return []
        best = min(among, key=lambda i: among[i].value)
        return [
            best,
            *(i for i in among if i != best and not self.peak.differ(among[best], among[i])),
        ]

    def winner(self) -> tuple[int | None, str]:
        """Returns the recommended column, None for a tie, and the recommendation as text."""
        if not self.speeds:
            return None, f"take none: their speed cannot be compared: {self.unit}"
        if len(self.speeds) == 1:
            (only,) = self.speeds
            return only, f"take {self.names[only]}: the only one that did not die"
        roomy = {i: s for i, s in self.speeds.items() if self.headroom.get(i, 1.0) >= _TIGHT}
        speeds = roomy or self.speeds
        fast = self.fast(speeds)
        if (best := _alone(fast)) is not None:
            return best, f"take {self.names[best]}: {self._lead(best, speeds)}"
        best = _alone(self.small({i: self.memory[i] for i in fast if i in self.memory}))
        if best is not None and (rivals := self._rivals(best, fast)):
            names, equals = (" and ".join(self.names[i] for i in sorted(s)) for s in (fast, rivals))
            return None, f"take any of {names}: {equals} equals {self.names[best]} within the noise"
        if best is not None:
            others = " and ".join(self.names[i] for i in fast if i != best)
            return best, (
                f"take {self.names[best]}: as fast as {others} within the noise, and it "
                f"{self._less(best, fast)}"
            )
        names = ", ".join(self.names[i] for i in sorted(fast))
        return None, f"take any of {names}: neither speed nor memory differs significantly"

    def _rivals(self, best: int, fast: Sequence[int]) -> list[int]:
        """Returns columns outside *fast* over which *best*, by its noise, has no advantage."""
        rest = [i for i in self.speeds if i not in fast and not self._slower(i, best)]
        memory = {i: self.memory[i] for i in (best, *rest) if i in self.memory}
        return [i for i in self.small(memory) if i != best]

    def _lead(self, best: int, among: Mapping[int, Estimate]) -> str:
        """Returns the lead in speed, such as ``12 % (± 2) faster than C (ZeRO-3)``, and the headroom."""
        others = [i for i in among if i != best]
        text = "the only one with room to spare"
        if others:
            second = max(others, key=lambda i: among[i].value)
            behind = among[second]
            gain = among[best].value / behind.value - 1
            noise = (SPEED.noise(behind, among[best]) or 0.0) / behind.value
            text = f"{gain * 100:.0f} % (± {noise * 100:.0f}) faster than {self.names[second]}"
        if best in self.headroom:
            text += f", with {human_ratio(self.headroom[best])} of its device free"
        return text

    def _less(self, best: int, among: Sequence[int]) -> str:
        """Returns the advantage in memory: ``needs 1.2 GiB (12.0 %) less than C (ZeRO-3)``."""
        second = min((i for i in among if i != best), key=lambda i: self.memory[i].value)
        less = self.memory[second].value - self.memory[best].value
        share = human_ratio(less / self.memory[second].value)
        return f"needs {human_bytes(less)} ({share}) less than {self.names[second]}"

    def reasons(self, take: int | None) -> list[str]:
        """Returns further notes on the recommendation."""
        lines = [
            f"{self.names[i]} left {human_ratio(free)} of its device free: "
            "a longer batch may run out of memory"
            for i, free in self.headroom.items()
            if free < _TIGHT
        ]
        if take is not None and self.unit == "steps/s":
            lines.append("no batch size is known: steps of all runs count as equal work")
        smallest = _alone(self.small(self.memory))
        if smallest is not None and smallest != take and len(self.memory) > 1:
            lines.append(f"{self.names[smallest]} {self._less(smallest, list(self.memory))}")
        return lines


def _alone(best: Sequence[int]) -> int | None:
    return best[0] if len(best) == 1 else None


def _contest(
    columns: Sequence[Column],
    figures: Mapping[str, Sequence[Figure]],
    living: Sequence[int],
    machines: Sequence[Machine],
) -> _Contest:
    def known(name: str) -> dict[int, Estimate]:
        return {i: f for i in living if isinstance(f := figures[name][i], Estimate)}

    def of_all(name: str) -> dict[int, Estimate]:
        figures_by_column = known(name)
        return figures_by_column if len(figures_by_column) == len(living) else {}

    times, overall = of_all("step_time"), of_all("steps_per_second")
    work, unit = _work(columns, living)
    if not times or not overall:
        work, unit = {}, "one has no step after the warm-up"
    peak = METRIC[peak_memory(on_device=bool(of_all("peak_reserved")))]
    return _Contest(
        names=names_of(columns),
        unit=unit,
        speeds={i: times[i].inverted().scaled(amount) for i, amount in work.items()},
        achieved={i: overall[i].scaled(amount) for i, amount in work.items()},
        peak=peak,
        memory=of_all(peak.name),
        headroom={i: f.value for i, f in known("headroom").items()},
        machines=machines,
    )


def _work(columns: Sequence[Column], living: Sequence[int]) -> tuple[dict[int, float], str]:
    """Returns the work of a step by column and the unit of its rate; or {} and the reason."""
    for unit, amounts in (
        ("tokens/s", {i: columns[i].tokens for i in living}),
        ("samples/s", {i: columns[i].effective_batch for i in living}),
    ):
        known = {i: amount for i, amount in amounts.items() if amount}
        if len(known) == len(living):
            return known, unit
    if any(columns[i].effective_batch for i in living):
        return {}, "not all reported their batch, and the batches may differ"
    return dict.fromkeys(living, 1.0), "steps/s"


def _skipped(name: str, column: Column, skipped: Figure) -> Iterator[str]:
    """Yields a note on skipped steps, where they are many."""
    if isinstance(skipped, Estimate) and skipped.value > _WORTH_A_NOTE / 2 * column.steps:
        steps = human_count(skipped.value)
        yield f"{steps} steps of {name} were skipped, and changed no parameter"


_WAITS = {"exposed_share": "exposed communication", "data_wait_share": "waiting for data"}


def _limit(name: str, take: int, figures: Mapping[str, Sequence[Figure]]) -> str:
    """Returns a note on the largest wait in a step."""
    shares = {
        what: f.value
        for metric, what in _WAITS.items()
        if isinstance(f := figures[metric][take], Estimate)
    }
    step, blocked = figures["step_time"][take], figures["offload_time"][take]
    if isinstance(step, Estimate) and isinstance(blocked, Estimate):
        shares["waiting for offloaded state"] = blocked.value / step.value
    what = max(shares, key=lambda wait: shares[wait], default="")
    if not what or shares[what] < _WORTH_A_NOTE:
        return f"no wait takes {_WORTH_A_NOTE * 100:.0f} % of a step of {name}: it computes"
    return f"what limits {name}: {what}, {human_ratio(shares[what])} of a step"
