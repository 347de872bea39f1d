"""The dashboard without a browser: addresses, refusals, what tabs are sent, figures, hostile names."""

from __future__ import annotations

import asyncio
import json
import re
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import plotly.graph_objects as go
import pytest
from builders import MS, device_memory, rank, run, summary
from hypothesis import given, strategies as st
from tui.snapshots import FleetSource, fleet_picture

from zeromon.base.errors import RunNotFound, SourceError
from zeromon.cli.dash import make_opening_page
from zeromon.readout.charts import EVERYTHING_ELSE
from zeromon.readout.figures import MAPPED
from zeromon.readout.text import clock
from zeromon.snapshot import CollectiveStatsRow, Finding, Hang, RunSnapshot, Severity
from zeromon.snapshot.communication import SIZE_BOUNDS, SizeRow, Straggler, UnitRow
from zeromon.snapshot.finding import Remedy
from zeromon.snapshot.memory import ExpectedRow, Risk, RoleRow
from zeromon.snapshot.run import About
from zeromon.sources.access import Request, host_without_port, refusal_of
from zeromon.sources.replay import StoreSource
from zeromon.storage.run_store import WHOLE_RUN, StepQuery, Store
from zeromon.storage.snapshot_log import Past, Record
from zeromon.storage.step_history.rows import row_of
from zeromon.storage.step_history.writer import rows_frame
from zeromon_dashboard import charts, feed, hub, layout, plotly_figures, runs_page
from zeromon_dashboard.access import Guard, address_key, policy_of
from zeromon_dashboard.feed import Cursor, Feeds
from zeromon_dashboard.hub import Followed, Hub
from zeromon_dashboard.page import Known
from zeromon_dashboard.pages import advice, memory as memory_page, ranks as ranks_page
from zeromon_dashboard.routes import make_app, to_csv
from zeromon_dashboard.url_state import PAGES, Route, parse_route

EVIL = "=cmd|'/C calc'!A0<img src=x onerror=alert(1)>"
DAY = 1_700_000_000.0

# ---- addresses ------------------------------------------------------------------------------------

wheres = st.builds(
    Route,
    run=st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._-]{0,20}", fullmatch=True),
    page=st.sampled_from(list(PAGES)),
    ranks=st.sets(st.integers(0, 9999), max_size=8).map(lambda found: tuple(sorted(found))),
    last=st.sampled_from((100, 1000, 0)),
    metric=st.sampled_from([figure.name for figure in MAPPED]),
    node=st.text(max_size=40),
    at=st.one_of(st.none(), st.integers(1, 10**12).map(lambda ms: ms / 1000)),
    others=st.sampled_from([(), ("another-b",), ("another-b", "another-c.1")]),
    steps=st.one_of(
        st.none(), st.tuples(st.integers(0, 10**9), st.integers(0, 10**9)).map(sorted).map(tuple)
    ),
)


@given(wheres)
def test_an_address_keeps_what_a_tab_looks_at(where: Route) -> None:
    path, _, query = where.address.partition("?")
    assert parse_route(path, query) == where


@given(st.text(), st.text())
def test_any_address_means_some_place(path: str, query: str) -> None:
    where = parse_route(path, query)
    assert where.page in PAGES and where.metric in {figure.name for figure in MAPPED}
    assert (
        parse_route(*where.address.split("?") if "?" in where.address else (where.address, "")) == where
    )


@pytest.mark.parametrize("text", ["", "7", "a-b", "1-", "-5--2", "1-2-3", "٣-٤"])
def test_what_is_no_range_of_steps_is_the_whole_run(text: str) -> None:
    assert parse_route("/run/a/memory", f"steps={text}").steps is None
    assert parse_route("/run/a/memory", "steps=90-40").steps == (40, 90)


@pytest.mark.parametrize(
    "path", ["/run/..%2f..%2fetc/memory", "/run/%00/x", "/run/", "//evil.example", "/run/-rf/memory"]
)
def test_a_path_leads_nowhere_else(path: str) -> None:
    assert parse_route(path, "").run == ""


# ---- refusals -------------------------------------------------------------------------------------


def asked(**facts: Any) -> Request:
    return Request(
        **{"method": "GET", "path": "/", "host": "127.0.0.1:1", "origin": "", "token": "secret"} | facts
    )


@pytest.mark.parametrize(
    ("request_", "loopback", "status"),
    [
        (asked(), True, None),
        (asked(token=""), True, 401),
        (asked(token="", path="/live"), True, 401),
        (asked(host="localhost:1"), True, None),
        (asked(host="[::1]:1"), True, None),
        (asked(host="evil.example:1"), True, 403),
        (asked(host="127.0.0.1.evil.example"), True, 403),
        (asked(host=""), True, 403),
        (asked(method="POST", origin="http://127.0.0.1:1"), True, None),
        (asked(method="POST", origin="http://evil.example"), True, 403),
        (asked(method="POST", origin="http://127.0.0.1:2"), True, 403),
        (asked(method="POST", origin="null"), True, 403),
        (asked(method="POST", path="/act/trace", token=""), True, 401),
        (asked(method="POST", path="/act/trace", token="wrong"), True, 401),
        (asked(method="POST", path="/act/trace", token="sécret"), True, 401),
        (asked(method="POST", path="/act/trace", token="secret"), True, None),
        (asked(method="GET", path="/act/trace", token="secret"), True, 405),
        (asked(host="node7:1", token=""), False, 401),
        (asked(host="node7:1", token="secret"), False, None),
        (asked(host="node7:1", token="secret", origin="http://node8:1"), False, 403),
        (asked(length=1 << 21), True, 413),
    ],
)
def test_who_may_ask_for_what(request_: Request, loopback: bool, status: int | None) -> None:
    refused = refusal_of(request_, policy_of("secret", loopback=loopback))
    assert (refused[0] if refused else None) == status


def test_without_a_token_of_its_own_nobody_has_it() -> None:
    refused = refusal_of(asked(path="/act/trace", method="POST"), policy_of("", loopback=True))
    assert refused is not None and refused[0] == 401


def test_the_name_of_a_host() -> None:
    assert [host_without_port(h) for h in ("a:1", "a", "[::1]:2", "1.2.3.4:5")] == [
        "a",
        "a",
        "::1",
        "1.2.3.4",
    ]


def through(guard: Guard, **scope: Any) -> tuple[int, dict[str, str], bytes]:
    """One request through the guard."""
    sent: list[Any] = []
    whole = {"type": "http", "method": "GET", "path": "/", "query_string": b"", "headers": []} | scope

    async def receive() -> Any:
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message: Any) -> None:
        sent.append(message)

    asyncio.run(guard(whole, receive, send))
    headers = {k.decode(): v.decode() for k, v in sent[0].get("headers", ())}
    return sent[0].get("status", 0), headers, b"".join(m.get("body", b"") for m in sent)


@pytest.fixture
def guard() -> Guard:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"inside"})

    return Guard(app, token="secret", loopback=True, port=9, hashes=["'sha256-x'"])


LOCAL, SECRET = (b"host", b"127.0.0.1:9"), (b"authorization", b"Bearer secret")
LOCALHOST, T = (b"host", b"localhost"), (b"authorization", b"Bearer t")


def test_a_key_in_the_address_becomes_a_cookie_once(guard: Guard) -> None:
    key = address_key("secret", 9)
    status, headers, body = through(
        guard, headers=[LOCAL], path="//evil.example", query_string=f"token={key}&last=100".encode()
    )
    assert (status, headers["location"], body) == (303, "/evil.example?last=100", b"")
    cookie = headers["set-cookie"]
    assert all(part in cookie for part in ("zeromon-9=", "HttpOnly", "SameSite=Strict"))
    sent = cookie.partition(";")[0]
    assert "secret" not in cookie + key and key not in cookie
    post = {"method": "POST", "path": "/act/trace"}
    cookies = [f"{others}; {sent}" for others in ("other=1", 'a={"x": 1}', "a=b c", "a@b=é", "x")]
    good_cookies = [(b"cookie", each.encode("latin-1")) for each in cookies]
    for good in (*good_cookies, (b"authorization", b"Bearer secret")):
        assert through(guard, headers=[LOCAL, good])[0] == 200
        assert through(guard, headers=[LOCAL, good], **post)[0] == 200
    value = sent.partition("=")[2]
    for bad in (
        (b"cookie", b"zeromon-9=wrong"),
        (b"cookie", b"zeromon-9=secret"),
        (b"cookie", f"zeromon-9={key}".encode()),
        (b"authorization", f"Bearer {value}".encode()),
        (b"authorization", f"Bearer {key}".encode()),
    ):
        assert through(guard, headers=[LOCAL, bad])[0] == 401
        assert through(guard, headers=[LOCAL, bad], **post)[0] == 401
    # neither a wrong key, nor the cookie, nor the token opens by an address
    for wrong in ("wrong", "secret", value, address_key("secret", 10)):
        assert through(guard, headers=[LOCAL], query_string=f"token={wrong}".encode())[0] == 401


def test_a_path_with_a_key_splits_no_header(guard: Guard) -> None:
    query = f"token={address_key('secret', 9)}".encode()
    _, headers, _ = through(guard, headers=[LOCAL], path="/x\r\nSet-Cookie: a=b/é", query_string=query)
    assert headers["location"] == "/x%0D%0ASet-Cookie%3A%20a%3Db/%C3%A9"


def test_answers_forbid_what_pages_do_not_need(guard: Guard) -> None:
    _, headers, body = through(guard, headers=[LOCAL, SECRET])
    policy = headers["content-security-policy"]
    assert body == b"inside" and "default-src 'self'" in policy and "'sha256-x'" in policy
    assert "unsafe-eval" not in policy and "script-src 'self' 'unsafe-inline'" not in policy
    assert headers["x-content-type-options"] == "nosniff"
    report = through(guard, headers=[LOCAL, SECRET], path="/report/x.html")[1]["content-security-policy"]
    assert "sandbox allow-scripts" in report and "connect-src" not in report
    assert through(guard, type="websocket", headers=[LOCAL])[0] == 0


def test_a_body_without_a_length_has_the_same_limit() -> None:
    """Chunked: its header tells no length."""
    sizes = [0]

    async def app(scope: Any, receive: Any, send: Any) -> None:
        while (message := await receive())["type"] == "http.request":
            sizes.append(sizes[-1] + len(message["body"]))

    async def receive() -> Any:
        return {"type": "http.request", "body": bytes(1 << 16), "more_body": True}

    limited = Guard(app, token="secret", loopback=True, port=9, hashes=[])
    headers = [LOCAL, SECRET, (b"transfer-encoding", b"chunked")]
    scope = {"type": "http", "method": "POST", "path": "/_dash-update-component", "headers": headers}
    asyncio.run(limited(scope, receive, None))  # type: ignore[arg-type]
    assert sizes[-1] == 1 << 20


def test_no_page_describes_the_server(tmp_path: Path) -> None:
    app = make_app(Hub(Store(tmp_path)), token="t", port=1)
    for path in ("/docs", "/redoc", "/openapi.json"):
        headers = [(b"host", b"localhost"), (b"authorization", b"Bearer t")]
        _, _, body = through(app, headers=headers, path=path)
        assert b"swagger" not in body.lower() and b'"paths"' not in body and b"redoc" not in body


def test_no_argument_of_a_browser_has_the_token() -> None:
    with make_opening_page("http://127.0.0.1:9/?a=1&token=s3cr3t") as page:
        made = Path(page.name)
        assert made.stat().st_mode & 0o077 == 0 and "s3cr3t" not in made.as_uri()
        assert "url=http://127.0.0.1:9/?a=1&amp;token=s3cr3t" in made.read_text()
    assert not made.exists()


# ---- figures --------------------------------------------------------------------------------------


def rich(number: int, **facts: Any) -> Any:
    """A rank that knows everything."""
    row = CollectiveStatsRow(
        op="all_gather", group="world", group_size=2, nodes=1, phase="forward", unit=f"{EVIL}.0",
        count=3, calls=2.0, nbytes=4 << 20, seconds=0.01, exposed_seconds=0.004,
        exposed_total_seconds=0.1, wait_seconds=0.001, transfer_seconds=0.003,
        algbw_bytes_per_second=1e9, busbw_bytes_per_second=5e8, best_busbw_bytes_per_second=6e8,
    )  # fmt: skip
    unit = UnitRow(
        fqn=f"layers.{EVIL}", unshards=1, exposed_seconds=0.0,
        peak_allocated_bytes=3 << 30,
    )  # fmt: skip
    size = SizeRow(op="all_gather", calls=tuple(range(len(SIZE_BOUNDS) + 1)), nbytes=9)
    expected = ExpectedRow(
        role="sharded_param", measured_bytes=5 << 20, plain_bytes=4 << 20, predicted_bytes=5 << 20
    )
    risk = Risk(
        pool="device", ratio=0.7, cause="growth", steps_left=100.0, steps_soonest=80.0,
        steps_latest=None, growth_bytes_per_step=1e6, used_bytes=60 << 30, capacity_bytes=80 << 30,
    )  # fmt: skip
    return rank(
        number, node=EVIL, unit=EVIL, memory_device=device_memory(), traffic=(row,), units=(unit,),
        sizes=(size,), expected=(expected,), risks=(risk,), late_seconds=0.002, wait_seconds=0.001,
        **facts,
    )  # fmt: skip


def rich_run(ranks: int = 2, **facts: Any) -> RunSnapshot:
    remedy = Remedy(cause=EVIL, dialect="Python", diff=f"- {EVIL}\n+ b", price="none")
    found = Finding(rule="x", code="ZM301", severity="warning", text=EVIL, rank=0, remedy=remedy)
    hang = Hang(
        kind="late_member", op="all_reduce", group=EVIL, group_id="g", sequence=3, nbytes=1,
        seconds=12.0, waiting=(0,), missing=(1,), dead=(), elsewhere=(), calls=(),
    )  # fmt: skip
    straggler = Straggler(
        rank=1, late_seconds=0.1, share=0.2, since_step=4, phases=("forward",), longer_seconds=0.1,
        cause=EVIL,
    )  # fmt: skip
    made = run(*(rich(n) for n in range(ranks)), findings=(found,), stragglers=(straggler,), **facts)
    return replace(made, hangs=(hang,))


def rows(ranks: int, first: int, last: int) -> dict[str, list[int]]:
    found = [row_of(r, summary(n), 0) for r in range(ranks) for n in range(first, last + 1)]
    return hub.rows_frame(found).to_dict(as_series=False)


def known(snapshot: RunSnapshot, page: str, **facts: Any) -> Known:
    where = Route(run="train-1", page=page, **facts)
    return Known(where, snapshot, rows(len(snapshot.ranks) or 1, 1, 20))


@pytest.mark.parametrize("page", PAGES)
@pytest.mark.parametrize(
    "snapshot", [rich_run(), run(rank(0)), run(), run(rank(0), rank(1), ended=True), fleet_picture()],
    ids=["rich", "plain", "none", "ended", "fleet"],
)  # fmt: skip
def test_every_page_of_every_run_is_valid_and_can_be_sent(page: str, snapshot: RunSnapshot) -> None:
    """plotly itself checks each figure; each part goes to a component that is there."""
    made = layout.page_of(known(snapshot, page))
    figures = [props["figure"] for props in made.parts.values() if "figure" in props]
    for figure in (*figures, *(chart.figure() for chart in made.charts.values())):
        go.Figure(figure)
    tree = layout.page_skeleton(Route(run="train-1", page=page), made, (1.0, 9.0), [0, 1])
    text = json.dumps(tree, cls=components_encoder())
    for name in (*made.parts, *made.charts):
        assert f'"id": "{name}"' in text, name
    assert "dangerously" not in text.lower()


def components_encoder() -> Any:
    from plotly.utils import PlotlyJSONEncoder

    return PlotlyJSONEncoder


def test_own_time_names_the_slow_rank_and_step() -> None:
    """Steps are equally long; the slow rank is the one that does not wait."""
    slow = tuple(summary(n, exposed_ns=0 if n > 10 else 10 * MS) for n in range(1, 21))
    fast = tuple(summary(n) for n in range(1, 21))
    figure = plotly_figures.own_time_figure(
        run(rank(0, recent=fast), rank(1, recent=slow), rank(2, recent=fast)), {}
    )
    assert figure is not None
    z = figure["data"][0]["z"]
    assert z[1] == [0.0] * 10 + [10.0] * 10 and z[0] == z[2] == [0.0] * 20
    assert plotly_figures.own_time_figure(run(rank(0)), {}) is None


@pytest.mark.parametrize("count", [1, 2, 33, 1024])
def test_the_map_of_ranks_has_a_cell_a_rank(count: int) -> None:
    one = rank(0)
    snapshot = run(*(replace(one, rank=n) for n in range(count)))
    (trace,) = plotly_figures.rank_map_figure(snapshot, "step")["data"]
    seen = [value for row in trace["z"] for value in row if value is not None]
    (value,) = {*seen}  # equal ranks have the colour of the median
    assert (trace["zmin"], trace["zmax"]) == (pytest.approx(0.9 * value), pytest.approx(1.1 * value))
    told = [int(cell[0]) for row in trace["customdata"] for cell in row if cell[0]]
    assert told == list(range(count)) and len({len(row) for row in trace["z"]}) == 1


@pytest.mark.parametrize("metric", [figure.name for figure in MAPPED])
def test_the_map_of_ranks_is_by_node_and_frames_whom_a_hang_waits_for(metric: str) -> None:
    ranks = [rank(n, node=f"node{n // 8}", late_seconds=0.05 * (n == 5)) for n in range(16)]
    stuck = Hang(
        kind="missing", op="all_reduce", group="world", group_id="0", sequence=7, nbytes=4,
        seconds=40.0, waiting=(0,), elsewhere=(), calls=(), missing=(9,), dead=(),
    )  # fmt: skip
    figure = plotly_figures.rank_map_figure(replace(run(*ranks), hangs=(stuck,)), metric)
    (drawn,) = figure["data"]
    assert drawn["text"] == [[str(n) for n in range(8)], [str(n) for n in range(8, 16)]]
    assert figure["layout"]["yaxis"]["ticktext"] == ["node0", "node1"]
    (frame,) = figure["layout"]["shapes"]
    assert (frame["x0"], frame["y0"]) == (0.5, 0.5)
    if metric == "late":
        assert drawn["z"][0][5] == drawn["zmax"] == 50.0


@pytest.mark.parametrize("metric", [figure.name for figure in MAPPED])
def test_the_map_of_a_large_run_has_a_cell_a_node(metric: str) -> None:
    """With the worst of its ranks; what is clicked is the node."""
    snapshot = fleet_picture()
    (drawn,) = plotly_figures.rank_map_figure(snapshot, metric)["data"]
    cells = [told for row in drawn["customdata"] for told in row if told[0]]
    assert [told[0] for told in cells] == [f"node/node{n:04}" for n in range(2048)]
    assert cells[1249][1] == "node1249: not seen for 40.00 s"
    assert cells[87][1] == "node0087: 7 of 8 ranks up, 1 failed"
    values = [value for row in drawn["z"] for value in row][:2048]
    assert len({value for value in values if value is not None}) > 1
    go.Figure(plotly_figures.rank_map_figure(snapshot, metric))


def test_a_large_run_says_how_much_of_it_is_shown() -> None:
    """And how its figures spread; a node's page has its ranks alone."""
    snapshot = fleet_picture()
    ranks = layout.page_of(known(snapshot, "ranks")).parts
    assert ranks["rank-count"]["children"].startswith("10 of 16,384 ranks")
    assert ranks["rank-count"]["children"].endswith("Mean of the last 60 s.")
    where = Route(run=snapshot.run, page="ranks", node="node0001")
    rows_ = layout.page_of(Known(where, snapshot, {})).parts["rank-table"]["rowData"]
    assert [row["rank"] for row in rows_] == [8, 9]
    overview = layout.page_of(known(snapshot, "overview")).parts
    text = json.dumps(overview["spreads"], default=lambda made: made.to_plotly_json())
    assert "16,384 ranks" in text and "444.0 ms" in text
    assert "2,048 nodes" in overview["facts"]["children"]
    notes = json.dumps(overview["to-change"], default=lambda made: made.to_plotly_json())
    assert "is 12.00 s ahead" in notes


def texts(component: Any) -> list[str]:
    """The words of a component, in their order."""
    if isinstance(component, (list, tuple)):
        return [word for child in component for word in texts(child)]
    if isinstance(component, str):
        return [component]
    return texts(component.children) if getattr(component, "children", None) else []


def test_the_strip_of_a_life_has_times_and_says_what_its_colours_mean() -> None:
    slow = Finding(
        rule="exposed_communication", code="ZM301", severity=Severity.WARNING, text="t", rank=0
    )
    past = [replace(slow, came=1010.0, gone=1020.0), replace(slow, rank=1, came=1025.0, gone=1029.5)]
    view = Known(Route(run="train-1"), run(rank(0), ended=True), rows(1, 1, 20), past, (1000.0, 1030.0))
    key = layout.page_of(view).parts["life-key"]["children"]
    healths = [word.partition(" from ")[0] for word in texts(key)]
    # The half second of health at the end is not worth a word
    assert healths[-4:] == ["slow", "healthy", "slow", f"ended {clock(1030)[11:]}"]
    tones = [
        child.className for part in key[:-1] for child in part.children if hasattr(child, "className")
    ]
    assert tones[-3:] == ["warning", "well", "warning"]


def test_a_trace_is_offered_only_of_a_run_that_lives() -> None:
    where = Route(run="train-1", page="communication")
    for snapshot, live, shown in (
        (run(rank(0)), True, True), (run(rank(0)), False, False),
        (run(rank(0), ended=True), True, False),
    ):  # fmt: skip
        page = layout.page_of(Known(where, snapshot, rows(1, 1, 20), live=live))
        assert (page.parts["capture"]["style"] == {}) is shown


def test_the_banner_says_nothing_twice() -> None:
    stopped = run(ended=True, note="the command ended early; it said nothing")
    for snapshot in (stopped, run(), run(rank(0), ended=True, unfinished=True)):
        parts = layout.page_of(known(snapshot, "overview")).parts
        said = [parts[name]["children"] for name in ("cause", "detail", "verdict")]
        phrases = "; ".join(filter(None, said)).replace("incomplete: ", "").split("; ")
        assert len(phrases) == len(set(phrases)), phrases


def test_who_was_stopped_has_no_frame_on_the_map() -> None:
    for ended, frames, title in (("SIGTERM", 0, ""), ("SIGKILL", 1, "; framed: rank 0 failed first")):
        ends = {"alive": False, "failed": True, "ended": ended}
        layout_ = plotly_figures.rank_map_figure(run(rank(0, **ends), ended=True), "late")["layout"]
        assert len(layout_["shapes"]) == frames
        assert layout_["title"]["text"].replace("<br>", " ").endswith(title)


def test_the_map_of_a_thousand_ranks_is_no_page_long_and_its_title_is_above_it() -> None:
    snapshot = run(*(rank(n, node=f"node{n // 8:03}") for n in range(1024)))
    drawn = plotly_figures.rank_map_figure(snapshot, "late")["layout"]
    assert drawn["height"] < 2000
    title = drawn["title"]
    assert (title["y"], title["yanchor"]) == (1, "top") and title["pad"]["t"] < drawn["margin"]["t"] - 20


def test_the_lines_of_a_large_run_are_of_all_its_ranks() -> None:
    found = charts.charts_of(FleetSource(fleet_picture()).series(), fleet_picture())["step-time"]
    assert found is not None
    assert set(found.traces) == {"highest rank", "median rank", "lowest rank"}


def test_the_forecast_is_drawn_from_here_to_the_capacity() -> None:
    series = {**rows(1, 1, 20), "reserved_bytes": [40 << 30] * 20}
    chart = charts.charts_of(series, rich_run(1))["memory"]
    assert chart is not None
    ways = {mark.name: (mark.x, mark.y) for mark in chart.marks}
    assert ways["capacity"] == (None, (80.0, 80.0))
    assert ways["forecast"] == ((20, 120.0), (60.0, 80.0))
    assert ways["soonest"] == ((20, 100.0), (60.0, 80.0)) and "latest" not in ways


@pytest.mark.parametrize(("used", "left", "drawn"), [(9, None, 1), (1, None, 0), (1, 50.0, 2)])
def test_the_memory_of_a_host_has_its_capacity_on_the_sum_of_its_ranks(
    used: int, left: float | None, drawn: int
) -> None:
    """Drawn where it is near, or where a forecast leads there; else in the title alone."""
    gib = 1 << 30
    risk = Risk(
        pool="host", ratio=0.5, cause="growth", steps_left=left, growth_bytes_per_step=1e6,
        used_bytes=used * gib, capacity_bytes=10 * gib,
    )  # fmt: skip
    ranks = [
        rank(n, risks=(risk,), recent=tuple(summary(s, rss_bytes=gib << n) for s in range(1, 21)))
        for n in (0, 1)
    ]
    series = hub.rows_frame([row_of(r.rank, s, 0) for r in ranks for s in r.steps.recent])
    chart = charts.charts_of(series.to_dict(as_series=False), run(*ranks))["memory"]
    assert chart is not None and len(chart.marks) == drawn
    assert set(chart.traces["sum"][1]) == {3.0} and chart.top >= 3.0


def test_past_findings_are_one_line_a_rule() -> None:
    """The same four came and went for two ranks in turns: that was 50 lines."""
    past = [
        Finding(
            rule="r", rank=n % 2, code="ZM305" if n % 4 else "ZM601", severity=Severity.INFO,
            text=f"text {n}", came=100.0 * n, gone=100.0 * n + 10,
        )
        for n in range(40)
    ]  # fmt: skip
    where = Route(run="train-1", page="advice")
    page = advice.content(Known(where, run(rank(0)), {}, findings=past))
    lines = [str(one) for one in page.parts["earlier"]["children"]]
    assert len(lines) == 2
    assert "30 times, for 5 min 00 s in total, ranks 0, 1" in lines[0] and "text 39" in lines[0]
    assert "10 times, for 100.00 s in total" in lines[1]
    standing = run(
        rank(0), ended=True, findings=tuple(past[:2])
    )  # as the end of a run closes its findings
    page = advice.content(Known(where, standing, {}, findings=past[:2]))
    assert "No finding has been resolved" in str(page.parts["earlier"]["children"])


def test_what_is_missing_is_said_and_not_drawn() -> None:
    page = layout.page_of(known(run(), "overview"))
    for name in ("breakdown", "ledger"):
        assert page.parts[name]["figure"]["data"] == []
        assert "n/a" in page.parts[name]["figure"]["layout"]["title"]["text"]


def test_a_chart_tells_what_is_newer() -> None:
    chart = charts.charts_of(rows(2, 1, 20), rich_run(2))["step-time"]
    assert chart is not None
    newer = chart.newer(18)
    assert newer == {"x": [[19, 20]] * 2, "y": [[100.0, 100.0]] * 2}
    assert chart.newer(20) is None and chart.last == 20
    assert len((chart.newer(-1) or {})["x"][0]) == 20


def test_no_text_of_a_run_is_a_formula_or_markup() -> None:
    content = to_csv(ranks_page.rank_table_rows(rich_run()))
    cells = content.splitlines()[1].split(",")
    assert not any(cell.strip('"').startswith(("=", "+", "-", "@")) for cell in cells)
    assert "'=cmd" in content
    page = layout.page_of(known(rich_run(), "advice"))
    text = json.dumps(page.parts, cls=components_encoder())
    assert "Markdown" not in text and EVIL in text  # as text, which React escapes
    assert to_csv([]) == ""
    assert to_csv([{"a": -1, "b": "-1"}]).splitlines()[1] == "-1,'-1"


# ---- what tabs are sent ---------------------------------------------------------------------------


class Growing:
    """A live run whose steps come one by one."""

    live = relocatable = True
    playback = None

    def __init__(self, store: Store) -> None:
        self.run = "train-1"
        self.steps = 30
        self.dead = False
        self.asked = 0
        self.past = Past(store.folder("train-1"))

    def latest(self) -> RunSnapshot:
        self.asked += 1
        if self.dead:
            raise SourceError("no collector answers")
        recent = tuple(
            summary(n) if n != 777 else summary(n, end_ns=summary(n + 5).end_ns)
            for n in range(1, self.steps + 1)
        )
        return run(
            rank(0, recent=recent, last_step=self.steps, watched_steps=self.steps),
            taken_wall=DAY + self.asked,
        )

    def span(self) -> tuple[float, float] | None:
        return None

    def at(self, wall: float) -> RunSnapshot:
        return run(rank(0, last_step=7), taken_wall=wall)

    def series(self, query: StepQuery = WHOLE_RUN) -> dict[str, list[int]]:
        return self.past.series(query)

    def findings(self) -> list[Any]:
        return []


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def growing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Growing, Feeds, Clock]:
    monkeypatch.setenv("ZEROMON_DIR", str(tmp_path / "rings"))
    clock, store = Clock(), Store(tmp_path)
    source, made = Growing(store), Hub(store, clock)
    made._followed["train-1"] = Followed(source, store, clock)  # type: ignore[arg-type]
    return source, Feeds(made), clock


def sent(feeds: Feeds, where: Route, cursor: dict[str, Any]) -> dict[str, Any]:
    return json.loads(feeds.of(where).since(Cursor(**cursor)))  # type: ignore[no-any-return]


def test_a_tab_is_sent_what_changed_and_points_at_the_end(growing: tuple[Growing, Feeds, Clock]) -> None:
    source, feeds, clock = growing
    where = Route(run="train-1")
    page, cursor = feeds.of(where).page()
    assert page.charts["step-time"].last == 29  # the newest step may still change
    body = sent(feeds, where, cursor.as_json())
    assert (body["props"], body["extend"]) == ({}, {})
    source.steps = 33
    clock.now += 1
    body = sent(feeds, where, cursor.as_json())
    assert body["extend"]["step-time"] == [{"x": [[30, 31, 32]], "y": [[100.0] * 3]}, [0]]
    assert body["props"]["verdict"]["children"] == "running, step 33"
    assert "figure" not in body["props"].get("step-time", {})
    again = sent(feeds, where, body["cursor"])
    assert (again["props"], again["extend"]) == ({}, {})


def test_a_chart_that_a_tab_cannot_append_to_is_sent_alone(
    growing: tuple[Growing, Feeds, Clock], monkeypatch: pytest.MonkeyPatch
) -> None:
    source, feeds, clock = growing
    where = Route(run="train-1")
    page, cursor = feeds.of(where).page()
    assert len(page.charts) > 1
    source.steps = 33
    clock.now += 1
    shape = feed._chart_shape
    monkeypatch.setattr(
        feed, "_chart_shape", lambda chart: shape(chart) + ("!" if "Step" in chart.title else "")
    )
    body = sent(feeds, where, cursor.as_json())
    assert [name for name, props in body["props"].items() if name in page.charts] == ["step-time"]
    assert set(body["extend"]) == set(page.charts) - {"step-time"}


def test_sums_over_the_run_are_sent_every_five_seconds(
    growing: tuple[Growing, Feeds, Clock], monkeypatch: pytest.MonkeyPatch
) -> None:
    source, feeds, clock = growing
    moving = lambda run: {"data": [], "layout": {"height": run.taken_wall}}  # noqa: E731
    monkeypatch.setattr(plotly_figures, "step_breakdown", moving)
    where = Route(run="train-1")
    cursor = sent(feeds, where, {})["cursor"]
    seen = []
    for _ in range(10):
        source.steps += 3
        clock.now += 1
        body = sent(feeds, where, cursor)
        cursor = body["cursor"]
        seen.append("breakdown" in body["props"])
    assert sum(seen) == 2, seen


def test_tabs_share_one_question_a_second(growing: tuple[Growing, Feeds, Clock]) -> None:
    source, feeds, clock = growing
    for _ in range(5):
        for page in PAGES:
            for _ in range(10):
                sent(feeds, Route(run="train-1", page=page), {})
        clock.now += 1
    assert source.asked == 5


def test_a_tab_of_an_earlier_server_gets_everything(growing: tuple[Growing, Feeds, Clock]) -> None:
    _, feeds, _ = growing
    where = Route(run="train-1", page="memory")
    whole = sent(feeds, where, {})
    other = {"feed": "another", "version": 99, "epoch": whole["cursor"]["epoch"], "step": 9999}
    assert sent(feeds, where, other)["props"] == whole["props"] != {}
    assert "figure" in whole["props"]["memory"]


def test_when_the_run_does_not_answer_what_is_known_stays_and_says_how_old_it_is(
    growing: tuple[Growing, Feeds, Clock],
) -> None:
    source, feeds, clock = growing
    where = Route(run="train-1")
    first = sent(feeds, where, {})
    source.dead = True
    clock.now += 7
    body = sent(feeds, where, first["cursor"])
    assert body["props"]["state"]["children"] == "no answer"
    assert body["props"]["health"]["children"] == "unknown"
    assert body["props"]["cause"]["children"] == "no answer from its collector for 7.00 s"
    assert body["props"]["detail"]["children"].startswith("before: healthy")
    source.dead, source.steps = False, 40
    clock.now += 1
    body = sent(feeds, where, body["cursor"])
    assert body["props"]["state"]["children"] == "live"
    assert body["extend"]["step-time"][0]["x"] == [list(range(30, 40))]


def test_a_run_whose_collector_has_gone_is_shown_from_its_record(
    growing: tuple[Growing, Feeds, Clock],
) -> None:
    source, feeds, clock = growing
    sent(feeds, Route(run="train-1"), {})
    feeds.hub.store.save(run(rank(0), ended=True, taken_wall=DAY + 1000))
    source.dead = True
    clock.now += 5
    body = sent(feeds, Route(run="train-1"), {})
    assert body["props"]["state"]["children"] == "recorded"
    assert body["props"]["verdict"]["children"] == "after 20 steps"
    assert isinstance(feeds.hub.followed("train-1").source, StoreSource)


def test_the_final_record_counts_where_its_collector_was_read_later(
    growing: tuple[Growing, Feeds, Clock],
) -> None:
    """The collector goes on to answer for a while after it has saved the end."""
    source, feeds, clock = growing
    sent(feeds, Route(run="train-1"), {})
    feeds.hub.store.save(run(rank(0), ended=True, taken_wall=DAY - 1000))
    source.dead = True
    clock.now += 5
    body = sent(feeds, Route(run="train-1"), {})
    assert body["props"]["state"]["children"] == "recorded"


def test_a_run_that_was_deleted_is_not_shown_any_more(growing: tuple[Growing, Feeds, Clock]) -> None:
    _, feeds, clock = growing
    feeds.hub.store.save(run(rank(0), run="old", ended=True))
    where = Route(run="old")
    first = sent(feeds, where, {})
    feeds.hub.store.remove("old")
    clock.now += 5
    for _ in range(2):  # an open tab, and another one later
        with pytest.raises(RunNotFound, match="run old was deleted"):
            sent(feeds, where, first["cursor"])
    feeds.hub.store.save(run(rank(0), run="old", ended=True))
    clock.now += 5
    assert sent(feeds, where, first["cursor"])["cursor"]


def test_a_moment_of_the_past_is_a_page_of_its_own(growing: tuple[Growing, Feeds, Clock]) -> None:
    _, feeds, _ = growing
    body = sent(feeds, Route(run="train-1", at=DAY + 5), {})
    assert body["props"]["state"]["children"].startswith("as at 2023-11-1")
    with pytest.raises(RunNotFound):
        feeds.of(Route(run="none"))


def test_a_long_live_run_is_thinned_again(growing: tuple[Growing, Feeds, Clock]) -> None:
    """What was appended does not grow without end; the page is then sent whole lines.

    A tail with all steps behind few of the old ones looks as if their spread had grown.
    """
    source, feeds, clock = growing
    where = Route(run="train-1")
    record = Record(feeds.hub.store.folder("train-1"))
    cursor = sent(feeds, where, {})["cursor"]
    epochs = set()
    for steps in range(200, 3000, 25):
        source.steps = steps
        record.keep([row_of(0, summary(n), 0) for n in range(max(1, steps - 25), steps)])
        clock.now += 1
        cursor = sent(feeds, where, cursor)["cursor"]
        epochs.add(cursor["epoch"].split()[0])
        drawn = feeds.of(where).page()[0].charts["step-time"].traces["rank 0"][0]
        thin = [n for n in range(1, len(drawn)) if drawn[n] > drawn[n - 1] + 1]
        tail = len(drawn) - max(thin, default=len(drawn))
        assert steps < 700 or tail <= max(10 * 25, len(drawn) / 8) + 50, (steps, tail)
    _, series = feeds.hub.followed("train-1").series((), 0, None)
    longest = max(range(len(series["step"])), key=lambda n: series["duration_us"][n])
    assert series["step"][longest] == 777  # what stands out is kept each time
    assert len(series["step"]) <= 900 and 2 <= len(epochs) <= 25
    assert max(series["step"]) == 2974


def test_a_difference_of_many_steps_is_of_equal_ranges_and_small_memory_is_legible() -> None:
    lines = {
        "A one": (list(range(1000)), [float(n % 2) for n in range(1000)]),
        "B two": (list(range(500, 1500)), [0.25 + n % 2 for n in range(500, 1500)]),
    }
    found = charts.difference_chart(charts.Chart("Host memory, highest rank", "GiB", lines, 2.0))
    assert found is not None and found.unit == "MiB"
    assert found.title == "Host memory minus A, median of 3 steps"
    x, y = found.traces["B two"]
    assert (x[0], x[-1]) == (498, 999) and len(x) == 168
    assert set(y[2:-1]) == {256.0}
    apart = {"A one": ([1, 2], [1.0, 1.0]), "B two": ([3, 4], [1.0, 1.0])}
    assert charts.difference_chart(charts.Chart("Step time", "ms", apart, 2.0)) is None


def test_a_rank_has_one_colour_in_every_chart_of_a_page() -> None:
    made = [summary(n, rss_bytes=1 << 30) for n in range(1, 9)]
    snapshot = run(*(rank(n, recent=made) for n in range(3)))
    rows = rows_frame([row_of(n, step, 0) for n in range(3) for step in made])
    drawn = charts.charts_of(rows.to_dict(as_series=False), snapshot)
    colours: dict[str, set[str]] = {}
    for chart in drawn.values():
        for line in chart.figure()["data"]:
            colours.setdefault(line["name"], set()).add(line["line"]["color"])
    assert {"sum", "rank 0", "rank 1", "rank 2"} <= set(colours)
    assert all(len(of_line) == 1 for of_line in colours.values())
    assert len(set.union(*colours.values())) == len(colours)


def test_a_colour_of_the_page_is_that_of_its_figures() -> None:
    style = (Path(charts.__file__).parent / "assets" / "zeromon.css").read_text()
    for name in ("compute", "communication", "waiting", "own"):
        (colour,) = re.findall(rf"--zm-{name}: (#\w+)", style)
        assert colour == getattr(plotly_figures, f"_{name.upper()}")


def test_fifty_of_many_steps_are_fifty_points(growing: tuple[Growing, Feeds, Clock]) -> None:
    """Of a live run and of its record; the whole run has the extremes only."""
    _, feeds, clock = growing
    record = Record(feeds.hub.store.folder("train-1"))
    record.keep([row_of(r, summary(n), 0) for r in (0, 1) for n in range(1, 3_001)])
    record.close()
    stored = Feeds(Hub(feeds.hub.store, clock))
    feeds.hub.store.save(run(rank(0), rank(1), ended=True))
    for tabs in (feeds, stored):
        whole = tabs.of(Route(run="train-1")).page()[0].charts["step-time"]
        assert all(len(x) < 1500 for x, _ in whole.traces.values())
        where = Route(run="train-1", steps=(900, 949))
        page = tabs.of(where).page()[0]
        assert set(page.charts) == {"step-time", "memory", "exposed"}
        for chart in page.charts.values():
            assert chart.figure()["layout"]["xaxis"]["range"] == [899.5, 949.5]
            for name, (x, _) in chart.traces.items():
                assert x == list(range(900, 950)), name
    assert stored.of(where).page()[0].charts["step-time"].traces.keys() == {"rank 0", "rank 1"}


def test_a_range_at_the_end_of_a_live_run_grows_to_its_end_and_no_further(
    growing: tuple[Growing, Feeds, Clock],
) -> None:
    source, feeds, clock = growing
    where = Route(run="train-1", steps=(25, 35))
    cursor = sent(feeds, where, {})["cursor"]
    for steps, new in ((33, [30, 31, 32]), (50, [33, 34, 35])):
        source.steps = steps
        clock.now += 1
        body = sent(feeds, where, cursor)
        cursor = body["cursor"]
        assert body["extend"]["step-time"][0]["x"] == [new]
    ahead = sent(feeds, Route(run="train-1", steps=(900, 950)), {})["props"]["step-time-title"]
    assert ahead["children"] == "Step time: no value of step 900 to 950 is known"


def test_own_time_is_of_the_chosen_steps() -> None:
    figure = plotly_figures.own_time_figure(run(rank(0), rank(1)), rows(2, 100, 499), (100, 499))
    assert figure is not None
    assert figure["data"][0]["x"] == list(range(100, 500)) and "range" in figure["layout"]["xaxis"]


def test_memory_by_role_over_the_record_sums_to_what_is_held() -> None:
    rows = (
        RoleRow(role="sharded_param", device_bytes=0, host_bytes=64 << 20, disk_bytes=0, pinned_bytes=0),
    )
    moments = [run(rank(0, last_step=n, rss_bytes=(300 + n) << 20, roles=rows)) for n in (3, 9, 40)]
    shown = memory_page.over_the_record(moments, 0).children.children.figure
    go.Figure(shown)
    assert [trace["name"] for trace in shown["data"]] == ["sharded param", EVERYTHING_ELSE]
    sums = [sum(column) for column in zip(*(trace["y"] for trace in shown["data"]), strict=True)]
    assert sums == [303, 309, 340] and list(shown["data"][0]["x"]) == [3, 9, 40]
    assert memory_page.over_the_record([run(rank(0))], 0) is None


def test_what_the_user_wrote_is_in_the_head_of_the_page_and_in_the_list(
    growing: tuple[Growing, Feeds, Clock],
) -> None:
    _, feeds, clock = growing
    where = Route(run="train-1", page="advice")
    cursor = sent(feeds, where, {})["cursor"]
    feeds.hub.store.save(run(rank(0)))
    feeds.hub.store.write_about("train-1", About(note="slow disk", tags=("base", "8k")))
    clock.now += 1
    props = sent(feeds, where, cursor)["props"]
    assert [one["props"]["children"] for one in props["about"]["children"]] == [
        "base", "8k", "slow disk",
    ]  # fmt: skip
    (row,) = [row for row in runs_page.run_table_rows(feeds.hub.runs()) if row["run"] == "train-1"]
    assert row["notes"] == "base, 8k, slow disk"


def test_the_list_of_runs_says_which_are_live(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ZEROMON_DIR", str(tmp_path / "rings"))
    store = Store(tmp_path)
    assert "No run has been recorded" in str(runs_page.runs_page([]))
    store.save(run(rank(0), ended=True))
    store.save(run(rank(0), run="other", started_wall=2000.0))
    found = runs_page.run_table_rows(Hub(store).runs())
    assert [row["run"] for row in found] == ["other", "train-1"]
    assert found[0]["verdict"] == "■ not watched"
    assert found[0]["why"].startswith("no longer monitored")
    assert found[1]["verdict"].endswith(" finished")
    assert found[1]["why"].startswith("finished after 20 steps; no problem found; exposed")
    assert found[1]["link"] == "[train-1](/run/train-1/overview)"
    made = [summary(n, start_ns=n * 100 * MS, end_ns=n * 200 * MS) for n in range(1, 41)]
    store.save(run(rank(0, recent=made), ended=True))
    (row,) = [row for row in runs_page.run_table_rows(Hub(store).runs()) if row["run"] == "train-1"]
    assert row["pace"] == pytest.approx([*(0.1 * middle for middle in range(2, 40, 3)), 4.0])


def test_runs_are_laid_side_by_side(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One is twice as slow in all its steps: marked, and the other one is taken."""
    monkeypatch.setenv("ZEROMON_DIR", str(tmp_path / "rings"))
    store = Store(tmp_path)
    for name, times in (("fast", 1), ("slow", 2)):
        record = Record(store.folder(name))
        length = times * 100 * MS
        steps = [summary(n, start_ns=n * length, end_ns=(n + 1) * length) for n in range(1, 60)]
        record.keep([row_of(0, step, 0) for step in steps])
        store.save(run(rank(0), run=name, ended=True))
    found = Hub(store).compared(["fast", "slow"])
    cell = found.row("step_time").cells[1]
    assert cell.marked and not cell.better and cell.difference == pytest.approx(0.1)
    followed = [Hub(store).followed(name) for name in ("fast", "slow")]
    drawn = charts.overlaid_charts([(f.newest().run, f.series((), 0, None)[1]) for f in followed])
    text = json.dumps(runs_page.comparison_view(found, drawn), cls=components_encoder())
    assert "+100.0 %" in text and found.advice.take == 0
    assert "Step time minus A" in text
    difference = charts.difference_chart(drawn["step-time"])
    assert difference is not None and difference.steps == (1, 59)
    assert difference.traces["A fast"] == ([*range(1, 60)], [0.0] * 59)
    assert difference.traces["B slow"] == ([*range(1, 60)], pytest.approx([100.0] * 59))
    with pytest.raises(RunNotFound):
        Hub(store).compared(["fast", "none"])


def test_tabs_that_open_a_run_at_once_share_its_source(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = Hub(Store(tmp_path))
    made.store.save(run(rank(0), run="one", ended=True))
    opened: list[Followed] = []

    def open_run_source(name: str, store: Store, server: None) -> StoreSource:
        if not opened:  # the other tab is faster
            opened.append(None)  # type: ignore[arg-type]
            opened.append(made.followed(name))
        return StoreSource(name, store)

    monkeypatch.setattr(hub, "open_run_source", open_run_source)
    assert made.followed("one") is opened[1] is made.followed("one")


def test_runs_are_laid_over_each_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A line a run in each chart, and what is not configured alike; the address names them."""
    monkeypatch.setenv("ZEROMON_DIR", str(tmp_path / "rings"))
    store = Store(tmp_path)
    for name, steps, count in (("one", 60, 2), ("two", 90, 4)):
        made = [summary(n, rss_bytes=count << 30) for n in range(1, steps + 1)]
        Record(store.folder(name)).keep([row_of(r, s, 0) for r in range(count) for s in made])
        ranks = [rank(n, recent=tuple(made), world_size=count) for n in range(count)]
        store.save(run(*ranks, run=name, command=("train", "--steps", str(steps)), ended=True))
    feeds = Feeds(Hub(store))
    where = Route(run="one", others=("two",))
    assert where.address == "/run/one/overview?with=two"
    page, cursor = feeds.of(where).page()
    assert set(page.charts) == {"step-time", "memory", "exposed"}
    for chart in page.charts.values():
        lines = {name: len(steps) for name, (steps, _) in chart.traces.items()}
        assert lines == {"A one": 60, "B two": 90}
        go.Figure(chart.figure())
    memory = page.charts["memory"]
    assert {name: set(y) for name, (_, y) in memory.traces.items()} == {"A one": {2.0}, "B two": {4.0}}
    assert memory.title == "Host memory (RSS), highest rank" and memory.marks == ()
    table = json.dumps(page.parts["differences"], cls=components_encoder())
    assert all(told in table for told in ("--steps 60", "--steps 90", '"ranks"'))
    assert sent(feeds, where, cursor.as_json())["props"] == {}
    some = feeds.of(replace(where, steps=(70, 80))).page()[0].charts["step-time"]
    assert some.traces["A one"] == ([], []) and len(some.traces["B two"][0]) == 11
    colours = {line["name"]: line["line"]["color"] for line in some.figure()["data"]}
    assert colours == {name: charts.COLOURS[n] for n, name in enumerate(some.traces)}
    assert some.title == "Step time, median rank; n/a of A"
    with pytest.raises(RunNotFound):
        feeds.of(Route(run="one", others=("none",)))


@pytest.mark.parametrize(
    ("path", "query", "status"),
    [
        ("/", b"", 200), ("/run/train-1/memory", b"", 200), ("/run/train-1", b"", 200),
        ("/run/train-1/overview", b"ranks=0,7&steps=3-9", 200),
        ("/run/train-2/overview", b"", 404), ("/run/train-1/nothing", b"", 404),
        ("/nothing", b"", 404), ("/run/train-1/memory", b"ranks=7", 404),
        ("/run/train-1/overview", b"with=none", 404), ("/report/train-2.html", b"", 404),
    ],
)  # fmt: skip
def test_what_is_not_there_is_answered_so_with_ways_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str, query: bytes, status: int
) -> None:
    monkeypatch.setenv("ZEROMON_DIR", str(tmp_path / "rings"))
    store = Store(tmp_path)
    store.save(run(rank(0), rank(1), ended=True))
    app = make_app(Hub(store), token="t", port=1)
    started(app)
    asked_for = {"path": path, "query_string": query, "headers": [LOCALHOST, T]}
    assert through(app, **asked_for)[0] == status
    if path.startswith("/report"):
        return
    told = json.dumps(json.loads(asyncio.run(posted(app, f"{path}?{query.decode()}"))))
    assert ("This cannot be shown" in told) == (status == 404)
    assert status == 200 or '"href": "/"' in told
    assert path != "/run/train-2/overview" or '"href": "/run/train-1/overview"' in told  # its like


def started(app: Any) -> None:
    """Only then does Dash answer on every path."""
    said = iter(["lifespan.startup", "lifespan.shutdown"])

    async def receive() -> Any:
        return {"type": next(said)}

    async def send(_: Any) -> None:
        pass

    asyncio.run(app({"type": "lifespan"}, receive, send))


async def posted(app: Any, address: str) -> bytes:
    """The page at *address*, as Dash sends it for a callback."""
    sent: list[bytes] = []
    request = {
        "output": "..page.children...cursor.data..",
        "outputs": [{"id": "page", "property": "children"}, {"id": "cursor", "property": "data"}],
        "inputs": [{"id": "route", "property": "data", "value": address}],
        "changedPropIds": ["route.data"],
    }
    body = json.dumps(request).encode()
    headers = [LOCALHOST, T, (b"content-type", b"application/json")]
    headers.append((b"content-length", str(len(body)).encode()))
    scope = {"type": "http", "method": "POST", "path": "/_dash-update-component", "query_string": b"",
             "headers": headers}  # fmt: skip

    async def receive() -> Any:
        return {"type": "http.request", "body": body, "more_body": False}

    async def send(message: Any) -> None:
        sent.append(message.get("body", b""))

    await app(scope, receive, send)
    return b"".join(sent)


def test_a_page_whose_collector_is_slow_holds_up_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ZEROMON_DIR", str(tmp_path / "rings"))
    store = Store(tmp_path)
    store.save(run(rank(0), ended=True))
    app = make_app(Hub(store), token="t", port=1)
    started(app)
    asked, answered, feed_of = threading.Event(), threading.Event(), Feeds.of

    def feed_after_the_other(feeds: Feeds, route: Route) -> Any:
        asked.set()
        assert answered.wait(10)
        return feed_of(feeds, route)

    monkeypatch.setattr(Feeds, "of", feed_after_the_other)

    async def open_both() -> bytes:
        slow = asyncio.create_task(posted(app, "/run/train-1/overview"))
        while not asked.is_set():
            await asyncio.sleep(0.01)
        assert b"train-1" in await posted(app, "/")
        answered.set()
        return await slow

    assert b"verdict" in asyncio.run(open_both())


def test_a_chart_without_a_value_says_so_and_has_no_axes() -> None:
    page = layout.page_of(Known(Route(run="train-1"), run(rank(0, recent=())), rows(1, 1, 0)))
    figure = page.charts["exposed"].figure()
    assert figure["layout"]["title"]["text"] == "Exposed communication: no completed step"
    assert not figure["layout"]["xaxis"]["visible"] and figure["layout"]["height"] < 100


def test_the_application_has_its_scripts_from_the_first_page_on(tmp_path: Path) -> None:
    app = make_app(Hub(Store(tmp_path)), token="t", port=1)
    status, headers, body = through(app, headers=[LOCALHOST, T])
    assert status == 200 and b"assets/zeromon.js" in body
    assert "'sha256-" in headers["content-security-policy"]
