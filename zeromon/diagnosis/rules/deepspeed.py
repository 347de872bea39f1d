"""The stage, the prefetch, the overlap and the partitions of a DeepSpeed engine. Pure."""

import math
from collections.abc import Iterable
from typing import NamedTuple

from zeromon.base.units import human_bytes, human_count, human_ratio, human_seconds
from zeromon.diagnosis.rule import Match, Waits, as_number, rule, setting_of
from zeromon.diagnosis.rules.common import (
    MIN_SHARE,
    Gain,
    exposed_seconds,
    far_gathers,
    fill_remedy,
    room_bytes,
)
from zeromon.readout.breakdown import own_seconds
from zeromon.ring.strategy import Strategy
from zeromon.snapshot import CollectiveStatsRow, RankSnapshot, RunSnapshot, Severity
from zeromon.snapshot.focus import SETTLED_STEPS, worst_rank
from zeromon.snapshot.levels import AVOIDABLE, Level

_ROOM = 2
"""How many times what a change takes must be free: the next peak may be higher."""


def _is_stage_3(strategy: Strategy) -> bool:
    return strategy.is_deepspeed and strategy.stage == 3


# ---- prefetch ---------------------------------------------------------------------------------------

_LAST_STEPS = 50
_WARM_UP = 3
_PREFETCH_SIZE, _MAX_LIVE = "stage3_prefetch_bucket_size", "stage3_max_live_parameters"
_DEFAULT_BUCKET, _DEFAULT_LIVE = 50_000_000, 1_000_000_000
_BUCKET_LIMITS = "no more than the prefetch bucket is requested ahead"
_LIVE_LIMITS = f"{_MAX_LIVE} leaves no room to request more ahead"
_OFTEN_LATE = 0.3
_LATE_GATHERS = Level(0.03, 0.10)
"""Waits for late gathers as a share of the steps."""
_GATHERED_AHEAD = Gain(0.2, 0.9)
"""Shares of the time that late gathers take. An estimate, not measured."""


class _Late(NamedTuple):
    """Gathers that ZeRO-3 issues only when a parameter is needed."""

    waits: float
    """As a share of the steps."""
    share: float
    """The share of the gathered bytes."""
    rank: RankSnapshot


@rule("ZM313")
def starved_prefetch(run: RunSnapshot) -> Iterable[Match]:
    """ZeRO-3 gathers parameters only when it needs them, and waits. Reported for the worst rank."""
    late = [starved for rank in run.ranks if (starved := _late_gathers(rank)) is not None]
    if not late:
        return
    waits, share, rank = max(late, key=lambda gathers: gathers.waits)
    limits = _prefetch_limits(rank)
    if not limits:
        return  # the trace of the last step did not hold, which no setting changes
    values = {limit.setting: setting_of(rank, limit.setting) or "unknown" for limit in limits}
    diff_lines = (
        f'- "{limit.setting}": {values[limit.setting]}\n+ "{limit.setting}": {limit.larger:.0f}'
        for limit in limits
    )
    evidence = (
        f"late prefetches take {human_ratio(waits)} of a step; {human_ratio(share)} of the gathered "
        f"parameter bytes are requested only when they are needed "
        f"({', '.join(f'{setting} is {value}' for setting, value in values.items())})"
    )
    gain = _GATHERED_AHEAD.seconds(waits * (rank.steps.median_seconds or 0.0))
    remedy = fill_remedy(
        "larger_prefetch", gain, cause=limits[0].cause, diff="\n".join(diff_lines),
        count=human_count(limits[-1].larger),
        when="at once" if limits[-1].setting == _MAX_LIVE else "ahead",
    )  # fmt: skip
    yield Match(evidence, rank.rank, remedy, waits=Waits(waits, _LATE_GATHERS))


class _Limit(NamedTuple):
    """A setting that keeps ZeRO-3 from requesting more ahead, and a larger value."""

    setting: str
    larger: float
    cause: str


def _prefetch_limits(rank: RankSnapshot) -> list[_Limit]:
    """Returns the settings that limit the prefetch; none where both exceed the model.

    ``fetch_sub_module`` requests the lesser of the bucket and of what ``stage3_max_live_parameters``
    leaves (``deepspeed/runtime/zero/partitioned_param_coordinator.py``).
    """
    bucket, live = (as_number(setting_of(rank, name)) for name in (_PREFETCH_SIZE, _MAX_LIVE))
    numel = max((model.get("numel", 0) for model in rank.config.models), default=0) or math.inf
    if bucket is None:
        return [_Limit(_PREFETCH_SIZE, 4 * _DEFAULT_BUCKET, _BUCKET_LIMITS)]
    limits = []
    if bucket < numel and (not bucket or live is None or bucket < live):
        limits.append(_Limit(_PREFETCH_SIZE, 4 * bucket or _DEFAULT_BUCKET, _BUCKET_LIMITS))
    if live is not None and live < numel and live <= bucket:
        limits.append(_Limit(_MAX_LIVE, max(4 * live, _DEFAULT_LIVE), _LIVE_LIMITS))
    return limits


def _late_gathers(rank: RankSnapshot) -> _Late | None:
    """The late gathers of *rank*; None where they are few, or cost little."""
    late = next((row for row in rank.communication.gathers if row.outcome == "late"), None)
    if late is None:
        return None
    timed = [s for s in rank.steps.recent[-_LAST_STEPS:] if not s.idle and s.step > _WARM_UP]
    if len(timed) < SETTLED_STEPS:
        return None
    share = late.nbytes / (sum(row.nbytes for row in rank.communication.gathers) or 1)
    total_ns = max(1, sum(step.end_ns - step.start_ns for step in timed))
    waits = sum(step.late_gather_ns for step in timed) / total_ns
    return _Late(waits, share, rank) if share >= _OFTEN_LATE and waits >= _LATE_GATHERS.warning else None


_TO_EACH_RANK = '"use_multi_rank_bucket_allreduce": false'
"""Stages 1 and 2 reduce each part of a bucket to its rank; else they all-reduce whole buckets."""

# ---- stage ------------------------------------------------------------------------------------------

_LOWER_STAGE = Gain(0.4, 1.4)
"""Shares of the exposed time of the gathers that go. Measured: 0.86 (docs/evidence/accuracy.md)."""


@rule("ZM202")
def stage_too_high(run: RunSnapshot) -> Iterable[Match]:
    """ZeRO-3 gathers parameters that there is room to keep."""
    rank = worst_rank(run)
    if rank is None or not _is_stage_3(rank.sharding_strategy):
        return
    rows = [row for row in rank.communication.traffic if row.op == "all_gather"]
    share, nbytes = rank.share_of_step(exposed_seconds(rows)), rank.unsharded_bytes
    ranks = max(1, rank.world_size)
    extra = nbytes * (ranks - 1) // ranks * 2  # parameters, and gradients until they are reduced
    if share < MIN_SHARE or not nbytes or room_bytes(run, rank) < _ROOM * extra:
        return
    # Stage 2 cannot offload parameters, so all of them would have to fit on the device
    if any(model.get("params_on") == "host" for model in rank.config.models):
        return
    saved = exposed_seconds(rows) / 2  # stage 2 gathers each parameter once a step, stage 3 twice
    evidence = (
        f"gathering parameters waits {human_seconds(exposed_seconds(rows))} per step "
        f"({human_ratio(share)}); {human_bytes(room_bytes(run, rank))} per rank are free"
    )
    # On NCCL the all-reduce of whole buckets would send what the second gather no longer sends
    bucket_lines = f"\n+ {_TO_EACH_RANK}" * (rank.device_type == "cuda")
    gain, size = _LOWER_STAGE.seconds(saved), human_bytes(extra)
    remedy = fill_remedy("stage_2", gain, bucket_lines=bucket_lines, extra=size)
    yield Match(evidence, rank.rank, remedy, waits=Waits(share, AVOIDABLE))


# ---- partitions across nodes ------------------------------------------------------------------------


_QUANTIZED = '\n+ "zero_quantized_weights": true  # needs its CUDA kernels'


@rule("ZM311")
def zero_plus_plus(run: RunSnapshot) -> Iterable[Match]:
    """ZeRO-3 gathers parameters over the network, where a second partition on each node would do."""
    rank = worst_rank(run)
    if rank is None or not _is_stage_3(rank.sharding_strategy):
        return
    gathers = far_gathers(rank)
    if gathers is None or rank.sharding_strategy.hybrid:
        return  # hpZ is on already
    extra_bytes = rank.unsharded_bytes // gathers.local_ranks
    if room_bytes(run, rank) < _ROOM * extra_bytes or not extra_bytes:
        return
    remedy = fill_remedy(
        "partition_within_nodes", gathers.gain, cause=gathers.cause, ranks=gathers.local_ranks,
        quantized_line=_QUANTIZED * (rank.device_type == "cuda"), extra=human_bytes(extra_bytes),
    )  # fmt: skip
    yield Match(gathers.text, rank.rank, remedy, waits=Waits(gathers.share, AVOIDABLE))


# ---- overlap ----------------------------------------------------------------------------------------

_OVERLAPPED = Gain(0.3, 1.0)
"""Shares of the hideable time: those of DDP's buckets, which hide behind backward in the same way. Not
measured with DeepSpeed, which needs a GPU for it."""


@rule("ZM319", severity=Severity.WARNING, once=True)
def reduce_scatter_off(run: RunSnapshot) -> Iterable[Match]:
    """DeepSpeed all-reduces gradients of which each rank needs its own part. Reported once."""
    for rank in run.ranks:
        stage = rank.sharding_strategy.stage
        if not rank.sharding_strategy.is_deepspeed or not stage or rank.world_size < 2:
            continue
        is_off = setting_of(rank, "zero_optimization.reduce_scatter") == "false"
        if not is_off and not _waits_for_whole_buckets(rank):
            continue
        grads = sum(
            m.get("trainable", 0) * m.get("reduce_bytes", m.get("grad_bytes", 0))
            for m in rank.config.models
        )
        saved = grads * (rank.world_size - 1) / rank.world_size
        diff_lines = ['- "reduce_scatter": false', '+ "reduce_scatter": true'] if is_off else []
        if stage < 3:  # without this, whole buckets are all-reduced there
            diff_lines.append(f"+ {_TO_EACH_RANK}")
        evidence = f"gradients are all-reduced over {rank.world_size} ranks; each updates its own part"
        remedy = fill_remedy(
            "reduce_to_each_rank",
            cause="reduce_scatter is off: a reduce-scatter sends half the bytes"
            if is_off
            else "whole buckets are all-reduced; a reduction to each rank sends half the bytes",
            diff="\n".join(diff_lines),
            saving=f"a rank sends {human_bytes(saved)} less each time that gradients are reduced"
            if saved
            else "half the bytes of the reduction",
            price="more calls, and smaller ones" if stage < 3 else "none",
        )
        yield Match(evidence, rank.rank, remedy)


def _waits_for_whole_buckets(rank: RankSnapshot) -> bool:
    """Returns True where stage 1 or 2 waits on a GPU for buckets that all ranks get."""
    models = rank.config.models
    if rank.sharding_strategy.stage > 2 or rank.device_type != "cuda" or not models:
        return False
    waits = rank.share_of_step(exposed_seconds(_reduced_buckets(rank)))
    return all(model.get("reduces_whole_buckets", False) for model in models) and waits >= MIN_SHARE


def _reduced_buckets(rank: RankSnapshot) -> list[CollectiveStatsRow]:
    """Returns the traffic of buckets of gradients in backward."""
    return [
        row
        for row in rank.communication.traffic
        if row.unit.startswith("bucket") and row.phase == "backward"
    ]


@rule("ZM302")
def overlap_comm_off(run: RunSnapshot) -> Iterable[Match]:
    """DeepSpeed reduces gradients on the stream that computes."""
    rank = worst_rank(run)
    if rank is None or rank.device == "cpu" or setting_of(rank, "overlap_comm") != "false":
        return  # on a CPU there is no other stream
    buckets = _reduced_buckets(rank)
    share = rank.share_of_step(exposed_seconds(buckets))
    if share < MIN_SHARE:
        return
    hideable = min(exposed_seconds(buckets), own_seconds(rank.steps.recent).get("backward", 0.0))
    evidence = (
        f"reducing gradients waits {human_seconds(exposed_seconds(buckets))} per step "
        f"({human_ratio(share)}); overlap_comm is off"
    )
    remedy = fill_remedy("overlap_comm", _OVERLAPPED.seconds(hideable))
    yield Match(evidence, rank.rank, remedy, waits=Waits(share, AVOIDABLE))
