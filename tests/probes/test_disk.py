"""The disk under offloaded state, as /proc and cgroups tell of it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from zeromon.probes.host import DiskReader

S = 1_000_000_000


def a_proc(folder: Path, number: int, io: str, stats: str) -> Path:
    (folder / str(number)).mkdir()
    (folder / str(number) / "io").write_text(io)
    (folder / "diskstats").write_text(stats)
    return folder


def stats_of(folder: Path, read: int, written: int, busy_ms: int, queue_ms: int) -> str:
    """The table with the device under *folder*; sectors and milliseconds."""
    number = os.stat(folder).st_dev
    return (
        " 9 9 other0 1 0 11 1 1 0 11 1 0 5 5\n\n"
        f" {os.major(number)} {os.minor(number)} nvme0n1 10 0 {read} 7 20 0 {written} 9 0 {busy_ms}"
        f" {queue_ms} 0 0\n"
    )


def test_what_a_real_process_wrote(tmp_path: Path) -> None:
    """Free space and this process's own counters, from the real /proc."""
    disk = DiskReader(os.getpid()).read(str(tmp_path), 0)
    space = os.statvfs(tmp_path)
    assert disk is not None
    assert disk.total_bytes == space.f_blocks * space.f_frsize
    assert disk.free_bytes is not None
    assert abs(disk.free_bytes - space.f_bavail * space.f_frsize) < 1 << 30  # others write, too
    assert disk.process_written_bytes is not None


def test_the_device_under_the_path_is_the_one_that_is_counted(tmp_path: Path) -> None:
    """Sectors of 512 bytes and milliseconds, by the numbers of the device."""
    io = "rchar: 9\nread_bytes: 4096\nwrite_bytes: 8192\n"
    proc = a_proc(tmp_path, 7, io, stats_of(tmp_path, 2048, 4096, 1500, 16))
    disk = DiskReader(7, proc).read(str(tmp_path), 0)
    assert disk is not None
    assert (disk.process_read_bytes, disk.process_written_bytes) == (4096, 8192)
    assert disk.device == "nvme0n1"
    assert (disk.device_read_bytes, disk.device_written_bytes) == (1 << 20, 2 << 20)
    assert (disk.device_busy_seconds, disk.device_queue_seconds) == (1.5, 0.016)
    assert (disk.busy_ratio, disk.busy_bytes_per_second) == (None, None)  # of one reading


def test_rates_are_those_of_the_last_ten_seconds(tmp_path: Path) -> None:
    """Busy for 0.5 s of each second, 4 requests at once, 100 MB; then idle; the best is kept."""
    proc = a_proc(tmp_path, 7, "", "")
    reader = DiskReader(7, proc)
    disks = []
    for second in range(40):
        n = min(second, 20)
        text = stats_of(tmp_path, n * 100_000_000 // 512, 0, n * 500, n * 2000)
        (proc / "diskstats").write_text(text)
        disks.append(reader.read(str(tmp_path), second * S))
    steady, ends, idle = disks[15], disks[25], disks[35]
    assert steady is not None and ends is not None and idle is not None
    assert steady.busy_ratio == pytest.approx(0.5)
    assert steady.requests_at_once == pytest.approx(4)
    assert steady.busy_bytes_per_second == pytest.approx(200e6, rel=1e-4)
    assert ends.busy_ratio == pytest.approx(0.25)
    assert ends.busy_bytes_per_second == pytest.approx(200e6, rel=1e-4)
    assert idle.busy_ratio == 0
    assert idle.busy_bytes_per_second == pytest.approx(200e6, rel=1e-4)  # when it was busy last
    assert idle.best_busy_bytes_per_second == pytest.approx(200e6, rel=1e-4)


@pytest.mark.parametrize(
    ("cgroup", "files", "limits"),
    [
        ("3:blkio:/job\n", {"blkio/job/blkio.throttle.read_bps_device": "{device} 1000\n9:9 5\n"},
         (1000, None)),
        ("3:blkio:/job\n", {"blkio/job/blkio.throttle.write_bps_device": "9:9 5\n"}, (None, None)),
        ("0::/a/job\n", {"a/job/io.max": "{device} rbps=max wbps=700 riops=max wiops=120\n",
                         "a/io.max": "{device} rbps=900 wbps=800\n"}, (900, 700)),
        ("0::/a/job\n", {"a/job/io.max": "\n{device}\n{device} rbps wbps= x=3\n"}, (None, None)),
    ],
)  # fmt: skip
def test_the_tightest_limit_of_its_cgroups_is_known(
    tmp_path: Path, cgroup: str, files: dict[str, str], limits: tuple[float | None, float | None]
) -> None:
    proc = a_proc(tmp_path, 7, "", "")
    (proc / "7" / "cgroup").write_text(cgroup)
    number = os.stat(tmp_path).st_dev
    for name, text in files.items():
        file = tmp_path / "cgroup" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        (file.parent / "cgroup.procs").touch()
        file.write_text(text.format(device=f"{os.major(number)}:{os.minor(number)}"))
    disk = DiskReader(7, proc, tmp_path / "cgroup").read(str(tmp_path), 0)
    assert disk is not None
    assert (disk.read_limit_bytes_per_second, disk.write_limit_bytes_per_second) == limits


def test_what_cannot_be_read_is_unknown(tmp_path: Path) -> None:
    """A process that is gone, a folder that is not there, tables that make no sense."""
    assert DiskReader(999, tmp_path).read("", 0) is None
    gone = DiskReader(999, tmp_path).read(str(tmp_path / "gone"), 0)
    assert gone is not None
    assert (gone.free_bytes, gone.device, gone.process_read_bytes) == (None, "", None)
    proc = a_proc(tmp_path, 8, "read_bytes: many\n", "no table\n")
    disk = DiskReader(8, proc).read(str(tmp_path), 0)
    assert disk is not None
    assert disk.process_read_bytes is None
    assert disk.device == ""
