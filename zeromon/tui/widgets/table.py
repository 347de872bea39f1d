"""A table with a cursor, an order, and a header that stays.

Only the rows on the screen are drawn, so a thousand cost as ten do.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import ClassVar, Generic

from textual import events
from textual.binding import Binding, BindingType
from textual.geometry import Region, Size
from textual.message import Message
from textual.scroll_view import ScrollView
from textual.strip import Strip

from zeromon.readout.tables import Column, Columns, Row
from zeromon.tui.columns import fit_columns, header_line, row_spans, sort_rows
from zeromon.tui.widgets.panel import Palette, background_of_app, cached_palette


@dataclass(frozen=True, slots=True, kw_only=True)
class _Paint(Generic[Row]):
    """The settings that all lines of one drawing share."""

    width: int
    top: int
    background: str
    focused: bool
    columns: list[tuple[Column[Row], int]]
    plain: Palette
    header: Palette
    cursor: Palette


@dataclass
class _OfTable(Message):
    """A message of a table."""

    table: Table[object]

    @property
    def control(self) -> Table[object]:
        """The table."""
        return self.table


class Table(ScrollView, Generic[Row], can_focus=True):
    """Rows of *columns*; *key* identifies a row from snapshot to snapshot."""

    ALLOW_SELECT = False
    COMPONENT_CLASSES: ClassVar[set[str]] = {"table--cursor", "table--header"}
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("up,k", "move(-1)", "Up", show=False),
        Binding("down,j", "move(1)", "Down", show=False),
        Binding("pageup", "page(-1)", "Page up", show=False),
        Binding("pagedown", "page(1)", "Page down", show=False),
        Binding("home,g", "move(-1000000)", "First", show=False),
        Binding("end,G", "move(1000000)", "Last", show=False),
        Binding("enter", "choose", "Open"),
        Binding("s", "sort(1)", "Sort"),
        Binding("S", "turn", "Reverse the order", show=False),
        Binding("C", "columns", "Columns", show=False),
    ]

    class Moved(_OfTable):
        """The cursor moved to another row."""

    class ColumnsWanted(_OfTable):
        """The user wants to choose the columns."""

    class Chosen(_OfTable):
        """The user opened a row."""

    def __init__(
        self, columns: Columns[Row], key: Callable[[Row], Hashable], *, id: str, order: str = "",
        down: bool = False, title: str = "", empty: str = "nothing to show", opens: bool = True,
        classes: str = "box",
    ) -> None:  # fmt: skip
        super().__init__(id=id, classes=classes)
        if title:
            self.border_title = title
        self.columns, self.order, self.down = columns, order, down
        self.hidden: frozenset[str] = frozenset()
        """The names of the columns that the user left out."""
        self.rows: list[Row] = []
        self._key, self.empty, self._opens = key, empty, opens
        self._given: Sequence[Row] = ()
        self._at: Hashable = None
        self._paint: _Paint[Row] | None = None
        self.cursor = 0

    def show(self, rows: Sequence[Row]) -> None:
        """Shows *rows* in the user's order; the cursor stays on its row."""
        self._given = rows
        self._arrange_rows()

    def _arrange_rows(self) -> None:
        self.rows = sort_rows(self.columns, self._given, self.order, down=self.down)
        keys = self._key
        at = next((i for i, row in enumerate(self.rows) if keys(row) == self._at), self.cursor)
        self._place_cursor(at)
        size = Size(self._inner_width, len(self.rows) + 1)
        if size != self.virtual_size:
            self.virtual_size = size
        self.refresh()

    def _place_cursor(self, at: int) -> None:
        self.cursor = min(max(0, at), max(0, len(self.rows) - 1))
        # Without rows the key stays: when a filter is cleared, the cursor is on its row again
        self._at = self._key(self.rows[self.cursor]) if self.rows else self._at

    @property
    def _inner_width(self) -> int:
        """The width without the scrollbar."""
        return self.scrollable_content_region.width

    @property
    def current(self) -> Row | None:
        """The row under the cursor."""
        return self.rows[self.cursor] if self.rows else None

    def _columns_on_screen(self) -> list[tuple[Column[Row], int]]:
        chosen = tuple(c for c in self.columns if c.name not in self.hidden)
        return fit_columns(chosen or self.columns, self._inner_width)

    def hide_columns(self, names: frozenset[str]) -> None:
        """Leaves the columns *names* out."""
        self.hidden = names
        self._arrange_rows()

    def go(self, key: Hashable) -> None:
        """Moves the cursor to the row of *key*, where there is one."""
        at = next((i for i, row in enumerate(self.rows) if self._key(row) == key), None)
        if at is not None:
            self._move_cursor_to(at)

    def action_move(self, by: int) -> None:
        """Moves the cursor."""
        self._move_cursor_to(self.cursor + by)

    def action_page(self, by: int) -> None:
        """Moves the cursor by *by* screens."""
        self._move_cursor_to(self.cursor + by * max(1, self.size.height - 2))

    def _move_cursor_to(self, at: int) -> None:
        old_row = self.cursor
        self._place_cursor(at)
        page_rows = max(1, self.size.height - 1)
        top = int(self.scroll_offset.y)
        if self.cursor < top:
            self.scroll_to(y=self.cursor, animate=False)
        elif self.cursor >= top + page_rows:
            self.scroll_to(y=self.cursor - page_rows + 1, animate=False)
        for row in (old_row, self.cursor):  # scrolling draws everything by itself
            self.refresh(Region(0, 1 + row - int(self.scroll_offset.y), self.size.width, 1))
        self.post_message(self.Moved(self))  # type: ignore[arg-type]

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:  # noqa: ARG002
        """Returns whether the rows can be opened."""
        return action != "choose" or self._opens

    def action_choose(self) -> None:
        """Opens the row under the cursor."""
        if self.rows and self._opens:
            self.post_message(self.Chosen(self))  # type: ignore[arg-type]

    def action_columns(self) -> None:
        """Lets the user choose the columns."""
        self.post_message(self.ColumnsWanted(self))  # type: ignore[arg-type]

    def action_sort(self, by: int) -> None:
        """Sorts by the next or the previous column on the screen."""
        names = [c.name for c, _ in self._columns_on_screen()]
        at = names.index(self.order) if self.order in names else -1
        self.sort(names[(at + by) % len(names)])

    def sort(self, name: str) -> None:
        """Sorts by a column, numbers from the largest down; the same column again reverses the order."""
        if name == self.order:
            self.down = not self.down
        else:
            column = next(c for c in self.columns if c.name == name)
            values = (column.read(row) for row in self._given)
            sample = next((value for value in values if value is not None), "")
            self.order, self.down = name, not isinstance(sample, str) and name not in ("rank", "")
        self._arrange_rows()
        self._move_cursor_to(0)

    def action_turn(self) -> None:
        """Reverses the order."""
        self.down = not self.down
        self._arrange_rows()

    def on_click(self, event: events.Click) -> None:
        """A click on the header sorts; on a row moves the cursor; a second one opens the row."""
        offset = event.get_content_offset(self)
        if offset is None:
            return
        if offset.y == 0:
            upto = 0
            for column, size in self._columns_on_screen():
                upto += size
                if offset.x < upto:
                    self.sort(column.name)
                    return
            return
        at = offset.y - 1 + int(self.scroll_offset.y)
        if at < len(self.rows):
            self._move_cursor_to(at)
            if event.chain >= 2:
                self.action_choose()

    def render_lines(self, crop: Region) -> list[Strip]:
        """The strips of *crop*; prepares what they share once."""
        self._paint = None
        return super().render_lines(crop)

    def render_line(self, y: int) -> Strip:
        """The header at the top, else the row that is scrolled there."""
        paint = self._paint = self._paint or self._prepare_paint()
        if y == 0:
            spans = header_line(paint.columns, self.order, down=self.down)
            return paint.header.strip(spans, paint.width)
        at = y - 1 + paint.top
        if not self.rows and y == 1:
            return paint.plain.strip([(f" {self.empty}", "dim")], paint.width)
        if at >= len(self.rows):
            return paint.plain.strip([], paint.width)
        spans = row_spans(paint.columns, self.rows[at])
        if at != self.cursor or not paint.focused:
            return paint.plain.strip(spans, paint.width)
        if paint.background in ("none", "sixteen"):
            spans = [("".join(chunk for chunk, _ in spans), "cursor")]
            return paint.plain.strip(spans, paint.width)
        return paint.cursor.strip(spans, paint.width)

    def _prepare_paint(self) -> _Paint[Row]:
        background, width = background_of_app(self.app), self._inner_width
        return _Paint(
            width=width, top=int(self.scroll_offset.y), background=background, focused=self.has_focus,
            columns=self._columns_on_screen(), plain=cached_palette(self.rich_style, background),
            header=cached_palette(self.get_component_rich_style("table--header"), background),
            cursor=cached_palette(self.get_component_rich_style("table--cursor"), background),
        )  # fmt: skip
