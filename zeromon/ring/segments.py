"""Memory that no other process can shrink, and that outlives the processes that use it.

A mapped file that another process truncates, or whose disk has no room, ends the process that writes
it with SIGBUS. A System V segment has its size from the start, no file system and no quota. The kernel
keeps it after ``kill -9``, until it is removed. Processes in another IPC namespace cannot open it.
"""

import ctypes
import errno
import os
import secrets
import weakref
from collections.abc import Iterator
from typing import NamedTuple

_TABLE = "/proc/sysvipc/shm"
_PREFIX = 0x5A4D  # "ZM": the upper half of the key of each segment
_KEYS_TRIED = 16
_CREATE, _EXCLUSIVE, _READ_ONLY, _REMOVE = 0o1000, 0o2000, 0o10000, 0

_libc = ctypes.CDLL(None, use_errno=True)
_libc.shmget.argtypes = [ctypes.c_int, ctypes.c_size_t, ctypes.c_int]
_libc.shmat.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_int]
_libc.shmat.restype = ctypes.c_void_p
_libc.shmdt.argtypes = [ctypes.c_void_p]
_libc.shmctl.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_void_p]
_FAILED = ctypes.c_void_p(-1).value


class Segment(NamedTuple):
    """A segment of zeromon, as the kernel lists it."""

    id: int
    nbytes: int
    uid: int
    attached: int
    """How many processes have it mapped."""
    detached_wall: int
    """When the last of them ended, seconds since the epoch; 0 before."""


def create(nbytes: int) -> tuple[int, memoryview]:
    """Returns the id and the memory, all zeros, of a new segment of this user.

    Raises :class:`OSError` where the kernel has no such memory, or no more of it.
    """
    for _ in range(_KEYS_TRIED):
        key = _PREFIX << 16 | secrets.randbelow(1 << 16)
        segment_id = _libc.shmget(key, nbytes, _CREATE | _EXCLUSIVE | 0o600)
        if segment_id >= 0:
            try:
                return segment_id, _memory(segment_id, nbytes, 0)
            except OSError:
                remove(segment_id)
                raise
        if ctypes.get_errno() != errno.EEXIST:
            break
    raise _error()


def attach(segment: Segment) -> memoryview:
    """Returns the memory of *segment*, to be read; raises :class:`OSError`."""
    return _memory(segment.id, segment.nbytes, _READ_ONLY).toreadonly()


def remove(segment_id: int) -> None:
    """Removes a segment once no process has it mapped; one that is gone already is no error."""
    _libc.shmctl(segment_id, _REMOVE, None)


def ipc_namespace() -> int:
    """Returns the number of this process's IPC namespace; 0 where the kernel has none."""
    try:
        return os.stat("/proc/self/ns/ipc").st_ino
    except OSError:
        return 0


def listed() -> Iterator[Segment]:
    """Yields the segments of this IPC namespace that may be zeromon's, of all users.

    One that is to be removed has no key any more, and can be read while a process uses it.
    """
    try:
        with open(_TABLE) as table:
            head, *rows = (line.split() for line in table)
    except (OSError, ValueError):
        return
    for row in rows:
        column = dict(zip(head, map(int, row), strict=False))
        if column["key"] == 0 or column["key"] >> 16 == _PREFIX:
            yield Segment(*(column[name] for name in ("shmid", "size", "uid", "nattch", "dtime")))


def _memory(segment_id: int, nbytes: int, flags: int) -> memoryview:
    address = _libc.shmat(segment_id, None, flags)
    if address == _FAILED:
        raise _error()
    array = (ctypes.c_ubyte * nbytes).from_address(address)
    # when the last view of it is released; at the end of the process a hook may still write
    weakref.finalize(array, _libc.shmdt, address).atexit = False
    return memoryview(array).cast("B")


def _error() -> OSError:
    code = ctypes.get_errno()
    return OSError(code, os.strerror(code))
