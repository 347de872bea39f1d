"""Arithmetic of time intervals: sorted, disjoint, half-open pairs of integers."""

from __future__ import annotations

from collections.abc import Iterable

Intervals = list[tuple[int, int]]


def union(spans: Iterable[tuple[int, int]]) -> Intervals:
    """The moments that are in any span."""
    merged: Intervals = []
    for start, end in sorted(span for span in spans if span[0] < span[1]):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((start, end))
    return merged


def intersect(left: Intervals, right: Intervals) -> Intervals:
    """The moments that are in both."""
    common: Intervals = []
    i = j = 0
    while i < len(left) and j < len(right):
        start, end = max(left[i][0], right[j][0]), min(left[i][1], right[j][1])
        if start < end:
            common.append((start, end))
        if left[i][1] < right[j][1]:
            i += 1
        else:
            j += 1
    return common


def subtract(left: Intervals, right: Intervals) -> Intervals:
    """The moments of *left* that are not in *right*."""
    if not left:
        return []
    edges = [left[0][0], *(edge for span in right for edge in span), left[-1][1]]
    gaps = [(a, b) for a, b in zip(edges[::2], edges[1::2], strict=True) if a < b]
    return intersect(left, union(gaps))


def clip(spans: Intervals, start: int, end: int) -> Intervals:
    """The part of *spans* from *start* to *end*."""
    return intersect(spans, [(start, end)]) if start < end else []


def length(spans: Intervals) -> int:
    """How long they are together."""
    return sum(end - start for start, end in spans)
