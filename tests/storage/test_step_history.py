"""The history of a run: nothing acknowledged is lost, nothing is read twice, and it stays small."""

from __future__ import annotations

import os
import random
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from builders import MS, summary
from support import ROOT, load_all_rows

from zeromon.base.errors import HistoryError
from zeromon.snapshot.step import IDLE, SKIPPED
from zeromon.storage.step_history.queries import ranges_of_steps
from zeromon.storage.step_history.rows import (
    MAGIC,
    NAMES,
    RECORD_SIZE,
    Row,
    pack_row,
    row_of,
    seg_files,
    step_of,
    unpack_rows,
)
from zeromon.storage.step_history.writer import (
    Writer,
    merge_rows,
    read_parquet,
    rows_frame,
    write_parquet,
)


def rows(count: int, ranks: int = 2, first: int = 1) -> list[Row]:
    return [
        row_of(rank, summary(step), 0) for step in range(first, first + count) for rank in range(ranks)
    ]


def keys(folder: Path) -> list[tuple[int, int]]:
    return load_all_rows(folder)[0].select("rank", "step").rows()


def test_a_row_keeps_what_a_step_was() -> None:
    one = summary(7, idle=True, skipped=True, other_bytes=9, offload_blocked_ns=3 * MS)
    row = dict(zip(NAMES, row_of(3, one, 5_000), strict=True))
    assert (row["rank"], row["step"], row["steps"], row["flags"]) == (3, 7, 1, IDLE | SKIPPED)
    assert row["start_us"] == 700_000 + 5
    assert (row["duration_us"], row["forward_us"], row["data_wait_us"]) == (100_000, 30_000, 5_000)
    assert (row["communication_us"], row["exposed_us"]) == (40_000, 10_000)
    assert (row["offload_blocked_us"], row["other_bytes"], row["rss_bytes"]) == (3_000, 9, 1 << 30)
    assert list(unpack_rows(pack_row(row_of(3, one, 5_000)))) == [row_of(3, one, 5_000)]


def test_a_loss_comes_back_and_an_unknown_one_stays_unknown(tmp_path: Path) -> None:
    """Also from Parquet, and as the mean of the merged rows that have one."""
    batch = {"samples": 4, "tokens": 128}
    known = [summary(n, loss=float(n), learning_rate=3e-4, **batch) for n in range(1, 9)]
    kept = [row_of(0, one, 0) for one in [*known, *(summary(n) for n in range(9, 17))]]
    assert [step_of(row, 0) for row in unpack_rows(b"".join(map(pack_row, kept)))][:8] == known
    write_parquet(rows_frame(kept), tmp_path / "000001.parquet")
    assert read_parquet(tmp_path / "000001.parquet").rows() == kept
    (row,) = merge_rows(rows_frame(kept)).rows(named=True)
    assert (row["loss"], row["grad_norm"], row["learning_rate"]) == (4.5, None, 3e-4)
    assert (row["samples"], row["tokens"]) == (4, 128)


def test_a_step_comes_back_with_what_each_phase_waited() -> None:
    phases = (5 * MS, 30 * MS, 50 * MS, 10 * MS, 5 * MS, 0, 8 * MS, 9 * MS, 1 * MS, 2 * MS,
              6 * MS)  # fmt: skip
    exposed = (0, 3 * MS, 7 * MS, 0, 0, 0, 4 * MS, 0, 0, 0, 1 * MS)
    one = summary(7, phase_ns=phases, phase_exposed_ns=exposed)
    assert step_of(row_of(3, one, 5_000_000), 5_000_000) == one
    unknown = summary(7, phase_exposed_ns=())
    assert step_of(row_of(3, unknown, 0), 0).phase_exposed_ns == ()


def test_what_was_written_is_read_once_also_by_a_second_writer(tmp_path: Path) -> None:
    """A collector that was killed reads the rings anew, from their beginning."""
    writer = Writer(tmp_path)
    assert writer.append(rows(10)) == 20
    assert writer.append(rows(12)) == 4
    again = Writer(tmp_path)
    assert again.append(rows(15)) == 6
    assert sorted(keys(tmp_path)) == sorted((r, s) for s in range(1, 16) for r in range(2))


@pytest.mark.parametrize("cut", [1, RECORD_SIZE - 1, RECORD_SIZE, RECORD_SIZE + 5])
def test_a_torn_end_is_cut_off_and_written_on(tmp_path: Path, cut: int) -> None:
    Writer(tmp_path).append(rows(5, ranks=1))
    (log,) = seg_files(tmp_path).values()
    os.truncate(log, log.stat().st_size - cut)
    whole = 5 - -(-cut // RECORD_SIZE)
    assert keys(tmp_path) == [(0, n) for n in range(1, whole + 1)]
    Writer(tmp_path).append(rows(5, ranks=1))
    assert keys(tmp_path) == [(0, n) for n in range(1, 6)]


def test_a_record_that_is_not_what_was_written_ends_the_log(tmp_path: Path) -> None:
    Writer(tmp_path).append(rows(5, ranks=1))
    (log,) = seg_files(tmp_path).values()
    content = bytearray(log.read_bytes())
    content[len(MAGIC) + 2 * RECORD_SIZE + 20] ^= 1
    log.write_bytes(content)
    assert keys(tmp_path) == [(0, 1), (0, 2)]


def test_a_full_log_becomes_parquet_and_reads_the_same(tmp_path: Path) -> None:
    writer = Writer(tmp_path, segment_rows=20)
    for step in range(1, 31):
        writer.append(rows(1, first=step))
    assert [path.suffix for path in seg_files(tmp_path).values()] == [".parquet"] * 3 + [".log"]
    assert sorted(keys(tmp_path)) == sorted((r, s) for s in range(1, 31) for r in range(2))
    whole = load_all_rows(tmp_path)[0].sort("step", "rank").rows()
    assert whole == rows(30)
    assert load_all_rows(tmp_path, ranks=[1])[0].height == 30
    assert Writer(tmp_path, segment_rows=20).append(rows(31)) == 2


def test_a_crash_between_parquet_and_the_end_of_its_log_reads_nothing_twice(tmp_path: Path) -> None:
    writer = Writer(tmp_path, segment_rows=20)
    writer.append(rows(9))
    (log,) = seg_files(tmp_path).values()
    kept = log.read_bytes()
    writer.close_segment()
    log.write_bytes(kept)
    (tmp_path / ".000001.parquet.77").write_bytes(b"half of it")
    assert len(keys(tmp_path)) == 18
    Writer(tmp_path).append(rows(9))
    assert len(keys(tmp_path)) == 18
    assert not list(tmp_path.glob(".*"))


KILLED = """
import sys
sys.path.insert(0, sys.argv[2])
from pathlib import Path
from builders import summary
from zeromon.storage.step_history.rows import row_of
from zeromon.storage.step_history.writer import Writer
writer = Writer(Path(sys.argv[1]), segment_rows=400)
step = min(writer._last.get(rank, 0) for rank in range(4)) // 100_000 + 1
while True:
    writer.append([row_of(rank, summary(step), 0) for rank in range(4)])
    sys.stdout.write(f"{step}\\n")
    sys.stdout.flush()
    step += 1
"""


@pytest.mark.parametrize("rounds", [8, pytest.param(50, marks=pytest.mark.long)])
def test_killed_at_any_moment_no_acknowledged_row_is_lost(tmp_path: Path, rounds: int) -> None:
    """Each writer goes on where the one before was killed, also in the middle of closing a segment.

    Of rows that are written at once a kill may leave the first: the next writer adds the others.
    """
    chooser, tests, last = random.Random(3), str(ROOT / "tests"), 0
    folder = tmp_path / "history"
    for _ in range(rounds):
        command = [sys.executable, "-c", KILLED, str(folder), tests]
        writing = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert writing.stdout is not None
        writing.stdout.readline()
        time.sleep(chooser.uniform(0, 0.05))
        writing.send_signal(signal.SIGKILL)
        said = [int(line) for line in writing.stdout.read().split("\n") if line.strip().isdigit()]
        writing.wait()
        last = max([last, *said])
    assert last  # a writer that never began would lose nothing
    whole, broken = load_all_rows(folder)
    assert broken == ()
    found = whole.select("rank", "step").rows()
    assert len(found) == len(set(found))
    assert {(r, s) for s in range(1, last + 1) for r in range(4)} <= set(found)


def test_above_its_limit_the_oldest_rows_are_merged_then_dropped(tmp_path: Path) -> None:
    chooser, limit = random.Random(1), 200_000
    writer = Writer(tmp_path, segment_rows=2048, limit_bytes=limit)
    for step in range(1, 16_385):
        noise = {"exposed_ns": chooser.randrange(10**9), "other_bytes": chooser.randrange(10**12)}
        writer.append([row_of(0, summary(step, rss_bytes=step << 20, **noise), 0)])
    closed = [p for p in seg_files(tmp_path).values() if p.suffix == ".parquet"]
    assert sum(path.stat().st_size for path in closed) <= limit
    whole, _ = load_all_rows(tmp_path)
    newest = whole.filter(whole["steps"] == 1)["step"]
    assert newest.max() == 16_384 and newest.len() >= 2 * 2048
    # times are means, bytes are maxima, and no step is missing
    old = whole.filter(whole["steps"] == 16)
    assert old.height and set(old["duration_us"].to_list()) == {100_000}
    for row in old.iter_rows(named=True):
        assert row["rss_bytes"] == (row["step"] + 15) << 20
    assert whole["steps"].sum() == 16_384
    tiny = tmp_path / "tiny"
    writer = Writer(tiny, segment_rows=64, limit_bytes=1)
    writer.append([row_of(0, summary(step), 0) for step in range(1, 65)])
    assert all(path.suffix == ".log" for path in seg_files(tiny).values())


def test_a_segment_that_cannot_be_read_is_named_and_the_others_are(tmp_path: Path) -> None:
    writer = Writer(tmp_path, segment_rows=20)
    for step in range(1, 31):
        writer.append(rows(1, first=step))
    first = next(iter(seg_files(tmp_path).values()))
    first.write_bytes(first.read_bytes()[:100])
    whole, broken = load_all_rows(tmp_path)
    assert broken == (first.name,)
    assert whole.height == 40
    Writer(tmp_path)  # and a writer goes on beside it


def test_a_full_disk_is_an_error_with_a_way_out_and_what_was_kept_stays(tmp_path: Path) -> None:
    writer = Writer(tmp_path)
    writer.append(rows(5, ranks=1))
    (log,) = seg_files(tmp_path).values()
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    room = log.stat().st_size + RECORD_SIZE // 2
    resource.setrlimit(resource.RLIMIT_FSIZE, (room, before[1]))
    try:
        with pytest.raises(HistoryError) as caught:
            writer.append(rows(50, ranks=1))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert "ZEROMON_STORE" in caught.value.hint
    assert keys(tmp_path) == [(0, n) for n in range(1, 6)]


def test_nothing_of_ours_is_read_from_other_files(tmp_path: Path) -> None:
    (tmp_path / "000001.log").write_bytes(b"not a log at all")
    (tmp_path / "notes.log").write_text("mine")
    assert load_all_rows(tmp_path)[0].height == 0
    assert ranges_of_steps(tmp_path) == []
    writer = Writer(tmp_path)
    writer.append(rows(1))
    assert (tmp_path / "notes.log").read_text() == "mine"
    assert len(keys(tmp_path)) == 2


def test_slices_are_of_as_many_steps_each(tmp_path: Path) -> None:
    writer = Writer(tmp_path)
    for step in range(1, 101):
        slow = step > 50
        one = summary(step, end_ns=(step + (3 if slow else 1)) * 100 * MS, idle=step % 8 == 0)
        writer.append([row_of(0, one, 0)])
    found = ranges_of_steps(tmp_path, 4)
    assert [(s.first_step, s.last_step) for s in found] == [(1, 25), (26, 50), (51, 75), (76, 100)]
    assert [s.step_seconds for s in found] == [0.1, 0.1, 0.3, 0.3]
    assert found[0].exposed_ratio == pytest.approx(0.1)
    assert found[3].exposed_ratio == pytest.approx(0.1 / 3)
    assert ranges_of_steps(tmp_path, 1000)[0].last_step == 1
