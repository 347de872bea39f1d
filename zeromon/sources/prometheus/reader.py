"""Reads what a Prometheus server knows of one run at one moment: which queries, in which order.

Of up to :data:`MANY` ranks all are read. Of more, the server aggregates, and single ranks are read
that matter or that a view wants. docs/how-to/prometheus.md counts the queries.
"""

import math
import re
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from statistics import median
from typing import TypeVar

from zeromon.base.errors import ZeromonError
from zeromon.snapshot import Finding, RankSnapshot, RunSnapshot
from zeromon.snapshot.run import Fleet
from zeromon.sources.live import LiveSource
from zeromon.sources.prometheus import promql
from zeromon.sources.prometheus.client import Sample, Server
from zeromon.sources.prometheus.decode import (
    Key,
    RankSamples,
    dedupe_jobs,
    fleet_of_nodes,
    key_of,
    nodes_of_samples,
    on_our_clock,
    samples_by_rank,
    whole_of,
)
from zeromon.sources.prometheus.promql import REMEMBERED_SECONDS, Choice

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

    facts: dict[Key, RankSamples]
    silent: dict[Key, float] = field(default_factory=dict)
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
            earlier = past.facts.get(key) or RankSamples()
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
        first_key = next((key for s in samples if (key := key_of(s.labels)) is not None), None)
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
        reading = Reading(samples_by_rank([*columns, *(details[0] if details else ())], rates))
        reading.facts, reading.others = dedupe_jobs(reading.facts)
        # The server still returns an old last sample of a rank that is silent
        offset = self.server.offset
        times = {key_of(s.labels): s.value - offset for s in rates if s.labels.get("of") == "seen"}
        reading.seen = max(times.values(), default=time.time() if at is None else at)
        for key in reading.facts:
            age = reading.seen - times.get(key, reading.seen)
            if age > self._silence_limit:
                reading.silent[key] = age
        ids = {key.rank for key in reading.facts}
        stale = {key for key in map(key_of, (s.labels for s in lost)) if key is not None}
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
        totals = whole_of(samples)
        if not totals.ranks:
            return Reading({})
        keys = {key_of(sample.labels) for answer in chosen for sample in answer}
        ranks = {key.rank for key in keys if key is not None} | {0} | watched
        selected = run._replace(ranks=tuple(sorted(ranks)))
        columns, rates, *details = run_in_threads(
            lambda: self.query(promql.columns_of_ranks(selected), at),
            lambda: self.query(promql.rates_of_steps(selected, window), at),
            *self._details_of(tuple(sorted(watched)), at),
        )
        reading = Reading(samples_by_rank([*columns, *(details[0] if details else ())], rates))
        reading.facts, reading.others = dedupe_jobs(reading.facts)
        reading.seen = totals.counts.get("seen", 0.0) - self.server.offset
        silent = self._silent_nodes(reading, rows, at)
        self._learn_names({s.labels.get("instance", "") for s in rows}, at)
        reading.fleet = fleet_of_nodes(totals, nodes_of_samples(rows, self._node_names, silent))
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

    def _add_stale(self, reading: Reading, stale: set[Key], at: float | None) -> None:
        """Adds the ranks *stale*, which have no sample now, with their last samples."""
        wall_now = time.time() if at is None else at
        addresses = tuple(sorted({key.instance for key in stale}))
        last_times = {
            key: sample.value - self.server.offset
            for sample in self._last_seen(addresses, at)
            if (key := key_of(sample.labels)) in stale
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
            for key, facts in samples_by_rank(columns, ()).items():
                if key in last_times:
                    reading.facts[key] = facts
                    age = wall_now - last_times[key]
                    if age > self._silence_limit:
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
            key = key_of(sample.labels)
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


# ---- which ranks the views look at, and what their own collectors tell of them ------------------

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
                ranks |= {r.rank: on_our_clock(r, shift) for r in snapshot.ranks if r.rank in watched}
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
