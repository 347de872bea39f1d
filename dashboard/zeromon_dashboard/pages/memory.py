"""The page "Memory": over the steps, by role, within a step, fragmentation. Pure."""

from collections.abc import Iterable
from typing import Any

import dash_mantine_components as dmc
from dash import dcc, html

from zeromon.base.units import human_bytes, human_count
from zeromon.memory.reconcile import unattributed_memory
from zeromon.readout.charts import role_bands
from zeromon.readout.text import UNATTRIBUTED_NAMES
from zeromon.snapshot import RankSnapshot, RunSnapshot
from zeromon.snapshot.focus import first_counted, nearest_oom
from zeromon_dashboard import plotly_figures, widgets
from zeromon_dashboard.charts import empty_figure
from zeromon_dashboard.page import Known, Page, Parts
from zeromon_dashboard.url_state import Route


def content(view: Known) -> Page:
    """The charts and cards of one rank's memory: the chosen one, else the nearest to its limit."""
    nearest = nearest_oom(view.chosen.ranks)
    rank = nearest[0] if nearest is not None else view.rank
    counted = rank if rank is not None and rank.memory.roles else first_counted(view.chosen.ranks)
    roles = plotly_figures.roles_figure(counted) if counted else None
    peaks = plotly_figures.unit_peaks_figure(counted) if counted else None
    has_device = rank is not None and rank.memory.device is not None
    no_peak = "no unit has a known peak" if has_device else "nothing is on a device"
    return Page(
        {
            **widgets.card_parts(widgets.risk_card(view.chosen), *_fragmentation_cards(rank)),
            "roles": {"figure": roles or empty_figure(plotly_figures.NO_CENSUS)},
            "within": {"figure": peaks or empty_figure(f"Peaks by unit: {no_peak}")},
            "rests": {"children": _unattributed_memory_text(counted)},
        },
        widgets.drawn_charts(view, "memory"),
    )


def skeleton(props: Parts, _: Route) -> list[Any]:
    """The components that the content goes into."""
    return [
        widgets.card_row(props),
        widgets.graph_panel("memory", props),
        widgets.two_columns(
            widgets.graph_panel("roles", props),
            dcc.Loading(html.Div(id="roles-over"), delay_show=300, type="dot"),
        ),
        widgets.graph_panel("within", props),
        dmc.Text(id="rests", size="sm", c="dimmed", **props["rests"]),
    ]


def over_the_record(snapshots: Iterable[RunSnapshot], rank: int) -> Any:
    """The chart of memory by role over the recorded *snapshots*; nothing without a census in them."""
    bands = role_bands(snapshots, rank)
    if bands is None:
        return None
    return widgets.graph_panel(
        "roles-chart", {"roles-chart": {"figure": plotly_figures.role_bands_figure(bands)}}
    )


def _fragmentation_cards(rank: RankSnapshot | None) -> list[Any]:
    if rank is None:
        return []
    memory = rank.memory.device
    if memory is None:
        host = rank.memory.host
        limit = human_bytes(host.limit_bytes) if host and host.limit_bytes > 0 else "no limit"
        figures_of: list[tuple[str, int | None, str]] = [
            ("Resident", rank.memory.rss_bytes, ""),
            ("Host headroom", host.headroom_bytes if host else None, f"cgroup: {limit}; "),
            ("Pinned", rank.memory.pinned_bytes, "no device; "),
        ]
    else:
        slack = memory.reserved_bytes - memory.allocated_bytes
        retries = f"{human_count(memory.retries)} allocation retries, {human_count(memory.ooms)} failed"
        split = f"{human_bytes(memory.inactive_split_bytes)} in split blocks"
        allocated = f"{human_bytes(memory.allocated_bytes)} of it allocated, "
        figures_of = [
            ("Reserved", memory.reserved_bytes, allocated),
            ("Headroom", memory.headroom_bytes, f"of {human_bytes(memory.capacity_bytes)}, "),
            ("Fragmentation", slack, f"reserved, not allocated; {split}; {retries}; "),
        ]
    return [
        widgets.figure_card(name, human_bytes(nbytes), f"{note}rank {rank.rank}")
        for name, nbytes, note in figures_of
        if nbytes is not None and nbytes >= 0
    ]


def _unattributed_memory_text(rank: RankSnapshot | None) -> str:
    remainders = unattributed_memory(rank) if rank is not None else ()
    of_rank = f"rank {rank.rank}: " if rank is not None and remainders else ""
    return of_rank + "; ".join(
        f"{UNATTRIBUTED_NAMES[remainder.kind]} ({remainder.place}): {human_bytes(remainder.nbytes)}"
        for remainder in remainders
    )
