"""Findings, hangs and stragglers from the samples of several ranks, now and over time. Pure."""

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace

from zeromon.base.errors import RuleNotFound
from zeromon.base.units import human_count
from zeromon.diagnosis.pages import find_page
from zeromon.readout.text import rank_prefix
from zeromon.snapshot import Finding, Hang, HangKind, RankSnapshot, Severity, Straggler
from zeromon.snapshot.focus import first_failed
from zeromon.sources.prometheus.client import Line
from zeromon.sources.prometheus.decode.samples import Key, RankSamples


def findings_of(
    facts: Mapping[Key, RankSamples], counts: Mapping[tuple[str, str], int], ranks: int
) -> tuple[Finding, ...]:
    """One finding for each rule and rank; one alone for a rule that holds for all or for many ranks."""
    ranks_by_rule: dict[tuple[str, str], list[int]] = {}
    for key, samples in sorted(facts.items()):
        for rule, severity in samples.by("finding", "rule", "severity"):
            ranks_by_rule.setdefault((rule, severity), []).append(key.rank)
    findings = []
    for (rule, severity), named in ranks_by_rule.items():
        count = max(counts.get((rule, severity), 0), len(named))
        if ranks > 1 and count >= ranks:
            findings.append(_finding_of(rule, severity))
        elif count > _MAX_NAMED:
            listed = ", ".join(map(str, named[:_MAX_NAMED]))
            findings.append(
                _finding_of(rule, severity, f" (on {count:,} of {ranks:,} ranks: {listed}, ...)")
            )
        else:
            findings += [_finding_of(rule, severity, rank=rank) for rank in named]
    return tuple(sorted(findings, key=lambda f: (f.severity.order, f.code, f.rank)))


def with_deaths(findings: Iterable[Finding], ranks: Sequence[RankSnapshot]) -> tuple[Finding, ...]:
    """*findings*, of which those about deaths say what each of *ranks* died of, and in which step."""
    failed = [rank for rank in ranks if rank.failed]
    fates = {r.rank: f"{r.ended} after step {human_count(r.step)}" for r in failed}
    if (first_dead := first_failed(failed)) is not None:
        fates[-1] = f"{rank_prefix(first_dead.rank)}{fates[first_dead.rank]}"
    return tuple(
        replace(f, text=fates.get(f.rank, f.text)) if f.rule == "rank_died" else f for f in findings
    )


_MAX_NAMED = 3


def _finding_of(rule: str, severity: str, extra: str = "", rank: int = -1) -> Finding:
    title, code = rule.replace("_", " "), ""
    with suppress(RuleNotFound):  # of another version
        title, code = find_page(rule).summary, find_page(rule).code
    return Finding(rule=rule, severity=Severity(severity), text=title + extra, rank=rank, code=code)


def hangs_of_ranks(facts: Mapping[Key, RankSamples]) -> tuple[Hang, ...]:
    """One hang for each kind, operation and group among the metrics ``zeromon_hang`` of the ranks."""
    roles: dict[tuple[str, ...], dict[str, list[int]]] = {}
    ages: dict[tuple[str, ...], float] = {}
    for key, samples in sorted(facts.items()):
        for role, *named in samples.by("hang", "role", "kind", "op", "group"):
            hang = tuple(named)
            roles.setdefault(hang, {}).setdefault(role, []).append(key.rank)
            age = samples.number("collective_in_flight_seconds") or 0.0
            ages[hang] = max(age, ages.get(hang, 0.0))
    return tuple(
        Hang(
            kind=HangKind(kind), op=op or "a collective", group=group or "a group", group_id="",
            sequence=-1, nbytes=-1, seconds=ages[kind, op, group], waiting=tuple(by.get("waiting", ())),
            elsewhere=(), calls=(), missing=tuple(by.get("missing", ())),
            dead=tuple(by.get("dead", ())),
        )
        for (kind, op, group), by in roles.items()
    )  # fmt: skip


def stragglers_of_findings(
    ranks: Iterable[RankSnapshot], findings: Iterable[Finding]
) -> tuple[Straggler, ...]:
    """The ranks that have the finding ``straggler``."""
    late = {finding.rank for finding in findings if finding.rule == "straggler"}
    return tuple(
        Straggler(
            rank=rank.rank, late_seconds=rank.late_seconds or 0.0, since_step=0, phases=(),
            share=(rank.late_seconds or 0.0) / rank.step_seconds if rank.step_seconds else 0.0,
            longer_seconds=0.0,
        )
        for rank in ranks
        if rank.rank in late
    )  # fmt: skip


def history_of(matrix: Sequence[Line], step: float) -> list[Finding]:
    """When each finding appeared and disappeared, to the resolution of *step* seconds.

    A finding that holds at the newest moment has not disappeared.
    """
    newest_wall = max((series.values[-1][0] for series in matrix if series.values), default=0.0)
    findings = []
    for series in matrix:
        rule, severity = series.labels.get("rule", ""), series.labels.get("severity", "")
        for appeared, vanished in _spans_of_moments([at for at, _ in series.values], 1.5 * step):
            base = _finding_of(rule, severity)
            findings.append(
                Finding(rule=rule, rank=-1, code=base.code, severity=base.severity, text=base.text,
                             came=appeared, gone=None if vanished >= newest_wall else vanished + step)
            )  # fmt: skip
    return sorted(findings, key=lambda finding: (finding.came, finding.rule))


def _spans_of_moments(times: Sequence[float], max_gap: float) -> Iterable[tuple[float, float]]:
    """First and last of each series of moments that are at most *max_gap* apart."""
    start = 0
    for at in range(1, len(times) + 1):
        if at == len(times) or times[at] - times[at - 1] > max_gap:
            yield times[start], times[at - 1]
            start = at
