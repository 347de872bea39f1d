"""Aggregated samples of a run too large to read rank by rank: counts, spreads, nodes. Pure."""

import math
from bisect import bisect_left
from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

from zeromon.readout.figures import FIELD_OF_METRIC, MEMORY, ON_NODES
from zeromon.snapshot import Fleet, FleetNode, Spread
from zeromon.sources.prometheus.client import Sample

_RESIDENT = MEMORY.metrics[-1]


def _field_of_figure(labels: Mapping[str, str], fields: Container[str]) -> str | None:
    """The field of a figure; resident memory counts only where no device memory is known."""
    name = labels.get("figure") or labels.get("of", "")
    field = FIELD_OF_METRIC.get(name)
    return None if name == _RESIDENT and field in fields else field


@dataclass(slots=True)
class Whole:
    """The decoded answer to :func:`zeromon.sources.prometheus.promql.whole_run`."""

    counts: dict[str, float]
    spreads: dict[str, Spread]
    findings: dict[tuple[str, str], int]
    waiting: int

    @property
    def ranks(self) -> int:
        """The number of ranks that are exported now."""
        return int(self.counts.get("ranks", 0))


def whole_of(samples: Iterable[Sample]) -> Whole:
    """Decodes the answer to :func:`zeromon.sources.prometheus.promql.whole_run`."""
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
    for name in sorted(counted, key=lambda name: name == _RESIDENT):
        quantity = _field_of_figure({"figure": name}, totals.spreads) or ""
        totals.spreads.setdefault(quantity, spread_of_counts(counted[name]))
    totals.spreads.pop("", None)
    return totals


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
