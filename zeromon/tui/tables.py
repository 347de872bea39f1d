"""The tables of the terminal view: which columns each has, and what their cells show. Pure."""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from zeromon.base.units import human_seconds
from zeromon.memory.reconcile import unattributed_memory
from zeromon.readout.breakdown import RECORDED
from zeromon.readout.figures import (
    BYTES,
    COUNT,
    EXPOSED,
    EXPOSED_SECONDS,
    INDEX,
    LATE,
    MEMORY,
    OVERLAP,
    RISK,
    SECONDS,
    STEP,
    TRAFFIC as FIELDS,
    WAITS,
    Figure,
    Unit,
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
from zeromon.snapshot.levels import IN_FLIGHT_SECONDS
from zeromon.tui.columns import Column, Columns, column_of_field
from zeromon.tui.event_log import LogEntry
from zeromon.tui.line import Span, clean
from zeromon.tui.status_text import clock, tone_of

# ---- ranks ---------------------------------------------------------------------------------------


def _rank_state_cell(rank: RankSnapshot) -> Span:
    tone = "bad" if rank.status.failed else "dim" if rank.status.ended else ""
    return clean(state_text(rank)), tone


def _tone_by_level(figure: Figure) -> str | Callable[[float], str]:
    level = figure.level
    return "" if level is None else lambda value: tone_of(value, level)


def _rank_column(name: str, size: int, figure: Figure, keep: int = 0) -> Column[RankSnapshot]:
    return Column(name, size, figure.of_rank, figure.unit, _tone_by_level(figure), keep)


def _node_column(name: str, size: int, figure: Figure, keep: int = 0) -> Column[FleetNode]:
    return Column(name, size, figure.of_node, figure.unit, _tone_by_level(figure), keep)


_BARS = "▁▂▃▄▅▆▇█"
_SPARKS = 16


def draw_sparkline(values: Sequence[float]) -> str:
    """*values* as bars from 0 to their maximum, one cell each."""
    top = max(values, default=0.0) or 1.0
    return "".join(_BARS[min(7, int(8 * max(0.0, value) / top))] for value in values)


def _last_steps(rank: RankSnapshot) -> Span:
    return draw_sparkline([step.end_ns - step.start_ns for step in rank.steps.recent[-_SPARKS:]]), "s0"


SPREAD = Unit("longest_to_median", "", 1, str)


def _step_spread(rank: RankSnapshot) -> float | None:
    """The longest of the last steps against their median."""
    durations = [step.end_ns - step.start_ns for step in rank.steps.recent[-_SPARKS:]]
    median = statistics.median(durations) if durations else 0
    return max(durations) / median if median else None


RANKS: Columns[RankSnapshot] = (
    Column("rank", 6, lambda r: r.rank, INDEX, "bold"),
    Column("node", 10, lambda r: r.node, tone="dim", keep=5),
    Column("state", 11, lambda r: r.status.ended or r.steps.phase, cell=_rank_state_cell),
    Column("steps", 9, lambda r: r.steps.last_step, COUNT, keep=3),
    _rank_column("step", 9, STEP),
    Column("last steps", _SPARKS + 1, _step_spread, SPREAD, keep=6, left=True, cell=_last_steps),
    _rank_column("exposed", 9, EXPOSED_SECONDS, keep=2),
    _rank_column("share", 8, EXPOSED),
    _rank_column("overlap", 9, OVERLAP, keep=4),
    _rank_column("late", 9, LATE, keep=2),
    _rank_column("waits", 9, WAITS, keep=3),
    _rank_column("memory", 11, MEMORY),
    _rank_column("risk", 8, RISK),
    Column("unit", 18, lambda r: r.steps.unit, tone="dim", keep=3, grows=True, ends=True),
)
"""One rank a row; seconds and shares are of a step."""

# ---- a run of many ranks -------------------------------------------------------------------------


def _node_state_cell(node: FleetNode) -> Span:
    if node.silent_seconds:
        return f"silent {human_seconds(round(node.silent_seconds))}", "warn"
    if node.failed:
        return f"{node.failed} failed", "bad"
    return (f"{node.up} up", "") if node.up else ("ended", "dim")


NODES: Columns[FleetNode] = (
    Column("node", 16, lambda n: n.node, tone="bold", grows=True, ends=True),
    Column("ranks", 7, lambda n: n.ranks, COUNT, keep=2),
    Column("state", 16, lambda n: (n.silent_seconds, n.failed, -n.up), cell=_node_state_cell),
    _node_column("step", 10, STEP),
    _node_column("share", 9, EXPOSED),
    _node_column("late", 10, LATE, keep=1),
    _node_column("waits", 10, WAITS, keep=3),
    _node_column("memory", 12, MEMORY),
    _node_column("risk", 9, RISK),
)
"""One node a row; figures are those of its worst rank."""

# ---- communication -------------------------------------------------------------------------------


TRAFFIC: Columns[CollectiveStatsRow] = (
    column_of_field(FIELDS, "unit", 18, tone="bold", grows=True, ends=True),
    column_of_field(FIELDS, "op", 15),
    column_of_field(FIELDS, "group", 14, tone="dim", keep=5),
    column_of_field(FIELDS, "dim", 11, tone="dim", keep=6),
    column_of_field(FIELDS, "phase", 10, keep=1),
    column_of_field(FIELDS, "calls", 7, keep=4),
    column_of_field(FIELDS, "bytes", 11, keep=2),
    column_of_field(FIELDS, "time", 9),
    column_of_field(FIELDS, "waits", 9, keep=2),
    column_of_field(FIELDS, "transfer", 10, keep=4),
    column_of_field(FIELDS, "exposed", 9, tone=lambda seconds: "warn" if seconds > 0 else ""),
    column_of_field(FIELDS, "algbw", 11, keep=6),
    column_of_field(FIELDS, "busbw", 11, keep=1),
    column_of_field(FIELDS, "best", 11, keep=5),
)


@dataclass(frozen=True, slots=True)
class Flight:
    """A collective in flight on one rank, and its age."""

    rank: int
    what: InFlight
    seconds: float


def _flight_unit_cell(flight: Flight) -> Span:
    return clean(flight.what.unit) or "-", ""


FLIGHTS: Columns[Flight] = (
    Column("rank", 6, lambda f: f.rank, INDEX, "bold"),
    Column("op", 15, lambda f: f.what.op),
    Column("for", 10, lambda f: f.seconds, SECONDS, lambda age: tone_of(age, IN_FLIGHT_SECONDS)),
    Column("bytes", 11, lambda f: f.what.nbytes, BYTES, keep=2),
    Column("number", 10, lambda f: f.what.sequence, COUNT, "dim", keep=3),
    Column("group", 12, lambda f: f.what.group, tone="dim", keep=1),
    Column("unit", 12, lambda f: f.what.unit, grows=True, ends=True, cell=_flight_unit_cell),
)


def list_flights(ranks: Sequence[RankSnapshot], now_ns: int) -> list[Flight]:
    """The collectives in flight, the oldest first; *now_ns*: CLOCK_MONOTONIC."""
    rows = [
        Flight(rank.rank, collective, max(0.0, (now_ns - collective.issued_ns) / 1e9))
        for rank in ranks
        for collective in rank.communication.in_flight
    ]
    return sorted(rows, key=lambda flight: -flight.seconds)


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
    expected = {row.role: row for row in rank.memory.expected}
    counted = {row.role: row for row in rank.memory.roles}
    rows = []
    for name in dict.fromkeys([*expected, *counted]):
        row, census = expected.get(name), counted.get(name)
        nbytes_by_tier = {} if census is None else {
            "device": census.device_bytes, "host": census.host_bytes, "disk": census.disk_bytes,
        }  # fmt: skip
        measured = row.measured_bytes if row is not None else sum(nbytes_by_tier.values())
        tiers = ", ".join(tier for tier, nbytes in nbytes_by_tier.items() if nbytes)
        predicted, plain_bytes = (row.predicted_bytes, row.plain_bytes) if row else (None, None)
        if measured or predicted or plain_bytes:
            rows.append(RoleLine(name.replace("_", " "), measured, predicted, plain_bytes, tiers))
    rows += [
        RoleLine(UNATTRIBUTED_NAMES[remainder.kind], remainder.nbytes, None, None, remainder.place)
        for remainder in unattributed_memory(rank)
        if remainder.nbytes
    ]
    return rows


ROLES: Columns[RoleLine] = (
    Column("role", 22, lambda r: r.name, grows=True),
    Column("where", 14, lambda r: r.where, tone="dim"),
    Column("measured", 12, lambda r: r.measured, BYTES),
    Column("predicted", 12, lambda r: r.predicted, BYTES),
    Column("plain ZeRO", 12, lambda r: r.plain, BYTES),
)

# ---- steps, findings, notes ----------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class RankStep:
    """One step of one rank."""

    rank: int
    step: StepSummary


def _phase_time(index: int) -> Callable[[RankStep], float | None]:
    return lambda s: s.step.phase_ns[index] / 1e9 if index < len(s.step.phase_ns) else None


def _timed_seconds(reader: Callable[[StepSummary], int]) -> Callable[[RankStep], float | None]:
    return lambda s: ns / 1e9 if s.step.timed and (ns := reader(s.step)) >= 0 else None


def _known_bytes(reader: Callable[[StepSummary], int]) -> Callable[[RankStep], int | None]:
    return lambda s: nbytes if (nbytes := reader(s.step)) >= 0 else None


STEPS: Columns[RankStep] = (
    Column("rank", 6, lambda s: s.rank, INDEX, "bold"),
    Column("step", 9, lambda s: s.step.step, COUNT),
    Column("start", 11, lambda s: s.step.start_ns / 1e9, SECONDS),
    Column("duration", 11, lambda s: s.step.seconds, SECONDS),
    *(Column(name.replace("_", " "), 11, _phase_time(at), SECONDS) for at, name in enumerate(RECORDED)),
    Column("communication", 11, _timed_seconds(lambda step: step.communication_ns), SECONDS),
    Column("exposed", 11, _timed_seconds(lambda step: step.exposed_ns), SECONDS),
    Column("allocated", 11, _known_bytes(lambda step: step.allocated_bytes), BYTES),
    Column("reserved", 11, _known_bytes(lambda step: step.reserved_bytes), BYTES),
    Column("rss", 11, _known_bytes(lambda step: step.rss_bytes), BYTES),
)  # fmt: skip
"""The steps that the timeline draws; *start* is CLOCK_MONOTONIC of the node."""

MARKS: dict[Severity, Span] = {
    Severity.CRITICAL: ("!!", "bad"),
    Severity.WARNING: ("!", "warn"),
    Severity.INFO: ("·", ""),
}
"""The mark and the tone of a severity."""


def _remedy_effect_cell(finding: Finding) -> Span:
    if finding.remedy is None:
        return "-", "dim"
    effect = effect_text(finding.remedy)
    return (effect, "good") if effect else ("see below", "")


def _finding_rank_cell(finding: Finding) -> Span:
    return str(finding.rank) if finding.rank >= 0 else "all", ""


def _least_expected_gain(finding: Finding) -> float | None:
    return finding.remedy.gain_low_seconds if finding.remedy is not None else None


def _finding_text_cell(finding: Finding) -> Span:
    return clean(finding.text), MARKS[finding.severity][1]


FINDINGS: Columns[Finding] = (
    Column("", 4, lambda f: Severity(f.severity).order, cell=lambda f: MARKS[f.severity]),
    Column("code", 7, lambda f: f.code, tone="bold"),
    Column("rank", 6, lambda f: f.rank, INDEX, cell=_finding_rank_cell),
    Column("expected", 18, _least_expected_gain, SECONDS, keep=1, cell=_remedy_effect_cell),
    Column("what", 20, lambda f: f.text, grows=True, cell=_finding_text_cell),
)

NOTES: Columns[LogEntry] = (
    Column("wall", 12, lambda n: n.wall, SECONDS, left=True, cell=lambda n: (clock(n.wall), "dim")),
    Column("text", 40, lambda n: n.text, grows=True, cell=lambda n: (n.text, n.tone)),
)
