"""What a server may answer instead of figures, and what the labels of strangers may hold."""

from __future__ import annotations

import gzip
import json
import re
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest
from builders import rank
from hypothesis import given, strategies as st

from zeromon.base.errors import RunNotFound, SourceError, ZeromonError
from zeromon.readout.text import finding_text
from zeromon.snapshot import Finding
from zeromon.sources.http_client import unpack_gzip
from zeromon.sources.prometheus import client, promql
from zeromon.sources.prometheus.client import Sample, Server, one_of, quote_promql_literal
from zeromon.sources.prometheus.decode import (
    dedupe_jobs,
    findings_of,
    hangs_of_ranks,
    history_of,
    key_of,
    rank_of,
    samples_by_rank,
    with_deaths,
)
from zeromon.sources.prometheus.promql import Choice
from zeromon.sources.prometheus.source import PrometheusSource, find_listed_runs, runs_of, usual_gap

Answer = Callable[[BaseHTTPRequestHandler], None]


class Fake:
    """A server that answers whatever a test wants; keeps the requests."""

    def __init__(self) -> None:
        self.answer: Answer = lambda handler: reply(handler, vector())
        self.asked: list[tuple[str, dict[str, str]]] = []
        fake = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                fake.asked.append((self.path, dict(self.headers)))
                fake.answer(self)

            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"])).decode()
                fake.asked.append((f"{self.path}?{body}", dict(self.headers)))
                fake.answer(self)

            def log_message(self, *args: Any) -> None:
                """Quiet."""

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.server.serve_forever, daemon=True).start()
        self.url = f"http://127.0.0.1:{self.server.server_port}"


@pytest.fixture(scope="module")
def running() -> Iterator[Fake]:
    made = Fake()
    yield made
    made.server.shutdown()


@pytest.fixture
def fake(running: Fake) -> Fake:
    running.answer = lambda handler: reply(handler, vector())
    running.asked.clear()
    return running


def reply(handler: BaseHTTPRequestHandler, body: bytes, code: int = 200, **headers: str) -> None:
    handler.send_response(code)
    handler.send_header("Content-Length", str(len(body)))
    for name, value in headers.items():
        handler.send_header(name.replace("_", "-"), value)
    handler.end_headers()
    handler.wfile.write(body)


def vector(*elements: tuple[dict[str, str], str], **more: Any) -> bytes:
    rows = [{"metric": labels, "value": [time.time(), value]} for labels, value in elements]
    data = {"resultType": "vector", "result": rows}
    return json.dumps({"status": "success", "data": data, **more}).encode()


def refusal(text: str) -> bytes:
    return json.dumps({"status": "error", "errorType": "execution", "error": text}).encode()


@pytest.mark.parametrize(
    ("code", "body", "says", "hint"),
    [
        (401, b"", "wants other credentials", "ZEROMON_PROMETHEUS_TOKEN"),
        (403, refusal("no"), "wants other credentials", "user:password"),
        (404, b"<html>", "there is no Prometheus API at", "https://host/prometheus"),
        (422, refusal("query processing would load too many samples"), "too many samples", ""),
        (400, refusal("parse \x1b[31m error"), "parse ?[31m error", ""),
        (503, b"starting", "HTTP 503", "may be starting"),
        (200, b"<html>hello</html>", "does not speak Prometheus's API", "its web page"),
        (200, b'{"status":"success","data":{"result":[{"metric":1}]}}', "does not speak", "web page"),
        (200, b"\xff\xfe", "does not speak", "web page"),
    ],
)  # fmt: skip
def test_every_refusal_has_a_way_out(fake: Fake, code: int, body: bytes, says: str, hint: str) -> None:
    fake.answer = lambda handler: reply(handler, body, code)
    with pytest.raises(SourceError) as refused:
        Server(fake.url).vector("up")
    assert says in str(refused.value)
    assert hint in refused.value.hint


def test_a_slow_server_is_not_waited_for_for_ever(fake: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "TIMEOUT_SECONDS", 0.2)
    fake.answer = lambda handler: time.sleep(1)
    with pytest.raises(SourceError, match=r"gives no answer in 200\.0 ms"):
        Server(fake.url).vector("up")


def test_a_torn_or_packed_answer(fake: Fake) -> None:
    packed = gzip.compress(vector(({"a": "b"}, "1")))
    fake.answer = lambda handler: reply(handler, packed, Content_Encoding="gzip")
    assert Server(fake.url).vector("up")[0].labels == {"a": "b"}
    fake.answer = lambda handler: reply(handler, packed[:-10], Content_Encoding="gzip")
    with pytest.raises(SourceError, match="broke off"):
        Server(fake.url).vector("up")


def test_an_answer_that_unpacks_to_more_than_the_limit_is_refused(
    fake: Fake, monkeypatch: pytest.MonkeyPatch
) -> None:
    """1 MiB of blanks has 1 KiB packed; no more than the limit is ever unpacked."""
    monkeypatch.setattr(client, "_MAX_BYTES", 1 << 16)
    bomb = gzip.compress(b" " * (1 << 20))
    assert len(unpack_gzip(bomb, 1000)) == 1000
    fake.answer = lambda handler: reply(handler, bomb, Content_Encoding="gzip")
    with pytest.raises(SourceError, match="more than"):
        Server(fake.url).vector("up")


def test_the_token_goes_to_the_server_alone(fake: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ZEROMON_PROMETHEUS_TOKEN", "secret")
    monkeypatch.setenv("ZEROMON_PROMETHEUS_TENANT", "team")
    fake.answer = lambda handler: reply(handler, b"", 302, Location="http://evil.example/api/v1/x")
    with pytest.raises(SourceError, match=r"(?m)redirects to http://evil\.example$"):
        Server(f"{fake.url}/base/").vector("up")
    path, headers = fake.asked[0]
    assert path.startswith("/base/api/v1/query?")
    assert (headers["Authorization"], headers["X-Scope-Orgid"]) == ("Bearer secret", "team")
    assert len(fake.asked) == 1


def test_a_password_in_the_address_is_used_and_not_shown(fake: Fake) -> None:
    server = Server(fake.url.replace("http://", "http://me:p%40ss@"))
    server.vector("up")
    assert fake.asked[0][1]["Authorization"] == "Basic bWU6cEBzcw=="
    assert server.url == fake.url


def test_a_long_question_is_posted(fake: Fake) -> None:
    Server(fake.url).vector("up" + " or up" * 400)
    assert "query=up+or+up" in fake.asked[0][0]
    assert fake.asked[0][0].startswith("/api/v1/query?query")


@pytest.mark.parametrize("url", ["ftp://host", "http://", "file:///etc/passwd", ""])
def test_what_is_no_address_is_refused(url: str) -> None:
    with pytest.raises(SourceError, match="is not the address of a server"):
        Server(url)


def test_warnings_of_a_part_that_is_missing_are_told(fake: Fake) -> None:
    """Thanos and Mimir answer with what they have."""
    server = Server(fake.url)
    fake.answer = lambda handler: reply(handler, vector(warnings=["store A is away\n"]))
    server.vector("up")
    assert server.warning == "store A is away?"


def test_not_a_number_is_unknown(fake: Fake) -> None:
    fake.answer = lambda handler: reply(handler, vector(({"a": "1"}, "NaN"), ({"a": "2"}, "+Inf")))
    assert [s.labels["a"] for s in Server(fake.url).vector("up")] == ["2"]


# ---- names of strangers ----------------------------------------------------------------------------

HOSTILE = ["../../etc", "a b", "\x1b[31m", "", "x" * 10_000, "💥", '"} or vector(1) #', "a\nb"]


def test_runs_that_cannot_be_ours_are_left_out(fake: Fake) -> None:
    rows = [({"run": name, "of": "ranks"}, "1") for name in (*HOSTILE, "good")]
    fake.answer = lambda handler: reply(handler, vector(*rows))
    assert [run.run for run in runs_of(Server(fake.url))] == ["good"]


@pytest.mark.parametrize("name", HOSTILE)
def test_a_name_that_cannot_be_a_runs_is_asked_of_nobody(fake: Fake, name: str) -> None:
    with pytest.raises(RunNotFound):
        PrometheusSource(Server(fake.url), name)
    assert fake.asked == []


def test_a_selector_is_the_users_own(fake: Fake) -> None:
    fake.answer = lambda handler: reply(handler, vector(({"run": "train", "of": "ranks"}, "2")))
    server = Server(fake.url)
    (found,) = find_listed_runs(server, 'train{cluster="a"}')
    with pytest.raises(ZeromonError):
        found.open(server).latest()
    asked = [parse_qs(urlsplit(path).query).get("query", [""])[0] for path, _ in fake.asked]
    of_runs, *of_one = (text for text in asked if text)
    assert "by (run)" in of_runs
    assert of_one
    assert all('run="train",' in text and 'cluster="a"' in text for text in of_one)


@given(st.text())
def test_text_in_a_question_stays_text(text: str) -> None:
    inner = quote_promql_literal(text)[1:-1]
    assert '"' not in inner.replace("\\\\", "").replace('\\"', "")
    assert "\n" not in inner


def test_a_choice_of_names_matches_them_alone() -> None:
    assert one_of(["a.b:1", "[::1]:2"]) == r'"a\\.b:1|\\[::1\\]:2"'
    assert Choice("r", ranks=(1, 20)).of("x") == 'zeromon_x{run="r",rank=~"1|20"}'
    assert "\n" not in promql.whole_run(Choice("r"), "60s")


def test_a_sample_has_a_tenth_of_the_ranks_and_every_local_rank() -> None:
    asked = promql.sample_tenth(Choice("r", 'job="a"')).of("x")
    pattern = asked.partition('rank=~"')[2].partition('"')[0]
    chosen = [n for n in range(16_384) if re.fullmatch(pattern, str(n))]
    assert 'job="a"' in asked
    assert 0.095 < len(chosen) / 16_384 < 0.105
    shares = [sum(n % 8 == local for n in chosen) / len(chosen) for local in range(8)]
    assert min(shares) > 0.09, shares


@given(st.text())
def test_a_rank_is_a_number_or_nothing(text: str) -> None:
    key = key_of({"rank": text})
    assert key is None or (key.rank >= 0 and text.isdigit())


def sample(name: str, rank: str = "0", value: float = 1.0, **labels: str) -> Sample:
    return Sample({"__name__": f"zeromon_{name}", "rank": rank, **labels}, (0.0, str(value)))


def test_labels_of_strangers_break_nothing() -> None:
    """What should be a number is not, what should be a rule is not one."""
    evil = "\x1b[31m<script>"
    columns = [
        sample("rank_info", pid=evil, world_size="-3", node=evil, strategy=evil),
        sample("rank_up"), sample("finding", rule=evil, severity=evil),
        sample("oom_risk_ratio", pool=evil, value=float("inf")), sample("hang", kind=evil, role=evil),
        sample("rank_up", rank="x"), sample("rank_up", rank="٣"), sample("unheard_of", value=1e300),
        sample("memory_role_bytes", role=evil, place=evil),
        sample("group_info", group=evil, size="many", nodes=""),
    ]  # fmt: skip
    facts = samples_by_rank(columns, [])
    assert [key.rank for key in facts] == [0]
    rank = rank_of(*next(iter(facts.items())), taken_wall=10.0, run_step=3)
    assert (rank.pid, rank.world_size, rank.node, rank.status.alive) == (0, 0, evil, True)
    (finding,) = findings_of(facts, {}, 1)
    assert (finding.rule, finding.code, finding.rank) == (evil, "", 0)


@pytest.mark.parametrize(
    ("role", "failed", "stopped"), [("stopped", 0.0, "SIGTERM"), ("victim", 1.0, "SIGTERM")]
)
def test_a_rank_that_somebody_stopped_is_no_failed_one_and_not_finished(
    role: str, failed: float, stopped: str
) -> None:
    columns = [
        sample("rank_up", value=0.0), sample("rank_failed", value=failed),
        sample("rank_death", cause="SIGTERM", role=role),
    ]  # fmt: skip
    ((key, facts),) = samples_by_rank(columns, []).items()
    status = rank_of(key, facts, taken_wall=10.0, run_step=3).status
    assert (status.ended, status.stopped, status.failed) == ("SIGTERM", stopped, True)


def test_a_hang_is_named_by_its_operation_and_group() -> None:
    """One that names neither is of an older collector."""
    named = {"kind": "a member has not come", "op": "all_gather", "group": "dp"}
    facts = samples_by_rank([
        sample("hang", role="waiting", **named), sample("hang", rank="1", role="missing", **named),
        sample("hang", rank="2", role="waiting", kind="deadlock"),
        sample("collective_in_flight_seconds", value=12.0),
    ], [])  # fmt: skip
    one, other = hangs_of_ranks(facts)
    assert (one.op, one.group, one.waiting, one.missing, one.seconds) == (
        "all_gather", "dp", (0,), (1,), 12.0,
    )  # fmt: skip
    assert (other.op, other.group, other.waiting) == ("a collective", "a group", (2,))


def test_a_death_is_told_with_its_cause_and_step() -> None:
    """Of one rank, and where one finding stands for all of them of the first that died."""
    ranks = [rank(0, last_step=49), rank(1, failed=True, alive=False, ended="SIGKILL", last_step=41)]
    died = [Finding(rule="rank_died", severity="critical", text="x", rank=n) for n in (1, -1)]
    texts = [finding_text(one) for one in with_deaths(died, ranks)]
    assert texts == ["rank 1: SIGKILL after step 41"] * 2


def test_a_rank_that_began_again_elsewhere_is_one_rank() -> None:
    """It died where it was; it is no second job."""
    dead = [sample("rank_up", value=0, instance="a"), sample("steps_total", value=90, instance="a")]
    lives = [sample("rank_up", instance="b"), sample("steps_total", value=4, instance="b")]
    kept, others = dedupe_jobs(samples_by_rank([*dead, *lives], []))
    assert ([key.instance for key in kept], others) == (["b"], ())
    kept, others = dedupe_jobs(samples_by_rank([*lives, sample("rank_up", instance="c")], []))
    assert ([key.instance for key in kept], others) == (["b"], ("c",))


def test_a_gap_is_a_gap() -> None:
    """A finding that went and came again has come twice."""
    line = client.Line({"rule": "straggler", "severity": "warning"},
                    [(at, "1") for at in (10.0, 20.0, 60.0, 70.0)])  # fmt: skip
    other = client.Line({"rule": "oom_risk", "severity": "warning"}, [(10.0, "1")])
    found = [(one.rule, one.came, one.gone) for one in history_of([line, other], 10.0)]
    assert found == [
        ("oom_risk", 10.0, 20.0), ("straggler", 10.0, 30.0), ("straggler", 60.0, None),
    ]  # fmt: skip


def test_how_often_it_is_scraped() -> None:
    assert usual_gap([[0, 15, 30, 60], [5, 20]]) == 15
    assert usual_gap([[1.0], []]) is None
