"""A threshold, a sentence, a figure and an order stand once: this searches the product for copies."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from zeromon.readout.breakdown import PARTS
from zeromon.snapshot import levels
from zeromon.tui import drawing as bars, styles
from zeromon_dashboard import plotly_figures

ROOT = Path(__file__).resolve().parents[2]
PRODUCT = sorted(
    path
    for folder in ("zeromon", "dashboard/zeromon_dashboard", "agents/zeromon_agents")
    for path in (ROOT / folder).rglob("*.py")
)
VIEWS = (
    "zeromon/readout/report.py", "zeromon/readout/communication_report.py",
    "zeromon/readout/death_report.py", "zeromon/readout/trace_report.py", "zeromon/tui",
    "zeromon/cli/report.py", "zeromon/export/prometheus", "dashboard",
)  # fmt: skip
JUDGES = (*VIEWS, "zeromon/diagnosis", "zeromon/memory/forecast.py")
LEVELS = {name: value for name, value in vars(levels).items() if isinstance(value, levels.Level)}


def _name(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


@functools.cache
def _nodes(path: Path) -> list[ast.AST]:
    """The syntax tree of a module, flat."""
    return list(ast.walk(ast.parse(path.read_text())))


@functools.cache
def _texts(path: Path) -> list[str]:
    """Every string, parts of f-strings included, that is no docstring."""
    documents = {id(node.value) for node in _nodes(path) if isinstance(node, ast.Expr)}
    return [
        node.value
        for node in _nodes(path)
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
        if id(node) not in documents
    ]


def _numbers(node: ast.AST) -> set[float]:
    return {
        part.value
        for part in ast.walk(node)
        if isinstance(part, ast.Constant) and isinstance(part.value, float)
    }


def _judged(path: Path) -> Iterator[tuple[str, set[float]]]:
    """Comparisons of a share or risk with a number."""
    for node in _nodes(path):
        if isinstance(node, ast.Compare):
            text, numbers = ast.unparse(node), _numbers(node)
            if numbers and re.search(r"ratio|share|risk|exposed|overlap", text):
                yield text, numbers


def test_no_view_has_a_threshold_of_its_own() -> None:
    own = [
        (_name(path), text)
        for path in PRODUCT
        if _name(path).startswith(VIEWS)
        for text, numbers in _judged(path)
        if numbers - {0.0, 1.0}
    ]
    assert own == []


def test_no_rule_or_forecast_repeats_the_levels_of_risk_and_exposed_communication() -> None:
    shared = {
        value for level in (levels.OOM, levels.EXPOSED) for value in (level.warning, level.critical)
    }
    repeated = [
        (_name(path), text)
        for path in PRODUCT
        if _name(path).startswith(JUDGES)
        for text, numbers in _judged(path)
        if re.search(r"risk\.ratio|exposed_ratio", text) and numbers & shared
    ]
    assert repeated == []


@pytest.mark.parametrize("level", LEVELS.values(), ids=list(LEVELS))
def test_no_pair_of_thresholds_stands_twice(level: levels.Level) -> None:
    def number(value: float) -> str:
        whole = int(value) == value
        return rf"\b{value:g}(?:\.0+)?\b" if whole else rf"\b{value:g}0*\b".replace(".", r"\.")

    pair = re.compile(rf"{number(level.warning)}\s*(?:,|if|else|or|and)[^\n]*{number(level.critical)}")
    found = [
        (_name(path), line.strip())
        for path in PRODUCT
        if not _name(path).startswith(("zeromon/snapshot/levels.py", "zeromon/check", "zeromon/fold"))
        for line in path.read_text().splitlines()
        if pair.search(line) and re.search(r"warn|bad|red|critical|level|tone|colour", line)
    ]
    assert found == []


SENTENCES = (
    "is stuck", "has not ended for", " memory runs out at about ", " memory at about step ",
    "the others wait ", "has not reported for",
    "not seen for", "died: rank", "stopped by ", "finished after", "running, step ",
    "; cost: ", "predicted: ", " shorter", " less per rank", "up to -", "in own code",
    "no margin is left", " such kills", "has not called it",
)  # fmt: skip
"""Parts of the sentences that more than one view shows; a part stands in one module."""


@pytest.mark.parametrize("part", SENTENCES)
def test_a_sentence_stands_in_one_module(part: str) -> None:
    packages = (
        "zeromon/tui", "zeromon/readout", "zeromon/diagnosis", "zeromon/sources",
        "zeromon/snapshot", "zeromon/collector", "zeromon/cli/doctor.py",
        "zeromon/cli/attach_process.py", "dashboard",
    )  # fmt: skip
    found = [
        _name(path)
        for path in PRODUCT
        if _name(path).startswith(packages) and any(part in text for text in _texts(path))
    ]
    assert len(found) == 1, found


def test_whom_a_finding_is_about_is_written_in_one_place() -> None:
    pattern = re.compile(r'f"rank \{[^}]*rank\}: " if [^"]*rank >= 0')
    found = [_name(path) for path in PRODUCT if pattern.search(path.read_text())]
    assert found == ["zeromon/readout/text.py"]


def test_no_view_takes_rendered_text_apart() -> None:
    taken = re.compile(r"\*diff\b|remedy_lines\(.*\)\[|_text\([^)]*\)\.(split|partition|removesuffix)")
    found = [
        _name(path) for path in PRODUCT
        if _name(path).startswith(VIEWS) and taken.search(path.read_text())
    ]  # fmt: skip
    assert found == []


def test_the_order_of_phases_stands_once() -> None:
    """As a sequence; the columns of the step history are the layout of a file."""
    found = []
    for path in PRODUCT:
        for node in _nodes(path):
            if isinstance(node, (ast.Tuple, ast.List)):
                names = [p.value for p in node.elts if isinstance(p, ast.Constant)]
                if {"forward", "backward", "optimizer"} <= set(map(str, names)):
                    found.append(_name(path))
    assert found == ["zeromon/readout/breakdown.py"]


def test_every_part_of_a_step_has_a_colour_and_a_letter() -> None:
    assert set(PARTS) <= set(bars.LETTERS)
    assert set(PARTS) == set(plotly_figures.PHASE_COLOURS)
    for background in ("dark", "light", "sixteen"):
        assert set(PARTS) <= set(styles._PALETTES[background])


def test_severities_are_ordered_in_one_place() -> None:
    """The configuration checks have errors in place of critical findings, and an order of their own."""
    found = []
    for path in PRODUCT:
        for node in _nodes(path):
            if isinstance(node, (ast.Tuple, ast.List)):
                names = {p.value for p in node.elts if isinstance(p, ast.Constant)}
                if {"critical", "warning"} <= {str(name) for name in names}:
                    found.append(_name(path))
    assert found == []
