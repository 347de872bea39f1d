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


def _figure(labels: Mapping[str, str], known: Container[str]) -> str | None:
    """The field of a figure; resident memory counts only where no device memory is known."""
    name = labels.get("figure") or labels.get("of", "")
    figure = FIELD_OF_METRIC.get(name)
    return None if name == _RESIDENT and figure in known else figure


@dataclass(slots=True)
class Whole:
    """The decoded answer to :func:`zeromon.sources.prometheus.promql.whole`."""

    counts: dict[str, float]
    spreads: dict[str, Spread]
    findings: dict[tuple[str, str], int]
    waiting: int

    @property
    def ranks(self) -> int:
        """The number of ranks that are exported now."""
        return int(self.counts.get("ranks", 0))


def whole_of(samples: Iterable[Sample]) -> Whole:
    """Decodes the answer to :func:`zeromon.sources.prometheus.promql.whole`."""
    made = Whole({}, {}, {}, 0)
    counted: dict[str, dict[float, float]] = {}
    for sample in samples:
        labels, of = sample.labels, sample.labels.get("of", "")
        if of == "finding":
            rule = labels.get("rule", ""), labels.get("severity", "")
            made.findings[rule] = sample.count
        elif of == "hang":
            made.waiting += sample.count
        elif of == "spread":
            figure, ln = labels.get("figure", ""), float(labels.get("ln", "nan"))
            if ln < _MOST_LN:  # what is below zero has no logarithm
                counted.setdefault(figure, {})[math.exp(ln)] = sample.value
        else:
            made.counts[of] = sample.value
    for name in sorted(counted, key=lambda name: name == _RESIDENT):
        figure = _figure({"figure": name}, made.spreads) or ""
        made.spreads.setdefault(figure, spread_of(counted[name]))
    made.spreads.pop("", None)
    return made


_MOST_LN = 700.0


def spread_of(counted: Mapping[float, float]) -> Spread:
    """The quantiles of a figure; *counted*: value -> how many ranks have it."""
    values = sorted(counted)
    reached = list(accumulate(counted[value] for value in values))
    least, p5, median, p95, most = (
        values[min(len(values) - 1, bisect_left(reached, share * reached[-1]))]
        for share in (0.0, 0.05, 0.5, 0.95, 1.0)
    )
    return Spread(least=least, p5=p5, median=median, p95=p95, most=most)


def nodes_of(
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
        figure = _figure(sample.labels, row)
        if figure is not None:
            row[figure] = sample.value
    made = [_node(address, row, names) for address, row in rows.items() if "ranks" in row]
    made += [
        FleetNode(node=names.get(address) or address, address=address, ranks=ranks, up=0, failed=0,
                  silent_seconds=seconds)
        for address, (ranks, seconds) in silent.items()
    ]  # fmt: skip
    return tuple(sorted(made, key=lambda node: _natural(node.node)))


def _node(address: str, row: Mapping[str, float], names: Mapping[str, str]) -> FleetNode:
    figures: dict[str, Any] = {figure.field: row.get(figure.field) for figure in ON_NODES}
    return FleetNode(
        node=names.get(address) or address, address=address, ranks=int(row.get("ranks", 0)),
        up=int(row.get("up", 0)), failed=int(row.get("failed", 0)), **figures,
    )  # fmt: skip


def _natural(text: str) -> tuple[str, int, str]:
    """``node9`` before ``node10``."""
    stem = text.rstrip("0123456789")
    return stem, int(text[len(stem) :][:18] or 0), text


def fleet_of(whole: Whole, nodes: tuple[FleetNode, ...]) -> Fleet:
    """The state of a large run; the largest values are exact, those of the worst nodes."""
    most = {
        figure.field: max((v for n in nodes if (v := figure.of_node(n)) is not None), default=None)
        for figure in ON_NODES
    }
    spreads = {
        name: spread if (high := most.get(name)) is None else replace(spread, most=high)
        for name, spread in whole.spreads.items()
    }
    silent = sum(node.ranks for node in nodes if node.silent_seconds)
    return Fleet(
        ranks=whole.ranks + silent, up=int(whole.counts.get("up", 0)), silent=silent,
        failed=int(whole.counts.get("failed", 0)), waiting=whole.waiting, nodes=nodes,
        spreads=spreads,
    )  # fmt: skip
