"""The past of a run as a Prometheus server has it: its span, series of points, findings."""

import math
import time
from collections import deque
from dataclasses import dataclass, replace

from zeromon.snapshot import RECENT_STEPS, Finding, RankSnapshot, RunSnapshot, StepSummary
from zeromon.sources.prometheus import promql
from zeromon.sources.prometheus.decode import history_of, key_of, series_of, whole_series_of
from zeromon.sources.prometheus.reader import MOST_WANTED, Reader, together
from zeromon.storage.run_store import StepQuery
from zeromon.storage.step_history import NAMES, Series, step_of

LINES = 4
"""Maximum number of ranks; of more, a series without a choice has the maximum, median and minimum."""
_RETENTION_SECONDS = 15 * 86400
"""How far back a run's beginning is searched: Prometheus's default retention."""
_RECENT_SECONDS, _RECENT_POINTS = 1800.0, 120
_MOST_POINTS_WHOLE = 60
_MOST_POINTS_FINDINGS = 120
_FINDINGS_SECONDS = 60.0


@dataclass(slots=True)
class _CachedSeries:
    """A series that grows at its end, so that only new points are read."""

    begin: float
    step: float
    until: float
    rows: Series


class History:
    """The past of one run. *latest* is everywhere the newest snapshot, None before the first."""

    def __init__(self, reader: Reader) -> None:
        self._reader = reader
        self.first: float | None = None
        """When the run was seen first, seconds since the epoch; None while not looked up."""
        self._cached: dict[tuple[int, ...], _CachedSeries] = {}
        self._findings: tuple[float, list[Finding]] | None = None
        self._points: dict[int, deque[StepSummary]] = {}
        self._filled: set[int] = set()

    def span(self, latest: RunSnapshot | None) -> tuple[float, float] | None:
        """Returns the first and the last moment of the run; None where nothing is known."""
        if self.first is None or latest is None:
            ends = self.ends(None)
            if ends is None:
                return None
            self.first = ends[0]
            return ends if latest is None else (ends[0], max(ends[1], latest.taken_wall))
        return self.first, latest.taken_wall

    def ends(self, at: float | None) -> tuple[float, float] | None:
        """Returns when a rank was seen first and last, to a minute; within the last hour to a second."""
        server, choice = self._reader.server, self._reader.choice
        since = (time.time() if at is None else at) - _RETENTION_SECONDS
        ranks = server.values("rank", choice.of("rank_up"), since)
        keys = sorted(key for key in (key_of({"rank": rank}) for rank in ranks) if key is not None)
        if not keys:
            return None
        one = choice._replace(ranks=(keys[0].rank,))
        whole, newest = (
            {s.labels.get("of"): s.value - server.offset for s in part}
            for part in together(
                lambda: self._reader.query(promql.span(one, _RETENTION_SECONDS, 60), at),
                lambda: self._reader.query(promql.span(one, 3600, 1), at),
            )
        )
        first = min(whole.get("first", math.inf), newest.get("first", math.inf))
        last = max(whole.get("last", 0.0), newest.get("last", 0.0))
        return (first, last) if last else None

    # ---- series ----------------------------------------------------------------------------------

    def series(self, query: StepQuery, latest: RunSnapshot | None) -> Series:
        """Returns about ``query.most`` points a rank; a point is the mean step since the one before.

        Without ranks in the query, of more than :data:`LINES` the maximum, median and minimum of all,
        as the ranks :data:`~zeromon.storage.step_history.MOST`, ``MEDIAN`` and ``LEAST``.
        """
        if query.steps is not None:
            return self._of_steps(query, latest, query.steps)
        span = self.span(latest)
        if span is None:
            return {name: [] for name in NAMES}
        begin = max(span[0], query.since_us / 1e6)
        end = span[1] if query.until_us is None else min(span[1], query.until_us / 1e6)
        ranks = query.ranks
        if latest is not None and not ranks and latest.fleet is None and len(latest.ranks) <= LINES:
            ranks = tuple(rank.rank for rank in latest.ranks)
        most = max(2, min(query.most, 600 if ranks else _MOST_POINTS_WHOLE))
        if query.until_us is not None:
            step = max(self._reader.interval, (end - begin) / most)
            return self._read_points(ranks, (begin, end), step)
        return self._extended(ranks, begin, end, most)

    def _of_steps(
        self, query: StepQuery, latest: RunSnapshot | None, steps: tuple[int, int]
    ) -> Series:
        """Returns the points of *steps*: the whole run tells when they were, which is read anew."""
        whole = self.series(replace(query, steps=None), latest)
        reached = [*zip(whole["step"], whole["start_us"], strict=True)]
        before = max((at for step, at in reached if step < steps[0]), default=query.since_us)
        after = min((at for step, at in reached if step > steps[1]), default=query.until_us)
        found = self.series(replace(query, steps=None, since_us=before, until_us=after), latest)
        kept = [n for n, step in enumerate(found["step"]) if steps[0] <= step <= steps[1]]
        return {name: [column[n] for n in kept] for name, column in found.items()}

    def _extended(self, ranks: tuple[int, ...], begin: float, end: float, most: int) -> Series:
        """Returns the cached series, extended by its new points."""
        cached = self._cached.get(ranks)
        if (
            cached is not None
            and begin >= cached.begin - cached.step
            and (end - cached.begin) <= (3 * most * cached.step)
        ):
            fresh = cached.until + cached.step
            if fresh <= end:
                more = self._read_points(ranks, (fresh, end), cached.step)
                cached.rows = {name: [*cached.rows[name], *more[name]] for name in NAMES}
                cached.until = fresh + cached.step * math.floor((end - fresh) / cached.step)
            return cached.rows
        step = max(self._reader.interval, (end - begin) / most)
        rows = self._read_points(ranks, (begin, end), step)
        until = begin + step * math.floor((end - begin) / step)
        self._cached[ranks] = _CachedSeries(begin, step, until, rows)
        while len(self._cached) > MOST_WANTED:
            del self._cached[next(iter(self._cached))]
        return rows

    def _read_points(
        self, ranks: tuple[int, ...], span: tuple[float, float], step: float
    ) -> Series:
        if span[1] < span[0]:
            return {name: [] for name in NAMES}
        server, choice = self._reader.server, self._reader.choice
        window = f"{max(10, math.ceil(4 * self._reader.interval), math.ceil(step))}s"
        if not ranks:
            whole = promql.whole_over_time(choice, window)
            return whole_series_of(server.matrix(whole, span, step), step)
        some = promql.steps_over_time(choice._replace(ranks=ranks), window)
        return series_of(server.matrix(some, span, step), step)

    # ---- recent steps of ranks -------------------------------------------------------------------

    def with_recent(
        self, rank: RankSnapshot, latest: RunSnapshot | None, *, wanted: bool
    ) -> RankSnapshot:
        """Returns *rank* with the points of earlier snapshots; of a wanted one, of half an hour."""
        if not rank.alive:
            return rank
        points = self._points.setdefault(rank.rank, deque(maxlen=RECENT_STEPS))
        if wanted and rank.rank not in self._filled:
            self._filled.add(rank.rank)
            points.clear()
            points.extend(self._read_recent(rank.rank, latest))
        for point in rank.recent:
            if points and point.step < points[-1].step:
                points.clear()  # the run restarted from an earlier step
            if not points or point.step > points[-1].step:
                points.append(point)
        return replace(rank, recent=tuple(points))

    def _read_recent(self, rank: int, latest: RunSnapshot | None) -> tuple[StepSummary, ...]:
        span = self.span(latest)
        if span is None:
            return ()
        since, until = max(span[0], span[1] - _RECENT_SECONDS), round(span[1] * 1e6)
        query = StepQuery(round(since * 1e6), until, (rank,), _RECENT_POINTS)
        rows = self.series(query, latest)
        return tuple(step_of(row, 0) for row in zip(*(rows[name] for name in NAMES), strict=True))

    # ---- findings --------------------------------------------------------------------------------

    def findings(self, latest: RunSnapshot | None) -> list[Finding]:
        """Returns when each finding came and went, to a hundredth of the span; read once a minute."""
        now = time.monotonic()
        if self._findings is None or now - self._findings[0] > _FINDINGS_SECONDS:
            span = self.span(latest)
            if span is None:
                return []
            step = max(self._reader.interval, (span[1] - span[0]) / _MOST_POINTS_FINDINGS)
            query = promql.findings_over_time(self._reader.choice)
            lines = self._reader.server.matrix(query, span, step)
            self._findings = (now, history_of(lines, step))
        return self._findings[1]
