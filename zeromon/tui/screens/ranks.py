"""All ranks: a heat map and a table; Enter opens a rank."""

from typing import Any, ClassVar

from textual import events, on
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical
from textual.message import Message
from textual.timer import Timer

from zeromon.base.units import human_count
from zeromon.readout.figures import MAPPED, RATIO
from zeromon.readout.tables import NODE_COLUMNS, RANK_COLUMNS
from zeromon.snapshot import RankSnapshot
from zeromon.snapshot.run import FleetNode
from zeromon.tui.columns import TableExport, nice_ceiling
from zeromon.tui.drawing import Mesh, draw_heat_map, draw_heat_scale, fit_mesh_cells
from zeromon.tui.line import Line, join_at_ends
from zeromon.tui.screens.rank import rank_page
from zeromon.tui.screens.view import View, why_no_rank
from zeromon.tui.view_model import ViewModel
from zeromon.tui.widgets.panel import Page, Panel
from zeromon.tui.widgets.table import Table

_FOLLOWS_SECONDS = 0.1
_MIN_MAPPED_RANKS = 5
"""The table shows fewer at a glance."""


class HeatMap(Panel):
    """One cell for each rank, or, of a large run, for each node; a click chooses it."""

    class Picked(Message):
        """The user clicked a cell."""

        def __init__(self, index: int) -> None:
            super().__init__()
            self.index = index

    def __init__(self, *, id: str, classes: str) -> None:
        super().__init__("heat map", id=id, classes=classes)
        self._mesh: Mesh | None = None

    def look_at(self, model: ViewModel, figure_index: int, chosen: int) -> None:
        """Shows a figure of all ranks, or of the worst rank of each node."""
        mapped = MAPPED[figure_index]
        letters, fleet = model.look.letters, model.run.fleet
        values, noun = [mapped.of_rank(rank) for rank in model.ranks], "ranks"
        if fleet is not None:
            values, noun = [mapped.of_node(node) for node in fleet.nodes], "nodes"
        measured = [value for value in values if value is not None]
        high = nice_ceiling(max(measured, default=1.0))
        high = min(high, 1.0) if mapped.unit is RATIO else high
        text_of = mapped.unit.text

        def draw_lines(width: int, height: int) -> list[Line]:
            self._mesh = fit_mesh_cells(len(values), width, max(1, height - 1))
            note = f"{self._mesh.each} {noun} a cell, the worst  " if self._mesh.each > 1 else ""
            hint = f"{note}h: another figure" if measured else "not known"
            hint += "  n: nodes" if fleet is not None else ""
            foot = join_at_ends(
                [(hint, "dim")], draw_heat_scale(text_of(0.0), text_of(high), letters=letters), width
            )
            return [*draw_heat_map(values, (0.0, high), self._mesh, chosen, letters=letters), foot]

        self.show(draw_lines, f"{mapped.label}, {human_count(len(values))} {noun}")

    def on_click(self, event: events.Click) -> None:
        """Posts which cell is under the pointer."""
        offset = event.get_content_offset(self)
        # The last line is the legend
        if offset is not None and self._mesh is not None and offset.y < self.size.height - 1:
            self.post_message(self.Picked(self._mesh.index(offset.x, offset.y)))


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
        rows = _rows_of_map(len(nodes or model.ranks), self.size.width - 4, self.size.height)
        heat_map, page = self.query_one("#heat", HeatMap), self.query_one(Page)
        heat_map.styles.height = rows + 3
        heat_map.display = bool(nodes) or len(model.run.ranks) >= _MIN_MAPPED_RANKS
        page.display = not heat_map.display and bool(model.ranks)
        table.styles.height = len(model.ranks) + 3 if page.display else "1fr"
        self._redraw_heat_map(model)

    def _redraw_heat_map(self, model: ViewModel) -> None:
        current, fleet = self._table.current, model.run.fleet
        at = -1
        if fleet is None:
            at = next((i for i, rank in enumerate(model.ranks) if rank is current), -1)
        elif current is not None:  # the node of a rank
            name = current.node
            at = next((i for i, node in enumerate(fleet.nodes) if node.node == name), -1)
        self.query_one("#heat", HeatMap).look_at(model, self._figure, at)
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
        model = self.host.model
        fleet = model.run.fleet if model is not None else None
        if fleet is not None and event.index < len(fleet.nodes):
            self._open_ranks_of_node(fleet.nodes[event.index])
        elif model is not None and event.index < len(model.ranks):
            self.query_one("#ranks", Table).go(model.ranks[event.index].rank)
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


def _rows_of_map(count: int, width: int, height: int) -> int:
    """The rows of the map: as many as it needs, up to a third of the screen."""
    max_rows = max(1, height // 3)
    laid = [(rows, fit_mesh_cells(count, width, rows)) for rows in range(1, max_rows + 1)]
    wide = [rows for rows, grid in laid if grid.cell > 1]
    return next(iter(wide or [rows for rows, grid in laid if grid.each == 1]), max_rows)
