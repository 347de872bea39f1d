"""Shares sources between tabs: each shown run is read once a second, however many tabs show it."""

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from types import MappingProxyType

from zeromon.base.errors import RunNotFound, ZeromonError
from zeromon.cli.compare import snapshot_figures
from zeromon.comparison.comparison import Comparison, compare
from zeromon.readout.verdict import Health
from zeromon.snapshot import Finding, RunSnapshot, Severity
from zeromon.sources.base import Source
from zeromon.sources.live import runs_of_node
from zeromon.sources.prometheus.client import Server
from zeromon.sources.prometheus.source import SeenRun, find_listed_runs, only_listed_run, runs_of
from zeromon.sources.replay import StoreSource, reopen_run_source
from zeromon.storage.run_store import ListedRun, Manifest, StepQuery, Store
from zeromon.storage.step_history.queries import thin_series
from zeromon.storage.step_history.rows import Row, Series, row_of
from zeromon.storage.step_history.writer import rows_frame
from zeromon_dashboard.url_state import Route

_FRESH_SECONDS = 0.9
_LIST_SECONDS = 3.0
_THINNED_SECONDS = 10.0
_PAST_SECONDS = 5.0
"""How long the findings and the span of a record are taken for the newest."""
_MAX_SOURCES = 32
_MAX_POINTS = 600
_MAX_POINTS_MANY = 200
_MANY_RANKS = 16
_MAX_APPENDED_SHARE = 1 / 8
"""Share of appended rows in a series without all steps; with more, noise seems to grow where all are."""


@dataclass(frozen=True, slots=True)
class Reading:
    """The newest snapshot of a run, and its age."""

    run: RunSnapshot
    age: float
    """Seconds since it was read."""
    trouble: str
    """Why there is no newer snapshot; "" where nothing is wrong."""


@dataclass(frozen=True, slots=True)
class _Steps:
    """The steps that a page draws."""

    series: Series
    most: int
    """About how many rows of a rank are read."""
    number: int
    """Changes when the rows are others."""
    chosen: int
    """How many of the rows were read or thinned; the others were appended."""
    chosen_at: float

    def is_uneven(self, clock_seconds: float) -> bool:
        """Returns whether too many steps were appended: to a part of the old ones, or for one chart."""
        steps, ranks = self.series["step"], len(set(self.series["rank"]))
        if len(steps) - self.chosen <= _MAX_APPENDED_SHARE * self.chosen:
            return False
        if clock_seconds - self.chosen_at < _THINNED_SECONDS:
            return False
        return len(steps) > self.most * ranks or ranks * (steps[-1] - min(steps) + 1) > len(steps)


class Followed:
    """One run that at least one tab shows."""

    def __init__(self, source: Source, store: Store, clock: Callable[[], float]) -> None:
        self.source = source
        self._store = store
        self._clock = clock
        self._lock = threading.Lock()
        self._run: RunSnapshot | None = None
        self._read_at = 0.0
        self._trouble = ""
        self._findings: list[Finding] = []
        self._span: tuple[float, float] | None = None
        self._past_at = -_PAST_SECONDS
        self._series: OrderedDict[tuple[object, ...], _Steps] = OrderedDict()

    @property
    def live(self) -> bool:
        """True if something observes the run now."""
        return self.source.live

    def request_detail(self, ranks: Sequence[int], node: str) -> None:
        """Makes the next snapshots contain *ranks*, and all ranks of *node*."""
        if ranks or node:
            fleet = self._run.fleet if self._run is not None else None
            nodes = fleet.nodes if fleet is not None else ()
            addresses = (fleet_node.address for fleet_node in nodes if fleet_node.node == node)
            self.source.request_detail(ranks, next(addresses, ""))

    def newest(self) -> Reading:
        """The newest snapshot; an older one while the source fails. Raises RunNotFound without any."""
        if self._run is None or self._clock() - self._read_at >= _FRESH_SECONDS:
            self._refresh_snapshot(wait=self._run is None)
        if self._run is None:
            raise RunNotFound(self._trouble or f"no snapshot of {self.source.run} can be read")
        return Reading(self._run, self._clock() - self._read_at, self._trouble)

    def _refresh_snapshot(self, *, wait: bool) -> None:
        """Reads the source, unless another tab's thread is reading it and *wait* is False."""
        if not self._lock.acquire(blocking=wait):
            return
        try:
            # The thread of another tab may have read the source while this one waited for the lock
            if self._run is not None and self._clock() - self._read_at < _FRESH_SECONDS:
                return
            self._run, self._trouble = self.source.latest(), ""
            self._read_at = self._clock()
        except (ZeromonError, OSError) as error:
            self._trouble = str(error)
            if not self._fall_back() and isinstance(error, RunNotFound):
                # Else an open tab shows it as if it were still there
                self._run, self._trouble = None, f"run {self.source.run} was deleted"
        finally:
            self._lock.release()

    def _fall_back(self) -> bool:
        """Opens the run elsewhere: a restarted collector has another port, a lost one left a record.

        Returns whether the run is anywhere.
        """
        if not self.source.relocatable:
            return False
        with suppress(ZeromonError, OSError):
            source = open_run_source(self.source.run, self._store)
            run = source.latest()
            # A record is written at intervals: before the end, it may be older than what the tabs show
            is_final = run.ended and not run.unfinished
            if self._run is None or is_final or run.taken_wall >= self._run.taken_wall:
                self.source, self._run, self._trouble = source, run, ""
                self._read_at = self._clock()
            return True
        return False

    def at(self, seconds: float) -> RunSnapshot:
        """The recorded snapshot at *seconds* since the epoch."""
        return self.source.at(seconds)

    def findings(self) -> list[Finding]:
        """All findings in the run's record, read every few seconds; [] where it cannot be read."""
        if self._clock() - self._past_at >= _PAST_SECONDS:
            self._read_past()
        return self._findings

    def span(self) -> tuple[float, float] | None:
        """The first and the last recorded moment; None where there is no record."""
        if self._clock() - self._past_at >= _PAST_SECONDS:
            self._read_past()
        if self._span is None or self._run is None or self._run.ended:
            return self._span
        return self._span[0], max(self._span[1], self._run.taken_wall)

    def _read_past(self) -> None:
        self._past_at = self._clock()
        with suppress(ZeromonError, OSError):
            # At once: the thread of another tab would show a run without a past meanwhile
            self._span, self._findings = self.source.span(), self.source.findings()

    def series(
        self,
        ranks: tuple[int, ...],
        last_steps: int,
        until_seconds: float | None,
        steps: tuple[int, int] | None = None,
    ) -> tuple[int, Series]:
        """The steps to draw, and a number that changes when they are read anew.

        *steps*: those from the first to the last of them, instead of the *last_steps* newest.
        Between two readings, the new steps of a live run are appended, so that tabs need only those.
        """
        key = (ranks, last_steps, until_seconds, steps)
        with self._lock:
            drawn = self._series.get(key)
            run, clock_seconds = self._run, self._clock()
            is_large = run is not None and len(ranks or run.ranks) > _MANY_RANKS
            max_rows = _MAX_POINTS_MANY if is_large else _MAX_POINTS
            if drawn is None or (run is not None and run.origin):  # its source appends by itself
                fresh = self._read(run, max_rows, *key)
                anew = drawn is None or drawn.series["start_us"][:1] != fresh["start_us"][:1]
                number = (0 if drawn is None else drawn.number) + anew
                drawn = _Steps(fresh, max_rows, number, len(fresh["step"]), clock_seconds)
            elif drawn.is_uneven(clock_seconds):
                fresh = thin_series(drawn.series, max_rows)
                drawn = _Steps(fresh, max_rows, drawn.number + 1, len(fresh["step"]), clock_seconds)
            if until_seconds is None and run is not None and not run.origin:
                drawn = replace(drawn, series=_append_newer_steps(drawn.series, run, ranks, steps))
            self._series[key] = drawn
            self._series.move_to_end(key)
            while len(self._series) > _MAX_SOURCES:
                self._series.popitem(last=False)
            return drawn.number, drawn.series

    def _read(
        self,
        run: RunSnapshot | None,
        max_rows: int,
        ranks: tuple[int, ...],
        last_steps: int,
        until_seconds: float | None,
        steps: tuple[int, int] | None,
    ) -> Series:
        until_us = None if until_seconds is None else round(until_seconds * 1e6)
        since_us = 0
        if last_steps and steps is None and run is not None:
            seconds = max((r.steps.median_seconds or 0.0 for r in run.ranks), default=0.0)
            end_seconds = until_seconds if until_seconds is not None else run.taken_wall
            # A fifth more, as steps vary in length; the surplus is cut by number below
            since_us = round((end_seconds - 1.2 * last_steps * seconds) * 1e6)
        series: Series | None = None
        with suppress(ZeromonError, OSError):
            series = self.source.series(StepQuery(since_us, until_us, ranks, max_rows, steps))
        if series is None or not series["step"]:
            rows = _recent_step_rows(run, ranks, steps) if run is not None else []
            return rows_frame(rows).to_dict(as_series=False)
        if steps is not None or not last_steps:
            return series
        cut_step = max(series["step"]) - last_steps
        numbers = [n for n, step in enumerate(series["step"]) if step > cut_step]
        return {name: [column[n] for n in numbers] for name, column in series.items()}


def _recent_step_rows(
    run: RunSnapshot,
    ranks: tuple[int, ...],
    steps: tuple[int, int] | None = None,
    last_known: Mapping[int, int] = MappingProxyType({}),
) -> list[Row]:
    """The steps in *run*, of each rank those behind its *last_known* one."""
    shift = round(run.taken_wall * 1e9) - run.taken_ns
    return [
        row_of(rank.rank, step, shift)
        for rank in run.ranks
        if not ranks or rank.rank in ranks
        for step in rank.steps.recent[: None if run.ended else -1]  # the newest one may still change
        if step.step > last_known.get(rank.rank, -1)
        and (steps is None or steps[0] <= step.step <= steps[1])
    ]


def _append_newer_steps(
    series: Series, run: RunSnapshot, ranks: tuple[int, ...], steps: tuple[int, int] | None
) -> Series:
    last_known: dict[int, int] = {}
    for rank, step in zip(series["rank"], series["step"], strict=True):
        last_known[rank] = max(step, last_known.get(rank, step))
    fresh = _recent_step_rows(run, ranks, steps, last_known)
    if not fresh:
        return series
    columns = zip(*fresh, strict=True)
    return {name: [*old, *new] for (name, old), new in zip(series.items(), columns, strict=True)}


def open_run_source(name: str, store: Store, server: Server | None = None) -> Source:
    """A source of the run *name*: the *server* where one is given, else a collector, else the record."""
    if server is not None:
        return only_listed_run(find_listed_runs(server, name)).open(server)
    return reopen_run_source(name, False) or StoreSource(name, store)


class Hub:
    """All runs that tabs show, and the list of runs."""

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
        self._list: tuple[float, list[ListedRun]] = (-_LIST_SECONDS, [])

    def followed(self, name: str) -> Followed:
        """The run *name*; raises :class:`~zeromon.base.errors.ZeromonError` for an unknown run."""
        with self._lock:
            existing = self._followed.get(name)
            if existing is not None:
                self._followed.move_to_end(name)
                return existing
        followed = Followed(open_run_source(name, self.store, self._server), self.store, self._clock)
        with self._lock:
            # The thread of another tab may have opened the run meanwhile: one of both sources is enough
            followed = self._followed.setdefault(name, followed)
            while len(self._followed) > _MAX_SOURCES:
                self._followed.popitem(last=False)
            return followed

    def has(self, route: Route) -> bool:
        """Returns whether what an address names is there: the page, its runs, one of its ranks."""
        if route.unknown:
            return False
        try:
            for name in (route.run, *route.others) if route.run else ():
                self.followed(name).newest()
        except RunNotFound:
            return False
        except ZeromonError:
            return True  # it cannot be read now
        return not route.run or not self.missing_ranks(route)

    def missing_ranks(self, route: Route) -> str:
        """Why none of the ranks that an address names is in the run; "" where one is."""
        run = self.followed(route.run).newest().run
        ranks = [rank.rank for rank in run.ranks]
        # a large run has more ranks than its snapshot, and one that starts has no rank yet
        if not route.ranks or not ranks or run.fleet is not None or {*route.ranks} & {*ranks}:
            return ""
        named = ", ".join(map(str, route.ranks))
        return f"no rank {named} is known of run {run.run}: its ranks are {min(ranks)} to {max(ranks)}"

    def compared(self, names: Sequence[str]) -> Comparison:
        """Runs side by side; raises :class:`~zeromon.base.errors.ZeromonError` for an unknown run."""
        runs = [self.followed(name).newest().run for name in names]
        return compare([[snapshot_figures(run, self.store.folder(run.run))] for run in runs])

    def runs(self) -> list[ListedRun]:
        """The runs of the Prometheus server, or of this user on this node: live runs, then by start."""
        listed_at, listed = self._list
        if self._clock() - listed_at < _LIST_SECONDS:
            return listed
        if self._server is not None:
            items = [_listed_item(run) for run in runs_of(self._server)]
            # One assignment of both: another thread must not see a new time with the old list
            self._list = (self._clock(), items)
            return items
        live = {run.run for run in runs_of_node() if not run.ended}
        items = [
            ListedRun(manifest, manifest.run in live, self.store.about(manifest.run))
            for manifest in self.store.list_manifests()
        ]
        items.sort(key=lambda item: (not item.live, -item.manifest.started_wall))
        self._list = (self._clock(), items)
        return items


def _listed_item(run: SeenRun) -> ListedRun:
    """A run of the server's list as a row."""
    manifest = Manifest(
        run=run.run, node="", command=(), started_wall=run.started_wall, taken_wall=0.0,
        ended=not run.up, verdict=run.state, strategy=run.strategy, device="",
        health=run.health,
        severity=next((h.severity or "" for h in Health if h == run.health), Severity.INFO),
        ranks=run.ranks or run.known, steps=run.steps, step_seconds=run.step_seconds,
        exposed_ratio=run.exposed_ratio, memory_bytes=run.memory_bytes, worst="",
    )  # fmt: skip
    return ListedRun(manifest, bool(run.up))
