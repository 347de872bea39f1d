"""The screen that shows a run's configuration, its engines, its memory by role, its offload."""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import VerticalScroll
from textual.screen import Screen
from textual.widgets import Footer, Static

from zeromon.snapshot import RunSnapshot
from zeromon.tui import renderables

_EVERY_SECONDS = 1.0


class Details(Screen[None]):
    """*latest* gives the picture that the app shows, or None while there is none."""

    CSS = """
    #details { padding: 0 1; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape,c", "app.pop_screen", "Back"),
        Binding("q", "app.quit", "Quit"),
    ]

    def __init__(self, latest: Callable[[], RunSnapshot | None]) -> None:
        super().__init__()
        self._latest = latest

    def compose(self) -> ComposeResult:
        """One text that scrolls, and the keys."""
        with VerticalScroll():
            yield Static("", id="details")
        yield Footer()

    def on_mount(self) -> None:
        """Shows the newest picture, and goes on doing so."""
        self.query_one(VerticalScroll).focus()
        self._show()
        self.set_interval(_EVERY_SECONDS, self._show)

    def _show(self) -> None:
        self.query_one("#details", Static).update(renderables.details(self._latest()))
