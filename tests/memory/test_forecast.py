"""The forecast: what it must see, and at what it must not cry wolf."""

from __future__ import annotations

import random
import statistics

import pytest
from builders import rank, summary
from forecasters import run as replay

from zeromon.memory.forecast import (
    device_memory_risk,
    early_growth,
    fit_generalized_pareto,
    forecast_risk,
    host_risk,
    risk_of_level,
    soonest_growth,
    spike_probability,
)
from zeromon.snapshot import RankSnapshot, Risk, StepSummary

GIB = 1 << 30
CAPACITY = 80 * GIB


def series(shares: list[float]) -> list[tuple[int, int]]:
    return [(step, round(share * CAPACITY)) for step, share in enumerate(shares, 1)]


def steady(level: float, noise: float, steps: int = 200) -> list[tuple[int, int]]:
    chooser = random.Random(3)
    return series([level + chooser.uniform(-noise, noise) for _ in range(steps)])


def test_a_steady_series_has_no_risk() -> None:
    """Noise is no growth."""
    samples = steady(0.8, 0.02)
    peak = max(used for _, used in samples[-20:])
    assert forecast_risk("device", samples, CAPACITY) == Risk(
        pool="device", ratio=0.0, cause="none", used_bytes=peak, capacity_bytes=CAPACITY
    )


@pytest.mark.parametrize(
    ("level", "ratio"), [(0.90, 0.0), (0.935, 0.25), (0.97, 0.5), (0.985, 0.75), (1.2, 1.0)]
)
def test_a_level_without_margin_is_a_risk_by_itself(level: float, ratio: float) -> None:
    assert risk_of_level(level * CAPACITY, CAPACITY) == pytest.approx(ratio)
    risk = forecast_risk("host", steady(level, 0), CAPACITY)
    assert risk is not None
    assert (risk.ratio, risk.cause) == (pytest.approx(ratio), "static" if ratio else "none")


@pytest.mark.parametrize(
    ("peaks", "slope", "window"),
    [
        # each step keeps 120: the first two make the optimizer's states; the last is not over
        ([400, 900, 1020, 1140, 1260, 1380, 1390], 120, 4),
        ([900, 1020, 1140, 1260, 1380, 1500], 120, 4),
        # the peak of three steps is too little
        ([900, 1020, 1140, 1260, 1380], 0, 0),
        # batches of other lengths, each longer than all before
        ([400, 900, 1020, 1100, 1310, 1380], 0, 0),
    ],
)
def test_a_leak_of_the_first_steps(peaks: list[int], slope: int, window: int) -> None:
    trend = early_growth(list(enumerate(peaks, 1)), min(6, len(peaks)))
    assert (slope, window) == (0, 0) if trend is None else (trend.slope, trend.window) == (slope, window)


def test_a_peak_that_does_not_rise_in_each_step_is_no_leak() -> None:
    assert early_growth([(1, 5), (3, 10), (4, 20), (6, 30), (7, 40)], 7) is None
    assert early_growth([(3, 10), (4, 20), (5, 30), (6, 40)], 9) is None


def test_a_leak_is_seen_with_the_steps_that_are_left() -> None:
    """An eighth of a percent a step from a quarter: 400 steps to go after 200."""
    risk = forecast_risk("device", series([0.25 + 0.00125 * n for n in range(1, 201)]), CAPACITY)
    assert risk is not None
    assert risk.cause == "growth"
    assert risk.steps_left == pytest.approx(400, abs=2)
    assert risk.steps_soonest == pytest.approx(400, abs=2)
    assert risk.growth_bytes_per_step == pytest.approx(0.00125 * CAPACITY, rel=0.01)
    assert risk.ratio == pytest.approx(0.8, abs=0.01)


def test_the_interval_holds_the_truth_of_a_noisy_leak() -> None:
    """Nine of ten at least, over 40 leaks with noise."""
    inside = 0
    for seed in range(40):
        chooser = random.Random(seed)
        noisy = series([0.3 + 0.001 * n + chooser.gauss(0, 0.01) for n in range(1, 301)])
        trend = soonest_growth([s for s in noisy if s[0] > 10], CAPACITY)
        assert trend is not None
        _, soonest, latest = trend.steps_left(CAPACITY)
        inside += soonest <= 400 <= latest
    assert inside >= 36


def test_a_leak_far_from_the_capacity_is_seen_with_its_first_step() -> None:
    """0.01 % per step after 60 level steps: no step is forecast, and no alarm is raised by the risk."""
    chooser = random.Random(11)
    flat = [0.3 + chooser.uniform(0, 2e-5) for _ in range(60)]
    risk = forecast_risk("host", series([*flat, *(0.3 + 1e-4 * n for n in range(1, 41))]), CAPACITY)
    assert risk is not None and risk.cause == "growth" and risk.steps_left is None
    assert risk.ratio < 0.5
    assert risk.growth_bytes_per_step == pytest.approx(1e-4 * CAPACITY, rel=0.05)
    assert 57 <= risk.since_step <= 63
    assert risk.grown_bytes == pytest.approx(40e-4 * CAPACITY, rel=0.1)


def test_the_ranks_that_grow_are_named_where_others_do_not() -> None:
    def held(number: int, leaks: bool) -> RankSnapshot:
        steps = tuple(
            summary(n, rss_bytes=GIB + (leaks and n > 60) * (n - 60) * (8 << 20)) for n in range(1, 111)
        )
        return rank(number, recent=steps, rss_bytes=steps[-1].rss_bytes, host_available_bytes=GIB)

    for leaking in ((1,), (0, 1)):
        risk = host_risk([held(0, 0 in leaking), held(1, 1 in leaking)])
        assert risk is not None and risk.cause == "growth"
        assert risk.growing_ranks == (leaking if len(leaking) == 1 else ())
        assert 57 <= risk.since_step <= 63


def test_warm_up_is_no_leak() -> None:
    """What rises over the first steps and stays, and what levels off."""
    ramp = series([min(0.5, 0.05 * n) for n in range(1, 200)])
    levelling = series([0.5 - 0.375 * 0.97**n for n in range(1, 200)])
    for samples in (ramp, levelling):
        risk = forecast_risk("device", samples, CAPACITY)
        assert risk is not None and risk.ratio == 0.0


def test_jumps_are_no_trend() -> None:
    """A larger batch, twice; the optimizer's first step; a phase of evaluation."""
    stairs = [0.3] * 100 + [0.5] * 100 + [0.7] * 60
    first = [0.2] + [0.6] * 100
    phase = [0.5] * 150 + [0.8] * 20 + [0.5] * 40
    for shares in (stairs, first, phase):
        for end in range(40, len(shares)):
            assert soonest_growth(series(shares)[:end], CAPACITY) is None
            assert spike_probability(series(shares)[:end], CAPACITY) == 0.0


def test_the_pareto_fit_finds_what_it_was_drawn_from() -> None:
    """Shape 0.25 and scale 2, from 4,000 draws."""
    chooser = random.Random(5)
    drawn = sorted(2 * ((1 - chooser.random()) ** -0.25 - 1) / 0.25 for _ in range(4000))
    shape, scale = fit_generalized_pareto(drawn)
    assert shape == pytest.approx(0.25, abs=0.05)
    assert scale == pytest.approx(2, rel=0.06)


def test_a_heavy_tail_is_a_risk_and_a_bounded_one_is_none() -> None:
    """Peaks up to 95 % by a tail without bound, against lengths that end at 75 %."""
    chooser = random.Random(11)
    tail = [0.5 + 0.03 * ((1 - chooser.random()) ** -0.35 - 1) / 0.35 for _ in range(400)]
    heavy = series([min(0.96, share) for share in tail])
    assert spike_probability(heavy, CAPACITY) > 0.5
    bounded = series([min(0.75, share) for share in tail])
    assert spike_probability(bounded, CAPACITY) < 0.05


def test_unknown_capacity_or_use_is_no_risk_figure() -> None:
    """None, never 0."""
    assert forecast_risk("device", steady(0.1, 0), -1) is None
    assert forecast_risk("device", [(1, -1)], CAPACITY) is None


def steps(shares: list[tuple[float, float]], other: float = -1) -> list[StepSummary]:
    return [
        summary(
            n,
            allocated_bytes=round(a * CAPACITY),
            reserved_bytes=round(r * CAPACITY),
            other_bytes=round(other * CAPACITY * n) if other >= 0 else -1,
        )
        for n, (a, r) in enumerate(shares, 1)
    ]


def test_a_full_cache_is_no_alarm_and_growing_slack_is() -> None:
    """Reserved at the capacity is normal; reserved that grows alone is fragmentation."""
    cached = device_memory_risk(steps([(0.6, 0.99)] * 100), CAPACITY)
    assert cached is not None and cached.ratio == 0.0
    retried = device_memory_risk(steps([(0.6, 0.99)] * 100), CAPACITY, retries=3)
    assert retried is not None and (retried.ratio, retried.cause) == (0.6, "fragmentation")
    grows = device_memory_risk(steps([(0.6, 0.62 + 0.001 * n) for n in range(150)]), CAPACITY)
    assert grows is not None and grows.cause == "fragmentation"
    assert grows.steps_left == pytest.approx(231, abs=4)


def test_what_others_take_is_told_apart() -> None:
    """Allocated stays; NCCL or another process grows into the room that is left."""
    risk = device_memory_risk(steps([(0.6, 0.62)] * 150, other=0.001), CAPACITY)
    assert risk is not None and risk.cause == "non-torch"
    assert risk.steps_left == pytest.approx(250, abs=4)


def test_the_targets_hold_on_a_part_of_the_labelled_set() -> None:
    """17 families once; `tests/bench/bench_forecast.py` runs hundreds, beside two baselines."""
    families = replay(each=1, seed=7, only=("zeromon",))["zeromon"]
    leaks = [score for name, score in families.items() if name.startswith("leak")]
    assert sum(score.caught for score in leaks) == sum(score.failing for score in leaks) == 4
    assert statistics.median(lead for score in leaks for lead in score.leads) >= 50
    assert sum(score.false_alarms for score in families.values()) <= 1
    real = [score for name, score in families.items() if name.startswith("recorded")]
    assert [score.caught for score in real] == [1, 0, 0]
    assert sum(score.false_alarms for score in real) == 0
    assert real[0].leads[0] >= 20  # of the 107 steps that it lasted


def test_a_growth_that_was_slower_for_a_while_began_before() -> None:
    """12.5 MiB per step since step 50, 9 for some steps, and a dip of one rank's RSS."""
    used, levels = 2 * GIB, []
    for step in range(1, 301):
        used += 0 if step < 50 else round((9 if 200 <= step < 240 else 12.5) * (1 << 20))
        used -= (60 << 20) if step == 260 else 0
        levels.append((step, used))
    risk = forecast_risk("host", levels, used + 17 * GIB)
    assert risk is not None and risk.cause == "growth"
    assert 45 <= risk.since_step <= 55
    assert risk.grown_bytes == pytest.approx(used - 2 * GIB, rel=0.02)


def test_a_quick_start_is_no_part_of_a_slow_growth() -> None:
    """100 MiB per step while caches fill, then 2 MiB per step from step 60 on."""
    levels, used = [], 2 * GIB
    for step in range(1, 401):
        used += (100 << 20) if step < 40 else (2 << 20) if step >= 60 else 0
        levels.append((step, used))
    risk = forecast_risk("host", levels, used + GIB)
    assert risk is not None and risk.cause == "growth" and 53 <= risk.since_step <= 63
