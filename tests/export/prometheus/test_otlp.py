"""What is pushed over OTLP arrives whole, and is what /metrics says."""

from __future__ import annotations

import gzip
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from builders import full_run, rank, run
from prometheus_client.parser import text_string_to_metric_families
from served import Fixed, get

from zeromon.cli import main
from zeromon.collector.http import start_server
from zeromon.export.prometheus.metrics import METRICS
from zeromon.snapshot import RunSnapshot
from zeromon.units import printable

pytest.importorskip("opentelemetry.exporter.otlp.proto.http", reason="the otlp extra is missing")

from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import (
    ExportMetricsServiceRequest,
    ExportMetricsServiceResponse,
)

EVIL = 'n"} 1\nzeromon_evil{x="\0'
Series = dict[tuple[str, tuple[tuple[str, str], ...]], float]


class Receiver:
    """An endpoint that keeps what it is given; it refuses the first *refusals* requests."""

    def __init__(self, refusals: int = 0) -> None:
        self.requests: list[ExportMetricsServiceRequest] = []
        self.refusals = refusals
        receiver = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                if self.headers.get("Content-Encoding") == "gzip":
                    body = gzip.decompress(body)
                refused = receiver.refusals > 0
                receiver.refusals -= refused
                if not refused:
                    receiver.requests.append(ExportMetricsServiceRequest.FromString(body))
                answer = ExportMetricsServiceResponse().SerializeToString()
                self.send_response(400 if refused else 200)
                self.send_header("Content-Type", "application/x-protobuf")
                self.send_header("Content-Length", str(len(answer)))
                self.end_headers()
                self.wfile.write(answer)

            def log_message(self, *_: Any) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.server.serve_forever, daemon=True).start()
        self.url = f"http://127.0.0.1:{self.server.server_port}/v1/metrics"

    def metrics(self) -> Iterator[tuple[dict[str, str], Any]]:
        """Each metric with its resource's attributes."""
        for request in self.requests:
            for resource in request.resource_metrics:
                about = {a.key: a.value.string_value for a in resource.resource.attributes}
                for scope in resource.scope_metrics:
                    for metric in scope.metrics:
                        yield about, metric


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    made = Receiver()
    yield made
    made.server.shutdown()


def pushed(receiver: Receiver) -> Series:
    """All that arrived, as Prometheus would name it."""
    found: Series = {}

    def put(name: str, labels: dict[str, str], value: float) -> None:
        key = (name, tuple(sorted(labels.items())))
        assert key not in found, f"{key} came twice"
        found[key] = value

    for _, metric in receiver.metrics():
        kind = metric.WhichOneof("data")
        data = getattr(metric, kind)
        if kind != "gauge":
            assert data.aggregation_temporality == 2  # cumulative
        for point in data.data_points:
            labels = {a.key: a.value.string_value for a in point.attributes}
            if kind == "histogram":
                total = 0
                for bound, count in zip(
                    (*point.explicit_bounds, None), point.bucket_counts, strict=True
                ):
                    total += count
                    le = "+Inf" if bound is None else str(bound)
                    put(f"{metric.name}_bucket", labels | {"le": le}, total)
                put(f"{metric.name}_count", labels, point.count)
                put(f"{metric.name}_sum", labels, point.sum)
                continue
            value = getattr(point, point.WhichOneof("value"))
            if kind == "sum":
                assert data.is_monotonic
                assert 0 < point.start_time_unix_nano <= point.time_unix_nano
            put(metric.name + ("_total" if kind == "sum" else ""), labels, float(value))
    return found


def scraped(port: int) -> Series:
    """/metrics, without what tells of the collector itself."""
    _, text = get(port, "/metrics")
    own = {spec.name for spec in METRICS if spec.own is not None}
    return {
        (s.name, tuple(sorted((s.labels | bound(s.labels)).items()))): s.value
        for family in text_string_to_metric_families(text.decode())
        for s in family.samples
        if s.name not in own
    }


def bound(labels: dict[str, str]) -> dict[str, str]:
    """The upper bound of a bucket as OTLP has it: a number."""
    return {"le": str(float(labels["le"])).replace("inf", "+Inf")} if "le" in labels else {}


def hostile() -> RunSnapshot:
    """A run in which every metric has a value, on two nodes."""
    one = full_run().ranks[0]
    ranks = [
        replace(one, rank=n, node=(EVIL, "n1")[n % 2], strategy=EVIL, steps=2**53 + n)
        for n in range(4)
    ]
    return run(*ranks, run=f"{EVIL}-run")


def test_every_value_arrives_as_metrics_says_it(receiver: Receiver) -> None:
    """The same names, labels and numbers; counters as sums, histograms with all their buckets."""
    server = start_server(Fixed(hostile(), run(rank(0), ended=True)), "127.0.0.1", 0)
    port = server.server_port
    assert main(["otlp", f"127.0.0.1:{port}", "--endpoint", receiver.url, "--once"]) == 0
    assert pushed(receiver) == scraped(port)
    server.shutdown()


def test_resources_are_runs_and_nodes(receiver: Receiver) -> None:
    server = start_server(Fixed(hostile()), "127.0.0.1", 0)
    assert (
        main(["otlp", f"127.0.0.1:{server.server_port}", "--endpoint", receiver.url, "--once"]) == 0
    )
    server.shutdown()
    nodes = {about["zeromon.node"] for about, _ in receiver.metrics()}
    assert nodes == {printable(EVIL), "n1"}
    for about, metric in receiver.metrics():
        assert about["service.name"] == "zeromon"
        assert about["host.name"] == about["zeromon.node"]
        assert metric.description
    units = {metric.name: metric.unit for _, metric in receiver.metrics()}
    assert units["zeromon_collective_bytes"] == "By"
    assert units["zeromon_overlap_ratio"] == "1"
    assert units["zeromon_rank_up"] == "{bool}"


def test_more_than_two_thousand_series_of_a_metric_arrive(receiver: Receiver) -> None:
    """OpenTelemetry's own aggregation would keep 2,000 of them."""
    one = rank(0)
    rows = tuple(replace(one.collectives[0], group=f"g{n}") for n in range(3000))
    server = start_server(Fixed(run(replace(one, collectives=rows), ended=True)), "127.0.0.1", 0)
    port = server.server_port
    assert main(["otlp", f"127.0.0.1:{port}", "--endpoint", receiver.url]) == 0
    found = pushed(receiver)
    assert found == scraped(port)
    assert sum(name == "zeromon_collectives_total" for name, _ in found) == 3000
    assert len(receiver.requests) > 1  # in pieces, so that no receiver finds one too large
    server.shutdown()


class Ending(Fixed):
    """A run that ends after some looks."""

    def __init__(self, looks: int) -> None:
        super().__init__()
        self._looks = looks
        self._began = time.time()

    @property
    def view(self) -> tuple[RunSnapshot, ...]:  # type: ignore[override]
        now = time.time()
        taken = round((now - self._began) * 1e9) + 10**9 + self.reads % 3  # clocks that drift
        snapshot = run(rank(0), taken_wall=now, taken_ns=taken, ended=self.reads >= self._looks)
        return (snapshot,)

    @view.setter
    def view(self, _: Any) -> None:
        pass


def test_pushes_go_on_to_the_end_and_beginnings_stay(capsys: pytest.CaptureFixture[str]) -> None:
    """A refusal is said once and overcome; the beginning of the sums is the same in every push."""
    receiver = Receiver(refusals=1)
    server = start_server(Ending(3), "127.0.0.1", 0)
    words = ["otlp", f"127.0.0.1:{server.server_port}", "--endpoint", receiver.url, "--every", "1"]
    assert main(words) == 0
    told = capsys.readouterr().err
    assert told.count("does not accept the metrics") == 1
    assert "accepted again" in told
    assert len(receiver.requests) >= 2
    points = [
        p for _, m in receiver.metrics() if m.name == "zeromon_steps" for p in m.sum.data_points
    ]
    assert len({p.start_time_unix_nano for p in points}) == 1
    assert len({p.time_unix_nano for p in points}) == len(points)
    server.shutdown()
    receiver.server.shutdown()


def test_once_is_once_and_says_whether_it_went(capsys: pytest.CaptureFixture[str]) -> None:
    server = start_server(Fixed(run(rank(0))), "127.0.0.1", 0)
    receiver = Receiver(refusals=1)
    words = ["otlp", f"127.0.0.1:{server.server_port}", "--endpoint", receiver.url, "--once"]
    assert [main(words), main(words)] == [1, 0]
    server.shutdown()
    server.server_close()
    assert main(words) == 2
    assert "no collector answers" in capsys.readouterr().err
    receiver.server.shutdown()


def test_without_the_exporter_the_way_out_is_said() -> None:
    code = (
        "import sys; sys.modules['opentelemetry.sdk.metrics.export'] = None; "
        "from zeromon.cli import main; sys.exit(main(['otlp']))"
    )
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert told.returncode == 2
    assert "zeromon[otlp]" in told.stderr
