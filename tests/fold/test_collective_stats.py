"""Communication by unit: means a step, transfer, sizes, and what many small pieces cost."""

from __future__ import annotations

import pytest
from builders import MS, changed, collective, folded, rank, run, state, step
from hypothesis import given, strategies as st

from zeromon.diagnosis.engine import advise
from zeromon.fold.collective_stats import (
    TINY_BYTES,
    CollectiveStats,
    OpTotals,
    decay_weight,
    size_bucket_index,
    tiny_call_shares,
)
from zeromon.fold.fold import serial_transfer_spans
from zeromon.fold.summarize import summarize_rank
from zeromon.ring.codes import Flag, Op, Phase, Untimed
from zeromon.ring.events import BackwardComm, Bucket, Counted, Stall
from zeromon.snapshot.communication import SIZE_BOUNDS


def test_a_row_is_the_mean_of_a_step_and_the_most_exposed_comes_first() -> None:
    """Two units: one waits 10 ms of 40 in two calls a step, the other nothing of 5 ms."""
    made, number = state(), 0
    made.units[8] = "layers.1"
    for n in range(1, 31):
        at = n * 100.0
        for offset in (0, 50):
            number += 1
            folded(collective(at + offset, at + offset + 20, 5, sequence=number, unit=7), made)
        number += 1
        folded(collective(at + 25, at + 30, 0, sequence=number, unit=8), made)
        folded([step(n, at, at + 100)], made)
    # of a step that has not ended nothing counts yet
    folded(collective(3100, 3199, 99, sequence=999, unit=8), made)
    first, second = summarize_rank(made).communication.traffic
    assert (first.unit, first.op, first.phase, first.group) == (
        "layers.0",
        "all_gather",
        "forward",
        "world",
    )
    assert (first.calls, first.nbytes) == (pytest.approx(2), pytest.approx(2000))
    assert first.seconds == pytest.approx(0.040)
    assert first.exposed_seconds == pytest.approx(0.010)
    assert first.exposed_total_seconds == pytest.approx(0.300)
    assert first.algbw_bytes_per_second == pytest.approx(2000 / 0.040)
    assert first.busbw_bytes_per_second == pytest.approx(1000 / 0.040)
    assert (second.unit, second.exposed_seconds) == ("layers.1", 0)
    assert second.wait_seconds is None


def test_what_has_changed_shows_within_twenty_steps() -> None:
    """Exposed 10 ms per step for long, then 2 ms."""
    made = state()
    for n in range(1, 121):
        exposed = 10 if n <= 100 else 2
        folded(collective(n * 100, n * 100 + 20, exposed, sequence=n, unit=7), made)
        folded([step(n, n * 100, n * 100 + 100)], made)
    (row,) = summarize_rank(made).communication.traffic
    assert row.exposed_seconds == pytest.approx(0.002 + 0.008 * 0.9**20, rel=1e-3)


def test_what_is_called_once_breaks_no_later_step() -> None:
    """Its sums fade until they are denormal numbers, after 3,300 and after 7,000 steps."""
    made = state()
    folded(collective(100, 120, 5, op=Op.BROADCAST, nbytes=1_000_000, sequence=1), made)
    folded([step(1, 100, 200)], made)
    once = summarize_rank(made).communication.collectives[0].best_busbw_bytes_per_second
    for n in range(2, 8_000):
        folded(collective(n * 100, n * 100 + 20, 5, sequence=n, unit=7), made)
        folded([step(n, n * 100, n * 100 + 100)], made)
        if n % 40 == 0:
            rows = summarize_rank(made).communication.collectives
            best = next(row.best_busbw_bytes_per_second for row in rows if row.op == "broadcast")
            assert best == pytest.approx(once)
    folded(collective(800_000, 800_020, 5, op=Op.BROADCAST, sequence=8_000), made)
    folded([step(8_000, 800_000, 800_100)], made)
    assert {row.op for row in summarize_rank(made).communication.traffic} == {"broadcast", "all_gather"}


def test_idle_steps_do_not_dilute_the_mean() -> None:
    made = state()
    for n in range(1, 41):
        idle = n % 4 == 0
        if not idle:
            folded(collective(n * 100, n * 100 + 20, 10, sequence=n, unit=7), made)
        folded([step(n, n * 100, n * 100 + 100, Flag.IDLE if idle else 0)], made)
    (row,) = summarize_rank(made).communication.traffic
    assert row.exposed_seconds == pytest.approx(0.010)


def test_bandwidth_is_that_of_the_transfer_where_it_is_known() -> None:
    row = CollectiveStats(Op.ALL_REDUCE, 2, 0, OpTotals())
    now = row.at(0)
    now.known_bytes, now.known_ns, now.matched_ns, now.matched_bytes = 1000, 10 * MS, 2 * MS, 1000
    now.matches = 1
    assert row.busbw(row.before(1)) == pytest.approx(1000 / 0.002)
    row.at(5)
    assert row.best_busbw == pytest.approx(1000 / 0.002)


def test_a_span_that_is_only_a_bound_has_no_bandwidth() -> None:
    """The wait for other ranks, or for the host, would count as transfer."""
    made = state()
    issued, done = collective(0, 20, 5, sequence=1)
    bound = done._replace(flags=0)
    folded([issued, bound, step(1, 0, 100)], made)
    (row,) = summarize_rank(made).communication.traffic
    assert (row.busbw_bytes_per_second, row.algbw_bytes_per_second) == (None, None)
    assert row.seconds == pytest.approx(0.020)
    assert summarize_rank(made).communication.collectives[0].busbw_bytes_per_second is None


def test_what_is_matched_without_a_known_transfer_has_no_bandwidth() -> None:
    row = CollectiveStats(Op.ALL_REDUCE, 2, 0, OpTotals())
    now = row.at(0)
    now.known_bytes, now.known_ns = 1000, 10 * MS
    row.matched(0, 8 * MS, 2 * MS, 0)
    assert row.busbw(row.before(1)) == 0
    assert row.before(1).transfer_ns > 0 and row.before(1).wait_ns > 0


def test_a_bandwidth_of_long_ago_is_not_given_any_more() -> None:
    """One call with a known span, and then fifty of which only a bound is known."""
    made = state()
    folded([*collective(0, 20, 5, sequence=1), step(1, 0, 100)], made)
    (known,) = summarize_rank(made).communication.traffic
    assert (
        known.busbw_bytes_per_second
        and summarize_rank(made).communication.collectives[0].busbw_bytes_per_second
    )
    for n in range(2, 52):
        issued, done = collective(n * 100, n * 100 + 20, 5, sequence=n)
        folded([issued, done._replace(flags=0), step(n, n * 100, n * 100 + 100)], made)
    (row,) = summarize_rank(made).communication.traffic
    assert row.busbw_bytes_per_second is None and row.best_busbw_bytes_per_second > 0
    assert summarize_rank(made).communication.collectives[0].busbw_bytes_per_second is None


@pytest.mark.parametrize("late_by", [0, 1, 7])
def test_what_is_matched_later_counts_for_its_own_step(late_by: int) -> None:
    """As a collector does that reads many steps at once: the mean is that of a step all the same."""
    row, waiting = CollectiveStats(Op.ALL_REDUCE, 2, 0, OpTotals()), []
    for n in range(60):
        row.at(n).known_bytes += 1000
        waiting.append(n)
        if len(waiting) > late_by:
            for old in waiting:
                row.matched(old, 8 * MS, 2 * MS, 1000)
            waiting.clear()
    for old in waiting:
        row.matched(old, 8 * MS, 2 * MS, 1000)
    sums = row.before(60)
    assert sums.wait_ns / decay_weight(60) == pytest.approx(8 * MS)
    assert sums.transfer_ns / decay_weight(60) == pytest.approx(2 * MS)
    assert sums.matched_bytes == pytest.approx(sums.known_bytes)


def test_a_stall_belongs_to_the_group_of_its_unit() -> None:
    """Not to the first group that has such an operation."""
    made = state()
    made.groups[2] = {"label": "shard", "size": 2, "ranks": [0, 1]}
    first = collective(0, 1, 0, sequence=1, unit=3)
    second = [e._replace(group=2) for e in collective(1, 2, 0, sequence=1, unit=7)]
    folded(first + second + [Stall(5 * MS, Op.ALL_GATHER, Phase.FORWARD, 0, 7, 4 * MS)], made)
    folded([step(1, 0, 10)], made)
    rows = {row.group: row for row in summarize_rank(made).communication.traffic}
    assert rows["shard"].exposed_seconds == pytest.approx(0.004)
    assert rows["world"].exposed_seconds == 0
    by_group = {row.group: row for row in summarize_rank(made).communication.collectives}
    assert by_group["shard"].exposed_seconds == pytest.approx(0.004)


# ---- buckets --------------------------------------------------------------------------------------


def test_buckets_that_queue_share_one_rate() -> None:
    """Ready at 0, 10 and 20 ms, 10 MB each, the last ends at 60: each took 20 ms."""
    ready = [0, 10 * MS, 20 * MS]
    spans = serial_transfer_spans(ready, [10**7] * 3, 60 * MS)
    assert spans == [(0, 20 * MS), (20 * MS, 40 * MS), (40 * MS, 60 * MS)]


def test_a_queue_that_ran_empty_begins_anew() -> None:
    """The last bucket alone explains the end: 10 MB in 5 ms, and so did the others."""
    spans = serial_transfer_spans([0, 100 * MS], [10**7] * 2, 105 * MS)
    assert spans == [(0, 5 * MS), (100 * MS, 105 * MS)]


@given(
    st.lists(st.tuples(st.integers(0, 10**9), st.integers(1, 10**9)), min_size=1, max_size=12),
    st.floats(0.001, 100),
)
def test_a_serial_queue_is_found_again(parts: list[tuple[int, int]], rate: float) -> None:
    """Made forwards with a known rate; the spans come back."""
    ready = sorted(at for at, _ in parts)
    sizes = [size for _, size in parts]
    truth, free = [], float(ready[0])
    for at, size in zip(ready, sizes, strict=True):
        begin = max(free, at)
        free = begin + size / rate
        truth.append((begin, free))
    found = serial_transfer_spans(ready, sizes, round(free))
    if round(free) <= ready[-1]:
        assert found == []
        return
    for (begin, end), (true_begin, true_end) in zip(found, truth, strict=True):
        # the end is known to a nanosecond, so the rate is to as many parts of the last queue
        slack = 2 + 2 * (true_end - ready[0]) / max(1.0, free - ready[-1])
        assert begin == pytest.approx(true_begin, abs=slack)
        assert end == pytest.approx(true_end, abs=slack)


def test_buckets_without_an_end_after_them_say_nothing() -> None:
    assert serial_transfer_spans([], [], 5) == []
    assert serial_transfer_spans([0, 10], [1, 1], 10) == []
    assert serial_transfer_spans([0], [0], 10) == []


def test_ddp_names_the_bucket_that_is_exposed() -> None:
    """Compute ends at 30 ms, the last bucket's transfer at 60: it and half of the second are exposed."""
    made = state()
    made.units.update({1: "bucket 0", 2: "bucket 1", 3: "bucket 2"})
    marks = [Bucket(i * 10 * MS, 1, i + 1, 10**7, -(i + 1), i) for i in range(3)]
    folded([*marks, BackwardComm(60 * MS, 1, 0, 30 * MS, 3), step(1, 0, 100)], made)
    rows = summarize_rank(made).communication.traffic
    assert [(row.unit, round(row.exposed_seconds * 1e3)) for row in rows] == [
        ("bucket 2", 20),
        ("bucket 1", 10),
        ("bucket 0", 0),
    ]
    assert {row.phase for row in rows} == {"backward"}
    assert [one.sequence for one in made.arrivals] == [-1, -2, -3]
    assert made.buckets == []


# ---- sizes ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("nbytes", [0, 1, 1024, 1025, 4096, 4097, 1 << 30, (1 << 30) + 1, 1 << 40])
def test_a_size_lies_below_the_first_bound_that_holds_it(nbytes: int) -> None:
    wanted = next((i for i, bound in enumerate(SIZE_BOUNDS) if nbytes <= bound), len(SIZE_BOUNDS))
    assert size_bucket_index(nbytes) == wanted


def test_the_histogram_counts_every_call_and_no_barrier() -> None:
    made = state()
    folded(collective(0, 1, 0, nbytes=100), made)
    folded(collective(1, 2, 0, nbytes=5000, sequence=2), made)
    folded(collective(2, 3, 0, op=Op.BARRIER, nbytes=0, sequence=3), made)
    (row,) = summarize_rank(made).communication.sizes
    assert (row.op, row.nbytes, sum(row.calls)) == ("all_gather", 5100, 2)
    assert (row.calls[0], row.calls[2]) == (1, 1)


def many(pieces: int, nbytes: int, each_ms: float) -> list[str]:
    """The findings on 20 steps of 100 ms with one large collective and that many small ones."""
    made, number = state(), 0
    for n in range(1, 21):
        at = n * 100.0
        folded(collective(at, at + 2, 2, nbytes=1 << 20, sequence=(number := number + 1)), made)
        for piece in range(pieces):
            begin = at + 5 + piece * each_ms
            events = collective(begin, begin + each_ms, each_ms, nbytes=nbytes, unit=7)
            number += 1
            folded([e._replace(sequence=number) for e in events], made)
        folded([step(n, at, at + 100)], made)
    told = advise(run(summarize_rank(made)))
    return [f.text for f in told if f.rule == "tiny_collectives"]


def test_many_small_collectives_are_a_finding() -> None:
    (text,) = many(40, 1000, 0.5)
    assert text.startswith("40 collectives per step (97.6 %) move 64.0 KiB or less; 3.7 % of the bytes")


def test_a_few_small_ones_or_large_ones_are_none() -> None:
    assert many(5, 1000, 2) == []
    assert many(40, TINY_BYTES + 1, 0.5) == []
    assert many(40, 1000, 0.02) == []
    assert tiny_call_shares([]) == (0.0, 0.0, 0.0, 0.0)


def test_the_finding_on_exposed_communication_names_unit_and_waits() -> None:
    snapshot = rank(0)
    snapshot = changed(snapshot, exposed_ratio=0.4, exposed_seconds=0.01, wait_seconds=0.009)
    (told,) = [f for f in advise(run(snapshot)) if f.rule == "exposed_communication"]
    assert "most in layers.0 (all_gather, forward), 10.0 ms" in told.text
    assert "9.0 ms per step waits for late ranks" in told.text


def test_of_steps_with_idle_hooks_the_sizes_are_not_known() -> None:
    """Their sum is no size; what C++ issues is taken by its mean."""
    made = state()
    folded([Counted(1, Op.ALL_GATHER, Phase.FORWARD, 1, 10, 5000, Untimed.CONTROL_STEP)], made)
    assert summarize_rank(made).communication.sizes == ()
    folded([Counted(2, Op.ALL_REDUCE, Phase.BACKWARD, 1, 10, 50_000, Untimed.IN_CPP)], made)
    (row,) = summarize_rank(made).communication.sizes
    assert (row.op, row.calls[2], sum(row.calls)) == ("all_reduce", 10, 10)
