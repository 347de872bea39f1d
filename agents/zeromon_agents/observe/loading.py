"""Times what a DataLoader makes its batches of: samples, transforms, collation; in workers, too.

A fetcher of torch makes each batch, in the training process or in a worker. A worker writes what it has
timed to a file beside the ring, at most five times a second; the heartbeat of the training process adds
it up. What passes between worker and training process is not touched. A worker that was forked has the
hooks of its parent; one that was spawned gets them from the start-up shim, and finds the file by the pid
of its parent.
"""

import multiprocessing
import os
import struct
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from zeromon.ring.codes import Kind
from zeromon_agents.runtime.around import Patches
from zeromon_agents.runtime.guard import Guard

FETCHERS = "torch.utils.data._utils.fetch"
TRANSFORMS = (
    ("torchvision.transforms.transforms", "Compose.__call__"),
    ("torchvision.transforms.v2._container", "Compose.forward"),
    ("albumentations.core.composition", "Compose.__call__"),
)
"""Module and method of what changes a sample after it was read."""
SUFFIX = ".loading"

_RECORD = struct.Struct("<8q")
BATCHES, FETCH, TRANSFORM, COLLATE, READ, DISK, FAULTS, NFS = range(8)
"""Count; nanoseconds; of batches that were sampled bytes read, those from disks, major faults, and
what this node has got from NFS servers meanwhile, for whomever."""
_EVERY_NS = 200_000_000
_MAX_BYTES = 1 << 16
_MAJOR_FAULTS = 9
"""The index among the fields of /proc/PID/stat that follow the program's name."""

Sums = list[int]


class _Collate:
    """A fetcher's collate function, and how long its last call took."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function, self.spent_ns = function, 0

    def __call__(self, samples: Any) -> Any:
        began_ns = time.monotonic_ns()
        try:
            return self.function(samples)
        finally:
            self.spent_ns += time.monotonic_ns() - began_ns


class Fetches:
    """The hooks on the fetchers of this process and of the workers that it forks."""

    def __init__(
        self, guard: Guard, file: Path | None, trains: Callable[[], bool] = lambda: True
    ) -> None:
        self.sums: Sums = [0] * 8
        """In the training process all so far; in a worker what it has not written yet."""
        self._guard, self._file, self._is_training = guard, file, trains
        self._rank = os.getpid() if file is not None else 0
        """The process that trains; 0 in a worker that it has spawned."""
        self._here = self._rank
        self._patches = Patches()
        self._open: dict[int, Sums] = {}
        """Thread -> nanoseconds in transforms of its batch, and the depth of their calls."""
        self._next_sample_ns = self._next_write_ns = 0

    def watch(self, module: Any) -> None:
        """Patches the fetchers of *module*."""
        for name in ("_MapDatasetFetcher", "_IterableDatasetFetcher"):
            self._patches.wrap_in(module, f"{name}.fetch", self._time_fetch)

    def watch_transforms(self, module: Any) -> None:
        """Patches the compositions of transforms of *module*."""
        for name, method in TRANSFORMS:
            if name == module.__name__:
                self._patches.wrap_in(module, method, self._hook_transform)

    def close(self) -> None:
        """Restores what was patched."""
        self._patches.restore()

    def _time_fetch(self, original: Any) -> Any:
        def fetch_with_hook(fetcher: Any, *args: Any) -> Any:
            beginning = self._begins(fetcher)
            try:
                return original(fetcher, *args)
            finally:
                if beginning is not None:
                    self._ends(fetcher, *beginning)

        fetch_with_hook.__wrapped__ = original  # type: ignore[attr-defined]
        return fetch_with_hook

    def _begins(self, fetcher: Any) -> tuple[int, Sums | None] | None:
        """Returns when a batch begins, and what the process has read if that is sampled."""
        try:
            thread = threading.get_ident()
            # A data set that iterates a DataLoader itself fetches within a fetch: the outer one counts
            if thread in self._open or not self._is_counted():
                return None
            if type(fetcher.collate_fn) is not _Collate:
                fetcher.collate_fn = _Collate(fetcher.collate_fn)
            fetcher.collate_fn.spent_ns = 0
            self._open[thread] = [0, 0]
            now_ns, counts_before = time.monotonic_ns(), None
            if now_ns >= self._next_sample_ns:
                self._next_sample_ns, counts_before = now_ns + _EVERY_NS, _read_so_far()
            # Read again: opening the files of /proc is no part of the batch
            return time.monotonic_ns(), counts_before
        except Guard.CAUGHT as error:
            self._guard.note(error, "fetch")
            return None

    def _ends(self, fetcher: Any, began_ns: int, counts_before: Sums | None) -> None:
        try:
            now_ns = time.monotonic_ns()
            transform_ns, _ = self._open.pop(threading.get_ident())
            self.sums[BATCHES] += 1
            self.sums[FETCH] += now_ns - began_ns
            self.sums[TRANSFORM] += transform_ns
            self.sums[COLLATE] += fetcher.collate_fn.spent_ns
            counts_after = _read_so_far() if counts_before is not None else None
            if counts_before is not None and counts_after is not None:
                for index, (a, b) in enumerate(zip(counts_before, counts_after, strict=True)):
                    self.sums[READ + index] += b - a
            if self._here != self._rank and now_ns >= self._next_write_ns:
                self._next_write_ns = now_ns + _EVERY_NS
                self._write_totals()
        except Guard.CAUGHT as error:
            self._guard.note(error, "fetch")

    def _is_counted(self) -> bool:
        """Returns whether this is the training process while it trains, or its DataLoader's worker."""
        pid = os.getpid()
        if pid == self._rank:
            return self._is_training()
        if pid != self._here:  # forked: what the parent has counted is not this worker's
            self._here, self.sums[:] = pid, [0] * 8
            if self._file is None:
                self._file = _file_of_parent()
        # A process that the script itself forks may fetch, too, and is no worker
        return self._file is not None and torch.utils.data.get_worker_info() is not None

    def _write_totals(self) -> None:
        if self._file is not None:
            with suppress(OSError):  # the training process has ended, or the folder is gone
                # Without O_CREAT: a worker that lives on would make the removed file again
                # With O_APPEND: several workers write to this file
                file = os.open(self._file, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
                try:
                    os.write(file, _RECORD.pack(*self.sums))
                finally:
                    os.close(file)
        self.sums[:] = [0] * 8

    def _hook_transform(self, original: Any) -> Any:
        def transform_with_hook(*args: Any, **kwargs: Any) -> Any:
            entry = self._open.get(threading.get_ident())
            if entry is None:
                return original(*args, **kwargs)
            entry[1] += 1
            began_ns = time.monotonic_ns()
            try:
                return original(*args, **kwargs)
            finally:
                entry[1] -= 1
                # A composition may hold another one, whose time is within its own
                if not entry[1]:
                    entry[0] += time.monotonic_ns() - began_ns

        transform_with_hook.__wrapped__ = original  # type: ignore[attr-defined]
        return transform_with_hook


class Loading:
    """Adds up what the training process and its workers have timed, and writes it into the ring."""

    def __init__(self, guard: Guard, ring: Path, trains: Callable[[], bool]) -> None:
        self._file = ring.with_suffix(SUFFIX)
        self._file.touch(0o600)
        self.fetches = Fetches(guard, self._file, trains)
        self._of_workers: Sums = [0] * 8
        self._offset = 0

    def write(self, emit: Callable[..., None]) -> None:
        """Reads what workers have written, and writes all sums; called by the heartbeat."""
        self._read()
        sums = [ours + theirs for ours, theirs in zip(self.fetches.sums, self._of_workers, strict=True)]
        if sums[BATCHES]:
            emit(Kind.LOADING, *sums[:READ])
            emit(Kind.LOADING_READ, *sums[READ:])

    def _read(self) -> None:
        with suppress(OSError), open(self._file, "r+b", buffering=0) as file:
            file.seek(self._offset)
            content = file.read()
            whole_bytes = len(content) - len(content) % _RECORD.size
            self._offset += whole_bytes
            if self._offset >= _MAX_BYTES and whole_bytes == len(content):
                file.truncate(0)  # a record that was written since is lost
                self._offset = 0
            for record in _RECORD.iter_unpack(content[:whole_bytes]):
                self._of_workers = [a + b for a, b in zip(self._of_workers, record, strict=True)]

    def close(self) -> None:
        """Restores the fetchers. Workers that live on find no file to write to."""
        self.fetches.close()
        with suppress(OSError):
            self._file.unlink()


def watch_worker(module: Any) -> Fetches | None:
    """Times the fetchers of *module* in a process that may be a worker that a rank has spawned."""
    # multiprocessing sets this private mark in a spawned child until it has unpickled its target
    if not getattr(multiprocessing.current_process(), "_inheriting", False):
        return None
    fetches = Fetches(Guard(), None)
    fetches.watch(module)
    return fetches


def _file_of_parent() -> Path | None:
    """Returns the file of the training process that spawned this one; None where there is none."""
    folder, parent = os.environ.get("ZEROMON_RUN_DIR"), multiprocessing.parent_process()
    if not folder or parent is None:
        return None
    return next(Path(folder).glob(f"rank*.{parent.pid}.*{SUFFIX}"), None)


def _read_so_far() -> Sums | None:
    """Returns bytes that this thread has read, those from disks, and its major faults; None: unknown."""
    try:
        with open("/proc/thread-self/io") as file:
            counters = dict(row.split(": ") for row in file)
        with open("/proc/thread-self/stat") as file:
            fields = file.read().rpartition(")")[2].split()
    except (OSError, ValueError):
        return None
    faults = int(fields[_MAJOR_FAULTS])
    return [int(counters["rchar"]), int(counters["read_bytes"]), faults, nfs_bytes()]


def nfs_bytes(path: str = "/proc/self/mountstats") -> int:
    """Returns the bytes that this node has read from NFS servers since it mounted them.

    The fifth number after ``bytes:`` is that of the READ operations (``nfsstat -m``, nfs-utils).
    """
    try:
        with open(path) as file:
            rows = [row.split() for row in file if row.startswith("\tbytes:")]
        return sum(int(row[5]) for row in rows)
    except (OSError, ValueError, IndexError):
        return 0
