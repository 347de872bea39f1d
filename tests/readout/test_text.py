"""The sentences that every view shares."""

from __future__ import annotations

from dataclasses import replace
from html import unescape
from typing import Any

import pytest
from builders import changed, device_memory, rank, run, summary

from zeromon.base.units import human_count
from zeromon.readout.remedy import effect_text, gain_text, remedy_text
from zeromon.readout.report import memory_block, render_run
from zeromon.readout.tables import FINDING_COLUMNS, FLIGHT_COLUMNS, TRAFFIC_COLUMNS, list_flights
from zeromon.readout.text import (
    finding_text,
    memory_unknown,
    overlap_unknown,
    script_line,
    state_text,
    straggler_text,
)
from zeromon.readout.verdict import hang_headline, hang_text
from zeromon.snapshot import Finding, Hang, RunSnapshot
from zeromon.snapshot.communication import GroupProgress, InFlight, Straggler
from zeromon.snapshot.finding import Remedy
from zeromon.snapshot.run import Fleet
from zeromon.tui.line import plain_text
from zeromon.tui.screens.findings import finding_page
from zeromon_dashboard import html_report, widgets


def _remedy(low: float | None, high: float | None, **more: Any) -> Remedy:
    diff = '- "stage": 3\n+ "stage": 2\n  "other": 1'
    return Remedy(
        cause="stage 3 gathers twice", dialect="DeepSpeed JSON", diff=diff,
        gain_low_seconds=low, gain_high_seconds=high, price="1.0 GiB more", **more,
    )  # fmt: skip


def _finding(remedy: Remedy) -> Finding:
    return Finding(
        rule="stage_too_high", severity="warning", text="gathers wait", rank=3, code="ZM202",
        remedy=remedy,
    )  # fmt: skip


def _words(component: Any) -> str:
    """All text of a Dash component."""
    if isinstance(component, str):
        return component
    if isinstance(component, (list, tuple)):
        return "".join(map(_words, component))
    return _words(getattr(component, "children", "")) if component is not None else ""


def _rendered(finding: Finding) -> dict[str, str]:
    """The finding as each view shows it."""
    return {
        "report": render_run(run(rank(), findings=(finding,))),
        "terminal": "\n".join(plain_text(line) for line in finding_page(finding, 100)),
        "dashboard": _words(widgets._finding_panel(finding)),
        "page": unescape(html_report.component_markup(widgets._finding_panel(finding), {})),
    }


@pytest.mark.parametrize(
    ("low", "gain"),
    [
        (0.012, "a step 12.0 ms to 30.0 ms shorter"),
        (0.0, "a step up to 30.0 ms shorter"),
        (1e-9, "a step up to 30.0 ms shorter"),
    ],
)
def test_a_gain_reads_the_same_in_every_view(low: float, gain: str) -> None:
    for view, text in _rendered(_finding(_remedy(low, 0.03))).items():
        assert gain in text, view
        assert "0 us" not in text, view
        assert "because stage 3 gathers twice" in text, view
        assert '+ "stage": 2' in text, view
        assert "1.0 GiB more" in text, view


def test_a_table_has_the_same_gain_in_short() -> None:
    (expected,) = (column for column in FINDING_COLUMNS if column.name == "expected")
    assert expected.cell(_finding(_remedy(0.0, 0.03)))[0] == "up to -30.0 ms"
    assert expected.cell(_finding(_remedy(0.012, 0.03)))[0] == "-12.0 ms per step"
    assert effect_text(_remedy(None, None, frees_bytes=3 << 30)) == "-3.0 GiB"
    assert effect_text(None) == ""


def test_a_remedy_has_parts_that_no_view_has_to_parse() -> None:
    text = remedy_text(_remedy(None, None, frees_bytes=1 << 30, effect="the growth ends"))
    assert [(line.text, line.kind) for line in text.diff] == [
        ('- "stage": 3', "removed"), ('+ "stage": 2', "added"), ('  "other": 1', ""),
    ]  # fmt: skip
    assert text.expected == ("1.0 GiB less per rank", "the growth ends")
    assert text.reason == "because stage 3 gathers twice; DeepSpeed JSON:"
    assert text.outlook == "predicted: 1.0 GiB less per rank; the growth ends; cost: 1.0 GiB more"
    assert gain_text(_remedy(None, None)) == ""


def test_whom_a_finding_is_about_comes_first() -> None:
    assert finding_text(_finding(_remedy(None, None))) == "rank 3: gathers wait"
    assert finding_text(Finding(rule="r", severity="info", text="all wait")) == "all wait"


# ---- hangs and stragglers --------------------------------------------------------------------------


def _hang(**facts: Any) -> Hang:
    base = Hang(
        kind="a member has not come", op="all_gather", group="world", group_id="1", sequence=12,
        nbytes=1000, seconds=40.0, waiting=(0,), missing=(1,), dead=(), elsewhere=(), calls=(),
    )  # fmt: skip
    return replace(base, **facts)


def test_a_hang_says_who_waits_and_what_the_missing_do() -> None:
    one = run(rank(0), rank(1, phase="backward", unit=""))
    text = hang_text(one, _hang())
    assert text == (
        "all_gather #12 of group world (1,000 B) has not ended for 40 s: "
        "rank 1 has not called it (in backward); rank 0 waits"
    )
    assert hang_headline(one, _hang()) == (
        "all_gather in world is stuck: rank 1 has not called it (in backward); rank 0 waits"
    )


def test_a_group_has_one_name_in_headline_and_tables() -> None:
    """Its dimension; its label where the dimension says nothing more."""
    entry = InFlight(
        op="all_reduce", group="world", sequence=9, unit="", phase="backward", nbytes=4, issued_ns=0,
        group_id="1",
    )  # fmt: skip
    for dim, name in (("dp", "dp"), ("", "world")):
        group = GroupProgress(group_id="1", label="world", ranks=(0, 1), sequence=9, dim=dim)
        row = replace(rank(0).communication.traffic[0], group="world", group_size=2, dim=dim)
        one = changed(rank(0), in_flight=(entry,), groups=(group,), traffic=(row,))
        assert f" in {name} is stuck" in hang_headline(run(one), _hang(dim=dim))
        (flight,) = list_flights([one], 0)
        (in_flight,) = (column for column in FLIGHT_COLUMNS if column.name == "group")
        (traffic,) = (column for column in TRAFFIC_COLUMNS if column.name == "group")
        assert in_flight.text(flight) == name
        assert traffic.text(row) == f"{name}(2)"


def test_how_a_rank_ended_is_told_in_a_word() -> None:
    for ended, exception, word in (
        ("exception", "ValueError at t.py:32: bad sample 4711", "ValueError"),
        ("exception", "KeyboardInterrupt: ", "Ctrl-C"),
        ("exception", "", "exception"),
        ("SIGTERM", "", "SIGTERM"),
        ("exit_code_17", "", "exit code 17"),
    ):
        died = rank(0, alive=False, failed=True, ended=ended, exception=exception)
        assert state_text(died) == word


def test_a_hang_of_a_large_run_has_no_made_up_numbers() -> None:
    """Prometheus knows neither the number nor the size of the collective, nor all who wait."""
    fleet = Fleet(ranks=4096, up=4096, failed=0, silent=0, waiting=4095, nodes=(), spreads={})
    one: RunSnapshot = run(rank(0, phase=""), rank(1, phase=""), fleet=fleet)
    hang = _hang(sequence=-1, nbytes=-1)
    assert hang_text(one, hang) == (
        "all_gather in world has not ended for 40 s: "
        "rank 1 has not called it (running); 4,095 ranks wait"
    )
    assert "4,095 ranks wait" in hang_headline(one, hang)


def test_a_straggler_comes_with_what_is_known_of_it() -> None:
    late = Straggler(
        rank=3, late_seconds=0.012, share=0.031, since_step=40, phases=("data_wait",),
        longer_seconds=0.01, cause="its clocks are held down",
    )  # fmt: skip
    assert straggler_text(late) == (
        "rank 3: late by 10.0 ms per step (data wait) since step 40; "
        "the others wait 12.0 ms in the median step (3.1 %); its clocks are held down"
    )
    between = replace(late, phases=("other", "forward"), cause="")
    assert "late by 10.0 ms per step (own code and forward)" in straggler_text(between)
    bare = Straggler(
        rank=3, late_seconds=0.012, share=0.031, since_step=0, phases=(), longer_seconds=0.0
    )
    assert straggler_text(bare) == "rank 3: late; the others wait 12.0 ms per step (3.1 %)"


@pytest.mark.parametrize(
    ("kind", "known", "text"),
    [
        ("", False, ""),
        ("native", True, ""),
        ("native", False, "device memory is n/a: the allocator (native) has told no figures"),
        ("uncached", False, "torch counts nothing with PYTORCH_NO_CUDA_MEMORY_CACHING"),
        ("cudaMallocAsync", True, "free parts of blocks and retries are n/a"),
        ("pluggable", False, "the allocator (pluggable) has told no figures"),
    ],
)
def test_what_an_allocator_does_not_count_is_said(kind: str, known: bool, text: str) -> None:
    one = changed(rank(0, memory_device=device_memory() if known else None), process={"allocator": kind})
    assert text in memory_unknown(one)
    assert bool(text) == bool(memory_unknown(one))
    assert memory_unknown(one) in memory_block([one])


def test_a_count_that_is_unknown_is_not_zero() -> None:
    assert (human_count(-1), human_count(0)) == ("n/a", "0")


def test_an_unknown_overlap_has_a_reason() -> None:
    """Unknown is never a bare n/a: on a device the host can be too late to see a collective end."""
    unseen = rank(exposed_ratio=0.2, overlap_ratio=None, recent=(summary(1, communication_ns=-1),))
    silent = changed(unseen, recent=(summary(1, communication_ns=0, exposed_ns=0),))
    assert overlap_unknown(unseen) == "when its collectives begin or end is not seen"
    assert overlap_unknown(silent) == "no communication"
    assert overlap_unknown(changed(unseen, overlap_ratio=0.5)) == ""
    assert overlap_unknown(changed(unseen, exposed_ratio=None)) == ""


@pytest.mark.parametrize(
    ("stack", "line"),
    [
        (("/me/train.py:9 in main", "/x/site-packages/torch/nn/m.py:1 in call"), "train.py:9 in main"),
        # autograd's thread has no frame of the script, and the innermost one is a hook of zeromon
        (
            ("/x/site-packages/deepspeed/stage3.py:7 in reduce",
             "/x/site-packages/torch/c10d.py:3 in all_reduce",
             "/x/site-packages/zeromon_agents/hooks/c10d.py:8 in wait"),
            "c10d.py:3 in all_reduce",
        ),
        (("/x/site-packages/zeromon_agents/hooks/c10d.py:8 in wait",), "c10d.py:8 in wait"),
    ],
)  # fmt: skip
def test_the_line_of_a_stack_is_the_scripts_or_the_librarys(stack: tuple[str, ...], line: str) -> None:
    assert script_line(stack) == line
