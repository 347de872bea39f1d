"""A run read back from a real Prometheus: as its collector has it, of many ranks, when things fail."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from operator import attrgetter
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import pytest
from builders import changed
from fleet import GROWING_RANK, LATE_RANK, Fleet
from prometheus_server import Prometheus, needs_prometheus, scrape
from support import Node, train_command, wait_for

from zeromon.base.errors import RunNotFound, SourceError
from zeromon.cli import main
from zeromon.readout.breakdown import rank_parts
from zeromon.readout.text import clock
from zeromon.snapshot import RankSnapshot, RunSnapshot
from zeromon.sources.live import LiveSource
from zeromon.sources.prometheus import client, source as source_module
from zeromon.sources.prometheus.client import Server
from zeromon.sources.prometheus.source import PrometheusSource, find_listed_runs, runs_of
from zeromon.storage.run_store import StepQuery, Store
from zeromon.storage.step_history.queries import LEAST, MEDIAN, MOST

pytestmark = needs_prometheus


def fresh(url: str, run: str = "fleet", **options: int) -> PrometheusSource:
    return PrometheusSource(Server(url), run, **options)


class Small(NamedTuple):
    fleet: Fleet
    server: Prometheus


class World(NamedTuple):
    """One Prometheus, which takes some seconds to begin, and all that it scrapes."""

    server: Prometheus
    node: Node
    fleets: dict[str, Fleet]


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    node = Node(tmp_path_factory.mktemp("node"))
    with ExitStack() as stack:
        stack.callback(node.close)
        shapes = {"fleet": (8, 8), "frail": (2, 4), "twins": (2, 4), "twin": (1, 4), "short": (1, 2),
                  "over": (1, 2)}  # fmt: skip
        fleets = {
            name: stack.enter_context(Fleet(*shape, name="twins" if name == "twin" else name))
            for name, shape in shapes.items()
        }
        jobs = [fleets[name].job(discover=False) | {"job_name": name} for name in fleets]
        # 64 ranks every second take a CPU of this process, and a busy one does not answer in time
        jobs[0] |= {"scrape_interval": "2s", "scrape_timeout": "2s"}
        targets = [{"targets": [node.address], "labels": {"__meta_zeromon_node": "n0"}}]
        jobs.append(scrape(static_configs=targets) | {"job_name": "real"})
        server = stack.enter_context(Prometheus(jobs))
        server.wait("count(zeromon_rank_up)", 64 + 8 + 8 + 4 + 2 + 2)
        server.wait("min(count_over_time(zeromon_rank_up[5m]))", 4)
        yield World(server, node, fleets)


@pytest.fixture(scope="module")
def small(world: World) -> Small:
    """8 collectors of 8 ranks."""
    return Small(world.fleets["fleet"], world.server)


@pytest.fixture(scope="module")
def frail(world: World) -> Small:
    """Two collectors that tests may silence."""
    return Small(world.fleets["frail"], world.server)


# ---- a real run ------------------------------------------------------------------------------------


class Both(NamedTuple):
    """The same run, from its collector and from Prometheus: while it ran, and when it had ended.

    *source* has seen it whole.
    """

    during: list[tuple[RunSnapshot, RunSnapshot]]
    live: RunSnapshot
    read: RunSnapshot
    source: PrometheusSource


@pytest.fixture(scope="module")
def both(world: World) -> Both:
    during: list[tuple[RunSnapshot, RunSnapshot]] = []
    node, server = world.node, world.server
    found = fresh(server.url, "real")

    def look(live: RunSnapshot) -> None:
        if live.ranks and not live.ended and live.ranks[0].steps.watched_steps > 20:
            try:
                during.append((live, found.latest()))
            except RunNotFound:  # not scraped yet
                return

    out = str(node.folder / "out")
    command = train_command(2, "--strategy", "fsdp2", "--steps", "240", "--out", out)
    result = node.run(command, run="real", seen=look)
    assert result.code == 0, result.output
    steps = result.snapshot.ranks[0].steps.watched_steps
    server.wait('min(zeromon_steps_total{run="real"})', steps)
    server.wait('sum(zeromon_rank_up{run="real"} == bool 0)', 2)
    live = LiveSource(node.address, "real").latest()
    whole = fresh(server.url, "real")
    return Both(during, live, whole.latest(), whole)


SAME = (
    "rank", "local_rank", "world_size", "pid", "node", "device", "strategy", "status.alive",
    "status.failed", "steps.last_step", "steps.watched_steps", "steps.phase_seconds",
    "steps.micro_steps", "steps.skipped_steps", "steps.total_seconds", "agent.dropped", "agent.errors",
)  # fmt: skip
LAST = {
    "communication.overlap_ratio": "overlap_ratio",
    "communication.exposed_ratio": "exposed_communication_ratio",
    "communication.wait_seconds": "wait_for_late_rank_seconds",
    "communication.late_seconds": "late_seconds",
    "memory.rss_bytes": "host_memory_rss_bytes",
    "memory.host_available_bytes": "host_memory_available_bytes",
}  # fmt: skip
"""Figures of the present, and their gauges, which end with the run."""


@pytest.mark.parametrize("name", SAME)
def test_a_rank_is_what_its_collector_says(both: Both, name: str) -> None:
    """When the run has ended, both have the same figures, to the last digit."""
    mine, theirs = ([attrgetter(name)(rank) for rank in run.ranks] for run in (both.read, both.live))
    assert mine == theirs
    assert len(mine) == 2


@pytest.mark.parametrize("name", LAST)
def test_figures_of_the_present_are_the_last_of_a_run_that_has_ended(
    both: Both, world: World, name: str
) -> None:
    """They are not exported any more; no reader takes them for those of now."""
    gauge = f'zeromon_{LAST[name]}{{run="real"}}'
    last = world.server.query(f"last_over_time({gauge}[30m])")
    assert not world.server.query(gauge)
    expected = {int(one["metric"]["rank"]): float(one["value"][1]) for one in last}
    read = {rank.rank: attrgetter(name)(rank) for rank in both.read.ranks}
    assert {n: value for n, value in read.items() if value is not None} == expected
    assert expected


def test_its_communication_and_memory_are_the_same(both: Both) -> None:
    kept = ("op", "group", "group_size", "count", "nbytes", "seconds", "exposed_seconds")
    for mine, theirs in zip(both.read.ranks, both.live.ranks, strict=True):
        rows = [
            {tuple(getattr(row, n) for n in kept) for row in r.communication.collectives}
            for r in (mine, theirs)
        ]
        assert rows[0] == rows[1]
        assert rows[0]
        assert mine.communication.traffic
        held = {row.role: row.host_bytes for row in theirs.memory.roles if row.host_bytes}
        assert {row.role: row.host_bytes for row in mine.memory.roles} == held
    assert both.read.ended


def test_a_run_that_has_ended_runs_out_of_nothing(both: Both) -> None:
    """While it ran its memory had a risk; a forecast for a run that has ended is none."""
    assert [k.pool for rank in both.during[-1][1].ranks for k in rank.memory.risks] == ["host", "host"]
    assert [rank.memory.risks for rank in both.read.ranks] == [(), ()]


def test_a_run_begins_when_it_began_and_ends_when_its_ranks_ended(both: Both, world: World) -> None:
    """Not at the first and the last scrape: its collector answers on."""
    alive = 'max_over_time(timestamp(zeromon_rank_up{run="real"} == 1)[30m:1s])'
    lived = max(float(one["value"][1]) for one in world.server.query(alive))
    assert both.read.started_wall == pytest.approx(both.live.started_wall, abs=0.01)
    assert both.read.taken_wall == pytest.approx(lived, abs=2)


def test_the_last_steps_are_known_after_the_end(both: Both) -> None:
    """Their mean, and the part of it that waited for communication."""
    for mine, theirs in zip(both.read.ranks, both.live.ranks, strict=True):
        steps = [step.seconds for step in theirs.steps.recent]
        assert mine.steps.median_seconds is not None
        assert min(steps) <= mine.steps.median_seconds <= max(steps)
        parts = rank_parts(mine)
        assert mine.communication.exposed_ratio and parts["exposed"]
        share = parts["exposed"] / sum(parts.values())
        assert share == pytest.approx(mine.communication.exposed_ratio, rel=0.3)


def test_the_ledger_is_the_collectors(both: Both) -> None:
    for mine, theirs in zip(both.read.ranks, both.live.ranks, strict=True):
        assert {str(row.cause): row.seconds for row in mine.ledger.rows} == theirs.ledger.totals
        assert len(mine.ledger.rows) > 2


def test_the_list_of_runs_says_what_each_run_is(both: Both, world: World, tmp_path: Path) -> None:
    """One that lives with its present figures, one that has ended with its steps; none began in 1970."""
    from zeromon.readout.verdict import SIGNS, Health
    from zeromon_dashboard.hub import Hub
    from zeromon_dashboard.runs_page import run_table_rows

    server = Server(world.server.url)
    hub = Hub(Store(tmp_path), server=server)
    rows = {row["run"]: row for row in run_table_rows(hub.runs())}
    ended, lives = rows["real"], rows["fleet"]
    steps = both.live.ranks[0].steps.watched_steps
    assert (ended["verdict"], ended["steps"]) == ("■ finished", steps)
    assert ended["ranks"] == "2 fsdp2"
    assert ended["started"] == clock(both.live.started_wall)[:-3]
    assert (ended["step"], ended["exposed"]) == (None, None)
    fleet = world.fleets["fleet"].nodes[0].view[0]
    assert lives["started"] == clock(fleet.started_wall)[:-3]
    assert lives["why"].split(": ")[1].startswith("64 ranks, step ")
    health = Health(lives["why"].split(": ")[0])
    assert lives["verdict"] == f"{SIGNS[health.severity]} {health}"
    assert 380 < lives["step"] < 460
    assert lives["exposed"] > 10
    unknown = replace(hub.runs()[0], manifest=replace(hub.runs()[0].manifest, started_wall=0.0))
    assert run_table_rows([unknown])[0]["started"] == "n/a"


def test_while_it_runs_its_step_is_a_mean_of_steps_that_were(both: Both) -> None:
    """Of some seconds: not shorter than the shortest of all, and not longer than the longest."""
    means = [
        mine.ranks[0].steps.median_seconds
        for _, mine in both.during
        if mine.ranks and mine.ranks[0].steps.median_seconds
    ]
    steps = [step.seconds for step in both.live.ranks[0].steps.recent]
    assert means
    assert min(steps) <= min(means) and max(means) <= max(steps)
    newest = both.during[-1][1].ranks[0].steps.recent[-1]
    assert sum(newest.phase_ns) == pytest.approx(newest.seconds * 1e9, rel=0.2)


def test_the_past_is_read_back(both: Both) -> None:
    span = both.source.span()
    assert span is not None
    assert span[1] - span[0] >= 2
    early = next(mine for _, mine in both.during if mine.ranks and mine.ranks[0].steps.watched_steps)
    then = both.source.at(early.taken_wall)
    # what was scraped at that moment may not have been there to be read yet
    assert (
        early.ranks[0].steps.watched_steps
        <= then.ranks[0].steps.watched_steps
        < both.live.ranks[0].steps.watched_steps
    )
    rows = both.source.series(StepQuery(ranks=(1,)))
    assert set(rows["rank"]) == {1}
    assert rows["step"] == sorted(rows["step"])
    assert max(rows["step"]) <= both.live.ranks[1].steps.watched_steps
    assert all(us > 0 for us in rows["duration_us"])
    first, last = rows["step"][0], rows["step"][-1]
    some = both.source.series(StepQuery(ranks=(1,), steps=(first + 1, last - 1)))["step"]
    assert some and first < min(some) and max(some) < last


# ---- a fleet that fits ------------------------------------------------------------------------------


def by_rank(run: RunSnapshot) -> dict[int, RankSnapshot]:
    return {rank.rank: rank for rank in run.ranks}


def test_a_run_of_several_nodes_is_one(small: Small) -> None:
    run = fresh(small.server.url).latest()
    assert [rank.rank for rank in run.ranks] == list(range(64))
    assert (run.node, run.fleet, run.note, run.ended) == ("8 nodes", None, "", False)
    assert {rank.node for rank in run.ranks} == {f"node{n:04}" for n in range(8)}
    assert [late.rank for late in run.stragglers] == [LATE_RANK]
    found = {(f.rule, f.rank) for f in run.findings if f.severity != "info"}
    assert found == {("straggler", LATE_RANK), ("oom_risk", GROWING_RANK)}


def test_more_than_some_are_aggregated_to_the_same(small: Small) -> None:
    """What is read as of a large run agrees with all ranks, read one by one at the same moment."""
    wall = time.time() - 1.5
    all_of, large = fresh(small.server.url).at(wall), fresh(small.server.url, many=4).at(wall)
    fleet = large.fleet
    assert fleet is not None
    assert (fleet.ranks, fleet.up, fleet.failed, fleet.silent, len(fleet.nodes)) == (64, 64, 0, 0, 8)
    assert len(large.ranks) < 48
    one_by_one = by_rank(all_of)
    for rank in large.ranks:  # but for what is of the newest of those that were read
        same = one_by_one[rank.rank]
        assert rank == changed(same, recent=rank.steps.recent, last_event_ns=rank.status.last_event_ns)
    assert {LATE_RANK, GROWING_RANK, 0} <= set(by_rank(large))
    ratios = ("exposed_ratio", "late_seconds", "wait_seconds", "overlap_ratio")
    readers = {name: attrgetter(f"communication.{name}") for name in ratios}
    for name, read in {"step_seconds": attrgetter("steps.median_seconds"), **readers}.items():
        values = sorted(map(read, all_of.ranks))
        spread = fleet.spreads[name]
        wanted = [values[n] for n in (0, 3, 31, 60, 63)]
        found = [spread.least, spread.p5, spread.median, spread.p95, spread.most]
        assert found == pytest.approx(wanted, rel=0.0051)
    for node in fleet.nodes:
        mine = [rank for rank in all_of.ranks if rank.node == node.node]
        assert (node.ranks, node.up) == (8, 8)
        assert node.exposed_ratio == pytest.approx(
            max(rank.communication.exposed_ratio or 0 for rank in mine)
        )
        assert node.risk_ratio == pytest.approx(max(rank.memory.risks[0].ratio for rank in mine))
        assert node.memory_bytes == max(
            rank.memory.device.reserved_bytes for rank in mine if rank.memory.device
        )
    assert large.findings == all_of.findings


def test_the_past_of_many_is_three_lines_that_grow(small: Small) -> None:
    """What is known is not asked for again."""
    source = fresh(small.server.url)
    wait_for(lambda: (span := source.span()) is not None and span[1] - span[0] > 4)
    rows = source.series()
    assert set(rows["rank"]) == {MOST, MEDIAN, LEAST}
    least, middle, most = (
        [us for rank, us in zip(rows["rank"], rows["exposed_us"], strict=True) if rank == of]
        for of in (LEAST, MEDIAN, MOST)
    )
    assert least
    assert all(a < b < c for a, b, c in zip(least, middle, most, strict=True))
    small.server.wait('min(timestamp(zeromon_rank_up{run="fleet"}))', time.time() + 2)
    source._due = 0
    source.latest()
    asked = source.server.cost.queries
    grown = source.series()
    assert len(grown["step"]) > len(rows["step"])
    assert grown["start_us"][:3] == rows["start_us"][:3]
    assert source.server.cost.queries - asked == 1


def not_shown(source: PrometheusSource) -> int:
    """A rank that nothing is known of."""
    return max(set(range(64)) - set(by_rank(source.latest())))


def test_a_rank_that_is_looked_at_comes_from_its_collector(small: Small) -> None:
    """With what is not read of the others: its histogram, its exact last steps."""
    source = fresh(small.server.url, many=4)
    wanted = not_shown(source)
    source.request_detail([wanted])
    run = source.latest()
    rank = by_rank(run)[wanted]
    assert (rank.pid, rank.steps.phase, sum(rank.steps.duration_buckets)) == (
        1000 + wanted % 8,
        "other",
        rank.steps.watched_steps,
    )
    assert abs(run.taken_ns - rank.steps.recent[-1].end_ns) < 5e9
    source.request_detail(node=f"{small.fleet.address}/node/3")
    assert set(range(24, 32)) <= set(by_rank(source.latest()))


def test_a_rank_whose_collector_is_out_of_reach_comes_from_prometheus_alone(small: Small) -> None:
    source = fresh(small.server.url, many=4)
    wanted = not_shown(source)
    small.fleet.silent_api = True
    try:
        source.request_detail([wanted])
        run = source.latest()
    finally:
        small.fleet.silent_api = False
    assert {row.op for row in by_rank(run)[wanted].communication.traffic} == {
        "all_gather",
        "reduce_scatter",
    }
    assert "rank detail" in run.note
    points = by_rank(run)[wanted].steps.recent  # of before it was looked at, too
    assert len(points) > 2
    assert [point.step for point in points] == sorted({point.step for point in points})


def test_findings_have_their_time(small: Small) -> None:
    known = {(one.rule, one.gone) for one in fresh(small.server.url).findings()}
    assert ("straggler", None) in known


@pytest.mark.parametrize(("many", "most"), [(256, 3), (4, 5)])
def test_few_questions_however_many_ranks(small: Small, many: int, most: int) -> None:
    """As docs/how-to/prometheus.md says; and none while there can be nothing new."""
    source = fresh(small.server.url, many=many)
    source.latest()
    source._reader.census_due = source._due = time.monotonic()
    source.latest()
    before = source.server.cost.queries
    source._due = 0
    source.latest()
    assert source.server.cost.queries - before == most
    assert source.latest() is source.latest()


# ---- the command -----------------------------------------------------------------------------------


def test_attach_prints_a_picture(small: Small, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["attach", "--prometheus", small.server.url, "--run", "fl", "--json"]) == 1
    assert len(json.loads(capsys.readouterr().out)["ranks"]) == 64


def test_the_environment_names_the_server(
    small: Small, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ZEROMON_PROMETHEUS", small.server.url)
    assert main(["attach", "--run", "fleet", "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["origin"] == small.server.url
    assert main(["attach", "--json"]) == 2
    assert "the server knows several runs: fleet, frail" in capsys.readouterr().err
    assert main(["attach", "--run", "other"]) == 2
    assert "It knows fleet, frail" in capsys.readouterr().err


def test_report_prints_a_run_of_several_nodes(
    small: Small, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("ZEROMON_STORE", str(tmp_path))
    page = tmp_path / "page.html"
    arguments = ["report", "--prometheus", small.server.url, "fleet"]
    assert main(arguments) == 1
    told = capsys.readouterr().out
    assert "64 of 64 ranks on 8 nodes, fsdp2" in told
    assert main([*arguments, "-o", str(page)]) == 1
    assert "median rank" in page.read_text()


# ---- the dashboard ---------------------------------------------------------------------------------


def test_the_dashboard_reads_the_server(small: Small, tmp_path: Path) -> None:
    """Its list of runs, its pages, a rank that is chosen, and what it says when the server is gone."""
    from zeromon_dashboard.feed import Feeds
    from zeromon_dashboard.hub import Hub
    from zeromon_dashboard.url_state import Route

    hub = Hub(Store(tmp_path), server=Server(small.server.url))
    listed = {item.manifest.run: (item.manifest.ranks, item.live) for item in hub.runs()}
    assert listed["fleet"] == (64, True)
    source = hub.followed("fleet").source
    assert isinstance(source, PrometheusSource)
    source._reader.many = 4
    feeds = Feeds(hub)
    parts, _ = feeds.of(Route(run="fleet", page="ranks")).page()
    assert "of 64 ranks, the most important ones" in parts.parts["rank-count"]["children"]
    wanted = not_shown(source)
    node = f"node{wanted // 8:04}"
    feed = feeds.of(Route(run="fleet", page="ranks", node=node))
    feed.page()
    source._due = 0
    hub.followed("fleet")._read_at = -10
    rows = feed.page()[0].parts["rank-table"]["rowData"]
    assert [row["rank"] for row in rows] == list(range(wanted // 8 * 8, wanted // 8 * 8 + 8))
    overview, _ = feeds.of(Route(run="fleet", page="overview")).page()
    assert set(overview.charts["exposed"].traces) == {"highest rank", "median rank", "lowest rank"}


# ---- what goes wrong -------------------------------------------------------------------------------


def test_clocks_that_differ_are_told_and_do_not_matter(
    small: Small, monkeypatch: pytest.MonkeyPatch
) -> None:
    ahead = SimpleNamespace(time=lambda: time.time() + 3600, monotonic=time.monotonic)
    monkeypatch.setattr(client, "time", ahead)
    monkeypatch.setattr(source_module, "time", ahead)
    found = fresh(small.server.url)
    run = found.latest()
    assert "1 h 00 min behind this machine's" in run.note
    assert abs(run.taken_wall - ahead.time()) < 5
    span = found.span()
    assert span is not None
    assert abs(span[1] - ahead.time()) < 5
    assert found.at(run.taken_wall - 1).ranks[0].steps.watched_steps <= run.ranks[0].steps.watched_steps
    assert max(found.series(StepQuery(ranks=(3,)))["start_us"]) / 1e6 > ahead.time() - 10


@pytest.mark.parametrize("many", [256, 4])
def test_a_node_that_falls_silent_is_said_to_be(frail: Small, many: int) -> None:
    source = fresh(frail.server.url, "frail", many=many)
    assert all(rank.status.alive for rank in source.latest().ranks)
    frail.fleet.silent.add(1)
    try:
        wait_for(lambda: frail.server.number('count(zeromon_rank_up{run="frail"})') == 4)
        source._due = 0
        early = source.latest()  # a scrape that fails is no death
        assert all(rank.status.alive for rank in early.ranks), [
            rank.status.ended for rank in early.ranks
        ]
        time.sleep(4)
        source._due = 0
        run = source.latest()
    finally:
        frail.fleet.silent.clear()
    silent = {rank.rank: rank.status.ended for rank in run.ranks if not rank.status.alive}
    assert set(silent) == {4, 5, 6, 7}
    assert all(text.startswith("not seen for ") for text in silent.values())
    assert not run.ended
    assert not any(rank.status.failed for rank in run.ranks)
    if run.fleet is not None:
        assert (run.fleet.ranks, run.fleet.silent) == (8, 4)
        assert [node.silent_seconds > 3 for node in run.fleet.nodes] == [False, True]
    frail.server.wait('count(zeromon_rank_up{run="frail"})', 8)
    source._due = 0
    assert all(rank.status.alive for rank in source.latest().ranks)


def test_a_dead_rank_is_told_from_a_silent_one(frail: Small) -> None:
    frail.fleet.nodes[0].failed.add(2)
    try:
        frail.server.wait('sum(zeromon_rank_failed{run="frail"})', 1)
        for many in (256, 4):
            run = fresh(frail.server.url, "frail", many=many).latest()
            assert [(r.rank, r.status.ended) for r in run.ranks if r.status.failed] == [(2, "SIGKILL")]
    finally:
        frail.fleet.nodes[0].failed.clear()


def test_a_rank_that_ended_before_its_collector_left_is_not_unknown(world: World) -> None:
    server, over = world.server, world.fleets["over"]
    over.nodes[0].failed.update({0, 1})
    server.wait('sum(zeromon_rank_up{run="over"} == bool 0)', 2)
    over.silent.add(0)
    wait_for(lambda: not server.query('zeromon_rank_up{run="over"}'))
    time.sleep(5)  # so long a rank that lives may be without samples
    run = fresh(server.url, "over").latest()
    assert run.ended
    assert [rank.status.ended for rank in run.ranks] == ["SIGKILL", "SIGKILL"]


def test_two_jobs_of_one_name_are_not_mixed(world: World) -> None:
    """The same ranks live at two collectors: one job is shown, and the other can be had."""
    url = world.server.url
    run = fresh(url, "twins").latest()
    assert "two jobs are called twins" in run.note
    assert len({rank.rank for rank in run.ranks}) == len(run.ranks)
    (twin,) = find_listed_runs(Server(url), 'twins{job="twin"}')
    only = twin.open(Server(url))
    assert [rank.world_size for rank in only.latest().ranks] == [4] * 4
    assert only.latest().note == ""
    assert "two jobs are called twins" in fresh(url, "twins", many=2).latest().note


def test_a_run_that_is_gone_is_shown_as_it_was_last(world: World) -> None:
    """Its collector went with it."""
    server = world.server
    steps = fresh(server.url, "short").latest().ranks[0].steps.watched_steps
    world.fleets["short"].silent.add(0)
    wait_for(lambda: not server.query('zeromon_rank_up{run="short"}'))
    run = fresh(server.url, "short").latest()
    assert [rank.rank for rank in run.ranks] == [0, 1]
    assert run.ranks[0].steps.watched_steps >= steps
    found = {one.run: one.state for one in runs_of(Server(server.url))}
    assert found["short"] == "2 ranks, not seen now"
    assert [run.run for run in find_listed_runs(Server(server.url), "short")] == ["short"]
    assert (
        fresh(server.url, "short").at(run.taken_wall - 2).ranks[0].steps.watched_steps
        <= run.ranks[0].steps.watched_steps
    )


def test_a_server_that_goes_and_comes_back(frail: Small, capsys: pytest.CaptureFixture[str]) -> None:
    source = fresh(frail.server.url, "frail")
    before = source.latest()
    frail.server.stop()
    source._due = 0
    with pytest.raises(SourceError, match="no Prometheus answers at") as refused:
        source.latest()
    assert "http://host:9090" in refused.value.hint
    assert main(["attach", "--prometheus", frail.server.url]) == 2
    assert "no Prometheus answers" in capsys.readouterr().err
    frail.server.start()
    frail.server.wait('count(zeromon_rank_up{run="frail"})', 8)
    assert source.latest().ranks[0].steps.watched_steps >= before.ranks[0].steps.watched_steps


def test_a_server_without_our_series_says_so() -> None:
    with Prometheus([]) as server:
        assert runs_of(Server(server.url)) == []
        with pytest.raises(RunNotFound, match="has no series of zeromon") as refused:
            find_listed_runs(Server(server.url), None)
        assert "docs/how-to/prometheus.md" in refused.value.hint
        with pytest.raises(RunNotFound, match="knows no run gone"):
            fresh(server.url, "gone").latest()
