"""Memories and disks that run full. Pure."""

import math
from collections.abc import Iterable

from zeromon.base.units import human_bytes, human_count
from zeromon.diagnosis.rule import Match, rule, setting_of
from zeromon.diagnosis.rules.common import fill_remedy, ladder_remedy, next_stage
from zeromon.memory.forecast import SAFE_LEVEL
from zeromon.memory.ladder import RECOMPUTED
from zeromon.memory.reconcile import unattributed_memory
from zeromon.readout.breakdown import workers_text
from zeromon.readout.verdict import risk_text
from zeromon.snapshot import Pool, RankSnapshot, RiskCause, RunSnapshot, Severity
from zeromon.snapshot.finding import Remedy
from zeromon.snapshot.host import WorkerMemory
from zeromon.snapshot.levels import OOM
from zeromon.snapshot.memory import Risk


@rule("ZM201")
def oom_risk(run: RunSnapshot) -> Iterable[Match]:
    """A memory is nearly full, will be, or grows without end. Of the host reported once."""
    reported_host = False
    # The host is reported once: for the rank that holds most of it
    for rank in sorted(run.ranks, key=lambda r: -r.memory.rss_bytes):
        for risk in rank.memory.risks:
            of_host = risk.pool == Pool.HOST
            # Where some ranks are known to grow, another one must not be named for the host
            if of_host and (reported_host or rank.rank not in (risk.growing_ranks or (rank.rank,))):
                continue
            severity = OOM.severity(risk.ratio) or _severity_of_growth(rank, risk)
            if severity is None:
                continue
            reported_host = reported_host or of_host
            # The living engines of the rank, where what several of them hold is half of a growth
            living_engines = sum(not engine.dropped for engine in rank.config.engines)
            ranks = run.ranks if risk.pool == Pool.HOST else [rank]
            grown = sum(max(0, row.grown_bytes) for peer in ranks for row in peer.memory.roles)
            is_theirs = risk.cause == RiskCause.GROWTH and grown >= risk.grown_bytes / 2
            engines = living_engines if living_engines > 1 and is_theirs else 0
            engine_note = (
                f"; {engines} DeepSpeed engines are alive, each with its state" if engines else ""
            )
            remedy = _oom_ladder(run, rank, risk)
            if risk.cause == RiskCause.GROWTH:
                remedy = fill_remedy("destroy" if engines else "keep_less")
            evidence = risk_text(risk, rank) + (engine_note or _what_else_grows(risk, rank))
            yield Match(evidence, rank.rank, remedy, severity)


_MIN_GROWTH_SHARE = 0.10
"""Growth that is less than this share of what is in use now may be that of caches."""
_SOON_SECONDS = 1800.0
"""Growth that would fill a memory in this time, at its rate, is a warning."""


def _severity_of_growth(rank: RankSnapshot, risk: Risk) -> Severity | None:
    """How urgent a steady growth is that is too young for a forecast; None for growth that is small."""
    rate = risk.growth_bytes_per_step
    if (
        risk.cause != RiskCause.GROWTH
        or not rate
        or risk.grown_bytes < _MIN_GROWTH_SHARE * risk.used_bytes
    ):
        return None
    seconds_left = (risk.capacity_bytes - risk.used_bytes) / rate * (rank.steps.median_seconds or 0.0)
    return Severity.WARNING if seconds_left < _SOON_SECONDS else Severity.INFO


def _what_else_grows(risk: Risk, rank: RankSnapshot) -> str:
    """Returns a note that no model state grows, where a census shows it; "" without a trend."""
    if risk.cause != RiskCause.GROWTH or not rank.memory.roles:
        return ""
    if max(row.grown_bytes for row in rank.memory.roles) > risk.grown_bytes / 2:
        return ""  # the text names the role
    return "; parameters, gradients and optimizer state do not grow: something else is kept"


_OF_STRATEGY = (RiskCause.STATIC, RiskCause.SPIKE)
"""Causes that a smaller model state, bucket or batch removes."""


def _oom_ladder(run: RunSnapshot, rank: RankSnapshot, risk: Risk) -> Remedy | None:
    """The OOM ladder; None where another rule has the remedy, or where the model is unknown."""
    if risk.cause not in _OF_STRATEGY or not rank.config.models:
        return None
    return ladder_remedy(run, rank, risk.pool, risk.used_bytes - SAFE_LEVEL * risk.capacity_bytes)


@rule("ZM212")
def workers_grow(run: RunSnapshot) -> Iterable[Match]:
    """DataLoader workers take more memory with each step. Reported once, for those that grow most."""
    growing = {
        r.rank: r.memory.workers for r in run.ranks if r.memory.workers and _is_growing(r.memory.workers)
    }
    rates = {number: workers.growth_bytes_per_step or 0.0 for number, workers in growing.items()}
    rank = max(run.ranks, key=lambda r: rates.get(r.rank, 0.0), default=None)
    if rank is None or rank.rank not in growing:
        return
    headroom = rank.memory.host.headroom_bytes if rank.memory.host is not None else -1
    steps = headroom / sum(rates.values()) if headroom >= 0 else math.inf
    is_soon = steps * (rank.steps.median_seconds or 0.0) < _SOON_SECONDS
    full = f"; they fill host memory in {human_count(steps)} steps" if headroom >= 0 else ""
    yield Match(
        f"its DataLoader workers grow {human_bytes(rates[rank.rank])} per step, now "
        f"{workers_text(growing[rank.rank])}{full}",
        rank.rank,
        # Spawned workers share no pages with the rank, so copy-on-write is not their cause
        fill_remedy("share_samples") if growing[rank.rank].forked else None,
        Severity.WARNING if is_soon else Severity.INFO,
    )


def _is_growing(workers: WorkerMemory) -> bool:
    return workers.growth_bytes_per_step is not None and (
        workers.grown_bytes >= _MIN_GROWTH_SHARE * workers.nbytes
    )


_MIN_FREE_SHARE = 0.05
"""The share of a disk below which the next checkpoint or swap file may not fit."""


@rule("ZM211", severity=Severity.WARNING)
def disk_space(run: RunSnapshot) -> Iterable[Match]:
    """The disk that holds offloaded state is nearly full. Reported once a path."""
    reported: set[str] = set()
    for rank in run.ranks:
        disk = rank.machine.disk
        if disk is None or disk.free_bytes is None or not disk.total_bytes or disk.path in reported:
            continue
        if disk.free_bytes < _MIN_FREE_SHARE * disk.total_bytes and rank.status.alive:
            reported.add(disk.path)
            yield Match(
                f"{human_bytes(disk.free_bytes)} of {human_bytes(disk.total_bytes)} are free "
                f"at {disk.path}, where state is offloaded to",
                rank.rank,
            )


_WORTH_FREEING = 0.05
"""A change that frees less than this share of the capacity is not advised."""


@rule("ZM203", severity=Severity.WARNING, once=True)
def stage_too_low(run: RunSnapshot) -> Iterable[Match]:
    """A memory is nearly full of what a higher stage divides or moves. Reported once.

    Where the model is known, the ladder of ZM201 has the stage, with its bytes.
    """
    for rank in run.ranks:
        risk = max(rank.memory.risks, key=lambda r: r.ratio, default=None)
        step = next_stage(rank.sharding_strategy)
        if risk is None or step is None:
            continue
        if risk.ratio < OOM.warning or risk.cause == RiskCause.GROWTH or _oom_ladder(run, rank, risk):
            continue
        on_device = risk.pool == Pool.DEVICE
        if step.moves and not on_device:
            continue  # it would move them to the memory that is full
        nbytes = sum(
            row.device_bytes if on_device else row.host_bytes
            for row in rank.memory.roles
            if row.role in step.roles
        )
        ranks = max(1, rank.world_size)
        frees = nbytes * (ranks - 1) // ranks
        if frees < _WORTH_FREEING * max(1, risk.capacity_bytes):
            continue
        roles = ", ".join(role.replace("_", " ") for role in step.roles)
        placement = "stay on the device" if step.moves else f"are on every one of {ranks} ranks"
        evidence = (
            f"{risk.pool} memory is nearly full; {human_bytes(nbytes)} of it ({roles}) {placement}"
        )
        remedy = fill_remedy(
            "next_stage", {"frees_bytes": frees, "takes": Pool.HOST if step.moves else None},
            strategy=rank.strategy, verb="offload" if step.moves else "divide", form=step.form,
            diff=step.diff, price=step.cost,
        )  # fmt: skip
        yield Match(evidence, rank.rank, remedy)


_MOSTLY_ACTIVATIONS = 0.4
"""The share of the capacity from which recomputing activations is worth its time."""


@rule("ZM204", severity=Severity.WARNING, once=True)
def activations_dominate(run: RunSnapshot) -> Iterable[Match]:
    """Most of a device that is nearly full is activations. Reported once."""
    for rank in run.ranks:
        risk = next((r for r in rank.memory.risks if r.pool == Pool.DEVICE), None)
        nbytes = sum(m.nbytes for m in unattributed_memory(rank) if m.kind == "activation_temp")
        if risk is None or risk.ratio < OOM.warning:
            continue
        if nbytes < _MOSTLY_ACTIVATIONS * max(1, risk.capacity_bytes):
            continue
        recomputes = any(model.get("recomputes") for model in rank.config.models)
        evidence = (
            f"activations and temporaries peak at {human_bytes(nbytes)} of "
            f"{human_bytes(risk.capacity_bytes)}"
            + ("; activation checkpointing is on already" if recomputes else "")
        )
        remedy = fill_remedy("recompute", {"frees_bytes": int(RECOMPUTED * nbytes)})
        yield Match(evidence, rank.rank, None if recomputes else remedy)


_USABLE_SLACK = 0.5
"""The share of the allocator's slack that expandable segments free; an estimate, not measured."""


@rule("ZM205", severity=Severity.WARNING, once=True)
def fragmentation(run: RunSnapshot) -> Iterable[Match]:
    """The allocator holds memory that it cannot use, or will. Reported once."""
    for rank in run.ranks:
        memory = rank.memory.device
        if memory is None or all(risk.cause != RiskCause.FRAGMENTATION for risk in rank.memory.risks):
            continue
        slack = max(0, memory.reserved_bytes - memory.allocated_bytes)
        evidence = (
            f"{human_bytes(slack)} are reserved and not allocated; {human_count(memory.retries)} "
            "allocations had to be retried"
        )
        frees = {"frees_bytes": int(_USABLE_SLACK * slack)}
        remedy = fill_remedy("expand_segments", frees, diff=_expandable_segments(rank))
        yield Match(evidence, rank.rank, remedy)
    # Last: only the first match is reported, and what is measured must not wait for a setting
    for rank in run.ranks:
        if rank.memory.device is not None and _has_scattered_gradients(rank):
            yield _scattered_gradients(rank)


def _has_scattered_gradients(rank: RankSnapshot) -> bool:
    """Returns True if gradients are not contiguous: stages 1 and 2 make them so with an offload."""
    strategy = rank.sharding_strategy
    is_read = strategy.stage == 3 or (strategy.stage > 0 and not strategy.offload)
    return is_read and setting_of(rank, "contiguous_gradients") == "false"


def _scattered_gradients(rank: RankSnapshot) -> Match:
    evidence = (
        f"contiguous_gradients is off at stage {rank.sharding_strategy.stage}: gradients stay where "
        "backward allocates them"
    )
    return Match(evidence, rank.rank, fill_remedy("contiguous_gradients"), Severity.INFO)


def _expandable_segments(rank: RankSnapshot) -> str:
    """The variable with expandable segments, beside the options that it has already."""
    variables = rank.config.process.get("variables", {})
    name = "PYTORCH_ALLOC_CONF" if variables.get("PYTORCH_ALLOC_CONF") else "PYTORCH_CUDA_ALLOC_CONF"
    conf, segments = variables.get(name, ""), "expandable_segments:True"
    if not conf or segments in conf.split(","):
        return f"+ {name}={segments}"
    # Set to False, the option must go: beside the new one the variable contradicts itself
    options = [option for option in conf.split(",") if not option.startswith("expandable_segments")]
    return f"- {name}={conf}\n+ {name}={','.join([*options, segments])}"


_MUCH = 1 << 30
"""Bytes a rank; a smaller model that every rank builds costs nothing that matters."""


def _loaded_by_all(run: RunSnapshot) -> Iterable[Match]:
    """The ranks of this node that shard their parameters all loaded the same file, whole."""
    shards = [
        rank
        for rank in run.ranks
        if (strategy := rank.sharding_strategy).stage == 3 or strategy.is_sharding_fsdp
    ]
    loads = [
        max(
            (row for row in rank.ledger.activities if row.file),
            key=lambda row: row.file_bytes,
            default=None,
        )
        for rank in shards
    ]
    first_load = loads[0] if loads else None
    if first_load is None or len(loads) < 2 or first_load.file_bytes < _MUCH:
        return
    if any(load is None or load.file != first_load.file for load in loads):
        return
    rank, nbytes = shards[0], first_load.file_bytes
    yield Match(
        f"each of {len(loads)} ranks loaded the same checkpoint of {human_bytes(nbytes)} whole; "
        f"{human_bytes(nbytes * len(loads))} of this node's memory, where all load at once",
        rank.rank,
        fill_remedy("map_the_file", {"frees_bytes": nbytes}),
    )


@rule("ZM704", severity=Severity.WARNING)
def whole_model_on_every_rank(run: RunSnapshot) -> Iterable[Match]:
    """Every rank built the whole model before stage 3 divided it, or loaded it. Each reported once."""
    yield from _loaded_by_all(run)
    for rank in run.ranks:
        built = max((model.get("built_bytes", 0) for model in rank.config.models), default=0)
        if built < _MUCH or rank.world_size < 2:
            continue
        rank_count = len(run.ranks)
        frees = {"frees_bytes": built * (rank.world_size - 1) // rank.world_size}
        yield Match(
            f"each rank built {human_bytes(built)} of parameters before stage 3 divided them; "
            f"{human_bytes(built * rank_count)} on this node",
            rank.rank,
            fill_remedy("build_divided", frees),
        )
        return
