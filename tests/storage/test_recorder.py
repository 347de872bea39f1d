"""What is kept of a run's past: snapshots, findings, and a playhead on them."""

from __future__ import annotations

import os
import random
import resource
import shutil
import signal
import stat
import time
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
from builders import MS, device_memory, rank, run, summary
from hypothesis import given, strategies as st
from recordings import RINGS
from served import get

from zeromon.base.errors import HistoryError, RunNotFound, SourceError
from zeromon.collector.http import start_http_server
from zeromon.snapshot import Finding, RunSnapshot, Severity
from zeromon.snapshot.step import RECENT_STEPS
from zeromon.sources.live import LiveSource
from zeromon.sources.replay import ReplaySource, StoreSource
from zeromon.storage import snapshot_log
from zeromon.storage.run_store import StepQuery, Store
from zeromon.storage.snapshot_log import (
    MAGIC,
    Past,
    Record,
    findings_of_record,
    index_segment,
    segment_paths,
    snapshot_at_time,
    span_of_log,
    standing_findings,
    without_recent_steps,
)
from zeromon.storage.step_history.queries import series_of_steps
from zeromon.storage.step_history.rows import row_of, step_of
from zeromon.storage.step_history.writer import Writer

DAY = 1_700_000_000.0


def snapshot(second: float, **facts: object) -> RunSnapshot:
    """A run at DAY + *second*; its step number says which moment it is of."""
    made = rank(0, last_step=round(second))
    return run(made, taken_wall=DAY + second, taken_ns=round(second * 1e9), **facts)


def kept(folder: Path) -> list[float]:
    return [round(moment.wall - DAY, 3) for moment in snapshot_log.logged_snapshots(folder)]


# ---- moments --------------------------------------------------------------------------------------


def test_a_moment_is_the_picture_without_its_steps(tmp_path: Path) -> None:
    writer = snapshot_log.Writer(tmp_path)
    for second in (1, 2, 5):
        writer.append(snapshot(second))
    assert snapshot_at_time(tmp_path, DAY + 2) == without_recent_steps(snapshot(2))
    assert span_of_log(tmp_path) == (DAY + 1, DAY + 5)
    assert all(stat.S_IMODE(path.stat().st_mode) == 0o600 for path in segment_paths(tmp_path))


@pytest.mark.parametrize(
    ("asked", "step"), [(0, 1), (1, 1), (1.9, 1), (2, 2), (4.99, 2), (5, 5), (1e9, 5)]
)
def test_the_picture_of_a_moment_is_the_last_one_before_it(
    tmp_path: Path, asked: float, step: int
) -> None:
    """Before the first there is only the first."""
    writer = snapshot_log.Writer(tmp_path, segment_moments=2)
    for second in (1, 2, 5):
        writer.append(snapshot(second))
    found = snapshot_at_time(tmp_path, DAY + asked)
    assert found is not None and found.ranks[0].steps.last_step == step


def test_without_a_moment_there_is_none(tmp_path: Path) -> None:
    assert (span_of_log(tmp_path), snapshot_at_time(tmp_path, DAY)) == (None, None)
    assert (span_of_log(tmp_path / "none"), snapshot_at_time(tmp_path / "none", DAY)) == (None, None)


def test_a_clock_that_is_set_back_keeps_the_order(tmp_path: Path) -> None:
    writer = snapshot_log.Writer(tmp_path)
    for second in (10, 4, 11):
        writer.append(snapshot(second))
    assert kept(tmp_path) == [10, 10.001, 11]


@pytest.mark.parametrize("cut", [1, 10, 40])
def test_a_torn_end_is_cut_off_and_written_on(tmp_path: Path, cut: int) -> None:
    writer = snapshot_log.Writer(tmp_path)
    for second in (1, 2, 3):
        writer.append(snapshot(second))
    (path,) = segment_paths(tmp_path)
    os.truncate(path, path.stat().st_size - cut)
    assert kept(tmp_path) == [1, 2]
    snapshot_log.Writer(tmp_path).append(snapshot(4))
    assert kept(tmp_path) == [1, 2, 4]
    assert snapshot_at_time(tmp_path, DAY + 9) == without_recent_steps(snapshot(4))


def test_a_picture_that_was_changed_is_passed_over(tmp_path: Path) -> None:
    writer = snapshot_log.Writer(tmp_path)
    for second in (1, 2, 3):
        writer.append(snapshot(second))
    last = list(snapshot_log.logged_snapshots(tmp_path))[-1]
    content = bytearray(last.path.read_bytes())
    content[last.offset + 30] ^= 1
    last.path.write_bytes(content)
    found = snapshot_at_time(tmp_path, DAY + 3)
    assert found is not None and found.ranks[0].steps.last_step == 2


@given(st.binary(max_size=200))
def test_no_bytes_are_read_as_a_moment_that_was_not_written(content: bytes) -> None:
    import tempfile

    with tempfile.TemporaryDirectory() as name:
        path = Path(name) / "0000001-0000001.moments"
        path.write_bytes(MAGIC + content)
        assert all(snapshot_log.read_logged(moment) is None for moment in index_segment(path))
        path.write_bytes(content)
        assert list(index_segment(path)) == []


def test_above_its_limit_old_moments_stand_further_apart(tmp_path: Path) -> None:
    writer = snapshot_log.Writer(tmp_path, segment_moments=8, limit_bytes=120_000)
    for second in range(1, 401):
        writer.append(snapshot(second))
    walls = kept(tmp_path)
    gaps = [b - a for a, b in pairwise(walls)]
    assert walls[0] < 16 and walls[-1] == 400
    assert gaps[-8:] == [1] * 8
    assert sorted(gaps, reverse=True)[:5] == gaps[:5] or gaps[0] >= 4 * gaps[-1]
    assert max(gaps) <= 64
    size = sum(path.stat().st_size for path in segment_paths(tmp_path))
    assert size <= 120_000 + 8 * 6_000  # and the segment that is open
    again = snapshot_log.Writer(tmp_path, segment_moments=8, limit_bytes=120_000)
    again.append(snapshot(401))
    assert kept(tmp_path) == [*walls, 401]


def test_a_crash_while_thinning_shows_no_moment_twice_for_long(tmp_path: Path) -> None:
    writer = snapshot_log.Writer(tmp_path, segment_moments=4)
    for second in range(1, 15):
        writer.append(snapshot(second))
    pair = segment_paths(tmp_path)[:2]
    before = [path.read_bytes() for path in pair]
    snapshot_log._join_two_segments(*pair)
    for path, content in zip(pair, before, strict=True):
        path.write_bytes(content)  # as if it had been killed before it removed them
    assert kept(tmp_path) == [1, 3, 5, 7, *range(9, 15)]
    (tmp_path / ".0000009-0000010.moments.77").write_bytes(b"half of it")
    (tmp_path / "mine.txt").write_text("stays")
    snapshot_log.Writer(tmp_path)
    assert not any(path.exists() for path in pair) and not list(tmp_path.glob(".*"))
    assert (tmp_path / "mine.txt").exists()


def test_a_full_disk_is_an_error_with_a_way_out(tmp_path: Path) -> None:
    writer = snapshot_log.Writer(tmp_path)
    writer.append(snapshot(1))
    (path,) = segment_paths(tmp_path)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + 50, before[1]))
    try:
        with pytest.raises(HistoryError) as caught:
            writer.append(snapshot(2))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert "ZEROMON_STORE" in caught.value.hint
    assert kept(tmp_path) == [1]


def test_a_segment_that_cannot_begin_costs_no_other_file_its_descriptor(tmp_path: Path) -> None:
    writer = snapshot_log.Writer(tmp_path, segment_moments=1)
    (tmp_path / "0000002-0000002.moments").mkdir()
    with pytest.raises(HistoryError):
        writer.append(snapshot(1))
    with (tmp_path / "mine.txt").open("w") as mine:  # gets the number of the closed segment
        writer.close()
        mine.write("dear")
    assert (tmp_path / "mine.txt").read_text() == "dear"


def write_until_killed(folder: Path, said: int) -> None:
    """Keeps one moment after the other, and says so of each."""
    writer = snapshot_log.Writer(folder, segment_moments=6, limit_bytes=60_000)
    last = snapshot_log.newest_snapshot(folder)
    second = round(last.wall - DAY) + 1 if last else 1
    one = snapshot(second)
    while True:
        writer.append(replace(one, taken_wall=DAY + second))
        os.write(said, f"{second}\n".encode())
        second += 1


def test_killed_at_fifty_moments_the_newest_are_all_there(tmp_path: Path) -> None:
    """Also in the middle of thinning: every segment is readable, and nothing goes backwards."""
    chooser, last, folder = random.Random(5), 0, tmp_path / "moments"
    for _ in range(50):
        heard, said = os.pipe()
        child = os.fork()
        if not child:
            try:
                write_until_killed(folder, said)
            finally:
                os._exit(1)
        os.close(said)
        time.sleep(chooser.uniform(0.005, 0.04))
        os.kill(child, signal.SIGKILL)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
        with open(heard) as lines:
            last = max([last, *(int(line) for line in lines.read().split())])
        walls = kept(folder)
        assert walls == sorted(set(walls))
        assert set(range(max(1, last - 5), last + 1)) <= {round(wall) for wall in walls}
    assert last > 50
    assert all(
        snapshot_log.read_logged(moment) is not None for moment in snapshot_log.logged_snapshots(folder)
    )


# ---- the record -----------------------------------------------------------------------------------


def finding(rule: str, rank: int = -1, came: float = DAY + 1) -> Finding:
    return Finding(
        rule=rule, severity=Severity.WARNING, text=f"{rule} <b>\n", rank=rank, code="ZM1", came=came
    )


def test_a_record_says_when_findings_came_and_went(tmp_path: Path) -> None:
    record = Record(tmp_path)
    a, b, anew = finding("a"), finding("b", came=DAY + 2), finding("a", came=DAY + 4)
    for second, shown in enumerate([(), (a,), (a, b), (b,), (b, anew), (anew, b)]):
        record.see(snapshot(second, findings=shown))
    again = Record(tmp_path)  # a collector that was started anew does not write them twice
    again.see(snapshot(9, findings=(anew, b)))
    again.see(snapshot(10, findings=(replace(anew, gone=DAY + 10),), ended=True))
    known = [(one.rule, one.came - DAY, (one.gone or DAY) - DAY) for one in findings_of_record(tmp_path)]
    assert known == [("a", 1, 3), ("b", 2, 10), ("a", 4, 10)]
    assert standing_findings(tmp_path) == []
    assert findings_of_record(tmp_path)[0].text == "a <b>\n"


def test_broken_lines_of_findings_are_passed_over(tmp_path: Path) -> None:
    record = Record(tmp_path)
    record.see(snapshot(1, findings=(finding("a"),)))
    path = tmp_path / "findings.jsonl"
    lines = ["{", "[]", "{}", '{"rule": 1, "rank": "x", "wall": 2}', '{"rule":"b","rank":0,"wall":1']
    path.write_bytes(path.read_bytes() + b"\xff\n" + "\n".join(lines).encode())
    assert [known.rule for known in findings_of_record(tmp_path)] == ["a"]


def test_pictures_are_kept_the_more_seldom_the_more_ranks_there_are(tmp_path: Path) -> None:
    for count, expected in ((1, 20), (64, 10)):
        folder = tmp_path / str(count)
        record = Record(folder)
        ranks = [rank(n) for n in range(count)]
        for second in range(20):
            record.see(run(*ranks, taken_wall=DAY + second))
        assert len(Past(folder).snapshot_times()) == expected


def test_a_picture_of_the_past_has_the_steps_that_came_before_it(tmp_path: Path) -> None:
    record = Record(tmp_path)
    shift = round(DAY * 1e9)
    for step in range(1, 401):
        record.keep([row_of(0, summary(step), shift)])
    then = replace(snapshot(30.05), ranks=(rank(0), rank(1)))
    record.see(then)
    found = Past(tmp_path).at(DAY + 30.05)
    steps = found.ranks[0].steps.recent
    assert [step.step for step in steps] == list(range(1, 301))
    expected = summary(300)
    assert abs(steps[-1].start_ns - expected.start_ns) < 1000
    assert replace(steps[-1], start_ns=0, end_ns=0) == replace(expected, start_ns=0, end_ns=0)
    assert found.ranks[1].steps.recent == ()
    with pytest.raises(RunNotFound):
        Past(tmp_path / "none").at(DAY)


def test_when_the_disk_refuses_the_record_stops_and_says_why(tmp_path: Path) -> None:
    (tmp_path / "moments").write_text("in the way")
    record = Record(tmp_path)
    assert "moments" in record.note
    record.keep([row_of(0, summary(1), 0)])
    record.see(snapshot(1, findings=(finding("a"),)))
    assert Past(tmp_path).snapshot_times() == []


def test_a_row_and_its_step_are_the_same_to_the_microsecond() -> None:
    one = summary(7, idle=True, skipped=True, other_bytes=9, offload_blocked_ns=3 * MS)
    back = step_of(row_of(3, one, 5_000), 5_000)
    assert back == one


# ---- series ---------------------------------------------------------------------------------------


def filled(folder: Path, steps: int, segment_rows: int = 500) -> None:
    writer = Writer(folder, segment_rows=segment_rows)
    chooser = random.Random(2)
    for step in range(1, steps + 1):
        spike = 5 if step == steps // 3 else 1
        duration = round(100 * MS * chooser.uniform(0.9, 1.0) * spike)
        one = summary(step, end_ns=step * 100 * MS + duration, rss_bytes=(step % 97) << 20)
        writer.append([row_of(n, one, 0) for n in range(2)])


def test_of_a_long_history_the_rows_that_stand_out_are_shown(tmp_path: Path) -> None:
    filled(tmp_path, 5000)
    shown, whole = (
        series_of_steps(tmp_path, StepQuery(most=200)),
        series_of_steps(tmp_path, StepQuery(most=10**6)),
    )
    assert len(whole["step"]) == 10_000
    for number in (0, 1):
        mine = [n for n, owner in enumerate(shown["rank"]) if owner == number]
        assert 50 <= len(mine) <= 2 * 200
        starts = [shown["start_us"][n] for n in mine]
        assert starts == sorted(starts)
    rows = set(zip(*whole.values(), strict=True))
    assert set(zip(*shown.values(), strict=True)) <= rows  # real rows, none twice
    assert len(set(zip(*shown.values(), strict=True))) == len(shown["step"])
    for column in ("duration_us", "rss_bytes"):
        assert max(shown[column]) == max(whole[column])
    assert 5000 // 3 in shown["step"]


def test_a_stretch_and_some_ranks_can_be_asked_for(tmp_path: Path) -> None:
    filled(tmp_path, 300)
    found = series_of_steps(
        tmp_path, StepQuery(since_us=10 * 100_000, until_us=20 * 100_000, ranks=(1,))
    )
    assert (found["step"], set(found["rank"])) == (list(range(10, 20)), {1})
    found = series_of_steps(tmp_path, StepQuery(ranks=(1,), steps=(40, 52)))
    assert found["step"] == list(range(40, 53))
    assert series_of_steps(tmp_path / "none")["step"] == []
    assert series_of_steps(tmp_path, StepQuery(since_us=1 << 60))["step"] == []


def test_a_broken_segment_leaves_the_others(tmp_path: Path) -> None:
    filled(tmp_path, 1000)
    first = sorted(tmp_path.glob("*.parquet"))[0]
    first.write_bytes(first.read_bytes()[: first.stat().st_size // 2])
    found = series_of_steps(tmp_path, StepQuery(most=10**6))
    assert found["step"][0] == 251 and len(found["step"]) == 1500


# ---- sources --------------------------------------------------------------------------------------


@pytest.fixture
def store(tmp_path: Path) -> Store:
    """A run of twenty seconds that ended."""
    made = Store(tmp_path)
    record = Record(made.folder("train-1"))
    for second in range(1, 21):
        record.keep([row_of(0, summary(second * 10), round(DAY * 1e9))])
        seen = snapshot(second, findings=(finding("a"),) if second > 9 else ())
        record.see(replace(seen, ended=second == 20))
    made.save(replace(snapshot(20, ended=True), ranks=(rank(0, memory_device=device_memory()),)))
    return made


class Served:
    """A collector's view of that run."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.view = (store.load("train-1"),)

    def was_read(self) -> None:
        pass

    def past(self, name: str) -> Past:
        return Past(self.store.folder(name))


def test_a_live_source_and_a_recorded_one_tell_the_same_past(store: Store) -> None:
    server = start_http_server(Served(store), "127.0.0.1", 0)  # type: ignore[arg-type]
    live = LiveSource(f"127.0.0.1:{server.server_port}", "train-1")
    recorded = StoreSource("train", store)
    try:
        assert recorded.run == "train-1"
        assert live.span() == recorded.span() == (DAY + 1, DAY + 20)
        assert live.latest() == recorded.latest()
        assert live.at(DAY + 7) == recorded.at(DAY + 7)
        assert live.at(DAY + 7).ranks[0].steps.last_step == 7
        assert live.findings() == recorded.findings() != []
        query = StepQuery(since_us=round(DAY * 1e6) + 3_000_000, ranks=(0,), most=5)
        assert live.series(query) == recorded.series(query)
        assert live.series(StepQuery(steps=(50, 70)))["step"] == [50, 60, 70]
        assert live.series()["step"] == [10 * n for n in range(1, 21)]
        for ring in (RINGS / "straggler-data").glob("rank*.ring.gz"):
            shutil.copy(ring, store.folder("train-1"))
        assert live.lanes(2) == recorded.lanes(2)
        assert {step.step for step in live.lanes(2).steps} == {59, 60}
        assert {span.rank for span in live.lanes(1, [1]).spans} == {1}
        with pytest.raises(RunNotFound):
            LiveSource(live.address, "other").span()
    finally:
        server.shutdown()
        server.server_close()
    with pytest.raises(SourceError):
        live.span()


def test_a_live_source_asks_for_the_steps_that_it_does_not_know(store: Store) -> None:
    """What it shows is the whole snapshot all the same, also when the last step changed once more."""
    served = Served(store)
    server = start_http_server(served, "127.0.0.1", 0)  # type: ignore[arg-type]
    live = LiveSource(f"127.0.0.1:{server.server_port}", "train-1")
    steps = [summary(n) for n in range(1, 1500)]
    try:
        for end in (1, 2, 2, 10, 350, 1499):
            told = [*steps[: end - 1], replace(steps[end - 1], exposed_ns=end)]
            recent = tuple(told[-RECENT_STEPS:])
            ranks = (
                rank(0, recent=recent),
                rank(1, recent=tuple(told[-RECENT_STEPS - 1 : -1])),
                rank(2, recent=()),
            )
            served.view = (replace(snapshot(end), ranks=ranks),)
            steps[end - 1] = told[-1]
            assert live.latest() == served.view[0]
    finally:
        server.shutdown()
        server.server_close()


@pytest.mark.parametrize(
    ("path", "status"),
    [
        ("/api/runs/train-1/at?wall=x", 400),
        ("/api/runs/train-1/at", 400),
        ("/api/runs/train-1/series?since_us=x", 400),
        ("/api/runs/train-1/series?most=99999999999999999999", 200),
        ("/api/runs/train-1/series?since_us=99999999999999999999", 200),
        ("/api/runs/train-1/other", 404),
        ("/api/runs/..%2f..%2fetc/span", 404),
    ],
)
def test_wrong_questions_about_the_past_get_an_answer(store: Store, path: str, status: int) -> None:
    server = start_http_server(Served(store), "127.0.0.1", 0)  # type: ignore[arg-type]
    assert get(server.server_port, path)[0] == status
    server.shutdown()


def test_the_store_lists_its_runs_without_reading_their_pictures(store: Store) -> None:
    snapshot = store.folder("train-1") / "snapshot.json"
    (only,) = store.list_manifests()
    assert (only.run, only.strategy, only.steps, only.ended) == ("train-1", "fsdp2", 20, True)
    assert (only.memory_bytes, only.exposed_ratio) == (40 << 30, pytest.approx(0.1))
    assert only.verdict == (
        "finished after 20 steps; no problem found; exposed communication 10.0 % of a step"
    )
    content = snapshot.read_bytes()
    snapshot.write_text("not read")
    assert store.list_manifests() == [only]
    snapshot.write_bytes(content)
    (store.folder("train-1") / "manifest.json").write_text("{")  # or of an older version
    assert store.list_manifests() == [only]


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_a_run_is_played_at_a_speed_stopped_and_sought(store: Store) -> None:
    clock = Clock()
    source = ReplaySource("train-1", store, speed=2.0, clock=clock)
    assert source.latest().ranks[0].steps.last_step == 1
    clock.now += 3.2
    assert source.latest().ranks[0].steps.last_step == 7 and source.latest() is source.latest()
    source.playback.pause()
    clock.now += 100
    assert source.latest().ranks[0].steps.last_step == 7
    source.playback.play(1.0)
    clock.now += 2.0
    assert source.latest().ranks[0].steps.last_step == 9
    source.playback.seek(DAY + 15.5)
    assert source.latest().ranks[0].steps.last_step == 15 and not source.latest().ended
    source.playback.seek(DAY - 100)
    assert source.playback.position == DAY + 1
    clock.now += 1000
    assert source.playback.position == DAY + 20
    assert source.latest() == store.load("train-1")  # at the end: how it ended


def test_a_run_without_moments_cannot_be_played(tmp_path: Path) -> None:
    store = Store(tmp_path)
    store.save(snapshot(1))
    with pytest.raises(RunNotFound) as caught:
        ReplaySource("train-1", store)
    assert "zeromon report" in caught.value.hint
