"""Runs as Python objects, for notebooks and scripts: :func:`zeromon.load`, :func:`zeromon.compare`.

A figure is the dashboard's, a sentence or number that of every view. pandas and plotly are imported by
the functions that need them.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from typing import Any

from zeromon.base.errors import ZeromonError
from zeromon.base.units import printable_lines
from zeromon.cli.compare import as_html, as_text, compare_named
from zeromon.cli.parser import import_extra
from zeromon.cli.plan import changes_of_run
from zeromon.cli.report import snapshot_of, step_series, step_tables
from zeromon.readout.text import finding_text
from zeromon.readout.verdict import judge_run
from zeromon.snapshot import Finding, RunSnapshot
from zeromon.snapshot.focus import first_counted
from zeromon.snapshot.step import NOT_TIMED, SKIPPED
from zeromon.storage.step_history.rows import PEAKS, SCALARS, TIMES, Series
from zeromon.storage.step_history.writer import rows_frame

_MAX_POINTS, _COLUMNS = 2000, 100


@contextmanager
def _hints_in_messages() -> Iterator[None]:
    """Puts the hint of an error into its message: a traceback shows nothing else."""
    try:
        yield
    except ZeromonError as error:
        error.args = (error.told,)
        raise


def _drawing(module: str) -> Any:
    return import_extra(module, "a figure", "dashboard")


def _data_frame(columns: Any) -> Any:
    try:
        import pandas
    except ImportError as error:
        raise ZeromonError("a DataFrame needs pandas", "pip install pandas") from error
    return pandas.DataFrame(columns)


class Run:
    """A run at the moment when it is loaded; load it again for newer steps of a live one.

    *name*: as ``zeromon report`` takes it, a file of ``zeromon report --json``, or a record's folder.
    """

    @_hints_in_messages()
    def __init__(self, name: str | None = None) -> None:
        self.snapshot, self._folder = snapshot_of(name)
        """All figures of the run, as ``zeromon report --json`` prints them."""

    def __repr__(self) -> str:
        findings = [f"  {finding.code} {finding_text(finding)}" for finding in self.findings]
        return printable_lines("\n".join([f"{self.name}: {self.verdict}", *findings]))

    @property
    def name(self) -> str:
        """The full name of the run."""
        return self.snapshot.run

    @property
    def verdict(self) -> str:
        """How the run is and why, in one sentence."""
        return judge_run(self.snapshot).text

    @property
    def findings(self) -> tuple[Finding, ...]:
        """The findings with code, severity, evidence and remedy, the most severe first."""
        return self.snapshot.findings

    @cached_property
    @_hints_in_messages()
    def steps(self) -> Any:
        """All recorded steps, a ``pandas.DataFrame``: one row per step and rank; NaN is unknown.

        ``seconds`` is the duration, ``exposed_seconds`` the wait for communication, and
        ``data_wait_seconds`` the wait for data; further ``*_seconds`` are phases. ``*_bytes`` is memory;
        ``samples`` and ``tokens`` are those of the rank. Where a long record has merged ``steps`` into
        one row, times and scalars are their means, and bytes their maxima.
        """
        import polars as pl

        def known(name: str) -> pl.Expr:
            return pl.when(pl.col(name) >= 0).then(pl.col(name))

        timed = (pl.col("flags") & NOT_TIMED) == 0
        seconds = []
        for name in TIMES:
            column = known(name).cast(pl.Float64) / 1e6
            if name == "communication_us" or name.endswith("exposed_us"):
                column = pl.when(timed).then(column)
            label = name.removeprefix("duration_").removesuffix("us") + "seconds"
            seconds.append(column.alias(label))
        tables = step_tables(self.snapshot, self._folder)[0]
        frame = pl.concat([rows_frame([]).lazy(), *tables]).sort("step", "rank").collect()
        frame = frame.select(
            "step", "rank", "steps", *seconds, *map(known, PEAKS), *SCALARS,
            ((pl.col("flags") & SKIPPED) > 0).alias("skipped"),
        )  # fmt: skip
        return _data_frame({column.name: column.to_numpy() for column in frame})

    # ---- figures of plotly ----------------------------------------------------------------------

    @_hints_in_messages()
    def chart(self, name: str) -> Any:
        """The chart *name* over the steps: step-time, memory, exposed, throughput, loss, grad-norm."""
        run, series = self.snapshot, step_series(self.snapshot, self._folder)
        charts = _drawing("zeromon_dashboard.charts").charts_of(series, run)
        return _figure_of_chart(charts, name, run, series)

    def memory(self) -> Any:
        """Memory over the steps, with capacity and forecast."""
        return self.chart("memory")

    def exposed(self) -> Any:
        """Exposed communication over the steps."""
        return self.chart("exposed")

    @_hints_in_messages()
    def breakdown(self) -> Any:
        """Where a step goes, by rank."""
        figures = _drawing("zeromon_dashboard.plotly_figures")
        return _figure(figures.step_breakdown(self.snapshot), figures.NO_PARTS)

    @_hints_in_messages()
    def roles(self) -> Any:
        """Memory by role, measured and predicted, of the first rank with a census."""
        figures, rank = _drawing("zeromon_dashboard.plotly_figures"), first_counted(self.snapshot.ranks)
        return _figure(figures.roles_figure(rank) if rank is not None else None, figures.NO_CENSUS)

    @_hints_in_messages()
    def changes(self, *settings: str) -> Any:
        """Predicted memory and time with other *settings*, such as ``stage=0,1,2,3``; (): the usual."""
        figures = _drawing("zeromon_dashboard.plotly_figures")
        return figures.whatif_figure(changes_of_run(self.snapshot, settings, _MAX_POINTS))


def _figure(plot: dict[str, Any] | None, reason: str) -> Any:
    """*plot* as a figure of plotly; without one, its title says the *reason*."""
    empty_figure = _drawing("zeromon_dashboard.charts").empty_figure
    return _drawing("plotly.graph_objects").Figure(plot or empty_figure(reason))


def _figure_of_chart(charts: dict[str, Any], name: str, run: RunSnapshot, series: Series) -> Any:
    if name not in charts:
        raise ZeromonError(f"there is no chart {name}", f"There are {', '.join(charts)}.")
    known_charts = _drawing("zeromon_dashboard.charts").with_reasons(charts, run, series)
    return _figure(known_charts[name].figure(), "")


class ComparedRuns:
    """Runs side by side, with the figures and the advice of ``zeromon compare``."""

    @_hints_in_messages()
    def __init__(self, *runs: str) -> None:
        self.comparison = compare_named(runs)
        """All figures, as ``zeromon compare --json`` prints them."""
        self._firsts = [names.split(",")[0] for names in runs]

    def __repr__(self) -> str:
        return as_text(self.comparison, _COLUMNS, drawn=False)

    def _repr_html_(self) -> str:
        return as_html(self.comparison, _COLUMNS)

    @_hints_in_messages()
    def chart(self, name: str) -> Any:
        """The chart *name* of :meth:`Run.chart`, with a line of the first run of each column."""
        firsts = [(run, step_series(run, folder)) for run, folder in map(snapshot_of, self._firsts)]
        return _figure_of_chart(
            _drawing("zeromon_dashboard.charts").overlaid_charts(firsts), name, *firsts[0]
        )

    def memory(self) -> Any:
        """Memory over the steps, a line for each column."""
        return self.chart("memory")

    @_hints_in_messages()
    def to_pandas(self) -> Any:
        """The figures as a ``pandas.DataFrame``: one row per metric and column of the comparison.

        Values are seconds, bytes, ratios or counts, as ``unit`` says; NaN is unknown.
        """
        return _data_frame(
            [
                {
                    "metric": row.name, "unit": row.unit, "run": ",".join(column.runs),
                    "value": cell.value, "difference": cell.difference, "noise": cell.noise,
                    "significant": cell.marked,
                }
                for row in self.comparison.rows
                for column, cell in zip(self.comparison.columns, row.cells, strict=True)
            ]
        )  # fmt: skip
