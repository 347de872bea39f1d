"""The page "Advice": all findings, and those that are over. Pure."""

from collections.abc import Sequence
from typing import Any

import dash_mantine_components as dmc
from dash import html

from zeromon.readout.text import finding_text
from zeromon.snapshot import Finding
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
                "children": [_earlier(found) for found in by_rule(gone)]
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


def by_rule(findings: Sequence[Finding]) -> list[list[Finding]]:
    """Findings of the same rule together; the rule that ended last is first."""
    found: dict[str, list[Finding]] = {}
    for one in findings:
        found.setdefault(one.code or one.rule, []).append(one)
    return sorted(found.values(), key=lambda same: -max(one.gone or 0.0 for one in same))


def _earlier(same: Sequence[Finding]) -> Any:
    """One line: how often, how long in all, on which ranks, and what the last one said."""
    last = max(same, key=lambda one: one.gone or 0.0)
    spent = sum((one.gone or one.came) - one.came for one in same)
    ranks = sorted({one.rank for one in same if one.rank >= 0})
    often = f"{len(same)} times, " if len(same) > 1 else ""
    whose = f", ranks {', '.join(map(str, ranks[:8]))}" if len(ranks) > 1 else ""
    when = f"{often}{human_seconds(spent)}{whose}, last at {clock(last.came)}"
    return dmc.Text([html.B(last.code or last.rule), f" {when}: {finding_text(last)}"], size="sm")
