"""What a tab shows, as an address: a link shows the same again. Pure."""

from __future__ import annotations

from dataclasses import dataclass, replace
from urllib.parse import parse_qs, quote, unquote, urlencode

from zeromon.readout.figures import MAPPED
from zeromon.storage.run_store import is_run_id

PAGES = {
    "overview": "Overview",
    "memory": "Memory",
    "communication": "Communication",
    "ranks": "Ranks",
    "advice": "Advice",
}
"""The pages of a run, in the order of their number keys."""

LASTS = (100, 1000, 0)
"""The numbers of steps that charts can show; 0: all steps."""

_METRICS = tuple(figure.name for figure in MAPPED)
_MOST_RANKS = 64
_MOST_NODE = 255
_MOST_CHARACTERS = 4000


@dataclass(frozen=True, slots=True)
class Route:
    """The address of a tab."""

    run: str = ""
    """The run; "": the list of runs."""
    page: str = "overview"
    ranks: tuple[int, ...] = ()
    """Only these ranks; (): all."""
    last: int = LASTS[-1]
    metric: str = "step"
    node: str = ""
    """Only the ranks of this node, on the page of ranks."""
    at: float | None = None
    """A recorded moment, seconds since the epoch; None: now."""
    compared: tuple[str, ...] = ()
    """Runs that are compared; only in the list of runs."""

    @property
    def address(self) -> str:
        """Path and query."""
        fields: dict[str, str] = {}
        if self.compared:
            fields["compare"] = ",".join(self.compared)
        if self.ranks:
            fields["ranks"] = ",".join(map(str, self.ranks))
        if self.last != LASTS[-1]:
            fields["last"] = str(self.last)
        if self.metric != "step":
            fields["metric"] = self.metric
        if self.node:
            fields["node"] = self.node
        if self.at is not None:
            fields["at"] = f"{self.at:.3f}"
        path = f"/run/{quote(self.run, safe='')}/{self.page}" if self.run else "/"
        return path + (f"?{urlencode(fields, safe=',')}" if fields else "")

    def on(self, page: str) -> Route:
        """The same address on another page."""
        return replace(self, page=page)


def parse(path: str, query: str) -> Route:
    """The route of an address; ignores what is unknown in it."""
    parts = [unquote(part) for part in path[:_MOST_CHARACTERS].split("/") if part]
    fields = parse_qs(query[:_MOST_CHARACTERS].lstrip("?"))
    given = {name: values[0] for name, values in fields.items()}
    compared = [name for name in given.get("compare", "").split(",") if is_run_id(name)]
    where = Route(
        ranks=_numbers(given.get("ranks", "")),
        last=_one_of(given.get("last", ""), LASTS),
        metric=given.get("metric", "") if given.get("metric") in _METRICS else "step",
        node=given.get("node", "")[:_MOST_NODE],
        at=_moment(given.get("at", "")),
    )
    if len(parts) >= 2 and parts[0] == "run" and is_run_id(parts[1]):
        page = parts[2] if len(parts) > 2 and parts[2] in PAGES else "overview"
        return replace(where, run=parts[1], page=page)
    return Route(compared=tuple(dict.fromkeys(compared))[:8])


def parse_address(address: str | None) -> Route:
    """The route of ``path?query``."""
    path, _, query = str(address or "/").partition("?")
    return parse(path, query)


def _numbers(text: str) -> tuple[int, ...]:
    numbers = {int(word) for word in text.split(",") if word.isdecimal() and len(word) < 8}
    return tuple(sorted(numbers))[:_MOST_RANKS]


def _one_of(text: str, known: tuple[int, ...]) -> int:
    return int(text) if text.isdecimal() and len(text) < 8 and int(text) in known else known[-1]


def _moment(text: str) -> float | None:
    try:
        wall = float(text)
    except ValueError:
        return None
    return wall if 0 < wall < 1e11 else None
