"""The file of a ring, and the memory that it names.

A live ring is a segment of shared memory (:mod:`zeromon.ring.segments`), and its file has the segment's
id: what happens to the file does not reach the writer. The segment has the file's path, so that it is
found where the file is damaged. The file itself is the ring, and is mapped, where the kernel has no
such memory or the readers are in another IPC namespace; so are the copies of ended runs.
"""

import mmap
import os
import re
import struct
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from zeromon.errors import RingError
from zeromon.ring import segments
from zeromon.ring.files import replace_file, replacing

MAGIC = b"ZEROMON\0"
HEADER_SIZE = 4096
_PATH_AT = 512
_PATH = struct.Struct("<H")
_POINTER = "zeromon segment {}\n"
_POINTED = re.compile(rb"zeromon segment ([0-9]{1,10})\n")
_DAY_SECONDS = 86400.0


def create(
    path: Path, size: int, write_header: Callable[[memoryview], None], *, in_file: bool
) -> memoryview:
    """Returns the memory of a new ring with a header; *in_file*: in the file itself.

    Raises :class:`OSError`.
    """
    with suppress(OSError):
        if not in_file:
            return _in_segment(path, size, write_header)
    with replacing(path) as temporary, temporary.open("r+b") as file:
        os.posix_fallocate(file.fileno(), 0, size)
        ring = memoryview(mmap.mmap(file.fileno(), size))
        write_header(ring)
    return ring


def _in_segment(path: Path, size: int, write_header: Callable[[memoryview], None]) -> memoryview:
    segment_id, ring = segments.create(size)
    try:
        text = os.fsencode(path.absolute())[: HEADER_SIZE - _PATH_AT - _PATH.size]
        _PATH.pack_into(ring, _PATH_AT, len(text))
        ring[_PATH_AT + _PATH.size : _PATH_AT + _PATH.size + len(text)] = text
        write_header(ring)
        replace_file(path, _POINTER.format(segment_id))
    except OSError:
        segments.remove(segment_id)
        raise
    return ring


def open_ring(path: Path) -> tuple[memoryview, mmap.mmap | None]:
    """Returns the memory of the ring with the file *path*, and the mapping of the file if it is there.

    Raises :class:`RingError`.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
    except OSError as error:
        raise RingError(f"cannot read {path}: {error.strerror}") from error
    try:
        size, content = os.fstat(fd).st_size, os.pread(fd, HEADER_SIZE, 0)
        if size >= HEADER_SIZE and content.startswith(MAGIC):
            file = mmap.mmap(fd, size, prot=mmap.PROT_READ)
            return memoryview(file), file
    except (OSError, ValueError) as error:
        raise RingError(f"cannot read {path}: {error}") from error
    finally:
        os.close(fd)
    pointed = _pointed(content)
    found = _find_segment(path, pointed)
    if found is not None:
        return found[1], None
    if pointed is not None:
        raise RingError(f"the memory of {path} is gone, or in another IPC namespace")
    raise RingError(f"{path} is not a ring: {size} bytes")


def remove_ring(path: Path) -> None:
    """Deletes a ring's file, and its memory once no process uses it; raises :class:`OSError`."""
    content = _beginning(path)
    if not content.startswith(MAGIC):
        found = _find_segment(path, _pointed(content))
        if found is not None:
            segments.remove(found[0])
    path.unlink(missing_ok=True)


def remove_orphans(unused_seconds: float = _DAY_SECONDS) -> None:
    """Removes this user's rings whose files were deleted, when no process used them for so long."""
    for segment in segments.listed():
        unused = time.time() - segment.detached_wall
        is_unused = not segment.attached and segment.detached_wall and unused >= unused_seconds
        if is_unused and segment.uid == os.getuid() and segment.nbytes >= HEADER_SIZE:
            with suppress(OSError):
                path = _path_of(segments.attach(segment))
                named = _pointed(_beginning(path))
                if path.name and (not path.exists() or named not in (None, segment.id)):
                    segments.remove(segment.id)


def _pointed(content: bytes) -> int | None:
    """Returns the id of the segment that the file of a ring names; None where it is damaged."""
    match = _POINTED.fullmatch(content)
    return int(match[1]) if match else None


def _beginning(path: Path) -> bytes:
    with suppress(OSError), path.open("rb") as file:
        return file.read(HEADER_SIZE)
    return b""


def _find_segment(path: Path, segment_id: int | None) -> tuple[int, memoryview] | None:
    """Returns id and memory of the segment of the ring *path*; None without any.

    Only *segment_id* is looked at where it is known; by now it may be that of another program.
    """
    for segment in segments.listed():
        if segment_id in (None, segment.id) and segment.nbytes >= HEADER_SIZE:
            with suppress(OSError):
                memory = segments.attach(segment)
                if _path_of(memory).parts[-2:] == path.absolute().parts[-2:]:
                    return segment.id, memory
    return None


def _path_of(memory: memoryview) -> Path:
    """Returns the path of the file of a ring; an empty one for what is no ring."""
    (size,) = _PATH.unpack_from(memory, _PATH_AT)
    start = _PATH_AT + _PATH.size
    return Path(os.fsdecode(bytes(memory[start : start + size])) if memory[:8] == MAGIC else "")
