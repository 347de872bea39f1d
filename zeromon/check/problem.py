"""The result of a check, a problem at one place of one file, and the configuration that is checked."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from functools import cache
from importlib.resources import files
from pathlib import PurePath
from typing import Any, NamedTuple
from urllib.parse import quote

from zeromon import __version__
from zeromon.diagnosis.rule import all_pages
from zeromon.memory.config_files import is_on, parse_number, parse_whole
from zeromon.memory.spec import ModelSpec

Path = tuple[str, ...]
"""The keys from the top of a configuration to a value."""

SEVERITIES = ("error", "warning", "info")
"""error: training fails or ignores the setting; warning: costs time or memory; info: a trade-off."""


ENVIRONMENT_DIALECT = "environment"
"""The dialect of a configuration that a program passes to accelerate in its environment."""


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
        return all_pages()[self.code].name


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
    is_filled: bool = False
    """Set where an accelerate file or a Trainer takes it, which replace "auto"."""
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

    def number(self, *path: str, default: Any = None) -> float | None:
        """Returns the number at *path*, also from a text; None for anything else."""
        return parse_number(self.get(*path, default=default))

    def whole(self, *path: str, default: Any = None) -> int | None:
        """Returns the whole number at *path*, also from a text; None for anything else."""
        return parse_whole(self.get(*path, default=default))

    def is_on(self, *path: str) -> bool | None:
        """Returns whether the switch at *path* is on; None for a value that is no switch."""
        return is_on(self.get(*path))

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
        if self.dialect in ("yaml", ENVIRONMENT_DIALECT):
            return f"{name}: {yaml_literal(value)}"
        return f'"{name}": {_json_literal(value) if self.dialect == "json" else repr(value)}'

    def problem(
        self, code: str, severity: str, path: Path, message: str, fix: str, *, quiet: bool = False
    ) -> Problem:
        """Returns a problem at *path*."""
        position, key = self.place(path), ".".join(path)
        return Problem(self.file, *position, code, severity, message, fix, key, quiet=quiet)

    def change(self, code: str, severity: str, path: Path, message: str, value: Any) -> Problem:
        """Returns a problem at *path* that *value* solves."""
        return self.problem(code, severity, path, message, self.write(path[-1], value))


def _json_literal(value: Any) -> str:
    if isinstance(value, bool) or value is None:
        return {True: "true", False: "false", None: "null"}[value]
    return f'"{value}"' if isinstance(value, str) else str(value)


def yaml_literal(value: Any) -> str:
    """Returns *value* as YAML, in quotes where YAML would read it as another one."""
    # YAML reads an unquoted no as false
    if value == "no":
        return "'no'"
    return value if isinstance(value, str) else _json_literal(value)


def did_you_mean(name: object, candidates: Iterable[str], cutoff: float = 0.6) -> str:
    """Returns ``did you mean X?`` with the one of *candidates* that is like *name*; "" without."""
    matches = get_close_matches(str(name), list(candidates), 1, cutoff)
    return f"did you mean {matches[0]}?" if matches else ""


def without_effect(names: Sequence[str], condition: str) -> tuple[str, str]:
    """Returns message and fix for settings that have no effect *condition*: ``at stage 2``."""
    verb = "has" if len(names) == 1 else "have"
    return f"{join_names(names)} {verb} no effect {condition}", f"remove {join_names(names)}"


def set_instead(old: str, setting: str) -> str:
    """Returns the fix that puts *setting* in the place of the setting *old*."""
    return f"remove {old}, and set {setting}"


def join_names(names: Iterable[str]) -> str:
    """Returns the names as a list in words: ``a, b and c``."""
    ordered = list(names)
    return " and ".join(filter(None, [", ".join(ordered[:-1]), ordered[-1]])) if ordered else ""


Schema = dict[str, Any]


def load_table(name: str) -> Schema:
    """Returns the content of the data file *name* of this package."""
    content: Schema = json.loads(files("zeromon.check").joinpath(f"{name}.json").read_text())
    return content


@cache
def load_schema() -> Schema:
    """Returns the names, types and versions, by framework."""
    return load_table("schema")


NAMES = load_table("names")
"""Names by framework and use that no schema of the frameworks tells."""


# ---- problems as SARIF 2.1.0, for GitHub's code scanning and for editors ------------------------

_LEVELS = {"error": "error", "warning": "warning", "info": "note"}


def as_sarif(problems: Iterable[Problem]) -> dict[str, Any]:
    """Returns a SARIF log with one run: *problems* and the rules that they violate."""
    results = list(problems)
    used = sorted({problem.code for problem in results})
    driver = {"name": "zeromon", "version": __version__, "rules": [_sarif_rule(code) for code in used]}
    run = {
        "tool": {"driver": driver},
        # Without this, readers of SARIF count UTF-16 units, and Python counts code points
        "columnKind": "unicodeCodePoints",
        "results": [_sarif_result(p, used.index(p.code)) for p in results],
    }
    return {
        "$schema": "https://json.schemastore.org/sarif-2.1.0.json", "version": "2.1.0", "runs": [run],
    }  # fmt: skip


def _sarif_rule(code: str) -> dict[str, Any]:
    page = all_pages()[code]
    return {
        "id": code,
        "name": page.name,
        "shortDescription": {"text": page.summary},
        "fullDescription": {"text": page.summary},
        "help": {"text": page.text.strip(), "markdown": page.text.strip()},
    }


def _sarif_result(problem: Problem, index: int) -> dict[str, Any]:
    path = PurePath(problem.file)
    position = {
        "artifactLocation": {"uri": path.as_uri() if path.is_absolute() else quote(path.as_posix())},
        "region": {"startLine": problem.line, "startColumn": problem.column},
    }
    names = [{"fullyQualifiedName": problem.key}] if problem.key else []
    return {
        "ruleId": problem.code,
        "ruleIndex": index,
        "level": _LEVELS[problem.severity],
        "message": {"text": f"{problem.message}. Fix: {problem.fix}"},
        "locations": [{"physicalLocation": position, "logicalLocations": names}],
        "properties": {"key": problem.key, "fix": problem.fix},
    }
