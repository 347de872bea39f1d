"""Asks NCCL's RAS about a job: which ranks do not answer, how many collectives each has launched.

Each process of NCCL 2.24 and later listens on one address of its node, and gathers the answer from all
processes of the job; it only reads. JSON is there since NCCL 2.28.7. The question is asked in a thread,
because the answer may take seconds.
"""

import socket
import threading
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field

import msgspec

ADDRESS = "localhost:28028"
_CONNECT_SECONDS = 1.0
_ANSWER_SECONDS = 15.0
"""RAS itself gives ranks that do not answer 5 s."""
_EVERY_NS = 10_000_000_000
_MOST_BYTES = 1 << 26


class Status(msgspec.Struct):
    """What NCCL says of a rank."""

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


@dataclass(frozen=True, slots=True)
class Answer:
    """What came of a question."""

    note: str = ""
    """Why there is no answer."""
    communicators: list[Communicator] = field(default_factory=list)


def address_of(variables: Mapping[str, str]) -> tuple[str, int]:
    """Returns host and port of the service; raises ValueError where the variable names none."""
    host, _, port = (variables.get("NCCL_RAS_ADDR") or ADDRESS).rpartition(":")
    return host.strip("[]"), int(port)


def ask(host: str, port: int) -> Answer:
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
                return Answer("", _DECODER.decode(file.read(_MOST_BYTES)).communicators)
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
            host, port = address_of(variables)
        except ValueError:
            self.answer = Answer(f"NCCL_RAS_ADDR={variables['NCCL_RAS_ADDR']} is no host:port")
            return
        self._thread = threading.Thread(target=self._run, args=(host, port), daemon=True)
        self._thread.start()

    def _run(self, host: str, port: int) -> None:
        self.answer = ask(host, port)

    def join(self, seconds: float) -> None:
        """Waits for an open question; for tests."""
        if self._thread is not None:
            self._thread.join(seconds)


def is_here(host: str) -> bool:
    """Whether *host*, a numeric address, is one of this machine: a socket can be bound to it."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with suppress(OSError), socket.socket(family, socket.SOCK_STREAM) as own:
        own.bind((host.partition("%")[0], 0))
        return True
    return False
