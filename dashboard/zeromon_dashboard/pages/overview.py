"""The page "Overview": cards, where a step goes, all charts, the most severe findings. Pure."""

from typing import Any

import dash_mantine_components as dmc
from dash import html

from zeromon.focus import most_exposed
from zeromon.readout.charts import names
from zeromon.readout.figures import (
    LAST_STEPS,
    SPREAD_HEADS,
    mean_step_seconds,
    spread_rows,
    telling,
    training_text,
    value_text,
)
from zeromon.readout.text import (
    exposed_unknown,
    in_graphs,
    notes_of,
    overhead_bound,
    overhead_measured,
    pause_seconds,
    pause_text,
)
from zeromon.readout.throughput import progress, progress_text, throughput_text, tokens_per_second
from zeromon.readout.verdict import exposed_severity
from zeromon.snapshot import RunSnapshot
from zeromon.units import human_count, human_ratio, human_seconds
from zeromon_dashboard import figures
from zeromon_dashboard.charts import nothing
from zeromon_dashboard.page import Known, Page, Parts
from zeromon_dashboard.url_state import Route
from zeromon_dashboard.widgets import (
    SEVERITY_COLOURS,
    card,
    card_parts,
    cards,
    configurations,
    drawn,
    finding_list,
    graph,
    heading,
    risk_card,
    two_columns,
)

_NO_PARTS = "Where a step goes: n/a; no step is timed, or core metrics only"
_NO_LEDGER = "The ledger: n/a; the run has just begun, or core metrics only"


def content(known: Known) -> Page:
    """The cards, the breakdown of a step, all charts, and the most severe findings."""
    run = known.chosen
    return Page(
        {
            **card_parts(
                risk_card(run),
                _waits(run),
                _steps(run),
                _throughput(run),
                *_training(run),
                _agent(run),
            ),
            "breakdown": {"figure": figures.breakdown(run) or nothing(_NO_PARTS)},
            "ledger": {"figure": figures.ledger(run) or nothing(_NO_LEDGER)},
            "spreads": {"children": _spreads(run)},
            "differences": {
                "children": configurations(known.comparison) if known.comparison else None
            },
            "findings": {
                "children": [*_notes(run), *finding_list(run.findings[:3], len(run.findings))]
            },
        },
        drawn(known),
    )


def skeleton(parts: Parts, _: Route) -> list[Any]:
    """The components that the content goes into."""
    shown = ("breakdown", "ledger", *(name for name in names() if name in parts))
    return [
        cards(parts),
        html.Div(id="spreads", **parts["spreads"]),
        two_columns(*(graph(name, parts) for name in shown)),
        html.Div(id="differences", **parts["differences"]),
        heading("Findings"),
        dmc.Stack(id="findings", gap="xs", **parts["findings"]),
    ]


def _spreads(run: RunSnapshot) -> Any:
    """How the figures of all ranks spread, where the snapshot has only some ranks."""
    fleet = run.fleet
    if fleet is None:
        return None
    heads = (f"{fleet.ranks:,} ranks", *SPREAD_HEADS)
    rows = [
        html.Tr([*map(html.Td, (figure.label, *values))]) for figure, values in spread_rows(fleet)
    ]
    return dmc.Table([html.Thead(html.Tr([*map(html.Th, heads)])), html.Tbody(rows)])


def _notes(run: RunSnapshot) -> list[Any]:
    """Warnings of the snapshot's source."""
    return [dmc.Alert(part, color="orange") for part in notes_of(run) if run.ranks]


def _waits(run: RunSnapshot) -> Any:
    worst = most_exposed(run.ranks)
    if worst is None or worst.exposed_ratio is None:
        why = exposed_unknown(worst) if worst is not None else "no rank has reported yet"
        return card("Exposed communication", "n/a", why)
    share = worst.exposed_ratio
    colour = SEVERITY_COLOURS[exposed_severity(run)]
    note = f"{human_seconds(worst.exposed_seconds)} per step on rank {worst.rank}, {LAST_STEPS}"
    if worst.traffic and worst.traffic[0].exposed_seconds > 0:
        most = worst.traffic[0]
        note += f"; most in {most.unit or most.group} ({most.op})"
    error = worst.check.error_ratio if worst.check is not None else None
    note += f"; {untimed}" if (untimed := in_graphs(worst)) else ""
    note += f"; {error * 100:+.0f} % against the last trace" if error is not None else ""
    return card("Exposed communication", human_ratio(share), note, colour)


def _steps(run: RunSnapshot) -> Any:
    known = [seconds for rank in run.ranks if (seconds := mean_step_seconds(rank))]
    if not known:
        began = any(rank.steps for rank in run.ranks)
        return card("Step time", "n/a", "no step has ended lately" if began else "no step yet")
    slowest, pause = max(known), pause_seconds(run)
    over = f"last {human_seconds(max(10.0, 4 * run.every_seconds))}" if run.origin else LAST_STEPS
    rate = f"{1 / slowest:.3g} steps/s" if pause is None else pause_text(pause)
    return card("Step time", human_seconds(slowest), f"{rate}; mean of the {over}")


def _throughput(run: RunSnapshot) -> Any:
    rate, note = tokens_per_second(run), throughput_text(run)
    note += f"; {progress_text(run)}" if progress(run) is not None else ""
    return card("Tokens/s", human_count(rate) if isinstance(rate, float) else "n/a", note)


def _training(run: RunSnapshot) -> list[Any]:
    rank = telling(run)
    if rank is None or not rank.scalars:
        return []
    loss = next((row for row in rank.scalars if row.name == "loss"), None)
    note = f"rank {rank.rank}: {training_text(rank)}"
    return [card("Loss", "n/a" if loss is None else value_text(loss), note)]


def _agent(run: RunSnapshot) -> Any:
    bound, measured = overhead_bound(run.ranks), overhead_measured(run.ranks)
    note = "by the agent's calls and samples" if bound != "n/a" else "known after some seconds"
    return card("Monitoring overhead", bound, f"measured {measured}" if measured else note)
