"""The events between two snapshots of a run, as log entries with a time. Pure."""

import os
import stat
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec

from zeromon.base.errors import ZeromonError
from zeromon.base.units import human_count
from zeromon.readout.text import capture_text, finding_text, has_died, numbered_ranks, rank_prefix
from zeromon.snapshot import Finding, RankSnapshot, RunSnapshot, Severity
from zeromon.snapshot.step import CaptureState
from zeromon.storage.run_store import open_run_folder
from zeromon.tui.line import clean

_MAX_LISTED_RANKS = 8


@dataclass(frozen=True, slots=True)
class LogEntry:
    """One event of the run."""

    wall: float
    """Seconds since the epoch."""
    text: str
    tone: str = ""


def events_between_snapshots(previous: RunSnapshot | None, run: RunSnapshot) -> list[LogEntry]:
    """The events between *previous* and *run*; the whole state where *previous* is None."""
    events = [
        *_run_events(previous, run), *_rank_events(previous, run), *_finding_events(previous, run),
        *_capture_events(previous, run),
    ]  # fmt: skip
    return [LogEntry(run.taken_wall, clean(message), tone) for message, tone in dict.fromkeys(events)]


def opening_entries(run: RunSnapshot, findings: Iterable[Finding]) -> tuple[LogEntry, ...]:
    """The entries for a first snapshot; findings with their time where the record has it.

    A finding that the end of the run cut off did not go away.
    """
    past, entries = list(findings), []
    cut_off = {(f.rule, f.rank, f.came) for f in run.findings if run.ended}
    moved = {(f.rule, f.gone) for f in past} & {(f.rule, f.came) for f in past if _may_move(f)}
    for finding in past:
        if (finding.rule, finding.came) not in moved:
            entries.append((finding.came, _appeared_event(finding)))
        gone_wall = None if (finding.rule, finding.rank, finding.came) in cut_off else finding.gone
        if gone_wall is not None and (finding.rule, gone_wall) not in moved:
            standing = (f for f in past if f.came < gone_wall and (f.gone is None or f.gone > gone_wall))
            entries.append((gone_wall, _vanished_event(finding, standing)))
    # Two ranks may end a finding in one sentence
    recorded = [LogEntry(wall, clean(message), tone) for wall, (message, tone) in dict.fromkeys(entries)]
    # The record has the standing findings, too: the log would list them twice
    current = events_between_snapshots(None, replace(run, findings=()) if recorded else run)
    return tuple(sorted([*recorded, *current], key=lambda entry: entry.wall))


_TONES = {Severity.CRITICAL: "bad", Severity.WARNING: "warn"}
_Events = Iterator[tuple[str, str]]


def _run_events(previous: RunSnapshot | None, run: RunSnapshot) -> _Events:
    for old, new in (
        ("" if previous is None else previous.note, run.note),
        ("" if previous is None else previous.history_note, run.history_note),
    ):
        if new and new != old:
            yield new, "warn"
    if previous is not None and run.ended and not previous.ended:
        yield "the run has ended", "bold"


def _rank_events(previous: RunSnapshot | None, run: RunSnapshot) -> _Events:
    old = {rank.rank: rank for rank in previous.ranks} if previous is not None else {}
    fresh = [rank for rank in run.ranks if rank.rank not in old]
    if fresh:
        verb = "view opened:" if previous is None else "new:"
        strategy = f", {fresh[0].strategy}" * (fresh[0].strategy != "unknown")
        yield f"{verb} {_rank_list(fresh)}{strategy} on {run.node}", ""
    ranks_by_fact: dict[str, list[RankSnapshot]] = {}
    for rank in run.ranks:
        # Most ranks have nothing to report
        if rank.status.ended or rank.agent.errors or rank.agent.dropped or rank.agent.unseen:
            for fact in _rank_messages(old.get(rank.rank), rank):
                ranks_by_fact.setdefault(fact, []).append(rank)
    for fact, ranks in ranks_by_fact.items():
        failed = has_died(run) and any(rank.status.failed for rank in ranks) and fact.startswith("ended")
        yield f"{_rank_list(ranks)} {fact}", "bad" if failed else "warn" if "errors" in fact else ""


def _rank_messages(old: RankSnapshot | None, new: RankSnapshot) -> Iterator[str]:
    if new.status.ended and (old is None or not old.status.ended):
        ending = (
            "the agent has left"
            if new.status.detached and new.status.alive
            else f"ended: {new.status.ended}"
        )
        yield ending + (f"; {new.status.exception}" if new.status.exception else "")
    errors = new.agent.errors - (old.agent.errors if old is not None else 0)
    if errors > 0:
        yield f"agent: {human_count(errors)} errors in hooks; training is not affected"
    dropped = new.agent.dropped - (old.agent.dropped if old is not None else 0)
    if dropped > 0:
        yield f"agent: {human_count(dropped)} records were overwritten or damaged before they were read"
    if new.agent.unseen and (old is None or new.agent.unseen != old.agent.unseen):
        names = ", ".join(new.agent.unseen)
        yield f"agent: this version of the framework lacks {names}: not observed"


def _rank_list(ranks: list[RankSnapshot]) -> str:
    return numbered_ranks([rank.rank for rank in ranks], _MAX_LISTED_RANKS)


def _finding_events(previous: RunSnapshot | None, run: RunSnapshot) -> _Events:
    old = {_finding_key(f): f for f in previous.findings} if previous is not None else {}
    new = {_finding_key(f): f for f in run.findings}
    appeared = [finding for key, finding in new.items() if key not in old]
    vanished = [finding for key, finding in old.items() if key not in new]
    moved = {f.rule for f in vanished} & {f.rule for f in appeared if _may_move(f)}
    yield from (_appeared_event(finding) for finding in appeared if finding.rule not in moved)
    yield from (_vanished_event(f, new.values()) for f in vanished if f.rule not in moved)


def _appeared_event(finding: Finding) -> tuple[str, str]:
    return f"{finding.code} {finding_text(finding)}", _TONES.get(finding.severity, "")


def _vanished_event(finding: Finding, standing: Iterable[Finding]) -> tuple[str, str]:
    """The end of *finding*; its rank only where the rule holds on others: it may have begun there."""
    still_holds = any(f.rule == finding.rule for f in standing)
    prefix = rank_prefix(finding.rank) if still_holds else ""
    return f"{finding.code} {prefix}no longer: {finding.rule.replace('_', ' ')}", "dim"


def _may_move(finding: Finding) -> bool:
    """Returns whether a finding may move from rank to rank without an entry.

    Many rules name the worst rank, which changes from snapshot to snapshot.
    """
    return finding.severity != Severity.CRITICAL


def _finding_key(finding: Finding) -> tuple[str, int]:
    return finding.rule, finding.rank


def _capture_events(previous: RunSnapshot | None, run: RunSnapshot) -> _Events:
    new, old = run.capture, previous.capture if previous is not None else None
    if new is None or (old is not None and (old.number, old.state) == (new.number, new.state)):
        return
    if new.state == CaptureState.DONE:
        yield f"trace {new.number}: {len(new.files)} files in {new.folder}", "good"
    elif new.state == CaptureState.FAILED:
        yield f"trace {new.number} failed: {new.note}", "warn"
    elif new.is_open:
        yield capture_text(new, run.last_step), ""


# ---- moments that the user marked ---------------------------------------------------------------

_MAX_FILE_BYTES = 1 << 20
_MAX_MARK_TEXT = 200
_SAFE_FLAGS = os.O_NOFOLLOW | os.O_NONBLOCK
"""A link in the run's folder would lead a mark into another file; a named pipe would make it wait."""


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
        self.all: list[Mark] = sorted(_read_marks_file(self.path), key=lambda mark: mark.wall)

    def add(self, mark: Mark) -> bool:
        """Adds *mark*; returns whether it was written to disk."""
        mark = Mark(mark.wall, mark.step, clean(mark.text)[:_MAX_MARK_TEXT])
        self.all = sorted([*self.all, mark], key=lambda entry: entry.wall)
        if self.path is None:
            return False
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | _SAFE_FLAGS
        try:
            with open_run_folder(self.path.parent) as folder:
                descriptor = os.open(folder / self.path.name, flags, 0o600)
            with os.fdopen(descriptor, "wb") as file:
                file.write(msgspec.json.encode(mark) + b"\n")
        except (OSError, ZeromonError):
            return False
        return True


def _read_marks_file(path: Path | None) -> Iterator[Mark]:
    """The marks in a file; skips lines that are no mark."""
    if path is None:
        return
    with suppress(OSError):
        descriptor = os.open(path, os.O_RDONLY | _SAFE_FLAGS)
        with os.fdopen(descriptor, "rb") as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                return
            content = file.read(_MAX_FILE_BYTES)
        for record in content.splitlines():
            with suppress(ValueError, RecursionError):
                mark = _MARK.decode(record)
                yield replace(mark, text=clean(mark.text)[:_MAX_MARK_TEXT])
