"""Reads the pages of rules and checks: ``ZM302.md``, whose first line is ``# ZM302 overlap_comm_off``.

A page has the meaning of a rule, why it matters, what to change, what the change costs, and the sources.
"""

from functools import cache
from importlib.resources import files
from typing import NamedTuple

from zeromon.errors import RuleNotFound


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
def pages() -> dict[str, Page]:
    """All pages by code."""
    by_code = {}
    for file in files("zeromon.diagnosis.rules").iterdir():
        if file.name.startswith("ZM") and file.name.endswith(".md"):
            head, _, text = file.read_text().partition("\n")
            _, code, name = head.split()
            by_code[code] = Page(code, name, text)
    return dict(sorted(by_code.items()))


def page(wanted: str) -> Page:
    """Returns the page with the code or the name *wanted*; raises :class:`RuleNotFound`."""
    known = pages()
    by_name = {one.name: one for one in known.values()}
    found = known.get(wanted.upper()) or by_name.get(wanted.lower().replace("-", "_"))
    if found is None:
        raise RuleNotFound(f"there is no rule {wanted}")
    return found
