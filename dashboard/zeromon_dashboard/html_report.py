"""A run as one HTML file that opens without a network: the verdict first, then evidence. Pure.

Everything that comes from the run (names, commands, units) is hostile input and is escaped.
"""

from collections.abc import Sequence
from html import escape
from typing import Any

import plotly.graph_objects as go
from plotly.offline import get_plotlyjs

from zeromon.focus import first_counted
from zeromon.readout.remedy import remedy_text
from zeromon.readout.text import finding_text
from zeromon.readout.verdict import verdict
from zeromon.snapshot import Finding, RunSnapshot, Severity
from zeromon.traces.allocations import DeviceMemory
from zeromon_dashboard import charts, figures
from zeromon_dashboard.charts import Series
from zeromon_dashboard.figures import flame

_SEVERITIES = {Severity.CRITICAL: "#D55E00", Severity.WARNING: "#E69F00", Severity.INFO: "#0072B2"}

_STYLE = """
:root { color-scheme: light dark; --line: #d0d7de; --soft: #f6f8fa; --dim: #59636e;
        --ink: #1f2328; --paper: #ffffff; }
@media (prefers-color-scheme: dark) {
  :root { --line: #3d444d; --soft: #151b23; --dim: #9198a1; --ink: #f0f6fc; --paper: #0d1117; }
}
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--paper);
       max-width: 1080px; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.5rem; margin: 0; } h2 { font-size: 1.1rem; margin: 2rem 0 .5rem; }
.verdict { font-size: 1.15rem; margin: .25rem 0 1rem; font-weight: 600; }
.facts { color: var(--dim); } code, pre { font: 13px/1.45 ui-monospace, monospace; }
pre, .finding, .figure { border: 1px solid var(--line); border-radius: 6px; }
pre { background: var(--soft); padding: .75rem; overflow-x: auto; }
.finding { border-left: 5px solid; padding: .5rem .9rem; margin: .6rem 0; }
.finding p { margin: .2rem 0; } .dim { color: var(--dim); }
.in { color: #1a7f37; } .out { color: #cf222e; }
.figure { margin: .6rem 0; }
.figure text { fill: var(--ink) !important; }
"""


def run_page(run: RunSnapshot, series: Series, text: str, *, still: bool = False) -> str:
    """The whole page. *series*: the run's steps by rank; *text*: the report for the terminal.

    *still*: without buttons, for a picture.
    """

    def section(title: str, *figures: dict[str, Any] | None) -> list[str]:
        drawn = [_figure(one, still=still) for one in figures if one is not None]
        return [f"<h2>{title}</h2>", *drawn] if drawn else []

    counted = first_counted(run.ranks) or next(iter(run.ranks), None)
    over_time = [one.figure() for one in charts.charts_of(series, run).values() if one is not None]
    whole = figures.ledger(run), figures.breakdown(run)
    memory = (figures.roles(counted), figures.within_step(counted)) if counted else ()
    parts = [
        _head(run),
        *_findings(run.findings),
        *section("Over the steps", *whole, *over_time),
        *section("Memory by role", *memory),
    ]
    return _page(run.run, parts, text)


def memory_page(name: str, devices: Sequence[DeviceMemory], text: str) -> str:
    """A snapshot of torch's allocator as flame graphs; *text*: the same for the terminal."""
    drawn = [
        flame(f"Device {device.device} {when}, bytes by role and stack", held)
        for device in devices
        for when, held in (("at the peak", device.peak and device.peak.held), ("now", device.held))
        if held
    ]
    return _page(
        name, [f"<h1>{escape(name)}</h1>", *(_figure(f, still=False) for f in drawn)], text
    )


def _page(title: str, parts: Sequence[str], text: str) -> str:
    head = (
        "<!doctype html><html lang='en'><head><meta charset='utf-8'>",
        "<meta name='viewport' content='width=device-width, initial-scale=1'>",
        f"<title>{escape(title)} - zeromon</title><style>{_STYLE}</style>",
        f"<script>{get_plotlyjs()}</script></head><body>",
    )
    numbers = f"<h2>In numbers</h2><pre>{escape(text)}</pre>"
    return "\n".join([*head, *parts, numbers, "</body></html>"])


def _head(run: RunSnapshot) -> str:
    judged = verdict(run)
    colour = "inherit" if judged.severity is None else _SEVERITIES[judged.severity]
    first = run.ranks[0] if run.ranks else None
    facts = [f"<code>{escape(' '.join(run.command))}</code>"] if run.command else []
    if first is not None:
        facts.append(
            escape(
                f"{len(run.ranks)} of {first.world_size} ranks on {run.node}, {first.strategy}, "
                f"{first.device}"
            )
        )
    return (
        f"<h1>{escape(run.run)}</h1><p class='verdict' style='color:{colour}'>"
        f"{escape(judged.text)}</p><p class='facts'>{'<br>'.join(facts)}</p>"
    )


def _findings(findings: Sequence[Finding]) -> list[str]:
    if not findings:
        return ["<h2>Findings</h2><p class='dim'>Nothing to report.</p>"]
    return ["<h2>Findings</h2>", *map(_finding, findings)]


def _finding(finding: Finding) -> str:
    lines = [f"<p><b>{escape(finding.code)}</b> {escape(finding_text(finding))}</p>"]
    if finding.remedy is not None:
        words = remedy_text(finding.remedy)
        lines.append(f"<p class='dim'>{escape(words.reason)}</p>")
        marked = [
            f"<span class='{_MARKS.get(line.kind, '')}'>{escape(line.text)}</span>"
            for line in words.diff
        ]
        lines.append(f"<pre>{chr(10).join(marked)}</pre><p>{escape(words.outlook)}</p>")
    colour = _SEVERITIES[finding.severity]
    return f"<div class='finding' style='border-left-color:{colour}'>{''.join(lines)}</div>"


_MARKS = {"added": "in", "removed": "out"}


def _figure(figure: dict[str, Any], *, still: bool) -> str:
    config = {"displaylogo": False, "showSendToCloud": False, "responsive": True}
    if still:
        config["displayModeBar"] = False
    body = go.Figure(figure).to_html(full_html=False, include_plotlyjs=False, config=config)
    return f"<div class='figure'>{body}</div>"
