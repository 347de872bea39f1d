"""The fold: hand-made events in, whole snapshots out."""

from __future__ import annotations

import math
import random

import pytest
from builders import MS, changed, collective, folded, host, run, span, state, step

from zeromon.fold.fold import fold_event, fold_records
from zeromon.fold.ledger import Observed
from zeromon.fold.state import RankState
from zeromon.fold.summarize import measured_cost, summarize_rank
from zeromon.readout.report import engine_block
from zeromon.readout.text import overhead_text
from zeromon.ring.codes import (
    Dtype,
    ExitKind,
    Flag,
    Kind,
    Op,
    Outcome,
    Path,
    Phase,
    Role,
    UnitEvent,
    Untimed,
)
from zeromon.ring.events import (
    RECORD,
    BackwardComm,
    Counted,
    Done,
    Event,
    Exit,
    GroupSequence,
    Heartbeat,
    Issued,
    MemoryPeak,
    MemorySample,
    Oom,
    Precision,
    RoleBytes,
    Stall,
    StepMark,
    Transfer,
    UnitMark,
    decode_record,
    float_bits,
    pack_dtype,
    pack_head,
    pack_place,
)
from zeromon.snapshot import RankSnapshot
from zeromon.snapshot.rank import Halt


def test_a_step_knows_its_communication_and_what_of_it_is_exposed() -> None:
    """Two overlapping collectives count once; blocked time is the exposed part."""
    events = [
        *collective(10, 30, 0, sequence=1),
        *collective(20, 50, 15, sequence=2, op=Op.REDUCE_SCATTER),
        span(Phase.FORWARD, 0, 40),
        span(Phase.BACKWARD, 40, 90),
        step(1, 0, 100),
    ]
    rank = summarize_rank(folded(events))
    (one,) = rank.steps.recent
    assert (one.communication_ns, one.exposed_ns) == (40 * MS, 15 * MS)
    assert one.phase_ns == (10 * MS, 40 * MS, 50 * MS, *[0] * (len(Phase) - 3))
    assert one.collectives == 2
    assert rank.communication.overlap_ratio == pytest.approx(1 - 15 / 40)
    assert rank.communication.exposed_ratio == pytest.approx(0.15)
    assert rank.communication.in_flight == ()


def test_a_collective_that_has_not_ended_is_in_flight() -> None:
    """With its name, its unit and its age."""
    issued = Issued(5 * MS, Op.ALL_GATHER, Phase.BACKWARD, 0, 1, 7, 4096, 451, 1)
    (flying,) = summarize_rank(folded([issued])).communication.in_flight
    assert (flying.op, flying.group, flying.sequence) == ("all_gather", "world", 451)
    assert (flying.unit, flying.phase, flying.nbytes) == ("layers.0", "backward", 4096)


def test_idle_steps_are_left_out_of_shares_and_give_the_cost() -> None:
    """Steps of 102 ms with hooks and 100 ms without: 2 %, once there are forty control steps."""

    def after(steps: int) -> RankSnapshot:
        events = []
        for n in range(1, steps + 1):
            idle = n % 8 == 0
            length = 100 if idle else 102
            events.append(step(n, n * 200, n * 200 + length, Flag.IDLE if idle else 0))
        return summarize_rank(folded(events))

    rank = after(330)
    assert rank.agent.overhead_ratio == pytest.approx(0.02)
    assert rank.agent.overhead_noise_ratio == pytest.approx(0.0)
    assert rank.communication.overlap_ratio is None
    assert after(80).agent.overhead_ratio is None


def test_the_measured_cost_has_a_noise_and_needs_enough_pairs() -> None:
    """Median and standard error; one checkpoint in between does not spoil it."""
    chooser = random.Random(1)
    pairs = [(100_000, 101_000 + chooser.randint(-3000, 3000)) for _ in range(200)]
    pairs.append((100_000, 9_000_000))
    cost = measured_cost(pairs)
    assert cost is not None
    assert abs(cost[0] - 0.01) < 3 * cost[1]
    assert 0.0005 < cost[1] < 0.005
    assert measured_cost(pairs[:39]) is None


def test_a_neighbour_that_lasts_for_many_steps_is_noise_of_the_measured_cost() -> None:
    """The agent costs nothing. Where load rises and falls, no figure may claim that it does."""
    claims = 0
    for seed in range(60):
        chooser, load, pairs = random.Random(seed), 0.0, []
        for _ in range(128):
            load = 0.95 * load + chooser.gauss(0, 0.03)
            pairs.append((100_000, round(100_000 * (1 + load + chooser.gauss(0, 0.05)))))
        cost = measured_cost(pairs)
        assert cost is not None
        rank = changed(summarize_rank(folded([])), overhead_ratio=cost[0], overhead_noise_ratio=cost[1])
        claims += "measured" in overhead_text([rank])
    assert claims <= 3


def heartbeat(second: int, records: int, calls: int, spent_ms: int) -> Heartbeat:
    return Heartbeat(second * 1000 * MS, 0, Phase.OTHER, second, records, calls, spent_ms * MS)


def test_the_accounted_cost_is_calls_times_their_cost_and_samples() -> None:
    """A second: 1,000 records of 3 us, 500 calls of 1 us, 2 ms of samples: 0.55 %."""
    beats = [heartbeat(n, 1000 * n, 500 * n, 2 * n) for n in range(100)]
    state = folded(beats)
    assert (
        summarize_rank(state).agent.accounted_overhead_ratio is None
    )  # an agent that has timed no hook
    state.meta |= {"record_ns": 3000, "call_ns": 1000}
    rank = summarize_rank(state)
    assert rank.agent.accounted_overhead_ratio == pytest.approx(0.0055)
    assert overhead_text([rank]) == "about 0.5 %"
    for pause in range(100, 150):  # an evaluation, a checkpoint, the end: no step, and no cost
        fold_event(state, beats[-1]._replace(t_ns=pause * 1000 * MS))
    assert summarize_rank(state).agent.accounted_overhead_ratio == pytest.approx(0.0055)
    early = folded(beats[:6])
    early.meta |= state.meta
    assert summarize_rank(early).agent.accounted_overhead_ratio is None


@pytest.mark.parametrize(
    ("measured", "noise", "text"),
    [
        (0.139, 0.041, "about 0.4 %"),  # three standard errors of a busy machine
        (0.139, 0.01, "about 0.4 %; measured +13.9 ± 3.5 %"),
        (-0.018, 0.067, "about 0.4 %"),
        (0.001, 0.002, "about 0.4 %; measured +0.1 ± 0.7 %"),
        (None, None, "about 0.4 %"),
    ],
)
def test_the_measured_cost_is_shown_where_its_noise_allows_a_verdict(
    measured: float | None, noise: float | None, text: str
) -> None:
    rank = changed(
        summarize_rank(folded([])), accounted_overhead_ratio=0.004, overhead_ratio=measured,
        overhead_noise_ratio=noise,
    )  # fmt: skip
    assert overhead_text([rank]) == text
    unknown = overhead_text([changed(rank, accounted_overhead_ratio=None)])
    assert unknown == text.replace("about 0.4 %", "n/a")


def test_counted_collectives_are_known_but_not_timed() -> None:
    """From C++, or of a step with idle hooks; with operation NONE not even the name is known."""
    events = [
        Counted(1, Op.ALL_REDUCE, Phase.BACKWARD, 1, 4, 4000, Untimed.IN_CPP),
        Counted(2, Op.NONE, Phase.OTHER, 1, 3, 0, Untimed.IN_CPP),
    ]
    rank = summarize_rank(folded(events))
    (row,) = rank.communication.collectives
    assert (row.op, row.count, row.timed, row.nbytes) == ("all_reduce", 4, 0, 4000)
    assert row.busbw_bytes_per_second is None
    assert rank.communication.untimed == {"world": 7}
    assert rank.communication.unattributed == {"world": 3}


def test_ddps_own_timing_belongs_to_the_step_before() -> None:
    """Communication from 40 to 90 ms, computed until 80: 10 ms exposed."""
    events = [step(1, 0, 100), BackwardComm(90 * MS, 1, 40 * MS, 80 * MS, 4), step(2, 100, 200)]
    first, second = summarize_rank(folded(events)).steps.recent
    assert (first.communication_ns, first.exposed_ns) == (50 * MS, 10 * MS)
    assert (second.communication_ns, second.exposed_ns) == (0, 0)


def test_waits_on_the_device_stay_when_ddps_own_timing_arrives() -> None:
    """10 ms of the buckets, and 8 ms for which the script's own all-reduce held up the stream."""
    issued, done = collective(92, 99, 8)
    events = [
        issued, done._replace(flags=Flag.DEVICE), step(1, 0, 100),
        BackwardComm(90 * MS, 1, 40 * MS, 80 * MS, 4), step(2, 100, 200),
    ]  # fmt: skip
    first, second = summarize_rank(folded(events)).steps.recent
    assert (first.exposed_ns, second.exposed_ns) == (18 * MS, 0)


def test_a_second_optimizer_extends_the_step() -> None:
    """One step of 120 ms, not two."""
    events = [step(1, 0, 100, micro=2), *collective(101, 110, 9), step(1, 100, 120, Flag.CONTINUED)]
    rank = summarize_rank(folded(events))
    assert rank.steps.watched_steps == 1
    (one,) = rank.steps.recent
    assert (one.end_ns - one.start_ns, one.micro_steps) == (120 * MS, 2)
    assert one.exposed_ns == 9 * MS


@pytest.mark.parametrize("fact", ["many", None, [1], {}, -1, 2.5, 10**400, True])
def test_a_fact_of_a_group_that_is_no_number_is_unknown(fact: object) -> None:
    """A damaged ring, or one that somebody else wrote."""
    made = folded([*collective(0, 10, 2), step(1, 0, 20)])
    made.note_group_facts(1, {"label": "world", "size": fact, "nodes": fact, "ranks": [fact]})
    shown = summarize_rank(made)
    (row,) = shown.communication.collectives
    assert (row.group, row.group_size, row.nodes) == ("world", 1, 0)
    assert shown.communication.groups[0].ranks == ()
    made.note_group_facts(1, {"label": "world", "size": 4, "nodes": 2, "ranks": [0, 1, 2, 3]})
    shown = summarize_rank(made)
    assert (shown.communication.collectives[0].group_size, shown.communication.collectives[0].nodes) == (
        4,
        2,
    )
    assert shown.communication.groups[0].ranks == (0, 1, 2, 3)


def test_units_add_up_their_exposed_time() -> None:
    """The worst first, under their FQN."""
    made = state()
    made.units[8] = "layers.1"
    events = [
        UnitMark(1, UnitEvent.UNSHARD, Phase.FORWARD, 0, 7, 0, -1),
        *collective(0, 10, 2, sequence=1, unit=7),
        *collective(10, 30, 20, sequence=2, unit=8),
        UnitMark(2, UnitEvent.RESHARD, Phase.FORWARD, 0, 7, 0, 5000),
    ]
    rank = summarize_rank(folded(events, made))
    assert [(u.fqn, u.exposed_seconds) for u in rank.communication.units] == [
        ("layers.1", 0.02),
        ("layers.0", 0.002),
    ]
    assert rank.communication.units[1].unshards == 1
    assert rank.communication.units[1].peak_allocated_bytes == 5000


def test_a_stalled_compute_stream_is_exposed_time() -> None:
    """Device timing at a unit's boundary."""
    events = [
        *collective(0, 10, 0, unit=7),
        Stall(12 * MS, Op.ALL_GATHER, Phase.FORWARD, Flag.DEVICE, 7, 3 * MS),
        step(1, 0, 20),
    ]
    rank = summarize_rank(folded(events))
    assert rank.communication.exposed_seconds == pytest.approx(0.003)
    assert rank.communication.units[0].exposed_seconds == pytest.approx(0.003)
    assert rank.communication.collectives[0].exposed_seconds == pytest.approx(0.003)


def test_waits_of_a_device_are_added_although_their_times_overlap() -> None:
    """An end is the host's time of issue plus the device's duration; the waits follow each other."""
    events = []
    for sequence in (1, 2):
        issued, done = collective(0, 10, 8, sequence=sequence)
        events += [issued, done._replace(flags=Flag.DEVICE)]
    made = folded([*events, step(1, 0, 20)])
    assert made.history[-1].exposed_ns == 16 * MS


def test_a_stall_without_a_unit_belongs_to_its_group() -> None:
    """A plain script has no units."""
    events = [
        *collective(0, 10, 0),
        Stall(12 * MS, Op.ALL_GATHER, Phase.FORWARD, Flag.DEVICE, 0, 3 * MS, group=1),
        step(1, 0, 20),
    ]
    rank = summarize_rank(folded(events))
    assert rank.communication.collectives[0].exposed_seconds == pytest.approx(0.003)
    assert rank.communication.units == ()


def test_what_must_have_ended_is_no_longer_in_flight() -> None:
    """Nobody waited for number 1; number 2 of its group has ended, and the step is over."""
    lost, _ = collective(10, 20, 0, sequence=1)
    events = [lost, *collective(30, 40, 5, sequence=2), step(1, 0, 100)]
    made = folded(events)
    assert len(summarize_rank(made).communication.in_flight) == 1  # still of this step
    folded([*collective(110, 120, 5, sequence=3), step(2, 100, 200)], made)
    assert summarize_rank(made).communication.in_flight == ()


def test_a_collective_shown_for_a_hung_idle_step_is_not_counted_twice() -> None:
    """It is in flight until the step ends, and counted with the step."""
    shown = Issued(5, Op.ALL_REDUCE, Phase.BACKWARD, Flag.INFERRED, 1, 0, 64, 0, 0)
    made = folded([shown])
    assert [e.op for e in summarize_rank(made).communication.in_flight] == ["all_reduce"]
    assert made.ops == {}
    counted = Counted(90 * MS, Op.ALL_REDUCE, Phase.BACKWARD, 1, 3, 192, Untimed.CONTROL_STEP)
    folded([counted, step(1, 0, 100, Flag.IDLE)], made)
    rank = summarize_rank(made)
    assert rank.communication.in_flight == ()
    assert rank.communication.collectives[0].count == 3


@pytest.mark.parametrize(("attached", "number"), [(False, 11), (True, 10)])
def test_a_call_from_python_is_numbered_after_those_that_cpp_issued(attached: bool, number: int) -> None:
    """Ten all-reduces of DDP's reducer, and one call that the hooks saw."""
    made = state(attached=attached)
    first = 10 if attached else 1  # an attached agent numbers as the group does
    folded([GroupSequence(5, 1, 10, 0)], made)
    folded([Issued(6, Op.BROADCAST, Phase.OTHER, 0, 1, 0, 64, first, 0)], made)
    rank = summarize_rank(made)
    (group,) = [g for g in rank.communication.groups if g.sequence >= 0]
    assert (group.sequence, group.op, group.nbytes) == (number, "broadcast", 64)
    assert [e.sequence for e in rank.communication.in_flight] == [number]


def test_failed_collectives_leave_nothing_in_flight() -> None:
    """Counted, not timed."""
    issued, done = collective(0, 10, 0)
    rank = summarize_rank(folded([issued, done._replace(flags=Flag.FAILED)]))
    assert rank.communication.in_flight == ()
    assert (rank.communication.collectives[0].count, rank.communication.collectives[0].timed) == (1, 0)


def test_the_goodbye_carries_its_exception() -> None:
    """By the text's id."""
    made = state()
    made.texts[3] = "RuntimeError: boom"
    rank = summarize_rank(folded([Exit(1, ExitKind.EXCEPTION, 3)], made), Observed(alive=False))
    assert rank.status.exception == "RuntimeError: boom"


def test_groups_that_share_a_label_are_one_row() -> None:
    """The labels of a metric must be unique."""
    made = state()
    made.groups[2] = dict(made.groups[1])
    second = [e._replace(group=2) for e in collective(20, 30, 1)]  # type: ignore[call-arg]
    rank = summarize_rank(folded([*collective(0, 10, 1), *second], made))
    (row,) = rank.communication.collectives
    assert (row.count, row.nbytes) == (2, 2000)


def test_host_memory_peaks_by_step() -> None:
    """The largest sample of the step."""
    events = [host(1, 100), host(2, 900), host(3, 500), step(1, 0, 10)]
    rank = summarize_rank(folded(events))
    assert rank.steps.recent[0].rss_bytes == 900
    assert rank.memory.rss_bytes == 500


def test_records_of_the_future_are_skipped() -> None:
    """Unknown kinds and values are None and counted, not an exception."""
    words = [
        pack_head(200),
        pack_head(Kind.ISSUED, 99),
        pack_head(Kind.DONE, 1, 99),
        pack_head(Kind.UNIT, 77),
    ]
    records = [(1, 2, word, 0, 0, 0, 0, 1) for word in words]
    assert [decode_record(record) for record in records] == [None] * 4
    state = RankState()
    fold_records(state, records)
    assert (state.dropped, state.last_event_ns, state.ops, state.traffic) == (4, 0, {}, {})


# ---- DeepSpeed ----------------------------------------------------------------------------------


def test_engines_keep_their_own_counts() -> None:
    """Two engines of one rank: what each issued, and its steps, applied or skipped."""
    events = [
        Issued(1 * MS, Op.ALL_GATHER, Phase.FORWARD, 0, 1, 7, 100, 1, 3, 1),
        Done(3 * MS, Op.ALL_GATHER, Phase.FORWARD, 0, 1, 7, 100, 1 * MS, 2 * MS, 1),
        Issued(4 * MS, Op.ALL_REDUCE, Phase.BACKWARD, 0, 1, 0, 50, 2, 3, 2),
        StepMark(10 * MS, 0, 1, 0, 1, Outcome.SKIPPED, 1),
        StepMark(12 * MS, int(Flag.CONTINUED), 1, 10 * MS, 1, Outcome.APPLIED, 2),
        Counted(
            13 * MS, Op.ALL_GATHER, Phase.FORWARD, 1, 3, 30, Untimed.CONTROL_STEP, int(Dtype.BFLOAT16), 2
        ),
    ]
    first, second = summarize_rank(folded(events)).config.engines
    assert (first.collectives, first.nbytes, first.exposed_seconds) == (1, 100, 0.002)
    assert (first.steps, first.skipped) == (1, 1)
    assert (second.collectives, second.nbytes, second.steps, second.skipped) == (4, 80, 1, 0)


def test_quantized_bytes_are_those_in_eight_bits() -> None:
    """int8 gathers and all-to-alls are ZeRO++'s; a one-byte all-reduce is the overflow flag."""
    int8, uint8 = int(Dtype.INT8), int(Dtype.UINT8)
    events = [
        Issued(1, Op.ALL_GATHER, Phase.FORWARD, 0, 1, 7, 100, 1, int8, 1),
        Issued(2, Op.ALL_GATHER, Phase.FORWARD, 0, 1, 7, 1000, 2, int(Dtype.BFLOAT16), 1),
        Counted(3, Op.ALL_TO_ALL, Phase.BACKWARD, 1, 2, 40, Untimed.CONTROL_STEP, int8, 1),
        Issued(4, Op.ALL_REDUCE, Phase.OPTIMIZER, 0, 1, 0, 1, 3, int8, 1),
        Issued(5, Op.ALL_GATHER, Phase.OTHER, 0, 1, 0, 64, 4, uint8, 0),
    ]
    rows = {r.op: r for r in summarize_rank(folded(events)).communication.collectives}
    assert rows["all_gather"].quantized_bytes == 100
    assert rows["all_to_all"].quantized_bytes == 40
    assert rows["all_reduce"].quantized_bytes == 0


def test_gathers_are_told_apart_by_when_they_were_asked_for() -> None:
    """Bytes from the unit's record, waiting time from the collective's end."""
    ahead = int(Flag.AHEAD)
    events = [
        UnitMark(1, UnitEvent.UNSHARD, Phase.FORWARD, 0, 7, 0, -1, 600),
        Issued(1, Op.ALL_GATHER, Phase.FORWARD, 0, 1, 7, 600, 1, 3, 1),
        Done(5 * MS, Op.ALL_GATHER, Phase.FORWARD, 0, 1, 7, 600, 1, 4 * MS, 1),
        UnitMark(6 * MS, UnitEvent.UNSHARD, Phase.FORWARD, ahead, 7, 0, -1, 900),
        Issued(6 * MS, Op.ALL_GATHER, Phase.FORWARD, ahead, 1, 7, 900, 2, 3, 1),
        Done(9 * MS, Op.ALL_GATHER, Phase.FORWARD, ahead, 1, 7, 900, 6 * MS, 1 * MS, 2),
    ]
    rank = summarize_rank(folded(events))
    assert {(g.outcome, g.nbytes, g.exposed_seconds) for g in rank.communication.gathers} == {
        ("late", 600, 0.004), ("ahead", 900, 0.001),
    }  # fmt: skip
    (unit,) = rank.communication.units
    assert unit.unshards == 2


def test_precision_transfers_and_roles_are_folded() -> None:
    """The newest precision and census; transfers add up; a norm that is not finite is counted."""
    events = [
        Precision(1, 1, 1024.0, 2, math.inf),
        Precision(2, 1, 512.0, 1, 3.5),
        Transfer(3, Path.DISK_READ, 1000, 2 * MS, 1 * MS, 4),
        Transfer(4, Path.DISK_READ, 1000, 2 * MS, 1 * MS, 4),
        RoleBytes(5, Role.MASTER_PARAM, 1, 2, 3, 0),
        RoleBytes(6, Role.MASTER_PARAM, 4, 5, 6, 0),
        step(1, 0, 100),
    ]
    rank = summarize_rank(folded(events))
    (engine,) = rank.config.engines
    assert (engine.loss_scale, engine.hysteresis, engine.grad_norm) == (512.0, 1, 3.5)
    assert engine.nonfinite == 1
    (way,) = rank.memory.transfers
    assert (way.nbytes, way.seconds, way.blocked_seconds) == (2000, 0.004, 0.002)
    assert way.bytes_per_second == way.best_bytes_per_second == pytest.approx(500_000)
    assert way.step_bytes == 2000
    assert rank.steps.recent[-1].offload_blocked_ns == 2 * MS
    (role,) = rank.memory.roles
    assert (role.device_bytes, role.host_bytes, role.disk_bytes) == (4, 5, 6)
    unscaled = summarize_rank(folded([Precision(1, 1, math.nan, -1, None)])).config.engines[0]
    assert unscaled.loss_scale is None and unscaled.grad_norm is None
    assert unscaled.nonfinite == 0


def test_malformed_settings_are_left_out() -> None:
    """The name table is a file: what is in it may be anything."""
    made = state(engine1={"settings": [["a", "1", ""], ["b"], 7]}, engine2=5, enginex={})
    rank = summarize_rank(made)
    assert [(s.engine, s.name, s.effective) for s in rank.config.settings] == [(1, "a", "1")]


def test_the_new_records_keep_their_values_through_the_ring() -> None:
    """Floats travel as their bits; dtype and engine share a field."""
    bits = float_bits(-0.1), 3, float_bits(math.inf), 1
    raw = 1, 9, pack_head(Kind.PRECISION) | pack_place(2) << 32, *bits, 1
    assert decode_record(RECORD.unpack(RECORD.pack(*raw))) == Precision(9, 2, -0.1, 3, math.inf)
    raw = (
        1,
        9,
        pack_head(Kind.COUNTED, 1, 1) | pack_place(2) << 32,
        5,
        6,
        1,
        pack_dtype(Dtype.INT8, 3),
        1,
    )
    counted = decode_record(RECORD.unpack(RECORD.pack(*raw)))
    assert isinstance(counted, Counted)
    assert (counted.dtype, counted.engine, counted.calls) == (Dtype.INT8, 3, 5)


def test_a_role_has_grown_since_the_first_census_after_the_warm_up() -> None:
    made = state()
    for n in range(1, 31):
        nbytes = 1000 if n < 8 else 1000 + 10 * n
        events: list[Event] = [step(n, n * 100, n * 100 + 100)]
        if n % 4 == 0:
            events.insert(0, RoleBytes(n * 100 * MS, Role.OPTIMIZER_STATE, nbytes, 0, 0, 0))
        folded(events, made)
    (row,) = summarize_rank(made).memory.roles
    assert row.grown_bytes == (1000 + 10 * 28) - (1000 + 10 * 8)


def test_a_suspended_rank_is_in_no_pause_that_its_last_stack_shows() -> None:
    """It was compiling when its agent looked last, and went on before the signal came."""
    made = state(stack=["/x/torch/_dynamo/convert_frame.py:1 in compile"])
    folded([step(1, 0, 100)], made)
    assert summarize_rank(made).status.pause == "compiles"
    assert summarize_rank(made, Observed(halted=Halt.SUSPENDED)).status.pause == ""
    assert summarize_rank(made, Observed(halted=Halt.TRACED)).status.pause == "is stopped in a debugger"


def test_an_engine_that_was_dropped_is_not_expected_to_hold_memory() -> None:
    """Six engines of a sweep would be predicted together; only the one that lives is."""
    model = {
        "framework": "deepspeed", "stage": 2, "ranks": 2, "numel": 10**6, "trainable": 10**6,
        "shard_numel": 5 * 10**5, "trainable_shard_numel": 5 * 10**5, "param_bytes": 2,
        "compute_bytes": 2, "grad_bytes": 2, "optimizer": "AdamW",
    }  # fmt: skip
    lives = {"model": model, "settings": [["a", "1", "1"]]}
    gone = {f"engine{n}": {"stage": 2, "dropped": True} for n in range(1, 6)}
    made = state(**gone, engine6=lives)
    for number in range(1, 7):
        made.engines[number].steps = 20
    made.roles[Role.UNSHARDED_PARAM] = RoleBytes(1, Role.UNSHARDED_PARAM, 2 * 10**6, 0, 0, 0)
    one = summarize_rank(made)
    assert len(one.config.models) == 1
    assert [(e.engine, e.dropped) for e in one.config.engines] == [(n, n < 6) for n in range(1, 7)]
    assert {setting.engine for setting in one.config.settings} == {6}
    (row,) = (row for row in one.memory.expected if row.role == "unsharded_param")
    assert row.predicted_bytes == 2 * 10**6
    text = engine_block(run(one))
    assert text.count("(dropped)") == 5


def test_an_allocation_that_failed_after_the_last_sample_counts() -> None:
    """A rank that dies of it takes no other sample."""
    sample, peak = MemorySample(MS, 1, 1, 1, 1, 0), MemoryPeak(MS, 0, 2, 10, 80)
    failed = Oom(2 * MS, 24, 80, 10)
    for events, counted in (([sample, peak], 2), ([sample, peak, failed], 3), ([sample, failed], 1)):
        memory = summarize_rank(folded(events)).memory.device
        assert memory is not None and memory.ooms == counted
