"""The host's memory, read from files as the kernel writes them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from zeromon.collector.rank import RankFollower, killed_for_memory
from zeromon.fold.ledger import Observed
from zeromon.fold.state import RankState
from zeromon.fold.summarize import summarize_rank
from zeromon.probes.host import HostReader, memory_capacity, read_cgroup_memory
from zeromon.probes.process import ProcessWatch, cgroup_folders
from zeromon.ring.buffer import RingWriter
from zeromon.ring.events import HostSample
from zeromon.snapshot.host import HostMemory

GIB = 1 << 30


def proc_of(folder: Path, cgroup_file: str, kills: int = 0, available_kib: int = 8 << 20) -> Path:
    (folder / "7").mkdir(parents=True)
    (folder / "7" / "cgroup").write_text(cgroup_file)
    (folder / "vmstat").write_text(f"pgfault 1\noom_kill {kills}\n")
    (folder / "meminfo").write_text(f"MemTotal: 1 kB\nMemAvailable: {available_kib} kB\n")
    return folder


def v2(folder: Path, limit: str, usage: int, inactive: int, kills: int) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "cgroup.procs").write_text("")
    (folder / "memory.max").write_text(f"{limit}\n")
    (folder / "memory.current").write_text(f"{usage}\n")
    (folder / "memory.stat").write_text(f"anon 5\ninactive_file {inactive}\n")
    (folder / "memory.events").write_text(f"low 0\noom 3\noom_kill {kills}\n")
    return folder


def v1(folder: Path, limit: int, usage: int, inactive: int, kills: int) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "cgroup.procs").write_text("")
    (folder / "memory.limit_in_bytes").write_text(f"{limit}\n")
    (folder / "memory.usage_in_bytes").write_text(f"{usage}\n")
    (folder / "memory.stat").write_text(f"total_inactive_file {inactive}\n")
    (folder / "memory.oom_control").write_text(f"oom_kill_disable 0\noom_kill {kills}\n")
    return folder


def test_the_tightest_of_the_nested_cgroups_decides_v2(tmp_path: Path) -> None:
    """The job's own limit is far; its parent's is near. Inactive page cache counts as free."""
    proc = proc_of(tmp_path / "proc", "0::/slice/job\n")
    root = tmp_path / "cgroup"
    (root / "slice").mkdir(parents=True)
    outer = v2(root / "slice", str(4 * GIB), 3 * GIB, GIB // 2, kills=0)
    inner = v2(root / "slice" / "job", str(32 * GIB), 2 * GIB, 0, kills=0)
    reader = HostReader(proc, root)
    found = reader.read(7)
    assert (found.cgroup, found.limit_bytes) == (str(outer), 4 * GIB)
    assert found.headroom_bytes == 4 * GIB - 3 * GIB + GIB // 2
    assert found.oom_kills == 0
    v2(inner, str(32 * GIB), 0, 0, kills=2)
    assert reader.read(7).oom_kills == 0  # the same round
    reader.new_round()
    assert reader.read(7).oom_kills == 2


def test_version_1(tmp_path: Path) -> None:
    proc = proc_of(tmp_path / "proc", "4:memory:/job\n2:cpu:/x\n0::/\n")
    root = tmp_path / "cgroup"
    folder = v1(root / "memory" / "job", 2 * GIB, GIB, 0, kills=5)
    found = HostReader(proc, root).read(7)
    assert (found.cgroup, found.headroom_bytes) == (str(folder), GIB)
    assert found.oom_kills == 0  # those before are not of this run


@pytest.mark.parametrize("limit", ["max", "9223372036854771712", "nonsense"])
def test_no_limit_leaves_what_the_machine_has(tmp_path: Path, limit: str) -> None:
    proc = proc_of(tmp_path / "proc", "0::/job\n", available_kib=3 << 20)
    v2(tmp_path / "cgroup" / "job", limit, GIB, 0, kills=0)
    found = HostReader(proc, tmp_path / "cgroup").read(7)
    assert (found.cgroup, found.limit_bytes) == ("", -1)
    assert found.headroom_bytes == 3 * GIB


def test_what_there_is_in_all_is_the_limit_or_the_machine(tmp_path: Path) -> None:
    proc = proc_of(tmp_path / "proc", "0::/slice/job\n")
    (proc / "meminfo").write_text(f"MemTotal: {16 << 20} kB\n")
    root = tmp_path / "cgroup"
    v2(root / "slice" / "job", str(4 * GIB), 3 * GIB, 0, kills=0)
    assert memory_capacity(7, proc, root) == 4 * GIB
    v2(root / "slice" / "job", str(64 * GIB), 3 * GIB, 0, kills=0)
    assert memory_capacity(7, proc, root) == 16 * GIB
    assert memory_capacity(7, tmp_path / "none", root) == -1


def test_a_container_that_shows_its_own_root(tmp_path: Path) -> None:
    """The path of the host does not exist inside: the root of the view is the limit."""
    proc = proc_of(tmp_path / "proc", "0::/docker/abc\n")
    root = v2(tmp_path / "cgroup", str(GIB), GIB // 4, 0, kills=0)
    assert cgroup_folders(7, "memory", proc, root) == [root]
    assert HostReader(proc, root).read(7).limit_bytes == GIB


def test_a_cgroup_that_counts_no_kills_leaves_the_machines_counter(tmp_path: Path) -> None:
    proc = proc_of(tmp_path / "proc", "0::/job\n", kills=4)
    folder = v2(tmp_path / "cgroup" / "job", str(GIB), 0, 0, kills=0)
    (folder / "memory.events").unlink()
    reader = HostReader(proc, tmp_path / "cgroup")
    reader.read(7)
    (proc / "vmstat").write_text("oom_kill 6\n")
    reader.new_round()
    assert (reader.read(7).oom_kills, reader.read(7).oom_kills_everywhere) == (-1, 2)


def test_nothing_to_read_is_unknown(tmp_path: Path) -> None:
    found = HostReader(tmp_path, tmp_path).read(7)
    assert (found.limit_bytes, found.headroom_bytes, found.oom_kills) == (-1, -1, -1)
    assert read_cgroup_memory(tmp_path) is None


def test_this_very_process() -> None:
    """The real /proc: there is some headroom, or it is unknown."""
    assert HostReader().read(os.getpid()).headroom_bytes > 0


def test_a_namespaced_root_counts_for_itself(tmp_path: Path) -> None:
    """In a container the root of the view is the container's own cgroup."""
    proc = proc_of(tmp_path / "proc", "0::/\n", kills=3)
    root = v2(tmp_path / "cgroup", "max", GIB, 0, kills=4)
    reader = HostReader(proc, root)
    assert reader.read(7).oom_kills == 0
    v2(root, "max", GIB, 0, kills=5)
    (proc / "vmstat").write_text("oom_kill 9\n")
    reader.new_round()
    assert reader.read(7).oom_kills == 1


def test_what_an_outer_cgroup_counts_is_not_ours(tmp_path: Path) -> None:
    """Another session of the same user was killed."""
    proc = proc_of(tmp_path / "proc", "0::/user/job\n")
    outer = v2(tmp_path / "cgroup" / "user", "max", 0, 0, kills=0)
    v2(outer / "job", "max", 0, 0, kills=0)
    reader = HostReader(proc, tmp_path / "cgroup")
    reader.read(7)
    v2(outer, "max", 0, 0, kills=9)
    reader.new_round()
    assert reader.read(7).oom_kills == 0


@pytest.mark.parametrize(
    ("ended", "kills", "blamed"),
    [
        (("SIGKILL", "SIGKILL"), 1, [0]),
        (("SIGKILL", "SIGKILL"), 2, [0, 1]),
        (("SIGKILL", "SIGKILL"), 0, []),
        (("exception", "SIGKILL"), 0, []),
        (("exit code 1", "SIGTERM"), 3, []),
    ],
)
def test_only_kills_about_the_end_are_evidence(
    ended: tuple[str, str], kills: int, blamed: list[int]
) -> None:
    """The largest first; a rank that said goodbye, or was told to go, was not killed for memory."""
    ranks = []
    for number, how in enumerate(ended):
        state = RankState(rank=number, host=HostSample(1, GIB * (2 - number), -1, -1))
        host = HostMemory(oom_kills=5, kills_at_end=kills)
        seen = Observed(alive=False, ended=how, failed=True, host=host)
        ranks.append(summarize_rank(state, seen))
    assert sorted(killed_for_memory(ranks)) == blamed


def test_what_a_rank_gives_back_at_its_end_is_not_available_to_it(tmp_path: Path) -> None:
    """It frees its pages a second before the kernel says that it has ended; its kills still count."""
    proc = proc_of(tmp_path / "proc", "0::/\n", available_kib=12 << 20)
    own = proc / str(os.getpid())
    own.mkdir()
    (own / "cgroup").write_text("0::/\n")
    status = own / "status"
    status.write_text(f"VmRSS: {5 << 20} kB\n")
    reader = HostReader(proc, tmp_path / "cgroup")
    follower = RankFollower(RingWriter(tmp_path / "rank0.7.ring", rank=0, capacity=1024).path)
    follower.poll()
    follower.state.host = HostSample(1, 5 * GIB, -1, -1)

    def available_gib(now_kib: int) -> float:
        (proc / "meminfo").write_text(f"MemAvailable: {now_kib} kB\n")
        reader.new_round()
        memory = follower.host(reader)
        assert memory is not None
        return memory.headroom_bytes / GIB

    assert available_gib(12 << 20) == 12
    assert available_gib(11 << 20) == 11
    status.write_text(f"VmRSS: {1 << 20} kB\n")
    assert available_gib(15 << 20) == 11
    follower.process = ProcessWatch(2**22 + 5)
    follower.poll()
    (proc / "vmstat").write_text("oom_kill 1\n")
    assert available_gib(16 << 20) == 11
    memory = follower.host(reader)
    assert memory is not None and memory.kills_at_end == 1


def test_a_rank_that_is_seen_only_after_its_death_has_no_headroom(tmp_path: Path) -> None:
    follower = RankFollower(RingWriter(tmp_path / "rank0.7.ring", rank=0, capacity=1024).path)
    follower.process = ProcessWatch(2**22 + 5)
    follower.poll()
    memory = follower.host(HostReader())
    assert memory is not None and memory.headroom_bytes == -1
