"""The result of a check, a problem at one place of one file, and the configuration that is checked."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from functools import cache
from importlib.resources import files
from pathlib import PurePath
from typing import Any, NamedTuple
from urllib.parse import quote

from zeromon import __version__
from zeromon.diagnosis.pages import pages
from zeromon.memory.config_files import (
    AUTO as AUTO,
    is_on as is_on,
    number as number,
    whole as whole,
)
from zeromon.memory.spec import ModelSpec

Path = tuple[str, ...]
"""The keys from the top of a configuration to a value."""

SEVERITIES = ("error", "warning", "info")
"""error: training fails or ignores the setting; warning: costs time or memory; info: a trade-off."""


@dataclass(frozen=True, slots=True)
class Problem:
    """A problem of a configuration or script, with a fix."""

    file: str
    line: int
    column: int
    """Both from 1."""
    code: str
    severity: str
    message: str
    """One sentence without a period."""
    fix: str
    """The replacement, or the action that solves the problem."""
    key: str = ""
    """Dotted path of the setting, such as ``zero_optimization.overlap_comm``; may be empty."""
    quiet: bool = False
    """The problem only states a fact; ``check --verbose`` prints it."""

    @property
    def name(self) -> str:
        """The name of the rule, from its documentation page."""
        return pages()[self.code].name


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """The machine and the model from the command line; None where an option was not given."""

    devices: int | None = None
    device_bytes: int | None = None
    model: ModelSpec | None = None
    host_bytes: int | None = None
    hosts: int | None = None
    device: str = ""
    """Name of the device, such as ``v100``; "" where --gpu gives a size."""
    devices_per_host: int | None = None
    link: float | None = None
    """Bytes/s of the slowest link between ranks, at its peak."""


class Refused(NamedTuple):
    """Why and where Python's json module refuses a file that is Hjson."""

    message: str
    line: int
    column: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """A configuration, with the line and column of each key."""

    file: str
    data: Mapping[str, Any]
    places: Mapping[Path, tuple[int, int]]
    dialect: str = "json"
    """The syntax of fixes: json, yaml or python."""
    duplicates: tuple[Path, ...] = ()
    ranks: int | None = None
    """Number of ranks, from the file that names this one; None where unknown."""
    text: str = field(default="", repr=False)
    refused: Refused | None = None
    """Set where the file is Hjson: DeepSpeed reads it, transformers and accelerate do not."""
    origins: Mapping[str, str] = field(default_factory=dict)
    """Last key of a path -> what sets it, where that is not the file."""

    def where(self, name: str) -> str:
        """Returns what sets *name*: the file, unless the launch command does."""
        return self.origins.get(name, self.file)

    def get(self, *path: str, default: Any = None) -> Any:
        """Returns the value at *path*; *default* where the path does not exist."""
        value: Any = self.data
        for name in path:
            if not isinstance(value, Mapping) or name not in value:
                return default
            value = value[name]
        return value

    def section(self, *path: str) -> Mapping[str, Any]:
        """Returns the section at *path*; an empty mapping where there is no section."""
        value = self.get(*path)
        return value if isinstance(value, Mapping) else {}

    def has(self, *path: str) -> bool:
        """Returns whether *path* exists, with any value."""
        missing = object()
        return self.get(*path, default=missing) is not missing

    def place(self, path: Path) -> tuple[int, int]:
        """Returns the line and column of *path*, or of the nearest enclosing section."""
        while path and path not in self.places:
            path = path[:-1]
        return self.places.get(path, (1, 1))

    def write(self, name: str, value: Any) -> str:
        """Returns the setting *name* with *value* in the syntax of the file."""
        if self.dialect == "yaml":
            return f"{name}: {_yaml(value)}"
        return f'"{name}": {_json(value) if self.dialect == "json" else repr(value)}'

    def problem(
        self, code: str, severity: str, path: Path, message: str, fix: str, *, quiet: bool = False
    ) -> Problem:
        """Returns a problem at *path*."""
        place, key = self.place(path), ".".join(path)
        return Problem(self.file, *place, code, severity, message, fix, key, quiet=quiet)

    def on(self, ranks: int | None) -> Config:
        """Returns a copy with the number of ranks, unless the configuration already has one."""
        return replace(self, ranks=self.ranks or ranks)


def _json(value: Any) -> str:
    if isinstance(value, bool) or value is None:
        return {True: "true", False: "false", None: "null"}[value]
    return f'"{value}"' if isinstance(value, str) else str(value)


def _yaml(value: Any) -> str:
    if value == "no":
        return "'no'"
    return value if isinstance(value, str) else _json(value)


def meant(name: object, known: Iterable[str], cutoff: float = 0.6) -> str:
    """Returns ``did you mean X?`` with the name of *known* that is like *name*; "" where none is."""
    near = get_close_matches(str(name), list(known), 1, cutoff)
    return f"did you mean {near[0]}?" if near else ""


def without_effect(names: Sequence[str], why: str) -> tuple[str, str]:
    """Returns message and fix for settings that have no effect *why*: ``at stage 2``."""
    if len(names) == 1:
        return f"{names[0]} has no effect {why}", f"remove {names[0]}"
    return f"{listed(names)} have no effect {why}", "remove them"


def listed(names: Iterable[str]) -> str:
    """Returns the names as a list in words: ``a, b and c``."""
    known = list(names)
    return " and ".join(filter(None, [", ".join(known[:-1]), known[-1]])) if known else ""


Schema = dict[str, Any]


@cache
def schema() -> Schema:
    """Returns the names, types and versions, by framework."""
    content: Schema = json.loads(files("zeromon.check").joinpath("schema.json").read_text())
    return content


# ---- problems as SARIF 2.1.0, for GitHub's code scanning and for editors ------------------------

_LEVELS = {"error": "error", "warning": "warning", "info": "note"}


def as_sarif(problems: Iterable[Problem]) -> dict[str, Any]:
    """Returns a SARIF log with one run: *problems* and the rules that they violate."""
    results = list(problems)
    used = sorted({problem.code for problem in results})
    return {
        "$schema": "https://json.schemastore.org/sarif-2.1.0.json",
        "version": "2.1.0",
        "runs": [
            {
                "tool": {
                    "driver": {
                        "name": "zeromon",
                        "version": __version__,
                        "rules": [_rule(code) for code in used],
                    }
                },
                "columnKind": "unicodeCodePoints",
                "results": [_result(problem, used.index(problem.code)) for problem in results],
            }
        ],
    }


def _rule(code: str) -> dict[str, Any]:
    page = pages()[code]
    return {
        "id": code,
        "name": page.name,
        "shortDescription": {"text": page.summary},
        "fullDescription": {"text": page.summary},
        "help": {"text": page.text.strip(), "markdown": page.text.strip()},
    }


def _result(problem: Problem, index: int) -> dict[str, Any]:
    return {
        "ruleId": problem.code,
        "ruleIndex": index,
        "level": _LEVELS[problem.severity],
        "message": {"text": f"{problem.message}. Fix: {problem.fix}"},
        "locations": [
            {
                "physicalLocation": {
                    "artifactLocation": {"uri": _uri(problem.file)},
                    "region": {"startLine": problem.line, "startColumn": problem.column},
                },
                "logicalLocations": [{"fullyQualifiedName": problem.key}] if problem.key else [],
            }
        ],
        "properties": {"key": problem.key, "fix": problem.fix},
    }


def _uri(file: str) -> str:
    path = PurePath(file)
    return path.as_uri() if path.is_absolute() else quote(path.as_posix())
