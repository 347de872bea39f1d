"""The collectives of the last steps at their true moments, by rank and unit, from the ring."""

from collections.abc import Collection
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, ClassVar

from textual.app import ComposeResult
from textual.binding import Binding, BindingType

from zeromon.readout.breakdown import PARTS
from zeromon.readout.text import (
    arrival_of,
    arrival_text,
    by_unit,
    communication_of,
    compute_of,
    gaps,
    span_text,
    summary,
)
from zeromon.snapshot.lanes import Lanes, LaneSpan
from zeromon.tui.columns import Column, Columns, TableExport
from zeromon.tui.draw import lanes as drawn
from zeromon.tui.line import Line, clean, fit, tail, wrapped
from zeromon.tui.messages import LanesArrived
from zeromon.tui.screens.overview import parts_legend
from zeromon.tui.screens.view import View
from zeromon.tui.view_model import ViewModel
from zeromon.tui.widgets.panel import TimeAxis
from zeromon.units import human_seconds

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
        known = self.extent()
        return (known[1] - known[0]) / 1e9 if known else 1.0

    def count(self) -> int:
        """The number of lanes."""
        return len(self._rows())

    def fixed_share(self) -> float:
        """Where the selected collective is; the middle without one."""
        known = self.extent()
        if known is None or self.selected is None:
            return 0.5
        ago = (known[1] - (self.selected.begin_ns + self.selected.end_ns) / 2) / 1e9
        return min(1.0, max(0.0, 1 - (ago - self.back) / self.shown_seconds()))

    def redraw(self) -> None:
        """Draws the spans now."""
        text = summary(self.lanes) if self.lanes is not None else ""
        self.show(self._lines, text or "collectives of the last steps")

    def action_next(self, by: int) -> None:
        """Selects the next collective of the rank whose units are shown."""
        own = self._own()
        if own:
            at = own.index(self.selected) + by if self.selected in own else min(0, by)
            self._select(own[at % len(own)])

    def action_longest(self) -> None:
        """Selects the collective that the rank was blocked by for longest."""
        own = self._own()
        if own:
            self._select(max(own, key=lambda span: span.exposed_ns))

    def _own(self) -> tuple[LaneSpan, ...]:
        rank = self.rank()
        return communication_of(self.lanes, rank) if self.lanes and rank is not None else ()

    def _select(self, span: LaneSpan) -> None:
        self.selected = span
        self.show_moment((span.begin_ns + span.end_ns) / 2)

    def _rows(self, room: int = 0) -> list[_Row]:
        """The lanes, with the units of all ranks where *room* is enough, else of the chosen one."""
        if self.lanes is None:
            return []
        whole = self._rows_of(self.lanes, self._ranks())
        rank = self.rank()
        return whole if len(whole) <= room or rank is None else self._rows_of(self.lanes, [rank])

    def _rows_of(self, lanes: Lanes, opened: Collection[int]) -> list[_Row]:
        rows: list[_Row] = []
        for rank in self._ranks():
            own = communication_of(lanes, rank)
            rows.append(_Row(rank, f"rank {rank}", compute_of(lanes, rank), own, is_rank=True))
            rows.append(_Row(rank, "  comm.", own, own))
            if rank in opened:
                rows += [
                    _Row(rank, f"  {unit.label}", unit.spans, unit.spans) for unit in by_unit(own)
                ]
        return rows

    def _lines(self, width: int, height: int) -> list[Line]:
        known, model = self.extent(), self._model
        if self.lanes is None or known is None or model is None:
            return self._nothing(model, width)
        label = 32 if width >= 110 else 24
        last = known[1] - round(self.back * 1e9)
        first = last - round(self.shown_seconds() * 1e9)
        axis = drawn.Axis(first, last, max(8, width - label))
        margin = (" " * label, "")
        foot = self._foot(model, width)
        lines: list[Line] = [
            [margin, *_ruler(axis, known[0])],
            [(fit("step", label), "dim"), *_numbers(self.lanes, self.rank(), axis)],
            [margin, *drawn.pointer(self.selected, axis)],
        ]
        room = height - len(lines) - len(foot)
        rows = self._rows(room)
        top = min(self.top, max(0, len(rows) - room))
        for row in rows[top : top + room]:
            tone = "dim" if not row.is_rank else "accent" if row.rank == self.rank() else "bold"
            body = drawn.span_lane(row.spans, row.blocked, axis, letters=model.look.letters)
            lines.append([(fit(_tail(row.label, label - 1), label), tone), *body])
        lines += [[]] * (height - len(foot) - len(lines))
        return [*lines, *foot]

    def _nothing(self, model: ViewModel | None, width: int) -> list[Line]:
        if self.trouble:
            return wrapped(self.trouble, width, "warn")
        if self.lanes is None or model is None:
            return [[("reading the last steps ...", "dim")]]
        why = gaps(self.lanes, model.run) or ["no ring of this run is on this node"]
        return [line for text in ["no step can be shown", *why] for line in wrapped(text, width)]

    def _foot(self, model: ViewModel, width: int) -> list[Line]:
        """The selected collective, what is not drawn, the legend."""
        assert self.lanes is not None
        lines: list[Line] = []
        if self.selected is not None:
            lines += wrapped(span_text(self.selected), width)
            late = arrival_of(self.lanes, self.selected)
            if late is not None:
                lines += wrapped(arrival_text(late), width, "dim")
        else:
            lines.append([("n: next collective   e: the most exposed   [ ]: other ranks", "dim")])
        lines += [
            line for text in gaps(self.lanes, model.run) for line in wrapped(text, width, "warn")
        ]
        seen = {span.name for span in self.lanes.spans} | {"exposed"}
        parts = [part for part in PARTS if part in seen]
        return [*lines, parts_legend([*parts, "hidden"], model.look, width)]


def _tail(label: str, width: int) -> str:
    """A label in *width* cells; names of units differ at their ends."""
    text = clean(label)
    return text if len(text) <= width else "  " + tail(text.strip(), width - 2)


def _ruler(axis: drawn.Axis, zero_ns: int) -> Line:
    """Times since the first shown step began."""
    return drawn.ruler(
        axis.first_ns, axis.last_ns, axis.width, lambda at: human_seconds((at - zero_ns) / 1e9)
    )


def _numbers(lanes: Lanes, rank: int | None, axis: drawn.Axis) -> Line:
    """The number of each step where *rank* begins it."""
    steps = [(s.step, s.begin_ns, s.end_ns) for s in lanes.steps if s.rank == rank]
    return drawn.numbers(steps, axis.first_ns, axis.last_ns, axis.width)


SPANS: Columns[LaneSpan] = tuple(Column(name, 16, attrgetter(name)) for name in LaneSpan.__slots__)


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
            lambda: LanesArrived(source.lanes(steps)), lambda why: LanesArrived(None, why)
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
