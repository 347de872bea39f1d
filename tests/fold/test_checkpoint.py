"""A collector that is killed and started anew counts on, also of what the rings no longer hold."""

from __future__ import annotations

import json
import time
from dataclasses import fields, replace
from operator import attrgetter
from pathlib import Path
from typing import Any

import msgspec
import pytest
from builders import MS, collective, folded, host, span, state, step
from prometheus_client.parser import text_string_to_metric_families

from zeromon.collector.daemon import Collector
from zeromon.collector.rank import RankFollower
from zeromon.collector.run import TOTALS
from zeromon.export.prometheus.metrics import Exposition
from zeromon.fold.checkpoint import (
    checkpoint_of_state,
    decode_checkpoints,
    encode_checkpoints,
    restore_totals,
)
from zeromon.fold.collective_stats import OpTotals
from zeromon.fold.state import RankState, ScalarTotals
from zeromon.fold.summarize import summarize_rank
from zeromon.ring.buffer import NameKind, RingReader, RingWriter
from zeromon.ring.codes import Activity, Dtype, Flag, Kind, Op, Path as Path_, Phase, Scalar
from zeromon.ring.events import pack_head, pack_place
from zeromon.snapshot import RankSnapshot
from zeromon.storage.run_store import Store

CAPACITY = 1 << 10
CALLS = 20


class Rank:
    """Writes steps of 20 collectives to a small ring."""

    began_ns = 0
    """When the test began: no rank is silent."""

    def __init__(self, folder: Path, number: int) -> None:
        self.ring = RingWriter(
            folder / f"rank{number}.{number + 1}.ring", rank=number, capacity=CAPACITY
        )
        self.ring.name(NameKind.META, {"rank": number, "world_size": 2, "strategy": "fsdp2"})
        self.group = self.ring.name(NameKind.GROUP, {"label": "world", "size": 2, "ranks": [0, 1]})
        self.unit = self.ring.name(NameKind.UNIT, {"fqn": "layers.0"})
        self.steps = self.sequence = 0

    def write(self, steps: int) -> None:
        for _ in range(steps):
            self.steps += 1
            start = self.began_ns + self.steps * 100 * MS
            for n in range(CALLS):
                self.sequence += 1
                at, begin = pack_place(self.group, self.unit), start + n * MS
                issued, done = pack_head(Kind.ISSUED, Op.ALL_GATHER, Phase.FORWARD), pack_head(
                    Kind.DONE, Op.ALL_GATHER, Phase.FORWARD, Flag.SPAN_KNOWN
                )  # fmt: skip
                self.ring.write(begin, issued, at, 1 << n, self.sequence, Dtype.BFLOAT16, 0)
                self.ring.write(begin + MS // 2, done, at, 1 << n, begin, MS // 4, self.sequence)
            self.ring.write(start + 30 * MS, pack_head(Kind.PHASE, 0, Phase.BACKWARD), 0, start, 0, 0, 0)
            self.ring.write(start + 99 * MS, pack_head(Kind.STEP), 0, self.steps, start, 1, 0)


@pytest.fixture
def node(tmp_path: Path) -> tuple[Path, list[Rank]]:
    Rank.began_ns = time.monotonic_ns()
    folder = tmp_path / "rings" / "train"
    folder.mkdir(parents=True, mode=0o700)
    (folder / "run.json").write_text('{"started": 1000.0}')
    return tmp_path, [Rank(folder, n) for n in range(2)]


def started(root: Path) -> Collector:
    """A collector as it is started, the first time or again."""
    return Collector(root / "rings", Store(root / "store"))


def counters(collector: Collector) -> dict[tuple[str, str], float]:
    """Every counter that /metrics shows of rank 0, and each bucket."""
    _, text = Exposition().answer(collector.view, collector.health, "", "")
    return {
        (s.name, json.dumps(s.labels, sort_keys=True)): s.value
        for family in text_string_to_metric_families(text.decode())
        if family.type in ("counter", "histogram") and not family.name.startswith("zeromon_collector_")
        for s in family.samples
        if not s.name.startswith(("zeromon_host_", "zeromon_process_", "zeromon_disk_"))
    }


def follow(collector: Collector, ranks: list[Rank], steps: int, ticks: int) -> None:
    for _ in range(ticks):
        for rank in ranks:
            rank.write(steps)
        collector.tick()


def test_counters_are_those_of_a_collector_that_was_never_killed(node: tuple[Path, list[Rank]]) -> None:
    """The ring holds 24 steps of 75; whenever it is killed, every total is the same."""
    root, ranks = node
    first = started(root)
    follow(first, ranks, 5, 13)  # kept in ticks 1, 6 and 11
    before = counters(first)
    second = started(root)
    second.tick()
    assert counters(second) == before
    follow(first, ranks, 5, 2)
    second.tick()
    assert counters(second) == counters(first)
    (run,) = second.view
    assert [rank.steps.watched_steps for rank in run.ranks] == [75, 75]
    assert [rank.agent.dropped for rank in run.ranks] == [0, 0]
    assert [c.count for c in run.ranks[0].communication.collectives] == [75 * CALLS]
    assert not any(f.rule == "events_dropped" for f in run.findings)


def test_what_nobody_has_read_is_lost_and_said(node: tuple[Path, list[Rank]]) -> None:
    """No collector for longer than the ring reaches back: what is missing is counted as lost."""
    root, ranks = node
    first = started(root)
    follow(first, ranks, 10, 1)
    ranks[0].write(60)
    second = started(root)
    second.tick()
    rank = second.view[0].ranks[0]
    records = 2 * CALLS + 2
    seen = (
        rank.communication.collectives[0].count * 2 + rank.steps.watched_steps
    )  # about: a step's two marks are not told apart
    assert rank.agent.dropped > 0
    assert rank.agent.dropped + CAPACITY >= 60 * records > rank.agent.dropped
    assert 10 * CALLS < rank.communication.collectives[0].count < 70 * CALLS
    assert seen < 70 * records
    (other,) = (r for r in second.view[0].ranks if r.rank == 1)
    assert (other.agent.dropped, other.communication.collectives[0].count) == (0, 10 * CALLS)


def test_a_counter_never_goes_back(node: tuple[Path, list[Rank]]) -> None:
    """Killed after every single tick."""
    root, ranks = node
    last: dict[tuple[str, str], float] = {}
    for _ in range(12):
        collector = started(root)
        follow(collector, ranks, 5, 1)
        now = counters(collector)
        assert all(now[key] >= value for key, value in last.items())
        last = now
    assert last["zeromon_steps_total", '{"rank": "0", "run": "train"}'] == 60


@pytest.mark.parametrize("broken", (b"", b"\xff\x00", b"\x81\xa1a\x01", encode_checkpoints({})))
def test_totals_that_cannot_be_read_are_none(node: tuple[Path, list[Rank]], broken: bytes) -> None:
    """Then only the rings are known, as ever."""
    root, ranks = node
    (root / "rings" / "train" / TOTALS).write_bytes(broken)
    collector = started(root)
    follow(collector, ranks, 5, 1)
    assert [rank.steps.watched_steps for rank in collector.view[0].ranks] == [5, 5]


def test_totals_of_another_version_are_none() -> None:
    """One whose lists are longer would not fit."""
    good = checkpoint_of_state(RankState(), 1)
    assert decode_checkpoints(encode_checkpoints({"r": good})) == {"r": good}
    longer = msgspec.structs.replace(good, phase_ns=[*good.phase_ns, 0])
    assert decode_checkpoints(encode_checkpoints({"r": longer})) == {}


def test_totals_of_a_ring_of_the_same_name_are_not_taken_over(node: tuple[Path, list[Rank]]) -> None:
    """A pid comes again, and with it the name of a ring."""
    root, ranks = node
    follow(started(root), ranks, 20, 1)
    folder = root / "rings" / "train"
    (folder / "rank0.1.ring").unlink()
    again = Rank(folder, 0)
    again.write(3)
    collector = started(root)
    collector.tick()
    found = {
        rank.rank: (rank.steps.watched_steps, rank.agent.dropped) for rank in collector.view[0].ranks
    }
    assert found == {0: (3, 0), 1: (20, 0)}


def test_totals_are_private_and_go_with_the_rings(node: tuple[Path, list[Rank]]) -> None:
    """Nothing of ours is left where a run was."""
    root, ranks = node
    collector = started(root)
    follow(collector, ranks, 2, 1)
    folder = root / "rings" / "train"
    assert (folder / TOTALS).stat().st_mode & 0o777 == 0o600
    collector._runs["train"].keep(collector.store)
    assert not folder.exists()


def events(first: int, last: int) -> list[Any]:
    found: list[Any] = []
    for n in range(first, last):
        begin = n * 100.0
        found += collective(begin + 5, begin + 45, 10, sequence=n, unit=7, nbytes=100 * n)
        found += [span(Phase.FORWARD, begin, begin + 30), span(Phase.BACKWARD, begin + 30, begin + 80),
                  host(begin + 99, 1 << 30), step(n, begin, begin + 100)]  # fmt: skip
    return found


TOTAL = (
    "steps.last_step", "steps.watched_steps", "steps.total_seconds", "steps.duration_buckets",
    "steps.micro_steps", "steps.skipped_steps", "steps.phase_seconds", "communication.untimed",
    "communication.unattributed", "communication.units", "communication.sizes",
    "communication.gathers", "memory.transfers", "agent.errors", "agent.dropped", "status.started_ns",
)  # fmt: skip


def only_totals(snapshot: RankSnapshot) -> dict[str, Any]:
    rows = [replace(c, busbw_bytes_per_second=None) for c in snapshot.communication.collectives]
    return {name: attrgetter(name)(snapshot) for name in TOTAL} | {"collectives": rows}


@pytest.mark.parametrize("kept", (2, 20, 59))
@pytest.mark.parametrize("held", (1, 15, 40))
def test_totals_taken_over_are_those_of_one_long_fold(kept: int, held: int) -> None:
    """Kept after *kept* steps, while the ring goes back by *held* of them."""
    whole = folded(events(1, 60))
    earlier = decode_checkpoints(
        encode_checkpoints({"r": checkpoint_of_state(folded(events(1, kept)), 1)})
    )["r"]
    again = folded(events(max(1, kept - held), kept), state())
    restore_totals(again, earlier)
    folded(events(kept, 60), again)
    snapshots = [summarize_rank(one) for one in (again, whole)]
    assert only_totals(snapshots[0]) == only_totals(snapshots[1])


def test_totals_with_what_is_not_known_are_read_again() -> None:
    """Also where the fold is compiled, which keeps no types but those of machine numbers."""
    made = state()
    made.engines[1].steps = 3
    made.transfers[Path_(1)].nbytes = 5
    made.scalars[Scalar.LOSS] = ScalarTotals(value=1.5)
    made.activities[Phase.CHECKPOINT, Activity.SAVE, False].count = 2
    read = decode_checkpoints(encode_checkpoints({"rank": checkpoint_of_state(made, 1)}))["rank"]
    assert (read.engines[1].steps, read.engines[1].precision) == (3, None)
    assert (read.transfers[Path_(1)].nbytes, read.transfers[Path_(1)].step_bytes) == (5, None)
    activity = read.activities[Phase.CHECKPOINT, Activity.SAVE, False]
    assert (read.scalars[Scalar.LOSS].value, activity.count) == (1.5, 2)
    assert read.ledger == made.ledger


def test_rows_of_traffic_go_on_counting_where_they_did() -> None:
    """They hold on to the totals of their operation, which are set in place."""
    known = checkpoint_of_state(folded(events(1, 30)), 1)
    again = folded(events(20, 30), state())
    restore_totals(again, decode_checkpoints(encode_checkpoints({"r": known}))["r"])
    assert all(again.ops[op, group] is row.totals for (op, group, *_), row in again.traffic.items())
    assert {field.name for field in fields(OpTotals)} >= {"count", "nbytes", "exposed_ns"}


def test_a_reader_that_goes_on_has_lost_only_what_it_did_not_know(tmp_path: Path) -> None:
    ring = RingWriter(tmp_path / "r.ring", rank=0, capacity=64)
    for n in range(1000):
        ring.write(n, 0, 0, 0, 0, 0, 0)
    for known, least, most in ((1, 900, 999), (900, 0, 99), (1001, 0, 0)):
        reader = RingReader(tmp_path / "r.ring")
        reader.known = known
        reader.read()
        assert least <= reader.lost <= most
        assert reader.position == 1001


def test_a_group_that_is_named_after_its_first_calls_has_its_size(tmp_path: Path) -> None:
    """A poll reads the names before the records, so a call may come before the name of its group."""
    path = tmp_path / "rank0.1.ring"
    ring = RingWriter(path, rank=0, capacity=CAPACITY)
    issued, done = pack_head(Kind.ISSUED, Op.ALL_REDUCE), pack_head(Kind.DONE, Op.ALL_REDUCE)
    follower = RankFollower(path)
    for number in (1, 2):
        ring.write(number * MS, issued, pack_place(1), 1 << 20, number, Dtype.BFLOAT16, 0)
        ring.write(number * MS + 9, done, pack_place(1), 1 << 20, number * MS, 5, number)
        follower.poll()
        assert ring.name(NameKind.GROUP, {"label": "world", "size": 2, "ranks": [0, 1]}) == number
    (row,) = follower.state.traffic.values()
    assert (row.calls, row.size, row.bus_factor) == (2, 2, 1.0)
