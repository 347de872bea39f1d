"""What a sharding strategy gathers, and which stage shards more than it. Pure."""

from typing import NamedTuple

from zeromon.ring.strategy import Framework, Strategy
from zeromon.snapshot import ConfigFormat


def is_sharding_fsdp(strategy: Strategy) -> bool:
    """Whether FSDP gathers parameters: FSDP1 with ``NO_SHARD`` does not."""
    return strategy.is_fsdp and strategy.stage >= 2


class NextStage(NamedTuple):
    """A stage that shards more than another."""

    roles: tuple[str, ...]
    """The memory roles that it divides among the ranks, or moves."""
    form: ConfigFormat
    diff: str
    cost: str
    moves: bool = False
    """It moves the roles from the device to the host: all ranks share them already."""


def next_stage(strategy: Strategy) -> NextStage | None:
    """The stage that shards more; None where there is none, or where all that it moves is offloaded."""
    if strategy.is_deepspeed and strategy.stage == 3 and strategy.offload:
        return None
    if strategy.framework is Framework.FSDP1 and strategy.stage == 2 and strategy.hybrid:
        return _HYBRID_ZERO2
    return _NEXT_STAGE.get((strategy.framework, strategy.stage))


_OPTIMIZER = ("optimizer_state", "master_param")
_NO_MORE = "no more communication than before"
_HALF_AGAIN = "half as much communication again"
_AGAIN_IN_BACKWARD = "parameters are gathered a second time, in backward"

_NEXT_STAGE: dict[tuple[Framework, int], NextStage] = {
    (Framework.DDP, 0): NextStage(
        (*_OPTIMIZER, "unsharded_grad", "unsharded_param"), ConfigFormat.FSDP2,
        "- DistributedDataParallel(model)\n+ for layer in model.layers:\n+     fully_shard(layer)\n"
        "+ fully_shard(model)", _HALF_AGAIN,
    ),
    (Framework.ZERO_REDUNDANCY, 1): NextStage(
        ("unsharded_grad", "unsharded_param"), ConfigFormat.FSDP2,
        "- ZeroRedundancyOptimizer(...), DistributedDataParallel(model)\n+ fully_shard(model)",
        _HALF_AGAIN,
    ),
    (Framework.FSDP1, 0): NextStage(
        (*_OPTIMIZER, "unsharded_grad", "unsharded_param"), ConfigFormat.FSDP1,
        "- sharding_strategy=ShardingStrategy.NO_SHARD\n+ sharding_strategy=ShardingStrategy.FULL_SHARD",
        _HALF_AGAIN,
    ),
    (Framework.FSDP1, 2): NextStage(
        ("unsharded_param",), ConfigFormat.FSDP1,
        "- sharding_strategy=ShardingStrategy.SHARD_GRAD_OP\n"
        "+ sharding_strategy=ShardingStrategy.FULL_SHARD",
        _AGAIN_IN_BACKWARD,
    ),
    (Framework.FSDP2, 2): NextStage(
        ("unsharded_param",), ConfigFormat.FSDP2,
        "- fully_shard(layer, reshard_after_forward=False)\n+ fully_shard(layer)",
        _AGAIN_IN_BACKWARD,
    ),
    (Framework.DEEPSPEED, 0): NextStage(
        _OPTIMIZER, ConfigFormat.DEEPSPEED, '- "stage": 0\n+ "stage": 1', _NO_MORE
    ),
    (Framework.DEEPSPEED, 1): NextStage(
        ("unsharded_grad", "reduce_scatter"), ConfigFormat.DEEPSPEED,
        '- "stage": 1\n+ "stage": 2', _NO_MORE,
    ),
    (Framework.DEEPSPEED, 2): NextStage(
        ("unsharded_param",), ConfigFormat.DEEPSPEED, '- "stage": 2\n+ "stage": 3', _HALF_AGAIN
    ),
    (Framework.DEEPSPEED, 3): NextStage(
        _OPTIMIZER, ConfigFormat.DEEPSPEED,
        '- "stage3_max_live_parameters": 1e9\n+ "stage3_max_live_parameters": 2e8\n'
        '- "stage3_prefetch_bucket_size": 5e7\n+ "stage3_prefetch_bucket_size": 1e7\n'
        '+ "offload_optimizer": {"device": "cpu", "pin_memory": true}  # if that is not enough',
        "more waiting for parameters; with offload the optimizer runs on the host", moves=True,
    ),
}  # fmt: skip
"""What each stage costs is in Rajbhandari et al. 2020 (arXiv 1910.02054), section 7."""

_HYBRID_ZERO2 = NextStage(
    ("unsharded_param",), ConfigFormat.FSDP1,
    "- sharding_strategy=ShardingStrategy._HYBRID_SHARD_ZERO2\n"
    "+ sharding_strategy=ShardingStrategy.HYBRID_SHARD",
    _AGAIN_IN_BACKWARD,
)  # fmt: skip
