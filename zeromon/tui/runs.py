"""The runs that a user can turn to: live ones on this node, and recorded ones."""

from dataclasses import dataclass

from zeromon.sources.base import Source
from zeromon.sources.live import LiveSource, node_runs
from zeromon.sources.replay import StoreSource
from zeromon.storage.run_store import Store
from zeromon.tui.line import clean


@dataclass(frozen=True, slots=True)
class RunChoice:
    """One run of the list."""

    run: str
    state: str
    command: str
    address: str
    """``host:port`` of its collector; "" for a recorded run."""

    def open(self, store: Store) -> Source:
        """A source of the run's snapshots; raises ZeromonError for a record that is gone."""
        if self.address:
            return LiveSource(self.address, self.run)
        return StoreSource(self.run, store)


def choices(store: Store) -> tuple[RunChoice, ...]:
    """Live runs, then recorded ones."""
    live = [
        RunChoice(
            run.run, run.state, clean(" ".join(run.command)), run.address,
        )
        for run in node_runs()
    ]  # fmt: skip
    known = {choice.run for choice in live}
    recorded = [
        RunChoice(one.run, clean(one.verdict), clean(" ".join(one.command)), "")
        for one in store.manifests()
        if one.run not in known
    ]
    return (*live, *recorded)
