"""The keys that work here, on one line; a click presses one.

Drawn as a line: Textual's footer makes a widget of each key, anew whenever the focus moves, and that is
most of what changing a screen costs.
"""

from typing import ClassVar

from textual import events

from zeromon.tui.line import Line, length
from zeromon.tui.widgets.panel import Panel

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
        shown: dict[str, Entry] = {}
        for active in self.screen.active_bindings.values():
            binding = active.binding
            if binding.show and binding.action not in shown:
                key = self.app.get_key_display(binding)
                shown[binding.action] = (
                    binding.key, [(f" {key}", "accent"), (f" {binding.description} ", "")],
                )  # fmt: skip
        entries = list(shown.values())
        self.show(lambda width, _height: [_line(entries, width)])
        self._entries = entries

    def on_click(self, event: events.Click) -> None:
        """Presses the key under the pointer."""
        upto = 0
        for key, spans in _fitting(self._entries, self.size.width):
            upto += length(spans)
            if event.x < upto:
                self.app.simulate_key(key)
                return
        if event.x >= self.size.width - length(self.PALETTE[1]):
            self.app.simulate_key(self.PALETTE[0])


def _fitting(entries: list[Entry], width: int) -> list[Entry]:
    """The entries that fit beside the palette's."""
    room = width - length(Keys.PALETTE[1])
    chosen: list[Entry] = []
    for entry in entries:
        room -= length(entry[1])
        if room < 0:
            break
        chosen.append(entry)
    return chosen


def _line(entries: list[Entry], width: int) -> Line:
    left = [span for _, spans in _fitting(entries, width) for span in spans]
    gap = width - length(left) - length(Keys.PALETTE[1])
    return [*left, (" " * max(0, gap), ""), *Keys.PALETTE[1]]
