"""Predicts the bytes that a rank sends in a step, by framework and by the ZeRO paper. Pure."""

from dataclasses import dataclass, replace

from zeromon.memory.predict import kept_for_backward
from zeromon.memory.spec import ShardPlan, Sizes, ZeroStage

INT8_BYTES, INT4_BYTES = 1.0, 0.5
"""Bytes of a parameter under ZeRO++ qwZ and of a gradient under qgZ, without their scales (one of up to
16,000 elements, ``CUDAQuantizer`` in partition_parameters.py)."""


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
    within_host: float = 0.0
    """The part of these that ZeRO++ sends between the ranks of one host."""

    @property
    def total(self) -> float:
        """All of them."""
        gathered = self.gathered_forward + self.gathered_backward + self.gathered_after
        return self.reduced + self.between + gathered


def communication_bytes(sizes: Sizes, plan: ShardPlan) -> int:
    """Returns the bytes that one rank sends in a step."""
    return round(sent_step_bytes(sizes, plan).total)


def sent_step_bytes(sizes: Sizes, plan: ShardPlan) -> SentBytes:
    """Returns what one rank sends in a step by ring collectives.

    An all-reduce sends 2 (n-1)/n of its size, a reduce-scatter or an all-gather (n-1)/n (section 7 of
    the ZeRO paper). The paper reduce-scatters at stages 1 and 2; DeepSpeed all-reduces whole buckets
    (``allreduce_and_scatter`` in stage_1_and_2.py) unless ``use_multi_rank_bucket_allreduce`` is off.
    """
    n = plan.shard_ranks if plan.stage else plan.ranks
    share = (n - 1) / n
    copies = plan.ranks // plan.shard_ranks if plan.stage else 1
    # FSDP1 reduces whole flat parameters, also what is frozen of them
    graded = sizes.trainable + sizes.frozen_grad_numel * plan.shard_ranks
    grads = graded * plan.precision.sent_grad_bytes
    compute = plan.precision.compute_bytes
    micro = plan.accumulation
    times = micro if plan.reduces_each_micro_step else 1
    if plan.stage == ZeroStage.NONE:
        return SentBytes(reduced=2 * grads * times * share)
    hybrid = 2 * (grads / n) * (copies - 1) / copies if copies > 1 else 0.0
    updated = sizes.trainable * compute * share
    reduced = grads * times * share
    if plan.stage < ZeroStage.PARAMETERS and plan.framework in ("deepspeed", "ddp"):
        reduced *= 2 if plan.reduces_whole_buckets else 1
        return SentBytes(reduced=reduced, gathered_after=updated, between=hybrid)
    gathered = (sizes.numel - sizes.persistent_numel) * compute * share * micro
    if plan.stage == ZeroStage.GRADIENTS:
        return SentBytes(reduced=reduced, gathered_forward=gathered, between=hybrid)
    if plan.framework == "deepspeed":
        return _sent_by_stage_3(sizes, plan, reduced)
    regathered = gathered if plan.reshards else 0.0
    return SentBytes(
        reduced=reduced, gathered_forward=gathered, gathered_backward=regathered, between=hybrid
    )


def _sent_by_stage_3(sizes: Sizes, plan: ShardPlan, reduced: float) -> SentBytes:
    """Returns what a rank sends under DeepSpeed's stage 3, with what ZeRO++ changes of it.

    The first gather after an update is over all ranks, each other one among those of the second copy.
    """
    n, micro, hpz = plan.shard_ranks, plan.accumulation, plan.secondary_ranks
    itemsize = gathered_itemsize(plan)
    params = (sizes.numel - sizes.persistent_numel) * itemsize
    again_numel = sizes.numel - sizes.persistent_numel - kept_for_backward(sizes, plan)
    group = hpz or n
    share = (group - 1) / group
    first_gather = params * (n - 1) / n
    later_gathers, backward = params * (micro - 1) * share, again_numel * itemsize * micro * share
    exchange = grad_exchange(plan)
    grads = sizes.trainable * plan.precision.sent_grad_bytes
    within_host = later_gathers + backward if hpz else 0.0
    if exchange is not None:
        times = micro if plan.reduces_each_micro_step else 1
        grads = sizes.trainable * INT4_BYTES * times
        reduced = grads * sum(exchange)
        within_host += grads * exchange[0]
    return SentBytes(
        reduced=reduced,
        gathered_forward=first_gather + later_gathers,
        gathered_backward=backward,
        gathered_after=sizes.persistent_numel * plan.precision.compute_bytes * (n - 1) / n,
        within_host=within_host,
    )


def gathered_itemsize(plan: ShardPlan) -> float:
    """Returns the bytes of a parameter that is gathered, 1 under ZeRO++ qwZ."""
    is_quantized = plan.quantized_weights and plan.stage == ZeroStage.PARAMETERS
    return INT8_BYTES if is_quantized else plan.precision.compute_bytes


def grad_exchange(plan: ShardPlan) -> tuple[float, float] | None:
    """Returns the shares of gradients that qgZ sends within a host, and between hosts; else None.

    On one host DeepSpeed reduce-scatters in the type of the model (``__avg_scatter_grads``, stage3.py).
    """
    local = plan.host_ranks or plan.ranks
    hosts = plan.ranks // local
    if not plan.quantized_grads or plan.stage < ZeroStage.PARAMETERS or hosts < 2:
        return None
    return (local - 1) / local, (hosts - 1) / hosts / local


def paper_step_bytes(sizes: Sizes, plan: ShardPlan) -> int:
    """Returns what a rank would send by section 7 of the ZeRO paper: 2, 2, 2 and 3 times its model."""
    plain = replace(
        plan, reduces_whole_buckets=False, quantized_weights=False, quantized_grads=False, reuse_numel=0
    )
    return communication_bytes(sizes, plain)
