"""The rules' own pages: one file a rule, ``ZM302.md``, whose first line is ``# ZM302 overlap_comm_off``.

A page says what is meant, why it matters, what to change, what it costs, and where that is known from.
"""

from __future__ import annotations

from functools import cache
from importlib.resources import files
from typing import NamedTuple

from zeromon.errors import RuleNotFound


class Page(NamedTuple):
    """One rule."""

    code: str
    name: str
    text: str
    """Markdown, without the first line."""

    @property
    def summary(self) -> str:
        """Its first sentence."""
        return " ".join(self.text.strip().split("\n\n")[0].split())


@cache
def pages() -> dict[str, Page]:
    """All pages by code."""
    found = {}
    for file in files(__name__).iterdir():
        if file.name.startswith("ZM") and file.name.endswith(".md"):
            head, _, text = file.read_text().partition("\n")
            _, code, name = head.split()
            found[code] = Page(code, name, text)
    return dict(sorted(found.items()))


def page(wanted: str) -> Page:
    """The page of a rule by its code or its name; raises :class:`RuleNotFound`."""
    known = pages()
    by_name = {found.name: found for found in known.values()}
    found = known.get(wanted.upper()) or by_name.get(wanted.lower().replace("-", "_"))
    if found is None:
        raise RuleNotFound(f"there is no rule {wanted}")
    return found
