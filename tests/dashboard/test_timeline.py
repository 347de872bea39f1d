"""The page "Timeline": each bar is a span of the ring, each arrow leads to who came last."""

from __future__ import annotations

from dataclasses import replace

import plotly.graph_objects as go
import pytest
from builders import rank, run, summary
from recordings import RINGS

from zeromon.fold.lanes import lanes_of_rings
from zeromon.ring.slices import run_events
from zeromon.snapshot.finding import Finding, Severity
from zeromon.snapshot.step import Lanes, Stream
from zeromon_dashboard import plotly_figures
from zeromon_dashboard.pages import timeline


@pytest.fixture(scope="module")
def found() -> Lanes:
    return lanes_of_rings(
        list(run_events("no live run", RINGS / "straggler-data")), {0: 0, 1: 0}, steps=3
    )


def test_every_span_is_a_bar_at_its_moment(found: Lanes) -> None:
    made = plotly_figures.lanes_figure(found)
    go.Figure(made)
    (exposed,) = (trace for trace in made["data"] if trace["name"] == "exposed communication")
    labels = made["layout"]["yaxis"]["ticktext"]
    drawn = {
        (labels[y], round(base, 3), round(length, 3))
        for y, base, length in zip(exposed["y"], exposed["base"], exposed["x"], strict=True)
    }
    blocked = [span for span in found.spans if span.exposed_ns]
    assert blocked and len(exposed["x"]) == 2 * len(blocked)  # over the phases, and by unit
    for span in blocked:
        begin = (max(span.begin_ns, span.end_ns - span.exposed_ns) - found.zero_ns) / 1e6
        end = (span.end_ns - found.zero_ns) / 1e6
        assert (f"{span.unit} {span.name}", round(begin, 3), round(end - begin, 3)) in drawn
    own = next(len(trace["x"]) for trace in made["data"] if trace["name"] == "own code")
    phases = own + sum(s.stream is Stream.COMPUTE for s in found.spans)
    hidden = sum(len(t["x"]) for t in made["data"] if t["name"] == "hidden communication")
    assert sum(len(t["x"]) for t in made["data"]) == phases + hidden + 2 * len(blocked)


def test_phases_and_own_code_fill_the_steps_of_a_rank(found: Lanes) -> None:
    """Without collectives: those lie over them."""
    traces = plotly_figures.lanes_figure(found)["data"]
    phases = [t for t in traces if "communication" not in t["name"]]
    for lane, number in ((0, 0), (traces[0]["y"][-1], 1)):
        spent = sum(x for t in phases for x, y in zip(t["x"], t["y"], strict=True) if y == lane)
        steps = sum(step.end_ns - step.begin_ns for step in found.steps if step.rank == number)
        assert spent == pytest.approx(steps / 1e6, rel=0.02)


def test_an_arrow_leads_from_the_first_rank_to_the_last(found: Lanes) -> None:
    layout = plotly_figures.lanes_figure(found)["layout"]
    arrows = [one for one in layout["annotations"] if one["showarrow"]]
    longest = max(found.arrivals, key=lambda one: one.at_ns - one.first_ns)
    assert (longest.first_rank, longest.rank) == (0, 1)
    first = arrows[0]
    assert first["ax"] == pytest.approx((longest.first_ns - found.zero_ns) / 1e6)
    assert first["x"] == pytest.approx((longest.at_ns - found.zero_ns) / 1e6)
    own = layout["yaxis"]["ticktext"].index("rank 1")
    assert first["ay"] < own < first["y"]


def test_names_of_a_run_are_no_markup(found: Lanes) -> None:
    evil = tuple(replace(s, unit="<a href='javascript:x'>") for s in found.spans if s.unit)
    text = str(plotly_figures.lanes_figure(replace(found, spans=evil, arrivals=())))
    assert "&lt;a href" in text and "<a href" not in text


def test_many_ranks_have_one_lane_for_all_units(found: Lanes) -> None:
    steps = [replace(step, rank=n) for step in found.steps[:3] for n in range(64)]
    spans = [replace(span, rank=n) for span in found.spans if not span.rank for n in range(64)]
    made = plotly_figures.lanes_figure(replace(found, steps=tuple(steps), spans=tuple(spans)))
    assert len(made["layout"]["yaxis"]["ticktext"]) == 2 * 64
    go.Figure(made)


def test_the_key_of_the_colours_stands_below_the_figure(found: Lanes) -> None:
    """Plotly's legend covered the axis on a screen of 360 pixels."""
    made = plotly_figures.lanes_figure(found)
    parts = timeline.timeline_view(found, run(rank()))
    (key,) = (part for part in parts if getattr(part, "className", "") == "key")
    assert made["layout"]["showlegend"] is False
    assert [(item.children[1], item.children[0].style["backgroundColor"]) for item in key.children] == [
        (bars["name"], bars["marker"]["color"]) for bars in made["data"]
    ]


def test_one_collective_without_a_time_is_one(found: Lanes) -> None:
    def untimed(count: int) -> str:
        counts = (count, *[0] * (len(found.steps) - 1))
        counted = [replace(s, untimed=n) for s, n in zip(found.steps, counts, strict=True)]
        return str(timeline.timeline_view(replace(found, steps=tuple(counted)), run(rank())))

    assert "because their time is unknown: 1 collective'" in untimed(1)
    assert "because their time is unknown: 1,200 collectives'" in untimed(1200)


def test_without_a_ring_the_page_says_so(found: Lanes) -> None:
    none = replace(found, steps=(), spans=(), arrivals=(), left_out=("1 rank: no whole step",))
    text = str(timeline.timeline_view(none, run(rank())))
    assert "No ring of this run" in text and "left out: 1 rank: no whole step" in text


def test_while_no_step_ends_the_page_says_that_what_is_under_way_is_missing(found: Lanes) -> None:
    known = summary(60, end_ns=1_000_000_000)
    stands = Finding(rule="stalled", severity=Severity.CRITICAL, text="it stands", rank=0)
    still = run(rank(recent=(known,)), findings=(stands,), taken_ns=36_000_000_000)
    sentence = "no step for 35 s: what is under way is not drawn"
    assert sentence in str(timeline.timeline_view(found, still))
    assert sentence not in str(timeline.timeline_view(found, replace(still, findings=())))


def test_the_step_in_which_a_run_ended_is_said_to_be_missing(found: Lanes) -> None:
    died = run(rank(failed=True, alive=False, ended="SIGKILL"), ended=True)
    sentence = "the step in which the run ended is not drawn"
    assert sentence in str(timeline.timeline_view(found, died))
    finished = run(rank(alive=False, ended="exit"), ended=True)
    assert sentence not in str(timeline.timeline_view(found, finished))
