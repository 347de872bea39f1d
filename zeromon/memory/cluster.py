"""What a plan takes on a whole cluster: copies of the model, the fewest devices. Pure."""

from dataclasses import replace

from zeromon.memory.plan import Row, Setup, hosts_of, row
from zeromon.memory.predict import state_bytes
from zeromon.memory.spec import ShardPlan, Sizes

_MOST_DEVICES = 4096
_PER_HOST = 8


def unique_bytes(sizes: Sizes, plan: ShardPlan) -> int:
    """Returns the bytes of one copy of parameters, gradients and optimizer states."""
    each = plan.precision
    trained = each.plain_grad_bytes + state_bytes(plan.optimizer, plan) + 4 * each.has_master
    return round(sizes.numel * each.param_bytes + sizes.trainable * trained)


def copies(sizes: Sizes, one: Row) -> float:
    """Returns how many copies of the model states all ranks of *one* hold."""
    return one.plan.ranks * one.memory.model_states / unique_bytes(sizes, one.plan)


def fewest_devices(setup: Setup, plan: ShardPlan) -> int | None:
    """Returns the fewest data-parallel ranks on which *plan* fits: 1, 2, 4, a multiple of 8, or None.

    Hosts have 8 devices. More devices never take more of each, so the search is by halves.
    """
    for ranks in (1, 2, 4):
        if _fits(setup, plan, ranks):
            return ranks
    low, high = 0, _MOST_DEVICES // _PER_HOST
    if not _fits(setup, plan, high * _PER_HOST):
        return None
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if _fits(setup, plan, middle * _PER_HOST) else (middle, high)
    return high * _PER_HOST


def _fits(setup: Setup, plan: ShardPlan, ranks: int) -> bool:
    group = plan.shard_ranks if plan.shard_ranks < plan.ranks else 0
    if group and ranks % group:
        return False
    changed = replace(plan, ranks=ranks, shard_ranks=group)
    at = replace(setup, plan=changed, hosts=hosts_of(ranks * setup.tensor * setup.pipeline))
    return row(at, changed).fits
