"""The page "Advice": all findings, and those that are over. Pure."""

from typing import Any

import dash_mantine_components as dmc
from dash import html

from zeromon.readout.text import resolved_texts
from zeromon_dashboard.page import Known, Page, Parts
from zeromon_dashboard.url_state import Route
from zeromon_dashboard.widgets import finding_list, heading


def content(known: Known) -> Page:
    """All findings, and the findings of the past."""
    resolved = resolved_texts(known.findings)
    return Page(
        {
            "findings": {"children": finding_list(known.run.findings, len(known.run.findings))},
            "earlier": {
                "children": [
                    dmc.Text([html.B(rule), f" {text}"], size="sm") for rule, text in resolved
                ]
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
