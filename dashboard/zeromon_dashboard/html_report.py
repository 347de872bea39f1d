"""A run as one HTML file that opens without a network: the verdict first, then evidence. Pure.

Everything that comes from the run (names, commands, units) is hostile input and is escaped.
"""

from collections.abc import Sequence
from html import escape
from typing import Any

import plotly.graph_objects as go
from plotly.offline import get_plotlyjs

from zeromon.readout.remedy import remedy_text
from zeromon.readout.text import finding_text
from zeromon.readout.verdict import judge_run
from zeromon.snapshot import Finding, RunSnapshot, Severity
from zeromon.snapshot.focus import first_counted
from zeromon.traces.allocations import DeviceMemory
from zeromon_dashboard import charts, plotly_figures
from zeromon_dashboard.charts import Series
from zeromon_dashboard.plotly_figures import flame_graph

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


def run_page(run: RunSnapshot, series: Series, report: str, *, still: bool = False) -> str:
    """The whole page. *series*: the run's steps by rank; *report*: the text for the terminal.

    *still*: without buttons, for a picture.
    """

    def section_markup(title: str, *plots: dict[str, Any] | None) -> list[str]:
        drawn = [_figure_markup(plot, still=still) for plot in plots if plot is not None]
        return [f"<h2>{title}</h2>", *drawn] if drawn else []

    counted = first_counted(run.ranks) or next(iter(run.ranks), None)
    over_time = [chart.figure() for chart in charts.charts_of(series, run).values() if chart.traces]
    run_figures = plotly_figures.ledger_figure(run), plotly_figures.step_breakdown(run)
    memory = (
        (plotly_figures.roles_figure(counted), plotly_figures.unit_peaks_figure(counted))
        if counted
        else ()
    )
    body = [
        _head_markup(run),
        *_findings_markup(run.findings),
        *section_markup("Over the steps", *run_figures, *over_time),
        *section_markup("Memory by role", *memory),
    ]
    return _page_markup(run.run, body, report)


def memory_page(name: str, devices: Sequence[DeviceMemory], report: str) -> str:
    """A snapshot of torch's allocator as flame graphs; *report*: the same for the terminal."""
    drawn = [
        flame_graph(f"Device {device.device} {period}, bytes by role and stack", holdings)
        for device in devices
        for period, holdings in (("at the peak", device.peak and device.peak.held), ("now", device.held))
        if holdings
    ]
    return _page_markup(
        name, [f"<h1>{escape(name)}</h1>", *(_figure_markup(f, still=False) for f in drawn)], report
    )


def _page_markup(title: str, body: Sequence[str], report: str) -> str:
    head = (
        "<!doctype html><html lang='en'><head><meta charset='utf-8'>",
        "<meta name='viewport' content='width=device-width, initial-scale=1'>",
        f"<title>{escape(title)} - zeromon</title><style>{_STYLE}</style>",
        f"<script>{get_plotlyjs()}</script></head><body>",
    )
    numbers = f"<h2>In numbers</h2><pre>{escape(report)}</pre>"
    return "\n".join([*head, *body, numbers, "</body></html>"])


def _head_markup(run: RunSnapshot) -> str:
    judged = judge_run(run)
    colour = "inherit" if judged.severity is None else _SEVERITIES[judged.severity]
    rank = run.ranks[0] if run.ranks else None
    facts = [f"<code>{escape(' '.join(run.command))}</code>"] if run.command else []
    if rank is not None:
        facts.append(
            escape(
                f"{len(run.ranks)} of {rank.world_size} ranks on {run.node}, {rank.strategy}, "
                f"{rank.device}"
            )
        )
    return (
        f"<h1>{escape(run.run)}</h1><p class='verdict' style='color:{colour}'>"
        f"{escape(judged.text)}</p><p class='facts'>{'<br>'.join(facts)}</p>"
    )


def _findings_markup(findings: Sequence[Finding]) -> list[str]:
    if not findings:
        return ["<h2>Findings</h2><p class='dim'>Nothing to report.</p>"]
    return ["<h2>Findings</h2>", *map(_finding_markup, findings)]


def _finding_markup(finding: Finding) -> str:
    paragraphs = [f"<p><b>{escape(finding.code)}</b> {escape(finding_text(finding))}</p>"]
    if finding.remedy is not None:
        remedy = remedy_text(finding.remedy)
        paragraphs.append(f"<p class='dim'>{escape(remedy.reason)}</p>")
        marked = [
            f"<span class='{_MARKS.get(diff_line.kind, '')}'>{escape(diff_line.text)}</span>"
            for diff_line in remedy.diff
        ]
        paragraphs.append(f"<pre>{chr(10).join(marked)}</pre><p>{escape(remedy.outlook)}</p>")
    colour = _SEVERITIES[finding.severity]
    return f"<div class='finding' style='border-left-color:{colour}'>{''.join(paragraphs)}</div>"


_MARKS = {"added": "in", "removed": "out"}


def _figure_markup(plot: dict[str, Any], *, still: bool) -> str:
    config = {"displaylogo": False, "showSendToCloud": False, "responsive": True}
    if still:
        config["displayModeBar"] = False
    # The head of the page has plotly: each figure would bring its 5 MB again
    body = go.Figure(plot).to_html(full_html=False, include_plotlyjs=False, config=config)
    return f"<div class='figure'>{body}</div>"
