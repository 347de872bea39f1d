"""Finding a run and reading it over HTTP."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from builders import full_run, rank, run
from served import Fixed

from zeromon.base.errors import RunAmbiguous, RunNotFound, SourceError
from zeromon.collector.http import start_http_server
from zeromon.sources.live import LiveSource, find_live_runs, only_live_run, runs_at_address


def test_a_source_reads_what_the_server_shows() -> None:
    """The same snapshot on the other side of HTTP, and clear errors for the rest."""
    snapshot = full_run()
    server = start_http_server(Fixed(snapshot), "127.0.0.1", 0)
    address = f"127.0.0.1:{server.server_port}"
    assert LiveSource(address, snapshot.run).latest() == snapshot
    assert [r.run for r in runs_at_address(address)] == [snapshot.run]
    with pytest.raises(RunNotFound):
        LiveSource(address, "other").latest()
    found = find_live_runs(address)
    assert only_live_run(found).run == snapshot.run
    server.shutdown()
    server.server_close()
    with pytest.raises(SourceError):
        LiveSource(address, snapshot.run).latest()
    with pytest.raises(SourceError):
        find_live_runs("127.0.0.1:notaport")


def test_a_run_is_found_by_its_beginning_by_a_pid_and_by_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Live runs go before ended ones; several are a choice."""
    monkeypatch.setenv("ZEROMON_DIR", str(tmp_path))
    live = run(rank(0), rank(1), run="train-live")
    over = run(rank(5), run="train-over", ended=True)
    view = Fixed(live, over)
    server = start_http_server(view, "127.0.0.1", 0)
    facts = {"pid": 1, "host": "127.0.0.1", "port": server.server_port}
    (tmp_path / "collector.json").write_text(json.dumps(facts))
    assert only_live_run(find_live_runs(None)).run == "train-live"
    assert only_live_run(find_live_runs("train")).run == "train-live"
    assert only_live_run(find_live_runs("train-o")).run == "train-over"
    assert only_live_run(find_live_runs("101")).run == "train-live"
    assert only_live_run(find_live_runs("105")).run == "train-over"
    for nothing in ("999", "other"):
        with pytest.raises(RunNotFound):
            find_live_runs(nothing)
    view.view = (live, run(rank(0), run="train-two"))
    both = find_live_runs("train")
    assert isinstance(both, list)
    assert [r.run for r in both] == ["train-live", "train-two"]
    server.shutdown()
    server.server_close()
    with pytest.raises(RunNotFound):
        find_live_runs(None)


def test_something_else_on_the_port_is_not_a_collector() -> None:
    """A server that answers something else."""
    server = start_http_server(Fixed(), "127.0.0.1", 0)
    with pytest.raises(RunNotFound):
        find_live_runs(f"127.0.0.1:{server.server_port}")
    server.shutdown()
    two = Fixed(run(rank(0), run="a-1"), run(rank(0), run="a-2"))
    server = start_http_server(two, "127.0.0.1", 0)
    with pytest.raises(RunAmbiguous):
        only_live_run(find_live_runs(f"127.0.0.1:{server.server_port}"))
    server.shutdown()
