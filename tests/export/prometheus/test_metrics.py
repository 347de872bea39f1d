"""What /metrics shows: every metric, under its name, and nothing that is unknown."""

from __future__ import annotations

from builders import full_run, rank, run
from prometheus_client.openmetrics.parser import text_string_to_metric_families as openmetrics
from prometheus_client.parser import text_string_to_metric_families
from served import Fixed, get

from zeromon.collector.http import start_server
from zeromon.export.prometheus.metrics import METRICS


def test_every_metric_is_exposed_under_its_name_in_text_and_openmetrics() -> None:
    """Both formats parse; every series has run and rank; names are those of the table."""
    view = Fixed(full_run())
    server = start_server(view, "127.0.0.1", 0)
    _, text = get(server.server_port, "/metrics")
    _, opened = get(server.server_port, "/metrics", Accept="application/openmetrics-text")
    server.shutdown()
    for parse, body in ((text_string_to_metric_families, text), (openmetrics, opened)):
        samples = [s for family in parse(body.decode()) for s in family.samples]
        names = {s.name for s in samples}
        for spec in METRICS:
            wanted = f"{spec.name}_sum" if spec.kind == "histogram" else spec.name
            assert wanted in names, spec.name
        own = {spec.name for spec in METRICS if spec.own is not None}
        assert all({"run", "rank"} <= set(s.labels) for s in samples if s.name not in own)
        assert all(not s.labels for s in samples if s.name in own)
        assert not any("fqn" in s.labels or "unit" in s.labels for s in samples)
    assert view.reads == 2


def test_what_is_unknown_is_absent() -> None:
    """A CPU rank has no device memory, not one of zero bytes."""
    server = start_server(Fixed(run(rank(0))), "127.0.0.1", 0)
    _, text = get(server.server_port, "/metrics")
    server.shutdown()
    assert b"zeromon_memory_allocated_bytes" not in text
    assert b"zeromon_host_memory_rss_bytes" in text


def test_hostile_names_stay_inside_their_label() -> None:
    """Quotes and newlines of a node's name do not make series of their own."""
    evil = 'n"} 1\nzeromon_evil{x="'
    server = start_server(Fixed(run(rank(0, node=evil))), "127.0.0.1", 0)
    _, text = get(server.server_port, "/metrics")
    server.shutdown()
    families = list(text_string_to_metric_families(text.decode()))
    assert not any(family.name == "zeromon_evil" for family in families)
    assert any(s.labels.get("node") == evil for family in families for s in family.samples)
