"""Which ranks the user wants to see. Pure.

Words are joined by spaces, and all must hold: ``3`` or ``0-7,16`` are ranks; ``exposed>10`` and
``step<=0.5`` compare a column; anything else must be part of the node, unit, state or device.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable

from zeromon.snapshot import RankSnapshot

Test = Callable[[RankSnapshot], bool]

_RANGES = re.compile(r"\d+(-\d+)?(,\d+(-\d+)?)*")
_COMPARED = re.compile(r"([a-z]+)(<=|>=|<|>|=)(-?\d+(?:\.\d+)?)%?")
_SIGNS = {
    "<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge, "=": operator.eq,
}  # fmt: skip


def _percent(value: float | None) -> float | None:
    return None if value is None else 100 * value


def _risk(rank: RankSnapshot) -> float | None:
    return _percent(max((risk.ratio for risk in rank.risks), default=None))


def held_bytes(rank: RankSnapshot) -> int:
    """Reserved on the device, or resident on the host where there is none."""
    return rank.memory.reserved_bytes if rank.memory else rank.rss_bytes


FIGURES: dict[str, Callable[[RankSnapshot], float | None]] = {
    "rank": lambda r: r.rank,
    "steps": lambda r: r.step,
    "step": lambda r: r.step_seconds,
    "exposed": lambda r: _percent(r.exposed_ratio),
    "overlap": lambda r: _percent(r.overlap_ratio),
    "late": lambda r: r.late_seconds,
    "wait": lambda r: r.wait_seconds,
    "memory": lambda r: held_bytes(r) / 2**30,
    "risk": _risk,
}
"""Names that can be compared: seconds, %, GiB."""


def test_of(text: str) -> Test | None:
    """What *text* asks of a rank; None when it asks nothing."""
    tests = [_test(word) for word in text.lower().split()]
    if not tests:
        return None
    if len(tests) == 1:
        return tests[0]
    return lambda rank: all(test(rank) for test in tests)


def _test(word: str) -> Test:
    if _RANGES.fullmatch(word):
        spans = [part.partition("-") for part in word.split(",")]
        bounds = [(int(low), int(high or low)) for low, _, high in spans]
        return lambda rank: any(low <= rank.rank <= high for low, high in bounds)
    compared = _COMPARED.fullmatch(word)
    if compared is not None and compared[1] in FIGURES:
        read, holds, bound = FIGURES[compared[1]], _SIGNS[compared[2]], float(compared[3])

        def holds_for(rank: RankSnapshot) -> bool:
            value = read(rank)
            return value is not None and holds(value, bound)

        return holds_for
    return lambda rank: any(
        word in part.lower()
        for part in (rank.node, rank.unit, rank.ended or rank.phase, rank.device, rank.strategy)
    )
