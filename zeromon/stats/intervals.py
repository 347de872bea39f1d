"""Arithmetic on sets of half-open intervals of integers (nanoseconds).

A set is a sorted list of disjoint, non-touching ``(start, end)`` pairs with start < end;
:func:`union` makes one from any pairs. Pure.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator

Interval = tuple[int, int]


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """Returns the set that *intervals* cover; they may overlap and have any order."""
    merged: list[Interval] = []
    ordered = sorted(intervals)
    if not ordered:
        return merged
    begin, until = ordered[0][0], ordered[0][0]
    for start, end in ordered:
        if start > until:
            if until > begin:
                merged.append((begin, until))
            begin, until = start, start
        if end > until:
            until = end
    if until > begin:
        merged.append((begin, until))
    return merged


def length(intervals: Iterable[Interval]) -> int:
    """The total length of a set."""
    return sum(end - start for start, end in intervals)


def union_length(intervals: Iterable[Interval]) -> int:
    """The length of what *intervals* cover; they may overlap and have any order."""
    ordered = sorted(intervals)
    total, until = 0, ordered[0][0] if ordered else 0
    for start, end in ordered:
        if start > until:
            until = start
        if end > until:
            total += end - until
            until = end
    return total


def intersection(left: list[Interval], right: list[Interval]) -> list[Interval]:
    """The intersection of two sets."""
    common: list[Interval] = []
    i = j = 0
    while i < len(left) and j < len(right):
        a, end = left[i]
        start, b = right[j]
        if a > start:
            start = a
        if end < b:
            i += 1
        else:
            end = b
            j += 1
        if start < end:
            common.append((start, end))
    return common


def subtract(left: list[Interval], right: list[Interval]) -> list[Interval]:
    """The difference of two sets: the part of *left* that is not in *right*."""
    rest: list[Interval] = []
    j = 0
    for start, end in left:
        while j < len(right) and right[j][1] <= start:
            j += 1
        k = j
        while k < len(right) and right[k][0] < end:
            if right[k][0] > start:
                rest.append((start, right[k][0]))
            start = max(start, right[k][1])
            k += 1
        if start < end:
            rest.append((start, end))
    return rest


class Coverage:
    """A set that grows by one interval at a time, and its length."""

    __slots__ = ("_ends", "_last", "_starts", "length")

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._ends: list[int] = []
        self._last = -(1 << 63)
        """The end of the set."""
        self.length = 0

    def add(self, start: int, end: int) -> None:
        """Adds an interval, which may overlap those that are in the set."""
        if end <= start:
            return
        starts, ends = self._starts, self._ends
        if start > self._last:  # as most come: in order
            starts.append(start)
            ends.append(end)
            self._last = end
            self.length += end - start
            return
        first, after = bisect_left(ends, start), bisect_right(starts, end)
        if first < after:  # these overlap or touch it
            self.length -= sum(ends[first:after]) - sum(starts[first:after])
            start, end = min(start, starts[first]), max(end, ends[after - 1])
        self.length += end - start
        starts[first:after] = [start]
        ends[first:after] = [end]
        self._last = max(self._last, end)

    def __iter__(self) -> Iterator[Interval]:
        """The intervals of the set, in order."""
        return zip(self._starts, self._ends, strict=True)
