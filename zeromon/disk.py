"""The disk that state is offloaded to, and a process's own I/O: read from outside, by the collector."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from typing import Any

from zeromon.snapshot import Disk

_SECTOR = 512  # of /proc/diskstats, whatever the device's own is


def read_disk(pid: int, path: str, proc: Path = Path("/proc")) -> Disk | None:
    """What is known of *pid*'s I/O and of the file system at *path* ("": none); None if nothing is."""
    io = _process_io(pid, proc)
    facts: dict[str, Any] = {**io}
    if not path:
        return Disk(**facts) if facts else None
    with suppress(OSError):
        space = os.statvfs(path)
        facts["free_bytes"] = space.f_bavail * space.f_frsize
        facts["total_bytes"] = space.f_blocks * space.f_frsize
        facts.update(_device(Path(path).stat().st_dev, proc))
    return Disk(path=path, **facts)


def _process_io(pid: int, proc: Path) -> dict[str, int]:
    """Bytes that the process caused to be fetched from and sent to storage."""
    names = {"read_bytes": "process_read_bytes", "write_bytes": "process_written_bytes"}
    found: dict[str, int] = {}
    with suppress(OSError, ValueError):
        for line in (proc / str(pid) / "io").read_text().splitlines():
            name, _, value = line.partition(": ")
            if name in names:
                found[names[name]] = int(value)
    return found


def _device(number: int, proc: Path) -> dict[str, Any]:
    """The counters of a block device; nothing for a file system without one (tmpfs, overlay)."""
    wanted = (str(os.major(number)), str(os.minor(number)))
    with suppress(OSError, ValueError, IndexError):
        for line in (proc / "diskstats").read_text().splitlines():
            words = line.split()
            if (words[0], words[1]) == wanted:
                return {
                    "device": words[2],
                    "device_read_bytes": int(words[5]) * _SECTOR,
                    "device_written_bytes": int(words[9]) * _SECTOR,
                    "device_busy_seconds": int(words[12]) / 1e3,
                }
    return {}
