"""Tokens a second, MFU and progress, from what ranks report of their batches and models."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from builders import changed, folded, rank, received, run, step, summary

from zeromon.fold.summarize import summarize_rank
from zeromon.memory.speeds import peak_flops
from zeromon.readout.throughput import (
    flops_per_token,
    how_far,
    mfu_of_run,
    progress_text,
    samples_per_second,
    throughput_text,
    tokens_per_second,
)
from zeromon.ring.codes import Padding
from zeromon.ring.events import BatchMark
from zeromon.snapshot import RankSnapshot, RunSnapshot
from zeromon.snapshot.communication import Dimension
from zeromon.snapshot.host import Device
from zeromon.storage.step_history.rows import row_of
from zeromon.storage.step_history.writer import rows_frame
from zeromon.tui.columns import DisplayOptions
from zeromon.tui.plots import Trends, plots_by_name
from zeromon.tui.status_text import run_figures
from zeromon_dashboard.charts import charts_of

LAYERS, WIDTH, LENGTH = 4, 1024, 2048
MODEL: dict[str, Any] = {
    "framework": "fsdp2", "numel": 60_000_000, "whole_numel": 60_000_000, "trainable": 60_000_000,
    "matrix_numel": 50_000_000, "attention": LAYERS * WIDTH, "compute_dtype": "bfloat16",
}  # fmt: skip


def member(number: int, tokens: list[int], *, padding: Padding = Padding.NO_MASK) -> RankSnapshot:
    """A rank whose steps of 100 ms get batches of *tokens* in two samples."""
    events: list[Any] = []
    for n, count in enumerate(tokens, 1):
        mark = BatchMark(n * 100_000_000, 2, count, 2 * LENGTH, 2 * LENGTH**2, padding)
        events += [mark, step(n, (n - 1) * 100.0, n * 100.0)]
    made = summarize_rank(folded(events))
    return replace(made, rank=number, world_size=2, strategy="fsdp2", strategy_fields=None)


def two(*facts: dict[str, Any]) -> RunSnapshot:
    """Two ranks on H100s, with batches of different lengths."""
    ranks = member(0, [100, 300, 500]), member(1, [100, 400, 600])
    base = {"models": (MODEL,), "device": "cuda:0", "machine_device": Device(name="NVIDIA H100")}
    return run(*(changed(one, **(base | (facts[0] if facts else {}))) for one in ranks))


def test_tokens_of_a_second_are_those_of_all_ranks() -> None:
    """The first step, which warms up, is left out."""
    assert tokens_per_second(two()) == pytest.approx((300 + 400 + 500 + 600) / 0.2)
    assert samples_per_second(two()) == pytest.approx(2 * 2 / 0.1)
    tp = {"dimensions": (Dimension(name="tp", size=2, used=True),)}
    assert tokens_per_second(two(tp)) == pytest.approx(4500)  # the mean of both, once


@pytest.mark.parametrize("counts", ["tokens", "samples"])
def test_the_rate_of_each_step_has_a_chart(counts: str) -> None:
    """Of 100 ms each, in the terminal from a snapshot, on the page from a history; a gap stays one."""
    batches = received(4, length=30 if counts == "tokens" else 0)
    steps = [summary(n, **{counts: each}) for n, each in enumerate((100, -1, 300), 1)]
    one = run(rank(0, recent=tuple(steps), batches=batches))
    plots = plots_by_name(one.ranks, Trends(), DisplayOptions(), 40, ())
    assert [*plots["throughput"].plot.curves[0].points] == [(1, 1000.0), (3, 3000.0)]
    assert plots["throughput"].title == f"{counts}/s of a rank"
    rows = rows_frame([row_of(0, each, 0) for each in steps]).to_dict(as_series=False)
    chart = charts_of(rows, one)["throughput"]
    assert chart is not None and chart.traces["rank 0"] == ([1, 2, 3], [1000.0, None, 3000.0])
    assert "throughput" not in charts_of(rows, run(rank(0)))


def test_a_mask_on_a_device_is_said_to_count_padding() -> None:
    for padding, said in (
        (Padding.NO_MASK, "tokens/s,"),
        (Padding.LEFT_OUT, "tokens/s (without padding),"),
        (Padding.INCLUDED, "tokens/s (padding included),"),
    ):
        assert said in throughput_text(run(replace(member(0, [9, 9], padding=padding), world_size=1)))


def test_flops_are_those_of_the_closed_formula() -> None:
    """6 a weight and 12 L h s; frozen weights need no gradients of their own."""
    whole = 6 * 50e6 + 12 * LAYERS * WIDTH * LENGTH
    assert flops_per_token(two()) == pytest.approx(whole)
    frozen = two({"models": (MODEL | {"trainable": 0},)})
    assert flops_per_token(frozen) == pytest.approx(whole - 2 * 50e6)
    assert mfu_of_run(two()) == pytest.approx(whole * 9000 / (2 * 989e12))
    assert mfu_of_run(two({"process": {"autocast": "float32"}})) == pytest.approx(
        whole * 9000 / (2 * 67e12)
    )


@pytest.mark.parametrize(
    ("facts", "why"),
    [
        ({"machine_device": Device(name="X")}, "peak FLOP/s of X unknown"),
        ({"machine_device": None, "device": "cpu"}, "peak FLOP/s of cpu unknown"),
        ({"models": (MODEL | {"compute_dtype": ""},)}, "the unknown dtype of the model"),
        ({"models": (MODEL, MODEL)}, "the rank trains several models"),
        ({"models": ()}, "no rank reported its model"),
        ({"models": ({"numel": 8},)}, "how many of its parameters a token uses"),
        ({"models": (MODEL | {"matrix_numel": 50_000_000 * 10**6},)}, "error: it would be over 100 %"),
        ({"recent": ()}, "no batch size seen from a wrapped model or DataLoader"),
    ],
)  # fmt: skip
def test_what_is_unknown_of_mfu_has_its_reason(facts: dict[str, Any], why: str) -> None:
    said = mfu_of_run(two(facts if "recent" not in facts else facts | {"batches": None}))
    assert isinstance(said, str) and why in said
    assert isinstance(tokens_per_second(two(facts)), float) or "recent" in facts


def test_a_v100_has_no_bf16() -> None:
    assert peak_flops("Tesla V100-SXM2-32GB", "float16") == 125e12
    assert peak_flops("Tesla V100-SXM2-32GB", "bfloat16") == "Tesla V100-SXM2-32GB has no bf16"
    assert peak_flops("NVIDIA A100-SXM4-80GB", "float32") == 19.5e12


def goal(planned: int = 0, ended: bool = False, **facts: Any) -> RunSnapshot:
    one = changed(member(0, [9] * 20), goal=facts)
    return replace(run(one), planned_steps=planned, ended=ended)


def test_what_is_left_agrees_with_the_steps_a_second_that_are_shown() -> None:
    """Of 64 known steps the last 20 take 0.8 s, those before 0.2 s: 1,828 steps at 1.25 a second."""
    ends = [0.2 * n for n in range(45)] + [8.8 + 0.8 * n for n in range(1, 21)]
    past = tuple(
        summary(n, start_ns=round(1e9 * a), end_ns=round(1e9 * b))
        for n, (a, b) in enumerate(pairwise(ends), 402)
    )
    made = rank(0, recent=past, last_step=466, mean_seconds=0.8, goal={"steps": 2294, "by": "Trainer"})
    known = how_far(run(made))
    assert known is not None and known.left_seconds is not None
    rate = {name: value for name, value, _ in run_figures(run(made), DisplayOptions())}["steps/s"]
    assert known.left_seconds == pytest.approx((2294 - 466) / float(rate))


def test_progress_is_of_what_says_how_many_steps_there_are() -> None:
    assert progress_text(goal(steps=120, before=20, by="Trainer")) == "step 40 of 120, about 8 s left"
    assert progress_text(goal(100, steps=120)) == "step 20 of 100, about 8 s left"
    assert progress_text(goal(20)) == "step 20 of 20"
    assert progress_text(goal(40, ended=True)) == "step 20 of 40"
    assert progress_text(goal(batches=8, before=-15, by="DataLoader")).startswith(
        "step 5 of 8 of this epoch"
    )
    assert how_far(goal()) is how_far(goal(10)) is how_far(run(rank(0))) is None
    assert progress_text(goal()) == ""


def test_totals_are_of_all_steps() -> None:
    assert member(0, [5, 7]).training.batches == replace(
        received(2, steps=2), tokens=12, positions=4 * LENGTH, pairs=4 * LENGTH**2
    )
