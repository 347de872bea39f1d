"""Opens files that a user names, and waits for none of them."""

import errno
import os
import stat
from pathlib import Path
from typing import BinaryIO


def open_regular(path: Path) -> BinaryIO:
    """The regular file *path*, open for reading.

    Raises :class:`OSError` for anything else: a named pipe without a writer would be waited for, and a
    device may never end.
    """
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise OSError(errno.EINVAL, "it is not a regular file", str(path))
    return open(fd, "rb")
