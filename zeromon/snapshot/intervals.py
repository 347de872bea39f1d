"""Arithmetic on sets of half-open intervals of integers (nanoseconds).

A set is a sorted list of disjoint, non-touching ``(start, end)`` pairs with start < end;
:func:`union_set` makes one from any pairs. Pure.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator

Interval = tuple[int, int]


def union_set(intervals: Iterable[Interval]) -> list[Interval]:
    """Returns the set that *intervals* cover; they may overlap and have any order."""
    merged: list[Interval] = []
    ordered = sorted(intervals)
    if not ordered:
        return merged
    low, high = ordered[0][0], ordered[0][0]
    for start, stop in ordered:
        if start > high:
            if high > low:
                merged.append((low, high))
            low, high = start, start
        if stop > high:
            high = stop
    if high > low:
        merged.append((low, high))
    return merged


def set_length(intervals: Iterable[Interval]) -> int:
    """The total length of a set."""
    return sum(stop - start for start, stop in intervals)


def union_length(intervals: Iterable[Interval]) -> int:
    """The length of what *intervals* cover; they may overlap and have any order."""
    return set_length(union_set(intervals))


def common_set(set_a: list[Interval], set_b: list[Interval]) -> list[Interval]:
    """The intersection of two sets."""
    common: list[Interval] = []
    i = j = 0
    while i < len(set_a) and j < len(set_b):
        a, stop = set_a[i]
        start, b = set_b[j]
        if a > start:
            start = a
        if stop < b:
            i += 1
        else:
            stop = b
            j += 1
        if start < stop:
            common.append((start, stop))
    return common


def subtract_set(minuend: list[Interval], subtrahend: list[Interval]) -> list[Interval]:
    """The difference of two sets: the part of *minuend* that is not in *subtrahend*."""
    difference: list[Interval] = []
    j = 0
    for start, stop in minuend:
        while j < len(subtrahend) and subtrahend[j][1] <= start:
            j += 1
        # The next interval may meet the same one of the subtrahend, so j stays
        k = j
        while k < len(subtrahend) and subtrahend[k][0] < stop:
            if subtrahend[k][0] > start:
                difference.append((start, subtrahend[k][0]))
            start = max(start, subtrahend[k][1])
            k += 1
        if start < stop:
            difference.append((start, stop))
    return difference


class Coverage:
    """A set that grows by one interval at a time, and its length."""

    __slots__ = ("_ends", "_last", "_starts", "length")

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._ends: list[int] = []
        self._last = -(1 << 63)
        """The end of the set."""
        self.length = 0

    def add(self, start: int, stop: int) -> None:
        """Adds an interval, which may overlap those that are in the set."""
        # An empty interval in the set breaks the order that bisect relies on
        if stop <= start:
            return
        starts, stops = self._starts, self._ends
        if start > self._last:  # as most come: in order
            starts.append(start)
            stops.append(stop)
            self._last = stop
            self.length += stop - start
            return
        lo, hi = bisect_left(stops, start), bisect_right(starts, stop)
        if lo < hi:  # these overlap or touch it
            self.length -= sum(stops[lo:hi]) - sum(starts[lo:hi])
            start, stop = min(start, starts[lo]), max(stop, stops[hi - 1])
        self.length += stop - start
        starts[lo:hi] = [start]
        stops[lo:hi] = [stop]
        self._last = max(self._last, stop)

    def __iter__(self) -> Iterator[Interval]:
        """The intervals of the set, in order."""
        return zip(self._starts, self._ends, strict=True)
