"""Samples by rank: which rank each belongs to, and which ranks form one job. Pure."""

import math
from bisect import bisect_left
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Any, NamedTuple

from zeromon.readout.figures import FIELD_OF_METRIC, MEMORY, ON_NODES
from zeromon.ring.codes import Phase
from zeromon.snapshot.run import Fleet, FleetNode, Spread
from zeromon.snapshot.step import UNTIMED
from zeromon.sources.prometheus.client import Line, Sample
from zeromon.storage.step_history.queries import LEAST, MEDIAN, MOST
from zeromon.storage.step_history.rows import ABSENT, NAMES, Series

_MAX_RANK = 1 << 31


class Key(NamedTuple):
    """A rank as one collector exports it: two jobs of one name have the same rank numbers."""

    rank: int
    instance: str


@dataclass(slots=True)
class RankSamples:
    """The samples of one rank; metric names come without ``zeromon_``."""

    found: dict[str, list[tuple[dict[str, str], float]]] = field(default_factory=dict)
    """Metric name -> (labels, value)."""
    rates: dict[str, float] = field(default_factory=dict)
    phases: dict[str, float] = field(default_factory=dict)
    """Phase -> seconds a second."""

    def number(self, name: str, otherwise: float | None = None) -> float | None:
        """The value of a metric that has one a rank."""
        rows = self.found.get(name)
        return rows[0][1] if rows else otherwise

    def whole(self, name: str) -> int:
        """The value as an integer; -1 where it is unknown."""
        value = self.number(name)
        return -1 if value is None else int(value)

    def count(self, name: str) -> int:
        """The value as an integer; 0 where it is unknown."""
        return max(0, self.whole(name))

    def label(self, name: str, label: str) -> str:
        """One label of an info metric; "" where it is unknown."""
        rows = self.found.get(name)
        return rows[0][0].get(label, "") if rows else ""

    def by(self, name: str, *labels: str) -> dict[tuple[str, ...], float]:
        """The values of a metric by the values of *labels*."""
        rows = self.found.get(name, ())
        return {tuple(tags.get(label, "") for label in labels): value for tags, value in rows}

    @property
    def up(self) -> bool:
        """True if the rank's process lives."""
        return self.number("rank_up") == 1


def key_of(labels: Mapping[str, str]) -> Key | None:
    """The rank that labels name; None where the label ``rank`` is no number."""
    digits = labels.get("rank", "")
    # Cut: int() raises ValueError for a label of more than 4300 digits
    if not (digits.isascii() and digits.isdigit() and int(digits[:12]) < _MAX_RANK):
        return None
    return Key(int(digits[:12]), labels.get("instance", ""))


def samples_by_rank(columns: Iterable[Sample], rates: Iterable[Sample]) -> dict[Key, RankSamples]:
    """The answers to :mod:`~zeromon.sources.prometheus.client`, columns and rates, by rank."""
    by_key: dict[Key, RankSamples] = {}
    for sample in columns:
        key = key_of(sample.labels)
        if key is not None:
            name = sample.labels.get("__name__", "").removeprefix("zeromon_")
            facts = by_key.setdefault(key, RankSamples())
            facts.found.setdefault(name, []).append((sample.labels, sample.value))
    for sample in rates:
        key = key_of(sample.labels)
        facts_of = by_key.get(key) if key is not None else None
        if facts_of is not None:
            of = sample.labels.get("of", "")
            if of == "phase":
                facts_of.phases[sample.labels.get("phase", "")] = sample.value
            else:
                facts_of.rates[of] = sample.value
    return by_key


def dedupe_jobs(ranks: Mapping[Key, RankSamples]) -> tuple[dict[Key, RankSamples], tuple[str, ...]]:
    """The ranks of one job, and the collectors that export another job of the same name.

    Of a rank that was restarted on another node the living process counts. Two living processes of one
    rank are two jobs: the collector with the smallest address is kept, so that the choice is stable.
    """
    keys_by_rank: dict[int, list[Key]] = {}
    for key in ranks:
        keys_by_rank.setdefault(key.rank, []).append(key)
    rejected: set[str] = set()
    for keys in keys_by_rank.values():
        alive = sorted(key.instance for key in keys if ranks[key].up)
        rejected.update(alive[1:])
    chosen = {key: facts for key, facts in ranks.items() if key.instance not in rejected}
    for keys in keys_by_rank.values():
        mine = [key for key in keys if key in chosen]
        winner = max(mine, key=lambda k: (ranks[k].up, ranks[k].count("steps_total")), default=None)
        for key in mine:
            if key != winner:
                del chosen[key]
    return chosen, tuple(sorted(rejected))


# ---- range queries in, step history out ---------------------------------------------------------

_INSTEAD = {"most": MOST, "median": MEDIAN, "least": LEAST}


def series_of_ranks(matrix: Sequence[Line], interval: float) -> Series:
    """The answer to :func:`zeromon.sources.prometheus.client.steps_over_time`: a row a rank and moment.

    A moment at which a rank has no step is a gap. Rows of one moment have the same step number, that of
    the rank with the most steps.
    """
    cells: dict[int, dict[float, dict[str, float]]] = {}
    for entry in matrix:
        key = key_of(entry.labels)
        if key is None:
            continue
        name = entry.labels.get("phase") or entry.labels.get("figure") or entry.labels.get("of", "")
        _fill_series_cells(cells.setdefault(key.rank, {}), name, entry)
    return _cell_rows(cells, interval)


def whole_series_of(matrix: Sequence[Line], interval: float) -> Series:
    """The answer to :func:`zeromon.sources.prometheus.client.whole_over_time`: max, median, min."""
    cells: dict[int, dict[float, dict[str, float]]] = {}
    for series in matrix:
        of, quantity = series.labels.get("of", ""), series.labels.get("figure", "")
        if of in _INSTEAD:
            _fill_series_cells(cells.setdefault(_INSTEAD[of], {}), quantity, series)
        elif of == "steps_total":
            for instead in _INSTEAD.values():
                _fill_series_cells(cells.setdefault(instead, {}), of, series)
    return _cell_rows(cells, interval)


def _fill_series_cells(by_time: dict[float, dict[str, float]], name: str, series: Line) -> None:
    for at, number in series.values:
        value = float(number)
        if value == value and abs(value) != float("inf"):
            by_time.setdefault(at, {})[name] = value


_PHASES = {f"{phase.label}_us": phase.label for phase in Phase}


def _cell_rows(cells: Mapping[int, Mapping[float, Mapping[str, float]]], interval: float) -> Series:
    reached: dict[float, int] = {}
    for by_time in cells.values():
        for at, row in by_time.items():
            reached[at] = max(reached.get(at, 0), int(row.get("steps_total", 0)))
    columns: Series = {name: [] for name in NAMES}
    for rank, by_time in sorted(cells.items()):
        last_step = -1
        for at, row in sorted(by_time.items()):
            step = reached[at]
            if "step_seconds" in row and "steps_total" in row and step != last_step:
                for name, value in row_of_cell(rank, step, at, row, interval).items():
                    columns[name].append(value)
                last_step = step
    return columns


def row_of_cell(
    rank: int, step: int, at: float, row: Mapping[str, float], interval: float
) -> dict[str, Any]:
    """The mean step that ends *at* a moment, of so many seconds, by the columns of a step history."""
    seconds, rate = row["step_seconds"], row.get("steps", 0.0)
    exposed = row.get("exposed_communication_ratio")
    wait = (exposed or 0.0) * seconds
    overlap = row.get("overlap_ratio", 1.0)
    communication = wait / (1 - overlap) if overlap < 1 else wait
    if "overlap_ratio" not in row and wait:
        communication = -1e-6  # only the waits for it are known
    values: dict[str, Any] = dict(zip(NAMES, ABSENT, strict=True))
    values |= {
        "rank": rank, "step": step, "steps": max(1, round(interval / seconds)) if seconds else 1,
        "flags": UNTIMED if exposed is None else 0, "start_us": round(1e6 * (at - seconds)),
        "duration_us": round(1e6 * seconds),
        "communication_us": round(1e6 * communication),
        "exposed_us": round(1e6 * wait), "allocated_bytes": int(row.get("memory_allocated_bytes", -1)),
        "reserved_bytes": int(row.get("memory_reserved_bytes", -1)),
        "rss_bytes": int(row.get("host_memory_rss_bytes", -1)), "other_bytes": -1,
    }  # fmt: skip
    for name, phase in _PHASES.items():
        values[name] = round(1e6 * row.get(phase, 0.0) / rate) if rate else 0
    return values


# ---- aggregated samples of a run too large to read rank by rank: counts, spreads, nodes ----------

_RESIDENT = MEMORY.metrics[-1]


def _field_of_figure(labels: Mapping[str, str], fields: Container[str]) -> str | None:
    """The field of a figure; resident memory counts only where no device memory is known."""
    name = labels.get("figure") or labels.get("of", "")
    field = FIELD_OF_METRIC.get(name)
    return None if name == _RESIDENT and field in fields else field


@dataclass(slots=True)
class Whole:
    """The decoded answer to :func:`zeromon.sources.prometheus.client.whole_run`."""

    counts: dict[str, float]
    spreads: dict[str, Spread]
    findings: dict[tuple[str, str], int]
    waiting: int

    @property
    def ranks(self) -> int:
        """The number of ranks that are exported now."""
        return int(self.counts.get("ranks", 0))


def whole_of(samples: Iterable[Sample]) -> Whole:
    """Decodes the answer to :func:`zeromon.sources.prometheus.client.whole_run`."""
    totals = Whole({}, {}, {}, 0)
    counted: dict[str, dict[float, float]] = {}
    for sample in samples:
        labels, of = sample.labels, sample.labels.get("of", "")
        if of == "finding":
            rule = labels.get("rule", ""), labels.get("severity", "")
            totals.findings[rule] = sample.count
        elif of == "hang":
            totals.waiting += sample.count
        elif of == "spread":
            quantity, ln = labels.get("figure", ""), float(labels.get("ln", "nan"))
            if ln < _MAX_LN:  # what is below zero has no logarithm
                counted.setdefault(quantity, {})[math.exp(ln)] = sample.value
        else:
            totals.counts[of] = sample.value
    # Resident memory last: it counts only where no device memory is known by then
    for name in sorted(counted, key=lambda name: name == _RESIDENT):
        quantity = _field_of_figure({"figure": name}, totals.spreads) or ""
        totals.spreads.setdefault(quantity, spread_of_counts(counted[name]))
    totals.spreads.pop("", None)
    return totals


# exp() raises OverflowError above 709
_MAX_LN = 700.0


def spread_of_counts(counted: Mapping[float, float]) -> Spread:
    """The quantiles of a figure; *counted*: value -> how many ranks have it."""
    values = sorted(counted)
    reached = list(accumulate(counted[value] for value in values))
    lowest, p5, median, p95, highest = (
        values[min(len(values) - 1, bisect_left(reached, share * reached[-1]))]
        for share in (0.0, 0.05, 0.5, 0.95, 1.0)
    )
    return Spread(least=lowest, p5=p5, median=median, p95=p95, most=highest)


def nodes_of_samples(
    samples: Iterable[Sample], names: Mapping[str, str], silent: Mapping[str, tuple[int, float]]
) -> tuple[FleetNode, ...]:
    """The nodes, sorted by name; *silent*: collector -> (ranks it had, seconds without an answer)."""
    rows: dict[str, dict[str, float]] = {}
    for sample in sorted(samples, key=lambda s: s.labels.get("figure") == _RESIDENT):
        row = rows.setdefault(sample.labels.get("instance", ""), {})
        of = sample.labels.get("of", "")
        if of in ("ranks", "up", "failed", "lost"):
            row[of] = sample.value
            continue
        field = _field_of_figure(sample.labels, row)
        if field is not None:
            row[field] = sample.value
    nodes = [_fleet_node(address, row, names) for address, row in rows.items() if "ranks" in row]
    nodes += [
        FleetNode(node=names.get(address) or address, address=address, ranks=ranks, up=0, failed=0,
                  silent_seconds=seconds)
        for address, (ranks, seconds) in silent.items()
    ]  # fmt: skip
    return tuple(sorted(nodes, key=lambda node: _natural_sort_key(node.node)))


def _fleet_node(address: str, row: Mapping[str, float], names: Mapping[str, str]) -> FleetNode:
    values: dict[str, Any] = {column.field: row.get(column.field) for column in ON_NODES}
    return FleetNode(
        node=names.get(address) or address, address=address, ranks=int(row.get("ranks", 0)),
        up=int(row.get("up", 0)), failed=int(row.get("failed", 0)), **values,
    )  # fmt: skip


def _natural_sort_key(name: str) -> tuple[str, int, str]:
    """``node9`` before ``node10``."""
    stem = name.rstrip("0123456789")
    return stem, int(name[len(stem) :][:18] or 0), name


def fleet_of_nodes(totals: Whole, nodes: tuple[FleetNode, ...]) -> Fleet:
    """The state of a large run; the largest values are exact, those of the worst nodes."""
    maxima = {
        column.field: max((v for n in nodes if (v := column.of_node(n)) is not None), default=None)
        for column in ON_NODES
    }
    spreads = {
        name: spread if (high := maxima.get(name)) is None else replace(spread, most=high)
        for name, spread in totals.spreads.items()
    }
    silent = sum(node.ranks for node in nodes if node.silent_seconds)
    return Fleet(
        ranks=totals.ranks + silent, up=int(totals.counts.get("up", 0)), silent=silent,
        failed=int(totals.counts.get("failed", 0)), waiting=totals.waiting, nodes=nodes,
        spreads=spreads,
    )  # fmt: skip
