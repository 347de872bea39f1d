"""A run as a Prometheus knows it: the third :class:`~zeromon.source.Source`.

Up to :data:`MANY` ranks, all of them are read. Of more, the server aggregates, and single ranks are read
that matter, or that somebody wants to see; those come with every detail from the collector of their
node where it answers. docs/prometheus_source.md says what is asked, and how often.
"""

from __future__ import annotations

import math
import re
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from statistics import median
from typing import TypeVar

from zeromon.errors import RunAmbiguous, RunNotFound, ZeromonError
from zeromon.fleet import queries
from zeromon.fleet.api import Line, Sample, Server
from zeromon.fleet.picture import (
    Facts,
    Key,
    findings_of,
    fleet_of,
    gathered,
    hangs_of,
    history_of,
    key_of,
    nodes_of,
    on_our_clock,
    rank_of,
    series_of,
    stragglers_of,
    told_apart,
    whole_of,
    whole_series_of,
)
from zeromon.fleet.queries import REMEMBERED_SECONDS, Choice
from zeromon.history import NAMES, Series, step_of
from zeromon.paths import is_run_id
from zeromon.record import KnownFinding
from zeromon.snapshot import (
    RECENT_STEPS,
    Finding,
    Fleet,
    RankSnapshot,
    RunSnapshot,
    StepSummary,
)
from zeromon.source import LiveSource
from zeromon.units import human_count, human_seconds, printable

MANY = 256
"""With more ranks than these a picture has only those that matter."""
SAMPLED = 4096
"""With more than these the distribution of a figure is that of a tenth of them."""
LINES = 4
"""Of more ranks than these a series without a choice has the most, the median and the least."""
MOST_WANTED = 64
_WHOLLY = 16
"""Of so many ranks every detail is read."""
_WANTED_SECONDS = 30.0
_RHYTHM_SECONDS = 60.0
_UNKNOWN_RHYTHM_SECONDS = 2.0
_USUAL_INTERVAL = 15.0
_REST = 8
"""So many times as long as an answer took the server is left alone."""
_MOST_REST_SECONDS = 60.0
_KEPT_SECONDS = 15 * 86400
"""How far back a run's beginning is looked for: what Prometheus keeps by default."""
_MOST_GHOSTS = 8
_BEFORE_SECONDS, _BEFORE_POINTS = 1800.0, 120
_MOST_POINTS_WHOLE = 60
_MOST_POINTS_FINDINGS = 120
_FINDINGS_SECONDS = 60.0
_DETAIL_SECONDS = 1.0
_OLD_DETAIL_SECONDS = 20.0
_ADDRESS = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[\w.-]+):\d{1,5}(/[\w./-]*)?")
_SELECTOR = re.compile(r"([^{}]+)\{(.*)\}", re.DOTALL)

_Result = TypeVar("_Result")


@dataclass(frozen=True, slots=True)
class ListedRun:
    """A run that a Prometheus has seen in the last hour."""

    run: str
    ranks: int
    """Now."""
    up: int
    known: int
    """In the last hour."""
    steps: int

    @property
    def state(self) -> str:
        """In words."""
        if not self.ranks:
            return f"{human_count(self.known)} ranks, not seen now"
        if not self.up:
            return "ended"
        return f"{human_count(self.up)} ranks, step {human_count(self.steps)}"


def runs_of(server: Server) -> list[ListedRun]:
    """The runs of the last hour, the living ones first."""
    found: dict[str, dict[str, int]] = {}
    for sample in server.vector(queries.runs()):
        row = found.setdefault(sample.labels.get("run", ""), {})
        row[sample.labels.get("of", "")] = int(sample.value)
    runs = [
        ListedRun(run, *(row.get(name, 0) for name in ("ranks", "up", "known", "steps")))
        for run, row in found.items()
        if is_run_id(run)  # what else is called so is not ours
    ]
    return sorted(runs, key=lambda run: (not run.up, not run.ranks, run.run))


def find(server: Server, wanted: str | None) -> PrometheusSource | list[ListedRun]:
    """The run that *wanted* means: a name or its beginning, or ``NAME{job="a"}``; or those to choose of.

    Raises :class:`RunNotFound`, and :class:`SourceError` where the server does not answer.
    """
    selector = _SELECTOR.fullmatch(wanted or "")
    name, match = (selector[1], selector[2]) if selector is not None else (wanted or "", "")
    known = runs_of(server)
    exact = [run for run in known if run.run == name]
    if exact:
        return PrometheusSource(server, name, match)
    candidates = [run for run in known if run.run.startswith(name)]
    candidates = [run for run in candidates if run.up] or candidates
    if len(candidates) == 1:
        return PrometheusSource(server, candidates[0].run, match)
    if candidates:
        return candidates
    if name and PrometheusSource(server, name, match).span() is not None:
        return PrometheusSource(server, name, match)
    if not known:
        raise RunNotFound(
            f"{server.url} has no series of zeromon",
            "Does it scrape the collectors? Its page shows its targets; docs/prometheus.md says how.",
        )
    raise RunNotFound(
        f"{server.url} knows no run {printable(name)}",
        f"It knows {', '.join(run.run for run in known[:8])}.",
    )


def only(found: PrometheusSource | list[ListedRun]) -> PrometheusSource:
    """*found*, or :class:`RunAmbiguous` when it is a choice and nobody can be asked."""
    if isinstance(found, PrometheusSource):
        return found
    names = ", ".join(run.run for run in found[:16])
    raise RunAmbiguous(f"the server knows several runs: {names}", "Name one of them with --run.")


def together(*calls: Callable[[], _Result]) -> list[_Result]:
    """What *calls* return, each asked in a thread of its own; raises what the first of them raised."""
    done: list[_Result | None] = [None] * len(calls)
    failed: list[BaseException] = []

    def do(at: int) -> None:
        try:
            done[at] = calls[at]()
        except BaseException as error:  # raised below, in the caller's thread
            failed.append(error)

    threads = [threading.Thread(target=do, args=(at,), daemon=True) for at in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failed:
        raise failed[0]
    return done  # type: ignore[return-value]  # none is missing where nothing failed


def usual_gap(scrapes: Iterable[Sequence[float]]) -> float | None:
    """The median time between two scrapes of a rank, seconds; None where too few are known."""
    gaps = [b - a for walls in scrapes for a, b in pairwise(walls)]
    return max(0.1, median(gaps)) if gaps else None


class _Detail:
    """What a collector says of its ranks; asked for in a thread, as it may not answer."""

    def __init__(self, address: str, run: str) -> None:
        self._source = LiveSource(address, run)
        self._thread: threading.Thread | None = None
        self._known: tuple[float, float, RunSnapshot] | None = None
        self.trouble = ""

    def picture(self) -> tuple[float, RunSnapshot] | None:
        """When it came, and what; None where nothing new has come for some time."""
        if self._thread is None or not self._thread.is_alive():
            self._thread = threading.Thread(target=self._ask, daemon=True)
            self._thread.start()
        self._thread.join(_DETAIL_SECONDS)
        known = self._known
        if known is None or time.monotonic() - known[0] > _OLD_DETAIL_SECONDS:
            return None
        return known[1], known[2]

    def _ask(self) -> None:
        try:
            picture = self._source.latest()
            self._known, self.trouble = (time.monotonic(), time.time(), picture), ""
        except ZeromonError as error:
            self.trouble = str(error)


@dataclass(slots=True)
class _Grown:
    """A series that grows at its end, so that it is not asked for again and again."""

    begin: float
    step: float
    until: float
    rows: Series


@dataclass(slots=True)
class _Read:
    """One reading: the samples by rank, and what is known of the whole."""

    facts: dict[Key, Facts]
    silent: dict[Key, float] = field(default_factory=dict)
    """For how long nothing was seen of those, seconds."""
    seen: float = 0.0
    """When anything was seen last, on our clock."""
    fleet: Fleet | None = None
    findings: dict[tuple[str, str], int] = field(default_factory=dict)
    ranks: int = 0
    others: tuple[str, ...] = ()
    """Collectors of another job of the same name."""


class PrometheusSource:
    """One run; may be asked from several threads. *match*: further matchers, as PromQL has them."""

    def __init__(self, server: Server, run: str, match: str = "", *, many: int = MANY) -> None:
        if not is_run_id(run):
            raise RunNotFound(f"no run is called {printable(run)}", "")
        self.server, self.run = server, run
        self._choice, self._many = Choice(run, match), many
        self._lock = threading.RLock()
        self._wanting = threading.Lock()  # nobody who wants something waits for an answer
        self._latest: RunSnapshot | None = None
        self._due = 0.0
        self._interval, self._count, self._rhythm_due = 1.0, 0, 0.0
        self._names: dict[str, str] = {}
        self._points: dict[int, deque[StepSummary]] = {}
        self._filled: set[int] = set()
        self._wanted: dict[int, float] = {}
        self._wanted_node = ("", 0.0)
        self._details: dict[str, _Detail] = {}
        self._first: float | None = None
        self._grown: dict[tuple[int, ...], _Grown] = {}
        self._findings: tuple[float, list[KnownFinding]] | None = None

    # ---- now ------------------------------------------------------------------------------------------

    def latest(self) -> RunSnapshot:
        """Asks the server, but not more often than it learns something, nor so that it is kept busy."""
        with self._lock:
            began = time.monotonic()
            if self._latest is None or began >= self._due:
                self._find_rhythm()
                self._latest = self._picture(None)
                if self._first is None:
                    self.span()
                    self._latest = replace(self._latest, started_wall=self._first or began)
                spent = time.monotonic() - began
                rest = min(_MOST_REST_SECONDS, max(self._interval / 2, _REST * spent))
                self._due = min(began + spent + rest, self._rhythm_due)
            return self._latest

    def want(self, ranks: Collection[int] = (), node: str = "") -> None:
        """Somebody looks at those *ranks*, and at all of the *node* whose collector has that address.

        They are read for half a minute; whoever still looks asks again.
        """
        until = time.monotonic() + _WANTED_SECONDS
        with self._wanting:
            fresh = [rank for rank in ranks if rank not in self._wanted]
            self._wanted.update(dict.fromkeys(list(ranks)[:MOST_WANTED], until))
            if node:
                fresh += [-1] * (node != self._wanted_node[0])
                self._wanted_node = (node, until)
            if fresh:
                self._due = 0.0

    def _find_rhythm(self, at: float | None = None) -> None:
        """How many ranks there are, and how often they are scraped."""
        now = time.monotonic()
        if at is None and now < self._rhythm_due:
            return
        found = self._ask(queries.census(self._choice), at)
        self._count = int(next((s.value for s in found if s.labels.get("of") == "ranks"), 0))
        one = next((key for s in found if (key := key_of(s.labels)) is not None), None)
        if one is not None:
            some = self._choice._replace(ranks=(one.rank,))
            lines = self.server.samples(queries.scrapes(some), at)
            gap = usual_gap([[wall for wall, _ in line.values] for line in lines])
            self._interval = gap or _USUAL_INTERVAL
            self._rhythm_due = now + (_RHYTHM_SECONDS if gap else _UNKNOWN_RHYTHM_SECONDS)

    @property
    def _large(self) -> bool:
        return self._count > self._many

    @property
    def _window(self) -> str:
        """Over which counters become rates: four scrapes, for one may be lost."""
        return f"{max(10, math.ceil(4 * self._interval))}s"

    def _ask(self, expression: str, at: float | None = None) -> list[Sample]:
        return self.server.vector(expression, at)

    def _picture(self, at: float | None) -> RunSnapshot:
        read = self._read_large(at) if self._large else self._read_small(at)
        if not read.facts:
            return self._last_picture(at)
        return self._made(read, at)

    # ---- what is asked --------------------------------------------------------------------------------

    def _read_small(self, at: float | None) -> _Read:
        run = self._choice
        few = self._count <= _WHOLLY
        wanted = () if few else tuple(sorted(self._still_wanted()[0]))
        columns, rates, lost, *more = together(
            lambda: self._ask(queries.columns(run, detail=few), at),
            lambda: self._ask(queries.rates(run, self._window), at),
            lambda: self._ask(queries.lost(run), at),
            *self._details_of(wanted, at),
        )
        read = _Read(gathered([*columns, *(more[0] if more else ())], rates))
        read.facts, read.others = told_apart(read.facts)
        self._note_seen(read, rates, at)
        here = {key.rank for key in read.facts}
        gone = {key for key in map(key_of, (s.labels for s in lost)) if key is not None}
        gone = {key for key in gone if key.rank not in here and key.instance not in read.others}
        if gone:
            self._add_ghosts(read, gone, at)
        read.ranks = len(read.facts)
        for facts in read.facts.values():
            for rule in facts.by("finding", "rule", "severity"):
                read.findings[rule[0], rule[1]] = read.findings.get((rule[0], rule[1]), 0) + 1
        return read

    def _read_large(self, at: float | None) -> _Read:
        run, window = self._choice, self._window
        wanted, node = self._still_wanted()
        asked = [queries.mattering(run)]
        if node:
            asked.append(run._replace(instances=(node,)).of("rank_up"))
        whole, rows, *chosen = together(
            lambda: self._ask(queries.whole(run, window, sampled=self._count > SAMPLED), at),
            lambda: self._ask(queries.nodes(run, window), at),
            *(lambda text=text: self._ask(text, at) for text in asked),
        )
        known = whole_of(whole)
        if not known.ranks:
            return _Read({})
        keys = {key_of(sample.labels) for part in chosen for sample in part}
        ranks = {key.rank for key in keys if key is not None} | {0} | wanted
        some = run._replace(ranks=tuple(sorted(ranks)))
        columns, rates, *more = together(
            lambda: self._ask(queries.columns(some), at),
            lambda: self._ask(queries.rates(some, window), at),
            *self._details_of(tuple(sorted(wanted)), at),
        )
        read = _Read(gathered([*columns, *(more[0] if more else ())], rates))
        read.facts, read.others = told_apart(read.facts)
        read.seen = known.counts.get("seen", 0.0) - self.server.offset
        silent = self._silent_nodes(read, rows, at)
        self._learn_names({s.labels.get("instance", "") for s in rows}, at)
        read.fleet = fleet_of(known, nodes_of(rows, self._names, silent))
        read.findings, read.ranks = known.findings, known.ranks
        return read

    def _details_of(
        self, ranks: tuple[int, ...], at: float | None
    ) -> list[Callable[[], list[Sample]]]:
        """The question for what else is known of *ranks*, if there are any."""
        some = self._choice._replace(ranks=ranks)
        return [lambda: self._ask(queries.details(some), at)] if ranks else []

    def _learn_names(self, addresses: set[str], at: float | None) -> None:
        if not addresses <= self._names.keys():
            for sample in self._ask(queries.node_names(self._choice), at):
                labels = sample.labels
                self._names[labels.get("instance", "")] = labels.get("node", "")
            for address in addresses:
                self._names.setdefault(address, "")

    def _still_wanted(self) -> tuple[set[int], str]:
        now = time.monotonic()
        with self._wanting:
            self._wanted = {rank: until for rank, until in self._wanted.items() if until > now}
            node, until = self._wanted_node
            return set(self._wanted), node if until > now else ""

    def _note_seen(self, read: _Read, rates: Iterable[Sample], at: float | None) -> None:
        """Whose samples are old although they are still answered with."""
        offset = self.server.offset
        seen = {key_of(s.labels): s.value - offset for s in rates if s.labels.get("of") == "seen"}
        read.seen = max(seen.values(), default=time.time() if at is None else at)
        for key in read.facts:
            behind = read.seen - seen.get(key, read.seen)
            if behind > self._patience:
                read.silent[key] = behind

    @property
    def _patience(self) -> float:
        """How long a rank may be unseen: a scrape may fail, as a collector is started again."""
        return 2.5 * self._interval + 1

    def _add_ghosts(self, read: _Read, gone: set[Key], at: float | None) -> None:
        """Ranks that are not seen any more, as they were when they were seen last."""
        now = time.time() if at is None else at
        addresses = tuple(sorted({key.instance for key in gone}))
        some = self._choice._replace(instances=addresses)
        step = max(1, int(self._interval))
        when = {
            key: sample.value - self.server.offset
            for sample in self._ask(queries.last_seen(some, REMEMBERED_SECONDS, step), at)
            if (key := key_of(sample.labels)) in gone
        }
        moments = dict.fromkeys(addresses, 0.0)
        for key, wall in when.items():
            moments[key.instance] = max(wall, moments[key.instance])
        latest = sorted(moments.items(), key=lambda pair: -pair[1])[:_MOST_GHOSTS]
        asked = [
            (queries.columns(self._choice._replace(instances=(address,))), wall)
            for address, wall in latest
        ]
        for columns in together(*(lambda a=a, w=w: self._ask(a, w) for a, w in asked)):
            for key, facts in gathered(columns, ()).items():
                if key in when:
                    read.facts[key] = facts
                    behind = now - when[key]
                    if behind > self._patience:
                        read.silent[key] = behind
        read.seen = max(read.seen, *when.values(), 0.0) if not read.seen else read.seen

    def _silent_nodes(
        self, read: _Read, rows: Iterable[Sample], at: float | None
    ) -> dict[str, tuple[int, float]]:
        """Collector -> how many ranks it had, and for how long it is silent."""
        lost = {
            s.labels.get("instance", ""): int(s.value) for s in rows if s.labels.get("of") == "lost"
        }
        if not lost:
            return {}
        now = time.time() if at is None else at
        some = self._choice._replace(instances=tuple(sorted(lost)))
        seen = self._ask(
            queries.last_seen(some, REMEMBERED_SECONDS, max(1, int(self._interval))), at
        )
        when: dict[str, float] = {}
        gone = set()
        for sample in seen:
            key = key_of(sample.labels)
            if key is not None and key.instance in lost:
                gone.add(key)
                wall = sample.value - self.server.offset
                when[key.instance] = max(wall, when.get(key.instance, 0.0))
        shown = set(sorted(gone)[: queries.MOST_OF_A_KIND * _MOST_GHOSTS])
        if shown:
            self._add_ghosts(read, shown, at)
        return {address: (lost[address], max(1e-3, now - wall)) for address, wall in when.items()}

    # ---- what is made of it ---------------------------------------------------------------------------

    def _made(self, read: _Read, at: float | None) -> RunSnapshot:
        now = read.seen or time.time()
        reached = max(facts.count("steps_total") for facts in read.facts.values())
        ranks = [
            rank_of(key, facts, now, reached, silent_seconds=read.silent.get(key, 0.0))
            for key, facts in sorted(read.facts.items())
        ]
        if at is None:
            ranks = [self._remembered(rank) for rank in ranks]
        findings = findings_of(read.facts, read.findings, read.ranks)
        ended = not any(facts.up for facts in read.facts.values()) and not read.silent
        if read.fleet is not None:
            ended = not read.fleet.up and not read.fleet.silent
        nodes = sorted({rank.node for rank in ranks})
        many = len(read.fleet.nodes) if read.fleet is not None else len(nodes)
        made = RunSnapshot(
            run=self.run,
            command=(),
            node=nodes[0] if many == 1 else f"{human_count(many)} nodes",
            started_wall=self._first if self._first is not None else now,
            taken_wall=now,
            taken_ns=round(now * 1e9),
            ended=ended,
            ranks=tuple(ranks),
            findings=findings,
            stragglers=stragglers_of(ranks, findings),
            hangs=hangs_of(read.facts),
            fleet=read.fleet,
            origin=self.server.url,
            every_seconds=self._interval,
        )
        made = self._detailed(made, read) if at is None else made
        return replace(made, note=self._note(read))

    def _note(self, read: _Read) -> str:
        parts = []
        if read.others:
            parts.append(
                f"two jobs are called {self.run}: what {', '.join(read.others[:4])} tells is left out;"
                f" --run '{self.run}{{instance=~\"...\"}}' chooses"
            )
        if self.server.offset:
            ahead = "ahead of" if self.server.offset > 0 else "behind"
            parts.append(
                f"the clock of {self.server.url} is {human_seconds(round(abs(self.server.offset)))}"
                f" {ahead} this machine's; times are this machine's"
            )
        if self.server.warning:
            parts.append(f"{self.server.url} warns: {self.server.warning}")
        parts += [f"rank detail: {one.trouble}" for one in self._details.values() if one.trouble]
        return "; ".join(parts)

    def _remembered(self, rank: RankSnapshot) -> RankSnapshot:
        """With the points of earlier pictures; of one that is looked at, of the last while."""
        if not rank.alive:
            return rank
        points = self._points.setdefault(rank.rank, deque(maxlen=RECENT_STEPS))
        if rank.rank in self._wanted and rank.rank not in self._filled:
            self._filled.add(rank.rank)
            points.clear()
            points.extend(self._before(rank.rank))
        for point in rank.recent:
            if points and point.step < points[-1].step:
                points.clear()  # a run that began anew
            if not points or point.step > points[-1].step:
                points.append(point)
        return replace(rank, recent=tuple(points))

    def _detailed(self, run: RunSnapshot, read: _Read) -> RunSnapshot:
        """With what the collectors of the wanted ranks say of them."""
        wanted, _ = self._still_wanted()
        of = {key.rank: key.instance for key in read.facts if key not in read.silent}
        addresses = {of[rank] for rank in wanted if _ADDRESS.fullmatch(of.get(rank, ""))}
        for gone in self._details.keys() - addresses:
            del self._details[gone]
        told: dict[int, RankSnapshot] = {}
        said: dict[tuple[str, int], Finding] = {}
        for address in sorted(addresses):
            detail = self._details.setdefault(address, _Detail(address, self.run))
            known = detail.picture()
            if known is not None:
                shift = round(known[0] * 1e9) - known[1].taken_ns
                told |= {r.rank: on_our_clock(r, shift) for r in known[1].ranks if r.rank in wanted}
                said |= {(f.rule, f.rank): f for f in known[1].findings if f.rank in (-1, *wanted)}
        if not told:
            return run
        ranks = tuple(told.get(rank.rank, rank) for rank in run.ranks)
        findings = tuple(said.get((f.rule, f.rank), f) for f in run.findings)
        return replace(run, ranks=ranks, findings=findings)

    def _last_picture(self, at: float | None) -> RunSnapshot:
        """A run that is not there: as it was when it was seen last."""
        ends = self._ends(at)
        if ends is None:
            raise RunNotFound(
                f"{self.server.url} knows no run {self.run}"
                + ("" if at is None else " of that time"),
                "`zeromon attach --prometheus` lists those that it knows.",
            )
        last = ends[1]
        self._find_rhythm(last)
        read = self._read_large(last) if self._large else self._read_small(last)
        if not read.facts:
            raise RunNotFound(f"{self.server.url} answers with nothing of run {self.run}")
        return replace(self._made(read, last), ended=at is None)

    # ---- before ---------------------------------------------------------------------------------------

    def span(self) -> tuple[float, float] | None:
        """Asks for the beginning once; the end is that of the newest picture."""
        with self._lock:
            latest = self._latest
            if self._first is None or latest is None:
                ends = self._ends(None)
                if ends is None:
                    return None
                self._first = ends[0]
                return ends if latest is None else (ends[0], max(ends[1], latest.taken_wall))
            return self._first, latest.taken_wall

    def _ends(self, at: float | None) -> tuple[float, float] | None:
        """When one of its ranks was seen first and last, to a minute; of the last hour to a second."""
        since = (time.time() if at is None else at) - _KEPT_SECONDS
        ranks = self.server.values("rank", self._choice.of("rank_up"), since)
        keys = sorted(key for key in (key_of({"rank": rank}) for rank in ranks) if key is not None)
        if not keys:
            return None
        one = self._choice._replace(ranks=(keys[0].rank,))
        whole, newest = (
            {s.labels.get("of"): s.value - self.server.offset for s in part}
            for part in together(
                lambda: self._ask(queries.span(one, _KEPT_SECONDS, 60), at),
                lambda: self._ask(queries.span(one, 3600, 1), at),
            )
        )
        first = min(whole.get("first", math.inf), newest.get("first", math.inf))
        last = max(whole.get("last", 0.0), newest.get("last", 0.0))
        return (first, last) if last else None

    def at(self, wall: float) -> RunSnapshot:
        """The picture at *wall*, or as it was last seen before."""
        with self._lock:
            self._find_rhythm()
            return self._picture(wall)

    def series(
        self,
        since_us: int = 0,
        until_us: int | None = None,
        ranks: Sequence[int] = (),
        most: int = 600,
    ) -> Series:
        """About *most* points a rank; a point is the mean step of the time since the one before.

        Without *ranks*, of more than :data:`LINES` the most, the median and the least of all, as the
        ranks :data:`~zeromon.history.MOST`, ``MEDIAN`` and ``LEAST``.
        """
        with self._lock:
            span = self.span()
            if span is None:
                return {name: [] for name in NAMES}
            begin = max(span[0], since_us / 1e6)
            end = span[1] if until_us is None else min(span[1], until_us / 1e6)
            known = self._latest
            if (
                known is not None
                and not ranks
                and known.fleet is None
                and len(known.ranks) <= LINES
            ):
                ranks = [rank.rank for rank in known.ranks]
            most = max(2, min(most, 600 if ranks else _MOST_POINTS_WHOLE))
            if until_us is not None:
                step = max(self._interval, (end - begin) / most)
                return self._points_of(tuple(ranks), (begin, end), step)
            return self._growing(tuple(ranks), begin, end, most)

    def _growing(self, ranks: tuple[int, ...], begin: float, end: float, most: int) -> Series:
        """What is known, and what is new since."""
        known = self._grown.get(ranks)
        if (
            known is not None
            and begin >= known.begin - known.step
            and (end - known.begin) <= (3 * most * known.step)
        ):
            fresh = known.until + known.step
            if fresh <= end:
                more = self._points_of(ranks, (fresh, end), known.step)
                known.rows = {name: [*known.rows[name], *more[name]] for name in NAMES}
                known.until = fresh + known.step * math.floor((end - fresh) / known.step)
            return known.rows
        step = max(self._interval, (end - begin) / most)
        rows = self._points_of(ranks, (begin, end), step)
        until = begin + step * math.floor((end - begin) / step)
        self._grown[ranks] = _Grown(begin, step, until, rows)
        while len(self._grown) > MOST_WANTED:
            del self._grown[next(iter(self._grown))]
        return rows

    def _points_of(self, ranks: tuple[int, ...], span: tuple[float, float], step: float) -> Series:
        window = f"{max(10, math.ceil(4 * self._interval), math.ceil(step))}s"
        if span[1] < span[0]:
            return {name: [] for name in NAMES}
        if not ranks:
            return whole_series_of(
                self._over(queries.whole_over_time(self._choice, window), span, step), step
            )
        some = self._choice._replace(ranks=ranks)
        return series_of(self._over(queries.steps_over_time(some, window), span, step), step)

    def _over(self, expression: str, span: tuple[float, float], step: float) -> list[Line]:
        return self.server.matrix(expression, span, step)

    def _before(self, rank: int) -> tuple[StepSummary, ...]:
        """The points of a rank in the last half hour."""
        span = self.span()
        if span is None:
            return ()
        since, until = max(span[0], span[1] - _BEFORE_SECONDS), round(span[1] * 1e6)
        rows = self.series(round(since * 1e6), until, (rank,), _BEFORE_POINTS)
        return tuple(step_of(row, 0) for row in zip(*(rows[name] for name in NAMES), strict=True))

    def findings(self) -> list[KnownFinding]:
        """When each came and went, to a hundredth of the whole time; read anew once a minute."""
        with self._lock:
            now = time.monotonic()
            if self._findings is None or now - self._findings[0] > _FINDINGS_SECONDS:
                span = self.span()
                if span is None:
                    return []
                step = max(self._interval, (span[1] - span[0]) / _MOST_POINTS_FINDINGS)
                lines = self._over(queries.findings_over_time(self._choice), span, step)
                self._findings = (now, history_of(lines, step))
            return self._findings[1]
