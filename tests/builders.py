"""Events and snapshots made by hand."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import fields, replace
from typing import Any, cast

from zeromon.diagnosis.arrivals import ArrivalSkew
from zeromon.diagnosis.hangs import find_hangs
from zeromon.fold.collective_stats import CollectiveStats, OpTotals
from zeromon.fold.fold import fold_event
from zeromon.fold.state import Arrival, RankState
from zeromon.fold.summarize import summarize_rank
from zeromon.ring.codes import Flag, Op, Phase
from zeromon.ring.events import Done, Event, HostSample, Issued, PhaseSpan, StepMark
from zeromon.ring.model_metadata import ModelMetadata
from zeromon.ring.strategy import Strategy
from zeromon.snapshot import Finding, RankSnapshot, RunSnapshot, StepSummary
from zeromon.snapshot.communication import GatherRow, InFlight, Links, PipelineBubble, PipelineRow
from zeromon.snapshot.host import Device, Disk, Energy, HostMemory, Pressure
from zeromon.snapshot.ledger import ActivityRow
from zeromon.snapshot.memory import Cause, DeviceMemory, ExpectedRow, Risk, RoleRow, TransferRow
from zeromon.snapshot.rank import EngineRow, Setting
from zeromon.snapshot.step import BatchRow, ScalarRow, TraceCheck

MS = 1_000_000

METADATA: Any = {
    "framework": "ddp", "stage": 0, "ranks": 2, "numel": 10**8, "trainable": 10**8,
    "shard_numel": 10**8, "trainable_shard_numel": 10**8, "param_bytes": 4, "compute_bytes": 4,
    "grad_bytes": 4, "optimizer": "AdamW", "blocks": [10, 10**7], "bucket_cap_bytes": 25 << 20,
}  # fmt: skip
"""What a model under DDP tells of itself."""


def state(**facts: Any) -> RankState:
    """A rank of a group of two named world (id 1)."""
    made = RankState(rank=0, pid=1)
    made.groups[1] = {"label": "world", "size": 2, "ranks": [0, 1]}
    made.units[7] = "layers.0"
    made.meta.update({"world_size": 2, "strategy": "fsdp2", "node": "n0", **facts})
    return made


def collective(
    start_ms: float,
    end_ms: float,
    blocked_ms: float,
    *,
    op: Op = Op.ALL_GATHER,
    nbytes: int = 1000,
    sequence: int = 1,
    unit: int = 0,
) -> list[Event]:
    """A collective that was issued and waited for."""
    start, end = round(start_ms * MS), round(end_ms * MS)
    return [
        Issued(start, op, Phase.FORWARD, 0, 1, unit, nbytes, sequence, 1),
        Done(
            end, op, Phase.FORWARD, Flag.SPAN_KNOWN, 1, unit, nbytes, start,
            round(blocked_ms * MS), sequence,
        ),
    ]  # fmt: skip


def step(number: int, start_ms: float, end_ms: float, flags: int = 0, micro: int = 1) -> StepMark:
    """The mark of a step."""
    return StepMark(round(end_ms * MS), flags, number, round(start_ms * MS), micro)


def span(phase: Phase, start_ms: float, end_ms: float) -> PhaseSpan:
    """A phase."""
    return PhaseSpan(round(end_ms * MS), phase, 0, round(start_ms * MS))


def host(at_ms: float, rss: int, available: int = -1) -> HostSample:
    """A host sample."""
    return HostSample(round(at_ms * MS), rss, available, -1)


def folded(events: list[Event], into: RankState | None = None) -> RankState:
    """All events folded."""
    made = into or state()
    for event in events:
        fold_event(made, event)
    return made


def summary(number: int, **facts: Any) -> StepSummary:
    """A step of 100 ms with 40 ms of communication, 10 ms of it exposed."""
    base = StepSummary(
        step=number,
        start_ns=number * 100 * MS,
        end_ns=(number + 1) * 100 * MS,
        idle=False,
        micro_steps=1,
        phase_ns=(5 * MS, 30 * MS, 50 * MS, 10 * MS, 5 * MS, *[0] * (len(Phase) - 5)),
        collectives=12,
        collective_bytes=1 << 20,
        communication_ns=40 * MS,
        exposed_ns=10 * MS,
        allocated_bytes=-1,
        reserved_bytes=-1,
        rss_bytes=1 << 30,
    )
    return replace(base, **facts)


def received(samples: int, length: int = 0, steps: int = 10, **facts: int) -> BatchRow:
    """What a model got in *steps* steps of *samples* each."""
    positions = steps * samples * length
    row = BatchRow(
        steps=steps, samples=steps * samples, tokens=positions, positions=positions,
        pairs=positions * length, padding=0,
    )  # fmt: skip
    return replace(row, **facts)


def rank(number: int = 0, **facts: Any) -> RankSnapshot:
    """A live rank with twenty steps behind it."""
    events: list[Event] = []
    for n in range(1, 21):
        begin = n * 100.0
        events += collective(begin + 5, begin + 45, 10, sequence=n, unit=7)
        events += [
            span(Phase.FORWARD, begin, begin + 30),
            span(Phase.BACKWARD, begin + 30, begin + 80),
            span(Phase.OPTIMIZER, begin + 80, begin + 90),
            host(begin + 99, 1 << 30, available=8 << 30),
            step(n, begin, begin + 100),
        ]
    base = summarize_rank(folded(events))
    if "recent" in facts:
        spent = {phase.label: _spent(facts["recent"], phase) for phase in Phase}
        facts.setdefault("phase_seconds", spent)
    if "strategy" in facts:
        facts.setdefault("strategy_fields", Strategy.parse(facts["strategy"]))
    if "median_seconds" in facts:
        facts.setdefault("mean_seconds", facts["median_seconds"])
    return changed(base, rank=number, local_rank=number, pid=100 + number, **facts)


RECORDS = {
    field.name: type(getattr(summarize_rank(RankState(rank=0, pid=1)), field.name))
    for field in fields(RankSnapshot)
    if str(field.type).rpartition(".")[2].startswith(("Rank", "AgentHealth"))
}
"""The records of a rank: name -> class."""


def changed(snapshot: RankSnapshot, **facts: Any) -> RankSnapshot:
    """*snapshot* with *facts*: fields of its own, or of its records.

    ``memory_device`` is the field *device* of the record *memory*, for names that several have.
    """
    by_record: dict[str, dict[str, Any]] = {}
    own = {}
    for name, value in facts.items():
        record, _, leaf = name.partition("_")
        if record in RECORDS and leaf in RECORDS[record].__dataclass_fields__:
            by_record.setdefault(record, {})[leaf] = value
        elif name in RankSnapshot.__dataclass_fields__:
            own[name] = value
        else:
            (record,) = (r for r, of in RECORDS.items() if name in of.__dataclass_fields__)
            by_record.setdefault(record, {})[name] = value
    records = {
        r: replace(own.pop(r, getattr(snapshot, r)), **changes) for r, changes in by_record.items()
    }
    return replace(snapshot, **own, **records)


def _spent(steps: Iterable[StepSummary], phase: Phase) -> float:
    return sum(sum(step.phase_ns[phase : phase + 1]) for step in steps) / 1e9


def device_memory(**facts: Any) -> DeviceMemory:
    """An 80 GiB device, half used."""
    base = DeviceMemory(
        allocated_bytes=30 << 30,
        active_bytes=32 << 30,
        reserved_bytes=40 << 30,
        inactive_split_bytes=1 << 30,
        capacity_bytes=80 << 30,
        free_bytes=36 << 30,
        retries=0,
        ooms=0,
    )
    return replace(base, **facts)


def run(*ranks: RankSnapshot, **facts: Any) -> RunSnapshot:
    """A run of those ranks."""
    base = RunSnapshot(
        run="train-1",
        command=("torchrun", "train.py"),
        node="n0",
        started_wall=1000.0,
        taken_wall=1030.0,
        taken_ns=2200 * MS,
        ended=False,
        ranks=ranks,
        findings=(),
    )
    snapshot = replace(base, **facts)
    return replace(snapshot, hangs=find_hangs(snapshot))  # as the collector does


def deepspeed_facts() -> dict[str, Any]:
    """What only a DeepSpeed rank has."""
    engine = EngineRow(
        engine=1, strategy="deepspeed-zero3", steps=20, skipped=1, collectives=9, nbytes=9,
        exposed_seconds=0.1, loss_scale=65536.0, hysteresis=2, grad_norm=1.5, nonfinite=1,
    )  # fmt: skip
    disk = Disk(
        path="/nvme", free_bytes=1 << 40, total_bytes=1 << 41, device="nvme0n1",
        device_read_bytes=1, device_written_bytes=1, device_busy_seconds=0.5,
        device_queue_seconds=1.0, process_read_bytes=1, process_written_bytes=1, busy_ratio=0.5,
        requests_at_once=2.0, busy_bytes_per_second=50e6, best_busy_bytes_per_second=80e6,
        read_limit_bytes_per_second=100e6,
    )  # fmt: skip
    collective = replace(rank(0).communication.collectives[0], quantized_bytes=5, nodes=2)
    return {
        "engines": (engine,),
        "disk": disk,
        "collectives": (collective,),
        "links": Links(
            device_bytes_per_second=450e9,
            device_kind="18 NVLinks",
            network_bytes_per_second=50e9,
            network_kind="InfiniBand",
            host_bytes_per_second=63e9,
            host_kind="PCIe 5 x16",
        ),
        "settings": (Setting(engine=1, name="zero.stage", effective="3", written="3"),),
        "gathers": (GatherRow(outcome="late", nbytes=5, exposed_seconds=0.1),),
        "transfers": (
            TransferRow(
                path="disk_read",
                nbytes=5,
                seconds=0.2,
                blocked_seconds=0.1,
                bytes_per_second=25e6,
                best_bytes_per_second=30e6,
                step_bytes=2.0,
            ),
        ),
        "roles": (
            RoleRow(role="master_param", device_bytes=0, host_bytes=7, disk_bytes=0, pinned_bytes=0),
        ),
        "expected": (
            ExpectedRow(
                role="master_param",
                measured_bytes=7,
                plain_bytes=4,
                predicted_bytes=6,
                causes=(Cause(text="padding to equal shards", nbytes=2),),
            ),
        ),
    }


def series(seconds: Sequence[float], **columns: Any) -> dict[str, list[float]]:
    """Steps of those durations; each further column a number for all steps, or one a step."""
    count = len(seconds)
    base = {
        "step": range(1, count + 1), "steps": 1, "flags": 0,
        "duration_us": [s * 1e6 for s in seconds], "exposed_us": 10_000,
        "data_wait_us": 1_000, "offload_blocked_us": 0, "collective_bytes": 8 << 20, "micro_steps": 2,
        "allocated_bytes": -1, "reserved_bytes": -1, "rss_bytes": 1 << 30, "other_bytes": -1,
    }  # fmt: skip
    return {
        name: list(value) if isinstance(value, (list, tuple, range)) else [value] * count
        for name, value in (base | columns).items()
    }


def noisy(seed: int, middle: float = 0.1, count: int = 200) -> list[float]:
    chooser = random.Random(seed)
    return [middle * chooser.gauss(1, 0.02) for _ in range(count)]


def pipelined(**facts: float) -> PipelineRow:
    """The first of four stages, whose calls take 190 ms."""
    bubble = PipelineBubble(
        measured_ratio=0.32, ideal_ratio=0.3, span_seconds=0.19, ideal_seconds=0.18,
        doubled_seconds=0.155, balanced_seconds=0.18, slowest_stage=1, slowest_seconds=0.03,
        mean_seconds=0.03,
    )  # fmt: skip
    return PipelineRow(
        schedule="1F1B", stages=4, micro_batches=7, stage_ranks=(0, 1, 2, 3), on_device=False, own=(),
        order="", busy_seconds=0.13, span_seconds=0.19, bubble=replace(bubble, **facts),
    )  # fmt: skip


def full_run() -> RunSnapshot:
    """A run in which every metric has a value."""
    device = Device(
        name="h100", used_bytes=1, total_bytes=2, own_bytes=1, utilization_ratio=0.5, power_watts=1.0,
        sm_active_ratio=0.5, tensor_active_ratio=0.5, dram_active_ratio=0.5, energy_joules=9.0,
        temperature_celsius=50.0, pcie_receive_bytes_per_second=1.0,
        pcie_transmit_bytes_per_second=1.0, nvlink_receive_bytes_per_second=1.0,
        nvlink_transmit_bytes_per_second=1.0, throttle_reasons=("thermal",), ecc_errors=0, xid=79,
    )  # fmt: skip
    one = rank(
        0, memory_device=device_memory(), machine_device=device, untimed={"world": 1},
        unattributed={"world": 1}, startup_seconds=2.0, accounted_overhead_ratio=0.003,
        overhead_ratio=0.001, overhead_noise_ratio=0.002,
        pinned_bytes=5,
        risks=(Risk(pool="device", ratio=0.5, cause="growth", steps_left=9.0),),
        host=HostMemory(limit_bytes=9, headroom_bytes=5, oom_kills=0),
        wait_seconds=0.1, late_seconds=0.0, unsaved_seconds=3.0,
        pipeline=replace(pipelined(), stage_ranks=(0,)),
        ledger_totals={"compute": 1.0, "checkpoint": 0.5},
        activities=(
            ActivityRow(
                phase="checkpoint", activity="save", background=False, count=1, seconds=0.5,
                longest_seconds=0.5, nbytes=7, last_ns=1,
            ),
        ),
        pressure=Pressure(cpu_wait_ratio=0.1, major_faults_per_second=0.0),
        batches=received(samples=2, length=8), goal={"steps": 100, "before": 0, "by": "Trainer"},
        scalars=(ScalarRow(name="loss", value=2.5, step=9, nonfinite=1, first_nonfinite_step=3),),
    )  # fmt: skip
    one = changed(one, **deepspeed_facts())
    model: dict[str, Any] = {"matrix_numel": 9, "attention": 9, "compute_dtype": "bfloat16"}
    steps = tuple(replace(each, samples=2, tokens=16) for each in one.steps.recent)
    one = changed(one, models=(cast(ModelMetadata, model),), recent=steps)
    stuck = InFlight(
        op="all_reduce", group="world", sequence=9, unit="", phase="backward", nbytes=4,
        issued_ns=-(10**12), group_id="world//0",
    )  # fmt: skip
    split = replace(one.communication.traffic[0], wait_seconds=0.001, transfer_seconds=0.002)
    check = TraceCheck(
        steps=(3,), live_exposed_seconds=1.1, trace_exposed_seconds=1.0,
        live_communication_seconds=2.0, trace_communication_seconds=2.0,
    )  # fmt: skip
    one = changed(one, in_flight=(stuck,), traffic=(split,), check=check)
    finding = Finding(rule="oom_risk", severity="critical", text="x", rank=0)
    used = Energy(seconds=10, device_joules=900.0, host_joules=100.0)
    return run(one, findings=(finding,), energy=used)


def arrival(
    sequence: int,
    at_ns: int,
    step: int,
    end_ns: int = 0,
    waits_from_ns: int = 0,
    span_known: bool = True,
) -> Arrival:
    row = CollectiveStats(Op.ALL_REDUCE, 2, 0, OpTotals())
    ended_ns = end_ns or at_ns + MS
    return Arrival(
        1, sequence, at_ns, ended_ns, 1000, 0, waits_from_ns, step, 0, row, span_known=span_known
    )


def arrived(skew: ArrivalSkew, rank: int, members: int, one: Arrival, size: int = 0) -> None:
    """The arrival of *rank*; *members* of the *size* ranks of group "g" are on this node."""
    skew.record_arrivals(rank, {one.group: ("g", members, size)}, (one,))


def short_of_cpus(share: float, **facts: Any) -> Pressure:
    """A rank that has no CPU for *share* of its last steps, and of the last minute."""
    return Pressure(
        cpu_wait_ratio=share, minute_cpu_wait_ratio=share, held_cpu_wait_ratio=share,
        major_faults_per_second=0, **facts,
    )  # fmt: skip
