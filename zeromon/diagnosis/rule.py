"""What a rule is: one decorated function of a run, and one page with its code. Pure.

::

    @rule("ZM320")
    def loader_is_slow(run: RunSnapshot) -> Iterable[Match]:
        \"\"\"Steps wait for their batches.\"\"\"
        ...
        text = f"{human_seconds(waits)} a step wait for the next batch"
        yield Match(text, rank.rank, waits=Waits(waits / rank.step_seconds, AVOIDABLE))

The function stands in the module of its family in :mod:`zeromon.diagnosis.rules`, and the page beside
that module in ``ZM320.md``. Nothing else names the rule.
"""

import statistics
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from zeromon.diagnosis.settings import Remaining, remaining
from zeromon.focus import is_running_out, pool_of
from zeromon.levels import CPU_WAIT, Level
from zeromon.snapshot import Finding, RankSnapshot, Remedy, RunSnapshot, Severity

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
    """Share of a step that a lack of CPUs may explain, at most all of *waits*.

    A thread that sleeps or waits for a collective is not runnable, so the kernel's time on a run queue
    is that of threads which lack a CPU: an upper bound of what the lack adds to a step. A finding is
    judged by what is left of its waiting time; ZM605 alone says how large the lack is.
    """
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


class Match(NamedTuple):
    """One place where a rule applies."""

    text: str
    """The evidence, with the figures of this run."""
    rank: int = -1
    """-1: the whole run."""
    remedy: Remedy | None = None
    severity: Severity | None = None
    """None: that of the rule."""
    waits: Waits | None = None
    """The waiting time that the match is about: it decides the severity, less what lacks CPUs."""


Function = Callable[[RunSnapshot], Iterable[Match]]


@dataclass(frozen=True, slots=True)
class Rule:
    """A function that looks for one problem, and what all its findings have in common."""

    code: str
    """The code of its page: ``zeromon rule CODE``."""
    severity: Severity
    """Where a match names none."""
    function: Function

    @property
    def name(self) -> str:
        """The name of the function, which is also the name on the page."""
        return self.function.__name__

    def __call__(self, run: RunSnapshot) -> Iterator[Finding]:
        """Returns the findings of this rule about *run*."""
        for match in self.function(run):
            remedy, already = _remaining(run, match)
            severity, text, share = match.severity or self.severity, match.text, None
            if already:
                text += f"; already set: {', '.join(already)}"
            if match.waits is not None:
                share = match.waits.share - explained(run, match.waits)
                severity = match.waits.level.severity_of_cost(share)
            yield Finding(
                rule=self.name, code=self.code, severity=severity, rank=match.rank, text=text,
                remedy=remedy, share=share,
            )  # fmt: skip


def _remaining(run: RunSnapshot, match: Match) -> Remaining:
    """The remedy of *match* without what its rank, or for the whole run the first one, has set.

    None where it takes more of a memory that is running out.
    """
    rank = next((r for r in run.ranks if match.rank in (r.rank, -1)), None)
    if match.remedy is None or rank is None:
        return Remaining(match.remedy, ())
    if match.remedy.takes is not None and is_running_out(
        run.ranks, pool_of(rank, match.remedy.takes)
    ):
        return Remaining(None, ())
    return remaining(match.remedy, rank)


def rule(code: str, *, severity: Severity = Severity.INFO) -> Callable[[Function], Rule]:
    """Makes a rule of a function. *severity*: that of a match that names none and waits for nothing."""
    return lambda function: Rule(code, severity, function)
