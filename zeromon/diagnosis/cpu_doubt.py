"""How much of a waiting time a lack of CPUs may explain. Pure.

A thread that sleeps or waits for a collective is not runnable, so the kernel's time on a run queue is
that of threads which lack a CPU, and an upper bound of what the lack adds to a step. A finding is judged
by what is left of its waiting time.
"""

import statistics
from typing import NamedTuple

from zeromon.levels import CPU_WAIT, Level
from zeromon.snapshot import RankSnapshot, RunSnapshot
from zeromon.units import human_ratio

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
    is_work: bool = False
    """The training thread works meanwhile: a lack of CPUs makes each part of a step longer alike."""


def explained(run: RunSnapshot, waits: Waits) -> float:
    """The share of a step that a lack of CPUs may explain, at most all; 0 where it is not noticeable."""
    if waits.is_work:
        return 0.0
    lacks = {rank.rank: _lack(rank) for rank in run.ranks}
    if waits.rank == ANY:
        most = max(lacks.values(), default=0.0)
    else:
        others = [lack for rank, lack in lacks.items() if rank != waits.rank]
        usual = statistics.median(others) if waits.excess and others else 0.0
        most = lacks.get(waits.rank, 0.0) - usual
    return min(most, waits.share) if most >= min(CPU_WAIT.warning, waits.share / 2) else 0.0


def doubt(share: float, explains: float) -> str:
    """The end of a finding about *share* of a step; "" where a lack of CPUs explains nothing."""
    if explains <= 0:
        return ""
    amount = "all of it" if explains >= share else f"{human_ratio(explains)} of a step"
    return f"; a lack of CPUs may explain {amount} (ZM605)"


def _lack(rank: RankSnapshot) -> float:
    """The largest share of ten seconds of the last minute in which *rank* had no CPU; 0 if unknown."""
    pressure = rank.pressure
    return max(pressure.cpu_wait_ratio, pressure.most_cpu_wait_ratio) if pressure else 0.0
