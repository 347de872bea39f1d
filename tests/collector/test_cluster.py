"""What the collectors of a run's nodes tell each other; tests/nodes does it on hosts of their own."""

from __future__ import annotations

import json
import threading
import time
import urllib.error
import urllib.request
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from builders import MS, arrival, arrived, rank, run
from hypothesis import given, strategies as st
from support import wait_for

from zeromon import __version__
from zeromon.collector.cluster import (
    EXCHANGE,
    Clock,
    ClockOffset,
    KnownNode,
    Leader,
    LeaderReply,
    NodeInfo,
    NodeReport,
    Sender,
    make_node_views,
    measure_clock_offset,
    pack_groups,
    peer_rank_updates,
    unpack_groups,
)
from zeromon.collector.cluster_client import (
    ClusterSync,
    NodeList,
    RunCluster,
    answer_report,
    as_peer_rank,
    read_node_infos,
    reply_signature,
)
from zeromon.collector.collector_process import TargetFile
from zeromon.collector.daemon import Collector
from zeromon.collector.http import start_http_server, target_groups
from zeromon.diagnosis.arrivals import (
    ArrivalSkew,
    PartialArrival,
    match_single_node,
    matched_collective,
    partial_arrival,
)
from zeromon.diagnosis.engine import advise
from zeromon.diagnosis.stragglers import find_stragglers
from zeromon.fold.state import Arrival
from zeromon.ring.files import replace_file
from zeromon.ring.tokens import NONCE, REPORT, SIGNATURE, request_proof_headers
from zeromon.snapshot import RankSnapshot
from zeromon.snapshot.communication import GroupProgress, InFlight
from zeromon.snapshot.run import NodeView
from zeromon.storage.run_store import Store

SECOND = 1_000_000_000


def card(first: int, node: str = "", run: str = "") -> NodeInfo:
    return NodeInfo(
        node=node or f"n{first // 2}", address="127.0.0.1:1", first_rank=first, ranks=2, run=run
    )


def joint(last: int, at: tuple[int, int], size: int = 4, sequence: int = 1) -> PartialArrival:
    """Two ranks of a node, when each came, ms; *last* is the one that came later."""
    early, late = at
    return PartialArrival("g", sequence, size, 2, early * MS, late * MS, last, early * MS, MS)


def test_the_last_of_all_is_late_by_what_it_is_behind_the_last_but_one() -> None:
    match = matched_collective([joint(1, (10, 12)), joint(3, (11, 30))])
    assert (match.last_rank, match.late_ns, match.node_late_ns) == (3, 18 * MS, 0)
    both = matched_collective([joint(1, (10, 12)), joint(3, (28, 30))])
    assert (both.late_ns, both.node_late_ns) == (2 * MS, 16 * MS)
    whole = joint(3, (11, 30))._replace(others_wait_ns=14 * MS)
    assert match_single_node(whole) == matched_collective([whole])


@pytest.mark.parametrize("unknown", [(), (0,), (1,), (2,)])
def test_a_transfer_is_known_by_the_last_rank_and_the_shortest_span(unknown: Sequence[int]) -> None:
    """Rank 1 comes last and rank 2, whose clock runs behind, has the shortest span."""
    times = {0: (10, 40), 1: (30, 40), 2: (20, 29)}
    members = {
        rank: arrival(1, start * MS, 1, end * MS, span_known=rank not in unknown)
        for rank, (start, end) in times.items()
    }
    for one in members.values():
        one.on_host = False
    partial = partial_arrival("g", 3, members)
    assert (partial.last_rank, partial.transfer_ns) == (1, 9 * MS)
    is_known = not {1, 2} & set(unknown)
    assert partial.transfer_known == match_single_node(partial).transfer_known == is_known
    for shift in (-99, 99):  # the last one comes on this node, or on the other
        other = joint(5, (shift, shift + 1))
        assert matched_collective([other, partial]).transfer_known == (is_known or shift > 0)


@given(
    st.lists(st.integers(0, 10**6), min_size=2, max_size=12),
    st.integers(1, 5),
    st.lists(st.integers(0, 10**6), min_size=12, max_size=12),
)
def test_matching_by_nodes_finds_what_matching_by_ranks_finds(
    at: list[int], nodes: int, computes: list[int]
) -> None:
    """However the ranks are spread: the same last rank, the same lateness, the same waits."""

    def came(rank: int) -> Arrival:
        return arrival(1, at[rank], 1, waits_from_ns=at[rank] + computes[rank])

    whole, skews, head = ArrivalSkew(), [ArrivalSkew() for _ in range(nodes)], []
    homes = {rank: rank % nodes for rank in range(len(at))}
    for number, skew in enumerate(skews):
        skew.joined = True
        members = sum(1 for home in homes.values() if home == number)
        for one, home in homes.items():
            if home == number:
                arrived(skew, one, members, came(one), len(at))
        head += list(skew.outgoing)
    for one in range(len(at)):
        arrived(whole, one, len(at), came(one), len(at))
    if any(len(at) == sum(1 for h in homes.values() if h == n) for n in range(nodes)):
        return  # all on one node: nothing to ask anybody
    match = matched_collective(head)
    for skew in skews:
        skew.record_match(match)
    late = max(at)
    assert at[match.last_rank] == late
    assert match.late_ns == whole.steps[1].late[match.last_rank].length
    waits = {
        one: list(spans)
        for skew in skews
        for step in skew.steps.values()
        for one, spans in step.wait.items()
    }
    assert waits == {one: list(spans) for one, spans in whole.steps[1].wait.items()}


def late_node(skew: ArrivalSkew, extra: int) -> None:
    """Sixty steps in which ranks 2 and 3 come *extra* ms late, one or the other last."""
    for step in range(1, 61):
        base, jitter = step * 100, step % 2
        match = matched_collective(
            [
                joint(1, (base, base + 1), sequence=step),
                PartialArrival(
                    "g", step, 4, 2, (base + extra) * MS, (base + extra + 1) * MS, 2 + jitter, 0, MS
                ),
            ]
        )
        arrived(skew, 0, 2, arrival(step, base * MS, step), 4)
        arrived(skew, 1, 2, arrival(step, (base + 1) * MS, step), 4)
        skew.record_match(match)


def test_a_node_is_named_when_all_its_ranks_are_late() -> None:
    """Neither of its ranks is behind the other, and everybody waits for both."""
    skew = ArrivalSkew()
    skew.joined = True
    late_node(skew, 30)
    here = [rank(n, median_seconds=0.1) for n in (0, 1)]
    node_of = {0: "n0", 1: "n0", 2: "n1", 3: "n1"}.__getitem__
    (found,) = find_stragglers(skew, here, node_of)
    assert (found.node, found.whole_node, found.since_step) == ("n1", True, 4)
    assert found.late_seconds == pytest.approx(0.029, abs=0.002)
    assert find_stragglers(skew, here, node_of, error_seconds=0.02) == ()  # it may be the clocks'


def test_an_answer_that_never_comes_costs_a_bounded_memory() -> None:
    skew = ArrivalSkew()
    skew.joined = True
    for sequence in range(20_000):
        arrived(skew, 0, 1, arrival(sequence, sequence, 1), 4)
    assert len(skew._waiting) <= 8192
    assert len(skew.outgoing) <= 8192
    skew.record_match(matched_collective([joint(3, (1, 2), sequence=3)]))  # long forgotten
    assert not skew.steps


@given(st.integers(-(10**15), 10**15), st.integers(0, 10**9), st.integers(0, 10**9))
def test_the_error_of_a_clock_is_within_the_bound(ahead: int, there: int, back: int) -> None:
    """Whatever the way there and the way back take."""
    t1 = 10**15
    t0 = t1 - there + ahead
    t3 = t1 + back + ahead
    found = measure_clock_offset(t0, t1, t1, t3)
    assert abs(found.value_ns - ahead) <= found.error_ns + 1


def test_the_best_exchange_counts_until_drift_makes_it_the_worse() -> None:
    clock = Clock()
    assert clock.best(0) is None and clock.round_trip_ns() == -1
    clock.heard(0, 50, 50, 100)  # 100 ns there and back
    clock.heard(SECOND, SECOND + 500_000, SECOND + 500_000, SECOND + 1_000_000)
    best = clock.best(2 * SECOND)
    assert best is not None and best.error_ns == 50
    old = clock.best(10**14)  # a day later both are as old, and the first is still better
    assert old is not None and old.error_at(10**14) > 10**6
    assert clock.round_trip_ns() == 100


@given(st.sampled_from([-3600, -5, 5, 3600]), st.integers(0, 10**6))
def test_a_clock_that_has_jumped_counts_from_the_next_exchange(jump: int, trip: int) -> None:
    """As that of a virtual machine that was suspended; the old exchanges are the shorter ones."""
    clock = Clock()
    for second in range(60):
        clock.heard(second * SECOND, second * SECOND + 50, second * SECOND + 50, second * SECOND + 100)
    t1 = 60 * SECOND
    t0 = t1 - trip + jump * SECOND
    clock.heard(t0, t1, t1, t0 + 2 * trip)
    best = clock.best(t0 + 2 * trip)
    assert best is not None and abs(best.value_ns - jump * SECOND) <= trip + 1


def test_a_node_whose_clock_is_an_hour_ahead_accuses_nobody() -> None:
    """Its arrivals are those of the future; it says so, and the other nodes go on."""
    head, now = Leader(), 100 * SECOND
    for first, ahead in ((0, 0), (2, 0), (4, 3600 * SECOND)):
        arrival = PartialArrival("", 7, 6, 2, now + ahead, now + ahead + 10, first, now + ahead, 1000)
        report = NodeReport("train-1", card(first), groups=["g"], joints=[(0, arrival)])
        reply = head.answer(report, now + SECOND // 10)
    assert reply.matches == []
    assert head.note.startswith("node ") and "clock is wrong" in head.note
    assert head.reads(Sender(run="train-1", card=card(4), exchange=EXCHANGE)) and head.note == ""


def stuck(sequence: int, issued: int) -> InFlight:
    return InFlight(
        op="all_reduce", group="world", sequence=sequence, unit="", phase="backward", nbytes=8,
        issued_ns=issued, group_id="g",
    )  # fmt: skip


def progress(sequence: int) -> tuple[GroupProgress, ...]:
    return (GroupProgress(group_id="g", label="world", ranks=(0, 1, 2, 3), sequence=sequence),)


def reports(now: int) -> tuple[list[RankSnapshot], list[RankSnapshot]]:
    """Ranks 0 to 2 wait in #7; rank 3 has not called it."""
    inside = {"in_flight": (stuck(7, now - 20 * SECOND),), "groups": progress(7)}
    here = [rank(n, **inside) for n in (0, 1)]
    there = [rank(2, **inside), rank(3, groups=progress(6))]
    return here, there


def test_a_hang_over_nodes_names_the_missing_rank() -> None:
    """The head asks the other node how far its ranks are, and every node hears the verdict."""
    now = 100 * SECOND
    here, there = reports(now)
    head, asked = Leader(), ()
    for turn in range(3):
        at = now + turn * SECOND
        first = head.answer(
            NodeReport(
                "r",
                card(0),
                peers=peer_rank_updates([as_peer_rank(r, "n0") for r in here], asked, at, 0),
            ),
            at,
        )
        reply = head.answer(
            NodeReport(
                "r",
                card(2),
                peers=peer_rank_updates([as_peer_rank(r, "n1") for r in there], asked, at, 0),
            ),
            at,
        )
        asked = tuple(reply.asked)
    (hang,) = reply.hangs
    assert first.asked == reply.asked == ["g"]
    assert (hang.waiting, hang.missing, hang.elsewhere) == ((0, 1, 2), (3,), ())
    assert [(a.rank, a.node) for a in reply.away] == [(3, "n1")]
    nodes = tuple(
        NodeView(node=f"n{n}", address="", first_rank=2 * n, ranks=2, here=n == 0) for n in (0, 1)
    )
    snapshot = replace(run(*here, taken_ns=now), hangs=reply.hangs, away=tuple(reply.away), nodes=nodes)
    (said,) = [f for f in advise(snapshot) if f.rule == "collective_in_flight"]
    assert said.rank == 3
    assert (
        "; ranks 0, 1 and 2 on n1 wait" in said.text and "rank 3 on n1 has not called it (" in said.text
    )


def test_ranks_of_a_silent_node_are_not_accused() -> None:
    now = 100 * SECOND
    here, there = reports(now)
    head = Leader()
    head.answer(NodeReport("r", card(2), peers=[as_peer_rank(r, "n1") for r in there]), now)
    later = now + 20 * SECOND
    reply = head.answer(NodeReport("r", card(0), peers=[as_peer_rank(r, "n0") for r in here]), later)
    (hang,) = reply.hangs
    assert (hang.elsewhere, hang.missing, hang.kind) == (
        (2, 3), (), "members on other nodes are not seen"
    )  # fmt: skip
    assert [round(seen.heard) for seen in reply.nodes] == [0, 20]


def node(first: int, **facts: Any) -> NodeView:
    return NodeView(node=f"n{first // 2}", address="", first_rank=first, ranks=2, **facts)


@pytest.mark.parametrize(
    ("nodes", "rule", "words"),
    [
        ((node(0), node(2, heard_seconds=12.0, silent=True)), "node_silent", "(ranks 2 to 3): it is"),
        ((node(0), node(2, heard_seconds=3.0)), "", ""),
        (
            (node(0), node(2, round_trip_seconds=0.04), node(4, round_trip_seconds=0.001)),
            "distant_node", "a round trip to node n1 takes 40.0 ms, to the others 1.0 ms",
        ),
        ((node(0), node(2, round_trip_seconds=0.004), node(4, round_trip_seconds=0.0001)), "", ""),
        (
            (node(0), node(2, round_trip_seconds=0.04), node(4, round_trip_seconds=0.05)),
            "distant_node", "a round trip to node n0 takes 45.0 ms;",
        ),
    ],
)  # fmt: skip
def test_what_is_said_of_nodes(nodes: tuple[NodeView, ...], rule: str, words: str) -> None:
    found = advise(run(rank(exposed_ratio=0.2, overlap_ratio=0.9), nodes=nodes))
    told = [f for f in found if f.rule in ("node_silent", "distant_node")]
    assert [f.rule for f in told] == ([rule] if rule else [])
    assert all(words in f.text for f in told)
    quiet = run(rank(exposed_ratio=0.02, overlap_ratio=0.9), nodes=nodes)
    assert "distant_node" not in {f.rule for f in advise(quiet)}


def test_a_node_without_the_head_says_why() -> None:
    (told,) = advise(run(rank(exposed_ratio=0.0), nodes_note="the head does not answer"))
    assert (told.rule, told.severity, told.text) == (
        "nodes_apart", "info", "the head does not answer"
    )  # fmt: skip


def test_many_joints_make_the_sample_smaller() -> None:
    head = Leader()
    groups, many = pack_groups(joint(3, (n, n + 1), sequence=n) for n in range(20_000))
    report = NodeReport("r", card(2), groups=groups, joints=many)
    head.answer(report, SECOND)
    assert head.answer(report, 2 * SECOND).sample == 2
    head = Leader()
    exchange = ClusterSync("r", card(0), [card(0, run="r"), card(2)], head)
    exchange._sample = 2
    exchange.enqueue_arrivals(deque(joint(1, (n, n + 1), 2, sequence=n) for n in range(100)), [])
    exchange.enqueue_arrivals(deque(), [])
    assert [match.sequence for match in exchange.matches()] == list(range(0, 100, 2))


def test_a_thousand_nodes_are_answered_more_seldom() -> None:
    head = Leader()
    for number in range(320):
        reply = head.answer(NodeReport("r", card(2 * number)), number * SECOND // 100)
    reply = head.answer(NodeReport("r", card(0)), 4 * SECOND)
    assert reply.every_seconds == 10.0
    assert len(reply.nodes) == 320  # it knew of none
    reply = head.answer(NodeReport("r", card(0), known=320), 5 * SECOND)
    assert reply.nodes == []
    late = head.answer(NodeReport("r", card(0), known=320), 40 * SECOND)
    assert len(late.nodes) == 319
    cards = [seen.card for seen in late.nodes]
    heard = {seen.card.first_rank: KnownNode(seen.card, 20.0) for seen in late.nodes}
    assert not any(view.silent for view in make_node_views(cards, heard, 1.0, 10.0, 0, None, 0))
    assert all(view.silent for view in make_node_views(cards, heard, 1.0, 1.0, 0, None, 0))


def test_a_row_of_no_group_is_refused() -> None:
    groups, rows = pack_groups([joint(3, (1, 2)), joint(3, (2, 3), sequence=2)])
    assert groups == ["g"]
    assert [row.sequence for row in unpack_groups(groups, rows)] == [1, 2]
    with pytest.raises(ValueError, match="no group 0"):
        list(unpack_groups([], rows))


def test_names_from_elsewhere_steer_no_terminal() -> None:
    bad = "n\x1b[2J\u202e"
    peer = msgspec.structs.replace(as_peer_rank(rank(2, failed=True, ended=bad), "another"), doing=bad)
    head = Leader()
    reply = head.answer(NodeReport("r", card(2, node=bad), peers=[peer]), SECOND)
    (away,) = reply.away
    shown = [seen.card.node for seen in reply.nodes] + [away.node, away.ended, away.doing]
    assert all(text.isprintable() for text in shown)
    assert away.node == reply.nodes[0].card.node  # whatever it says of itself


@given(st.binary(max_size=200))
def test_what_is_no_report_is_refused(body: bytes) -> None:
    with pytest.raises(ValueError):  # of msgspec's, whose text is its own
        answer_report(Leader(), body, 0)


def test_a_collector_that_cannot_be_reached_is_named_and_costs_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("ZEROMON_TOKEN", "secret")
    exchange = ClusterSync("r", card(2), [NodeInfo("n0", "127.0.0.1:9", 0, 2, "r"), card(2)], None)
    exchange._replied -= 60
    waits = threading.Event()
    for _ in range(100):
        exchange.enqueue_arrivals(deque(), [])
        if exchange.note:
            break
        waits.wait(0.1)
    exchange.close()
    assert "the collector of node n0, 127.0.0.1:9 does not answer" in exchange.note
    assert "ZEROMON_HOST" in exchange.note
    assert not exchange.is_leader_heard
    assert [view.heard_seconds for view in exchange.nodes()] == [None, 0.0]


def test_a_collector_of_another_machine_alone_is_not_listed(tmp_path: Path) -> None:
    """Its 127.0.0.1 would be taken for ours, and its ranks be shown under the wrong node."""
    collector = Collector(tmp_path / "rings", Store(tmp_path / "store"))
    far = NodeInfo("n2", "10.0.0.3:9417", 4, 2)
    exchange = ClusterSync("r", card(0), [card(0, run="r"), card(2), far], Leader())
    cluster = RunCluster(tmp_path)
    cluster._sync = exchange
    collector._runs["r"] = SimpleNamespace(run="r", cluster=cluster)  # type: ignore[assignment]
    assert [one.first_rank for one in collector.targets()] == [0, 4]


@pytest.mark.parametrize("content", ["", "[", "{}", '[{"node": 1}]', "null", "[1]"])
def test_a_damaged_list_of_nodes_is_none(tmp_path: Path, content: str) -> None:
    (tmp_path / "nodes.json").write_text(content)
    assert read_node_infos(tmp_path) == []
    (tmp_path / "nodes.json").write_bytes(msgspec.json.encode([card(2), card(4)]))
    assert read_node_infos(tmp_path) == []  # the head is not among them yet
    (tmp_path / "nodes.json").write_bytes(msgspec.json.encode([card(2), card(0, run="r")]))
    assert [found.first_rank for found in read_node_infos(tmp_path)] == [0, 2]


def test_service_discovery_lists_what_there_is() -> None:
    """A run of one node is found where it was asked for; one of several at every node's address."""
    alone = target_groups([], [run(rank(0), rank(1))], "10.0.0.1:9417")
    assert alone == [
        {
            "targets": ["10.0.0.1:9417"],
            "labels": {
                "__meta_zeromon_run": "train-1",
                "__meta_zeromon_node": "n0",
                "__meta_zeromon_ranks": "0-1",
            },
        }
    ]
    spread = [replace_run(card(0)), replace_run(card(2))]
    assert len(target_groups(spread, [run(rank(0), run="train-1")], "x:1")) == 2
    assert target_groups([], [], "x:1")[0]["targets"] == ["x:1"]
    assert json.dumps(alone)


def test_the_list_is_kept_in_a_file_where_that_is_wanted(tmp_path: Path) -> None:
    path = tmp_path / "sd.json"
    file = TargetFile(str(path))
    groups = target_groups([], [run(rank(0))], "a:1")
    file.write(groups)
    assert json.loads(path.read_text()) == groups
    first = path.stat().st_ino
    file.write(groups)
    assert path.stat().st_ino == first  # nothing has changed
    file.write(target_groups([], [], "a:1"))
    assert json.loads(path.read_text()) != groups
    TargetFile(str(tmp_path / "none" / "sd.json")).write(groups)
    assert [entry.name for entry in tmp_path.iterdir()] == ["sd.json"]


def test_an_exchange_during_a_look_at_the_clock_is_no_error() -> None:
    """The thread of the exchange adds to what the collector's tick reads."""
    clock = Clock()

    class Interrupted(ClockOffset):
        def error_at(self, now_ns: int) -> float:
            clock._offsets.append(ClockOffset(1.0, 9.0, 0))
            return super().error_at(now_ns)

    clock._offsets.extend(Interrupted(1.0, float(error), 0) for error in (3, 2, 4))
    best = clock.best(0)
    assert best is not None and best.error_ns == 2.0


def test_the_list_of_nodes_is_read_again_when_it_has_changed(tmp_path: Path) -> None:
    nodes, file = NodeList(tmp_path), tmp_path / "nodes.json"
    assert nodes.read() == []
    file.write_bytes(msgspec.json.encode([card(0)]))
    first = nodes.read()
    assert first == read_node_infos(tmp_path) != []
    assert nodes.read() is first
    replace_file(file, msgspec.json.encode([card(0), card(2)]))
    assert [node.first_rank for node in nodes.read()] == [0, 2]
    file.unlink()
    assert nodes.read() == []


def replace_run(one: NodeInfo) -> NodeInfo:
    return msgspec.structs.replace(one, run="train-1")


@pytest.fixture
def server_of() -> Iterator[Callable[[str], str]]:
    """Address of the exchange of a collector with a token."""
    made: list[Any] = []

    def serve(token: str) -> str:
        made.append(start_http_server(Silent(), "127.0.0.1", 0, token))  # type: ignore[arg-type]
        return f"http://127.0.0.1:{made[-1].server_port}/api/exchange"

    yield serve
    for server in made:
        server.shutdown()


def post(url: str, content: bytes, **headers: str) -> tuple[int, Any, bytes]:
    request = urllib.request.Request(url, data=content, headers=headers)
    try:
        with urllib.request.urlopen(request, timeout=30) as got:
            return int(got.status), got.headers, got.read()
    except urllib.error.HTTPError as error:
        return error.code, error.headers, b""


class Silent:
    """A collector that heads nothing."""

    view = ()

    def __init__(self) -> None:
        self.leader = Leader()

    def exchange(self, body: bytes) -> bytes:
        return answer_report(self.leader, body, 0)


def of_a_later_version(message: NodeReport | LeaderReply, **fields: object) -> bytes:
    """A message of the next layout, in which *fields* have another form."""
    read = json.loads(msgspec.json.encode(message))
    return json.dumps(read | {"exchange": EXCHANGE + 1, "zeromon": "9.0", **fields}).encode()


VERSIONS = (
    f"runs zeromon 9.0 (exchange {EXCHANGE + 1}), this node zeromon {__version__} "
    f"(exchange {EXCHANGE}): they do not read each other's reports; install one version on all nodes"
)


def test_the_leader_names_a_node_of_another_version() -> None:
    """Its rows are longer than this version's; the nodes of this version are read as before."""
    leader = Leader()
    longer = of_a_later_version(NodeReport("r", card(2)), groups=["g"], joints=[[0, [0] * 12]])
    reply = msgspec.json.decode(answer_report(leader, longer, SECOND), type=LeaderReply)
    assert (reply.exchange, reply.zeromon, reply.nodes) == (EXCHANGE, __version__, [])
    assert leader.note == f"node n1 {VERSIONS}"
    exchange = ClusterSync("r", card(0), [card(0, run="r"), card(2)], leader)
    exchange.enqueue_arrivals(deque(), [])
    assert exchange.note == leader.note
    assert [view.heard_seconds for view in exchange.nodes()] == [0.0, None]
    answer_report(leader, of_a_later_version(NodeReport("r", card(4))), SECOND)
    assert leader.note == f"node n1 {VERSIONS}; the same of 1 more nodes"
    for first in (2, 4):
        answer_report(leader, msgspec.json.encode(NodeReport("r", card(first))), SECOND)
    assert leader.note == ""


def test_a_node_of_another_version_than_the_leader_names_both(monkeypatch: pytest.MonkeyPatch) -> None:
    class Later(Silent):
        def exchange(self, body: bytes) -> bytes:
            return of_a_later_version(LeaderReply(1, 1, 1.0), matches="of another form")

    monkeypatch.setenv("ZEROMON_TOKEN", "secret")
    server = start_http_server(Later(), "127.0.0.1", 0, "secret")  # type: ignore[arg-type]
    leader = NodeInfo("n0", f"127.0.0.1:{server.server_port}", 0, 2, "r")
    exchange = ClusterSync("r", card(2), [leader, card(2)], None)
    exchange._replied -= 60
    try:
        wait_for(lambda: exchange.note)
    finally:
        exchange.close()
        server.shutdown()
    assert exchange.note == f"node n0 {VERSIONS}"
    assert not exchange.is_leader_heard


def test_only_who_has_the_token_may_report(server_of: Callable[[str], str]) -> None:
    """The token itself, as collectors of an earlier version sent it, is no proof."""
    url = server_of("secret")
    body = msgspec.json.encode(NodeReport("r", card(2)))
    assert post(url, body)[0] == 401
    assert post(url, body, Authorization="Bearer secret")[0] == 401
    assert post(url, body, **request_proof_headers("other", REPORT, body))[0] == 401
    proof = request_proof_headers("secret", REPORT, body)
    assert post(url, body + b" ", **proof)[0] == 401
    status, headers, content = post(url, body, **proof)
    assert status == 200
    assert headers[SIGNATURE] == reply_signature("secret", proof[NONCE], content)
    assert post(url, body, **proof)[0] == 401, "a replay"
    assert post(url, b"{}", **request_proof_headers("secret", REPORT, b"{}"))[0] == 400


def test_a_report_of_an_hour_ago_is_refused(
    server_of: Callable[[str], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    body, now = msgspec.json.encode(NodeReport("r", card(2))), time.time()
    monkeypatch.setattr(time, "time", lambda: now - 3600)
    proof = request_proof_headers("secret", REPORT, body)
    monkeypatch.undo()
    assert post(server_of("secret"), body, **proof)[0] == 401


def test_without_a_token_of_its_own_a_collector_takes_no_report(server_of: Callable[[str], str]) -> None:
    assert post(server_of(""), b"{}", **request_proof_headers("", REPORT, b"{}"))[0] == 401


@pytest.mark.parametrize("token", ["", "cluster-secret"])
def test_who_published_a_false_node_gets_no_token_and_no_belief(
    token: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It answers each report with a reply that names a run and a node of its own."""
    heard: list[bytes] = []
    forged = msgspec.json.encode(LeaderReply(1, 1, 0.05, nodes=[KnownNode(card(0, "evil"), 0.0)]))

    class Evil(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            size = int(self.headers["Content-Length"])
            heard.append(str(self.headers).encode() + self.rfile.read(size))
            self.send_response(200)
            self.send_header(SIGNATURE, request_proof_headers("guess", REPORT, forged)[SIGNATURE])
            self.end_headers()
            self.wfile.write(forged)

        def log_message(self, *_: object) -> None:
            pass

    monkeypatch.setenv("ZEROMON_TOKEN", token)
    evil = HTTPServer(("127.0.0.1", 0), Evil)
    threading.Thread(target=evil.serve_forever, daemon=True).start()
    leader = msgspec.structs.replace(card(0, run="r"), address=f"127.0.0.1:{evil.server_port}")
    exchange = ClusterSync("r", card(2), [leader, card(2)], None)
    exchange._replied -= 60
    try:
        wait_for(lambda: exchange.note and (heard or not token))
    finally:
        exchange.close()
        evil.shutdown()
    assert "the same ZEROMON_TOKEN on all nodes" in exchange.note
    assert bool(heard) == bool(token)
    assert not any(b"cluster-secret" in one for one in heard)
    assert not exchange.is_leader_heard and [view.node for view in exchange.nodes()] == ["n0", "n1"]
