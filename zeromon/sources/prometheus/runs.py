"""Which runs a Prometheus server knows."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from zeromon.errors import RunAmbiguous, RunNotFound
from zeromon.ring.paths import is_run_id
from zeromon.sources.prometheus import promql
from zeromon.sources.prometheus.client import Sample, Server
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
    started_wall: float = 0.0
    """Seconds since the epoch; 0 where unknown."""
    strategy: str = ""
    health: str = ""
    """The word of the verdict; of several nodes, of the worst one."""
    step_seconds: float | None = None
    exposed_ratio: float | None = None
    memory_bytes: int = -1

    def open(self, server: Server) -> PrometheusSource:
        """Returns a source of this run's snapshots."""
        return PrometheusSource(server, self.run, self.match)

    @property
    def state(self) -> str:
        """The state of the run as one phrase."""
        if not self.ranks:
            return f"{human_count(self.known)} ranks, not seen now"
        if not self.up:
            return self.health or "ended"
        ranks = f"{human_count(self.up)} ranks, step {human_count(self.steps)}"
        return f"{self.health}: {ranks}" if self.health else ranks


def runs_of(server: Server) -> list[ListedRun]:
    """Returns the runs of the last hour, the live ones first; raises :class:`SourceError`."""
    rows: dict[str, dict[str, Sample]] = {}
    for sample in server.vector(promql.runs()):
        row = rows.setdefault(sample.labels.get("run", ""), {})
        row[sample.labels.get("of", "")] = sample
    runs = [
        _listed(run, row)
        for run, row in rows.items()
        if is_run_id(run)  # another exporter's series may have a label of this name
    ]
    return sorted(runs, key=lambda run: (not run.up, not run.ranks, run.run))


def _listed(run: str, row: Mapping[str, Sample]) -> ListedRun:
    counts = {of: sample.count for of, sample in row.items()}
    figures = {of: sample.value for of, sample in row.items()}
    texts = {of: printable(s.labels.get(of, "")) for of, s in row.items()}
    return ListedRun(
        run, counts.get("ranks", 0), counts.get("up", 0), counts.get("known", 0),
        counts.get("steps", 0), started_wall=figures.get("started", 0.0),
        strategy=texts.get("strategy", ""), health=texts.get("health", ""),
        step_seconds=figures.get("step_seconds"), exposed_ratio=figures.get("exposed"),
        memory_bytes=counts.get("memory", -1),
    )  # fmt: skip


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
