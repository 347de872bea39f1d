"""Work of a training loop beside training, and causes of slow single steps. Pure."""

import itertools
import math
import statistics
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from zeromon.base.units import human_bytes, human_count, human_ratio, human_seconds
from zeromon.diagnosis.rule import Match, Waits, lacks_cpus, rule
from zeromon.diagnosis.rules.common import Gain, fill_remedy
from zeromon.readout.breakdown import PART_NAMES, busy_ns, rank_parts, step_parts
from zeromon.readout.text import busiest_line
from zeromon.ring.codes import Phase
from zeromon.snapshot import RankSnapshot, RunSnapshot, StepSummary
from zeromon.snapshot.finding import Remedy
from zeromon.snapshot.focus import MIN_STEPS
from zeromon.snapshot.levels import AVOIDABLE, DEVICE_IDLE, LATE, OWN_CODE, SLOW_STEP, Severity
from zeromon.snapshot.step import settled_steps

_FIRST_STEPS = 10
"""torch.compile is expected to compile in these."""
_EVERY = 100
_TOGETHER = Gain(0.8, 1.0)
"""Shares of the time of all ranks' collections that one collection at the same step saves."""
_STATIC = Gain(0.8, 1.0)
"""Shares of the time of compilations that shapes and numbers declared dynamic save."""
_WRITING = Gain(0.3, 0.9)
"""Shares of the time of saves that a thread takes over: all but the copy of the state. Where CPUs are
short, none is sure: what the thread writes to the page cache takes CPU time from training."""
_PERSISTENT = 0.5
"""The share of the waits for new workers that persistent ones save at least."""


def _judged_steps(rank: RankSnapshot) -> list[StepSummary]:
    """The last steps that are judged; [] while they are few."""
    steps = settled_steps(rank.steps.recent)
    return steps if len(steps) >= MIN_STEPS else []


def _mean_seconds(steps: Sequence[StepSummary], phase: Phase) -> float:
    """Mean seconds of *phase* in a step."""
    return sum(_of_phase(steps, phase)) / len(steps) / 1e9 if steps else 0.0


def _may_have_phase(rank: RankSnapshot, phase: Phase) -> bool:
    """Returns True if any step of the run had *phase*; else its last steps need not be read for it."""
    # A phase without a total is unknown: only its steps tell whether it occurred
    return rank.steps.phase_seconds.get(phase.label, math.inf) > 0


def _of_phase(steps: Sequence[StepSummary], phase: Phase) -> list[int]:
    """Nanoseconds of *phase* in each step. Thousands of steps are read here once a second."""
    return [s.phase_ns[phase] if len(s.phase_ns) > phase else 0 for s in steps]


@rule("ZM606")
def garbage_collection(run: RunSnapshot) -> Iterable[Match]:
    """Python's garbage collector stops the ranks, each at a step of its own. Reported once."""
    collecting = [rank for rank in run.ranks if _may_have_phase(rank, Phase.GARBAGE_COLLECTION)]
    judged = {r.rank: _uncompiled_steps(r) for r in collecting}
    costs = {rank: _mean_seconds(steps, Phase.GARBAGE_COLLECTION) for rank, steps in judged.items()}
    rank = max(collecting, key=lambda r: costs[r.rank], default=None)
    if rank is None or not costs[rank.rank]:
        return
    steps = judged[rank.rank]
    step_seconds = statistics.fmean(step.seconds for step in steps)
    pauses = [pause_ns for pause_ns in _of_phase(steps, Phase.GARBAGE_COLLECTION) if pause_ns]
    # the others wait for a rank that collects, so collections at different steps add up
    rank_mean, together = costs[rank.rank], sum(costs.values())
    if together < AVOIDABLE.warning * step_seconds:
        return
    evidence = (
        f"garbage collection takes {human_seconds(together)} per step "
        f"({human_ratio(together / step_seconds)}) on all ranks; it stops the training thread in "
        f"{len(pauses)} of the last {len(steps)} steps, for up to {human_seconds(max(pauses) / 1e9)}"
    )
    gain = {
        "gain_low_seconds": _TOGETHER.low * rank_mean,
        "gain_high_seconds": _TOGETHER.high * together,
    }
    remedy = fill_remedy("collect_together", gain, every=_EVERY)
    yield Match(evidence, rank.rank, remedy, waits=Waits(together / step_seconds, AVOIDABLE))


def _uncompiled_steps(rank: RankSnapshot) -> list[StepSummary]:
    """The last steps without those in which dynamo compiled, which collects garbage itself."""
    steps = _judged_steps(rank)
    compiled = _of_phase(steps, Phase.COMPILE) if _may_have_phase(rank, Phase.COMPILE) else []
    return (
        [s for s, compile_ns in zip(steps, compiled, strict=True) if not compile_ns]
        if any(compiled)
        else steps
    )


@rule("ZM607")
def recompilations(run: RunSnapshot) -> Iterable[Match]:
    """torch.compile compiles again in steps of a run that has long begun. Reported once."""
    compiling = [rank for rank in run.ranks if _may_have_phase(rank, Phase.COMPILE)]
    costs = {r.rank: _mean_seconds(_later_steps(r), Phase.COMPILE) for r in compiling}
    rank = max(compiling, key=lambda r: costs[r.rank], default=None)
    if rank is None or not costs[rank.rank]:
        return
    steps = _later_steps(rank)
    compiled = [compile_ns for compile_ns in _of_phase(steps, Phase.COMPILE) if compile_ns]
    share = costs[rank.rank] / statistics.fmean(step.seconds for step in steps)
    if len(compiled) < 2 or share < AVOIDABLE.warning:
        return
    reasons = rank.config.compiled.get("recompile_reasons", [])
    reason = f"; {reasons[0]}" if reasons else "; TORCH_LOGS=recompiles names the guard that fails"
    evidence = (
        f"{len(compiled)} of the last {len(steps)} steps recompiled: "
        f"{human_seconds(costs[rank.rank])} per step ({human_ratio(share)}){reason}"
    )
    gain = _STATIC.seconds(costs[rank.rank])
    remedy = fill_remedy("mark_dynamic", gain, diff=_dynamic_diff(reasons))
    yield Match(evidence, rank.rank, remedy, waits=Waits(share, AVOIDABLE))


def _later_steps(rank: RankSnapshot) -> list[StepSummary]:
    """The last steps without those in which compiling is expected."""
    steps = _judged_steps(rank)
    return steps[max(0, _FIRST_STEPS - (rank.steps.watched_steps - len(steps))) :]


def _dynamic_diff(reasons: Sequence[str]) -> str:
    """Returns the diff that keeps a graph from being compiled again, by why it was."""
    if reasons and "size mismatch" not in reasons[0] and "stride mismatch" not in reasons[0]:
        return "+ torch._dynamo.config.allow_unspec_int_on_nn_module = True  # or keep it in a tensor"
    return "+ torch._dynamo.mark_dynamic(batch, 1)  # the dimension that varies, before the model's call"


class Slow(NamedTuple):
    """Steps of a rank that are far longer than its usual one."""

    steps: list[StepSummary]
    usual_seconds: float
    lost_seconds: float
    cause: Phase
    """The phase that holds most of what they are longer by, and of its kind."""
    of_cause_seconds: float


_CAUSES = (
    Phase.DATA_WAIT, Phase.CHECKPOINT, Phase.EVALUATION, Phase.GARBAGE_COLLECTION, Phase.COMPILE,
)  # fmt: skip
_SEE = {Phase.DATA_WAIT: " (ZM601)", Phase.GARBAGE_COLLECTION: " (ZM606)", Phase.COMPILE: " (ZM607)"}


@rule("ZM608", severity=Severity.INFO)
def slow_steps(run: RunSnapshot) -> Iterable[Match]:
    """Single steps take far longer than the usual one, and the loop tells why. Reported once."""
    pauses = max(filter(None, map(_find_pauses, run.ranks)), key=lambda p: p.share, default=None)
    if pauses is not None and not _pause_together(run, pauses):
        rhythm = f"in {len(pauses.steps)} steps"
        if pauses.is_regular:
            rhythm = f"about every {statistics.median(_step_gaps(pauses.steps)):.0f} steps"
        does = "saves a checkpoint" if pauses.phase == "checkpoint" else "pauses"
        detail = "" if pauses.phase == "checkpoint" else f" ({PART_NAMES[pauses.phase]})"
        evidence = (
            f"{does} for {human_seconds(pauses.seconds)} {rhythm}{detail} since step "
            f"{human_count(pauses.steps[0])}; {human_ratio(pauses.share)} of the time; "
            "the other ranks wait"
        )
        yield Match(evidence, pauses.rank, waits=Waits(pauses.share, LATE, pauses.rank, excess=True))
        return
    slow_ranks = [(rank, slow) for rank in run.ranks if (slow := find_slow_steps(rank)) is not None]
    rank, slow = max(slow_ranks, key=lambda pair: pair[1].lost_seconds, default=(None, None))
    if rank is None or slow is None:
        return
    ids = ", ".join(str(step.step) for step in slow.steps[-4:])
    before_ids = "s ..., " if len(slow.steps) > 4 else "s " if slow.steps[1:] else " "
    name = PART_NAMES[slow.cause.label]
    remedy = _persistent_workers(rank, slow) or _in_background(rank, slow)
    see = "" if remedy else _SEE.get(slow.cause, "")
    evidence = (
        f"{human_count(len(slow.steps))} of the last {len(_later_steps(rank))} steps took "
        f"{human_seconds(slow.lost_seconds)} more than the usual {human_seconds(slow.usual_seconds)}; "
        f"step{before_ids}{ids}; {human_seconds(slow.of_cause_seconds)} of it {name}{see}"
    )
    waits = None
    if len(slow_ranks) == 1 < len(run.ranks):  # else their wait would be blamed on communication alone
        evidence += "; the other ranks wait"
        share = slow.lost_seconds / sum(step.seconds for step in _later_steps(rank))
        waits = Waits(share, LATE, rank.rank, excess=True)
    yield Match(evidence, rank.rank, remedy, waits=waits)


class Pauses(NamedTuple):
    """Steps in which a rank itself takes far longer than usual, and waits for nobody."""

    rank: int
    steps: tuple[int, ...]
    seconds: float
    """The median."""
    share: float
    """The share of the time of all steps since the first one."""
    phase: str

    is_regular: bool


_MIN_PAUSES = 2
_LONG, _STEADY = 4, 4
"""A pause shorter than 4 usual steps counts only if at least 4 pauses are evenly spaced."""


def _find_pauses(rank: RankSnapshot) -> Pauses | None:
    """The pauses of *rank*; None where few, in most steps, or short in sum."""
    later = _later_steps(rank)
    steps = [step for step in later if step.timed]
    if not steps:
        return None
    # Without exposed time: a rank that waits for the pause of another does not pause itself
    took_ns = list(map(busy_ns, steps))
    usual_ns = statistics.median(took_ns)
    min_ns = SLOW_STEP * statistics.median(step.end_ns - step.start_ns for step in steps)
    long = [index for index, nanoseconds in enumerate(took_ns) if nanoseconds > min_ns]
    if not _MIN_PAUSES <= len(long) <= (len(took_ns) - long[0]) / 2:  # more often: late, no pauses
        return None
    splits = [step_parts(steps[index]) for index in long]
    paused = tuple(steps[index].step for index in long)
    # Every eighth step is untimed, which hides each second pause of some rhythms: the untimed
    # steps that took as long count, where all together are evenly spaced
    took = [step.end_ns - step.start_ns for step in later if step.step in set(paused)]
    untimed = [s.step for s in later if not s.timed and s.end_ns - s.start_ns >= min(took)]
    together = tuple(sorted((*paused, *untimed)))
    numbers = together if _is_regular(together) else paused
    gaps = _step_gaps(numbers)
    # A first one far ahead of the rhythm is a slow step when training starts
    if len(numbers) > _STEADY and gaps[0] > _FAR_AHEAD * statistics.median(gaps):
        numbers = numbers[1:]
    pause = statistics.median(took_ns[index] - usual_ns for index in long)
    # Of a pause in an untimed step only the number is known: it counts as the timed ones do
    lost = sum(took_ns[index] - usual_ns for index in long) * len(numbers) / len(long)
    began_ns = next(step.start_ns for step in later if step.step == numbers[0])
    share = lost / (steps[-1].end_ns - began_ns)
    if share < LATE.warning:
        return None
    sums = {p: sum(split[p] for split in splits) for p in splits[0] if p != "exposed"}
    saves = all(split["checkpoint"] for split in splits)
    is_regular = _is_regular(numbers)
    if pause < _LONG * min_ns / SLOW_STEP and not (is_regular and len(numbers) >= _STEADY):
        return None
    cause = "checkpoint" if saves else max(sums, key=lambda p: sums[p])
    return Pauses(rank.rank, numbers, pause / 1e9, share, cause, is_regular)


_FAR_AHEAD = 1.5


def _step_gaps(steps: Sequence[int]) -> list[int]:
    return [later - earlier for earlier, later in itertools.pairwise(steps)]


def _is_regular(steps: Sequence[int]) -> bool:
    """Returns whether *steps* are evenly spaced; untimed steps may be missing between them.

    Neighbouring steps have no rhythm: every gap is a multiple of one step.
    """
    gaps = _step_gaps(steps)
    every = statistics.median(gaps)
    return every > 1 and all(abs(gap - max(1, round(gap / every)) * every) <= every / 4 for gap in gaps)


def _pause_together(run: RunSnapshot, pauses: Pauses) -> bool:
    """Returns True if the other ranks pause in these steps, too, or there is none."""
    peers = [p for rank in run.ranks if rank.rank != pauses.rank and (p := _find_pauses(rank))]
    return len(run.ranks) < 2 or any(
        len(set(p.steps) & set(pauses.steps)) > len(pauses.steps) / 2 for p in peers
    )


def find_slow_steps(rank: RankSnapshot) -> Slow | None:
    """The slow steps of *rank*; None where none of :data:`_CAUSES` makes most of them."""
    steps = _later_steps(rank)
    if not steps:
        return None
    took = [step.end_ns - step.start_ns for step in steps]
    usual_ns = statistics.median(took)
    if max(took) <= SLOW_STEP * usual_ns:
        return None
    slow = [step for step, step_ns in zip(steps, took, strict=True) if step_ns > SLOW_STEP * usual_ns]
    lost = sum(step_ns - usual_ns for step_ns in took if step_ns > SLOW_STEP * usual_ns)
    if lost < AVOIDABLE.warning * sum(took):
        return None
    excess = {
        phase: sum(_of_phase(slow, phase)) - len(slow) * statistics.median(_of_phase(steps, phase))
        for phase in _CAUSES
    }
    cause = max(excess, key=lambda phase: excess[phase])
    if excess[cause] <= lost / 2:
        return None
    return Slow(slow, usual_ns / 1e9, lost / 1e9, cause, excess[cause] / 1e9)


def workers_keep_up(rank: RankSnapshot, step_seconds: float, workers: int = 0) -> bool:
    """Returns False if *workers*, by default all, take longer for a batch than *step_seconds*."""
    workers, loading = workers or rank.config.loader.get("num_workers", 0), rank.training.loading
    if not workers or loading is None or not loading.batches:
        return True
    micro_steps = max(1, rank.steps.recent[-1].micro_steps)
    return loading.fetch_seconds / loading.batches / workers <= step_seconds / micro_steps


def _persistent_workers(rank: RankSnapshot, slow: Slow) -> Remedy | None:
    """Workers that stay, where the slow steps wait for workers that an epoch starts anew."""
    workers = rank.config.loader.get("num_workers", 0)
    if (
        slow.cause is not Phase.DATA_WAIT
        or not workers
        # Unknown counts as set, or the remedy might advise what is already so
        or rank.config.loader.get("persistent_workers", True)
        or not workers_keep_up(rank, slow.usual_seconds)
    ):
        return None
    count = len(_later_steps(rank))
    gain = {
        "gain_low_seconds": _PERSISTENT * slow.of_cause_seconds / count,
        "gain_high_seconds": slow.lost_seconds / count,  # with the end of the workers of the last epoch
    }
    return fill_remedy("persistent_workers", gain, workers=workers)


def _in_background(rank: RankSnapshot, slow: Slow) -> Remedy | None:
    """A thread that writes the checkpoints, where the slow steps wait for them."""
    saves = [row for row in rank.ledger.activities if row.activity == "save"]
    if slow.cause is not Phase.CHECKPOINT or not saves or any(row.background for row in saves):
        return None
    if rank.world_size < 2 or rank.sharding_strategy.is_deepspeed:
        return None  # there is no process group, or an engine writes its own format
    nbytes = round(sum(row.nbytes for row in saves) / max(1, rank.ledger.checkpoints))
    size = f" ({human_bytes(nbytes)} on this rank)" if nbytes else ""
    wait = slow.of_cause_seconds / len(_later_steps(rank))
    gain = Gain(0.0 if lacks_cpus(rank) else _WRITING.low, _WRITING.high).seconds(wait)
    return fill_remedy("save_in_background", gain, size=size)


@rule("ZM609")
def own_code(run: RunSnapshot) -> Iterable[Match]:
    """A large part of each step is the script's own code, in no phase. Reported once."""
    shares = {rank.rank: _own_share(rank) for rank in run.ranks if _shows_own_code(rank)}
    rank = max(run.ranks, key=lambda r: shares.get(r.rank, 0.0), default=None)
    share = shares.get(rank.rank, 0.0) if rank is not None else 0.0
    if rank is None or share < OWN_CODE.warning:
        return
    location, seconds = busiest_line(rank), rank_parts(rank)["other"]
    detail = f"; mostly at {location}" if location else ""
    is_alone = min(shares.values()) < share / 2
    evidence = (
        f"{human_ratio(share)} of a step ({human_seconds(seconds)}) is the script's own code{detail}"
    )
    yield Match(evidence, rank.rank if is_alone else -1, waits=Waits(share, OWN_CODE, is_work=True))


def _shows_own_code(rank: RankSnapshot) -> bool:
    """Returns True if the host's time counts: a host ahead of a busy device only waits for it."""
    if rank.steps.watched_steps <= _FIRST_STEPS or rank.status.pause:
        return False
    used = rank.machine.device.utilization_ratio if rank.machine.device is not None else None
    return rank.device == "cpu" or (used is not None and used < DEVICE_IDLE)


def _own_share(rank: RankSnapshot) -> float:
    phases = rank_parts(rank)
    return phases["other"] / total if (total := sum(phases.values())) else 0.0
