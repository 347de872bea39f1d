"""Restarts by the launcher: one run, with what each attempt did and how it ended."""

from __future__ import annotations

import json
import os
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from builders import rank, run

from zeromon.collector.attempts import attempts_of, earlier, numbers, present
from zeromon.collector.daemon import Collector
from zeromon.collector.rank import RankFollower
from zeromon.diagnosis.engine import advise
from zeromon.export.prometheus.families import collect
from zeromon.probes.process import ProcessWatch
from zeromon.readout.text import run_state
from zeromon.report.render import render
from zeromon.ring.buffer import NameKind, RingWriter
from zeromon.ring.events import ExitKind, Kind, head
from zeromon.snapshot import Attempt, Death, DeathRole
from zeromon.storage.run_store import Store
from zeromon.storage.step_history import steps as history_of

GONE = 2**22 + 5
"""No process has this number."""


def process(
    folder: Path, number: int, steps: int, *, pid: int = GONE, error: str = "", **meta: Any
) -> RingWriter:
    """The ring of a process that took *steps* steps; with an *error* it raised that."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    name = f"rank{number}.{pid}.{len(list(folder.glob('*.ring')))}.ring"
    ring = RingWriter(folder / name, rank=number, pid=pid, capacity=1024)
    ring.name(NameKind.META, {"strategy": "ddp", "world_size": 2, **meta})
    for step in range(1, steps + 1):
        now = time.monotonic_ns()
        ring.write(now, head(Kind.STEP), 0, step, now - 1000, 1, 0)
        time.sleep(1e-4)
    if error:
        text = ring.name(NameKind.TEXT, {"text": error})
        ring.write(time.monotonic_ns(), head(Kind.EXIT, ExitKind.EXCEPTION), 0, text, 0, 0, 0)
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
    assert [(r.rank, r.steps, r.failed) for r in snapshot.ranks] == [(0, 5, False), (1, 5, False)]
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
    attempts = attempts_of(followers(tmp_path))
    assert [[f.state.rank for f in members] for members in attempts] == [[0, 1, 2], [3, 0]]
    assert [f.state.rank for f in present(attempts)] == [0, 3]
    assert numbers(attempts) == [1, 4]
    assert earlier(attempts)[0].lost_steps is None  # no optimizer counts


def test_a_rank_that_goes_on_while_another_starts_again_stays(tmp_path: Path) -> None:
    process(tmp_path, 0, 3, pid=os.getpid())
    process(tmp_path, 1, 3)
    process(tmp_path, 1, 1, pid=GONE - 1)
    assert [f.state.rank for f in present(attempts_of(followers(tmp_path)))] == [0, 1]


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
    assert finding.text.endswith(f"lost in all: {said}")
    text = render(snapshot)
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
    one, other = (earlier(attempts_of(followers(tmp_path))) for _ in range(2))
    assert one == other
    assert not ProcessWatch(GONE).alive()


def test_a_process_that_was_attached_twice_has_one_attempt(tmp_path: Path) -> None:
    """Each time has a ring of its own; the newest one counts."""
    process(tmp_path, 0, 3, pid=os.getpid())
    process(tmp_path, 0, 1, pid=os.getpid())
    (members,) = attempts_of(followers(tmp_path))
    assert [one.state.steps for one in members] == [3, 1]
    assert [one.state.steps for one in present([members])] == [1]
