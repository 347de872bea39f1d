"""The events between two snapshots of a run, as log entries with a time. Pure."""

import os
import stat
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec

from zeromon.errors import ZeromonError
from zeromon.readout.text import capture_text, finding_text, has_died, numbered, subject
from zeromon.snapshot import CaptureState, Finding, RankSnapshot, RunSnapshot, Severity
from zeromon.storage.run_store import writing
from zeromon.tui.line import clean
from zeromon.units import human_count

_MOST_RANKS = 8


@dataclass(frozen=True, slots=True)
class LogEntry:
    """One event of the run."""

    wall: float
    """Seconds since the epoch."""
    text: str
    tone: str = ""


def changes(before: RunSnapshot | None, after: RunSnapshot) -> list[LogEntry]:
    """The events between *before* and *after*; the whole state where *before* is None."""
    events = [
        *_of_run(before, after), *_of_ranks(before, after), *_of_findings(before, after),
        *_of_capture(before, after),
    ]  # fmt: skip
    return [LogEntry(after.taken_wall, clean(text), tone) for text, tone in events]


def opening(first: RunSnapshot, known: Iterable[Finding]) -> tuple[LogEntry, ...]:
    """The entries for a first snapshot; findings with their time where the record has it."""
    recorded = _past(known)
    now = changes(None, replace(first, findings=()) if recorded else first)
    return tuple(sorted([*recorded, *now], key=lambda entry: entry.wall))


def _past(known: Iterable[Finding]) -> list[LogEntry]:
    found, made = list(known), []
    moved = {(f.rule, f.gone) for f in found} & {(f.rule, f.came) for f in found if _moves(f)}
    for one in found:
        if (one.rule, one.came) not in moved:
            made.append(
                LogEntry(
                    one.came, clean(f"{one.code} {finding_text(one)}"), _TONES.get(one.severity, "")
                )
            )
        if one.gone is not None and (one.rule, one.gone) not in moved:
            made.append(LogEntry(one.gone, clean(f"{one.code} {_no_longer(one)}"), "dim"))
    return made


_TONES = {Severity.CRITICAL: "bad", Severity.WARNING: "warn"}
_Events = Iterator[tuple[str, str]]


def _of_run(before: RunSnapshot | None, after: RunSnapshot) -> _Events:
    for old, new in (
        ("" if before is None else before.note, after.note),
        ("" if before is None else before.history_note, after.history_note),
    ):
        if new and new != old:
            yield new, "warn"
    if before is not None and after.ended and not before.ended:
        yield "the run has ended", "bold"


def _of_ranks(before: RunSnapshot | None, after: RunSnapshot) -> _Events:
    old = {rank.rank: rank for rank in before.ranks} if before is not None else {}
    fresh = [rank for rank in after.ranks if rank.rank not in old]
    if fresh:
        word = "follows" if before is None else "new:"
        yield f"{word} {_named(fresh)}, {fresh[0].strategy} on {after.node}", ""
    same: dict[str, list[RankSnapshot]] = {}
    for rank in after.ranks:
        if (
            rank.ended or rank.errors or rank.dropped or rank.unseen
        ):  # most ranks have nothing to report
            for text in _of_rank(old.get(rank.rank), rank):
                same.setdefault(text, []).append(rank)
    for text, ranks in same.items():
        failed = has_died(after) and any(rank.failed for rank in ranks) and text.startswith("ended")
        yield f"{_named(ranks)} {text}", "bad" if failed else "warn" if "errors" in text else ""


def _of_rank(old: RankSnapshot | None, new: RankSnapshot) -> Iterator[str]:
    if new.ended and (old is None or not old.ended):
        how = "the agent has left" if new.detached and new.alive else f"ended: {new.ended}"
        yield how + (f"; {new.exception}" if new.exception else "")
    errors = new.errors - (old.errors if old is not None else 0)
    if errors > 0:
        yield f"agent: {human_count(errors)} errors in hooks; training is not affected"
    dropped = new.dropped - (old.dropped if old is not None else 0)
    if dropped > 0:
        yield f"agent: {human_count(dropped)} records were overwritten before they were read"
    if new.unseen and (old is None or new.unseen != old.unseen):
        names = ", ".join(new.unseen)
        yield f"agent: this version of the framework lacks {names}: not observed"


def _named(ranks: list[RankSnapshot]) -> str:
    return numbered([rank.rank for rank in ranks], _MOST_RANKS)


def _of_findings(before: RunSnapshot | None, after: RunSnapshot) -> _Events:
    old = {_key(f): f for f in before.findings} if before is not None else {}
    new = {_key(f): f for f in after.findings}
    came = [finding for key, finding in new.items() if key not in old]
    gone = [finding for key, finding in old.items() if key not in new]
    moved = {f.rule for f in gone} & {f.rule for f in came if _moves(f)}
    for finding in came:
        if finding.rule not in moved:
            yield f"{finding.code} {finding_text(finding)}", _TONES.get(finding.severity, "")
    for finding in gone:
        if finding.rule not in moved:
            yield f"{finding.code} {_no_longer(finding)}", "dim"


def _moves(finding: Finding) -> bool:
    """Returns whether a finding may move from rank to rank without an entry.

    Many rules name the worst rank, which changes from snapshot to snapshot.
    """
    return finding.severity != Severity.CRITICAL


def _no_longer(finding: Finding) -> str:
    return f"{subject(finding.rank)}no longer: {finding.rule.replace('_', ' ')}"


def _key(finding: Finding) -> tuple[str, int]:
    return finding.rule, finding.rank


def _of_capture(before: RunSnapshot | None, after: RunSnapshot) -> _Events:
    made, old = after.capture, before.capture if before is not None else None
    if made is None or (old is not None and (old.number, old.state) == (made.number, made.state)):
        return
    if made.state == CaptureState.DONE:
        yield f"trace {made.number}: {len(made.files)} files in {made.folder}", "good"
    elif made.state == CaptureState.FAILED:
        yield f"trace {made.number} failed: {made.note}", "warn"
    elif made.is_open:
        yield capture_text(made, max((rank.step for rank in after.ranks), default=0)), ""


# ---- moments that the user marked ---------------------------------------------------------------

_MOST_BYTES = 1 << 20
_MOST_TEXT = 200


@dataclass(frozen=True, slots=True)
class Mark:
    """One marked moment."""

    wall: float
    """Seconds since the epoch."""
    step: int
    text: str


_MARK = msgspec.json.Decoder(Mark)


class Marks:
    """The marks of one run. *folder*: the run's folder in the store; None for a run elsewhere."""

    def __init__(self, folder: Path | None) -> None:
        self.path = folder / "marks.jsonl" if folder is not None and folder.is_dir() else None
        self.all: list[Mark] = sorted(_read(self.path), key=lambda mark: mark.wall)

    def add(self, mark: Mark) -> bool:
        """Adds *mark*; returns whether it was written to disk."""
        mark = Mark(mark.wall, mark.step, clean(mark.text)[:_MOST_TEXT])
        self.all = sorted([*self.all, mark], key=lambda other: other.wall)
        if self.path is None:
            return False
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW
        try:
            with writing(self.path.parent) as folder:
                descriptor = os.open(folder / self.path.name, flags, 0o600)
        except (OSError, ZeromonError):
            return False
        with os.fdopen(descriptor, "wb") as file:
            file.write(msgspec.json.encode(mark) + b"\n")
        return True


def _read(path: Path | None) -> Iterator[Mark]:
    """The marks in a file; skips lines that are no mark."""
    if path is None:
        return
    with suppress(OSError):
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
        with os.fdopen(descriptor, "rb") as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                return
            content = file.read(_MOST_BYTES)
        for line in content.splitlines():
            with suppress(ValueError, RecursionError):
                mark = _MARK.decode(line)
                yield replace(mark, text=clean(mark.text)[:_MOST_TEXT])
