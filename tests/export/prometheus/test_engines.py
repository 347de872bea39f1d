"""Prometheus and VictoriaMetrics scrape the same targets, and give the same answers."""

from __future__ import annotations

import json
import math
import shutil
import subprocess
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import pytest
import yaml
from builders import changed, full_run, run
from fleet import Fleet
from grafana_boards.boards import BOARDS
from prometheus_server import Prometheus, needs_prometheus, scrape
from served import Fixed
from support import free_port

from zeromon.base.units import printable
from zeromon.cli import main
from zeromon.collector.http import start_http_server
from zeromon.export.prometheus import rules
from zeromon.export.prometheus.rules import AGGREGATES, recording_rule
from zeromon.ring.tokens import user_token_file
from zeromon.snapshot.host import HostMemory

pytestmark = [
    needs_prometheus,
    pytest.mark.skipif(
        shutil.which("victoria-metrics") is None, reason="victoria-metrics is not installed"
    ),
]

RANKS = 12
EVIL = ('n"} 1\nzeromon_evil{x="', "back\\slash\\n", "a\0b", "\ud800", "é\U0001f600", "{{ . }}", "#", "")


@contextmanager
def victoria(jobs: list[dict[str, Any]]) -> Iterator[str]:
    """The address of a VictoriaMetrics that scrapes *jobs* every second."""
    port, folder = free_port(), Path(tempfile.mkdtemp(prefix="zeromon-victoria-"))
    config = folder / "scrape.yml"
    seconds = {"scrape_interval": "1s", "scrape_timeout": "1s"}
    config.write_text(yaml.safe_dump({"global": seconds, "scrape_configs": jobs}))
    command = [
        "victoria-metrics", f"-storageDataPath={folder}/data", f"-promscrape.config={config}",
        f"-httpListenAddr=127.0.0.1:{port}", "-search.latencyOffset=0s", "-memory.allowedBytes=256MB",
    ]  # fmt: skip
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait()
        shutil.rmtree(folder, ignore_errors=True)


def asked(url: str, expression: str, at: float) -> dict[tuple[tuple[str, str], ...], float]:
    """The instant vector of *expression*: labels -> number; empty while nobody answers."""
    query = urlencode({"query": expression, "time": f"{at:.3f}", "nocache": "1", "step": "1s"})
    try:
        with urllib.request.urlopen(f"{url}/api/v1/query?{query}", timeout=30) as answer:
            found = json.load(answer)["data"]["result"]
    except OSError:
        return {}
    return {tuple(sorted(one["metric"].items())): float(one["value"][1]) for one in found}


def wait(url: str, expression: str, least: float) -> None:
    deadline = time.monotonic() + 60
    while max(asked(url, expression, time.time()).values(), default=0) < least:
        assert time.monotonic() < deadline, expression
        time.sleep(0.2)


@contextmanager
def both(jobs: list[dict[str, Any]], seen: str, least: float) -> Iterator[tuple[str, str]]:
    """The addresses of two servers that scrape *jobs*, once *seen* is at *least* that at both."""
    with Prometheus(jobs) as server, victoria(jobs) as other:
        for url in (server.url, other):
            wait(url, seen, least)
        yield server.url, other


def hostile_run() -> Fixed:
    """Runs that stand still, of ranks whose names are anything; no two are equally late or full."""
    one = full_run().ranks[0]
    ranks = [
        changed(
            one, rank=n, node=EVIL[n % len(EVIL)], strategy=EVIL[(n + 1) % len(EVIL)], watched_steps=n,
            late_seconds=n / 100, exposed_ratio=n / 50, host=HostMemory(headroom_bytes=n),
        )
        for n in range(2 * RANKS)
    ]  # fmt: skip
    return Fixed(run(*ranks[:RANKS], run=EVIL[0]), run(*ranks[RANKS:], run="quiet", ended=True))


@pytest.fixture(scope="module")
def still() -> Iterator[tuple[str, str]]:
    server = start_http_server(hostile_run(), "127.0.0.1", 0)
    jobs = [scrape(static_configs=[{"targets": [f"127.0.0.1:{server.server_port}"]}])]
    with both(jobs, "min(count_over_time(zeromon_rank_up[1m]))", 3) as urls:
        yield urls
    server.shutdown()


def queries() -> Iterator[str]:
    """What our rules and dashboards ask for, but rates, which the two define differently."""
    found = [recording_rule(each, level)["expr"] for level in ("run", "node") for each in AGGREGATES]
    found += [q.expr for board in BOARDS for row in board.rows for p in row.panels for q in p.queries]
    for expression in found:
        if not any(word in expression for word in ("rate(", "increase(", "timestamp(")):
            for variable in ("$run", "$rank", "$node"):
                expression = expression.replace(variable, "(?s:.*)")  # a newline, too
            assert "$" not in expression
            yield expression


def test_every_series_is_the_same(still: tuple[str, str]) -> None:
    """Names, label values however hostile, numbers: of all that zeromon exposes."""
    ours, theirs = (asked(url, '{__name__=~"zeromon_.*"}', time.time()) for url in still)
    # an empty label is no label to both; what stands still has the same number at any time
    assert len(ours) > RANKS * 100
    assert ours.keys() == theirs.keys()
    assert all(same(ours[key], theirs[key], 1e-12) for key in ours)
    assert {dict(key)["run"] for key in ours if "run" in dict(key)} == {printable(EVIL[0]), "quiet"}


def test_rules_and_dashboards_are_answered_the_same(still: tuple[str, str]) -> None:
    answered = 0
    for expression in dict.fromkeys(queries()):
        ours, theirs = (asked(url, expression, time.time()) for url in still)
        assert nameless(ours).keys() == nameless(theirs).keys(), expression
        for key, value in nameless(ours).items():
            assert same(value, nameless(theirs)[key], 1e-9), expression
        answered += bool(ours)
    assert answered > 60


def nameless(
    found: dict[tuple[tuple[str, str], ...], float],
) -> dict[tuple[tuple[str, str], ...], float]:
    """Without the metric's own name, which VictoriaMetrics keeps in places and Prometheus drops."""
    return {tuple(pair for pair in key if pair[0] != "__name__"): value for key, value in found.items()}


def same(first: float, second: float, tolerance: float) -> bool:
    return math.isclose(first, second, rel_tol=tolerance) or (math.isnan(first) and math.isnan(second))


@pytest.mark.long  # what stands still is compared each time
def test_a_moving_run_is_the_same_within_what_a_scrape_is_off() -> None:
    """Through /sd, with rates: both of them find the same speed."""
    seen = "min(count_over_time(zeromon_rank_up[1m]))"
    with Fleet(2, 8) as fleet:
        made = rules.scrape_document(
            [f"http://{fleet.address}/sd"], [], token_file=str(user_token_file())
        )
        with both(made["scrape_configs"], seen, 7) as urls:
            compare(urls)


def compare(urls: tuple[str, str]) -> None:
    """What moves, of both of them, now."""
    for expression in (
        "sum by (node) (rate(zeromon_phase_seconds_total[6s]))",
        "max by (run) (zeromon_memory_capacity_bytes)",
        "count by (run, node) (zeromon_rank_up == 1)",
        "avg by (run) (rate(zeromon_step_seconds_sum[6s]))",
    ):
        ours, theirs = (asked(url, expression, time.time()) for url in urls)
        assert ours, expression
        assert ours.keys() == theirs.keys()
        for key, value in ours.items():
            assert same(value, theirs[key], 0.2), (expression, value, theirs[key])


@pytest.mark.parametrize("words", (["--sd", "http://n0:9417/sd"], ["--target", "n0:9417"]))
@pytest.mark.parametrize("token", (False, True))
def test_both_read_the_configuration_that_is_printed(
    words: list[str], token: bool, tmp_path: Path
) -> None:
    """VictoriaMetrics refuses a file with a word that it does not know."""
    path, secret = tmp_path / "scrape.yml", tmp_path / "token"
    secret.write_text("secret")
    given = ["--token-file", str(secret)] if token else []
    assert main(["prometheus", "config", *words, *given, "-o", str(path)]) == 0
    command = ["victoria-metrics", "-dryRun", f"-promscrape.config={path}"]
    told = subprocess.run(
        [*command, f"-storageDataPath={tmp_path}/data"], capture_output=True, text=True
    )
    assert told.returncode == 0, told.stderr
