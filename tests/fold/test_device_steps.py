"""Steps and phases of a device, whose records come after those of the host that enqueues them."""

from __future__ import annotations

import pytest
from builders import MS, folded, run, span, step

from zeromon.diagnosis.arrivals import ArrivalSkew
from zeromon.diagnosis.engine import advise
from zeromon.fold.state import RankState
from zeromon.fold.summarize import summarize_rank
from zeromon.readout.breakdown import pace, pace_text
from zeromon.readout.tables import TRAFFIC_COLUMNS, pick_columns
from zeromon.ring.codes import ExitKind, Flag, Op, Phase, Untimed
from zeromon.ring.events import Counted, Done, Event, Exit, Issued, PhaseSpan, Stall, Start, StepMark


def on_device(event: PhaseSpan | StepMark) -> Event:
    return event._replace(flags=event.flags | Flag.DEVICE)


def phase(name: Phase, start_ms: float, end_ms: float) -> Event:
    return on_device(span(name, start_ms, end_ms))


def gather(start_ms: int, end_ms: int, blocked_ms: int, sequence: int) -> tuple[Event, Event]:
    """A collective: the host issues it at once, the device runs it later."""
    issued = Issued(MS, Op.ALL_GATHER, Phase.FORWARD, 0, 1, 0, 1000, sequence, 1)
    done = Done(
        end_ms * MS, Op.ALL_GATHER, Phase.FORWARD, Flag.DEVICE | Flag.SPAN_KNOWN, 1, 0, 1000,
        start_ms * MS, blocked_ms * MS, sequence,
    )  # fmt: skip
    return issued, done


ANNOUNCED = phase(Phase.OTHER, 0, 0)
"""What the agent writes when it records the first border."""


def enqueued() -> list[Event]:
    """The host enqueues two steps of the device within 8 ms."""
    first, second = gather(10, 30, 5, 1)[0], gather(110, 130, 5, 2)[0]
    return [
        ANNOUNCED, span(Phase.FORWARD, 1, 2), first, step(1, 0, 4),
        span(Phase.FORWARD, 4, 5), second, step(2, 4, 8),
    ]  # fmt: skip


def ran(number: int) -> list[Event]:
    """The device runs step *number*, of 100 ms."""
    start = 100 * (number - 1)
    return [
        phase(Phase.FORWARD, start, start + 40),
        gather(start + 10, start + 30, 5, number)[1],
        phase(Phase.BACKWARD, start + 40, start + 90),
        phase(Phase.OPTIMIZER, start + 90, start + 100),
        on_device(step(number, start, start + 100)),
    ]


def test_a_step_is_as_long_as_on_the_device() -> None:
    """Its collectives count in it, however many steps the host is ahead."""
    rank = summarize_rank(folded([*enqueued(), *ran(1), *ran(2)]))
    assert [one.seconds for one in rank.steps.recent] == [0.1, 0.1]
    for one in rank.steps.recent:
        assert one.phase_ns[: Phase.OPTIMIZER + 1] == (0, 40 * MS, 50 * MS, 10 * MS)
        assert (one.communication_ns, one.exposed_ns) == (20 * MS, 5 * MS)
        assert one.timed and one.collectives == 1
    assert rank.communication.exposed_ratio == 0.05


def test_a_wait_is_part_of_the_phase_in_which_the_device_waits() -> None:
    """As in a pipeline, where a receive is enqueued in forward and waited for in backward."""
    events = [
        ANNOUNCED, span(Phase.FORWARD, 1, 2), gather(10, 30, 5, 1)[0], step(1, 0, 4),
        phase(Phase.FORWARD, 0, 10), gather(20, 30, 5, 1)[1], phase(Phase.BACKWARD, 10, 100),
        on_device(step(1, 0, 100)),
    ]  # fmt: skip
    (found,) = summarize_rank(folded(events)).steps.recent
    assert found.exposed_ns == found.phase_exposed_ns[Phase.BACKWARD] == 5 * MS
    assert not found.phase_exposed_ns[Phase.FORWARD]


def test_a_step_is_in_no_mean_before_the_device_has_ended_it() -> None:
    """The host's step is known at once: it is progress."""
    rank = summarize_rank(folded([*enqueued(), *ran(1)]))
    assert [one.step for one in rank.steps.recent] == [1]
    assert (rank.steps.last_step, rank.steps.watched_steps) == (2, 2)
    assert summarize_rank(folded(enqueued())).steps.recent == ()


def test_what_came_before_the_loop_is_no_part_of_a_step() -> None:
    start = Start(20 * MS, 0)
    rank = summarize_rank(folded([ANNOUNCED, start, *enqueued()[1:], *ran(1)]))
    assert rank.steps.recent[0].phase_ns[Phase.FORWARD] == 20 * MS


def test_steps_around_a_lost_border_keep_the_hosts_times() -> None:
    """Their communication is unknown, and those after them are of the device again."""
    third = [span(Phase.FORWARD, 8, 9), gather(210, 230, 5, 3)[0], step(3, 8, 12)]
    rank = summarize_rank(folded([*enqueued(), *third, *ran(1)[:-1], *ran(2), *ran(3)]))
    assert [one.step for one in rank.steps.recent] == [1, 2, 3]
    assert [one.timed for one in rank.steps.recent] == [False, False, True]
    assert [one.seconds for one in rank.steps.recent] == [0.004, 0.004, 0.1]


def test_steps_that_the_device_did_not_end_are_recorded_at_the_end() -> None:
    events = [*enqueued(), *ran(1), Exit(150 * MS, ExitKind.CLEAN, 0)]
    first, last = summarize_rank(folded(events)).steps.recent
    assert (first.step, last.step) == (1, 2)
    assert not last.timed and last.start_ns >= first.end_ns


def test_another_optimizer_of_a_step_extends_it() -> None:
    host = [ANNOUNCED, step(1, 0, 4), step(1, 4, 8, Flag.CONTINUED)]
    device = [on_device(step(1, 0, 60)), on_device(step(1, 60, 100, Flag.CONTINUED))]
    state: RankState = folded([*host, *device])
    (one,) = summarize_rank(state).steps.recent
    assert one.seconds == 0.1 and state.steps == 1


def test_of_what_the_reducer_waits_for_only_the_wait_is_known() -> None:
    """It is exposed communication; what was hidden is unknown, and no overlap of 0 %.

    C++ tells at the end of a step how many bytes it has sent, and never how long they took.
    """
    waited = Stall(90 * MS, Op.ALL_REDUCE, Phase.BACKWARD, Flag.DEVICE, 0, 20 * MS, 1, calls=2)
    sent = Counted(3 * MS, Op.ALL_REDUCE, Phase.BACKWARD, 1, 2, 600, Untimed.REDUCER)
    events = [*enqueued(), sent, *ran(1)[:1], *ran(1)[2:4], waited, ran(1)[4]]
    rank = summarize_rank(folded(events))
    (row,) = (one for one in rank.communication.traffic if one.op == "all_reduce")
    assert (row.count, row.calls, row.nbytes) == (2, pytest.approx(2), pytest.approx(600))
    assert [
        column.read(row) for column in pick_columns(TRAFFIC_COLUMNS, "time", "transfer", "busbw")
    ] == [None] * 3
    (one,) = rank.steps.recent
    assert one.timed and (one.communication_ns, one.exposed_ns) == (-1, 20 * MS)
    assert one.overlap is None and rank.communication.overlap_ratio is None
    assert rank.communication.exposed_ratio == 0.2


@pytest.mark.parametrize(("unseen", "overlap"), [(0, 0.75), (2, 0.75), (3, None)])
def test_overlap_is_that_of_the_steps_whose_communication_is_known(
    unseen: int, overlap: float | None
) -> None:
    """In *unseen* of 20 steps nothing waited for the end of the gather, which then is an upper bound."""
    events: list[Event] = [ANNOUNCED]
    for number in range(1, 22):
        device = ran(number)
        if number > 21 - unseen:
            device[1] = device[1]._replace(flags=int(Flag.DEVICE))  # type: ignore[call-arg]
        issued = gather(0, 0, 0, number)[0]
        events += [issued, step(number, 4 * number - 4, 4 * number), *device]
    rank = summarize_rank(folded(events))
    assert sum(one.communication_ns < 0 for one in rank.steps.recent) == unseen
    assert rank.communication.overlap_ratio == overlap


def test_the_end_of_a_backward_is_the_arrival_at_what_the_reducer_sends() -> None:
    """Rank 1 computes 30 ms longer, so rank 0 waits for it; what both wait is the end of a transfer."""
    skew = ArrivalSkew()
    states = []
    for rank, reached_ms in enumerate((60, 90)):
        reduced = Stall(
            95 * MS, Op.ALL_REDUCE, Phase.BACKWARD, Flag.DEVICE, 0, (95 - reached_ms) * MS, 1, 3,
            reached_ms * MS, 12,
        )  # fmt: skip
        states.append(folded([ANNOUNCED, step(1, 0, 4), reduced, on_device(step(1, 0, 100))]))
        skew.record_arrivals(rank, {1: ("dp", 2, 2)}, states[-1].arrivals)
    assert skew.late_seconds(1) == 0.03 and skew.late_seconds(0) == 0
    assert skew.wait_seconds(0) == 0.03
    (row,), (other,) = (summarize_rank(state).communication.traffic for state in states)
    assert (row.wait_seconds, other.wait_seconds) == (0.03, 0.0)
    assert row.transfer_seconds is None and row.busbw_bytes_per_second is None


@pytest.mark.parametrize(
    ("waited_for", "until_ms", "late_ms"),
    [
        pytest.param(1, 95, 20, id="the collective itself"),
        pytest.param(2, 99, 20, id="the next one in the order of its group"),
        pytest.param(2, 80, 0, id="one that ends sooner and so is not behind it"),
    ],
)
def test_a_rank_is_late_where_the_others_wait_for_a_stream_that_gathers(
    waited_for: int, until_ms: int, late_ms: int
) -> None:
    """FSDP2: rank 0 arrives at 60 ms, rank 1 at 90 ms. Rank 0 computes until 70 ms."""
    skew = ArrivalSkew()
    for rank, arrived_ms in enumerate((60, 90)):
        stall = Stall(
            100 * MS, Op.ALL_GATHER, Phase.FORWARD, Flag.DEVICE, 0, (until_ms - 70) * MS, 1,
            reached_ns=70 * MS, sequence=waited_for,
        )  # fmt: skip
        events = [ANNOUNCED, *gather(arrived_ms, 95, 0, 1), step(1, 0, 4)]
        made = folded([*events, *[stall] * (rank == 0)])
        assert not made.arrivals  # the stream may wait for it until the step ends
        folded([on_device(step(1, 0, 100))], made)
        skew.record_arrivals(rank, {1: ("dp_shard", 2, 2)}, made.arrivals)
    assert skew.late_seconds(1) == skew.wait_seconds(0) == late_ms / 1000
    assert skew.late_seconds(0) == skew.wait_seconds(1) == 0


def test_the_means_of_a_collective_do_not_depend_on_the_host_s_lead() -> None:
    """The host enqueues all steps at once, or each behind the one before."""
    rows = []
    for lead in (20, 1):
        events: list[Event] = [ANNOUNCED]
        for first in range(1, 21, lead):
            for number in range(first, first + lead):
                events += [gather(0, 1, 0, number)[0], step(number, 4 * number - 4, 4 * number)]
            for number in range(first, first + lead):
                events += ran(number)
        rows += summarize_rank(folded(events)).communication.traffic
    ahead, beside = rows
    assert ahead == beside
    assert ahead.calls == pytest.approx(1)
    assert ahead.exposed_seconds == pytest.approx(0.005)
    assert ahead.seconds == pytest.approx(0.02)


@pytest.mark.parametrize(
    ("lag_ms", "said"),
    [
        (30, "device-bound: kernels were queued at the end of its phases; the host takes forward"),
        (0, "launch-bound: the device waited for the host in 100.0 % of its phases (forward"),
    ],
)
def test_who_sets_the_pace_is_told_by_the_lag_at_the_end_of_each_phase(lag_ms: int, said: str) -> None:
    events: list[Event] = [ANNOUNCED]
    for number in range(1, 25):
        start = 100 * (number - 1)
        host = span(Phase.FORWARD, start, start + 4), step(number, start, start + 8)
        device = [
            one._replace(lag_ns=lag_ms * MS) if isinstance(one, PhaseSpan) else one
            for one in ran(number)
        ]
        events += [host[0], gather(0, 1, 0, number)[0], host[1], *device]
    rank = summarize_rank(folded(events))
    known = pace(rank)
    assert known is not None
    assert known.launch_seconds == {"forward": 0.004}
    assert known.compute_seconds == pytest.approx(0.09)
    assert known.starved_seconds == pytest.approx(0.09 * (lag_ms == 0))
    assert pace_text(rank).startswith(said)
    assert ("ZM322" in {found.code for found in advise(run(rank))}) is (lag_ms == 0)


@pytest.mark.parametrize("queued_ms", [0, 30])
def test_what_the_reducer_waits_for_is_no_queue_of_kernels(queued_ms: int) -> None:
    """At the end of backward the stream waits 20 ms for communication, whoever sets the pace."""
    events: list[Event] = [ANNOUNCED]
    for number in range(1, 25):
        spans = ran(number)
        for place, lag_ms in ((0, queued_ms), (2, queued_ms + 20), (3, queued_ms)):
            spans[place] = spans[place]._replace(lag_ns=lag_ms * MS)  # type: ignore[call-arg]
        waited = Stall(0, Op.ALL_REDUCE, Phase.BACKWARD, Flag.DEVICE, 0, 20 * MS, 1, calls=1)
        spans.insert(2, waited)
        events += [step(number, 4 * number - 4, 4 * number), *spans]
    known = pace(summarize_rank(folded(events)))
    assert known is not None
    assert known.starved_ratio == (0 if queued_ms else 1)


def test_a_host_that_waits_within_a_phase_does_not_set_the_pace() -> None:
    """It is ahead at the begin of the phase, and comes to the end together with the device."""
    events: list[Event] = [ANNOUNCED]
    for number in range(1, 25):
        spans = ran(number)
        for place, lag_ms in ((0, 30), (2, 0), (3, 4)):
            spans[place] = spans[place]._replace(lag_ns=lag_ms * MS)  # type: ignore[call-arg]
        events += [step(number, 4 * number - 4, 4 * number), *spans]
    known = pace(summarize_rank(folded(events)))
    assert known is not None and known.starved_ratio == 0


def test_a_device_that_waits_out_the_pause_of_another_rank_is_not_launch_bound() -> None:
    """The host is ahead; only in step 20 its queue is full, and it stands still as the device does."""
    events: list[Event] = [ANNOUNCED]
    for number in range(1, 25):
        paused_ms, start = 5000 * (number == 20), 100 * (number - 1) + 5000 * (number > 20)
        lag_ms = 0 if paused_ms else 30
        phases = (
            phase(Phase.FORWARD, start, start + 40),
            phase(Phase.BACKWARD, start + 40, start + 100 + paused_ms),
        )
        events.append(step(number, 4 * number - 4, 4 * number))
        events += [one._replace(lag_ns=lag_ms * MS) for one in phases]  # type: ignore[call-arg]
        events.append(on_device(step(number, start, start + 100 + paused_ms)))
    known = pace(summarize_rank(folded(events)))
    assert known is not None and known.starved_ratio == 0
    assert known.step_seconds == pytest.approx(0.1)


def test_a_row_has_both_what_the_host_and_what_a_device_timed() -> None:
    """One group may run its collectives of the CPU by gloo and those of a device by NCCL."""
    events: list[Event] = [ANNOUNCED]
    for number in range(1, 21):
        on_cpu = gather(100 * number - 100, 100 * number - 50, 50, 2 * number)
        done = on_cpu[1]
        assert isinstance(done, Done)
        on_device = gather(0, 1, 0, 2 * number + 1)[0], ran(number)[1]
        events += [on_cpu[0], done._replace(flags=0), on_device[0]]
        events += [step(number, 100 * number - 100, 100 * number), *ran(number)]
    (row,) = summarize_rank(folded(events)).communication.traffic
    assert row.calls == pytest.approx(2)
    assert row.exposed_seconds == pytest.approx(0.055)
    assert row.seconds == pytest.approx(0.07)


def test_clocks_that_disagree_make_no_rank_late() -> None:
    """Both wait 1 ms for the end of a transfer; rank 0's clock is 500 ms early."""
    skew = ArrivalSkew()
    for rank, reached_ms in enumerate((10, 510)):
        waited = Stall(
            600 * MS, Op.ALL_REDUCE, Phase.BACKWARD, Flag.DEVICE, 0, MS, 1, 3, reached_ms * MS, 12
        )
        state = folded([ANNOUNCED, step(1, 0, 4), waited])
        skew.record_arrivals(rank, {1: ("dp", 2, 2)}, state.arrivals)
    late = [skew.late_seconds(rank) for rank in range(2)]
    assert all(seconds is not None and seconds <= 0.001 for seconds in late)
