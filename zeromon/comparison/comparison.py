"""Compares runs: significant differences, and a recommendation. Pure.

A column is one run, or repeats of one program; the first column is the baseline. A difference is
significant when it exceeds the noise: the variation of the steps (99 %), and at least the variation of
one program from run to run (:attr:`zeromon.comparison.run_figures.Metric.least`).
docs/decisions/020-compare.md has the reasons.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from zeromon.base.errors import CompareError
from zeromon.base.units import human_bytes, human_count, human_params, human_ratio
from zeromon.comparison.environment import (
    Environment,
    Machine,
    cpu_slack,
    doubt_reason,
    environments_of,
    machine_of,
    span,
)
from zeromon.comparison.run_figures import (
    METRIC,
    METRICS,
    PEAK_MEMORY,
    SPEED,
    Figure,
    Metric,
    RunFigures,
    has_died,
    peak_memory,
)
from zeromon.memory import plan
from zeromon.memory.models import whole_numel
from zeromon.memory.reconcile import micro_batch_of_rank
from zeromon.readout.text import run_state
from zeromon.readout.throughput import samples_per_step, tokens_per_step
from zeromon.ring.strategy import Framework, Strategy
from zeromon.snapshot.noise import Estimate, half_width, pooled_mean

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

    def row(self, name: str) -> Row:
        """Returns the row of a metric, or of :data:`~zeromon.comparison.run_figures.PEAK_MEMORY`."""
        rows = {row.name: row for row in self.rows}
        if name == PEAK_MEMORY:
            on_device = all(cell.value is not None for cell in rows["peak_reserved"].cells)
            name = peak_memory(on_device=on_device)
        return rows[name]


def compare(columns: Sequence[Sequence[RunFigures]]) -> Comparison:
    """Returns the comparison of *columns*; a column is at least one run, or repeats of one program.

    Raises :class:`CompareError` for runs in one column that are not repeats of one program.
    """
    by_name = {metric.name: [_figure_of(metric, runs) for runs in columns] for metric in METRICS}
    machines = [machine_of(runs) for runs in columns]
    rows = {metric.name: row_of(metric, by_name[metric.name], machines) for metric in METRICS}
    steps = rows["step_time"].cells
    doubts = [
        doubt_reason(machines[0], machine) if cell.doubtful else ""
        for machine, cell in zip(machines, steps, strict=True)
    ]
    summaries = tuple(
        replace(_column_of_runs(runs), lacked=machine.lacked, doubt=reason)
        for runs, machine, reason in zip(columns, machines, doubts, strict=True)
    )
    return Comparison(
        columns=summaries,
        rows=tuple(rows.values()),
        advice=recommend_column(summaries, by_name, machines),
        environment=environments_of([[run.snapshot for run in runs] for runs in columns]),
    )


def _figure_of(metric: Metric, runs: Sequence[RunFigures]) -> Figure:
    run_figures = [metric.find(run) for run in runs]
    unknown = [run_figure for run_figure in run_figures if isinstance(run_figure, str)]
    return unknown[0] if unknown else pooled_mean([f for f in run_figures if isinstance(f, Estimate)])


def row_of(metric: Metric, column_figures: Sequence[Figure], machines: Sequence[Machine]) -> Row:
    """Returns the row of a metric; *column_figures* and *machines*: one for each column."""
    cells = [_compared_cell(metric, None, column_figures[0], machines[0], machines[0])]
    for compared, machine in zip(column_figures[1:], machines[1:], strict=True):
        cells.append(_compared_cell(metric, column_figures[0], compared, machines[0], machine))
    return Row(
        name=metric.name,
        label=metric.label,
        unit=metric.unit,
        more_is_better=metric.more_is_better,
        cells=tuple(cells),
    )


def _compared_cell(
    metric: Metric, base: Figure | None, target: Figure, of_base: Machine, machine: Machine
) -> Cell:
    if isinstance(target, str):
        return Cell(value=None, why=target)
    cell = Cell(
        value=target.value,
        half_width=half_width(target),
        error=target.error,
        slack=cpu_slack(metric, machine, target.value),
    )
    if not isinstance(base, Estimate):
        return cell
    difference, noise = target.value - base.value, metric.noise(base, target)
    low, high = span(metric, of_base, machine, base.value, target.value)
    differs = metric.differ(base, target)
    marked = differs and noise is not None and (low > noise or high < -noise)
    if metric.unit == "1/s" and min(base.value, target.value) > 0:  # judged as its time is
        time = replace(metric, name="mean_step_time", unit="s", more_is_better=False)
        judged = _compared_cell(time, base.inverted(), target.inverted(), of_base, machine)
        differs, marked = judged.marked or judged.doubtful, judged.marked
    return replace(
        cell, difference=difference, noise=noise, low=low, high=high, marked=marked,
        better=marked and (difference > 0) is metric.more_is_better, doubtful=differs and not marked,
    )  # fmt: skip


def _common_batch_key(m: RunFigures) -> tuple[object, ...]:
    """The values that repeats have in common; tokens and the last batch of an epoch may vary."""
    rank = m.rank
    return m.micro_steps, *(
        (micro_batch_of_rank(rank), rank.config.loader.get("length")) if rank else ()
    )


def _column_of_runs(runs: Sequence[RunFigures]) -> Column:
    first_run = runs[0]
    variants = {(_label_of_strategy(m), m.data_parallel, *_common_batch_key(m)) for m in runs}
    if len(variants) > 1:
        names = ", ".join(run.snapshot.run for run in runs)
        hint = "Repeats have one strategy, batch and number of ranks."
        raise CompareError(f"{names} are not repeats of one program", hint)
    dead_runs = [run for run in runs if has_died(run.snapshot)]
    samples, tokens = samples_per_step(first_run.snapshot), tokens_per_step(first_run.snapshot)
    return Column(
        runs=tuple(run.snapshot.run for run in runs),
        strategy=_label_of_strategy(first_run),
        params=whole_numel(first_run.snapshot)[0],
        ranks=first_run.data_parallel,
        micro_batch=micro_batch_of_rank(first_run.rank) if first_run.rank is not None else None,
        micro_steps=first_run.micro_steps,
        effective_batch=None if isinstance(samples, str) else samples,
        tokens=None if isinstance(tokens, str) else tokens,
        # One dead repeat is enough: the state of the first run would hide it
        ended=run_state((dead_runs or runs)[0].snapshot),
        died=bool(dead_runs),
        steps=sum(len(run.seconds) for run in runs),
        taken=sum(run.taken for run in runs),
    )


def _label_of_strategy(m: RunFigures) -> str:
    sharding = m.rank.sharding_strategy if m.rank is not None else Strategy()
    has_wrapper = sharding.framework is not Framework.UNKNOWN or not sharding.parts
    if m.described is None or not has_wrapper:
        return m.rank.strategy if m.rank is not None else "unknown"
    shards = m.described.optimizer_numel is not None
    added = [*(["sharded optimizer"] if shards else []), *sharding.parts]
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


def recommend_column(
    columns: Sequence[Column], by_name: Mapping[str, Sequence[Figure]], machines: Sequence[Machine]
) -> Advice:
    """Returns the recommended column: one that finished and whose advantage exceeds the noise."""
    names = names_of(columns)
    survivors = [i for i, column in enumerate(columns) if not column.died]
    deaths = [f"{names[i]} {column.ended}" for i, column in enumerate(columns) if column.died]
    params = {p for i in survivors if (p := columns[i].params) is not None}
    if not survivors or len(params) > 1:
        sizes = ", ".join(map(human_params, sorted(params)))
        reason = f"their models differ ({sizes} parameters)" if survivors else "all of them died"
        return Advice(
            take=None, fastest=None, smallest=None, text=f"take none: {reason}", reasons=(*deaths,)
        )
    contest = _build_contest(columns, by_name, survivors, machines)
    pick, headline = contest.pick_winner()
    reasons = [*contest.reasons(pick), *deaths]
    ranks = sorted({count for i in survivors if (count := columns[i].ranks) is not None})
    if len(ranks) > 1 and contest.speeds:
        counts = ", ".join(map(str, ranks))
        reasons.append(f"speeds are totals over all ranks, and the number of ranks differs ({counts})")
    reasons += [f"{names[i]}: {columns[i].doubt}" for i in survivors if columns[i].doubt]
    if pick is not None:
        reasons += [*_skipped_note(names[pick], columns[pick], by_name["skipped_steps"][pick])]
        reasons.append(_largest_wait_note(names[pick], pick, by_name))
    return Advice(
        take=pick,
        fastest=_sole_column(contest.fast(contest.speeds)),
        smallest=_sole_column(contest.small(contest.memory)),
        text=headline,
        reasons=tuple(reasons),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Contest:
    """The criteria for columns that did not die: figures by column, empty if one is unknown."""

    names: Sequence[str]
    unit: str
    """The unit of the speeds; without speeds, the reason."""
    speeds: Mapping[int, Estimate]
    """Speed over all steps, as the rows of rates: a median hides every fourth step that waits."""
    peak: Metric
    memory: Mapping[int, Estimate]
    headroom: Mapping[int, float]
    machines: Sequence[Machine]

    def fast(self, among: Mapping[int, Estimate]) -> list[int]:
        """Returns the column with the highest speed, and the columns within its noise."""
        if not among:
            return []
        top = max(among, key=lambda i: among[i].value)
        return [top, *(i for i in among if i != top and not self._is_slower(i, top))]

    def _is_slower(self, rival: int, top: int) -> bool:
        """Returns whether column *rival* is slower than *top* by more than the noise.

        What a lack of CPUs or a neighbour may have added to its steps is not counted.
        """
        fast, slow = self.speeds[top], self.speeds[rival]
        noise = SPEED.noise(fast, slow)
        _, upper = span(SPEED, self.machines[top], self.machines[rival], fast.value, slow.value)
        return SPEED.differ(fast, slow) and noise is not None and upper < -noise

    def small(self, among: Mapping[int, Estimate]) -> list[int]:
        """Returns the column with the lowest peak, and the columns within its noise."""
        if not among:
            return []
        top = min(among, key=lambda i: among[i].value)
        return [top, *(i for i in among if i != top and not self.peak.differ(among[top], among[i]))]

    def pick_winner(self) -> tuple[int | None, str]:
        """Returns the recommended column, None for a tie, and the recommendation as text."""
        if not self.speeds:
            return None, f"take none: their speed cannot be compared: {self.unit}"
        if len(self.speeds) == 1:
            (only,) = self.speeds
            return only, f"take {self.names[only]}: the only one that did not die"
        # A run without a device has no headroom that could be too small
        roomy = {i: s for i, s in self.speeds.items() if self.headroom.get(i, 1.0) >= _TIGHT}
        speeds = roomy or self.speeds
        fast = self.fast(speeds)
        if (top := _sole_column(fast)) is not None:
            return top, f"take {self.names[top]}: {self._lead_text(top, speeds)}"
        top = _sole_column(self.small({i: self.memory[i] for i in fast if i in self.memory}))
        if top is not None and (rivals := self._rivals_in_memory(top, fast)):
            names, equals = (" and ".join(self.names[i] for i in sorted(s)) for s in (fast, rivals))
            return None, f"take any of {names}: {equals} equals {self.names[top]} within the noise"
        if top is not None:
            rival_names = " and ".join(self.names[i] for i in fast if i != top)
            return top, (
                f"take {self.names[top]}: as fast as {rival_names} within the noise, and it "
                f"{self._memory_lead(top, fast)}"
            )
        names = ", ".join(self.names[i] for i in sorted(fast))
        if any(SPEED.differ(self.speeds[fast[0]], self.speeds[i]) for i in fast[1:]):
            return None, f"take any of {names}: the machine may be the reason for the lead"
        return None, f"take any of {names}: neither speed nor memory differs significantly"

    def _rivals_in_memory(self, top: int, fast: Sequence[int]) -> list[int]:
        """Returns columns outside *fast* over which *top*, by its noise, has no advantage."""
        contenders = [i for i in self.speeds if i not in fast and not self._is_slower(i, top)]
        memory = {i: self.memory[i] for i in (top, *contenders) if i in self.memory}
        return [i for i in self.small(memory) if i != top]

    def _lead_text(self, top: int, among: Mapping[int, Estimate]) -> str:
        """Returns the lead in speed, such as ``12 % (± 2) faster than C (ZeRO-3)``, and the headroom."""
        rivals = [i for i in among if i != top]
        lead = "the only one with room to spare"
        if rivals:
            second = max(rivals, key=lambda i: among[i].value)
            runner_up = among[second]
            gain = among[top].value / runner_up.value - 1
            noise = (SPEED.noise(runner_up, among[top]) or 0.0) / runner_up.value
            lead = f"{gain * 100:.0f} % (± {noise * 100:.0f}) faster than {self.names[second]}"
        if top in self.headroom:
            lead += f", with {human_ratio(self.headroom[top])} of its device free"
        return lead

    def _memory_lead(self, top: int, among: Sequence[int]) -> str:
        """Returns the advantage in memory: ``needs 1.2 GiB (12.0 %) less than C (ZeRO-3)``."""
        second = min((i for i in among if i != top), key=lambda i: self.memory[i].value)
        saved = self.memory[second].value - self.memory[top].value
        share = human_ratio(saved / self.memory[second].value)
        return f"needs {human_bytes(saved)} ({share}) less than {self.names[second]}"

    def reasons(self, pick: int | None) -> list[str]:
        """Returns further notes on the recommendation."""
        notes = [
            f"{self.names[i]} left {human_ratio(free)} of its device free: "
            "a longer batch may run out of memory"
            for i, free in self.headroom.items()
            if free < _TIGHT
        ]
        if pick is not None and self.unit == "steps/s":
            notes.append("no batch size is known: steps of all runs count as equal work")
        smallest = _sole_column(self.small(self.memory))
        if smallest is not None and smallest != pick and len(self.memory) > 1:
            notes.append(f"{self.names[smallest]} {self._memory_lead(smallest, list(self.memory))}")
        return notes


def _sole_column(leaders: Sequence[int]) -> int | None:
    return leaders[0] if len(leaders) == 1 else None


def _build_contest(
    columns: Sequence[Column],
    by_name: Mapping[str, Sequence[Figure]],
    survivors: Sequence[int],
    machines: Sequence[Machine],
) -> _Contest:
    def known_figures(name: str) -> dict[int, Estimate]:
        return {i: f for i in survivors if isinstance(f := by_name[name][i], Estimate)}

    def of_all(name: str) -> dict[int, Estimate]:
        figures_by_column = known_figures(name)
        # A figure that one column lacks must not decide between the others
        return figures_by_column if len(figures_by_column) == len(survivors) else {}

    times = of_all("mean_step_time")
    work, unit = _step_work(columns, survivors)
    if not times:
        work, unit = {}, "one has no step after the warm-up"
    peak = METRIC[peak_memory(on_device=bool(of_all("peak_reserved")))]
    return _Contest(
        names=names_of(columns),
        unit=unit,
        speeds={i: times[i].inverted().scaled(amount) for i, amount in work.items()},
        peak=peak,
        memory=of_all(peak.name),
        headroom={i: f.value for i, f in known_figures("headroom").items()},
        machines=machines,
    )


def _step_work(columns: Sequence[Column], survivors: Sequence[int]) -> tuple[dict[int, float], str]:
    """Returns the work of a step by column and the unit of its rate; or {} and the reason."""
    for unit, amounts in (
        ("tokens/s", {i: columns[i].tokens for i in survivors}),
        ("samples/s", {i: columns[i].effective_batch for i in survivors}),
    ):
        known_amounts = {i: amount for i, amount in amounts.items() if amount}
        if len(known_amounts) == len(survivors):
            return known_amounts, unit
    if any(columns[i].effective_batch for i in survivors):
        return {}, "not all reported their batch, and the batches may differ"
    return dict.fromkeys(survivors, 1.0), "steps/s"


def _skipped_note(name: str, column: Column, skipped: Figure) -> Iterator[str]:
    if isinstance(skipped, Estimate) and skipped.value > _WORTH_A_NOTE / 2 * column.steps:
        steps = human_count(skipped.value)
        yield f"{steps} steps of {name} were skipped, and changed no parameter"


_WAITS = {"exposed_share": "exposed communication", "data_wait_share": "waiting for data"}


def _largest_wait_note(name: str, pick: int, by_name: Mapping[str, Sequence[Figure]]) -> str:
    shares = {
        wait: f.value
        for metric, wait in _WAITS.items()
        if isinstance(f := by_name[metric][pick], Estimate)
    }
    step, blocked = by_name["step_time"][pick], by_name["offload_time"][pick]
    if isinstance(step, Estimate) and isinstance(blocked, Estimate):
        shares["waiting for offloaded state"] = blocked.value / step.value
    longest = max(shares, key=lambda wait: shares[wait], default="")
    if not longest or shares[longest] < _WORTH_A_NOTE:
        return f"no wait takes {_WORTH_A_NOTE * 100:.0f} % of a step of {name}: it computes"
    return f"what limits {name}: {longest}, {human_ratio(shares[longest])} of a step"
