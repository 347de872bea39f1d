"""What a rule is: one decorated function of a run, and one page with its code. Pure.

::

    @rule("ZM320", severity=Severity.WARNING, waits=True)
    def loader_is_slow(run: RunSnapshot) -> Iterable[Match]:
        \"\"\"Steps wait for their batches.\"\"\"
        ...
        yield Match(f"{human_seconds(waits)} a step wait for the next batch", rank=rank.rank)

The function stands in the module of its family in :mod:`zeromon.diagnosis.rules`, and the page beside
that module in ``ZM320.md``. Nothing else names the rule.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from zeromon.diagnosis.settings import Remaining, remaining
from zeromon.snapshot import Finding, Remedy, RunSnapshot, Severity


class Match(NamedTuple):
    """One place where a rule applies."""

    text: str
    """The evidence, with the figures of this run."""
    rank: int = -1
    """-1: the whole run."""
    remedy: Remedy | None = None
    severity: Severity | None = None
    """None: that of the rule."""


Function = Callable[[RunSnapshot], Iterable[Match]]


@dataclass(frozen=True, slots=True)
class Rule:
    """A function that looks for one problem, and what all its findings have in common."""

    code: str
    """The code of its page: ``zeromon rule CODE``."""
    severity: Severity
    """Where a match names none."""
    waits: bool
    """The rule judges waiting time; without CPUs to run on, that proves nothing."""
    function: Function

    @property
    def name(self) -> str:
        """The name of the function, which is also the name on the page."""
        return self.function.__name__

    def __call__(self, run: RunSnapshot) -> Iterator[Finding]:
        """Returns the findings of this rule about *run*."""
        for match in self.function(run):
            remedy, already = _remaining(run, match)
            yield Finding(
                rule=self.name,
                code=self.code,
                severity=match.severity or self.severity,
                rank=match.rank,
                text=match.text + (f"; already set: {', '.join(already)}" if already else ""),
                remedy=remedy,
            )


def _remaining(run: RunSnapshot, match: Match) -> Remaining:
    """The remedy of *match* without what its rank, or for the whole run the first one, has set."""
    rank = next((r for r in run.ranks if match.rank in (r.rank, -1)), None)
    if match.remedy is None or rank is None:
        return Remaining(match.remedy, ())
    return remaining(match.remedy, rank)


def rule(
    code: str, *, severity: Severity = Severity.INFO, waits: bool = False
) -> Callable[[Function], Rule]:
    """Makes a rule of a function. *severity*: that of a match that names none.

    *waits*: the findings are about waiting time. While ranks lack CPUs they are shown as information.
    """
    return lambda function: Rule(code, severity, waits, function)
