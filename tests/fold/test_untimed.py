"""Communication that is not timed is unknown in every view and metric, and never 0."""

from __future__ import annotations

import pytest
from builders import MS, collective, folded, run, series, span, state, step

from zeromon.comparison.run_figures import METRIC, figures_of
from zeromon.diagnosis.engine import advise
from zeromon.export.prometheus.metrics import Writer
from zeromon.export.trackers import step_scalars
from zeromon.fold.summarize import summarize_rank
from zeromon.readout.breakdown import exposed_is_known, rank_parts
from zeromon.readout.charts import CHARTS
from zeromon.readout.report import render_run
from zeromon.readout.text import exposed_unknown, in_graphs
from zeromon.ring.codes import Op, Phase, Untimed
from zeromon.ring.events import BackwardComm, Counted, Event
from zeromon.snapshot import RankSnapshot
from zeromon.snapshot.step import NOT_TIMED
from zeromon.storage.step_history.rows import NAMES, row_of, step_of
from zeromon.tui.columns import DisplayOptions
from zeromon.tui.plain import step_line
from zeromon.tui.screens.rank import rank_page
from zeromon.tui.status_text import verdict_line
from zeromon_dashboard.pages.communication import traffic_table_title

UNKNOWN = "82.4 % of its collectives are issued from C++, untimed"


def partly_timed(timed: int, untimed: int, op: Op = Op.NONE) -> RankSnapshot:
    """Twelve steps of 100 ms, in each some collectives of 2 ms, and some that C++ issues."""
    events: list[Event] = []
    for number in range(1, 13):
        begin = number * 100.0
        for call in range(timed):
            at = begin + 3 * call
            events += collective(at, at + 2, 2, sequence=number * timed + call)
        events += [
            span(Phase.FORWARD, begin, begin + 60),
            Counted(round((begin + 99) * MS), op, Phase.OTHER, 1, untimed, 0, Untimed.IN_CPP),
            step(number, begin, begin + 100),
        ]
    return summarize_rank(folded(events))


def test_a_share_is_unknown_while_a_noticeable_part_of_collectives_is_untimed() -> None:
    """As of tensor parallelism, and of compiled DDP, in which nothing is timed."""
    for one in (partly_timed(3, 14), partly_timed(0, 14), partly_timed(0, 2, Op.ALL_REDUCE)):
        assert (
            one.communication.exposed_ratio,
            one.communication.exposed_seconds,
            one.communication.overlap_ratio,
        ) == (None, None, None)
        assert not exposed_is_known(one)
        assert rank_parts(one)["exposed"] == 0  # it is in its phase, and the bars do not name it
        assert rank_parts(one)["forward"] > 0
    for known in (partly_timed(20, 1), partly_timed(3, 0), partly_timed(0, 0)):
        assert known.communication.exposed_ratio is not None
        assert exposed_unknown(known) == ""


def test_every_view_says_that_it_is_unknown_and_why() -> None:
    one = partly_timed(3, 14)
    snapshot = run(one)
    assert exposed_unknown(one).startswith(UNKNOWN)
    report = render_run(snapshot)
    assert f"exposed communication of rank 0 is n/a: {UNKNOWN}" in " ".join(report.split())
    (row,) = [line.split() for line in report.splitlines() if line.split()[:2] == ["0", "12"]]
    assert row.count("n/a") == 3
    told = "".join(text for text, _ in verdict_line(snapshot))
    assert f"exposed communication n/a: {UNKNOWN}" in told
    assert "exposed n/a" in step_line(snapshot, 11)
    (found,) = [f for f in advise(snapshot) if f.rule == "untimed_collectives"]
    assert UNKNOWN in found.text
    charts = [chart for chart in CHARTS if chart.name == "exposed"]
    assert [chart.read(one.steps.recent[-1]) for chart in charts] == [None]


@pytest.mark.parametrize(
    ("timed", "untimed", "bound"),
    [(3, 14, ""), (30, 1, "; exposed communication is at least what is shown")],
)
def test_every_view_counts_what_is_inside_graphs(timed: int, untimed: int, bound: str) -> None:
    """With the same sentence; where the exposed time is shown all the same, it is a lower bound."""
    one = partly_timed(timed, untimed)
    sentence = f"{12 * untimed} collectives issued from C++, untimed{bound}"
    assert in_graphs(one) == sentence
    snapshot = run(one)
    assert sentence in render_run(snapshot)
    lines = rank_page(snapshot, one, DisplayOptions(), 200)
    assert sentence in {text for line in lines for text, _ in line}
    assert traffic_table_title(one).endswith(sentence)
    assert in_graphs(partly_timed(3, 0)) == ""


def test_what_ddps_reducer_issued_is_not_inside_a_graph() -> None:
    """Nor what a control step counted."""
    for why, expected in ((Untimed.REDUCER, 0), (Untimed.CONTROL_STEP, 0), (Untimed.IN_CPP, 2)):
        events = [Counted(MS, Op.ALL_REDUCE, Phase.BACKWARD, 1, 2, 2000, why), step(1, 0, 100)]
        assert summarize_rank(folded(events)).communication.untimed_in_cpp == expected


def test_no_metric_of_what_is_unknown_is_zero() -> None:
    one = partly_timed(0, 14, Op.ALL_REDUCE)
    text = Writer().write([run(one)], None, openmetrics=False).decode()
    assert 'zeromon_collectives_untimed_ratio{run="train-1",rank="0"} 1.0\n' in text
    for name in (
        "exposed_communication_ratio",
        "overlap_ratio",
        "collective_exposed_seconds_total",
        "collective_seconds_total",
    ):
        assert f"zeromon_{name}{{" not in text


def test_the_history_keeps_it() -> None:
    """And so compare, trackers and exports do not show a zero either."""
    step_of_run = partly_timed(3, 14).steps.recent[-1]
    row = row_of(0, step_of_run, 0)
    assert dict(zip(NAMES, row, strict=True))["flags"] & NOT_TIMED
    assert not step_of(row, 0).timed
    assert step_of(row_of(0, partly_timed(3, 0).steps.recent[-1], 0), 0).timed
    tags = dict(step_scalars(dict(zip(NAMES, row, strict=True))))
    assert "time/step_seconds" in tags
    assert not any("exposed" in tag for tag in tags)
    figures = figures_of(run(partly_timed(3, 14)), series([0.1] * 40, flags=4))
    assert METRIC["exposed_share"].find(figures) == "no communication was timed"


def test_ddps_buckets_count_as_timed_once_the_reducer_has_told_their_times() -> None:
    """That is in the next forward: until then the newest step is unknown, and not without exposure."""
    events: list[Event] = []
    for number in range(1, 4):
        begin = number * 100
        if number > 1:  # of the step before
            end = (begin - 10) * MS
            events.append(BackwardComm(end, 1, end - 30 * MS, end - 10 * MS, 2))
        events += [
            Counted((begin + 99) * MS, Op.ALL_REDUCE, Phase.BACKWARD, 1, 2, 2000, Untimed.REDUCER),
            step(number, begin, begin + 100),
        ]
    one = summarize_rank(folded(events))
    assert [s.timed for s in one.steps.recent] == [True, True, False]
    assert one.communication.exposed_ratio == 0.1


@pytest.mark.parametrize("seen", [False, True])
def test_a_group_written_in_python_may_hide_all_collectives(seen: bool) -> None:
    """Nothing sees or counts what its own methods issue. Where it calls another group, that is seen."""
    rank = state(process={"unknown_collectives": ["Mine.allreduce"]})
    rank.groups[2] = {"label": "mine", "size": 2, "ranks": [0, 1], "in_python": True}
    events: list[Event] = []
    for number in range(1, 13):
        begin = number * 100.0
        events += collective(begin, begin + 2, 2, sequence=number) if seen else []
        events += [span(Phase.FORWARD, begin, begin + 60), step(number, begin, begin + 100)]
    one = summarize_rank(folded(events, rank))
    assert (one.communication.exposed_ratio is not None) == exposed_is_known(one) == seen
    assert exposed_unknown(one) == ("" if seen else "no hook sees Mine.allreduce")
    assert ("  n/a: no hook sees Mine.allreduce" in render_run(run(one)).splitlines()) == (not seen)
    text = Writer().write([run(one)], None, openmetrics=False).decode()
    assert ("zeromon_exposed_communication_ratio{" in text) == seen
    restored = step_of(row_of(0, one.steps.recent[-1], 0), 0)
    assert restored.timed == one.steps.recent[-1].timed == seen
