"""What a tab looks at: everything is in its address, so that a link shows the same again. Pure."""

from __future__ import annotations

from dataclasses import dataclass, replace
from urllib.parse import parse_qs, quote, unquote, urlencode

from zeromon.paths import is_run_id
from zeromon_dashboard.views import METRICS

PAGES = {
    "overview": "Overview",
    "memory": "Memory",
    "communication": "Communication",
    "ranks": "Ranks",
    "advice": "Advice",
}
"""The pages of a run, in the order of their number keys."""

LASTS = (100, 1000, 0)
"""How many steps the charts over steps can be asked for; 0: all."""

_MOST_RANKS = 64
_MOST_NODE = 255
_MOST_CHARACTERS = 4000


@dataclass(frozen=True, slots=True)
class Where:
    """One address."""

    run: str = ""
    """"": the list of runs."""
    page: str = "overview"
    ranks: tuple[int, ...] = ()
    """Only these; (): all."""
    last: int = LASTS[-1]
    metric: str = "step"
    node: str = ""
    """Only its ranks, on the page of ranks."""
    at: float | None = None
    """A moment that is over, seconds since the epoch; None: now."""
    compared: tuple[str, ...] = ()
    """Runs that are laid side by side; only in the list of runs."""

    @property
    def address(self) -> str:
        """Path and query."""
        asked: dict[str, str] = {}
        if self.compared:
            asked["compare"] = ",".join(self.compared)
        if self.ranks:
            asked["ranks"] = ",".join(map(str, self.ranks))
        if self.last != LASTS[-1]:
            asked["last"] = str(self.last)
        if self.metric != "step":
            asked["metric"] = self.metric
        if self.node:
            asked["node"] = self.node
        if self.at is not None:
            asked["at"] = f"{self.at:.3f}"
        path = f"/run/{quote(self.run, safe='')}/{self.page}" if self.run else "/"
        return path + (f"?{urlencode(asked, safe=',')}" if asked else "")

    def on(self, page: str) -> Where:
        """The same on another page."""
        return replace(self, page=page)


def parse(path: str, query: str) -> Where:
    """The place that an address means; what is unknown in it is as if it were not there."""
    parts = [unquote(part) for part in path[:_MOST_CHARACTERS].split("/") if part]
    asked = parse_qs(query[:_MOST_CHARACTERS].lstrip("?"))
    given = {name: values[0] for name, values in asked.items()}
    compared = [name for name in given.get("compare", "").split(",") if is_run_id(name)]
    where = Where(
        ranks=_numbers(given.get("ranks", "")),
        last=_one_of(given.get("last", ""), LASTS),
        metric=given.get("metric", "") if given.get("metric") in METRICS else "step",
        node=given.get("node", "")[:_MOST_NODE],
        at=_moment(given.get("at", "")),
    )
    if len(parts) >= 2 and parts[0] == "run" and is_run_id(parts[1]):
        page = parts[2] if len(parts) > 2 and parts[2] in PAGES else "overview"
        return replace(where, run=parts[1], page=page)
    return Where(compared=tuple(dict.fromkeys(compared))[:8])


def _numbers(text: str) -> tuple[int, ...]:
    found = {int(word) for word in text.split(",") if word.isdecimal() and len(word) < 8}
    return tuple(sorted(found))[:_MOST_RANKS]


def _one_of(text: str, known: tuple[int, ...]) -> int:
    return int(text) if text.isdecimal() and len(text) < 8 and int(text) in known else known[-1]


def _moment(text: str) -> float | None:
    try:
        wall = float(text)
    except ValueError:
        return None
    return wall if 0 < wall < 1e11 else None
