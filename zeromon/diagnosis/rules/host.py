"""Limits of the machine: batches, CPUs and links that steps wait for. Pure."""

import math
import statistics
from collections.abc import Iterable

from zeromon.base.units import human_ratio, human_seconds
from zeromon.diagnosis.rule import ANY, Match, Waits, as_number, rule
from zeromon.diagnosis.rules.common import MIB, MIN_SHARE, Gain, exposed_seconds, fill_remedy, phase_time
from zeromon.diagnosis.rules.loop import find_slow_steps, workers_keep_up
from zeromon.readout.breakdown import PART_NAMES, from_storage, launch_text, load_parts, pace, rank_parts
from zeromon.ring.codes import Phase
from zeromon.snapshot import RankSnapshot, RunSnapshot
from zeromon.snapshot.finding import ConfigFormat, Remedy
from zeromon.snapshot.focus import MIN_STEPS, worst_rank
from zeromon.snapshot.levels import AVOIDABLE, CPU_WAIT, DEVICE_IDLE, HOST_BOUND
from zeromon.snapshot.step import LoadingRow

_MIN_WAIT_SHARE = 0.10
_FIRST_WORKERS = 4
_WITH_WORKERS = Gain(0.5, 1.1)
"""Shares of the time that workers hide. Measured: 0.99 (docs/evidence/accuracy.md) to 1.03."""
_WITH_MORE_WORKERS = Gain(0.3, 1.1)
"""Shares with twice as many workers. Measured: 1.04 where samples sleep; storage may be the limit."""


@rule("ZM601")
def data_wait(run: RunSnapshot) -> Iterable[Match]:
    """Steps wait for their batches. Reported for the rank that waits most."""
    judged = [r for r in run.ranks if r.steps.watched_steps >= MIN_STEPS and r.steps.median_seconds]
    rank = max(judged, key=lambda r: phase_time(r, Phase.DATA_WAIT), default=None)
    if rank is None:
        return
    waits, share = phase_time(rank, Phase.DATA_WAIT)
    if share < _MIN_WAIT_SHARE or (not _too_few_workers(rank) and _waits_for_new_workers(rank)):
        return
    workers = rank.config.loader.get("num_workers")
    faster = _faster_batch(rank.training.loading)
    prepared = "" if workers is None else f"; {workers or 'no'} worker{'s' * (workers != 1)} prepare it"
    yield Match(
        f"{human_seconds(waits)} per step ({human_ratio(share)}) wait for the next batch"
        f"{prepared}{_main_batch_part(rank.training.loading)}",
        rank.rank,
        _more_workers(rank, len(run.ranks), waits) if _too_few_workers(rank) else None,
        # Without workers the rank makes its batches itself: only its own lack of CPUs explains the wait
        waits=Waits(share, AVOIDABLE, ANY if workers else rank.rank),
        action=f"Make a batch faster: {faster}." if faster else "",
    )


def _too_few_workers(rank: RankSnapshot) -> bool:
    """Returns True if no worker makes batches, or all together take longer for one than training.

    False where the CPUs are short already, which more workers would share.
    """
    workers = rank.config.loader.get("num_workers")
    if workers is None or _cpu_wait(rank) >= CPU_WAIT.warning:
        return False
    return not workers or not workers_keep_up(rank, _trains_seconds(rank))


def _trains_seconds(rank: RankSnapshot) -> float:
    """Mean seconds of a step without its waits for batches."""
    return sum(seconds for phase, seconds in rank_parts(rank).items() if phase != "data_wait")


def _waits_for_new_workers(rank: RankSnapshot) -> bool:
    """Returns True if a few steps hold the waits, as where each epoch starts its workers; see ZM608."""
    slow = find_slow_steps(rank)
    if slow is not None and slow.cause is Phase.DATA_WAIT:
        return workers_keep_up(rank, _trains_seconds(rank))
    # Too early for ZM608: known workers that keep up in the usual step wait for nothing but their start
    shares = [
        step.phase_ns[Phase.DATA_WAIT] / max(1, step.end_ns - step.start_ns)
        for step in rank.steps.recent
        if len(step.phase_ns) > Phase.DATA_WAIT
    ]
    loading = rank.training.loading
    keeps_up = loading is not None and loading.batches and rank.config.loader.get("num_workers")
    return bool(keeps_up and shares and statistics.median(shares) < _MIN_WAIT_SHARE)


def _more_workers(rank: RankSnapshot, ranks: int, waits: float) -> Remedy:
    workers = rank.config.loader.get("num_workers", 0)
    shares, count = _WITH_MORE_WORKERS if workers else _WITH_WORKERS, 2 * workers or _FIRST_WORKERS
    pressure, trains = rank.machine.pressure, _trains_seconds(rank)
    worker_seconds = (trains + waits) * workers or waits  # of one worker for one batch

    def shorter(working: float) -> float:
        # A step is as long as what it trains, or as its batch takes
        return max(0.0, trains + waits - max(trains, worker_seconds / working))

    # Workers that read wait for storage; those that compute need a CPU each, beside the rank's
    cpus = count if pressure is None or not pressure.cpus else max(1.0, pressure.cpus / ranks - 1)
    cause = "the workers do not keep up" if workers else "the training process makes its batches itself"
    if faster := _faster_batch(rank.training.loading):
        cause += f"; {faster} helps, too"
    gain = {
        "gain_low_seconds": shares.low * shorter(min(count, cpus)),
        "gain_high_seconds": shares.high * shorter(count),
    }
    return fill_remedy("more_workers", gain, cause=cause, workers=workers, count=count)


def _main_batch_part(loading: LoadingRow | None) -> str:
    """Returns the greatest part of a batch, in words; "" where that is not known."""
    if loading is None or loading.fetch_seconds <= 0:
        return ""
    (work, seconds), *_ = load_parts(loading).items()
    batch_time = human_seconds(loading.fetch_seconds / loading.batches)
    share = human_ratio(seconds / loading.fetch_seconds)
    return f"; over the whole run a batch takes {batch_time} to make, {share} to {work}"


def _faster_batch(loading: LoadingRow | None) -> str:
    """Returns what shortens the greatest part of a batch, beside workers; "" where that is not known."""
    if loading is None or loading.fetch_seconds <= 0:
        return ""
    (work, _), *_ = load_parts(loading).items()
    stored = from_storage(loading)
    if work.startswith("read") and stored is not None:
        return f"a local or smaller copy of the data, of which {human_ratio(stored)} comes from storage,"
    return _SHORTER[work]


_SHORTER = {
    "collate": "a collate_fn that makes a batch at once (__getitems__)",
    "transform": "storing what the transforms make, or transforming on the device",
    "read": "storing samples as they are read (packed, decoded)",
    "read and transform": "storing samples as they are used (packed, decoded, tokenized)",
}


@rule("ZM605")
def cpu_starved(run: RunSnapshot) -> Iterable[Match]:
    """Training threads can run and have no CPU to run on. Reported for the rank that lacks most."""
    measured = [
        rank
        for rank in run.ranks
        if rank.machine.pressure is not None and rank.steps.watched_steps >= MIN_STEPS
    ]
    rank = max(measured, key=_cpu_wait, default=None)
    if rank is None or rank.machine.pressure is None or _cpu_wait(rank) < CPU_WAIT.warning:
        return
    cpus, ranks = rank.machine.pressure.cpus or 0.0, len(run.ranks)
    shared = f"; the {ranks} rank{'s' * (ranks != 1)} of this node may use {cpus:g} CPUs" if cpus else ""
    remedy = _fewer_threads(rank, ranks, cpus)
    threads = rank.config.process.get("threads")
    note = f"; already uses only {threads} compute thread{'s' * (threads > 1)}" if threads else ""
    evidence = (
        "main thread waited for a CPU for "
        f"{human_ratio(rank.machine.pressure.minute_cpu_wait_ratio)} of the last minute"
        f"{_cpu_users_text(run) or shared}{note if remedy is None else ''}; "
        "other findings exclude this wait"
    )
    action = "Stop what else uses the CPUs, or give the ranks more of them (--cpus-per-task)."
    yield Match(evidence, rank.rank, remedy, CPU_WAIT.severity_of_cost(_cpu_wait(rank)), action=action)


def _cpu_wait(rank: RankSnapshot) -> float:
    return rank.machine.pressure.held_cpu_wait_ratio if rank.machine.pressure is not None else 0.0


def _cpu_users_text(run: RunSnapshot) -> str:
    """Which processes beside the ranks use the CPUs; "" where none is known to."""
    ranks = {rank.pid: rank.rank for rank in run.ranks}
    notes = []
    for user in run.cpu_users:
        if user.pid not in ranks:
            of = f", started by rank {ranks[user.parent]}" if user.parent in ranks else ""
            notes.append(f"{user.name} (pid {user.pid}{of}) uses {human_ratio(user.cpus)} of a CPU")
    return "".join(f"; {note}" for note in notes[:_MAX_LISTED_USERS])


_MAX_LISTED_USERS = 3


def _fewer_threads(rank: RankSnapshot, ranks: int, cpus: float) -> Remedy | None:
    """Fewer workers where they alone need all *cpus* of the node's *ranks*, else fewer threads.

    None where there are no more threads than CPUs already, or where their number is unknown.
    """
    workers = rank.config.loader.get("num_workers", 0)
    threads = max(1, int(cpus // ranks))
    fewer_workers = max(1, threads - 1)
    # Workers that sleep while they read use no CPU, and the steps may need them all
    fewer = (
        workers * ranks >= max(1.0, cpus)
        and workers > fewer_workers
        and phase_time(rank, Phase.DATA_WAIT)[1] < _MIN_WAIT_SHARE
        and workers_keep_up(rank, _trains_seconds(rank), fewer_workers)
    )
    if not fewer and rank.config.process.get("threads", 0) <= threads:
        return None
    form, diff = _limited_threads(rank, threads)
    gain = Gain(0.0, _cpu_wait(rank)).seconds(rank.steps.median_seconds or 0.0)
    return fill_remedy(
        "fewer_workers" if fewer else "fewer_threads", gain, processes=ranks * (workers + 1),
        workers=workers, fewer=fewer_workers, form=form, diff=diff,
    )  # fmt: skip


def _limited_threads(rank: RankSnapshot, threads: int) -> tuple[ConfigFormat, str]:
    """Sets *threads* by the variable; where that is no more already, the script itself sets others."""
    variable = rank.config.process.get("variables", {}).get("OMP_NUM_THREADS", "")
    # Without the variable OpenMP takes all cores, so setting it is still the remedy
    if (as_number(variable) or math.inf) <= threads:
        current = rank.config.process.get("threads", 0)
        return (
            ConfigFormat.PYTHON,
            f"- torch.set_num_threads({current})\n+ torch.set_num_threads({threads})",
        )
    old = f"- OMP_NUM_THREADS={variable}\n" if variable else ""
    return ConfigFormat.ENVIRONMENT, f"{old}+ OMP_NUM_THREADS={threads}"


# ---- links ------------------------------------------------------------------------------------------

_LARGE_BYTES = 16 * MIB
"""From this size on a collective is limited by bandwidth, not by latency."""
_SLOW = 0.2
"""Below this share of the peak of a link another path is likely."""


@rule("ZM310")
def slow_link(run: RunSnapshot) -> Iterable[Match]:
    """Large collectives reach a small part of what the links can do."""
    rank = worst_rank(run)
    if rank is None or rank.communication.links is None:
        return
    for is_remote, peak, kind in (
        (False, rank.communication.links.device_bytes_per_second, rank.communication.links.device_kind),
        (True, rank.communication.links.network_bytes_per_second, rank.communication.links.network_kind),
    ):
        large = [
            r for r in rank.communication.traffic
            if (r.nodes > 1) is is_remote and r.calls and r.nbytes / r.calls >= _LARGE_BYTES
        ]  # fmt: skip
        best_rate = max((r.best_busbw_bytes_per_second for r in large), default=0.0)
        share = rank.share_of_step(exposed_seconds(large))
        if peak and best_rate and best_rate < _SLOW * peak and share >= MIN_SHARE:
            evidence = (
                f"the fastest large collective reaches {human_ratio(best_rate / peak)} of "
                f"{kind}; {human_ratio(share)} of a step waits for them"
            )
            yield Match(evidence, rank.rank, fill_remedy("name_the_path"), waits=Waits(share, AVOIDABLE))


_WHY_IDLE = {
    "data_wait": "steps wait for batches (ZM601)",
    "exposed": "steps wait for communication (ZM301)",
    "cpu_optimizer": "the optimizer runs on the host (ZM501)",
}


@rule("ZM322")
def launch_bound(run: RunSnapshot) -> Iterable[Match]:
    """The host enqueues kernels more slowly than the device runs them. Reported once."""
    paces = [(pacing, rank) for rank in run.ranks if (pacing := pace(rank)) is not None]
    bound = [pair for pair in paces if pair[0].starved_ratio >= HOST_BOUND]
    if not bound:
        return
    pacing, rank = max(bound, key=lambda pair: pair[0].starved_seconds)
    blamed = rank.rank if len(bound) == 1 < len(paces) else ANY
    scope = "" if len(bound) == len(paces) else f" on {len(bound)} of {len(paces)} ranks"
    share = pacing.starved_seconds / pacing.step_seconds
    device = rank.machine.device
    used = "" if device is None else f"; kernels ran for {human_ratio(device.utilization_ratio)}"
    if share >= MIN_SHARE and rank.steps.watched_steps >= MIN_STEPS:
        evidence = (
            f"the host sets the pace{scope} in {human_ratio(share)} of a step "
            f"({human_seconds(pacing.starved_seconds)}); the device ends each phase right behind it; "
            f"to enqueue takes {launch_text(pacing.launch_seconds)}{used}"
        )
        yield Match(evidence, blamed, fill_remedy("enqueue_less"), waits=Waits(share, AVOIDABLE, blamed))


def _why_few_kernels(rank: RankSnapshot) -> str:
    """Why a device idles while it computes."""
    pacing = pace(rank)
    if pacing is None:
        return "kernels are few, or the host enqueues them too slowly"
    is_bound = pacing.starved_ratio >= HOST_BOUND
    return "the host enqueues kernels too slowly (ZM322)" if is_bound else "its kernels are few"


@rule("ZM321", once=True)
def device_idle(run: RunSnapshot) -> Iterable[Match]:
    """A device has no kernel to run for most of the time, although steps end. Reported once."""
    for rank in run.ranks:
        used = rank.machine.device.utilization_ratio if rank.machine.device is not None else None
        if (
            used is None
            or used >= DEVICE_IDLE
            or rank.steps.watched_steps < MIN_STEPS
            or not rank.status.alive
            or rank.status.pause
        ):
            continue
        phases = rank_parts(rank)
        longest = max(phases, key=lambda phase: phases[phase], default="")
        if longest == "other":  # ZM609 names its line
            return
        reason = _WHY_IDLE.get(longest) or _why_few_kernels(rank)
        share = rank.share_of_step(phases.get(longest, 0.0))
        yield Match(
            f"kernels ran for {human_ratio(used)} of a sample; {PART_NAMES.get(longest, 'n/a')} takes "
            f"{human_ratio(share)} of a step: {reason}",
            rank.rank,
        )
