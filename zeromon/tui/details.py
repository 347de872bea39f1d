"""A screen with one text that scrolls: the configuration, or what communicates."""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

from rich.text import Text
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import VerticalScroll
from textual.screen import Screen
from textual.widgets import Footer, Static

from zeromon.snapshot import RunSnapshot

_EVERY_SECONDS = 1.0


class Details(Screen[None]):
    """*latest* gives the picture that the app shows, or None while there is none; *render* its text."""

    CSS = """
    #details { padding: 0 1; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape,c,f,u", "app.pop_screen", "Back"),
        Binding("q", "app.quit", "Quit"),
    ]

    def __init__(
        self,
        latest: Callable[[], RunSnapshot | None],
        render: Callable[[RunSnapshot | None], Text],
    ) -> None:
        super().__init__()
        self._latest = latest
        self._text = render

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
        self.query_one("#details", Static).update(self._text(self._latest()))
