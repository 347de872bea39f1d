"""What offloaded state costs on its way, and what would cost less. Pure; see :mod:`zeromon.remedies`.

What a way achieves is held against what there is to know of what it could: the PCIe link's own rate; for
a disk, which names none, what it moved in the time in which it had requests, how many it had at once,
and what its cgroup allows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from zeromon.expected import host_bytes
from zeromon.forecast import host_capacity
from zeromon.remedies import NEXT_STAGE, as_number, setting, share_of_step
from zeromon.snapshot import Disk, Finding, RankSnapshot, Remedy, RunSnapshot, TransferRow
from zeromon.units import human_bytes, human_rate, human_ratio, human_seconds

_LAST_STEPS = 50
_LEAST_STEPS = 10
_WARM_UP = 3
_USED_UP = 0.7
"""From this share of a rate on it is that rate that holds a transfer back."""
_SHALLOW = 4
"""Requests at once that a disk with many channels could take more of."""


def peak(rank: RankSnapshot, path: str) -> tuple[float | None, str]:
    """Bytes/s that a way could do at most, and what says so; None where nothing does."""
    if path.startswith("disk"):
        return _limit(rank.disk, path), "its cgroup allows"
    if rank.links is None:
        return None, ""
    return rank.links.host_bytes_per_second, f"{rank.links.host_kind} can do"


def _limit(disk: Disk | None, path: str) -> float | None:
    if disk is None:
        return None
    reads = path == "disk_read"
    return disk.read_limit_bytes_per_second if reads else disk.write_limit_bytes_per_second


def waited_share(rank: RankSnapshot) -> float:
    """The share of the last steps in which the training thread stood still for offloaded state."""
    last = [step for step in rank.recent[-_LAST_STEPS:] if step.step > _WARM_UP]
    spent = sum(step.end_ns - step.start_ns for step in last)
    return sum(step.offload_blocked_ns for step in last) / spent if spent else 0.0


def offload_waits(run: RunSnapshot) -> Iterable[Finding]:
    """Steps stand still while offloaded state moves. Said for the worst rank."""
    ready = [rank for rank in run.ranks if rank.steps >= _LEAST_STEPS and rank.transfers]
    rank = max(ready, key=waited_share, default=None)
    if rank is None:
        return
    share = waited_share(rank)
    if share < 0.10:
        yield from _bound_by_link(rank)
        return
    way = max(rank.transfers, key=lambda row: row.blocked_seconds)
    waits = share * (rank.step_seconds or 0.0)
    yield Finding(
        rule="offload_waits",
        code="ZM503",
        severity="warning" if share >= 0.25 else "info",
        rank=rank.rank,
        text=f"{human_ratio(share)} of a step waits for offloaded state to move; most for "
        f"{way.path}, at {human_rate(way.bytes_per_second)}{_measured_by(run, rank, way)}",
        remedy=_of_disk(run, rank, way, waits)
        if way.path.startswith("disk")
        else _within_host(waits),
    )


def _bound_by_link(rank: RankSnapshot) -> Iterable[Finding]:
    """On a device copies run beside the training thread: what is known is what they need at least."""
    rate, says = peak(rank, "host_to_device")
    most = _most_between_host_and_device(rank)
    if rank.device == "cpu" or not rate:
        return
    share = share_of_step(rank, most / rate)
    if share < 0.25:
        return
    yield Finding(
        rule="offload_waits",
        code="ZM503",
        severity="info",
        rank=rank.rank,
        text=f"{human_bytes(most)} a step go one way between device and host: at what {says} that takes "
        f"{human_seconds(most / rate)} at least, {human_ratio(share)} of a step",
        remedy=_less_often(rank, "so many bytes need that long on this link"),
    )


def _most_between_host_and_device(rank: RankSnapshot) -> float:
    """Bytes a step, in the direction that has more: a link carries both at once."""
    return max((row.step_bytes for row in rank.transfers if "host" in row.path), default=0.0)


def _measured_by(run: RunSnapshot, rank: RankSnapshot, way: TransferRow) -> str:
    """How that is beside what it could be, in words."""
    rate, says = peak(rank, way.path)
    text = ""
    if rate:
        text = f", {human_ratio(_together(run, way.path) / rate)} of the {human_rate(rate)} that {says}"
    disk = rank.disk
    if way.path.startswith("disk") and disk is not None and disk.busy_bytes_per_second:
        name = disk.device or "the disk"
        text += (
            f"; {name} moves {human_rate(disk.busy_bytes_per_second)} while it is busy, with "
            f"{disk.requests_at_once or 0.0:.1f} requests at once"
        )
    return text


def _together(run: RunSnapshot, path: str) -> float:
    """What the ranks of this node do along *path* if all of them do it at once; a device has its own."""
    rates = [t.bytes_per_second or 0.0 for r in run.ranks for t in r.transfers if t.path == path]
    return sum(rates) if path.startswith("disk") else max(rates, default=0.0)


# ---- disk -----------------------------------------------------------------------------------------


def _of_disk(run: RunSnapshot, rank: RankSnapshot, way: TransferRow, waits: float) -> Remedy:
    """Whose limit it is: the cgroup's, that of what asks the disk, or the disk's own."""
    achieved, limit, disk = _together(run, way.path), _limit(rank.disk, way.path), rank.disk
    if limit and achieved >= _USED_UP * limit:
        return _fewer_bytes(run, rank, f"the cgroup allows no more than {human_rate(limit)}", waits)
    if disk is None or not disk.busy_bytes_per_second:
        return _asked_for_more(
            rank, "the disk is not asked for enough at once, or gives no more", 0.7 * waits
        )
    used = achieved / disk.busy_bytes_per_second
    if used < _USED_UP:
        cause = f"for {human_ratio(1 - used)} of that time {disk.device or 'the disk'} has nothing to do"
        return _asked_for_more(rank, cause, (1 - used) * waits, 0.2 * (1 - used) * waits)
    at_once = f"{disk.requests_at_once or 0.0:.1f} requests at once"
    if (disk.requests_at_once or 0.0) < _SHALLOW:
        cause = f"the disk is busy, and has only {at_once}"
        return _asked_for_more(rank, cause, 0.5 * waits)
    return _fewer_bytes(run, rank, f"the disk is busy all of that time, with {at_once}", waits)


_AIO: tuple[tuple[str, str, str], ...] = (
    ("block_size", "1048576", "8388608"), ("queue_depth", "8", "32"),
    ("intra_op_parallelism", "1", "8"), ("single_submit", "false", "false"),
    ("overlap_events", "true", "true"),
)  # fmt: skip
"""Name, DeepSpeed's default, and what asks a disk for more."""


def _asked_for_more(rank: RankSnapshot, cause: str, high: float, low: float = 0.0) -> Remedy:
    old, new = [], []
    for name, usual, better in _AIO:
        now = setting(rank, f"aio.{name}") or usual
        if now == better or (as_number(now) or 0.0) >= (as_number(better) or 1.0):
            continue
        old.append(f'"{name}": {now}')
        new.append(f'"{name}": {better}')
    diff = f'- "aio": {{{", ".join(old)}}}\n+ "aio": {{{", ".join(new)}}}'
    return Remedy(
        cause=cause,
        dialect="DeepSpeed JSON",
        diff=diff if new else '+ "aio": {...}  # as ds_nvme_tune measures it on this disk',
        gain_low_seconds=low,
        gain_high_seconds=high,
        effect="ds_nvme_tune finds the best of this machine's disk",
        price="threads of the CPU, and pinned memory for what is under way",
    )


_PARTS = (
    ("offload_param", ("sharded_param",)),
    ("offload_optimizer", ("optimizer_state", "master_param", "sharded_grad")),
)


def _fewer_bytes(run: RunSnapshot, rank: RankSnapshot, cause: str, waits: float) -> Remedy:
    """What fits into the host's memory need not go to the disk; the parameters go there most often."""
    room = rank.host.headroom_bytes if rank.host is not None else -1
    for part, roles in _PARTS:
        held = sum(row.disk_bytes for r in run.ranks for row in r.roles if row.role in roles)
        if 0 < 1.2 * held < room:
            return Remedy(
                cause=cause,
                dialect="DeepSpeed JSON",
                diff=f'- "{part}": {{"device": "nvme"}}\n+ "{part}": {{"device": "cpu"}}',
                gain_low_seconds=0.1 * waits,
                gain_high_seconds=waits,
                price=f"{human_bytes(held)} of the {human_bytes(room)} that the host has left",
            )
    return _less_often(rank, cause)


def _less_often(rank: RankSnapshot, cause: str) -> Remedy:
    """The optimizer's bytes move once a step, however many samples that has."""
    micro = as_number(setting(rank, "gradient_accumulation_steps")) or 1
    return Remedy(
        cause=cause,
        dialect="DeepSpeed JSON",
        diff=f'- "gradient_accumulation_steps": {micro:.0f}\n'
        f'+ "gradient_accumulation_steps": {2 * micro:.0f}',
        effect="what moves for the optimizer is moved for twice as many samples",
        price="a batch twice as large: the learning rate belongs to it",
    )


# ---- host -----------------------------------------------------------------------------------------


def _within_host(waits: float) -> Remedy:
    """Only of a rank on the CPU is it known how long it stands still for copies."""
    return Remedy(
        cause="the device is the host: what is offloaded is copied within its memory",
        dialect="DeepSpeed JSON",
        diff='- "offload_optimizer": {"device": "cpu"}\n- "offload_param": {"device": "cpu"}',
        gain_low_seconds=0.4 * waits,
        gain_high_seconds=1.2 * waits,
        price="none",
    )


def pinned_memory_off(run: RunSnapshot) -> Iterable[Finding]:
    """A device exchanges offloaded state with memory that is not page-locked. Said once."""
    for rank in run.ranks:
        parts = [
            part
            for part in ("offload_optimizer", "offload_param")
            if setting(rank, f"{part}.pin_memory") == "false"
            and setting(rank, f"{part}.device") in ("cpu", "nvme")
        ]
        moved = _most_between_host_and_device(rank)
        if rank.device == "cpu" or not parts or not moved or rank.steps < _LEAST_STEPS:
            continue
        rate, says = peak(rank, "host_to_device")
        held = sum(row.host_bytes - row.pinned_bytes for row in rank.roles)
        best = f", which {says.removesuffix(' can do')} takes at {human_rate(rate)}" if rate else ""
        yield Finding(
            rule="pinned_memory_off",
            code="ZM502",
            severity="info",
            rank=rank.rank,
            text=f"{human_bytes(moved)} a step go one way between the device and pageable memory{best}",
            remedy=Remedy(
                cause="the driver copies from pageable memory through a buffer of its own, and the "
                "caller waits for it",
                dialect="DeepSpeed JSON",
                diff="\n".join(
                    f'  "{part}":\n- "pin_memory": false\n+ "pin_memory": true' for part in parts
                ),
                effect="copies run beside computation, at the rate of the link",
                price=f"{human_bytes(max(0, held))} of the host's memory that cannot be swapped out",
            ),
        )
        return


# ---- memory of the host ----------------------------------------------------------------------------

_ROOMY = 0.95
"""Of what the host has; programs and activations come on top of model states."""


def host_memory_short(run: RunSnapshot) -> Iterable[Finding]:
    """Model states that are to be kept on the host will not fit there. Said before they are.

    By the arithmetic of ZeRO, over the ranks of this node, until they have made their optimizers' state.
    """
    if any(rank.steps >= 2 for rank in run.ranks):
        return  # what has been made is there, and its growth is the forecast's
    needs = {rank.rank: _host_needs(rank) for rank in run.ranks}
    room = _host_room(run)
    if room < 0 or sum(needs.values()) <= _ROOMY * room:
        return
    most = max(run.ranks, key=lambda rank: needs[rank.rank])
    ranks = f"{len(run.ranks)} rank{'s' * (len(run.ranks) > 1)}"
    limit = next((r.host.cgroup for r in run.ranks if r.host and r.host.limit_bytes > 0), "")
    yield Finding(
        rule="host_memory_short",
        code="ZM210",
        severity="critical" if sum(needs.values()) > room else "warning",
        text=f"model states of {ranks} take {human_bytes(sum(needs.values()))} of this host, and it "
        f"has {human_bytes(room)} for them" + (f" (cgroup {limit})" if limit else ""),
        remedy=_off_the_host(most),
    )


def _host_needs(rank: RankSnapshot) -> int:
    models = [*rank.models, *([rank.planned] if rank.planned else [])]
    return host_bytes(models, on_cpu=rank.device == "cpu")


def _host_room(run: RunSnapshot) -> int:
    """What the ranks may hold together; of dead ones the limit tells, or what their end has set free."""
    living = [rank for rank in run.ranks if rank.alive]
    if living:
        return host_capacity(living)
    hosts = [rank.host for rank in run.ranks if rank.host is not None]
    return min(
        (h.limit_bytes if h.limit_bytes > 0 else h.headroom_bytes for h in hosts), default=-1
    )


def _off_the_host(rank: RankSnapshot) -> Remedy | None:
    """To the disk, to the device, or divided among the ranks; None where there is nothing left to do."""
    cause = "the sizes of the model, of its optimizer, and what the strategy keeps on the host"
    facts = rank.planned or next(iter(rank.models), {})
    stage, offloads = facts.get("stage"), facts.get("optimizer_on") == "host"
    strategy = f"deepspeed-zero{stage}" if facts.get("framework") == "deepspeed" else rank.strategy
    if strategy == "deepspeed-zero3" or (offloads and strategy.startswith("deepspeed")):
        return Remedy(
            cause=cause,
            dialect="DeepSpeed JSON",
            diff=('- "offload_optimizer": {"device": "cpu"}\n' if offloads else "")
            + '+ "stage": 3, "offload_optimizer": {"device": "nvme", "nvme_path": "/local_nvme"}',
            effect="optimizer state and fp32 parameters leave the host",
            price="the disk's speed in every step; more nodes divide them, too",
        )
    if offloads:
        return Remedy(
            cause=cause,
            dialect="Python (FSDP2)",
            diff="- fully_shard(model, offload_policy=CPUOffloadPolicy())\n+ fully_shard(model)",
            effect="shards, gradients and optimizer state leave the host",
            price="as much of the devices; more of them divide it",
        )
    if strategy not in NEXT_STAGE or rank.world_size < 2:
        return None
    _, dialect, diff, price = NEXT_STAGE[strategy]
    return Remedy(
        cause=cause,
        dialect=dialect,
        diff=diff,
        effect=f"each of {rank.world_size} ranks keeps a part of what all of them keep now",
        price=price,
    )


RULES: tuple[Callable[[RunSnapshot], Iterable[Finding]], ...] = (
    host_memory_short,
    offload_waits,
    pinned_memory_off,
)
