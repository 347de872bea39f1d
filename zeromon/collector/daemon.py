"""The node's collector: follows and folds every ring, and publishes frozen snapshots once a second.

The collector serves all runs of the node. :mod:`zeromon.collector.collector_process` says how long it
lives.
"""

import gc
import json
import math
import os
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import msgspec

from zeromon.base.errors import CaptureRefused, RunNotFound, TrialRefused, ZeromonError
from zeromon.collector.cluster import Leader, NodeInfo
from zeromon.collector.cluster_client import answer_report, read_node_infos, run_of_report
from zeromon.collector.notify import Notifier
from zeromon.collector.requests import Captures
from zeromon.collector.run import RETRY_NS, RunFollower
from zeromon.probes.devices import Devices
from zeromon.ring import paths
from zeromon.ring.files import replace_file
from zeromon.snapshot import RunSnapshot
from zeromon.snapshot.finding import Trial
from zeromon.snapshot.rank import DETACHED
from zeromon.snapshot.run import Health
from zeromon.snapshot.step import Capture
from zeromon.storage.run_store import Store
from zeromon.storage.snapshot_log import Past, Record, standing_findings

_SAVE_EVERY = 10
_LINGER_SECONDS = 60.0
_MIN_LINGER_SECONDS = 3.0


class Collector:
    """Follows all runs below *root*. Other threads read ``view`` and ``health`` only."""

    def __init__(
        self, root: Path, store: Store | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.root = root
        self.store = store or Store()
        self.view: tuple[RunSnapshot, ...] = ()
        self.health = Health(runs=0, ticks=0, busy_seconds=0.0, last_tick_wall=time.time())
        self._clock = clock
        self._runs: dict[str, RunFollower] = {}
        self._over: dict[str, RunSnapshot] = {}
        self._stuck: dict[str, float] = {}
        """Folder of a run that cannot be followed or stored -> when it is tried again."""
        self._leaders: dict[str, Leader] = {}
        self._last_words: list[Notifier] = []
        """Notifiers of runs that have ended."""
        self._devices = Devices()
        self._ticks = 0
        self._quiet_since = math.inf
        """Since when no run is followed; the first tick, which may come late on a busy node, sets it."""
        self._read_at: dict[str, float] = {}
        """Kind of reader -> when one last read the snapshot."""

    def was_read(self, reader: str = "view") -> None:
        """Notes that a *reader*, a view or a Prometheus, has read the snapshot."""
        self._read_at[reader] = self._clock()

    def past(self, name: str) -> Past:
        """Returns the record of run *name*."""
        return Past(self.store.folder(name))

    def trace(self, name: str, steps: int, ranks: Sequence[int]) -> Capture:
        """Requests a trace from the live ranks of run *name*; raises :class:`CaptureRefused`."""
        snapshot, follower = self._find_live_run(name, CaptureRefused, "A trace needs a live run.")
        if follower.captures is None:
            raise CaptureRefused(f"run {name} is not named yet")
        return follower.captures.request(snapshot.ranks, steps, ranks, time.monotonic_ns())

    def try_change(self, name: str, rule: str, rounds: int) -> Trial:
        """Requests a trial of the remedy of *rule* in run *name*; raises :class:`TrialRefused`."""
        snapshot, follower = self._find_live_run(name, TrialRefused, "A change is tried in a live run.")
        return follower.trials.request(snapshot, follower.rings(), rule, rounds, time.monotonic_ns())

    def renew_trial(self, name: str, number: int, *, go_on: bool) -> Trial:
        """Lets trial *number* of run *name* go on, or ends it; raises :class:`TrialRefused`."""
        _, follower = self._find_live_run(name, TrialRefused, "A change is tried in a live run.")
        return follower.trials.renew_lease(number, go_on=go_on)

    def _find_live_run(
        self, name: str, error: type[ZeromonError], hint: str
    ) -> tuple[RunSnapshot, RunFollower]:
        """Returns the newest snapshot of the live run *name*, and what follows it; raises *error*."""
        snapshot = next((run for run in self.view if run.run == name), None)
        follower = next((run for run in list(self._runs.values()) if run.run == name), None)
        if snapshot is None:
            raise error(f"no run {name} is followed here")
        if follower is None or snapshot.ended:
            raise error(f"run {name} has ended", hint)
        return snapshot, follower

    def tick(self) -> None:
        """Reads all new records and publishes new snapshots.

        It makes few cycles of references, so Python's garbage collector waits until it has ended: to
        look at tens of thousands of new objects again and again would be a tenth of the tick.
        """
        collects = gc.isenabled()
        gc.disable()
        try:
            self._publish_snapshots()
        finally:
            if collects:
                gc.enable()

    def _publish_snapshots(self) -> None:
        start = time.monotonic()
        self._find_new_runs()
        is_quiet = not self._runs and self._ticks > 0
        snapshots = dict(self._over)
        for name, run in list(self._runs.items()):
            snapshot = self._follow(name, run)
            if snapshot is None:
                continue
            snapshots[run.run] = snapshot
            if run.ended:
                self._finish_run(name, run, snapshot)
            elif run.record is not None and (self._ticks % _SAVE_EVERY == 0 or not run.is_saved):
                run.is_saved = True  # the first time at once: it reserves room for the last
                # totals with a damaged record may pass 64 bits, which neither format holds
                with suppress(OSError, ZeromonError, OverflowError):
                    run.save_rank_totals()
                    self.store.save(snapshot)
        self.view = tuple(snapshots[name] for name in sorted(snapshots))
        self._ticks += 1
        self.health = Health(
            runs=len(self._runs),
            ticks=self._ticks,
            busy_seconds=self.health.busy_seconds + time.monotonic() - start,
            last_tick_wall=time.time(),
        )
        # Also in the tick that publishes an end: what was read before it showed a living run
        if not is_quiet:
            self._quiet_since = self._clock()

    def _follow(self, name: str, run: RunFollower) -> RunSnapshot | None:
        """Returns the new snapshot of *run*; None when the run cannot be followed any more."""
        try:
            try:
                return self._newest(run)
            except Exception:  # one broken ring must not hide the other ranks
                if not run.set_aside_broken(self._devices):
                    raise
                return self._newest(run)
        except Exception as error:  # an error of one broken file must not hide the other runs
            del self._runs[name]
            # Its thread would go on reporting ranks that nobody follows
            run.cluster.close()
            self._stuck[name] = self._clock() + RETRY_NS / 1e9
            sys.stderr.write(f"zeromon: cannot follow {name}: {error}\n")
            return self._save_lost_run(run.run, f"{type(error).__name__}: {error}")

    def _save_lost_run(self, name: str, reason: str) -> RunSnapshot | None:
        """The last snapshot of run *name*, which says that nobody watches it; None without any."""
        snapshot = next((run for run in self.view if run.run == name), None)
        if snapshot is None:
            return None
        end_cause = f"{DETACHED}: the collector cannot follow the run"
        ranks = tuple(
            rank.with_status(ended=end_cause) if rank.status.alive else rank for rank in snapshot.ranks
        )
        self._over[name] = replace(snapshot, ranks=ranks, note=f"not followed any more: {reason}")
        with suppress(OSError, ZeromonError):
            self.store.save(self._over[name])
        return self._over[name]

    def _newest(self, run: RunFollower) -> RunSnapshot:
        run.poll()
        self._name(run)
        run.connect(self._lead_run)
        run.keep_new_steps()
        snapshot = run.snapshot(self._devices)
        if run.record is not None:
            run.alerts.see(snapshot)
            run.record.see(snapshot)
            if run.ended and run.record.note != snapshot.history_note:
                return run.snapshot(self._devices)  # there is no other to say that it is not kept
        return snapshot

    def _find_new_runs(self) -> None:
        try:
            names = os.listdir(self.root)
        except OSError:
            return
        for name in names:
            folder = self.root / name
            waits = self._clock() < self._stuck.get(name, -math.inf)
            if name in self._runs or waits or not _is_run_folder(folder):
                continue
            try:
                self._runs[name] = RunFollower(folder)
            except Exception:  # as in _follow
                self._stuck[name] = self._clock() + RETRY_NS / 1e9

    def _name(self, run: RunFollower) -> None:
        """Sets the name of a run and its folder in the store, once the name is known on all nodes."""
        if run.record is not None or not run.is_name_known():
            return
        first_node = next(iter(read_node_infos(run.folder)), None)
        if first_node is not None and first_node.run and paths.is_run_id(first_node.run):
            run.run = self.store.free_name(first_node.run, first_node.started)
            run.started_wall = first_node.started
        else:
            run.run = self.store.free_name(run.folder.name, run.started_wall)
        with suppress(OSError):  # the agent of rank 0 sends it to the other nodes
            replace_file(run.folder / paths.RUN_NAME, json.dumps([run.run, run.started_wall]))
        run.recall(standing_findings(self.store.folder(run.run)))
        run.record = Record(self.store.folder(run.run))
        run.captures = Captures(run.folder, self.store.runs / run.run / "traces")

    def _lead_run(self, run: str) -> Leader:
        """Makes this node the leader of *run*."""
        leader = self._leaders[run] = Leader()
        return leader

    def exchange(self, body: bytes) -> bytes:
        """Returns the reply to the report of another node.

        Raises :class:`ValueError` for a malformed report, :class:`RunNotFound` for a run that this
        node does not lead.
        """
        received = time.monotonic_ns()
        leader = self._leaders.get(run_of_report(body))
        if leader is None:
            raise RunNotFound("this collector does not lead that run")
        return answer_report(leader, body, received)

    def targets(self) -> list[NodeInfo]:
        """Returns the known nodes of all live runs, each with the address of its collector."""
        # A copy: HTTP threads call this while a tick adds and removes runs, and iterating would raise
        nodes = {
            (node.run or run.run, node.first_rank): msgspec.structs.replace(node, run=run.run)
            for run in list(self._runs.values())
            for node in run.cluster.reachable_nodes()
        }
        return list(nodes.values())

    def _finish_run(self, name: str, run: RunFollower, snapshot: RunSnapshot) -> None:
        del self._runs[name]
        self._leaders.pop(run.run, None)
        run.cluster.close()
        # Its last messages may wait for a slow service: the collector must not exit before them
        self._last_words.append(run.alerts)
        self._over[run.run] = snapshot
        try:
            # Before the rings go: where the store is full, the next collector can still read them
            self.store.save(snapshot)
            run.keep(self.store)
            self.store.prune_runs()
        except (OSError, ZeromonError):
            # Its rings stay: without this, the next tick would follow the ended run as a new one
            self._stuck[name] = math.inf

    def is_ending(self) -> bool:
        """Returns whether all processes of a run are gone, and its record does not say so yet."""
        return any(run.ranks and not run.has_live_processes() for run in self._runs.values())

    def may_end(self) -> bool:
        """Returns whether no run is followed, no alert waits, and readers saw the end or timed out."""
        now_seconds = self._clock()
        quiet = now_seconds - self._quiet_since
        self._last_words = [alerts for alerts in self._last_words if alerts.is_sending]
        if self._runs or self._last_words or quiet < _MIN_LINGER_SECONDS:
            return False
        # Each kind: after a view alone, the last sample of a Prometheus would be of a living run
        return quiet > _LINGER_SECONDS or all(
            read_at > self._quiet_since or now_seconds - read_at >= _LINGER_SECONDS
            for read_at in self._read_at.values()
        )


def _is_run_folder(folder: Path) -> bool:
    """Returns whether *folder* holds a run, by its name and its files."""
    if not paths.is_run_id(folder.name):
        return False
    return (folder / "run.json").exists() or bool(paths.ring_paths(folder))
