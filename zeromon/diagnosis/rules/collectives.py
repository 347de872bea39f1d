"""Communication in many small collectives, whatever the framework. Pure."""

from collections.abc import Iterable, Sequence

from zeromon.base.units import human_bytes, human_count, human_ratio
from zeromon.diagnosis.rule import Match, Waits, rule
from zeromon.diagnosis.rules.common import (
    AVERAGED,
    MIB,
    Gain,
    GainSeconds,
    exposed_seconds,
    fill_remedy,
    raised_settings,
)
from zeromon.fold.collective_stats import TINY_BYTES, tiny_call_shares
from zeromon.readout.text import busiest_line
from zeromon.ring.model_metadata import PERSISTENT, ModelMetadata
from zeromon.ring.strategy import Framework, Strategy
from zeromon.snapshot import CollectiveStatsRow, RankSnapshot, RunSnapshot
from zeromon.snapshot.finding import Remedy
from zeromon.snapshot.focus import worst_rank
from zeromon.snapshot.levels import EXPOSED, Level

_MANY_TINY = 16
_NOTICEABLE = Level(0.03, EXPOSED.warning)
"""The exposed time of small collectives as a share of a step."""
_TORCH_BUCKET_MB = 25
"""The default of ``bucket_cap_mb``."""
_MERGED = Gain(0.5, 1.3)
"""Shares of the waits of the calls that go. Measured: 0.82, 1.32 and 1.40
(docs/evidence/accuracy.md): merged calls also save time outside of the wait."""


@rule("ZM312")
def tiny_collectives(run: RunSnapshot) -> Iterable[Match]:
    """Communication is many small pieces, and the run waits for their latency."""
    rank = worst_rank(run)
    if rank is None or not rank.communication.exposed_ratio:
        return
    if (of_script := _script_all_reduces(run, rank)) is not None:
        yield of_script
        return
    calls, nbytes, seconds, count = tiny_call_shares(rank.communication.traffic)
    waits = seconds * rank.communication.exposed_ratio
    dear = (
        count >= _MANY_TINY
        and seconds >= 0.5
        and nbytes <= 0.75 * seconds
        and waits >= _NOTICEABLE.warning
    )
    # where all collectives are small, bytes do not distinguish them: then their number does
    only = count >= 2 * _MANY_TINY and calls >= 0.9 and waits >= EXPOSED.warning
    if not dear and not only:
        return
    small = [r for r in rank.communication.traffic if r.calls > 0 and r.nbytes / r.calls <= TINY_BYTES]
    # A barrier moves nothing, and no bucket merges what the script calls itself
    moving = [row for row in small if row.op != "barrier" and row.unit]
    persistent = [row for row in moving if row.unit == PERSISTENT]
    fixed = _call_count(persistent) > 0.5 * _call_count(moving)
    evidence = (
        f"{human_count(count)} collectives per step ({human_ratio(calls)}) move "
        f"{human_bytes(TINY_BYTES)} or less; {human_ratio(nbytes)} of the bytes, "
        f"{human_ratio(seconds)} of the time"
        + (f"; {human_count(_call_count(persistent))} of them {_FIXED}" if fixed else "")
    )
    remedy = None if fixed else _fewer_calls(rank, moving)
    yield Match(evidence, rank.rank, remedy, waits=Waits(waits, _NOTICEABLE))


def _script_all_reduces(run: RunSnapshot, rank: RankSnapshot) -> Match | None:
    """Many small all-reduces that the script issues itself: they belong to no unit or bucket."""
    rows = [row for row in rank.communication.traffic if row.op == "all_reduce" and not row.unit]
    calls, waits, nbytes = (_call_count(rows), exposed_seconds(rows), sum(row.nbytes for row in rows))
    share = rank.share_of_step(waits)
    if calls < _MANY_TINY or share < _NOTICEABLE.warning or nbytes > calls * MIB:
        return None
    # All ranks run one script, and the agent of this one may have seen too few lines
    locations = (busiest_line(any_rank, communicates=True) for any_rank in (rank, *run.ranks))
    location = next(filter(None, locations), "")
    params = rank.config.process.get("params_bytes", 0)
    # A wrapper reduces gradients itself: what the script averages beside it is something else
    averages = rank.sharding_strategy == Strategy() and 0 < AVERAGED * params <= nbytes
    evidence = (
        f"{human_ratio(share)} of a step waits for the script's own {human_count(calls)} all_reduces; "
        f"{human_bytes(nbytes / calls)} each{f', mostly at {location}' if location else ''}"
    )
    gain = _MERGED.seconds(waits * (1 - 1 / calls))
    remedy = fill_remedy("wrap_model" if averages else "stack_values", gain)
    return Match(evidence, rank.rank, remedy, waits=Waits(share, _NOTICEABLE))


_FIXED = (
    "gather persistent parameters after the optimizer's step, each by itself: DeepSpeed has no setting "
    "that merges these"
)


def _call_count(traffic: Iterable[CollectiveStatsRow]) -> float:
    return sum(row.calls for row in traffic)


def _fewer_calls(rank: RankSnapshot, moving: Sequence[CollectiveStatsRow]) -> Remedy | None:
    """Merges small collectives; each call that goes saves what the step waits for it.

    None where the pieces are as large already as the configuration can make them.
    """
    calls, waits = _call_count(moving), exposed_seconds(moving)
    total = sum(row.nbytes for row in moving)
    # Calls of other operations or phases do not fit into one bucket
    calls_left = max(1.0, total / (_TORCH_BUCKET_MB * MIB)) * len({(r.op, r.phase) for r in moving})
    saved = waits * max(0.0, 1 - calls_left / calls) if calls else 0.0
    return _coarser_pieces(rank, _MERGED.seconds(saved)) if saved else None


_BUCKETS = (
    ("zero_optimization.reduce_bucket_size", "500000000", "500000000"),
    ("zero_optimization.allgather_bucket_size", "500000000", "500000000"),
)
_THRESHOLD = (("zero_optimization.stage3_param_persistence_threshold", "100000", "100000"),)
"""Names, defaults and advised values, which are DeepSpeed's defaults."""


def _coarser_pieces(rank: RankSnapshot, gain: GainSeconds) -> Remedy | None:
    """Makes pieces larger, which gains *gain*; None where they have their usual size already."""
    strategy = rank.sharding_strategy
    if strategy.framework in (Framework.DDP, Framework.ZERO_REDUNDANCY):
        cap = rank.bucket_cap_mb
        if cap is None or cap >= _TORCH_BUCKET_MB:
            return None
        return fill_remedy("larger_ddp_buckets", gain, old=f"{cap:g}", new=_TORCH_BUCKET_MB)
    if strategy.is_deepspeed:
        at_3 = strategy.stage == 3
        old, new = raised_settings(rank, _THRESHOLD if at_3 else _BUCKETS)
        name = "more_persistent" if at_3 else "larger_zero_buckets"
        return fill_remedy(name, gain, old=old, new=new) if new else None
    if strategy.framework is Framework.UNKNOWN or _has_whole_layers(rank):
        return None
    is_fsdp1 = strategy.framework is Framework.FSDP1
    return fill_remedy("whole_layers_fsdp1" if is_fsdp1 else "whole_layers_fsdp2", gain)


def _has_whole_layers(rank: RankSnapshot) -> bool:
    """Returns True if each of the largest units of *rank* holds a layer of its model, or more."""
    model = rank.config.models[0] if rank.config.models else ModelMetadata()
    largest, units = model.get("blocks", [0, 0])[1], model.get("units", [])
    return bool(units) and largest > 0 and min(units) >= largest
