"""All ranks: a heat map and a table; Enter opens one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

from textual import events, on
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical
from textual.message import Message
from textual.timer import Timer

from zeromon.snapshot import FleetNode, RankSnapshot
from zeromon.tui.draw.heat import Mesh, heat, mesh, scale
from zeromon.tui.line import Line, spread
from zeromon.tui.look import Look, nice_ceiling
from zeromon.tui.scene import Scene
from zeromon.tui.screens.view import NO_RANK, View
from zeromon.tui.tables import NODES, RANKS, Sheet, worst_ratio
from zeromon.tui.wanted import held_bytes
from zeromon.tui.widgets.panel import Panel
from zeromon.tui.widgets.table import Table
from zeromon.units import human_count, human_ratio, human_seconds

_FOLLOWS_SECONDS = 0.1

Show = Callable[[float, Look], str]

OfRank = Callable[[RankSnapshot], float | None]
OfNode = Callable[[FleetNode], float | None]

FIGURES: tuple[tuple[str, OfRank, OfNode, Show, bool], ...] = (
    ("exposed share of a step", lambda r: r.exposed_ratio, lambda n: n.exposed_ratio,
     lambda v, _: human_ratio(v), True),
    ("step time", lambda r: r.step_seconds, lambda n: n.step_seconds,
     lambda v, _: human_seconds(v), False),
    ("lateness a step", lambda r: r.late_seconds, lambda n: n.late_seconds,
     lambda v, _: human_seconds(v), True),
    ("waiting for late ranks a step", lambda r: r.wait_seconds, lambda n: n.wait_seconds,
     lambda v, _: human_seconds(v), True),
    ("memory", held_bytes, lambda n: n.memory_bytes, lambda v, look: look.size(v), False),
    ("OOM risk", worst_ratio, lambda n: n.risk_ratio, lambda v, _: human_ratio(v), True),
)  # fmt: skip
"""What the map shows: name, value of a rank and of a node, in words, whether its scale begins at 0."""


class HeatMap(Panel):
    """One cell a rank, or of many ranks one a node; a click chooses it."""

    class Picked(Message):
        """A cell was clicked."""

        def __init__(self, index: int) -> None:
            super().__init__()
            self.index = index

    def __init__(self, *, id: str, classes: str) -> None:
        super().__init__("heat map", id=id, classes=classes)
        self._mesh: Mesh | None = None

    def look_at(self, scene: Scene, figure: int, chosen: int) -> None:
        """Shows a figure of all ranks, or of the worst rank of each node."""
        name, of_rank, of_node, words, from_zero = FIGURES[figure]
        letters, fleet = scene.look.letters, scene.run.fleet
        values, what = [of_rank(rank) for rank in scene.ranks], "ranks"
        if fleet is not None:
            values, what = [of_node(node) for node in fleet.nodes], "nodes"
        known = [value for value in values if value is not None]
        low = 0.0 if from_zero else min(known, default=0.0)
        high = nice_ceiling(max(known, default=1.0)) if from_zero else max(known, default=1.0)
        high = min(high, 1.0) if name.endswith(("step", "risk")) and "share" in name else high

        def lines(width: int, height: int) -> list[Line]:
            self._mesh = mesh(len(values), width, max(1, height - 1))
            each = f"{self._mesh.each} {what} a cell, the worst  " if self._mesh.each > 1 else ""
            said = f"{each}h: another figure" if known else "not known"
            said += "  n: nodes" if fleet is not None else ""
            foot = spread(
                [(said, "dim")],
                scale(words(low, scene.look), words(high, scene.look), letters=letters),
                width,
            )
            return [*heat(values, (low, high), self._mesh, chosen, letters=letters), foot]

        self.show(lines, f"{name}, {human_count(len(values))} {what}")

    def on_click(self, event: events.Click) -> None:
        """Tells which rank is under the pointer."""
        offset = event.get_content_offset(self)
        if offset is not None and self._mesh is not None and offset.y < self.size.height - 1:
            self.post_message(self.Picked(self._mesh.index(offset.x, offset.y)))


class Ranks(View):
    """Fluid at a thousand ranks."""

    TAB = "ranks"
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("h", "figure", "Heat map of"),
        Binding("n", "nodes", "Nodes of a large run, or its ranks", show=False),
    ]

    def __init__(self) -> None:
        super().__init__()
        self._figure = 0
        self._by_node = False
        self._soon: Timer | None = None

    def body(self) -> ComposeResult:
        """The map over the table."""
        with Vertical(id="body"):
            yield HeatMap(id="heat", classes="box")
            yield Table(RANKS, lambda rank: rank.rank, id="ranks", order="rank",
                        empty=NO_RANK)  # fmt: skip
            yield Table(NODES, lambda node: node.address, id="nodes", order="share", down=True)

    def on_mount(self) -> None:
        """The keys go to the table."""
        for table in self.query(Table):
            table.add_class("box")
        self.query_one("#nodes", Table).display = False
        self.focus_body()

    @property
    def _table(self) -> Table[Any]:
        """The one that is shown."""
        return self.query_one("#nodes" if self._by_node else "#ranks", Table)

    def focus_body(self) -> None:
        """The table."""
        self._table.focus()

    def draw(self, scene: Scene) -> None:
        """Both."""
        nodes = scene.run.fleet.nodes if scene.run.fleet is not None else ()
        table = self.query_one("#ranks", Table)
        table.border_title = shown_of(scene)
        table.show(scene.ranks, scene.look)
        if self._by_node:
            self._table.border_title = f"{human_count(len(nodes))} nodes, the worst rank of each"
            self._table.show(nodes, scene.look)
        rows = _rows(len(nodes or scene.ranks), self.size.width - 4, self.size.height)
        self.query_one("#heat", HeatMap).styles.height = rows + 3
        self._heat(scene)

    def _heat(self, scene: Scene) -> None:
        current, fleet = self._table.current, scene.run.fleet
        at = -1
        if fleet is None:
            at = next((i for i, rank in enumerate(scene.ranks) if rank is current), -1)
        elif current is not None:  # of a rank, its node
            name = current.node
            at = next((i for i, node in enumerate(fleet.nodes) if node.node == name), -1)
        self.query_one("#heat", HeatMap).look_at(scene, self._figure, at)

    def action_nodes(self) -> None:
        """The nodes of a large run instead of its ranks, or its ranks again."""
        scene = self.zeromon.scene
        if not self._by_node and (scene is None or scene.run.fleet is None):
            self.notify("all ranks are shown: nodes are for runs of more", severity="warning")
            return
        self._by_node = not self._by_node
        for table in self.query(Table):
            table.display = table is self._table
        self.focus_body()
        self.show()

    def action_figure(self) -> None:
        """The next figure on the map."""
        self._figure = (self._figure + 1) % len(FIGURES)
        self.show()

    @on(Table.Moved)
    def _moved(self) -> None:
        """The map follows the cursor, once for a burst of keys."""
        if self._soon is None:
            self._soon = self.set_timer(_FOLLOWS_SECONDS, self._follow)

    def _follow(self) -> None:
        self._soon = None
        if self.zeromon.scene is not None:
            self._heat(self.zeromon.scene)

    @on(Table.Chosen, "#ranks")
    def _chosen(self) -> None:
        current = self.query_one("#ranks", Table).current
        if current is not None:
            self.zeromon.open_rank(current.rank)

    @on(Table.Chosen, "#nodes")
    def _node_chosen(self) -> None:
        current = self._table.current
        if isinstance(current, FleetNode):
            self._open_node(current)

    def _open_node(self, node: FleetNode) -> None:
        """Its ranks."""
        if self._by_node:
            self.action_nodes()
        self.zeromon.open_node(node)

    @on(HeatMap.Picked)
    def _picked(self, event: HeatMap.Picked) -> None:
        scene = self.zeromon.scene
        fleet = scene.run.fleet if scene is not None else None
        if fleet is not None and event.index < len(fleet.nodes):
            self._open_node(fleet.nodes[event.index])
        elif scene is not None and event.index < len(scene.ranks):
            self.query_one("#ranks", Table).go(scene.ranks[event.index].rank)
            self.focus_body()

    def sheet(self, scene: Scene) -> Sheet[Any]:
        """The table, in its order."""
        if self._by_node:
            return Sheet("nodes", NODES, self._table.rows)
        return Sheet("ranks", RANKS, self._table.rows if scene.ranks else ())


def shown_of(scene: Scene) -> str:
    """``35 of 16,384 ranks, those that matter most``; "" where all are there."""
    fleet = scene.run.fleet
    if fleet is None:
        return ""
    count = f"{human_count(len(scene.ranks))} of {human_count(fleet.ranks)} ranks"
    return count if scene.wanted else f"{count}, those that matter most"


def _rows(count: int, width: int, height: int) -> int:
    """Rows of the map: what it needs, up to a third of the screen."""
    most = max(1, height // 3)
    laid = [(rows, mesh(count, width, rows)) for rows in range(1, most + 1)]
    wide = [rows for rows, made in laid if made.cell > 1]
    return next(iter(wide or [rows for rows, made in laid if made.each == 1]), most)
