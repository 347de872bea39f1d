"""attach on real jobs of two gloo ranks that never loaded zeromon; the tests of a kind share a job."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from attaching import Job
from support import Node, free_port, wait_for

from zeromon.attach.loader import Outcome, attach_ranks, detach_ranks
from zeromon.attach.rank_processes import running_processes
from zeromon.cli import main
from zeromon.readout.text import run_state
from zeromon.ring import paths
from zeromon.snapshot import RunSnapshot

pytestmark = [
    pytest.mark.skipif(
        sys.platform != "linux" or os.uname().machine != "x86_64", reason="Linux on x86-64"
    )
]

STEPS = 14
"""Whole steps that a joined rank is watched for: some with idle hooks among them."""


@dataclass
class Joined:
    """What a job that was joined, left and joined again has shown."""

    snapshots: list[RunSnapshot] = field(default_factory=list)
    outcomes: list[Outcome] = field(default_factory=list)
    left: list[Outcome] = field(default_factory=list)
    again: list[Outcome] = field(default_factory=list)
    after_leaving: RunSnapshot | None = None
    rings_kept: list[str] = field(default_factory=list)
    folders: list[Path] = field(default_factory=list)
    ended: list[dict[str, Any]] = field(default_factory=list)


def watch(node: Node, folder: Path, ranks: int) -> RunSnapshot:
    """The snapshot once every rank has taken some whole steps since it was joined."""

    def seen() -> RunSnapshot | None:
        node.collector.tick()
        snapshot = node.snapshot(folder.name)
        if snapshot is None or len(snapshot.ranks) < ranks:
            return None
        return snapshot if all(rank.steps.watched_steps >= STEPS for rank in snapshot.ranks) else None

    return wait_for(seen, 180)  # other tests may have the CPUs


def rings_of(pid: int) -> list[str]:
    """Rings that a process has open or mapped."""
    opened = [str(fd.readlink()) for fd in Path(f"/proc/{pid}/fd").iterdir() if fd.exists()]
    mapped = Path(f"/proc/{pid}/maps").read_text().splitlines()
    return [line for line in (*opened, *mapped) if ".ring" in line or "SYSV5a4d" in line]


def story(kind: str, node: Node) -> Joined:
    """A job that is joined twice and left twice, and then ends by itself."""
    told = Joined()
    job = Job(kind, node.folder / kind)
    try:
        job.wait_until(20)
        ranks = job.ranks()
        for outcomes in (told.outcomes, told.again):
            folder, joined = attach_ranks(ranks, node.root)
            told.folders.append(folder)
            outcomes += joined
            assert not any(outcome.refused for outcome in joined), joined
            told.snapshots.append(watch(node, folder, len(ranks)))
            told.left += detach_ranks(ranks, node.root)
        node.collector.tick()
        told.after_leaving = node.snapshot(folder.name)
        told.rings_kept = [line for rank in ranks for line in rings_of(rank.pid)]
        told.ended = job.finish()
    finally:
        job.kill()
    return told


@pytest.fixture(scope="module")
def hanging(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], Job]]:
    """Jobs that hang from step 25 on. DDP's is started before all others, for that takes its time."""
    start = cache(lambda kind: Job(kind, tmp_path_factory.mktemp("hung") / "job", "25"))
    jobs = [start("ddp")]

    def job(kind: str) -> Job:
        jobs.append(start(kind))
        return jobs[-1]

    yield job
    for one in jobs:
        one.kill()


FSDP2 = pytest.param("fsdp2", marks=pytest.mark.fsdp2)
KINDS = [
    FSDP2,
    pytest.param("ddp", marks=pytest.mark.long),
    pytest.param("zero3", marks=pytest.mark.long),
    "plain",
]


@pytest.fixture(scope="module", params=KINDS)
def joined(
    request: pytest.FixtureRequest, shared_node: Node, hanging: Callable[[str], Job]
) -> Iterator[tuple[str, Joined]]:
    before = os.environ.get("ZEROMON_COLLECTOR")
    os.environ["ZEROMON_COLLECTOR"] = "off"  # this process drives one
    try:
        yield request.param, story(request.param, shared_node)
    finally:
        if before is None:
            del os.environ["ZEROMON_COLLECTOR"]


def test_the_losses_are_those_of_a_job_left_alone(joined: tuple[str, Joined]) -> None:
    """Bit by bit, over all steps: before, while and after it was watched, twice."""
    _, told = joined
    assert len(told.ended) == len(told.outcomes)
    for rank in told.ended:
        assert rank["losses"] == rank["again"]
        assert rank["loaded"] and rank["main"]


def test_nothing_of_torch_is_patched_afterwards(joined: tuple[str, Joined]) -> None:
    """Class attributes, functions, global hooks, finders, threads, marks on objects."""
    _, told = joined
    assert [(rank["changed"], rank["marked"]) for rank in told.ended] == [([], 0)] * len(told.ended)
    assert all(outcome.kept == () for outcome in told.left)


def test_no_ring_stays_open_or_mapped(joined: tuple[str, Joined]) -> None:
    _, told = joined
    assert told.rings_kept == []


def test_the_training_thread_is_not_what_was_stopped(joined: tuple[str, Joined]) -> None:
    """Where gloo has threads that wait, one of those, most of the time; it stood for a moment."""
    kind, told = joined
    outcomes = [*told.outcomes, *told.left, *told.again]
    for outcome in outcomes:
        assert not outcome.refused
        assert 0 < outcome.stopped_ns < 1e9
    # a main thread that waits itself, as for a collective, will do as well
    helpers = [outcome for outcome in outcomes if outcome.how.startswith("helper thread")]
    assert len(helpers) > len(outcomes) / 2 or kind == "plain"


STRATEGY = {"fsdp2": "fsdp2", "ddp": "ddp", "zero3": "deepspeed-zero3", "plain": "one process"}


def test_a_joined_run_is_seen_as_one_that_was_launched(joined: tuple[str, Joined]) -> None:
    """Strategy, phases, collectives, memory roles, no failed hook, whichever backend it is."""
    kind, told = joined
    for snapshot in told.snapshots:
        for rank in snapshot.ranks:
            assert rank.agent.errors == 0
            assert rank.strategy == STRATEGY[kind]
            assert rank.steps.median_seconds is not None and rank.steps.median_seconds > 0
            assert rank.steps.phase_seconds["backward"] > 0 and rank.steps.phase_seconds["optimizer"] > 0
            assert bool(rank.communication.collectives) == (kind != "plain")
            assert rank.memory.roles
    ops = {row.op for rank in told.snapshots[0].ranks for row in rank.communication.collectives}
    assert ops >= {"fsdp2": {"all_gather", "reduce_scatter"}, "zero3": {"all_gather"}}.get(kind, set())


def test_steps_have_the_numbers_that_the_optimizer_counts(joined: tuple[str, Joined]) -> None:
    """All ranks the same, though they were joined at different moments; seen whole from there on."""
    _, told = joined
    first, second = told.snapshots
    for snapshot in told.snapshots:
        firsts = {rank.steps.recent[0].step for rank in snapshot.ranks}
        numbers = [{s.step for s in rank.steps.recent} for rank in snapshot.ranks]
        assert min(firsts) > 20
        assert numbers[0] & numbers[-1]
        for rank in snapshot.ranks:
            # none is shorter than its parts, as one seen in part would be
            assert all(sum(s.phase_ns) <= 1.01 * (s.end_ns - s.start_ns) for s in rank.steps.recent)
            assert rank.steps.watched_steps == rank.steps.last_step - rank.steps.recent[0].step + 1
    assert second.ranks[0].steps.recent[0].step > first.ranks[0].steps.recent[-1].step
    # the same moment of training has the same number on both ranks
    for one in first.ranks[0].steps.recent:
        for other in first.ranks[-1].steps.recent:
            if one.step == other.step:
                assert abs(one.end_ns - other.end_ns) < (one.end_ns - one.start_ns) + 1e9


def test_all_ranks_are_in_one_run_and_come_back_to_it(joined: tuple[str, Joined]) -> None:
    _, told = joined
    assert told.folders[0] == told.folders[1]
    assert told.after_leaving is not None
    assert {rank.status.ended for rank in told.after_leaving.ranks} == {"detached"}
    assert not told.after_leaving.ended
    assert run_state(told.after_leaving).endswith("the run goes on, and is not watched")


def test_the_ring_of_an_earlier_time_is_not_kept(joined: tuple[str, Joined], shared_node: Node) -> None:
    """Each is 4 MiB of memory: one a rank, however often it was joined."""
    _, told = joined
    shared_node.collector.tick()
    assert len(list(told.folders[0].glob("rank*.ring"))) <= len(told.outcomes)


def test_a_rank_in_another_ipc_namespace_keeps_its_ring_in_a_file(node: Node) -> None:
    """Its memory could not be read from here."""
    job = Job("plain", node.folder / "job", around=("unshare", "--ipc"))
    try:
        job.wait_until(20)
        folder, (outcome,) = attach_ranks(job.ranks(), node.root)
        assert not outcome.refused
        (rank,) = watch(node, folder, 1).ranks
        assert rank.agent.errors == 0
        assert [path.stat().st_size > 1 << 20 for path in folder.glob("rank*.ring")] == [True]
        detach_ranks(job.ranks(), node.root)
        assert rings_of(outcome.pid) == []
        job.finish()
    finally:
        job.kill()


# ---- a run that hangs -----------------------------------------------------------------------------


HUNG = [
    pytest.param("fsdp2", marks=[pytest.mark.fsdp2, pytest.mark.long]),
    pytest.param("ddp", marks=pytest.mark.recorder),
]


@pytest.fixture(scope="module", params=HUNG)
def hung(request: pytest.FixtureRequest, hanging: Callable[[str], Job]) -> Iterator[Job]:
    """Rank 0 waits in a collective; DDP's is issued from C++, where no hook would see it."""
    job = hanging(request.param)
    folder = job.out.parent
    values = {
        "ZEROMON_DIR": str(folder / "rings"),
        "ZEROMON_STORE": str(folder / "store"),
        "ZEROMON_PORT": str(free_port()),
        "ZEROMON_COLLECTOR": "on",  # those above drive one themselves
    }
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        job.wait_until(20)
        # a collective that waits for less does not hang yet
        wait_for(lambda: time.time() - (job.out / "step").stat().st_mtime > 10.5)
        yield job
    finally:
        job.kill()
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def test_attach_names_the_collective_that_hung_before_it_came(
    hung: Job, capsys: pytest.CaptureFixture[str]
) -> None:
    """The launcher's pid, one command: what waits, for what, who is missing, and where that one is."""
    began = time.monotonic()
    assert main(["attach", str(hung.process.pid), "--no-view"]) == 1
    assert time.monotonic() - began < 60
    output = capsys.readouterr()
    assert "attached to ranks 0, 1 as run joined-" in output.err
    verdict = output.out.splitlines()[0]
    assert verdict.startswith("!! all_")
    assert "rank 1 has not called it" in verdict and "; rank 0 waits" in verdict
    assert "joined.py:" in verdict and "in train" in verdict
    # again: nobody is joined twice, and the view is the same
    assert main(["attach", str(hung.ranks()[1].pid), "--no-view"]) == 1
    assert "attached to" not in capsys.readouterr().err
    assert main(["doctor", paths_run()]) == 1
    doctor = capsys.readouterr().out
    assert "joined.py" in doctor and "Python stack of rank 1" in doctor
    assert main(["detach", str(hung.process.pid)]) == 0
    assert "detached from rank 0" in capsys.readouterr().err
    assert main(["detach", str(hung.process.pid)]) == 2
    assert "it is not watched" in capsys.readouterr().err


def paths_run() -> str:
    (folder,) = (p for p in paths.choose_ring_root().glob("*/") if paths.is_run_id(p.name))
    return folder.name


# ---- what is refused ------------------------------------------------------------------------------


def test_an_environment_without_zeromon_and_one_with_an_old_torch(node: Node) -> None:
    """The agent comes from ours by its path, and sys.path stays theirs; what is too old says so."""
    origin = find_spec("torch").origin  # type: ignore[union-attr]
    site = str(Path(str(origin)).parents[1])
    program = (
        "import sys, time, threading\n"
        f"sys.path.append({site!r})\n"
        "sys.meta_path = [f for f in sys.meta_path if 'editable' not in repr(f).lower()]\n"
        "import torch\n"
        "if sys.argv[1] == 'old':\n del torch._C._distributed_c10d.Work\n"
        "paths = list(sys.path)\n"
        "print('up', flush=True)\n"
        "sys.stdin.readline()\n"
        "print(paths == sys.path, 'zeromon_agents' in sys.modules, flush=True)\n"
    )
    targets = [
        subprocess.Popen(
            [sys.executable, "-S", "-c", program, kind],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for kind in ("new", "old")
    ]
    try:
        for target in targets:
            assert target.stdout is not None and target.stdout.readline() == "up\n"
        _, (new,) = attach_ranks([running_processes()[targets[0].pid]], node.root)
        assert (new.refused, new.rank) == ("", 0)
        _, (old,) = attach_ranks([running_processes()[targets[1].pid]], node.root)
        assert "has no Work; use torch 2.6+" in old.refused
        for target in targets:
            assert target.communicate("\n", timeout=30)[0] == "True True\n"
            assert target.returncode == 0
    finally:
        for target in targets:
            target.kill()
            target.wait()
