"""The collectives of the last steps at their true moments, by rank and unit, from the ring."""

from collections.abc import Collection
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, ClassVar

from textual.app import ComposeResult
from textual.binding import Binding, BindingType

from zeromon.base.units import human_seconds
from zeromon.readout import text
from zeromon.readout.breakdown import PARTS
from zeromon.readout.tables import Column, Columns
from zeromon.snapshot.step import Lanes, LaneSpan
from zeromon.tui import drawing as drawn
from zeromon.tui.columns import TableExport
from zeromon.tui.feed import LanesArrived
from zeromon.tui.line import Line, clean, fit, text_tail, wrap_text
from zeromon.tui.screens.overview import legend_of_parts
from zeromon.tui.screens.view import View
from zeromon.tui.view_model import ViewModel
from zeromon.tui.widgets.panel import TimeAxis

STEPS = (1, 3, 10)
"""How many steps the key ``s`` chooses from."""


@dataclass(frozen=True, slots=True)
class _Row:
    """One lane: the phases of a rank, its collectives, or those of one unit."""

    rank: int
    label: str
    spans: tuple[LaneSpan, ...]
    blocked: tuple[LaneSpan, ...]
    is_rank: bool = False


class SpanLanes(TimeAxis):
    """The spans of the last steps."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("n", "next(1)", "Next"),
        Binding("N", "next(-1)", "Before", show=False),
        Binding("e", "longest", "Most exposed"),
    ]

    def __init__(self, *, id: str, classes: str) -> None:
        super().__init__("collectives", id=id, classes=classes)
        self.lanes: Lanes | None = None
        self.selected: LaneSpan | None = None
        self.trouble = ""
        self._model: ViewModel | None = None
        self._rank: int | None = None

    def arrive(self, lanes: Lanes | None, trouble: str) -> None:
        """Shows what was read, or why nothing was."""
        self.lanes, self.trouble, self.selected = lanes, trouble, None
        self.seconds = self.back = 0.0
        self.redraw()

    def look_at(self, model: ViewModel) -> None:
        """Draws the lanes with the rank that is chosen."""
        self._model = model
        if self.rank() != self._rank:
            self._rank, self.selected = self.rank(), None
        self.redraw()

    def rank(self) -> int | None:
        """The rank whose units are shown: the one that the user chose, or the first."""
        ranks = self._ranks()
        chosen = self._model.chosen if self._model is not None else None
        return chosen if chosen in ranks else next(iter(ranks), None)

    def _ranks(self) -> list[int]:
        return sorted({step.rank for step in self.lanes.steps}) if self.lanes is not None else []

    def extent(self) -> tuple[int, int] | None:
        """From the first to the last step that was read."""
        steps = self.lanes.steps if self.lanes is not None else ()
        if not steps:
            return None
        return min(step.begin_ns for step in steps), max(step.end_ns for step in steps)

    def usual_seconds(self) -> float:
        """All steps that were read."""
        extent = self.extent()
        return (extent[1] - extent[0]) / 1e9 if extent else 1.0

    def count(self) -> int:
        """The number of lanes."""
        return len(self._rows())

    def fixed_share(self) -> float:
        """Where the selected collective is; the middle without one."""
        extent = self.extent()
        if extent is None or self.selected is None:
            return 0.5
        age = (extent[1] - (self.selected.begin_ns + self.selected.end_ns) / 2) / 1e9
        return min(1.0, max(0.0, 1 - (age - self.back) / self.shown_seconds()))

    def redraw(self) -> None:
        """Draws the spans now."""
        title = text.lanes_summary(self.lanes) if self.lanes is not None else ""
        self.show(self._lines, title or "collectives of the last steps")

    def action_next(self, by: int) -> None:
        """Selects the next collective of the rank whose units are shown."""
        spans = self._own()
        if spans:
            # Without a selection, n begins at the first collective and N at the last
            at = spans.index(self.selected) + by if self.selected in spans else min(0, by)
            self._select_span(spans[at % len(spans)])

    def action_longest(self) -> None:
        """Selects the collective that the rank was blocked by for longest."""
        spans = self._own()
        if spans:
            self._select_span(max(spans, key=lambda span: span.exposed_ns))

    def _own(self) -> tuple[LaneSpan, ...]:
        rank = self.rank()
        return text.communication_of(self.lanes, rank) if self.lanes and rank is not None else ()

    def _select_span(self, span: LaneSpan) -> None:
        self.selected = span
        self.scroll_to_moment((span.begin_ns + span.end_ns) / 2)

    def _rows(self, limit: int = 0) -> list[_Row]:
        """The lanes, with the units of all ranks where *limit* is enough, else of the chosen one."""
        if self.lanes is None:
            return []
        rows = self._rows_of(self.lanes, self._ranks())
        rank = self.rank()
        return rows if len(rows) <= limit or rank is None else self._rows_of(self.lanes, [rank])

    def _rows_of(self, lanes: Lanes, unfolded: Collection[int]) -> list[_Row]:
        rows: list[_Row] = []
        for rank in self._ranks():
            spans = text.communication_of(lanes, rank)
            rows.append(_Row(rank, f"rank {rank}", text.compute_of(lanes, rank), spans, is_rank=True))
            rows.append(_Row(rank, "  comm.", spans, spans))
            if rank in unfolded:
                rows += [
                    _Row(rank, f"  {unit.label}", unit.spans, unit.spans) for unit in text.by_unit(spans)
                ]
        return rows

    def _lines(self, width: int, height: int) -> list[Line]:
        extent, model = self.extent(), self._model
        if self.lanes is None or extent is None or model is None:
            return self._why_no_lanes(model, width)
        label = 32 if width >= 110 else 24
        last_ns = extent[1] - round(self.back * 1e9)
        first_ns = last_ns - round(self.shown_seconds() * 1e9)
        axis = drawn.Axis(first_ns, last_ns, max(8, width - label))
        margin = (" " * label, "")
        foot, rank = self._lines_at_foot(model, width), self.rank()
        steps = [(s.step, s.begin_ns, s.end_ns) for s in self.lanes.steps if s.rank == rank]
        numbers = drawn.draw_step_numbers(steps, first_ns, last_ns, axis.width)
        shown_lines: list[Line] = [
            [margin, *_draw_axis_ruler(axis, extent[0])],
            [(fit("step", label), "dim"), *numbers],
            [margin, *drawn.draw_span_pointer(self.selected, axis)],
        ]
        max_rows = height - len(shown_lines) - len(foot)
        rows = self._rows(max_rows)
        top = min(self.top, max(0, len(rows) - max_rows))
        for row in rows[top : top + max_rows]:
            tone = "dim" if not row.is_rank else "accent" if row.rank == self.rank() else "bold"
            body = drawn.draw_span_lane(row.spans, row.blocked, axis, letters=model.look.letters)
            shown_lines.append([(fit(_fit_label_end(row.label, label - 1), label), tone), *body])
        shown_lines += [[]] * (height - len(foot) - len(shown_lines))
        return [*shown_lines, *foot]

    def _why_no_lanes(self, model: ViewModel | None, width: int) -> list[Line]:
        if self.trouble:
            return wrap_text(self.trouble, width, "warn")
        if self.lanes is None or model is None:
            return [[("reading the last steps ...", "dim")]]
        notes = text.gaps_in(self.lanes, model.run) or ["no ring of this run is on this node"]
        return [row for note in ["no step can be shown", *notes] for row in wrap_text(note, width)]

    def _lines_at_foot(self, model: ViewModel, width: int) -> list[Line]:
        """The selected collective, what is not drawn, the legend."""
        assert self.lanes is not None
        rows: list[Line] = []
        if self.selected is not None:
            rows += wrap_text(text.span_text(self.selected), width)
            late = text.arrival_of(self.lanes, self.selected)
            if late is not None:
                rows += wrap_text(text.arrival_text(late), width, "dim")
        else:
            rows.append([("n: next collective   e: the most exposed   [ ]: other ranks", "dim")])
        rows += [
            row for note in text.gaps_in(self.lanes, model.run) for row in wrap_text(note, width, "warn")
        ]
        present = {span.name for span in self.lanes.spans} | {"exposed"}
        names = [name for name in PARTS if name in present]
        return [*rows, legend_of_parts([*names, "hidden"], model.look, width)]


def _fit_label_end(label: str, width: int) -> str:
    """A label in *width* cells; names of units differ at their ends."""
    name = clean(label)
    return name if len(name) <= width else "  " + text_tail(name.strip(), width - 2)


def _draw_axis_ruler(axis: drawn.Axis, zero_ns: int) -> Line:
    """Times since the first shown step began."""
    return drawn.draw_ruler(
        axis.first_ns, axis.last_ns, axis.width, lambda at: human_seconds((at - zero_ns) / 1e9)
    )


SPANS: Columns[LaneSpan] = tuple(Column(name, attrgetter(name)) for name in LaneSpan.__slots__)


class Collectives(View):
    """Opened from the timeline; the last steps that all ranks of this node have ended."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("s", "steps", "Steps"),
        Binding("g", "read", "Read again"),
    ]
    FOCUS = "#spans"
    TAB = "timeline"

    def __init__(self) -> None:
        super().__init__()
        self._steps = STEPS[1]

    def body(self) -> ComposeResult:
        """The lanes."""
        box = SpanLanes(id="spans", classes="box")
        box.border_subtitle = "esc: back"
        yield box

    def on_mount(self) -> None:
        """Reads the steps."""
        super().on_mount()
        self.action_read()

    def action_read(self) -> None:
        """Reads the last steps again: a live run has newer ones."""
        source, steps = self.host.source, self._steps
        self.read_in_thread(
            lambda: LanesArrived(source.lanes(steps)), lambda reason: LanesArrived(None, reason)
        )

    def action_steps(self) -> None:
        """Reads the next number of steps."""
        self._steps = STEPS[(STEPS.index(self._steps) + 1) % len(STEPS)]
        self.action_read()

    def on_lanes_arrived(self, message: LanesArrived) -> None:
        """Shows what was read, or why nothing was."""
        self.query_one(SpanLanes).arrive(message.lanes, message.trouble)

    def draw(self, model: ViewModel) -> None:
        """Draws the rank that is chosen."""
        self.query_one(SpanLanes).look_at(model)

    def sheet(self, model: ViewModel) -> TableExport[Any] | None:  # noqa: ARG002
        """Every span that was read."""
        lanes = self.query_one(SpanLanes).lanes
        return TableExport("collectives", SPANS, lanes.spans) if lanes is not None else None
