"""What communicates: by unit, operation, group or phase; what is in flight; who comes late."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, ClassVar

from textual import on
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal, Vertical

from zeromon.report import checked
from zeromon.snapshot import RankSnapshot, RunSnapshot, TrafficRow
from zeromon.tui.draw.bars import stacked
from zeromon.tui.line import Line, clean, fit, wrapped
from zeromon.tui.look import Look
from zeromon.tui.scene import Scene
from zeromon.tui.screens.view import View
from zeromon.tui.tables import FLIGHTS, TRAFFIC, Flight, Sheet, flights
from zeromon.tui.widgets.panel import Panel
from zeromon.tui.widgets.table import Table
from zeromon.units import human_ratio, human_seconds

BY = ("unit", "op", "group", "phase")


class Communication(View):
    """Of the rank that was chosen, else the one that waits most."""

    TAB = "communication"
    HINT = "a part of unit, op, group or phase"
    BINDINGS: ClassVar[list[BindingType]] = [Binding("b", "by", "By unit, op, ...")]

    def __init__(self) -> None:
        super().__init__()
        self._by = 0
        self._text = ""

    def body(self) -> ComposeResult:
        """The table, and below it what is in flight and the arrivals."""
        with Vertical(id="body"):
            yield Table(
                TRAFFIC, _key, id="traffic", order="exposed", down=True,
                empty="no collective has been timed yet", opens=False,
            )  # fmt: skip
            with Horizontal(id="flights-and-skew"):
                yield Table(FLIGHTS, _flight_key, id="flights", title="in flight",
                            empty="no collective is in flight")  # fmt: skip
                yield Panel("arrivals", id="skew", classes="box")

    def on_mount(self) -> None:
        """Boxes, and the keys go to the table."""
        for table in self.query(Table):
            table.add_class("box")
        self.focus_body()

    def focus_body(self) -> None:
        """The table."""
        self.query_one("#traffic", Table).focus()

    @on(Table.Chosen, "#flights")
    def _chosen(self) -> None:
        """The rank that is in it."""
        current = self.query_one("#flights", Table).current
        if current is not None:
            self.zeromon.open_rank(current.rank)

    def filter_text(self) -> str:
        """That of the table; ranks have theirs."""
        return self._text

    def filter(self, text: str) -> None:
        """Rows with all the words of *text*."""
        self._text = text
        self.show()

    def action_by(self) -> None:
        """Adds rows up by the next of operation, group, phase."""
        self._by = (self._by + 1) % len(BY)
        self.show()

    def _rows(self, rank: RankSnapshot) -> list[TrafficRow]:
        words = self._text.lower().split()
        rows = [
            row
            for row in rank.traffic
            if all(word in f"{row.unit} {row.op} {row.group} {row.phase}".lower() for word in words)
        ]
        return added(rows, BY[self._by])

    def draw(self, scene: Scene) -> None:
        """All three."""
        rank = _rank(scene)
        table = self.query_one("#traffic", Table)
        if rank is None:  # what was there may be of another run
            table.show([], scene.look)
            table.border_title = table.border_subtitle = ""
        else:
            table.show(self._rows(rank), scene.look)
            said = checked(rank)
            found = f" with {self._text!r}" if self._text else ""
            table.border_title = (
                f"rank {rank.rank}, a step, by {BY[self._by]}{clean(found)}".replace("[", r"\[")
            )
            table.border_subtitle = said.partition(": ")[2]
        self.query_one("#flights", Table).show(flights(scene.ranks, scene.run.taken_ns), scene.look)
        self.query_one("#skew", Panel).show(
            lambda w, h: arrivals(scene.run, scene.ranks, scene.look, w, h),
            "who is late, who waits",
        )

    def sheet(self, scene: Scene) -> Sheet[Any] | None:
        """The table as it is filtered and added up."""
        rank = _rank(scene)
        if rank is None:
            return None
        return Sheet(f"communication-rank{rank.rank}", TRAFFIC, self._rows(rank))


def _rank(scene: Scene) -> RankSnapshot | None:
    timed = [rank for rank in scene.ranks if rank.traffic]
    return scene.focus(max(timed, key=lambda rank: rank.exposed_seconds or 0.0, default=None))


def _key(row: TrafficRow) -> tuple[str, ...]:
    return row.unit, row.op, row.group, row.phase


def _flight_key(one: Flight) -> tuple[int, str, int]:
    return one.rank, one.what.group, one.what.sequence


def added(rows: Sequence[TrafficRow], by: str) -> list[TrafficRow]:
    """Rows added up by ``op``, ``group`` or ``phase``: what cannot be added (a bandwidth) is unknown."""
    if by == "unit":
        return list(rows)
    same: dict[str, list[TrafficRow]] = {}
    for row in rows:
        same.setdefault(getattr(row, by), []).append(row)
    return [_sum(name, group, by) for name, group in same.items()]


def _sum(name: str, rows: Sequence[TrafficRow], by: str) -> TrafficRow:
    def one(field: str) -> str:
        values = {getattr(row, field) for row in rows}
        return values.pop() if len(values) == 1 else "(several)"

    def known(field: str) -> float | None:
        values = [getattr(row, field) for row in rows]
        return None if any(value is None for value in values) else sum(values)

    return replace(
        rows[0],
        unit=name if by == "unit" else one("unit"), op=one("op"), group=one("group"),
        phase=one("phase"), count=sum(row.count for row in rows),
        calls=sum(row.calls for row in rows), nbytes=sum(row.nbytes for row in rows),
        seconds=sum(row.seconds for row in rows),
        exposed_seconds=sum(row.exposed_seconds for row in rows),
        exposed_total_seconds=sum(row.exposed_total_seconds for row in rows),
        wait_seconds=known("wait_seconds"), transfer_seconds=known("transfer_seconds"),
        algbw_bytes_per_second=None, busbw_bytes_per_second=None,
        best_busbw_bytes_per_second=max(row.best_busbw_bytes_per_second for row in rows),
    )  # fmt: skip


def arrivals(
    run: RunSnapshot, ranks: Sequence[RankSnapshot], look: Look, width: int, height: int
) -> list[Line]:
    """How long each rank keeps the others waiting a step, and how long it waits; stragglers in words."""
    lines: list[Line] = []
    for late in run.stragglers:
        waits = f"{human_seconds(late.late_seconds)} a step ({human_ratio(late.share)})"
        said = f"{late.who} is late: the others wait {waits}"
        if late.cause or late.phase:
            said += f"; {late.cause or late.phase.replace('_', ' ')}"
        lines += wrapped(said, width, "warn")
    for hang in run.hangs:
        said = f"{hang.op} in {hang.group} does not end: {hang.kind}"
        lines += wrapped(said, width, "bad")
    for node in run.nodes:
        if node.silent:
            said = f"node {node.node} has not been heard for {human_seconds(node.heard_seconds)}"
            lines += wrapped(said, width, "bad")
    known = [
        rank for rank in ranks if rank.late_seconds is not None or rank.wait_seconds is not None
    ]
    if not known:
        return [
            *lines,
            *wrapped("no collective of two ranks of this node is matched yet", width, "dim"),
        ]
    room = max(1, height - len(lines) - 1)
    shown = sorted(known, key=lambda r: -max(r.late_seconds or 0.0, r.wait_seconds or 0.0))[:room]
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


def _side(seconds: float | None, whole: float, width: int, tone: str, look: Look) -> Line:
    bar = stacked([(tone, seconds or 0.0)], whole, width, letters=look.letters)
    return [
        *bar,
        (fit(human_seconds(seconds) if seconds is not None else "-", 10, right=True), ""),
    ]
