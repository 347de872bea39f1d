"""The columns of every table: what a cell shows, what it is ordered by, what a file gets. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from zeromon.expected import rests
from zeromon.snapshot import Finding, FleetNode, InFlight, RankSnapshot, StepSummary, TrafficRow
from zeromon.tui.line import Line, Span, clean, fit, tail
from zeromon.tui.look import Look
from zeromon.tui.notes import Note
from zeromon.tui.wanted import held_bytes
from zeromon.tui.words import clock, level
from zeromon.units import human_count, human_rate, human_ratio, human_seconds

Row = TypeVar("Row")


@dataclass(frozen=True, slots=True, kw_only=True)
class Column(Generic[Row]):
    """One column."""

    name: str
    size: int
    show: Callable[[Row, Look], Span]
    value: Callable[[Row], Any]
    """What it is ordered by, and what goes into a file: a number in base units, or text."""
    unit: str = ""
    """Of *value*, for the file's header."""
    keep: int = 0
    """Where there is no room, columns with a higher number go first."""
    left: bool = False
    grows: bool = False
    ends: bool = False
    """Of a text that is too long, the end is shown."""

    @property
    def heading(self) -> str:
        """The name in a file."""
        stem = self.name.replace(" ", "_")
        return f"{stem}_{self.unit}" if self.unit else stem


Columns = tuple[Column[Row], ...]


@dataclass(frozen=True, slots=True)
class Sheet(Generic[Row]):
    """A table as a file gets it."""

    name: str
    columns: Columns[Row]
    rows: Sequence[Row]


def laid_out(columns: Columns[Row], width: int) -> list[tuple[Column[Row], int]]:
    """Those that fit, and how wide; what grows takes the rest."""
    chosen = list(columns)
    while len(chosen) > 1 and sum(c.size for c in chosen) > width:
        last = max(chosen, key=lambda c: (c.keep, columns.index(c)))
        if last.keep == 0:
            break
        chosen.remove(last)
    rest = max(0, width - sum(c.size for c in chosen))
    growing = next((c for c in chosen if c.grows), None)
    return [(c, c.size + (rest if c is growing else 0)) for c in chosen]


def header(laid: Sequence[tuple[Column[Row], int]], order: str, *, down: bool) -> Line:
    """The names, with the one that rows are ordered by."""
    line: Line = []
    for column, size in laid:
        sign = ("▼" if down else "▲") if column.name == order else ""
        text = fit(column.name + sign, size - 1, right=not column.left)
        line += [(text, "accent" if sign else "title"), (" ", "")]
    return line


def cells_of(laid: Sequence[tuple[Column[Row], int]], row: Row, look: Look) -> Line:
    """One row; neighbours without a tone are one span, for there are many of them."""
    line: Line = []
    bare = ""
    for column, size in laid:
        text, tone = column.show(row, look)
        if column.ends:
            text = tail(text, size - 1)
        text = fit(text, size - 1, right=not column.left)
        if tone:
            line += [(bare, ""), (text, tone)] if bare else [(text, tone)]
            bare = " "
        else:
            bare += text + " "
    return [*line, (bare, "")]


def ordered(columns: Columns[Row], rows: Sequence[Row], order: str, *, down: bool) -> list[Row]:
    """*rows* by the column of that name; what has no value comes last."""
    column = next((c for c in columns if c.name == order), None)
    if column is None:
        return list(rows)
    read = column.value
    known = [(value, row) for row in rows if (value := read(row)) is not None]
    known.sort(key=lambda pair: pair[0], reverse=down)
    unknown = [row for row in rows if read(row) is None] if len(known) < len(rows) else []
    return [row for _, row in known] + unknown


def _time(seconds: float | None, tone: str = "") -> Span:
    return (human_seconds(seconds), tone) if seconds is not None else ("-", "dim")


def _rate(rate: float | None) -> Span:
    return (human_rate(rate), "") if rate else ("-", "dim")


# ---- ranks ---------------------------------------------------------------------------------------


def worst_ratio(rank: RankSnapshot) -> float | None:
    """The OOM risk of a rank, over its memories."""
    return max((risk.ratio for risk in rank.risks), default=None)


def _state(rank: RankSnapshot, _: Look) -> Span:
    tone = "bad" if rank.failed else "dim" if rank.ended else ""
    phase = "running" if rank.phase == "other" else rank.phase or "up"
    return clean((rank.ended or phase).replace("_", " ")), tone


def _share(ratio: float | None, warn: float, bad: float) -> Span:
    return human_ratio(ratio), level(ratio, warn, bad)


RANKS: Columns[RankSnapshot] = (
    Column(name="rank", size=6, show=lambda r, _: (str(r.rank), "bold"), value=lambda r: r.rank),
    Column(name="node", size=10, left=True, keep=5,
           show=lambda r, _: (clean(r.node), "dim"), value=lambda r: r.node),
    Column(name="state", size=11, left=True, show=_state, value=lambda r: r.ended or r.phase),
    Column(name="steps", size=9, keep=3,
           show=lambda r, _: (human_count(r.step), ""), value=lambda r: r.step),
    Column(name="step", size=9, unit="seconds",
           show=lambda r, _: _time(r.step_seconds), value=lambda r: r.step_seconds),
    Column(name="exposed", size=9, unit="seconds", keep=2,
           show=lambda r, _: _time(r.exposed_seconds), value=lambda r: r.exposed_seconds),
    Column(name="share", size=8, unit="ratio", show=lambda r, _: _share(r.exposed_ratio, 0.1, 0.25),
           value=lambda r: r.exposed_ratio),
    Column(name="overlap", size=9, unit="ratio", keep=4,
           show=lambda r, _: (human_ratio(r.overlap_ratio), ""), value=lambda r: r.overlap_ratio),
    Column(name="late", size=9, unit="seconds", keep=2,
           show=lambda r, _: _time(r.late_seconds), value=lambda r: r.late_seconds),
    Column(name="waits", size=9, unit="seconds", keep=3,
           show=lambda r, _: _time(r.wait_seconds), value=lambda r: r.wait_seconds),
    Column(name="memory", size=11, unit="bytes",
           show=lambda r, look: (look.size(held_bytes(r)), ""), value=held_bytes),
    Column(name="risk", size=8, unit="ratio",
           show=lambda r, _: _share(worst_ratio(r), 0.5, 0.8), value=worst_ratio),
    Column(name="unit", size=18, left=True, grows=True, keep=3,
           show=lambda r, _: (clean(r.unit), "dim"), value=lambda r: r.unit, ends=True),
)  # fmt: skip
"""One rank a row; seconds and shares are of a step."""

# ---- a run of many ranks -------------------------------------------------------------------------


def _node_state(node: FleetNode, _: Look) -> Span:
    if node.silent_seconds:
        return f"silent {human_seconds(round(node.silent_seconds))}", "warn"
    if node.failed:
        return f"{node.failed} failed", "bad"
    return (f"{node.up} up", "") if node.up else ("ended", "dim")


NODES: Columns[FleetNode] = (
    Column(name="node", size=16, left=True, grows=True,
           show=lambda n, _: (clean(n.node), "bold"), value=lambda n: n.node, ends=True),
    Column(name="ranks", size=7, keep=2,
           show=lambda n, _: (human_count(n.ranks), ""), value=lambda n: n.ranks),
    Column(name="state", size=16, left=True, show=_node_state,
           value=lambda n: (n.silent_seconds, n.failed, -n.up)),
    Column(name="step", size=10, unit="seconds",
           show=lambda n, _: _time(n.step_seconds), value=lambda n: n.step_seconds),
    Column(name="share", size=9, unit="ratio", show=lambda n, _: _share(n.exposed_ratio, 0.1, 0.25),
           value=lambda n: n.exposed_ratio),
    Column(name="late", size=10, unit="seconds", keep=1,
           show=lambda n, _: _time(n.late_seconds), value=lambda n: n.late_seconds),
    Column(name="waits", size=10, unit="seconds", keep=3,
           show=lambda n, _: _time(n.wait_seconds), value=lambda n: n.wait_seconds),
    Column(name="memory", size=12, unit="bytes",
           show=lambda n, look: (look.size(n.memory_bytes), ""), value=lambda n: n.memory_bytes),
    Column(name="risk", size=9, unit="ratio",
           show=lambda n, _: _share(n.risk_ratio, 0.5, 0.8), value=lambda n: n.risk_ratio),
)  # fmt: skip
"""One node a row; figures are those of its worst rank."""

# ---- communication -------------------------------------------------------------------------------


def _calls(row: TrafficRow, _: Look) -> Span:
    text = f"{row.calls:.1f}".removesuffix(".0") if row.calls < 100 else human_count(row.calls)
    return text, ""


TRAFFIC: Columns[TrafficRow] = (
    Column(name="unit", size=18, left=True, grows=True,
           show=lambda t, _: (clean(t.unit) or "-", "bold"), value=lambda t: t.unit, ends=True),
    Column(name="op", size=15, left=True,
           show=lambda t, _: (clean(t.op), ""), value=lambda t: t.op),
    Column(name="group", size=14, left=True, keep=5,
           show=lambda t, _: (f"{clean(t.group)}({t.group_size})", "dim"), value=lambda t: t.group),
    Column(name="phase", size=10, left=True, keep=1,
           show=lambda t, _: (clean(t.phase).replace("_", " "), ""), value=lambda t: t.phase),
    Column(name="calls", size=7, unit="per_step", keep=4, show=_calls, value=lambda t: t.calls),
    Column(name="bytes", size=11, keep=2,
           show=lambda t, look: (look.size(t.nbytes), ""), value=lambda t: t.nbytes),
    Column(name="time", size=9, unit="seconds",
           show=lambda t, _: _time(t.seconds), value=lambda t: t.seconds),
    Column(name="waits", size=9, unit="seconds", keep=2,
           show=lambda t, _: _time(t.wait_seconds), value=lambda t: t.wait_seconds),
    Column(name="transfer", size=10, unit="seconds", keep=4,
           show=lambda t, _: _time(t.transfer_seconds), value=lambda t: t.transfer_seconds),
    Column(name="exposed", size=9, unit="seconds",
           show=lambda t, _: _time(t.exposed_seconds, "warn" if t.exposed_seconds > 0 else ""),
           value=lambda t: t.exposed_seconds),
    Column(name="algbw", size=11, unit="bytes_per_second", keep=6,
           show=lambda t, _: _rate(t.algbw_bytes_per_second),
           value=lambda t: t.algbw_bytes_per_second),
    Column(name="busbw", size=11, unit="bytes_per_second", keep=1,
           show=lambda t, _: _rate(t.busbw_bytes_per_second),
           value=lambda t: t.busbw_bytes_per_second),
    Column(name="best", size=11, unit="bytes_per_second", keep=5,
           show=lambda t, _: _rate(t.best_busbw_bytes_per_second),
           value=lambda t: t.best_busbw_bytes_per_second),
)  # fmt: skip
"""One operation in one unit, group and phase a row; figures are means a step."""


@dataclass(frozen=True, slots=True)
class Flight:
    """A collective that has not ended, on one rank, and how old it is."""

    rank: int
    what: InFlight
    seconds: float


FLIGHTS: Columns[Flight] = (
    Column(name="rank", size=6, show=lambda f, _: (str(f.rank), "bold"), value=lambda f: f.rank),
    Column(name="op", size=15, left=True,
           show=lambda f, _: (clean(f.what.op), ""), value=lambda f: f.what.op),
    Column(name="for", size=10, unit="seconds",
           show=lambda f, _: _time(f.seconds, level(f.seconds, 5.0, 30.0)),
           value=lambda f: f.seconds),
    Column(name="bytes", size=11, keep=2,
           show=lambda f, look: (look.size(f.what.nbytes), ""), value=lambda f: f.what.nbytes),
    Column(name="number", size=10, keep=3,
           show=lambda f, _: (human_count(f.what.sequence), "dim"), value=lambda f: f.what.sequence),
    Column(name="group", size=12, left=True, keep=1,
           show=lambda f, _: (clean(f.what.group), "dim"), value=lambda f: f.what.group),
    Column(name="unit", size=12, left=True, grows=True,
           show=lambda f, _: (clean(f.what.unit) or "-", ""), value=lambda f: f.what.unit,
           ends=True),
)  # fmt: skip


def flights(ranks: Sequence[RankSnapshot], now_ns: int) -> list[Flight]:
    """What is in flight, the oldest first."""
    found = [
        Flight(rank.rank, one, max(0.0, (now_ns - one.issued_ns) / 1e9))
        for rank in ranks
        for one in rank.in_flight
    ]
    return sorted(found, key=lambda one: -one.seconds)


# ---- memory --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class RoleLine:
    """A role of a rank, or what no role accounts for."""

    name: str
    measured: int | None
    predicted: int | None
    plain: int | None
    where: str


def role_lines(rank: RankSnapshot) -> list[RoleLine]:
    """Roles measured against predicted, then the rest; what is nothing at all is left out."""
    expected = {row.role: row for row in rank.expected}
    counted = {row.role: row for row in rank.roles}
    made = []
    for name in dict.fromkeys([*expected, *counted]):
        row, census = expected.get(name), counted.get(name)
        places = {} if census is None else {
            "device": census.device_bytes, "host": census.host_bytes, "disk": census.disk_bytes,
        }  # fmt: skip
        measured = row.measured_bytes if row is not None else sum(places.values())
        where = ", ".join(place for place, nbytes in places.items() if nbytes)
        predicted, plain = (row.predicted_bytes, row.plain_bytes) if row else (None, None)
        if measured or predicted or plain:
            made.append(RoleLine(name.replace("_", " "), measured, predicted, plain, where))
    made += [
        RoleLine(rest.kind.replace("_", " "), rest.nbytes, None, None, rest.place)
        for rest in rests(rank)
        if rest.nbytes
    ]
    return made


def _size(nbytes: int | None, look: Look) -> Span:
    return (look.size(nbytes), "") if nbytes is not None else ("n/a", "dim")


ROLES: Columns[RoleLine] = (
    Column(name="role", size=22, left=True, grows=True,
           show=lambda r, _: (r.name, ""), value=lambda r: r.name),
    Column(name="where", size=14, left=True,
           show=lambda r, _: (r.where, "dim"), value=lambda r: r.where),
    Column(name="measured", size=12, unit="bytes",
           show=lambda r, look: _size(r.measured, look), value=lambda r: r.measured),
    Column(name="predicted", size=12, unit="bytes",
           show=lambda r, look: _size(r.predicted, look), value=lambda r: r.predicted),
    Column(name="plain ZeRO", size=12, unit="bytes",
           show=lambda r, look: _size(r.plain, look), value=lambda r: r.plain),
)  # fmt: skip

# ---- steps, findings, notes ----------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class RankStep:
    """One step of one rank."""

    rank: int
    step: StepSummary


def _phase(index: int) -> Callable[[RankStep], float | None]:
    return lambda s: s.step.phase_ns[index] / 1e9 if index < len(s.step.phase_ns) else None


def _timed(read: Callable[[StepSummary], int]) -> Callable[[RankStep], float | None]:
    return lambda s: None if s.step.idle else read(s.step) / 1e9


def _seconds(name: str, value: Callable[[RankStep], float | None]) -> Column[RankStep]:
    return Column(
        name=name, size=11, unit="seconds", show=lambda s, _: _time(value(s)), value=value
    )


def _known(read: Callable[[StepSummary], int]) -> Callable[[RankStep], int | None]:
    return lambda s: nbytes if (nbytes := read(s.step)) >= 0 else None


def _held(name: str, value: Callable[[RankStep], int | None]) -> Column[RankStep]:
    return Column(
        name=name, size=11, unit="bytes", show=lambda s, k: _size(value(s), k), value=value
    )


STEPS: Columns[RankStep] = (
    Column(name="rank", size=6, show=lambda s, _: (str(s.rank), "bold"), value=lambda s: s.rank),
    Column(name="step", size=9, show=lambda s, _: (human_count(s.step.step), ""),
           value=lambda s: s.step.step),
    _seconds("start", lambda s: s.step.start_ns / 1e9),
    _seconds("duration", lambda s: s.step.seconds),
    _seconds("other", _phase(0)), _seconds("forward", _phase(1)), _seconds("backward", _phase(2)),
    _seconds("optimizer", _phase(3)), _seconds("data wait", _phase(4)),
    _seconds("cpu optimizer", _phase(5)),
    _seconds("communication", _timed(lambda step: step.communication_ns)),
    _seconds("exposed", _timed(lambda step: step.exposed_ns)),
    _held("allocated", _known(lambda step: step.allocated_bytes)),
    _held("reserved", _known(lambda step: step.reserved_bytes)),
    _held("rss", _known(lambda step: step.rss_bytes)),
)  # fmt: skip
"""What the timeline is drawn from; *start* is on the node's monotonic clock."""

_LEVELS = {"critical": ("!!", "bad"), "warning": ("!", "warn"), "info": ("·", "")}
_GRAVITY = {"critical": 0, "warning": 1, "info": 2}


def mark(severity: str) -> Span:
    """The sign and the tone of a severity."""
    return _LEVELS.get(severity, ("·", ""))


def _whose(finding: Finding) -> str:
    return str(finding.rank) if finding.rank >= 0 else "all"


def _shorter(finding: Finding) -> float | None:
    return finding.remedy.gain_low_seconds if finding.remedy is not None else None


def _effect(finding: Finding, look: Look) -> Span:
    remedy = finding.remedy
    if remedy is None:
        return "-", "dim"
    low, high = remedy.gain_low_seconds, remedy.gain_high_seconds
    if low:
        return f"-{human_seconds(low)} a step", "good"
    if high:
        return f"up to -{human_seconds(high)}", "good"
    if remedy.frees_bytes is not None:
        return f"-{look.size(remedy.frees_bytes)}", "good"
    return "see below", ""


FINDINGS: Columns[Finding] = (
    Column(name="", size=4, show=lambda f, _: mark(f.severity), left=True,
           value=lambda f: _GRAVITY.get(f.severity, 3)),
    Column(name="code", size=7, left=True, show=lambda f, _: (clean(f.code), "bold"),
           value=lambda f: f.code),
    Column(name="rank", size=6, show=lambda f, _: (_whose(f), ""), value=lambda f: f.rank),
    Column(name="expected", size=18, unit="seconds", keep=1, show=_effect, value=_shorter),
    Column(name="what", size=20, left=True, grows=True,
           show=lambda f, _: (clean(f.text), mark(f.severity)[1]), value=lambda f: f.text),
)  # fmt: skip

NOTES: Columns[Note] = (
    Column(name="wall", size=12, unit="seconds", left=True,
           show=lambda n, _: (clock(n.wall), "dim"), value=lambda n: n.wall),
    Column(name="text", size=40, left=True, grows=True,
           show=lambda n, _: (n.text, n.tone), value=lambda n: n.text),
)  # fmt: skip
