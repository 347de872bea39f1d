"""The page "Advice": all findings, and those that are over. Pure."""

from typing import Any

import dash_mantine_components as dmc
from dash import html

from zeromon.readout.text import finding_text
from zeromon.storage.recorder import KnownFinding
from zeromon.units import human_seconds
from zeromon_dashboard.page import Known, Page, Parts, clock
from zeromon_dashboard.url_state import Route
from zeromon_dashboard.widgets import finding_list, heading


def content(known: Known) -> Page:
    """All findings, and the findings of the past."""
    gone = [one for one in known.findings if one.gone is not None]
    return Page(
        {
            "findings": {"children": finding_list(known.run.findings, len(known.run.findings))},
            "earlier": {
                "children": [_earlier(one) for one in reversed(gone[-50:])]
                or [dmc.Text("No finding has been resolved yet.", c="dimmed", size="sm")]
            },
        }
    )


def skeleton(parts: Parts, _: Route) -> list[Any]:
    """The components that the content goes into."""
    return [
        dmc.Stack(id="findings", gap="xs", **parts["findings"]),
        heading("Earlier"),
        dmc.Stack(id="earlier", gap=2, **parts["earlier"]),
    ]


def _earlier(one: KnownFinding) -> Any:
    when = f"{clock(one.came)} for {human_seconds((one.gone or one.came) - one.came)}"
    return dmc.Text([html.B(one.code or one.rule), f" {when}  {finding_text(one)}"], size="sm")
