"""What a user sees first: the verdict at the head of every view."""

from __future__ import annotations

from zeromon.export.prometheus.metrics import Writer
from zeromon.readout.report import render_answers, render_run
from zeromon.readout.text import leading_clauses
from zeromon.readout.verdict import SIGNS, Verdict, judge_run
from zeromon.snapshot import RunSnapshot
from zeromon.tui import plain as plain_view, status_text
from zeromon.tui.line import plain_text
from zeromon_dashboard.layout import page_of
from zeromon_dashboard.page import Known
from zeromon_dashboard.url_state import Route


def first_lines(shown: RunSnapshot) -> Verdict:
    """The verdict on *shown*, which terminal, page, plain text, report and Prometheus begin with."""
    judged = judge_run(shown)
    assert f" {judged.health} " in plain_text(status_text.head_line(shown))
    assert judged.cause in plain_text(status_text.verdict_line(shown, 3 + len(judged.cause)))
    assert judged.text in list(plain_view.lines_of_snapshot(None, shown, 0))
    assert render_run(shown).splitlines()[1] == f"  verdict   {judged.health}: {judged.cause}"
    answers = " ".join(" ".join(render_answers(shown).splitlines()[1:]).split())
    headline = leading_clauses(judged.cause, 150)
    assert answers.startswith(f"{SIGNS[judged.severity]} {judged.health}: {headline}")
    parts = page_of(Known(Route(run="r", page="ranks"), shown, {})).parts
    assert parts["health"]["children"] == judged.health
    clauses = (parts["cause"]["children"], parts["detail"]["children"].removesuffix("; "))
    assert "; ".join(filter(None, clauses)) == judged.cause
    text = Writer().write((shown,), None, openmetrics=False).decode()
    assert (f'health="{judged.health}"' in text) == bool(shown.ranks)
    return judged
