"""Runs as Python objects, for notebooks and scripts: :func:`zeromon.load`, :func:`zeromon.compare`.

A figure is the dashboard's, a sentence or number that of every view. pandas and plotly are imported by
the functions that need them.
"""

from dataclasses import asdict
from functools import cached_property
from html import escape
from typing import Any

from zeromon.base.errors import ZeromonError
from zeromon.base.units import printable_lines
from zeromon.cli.compare import BAD, GOOD, PLAIN, as_text, compare_named
from zeromon.cli.parser import import_extra
from zeromon.cli.plan import changes_of_run
from zeromon.cli.report import snapshot_of, step_series, step_tables
from zeromon.readout.text import finding_text
from zeromon.readout.verdict import judge_run
from zeromon.snapshot import Finding
from zeromon.snapshot.focus import first_counted
from zeromon.snapshot.step import NOT_TIMED, SKIPPED
from zeromon.storage.step_history.rows import PEAKS, SCALARS, TIMES

_MAX_POINTS, _COLUMNS = 2000, 100
_TAGS = {GOOD: "<span style='color:#1a7f37'>", BAD: "<span style='color:#cf222e'>", PLAIN: "</span>"}


class Run:
    """A run at the moment when it is loaded; load it again for newer steps of a live one."""

    def __init__(self, name: str | None = None) -> None:
        self.snapshot, self._folder = snapshot_of(name)
        """All figures of the run, as ``zeromon report --json`` prints them."""

    def __repr__(self) -> str:
        findings = [f"  {finding.code} {finding_text(finding)}" for finding in self.findings]
        return printable_lines("\n".join([f"{self.snapshot.run}: {self.verdict}", *findings]))

    @property
    def verdict(self) -> str:
        """How the run is and why, in one sentence."""
        return judge_run(self.snapshot).text

    @property
    def findings(self) -> tuple[Finding, ...]:
        """The findings with code, severity, evidence and remedy, the most severe first."""
        return self.snapshot.findings

    @cached_property
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

        def seconds(name: str) -> pl.Expr:
            of_communication = name in ("communication_us", "exposed_us")
            is_timed = (pl.col("flags") & NOT_TIMED) == 0 if of_communication else pl.lit(True)
            label = name.removeprefix("duration_").removesuffix("us") + "seconds"
            return pl.when(is_timed).then(known(name) / 1e6).alias(label)

        times = (name for name in TIMES if not name.endswith("_exposed_us"))
        rows = pl.concat(step_tables(self.snapshot, self._folder)[0]).select(
            pl.col("step", "rank", "steps").cast(pl.Int64),
            *map(seconds, dict.fromkeys(("duration_us", "exposed_us", "data_wait_us", *times))),
            *map(known, PEAKS),
            pl.col(SCALARS),
            ((pl.col("flags") & SKIPPED) > 0).alias("skipped"),
        )
        columns = rows.sort("step", "rank", maintain_order=True).collect()
        return _data_frame({column.name: column.to_numpy() for column in columns})

    def chart(self, name: str) -> Any:
        """The chart *name* over the steps: step-time, memory, exposed, throughput, loss, grad-norm."""
        return _chart_over_steps([self], name)

    def memory(self) -> Any:
        """Memory over the steps, with capacity and forecast."""
        return self.chart("memory")

    def exposed(self) -> Any:
        """Exposed communication over the steps."""
        return self.chart("exposed")

    def breakdown(self) -> Any:
        """Where a step goes, by rank."""
        figures = _drawing("plotly_figures")
        return _figure(figures.step_breakdown(self.snapshot), figures.NO_PARTS)

    def roles(self) -> Any:
        """Memory by role, measured and predicted, of the first rank with a census."""
        figures, rank = _drawing("plotly_figures"), first_counted(self.snapshot.ranks)
        return _figure(figures.roles_figure(rank) if rank is not None else None, figures.NO_CENSUS)

    def changes(self, *settings: str) -> Any:
        """Predicted memory and time with other *settings*, such as ``stage=0,1,2,3``; (): the usual."""
        content = changes_of_run(self.snapshot, settings, _MAX_POINTS)
        return _drawing("plotly_figures").whatif_figure(content)


class ComparedRuns:
    """Runs side by side, with the figures and the advice of ``zeromon compare``."""

    def __init__(self, *runs: str) -> None:
        self.comparison = compare_named(runs)
        """All figures, as ``zeromon compare --json`` prints them."""
        self._firsts = [names.split(",")[0] for names in runs]

    def __repr__(self) -> str:
        return as_text(self.comparison, _COLUMNS, drawn=False)

    def _repr_html_(self) -> str:
        markup = escape(as_text(self.comparison, _COLUMNS, coloured=True, drawn=False))
        for colour, tag in _TAGS.items():
            markup = markup.replace(colour, tag)
        return f"<pre>{markup}</pre>"

    def chart(self, name: str) -> Any:
        """The chart *name* of :meth:`Run.chart`, with a line of the first run of each column."""
        return _chart_over_steps([*map(Run, self._firsts)], name)

    def to_pandas(self) -> Any:
        """A ``pandas.DataFrame``: one row per metric and column, with the fields of ``--json``.

        Values are in the unit of the row: s, bytes, ratio, 1/s or count; NaN is unknown.
        """
        columns = [",".join(column.runs) for column in self.comparison.columns]
        return _data_frame(
            {"metric": row.name, "unit": row.unit, "runs": runs, **asdict(cell)}
            for row in self.comparison.rows
            for runs, cell in zip(columns, row.cells, strict=True)
        )


def _data_frame(content: Any) -> Any:
    try:
        from pandas import DataFrame
    except ImportError as error:
        raise ZeromonError("a DataFrame needs pandas: pip install pandas", "") from error
    return DataFrame(content)


def _drawing(module: str) -> Any:
    return import_extra(f"zeromon_dashboard.{module}", "a figure of zeromon[dashboard]", "dashboard")


def _figure(plot: dict[str, Any] | None, reason: str) -> Any:
    """*plot* as a figure of plotly; without one, its title says the *reason*."""
    return _drawing("plotly_figures").go.Figure(plot or _drawing("charts").empty_figure(reason))


def _chart_over_steps(runs: list[Run], name: str) -> Any:
    """One line for each rank, or of several runs one for each run."""
    charts = _drawing("charts")
    drawn = [(run.snapshot, step_series(run.snapshot, run._folder)) for run in runs]
    (first, series), *others = drawn
    by_name = charts.overlaid_charts(drawn) if others else charts.charts_of(series, first)
    if name not in by_name:
        raise ZeromonError(f"there is no chart {name}: there are {', '.join(by_name)}", "")
    return _figure(charts.with_reasons(by_name, first, series)[name].figure(), "")
