"""How FSDP gathers, keeps and groups parameters. Pure."""

from collections.abc import Iterable

from zeromon.diagnosis.rule import Match, Waits, rule
from zeromon.diagnosis.rules.common import (
    ACROSS_NODES,
    LEAST_SHARE,
    LEAST_STEPS,
    Gain,
    device_type,
    exposed,
    far_gathers,
    gain,
    is_sharding_fsdp,
    room_bytes,
    rows,
    share_of_step,
    unsharded_bytes,
    worst,
)
from zeromon.levels import AVOIDABLE
from zeromon.memory.spec import ZeroStage
from zeromon.readout.breakdown import own_seconds
from zeromon.ring.model_metadata import ModelMetadata
from zeromon.ring.strategy import Framework, Strategy
from zeromon.snapshot import ConfigFormat, Pool, RankSnapshot, Remedy, RunSnapshot, Severity
from zeromon.units import human_bytes, human_count, human_ratio, human_seconds

_ON_NEED = 0.8
"""A gather that is exposed for this share of its time was issued when its unit was needed."""
_PREFETCHED = Gain(0.4, 1.0)
"""Shares of the hideable time. Measured: 0.51 (docs/advice.md)."""


@rule("ZM305")
def fsdp_prefetch_off(run: RunSnapshot) -> Iterable[Match]:
    """Units gather their parameters only when they need them, and wait for them."""
    rank = worst(run)
    if rank is None or not is_sharding_fsdp(rank.sharding_strategy):
        return
    form, diff = _prefetch_diff(rank)
    if not diff:
        return  # it is on already
    hideable, late = 0.0, 0.0
    for phase in ("forward", "backward"):
        gathers = rows(rank, "all_gather", phase)
        on_need = [row for row in gathers if row.exposed_seconds >= _ON_NEED * row.seconds > 0]
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
    yield Match(
        f"units gather their parameters when they need them: {human_seconds(late)} a step "
        f"({human_ratio(share)}) of exposed all-gathers",
        rank.rank,
        Remedy(
            cause="no unit's all-gather is under way while another unit computes",
            dialect=form,
            diff=diff,
            **_PREFETCHED.seconds(hideable),
            price=f"one more unit is gathered at once ({human_bytes(largest)})",
            takes=Pool.DEVICE,
        ),
        waits=Waits(share, AVOIDABLE),
    )


def _prefetch_diff(rank: RankSnapshot) -> tuple[ConfigFormat, str]:
    """The configuration format, and the diff that makes units gather ahead; "" where they do already."""
    model = rank.models[0] if rank.models else ModelMetadata()
    forward = model.get("forward_prefetch", False)
    if rank.sharding_strategy.framework is Framework.FSDP1:
        off = [] if forward else ["forward_prefetch=True"]
        if model.get("backward_prefetch") != "BACKWARD_PRE":
            off.append("backward_prefetch=BackwardPrefetch.BACKWARD_PRE")
        to = "- FullyShardedDataParallel(model)\n+ FullyShardedDataParallel(model, {})"
        return ConfigFormat.FSDP1, to.format(", ".join(off)) if off else ""
    if forward:
        return ConfigFormat.FSDP2, ""
    lines = [
        "+ for this, following in itertools.pairwise(model.layers):",
        "+     this.set_modules_to_forward_prefetch([following])",
        "+     following.set_modules_to_backward_prefetch([this])",
    ]
    if rank.device == "cpu":
        lines.insert(0, "+ model._set_unshard_async_op(True)  # gloo has no stream to run ahead on")
    return ConfigFormat.FSDP2, "\n".join(lines)


_NOT_GATHERED = Gain(0.6, 1.2)
"""Shares of the exposed time of the gathers that go. Measured: 0.96 (docs/advice.md)."""
_ROOM = 2
"""How many times what a change takes must be free: the next peak may be higher."""


@rule("ZM306")
def reshard_without_need(run: RunSnapshot) -> Iterable[Match]:
    """Parameters are gathered again in backward, although there is room to keep them."""
    rank = worst(run)
    if rank is None:
        return
    strategy = rank.sharding_strategy
    if not strategy.is_fsdp or strategy.stage < 3:
        return
    again = rows(rank, "all_gather", "backward")
    share, held = share_of_step(rank, exposed(again)), unsharded_bytes(rank)
    if share < LEAST_SHARE or not held or room_bytes(run, rank) < _ROOM * held:
        return
    form, diff = _keep_gathered(strategy)
    kept = {"stage": ZeroStage.GRADIENTS, "reshards": False}
    gained = gain(run, _NOT_GATHERED, exposed(again), **kept)
    yield Match(
        f"gathering parameters again in backward waits {human_seconds(exposed(again))} a step "
        f"({human_ratio(share)}), and {human_bytes(room_bytes(run, rank))} per rank are free",
        rank.rank,
        Remedy(
            cause=f"{_FREES[form]} frees parameters that backward needs soon after",
            dialect=form,
            diff=diff,
            **gained,
            price=f"all parameters stay gathered from forward to backward ({human_bytes(held)})",
            takes=Pool.DEVICE,
        ),
        waits=Waits(share, AVOIDABLE),
    )


_FREES = {ConfigFormat.FSDP1: "FULL_SHARD", ConfigFormat.FSDP2: "reshard_after_forward"}


def _keep_gathered(strategy: Strategy) -> tuple[ConfigFormat, str]:
    """The configuration format, and the diff that keeps parameters from forward to backward."""
    if strategy.framework is Framework.FSDP2:
        diff = "- fully_shard(layer)\n+ fully_shard(layer, reshard_after_forward=False)"
        return ConfigFormat.FSDP2, diff
    now, keeps = "FULL_SHARD", "SHARD_GRAD_OP"
    if strategy.hybrid:
        now, keeps = "HYBRID_SHARD", "_HYBRID_SHARD_ZERO2"
    return ConfigFormat.FSDP1, (
        f"- sharding_strategy=ShardingStrategy.{now}\n+ sharding_strategy=ShardingStrategy.{keeps}"
    )


_LEAST_LAYERS = 4
_MOST_OF_THE_MODEL = 0.6
_WORTH_FREEING = 0.3
"""Min share of the peak of gathered parameters; splitting a unit costs more all-gathers."""


_WRAPS = {
    "fsdp1": (
        ConfigFormat.FSDP1,
        "- FullyShardedDataParallel(model)\n+ FullyShardedDataParallel(model,\n"
        "+     auto_wrap_policy=ModuleWrapPolicy({type(model.layers[0])}))",
    ),
    "fsdp2": (
        ConfigFormat.FSDP2,
        "+ for layer in model.layers:\n+     fully_shard(layer)\n  fully_shard(model)",
    ),
}
"""The framework of a model -> the configuration format, and the diff that makes a unit of each layer."""


@rule("ZM206", severity=Severity.WARNING, once=True)
def whole_model_unit(run: RunSnapshot) -> Iterable[Match]:
    """One unit holds most of the model, and is gathered as a whole. Reported once."""
    for rank in run.ranks:
        model = next((m for m in rank.models if m.get("framework") in _WRAPS), None)
        if model is None or rank.steps < LEAST_STEPS or rank.unsharded_peak_bytes <= 0:
            continue
        numel, each = model.get("numel", 0), model.get("compute_bytes", 4)
        count, largest = model.get("blocks", (0, 0))
        largest = (
            largest * numel // max(1, model.get("whole_numel", numel))
        )  # tensor parallel: its part
        biggest = model.get("largest_unit_numel", 0)
        if count < _LEAST_LAYERS or biggest < _MOST_OF_THE_MODEL * numel or largest <= 0:
            continue
        # two blocks at once, and what is outside of them
        peak = (numel - count * largest + 2 * largest) * each
        frees = rank.unsharded_peak_bytes - peak
        if frees < _WORTH_FREEING * rank.unsharded_peak_bytes:
            continue
        form, diff = _WRAPS[model["framework"]]
        yield Match(
            f"one unit of {human_bytes(biggest * each)} is gathered as a whole; the model has "
            f"{human_count(count)} layers of {human_bytes(largest * each)}",
            rank.rank,
            Remedy(
                cause="only the root is wrapped: nothing is freed before the whole model has computed",
                dialect=form,
                diff=diff,
                frees_bytes=frees,
                price=f"{human_count(count)} all-gathers where there was one",
            ),
        )


_SHARDED = ("sharded_param", "sharded_grad", "optimizer_state", "master_param")


@rule("ZM307")
def full_shard_across_nodes(run: RunSnapshot) -> Iterable[Match]:
    """Parameters are gathered over the network, where a copy on each node would do."""
    rank = worst(run)
    if rank is None or not is_sharding_fsdp(rank.sharding_strategy):
        return
    far = far_gathers(rank)
    if far is None:
        return
    held = sum(r.device_bytes or r.host_bytes for r in rank.roles if r.role in _SHARDED)
    more = held * (far.nodes - 1)
    if room_bytes(run, rank) < _ROOM * more or not more:
        return
    form, diff = _within_nodes(rank, far.nodes, far.local_ranks)
    yield Match(
        far.text,
        rank.rank,
        Remedy(
            cause=far.cause,
            dialect=form,
            diff=diff,
            **ACROSS_NODES.seconds(far.seconds),
            price=f"{human_bytes(more)} more on each rank, and an all-reduce of gradients between "
            "the nodes",
            takes=Pool.DEVICE,
        ),
        waits=Waits(far.share, AVOIDABLE),
    )


def _within_nodes(rank: RankSnapshot, nodes: int, local: int) -> tuple[ConfigFormat, str]:
    """The change to shard within each of *nodes* nodes of *local* ranks, replicated over them."""
    strategy = rank.sharding_strategy
    mesh = (
        f'+ mesh = init_device_mesh("{device_type(rank)}", ({nodes}, {local}),\n'
        '+                         mesh_dim_names=("replicate", "shard"))\n'
    )
    if strategy.framework is Framework.FSDP1:
        kind = "HYBRID_SHARD" if strategy.stage == 3 else "_HYBRID_SHARD_ZERO2"
        return ConfigFormat.FSDP1, (
            f"{mesh}- FullyShardedDataParallel(model)\n"
            "+ FullyShardedDataParallel(model, device_mesh=mesh,\n"
            f"+                          sharding_strategy=ShardingStrategy.{kind})"
        )
    return ConfigFormat.FSDP2, f"{mesh}- fully_shard(layer)\n+ fully_shard(layer, mesh=mesh)"
