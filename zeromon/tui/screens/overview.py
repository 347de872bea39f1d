"""The run at a glance: figures, the parts of a step, charts, findings."""

from collections.abc import Mapping, Sequence
from typing import Any

from textual.app import ComposeResult
from textual.containers import Horizontal, Vertical

from zeromon.focus import most_exposed_of
from zeromon.levels import EXPOSED
from zeromon.readout import charts
from zeromon.readout.breakdown import PART_NAMES, PARTS, exposed_is_known, rank_parts
from zeromon.readout.figures import SPREAD_HEADS, spread_rows
from zeromon.readout.text import finding_text, notes_of
from zeromon.snapshot import Finding, Fleet, RankSnapshot, RunSnapshot
from zeromon.tui import status_text
from zeromon.tui.columns import TableExport
from zeromon.tui.display_options import DisplayOptions
from zeromon.tui.draw.bars import LETTERS, stacked
from zeromon.tui.draw.chart import charted
from zeromon.tui.line import Line, clean, cut, fit, length
from zeromon.tui.plots import plot_of
from zeromon.tui.screens.view import View
from zeromon.tui.tables import MARKS, RANKS
from zeromon.tui.view_model import ViewModel
from zeromon.tui.widgets.panel import Panel
from zeromon.units import human_count, human_ratio, human_seconds

_AXIS = 7
_MOST_BARS = 12
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
                for name in charts.names(overview=True):
                    yield Panel(name, id=f"chart-{name}", classes="box")
            yield Panel("findings", id="news", classes="box")

    def draw(self, model: ViewModel) -> None:
        """Draws all parts."""
        look, height = model.look, self.size.height
        figures = self.query_one("#figures", Panel)
        figures.show(lambda width, _h: [status_text.figures_line(model.run, look, width)])
        self._draw_bars(model)
        columns = max(1, self.query_one("#charts Panel", Panel).size.width - _AXIS)
        for spec in charts.charts_of(model.ranks):
            if spec.overview:
                made = plot_of(spec, model.ranks, model.trends, look, columns, model.mark_steps)
                title = f"{made.title}, {made.a_step}" if made.a_step else made.title
                self.query_one(f"#chart-{spec.name}", Panel).show(charted(made.plot), title)
        most = 5 if height >= 34 else 3 if height >= 30 else 2
        news = self.query_one("#news", Panel)
        lines = [*note_lines(model.run), *finding_lines(model.run.findings, most)]
        news.styles.height = len(lines) + 2
        news.show(lambda width, _h: [cut(line, width) for line in lines])

    def _draw_bars(self, model: ViewModel) -> None:
        """Draws the parts of a step by rank; of a large run, how the figures of its ranks spread."""
        look, height = model.look, self.size.height
        bars = self.query_one("#bars", Panel)
        fleet = model.run.fleet
        if fleet is not None:
            table = spread_lines(fleet, max(4, height - 20))
            bars.styles.height = len(table) + 2
            bars.show(
                lambda width, _h: [cut(line, width) for line in table],
                f"all {human_count(fleet.ranks)} ranks on {human_count(len(fleet.nodes))} nodes",
            )
            return
        shown = min(len(model.ranks), _MOST_BARS, max(2, (height - 20) // 2))
        bars.styles.height = shown + 3
        chosen = most_exposed_of(model.ranks, shown)
        of = (
            ""
            if len(chosen) == len(model.ranks)
            else f": {len(chosen)} of {human_count(len(model.ranks))}, the most exposed"
        )
        bars.show(
            lambda width, _h: step_bars(chosen, look, width),
            f"step time, {'shares' if look.shares else 'mean of the last steps'}{of}",
        )

    def sheet(self, model: ViewModel) -> TableExport[Any]:
        """The table of ranks."""
        return TableExport("ranks", RANKS, model.ranks)


def step_bars(ranks: Sequence[RankSnapshot], look: DisplayOptions, width: int) -> list[Line]:
    """One bar for each rank, and the legend of the parts."""
    rows = [(rank, rank_parts(rank)) for rank in ranks]
    longest = max((sum(parts.values()) for _, parts in rows), default=0.0)
    shown = {name for _, parts in rows for name, spent in parts.items() if spent > 0}
    lines: list[Line] = []
    label, figure = 10, 26 if width >= 60 else 10
    for rank, parts in rows:
        whole = sum(parts.values())
        room, of = max(4, width - label - figure), whole if look.shares else longest
        bar = stacked(list(parts.items()), of, room, letters=look.letters)
        name: Line = [(fit(f"rank {rank.rank}", label), "bold")]
        lines.append([*name, *bar, *_beside(rank, whole, figure)])
    if rows and not any(exposed_is_known(rank) for rank, _ in rows):
        shown.discard("exposed")
    return [*lines, parts_legend([part for part in PARTS if part in shown], look, width)]


def _beside(rank: RankSnapshot, whole: float, width: int) -> Line:
    time = fit(human_seconds(whole) if whole else "-", 10, right=True)
    if width < 20:
        return [(time, "bold")]
    share = fit(human_ratio(rank.exposed_ratio), 8, right=True)
    return [
        (time, "bold"),
        (share, status_text.tone_of(rank.exposed_ratio, EXPOSED)),
        (" exposed", "dim"),
    ]


_SHORT_NAMES = {"exposed": "exposed", "hidden": "hidden", "data_wait": "data"}


def parts_legend(parts: Sequence[str], look: DisplayOptions, width: int) -> Line:
    """The legend of the parts of a bar; shorter where there is no room."""
    line = _legend(parts, look, PART_NAMES)
    if length(line) - len(_GAP) > width:
        line = _legend(parts, look, PART_NAMES | _SHORT_NAMES)
    if length(line) > width:
        line[-1] = line[-1][0].rstrip(), "dim"
    return line


def _legend(parts: Sequence[str], look: DisplayOptions, names: Mapping[str, str]) -> Line:
    line: Line = []
    for part in parts:
        sign = LETTERS[part] if look.letters else "■"
        line += [(f"{sign} ", part), (names[part] + _GAP, "dim")]
    return line


def spread_lines(fleet: Fleet, most: int) -> list[Line]:
    """How the figures of all ranks spread, one figure per line."""
    head: Line = [(fit(name, 10, right=True), "title") for name in SPREAD_HEADS]
    lines: list[Line] = [[(fit("", 22), ""), *head]]
    for figure, values in spread_rows(fleet)[: most - 1]:
        cells = ((fit(value, 10, right=True), "") for value in values)
        lines.append([(fit(figure.title, 22), "dim"), *cells])
    return lines


def note_lines(run: RunSnapshot) -> list[Line]:
    """Warnings about what is known of the run."""
    return [[(" ! ", "warn"), (clean(part), "warn")] for part in notes_of(run)]


def finding_lines(findings: Sequence[Finding], most: int) -> list[Line]:
    """The most severe findings, one per line."""
    if not findings:
        return [[("nothing to report", "dim")]]
    lines: list[Line] = []
    for finding in findings[:most]:
        sign, tone = MARKS[finding.severity]
        lines.append(
            [
                (f"{sign:>2} ", tone),
                (f"{clean(finding.code)} ", "bold"),
                (clean(finding_text(finding)), tone),
            ]
        )
    more = len(findings) - most
    if more > 0:
        lines[-1] = [(f"   and {more + 1} more (6)", "dim")]
    return lines
