"""The fields of rows that views show: what each is called, its unit, how it is read. Pure.

A view chooses fields and decides their order, width and colour. It does not decide how a field is read
from a row, nor in which unit it is shown.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from zeromon.readout.figures import CALLS, MEBIBYTES, RATE, SECONDS, TEXT, Unit
from zeromon.snapshot import CollectiveStatsRow

Row = TypeVar("Row")


@dataclass(frozen=True, slots=True)
class Field(Generic[Row]):
    """A value of a row in its base unit, or a text; None where unknown."""

    name: str
    read: Callable[[Row], Any]
    unit: Unit = TEXT
    unknown: str = "-"
    show: Callable[[Row], str] | None = None
    """The value for people, where it is not that of the unit."""

    def text(self, row: Row) -> str:
        """The value for people."""
        if self.show is not None:
            return self.show(row)
        value = self.read(row)
        return self.unknown if value is None else self.unit.text(value)

    def scaled(self, row: Row) -> Any:
        """The value in the unit's symbol with four decimal places, or the text; None where unknown."""
        if self.unit is TEXT:
            return self.text(row)
        value = self.read(row)
        return None if value is None else round(self.unit.scale * value, 4)


Fields = dict[str, Field[Row]]


def by_name(*fields: Field[Row]) -> Fields[Row]:
    """The *fields* in their order, by their names."""
    return {field.name: field for field in fields}


TRAFFIC: Fields[CollectiveStatsRow] = by_name(
    Field("unit", lambda row: row.unit, show=lambda row: row.unit or f"({row.group})"),
    Field("op", lambda row: row.op),
    Field("group", lambda row: row.group, show=lambda row: f"{row.group}({row.group_size})"),
    Field("dim", lambda row: row.dim, show=lambda row: row.dim or "-"),
    Field("phase", lambda row: row.phase, show=lambda row: row.phase.replace("_", " ")),
    Field("calls", lambda row: row.calls, CALLS),
    Field("bytes", lambda row: row.nbytes, MEBIBYTES),
    Field("time", lambda row: row.seconds, SECONDS),
    Field("waits", lambda row: row.wait_seconds, SECONDS),
    Field("transfer", lambda row: row.transfer_seconds, SECONDS),
    Field("exposed", lambda row: row.exposed_seconds, SECONDS),
    Field("algbw", lambda row: row.algbw_bytes_per_second or None, RATE),
    Field("busbw", lambda row: row.busbw_bytes_per_second or None, RATE),
    Field("best", lambda row: row.best_busbw_bytes_per_second or None, RATE),
)
"""One operation in one unit, group and phase; figures are means per step."""
