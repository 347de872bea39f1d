"""Costs of offloading: transfers, the optimizer on the host, and the host's memory. Pure.

The rate of a path is compared with what is known of its peak: the rate of the PCIe link; for a disk,
which names none, the bytes moved while it had requests, how many requests it had at once, and the limit
of its cgroup.
"""

from collections.abc import Iterable

from zeromon.base.units import human_bytes, human_rate, human_ratio, human_seconds
from zeromon.diagnosis.rule import Match, Waits, as_number, rule, setting_of
from zeromon.diagnosis.rules import common
from zeromon.memory.forecast import host_capacity_bytes
from zeromon.memory.reconcile import host_model_bytes
from zeromon.ring.codes import Phase
from zeromon.ring.model_metadata import ModelMetadata
from zeromon.ring.strategy import Framework, deepspeed_strategy
from zeromon.snapshot import Pool, RankSnapshot, RunSnapshot, Severity
from zeromon.snapshot.finding import Remedy
from zeromon.snapshot.focus import SETTLED_STEPS, is_running_out, worst_rank
from zeromon.snapshot.levels import BLOCKED, Level
from zeromon.snapshot.memory import TransferRow

_LAST_STEPS = 50
_WARM_UP = 3
_USED_UP = 0.7
"""From this share of a rate on, that rate limits a transfer."""
_SHALLOW = 4
"""Below so many requests at once a disk with many channels is not used up."""


def waited_share(rank: RankSnapshot) -> float:
    """The share of the last steps in which the training thread waited for offloaded state to move."""
    recent = [step for step in rank.steps.recent[-_LAST_STEPS:] if step.step > _WARM_UP]
    total_ns = sum(step.end_ns - step.start_ns for step in recent)
    return sum(step.offload_blocked_ns for step in recent) / total_ns if total_ns else 0.0


@rule("ZM503")
def offload_waits(run: RunSnapshot) -> Iterable[Match]:
    """Steps wait while offloaded state moves. Reported for the worst rank."""
    judged = [
        rank for rank in run.ranks if rank.steps.watched_steps >= SETTLED_STEPS and rank.memory.transfers
    ]
    rank = max(judged, key=waited_share, default=None)
    if rank is None:
        return
    share = waited_share(rank)
    if share < BLOCKED.warning:
        yield from _bound_by_link(rank)
        return
    transfer = max(rank.memory.transfers, key=lambda row: row.blocked_seconds)
    waits = share * (rank.steps.median_seconds or 0.0)
    disk = transfer.path.startswith("disk")
    rate = human_rate(transfer.bytes_per_second)
    evidence = (
        f"{human_ratio(share)} of a step waits for offloaded state to move; most for "
        f"{transfer.path}, at {rate}{_compare_with_peak(run, rank, transfer)}"
    )
    # Of a rank on a device, waits for copies between host and device are not known
    remedy = (
        _disk_remedy(run, rank, transfer, waits)
        if disk
        else common.fill_remedy("no_offload", _NOT_COPIED.seconds(waits))
    )
    yield Match(evidence, rank.rank, remedy, waits=Waits(share, BLOCKED, rank.rank))


def _bound_by_link(rank: RankSnapshot) -> Iterable[Match]:
    """The least time that copies take at the rate of the link: on a device nothing shows their waits."""
    rate, link = rank.path_peak("host_to_device")
    nbytes = _most_between_host_and_device(rank)
    if rank.device == "cpu" or not rate:
        return
    share = rank.share_of_step(nbytes / rate)
    if share < BLOCKED.critical:
        return
    evidence = (
        f"{human_ratio(share)} of a step moves {human_bytes(nbytes)} one way between device and host; "
        f"at what {link} that takes {human_seconds(nbytes / rate)} at least"
    )
    yield Match(evidence, rank.rank, _less_often(rank, "the link needs that long for so many bytes"))


def _most_between_host_and_device(rank: RankSnapshot) -> float:
    """Bytes a step, in the direction that has more: a link carries both at once."""
    return max((row.step_bytes for row in rank.memory.transfers if "host" in row.path), default=0.0)


def _compare_with_peak(run: RunSnapshot, rank: RankSnapshot, transfer: TransferRow) -> str:
    """The rate of *transfer* compared with its peak, in words; "" where no peak is known."""
    rate, origin = rank.path_peak(transfer.path)
    comparison = ""
    if rate:
        share = human_ratio(_path_rate(run, transfer.path) / rate)
        comparison = f", {share} of the {human_rate(rate)} that {origin}"
    disk = rank.machine.disk
    if transfer.path.startswith("disk") and disk is not None and disk.busy_bytes_per_second:
        name = disk.device or "the disk"
        comparison += (
            f"; {name} moves {human_rate(disk.busy_bytes_per_second)} while it is busy, with "
            f"{disk.requests_at_once or 0.0:.1f} requests at once"
        )
    return comparison


def _path_rate(run: RunSnapshot, path: str) -> float:
    """Bytes/s along *path*: of all ranks of the node on a disk, which they share; else of one."""
    rates = [t.bytes_per_second or 0.0 for r in run.ranks for t in r.memory.transfers if t.path == path]
    return sum(rates) if path.startswith("disk") else max(rates, default=0.0)


# ---- gains: estimates from the parts of a wait, not measured against a disk or a device -------------

_UNKNOWN_DISK = 0.7
"""At most, where nothing is known of what the disk could do."""
_IDLE_DISK = common.Gain(0.2, 1.0)
"""Shares of the time in which the disk has nothing to do."""
_SHALLOW_DISK = 0.5
"""At most, where the disk is busy with few requests at once."""
_OFF_THE_DISK = common.Gain(0.1, 1.0)
"""State that moves to the host's memory still has to be copied."""
_NOT_COPIED = common.Gain(0.4, 1.2)
"""Copies within the host also take bandwidth from the rest of the step."""


# ---- disk -----------------------------------------------------------------------------------------


def _disk_remedy(run: RunSnapshot, rank: RankSnapshot, transfer: TransferRow, waits: float) -> Remedy:
    """The remedy for the limit: of the cgroup, of requests to the disk, or of the disk itself."""
    achieved = _path_rate(run, transfer.path)
    limit = rank.path_peak(transfer.path)[0]
    disk = rank.machine.disk
    if limit and achieved >= _USED_UP * limit:
        return _fewer_bytes(run, rank, f"the cgroup allows no more than {human_rate(limit)}", waits)
    if disk is None or not disk.busy_bytes_per_second:
        return _more_requests(
            rank,
            "the disk gets too few requests at once, or can do no more",
            common.Gain(0.0, _UNKNOWN_DISK),
            waits,
        )
    used = achieved / disk.busy_bytes_per_second
    if used < _USED_UP:
        cause = f"{disk.device or 'the disk'} is idle for {human_ratio(1 - used)} of that time"
        return _more_requests(rank, cause, _IDLE_DISK, (1 - used) * waits)
    at_once = f"{disk.requests_at_once or 0.0:.1f} requests at once"
    if (disk.requests_at_once or 0.0) < _SHALLOW:
        cause = f"the disk is busy, and has only {at_once}"
        return _more_requests(rank, cause, common.Gain(0.0, _SHALLOW_DISK), waits)
    return _fewer_bytes(run, rank, f"the disk is busy all of that time, with {at_once}", waits)


_AIO: tuple[tuple[str, str, str], ...] = (
    ("aio.block_size", "1048576", "8388608"), ("aio.queue_depth", "8", "32"),
    ("aio.intra_op_parallelism", "1", "8"), ("aio.single_submit", "false", "false"),
    ("aio.overlap_events", "true", "true"),
)  # fmt: skip
"""Name, DeepSpeed's default, and a value that gives the disk more requests at once."""


def _more_requests(rank: RankSnapshot, cause: str, gain: common.Gain, waits: float) -> Remedy:
    """Settings that give the disk more requests at once; *gain*: shares of the time *waits*."""
    old, new = common.raised_settings(rank, _AIO)
    diff = f'- "aio": {{{old}}}\n+ "aio": {{{new}}}' + _pipeline_lines(rank)
    diff = diff if new else '+ "aio": {...}  # as ds_nvme_tune measures it on this disk'
    return common.fill_remedy("more_requests", gain.seconds(waits), cause=cause, diff=diff)


def _pipeline_lines(rank: RankSnapshot) -> str:
    """Lines that let the optimizer's next and last sub-groups move while one is updated."""
    if setting_of(rank, "offload_optimizer.device") != "nvme":
        return ""
    disabled = [
        n for n in ("read", "write") if setting_of(rank, f"offload_optimizer.pipeline_{n}") == "false"
    ]
    return "".join(f'\n- "pipeline_{n}": false\n+ "pipeline_{n}": true' for n in disabled)


_PARTS = (
    ("offload_param", ("sharded_param",)),
    ("offload_optimizer", ("optimizer_state", "master_param", "sharded_grad")),
)


def _fewer_bytes(run: RunSnapshot, rank: RankSnapshot, cause: str, waits: float) -> Remedy:
    """Keeps what fits in the host's memory off the disk, parameters first: they move most often."""
    headroom = rank.memory.host.headroom_bytes if rank.memory.host is not None else -1
    headroom = -1 if is_running_out(run.ranks, Pool.HOST) else headroom
    for key, roles in _PARTS:
        disk_bytes = sum(
            row.disk_bytes for r in run.ranks for row in r.memory.roles if row.role in roles
        )
        if 0 < 1.2 * disk_bytes < headroom:
            return common.fill_remedy(
                "off_the_disk", _OFF_THE_DISK.seconds(waits), cause=cause, key=key,
                size=human_bytes(disk_bytes), headroom=human_bytes(headroom),
            )  # fmt: skip
    return _less_often(rank, cause)


def _less_often(rank: RankSnapshot, cause: str) -> Remedy:
    """Accumulates more micro-steps: the optimizer's bytes move once a step, whatever its batch."""
    micro = as_number(setting_of(rank, "gradient_accumulation_steps")) or 1
    steps, doubled = f"{micro:.0f}", f"{2 * micro:.0f}"
    return common.fill_remedy("accumulate_more", cause=cause, steps=steps, doubled=doubled)


# ---- host -----------------------------------------------------------------------------------------


@rule("ZM106", once=True)
def no_effect(run: RunSnapshot) -> Iterable[Match]:
    """A path of NVMe is set, and the state goes to the host's memory. Reported once."""
    for rank in run.ranks:
        for key in ("offload_optimizer", "offload_param"):
            path = setting_of(rank, f"{key}.nvme_path")
            # accelerate fills in "none" where no path is given, which names no folder
            if setting_of(rank, f"{key}.device") != "cpu" or path in ("", "null", "None", "none"):
                continue
            size = sum(row.host_bytes for row in rank.memory.roles if row.role in dict(_PARTS)[key])
            frees = f"frees {human_bytes(size)} of host memory"
            yield Match(
                f"{key} keeps {human_bytes(size)} in the host's memory; its nvme_path {path} has no "
                "effect",
                rank.rank,
                common.fill_remedy(
                    "use_the_path", key=key, effect=frees if size else "uses the disk, as nvme_path asks"
                ),
            )


@rule("ZM502", once=True)
def pinned_memory_off(run: RunSnapshot) -> Iterable[Match]:
    """A device exchanges offloaded state with memory that is not page-locked. Reported once."""
    for rank in run.ranks:
        keys = [
            key
            for key in ("offload_optimizer", "offload_param")
            if setting_of(rank, f"{key}.pin_memory") == "false"
            and setting_of(rank, f"{key}.device") in ("cpu", "nvme")
        ]
        moved = _most_between_host_and_device(rank)
        if rank.device == "cpu" or not keys or not moved or rank.steps.watched_steps < SETTLED_STEPS:
            continue
        rate, link = rank.path_peak("host_to_device")
        pageable = sum(row.host_bytes - row.pinned_bytes for row in rank.memory.roles)
        note = f"; {link.removesuffix(' can do')} takes {human_rate(rate)}" if rate else ""
        evidence = f"{human_bytes(moved)} per step go one way to or from pageable memory{note}"
        remedy = common.fill_remedy(
            "pin_memory",
            diff="\n".join(f'  "{key}":\n- "pin_memory": false\n+ "pin_memory": true' for key in keys),
            size=f"{human_bytes(pageable)} of " if pageable > 0 else "",
        )
        yield Match(evidence, rank.rank, remedy)


# ---- memory of the host ----------------------------------------------------------------------------

_ROOMY = 0.95
"""The share of the host's memory for model states; programs and activations come on top."""


@rule("ZM210", severity=Severity.WARNING)
def host_memory_short(run: RunSnapshot) -> Iterable[Match]:
    """Model states for the host will not fit there. Reported before the optimizers make their state.

    The bytes are those of the arithmetic of ZeRO, summed over the ranks of this node.
    """
    if any(rank.steps.watched_steps >= 2 for rank in run.ranks):
        return  # the state exists, and the forecast watches its growth
    needs = {rank.rank: _host_bytes_needed(rank) for rank in run.ranks}
    capacity = _host_room_bytes(run)
    if capacity < 0 or sum(needs.values()) <= _ROOMY * capacity:
        return
    neediest = max(run.ranks, key=lambda rank: needs[rank.rank])
    ranks = f"{len(run.ranks)} rank{'s' * (len(run.ranks) > 1)}"
    limit = next(
        (r.memory.host.cgroup for r in run.ranks if r.memory.host and r.memory.host.limit_bytes > 0), ""
    )
    yield Match(
        f"model states of {ranks} take {human_bytes(sum(needs.values()))}; this host "
        f"has {human_bytes(capacity)} for them" + (f" (cgroup {limit})" if limit else ""),
        remedy=_off_the_host(neediest),
        severity=Severity.CRITICAL if sum(needs.values()) > capacity else None,
    )


def _host_bytes_needed(rank: RankSnapshot) -> int:
    models = [*rank.config.models, *([rank.config.planned] if rank.config.planned else [])]
    return host_model_bytes(models, on_cpu=rank.device == "cpu")


def _host_room_bytes(run: RunSnapshot) -> int:
    """Bytes that the ranks may hold together; -1 where unknown.

    Dead ranks hold nothing: the limit counts, or without one what their end has set free.
    """
    alive_ranks = [rank for rank in run.ranks if rank.status.alive]
    if alive_ranks:
        return host_capacity_bytes(alive_ranks)
    hosts = [rank.memory.host for rank in run.ranks if rank.memory.host is not None]
    return min((h.limit_bytes if h.limit_bytes > 0 else h.headroom_bytes for h in hosts), default=-1)


def _off_the_host(rank: RankSnapshot) -> Remedy | None:
    """Moves state to the disk or the device, or divides it among ranks; None where nothing is left."""
    model = rank.config.planned or (rank.config.models[0] if rank.config.models else ModelMetadata())
    stage, offloads = model.get("stage"), model.get("optimizer_on") == "host"
    strategy = rank.sharding_strategy
    # Before the engine exists a rank has no strategy: its planned model has the stage
    if model.get("framework") == "deepspeed" and stage is not None:
        strategy = deepspeed_strategy(stage)
    if strategy.is_deepspeed and (strategy.stage == 3 or offloads):
        diff = '- "offload_optimizer": {"device": "cpu"}\n' if offloads else ""
        diff += '+ "stage": 3, "offload_optimizer": {"device": "nvme", "nvme_path": "/local_nvme"}'
        leaves = "optimizer state and fp32 parameters"
        if strategy.stage == 3 and model.get("optimizer_on") == "nvme":
            if model.get("params_on") != "host":
                return None
            diff = '- "offload_param": {"device": "cpu"}\n'
            diff += '+ "offload_param": {"device": "nvme", "nvme_path": "/local_nvme"}'
            leaves = "parameters"
        return common.fill_remedy("to_the_disk", diff=diff, what=leaves)
    if offloads:
        is_fsdp1 = strategy.framework is Framework.FSDP1
        return common.fill_remedy("to_the_device_fsdp1" if is_fsdp1 else "to_the_device_fsdp2")
    step = common.next_stage(strategy)
    if step is None or rank.world_size < 2:
        return None
    blanks = {"form": step.form, "diff": step.diff, "ranks": rank.world_size, "price": step.cost}
    return common.fill_remedy("divide_host_state", **blanks)


# ---- the optimizer on the host ----------------------------------------------------------------------

_OPTIMIZER_ROLES = ("optimizer_state", "master_param")
_HOST_OPTIMIZER = Level(0.20, 0.40)
"""The optimizer on the host as a share of a step."""
_UPDATES = "the CPU updates the offloaded optimizer state"
_MOVED = 0.3
"""The part of the state that ``"ratio": 0.7`` leaves on the device."""
_PART_ON_DEVICE = common.Gain(0.15, 0.35)
"""Shares of the optimizer's time with that part on the device. An estimate, not measured."""
_ALL_ON_DEVICE = common.Gain(0.7, 1.0)
"""Shares with all of it there. An estimate, not measured: a device updates in a few milliseconds."""
_MARGIN = 1.2
"""How many times the state must fit into the headroom of the device."""


@rule("ZM501")
def cpu_optimizer_slow(run: RunSnapshot) -> Iterable[Match]:
    """The optimizer on the host takes a large share of the step, and the device has no room for it."""
    rank, (seconds, share), state_bytes = _host_optimizer(run)
    if rank is None or _fits_on_device(run, rank, state_bytes):
        return
    # "ratio" needs stage 3: DeepSpeed refuses to offload a part of the optimizer below it
    yield Match(
        f"the optimizer on the host takes {human_seconds(seconds)} per step ({human_ratio(share)})",
        rank.rank,
        _off_the_cpu("part_on_device", _PART_ON_DEVICE, seconds, _MOVED * state_bytes)
        if rank.sharding_strategy.stage == 3
        else _less_often(rank, _UPDATES),
        waits=Waits(share, _HOST_OPTIMIZER, rank.rank),
    )


@rule("ZM505", severity=Severity.WARNING)
def offload_without_need(run: RunSnapshot) -> Iterable[Match]:
    """The optimizer on the host takes a large share of the step, and fits on the device."""
    rank, (seconds, share), state_bytes = _host_optimizer(run)
    if rank is None or not _fits_on_device(run, rank, state_bytes):
        return
    evidence = (
        f"the optimizer on the host takes {human_seconds(seconds)} per step ({human_ratio(share)})"
        f"; the device has room for its {human_bytes(state_bytes)}"
    )
    remedy = _off_the_cpu("optimizer_on_device", _ALL_ON_DEVICE, seconds, state_bytes)
    yield Match(evidence, rank.rank, remedy)


def _host_optimizer(run: RunSnapshot) -> tuple[RankSnapshot | None, common.PhaseTime, int]:
    """The worst rank, the time of its optimizer on the host, and the bytes of its state there.

    The rank is None where that takes a small share of the step.
    """
    rank = worst_rank(run)
    if rank is None:
        return None, common.PhaseTime(0.0, 0.0), 0
    took = common.phase_time(rank, Phase.CPU_OPTIMIZER)
    nbytes = sum(row.host_bytes for row in rank.memory.roles if row.role in _OPTIMIZER_ROLES)
    return (rank if took.share >= _HOST_OPTIMIZER.warning else None, took, nbytes)


def _fits_on_device(run: RunSnapshot, rank: RankSnapshot, state_bytes: int) -> bool:
    return rank.memory.device is not None and common.room_bytes(run, rank) > _MARGIN * state_bytes > 0


def _off_the_cpu(name: str, gain: common.Gain, seconds: float, nbytes: float) -> Remedy:
    return common.fill_remedy(name, gain.seconds(seconds), size=human_bytes(nbytes))
