"""What to change: rules whose findings carry a cause, a diff, what it will gain, and its price. Pure.

A rule is a function from a run to findings, and one line in :data:`RULES`. Gains are predicted from this
run's own figures, as an interval: what could be hidden or left out, and how much of it is likely. They
are tested against what applying the diff achieved (``tests/bench/bench_advice.py``).
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Sequence

from zeromon.events import Phase
from zeromon.expected import rests
from zeromon.skew import own_seconds
from zeromon.snapshot import (
    Finding,
    RankSnapshot,
    Remedy,
    RunSnapshot,
    StepSummary,
    TrafficRow,
)
from zeromon.traffic import TINY_BYTES, tiny
from zeromon.units import human_bytes, human_count, human_ratio, human_seconds

LEAST_STEPS = 20
LEAST_SHARE = 0.05
_WINDOW = 20
_MIB = 1 << 20
_TORCH_BUCKET_BYTES = 25 * _MIB
_LEAST_BUCKET_BYTES = 1 * _MIB
_BUCKETS_WANTED = 8
_MANY_TINY = 16
_FSDP = ("fsdp2", "fsdp2-zero2", "fsdp1")


# ---- what rules have in common ---------------------------------------------------------------------


def worst(run: RunSnapshot) -> RankSnapshot | None:
    """The settled rank that waits most for its communication, or takes longest where none does."""
    ready = [r for r in run.ranks if r.steps >= LEAST_STEPS and r.step_seconds]
    return max(ready, key=lambda r: (r.exposed_seconds or 0.0, r.step_seconds or 0.0), default=None)


def rows(rank: RankSnapshot, op: str, phase: str = "") -> list[TrafficRow]:
    """Rows of one operation that belong to a unit or bucket."""
    return [row for row in rank.traffic if row.op == op and row.unit and phase in ("", row.phase)]


def exposed(found: Iterable[TrafficRow]) -> float:
    """Seconds a step."""
    return sum(row.exposed_seconds for row in found)


def share_of_step(rank: RankSnapshot, seconds: float) -> float:
    """*seconds* as a share of a step."""
    return seconds / rank.step_seconds if rank.step_seconds else 0.0


def timed(rank: RankSnapshot) -> list[StepSummary]:
    """The last steps whose communication was timed."""
    return [step for step in rank.recent[-_WINDOW:] if not step.idle]


def severity(share: float) -> str:
    """By what a finding costs, as a share of a step."""
    return "warning" if share >= 0.15 else "info"


def whole_bytes(rank: RankSnapshot) -> int:
    """Bytes of all gathered parameters of a rank's models, 0 where it told none."""
    return sum(
        int(facts.get("numel", 0)) * int(facts.get("compute_bytes", 4)) for facts in rank.models
    )


def room_bytes(run: RunSnapshot, rank: RankSnapshot) -> int:
    """What the rank may still take: of its device, or its part of what its host has left."""
    if rank.memory is not None:
        return rank.memory.headroom_bytes
    if rank.host is None or rank.host.headroom_bytes < 0:
        return -1
    return rank.host.headroom_bytes // max(1, len(run.ranks))


# ---- FSDP -----------------------------------------------------------------------------------------


def fsdp_prefetch_off(run: RunSnapshot) -> Iterable[Finding]:
    """Units gather their parameters only when they need them, and stand still for it."""
    rank = worst(run)
    if rank is None or rank.strategy not in _FSDP:
        return
    hideable, late = 0.0, 0.0
    for phase in ("forward", "backward"):
        gathers = rows(rank, "all_gather", phase)
        on_need = [row for row in gathers if row.exposed_seconds >= 0.8 * row.seconds > 0]
        if len(on_need) < 2:
            continue
        late += exposed(on_need)
        # the first unit of a phase has nothing before it to hide behind
        behind = exposed(on_need) * (1 - 1 / len(on_need))
        hideable += min(behind, own_seconds(rank.recent).get(phase, 0.0))
    share = share_of_step(rank, late)
    if share < LEAST_SHARE or hideable <= 0:
        return
    largest = max((row.nbytes for row in rows(rank, "all_gather")), default=0)
    dialect, diff = _prefetch_diff(rank)
    yield Finding(
        rule="fsdp_prefetch_off",
        code="ZM305",
        severity=severity(share),
        rank=rank.rank,
        text=f"units gather their parameters when they need them: {human_seconds(late)} a step "
        f"({human_ratio(share)}) from call to end",
        remedy=Remedy(
            cause="no unit's all-gather is under way while another unit computes",
            dialect=dialect,
            diff=diff,
            gain_low_seconds=0.4 * hideable,
            gain_high_seconds=hideable,
            price=f"one more unit is gathered at once ({human_bytes(largest)})",
        ),
    )


def _prefetch_diff(rank: RankSnapshot) -> tuple[str, str]:
    if rank.strategy == "fsdp1":
        return "Python (FSDP1)", (
            "- FullyShardedDataParallel(model)\n"
            "+ FullyShardedDataParallel(model, forward_prefetch=True,\n"
            "+                          backward_prefetch=BackwardPrefetch.BACKWARD_PRE)"
        )
    lines = [
        "+ for this, following in itertools.pairwise(model.layers):",
        "+     this.set_modules_to_forward_prefetch([following])",
        "+     following.set_modules_to_backward_prefetch([this])",
    ]
    if rank.device == "cpu":
        lines.insert(0, "+ model._set_unshard_async_op(True)  # gloo has no stream to run ahead on")
    return "Python (FSDP2)", "\n".join(lines)


def reshard_without_need(run: RunSnapshot) -> Iterable[Finding]:
    """Parameters are gathered again in backward, and there would be room to keep them."""
    rank = worst(run)
    if rank is None or rank.strategy != "fsdp2":
        return
    again = rows(rank, "all_gather", "backward")
    share, held = share_of_step(rank, exposed(again)), whole_bytes(rank)
    if share < LEAST_SHARE or not held or room_bytes(run, rank) < 2 * held:
        return
    yield Finding(
        rule="reshard_without_need",
        code="ZM306",
        severity=severity(share),
        rank=rank.rank,
        text=f"gathering parameters again in backward waits {human_seconds(exposed(again))} a step "
        f"({human_ratio(share)}), and {human_bytes(room_bytes(run, rank))} are free",
        remedy=Remedy(
            cause="reshard_after_forward frees what backward needs soon after",
            dialect="Python (FSDP2)",
            diff="- fully_shard(layer)\n+ fully_shard(layer, reshard_after_forward=False)",
            gain_low_seconds=0.6 * exposed(again),
            gain_high_seconds=1.2 * exposed(again),
            price=f"all parameters stay gathered from forward to backward ({human_bytes(held)})",
        ),
    )


def whole_model_unit(run: RunSnapshot) -> Iterable[Finding]:
    """One unit holds most of the model: it is gathered as a whole."""
    for rank in run.ranks:
        facts = next((f for f in rank.models if str(f.get("framework")) == "fsdp2"), None)
        if facts is None or rank.steps < LEAST_STEPS or rank.unsharded_peak_bytes <= 0:
            continue
        numel, each = int(facts.get("numel", 0)), int(facts.get("compute_bytes", 4))
        count, largest = (int(n) for n in facts.get("blocks", (0, 0)))
        biggest = _largest_unit(facts)
        if count < 4 or biggest < 0.6 * numel or largest <= 0:
            continue
        # two blocks at once, and what is outside of them
        peak = (numel - count * largest + 2 * largest) * each
        frees = rank.unsharded_peak_bytes - peak
        if frees < 0.3 * rank.unsharded_peak_bytes:
            continue
        yield Finding(
            rule="whole_model_unit",
            code="ZM206",
            severity="warning",
            rank=rank.rank,
            text=f"one unit of {human_bytes(biggest * each)} is gathered as a whole; the model has "
            f"{human_count(count)} layers of {human_bytes(largest * each)}",
            remedy=Remedy(
                cause="only the root is wrapped: nothing is freed before the whole has computed",
                dialect="Python (FSDP2)",
                diff="+ for layer in model.layers:\n+     fully_shard(layer)\n  fully_shard(model)",
                frees_bytes=frees,
                price=f"{human_count(count)} all-gathers where there was one",
            ),
        )
        return


def _largest_unit(facts: dict[str, object]) -> int:
    units = facts.get("units")
    sizes = [int(n) for n in units] if isinstance(units, list) else []
    kept = facts.get("kept_numel", 0)
    return max([*sizes, int(kept) if isinstance(kept, int) else 0])


# ---- DDP and accumulation ---------------------------------------------------------------------------


def ddp_bucket_large(run: RunSnapshot) -> Iterable[Finding]:
    """Gradients are sent in so few buckets that hardly any of it runs during backward."""
    rank = worst(run)
    if rank is None or rank.strategy != "ddp":
        return
    buckets = rows(rank, "all_reduce", "backward")
    waits, lasts = exposed(buckets), sum(row.seconds for row in buckets)
    total = sum(row.nbytes / max(row.calls, 1.0) for row in buckets)
    wanted = min(_BUCKETS_WANTED, int(total // _LEAST_BUCKET_BYTES))
    share = share_of_step(rank, waits)
    if share < LEAST_SHARE or not 0 < len(buckets) <= 2 or wanted < 3 or waits < 0.5 * lasts:
        return
    cap = total / wanted / _MIB
    hideable = min(waits * (1 - 1 / wanted), own_seconds(rank.recent).get("backward", 0.0))
    yield Finding(
        rule="ddp_bucket_large",
        code="ZM315",
        severity=severity(share),
        rank=rank.rank,
        text=f"{human_bytes(total)} of gradients go in {len(buckets)} "
        f"bucket{'s' if len(buckets) > 1 else ''}: {human_seconds(waits)} a step "
        f"({human_ratio(share)}) of it when backward is over",
        remedy=Remedy(
            cause="a bucket is sent when its last gradient is there, and here that is the end",
            dialect="Python (DDP)",
            diff=f"- DistributedDataParallel(model)\n"
            f"+ DistributedDataParallel(model, bucket_cap_mb={cap:.2g})",
            gain_low_seconds=0.3 * hideable,
            gain_high_seconds=hideable,
            price=f"{wanted} all-reduces where there were {len(buckets)}",
        ),
    )


def accumulation_communicates(run: RunSnapshot) -> Iterable[Finding]:
    """Every micro-step reduces its gradients, where the last one of a step would do."""
    rank = worst(run)
    if rank is None or rank.strategy not in ("ddp", "fsdp2", "fsdp2-zero2"):
        return
    micro = round(statistics.median(step.micro_steps for step in rank.recent[-_WINDOW:]))
    op = "all_reduce" if rank.strategy == "ddp" else "reduce_scatter"
    reduces = rows(rank, op, "backward")
    if micro < 2 or not reduces:
        return
    calls = statistics.median(row.calls for row in reduces)
    saved = exposed(reduces) * (micro - 1) / micro
    share = share_of_step(rank, saved)
    if calls < 0.9 * micro or share < LEAST_SHARE:
        return
    is_ddp = rank.strategy == "ddp"
    yield Finding(
        rule="accumulation_communicates",
        code="ZM308",
        severity=severity(share),
        rank=rank.rank,
        text=f"each of {micro} micro-steps reduces its gradients: {human_seconds(exposed(reduces))} a "
        f"step, of which {human_seconds(saved)} ({human_ratio(share)}) need not be",
        remedy=Remedy(
            cause="gradients are only needed when the optimizer steps",
            dialect="Python (DDP)" if is_ddp else "Python (FSDP2)",
            diff=_NO_SYNC_DDP if is_ddp else _NO_SYNC_FSDP2,
            gain_low_seconds=0.6 * saved,
            gain_high_seconds=1.3 * saved,
            price="none"
            if is_ddp
            else f"gradients stay unsharded between micro-steps ({human_bytes(whole_bytes(rank))})",
        ),
    )


_NO_SYNC_DDP = """\
- loss.backward()
+ with model.no_sync() if micro < last else contextlib.nullcontext():
+     model(batch).backward()  # forward and backward"""
_NO_SYNC_FSDP2 = "+ model.set_requires_gradient_sync(micro == last)\n  loss.backward()"


# ---- many small ones --------------------------------------------------------------------------------


def tiny_collectives(run: RunSnapshot) -> Iterable[Finding]:
    """Communication is many small pieces, whose latency is what is waited for."""
    rank = worst(run)
    if rank is None or not rank.exposed_ratio:
        return
    calls, nbytes, seconds, many = tiny(rank.traffic)
    waits = seconds * rank.exposed_ratio
    dear = many >= _MANY_TINY and seconds >= 0.5 and nbytes <= 0.75 * seconds and waits >= 0.03
    # where all are small, bytes do not tell: then their number does
    only = many >= 2 * _MANY_TINY and calls >= 0.9 and waits >= 0.10
    if not dear and not only:
        return
    small = [r for r in rank.traffic if r.calls > 0 and r.nbytes / r.calls <= TINY_BYTES]
    yield Finding(
        rule="tiny_collectives",
        code="ZM312",
        severity="warning" if waits >= 0.10 else "info",
        rank=rank.rank,
        text=f"{human_count(many)} collectives a step ({human_ratio(calls)}) move "
        f"{human_bytes(TINY_BYTES)} or less: {human_ratio(nbytes)} of the bytes, "
        f"{human_ratio(seconds)} of the time",
        remedy=_fewer(rank, small),
    )


def _fewer(rank: RankSnapshot, small: Sequence[TrafficRow]) -> Remedy:
    """Larger pieces, in the dialect of the strategy; each call less saves what one waits for."""
    moving = [row for row in small if row.op != "barrier" and row.unit]
    calls, waits = sum(row.calls for row in moving), exposed(moving)
    total = sum(row.nbytes for row in moving)
    left = max(1.0, total / _TORCH_BUCKET_BYTES) * len({(r.op, r.phase) for r in moving})
    saved = waits * max(0.0, 1 - left / calls) if calls else 0.0
    dialect, diff, price = _coarser(rank)
    return Remedy(
        cause="each collective costs its latency, however small it is",
        dialect=dialect,
        diff=diff,
        gain_low_seconds=0.5 * saved,
        gain_high_seconds=1.3 * saved,
        price=price,
    )


def _coarser(rank: RankSnapshot) -> tuple[str, str, str]:
    """(dialect, diff, price)"""
    if rank.strategy == "ddp":
        return (
            "Python (DDP)",
            "- DistributedDataParallel(model, bucket_cap_mb=...)\n"
            "+ DistributedDataParallel(model, bucket_cap_mb=25)",
            "a larger bucket is complete later",
        )
    if rank.strategy.startswith("deepspeed") and rank.strategy.endswith("3"):
        return (
            "DeepSpeed JSON",
            '+ "zero_optimization": {"stage3_param_persistence_threshold": 100000}',
            "parameters of up to so many elements stay gathered on every rank",
        )
    if rank.strategy.startswith("deepspeed"):
        return (
            "DeepSpeed JSON",
            '+ "zero_optimization": {"reduce_bucket_size": 5e8, "allgather_bucket_size": 5e8}',
            "buffers of so many elements",
        )
    return (
        "Python (FSDP)",
        "- fully_shard(part)   # each small part\n+ fully_shard(layer)  # what holds them",
        "a larger unit is gathered at once",
    )


# ---- DeepSpeed ------------------------------------------------------------------------------------


def setting(rank: RankSnapshot, name: str) -> str:
    """What took effect of a DeepSpeed setting, by the end of its name; "" where it is not known."""
    return next((s.effective for s in rank.settings if s.name.endswith(name)), "")


def as_number(text: str) -> float | None:
    """A number as a setting shows it; None for anything else."""
    try:
        number = float(text)
    except ValueError:
        return None
    return number if math.isfinite(number) else None


def stage_too_high(run: RunSnapshot) -> Iterable[Finding]:
    """ZeRO-3 gathers parameters that there would be room to keep."""
    rank = worst(run)
    if rank is None or not rank.strategy.startswith("deepspeed-zero3"):
        return
    gathers = [row for row in rank.traffic if row.op == "all_gather"]
    share, held = share_of_step(rank, exposed(gathers)), whole_bytes(rank)
    ranks = max(1, rank.world_size)
    more = held * (ranks - 1) // ranks * 2  # parameters, and gradients until they are reduced
    if share < LEAST_SHARE or not held or room_bytes(run, rank) < 2 * more:
        return
    if "host" in {str(f.get("params_on")) for f in rank.models}:
        return
    # stage 2 gathers each parameter once a step, stage 3 twice
    saved = exposed(gathers) / 2
    yield Finding(
        rule="stage_too_high",
        code="ZM202",
        severity=severity(share),
        rank=rank.rank,
        text=f"gathering parameters waits {human_seconds(exposed(gathers))} a step "
        f"({human_ratio(share)}), and {human_bytes(room_bytes(run, rank))} are free",
        remedy=Remedy(
            cause="stage 3 moves parameters twice a step, stage 2 once: 3 to 2 in all (the paper's "
            "section 7)",
            dialect="DeepSpeed JSON",
            diff='- "stage": 3\n+ "stage": 2',
            gain_low_seconds=0.4 * saved,
            gain_high_seconds=1.4 * saved,
            price=f"{human_bytes(more)} more on each rank",
        ),
    )


def crosses_nodes(run: RunSnapshot) -> Iterable[Finding]:
    """Parameters are gathered over the network, where a copy a node would do."""
    rank = worst(run)
    if rank is None:
        return
    far = [row for row in rank.traffic if row.op == "all_gather" and row.nodes > 1]
    share = share_of_step(rank, exposed(far))
    nodes = max((row.nodes for row in far), default=0)
    if nodes < 2 or share < 2 * LEAST_SHARE:
        return
    deepspeed = rank.strategy.startswith("deepspeed-zero3")
    if not deepspeed and rank.strategy not in _FSDP:
        return
    local = max(1, rank.world_size // nodes)
    held = sum(r.device_bytes or r.host_bytes for r in rank.roles if r.role in _SHARDED)
    more = held * (nodes - 1) if not deepspeed else whole_bytes(rank) // local
    if room_bytes(run, rank) < 2 * more or not more:
        return
    yield Finding(
        rule="zero_plus_plus" if deepspeed else "full_shard_across_nodes",
        code="ZM311" if deepspeed else "ZM307",
        severity=severity(share),
        rank=rank.rank,
        text=f"gathering parameters from {nodes} nodes waits {human_seconds(exposed(far))} a step "
        f"({human_ratio(share)})",
        remedy=Remedy(
            cause="every all-gather crosses the network between the nodes",
            dialect="DeepSpeed JSON" if deepspeed else "Python (FSDP2)",
            diff=f'+ "zero_hpz_partition_size": {local}\n'
            '+ "zero_quantized_weights": true  # needs its CUDA kernels'
            if deepspeed
            else f'+ mesh = init_device_mesh("cuda", ({nodes}, {local}),\n'
            '+                         mesh_dim_names=("replicate", "shard"))\n'
            "- fully_shard(layer)\n+ fully_shard(layer, mesh=mesh)",
            gain_low_seconds=0.3 * exposed(far),
            gain_high_seconds=0.9 * exposed(far),
            price=f"{human_bytes(more)} more on each rank"
            + ("" if deepspeed else ", and an all-reduce of gradients between the nodes"),
        ),
    )


_SHARDED = ("sharded_param", "sharded_grad", "optimizer_state", "master_param")


def overlap_comm_off(run: RunSnapshot) -> Iterable[Finding]:
    """DeepSpeed reduces on the stream that computes."""
    rank = worst(run)
    if rank is None or rank.device == "cpu" or setting(rank, "overlap_comm") != "false":
        return  # on a CPU there is no other stream
    buckets = [r for r in rank.traffic if r.unit.startswith("bucket") and r.phase == "backward"]
    share = share_of_step(rank, exposed(buckets))
    if share < LEAST_SHARE:
        return
    hideable = min(exposed(buckets), own_seconds(rank.recent).get("backward", 0.0))
    yield Finding(
        rule="overlap_comm_off",
        code="ZM302",
        severity=severity(share),
        rank=rank.rank,
        text=f"reducing gradients waits {human_seconds(exposed(buckets))} a step "
        f"({human_ratio(share)}), and overlap_comm is off",
        remedy=Remedy(
            cause="buckets are reduced on the stream on which backward computes",
            dialect="DeepSpeed JSON",
            diff='- "overlap_comm": false\n+ "overlap_comm": true',
            gain_low_seconds=0.3 * hideable,
            gain_high_seconds=hideable,
            price="a second bucket of reduce_bucket_size elements",
        ),
    )


def cpu_optimizer_slow(run: RunSnapshot) -> Iterable[Finding]:
    """The optimizer of offloaded state takes a large share of the step."""
    rank = worst(run)
    if rank is None:
        return
    spent = _phase_seconds(rank, Phase.CPU_OPTIMIZER)
    share = share_of_step(rank, spent)
    if share < 0.20:
        return
    held = sum(row.host_bytes for row in rank.roles if row.role in _OPTIMIZER_ROLES)
    fits = rank.memory is not None and rank.memory.headroom_bytes > 1.2 * held > 0
    yield Finding(
        rule="offload_without_need" if fits else "cpu_optimizer_slow",
        code="ZM505" if fits else "ZM501",
        severity="warning" if share >= 0.4 or fits else "info",
        rank=rank.rank,
        text=f"the optimizer on the host takes {human_seconds(spent)} a step ({human_ratio(share)})"
        + (f", and the device has room for its {human_bytes(held)}" if fits else ""),
        remedy=Remedy(
            cause="optimizer state is offloaded, and updated by the CPU",
            dialect="DeepSpeed JSON",
            diff='- "offload_optimizer": {"device": "cpu"}'
            if fits
            else '+ "offload_optimizer": {"device": "cpu", "ratio": 0.7}  # the rest on the device',
            gain_low_seconds=(0.7 if fits else 0.15) * spent,
            gain_high_seconds=(1.0 if fits else 0.35) * spent,
            price=f"{human_bytes(held if fits else 0.3 * held)} on the device",
        ),
    )


_OPTIMIZER_ROLES = ("optimizer_state", "master_param")


def _phase_seconds(rank: RankSnapshot, phase: Phase) -> float:
    """Mean seconds a step."""
    last = rank.recent[-_WINDOW:]
    known = [s.phase_ns[phase] for s in last if len(s.phase_ns) > phase]
    return statistics.fmean(known) / 1e9 if known else 0.0


# ---- memory ------------------------------------------------------------------------------------


def stage_too_low(run: RunSnapshot) -> Iterable[Finding]:
    """A memory is nearly full with what a higher stage would divide among the ranks. Said once."""
    for rank in run.ranks:
        risk = max(rank.risks, key=lambda r: r.ratio, default=None)
        step = NEXT_STAGE.get(rank.strategy)
        if risk is None or risk.ratio < 0.5 or risk.cause == "growth" or step is None:
            continue
        roles, dialect, diff, price = step
        on_device = risk.pool == "device"
        held = sum(
            row.device_bytes if on_device else row.host_bytes
            for row in rank.roles
            if row.role in roles
        )
        ranks = max(1, rank.world_size)
        frees = held * (ranks - 1) // ranks
        if frees < 0.05 * max(1, risk.capacity_bytes):
            continue
        yield Finding(
            rule="stage_too_low",
            code="ZM203",
            severity="warning",
            rank=rank.rank,
            text=f"{risk.pool} memory is nearly full, and {human_bytes(held)} of it "
            f"({', '.join(role.replace('_', ' ') for role in roles)}) are on every one of {ranks} ranks",
            remedy=Remedy(
                cause=f"{rank.strategy} does not divide them",
                dialect=dialect,
                diff=diff,
                frees_bytes=frees,
                price=price,
            ),
        )
        return


_OPTIMIZER = ("optimizer_state", "master_param")
_NO_MORE = "no more communication than before"
NEXT_STAGE: dict[str, tuple[tuple[str, ...], str, str, str]] = {
    "ddp": (
        (*_OPTIMIZER, "unsharded_grad", "unsharded_param"), "Python (FSDP2)",
        "- DistributedDataParallel(model)\n+ for layer in model.layers:\n+     fully_shard(layer)\n"
        "+ fully_shard(model)", "half as much communication again",
    ),
    "zero1": (
        ("unsharded_grad", "unsharded_param"), "Python (FSDP2)",
        "- ZeroRedundancyOptimizer(...), DistributedDataParallel(model)\n+ fully_shard(model)",
        "half as much communication again",
    ),
    "fsdp2-zero2": (
        ("unsharded_param",), "Python (FSDP2)",
        "- fully_shard(layer, reshard_after_forward=False)\n+ fully_shard(layer)",
        "parameters are gathered a second time, in backward",
    ),
    "deepspeed-zero0": (_OPTIMIZER, "DeepSpeed JSON", '- "stage": 0\n+ "stage": 1', _NO_MORE),
    "deepspeed-zero1": (
        ("unsharded_grad", "reduce_scatter"), "DeepSpeed JSON", '- "stage": 1\n+ "stage": 2', _NO_MORE,
    ),
    "deepspeed-zero2": (
        ("unsharded_param",), "DeepSpeed JSON", '- "stage": 2\n+ "stage": 3',
        "half as much communication again",
    ),
    "deepspeed-zero3": (
        _OPTIMIZER, "DeepSpeed JSON",
        '- "stage3_max_live_parameters": 1e9, "stage3_prefetch_bucket_size": 5e7\n'
        '+ "stage3_max_live_parameters": 2e8, "stage3_prefetch_bucket_size": 1e7\n'
        '+ "offload_optimizer": {"device": "cpu", "pin_memory": true}  # if that is not enough',
        "more waiting for parameters; with offload the optimizer runs on the host",
    ),
}  # fmt: skip
"""Strategy -> roles that the next stage divides (or moves), dialect, diff, price."""


def activations_dominate(run: RunSnapshot) -> Iterable[Finding]:
    """Most of a device that is nearly full is activations. Said once."""
    for rank in run.ranks:
        risk = next((r for r in rank.risks if r.pool == "device"), None)
        held = sum(rest.nbytes for rest in rests(rank) if rest.kind == "activation_temp")
        if risk is None or risk.ratio < 0.5 or held < 0.4 * max(1, risk.capacity_bytes):
            continue
        yield Finding(
            rule="activations_dominate",
            code="ZM204",
            severity="warning",
            rank=rank.rank,
            text=f"activations and temporaries take {human_bytes(held)} of "
            f"{human_bytes(risk.capacity_bytes)} at the peak of a step",
            remedy=Remedy(
                cause="every layer's activations are kept for backward",
                dialect="Python",
                diff="+ for layer in model.layers:\n"
                "+     apply_activation_checkpointing(layer)  # or gradient_checkpointing_enable()",
                frees_bytes=held // 2,
                price="about a third more compute: forward is done twice (Korthikanti et al. 2022)",
            ),
        )
        return


# ---- input, device ---------------------------------------------------------------------------


def data_wait(run: RunSnapshot) -> Iterable[Finding]:
    """Steps wait for their batches. Said for the rank that waits most."""
    ready = [r for r in run.ranks if r.steps >= LEAST_STEPS and r.step_seconds]
    rank = max(ready, key=lambda r: _phase_seconds(r, Phase.DATA_WAIT), default=None)
    if rank is None:
        return
    waits = _phase_seconds(rank, Phase.DATA_WAIT)
    share = share_of_step(rank, waits)
    if share < 0.10:
        return
    workers = int(rank.loader.get("num_workers", 0))
    rest = max(0.0, (rank.step_seconds or 0.0) - waits)
    # with n workers a batch is ready every waits / n, while the step computes
    hideable = min(waits, rest * 4) if not workers else waits / 2
    yield Finding(
        rule="data_wait",
        code="ZM601",
        severity=severity(share),
        rank=rank.rank,
        text=f"{human_seconds(waits)} a step ({human_ratio(share)}) are waiting for the next batch, "
        f"which {workers or 'no'} worker{'' if workers == 1 else 's'} prepare",
        remedy=Remedy(
            cause="batches are made by the training process itself"
            if not workers
            else "the workers do not keep up",
            dialect="Python (DataLoader)",
            diff=f"- DataLoader(data, num_workers={workers})\n"
            f"+ DataLoader(data, num_workers={2 * workers or 4}, persistent_workers=True)",
            gain_low_seconds=(0.5 if not workers else 0.3) * hideable,
            gain_high_seconds=hideable,
            price=f"{2 * workers or 4} processes a rank, and their memory",
        ),
    )


STARVED = 0.15
"""From this share on the lack of CPUs may be all that a rank, or who waits for it, waits for."""


def cpu_starved(run: RunSnapshot) -> Iterable[Finding]:
    """Training could go on, and has no CPU to run on. Said for the rank that lacks most."""
    known = [rank for rank in run.ranks if rank.pressure is not None and rank.steps >= LEAST_STEPS]
    rank = max(known, key=_cpu_wait, default=None)
    if rank is None or rank.pressure is None or _cpu_wait(rank) < STARVED:
        return
    cpus, ranks = rank.pressure.cpus or 0.0, len(run.ranks)
    share, workers = _cpu_wait(rank), int(rank.loader.get("num_workers", 0))
    threads = max(1, int(cpus // ranks))
    fewer = workers * ranks >= max(1.0, cpus)
    yield Finding(
        rule="cpu_starved",
        code="ZM605",
        severity="warning" if share >= 0.25 else "info",
        rank=rank.rank,
        text=f"for {human_ratio(share)} of the last ten seconds it could run and had no CPU"
        + (f"; {ranks} ranks of this node may use {cpus:g}" if cpus else ""),
        remedy=Remedy(
            cause=f"{ranks * (workers + 1)} processes of this run, the threads of each, and whatever "
            "else runs on this host share its CPUs",
            dialect="Python (DataLoader)" if fewer else "environment",
            diff=f"- DataLoader(data, num_workers={workers})\n"
            f"+ DataLoader(data, num_workers={max(1, threads - 1)})"
            if fewer
            else f"+ OMP_NUM_THREADS={threads}",
            gain_low_seconds=0.0,
            gain_high_seconds=share * (rank.step_seconds or 0.0),
            effect="what else takes them is to be seen in top",
            price="less is prepared beside the training"
            if fewer
            else "operators of a rank in sequence",
        ),
    )


def _cpu_wait(rank: RankSnapshot) -> float:
    return rank.pressure.cpu_wait_ratio if rank.pressure is not None else 0.0


def fragmentation(run: RunSnapshot) -> Iterable[Finding]:
    """The allocator holds memory that it cannot use. Said once."""
    for rank in run.ranks:
        memory = rank.memory
        if memory is None or not any(risk.cause == "fragmentation" for risk in rank.risks):
            continue
        slack = max(0, memory.reserved_bytes - memory.allocated_bytes)
        yield Finding(
            rule="fragmentation",
            code="ZM205",
            severity="warning",
            rank=rank.rank,
            text=f"{human_bytes(slack)} are reserved and not allocated, and {memory.retries} "
            "allocations had to be retried",
            remedy=Remedy(
                cause="blocks of sizes that come and go leave gaps that nothing fits into",
                dialect="environment",
                diff="+ PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True",
                frees_bytes=slack // 2,
                price="none known on Linux; not with CUDA IPC of tensors",
            ),
        )
        return


def slow_link(run: RunSnapshot) -> Iterable[Finding]:
    """Large collectives come nowhere near what the links can do."""
    rank = worst(run)
    if rank is None or rank.links is None:
        return
    for far, peak, kind in (
        (False, rank.links.device_bytes_per_second, rank.links.device_kind),
        (True, rank.links.network_bytes_per_second, rank.links.network_kind),
    ):
        large = [
            r for r in rank.traffic
            if (r.nodes > 1) is far and r.calls and r.nbytes / r.calls >= 16 * _MIB
        ]  # fmt: skip
        best = max((r.best_busbw_bytes_per_second for r in large), default=0.0)
        share = share_of_step(rank, exposed(large))
        if peak and best and best < 0.2 * peak and share >= LEAST_SHARE:
            yield Finding(
                rule="slow_link",
                code="ZM310",
                severity=severity(share),
                rank=rank.rank,
                text=f"the best of the large collectives is {human_ratio(best / peak)} of what "
                f"{kind} can do, and {human_ratio(share)} of a step waits for them",
                remedy=Remedy(
                    cause="another path than the fast one may be taken",
                    dialect="environment",
                    diff="+ NCCL_DEBUG=INFO NCCL_DEBUG_SUBSYS=INIT,NET  # says which path it takes",
                    effect="none by itself: it names the path; then NCCL_SOCKET_IFNAME, NCCL_IB_HCA "
                    "or the topology",
                    price="a longer log",
                ),
            )


RULES: tuple[Callable[[RunSnapshot], Iterable[Finding]], ...] = (
    accumulation_communicates,
    fsdp_prefetch_off,
    reshard_without_need,
    whole_model_unit,
    ddp_bucket_large,
    tiny_collectives,
    stage_too_high,
    crosses_nodes,
    stage_too_low,
    activations_dominate,
    overlap_comm_off,
    cpu_optimizer_slow,
    data_wait,
    cpu_starved,
    fragmentation,
    slow_link,
)
