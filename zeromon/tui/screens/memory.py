"""The memory of one rank: over steps, by role against its prediction, within a step, its allocator."""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from textual.app import ComposeResult
from textual.containers import Container

from zeromon.focus import nearest_oom
from zeromon.snapshot import RankSnapshot, UnitRow
from zeromon.tui.columns import TableExport
from zeromon.tui.display_options import DisplayOptions
from zeromon.tui.draw.bars import gauge
from zeromon.tui.draw.chart import charted
from zeromon.tui.line import Line, clean, fit, tail, wrapped
from zeromon.tui.plots import plots_of
from zeromon.tui.screens.view import View, no_rank
from zeromon.tui.status_text import risk_line
from zeromon.tui.tables import ROLES, RoleLine, role_lines
from zeromon.tui.view_model import ViewModel
from zeromon.tui.widgets.panel import Page, Panel
from zeromon.units import human_bytes, human_count, human_ratio

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
            self._draw_nothing(model)
            return
        look = model.look
        over = self.query_one("#over", Panel)
        columns = max(1, over.size.width - _AXIS)
        # the ranks share the host, whose limit is for all of them
        ranks = (rank,) if rank.memory is not None else model.ranks
        made = plots_of(ranks, model.trends, look, columns, model.mark_steps)["memory"]
        whose = f"rank {rank.rank}: " if rank.memory is not None else ""
        over.show(charted(made.plot), whose + made.title)
        roles = self.query_one("#roles", Page)
        roles.border_title = f"rank {rank.rank} by role, ┃ predicted"
        roles.show(lambda width: role_bars(rank, look, width))
        self.query_one("#within", Panel).show(
            lambda w, h: within_step(rank.units, look, w, h),
            f"rank {rank.rank} within a step: peak allocated by unit",
        )
        page = self.query_one("#allocator", Page)
        page.border_title = f"rank {rank.rank}: allocator and host"
        page.show(lambda width: allocator(rank, look, width))

    def _draw_nothing(self, model: ViewModel) -> None:
        """Clears the parts: what they show may be of another run."""
        for panel in self.query(Panel).filter(".box"):
            panel.show(lambda width, _h: wrapped(no_rank(model), width, "dim"), "memory")
        for page in self.query(Page):
            page.border_title = ""
            page.show(lambda width: wrapped(no_rank(model), width, "dim"))

    def _rank(self, model: ViewModel) -> RankSnapshot | None:
        worst = nearest_oom(model.ranks)
        return model.focus(worst[0] if worst else None)

    def sheet(self, model: ViewModel) -> TableExport[Any] | None:
        """The table of roles."""
        rank = self._rank(model)
        return (
            None
            if rank is None
            else TableExport(f"memory-rank{rank.rank}", ROLES, role_lines(rank))
        )


def role_bars(rank: RankSnapshot, look: DisplayOptions, width: int) -> list[Line]:
    """One bar for each role with a tick at its prediction; then what exceeds the analytical model."""
    rows = role_lines(rank)
    if not rows:
        return wrapped("no memory census yet: an optimizer step takes one", width, "dim")
    whole = max((max(row.measured or 0, row.predicted or 0) for row in rows), default=1) or 1
    label = min(22, max(len(row.name) for row in rows) + 1)
    lines = [_role_bar(row, whole, label, look, width) for row in rows]
    causes = sorted(
        ((cause.nbytes, row.role, cause.text) for row in rank.expected for cause in row.causes),
        reverse=True,
    )
    if causes:
        lines += [[], [("on top of the plain arithmetic of ZeRO", "bold")]]
    for nbytes, role, text in causes:
        line = f"+{human_bytes(nbytes)} {role.replace('_', ' ')}: {text}"
        lines += wrapped(line, width, "dim")
    return lines


def _role_bar(row: RoleLine, whole: int, label: int, look: DisplayOptions, width: int) -> Line:
    figure = 31 if width >= 66 else 25 if width >= 50 else 12
    room = max(4, width - label - figure)
    bar = gauge(
        row.measured or 0, whole, room, "s0" if row.predicted is not None else "s3",
        limit=row.predicted, letters=look.letters,
    )  # fmt: skip
    line: Line = [(fit(clean(row.name), label), ""), *bar]
    line.append((fit(human_bytes(row.measured), 11, right=True), "bold"))
    if figure > 12:
        line.append((f"  {_against(row)}", "dim"))
    return line


def _against(row: RoleLine) -> str:
    if row.predicted is None:
        return row.where
    if row.measured is None:
        return f"of {human_bytes(row.predicted)}"
    more = row.measured - row.predicted
    sign = "+" if more > 0 else "-" if more < 0 else "±"
    return f"{sign}{human_bytes(abs(more))}" if more else "as predicted"


def within_step(
    units: Sequence[UnitRow], look: DisplayOptions, width: int, height: int
) -> list[Line]:
    """The peak of allocated memory while each unit was in use, in the order of the forward pass."""
    known = [unit for unit in units if unit.peak_allocated_bytes > 0]
    if not known:
        why = "no peak by unit is known: that needs FSDP or ZeRO-3 units on a device with an allocator"
        return wrapped(why, width, "dim")
    shown = _thinned(known, max(1, height))
    whole = max(unit.peak_allocated_bytes for unit in known)
    label = min(width // 2, max(len(clean(unit.fqn)) for unit in shown) + 1)
    return [
        [
            (fit(tail(clean(unit.fqn) or "(root)", label - 1), label), ""),
            *gauge(
                unit.peak_allocated_bytes,
                whole,
                max(4, width - label - 11),
                "s0",
                letters=look.letters,
            ),
            (fit(human_bytes(unit.peak_allocated_bytes), 11, right=True), ""),
        ]
        for unit in shown
    ]


def _thinned(units: Sequence[UnitRow], most: int) -> list[UnitRow]:
    """At most *most* units: the highest of each range."""
    if len(units) <= most:
        return list(units)
    bounds = [round(part * len(units) / most) for part in range(most + 1)]
    return [
        max(units[begin:end], key=lambda unit: unit.peak_allocated_bytes)
        for begin, end in pairwise(bounds)
    ]


def allocator(rank: RankSnapshot, look: DisplayOptions, width: int) -> list[Line]:
    """The figures of the caching allocator and of the host."""
    lines: list[Line] = []
    memory = rank.memory
    if memory is not None:
        whole = memory.capacity_bytes if memory.capacity_bytes > 0 else memory.reserved_bytes
        for name, nbytes, tone in (
            ("allocated", memory.allocated_bytes, "s2"), ("active", memory.active_bytes, "s0"),
            ("reserved", memory.reserved_bytes, "s1"),
        ):  # fmt: skip
            lines.append(_level(name, nbytes, whole, tone, look, width))
        slack = max(0, memory.reserved_bytes - memory.allocated_bytes)
        share = slack / memory.reserved_bytes if memory.reserved_bytes > 0 else None
        split = memory.inactive_split_bytes
        parts = split / memory.reserved_bytes if memory.reserved_bytes > 0 and split >= 0 else None
        lines += [
            _fact("capacity", human_bytes(memory.capacity_bytes)),
            _fact("headroom", human_bytes(memory.headroom_bytes)),
            _fact(
                "fragmentation",
                f"{human_bytes(slack)} reserved and not allocated ({human_ratio(share)})",
            ),
            _fact("split blocks", f"{human_bytes(split)} inactive ({human_ratio(parts)})"),
            _fact("retries", human_count(memory.retries), "warn" if memory.retries > 0 else ""),
            _fact("failed", human_count(memory.ooms), "bad" if memory.ooms > 0 else ""),
        ]
    else:
        lines.append([("no device allocator on this rank", "dim")])
    if rank.out_of_memory is not None:
        oom = rank.out_of_memory
        requested, free = human_bytes(oom.requested_bytes), human_bytes(oom.free_bytes)
        text = f"out of memory: {requested} requested, {free} free"
        if oom.largest_block_bytes >= 0:
            text += f", largest block in the cache {human_bytes(oom.largest_block_bytes)}"
        lines += wrapped(text, width, "bad")
    lines += [[], *_host(rank)]
    return [*lines, *(risk_line(fit(f"{r.pool} risk", 15), r, "dim") for r in rank.risks)]


def _host(rank: RankSnapshot) -> list[Line]:
    lines = [
        _fact("RSS", human_bytes(rank.rss_bytes)),
        _fact("pinned", human_bytes(rank.pinned_bytes)),
    ]
    host = rank.host
    if host is not None and host.limit_bytes >= 0:
        lines.append(
            _fact("cgroup", f"{human_bytes(host.usage_bytes)} of {human_bytes(host.limit_bytes)}")
        )
        lines.append(_fact("headroom", human_bytes(host.headroom_bytes)))
    lines.append(_fact("node available", human_bytes(rank.host_available_bytes)))
    if host is not None and host.oom_kills > 0:
        lines.append(_fact("OOM kills", human_count(host.oom_kills), "bad"))
    return lines


def _fact(name: str, value: str, tone: str = "") -> Line:
    return [(fit(name, 15), "dim"), (value, tone)]


def _level(name: str, nbytes: int, whole: int, tone: str, look: DisplayOptions, width: int) -> Line:
    bar = gauge(max(0, nbytes), whole, max(4, width - 26), tone, letters=look.letters)
    return [(fit(name, 15), "dim"), *bar, (fit(human_bytes(nbytes), 11, right=True), "bold")]
