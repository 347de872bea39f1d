"""The disk under offloaded state, as /proc tells of it."""

from __future__ import annotations

import os
from pathlib import Path

from zeromon.disk import read_disk


def a_proc(folder: Path, number: int, io: str, stats: str) -> Path:
    (folder / str(number)).mkdir()
    (folder / str(number) / "io").write_text(io)
    (folder / "diskstats").write_text(stats)
    return folder


def test_what_a_real_process_wrote(tmp_path: Path) -> None:
    """Free space and this process's own counters, from the real /proc."""
    disk = read_disk(os.getpid(), str(tmp_path))
    space = os.statvfs(tmp_path)
    assert disk is not None
    assert disk.total_bytes == space.f_blocks * space.f_frsize
    assert disk.free_bytes is not None
    assert abs(disk.free_bytes - space.f_bavail * space.f_frsize) < 1 << 30  # others write, too
    assert disk.process_written_bytes is not None


def test_the_device_under_the_path_is_the_one_that_is_counted(tmp_path: Path) -> None:
    """Sectors of 512 bytes and milliseconds, by the numbers of the device."""
    number = os.stat(tmp_path).st_dev
    major, minor = os.major(number), os.minor(number)
    stats = (
        " 9 9 other0 1 0 11 1 1 0 11 1 0 5 5\n"
        f" {major} {minor} nvme0n1 10 0 2048 7 20 0 4096 9 0 1500 16 0 0\n"
    )
    proc = a_proc(tmp_path, 7, "rchar: 9\nread_bytes: 4096\nwrite_bytes: 8192\n", stats)
    disk = read_disk(7, str(tmp_path), proc)
    assert disk is not None
    assert (disk.process_read_bytes, disk.process_written_bytes) == (4096, 8192)
    assert disk.device == "nvme0n1"
    assert (disk.device_read_bytes, disk.device_written_bytes) == (1 << 20, 2 << 20)
    assert disk.device_busy_seconds == 1.5


def test_what_cannot_be_read_is_unknown(tmp_path: Path) -> None:
    """A process that is gone, a folder that is not there, tables that make no sense."""
    assert read_disk(999, "", tmp_path) is None
    gone = read_disk(999, str(tmp_path / "gone"), tmp_path)
    assert gone is not None
    assert (gone.free_bytes, gone.device, gone.process_read_bytes) == (None, "", None)
    proc = a_proc(tmp_path, 8, "read_bytes: many\n", "no table\n")
    disk = read_disk(8, str(tmp_path), proc)
    assert disk is not None
    assert disk.process_read_bytes is None
    assert disk.device == ""
