"""What a person should know about a run. A rule is one function, and one line in :data:`RULES`.

Pure: a snapshot in, findings out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from zeromon.state import Finding, RankSnapshot, RunSnapshot
from zeromon.units import human_bytes, human_ratio, human_seconds

Rule = Callable[[RunSnapshot], Iterable[Finding]]

_SEVERITIES = ("critical", "warning", "info")
_HANG_NS = 10_000_000_000
_LEAST_STEPS = 10


def oom_risk(run: RunSnapshot) -> Iterable[Finding]:
    """A memory is nearly full, or will be."""
    for rank in run.ranks:
        for risk in rank.risks:
            if risk.ratio < 0.5 or not rank.alive:
                continue
            severity = "critical" if risk.ratio >= 0.8 else "warning"
            when = f", full in about {risk.steps_left:.0f} steps" if risk.steps_left else ""
            yield Finding(
                rule="oom_risk",
                severity=severity,
                rank=rank.rank,
                text=f"{risk.pool} memory: {human_bytes(risk.used_bytes)} of "
                f"{human_bytes(risk.capacity_bytes)} ({risk.cause}{when})",
            )


def exposed_communication(run: RunSnapshot) -> Iterable[Finding]:
    """The run waits for its communication. Said once, for the rank that waits most."""
    timed = [r for r in run.ranks if r.exposed_ratio is not None and r.steps >= _LEAST_STEPS]
    if not timed:
        return
    worst = max(timed, key=lambda r: r.exposed_ratio or 0.0)
    share = worst.exposed_ratio or 0.0
    if share < 0.10:
        return
    unit = max(worst.units, key=lambda u: u.exposed_seconds, default=None)
    where = f"; most in {unit.fqn}" if unit is not None and unit.exposed_seconds > 0 else ""
    yield Finding(
        rule="exposed_communication",
        severity="warning" if share >= 0.25 else "info",
        rank=worst.rank,
        text=f"{human_ratio(share)} of a step ({human_seconds(worst.exposed_seconds)}) waits for "
        f"communication{where}",
    )


def poor_overlap(run: RunSnapshot) -> Iterable[Finding]:
    """Communication is hardly hidden, and it matters."""
    for rank in run.ranks:
        overlap, share = rank.overlap_ratio, rank.exposed_ratio or 0.0
        if overlap is not None and overlap < 0.3 and share >= 0.15 and rank.steps >= _LEAST_STEPS:
            yield Finding(
                rule="poor_overlap",
                severity="info",
                rank=rank.rank,
                text=f"{human_ratio(overlap) if overlap >= 0.0005 else 'nothing'} of the "
                "communication is hidden behind compute",
            )
            return


def rank_died(run: RunSnapshot) -> Iterable[Finding]:
    """A rank ended otherwise than by finishing."""
    for rank in run.ranks:
        if rank.failed:
            yield Finding(
                rule="rank_died",
                severity="critical",
                rank=rank.rank,
                text=f"{rank.ended} after step {rank.step}, {doing(rank)}",
            )


def in_flight_too_long(run: RunSnapshot) -> Iterable[Finding]:
    """A collective does not end."""
    for rank in run.ranks:
        if not rank.alive or not rank.in_flight:
            continue
        oldest = rank.in_flight[0]
        age = run.taken_ns - oldest.issued_ns
        usual = 10 * (rank.step_seconds or 0.0) * 1e9
        if age > max(_HANG_NS, usual):
            yield Finding(
                rule="collective_in_flight",
                severity="critical",
                rank=rank.rank,
                text=f"{oldest.op} #{oldest.sequence} of group {oldest.group} has not ended for "
                f"{human_seconds(age / 1e9)}",
            )


def record_incomplete(run: RunSnapshot) -> Iterable[Finding]:
    """What zeromon itself could not see."""
    for rank in run.ranks:
        if rank.dropped:
            yield Finding(
                rule="events_dropped",
                severity="warning",
                rank=rank.rank,
                text=f"{rank.dropped} records were overwritten before they were read",
            )
        if rank.errors:
            yield Finding(
                rule="agent_errors",
                severity="warning",
                rank=rank.rank,
                text=f"{rank.errors} hook calls failed; training is not affected",
            )
        unknown, all_calls = sum(rank.unattributed.values()), sum(c.count for c in rank.collectives)
        if unknown > 0.05 * (all_calls + unknown):
            yield Finding(
                rule="untimed_collectives",
                severity="info",
                rank=rank.rank,
                text=f"{unknown} of {all_calls + unknown} collectives were issued from C++ and are "
                "counted, not timed",
            )


RULES: tuple[Rule, ...] = (
    rank_died,
    oom_risk,
    in_flight_too_long,
    exposed_communication,
    poor_overlap,
    record_incomplete,
)


def advise(run: RunSnapshot) -> tuple[Finding, ...]:
    """All findings, the gravest first."""
    found = [finding for rule in RULES for finding in rule(run)]
    return tuple(sorted(found, key=lambda f: (_SEVERITIES.index(f.severity), f.rank)))


def doing(rank: RankSnapshot) -> str:
    """What a rank was last seen doing: ``in backward, unit layers.3, all_gather #451 in flight``."""
    parts = [f"in {rank.phase}" if rank.phase != "other" else "between phases"]
    if rank.unit:
        parts.append(f"unit {rank.unit}")
    if rank.in_flight:
        oldest = rank.in_flight[0]
        parts.append(f"{oldest.op} #{oldest.sequence} of group {oldest.group} in flight")
    return ", ".join(parts)
