"""Every Prometheus metric: one line in :data:`METRICS`, documented in ``docs/reference/metrics.md``.

Base units only. Every series has the labels ``run`` and ``rank``, but for those of the collector itself;
others only where they mean something and are bounded (never an FQN). What is unknown is absent, never
0. Pure.
"""

import gzip
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import accumulate
from typing import NamedTuple

from prometheus_client.exposition import choose_encoder, gzip_accepted
from prometheus_client.utils import floatToGoString

from zeromon.base.units import printable
from zeromon.fold.state import STEP_BUCKETS
from zeromon.memory.reconcile import unattributed_memory
from zeromon.readout.dimensions import dim_busbw, dim_exposed, dim_groups, dim_totals
from zeromon.readout.ledger import checkpoint_bytes
from zeromon.readout.throughput import mfu_ratio, own_part, planned_steps
from zeromon.readout.verdict import LEVELS, Health as RunHealth, judge_run
from zeromon.snapshot import CollectiveStatsRow, RankSnapshot, RunSnapshot
from zeromon.snapshot.communication import SIZE_BOUNDS
from zeromon.snapshot.focus import death_cause, roles_of
from zeromon.snapshot.host import Device, Disk, HostMemory
from zeromon.snapshot.memory import DeviceMemory, ExpectedRow
from zeromon.snapshot.rank import EngineRow
from zeromon.snapshot.run import DeathRole, Health

Row = tuple[tuple[str, ...], float | None]
RankRows = Callable[[RankSnapshot], Iterable[Row]]
Rows = Callable[[RunSnapshot], RankRows]
"""Takes what is of the whole run once, and returns how to read the rows of each of its ranks."""


def _by_rank(read_rows: RankRows) -> Rows:
    return lambda run: read_rows


def _no_rows(rank: RankSnapshot) -> Iterable[Row]:
    return ()


class Spec(NamedTuple):
    """A metric: its name, type, unit, what it says, its labels besides run and rank, its rows."""

    name: str
    kind: str
    unit: str
    help: str
    labels: tuple[str, ...]
    rows: Rows = _by_rank(_no_rows)
    own: Callable[[Health], float] | None = None
    """Returns the value of a metric that is the collector's own, and has no labels."""
    lasting: bool = False
    """A gauge about the process of a rank; any other is of the present, and ends with the run."""

    @property
    def family(self) -> str:
        """Its name in OpenMetrics."""
        return self.name.removesuffix("_total").removesuffix("_info")

    @property
    def base_unit(self) -> str:
        """Its unit as OpenMetrics has it, which is the end of the name; "" for any other."""
        unit = self.unit.replace("/", "_per_")
        return unit if unit and self.family.endswith(f"_{unit}") else ""


def rows_of(spec: Spec, run: RunSnapshot) -> RankRows:
    """How to read the rows of a rank of *run*; a gauge has none where the present is over or unknown."""
    if spec.kind != "gauge" or spec.lasting:
        return spec.rows(run)
    if run.ended:
        return _no_rows
    read_rows = spec.rows(run)
    return lambda rank: () if rank.status.detached else read_rows(rank)


def _one_value(read_value: Callable[[RankSnapshot], float | None]) -> Rows:
    return _by_rank(lambda rank: (((), read_value(rank)),))


def _one_run_value(read_value: Callable[[RunSnapshot], float | None]) -> Rows:
    def run_rows(run: RunSnapshot) -> RankRows:
        value_row = (((), read_value(run)),)
        return lambda rank: value_row

    return run_rows


def _first_rank_rows(read_rows: Callable[[RunSnapshot, RankSnapshot], Iterable[Row]]) -> Rows:
    """A metric of the first rank of a run that the collector knows."""
    return lambda run: lambda rank: read_rows(run, rank) if rank is run.ranks[0] else ()


def _allocator_value(read_value: Callable[[DeviceMemory], int]) -> Rows:
    """A figure of the device's allocator; absent on CPU ranks and where it is -1."""
    return _one_value(
        lambda rank: _known_or_none(read_value(rank.memory.device)) if rank.memory.device else None
    )


def _device_value(read_value: Callable[[Device], float | None]) -> Rows:
    return _one_value(lambda rank: read_value(rank.machine.device) if rank.machine.device else None)


def _known_or_none(value: int) -> int | None:
    return value if value >= 0 else None


def _info_rows(rank: RankSnapshot) -> Iterable[Row]:
    facts = (rank.local_rank, rank.world_size, rank.node, rank.device, rank.strategy, rank.pid)
    return ((tuple(str(fact) for fact in facts), 1),)


def _health_rows(run: RunSnapshot, rank: RankSnapshot) -> Iterable[Row]:
    present = judge_run(run).health
    return (((str(health),), int(health is present)) for health in RunHealth)


def _bubble_rows(rank: RankSnapshot) -> Iterable[Row]:
    """Measured and ideal bubble; absent without a pipeline and where they are unknown."""
    bubble = rank.communication.pipeline.bubble if rank.communication.pipeline else None
    if bubble is not None:
        yield ("measured",), bubble.measured_ratio
        yield ("ideal",), bubble.ideal_ratio


def _hang_rows(run: RunSnapshot) -> RankRows:
    labels_of: dict[int, set[tuple[str, ...]]] = {}
    for hang in run.hangs:
        if hang.pause or run.ended:  # expected, or over; an alert asks for any series
            continue
        for role in ("waiting", "missing", "dead"):
            for rank in getattr(hang, role):
                labels_of.setdefault(rank, set()).add((role, hang.kind, hang.op, hang.group))
    return lambda rank: ((labels, 1) for labels in sorted(labels_of.get(rank.rank, ())))


def _in_flight_rows(run: RunSnapshot) -> RankRows:
    def rank_rows(rank: RankSnapshot) -> Iterable[Row]:
        issued_ns = (
            rank.communication.in_flight[0].issued_ns
            # The collective of a dead rank would age for ever
            if rank.communication.in_flight and rank.status.alive
            else None
        )
        return (((), (run.taken_ns - issued_ns) / 1e9 if issued_ns else 0.0),)

    return rank_rows


def _finding_rows(run: RunSnapshot) -> RankRows:
    """The present findings; of a run that has ended only those about how it ended."""
    rules_of: dict[int, set[tuple[str, ...]]] = {}
    for finding in run.findings:
        if not run.ended or finding.rule == "rank_died":
            rules_of.setdefault(finding.rank, set()).add((finding.rule, finding.severity))
    of_all = rules_of.get(-1, set())
    return lambda rank: ((row, 1) for row in of_all | rules_of.get(rank.rank, set()))


def _death_rows(run: RunSnapshot) -> RankRows:
    roles = roles_of(run)
    return lambda rank: (((death_cause(rank), role), 1),) if (role := roles.get(rank.rank)) else ()


def _failed_rows(run: RunSnapshot) -> RankRows:
    stopped = {rank for rank, role in roles_of(run).items() if role is DeathRole.STOPPED}
    return lambda rank: (((), int(rank.status.failed and rank.rank not in stopped)),)


def _engine_values(read_value: Callable[[EngineRow], float | None]) -> Rows:
    return _by_rank(lambda rank: (((str(e.engine),), read_value(e)) for e in rank.config.engines))


def _group_rows(rank: RankSnapshot) -> Iterable[Row]:
    groups = {(c.group, str(c.group_size), str(c.nodes or "")) for c in rank.communication.collectives}
    return ((row, 1) for row in sorted(groups))


def _setting_rows(run: RunSnapshot, rank: RankSnapshot) -> Iterable[Row]:
    # All ranks run with the same configuration: once a node is enough
    for setting in rank.config.settings:
        yield (str(setting.engine), setting.name, setting.effective, setting.written), 1


def _expected_values(read_value: Callable[[ExpectedRow], int | None]) -> Rows:
    return _by_rank(lambda rank: (((row.role,), read_value(row)) for row in rank.memory.expected))


def _role_rows(rank: RankSnapshot) -> Iterable[Row]:
    for row in rank.memory.roles:
        by_pool = (("device", row.device_bytes), ("host", row.host_bytes), ("disk", row.disk_bytes))
        for pool, nbytes in by_pool:
            if nbytes:
                yield (row.role, pool), nbytes


def _link_rows(rank: RankSnapshot) -> Iterable[Row]:
    if rank.communication.links is not None:
        yield ("device",), rank.communication.links.device_bytes_per_second
        yield ("network",), rank.communication.links.network_bytes_per_second
        yield ("host",), rank.communication.links.host_bytes_per_second


def _traffic_values(read_value: Callable[[CollectiveStatsRow], float | None]) -> Rows:
    """A figure of communication, added up over the units: their names are too many for labels."""

    def rank_rows(rank: RankSnapshot) -> Iterable[Row]:
        totals: dict[tuple[str, ...], float] = {}
        for row in rank.communication.traffic:
            value = read_value(row)
            if value is not None:
                key = row.op, row.group, row.phase
                totals[key] = totals.get(key, 0.0) + value
        return sorted(totals.items())

    return _by_rank(rank_rows)


def _size_rows(rank: RankSnapshot) -> Iterable[Row]:
    return (
        (((), float(sum(row.nbytes for row in rank.communication.sizes))),)
        if rank.communication.sizes
        else ()
    )


def _disk_value(read_value: Callable[[Disk], float | None]) -> Rows:
    return _one_value(lambda rank: read_value(rank.machine.disk) if rank.machine.disk else None)


def _host_value(read_value: Callable[[HostMemory], float | None]) -> Rows:
    return _one_value(lambda rank: read_value(rank.memory.host) if rank.memory.host else None)


_HISTOGRAMS: dict[str, tuple[Sequence[float], Callable[[RankSnapshot], Sequence[int]]]] = {
    "zeromon_step_seconds": (STEP_BUCKETS, lambda rank: rank.steps.duration_buckets),
    "zeromon_collective_size_bytes": (
        SIZE_BOUNDS,
        lambda rank: [
            sum(counts) for counts in zip(*(row.calls for row in rank.communication.sizes), strict=True)
        ],
    ),
}
"""Upper bounds, and how to read the counts by them."""


def cumulative_buckets(spec: Spec, rank: RankSnapshot) -> Iterator[tuple[str, int]]:
    """The buckets of a histogram: upper bound, and how many are not above it."""
    bounds, read_counts = _HISTOGRAMS[spec.name]
    labels = (*map(str, bounds), "+Inf")
    return zip(labels, accumulate(read_counts(rank)), strict=True)


# fmt: off
METRICS: tuple[Spec, ...] = (
    Spec("zeromon_rank_info", "info", "", "Identity of a rank: where it runs, and its strategy; the value is always 1.",
         ("local_rank", "world_size", "node", "device", "strategy", "pid"), _by_rank(_info_rows)),
    Spec("zeromon_rank_up", "gauge", "bool", "1 while the process of the rank lives.", (), _one_value(lambda r: int(r.status.alive)), lasting=True),
    Spec("zeromon_rank_failed", "gauge", "bool", "1 when the rank failed, by itself or because of another rank; 0 where a person or a scheduler stopped the run.",
         (), _failed_rows, lasting=True),
    Spec("zeromon_rank_detached", "gauge", "bool", "1 for a rank from which the agent was removed: its other gauges are unknown, and absent.",
         (), _one_value(lambda r: int(r.status.detached)), lasting=True),
    Spec("zeromon_rank_death", "gauge", "bool", "1 for a rank that ended abnormally: its cause (left: without an error, while others needed it), and its role: culprit (ended the run), victim (ended because of another rank) or stopped (by a person or a scheduler).",
         ("cause", "role"), _death_rows, lasting=True),
    Spec("zeromon_run_health", "gauge", "bool", "The verdict on a run, at its first rank: one series per word (healthy, slow, at risk, stalled, dying, dead, stopped, finished, starting, restarting, not watched, unknown, incomplete), of which exactly one is 1.",
         ("health",), _first_rank_rows(_health_rows), lasting=True),
    Spec("zeromon_run_severity", "gauge", "level", "The severity of that verdict, at the first rank: 0 all is well, 1 over or not known, 2 warning, 3 critical.",
         (), _first_rank_rows(lambda run, _: (((), LEVELS[judge_run(run).severity]),)), lasting=True),
    Spec("zeromon_run_started_timestamp_seconds", "gauge", "seconds", "Start of the run, at its first rank, since the epoch.",
         (), _first_rank_rows(lambda run, _: (((), run.started_wall),)), lasting=True),
    Spec("zeromon_restarts_total", "counter", "restarts", "Times that the launcher started the ranks of the run again after they had ended.",
         (), _one_run_value(lambda run: run.last_attempt - 1)),
    Spec("zeromon_steps_total", "counter", "steps", "Optimizer steps of the job; after an attach those before it count by the optimizer's state.", (), _one_value(lambda r: r.steps.last_step)),
    Spec("zeromon_steps_skipped_total", "counter", "steps", "Optimizer steps that were skipped because gradients overflowed.", (), _one_value(lambda r: r.steps.skipped_steps)),
    Spec("zeromon_pipeline_bubble_ratio", "gauge", "ratio", "Idle share of a pipeline's time on the rank: measured, and what the schedule's order leaves idle with the measured times (ideal).", ("basis",), _by_rank(_bubble_rows)),
    Spec("zeromon_micro_steps_total", "counter", "steps", "Backward passes.", (), _one_value(lambda r: r.steps.micro_steps)),
    Spec("zeromon_step_seconds", "histogram", "seconds", "Duration of an optimizer step with all its micro-steps.",
         (), _one_value(lambda r: r.steps.total_seconds)),
    Spec("zeromon_startup_seconds", "gauge", "seconds", "Start-up: from the start of the process to its first step, with imports, process groups, model and first batch; absent where it was not seen.",
         (), _one_value(lambda r: r.ledger.startup_seconds)),
    Spec("zeromon_phase_seconds_total", "counter", "seconds", "Time in each phase of the steps: forward, backward, optimizer, cpu_optimizer (offloaded), data_wait, generation, evaluation, checkpoint, garbage_collection, compile, other.",
         ("phase",), _by_rank(lambda r: (((p,), s) for p, s in r.steps.phase_seconds.items()))),
    Spec("zeromon_ledger_seconds_total", "counter", "seconds", "Every second of the rank since its launch, over all attempts, in one cause: compute, exposed, data, offload, checkpoint, evaluation, generation, garbage_collection, compile, set_up, stall, hang, other, shut_down, dead, lost.",
         ("cause",), _by_rank(lambda r: (((cause,), s) for cause, s in r.ledger.totals.items()))),
    Spec("zeromon_unsaved_seconds", "gauge", "seconds", "Steps since the last checkpoint that was seen to be saved, or since the first step: what a death loses now.",
         (), _one_value(lambda r: r.ledger.unsaved_seconds)),
    Spec("zeromon_checkpoint_bytes_total", "counter", "bytes", "Bytes that the rank saved or loaded in checkpoints, where the file or folder told them.",
         ("activity",), _by_rank(checkpoint_bytes)),
    Spec("zeromon_collectives_total", "counter", "collectives", "Collectives of known operation, timed or only counted.",
         ("op", "group"), _by_rank(lambda r: (((c.op, c.group), c.count) for c in r.communication.collectives))),
    Spec("zeromon_collective_bytes_total", "counter", "bytes", "Payload S of the collectives: for all-gather and reduce-scatter the full, unsharded size.",
         ("op", "group"), _by_rank(lambda r: (((c.op, c.group), c.nbytes) for c in r.communication.collectives))),
    Spec("zeromon_collective_quantized_bytes_total", "counter", "bytes", "Payload of the collectives that was sent in 8 bits (ZeRO++ qwZ and qgZ).",
         ("op", "group"), _by_rank(lambda r: (((c.op, c.group), c.quantized_bytes or None) for c in r.communication.collectives))),
    Spec("zeromon_group_info", "info", "", "A process group: its size, and the number of nodes that it spans (empty when unknown); the value is always 1.",
         ("group", "size", "nodes"), _by_rank(_group_rows)),
    Spec("zeromon_collective_seconds_total", "counter", "seconds", "Time from issue to completion, summed over the timed collectives; absent where none was timed.",
         ("op", "group"), _by_rank(lambda r: (((c.op, c.group), c.seconds or None) for c in r.communication.collectives))),
    Spec("zeromon_collective_exposed_seconds_total", "counter", "seconds", "Exposed communication: time in which collectives blocked the compute stream, on CPU backends the calling thread; absent where no collective was timed.",
         ("op", "group"), _by_rank(lambda r: (((c.op, c.group), c.exposed_seconds if c.seconds else None) for c in r.communication.collectives))),
    Spec("zeromon_collectives_untimed_total", "counter", "collectives", "Collectives that were counted and not timed: issued from C++ (as compiled graphs do), or in a control step.",
         ("group",), _by_rank(lambda r: (((g,), n) for g, n in r.communication.untimed.items()))),
    Spec("zeromon_collectives_untimed_ratio", "gauge", "ratio", "Share of the collectives of the last steps that were not timed, control steps left out; above 0.1 the exposed communication of a step is unknown, and its metrics are absent.",
         (), _one_value(lambda r: r.communication.untimed_ratio)),
    Spec("zeromon_collectives_unattributed_total", "counter", "collectives", "Collectives of unknown operation, counted by sequence number; not part of zeromon_collectives_total.",
         ("group",), _by_rank(lambda r: (((g,), n) for g, n in r.communication.unattributed.items()))),
    Spec("zeromon_collective_busbw_bytes_per_second", "gauge", "bytes/second", "Bus bandwidth over the last steps, as nccl-tests defines it, of collectives whose begin and end are known; the time includes the wait for late ranks.",
         ("op", "group"), _by_rank(lambda r: (((c.op, c.group), c.busbw_bytes_per_second) for c in r.communication.collectives))),
    Spec("zeromon_collective_best_busbw_bytes_per_second", "gauge", "bytes/second", "Highest bus bandwidth of the operation and group so far.",
         ("op", "group"), _by_rank(lambda r: (((c.op, c.group), c.best_busbw_bytes_per_second or None) for c in r.communication.collectives))),
    Spec("zeromon_dim_info", "info", "", "The dimension of a process group: dp, dp_replicate, dp_shard, tp, pp, cp, ep, world (all ranks, use unknown) or other; the value is always 1.",
         ("dim", "group", "size", "nodes"), _by_rank(lambda r: ((row, 1) for row in dim_groups(r)))),
    Spec("zeromon_dim_bytes_total", "counter", "bytes", "Payload S of the collectives in a dimension of the parallelism (dp_shard, tp, ...).",
         ("dim",), _by_rank(lambda r: dim_totals(r, lambda c: c.nbytes))),
    Spec("zeromon_dim_exposed_seconds_total", "counter", "seconds", "Exposed communication in a dimension of the parallelism; absent where more than a tenth of its collectives is not timed.",
         ("dim",), _by_rank(dim_exposed)),
    Spec("zeromon_dim_busbw_bytes_per_second", "gauge", "bytes/second", "Bus bandwidth of all collectives in a dimension of the parallelism together, over about the last ten timed steps.",
         ("dim",), _by_rank(dim_busbw)),
    Spec("zeromon_link_peak_bytes_per_second", "gauge", "bytes/second", "Peak bandwidth of a link in one direction: device (NVLink, else PCIe), network (all adapters of the node), host (PCIe); absent where unknown.",
         ("link",), _by_rank(_link_rows)),
    Spec("zeromon_communication_step_seconds", "gauge", "seconds", "Communication per step, mean over about the last ten timed steps; overlapping collectives count separately.",
         ("op", "group", "phase"), _traffic_values(lambda t: t.seconds or None)),
    Spec("zeromon_communication_step_exposed_seconds", "gauge", "seconds", "Exposed communication per step, mean over about the last ten timed steps.",
         ("op", "group", "phase"), _traffic_values(lambda t: t.exposed_seconds)),
    Spec("zeromon_communication_step_wait_seconds", "gauge", "seconds", "Wait for ranks that arrive later, per step, mean over about the last ten timed steps; absent while no collective is matched.",
         ("op", "group", "phase"), _traffic_values(lambda t: t.wait_seconds)),
    Spec("zeromon_communication_step_transfer_seconds", "gauge", "seconds", "Transfer time per step, mean over about the last ten timed steps: the shortest duration over the ranks.",
         ("op", "group", "phase"), _traffic_values(lambda t: t.transfer_seconds)),
    Spec("zeromon_collective_size_bytes", "histogram", "bytes", "Payload S of the collectives in timed steps, without barriers; collectives issued from C++ count with their mean size.", (), _by_rank(_size_rows)),
    Spec("zeromon_overlap_ratio", "gauge", "ratio", "Share of communication that is hidden behind compute, over the last timed steps; absent without communication, and where it is not known when collectives begin or end.",
         (), _one_value(lambda r: r.communication.overlap_ratio)),
    Spec("zeromon_exposed_communication_ratio", "gauge", "ratio", "Exposed communication as a share of the step, over the last timed steps; absent where too many collectives are not timed.",
         (), _one_value(lambda r: r.communication.exposed_ratio)),
    Spec("zeromon_exposed_communication_error_ratio", "gauge", "ratio", "Relative error of the live exposed time against the last trace on demand of the same steps; absent without a trace.",
         (), _one_value(lambda r: r.requests.check.error_ratio if r.requests.check else None)),
    Spec("zeromon_collective_in_flight_seconds", "gauge", "seconds", "Age of the oldest collective that has not ended; 0 when there is none.", (), _in_flight_rows),
    Spec("zeromon_wait_for_late_rank_seconds", "gauge", "seconds", "Time per step that the rank waits for ranks that arrive later, mean of the last 20 steps.", (), _one_value(lambda r: r.communication.wait_seconds)),
    Spec("zeromon_late_seconds", "gauge", "seconds", "Time per step that the other ranks wait for this rank alone, mean of the last 20 steps.", (), _one_value(lambda r: r.communication.late_seconds)),
    Spec("zeromon_hang", "gauge", "bool", "1 for each rank of a hanging collective, none while a missing rank is in an expected pause: role waiting, missing or dead; kind as in zeromon doctor.",
         ("role", "kind", "op", "group"), _hang_rows),
    Spec("zeromon_gather_bytes_total", "counter", "bytes", "ZeRO-3: unsharded bytes of gathered parameters in timed steps; outcome ahead: prefetched, late: fetched when needed.",
         ("outcome",), _by_rank(lambda r: (((g.outcome,), g.nbytes) for g in r.communication.gathers))),
    Spec("zeromon_gather_exposed_seconds_total", "counter", "seconds", "ZeRO-3: time in which parameter gathers blocked the compute stream, on CPU backends the calling thread.",
         ("outcome",), _by_rank(lambda r: (((g.outcome,), g.exposed_seconds) for g in r.communication.gathers))),
    Spec("zeromon_engine_info", "info", "", "A DeepSpeed engine; the value is always 1.",
         ("engine", "strategy"), _by_rank(lambda r: (((str(e.engine), e.strategy), 1) for e in r.config.engines))),
    Spec("zeromon_engine_steps_total", "counter", "steps", "Optimizer steps of a DeepSpeed engine: its global_steps since zeromon watches it.", ("engine",), _engine_values(lambda e: e.steps)),
    Spec("zeromon_engine_steps_skipped_total", "counter", "steps", "Optimizer steps that a DeepSpeed engine skipped because of an overflow.", ("engine",), _engine_values(lambda e: e.skipped)),
    Spec("zeromon_engine_collectives_total", "counter", "collectives", "Collectives issued while a DeepSpeed engine ran.", ("engine",), _engine_values(lambda e: e.collectives)),
    Spec("zeromon_engine_collective_bytes_total", "counter", "bytes", "Payload S of the collectives issued while a DeepSpeed engine ran.", ("engine",), _engine_values(lambda e: e.nbytes)),
    Spec("zeromon_engine_collective_exposed_seconds_total", "counter", "seconds", "Exposed communication of the collectives issued while a DeepSpeed engine ran.", ("engine",), _engine_values(lambda e: e.exposed_seconds)),
    Spec("zeromon_loss_scale", "gauge", "scale", "Loss scale of fp16 training; absent without loss scaling.", ("engine",), _engine_values(lambda e: e.loss_scale)),
    Spec("zeromon_loss_scale_hysteresis", "gauge", "overflows", "Number of overflows until the loss scale is lowered.", ("engine",), _engine_values(lambda e: _known_or_none(e.hysteresis))),
    Spec("zeromon_gradient_norm", "gauge", "norm", "Norm of the gradients before clipping, where it is available without a read from the device.", ("engine",), _engine_values(lambda e: e.grad_norm)),
    Spec("zeromon_training_scalar", "gauge", "", "Newest loss, gradient norm (before clipping) and learning rate, where a logger of the process or the optimizer has them on the host; absent while infinite or NaN.",
         ("name",), _by_rank(lambda r: (((s.name,), s.value) for s in r.training.scalars))),
    Spec("zeromon_training_scalar_nonfinite_total", "counter", "steps", "Steps in which it was infinite or NaN.", ("name",), _by_rank(lambda r: (((s.name,), s.nonfinite) for s in r.training.scalars))),
    Spec("zeromon_samples_total", "counter", "samples", "Samples that the model of the rank was called with in training; ranks that get the same batch (tensor and context parallelism) divide it, so the sum over ranks is that of the job.", (), _one_value(lambda r: own_part(r, "samples"))),
    Spec("zeromon_tokens_total", "counter", "tokens", "Tokens of such batches, without padding where the attention mask is on the host; ranks of tensor parallelism divide them. Absent where batches hold none.", (), _one_value(lambda r: own_part(r, "tokens"))),
    Spec("zeromon_mfu_ratio", "gauge", "ratio", "Model FLOPs utilization of the run in the last steps: FLOPs by the shapes of the model over the dense peak of its devices; absent where one of them is unknown.", (), _one_run_value(mfu_ratio)),
    Spec("zeromon_planned_steps", "gauge", "steps", "Steps after which the run ends, by its trainer or zeromon run --steps; with the length of an epoch alone, the last step of the epoch.", (), lambda run: lambda r: (((), planned_steps(run, r)),)),
    Spec("zeromon_gradients_nonfinite_total", "counter", "steps", "Steps whose gradient norm was infinite or NaN.", ("engine",), _engine_values(lambda e: e.nonfinite)),
    Spec("zeromon_setting_info", "info", "", "A setting of the configuration: effective value, and written value (empty: default); from the lowest rank of the node. The value is always 1.",
         ("engine", "name", "effective", "written"), _first_rank_rows(_setting_rows)),
    Spec("zeromon_offload_bytes_total", "counter", "bytes", "Bytes of offloaded state that were moved, by path: device_to_host, host_to_device, disk_read, disk_write.",
         ("path",), _by_rank(lambda r: (((t.path,), t.nbytes) for t in r.memory.transfers))),
    Spec("zeromon_offload_seconds_total", "counter", "seconds", "Time in which offloaded state was moving; absent where only the bytes are known.",
         ("path",), _by_rank(lambda r: (((t.path,), t.seconds or None) for t in r.memory.transfers))),
    Spec("zeromon_offload_blocked_seconds_total", "counter", "seconds", "Time in which moving offloaded state blocked the training thread.",
         ("path",), _by_rank(lambda r: (((t.path,), t.blocked_seconds if t.seconds else None) for t in r.memory.transfers))),
    Spec("zeromon_offload_bytes_per_second", "gauge", "bytes/second", "Achieved rate of moving offloaded state over the last steps; a lower bound.",
         ("path",), _by_rank(lambda r: (((t.path,), t.bytes_per_second) for t in r.memory.transfers))),
    Spec("zeromon_offload_best_bytes_per_second", "gauge", "bytes/second", "Highest achieved rate of moving offloaded state so far.",
         ("path",), _by_rank(lambda r: (((t.path,), t.best_bytes_per_second or None) for t in r.memory.transfers))),
    Spec("zeromon_offload_peak_bytes_per_second", "gauge", "bytes/second", "Peak rate of the path: the PCIe link, or the cgroup's limit of a disk; absent where unknown.",
         ("path",), _by_rank(lambda r: (((t.path,), r.path_peak(t.path)[0]) for t in r.memory.transfers))),
    Spec("zeromon_memory_role_bytes", "gauge", "bytes", "Memory by ZeRO role and place (device, host, disk) at the last census, before an optimizer step.",
         ("role", "place"), _by_rank(_role_rows)),
    Spec("zeromon_memory_role_plain_bytes", "gauge", "bytes", "Analytical bytes of a role by the ZeRO paper, on device, host and disk together.",
         ("role",), _expected_values(lambda e: e.plain_bytes)),
    Spec("zeromon_memory_role_predicted_bytes", "gauge", "bytes", "Predicted bytes of a role: the analytical bytes plus the additions of framework and settings; absent where unknown.",
         ("role",), _expected_values(lambda e: e.predicted_bytes)),
    Spec("zeromon_memory_role_unexplained_bytes", "gauge", "bytes", "Measured minus predicted bytes of a role; absent where no census reaches.",
         ("role",), _expected_values(lambda e: e.unexplained_bytes)),
    Spec("zeromon_memory_rest_bytes", "gauge", "bytes", "Bytes that no role accounts for, by kind: kept (by each step of a growth), activation_temp, reserved_unallocated, non_torch (device), other (host).",
         ("kind", "place"), _by_rank(lambda r: (((m.kind, m.place), m.nbytes) for m in unattributed_memory(r)))),
    Spec("zeromon_memory_allocated_bytes", "gauge", "bytes", "Caching allocator: bytes in tensors.", (), _allocator_value(lambda m: m.allocated_bytes)),
    Spec("zeromon_memory_active_bytes", "gauge", "bytes", "Caching allocator: bytes that are allocated, or freed and still in use by a stream.", (), _allocator_value(lambda m: m.active_bytes)),
    Spec("zeromon_memory_reserved_bytes", "gauge", "bytes", "Caching allocator: bytes taken from the device.", (), _allocator_value(lambda m: m.reserved_bytes)),
    Spec("zeromon_memory_inactive_split_bytes", "gauge", "bytes", "Caching allocator: free parts of split blocks, a measure of fragmentation.", (), _allocator_value(lambda m: m.inactive_split_bytes)),
    Spec("zeromon_memory_capacity_bytes", "gauge", "bytes", "Device memory that this process may use.", (), _allocator_value(lambda m: m.capacity_bytes)),
    Spec("zeromon_memory_headroom_bytes", "gauge", "bytes", "Device memory that is left: capacity - (reserved + non-torch).", (), _allocator_value(lambda m: m.headroom_bytes)),
    Spec("zeromon_memory_allocation_retries_total", "counter", "retries", "Caching allocator: allocations that succeeded only after a flush of the cache.", (), _allocator_value(lambda m: m.retries)),
    Spec("zeromon_memory_out_of_memory_total", "counter", "errors", "Caching allocator: allocations that failed.", (), _allocator_value(lambda m: m.ooms)),
    Spec("zeromon_host_memory_rss_bytes", "gauge", "bytes", "Resident set size of the process of the rank.", (), _one_value(lambda r: _known_or_none(r.memory.rss_bytes))),
    Spec("zeromon_host_memory_limit_bytes", "gauge", "bytes", "Tightest memory limit of the cgroups of the rank; absent without a limit.", (), _host_value(lambda h: _known_or_none(h.limit_bytes))),
    Spec("zeromon_host_memory_available_bytes", "gauge", "bytes", "Available host memory of the node (MemAvailable).", (), _one_value(lambda r: _known_or_none(r.memory.host_available_bytes))),
    Spec("zeromon_host_memory_headroom_bytes", "gauge", "bytes", "Host memory that the tightest cgroup, or the machine, can still give.", (), _host_value(lambda h: _known_or_none(h.headroom_bytes))),
    Spec("zeromon_host_oom_kills_total", "counter", "kills", "Processes in the cgroup of the rank that the kernel killed for memory since zeromon watches the run.", (), _host_value(lambda h: _known_or_none(h.oom_kills))),
    Spec("zeromon_cpu_wait_ratio", "gauge", "ratio", "Share of the last 20 steps, and at least five seconds, in which the main thread of the rank was runnable but waited for a CPU.", (), _one_value(lambda r: r.machine.pressure.cpu_wait_ratio if r.machine.pressure else None)),
    Spec("zeromon_major_faults_per_second", "gauge", "faults/second", "Page faults of the rank that needed a read from disk, over the last ten seconds.", (), _one_value(lambda r: r.machine.pressure.major_faults_per_second if r.machine.pressure else None)),
    Spec("zeromon_host_memory_pinned_bytes", "gauge", "bytes", "Page-locked bytes held by torch's host allocator.", (), _one_value(lambda r: _known_or_none(r.memory.pinned_bytes))),
    Spec("zeromon_oom_risk_ratio", "gauge", "ratio", "Risk of running out of memory, by pool (device, host): 0 is no end in sight, 1 is out of memory now.",
         ("pool",), _by_rank(lambda r: (((k.pool,), k.ratio) for k in r.memory.risks if r.status.alive))),
    Spec("zeromon_oom_steps_left", "gauge", "steps", "Steps until the memory capacity is reached; absent without a trend.",
         ("pool", "cause"), _by_rank(lambda r: (((k.pool, k.cause), k.steps_left) for k in r.memory.risks if r.status.alive and k.steps_left is not None))),
    Spec("zeromon_finding", "gauge", "bool", "1 for each present finding; zeromon rule explains a rule.", ("rule", "severity"), _finding_rows, lasting=True),
    Spec("zeromon_events_dropped_total", "counter", "records", "Records of the rank that were overwritten or damaged before the collector read them.", (), _one_value(lambda r: r.agent.dropped)),
    Spec("zeromon_agent_errors_total", "counter", "errors", "Errors inside the agent's hooks; training is not affected.", (), _one_value(lambda r: r.agent.errors)),
    Spec("zeromon_agent_accounted_overhead_ratio", "gauge", "ratio", "Cost of the agent as a share of the last minute, estimated by its calls, records and samples.", (), _one_value(lambda r: r.agent.accounted_overhead_ratio)),
    Spec("zeromon_agent_overhead_ratio", "gauge", "ratio", "Cost of the agent: duration of steps with hooks over control steps, minus 1; compare it with its noise.", (), _one_value(lambda r: r.agent.overhead_ratio)),
    Spec("zeromon_agent_overhead_noise_ratio", "gauge", "ratio", "Standard error of zeromon_agent_overhead_ratio.", (), _one_value(lambda r: r.agent.overhead_noise_ratio)),
    Spec("zeromon_disk_free_bytes", "gauge", "bytes", "Free space of the file system that state is offloaded to.", (), _disk_value(lambda d: d.free_bytes)),
    Spec("zeromon_disk_total_bytes", "gauge", "bytes", "Size of the file system that state is offloaded to.", (), _disk_value(lambda d: d.total_bytes)),
    Spec("zeromon_disk_device_read_bytes_total", "counter", "bytes", "/proc/diskstats: bytes that all processes read from the offload disk since boot.", (), _disk_value(lambda d: d.device_read_bytes)),
    Spec("zeromon_disk_device_written_bytes_total", "counter", "bytes", "/proc/diskstats: bytes that all processes wrote to the offload disk since boot.", (), _disk_value(lambda d: d.device_written_bytes)),
    Spec("zeromon_disk_device_busy_seconds_total", "counter", "seconds", "/proc/diskstats: time in which the offload disk had requests under way.", (), _disk_value(lambda d: d.device_busy_seconds)),
    Spec("zeromon_disk_device_queue_seconds_total", "counter", "seconds", "/proc/diskstats: time of all requests to the offload disk, summed; divided by the busy seconds it is the mean queue depth.", (), _disk_value(lambda d: d.device_queue_seconds)),
    Spec("zeromon_process_disk_read_bytes_total", "counter", "bytes", "/proc/PID/io: bytes that the process of the rank read from storage.", (), _disk_value(lambda d: d.process_read_bytes)),
    Spec("zeromon_process_disk_written_bytes_total", "counter", "bytes", "/proc/PID/io: bytes that the process of the rank wrote to storage.", (), _disk_value(lambda d: d.process_written_bytes)),
    Spec("zeromon_device_memory_used_bytes", "gauge", "bytes", "Memory in use on the device by all processes.", (), _device_value(lambda d: d.used_bytes)),
    Spec("zeromon_device_memory_total_bytes", "gauge", "bytes", "Total memory of the device.", (), _device_value(lambda d: d.total_bytes)),
    Spec("zeromon_device_utilization_ratio", "gauge", "ratio", "Share of time with a kernel running.", (), _device_value(lambda d: d.utilization_ratio)),
    Spec("zeromon_device_memory_own_bytes", "gauge", "bytes", "Memory in use on the device by the process of the rank, where the driver tells it.", (), _device_value(lambda d: d.own_bytes)),
    Spec("zeromon_device_sm_active_ratio", "gauge", "ratio", "NVML GPM: share of time with a streaming multiprocessor in use, mean of all.", (), _device_value(lambda d: d.sm_active_ratio)),
    Spec("zeromon_device_tensor_active_ratio", "gauge", "ratio", "NVML GPM: share of time with the tensor cores in use.", (), _device_value(lambda d: d.tensor_active_ratio)),
    Spec("zeromon_device_dram_active_ratio", "gauge", "ratio", "NVML GPM: share of the bandwidth of device memory in use.", (), _device_value(lambda d: d.dram_active_ratio)),
    Spec("zeromon_device_energy_joules_total", "counter", "joules", "Energy that the device has used since the driver was loaded.", (), _device_value(lambda d: d.energy_joules)),
    Spec("zeromon_host_energy_joules_total", "counter", "joules", "Energy that all processors and DRAM of the node have used since the run was first watched (RAPL), alike on each of its ranks.",
         (), _one_run_value(lambda run: run.energy.host_joules if run.energy else None)),
    Spec("zeromon_device_power_watts", "gauge", "watts", "Power draw of the device.", (), _device_value(lambda d: d.power_watts)),
    Spec("zeromon_device_temperature_celsius", "gauge", "celsius", "Temperature of the device.", (), _device_value(lambda d: d.temperature_celsius)),
    Spec("zeromon_device_pcie_receive_bytes_per_second", "gauge", "bytes/second", "PCIe traffic to the device.", (), _device_value(lambda d: d.pcie_receive_bytes_per_second)),
    Spec("zeromon_device_pcie_transmit_bytes_per_second", "gauge", "bytes/second", "PCIe traffic from the device.", (), _device_value(lambda d: d.pcie_transmit_bytes_per_second)),
    Spec("zeromon_device_nvlink_receive_bytes_per_second", "gauge", "bytes/second", "NVLink traffic to the device, all links.", (), _device_value(lambda d: d.nvlink_receive_bytes_per_second)),
    Spec("zeromon_device_nvlink_transmit_bytes_per_second", "gauge", "bytes/second", "NVLink traffic from the device, all links.", (), _device_value(lambda d: d.nvlink_transmit_bytes_per_second)),
    Spec("zeromon_device_throttled", "gauge", "bool", "1 for each present reason for throttled clocks.",
         ("reason",), _by_rank(lambda r: (((t,), 1) for t in (r.machine.device.throttle_reasons if r.machine.device else ())))),
    Spec("zeromon_device_ecc_errors_total", "counter", "errors", "Uncorrected ECC errors since the driver was loaded.", (), _device_value(lambda d: d.ecc_errors)),
    Spec("zeromon_device_xid", "gauge", "code", "Code of the newest Xid error; absent without one.", (), _device_value(lambda d: d.xid)),
    Spec("zeromon_collector_runs", "gauge", "runs", "Collector (no run and rank): live runs that it follows.", (), own=lambda h: h.runs),
    Spec("zeromon_collector_ticks_total", "counter", "ticks", "Collector: number of ticks, in each of which it reads all rings; about one per second.", (), own=lambda h: h.ticks),
    Spec("zeromon_collector_tick_seconds_total", "counter", "seconds", "Collector: time spent in ticks.", (), own=lambda h: h.busy_seconds),
    Spec("zeromon_collector_last_tick_timestamp_seconds", "gauge", "seconds", "Collector: time of the last tick, since the epoch; all other metrics are of that time.", (), own=lambda h: h.last_tick_wall),
)
# fmt: on


# ---- the answer of ``/metrics``: the Prometheus text format or OpenMetrics, compressed on request ---

# prometheus-client decides by the Accept header. It would take a second and more for many ranks (it
# makes an object and sorts the labels of each series), so the rows of
# :mod:`zeromon.export.prometheus.metrics` are written here, behind prefixes that are kept from one
# scrape to the next.

_FORGET_AFTER = 256
GZIP_LEVEL = 1

_Prefixes = dict[tuple[str, ...], str]


class Exposition:
    """``/metrics``, computed when it is scraped."""

    def __init__(self) -> None:
        self._writer = Writer()
        self._one_at_a_time = threading.Lock()

    def answer(
        self, runs: Sequence[RunSnapshot], health: Health | None, accept: str, encodings: str
    ) -> tuple[list[tuple[str, str]], bytes]:
        """Headers and body about *runs* and their collector, by what a request accepts."""
        _, content_type = choose_encoder(accept)
        is_openmetrics = content_type.startswith("application/openmetrics-text")
        # Two scrapes at once would replace and fill the same prefixes
        with self._one_at_a_time:
            body = self._writer.write(runs, health, openmetrics=is_openmetrics)
        headers = [("Content-Type", content_type), ("Vary", "Accept, Accept-Encoding")]
        if gzip_accepted(encodings):
            body = gzip.compress(body, GZIP_LEVEL, mtime=0)
            headers.append(("Content-Encoding", "gzip"))
        return [*headers, ("Content-Length", str(len(body)))], body


class Writer:
    """Writes many series, each behind a prefix that was made when it came first.

    Prefixes of ranks that are gone are dropped at once, and now and then all of them.
    """

    def __init__(self) -> None:
        self._specs = [spec for spec in METRICS if spec.own is None]
        self._own = [spec for spec in METRICS if spec.own is not None]
        self._known: dict[tuple[str, int], list[_Prefixes]] = {}
        self._scrapes = 0

    def write(self, runs: Iterable[RunSnapshot], health: Health | None, *, openmetrics: bool) -> bytes:
        """The series of *runs* and of their collector."""
        self._scrapes += 1
        cached = {} if self._scrapes % _FORGET_AFTER == 0 else self._known
        self._known = {}
        blocks: list[list[str]] = [[] for _ in self._specs]
        for run in runs:
            readers = [rows_of(spec, run) for spec in self._specs]
            for rank in run.ranks:
                key = (run.run, rank.rank)
                prefixes = cached.get(key) or [{} for _ in self._specs]
                self._known[key] = prefixes
                series = zip(self._specs, readers, blocks, prefixes, strict=True)
                for spec, read_rows, block, mine in series:
                    add = _add_histogram if spec.kind == "histogram" else _add_samples
                    add(spec, run, rank, read_rows(rank), block, mine)
        samples: list[str] = []
        for spec, block in zip(self._specs, blocks, strict=True):
            if block:
                samples.append(metric_head(spec, openmetrics=openmetrics))
                samples += block
        for spec in self._own:
            if health is not None and spec.own is not None:
                samples.append(metric_head(spec, openmetrics=openmetrics))
                samples.append(f"{spec.name} {format_number(spec.own(health))}\n")
        if openmetrics:
            # Without it, an OpenMetrics parser takes the answer for cut short, and fails the scrape
            samples.append("# EOF\n")
        return "".join(samples).encode()


def _add_samples(
    spec: Spec, run: RunSnapshot, rank: RankSnapshot, rows: Iterable[Row], block: list[str],
    prefixes: _Prefixes,
) -> None:  # fmt: skip
    for values, value in rows:
        if value is not None:
            prefix = prefixes.get(values)
            if prefix is None:
                labels = zip(spec.labels, values, strict=True)
                prefix = prefixes[values] = sample_line_prefix(spec.name, run, rank, *labels)
            block.append(f"{prefix}{format_number(value)}\n")


def _add_histogram(
    spec: Spec, run: RunSnapshot, rank: RankSnapshot, rows: Iterable[Row], block: list[str],
    prefixes: _Prefixes,
) -> None:  # fmt: skip
    for _, total in rows:
        if not prefixes:
            for bound, _ in cumulative_buckets(spec, rank):
                prefixes[bound,] = sample_line_prefix(f"{spec.name}_bucket", run, rank, ("le", bound))
            for suffix in ("count", "sum"):
                prefixes[suffix,] = sample_line_prefix(f"{spec.name}_{suffix}", run, rank)
        count = 0
        for bound, count in cumulative_buckets(spec, rank):
            block.append(f"{prefixes[bound,]}{count}\n")
        block.append(f"{prefixes['count',]}{count}\n")
        block.append(f"{prefixes['sum',]}{format_number(total or 0.0)}\n")


def sample_line_prefix(name: str, run: RunSnapshot, rank: RankSnapshot, *labels: tuple[str, str]) -> str:
    """A sample's line up to its number."""
    pairs = (("run", run.run), ("rank", str(rank.rank)), *labels)
    return f"{name}{{{','.join(f'{label}={quote_label(value)}' for label, value in pairs)}}} "


def quote_label(value: str) -> str:
    """A label's value between its quotes."""
    escaped = printable(value).replace("\\", r"\\").replace('"', r"\"")
    return f'"{escaped}"'


def metric_head(spec: Spec, *, openmetrics: bool) -> str:
    """The lines before the samples of a metric."""
    if not openmetrics:
        # The text format has no type info, and an unknown type fails the whole scrape
        kind = "gauge" if spec.kind == "info" else spec.kind
        return f"# HELP {spec.name} {spec.help}\n# TYPE {spec.name} {kind}\n"
    header = f"# HELP {spec.family} {spec.help}\n# TYPE {spec.family} {spec.kind}\n"
    return f"{header}# UNIT {spec.family} {spec.base_unit}\n" if spec.base_unit else header


def format_number(value: float) -> str:
    """A sample's number; ``+Inf`` and ``NaN`` as the formats write them."""
    digits = repr(value)
    if digits[-1] > "9":  # inf, nan
        return str(floatToGoString(value))  # type: ignore[no-untyped-call]
    return digits
