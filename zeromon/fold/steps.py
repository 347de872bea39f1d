"""Folds the ends of phases and steps: step summaries, the step-time histogram, control steps."""

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import replace
from statistics import fmean
from typing import Any, Final

from zeromon.fold.collectives import forget_ended_calls
from zeromon.fold.ledger import add_ledger_step
from zeromon.fold.state import STEP_BUCKETS, EndedPhase, PipelineCall, RankState, Window, folds_event
from zeromon.ring import codes, events
from zeromon.ring.codes import ENQUEUED
from zeromon.snapshot import StepSummary
from zeromon.snapshot.communication import Act, PipelineRow, StageRow, UnitRow, schedule_notation

_CONTINUED: Final = int(codes.Flag.CONTINUED)  # an IntFlag's own `&` takes a microsecond
_ASYNC: Final = int(codes.Flag.ASYNC)
_IDLE: Final = int(codes.Flag.IDLE)
_DEVICE: Final = int(codes.Flag.DEVICE)
_OTHER: Final = codes.Phase.OTHER  # a look-up in an enum takes as long as ten sums
_FAILED: Final = int(codes.Flag.FAILED)
_BACKWARD: Final = codes.Phase.BACKWARD
_DATA_WAIT: Final = codes.Phase.DATA_WAIT
_CPU_OPTIMIZER: Final = codes.Phase.CPU_OPTIMIZER


_TRAINING = (codes.Phase.FORWARD, codes.Phase.BACKWARD, codes.Phase.DATA_WAIT)
"""Phases that belong to an evaluation or a generation where they happen within one."""
_NO_LAG_NS, _NO_LAG = 100_000, 0.05
"""A device that is no further behind the host at both ends of a phase, beside its length, waits for the
host: it runs the last kernels that were enqueued."""
_TAKES_INNER = (codes.Phase.EVALUATION, codes.Phase.GENERATION)


@folds_event(events.PhaseSpan)
def _fold_phase_span(state: RankState, e: events.PhaseSpan) -> None:
    if e.flags & _DEVICE:
        _fold_device_phase(state, e)
        return
    if e.activity or e.phase > _CPU_OPTIMIZER:
        _count_phase_activity(state, e)
    if e.flags & _ASYNC:
        return
    window = state.window
    spent_ns = own_ns = max(0, e.t_ns - e.start_ns)
    # A phase ends after those within it: unless they are taken out, their time counts twice
    while window.spans and window.spans[-1].start_ns >= e.start_ns:
        inner = window.spans.pop()
        own_ns -= inner.end_ns - inner.start_ns
        if e.phase in _TAKES_INNER and inner.phase in _TRAINING:
            own_ns += inner.own_ns
            window.phase_ns[inner.phase] -= inner.own_ns
    window.spans.append(EndedPhase(e.start_ns, e.start_ns + spent_ns, e.phase, max(0, own_ns)))
    window.phase_ns[e.phase] += max(0, own_ns)
    if e.activity is codes.Activity.WRAP:  # what has a cause of its own is no part of the set-up
        state.activities[e.phase, e.activity, False].ns -= spent_ns - max(0, own_ns)
    if e.phase is _DATA_WAIT:
        state.out_of_batches = bool(e.flags & _FAILED)
    if e.phase is _BACKWARD:
        # A pipeline runs a backward for each micro-batch, and all of them are one micro-step
        counts = not e.flags & _CONTINUED
        state.micro_steps += counts
        window.micro_steps += counts
        reshard_all_units(state)
    # Garbage collection, compilation and checkpoints end within a phase of training, which goes on
    if e.phase <= _CPU_OPTIMIZER:
        state.phase = _OTHER


def _fold_device_phase(state: RankState, e: events.PhaseSpan) -> None:
    """Adds a phase of the compute stream, work or wait, between two borders of the host's phases."""
    state.on_device = True
    # The device's first phase begins in the set-up: cut at the loop, it is no part of step 1
    window, spent_ns = state.device_window, max(0, e.t_ns - max(e.start_ns, state.loop_ns))
    window.phase_ns[e.phase] += spent_ns
    # what its waits since the last border took; the host issued it in an earlier phase, maybe
    window.phase_exposed_ns[e.phase] += window.stall_ns - sum(window.phase_exposed_ns)
    # a host that waits for the device within a phase comes to its end together with it, too
    lag = max(e.lag_ns - state.reducer_wait_ns, state.device_lag_ns)
    state.device_lag_ns, state.reducer_wait_ns = e.lag_ns, 0
    window.starved_ns += spent_ns * (e.phase in ENQUEUED and lag <= _NO_LAG_NS + _NO_LAG * spent_ns)


def _count_phase_activity(state: RankState, e: events.PhaseSpan) -> None:
    totals = state.activities[e.phase, e.activity, bool(e.flags & _ASYNC)]
    totals.count += 1
    totals.ns += e.t_ns - e.start_ns
    totals.longest_ns = max(totals.longest_ns, e.t_ns - e.start_ns)
    totals.nbytes += e.nbytes
    totals.last_end_ns = e.t_ns
    if e.file and e.nbytes > totals.file_bytes:
        totals.file, totals.file_bytes = e.file, e.nbytes
    if e.activity is codes.Activity.SAVE:
        _count_checkpoint_save(state, e)


def _count_checkpoint_save(state: RankState, e: events.PhaseSpan) -> None:
    """Steps that ended during a save in the background are in no checkpoint."""
    ledger = state.ledger
    if e.flags & _ASYNC:
        during = [step for step in state.history if step.end_ns > e.start_ns]
        ledger.unsaved_steps = min(ledger.unsaved_steps, len(during))
        spent_ns = sum(step.end_ns - step.start_ns for step in during)
        ledger.since_save_ns = min(ledger.since_save_ns, spent_ns)
        return
    ledger.checkpoints += bool(ledger.unsaved_steps or not ledger.checkpoints)
    ledger.since_save_ns = ledger.unsaved_steps = 0


@folds_event(events.Start)
def _fold_loop_start(state: RankState, e: events.Start) -> None:
    """Begins the training loop: what came before it is no part of the first step."""
    state.startup_ns = e.t_ns - e.process_start_ns
    state.loop_ns = e.t_ns
    state.setup_ns = [a + b for a, b in zip(state.setup_ns, state.window.phase_ns, strict=True)]
    state.ledger.silent_set_up_ns += state.window.silent_ns
    state.window = Window()
    for row in state.traffic.values():
        row.forget()


@folds_event(events.BatchMark)
def _fold_batch_mark(state: RankState, e: events.BatchMark) -> None:
    state.window.samples, state.window.tokens = e.samples, e.tokens
    totals = state.batches
    totals.steps += 1
    totals.samples += e.samples
    totals.tokens += max(0, e.tokens)
    totals.positions += e.positions
    totals.pairs += e.pairs
    totals.padding = max(totals.padding, e.padding)


@folds_event(events.StepMark)
def _fold_step_mark(state: RankState, e: events.StepMark) -> None:
    if e.flags & _DEVICE:
        _fold_device_step(state, e)
        return
    window, state.window = state.window, Window()
    _end_host_step(state, e)
    if state.on_device:
        # When the device ends this step, the host may have set the learning rate of a later one
        window.scalars.setdefault("learning_rate", _newest_scalar(state, codes.Scalar.LEARNING_RATE))
        state.enqueued.append((e, window))
    else:
        record_timed_step(state, e, window)


def _end_host_step(state: RankState, e: events.StepMark) -> None:
    """Counts a step that the host has ended."""
    skipped = e.outcome is codes.Outcome.SKIPPED
    state.skipped += skipped
    if e.engine:
        engine = state.engines[e.engine]
        engine.steps += 1
        engine.skipped += skipped
    # In a ring that has wrapped, the first mark may be a continued one
    if not e.flags & _CONTINUED or not state.steps:
        # a restarted collector may have missed the first steps
        earlier = state.meta.get("steps_before", 0)  # steps that ended before the agent was attached
        state.step, state.steps = e.step, max(state.steps + 1, e.step - int(earlier))
        state.step_end_ns = e.t_ns
        for group, (sequence, _) in state.sequences.items():
            of_group = state.group_calls[group]
            of_group.step_from, of_group.step_until = of_group.step_until, sequence
        state.timed_steps += not e.flags & _IDLE
    state.phase = _OTHER
    state.unit = 0
    reshard_all_units(state)
    forget_ended_calls(state, e.start_ns)
    # Takes the bandwidths of the step that has ended, and lets their sums forget a fifth of it
    for (op, group), totals in state.ops.items():
        bandwidth = totals.recent_bus_bandwidth(op, state.group_size(group))
        totals.best_busbw = max(totals.best_busbw, bandwidth or 0.0)
        totals.recent_bytes *= 0.8
        totals.recent_unknown_bytes *= 0.8
        totals.recent_ns *= 0.8
    for path_totals in state.transfers.values():
        # Less than a nanosecond is a faded sum: its quotient is noise, and best keeps it for good
        if path_totals.recent_ns >= 1:
            path_totals.best = max(path_totals.best, path_totals.recent_bytes / path_totals.recent_ns)
        mean_bytes = path_totals.of_step if path_totals.step_bytes is None else path_totals.step_bytes
        path_totals.step_bytes, path_totals.of_step = (0.8 * mean_bytes + 0.2 * path_totals.of_step, 0)
        path_totals.recent_bytes *= 0.8
        path_totals.recent_ns *= 0.8


def _fold_device_step(state: RankState, e: events.StepMark) -> None:
    """Records the step that the device has come to the end of.

    A step whose border was lost, and the one after it, keep the host's times.
    """
    window, state.device_window = state.device_window, Window()
    state.arrivals += state.step_arrivals
    state.step_arrivals.clear()
    # After a lost border the device's window holds two steps, so neither has times of its own
    is_after_gap = bool(state.enqueued) and state.enqueued[0][0].step < e.step
    while state.enqueued and state.enqueued[0][0].step < e.step + is_after_gap:
        record_by_host(state)
    if state.enqueued and state.enqueued[0][0].step == e.step:
        _, counted = state.enqueued.popleft()
        # The step that the host has counted, with what the device did in it
        counted.launch_ns, counted.phase_ns = counted.phase_ns, window.phase_ns
        counted.starved_ns = window.starved_ns
        counted.late_ns += window.late_ns
        counted.follow(window)
        record_timed_step(state, e, counted)


def record_by_host(state: RankState) -> None:
    """Records the oldest step whose end on the device is not known, at the time of the host."""
    mark, window = state.enqueued.popleft()
    # The host begins a step before the device ends the last one: uncut, both count the same time
    start = max(mark.start_ns, state.recorded_ns)
    record_timed_step(state, mark._replace(start_ns=start, t_ns=max(mark.t_ns, start)), window)


def record_timed_step(state: RankState, e: events.StepMark, window: Window) -> None:
    """Adds a step of which the times are known to the history and the sums."""
    previous = state.history[-1] if state.history else None
    continued = bool(e.flags & _CONTINUED) and previous is not None
    state.device_steps += not (continued or e.flags & _IDLE)
    start = previous.start_ns if continued and previous else e.start_ns
    summary = _make_step_summary(state, e, start, window)
    spent_ns = e.t_ns - e.start_ns
    state.recorded_ns = e.t_ns
    state.step_ns += spent_ns
    state.ledger.since_save_ns += spent_ns - min(spent_ns, window.silent_ns)
    state.ledger.unsaved_steps += not continued
    state.phase_ns = [a + b for a, b in zip(state.phase_ns, window.phase_ns, strict=True)]
    state.phase_ns[_OTHER] += max(0, spent_ns - sum(window.phase_ns[1:]))
    if continued and previous:
        # Two optimizers of the same step have one summary
        sums: dict[str, Any] = {n: getattr(previous, n) + getattr(summary, n) for n in _SUMMED}
        peaks: dict[str, Any] = {n: max(getattr(previous, n), getattr(summary, n)) for n in _PEAKS}
        # Not strict: a part without the split by phase leaves the whole step without it
        exposed = zip(previous.phase_exposed_ns, summary.phase_exposed_ns, strict=False)
        state.history[-1] = replace(
            previous,
            **sums,
            **peaks,
            end_ns=summary.end_ns,
            phase_ns=tuple(a + b for a, b in zip(previous.phase_ns, summary.phase_ns, strict=True)),
            phase_exposed_ns=tuple(a + b for a, b in exposed),
            launch_ns=tuple(a + b for a, b in zip(previous.launch_ns, summary.launch_ns, strict=False)),
            skipped=previous.skipped or summary.skipped,
            loss=summary.loss if summary.loss is not None else previous.loss,
            grad_norm=summary.grad_norm if summary.grad_norm is not None else previous.grad_norm,
        )
        if state.last_windows:
            window.follow(state.last_windows.pop())
    else:
        if previous is not None:
            add_ledger_step(state.ledger, previous)  # DDP's times of a step come after it
        state.history.append(summary)
        state.step_bucket_counts[bisect_left(STEP_BUCKETS, summary.seconds)] += 1
        _pair_control_step(state)
    state.last_windows.append(window)


def _make_step_summary(state: RankState, e: events.StepMark, start: int, window: Window) -> StepSummary:
    communication_ns, exposed_ns = window.communicated_ns()
    phases = list(window.phase_ns)
    phases[_OTHER] = max(0, e.t_ns - e.start_ns - sum(phases[1:]))
    memory, host = state.memory, state.host
    summary = StepSummary(
        step=e.step,
        start_ns=start,
        end_ns=e.t_ns,
        idle=bool(e.flags & _IDLE),
        micro_steps=e.micro_steps,
        phase_ns=tuple(phases),
        collectives=window.collectives,
        collective_bytes=window.nbytes,
        communication_ns=communication_ns,
        exposed_ns=exposed_ns,
        # A window without a sample has -1: the sample of an earlier step stands in
        allocated_bytes=max(window.allocated, memory.allocated_bytes if memory else -1),
        reserved_bytes=max(window.reserved, memory.reserved_bytes if memory else -1),
        rss_bytes=max(window.rss, host.rss_bytes if host else -1),
        skipped=e.outcome is codes.Outcome.SKIPPED,
        offload_blocked_ns=window.offload_ns,
        phase_exposed_ns=tuple(window.phase_exposed_ns),
        late_gather_ns=window.late_ns,
        other_bytes=_other_device_bytes(state),
        untimed=_untimed_count(state, window),
        silent_ns=window.silent_ns,
        starved_ns=window.starved_ns,
        launch_ns=tuple(window.launch_ns),
        samples=window.samples,
        tokens=window.tokens,
        # The window last: its own learning rate must win over the newest
        **{"learning_rate": _newest_scalar(state, codes.Scalar.LEARNING_RATE), **window.scalars},
    )
    if not state.on_virtual_device:
        return summary
    return replace(
        summary, idle=True, communication_ns=0, exposed_ns=0, phase_exposed_ns=(), launch_ns=(),
        starved_ns=0,
    )  # fmt: skip


def _untimed_count(state: RankState, window: Window) -> int:
    """1 also where nothing was seen and a group is written in Python, whose methods no hook sees."""
    if window.timed:
        return max(0, window.collectives - window.timed)
    hides = any(facts.get("in_python") for facts in state.groups.values())
    return max(window.collectives, int(hides))


def _newest_scalar(state: RankState, scalar: codes.Scalar) -> float | None:
    """The newest value: the learning rate is only written when it has changed."""
    totals = state.scalars.get(scalar)
    return totals.value if totals is not None and math.isfinite(totals.value) else None


def _other_device_bytes(state: RankState) -> int:
    """Returns device bytes beyond what the allocator had reserved, by the driver; -1: unknown."""
    device = state.memory_peak
    if device is None or device.free_bytes < 0 or device.capacity_bytes < 0:
        return -1
    return max(0, device.capacity_bytes - device.free_bytes - state.reserved_at_peak)


_SUMMED = (
    "collectives", "collective_bytes", "communication_ns", "exposed_ns", "offload_blocked_ns",
    "late_gather_ns", "untimed", "silent_ns", "starved_ns",
)  # fmt: skip
_PEAKS = (
    "allocated_bytes", "reserved_bytes", "rss_bytes", "other_bytes", "samples", "tokens",
)  # fmt: skip


def _pair_control_step(state: RankState) -> None:
    """Keeps a control step and the mean of its neighbours, once the step after it has ended."""
    if len(state.history) < 3:
        return
    previous, idle, next_step = state.history[-3], state.history[-2], state.history[-1]
    if idle.idle and not previous.idle and not next_step.idle:
        neighbours = (previous.end_ns - previous.start_ns + next_step.end_ns - next_step.start_ns) // 2
        state.idle_pairs.append((idle.end_ns - idle.start_ns, neighbours))


# ---- folds the marks of FSDP units and ZeRO-3 parameters ----------------------------------------

_AHEAD = int(codes.Flag.AHEAD)


@folds_event(events.UnitMark)
def _fold_unit_mark(state: RankState, e: events.UnitMark) -> None:
    unit = state.unit_totals[e.unit]
    state.phase = e.phase
    if e.event is codes.UnitEvent.UNSHARD:
        unit.unshards += 1
        state.unit = e.unit
        # ZeRO-3 gathers parameters one by one and reports their sum itself
        if e.gathered_bytes:
            state.unsharded_now = e.gathered_bytes
        else:
            nbytes = state.unit_bytes.get(e.unit, 0)
            # A unit may be unsharded again without a mark that it was freed: it counts one time
            state.unsharded_now += nbytes - state.unsharded.get(e.unit, 0)
            state.unsharded[e.unit] = nbytes
        # Without this test the peak is 0 where units do not report their size, instead of unknown
        if state.unsharded_now:
            state.unsharded_peak = max(state.unsharded_peak, state.unsharded_now)
        # FSDP's marks have no bytes: with a key here, its all-gathers would count as late gathers
        if e.nbytes:
            state.gathers.setdefault(bool(e.flags & _AHEAD), [0, 0])[0] += e.nbytes
    elif e.event is codes.UnitEvent.RESHARD:
        state.unsharded_now -= state.unsharded.pop(e.unit, 0)
    if e.allocated_bytes >= 0:
        unit.peak_allocated_bytes = max(unit.peak_allocated_bytes, e.allocated_bytes)
        state.window.allocated = max(state.window.allocated, e.allocated_bytes)


def reshard_all_units(state: RankState) -> None:
    """Counts all units as freed: after backward they are, and some backends send no mark for each."""
    state.unsharded.clear()
    state.unsharded_now = 0


def unit_rows(state: RankState) -> tuple[UnitRow, ...]:
    """The units, the most exposed first."""
    ordered = sorted(state.unit_totals.items(), key=lambda item: -item[1].exposed_ns)
    return tuple(
        UnitRow(
            fqn=state.units.get(number, f"unit {number}"),
            unshards=totals.unshards,
            exposed_seconds=totals.exposed_ns / 1e9,
            peak_allocated_bytes=totals.peak_allocated_bytes,
        )
        for number, totals in ordered[:256]
        if number
    )


# ---- folds what the stages of a pipeline compute, and makes a rank's row of the pipeline --------

_MAX_ACTIONS = 20_000


@folds_event(events.StageRun)
def _fold_stage_run(state: RankState, e: events.StageRun) -> None:
    pipeline = state.pipeline
    call = pipeline.now
    waited, pipeline.waited_ns = pipeline.waited_ns, 0
    if e.action is codes.StageAction.CALL:
        pipeline.now = PipelineCall()
        # Calls of another schedule may have more actions, and would pass for the only complete ones
        if e.stage != pipeline.schedule:
            pipeline.schedule = e.stage
            pipeline.last.clear()
        if call.order and state.step:  # the first step connects and infers shapes
            pipeline.last.append(call)
        return
    act = Act(e.stage, e.action, e.micro_batch)
    row = call.spent_ns.setdefault((e.stage, e.action), [0, 0])
    if not call.order:
        call.first_ns = e.start_ns
    if waited:
        stage_batch = e.stage, e.micro_batch
        call.waited_ns[stage_batch] = call.waited_ns.get(stage_batch, 0) + waited
    if not call.order or call.order[-1] != act:  # the loss is a second part of a forward
        if len(call.order) < _MAX_ACTIONS:
            call.order.append(act)
        row[0] += 1
    row[1] += e.t_ns - e.start_ns
    call.busy_ns += e.t_ns - e.start_ns
    call.last_ns = e.t_ns


def pipeline_summary_row(state: RankState) -> PipelineRow | None:
    """The rank's part of its pipeline, as means of the last calls; None without a pipeline."""
    facts = state.meta.get("pipeline")
    if not isinstance(facts, dict):
        return None
    order: Sequence[Act] = max((c.order for c in state.pipeline.last), key=len, default=())
    # A call that lost records in the ring is shorter, and would lower the means
    calls = [call for call in state.pipeline.last if len(call.order) == len(order)]
    return PipelineRow(
        schedule=str(facts.get("schedule", "")),
        stages=int(facts.get("stages", 0)),
        micro_batches=int(facts.get("micro_batches", 0)),
        stage_ranks=tuple(int(rank) for rank in facts.get("stage_ranks", ())),
        on_device=facts.get("device", "cpu") != "cpu",
        own=tuple(_pipeline_stage_row(stage, calls) for stage in sorted({act.stage for act in order})),
        order=schedule_notation(order),
        busy_seconds=_mean_seconds([call.busy_ns for call in calls]),
        span_seconds=_mean_seconds([call.span_ns for call in calls]),
    )


def _pipeline_stage_row(stage: int, calls: Sequence[PipelineCall]) -> StageRow:
    seconds = {}
    for action in codes.StageAction:
        runs = [c.spent_ns[stage, action] for c in calls if (stage, action) in c.spent_ns]
        if runs:
            seconds[action.label] = sum(ns for _, ns in runs) / sum(n for n, _ in runs) / 1e9
    chunks = 1 + max(act.micro_batch for act in calls[-1].order if act.stage == stage)
    waits = tuple(
        _mean_seconds([call.waited_ns.get((stage, chunk), 0) for call in calls]) or 0.0
        for chunk in range(chunks)
    )
    return StageRow(stage=stage, seconds=seconds, micro_batch_waits=waits)


def _mean_seconds(values: Sequence[int]) -> float | None:
    return fmean(values) / 1e9 if values else None
