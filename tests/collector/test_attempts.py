"""Restarts by the launcher: one run, with what each attempt did and how it ended."""

from __future__ import annotations

import json
import os
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from builders import rank, run
from by_client import collect

from zeromon.collector.attempts import (
    attempt_numbers,
    current_followers,
    earlier_attempts,
    group_by_attempt,
)
from zeromon.collector.daemon import Collector
from zeromon.collector.rank import RankFollower
from zeromon.collector.run import RunFollower, judge_rank_silences, snapshot_of_folder
from zeromon.diagnosis.engine import advise
from zeromon.fold.ledger import ledger_totals
from zeromon.probes.devices import Devices
from zeromon.probes.process import ProcessWatch
from zeromon.readout.ledger import job_ledger, lost_steps
from zeromon.readout.report import render_run
from zeromon.readout.text import run_state
from zeromon.ring.buffer import NameKind, RingWriter
from zeromon.ring.codes import ExitKind, Kind
from zeromon.ring.events import pack_head
from zeromon.snapshot.ledger import Cause
from zeromon.snapshot.run import Attempt, Death, DeathRole
from zeromon.storage.run_store import Store
from zeromon.storage.step_history.queries import frame_of_steps as history_of

GONE = 2**22 + 5
"""No process has this number."""


def process(
    folder: Path, number: int, steps: int, *, pid: int = GONE, error: str = "",
    finished: bool = False, **meta: Any,
) -> RingWriter:  # fmt: skip
    """The ring of a process that took *steps* steps; with an *error* it raised that."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    name = f"rank{number}.{pid}.{len(list(folder.glob('*.ring')))}.ring"
    ring = RingWriter(folder / name, rank=number, pid=pid, capacity=1024)
    ring.name(NameKind.META, {"strategy": "ddp", "world_size": 2, **meta})
    last = time.monotonic_ns()
    ring.write(last, pack_head(Kind.START), 0, meta.get("process_start_ns", last), 0, 0, 0)
    for step in range(1, steps + 1):
        now = time.monotonic_ns()
        ring.write(now, pack_head(Kind.STEP), 0, step, last, 1, 0)
        time.sleep(1e-4)
        last = now
    if finished:
        ring.write(time.monotonic_ns(), pack_head(Kind.EXIT, ExitKind.CLEAN), 0, 0, 0, 0, 0)
    if error:
        text = ring.name(NameKind.TEXT, {"text": error})
        ring.write(time.monotonic_ns(), pack_head(Kind.EXIT, ExitKind.EXCEPTION), 0, text, 0, 0, 0)
    return ring


def followers(folder: Path) -> list[RankFollower]:
    found = [RankFollower(path) for path in folder.glob("*.ring")]
    for one in found:
        one.poll()
    return found


PEER = "RuntimeError: Connection closed by peer"


def test_attempts_belong_to_one_run(tmp_path: Path) -> None:
    """Two attempts that failed and one that runs: deaths, steps, lost steps, and the whole history."""
    folder = tmp_path / "rings" / "el"
    process(folder, 0, 25, error=PEER, restarts=0, resumed_step=0)
    process(folder, 1, 24, error="ValueError: boom", restarts=0, resumed_step=0)
    process(folder, 0, 13, restarts=1, resumed_step=20)
    process(folder, 1, 13, error=PEER, restarts=1, resumed_step=20)
    process(folder, 1, 5, pid=os.getpid(), restarts=2, resumed_step=30)
    process(folder, 0, 5, pid=os.getpid(), restarts=2, resumed_step=30)
    facts = {"pid": os.getpid(), "started": time.time(), "mono_ns": time.monotonic_ns()}
    (folder / "run.json").write_text(json.dumps(facts))
    made = Collector(tmp_path / "rings", Store(tmp_path / "store"))
    made.tick()
    (snapshot,) = made.view
    assert [(r.rank, r.steps.watched_steps, r.status.failed) for r in snapshot.ranks] == [
        (0, 5, False),
        (1, 5, False),
    ]
    first, second = snapshot.attempts
    assert (first.number, first.steps, first.resumed_step, first.lost_steps) == (1, 25, 0, 5)
    assert [(d.rank, d.exception, d.role) for d in first.deaths] == [
        (1, "ValueError: boom", "culprit"), (0, PEER, "victim"),
    ]  # fmt: skip
    assert (second.number, second.steps, second.resumed_step, second.lost_steps) == (2, 13, 20, 3)
    assert second.deaths[0].rank == 0 and "without a final record" in second.deaths[0].ended
    assert first.started_wall <= first.ended_wall <= second.ended_wall
    assert len(history_of(made.store.history("el"))) == 25 + 13 + 4  # the newest step may grow


def test_fewer_ranks_and_other_numbers_are_one_attempt(tmp_path: Path) -> None:
    """A rank that is not started again is no failed rank of the run that goes on."""
    for number in (0, 1, 2):
        process(tmp_path, number, 3, restarts=0)
    process(tmp_path, 3, 2, restarts=3)
    process(tmp_path, 0, 2, restarts=3)
    attempts = group_by_attempt(followers(tmp_path))
    assert [[f.state.rank for f in members] for members in attempts] == [[0, 1, 2], [3, 0]]
    assert [f.state.rank for f in current_followers(attempts)] == [0, 3]
    assert attempt_numbers(attempts) == [1, 4]
    assert earlier_attempts(attempts)[0].lost_steps is None  # no optimizer counts


def test_a_rank_that_goes_on_while_another_starts_again_stays(tmp_path: Path) -> None:
    process(tmp_path, 0, 3, pid=os.getpid())
    process(tmp_path, 1, 3)
    process(tmp_path, 1, 1, pid=GONE - 1)
    assert [f.state.rank for f in current_followers(group_by_attempt(followers(tmp_path)))] == [0, 1]


DIED = Death(rank=1, ended="exception", exception="ValueError: boom", role=DeathRole.CULPRIT)
ATTEMPT = Attempt(
    number=1, started_wall=10.0, ended_wall=40.0, steps=25, resumed_step=0, lost_steps=5,
    deaths=(DIED, replace(DIED, rank=0, exception=PEER, role=DeathRole.VICTIM)),
)  # fmt: skip


@pytest.mark.parametrize(("lost", "said"), [(5, "5"), (None, "n/a")])
def test_every_view_tells_of_a_restart(lost: int | None, said: str) -> None:
    """Verdict, report, finding and metric; what is not known is n/a, with the reason."""
    snapshot = run(rank(0), attempts=(replace(ATTEMPT, lost_steps=lost),), attempt=3)
    assert run_state(snapshot) == "running, step 20, attempt 3"
    (finding,) = [f for f in advise(snapshot) if f.rule == "restarted"]
    assert finding.severity == "warning"
    assert "after 25 steps: rank 1, exception, ValueError: boom" in finding.text
    assert finding.text.endswith(f"total steps lost: {said}")
    text = render_run(snapshot)
    assert "attempt 1 ended: rank 1, exception, ValueError: boom" in text
    assert PEER not in text
    assert "attempt 2 ended before a rank reported" in text
    assert ("keeps no count" in text) == (lost is None)
    values = {s.name: s.value for family in collect((snapshot,)) for s in family.samples}
    assert values["zeromon_restarts_total"] == 2
    assert not [f for f in advise(run(rank(0))) if f.rule == "restarted"]


def test_what_is_known_of_a_dead_process_survives_the_collector(tmp_path: Path) -> None:
    """Another collector reads the rings of all attempts again."""
    process(tmp_path, 0, 25, error="ValueError: boom", restarts=0)
    process(tmp_path, 0, 5, restarts=1)
    one, other = (earlier_attempts(group_by_attempt(followers(tmp_path))) for _ in range(2))
    assert one == other
    assert not ProcessWatch(GONE).alive()


def test_a_process_that_was_attached_twice_has_one_attempt(tmp_path: Path) -> None:
    """Each time has a ring of its own; the newest one counts."""
    process(tmp_path, 0, 3, pid=os.getpid())
    process(tmp_path, 0, 1, pid=os.getpid())
    (members,) = group_by_attempt(followers(tmp_path))
    assert [one.state.steps for one in members] == [3, 1]
    assert [one.state.steps for one in current_followers([members])] == [1]


def test_a_dead_run_with_a_broken_ring_is_over_without_a_collector_too(tmp_path: Path) -> None:
    process(tmp_path, 0, 3)
    (tmp_path / "rank1.1.ring").write_bytes(b"junk")
    shown = snapshot_of_folder(tmp_path)
    assert shown.ended and shown.unread == (1,)


def test_jobs_one_after_another_are_no_restarts(tmp_path: Path) -> None:
    """A rank that finished did not fail: what follows it in the same run is another job."""
    folder = tmp_path / "rings" / "jobs"
    launched = time.monotonic_ns()
    for pid, steps in ((GONE, 4), (GONE + 1, 6)):
        for number in (0, 1):
            began = time.monotonic_ns()
            process(folder, number, steps, pid=pid, finished=True, process_start_ns=began)
    for number in (0, 1):
        process(folder, number, 5, pid=os.getpid(), process_start_ns=time.monotonic_ns())
    facts = {"pid": os.getpid(), "started": time.time(), "mono_ns": launched}
    (folder / "run.json").write_text(json.dumps(facts))
    made = Collector(tmp_path / "rings", Store(tmp_path / "store"))
    made.tick()
    (snapshot,) = made.view
    assert [(one.finished, one.steps, one.lost_steps) for one in snapshot.attempts] == [
        (True, 4, 0), (True, 6, 0),
    ]  # fmt: skip
    assert snapshot.attempt == 1 and "attempt" not in run_state(snapshot)
    assert not [f for f in advise(snapshot) if f.rule == "restarted"]
    whole = job_ledger([snapshot])
    assert whole.attempts == 1
    assert not {Cause.DEAD, Cause.LOST} & {row.cause for row in whole.rows}
    lasted = (snapshot.taken_ns - launched) / 1e9
    assert whole.rank_seconds == pytest.approx(2 * lasted, rel=0.01)
    counted = sum(sum(rank.ledger.totals.values()) for rank in snapshot.ranks)
    assert 0 < counted <= whole.rank_seconds


def test_the_ledger_of_all_attempts_is_the_time_since_the_launch_times_the_ranks(tmp_path: Path) -> None:
    """With a launcher that needs a while, an attempt that failed, and one that goes on."""
    folder = tmp_path / "rings" / "sum"
    launched = time.monotonic_ns()
    time.sleep(0.05)
    for number in (0, 1):
        process(folder, number, 25, error="ValueError: x", process_start_ns=time.monotonic_ns())
    time.sleep(0.05)
    for number in (0, 1):
        process(folder, number, 5, pid=os.getpid(), restarts=1, process_start_ns=time.monotonic_ns())
    facts = {"pid": os.getpid(), "started": time.time(), "mono_ns": launched}
    (folder / "run.json").write_text(json.dumps(facts))
    made = Collector(tmp_path / "rings", Store(tmp_path / "store"))
    made.tick()
    (snapshot,) = made.view
    lasted = (snapshot.taken_ns - launched) / 1e9
    seconds = Counter[Cause]()
    for row in job_ledger([snapshot]).rows:
        seconds[row.cause] += row.seconds
    assert sum(seconds.values()) == pytest.approx(2 * lasted, rel=1e-6)
    assert seconds[Cause.DEAD] > 0.1 and seconds[Cause.SET_UP] > 0.1


def test_a_job_that_begins_from_scratch_loses_every_step_of_the_run_before() -> None:
    """Its first attempt resumed at step 0, its next one at a checkpoint of its own."""
    first = run(rank(0, resumed_step=0), ended=True)
    assert first.ranks[0].steps.watched_steps == 20
    later = run(rank(0, resumed_step=18), attempts=(ATTEMPT,), started_wall=2000.0)
    assert lost_steps(first, later) == 20
    assert lost_steps(first, replace(later, attempts=())) == 2


def test_a_stall_is_in_the_counter_while_it_lasts(tmp_path: Path) -> None:
    """And the ledger's other causes do not grow meanwhile."""
    rings = [process(tmp_path / "r", number, 3, pid=os.getpid()) for number in (0, 1)]
    for ring in rings:
        ring.name(NameKind.META, {"stack": ["train.py:7 in <module>"]})
    (tmp_path / "r" / "run.json").write_text("{}")
    run_ = RunFollower(tmp_path / "r")
    run_.poll()
    seen = run_.snapshot(Devices())
    later = replace(seen, taken_ns=seen.taken_ns + 60_000_000_000)
    judge_rank_silences(run_.newest(), later)
    for follower in run_.newest():
        silence = follower.state.silence
        assert silence is not None
        assert (silence.cause, silence.since_ns) == (Cause.STALL, follower.state.progress_ns)
        counted = ledger_totals(follower.state)["stall"]
        assert counted == pytest.approx((later.taken_ns - silence.since_ns) / 1e9)
