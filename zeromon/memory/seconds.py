"""Predicts the seconds of a training step: compute, communication, offload, optimizer. Pure.

A step is the sum of its parts; communication counts with what compute does not hide, as the schedule
has it (:mod:`zeromon.memory.schedule`). Forward takes 2 FLOPs a parameter and token, and the scores of
attention; backward twice as many (Chowdhery et al. 2022, arXiv 2204.02311, appendix B). Checkpointing
repeats forward: a third more (Korthikanti et al. 2022, arXiv 2205.05198, section 5). Bytes on a link are
those of ring collectives (Rajbhandari et al. 2020, arXiv 1910.02054, section 7). Copies into and out of
the buffers of collectives are added at the speed of the optimizer's updates.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields

from zeromon.memory import schedule
from zeromon.memory.offload import on_host_share
from zeromon.memory.predict import Batch, state_bytes
from zeromon.memory.schedule import Hides, Rates
from zeromon.memory.spec import ModelSpec, ShardPlan, Sizes, ZeroStage


@dataclass(frozen=True, slots=True, kw_only=True)
class Speeds:
    """How fast a rank does each thing, in seconds of a micro-step or bytes/s; None where unknown."""

    forward_seconds: float | None
    backward_seconds: float | None
    recompute_seconds: float = 0.0
    """Of a micro-step: the second forward of activation checkpointing."""
    other_seconds: float = 0.0
    """Of a step: the wait for data, and what belongs to no phase."""
    gather: float | None = None
    """Bus bandwidth of an all-gather."""
    reduce: float | None = None
    """Bus bandwidth of a reduce-scatter."""
    all_reduce: float | None = None
    """Bus bandwidth of an all-reduce; None: it is both, one after the other."""
    between: float | None = None
    """Bus bandwidth between the copies of hybrid sharding; None: the same."""
    latency: float = 0.0
    """Seconds of a collective besides its bytes."""
    update: float | None = None
    """By which the optimizer reads and writes on the device."""
    host_update: float | None = None
    """The same on the host, the share of one rank."""
    pcie: float | None = None
    nvme: float | None = None
    """The share of one rank."""
    hides: Hides = Hides.STREAMS
    waiting_seconds: float = 0.0
    """Of a step: for late ranks, and what else a run's collectives took beyond their bytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """The seconds of a step by what they are spent on; they add up to the step."""

    compute: float
    recompute: float
    communication: float
    """Exposed: what compute does not hide."""
    copies: float
    """Into and out of the buffers of collectives."""
    offload: float
    """Between device, host and NVMe, exposed."""
    optimizer: float
    other: float
    waiting: float = 0.0
    """For late ranks."""

    @property
    def total(self) -> float:
        """Seconds of a step."""
        return float(sum(getattr(self, field.name) for field in fields(self)))


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTime:
    """A predicted step: its likely parts, and the interval of its seconds."""

    parts: Parts
    least: float
    most: float
    exposed: Mapping[str, float] = field(default_factory=dict)
    """Likely seconds of exposed communication by unit or bucket."""

    @property
    def seconds(self) -> float:
        """Seconds of a step, likely."""
        return self.parts.total


def forward_flops(model: ModelSpec, batch: Batch) -> tuple[float, float]:
    """Returns the FLOPs of a forward of a micro-batch: of all, and of what checkpointing repeats.

    2 a weight and token: the matrices of a transformer count once, experts as far as a token uses
    them, an embedding not at all, as it looks up. The scores take 4 s h a token and layer. Where the
    layers are unknown, every parameter is a weight, and all of forward is repeated.
    """
    tokens = batch.sequences * batch.length
    t = model.architecture
    if t is None:
        return (2.0 * model.params * tokens,) * 2
    matrices = t.hidden * (2 * t.attention_width + 2 * t.kv_width + (3 if t.gated else 2) * t.ffn)
    layers = token_flops(t.layers * matrices, t.layers * t.attention_width, batch.length)
    return (layers + 2.0 * t.hidden * t.vocab) * tokens, layers * tokens


def token_flops(weights: float, attention: float, length: float) -> float:
    """Returns the FLOPs of a token's forward: 2 a weight, and 4 s h a layer for the scores.

    *attention*: layers times the width of the queries. The scores count in full, also where a mask
    makes half of them superfluous (Chowdhery et al. 2022, arXiv 2204.02311, appendix B; Kaplan et al.
    2020, arXiv 2001.08361, section 2.1).
    """
    return 2.0 * weights + 4.0 * attention * length


def training_flops(weights: float, trained: float, attention: float, length: float) -> float:
    """Returns the FLOPs that a token's training needs; what checkpointing repeats does not count.

    Backward computes the gradients of what a layer got, and those of its *trained* weights: 6 a
    weight and 12 s h a layer in all where every weight is trained.
    """
    return 3.0 * token_flops(0, attention, length) + 4.0 * weights + 2.0 * trained


def step_time(
    sizes: Sizes, plan: ShardPlan, speeds: tuple[Speeds, Speeds, Speeds]
) -> StepTime | str:
    """Returns the time of a step at the likely, least and most speeds, or what is not known."""
    unknown = missing(plan, speeds[0])
    if unknown:
        return unknown
    waits = [schedule.exposed(sizes, plan, rates(each)) for each in speeds]
    found = [parts(sizes, plan, s, wait) for s, wait in zip(speeds, waits, strict=True)]
    totals = [each.total for each in found]
    return StepTime(parts=found[0], least=min(totals), most=max(totals), exposed=waits[0])


def missing(plan: ShardPlan, s: Speeds) -> str:
    """Returns the first speed that *plan* needs and that is unknown, in words; "" for none."""
    sends = plan.ranks > 1
    moves = plan.optimizer_on != "device"
    needed = (
        (
            True,
            s.forward_seconds,
            "the time of compute: --micro-batch and a named device (--memory)",
        ),
        (sends, s.gather, "the speed of the links: --interconnect"),
        (sends, s.reduce, "the speed of the links: --interconnect"),
        (plan.optimizer_on == "device", s.update, "the bandwidth of the device's memory"),
        (plan.optimizer_on != "device", s.host_update, "the speed of the host: --host-bandwidth"),
        (moves, s.pcie, "the speed between device and host: --pcie"),
        (
            "nvme" in (plan.optimizer_on, plan.params_on),
            s.nvme,
            "the speed of NVMe: --nvme-bandwidth",
        ),
    )
    return next((what for needs, known, what in needed if needs and not known), "")


def parts(sizes: Sizes, plan: ShardPlan, s: Speeds, exposed: Mapping[str, float]) -> Parts:
    """Returns the seconds of a step at the speeds *s*, which are known; *exposed*: of the schedule."""
    micro = plan.accumulation
    forward = (s.forward_seconds or 0.0) * micro
    backward = (s.backward_seconds or 0.0) * micro
    recompute = s.recompute_seconds * micro
    moved = _moved(sizes, plan, s)
    hidden = forward + backward if s.hides == Hides.STREAMS else 0.0
    return Parts(
        compute=forward + backward,
        recompute=recompute,
        communication=sum(exposed.values()),
        copies=sum(copied_bytes(sizes, plan)) / (s.update or s.host_update or math.inf),
        offload=max(0.0, moved[0] - hidden) + moved[1],
        optimizer=_update(sizes, plan, s),
        other=s.other_seconds,
        waiting=s.waiting_seconds if plan.ranks > 1 else 0.0,
    )


def rates(s: Speeds) -> Rates:
    """Returns what the schedule of a micro-step needs of the speeds *s*."""
    gather, reduce = s.gather or math.inf, s.reduce or math.inf
    return Rates(
        forward=s.forward_seconds or 0.0,
        backward=(s.backward_seconds or 0.0) + s.recompute_seconds,
        gather=gather,
        reduce=reduce,
        between=s.between or min(gather, reduce),
        latency=s.latency,
        hides=s.hides,
        all_reduce=s.all_reduce or 0.0,
    )


# ---- copies ---------------------------------------------------------------------------------------


def copied_bytes(sizes: Sizes, plan: ShardPlan) -> tuple[float, float]:
    """Returns the bytes that a step reads and writes to fill and empty buffers: forward, backward.

    A copy of N bytes reads N and writes N. Both FSDP2 (``_fsdp_collectives.py``: all_gather_copy_in,
    split_with_sizes_copy, chunk_cat) and DeepSpeed's stage 3 (``partition_parameters.py``: the copy of
    the own partition, torch.cat of all) copy a shard in and all parameters out. Gradients are copied
    once by FSDP2 and stages 1 and 2 (the bucket), twice by stage 3 (also ``reduce_scatter_coalesced``);
    DDP and stage 0 copy them into buckets and back. FSDP1's parameters are views of what is gathered.
    """
    if plan.ranks == 1:
        return 0.0, 0.0
    is_3 = plan.stage == ZeroStage.PARAMETERS
    once = 2 * sizes.trainable * plan.precision.sent_grad_bytes
    if plan.stage == ZeroStage.NONE:
        return 0.0, 0.0 if plan.bucket_views else 2 * once
    reduced = once * plan.accumulation * (2 if is_3 and plan.framework == "deepspeed" else 1)
    if plan.framework == "fsdp1" or (plan.framework == "deepspeed" and not is_3):
        return 0.0, reduced
    whole = (sizes.numel - sizes.persistent_numel) * plan.precision.compute_bytes
    gathered = 2 * whole * (1 + 1 / plan.shard_ranks) * plan.accumulation
    return gathered, reduced + gathered * plan.reshards


# ---- optimizer and offload ------------------------------------------------------------------------


def update_bytes(plan: ShardPlan) -> float:
    """Returns the bytes that the optimizer reads and writes for a parameter: 28 for Adam.

    It reads the gradient, and reads and writes the states and what it updates; a master is written
    into the low-precision parameter, too.
    """
    p = plan.precision
    updated = 4 if p.has_master else p.param_bytes
    copied = p.param_bytes if p.has_master else 0
    return 2 * state_bytes(plan.optimizer, plan) + 2 * updated + p.grad_bytes + copied


def _update(sizes: Sizes, plan: ShardPlan, s: Speeds) -> float:
    """Returns the seconds of the optimizer, on the device and on the host, one after the other."""
    nbytes = sizes.trainable / (plan.shard_ranks if plan.stage else 1) * update_bytes(plan)
    moved = on_host_share(sizes, plan)
    on_host = nbytes * moved / (s.host_update or math.inf)
    return on_host + nbytes * (1 - moved) / (s.update or math.inf)


def _moved(sizes: Sizes, plan: ShardPlan, s: Speeds) -> tuple[float, float]:
    """Returns the seconds of copies beside forward and backward, and of those around the optimizer.

    Gradients leave the device once a micro-step, updated parameters come back once a step; offloaded
    parameters come for forward and for backward. NVMe reads and writes the states of the optimizer and
    the fp32 gradients once a step, the parameters as often as they are used
    (Rajbhandari et al. 2021, arXiv 2104.07857, section 5).
    """
    if plan.optimizer_on == "device":
        return 0.0, 0.0
    p, micro = plan.precision, plan.accumulation
    shard, share = sizes.trainable / plan.shard_ranks, on_host_share(sizes, plan)
    pcie, nvme = s.pcie or math.inf, s.nvme or math.inf
    beside = shard * p.grad_bytes * micro * share / pcie
    after = 0.0
    if plan.params_on == "device":
        after += shard * p.param_bytes * share / pcie
    else:
        whole = sizes.numel / plan.shard_ranks * p.compute_bytes * 2 * micro
        beside += whole / pcie
        if plan.params_on == "nvme":
            beside += whole / nvme
            after += shard * p.param_bytes / nvme
    if plan.optimizer_on == "nvme":
        states = state_bytes(plan.optimizer, plan) + 4 * p.has_master
        after += shard * share * (2 * states + 2 * 4) / nvme
    return beside, after
