"""The collectives of the last steps as a figure: lanes by rank and unit, arrows to late ranks. Pure."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from zeromon.readout.breakdown import PART_NAMES, PARTS
from zeromon.readout.lanes import (
    arrival_of,
    arrival_text,
    by_unit,
    communication_of,
    compute_of,
    exposed_part,
    span_text,
)
from zeromon.snapshot.lanes import Lanes, LaneSpan, LateArrival, Stream
from zeromon_dashboard.charts import INK, axis, layout
from zeromon_dashboard.snapshot_figures import PHASE_COLOURS

_MOST_ROWS = 60
"""With more lanes, the units of a rank are not drawn apart."""
_MOST_ARROWS = 12
_LEAST_LATE_NS = 100_000
_HIDDEN = "#9cc3dd"
_TONES = (*(part for part in PARTS if part != "exposed"), "hidden", "exposed")
"""The last one lies over the others."""


@dataclass(frozen=True, slots=True)
class _Row:
    rank: int
    label: str
    spans: Sequence[LaneSpan]
    blocked: Sequence[LaneSpan] = ()
    """The collectives whose exposed part lies over the phases."""


def lanes(found: Lanes) -> dict[str, Any]:
    """Phases and collectives at their true moments, milliseconds since the first shown step began."""
    rows = _rows(found)
    data = [bar for tone in _TONES if (bar := _bars(found, rows, tone)) is not None]
    places = list(range(len(rows)))
    return {
        "data": data,
        "layout": {
            **layout("", max(260, 130 + 22 * len(rows))),
            "barmode": "overlay", "hovermode": "closest",
            "xaxis": {**axis(""), "ticksuffix": " ms"},
            "yaxis": {
                **axis(""), "tickvals": places, "ticktext": [escape(row.label) for row in rows],
                "range": [len(rows) - 0.5, -0.5], "automargin": True,
            },
            "shapes": [_boundary(found, number) for number in _steps(found)],
            "annotations": [*_step_names(found), *_arrows(found, rows)],
            "legend": {"orientation": "h", "y": -0.08, "yanchor": "top", "x": 0},
        },
    }  # fmt: skip


def _rows(found: Lanes) -> list[_Row]:
    ranks = sorted({step.rank for step in found.steps})
    units = {rank: by_unit(communication_of(found, rank)) for rank in ranks}
    apart = sum(1 + len(own) for own in units.values()) <= _MOST_ROWS
    rows: list[_Row] = []
    for rank in ranks:
        own = communication_of(found, rank)
        rows.append(_Row(rank, f"rank {rank}", compute_of(found, rank), own))
        if apart:
            rows += [_Row(rank, unit.label, unit.spans) for unit in units[rank]]
        else:
            rows.append(_Row(rank, "communication", own))
    return rows


def _bars(found: Lanes, rows: Iterable[_Row], tone: str) -> dict[str, Any] | None:
    """The spans of one colour; None without any."""
    bars = [
        (place, begin, end, span)
        for place, row in enumerate(rows)
        for span in (*row.spans, *(row.blocked if tone == "exposed" else ()))
        for begin, end in _parts(span, tone)
    ]
    if not bars:
        return None
    return {
        "type": "bar", "orientation": "h", "name": PART_NAMES[tone],
        "y": [place for place, *_ in bars], "width": 0.8,
        "base": [(begin - found.zero_ns) / 1e6 for _, begin, _, _ in bars],
        "x": [(end - begin) / 1e6 for _, begin, end, _ in bars],
        "customdata": [_hover(found, span) for *_, span in bars],
        "hovertemplate": "%{customdata}<extra></extra>",
        "marker": {"color": PHASE_COLOURS.get(tone, _HIDDEN), "line": {"width": 0}},
    }  # fmt: skip


def _parts(span: LaneSpan, tone: str) -> list[tuple[int, int]]:
    """What of a span has a colour: a phase its own, a collective that of its hidden and exposed part."""
    if span.stream is Stream.COMPUTE:
        known = span.name if span.name in PHASE_COLOURS else "other"
        return [(span.begin_ns, span.end_ns)] if tone == known else []
    blocked, end = exposed_part(span)
    part = {"hidden": (span.begin_ns, blocked), "exposed": (blocked, end)}.get(tone)
    return [part] if part is not None and part[1] > part[0] else []


def _hover(found: Lanes, span: LaneSpan) -> str:
    late = arrival_of(found, span) if span.stream is not Stream.COMPUTE else None
    lines = [span_text(span), *([arrival_text(late)] if late is not None else [])]
    return "<br>".join(map(escape, lines))


def _steps(found: Lanes) -> dict[int, int]:
    """Step -> where its first rank begins it."""
    begins: dict[int, int] = {}
    for step in found.steps:
        begins[step.step] = min(step.begin_ns, begins.get(step.step, step.begin_ns))
    return begins


def _boundary(found: Lanes, number: int) -> dict[str, Any]:
    at = (_steps(found)[number] - found.zero_ns) / 1e6
    return {
        "type": "line", "x0": at, "x1": at, "y0": 0, "y1": 1, "yref": "paper",
        "line": {"width": 1, "dash": "dot", "color": INK},
    }  # fmt: skip


def _step_names(found: Lanes) -> list[dict[str, Any]]:
    return [
        {
            "x": (begin - found.zero_ns) / 1e6, "y": 1, "yref": "paper", "yanchor": "bottom",
            "xanchor": "left", "text": f"step {number}", "showarrow": False,
            "font": {"size": 11, "color": INK},
        }
        for number, begin in _steps(found).items()
    ]  # fmt: skip


def _arrows(found: Lanes, rows: Sequence[_Row]) -> list[dict[str, Any]]:
    """From the first rank of a collective to the last one, where the difference is largest."""
    late = [one for one in found.arrivals if one.at_ns - one.first_ns >= _LEAST_LATE_NS]
    late.sort(key=lambda one: one.first_ns - one.at_ns)
    made = []
    for one in late[:_MOST_ARROWS]:
        tail, head = _place(rows, one, one.first_rank), _place(rows, one, one.rank)
        if tail is not None and head is not None:
            made.append(
                {
                    "x": (one.at_ns - found.zero_ns) / 1e6, "y": head,
                    "ax": (one.first_ns - found.zero_ns) / 1e6, "ay": tail,
                    "xref": "x", "yref": "y", "axref": "x", "ayref": "y", "text": "",
                    "showarrow": True, "arrowhead": 2, "arrowwidth": 1.2, "arrowcolor": INK,
                }
            )  # fmt: skip
    return made


def _place(rows: Sequence[_Row], one: LateArrival, rank: int) -> int | None:
    """The lane of a rank on which the collective is."""
    for place, row in enumerate(rows):
        if row.rank == rank and any(
            span.unit == one.unit and span.name == one.name for span in row.spans
        ):
            return place
    return None
