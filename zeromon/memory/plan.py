"""Plans the sharding of a model: memory, fit and communication by strategy, fewest devices. Pure."""

import math
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from zeromon.base.errors import PlanError
from zeromon.base.units import human_bytes, human_seconds
from zeromon.memory import predict, reconcile, speeds
from zeromon.memory.models import equal_ranks, largest_part, model_of, ranks_of_dim, whole_numel
from zeromon.memory.seconds import StepTime, forward_pass_flops, step_time
from zeromon.memory.sent import SentBytes, paper_step_bytes, sent_step_bytes
from zeromon.memory.spec import PLACES, ModelSpec, ShardPlan, Sizes, Transformer, Unit, ZeroStage
from zeromon.ring.strategy import Dim
from zeromon.snapshot import RankSnapshot, RunSnapshot


def kv_cache_bytes(t: Transformer, tokens: int, itemsize: int = 2) -> int:
    """Returns the bytes of keys and values of *tokens*.

    Two vectors a layer and token; 800 KiB per token of OPT-13B (Kwon et al. 2023, arXiv 2309.06180).
    """
    return 2 * t.layers * t.kv_width * itemsize * tokens // t.tensor_ranks


def generation_terms(model: ModelSpec, plan: ShardPlan, tokens: int) -> Iterator[predict.Term]:
    """Yields what exists while the trained model generates *tokens*, the activations do not."""
    if tokens and model.architecture is not None:
        nbytes = kv_cache_bytes(model.architecture, tokens, plan.precision.compute_bytes)
        cause = "keys and values of the sequences that are generated at once (--rollout)"
        yield predict.Term("kv_cache", nbytes, cause, during=predict.During.GENERATION)
    if tokens and plan.stage == ZeroStage.PARAMETERS:
        nbytes = model.params * plan.precision.compute_bytes
        cause = "the whole model, gathered to generate (ds3_gather_for_generation)"
        yield predict.Term("unsharded_param", nbytes, cause, during=predict.During.GENERATION)


RESERVE = 0.06
"""Share of a device that contexts, NCCL and fragmentation take."""

_USUAL_BYTES = 80 << 30
"""Assumed memory of a device whose capacity a run did not report."""

HOST_RESERVE = 0.1
"""Share of a host that the system, programs and data loaders take."""

RANKS_PER_HOST = 8
"""Assumed number of ranks on one host."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """The input of a plan: a model, its sharding, the machine, and the micro-batch."""

    model: ModelSpec
    plan: ShardPlan
    device_bytes: int
    batch: predict.Batch | None = None
    """Micro-batch of a rank; None: activations are unknown and not counted."""
    measured_activation_bytes: int | None = None
    """Activations of one sequence on one rank, from a run or a trace; replaces the formula."""
    measured_compute_bytes: int = 0
    """Bytes per element in that measurement; 0: the precision of *plan*."""
    known: Sizes | None = None
    """The sizes of the model that a rank of a run reported; replaces the sizes of *model*."""
    micro_batch_given: bool = True
    """True if the user chose the micro-batch; else the plan with the most room for one is best."""
    reserve: float = RESERVE
    host_bytes: int | None = None
    """Memory of one host, which its ranks share; None: unknown, and the host always fits."""
    hosts: int = 1
    capacity_known: bool = True
    """True if *device_bytes* is that of the device; else it is assumed, and nothing is known to fit."""
    is_given: bool = False
    """*plan* is that of a configuration, of options or of a run, and not a default."""
    nvme_bytes: int | None = None
    """Free bytes of the NVMe drives of one host; None: unknown, and they always fit."""
    tensor: int = 1
    """Ranks of tensor parallelism; *model* is the part of one rank."""
    pipeline: int = 1
    """Stages of pipeline parallelism."""
    whole_numel: int | None = None
    """Parameters of the whole model; None where a rank knows only its part of it."""
    frozen: tuple[ModelSpec, ...] = ()
    """Reference and reward models beside the trained one."""
    generated_tokens: int = 0
    """Tokens of all sequences that a rank generates at once."""
    machine: speeds.Machine = field(default_factory=speeds.Machine)
    """Speeds of devices and links."""
    measured: speeds.RunSpeeds | None = None
    """Speeds that a run has measured; replace those of *machine*."""

    @property
    def usable_bytes(self) -> int:
        """Device memory of a rank without the reserve, bytes."""
        return round(self.device_bytes * (1 - self.reserve))

    @property
    def usable_host_bytes(self) -> float:
        """A rank's share of the host memory without the reserve, bytes; infinite where unknown."""
        if self.host_bytes is None:
            return math.inf
        return self.host_bytes * (1 - HOST_RESERVE) / self.ranks_per_host

    @property
    def ranks_per_host(self) -> int:
        """Ranks of one host."""
        return -(-self.devices // self.hosts)

    @property
    def devices(self) -> int:
        """All devices: data-parallel ranks x tensor x pipeline."""
        return self.plan.ranks * self.tensor * self.pipeline

    @property
    def usable_nvme_bytes(self) -> float:
        """A rank's share of the NVMe drives of its host, bytes; infinite where unknown."""
        return math.inf if self.nvme_bytes is None else self.nvme_bytes / self.ranks_per_host


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """The prediction for one sharding plan."""

    plan: ShardPlan
    memory: predict.MemoryBreakdown
    fits_device: bool
    fits_host: bool
    fits_nvme: bool
    sent: SentBytes
    paper_bytes: int
    """Bytes that a rank would send in a step by the ZeRO paper."""
    largest_micro_batch: int | None
    """Largest micro-batch that fits, in sequences; None where activations are unknown."""
    time: StepTime | str
    """The seconds of a step, or what must be known for them, in words."""
    given: bool = False
    """The plan is that of the configuration, the options or the run."""
    tuned: "Row | None" = None
    """Its variant by settings of DeepSpeed that shorten the step or send less; None where none does."""

    @property
    def communication_bytes(self) -> int:
        """Bytes that a rank sends in a step."""
        return round(self.sent.total)

    @property
    def device_bytes(self) -> int:
        """Device memory of a rank at its peak, bytes; 0: unknown, as all states are on the host."""
        return self.memory.total("device")

    @property
    def host_bytes(self) -> int:
        """Host memory of a rank at its peak, bytes."""
        return self.memory.total("host")

    @property
    def fits(self) -> bool:
        """True if the plan fits on the device, and on host and NVMe where their sizes are known."""
        return self.device_bytes > 0 and self.fits_device and self.fits_host and self.fits_nvme


def hosts_of(ranks: int) -> int:
    """Returns the number of hosts for *ranks*, at :data:`RANKS_PER_HOST` ranks per host."""
    return -(-ranks // RANKS_PER_HOST)


def of_run(run: RunSnapshot) -> Setup:
    """Returns the setup of *run*, activations as measured; raises :class:`PlanError` without a model."""
    rank = largest_part(run)
    metadata = model_of(rank) if rank is not None else None
    described = reconcile.read_model_facts(metadata) if metadata is not None else None
    if rank is None or metadata is None or described is None:
        raise PlanError(
            f"{run.run} reported no model metadata",
            hint="The metadata comes with the first optimizer step under FSDP, DDP or DeepSpeed.",
        )
    ran = reconcile.with_micro_steps(rank, described.plan)
    sizes, notes = reconcile.sizes_in_layers(described.sizes, ran, metadata.get("blocks", []), rank), []
    if len(rank.config.models) > 1 and rank.communication.pipeline is None:
        notes.append(f"the first of {len(rank.config.models)} models of the run")
    if not described.optimizer_known:
        optimizer = metadata.get("optimizer")
        notes.append(f"optimizer {optimizer}: its state is unknown and not counted")
    numel, reason = whole_numel(run)
    if numel is None:
        notes.append(f"parameters of the whole model are n/a: {reason}")
    model = ModelSpec(
        name=run.run,
        units=(
            Unit("trained", ((sizes.trainable,),)),
            Unit("frozen", ((sizes.numel - sizes.trainable,),), trainable=False),
        ),
        has_units=False,
        buffer_bytes=sizes.buffer_bytes,
        notes=tuple(notes),
    )
    activation_bytes = _measured_activations(rank, predict.memory_of(sizes, ran))
    size = reconcile.micro_batch_of_rank(rank) or 1
    capacity = rank.memory.device.capacity_bytes if rank.memory.device is not None else -1
    return Setup(
        model=model,
        plan=ran,
        device_bytes=capacity if capacity > 0 else _USUAL_BYTES,
        capacity_known=capacity > 0,
        # No length: work_of() takes a length of 1 for unknown, and counts neither tokens nor FLOPs
        batch=predict.Batch(sequences=size, length=1, checkpointing=bool(metadata.get("recomputes")))
        if activation_bytes
        else None,
        measured_activation_bytes=activation_bytes // size if activation_bytes else None,
        measured_compute_bytes=ran.precision.compute_bytes,
        known=sizes,
        whole_numel=numel,
        tensor=ranks_of_dim(rank, Dim.TP),
        pipeline=ranks_of_dim(rank, Dim.PP),
        measured=speeds.measured_of(run.run, equal_ranks(run, rank), sizes, ran, max(1, len(run.nodes))),
    )


def _measured_activations(rank: RankSnapshot, memory: predict.MemoryBreakdown) -> int:
    """Bytes of the activations of *rank* on its device; 0 where they are unknown.

    Its roles are those of the step: gradients that activations never meet are no part of the peak.
    """
    rows = [row for row in reconcile.unattributed_memory(rank) if row.kind == "activation_temp"]
    met = [
        row.device_bytes
        for row in rank.memory.roles
        if row.role in ("sharded_grad", "unsharded_grad")
        and not memory.role(row.role, during=predict.During.LOSS)
    ]
    return rows[0].nbytes + sum(met) if rows and rows[0].nbytes else 0


def sizes_under_plan(setup: Setup, plan: ShardPlan) -> Sizes:
    """Returns the sizes of the setup's model under *plan*, in elements."""
    sizes = setup.known
    if sizes is None:
        return setup.model.sizes(plan)
    is_3 = plan.stage == ZeroStage.PARAMETERS
    is_fsdp = plan.framework in ("fsdp1", "fsdp2")
    return replace(
        sizes,
        shard_numel=-(-sizes.numel // plan.shard_ranks),
        trainable_shard_numel=-(-sizes.trainable // plan.shard_ranks),
        persistent_numel=sizes.persistent_numel if is_3 and plan.persistence_numel else 0,
        kept_numel=0 if not is_fsdp else sizes.kept_numel if is_3 else sizes.numel,
        unit_numels=sizes.unit_numels if is_3 else (),
    )


def activation_terms(setup: Setup) -> tuple[predict.Term, ...]:
    """Returns the terms of the activations of one micro-batch; empty where unknown."""
    if setup.batch is None:
        return ()
    if setup.measured_activation_bytes is not None:
        scale = setup.plan.precision.compute_bytes / (
            setup.measured_compute_bytes or setup.plan.precision.compute_bytes
        )
        nbytes = round((setup.measured_activation_bytes or 0) * scale) * setup.batch.sequences
        return (predict.Term(predict.ACTIVATION, nbytes, during=predict.During.ACTIVATIONS),)
    shape = setup.model.architecture
    # A configuration has the micro-batch, and not the length
    if shape is None or setup.batch.length <= 1:
        return ()
    itemsize, autocast = setup.plan.precision.compute_bytes, setup.plan.autocasts
    return predict.transformer_activations(shape, setup.batch, itemsize, autocast=autocast)


def _fixed_terms(setup: Setup, plan: ShardPlan) -> Iterator[predict.Term]:
    """Yields what exists beside the trained model's states, whatever the micro-batch."""
    # Reference and reward models: sharded at stage 3, whole below it
    for model in setup.frozen:
        split = plan.shard_ranks if plan.stage == ZeroStage.PARAMETERS else 1
        nbytes = model.params // split * plan.precision.compute_bytes
        yield predict.Term("frozen_param", nbytes, f"the frozen model {model.name} (--reference)")
    yield from predict.quantization_terms(setup.model, plan)
    if setup.batch is not None and activation_terms(setup):
        yield from predict.autocast_copy_terms(setup.model, plan, setup.batch)


def predict_row(setup: Setup, plan: ShardPlan) -> Row:
    """Returns the prediction for *plan* on the machine of *setup*."""
    sizes = sizes_under_plan(setup, plan)
    extra_terms = [*activation_terms(replace(setup, plan=plan)), *_fixed_terms(setup, plan)]
    extra_terms += generation_terms(setup.model, plan, setup.generated_tokens)
    memory = predict.memory_of(sizes, plan, extra_terms)
    placed = replace(plan, host_ranks=setup.ranks_per_host)
    return Row(
        plan=plan,
        memory=memory,
        fits_device=memory.total("device") <= setup.usable_bytes,
        fits_host=memory.total("host") <= setup.usable_host_bytes,
        fits_nvme=memory.total("nvme") <= setup.usable_nvme_bytes,
        sent=sent_step_bytes(sizes, placed),
        paper_bytes=paper_step_bytes(sizes, placed),
        largest_micro_batch=_fitting_sequences(setup, plan),
        time=_predict_step_time(setup, sizes, placed),
        given=setup.is_given and plan == setup.plan,
    )


def _predict_step_time(setup: Setup, sizes: Sizes, plan: ShardPlan) -> StepTime | str:
    """Returns the seconds of a step under *plan*, or what is not known of them."""
    if setup.tensor * setup.pipeline > 1:
        return "the time that tensor and pipeline parallelism send"
    if setup.measured is not None:
        return step_time(sizes, plan, speeds.speeds_of_run(setup.measured, setup.machine, plan))
    return step_time(
        sizes, plan, speeds.speeds_of_machine(setup.machine, setup.model, setup.batch, plan)
    )


def _fitting_sequences(setup: Setup, plan: ShardPlan) -> int | None:
    """Returns the number of sequences that fit beside the model states; None if unknown."""
    if setup.batch is None:
        return None
    standing = predict.memory_of(sizes_under_plan(setup, plan), plan, _fixed_terms(setup, plan))
    one_sequence = replace(setup, plan=plan, batch=replace(setup.batch, sequences=1))
    return predict.sequences_that_fit(standing, setup.usable_bytes, activation_terms(one_sequence))


def alternative_plans(base: ShardPlan) -> list[ShardPlan]:
    """Returns the sharding plans that the framework of *base* offers, by ascending communication."""
    if base.framework == "deepspeed":
        kinds = [(stage, "device", "device") for stage in ZeroStage]
        kinds += [(ZeroStage.GRADIENTS, "host", "device"), (ZeroStage.PARAMETERS, "host", "device")]
        kinds += [(ZeroStage.PARAMETERS, "host", "host"), (ZeroStage.PARAMETERS, "nvme", "nvme")]
        plans = []
    else:
        kinds = [(stage, "device", "device") for stage in (ZeroStage.GRADIENTS, ZeroStage.PARAMETERS)]
        kinds.append((ZeroStage.PARAMETERS, "host", "host"))
        plans = [
            replace(base, framework="ddp", stage=ZeroStage.NONE, optimizer_on="device",
                    params_on="device", shard_ranks=base.ranks)
        ]  # fmt: skip
    for stage, optimizer_on, params_on in kinds:
        framework = "fsdp2" if base.framework == "ddp" else base.framework
        plans.append(
            replace(base, framework=framework, stage=stage, optimizer_on=optimizer_on,
                    reshards=stage == ZeroStage.PARAMETERS,
                    params_on=params_on, shard_ranks=base.shard_ranks if stage else base.ranks)
        )  # fmt: skip
    return plans


def plan_table(setup: Setup) -> list[Row]:
    """Returns a row for each alternative of the setup's plan, and for the plan itself."""
    plans = alternative_plans(setup.plan)
    if setup.plan not in plans:
        plans.insert(0, setup.plan)
    if setup.pipeline > 1 and setup.plan.framework == "deepspeed":
        # DeepSpeed refuses stages 2 and 3 under a pipeline
        plans = [plan for plan in plans if plan.stage < ZeroStage.GRADIENTS]
    return [_with_tuning(setup, predict_row(setup, plan)) for plan in plans]


_TUNINGS: tuple[dict[str, Any], ...] = (
    {"grad_buckets": 2},
    {"grad_buckets": 2, "reduces_whole_buckets": False},
)
"""Changes that shorten a step of DeepSpeed's stages 1 and 2, the usual one first."""


def _with_tuning(setup: Setup, row: Row) -> Row:
    """Returns *row* with its fastest variant; a later tuning must be faster by a tenth.

    Where seconds are unknown, the variant is the one that sends fewer bytes.
    """
    is_1_or_2 = row.plan.framework == "deepspeed" and 0 < row.plan.stage < ZeroStage.PARAMETERS
    if not is_1_or_2:
        return row
    if isinstance(row.time, str):
        variant = predict_row(setup, replace(row.plan, reduces_whole_buckets=False))
        sends_less = variant.communication_bytes < row.communication_bytes
        return replace(row, tuned=variant) if sends_less else row
    fastest = row
    for tuning in _TUNINGS:
        variant = predict_row(setup, replace(row.plan, **tuning))
        share = 1.0 if fastest is row else MUCH_LESS
        if variant.fits and row_seconds(variant) < share * row_seconds(fastest):
            fastest = variant
    return row if fastest is row else replace(row, tuned=fastest)


def row_seconds(row: Row) -> float:
    """Returns the seconds of a step, infinite where they are unknown."""
    return row.time.seconds if isinstance(row.time, StepTime) else math.inf


MUCH_LESS = 0.9
"""A row is better where it costs less than this share of another's time, bytes or memory."""


GIB_AT_MOST = 4096
"""A size without a unit is in GiB up to this number; a larger one is in bytes."""


def parse_size(size: str) -> int:
    """Returns the bytes of ``80GiB``, ``80GB``, ``h100`` or a plain number; else raises PlanError.

    A plain number is in GiB up to :data:`GIB_AT_MOST`, a larger one in bytes.
    """
    if device := speeds.find_named_device(size):
        return device.nbytes
    key = size.strip().lower()
    units = {
        "tib": 1 << 40, "gib": 1 << 30, "mib": 1 << 20, "tb": 10**12, "gb": 10**9, "mb": 10**6,
        "": 1,
    }  # fmt: skip
    # Every text ends with "": it must be the last of the units
    unit = next(u for u in units if key.endswith(u))
    try:
        nbytes = float(key.removesuffix(unit)) * units[unit]
    except ValueError:
        nbytes = -1.0
    if not unit and 0 < nbytes <= GIB_AT_MOST:
        nbytes *= 1 << 30
    # Also refuses "nan" and "inf", which float() takes and round() does not
    if 1 <= nbytes < 1e18:
        return round(nbytes)
    raise PlanError(
        f"{size!r} is neither a known GPU nor a memory size",
        hint=f"Like 80GiB, or one of {', '.join(sorted(speeds.DEVICES))}.",
    )


def parse_count(count: str) -> int | None:
    """Returns the number of parameters in ``7B``, ``350M``, ``7e9`` or ``124439808``; else None."""
    key = count.strip().lower().replace("_", "").replace(",", "")
    # A slice, as an empty text has no last character
    scale = {"k": 10**3, "m": 10**6, "b": 10**9, "t": 10**12}.get(key[-1:], 0)
    try:
        value = float(key[:-1] if scale else key) * (scale or 1)
    except ValueError:
        return None
    return round(value) if 1 <= value < 1e18 else None


_MAX_DEVICES = 4096
_PER_HOST = 8


def unique_state_bytes(sizes: Sizes, plan: ShardPlan) -> int:
    """Returns the bytes of one copy of parameters, gradients and optimizer states."""
    widths = plan.precision
    trained = widths.plain_grad_bytes + predict.state_bytes(plan.optimizer, plan) + 4 * widths.has_master
    stored_bytes = sizes.numel * predict.stored_bytes_per_param(sizes, plan)
    return round(stored_bytes + sizes.trainable * trained)


def fewest_fitting_devices(setup: Setup, plan: ShardPlan) -> int | None:
    """Returns the fewest data-parallel ranks on which *plan* fits: 1, 2, 4, a multiple of 8, or None.

    Hosts have 8 devices, and hybrid sharding has whole groups. More devices never take more of each, so
    the search is by halves.
    """
    group_ranks = plan.shard_ranks if plan.shard_ranks < plan.ranks else 1
    for ranks in (1, 2, 4):
        if not ranks % group_ranks and _fits_on(setup, plan, ranks):
            return ranks
    # Without lcm(), the search would meet numbers of hosts that groups do not divide
    stride_ranks = math.lcm(_PER_HOST, group_ranks)
    low, high = 0, _MAX_DEVICES // stride_ranks
    if not high or not _fits_on(setup, plan, high * stride_ranks):
        return None
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if _fits_on(setup, plan, middle * stride_ranks) else (middle, high)
    return high * stride_ranks


def _fits_on(setup: Setup, plan: ShardPlan, ranks: int) -> bool:
    group = plan.shard_ranks if plan.shard_ranks < plan.ranks else 0
    changed = replace(plan, ranks=ranks, shard_ranks=group)
    candidate = replace(setup, plan=changed, hosts=hosts_of(ranks * setup.tensor * setup.pipeline))
    return predict_row(candidate, changed).fits


# ---- effects of a change of a setup: step, memory, throughput, and which changes are worth a look ---

# A point is one setup, predicted by the same model as a plan (:func:`zeromon.memory.plan.predict_row`).
# Two points of the same calibration have its error in common, so that their difference has a narrower
# interval than either: it is taken at the likely, the lowest and the highest speeds.


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """The work for a sample of a micro-batch; None where unknown."""

    tokens: float | None = None
    flops: float | None = None
    """FLOP of forward and backward, without what checkpointing repeats."""
    peak: float | None = None
    """Dense peak of a device, FLOP/s."""
    micro_batch: int = 1
    """Samples of a micro-step in the setup without changes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """A setup with its prediction."""

    change: Mapping[str, str]
    """The settings that differ, by the names of the options; empty for the setup as it is."""
    setup: Setup | None
    row: Row | None
    error: str = ""
    """Why there is no such setup."""
    samples: float = 0.0
    """Samples of a step of all ranks."""
    tokens_per_second: float | None = None
    mfu: float | None = None

    @property
    def label(self) -> str:
        """``stage=3 micro_batch=4``."""
        return " ".join(f"{name}={value}" for name, value in self.change.items()) or "as it is"

    @property
    def time(self) -> StepTime | None:
        """The step; None where its seconds are unknown."""
        return self.row.time if self.row is not None and isinstance(self.row.time, StepTime) else None

    @property
    def unknown(self) -> str:
        """Why the seconds are unknown; "" where they are known."""
        if self.row is None:
            return self.error
        return self.row.time if isinstance(self.row.time, str) else ""

    @property
    def sample_seconds(self) -> float | None:
        """Seconds a sample of all ranks: what a step costs, whatever its batch."""
        return None if self.time is None else self.time.seconds / self.samples

    @property
    def is_bound(self) -> bool:
        """True if the memory is at least what is counted: activations or gathered units are unknown."""
        if self.row is None or self.setup is None:
            return False
        gathers = self.row.plan.stage == ZeroStage.PARAMETERS
        units = sizes_under_plan(self.setup, self.row.plan).unit_numels
        return not self.counts_activations or (gathers and not units)

    @property
    def counts_activations(self) -> bool:
        """True if activations are part of the memory."""
        return self.row is not None and bool(self.row.memory.role(predict.ACTIVATION))


def point_of(change: Mapping[str, str], setup: Setup, work: Work, micro_batch: int = 0) -> Point:
    """Returns the prediction for *setup*; *micro_batch*: samples of a micro-step, 0: those of *work*."""
    prediction = predict_row(setup, setup.plan)
    samples = float(setup.plan.ranks * setup.plan.accumulation * (micro_batch or work.micro_batch))
    rate = None if isinstance(prediction.time, str) else samples / prediction.time.seconds
    used = None
    if rate is not None and work.flops and work.peak:
        used = work.flops * rate / (work.peak * setup.devices)
    return Point(
        change=change,
        setup=setup,
        row=prediction,
        samples=samples,
        tokens_per_second=None if rate is None or work.tokens is None else rate * work.tokens,
        mfu=used,
    )


def work_of(setup: Setup) -> Work:
    """Returns the work of a sample of a model whose layers are known."""
    if setup.batch is None or setup.batch.length <= 1:
        return Work()
    device, frozen = setup.machine.device, 1 - setup.model.trainable / setup.model.params
    flops = forward_pass_flops(setup.model, setup.batch)[0] * (3 - frozen) / setup.batch.sequences
    model_parts = setup.tensor * setup.pipeline
    return Work(
        tokens=float(setup.batch.length),
        flops=flops * model_parts,
        peak=None if device is None else device.flops(setup.plan.precision.compute_bytes),
        micro_batch=setup.batch.sequences,
    )


def step_difference(base: Point, variant: Point) -> tuple[float, float, float] | None:
    """Returns by how many seconds a step of *variant* is longer: likely, at least, at most."""
    if base.time is None or variant.time is None:
        return None
    bounds = variant.time.least - base.time.least, variant.time.most - base.time.most
    likely = variant.time.seconds - base.time.seconds
    return likely, min(likely, *bounds), max(likely, *bounds)


def shorter_step_by(run: RunSnapshot, **change: Any) -> float | None:
    """Returns by how many seconds a step of *run* is shorter when *change* is made to its plan.

    None where the engine does not know the step, or the change does not exist.
    """
    try:
        setup = of_run(run)
        variant = replace(setup, plan=replace(setup.plan, **change))
        longer = step_difference(point_of({}, setup, Work()), point_of({}, variant, Work()))
    except PlanError:
        return None
    return None if longer is None else -longer[0]


def memory_time_front(points: Sequence[Point]) -> list[Point]:
    """Returns the points that no other beats in both memory and seconds a sample, by memory."""
    timed = [p for p in points if p.row is not None and p.row.fits and p.sample_seconds is not None]
    frontier: list[Point] = []
    fastest = float("inf")
    for cand in sorted(timed, key=lambda p: (p.row.device_bytes if p.row else 0, p.sample_seconds)):
        if cand.sample_seconds is not None and cand.sample_seconds < fastest:
            frontier.append(cand)
            fastest = cand.sample_seconds
    return frontier


# ---- which row to choose ------------------------------------------------------------------------

# Chooses the row of a plan: the one policy of ``plan``, ``check`` and fix-a-run.md. Pure.
# 1. It fits, with the least offload. 2. Where no micro-batch is given, it leaves half of the device
# for activations, if any such row does. 3. It costs less than the others by a tenth or more: by the
# seconds of a step, where all are known, else by the bytes that a rank sends; with DeepSpeed's
# settings that make either less. 4. Among rows of about the same cost: the given one, else the
# lowest stage.

Key = TypeVar("Key", bound=Hashable)
ROOMY = 0.5
"""Share of a device that model states may take where activations are unknown."""


@dataclass(frozen=True, slots=True)
class Choice:
    """The best row, None if nothing fits, and the reasons, one sentence each."""

    row: Row | None
    reasons: tuple[str, ...]
    settings: tuple[str, ...] = ()
    """Settings that make its step shorter: ``"overlap_comm": true``."""


def choose_row(setup: Setup, rows: Sequence[Row]) -> Choice:
    """Returns the best of *rows* by the policy of this module."""
    fitting = [row for row in rows if row.fits]
    if not fitting:
        return Choice(None, (_why_nothing_fits(rows),))
    nearest_tier = min(map(_offload_distance, fitting))
    candidates = [row for row in fitting if _offload_distance(row) == nearest_tier]
    if not setup.micro_batch_given:
        roomy = [row for row in candidates if row.device_bytes <= ROOMY * setup.usable_bytes]
        candidates = roomy or [min(candidates, key=lambda row: row.device_bytes)]
    equal = [candidates[at] for at in lowest_costs(step_costs(dict(enumerate(candidates))))]
    preset = next((row for row in rows if row.given), None)
    # Without this, a lower stage of equal cost replaces the one that the user gives
    chosen = preset if preset in equal and preset else min(equal, key=lambda row: row.plan.stage)
    reasons = [
        *_why_not_others(setup, chosen, rows),
        *([_preset_beside_chosen(preset, chosen)] if preset is not None else []),
        *_cost_sentences(chosen),
        *_roomier_sentence(setup, chosen, equal),
    ]
    return Choice(chosen, tuple(reasons), tuple(tuning_texts(chosen)))


def tuning_texts(chosen: Row) -> Iterator[str]:
    """Yields the settings in which the tuned variant of *chosen* differs from it."""
    if chosen.tuned is None:
        return
    if chosen.tuned.plan.grad_buckets != chosen.plan.grad_buckets:
        yield '"overlap_comm": true'
    if chosen.tuned.plan.reduces_whole_buckets != chosen.plan.reduces_whole_buckets:
        yield '"use_multi_rank_bucket_allreduce": false'


def _offload_distance(row: Row) -> int:
    """Returns how far the model states are from the device."""
    return PLACES.index(row.plan.optimizer_on) + PLACES.index(row.plan.params_on)


def step_costs(rows: Mapping[Key, Row]) -> dict[Key, float]:
    """Returns what a step costs: its seconds where all *rows* have them, else the bytes sent."""
    timed = all(isinstance(row.time, StepTime) for row in rows.values())
    tuned = {key: row.tuned or row for key, row in rows.items()}
    return {key: row_seconds(row) if timed else row.communication_bytes for key, row in tuned.items()}


def lowest_costs(costs: Mapping[Key, float]) -> list[Key]:
    """Returns the keys whose costs are about equal to the lowest."""
    return [key for key, cost in costs.items() if cost * MUCH_LESS <= min(costs.values())]


def _why_nothing_fits(rows: Sequence[Row]) -> str:
    fitting_device = [row for row in rows if row.fits_device and row.device_bytes]
    if fitting_device:
        leanest = min(fitting_device, key=lambda row: row.host_bytes)
        name, disk = leanest.plan.label, leanest.memory.total("nvme")
        if leanest.fits_host:
            return (
                f"nothing fits: {name} takes {human_bytes(disk)} of NVMe per rank, more than there is; "
                "a larger drive, more hosts or more devices would help"
            )
        return (
            f"nothing fits: {name} takes {human_bytes(leanest.host_bytes)} of host memory per rank; "
            "more host memory, more hosts or more devices would help"
        )
    smallest = min(rows, key=lambda row: row.device_bytes or math.inf)
    return (
        f"nothing fits: {smallest.plan.label} still needs {human_bytes(smallest.device_bytes)}; "
        "more devices, a smaller micro-batch or activation checkpointing would help"
    )


def _why_not_others(setup: Setup, chosen: Row, rows: Sequence[Row]) -> Iterator[str]:
    """Yields why no row below *chosen* was taken."""
    order = _offload_distance(chosen), chosen.plan.stage
    lower = [row for row in rows if (_offload_distance(row), row.plan.stage) < order]
    if not lower:
        if not chosen.plan.stage:
            yield "everything fits without partitioning"
        return
    if _offload_distance(chosen):
        yield "nothing fits without offload"
    if too_large := [row for row in lower if not row.fits_device]:
        yield f"{too_large[-1].plan.label} would need {human_bytes(too_large[-1].device_bytes)}"
        return
    if not setup.micro_batch_given and lower[-1].device_bytes > ROOMY * setup.usable_bytes:
        needs = human_bytes(lower[-1].device_bytes)
        yield f"{lower[-1].plan.label} leaves too little for activations: it takes {needs}"


def _preset_beside_chosen(preset: Row, chosen: Row) -> str:
    """Returns why *chosen* is chosen and not what was given."""
    if preset is chosen:
        return f"it is {GIVEN}, and nothing that fits costs a tenth less"
    name = f"{GIVEN}, {preset.plan.label},"
    if not preset.device_bytes:
        return f"what {name} needs of a device is unknown"
    if not preset.fits_device:
        return f"{name} does not fit: it needs {human_bytes(preset.device_bytes)}"
    if not preset.fits_host:
        return f"{name} does not fit: it takes {human_bytes(preset.host_bytes)} of the host a rank"
    if not preset.fits_nvme:
        return f"{name} does not fit: it takes {human_bytes(preset.memory.total('nvme'))} of NVMe a rank"
    if _offload_distance(preset) > _offload_distance(chosen):
        return f"{name} fits too, and offloads without need"
    seconds = row_seconds(preset.tuned or preset)
    if math.isfinite(seconds) and seconds > row_seconds(chosen.tuned or chosen):
        return f"{name} fits too, and a step takes {human_seconds(seconds)}"
    sent = (preset.tuned or preset).communication_bytes
    if sent > (chosen.tuned or chosen).communication_bytes:
        return f"{name} fits too, and sends {human_bytes(sent)} per step"
    return f"{name} fits too, and takes {human_bytes(preset.device_bytes)}"


GIVEN = "the given strategy"
"""The row of the configuration, the options or the run."""


def _cost_sentences(chosen: Row) -> Iterator[str]:
    """Yields the bytes and the seconds of a step, and what the better setting gains."""
    tuned_row = chosen.tuned or chosen
    yield f"a rank sends {human_bytes(tuned_row.communication_bytes)} per step"
    if not isinstance(tuned_row.time, StepTime):
        if tuned_row is not chosen:
            yield f"without that setting it sends {human_bytes(chosen.communication_bytes)}"
        return
    interval = f"{human_seconds(tuned_row.time.least)} to {human_seconds(tuned_row.time.most)}"
    yield f"a step takes about {human_seconds(tuned_row.time.seconds)} ({interval})"
    if tuned_row is not chosen:
        extra = human_bytes(tuned_row.device_bytes - chosen.device_bytes)
        setting = "that setting" if len(list(tuning_texts(chosen))) == 1 else "these settings"
        yield f"without {setting} {human_seconds(row_seconds(chosen))}, and {extra} less memory"


def _roomier_sentence(setup: Setup, chosen: Row, equal: Sequence[Row]) -> Iterator[str]:
    """Yields a row of about the same cost that takes much less memory, where memory is short."""
    if chosen.device_bytes <= ROOMY * setup.usable_bytes and chosen.largest_micro_batch is None:
        return
    roomiest = max(equal, key=lambda row: (row.largest_micro_batch or 0, -row.device_bytes))
    limit, mine = roomiest.largest_micro_batch, chosen.largest_micro_batch
    if limit is not None and mine is not None and limit > mine:
        yield f"{roomiest.plan.label} costs about as much, and takes {limit} sequences instead of {mine}"
    elif (share := roomiest.device_bytes / max(1, chosen.device_bytes)) < MUCH_LESS:
        yield f"{roomiest.plan.label} costs about as much, and takes {share * 100:.0f} % of the memory"
