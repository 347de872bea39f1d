"""A run as lines of text, one per step: for screen readers, logs and CI."""

import time
from collections.abc import Callable, Iterable, Iterator

from zeromon.errors import RunNotFound, SourceError
from zeromon.focus import nearest_oom
from zeromon.readout.text import run_state
from zeromon.readout.verdict import verdict
from zeromon.snapshot import RunSnapshot
from zeromon.sources.base import Source
from zeromon.tui.event_log import LogEntry, changes
from zeromon.tui.feed import Reconnect
from zeromon.tui.plots import step_of
from zeromon.tui.status_text import clock
from zeromon.units import human_bytes, human_count, human_ratio, human_seconds


def follow(
    source: Source,
    write: Callable[[str], object],
    *,
    every_seconds: float = 1.0,
    reconnect: Reconnect | None = None,
    sleep: Callable[[float], None] = time.sleep,
) -> RunSnapshot | None:
    """Writes steps and events until the run has ended; returns the last snapshot."""
    before: RunSnapshot | None = None
    printed, trouble = 0, ""
    while True:
        try:
            run, trouble = source.latest(), ""
        except RunNotFound as error:
            again = reconnect(True) if reconnect is not None and before is not None else None
            if again is None:
                write(f"the run is gone: {error}")
                return before
            source = again
            continue
        except SourceError as error:
            if str(error) != trouble:
                trouble = str(error)
                write(f"{trouble}; trying again")
            source = (reconnect(False) if reconnect is not None else None) or source
            sleep(every_seconds)
            continue
        for line in lines(before, run, printed):
            write(line)
        printed, before = max(printed, _whole(run)), run
        if run.ended:
            write(run_state(run))
            return run
        sleep(every_seconds)


def lines(before: RunSnapshot | None, run: RunSnapshot, printed: int) -> Iterator[str]:
    """The lines for *run*: events since *before*, and the steps after *printed* that all ranks ended."""
    for note in changes(before, run):
        yield note_line(note)
    judged = verdict(run)
    if before is None or verdict(before).health is not judged.health:
        yield judged.text
    newest = _whole(run)
    oldest = min((rank.recent[0].step for rank in run.ranks if rank.recent), default=1)
    first = newest if before is None else max(printed + 1, oldest)
    if before is not None and first > printed + 1 and not run.origin:
        yield f"steps {human_count(printed + 1)} to {human_count(first - 1)} were too fast to print"
    steps: Iterable[int] = range(max(1, first), newest + 1)
    if run.origin:  # there, a point stands for many steps
        known = {one.step for rank in run.ranks for one in rank.recent}
        steps = sorted(step for step in known if first <= step <= newest and step > printed)
    for step in steps:
        yield step_line(run, step)


def _whole(run: RunSnapshot) -> int:
    """The newest step that all living ranks have ended."""
    ends = [rank.recent[-1].step for rank in run.ranks if rank.recent and not rank.ended]
    ends = ends or [rank.recent[-1].step for rank in run.ranks if rank.recent]
    return min(ends, default=0)


def note_line(note: LogEntry) -> str:
    """An event with its time, and its severity in words."""
    severe = {"bad": "critical: ", "warn": "warning: "}.get(note.tone, "")
    return f"{clock(note.wall)} {severe}{note.text}"


def step_line(run: RunSnapshot, step: int) -> str:
    """One step over all ranks: the longest, the most exposed, and the fullest rank."""
    steps = [(rank.rank, one) for rank in run.ranks if (one := step_of(rank.recent, step))]
    if not steps:
        return f"step {human_count(step)}: not known"
    slowest = max(steps, key=lambda pair: pair[1].seconds)
    parts = [
        f"step {human_count(step)}",
        f"{human_seconds(slowest[1].seconds)} (rank {slowest[0]})",
    ]
    timed = [(rank, one) for rank, one in steps if one.timed and one.seconds > 0]
    share = "n/a (not timed)"
    if timed:
        most = max(timed, key=lambda pair: pair[1].exposed_ns / pair[1].seconds)
        share = f"{human_ratio(most[1].exposed_ns / 1e9 / most[1].seconds)} (rank {most[0]})"
    parts.append(f"exposed {share}")
    device = [(one.reserved_bytes, rank) for rank, one in steps if one.reserved_bytes >= 0]
    if device:
        parts.append(f"reserved {human_bytes(max(device)[0])} (rank {max(device)[1]})")
    else:
        parts.append(f"RSS {human_bytes(sum(one.rss_bytes for _, one in steps))} (all ranks)")
    worst = nearest_oom(run.ranks)
    if worst is not None:
        parts.append(f"OOM risk {human_ratio(worst[1].ratio)}")
    skipped = [str(rank) for rank, one in steps if one.skipped]
    if skipped:
        parts.append("skipped: gradients overflowed")
    return "  ".join(parts)
