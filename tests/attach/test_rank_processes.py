"""Ranks by what /proc says: a made-up node, one launcher after the other."""

from __future__ import annotations

import base64
import json
from pathlib import Path

import pytest

from zeromon.attach import rank_processes

TORCH = "7f00-7f01 r-xp 00000000 00:00 0 /v/lib/libtorch_cpu.so\n"


class Proc:
    """A /proc of our own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def add(
        self, pid: int, parent: int, command: str, torch: bool = False, name: str = "", **env: str
    ) -> None:
        one = self.folder / str(pid)
        one.mkdir()
        words = command.split()
        fields = f"S {parent} " + " ".join("0" for _ in range(17)) + f" {pid} 0"
        (one / "stat").write_text(f"{pid} ({name or words[0]}) {fields}")
        (one / "cmdline").write_text("\0".join(words) + "\0")
        (one / "environ").write_text("".join(f"{k}={v}\0" for k, v in env.items()))
        (one / "maps").write_text(TORCH if torch else "")


@pytest.fixture
def proc(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Proc:
    monkeypatch.setattr(rank_processes, "PROC", tmp_path)
    made = Proc(tmp_path)
    made.add(1, 0, "init")
    return made


def pids(found: list[rank_processes.Process]) -> list[int]:
    return [process.pid for process in found]


def ranks(proc: Proc, parent: int, first: int, world: int, count: int = 2, **env: str) -> None:
    """Ranks below *parent*, the first with a data worker that inherits all it has."""
    for number in range(count):
        facts = {"RANK": str(number), "WORLD_SIZE": str(world), "MASTER_PORT": "29500", **env}
        proc.add(first + number, parent, "python train.py", torch=True, **facts)
    proc.add(
        first + 50, first, "python train.py", torch=True, name="pt_data_worker", RANK="0",
        WORLD_SIZE=str(world),
    )  # fmt: skip


@pytest.mark.parametrize("launcher", ["torchrun train.py", "python -m deepspeed.launcher.launch"])
def test_ranks_below_a_launcher_without_their_data_workers(proc: Proc, launcher: str) -> None:
    """The launcher has torch, too, and no rank number; a shell in between has one, and no torch."""
    proc.add(10, 1, launcher, torch=True)
    proc.add(11, 10, "bash -c", RANK="0", WORLD_SIZE="2")
    ranks(proc, 11, 20, world=2)
    table = rank_processes.running_processes()
    assert pids(rank_processes.ranks_of(10, table)) == [20, 21]
    assert pids(rank_processes.ranks_of(1, table)) == [20, 21]
    assert pids(rank_processes.ranks_of(21, table)) == [21]
    assert pids(rank_processes.sibling_ranks(21, table)) == [20, 21]
    assert pids(rank_processes.all_user_ranks(table)) == [20, 21]
    assert rank_processes.remote_rank_numbers(rank_processes.sibling_ranks(21, table)) == []


def test_two_jobs_of_one_user_are_told_apart(proc: Proc) -> None:
    for launcher, port in ((10, "1111"), (11, "2222")):
        proc.add(launcher, 1, "torchrun", torch=True)
        ranks(proc, launcher, launcher * 100, world=2, MASTER_PORT=port)
    table = rank_processes.running_processes()
    assert pids(rank_processes.sibling_ranks(1001, table)) == [1000, 1001]
    assert pids(rank_processes.all_user_ranks(table)) == [1000, 1100, 1001, 1101]
    assert len({process.job for process in rank_processes.all_user_ranks(table)}) == 2


def test_spawned_ranks_have_no_number(proc: Proc) -> None:
    """torch.multiprocessing.spawn; a data worker beside them is none."""
    proc.add(10, 1, "python train.py", torch=True)
    for pid in (11, 12):
        proc.add(pid, 10, "python -c multiprocessing.spawn", torch=True)
    proc.add(13, 10, "python -c multiprocessing.spawn", torch=True, name="pt_data_worker")
    proc.add(14, 10, "python -c multiprocessing.resource_tracker")
    assert pids(rank_processes.ranks_of(10, rank_processes.running_processes())) == [11, 12]


def test_one_process_is_itself(proc: Proc) -> None:
    proc.add(10, 1, "python train.py", torch=True)
    proc.add(11, 10, "python train.py", torch=True, name="pt_data_worker")
    assert pids(rank_processes.ranks_of(10, rank_processes.running_processes())) == [10]
    assert rank_processes.ranks_of(99, rank_processes.running_processes()) == []


def test_tasks_of_srun_are_not_its_children(proc: Proc) -> None:
    proc.add(10, 1, "srun python train.py", name="srun", SLURM_JOB_ID="42")
    proc.add(11, 1, "slurmstepd")
    ranks(proc, 11, 20, world=4, SLURM_JOB_ID="42", SLURM_JOB_NODELIST="n[1-2]")
    ranks(proc, 11, 200, world=2, SLURM_JOB_ID="43")
    table = rank_processes.running_processes()
    found = rank_processes.ranks_of(10, table)
    assert pids(found) == [20, 21]
    assert rank_processes.remote_rank_numbers(found) == [2, 3]
    assert rank_processes.node_names_of(found, table) == ["n[1-2]"]


def test_deepspeed_names_its_nodes(proc: Proc) -> None:
    world = base64.urlsafe_b64encode(json.dumps({"alpha": [0, 1], "beta": [0, 1]}).encode())
    proc.add(10, 1, f"python -m deepspeed.launcher.launch --world_info={world.decode()}")
    ranks(proc, 10, 20, world=4)
    table = rank_processes.running_processes()
    assert rank_processes.node_names_of(rank_processes.ranks_of(10, table), table) == ["alpha", "beta"]


def test_what_goes_away_or_is_odd_is_left_out(proc: Proc) -> None:
    """A name with a bracket, a broken stat, a zombie, hostile numbers."""
    proc.add(10, 1, "python", name="a) b (c", torch=True, RANK="-1", WORLD_SIZE="x")
    (proc.folder / "11").mkdir()
    proc.add(12, 1, "python")
    stat = proc.folder / "12" / "stat"
    stat.write_text(stat.read_text().replace(") S ", ") Z "))
    table = rank_processes.running_processes()
    assert sorted(table) == [1, 10]
    assert (table[10].name, table[10].rank, table[10].world_size) == ("a) b (c", None, 0)
