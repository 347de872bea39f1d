"""Measures how the product names things: ``python tools/naming.py`` prints what the tests limit."""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PRODUCT = ("zeromon", "agents/zeromon_agents", "agents/zeromon_vgpu", "dashboard/zeromon_dashboard")
VAGUE = frozenset(
    """
    found known made said told say says own one each other others rest both here there apart away ago
    again asked ask given kept left right gone shown shows seen sees look looks held holds holding taken
    takes take came come comes most least more less some all any before after since until now then ever
    never when where which who whose what why how way ways place places part parts piece pieces thing
    things whole half alone alike beside besides behind within between about around far near further
    usual wanted wants want due spent read written ready open opened closed lived living lives dead wall
    room rooms floor door doors word words text texts lines line figure figures many few several first
    last next following newest oldest latest soonest middle best worst single same good bad fine meant
    means begun began begin begins ended ends end over under up down out off on real plain even odd sure
    settled moment moments course
    """.split()
)
"""Words that tell a reader nothing when a name is one of them alone (names: CONTRIBUTING.md)."""


@dataclass
class Naming:
    """Counts of names and lines over some modules."""

    variables: Counter[str] = field(default_factory=Counter)
    functions: Counter[str] = field(default_factory=Counter)
    lines: int = 0
    comment_lines: int = 0

    def add(self, source: str) -> None:
        """Counts the names and lines of one module."""
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                self.variables[node.id.strip("_")] += 1
            elif isinstance(node, ast.arg) and node.arg not in ("self", "cls"):
                self.variables[node.arg.strip("_")] += 1
            elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name[:2] != "__":
                self.functions[node.name.strip("_")] += 1
        stripped = [row.strip() for row in source.splitlines()]
        self.lines += len(stripped)
        self.comment_lines += sum(row.startswith("#") for row in stripped)

    @property
    def vague_ratio(self) -> float:
        """Share of stored variables and parameters whose name is one vague word."""
        vague = sum(count for name, count in self.variables.items() if name in VAGUE)
        return vague / self.variables.total()

    @property
    def words_per_function(self) -> float:
        """Mean number of words in the name of a function or method."""
        words = sum((name.count("_") + 1) * count for name, count in self.functions.items())
        return words / self.functions.total()


def measure_naming(paths: Iterable[Path]) -> Naming:
    """Counts over the modules at *paths*."""
    naming = Naming()
    for path in paths:
        naming.add(path.read_text())
    return naming


def main() -> None:
    """Prints one row for each folder of the product, and their sum."""
    modules = {name: sorted((ROOT / name).rglob("*.py")) for name in PRODUCT}
    every = [path for paths in modules.values() for path in paths]
    for name, paths in (*modules.items(), ("all", every)):
        naming = measure_naming(paths)
        print(
            f"{name:28} {naming.vague_ratio:6.1%} of {naming.variables.total()} variables vague, "
            f"{naming.words_per_function:.2f} words per function, "
            f"{naming.comment_lines} comment lines of {naming.lines}"
        )


if __name__ == "__main__":
    main()
