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

LANE_STEPS = (1, 10, 3)
"""The numbers of steps that the timeline can show; 3 is usual."""

_METRICS = tuple(metric.name for metric in MAPPED)
_MAX_RANKS = 64
_MAX_NODE_LENGTH = 255
MAX_RUNS = 8
"""So many runs are compared or drawn at once, with a colour each."""
_MAX_CHARACTERS = 4000
_MAX_PATH_LENGTH = 200


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
    metric: str = MAPPED[0].name
    node: str = ""
    """Only the ranks of this node, on the page of ranks."""
    at: float | None = None
    """A recorded moment, seconds since the epoch; None: now."""
    lanes: int = LANE_STEPS[-1]
    """So many last steps are on the page "Timeline"."""
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
            "metric": "" if self.metric == MAPPED[0].name else self.metric,
            "node": self.node,
            "lanes": "" if self.lanes == LANE_STEPS[-1] else str(self.lanes),
            "changes": self.changes,
            "at": "" if self.at is None else f"{self.at:.3f}",
        }
        path = f"/run/{quote(self.run, safe='')}/{self.page}" if self.run else "/"
        if self.unknown:
            # An address in JSON may have lone surrogates, which UTF-8 cannot encode
            path = "/" + quote(self.unknown, safe="", errors="replace")
        query = urlencode({name: field for name, field in fields.items() if field}, safe=",")
        return path + (f"?{query}" if query else "")

    @property
    def drawn(self) -> tuple[tuple[int, ...], int, float | None, tuple[int, int] | None]:
        """Which steps the charts have, as :meth:`zeromon_dashboard.hub.Followed.series` takes them."""
        return self.ranks, self.last, self.at, self.steps

    def on(self, page: str) -> Route:
        """The address of this view on another page."""
        return replace(self, page=page)


def parse_route(path: str, query: str) -> Route:
    """The route of an address; ignores what is unknown in its query."""
    segments = [unquote(segment) for segment in path[:_MAX_CHARACTERS].split("/") if segment]
    fields = parse_qs(query[:_MAX_CHARACTERS].lstrip("?"))
    params = {name: values[0] for name, values in fields.items()}
    route = Route(
        ranks=_parse_rank_numbers(params.get("ranks", "")),
        last=_parse_one_of(params.get("last", ""), LASTS),
        steps=_parse_step_range(params.get("steps", "")),
        metric=params.get("metric", "") if params.get("metric") in _METRICS else MAPPED[0].name,
        node=params.get("node", "")[:_MAX_NODE_LENGTH],
        lanes=_parse_one_of(params.get("lanes", ""), LANE_STEPS),
        changes=params.get("changes", ""),
        at=_parse_moment(params.get("at", "")),
    )
    page = segments[2] if len(segments) > 2 else "overview"
    if 2 <= len(segments) <= 3 and segments[0] == "run" and is_run_id(segments[1]) and page in PAGES:
        other_runs = _parse_run_names(params.get("with", ""), segments[1])
        return replace(route, run=segments[1], page=page, others=other_runs)
    if segments:
        return Route(unknown="/".join(segments)[:_MAX_PATH_LENGTH])
    return Route(compared=_parse_run_names(params.get("compare", "")))


def parse_address(address: str | None) -> Route:
    """The route of ``path?query``."""
    path, _, query = str(address or "/").partition("?")
    return parse_route(path, query)


def _parse_run_names(joined: str, but: str = "") -> tuple[str, ...]:
    """The names of runs in *joined*, each once, without the name *but*."""
    names = dict.fromkeys(name for name in joined.split(",") if is_run_id(name) and name != but)
    return tuple(names)[:MAX_RUNS]


def _parse_rank_numbers(joined: str) -> tuple[int, ...]:
    # isdecimal, because isdigit is also true of "²", for which int() raises
    numbers = {int(number) for number in joined.split(",") if number.isdecimal() and len(number) < 8}
    return tuple(sorted(numbers))[:_MAX_RANKS]


def _parse_step_range(bounds: str) -> tuple[int, int] | None:
    """The steps ``A-B``, in their order; None for anything else."""
    match = re.fullmatch(r"\s*([0-9]{1,12})\s*-\s*([0-9]{1,12})\s*", bounds, re.ASCII)
    if match is None:
        return None
    low, high = sorted(map(int, match.groups()))
    return low, high


def _parse_one_of(number: str, choices: tuple[int, ...]) -> int:
    return (
        int(number) if number.isdecimal() and len(number) < 8 and int(number) in choices else choices[-1]
    )


def _parse_moment(timestamp: str) -> float | None:
    try:
        seconds = float(timestamp)
    except ValueError:
        return None
    # Excludes NaN and infinity, which float() reads
    return seconds if 0 < seconds < 1e11 else None
