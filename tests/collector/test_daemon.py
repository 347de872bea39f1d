"""The collector: rings, locks, and what it leaves alone in folders of users."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from builders import rank, run

from zeromon.base.errors import HistoryError
from zeromon.collector import collector_process, run as collector_run
from zeromon.collector.daemon import Collector
from zeromon.collector.rank import RankFollower
from zeromon.collector.run import RETRY_NS, RunFollower
from zeromon.fold.checkpoint import Checkpoint
from zeromon.fold.ledger import Observed
from zeromon.fold.state import RankState
from zeromon.fold.summarize import summarize_rank
from zeromon.probes import process
from zeromon.probes.devices import Devices
from zeromon.probes.process import ProcessWatch
from zeromon.readout.verdict import Health, judge_run
from zeromon.ring import paths
from zeromon.ring.buffer import NameKind, RingWriter
from zeromon.ring.codes import ExitKind, Kind
from zeromon.ring.events import pack_head
from zeromon.ring.files import try_lock_file
from zeromon.snapshot import RankSnapshot, RunSnapshot
from zeromon.storage import snapshot_log
from zeromon.storage.run_store import Store


def ring_in(folder: Path, number: int = 0, capacity: int = 1024) -> RingWriter:
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    return RingWriter(folder / f"rank{number}.{os.getpid()}.ring", rank=number, capacity=capacity)


def test_stale_rings_of_a_dead_run_are_recorded_and_cleared_away(tmp_path: Path) -> None:
    """A run whose collector died with it: the next collector writes its record."""
    root = tmp_path / "rings"
    program = (
        "import sys\nfrom pathlib import Path\nfrom zeromon.ring.buffer import RingWriter\n"
        "w = RingWriter(Path(sys.argv[1]), rank=0, capacity=1024)\n"
        "w.write(1, 4, 0, 1, 2, 0, 0)\nw.write(9, 5, 0, 1, 0, 1, 0)\n"
    )
    (root / "old").mkdir(parents=True)
    subprocess.run([sys.executable, "-c", program, str(root / "old" / "rank0.1.ring")], check=True)
    made = Collector(root, Store(tmp_path / "store"))
    for _ in range(6):
        made.tick()
    assert not (root / "old").exists()
    kept = Store(tmp_path / "store").load("old")
    assert kept.ended
    assert kept.ranks[0].steps.watched_steps == 1
    assert "killed" in kept.ranks[0].status.ended or kept.ranks[0].status.ended == "ended"
    assert len(list((tmp_path / "store" / "runs" / "old").glob("*.ring.gz"))) == 1


def test_a_collector_that_is_stopped_with_its_run_still_writes_how_that_ended(tmp_path: Path) -> None:
    """A container sends SIGTERM to all its processes at once."""
    root, store = tmp_path / "rings", tmp_path / "store"
    (root / "r").mkdir(parents=True)
    program = (
        "import sys, time\nfrom pathlib import Path\nfrom zeromon.ring.buffer import RingWriter\n"
        "w = RingWriter(Path(sys.argv[1]), rank=0, capacity=1024)\n"
        "w.write(1, 4, 0, 1, 2, 0, 0)\ntime.sleep(60)\n"
    )
    trains = subprocess.Popen([sys.executable, "-c", program, str(root / "r" / "rank0.1.ring")])
    environment = os.environ | {"ZEROMON_DIR": str(root), "ZEROMON_STORE": str(store)}
    follows = subprocess.Popen([sys.executable, "-m", "zeromon.collector"], env=environment)
    try:
        for _ in range(300):
            if (store / "runs" / "r" / "snapshot.json").exists():
                break
            time.sleep(0.1)
        assert not Store(store).load("r").ended
        for process in (trains, follows):
            process.terminate()
        trains.wait(30)
        assert follows.wait(30) == 0
    finally:
        trains.kill()
        follows.kill()
    assert Store(store).load("r").ended


def test_folders_of_the_user_are_never_touched(tmp_path: Path) -> None:
    """ZEROMON_DIR may be a folder with other things in it, also beside our rings."""
    root = tmp_path / "scratch"
    (root / "checkpoints").mkdir(parents=True)
    (root / "checkpoints" / "model.pt").write_text("dear")
    ring_in(root / "run")
    (root / "run" / "notes.txt").write_text("dear, too")
    made = Collector(root, Store(tmp_path / "store"))
    made.tick()
    made._runs["run"].ranks[next(iter(made._runs["run"].ranks))].process = ProcessWatch(2**22 + 5)
    for _ in range(6):
        made.tick()
    assert made.view[0].ended
    assert (root / "checkpoints" / "model.pt").read_text() == "dear"
    assert [p.name for p in (root / "run").iterdir()] == ["notes.txt"]


def test_a_write_that_a_kill_cut_short_leaves_nothing_of_the_run(tmp_path: Path) -> None:
    root = tmp_path / "rings"
    ring_in(root / "run").close()
    for name in ("nodes.json", "nodes.note", "try.json", "try.words", "trace.json", "run.json"):
        (root / "run" / f".{name}.{2**22 + 5}").write_text("{")
    made = Collector(root, Store(tmp_path / "store"))
    made.tick()
    made._runs["run"].ranks[next(iter(made._runs["run"].ranks))].process = ProcessWatch(2**22 + 5)
    for _ in range(6):
        made.tick()
    assert made.view[0].ended
    assert not (root / "run").exists()


@pytest.mark.parametrize(
    "facts", ['{"started": "x", "pid": 1}', '{"command": 5}', '{"pid": 1e99}', '{"pid": "z"}', "[]"]
)
def test_a_hostile_run_file_does_not_stop_the_collector(tmp_path: Path, facts: str) -> None:
    """The other run is shown."""
    ring_in(tmp_path / "rings" / "good")
    ring_in(tmp_path / "rings" / "bad")
    (tmp_path / "rings" / "bad" / "run.json").write_text(facts)
    (tmp_path / "rings" / "bad" / "rank9.1.ring").mkdir()
    made = Collector(tmp_path / "rings", Store(tmp_path / "store"))
    for _ in range(3):
        made.tick()
    assert "good" in [r.run for r in made.view]


def test_a_broken_ring_does_not_hide_the_others(tmp_path: Path) -> None:
    """It is named in the run's note."""
    writer = ring_in(tmp_path / "rings" / "a", 1)
    writer.write(5, pack_head(Kind.STEP), 0, 1, 0, 1, 0)
    (tmp_path / "rings" / "a" / "rank0.1.ring").write_bytes(b"junk")
    made = Collector(tmp_path / "rings", Store(tmp_path / "store"))
    made.tick()
    (snapshot,) = made.view
    assert [r.rank for r in snapshot.ranks] == [1]
    assert "not a ring" in snapshot.note


@pytest.mark.parametrize(
    ("kind", "payload"),
    [
        (NameKind.GROUP, {"label": [], "ranks": [[1]], "nodes": {}}),
        (NameKind.GROUP, {"label": "w", "ranks": 5, "nodes": "x"}),
        (NameKind.GROUP, {"label": "w", "ranks": [0, "x"], "dims": 7}),
        (NameKind.META, {"world_size": "x", "local_world_size": [], "device_uuid": {}}),
        (NameKind.META, {"models": 5, "nodes": "x", "started": "y", "pipeline": [3]}),
        (NameKind.UNIT, {"fqn": {}, "nbytes": "x"}),
    ],
)
def test_a_hostile_ring_does_not_hide_the_healthy_ranks(
    tmp_path: Path, kind: NameKind, payload: dict[str, object]
) -> None:
    """Whatever it says in its names: it is shown, or left out and named."""
    root = tmp_path / "rings"
    good, evil = ring_in(root / "a", 1), ring_in(root / "a", 0)
    for writer in (good, evil):
        number = writer.name(kind if writer is evil else NameKind.UNIT, payload)
        for step in (1, 2):
            writer.write(step * 1000, pack_head(Kind.ISSUED, 3, 2), number, number, 64, step, 0)
            writer.write(step * 1000 + 5, pack_head(Kind.DONE, 3, 2), number, number, 64, 1, 2)
            writer.write(step * 1000 + 9, pack_head(Kind.STEP), 0, 0, 0, step, 0)
    made = Collector(root, Store(tmp_path / "store"))
    for _ in range(3):
        made.tick()
    (snapshot,) = made.view
    ranks = [rank.rank for rank in snapshot.ranks]
    assert 1 in ranks
    assert 0 in ranks or "is left out" in snapshot.note


def test_a_figure_that_fails_once_loses_no_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The ring is left out, and followed again with its totals, here and by the next collector."""
    folder, monotonic_ns = tmp_path / "rings" / "run", time.monotonic_ns
    ring, other = ring_in(folder, capacity=64), ring_in(folder, 1)
    made = Collector(tmp_path / "rings", Store(tmp_path / "store"))

    def rank_0() -> list[tuple[int, int]]:
        made.tick()
        return [
            (rank.steps.watched_steps, rank.agent.dropped)
            for rank in made.view[0].ranks
            if rank.rank == 0
        ]

    for step in range(1, 101):  # the ring is overwritten
        ring.write(step * 1000, pack_head(Kind.STEP), 0, 0, 0, step, 0)
        if step % 10 == 0:
            assert rank_0() == [(step, 0)]

    def fails(state: RankState, observed: Observed) -> RankSnapshot:
        return summarize_rank(state, observed) if state.rank else 1 / 0  # type: ignore[return-value]

    with monkeypatch.context() as broken:
        broken.setattr(collector_run, "summarize_rank", fails)
        assert rank_0() == [] and "ZeroDivisionError" in made.view[0].note
        for _ in range(10):  # the totals are saved
            assert rank_0() == []
    following = Collector(tmp_path / "rings", Store(tmp_path / "store"))
    for collector, later_ns in ((following, 0), (made, RETRY_NS)):
        made = collector
        monkeypatch.setattr(collector_run.time, "monotonic_ns", lambda: monotonic_ns() + later_ns)  # noqa: B023
        assert rank_0() == [(100, 0)] and not made.view[0].note
    ring.close()
    other.close()


def test_a_ring_that_cannot_be_opened_again_is_tried_later_with_its_totals(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was left out; its retry fails, as where the collector is out of file descriptors."""
    monotonic_ns, waited_ns = time.monotonic_ns, 0
    monkeypatch.setattr(collector_run.time, "monotonic_ns", lambda: monotonic_ns() + waited_ns)
    ring = ring_in(tmp_path / "run", capacity=64)
    followed = RunFollower(tmp_path / "run")
    for step in range(1, 101):  # the ring is overwritten
        ring.write(step * 1000, pack_head(Kind.STEP), 0, 0, 0, step, 0)
        if step % 10 == 0:
            followed.poll()
    with monkeypatch.context() as broken:
        broken.setattr(collector_run, "summarize_rank", lambda state, observed: 1 / 0)
        assert followed.set_aside_broken(Devices())
    waited_ns += RETRY_NS

    def refuses(path: Path, earlier: Checkpoint | None) -> RankFollower:
        raise OSError(errno.EMFILE, "Too many open files")

    with monkeypatch.context() as full:
        full.setattr(collector_run, "RankFollower", refuses)
        followed.poll()
        followed.save_rank_totals()
    assert "Too many open files" in followed.snapshot(Devices()).note
    waited_ns += RETRY_NS
    for following in (followed, RunFollower(tmp_path / "run")):  # and the next collector
        following.poll()
        (shown,) = following.snapshot(Devices()).ranks
        assert (shown.steps.watched_steps, shown.agent.dropped) == (100, 0)
    ring.close()


def test_a_run_that_cannot_be_followed_says_so_and_is_not_green(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ring = ring_in(tmp_path / "rings" / "run")
    ring_in(tmp_path / "rings" / "other")
    made = Collector(tmp_path / "rings", Store(tmp_path / "store"))
    made.tick()
    assert not any(one.note for one in made.view)
    follow = RunFollower.snapshot

    def fails(self: RunFollower, devices: Devices) -> RunSnapshot:
        if self.run == "run":
            raise IndexError("a bug")
        return follow(self, devices)

    monkeypatch.setattr(RunFollower, "snapshot", fails)
    for _ in range(2):
        made.tick()
        other, lost = made.view
        assert not other.note
        assert lost.note == "not followed any more: IndexError: a bug"
        assert judge_run(lost).health is Health.NOT_WATCHED
    assert Store(tmp_path / "store").load("run").note == lost.note
    ring.close()


def test_a_full_disk_keeps_the_rings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What cannot be stored is not deleted."""
    root = tmp_path / "rings"
    writer = ring_in(root / "a")
    writer.write(5, pack_head(Kind.EXIT, ExitKind.CLEAN), 0, 0, 0, 0, 0)
    made = Collector(root, Store(Path("/proc/no/such/place")))
    made.tick()
    for follower in made._runs["a"].ranks.values():
        follower.process = ProcessWatch(2**22 + 5)
    for _ in range(6):
        made.tick()
    assert made.view[0].ended
    assert list((root / "a").glob("*.ring"))


def test_the_collector_stays_until_the_views_have_seen_the_end(tmp_path: Path) -> None:
    """Somebody looked a moment ago: wait for them to look again."""
    now = [0.0]
    made = Collector(tmp_path, Store(tmp_path / "store"), clock=lambda: now[0])
    made.tick()
    now[0] = 2.0
    assert not made.may_end()  # too soon
    now[0] = 10.0
    assert made.may_end()  # nobody has ever looked
    made._runs["x"] = None  # type: ignore[assignment]
    made.was_read()
    del made._runs["x"]
    made._read_since_end = False
    now[0] = 20.0
    assert not made.may_end()
    made.was_read()
    assert made.may_end()


def test_a_collector_whose_first_tick_comes_late_stays_for_its_run(tmp_path: Path) -> None:
    """On a node that is busy with the start of a job, seconds pass before the first tick."""
    now = [0.0]
    made = Collector(tmp_path, Store(tmp_path / "store"), clock=lambda: now[0])
    now[0] = 100.0
    assert not made.may_end()
    made.tick()
    assert not made.may_end()
    now[0] = 110.0
    assert made.may_end()


def test_an_elastic_restart_shows_the_newest_process_of_a_rank(tmp_path: Path) -> None:
    """Two rings of one rank."""
    folder = tmp_path / "rings" / "a"
    first = ring_in(folder)
    first.name(NameKind.META, {"strategy": "old"})
    time.sleep(0.01)
    second = RingWriter(folder / "rank0.999.ring", rank=0, capacity=1024)
    second.name(NameKind.META, {"strategy": "new"})
    made = Collector(tmp_path / "rings", Store(tmp_path / "store"))
    made.tick()
    assert [r.strategy for r in made.view[0].ranks] == ["new"]


def test_a_run_waits_for_the_tasks_of_its_launcher(tmp_path: Path) -> None:
    """One `zeromon run` per rank, whose ranks take more than half a minute to start: one record."""
    folder = tmp_path / "rings" / "srun"
    folder.mkdir(parents=True)
    assert process.announce_task(folder)
    facts = {"run": "srun", "command": ["train.py"], "started": time.time() - 100, "tasks": 2}
    (folder / "run.json").write_text(json.dumps(facts))
    made = Collector(tmp_path / "rings", Store(tmp_path / "store"))
    made.tick()
    assert not made.view[0].ended
    gone = 2**22 + 5
    mine, other = (folder / f"task.{pid}.json" for pid in (os.getpid(), gone))
    other.write_text(json.dumps({"pid": gone, "mono_ns": time.monotonic_ns()}))
    follower = made._runs["srun"]
    follower._tasks._known[mine.name] = ProcessWatch(gone)
    made.tick()
    assert made.view[0].ended
    assert not folder.exists()


def test_tasks_that_have_not_started_are_waited_for(tmp_path: Path) -> None:
    """The first of two has failed before the second began."""
    folder = tmp_path / "rings" / "srun"
    folder.mkdir(parents=True)
    gone = {"pid": 2**22 + 5, "mono_ns": time.monotonic_ns()}
    (folder / "task.4194309.json").write_text(json.dumps(gone))
    facts = {"run": "srun", "command": ["train.py"], "started": time.time() - 60}
    for expected, ended in ((2, False), (1, True)):
        (folder / "run.json").write_text(json.dumps(facts | {"tasks": expected}))
        follower = RunFollower(folder)
        follower.poll()
        assert follower.ended == ended


def test_the_first_task_describes_the_run(tmp_path: Path) -> None:
    older = {"pid": os.getppid(), "mono_ns": time.monotonic_ns()}
    assert process.announce_task(tmp_path)
    (tmp_path / "task.1.json").write_text(json.dumps(older))
    assert not process.announce_task(tmp_path)
    process.withdraw_task(tmp_path)
    assert [path.name for path in tmp_path.glob(process.TASKS)] == ["task.1.json"]


def test_a_name_that_is_used_again_overwrites_no_record(tmp_path: Path) -> None:
    """`--name exp` twice: exp and exp-2; the same run after a restart of the collector: exp."""
    store = Store(tmp_path / "store")
    store.save(run(rank(0), run="exp", started_wall=1000.0))
    folder = tmp_path / "rings" / "exp"
    ring_in(folder)
    (folder / "run.json").write_text('{"started": 2000.0}')
    made = Collector(tmp_path / "rings", store)
    made.tick()
    assert [r.run for r in made.view] == ["exp-2"]
    (folder / "run.json").write_text('{"started": 1000.0}')
    again = Collector(tmp_path / "rings", store)
    again.tick()
    assert [r.run for r in again.view] == ["exp"]


def test_only_one_collector_holds_the_lock(tmp_path: Path) -> None:
    """The second one goes away at once, successfully."""
    held = try_lock_file(tmp_path / paths.LOCK)
    assert held is not None
    assert collector_process.serve_runs(tmp_path, "127.0.0.1", 0, "", strict_port=False) == 0
    os.close(held)


def test_an_ending_is_told_by_the_best_evidence(tmp_path: Path) -> None:
    """Exit status before goodbye, exception before both."""
    writer = ring_in(tmp_path)
    follower = RankFollower(writer.path)
    follower.poll()
    assert follower.ending() == ("", False)
    follower.process = ProcessWatch(2**22 + 5)
    follower.poll()
    assert follower.ending()[1]
    writer.write(5, pack_head(Kind.EXIT, ExitKind.CLEAN), 0, 0, 0, 0, 0)
    follower.poll()
    assert follower.ending() == ("ended", False)
    number = writer.name(NameKind.TEXT, {"text": "ValueError: x"})
    writer.write(6, pack_head(Kind.EXIT, ExitKind.EXCEPTION), 0, number, 0, 0, 0)
    follower.poll()
    assert follower.ending() == ("exception", True)
    assert summarize_rank(follower.state).status.exception == "ValueError: x"


# ---- devices ------------------------------------------------------------------------------------


def test_a_run_keeps_the_clock_that_it_began_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A wall clock that is set meanwhile changes neither its duration nor the order of its moments."""
    folder = tmp_path / "rings" / "r"
    ring_in(folder)
    facts = {"started": time.time() - 100, "mono_ns": time.monotonic_ns() - 100 * 10**9}
    (folder / "run.json").write_text(json.dumps(facts))
    made = Collector(tmp_path / "rings", Store(tmp_path / "store"))
    for shift in (0.0, 90_000.0, -180_000.0):
        real = time.time()
        monkeypatch.setattr(time, "time", lambda at=real + shift: at)
        made.tick()
        (snapshot,) = made.view
        assert 99 < snapshot.taken_wall - snapshot.started_wall < 160


def test_a_record_that_fails_at_the_end_of_a_run_is_in_its_last_snapshot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A short run has one moment only, and a full disk refuses that one."""

    def full(*_: object) -> None:
        raise HistoryError("cannot write moments: No space left on device")

    monkeypatch.setattr(snapshot_log.Writer, "append", full)
    writer = ring_in(tmp_path / "rings" / "r")
    writer.write(time.monotonic_ns(), pack_head(Kind.STEP), 0, 1, 2, 0, 0)
    writer.write(time.monotonic_ns(), pack_head(Kind.EXIT, ExitKind.CLEAN), 0, 0, 0, 0, 0)
    monkeypatch.setattr(RunFollower, "_is_over", lambda _: True)
    made = Collector(tmp_path / "rings", Store(tmp_path / "store"))
    made.tick()
    (snapshot,) = made.view
    assert "No space left" in snapshot.history_note
    assert "ZM009" in [finding.code for finding in snapshot.findings]
