"""The memory of one rank: over steps, by role against its prediction, within a step, its allocator."""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from textual.app import ComposeResult
from textual.containers import Container

from zeromon.base.units import human_bytes, human_count, human_ratio
from zeromon.readout.report import causes_beyond_formula
from zeromon.readout.tables import ROLE_COLUMNS, RoleLine, role_lines
from zeromon.snapshot import RankSnapshot
from zeromon.snapshot.communication import UnitRow
from zeromon.snapshot.focus import nearest_oom
from zeromon.tui.columns import DisplayOptions, TableExport
from zeromon.tui.drawing import chart_drawer, draw_gauge
from zeromon.tui.line import Line, clean, fit, text_tail, wrap_text
from zeromon.tui.plots import plots_by_name
from zeromon.tui.screens.view import View
from zeromon.tui.status_text import risk_lines
from zeromon.tui.view_model import ViewModel
from zeromon.tui.widgets.panel import Page, Panel

_AXIS = 7


class Memory(View):
    """The memory of the chosen rank, else of the one closest to its limit."""

    FOCUS = "#roles"
    TAB = "memory"

    def body(self) -> ComposeResult:
        """The chart, the roles, the peaks within a step, the allocator."""
        with Container(id="memory-body"):
            yield Panel("memory", id="over", classes="box")
            yield Page("by role", id="roles")
            yield Panel("within a step", id="within", classes="box")
            yield Page("allocator", id="allocator")

    def draw(self, model: ViewModel) -> None:
        """Draws all four parts."""
        rank = self._rank(model)
        if rank is None:
            self.draw_no_rank(model)
            return
        options = model.look
        chart_panel = self.query_one("#over", Panel)
        columns = max(1, chart_panel.size.width - _AXIS)
        # the ranks share the host, whose limit is for all of them
        ranks = (rank,) if rank.memory.device is not None else model.ranks
        chart = plots_by_name(ranks, model.trends, options, columns, model.mark_steps)["memory"]
        prefix = f"rank {rank.rank}: " if rank.memory.device is not None else ""
        chart_panel.show(chart_drawer(chart.plot), prefix + chart.title)
        roles = self.query_one("#roles", Page)
        roles.border_title = f"rank {rank.rank} by role, ┃ predicted"
        roles.show(lambda width: role_bars(rank, options, width))
        self.query_one("#within", Panel).show(
            lambda w, h: peaks_within_step(rank.communication.units, options, w, h),
            f"rank {rank.rank} within a step: peak allocated by unit",
        )
        page = self.query_one("#allocator", Page)
        page.border_title = f"rank {rank.rank}: allocator and host"
        page.show(lambda width: allocator_lines(rank, options, width))

    def _rank(self, model: ViewModel) -> RankSnapshot | None:
        nearest = nearest_oom(model.ranks)
        return model.focus(nearest[0] if nearest else None)

    def sheet(self, model: ViewModel) -> TableExport[Any] | None:
        """The table of roles."""
        rank = self._rank(model)
        if rank is None:
            return None
        return TableExport(f"memory-rank{rank.rank}", ROLE_COLUMNS, role_lines(rank))


def role_bars(rank: RankSnapshot, options: DisplayOptions, width: int) -> list[Line]:
    """One bar for each role with a tick at its prediction; then what exceeds the analytical model."""
    rows = role_lines(rank)
    if not rows:
        return wrap_text("no memory census yet: an optimizer step takes one", width, "dim")
    scale = max((max(row.measured or 0, row.predicted or 0) for row in rows), default=1) or 1
    label = min(22, max(len(row.name) for row in rows) + 1)
    bars = [_role_bar(row, scale, label, options, width) for row in rows]
    causes = causes_beyond_formula(rank)
    if causes:
        bars += [[], [("memory beyond the ZeRO formula", "bold")]]
    for nbytes, subject in causes:
        bars += wrap_text(f"+{human_bytes(nbytes)} {subject}", width, "dim")
    return bars


def _role_bar(row: RoleLine, scale: int, label: int, options: DisplayOptions, width: int) -> Line:
    text_width = 31 if width >= 66 else 25 if width >= 50 else 12
    bar_width = max(4, width - label - text_width)
    bar = draw_gauge(
        row.measured or 0, scale, bar_width, "s0" if row.predicted is not None else "s3",
        limit=row.predicted, letters=options.letters,
    )  # fmt: skip
    spans: Line = [(fit(clean(row.name), label), ""), *bar]
    spans.append((fit(human_bytes(row.measured), 11, right=True), "bold"))
    if text_width > 12:
        spans.append((f"  {_against_prediction(row)}", "dim"))
    return spans


def _against_prediction(row: RoleLine) -> str:
    if row.predicted is None:
        return row.where
    if row.measured is None:
        return "not seen"
    excess = row.measured - row.predicted
    sign = "+" if excess > 0 else "-" if excess < 0 else "±"
    return f"{sign}{human_bytes(abs(excess))}" if excess else "as predicted"


def peaks_within_step(
    units: Sequence[UnitRow], options: DisplayOptions, width: int, height: int
) -> list[Line]:
    """The peak of allocated memory while each unit was in use, in the order of the forward pass."""
    measured = [unit for unit in units if unit.peak_allocated_bytes > 0]
    if not measured:
        hint = "no peak by unit is known: that needs FSDP or ZeRO-3 units on a device with an allocator"
        return wrap_text(hint, width, "dim")
    drawn = _highest_units(measured, max(1, height))
    scale = max(unit.peak_allocated_bytes for unit in measured)
    names = [clean(unit.fqn) or "(root)" for unit in drawn]
    label = min(width // 2, max(map(len, names)) + 1)
    rows: list[Line] = []
    for name, unit in zip(names, drawn, strict=True):
        nbytes, bar_width = unit.peak_allocated_bytes, max(4, width - label - 11)
        bar = draw_gauge(nbytes, scale, bar_width, "s0", letters=options.letters)
        size = (fit(human_bytes(nbytes), 11, right=True), "")
        rows.append([(fit(text_tail(name, label - 1), label), ""), *bar, size])
    return rows


def _highest_units(units: Sequence[UnitRow], limit: int) -> list[UnitRow]:
    """At most *limit* units: the highest of each range."""
    if len(units) <= limit:
        return list(units)
    bounds = [round(index * len(units) / limit) for index in range(limit + 1)]
    return [
        max(units[start:stop], key=lambda unit: unit.peak_allocated_bytes)
        for start, stop in pairwise(bounds)
    ]


def allocator_lines(rank: RankSnapshot, options: DisplayOptions, width: int) -> list[Line]:
    """The figures of the caching allocator and of the host."""
    rows: list[Line] = []
    memory = rank.memory.device
    if memory is not None:
        scale = memory.capacity_bytes if memory.capacity_bytes > 0 else memory.reserved_bytes
        for name, nbytes, tone in (
            ("allocated", memory.allocated_bytes, "s2"), ("active", memory.active_bytes, "s0"),
            ("reserved", memory.reserved_bytes, "s1"),
        ):  # fmt: skip
            bar = draw_gauge(max(0, nbytes), scale, max(4, width - 26), tone, letters=options.letters)
            size = (fit(human_bytes(nbytes), 11, right=True), "bold")
            rows.append([(fit(name, 15), "dim"), *bar, size])
        slack = max(0, memory.reserved_bytes - memory.allocated_bytes)
        share = slack / memory.reserved_bytes if memory.reserved_bytes > 0 else None
        split = memory.inactive_split_bytes
        ratio = split / memory.reserved_bytes if memory.reserved_bytes > 0 and split >= 0 else None
        rows += [
            _fact_row("capacity", human_bytes(memory.capacity_bytes)),
            _fact_row("headroom", human_bytes(memory.headroom_bytes)),
            _fact_row(
                "fragmentation", f"{human_bytes(slack)} reserved, not allocated ({human_ratio(share)})"
            ),
            _fact_row("split blocks", f"{human_bytes(split)} inactive ({human_ratio(ratio)})"),
            _fact_row("retries", human_count(memory.retries), "warn" if memory.retries > 0 else ""),
            _fact_row("failed", human_count(memory.ooms), "bad" if memory.ooms > 0 else ""),
        ]
    else:
        rows.append([("no device allocator on this rank", "dim")])
    if rank.memory.out_of_memory is not None:
        oom = rank.memory.out_of_memory
        requested, free = human_bytes(oom.requested_bytes), human_bytes(oom.free_bytes)
        message = f"out of memory: {requested} requested, {free} free"
        if oom.largest_block_bytes >= 0:
            message += f", largest block in the cache {human_bytes(oom.largest_block_bytes)}"
        rows += wrap_text(message, width, "bad")
    rows += [[], *_host_lines(rank)]
    for risk in rank.memory.risks:
        rows += risk_lines(fit(f"{risk.pool} risk", 15), risk, "dim", width)
    return rows


def _host_lines(rank: RankSnapshot) -> list[Line]:
    rows = [_fact_row("RSS", human_bytes(rank.memory.rss_bytes))]
    if rank.memory.pinned_bytes >= 0:
        rows.append(_fact_row("pinned", human_bytes(rank.memory.pinned_bytes)))
    host = rank.memory.host
    if host is not None and host.limit_bytes >= 0:
        use = f"{human_bytes(host.usage_bytes)} of {human_bytes(host.limit_bytes)}"
        rows += [_fact_row("cgroup", use), _fact_row("headroom", human_bytes(host.headroom_bytes))]
    rows.append(_fact_row("node available", human_bytes(rank.memory.host_available_bytes)))
    if host is not None and host.oom_kills > 0:
        rows.append(_fact_row("OOM kills", human_count(host.oom_kills), "bad"))
    return rows


def _fact_row(name: str, value: str, tone: str = "") -> Line:
    return [(fit(name, 15), "dim"), (value, tone)]
