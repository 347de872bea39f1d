"""In which environment each run ran: commit, command, driver, packages, variables. Pure."""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from zeromon.base.units import human_ratio
from zeromon.comparison.run_figures import Metric, RunFigures
from zeromon.readout.text import CHANGED, commit_text
from zeromon.snapshot import RunSnapshot

UNKNOWN, NOT_SET = "n/a", "not set"
_COMMIT, *_ = _OF_MACHINE = ("git commit", "device", "driver")


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """A fact that is not the same in all columns."""

    name: str
    values: tuple[str, ...]
    """One for each column; those of repeats that differ among themselves with `` / `` between them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Environment:
    """The environments of all columns."""

    differences: tuple[Difference, ...]
    same: int
    """How many values are known of each column and the same."""
    unknown: tuple[int, ...]
    """Columns, from 0, whose runs did not record their environment."""


def environments_of(columns: Sequence[Sequence[RunSnapshot]]) -> Environment:
    """Returns what differs between the environments of *columns*; a column is repeats of one run."""
    groups = [[facts for run in runs if (facts := of_run(run))] for runs in columns]
    records = [facts for runs in groups for facts in runs]
    names = dict.fromkeys(name for facts in records for name in facts)
    rows = [
        Difference(name=name, values=tuple(_value_of(name, runs) for runs in groups)) for name in names
    ]
    differ = [
        row for row in rows if len({v for v in row.values if v != UNKNOWN}) > 1 or _is_doubtful(row)
    ]
    return Environment(
        differences=(*_command_differences(columns), *_setting_differences(columns), *differ),
        same=len(rows) - len(differ) if all(groups) else 0,
        unknown=tuple(number for number, runs in enumerate(groups) if not runs),
    )


def of_run(run: RunSnapshot) -> dict[str, str]:
    """Returns name -> value of the environment of a run, by its first rank; {} where it told none."""
    rank = next((rank for rank in run.ranks if rank.config.process.get("packages")), None)
    if rank is None:
        return {}
    process = rank.config.process
    of_machine = zip(_OF_MACHINE, (commit_text(run.revision), rank.device, run.driver), strict=True)
    return {
        **{name: value for name, value in of_machine if value},
        **process.get("packages", {}),
        **{name: value for name, value in process.get("variables", {}).items() if value},
    }


def _value_of(name: str, runs: Sequence[dict[str, str]]) -> str:
    # A variable that is not recorded is not set, while a commit or driver is unknown
    otherwise = UNKNOWN if name in _OF_MACHINE else NOT_SET
    return " / ".join(dict.fromkeys(run.get(name, otherwise) for run in runs)) or UNKNOWN


def _is_doubtful(row: Difference) -> bool:
    """Returns whether equal values may hide a difference: two changed working copies of one commit."""
    return row.name == _COMMIT and any(CHANGED in value for value in row.values)


def _command_differences(columns: Sequence[Sequence[RunSnapshot]]) -> list[Difference]:
    """Returns the words of the commands that are not in all of them; [] where all are alike."""
    commands = [runs[0].command for runs in columns]
    if not all(commands) or len(set(commands)) == 1:
        return []
    options = [_options_with_values(command) for command in commands]
    common = set.intersection(*map(set, options))
    extras = (" ".join(option for option in command if option not in common) for command in options)
    return [Difference(name="command", values=tuple(extra or "nothing more" for extra in extras))]


def _setting_differences(columns: Sequence[Sequence[RunSnapshot]]) -> list[Difference]:
    """Returns the settings of DeepSpeed that differ, where all columns have them."""
    groups = [_first_rank_settings(runs[0]) for runs in columns]
    names = dict.fromkeys(name for values in groups for name in values) if all(groups) else {}
    rows = (
        Difference(name=name, values=tuple(values.get(name, NOT_SET) for values in groups))
        for name in names
    )
    return [row for row in rows if len(set(row.values)) > 1]


def _first_rank_settings(run: RunSnapshot) -> dict[str, str]:
    rank = next((rank for rank in run.ranks if rank.config.settings), None)
    return {entry.name: entry.effective for entry in rank.config.settings} if rank is not None else {}


def _options_with_values(arguments: Sequence[str]) -> list[str]:
    """Returns the words of a command, each option with its value: ``--steps 12``."""
    joined: list[str] = []
    for argument in arguments:
        previous = joined[-1] if joined else ""
        # An option takes one value: a second word is an argument of its own
        takes_value = previous.startswith("-") and "=" not in previous and " " not in previous
        if takes_value and not argument.startswith("-"):
            joined[-1] = f"{previous} {argument}"
        else:
            joined.append(argument)
    return joined


# ---- what the machine, and not the program, may have added to the times of a column -------------

REPEATS = 3
"""From so many repeats on their spread shows what the machine does."""
_QUICK = 0.5
"""A difference is doubtful where the quickest steps show less than this part of it, as logarithms: so a
time and its inverse are judged alike."""
_MIN_STEPS = 40
_NOT_OF_TIME = frozenset(("headroom",))
_WHOLE_STEPS = frozenset(("step_time", "mean_step_time"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """Known facts about the machine during the steps of a column."""

    lacked: float | None
    """The largest share of the time of its steps that a rank had no CPU; None where unknown."""
    step: float
    """The median step, seconds; 0 without steps."""
    quick: float
    """The step that a tenth of the steps do not exceed, seconds; 0 where too few."""
    repeats: int


def machine_of(runs: Sequence[RunFigures]) -> Machine:
    """Returns what *runs*, the repeats of one column, tell of their machine."""
    seconds = [step for run in runs for step in run.seconds]
    lacks = [
        share
        for run in runs
        for rank in run.snapshot.ranks
        if rank.machine.pressure and (share := rank.machine.pressure.steps_cpu_wait_ratio) is not None
    ]
    enough = len(seconds) >= _MIN_STEPS
    return Machine(
        lacked=max(lacks, default=None),
        step=statistics.median(seconds) if seconds else 0.0,
        quick=statistics.quantiles(seconds, n=10)[0] if enough else 0.0,
        repeats=len(runs),
    )


def cpu_slack(metric: Metric, machine: Machine, value: float) -> float:
    """Returns by how much a lack of CPUs may have made *value* worse; 0 for what is no time."""
    # A lack of 100 % would divide by zero below
    lacked = min(machine.lacked or 0.0, 0.99)
    if metric.name in _WHOLE_STEPS:
        return lacked * value
    if metric.unit == "1/s":
        return value / (1 - lacked) - value
    if metric.unit == "ratio" and metric.name not in _NOT_OF_TIME:
        return min(value, lacked)
    return min(value, lacked * machine.step) if metric.unit == "s" else 0.0


def span(
    metric: Metric, base: Machine, target: Machine, of_base: float, of_target: float
) -> tuple[float, float]:
    """Returns the least and the most that the difference of a metric is without what the machine added.

    Without doubt, both are the difference itself.
    """
    difference = of_target - of_base
    if min(base.repeats, target.repeats) >= REPEATS:
        return difference, difference
    worse, base_slack = cpu_slack(metric, target, of_target), cpu_slack(metric, base, of_base)
    if metric.more_is_better:
        low, high = difference - base_slack, difference + worse
    else:
        low, high = difference - worse, difference + base_slack
    is_of_steps = metric.unit == "1/s" or metric.name in _WHOLE_STEPS
    if is_of_steps and _is_of_slow_steps(base, target, of_target, of_base):
        times = target.quick / base.quick
        quick = of_base * ((1 / times if metric.unit == "1/s" else times) - 1)
        low, high = min(low, quick), max(high, quick)
    return low, high


def _is_of_slow_steps(base: Machine, target: Machine, of_target: float, of_base: float) -> bool:
    """Returns True if the quickest steps show too little of a difference; False for too few steps."""
    if not base.quick or not target.quick or min(of_base, of_target) <= 0:
        return False
    return abs(math.log(target.quick / base.quick)) < _QUICK * abs(math.log(of_target / of_base))


def doubt_reason(base: Machine, target: Machine) -> str:
    """Returns what makes times of two columns not comparable; "" where nothing does."""
    if min(base.repeats, target.repeats) >= REPEATS or not base.step or not base.quick:
        return ""
    lacked = max(base.lacked or 0.0, target.lacked or 0.0)
    median, quick = target.step / base.step - 1, target.quick / base.quick - 1
    if _is_of_slow_steps(base, target, target.step, base.step):
        return (
            f"the medians differ by {human_ratio(median)}, the quickest tenths of the steps by "
            f"{human_ratio(quick)}"
        )
    return f"ranks had no CPU for up to {human_ratio(lacked)} of the time" if lacked else ""
