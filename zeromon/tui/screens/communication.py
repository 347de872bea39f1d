"""Collectives by unit, operation, group, dimension or phase; those in flight; who arrives late."""

from collections.abc import Sequence
from dataclasses import replace
from operator import attrgetter
from typing import Any, ClassVar

from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal, Vertical

from zeromon.base.units import human_seconds
from zeromon.readout.communication_report import check_text
from zeromon.readout.dimensions import mean_busbw, pipeline_lines, untimed_dimensions
from zeromon.readout.tables import FLIGHT_COLUMNS, TRAFFIC_COLUMNS, list_flights
from zeromon.readout.text import in_graphs, node_lost, straggler_text
from zeromon.readout.verdict import hang_headline
from zeromon.snapshot import CollectiveStatsRow, RankSnapshot, RunSnapshot
from zeromon.snapshot.focus import most_exposed
from zeromon.tui.columns import DisplayOptions, TableExport
from zeromon.tui.drawing import stacked_bar
from zeromon.tui.line import Line, clean, fit, wrap_text
from zeromon.tui.screens.view import View
from zeromon.tui.view_model import ViewModel
from zeromon.tui.widgets.panel import Panel
from zeromon.tui.widgets.table import Table

_MAX_PIPELINE_LINES = 4
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
                TRAFFIC_COLUMNS, attrgetter("unit", "op", "group", "phase"), id="traffic", opens=False,
                order="exposed", down=True, empty="no collective has been timed yet",
            )  # fmt: skip
            with Horizontal(id="flights-and-skew"):
                yield Table(
                    FLIGHT_COLUMNS, attrgetter("rank", "what.group", "what.sequence"), id="flights",
                    title="in flight", empty="no collective is in flight",
                )  # fmt: skip
                yield Panel("arrivals", id="skew", classes="box")

    def action_by(self) -> None:
        """Sums rows by the next of operation, group, dimension and phase."""
        self._by = (self._by + 1) % len(BY)
        self.show()

    def _rows(self, rank: RankSnapshot) -> list[CollectiveStatsRow]:
        """The rows that contain all words of the filter."""
        terms, names = self._text.lower().split(), attrgetter(*BY)
        rows = [
            r for r in rank.communication.traffic if all(w in " ".join(names(r)).lower() for w in terms)
        ]
        return sum_rows_by_field(rows, BY[self._by])

    def draw(self, model: ViewModel) -> None:
        """Draws all three parts."""
        rank = _rank_in_focus(model)
        table = self.query_one("#traffic", Table)
        if rank is None:  # what the table shows may be of another run
            table.show([])
            table.border_title = table.border_subtitle = ""
        else:
            table.show(self._rows(rank))
            against_trace = check_text(rank)
            matching = f" with {self._text!r}" if self._text else ""
            title = f"rank {rank.rank}, per step, by {BY[self._by]}{clean(matching)}"
            if BY[self._by] == "dim" and (unknown := untimed_dimensions(rank)):
                title += f"; not timed: {clean(', '.join(unknown))}"
            if graph_note := in_graphs(rank):
                title += f"; {graph_note}"
            # Textual reads a border's title as markup, and would swallow [...]
            table.border_title = title.replace("[", r"\[")
            table.border_subtitle = against_trace.partition(": ")[2]
        self.query_one("#flights", Table).show(list_flights(model.ranks, model.run.taken_ns))
        self.query_one("#skew", Panel).show(
            lambda w, h: arrival_lines(model.run, model.ranks, model.look, w, h),
            "who is late, who waits",
        )

    def sheet(self, model: ViewModel) -> TableExport[Any] | None:
        """The table, filtered and summed as on the screen."""
        rank = _rank_in_focus(model)
        if rank is None:
            return None
        return TableExport(f"communication-rank{rank.rank}", TRAFFIC_COLUMNS, self._rows(rank))


def _rank_in_focus(model: ViewModel) -> RankSnapshot | None:
    return model.focus(most_exposed(model.ranks))


def sum_rows_by_field(rows: Sequence[CollectiveStatsRow], by: str) -> list[CollectiveStatsRow]:
    """Rows summed by one field; a bandwidth, which cannot be summed, is known of a dimension alone."""
    if by == "unit":
        return list(rows)
    groups: dict[str, list[CollectiveStatsRow]] = {}
    for row in rows:
        groups.setdefault(getattr(row, by), []).append(row)
    return [_sum_rows(name, group, by) for name, group in groups.items()]


def _sum_rows(name: str, rows: Sequence[CollectiveStatsRow], by: str) -> CollectiveStatsRow:
    def value_of(field: str) -> str:
        values = {getattr(row, field) for row in rows}
        return values.pop() if len(values) == 1 else "(several)"

    def sum_of(field: str) -> float | None:
        values = [getattr(row, field) for row in rows]
        # A sum without its unknown parts would look complete
        return None if any(value is None for value in values) else sum(values)

    return replace(
        rows[0],
        unit=name if by == "unit" else value_of("unit"), op=value_of("op"), group=value_of("group"),
        dim=value_of("dim"), phase=value_of("phase"), count=sum(row.count for row in rows),
        calls=sum(row.calls for row in rows), nbytes=sum(row.nbytes for row in rows),
        seconds=sum(row.seconds for row in rows),
        exposed_seconds=sum(row.exposed_seconds for row in rows),
        exposed_total_seconds=sum(row.exposed_total_seconds for row in rows),
        wait_seconds=sum_of("wait_seconds"), transfer_seconds=sum_of("transfer_seconds"),
        algbw_bytes_per_second=None,
        busbw_bytes_per_second=mean_busbw(rows) if by == "dim" else None,
        best_busbw_bytes_per_second=max(row.best_busbw_bytes_per_second for row in rows),
    )  # fmt: skip


def arrival_lines(
    run: RunSnapshot, ranks: Sequence[RankSnapshot], look: DisplayOptions, width: int, height: int
) -> list[Line]:
    """How late each rank arrives per step, and how long it waits; and the stragglers."""
    rows: list[Line] = []
    for late in run.stragglers:
        rows += wrap_text(straggler_text(late), width, "warn")
    for hang in run.hangs:
        rows += wrap_text(hang_headline(run, hang), width, "bad")
    for node in run.nodes:
        if node.silent:
            rows += wrap_text(node_lost(node), width, "bad")
    for sentence in pipeline_lines(run)[:_MAX_PIPELINE_LINES]:
        rows += wrap_text(sentence, width, "dim")
    delays = [(r.communication.late_seconds, r.communication.wait_seconds) for r in ranks]
    timed = [r for r, pair in zip(ranks, delays, strict=True) if pair != (None, None)]
    if not timed:
        unmatched = "no collective of two ranks of this node is matched yet"
        return [*rows, *wrap_text(unmatched, width, "dim")]
    if len(run.ranks) <= 2 and run.fleet is None:  # the one waits for as long as the other is late
        return rows or wrap_text("no rank is late step after step", width, "dim")
    limit = max(1, height - len(rows) - 1)
    drawn = pick_latest_ranks(timed, limit)
    scale = max(seconds or 0.0 for pair in delays for seconds in pair)
    bar = max(0, (width - 31) // 2)
    label = 7 if bar else 5
    head = (("late by", bar + 10, not bar), ("", 2, False), ("it waits", bar + 10, not bar))
    rows.append([(fit("rank", label), "dim"), *((fit(t, w, right=r), "dim") for t, w, r in head)])
    for rank in sorted(drawn, key=lambda r: r.rank):
        rows.append([
            (fit(str(rank.rank), label), "bold"),
            *_side(rank.communication.late_seconds, scale, bar, "exposed", look),
            ("  ", ""), *_side(rank.communication.wait_seconds, scale, bar, "data_wait", look),
        ])  # fmt: skip
    return rows


def pick_latest_ranks(ranks: Sequence[RankSnapshot], limit: int) -> list[RankSnapshot]:
    """The ranks that come last, and in the rest of the *limit* those that wait longest."""
    late = sorted(ranks, key=lambda rank: -(rank.communication.late_seconds or 0.0))
    latecomers = late[: (limit + 1) // 2]
    waiting = sorted(late[len(latecomers) :], key=lambda rank: -(rank.communication.wait_seconds or 0.0))
    return [*latecomers, *waiting[: limit - len(latecomers)]]


def _side(seconds: float | None, scale: float, width: int, tone: str, look: DisplayOptions) -> Line:
    bar = stacked_bar([(tone, seconds or 0.0)], scale, width, letters=look.letters)
    return [*bar, (fit(human_seconds(seconds) if seconds is not None else "-", 10, right=True), "")]
