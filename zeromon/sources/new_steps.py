"""The new steps of a live run, of all its nodes, from the records of their collectors."""

from contextlib import suppress
from dataclasses import replace
from typing import Any

from zeromon.errors import RunNotFound, SourceError, SourceRefused
from zeromon.snapshot import RunSnapshot
from zeromon.sources.base import Source
from zeromon.sources.live import LiveSource
from zeromon.storage.step_query import StepQuery

_MOST = 5000
"""Of more new steps of a rank those that stand out are read."""
_LATE_US = 600_000_000
"""A step that ends so long after those of other ranks began is not waited for."""
_LEFT_OUT = (
    "left out: {}, whose collectors refuse to be read; all nodes need the same ZEROMON_TOKEN and the"
    " same version of zeromon"
)


class NewSteps:
    """Reads what is new; what :meth:`rows` gave comes again, unless it was :meth:`kept`."""

    def __init__(self, source: Source) -> None:
        self.first = source
        """The collector of this node, or the record that it has left."""
        self._others: dict[str, Source] = {}
        self._seen: list[tuple[Source, RunSnapshot]] = []
        self._known: dict[int, int] = {}
        """Rank -> when its last step began, microseconds since the epoch."""
        self._read: dict[int, int] = {}
        self.left_out = ""
        """Which nodes refuse to be read, and why; "" for none."""

    def run(self) -> RunSnapshot:
        """The run with the ranks of all nodes; a node that does not answer is left out.

        Raises :class:`SourceError` and :class:`RunNotFound` of the first node alone.
        """
        run = self.first.latest()
        ranks = {rank.rank: rank for rank in run.ranks}
        self._seen = [(self.first, run)]
        for node in run.nodes if self.first.live else ():
            if node.address and not node.here:
                self._others.setdefault(node.address, LiveSource(node.address, run.run, signs=True))
        refusing = []
        for address, source in self._others.items():
            try:
                there = source.latest()
            except SourceRefused:  # noqa: PERF203
                refusing += [node.node for node in run.nodes if node.address == address]
            except (SourceError, RunNotFound):
                continue
            else:
                ranks |= {rank.rank: rank for rank in there.ranks}
                self._seen.append((source, there))
        self.left_out = _LEFT_OUT.format(", ".join(refusing)) if refusing else ""
        return replace(run, ranks=tuple(ranks[number] for number in sorted(ranks)))

    def rows(self) -> list[dict[str, Any]]:
        """The rows of the new steps, of the nodes that :meth:`run` has found; raises as that does."""
        rows = self._rows(*self._seen[0])
        for source, run in self._seen[1:]:
            with suppress(SourceError, RunNotFound):
                rows += self._rows(source, run)
        self._read = dict(self._known)
        for row in rows:
            self._read[row["rank"]] = max(self._read.get(row["rank"], 0), row["start_us"])
        return rows

    def kept(self) -> None:
        """What was read does not have to come again."""
        self._known = self._read

    def _rows(self, source: Source, run: RunSnapshot) -> list[dict[str, Any]]:
        known = self._known
        begun = [known[r.rank] for r in run.ranks if r.alive and r.rank in known]
        latest = max((known[r.rank] for r in run.ranks if r.rank in known), default=0)
        since = max(min(begun, default=latest), latest - _LATE_US)
        series = source.series(StepQuery(since_us=since, most=_MOST))
        rows = (
            dict(zip(series, values, strict=True)) for values in zip(*series.values(), strict=True)
        )
        return [row for row in rows if row["start_us"] > known.get(row["rank"], -1)]
