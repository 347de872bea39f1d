"""Asks NCCL's RAS about a job: which ranks do not answer, how many collectives each has launched.

Each process of NCCL 2.24 and later listens on one address of its node, and gathers the answer from all
processes of the job; it only reads. JSON is there since NCCL 2.28.7. The question is asked in a thread,
because the answer may take seconds.
"""

import os
import re
import socket
import threading
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from zeromon.ring.codes import operation_by_name
from zeromon.snapshot.communication import InspectorRow

ADDRESS = "localhost:28028"
_CONNECT_SECONDS = 1.0
_ANSWER_SECONDS = 15.0
"""RAS itself gives ranks that do not answer 5 s."""
_EVERY_NS = 10_000_000_000
_MAX_ANSWER_BYTES = 1 << 26


class Status(msgspec.Struct):
    """The status that NCCL reports of a rank."""

    async_error: int = 0
    abort_flag: bool = False
    unresponsive: bool = False
    considered_dead: bool = False


class RasRank(msgspec.Struct):
    """A rank of a communicator."""

    rank: int
    host: str
    pid: int
    status: Status
    collective_counts: dict[str, int] = {}


class Communicator(msgspec.Struct):
    """A communicator and those of its ranks that answered, and did not."""

    hash: str
    size: int
    ranks: list[RasRank]
    missing_ranks: list[RasRank] = []


class _Answer(msgspec.Struct):
    communicators: list[Communicator]


_DECODER = msgspec.json.Decoder(_Answer)
_NO_COMMA = re.compile(rb'("nvml_dev": -?\d+)(\s+"status")')  # NCCL 2.28.9, of a missing rank


@dataclass(frozen=True, slots=True)
class Answer:
    """The answer to a question."""

    note: str = ""
    """Why there is no answer."""
    communicators: list[Communicator] = field(default_factory=list)


def ras_service_address(variables: Mapping[str, str]) -> tuple[str, int]:
    """Returns host and port of the service; raises ValueError where the variable names none."""
    # From the right: an IPv6 address has colons of its own
    host, _, port = (variables.get("NCCL_RAS_ADDR") or ADDRESS).rpartition(":")
    return host.strip("[]"), int(port)


def ask_ras(host: str, port: int) -> Answer:
    """Returns the state of the job; takes seconds."""
    try:
        with socket.create_connection((host, port), _CONNECT_SECONDS) as connection:
            connection.settimeout(_ANSWER_SECONDS)
            with connection.makefile("rwb") as file:
                file.write(b"SET FORMAT json\n")
                file.flush()
                if file.readline(1024).strip().upper() != b"OK":
                    return Answer("NCCL's RAS has no JSON: it is older than 2.28.7")
                file.write(b"VERBOSE STATUS\n")
                file.flush()
                json_bytes = _NO_COMMA.sub(rb"\1,\2", file.read(_MAX_ANSWER_BYTES))
                return Answer("", _DECODER.decode(json_bytes).communicators)
    except OSError as error:
        return Answer(f"NCCL's RAS at {host}:{port}: {error.strerror or error}")
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return Answer("the answer of NCCL's RAS cannot be read: another version")


class RasReader:
    """Asks in a thread, and again after ten seconds; at first :attr:`answer` is None."""

    def __init__(self) -> None:
        self.answer: Answer | None = None
        self._thread: threading.Thread | None = None
        self._asked_ns = -_EVERY_NS

    def ask(self, variables: Mapping[str, str], now_ns: int) -> None:
        """Asks, unless a question is open or was answered a moment ago."""
        if self._thread is not None and self._thread.is_alive():
            return
        if now_ns - self._asked_ns < _EVERY_NS:
            return
        self._asked_ns = now_ns
        if variables.get("NCCL_RAS_ENABLE") == "0":
            self.answer = Answer("NCCL's RAS is off: NCCL_RAS_ENABLE=0")
            return
        try:
            host, port = ras_service_address(variables)
        except ValueError:
            self.answer = Answer(f"NCCL_RAS_ADDR={variables['NCCL_RAS_ADDR']} is no host:port")
            return
        self._thread = threading.Thread(target=self._run, args=(host, port), daemon=True)
        self._thread.start()

    def _run(self, host: str, port: int) -> None:
        self.answer = ask_ras(host, port)

    def join(self, seconds: float) -> None:
        """Waits for an open question; for tests."""
        if self._thread is not None:
            self._thread.join(seconds)


def is_local_address(host: str) -> bool:
    """Returns True if *host*, a numeric address, is one of this machine: a socket can be bound to it."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with suppress(OSError), socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.bind((host.partition("%")[0], 0))
        return True
    return False


# ---- reads what NCCL's profiler plugin Inspector writes -----------------------------------------

_MAX_TAIL_BYTES = 1 << 18
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


_RECORD = msgspec.json.Decoder(_Record)


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
                self._take(self._read_new_bytes(self._path))
                self.note = ""
                if self._bad:
                    self.note = f"{self._bad} records of NCCL Inspector cannot be read: another version"
            except OSError as error:
                self.note = f"NCCL Inspector is on, but {self._path}: {error.strerror}"
        return tuple(_inspector_row(op, totals) for (_, op), totals in self._totals.items())

    def _read_new_bytes(self, path: Path) -> bytes:
        with path.open("rb") as file:
            file_size = file.seek(0, os.SEEK_END)
            if file_size < self._at:  # another file of the same name
                self._at, self._rest = 0, b""
            start = max(self._at, file_size - _MAX_TAIL_BYTES)
            file.seek(start)
            content = file.read(file_size - start)
        if start > self._at:  # within a line
            content, self._rest = content.partition(b"\n")[2], b""
        self._at = file_size
        return content

    def _take(self, content: bytes) -> None:
        *rows, self._rest = (self._rest + content).split(b"\n")
        for row in rows:
            if not row.strip():
                continue
            try:
                record = _RECORD.decode(row)
            except (msgspec.MsgspecError, UnicodeDecodeError):
                self._bad += 1
                continue
            collective = record.coll_perf
            if collective is not None:
                key = record.header.id, operation_by_name(collective.coll).label
                totals = self._totals.setdefault(key, _Totals(record.header, collective))
                totals.newest = collective
                totals.last.append(collective)


def _inspector_row(op: str, totals: _Totals) -> InspectorRow:
    recent, newest_call, count = totals.last, totals.newest, len(totals.last)
    return InspectorRow(
        communicator=totals.header.id,
        group_id="",
        group="",
        size=totals.header.n_ranks,
        place=totals.header.rank,
        op=op,
        number=newest_call.coll_sn,
        nbytes=newest_call.coll_msg_size_bytes,
        records=count,
        seconds=sum(call.coll_exec_time_us for call in recent) / count / 1e6,
        busbw_bytes_per_second=sum(call.coll_busbw_gbs for call in recent) / count * 1e9,
        timing=newest_call.coll_timing_source,
    )
