"""The metrics of :data:`zeromon.export.prometheus.metrics.METRICS` as prometheus-client writes them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from prometheus_client import Metric
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
)
from prometheus_client.registry import Collector

from zeromon.base.units import printable
from zeromon.export.prometheus import metrics
from zeromon.export.prometheus.metrics import Row, Spec, cumulative_buckets, rows_of
from zeromon.snapshot import RunSnapshot
from zeromon.snapshot.run import Health

_FAMILIES: dict[str, Any] = {"gauge": GaugeMetricFamily, "counter": CounterMetricFamily}


class ByClient(Collector):
    """What prometheus-client's encoders take."""

    def __init__(self, runs: Iterable[RunSnapshot], health: Health | None = None) -> None:
        self._runs, self._health = tuple(runs), health

    def collect(self) -> Iterator[Metric]:
        return collect(self._runs, self._health)


def collect(runs: Iterable[RunSnapshot], health: Health | None = None) -> Iterator[Metric]:
    """The metric families of *runs* and of their collector; one without a sample is left out."""
    runs = tuple(runs)
    for spec in metrics.METRICS:
        family = _family(spec, runs, health)
        if family.samples:
            yield family


def _family(spec: Spec, runs: tuple[RunSnapshot, ...], health: Health | None) -> Metric:
    if spec.own is not None:
        family: Metric = _FAMILIES[spec.kind](spec.family, spec.help, unit=spec.base_unit)
        if health is not None:
            family.add_metric((), spec.own(health))  # type: ignore[attr-defined]  # of the subclasses
        return family
    return _histogram(spec, runs) if spec.kind == "histogram" else _plain(spec, runs)


def _plain(spec: Spec, runs: tuple[RunSnapshot, ...]) -> Metric:
    labels = ("run", "rank", *spec.labels)
    if spec.kind == "info":
        info = InfoMetricFamily(spec.family, spec.help, labels=("run", "rank"))
        for where, (values, _) in _rows(spec, runs):
            facts = zip(spec.labels, map(printable, values), strict=True)
            info.add_metric(where, dict(facts))
        return info
    family: Metric = _FAMILIES[spec.kind](spec.family, spec.help, labels=labels, unit=spec.base_unit)
    add: Callable[..., None] = family.add_metric  # type: ignore[attr-defined]  # of the subclasses
    for where, (values, number) in _rows(spec, runs):
        if number is not None:
            add((*where, *map(printable, values)), number)
    return family


def _rows(spec: Spec, runs: tuple[RunSnapshot, ...]) -> Iterator[tuple[tuple[str, str], Row]]:
    """Each row behind the values of run and rank."""
    for run in runs:
        read = rows_of(spec, run)
        for rank in run.ranks:
            where = (printable(run.run), str(rank.rank))
            for row in read(rank):
                yield where, row


def _histogram(spec: Spec, runs: tuple[RunSnapshot, ...]) -> Metric:
    labels = ("run", "rank")
    family = HistogramMetricFamily(spec.family, spec.help, labels=labels, unit=spec.base_unit)
    for run in runs:
        read = rows_of(spec, run)
        for rank in run.ranks:
            for _, total in read(rank):
                buckets = [(bound, float(count)) for bound, count in cumulative_buckets(spec, rank)]
                family.add_metric((printable(run.run), str(rank.rank)), buckets, total or 0.0)
    return family
