"""The last steps of each rank as lanes over time."""

from collections.abc import Sequence
from typing import Any, ClassVar

from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.timer import Timer

from zeromon.base.units import human_seconds
from zeromon.readout.breakdown import PARTS, USUAL, step_parts
from zeromon.readout.tables import STEP_COLUMNS, RankStep
from zeromon.snapshot import RankSnapshot
from zeromon.tui import drawing
from zeromon.tui.columns import DisplayOptions, TableExport
from zeromon.tui.line import Line, fit
from zeromon.tui.screens.collectives import Collectives
from zeromon.tui.screens.overview import legend_of_parts
from zeromon.tui.screens.view import View
from zeromon.tui.view_model import ViewModel
from zeromon.tui.widgets.panel import TimeAxis

_LABEL = 10
_STEPS_AT_FIRST = 12
_MAX_LANE_ROWS = 3
_MIN_PAUSE_SECONDS = 0.9
_NOTE = "parts of a step: shares, not times (enter: times); ? not timed"


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
            self._soon = self.set_timer(_MIN_PAUSE_SECONDS, self._draw_waiting_model)

    def _draw_waiting_model(self) -> None:
        self._soon = None
        if self._model is not None and self._model is not self._drawn:
            self.arrive(self._model)

    def look_at(self, model: ViewModel) -> None:
        """Draws the steps now."""
        self._model = model
        span = human_seconds(self.shown_seconds())
        until = f"until {human_seconds(self.back)} before the newest"
        position = until if self.back else "to the newest step"
        self.show(self._lines, f"timeline: {span}, {position}")

    def redraw(self) -> None:
        """Draws the steps now."""
        if self._model is not None:
            self.look_at(self._model)

    def usual_seconds(self) -> float:
        """About a dozen steps."""
        ranks = self._model.ranks if self._model is not None else ()
        recent_steps = [rank.steps.recent[-_STEPS_AT_FIRST:] for rank in ranks if rank.steps.recent]
        return max(((s[-1].end_ns - s[0].start_ns) / 1e9 for s in recent_steps), default=1.0)

    def extent(self) -> tuple[int, int] | None:
        """From the first to the last step of the snapshot."""
        ranks = self._model.ranks if self._model is not None else ()
        recent = [rank.steps.recent for rank in ranks if rank.steps.recent]
        return (
            (min(s[0].start_ns for s in recent), max(s[-1].end_ns for s in recent)) if recent else None
        )

    def count(self) -> int:
        """The number of ranks."""
        return len(self._model.ranks) if self._model is not None else 0

    def _lines(self, width: int, height: int) -> list[Line]:
        model = self._model
        if model is None or not any(rank.steps.recent for rank in model.ranks):
            return [[("no completed step", "dim")]]
        letters = model.look.letters
        now_ns = max(rank.steps.recent[-1].end_ns for rank in model.ranks if rank.steps.recent)
        stop = now_ns - round(self.back * 1e9)
        start, size = stop - round(self.shown_seconds() * 1e9), max(8, width - _LABEL)
        chosen = model.focus()
        recent = chosen.steps.recent if chosen is not None else ()
        steps = [(step.step, step.start_ns, step.end_ns) for step in recent]
        rows: list[Line] = [
            [(" " * _LABEL, ""), *drawing.draw_ruler(start, stop, size, drawing.age_labels(now_ns))],
            [(fit("step", _LABEL), "dim"), *drawing.draw_step_numbers(steps, start, stop, size)],
        ]  # fmt: skip
        rank_rows = (height - 4) // len(model.ranks)
        roomy, thick = rank_rows >= 2, min(_MAX_LANE_ROWS, max(1, rank_rows - 1))
        drawn: list[RankSnapshot] = []
        for rank in model.ranks[self.top :]:
            if len(rows) >= height - 2:
                break
            drawn.append(rank)
            mine = chosen is not None and rank.rank == chosen.rank
            label = (fit(f"rank {rank.rank}", _LABEL), "accent" if mine else "bold")
            lane = drawing.draw_step_lane(rank.steps.recent, start, stop, size, letters=letters)
            rows += [[label, *lane], *[[(" " * _LABEL, ""), *lane]] * (thick - 1)]
            if roomy or mine:
                body = drawing.draw_communication(rank.steps.recent, start, stop, size, letters=letters)
                rows.append([(fit("  comm.", _LABEL), "dim"), *body])
        rows = rows[: height - 2]
        rows += [[]] * (height - 2 - len(rows))
        return [*rows, _steps_legend(model.look, drawn, start, stop, width), [(_NOTE, "dim")]]


def _steps_legend(
    options: DisplayOptions, ranks: Sequence[RankSnapshot], start: int, stop: int, width: int
) -> Line:
    """The parts of the steps that are shown, and the usual ones."""
    steps = (s for r in ranks for s in r.steps.recent if s.end_ns > start and s.start_ns < stop)
    drawn = {name for step in steps for name, size in step_parts(step).items() if size}
    names = [name for name in PARTS if name in drawn or (name in USUAL and name != "exposed")]
    return legend_of_parts([*names, "hidden"], options, width)


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
        rows = [RankStep(rank.rank, step) for rank in model.ranks for step in rank.steps.recent]
        return TableExport("steps", STEP_COLUMNS, rows)
