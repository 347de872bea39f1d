"""What the terminal view knows of its run, as a value that each message of the feed changes. Pure."""

from dataclasses import dataclass

from zeromon.snapshot import Finding, RunSnapshot
from zeromon.storage.step_history import Series
from zeromon.tui.event_log import LogEntry, changes, opening
from zeromon.tui.messages import SnapshotArrived
from zeromon.tui.playhead import Span

_MOST_ENTRIES = 2000


@dataclass(frozen=True, slots=True, kw_only=True)
class ObservedRun:
    """The newest message of the feed, and what all messages so far say together."""

    newest: RunSnapshot
    moment: RunSnapshot | None
    """The recorded snapshot that is shown instead of the newest one."""
    span: Span | None
    """The first and the last recorded moment."""
    series: Series | None
    """Steps of the whole run, where they are shown."""
    past: tuple[Finding, ...] | None
    """The findings in the record; None until they are read."""
    first: RunSnapshot
    """The snapshot with which the log of events begins."""
    opening: tuple[LogEntry, ...]
    """The log's entries about *first* and *past*."""
    news: tuple[LogEntry, ...] = ()
    """The log's entries about what changed since."""
    fresh: tuple[LogEntry, ...] = ()
    """Those of *news* that the newest message made."""

    @property
    def entries(self) -> tuple[LogEntry, ...]:
        """The whole log, in the order in which it was made."""
        return self.opening + self.news


def reduce(known: ObservedRun | None, message: SnapshotArrived) -> ObservedRun:
    """*known* with *message*; *known* itself where the message has nothing new.

    A source may be read more often than it has new snapshots, and drawing costs more than reading.
    """
    newest, past = message.newest, message.past
    if known is None:
        return ObservedRun(
            newest=newest, moment=message.moment, span=message.span, series=message.series, past=past,
            first=newest, opening=opening(newest, past or ()),
        )  # fmt: skip
    if _is_same(known, message):
        return known
    began = known.opening
    if known.past is None and past is not None:
        began = opening(known.first, past)
    # a replay that was moved back repeats what the log has already
    forward = newest.taken_wall > known.newest.taken_wall
    fresh = tuple(changes(known.newest, newest)) if forward else ()
    return ObservedRun(
        newest=newest, moment=message.moment, span=message.span, series=message.series, past=past,
        first=known.first, opening=began, news=(*known.news, *fresh)[-_MOST_ENTRIES:], fresh=fresh,
    )  # fmt: skip


def _is_same(known: ObservedRun, message: SnapshotArrived) -> bool:
    return (
        _identity(known.newest) == _identity(message.newest)
        and _identity(known.moment) == _identity(message.moment)
        and known.span == message.span
        and known.series is message.series
        and known.past is message.past
    )


def _identity(run: RunSnapshot | None) -> tuple[float, int, bool] | None:
    """What distinguishes one snapshot of a run from another."""
    return None if run is None else (run.taken_wall, run.taken_ns, run.ended)
