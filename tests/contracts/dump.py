"""Prints what users rely on, one line each, in an order that a diff can compare.

    python tests/contracts/dump.py > contracts.txt

The lines are the command line (verbs, options, defaults), the metrics (name, type, unit, labels, help),
the JSON keys of a run snapshot with their types, those of the messages between nodes with the number
of their layout, the rules (code, name), and the environment variables.
``contracts.txt`` beside this file is the state of this version; ``test_contracts.py`` fails when they
differ. A test of docs/reference/columns.md holds the columns of the step export.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator
from pathlib import Path

import msgspec

from zeromon.cli import build_parser
from zeromon.collector.cluster import EXCHANGE, LeaderReply, NodeReport
from zeromon.diagnosis.rule import all_pages
from zeromon.export.prometheus.metrics import METRICS
from zeromon.snapshot import RunSnapshot

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("zeromon", "agents/zeromon_agents", "dashboard/zeromon_dashboard")


def command_line(parser: argparse.ArgumentParser, verb: str = "zeromon") -> Iterator[str]:
    """Every option and positional of *parser* and of its verbs; help texts are left out."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for name, sub in action.choices.items():
                yield from command_line(sub, f"{verb} {name}")
        elif not isinstance(action, argparse._HelpAction | argparse._VersionAction):
            name = ", ".join(action.option_strings) or str(action.metavar or action.dest)
            choices = f" of {sorted(map(str, action.choices))}" if action.choices else ""
            nargs = f" nargs={action.nargs}" if action.nargs is not None else ""
            default = action.default
            shown = "" if default in (None, argparse.SUPPRESS) else f" default={default!r}"
            yield f"cli {verb} {name}{nargs}{choices}{shown}"


def metrics() -> Iterator[str]:
    """Every metric of ``/metrics``."""
    for spec in METRICS:
        labels = ",".join(spec.labels)
        yield f"metric {spec.name}{{{labels}}} {spec.kind} [{spec.unit}] {spec.help}"


def json_keys(kind: object, path: str) -> Iterator[str]:
    """Every key below *path* with the JSON type of its value; [] is an item of a list, * any key."""
    info = msgspec.inspect.type_info(kind) if not isinstance(kind, msgspec.inspect.Type) else kind
    if isinstance(info, msgspec.inspect.UnionType):
        parts = [part for part in info.types if not isinstance(part, msgspec.inspect.NoneType)]
        optional = len(parts) < len(info.types)
        for part in parts:
            yield from json_keys(part, f"{path}?" if optional else path)
    elif isinstance(info, msgspec.inspect.DataclassType | msgspec.inspect.StructType):
        for field in info.fields:
            yield from json_keys(field.type, f"{path}.{field.encode_name}")
    elif isinstance(info, msgspec.inspect.TypedDictType | msgspec.inspect.NamedTupleType):
        for field in info.fields:
            yield from json_keys(field.type, f"{path}.{field.name}")
    elif isinstance(
        info,
        msgspec.inspect.ListType
        | msgspec.inspect.VarTupleType
        | msgspec.inspect.SetType
        | msgspec.inspect.FrozenSetType,
    ):
        yield from json_keys(info.item_type, f"{path}[]")
    elif isinstance(info, msgspec.inspect.DictType):
        yield from json_keys(info.value_type, f"{path}.*")
    elif isinstance(info, msgspec.inspect.TupleType):
        for number, item in enumerate(info.item_types):
            yield from json_keys(item, f"{path}[{number}]")
    else:
        name = type(info).__name__.removesuffix("Type").lower()
        yield f"json {path}: {'str' if name == 'enum' else name}"


def rules() -> Iterator[str]:
    """Every rule that ``zeromon rule`` explains."""
    for page in all_pages().values():
        yield f"rule {page.code} {page.name}"


def environment() -> Iterator[str]:
    """Every environment variable that the packages name."""
    names: set[str] = set()
    for package in PACKAGES:
        for file in (ROOT / package).rglob("*.py"):
            names.update(re.findall(r"\bZEROMON_[A-Z][A-Z_]*[A-Z]\b", file.read_text()))
    yield from (f"environment {name}" for name in sorted(names))


def dump() -> str:
    """All of it, a line each."""
    lines = [
        *command_line(build_parser()),
        *metrics(),
        *sorted(json_keys(RunSnapshot, "run")),
        *sorted((*json_keys(NodeReport, "report"), *json_keys(LeaderReply, "reply"))),
        f"json exchange: {EXCHANGE}; another number after any change of json report and json reply",
        *rules(),
        *environment(),
    ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(dump(), end="")
