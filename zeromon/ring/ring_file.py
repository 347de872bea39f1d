"""The file of a ring, and the memory that it names.

A live ring is a segment of shared memory (:class:`Segment`), and its file has the segment's
id: what happens to the file does not reach the writer. The segment has the file's path, so that it is
found where the file is damaged. The file itself is the ring, and is mapped, where the kernel has no
such memory or the readers are in another IPC namespace; so are the copies of ended runs.
"""

import ctypes
import errno
import mmap
import os
import re
import secrets
import struct
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from zeromon.base.errors import RingError, os_errors_as
from zeromon.ring.files import replace_file, replacing_file

MAGIC = b"ZEROMON\0"
HEADER_SIZE = 4096
_PATH_AT = 512
_PATH = struct.Struct("<H")
_POINTER = "zeromon segment {}\n"
_POINTED = re.compile(rb"zeromon segment ([0-9]{1,10})\n")
_DAY_SECONDS = 86400.0


def create_ring(
    path: Path, size: int, write_header: Callable[[memoryview], None], *, in_file: bool
) -> memoryview:
    """Returns the memory of a new ring with a header, *in_file* in the file; raises :class:`OSError`."""
    with suppress(OSError):
        if not in_file:
            return _create_in_segment(path, size, write_header)
    with replacing_file(path) as temporary, temporary.open("r+b") as file:
        # A sparse file on a full tmpfs would end the training process with SIGBUS at a later write
        os.posix_fallocate(file.fileno(), 0, size)
        ring = memoryview(mmap.mmap(file.fileno(), size))
        write_header(ring)
    return ring


def _create_in_segment(path: Path, size: int, write_header: Callable[[memoryview], None]) -> memoryview:
    segment_id, ring = create_shared_segment(size)
    try:
        path_bytes = os.fsencode(path.absolute())[: HEADER_SIZE - _PATH_AT - _PATH.size]
        _PATH.pack_into(ring, _PATH_AT, len(path_bytes))
        ring[_PATH_AT + _PATH.size : _PATH_AT + _PATH.size + len(path_bytes)] = path_bytes
        write_header(ring)
        # Last: whoever finds the file finds a ring with a header
        replace_file(path, _POINTER.format(segment_id))
    except OSError:
        remove_segment(segment_id)
        raise
    return ring


def open_ring_memory(path: Path) -> tuple[memoryview, mmap.mmap | None]:
    """Returns a ring's memory, and the mapping of its file if it is there; raises :class:`RingError`."""
    with os_errors_as(RingError, f"read {path}"):
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
    try:
        size, content = os.fstat(fd).st_size, os.pread(fd, HEADER_SIZE, 0)
        if size >= HEADER_SIZE and content.startswith(MAGIC):
            file = mmap.mmap(fd, size, prot=mmap.PROT_READ)
            return memoryview(file), file
    except (OSError, ValueError) as error:
        raise RingError(f"cannot read {path}: {error}") from error
    finally:
        os.close(fd)
    pointed = _pointed_segment(content)
    segment = _find_segment(path, pointed)
    if segment is not None:
        return segment[1], None
    if pointed is not None:
        raise RingError(f"the memory of {path} is gone, or in another IPC namespace")
    raise RingError(f"{path} is not a ring: {size} bytes")


def remove_ring_file(path: Path) -> None:
    """Deletes a ring's file, and its memory once no process uses it; raises :class:`OSError`."""
    content = _read_beginning(path)
    if not content.startswith(MAGIC):
        segment = _find_segment(path, _pointed_segment(content))
        if segment is not None:
            remove_segment(segment[0])
    path.unlink(missing_ok=True)


def remove_orphan_rings(unused_seconds: float = _DAY_SECONDS) -> None:
    """Removes this user's rings whose files were deleted, when no process used them for so long."""
    for segment in listed_segments():
        unused = time.time() - segment.detached_wall
        # A segment that is new has no process and no time of detaching until shmat()
        is_unused = not segment.attached and segment.detached_wall and unused >= unused_seconds
        if is_unused and segment.uid == os.getuid() and segment.nbytes >= HEADER_SIZE:
            with suppress(OSError):
                path = _ring_path_of(attach_segment(segment))
                named = _pointed_segment(_read_beginning(path))
                # A damaged file names no segment, and may still be the file of this one
                if path.name and (not path.exists() or named not in (None, segment.id)):
                    remove_segment(segment.id)


def _pointed_segment(content: bytes) -> int | None:
    """Returns the id of the segment that the file of a ring names; None where it is damaged."""
    match = _POINTED.fullmatch(content)
    return int(match[1]) if match else None


def _read_beginning(path: Path) -> bytes:
    with suppress(OSError), path.open("rb") as file:
        return file.read(HEADER_SIZE)
    return b""


def _find_segment(path: Path, segment_id: int | None) -> tuple[int, memoryview] | None:
    """Returns id and memory of the segment of the ring *path*; None without any.

    Only *segment_id* is looked at where it is known; by now it may be that of another program.
    """
    for segment in listed_segments():
        if segment_id in (None, segment.id) and segment.nbytes >= HEADER_SIZE:
            with suppress(OSError):
                memory = attach_segment(segment)
                if _ring_path_of(memory).parts[-2:] == path.absolute().parts[-2:]:
                    return segment.id, memory
    return None


def _ring_path_of(memory: memoryview) -> Path:
    """Returns the path of the file of a ring; an empty one for what is no ring."""
    (size,) = _PATH.unpack_from(memory, _PATH_AT)
    start = _PATH_AT + _PATH.size
    return Path(os.fsdecode(bytes(memory[start : start + size])) if memory[:8] == MAGIC else "")


# ---- memory that no other process can shrink, and that outlives the processes that use it -------

_TABLE = "/proc/sysvipc/shm"
_PREFIX = 0x5A4D  # "ZM": the upper half of the key of each segment
_KEYS_TRIED = 16
_CREATE, _EXCLUSIVE, _READ_ONLY, _REMOVE = 0o1000, 0o2000, 0o10000, 0

_libc = ctypes.CDLL(None, use_errno=True)
_libc.shmget.argtypes = [ctypes.c_int, ctypes.c_size_t, ctypes.c_int]
_libc.shmat.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_int]
# ctypes takes a result for a 32-bit integer by default, and would truncate the address
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


def create_shared_segment(nbytes: int) -> tuple[int, memoryview]:
    """Returns the id and the memory, all zeros, of a new segment of this user.

    Raises :class:`OSError` where the kernel has no such memory, or no more of it.
    """
    for _ in range(_KEYS_TRIED):
        # Under IPC_PRIVATE the kernel lists the key 0, which tells nobody whose segment it is
        key = _PREFIX << 16 | secrets.randbelow(1 << 16)
        segment_id = _libc.shmget(key, nbytes, _CREATE | _EXCLUSIVE | 0o600)
        if segment_id >= 0:
            try:
                return segment_id, _map_segment(segment_id, nbytes, 0)
            except OSError:
                remove_segment(segment_id)
                raise
        if ctypes.get_errno() != errno.EEXIST:
            break
    raise _last_error()


def attach_segment(segment: Segment) -> memoryview:
    """Returns the memory of *segment*, to be read; raises :class:`OSError`."""
    return _map_segment(segment.id, segment.nbytes, _READ_ONLY).toreadonly()


def remove_segment(segment_id: int) -> None:
    """Removes a segment once no process has it mapped; one that is gone already is no error."""
    _libc.shmctl(segment_id, _REMOVE, None)


def ipc_namespace_number() -> int:
    """Returns the number of this process's IPC namespace; 0 where the kernel has none."""
    try:
        return os.stat("/proc/self/ns/ipc").st_ino
    except OSError:
        return 0


def listed_segments() -> Iterator[Segment]:
    """Yields the segments of this IPC namespace that may be zeromon's, of all users.

    One that is to be removed has no key any more, and can be read while a process uses it.
    """
    try:
        with open(_TABLE) as table:
            head, *rows = (entry.split() for entry in table)
    except (OSError, ValueError):
        return
    for row in rows:
        column = dict(zip(head, map(int, row), strict=False))
        if column["key"] == 0 or column["key"] >> 16 == _PREFIX:
            yield Segment(*(column[name] for name in ("shmid", "size", "uid", "nattch", "dtime")))


def _map_segment(segment_id: int, nbytes: int, flags: int) -> memoryview:
    address = _libc.shmat(segment_id, None, flags)
    if address == _FAILED:
        raise _last_error()
    array = (ctypes.c_ubyte * nbytes).from_address(address)
    # when the last view of it is released; at the end of the process a hook may still write
    weakref.finalize(array, _libc.shmdt, address).atexit = False
    return memoryview(array).cast("B")


def _last_error() -> OSError:
    code = ctypes.get_errno()
    return OSError(code, os.strerror(code))
