"""What happened between two pictures of a run, as notes with a time. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from zeromon.capture import is_open, progress
from zeromon.record import KnownFinding
from zeromon.snapshot import Finding, RankSnapshot, RunSnapshot
from zeromon.tui.line import clean
from zeromon.units import human_count

_MOST_RANKS = 8


@dataclass(frozen=True, slots=True)
class Note:
    """One thing that happened."""

    wall: float
    """Seconds since the epoch."""
    text: str
    tone: str = ""


def changes(before: RunSnapshot | None, after: RunSnapshot) -> list[Note]:
    """What *after* says that *before* did not; of a first picture, all that stands."""
    found = [
        *_of_run(before, after), *_of_ranks(before, after), *_of_findings(before, after),
        *_of_capture(before, after),
    ]  # fmt: skip
    return [Note(after.taken_wall, clean(text), tone) for text, tone in found]


def opening(first: RunSnapshot, known: Iterable[KnownFinding]) -> tuple[Note, ...]:
    """What stands in a first picture; findings with when they came, where the record knows it."""
    of_record = _past(known)
    said = changes(None, replace(first, findings=()) if of_record else first)
    return tuple(sorted([*of_record, *said], key=lambda note: note.wall))


def _past(known: Iterable[KnownFinding]) -> list[Note]:
    found, made = list(known), []
    passed_on = {(f.rule, f.gone) for f in found} & {(f.rule, f.came) for f in found if _passes(f)}
    for one in found:
        who = f"rank {one.rank}: " if one.rank >= 0 else ""
        if (one.rule, one.came) not in passed_on:
            made.append(
                Note(one.came, clean(f"{one.code} {who}{one.text}"), _TONES.get(one.severity, ""))
            )
        if one.gone is not None and (one.rule, one.gone) not in passed_on:
            gone = f"{one.code} {who}no longer: {one.rule.replace('_', ' ')}"
            made.append(Note(one.gone, clean(gone), "dim"))
    return made


_TONES = {"critical": "bad", "warning": "warn"}
_Said = Iterator[tuple[str, str]]


def _of_run(before: RunSnapshot | None, after: RunSnapshot) -> _Said:
    for old, new in (
        ("" if before is None else before.note, after.note),
        ("" if before is None else before.history_note, after.history_note),
    ):
        if new and new != old:
            yield new, "warn"
    if before is not None and after.ended and not before.ended:
        yield "the run has ended", "bold"


def _of_ranks(before: RunSnapshot | None, after: RunSnapshot) -> _Said:
    old = {rank.rank: rank for rank in before.ranks} if before is not None else {}
    fresh = [rank for rank in after.ranks if rank.rank not in old]
    if fresh:
        said = "follows" if before is None else "new:"
        yield f"{said} {_named(fresh)}, {fresh[0].strategy} on {after.node}", ""
    same: dict[str, list[RankSnapshot]] = {}
    for rank in after.ranks:
        if rank.ended or rank.errors or rank.dropped or rank.unseen:  # of most there is nothing
            for text in _of_rank(old.get(rank.rank), rank):
                same.setdefault(text, []).append(rank)
    for text, ranks in same.items():
        failed = any(rank.failed for rank in ranks) and text.startswith("ended")
        yield f"{_named(ranks)} {text}", "bad" if failed else "warn" if "errors" in text else ""


def _of_rank(old: RankSnapshot | None, new: RankSnapshot) -> Iterator[str]:
    if new.ended and (old is None or not old.ended):
        yield f"ended: {new.ended}" + (f"; {new.exception}" if new.exception else "")
    errors = new.errors - (old.errors if old is not None else 0)
    if errors > 0:
        yield f"agent: {human_count(errors)} errors in hooks; training is not touched by them"
    dropped = new.dropped - (old.dropped if old is not None else 0)
    if dropped > 0:
        yield f"agent: {human_count(dropped)} records were overwritten before they were read"
    if new.unseen and (old is None or new.unseen != old.unseen):
        yield f"agent: not in this version of the framework, so not watched: {', '.join(new.unseen)}"


def _named(ranks: list[RankSnapshot]) -> str:
    names = ", ".join(str(rank.rank) for rank in ranks[:_MOST_RANKS])
    more = len(ranks) - _MOST_RANKS
    return f"rank{'s' * (len(ranks) > 1)} {names}" + (f" and {more} more" if more > 0 else "")


def _of_findings(before: RunSnapshot | None, after: RunSnapshot) -> _Said:
    old = {_key(f): f for f in before.findings} if before is not None else {}
    new = {_key(f): f for f in after.findings}
    came = [finding for key, finding in new.items() if key not in old]
    gone = [finding for key, finding in old.items() if key not in new]
    passed_on = {f.rule for f in gone} & {f.rule for f in came if _passes(f)}
    for finding in came:
        if finding.rule not in passed_on:
            said = f"{finding.code} {_whose(finding)}{finding.text}"
            yield said, _TONES.get(finding.severity, "")
    for finding in gone:
        if finding.rule not in passed_on:
            said = f"{finding.code} {_whose(finding)}no longer: {finding.rule.replace('_', ' ')}"
            yield said, "dim"


def _passes(finding: Finding | KnownFinding) -> bool:
    """Whether it is not news that a rule holds for another rank than the moment before.

    Many rules name the worst rank, and which one that is changes from picture to picture.
    """
    return finding.severity != "critical"


def _key(finding: Finding) -> tuple[str, int]:
    return finding.rule, finding.rank


def _whose(finding: Finding) -> str:
    return f"rank {finding.rank}: " if finding.rank >= 0 else ""


def _of_capture(before: RunSnapshot | None, after: RunSnapshot) -> _Said:
    made, old = after.capture, before.capture if before is not None else None
    if made is None or (old is not None and (old.number, old.state) == (made.number, made.state)):
        return
    if made.state == "done":
        yield f"trace {made.number}: {len(made.files)} files in {made.folder}", "good"
    elif made.state == "failed":
        yield f"trace {made.number} failed: {made.note}", "warn"
    elif is_open(made):
        yield progress(made, max((rank.step for rank in after.ranks), default=0)), ""
