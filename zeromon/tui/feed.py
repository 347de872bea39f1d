"""Asks a source for pictures in a thread of its own, and posts what comes: the view never waits."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress

from textual.message import Message

from zeromon.errors import RunNotFound, ZeromonError
from zeromon.history import Series
from zeromon.record import KnownFinding
from zeromon.snapshot import RunSnapshot
from zeromon.source import Source
from zeromon.tui.messages import Arrived, RunGone, SourceFailed
from zeromon.tui.playhead import Playhead, Span

_MOST_SHARE = 0.06
"""Of a core, for reading pictures: a large run is asked more rarely."""
_MOST_SECONDS = 10.0
_SLOWLY_SECONDS = 5.0
"""How often it asks for what changes slowly: the span, the whole run's steps."""
_REPLAY_SECONDS = 0.25

Reconnect = Callable[[bool], Source | None]
"""Finds a run again that was lost; gets whether it is over: gone from its collector, or ended."""


class Feed:
    """One thread. *post* takes messages from it."""

    def __init__(
        self,
        head: Playhead,
        post: Callable[[Message], object],
        every_seconds: float,
        reconnect: Reconnect | None = None,
    ) -> None:
        self.head = head
        self.series_of: Sequence[int] | None = None
        """Ranks whose steps are wanted over the whole run; None: they are not."""
        self._post = post
        self._every = every_seconds
        self._reconnect = reconnect
        self._awake = threading.Event()
        self._stopping = self._ended = False
        self._past: tuple[KnownFinding, ...] | None = None
        self._span: Span | None = None
        self._series: Series | None = None
        self._slowly = -_SLOWLY_SECONDS

    def start(self) -> None:
        """Begins to ask."""
        threading.Thread(target=self._ask, name="source", daemon=True).start()

    def stop(self) -> None:
        """Ends soon; does not wait for an answer that is still to come."""
        self._stopping = True
        self._awake.set()

    def wake(self, *, wholly: bool = False) -> None:
        """Asks at once: the playhead was moved; *wholly*: also for what changes slowly."""
        if wholly:
            self._slowly = -_SLOWLY_SECONDS
        self._awake.set()

    def _ask(self) -> None:
        wait = self._every
        while not self._stopping:
            self._awake.clear()
            try:
                wait = self._look()
            except RunNotFound as error:
                self._post(RunGone(str(error)))
                self._renew(gone=True)
            except ZeromonError as error:
                self._post(SourceFailed(str(error)))
                self._renew(gone=self._ended)  # a collector ends after its last run
            except Exception as error:  # it is ours, and no reason to stop asking
                self._post(SourceFailed(f"this view failed: {error!r}"))
            self._awake.wait(wait)

    def _look(self) -> float:
        """Posts what is there; returns when to look again."""
        began = time.thread_time()
        newest, moment = self.head.look()
        self._ended = newest.ended
        self._arrived(newest, moment)
        if time.monotonic() - self._slowly >= _SLOWLY_SECONDS:
            self._slowly = time.monotonic()
            with suppress(ZeromonError):  # the picture is there; what was before may not be
                self._look_slowly(newest)
                self._arrived(newest, moment)
        spent = time.thread_time() - began
        every = min(self._every, _REPLAY_SECONDS) if self.head.replay else self._every
        if newest.ended and self.head.replay is None:
            every = _SLOWLY_SECONDS
        return min(_MOST_SECONDS, max(every, spent / _MOST_SHARE))

    def _arrived(self, newest: RunSnapshot, moment: RunSnapshot | None) -> None:
        self._post(Arrived(newest, moment, self._span, self._series, self._past, self.head))

    def _look_slowly(self, newest: RunSnapshot) -> None:
        source, wanted = self.head.source, self.series_of
        if wanted is None and newest.origin:
            wanted = ()  # its pictures have no steps of before
        self._span = source.span()
        if self._past is None:
            self._past = tuple(source.findings())
        self._series = None if wanted is None else source.series(ranks=wanted)

    def _renew(self, *, gone: bool) -> None:
        found = self._reconnect(gone) if self._reconnect is not None else None
        if found is not None:
            self.head.source = found
