"""Reads what NCCL's profiler plugin Inspector writes: a JSON object a line, one file a process.

The plugin writes the newest collective of each communicator at an interval: a sample. Of a file that
grows faster than it is read only the end counts. The format is that of the plugin's version 4.
"""

import os
import socket
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from zeromon.ring.codes import operation_named
from zeromon.snapshot import InspectorRow

_MOST_BYTES = 1 << 18
"""Read at once: some hundred records."""
_WINDOW = 64


class _Header(msgspec.Struct):
    id: str
    rank: int
    n_ranks: int


class _Collective(msgspec.Struct):
    coll: str
    coll_sn: int
    coll_msg_size_bytes: int
    coll_exec_time_us: float
    coll_busbw_gbs: float
    coll_timing_source: str = ""


class _Record(msgspec.Struct):
    header: _Header
    coll_perf: _Collective | None = None
    """None in records of other kinds: sends and receives."""


_DECODER = msgspec.json.Decoder(_Record)


@dataclass(slots=True)
class _Totals:
    header: _Header
    newest: _Collective
    last: deque[_Collective] = field(default_factory=lambda: deque(maxlen=_WINDOW))


class InspectorReader:
    """Follows the file of one process; *variables*: the process's own, *folder*: where it runs."""

    def __init__(self, pid: int, variables: Mapping[str, str], folder: Path) -> None:
        self.note = ""
        """Why there are no rows; "" where there are, and where Inspector is off."""
        self._path: Path | None = None
        self._at = 0
        self._rest = b""
        self._bad = 0
        self._totals: dict[tuple[str, str], _Totals] = {}
        if variables.get("NCCL_INSPECTOR_ENABLE", "0") in ("", "0"):
            return
        if variables.get("NCCL_INSPECTOR_PROM_DUMP", "0") not in ("", "0"):
            self.note = "NCCL Inspector writes for Prometheus, not its records"
            return
        job = variables.get("SLURM_JOBID") or "unknown-jobid"
        name = variables.get("NCCL_INSPECTOR_DUMP_DIR") or f"nccl-inspector-{job}"
        self._path = folder / name / f"{socket.gethostname()}-pid{pid}.log"

    def read(self) -> tuple[InspectorRow, ...]:
        """Reads the new records and returns the rows, of which no process group is known yet."""
        if self._path is not None:
            try:
                self._take(self._new_bytes(self._path))
                self.note = ""
                if self._bad:
                    self.note = (
                        f"{self._bad} records of NCCL Inspector cannot be read: another version"
                    )
            except OSError as error:
                self.note = f"NCCL Inspector is on, but {self._path}: {error.strerror}"
        return tuple(_row(op, totals) for (_, op), totals in self._totals.items())

    def _new_bytes(self, path: Path) -> bytes:
        with path.open("rb") as file:
            end = file.seek(0, os.SEEK_END)
            if end < self._at:  # another file of the same name
                self._at, self._rest = 0, b""
            start = max(self._at, end - _MOST_BYTES)
            file.seek(start)
            content = file.read(end - start)
        if start > self._at:  # within a line
            content, self._rest = content.partition(b"\n")[2], b""
        self._at = end
        return content

    def _take(self, content: bytes) -> None:
        *lines, self._rest = (self._rest + content).split(b"\n")
        for line in lines:
            if not line.strip():
                continue
            try:
                record = _DECODER.decode(line)
            except (msgspec.MsgspecError, UnicodeDecodeError):
                self._bad += 1
                continue
            one = record.coll_perf
            if one is not None:
                key = record.header.id, operation_named(one.coll).label
                totals = self._totals.setdefault(key, _Totals(record.header, one))
                totals.newest = one
                totals.last.append(one)


def _row(op: str, totals: _Totals) -> InspectorRow:
    last, newest, count = totals.last, totals.newest, len(totals.last)
    return InspectorRow(
        communicator=totals.header.id,
        group_id="",
        group="",
        size=totals.header.n_ranks,
        place=totals.header.rank,
        op=op,
        number=newest.coll_sn,
        nbytes=newest.coll_msg_size_bytes,
        records=count,
        seconds=sum(one.coll_exec_time_us for one in last) / count / 1e6,
        busbw_bytes_per_second=sum(one.coll_busbw_gbs for one in last) / count * 1e9,
        timing=newest.coll_timing_source,
    )
