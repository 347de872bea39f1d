"""The tables of the terminal view: which columns each has, and what their cells show. Pure."""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from zeromon.levels import IN_FLIGHT_SECONDS
from zeromon.memory.reconcile import unattributed_memory
from zeromon.readout.breakdown import RECORDED
from zeromon.readout.figures import (
    EXPOSED,
    EXPOSED_SECONDS,
    LATE,
    MEMORY,
    OVERLAP,
    RISK,
    SECONDS,
    STEP,
    WAITS,
    Figure,
)
from zeromon.readout.remedy import effect_text
from zeromon.readout.text import UNATTRIBUTED_NAMES, state_text
from zeromon.snapshot import (
    CollectiveStatsRow,
    Finding,
    FleetNode,
    InFlight,
    RankSnapshot,
    Severity,
    StepSummary,
)
from zeromon.tui.columns import Column, Columns
from zeromon.tui.event_log import LogEntry
from zeromon.tui.line import Span, clean
from zeromon.tui.status_text import clock, tone_of
from zeromon.units import human_bytes, human_calls, human_count, human_rate, human_seconds


def _time(seconds: float | None, tone: str = "") -> Span:
    return (human_seconds(seconds), tone) if seconds is not None else ("-", "dim")


def _rate(rate: float | None) -> Span:
    return (human_rate(rate), "") if rate else ("-", "dim")


# ---- ranks ---------------------------------------------------------------------------------------


def _state(rank: RankSnapshot) -> Span:
    tone = "bad" if rank.failed else "dim" if rank.ended else ""
    return clean(state_text(rank)), tone


def _shown(figure: Figure, value: float | None) -> Span:
    """A value of *figure* as a cell."""
    if figure.unit is SECONDS:
        return _time(value)
    text = "n/a" if value is None else figure.unit.text(value)
    return text, tone_of(value, figure.level) if figure.level else ""


def _of_rank(name: str, size: int, figure: Figure, keep: int = 0) -> Column[RankSnapshot]:
    return Column(
        name=name, size=size, unit=figure.unit.name, keep=keep, value=figure.of_rank,
        show=lambda rank: _shown(figure, figure.of_rank(rank)),
    )  # fmt: skip


def _of_node(name: str, size: int, figure: Figure, keep: int = 0) -> Column[FleetNode]:
    return Column(
        name=name, size=size, unit=figure.unit.name, keep=keep, value=figure.of_node,
        show=lambda node: _shown(figure, figure.of_node(node)),
    )  # fmt: skip


_BARS = "▁▂▃▄▅▆▇█"
_SPARKS = 16


def sparkline(values: Sequence[float]) -> str:
    """*values* as bars from 0 to their maximum, one cell each."""
    top = max(values, default=0.0) or 1.0
    return "".join(_BARS[min(7, int(8 * max(0.0, value) / top))] for value in values)


def _last_steps(rank: RankSnapshot) -> Span:
    return sparkline([step.end_ns - step.start_ns for step in rank.recent[-_SPARKS:]]), "s0"


def _spread(rank: RankSnapshot) -> float | None:
    """The longest of the last steps against their median."""
    last = [step.end_ns - step.start_ns for step in rank.recent[-_SPARKS:]]
    middle = statistics.median(last) if last else 0
    return max(last) / middle if middle else None


RANKS: Columns[RankSnapshot] = (
    Column(name="rank", size=6, show=lambda r: (str(r.rank), "bold"), value=lambda r: r.rank),
    Column(name="node", size=10, left=True, keep=5,
           show=lambda r: (clean(r.node), "dim"), value=lambda r: r.node),
    Column(name="state", size=11, left=True, show=_state, value=lambda r: r.ended or r.phase),
    Column(name="steps", size=9, keep=3,
           show=lambda r: (human_count(r.step), ""), value=lambda r: r.step),
    _of_rank("step", 9, STEP),
    Column(name="last steps", size=_SPARKS + 1, left=True, keep=6, show=_last_steps, value=_spread,
           unit="longest_to_median"),
    _of_rank("exposed", 9, EXPOSED_SECONDS, keep=2),
    _of_rank("share", 8, EXPOSED),
    _of_rank("overlap", 9, OVERLAP, keep=4),
    _of_rank("late", 9, LATE, keep=2),
    _of_rank("waits", 9, WAITS, keep=3),
    _of_rank("memory", 11, MEMORY),
    _of_rank("risk", 8, RISK),
    Column(name="unit", size=18, left=True, grows=True, keep=3,
           show=lambda r: (clean(r.unit), "dim"), value=lambda r: r.unit, ends=True),
)  # fmt: skip
"""One rank a row; seconds and shares are of a step."""

# ---- a run of many ranks -------------------------------------------------------------------------


def _node_state(node: FleetNode) -> Span:
    if node.silent_seconds:
        return f"silent {human_seconds(round(node.silent_seconds))}", "warn"
    if node.failed:
        return f"{node.failed} failed", "bad"
    return (f"{node.up} up", "") if node.up else ("ended", "dim")


NODES: Columns[FleetNode] = (
    Column(name="node", size=16, left=True, grows=True,
           show=lambda n: (clean(n.node), "bold"), value=lambda n: n.node, ends=True),
    Column(name="ranks", size=7, keep=2,
           show=lambda n: (human_count(n.ranks), ""), value=lambda n: n.ranks),
    Column(name="state", size=16, left=True, show=_node_state,
           value=lambda n: (n.silent_seconds, n.failed, -n.up)),
    _of_node("step", 10, STEP),
    _of_node("share", 9, EXPOSED),
    _of_node("late", 10, LATE, keep=1),
    _of_node("waits", 10, WAITS, keep=3),
    _of_node("memory", 12, MEMORY),
    _of_node("risk", 9, RISK),
)  # fmt: skip
"""One node a row; figures are those of its worst rank."""

# ---- communication -------------------------------------------------------------------------------


TRAFFIC: Columns[CollectiveStatsRow] = (
    Column(name="unit", size=18, left=True, grows=True,
           show=lambda t: (clean(t.unit) or "-", "bold"), value=lambda t: t.unit, ends=True),
    Column(name="op", size=15, left=True,
           show=lambda t: (clean(t.op), ""), value=lambda t: t.op),
    Column(name="group", size=14, left=True, keep=5,
           show=lambda t: (f"{clean(t.group)}({t.group_size})", "dim"), value=lambda t: t.group),
    Column(name="dim", size=11, left=True, keep=6,
           show=lambda t: (clean(t.dim) or "-", "dim"), value=lambda t: t.dim),
    Column(name="phase", size=10, left=True, keep=1,
           show=lambda t: (clean(t.phase).replace("_", " "), ""), value=lambda t: t.phase),
    Column(name="calls", size=7, unit="per_step", keep=4,
           show=lambda t: (human_calls(t.calls), ""), value=lambda t: t.calls),
    Column(name="bytes", size=11, keep=2,
           show=lambda t: (human_bytes(t.nbytes), ""), value=lambda t: t.nbytes),
    Column(name="time", size=9, unit="seconds",
           show=lambda t: _time(t.seconds), value=lambda t: t.seconds),
    Column(name="waits", size=9, unit="seconds", keep=2,
           show=lambda t: _time(t.wait_seconds), value=lambda t: t.wait_seconds),
    Column(name="transfer", size=10, unit="seconds", keep=4,
           show=lambda t: _time(t.transfer_seconds), value=lambda t: t.transfer_seconds),
    Column(name="exposed", size=9, unit="seconds",
           show=lambda t: _time(t.exposed_seconds, "warn" if t.exposed_seconds > 0 else ""),
           value=lambda t: t.exposed_seconds),
    Column(name="algbw", size=11, unit="bytes_per_second", keep=6,
           show=lambda t: _rate(t.algbw_bytes_per_second),
           value=lambda t: t.algbw_bytes_per_second),
    Column(name="busbw", size=11, unit="bytes_per_second", keep=1,
           show=lambda t: _rate(t.busbw_bytes_per_second),
           value=lambda t: t.busbw_bytes_per_second),
    Column(name="best", size=11, unit="bytes_per_second", keep=5,
           show=lambda t: _rate(t.best_busbw_bytes_per_second),
           value=lambda t: t.best_busbw_bytes_per_second),
)  # fmt: skip
"""One operation in one unit, group and phase a row; figures are means a step."""


@dataclass(frozen=True, slots=True)
class Flight:
    """A collective in flight on one rank, and its age."""

    rank: int
    what: InFlight
    seconds: float


FLIGHTS: Columns[Flight] = (
    Column(name="rank", size=6, show=lambda f: (str(f.rank), "bold"), value=lambda f: f.rank),
    Column(name="op", size=15, left=True,
           show=lambda f: (clean(f.what.op), ""), value=lambda f: f.what.op),
    Column(name="for", size=10, unit="seconds",
           show=lambda f: _time(f.seconds, tone_of(f.seconds, IN_FLIGHT_SECONDS)),
           value=lambda f: f.seconds),
    Column(name="bytes", size=11, keep=2,
           show=lambda f: (human_bytes(f.what.nbytes), ""), value=lambda f: f.what.nbytes),
    Column(name="number", size=10, keep=3,
           show=lambda f: (human_count(f.what.sequence), "dim"), value=lambda f: f.what.sequence),
    Column(name="group", size=12, left=True, keep=1,
           show=lambda f: (clean(f.what.group), "dim"), value=lambda f: f.what.group),
    Column(name="unit", size=12, left=True, grows=True,
           show=lambda f: (clean(f.what.unit) or "-", ""), value=lambda f: f.what.unit,
           ends=True),
)  # fmt: skip


def flights(ranks: Sequence[RankSnapshot], now_ns: int) -> list[Flight]:
    """The collectives in flight, the oldest first; *now_ns*: CLOCK_MONOTONIC."""
    made = [
        Flight(rank.rank, one, max(0.0, (now_ns - one.issued_ns) / 1e9))
        for rank in ranks
        for one in rank.in_flight
    ]
    return sorted(made, key=lambda one: -one.seconds)


# ---- memory --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class RoleLine:
    """The memory of one role of a rank, or memory that no role accounts for."""

    name: str
    measured: int | None
    predicted: int | None
    plain: int | None
    where: str


def role_lines(rank: RankSnapshot) -> list[RoleLine]:
    """The memory of a rank by role, then what no role accounts for; lines of 0 bytes are left out."""
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
        RoleLine(UNATTRIBUTED_NAMES[rest.kind], rest.nbytes, None, None, rest.place)
        for rest in unattributed_memory(rank)
        if rest.nbytes
    ]
    return made


def _size(nbytes: int | None) -> Span:
    return (human_bytes(nbytes), "") if nbytes is not None else ("n/a", "dim")


ROLES: Columns[RoleLine] = (
    Column(name="role", size=22, left=True, grows=True,
           show=lambda r: (r.name, ""), value=lambda r: r.name),
    Column(name="where", size=14, left=True,
           show=lambda r: (r.where, "dim"), value=lambda r: r.where),
    Column(name="measured", size=12, unit="bytes",
           show=lambda r: _size(r.measured), value=lambda r: r.measured),
    Column(name="predicted", size=12, unit="bytes",
           show=lambda r: _size(r.predicted), value=lambda r: r.predicted),
    Column(name="plain ZeRO", size=12, unit="bytes",
           show=lambda r: _size(r.plain), value=lambda r: r.plain),
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
    return lambda s: ns / 1e9 if s.step.timed and (ns := read(s.step)) >= 0 else None


def _seconds(name: str, value: Callable[[RankStep], float | None]) -> Column[RankStep]:
    return Column(name=name, size=11, unit="seconds", show=lambda s: _time(value(s)), value=value)


def _known(read: Callable[[StepSummary], int]) -> Callable[[RankStep], int | None]:
    return lambda s: nbytes if (nbytes := read(s.step)) >= 0 else None


def _held(name: str, value: Callable[[RankStep], int | None]) -> Column[RankStep]:
    return Column(name=name, size=11, unit="bytes", show=lambda s: _size(value(s)), value=value)


STEPS: Columns[RankStep] = (
    Column(name="rank", size=6, show=lambda s: (str(s.rank), "bold"), value=lambda s: s.rank),
    Column(name="step", size=9, show=lambda s: (human_count(s.step.step), ""),
           value=lambda s: s.step.step),
    _seconds("start", lambda s: s.step.start_ns / 1e9),
    _seconds("duration", lambda s: s.step.seconds),
    *(_seconds(name.replace("_", " "), _phase(at)) for at, name in enumerate(RECORDED)),
    _seconds("communication", _timed(lambda step: step.communication_ns)),
    _seconds("exposed", _timed(lambda step: step.exposed_ns)),
    _held("allocated", _known(lambda step: step.allocated_bytes)),
    _held("reserved", _known(lambda step: step.reserved_bytes)),
    _held("rss", _known(lambda step: step.rss_bytes)),
)  # fmt: skip
"""The steps that the timeline draws; *start* is CLOCK_MONOTONIC of the node."""

_LEVELS = {
    Severity.CRITICAL: ("!!", "bad"),
    Severity.WARNING: ("!", "warn"),
    Severity.INFO: ("·", ""),
}


def mark(severity: Severity) -> Span:
    """The mark and the tone of a severity."""
    return _LEVELS[severity]


def _effect(finding: Finding) -> Span:
    if finding.remedy is None:
        return "-", "dim"
    effect = effect_text(finding.remedy)
    return (effect, "good") if effect else ("see below", "")


FINDINGS: Columns[Finding] = (
    Column(name="", size=4, show=lambda f: mark(f.severity), left=True,
           value=lambda f: Severity(f.severity).order),
    Column(name="code", size=7, left=True, show=lambda f: (clean(f.code), "bold"),
           value=lambda f: f.code),
    Column(name="rank", size=6, value=lambda f: f.rank,
           show=lambda f: (str(f.rank) if f.rank >= 0 else "all", "")),
    Column(name="expected", size=18, unit="seconds", keep=1, show=_effect,
           value=lambda f: f.remedy.gain_low_seconds if f.remedy is not None else None),
    Column(name="what", size=20, left=True, grows=True,
           show=lambda f: (clean(f.text), mark(f.severity)[1]), value=lambda f: f.text),
)  # fmt: skip

NOTES: Columns[LogEntry] = (
    Column(name="wall", size=12, unit="seconds", left=True,
           show=lambda n: (clock(n.wall), "dim"), value=lambda n: n.wall),
    Column(name="text", size=40, left=True, grows=True,
           show=lambda n: (n.text, n.tone), value=lambda n: n.text),
)  # fmt: skip
