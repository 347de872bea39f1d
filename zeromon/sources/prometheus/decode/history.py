"""Range queries in, step history out: the steps of single ranks and of the whole run. Pure."""

from collections.abc import Mapping, Sequence
from typing import Any

from zeromon.ring.events import Phase
from zeromon.sources.prometheus.client import Line
from zeromon.sources.prometheus.decode.samples import key_of
from zeromon.storage.step_history import ABSENT, LEAST, MEDIAN, MOST, NAMES, UNTIMED, Series

_INSTEAD = {"most": MOST, "median": MEDIAN, "least": LEAST}


def series_of(lines: Sequence[Line], interval: float) -> Series:
    """The answer to :func:`zeromon.sources.prometheus.promql.steps_over_time`: a row a rank and moment.

    A moment at which a rank has no step is a gap. Rows of one moment have the same step number, that of
    the rank with the most steps.
    """
    cells: dict[int, dict[float, dict[str, float]]] = {}
    for line in lines:
        key = key_of(line.labels)
        if key is None:
            continue
        name = line.labels.get("phase") or line.labels.get("figure") or line.labels.get("of", "")
        _fill(cells.setdefault(key.rank, {}), name, line)
    return _rows(cells, interval)


def whole_series_of(lines: Sequence[Line], interval: float) -> Series:
    """The answer to :func:`zeromon.sources.prometheus.promql.whole_over_time`: max, median, min."""
    cells: dict[int, dict[float, dict[str, float]]] = {}
    for line in lines:
        of, figure = line.labels.get("of", ""), line.labels.get("figure", "")
        if of in _INSTEAD:
            _fill(cells.setdefault(_INSTEAD[of], {}), figure, line)
        elif of == "steps_total":
            for instead in _INSTEAD.values():
                _fill(cells.setdefault(instead, {}), of, line)
    return _rows(cells, interval)


def _fill(moments: dict[float, dict[str, float]], name: str, line: Line) -> None:
    for at, text in line.values:
        value = float(text)
        if value == value and abs(value) != float("inf"):
            moments.setdefault(at, {})[name] = value


_PHASES = {f"{phase.label}_us": phase.label for phase in Phase}


def _rows(cells: Mapping[int, Mapping[float, Mapping[str, float]]], interval: float) -> Series:
    reached: dict[float, int] = {}
    for moments in cells.values():
        for at, row in moments.items():
            reached[at] = max(reached.get(at, 0), int(row.get("steps_total", 0)))
    made: Series = {name: [] for name in NAMES}
    for rank, moments in sorted(cells.items()):
        last = -1
        for at, row in sorted(moments.items()):
            step = reached[at]
            if "step_seconds" in row and "steps_total" in row and step != last:
                for name, value in _row(rank, step, at, row, interval).items():
                    made[name].append(value)
                last = step
    return made


def _row(
    rank: int, step: int, at: float, row: Mapping[str, float], interval: float
) -> dict[str, Any]:
    seconds, rate = row["step_seconds"], row.get("steps", 0.0)
    exposed = row.get("exposed_communication_ratio")
    spent = (exposed or 0.0) * seconds
    overlap = row.get("overlap_ratio")
    communication = spent / (1 - overlap) if overlap is not None and overlap < 1 else spent
    made: dict[str, Any] = dict(zip(NAMES, ABSENT, strict=True))
    made |= {
        "rank": rank, "step": step, "steps": max(1, round(interval / seconds)) if seconds else 1,
        "flags": UNTIMED if exposed is None else 0, "start_us": round(1e6 * (at - seconds)),
        "duration_us": round(1e6 * seconds), "communication_us": round(1e6 * communication),
        "exposed_us": round(1e6 * spent), "allocated_bytes": int(row.get("memory_allocated_bytes", -1)),
        "reserved_bytes": int(row.get("memory_reserved_bytes", -1)),
        "rss_bytes": int(row.get("host_memory_rss_bytes", -1)), "other_bytes": -1,
    }  # fmt: skip
    for name, phase in _PHASES.items():
        made[name] = round(1e6 * row.get(phase, 0.0) / rate) if rate else 0
    return made
