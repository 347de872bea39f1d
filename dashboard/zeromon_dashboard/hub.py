"""One sampler for all tabs: whatever is looked at is asked for once a second, by whoever comes first."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass

from zeromon.compare import Comparison, compare
from zeromon.errors import RunNotFound, ZeromonError
from zeromon.fleet.api import Server
from zeromon.fleet.source import ListedRun, PrometheusSource, find, only, runs_of
from zeromon.history import Row, Series, by_step, frame, row_of, steps
from zeromon.measures import measured
from zeromon.record import KnownFinding
from zeromon.snapshot import RankSnapshot, RunSnapshot, StepSummary
from zeromon.source import LiveSource, Source, StoreSource, node_runs
from zeromon.store import Manifest, Store

_FRESH_SECONDS = 0.9
_LIST_SECONDS = 3.0
_MOST_SOURCES = 32
_MOST_POINTS = 600
_MOST_POINTS_MANY = 200
_MANY_RANKS = 16


@dataclass(frozen=True, slots=True)
class Item:
    """One line of the list of runs."""

    manifest: Manifest
    live: bool


@dataclass(frozen=True, slots=True)
class Seen:
    """What is known of a run at one moment."""

    run: RunSnapshot
    age: float
    """Seconds since it was asked for."""
    trouble: str
    """Why nothing newer is known, "" while it is."""


class Followed:
    """One run that is looked at."""

    def __init__(self, source: Source, store: Store, clock: Callable[[], float]) -> None:
        self.source = source
        self._store = store
        self._clock = clock
        self._lock = threading.Lock()
        self._run: RunSnapshot | None = None
        self._asked = 0.0
        self._trouble = ""
        self._series: OrderedDict[tuple[object, ...], tuple[int, Series]] = OrderedDict()

    @property
    def live(self) -> bool:
        """Whether a collector follows it."""
        return isinstance(self.source, (LiveSource, PrometheusSource))

    def want(self, ranks: Sequence[int], node: str) -> None:
        """A page shows those *ranks*, or all of a *node*: they are read although not the worst."""
        fleet = self._run.fleet if self._run is not None else None
        if isinstance(self.source, PrometheusSource) and (ranks or node):
            nodes = fleet.nodes if fleet is not None else ()
            addresses = (one.address for one in nodes if one.node == node)
            self.source.want(ranks, next(addresses, ""))

    def seen(self) -> Seen:
        """The newest picture; an older one while the source does not answer."""
        if self._run is None or self._clock() - self._asked >= _FRESH_SECONDS:
            self._refresh(wait=self._run is None)
        if self._run is None:
            raise RunNotFound(self._trouble or f"nothing is known of {self.source.run}")
        return Seen(self._run, self._clock() - self._asked, self._trouble)

    def _refresh(self, *, wait: bool) -> None:
        """Asks the source; where another is asking, what is known does, if anything is."""
        if not self._lock.acquire(blocking=wait):
            return
        try:
            if self._run is not None and self._clock() - self._asked < _FRESH_SECONDS:
                return
            self._run, self._trouble = self.source.latest(), ""
            self._asked = self._clock()
        except (ZeromonError, OSError) as error:
            self._trouble = str(error)
            self._fall_back()
        finally:
            self._lock.release()

    def _fall_back(self) -> None:
        """A collector that has gone has left its record; one that is started anew has another port."""
        if isinstance(self.source, PrometheusSource):
            return  # there is no other place to look for it
        with suppress(ZeromonError, OSError):
            found = open_source(self.source.run, self._store)
            run = found.latest()
            if self._run is None or run.taken_wall >= self._run.taken_wall:
                self.source, self._run, self._trouble = found, run, ""
                self._asked = self._clock()

    def at(self, wall: float) -> RunSnapshot:
        """The picture of a moment that is over."""
        return self.source.at(wall)

    def findings(self) -> list[KnownFinding]:
        """All findings that it ever had."""
        try:
            return self.source.findings()
        except (ZeromonError, OSError):
            return []

    def span(self) -> tuple[float, float] | None:
        """The first kept moment and the last."""
        try:
            return self.source.span()
        except (ZeromonError, OSError):
            return None

    def series(self, ranks: tuple[int, ...], last: int, until: float | None) -> tuple[int, Series]:
        """The steps to be drawn, and a number that changes when they were read anew.

        Between that, what a live run has done since is appended, so that a page need be sent no more.
        """
        key = (ranks, last, until)
        with self._lock:
            number, known = self._series.get(key, (0, None))
            run = self._run
            if run is not None and run.origin:  # it grows by itself
                found = self._read(run, ranks, last, until)
                number += known is None or known["start_us"][:1] != found["start_us"][:1]
                self._series[key] = (number, found)
                return number, found
            if known is None or _too_many(known, run):
                number, known = number + 1, self._read(run, ranks, last, until)
            if until is None and run is not None:
                known = _appended(known, run, ranks)
            self._series[key] = (number, known)
            self._series.move_to_end(key)
            while len(self._series) > _MOST_SOURCES:
                self._series.popitem(last=False)
            return number, known

    def _read(
        self, run: RunSnapshot | None, ranks: tuple[int, ...], last: int, until: float | None
    ) -> Series:
        many = run is not None and len(ranks or run.ranks) > _MANY_RANKS
        most = _MOST_POINTS_MANY if many else _MOST_POINTS
        until_us = None if until is None else round(until * 1e6)
        since_us = 0
        if last and run is not None:
            seconds = max((r.step_seconds or 0.0 for r in run.ranks), default=0.0)
            end = until if until is not None else run.taken_wall
            since_us = round((end - 1.2 * last * seconds) * 1e6)
        found: Series | None = None
        with suppress(ZeromonError, OSError):
            found = self.source.series(since_us, until_us, ranks, most)
        if found is None or not found["step"]:
            return _of_picture(run, ranks)
        return _last_steps(found, last) if last else found


def _too_many(series: Series, run: RunSnapshot | None) -> bool:
    """Whether so much was appended that it has to be thinned."""
    ranks = len(run.ranks) if run is not None else 1
    return len(series["step"]) > 3 * _MOST_POINTS * max(1, ranks)


def _of_picture(run: RunSnapshot | None, ranks: tuple[int, ...]) -> Series:
    """The steps that a picture has, where nothing else is kept."""
    rows = _rows_of(run, ranks) if run is not None else []
    return frame(rows).to_dict(as_series=False)


def _rows_of(run: RunSnapshot, ranks: tuple[int, ...]) -> list[Row]:
    return [
        row_of(rank.rank, step, _shift(run))
        for rank in run.ranks
        if not ranks or rank.rank in ranks
        for step in _settled(run, rank)
    ]


def _settled(run: RunSnapshot, rank: RankSnapshot) -> tuple[StepSummary, ...]:
    """The steps of a picture that change no more: what comes with the next may belong to the newest."""
    return rank.recent if run.ended else rank.recent[:-1]


def _shift(run: RunSnapshot) -> int:
    return round(run.taken_wall * 1e9) - run.taken_ns


def _appended(series: Series, run: RunSnapshot, ranks: tuple[int, ...]) -> Series:
    """*series* with the steps of *run* that are newer."""
    known: dict[int, int] = {}
    for rank, step in zip(series["rank"], series["step"], strict=True):
        known[rank] = max(step, known.get(rank, step))
    fresh = [
        row_of(rank.rank, step, _shift(run))
        for rank in run.ranks
        if not ranks or rank.rank in ranks
        for step in _settled(run, rank)
        if step.step > known.get(rank.rank, -1)
    ]
    if not fresh:
        return series
    columns = zip(*fresh, strict=True)
    return {name: [*old, *new] for (name, old), new in zip(series.items(), columns, strict=True)}


def _last_steps(series: Series, last: int) -> Series:
    first = max(series["step"]) - last
    kept = [n for n, step in enumerate(series["step"]) if step > first]
    return {name: [column[n] for n in kept] for name, column in series.items()}


def open_source(name: str, store: Store, server: Server | None = None) -> Source:
    """A run by its name: of the *server* where one is given; else a collector's, else its record."""
    if server is not None:
        return only(find(server, name))
    for live in node_runs():
        if live.run == name:
            return LiveSource(live.address, live.run)
    return StoreSource(name, store)


class Hub:
    """All runs that anybody looks at."""

    def __init__(
        self,
        store: Store | None = None,
        clock: Callable[[], float] = time.monotonic,
        server: Server | None = None,
    ) -> None:
        self.store = store or Store()
        self._server = server
        self._clock = clock
        self._lock = threading.Lock()
        self._followed: OrderedDict[str, Followed] = OrderedDict()
        self._list: tuple[float, list[Item]] = (-_LIST_SECONDS, [])

    def followed(self, name: str) -> Followed:
        """The run *name*; raises :class:`~zeromon.errors.ZeromonError` where there is none."""
        with self._lock:
            known = self._followed.get(name)
            if known is not None:
                self._followed.move_to_end(name)
                return known
        found = Followed(open_source(name, self.store, self._server), self.store, self._clock)
        with self._lock:
            self._followed[name] = found
            while len(self._followed) > _MOST_SOURCES:
                self._followed.popitem(last=False)
            return found

    def compared(self, names: Sequence[str]) -> Comparison:
        """Runs side by side; raises :class:`~zeromon.errors.ZeromonError` for one that is not there."""
        found = []
        for name in names:
            run = self.followed(name).seen().run
            kept = steps(self.store.history(run.run))
            if kept.is_empty():
                kept = by_step(frame(_rows_of(run, ())).lazy()).collect()
            found.append([measured(run, kept.to_dict(as_series=False))])
        return compare(found)

    def runs(self) -> list[Item]:
        """The runs of the server, or of this user on this node: live ones first, then the newest."""
        made, known = self._list
        if self._clock() - made < _LIST_SECONDS:
            return known
        if self._server is not None:
            items = [_listed(run) for run in runs_of(self._server)]
            self._list = (self._clock(), items)
            return items
        live = {run.run for run in node_runs() if not run.ended}
        items = [Item(found, found.run in live) for found in self.store.manifests()]
        items.sort(key=lambda item: (not item.live, -item.manifest.started_wall))
        self._list = (self._clock(), items)
        return items


def _listed(run: ListedRun) -> Item:
    """What a Prometheus says of a run without being asked for more."""
    manifest = Manifest(
        run=run.run, node="", command=(), started_wall=0.0, taken_wall=0.0, ended=not run.up,
        verdict=run.state, strategy="", device="", ranks=run.ranks or run.known, steps=run.steps,
        step_seconds=None, exposed_ratio=None, memory_bytes=-1, worst="",
    )  # fmt: skip
    return Item(manifest, bool(run.up))
