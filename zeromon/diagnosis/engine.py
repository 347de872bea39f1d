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
    if any(rank.on_virtual_device for rank in run.ranks):
        findings = (f for f in findings if f.rule not in _OF_VALUES | _OF_HOST)
    return _by_severity(findings)


_OF_VALUES = {"not_finite", "grad_norm_spikes", "overflow_storm", "initial_parameters_differ"}
"""Rules on what a device computes: a virtual one computes nothing."""
_OF_HOST = {
    "straggler", "slow_link", "distant_node", "device_idle", "launch_bound", "cpu_starved", "data_wait",
    "garbage_collection", "slow_steps", "own_code", "cpu_optimizer_slow", "offload_waits",
    "nodes_apart", "node_silent", "collector_silent", "uneven_work",
}  # fmt: skip
"""Rules on the time of hosts: all ranks of a preflight share the cores of one."""


class FindingHistory:
    """The findings of one run over time: those of a live run do not flap, those of an ended one stay."""

    def __init__(self, standing: Iterable[Finding] = ()) -> None:
        """*standing*: the findings that an earlier collector showed last."""
        self._while_whole = tuple(standing)
        """The findings while every rank lived: what comes later is a consequence of the end."""
        self._held = {(f.rule, f.rank): (f.came, f) for f in self._while_whole}
        """When a finding held last with the severity that is shown, and the finding."""

    def shown(self, run: RunSnapshot, holding_now: Iterable[Finding]) -> tuple[Finding, ...]:
        """Returns what to show of *run*, of which *holding_now* holds; the most urgent first.

        A finding comes at once and goes :data:`LINGER_SECONDS` after it held last. When a rule moves
        to another rank, the finding of the first disappears at once. What was shown while every rank
        lived stays after the end, with the time of the end. Stalls do not: a snapshot says what stalled.
        """
        clock, current = (run.taken_wall, {(f.rule, f.rank): f for f in holding_now})
        # Stalls do not linger: a run that moves again is not stalled (decision 036)
        ceased = {rule for rule, _ in current} | STALLS
        remembered = {
            key: item
            for key, item in self._held.items()
            if key[0] not in ceased and clock - item[0] < LINGER_SECONDS
        }
        for key, finding in current.items():
            previous = self._before(key, current)
            came_at = previous[1].came if previous is not None else clock
            remembered[key] = _hold_severity(previous, replace(finding, came=came_at), clock)
        self._held = remembered
        findings = tuple(finding for _, finding in remembered.values())
        if not run.ended and all(rank.status.alive for rank in run.ranks):
            self._while_whole = findings
            return _by_severity(findings)
        # The first end counts: without the "or", each look would move it
        self._while_whole = tuple(replace(f, gone=f.gone or clock) for f in self._while_whole)
        if run.ended:
            rules = {finding.rule for finding in findings}
            findings = (
                *(replace(finding, gone=clock) for finding in findings),
                # A rule that still holds would be listed twice
                *(f for f in self._while_whole if f.rule not in rules | STALLS),
            )
        return _by_severity(findings)

    def _before(self, key: _Key, current: Container[_Key]) -> tuple[float, Finding] | None:
        """The finding shown of *key*; else the most severe of the ranks that its rule left for it."""
        if key in self._held:
            return self._held[key]
        candidates = [item for k, item in self._held.items() if k[0] == key[0] and k not in current]
        return min(candidates, key=lambda item: item[1].severity.order, default=None)


def _hold_severity(
    prior: tuple[float, Finding] | None, fresh: Finding, clock: float
) -> tuple[float, Finding]:
    """*fresh*, with the severity of *prior* where that is higher and held a moment ago."""
    if prior is None or prior[1].severity.order >= fresh.severity.order or fresh.rule in _EVENTS:
        return clock, fresh
    if clock - prior[0] >= LINGER_SECONDS:
        return clock, fresh
    # The old time: with that of now, a severity would be held for ever
    return prior[0], replace(fresh, severity=prior[1].severity)


def _by_severity(findings: Iterable[Finding]) -> tuple[Finding, ...]:
    return tuple(sorted(findings, key=BY_SEVERITY))
