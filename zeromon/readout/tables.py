"""The tables that several views show, each declared once. Pure.

Text, terminal, grid and CSV read the same columns: a column has the value in its base unit, the text for
people, and what a terminal needs to place it.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import compress
from typing import Any, Generic, TypeVar

from zeromon.base.units import human_seconds, printable
from zeromon.memory.reconcile import role_bytes, unattributed_memory
from zeromon.readout.breakdown import RECORDED
from zeromon.readout.figures import (
    BYTES,
    CALLS,
    COUNT,
    EXPOSED,
    EXPOSED_SECONDS,
    INDEX,
    LATE,
    MEBIBYTES,
    MEMORY,
    OVERLAP,
    RATE,
    RISK,
    SECONDS,
    STEP,
    TEXT,
    WAITS,
    Figure,
    Unit,
)
from zeromon.readout.remedy import effect_text
from zeromon.readout.text import UNATTRIBUTED_NAMES, group_name, state_text
from zeromon.snapshot import CollectiveStatsRow, Finding, RankSnapshot, Severity, StepSummary
from zeromon.snapshot.communication import InFlight
from zeromon.snapshot.levels import IN_FLIGHT_SECONDS, Level
from zeromon.snapshot.run import FleetNode

Row = TypeVar("Row")


@dataclass(frozen=True, slots=True)
class Column(Generic[Row]):
    """One column of a table whose rows are of type *Row*."""

    name: str
    read: Callable[[Row], Any]
    """Returns the value in its base unit, or a text; None where it is unknown. Rows are sorted by it."""
    unit: Unit = TEXT
    width: int = 11
    """Cells of a terminal."""
    priority: int = 0
    """In a narrow terminal, columns with a higher number are dropped first; 0: kept."""
    show: Callable[[Row], str] | None = None
    """The text for people, where it is not that of the unit."""
    tone: str | Callable[[Any, Row], str] = ""
    """The style of the cell, or how it follows from value and row; an unknown value is dim."""
    unknown: str = "n/a"
    """The text where the value is unknown."""
    left: bool | None = None
    """True if cells are left-aligned; None: texts are, numbers are not."""
    grows: bool = False
    ends: bool = False
    """True if the end of a text that is too long is shown, not its beginning."""

    def text(self, row: Row) -> str:
        """The text for people."""
        return self.cell(row)[0]

    def cell(self, row: Row) -> tuple[str, str]:
        """The text for people, and its style."""
        value = self.read(row)
        if self.show is not None:
            text = self.show(row)
        elif value is None:
            return self.unknown, "dim"
        else:
            text = self.unit.text(value)
        return text, self.tone if isinstance(self.tone, str) else self.tone(value, row)

    def scaled(self, row: Row) -> Any:
        """The value in the unit's symbol with four decimal places, or the text; None where unknown."""
        if self.unit is TEXT:
            return self.text(row)
        value = self.read(row)
        return None if value is None else round(self.unit.scale * value, 4)

    @property
    def is_left_aligned(self) -> bool:
        """True if cells are left-aligned."""
        return self.unit is TEXT if self.left is None else self.left

    @property
    def heading(self) -> str:
        """The name with the symbol of :meth:`scaled`."""
        return f"{self.name}, {self.unit.symbol}".removesuffix(", ")

    @property
    def export_heading(self) -> str:
        """The name in an exported file, which has base units."""
        stem = self.name.replace(" ", "_")
        return f"{stem}_{self.unit.name}" if self.unit.name not in ("", stem) else stem


Columns = tuple[Column[Row], ...]


def pick_columns(columns: Columns[Row], *names: str) -> Columns[Row]:
    """The *columns* with these names, in the order of the names."""
    by_name = {column.name: column for column in columns}
    return tuple(by_name[name] for name in names)


TONES = {Severity.CRITICAL: "bad", Severity.WARNING: "warn", Severity.INFO: "", None: "good"}
"""The tone of a figure of a severity; None: below all thresholds."""


def tone_of(value: float | None, level: Level) -> str:
    """The tone of a figure by its thresholds; ``dim`` where it is unknown."""
    return "dim" if value is None else TONES[level.severity(value)]


# ---- ranks ---------------------------------------------------------------------------------------


def _tone_by_level(level: Level | None) -> str | Callable[[float, Any], str]:
    return "" if level is None else lambda value, _: tone_of(value, level)


def _rank_column(name: str, width: int, figure: Figure, priority: int = 0) -> Column[RankSnapshot]:
    tone = _tone_by_level(figure.level)
    return Column(name, figure.of_rank, figure.unit, width, priority, tone=tone)


def _node_column(name: str, width: int, figure: Figure, priority: int = 0) -> Column[FleetNode]:
    tone = _tone_by_level(figure.level)
    return Column(name, figure.of_node, figure.unit, width, priority, tone=tone)


RANK_COLUMNS: Columns[RankSnapshot] = (
    Column("rank", lambda r: r.rank, INDEX, 6, tone="bold"),
    Column("node", lambda r: r.node, TEXT, 10, 5, tone="dim"),
    Column("state", lambda r: r.status.ended or r.steps.phase, TEXT, 14, show=state_text,
           tone=lambda _, r: "bad" if r.status.failed else "dim" if r.status.ended else ""),
    Column("steps", lambda r: r.steps.last_step, COUNT, 9, 3),
    _rank_column("step", 9, STEP),
    _rank_column("exposed", 9, EXPOSED_SECONDS, 2),
    _rank_column("share", 8, EXPOSED),
    _rank_column("overlap", 9, OVERLAP, 4),
    _rank_column("late", 9, LATE, 2),
    _rank_column("waits", 9, WAITS, 3),
    _rank_column("memory", 11, MEMORY),
    _rank_column("risk", 8, RISK),
    Column("device", lambda r: r.device, TEXT, 9, 7, tone="dim"),
    Column("unit", lambda r: r.steps.unit, TEXT, 18, 3, tone="dim", grows=True, ends=True),
)  # fmt: skip
"""One rank a row; seconds and shares are of a step."""

# ---- a run of many ranks -------------------------------------------------------------------------


def _node_state(node: FleetNode) -> str:
    if node.silent_seconds:
        return f"silent {human_seconds(round(node.silent_seconds))}"
    if node.failed:
        return f"{node.failed} failed"
    return f"{node.up} up" if node.up else "ended"


NODE_COLUMNS: Columns[FleetNode] = (
    Column("node", lambda n: n.node, TEXT, 16, tone="bold", grows=True, ends=True),
    Column("ranks", lambda n: n.ranks, COUNT, 7, 2),
    Column("state", lambda n: (n.silent_seconds, n.failed, -n.up), TEXT, 16, show=_node_state,
           tone=lambda _, node: (
               "warn" if node.silent_seconds else "bad" if node.failed else "" if node.up else "dim")),
    _node_column("step", 10, STEP),
    _node_column("share", 9, EXPOSED),
    _node_column("late", 10, LATE, 1),
    _node_column("waits", 10, WAITS, 3),
    _node_column("memory", 12, MEMORY),
    _node_column("risk", 9, RISK),
)  # fmt: skip
"""One node a row; figures are those of its worst rank."""

# ---- communication -------------------------------------------------------------------------------


TRAFFIC_COLUMNS: Columns[CollectiveStatsRow] = (
    Column("unit", lambda t: t.unit, TEXT, 18, show=lambda t: t.unit or f"({t.group})", tone="bold",
           grows=True, ends=True),
    Column("op", lambda t: t.op, TEXT, 15),
    Column("group", lambda t: t.group, TEXT, 14, 5,
           lambda t: f"{group_name(t.group, t.dim)}({t.group_size})", "dim"),
    Column("dim", lambda t: t.dim, TEXT, 11, 6, lambda t: t.dim or "-", "dim"),
    Column("phase", lambda t: t.phase, TEXT, 10, 1, lambda t: t.phase.replace("_", " ")),
    Column("calls", lambda t: t.calls, CALLS, 7, 4),
    Column("bytes", lambda t: t.nbytes, MEBIBYTES, 11, 2),
    Column("time", lambda t: t.seconds or None, SECONDS, 9, unknown="-"),
    Column("waits", lambda t: t.wait_seconds, SECONDS, 9, 2, unknown="-"),
    Column("transfer", lambda t: t.transfer_seconds, SECONDS, 10, 4, unknown="-"),
    Column("exposed", lambda t: t.exposed_seconds, SECONDS, 9,
           tone=lambda seconds, _: "warn" if seconds > 0 else ""),
    Column("algbw", lambda t: t.algbw_bytes_per_second or None, RATE, 11, 6, unknown="-"),
    Column("busbw", lambda t: t.busbw_bytes_per_second or None, RATE, 11, 1, unknown="-"),
    Column("best", lambda t: t.best_busbw_bytes_per_second or None, RATE, 11, 5, unknown="-"),
)  # fmt: skip
"""One operation in one unit, group and phase; figures are means per step."""


@dataclass(frozen=True, slots=True)
class Flight:
    """A collective in flight on one rank, and its age."""

    rank: int
    what: InFlight
    group: str
    """As in the verdict on a hang: ``dp``."""
    seconds: float


FLIGHT_COLUMNS: Columns[Flight] = (
    Column("rank", lambda f: f.rank, INDEX, 6, tone="bold"),
    Column("op", lambda f: f.what.op, TEXT, 15),
    Column("for", lambda f: f.seconds, SECONDS, 10, tone=_tone_by_level(IN_FLIGHT_SECONDS)),
    Column("bytes", lambda f: f.what.nbytes, BYTES, 11, 2),
    Column("number", lambda f: f.what.sequence, COUNT, 10, 3, tone="dim"),
    Column("group", lambda f: f.group, TEXT, 12, 1, tone="dim"),
    Column("unit", lambda f: f.what.unit, TEXT, 12, show=lambda f: f.what.unit or "-", grows=True,
           ends=True),
)  # fmt: skip


def list_flights(ranks: Sequence[RankSnapshot], now_ns: int) -> list[Flight]:
    """The collectives in flight, the oldest first; *now_ns*: CLOCK_MONOTONIC."""
    rows = []
    for rank in ranks:
        dims = {group.group_id: group.dim for group in rank.communication.groups}
        for entry in rank.communication.in_flight:
            name = group_name(entry.group, dims.get(entry.group_id, ""))
            seconds = max(0.0, (now_ns - entry.issued_ns) / 1e9)
            rows.append(Flight(rank.rank, entry, name, seconds))
    return sorted(rows, key=lambda flight: -flight.seconds)


# ---- memory --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class RoleLine:
    """The memory of one role of a rank, or memory that no role accounts for."""

    name: str
    measured: int | None
    tiers: Mapping[str, int]
    """Bytes on device, host and disk, gathered parameters at their peak."""
    predicted: int | None = None
    plain: int | None = None

    @property
    def where(self) -> str:
        """The tiers that hold some of it."""
        return ", ".join(tier for tier, nbytes in self.tiers.items() if nbytes)


def role_lines(rank: RankSnapshot) -> list[RoleLine]:
    """The memory of a rank by role, then what no role accounts for; lines of 0 bytes are left out."""
    expected = {row.role: row for row in rank.memory.expected}
    role_rows = []
    for name in dict.fromkeys([*expected, *(row.role for row in rank.memory.roles)]):
        tiers = dict(zip(("device", "host", "disk"), role_bytes(rank, name) or (), strict=False))
        row, title = expected.get(name), name.replace("_", " ")
        if row is None:
            role_rows.append(RoleLine(title, sum(tiers.values()), tiers))
        else:
            role_rows.append(
                RoleLine(title, row.measured_bytes, tiers, row.predicted_bytes, row.plain_bytes)
            )
    role_rows += [
        RoleLine(
            UNATTRIBUTED_NAMES[remainder.kind], remainder.nbytes, {remainder.place: remainder.nbytes}
        )
        for remainder in unattributed_memory(rank)
    ]
    return [role for role in role_rows if role.measured or role.predicted or role.plain]


ROLE_COLUMNS: Columns[RoleLine] = (
    Column("role", lambda r: r.name, TEXT, 22, grows=True),
    Column("where", lambda r: r.where, TEXT, 14, tone="dim"),
    Column("measured", lambda r: r.measured, BYTES, 12),
    Column("predicted", lambda r: r.predicted, BYTES, 12),
    Column("plain ZeRO", lambda r: r.plain, BYTES, 12),
)

# ---- steps and findings ---------------------------------------------------------------------------


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


STEP_COLUMNS: Columns[RankStep] = (
    Column("rank", lambda s: s.rank, INDEX, 6, tone="bold"),
    Column("step", lambda s: s.step.step, COUNT, 9),
    Column("start", lambda s: s.step.start_ns / 1e9, SECONDS),
    Column("duration", lambda s: s.step.seconds, SECONDS),
    *(Column(name.replace("_", " "), _phase_time(at), SECONDS) for at, name in enumerate(RECORDED)),
    Column("communication", _timed_seconds(lambda step: step.communication_ns), SECONDS),
    Column("exposed", _timed_seconds(lambda step: step.exposed_ns), SECONDS),
    Column("allocated", _known_bytes(lambda step: step.allocated_bytes), BYTES),
    Column("reserved", _known_bytes(lambda step: step.reserved_bytes), BYTES),
    Column("rss", _known_bytes(lambda step: step.rss_bytes), BYTES),
)
"""The steps that the timeline draws; *start* is CLOCK_MONOTONIC of the node."""

MARKS: dict[Severity, tuple[str, str]] = {
    Severity.CRITICAL: ("!!", "bad"),
    Severity.WARNING: ("!", "warn"),
    Severity.INFO: ("·", ""),
}
"""The mark and the tone of a severity."""


FINDING_COLUMNS: Columns[Finding] = (
    Column("", lambda f: Severity(f.severity).order, TEXT, 4, show=lambda f: MARKS[f.severity][0],
           tone=lambda _, f: MARKS[f.severity][1]),
    Column("code", lambda f: f.code, TEXT, 7, tone="bold"),
    Column("rank", lambda f: f.rank, INDEX, 6, show=lambda f: str(f.rank) if f.rank >= 0 else "all"),
    Column("expected", lambda f: f.remedy and f.remedy.gain_low_seconds, SECONDS, 18, 1,
           lambda f: "-" if f.remedy is None else effect_text(f.remedy) or "see below",
           tone=lambda _, f: "dim" if not f.remedy else "good" if effect_text(f.remedy) else ""),
    Column("what", lambda f: f.text, TEXT, 44, tone=lambda _, f: MARKS[f.severity][1], grows=True),
)  # fmt: skip


# ---- aligned text ------------------------------------------------------------------------------

_WIDTH, _MIN_WIDTH = 80, 16


def aligned_table(
    header: Sequence[str], rows: Sequence[Sequence[str]], left_columns: Sequence[int] = (0,)
) -> str:
    """Columns aligned, each cell on its line: those of *left_columns* to the left."""
    header, rows = tuple(map(printable, header)), [tuple(map(printable, row)) for row in rows]
    widths = [max(len(row[i]) for row in (header, *rows)) for i in range(len(header))]
    table_rows = [
        "  ".join(
            cell.ljust(width) if i in left_columns else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in (header, *rows)
    ]
    return "\n".join(f"  {table_row}" for table_row in table_rows)


def text_table(rows: Iterable[Row], *columns: Column[Row], cuts: Sequence[int] = ()) -> str:
    """A table of *rows* with *columns*, without those that have ``-`` in each row.

    With *cuts*, it is a :func:`fitted_table`.
    """
    cells = [[column.text(row) for column in columns] for row in rows]
    filled = [not cells or any(row[at] != "-" for row in cells) for at in range(len(columns))]
    filled_columns = [*compress(columns, filled)]
    left_columns = [at for at, column in enumerate(filled_columns) if column.left or not at]
    header = [column.name for column in filled_columns]
    return fitted_table(
        header, [[*compress(row, filled)] for row in cells], *cuts, left_columns=left_columns
    )


def fitted_table(
    header: Sequence[str], rows: Sequence[Sequence[str]], *cuts: int, left_columns: Sequence[int] = (0,)
) -> str:
    """A table in which cells of the columns *cuts* lose their middle, so that it has 80 columns.

    Those of the first of *cuts* lose it first.
    """
    cells = [list(map(printable, row)) for row in rows]
    for column in cuts:
        widths = [max(map(len, values)) + 2 for values in zip(header, *cells, strict=True)]
        max_width = max(_MIN_WIDTH, widths[column] - 2 - max(0, sum(widths) - _WIDTH))
        for row in cells:
            row[column] = _cut_out_middle(row[column], max_width)
    return aligned_table(header, cells, left_columns)


def _cut_out_middle(cell: str, max_width: int) -> str:
    ahead = (max_width - 3) // 2
    return cell if len(cell) <= max_width else f"{cell[:ahead]}...{cell[ahead + 3 - max_width :]}"
