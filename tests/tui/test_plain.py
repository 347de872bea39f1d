"""`zeromon attach --plain`: a run as lines."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from builders import changed, rank, run
from tui.snapshots import GIB, FixedSource, snapshot, steps

from zeromon.base.errors import RunNotFound, SourceError
from zeromon.collector import http
from zeromon.collector.http import start_http_server
from zeromon.snapshot import RunSnapshot
from zeromon.snapshot.rank import DETACHED
from zeromon.sources import live
from zeromon.sources.live import LiveRun, LiveSource
from zeromon.sources.replay import StoreSource, reopen_run_source
from zeromon.storage.run_store import Store
from zeromon.storage.snapshot_log import Past
from zeromon.tui.plain import lines_of_snapshot, step_line, write_until_ended


def at_step(step: int, **facts: object) -> RunSnapshot:
    """The run when its ranks had ended *step* steps."""
    made = snapshot(2)
    ranks = tuple(
        changed(
            r, recent=steps(r.rank, 160)[max(0, step - 50) : step], last_step=step, watched_steps=step
        )
        for r in made.ranks
    )
    return replace(made, ranks=ranks, taken_wall=1000.0 + step, **facts)  # type: ignore[arg-type]


class Script(FixedSource):
    """Gives one answer after the other, the last for ever."""

    def __init__(self, *answers: RunSnapshot | Exception) -> None:
        super().__init__(answers[-1])
        self.answers = list(answers)

    def latest(self) -> RunSnapshot:
        self.answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        return super().latest()


def followed(*answers: RunSnapshot | Exception, **facts: object) -> list[str]:
    said: list[str] = []
    write_until_ended(Script(*answers), said.append, sleep=lambda _: None, **facts)  # type: ignore[arg-type]
    return said


def test_a_step_is_one_line() -> None:
    """The longest, the most exposed, the fullest, and whose they are."""
    run = at_step(100)
    line = step_line(run, 100)
    found = [rank.steps.recent[-1] for rank in run.ranks]
    slowest = max(range(2), key=lambda n: found[n].seconds)
    most = max(range(2), key=lambda n: found[n].exposed_ns / found[n].seconds)
    assert line.startswith(f"step 100  {found[slowest].seconds * 1e3:.1f} ms (rank {slowest})")
    share = found[most].exposed_ns / 1e9 / found[most].seconds
    assert f"exposed {share * 100:.1f} % (rank {most})" in line
    assert f"reserved {found[1].reserved_bytes / GIB:.1f} GiB (rank 1)" in line
    assert line.endswith("OOM risk 74.0 %")
    assert step_line(run, 7) == "step 7: not known"


def test_what_is_exposed_is_said_of_every_step() -> None:
    """Also of one whose communication was counted only."""
    run = at_step(100)
    idle = [changed(r, recent=(replace(r.steps.recent[-1], idle=True),)) for r in run.ranks]
    line = step_line(replace(run, ranks=tuple(idle)), 100)
    assert "  exposed n/a (not timed)  " in line


def test_every_step_is_said_once_and_the_end() -> None:
    ended = tuple(changed(r, alive=False, ended="finished") for r in at_step(104).ranks)
    last = replace(at_step(104), ended=True, ranks=ended)
    said = followed(at_step(100), at_step(100), at_step(103), last)
    assert [line.split()[1] for line in said if line.startswith("step")] == [
        "100", "101", "102", "103", "104",
    ]  # fmt: skip
    assert said[-1] == "finished after 104 steps"
    assert any("the run has ended" in line for line in said)
    assert any("warning: ZM601 rank 1" in line for line in said)


def test_steps_that_went_by_are_owned_up_to() -> None:
    said = list(lines_of_snapshot(at_step(20), at_step(120), 20))
    assert said[0] == "steps 21 to 70 were too fast to print"
    assert [line.split()[1] for line in said[1:]] == [str(n) for n in range(71, 121)]


def test_a_collector_that_is_away_is_waited_for() -> None:
    gone = SourceError("no collector answers at x:1")
    said = followed(at_step(10), gone, gone, at_step(11), RunNotFound("not any more"))
    assert said.count("no collector answers at x:1; trying again") == 1
    assert said[-2].startswith("step 11")
    assert said[-1] == "the run is gone: not any more"


def test_a_run_that_its_collector_forgot_is_read_from_the_store() -> None:
    ended = replace(at_step(12), ended=True)
    said = followed(
        at_step(11), RunNotFound("gone"), reconnect=lambda gone: FixedSource(ended) if gone else None
    )
    assert said[-1] == "finished after 12 steps"


class View:
    """A collector whose run has ended."""

    def __init__(self) -> None:
        self.view = (replace(at_step(30), ended=True),)

    def was_read(self) -> None:
        pass

    def past(self, name: str) -> Past:
        return Past(Path(os.devnull))


@pytest.fixture
def address(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setenv("ZEROMON_DIR", str(tmp_path / "rings"))
    monkeypatch.setenv("ZEROMON_STORE", str(tmp_path / "store"))
    (tmp_path / "rings").mkdir(mode=0o700)
    server = start_http_server(View(), "127.0.0.1", 0)  # type: ignore[arg-type]
    facts = {"host": "127.0.0.1", "port": server.server_port}
    (tmp_path / "rings" / "collector.json").write_text(json.dumps(facts))
    yield f"127.0.0.1:{server.server_port}"
    server.shutdown()


def attach(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "zeromon", "attach", *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def test_the_command(address: str) -> None:
    """Lines on stdout; 1 because there are findings; without a terminal it says what to use."""
    done = attach(address, "--plain")
    assert done.returncode == 1
    assert done.stdout.splitlines()[-1] == "finished after 30 steps"
    refused = attach(address)
    assert refused.returncode == 2
    assert "Use --plain or --json" in refused.stderr
    assert attach(address, "--plain", "--json").returncode == 2
    assert attach(address, "--every", "0").returncode == 2


def test_a_run_is_found_again(address: str) -> None:
    """At the collector that has it; in the store only when a collector said that it is gone."""
    found = reopen_run_source("train_gpt-091500-abc", False)
    assert isinstance(found, LiveSource)
    assert found.address == address
    Store().save(replace(snapshot(1), run="old"))
    assert reopen_run_source("old", False) is None
    assert isinstance(reopen_run_source("old", True), StoreSource)
    assert reopen_run_source("unknown", True) is None


def test_a_run_that_is_not_watched_is_offered_last_and_as_such(
    address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its step is the job's, not the number of steps that were watched."""
    left = LiveRun("left", False, True, 1, 9, (), (), address)
    here = LiveRun("here", False, False, 1, 1692, (), (), address)
    monkeypatch.setattr(live, "runs_of_node", lambda: [left, here])
    assert live.find_live_runs(None) == [here]
    assert live.find_live_runs("left") == [left]
    assert (left.state, here.state) == ("not watched since step 9", "live, step 1,692")


def test_the_list_of_a_collector_has_the_step_of_the_job() -> None:
    """It was attached after 1,352 steps, and has seen 340."""
    brief = http._summarize_run(
        run(rank(0, last_step=1692, watched_steps=340), rank(1, last_step=1690, watched_steps=340))
    )
    assert (brief["step"], brief["detached"]) == (1692, False)
    assert http._summarize_run(run(rank(0, ended=DETACHED)))["detached"]


def test_a_live_run_wins_over_an_ended_one_of_the_same_beginning(
    address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second `--name zero3` is called zero3-2 while the first has ended."""

    def known(*ended: bool) -> None:
        runs = [LiveRun(name, over, False, 1, 1, (), (), address)
                for name, over in zip(("zero3", "zero3-2", "other"), ended, strict=True)]  # fmt: skip
        monkeypatch.setattr(live, "runs_of_node", lambda: runs)

    known(True, False, False)
    assert [run.run for run in live.find_live_runs("zero3")] == ["zero3-2"]
    known(False, False, False)
    assert [run.run for run in live.find_live_runs("zero3")] == ["zero3"]
    known(True, True, False)
    assert [run.run for run in live.find_live_runs("zero3")] == ["zero3"]
