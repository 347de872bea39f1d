"""Predicts the bytes of a training rank by role, with the cause of each term. Pure.

A prediction is a list of :class:`Term`: the plain arithmetic of ZeRO for each role, then additional
terms, each with its cause. Model states follow Rajbhandari et al. 2020 (arXiv
1910.02054, section 3 and figure 1), activations Korthikanti et al. 2022 (arXiv 2205.05198, equations
1 to 6); where a framework allocates otherwise, the term follows the framework and has a cause.
Memory is in bytes, sizes are in elements; roles have the names of :class:`zeromon.ring.events.Role`.
"""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from enum import Enum

from zeromon.memory.spec import Optimizer, ShardPlan, Sizes, Transformer, ZeroStage

ACTIVATION = "activation"
"""Role of activations. The memory census does not count this role: it is the unattributed rest."""


class During(Enum):
    """The part of a step in which the bytes of a term exist."""

    ALWAYS = "always"
    BACKWARD = "backward"
    """From the end of forward to the end of backward, while activations exist."""
    STEP = "step"
    """From the end of backward to the end of the optimizer step."""
    GENERATION = "generation"
    """While a model that is trained by reinforcement learning generates its samples."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Term:
    """Bytes of one role in one place, with their cause."""

    role: str
    nbytes: int
    cause: str = ""
    """Reason for bytes beyond the plain arithmetic of ZeRO; empty for the plain arithmetic."""
    place: str = "device"
    during: During = During.ALWAYS


@dataclass(frozen=True, slots=True)
class MemoryBreakdown:
    """All terms of one rank."""

    terms: tuple[Term, ...]

    def total(self, tier: str = "device", during: During | None = None) -> int:
        """Returns the bytes in *tier* at the peak, or in one part of the step."""
        if during is not None:
            phases = (During.ALWAYS, during)
            return sum(t.nbytes for t in self.terms if t.place == tier and t.during in phases)
        return max(self.total(tier, phase) for phase in During)

    def role(self, role: str, tier: str | None = None, during: During | None = None) -> int:
        """Returns the bytes of *role*, in one place or in all places."""
        phases = tuple(During) if during is None else (During.ALWAYS, during)
        return sum(
            t.nbytes
            for t in self.terms
            if t.role == role and tier in (None, t.place) and t.during in phases
        )

    def by_role(self, tier: str = "device") -> dict[str, int]:
        """Returns role -> bytes in *tier* at its peak, without empty roles."""
        phases = (During.BACKWARD, During.STEP, During.GENERATION)
        during = max(phases, key=lambda phase: self.total(tier, phase))
        roles = dict.fromkeys(t.role for t in self.terms if t.place == tier)
        totals = {role: self.role(role, tier, during) for role in roles}
        return {role: nbytes for role, nbytes in totals.items() if nbytes}

    @property
    def model_states(self) -> int:
        """Bytes of parameters, gradients and optimizer states by plain arithmetic, in all places.

        At their peak: the whole gradients of backward and the shard of the step never coexist.
        """
        states = MemoryBreakdown(tuple(t for t in self.terms if not t.cause and t.role != ACTIVATION))
        roles = {term.role for term in states.terms}
        return max(sum(states.role(role, during=phase) for role in roles) for phase in During)


# ---- model states ---------------------------------------------------------------------------------


def memory_of(sizes: Sizes, plan: ShardPlan, activations: Iterable[Term] = ()) -> MemoryBreakdown:
    """Returns the memory of one rank; *activations*: measured, or of :func:`transformer_activations`."""
    terms = [
        *_param_terms(sizes, plan),
        *_grad_terms(sizes, plan),
        *_state_terms(sizes, plan),
        *activations,
    ]
    terms += swap_buffer_terms(sizes, plan)
    if sizes.buffer_bytes:
        terms.append(Term(role="buffer", nbytes=sizes.buffer_bytes, cause="buffers of the model"))
    # Empty terms (no padding, no prefetch) would be listed as causes of 0 bytes
    return MemoryBreakdown(tuple(t for t in terms if t.nbytes > 0))


def _param_terms(s: Sizes, p: ShardPlan) -> Iterator[Term]:
    itemsize = p.precision.param_bytes
    if p.stage < ZeroStage.PARAMETERS and p.framework in ("deepspeed", "ddp"):
        yield Term(role="unsharded_param", nbytes=round(s.numel * itemsize))
    else:
        base = s.numel // p.shard_ranks
        host = min(base, p.max_in_cpu) if p.params_on == "nvme" else 0
        yield Term(role="sharded_param", nbytes=round(host * itemsize), place="host")
        yield Term(role="sharded_param", nbytes=round((base - host) * itemsize), place=p.params_on)
        yield from _padding_terms("sharded_param", s.shard_numel - base, itemsize, p.params_on)
        yield from _gathered_param_terms(s, p)
    if p.precision.has_master:
        split = p.shard_ranks if p.stage else 1
        yield from _of_optimizer("master_param", s.trainable // split * 4, s, p)
        if p.stage == ZeroStage.PARAMETERS:
            padding = s.trainable_shard_numel - s.trainable // split
            yield from _padding_terms("master_param", padding, 4, p.optimizer_on)


def _padding_terms(role: str, numel: int, itemsize: float, tier: str = "device") -> Iterator[Term]:
    if numel > 0:
        nbytes = round(numel * itemsize)
        yield Term(role=role, nbytes=nbytes, cause="padding to equal shards", place=tier)


def _gathered_param_terms(s: Sizes, p: ShardPlan) -> Iterator[Term]:
    """Yields the gathered parameters of stage 3, which exist beside the shards."""
    itemsize = p.precision.compute_bytes
    if s.persistent_numel:
        yield Term(
            role="unsharded_param",
            nbytes=round(s.persistent_numel * itemsize),
            cause=f"parameters of at most {p.persistence_numel:,} elements stay gathered "
            "(stage3_param_persistence_threshold)",
        )
    if p.secondary_ranks:
        yield Term(
            role="secondary_param",
            nbytes=math.ceil((s.numel - s.persistent_numel) / p.secondary_ranks) * itemsize,
            cause="ZeRO++ keeps a second copy, split within the node (zero_hpz_partition_size)",
        )
    if s.kept_numel:
        yield Term(
            role="unsharded_param",
            nbytes=s.kept_numel * itemsize,
            cause="units that stay gathered from forward to backward (the root, or "
            "reshard_after_forward=False)",
            during=During.BACKWARD,
        )
    if not s.unit_numels:
        return
    largest = s.unit_numels[0]
    yield Term(
        role="unsharded_param",
        nbytes=largest * itemsize,
        cause="the largest unit while it computes",
        during=During.BACKWARD,
    )
    if p.framework == "deepspeed":
        # each fetch requests another bucket, up to stage3_max_live_parameters
        remain = s.numel - largest - s.persistent_numel
        bound = max(0, p.live_numel - largest) + s.largest_tensor_numel
        ahead = min(remain, bound if p.live_numel else p.prefetch_numel) if p.prefetch_numel else 0
        cause = "units fetched ahead (stage3_prefetch_bucket_size, stage3_max_live_parameters)"
        # half of the reuse distance lies before the end of forward; the live limit is not asked
        if (reused := min(remain, p.reuse_numel // 2)) > ahead:
            ahead, cause = reused, "units that backward uses again soon (stage3_max_reuse_distance)"
    else:
        count = 1 if p.prefetch_units is None else p.prefetch_units
        listed = s.unit_numels[1 : 1 + count]
        # Only the largest units are listed, and no other is larger than the last of them
        bound = sum(listed) + (count - len(listed)) * s.unit_numels[-1]
        ahead = min(bound, s.numel - largest - s.kept_numel)
        cause = "units gathered at once by prefetch"
    yield Term(
        role="unsharded_param", nbytes=max(0, ahead) * itemsize, cause=cause, during=During.BACKWARD
    )


def _grad_terms(s: Sizes, p: ShardPlan) -> Iterator[Term]:
    if p.framework == "ddp":
        yield from _in_their_type(s.trainable, p, "unsharded_grad")
        if not p.bucket_views:
            yield Term(
                role="reduce_scatter",
                nbytes=round(s.trainable * p.precision.grad_bytes),
                cause="DDP copies gradients into its buckets (gradient_as_bucket_view is off)",
            )
        return
    if p.stage == ZeroStage.NONE:
        yield from _in_their_type(s.trainable, p, "unsharded_grad")
        return
    tier = p.optimizer_on if p.framework == "deepspeed" else p.params_on
    tier = "host" if tier == "nvme" else tier  # DeepSpeed swaps only their fp32 copy
    if p.stage == ZeroStage.OPTIMIZER:
        yield from _grads_of_stage_1(s, p, tier)
    else:
        yield from _in_their_type(s.trainable // p.shard_ranks, p, "sharded_grad", tier)
        if p.stage == ZeroStage.PARAMETERS:
            padding = s.trainable_shard_numel - s.trainable // p.shard_ranks
            yield from _padding_terms("sharded_grad", padding, p.precision.grad_bytes, tier)
        if p.accumulation > 1 and not p.reduces_each_micro_step:
            yield Term(
                role="unsharded_grad",
                nbytes=s.trainable * p.precision.compute_bytes,
                cause="whole gradients that accumulate (set_requires_gradient_sync, no_sync)",
            )
        elif s.unit_numels:
            total_bytes = round(s.trainable * p.precision.grad_bytes)
            yield Term(
                role="unsharded_grad",
                nbytes=min(s.unit_numels[0] * p.precision.compute_bytes, total_bytes),
                cause="gradients of the unit in backward, before they are reduced",
                during=During.BACKWARD,
            )
    # In fp32 the gradient itself is what the optimizer reads
    if p.framework == "deepspeed" and p.optimizer_on != "device" and p.precision.param_bytes < 4:
        yield from offloaded_grad_terms(s, p)
    yield from _reduce_bucket_terms(s, p)


def _grads_of_stage_1(s: Sizes, p: ShardPlan, tier: str) -> Iterator[Term]:
    """Yields the whole gradients of backward, and the shard of the step.

    The paper keeps whole gradients; DeepSpeed frees them once its part is averaged, unless it
    accumulates them in fp32 (``BF16_Optimizer`` has a whole fp32 buffer).
    """
    shard = s.trainable // p.shard_ranks
    if p.precision.grad_bytes > p.precision.plain_grad_bytes and tier == "device":
        yield from _in_their_type(s.trainable, p, "unsharded_grad")
        return
    yield from _in_their_type(s.trainable, p, "unsharded_grad", during=During.BACKWARD)
    yield from _in_their_type(shard, p, "sharded_grad", tier, During.STEP)


def _in_their_type(
    numel: int, p: ShardPlan, role: str, tier: str = "device", during: During = During.ALWAYS
) -> Iterator[Term]:
    """Yields *numel* gradients in the type of the parameters, and what a wider type adds."""
    plain_bytes = p.precision.plain_grad_bytes
    yield Term(role=role, nbytes=round(numel * plain_bytes), place=tier, during=during)
    yield Term(
        role=role,
        nbytes=round(numel * (p.precision.grad_bytes - plain_bytes)),
        cause="gradients are kept in a wider type than the parameters (grad_accum_dtype)",
        place=tier,
        during=during,
    )


def _reduce_bucket_terms(s: Sizes, p: ShardPlan) -> Iterator[Term]:
    at_once = p.grad_buckets if p.stage < ZeroStage.PARAMETERS else 1
    numel = p.grad_bucket_numel * at_once
    if p.stage < ZeroStage.PARAMETERS:  # stages 1 and 2 limit the bucket to the gradients
        numel = min(numel, s.trainable)
    nbytes = numel * p.precision.sent_grad_bytes
    yield Term(
        role="reduce_scatter",
        nbytes=round(nbytes),
        cause="buckets that gradients are reduced from (reduce_bucket_size)",
        during=During.ALWAYS if p.stage == ZeroStage.PARAMETERS else During.BACKWARD,
    )


def _state_terms(s: Sizes, p: ShardPlan) -> Iterator[Term]:
    split = p.shard_ranks if p.stage else 1
    state_size = state_bytes(p.optimizer, p)
    yield from _of_optimizer("optimizer_state", round(s.trainable // split * state_size), s, p)
    if p.stage == ZeroStage.PARAMETERS:
        padding = s.trainable_shard_numel - s.trainable // split
        yield from _padding_terms("optimizer_state", padding, state_size, p.optimizer_on)
    if p.optimizer.is_factored:
        yield Term(role="optimizer_state", nbytes=s.factored_numel // split * 4, place=p.optimizer_on)


def _of_optimizer(role: str, nbytes: int, s: Sizes, p: ShardPlan) -> Iterator[Term]:
    """Yields *nbytes* that the optimizer keeps, where its sub-groups are."""
    moved = round(nbytes * on_host_share(s, p))
    yield Term(role=role, nbytes=moved, place=p.optimizer_on)
    yield Term(role=role, nbytes=nbytes - moved)


def state_bytes(optimizer: Optimizer, plan: ShardPlan) -> float:
    """Returns the bytes of optimizer state per trainable parameter, without the fp32 master."""
    itemsize = optimizer.state_bytes
    if itemsize == 4.0:  # the optimizer fixes no size: its state has the type of the updated tensor
        itemsize = 4.0 if plan.precision.has_master else plan.precision.state_bytes
    return optimizer.full_states * itemsize


# ---- activations ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """The micro-batch of one rank."""

    sequences: int
    length: int
    """Tokens of a sequence."""
    checkpointing: bool = False
    """Layers keep only their input, and backward recomputes the rest (activation checkpointing)."""
    fused_attention: bool = True
    """Scores are never written to memory (FlashAttention, SDPA)."""


def layer_activation_bytes(t: Transformer, b: Batch, itemsize: int = 2) -> int:
    """Returns the bytes that one layer keeps for backward; *itemsize*: bytes per element.

    For an ungated MLP of width 4h, as many keys as queries and dropout this is equation 1 of
    Korthikanti et al. 2022, ``sbh (34 + 5 a s / h)`` at two bytes, without the second term when
    attention is fused (their selective recomputation of the same tensors, equation 6). Tensor
    parallelism divides what is between the inputs of attention and MLP and their outputs: equation 2,
    ``sbh (10 + 24 / t + 5 a s / (h t))``.
    """
    tokens, h, f = b.sequences * b.length, t.hidden, t.ffn
    q, kv = t.attention_width, t.kv_width
    attention = q + 2 * kv + q  # q; k and v; input of the projection
    mlp = 4 * f if t.gated else 2 * f
    unsplit = itemsize * tokens * 4 * h  # two norms, and the inputs of attention and MLP
    split = itemsize * tokens * (attention + mlp)
    scores = t.heads * b.length * tokens
    if b.fused_attention:
        split += 4 * t.heads * tokens  # the log-sum-exp of each row
    else:
        split += itemsize * scores * (2 if t.dropout else 1)
    if t.dropout:  # masks of one byte
        unsplit += 2 * tokens * h
        split += 0 if b.fused_attention else scores
    return unsplit + split // t.tensor_ranks


def head_activation_bytes(t: Transformer, b: Batch, itemsize: int = 2) -> int:
    """Returns the bytes of the output layer: norm, input, logits, and the fp32 logits of the loss."""
    tokens = b.sequences * b.length
    return tokens * (2 * itemsize * t.hidden + (itemsize + 4) * t.vocab // t.tensor_ranks)


def transformer_activations(t: Transformer, b: Batch, itemsize: int = 2) -> tuple[Term, ...]:
    """Returns the terms of the activations at their peak, the end of forward."""
    layer = layer_activation_bytes(t, b, itemsize)
    head = head_activation_bytes(t, b, itemsize)
    layer_bytes = t.layers * layer
    if b.checkpointing:
        layer_bytes = t.layers * itemsize * b.sequences * b.length * t.hidden
    terms = [
        Term(role=ACTIVATION, nbytes=layer_bytes, during=During.BACKWARD),
        Term(role=ACTIVATION, nbytes=head, cause="logits and the loss", during=During.BACKWARD),
    ]
    if b.checkpointing and layer > head:  # a recomputed layer exists after the logits are freed
        cause = "the layer that is computed again"
        terms.append(Term(role=ACTIVATION, nbytes=layer - head, cause=cause, during=During.BACKWARD))
    return tuple(terms)


# ---- communication --------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class SentBytes:
    """The bytes that one rank sends in a step, by what for."""

    reduced: float = 0.0
    """Gradients, in backward."""
    gathered_forward: float = 0.0
    gathered_backward: float = 0.0
    gathered_after: float = 0.0
    """Updated parameters, after the optimizer."""
    between: float = 0.0
    """Hybrid: shards of the gradients that are summed over the copies, in backward."""

    @property
    def total(self) -> float:
        """All of them."""
        gathered = self.gathered_forward + self.gathered_backward + self.gathered_after
        return self.reduced + self.between + gathered


def communication_bytes(sizes: Sizes, plan: ShardPlan) -> int:
    """Returns the bytes that one rank sends in a step."""
    return round(sent_step_bytes(sizes, plan).total)


def sent_step_bytes(sizes: Sizes, plan: ShardPlan) -> SentBytes:
    """Returns what one rank sends in a step (section 7 of the ZeRO paper, ring collectives).

    An all-reduce sends 2 (n-1)/n of its size, a reduce-scatter or an all-gather (n-1)/n.
    """
    n = plan.shard_ranks if plan.stage else plan.ranks
    share = (n - 1) / n
    copies = plan.ranks // plan.shard_ranks if plan.stage else 1
    grads = sizes.trainable * plan.precision.sent_grad_bytes
    compute = plan.precision.compute_bytes
    params = (sizes.numel - sizes.persistent_numel) * compute
    micro = plan.accumulation
    times = micro if plan.reduces_each_micro_step else 1
    if plan.stage == ZeroStage.NONE:
        return SentBytes(reduced=2 * grads * times * share)
    hybrid = 2 * (grads / n) * (copies - 1) / copies if copies > 1 else 0.0
    updated = sizes.trainable * compute * share
    if plan.stage == ZeroStage.OPTIMIZER:
        return SentBytes(reduced=grads * share, gathered_after=updated, between=hybrid)
    reduced = grads * times * share
    if plan.stage == ZeroStage.GRADIENTS and plan.framework == "deepspeed":
        return SentBytes(reduced=reduced, gathered_after=updated, between=hybrid)
    once = params * micro * share
    if plan.stage == ZeroStage.GRADIENTS:
        return SentBytes(reduced=reduced, gathered_forward=once, between=hybrid)
    return SentBytes(
        reduced=reduced,
        gathered_forward=once,
        gathered_backward=once if plan.reshards else 0.0,
        gathered_after=sizes.persistent_numel * compute * share,
        between=hybrid,
    )


def sequences_that_fit(free_bytes: int, t: Transformer, b: Batch, itemsize: int = 2) -> int:
    """Returns the largest micro-batch, in sequences, whose activations fit into *free_bytes*."""
    need = sum(term.nbytes for term in transformer_activations(t, replace(b, sequences=1), itemsize))
    return max(0, free_bytes // need)


_ROUNDED = "the pinned allocator rounds an allocation up to a power of two (pin_memory)"


def sub_groups(s: Sizes, p: ShardPlan) -> int:
    """Returns the number of pieces in which stage 3 updates a shard (``sub_group_size``)."""
    if p.stage < ZeroStage.PARAMETERS or not p.sub_group_numel:
        return 1
    return max(1, math.ceil(s.trainable // p.shard_ranks / p.sub_group_numel))


def on_host_share(s: Sizes, p: ShardPlan) -> float:
    """Returns the share of the optimizer that is not on the device (Offload++, ``ratio``).

    Whole sub-groups stay on the device: a shard of one sub-group is offloaded at any ratio but 0.
    """
    if p.optimizer_on == "device":
        return 0.0
    count = sub_groups(s, p)
    return 1 - int((1 - p.offload_ratio) * count) / count


def offloaded_grad_terms(s: Sizes, p: ShardPlan) -> Iterator[Term]:
    """Yields the fp32 gradients of DeepSpeed's optimizer on the host, and staging of stages 1 and 2."""
    is_3 = p.stage == ZeroStage.PARAMETERS
    shard = s.trainable_shard_numel if is_3 else s.trainable // p.shard_ranks
    # stage 3 keeps the low-precision shard beside the fp32 one; stages 1 and 2 replace it
    nbytes = round(shard * (4 if is_3 else 4 - p.precision.grad_bytes))
    moved = round(nbytes * on_host_share(s, p))
    cause = "fp32 gradients for the optimizer on the host"
    yield Term(role="sharded_grad", nbytes=moved, cause=cause, place=p.optimizer_on, during=During.STEP)
    cause = "fp32 gradients of the sub-groups that stay on the device (ratio)"
    yield Term(role="sharded_grad", nbytes=nbytes - moved, cause=cause)
    if not is_3 and p.accumulation > 1:
        yield Term(
            role="unsharded_grad",
            nbytes=round(shard * p.precision.grad_bytes),
            cause="gradients that accumulate on the host (gradient_accumulation_steps)",
            place="host",
        )
    if not is_3:
        staged = shard + 2 * s.largest_tensor_numel
        yield Term(
            role="swap_buffer",
            nbytes=round(staged * p.precision.param_bytes),
            cause="updated parameters and gradients on their way from and to the host",
            place="host",
        )


def swap_buffer_terms(s: Sizes, p: ShardPlan) -> Iterator[Term]:
    """Yields the buffers between NVMe and the device, and what pinned allocations are rounded up by."""
    if p.framework != "deepspeed":
        return
    group_numel = math.ceil(s.trainable // p.shard_ranks / sub_groups(s, p))
    if p.optimizer_on == "nvme":
        yield Term(
            role="swap_buffer",
            nbytes=p.optimizer_buffers * group_numel * 4,
            cause="buffers of a sub-group for the optimizer on NVMe (buffer_count x sub_group_size)",
            place="host",
        )
    if p.params_on == "nvme" and p.param_buffer_numel:
        is_spilled = s.numel // p.shard_ranks > p.max_in_cpu
        numel = p.param_buffer_numel + (group_numel if is_spilled else 0)
        yield Term(
            role="swap_buffer",
            nbytes=round(numel * p.precision.param_bytes),
            cause="buffers for parameters on NVMe (buffer_count x buffer_size, and a sub-group)",
            place="host",
        )
    if p.pins:
        # By the formula below, 0 bytes are rounded up to 2
        pinned = [nbytes for nbytes in _pinned_allocations(s, p, group_numel) if nbytes > 0]
        rounded = sum((1 << (nbytes - 1).bit_length()) - nbytes for nbytes in pinned)
        yield Term(role="swap_buffer", nbytes=rounded, cause=_ROUNDED, place="host")


def _pinned_allocations(s: Sizes, p: ShardPlan, group_numel: int) -> Iterator[int]:
    """Yields the bytes of each allocation that DeepSpeed pins; those of the swappers are not rounded."""
    precision = p.precision
    if p.stage == ZeroStage.PARAMETERS:
        if p.optimizer_on != "device":
            yield round(s.trainable // p.shard_ranks * precision.grad_bytes)
        if p.optimizer_on == "host":
            count = sub_groups(s, p)
            yield from [group_numel * 4] * round(count * on_host_share(s, p))
        if p.params_on != "device":
            shard = s.numel // p.shard_ranks
            host = min(shard, p.max_in_cpu) if p.params_on == "nvme" else shard
            yield round(host * precision.param_bytes)
    elif p.optimizer_on == "host":
        shard = s.trainable // p.shard_ranks
        yield from (
            shard * 4,
            shard * 4,
            round(shard * precision.param_bytes),
        )  # master, gradient, staging
