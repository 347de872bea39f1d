"""How FSDP gathers, keeps and groups parameters. Pure."""

from collections.abc import Iterable, Mapping, Sequence

from zeromon.base.units import human_bytes, human_count, human_ratio, human_seconds
from zeromon.diagnosis.rule import Match, Waits, rule
from zeromon.diagnosis.rules import common
from zeromon.memory.spec import ZeroStage
from zeromon.readout.breakdown import own_seconds
from zeromon.ring.model_metadata import ModelMetadata
from zeromon.ring.strategy import Framework, Strategy
from zeromon.snapshot import RankSnapshot, RunSnapshot, Severity
from zeromon.snapshot.finding import ConfigFormat
from zeromon.snapshot.focus import MIN_STEPS, worst_rank
from zeromon.snapshot.levels import AVOIDABLE

_ON_NEED = 0.8
"""A gather that is exposed for this share of its time was issued when its unit was needed."""
_PREFETCHED = common.Gain(0.4, 1.0)
"""Shares of the hideable time. Measured: 0.51 (docs/evidence/accuracy.md)."""


@rule("ZM305")
def fsdp_prefetch_off(run: RunSnapshot) -> Iterable[Match]:
    """Units gather their parameters only when they need them, and wait for them."""
    rank = worst_rank(run)
    if rank is None or not rank.sharding_strategy.is_sharding_fsdp:
        return
    form, diff = _prefetch_diff(rank)
    if not diff:
        return  # it is on already
    hideable, late = 0.0, 0.0
    for phase in ("forward", "backward"):
        gathers = rank.unit_rows("all_gather", phase)
        on_need = [row for row in gathers if row.exposed_seconds >= _ON_NEED * row.seconds > 0]
        # A single unit has no other one to gather ahead of
        if len(on_need) < 2:
            continue
        late += common.exposed_seconds(on_need)
        # the first unit of a phase has nothing before it to hide behind
        coverable = common.exposed_seconds(on_need) * (1 - 1 / len(on_need))
        hideable += min(coverable, own_seconds(rank.steps.recent).get(phase, 0.0))
    share = rank.share_of_step(late)
    if share < common.MIN_SHARE or hideable <= 0:
        return
    largest = max((row.nbytes for row in rank.unit_rows("all_gather")), default=0)
    evidence = (
        f"all-gathers of units on demand wait {human_seconds(late)} per step ({human_ratio(share)})"
    )
    gain, size = _PREFETCHED.seconds(hideable), human_bytes(largest)
    remedy = common.fill_remedy("prefetch_units", gain, form=form, diff=diff, size=size)
    yield Match(evidence, rank.rank, remedy, waits=Waits(share, AVOIDABLE))


def _prefetch_diff(rank: RankSnapshot) -> tuple[ConfigFormat, str]:
    """The configuration format, and the diff that makes units gather ahead; "" where they do already."""
    model = rank.config.models[0] if rank.config.models else ModelMetadata()
    forward = model.get("forward_prefetch", False)
    if rank.sharding_strategy.framework is Framework.FSDP1:
        missing = [] if forward else ["forward_prefetch=True"]
        if model.get("backward_prefetch") != "BACKWARD_PRE":
            missing.append("backward_prefetch=BackwardPrefetch.BACKWARD_PRE")
        to = "- FullyShardedDataParallel(model)\n+ FullyShardedDataParallel(model, {})"
        return ConfigFormat.FSDP1, to.format(", ".join(missing)) if missing else ""
    if forward:
        return ConfigFormat.FSDP2, ""
    rows = [
        "+ for this, following in itertools.pairwise(model.layers):",
        "+     this.set_modules_to_forward_prefetch([following])",
        "+     following.set_modules_to_backward_prefetch([this])",
    ]
    if rank.device == "cpu":
        rows.insert(0, "+ model._set_unshard_async_op(True)  # gloo has no stream to run ahead on")
    return ConfigFormat.FSDP2, "\n".join(rows)


_NOT_GATHERED = common.Gain(0.6, 1.2)
"""Shares of the exposed time of the gathers that go. Measured: 0.96 (docs/evidence/accuracy.md)."""
_ROOM = 2
"""How many times what a change takes must be free: the next peak may be higher."""


@rule("ZM306")
def reshard_without_need(run: RunSnapshot) -> Iterable[Match]:
    """Parameters are gathered again in backward, although there is room to keep them."""
    rank = worst_rank(run)
    if rank is None:
        return
    strategy = rank.sharding_strategy
    if not strategy.is_fsdp or strategy.stage < 3:
        return
    repeats = rank.unit_rows("all_gather", "backward")
    seconds = common.exposed_seconds(repeats)
    share, model_bytes = rank.share_of_step(seconds), rank.unsharded_bytes
    if share < common.MIN_SHARE or not model_bytes or common.room_bytes(run, rank) < _ROOM * model_bytes:
        return
    form, diff = _keep_gathered(strategy)
    change = {"stage": ZeroStage.GRADIENTS, "reshards": False}
    gained = common.predicted_gain(run, _NOT_GATHERED, seconds, **change)
    evidence = (
        f"all-gathers repeated in backward cost {human_seconds(seconds)} per step "
        f"({human_ratio(share)}); {human_bytes(common.room_bytes(run, rank))} per rank are free"
    )
    blanks = {"form": form, "diff": diff, "setting": _FREES[form], "size": human_bytes(model_bytes)}
    remedy = common.fill_remedy("keep_gathered", gained, **blanks)
    yield Match(evidence, rank.rank, remedy, waits=Waits(share, AVOIDABLE))


_FREES = {ConfigFormat.FSDP1: "FULL_SHARD", ConfigFormat.FSDP2: "reshard_after_forward"}


def _keep_gathered(strategy: Strategy) -> tuple[ConfigFormat, str]:
    """The configuration format, and the diff that keeps parameters from forward to backward."""
    if strategy.framework is Framework.FSDP2:
        diff = "- fully_shard(layer)\n+ fully_shard(layer, reshard_after_forward=False)"
        return ConfigFormat.FSDP2, diff
    current, keeps = "FULL_SHARD", "SHARD_GRAD_OP"
    if strategy.hybrid:
        current, keeps = "HYBRID_SHARD", "_HYBRID_SHARD_ZERO2"
    return ConfigFormat.FSDP1, (
        f"- sharding_strategy=ShardingStrategy.{current}\n+ sharding_strategy=ShardingStrategy.{keeps}"
    )


_MIN_LAYERS = 4
_MIN_UNIT_SHARE = 0.6
_WORTH_FREEING = 0.3
"""Min share of the peak of gathered parameters; splitting a unit costs more all-gathers."""


_WRAPS: Mapping[str, Sequence[str]] = common.DIFFS["layers_as_units"]
"""The framework of a model -> the configuration format, and the diff that makes a unit of each layer."""


@rule("ZM206", severity=Severity.WARNING, once=True)
def whole_model_unit(run: RunSnapshot) -> Iterable[Match]:
    """One unit holds most of the model, and is gathered as a whole. Reported once."""
    for rank in run.ranks:
        model = next((m for m in rank.config.models if m.get("framework") in _WRAPS), None)
        if (
            model is None
            or rank.steps.watched_steps < MIN_STEPS
            or rank.memory.unsharded_peak_bytes <= 0
        ):
            continue
        numel, itemsize = model.get("numel", 0), model.get("compute_bytes", 4)
        count, largest = model.get("blocks", (0, 0))
        largest = largest * numel // max(1, model.get("whole_numel", numel))  # tensor parallel: its part
        biggest = model.get("largest_unit_numel", 0)
        if count < _MIN_LAYERS or biggest < _MIN_UNIT_SHARE * numel or largest <= 0:
            continue
        # two blocks at once, and what is outside of them
        peak = (numel - count * largest + 2 * largest) * itemsize
        frees = rank.memory.unsharded_peak_bytes - peak
        if frees < _WORTH_FREEING * rank.memory.unsharded_peak_bytes:
            continue
        form, diff = _WRAPS[model["framework"]]
        evidence = (
            f"one unit of {human_bytes(biggest * itemsize)} is gathered as a whole; the model has "
            f"{human_count(count)} layers of {human_bytes(largest * itemsize)}"
        )
        blanks = {"form": form, "diff": diff, "count": human_count(count)}
        remedy = common.fill_remedy("layers_as_units", {"frees_bytes": frees}, **blanks)
        yield Match(evidence, rank.rank, remedy)


_SHARDED = ("sharded_param", "sharded_grad", "optimizer_state", "master_param")


@rule("ZM307")
def full_shard_across_nodes(run: RunSnapshot) -> Iterable[Match]:
    """Parameters are gathered over the network, where a copy on each node would do."""
    rank = worst_rank(run)
    if rank is None or not rank.sharding_strategy.is_sharding_fsdp:
        return
    gathers = common.far_gathers(rank)
    if gathers is None:
        return
    shard_bytes = sum(r.device_bytes or r.host_bytes for r in rank.memory.roles if r.role in _SHARDED)
    extra = shard_bytes * (gathers.nodes - 1)
    if common.room_bytes(run, rank) < _ROOM * extra or not extra:
        return
    form, diff = _within_nodes(rank, gathers.nodes, gathers.local_ranks)
    blanks = {"cause": gathers.cause, "form": form, "diff": diff, "extra": human_bytes(extra)}
    remedy = common.fill_remedy("shard_within_nodes", gathers.gain, **blanks)
    yield Match(gathers.text, rank.rank, remedy, waits=Waits(gathers.share, AVOIDABLE))


def _within_nodes(rank: RankSnapshot, nodes: int, local: int) -> tuple[ConfigFormat, str]:
    """The change to shard within each of *nodes* nodes of *local* ranks, replicated over them."""
    strategy = rank.sharding_strategy
    mesh = (
        f'+ mesh = init_device_mesh("{rank.device_type}", ({nodes}, {local}),\n'
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
