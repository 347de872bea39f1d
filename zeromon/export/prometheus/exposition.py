"""The answer of ``/metrics``: the Prometheus text format or OpenMetrics, compressed on request.

prometheus-client decides by the Accept header. It would take a second and more for many ranks (it makes
an object and sorts the labels of each series), so the rows of :mod:`zeromon.export.prometheus.metrics`
are written here, behind prefixes that are kept from one scrape to the next.
"""

import gzip
import threading
from collections.abc import Iterable, Sequence

from prometheus_client.exposition import choose_encoder, gzip_accepted
from prometheus_client.utils import floatToGoString

from zeromon.base.units import printable
from zeromon.export.prometheus import metrics
from zeromon.export.prometheus.metrics import Row, Spec, cumulative_buckets, rows_of
from zeromon.snapshot import Health, RankSnapshot, RunSnapshot

_FORGET_AFTER = 256
GZIP_LEVEL = 1

_Prefixes = dict[tuple[str, ...], str]


class Exposition:
    """``/metrics``, computed when it is scraped."""

    def __init__(self) -> None:
        self._writer = Writer()
        self._one_at_a_time = threading.Lock()

    def answer(
        self, runs: Sequence[RunSnapshot], health: Health | None, accept: str, encodings: str
    ) -> tuple[list[tuple[str, str]], bytes]:
        """Headers and body about *runs* and their collector, by what a request accepts."""
        _, content_type = choose_encoder(accept)
        is_openmetrics = content_type.startswith("application/openmetrics-text")
        with self._one_at_a_time:
            body = self._writer.write(runs, health, openmetrics=is_openmetrics)
        headers = [("Content-Type", content_type), ("Vary", "Accept, Accept-Encoding")]
        if gzip_accepted(encodings):
            body = gzip.compress(body, GZIP_LEVEL, mtime=0)
            headers.append(("Content-Encoding", "gzip"))
        return [*headers, ("Content-Length", str(len(body)))], body


class Writer:
    """Writes many series, each behind a prefix that was made when it came first.

    Prefixes of ranks that are gone are dropped at once, and now and then all of them.
    """

    def __init__(self) -> None:
        self._specs = [spec for spec in metrics.METRICS if spec.own is None]
        self._own = [spec for spec in metrics.METRICS if spec.own is not None]
        self._known: dict[tuple[str, int], list[_Prefixes]] = {}
        self._scrapes = 0

    def write(self, runs: Iterable[RunSnapshot], health: Health | None, *, openmetrics: bool) -> bytes:
        """The series of *runs* and of their collector."""
        self._scrapes += 1
        cached = {} if self._scrapes % _FORGET_AFTER == 0 else self._known
        self._known = {}
        blocks: list[list[str]] = [[] for _ in self._specs]
        for run in runs:
            readers = [rows_of(spec, run) for spec in self._specs]
            for rank in run.ranks:
                key = (run.run, rank.rank)
                prefixes = cached.get(key) or [{} for _ in self._specs]
                self._known[key] = prefixes
                series = zip(self._specs, readers, blocks, prefixes, strict=True)
                for spec, read_rows, block, mine in series:
                    add = _add_histogram if spec.kind == "histogram" else _add_samples
                    add(spec, run, rank, read_rows(rank), block, mine)
        samples: list[str] = []
        for spec, block in zip(self._specs, blocks, strict=True):
            if block:
                samples.append(metric_head(spec, openmetrics=openmetrics))
                samples += block
        for spec in self._own:
            if health is not None and spec.own is not None:
                samples.append(metric_head(spec, openmetrics=openmetrics))
                samples.append(f"{spec.name} {format_number(spec.own(health))}\n")
        if openmetrics:
            samples.append("# EOF\n")
        return "".join(samples).encode()


def _add_samples(
    spec: Spec, run: RunSnapshot, rank: RankSnapshot, rows: Iterable[Row], block: list[str],
    prefixes: _Prefixes,
) -> None:  # fmt: skip
    for values, value in rows:
        if value is not None:
            prefix = prefixes.get(values)
            if prefix is None:
                labels = zip(spec.labels, values, strict=True)
                prefix = prefixes[values] = sample_line_prefix(spec.name, run, rank, *labels)
            block.append(f"{prefix}{format_number(value)}\n")


def _add_histogram(
    spec: Spec, run: RunSnapshot, rank: RankSnapshot, rows: Iterable[Row], block: list[str],
    prefixes: _Prefixes,
) -> None:  # fmt: skip
    for _, total in rows:
        if not prefixes:
            for bound, _ in cumulative_buckets(spec, rank):
                prefixes[bound,] = sample_line_prefix(f"{spec.name}_bucket", run, rank, ("le", bound))
            for suffix in ("count", "sum"):
                prefixes[suffix,] = sample_line_prefix(f"{spec.name}_{suffix}", run, rank)
        count = 0
        for bound, count in cumulative_buckets(spec, rank):
            block.append(f"{prefixes[bound,]}{count}\n")
        block.append(f"{prefixes['count',]}{count}\n")
        block.append(f"{prefixes['sum',]}{format_number(total or 0.0)}\n")


def sample_line_prefix(name: str, run: RunSnapshot, rank: RankSnapshot, *labels: tuple[str, str]) -> str:
    """A sample's line up to its number."""
    pairs = (("run", run.run), ("rank", str(rank.rank)), *labels)
    return f"{name}{{{','.join(f'{label}={quote_label(value)}' for label, value in pairs)}}} "


def quote_label(value: str) -> str:
    """A label's value between its quotes."""
    escaped = printable(value).replace("\\", r"\\").replace('"', r"\"")
    return f'"{escaped}"'


def metric_head(spec: Spec, *, openmetrics: bool) -> str:
    """The lines before the samples of a metric."""
    if not openmetrics:
        kind = "gauge" if spec.kind == "info" else spec.kind
        return f"# HELP {spec.name} {spec.help}\n# TYPE {spec.name} {kind}\n"
    header = f"# HELP {spec.family} {spec.help}\n# TYPE {spec.family} {spec.kind}\n"
    return f"{header}# UNIT {spec.family} {spec.base_unit}\n" if spec.base_unit else header


def format_number(value: float) -> str:
    """A sample's number; ``+Inf`` and ``NaN`` as the formats write them."""
    digits = repr(value)
    if digits[-1] > "9":  # inf, nan
        return str(floatToGoString(value))  # type: ignore[no-untyped-call]
    return digits
