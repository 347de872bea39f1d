"""A run as one HTML file that opens without a network: its Overview page, then more evidence. Pure.

Everything that comes from the run (names, commands, units) is hostile input and is escaped.
"""

import base64
import gzip
import json
import re
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

from dash import html
from dash.development.base_component import Component
from plotly.offline import get_plotlyjs
from plotly.utils import PlotlyJSONEncoder

from zeromon.base.units import wrap_report_line
from zeromon.snapshot import Finding, RunSnapshot
from zeromon.snapshot.focus import first_counted
from zeromon.snapshot.run import About
from zeromon.storage.step_history.rows import Series
from zeromon.traces.allocations import DeviceMemory
from zeromon_dashboard import plotly_figures
from zeromon_dashboard.layout import page_of, verdict_banner
from zeromon_dashboard.page import Known, Parts
from zeromon_dashboard.pages import overview
from zeromon_dashboard.plotly_figures import flame_graph
from zeromon_dashboard.url_state import Route
from zeromon_dashboard.widgets import finding_list, folded, graph_panel, section_heading


def run_page(
    run: RunSnapshot,
    series: Series,
    report: str,
    findings: Sequence[Finding] = (),
    annotation: About | None = None,
    *,
    still: bool = False,
) -> str:
    """The whole page. *series*: the run's steps by rank; *report*: the text for the terminal.

    *findings*: all of the run's record; *annotation*: what its user wrote. *still*: for a picture.
    """
    route, span = Route(run=run.run), (run.started_wall, run.taken_wall)
    page = page_of(Known(route, run, series, findings, span, about=annotation or About()))
    props: Parts = {**page.parts, **{n: {"figure": c.figure()} for n, c in page.charts.items()}}
    counted = first_counted(run.ranks) or next(iter(run.ranks), None)
    drawings = {"roles": plotly_figures.roles_figure, "peaks": plotly_figures.unit_peaks_figure}
    drawn = {name: draw(counted) for name, draw in drawings.items()} if counted else {}
    memory = {name: {"figure": plot} for name, plot in drawn.items() if plot is not None}
    body = [
        html.Div([html.H1(run.run), html.P(**props["facts"])], className="Group"),
        html.Div(**props["about"]),
        verdict_banner(html.A("What to change", href="#to-change"), props),
        html.Div(id="life", **props["life"]),
        html.Div(id="life-key", **props["life-key"]),
        *overview.skeleton(props, route),
        section_heading("Advice: all findings"),
        *finding_list(run),
        folded(["Memory by role"], *(graph_panel(name, memory) for name in memory)) if memory else None,
    ]
    return _page_markup(run.run, body, report, still=still)


def memory_page(name: str, devices: Sequence[DeviceMemory], report: str) -> str:
    """A snapshot of torch's allocator as flame graphs; *report*: the same for the terminal."""
    drawn = {
        f"device-{device.device}-{period.split()[-1]}": {
            "figure": flame_graph(f"Device {device.device} {period}, bytes by role and stack", holdings)
        }
        for device in devices
        for period, holdings in (("at the peak", device.peak and device.peak.held), ("now", device.held))
        if holdings
    }
    body = [html.H1(name), *(graph_panel(graph_name, drawn) for graph_name in drawn)]
    return _page_markup(name, body, report, still=False)


def _page_markup(title: str, body: Sequence[Any], report: str, *, still: bool) -> str:
    plots: dict[str, Any] = {}
    content = component_markup(body, plots)
    # A name with a tag in it would end the script
    encoded = json.dumps(plots, cls=PlotlyJSONEncoder).replace("<", "\\u003c")
    if still:  # a browser that takes a picture does not wait until plotly is unpacked
        plotly = f"<script>{get_plotlyjs()}</script>"
    else:
        packed = base64.b64encode(gzip.compress(get_plotlyjs().encode(), mtime=0)).decode()
        plotly = f"<script type='text/plain' id='plotly'>{packed}</script>"
    draw = f"<script>const figures = {encoded};{_read('report_assets/report.js')}</script>"
    style = _read("assets/zeromon.css") + _read("report_assets/report.css")
    head = (
        "<!doctype html><html lang='en'><head><meta charset='utf-8'>",
        "<meta name='viewport' content='width=device-width, initial-scale=1'>",
        f"<title>{escape(title)} - zeromon</title><style>{style}</style></head><body>",
    )
    numbers = "\n".join(row for line in report.splitlines() for row in wrap_report_line(line, 150))
    numbers = f"<h2>In numbers</h2><pre class='numbers' tabindex='0'>{escape(numbers)}</pre>"
    return "\n".join([*head, content, numbers, plotly, draw, "</body></html>"])


def _read(name: str) -> str:
    return (Path(__file__).parent / name).read_text()


_TAGS = {"Title": "h2", "Text": "p", "TableThead": "thead", "Link": "a"}
_ATTRIBUTES = {"className": "class", "id": "id", "title": "title", "href": "href"}


def component_markup(component: Any, plots: dict[str, Any]) -> str:
    """A component of the dashboard, and all in it, as HTML; the figures in it are added to *plots*."""
    if component is None or component == "":
        return ""
    if isinstance(component, (list, tuple)):
        return "".join(component_markup(child, plots) for child in component)
    if not isinstance(component, Component):
        return escape(str(component))
    encoded = component.to_plotly_json()
    kind, props = encoded["type"], encoded["props"]
    if kind == "Clipboard":  # works only on the live page
        return ""
    if "figure" in props:
        plots[props["id"]] = props["figure"]
        return f"<div id='{escape(props['id'])}' class='Graph'></div>"
    is_plain = encoded["namespace"] == "dash_html_components"
    tag = kind.lower() if is_plain else _TAGS.get(kind, "div")
    attributes = {_ATTRIBUTES[name]: value for name, value in props.items() if name in _ATTRIBUTES}
    if not is_plain:
        attributes["class"] = f"{kind} {attributes.get('class', '')}".strip()
    if style := props.get("style"):
        css_names = {name: re.sub("([A-Z])", r"-\1", name).lower() for name in style}
        # As React does: a number is in pixels
        attributes["style"] = ";".join(
            f"{css_names[name]}:{value}{'px' * isinstance(value, int)}" for name, value in style.items()
        )
    encoded_attributes = "".join(f' {name}="{escape(str(value))}"' for name, value in attributes.items())
    label = props.get("title") if kind == "Alert" else None
    children = component_markup([label, props.get("children")], plots)
    return f"<{tag}{encoded_attributes}>{children}" + ("" if tag == "br" else f"</{tag}>")
