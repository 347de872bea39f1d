"""Follows one rank: its ring, its folded state, and its process."""

import time
from collections import deque
from collections.abc import Collection, Iterable, Iterator
from dataclasses import replace
from pathlib import Path

from zeromon.base.units import printable_values
from zeromon.fold.checkpoint import Checkpoint, checkpoint_of_state, restore_totals
from zeromon.fold.fold import fold_records
from zeromon.fold.state import RankState
from zeromon.probes import process
from zeromon.probes.cpu_pressure import PressureReader
from zeromon.probes.host import DiskReader, HostReader
from zeromon.ring.buffer import NameKind, RingReader
from zeromon.ring.codes import ExitKind
from zeromon.ring.events import Raw
from zeromon.ring.model_metadata import BACKGROUND
from zeromon.snapshot import RankSnapshot
from zeromon.snapshot.host import Disk, ExtensionLock, HostMemory, Pressure, WorkerMemory
from zeromon.snapshot.levels import WINDOW_STEPS
from zeromon.snapshot.rank import DETACHED, Halt
from zeromon.storage.step_history.rows import Row, row_of

SETTLING_POLLS = 3
"""Polls after a process's death without an exit status before the status counts as unknown."""
_UNRESPONSIVE_NS = 10_000_000_000
"""An agent writes a heartbeat every second; one that has written nothing for so long does not run."""
_KILL_ROUNDS = 8  # the kernel counts a kill at once, but a large process takes seconds to exit
_HELD_RATIO = 0.9
"""A process whose resident set is less than this share of its last record is giving it back."""
_UNEXPLAINED = "killed without a final record (SIGKILL or a crash)"
_SILENT_ENDS = ("SIGKILL", _UNEXPLAINED)


class RankFollower:
    """One ring: its reader, its state, and its process.

    *earlier*: the totals that an earlier collector saved of the same ring.
    Raises :class:`RingError` or :class:`OSError` for a file that is not a ring.
    """

    def __init__(self, path: Path, earlier: Checkpoint | None = None) -> None:
        self.path = path
        self.reader = RingReader(path)
        header = self.reader.header
        self._earlier: Checkpoint | None = None
        """The totals of an earlier collector, until the fold has reached their last record."""
        if earlier is not None and earlier.born_ns == header.mono_ns:
            self._earlier, self.reader.known = earlier, earlier.records
        self.state = RankState(rank=header.rank, pid=header.pid)
        self.process = process.ProcessWatch(header.pid, header.mono_ns)
        self.alive = True
        self.settled = False
        """True if the process is dead and nothing more about its end can become known."""
        self.died_ns = 0
        """When the process was first seen dead, CLOCK_MONOTONIC; 0 while it lives."""
        self._was_seen = False
        """True if it was ever seen alive; else its last record shows when it died."""
        self._dead_polls = 0
        self._halt = Halt.NONE
        self._newest_row_ns = 0
        """Start of the newest step that :meth:`new_history_rows` returned."""
        self._disk_reader = DiskReader(header.pid)
        self._disk: Disk | None = None
        self._pressure_reader = PressureReader(header.pid)
        self._pressure: Pressure | None = None
        self._workers_reader = process.WorkersReader(header.pid)
        self._workers: WorkerMemory | None = None
        self._lock_reader = process.ExtensionLockReader()
        self._lock: ExtensionLock | None = None
        self._host: HostMemory | None = None
        self._host_is_final = False
        self._kills: deque[int] = deque([0], maxlen=_KILL_ROUNDS)
        """OOM kills that the kernel had counted in the last polls before the death."""

    def poll(self) -> None:
        """Folds the new records; after the process's death all records to the end of the ring."""
        was_alive = self.alive
        self.alive = self.process.alive()
        now_ns = time.monotonic_ns()
        self._learn_names()
        records = self.reader.records(final=not self.alive)
        fold_records(self.state, self._restored_records(records) if self._earlier else records)
        self._restore_totals_at(self.reader.position)
        self._learn_names()
        self.state.dropped += self.reader.lost
        self.reader.lost = 0
        self._was_seen = self._was_seen or self.alive
        if not self.alive:
            self.died_ns = self.died_ns or (now_ns if self._was_seen else self.state.last_event_ns)
            self._dead_polls += 0 if was_alive else 1
            status_known = self.process.status() is not None
            self.settled = status_known or self._dead_polls >= SETTLING_POLLS

    def _restored_records(self, records: Iterable[Raw]) -> Iterator[Raw]:
        """Yields *records*, and restores the earlier totals before the first that they lack."""
        for record in records:
            self._restore_totals_at(record[0])
            yield record

    def _restore_totals_at(self, number: int) -> None:
        """Restores the earlier totals when *number* is the first record that they do not include."""
        if self._earlier is not None and number >= self._earlier.records:
            restore_totals(self.state, self._earlier)
            self._earlier = None

    def totals(self) -> Checkpoint:
        """The totals up to the last record that was read; an earlier collector's until it is reached."""
        if self._earlier is not None:
            return self._earlier
        return checkpoint_of_state(self.state, self.reader.position, self.reader.header.mono_ns)

    def _learn_names(self) -> None:
        state = self.state
        for name in self.reader.names():
            payload = printable_values(name.payload)
            if name.kind == NameKind.META:
                state.meta.update(payload)
            elif name.kind == NameKind.GROUP:
                state.note_group_facts(name.id, payload)
            elif name.kind == NameKind.UNIT:
                state.units[name.id] = fqn = str(payload.get("fqn", ""))
                if fqn == BACKGROUND:
                    state.background_unit = name.id
                nbytes = payload.get("nbytes")
                state.unit_bytes[name.id] = nbytes if isinstance(nbytes, int) else 0
            elif name.kind == NameKind.TEXT:
                state.texts[name.id] = str(payload.get("text", ""))

    def new_history_rows(self, *, final: bool) -> list[Row]:
        """Returns the steps since the last call as rows of the history.

        The newest step waits for the next call unless *final*: a later event may still belong to it.
        Rows hold wall-clock times as of the ring's creation, so that every reader computes the same.
        """
        steps, newest_ns = list(self.state.history), self._newest_row_ns
        if not final:
            steps = steps[:-1]
        fresh = [step for step in steps if step.start_ns > newest_ns]
        if fresh:
            self._newest_row_ns = fresh[-1].start_ns
        header = self.reader.header
        shift = header.wall_ns - header.mono_ns
        return [row_of(self.state.rank, step, shift) for step in fresh]

    @property
    def was_detached(self) -> bool:
        """True if the agent was detached from the running process."""
        last_event = self.state.exit
        return last_event is not None and last_event.how == ExitKind.DETACHED

    def ending(self) -> tuple[str, bool]:
        """Returns how the rank ended ("" while it runs), and whether it failed."""
        last_event, status = self.state.exit, self.process.status()
        if self.alive:
            return (DETACHED, False) if self.was_detached else ("", False)
        if self.was_detached:
            exit_text = "ended" if status is None else process.describe_wait_status(status)
            by = "killed by " * exit_text.lower().startswith("sig")
            return f"{DETACHED}, then {by}{exit_text}", exit_text not in ("ended", "finished")
        if last_event is not None and last_event.how == ExitKind.EXCEPTION:
            return "exception", True
        if status is not None:
            status_text = process.describe_wait_status(status)
            return status_text, status_text != "finished"
        if last_event is not None:
            return "ended", False  # the kernel does not report the exit status
        return _UNEXPLAINED, True

    def halted(self, now_ns: int) -> Halt:
        """Returns why the process runs no Python at *now_ns*, or ran none when it ended."""
        if self.state.exit is not None:
            return Halt.NONE
        if self.alive:
            self._halt, last_ns = process.main_thread_halt(self.state.pid), self.state.last_event_ns
            if self._halt is Halt.NONE and last_ns and now_ns - last_ns > _UNRESPONSIVE_NS:
                self._halt = Halt.UNRESPONSIVE
        return self._halt

    def host(self, reader: HostReader) -> HostMemory | None:
        """Returns the host's memory now; of a rank that ends, the last before it gave its pages back.

        The kernel's count of kills goes on until the rank is settled.
        """
        if self._host_is_final:
            return self._host
        memory = reader.read(self.state.pid)
        if self.alive:
            self._kills.append(_counted_kills(memory))
        last_reading = self._host
        if last_reading is None and not self.alive:
            last_reading = replace(memory, headroom_bytes=-1, usage_bytes=-1)
        # What is available after that would count the rank's pages twice: as its use, and as free
        reading = memory if last_reading is None or self._holds_its_pages(reader) else last_reading
        self._host = replace(
            reading,
            oom_kills=memory.oom_kills,
            oom_kills_everywhere=memory.oom_kills_everywhere,
            kills_at_end=max(0, _counted_kills(memory) - self._kills[0]),
        )
        self._host_is_final = self.settled
        return self._host

    def _holds_its_pages(self, reader: HostReader) -> bool:
        """Returns False once the process has freed what its last record has; it may take a second."""
        recorded = self.state.host.rss_bytes if self.state.host is not None else 0
        return self.alive and reader.resident_bytes(self.state.pid) >= _HELD_RATIO * recorded

    def disk(self) -> Disk | None:
        """Returns the disk's figures now; for a dead rank the last reading."""
        if self.alive:
            now_ns = time.monotonic_ns()
            self._disk = self._disk_reader.read(self._offload_disk_path(), now_ns) or self._disk
        return self._disk

    def pressure(self) -> Pressure | None:
        """Returns the process's waits for CPU and pages; for a dead rank the last reading."""
        if self.alive:
            state, now_ns = self.state, time.monotonic_ns()
            base = state.history[-min(len(state.history), WINDOW_STEPS)] if state.history else None
            since_ns = base.start_ns if base is not None else now_ns
            self._pressure = self._pressure_reader.read(now_ns, state.steps, since_ns) or self._pressure
        return self._pressure

    def workers(self) -> WorkerMemory | None:
        """Returns the memory of its DataLoader workers; for a dead rank the last reading."""
        if self.alive:
            self._workers = self._workers_reader.read(time.monotonic_ns(), self.state.steps)
        return self._workers

    def lock(self, now_ns: int) -> ExtensionLock | None:
        """Returns the lock of torch's extension cache that the rank waits for; once dead, the last."""
        if self.alive:
            path = self.state.meta.get("lock")
            self._lock = self._lock_reader.read(path if isinstance(path, str) else "", now_ns)
        return self._lock

    def _offload_disk_path(self) -> str:
        for name, facts in self.state.meta.items():
            if name.startswith("engine") and isinstance(facts, dict) and "disk_path" in facts:
                return str(facts["disk_path"])
        return ""


def killed_for_memory(ranks: Collection[RankSnapshot]) -> frozenset[int]:
    """Returns the ranks that the OOM killer ended, among those that ended without an explanation.

    The kernel only counts its kills, and kills the largest process first: of several candidates the
    largest are returned. Only kills that were counted around the end of a rank are evidence.
    """
    candidates = [
        r
        for r in ranks
        if r.status.failed and r.status.ended in _SILENT_ENDS and r.memory.host is not None
    ]
    kills = max((r.memory.host.kills_at_end for r in candidates if r.memory.host), default=0)
    candidates.sort(key=lambda rank: -rank.memory.rss_bytes)
    return frozenset(rank.rank for rank in candidates[:kills])


def _counted_kills(host: HostMemory) -> int:
    """Returns the OOM kills of the cgroup, or of the machine where the cgroup does not count."""
    return host.oom_kills if host.oom_kills >= 0 else host.oom_kills_everywhere
