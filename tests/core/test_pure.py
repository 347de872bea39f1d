"""Intervals against brute force, bandwidths against nccl-tests, numbers for people."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zeromon.comms import algbw, busbw, overlap_ratio
from zeromon.events import Op
from zeromon.intervals import intersection, length, subtract, union
from zeromon.units import human_bytes, human_rate, human_ratio, human_seconds

PAIRS = st.lists(st.tuples(st.integers(0, 60), st.integers(0, 60)), max_size=12)


def covered(intervals: list[tuple[int, int]]) -> set[int]:
    return {point for start, end in intervals for point in range(start, end)}


def is_set(intervals: list[tuple[int, int]]) -> bool:
    """Sorted, disjoint, not touching, none empty."""
    return all(s < e for s, e in intervals) and all(
        a[1] < b[0] for a, b in itertools.pairwise(intervals)
    )


@given(PAIRS)
def test_union_covers_the_same_points(pairs: list[tuple[int, int]]) -> None:
    """And is a set."""
    assert covered(union(pairs)) == covered(pairs)
    assert is_set(union(pairs))
    assert length(union(pairs)) == len(covered(pairs))


@given(PAIRS, PAIRS)
def test_intersection_and_subtraction_agree_with_points(
    left: list[tuple[int, int]], right: list[tuple[int, int]]
) -> None:
    """Point by point."""
    a, b = union(left), union(right)
    assert covered(intersection(a, b)) == covered(a) & covered(b)
    assert covered(subtract(a, b)) == covered(a) - covered(b)
    assert is_set(subtract(a, b))
    assert length(intersection(a, b)) + length(subtract(a, b)) == length(a)


@pytest.mark.parametrize(
    ("op", "ranks", "factor"),
    [
        # nccl-tests, doc/PERFORMANCE.md
        (Op.ALL_REDUCE, 8, 2 * 7 / 8),
        (Op.ALL_GATHER, 8, 7 / 8),
        (Op.REDUCE_SCATTER, 8, 7 / 8),
        (Op.ALL_TO_ALL, 4, 3 / 4),
        (Op.BROADCAST, 8, 1),
        (Op.REDUCE, 8, 1),
        (Op.SEND, 2, 1),
    ],
)
def test_busbw_is_algbw_times_the_factor_of_nccl_tests(op: Op, ranks: int, factor: float) -> None:
    """8 GB in 2 s."""
    assert busbw(op, 8_000_000_000, 2.0, ranks) == pytest.approx(4e9 * factor)


def test_bandwidth_without_meaning_is_none() -> None:
    """A barrier, no time, a group of one."""
    assert busbw(Op.BARRIER, 0, 1.0, 8) is None
    assert busbw(Op.ALL_REDUCE, 8, 0.0, 8) is None
    assert busbw(Op.ALL_REDUCE, 8, 1.0, 1) is None
    assert algbw(8, 0.0) is None


def test_overlap_without_communication_is_undefined_not_zero() -> None:
    """|C| = 0."""
    assert overlap_ratio(0, 0) is None
    assert overlap_ratio(100, 40) == pytest.approx(0.6)
    assert overlap_ratio(100, 130) == 0.0


def test_numbers_for_people() -> None:
    """Binary bytes, decimal rates, sensible digits."""
    assert human_bytes(1536) == "1.5 KiB"
    assert human_bytes(-1) == human_bytes(None) == "n/a"
    assert human_bytes(3 * 2**40) == "3.0 TiB"
    assert human_seconds(0.0123) == "12.3 ms"
    assert human_seconds(0.000012) == "12 us"
    assert human_seconds(200) == "3 min 20 s"
    assert human_seconds(7260) == "2 h 01 min"
    assert human_rate(1.5e9) == "1.50 GB/s"
    assert human_ratio(0.123) == "12.3 %"
    assert human_ratio(None) == "n/a"
