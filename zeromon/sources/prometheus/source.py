"""A run as a Prometheus server knows it: the third :class:`~zeromon.sources.base.Source`.

:mod:`.reader` queries the present, in detail for the ranks that a view shows, :mod:`.history` the past.
docs/how-to/prometheus.md says which queries are sent, and how often.
"""

import re
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from zeromon.base.errors import CaptureRefused, RunAmbiguous, RunNotFound, SourceError
from zeromon.base.units import human_count, human_seconds, printable
from zeromon.ring.paths import is_run_id
from zeromon.snapshot import Finding, RunSnapshot
from zeromon.snapshot.step import Lanes
from zeromon.sources.base import Output, Playback
from zeromon.sources.prometheus import promql
from zeromon.sources.prometheus.client import Sample, Server
from zeromon.sources.prometheus.decode import (
    findings_of,
    hangs_of_ranks,
    rank_of,
    stragglers_of_findings,
    with_deaths,
    with_host_use,
)
from zeromon.sources.prometheus.history import History
from zeromon.sources.prometheus.promql import Choice
from zeromon.sources.prometheus.reader import MANY, Details, Reader, Reading, Wanted
from zeromon.storage.run_store import WHOLE_RUN, StepQuery
from zeromon.storage.step_history.rows import Series

_REST = 8
"""The server is left alone for so many times as long as its answer took."""
_MAX_REST_SECONDS = 60.0


class PrometheusSource:
    """One run; any thread may call it. *match*: further matchers, in PromQL."""

    live = True
    relocatable = False
    playback: Playback | None = None

    def __init__(self, server: Server, run: str, match: str = "", *, many: int = MANY) -> None:
        if not is_run_id(run):
            raise RunNotFound(f"no run named {printable(run)}", "")
        self.server, self.run = server, run
        # Reentrant: latest() calls span(), which takes it again
        self._lock = threading.RLock()
        self._latest: RunSnapshot | None = None
        self._due = 0.0
        self._wanted = Wanted()
        self._reader = Reader(server, Choice(run, match), self._wanted, many)
        self._history = History(self._reader)
        self._details = Details(run)

    def latest(self) -> RunSnapshot:
        """Returns the newest snapshot; reads the server at most twice a scrape interval."""
        with self._lock:
            start = time.monotonic()
            if self._latest is None or start >= self._due:
                self._reader.census()
                self._latest = self._snapshot_at(None)
                if self._history.first is None:
                    self.span()
                elapsed = time.monotonic() - start
                pause = max(self._reader.interval / 2, _REST * elapsed)
                self._due = min(start + elapsed + min(_MAX_REST_SECONDS, pause), self._reader.census_due)
            return self._latest

    def at(self, wall_time: float) -> RunSnapshot:
        """Returns the snapshot at *wall_time*, or the last one before it."""
        with self._lock:
            self._reader.census()
            return self._snapshot_at(wall_time)

    def span(self) -> tuple[float, float] | None:
        """Returns the first and the last moment of the run; the first is looked up once."""
        with self._lock:
            return self._history.span(self._latest)

    def series(self, query: StepQuery = WHOLE_RUN) -> Series:
        """Returns points over time; see :meth:`History.series`."""
        with self._lock:
            return self._history.series(query, self._latest)

    def findings(self) -> list[Finding]:
        """Returns when each finding came and went; see :meth:`History.findings`."""
        with self._lock:
            return self._history.findings(self._latest)

    def lanes(self, steps: int, ranks: Sequence[int] = ()) -> Lanes:  # noqa: ARG002
        """Refuses: a Prometheus server has no events."""
        raise SourceError(
            f"run {self.run} is read from {self.server.url}, which has no single collectives",
            "Open the run on one of its nodes: zeromon attach.",
        )

    def output(self, pid: int) -> Output:  # noqa: ARG002
        """Refuses."""
        raise SourceError("a Prometheus server has no output of the training")

    def trace(self, steps: int, ranks: Sequence[int] = ()) -> int:  # noqa: ARG002
        """Refuses: a Prometheus server has no way to reach the ranks."""
        raise CaptureRefused(
            f"run {self.run} is read from {self.server.url}, which cannot request a trace",
            "Request it on a node of the run: zeromon trace capture.",
        )

    def request_detail(self, ranks: Sequence[int] = (), node: str = "") -> None:
        """Reads these *ranks*, and the collector at *node*, for half a minute; a view calls again."""
        if self._wanted.add(ranks, node):
            self._due = 0.0

    # ---- making a snapshot -----------------------------------------------------------------------

    def _snapshot_at(self, at: float | None) -> RunSnapshot:
        reading = self._reader.read(at)
        return self._make_snapshot(reading, at) if reading.facts else self._last_snapshot(at)

    def _last_snapshot(self, at: float | None) -> RunSnapshot:
        """Returns the last snapshot of a run that has no samples now or *at* a moment."""
        bounds = self._history.ends(at)
        if bounds is None:
            raise RunNotFound(
                f"{self.server.url} knows no run {self.run}" + ("" if at is None else " of that time"),
                "`zeromon attach --prometheus` lists those that it knows.",
            )
        last_wall = bounds[1]
        # At that moment: without samples the count is 0, and a large run would be read rank by rank
        self._reader.census(last_wall)
        reading = self._reader.read(last_wall)
        if not reading.facts:
            raise RunNotFound(f"{self.server.url} answers with nothing of run {self.run}")
        return replace(self._make_snapshot(reading, last_wall), ended=at is None)

    def _make_snapshot(self, reading: Reading, at: float | None) -> RunSnapshot:
        taken_wall = reading.seen or time.time()
        reached = max(facts.count("steps_total") for facts in reading.facts.values())
        ranks = [
            rank_of(key, facts, taken_wall, reached, silent_seconds=reading.silent.get(key, 0.0))
            for key, facts in sorted(reading.facts.items())
        ]
        if reading.fleet is None:
            ranks = with_host_use(ranks)
        watched = self._wanted.ranks()
        if at is None:
            ranks = [
                self._history.with_recent(rank, self._latest, is_wanted=rank.rank in watched)
                for rank in ranks
            ]
        if is_over := _has_run_ended(reading):
            # nothing runs out of memory any more
            ranks = [replace(rank, memory=replace(rank.memory, risks=())) for rank in ranks]
        findings = with_deaths(findings_of(reading.facts, reading.findings, reading.ranks), ranks)
        fleet = reading.fleet
        nodes = sorted({rank.node for rank in ranks})
        node_count = len(fleet.nodes) if fleet is not None else len(nodes)
        starts = [f.number("run_started_timestamp_seconds") for f in reading.facts.values()]
        started_wall = min(filter(None, starts), default=self._history.first or taken_wall)
        snapshot = RunSnapshot(
            run=self.run,
            command=(),
            node=nodes[0] if node_count == 1 else f"{human_count(node_count)} nodes",
            started_wall=started_wall,
            taken_wall=taken_wall,
            taken_ns=round(taken_wall * 1e9),
            ended=is_over,
            ranks=tuple(ranks),
            findings=findings,
            stragglers=stragglers_of_findings(ranks, findings),
            hangs=hangs_of_ranks(reading.facts),
            fleet=fleet,
            origin=self.server.url,
            every_seconds=self._reader.interval,
        )
        if at is None:
            # The collector of a silent rank does not answer: each snapshot would wait a second for it
            collectors = {k.rank: k.instance for k in reading.facts if k not in reading.silent}
            snapshot = self._details.merge(snapshot, watched, collectors)
        return replace(snapshot, note=self._note_of_reading(reading))

    def _note_of_reading(self, reading: Reading) -> str:
        notes = []
        if reading.others:
            notes.append(
                f"two jobs are called {self.run}: ranks of {', '.join(reading.others[:4])} are left"
                f" out; --run '{self.run}{{instance=~\"...\"}}' chooses"
            )
        if self.server.offset:
            ahead = "ahead of" if self.server.offset > 0 else "behind"
            notes.append(
                f"the clock of {self.server.url} is {human_seconds(round(abs(self.server.offset)))}"
                f" {ahead} this machine's; times are this machine's"
            )
        if self.server.warning:
            notes.append(f"{self.server.url} warns: {self.server.warning}")
        notes += [f"rank detail: {trouble}" for trouble in self._details.list_troubles()]
        return "; ".join(notes)


def _has_run_ended(reading: Reading) -> bool:
    """Returns whether no rank is alive and none is merely silent."""
    if reading.fleet is not None:
        return not reading.fleet.up and not reading.fleet.silent
    return not any(facts.up for facts in reading.facts.values()) and not reading.silent


# ---- which runs a Prometheus server knows -------------------------------------------------------

_SELECTOR = re.compile(r"([^{}]+)\{(.*)\}", re.DOTALL)


@dataclass(frozen=True, slots=True)
class SeenRun:
    """A run that a Prometheus server has seen in the last hour."""

    run: str
    ranks: int
    """Ranks with a sample now."""
    up: int
    """Ranks that are alive."""
    known: int
    """Ranks with a sample in the last hour."""
    steps: int
    match: str = ""
    """Further matchers that the user gave, in PromQL."""
    started_wall: float = 0.0
    """Seconds since the epoch; 0 where unknown."""
    strategy: str = ""
    health: str = ""
    """The word of the verdict; of several nodes, of the worst one."""
    step_seconds: float | None = None
    exposed_ratio: float | None = None
    memory_bytes: int = -1

    def open(self, server: Server) -> PrometheusSource:
        """Returns a source of this run's snapshots."""
        return PrometheusSource(server, self.run, self.match)

    @property
    def state(self) -> str:
        """The state of the run as one phrase."""
        if not self.ranks:
            return f"{human_count(self.known)} ranks, not seen now"
        if not self.up:
            return self.health or "ended"
        ranks = f"{human_count(self.up)} ranks, step {human_count(self.steps)}"
        return f"{self.health}: {ranks}" if self.health else ranks


def runs_of(server: Server) -> list[SeenRun]:
    """Returns the runs of the last hour, the live ones first; raises :class:`SourceError`."""
    rows: dict[str, dict[str, Sample]] = {}
    for sample in server.vector(promql.runs_last_hour()):
        row = rows.setdefault(sample.labels.get("run", ""), {})
        row[sample.labels.get("of", "")] = sample
    # Another exporter's series may have a label of this name
    runs = [_listed_run(run, row) for run, row in rows.items() if is_run_id(run)]
    return sorted(runs, key=lambda run: (not run.up, not run.ranks, run.run))


def _listed_run(run: str, row: Mapping[str, Sample]) -> SeenRun:
    counts = {of: sample.count for of, sample in row.items()}
    values = {of: sample.value for of, sample in row.items()}
    labels = {of: printable(s.labels.get(of, "")) for of, s in row.items()}
    return SeenRun(
        run, counts.get("ranks", 0), counts.get("up", 0), counts.get("known", 0),
        counts.get("steps", 0), started_wall=values.get("started", 0.0),
        strategy=labels.get("strategy", ""), health=labels.get("health", ""),
        step_seconds=values.get("step_seconds"), exposed_ratio=values.get("exposed"),
        memory_bytes=counts.get("memory", -1),
    )  # fmt: skip


def find_listed_runs(server: Server, target: str | None) -> list[SeenRun]:
    """Returns the runs that *target* may mean, at least one.

    *target* is a name, the beginning of a name, ``NAME{job="a"}``, or None for all runs. Raises
    :class:`RunNotFound` without any, and :class:`SourceError` where the server does not answer.
    """
    selector = _SELECTOR.fullmatch(target or "")
    name, match = (selector[1], selector[2]) if selector is not None else (target or "", "")
    listed = runs_of(server)
    candidates = [run for run in listed if run.run == name]
    candidates = candidates or [run for run in listed if run.run.startswith(name)]
    candidates = [run for run in candidates if run.up] or candidates
    if candidates:
        return [replace(run, match=match) for run in candidates]
    older = SeenRun(name, 0, 0, 0, 0, match)
    if name and older.open(server).span() is not None:
        return [older]
    if not listed:
        raise RunNotFound(
            f"{server.url} has no series of zeromon",
            "Does it scrape the collectors? Its page shows its targets. See docs/how-to/prometheus.md",
        )
    raise RunNotFound(
        f"{server.url} knows no run {printable(name)}",
        f"It knows {', '.join(run.run for run in listed[:8])}.",
    )


def only_listed_run(candidates: Sequence[SeenRun]) -> SeenRun:
    """Returns the only one of *candidates*; raises :class:`RunAmbiguous` for several."""
    if len(candidates) > 1:
        names = ", ".join(run.run for run in candidates[:16])
        raise RunAmbiguous(f"the server knows several runs: {names}", "Name one of them with --run.")
    return candidates[0]
