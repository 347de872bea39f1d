"""The pages of the site of ``make docs`` where the repository has them, so that all links hold.

docs/index.md is the navigation, and the decisions have a part of their own.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[1]
PAGES = (
    "*.md",
    "docs/**/*.md",
    "docs/**/*.json",
    "docs/images/*",
    "zeromon/diagnosis/rules/*.md",
    "examples/*.ipynb",
)
_STYLE = (
    ".highlight .go { color: inherit } .md-grid { max-width: 72rem } "
    ".md-typeset td code { word-break: normal }"
)
"""A command without a prompt is no output, which is paler; and room for tables, with whole names."""
_PART = re.compile(r"^## (.*)\n((?:(?!## ).*\n)*)", re.MULTILINE)
_LINK = re.compile(r"^\| \[[^]]*\]\(([^)]*)\)", re.MULTILINE)


def on_config(config: Any) -> Any:
    """Sets the navigation."""
    index = (ROOT / "docs" / "index.md").read_text()
    nav: list[Any] = [{"zeromon": "README.md"}]
    for heading, table in _PART.findall(index):
        pages = [
            str((ROOT / "docs" / link).resolve().relative_to(ROOT)) for link in _LINK.findall(table)
        ]
        nav.append({heading: [page for page in pages if "decisions" not in page]})
    decisions = sorted(ROOT.glob("docs/decisions/[0-9]*.md"))
    nav.append(
        {"Decisions": ["docs/decisions/README.md", *(str(p.relative_to(ROOT)) for p in decisions)]}
    )
    config.nav = nav
    return config


def on_files(files: Files, config: Any) -> Files:
    """Names each page by its path in the repository; the theme's files stay."""
    found = sorted({path for pattern in PAGES for path in ROOT.glob(pattern)})
    ours = [
        File.generated(config, str(path.relative_to(ROOT)), abs_src_path=str(path)) for path in found
    ]
    style = File.generated(config, "site.css", content=_STYLE)
    return Files([*(file for file in files if file.src_dir != config.docs_dir), *ours, style])
