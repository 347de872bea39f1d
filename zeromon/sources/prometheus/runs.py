"""Which runs a Prometheus server knows."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from zeromon.errors import RunAmbiguous, RunNotFound
from zeromon.ring.paths import is_run_id
from zeromon.sources.prometheus import promql
from zeromon.sources.prometheus.client import Server
from zeromon.sources.prometheus.source import PrometheusSource
from zeromon.units import human_count, printable

_SELECTOR = re.compile(r"([^{}]+)\{(.*)\}", re.DOTALL)


@dataclass(frozen=True, slots=True)
class ListedRun:
    """A run that a Prometheus server has seen in the last hour."""

    run: str
    ranks: int
    """Ranks with a sample now."""
    up: int
    """Ranks that are alive."""
    known: int
    """Ranks with a sample in the last hour."""
    steps: int
    match: str = ""
    """Further matchers that the user gave, in PromQL."""

    def open(self, server: Server) -> PrometheusSource:
        """Returns a source of this run's snapshots."""
        return PrometheusSource(server, self.run, self.match)

    @property
    def state(self) -> str:
        """The state of the run as one phrase."""
        if not self.ranks:
            return f"{human_count(self.known)} ranks, not seen now"
        if not self.up:
            return "ended"
        return f"{human_count(self.up)} ranks, step {human_count(self.steps)}"


def runs_of(server: Server) -> list[ListedRun]:
    """Returns the runs of the last hour, the live ones first; raises :class:`SourceError`."""
    rows: dict[str, dict[str, int]] = {}
    for sample in server.vector(promql.runs()):
        row = rows.setdefault(sample.labels.get("run", ""), {})
        row[sample.labels.get("of", "")] = sample.count
    runs = [
        ListedRun(
            run, row.get("ranks", 0), row.get("up", 0), row.get("known", 0), row.get("steps", 0)
        )
        for run, row in rows.items()
        if is_run_id(run)  # another exporter's series may have a label of this name
    ]
    return sorted(runs, key=lambda run: (not run.up, not run.ranks, run.run))


def find(server: Server, wanted: str | None) -> list[ListedRun]:
    """Returns the runs that *wanted* may mean, at least one.

    *wanted* is a name, the beginning of a name, ``NAME{job="a"}``, or None for all runs. Raises
    :class:`RunNotFound` without any, and :class:`SourceError` where the server does not answer.
    """
    selector = _SELECTOR.fullmatch(wanted or "")
    name, match = (selector[1], selector[2]) if selector is not None else (wanted or "", "")
    known = runs_of(server)
    candidates = [run for run in known if run.run == name]
    candidates = candidates or [run for run in known if run.run.startswith(name)]
    candidates = [run for run in candidates if run.up] or candidates
    if candidates:
        return [replace(run, match=match) for run in candidates]
    older = ListedRun(name, 0, 0, 0, 0, match)
    if name and older.open(server).span() is not None:
        return [older]
    if not known:
        raise RunNotFound(
            f"{server.url} has no series of zeromon",
            "Does it scrape the collectors? Its page shows its targets; docs/prometheus.md says how.",
        )
    raise RunNotFound(
        f"{server.url} knows no run {printable(name)}",
        f"It knows {', '.join(run.run for run in known[:8])}.",
    )


def only(candidates: Sequence[ListedRun]) -> ListedRun:
    """Returns the only one of *candidates*; raises :class:`RunAmbiguous` for several."""
    if len(candidates) > 1:
        names = ", ".join(run.run for run in candidates[:16])
        raise RunAmbiguous(
            f"the server knows several runs: {names}", "Name one of them with --run."
        )
    return candidates[0]
