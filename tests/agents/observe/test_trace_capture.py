"""A trace on demand: exactly those steps, one at a time, and never in the way of the script's own."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from unittest.mock import MagicMock

import pytest
from support import LAUNCH, Node, train_command

from zeromon.base.errors import CaptureRefused
from zeromon.ring.codes import TraceState
from zeromon.snapshot import RunSnapshot
from zeromon.snapshot.step import Capture
from zeromon.traces.diff import OF_CALLS, Change, diff_samples, samples_of
from zeromon.traces.kineto import read_trace


def asking(node: Node, steps: int, ranks: tuple[int, ...] = ()) -> Callable[[RunSnapshot], None]:
    """Asks once, when the run has made ten steps."""
    asked: list[Capture] = []

    def look(run: RunSnapshot) -> None:
        if not asked and run.ranks and min(rank.steps.watched_steps for rank in run.ranks) >= 10:
            asked.append(node.collector.trace(run.run, steps, ranks))
            with pytest.raises(CaptureRefused, match="still waiting"):
                node.collector.trace(run.run, steps, ranks)

    return look


def captured(run: RunSnapshot) -> Capture:
    assert run.capture is not None
    return run.capture


def marks(file: str) -> list[int]:
    content = json.loads(Path(file).read_text())["traceEvents"]
    found = (re.fullmatch(r"ProfilerStep#(\d+)", event.get("name", "")) for event in content)
    return sorted(int(match.group(1)) for match in found if match)


@pytest.mark.fsdp2
def test_all_ranks_record_exactly_those_steps(node: Node) -> None:
    seen: list[str] = []
    ask = asking(node, 2)

    def look(run: RunSnapshot) -> None:
        ask(run)
        if run.capture is not None and run.capture.state not in seen:
            seen.append(run.capture.state)

    result = node.run(train_command(2, "fsdp2", "on", "50", program="exposed.py"), seen=look)
    assert result.code == 0, result.output
    made = captured(result.snapshot)
    assert (made.state, made.ranks, made.note) == ("done", (0, 1), "")
    assert seen[0] == "waiting" and seen[-1] in ("analysing", "done")
    assert len(made.files) == 2
    for file in made.files:
        assert marks(file) == [made.first, made.first + 1]
        assert Path(file).stat().st_mode & 0o777 == 0o600
    # those steps are never idle, so both are compared
    for rank in result.snapshot.ranks:
        check = made.checks[rank.rank]
        assert rank.requests.check == check
        assert check.steps == (made.first, made.first + 1)
        # on a machine that others use the live figure holds the waiting for a CPU, too
        assert check.error_ratio is not None and abs(check.error_ratio) < 2
        assert check.live_exposed_seconds <= (check.live_communication_seconds or 0.0)
    metrics = node.metrics(result.run)
    assert set(metrics["zeromon_exposed_communication_error_ratio"]) == {("0",), ("1",)}
    # the request is gone, and so is the run's folder
    assert not list((node.root).glob("*/trace.json"))
    ranks = [samples_of(read_trace(Path(file))) for file in made.files]
    calls = {row.name: row.change for row in diff_samples(*ranks).changed if row.change in OF_CALLS}
    assert calls == {}  # the ranks run one program


@pytest.mark.long
def test_a_diff_of_two_traces_names_the_gathers_that_one_saves(node: Node) -> None:
    """FSDP2 gathers the parameters of its 4 layers and the rest twice; with ZeRO-2 once."""
    samples = []
    for strategy in ("fsdp2", "fsdp2-zero2"):
        program = ["examples/train_gpt.py", "--strategy", strategy, "--steps", "60", "--width", "64"]
        result = node.run([*LAUNCH, "2", *program], seen=asking(node, 4))
        assert result.code == 0, result.output
        samples.append(
            [s for f in captured(result.snapshot).files for s in samples_of(read_trace(Path(f)))]
        )
    found = {row.name: row for row in diff_samples(*samples).changed}
    gathers = found["all_gather"]
    assert (gathers.change, gathers.before.calls, gathers.after.calls) == (Change.FEWER, 10, 5)
    assert "reduce_scatter" not in {row.name for row in found.values() if row.change in OF_CALLS}


@pytest.mark.long
def test_only_the_ranks_that_were_asked_for_record(node: Node) -> None:
    command = train_command(2, "ddp", "on", "80", program="exposed.py")
    result = node.run(command, seen=asking(node, 1, (1,)))
    assert result.code == 0, result.output
    made = captured(result.snapshot)
    assert [Path(file).name for file in made.files] == ["rank1.json"]
    assert result.snapshot.ranks[0].requests.capture is None


def profiled(node: Node, mode: str, steps: int, wanted: int) -> tuple[Capture, str]:
    command = train_command(1, mode, str(steps), program="profiled.py")
    own = str(node.folder / "own.json")
    result = node.run(command, seen=asking(node, wanted), OWN_TRACE=own)
    assert result.code == 0, result.output
    return captured(result.snapshot), result.output


def test_the_scripts_own_profiler_comes_first(node: Node) -> None:
    made, output = profiled(node, "on", 170, 2)
    assert (made.state, made.files) == ("failed", ())
    assert made.note == "rank 0: the script's own profiler is on"
    assert "own steps 170 of 170" in output


def test_a_recording_is_given_up_when_the_scripts_own_profiler_begins(node: Node) -> None:
    made, output = profiled(node, "later", 240, 90)
    assert made.state == "failed"
    assert made.note == "rank 0: the script's own profiler began"
    found = re.search(r"own steps (\d+) of (\d+)", output)
    assert found is not None and found.group(1) == found.group(2)


def test_a_run_that_ends_before_its_steps_says_so(node: Node) -> None:
    made, _ = profiled(node, "none", 170, 100)
    assert made.state == "failed"
    assert made.note == "rank 0: the script ended before those steps did"


def test_what_cannot_be_asked_for(node: Node) -> None:
    with pytest.raises(CaptureRefused, match="no run nothing"):
        node.collector.trace("nothing", 2, ())
    result = node.run(train_command(1, "none", "3", program="profiled.py"))
    with pytest.raises(CaptureRefused, match="has ended"):
        node.collector.trace(result.run, 2, ())


def test_a_trace_that_cannot_be_analysed_is_kept_and_said(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk is full for its result, or no process can be started: the run goes on, and so do we."""

    def fails(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("zeromon.collector.requests.Captures._analyse", fails)
    made, _ = profiled(node, "none", 190, 1)
    assert (made.state, len(made.files)) == ("done", 1)
    assert "cannot be analysed: No space left" in made.note


def test_a_profiler_that_writes_nothing_is_a_failure(tmp_path: Path) -> None:
    """Kineto only logs that it cannot write its file; no empty trace may take the place."""
    from zeromon_agents.observe.trace_capture import Capture as AgentCapture, Request

    context, profile = MagicMock(), MagicMock()
    capture = AgentCapture(context, MagicMock(), tmp_path, 0)
    for written, state in (("", TraceState.FAILED), ("{}", TraceState.SAVED)):
        profile.export_chrome_trace.side_effect = lambda path, text=written: Path(path).write_text(text)
        capture._to_save = Request(1, 1, 1, tmp_path), profile
        capture.flush()
        assert context.emit.call_args.kwargs["op"] == state
        assert [path.name for path in tmp_path.iterdir()] == ["rank0.json"] * (written != "")
