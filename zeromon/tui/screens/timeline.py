"""The last steps of each rank as lanes over time."""

from typing import Any, ClassVar

from textual import events
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.timer import Timer

from zeromon.readout.breakdown import PARTS, USUAL, step_parts
from zeromon.tui.columns import TableExport
from zeromon.tui.draw import lanes
from zeromon.tui.line import Line, fit
from zeromon.tui.screens.overview import parts_legend
from zeromon.tui.screens.view import View
from zeromon.tui.tables import STEPS, RankStep
from zeromon.tui.view_model import ViewModel
from zeromon.tui.widgets.panel import Panel
from zeromon.units import human_seconds

_LABEL = 10
_LEAST_SECONDS, _MOST_SECONDS = 0.001, 36_000.0
_STEPS_AT_FIRST = 12
_MOST_THICK = 3
_LEAST_PAUSE_SECONDS = 0.9
_TRUE = "Steps are at their true times; within a step, shares only (t: a trace)"


class Lanes(Panel, can_focus=True):
    """Lanes with zoom and pan."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("plus,equals_sign", "zoom(0.5)", "Zoom in", key_display="+"),
        Binding("minus", "zoom(2)", "Zoom out"),
        Binding("left", "pan(0.25)", "Earlier"),
        Binding("right", "pan(-0.25)", "Later"),
        Binding("home,0", "reset", "Newest", show=False),
        Binding("up,k", "scroll_ranks(-1)", "Ranks up", show=False),
        Binding("down,j", "scroll_ranks(1)", "Ranks down", show=False),
        Binding("pageup", "scroll_ranks(-10)", "Ranks up", show=False),
        Binding("pagedown", "scroll_ranks(10)", "Ranks down", show=False),
    ]

    def __init__(self, *, id: str, classes: str) -> None:
        super().__init__("timeline", id=id, classes=classes)
        self.seconds = 0.0
        """How much time is shown, seconds; 0: about a dozen steps."""
        self.back = 0.0
        """Seconds between the newest step and the right edge."""
        self.top = 0
        self._model: ViewModel | None = None
        self._drawn: ViewModel | None = None
        self._soon: Timer | None = None

    def arrive(self, model: ViewModel) -> None:
        """Shows the steps of a new snapshot, about one snapshot a second, because all lanes move."""
        # a key that was pressed does not wait
        at_once = model.paused or self._drawn is None or model.run is self._drawn.run
        self._model = model
        if at_once or self._soon is None:
            self.look_at(model)
            self._drawn = model
        if self._soon is None:
            self._soon = self.set_timer(_LEAST_PAUSE_SECONDS, self._catch_up)

    def _catch_up(self) -> None:
        self._soon = None
        if self._model is not None and self._model is not self._drawn:
            self.arrive(self._model)

    def look_at(self, model: ViewModel) -> None:
        """Draws the steps now."""
        span = human_seconds(self._seconds(model))
        place = (
            "to the newest step"
            if not self.back
            else f"until {human_seconds(self.back)} before the newest"
        )
        self.show(self._lines, f"timeline: {span}, {place}")

    def _seconds(self, model: ViewModel) -> float:
        if self.seconds:
            return self.seconds
        last = [rank.recent[-_STEPS_AT_FIRST:] for rank in model.ranks if rank.recent]
        known = max(((s[-1].end_ns - s[0].start_ns) / 1e9 for s in last), default=1.0)
        return max(_LEAST_SECONDS, known)

    def action_zoom(self, by: float) -> None:
        """Shows more or less time."""
        if self._model is not None:
            seconds = self._seconds(self._model) * by
            self.seconds = min(_MOST_SECONDS, max(_LEAST_SECONDS, seconds))
            self.look_at(self._model)

    def action_pan(self, by: float) -> None:
        """Moves to earlier or later steps, within what is known."""
        if self._model is not None:
            known = [
                (r.recent[0].start_ns, r.recent[-1].end_ns) for r in self._model.ranks if r.recent
            ]
            oldest, newest = (
                min((k[0] for k in known), default=0),
                max((k[1] for k in known), default=0),
            )
            most = max(0.0, (newest - oldest) / 1e9 - self._seconds(self._model))
            self.back = min(most, max(0.0, self.back + by * self._seconds(self._model)))
            self.look_at(self._model)

    def action_reset(self) -> None:
        """Shows the newest steps, at the first zoom."""
        self.seconds = self.back = 0.0
        if self._model is not None:
            self.look_at(self._model)

    def action_scroll_ranks(self, by: int) -> None:
        """Scrolls through the ranks."""
        if self._model is not None:
            self.top = min(max(0, self.top + by), max(0, len(self._model.ranks) - 1))
            self.look_at(self._model)

    def on_mouse_scroll_up(self, event: events.MouseScrollUp) -> None:
        """Scrolls through the ranks; with ctrl zooms in."""
        event.stop()
        if event.ctrl:
            self.action_zoom(0.8)
        else:
            self.action_scroll_ranks(-1)

    def on_mouse_scroll_down(self, event: events.MouseScrollDown) -> None:
        """Scrolls through the ranks; with ctrl zooms out."""
        event.stop()
        if event.ctrl:
            self.action_zoom(1.25)
        else:
            self.action_scroll_ranks(1)

    def _lines(self, width: int, height: int) -> list[Line]:
        model = self._model
        if model is None or not any(rank.recent for rank in model.ranks):
            return [[("no step has ended yet", "dim")]]
        letters = model.look.letters
        now = max(rank.recent[-1].end_ns for rank in model.ranks if rank.recent)
        last = now - round(self.back * 1e9)
        first, room = last - round(self._seconds(model) * 1e9), max(8, width - _LABEL)
        chosen = model.focus()
        steps = chosen.recent if chosen is not None else ()
        lines: list[Line] = [
            [(" " * _LABEL, ""), *lanes.ruler(first, last, now, room)],
            [(fit("step", _LABEL), "dim"), *lanes.numbers(steps, first, last, room)],
        ]  # fmt: skip
        each = (height - 4) // len(model.ranks)
        roomy, thick = each >= 2, min(_MOST_THICK, max(1, each - 1))
        for rank in model.ranks[self.top :]:
            if len(lines) >= height - 2:
                break
            mine = chosen is not None and rank.rank == chosen.rank
            label = (fit(f"rank {rank.rank}", _LABEL), "accent" if mine else "bold")
            lane = lanes.lane(rank.recent, first, last, room, letters=letters)
            lines += [[label, *lane], *[[(" " * _LABEL, ""), *lane]] * (thick - 1)]
            if roomy or mine:
                body = lanes.communication(rank.recent, first, last, room, letters=letters)
                lines.append([(fit("  comm.", _LABEL), "dim"), *body])
        lines = lines[: height - 2]
        lines += [[]] * (height - 2 - len(lines))
        return [*lines, self._legend(model, first, last, width), [(_TRUE, "dim")]]

    def _legend(self, model: ViewModel, first: int, last: int, width: int) -> Line:
        """The parts of the steps that are shown, and the usual ones."""
        seen = {
            part
            for rank in model.ranks
            for step in rank.recent
            if step.end_ns > first and step.start_ns < last
            for part, spent in step_parts(step).items()
            if spent
        }
        parts = [part for part in PARTS if part in seen or (part in USUAL and part != "exposed")]
        return parts_legend([*parts, "hidden"], model.look, width)


class Timeline(View):
    """One lane for each rank; a second one for communication where there is room."""

    FOCUS = "#lanes"
    TAB = "timeline"

    def body(self) -> ComposeResult:
        """The lanes."""
        yield Lanes(id="lanes", classes="box")

    def draw(self, model: ViewModel) -> None:
        """Draws the newest steps."""
        self.query_one(Lanes).arrive(model)

    def sheet(self, model: ViewModel) -> TableExport[Any]:
        """Every step in the snapshot."""
        rows = [RankStep(rank.rank, step) for rank in model.ranks for step in rank.recent]
        return TableExport("steps", STEPS, rows)
