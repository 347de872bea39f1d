"""What a check says: one problem, at one place of one file."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from zeromon.model import ModelSpec
from zeromon.rules import pages

AUTO = "auto"
"""What a program fills in; also stands for what a script computes, and nobody can know here."""

Path = tuple[str, ...]
"""The keys that lead to a value."""

SEVERITIES = ("error", "warning", "info")
"""An error does not start, or not as written; a warning costs time or memory; an info is a choice."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """One finding."""

    code: str
    severity: str
    file: str
    line: int
    column: int
    message: str
    """One sentence without a period."""
    fix: str
    """What to write instead, or what to do."""
    key: str = ""
    """Like ``zero_optimization.overlap_comm``."""
    quiet: bool = False
    """It states a fact, and is shown only where everything is asked for."""

    @property
    def name(self) -> str:
        """The rule's name, from its page."""
        return pages()[self.code].name


def problem_at(
    file: str,
    place: tuple[int, int],
    code: str,
    severity: str,
    message: str,
    fix: str,
    key: str = "",
    *,
    quiet: bool = False,
) -> Problem:
    """A problem of *file* at *place*, a line and a column."""
    line, column = place
    return Problem(
        code=code,
        severity=severity,
        file=file,
        line=line,
        column=column,
        message=message,
        fix=fix,
        key=key,
        quiet=quiet,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """What the command line says of the machine and the model."""

    devices: int | None = None
    device_bytes: int | None = None
    model: ModelSpec | None = None
    host_bytes: int | None = None
    hosts: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """A configuration, and where each of its keys stands."""

    file: str
    data: Mapping[str, Any]
    places: Mapping[Path, tuple[int, int]]
    dialect: str = "json"
    """json, yaml or python: how a fix is written."""
    duplicates: tuple[Path, ...] = ()
    ranks: int | None = None
    """As another file, or the command line, says."""
    text: str = field(default="", repr=False)

    def get(self, *path: str, default: Any = None) -> Any:
        """The value at *path*; *default* where there is none."""
        value: Any = self.data
        for name in path:
            if not isinstance(value, Mapping) or name not in value:
                return default
            value = value[name]
        return value

    def section(self, *path: str) -> Mapping[str, Any]:
        """The section at *path*; an empty one where there is none."""
        value = self.get(*path)
        return value if isinstance(value, Mapping) else {}

    def has(self, *path: str) -> bool:
        """Whether something is said at *path*."""
        missing = object()
        return self.get(*path, default=missing) is not missing

    def place(self, path: Path) -> tuple[int, int]:
        """Line and column of *path*, or of the nearest section around it."""
        while path and path not in self.places:
            path = path[:-1]
        return self.places.get(path, (1, 1))

    def write(self, name: str, value: Any) -> str:
        """*name* with *value*, as it is written in this file."""
        if self.dialect == "yaml":
            return f"{name}: {_yaml(value)}"
        return f'"{name}": {_json(value) if self.dialect == "json" else repr(value)}'

    def problem(
        self, code: str, severity: str, path: Path, message: str, fix: str, *, quiet: bool = False
    ) -> Problem:
        """A problem at *path*."""
        place, key = self.place(path), ".".join(path)
        return problem_at(self.file, place, code, severity, message, fix, key, quiet=quiet)

    def on(self, ranks: int | None) -> Config:
        """The same, where the number of ranks is known."""
        return replace(self, ranks=self.ranks or ranks)


def _json(value: Any) -> str:
    if isinstance(value, bool) or value is None:
        return {True: "true", False: "false", None: "null"}[value]
    return f'"{value}"' if isinstance(value, str) else str(value)


def _yaml(value: Any) -> str:
    if value == "no":
        return "'no'"
    return value if isinstance(value, str) else _json(value)


def number(value: Any) -> float | None:
    """A number as a configuration may write it; None for anything else, and for "auto"."""
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        return None
    try:
        found = float(value)
    except (ValueError, OverflowError):
        return None
    return found if -1e18 < found < 1e18 else None


def whole(value: Any) -> int | None:
    """A whole number; None for anything else."""
    found = number(value)
    return int(found) if found is not None and found == int(found) else None


def is_on(value: Any) -> bool | None:
    """A switch as DeepSpeed and accelerate take it; None where it is not said, or "auto"."""
    if isinstance(value, str):
        return {"true": True, "false": False}.get(value.lower())
    return bool(value) if isinstance(value, (bool, int)) else None


def listed(names: Iterable[str]) -> str:
    """``a, b and c``."""
    known = list(names)
    return " and ".join(filter(None, [", ".join(known[:-1]), known[-1]])) if known else ""
