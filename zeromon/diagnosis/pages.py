"""Reads the pages of rules and checks: ``ZM302.md``, whose first line is ``# ZM302 overlap_comm_off``.

A page has the meaning of a rule, why it matters, what to change, what the change costs, and the sources.
"""

from functools import cache
from importlib.resources import files
from typing import NamedTuple

from zeromon.base.errors import RuleNotFound


class Page(NamedTuple):
    """The page of one rule or check."""

    code: str
    name: str
    text: str
    """Markdown, without the first line."""

    @property
    def summary(self) -> str:
        """The first paragraph as one line."""
        return " ".join(self.text.strip().split("\n\n")[0].split())


@cache
def all_pages() -> dict[str, Page]:
    """All pages by code."""
    by_code = {}
    for file in files("zeromon.diagnosis.rules").iterdir():
        if file.name.startswith("ZM") and file.name.endswith(".md"):
            head, _, body = file.read_text().partition("\n")
            _, code, name = head.split()
            by_code[code] = Page(code, name, body)
    return dict(sorted(by_code.items()))


def find_page(code_or_name: str) -> Page:
    """Returns the page with *code_or_name*; raises :class:`RuleNotFound`."""
    by_code = all_pages()
    by_name = {page.name: page for page in by_code.values()}
    match = by_code.get(code_or_name.upper()) or by_name.get(code_or_name.lower().replace("-", "_"))
    if match is None:
        raise RuleNotFound(f"there is no rule {code_or_name}")
    return match
