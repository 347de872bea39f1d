"""The node's collector: follows and folds every ring, and publishes frozen snapshots once a second.

There is one collector per node and user, ensured by a lock file. ``zeromon run`` starts the collector,
or the first agent that finds none. The collector serves all runs of the node, and exits when the runs
have ended and the views have read the end. An agent restarts a killed collector, which then reads the
rings from the beginning.
"""

import argparse
import fcntl
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

from zeromon.collector.cluster import Leader, NodeInfo
from zeromon.collector.cluster_client import answer, node_report, read_node_infos
from zeromon.collector.notify import Notifier
from zeromon.collector.run import RunFollower
from zeromon.collector.trace_capture import Captures
from zeromon.errors import (
    CaptureRefused,
    CollectorError,
    RingError,
    RunNotFound,
    TrialRefused,
    ZeromonError,
)
from zeromon.probes.devices import Devices
from zeromon.ring import paths
from zeromon.ring.atomic import replace_file
from zeromon.ring.ring_file import remove_orphans
from zeromon.ring.tokens import job_token, user_token
from zeromon.snapshot import Capture, Health, RunSnapshot, Trial
from zeromon.snapshot.rank import DETACHED
from zeromon.storage.recorder import Past, Record, standing
from zeromon.storage.run_store import Store

DEFAULT_PORT = 9417
_TICK_SECONDS = 1.0
_SAVE_EVERY = 10
_LINGER_SECONDS = 60.0
_LEAST_LINGER_SECONDS = 3.0


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
        self._stuck: set[str] = set()
        """Folders of runs that cannot be read or stored; their files stay in place."""
        self._leaders: dict[str, Leader] = {}
        self._last_words: list[Notifier] = []
        """Of runs that have ended."""
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
        snapshot, follower = self._live(name, CaptureRefused, "A trace needs a live run.")
        if follower.captures is None:
            raise CaptureRefused(f"run {name} is not named yet")
        return follower.captures.request(snapshot.ranks, steps, ranks, time.monotonic_ns())

    def try_change(self, name: str, rule: str, rounds: int) -> Trial:
        """Requests a trial of the remedy of *rule* in run *name*; raises :class:`TrialRefused`."""
        snapshot, follower = self._live(name, TrialRefused, "A change is tried in a live run.")
        return follower.trials.request(
            snapshot, follower.rings(), rule, rounds, time.monotonic_ns()
        )

    def renew_trial(self, name: str, number: int, *, go_on: bool) -> Trial:
        """Lets trial *number* of run *name* go on, or ends it; raises :class:`TrialRefused`."""
        _, follower = self._live(name, TrialRefused, "A change is tried in a live run.")
        return follower.trials.renew(number, go_on=go_on)

    def _live(
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
            self._tick()
        finally:
            if collects:
                gc.enable()

    def _tick(self) -> None:
        began = time.monotonic()
        self._find_runs()
        snapshots = dict(self._over)
        for name, run in list(self._runs.items()):
            snapshot = self._follow(name, run)
            if snapshot is None:
                continue
            snapshots[run.run] = snapshot
            if run.ended:
                self._finish(name, run, snapshot)
            elif run.record is not None and (self._ticks % _SAVE_EVERY == 0 or not run.is_saved):
                run.is_saved = True  # the first time at once: it reserves room for the last
                # totals with a damaged record may pass 64 bits, which neither format holds
                with suppress(OSError, ZeromonError, OverflowError):
                    run.keep_totals()
                    self.store.save(snapshot)
        self.view = tuple(snapshots[name] for name in sorted(snapshots))
        self._ticks += 1
        self.health = Health(
            runs=len(self._runs),
            ticks=self._ticks,
            busy_seconds=self.health.busy_seconds + time.monotonic() - began,
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
                if not run.set_aside(self._devices):
                    raise
                return self._newest(run)
        except Exception as error:  # an error of one broken file must not hide the other runs
            del self._runs[name]
            self._stuck.add(name)
            sys.stderr.write(f"zeromon: cannot follow {name}: {error}\n")
            return self._lost(run.run, f"{type(error).__name__}: {error}")

    def _lost(self, name: str, why: str) -> RunSnapshot | None:
        """The last snapshot of run *name*, which says that nobody watches it; None without any."""
        known = next((run for run in self.view if run.run == name), None)
        if known is None:
            return None
        ended = f"{DETACHED}: the collector cannot follow the run"
        ranks = tuple(replace(one, ended=ended) if one.alive else one for one in known.ranks)
        self._over[name] = replace(known, ranks=ranks, note=f"not followed any more: {why}")
        with suppress(OSError, ZeromonError):
            self.store.save(self._over[name])
        return self._over[name]

    def _newest(self, run: RunFollower) -> RunSnapshot:
        run.poll()
        self._name(run)
        run.connect(self._lead)
        run.keep_steps()
        snapshot = run.snapshot(self._devices)
        if run.record is not None:
            run.alerts.see(snapshot)
            run.record.see(snapshot)
            if run.ended and run.record.note != snapshot.history_note:
                return run.snapshot(self._devices)  # there is no other to say that it is not kept
        return snapshot

    def _find_runs(self) -> None:
        try:
            names = os.listdir(self.root)
        except OSError:
            return
        for name in names:
            folder = self.root / name
            if name in self._runs or name in self._stuck or not _is_run_folder(folder):
                continue
            try:
                run = RunFollower(folder)
            except Exception:  # as in _follow
                self._stuck.add(name)
            else:
                self._runs[name] = run

    def _name(self, run: RunFollower) -> None:
        """Sets the name of a run and its folder in the store, once the name is known on all nodes."""
        if run.record is not None or not run.is_named():
            return
        first = next(iter(read_node_infos(run.folder)), None)
        if first is not None and first.run and paths.is_run_id(first.run):
            run.run = self.store.free_name(first.run, first.started)
            run.started_wall = first.started
        else:
            run.run = self.store.free_name(run.folder.name, run.started_wall)
        with suppress(OSError):  # the agent of rank 0 sends it to the other nodes
            replace_file(run.folder / paths.RUN_NAME, json.dumps([run.run, run.started_wall]))
        run.recall(standing(self.store.folder(run.run)))
        run.record = Record(self.store.folder(run.run))
        run.captures = Captures(run.folder, self.store.runs / run.run / "traces")

    def _lead(self, run: str) -> Leader:
        """Makes this node the leader of *run*."""
        leader = self._leaders[run] = Leader()
        return leader

    def exchange(self, body: bytes) -> bytes:
        """Returns the reply to the report of another node.

        Raises :class:`ValueError` for a malformed report, :class:`RunNotFound` for a run that this
        node does not lead.
        """
        received = time.monotonic_ns()
        leader = self._leaders.get(node_report(body))
        if leader is None:
            raise RunNotFound("this collector does not lead that run")
        return answer(leader, body, received)

    def targets(self) -> list[NodeInfo]:
        """Returns the known nodes of all live runs, each with the address of its collector."""
        nodes = {
            (node.run or run.run, node.first_rank): msgspec.structs.replace(node, run=run.run)
            for run in list(self._runs.values())
            for node in run.cluster.reachable_nodes()
        }
        return list(nodes.values())

    def _finish(self, name: str, run: RunFollower, snapshot: RunSnapshot) -> None:
        del self._runs[name]
        self._leaders.pop(run.run, None)
        run.cluster.close()
        self._last_words.append(run.alerts)
        self._over[run.run] = snapshot
        try:
            self.store.save(snapshot)
            run.keep(self.store)
            self.store.prune()
        except (OSError, ZeromonError):
            self._stuck.add(name)

    def is_ending(self) -> bool:
        """Whether all processes of a run are gone, and its record does not say so yet."""
        return any(run.ranks and not run.has_processes() for run in self._runs.values())

    def may_end(self) -> bool:
        """Whether no run is followed or told of, and the views have read the end or have timed out."""
        quiet = self._clock() - self._quiet_since
        self._last_words = [alerts for alerts in self._last_words if alerts.is_sending]
        if self._runs or self._last_words or quiet < _LEAST_LINGER_SECONDS:
            return False
        watched = self._last_read > 0 and self._clock() - self._last_read < _LINGER_SECONDS
        return self._read_since_end or not watched or quiet > _LINGER_SECONDS


def _is_run_folder(folder: Path) -> bool:
    """Whether *folder* holds a run, by its name and its files."""
    if not paths.is_run_id(folder.name):
        return False
    return (folder / "run.json").exists() or bool(paths.rings(folder))


# ---- the process ---------------------------------------------------------------------------------


def lock(root: Path) -> int | None:
    """Takes the collector's lock of *root*; returns its file descriptor, or None when it is held."""
    fd = os.open(root / "collector.lock", os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(fd)
        return None
    return fd


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
        text = json.dumps(groups, indent=1)
        if text == self._written:
            return
        with suppress(OSError):  # not private: Prometheus runs as another user
            replace_file(self._path, text, private=False)
            self._written = text


def serve(root: Path, host: str, port: int, token: str, *, strict_port: bool) -> int:
    """Runs a collector until :meth:`Collector.may_end`; returns 0, at once when another one runs."""
    paths.make_private(root, tighten=False)
    if lock(root) is None:
        return 0
    remove_orphans()
    from zeromon.collector.http import start_server, targets

    collector = Collector(root)
    server = start_server(collector, host, port, token, strict_port=strict_port)
    address = root / "collector.json"
    key = token or user_token()
    facts = {"pid": os.getpid(), "host": host, "port": server.server_port, "key": key}
    replace_file(address, json.dumps(facts))
    sd_file = os.environ.get("ZEROMON_SD_FILE", "")
    file = TargetFile(sd_file) if sd_file else None
    here = f"{socket.gethostname() if host in _ANY_ADDRESS else host}:{server.server_port}"
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    try:
        while not stop.is_set() and not collector.may_end():
            began = time.monotonic()
            collector.tick()
            if file is not None:
                file.write(targets(collector.targets(), collector.view, here))
            took = time.monotonic() - began
            # on a node without free CPUs a tick takes long, and is followed by a longer pause
            stop.wait(max(0.05, min(took, _TICK_SECONDS), _TICK_SECONDS - took))
        began = time.monotonic()
        while (lasts := time.monotonic() - began) < _LAST_SECONDS:
            if not collector.is_ending() and lasts > _TICK_SECONDS:
                break
            collector.tick()
            time.sleep(_TICK_SECONDS / 4)
    finally:
        address.unlink(missing_ok=True)
        server.shutdown()
    return 0


def go_to_background() -> None:
    """Detaches from the parent process: two forks, a new session, no terminal."""
    if os.fork():
        os._exit(0)
    os.setsid()
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
    root = paths.ring_roots()[0] if os.environ.get("ZEROMON_DIR") else paths.choose_root()
    if options.daemon:
        go_to_background()
    os.nice(10)  # training has priority for the cores
    os.environ.setdefault("POLARS_MAX_THREADS", "1")
    token = job_token()
    if token:  # the folder that it was read from is removed some time after its run
        os.environ["ZEROMON_TOKEN"] = token
    try:
        return serve(root, options.host, port, token, strict_port=False)
    except (CollectorError, RingError) as error:
        sys.stderr.write(f"zeromon: {error}\n")
        return 2
