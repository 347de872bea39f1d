"""The page "Overview": cards, where a step goes, all charts, the most severe findings. Pure."""

from typing import Any

import dash_mantine_components as dmc
from dash import html

from zeromon.base.units import human_count, human_ratio, human_seconds
from zeromon.readout import text
from zeromon.readout.charts import list_names
from zeromon.readout.figures import (
    LAST_STEPS,
    SPREAD_HEADS,
    best_informed,
    mean_step_seconds,
    spread_rows,
    training_text,
    value_text,
)
from zeromon.readout.throughput import how_far, progress_text, throughput_text, tokens_per_second
from zeromon.readout.verdict import exposed_severity
from zeromon.snapshot import RunSnapshot
from zeromon.snapshot.focus import most_exposed
from zeromon_dashboard import plotly_figures, widgets
from zeromon_dashboard.charts import empty_figure
from zeromon_dashboard.page import Known, Page, Parts
from zeromon_dashboard.url_state import Route

_NO_PARTS = "Where a step goes: n/a; no step is timed, or core metrics only"
_NO_LEDGER = "The ledger: n/a: the run has just begun, is a preflight, or has core metrics only"


def content(view: Known) -> Page:
    """The cards, the breakdown of a step, all charts, and the most severe findings."""
    run = view.chosen
    return Page(
        {
            **widgets.card_parts(
                widgets.risk_card(run),
                _exposed_time_card(run),
                _step_time_card(run),
                _throughput_card(run),
                *_loss_cards(run),
                _overhead_card(run),
            ),
            "breakdown": {"figure": plotly_figures.step_breakdown(run) or empty_figure(_NO_PARTS)},
            "ledger": {"figure": plotly_figures.ledger_figure(run) or empty_figure(_NO_LEDGER)},
            "spreads": {"children": _rank_spread_table(run)},
            "differences": {
                "children": widgets.configuration_table(view.comparison) if view.comparison else None
            },
            "findings": {
                "children": [
                    *[dmc.Alert(note, color="orange") for note in text.notes_of(run) if run.ranks],
                    *widgets.finding_list(run.findings[:3], len(run.findings)),
                ]
            },
        },
        widgets.drawn_charts(view),
    )


def skeleton(props: Parts, _: Route) -> list[Any]:
    """The components that the content goes into."""
    chart_names = ("breakdown", "ledger", *(name for name in list_names() if name in props))
    return [
        widgets.card_row(props),
        html.Div(id="spreads", **props["spreads"]),
        widgets.two_columns(*(widgets.graph_panel(name, props) for name in chart_names)),
        html.Div(id="differences", **props["differences"]),
        widgets.section_heading("Findings"),
        dmc.Stack(id="findings", gap="xs", **props["findings"]),
    ]


def _rank_spread_table(run: RunSnapshot) -> Any:
    """How the figures of all ranks spread, where the snapshot has only some ranks."""
    fleet = run.fleet
    if fleet is None:
        return None
    heads = (f"{fleet.ranks:,} ranks", *SPREAD_HEADS)
    rows = [html.Tr([*map(html.Td, (metric.label, *values))]) for metric, values in spread_rows(fleet)]
    return dmc.Table([html.Thead(html.Tr([*map(html.Th, heads)])), html.Tbody(rows)])


def _exposed_time_card(run: RunSnapshot) -> Any:
    rank = most_exposed(run.ranks)
    if rank is None or rank.communication.exposed_ratio is None:
        reason = text.exposed_unknown(rank) if rank is not None else "no rank has reported yet"
        return widgets.figure_card("Exposed communication", "n/a", reason)
    share = rank.communication.exposed_ratio
    colour = widgets.SEVERITY_COLOURS[exposed_severity(run)]
    note = (
        f"{human_seconds(rank.communication.exposed_seconds)} per step on rank {rank.rank}, {LAST_STEPS}"
    )
    if rank.communication.traffic and rank.communication.traffic[0].exposed_seconds > 0:
        row = rank.communication.traffic[0]
        note += f"; most in {row.unit or row.group} ({row.op})"
    error = rank.requests.check.error_ratio if rank.requests.check is not None else None
    note += f"; {untimed}" if (untimed := text.in_graphs(rank)) else ""
    note += f"; {error * 100:+.0f} % against the last trace" if error is not None else ""
    return widgets.figure_card("Exposed communication", human_ratio(share), note, colour)


def _step_time_card(run: RunSnapshot) -> Any:
    mean_seconds = [seconds for rank in run.ranks if (seconds := mean_step_seconds(rank))]
    if not mean_seconds:
        has_steps = any(rank.steps.watched_steps for rank in run.ranks)
        return widgets.figure_card(
            "Step time", "n/a", "no step has ended lately" if has_steps else "no step yet"
        )
    slowest, pause = max(mean_seconds), text.pause_seconds(run)
    window = f"last {human_seconds(max(10.0, 4 * run.every_seconds))}" if run.origin else LAST_STEPS
    rate = f"{1 / slowest:.3g} steps/s" if pause is None else text.pause_text(pause)
    return widgets.figure_card("Step time", human_seconds(slowest), f"{rate}; mean of the {window}")


def _throughput_card(run: RunSnapshot) -> Any:
    rate, note = tokens_per_second(run), throughput_text(run)
    note += f"; {progress_text(run)}" if how_far(run) is not None else ""
    return widgets.figure_card("Tokens/s", human_count(rate) if isinstance(rate, float) else "n/a", note)


def _loss_cards(run: RunSnapshot) -> list[Any]:
    rank = best_informed(run)
    if rank is None or not rank.training.scalars:
        return []
    loss = next((row for row in rank.training.scalars if row.name == "loss"), None)
    note = f"rank {rank.rank}: {training_text(rank)}"
    return [widgets.figure_card("Loss", "n/a" if loss is None else value_text(loss), note)]


def _overhead_card(run: RunSnapshot) -> Any:
    bound, measured = text.overhead_bound(run.ranks), text.overhead_measured(run.ranks)
    note = "by the agent's calls and samples" if bound != "n/a" else "known after some seconds"
    return widgets.figure_card(
        "Monitoring overhead", bound, f"measured {measured}" if measured else note
    )
