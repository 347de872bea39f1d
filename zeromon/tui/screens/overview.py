"""The run at a glance: figures, the parts of a step, charts, findings."""

from collections.abc import Mapping, Sequence
from typing import Any

from textual.app import ComposeResult
from textual.containers import Horizontal, Vertical

from zeromon.base.units import human_count, human_ratio, human_seconds
from zeromon.readout import charts
from zeromon.readout.breakdown import PART_NAMES, PARTS, exposed_is_known, rank_parts
from zeromon.readout.figures import SPREAD_HEADS, spread_rows
from zeromon.readout.tables import MARKS, RANK_COLUMNS, tone_of
from zeromon.readout.text import finding_text, notes_of
from zeromon.snapshot import Finding, RankSnapshot, RunSnapshot
from zeromon.snapshot.focus import most_exposed_of
from zeromon.snapshot.levels import EXPOSED
from zeromon.tui import status_text
from zeromon.tui.columns import DisplayOptions, TableExport
from zeromon.tui.drawing import LETTERS, chart_drawer, stacked_bar
from zeromon.tui.line import Line, clean, cut_line, fit, line_width
from zeromon.tui.plots import plot_of
from zeromon.tui.screens.view import View
from zeromon.tui.view_model import ViewModel
from zeromon.tui.widgets.panel import Panel

_AXIS = 7
_MAX_BARS = 12
_GAP = "  "


class Overview(View):
    """The first screen."""

    TAB = "overview"

    def body(self) -> ComposeResult:
        """The figures, the bars, the charts, the findings."""
        yield Panel(id="figures")
        with Vertical(id="body"):
            yield Panel("step time", id="bars", classes="box")
            with Horizontal(id="charts"):
                for name in charts.list_names(overview=True):
                    yield Panel(name, id=f"chart-{name}", classes="box")
            yield Panel("findings", id="news", classes="box")

    def draw(self, model: ViewModel) -> None:
        """Draws all parts."""
        options, height = model.look, self.size.height
        figures_panel = self.query_one("#figures", Panel)
        figures_panel.show(lambda width, _h: [status_text.figures_line(model.run, options, width)])
        self._draw_step_bars(model)
        columns = max(1, self.query_one("#charts Panel", Panel).size.width - _AXIS)
        for spec in charts.charts_of(model.ranks):
            if spec.overview:
                chart = plot_of(spec, model.ranks, model.trends, options, columns, model.mark_steps)
                title = f"{chart.title}, {chart.a_step}" if chart.a_step else chart.title
                self.query_one(f"#chart-{spec.name}", Panel).show(chart_drawer(chart.plot), title)
        limit = 5 if height >= 34 else 3 if height >= 30 else 2
        news = self.query_one("#news", Panel)
        rows = [*note_lines(model.run), *finding_lines(model.run.findings, limit)]
        news.styles.height = len(rows) + 2
        news.show(lambda width, _h: [cut_line(row, width) for row in rows])

    def _draw_step_bars(self, model: ViewModel) -> None:
        """Draws the parts of a step by rank; of a large run, how the figures of its ranks spread."""
        options, height = model.look, self.size.height
        bars = self.query_one("#bars", Panel)
        fleet = model.run.fleet
        if fleet is not None:
            head: Line = [(fit(name, 10, right=True), "title") for name in SPREAD_HEADS]
            table: list[Line] = [[(fit("", 22), ""), *head]]
            for figure, values in spread_rows(fleet)[: max(4, height - 20) - 1]:
                cells = ((fit(value, 10, right=True), "") for value in values)
                table.append([(fit(figure.title, 22), "dim"), *cells])
            bars.styles.height = len(table) + 2
            bars.show(
                lambda width, _h: [cut_line(row, width) for row in table],
                f"all {human_count(fleet.ranks)} ranks on {human_count(len(fleet.nodes))} nodes",
            )
            return
        bar_count = min(len(model.ranks), _MAX_BARS, max(2, (height - 20) // 2))
        bars.styles.height = bar_count + 3
        chosen = most_exposed_of(model.ranks, bar_count)
        of = (
            ""
            if len(chosen) == len(model.ranks)
            else f": {len(chosen)} of {human_count(len(model.ranks))}, the most exposed"
        )
        bars.show(
            lambda width, _h: step_bars(chosen, options, width),
            f"step time, {'shares' if options.shares else 'mean of the last steps'}{of}",
        )

    def sheet(self, model: ViewModel) -> TableExport[Any]:
        """The table of ranks."""
        return TableExport("ranks", RANK_COLUMNS, model.ranks)


def step_bars(ranks: Sequence[RankSnapshot], options: DisplayOptions, width: int) -> list[Line]:
    """One bar for each rank, and the legend of the parts."""
    rows = [(rank, rank_parts(rank)) for rank in ranks]
    longest = max((sum(sizes.values()) for _, sizes in rows), default=0.0)
    drawn = {name for _, sizes in rows for name, size in sizes.items() if size > 0}
    bars: list[Line] = []
    label, text_width = 10, 26 if width >= 60 else 10
    for rank, sizes in rows:
        seconds = sum(sizes.values())
        bar_width, of = max(4, width - label - text_width), seconds if options.shares else longest
        bar = stacked_bar(list(sizes.items()), of, bar_width, letters=options.letters)
        name: Line = [(fit(f"rank {rank.rank}", label), "bold")]
        bars.append([*name, *bar, *_step_time_cells(rank, seconds, text_width)])
    if rows and not any(exposed_is_known(rank) for rank, _ in rows):
        drawn.discard("exposed")
    return [*bars, legend_of_parts([name for name in PARTS if name in drawn], options, width)]


def _step_time_cells(rank: RankSnapshot, seconds: float, width: int) -> Line:
    time = fit(human_seconds(seconds) if seconds else "-", 10, right=True)
    if width < 20:
        return [(time, "bold")]
    share = fit(human_ratio(rank.communication.exposed_ratio), 8, right=True)
    return [
        (time, "bold"),
        (share, tone_of(rank.communication.exposed_ratio, EXPOSED)),
        (" exposed", "dim"),
    ]


_SHORT_NAMES = {"exposed": "exposed", "hidden": "hidden", "data_wait": "data"}


def legend_of_parts(keys: Sequence[str], options: DisplayOptions, width: int) -> Line:
    """The legend of the parts of a bar; shorter where there is no room."""
    spans = _join_legend(keys, options, PART_NAMES)
    if line_width(spans) - len(_GAP) > width:
        spans = _join_legend(keys, options, PART_NAMES | _SHORT_NAMES)
    if line_width(spans) > width:
        spans[-1] = spans[-1][0].rstrip(), "dim"
    return spans


def _join_legend(keys: Sequence[str], options: DisplayOptions, names: Mapping[str, str]) -> Line:
    spans: Line = []
    for key in keys:
        sign = LETTERS[key] if options.letters else "■"
        spans += [(f"{sign} ", key), (names[key] + _GAP, "dim")]
    return spans


def note_lines(run: RunSnapshot) -> list[Line]:
    """Warnings about what is known of the run."""
    return [[(" ! ", "warn"), (clean(note), "warn")] for note in notes_of(run)]


def finding_lines(findings: Sequence[Finding], limit: int) -> list[Line]:
    """The most severe findings, one per line."""
    if not findings:
        return [[("nothing to report", "dim")]]
    rows: list[Line] = []
    for finding in findings[:limit]:
        sign, tone = MARKS[finding.severity]
        rows.append(
            [
                (f"{sign:>2} ", tone),
                (f"{clean(finding.code)} ", "bold"),
                (clean(finding_text(finding)), tone),
            ]
        )
    omitted = len(findings) - limit
    if omitted > 0:
        rows[-1] = [(f"   and {omitted + 1} more (6)", "dim")]
    return rows
