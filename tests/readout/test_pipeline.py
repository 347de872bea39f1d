"""Every view says the same of a pipeline's bubble."""

from __future__ import annotations

from dataclasses import replace

import pytest
from builders import pipelined, rank, run

from zeromon.readout.dimensions import pipeline_lines
from zeromon.readout.report import render_run
from zeromon.snapshot.communication import PipelineRow
from zeromon.tui.columns import DisplayOptions
from zeromon.tui.line import plain_text
from zeromon.tui.screens.communication import arrival_lines
from zeromon.tui.screens.rank import rank_page
from zeromon_dashboard.page import Known
from zeromon_dashboard.pages import communication as page
from zeromon_dashboard.url_state import Route

KNOWN = "bubble 32.0 % (schedule alone: 30.0 %)"
SLOWEST = "stage 1 (rank 1) is the slowest: 30.0 ms per micro-batch, mean of all stages 30.0 ms"
ELSEWHERE = replace(pipelined(), bubble=None, unknown="its ranks are elsewhere")


@pytest.mark.parametrize(
    ("row", "said"),
    [(pipelined(), (KNOWN, SLOWEST)), (ELSEWHERE, ("bubble n/a: its ranks are elsewhere",))],
)
def test_views_show_the_bubble_or_why_it_is_unknown(row: PipelineRow, said: tuple[str, ...]) -> None:
    made = run(rank(0, pipeline=row))
    look = DisplayOptions()
    views = (
        "\n".join(pipeline_lines(made)),
        render_run(made),
        "\n".join(plain_text(line) for line in arrival_lines(made, made.ranks, look, 200, 20)),
        "\n".join(plain_text(line) for line in rank_page(made, made.ranks[0], look, 200)),
        str(page.content(Known(where=Route(), run=made, series={})).parts["pipeline"]),
    )
    for view in views:
        assert all(text in view for text in said)


def test_a_run_without_a_pipeline_has_no_such_line() -> None:
    assert pipeline_lines(run(rank(0))) == []
    assert "Pipeline" not in render_run(run(rank(0)))
