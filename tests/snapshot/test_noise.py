"""What is noise: runs of one program are not told apart, and one that is slower is."""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Callable, Iterator

import pytest

from zeromon.comparison.run_figures import METRIC, SPEED
from zeromon.snapshot.noise import (
    MIN_STEPS,
    Estimate,
    block_estimate,
    half_width,
    median_of,
    pooled_mean,
)

STEP_TIME = METRIC["step_time"]


def correlated(rng: random.Random, count: int, common: float) -> Iterator[float]:
    """A first-order autoregression of unit variance."""
    value = rng.gauss(0, 1)
    for _ in range(count):
        yield value
        value = common * value + math.sqrt(1 - common**2) * rng.gauss(0, 1)


def steady(common: float, spread: float = 0.03) -> Callable[[random.Random, int], list[float]]:
    return lambda rng, n: [0.1 * math.exp(spread * z) for z in correlated(rng, n, common)]


def spiky(rng: random.Random, count: int) -> list[float]:
    """Checkpoints, evaluations, a slow file system: one step in fifty takes up to ten times as long."""
    return [
        0.1 * math.exp(0.02 * z) * (rng.uniform(2, 10) if rng.random() < 0.02 else 1)
        for z in correlated(rng, count, 0.3)
    ]


def logging(rng: random.Random, count: int) -> list[float]:
    """Every tenth step is longer."""
    first = rng.randrange(10)
    return [
        0.1 * math.exp(0.02 * z) * (1.3 if (i + first) % 10 == 0 else 1)
        for i, z in enumerate(correlated(rng, count, 0.3))
    ]


def neighbour(rng: random.Random, count: int) -> list[float]:
    """Somebody else uses the machine half of the time, for thirty steps each."""
    busy, found = rng.random() < 0.5, []
    for z in correlated(rng, count, 0.3):
        busy ^= rng.random() < 1 / 30
        found.append(0.1 * math.exp(0.02 * z) * (1.2 if busy else 1))
    return found


FAMILIES = {
    "independent": (steady(0.0), 100),
    "correlated": (steady(0.5), 100),
    "strongly correlated": (steady(0.9), 100),
    "drifting": (steady(0.97), 300),
    "spiky": (spiky, 100),
    "logging": (logging, 100),
    "busy neighbour": (neighbour, 400),
}
SEEDS = 120


@pytest.mark.parametrize("family", FAMILIES)
def test_two_runs_of_one_program_are_not_marked_different(family: str) -> None:
    """In at most 5 % of pairs, whatever kind of noise their steps have."""
    make, count = FAMILIES[family]
    marked = 0
    for seed in range(SEEDS):
        rng = random.Random(seed)
        first, second = median_of(make(rng, count)), median_of(make(rng, count))
        marked += STEP_TIME.differ(first, second)
    assert marked <= 0.05 * SEEDS


@pytest.mark.parametrize("family", ["independent", "correlated", "spiky", "logging"])
def test_a_run_that_is_ten_percent_slower_is_marked(family: str) -> None:
    make, count = FAMILIES[family]
    for seed in range(SEEDS // 4):
        rng = random.Random(seed)
        first, second = (median_of(make(rng, count)), median_of(make(rng, count)).scaled(1.1))
        assert STEP_TIME.differ(first, second)
        assert SPEED.differ(first.inverted(), second.inverted())


def test_a_longer_run_tells_apart_what_a_shorter_one_cannot() -> None:
    """1.1 times as long under strongly correlated noise."""
    make, _ = FAMILIES["drifting"]
    found = {}
    for count in (100, 3000):
        rng = random.Random(5)
        pairs = [(median_of(make(rng, count)), median_of(make(rng, count))) for _ in range(20)]
        found[count] = sum(STEP_TIME.differ(a, b.scaled(1.1)) for a, b in pairs)
    assert found[3000] == 20 > found[100]


def test_the_same_steps_give_the_same_answer() -> None:
    make, count = FAMILIES["spiky"]
    values = make(random.Random(1), count)
    assert median_of(values) == median_of(list(values))
    assert median_of(values).value == statistics.median(values)


def test_of_few_steps_no_noise_is_known_and_nothing_is_marked() -> None:
    few = median_of([0.1] * (MIN_STEPS - 1))
    assert (few.value, few.error) == (0.1, None)
    assert half_width(few) is None
    assert not STEP_TIME.differ(few, Estimate(0.5))
    assert not STEP_TIME.differ(Estimate(0.5), few)


def test_what_never_varies_has_no_error_but_the_least_noise() -> None:
    same = block_estimate([7.0] * 100, statistics.fmean)
    assert (same.value, same.error, half_width(same, same)) == (7.0, 0.0, 0.0)
    assert not STEP_TIME.differ(same, Estimate(7.1))  # less than two runs differ by anyway
    assert STEP_TIME.differ(same, Estimate(7.2))


def test_the_interval_of_independent_means_is_the_textbooks() -> None:
    """Eight block means with no correlation in common: Student's t with 7 degrees of freedom."""
    rng = random.Random(3)
    covered = 0
    for _ in range(400):
        found = block_estimate([rng.gauss(0, 1) for _ in range(80)], statistics.fmean)
        width = half_width(found)
        assert width is not None
        covered += abs(found.value) <= width
    assert 0.98 * 400 <= covered < 400


@pytest.mark.parametrize(
    ("freedom", "quantile"), [(1, 63.66), (2, 9.925), (7, 3.499), (11, 3.169), (1e9, 2.617)]
)
def test_the_width_goes_by_students_t(freedom: float, quantile: float) -> None:
    """Between two lines of the table, by the wider one."""
    assert half_width(Estimate(1.0, 2.0, freedom)) == pytest.approx(2 * quantile)


def test_two_errors_add_up_by_their_squares() -> None:
    assert half_width(Estimate(1, 3.0), Estimate(2, 4.0)) == pytest.approx(5 * 2.617)
    one = Estimate(4.0, 0.4, 5)
    assert one.inverted() == Estimate(0.25, pytest.approx(0.025), 5)
    assert one.scaled(-2) == Estimate(-8.0, 0.8, 5)


def test_repeats_are_as_uncertain_as_they_differ() -> None:
    """Or as their own steps say, where that is more."""
    assert pooled_mean([Estimate(5.0, 1.0, 4)]) == Estimate(5.0, 1.0, 4)
    apart = pooled_mean([Estimate(v, 0.01, 5) for v in (1.0, 2.0, 3.0)])
    assert apart == Estimate(2.0, pytest.approx(1 / math.sqrt(3)), 2)
    alike = pooled_mean([Estimate(v, 3.0, 5) for v in (1.0, 1.1)])
    assert alike == Estimate(1.05, pytest.approx(3 / math.sqrt(2)), 5)
    short = pooled_mean([Estimate(v, None, 0) for v in (1.0, 3.0)])  # too few steps, but two runs
    assert short == Estimate(2.0, pytest.approx(1.0), 1)


def test_repeats_under_another_load_are_not_marked() -> None:
    """Each run is steady, but one of the three had a busy machine."""
    rng = random.Random(2)
    make, _ = FAMILIES["independent"]

    def runs(*factors: float) -> Estimate:
        return pooled_mean([median_of(make(rng, 200)).scaled(factor) for factor in factors])

    assert STEP_TIME.differ(median_of(make(rng, 200)), median_of(make(rng, 200)).scaled(1.5))
    assert not STEP_TIME.differ(runs(1, 1, 1.5), runs(1.5, 1, 1.5))
    assert STEP_TIME.differ(runs(1, 1, 1.01), runs(1.3, 1.3, 1.31))
