"""Runs as Python objects for notebooks and scripts, with the dashboard's figures, and pandas."""

from dataclasses import asdict
from functools import cached_property
from typing import Any

from zeromon.base.errors import ZeromonError
from zeromon.base.units import printable_lines, wrap_report_line
from zeromon.cli.compare import as_text, compare_named
from zeromon.cli.parser import import_extra
from zeromon.cli.plan import changes_of_run
from zeromon.cli.report import snapshot_of, step_series, step_tables
from zeromon.readout.text import finding_text
from zeromon.readout.verdict import judge_run
from zeromon.snapshot import Finding
from zeromon.snapshot.focus import first_counted
from zeromon.snapshot.step import NOT_TIMED
from zeromon.storage.step_history.rows import PEAKS, SCALARS, TIMES

_MAX_POINTS, _COLUMNS = 2000, 100


class Run:
    """A run at the moment when it is loaded; load it again for newer steps of a live one."""

    def __init__(self, name: str | None = None) -> None:
        self.snapshot, self._folder = snapshot_of(name)
        """All figures of the run, as ``zeromon report --json`` prints them."""

    def __repr__(self) -> str:
        findings = [f"  {finding.code} {finding_text(finding)}" for finding in self.findings]
        lines = printable_lines("\n".join([f"{self.snapshot.run}: {self.verdict}", *findings]))
        return "\n".join(row for line in lines.split("\n") for row in wrap_report_line(line, _COLUMNS))

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

        ``exposed_seconds`` waits for communication, ``data_wait_seconds`` for data. A row of several
        ``steps``, merged in a long record, has means of times and scalars, and maxima of bytes.
        """
        import polars as pl

        known = {name: pl.when(pl.col(name) >= 0).then(pl.col(name)) for name in (*TIMES, *PEAKS)}
        for name in ("communication_us", "exposed_us"):
            known[name] = pl.when((pl.col("flags") & NOT_TIMED) == 0).then(known[name])
        rows = pl.concat(step_tables(self.snapshot, self._folder)[0]).select(
            pl.col("step", "rank", "steps").cast(pl.Int64),
            *(
                (known[name] / 1e6).alias(f"{name.removeprefix('duration_').removesuffix('us')}seconds")
                for name in TIMES
                if not name.endswith("_exposed_us")
            ),
            *map(known.get, PEAKS),
            pl.col(SCALARS),
        )
        columns = rows.sort("step", "rank", maintain_order=True).collect()
        return _data_frame({column.name: column.to_numpy() for column in columns})

    def chart(self, name: str) -> Any:
        """The chart *name* over the steps: step-time, memory, exposed, throughput, loss, grad-norm."""
        charts = _drawing("charts").charts_of(step_series(self.snapshot, self._folder), self.snapshot)
        if name not in charts:
            raise ZeromonError(f"there is no chart {name}: there are {', '.join(charts)}", "")
        return _drawing("plotly_figures").go.Figure(charts[name].figure())

    def memory(self) -> Any:
        """Memory over the steps, with capacity and forecast."""
        return self.chart("memory")

    def exposed(self) -> Any:
        """Exposed communication over the steps."""
        return self.chart("exposed")

    def roles(self) -> Any:
        """Memory by role, measured and predicted, of the first rank with a census."""
        figures, rank = _drawing("plotly_figures"), first_counted(self.snapshot.ranks)
        plot = figures.roles_figure(rank) if rank is not None else None
        return figures.go.Figure(plot or _drawing("charts").empty_figure(figures.NO_CENSUS))

    def changes(self, *settings: str) -> Any:
        """Predicted memory and time with other *settings*, such as ``stage=0,1,2,3``; (): the usual."""
        draw = _drawing("plotly_figures").whatif_figure
        return draw(changes_of_run(self.snapshot, settings, _MAX_POINTS))


class ComparedRuns:
    """Runs side by side, as ``zeromon compare`` shows them; ``comparison`` has all figures."""

    def __init__(self, *runs: str) -> None:
        self.comparison = compare_named(runs)

    def __repr__(self) -> str:
        return as_text(self.comparison, _COLUMNS)

    def _repr_pretty_(self, printer: Any, _: bool) -> None:
        printer.text(as_text(self.comparison, _COLUMNS, coloured=True))

    def to_pandas(self) -> Any:
        """A ``pandas.DataFrame``: one row per metric and column, in the ``unit`` of the row."""
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
