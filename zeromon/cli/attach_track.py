"""Sends the figures of a live run to an experiment tracker, until the run has ended.

`zeromon run --track` starts a process of its own for each tracker, `zeromon attach --track` is one. It
reads the collectors of all nodes, and asks nothing of the training processes.
"""

import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from zeromon.base.errors import ExportError, RunNotFound, SourceError, ZeromonError
from zeromon.cli import tell_user
from zeromon.export.trackers import TRACKERS, LiveTracker, OpenRun, open_run_of
from zeromon.readout.alerts import leads_run
from zeromon.ring import paths
from zeromon.ring.files import replace_file, try_lock_file
from zeromon.snapshot import RunSnapshot
from zeromon.sources.live import LiveSource, NewSteps, collector_address
from zeromon.sources.replay import reopen_run_source
from zeromon.storage.run_store import Store

_START_SECONDS = 60.0
_GONE_SECONDS = 20.0
"""A collector that does not answer for so long is gone: its record is read to the end."""
_LAST_SECONDS = 60.0
"""How long the end of a run may take to be sent."""
_SETTLING_SECONDS = 2.0
_LONGEST_PAUSE_SECONDS = 60.0


def track_in_background(name: str, folder: Path) -> int:
    """Tracks the run of *folder*, which `zeromon run` has made just now."""
    return track_run(name, _source_of_folder(folder), folder=folder)


def track_run(name: str, source: LiveSource, every: float = 5.0, folder: Path | None = None) -> int:
    """Sends to the tracker *name* every so many seconds; returns 1 where something was not sent.

    Trouble goes to the note of the run in *folder*, or without one to the user.
    """
    with _hold_tracker_lock(name, source.run, folder or _folder_of_run(source.run)):
        tracking = _Tracking(name, source, folder)
        try:
            return tracking.follow(every)
        except KeyboardInterrupt:
            tracking.close()
            raise


def _folder_of_run(run: str) -> Path | None:
    for folder in (path for root in paths.user_ring_roots() for path in root.glob("*/")):
        name, _ = paths.read_run_name(folder)
        if run == (name or folder.name):
            return folder
    return None


@contextmanager
def _hold_tracker_lock(name: str, run: str, folder: Path | None) -> Iterator[None]:
    """Locks *run* for the tracker *name*, or all would be sent twice; raises :class:`ExportError`."""
    if folder is None:
        yield
        return
    fd = try_lock_file(folder / f".{paths.TRACK}{name}.lock")
    if fd is None:
        raise ExportError(
            f"another process sends run {run} to {name} already",
            f"`zeromon run --track {name}` starts one; a second would send everything twice.",
        )
    try:
        yield
    finally:
        os.close(fd)


def _source_of_folder(folder: Path) -> LiveSource:
    """The run of *folder*, once its collector answers."""
    deadline = time.monotonic() + _START_SECONDS
    while True:
        address = collector_address(folder.parent)
        with suppress(SourceError, RunNotFound):
            if address is not None:
                source = LiveSource(address, folder.name)
                source.latest()
                return source
        if time.monotonic() > deadline:
            raise RunNotFound(f"no collector follows {folder.name}")
        time.sleep(0.5)


class _Tracking:
    """One run on its way to one tracker."""

    def __init__(self, name: str, source: LiveSource, folder: Path | None) -> None:
        self._name, self._run, self._folder = name, source.run, folder
        self._steps = NewSteps(source)
        self._tracker: LiveTracker | None = None
        self._facts: OpenRun | None = None
        self._said = ""

    def follow(self, every: float) -> int:
        """Sends what is new every so many seconds; less often while it is not taken."""
        heard, pause = time.monotonic(), every
        while True:
            soon = True
            try:
                run = self._steps.run()
                self._run = run.run
                if run.ended:
                    time.sleep(_SETTLING_SECONDS)  # the last steps of other nodes
                    run = self._steps.run()
                if leads_run(run):
                    pause = every if self._send(run) else min(2 * pause, _LONGEST_PAUSE_SECONDS)
                elif len(run.nodes) > 1:
                    return 0  # the node of rank 0 sends
                if run.ended or not self._steps.first.live:
                    return self.close() or int(bool(self._said))
                heard = time.monotonic()
                # A collector ends soon after its last rank: a pause of a minute would miss its end
                soon = bool(run.ranks) and not any(rank.status.alive for rank in run.ranks)
            except ZeromonError:
                # The record tells a collector that has ended with its run from one that restarts
                has_ended = any(run.run == self._run and run.ended for run in Store().list_manifests())
                is_gone = has_ended or time.monotonic() - heard > _GONE_SECONDS
                source = reopen_run_source(self._run, is_gone)  # on another port, or the record
                if source is None and is_gone:
                    self.close()
                    return 1
                self._steps.first = source or self._steps.first
            time.sleep(_SETTLING_SECONDS if soon else pause)

    def _send(self, run: RunSnapshot) -> bool:
        """Sends new steps; returns False where the tracker takes none. Raises what a source raises."""
        facts = open_run_of(self._name, run)
        if facts is None:
            if any(rank.steps.last_step for rank in run.ranks):
                self._say(f"the script has no run of {self._name} open, so nothing is tracked")
            return True
        rows = self._steps.rows()
        try:
            if facts != self._facts:  # the script has opened another one
                self.close()
            tracker = self._tracker or TRACKERS[self._name](run, facts)
            self._tracker, self._facts = tracker, facts
            tracker.push(run, rows)
        except Exception as error:  # what libraries raise; its text may have a secret
            self._say(f"{self._name} does not take the figures: {type(error).__name__}")
            return False
        # After the push: rows that the tracker has not accepted are read and sent again
        self._steps.kept()
        self._say(self._steps.left_out)
        return True

    def close(self) -> int:
        """Ends what is open; returns 1 where that fails. A server that hangs is not waited for."""
        # Cleared first: Ctrl-C during a slow close calls this function again
        tracker, self._tracker = self._tracker, None
        if tracker is None:
            return 0
        # os._exit, because sys.exit in a timer's thread ends that thread alone
        limit = threading.Timer(_LAST_SECONDS, os._exit, (1,))
        limit.daemon = True
        limit.start()
        try:
            tracker.close()
        except Exception as error:
            self._say(f"{self._name} does not take the end: {type(error).__name__}")
            return 1
        finally:
            limit.cancel()
        return 0

    def _say(self, message: str) -> None:
        """Says *message* once: to the user, or by the run's note; "": all is well again."""
        if message == self._said:
            return
        self._said = message
        if self._folder is None:
            tell_user(message or "the figures are accepted again")
            return
        with suppress(OSError):
            replace_file(self._folder / f"{paths.TRACK}{self._name}", message)
