"""The time that the order of a pipeline's actions takes."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from torch.distributed.pipelining import schedules

from zeromon.ring.codes import StageAction
from zeromon.snapshot.communication import (
    Act,
    balanced_seconds,
    parse_schedule,
    schedule_notation,
    simulate_schedule,
    with_more,
)

F, B, BI, BW = (StageAction(n) for n in range(1, 5))
TWO_STAGES_A_RANK = ("Interleaved1F1B", "InterleavedZeroBubble", "ZBVZeroBubble")


def orders_of(name: str, ranks: int, chunks: int) -> list[list[Act]]:
    """The actions of each rank: as torch runs GPipe and 1F1B, and by its own table of the others.

    torch 2.13 also has a table of 1F1B, which it does not run: the last stage's begins with forward 1.
    """
    if name in ("GPipe", "1F1B"):
        ahead = [chunks if name == "GPipe" else min(chunks, ranks - rank) for rank in range(ranks)]
        return [single(rank, chunks, first) for rank, first in enumerate(ahead)]
    stages = [
        SimpleNamespace(
            num_stages=ranks * 2, group_size=ranks, group_rank=0, stage_index=n * ranks, submod=None
        )
        for n in range(2)
    ]
    table = schedules.get_schedule_class(name)(stages, chunks, loss_fn=print).pipeline_order
    return [
        parse_schedule(" ".join(str(a) for a in table[rank] if a is not None)) for rank in range(ranks)
    ]


def single(stage: int, chunks: int, ahead: int) -> list[Act]:
    """So many forwards *ahead*, then a backward and a forward in turns."""
    forwards = [Act(stage, F, n) for n in range(chunks)]
    order = forwards[:ahead]
    for n in range(chunks):
        order += [Act(stage, B, n), *forwards[ahead + n : ahead + n + 1]]
    return order


def seconds(
    stages: int, forward: float = 1.0, backward: float = 2.0
) -> dict[tuple[int, StageAction], float]:
    half = backward / 2
    times = {F: forward, B: backward, BI: half, BW: half}
    return {(stage, action): spent for stage in range(stages) for action, spent in times.items()}


def bubble(orders: list[list[Act]], spent: dict[tuple[int, StageAction], float]) -> float:
    """The idle share, mean of the ranks."""
    runs = simulate_schedule(orders, spent)
    assert runs is not None
    longest = max(run.span for run in runs)
    return 1 - sum(run.busy for run in runs) / len(runs) / longest


@pytest.mark.parametrize("name", ["GPipe", "1F1B"])
@pytest.mark.parametrize(("ranks", "chunks"), [(2, 2), (2, 4), (4, 4), (4, 16), (8, 32)])
def test_the_bubble_of_equal_stages_is_that_of_the_formula(name: str, ranks: int, chunks: int) -> None:
    """(p - 1) / (m + p - 1), Narayanan et al. 2021."""
    expected = (ranks - 1) / (chunks + ranks - 1)
    assert bubble(orders_of(name, ranks, chunks), seconds(ranks)) == pytest.approx(expected)


@pytest.mark.parametrize(("ranks", "chunks"), [(2, 4), (4, 8), (4, 16)])
def test_several_stages_a_rank_divide_the_bubble(ranks: int, chunks: int) -> None:
    """(p - 1) / (v m + p - 1) with v stages a rank."""
    spent = seconds(2 * ranks)
    expected = (ranks - 1) / (2 * chunks + ranks - 1)
    assert bubble(orders_of("Interleaved1F1B", ranks, chunks), spent) == pytest.approx(expected)


@pytest.mark.parametrize("ranks", [2, 4])
def test_zero_bubble_has_none_where_all_actions_take_equally_long(ranks: int) -> None:
    """Qi et al. 2023: ZB-V."""
    orders = orders_of("ZBVZeroBubble", ranks, 4 * ranks)
    assert bubble(orders, seconds(2 * ranks, 1.0, 2.0)) == pytest.approx(0.0, abs=1e-9)


def test_zero_bubble_has_less_than_interleaved() -> None:
    interleaved, zero = (bubble(orders_of(name, 4, 8), seconds(8)) for name in TWO_STAGES_A_RANK[:2])
    assert 0 < zero < interleaved


def test_stages_wait_for_a_slow_one() -> None:
    """Two stages, the second twice as slow: the first one works half of the time, and fills."""
    spent = {(0, F): 1.0, (0, B): 1.0, (1, F): 2.0, (1, B): 2.0}
    runs = simulate_schedule(orders_of("GPipe", 2, 8), spent)
    assert runs is not None
    assert [run.busy for run in runs] == [16.0, 32.0]
    assert max(run.span for run in runs) == 34.0  # a forward before it, a backward after it
    even = simulate_schedule(orders_of("GPipe", 2, 8), balanced_seconds(spent))
    assert even is not None
    assert [run.busy for run in even] == [24.0, 24.0]
    assert max(run.span for run in even) == 27.0


@pytest.mark.parametrize("name", ["GPipe", "1F1B", "Interleaved1F1B"])
@pytest.mark.parametrize("slow", [1.0, 1.7])
def test_more_micro_batches_are_predicted_as_the_schedule_with_them_does(name: str, slow: float) -> None:
    stages = 8 if name in TWO_STAGES_A_RANK else 4
    whole = seconds(stages)
    whole |= {key: slow * spent for key, spent in whole.items() if key[0] == stages - 1}
    half = {key: spent / 2 for key, spent in whole.items()}
    before, after = (
        simulate_schedule(orders_of(name, 4, 8), whole),
        simulate_schedule(orders_of(name, 4, 16), half),
    )
    assert before is not None and after is not None
    predicted = with_more(max(r.span for r in before), max(r.busy for r in before))
    assert predicted == pytest.approx(max(r.span for r in after), rel=0.03)


def test_orders_that_wait_for_each_other_have_no_time() -> None:
    assert simulate_schedule([parse_schedule("0F0 0B0"), parse_schedule("1F1 1B1")], seconds(2)) is None


def test_an_order_is_read_as_torch_writes_it() -> None:
    text = "0F0 0F1 2I0 2W0 0B1"
    assert schedule_notation(parse_schedule(text)) == text
    assert parse_schedule("0F0 3RECV_F1 0REDUCE_GRAD") == [Act(0, F, 0)]
