"""A run as a Prometheus server knows it: the third :class:`~zeromon.sources.base.Source`.

:class:`Reader` queries the present, in detail for ranks that a view shows, :class:`History` the past.
docs/how-to/prometheus.md says which queries are sent, and how often.
"""

import math
import re
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from statistics import median
from typing import TypeVar

from zeromon.base.errors import CaptureRefused, RunAmbiguous, RunNotFound, SourceError, ZeromonError
from zeromon.base.units import human_count, human_seconds, printable
from zeromon.ring.paths import is_run_id
from zeromon.snapshot import Finding, RankSnapshot, RunSnapshot, StepSummary
from zeromon.snapshot.run import Fleet
from zeromon.snapshot.step import RECENT_STEPS, Lanes
from zeromon.sources.base import Output, Playback
from zeromon.sources.live import LiveSource
from zeromon.sources.prometheus import decode, promql
from zeromon.sources.prometheus.client import Sample, Server
from zeromon.sources.prometheus.promql import REMEMBERED_SECONDS, Choice
from zeromon.storage.run_store import WHOLE_RUN, StepQuery
from zeromon.storage.step_history.rows import NAMES, Series, step_of

# ---- what a server knows of one run at one moment -----------------------------------------------

# Reads what a Prometheus server knows of one run at one moment: which queries, in which order.
# Of up to :data:`MANY` ranks all are read. Of more, the server aggregates, and single ranks are
# read that matter or that a view wants. docs/how-to/prometheus.md counts the queries.

MANY = 256
"""With more ranks a snapshot has only those that matter."""
SAMPLED = 4096
"""With more ranks the distribution of a figure is that of a tenth of them."""
_WHOLLY = 16
"""Number of ranks up to which every detail is read."""
_CENSUS_SECONDS = 60.0
_UNKNOWN_INTERVAL_SECONDS = 2.0
_USUAL_INTERVAL = 15.0
_MAX_STALE = 8
_ENDED_SECONDS = 3600
"""How long ago a run may have ended whose gauges are still looked for."""

_Result = TypeVar("_Result")


@dataclass(slots=True)
class Reading:
    """The result of one reading: samples by rank, and what is known of the whole run."""

    facts: dict[decode.Key, decode.RankSamples]
    silent: dict[decode.Key, float] = field(default_factory=dict)
    """Rank without new samples -> for how long, seconds."""
    seen: float = 0.0
    """When the newest sample was taken, on our clock."""
    fleet: Fleet | None = None
    findings: dict[tuple[str, str], int] = field(default_factory=dict)
    """(rule, severity) -> ranks that have the finding."""
    ranks: int = 0
    others: tuple[str, ...] = ()
    """Collectors of another job of the same name."""

    def add_past(self, past: "Reading") -> None:
        """Adds what *past*, when a rank lived last, knew of the same ranks and this reading does not."""
        self.seen = past.seen
        for key, facts in self.facts.items():
            earlier = past.facts.get(key) or decode.RankSamples()
            # The last step may have ended after the last moment that is known: its total is of the end
            totals = {of: value for of, value in facts.rates.items() if of == "spent_in_all"}
            facts.rates, facts.phases = earlier.rates | totals, earlier.phases
            for name, rows in earlier.found.items():
                mine = facts.found.setdefault(name, rows)
                # setdefault may have returned these very rows: += would double them
                if name == "finding" and mine is not rows:
                    mine += rows  # one that ends with the run beside one about its end
        self.findings = past.findings | self.findings
        if self.fleet is not None and past.fleet is not None:
            self.fleet = replace(self.fleet, spreads=past.fleet.spreads)


def run_in_threads(*calls: Callable[[], _Result]) -> list[_Result]:
    """Returns what *calls* return, each run in a thread; raises what the first to fail raised."""
    results: list[_Result | None] = [None] * len(calls)
    errors: list[BaseException] = []

    def run_at(at: int) -> None:
        try:
            results[at] = calls[at]()
        except BaseException as error:  # raised below, in the caller's thread
            errors.append(error)

    threads = [threading.Thread(target=run_at, args=(at,), daemon=True) for at in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return results  # type: ignore[return-value]  # none is missing where nothing failed


def usual_gap(scrapes: Iterable[Sequence[float]]) -> float | None:
    """Returns the median time between two scrapes of a rank, seconds; None where it is unknown."""
    gaps = [b - a for walls in scrapes for a, b in pairwise(walls)]
    return max(0.1, median(gaps)) if gaps else None


class Reader:
    """Queries one server about one run. Not for several threads at once."""

    def __init__(self, server: Server, choice: Choice, requests: "Wanted", max_ranks: int) -> None:
        self.server, self.choice, self.many = server, choice, max_ranks
        self.interval = 1.0
        """The scrape interval, seconds."""
        self.census_due = 0.0
        """When the ranks are counted again, by the monotonic clock."""
        self._wanted = requests
        self._count = 0
        self._node_names: dict[str, str] = {}

    def census(self, at: float | None = None) -> None:
        """Counts the ranks and measures the scrape interval, when it is due or *at* a moment."""
        clock = time.monotonic()
        if at is None and clock < self.census_due:
            return
        samples = self.query(promql.count_of_ranks(self.choice), at)
        self._count = next((s.count for s in samples if s.labels.get("of") == "ranks"), 0)
        first_key = next((key for s in samples if (key := decode.key_of(s.labels)) is not None), None)
        if first_key is not None:
            one_rank = self.choice._replace(ranks=(first_key.rank,))
            matrix = self.server.samples(promql.scrapes_of_rank(one_rank), at)
            gap = usual_gap([[scraped_at for scraped_at, _ in series.values] for series in matrix])
            self.interval = gap or _USUAL_INTERVAL
            # After a single scrape the interval is a guess, which would stay for a minute
            self.census_due = clock + (_CENSUS_SECONDS if gap else _UNKNOWN_INTERVAL_SECONDS)

    def read(self, at: float | None = None) -> Reading:
        """Returns what is known now, or *at* a moment of our clock.

        Gauges end with the run: those of a run that has ended are of the moment it was alive last.
        """
        read_at = self._read_large if self._count > self.many else self._read_small
        reading = read_at(at)
        if reading.facts and not reading.silent and not any(f.up for f in reading.facts.values()):
            step = max(1, int(self.interval))
            alive = self.query(promql.last_alive_time(self.choice, _ENDED_SECONDS, step), at)
            if alive:
                reading.add_past(read_at(alive[0].value - self.server.offset))
        return reading

    def query(self, expression: str, at: float | None = None) -> list[Sample]:
        """Returns the samples of an instant query."""
        return self.server.vector(expression, at)

    @property
    def _rate_window(self) -> str:
        """The window of rates: four scrapes, because one may be lost."""
        return f"{max(10, math.ceil(4 * self.interval))}s"

    @property
    def _silence_limit(self) -> float:
        """How long a rank may have no sample, seconds: a scrape may fail."""
        return 2.5 * self.interval + 1

    def _read_small(self, at: float | None) -> Reading:
        run = self.choice
        is_small = self._count <= _WHOLLY
        detailed = () if is_small else tuple(sorted(self._wanted.ranks()))
        columns, rates, lost, *details = run_in_threads(
            lambda: self.query(promql.columns_of_ranks(run, detail=is_small), at),
            lambda: self.query(promql.rates_of_steps(run, self._rate_window), at),
            lambda: self.query(promql.recently_lost_ranks(run), at),
            *self._details_of(detailed, at),
        )
        reading = Reading(decode.samples_by_rank([*columns, *(details[0] if details else ())], rates))
        reading.facts, reading.others = decode.dedupe_jobs(reading.facts)
        # The server still returns an old last sample of a rank that is silent
        offset = self.server.offset
        times = {
            decode.key_of(s.labels): s.value - offset for s in rates if s.labels.get("of") == "seen"
        }
        reading.seen = max(times.values(), default=time.time() if at is None else at)
        for key, facts in reading.facts.items():
            age = reading.seen - times.get(key, reading.seen)
            # The collector of a rank that has ended leaves, and the rank is not unknown for that
            if facts.up and age > self._silence_limit:
                reading.silent[key] = age
        ids = {key.rank for key in reading.facts}
        stale = {key for key in map(decode.key_of, (s.labels for s in lost)) if key is not None}
        stale = {key for key in stale if key.rank not in ids and key.instance not in reading.others}
        if stale:
            self._add_stale(reading, stale, at)
        reading.ranks = len(reading.facts)
        for facts in reading.facts.values():
            for rule, severity, *_ in facts.by("finding", "rule", "severity"):
                count = reading.findings.get((rule, severity), 0)
                reading.findings[rule, severity] = count + 1
        return reading

    def _read_large(self, at: float | None) -> Reading:
        run, window = self.choice, self._rate_window
        watched, node = self._wanted.ranks(), self._wanted.node()
        selections = [promql.ranks_that_matter(run)]
        if node:
            selections.append(run._replace(instances=(node,)).of("rank_up"))
        samples, rows, *chosen = run_in_threads(
            lambda: self.query(promql.whole_run(run, window, sampled=self._count > SAMPLED), at),
            lambda: self.query(promql.figures_of_nodes(run, window), at),
            # Bound by a default argument: all threads would otherwise send the last query of the loop
            *(lambda query=query: self.query(query, at) for query in selections),
        )
        totals = decode.whole_of(samples)
        if not totals.ranks:
            return Reading({})
        keys = {decode.key_of(sample.labels) for answer in chosen for sample in answer}
        ranks = {key.rank for key in keys if key is not None} | {0} | watched
        selected = run._replace(ranks=tuple(sorted(ranks)))
        columns, rates, *details = run_in_threads(
            lambda: self.query(promql.columns_of_ranks(selected), at),
            lambda: self.query(promql.rates_of_steps(selected, window), at),
            *self._details_of(tuple(sorted(watched)), at),
        )
        reading = Reading(decode.samples_by_rank([*columns, *(details[0] if details else ())], rates))
        reading.facts, reading.others = decode.dedupe_jobs(reading.facts)
        reading.seen = totals.counts.get("seen", 0.0) - self.server.offset
        silent = self._silent_nodes(reading, rows, at)
        self._learn_names({s.labels.get("instance", "") for s in rows}, at)
        reading.fleet = decode.fleet_of_nodes(
            totals, decode.nodes_of_samples(rows, self._node_names, silent)
        )
        reading.findings, reading.ranks = totals.findings, totals.ranks
        return reading

    def _details_of(self, ranks: tuple[int, ...], at: float | None) -> list[Callable[[], list[Sample]]]:
        selected = self.choice._replace(ranks=ranks)
        return [lambda: self.query(promql.details_of_ranks(selected), at)] if ranks else []

    def _learn_names(self, addresses: set[str], at: float | None) -> None:
        if not addresses <= self._node_names.keys():
            for sample in self.query(promql.names_of_nodes(self.choice), at):
                labels = sample.labels
                self._node_names[labels.get("instance", "")] = labels.get("node", "")
            for address in addresses:
                self._node_names.setdefault(address, "")

    # ---- ranks without new samples ---------------------------------------------------------------

    def _add_stale(self, reading: Reading, stale: set[decode.Key], at: float | None) -> None:
        """Adds the ranks *stale*, which have no sample now, with their last samples."""
        wall_now = time.time() if at is None else at
        addresses = tuple(sorted({key.instance for key in stale}))
        last_times = {
            key: sample.value - self.server.offset
            for sample in self._last_seen(addresses, at)
            if (key := decode.key_of(sample.labels)) in stale
        }
        by_address = dict.fromkeys(addresses, 0.0)
        for key, seen_at in last_times.items():
            by_address[key.instance] = max(seen_at, by_address[key.instance])
        recent = sorted(by_address.items(), key=lambda pair: -pair[1])[:_MAX_STALE]
        queries = [
            (promql.columns_of_ranks(self.choice._replace(instances=(address,))), seen_at)
            for address, seen_at in recent
        ]
        for columns in run_in_threads(*(lambda q=q, w=w: self.query(q, w) for q, w in queries)):
            for key, facts in decode.samples_by_rank(columns, ()).items():
                if key in last_times:
                    reading.facts[key] = facts
                    age = wall_now - last_times[key]
                    if facts.up and age > self._silence_limit:
                        reading.silent[key] = age
        if not reading.seen:
            reading.seen = max([0.0, *last_times.values()])

    def _silent_nodes(
        self, reading: Reading, rows: Iterable[Sample], at: float | None
    ) -> dict[str, tuple[int, float]]:
        """Returns collector without samples -> how many ranks it had, and since how many seconds."""
        lost = {s.labels.get("instance", ""): s.count for s in rows if s.labels.get("of") == "lost"}
        if not lost:
            return {}
        wall_now = time.time() if at is None else at
        times: dict[str, float] = {}
        keys = set()
        for sample in self._last_seen(tuple(sorted(lost)), at):
            key = decode.key_of(sample.labels)
            if key is not None and key.instance in lost:
                keys.add(key)
                seen_at = sample.value - self.server.offset
                times[key.instance] = max(seen_at, times.get(key.instance, 0.0))
        listed = set(sorted(keys)[: promql.MAX_OF_A_KIND * _MAX_STALE])
        if listed:
            self._add_stale(reading, listed, at)
        # Never 0: a node counts as silent by a number that is not 0
        return {address: (lost[address], max(1e-3, wall_now - t)) for address, t in times.items()}

    def _last_seen(self, addresses: tuple[str, ...], at: float | None) -> list[Sample]:
        """Returns when each rank of these collectors had its last sample, by the server's clock."""
        selected = self.choice._replace(instances=addresses)
        step = max(1, int(self.interval))
        return self.query(promql.last_scrape_times(selected, REMEMBERED_SECONDS, step), at)


# ---- the ranks that views show, and what their own collectors report ----------------------------

MAX_WANTED = 64
_WANTED_SECONDS = 30.0
_DETAIL_SECONDS = 1.0
_OLD_DETAIL_SECONDS = 20.0
_ADDRESS = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[\w.-]+):\d{1,5}(/[\w./-]*)?")


class Wanted:
    """The ranks and the node that views asked for, each for half a minute. Any thread may call it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._ranks: dict[int, float] = {}
        self._node = ("", 0.0)

    def add(self, ranks: Sequence[int], node: str) -> bool:
        """Adds ranks, and the node whose collector has that address; whether any of them is new."""
        expiry = time.monotonic() + _WANTED_SECONDS
        with self._lock:
            is_new = any(rank not in self._ranks for rank in ranks)
            self._ranks.update(dict.fromkeys(list(ranks)[:MAX_WANTED], expiry))
            if node:
                is_new = is_new or node != self._node[0]
                self._node = (node, expiry)
            return is_new

    def ranks(self) -> set[int]:
        """Returns the ranks that are wanted still."""
        clock = time.monotonic()
        with self._lock:
            self._ranks = {rank: expiry for rank, expiry in self._ranks.items() if expiry > clock}
            return set(self._ranks)

    def node(self) -> str:
        """Returns the address of the wanted node's collector; "" for none."""
        with self._lock:
            node, expiry = self._node
            return node if expiry > time.monotonic() else ""


class Details:
    """The snapshots of the collectors whose ranks are wanted."""

    def __init__(self, run: str) -> None:
        self._run = run
        self._by_address: dict[str, _Detail] = {}

    def merge(self, run: RunSnapshot, watched: set[int], collectors: Mapping[int, str]) -> RunSnapshot:
        """Returns *run* with the *watched* ranks, and findings about them, as their collectors tell.

        *collectors*: rank -> address of its collector. A collector that does not answer changes
        nothing.
        """
        # The label instance may hold anything: only host:port is asked
        addresses = {
            collectors[rank] for rank in watched if _ADDRESS.fullmatch(collectors.get(rank, ""))
        }
        for unwanted in self._by_address.keys() - addresses:
            del self._by_address[unwanted]
        ranks: dict[int, RankSnapshot] = {}
        findings: dict[tuple[str, int], Finding] = {}
        for address in sorted(addresses):
            detail = self._by_address.setdefault(address, _Detail(address, self._run))
            answer = detail.snapshot()
            if answer is not None:
                received, snapshot = answer
                shift = round(received * 1e9) - snapshot.taken_ns
                ranks |= {
                    r.rank: decode.on_our_clock(r, shift) for r in snapshot.ranks if r.rank in watched
                }
                findings |= {(f.rule, f.rank): f for f in snapshot.findings if f.rank in (-1, *watched)}
        if not ranks:
            return run
        return replace(
            run,
            ranks=tuple(ranks.get(rank.rank, rank) for rank in run.ranks),
            findings=tuple(findings.get((f.rule, f.rank), f) for f in run.findings),
        )

    def list_troubles(self) -> list[str]:
        """Returns why collectors do not answer, one text each."""
        return [detail.trouble for detail in self._by_address.values() if detail.trouble]


class _Detail:
    """One collector's snapshots, read in a thread because the collector may not answer."""

    def __init__(self, address: str, run: str) -> None:
        self._source = LiveSource(address, run, signs=True)
        self._thread: threading.Thread | None = None
        self._newest: tuple[float, float, RunSnapshot] | None = None
        self.trouble = ""

    def snapshot(self) -> tuple[float, RunSnapshot] | None:
        """Returns when the newest snapshot came, and the snapshot; None when it is too old."""
        if self._thread is None or not self._thread.is_alive():
            self._thread = threading.Thread(target=self._read_snapshot, daemon=True)
            self._thread.start()
        self._thread.join(_DETAIL_SECONDS)
        answer = self._newest
        if answer is None or time.monotonic() - answer[0] > _OLD_DETAIL_SECONDS:
            return None
        return answer[1], answer[2]

    def _read_snapshot(self) -> None:
        try:
            snapshot = self._source.latest()
            self._newest, self.trouble = (time.monotonic(), time.time(), snapshot), ""
        except ZeromonError as error:
            self.trouble = str(error)


# ---- the source ---------------------------------------------------------------------------------

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
            decode.rank_of(key, facts, taken_wall, reached, silent_seconds=reading.silent.get(key, 0.0))
            for key, facts in sorted(reading.facts.items())
        ]
        if reading.fleet is None:
            ranks = decode.with_host_use(ranks)
        watched = self._wanted.ranks()
        if at is None:
            ranks = [
                self._history.with_recent(rank, self._latest, is_wanted=rank.rank in watched)
                for rank in ranks
            ]
        if is_over := _has_run_ended(reading):
            # nothing runs out of memory any more
            ranks = [replace(rank, memory=replace(rank.memory, risks=())) for rank in ranks]
        findings = decode.with_deaths(
            decode.findings_of(reading.facts, reading.findings, reading.ranks), ranks
        )
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
            stragglers=decode.stragglers_of_findings(ranks, findings),
            hangs=decode.hangs_of_ranks(reading.facts),
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


# ---- the past of a run --------------------------------------------------------------------------

# The past of a run as a Prometheus server has it: its span, series of points, findings.

LINES = 4
"""Maximum number of ranks; of more, a series without a choice has the maximum, median and minimum."""
_RETENTION_SECONDS = 15 * 86400
"""How far back a run's beginning is searched: Prometheus's default retention."""
_RECENT_SECONDS, _RECENT_POINTS = 1800.0, 120
_MAX_POINTS_WHOLE = 60
_MAX_POINTS_FINDINGS = 120
_FINDINGS_SECONDS = 60.0


@dataclass(slots=True)
class _CachedSeries:
    """A series that grows at its end, so that only new points are read."""

    begin: float
    step: float
    until: float
    rows: Series


class History:
    """The past of one run. *run* is everywhere the newest snapshot, None before the first."""

    def __init__(self, reader: Reader) -> None:
        self._reader = reader
        self.first: float | None = None
        """When the run was seen first, seconds since the epoch; None while not looked up."""
        self._cached: dict[tuple[int, ...], _CachedSeries] = {}
        self._findings: tuple[float, list[Finding]] | None = None
        self._points: dict[int, deque[StepSummary]] = {}
        self._filled: set[int] = set()

    def span(self, run: RunSnapshot | None) -> tuple[float, float] | None:
        """Returns the first and the last moment of the run; None where nothing is known."""
        if self.first is None or run is None:
            bounds = self.ends(None)
            if bounds is None:
                return None
            self.first = bounds[0]
            return bounds if run is None else (bounds[0], max(bounds[1], run.taken_wall))
        return self.first, run.taken_wall

    def ends(self, at: float | None) -> tuple[float, float] | None:
        """Returns when a rank was seen first and last, to a minute; within the last hour to a second."""
        server, choice = self._reader.server, self._reader.choice
        start = (time.time() if at is None else at) - _RETENTION_SECONDS
        ranks = server.values("rank", choice.of("rank_up"), start)
        keys = sorted(
            key for key in (decode.key_of({"rank": rank}) for rank in ranks) if key is not None
        )
        if not keys:
            return None
        # One rank tells the span: a subquery over all ranks and two weeks would overload the server
        one_rank = choice._replace(ranks=(keys[0].rank,))
        coarse, fine = (
            {s.labels.get("of"): s.value - server.offset for s in samples}
            for samples in run_in_threads(
                lambda: self._reader.query(promql.run_span(one_rank, _RETENTION_SECONDS, 60), at),
                lambda: self._reader.query(promql.run_span(one_rank, 3600, 1), at),
            )
        )
        first_wall = min(coarse.get("first", math.inf), fine.get("first", math.inf))
        last_wall = max(coarse.get("last", 0.0), fine.get("last", 0.0))
        return (first_wall, last_wall) if last_wall else None

    # ---- series ----------------------------------------------------------------------------------

    def series(self, query: StepQuery, run: RunSnapshot | None) -> Series:
        """Returns about ``query.most`` points a rank; a point is the mean step since the one before.

        Without ranks in the query, of more than :data:`LINES` the maximum, median and minimum of all,
        as the ranks :data:`~zeromon.storage.step_history.queries.MOST`, ``MEDIAN`` and ``LEAST``.
        """
        if query.steps is not None:
            return self._of_steps(query, run, query.steps)
        span = self.span(run)
        if span is None:
            return {name: [] for name in NAMES}
        start = max(span[0], query.since_us / 1e6)
        stop = span[1] if query.until_us is None else min(span[1], query.until_us / 1e6)
        ranks = query.ranks
        if run is not None and not ranks and run.fleet is None and len(run.ranks) <= LINES:
            ranks = tuple(rank.rank for rank in run.ranks)
        count = max(2, min(query.most, 600 if ranks else _MAX_POINTS_WHOLE))
        if query.until_us is not None:
            step = max(self._reader.interval, (stop - start) / count)
            return self._read_points(ranks, (start, stop), step)
        return self._grow_cache(ranks, start, stop, count)

    def _of_steps(self, query: StepQuery, run: RunSnapshot | None, steps: tuple[int, int]) -> Series:
        """Returns the points of *steps*: the whole run tells when they were, which is read anew."""
        all_steps = self.series(replace(query, steps=None), run)
        reached = [*zip(all_steps["step"], all_steps["start_us"], strict=True)]
        since_us = max((at for step, at in reached if step < steps[0]), default=query.since_us)
        until_us = min((at for step, at in reached if step > steps[1]), default=query.until_us)
        series = self.series(replace(query, steps=None, since_us=since_us, until_us=until_us), run)
        chosen = [n for n, step in enumerate(series["step"]) if steps[0] <= step <= steps[1]]
        return {name: [column[n] for n in chosen] for name, column in series.items()}

    def _grow_cache(self, ranks: tuple[int, ...], start: float, stop: float, count: int) -> Series:
        cached = self._cached.get(ranks)
        # Without the limit, a long run would keep the fine step of its first minutes for all its points
        if (
            cached is not None
            and start >= cached.begin - cached.step
            and (stop - cached.begin) <= (3 * count * cached.step)
        ):
            fresh = cached.until + cached.step
            if fresh <= stop:
                new_rows = self._read_points(ranks, (fresh, stop), cached.step)
                cached.rows = {name: [*cached.rows[name], *new_rows[name]] for name in NAMES}
                cached.until = fresh + cached.step * math.floor((stop - fresh) / cached.step)
            return cached.rows
        step = max(self._reader.interval, (stop - start) / count)
        rows = self._read_points(ranks, (start, stop), step)
        last_wall = start + step * math.floor((stop - start) / step)
        self._cached[ranks] = _CachedSeries(start, step, last_wall, rows)
        while len(self._cached) > MAX_WANTED:
            del self._cached[next(iter(self._cached))]
        return rows

    def _read_points(self, ranks: tuple[int, ...], span: tuple[float, float], step: float) -> Series:
        if span[1] < span[0]:
            return {name: [] for name in NAMES}
        server, choice = self._reader.server, self._reader.choice
        window = f"{max(10, math.ceil(4 * self._reader.interval), math.ceil(step))}s"
        if not ranks:
            expression = promql.whole_over_time(choice, window)
            return decode.whole_series_of(server.matrix(expression, span, step), step)
        of_ranks = promql.steps_over_time(choice._replace(ranks=ranks), window)
        return decode.series_of_ranks(server.matrix(of_ranks, span, step), step)

    # ---- recent steps of ranks -------------------------------------------------------------------

    def with_recent(
        self, rank: RankSnapshot, run: RunSnapshot | None, *, is_wanted: bool
    ) -> RankSnapshot:
        """Returns *rank* with the points of earlier snapshots; of a wanted one, of half an hour."""
        if not rank.status.alive:
            return rank
        points = self._points.setdefault(rank.rank, deque(maxlen=RECENT_STEPS))
        if is_wanted and rank.rank not in self._filled:
            self._filled.add(rank.rank)
            points.clear()
            points.extend(self._read_recent(rank.rank, run))
        for point in rank.steps.recent:
            if points and point.step < points[-1].step:
                points.clear()  # the run restarted from an earlier step
            if not points or point.step > points[-1].step:
                points.append(point)
        return rank.with_recent(points)

    def _read_recent(self, rank: int, run: RunSnapshot | None) -> tuple[StepSummary, ...]:
        span = self.span(run)
        if span is None:
            return ()
        start, until_us = max(span[0], span[1] - _RECENT_SECONDS), round(span[1] * 1e6)
        query = StepQuery(round(start * 1e6), until_us, (rank,), _RECENT_POINTS)
        rows = self.series(query, run)
        return tuple(step_of(row, 0) for row in zip(*(rows[name] for name in NAMES), strict=True))

    # ---- findings --------------------------------------------------------------------------------

    def findings(self, run: RunSnapshot | None) -> list[Finding]:
        """Returns when each finding came and went, to a hundredth of the span; read once a minute."""
        clock = time.monotonic()
        if self._findings is None or clock - self._findings[0] > _FINDINGS_SECONDS:
            span = self.span(run)
            if span is None:
                return []
            step = max(self._reader.interval, (span[1] - span[0]) / _MAX_POINTS_FINDINGS)
            query = promql.findings_over_time(self._reader.choice)
            matrix = self._reader.server.matrix(query, span, step)
            self._findings = (clock, decode.history_of(matrix, step))
        return self._findings[1]
