"""The node's collector: follows and folds every ring, and publishes frozen snapshots once a second.

The collector serves all runs of the node.
"""

import argparse
import gc
import json
import math
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec

from zeromon.base.errors import (
    CaptureRefused,
    CollectorError,
    RingError,
    RunNotFound,
    TrialRefused,
    ZeromonError,
)
from zeromon.collector.cluster import Leader, NodeInfo
from zeromon.collector.cluster_client import answer_report, read_node_infos, run_of_report
from zeromon.collector.http import start_http_server, target_groups
from zeromon.collector.notify import Notifier
from zeromon.collector.requests import Captures
from zeromon.collector.run import RETRY_NS, RunFollower
from zeromon.probes.devices import Devices
from zeromon.ring import paths
from zeromon.ring.files import replace_file, try_lock_file
from zeromon.ring.ring_file import remove_orphan_rings
from zeromon.ring.tokens import job_token, user_token
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
        self._last_read = 0.0
        self._read_since_end = False

    def was_read(self) -> None:
        """Notes that a view has read the snapshot."""
        self._last_read = self._clock()
        self._read_since_end = True

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
        if self._runs or self._ticks == 1:
            self._quiet_since = self._clock()
            self._read_since_end = False

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
        """Returns whether no run is followed, no alert waits, and views read the end or timed out."""
        quiet = self._clock() - self._quiet_since
        self._last_words = [alerts for alerts in self._last_words if alerts.is_sending]
        if self._runs or self._last_words or quiet < _MIN_LINGER_SECONDS:
            return False
        watched = self._last_read > 0 and self._clock() - self._last_read < _LINGER_SECONDS
        return self._read_since_end or not watched or quiet > _LINGER_SECONDS


def _is_run_folder(folder: Path) -> bool:
    """Returns whether *folder* holds a run, by its name and its files."""
    if not paths.is_run_id(folder.name):
        return False
    return (folder / "run.json").exists() or bool(paths.ring_paths(folder))


# ---- the process --------------------------------------------------------------------------------

# The process of the node's collector.
# There is one collector per node and user, ensured by a lock file. ``zeromon run`` starts the
# collector, or the first agent that finds none. The collector serves all runs of the node, and
# exits when the runs have ended and the views have read the end. An agent restarts a killed
# collector, which then reads the rings from the beginning.

DEFAULT_PORT = 9417
_TICK_SECONDS = 1.0
_ANY_ADDRESS = ("0.0.0.0", "::")
_LAST_SECONDS = 4.0
"""A container sends SIGTERM to all its processes at once, and SIGKILL ten seconds later."""


class TargetFile:
    """The targets that ``/sd`` lists, as a file for Prometheus's file_sd."""

    def __init__(self, path: str) -> None:
        self._path = Path(path)
        self._written = ""

    def write(self, groups: list[dict[str, Any]]) -> None:
        """Replaces the file when *groups* changed. An error is ignored: the next call tries again."""
        json_text = json.dumps(groups, indent=1)
        if json_text == self._written:
            return
        with suppress(OSError):  # not private: Prometheus runs as another user
            replace_file(self._path, json_text, private=False)
            self._written = json_text


def serve_runs(root: Path, host: str, port: int, token: str, *, strict_port: bool) -> int:
    """Runs a collector until :meth:`Collector.may_end`; returns 0, at once when another one runs."""
    paths.make_private_folder(root, tighten=False)
    # The descriptor is left open: closing it would release the lock while this process runs
    if try_lock_file(root / paths.LOCK) is None:
        return 0
    remove_orphan_rings()
    collector = Collector(root)
    server = start_http_server(collector, host, port, token, strict_port=strict_port)
    address = root / "collector.json"
    key = token or user_token()
    facts = {"pid": os.getpid(), "host": host, "port": server.server_port, "key": key}
    replace_file(address, json.dumps(facts))
    sd_file = os.environ.get("ZEROMON_SD_FILE", "")
    file = TargetFile(sd_file) if sd_file else None
    own_address = f"{socket.gethostname() if host in _ANY_ADDRESS else host}:{server.server_port}"
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    try:
        while not stop.is_set() and not collector.may_end():
            start = time.monotonic()
            collector.tick()
            if file is not None:
                file.write(target_groups(collector.targets(), collector.view, own_address))
            took = time.monotonic() - start
            # on a node without free CPUs a tick takes long, and is followed by a longer pause
            stop.wait(max(0.05, min(took, _TICK_SECONDS), _TICK_SECONDS - took))
        start = time.monotonic()
        # A container signals the ranks too: without these ticks the record has no end
        while (lasts := time.monotonic() - start) < _LAST_SECONDS:
            # At least a second: the ranks may get the signal after this process
            if not collector.is_ending() and lasts > _TICK_SECONDS:
                break
            collector.tick()
            time.sleep(_TICK_SECONDS / 4)
    finally:
        # Before the server closes: agents and views take the file for a collector that answers
        address.unlink(missing_ok=True)
        server.shutdown()
    return 0


def go_to_background() -> None:
    """Detaches from the parent process: two forks, a new session, no terminal."""
    if os.fork():
        # exit() would run the atexit handlers of the parent, and flush its buffers a second time
        os._exit(0)
    os.setsid()
    # A session leader gets a controlling terminal with the first one that it opens; its child does not
    if os.fork():
        os._exit(0)
    null = os.open(os.devnull, os.O_RDWR)
    for fd in (0, 1, 2):
        os.dup2(null, fd)


def main(arguments: list[str] | None = None) -> int:
    """Runs the command line of the collector process; returns its exit status."""
    parser = argparse.ArgumentParser(prog="zeromon.collector", description=__doc__)
    parser.add_argument("--host", default=os.environ.get("ZEROMON_HOST", "127.0.0.1"))
    parser.add_argument("--port", type=int, help=f"default {DEFAULT_PORT} or ZEROMON_PORT")
    parser.add_argument("--daemon", action="store_true", help="go to the background at once")
    options = parser.parse_args(arguments)
    port = int(options.port or os.environ.get("ZEROMON_PORT") or DEFAULT_PORT)
    root = paths.user_ring_roots()[0] if os.environ.get("ZEROMON_DIR") else paths.choose_ring_root()
    if options.daemon:
        go_to_background()
    os.nice(10)  # training has priority for the cores
    # Before polars is imported, which starts a thread for each core of the training
    os.environ.setdefault("POLARS_MAX_THREADS", "1")
    token = job_token()
    if token:  # the folder that it was read from is removed some time after its run
        os.environ["ZEROMON_TOKEN"] = token
    try:
        return serve_runs(root, options.host, port, token, strict_port=False)
    except (CollectorError, RingError) as error:
        sys.stderr.write(f"zeromon: {error}\n")
        return 2
