"""Buckets of DDP, and the accumulation of gradients. Pure."""

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence

from zeromon.base.units import human_bytes, human_ratio, human_seconds
from zeromon.diagnosis.rule import Match, Waits, rule
from zeromon.diagnosis.rules.common import (
    DIFFS,
    MIB,
    MIN_SHARE,
    WINDOW,
    Gain,
    exposed_seconds,
    fill_remedy,
    predicted_gain,
)
from zeromon.readout.breakdown import own_seconds
from zeromon.snapshot import RunSnapshot
from zeromon.snapshot.focus import worst_rank
from zeromon.snapshot.levels import AVOIDABLE

_SAVED_REDUCES = Gain(0.6, 1.3)
"""Shares of the exposed time of the reductions that go. Measured: 1.05 with DDP and 1.24 with FSDP2
(docs/evidence/accuracy.md): one that does not run also leaves bandwidth and CPU free."""


_NO_SYNC: Mapping[str, Sequence[str]] = DIFFS["no_sync"]
"""Framework -> the configuration format, and the diff that reduces once a step."""


@rule("ZM308")
def accumulation_communicates(run: RunSnapshot) -> Iterable[Match]:
    """Every micro-step reduces its gradients, although only the last one of a step needs to."""
    rank = worst_rank(run)
    if rank is None:
        return
    strategy = rank.sharding_strategy
    if str(strategy.framework) not in _NO_SYNC:
        return
    is_whole = strategy.stage == 0  # gradients are whole anyway, also under FSDP1's NO_SHARD
    micro = round(statistics.median(step.micro_steps for step in rank.steps.recent[-WINDOW:]))
    grads = rank.unit_rows("all_reduce" if is_whole else "reduce_scatter", "backward")
    if micro < 2 or not grads:
        return
    # Under no_sync a bucket is reduced once per step, and nothing is left to save
    calls = statistics.median(row.calls for row in grads)
    saved = exposed_seconds(grads) * (micro - 1) / micro
    share = rank.share_of_step(saved)
    if calls < 0.9 * micro or share < MIN_SHARE:
        return
    size = human_bytes(rank.unsharded_bytes)
    form, diff = _NO_SYNC[str(strategy.framework)]
    evidence = (
        f"reducing in each of {micro} micro-steps wastes {human_ratio(share)} of a step; "
        f"{human_seconds(saved)} of {human_seconds(exposed_seconds(grads))} per step"
    )
    name = "reduce_once" if is_whole else "reduce_once_unsharded"
    remedy = fill_remedy(name, _SAVED_REDUCES.seconds(saved), form=form, diff=diff, size=size)
    yield Match(evidence, rank.rank, remedy, waits=Waits(share, AVOIDABLE, is_needless=True))


_BUCKETS_WANTED = 8
_NEARLY = 1.5
"""A limit that exceeds the advised one by no more than this factor is as good."""
_MIN_BUCKET_BYTES = 1 * MIB
"""Smaller buckets cost more in latency than they hide."""
_HIDDEN_REDUCES = Gain(0.3, 1.0)
"""Shares of the hideable time. Measured: 0.62 (docs/evidence/accuracy.md)."""


@rule("ZM315")
def ddp_bucket_large(run: RunSnapshot) -> Iterable[Match]:
    """Gradients go in so few buckets that hardly any of them is sent during backward."""
    rank = worst_rank(run)
    if rank is None or not rank.sharding_strategy.is_ddp or rank.waits_in_each_bucket:
        return  # smaller buckets would be waited for as well (ZM301)
    buckets = rank.unit_rows("all_reduce", "backward")
    waits, lasts = exposed_seconds(buckets), sum(row.seconds for row in buckets)
    total = sum(row.nbytes / max(row.calls, 1.0) for row in buckets)
    count = min(_BUCKETS_WANTED, int(total // _MIN_BUCKET_BYTES))
    share = rank.share_of_step(waits)
    if share < MIN_SHARE or not 0 < len(buckets) <= 2 or count < 3 or waits < 0.5 * lasts:
        return
    cap = total / count / MIB
    if (rank.bucket_cap_mb or math.inf) <= _NEARLY * cap:
        return  # it is set already: the parameters are too large for more buckets
    hideable = min(waits * (1 - 1 / count), own_seconds(rank.steps.recent).get("backward", 0.0))
    gained = predicted_gain(run, _HIDDEN_REDUCES, hideable, bucket_cap_bytes=round(cap * MIB))
    evidence = (
        f"gradients go in {len(buckets)} bucket{'s' if len(buckets) > 1 else ''}: "
        f"{human_ratio(share)} of a step remains after backward; {human_seconds(waits)} per step for "
        f"{human_bytes(total)}"
    )
    blanks = {"cap": f"{cap:.2g}", "count": count, "buckets": len(buckets)}
    remedy = fill_remedy("smaller_ddp_buckets", gained, **blanks)
    yield Match(evidence, rank.rank, remedy, waits=Waits(share, AVOIDABLE))
