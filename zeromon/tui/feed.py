"""Reads snapshots from a source in a thread of its own, and posts them: the view never waits."""

import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from textual.message import Message

from zeromon.base.errors import RunNotFound, ZeromonError
from zeromon.readout.answers import VerdictPeriod, life_of_run
from zeromon.snapshot import Finding, RunSnapshot
from zeromon.snapshot.step import Lanes
from zeromon.sources.base import SPEEDS, Output, Playback, Source
from zeromon.sources.live import LiveSource, runs_of_node
from zeromon.sources.replay import StoreSource
from zeromon.storage.run_store import StepQuery, Store
from zeromon.storage.step_history.rows import Series
from zeromon.tui.event_log import LogEntry, events_between_snapshots, opening_entries
from zeromon.tui.line import clean

_STRIDES = (0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 300.0, 900.0, 3600.0)
_STRIDES_A_SPAN = 60

Span = tuple[float, float]


def seconds_per_stride(span: Span | None) -> float:
    """Seconds that one key press moves: a sixtieth of the record, rounded up."""
    span_seconds = 0.0 if span is None else span[1] - span[0]
    return next((s for s in _STRIDES if s >= span_seconds / _STRIDES_A_SPAN), _STRIDES[-1])


class Playhead:
    """Where the view is in a source. *wall* is None while the view follows the newest snapshot."""

    def __init__(self, source: Source) -> None:
        self.source = source
        self.wall: float | None = None

    @property
    def replay(self) -> Playback | None:
        """The clock of a replay; None for a source whose snapshots are of now."""
        return self.source.playback

    @property
    def paused(self) -> bool:
        """True if the view stays at one snapshot."""
        return not self.replay.playing if self.replay else self.wall is not None

    @property
    def speed(self) -> float:
        """Seconds of the run per second."""
        return self.replay.speed if self.replay else 1.0

    def look(self) -> tuple[RunSnapshot, RunSnapshot | None]:
        """The newest snapshot, and the recorded one at *wall*; raises ZeromonError."""
        # Read once: the main thread may set it to None between the test and its use
        shown_wall = self.wall
        return self.source.latest(), None if shown_wall is None else self.source.at(shown_wall)

    def toggle_pause(self, shown_wall: float) -> None:
        """Holds the snapshot of the moment *shown_wall*, or follows the newest one again."""
        if self.replay is None:
            self.wall = shown_wall if self.wall is None else None
        elif self.replay.playing:
            self.replay.pause()
        else:
            self.replay.play()

    def move(self, shown_wall: float, seconds: float, span: Span | None) -> bool:
        """Moves *seconds* from the moment *shown_wall*; False for a run without a record.

        Beyond the end of a live run, the view follows the newest snapshot.
        """
        if span is None:
            return False
        goal = max(span[0], shown_wall + seconds)
        if self.replay is not None:
            self.replay.seek(min(goal, span[1]))
        else:
            self.wall = None if goal > span[1] else goal
        return True

    def follow(self) -> None:
        """Follows the newest snapshot, or goes to the end of a replay."""
        if self.replay is not None:
            self.replay.seek(self.replay.end)
        else:
            self.wall = None

    def change_replay_speed(self, by: int) -> bool:
        """Chooses the next speed up or down; False for a source that is no replay."""
        if self.replay is None:
            return False
        index = min(range(len(SPEEDS)), key=lambda i: abs(SPEEDS[i] - self.speed))
        speed = SPEEDS[min(len(SPEEDS) - 1, max(0, index + by))]
        if self.replay.playing:
            self.replay.play(speed)
        else:
            self.replay.speed = speed
        return True


# ---- the messages that threads post --------------------------------------------------------------

# Each handler is ``on_`` and the name of the message.


@dataclass(frozen=True, slots=True)
class RunChoice:
    """One run of the list."""

    run: str
    state: str
    command: str
    address: str
    """``host:port`` of its collector; "" for a recorded run."""

    def open(self, store: Store) -> Source:
        """A source of the run's snapshots; raises ZeromonError for a record that is gone."""
        if self.address:
            return LiveSource(self.address, self.run)
        return StoreSource(self.run, store)


def list_run_choices(store: Store) -> tuple[RunChoice, ...]:
    """Live runs, then recorded ones."""
    live = [
        RunChoice(
            run.run, run.state, clean(" ".join(run.command)), run.address,
        )
        for run in runs_of_node()
    ]  # fmt: skip
    live_names = {choice.run for choice in live}
    recorded = [
        RunChoice(record.run, clean(record.verdict), clean(" ".join(record.command)), "")
        for record in store.list_manifests()
        if record.run not in live_names
    ]
    return (*live, *recorded)


@dataclass
class SnapshotArrived(Message):
    """A new snapshot. Only the newest matters: it replaces one that waits in the queue."""

    newest: RunSnapshot
    moment: RunSnapshot | None
    """The recorded snapshot that is shown instead of the newest one."""
    span: Span | None
    """The first and the last recorded moment."""
    series: Series | None
    """Steps of the whole run, where charts show it."""
    past: tuple[Finding, ...] | None
    """The findings in the record; None until they are read."""
    head: Playhead
    """Where it was read; the application drops messages about a run that it has left."""

    def can_replace(self, message: Message) -> bool:
        """Returns whether this message takes the place of *message* in the queue."""
        return isinstance(message, SnapshotArrived)


@dataclass
class SourceFailed(Message):
    """The source gave no snapshot; *reason* is for the user."""

    reason: str
    is_gone: bool = False
    """The source no longer has the run."""


@dataclass
class LanesArrived(Message):
    """The spans of the last steps; None with the reason why there are none."""

    lanes: Lanes | None
    trouble: str = ""


@dataclass
class OutputArrived(Message):
    """The end of the training's output; None with the reason why there is none."""

    output: Output | None
    trouble: str = ""


@dataclass
class Choices(Message):
    """The runs that the user can turn to."""

    runs: tuple[RunChoice, ...]


# ---- the thread that reads snapshots -------------------------------------------------------------

_MAX_CPU_SHARE = 0.06
"""The largest share of a core for reading snapshots: a large run is read less often."""
_MAX_WAIT_SECONDS = 10.0
_SLOWLY_SECONDS = 5.0
"""How often the feed reads what changes slowly: the span, the steps of the whole run."""
_REPLAY_SECONDS = 0.25

Reconnect = Callable[[bool], Source | None]
"""Finds the run of a lost source; gets whether the run is over: gone from its collector, or ended."""


class Feed:
    """The thread that reads snapshots. *post* is called from it, with messages."""

    def __init__(
        self,
        head: Playhead,
        post: Callable[[Message], object],
        every_seconds: float,
        reconnect: Reconnect | None = None,
    ) -> None:
        self.head = head
        self.series_of: Sequence[int] | None = None
        """Ranks whose steps of the whole run are read; (): all together, None: no steps."""
        self._post = post
        self._every = every_seconds
        self._reconnect = reconnect
        self._awake = threading.Event()
        self._stopping = self._ended = False
        self._past: tuple[Finding, ...] | None = None
        self._span: Span | None = None
        self._series: Series | None = None
        self._slowly = -_SLOWLY_SECONDS

    def start(self) -> None:
        """Starts the thread."""
        # A daemon: an answer that never comes must not hold the process after q
        threading.Thread(target=self._ask, name="source", daemon=True).start()

    def stop(self) -> None:
        """Ends the thread soon; does not wait for an answer that is under way."""
        self._stopping = True
        self._awake.set()

    def read_at_once(self, *, wholly: bool = False) -> None:
        """Reads at once, because the playhead was moved; *wholly*: reads also what changes slowly."""
        if wholly:
            self._slowly = -_SLOWLY_SECONDS
        self._awake.set()

    def _ask(self) -> None:
        wait = self._every
        while not self._stopping:
            # Before the reading: a key that is pressed during it must lead to another one
            self._awake.clear()
            try:
                wait = self._look()
            except RunNotFound as error:
                self._post(SourceFailed(str(error), is_gone=True))
                self._renew_lost_source(is_gone=True)
            except ZeromonError as error:
                self._post(SourceFailed(str(error)))
                self._renew_lost_source(is_gone=self._ended)  # a collector ends after its last run
            except Exception as error:  # a bug of ours is no reason to stop reading
                self._post(SourceFailed(f"the terminal view failed: {error!r}"))
            self._awake.wait(wait)

    def _look(self) -> float:
        """Posts what the source has; returns the seconds until the next reading."""
        # Of this thread alone: to wait for a collector or to draw costs the reading nothing
        cpu_start = time.thread_time()
        run, recorded = self.head.look()
        self._ended = run.ended
        # First without the slow parts, which take seconds in a long record
        self._post_arrived_snapshots(run, recorded)
        if time.monotonic() - self._slowly >= _SLOWLY_SECONDS:
            self._slowly = time.monotonic()
            with suppress(ZeromonError):  # a snapshot without a record is still worth showing
                self._read_slow_changes(run)
                self._post_arrived_snapshots(run, recorded)
        cpu_seconds = time.thread_time() - cpu_start
        every = min(self._every, _REPLAY_SECONDS) if self.head.replay else self._every
        if run.ended and self.head.replay is None:
            every = _SLOWLY_SECONDS
        return min(_MAX_WAIT_SECONDS, max(every, cpu_seconds / _MAX_CPU_SHARE))

    def _post_arrived_snapshots(self, run: RunSnapshot, recorded: RunSnapshot | None) -> None:
        self._post(SnapshotArrived(run, recorded, self._span, self._series, self._past, self.head))

    def _read_slow_changes(self, run: RunSnapshot) -> None:
        source, ranks = self.head.source, self.series_of
        if ranks is None and run.origin:
            ranks = ()  # its snapshots have no earlier steps
        self._span = source.span()
        # Read once: later findings come with the snapshots
        if self._past is None:
            self._past = tuple(source.findings())
        self._series = None if ranks is None else source.series(StepQuery(ranks=tuple(ranks)))

    def _renew_lost_source(self, *, is_gone: bool) -> None:
        source = self._reconnect(is_gone) if self._reconnect is not None else None
        if source is not None:
            self.head.source = source


_MAX_ENTRIES = 2000


@dataclass(frozen=True, slots=True, kw_only=True)
class ObservedRun:
    """The newest message of the feed, and what all messages so far say together."""

    last: SnapshotArrived
    moment: RunSnapshot | None
    """The recorded snapshot that is shown; the user may have moved on since *last* was read."""
    first: RunSnapshot
    """The snapshot with which the log of events begins."""
    opening: tuple[LogEntry, ...]
    """The log's entries about *first* and *past*."""
    news: tuple[LogEntry, ...] = ()
    """The log's entries about what changed since."""
    fresh: tuple[LogEntry, ...] = ()
    """Those of *news* that the newest message made."""
    findings: tuple[Finding, ...] = ()
    """Those of the record, then those of later snapshots, each as it was known last."""
    life: tuple[VerdictPeriod, ...] = ()
    """The verdicts on the run over time; () until the record is read."""

    @property
    def entries(self) -> tuple[LogEntry, ...]:
        """The whole log, in the order in which it was made."""
        return self.opening + self.news


def fold_feed_message(state: ObservedRun | None, message: SnapshotArrived) -> ObservedRun:
    """*state* with *message*; *state* itself where the message has nothing new.

    A source may be read more often than it has new snapshots, and drawing costs more than reading.
    """
    run, past = message.newest, message.past
    if state is None:
        return ObservedRun(
            last=message, moment=message.moment, first=run, opening=opening_entries(run, past or ()),
            findings=_merge_findings(past or (), run),
            life=life_of_run(run, _merge_findings(past, run)) if past is not None else (),
        )  # fmt: skip
    if (
        _snapshot_identity(state.last.newest) == _snapshot_identity(message.newest)
        and _snapshot_identity(state.moment) == _snapshot_identity(message.moment)
        and state.last.span == message.span
        and state.last.series is message.series
        and state.last.past is message.past
    ):
        return state
    start = state.opening
    if state.last.past is None and past is not None:
        start = opening_entries(state.first, past)
    # a replay that was moved back repeats what the log has already
    forward = run.taken_wall > state.last.newest.taken_wall
    fresh = tuple(events_between_snapshots(state.last.newest, run)) if forward else ()
    news = (*state.news, *fresh)[-_MAX_ENTRIES:]
    moment = message.moment
    findings = state.findings if state.last.past is past else (past or ())
    if forward or state.last.past is not past:
        findings = _merge_findings(findings, run)
    return replace(
        state, last=message, moment=moment, opening=start, news=news, fresh=fresh, findings=findings,
        life=life_of_run(run, findings) if past is not None else (),
    )  # fmt: skip


def _merge_findings(earlier_findings: Sequence[Finding], run: RunSnapshot) -> tuple[Finding, ...]:
    """*earlier_findings* with those of *run*: one that is gone ended now."""
    standing = {(f.rule, f.rank, f.came): f for f in run.findings}
    merged: dict[tuple[str, int, float], Finding] = {}
    for f in earlier_findings:
        key = f.rule, f.rank, f.came
        gone_wall = run.taken_wall if f.gone is None else f.gone
        merged[key] = standing.get(key) or replace(f, gone=gone_wall)
    return tuple({**merged, **standing}.values())


def _snapshot_identity(run: RunSnapshot | None) -> tuple[float, int, bool] | None:
    """The values that distinguish one snapshot of a run from another."""
    return None if run is None else (run.taken_wall, run.taken_ns, run.ended)
