"""Figures of the training itself: loss, gradient norm, and what ranks begin with. Pure."""

import statistics
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

from zeromon.base.units import counted, human_count
from zeromon.diagnosis.rule import Match, as_number, rule, setting_of
from zeromon.diagnosis.rules.common import AVERAGED, DIFFS, OF_ITERABLE, fill_remedy
from zeromon.ring.codes import Scalar
from zeromon.ring.strategy import Dim, Framework, dim_by_name
from zeromon.snapshot import RankSnapshot, RunSnapshot, Severity, StepSummary
from zeromon.snapshot.finding import Remedy
from zeromon.snapshot.focus import MIN_STEPS
from zeromon.snapshot.levels import NORM_SPIKE, NORM_SPIKE_RATIO
from zeromon.snapshot.step import ScalarRow

# ---- NaN and infinity -------------------------------------------------------------------------------

_NAMES = {Scalar.LOSS.label: "the loss", Scalar.GRAD_NORM.label: "the gradient norm"}


@rule("ZM409", severity=Severity.CRITICAL, once=True)
def not_finite(run: RunSnapshot) -> Iterable[Match]:
    """The loss, or the gradient norm, is infinite or NaN: since which step, and on which rank first."""
    for name, called in _NAMES.items():
        rows = {r.rank: row for r in run.ranks if (row := _scalar_row(r, name)) is not None}
        nans = {n: row for n, row in rows.items() if row.first_nonfinite_step}
        if name == Scalar.GRAD_NORM.label:  # a gradient scaler skips such a step, and goes on
            half_ranks = {r.rank for r in run.ranks if r.config.process.get("autocast") == "float16"}
            nans = {n: row for n, row in nans.items() if n not in half_ranks}
        if not nans:
            continue
        began_step = min(row.first_nonfinite_step for row in nans.values())
        first_ranks = [n for n, row in nans.items() if row.first_nonfinite_step == began_step]
        row = nans[first_ranks[0]]
        lasts = f"since step {began_step}" if row.value is None else f"in step {began_step}"
        yield Match(
            f"{called} is infinite or NaN {lasts}, {_where_first(first_ranks, nans, rows, run)}; "
            f"{counted(row.nonfinite, 'step')} so far",
            first_ranks[0] if len(first_ranks) == 1 else -1,
            severity=None if row.value is None else Severity.WARNING,
        )


def _scalar_row(rank: RankSnapshot, name: str) -> ScalarRow | None:
    return next((row for row in rank.training.scalars if row.name == name), None)


def _where_first(
    ranks: list[int], nans: dict[int, ScalarRow], rows: dict[int, ScalarRow], run: RunSnapshot
) -> str:
    """On which ranks a value was not finite first, as far as ranks know it."""
    if len(ranks) > 1:
        return f"on {len(ranks)} ranks in the same step; it has one cause, or is a mean over the ranks"
    if len(rows) < max(1, run.ranks[0].world_size):
        return f"on rank {ranks[0]}; only {len(rows)} of {run.ranks[0].world_size} ranks report it"
    later = [n for n in nans if n not in ranks]
    followed = (
        f"; rank {later[0]} follows in step {nans[later[0]].first_nonfinite_step}" if later else ""
    )
    return f"on rank {ranks[0]} first{followed}"


# ---- spikes -----------------------------------------------------------------------------------------

_PAST = 64
"""So many norms before a step are its past."""


class _Spike(NamedTuple):
    step: int
    norm: float
    median: float
    deviations: float


def norm_spikes(steps: Iterable[StepSummary]) -> Iterator[_Spike]:
    """The steps whose gradient norm is far above those before it, by median and MAD."""
    past: list[float] = []
    for step in steps:
        norm = step.grad_norm
        if norm is None:
            continue
        if len(past) >= MIN_STEPS:
            median = statistics.median(past)
            # The factor makes the MAD of normal values their standard deviation
            spread = 1.4826 * statistics.median(abs(old_norm - median) for old_norm in past)
            # Norms that are all equal have no spread to divide by: any higher one is a spike
            deviations = (
                (norm - median) / spread if spread else float(norm > median) * NORM_SPIKE.critical
            )
            # Norms that hardly vary have a tiny spread: without the ratio, 1 % more would be a spike
            if deviations >= NORM_SPIKE.warning and norm >= NORM_SPIKE_RATIO * median:
                yield _Spike(step.step, norm, median, deviations)
        past = [*past[1 - _PAST :], norm]


@rule("ZM410")
def grad_norm_spikes(run: RunSnapshot) -> Iterable[Match]:
    """The gradient norm jumps far above its own past. Reported for the rank with the most spikes."""
    spiked = [(rank, jumps) for rank in run.ranks if (jumps := list(norm_spikes(rank.steps.recent)))]
    if not spiked:
        return
    rank, jumps = max(spiked, key=lambda pair: len(pair[1]))
    jump = jumps[-1]
    # By DeepSpeed, or by the script
    clip_norm = as_number(setting_of(rank, "gradient_clipping")) or rank.config.process.get("clip_norm")
    limit = float(clip_norm) if clip_norm else None
    clips = "clipping unknown" if limit is None else f"clipped to {limit:g}"
    yield Match(
        f"the gradient norm was {jump.norm:.3g} in step {jump.step}, "
        f"{jump.norm / jump.median:.1f} times the previous median; {human_count(len(jumps))} such "
        f"step{'s' * (len(jumps) != 1)} of the last {len(rank.steps.recent)}; {clips}",
        rank.rank,
        _calmer_remedy(rank, limit, jump.median),
        NORM_SPIKE.severity_of_cost(jump.deviations) if len(jumps) > 1 else None,
    )


def _calmer_remedy(rank: RankSnapshot, limit: float | None, median: float) -> Remedy:
    """Clips gradients; where they are clipped already, takes smaller steps."""
    rate = _scalar_row(rank, Scalar.LEARNING_RATE.label)
    if limit is None:
        change = "clip_deepspeed" if rank.sharding_strategy.is_deepspeed else "clip"
        return fill_remedy(change, norm=f"{median:.3g}")
    current = f"{rate.value:g}" if rate is not None and rate.value else "n/a"
    halved = f"{rate.value / 2:g}" if rate is not None and rate.value else "half of it"
    return fill_remedy("lower_rate", rate=current, halved=halved)


# ---- what ranks begin with --------------------------------------------------------------------------


def _are_replicas(rank: RankSnapshot) -> bool:
    """Returns True if each rank has samples of its own: by its wrapper or mesh, or by what it sends."""
    if rank.data_parallel_ranks is not None:
        return rank.data_parallel_ranks == rank.world_size
    sent = sum(
        row.nbytes * row.calls
        for row in rank.communication.traffic
        if row.op == "all_reduce" and row.group_size == rank.world_size
    )
    nbytes = rank.config.process.get("params_bytes", 0)
    return bool(nbytes) and sent >= AVERAGED * nbytes


@rule("ZM411", severity=Severity.WARNING)
def same_samples(run: RunSnapshot) -> Iterable[Match]:
    """Data-parallel ranks train on the same batches. Reported once."""
    by_marks: dict[tuple[int, ...], list[RankSnapshot]] = defaultdict(list)
    for rank in run.ranks:
        # A rank that repeats one batch, as a benchmark does, says nothing about the others
        if len(set(rank.training.first_batches)) > 1 and _are_replicas(rank):
            by_marks[rank.training.first_batches].append(rank)
    twins = max(by_marks.values(), key=len, default=[])
    if len(twins) < 2:
        return
    twin = twins[0]
    sampler = twin.config.loader.get("sampler")
    diff = _OWN_PARTS.get(sampler or "", "")
    of_iterable = "an IterableDataset" if sampler == OF_ITERABLE else sampler
    yield Match(
        f"the first {len(twin.training.first_batches)} batches of {len(twins)} of {len(run.ranks)} "
        f"ranks ({_rank_list(twins)}) are the same ({of_iterable or 'no sampler'})",
        remedy=fill_remedy("own_part", diff=diff, count=len(twins)) if diff else None,
    )


_OWN_PARTS: Mapping[str, str] = DIFFS["own_parts"]
"""Sampler of a DataLoader -> the diff that gives each rank a part of its own. How other samplers divide
the data is unknown."""


@rule("ZM412", severity=Severity.WARNING)
def initial_parameters_differ(run: RunSnapshot) -> Iterable[Match]:
    """Ranks that average their gradients began with different parameters. Reported once."""
    # Under FSDP and DeepSpeed shards differ by rank, and under expert parallelism experts do
    marks = {
        rank.rank: mark
        for rank in run.ranks
        if (mark := rank.config.process.get("params_mark")) is not None
        and rank.sharding_strategy.framework in (Framework.UNKNOWN, Framework.DDP)
        and _are_replicas(rank)
        and not any(dim.used and dim_by_name(dim.name) is Dim.EP for dim in rank.dimensions)
    }
    if len(set(marks.values())) < 2:
        return
    first_rank, other_rank = next((a, b) for a in marks for b in marks if marks[a] != marks[b])
    evidence = f"rank {other_rank} began with other parameters than rank {first_rank}"
    remedy = fill_remedy("broadcast_parameters", ranks=run.ranks[0].world_size)
    yield Match(evidence, other_rank, remedy)


def _rank_list(ranks: list[RankSnapshot]) -> str:
    listing = ", ".join(str(rank.rank) for rank in ranks[:8])
    return f"{listing}, ..." if len(ranks) > 8 else listing
