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

from zeromon.snapshot import RankSnapshot
from zeromon.tui.draw.heat import Mesh, heat, mesh, scale
from zeromon.tui.line import Line, spread
from zeromon.tui.look import Look, nice_ceiling
from zeromon.tui.scene import Scene
from zeromon.tui.screens.view import View
from zeromon.tui.tables import RANKS, Sheet, worst_ratio
from zeromon.tui.wanted import held_bytes
from zeromon.tui.widgets.panel import Panel
from zeromon.tui.widgets.table import Table
from zeromon.units import human_count, human_ratio, human_seconds

_FOLLOWS_SECONDS = 0.1

Show = Callable[[float, Look], str]

FIGURES: tuple[tuple[str, Callable[[RankSnapshot], float | None], Show, bool], ...] = (
    ("exposed share of a step", lambda r: r.exposed_ratio, lambda v, _: human_ratio(v), True),
    ("step time", lambda r: r.step_seconds, lambda v, _: human_seconds(v), False),
    ("lateness a step", lambda r: r.late_seconds, lambda v, _: human_seconds(v), True),
    (
        "waiting for late ranks a step",
        lambda r: r.wait_seconds,
        lambda v, _: human_seconds(v),
        True,
    ),
    ("memory", held_bytes, lambda v, look: look.size(v), False),
    ("OOM risk", worst_ratio, lambda v, _: human_ratio(v), True),
)
"""What the map shows: name, value, in words, whether its scale begins at nothing."""


class HeatMap(Panel):
    """One cell a rank; a click chooses it."""

    class Picked(Message):
        """A cell was clicked."""

        def __init__(self, index: int) -> None:
            super().__init__()
            self.index = index

    def __init__(self, *, id: str, classes: str) -> None:
        super().__init__("heat map", id=id, classes=classes)
        self._mesh: Mesh | None = None

    def look_at(self, scene: Scene, figure: int, chosen: int) -> None:
        """Shows a figure of all ranks."""
        name, read, words, from_zero = FIGURES[figure]
        letters = scene.look.letters
        values = [read(rank) for rank in scene.ranks]
        known = [value for value in values if value is not None]
        low = 0.0 if from_zero else min(known, default=0.0)
        high = nice_ceiling(max(known, default=1.0)) if from_zero else max(known, default=1.0)
        high = min(high, 1.0) if name.endswith(("step", "risk")) and "share" in name else high

        def lines(width: int, height: int) -> list[Line]:
            self._mesh = mesh(len(values), width, max(1, height - 1))
            each = f"{self._mesh.each} ranks a cell, the worst  " if self._mesh.each > 1 else ""
            said = f"{each}h: another figure" if known else "not known"
            foot = spread(
                [(said, "dim")],
                scale(words(low, scene.look), words(high, scene.look), letters=letters),
                width,
            )
            return [*heat(values, (low, high), self._mesh, chosen, letters=letters), foot]

        self.show(lines, f"{name}, {human_count(len(values))} ranks")

    def on_click(self, event: events.Click) -> None:
        """Tells which rank is under the pointer."""
        offset = event.get_content_offset(self)
        if offset is not None and self._mesh is not None and offset.y < self.size.height - 1:
            self.post_message(self.Picked(self._mesh.index(offset.x, offset.y)))


class Ranks(View):
    """Fluid at a thousand ranks."""

    TAB = "ranks"
    BINDINGS: ClassVar[list[BindingType]] = [Binding("h", "figure", "Heat map of")]

    def __init__(self) -> None:
        super().__init__()
        self._figure = 0
        self._soon: Timer | None = None

    def body(self) -> ComposeResult:
        """The map over the table."""
        with Vertical(id="body"):
            yield HeatMap(id="heat", classes="box")
            yield Table(RANKS, lambda rank: rank.rank, id="ranks", order="rank",
                        empty="no rank is let through by the filter")  # fmt: skip

    def on_mount(self) -> None:
        """The keys go to the table."""
        self.query_one("#ranks", Table).add_class("box")
        self.focus_body()

    def focus_body(self) -> None:
        """The table."""
        self.query_one("#ranks", Table).focus()

    def draw(self, scene: Scene) -> None:
        """Both."""
        table = self.query_one("#ranks", Table)
        table.show(scene.ranks, scene.look)
        rows = _rows(len(scene.ranks), self.size.width - 4, self.size.height)
        self.query_one("#heat", HeatMap).styles.height = rows + 3
        self._heat(scene)

    def _heat(self, scene: Scene) -> None:
        current = self.query_one("#ranks", Table).current
        at = next((i for i, rank in enumerate(scene.ranks) if rank is current), -1)
        self.query_one("#heat", HeatMap).look_at(scene, self._figure, at)

    def action_figure(self) -> None:
        """The next figure on the map."""
        self._figure = (self._figure + 1) % len(FIGURES)
        self.show()

    @on(Table.Moved, "#ranks")
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

    @on(HeatMap.Picked)
    def _picked(self, event: HeatMap.Picked) -> None:
        scene = self.zeromon.scene
        if scene is not None and event.index < len(scene.ranks):
            self.query_one("#ranks", Table).go(scene.ranks[event.index].rank)
            self.focus_body()

    def sheet(self, scene: Scene) -> Sheet[Any]:
        """The table, in its order."""
        rows = self.query_one("#ranks", Table).rows if scene.ranks else ()
        return Sheet("ranks", RANKS, rows)


def _rows(count: int, width: int, height: int) -> int:
    """Rows of the map: what it needs, up to a third of the screen."""
    most = max(1, height // 3)
    laid = [(rows, mesh(count, width, rows)) for rows in range(1, most + 1)]
    wide = [rows for rows, made in laid if made.cell > 1]
    return next(iter(wide or [rows for rows, made in laid if made.each == 1]), most)
