"""The process of the node's collector.

There is one collector per node and user, ensured by a lock file. ``zeromon run`` starts the collector,
or the first agent that finds none. The collector serves all runs of the node, and exits when the runs
have ended and the views have read the end. An agent restarts a killed collector, which then reads the
rings from the beginning.
"""

import argparse
import json
import os
import signal
import socket
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from zeromon.base.errors import CollectorError, RingError
from zeromon.collector.daemon import Collector
from zeromon.collector.http import start_http_server, target_groups
from zeromon.ring import paths
from zeromon.ring.files import replace_file, try_lock_file
from zeromon.ring.ring_file import remove_orphan_rings
from zeromon.ring.tokens import job_token, user_token

DEFAULT_PORT = 9417
_TICK_SECONDS = 1.0
_NICE = 10
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


def _yield_cores() -> None:
    """Leaves the cores to the training: a tenth of a busy one at most, and preempts nobody."""
    os.nice(_NICE)
    with suppress(OSError, AttributeError):  # a container may forbid it, and macOS has none
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    # A session of its own, as --daemon makes one, may have as much time as that of the training, and
    # then the priority counts within it alone
    with suppress(OSError), open("/proc/self/autogroup", "w") as file:
        file.write(str(_NICE))


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
    _yield_cores()
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
