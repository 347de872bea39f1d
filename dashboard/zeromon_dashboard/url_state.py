"""The state of a tab, as an address: a link shows the same again. Pure."""

from __future__ import annotations

import re
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
    "whatif": "What if",
    "timeline": "Timeline",
}
"""The pages of a run, in the order of their number keys."""

LASTS = (100, 1000, 0)
"""The numbers of steps that charts can show; 0: all steps."""

_METRICS = tuple(figure.name for figure in MAPPED)
_MOST_RANKS = 64
_MOST_NODE = 255
MOST_RUNS = 8
"""So many runs are compared or drawn at once, with a colour each."""
_MOST_CHARACTERS = 4000
_MOST_UNKNOWN = 200


@dataclass(frozen=True, slots=True)
class Route:
    """The address of a tab."""

    unknown: str = ""
    """The path where no page is; "" for a path that leads to one."""
    run: str = ""
    """The run; "": the list of runs."""
    page: str = "overview"
    ranks: tuple[int, ...] = ()
    """Only these ranks; (): all."""
    last: int = LASTS[-1]
    steps: tuple[int, int] | None = None
    """Only these steps, the first and the last one, instead of the last ones."""
    metric: str = "step"
    node: str = ""
    """Only the ranks of this node, on the page of ranks."""
    at: float | None = None
    """A recorded moment, seconds since the epoch; None: now."""
    changes: str = ""
    """The changes that the page "What if" predicts: ``NAME=VALUE,...`` by spaces."""
    others: tuple[str, ...] = ()
    """Runs that charts are laid over."""
    compared: tuple[str, ...] = ()
    """Runs that are compared; only in the list of runs."""

    @property
    def address(self) -> str:
        """Path and query."""
        fields = {
            "compare": ",".join(self.compared),
            "with": ",".join(self.others),
            "ranks": ",".join(map(str, self.ranks)),
            "last": "" if self.last == LASTS[-1] else str(self.last),
            "steps": "" if self.steps is None else f"{self.steps[0]}-{self.steps[1]}",
            "metric": "" if self.metric == "step" else self.metric,
            "node": self.node,
            "changes": self.changes,
            "at": "" if self.at is None else f"{self.at:.3f}",
        }
        path = f"/run/{quote(self.run, safe='')}/{self.page}" if self.run else "/"
        if self.unknown:
            path = "/" + quote(self.unknown, safe="", errors="replace")
        query = urlencode({name: text for name, text in fields.items() if text}, safe=",")
        return path + (f"?{query}" if query else "")

    @property
    def drawn(self) -> tuple[tuple[int, ...], int, float | None, tuple[int, int] | None]:
        """Which steps the charts have, as :meth:`zeromon_dashboard.hub.Followed.series` takes them."""
        return self.ranks, self.last, self.at, self.steps

    def on(self, page: str) -> Route:
        """The address of this view on another page."""
        return replace(self, page=page)


def parse(path: str, query: str) -> Route:
    """The route of an address; ignores what is unknown in its query."""
    parts = [unquote(part) for part in path[:_MOST_CHARACTERS].split("/") if part]
    fields = parse_qs(query[:_MOST_CHARACTERS].lstrip("?"))
    given = {name: values[0] for name, values in fields.items()}
    where = Route(
        ranks=_numbers(given.get("ranks", "")),
        last=_one_of(given.get("last", ""), LASTS),
        steps=_range(given.get("steps", "")),
        metric=given.get("metric", "") if given.get("metric") in _METRICS else "step",
        node=given.get("node", "")[:_MOST_NODE],
        changes=given.get("changes", ""),
        at=_moment(given.get("at", "")),
    )
    page = parts[2] if len(parts) > 2 else "overview"
    if 2 <= len(parts) <= 3 and parts[0] == "run" and is_run_id(parts[1]) and page in PAGES:
        others = _names(given.get("with", ""), parts[1])
        return replace(where, run=parts[1], page=page, others=others)
    if parts:
        return Route(unknown="/".join(parts)[:_MOST_UNKNOWN])
    return Route(compared=_names(given.get("compare", "")))


def parse_address(address: str | None) -> Route:
    """The route of ``path?query``."""
    path, _, query = str(address or "/").partition("?")
    return parse(path, query)


def _names(text: str, but: str = "") -> tuple[str, ...]:
    """The names of runs in *text*, each once, without the name *but*."""
    names = dict.fromkeys(name for name in text.split(",") if is_run_id(name) and name != but)
    return tuple(names)[:MOST_RUNS]


def _numbers(text: str) -> tuple[int, ...]:
    numbers = {int(word) for word in text.split(",") if word.isdecimal() and len(word) < 8}
    return tuple(sorted(numbers))[:_MOST_RANKS]


def _range(text: str) -> tuple[int, int] | None:
    """The steps ``A-B``, in their order; None for anything else."""
    found = re.fullmatch(r"\s*([0-9]{1,12})\s*-\s*([0-9]{1,12})\s*", text, re.ASCII)
    if found is None:
        return None
    first, last = sorted(map(int, found.groups()))
    return first, last


def _one_of(text: str, known: tuple[int, ...]) -> int:
    return int(text) if text.isdecimal() and len(text) < 8 and int(text) in known else known[-1]


def _moment(text: str) -> float | None:
    try:
        wall = float(text)
    except ValueError:
        return None
    return wall if 0 < wall < 1e11 else None
