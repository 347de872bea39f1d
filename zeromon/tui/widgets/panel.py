"""A box whose lines are drawn to fit it."""

from collections.abc import Callable
from functools import lru_cache
from itertools import groupby, zip_longest
from typing import ClassVar

from rich.segment import Segment
from rich.style import Style
from textual import events
from textual.app import App
from textual.binding import Binding, BindingType
from textual.geometry import Region, Size
from textual.scroll_view import ScrollView
from textual.strip import Strip
from textual.widget import Widget

from zeromon.tui.line import Line, cells, cut_line, line_width
from zeromon.tui.styles import background_of_theme, style_of_tone

Draw = Callable[[int, int], list[Line]]
"""A function of width and height that returns lines."""


class Panel(Widget):
    """Lines that are made anew when there is something new, or room changes.

    Of a snapshot that comes several times a second most lines are those of the one before: only what has
    changed is drawn.
    """

    ALLOW_SELECT = False

    def __init__(self, title: str = "", *, id: str | None = None, classes: str | None = None) -> None:
        super().__init__(id=id, classes=classes)
        if title:
            self.border_title = title
        self._draw: Draw = lambda _width, _height: []
        self._made: tuple[tuple[int, int], list[Line]] | None = None
        self._palette: Palette | None = None

    def show(self, draw: Draw, title: str | None = None) -> None:
        """Shows the lines of *draw*."""
        drawn = self._made
        self._draw, self._made = draw, None
        # Textual refreshes the whole panel at each assignment, also of the same title
        if title is not None and title != self.border_title:
            self.border_title = title
        if drawn is None or drawn[0] != (self.size.width, self.size.height):
            self.refresh()
        else:
            self.refresh_lines(
                [row for row, (old, new) in enumerate(zip_longest(drawn[1], self.lines())) if old != new]
            )

    def refresh_lines(self, rows: list[int]) -> None:
        """Refreshes the rows that differ, and no others."""
        height = self.size.height
        regions = [
            Region(0, first_row, self.size.width, count)
            for first_row, count in neighbouring_ranges([row for row in rows if row < height])
        ]
        if regions:
            self.refresh(*regions)

    def lines(self) -> list[Line]:
        """The lines that are shown."""
        size = self.size.width, self.size.height
        if self._made is None or self._made[0] != size:
            self._made = size, self._draw(*size)
        return self._made[1]

    def render_lines(self, crop: Region) -> list[Strip]:
        """The strips of *crop*; looks styles up once for all of them."""
        self._palette = None
        return super().render_lines(crop)

    def render_line(self, y: int) -> Strip:
        """The line at *y*."""
        if self._palette is None:
            self._palette = cached_palette(self.rich_style, background_of_app(self.app))
        rows = self.lines()
        return self._palette.strip(rows[y] if y < len(rows) else [], self.size.width)


def neighbouring_ranges(rows: list[int]) -> list[tuple[int, int]]:
    """(first, count) of each range of neighbouring *rows*, which are in ascending order."""
    groups = (list(group) for _, group in groupby(enumerate(rows), lambda pair: pair[1] - pair[0]))
    return [(group[0][1], len(group)) for group in groups]


# ---- styled text as the strips that Textual draws -----------------------------------------------


def background_of_app(app: App[int]) -> str:
    """The kind of background that *app* has now."""
    return background_of_theme(app.current_theme, no_color=app.no_color)


class Palette(dict[str, Style]):
    """The styles over one base style; looks each up once."""

    def __init__(self, base: Style, background: str) -> None:
        super().__init__()
        self._base, self._on = base, background

    def __missing__(self, tone: str) -> Style:
        self[tone] = tone_style = self._base + style_of_tone(tone, self._on)
        return tone_style

    def strip(self, spans: Line, width: int) -> Strip:
        """*spans* in exactly *width* cells. Every segment has a style, which filters of Textual need."""
        spare = width - sum([cells(chunk) for chunk, _ in spans])
        if spare < 0:
            spans, spare = cut_line(spans, width), 0
        segments = [Segment(chunk, self[tone]) for chunk, tone in spans]
        if spare:
            segments.append(Segment(" " * spare, self._base))
        return Strip(segments, width)


@lru_cache(64)
def cached_palette(base: Style, background: str) -> Palette:
    """The palette over *base* on a kind of background."""
    return Palette(base, background)


# ---- A text that scrolls; only the lines on the screen are turned into strips -------------------

Write = Callable[[int], list[Line]]
"""A function of the width that returns lines."""


class Page(ScrollView, can_focus=True):
    """A text that is laid out for its width; the arrows, page keys and the wheel scroll it."""

    ALLOW_SELECT = False
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("j", "scroll_down", "Scroll down", show=False),
        Binding("k", "scroll_up", "Scroll up", show=False),
    ]

    def __init__(self, title: str = "", *, id: str | None = None) -> None:
        super().__init__(id=id, classes="box")
        if title:
            self.border_title = title
        self._write: Write = lambda _width: []
        self._lines: list[Line] = []
        self._follows = False
        self._end = 0
        self._goes_to_end = False

    def show(self, write: Write, *, follow: bool = False) -> None:
        """Shows the lines of *write*; *follow*: keeps the end in view when it is in view."""
        self._write, self._follows = write, follow
        self._lay()

    def on_resize(self) -> None:
        """Lays the lines out for the new width."""
        self._lay()

    def _lay(self) -> None:
        width = self.scrollable_content_region.width
        if width <= 0:
            return
        # the end may have moved with the size
        at_end = self._goes_to_end or self.scroll_offset.y >= min(self._end, self.max_scroll_y)
        self._lines = self._write(width)
        self.virtual_size = Size(width, len(self._lines))
        self._end = self.max_scroll_y
        if self._follows and at_end:
            self._goes_to_end = True  # once it is laid out; more lines may come before
            self.scroll_end(animate=False)
            self.call_after_refresh(self._stop_going_to_end)
        self.refresh()

    def _stop_going_to_end(self) -> None:
        self._goes_to_end = False

    @property
    def text(self) -> list[Line]:
        """All lines of the text."""
        return self._lines

    def render_line(self, y: int) -> Strip:
        """The line that is scrolled to *y*."""
        at = y + self.scroll_offset.y
        spans = self._lines[at] if at < len(self._lines) else []
        width = self.scrollable_content_region.width
        return cached_palette(self.rich_style, background_of_app(self.app)).strip(spans, width)


# ---- the keys that work here, on one line; a click presses one ----------------------------------

Entry = tuple[str, Line]
"""A key by its Textual name, and its label."""


class Keys(Panel):
    """The last line of a screen."""

    PALETTE: ClassVar[Entry] = ("ctrl+p", [(" ^p", "accent"), (" palette ", "dim")])

    def on_mount(self) -> None:
        """Draws again when the bindings of the screen change."""
        self.screen.bindings_updated_signal.subscribe(self, lambda _screen: self._look())
        self._look()

    def _look(self) -> None:
        by_action: dict[str, Entry] = {}
        for active in self.screen.active_bindings.values():
            binding = active.binding
            if binding.show and binding.action not in by_action:
                key = self.app.get_key_display(binding)
                by_action[binding.action] = (
                    binding.key, [(f" {key}", "accent"), (f" {binding.description} ", "")],
                )  # fmt: skip
        entries = list(by_action.values())
        self.show(lambda width, _height: [_keys_line(entries, width)])
        self._entries = entries

    def on_click(self, event: events.Click) -> None:
        """Presses the key under the pointer."""
        upto = 0
        for key, spans in _fitting_entries(self._entries, self.size.width):
            upto += line_width(spans)
            if event.x < upto:
                self.app.simulate_key(key)
                return
        if event.x >= self.size.width - line_width(self.PALETTE[1]):
            self.app.simulate_key(self.PALETTE[0])


def _fitting_entries(entries: list[Entry], width: int) -> list[Entry]:
    """The entries that fit beside the palette's."""
    spare = width - line_width(Keys.PALETTE[1])
    chosen: list[Entry] = []
    for entry in entries:
        spare -= line_width(entry[1])
        if spare < 0:
            break
        chosen.append(entry)
    return chosen


def _keys_line(entries: list[Entry], width: int) -> Line:
    key_spans = [span for _, spans in _fitting_entries(entries, width) for span in spans]
    gap = width - line_width(key_spans) - line_width(Keys.PALETTE[1])
    return [*key_spans, (" " * max(0, gap), ""), *Keys.PALETTE[1]]


# ---- A box with lanes over a common axis of time ------------------------------------------------

MIN_SHOWN_SECONDS, _MAX_SHOWN_SECONDS = 0.000_1, 36_000.0


class TimeAxis(Panel, can_focus=True):
    """A panel of *seconds* that end *back* seconds before the newest moment; lanes from *top* on."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("plus,equals_sign", "zoom(0.5)", "Zoom in", key_display="+"),
        Binding("minus", "zoom(2)", "Zoom out"),
        Binding("left", "pan(0.25)", "Earlier"),
        Binding("right", "pan(-0.25)", "Later"),
        Binding("home,0", "reset", "Newest", show=False),
        Binding("up,k", "scroll_lanes(-1)", "Lanes up", show=False),
        Binding("down,j", "scroll_lanes(1)", "Lanes down", show=False),
        Binding("pageup", "scroll_lanes(-10)", "Lanes up", show=False),
        Binding("pagedown", "scroll_lanes(10)", "Lanes down", show=False),
    ]

    def __init__(self, title: str, *, id: str, classes: str) -> None:
        super().__init__(title, id=id, classes=classes)
        self.seconds = 0.0
        """How much time is shown, seconds; 0: :meth:`usual_seconds`."""
        self.back = 0.0
        """Seconds between the newest moment and the right edge."""
        self.top = 0

    def extent(self) -> tuple[int, int] | None:
        """The first and the last known moment, nanoseconds; None while there is nothing to show."""
        raise NotImplementedError

    def usual_seconds(self) -> float:
        """How much time is shown at first."""
        raise NotImplementedError

    def count(self) -> int:
        """The number of lanes."""
        raise NotImplementedError

    def redraw(self) -> None:
        """Draws the lanes now."""
        raise NotImplementedError

    def shown_seconds(self) -> float:
        """How much time is shown."""
        return self.seconds or max(MIN_SHOWN_SECONDS, self.usual_seconds())

    def fixed_share(self) -> float:
        """The share of the axis that stays where it is while one zooms; 1: the right edge."""
        return 1.0 if not self.back else 0.5

    def action_zoom(self, by: float) -> None:
        """Shows more or less time."""
        if self.extent() is None:
            return
        old_seconds, at = self.shown_seconds(), self.fixed_share()
        self.seconds = min(_MAX_SHOWN_SECONDS, max(MIN_SHOWN_SECONDS, old_seconds * by))
        self._move_right_edge(self.back + (1 - at) * (old_seconds - self.seconds))

    def action_pan(self, by: float) -> None:
        """Moves to earlier or later moments, within what is known."""
        if self.extent() is not None:
            self._move_right_edge(self.back + by * self.shown_seconds())

    def scroll_to_moment(self, at_ns: float) -> None:
        """Moves until *at_ns* is in the middle, unless it is shown already."""
        extent = self.extent()
        if extent is not None:
            age, shown_seconds = (extent[1] - at_ns) / 1e9, self.shown_seconds()
            if not self.back <= age <= self.back + shown_seconds:
                self.back = max(0.0, age - shown_seconds / 2)
            self._move_right_edge(self.back)

    def _move_right_edge(self, back: float) -> None:
        extent = self.extent()
        if extent is not None:
            max_back = max(0.0, (extent[1] - extent[0]) / 1e9 - self.shown_seconds())
            self.back = min(max_back, max(0.0, back))
            self.redraw()

    def action_reset(self) -> None:
        """Shows the newest moments, at the first zoom."""
        self.seconds = self.back = 0.0
        self.redraw()

    def action_scroll_lanes(self, by: int) -> None:
        """Scrolls through the lanes."""
        self.top = min(max(0, self.top + by), max(0, self.count() - 1))
        self.redraw()

    def on_mouse_scroll_up(self, event: events.MouseScrollUp) -> None:
        """Scrolls through the lanes; with ctrl zooms in."""
        self._zoom_or_scroll(event, 0.8, -1)

    def on_mouse_scroll_down(self, event: events.MouseScrollDown) -> None:
        """Scrolls through the lanes; with ctrl zooms out."""
        self._zoom_or_scroll(event, 1.25, 1)

    def _zoom_or_scroll(self, event: events.MouseEvent, zoom: float, lanes: int) -> None:
        event.stop()
        if event.ctrl:
            self.action_zoom(zoom)
        else:
            self.action_scroll_lanes(lanes)
