"""Runs a line of Python inside a live CPython process that never loaded us.

The law that everything in this package keeps:

* It stops one thread for the time it takes to read and set its registers (0.1 to 1 ms): a helper that is
  parked in a system call, never a training thread that computes, unless there is no other.
* Whatever it changes is whole before it can be used: the code lies in padding behind a library's text,
  where nothing executes, before any thread is sent there. That code saves and restores every register,
  vectors too, and goes back by itself to where the thread was. So we may be killed at any moment.
* Nothing is allocated, loaded or looked up in the target while a thread of it is held.
* Every wait has a limit, and what is refused has changed nothing.
"""

from __future__ import annotations

import os
import platform
import struct
import threading
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from zeromon.errors import AttachRefused
from zeromon.inject import gdb, parked, remote
from zeromon.inject.elf import images, mappings
from zeromon.inject.refusal import check, why_not_traced
from zeromon.inject.target import Target

SYMBOLS = (
    "Py_IsInitialized",
    "PyGILState_Ensure",
    "PyRun_SimpleString",
    "PyGILState_Release",
    "Py_AddPendingCall",
    "pthread_create",
    "pthread_detach",
    "mmap",
)
_NEEDED = ("PyGILState_Ensure", "PyGILState_Release", "PyRun_SimpleString", "pthread_create")
_WITHOUT_GIL = "_Py_DecRefShared"
"""Only free-threaded builds have it: there, reference counts are shared between threads."""
_OPTIONAL = ("Py_Version", "__lll_lock_wait_private", "__lll_lock_wait", _WITHOUT_GIL)
_REMOTE_EXEC_FROM = 0x030E0000
_STOP_PATIENCE_SECONDS = 10.0


class Injected(NamedTuple):
    """How the line got in."""

    how: str
    tid: int
    """The thread that was stopped, 0 for none."""
    stopped_ns: int
    """For how long."""


def inject(pid: int, line: str, began: Callable[[], bool], *, method: str = "") -> Injected:
    """Makes process *pid* run *line*, once or twice; the line must not raise, and must claim its work.

    *began* tells whether it has begun. *method*: ``thread``, ``remote`` or ``gdb`` and no other. Raises
    :class:`AttachRefused`.
    """
    check(pid)
    target = look(pid)
    native = platform.machine() == "x86_64" and parked.processor_can()
    if method == "remote" or (not method and target.version >= _REMOTE_EXEC_FROM):
        if remote.execute(pid, line, began):
            return Injected("sys.remote_exec", 0, 0)
        if method:
            raise AttachRefused(f"process {pid} did not run the script of sys.remote_exec")
    if method == "gdb" or not native:
        return Injected("gdb", pid, gdb.execute(target, line, began))
    return _in_a_thread_of_ours(target, line)


def _in_a_thread_of_ours(target: Target, line: str) -> Injected:
    """The kernel lets go of a tracer's threads when the tracer ends, so it is one that ends."""
    outcome: list[Injected | BaseException] = []

    def trace() -> None:
        try:
            outcome.append(Injected(*parked.plant(target, line)))
        except (AttachRefused, OSError) as error:
            outcome.append(error)

    tracer = threading.Thread(target=trace, daemon=True)
    tracer.start()
    tracer.join(_STOP_PATIENCE_SECONDS)
    if not outcome:
        raise AttachRefused(f"no thread of process {target.pid} could be stopped")
    if isinstance(outcome[0], PermissionError):
        raise why_not_traced(target.pid) from outcome[0]
    if isinstance(outcome[0], OSError):
        raise AttachRefused(f"process {target.pid} has ended") from outcome[0]
    if isinstance(outcome[0], BaseException):
        raise outcome[0]
    return outcome[0]


def look(pid: int) -> Target:
    """Finds what is needed in process *pid*, without stopping it. Raises :class:`AttachRefused`."""
    try:
        with open(f"/proc/{pid}/mem", "rb", buffering=0) as memory:

            def read(address: int, length: int) -> bytes:
                return os.pread(memory.fileno(), length, address)

            return _look(pid, read)
    except PermissionError as error:
        raise why_not_traced(pid) from error
    except (FileNotFoundError, ProcessLookupError) as error:
        raise AttachRefused(f"process {pid} has ended") from error
    except (OSError, struct.error, ValueError) as error:
        raise AttachRefused(f"the memory of process {pid} cannot be read: {error}") from error


def _look(pid: int, read: Callable[[int, int], bytes]) -> Target:
    found: dict[str, int] = {}
    padding: tuple[int, int] = (0, 0)
    executable = str(Path(f"/proc/{pid}/exe").readlink()).removesuffix(" (deleted)")
    for image in images(mappings(pid), read):
        name = Path(image.path).name
        python = "libpython" in name or image.path.removesuffix(" (deleted)") == executable
        libc = name.startswith(("libc.so", "libc-", "ld-musl", "libpthread"))
        if python or libc:
            for symbol, address in image.symbols(SYMBOLS + _OPTIONAL, read).items():
                found.setdefault(symbol, address)
        if image.padding()[1] > padding[1]:
            padding = image.padding()
    if not found.keys() >= set(_NEEDED):
        what = Path(executable).name
        raise AttachRefused(f"process {pid} is not Python: it runs {what}", "Give a rank's pid.")
    if _WITHOUT_GIL in found:
        raise AttachRefused(
            f"process {pid} runs a Python without a GIL (a free-threaded build)",
            "Our line would run beside its other threads. Use a build with the GIL.",
        )
    if "Py_Version" in found:
        (found["Py_Version"],) = struct.unpack("<I", read(found["Py_Version"], 4))
    return Target(pid, found, *padding)
