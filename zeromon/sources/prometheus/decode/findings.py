"""Findings, hangs and stragglers from the samples of several ranks, now and over time. Pure."""

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace

from zeromon.diagnosis.pages import page
from zeromon.errors import RuleNotFound
from zeromon.focus import first_failed
from zeromon.readout.text import subject
from zeromon.snapshot import Finding, Hang, HangKind, RankSnapshot, Severity, Straggler
from zeromon.sources.prometheus.client import Line
from zeromon.sources.prometheus.decode.samples import Key, RankSamples
from zeromon.units import human_count


def findings_of(
    facts: Mapping[Key, RankSamples], counts: Mapping[tuple[str, str], int], ranks: int
) -> tuple[Finding, ...]:
    """One finding for each rule and rank; one alone for a rule that holds for all or for many ranks."""
    whose: dict[tuple[str, str], list[int]] = {}
    for key, known in sorted(facts.items()):
        for rule, severity in known.by("finding", "rule", "severity"):
            whose.setdefault((rule, severity), []).append(key.rank)
    found = []
    for (rule, severity), named in whose.items():
        many = max(counts.get((rule, severity), 0), len(named))
        if ranks > 1 and many >= ranks:
            found.append(_finding(rule, severity))
        elif many > _MOST_NAMED:
            some = ", ".join(map(str, named[:_MOST_NAMED]))
            found.append(
                _finding(rule, severity, f" (on {many:,} of {ranks:,} ranks: {some}, ...)")
            )
        else:
            found += [_finding(rule, severity, rank=rank) for rank in named]
    return tuple(sorted(found, key=lambda f: (f.severity.order, f.code, f.rank)))


def with_deaths(findings: Iterable[Finding], ranks: Sequence[RankSnapshot]) -> tuple[Finding, ...]:
    """*findings*, of which those about deaths say what each of *ranks* died of, and in which step."""
    failed = [rank for rank in ranks if rank.failed]
    texts = {r.rank: f"{r.ended} after step {human_count(r.step)}" for r in failed}
    if (first := first_failed(failed)) is not None:
        texts[-1] = f"{subject(first.rank)}{texts[first.rank]}"
    return tuple(
        replace(f, text=texts.get(f.rank, f.text)) if f.rule == "rank_died" else f for f in findings
    )


_MOST_NAMED = 3


def _finding(rule: str, severity: str, more: str = "", rank: int = -1) -> Finding:
    text, code = rule.replace("_", " "), ""
    with suppress(RuleNotFound):  # of another version
        text, code = page(rule).summary, page(rule).code
    return Finding(rule=rule, severity=Severity(severity), text=text + more, rank=rank, code=code)


def hangs_of(facts: Mapping[Key, RankSamples]) -> tuple[Hang, ...]:
    """One hang for each kind, operation and group among the metrics ``zeromon_hang`` of the ranks."""
    roles: dict[tuple[str, ...], dict[str, list[int]]] = {}
    ages: dict[tuple[str, ...], float] = {}
    for key, known in sorted(facts.items()):
        for role, *named in known.by("hang", "role", "kind", "op", "group"):
            hang = tuple(named)
            roles.setdefault(hang, {}).setdefault(role, []).append(key.rank)
            age = known.number("collective_in_flight_seconds") or 0.0
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


def stragglers_of(
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


def history_of(lines: Sequence[Line], step: float) -> list[Finding]:
    """When each finding appeared and disappeared, to the resolution of *step* seconds.

    A finding that holds at the newest moment has not disappeared.
    """
    newest = max((line.values[-1][0] for line in lines if line.values), default=0.0)
    found = []
    for line in lines:
        rule, severity = line.labels.get("rule", ""), line.labels.get("severity", "")
        for came, gone in _spans([at for at, _ in line.values], 1.5 * step):
            one = _finding(rule, severity)
            found.append(
                Finding(rule=rule, rank=-1, code=one.code, severity=one.severity, text=one.text,
                             came=came, gone=None if gone >= newest else gone + step)
            )  # fmt: skip
    return sorted(found, key=lambda known: (known.came, known.rule))


def _spans(moments: Sequence[float], most: float) -> Iterable[tuple[float, float]]:
    """First and last of each series of moments that are at most *most* apart."""
    begin = 0
    for at in range(1, len(moments) + 1):
        if at == len(moments) or moments[at] - moments[at - 1] > most:
            yield moments[begin], moments[at - 1]
            begin = at
