"""All ranks: a heat map and a table; Enter opens a rank."""

from typing import Any, ClassVar

from textual import events, on
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical
from textual.message import Message
from textual.timer import Timer

from zeromon.readout.figures import MAPPED, RATIO
from zeromon.snapshot import FleetNode
from zeromon.tui.columns import TableExport
from zeromon.tui.display_options import nice_ceiling
from zeromon.tui.draw.heat import Mesh, heat, mesh, scale
from zeromon.tui.line import Line, spread
from zeromon.tui.screens.view import View, no_rank
from zeromon.tui.tables import NODES, RANKS
from zeromon.tui.view_model import ViewModel
from zeromon.tui.widgets.panel import Panel
from zeromon.tui.widgets.table import Table
from zeromon.units import human_count

_FOLLOWS_SECONDS = 0.1


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

    def look_at(self, model: ViewModel, figure: int, chosen: int) -> None:
        """Shows a figure of all ranks, or of the worst rank of each node."""
        shown = MAPPED[figure]
        letters, fleet = model.look.letters, model.run.fleet
        values, what = [shown.of_rank(rank) for rank in model.ranks], "ranks"
        if fleet is not None:
            values, what = [shown.of_node(node) for node in fleet.nodes], "nodes"
        known = [value for value in values if value is not None]
        high = nice_ceiling(max(known, default=1.0))
        high = min(high, 1.0) if shown.unit is RATIO else high
        words = shown.unit.text

        def lines(width: int, height: int) -> list[Line]:
            self._mesh = mesh(len(values), width, max(1, height - 1))
            each = f"{self._mesh.each} {what} a cell, the worst  " if self._mesh.each > 1 else ""
            hint = f"{each}h: another figure" if known else "not known"
            hint += "  n: nodes" if fleet is not None else ""
            foot = spread([(hint, "dim")], scale(words(0.0), words(high), letters=letters), width)
            return [*heat(values, (0.0, high), self._mesh, chosen, letters=letters), foot]

        self.show(lines, f"{shown.label}, {human_count(len(values))} {what}")

    def on_click(self, event: events.Click) -> None:
        """Posts which cell is under the pointer."""
        offset = event.get_content_offset(self)
        if offset is not None and self._mesh is not None and offset.y < self.size.height - 1:
            self.post_message(self.Picked(self._mesh.index(offset.x, offset.y)))


class Ranks(View):
    """The heat map over the table; usable with thousands of ranks."""

    FOCUS = "#ranks"
    TAB = "ranks"
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("h", "figure", "Heat map of"),
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
            yield Table(RANKS, lambda rank: rank.rank, id="ranks", order="rank")
            nodes = Table(NODES, lambda node: node.address, id="nodes", order="share", down=True)
            nodes.display = False
            yield nodes

    @property
    def _table(self) -> Table[Any]:
        """The table that is shown."""
        return self.query_one(self.FOCUS, Table)

    def draw(self, model: ViewModel) -> None:
        """Draws the map and the table."""
        nodes = model.run.fleet.nodes if model.run.fleet is not None else ()
        table = self.query_one("#ranks", Table)
        table.border_title, table.empty = shown_of(model), no_rank(model)
        table.show(model.ranks)
        if self._by_node:
            self._table.border_title = f"{human_count(len(nodes))} nodes, the worst rank of each"
            self._table.show(nodes)
        rows = _rows(len(nodes or model.ranks), self.size.width - 4, self.size.height)
        self.query_one("#heat", HeatMap).styles.height = rows + 3
        self._heat(model)

    def _heat(self, model: ViewModel) -> None:
        current, fleet = self._table.current, model.run.fleet
        at = -1
        if fleet is None:
            at = next((i for i, rank in enumerate(model.ranks) if rank is current), -1)
        elif current is not None:  # the node of a rank
            name = current.node
            at = next((i for i, node in enumerate(fleet.nodes) if node.node == name), -1)
        self.query_one("#heat", HeatMap).look_at(model, self._figure, at)

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
            self._heat(self.host.model)

    @on(Table.Chosen, "#nodes")
    def _node_chosen(self) -> None:
        current = self._table.current
        if isinstance(current, FleetNode):
            self._open_node(current)

    def _open_node(self, node: FleetNode) -> None:
        """Shows the ranks of a node."""
        if self._by_node:
            self.action_nodes()
        self.host.open_node(node)

    @on(HeatMap.Picked)
    def _picked(self, event: HeatMap.Picked) -> None:
        model = self.host.model
        fleet = model.run.fleet if model is not None else None
        if fleet is not None and event.index < len(fleet.nodes):
            self._open_node(fleet.nodes[event.index])
        elif model is not None and event.index < len(model.ranks):
            self.query_one("#ranks", Table).go(model.ranks[event.index].rank)
            self.focus_body()

    def sheet(self, model: ViewModel) -> TableExport[Any]:
        """The table, in the user's order."""
        if self._by_node:
            return TableExport("nodes", NODES, self._table.rows)
        return TableExport("ranks", RANKS, self._table.rows if model.ranks else ())


def shown_of(model: ViewModel) -> str:
    """How many ranks are shown; "" where all are."""
    fleet = model.run.fleet
    if fleet is None:
        return ""
    count = f"{human_count(len(model.ranks))} of {human_count(fleet.ranks)} ranks"
    return count if model.rank_filter else f"{count}, the most important"


def _rows(count: int, width: int, height: int) -> int:
    """The rows of the map: as many as it needs, up to a third of the screen."""
    most = max(1, height // 3)
    laid = [(rows, mesh(count, width, rows)) for rows in range(1, most + 1)]
    wide = [rows for rows, made in laid if made.cell > 1]
    return next(iter(wide or [rows for rows, made in laid if made.each == 1]), most)
