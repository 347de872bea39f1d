"""How much of a waiting time a lack of CPUs may explain. Pure.

A thread that sleeps or waits for a collective is not runnable, so the kernel's time on a run queue is
that of threads which lack a CPU, and an upper bound of what the lack adds to a step. A finding is judged
by what is left of its waiting time; ZM605 alone says how large the lack is.
"""

import statistics
from typing import NamedTuple

from zeromon.levels import CPU_WAIT, Level
from zeromon.snapshot import RankSnapshot, RunSnapshot

ANY = -1


class Waits(NamedTuple):
    """The waiting time that a finding is about, and what it is judged by."""

    share: float
    """Of a step."""
    level: Level
    rank: int = ANY
    """Whose lack of CPUs counts. :data:`ANY`: that of every rank, because all wait for the slowest."""
    excess: bool = False
    """Only what *rank* lacks beyond the other ranks counts, because the others wait for it alone."""
    is_needless: bool = False
    """The work need not be done at all, with however many CPUs: no lack of them explains it."""
    is_work: bool = False
    """The training thread works meanwhile: a lack of CPUs makes each part of a step longer alike."""


def explained(run: RunSnapshot, waits: Waits) -> float:
    """The share of a step that a lack of CPUs may explain, at most all."""
    if waits.is_work or waits.is_needless:
        return 0.0
    lacks = {rank.rank: cpu_lack(rank) for rank in run.ranks}
    if waits.rank == ANY:
        most = max(lacks.values(), default=0.0)
    else:
        others = [lack for rank, lack in lacks.items() if rank != waits.rank]
        usual = statistics.median(others) if waits.excess and others else 0.0
        most = lacks.get(waits.rank, 0.0) - usual
    return max(0.0, min(most, waits.share))


def lacks_cpus(rank: RankSnapshot) -> bool:
    """Whether *rank* lacks CPUs for so much of its steps that ZM605 reports it."""
    return rank.pressure is not None and rank.pressure.held_cpu_wait_ratio >= CPU_WAIT.warning


def cpu_lack(rank: RankSnapshot) -> float:
    """The share of the last steps in which *rank* had no CPU, at most that of ZM605; 0 without it."""
    if rank.pressure is None or not lacks_cpus(rank):
        return 0.0
    return min(rank.pressure.cpu_wait_ratio, rank.pressure.minute_cpu_wait_ratio)
