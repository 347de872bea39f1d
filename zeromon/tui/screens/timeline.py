"""The last steps of each rank as lanes over time."""

from collections.abc import Sequence
from typing import Any, ClassVar

from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.timer import Timer

from zeromon.readout.breakdown import PARTS, USUAL, step_parts
from zeromon.snapshot import RankSnapshot
from zeromon.tui.columns import TableExport
from zeromon.tui.display_options import DisplayOptions
from zeromon.tui.draw import lanes
from zeromon.tui.line import Line, fit
from zeromon.tui.screens.collectives import Collectives
from zeromon.tui.screens.overview import parts_legend
from zeromon.tui.screens.view import View
from zeromon.tui.tables import STEPS, RankStep
from zeromon.tui.view_model import ViewModel
from zeromon.tui.widgets.panel import TimeAxis
from zeromon.units import human_seconds

_LABEL = 10
_STEPS_AT_FIRST = 12
_MOST_THICK = 3
_LEAST_PAUSE_SECONDS = 0.9
_TRUE = "True times of steps, shares of phases; ? not timed (enter: collectives)"


class Lanes(TimeAxis):
    """The steps of each rank."""

    def __init__(self, *, id: str, classes: str) -> None:
        super().__init__("timeline", id=id, classes=classes)
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
        self._model = model
        span = human_seconds(self.shown_seconds())
        place = (
            "to the newest step"
            if not self.back
            else f"until {human_seconds(self.back)} before the newest"
        )
        self.show(self._lines, f"timeline: {span}, {place}")

    def redraw(self) -> None:
        """Draws the steps now."""
        if self._model is not None:
            self.look_at(self._model)

    def usual_seconds(self) -> float:
        """About a dozen steps."""
        ranks = self._model.ranks if self._model is not None else ()
        last = [rank.recent[-_STEPS_AT_FIRST:] for rank in ranks if rank.recent]
        return max(((s[-1].end_ns - s[0].start_ns) / 1e9 for s in last), default=1.0)

    def extent(self) -> tuple[int, int] | None:
        """From the first to the last step of the snapshot."""
        ranks = self._model.ranks if self._model is not None else ()
        known = [(r.recent[0].start_ns, r.recent[-1].end_ns) for r in ranks if r.recent]
        return (min(k[0] for k in known), max(k[1] for k in known)) if known else None

    def count(self) -> int:
        """The number of ranks."""
        return len(self._model.ranks) if self._model is not None else 0

    def _lines(self, width: int, height: int) -> list[Line]:
        model = self._model
        if model is None or not any(rank.recent for rank in model.ranks):
            return [[("no step has ended yet", "dim")]]
        letters = model.look.letters
        now = max(rank.recent[-1].end_ns for rank in model.ranks if rank.recent)
        last = now - round(self.back * 1e9)
        first, room = last - round(self.shown_seconds() * 1e9), max(8, width - _LABEL)
        chosen = model.focus()
        recent = chosen.recent if chosen is not None else ()
        steps = [(step.step, step.start_ns, step.end_ns) for step in recent]
        lines: list[Line] = [
            [(" " * _LABEL, ""), *lanes.ruler(first, last, room, lanes.ago_of(now))],
            [(fit("step", _LABEL), "dim"), *lanes.numbers(steps, first, last, room)],
        ]  # fmt: skip
        each = (height - 4) // len(model.ranks)
        roomy, thick = each >= 2, min(_MOST_THICK, max(1, each - 1))
        shown: list[RankSnapshot] = []
        for rank in model.ranks[self.top :]:
            if len(lines) >= height - 2:
                break
            shown.append(rank)
            mine = chosen is not None and rank.rank == chosen.rank
            label = (fit(f"rank {rank.rank}", _LABEL), "accent" if mine else "bold")
            lane = lanes.lane(rank.recent, first, last, room, letters=letters)
            lines += [[label, *lane], *[[(" " * _LABEL, ""), *lane]] * (thick - 1)]
            if roomy or mine:
                body = lanes.communication(rank.recent, first, last, room, letters=letters)
                lines.append([(fit("  comm.", _LABEL), "dim"), *body])
        lines = lines[: height - 2]
        lines += [[]] * (height - 2 - len(lines))
        return [*lines, _legend(model.look, shown, first, last, width), [(_TRUE, "dim")]]


def _legend(
    look: DisplayOptions, ranks: Sequence[RankSnapshot], first: int, last: int, width: int
) -> Line:
    """The parts of the steps that are shown, and the usual ones."""
    seen = {
        part
        for rank in ranks
        for step in rank.recent
        if step.end_ns > first and step.start_ns < last
        for part, spent in step_parts(step).items()
        if spent
    }
    parts = [part for part in PARTS if part in seen or (part in USUAL and part != "exposed")]
    return parts_legend([*parts, "hidden"], look, width)


class Timeline(View):
    """One lane for each rank; a second one for communication where there is room."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("enter", "collectives", "Collectives")]
    FOCUS = "#lanes"
    TAB = "timeline"

    def body(self) -> ComposeResult:
        """The lanes."""
        yield Lanes(id="lanes", classes="box")

    def action_collectives(self) -> None:
        """Opens the collectives of the last steps."""
        self.app.push_screen(Collectives())

    def draw(self, model: ViewModel) -> None:
        """Draws the newest steps."""
        self.query_one(Lanes).arrive(model)

    def sheet(self, model: ViewModel) -> TableExport[Any]:
        """Every step in the snapshot."""
        rows = [RankStep(rank.rank, step) for rank in model.ranks for step in rank.recent]
        return TableExport("steps", STEPS, rows)
