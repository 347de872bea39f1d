"""Arithmetic of time intervals: sorted, disjoint, half-open pairs of integers."""

from __future__ import annotations

from collections.abc import Iterable

Intervals = list[tuple[int, int]]


def union(spans: Iterable[tuple[int, int]]) -> Intervals:
    """The moments that are in any span."""
    merged: Intervals = []
    for start, stop in sorted(span for span in spans if span[0] < span[1]):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], stop))
        else:
            merged.append((start, stop))
    return merged


def intersect(spans: Intervals, others: Intervals) -> Intervals:
    """The moments that are in both."""
    common: Intervals = []
    i = j = 0
    while i < len(spans) and j < len(others):
        start, stop = max(spans[i][0], others[j][0]), min(spans[i][1], others[j][1])
        if start < stop:
            common.append((start, stop))
        if spans[i][1] < others[j][1]:
            i += 1
        else:
            j += 1
    return common


def subtract(spans: Intervals, others: Intervals) -> Intervals:
    """The moments of *spans* that are not in *others*."""
    if not spans:
        return []
    edges = [spans[0][0], *(edge for span in others for edge in span), spans[-1][1]]
    gaps = [(a, b) for a, b in zip(edges[::2], edges[1::2], strict=True) if a < b]
    return intersect(spans, union(gaps))


def clip(spans: Intervals, start: int, stop: int) -> Intervals:
    """The part of *spans* from *start* to *stop*."""
    return intersect(spans, [(start, stop)]) if start < stop else []


def length(spans: Intervals) -> int:
    """How long they are together."""
    return sum(stop - start for start, stop in spans)
