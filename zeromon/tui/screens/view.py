"""What all screens have: the run and its danger at the top, tabs, the footer, a line to filter with."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, cast

from textual import events, on
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.geometry import Size
from textual.screen import Screen
from textual.widgets import Input

from zeromon.tui import words
from zeromon.tui.line import Line, spread
from zeromon.tui.scene import Scene, scrubber, status
from zeromon.tui.tables import Sheet
from zeromon.tui.widgets.keys import Keys
from zeromon.tui.widgets.panel import Panel

if TYPE_CHECKING:
    from zeromon.tui.app import ZeromonApp

TABS = ("overview", "memory", "communication", "timeline", "ranks", "findings", "logs")
NO_RANK = "no rank is let through by the filter"


class Tabs(Panel):
    """The names of the screens; a click opens one."""

    def on_click(self, event: events.Click) -> None:
        """Opens the screen under the pointer."""
        upto = 0
        for name, (text, _) in zip(TABS, self.lines()[0], strict=False):
            upto += len(text)
            if event.x < upto:
                self.app.switch_mode(name)
                return


class View(Screen[None]):
    """A screen that shows a scene. *name* is its tab."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("slash", "ask", "Filter"),
        Binding("escape", "leave", "Back", show=False),
    ]
    AUTO_FOCUS = "#body"
    TAB = ""
    HINT = "ranks: 3   0-7,16   exposed>10   memory>=60   late>0.01   a part of node, state or unit"

    _laid_for: Size | None = None

    def __init__(self) -> None:
        super().__init__()
        # it is styled as it is mounted; not knowing that, Textual reads all rules anew, and twice
        self._css_update_count = self.app._css_update_count

    @property
    def zeromon(self) -> ZeromonApp:
        """The app."""
        return cast("ZeromonApp", self.app)

    def compose(self) -> ComposeResult:
        """The top, the screen's own part, the bottom."""
        yield Panel(id="head")
        yield Panel(id="risk")
        yield Tabs(id="tabs")
        yield from self.body()
        yield Input(placeholder=self.HINT, id="asked", compact=True)
        yield Panel(id="scrubber")
        yield Keys(id="keys")

    def body(self) -> ComposeResult:
        """The screen's own part."""
        yield from ()

    def draw(self, scene: Scene) -> None:
        """Shows *scene* in it."""

    def sheet(self, scene: Scene) -> Sheet[Any] | None:  # noqa: ARG002
        """Its table, for a file."""
        return None

    def on_screen_resume(self) -> None:
        """Shows what has come meanwhile."""
        self.show()

    def on_resize(self, event: events.Resize) -> None:
        """Some lines depend on the width."""
        if event.size != self._laid_for:
            self._laid_for = event.size
            self.call_after_refresh(self.show)

    def show(self) -> None:
        """Shows the app's scene."""
        scene = self.zeromon.scene
        if not self._is_laid_out():
            return
        self.show_age()
        if scene is not None:
            self.query_one("#risk", Panel).show(lambda width, _h: [words.risk(scene.run, width)])
            self.query_one("#tabs", Tabs).show(lambda width, _h: [_tabs(self.TAB, scene, width)])
            line = self.query_one("#scrubber", Panel)
            line.set_class(scene.paused or scene.replay, "-shown")
            line.show(lambda width, _h: [scrubber(scene, width)])
            self.draw(scene)

    def show_age(self) -> None:
        """Shows which run, and how old its picture is."""
        if not self._is_laid_out():
            return
        scene, now = self.zeromon.scene, self.zeromon.now()
        head = self.query_one("#head", Panel)
        if scene is None:
            waiting = self.zeromon.trouble or "waiting for the first picture"
            head.show(lambda _w, _h: [[(" zeromon ", "badge"), (f"  {waiting}", "")]])
        else:
            head.show(lambda width, _h: [spread(words.head(scene.run), status(scene, now), width)])

    def _is_laid_out(self) -> bool:
        """Whether its parts are there: the first tick of a clock may come before them."""
        return self.is_mounted and bool(self.query("#head"))

    def action_leave(self) -> None:
        """Leaves the filter, clears it, or goes back to the screen below."""
        asked = self.query_one("#asked", Input)
        if asked.display:
            asked.value = ""
            self._close(asked)
        elif self.filter_text():
            self.filter("")
        elif len(self.app.screen_stack) > 1:
            self.app.pop_screen()

    def action_ask(self) -> None:
        """Opens the line to filter with."""
        asked = self.query_one("#asked", Input)
        asked.value = self.filter_text()
        asked.display = True
        self.set_focus(asked)  # at once: the next key is its

    def filter_text(self) -> str:
        """What is filtered by now."""
        return self.zeromon.wanted

    def filter(self, text: str) -> None:
        """Filters by *text*."""
        self.zeromon.want(text)

    @on(Input.Changed, "#asked")
    def _typed(self, event: Input.Changed) -> None:
        if event.input.display:
            self.filter(event.value)

    @on(Input.Submitted, "#asked")
    def _entered(self, event: Input.Submitted) -> None:
        self._close(event.input)

    def _close(self, asked: Input) -> None:
        asked.display = False
        self.filter(asked.value)
        self.focus_body()

    def focus_body(self) -> None:
        """Focuses what the keys are for."""
        self.set_focus(None)


def _tabs(shown: str, scene: Scene, width: int) -> Line:
    grave = sum(finding.severity != "info" for finding in scene.run.findings)
    short = width < 100
    line: Line = []
    for number, name in enumerate(TABS, 1):
        title = (
            {"communication": "Comm"}.get(name, name.capitalize()) if short else name.capitalize()
        )
        count = f" {grave}" if name == "findings" and grave else ""
        line.append((f" {number} {title}{count} ", "badge" if name == shown else "dim"))
    return line
