"""Reads the lock files of torch's extension cache, and who holds them.

``torch.utils.file_baton`` makes such a file while a process compiles an extension, and keeps it open.
When the process is killed, the file stays, and every later process waits for its removal without an end.
"""

import os
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from zeromon.probes.process import PROC
from zeromon.snapshot import ExtensionLock

_EVERY_NS = 5_000_000_000
"""To ask every process for its open files takes milliseconds."""


class ExtensionLockReader:
    """Reads the lock that one rank waits for; *proc* is for tests."""

    def __init__(self, proc: Path = PROC) -> None:
        self._proc = proc
        self._newest: ExtensionLock | None = None
        self._read_ns = -_EVERY_NS

    def read(self, path: str, now_ns: int) -> ExtensionLock | None:
        """Returns the lock at *path*; None where *path* is "" or there is no such file any more."""
        if not path:
            self._newest = None
        elif self._newest is None or now_ns - self._read_ns >= _EVERY_NS:
            self._newest, self._read_ns = read_extension_lock(path, self._proc), now_ns
        return self._newest


def read_extension_lock(path: str, proc: Path = PROC) -> ExtensionLock | None:
    """Returns the lock at *path* with its age and its owner; None where there is no such file."""
    try:
        file = Path(path).stat()
    except (OSError, ValueError):
        return None
    owner = _find_owner(os.path.realpath(path), proc)
    return ExtensionLock(
        path=path,
        age_seconds=max(0.0, time.time() - file.st_mtime),
        owner=owner,
        is_stale=owner is None and file.st_uid == os.getuid(),
    )


def _find_owner(path: str, proc: Path) -> int | None:
    """The pid of a process that has the file at *path* open, among those that this user may ask."""
    for folder in proc.glob("[0-9]*"):
        with suppress(OSError):
            for open_file in (folder / "fd").iterdir():
                with suppress(OSError):
                    if str(open_file.readlink()) == path:
                        return int(folder.name)
    return None


def extension_cache_folder(environment: Mapping[str, str]) -> Path:
    """Where torch keeps compiled extensions (``torch.utils.cpp_extension.get_default_build_root``)."""
    if environment.get("TORCH_EXTENSIONS_DIR"):
        return Path(environment["TORCH_EXTENSIONS_DIR"])
    cache = environment.get("XDG_CACHE_HOME") or Path("~/.cache").expanduser()
    return Path(cache) / "torch_extensions"


def cached_extension_locks(folder: Path) -> list[ExtensionLock]:
    """Returns the locks in the cache at *folder*, which has a folder for each Python and extension."""
    paths = sorted({*folder.glob("*/lock"), *folder.glob("*/*/lock")})
    return [lock for path in paths if (lock := read_extension_lock(str(path))) is not None]
