"""The rank processes of this node by ``/proc``: below a launcher, beside a rank, or all of a user.

A rank is the first process of its branch with a rank number of a launcher that has loaded torch; the
processes that it starts (data workers) inherit the number and are not ranks. Ranks in another pid
namespace are included: they have a pid here, too.
"""

import base64
import json
import os
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from zeromon.probes.process import process_start_ticks

PROC = Path("/proc")
_RANK = ("RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID")
# Slurm gives SLURM_PROCID to a batch script too, which is no rank
_LAUNCHED = _RANK[:3]
_WORLD = ("WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_NTASKS")
_SHARED = ("MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "SLURM_JOB_ID", "SLURM_STEP_ID")
_DATA_WORKER = "pt_data_worker"


@dataclass(frozen=True)
class Process:
    """A process of this node. An unreadable field is empty."""

    pid: int
    parent: int
    name: str

    @cached_property
    def environment(self) -> Mapping[str, str]:
        """The environment at the start of the process."""
        pairs = (item.partition("=") for item in _zero_separated_items(self.pid, "environ"))
        return {name: value for name, _, value in pairs}

    @cached_property
    def command(self) -> tuple[str, ...]:
        """Its command line."""
        return tuple(_zero_separated_items(self.pid, "cmdline"))

    @cached_property
    def has_torch(self) -> bool:
        """True if it has loaded torch's library."""
        with suppress(OSError):
            return b"/libtorch" in (PROC / str(self.pid) / "maps").read_bytes()
        return False

    @property
    def rank(self) -> int | None:
        """The rank number that its launcher assigned."""
        return _environment_number(self.environment, _RANK)

    @property
    def world_size(self) -> int:
        """Number of ranks of its job, 0 where unknown."""
        return _environment_number(self.environment, _WORLD) or 0

    @property
    def job(self) -> str:
        """Identifies the job: equal for the ranks of one job on one node, and for no other job."""
        shared = "|".join(self.environment.get(name, "") for name in _SHARED)
        return shared if shared.strip("|") else f"{self.parent}.{process_start_ticks(self.parent)}"


def running_processes() -> dict[int, Process]:
    """All running processes, by pid."""
    by_pid = {}
    for folder in PROC.iterdir():
        if folder.name.isdigit():
            with suppress(OSError, ValueError, IndexError):
                head, _, tail = (folder / "stat").read_text(errors="replace").rpartition(")")
                fields = tail.split()
                if fields[0] not in "ZX":
                    pid = int(folder.name)
                    by_pid[pid] = Process(pid, int(fields[1]), head.partition("(")[2])
    return by_pid


def ranks_of(pid: int, table: Mapping[int, Process]) -> list[Process]:
    """The ranks of *pid*: itself, or those below it; by rank number."""
    start = table.get(pid)
    if start is None:
        return []
    below = process_tree(pid, table)
    ranks = _topmost_ranks((p for p in below if p.rank is not None and p.has_torch), table)
    if start.name == "srun" and not ranks:  # threads are not children
        step = start.environment.get("SLURM_JOB_ID")
        ranks = [p for p in all_user_ranks(table) if step and p.environment.get("SLURM_JOB_ID") == step]
    return ranks or _spawned_ranks(pid, below) or [start]


def ranks_to_be(pid: int, table: Mapping[int, Process]) -> list[Process]:
    """The ranks below a launcher, also those that have not loaded torch yet; by rank number.

    Without numbers of a launcher: what it spawned, else what has loaded torch. A batch script's number
    of Slurm is that of the script.
    """
    below = process_tree(pid, table) if pid in table else []
    numbered = (
        p for p in below if p.pid != pid and _environment_number(p.environment, _LAUNCHED) is not None
    )
    has_torch = (p for p in below if p.has_torch)
    return (
        _topmost_ranks(numbered, table) or _spawned_ranks(pid, below) or _topmost_ranks(has_torch, table)
    )


def sibling_ranks(pid: int, table: Mapping[int, Process]) -> list[Process]:
    """All ranks of the jobs of *pid*'s ranks."""
    jobs = {rank.job for rank in ranks_of(pid, table)}
    return [p for p in all_user_ranks(table) if p.job in jobs] or ranks_of(pid, table)


def all_user_ranks(table: Mapping[int, Process]) -> list[Process]:
    """Every rank of this user on this node."""
    mine = (p for p in table.values() if _owner_uid(p.pid) == os.geteuid())
    return _topmost_ranks((p for p in mine if p.rank is not None and p.has_torch), table)


def process_tree(pid: int, table: Mapping[int, Process]) -> list[Process]:
    """*pid* and all its descendants."""
    children: dict[int, list[int]] = {}
    for process in table.values():
        children.setdefault(process.parent, []).append(process.pid)
    tree, waiting = [], [pid]
    while waiting:
        child = waiting.pop()
        tree.append(table[child])
        waiting += children.get(child, ())
    return tree


def remote_rank_numbers(ranks: Iterable[Process]) -> list[int]:
    """Rank numbers of the same job that are not among *ranks*."""
    ranks = list(ranks)
    local_ranks = {rank.rank for rank in ranks}
    world = max((rank.world_size for rank in ranks), default=0)
    return [number for number in range(world) if number not in local_ranks]


def node_names_of(ranks: Iterable[Process], table: Mapping[int, Process]) -> list[str]:
    """Names of the job's nodes, where its launcher provides them."""
    for rank in ranks:
        listed = rank.environment.get("SLURM_JOB_NODELIST")
        if listed:
            return [listed]
        parent = table.get(rank.parent)
        for argument in parent.command if parent else ():
            if argument.startswith("--world_info="):  # the variable of the deepspeed launcher
                with suppress(ValueError, TypeError):
                    return list(json.loads(base64.urlsafe_b64decode(argument.partition("=")[2])))
    return []


def _topmost_ranks(ranks: Iterable[Process], table: Mapping[int, Process]) -> list[Process]:
    """The ranks that are not descendants of another one, by rank number."""
    candidates = {process.pid: process for process in ranks}
    top = []
    for process in candidates.values():
        above = table.get(process.parent)
        while above is not None and above.pid not in candidates:
            above = table.get(above.parent)
        if above is None:
            top.append(process)
    # Comparing None with a number raises TypeError: ranks without a number come last
    return sorted(top, key=lambda p: (p.rank is None, p.rank, p.pid))


def _spawned_ranks(pid: int, below: Iterable[Process]) -> list[Process]:
    """Ranks that torch.multiprocessing.spawn started: they have no number in the environment."""
    # The resource tracker of multiprocessing has such a command too, and no torch
    ranks = (
        p
        for p in below
        if p.parent == pid
        and p.name != _DATA_WORKER
        and any("multiprocessing" in argument for argument in p.command)
        and p.has_torch
    )
    return sorted(ranks, key=lambda p: p.pid)


def _environment_number(environment: Mapping[str, str], names: Iterable[str]) -> int | None:
    for name in names:
        if environment.get(name, "").isdigit():
            return int(environment[name])
    return None


def _owner_uid(pid: int) -> int:
    with suppress(OSError):
        return (PROC / str(pid)).stat().st_uid
    return -1


def _zero_separated_items(pid: int, name: str) -> list[str]:
    with suppress(OSError):
        content = (PROC / str(pid) / name).read_text(errors="replace")
        return [item for item in content.split("\0") if item]
    return []
