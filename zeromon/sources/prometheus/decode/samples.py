"""Samples by rank: which rank each belongs to, and which ranks form one job. Pure."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from zeromon.ring.events import Phase
from zeromon.sources.prometheus.client import Line, Sample
from zeromon.storage.step_history import ABSENT, LEAST, MEDIAN, MOST, NAMES, UNTIMED, Series

_MOST_RANK = 1 << 31


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
        return {tuple(own.get(label, "") for label in labels): value for own, value in rows}

    @property
    def up(self) -> bool:
        """True if the rank's process lives."""
        return self.number("rank_up") == 1


def key_of(labels: Mapping[str, str]) -> Key | None:
    """The rank that labels name; None where the label ``rank`` is no number."""
    text = labels.get("rank", "")
    if not (text.isascii() and text.isdigit() and int(text[:12]) < _MOST_RANK):
        return None
    return Key(int(text[:12]), labels.get("instance", ""))


def gathered(columns: Iterable[Sample], rates: Iterable[Sample]) -> dict[Key, RankSamples]:
    """The samples of :func:`zeromon.sources.prometheus.promql.columns` and ``rates``, by rank."""
    found: dict[Key, RankSamples] = {}
    for sample in columns:
        key = key_of(sample.labels)
        if key is not None:
            name = sample.labels.get("__name__", "").removeprefix("zeromon_")
            facts = found.setdefault(key, RankSamples())
            facts.found.setdefault(name, []).append((sample.labels, sample.value))
    for sample in rates:
        key = key_of(sample.labels)
        facts_of = found.get(key) if key is not None else None
        if facts_of is not None:
            of = sample.labels.get("of", "")
            if of == "phase":
                facts_of.phases[sample.labels.get("phase", "")] = sample.value
            else:
                facts_of.rates[of] = sample.value
    return found


def dedupe_jobs(found: Mapping[Key, RankSamples]) -> tuple[dict[Key, RankSamples], tuple[str, ...]]:
    """The ranks of one job, and the collectors that export another job of the same name.

    Of a rank that was restarted on another node the living process counts. Two living processes of one
    rank are two jobs: the collector with the smallest address is kept, so that the choice is stable.
    """
    living: dict[int, list[Key]] = {}
    for key in found:
        living.setdefault(key.rank, []).append(key)
    others: set[str] = set()
    for keys in living.values():
        up = sorted(key.instance for key in keys if found[key].up)
        others.update(up[1:])
    kept = {key: facts for key, facts in found.items() if key.instance not in others}
    for keys in living.values():
        mine = [key for key in keys if key in kept]
        newest = max(mine, key=lambda k: (found[k].up, found[k].count("steps_total")), default=None)
        for key in mine:
            if key != newest:
                del kept[key]
    return kept, tuple(sorted(others))


# ---- range queries in, step history out ---------------------------------------------------------

_INSTEAD = {"most": MOST, "median": MEDIAN, "least": LEAST}


def series_of(lines: Sequence[Line], interval: float) -> Series:
    """The answer to :func:`zeromon.sources.prometheus.promql.steps_over_time`: a row a rank and moment.

    A moment at which a rank has no step is a gap. Rows of one moment have the same step number, that of
    the rank with the most steps.
    """
    cells: dict[int, dict[float, dict[str, float]]] = {}
    for line in lines:
        key = key_of(line.labels)
        if key is None:
            continue
        name = line.labels.get("phase") or line.labels.get("figure") or line.labels.get("of", "")
        _fill(cells.setdefault(key.rank, {}), name, line)
    return _rows(cells, interval)


def whole_series_of(lines: Sequence[Line], interval: float) -> Series:
    """The answer to :func:`zeromon.sources.prometheus.promql.whole_over_time`: max, median, min."""
    cells: dict[int, dict[float, dict[str, float]]] = {}
    for line in lines:
        of, figure = line.labels.get("of", ""), line.labels.get("figure", "")
        if of in _INSTEAD:
            _fill(cells.setdefault(_INSTEAD[of], {}), figure, line)
        elif of == "steps_total":
            for instead in _INSTEAD.values():
                _fill(cells.setdefault(instead, {}), of, line)
    return _rows(cells, interval)


def _fill(moments: dict[float, dict[str, float]], name: str, line: Line) -> None:
    for at, text in line.values:
        value = float(text)
        if value == value and abs(value) != float("inf"):
            moments.setdefault(at, {})[name] = value


_PHASES = {f"{phase.label}_us": phase.label for phase in Phase}


def _rows(cells: Mapping[int, Mapping[float, Mapping[str, float]]], interval: float) -> Series:
    reached: dict[float, int] = {}
    for moments in cells.values():
        for at, row in moments.items():
            reached[at] = max(reached.get(at, 0), int(row.get("steps_total", 0)))
    made: Series = {name: [] for name in NAMES}
    for rank, moments in sorted(cells.items()):
        last = -1
        for at, row in sorted(moments.items()):
            step = reached[at]
            if "step_seconds" in row and "steps_total" in row and step != last:
                for name, value in _row(rank, step, at, row, interval).items():
                    made[name].append(value)
                last = step
    return made


def _row(
    rank: int, step: int, at: float, row: Mapping[str, float], interval: float
) -> dict[str, Any]:
    seconds, rate = row["step_seconds"], row.get("steps", 0.0)
    exposed = row.get("exposed_communication_ratio")
    spent = (exposed or 0.0) * seconds
    overlap = row.get("overlap_ratio")
    communication = spent / (1 - overlap) if overlap is not None and overlap < 1 else spent
    made: dict[str, Any] = dict(zip(NAMES, ABSENT, strict=True))
    made |= {
        "rank": rank, "step": step, "steps": max(1, round(interval / seconds)) if seconds else 1,
        "flags": UNTIMED if exposed is None else 0, "start_us": round(1e6 * (at - seconds)),
        "duration_us": round(1e6 * seconds), "communication_us": round(1e6 * communication),
        "exposed_us": round(1e6 * spent), "allocated_bytes": int(row.get("memory_allocated_bytes", -1)),
        "reserved_bytes": int(row.get("memory_reserved_bytes", -1)),
        "rss_bytes": int(row.get("host_memory_rss_bytes", -1)), "other_bytes": -1,
    }  # fmt: skip
    for name, phase in _PHASES.items():
        made[name] = round(1e6 * row.get(phase, 0.0) / rate) if rate else 0
    return made
