"""A box with lanes over a common axis of time: zoom, pan, and scrolling through the lanes."""

from typing import ClassVar

from textual import events
from textual.binding import Binding, BindingType

from zeromon.tui.widgets.panel import Panel

LEAST_SECONDS, _MOST_SECONDS = 0.000_1, 36_000.0


class TimeAxis(Panel, can_focus=True):
    """What is shown: *seconds* that end *back* seconds before the newest moment; lanes from *top* on."""

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
        return self.seconds or max(LEAST_SECONDS, self.usual_seconds())

    def fixed_share(self) -> float:
        """The share of the axis that stays where it is while one zooms; 1: the right edge."""
        return 1.0 if not self.back else 0.5

    def action_zoom(self, by: float) -> None:
        """Shows more or less time."""
        if self.extent() is None:
            return
        before, at = self.shown_seconds(), self.fixed_share()
        self.seconds = min(_MOST_SECONDS, max(LEAST_SECONDS, before * by))
        self._move(self.back + (1 - at) * (before - self.seconds))

    def action_pan(self, by: float) -> None:
        """Moves to earlier or later moments, within what is known."""
        if self.extent() is not None:
            self._move(self.back + by * self.shown_seconds())

    def show_moment(self, at_ns: float) -> None:
        """Moves until *at_ns* is in the middle, unless it is shown already."""
        known = self.extent()
        if known is not None:
            ago, shown = (known[1] - at_ns) / 1e9, self.shown_seconds()
            if not self.back <= ago <= self.back + shown:
                self.back = max(0.0, ago - shown / 2)
            self._move(self.back)

    def _move(self, back: float) -> None:
        known = self.extent()
        if known is not None:
            most = max(0.0, (known[1] - known[0]) / 1e9 - self.shown_seconds())
            self.back = min(most, max(0.0, back))
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
        event.stop()
        if event.ctrl:
            self.action_zoom(0.8)
        else:
            self.action_scroll_lanes(-1)

    def on_mouse_scroll_down(self, event: events.MouseScrollDown) -> None:
        """Scrolls through the lanes; with ctrl zooms out."""
        event.stop()
        if event.ctrl:
            self.action_zoom(1.25)
        else:
            self.action_scroll_lanes(1)
