"""Applies all rules to a snapshot of a run, and keeps the findings from flapping. Pure."""

from collections.abc import Iterable
from operator import attrgetter

from zeromon.diagnosis.rules import all_rules
from zeromon.readout.text import STALLS
from zeromon.snapshot import Finding, RunSnapshot

BY_SEVERITY = attrgetter("order")
LINGER_NS = 10_000_000_000
"""How long a finding stays after its rule has ceased to hold; at the edge of a rule it would flap."""


def advise(run: RunSnapshot) -> tuple[Finding, ...]:
    """All findings about *run*, the most urgent first."""
    findings = (finding for rule in all_rules() for finding in rule(run))
    return tuple(sorted(findings, key=BY_SEVERITY))


class FindingDebouncer:
    """Shows a finding as soon as it holds, and removes it when it has not held for a while."""

    def __init__(self) -> None:
        self._recent: dict[tuple[str, int], tuple[int, Finding]] = {}
        """Rule and rank -> when the finding held last, and the finding."""

    def shown(self, holding: Iterable[Finding], now_ns: int) -> tuple[Finding, ...]:
        """*holding*, and what held less than :data:`LINGER_NS` ago, the most urgent first.

        A rule that holds now for another rank is not shown for the rank that it held for before. A run
        that makes progress again is not called stalled any more.
        """
        now = {(finding.rule, finding.rank): (now_ns, finding) for finding in holding}
        rules = {rule for rule, _ in now}
        before = {
            (rule, rank): item
            for (rule, rank), item in self._recent.items()
            if rule not in rules and rule not in STALLS and now_ns - item[0] < LINGER_NS
        }
        self._recent = before | now
        return tuple(sorted((finding for _, finding in self._recent.values()), key=BY_SEVERITY))
