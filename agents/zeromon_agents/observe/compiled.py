"""The work of torch.compile in this process, by its own counters. Imports nothing, and only reads."""

import sys
from collections import Counter
from collections.abc import Iterable
from typing import Any

from zeromon.ring.model_metadata import CompiledMetadata

_SHOWN, _LONGEST = 3, 160
_GROWTH = 1.25


class Compiled:
    """Tells when there is something new, less often the longer the process trains."""

    def __init__(self) -> None:
        self._frames = 0
        self._from_step = 0.0

    def news(self, step: int) -> CompiledMetadata | None:
        """Returns all that dynamo has counted, where it has compiled since the last time; else None.

        Call it on the training thread, where dynamo compiles.
        """
        utils = sys.modules.get("torch._dynamo.utils")
        frames = 0 if utils is None else utils.counters.get("frames", {}).get("ok", 0)
        if utils is None or frames == self._frames or step < self._from_step:
            return None
        self._frames, self._from_step = frames, _GROWTH * step
        breaks = Counter(utils.counters.get("graph_break", {}))
        # absent from torch 2.6
        metrics: list[Any] = getattr(utils, "get_compilation_metrics", list)()
        recompiles = Counter(filter(None, (getattr(m, "recompile_reason", None) for m in metrics)))
        return {
            "frames": frames,
            "graph_breaks": breaks.total(),
            "recompiles": recompiles.total(),
            "break_reasons": _frequent_reasons(breaks.items()),
            "recompile_reasons": _frequent_reasons(recompiles.items()),
        }


def _frequent_reasons(counted: Iterable[tuple[str, int]]) -> list[str]:
    """The most frequent reasons: ``3 x s.n == 0``."""
    reasons: Counter[str] = Counter()
    for reason, count in counted:
        reasons[_short_reason(reason)] += count
    return [f"{count} x {reason}" for reason, count in reasons.most_common(_SHOWN)]


def _short_reason(reason: str) -> str:
    """The explanation of a break, or the guard without its cache entry (``0/1:``) and its values."""
    _, _, explained = reason.partition("Explanation: ")
    head = (explained or reason).partition("\n")[0].partition("  #")[0].partition(". expected ")[0]
    entry, _, guard = head.partition(": ")
    return (guard if entry.replace("/", "").isdigit() else head).strip()[:_LONGEST]
