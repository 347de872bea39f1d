"""What DeepSpeed keeps on the host and on NVMe beside the offloaded states, by its settings. Pure.

Sources, in DeepSpeed 0.19: ``runtime/zero/stage3.py`` (sub-groups, Offload++, ``max_in_cpu``,
gradients), ``runtime/zero/stage_1_and_2.py`` (staging), ``runtime/swap_tensor`` (buffers of the
swappers); in torch 2.13 ``ATen/core/CachingHostAllocator.h`` (``PowerOf2Ceil``).
"""

import math
from collections.abc import Iterator

from zeromon.memory.spec import ShardPlan, Sizes, ZeroStage
from zeromon.memory.terms import During, Term

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


def offloaded_grads(s: Sizes, p: ShardPlan) -> Iterator[Term]:
    """Yields the fp32 gradients of DeepSpeed's optimizer on the host, and staging of stages 1 and 2."""
    is_3 = p.stage == ZeroStage.PARAMETERS
    shard = s.trainable_shard_numel if is_3 else s.trainable // p.shard_ranks
    # stage 3 keeps the low-precision shard beside the fp32 one; stages 1 and 2 replace it
    nbytes = round(shard * (4 if is_3 else 4 - p.precision.grad_bytes))
    moved = round(nbytes * on_host_share(s, p))
    cause = "fp32 gradients for the optimizer on the host"
    yield Term(
        role="sharded_grad", nbytes=moved, cause=cause, place=p.optimizer_on, during=During.STEP
    )
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


def swap_buffers(s: Sizes, p: ShardPlan) -> Iterator[Term]:
    """Yields the buffers between NVMe and the device, and what pinned allocations are rounded up by."""
    if p.framework != "deepspeed":
        return
    piece = math.ceil(s.trainable // p.shard_ranks / sub_groups(s, p))
    if p.optimizer_on == "nvme":
        yield Term(
            role="swap_buffer",
            nbytes=p.optimizer_buffers * piece * 4,
            cause="buffers of a sub-group for the optimizer on NVMe (buffer_count x sub_group_size)",
            place="host",
        )
    if p.params_on == "nvme" and p.param_buffer_numel:
        rest = s.numel // p.shard_ranks > p.max_in_cpu
        numel = p.param_buffer_numel + (piece if rest else 0)
        yield Term(
            role="swap_buffer",
            nbytes=round(numel * p.precision.param_bytes),
            cause="buffers for parameters on NVMe (buffer_count x buffer_size, and a sub-group)",
            place="host",
        )
    if p.pins:
        rounded = sum(_rounded_up(nbytes) - nbytes for nbytes in _pinned(s, p, piece))
        yield Term(role="swap_buffer", nbytes=rounded, cause=_ROUNDED, place="host")


def _pinned(s: Sizes, p: ShardPlan, piece: int) -> Iterator[int]:
    """Yields the bytes of each allocation that DeepSpeed pins; those of the swappers are not rounded."""
    each = p.precision
    if p.stage == ZeroStage.PARAMETERS:
        if p.optimizer_on != "device":
            yield round(s.trainable // p.shard_ranks * each.grad_bytes)
        if p.optimizer_on == "host":
            count = sub_groups(s, p)
            yield from [piece * 4] * round(count * on_host_share(s, p))
        if p.params_on != "device":
            shard = s.numel // p.shard_ranks
            near = min(shard, p.max_in_cpu) if p.params_on == "nvme" else shard
            yield round(near * each.param_bytes)
    elif p.optimizer_on == "host":
        shard = s.trainable // p.shard_ranks
        yield from (
            shard * 4,
            shard * 4,
            round(shard * each.param_bytes),
        )  # master, gradient, staging


def _rounded_up(nbytes: int) -> int:
    return 1 << (nbytes - 1).bit_length() if nbytes > 0 else 0
