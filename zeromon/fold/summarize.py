"""A rank's state as a frozen :class:`~zeromon.snapshot.RankSnapshot`. Pure: no clock, no file."""

import math
import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from itertools import islice
from typing import Any

from zeromon.fold import ledger
from zeromon.fold.collective_stats import payload_size_rows, traffic_rows as stats_rows
from zeromon.fold.collectives import group_progress_row, in_flight_rows
from zeromon.fold.saved_totals import PathTotals
from zeromon.fold.state import RankState, Spent, folds_event
from zeromon.fold.steps import pipeline_summary_row, unit_rows
from zeromon.memory.reconcile import expected_rows
from zeromon.ring.codes import Path, Phase
from zeromon.ring.events import Loading, LoadingRead
from zeromon.ring.model_metadata import (
    CompiledMetadata,
    GoalMetadata,
    LoaderMetadata,
    ModelMetadata,
    ProcessMetadata,
    TrackersMetadata,
    declared_keys,
)
from zeromon.ring.strategy import Strategy
from zeromon.snapshot import RankSnapshot, StepSummary, rank, step
from zeromon.snapshot.communication import CollectiveRow, GatherRow, overlap_ratio
from zeromon.snapshot.finding import RankTrial, TrialState
from zeromon.snapshot.host import CodeLine
from zeromon.snapshot.levels import UNTIMED
from zeromon.snapshot.memory import DeviceMemory, OutOfMemory, RoleRow, TransferRow
from zeromon.snapshot.noise import block_estimate

_WINDOW = 20
_FRAME_CHARS = 240


def summarize_rank(
    state: RankState, observed: ledger.Observed = ledger.NOTHING_OBSERVED
) -> RankSnapshot:
    """Returns the frozen snapshot of *state* and of what was observed of its process."""
    meta = state.meta
    fields = state.rank_strategy(dimensions := state.rank_dimensions())
    config, comm = _config_record(state), _communication_record(state, observed)
    return RankSnapshot(
        rank=state.rank, local_rank=int(meta.get("local_rank", 0)),
        world_size=int(meta.get("world_size", 1)), pid=state.pid, node=str(meta.get("node", "")),
        device=str(meta.get("device", "cpu")) + rank.VIRTUAL * state.on_virtual_device,
        strategy=state.strategy_label(fields), strategy_fields=fields, dimensions=dimensions,
        status=_status_record(state, observed), steps=_steps_record(state),
        communication=_uncounted_times(comm) if state.on_virtual_device else comm,
        memory=_memory_record(state, observed, config.models), machine=rank.RankMachine(),
        config=config, training=_training_record(state),
        ledger=rank.RankLedger() if state.on_virtual_device else _ledger_record(state, observed),
        agent=_agent_health(state),
        requests=rank.RankRequests(capture=_rank_capture(state), trial=_rank_trial(state)),
    )  # fmt: skip


def _steady_steps(state: RankState) -> list[StepSummary]:
    """The last steps, the oldest first, without the first one of the process."""
    # A deque has no slices, and a copy of all 512 steps at each tick takes longer
    return step.settled_steps(list(islice(reversed(state.history), _WINDOW))[::-1])


def _is_watched(observed: ledger.Observed) -> bool:
    """Returns False after the agent was removed: what the process does now is not known."""
    return not observed.ended.startswith(rank.DETACHED)


def _status_record(state: RankState, observed: ledger.Observed) -> rank.RankStatus:
    return rank.RankStatus(
        alive=observed.alive, ended=observed.ended, failed=observed.failed,
        exception=state.texts.get(state.exit.text, "") if state.exit else "",
        leaving=observed.alive and ledger.has_exited_cleanly(state),
        joined=state.meta.get("attached") is True, started_ns=state.first_event_ns,
        last_event_ns=state.last_event_ns, progress_ns=state.progress_ns,
        stack=_stack_frames(state) if _is_watched(observed) else (),
        pause=_pause_reason(state, observed), halted=observed.halted, lock=observed.lock,
    )  # fmt: skip


def _steps_record(state: RankState) -> rank.RankSteps:
    steady = _steady_steps(state)
    active = [s for s in steady if not s.idle]
    timed = [s for s in active if s.timed]
    return rank.RankSteps(
        last_step=state.step, watched_steps=state.steps,
        median_seconds=statistics.median(s.seconds for s in steady) if steady else None,
        mean_seconds=statistics.fmean(s.seconds for s in timed or active) if active else None,
        total_seconds=state.step_ns / 1e9, duration_buckets=tuple(state.step_bucket_counts),
        recent=tuple(state.history), micro_steps=state.micro_steps,
        backwards_since_step=state.window.micro_steps, skipped_steps=state.skipped,
        phase=state.phase.label, unit=state.units.get(state.unit, ""),
        phase_seconds={phase.label: state.phase_ns[phase] / 1e9 for phase in Phase},
        own_code=_own_code_lines(state),
    )  # fmt: skip


def _communication_record(state: RankState, observed: ledger.Observed) -> rank.RankCommunication:
    active = [s for s in _steady_steps(state) if not s.idle]
    timed = [s for s in active if s.timed]
    collectives = sum(s.collectives for s in active)
    comm_known = [s for s in timed if s.communication_ns >= 0]
    is_known = len(comm_known) >= (1 - UNTIMED) * len(timed)
    communication = sum(s.communication_ns for s in comm_known) if is_known else 0
    exposed = sum(s.exposed_ns for s in timed)
    spent_ns = sum(s.end_ns - s.start_ns for s in timed)
    dims = state.dimension_names()
    return rank.RankCommunication(
        overlap_ratio=overlap_ratio(communication, sum(s.exposed_ns for s in comm_known)),
        exposed_ratio=exposed / spent_ns if spent_ns else None,
        exposed_seconds=exposed / len(timed) / 1e9 if timed else None,
        collectives=_collective_totals_rows(state, dims),
        untimed=_counts_by_label(state, state.untimed),
        untimed_in_cpp=state.in_cpp,
        untimed_ratio=sum(s.untimed for s in active) / collectives if collectives else None,
        unattributed=_counts_by_label(state, state.unattributed),
        in_flight=in_flight_rows(state) if _is_watched(observed) else (),
        groups=tuple(group_progress_row(state, group, dims[group]) for group in sorted(state.groups)),
        units=unit_rows(state),
        traffic=stats_rows(
            state.traffic,
            state.timed_steps,
            state.device_steps,
            {
                number: (state.group_label(number), int(facts.get("nodes", 0)), dims[number])
                for number, facts in state.groups.items()
            },
            state.units,
        ),
        sizes=payload_size_rows(state.sizes, state.traffic),
        gathers=tuple(
            GatherRow(outcome="ahead" if ahead else "late", nbytes=nbytes, exposed_seconds=exposed / 1e9)
            for ahead, (nbytes, exposed) in sorted(state.gathers.items())
        ),
        pipeline=pipeline_summary_row(state),
    )


def _memory_record(
    state: RankState, observed: ledger.Observed, models: tuple[ModelMetadata, ...]
) -> rank.RankMemory:
    roles = tuple(
        RoleRow(
            role=role.label,
            device_bytes=census.device_bytes,
            host_bytes=census.host_bytes,
            disk_bytes=census.disk_bytes,
            pinned_bytes=census.pinned_bytes,
            grown_bytes=census.device_bytes
            + census.host_bytes
            - state.first_roles.get(role, census.device_bytes + census.host_bytes),
        )
        for role, census in sorted(state.roles.items())
    )
    return rank.RankMemory(
        device=_device_memory_row(state),
        host=observed.host,
        rss_bytes=state.host.rss_bytes if state.host else -1,
        host_available_bytes=state.available_bytes,
        pinned_bytes=state.pinned_bytes,
        out_of_memory=_out_of_memory(state),
        roles=roles,
        expected=expected_rows(models, roles, state.unsharded_peak, state.steps),
        unsharded_peak_bytes=state.unsharded_peak,
        transfers=tuple(
            _offload_transfer_row(path, totals) for path, totals in sorted(state.transfers.items())
        ),
    )


def _config_record(state: RankState) -> rank.RankConfig:
    meta = state.meta
    # Those of torch, then those of DeepSpeed's engines
    of_torch = meta.get("models")
    raw = list(of_torch) if isinstance(of_torch, list) else []
    engines = (key for key in sorted(state.meta) if key.startswith("engine"))
    raw += [_metadata_facts_of(state, key).get("model") for key in engines]
    settings: list[rank.Setting] = []
    numbers = {int(k[6:]) for k in state.meta if k.startswith("engine") and k[6:].isdecimal()}
    for number in sorted(numbers):
        for row in _engine_metadata_facts(state, number).get("settings", ()):
            # The name table of a ring may hold anything: one bad row must not cost the snapshot
            if isinstance(row, list) and len(row) == 3:
                name, effective, written_value = (str(cell) for cell in row)
                setting = rank.Setting(
                    engine=number, name=name, effective=effective, written=written_value
                )
                settings.append(setting)
    return rank.RankConfig(
        models=tuple(model for facts in raw if (model := declared_keys(ModelMetadata, facts))),
        planned=declared_keys(ModelMetadata, meta.get("planned")),
        engines=_deepspeed_engine_rows(state),
        settings=tuple(settings),
        loader=declared_keys(LoaderMetadata, meta.get("loader")),
        process=declared_keys(
            ProcessMetadata,
            _metadata_facts_of(state, "process")
            | _metadata_facts_of(state, "initial")
            | _metadata_facts_of(state, "clipping")
            | _metadata_facts_of(state, "ddp")
            | ({} if meta.get("attached") else {"local_world_size": meta.get("local_world_size")}),
        ),
        compiled=declared_keys(CompiledMetadata, meta.get("compiled")),
        trackers=declared_keys(TrackersMetadata, meta),
        goal=declared_keys(GoalMetadata, meta.get("goal")),
    )


def _training_record(state: RankState) -> rank.RankTraining:
    marks = state.meta.get("batches")
    return rank.RankTraining(
        scalars=tuple(
            step.ScalarRow(
                name=scalar.label,
                value=totals.value if math.isfinite(totals.value) else None,
                step=totals.step,
                nonfinite=totals.nonfinite,
                first_nonfinite_step=totals.first_nonfinite_step,
            )
            for scalar, totals in sorted(state.scalars.items())
        ),
        batches=step.BatchRow(**asdict(state.batches)) if state.batches.steps else None,
        loading=loader_totals_row(state),
        out_of_batches=state.out_of_batches,
        first_batches=tuple(m for m in marks if isinstance(m, int)) if isinstance(marks, list) else (),
    )


def _uncounted_times(communication: rank.RankCommunication) -> rank.RankCommunication:
    """The collectives of a rank on a virtual device, without times: they are of this host's cores."""
    rows = (
        replace(
            row, timed=0, seconds=0.0, exposed_seconds=0.0, busbw_bytes_per_second=None,
            best_busbw_bytes_per_second=0.0,
        )
        for row in communication.collectives
    )  # fmt: skip
    units = (replace(row, exposed_seconds=0.0) for row in communication.units)
    return replace(
        communication, collectives=tuple(rows), units=tuple(units), traffic=(), gathers=(), pipeline=None
    )


def _ledger_record(state: RankState, observed: ledger.Observed) -> rank.RankLedger:
    resumed = state.meta.get("resumed_step")
    return rank.RankLedger(
        rows=ledger.ledger_rows(state, observed), totals=ledger.ledger_totals(state, observed),
        activities=ledger.loop_activity_rows(state),
        startup_seconds=state.startup_ns / 1e9 if state.startup_ns >= 0 else None,
        startup_parts={name: ns / 1e9 for name, ns in ledger.startup_ns_by_part(state).items()},
        resumed_step=resumed if isinstance(resumed, int) else None,
        unsaved_seconds=state.ledger.since_save_ns / 1e9 if state.steps else None,
        unsaved_steps=state.ledger.unsaved_steps if state.steps else None,
        checkpoints=state.ledger.checkpoints,
    )  # fmt: skip


def _agent_health(state: RankState) -> rank.AgentHealth:
    virtual = state.on_virtual_device
    cost = None if virtual else measured_cost(state.idle_pairs)
    return rank.AgentHealth(
        dropped=state.dropped, errors=state.errors, overhead_ratio=cost[0] if cost else None,
        overhead_noise_ratio=cost[1] if cost else None,
        accounted_overhead_ratio=None if virtual else accounted_ratio(state.beats, state.meta),
        unseen=tuple(str(name) for name in state.meta.get("unseen", ())),
    )  # fmt: skip


def _metadata_facts_of(state: RankState, name: str) -> dict[str, Any]:
    facts = state.meta.get(name)
    return facts if isinstance(facts, dict) else {}


def _engine_metadata_facts(state: RankState, number: int) -> dict[str, Any]:
    return _metadata_facts_of(state, f"engine{number}")


def _deepspeed_engine_rows(state: RankState) -> tuple[rank.EngineRow, ...]:
    return tuple(
        rank.EngineRow(
            engine=number,
            strategy=str(_engine_metadata_facts(state, number).get("strategy", "")),
            strategy_fields=Strategy.read(_engine_metadata_facts(state, number)),
            steps=totals.steps,
            skipped=totals.skipped,
            collectives=totals.collectives,
            nbytes=totals.nbytes,
            exposed_seconds=totals.exposed_ns / 1e9,
            loss_scale=_finite_or_none(totals.precision.loss_scale) if totals.precision else None,
            hysteresis=totals.precision.hysteresis if totals.precision else -1,
            grad_norm=_finite_or_none(totals.precision.grad_norm) if totals.precision else None,
            nonfinite=totals.nonfinite,
            dropped=_engine_metadata_facts(state, number).get("dropped") is True,
        )
        for number, totals in sorted(state.engines.items())
    )


def _finite_or_none(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def _offload_transfer_row(path: Path, totals: PathTotals) -> TransferRow:
    return TransferRow(
        path=path.label,
        nbytes=totals.nbytes,
        seconds=totals.busy_ns / 1e9,
        blocked_seconds=totals.blocked_ns / 1e9,
        # Long after the last transfer the sums are fractions of a byte and of a nanosecond
        bytes_per_second=totals.recent_bytes / totals.recent_ns * 1e9 if totals.recent_ns >= 1 else None,
        best_bytes_per_second=totals.best * 1e9,
        step_bytes=totals.step_bytes or 0.0,
    )


def _out_of_memory(state: RankState) -> OutOfMemory | None:
    oom = state.oom
    if oom is None:
        return None
    return OutOfMemory(
        requested_bytes=oom.requested_bytes,
        free_bytes=oom.free_bytes,
        total_bytes=oom.total_bytes,
        largest_block_bytes=oom.largest_block_bytes,
        phase=oom.phase.label if oom.phase != Phase.OTHER else "",
    )


def _rank_capture(state: RankState) -> step.RankCapture | None:
    mark = state.trace
    if mark is None:
        return None
    return step.RankCapture(
        request=mark.request,
        state=step.CaptureState(mark.state.label),
        why=state.texts.get(mark.text, ""),
    )


def _rank_trial(state: RankState) -> RankTrial | None:
    mark = state.trial
    if mark is None:
        return None
    return RankTrial(
        number=mark.number,
        state=TrialState(mark.state.label),
        step=mark.step,
        why=state.texts.get(mark.text, ""),
        undo_seconds=mark.cost_ns / 1e9,
    )


def _counts_by_label(state: RankState, counts: dict[int, int]) -> dict[str, int]:
    """Counts by group label; adds up the groups that share a label."""
    by_label = Counter[str]()
    for group, count in counts.items():
        by_label[state.group_label(group)] += count
    return dict(by_label)


def _collective_totals_rows(state: RankState, dims: dict[int, str]) -> tuple[CollectiveRow, ...]:
    """One row per operation and group label; adds up the groups that share a label."""
    rows: dict[tuple[str, str], CollectiveRow] = {}
    for (op, group), totals in sorted(state.ops.items()):
        size = state.group_size(group)
        row = CollectiveRow(
            op=op.label, group=state.group_label(group), group_size=size, count=totals.count,
            timed=totals.timed, nbytes=totals.nbytes, quantized_bytes=totals.quantized_bytes,
            nodes=int(state.groups.get(group, {}).get("nodes", 0)), seconds=totals.duration_ns / 1e9,
            exposed_seconds=totals.exposed_ns / 1e9,
            busbw_bytes_per_second=totals.recent_bus_bandwidth(op, size),
            best_busbw_bytes_per_second=totals.best_busbw, dim=dims.get(group, ""),
        )  # fmt: skip
        key = (row.op, row.group)
        rows[key] = _add_rows(rows[key], row) if key in rows else row
    return tuple(rows.values())


def _add_rows(total: CollectiveRow, row: CollectiveRow) -> CollectiveRow:
    sums: dict[str, Any] = {n: getattr(total, n) + getattr(row, n) for n in _SUMMED}
    return replace(
        total,
        **sums,
        nodes=max(total.nodes, row.nodes),
        # Bandwidths of two groups do not add up: the first that is known stands for both
        busbw_bytes_per_second=total.busbw_bytes_per_second or row.busbw_bytes_per_second,
        best_busbw_bytes_per_second=max(
            total.best_busbw_bytes_per_second, row.best_busbw_bytes_per_second
        ),
    )


_SUMMED = ("count", "timed", "nbytes", "quantized_bytes", "seconds", "exposed_seconds")


def _stack_frames(state: RankState) -> tuple[str, ...]:
    """The Python stack of the training thread while it is stuck; the agent clears it afterwards."""
    frames = state.meta.get("stack", ())
    return tuple(str(frame)[:_FRAME_CHARS] for frame in frames) if isinstance(frames, list) else ()


def _own_code_lines(state: RankState) -> tuple[CodeLine, ...]:
    facts = _metadata_facts_of(state, "own_code")
    samples, rows = facts.get("looks"), facts.get("lines")
    # From the ring's name table: 0 samples would divide by zero below
    if not isinstance(samples, int) or samples < 1 or not isinstance(rows, list):
        return ()
    return tuple(
        CodeLine(place=str(row[0])[:_FRAME_CHARS], communicates=row[1] is True, ratio=row[2] / samples)
        for row in rows
        if isinstance(row, list) and len(row) == 3 and isinstance(row[2], int)
    )


def _pause_reason(state: RankState, observed: ledger.Observed) -> str:
    if observed.halted is not rank.Halt.NONE:  # the newest stack is of the time before
        return IN_DEBUGGER if observed.halted is rank.Halt.TRACED else ""
    # Nobody removes a stale lock: as an expected pause, it is mere information for half an hour
    if observed.lock is not None and observed.lock.is_stale:
        return ""
    pause = expected_pause_reason(_stack_frames(state), evaluating=state.meta.get("evaluating") is True)
    starts = state.steps == 0 and not state.meta.get("attached")
    return pause or (STARTS if starts else "")


def _device_memory_row(state: RankState) -> DeviceMemory | None:
    sample, device, peaks = state.memory, state.memory_peak, state.allocated_peaks
    peak = peaks[-1] if peaks else None
    counted = device.ooms if device else -1
    peak_phase = peak.phase.label if peak else ""
    if peak and peak.phase == Phase.OTHER and peak.step == 1:
        peak_phase = "setup"
    if sample is None:
        return None
    return DeviceMemory(
        allocated_bytes=sample.allocated_bytes, active_bytes=sample.active_bytes,
        reserved_bytes=sample.reserved_bytes, inactive_split_bytes=sample.inactive_split_bytes,
        capacity_bytes=device.capacity_bytes if device else -1,
        free_bytes=device.free_bytes if device else -1, retries=device.retries if device else -1,
        ooms=max(0, counted) + state.new_ooms if state.new_ooms else counted,
        peak_bytes=peak.nbytes if peak else -1, peak_phase=peak_phase,
        peak_step=peak.step if peak else 0,
        peaks=tuple({peak.step: peak.nbytes for peak in peaks}.items()),
    )  # fmt: skip


# ---- what watching costs a rank -----------------------------------------------------------------

_MIN_SECONDS = 5


def accounted_ratio(beats: Sequence[Spent], meta: Mapping[str, Any]) -> float | None:
    """Returns the cost of the agent over the last minute as a share of the time.

    The time is that of steps: it begins after the first one, and ends with the last. None for an agent
    that has not measured its hooks, and before the first seconds.
    """
    record_ns, call_ns = meta.get("record_ns"), meta.get("call_ns")
    training = [beat for beat in beats if beat.step > 0]
    if not isinstance(record_ns, int) or not isinstance(call_ns, int) or not training:
        return None
    first_beat = training[0]
    last_beat = next(beat for beat in training if beat.step == training[-1].step)
    lasted = last_beat.t_ns - first_beat.t_ns
    if lasted < _MIN_SECONDS * 10**9:
        return None
    spent_ns = (
        (last_beat.records - first_beat.records) * record_ns
        + (last_beat.calls - first_beat.calls) * call_ns
        + last_beat.spent_ns
        - first_beat.spent_ns
    )
    return max(0.0, spent_ns / lasted)


def measured_cost(pairs: Iterable[tuple[int, int]]) -> tuple[float, float] | None:
    """Returns by which share steps exceed control steps, and the standard error of that share.

    *pairs*, in order of time, are (control step, mean of its neighbours). The share is the median of the
    ratios, which one checkpoint does not change. The error is that of batch means, because a busy
    neighbour lasts for many pairs (:mod:`zeromon.snapshot.noise`). None: too few pairs for an error.
    """
    ratios = [neighbours / control - 1 for control, neighbours in pairs if control > 0]
    if not ratios:
        return None
    cost = block_estimate(ratios, statistics.median)
    return None if cost.error is None else (cost.value, cost.error)


# ---- what the training itself tells of a rank ---------------------------------------------------


@folds_event(Loading)
def _fold_loader_totals(state: RankState, e: Loading) -> None:
    state.loading = e


@folds_event(LoadingRead)
def _fold_loading_read(state: RankState, e: LoadingRead) -> None:
    state.loading_read = e


def loader_totals_row(state: RankState) -> step.LoadingRow | None:
    """Returns the work and reads for batches; None where no batch was timed."""
    loading, loading_read = state.loading, state.loading_read or LoadingRead(0, 0, 0, 0)
    if loading is None:
        return None
    return step.LoadingRow(
        batches=loading.batches, fetch_seconds=loading.fetch_ns / 1e9,
        transform_seconds=loading.transform_ns / 1e9 if loading.transform_ns else None,
        collate_seconds=loading.collate_ns / 1e9, read_bytes=loading_read.read_bytes,
        disk_bytes=loading_read.disk_bytes, major_faults=loading_read.major_faults,
        nfs_bytes=loading_read.nfs_bytes,
    )  # fmt: skip


# ---- which expected pause a Python stack shows: what takes long in a healthy run as well ---------

_EVALUATES = "evaluates"
STARTS = "has not ended its first step"
IN_DEBUGGER = "is stopped in a debugger"
COMPILES = "compiles"

_EXPECTED = (
    (IN_DEBUGGER, ("/pdb.py:", "/bdb.py:", "/debugpy/", "/pydevd")),
    ("generates text", ("/transformers/generation/utils.py:", "/vllm/entrypoints/llm.py:")),
    (COMPILES, ("/torch/_dynamo/", "/torch/_inductor/", "/triton/compiler/", "/cpp_extension.py:")),
    (
        "saves or loads a checkpoint",
        (
            "/torch/serialization.py:", "/torch/distributed/checkpoint/", "/safetensors/",
            "/checkpoint_engine/", " in save_checkpoint", " in load_checkpoint", " in save_pretrained",
        ),
    ),
)  # fmt: skip
"""Reasons for a pause, and the frames that show them."""

_LOADER = ("/torch/utils/data/dataloader.py:",)


def expected_pause_reason(stack: tuple[str, ...], *, evaluating: bool) -> str:
    """Returns what a rank with *stack* is expected to take long for; "" where the stack shows nothing.

    *evaluating*: whether a model was in evaluation mode when the stack was taken.
    """
    # In order: a debugger that stops within a checkpoint is what the rank waits for
    for reason, marks in _EXPECTED:
        if _shows_mark(stack, marks):
            return reason
    # A DataLoader that is stuck during an evaluation would pass for the evaluation
    return _EVALUATES if evaluating and not waits_for_batch(stack) else ""


def waits_for_batch(stack: tuple[str, ...]) -> bool:
    """Returns True if *stack* shows that the rank waits for a batch of its DataLoader."""
    return _shows_mark(stack, _LOADER)


def _shows_mark(stack: tuple[str, ...], marks: tuple[str, ...]) -> bool:
    return any(mark in frame for frame in stack for mark in marks)
