"""The Trace Event Format, as far as we write it: what Perfetto and chrome://tracing ask of a file."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

_WANTED = {"X": {"ts", "dur", "cat"}, "C": {"ts", "args"}, "i": {"ts", "s"}, "M": {"args"}}


def checked(content: dict[str, Any]) -> list[dict[str, Any]]:
    """The events, each well-formed; slices of a thread do not overlap, and threads have names."""
    assert content["displayTimeUnit"] in ("ms", "ns")
    events: list[dict[str, Any]] = content["traceEvents"]
    named: set[tuple[int, int]] = set()
    slices: dict[tuple[int, int], list[tuple[float, float]]] = {}
    for event in events:
        kind = event["ph"]
        assert _WANTED[kind] <= event.keys()
        assert isinstance(event["name"], str) and event["name"]
        assert all(isinstance(event[key], int) and event[key] >= 0 for key in ("pid", "tid"))
        assert isinstance(event["ts"], (int, float))
        if kind == "X":
            assert event["dur"] >= 0
            at = (event["pid"], event["tid"])
            slices.setdefault(at, []).append((event["ts"], event["ts"] + event["dur"]))
        elif kind == "C":
            assert event["args"]
            assert all(isinstance(value, (int, float)) for value in event["args"].values())
        elif kind == "i":
            assert event["s"] in ("g", "p", "t")
        else:
            assert event["name"] in ("process_name", "process_sort_index", "thread_name")
            named |= {(event["pid"], event["tid"])} if event["name"] == "thread_name" else set()
    assert slices.keys() <= named
    for spans in slices.values():
        ordered = sorted(spans)
        for (_, end), (start, _) in pairwise(ordered):
            assert start >= end - 1e-3  # to the nanosecond
    return events
