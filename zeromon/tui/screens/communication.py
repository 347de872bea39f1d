"""Collectives by unit, operation, group, dimension or phase; those in flight; who arrives late."""

from collections.abc import Sequence
from dataclasses import replace
from operator import attrgetter
from typing import Any, ClassVar

from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal, Vertical

from zeromon.focus import most_exposed
from zeromon.readout.dimensions import mean_busbw, pipeline_lines, untimed_dimensions
from zeromon.readout.hang import hang_headline
from zeromon.readout.text import in_graphs, node_lost, straggler_text
from zeromon.report.communication import checked
from zeromon.snapshot import CollectiveStatsRow, RankSnapshot, RunSnapshot
from zeromon.tui.columns import TableExport
from zeromon.tui.display_options import DisplayOptions
from zeromon.tui.draw.bars import stacked
from zeromon.tui.line import Line, clean, fit, wrapped
from zeromon.tui.screens.view import View
from zeromon.tui.tables import FLIGHTS, TRAFFIC, flights
from zeromon.tui.view_model import ViewModel
from zeromon.tui.widgets.panel import Panel
from zeromon.tui.widgets.table import Table
from zeromon.units import human_seconds

_MOST_PIPELINE_LINES = 4
BY = ("unit", "op", "group", "dim", "phase")


class Communication(View):
    """The collectives of the chosen rank, else of the most exposed one."""

    FOCUS = "#traffic"
    TAB = "communication"
    HINT = "part of a unit, operation, group, dimension or phase"
    OWN_FILTER = True
    BINDINGS: ClassVar[list[BindingType]] = [Binding("b", "by", "By unit, op, ...")]

    def __init__(self) -> None:
        super().__init__()
        self._by = 0

    def body(self) -> ComposeResult:
        """The table; below it the collectives in flight and the arrivals."""
        with Vertical(id="body"):
            yield Table(
                TRAFFIC, attrgetter("unit", "op", "group", "phase"), id="traffic", opens=False,
                order="exposed", down=True, empty="no collective has been timed yet",
            )  # fmt: skip
            with Horizontal(id="flights-and-skew"):
                yield Table(
                    FLIGHTS, attrgetter("rank", "what.group", "what.sequence"), id="flights",
                    title="in flight", empty="no collective is in flight",
                )  # fmt: skip
                yield Panel("arrivals", id="skew", classes="box")

    def action_by(self) -> None:
        """Sums rows by the next of operation, group, dimension and phase."""
        self._by = (self._by + 1) % len(BY)
        self.show()

    def _rows(self, rank: RankSnapshot) -> list[CollectiveStatsRow]:
        """The rows that contain all words of the filter."""
        words, names = self._text.lower().split(), attrgetter(*BY)
        rows = [
            row for row in rank.traffic if all(w in " ".join(names(row)).lower() for w in words)
        ]
        return added(rows, BY[self._by])

    def draw(self, model: ViewModel) -> None:
        """Draws all three parts."""
        rank = _rank(model)
        table = self.query_one("#traffic", Table)
        if rank is None:  # what the table shows may be of another run
            table.show([])
            table.border_title = table.border_subtitle = ""
        else:
            table.show(self._rows(rank))
            against_trace = checked(rank)
            matching = f" with {self._text!r}" if self._text else ""
            title = f"rank {rank.rank}, a step, by {BY[self._by]}{clean(matching)}"
            if BY[self._by] == "dim" and (unknown := untimed_dimensions(rank)):
                title += f"; not timed: {clean(', '.join(unknown))}"
            if text := in_graphs(rank):
                title += f"; {text}"
            table.border_title = title.replace("[", r"\[")
            table.border_subtitle = against_trace.partition(": ")[2]
        self.query_one("#flights", Table).show(flights(model.ranks, model.run.taken_ns))
        self.query_one("#skew", Panel).show(
            lambda w, h: arrivals(model.run, model.ranks, model.look, w, h),
            "who is late, who waits",
        )

    def sheet(self, model: ViewModel) -> TableExport[Any] | None:
        """The table, filtered and summed as on the screen."""
        rank = _rank(model)
        if rank is None:
            return None
        return TableExport(f"communication-rank{rank.rank}", TRAFFIC, self._rows(rank))


def _rank(model: ViewModel) -> RankSnapshot | None:
    return model.focus(most_exposed(model.ranks))


def added(rows: Sequence[CollectiveStatsRow], by: str) -> list[CollectiveStatsRow]:
    """Rows summed by one field; a bandwidth, which cannot be summed, is known of a dimension alone."""
    if by == "unit":
        return list(rows)
    same: dict[str, list[CollectiveStatsRow]] = {}
    for row in rows:
        same.setdefault(getattr(row, by), []).append(row)
    return [_sum(name, group, by) for name, group in same.items()]


def _sum(name: str, rows: Sequence[CollectiveStatsRow], by: str) -> CollectiveStatsRow:
    def one(field: str) -> str:
        values = {getattr(row, field) for row in rows}
        return values.pop() if len(values) == 1 else "(several)"

    def known(field: str) -> float | None:
        values = [getattr(row, field) for row in rows]
        return None if any(value is None for value in values) else sum(values)

    return replace(
        rows[0],
        unit=name if by == "unit" else one("unit"), op=one("op"), group=one("group"),
        dim=one("dim"), phase=one("phase"), count=sum(row.count for row in rows),
        calls=sum(row.calls for row in rows), nbytes=sum(row.nbytes for row in rows),
        seconds=sum(row.seconds for row in rows),
        exposed_seconds=sum(row.exposed_seconds for row in rows),
        exposed_total_seconds=sum(row.exposed_total_seconds for row in rows),
        wait_seconds=known("wait_seconds"), transfer_seconds=known("transfer_seconds"),
        algbw_bytes_per_second=None,
        busbw_bytes_per_second=mean_busbw(rows) if by == "dim" else None,
        best_busbw_bytes_per_second=max(row.best_busbw_bytes_per_second for row in rows),
    )  # fmt: skip


def arrivals(
    run: RunSnapshot, ranks: Sequence[RankSnapshot], look: DisplayOptions, width: int, height: int
) -> list[Line]:
    """How late each rank arrives per step, and how long it waits; and the stragglers."""
    lines: list[Line] = []
    for late in run.stragglers:
        lines += wrapped(straggler_text(late), width, "warn")
    for hang in run.hangs:
        lines += wrapped(hang_headline(run, hang), width, "bad")
    for node in run.nodes:
        if node.silent:
            lines += wrapped(node_lost(node), width, "bad")
    for text in pipeline_lines(run)[:_MOST_PIPELINE_LINES]:
        lines += wrapped(text, width, "dim")
    known = [
        rank for rank in ranks if rank.late_seconds is not None or rank.wait_seconds is not None
    ]
    if not known:
        return [
            *lines,
            *wrapped("no collective of two ranks of this node is matched yet", width, "dim"),
        ]
    room = max(1, height - len(lines) - 1)
    shown = latest(known, room)
    whole = max(max(r.late_seconds or 0.0, r.wait_seconds or 0.0) for r in shown)
    bar = max(0, (width - 31) // 2)
    label = 7 if bar else 5
    head = (("late by", bar + 10, not bar), ("", 2, False), ("it waits", bar + 10, not bar))
    lines.append([(fit("rank", label), "dim"), *((fit(t, w, right=r), "dim") for t, w, r in head)])
    for rank in sorted(shown, key=lambda r: r.rank):
        lines.append([
            (fit(str(rank.rank), label), "bold"), *_side(rank.late_seconds, whole, bar, "exposed", look),
            ("  ", ""), *_side(rank.wait_seconds, whole, bar, "data_wait", look),
        ])  # fmt: skip
    return lines


def latest(ranks: Sequence[RankSnapshot], room: int) -> list[RankSnapshot]:
    """The ranks that come last, and in the rest of the *room* those that wait longest."""
    late = sorted(ranks, key=lambda rank: -(rank.late_seconds or 0.0))
    first = late[: (room + 1) // 2]
    waiting = sorted(late[len(first) :], key=lambda rank: -(rank.wait_seconds or 0.0))
    return [*first, *waiting[: room - len(first)]]


def _side(seconds: float | None, whole: float, width: int, tone: str, look: DisplayOptions) -> Line:
    bar = stacked([(tone, seconds or 0.0)], whole, width, letters=look.letters)
    return [*bar, (fit(human_seconds(seconds) if seconds is not None else "-", 10, right=True), "")]
