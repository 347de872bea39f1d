"""Pushes the metrics of this node's runs to an OpenTelemetry endpoint, until they have ended.

  zeromon otlp --endpoint http://gateway:4318/v1/metrics
  zeromon otlp node0:9417 --every 30              the runs of another node's collector
  zeromon otlp --once                             push once, and exit

Instead of a scrape of /metrics: the same names (without _total), labels and values, as cumulative sums,
gauges and histograms over HTTP. OTEL_EXPORTER_OTLP_ENDPOINT and _HEADERS are used. A failed push is
reported, and the next one sends all data. Needs pip install 'zeromon[otlp]'.
"""

import argparse
import logging
import threading
from typing import Any

from zeromon.cli import say
from zeromon.cli.options import between, flag, option
from zeromon.cli.output import package
from zeromon.errors import RunNotFound, SourceError
from zeromon.snapshot import RunSnapshot
from zeromon.sources.live import LiveSource, node_runs, runs_at

_DEFAULT = "http://localhost:4318/v1/metrics"
_PATIENCE_SECONDS = 10.0
_LARGEST_BATCH = 5000


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """``zeromon otlp [HOST:PORT] [--endpoint URL] [--every SECONDS] [--once]``"""
    parser.add_argument(
        "address", nargs="?", metavar="HOST:PORT", help="a collector (default: this node's)"
    )
    option(
        parser, "--endpoint", "URL", f"default: OTEL_EXPORTER_OTLP_METRICS_ENDPOINT, or {_DEFAULT}"
    )
    option(parser, "--every", "SECONDS", "seconds between two pushes", between(1, 86400), 15)
    flag(parser, "--once", "push once; exit code 1 when it fails")


def call(options: argparse.Namespace) -> int:
    """Pushes until every run has ended and its end was sent, or until Ctrl-C."""
    otlp = package("zeromon.export.prometheus.otlp", "pushing", "otlp")
    exporters = package("opentelemetry.exporter.otlp.proto.http.metric_exporter", "pushing", "otlp")
    logging.getLogger("opentelemetry").setLevel(logging.CRITICAL)  # zeromon reports failures itself
    exporter = exporters.OTLPMetricExporter(
        endpoint=options.endpoint, timeout=_PATIENCE_SECONDS, max_export_batch_size=_LARGEST_BATCH
    )
    try:
        return _push(options, exporter, otlp)
    finally:
        exporter.shutdown()


def _push(options: argparse.Namespace, exporter: Any, otlp: Any) -> int:
    sources: dict[str, LiveSource] = {}
    since: dict[Any, int] = {}
    waiting = threading.Event()
    failing = False
    while True:
        runs = _snapshots(options.address, sources)
        sent = exporter.export(otlp.data(runs, since)).name == "SUCCESS"
        if not sent and not failing:
            say(
                f"{options.endpoint or 'the endpoint'} does not accept the metrics"
                + ("" if options.once else "; retrying")
            )
        if sent and failing:
            say("the metrics are accepted again")
        failing = not sent
        if options.once:
            return int(failing)
        if sent and all(run.ended for run in runs):
            return 0
        waiting.wait(options.every)


def _snapshots(address: str | None, sources: dict[str, LiveSource]) -> list[RunSnapshot]:
    """The snapshots of all runs; raises :class:`RunNotFound` when there was never a run."""
    try:
        found = runs_at(address) if address else node_runs()
    except SourceError:
        if not sources:
            raise
        found = []
    if not found and not sources:
        raise RunNotFound("no run is live on this node" if not address else f"no run at {address}")
    snapshots = []
    for run in found:
        source = sources.setdefault(run.run, LiveSource(run.address, run.run))
        snapshots.append(source.latest())
    return snapshots
