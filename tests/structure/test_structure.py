"""The structure of the code: packages, layers, circles, and the size of modules and functions."""

from __future__ import annotations

import ast
import itertools
import re
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import grimp
import pytest
from naming import measure_naming

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = {
    "zeromon": ROOT / "zeromon",
    "zeromon_agents": ROOT / "agents" / "zeromon_agents",
    "zeromon_dashboard": ROOT / "dashboard" / "zeromon_dashboard",
    "zeromon_vgpu": ROOT / "agents" / "zeromon_vgpu",
}
MAX_PACKAGES = 19
MAX_LAYERS = 11
MAX_ARROWS = 98
"""Pairs of packages of which one imports the other."""
MAX_MODULES = 324
MAX_LINES = 79511
"""Of all modules together, without comments. Limits follow the code downwards, and are not raised."""
MAX_VAGUE_RATIO, MIN_WORDS_PER_FUNCTION, MIN_COMMENT_RATIO = 0.009, 2.05, 0.02
"""``python tools/naming.py`` prints them."""
MAX_MODULE_LINES = 900
MAX_FUNCTION_LINES = 60

LONG_FUNCTIONS = {
    "agents/zeromon_agents/hooks/c10d.py::_issue_hook": "a call costs 50 ns; its docstring says so",
    "agents/zeromon_agents/hooks/c10d.py::issue_with_hook": "the wrapper that _issue_hook returns",
    "agents/zeromon_agents/hooks/functional.py::issue_hook": "as that of c10d",
    "agents/zeromon_agents/hooks/functional.py::issue_with_hook": "the wrapper that issue_hook returns",
    "zeromon/sources/prometheus/decode.py::rank_of": "one constructor call of ten records",
}
"""Functions that may be longer: the collective hook, tables and constructors."""


@pytest.fixture(scope="module")
def graph() -> grimp.ImportGraph:
    """The imports of all packages, those for type checking included."""
    return grimp.build_graph(*PACKAGES, cache_dir=None)


def package_of(module: str) -> str:
    """The direct child of its root package that *module* is in."""
    return ".".join(module.split(".")[:2])


def arrows(graph: grimp.ImportGraph, root: str) -> dict[str, set[str]]:
    """Each package below *root* with the packages it imports from."""
    found: dict[str, set[str]] = defaultdict(set)
    for module in graph.modules:
        for imported in graph.find_modules_directly_imported_by(module):
            pair = package_of(module), package_of(imported)
            if pair[0] != pair[1] and all(name.startswith(f"{root}.") for name in pair):
                found[pair[0]].add(pair[1])
    return found


def test_the_core_has_few_packages(graph: grimp.ImportGraph) -> None:
    """A newcomer who lists `zeromon/` sees the way of the data, not a heap."""
    assert len(graph.find_children("zeromon")) <= MAX_PACKAGES


def test_the_core_has_few_layers(graph: grimp.ImportGraph) -> None:
    """The longest chain of packages that import one another."""
    below = arrows(graph, "zeromon")

    @cache
    def layer(name: str) -> int:
        return 1 + max((layer(other) for other in below.get(name, ())), default=0)

    layers = {name: layer(name) for name in graph.find_children("zeromon")}
    assert max(layers.values()) <= MAX_LAYERS, sorted(layers.items(), key=lambda item: item[1])


def test_the_packages_of_the_core_know_few_others(graph: grimp.ImportGraph) -> None:
    """What a change of one package may reach."""
    assert sum(map(len, arrows(graph, "zeromon").values())) <= MAX_ARROWS


def components(below: dict[str, set[str]]) -> Iterator[set[str]]:
    """Strongly connected components with more than one member (Tarjan 1972)."""
    order: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: list[set[str]] = []

    def visit(name: str) -> None:
        order[name] = low[name] = len(order)
        stack.append(name)
        for other in below.get(name, ()):
            if other not in order:
                visit(other)
                low[name] = min(low[name], low[other])
            elif other in stack:
                low[name] = min(low[name], order[other])
        if low[name] == order[name]:
            members = set()
            while name not in members:
                members.add(stack.pop())
            if len(members) > 1:
                found.append(members)

    for name in list(below):
        if name not in order:
            visit(name)
    yield from found


def test_no_module_imports_itself_in_a_circle(graph: grimp.ImportGraph) -> None:
    """Neither at run time nor for type checking only."""
    below = {module: set(graph.find_modules_directly_imported_by(module)) for module in graph.modules}
    assert list(components(below)) == []


def sources() -> Iterator[tuple[str, str]]:
    """Path below the repository, and text, of each module of the product."""
    for folder in PACKAGES.values():
        for path in sorted(folder.rglob("*.py")):
            yield str(path.relative_to(ROOT)), path.read_text()


def test_the_product_does_not_grow() -> None:
    """Neither in modules nor in lines: a change begins by taking something away."""
    lines = [code_lines(text) for _, text in sources()]
    assert len(lines) <= MAX_MODULES
    assert sum(lines) <= MAX_LINES


def code_lines(text: str) -> int:
    """The lines of *text* without those that are comments."""
    return sum(not line.lstrip().startswith("#") for line in text.splitlines())


def test_no_module_is_long() -> None:
    """A module has one subject."""
    long = {name: n for name, text in sources() if (n := text.count("\n")) > MAX_MODULE_LINES}
    assert not long


def test_no_function_is_long() -> None:
    """A function answers one question; what may be longer is named above."""
    long = {
        f"{name}::{node.name}": lines
        for name, text in sources()
        for node in ast.walk(ast.parse(text))
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
        and (node.end_lineno or 0) - node.lineno >= MAX_FUNCTION_LINES
        and (lines := code_lines(ast.get_source_segment(text, node) or "")) > MAX_FUNCTION_LINES
    }
    assert set(long) <= set(LONG_FUNCTIONS), long


def test_names_say_what_they_hold() -> None:
    """Neither a variable of one vague word nor a function without a noun of the field."""
    naming = measure_naming(path for folder in PACKAGES.values() for path in folder.rglob("*.py"))
    assert naming.vague_ratio <= MAX_VAGUE_RATIO
    assert naming.words_per_function >= MIN_WORDS_PER_FUNCTION
    assert naming.comment_lines >= MIN_COMMENT_RATIO * naming.lines


def docstrings(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """The line and text of each docstring, also of attributes."""
    kinds = ast.Module, ast.ClassDef, ast.FunctionDef
    for node in (one for one in ast.walk(tree) if isinstance(one, kinds)):
        for before, one in itertools.pairwise([None, *node.body]):
            of_something = before is None or isinstance(before, (ast.Assign, ast.AnnAssign))
            if of_something and isinstance(one, ast.Expr) and isinstance(one.value, ast.Constant):
                yield one.lineno, str(one.value.value)


def test_docstrings_begin_with_what_is_returned() -> None:
    """None begins with a word that makes a reader guess what it belongs to."""
    vague = re.compile(r"(Of|That|What|Whether|The same)\b")
    assert not [
        f"{name}:{line}"
        for name, text in sources()
        for line, found in docstrings(ast.parse(text))
        if vague.match(found)
    ]
