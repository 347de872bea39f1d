"""Sets of intervals against brute force."""

from __future__ import annotations

import itertools

from hypothesis import given, strategies as st

from zeromon.snapshot.intervals import (
    Coverage,
    common_set,
    set_length,
    subtract_set,
    union_length,
    union_set,
)

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
    assert covered(union_set(pairs)) == covered(pairs)
    assert is_set(union_set(pairs))
    assert set_length(union_set(pairs)) == union_length(pairs) == len(covered(pairs))


@given(PAIRS, PAIRS)
def test_intersection_and_subtraction_agree_with_points(
    left: list[tuple[int, int]], right: list[tuple[int, int]]
) -> None:
    """Point by point."""
    a, b = union_set(left), union_set(right)
    assert covered(common_set(a, b)) == covered(a) & covered(b)
    assert covered(subtract_set(a, b)) == covered(a) - covered(b)
    assert is_set(subtract_set(a, b))
    assert set_length(common_set(a, b)) + set_length(subtract_set(a, b)) == set_length(a)


@given(PAIRS)
def test_a_coverage_is_the_union_of_what_was_added(pairs: list[tuple[int, int]]) -> None:
    grown = Coverage()
    for start, end in pairs:
        grown.add(start, end)
    assert list(grown) == union_set(pairs)
    assert grown.length == set_length(union_set(pairs))
