"""The gain of a change that is on and off in turns."""

from __future__ import annotations

import pytest

from zeromon.snapshot.noise import gain_in_turns, half_width


def test_a_linear_drift_cancels() -> None:
    states = [0.0, -2.0, -2.0, 0.0] * 4
    gain = gain_in_turns([10 + 0.5 * n + state for n, state in enumerate(states)])
    assert gain is not None
    assert gain.value == pytest.approx(2.0) and gain.error == pytest.approx(0.0)


def test_few_rounds_have_no_known_error() -> None:
    assert gain_in_turns([1.0, 2.0, 3.0]) is None
    gain = gain_in_turns([3.0, 1.0, 1.0, 3.0] * 2)
    assert gain is not None and gain.error is None and half_width(gain) is None


def test_noise_widens_the_interval_and_its_coverage_holds() -> None:
    """Of 400 trials of no change at all, about one in a hundred is called significant."""
    import random

    chance = random.Random(1)
    wrong = 0
    for _ in range(400):
        gain = gain_in_turns([10 + chance.gauss(0, 1) for _ in range(24)])
        assert gain is not None
        width = half_width(gain)
        wrong += width is not None and abs(gain.value) > width
    assert wrong <= 10
