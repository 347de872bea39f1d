"""What /metrics shows: every metric, under its name, and nothing that is unknown."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from builders import changed, full_run, rank, run
from by_client import collect
from prometheus_client.openmetrics.parser import text_string_to_metric_families as openmetrics
from prometheus_client.parser import text_string_to_metric_families
from served import Fixed, get

from zeromon.base.units import printable
from zeromon.collector.http import start_http_server
from zeromon.diagnosis.engine import advise
from zeromon.export.prometheus.metrics import METRICS, Writer
from zeromon.readout.text import run_state
from zeromon.readout.verdict import Health as Verdict
from zeromon.snapshot import Finding
from zeromon.snapshot.rank import CTRL_C, DETACHED
from zeromon.sources.prometheus.client import Sample
from zeromon.sources.prometheus.decode import rank_of, samples_by_rank


def test_every_metric_is_exposed_under_its_name_in_text_and_openmetrics() -> None:
    """Both formats parse; every series has run and rank; names are those of the table."""
    full = full_run()
    view = Fixed(replace(full, ranks=(changed(full.ranks[0], failed=True, ended="SIGKILL"),)))
    server = start_http_server(view, "127.0.0.1", 0)
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
    server = start_http_server(Fixed(run(rank(0))), "127.0.0.1", 0)
    _, text = get(server.server_port, "/metrics")
    server.shutdown()
    assert b"zeromon_memory_allocated_bytes" not in text
    assert b"zeromon_host_memory_rss_bytes" in text


def test_hostile_names_stay_inside_their_label() -> None:
    """Quotes and newlines of a node's name do not make series of their own."""
    evil = 'n"} 1\nzeromon_evil{x="'
    server = start_http_server(Fixed(run(rank(0, node=evil))), "127.0.0.1", 0)
    _, text = get(server.server_port, "/metrics")
    server.shutdown()
    families = list(text_string_to_metric_families(text.decode()))
    assert not any(family.name == "zeromon_evil" for family in families)
    assert any(s.labels.get("node") == printable(evil) for family in families for s in family.samples)


def values(text: str) -> dict[str, list[dict[str, str]]]:
    """Name of each series -> its labels."""
    found: dict[str, list[dict[str, str]]] = {}
    for family in text_string_to_metric_families(text):
        for one in family.samples:
            found.setdefault(one.name, []).append(one.labels)
    return found


def test_gauges_end_with_the_run() -> None:
    """A board and an alert must not show the figures of a finished run as those of the present."""
    full = full_run()
    ended = replace(full, ended=True, ranks=(changed(full.ranks[0], alive=False),))
    text = Writer().write((ended,), None, openmetrics=False).decode()
    by_client = {s.name for family in collect((ended,)) for s in family.samples}
    assert by_client == set(values(text))
    kinds = {spec.name: spec.kind for spec in METRICS}
    gauges = {name for name in values(text) if kinds.get(name) == "gauge"}
    assert gauges == {
        "zeromon_rank_up", "zeromon_rank_failed", "zeromon_rank_detached", "zeromon_run_health",
        "zeromon_run_severity", "zeromon_run_started_timestamp_seconds",
    }  # fmt: skip
    assert {"zeromon_steps_total", "zeromon_rank_info", "zeromon_step_seconds_sum"} <= by_client


def health_of(snapshot: Any) -> tuple[dict[str, float], list[float]]:
    """The value of each word, and the severities."""
    families = text_string_to_metric_families(
        Writer().write((snapshot,), None, openmetrics=False).decode()
    )
    found = {family.name: family.samples for family in families}
    words = {s.labels["health"]: s.value for s in found["zeromon_run_health"]}
    return words, [s.value for s in found["zeromon_run_severity"]]


def test_the_health_of_a_run_is_one_word_of_all() -> None:
    """A series for each word, so that a query over time shows none that has passed."""
    full = full_run()
    critical = Finding(rule="oom_risk", severity="critical", text="x", code="ZM201")
    for snapshot, word, severity in (
        (replace(run(rank(0)), findings=(critical,)), "at risk", 3),
        (run(rank(0)), "healthy", 0),
        (run(rank(0, watched_steps=0, last_step=0, recent=())), "starting", 1),
        (replace(full, ended=True, findings=(), ranks=(dead(0, "SIGKILL"),)), "dead", 3),
    ):
        words, severities = health_of(snapshot)
        assert set(words) == set(map(str, Verdict))
        assert {name for name, value in words.items() if value} == {word}
        assert words[word] == 1
        assert severities == [severity]


def test_gauges_of_a_rank_end_when_the_agent_leaves_it() -> None:
    """What the process does is not known any more; it lives."""
    left = changed(full_run().ranks[0], ended=DETACHED)
    found = values(Writer().write((run(left),), None, openmetrics=False).decode())
    assert "zeromon_exposed_communication_ratio" not in found
    assert "zeromon_steps_total" in found
    facts = samples_by_rank([Sample({"__name__": f"zeromon_{name}", "rank": "0"}, (0.0, "1"))
                      for name in ("rank_up", "rank_detached")], [])  # fmt: skip
    assert rank_of(*next(iter(facts.items())), taken_wall=10.0, run_step=3).status.detached


def dead(number: int, ended: str, **facts: Any) -> Any:
    return rank(number, alive=False, failed=True, ended=ended, **facts)


PEER = "RuntimeError: [../third_party/gloo/pair.cc:534] Connection closed by peer [127.0.0.1]:2"
DEATHS = {
    "killed": ((dead(0, "SIGTERM"), dead(1, "SIGKILL")),
               ["SIGTERM victim", "SIGKILL culprit"]),
    "peer": ((dead(0, "exception", exception=PEER, last_event_ns=1),
              dead(1, "exception", exception="ValueError: x", last_event_ns=2)),
             ["peer_lost victim", "exception culprit"]),
    "nobody else": ((dead(0, "exception", exception=PEER), rank(1)), ["peer_lost culprit"]),
    "device": ((dead(0, "exception", exception="OutOfMemoryError: CUDA out of memory"),),
               ["device_oom culprit"]),
    "host": ((dead(0, "killed by the kernel for host memory"),), ["host_oom culprit"]),
    "unknown": ((dead(0, "killed without a final record (SIGKILL or a crash)"),),
                ["unknown culprit"]),
    CTRL_C: ((dead(0, "exception", exception="KeyboardInterrupt: ", last_event_ns=1),
              dead(1, "exception", exception=PEER, last_event_ns=2)),
             ["SIGINT stopped", "peer_lost stopped"]),
    "before Ctrl-C": ((dead(0, "SIGINT", last_event_ns=9), dead(1, "SIGSEGV", last_event_ns=2)),
                      ["SIGINT victim", "SIGSEGV culprit"]),
    "scheduler": ((dead(0, "SIGTERM"), dead(1, "SIGTERM")), ["SIGTERM stopped"] * 2),
}  # fmt: skip


@pytest.mark.parametrize("name", DEATHS)
def test_the_cause_of_a_death_tells_culprit_and_victim_apart(name: str) -> None:
    """The metric, and the finding: critical for a culprit, nothing after Ctrl-C."""
    ranks, expected = DEATHS[name]
    snapshot = run(*ranks, ended=all(not one.status.alive for one in ranks))
    found = values(Writer().write((snapshot,), None, openmetrics=False).decode())
    assert [f"{s['cause']} {s['role']}" for s in found["zeromon_rank_death"]] == expected
    failed = [
        sample.value
        for family in collect((snapshot,))
        for sample in family.samples
        if sample.name == "zeromon_rank_failed"
    ]
    assert sum(failed) == sum(not text.endswith("stopped") for text in expected)
    severities = [f.severity for f in advise(snapshot) if f.rule == "rank_died"]
    if name == CTRL_C:
        assert not severities
        assert run_state(snapshot) == "stopped by Ctrl-C after step 20"
    else:
        of_role = {"culprit": "critical", "victim": "info", "stopped": "warning"}
        roles = [text.split()[1] for text in expected]
        assert sorted(severities) == sorted(of_role[role] for role in roles)
