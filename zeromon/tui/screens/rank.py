"""Everything that is known about one rank."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from textual.app import ComposeResult
from textual.containers import Horizontal, Vertical

from zeromon.base.units import human_bytes, human_count, human_rate, human_ratio, human_seconds
from zeromon.readout import charts
from zeromon.readout.answers import bar_of_rank
from zeromon.readout.breakdown import loading_text
from zeromon.readout.communication_report import by_unit, nccl_block, stage_block
from zeromon.readout.figures import STEP, training_text
from zeromon.readout.ledger import checkpoint_text, startup_parts_text
from zeromon.readout.report import by_role, engine_block, offload_block, settings_block
from zeromon.readout.tables import STEP_COLUMNS, RankStep
from zeromon.readout.text import (
    busbw_unknown,
    doing,
    exposed_unknown,
    group_of,
    in_graphs,
    overhead_text,
    overlap_unknown,
)
from zeromon.snapshot import RankSnapshot, RunSnapshot
from zeromon.snapshot.host import Device
from zeromon.tui.columns import DisplayOptions, TableExport
from zeromon.tui.drawing import chart_drawer
from zeromon.tui.line import Line, cells, clean, line_width, wrap_text
from zeromon.tui.plots import plots_by_name
from zeromon.tui.screens.overview import finding_lines, waits_lines
from zeromon.tui.screens.text import lines_of_report
from zeromon.tui.screens.view import View
from zeromon.tui.status_text import risk_lines
from zeromon.tui.view_model import ViewModel
from zeromon.tui.widgets.panel import Page, Panel

_AXIS, _MIN_CHART_WIDTH = 7, 26


class RankView(View):
    """Opened from the table of ranks; ``[`` and ``]`` show its neighbours."""

    FOCUS = "#rank-page"
    TAB = "ranks"

    def body(self) -> ComposeResult:
        """All charts over a text."""
        with Vertical(id="body"):
            with Horizontal(id="rank-charts"):
                yield from (
                    Panel(name, id=f"rank-{name}", classes="box") for name in charts.list_names()
                )
            yield Page("rank", id="rank-page")

    def draw(self, model: ViewModel) -> None:
        """Draws the charts and the text."""
        rank = model.focus()
        if rank is None:
            self.draw_no_rank(model)
            return
        options = model.look
        chart_width = self.query_one("#rank-charts Panel", Panel).size.width
        if not chart_width:
            return  # before the layout, which draws again: a chart of one column would flash
        columns = max(1, chart_width - _AXIS)
        plots = plots_by_name((rank,), model.trends, options, columns, model.mark_steps)
        chart_names = list(plots)[: self.size.width // _MIN_CHART_WIDTH]
        for name in charts.list_names():
            panel = self.query_one(f"#rank-{name}", Panel)
            panel.display = name in chart_names
            if chart := plots.get(name):
                panel.show(chart_drawer(chart.plot), chart.title)
        page = self.query_one(Page)
        page.border_title = f"rank {rank.rank}"
        page.border_subtitle = "esc: back   \\[ ]: other ranks"
        page.show(lambda width: rank_page(model.run, rank, options, width))

    def sheet(self, model: ViewModel) -> TableExport[Any] | None:
        """The steps of the rank."""
        rank = model.focus()
        if rank is None:
            return None
        rows = [RankStep(rank.rank, step) for step in rank.steps.recent]
        return TableExport(f"rank{rank.rank}", STEP_COLUMNS, rows)


def rank_page(run: RunSnapshot, rank: RankSnapshot, options: DisplayOptions, width: int) -> list[Line]:
    """Identity, state, time, memory, device and communication of a rank."""
    status, steps, comm = rank.status, rank.steps, rank.communication
    unknown = [
        ("exposed", exposed_unknown(rank)), ("overlap", overlap_unknown(rank)),
        ("busbw", busbw_unknown(rank)),
    ]  # fmt: skip
    notes = [(name, f"n/a: {reason}") for name, reason in unknown if reason]
    notes += [("untimed", graph_note)] if (graph_note := in_graphs(rank)) else []
    notes += [("training", training_text(rank))] if rank.training.scalars else []
    rows: list[Line] = [
        *_pairs(width, ("pid", str(rank.pid)), ("node", rank.node), ("device", rank.device),
                ("local rank", str(rank.local_rank)), ("strategy", rank.strategy)),
        *_paragraph(width, "now", status.stopped or status.ended or doing(rank),
                    "bad" if status.failed else "bold"),
    ]  # fmt: skip
    if status.exception and not status.stopped:
        rows += wrap_text(status.exception, width, "bad")
    rows += [
        *_pairs(width, ("step", human_count(steps.last_step)),
                ("skipped", human_count(steps.skipped_steps)),
                ("micro-steps", human_count(steps.micro_steps)), ("mean step", STEP.text(rank)),
                ("exposed", f"{human_seconds(comm.exposed_seconds)} "
                            f"({human_ratio(comm.exposed_ratio)})"),
                ("overlap", human_ratio(comm.overlap_ratio))),
        *(row for note in notes for row in _paragraph(width, *note)),
        *_pairs(width, ("late", human_seconds(comm.late_seconds)),
                ("waits", human_seconds(comm.wait_seconds)),
                ("RSS", human_bytes(rank.memory.rss_bytes)), *_memory_pairs(rank)),
        *_pairs(width, ("start-up", human_seconds(rank.ledger.startup_seconds)),
                *([("agent cost", cost)] if (cost := overhead_text([rank])) != "n/a" else ()),
                ("errors in hooks", human_count(rank.agent.errors)),
                ("records lost", human_count(rank.agent.dropped))),
        *(wrap_text(loading, width) if (loading := loading_text(rank)) else []),
        *(wrap_text(f"set-up: {startup}", width) if (startup := startup_parts_text(rank)) else []),
        *(wrap_text(checkpoint, width) if (checkpoint := checkpoint_text(run)) else []),
        [], *waits_lines([bar_of_rank(rank)], options, width, with_text=True),
    ]  # fmt: skip
    if rank.machine.device is not None:
        rows += [[], *_device_lines(rank.machine.device, width)]
    if rank.machine.pressure is not None:
        waits = f"{human_ratio(rank.machine.pressure.cpu_wait_ratio)} of its time waiting for a CPU"
        pages = f"{rank.machine.pressure.major_faults_per_second:.0f}/s"
        rows += _pairs(width, ("host", waits), ("pages from disk", pages))
    for risk in rank.memory.risks:
        rows += risk_lines(f"{risk.pool} risk  ", risk, "", width)
    rows += _waiting_rank_lines(run, rank, width)
    findings = [finding for finding in run.findings if finding.rank == rank.rank]
    if findings:
        rows += [[], [("findings", "bold")], *finding_lines(findings, width)]
    return [*rows, *_report_sections(replace(run, ranks=(rank,)), width)]


def _waiting_rank_lines(run: RunSnapshot, rank: RankSnapshot, width: int) -> list[Line]:
    """The collectives in flight, and the call stack of a rank that makes no progress."""
    rows: list[Line] = [[], [("in flight", "bold")]] if rank.communication.in_flight else []
    for call in rank.communication.in_flight:
        age = human_seconds(max(0.0, (run.taken_ns - call.issued_ns) / 1e9))
        subject = f"{call.op} number {human_count(call.sequence)} in {group_of(rank, call)}"
        message = f"  {subject}, {call.unit or 'no unit'}, {human_bytes(call.nbytes)}, for {age}"
        rows += wrap_text(message, width, "warn")
    if rank.status.stack:
        rows += [[], [("call stack, the outermost call first", "bold")]]
        rows += [row for frame in rank.status.stack for row in wrap_text(frame, width, "", "  ")]
    return rows


def _report_sections(run: RunSnapshot, width: int) -> list[Line]:
    blocks = (
        stage_block(run), by_unit(run, 20), nccl_block(run),
        by_role(run), offload_block(run), engine_block(run),
        settings_block(run, written_only=True),
    )  # fmt: skip
    return [row for block in blocks if block for row in ([], *lines_of_report(block, width))]


_MARGIN = 11


def _pairs(width: int, *pairs: tuple[str, str]) -> list[Line]:
    """Names and short values from left to right, on as many lines as *width* needs."""
    rows: list[Line] = [[]]
    for name, value in pairs:
        label = f"   {name} " if rows[-1] else f"{name:<{_MARGIN - 1}} "
        if rows[-1] and line_width(rows[-1]) + cells(label + value) > width:
            label = f"{name} "
            rows.append([(" " * _MARGIN, "")])
        rows[-1] += [(label, "dim"), (clean(value), "")]
    return rows


def _paragraph(width: int, name: str, value: str, tone: str = "") -> list[Line]:
    """A name and a long value, whose lines begin below one another."""
    head, *below = wrap_text(value, max(1, width - _MARGIN), tone)
    return [[(f"{name:<{_MARGIN}}", "dim"), *head], *([(" " * _MARGIN, ""), *row] for row in below)]


def _memory_pairs(rank: RankSnapshot) -> Sequence[tuple[str, str]]:
    memory = rank.memory.device
    if memory is None:
        return ()
    return (
        ("allocated", human_bytes(memory.allocated_bytes)),
        ("reserved", human_bytes(memory.reserved_bytes)),
        ("headroom", human_bytes(memory.headroom_bytes)), ("retries", human_count(memory.retries)),
    )  # fmt: skip


def _device_lines(device: Device, width: int) -> list[Line]:
    power = f"{device.power_watts:.0f} W" if device.power_watts is not None else "n/a"
    heat = f"{device.temperature_celsius:.0f} °C" if device.temperature_celsius is not None else "n/a"
    table = [
        *_pairs(width, ("device", device.name), ("busy", human_ratio(device.utilization_ratio)),
               ("used", f"{human_bytes(device.used_bytes)} of {human_bytes(device.total_bytes)}"),
               ("power", power), ("temperature", heat)),
        *_pairs(width, ("links", ""), ("PCIe in", human_rate(device.pcie_receive_bytes_per_second)),
               ("out", human_rate(device.pcie_transmit_bytes_per_second)),
               ("NVLink in", human_rate(device.nvlink_receive_bytes_per_second)),
               ("out", human_rate(device.nvlink_transmit_bytes_per_second))),
    ]  # fmt: skip
    if device.sm_active_ratio is not None:
        table += _pairs(width, ("active", ""), ("SM", human_ratio(device.sm_active_ratio)),
                            ("tensor cores", human_ratio(device.tensor_active_ratio)),
                            ("memory", human_ratio(device.dram_active_ratio)))  # fmt: skip
    if device.throttle_reasons:
        table.append([("throttled  ", "dim"), (clean(", ".join(device.throttle_reasons)), "warn")])
    if device.ecc_errors or device.xid:
        table.append(
            [("errors     ", "dim"), (f"ECC {device.ecc_errors or 0}, Xid {device.xid or '-'}", "bad")]
        )
    return table
