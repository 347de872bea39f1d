"""Idle time by cause, and queues: held against a count tick by tick, and against what HTA prints."""

from __future__ import annotations

import json
import os
import random
from pathlib import Path
from typing import Any

import pytest
from kineto_traces import NCCL, analyzed, event, launched_by, real, write

from zeromon.cli import main
from zeromon.cli.terminal import style_output
from zeromon.export.files import Progress

HTA = {
    "two_rank_ddp_rank1.json.gz": {
        7: (876_151, 21_032, 192_512), 14: (1_145_111, 9_343, 7_320),
    },
    "eight_rank_dlrm_rank3.json.gz": {
        7: (133_311, 17_152, 32_751), 20: (424_456, 739, 9_684), 21: (285_806, 78, 0),
        22: (340_772, 1_515, 0),
    },
}  # fmt: skip
"""Stream -> microseconds of host wait, kernel wait and other, by HTA 0.5.0."""

HTA_QUEUES = {
    "two_rank_ddp_rank1.json.gz": {7: (7.58677, 77, 0.460892), 14: (1.12543, 22, 0.807516)},
    "eight_rank_dlrm_rank3.json.gz": {
        7: (40.25088, 288, 0.271316), 20: (0.959042, 10, 0.819392), 21: (0.279796, 2, 0.804346),
        22: (2.521475, 22, 0.868929),
    },
}  # fmt: skip
"""Stream -> mean over time, largest, share of time with none, of HTA 0.5.0's series."""


@pytest.mark.parametrize("name", HTA)
def test_the_causes_and_queues_of_real_traces_are_those_of_hta(name: str) -> None:
    rank = analyzed(real(name))
    for one in rank.streams:
        idle = one.idle
        found = (idle.host, idle.kernels, idle.communication + idle.streams + idle.other)
        assert tuple(round(s * 1e6) for s in found) == HTA[name][one.stream]
        mean, most, empty = HTA_QUEUES[name][one.stream]
        assert one.queue_mean == pytest.approx(mean, rel=1e-5)
        assert (one.queue_most, one.queue_empty_ratio) == (most, pytest.approx(empty, rel=1e-5))
    assert len(rank.streams) == len(HTA[name])
    assert rank.idle is not None and rank.idle.seconds == pytest.approx(rank.idle_seconds)


def program(seed: int) -> list[tuple[int, int, int, int]]:
    """(stream, launch, start, end) of events on two streams, in microseconds; some wait, some do not."""
    chooser, found, free, at = random.Random(seed), [], {7: 0, 8: 0}, 0
    for _ in range(60):
        stream = chooser.choice((7, 8))
        at += chooser.choice((1, 3, 10, 80))
        held = chooser.choice((0, 0, 0, 50))
        start = max(at + 2, free[stream] + chooser.choice((0, 1, 2)) + held)
        free[stream] = start + chooser.randrange(1, 60)
        found.append((stream, at, start, free[stream]))
    return found


def by_ticks(made: list[tuple[int, int, int, int]]) -> dict[str, int]:
    """Microseconds without any event by cause: one microsecond after another."""
    begin, end = min(m[2] for m in made), max(m[3] for m in made)
    found = {"host": 0, "kernels": 0, "other": 0}
    busy = [any(m[2] <= tick < m[3] for m in made) for tick in range(begin, end)]
    for tick in range(begin, end):
        if busy[tick - begin]:
            continue
        gap_begin = max(m[3] for m in made if m[3] <= tick)
        following = min((m for m in made if m[2] > tick), key=lambda m: m[2])
        if following[1] > gap_begin:
            found["host"] += 1
        else:
            found["kernels" if following[2] - gap_begin < 30 else "other"] += 1
    return found


def waiting_by_ticks(made: list[tuple[int, int, int, int]], stream: int) -> tuple[float, int, float]:
    own = [m for m in made if m[0] == stream]
    ticks = range(min(m[1] for m in own), max(m[2] for m in own))
    lengths = [sum(m[1] <= tick < m[2] for m in own) for tick in ticks]
    return sum(lengths) / len(ticks), max(lengths), lengths.count(0) / len(ticks)


@pytest.mark.parametrize("seed", range(8))
def test_the_causes_and_queues_are_those_of_a_count_by_ticks(tmp_path: Path, seed: int) -> None:
    made = program(seed)
    events: list[dict[str, Any]] = []
    for number, (stream, at, start, end) in enumerate(made):
        events += launched_by(at, event("gemm", start, end - start, stream, correlation=number))
    rank = analyzed(write(tmp_path, events))
    assert rank.idle is not None
    for name, ticks in by_ticks(made).items():
        assert round(getattr(rank.idle, name) * 1e6) == ticks, name
    assert rank.idle.seconds == pytest.approx(rank.idle_seconds)
    for one in rank.streams:
        mean, most, empty = waiting_by_ticks(made, one.stream)
        assert (one.queue_mean, one.queue_most) == (pytest.approx(mean), most)
        assert one.queue_empty_ratio == pytest.approx(empty)


def test_what_released_a_kernel_is_what_ended_last_on_another_stream(tmp_path: Path) -> None:
    """Its stream has nothing for 90 us, then for 50 us, then for 40 us; all were launched before."""
    events = [
        *launched_by(0, event("a", 10, 10, 7, correlation=1)),
        *launched_by(1, event(NCCL, 15, 90, 9, correlation=2)),
        *launched_by(2, event("b", 110, 10, 7, correlation=3)),
        *launched_by(3, event("c", 118, 50, 8, correlation=4)),
        *launched_by(4, event("d", 170, 10, 7, correlation=5)),
        *launched_by(5, event("e", 220, 10, 7, correlation=6)),
        event("f", 240, 10, 7, correlation=99),
    ]
    main_stream = analyzed(write(tmp_path, events)).streams[0]
    idle = main_stream.idle
    causes = (idle.communication, idle.streams, idle.other, idle.unknown, idle.host, idle.kernels)
    assert [round(s * 1e6) for s in causes] == [90, 50, 40, 10, 0, 0]


def test_without_launches_nothing_is_said(tmp_path: Path) -> None:
    rank = analyzed(write(tmp_path, [event("a", 0, 5), event("b", 50, 5)]))
    assert (rank.idle, rank.streams) == (None, ())


def fits(text: str) -> bool:
    """Whether *text* has no line that a terminal of 80 columns breaks in two."""
    return all(len(line) <= 80 for line in style_output(text, 80, coloured=False).split("\n"))


# ---- all ranks of a job ---------------------------------------------------------------------------


def job(folder: Path, late: int, ranks: int = 4) -> None:
    """A folder with a file a rank; *late* computes 3 ms longer before each of ten all-reduces."""
    folder.mkdir()
    for rank in range(ranks):
        events = []
        for step in range(10):
            at, compute = 20_000 * step, 13_000 if rank == late else 10_000
            events += [
                *launched_by(at, event("gemm", at + 5, compute, 7, correlation=2 * step)),
                *launched_by(
                    at + 1, event(NCCL, at + 5 + compute, 16_000 - compute, 9, correlation=2 * step + 1)
                ),
            ]
        write(folder, events, f"rank{rank}.json.gz")
    (folder / "analysis.json").write_text("{}")


def test_all_ranks_of_a_folder_and_whom_they_wait_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job(tmp_path / "traces", late=2)
    assert main(["trace", "analyze", str(tmp_path / "traces")]) == 0
    text = capsys.readouterr().out
    assert "rank 2 comes last: it waits 0 us, the others 30.0 ms; it computes 30.0 ms longer" in text
    assert fits(text)
    assert main(["trace", "analyze", str(tmp_path / "traces"), "--json"]) == 0
    ranks = json.loads(capsys.readouterr().out)["ranks"]
    waited = [round(r["wait_seconds"] * 1e6) for r in ranks]
    assert (len(ranks), waited) == (4, [30_000, 30_000, 0, 30_000])


def test_many_ranks_have_the_rows_that_differ(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job(tmp_path / "traces", late=11, ranks=13)
    assert main(["trace", "analyze", str(tmp_path / "traces"), "--idle", "--rank", "12"]) == 0
    text = capsys.readouterr().out
    assert "\n  11  " in text and "and 3 ranks nearer to the median" in text
    assert "Idle streams of rank 12" in text and "Kernels of" not in text
    assert main(["trace", "analyze", str(tmp_path / "traces"), "--rank", "13"]) == 2
    said = capsys.readouterr().err
    assert (
        "no file is of rank 13\n  The files are of 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12.\n" in said
    )
    for action in ("analyze", "memory", "flight"):
        assert main(["trace", action, str(tmp_path / "none.json")]) == 2
        assert "zeromon trace --help" in capsys.readouterr().err
        assert main(["trace", action, "a" * 300]) == 2
        assert "File name too long" in capsys.readouterr().err
    (tmp_path / "empty").mkdir()
    os.mkfifo(tmp_path / "empty" / "nobody_writes.json")
    os.mkfifo(tmp_path / "empty" / "nobody_writes_0")
    assert main(["trace", "flight", str(tmp_path / "empty")]) == 2
    assert "holds no dumps" in capsys.readouterr().err
    assert main(["trace", "analyze", str(tmp_path / "empty")]) == 2
    assert "has no trace" in capsys.readouterr().err


@pytest.mark.parametrize("name", HTA)
@pytest.mark.parametrize("section", ["", "--idle", "--kernels"])
def test_the_output_fits_a_terminal(name: str, section: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["trace", "analyze", str(real(name)), *section.split()]) == 0
    text = capsys.readouterr().out
    assert fits(text)
    assert text.count("\n") <= 23 or section == "--kernels"


def test_a_file_that_takes_a_second_has_a_bar(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Read a second time, it begins anew."""
    clock = iter([0.0, 0.9, 1.1, 1.1, 1.4, 1.4])
    monkeypatch.setattr("zeromon.export.files.time.monotonic", lambda: next(clock))
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    progress = Progress(100, "KiB", patience=1.0)
    for amount in (50, 50, -101):
        progress.add(amount)
    progress.end()
    lines = capsys.readouterr().err.replace("\x1b[K", "").split("\r")
    assert lines[1:] == [
        "zeromon: [####################] 100 of 100 KiB",
        "zeromon: [                    ] 0 of 100 KiB", "",
    ]  # fmt: skip
