"""Replaces, reads and locks files, and opens files that a user names without waiting for one.

A reader sees the old content or the new, never a part of it. This is the package's only way to replace a
file. The agents use it too, so it needs the standard library alone.
"""

import errno
import fcntl
import json
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO


@contextmanager
def replacing_file(path: Path, *, private: bool = True) -> Iterator[Path]:
    """Yields a new empty file beside *path*; it becomes *path* when the block ends without an error.

    A *private* file has mode 0600, also where the block makes a new file of that name; another one
    follows the umask. When the block raises, *path* stays as it was and the new file is removed.
    Raises :class:`OSError` when the folder cannot be written.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.unlink(missing_ok=True)  # of a killed process that had the same number
    mode = 0o600 if private else 0o666
    os.close(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, mode))
    try:
        yield temporary
        if private:
            temporary.chmod(mode)
        temporary.replace(path)
    except BaseException:
        # For KeyboardInterrupt, too: it would leave the temporary file behind
        with suppress(OSError):
            temporary.unlink()
        raise


def replace_file(path: Path, content: bytes | str, *, private: bool = True) -> None:
    """Replaces the content of *path* by *content*, text as UTF-8; see :func:`replacing_file`."""
    with replacing_file(path, private=private) as temporary:
        temporary.write_bytes(content.encode() if isinstance(content, str) else content)


def read_json_object(path: Path) -> dict[str, Any]:
    """Returns the JSON object in *path*; an empty one for anything else."""
    with suppress(OSError, ValueError):
        content = json.loads(path.read_text())
        return content if isinstance(content, dict) else {}
    return {}


def try_lock_file(path: Path) -> int | None:
    """Takes the lock of *path*; returns its file descriptor, or None when it is held.

    Raises :class:`OSError` where *path* cannot be opened or its file system has no locks.
    """
    fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(fd)
        if isinstance(error, BlockingIOError):
            return None
        raise
    return fd


def open_regular_file(path: Path) -> BinaryIO:
    """The regular file *path*, open for reading.

    Raises :class:`OSError` for anything else: a named pipe without a writer would be waited for, and a
    device may never end.
    """
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise OSError(errno.EINVAL, "it is not a regular file", str(path))
    return open(fd, "rb")
