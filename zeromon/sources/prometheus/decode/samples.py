"""Samples by rank: which rank each belongs to, and which ranks form one job. Pure."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from zeromon.sources.prometheus.client import Sample

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
        """Whether the rank's process lives."""
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
