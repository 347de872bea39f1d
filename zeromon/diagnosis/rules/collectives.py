"""Communication in many small collectives, whatever the framework. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from zeromon.diagnosis.rule import Match, rule
from zeromon.diagnosis.rules.common import MIB, Gain, exposed, worst
from zeromon.fold.communication import TINY_BYTES, tiny
from zeromon.levels import EXPOSED
from zeromon.ring.strategy import Framework, Strategy
from zeromon.snapshot import (
    CollectiveStatsRow,
    ConfigFormat,
    RankSnapshot,
    Remedy,
    RunSnapshot,
    Severity,
)
from zeromon.units import human_bytes, human_count, human_ratio

_MANY_TINY = 16
_TORCH_BUCKET_BYTES = 25 * MIB
"""The default of ``bucket_cap_mb``."""
_MERGED = Gain(0.5, 1.3)
"""Shares of the waits of the calls that go. Measured: 0.82, 1.32 and 1.40 (docs/advice.md): merged calls
also save time outside of the wait."""


@rule("ZM312", waits=True)
def tiny_collectives(run: RunSnapshot) -> Iterable[Match]:
    """Communication is many small pieces, and the run waits for their latency."""
    rank = worst(run)
    if rank is None or not rank.exposed_ratio:
        return
    calls, nbytes, seconds, many = tiny(rank.traffic)
    waits = seconds * rank.exposed_ratio
    dear = many >= _MANY_TINY and seconds >= 0.5 and nbytes <= 0.75 * seconds and waits >= 0.03
    # where all collectives are small, bytes do not distinguish them: then their number does
    only = many >= 2 * _MANY_TINY and calls >= 0.9 and waits >= EXPOSED.warning
    if not dear and not only:
        return
    small = [r for r in rank.traffic if r.calls > 0 and r.nbytes / r.calls <= TINY_BYTES]
    yield Match(
        f"{human_count(many)} collectives a step ({human_ratio(calls)}) move "
        f"{human_bytes(TINY_BYTES)} or less: {human_ratio(nbytes)} of the bytes, "
        f"{human_ratio(seconds)} of the time",
        rank.rank,
        _fewer(rank, small),
        Severity.WARNING if waits >= EXPOSED.warning else Severity.INFO,
    )


def _fewer(rank: RankSnapshot, small: Sequence[CollectiveStatsRow]) -> Remedy:
    """Merges small collectives; each call that goes saves what the step waits for it."""
    moving = [row for row in small if row.op != "barrier" and row.unit]
    calls, waits = sum(row.calls for row in moving), exposed(moving)
    total = sum(row.nbytes for row in moving)
    left = max(1.0, total / _TORCH_BUCKET_BYTES) * len({(r.op, r.phase) for r in moving})
    saved = waits * max(0.0, 1 - left / calls) if calls else 0.0
    form, diff, cost = _coarser(rank.sharding_strategy)
    return Remedy(
        cause="each collective costs its latency, however small it is",
        dialect=form,
        diff=diff,
        gain_low_seconds=_MERGED.low * saved,
        gain_high_seconds=_MERGED.high * saved,
        price=cost,
    )


def _coarser(strategy: Strategy) -> tuple[ConfigFormat, str, str]:
    """The configuration format, the diff and the cost of larger pieces."""
    if strategy.framework in (Framework.DDP, Framework.ZERO_REDUNDANCY):
        return (
            ConfigFormat.DDP,
            "- DistributedDataParallel(model, bucket_cap_mb=...)\n"
            "+ DistributedDataParallel(model, bucket_cap_mb=25)",
            "a larger bucket is complete later",
        )
    if strategy.is_deepspeed and strategy.stage == 3:
        return (
            ConfigFormat.DEEPSPEED,
            '+ "zero_optimization": {"stage3_param_persistence_threshold": 100000}',
            "parameters of up to so many elements stay gathered on every rank",
        )
    if strategy.is_deepspeed:
        return (
            ConfigFormat.DEEPSPEED,
            '+ "zero_optimization": {"reduce_bucket_size": 5e8, "allgather_bucket_size": 5e8}',
            "buffers of so many elements",
        )
    larger = "a larger unit is gathered at once"
    if strategy.framework is Framework.FSDP1:
        return (
            ConfigFormat.FSDP1,
            "- FullyShardedDataParallel(model, auto_wrap_policy=...)  # wraps each small part\n"
            "+ policy = ModuleWrapPolicy({Layer})  # the class of a whole layer\n"
            "+ FullyShardedDataParallel(model, auto_wrap_policy=policy)",
            larger,
        )
    return (
        ConfigFormat.FSDP2,
        "- fully_shard(part)   # each small part\n+ fully_shard(layer)  # what holds them",
        larger,
    )
