"""The file of a ring and the memory that it names: damage to the file does not reach the writer."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from zeromon.base.errors import RingError
from zeromon.ring import ring_file
from zeromon.ring.buffer import RingReader
from zeromon.ring.ring_file import remove_orphan_rings, remove_ring_file

WRITER = """
import sys
from pathlib import Path
from zeromon.ring.buffer import RingWriter
ring = RingWriter(Path(sys.argv[1]), rank=3, in_file=sys.argv[2] == "file")
n = 0
for _ in sys.stdin:  # another thousand records for each line
    for n in range(n + 1, n + 1001):
        ring.write(n, 1, 0, n, 0, 0, 0)
    ring.name(4, {"text": f"after {n}"})
    print(n, flush=True)
"""


class Writer:
    """A process that writes records when it is told to."""

    def __init__(self, path: Path, where: str = "segment") -> None:
        self.path = path
        self.process = subprocess.Popen(
            [sys.executable, "-c", WRITER, str(path), where],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip

    def write(self) -> int:
        """Lets it write a thousand records; returns the number of the last one, 0 when it has died."""
        assert self.process.stdin is not None and self.process.stdout is not None
        try:
            self.process.stdin.write("\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            return 0
        return int(self.process.stdout.readline() or 0)

    def kill(self) -> None:
        """Ends it with SIGKILL."""
        self.process.kill()
        self.process.wait()


def numbers(reader: RingReader, *, final: bool = False) -> list[int]:
    return [raw[0] for raw in reader.read(final=final)]


def mine(path: Path) -> list[ring_file.Segment]:
    """The segments whose ring has the file *path*. One of another program may go meanwhile."""
    found = []
    for one in ring_file.listed_segments():
        with suppress(OSError):
            if os.fsencode(path) in bytes(ring_file.attach_segment(one)[:4096]):
                found.append(one)
    return found


def _replace(path: Path) -> None:
    path.with_name("other").write_bytes(b"ZEROMON\0" * 1000)
    path.with_name("other").replace(path)


def _remove_memory(path: Path) -> None:
    ring_file.remove_segment(int(path.read_text().split()[-1]))


DAMAGE: dict[str, Callable[[Path], object]] = {
    "truncated to nothing": lambda path: os.truncate(path, 0),
    "truncated to a page": lambda path: os.truncate(path, 4096),
    "made large": lambda path: os.truncate(path, 64 << 20),
    "overwritten": lambda path: path.write_bytes(b"garbage"),
    "removed": lambda path: path.unlink(),
    "its memory removed": _remove_memory,
    "replaced by a ring that ends at once": _replace,
}


@pytest.mark.parametrize("how", DAMAGE)
def test_damage_to_the_file_reaches_neither_writer_nor_reader(tmp_path: Path, how: str) -> None:
    """Another process of the same user, quotas and full disks act on files."""
    writer = Writer(tmp_path / "rank3.ring")
    assert writer.write() == 1000
    reader = RingReader(writer.path)
    DAMAGE[how](writer.path)
    assert writer.write() == 2000
    assert numbers(reader) == list(range(1, 2001))
    writer.kill()
    assert len(reader.memory) > 1 << 20


@pytest.mark.parametrize("how", ["truncated to nothing", "made large", "its memory removed"])
def test_a_new_reader_of_a_live_ring_finds_its_memory(tmp_path: Path, how: str) -> None:
    """A collector that starts after the damage."""
    writer = Writer(tmp_path / "rank3.ring")
    writer.write()
    DAMAGE[how](writer.path)
    assert numbers(RingReader(writer.path)) == list(range(1, 1001))
    writer.kill()


@pytest.mark.parametrize("how", ["truncated to nothing", "truncated to a page", "overwritten"])
def test_the_memory_of_a_dead_rank_is_found_by_its_damaged_file(tmp_path: Path, how: str) -> None:
    """A report after the death of rank and collector."""
    writer = Writer(tmp_path / "rank3.ring")
    writer.write()
    DAMAGE[how](writer.path)
    writer.write()
    writer.kill()
    reader = RingReader(writer.path)
    assert numbers(reader, final=True) == list(range(1, 2001))
    assert [name.payload["text"] for name in reader.names()] == ["after 1000", "after 2000"]


def test_a_mapped_ring_that_was_truncated_is_an_error_and_not_sigbus(tmp_path: Path) -> None:
    """Where the kernel has no segments: the writer dies, and its readers do not."""
    writer = Writer(tmp_path / "rank3.ring", "file")
    writer.write()
    reader = RingReader(writer.path)
    os.truncate(writer.path, 4096)
    for read in (reader.read, reader.names, lambda: reader.memory):
        with pytest.raises(RingError, match="truncated"):
            read()
    assert writer.write() == 0
    assert writer.process.wait() == -signal.SIGBUS


def test_a_segment_lives_as_long_as_its_file(tmp_path: Path) -> None:
    """Whoever removes a ring removes its memory; a live writer keeps what it writes to."""
    writer = Writer(tmp_path / "rank3.ring")
    writer.write()
    assert [one.attached for one in mine(writer.path)] == [1]
    remove_ring_file(writer.path)
    assert not writer.path.exists()
    assert writer.write() == 2000
    writer.kill()
    assert mine(writer.path) == []


def test_memory_without_a_file_is_removed_when_nobody_used_it_for_a_day(tmp_path: Path) -> None:
    """That of a live process never, that of a file that was only damaged never."""
    dead, damaged, live = (Writer(tmp_path / f"{name}.ring") for name in ("dead", "damaged", "live"))
    for writer in (dead, damaged, live):
        writer.write()
    dead.kill()
    damaged.kill()
    os.truncate(damaged.path, 0)
    for writer in (dead, live):
        writer.path.unlink()
    remove_orphan_rings()
    assert len(mine(dead.path)) == 1
    remove_orphan_rings(unused_seconds=0)
    assert mine(dead.path) == []
    assert len(mine(damaged.path)) == len(mine(live.path)) == 1
    remove_ring_file(damaged.path)
    assert mine(damaged.path) == []
    live.kill()


def test_a_file_never_makes_a_reader_or_a_removal_reach_for_other_memory(tmp_path: Path) -> None:
    """The id in it may be that of another ring, or of another program."""
    (tmp_path / "a").mkdir()
    writer = Writer(tmp_path / "a" / "rank3.ring")
    writer.write()
    (one,) = mine(writer.path)
    forged = tmp_path / "rank0.ring"
    forged.write_text(f"zeromon segment {one.id}\n")
    with pytest.raises(RingError, match="gone"):
        RingReader(forged)
    remove_ring_file(forged)
    assert len(mine(writer.path)) == 1
    remove_ring_file(writer.path)
    writer.kill()


def test_a_ring_beyond_the_limit_of_segments_is_a_file(tmp_path: Path) -> None:
    """In an IPC namespace that has none left: the rank is watched all the same."""
    program = (
        "import sys\nfrom pathlib import Path\n"
        "from zeromon.ring.buffer import RingReader, RingWriter\n"
        "Path('/proc/sys/kernel/shmmni').write_text('0')\n"
        "ring = RingWriter(Path(sys.argv[1]), rank=0, capacity=64)\n"
        "ring.write(1, 1, 0, 0, 0, 0, 0)\n"
        "print(len(RingReader(ring.path).read()), ring.path.stat().st_size > 4096)\n"
    )
    command = [
        "unshare", "--ipc", "--mount", sys.executable, "-c", program, str(tmp_path / "r.ring")
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout == "1 True\n", done.stderr
