"""The past of a run as a Prometheus server has it: its span, series of points, findings."""

import math
import time
from collections import deque
from dataclasses import dataclass, replace

from zeromon.snapshot import Finding, RankSnapshot, RunSnapshot, StepSummary
from zeromon.snapshot.step import RECENT_STEPS
from zeromon.sources.prometheus import promql
from zeromon.sources.prometheus.decode import history_of, key_of, series_of_ranks, whole_series_of
from zeromon.sources.prometheus.source import MAX_WANTED, Reader, run_in_threads
from zeromon.storage.run_store import StepQuery
from zeromon.storage.step_history.rows import NAMES, Series, step_of

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
        keys = sorted(key for key in (key_of({"rank": rank}) for rank in ranks) if key is not None)
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
            return whole_series_of(server.matrix(expression, span, step), step)
        of_ranks = promql.steps_over_time(choice._replace(ranks=ranks), window)
        return series_of_ranks(server.matrix(of_ranks, span, step), step)

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
            self._findings = (clock, history_of(matrix, step))
        return self._findings[1]
