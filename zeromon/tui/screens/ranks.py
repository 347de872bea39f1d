"""All ranks: a heat map and a table; Enter opens a rank."""

from collections.abc import Sequence
from heapq import nlargest
from typing import Any, ClassVar

from textual import events, on
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical
from textual.message import Message
from textual.timer import Timer

from zeromon.base.units import human_count
from zeromon.readout.figures import MAPPED, Figure, Unit
from zeromon.readout.rank_map import Cell, RankMap, map_ranks
from zeromon.readout.tables import NODE_COLUMNS, RANK_COLUMNS
from zeromon.readout.text import leading_clauses
from zeromon.snapshot import RankSnapshot
from zeromon.snapshot.run import FleetNode
from zeromon.tui.columns import TableExport
from zeromon.tui.drawing import HEAT_LEVELS, Mesh, draw_heat_map, draw_swatch, fit_mesh_cells
from zeromon.tui.line import Line, clean, join_at_ends
from zeromon.tui.screens.rank import rank_page
from zeromon.tui.screens.view import View, why_no_rank
from zeromon.tui.view_model import ViewModel
from zeromon.tui.widgets.panel import Page, Panel
from zeromon.tui.widgets.table import Table

_FOLLOWS_SECONDS = 0.1
_MIN_MAPPED_RANKS = 5
"""The table shows fewer at a glance."""
_MAX_HIGHEST = 8


class HeatMap(Panel):
    """One cell for each rank, or, of a large run, for each node; a click chooses it."""

    class Picked(Message):
        """The user clicked a cell."""

        def __init__(self, subject: RankSnapshot | FleetNode) -> None:
            super().__init__()
            self.subject = subject

    def __init__(self, *, id: str, classes: str) -> None:
        super().__init__("heat map", id=id, classes=classes)
        self._mesh = Mesh()
        self._cells: list[Cell] = []

    def look_at(self, model: ViewModel, mapped: Figure, chosen: RankSnapshot | FleetNode | None) -> None:
        """Shows a figure of all ranks, or of the worst rank of each node, in the lines that it needs."""
        letters, noun, space = model.look.letters, "ranks", self.screen.size
        drawn_map = map_ranks(model.run, mapped, model.ranks)
        self._cells = ranked = drawn_map.cells
        if model.run.fleet is not None:
            noun = "nodes, the worst rank of each"
        limits = space.width - 4, 3 * space.height // 5 - 3, space.height // 3
        mesh = fit_mesh_cells(drawn_map, mapped.unit, *limits)
        at = next((n for n, cell in enumerate(ranked) if cell.subject is chosen), -1)
        self.styles.height = mesh.rows + 3 + (not mesh.numbers)
        self._mesh = mesh

        def draw_lines(width: int, _height: int) -> list[Line]:
            hint = "h: another figure" + "  n: nodes" * (model.run.fleet is not None)
            scale = _scale_legend(drawn_map, mapped.unit, letters=letters)
            map_lines = draw_heat_map(drawn_map, mesh, at, letters=letters)
            if not mesh.numbers:
                map_lines.append(
                    [(leading_clauses(_list_highest(ranked, mapped.unit), width, ", "), "")]
                )
            return [*map_lines, join_at_ends([(hint, "dim")], scale, width)]

        unit = f", {mapped.unit.symbol}" if mapped.unit.symbol else ""
        notes = [f"{mapped.label}{unit}: {human_count(len(ranked))} {noun}"]
        notes += [f"✖ {drawn_map.blame}"] * bool(drawn_map.blame)
        notes += [f"the highest of {mesh.ranks_per_cell} a cell"] * (mesh.ranks_per_cell > 1)
        self.show(draw_lines, ", ".join(notes))

    def on_click(self, event: events.Click) -> None:
        """Posts which cell is under the pointer."""
        offset = event.get_content_offset(self)
        if offset is not None and (index := self._mesh.index(offset.x, offset.y)) is not None:
            self.post_message(self.Picked(self._cells[index].subject))


class Ranks(View):
    """The heat map over the table; usable with thousands of ranks."""

    FOCUS = "#ranks"
    TAB = "ranks"
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("h", "figure", "Heat map figure"),
        Binding("n", "nodes", "Nodes or ranks of a large run", show=False),
    ]

    def __init__(self) -> None:
        super().__init__()
        self._figure = 0
        self._by_node = False
        self._soon: Timer | None = None

    def body(self) -> ComposeResult:
        """The heat map over the tables."""
        with Vertical(id="body"):
            yield HeatMap(id="heat", classes="box")
            yield Table(RANK_COLUMNS, lambda rank: rank.rank, id="ranks", order="rank")
            nodes = Table(NODE_COLUMNS, lambda node: node.address, id="nodes", order="share", down=True)
            nodes.display = False
            yield nodes
            yield Page("rank", id="rank-below")

    @property
    def _table(self) -> Table[Any]:
        return self.query_one(self.FOCUS, Table)

    def draw(self, model: ViewModel) -> None:
        """Draws the map and the table."""
        nodes = model.run.fleet.nodes if model.run.fleet is not None else ()
        table = self.query_one("#ranks", Table)
        table.border_title, table.empty = shown_ranks_text(model), why_no_rank(model)
        table.show(model.ranks)
        if self._by_node:
            self._table.border_title = f"{human_count(len(nodes))} nodes, the worst rank of each"
            self._table.show(nodes)
        heat_map, page = self.query_one("#heat", HeatMap), self.query_one(Page)
        heat_map.display = bool(nodes) or len(model.run.ranks) >= _MIN_MAPPED_RANKS
        page.display = not heat_map.display and bool(model.ranks)
        table.styles.height = len(model.ranks) + 3 if page.display else "1fr"
        self._redraw_heat_map(model)

    def _redraw_heat_map(self, model: ViewModel) -> None:
        current, fleet = self._table.current, model.run.fleet
        chosen = current
        if fleet is not None and current is not None:
            chosen = next((node for node in fleet.nodes if node.node == current.node), None)
        self.query_one("#heat", HeatMap).look_at(model, MAPPED[self._figure], chosen)
        if isinstance(current, RankSnapshot):
            page, options = self.query_one(Page), model.look
            page.border_title = f"rank {current.rank}"
            page.show(lambda width: rank_page(model.run, current, options, width))

    def action_nodes(self) -> None:
        """Shows the nodes of a large run instead of its ranks, or its ranks again."""
        model = self.host.model
        if not self._by_node and (model is None or model.run.fleet is None):
            self.notify("all ranks are shown; nodes are for larger runs", severity="warning")
            return
        self._by_node = not self._by_node
        self.FOCUS = "#nodes" if self._by_node else "#ranks"
        for table in self.query(Table):
            table.display = table is self._table
        self.focus_body()
        self.show()

    def action_figure(self) -> None:
        """Chooses the next figure of the map."""
        if not self.query_one("#heat", HeatMap).display:
            self.notify(f"the heat map is for {_MIN_MAPPED_RANKS} ranks and more", severity="warning")
            return
        self._figure = (self._figure + 1) % len(MAPPED)
        self.show()

    @on(Table.Moved)
    def _moved(self) -> None:
        """Makes the map follow the cursor, once for a burst of keys."""
        if self._soon is None:
            self._soon = self.set_timer(_FOLLOWS_SECONDS, self._follow)

    def _follow(self) -> None:
        self._soon = None
        if self.host.model is not None:
            self._redraw_heat_map(self.host.model)

    @on(Table.Chosen, "#nodes")
    def _open_chosen_node(self) -> None:
        current = self._table.current
        if isinstance(current, FleetNode):
            self._open_ranks_of_node(current)

    def _open_ranks_of_node(self, node: FleetNode) -> None:
        if self._by_node:
            self.action_nodes()
        self.host.open_node(node)

    @on(HeatMap.Picked)
    def _go_to_picked(self, event: HeatMap.Picked) -> None:
        if isinstance(event.subject, FleetNode):
            self._open_ranks_of_node(event.subject)
        else:
            self.query_one("#ranks", Table).go(event.subject.rank)
            self.focus_body()

    def sheet(self, model: ViewModel) -> TableExport[Any]:
        """The table, in the user's order."""
        if self._by_node:
            return TableExport("nodes", NODE_COLUMNS, self._table.rows)
        return TableExport("ranks", RANK_COLUMNS, self._table.rows if model.ranks else ())


def shown_ranks_text(model: ViewModel) -> str:
    """How many ranks are shown; "" where all are."""
    fleet = model.run.fleet
    if fleet is None:
        return ""
    count = f"{human_count(len(model.ranks))} of {human_count(fleet.ranks)} ranks"
    return count if model.rank_filter else f"{count}, the most important"


def _scale_legend(drawn_map: RankMap, unit: Unit, *, letters: bool) -> Line:
    """The lowest value, the median and the highest, each with its shade; why there is none."""
    values = [cell.value for cell in drawn_map.cells if cell.value is not None]
    if not values:
        return [("n/a (no rank has reported it)", "dim")]
    spans: Line = []
    labelled = {min(values): "min", max(values): "max", drawn_map.median: "median"}
    for value, label in sorted(labelled.items()):
        shade = drawn_map.shade(value, HEAT_LEVELS)
        spans += [
            ("  ", ""), draw_swatch(shade, letters=letters), (f" {label} {unit.text(value)}", "dim"),
        ]  # fmt: skip
    return spans


def _list_highest(cells: Sequence[Cell], unit: Unit) -> str:
    """``highest: rank 5 21.0 ms, rank 9 20.1 ms``: what blocks without numbers cannot say."""
    measured = [(cell.value, clean(cell.name)) for cell in cells if cell.value is not None]
    highest = nlargest(_MAX_HIGHEST, measured, key=lambda pair: pair[0])
    return "highest: " + (", ".join(f"{name} {unit.text(value)}" for value, name in highest) or "n/a")
