"""The page "Overview": what a step waits for, what to change, step time and memory. Pure."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import dash_mantine_components as dmc
from dash import html

from zeromon.base.units import human_count, human_ratio, human_seconds
from zeromon.readout import text
from zeromon.readout.answers import (
    Kind,
    StepBar,
    events_of,
    findings_to_act_on,
    goodput_facts,
    ledger_summary,
    memory_answer,
    no_change_text,
    pace_facts,
    step_bars,
    window_text,
)
from zeromon.readout.charts import list_names
from zeromon.readout.figures import SPREAD_HEADS, best_informed, spread_rows, training_text
from zeromon.readout.ledger import job_ledger
from zeromon.readout.report import head_block
from zeromon.readout.throughput import how_far, progress_text, tokens_per_second
from zeromon.readout.verdict import judge_run
from zeromon.snapshot import RunSnapshot
from zeromon_dashboard import plotly_figures, widgets
from zeromon_dashboard.charts import empty_figure
from zeromon_dashboard.page import Known, Page, Parts
from zeromon_dashboard.url_state import Route

_MAIN = ("step-time", "memory")
"""Charts that answer a question; the others are folded."""
_SPANS = ("waits-window", "step-time-title", "memory-title", "memory-answer", "ledger-line", "training")
_NO_LEDGER = "n/a: no rank has reported any (a run that begins, a preflight, or core metrics only)"


def content(view: Known) -> Page:
    """The four answers; below them, folded, the ledger, all other charts, and the configuration."""
    run, drawn = view.chosen, widgets.drawn_charts(view)
    job = job_ledger([run])
    main_names = [name for name in _MAIN if name in drawn]
    for name in main_names:  # their titles stand above them
        drawn[name] = replace(drawn[name], titled=False, events=events_of(run, name), height=185)
    return Page(
        {
            "waits": {"children": _waits_content(run)},
            "waits-window": {"children": window_text(run)},
            "to-change": {"children": _change_panels(view.run)},
            "memory-answer": {"children": memory_answer(run)},
            **{f"{name}-title": {"children": drawn[name].title} for name in main_names},
            "run-about": {"children": head_block(view.run, view.about)},
            "spreads": {"children": _rank_spread_table(run)},
            "ledger-line": {"children": ledger_summary(job) or _NO_LEDGER},
            "breakdown": {
                "figure": plotly_figures.step_breakdown(run) or empty_figure(_unknown_reason(run))
            },
            "ledger": {"figure": plotly_figures.ledger_figure(run) or empty_figure(_NO_LEDGER)},
            "training": {"children": _training_line(run)},
            "differences": {
                "children": widgets.configuration_table(view.comparison) if view.comparison else None
            },
        },
        drawn,
    )


def skeleton(props: Parts, _: Route) -> list[Any]:
    """The components that the content goes into."""
    spans = {name: html.Span(id=name, **props[name]) for name in _SPANS}
    folded_names = [name for name in list_names() if name in props and name not in _MAIN]
    answers = [
        _answer_panel(
            [html.Span("What does a step wait for? "), spans["waits-window"]],
            html.Div(id="waits", **props["waits"]),
        ),
        _answer_panel(["What do I change?"], html.Div(id="to-change", **props["to-change"])),
        _answer_panel([spans["step-time-title"]], widgets.graph("step-time", props)),
        _answer_panel(
            [html.Span("Will it run out of memory? "), spans["memory-answer"]],
            html.P(spans["memory-title"], className="dim"),
            widgets.graph("memory", props),
        ),
    ]
    return [
        # Answers beside charts: together both columns are about as long, so that no panel is half empty
        html.Div([html.Div(answers[:2]), html.Div(answers[2:])], className="answers"),
        html.Div(id="spreads", **props["spreads"]),
        html.Div(id="differences", **props["differences"]),
        widgets.folded(
            ["Where every second went: ", spans["ledger-line"]],
            widgets.two_columns(*(widgets.graph_panel(name, props) for name in ("ledger", "breakdown"))),
        ),
        widgets.folded(
            [spans["training"]],
            widgets.two_columns(*(widgets.graph_panel(name, props) for name in folded_names)),
        ),
        widgets.folded(
            ["About this run: command, ranks, start-up"],
            html.Pre(id="run-about", className="diff", **props["run-about"]),
        ),
    ]


def _answer_panel(title: list[Any], *children: Any) -> Any:
    return dmc.Paper([html.H2(title), *children], p="sm", className="answer")


def _waits_content(run: RunSnapshot) -> list[Any]:
    """Two bars of a step, and the pace; why they are not known."""
    bars = step_bars(run)
    if not bars:
        return [html.P(_unknown_reason(run), className="dim")]
    longest = max(bar.seconds for bar in bars)
    kinds = dict.fromkeys(segment.kind for bar in bars for segment in bar.segments)
    late = any(segment.late for bar in bars for segment in bar.segments)
    unknown = dict.fromkeys(bar.unknown for bar in bars if bar.unknown)
    return [
        *(_bar_markup(bar, longest) for bar in bars),
        *(html.P(reason, className="dim") for reason in unknown),
        html.P(
            [
                *(html.Span([html.I(className=k), _KIND_NAMES[k]]) for k in kinds),
                *([html.Span([html.I(className="late"), "what others wait for"])] if late else []),
            ],
            className="key",
        ),
        html.P(
            [html.Span([html.B(value), f" {note}"]) for value, note in _pace_texts(run)],
            className="pace",
        ),
    ]


_KIND_NAMES = {
    Kind.COMPUTE: "compute", Kind.WAITING: "waiting for a rank or for data",
    Kind.COMMUNICATION: "exposed communication", Kind.OWN: "the script's own code",
}  # fmt: skip


def _bar_markup(bar: StepBar, longest: float) -> Any:
    segments = [
        html.Div(
            [html.B(segment.name), f" {human_seconds(segment.seconds)}"]
            if segment.seconds > _MIN_LABELLED * longest
            else [],
            title=f"{segment.name}: {human_ratio(segment.seconds / bar.seconds)} of the step",
            className=f"part {segment.kind}{' late' if segment.late else ''}",
            style={"width": f"{100 * segment.seconds / longest:.2f}%"},
        )
        for segment in bar.segments
    ]
    name = html.Div([html.B(f"rank {bar.rank.rank}"), html.Br(), html.Small(bar.placement)])
    # A narrow part has no name in the bar
    shares = html.Small(bar.text.replace(" %", "\xa0%"))
    return html.Div([name, html.Div([html.Div(segments, className="parts"), shares])], className="bar")


_MIN_LABELLED = 0.13
"""No name fits in a smaller share of a bar; of a larger one the style sheet hides what does not fit."""


def _pace_texts(run: RunSnapshot) -> Iterator[tuple[str, str]]:
    """(value, what it is): step time, tokens a second, goodput, and how far the run is."""
    yield from pace_facts(run)
    if isinstance(rate := tokens_per_second(run), float):
        yield human_count(rate), "tokens/s"
    yield from goodput_facts(run)
    if how_far(run) is not None:
        yield "", progress_text(run)


def _unknown_reason(run: RunSnapshot) -> str:
    """Why no step can be shown."""
    if not run.ranks:
        return "n/a: no rank has reported"
    return "n/a: no step is timed" if run.last_step else "n/a: no step has ended"


def _change_panels(run: RunSnapshot) -> list[Any]:
    notes = [dmc.Alert(note, color="orange") for note in text.notes_of(run)]
    chosen = findings_to_act_on(run)
    if not chosen:
        return [*notes, html.P(no_change_text(run), className="dim")]
    return [*notes, *widgets.change_list(chosen, len(run.findings), judge_run(run).finding)]


def _training_line(run: RunSnapshot) -> str:
    """Loss and learning rate where known, and the cost of zeromon."""
    rank = best_informed(run)
    training = training_text(rank) if rank is not None and rank.training.scalars else "More charts"
    bound = text.overhead_text(run.ranks)
    return training if bound == "n/a" else f"{training}; cost of zeromon {bound}"


def _rank_spread_table(run: RunSnapshot) -> Any:
    """How the figures of all ranks spread, where the snapshot has only some ranks."""
    fleet = run.fleet
    if fleet is None:
        return None
    heads = (f"{fleet.ranks:,} ranks", *SPREAD_HEADS)
    rows = [html.Tr([*map(html.Td, (metric.title, *values))]) for metric, values in spread_rows(fleet)]
    table = dmc.Table([html.Thead(html.Tr([*map(html.Th, heads)])), html.Tbody(rows)])
    return dmc.TableScrollContainer(table, minWidth=520)
