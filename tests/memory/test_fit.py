"""What to launch next, what fits, and which stage to take."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from zeromon.memory.fit import (
    DEVICE,
    HOST,
    MAX_LAUNCHES,
    RESERVE,
    Trial,
    fitted_line,
    largest_fitting_size,
    least_memory_first,
    loses_beyond_noise,
    next_size,
    recommend_fastest_stage,
    second_launch_size,
    stages_of_trials,
)  # fmt: skip
from zeromon.memory.models import from_count
from zeromon.memory.plan import Setup
from zeromon.memory.spec import Precision, ShardPlan, ZeroStage
from zeromon.snapshot.noise import Estimate

MB = 1 << 20
SIZES = list(range(1, 257))
KERNEL = 0.015
"""The share of a limit from which a command gives its time to the kernel, as bench_fit.py saw."""


def trial(size: int, peak: int, *, pool: str = HOST, room: int = 1000 * MB, **facts: object) -> Trial:
    return Trial(
        stage="", micro_batch=size, peaks={pool: peak}, rooms={pool: room}, base_bytes=300 * MB,
        **facts,  # type: ignore[arg-type]
    )  # fmt: skip


def launched(size: int, room: int, peak: float) -> Trial:
    """What a launch tells: beyond the room it is stopped."""
    if peak > 0.99 * room:
        return trial(size, room, room=room, outcome="host memory would have run out")
    return trial(size, round(peak), room=room)


def test_the_line_goes_through_the_two_largest_that_fit() -> None:
    known = [
        trial(1, 500 * MB),
        trial(4, 500 * MB),
        trial(8, 540 * MB),
        trial(9, 990 * MB, outcome="stopped"),
    ]
    found = fitted_line(known, HOST)
    assert found is not None
    assert (found.each, found.at(10)) == (10 * MB, 560 * MB)
    assert fitted_line(known[:1], HOST) is None


@pytest.mark.parametrize("noise", [0.0, 0.004])
def test_at_any_limit_the_search_ends_at_the_truth_or_one_step_below(noise: float) -> None:
    chance = random.Random(3)
    cases = good = 0
    for limit in range(560, 1960, 70):
        for each in (20, 45):
            room = limit * MB
            peak = lambda size: (450 + each * size) * MB * (1 + chance.uniform(-noise, noise))  # noqa: B023, E731
            truth = max(n for n in SIZES if (450 + each * n) * MB <= (1 - KERNEL) * room)
            trials: list[Trial] = []
            while (size := next_size(trials, SIZES, MAX_LAUNCHES - len(trials))) is not None:
                trials.append(launched(size, room, peak(size)))
            assert len(trials) <= MAX_LAUNCHES
            found = max((t.micro_batch for t in trials if t.fits), default=0)
            cases += 1
            good += truth - 1 <= found <= truth
    assert good >= 0.95 * cases


def test_the_second_launch_surely_fits() -> None:
    """A sample takes at most what the first launch took beyond the processes without a model."""
    first = trial(1, 500 * MB)
    size = second_launch_size(first, SIZES)
    assert size is not None and 1 < size <= 8
    assert 500 * MB + (size - 1) * (500 - 300) * MB <= 1000 * MB
    assert second_launch_size(trial(2, 100 * MB, pool=DEVICE, room=1000 * MB), SIZES) == 16


def test_the_scarcer_memory_decides() -> None:
    both = [
        Trial(stage="", micro_batch=n, peaks={HOST: (100 + n) * MB, DEVICE: 10 * n * MB},
              rooms={HOST: 1000 * MB, DEVICE: 100 * MB})
        for n in (1, 2)
    ]  # fmt: skip
    assert largest_fitting_size(both, SIZES) == int(10 * (1 - RESERVE[DEVICE]))
    assert largest_fitting_size(both, SIZES, {HOST: 875.0 * MB}) == 5
    assert largest_fitting_size(both[:1], SIZES) is None


def test_what_was_stopped_is_not_launched_again() -> None:
    known = [trial(1, 400 * MB), trial(2, 410 * MB), trial(20, 1000 * MB, outcome="stopped")]
    size = next_size(known, SIZES, 1)
    assert size is not None and 2 < size < 20
    assert next_size([trial(1, 990 * MB, outcome="stopped")], SIZES, 3) is None
    assert next_size(known, SIZES, 0) is None


def test_a_loser_is_one_beyond_the_noise_of_both() -> None:
    assert loses_beyond_noise(Estimate(1.2, 0.01, 7), Estimate(1.0, 0.01, 7))
    assert not loses_beyond_noise(Estimate(1.02, 0.01, 7), Estimate(1.0, 0.01, 7))
    assert not loses_beyond_noise(Estimate(2.0, None, 0), Estimate(1.0, 0.01, 7))


def test_other_stages_move_by_the_difference_of_their_states() -> None:
    plan = ShardPlan(
        stage=ZeroStage.PARAMETERS, ranks=2, framework="deepspeed", precision=Precision.mixed()
    )
    setup = Setup(model=from_count(50_000_000, name="m"), plan=plan, device_bytes=80 << 30)
    first = [
        Trial(stage="3", micro_batch=n, peaks={HOST: (1000 + 50 * n) * MB}, rooms={HOST: 3000 * MB},
              seconds=0.1 * n, samples=2.0 * n)
        for n in (1, 20)
    ]  # fmt: skip
    zero3, zero0, other = stages_of_trials(["3", "0", "mystery"], first, SIZES, setup, "")
    assert (zero3.largest, zero3.measured) == (38, False)
    assert zero3.seconds == pytest.approx(3.8)
    assert zero0.largest is not None and zero0.largest < 38
    assert not zero0.measured and zero0.roles["optimizer_state"] > zero3.roles["optimizer_state"]
    assert zero0.seconds is None and zero0.why.startswith("seconds: ")
    assert other.largest is None and "no arithmetic" in other.why
    assert recommend_fastest_stage([zero3, zero0, other]) is zero3
    (alone,) = stages_of_trials(["3"], first, SIZES, setup, "")
    assert (alone.largest, alone.measured, alone.why) == (20, True, "more may fit: 38 by the line")


def test_the_stage_with_the_least_memory_is_first() -> None:
    assert least_memory_first(["ddp", "what", "fsdp2", "fsdp2-zero2"]) == [
        "fsdp2",
        "fsdp2-zero2",
        "ddp",
        "what",
    ]


def test_the_command_alone_has_the_memory_of_fit_too() -> None:
    """The largest that ran beside it took 92 % of the room: three samples fit in its 30 MB."""
    known = [
        trial(n, (500 + 10 * n) * MB, own_bytes=30 * MB, seconds=1.0, samples=2.0 * n) for n in (20, 48)
    ]
    [stage] = stages_of_trials([""], known, SIZES, None, "")
    assert (stage.largest, stage.alone, stage.advised) == (48, 51, 51)
    far = [replace(t, micro_batch=t.micro_batch // 4) for t in known[:1]] + known[:1]
    [stage] = stages_of_trials([""], far, SIZES, None, "")
    assert (stage.alone, stage.advised) == (None, 20)


def test_sizes_that_differ_little_count_together() -> None:
    known = [trial(4, 540 * MB), trial(19, 705 * MB), trial(21, 695 * MB)]
    found = fitted_line(known, HOST)
    assert found is not None
    assert (found.at(4), found.at(20)) == (540 * MB, 700 * MB)
