"""The documentation points at what exists."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
PAGES = sorted(
    [*DOCS.rglob("*.md"), *(ROOT / name for name in ("README.md", "CHANGELOG.md", "CONTRIBUTING.md"))]
)
NAMES = [str(page.relative_to(ROOT)) for page in PAGES]
LINK = re.compile(r"\]\(([^)#\s]+)(?:#[^)]*)?\)")
PATH = re.compile(r"`((?:zeromon|agents|dashboard|tests|examples)/[\w./-]*\w)`")
ATTRIBUTES = {"zeromon.run", "zeromon.node"}
"""Resource attributes of OTLP, which are no modules."""
MODULE = re.compile(r"`(zeromon(?:_agents|_dashboard)?(?:\.[a-z_]+)+)`")


@pytest.mark.parametrize(
    "page", [p for p in PAGES if p.name != "CHANGELOG.md"], ids=[n for n in NAMES if n != "CHANGELOG.md"]
)
def test_every_path_of_the_repository_that_a_page_names_exists(page: Path) -> None:
    """A path in backticks: a file or a folder. CONTRIBUTING.md names files that a reader creates."""
    if page.name == "CONTRIBUTING.md":
        return
    missing = [path for path in PATH.findall(page.read_text()) if not (ROOT / path).exists()]
    assert missing == []


@pytest.mark.parametrize(
    "page", [p for p in PAGES if p.name != "CHANGELOG.md"], ids=[n for n in NAMES if n != "CHANGELOG.md"]
)
def test_every_module_that_a_page_names_exists(page: Path) -> None:
    parents = {
        "zeromon": ROOT,
        "zeromon_agents": ROOT / "agents",
        "zeromon_dashboard": ROOT / "dashboard",
    }
    missing = []
    for name in set(MODULE.findall(page.read_text())) - ATTRIBUTES:
        path = parents[name.split(".")[0]].joinpath(*name.split("."))
        if not path.exists() and not path.with_suffix(".py").exists():
            missing.append(name)
    assert missing == []


MAX_WORDS, MAX_PAGES = 35_000, 25


def test_the_pages_stay_short() -> None:
    """Words of all pages that are read from start to end; evidence does not count as pages."""
    folders = ("tutorials", "how-to", "explanation")
    pages = [ROOT / "README.md", DOCS / "index.md"]
    pages += [page for folder in folders for page in (DOCS / folder).rglob("*.md")]
    assert len(pages) <= MAX_PAGES
    evidence = (DOCS / "evidence").rglob("*.md")
    assert sum(len(page.read_text().split()) for page in (*pages, *evidence)) <= MAX_WORDS


KINDS = ("Tutorials", "How-to guides", "Reference", "Explanation", "Evidence")


def test_the_index_lists_every_page_under_one_kind() -> None:
    parts = re.split(r"^## (.*)\n", (DOCS / "index.md").read_text(), flags=re.MULTILINE)[1:]
    assert tuple(parts[::2]) == KINDS
    listed = [link for part in parts[1::2] for link in LINK.findall(part)]
    assert len(listed) == len(set(listed))
    pages = {str(page.relative_to(DOCS)) for page in PAGES if page.is_relative_to(DOCS)}
    unlisted = {page for page in pages if page.startswith("decisions/0")} | {"index.md"}
    assert {link for link in listed if not link.startswith("../")} == pages - unlisted


def test_the_index_of_decisions_lists_every_decision() -> None:
    listed = set(LINK.findall((DOCS / "decisions" / "README.md").read_text()))
    assert {page.name for page in (DOCS / "decisions").glob("0*.md")} <= listed


def test_the_architecture_lists_the_packages_in_the_order_that_the_contract_holds() -> None:
    """The table is the layers contract of pyproject.toml, from the top down."""
    tomllib = pytest.importorskip("tomllib", reason="Python 3.11 has it")
    tool = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]
    contracts = tool["importlinter"]["contracts"]
    layers = next(one["layers"] for one in contracts if one["type"] == "layers")
    packages = [package.strip(" ()") for layer in layers for package in layer.split("|")]
    text = (DOCS / "explanation" / "architecture.md").read_text()
    table = text[text.index("## The packages of zeromon") : text.index("## The life")]
    listed = re.findall(r"^\| `([a-z_]+)` \|", table, re.MULTILINE)
    assert listed == packages
