"""Limits of the machine: batches, CPUs and links that steps wait for. Pure."""

import math
from collections.abc import Iterable

from zeromon.diagnosis.rule import ANY, Match, Waits, as_number, rule
from zeromon.diagnosis.rules.common import (
    LEAST_SHARE,
    LEAST_STEPS,
    MIB,
    Gain,
    exposed,
    phase_time,
    share_of_step,
    worst,
)
from zeromon.diagnosis.rules.loop import slowest
from zeromon.levels import AVOIDABLE, CPU_WAIT, DEVICE_IDLE, HOST_BOUND
from zeromon.readout.breakdown import PART_NAMES, from_storage, launch_text, pace, parts, rank_parts
from zeromon.ring.events import Phase
from zeromon.snapshot import ConfigFormat, LoadingRow, Pool, RankSnapshot, Remedy, RunSnapshot
from zeromon.units import human_ratio, human_seconds

_LEAST_WAIT = 0.10
_FIRST_WORKERS = 4
_WITH_WORKERS = Gain(0.5, 1.0)
"""Shares of the hideable time, from no workers to some. Measured: 0.99 (docs/advice.md)."""
_WITH_MORE_WORKERS = Gain(0.3, 1.0)
"""Shares with twice as many workers. An estimate, not measured: the storage may be the limit."""


@rule("ZM601")
def data_wait(run: RunSnapshot) -> Iterable[Match]:
    """Steps wait for their batches. Reported for the rank that waits most."""
    ready = [r for r in run.ranks if r.steps >= LEAST_STEPS and r.step_seconds]
    rank = max(ready, key=lambda r: phase_time(r, Phase.DATA_WAIT), default=None)
    if rank is None:
        return
    waits, share = phase_time(rank, Phase.DATA_WAIT)
    if share < _LEAST_WAIT or (not _too_few_workers(rank) and _waits_for_new_workers(rank)):
        return
    workers = rank.loader.get("num_workers")
    prepared = (
        "" if workers is None else f", which {workers or 'no'} worker{'s' * (workers != 1)} prepare"
    )
    yield Match(
        f"{human_seconds(waits)} a step ({human_ratio(share)}) wait for the next batch"
        f"{prepared}{_made_of(rank.loading)}",
        rank.rank,
        _more_workers(rank, waits) if _too_few_workers(rank) else None,
        waits=Waits(share, AVOIDABLE, ANY if workers else rank.rank),
    )


def _too_few_workers(rank: RankSnapshot) -> bool:
    """Returns True if no worker makes batches, or all together take longer for one than training.

    False where the CPUs are short already, which more workers would share.
    """
    workers, made = rank.loader.get("num_workers"), rank.loading
    if workers is None or _cpu_wait(rank) >= CPU_WAIT.warning:
        return False
    if not workers:
        return True
    if made is None or not made.batches:
        return False
    micro_steps = max(1, rank.recent[-1].micro_steps)
    return made.fetch_seconds / made.batches / workers > _trains_seconds(rank) / micro_steps


def _trains_seconds(rank: RankSnapshot) -> float:
    """Mean seconds of a step without its waits for batches."""
    return sum(seconds for part, seconds in rank_parts(rank).items() if part != "data_wait")


def _waits_for_new_workers(rank: RankSnapshot) -> bool:
    """Returns True if a few steps hold the waits, as where each epoch starts its workers; see ZM608."""
    slow = slowest(rank)
    return slow is not None and slow.cause is Phase.DATA_WAIT


def _more_workers(rank: RankSnapshot, waits: float) -> Remedy:
    workers = rank.loader.get("num_workers", 0)
    # with n workers a batch is ready every waits / n, while the step computes
    hideable = waits / 2 if workers else min(waits, _trains_seconds(rank) * _FIRST_WORKERS)
    gain, wanted = _WITH_MORE_WORKERS if workers else _WITH_WORKERS, 2 * workers or _FIRST_WORKERS
    return Remedy(
        cause=(
            "the workers do not keep up"
            if workers
            else "the training process makes its batches itself"
        )
        + _shorten(rank.loading),
        dialect=ConfigFormat.DATA_LOADER,
        diff=f"- DataLoader(data, num_workers={workers})\n"
        f"+ DataLoader(data, num_workers={wanted}, persistent_workers=True)",
        **gain.seconds(hideable),
        price=f"{wanted} processes a rank, and their memory",
        takes=Pool.HOST,
    )


def _made_of(made: LoadingRow | None) -> str:
    """Returns the greatest part of a batch, in words; "" where that is not known."""
    if made is None or made.fetch_seconds <= 0:
        return ""
    (part, seconds), *_ = parts(made).items()
    each = human_seconds(made.fetch_seconds / made.batches)
    share = human_ratio(seconds / made.fetch_seconds)
    return f"; over the whole run a batch takes {each} to make, {share} to {part}"


def _shorten(made: LoadingRow | None) -> str:
    """Returns how to shorten the greatest part of a batch, beside workers."""
    if made is None or made.fetch_seconds <= 0:
        return ""
    (part, _), *_ = parts(made).items()
    stored = from_storage(made)
    if part.startswith("read") and stored is not None:
        share = human_ratio(stored)
        return f"; {share} of what they read comes from storage: a local or smaller copy helps more"
    return f"; {_SHORTER[part]}"


_SHORTER = {
    "collate": "a faster collate_fn, or one that makes a batch at once (__getitems__), helps, too",
    "transform": "transforms that are done once and stored, or on the device, help, too",
    "read": "samples stored as they are read (packed, decoded) help, too",
    "read and transform": "samples stored as they are used (packed, decoded, tokenized) help, too",
}


@rule("ZM605")
def cpu_starved(run: RunSnapshot) -> Iterable[Match]:
    """Training threads can run and have no CPU to run on. Reported for the rank that lacks most."""
    known = [rank for rank in run.ranks if rank.pressure is not None and rank.steps >= LEAST_STEPS]
    rank = max(known, key=_cpu_wait, default=None)
    if rank is None or rank.pressure is None or _cpu_wait(rank) < CPU_WAIT.warning:
        return
    cpus, ranks = rank.pressure.cpus or 0.0, len(run.ranks)
    shared = f"; {ranks} ranks of this node may use {cpus:g} CPUs" if cpus else ""
    remedy = _fewer_threads(rank, ranks, cpus)
    threads = rank.process.get("threads")
    few = f"; it computes with {threads} thread{'s' * (threads > 1)} already" if threads else ""
    yield Match(
        "its main thread could run and had no CPU for "
        f"{human_ratio(rank.pressure.minute_cpu_wait_ratio)} of the last minute"
        f"{_used_by(run) or shared}{few if remedy is None else ''}; "
        "other findings count their waits without that",
        rank.rank,
        remedy,
        CPU_WAIT.severity_of_cost(_cpu_wait(rank)),
    )


def _cpu_wait(rank: RankSnapshot) -> float:
    return rank.pressure.held_cpu_wait_ratio if rank.pressure is not None else 0.0


def _used_by(run: RunSnapshot) -> str:
    """Which processes beside the ranks use the CPUs; "" where none is known to."""
    ranks = {rank.pid: rank.rank for rank in run.ranks}
    texts = []
    for user in run.cpu_users:
        if user.pid not in ranks:
            of = f", started by rank {ranks[user.parent]}" if user.parent in ranks else ""
            texts.append(f"{user.name} (pid {user.pid}{of}) uses {human_ratio(user.cpus)} of a CPU")
    return "".join(f"; {text}" for text in texts[:_MAX_LISTED_USERS])


_MAX_LISTED_USERS = 3


def _fewer_threads(rank: RankSnapshot, ranks: int, cpus: float) -> Remedy | None:
    """Fewer workers where they alone need all *cpus* of the node's *ranks*, else fewer threads.

    None where there are no more threads than CPUs already, or where their number is unknown.
    """
    workers = rank.loader.get("num_workers", 0)
    threads = max(1, int(cpus // ranks))
    fewer = workers * ranks >= max(1.0, cpus) and workers > max(1, threads - 1)
    if not fewer and rank.process.get("threads", 0) <= threads:
        return None
    form, diff = _limited_threads(rank, threads)
    return Remedy(
        cause=f"{ranks * (workers + 1)} processes of this run, the threads of each, and whatever "
        "else runs on this host share its CPUs",
        dialect=ConfigFormat.DATA_LOADER if fewer else form,
        diff=f"- DataLoader(data, num_workers={workers})\n"
        f"+ DataLoader(data, num_workers={max(1, threads - 1)})"
        if fewer
        else diff,
        gain_low_seconds=0.0,
        gain_high_seconds=_cpu_wait(rank) * (rank.step_seconds or 0.0),
        effect="top shows what else uses the CPUs",
        price="fewer batches are prepared ahead"
        if fewer
        else "a rank uses fewer threads for an operator",
    )


def _limited_threads(rank: RankSnapshot, threads: int) -> tuple[ConfigFormat, str]:
    """Sets *threads* by the variable; where that is no more already, the script itself sets others."""
    variable = rank.process.get("variables", {}).get("OMP_NUM_THREADS", "")
    if (as_number(variable) or math.inf) <= threads:
        now = rank.process.get("threads", 0)
        return (
            ConfigFormat.PYTHON,
            f"- torch.set_num_threads({now})\n+ torch.set_num_threads({threads})",
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
    rank = worst(run)
    if rank is None or rank.links is None:
        return
    for far, peak, kind in (
        (False, rank.links.device_bytes_per_second, rank.links.device_kind),
        (True, rank.links.network_bytes_per_second, rank.links.network_kind),
    ):
        large = [
            r for r in rank.traffic
            if (r.nodes > 1) is far and r.calls and r.nbytes / r.calls >= _LARGE_BYTES
        ]  # fmt: skip
        best = max((r.best_busbw_bytes_per_second for r in large), default=0.0)
        share = share_of_step(rank, exposed(large))
        if peak and best and best < _SLOW * peak and share >= LEAST_SHARE:
            yield Match(
                f"the best of the large collectives is {human_ratio(best / peak)} of what "
                f"{kind} can do, and {human_ratio(share)} of a step waits for them",
                rank.rank,
                _NAME_THE_PATH,
                waits=Waits(share, AVOIDABLE),
            )


_NAME_THE_PATH = Remedy(
    cause="NCCL may use another path than the fast one",
    dialect=ConfigFormat.ENVIRONMENT,
    diff="+ NCCL_DEBUG=INFO NCCL_DEBUG_SUBSYS=INIT,NET  # logs the path",
    effect="none yet: the log names the path; then set NCCL_SOCKET_IFNAME or NCCL_IB_HCA, "
    "or change the topology",
    price="a longer log",
)


_WHY_IDLE = {
    "data_wait": "steps wait for batches (ZM601)",
    "exposed": "steps wait for communication (ZM301)",
    "cpu_optimizer": "the optimizer runs on the host (ZM501)",
}


@rule("ZM322")
def launch_bound(run: RunSnapshot) -> Iterable[Match]:
    """The host enqueues kernels more slowly than the device runs them. Reported once."""
    paces = [(known, rank) for rank in run.ranks if (known := pace(rank)) is not None]
    bound = [one for one in paces if one[0].starved_ratio >= HOST_BOUND]
    if not bound:
        return
    known, rank = max(bound, key=lambda one: one[0].starved_seconds)
    alone = rank.rank if len(bound) == 1 < len(paces) else ANY
    where = "" if len(bound) == len(paces) else f" on {len(bound)} of {len(paces)} ranks"
    share = known.starved_seconds / known.step_seconds
    device = rank.device_stats
    used = "" if device is None else f"; kernels ran for {human_ratio(device.utilization_ratio)}"
    if share >= LEAST_SHARE and rank.steps >= LEAST_STEPS:
        yield Match(
            f"the host sets the pace{where} in {human_ratio(share)} of a step "
            f"({human_seconds(known.starved_seconds)}): the device ends each phase right behind it; "
            f"to enqueue takes {launch_text(known.launch_seconds)}{used}",
            alone,
            _ENQUEUE_LESS,
            waits=Waits(share, AVOIDABLE, alone),
        )


def _few_kernels(rank: RankSnapshot) -> str:
    """Why a device idles while it computes."""
    known = pace(rank)
    if known is None:
        return "kernels are few, or the host enqueues them too slowly"
    is_bound = known.starved_ratio >= HOST_BOUND
    return "the host enqueues kernels too slowly (ZM322)" if is_bound else "its kernels are few"


_ENQUEUE_LESS = Remedy(
    cause="the host runs Python and launches kernels for longer than the device computes",
    dialect=ConfigFormat.PYTHON,
    diff='+ model = torch.compile(model)  # or CUDA graphs: mode="reduce-overhead"',
    effect="at most the time without kernels; a larger micro-batch with less accumulation does the "
    "same per sample",
    price="compilation at the first steps; activations of a larger micro-batch",
)


@rule("ZM321", once=True)
def device_idle(run: RunSnapshot) -> Iterable[Match]:
    """A device has no kernel to run for most of the time, although steps end. Reported once."""
    for rank in run.ranks:
        used = rank.device_stats.utilization_ratio if rank.device_stats is not None else None
        if (
            used is None
            or used >= DEVICE_IDLE
            or rank.steps < LEAST_STEPS
            or not rank.alive
            or rank.pause
        ):
            continue
        parts = rank_parts(rank)
        most = max(parts, key=lambda part: parts[part], default="")
        if most == "other":  # ZM609 names its line
            return
        why = _WHY_IDLE.get(most) or _few_kernels(rank)
        share = share_of_step(rank, parts.get(most, 0.0))
        yield Match(
            f"kernels ran for {human_ratio(used)} of a sample; {PART_NAMES.get(most, 'n/a')} takes "
            f"{human_ratio(share)} of a step: {why}",
            rank.rank,
        )
