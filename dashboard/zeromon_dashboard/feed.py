"""The updates of an open tab: the parts of its page that changed, and new points of its lines.

Tabs with the same address share one feed, which makes the page at most once for each snapshot.
"""

import json
import math
import secrets
import threading
import zlib
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

from plotly.utils import PlotlyJSONEncoder

from zeromon.comparison.comparison import Comparison
from zeromon.snapshot import RunSnapshot
from zeromon.snapshot.run import About
from zeromon_dashboard.charts import FEW, Chart
from zeromon_dashboard.hub import Followed, Hub
from zeromon_dashboard.layout import page_of
from zeromon_dashboard.page import Known, Page
from zeromon_dashboard.url_state import Route

_MAX_FEEDS = 64
_WITH_STEPS = ("overview", "memory", "communication")
"""The pages that draw the steps of the run."""
_SUMS, _SUMS_SECONDS = ("breakdown", "ledger", "ledger-line", "run-about"), 5.0
"""Parts that are means of many steps or sums over the run, and how often they change."""


@dataclass(frozen=True, slots=True)
class Cursor:
    """The state that a tab has already."""

    feed: str = ""
    version: int = 0
    epoch: str = ""
    """Identifies each chart of the tab; while its part is the same, points can be appended to it."""
    step: float = -1

    def as_json(self) -> dict[str, Any]:
        """The cursor for the tab, which sends it back."""
        return {"feed": self.feed, "version": self.version, "epoch": self.epoch, "step": self.step}


class Feed:
    """One page of one run, and its changes."""

    def __init__(self, hub: Hub, route: Route) -> None:
        self.where = route
        self.name = secrets.token_hex(6)
        self._hub = hub
        self._followed: Followed = hub.followed(route.run)
        self._others = [hub.followed(name) for name in route.others]
        self._comparison: Comparison | None = None
        self._lock = threading.Lock()
        self._shown: tuple[list[RunSnapshot], str] | None = None
        self._past: RunSnapshot | None = None
        self._version = 0
        self._parts: dict[str, tuple[str, int]] = {}
        """Encoded properties by the id of their component, and the version that changed them last."""
        self._page = Page({})
        self._epochs: dict[str, str] = {}
        self._sums_wall = 0.0
        """When the parts of :data:`_SUMS` were sent last, by the snapshot's clock."""

    @property
    def ranks(self) -> list[int]:
        """The ranks of the newest snapshot."""
        return [rank.rank for rank in self._shown[0][0].ranks] if self._shown else []

    @property
    def span(self) -> tuple[float, float] | None:
        """The first and the last recorded moment of the run."""
        return self._followed.span()

    def page(self) -> tuple[Page, Cursor]:
        """The page of the newest snapshot."""
        with self._lock:
            self._update_page()
            return self._page, self._newest_cursor()

    def since(self, cursor: Cursor) -> str:
        """JSON of what *cursor* lacks: ``props`` and ``extend`` by id, and the new ``cursor``."""
        with self._lock:
            self._update_page()
            # After a restart of the dashboard versions begin at 1: an old cursor would miss parts
            is_current = cursor.feed == self.name
            version = cursor.version if is_current else -1
            props = {name: encoded for name, (encoded, v) in self._parts.items() if v > version}
            extend = {}
            tab_epochs = set(cursor.epoch.split()) if is_current else set()
            for name, chart in self._page.charts.items():
                if self._epochs[name] not in tab_epochs:
                    props[name] = _encode_json({"figure": chart.figure()})
                elif (newer := chart.newer(cursor.step)) is not None:
                    extend[name] = _encode_json([newer, list(range(len(chart.traces)))])
            return (
                f'{{"cursor":{json.dumps(self._newest_cursor().as_json())},'
                f'"props":{_join_json_fields(props)},"extend":{_join_json_fields(extend)}}}'
            )

    def _newest_cursor(self) -> Cursor:
        last_step = max((chart.last for chart in self._page.charts.values()), default=-1)
        return Cursor(self.name, self._version, " ".join(self._epochs.values()), last_step)

    def _update_page(self) -> None:
        # Before the snapshot is read, so that it has the ranks that this page shows
        self._followed.request_detail(self.where.ranks, self.where.node)
        reading = self._followed.newest()
        other_runs = [followed.newest().run for followed in self._others]
        trouble = f"{reading.trouble} {reading.age:.0f}" if reading.trouble else ""
        state = ([reading.run, *other_runs], trouble)
        if self._shown is not None and _is_same_state(self._shown, state):
            return
        if other_runs and self._comparison is None:
            self._comparison = self._hub.compared((self.where.run, *self.where.others))
        self._shown = state
        run = reading.run
        if self.where.at is not None:
            # A recorded moment does not change: it is read from disk once
            self._past = self._past or self._followed.at(self.where.at)
            run = self._past
        number, series = 0, dict[str, list[int]]()
        if self.where.page in _WITH_STEPS:
            number, series = self._followed.series(*self.where.drawn)
        self._page = page_of(
            Known(
                where=self.where,
                run=run,
                series=series,
                findings=self._followed.findings(),
                span=self._followed.span(),
                live=self._followed.live,
                age=reading.age,
                trouble=reading.trouble,
                others=[
                    (run, followed.series((), self.where.last, None, self.where.steps)[1])
                    for run, followed in zip(other_runs, self._others, strict=True)
                ],
                comparison=self._comparison,
                about=About() if run.origin else self._hub.store.about(run.run),
            )
        )
        self._version += 1
        # A clock that is set back gives a negative age: the sums would stand still until it catches up
        waits = not run.ended and 0 <= run.taken_wall - self._sums_wall < _SUMS_SECONDS
        self._sums_wall = self._sums_wall if waits else run.taken_wall
        for name, props in self._page.parts.items():
            if waits and name in _SUMS and name in self._parts:
                continue
            encoded = _encode_json(props)
            if self._parts.get(name, ("", 0))[0] != encoded:
                self._parts[name] = (encoded, self._version)
        if other_runs:  # their lines do not end at one step: each change is sent whole
            number = self._version
        self._epochs = {
            name: f"{zlib.crc32(f'{number} {name} {_chart_shape(chart)}'.encode()):x}"
            for name, chart in self._page.charts.items()
        }


def _is_same_state(old: tuple[list[RunSnapshot], str], new: tuple[list[RunSnapshot], str]) -> bool:
    return old[1] == new[1] and all(a is b for a, b in zip(old[0], new[0], strict=True))


def _chart_shape(chart: Chart) -> str:
    """The parts of a chart that a tab cannot update by appending points."""
    marks = [
        f"{_round_coarsely(value):g}" for mark in chart.marks for value in (*(mark.x or ()), *mark.y)
    ]
    events = ",".join(f"{step} {label}" for step, label in chart.events)
    shape = f"{chart.title}|{','.join(chart.traces)}|{_round_coarsely(chart.top):g}|{','.join(marks)}"
    return f"{shape}|{events}|{min(chart.last, FEW):g}"  # figures of the first steps differ otherwise


def _round_coarsely(value: float) -> float:
    """*value* rounded coarsely, so that it seldom changes."""
    if value <= 0:
        return 0.0
    return float(math.ceil(math.log(value) / math.log(1.15)))


def _encode_json(value: Any) -> str:
    return json.dumps(value, cls=PlotlyJSONEncoder)


def _join_json_fields(fields: dict[str, str]) -> str:
    return "{" + ",".join(f"{json.dumps(name)}:{encoded}" for name, encoded in fields.items()) + "}"


class Feeds:
    """The feeds of all open tabs."""

    def __init__(self, hub: Hub) -> None:
        self.hub = hub
        self._lock = threading.Lock()
        self._known: OrderedDict[str, Feed] = OrderedDict()

    def of(self, route: Route) -> Feed:
        """The feed of an address; raises :class:`.ZeromonError` for an unknown run."""
        with self._lock:
            feed = self._known.get(route.address)
            if feed is not None:
                self._known.move_to_end(route.address)
                return feed
        # Outside the lock: a collector that is slow to answer would hold up the tabs of all runs
        new_feed = Feed(self.hub, route)
        with self._lock:
            # Another tab may have made the same feed meanwhile, and both must share one
            new_feed = self._known.setdefault(route.address, new_feed)
            while len(self._known) > _MAX_FEEDS:
                self._known.popitem(last=False)
            return new_feed
