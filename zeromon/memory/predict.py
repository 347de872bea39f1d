"""Predicts the bytes of a training rank by role, with the cause of each term. Pure.

A prediction is a list of :class:`Term`: the plain arithmetic of ZeRO for each role, then additional
terms, each with its cause. Model states follow Rajbhandari et al. 2020 (arXiv
1910.02054, section 3 and figure 1), activations Korthikanti et al. 2022 (arXiv 2205.05198, equations
1 to 6); where a framework allocates otherwise, the term follows the framework and has a cause.
Memory is in bytes, sizes are in elements; roles have the names of :class:`zeromon.ring.codes.Role`.
"""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from enum import Flag, auto

from zeromon.memory.spec import (
    ROOT,
    Adapters,
    ModelSpec,
    Optimizer,
    ShardPlan,
    Sizes,
    Transformer,
    Unit,
    ZeroStage,
)

ACTIVATION = "activation"
"""Role of activations. The memory census does not count this role: it is the unattributed rest."""

STEP_TEMP = "optimizer_temp"
"""Role of what the optimizer's step allocates and frees. The memory census does not count it."""


class During(Flag):
    """The parts of a step in which the bytes of a term exist."""

    LOSS = auto()
    """The end of forward and the gradient of the loss: all activations exist, and no gradients."""
    BACKWARD = auto()
    """Its first layers: all activations of the others exist."""
    BACKWARD_END = auto()
    """Its last layers: all gradients exist, and no activations."""
    STEP = auto()
    """From the end of backward to the end of the optimizer step."""
    GENERATION = auto()
    """While a model that is trained by reinforcement learning generates its samples."""

    ACTIVATIONS = LOSS | BACKWARD
    GRADIENTS = BACKWARD_END | STEP
    ALWAYS = LOSS | BACKWARD | BACKWARD_END | STEP | GENERATION

    @property
    def label(self) -> str:
        """Name for users: ``end of backward``; ``always`` for all parts."""
        if self is During.ALWAYS:
            return "always"
        return " and ".join(label for phase, label in PHASES.items() if phase & self)


PHASES = {
    During.LOSS: "loss",
    During.BACKWARD: "backward",
    During.BACKWARD_END: "end of backward",
    During.STEP: "optimizer step",
    During.GENERATION: "generation",
}
"""The parts of a step in their order, with their names for users."""


@dataclass(frozen=True, slots=True)
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
        during = during or self.peak_phase(tier)
        return sum(t.nbytes for t in self.terms if t.place == tier and t.during & during)

    def peak_phase(self, tier: str = "device") -> During:
        """Returns the part of the step in which *tier* holds most."""
        return max(PHASES, key=lambda phase: self.total(tier, phase))

    def peak_bytes(self, tiers: Iterable[str]) -> int:
        """Returns the bytes of *tiers* together at their peak."""
        return max(sum(self.total(tier, during) for tier in tiers) for during in PHASES)

    def by_phase(self, tier: str = "device") -> dict[str, int]:
        """Returns name of a part of the step -> bytes in *tier*, of generation where it has its own."""
        totals = {name: self.total(tier, phase) for phase, name in PHASES.items()}
        if not any(term.during is During.GENERATION for term in self.terms):
            del totals[PHASES[During.GENERATION]]
        return totals

    def role(self, role: str, tier: str | None = None, during: During = During.ALWAYS) -> int:
        """Returns the bytes of *role*, in one place or in all places."""
        terms = (t for t in self.terms if t.role == role and tier in (None, t.place))
        return sum(t.nbytes for t in terms if t.during & during)

    def by_role(self, tier: str = "device") -> dict[str, int]:
        """Returns role -> bytes in *tier* at its peak, without empty roles."""
        during = self.peak_phase(tier)
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
        return max(sum(states.role(role, during=phase) for role in roles) for phase in PHASES)


# ---- model states ---------------------------------------------------------------------------------


def memory_of(sizes: Sizes, plan: ShardPlan, activations: Iterable[Term] = ()) -> MemoryBreakdown:
    """Returns the memory of one rank; *activations*: measured, or of :func:`transformer_activations`."""
    terms = [
        *_param_terms(sizes, plan),
        *_grad_terms(sizes, plan),
        *_state_terms(sizes, plan),
        *_step_terms(sizes, plan),
        *activations,
    ]
    terms += swap_buffer_terms(sizes, plan)
    if sizes.buffer_bytes:
        terms.append(Term("buffer", sizes.buffer_bytes, "buffers of the model"))
    # Empty terms (no padding, no prefetch) would be listed as causes of 0 bytes
    return MemoryBreakdown(tuple(t for t in terms if t.nbytes > 0))


def stored_bytes_per_param(s: Sizes, p: ShardPlan) -> float:
    """Returns the mean bytes of a stored parameter: frozen ones may be narrower than trained ones."""
    trained = s.trainable / s.numel
    widths = p.precision
    return trained * widths.param_bytes + (1 - trained) * (widths.frozen_bytes or widths.param_bytes)


def _param_terms(s: Sizes, p: ShardPlan) -> Iterator[Term]:
    itemsize = stored_bytes_per_param(s, p)
    if p.stage < ZeroStage.PARAMETERS and p.framework in ("deepspeed", "ddp"):
        yield Term("unsharded_param", round(s.numel * itemsize))
    else:
        base = s.numel // p.shard_ranks
        host = min(base, p.max_in_cpu) if p.params_on == "nvme" else 0
        yield Term("sharded_param", round(host * itemsize), place="host")
        yield Term("sharded_param", round((base - host) * itemsize), place=p.params_on)
        yield from _padding_terms("sharded_param", s.shard_numel - base, itemsize, p.params_on)
        yield from _gathered_param_terms(s, p)
    if p.precision.has_master:
        split = p.shard_ranks if p.stage else 1
        yield from _of_optimizer("master_param", s.trainable // split * 4, s, p)
        if p.stage == ZeroStage.PARAMETERS:
            padding = s.trainable_shard_numel - s.trainable // split
            yield from _padding_terms("master_param", padding, 4, p.optimizer_on)


def _padding_terms(
    role: str, numel: int, itemsize: float, tier: str = "device", during: During = During.ALWAYS
) -> Iterator[Term]:
    if numel > 0:
        nbytes = round(numel * itemsize)
        yield Term(role, nbytes, "padding to equal shards", place=tier, during=during)


def _gathered_param_terms(s: Sizes, p: ShardPlan) -> Iterator[Term]:
    """Yields the gathered parameters of stage 3, which exist beside the shards."""
    itemsize = p.precision.compute_bytes
    if s.persistent_numel:
        cause = f"parameters of at most {p.persistence_numel:,} elements stay gathered "
        cause += "(stage3_param_persistence_threshold)"
        # The step releases all, and gathers them again at its end (stage3.py)
        exist = During.ALWAYS & ~During.STEP
        yield Term("unsharded_param", round(s.persistent_numel * itemsize), cause, during=exist)
    if p.secondary_ranks:
        nbytes = math.ceil((s.numel - s.persistent_numel) / p.secondary_ranks) * itemsize
        cause = "ZeRO++ keeps a second copy, split within the node (zero_hpz_partition_size)"
        yield Term("secondary_param", nbytes, cause)
    if s.kept_numel:
        cause = "units that stay gathered from forward to backward (the root, or "
        cause += "reshard_after_forward=False)"
        yield Term("unsharded_param", s.kept_numel * itemsize, cause, during=During.ACTIVATIONS)
    if not s.unit_numels:
        return
    largest = s.unit_numels[0]
    cause = "the largest unit while it computes"
    yield Term("unsharded_param", largest * itemsize, cause, during=During.ACTIVATIONS)
    if p.framework == "deepspeed":
        prefetched, reused = _prefetched_numel(s, p) - largest, kept_for_backward(s, p) - largest
        ahead = max(prefetched, reused)
        cause = "units fetched ahead (stage3_prefetch_bucket_size, stage3_max_live_parameters)"
        if reused > prefetched:
            cause = "units that backward uses again soon (stage3_max_reuse_distance)"
    else:
        count = 1 if p.prefetch_units is None else p.prefetch_units
        listed = s.unit_numels[1 : 1 + count]
        # Only the largest units are listed, and no other is larger than the last of them
        bound = sum(listed) + (count - len(listed)) * s.unit_numels[-1]
        ahead = min(bound, s.numel - largest - s.kept_numel)
        cause = "units gathered at once by prefetch"
    yield Term("unsharded_param", max(0, ahead) * itemsize, cause, during=During.ACTIVATIONS)


def _prefetched_numel(s: Sizes, p: ShardPlan) -> int:
    """Returns the elements that ZeRO-3 gathers at once by fetching ahead, in the order of their use.

    Each fetch requests another bucket while fewer than ``max_live_parameters`` are gathered, so the last
    tensor may exceed them (``_fetch_sub_module_impl`` of partitioned_param_coordinator.py).
    """
    partitioned, smallest = s.numel - s.persistent_numel, s.unit_numels[-1]
    if not p.prefetch_numel:
        return 0
    if not p.live_numel:
        return min(partitioned, s.unit_numels[0] + p.prefetch_numel)
    # The embedding is released before the output layer is fetched, unless all between them fit, too
    without_last = partitioned - (s.unit_numels[1] if len(s.unit_numels) > 1 else 0)
    if p.live_numel > without_last:
        return partitioned
    live = _rounded_up(p.live_numel, smallest) + max(0, s.largest_tensor_numel - smallest)
    return min(without_last, live)


def kept_for_backward(sizes: Sizes, plan: ShardPlan) -> int:
    """Returns the elements that ZeRO-3 keeps from forward to backward, and gathers once.

    Half of ``max_reuse_distance`` lies before the end of forward, and half after it; whole units stay,
    whatever ``max_live_parameters`` is (``__params_to_release`` of partitioned_param_coordinator.py).
    """
    if plan.framework != "deepspeed" or plan.stage < ZeroStage.PARAMETERS:
        return 0
    smallest_unit = sizes.unit_numels[-1] if sizes.unit_numels else 0
    kept_numel = _rounded_up(plan.reuse_numel // 2, smallest_unit)
    return min(sizes.numel - sizes.persistent_numel, kept_numel)


def _rounded_up(numel: int, unit_numel: int) -> int:
    """Returns *numel* in whole units; as it is without a unit."""
    return math.ceil(numel / unit_numel) * unit_numel if unit_numel else numel


def _grad_terms(s: Sizes, p: ShardPlan) -> Iterator[Term]:
    # With one micro-step there are none while activations exist: the step has freed the last ones
    exist = During.ALWAYS if p.accumulation > 1 else During.GRADIENTS
    nbytes = round(s.frozen_grad_numel * p.precision.grad_bytes)
    cause = "gradients of frozen weights in units with trained ones (use_orig_params=True)"
    yield Term(
        "sharded_grad" if p.stage else "unsharded_grad", nbytes, cause, place=p.params_on, during=exist
    )
    if p.framework == "ddp":
        exist = During.ALWAYS if p.bucket_views else exist
        yield from _in_their_type(s.trainable, p, "unsharded_grad", during=exist)
        if not p.bucket_views and p.bucket_cap_bytes:
            cause = "DDP copies gradients into its buckets (gradient_as_bucket_view is off)"
            yield Term("reduce_scatter", round(s.trainable * p.precision.grad_bytes), cause)
        return
    if p.stage == ZeroStage.NONE:
        yield from _in_their_type(s.trainable, p, "unsharded_grad", during=exist)
        yield from _reduce_bucket_terms(s, p)
        return
    tier = p.optimizer_on if p.framework == "deepspeed" else p.params_on
    tier = "host" if tier == "nvme" else tier  # DeepSpeed swaps only their fp32 copy
    if p.stage == ZeroStage.OPTIMIZER:
        yield from _grads_of_stage_1(s, p, tier)
    else:
        # Buffers on the host, and that of DeepSpeed's stage 3, are made once
        is_kept = p.framework == "deepspeed" and (tier != "device" or p.stage == ZeroStage.PARAMETERS)
        exist = During.ALWAYS if is_kept else exist
        shard = s.trainable // p.shard_ranks
        if p.updates_in_backward and s.unit_numels:  # the optimizers have freed those of other units
            shard = min(shard, s.unit_numels[0] // p.shard_ranks)
        yield from _in_their_type(shard, p, "sharded_grad", tier, exist)
        if p.stage == ZeroStage.PARAMETERS:
            padding = s.trainable_shard_numel - s.trainable // p.shard_ranks
            yield from _padding_terms("sharded_grad", padding, p.precision.grad_bytes, tier, exist)
        if p.accumulation > 1 and not p.reduces_each_micro_step:
            cause = "whole gradients that accumulate (set_requires_gradient_sync, no_sync)"
            yield Term("unsharded_grad", s.trainable * p.precision.compute_bytes, cause)
        elif s.unit_numels:
            graded = s.trainable + s.frozen_grad_numel * p.shard_ranks
            total_bytes = round(graded * p.precision.grad_bytes)
            numel = s.trained_unit_numel or s.unit_numels[0]
            cause = "gradients of the unit in backward, before they are reduced"
            if p.framework == "deepspeed":
                numel = min(numel, s.largest_tensor_numel or numel)
                cause = "gradient of a parameter, before it is copied into the bucket"
            nbytes = min(numel * p.precision.compute_bytes, total_bytes)
            yield Term("unsharded_grad", nbytes, cause, during=During.BACKWARD | During.BACKWARD_END)
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
    if _keeps_whole_fp32_grads(p) and tier == "device":
        yield from _in_their_type(s.trainable, p, "unsharded_grad")
        cause = "gradients of backward, which the step frees, beside the fp32 ones that accumulate"
        yield Term("unsharded_grad", s.trainable * p.precision.compute_bytes, cause, during=During.STEP)
        return
    whole = During.ACTIVATIONS | During.BACKWARD_END if p.accumulation > 1 else During.BACKWARD_END
    yield from _in_their_type(s.trainable, p, "unsharded_grad", during=whole)
    yield from _in_their_type(shard, p, "sharded_grad", tier, During.STEP)
    nbytes = round(shard * p.precision.grad_bytes) if tier == "device" else 0
    cause = "the partition's gradients, copied before the whole ones are freed"
    yield Term("sharded_grad", nbytes, cause, during=During.BACKWARD_END)


def _in_their_type(
    numel: int, p: ShardPlan, role: str, tier: str = "device", during: During = During.ALWAYS
) -> Iterator[Term]:
    """Yields *numel* gradients in the type of the parameters, and what a wider type adds."""
    plain_bytes = p.precision.plain_grad_bytes
    yield Term(role, round(numel * plain_bytes), place=tier, during=during)
    nbytes = round(numel * (p.precision.grad_bytes - plain_bytes))
    cause = "gradients are kept in a wider type than the parameters (grad_accum_dtype)"
    yield Term(role, nbytes, cause, place=tier, during=during)


_ALL_REDUCE_NUMEL = 500_000_000
"""Elements that DeepSpeed's stage 0 reduces at once (MEMORY_OPT_ALLREDUCE_SIZE of its engine)."""


def _reduce_bucket_terms(s: Sizes, p: ShardPlan) -> Iterator[Term]:
    numel = p.grad_bucket_numel * (p.grad_buckets if p.stage < ZeroStage.PARAMETERS else 1)
    during, cause = During.BACKWARD | During.BACKWARD_END, "buckets that gradients are reduced from"
    if p.stage == ZeroStage.PARAMETERS:
        during = During.ALWAYS
    else:  # stages 1 and 2 limit the bucket to the gradients
        numel = min(numel, s.trainable)
    if p.stage == ZeroStage.NONE or _keeps_whole_fp32_grads(p):
        numel, during = min(_ALL_REDUCE_NUMEL, s.trainable), During.BACKWARD_END
    elif p.stage:
        cause += " (reduce_bucket_size)"
    wide = p.precision.grad_bytes if _keeps_whole_fp32_grads(p) else p.precision.sent_grad_bytes
    yield Term("reduce_scatter", round(numel * wide), cause, during=during)


def _keeps_whole_fp32_grads(p: ShardPlan) -> bool:
    """Returns True for ``BF16_Optimizer``: stage 1 of DeepSpeed that accumulates in fp32."""
    is_wide = p.precision.grad_bytes > p.precision.plain_grad_bytes
    return p.framework == "deepspeed" and p.stage == ZeroStage.OPTIMIZER and is_wide


def _state_terms(s: Sizes, p: ShardPlan) -> Iterator[Term]:
    split = p.shard_ranks if p.stage else 1
    state_size = state_bytes(p.optimizer, p)
    yield from _of_optimizer("optimizer_state", round(s.trainable // split * state_size), s, p)
    if p.stage == ZeroStage.PARAMETERS:
        padding = s.trainable_shard_numel - s.trainable // split
        yield from _padding_terms("optimizer_state", padding, state_size, p.optimizer_on)
    if p.optimizer.is_factored:
        yield Term("optimizer_state", s.factored_numel // split * 4, place=p.optimizer_on)


def _of_optimizer(role: str, nbytes: int, s: Sizes, p: ShardPlan) -> Iterator[Term]:
    """Yields *nbytes* that the optimizer keeps, where its sub-groups are."""
    moved = round(nbytes * on_host_share(s, p))
    yield Term(role, moved, place=p.optimizer_on)
    yield Term(role, nbytes - moved)


def state_bytes(optimizer: Optimizer, plan: ShardPlan) -> float:
    """Returns the bytes of optimizer state per trainable parameter, without the fp32 master."""
    itemsize = optimizer.state_bytes
    if itemsize == 4.0:  # the optimizer fixes no size: its state has the type of the updated tensor
        itemsize = 4.0 if plan.precision.has_master else plan.precision.state_bytes
    return optimizer.full_states * itemsize


def _step_terms(s: Sizes, p: ShardPlan) -> Iterator[Term]:
    """Yields what exists on the device in the optimizer's step alone.

    With 16 bits DeepSpeed flattens the gradients of its partition, and copies them to fp32 (``step`` of
    stage_1_and_2.py, ``_prepare_fp32_grad_for_sub_group`` of stage3.py). Then it frees those of stages 1
    and 2. Stage 3 does so with one sub-group at a time, and keeps the buffer that they are in.
    """
    if on_host_share(s, p) == 1 or p.params_on != "device":
        return
    if p.framework != "deepspeed" or not p.precision.has_master:
        nbytes = _optimizer_temporary_bytes(s, p)
        yield Term(STEP_TEMP, nbytes, f"temporaries of {p.optimizer.name}'s step", during=During.STEP)
        return
    is_3 = p.stage == ZeroStage.PARAMETERS
    shard = s.trainable_shard_numel if is_3 else s.trainable // (p.shard_ranks if p.stage else 1)
    group = min(shard, p.sub_group_numel or shard) if is_3 else shard
    is_half = p.precision.grad_bytes < 4
    # BF16 with fp32 gradients: stages 1 and 2 keep them in one flat buffer from the start
    is_flat = not is_3 and not is_half and p.precision.param_bytes < 4
    flat_bytes = round(group * (p.precision.grad_bytes if p.stage else 4)) if is_half else 0
    freed_bytes = round(group * p.precision.grad_bytes) if p.stage in (1, 2) and not is_flat else 0
    copies = p.optimizer.foreach_copies + p.optimizer.loop_copies
    cause = "fp32 copy of the gradients that the optimizer reads"
    yield Term(STEP_TEMP, 0 if is_flat else group * 4, cause, during=During.STEP)
    cause = f"flat copy of the gradients, or temporaries of {p.optimizer.name}'s step"
    yield Term(STEP_TEMP, max(flat_bytes, copies * group * 4 - freed_bytes), cause, during=During.STEP)


def _optimizer_temporary_bytes(s: Sizes, p: ShardPlan) -> int:
    """Returns the bytes that the step of a torch optimizer allocates and frees."""
    itemsize = 4.0 if p.precision.has_master else p.precision.state_bytes
    split = p.shard_ranks if p.stage else 1
    largest = s.unit_numels[0] if p.framework == "fsdp1" and s.unit_numels else s.largest_tensor_numel
    copies = p.optimizer.foreach_copies * s.trainable + p.optimizer.loop_copies * min(
        largest, s.trainable
    )
    return round(copies // split * itemsize)


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
    fused_loss: bool = False
    """The loss takes the logits piece by piece (Liger's fused linear cross entropy, chunked losses)."""
    sequence_parallel: bool = False
    """Tensor parallelism also splits norms and residuals, by tokens."""


def layer_activation_bytes(
    t: Transformer, b: Batch, itemsize: int = 2, *, autocast: bool = False
) -> int:
    """Returns the bytes that one layer keeps for backward; *itemsize*: bytes per element.

    For an ungated MLP of width 4h, as many keys as queries and dropout this is equation 1 of
    Korthikanti et al. 2022, ``sbh (34 + 5 a s / h)`` at two bytes, without the second term when
    attention is fused (their selective recomputation of the same tensors, equation 6). Tensor
    parallelism divides what is between the inputs of attention and MLP and their outputs: equation 2,
    ``sbh (10 + 24 / t + 5 a s / (h t))``; with sequence parallelism all of it, equation 4.
    A norm in fp32 keeps its input in fp32, and its result before and after the scale; a softmax in fp32
    its result in fp32 and in *itemsize*.

    *autocast*: parameters are in fp32, and so are the sums of the residuals.
    """
    if t.adapters is not None:
        return _adapted_layer_bytes(t, t.adapters, b, itemsize, autocast=autocast)
    tokens = b.sequences * b.length
    norms = tokens * t.hidden * _layer_norm_bytes(t, itemsize, autocast=autocast)
    split = tokens * (_attention_bytes(t, b, itemsize) + _mlp_bytes(t, itemsize, autocast=autocast))
    if t.query_norms:
        split += tokens * (4 + _normed_bytes(t, itemsize)) * (t.attention_width + t.kv_width)
    split += _score_bytes(t, b, itemsize, autocast=autocast)
    if t.dropout:  # masks of one byte
        norms += 2 * tokens * t.hidden
    return norms // _token_ranks(t, b) + split // t.tensor_ranks


def _token_ranks(t: Transformer, b: Batch) -> int:
    """Returns over how many ranks the tokens of norms and residuals are split."""
    return t.tensor_ranks if b.sequence_parallel else 1


def _adapted_layer_bytes(t: Transformer, a: Adapters, b: Batch, itemsize: int, *, autocast: bool) -> int:
    """Returns the bytes that one frozen layer with LoRA keeps, measured under peft 0.21.

    A frozen linear layer keeps no input, a frozen norm no result. An adapter keeps both its inputs; in
    fp32 under autocast it casts its own copy. 4-bit layers of bitsandbytes give back the type that
    they got, so under autocast the MLP computes in fp32.
    """
    tokens, q = b.sequences * b.length, t.attention_width
    result_bytes = 4 if autocast and a.quantized else itemsize
    norm = 4 if t.fp32_norms else result_bytes
    norms = t.input_norms * norm + (8 if t.output_norms else 0)
    norms -= result_bytes if t.parallel_norms else 0
    inputs = (a.attention_inputs, a.mlp_inputs)
    copies = sum(inputs if autocast else map(bool, inputs))
    unsplit = tokens * t.hidden * (norms + itemsize * copies)
    # No frozen layer reads a copy of the output, and fp32 values are cast for fused attention
    views = t.fused_values and result_bytes == itemsize
    attention = replace(t, copied_output=False, fused_values=views)
    split = tokens * (_attention_bytes(attention, b, itemsize) + itemsize * a.rank * a.count)
    # The output of fused attention is kept in any case, and that of eager attention for an adapter
    fused = is_attention_fused(t, b)
    kept_output = bool(a.attention_outputs) and (autocast or not fused or t.copied_output)
    split += tokens * itemsize * q * (kept_output - (not fused))
    split += tokens * t.ffn * result_bytes * max(1, (4 if t.gated else t.mlp_copies) - 1)
    is_shared = not t.gated and t.mlp_copies == 1 and not autocast  # ReLU keeps its result itself
    split += tokens * t.ffn * itemsize * (bool(a.mlp_outputs) and not is_shared)
    if t.query_norms:
        split += tokens * 4 * (q + t.kv_width)
    split += _score_bytes(t, b, itemsize, autocast=autocast)
    return unsplit // _token_ranks(t, b) + split // t.tensor_ranks


def _score_bytes(t: Transformer, b: Batch, itemsize: int, *, autocast: bool) -> int:
    """Returns the scores that attention keeps where it is not fused."""
    scores = t.heads * b.length * b.sequences * b.length
    split = 0
    if not is_attention_fused(t, b):
        # In fp32 the result of the softmax needs no copy
        is_copied = itemsize < 4 and (t.fp32_softmax or autocast)
        copies = 1 + t.dropout + t.capped_scores
        masks = 1 if t.dropout else 0  # of one byte
        split += scores * (itemsize * copies + (4 if is_copied else 0) + masks)
    return split


def is_attention_fused(t: Transformer, b: Batch) -> bool:
    """Returns whether scores stay out of memory: as asked for, where transformers can do so."""
    return b.fused_attention and t.has_fused_attention


def _normed_bytes(t: Transformer, itemsize: int) -> int:
    """Returns the bytes per element of a normed tensor before it is scaled, where norms are in fp32."""
    return 4 if t.fp32_scales else itemsize


def _layer_norm_bytes(t: Transformer, itemsize: int, *, autocast: bool) -> int:
    """Returns what the norms of a layer keep with the inputs of its linear layers, per hidden element.

    Autocast casts an input for each of its readers, as it caches the casts of parameters alone.
    """
    readers = t.attention_readers + t.mlp_readers if autocast else max(t.input_norms, 1)
    if not t.input_norms:  # the residuals themselves are the inputs of attention and of the MLP
        readers = readers if autocast else 2
    inputs = itemsize * readers
    stored = 4 if autocast else itemsize
    norm = 4 + (4 if autocast else _normed_bytes(t, itemsize)) if t.fp32_norms else stored
    output_norm_bytes = 2 * (4 + _normed_bytes(t, itemsize)) if t.output_norms else 0
    return t.input_norms * norm - (stored if t.parallel_norms else 0) + inputs + output_norm_bytes


def _attention_bytes(t: Transformer, b: Batch, itemsize: int) -> int:
    """Returns what attention keeps per token, without scores: queries, keys, values and its output."""
    q, kv = t.attention_width, t.kv_width
    views = q + kv if t.fused_values else 0
    if not is_attention_fused(t, b):  # keys and values are repeated for each head of queries
        return itemsize * (4 * q + (views if kv == q and b.sequences == 1 else 0))
    copies = q if t.copied_output else 0
    # and the log-sum-exp of each row
    return itemsize * (2 * q + 2 * kv + views + copies) + 4 * t.heads


def _mlp_bytes(t: Transformer, itemsize: int, *, autocast: bool) -> int:
    """Returns what the MLP keeps per token.

    Experts gather their tokens, and keep their result for the router. Autocast leaves them in fp32:
    it does not know ``grouped_mm`` (transformers/integrations/moe.py).
    """
    plain_ffn = t.shared_ffn if t.experts else t.ffn
    dense_bytes = itemsize * (4 if t.gated else t.mlp_copies) * plain_ffn
    if not t.experts:
        return dense_bytes
    expert_bytes = 4 if autocast else itemsize
    shared = itemsize * t.hidden if t.shared_ffn else 0  # the result, which a gate scales
    return dense_bytes + shared + expert_bytes * (4 * (t.ffn - t.shared_ffn) + 2 * t.experts * t.hidden)


def head_activation_bytes(t: Transformer, b: Batch, itemsize: int = 2, *, autocast: bool = False) -> int:
    """Returns the bytes of the output layer where backward begins: its norm, and the loss.

    Twelve bytes a token and word: the log-probabilities in fp32 that cross entropy keeps, and two
    gradients of that size. The logits are freed by then, unless a tanh caps them.
    """
    tokens = b.sequences * b.length
    stored = 4 if autocast else itemsize
    norm = 4 + (4 if autocast else _normed_bytes(t, itemsize)) if t.fp32_norms else stored
    if t.adapters is not None:  # a frozen norm keeps no result, a frozen head no input
        norm = (4 if t.fp32_norms else stored) - itemsize
    logit_bytes = (12 + (itemsize if t.capped_scores else 0)) * t.vocab // t.tensor_ranks
    if b.fused_loss:  # a piece has about as many tokens as makes its logits as large as its input
        logit_bytes = min(logit_bytes, 12 * t.hidden)
    return tokens * ((norm + itemsize) * t.hidden // _token_ranks(t, b) + logit_bytes)


def _layer_backward_bytes(t: Transformer, b: Batch, itemsize: int) -> int:
    """Returns the bytes of the gradients of activations in a layer, beside all that is kept.

    Three to four tensors of the layer's width, and two of the MLP's, measured on torch 2.13; one where
    a fused GELU frees what it read. Attention that is not fused has the gradients of scores and softmax
    in place of the latter.
    """
    tokens = b.sequences * b.length
    layer = tokens * itemsize * 7 * t.hidden // 2 // _token_ranks(t, b)
    mlp = tokens * itemsize * (2 if t.gated or t.mlp_copies != 2 else 1) * t.ffn
    if is_attention_fused(t, b):
        return layer + mlp // t.tensor_ranks
    scores = t.heads * b.length * tokens * (itemsize + (8 if t.fp32_softmax else itemsize))
    # The MLP has freed what it kept by then
    mlp_kept = tokens * itemsize * (4 if t.gated else t.mlp_copies) * t.ffn
    return layer + max(mlp, scores - mlp_kept) // t.tensor_ranks


def transformer_activations(
    t: Transformer, b: Batch, itemsize: int = 2, *, autocast: bool = False
) -> tuple[Term, ...]:
    """Returns the terms of the activations at their peak, the beginning of backward."""
    layer = layer_activation_bytes(t, b, itemsize, autocast=autocast)
    head = head_activation_bytes(t, b, itemsize, autocast=autocast)
    layer_bytes = t.layers * layer
    if b.checkpointing:
        is_wide = autocast and (t.adapters is None or t.adapters.quantized)
        stored = 4 if is_wide else itemsize
        layer_bytes = t.layers * stored * b.sequences * b.length * t.hidden // _token_ranks(t, b)
    gradients, cause = _layer_backward_bytes(t, b, itemsize), "gradients of the activations of a layer"
    if b.checkpointing:
        gradients, cause = gradients + layer, "the layer that is computed again, and its gradients"
    loss, layers = During.LOSS, During.ACTIVATIONS
    backward = During.BACKWARD | During.BACKWARD_END
    return (
        Term(ACTIVATION, layer_bytes, during=layers),
        Term(ACTIVATION, head, "norm, logits and loss of the output", during=loss),
        Term(ACTIVATION, gradients, cause, during=backward),
    )


def autocast_copy_terms(model: ModelSpec, plan: ShardPlan, b: Batch) -> Iterator[Term]:
    """Yields the casts of weights that autocast caches in forward, and autograd keeps for backward.

    Checkpointing keeps none, but the cache lives as long as forward (aten/autocast_mode.cpp), and
    backward makes those of a layer again. Embeddings and experts are not cast.
    """
    if not plan.autocasts or not model.has_units:
        return
    # Frozen weights are 16 bits wide, but for the output of a quantized model (peft, kbit training)
    has_lora = plan.precision.frozen_bytes > 0
    layers = [
        (_matrix_numels(unit), unit.count)
        for unit in model.units
        if unit.name != ROOT and (unit.trainable or not has_lora)
    ]
    root = (
        0
        if has_lora and model.quantization is None
        else max(
            (n for unit in model.units if unit.name == ROOT for n in _matrix_numels(unit)), default=0
        )
    )
    numel = sum(sum(numels) * count for numels, count in layers) + root
    cause = "16-bit copies of the weights (autocast caches them, autograd keeps them)"
    during = During.LOSS if b.checkpointing else During.ACTIVATIONS
    itemsize = plan.precision.compute_bytes
    yield Term(ACTIVATION, numel * itemsize, cause, during=during)
    if b.checkpointing:
        numel = max((sum(numels) for numels, _ in layers), default=0)
        yield Term(ACTIVATION, numel * itemsize, cause, during=During.BACKWARD)


def quantization_terms(model: ModelSpec, plan: ShardPlan) -> Iterator[Term]:
    """Yields the constants of quantized weights, and the weight that one layer computes with."""
    if model.quantization is not None:
        quantized = [unit for unit in model.units if unit.quantized]
        total = sum(unit.numel * unit.count for unit in quantized)
        nbytes = round(total * model.quantization.constant_bytes)
        yield Term("buffer", nbytes, "constants of the quantized weights, which no framework shards")
        numels = [n for unit in quantized for n in _matrix_numels(unit)]
        nbytes = max(numels, default=0) * plan.precision.compute_bytes
        cause = "the largest quantized weight while it computes, dequantized"
        yield Term("unsharded_param", nbytes, cause, during=During.ACTIVATIONS | During.BACKWARD_END)


def _matrix_numels(unit: Unit) -> list[int]:
    return [math.prod(shape) for shape in unit.shapes if len(shape) == 2]


def sequences_that_fit(
    memory: MemoryBreakdown, usable_bytes: int, activations: Iterable[Term]
) -> int | None:
    """Returns how many sequences of *activations* fit beside *memory*; None where they take no bytes."""
    each = MemoryBreakdown(tuple(activations))
    fits = [
        (usable_bytes - memory.total(during=phase)) // each.total(during=phase)
        for phase in PHASES
        if each.total(during=phase)
    ]
    # In the optimizer's step no activations exist: no smaller micro-batch makes it fit
    if any(memory.total(during=phase) > usable_bytes for phase in PHASES):
        return 0
    return min(fits, default=None)


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
    yield Term("sharded_grad", moved, cause, place=p.optimizer_on, during=During.STEP)
    cause = "fp32 gradients of the sub-groups that stay on the device (ratio)"
    yield Term("sharded_grad", nbytes - moved, cause)
    if not is_3 and p.accumulation > 1:
        cause = "gradients that accumulate on the host (gradient_accumulation_steps)"
        yield Term("unsharded_grad", round(shard * p.precision.grad_bytes), cause, place="host")
    if not is_3:
        staged = shard + 2 * s.largest_tensor_numel
        cause = "updated parameters and gradients on their way from and to the host"
        yield Term("swap_buffer", round(staged * p.precision.param_bytes), cause, place="host")


def swap_buffer_terms(s: Sizes, p: ShardPlan) -> Iterator[Term]:
    """Yields the buffers between NVMe and the device, and what pinned allocations are rounded up by."""
    if p.framework != "deepspeed":
        return
    group_numel = math.ceil(s.trainable // p.shard_ranks / sub_groups(s, p))
    if p.optimizer_on == "nvme":
        cause = "buffers of a sub-group for the optimizer on NVMe (buffer_count x sub_group_size)"
        yield Term("swap_buffer", p.optimizer_buffers * group_numel * 4, cause, place="host")
    if p.params_on == "nvme" and p.param_buffer_numel:
        is_spilled = s.numel // p.shard_ranks > p.max_in_cpu
        numel = p.param_buffer_numel + (group_numel if is_spilled else 0)
        cause = "buffers for parameters on NVMe (buffer_count x buffer_size, and a sub-group)"
        yield Term("swap_buffer", round(numel * p.precision.param_bytes), cause, place="host")
    if p.pins:
        # By the formula below, 0 bytes are rounded up to 2
        pinned = [nbytes for nbytes in _pinned_allocations(s, p, group_numel) if nbytes > 0]
        rounded = sum((1 << (nbytes - 1).bit_length()) - nbytes for nbytes in pinned)
        yield Term("swap_buffer", rounded, _ROUNDED, place="host")


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
        # master, gradient, staging
        yield from (shard * 4, shard * 4, round(shard * precision.param_bytes))
