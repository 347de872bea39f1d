"""The page "Advice": all findings, and those that are over. Pure."""

from typing import Any

import dash_mantine_components as dmc
from dash import html

from zeromon.readout.text import resolved_texts
from zeromon_dashboard.page import Known, Page, Parts
from zeromon_dashboard.url_state import Route
from zeromon_dashboard.widgets import finding_list, section_heading


def content(view: Known) -> Page:
    """All findings, and the findings of the past."""
    standing = {(finding.code, finding.rank) for finding in view.run.findings}
    resolved = resolved_texts([f for f in view.findings if (f.code, f.rank) not in standing])
    return Page(
        {
            "findings": {"children": finding_list(view.run)},
            "earlier": {
                "children": [
                    dmc.Text([html.B(rule), f" {sentence}"], size="sm") for rule, sentence in resolved
                ]
                or [dmc.Text("No finding has been resolved yet.", c="dimmed", size="sm")]
            },
        }
    )


def skeleton(props: Parts, _: Route) -> list[Any]:
    """The components that the content goes into."""
    return [
        dmc.Stack(id="findings", gap="xs", **props["findings"]),
        section_heading("Earlier"),
        dmc.Stack(id="earlier", gap=2, **props["earlier"]),
    ]
