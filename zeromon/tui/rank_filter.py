"""The filter of ranks that the user types. Pure.

Words are joined by spaces, and all must hold: ``3`` or ``0-7,16`` are ranks; ``exposed>10`` and
``step<=0.5`` compare a column; anything else must be part of the node, unit, state or device.
"""

import operator
import re
from collections.abc import Callable

from zeromon.readout.figures import (
    EXPOSED,
    LATE,
    MEMORY,
    OVERLAP,
    RISK,
    SECONDS,
    STEP,
    STEPS,
    WAITS,
    Figure,
)
from zeromon.snapshot import RankSnapshot

Test = Callable[[RankSnapshot], bool]

_RANGES = re.compile(r"\d+(-\d+)?(,\d+(-\d+)?)*")
_COMPARED = re.compile(r"([a-z]+)(<=|>=|<|>|=)(-?\d+(?:\.\d+)?)%?")
_SIGNS = {
    "<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge, "=": operator.eq,
}  # fmt: skip


def _scaled_reader(figure: Figure) -> Callable[[RankSnapshot], float | None]:
    """Ratios in %, bytes in GiB; seconds as they are."""
    scale = 1.0 if figure.unit is SECONDS else figure.unit.scale

    def read_scaled(rank: RankSnapshot) -> float | None:
        value = figure.of_rank(rank)
        return None if value is None else scale * value

    return read_scaled


COMPARED: dict[str, Callable[[RankSnapshot], float | None]] = {
    "rank": lambda rank: rank.rank,
    **{f.name: _scaled_reader(f) for f in (STEPS, STEP, EXPOSED, OVERLAP, LATE, MEMORY, RISK)},
    "wait": _scaled_reader(WAITS),
}
"""Names that can be compared: seconds, %, GiB."""


def parse_rank_filter(filter_text: str) -> Test | None:
    """The test of a rank that *filter_text* describes; None for an empty filter."""
    tests = [_parse_condition(condition) for condition in filter_text.lower().split()]
    if not tests:
        return None
    if len(tests) == 1:
        return tests[0]
    return lambda rank: all(test(rank) for test in tests)


def _parse_condition(condition: str) -> Test:
    if _RANGES.fullmatch(condition):
        spans = [range_text.partition("-") for range_text in condition.split(",")]
        bounds = [(int(low), int(high or low)) for low, _, high in spans]
        return lambda rank: any(low <= rank.rank <= high for low, high in bounds)
    compared = _COMPARED.fullmatch(condition)
    if compared is not None and compared[1] in COMPARED:
        reader, compare, bound = COMPARED[compared[1]], _SIGNS[compared[2]], float(compared[3])

        def holds_for(rank: RankSnapshot) -> bool:
            value = reader(rank)
            return value is not None and compare(value, bound)

        return holds_for
    return lambda rank: any(
        condition in name.lower()
        for name in (rank.node, rank.unit, rank.ended or rank.phase, rank.device, rank.strategy)
    )
