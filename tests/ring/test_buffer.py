"""The ring: what is written is read, whole or not at all, also after the writer's death."""

from __future__ import annotations

import os
import signal
import struct
import subprocess
import sys
import time
from pathlib import Path

import pytest

from zeromon.base.errors import RingError, RingVersionError
from zeromon.ring.buffer import HEADER_SIZE, NameKind, RingReader, RingWriter, needs_record_crc
from zeromon.ring.codes import Kind, Op
from zeromon.ring.events import pack_call_word, pack_head, pack_place

WRITER = """
import sys, time
from pathlib import Path
from zeromon.ring.buffer import RingWriter
w = RingWriter(Path(sys.argv[1]), rank=3, capacity=int(sys.argv[2]), crc=sys.argv[3] == "crc")
print("ready", flush=True)
n = 0
end = time.monotonic() + float(sys.argv[4])
while time.monotonic() < end:
    for _ in range(256):
        n += 1
        w.write(n, n & 0xFFFFFFFF, (n * 7) & 0xFFFFFFFF, n, -n, n * 3, n ^ 0x5555)
    if sys.argv[5] == "say":
        print(n, flush=True)
print("wrote", n, flush=True)
"""


def start_writer(path: Path, capacity: int, crc: str, seconds: float, say: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", WRITER, str(path), str(capacity), crc, str(seconds), say]
    writer = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert writer.stdout is not None
    assert writer.stdout.readline() == "ready\n"
    return writer


def is_whole(raw: tuple[int, ...]) -> bool:
    """Whether every field is what the writer above puts into that record."""
    n = raw[0]
    expected = (n, n & 0xFFFFFFFF, (n * 7) & 0xFFFFFFFF, n, -n, n * 3, n ^ 0x5555)
    return (raw[1], raw[2] & 0xFFFFFFFF, raw[2] >> 32, *raw[3:7]) == expected


def test_records_come_back_as_they_were_written(tmp_path: Path) -> None:
    """Fields, order and header."""
    writer = RingWriter(tmp_path / "r.ring", rank=5, capacity=64)
    writer.write(10, pack_head(Kind.DONE, Op.ALL_GATHER, 2, 3), pack_place(4, 5), 6, -7, 8, 9)
    reader = RingReader(tmp_path / "r.ring")
    (raw,) = reader.read()
    word = pack_head(Kind.DONE, Op.ALL_GATHER, 2, 3) | pack_place(4, 5) << 32
    assert raw[:7] == (1, 10, word, 6, -7, 8, 9)
    assert word == pack_call_word(Kind.DONE, Op.ALL_GATHER, 2, 3, 4, 5)
    assert reader.read() == []
    assert (reader.header.rank, reader.header.pid) == (5, os.getpid())
    assert (tmp_path / "r.ring").stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("crc", ["crc", "plain"])
@pytest.mark.parametrize("capacity", [64, 4096])
def test_no_torn_record_is_accepted_while_being_lapped(tmp_path: Path, crc: str, capacity: int) -> None:
    """A writer flat out overtakes the reader all the time; what is read is always whole."""
    if crc == "plain" and needs_record_crc():
        crc = "crc"  # this machine may reorder stores: the plain form is never used on it
    writer = start_writer(tmp_path / "r.ring", capacity, crc, 2.0, "-")
    reader = RingReader(tmp_path / "r.ring")
    read = bad = 0
    newest = 0
    while writer.poll() is None:
        for raw in reader.read():
            read += 1
            bad += not is_whole(raw)
            assert raw[0] > newest
            newest = raw[0]
    for raw in reader.read(final=True):
        read += 1
        bad += not is_whole(raw)
        newest = raw[0]
    assert writer.stdout is not None
    written = int(writer.stdout.read().split()[-1])
    assert bad == 0
    assert read > 1000
    assert newest == written
    assert read + reader.lost == written


def test_no_acknowledged_record_is_lost_when_the_writer_is_killed(tmp_path: Path) -> None:
    """Ten writers, each killed in full flight: all that they reported as written is there."""
    for attempt in range(10):
        path = tmp_path / f"{attempt}.ring"
        writer = start_writer(path, 1 << 16, "plain", 30, "say")
        assert writer.stdout is not None
        acknowledged = [int(writer.stdout.readline()) for _ in range(20)][-1]
        writer.send_signal(signal.SIGKILL)
        writer.wait()
        reader = RingReader(path)
        records = reader.read(final=True)
        assert all(is_whole(raw) for raw in records)
        assert {raw[0] for raw in records} >= set(range(1, acknowledged + 1))


def test_a_slow_reader_counts_what_it_missed(tmp_path: Path) -> None:
    """read + lost = written."""
    writer = RingWriter(tmp_path / "r.ring", rank=0, capacity=64)
    reader = RingReader(tmp_path / "r.ring")
    for n in range(1000):
        writer.write(n, 1, 0, 0, 0, 0, 0)
    records = reader.read()
    assert records[-1][0] == 1000
    assert len(records) + reader.lost == 1000


def test_a_record_that_was_never_finished_is_stepped_over(tmp_path: Path) -> None:
    """A writer that died between taking a number and storing the record leaves a hole."""
    writer = RingWriter(tmp_path / "r.ring", rank=0, capacity=64)
    for n in range(5):
        writer.write(n, 1, 0, 0, 0, 0, 0)
    start = HEADER_SIZE + writer._names_size
    writer._map[start + 2 * 64 : start + 3 * 64] = bytes(64)  # slot of number 2
    live = RingReader(tmp_path / "r.ring")
    assert [raw[0] for raw in live.read()] == [1]
    assert [raw[0] for raw in live.read(final=True)] == [3, 4, 5]
    assert live.lost == 1


def test_a_broken_number_does_not_hold_up_the_reading_of_a_dead_ring(tmp_path: Path) -> None:
    """The reader goes on from record to record that the ring holds, not from number to number."""
    writer = RingWriter(tmp_path / "r.ring", rank=0)
    for n in range(5):
        writer.write(n, 1, 0, 0, 0, 0, 0)
    start = HEADER_SIZE + writer._names_size
    writer._map[start + 2 * 64 : start + 3 * 64] = bytes(64)  # slot of number 2
    struct.pack_into("<Q", writer._map, start + 5 * 64, 1 << 60)  # slot of number 5
    writer._map[start + 6 * 64 - 8 : start + 6 * 64] = bytes(8)
    reader = RingReader(tmp_path / "r.ring")
    assert [raw[0] for raw in reader.read(final=True)] == [1, 3, 4]
    assert reader.read(final=True) == []


def test_a_hole_at_the_end_of_the_ring_is_seen_from_its_beginning(tmp_path: Path) -> None:
    """What follows the record in the last slot is in the first slot."""
    writer = RingWriter(tmp_path / "r.ring", rank=0, capacity=64)
    live = RingReader(tmp_path / "r.ring")
    for n in range(60):
        writer.write(n, 1, 0, 0, 0, 0, 0)
    assert len(live.read()) == 60
    for n in range(8):
        writer.write(n, 1, 0, 0, 0, 0, 0)
    start = HEADER_SIZE + writer._names_size
    writer._map[start + 63 * 64 : start + 64 * 64] = bytes(64)  # slot of number 63
    reads = [[raw[0] for raw in live.read()] for _ in range(5)]
    assert reads == [[61, 62], [], [], [64, 65, 66, 67, 68], []]
    assert live.lost == 1


def test_a_live_reader_waits_for_a_hole_and_then_goes_on(tmp_path: Path) -> None:
    """A thread that was switched out in mid-event holds the reader up for a few reads only."""
    writer = RingWriter(tmp_path / "r.ring", rank=0, capacity=64)
    for n in range(3):
        writer.write(n, 1, 0, 0, 0, 0, 0)
    start = HEADER_SIZE + writer._names_size
    writer._map[start + 64 : start + 128] = bytes(64)
    reader = RingReader(tmp_path / "r.ring")
    seen = [raw[0] for _ in range(6) for raw in reader.read()]
    assert seen == [2, 3]
    assert reader.lost == 1


def test_a_corrupt_record_is_rejected_by_its_checksum(tmp_path: Path) -> None:
    """In the form for machines that reorder stores, a flipped bit is noticed."""
    writer = RingWriter(tmp_path / "r.ring", rank=0, capacity=64, crc=True)
    for n in range(3):
        writer.write(n, 1, 0, n, 0, 0, 0)
    start = HEADER_SIZE + writer._names_size
    writer._map[start + 2 * 64 + 30] ^= 0xFF
    reader = RingReader(tmp_path / "r.ring")
    assert [raw[0] for raw in reader.read()] == [1, 3]
    assert reader.lost == 1


def test_names_arrive_as_they_are_added(tmp_path: Path) -> None:
    """Hostile ones too."""
    writer = RingWriter(tmp_path / "r.ring", rank=0, capacity=64)
    reader = RingReader(tmp_path / "r.ring")
    assert reader.names() == []
    first = writer.name(NameKind.UNIT, {"fqn": 'a"\n\x1b[31m\ud83d{}\u0000'})
    second = writer.name(NameKind.GROUP, {"size": 2})
    assert [(n.kind, n.id) for n in reader.names()] == [(NameKind.UNIT, first), (NameKind.GROUP, second)]
    assert reader.names() == []


def test_a_closed_ring_gives_its_descriptor_back_and_takes_nothing(tmp_path: Path) -> None:
    """200 of them: a job may be attached to again and again."""
    before = len(os.listdir("/proc/self/fd"))
    for number in range(200):
        ring = RingWriter(tmp_path / "ring", rank=0, capacity=16, names_size=1024)
        ring.write(number, 1, 0, 0, 0, 0, 0)
        ring.close()
        ring.write(number, 1, 0, 0, 0, 0, 0)
        assert ring.name(1, {"a": 1}) == 0
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_full_name_table_says_zero(tmp_path: Path) -> None:
    """And what fitted stays readable."""
    writer = RingWriter(tmp_path / "r.ring", rank=0, capacity=64, names_size=256)
    ids = [writer.name(NameKind.UNIT, {"fqn": "x" * 50}) for _ in range(10)]
    assert ids[:3] == [1, 2, 3]
    assert ids[-1] == 0
    assert len(RingReader(tmp_path / "r.ring").names()) == sum(n > 0 for n in ids)


def test_a_ring_that_cannot_have_its_room_is_refused_at_once(tmp_path: Path) -> None:
    """Not with SIGBUS in the middle of training: the child may write no file of this size."""
    program = (
        "import resource, sys\n"
        "from pathlib import Path\n"
        "from zeromon.base.errors import RingError\n"
        "from zeromon.ring.buffer import RingWriter\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))\n"
        "try:\n    RingWriter(Path(sys.argv[1]), rank=0, in_file=True)\n"
        "except RingError as error:\n    print('refused', error)\n"
    )
    path = tmp_path / "r.ring"
    done = subprocess.run(
        [sys.executable, "-c", program, str(path)], capture_output=True, text=True, check=True
    )
    assert done.stdout.startswith("refused")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("content", "error"),
    [
        (b"", RingError),
        (b"ZEROMON\0" + bytes(100), RingError),
        (b"garbage!" + bytes(8192), RingError),
        (struct.pack("<8sIIQQqIiQQ", b"ZEROMON\0", 99, 64, 64, 256, 1, 0, 0, 0, 0), None),
        (struct.pack("<8sIIQQqIiQQ", b"ZEROMON\0", 1, 64, 1 << 40, 256, 1, 0, 0, 0, 0), RingError),
        (struct.pack("<8sIIQQqIiQQ", b"ZEROMON\0", 1, 64, 63, 256, 1, 0, 0, 0, 0), RingError),
    ],
)
def test_a_file_that_is_no_ring_is_a_clear_error(
    tmp_path: Path, content: bytes, error: type[Exception] | None
) -> None:
    """Empty, short, foreign, of another version, or lying about its size."""
    path = tmp_path / "r.ring"
    path.write_bytes(content.ljust(8192, b"\0") if len(content) == 64 else content)
    with pytest.raises(error or RingVersionError) as caught:
        RingReader(path)
    assert caught.value.hint


def test_reading_is_possible_while_the_file_is_gone(tmp_path: Path) -> None:
    """A mapping outlives its name."""
    writer = RingWriter(tmp_path / "r.ring", rank=0, capacity=64)
    reader = RingReader(tmp_path / "r.ring")
    (tmp_path / "r.ring").unlink()
    writer.write(1, 1, 0, 0, 0, 0, 0)
    assert len(reader.read()) == 1
    reader.close()


def test_clocks_in_the_header_belong_together(tmp_path: Path) -> None:
    """Wall and monotonic clock of one moment."""
    before = time.time_ns() - time.monotonic_ns()
    header = RingReader(RingWriter(tmp_path / "r.ring", rank=0, capacity=64).path).header
    assert abs((header.wall_ns - header.mono_ns) - before) < 1_000_000_000
