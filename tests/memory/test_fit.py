"""What to launch next, what fits, and which stage to take."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace

import pytest

from zeromon.memory.fit import (
    DEVICE,
    HOST,
    MAX_LAUNCHES,
    RESERVE,
    Trial,
    cheapest_first,
    cheapest_trial,
    fitted_line,
    largest_fitting_size,
    least_memory_first,
    loses_beyond_noise,
    next_device_count,
    next_size,
    next_stage,
    recommend_fastest_stage,
    rows_of_stages,
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


def launched_on(devices: int, needs: int) -> Trial:
    outcome = "" if devices >= needs else "out of memory"
    return Trial(stage="", micro_batch=1, devices=devices, outcome=outcome)


@pytest.mark.parametrize("needs", range(1, 11))
@pytest.mark.parametrize("counts", [[1, 2, 4, 8], [3], list(range(1, 9)), [2, 6, 8]])
def test_the_fewest_devices_are_found_by_halves(needs: int, counts: list[int]) -> None:
    trials: list[Trial] = []
    while (count := next_device_count(trials, counts)) is not None:
        assert count not in {t.devices for t in trials}
        trials.append(launched_on(count, needs))
    assert len(trials) <= len(counts).bit_length()
    enough = min((t.devices for t in trials if t.fits), default=None)
    assert enough == min((n for n in counts if n >= needs), default=None)
    # The next smaller number has run, and does not fit
    fewer = [n for n in counts if enough is None or n < enough]
    assert not fewer or max(t.devices for t in trials if not t.fits) == fewer[-1]


def test_a_larger_launch_comes_after_a_smaller_one() -> None:
    assert next_device_count([], [1, 2, 4, 8]) == 2
    assert next_device_count([launched_on(2, 8)], [1, 2, 4, 8]) == 4


def test_a_search_goes_on_from_another_one() -> None:
    """That one had other counts: 2 devices are enough, and the question is now between 1 and 4."""
    trials = [launched_on(2, 2), launched_on(1, 2)]
    assert next_device_count(trials, [1, 4]) == 4
    assert next_device_count([*trials, launched_on(4, 2)], [1, 4]) is None


def setup_of(framework: str) -> Setup:
    plan = ShardPlan(
        stage=ZeroStage.PARAMETERS, ranks=8, framework=framework, precision=Precision.mixed()
    )
    return Setup(model=from_count(50_000_000, name="m"), plan=plan, device_bytes=80 << 30)


def search_order(names: list[str], setup: Setup | None, fits: set[str]) -> list[str]:
    """The stages of a search, in the order of their launches, where those of *fits* fit."""
    order = cheapest_first(names, rows_of_stages(names, setup))
    trials: list[Trial] = []
    while (stage := next_stage(trials, order, names[0])) is not None:
        outcome = "" if stage in fits else "out of memory"
        trials.append(Trial(stage=stage, micro_batch=1, outcome=outcome))
    chosen = cheapest_trial(trials, order)
    return [*(t.stage for t in trials), f"={chosen.stage if chosen is not None else None}"]


def test_stages_are_launched_from_the_cheapest_until_one_fits() -> None:
    """The first is the one with the least memory, from whose run the cost of the others is known."""
    names = least_memory_first(["ddp", "fsdp2-zero2", "fsdp2"])
    fsdp = setup_of("fsdp2")
    assert search_order(names, fsdp, {"ddp", "fsdp2-zero2", "fsdp2"}) == ["fsdp2", "ddp", "=ddp"]
    assert search_order(names, fsdp, {"fsdp2-zero2", "fsdp2"}) == [
        "fsdp2", "ddp", "fsdp2-zero2", "=fsdp2-zero2",
    ]  # fmt: skip
    assert search_order(names, fsdp, {"fsdp2"}) == ["fsdp2", "ddp", "fsdp2-zero2", "=fsdp2"]
    # The arithmetic may be wrong about what needs the least memory: all are launched
    assert search_order(names, fsdp, set()) == ["fsdp2", "ddp", "fsdp2-zero2", "=None"]
    assert search_order(names, fsdp, {"fsdp2-zero2"})[-1] == "=fsdp2-zero2"
    assert search_order(["fsdp2", "ddp", "mine"], None, {"mine"}) == ["fsdp2", "ddp", "mine", "=mine"]


def test_the_order_of_stages_is_that_of_the_bytes_which_they_send() -> None:
    names = ["3", "2", "1", "0"]
    rows = rows_of_stages(names, setup_of("deepspeed"))
    order = cheapest_first(names, rows)
    sent = [rows[name].communication_bytes for name in order]
    # Of stages that send about as much, the lowest comes first
    assert all(earlier * 0.9 <= later for earlier, later in itertools.pairwise(sent))
    assert order[0] == "0" and order.index("1") < order.index("2")


def test_of_the_stages_that_fit_the_one_with_much_shorter_steps_is_the_cheapest() -> None:
    slow = Trial(stage="ddp", micro_batch=1, seconds=2.0)
    fast = Trial(stage="fsdp2", micro_batch=1, seconds=1.0)
    order = ["ddp", "fsdp2"]
    assert cheapest_trial([slow, fast], order) is fast
    assert cheapest_trial([replace(slow, seconds=1.05), fast], order) == replace(slow, seconds=1.05)
    assert cheapest_trial([slow, replace(fast, seconds=None)], order) is slow
