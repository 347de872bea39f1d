"""A run as one HTML file that opens without a network: the verdict first, then evidence. Pure.

Everything that comes from the run (names, commands, units) is hostile input and is escaped.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape

import plotly.graph_objects as go
from plotly.offline import get_plotlyjs

from zeromon import report
from zeromon.snapshot import Finding, RunSnapshot
from zeromon_dashboard.figures import COLOURS, GIB

Series = Mapping[str, Sequence[float]]
"""Columns of a history: ``rank``, ``step``, ``duration_us``, ``exposed_us``, ... by name."""

MOST_POINTS = 600
_MOST_RANKS = 8
_WARM_UP = 3
_IDLE = 1
_PHASES = ("forward", "backward", "optimizer", "cpu_optimizer", "data_wait", "other")
_SEVERITIES = {"critical": "#D55E00", "warning": "#E69F00", "info": "#0072B2"}

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
.figure { background: #ffffff; margin: .6rem 0; }
"""


def run_page(run: RunSnapshot, series: Series, text: str) -> str:
    """The whole page. *series*: the run's steps by rank; *text*: the report for the terminal."""
    figures = [
        figure
        for figure in (step_times(series), exposed(series), memory(series), phases(series))
        if figure is not None
    ]
    parts = [
        "<!doctype html><html lang='en'><head><meta charset='utf-8'>",
        "<meta name='viewport' content='width=device-width, initial-scale=1'>",
        f"<title>{escape(run.run)} - zeromon</title><style>{_STYLE}</style>",
        f"<script>{get_plotlyjs()}</script></head><body>",
        _head(run),
        *(_findings(run.findings)),
        "<h2>Over the steps</h2>" if figures else "",
        *(_figure(figure) for figure in figures),
        f"<h2>In numbers</h2><pre>{escape(text)}</pre>",
        "</body></html>",
    ]
    return "\n".join(parts)


def _head(run: RunSnapshot) -> str:
    failed = any(rank.failed for rank in run.ranks)
    colour = _SEVERITIES["critical"] if failed else "inherit"
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
        f"{escape(report.verdict(run))}</p><p class='facts'>{'<br>'.join(facts)}</p>"
    )


def _findings(findings: Sequence[Finding]) -> list[str]:
    if not findings:
        return ["<h2>Findings</h2><p class='dim'>Nothing to report.</p>"]
    return ["<h2>Findings</h2>", *map(_finding, findings)]


def _finding(finding: Finding) -> str:
    who = f"rank {finding.rank}: " if finding.rank >= 0 else ""
    lines = [f"<p><b>{escape(finding.code)}</b> {escape(who + finding.text)}</p>"]
    if finding.remedy is not None:
        cause, *diff, expected = report.remedy_lines(finding.remedy)
        lines.append(f"<p class='dim'>{escape(cause)}</p>")
        marked = [
            f"<span class='{_MARKS.get(line.strip()[:1], '')}'>{escape(line.removeprefix('  '))}</span>"
            for line in diff
        ]
        lines.append(f"<pre>{chr(10).join(marked)}</pre><p>{escape(expected)}</p>")
    colour = _SEVERITIES[finding.severity]
    return f"<div class='finding' style='border-left-color:{colour}'>{''.join(lines)}</div>"


_MARKS = {"+": "in", "-": "out"}


def _figure(figure: go.Figure) -> str:
    config = {"displaylogo": False, "showSendToCloud": False, "responsive": True}
    body = figure.to_html(full_html=False, include_plotlyjs=False, config=config)
    return f"<div class='figure'>{body}</div>"


# ---- figures -------------------------------------------------------------------------------------


def reduced(
    x: Sequence[float], y: Sequence[float | None], most: int = MOST_POINTS
) -> tuple[list[float], list[float | None]]:
    """At most *most* points that look the same: of each stretch its lowest and its highest, in order."""
    if len(x) <= most:
        return list(x), list(y)
    stretch = -(-len(x) * 2 // most)
    kept: list[int] = []
    for begin in range(0, len(x), stretch):
        known = [i for i in range(begin, min(begin + stretch, len(x))) if y[i] is not None]
        if known:
            low = min(known, key=lambda i: y[i] or 0.0)
            high = max(known, key=lambda i: y[i] or 0.0)
            kept += sorted({low, high})
    return [x[i] for i in kept], [y[i] for i in kept]


def by_rank(
    series: Series, column: Sequence[float | None]
) -> dict[str, tuple[list[float], list[float | None]]]:
    """(steps, values) of each rank; of more than a few ranks the highest and lowest a step."""
    found: dict[int, tuple[list[float], list[float | None]]] = {}
    for rank, step, value in zip(series["rank"], series["step"], column, strict=True):
        steps, values = found.setdefault(int(rank), ([], []))
        steps.append(step)
        values.append(value)
    if len(found) <= _MOST_RANKS:
        return {f"rank {rank}": pair for rank, pair in sorted(found.items())}
    together: dict[float, list[float]] = {}
    for steps, values in found.values():
        for step, value in zip(steps, values, strict=True):
            if value is not None:
                together.setdefault(step, []).append(value)
    order = sorted(together)
    return {
        "highest rank": (order, [max(together[step]) for step in order]),
        "lowest rank": (order, [min(together[step]) for step in order]),
    }


def _lines(
    series: Series, column: Sequence[float | None], title: str, unit: str
) -> go.Figure | None:
    if all(value is None for value in column):
        return None
    figure = go.Figure()
    for name, (steps, values) in by_rank(series, column).items():
        x, y = reduced(steps, values)
        figure.add_scatter(x=x, y=y, name=name, mode="lines", line={"width": 1.5}, connectgaps=True)
    top = _top(series, column)
    figure.update_layout(
        template="plotly_white", colorway=COLOURS, title=title, xaxis_title="step",
        yaxis={"title": unit, "range": [0, top]}, height=320, margin={"t": 48, "b": 48},
        hovermode="x unified",
    )  # fmt: skip
    return figure


def _top(series: Series, column: Sequence[float | None]) -> float:
    """The end of the axis: the first steps, which warm up, may leave it."""
    settled = [
        value
        for step, value in zip(series["step"], column, strict=True)
        if value is not None and step > _WARM_UP
    ]
    known = settled or [value for value in column if value is not None]
    return 1.1 * max(known, default=1.0) or 1.0


def step_times(series: Series) -> go.Figure | None:
    """How long the steps took."""
    return _lines(series, [us / 1e3 for us in series["duration_us"]], "Step time", "ms")


def exposed(series: Series) -> go.Figure | None:
    """Exposed communication as a share of the step; steps with idle hooks are left out."""
    column = [
        None if int(flags) & _IDLE or not spent else 100 * waits / spent
        for flags, waits, spent in zip(
            series["flags"], series["exposed_us"], series["duration_us"], strict=True
        )
    ]
    return _lines(series, column, "Exposed communication", "% of the step")


def memory(series: Series) -> go.Figure | None:
    """Reserved device memory, or on the host the resident set."""
    name = "reserved_bytes" if max(series["reserved_bytes"], default=-1) >= 0 else "rss_bytes"
    column = [nbytes / GIB if nbytes >= 0 else None for nbytes in series[name]]
    title = "Device memory, reserved" if name == "reserved_bytes" else "Host memory (RSS)"
    return _lines(series, column, title, "GiB")


def phases(series: Series) -> go.Figure | None:
    """Where the time of a step goes, mean over ranks, stacked."""
    steps = sorted(set(series["step"]))
    if not steps:
        return None
    stretch = max(1, -(-len(steps) // (MOST_POINTS // 4)))
    place = {step: index // stretch for index, step in enumerate(steps)}
    figure = go.Figure()
    for phase in _PHASES:
        sums: dict[int, list[float]] = {}
        for step, us in zip(series["step"], series[f"{phase}_us"], strict=True):
            sums.setdefault(place[step], []).append(us / 1e3)
        y = [sum(values) / len(values) for _, values in sorted(sums.items())]
        if any(y):
            x = [steps[index * stretch] for index in sorted(sums)]
            figure.add_scatter(
                x=x, y=y, name=phase.replace("_", " "), stackgroup="one", line={"width": 0.5}
            )
    figure.update_layout(
        template="plotly_white", colorway=COLOURS, title="Where the time of a step goes",
        xaxis_title="step", height=320, margin={"t": 48, "b": 48},
        yaxis={"title": "ms", "range": [0, _top(series, [us / 1e3 for us in series["duration_us"]])]},
        hovermode="x unified",
    )  # fmt: skip
    return figure
