"""Applies all rules to a run, keeps their findings from flapping, and remembers them. Pure."""

from collections.abc import Container, Iterable
from dataclasses import replace
from operator import attrgetter

from zeromon.diagnosis.rules import all_rules
from zeromon.readout.text import STALLS
from zeromon.snapshot import Finding, RunSnapshot

BY_SEVERITY = attrgetter("order")
LINGER_SECONDS = 10.0
"""How long a finding, or its severity, stays after it ceased to hold; else it would flap."""

_EVENTS = STALLS | {"rank_died"}
"""Rules about what has happened, which no threshold makes flap."""

_Key = tuple[str, int]
"""Rule and rank."""


def advise(run: RunSnapshot) -> tuple[Finding, ...]:
    """Returns all findings about *run*, the most urgent first."""
    findings = (finding for rule in all_rules() for finding in rule(run))
    return _by_severity(findings)


class FindingMemory:
    """The findings of one run over time: those of a live run do not flap, those of an ended one stay."""

    def __init__(self, standing: Iterable[Finding] = ()) -> None:
        """*standing*: the findings that an earlier collector showed last."""
        self._while_whole = tuple(standing)
        """The findings while every rank lived: what comes later is a consequence of the end."""
        self._held = {(one.rule, one.rank): (one.came, one) for one in self._while_whole}
        """When a finding held last with the severity that is shown, and the finding."""

    def shown(self, run: RunSnapshot, holding: Iterable[Finding]) -> tuple[Finding, ...]:
        """Returns what to show of *run*, of which *holding* holds now; the most urgent first.

        A finding comes at once and goes :data:`LINGER_SECONDS` after it held last. A rule that holds now
        for another rank is not shown for the rank before. What was shown while every rank lived stays
        after the end, with the time of the end. Stalls do not: a snapshot says what stalled to its end.
        """
        wall, now = run.taken_wall, {(finding.rule, finding.rank): finding for finding in holding}
        ceased = {rule for rule, _ in now} | STALLS
        held = {
            key: item
            for key, item in self._held.items()
            if key[0] not in ceased and wall - item[0] < LINGER_SECONDS
        }
        for key, finding in now.items():
            before = self._before(key, now)
            came = before[1].came if before is not None else wall
            held[key] = _steady(before, replace(finding, came=came), wall)
        self._held = held
        found = tuple(finding for _, finding in held.values())
        if not run.ended and all(rank.alive for rank in run.ranks):
            self._while_whole = found
            return _by_severity(found)
        self._while_whole = tuple(replace(f, gone=f.gone or wall) for f in self._while_whole)
        if run.ended:
            rules = {finding.rule for finding in found}
            found = (
                *(replace(finding, gone=wall) for finding in found),
                *(f for f in self._while_whole if f.rule not in rules | STALLS),
            )
        return _by_severity(found)

    def _before(self, key: _Key, now: Container[_Key]) -> tuple[float, Finding] | None:
        """The finding shown of *key*; else the most severe of the ranks that its rule left for it."""
        if key in self._held:
            return self._held[key]
        left = [
            item for other, item in self._held.items() if other[0] == key[0] and other not in now
        ]
        return min(left, key=lambda item: item[1].severity.order, default=None)


def _steady(
    shown: tuple[float, Finding] | None, now: Finding, wall: float
) -> tuple[float, Finding]:
    """*now*, with the severity that is *shown* where that is higher and held a moment ago."""
    if shown is None or shown[1].severity.order >= now.severity.order or now.rule in _EVENTS:
        return wall, now
    if wall - shown[0] >= LINGER_SECONDS:
        return wall, now
    return shown[0], replace(now, severity=shown[1].severity)


def _by_severity(findings: Iterable[Finding]) -> tuple[Finding, ...]:
    return tuple(sorted(findings, key=BY_SEVERITY))
