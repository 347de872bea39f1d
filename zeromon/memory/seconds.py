"""Predicts the seconds of a training step: compute, communication, offload, optimizer. Pure.

A step is the sum of its parts; a part that runs beside another counts only with what the other does not
hide. Forward takes 2 FLOPs a parameter and token, and the scores of attention; backward twice as many
(Chowdhery et al. 2022, arXiv 2204.02311, appendix B). Checkpointing repeats forward: a third more
(Korthikanti et al. 2022, arXiv 2205.05198, section 5). Bytes on a link are those of ring collectives
(Rajbhandari et al. 2020, arXiv 1910.02054, section 7), except that DeepSpeed's stages 1 and 2 reduce
whole buckets (``use_multi_rank_bucket_allreduce``): an all-reduce where the paper has a reduce-scatter.
Copies into and out of the buffers of collectives are added at the speed of the optimizer's updates.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

from zeromon.memory.offload import on_host_share
from zeromon.memory.predict import Batch, SentBytes, sent_bytes, state_bytes
from zeromon.memory.spec import ModelSpec, ShardPlan, Sizes, ZeroStage

_UNITS = 32
"""Assumed number of units of a model whose layers are unknown: those of a model of 7 B."""


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
    """Bus bandwidth of a reduce-scatter. An all-reduce is both, one after the other."""
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
    hides: float = 1.0
    """Share of the communication that may run beside compute; 0 where the CPU does both."""
    reducer_hides: float = 1.0
    """The same of DDP's reducer: its backend's threads communicate beside backward on a CPU, too."""


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
    likely, slow, fast = (parts(sizes, plan, each) for each in speeds)
    totals = (likely.total, slow.total, fast.total)
    return StepTime(parts=likely, least=min(totals), most=max(totals))


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


def parts(sizes: Sizes, plan: ShardPlan, s: Speeds) -> Parts:
    """Returns the seconds of a step of *plan* at the speeds *s*, which are known."""
    micro = plan.accumulation
    forward = (s.forward_seconds or 0.0) * micro
    backward = (s.backward_seconds or 0.0) * micro
    recompute = s.recompute_seconds * micro
    sent = sent_bytes(sizes, plan)
    moved = _moved(sizes, plan, s)
    return Parts(
        compute=forward + backward,
        recompute=recompute,
        communication=_exposed(sizes, plan, s, sent, forward, backward + recompute),
        copies=sum(copied_bytes(sizes, plan)) / (s.update or s.host_update or math.inf),
        offload=max(0.0, moved[0] - s.hides * (forward + backward)) + moved[1],
        optimizer=_update(sizes, plan, s),
        other=s.other_seconds,
    )


# ---- communication --------------------------------------------------------------------------------


def _exposed(
    sizes: Sizes, plan: ShardPlan, s: Speeds, sent: SentBytes, forward: float, backward: float
) -> float:
    """Returns the seconds of communication that compute does not hide.

    The first gather of a pass and the last reduction have nothing beside them: one call of each stays
    exposed. DeepSpeed's stages 1 and 2 reduce beside backward with ``overlap_comm`` alone, and gather
    after the step, as all do that gather for the optimizer.
    """
    if plan.ranks == 1:
        return 0.0
    calls = _calls(sizes, plan)
    gather, reduce = s.gather or math.inf, s.reduce or math.inf
    whole = plan.framework == "deepspeed" and plan.stage in (
        ZeroStage.OPTIMIZER, ZeroStage.GRADIENTS,
    )  # fmt: skip
    if plan.stage == ZeroStage.NONE:  # half of an all-reduce's bytes are a gather
        reducing = sent.reduced / 2 / reduce + sent.reduced / 2 / gather
    else:
        reducing = sent.reduced / reduce + (sent.reduced / gather if whole else 0.0)
    reducing += sent.between / (s.between or min(gather, reduce)) + calls.reductions * s.latency
    hidden = s.reducer_hides if plan.framework == "ddp" else s.hides
    if (
        plan.framework == "deepspeed"
        and plan.stage < ZeroStage.PARAMETERS
        and plan.grad_buckets < 2
    ):
        hidden = 0.0
    each = calls.gathers * s.latency
    ahead, again = sent.gathered_forward / gather, sent.gathered_backward / gather
    ahead += each * bool(ahead)
    again += each * bool(again)
    left = _left(ahead, calls.gathers, forward, s.hides)
    left += _left(reducing + again, calls.reductions, backward, hidden)
    return left + sent.gathered_after / gather + s.latency * bool(sent.gathered_after)


def _left(seconds: float, calls: float, beside: float, hides: float) -> float:
    """Returns what of *seconds* in so many calls is not hidden by the compute *beside* them."""
    hidden = hides * min(seconds * (1 - 1 / calls), beside) if calls > 1 else 0.0
    return seconds - hidden


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


@dataclass(frozen=True, slots=True)
class _Calls:
    gathers: float
    """Of a step, in forward; as many in backward."""
    reductions: float


def _calls(sizes: Sizes, plan: ShardPlan) -> _Calls:
    """Returns about how many collectives a step has: one for each unit or bucket."""
    micro = plan.accumulation
    if plan.stage == ZeroStage.PARAMETERS or plan.framework.startswith("fsdp"):
        each = sizes.unit_numels[0] if sizes.unit_numels else sizes.numel / _UNITS
        count = math.ceil(sizes.numel / max(1, each))
        return _Calls(count * micro, count * micro)
    if plan.framework == "ddp":
        bucket = plan.bucket_cap_bytes / plan.precision.sent_grad_bytes
    else:
        bucket = plan.grad_bucket_numel or sizes.trainable
    often = micro if plan.stage == ZeroStage.GRADIENTS else 1
    return _Calls(1, math.ceil(sizes.trainable / bucket) * often)


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
