"""The same metrics as OTLP data, for those who push.

They are made from :data:`zeromon.export.prometheus.metrics.METRICS` without OpenTelemetry's own
aggregation: that keeps
2,000 series of a metric and merges the others without a word. Sums are cumulative, since the rank began.
"""

from collections.abc import Iterable, Iterator
from itertools import pairwise
from typing import cast

from opentelemetry.sdk.metrics.export import (
    AggregationTemporality,
    Gauge,
    Histogram,
    HistogramDataPoint,
    Metric,
    MetricsData,
    NumberDataPoint,
    ResourceMetrics,
    ScopeMetrics,
    Sum,
)
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.util.instrumentation import InstrumentationScope

from zeromon import __version__
from zeromon.export.prometheus import metrics
from zeromon.export.prometheus.metrics import Spec, cumulative, rows_of
from zeromon.snapshot import RankSnapshot, RunSnapshot
from zeromon.units import printable

_UNITS = {
    "bytes": "By",
    "bytes/second": "By/s",
    "seconds": "s",
    "ratio": "1",
    "watts": "W",
    "celsius": "Cel",
}
"""As UCUM writes them; others are annotations, which mean nothing to who adds units to names."""


_Timed = tuple[RankSnapshot, tuple[int, int]]
Beginnings = dict[tuple[str, int, int, int], int]
"""When the counters of a run's rank, its process and its record began, nanoseconds since the epoch."""


def data(runs: Iterable[RunSnapshot], since: Beginnings) -> MetricsData:
    """All metrics of *runs*: a resource for each run and node.

    *since* is kept from call to call: a beginning that moves, as two clocks do, would be a reset.
    """
    return MetricsData(
        [_resource(run, node, ranks, since) for run in runs for node, ranks in _nodes(run)]
    )


def _nodes(run: RunSnapshot) -> Iterator[tuple[str, list[RankSnapshot]]]:
    """The ranks of each node."""
    found: dict[str, list[RankSnapshot]] = {}
    for rank in run.ranks:
        found.setdefault(printable(rank.node or run.node), []).append(rank)
    yield from found.items()


def _resource(
    run: RunSnapshot, node: str, ranks: list[RankSnapshot], since: Beginnings
) -> ResourceMetrics:
    name = printable(run.run)
    about = {
        "service.name": "zeromon",
        "service.instance.id": f"{name}/{node}",
        "host.name": node,
        "zeromon.run": name,
        "zeromon.node": node,
    }
    scope = InstrumentationScope("zeromon", __version__)
    found = (_metric(spec, run, ranks, since) for spec in metrics.METRICS)
    made = [metric for metric in found if metric is not None]
    return ResourceMetrics(Resource(about), [ScopeMetrics(scope, made, "")], "")


def _metric(
    spec: Spec, run: RunSnapshot, ranks: list[RankSnapshot], beginnings: Beginnings
) -> Metric | None:
    """*spec* of *ranks*; None without a sample."""
    values: Sum | Gauge | Histogram
    each = [(rank, _times(run, rank, beginnings)) for rank in ranks]
    if spec.kind == "histogram":
        counted = list(_counted(spec, run, each))
        values = Histogram(counted, AggregationTemporality.CUMULATIVE)
    else:
        points = list(_points(spec, run, each))
        is_sum = spec.kind == "counter"
        values = (
            Sum(points, AggregationTemporality.CUMULATIVE, is_monotonic=True)
            if is_sum
            else Gauge(points)
        )
    if not values.data_points:
        return None
    unit = _UNITS.get(spec.unit, f"{{{spec.unit}}}" if spec.unit else "")
    return Metric(spec.name.removesuffix("_total"), spec.help, unit, values)


def _points(spec: Spec, run: RunSnapshot, each: Iterable[_Timed]) -> Iterator[NumberDataPoint]:
    read = rows_of(spec, run)
    for rank, (since, now) in each:
        for values, number in read(rank):
            if number is not None:
                labels = zip(spec.labels, map(printable, values), strict=True)
                yield NumberDataPoint(_where(run, rank) | dict(labels), since, now, number)


def _counted(spec: Spec, run: RunSnapshot, each: Iterable[_Timed]) -> Iterator[HistogramDataPoint]:
    read = rows_of(spec, run)
    for rank, (since, now), total in ((*one, total) for one in each for _, total in read(one[0])):
        buckets = list(cumulative(spec, rank))
        so_far = [0, *(count for _, count in buckets)]
        unknown = cast("float", None)  # neither the least nor the most is kept
        yield HistogramDataPoint(
            attributes=_where(run, rank),
            start_time_unix_nano=since,
            time_unix_nano=now,
            count=so_far[-1],
            sum=total or 0.0,
            bucket_counts=[after - before for before, after in pairwise(so_far)],
            explicit_bounds=[float(bound) for bound, _ in buckets[:-1]],
            min=unknown,
            max=unknown,
        )


def _where(run: RunSnapshot, rank: RankSnapshot) -> dict[str, str]:
    return {"run": printable(run.run), "rank": str(rank.rank)}


def _times(run: RunSnapshot, rank: RankSnapshot, beginnings: Beginnings) -> tuple[int, int]:
    """When the rank's counters began, and when the snapshot was taken; nanoseconds since the epoch."""
    now = round(run.taken_wall * 1e9)
    key = (run.run, rank.rank, rank.pid, rank.started_ns)
    return beginnings.setdefault(key, now - max(0, run.taken_ns - rank.started_ns)), now
