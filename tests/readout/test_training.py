"""Loss, gradient norm and learning rate in every view, and the reason where one is unknown."""

from __future__ import annotations

from dataclasses import replace

from builders import full_run, rank, run, summary

from zeromon.readout.figures import training_text
from zeromon.readout.report import render_run
from zeromon.snapshot import RunSnapshot
from zeromon.snapshot.step import ScalarRow
from zeromon.storage.step_history.rows import NAMES, row_of
from zeromon.storage.step_history.writer import rows_frame
from zeromon.tui.columns import DisplayOptions
from zeromon.tui.plots import Trends, plots_by_name
from zeromon.tui.screens.rank import rank_page
from zeromon_dashboard import charts
from zeromon_dashboard.layout import Known, page_of
from zeromon_dashboard.url_state import Route


def scalar(name: str, value: float | None, first: int = 0) -> ScalarRow:
    return ScalarRow(name=name, value=value, step=9, nonfinite=bool(first), first_nonfinite_step=first)


def test_what_is_unknown_has_its_reason() -> None:
    known = (scalar("loss", 2.34567), scalar("grad_norm", None, 7), scalar("learning_rate", 3e-4))
    text = training_text(rank(0, scalars=known))
    assert text == ("loss 2.346, gradient norm NaN or infinite (first in step 7), learning rate 0.0003")
    text = training_text(rank(0, scalars=known[2:]))
    assert "loss and gradient norm n/a (seen only through a logger: W&B" in text
    text = training_text(rank(0, scalars=()))
    assert text.startswith("loss, gradient norm and learning rate n/a (seen only through a logger")


def test_it_is_in_the_report_the_terminal_and_the_dashboard() -> None:
    both = run(rank(0), rank(1, scalars=(scalar("loss", 2.5),)))
    report = " ".join(render_run(both).split())
    assert "training, by rank 1: loss 2.5, gradient norm and learning rate n/a" in report
    page = "".join(
        text for line in rank_page(both, both.ranks[1], DisplayOptions(), 160) for text, _ in line
    )
    assert "loss 2.5" in page
    empty: dict[str, list[int]] = {name: [] for name in NAMES}
    assert "loss 2.5" in str(page_of(Known(Route(run=both.run, page="overview"), both, empty)).parts)


def test_a_run_without_ranks_has_none() -> None:
    assert "training, by" not in render_run(replace(full_run(), ranks=()))


def drawing(loss: tuple[float | None, ...]) -> RunSnapshot:
    steps = tuple(summary(n, loss=value) for n, value in enumerate(loss, 1))
    return run(rank(0, recent=steps, scalars=(scalar("loss", loss[-1]),)))


def test_a_loss_has_a_chart_where_it_is_known() -> None:
    """Also one that is known in some steps only, and one below 0."""
    for loss, low in (((4.0, None, 2.0), 0.0), ((1.0, -3.0, None), -3.0)):
        one = drawing(loss)
        (plot,) = (
            made.plot
            for name, made in plots_by_name(one.ranks, Trends(), DisplayOptions(), 40, ()).items()
            if name == "loss"
        )
        known = [(n, value) for n, value in enumerate(loss, 1) if value is not None]
        assert [*plot.curves[0].points] == known and plot.y[0] == low
        rows = rows_frame([row_of(0, step, 0) for step in one.ranks[0].steps.recent]).to_dict(
            as_series=False
        )
        chart = charts.charts_of(rows, one)["loss"]
        assert chart is not None and chart.traces["rank 0"] == ([1, 2, 3], [*loss])
        begins, ends = chart.figure()["layout"]["yaxis"]["range"]
        assert begins <= low and ends > 0
    assert "loss" not in charts.charts_of(rows, run(rank(0)))
