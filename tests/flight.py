"""Reads the c10d Flight Recorder's entries: an independent count of collectives, made in C++."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

ITEM = {"Float": 4, "Long": 8, "Int": 4, "BFloat16": 2, "Half": 2, "Double": 8, "Byte": 1, "Char": 1}
AS_GLOO_SAYS = {"reduce_scatter": "all_reduce"}
"""Gloo performs a reduce-scatter as an all-reduce, and its Flight Recorder says so."""


def by_gloo_op(series: dict[tuple[str, ...], float], rank: str) -> Counter[str]:
    """A metric with labels group, op, added up under gloo's names."""
    found: Counter[str] = Counter()
    for (of_rank, _, op), value in series.items():
        if of_rank == rank:
            found[AS_GLOO_SAYS.get(op, op)] += int(value)
    return found


def unattributed(metrics: dict[str, dict[tuple[str, ...], float]], rank: str) -> int:
    """Collectives of unknown operation."""
    series = metrics.get("zeromon_collectives_unattributed_total", {})
    return int(sum(value for (of_rank, *_), value in series.items() if of_rank == rank))


def numel(sizes: list[list[int]]) -> int:
    """Elements of all tensors."""
    return sum(map(math.prod, sizes))


def flight_counts(facts: dict[str, Any], ranks: int = 1) -> tuple[Counter[str], Counter[str]]:
    """Calls and bytes by operation, from the Flight Recorder.

    Of a functional all-gather gloo's recorder keeps one rank's part of the output: such a part counts
    for each of the *ranks*.
    """
    calls: Counter[str] = Counter()
    nbytes: Counter[str] = Counter()
    for entry in facts["flight"]:
        op = entry["profiling_name"].removeprefix("gloo:").lstrip("_")
        side = "output" if op == "all_gather" else "input"
        calls[op] += 1
        part = op == "all_gather" and numel(entry["output_sizes"]) == numel(entry["input_sizes"])
        nbytes[op] += (ranks if part else 1) * sum(
            math.prod(size) * ITEM[dtype]
            for size, dtype in zip(entry[f"{side}_sizes"], entry[f"{side}_dtypes"], strict=False)
        )
    return calls, nbytes
