"""The OOM ladder: the settings that free memory on one run, cheapest first. Pure.

Each rung is one change of a :class:`~zeromon.memory.plan.Setup`, on top of the rungs above it. Its bytes
are the difference of two predictions (:func:`zeromon.memory.plan.predict_row`), its seconds that of
their steps. The plan, the check, the live finding and the report of a death show the same ladder.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

from zeromon.base.errors import PlanError
from zeromon.base.units import human_bytes, human_count, human_seconds
from zeromon.memory.plan import Row, Setup, activation_terms, of_run, predict_row, sizes_under_plan
from zeromon.memory.predict import During, memory_of
from zeromon.memory.seconds import StepTime
from zeromon.memory.spec import OPTIMIZERS, Precision, ShardPlan, ZeroStage
from zeromon.memory.speeds import with_larger_batch
from zeromon.snapshot import Pool, RunSnapshot
from zeromon.snapshot.finding import Rung

RECOMPUTED = 0.5
"""The share of measured activations that checkpointing frees; an estimate, not measured."""

_MIN_FREED_SHARE = 0.005
"""A rung that frees less than this share of the memory in use is left out."""
_MIN_SHARE_OF_NEED = 0.05
"""A rung below this share of a run's need is left out, too, where it died or is about to."""

_TILED_SHARE = 1 / 3
"""The share of the gathered parameters from which a single linear layer is worth cutting in tiles."""
_TILES = 4

_SMALL_BUCKET = 50_000_000
_SMALL_PREFETCH = 10_000_000
_SMALL_LIVE = 100_000_000
_SMALL_GROUP = 100_000_000

FORMATS = {
    "deepspeed": "DeepSpeed JSON", "fsdp1": "Python (FSDP1)", "fsdp2": "Python (FSDP2)",
    "ddp": "Python (DDP)",
}  # fmt: skip
"""Framework -> the format of its changes."""


class _Change(NamedTuple):
    text: str
    after: Setup
    price: str = ""
    """The cost that the prediction does not compute, in words."""


_Step = Callable[[Setup], _Change | None]


def ladder_rungs(
    setup: Setup,
    need_bytes: float | None,
    tiers: tuple[str, ...] = ("device",),
    least_bytes: float = 0.0,
    *,
    autocasts: bool = False,
) -> tuple[Rung, ...]:
    """Returns the rungs that free memory in *tiers*, in order.

    *need_bytes*: how many bytes must become free; None where unknown, and then no rung is called enough.
    *least_bytes*: a rung that frees less is left out. *autocasts*: activations are in 16 bits already.
    """
    rungs: list[Rung] = []
    freed, exact, row_before = 0, True, predict_row(setup, setup.plan)
    peak_bytes = row_before.memory.peak_bytes(tiers)
    for step in _STEPS:
        change = step(setup)
        if change is None or (autocasts and step is _to_bf16):
            continue
        # By identity: an equal setup that a step made is a change that frees nothing
        if change.after is setup:  # of activations, which are unknown
            rungs.append(Rung(change=change.text, frees_bytes=None, price=change.price))
            continue
        try:
            row_after = predict_row(change.after, change.after.plan)
        except PlanError:  # the framework refuses it
            continue
        frees = row_before.memory.peak_bytes(tiers) - row_after.memory.peak_bytes(tiers)
        if frees < max(_MIN_FREED_SHARE * peak_bytes, least_bytes):
            continue
        # A change that gathers units whose sizes are unknown may free less
        gathers = change.after.plan.stage == ZeroStage.PARAMETERS > setup.plan.stage
        bound = gathers and not sizes_under_plan(change.after, change.after.plan).unit_numels
        # A bound adds an unknown rest to the sum: no rung below it may be called enough
        exact = exact and not bound
        enough = exact and need_bytes is not None and freed < need_bytes <= freed + frees
        rungs.append(
            Rung(
                change=change.text,
                frees_bytes=frees,
                at_most=bound,
                price=_price_of_change(row_before, row_after, change.price),
                enough=enough,
            )
        )
        setup, row_before, freed = change.after, row_after, freed + frees
    return tuple(rungs)


def ladder_of_risk(run: RunSnapshot, pool: Pool, need_bytes: float | None) -> tuple[Rung, ...]:
    """Returns the ladder of *run*, whose *pool* is full; empty where the model is unknown."""
    try:
        setup = of_run(run)
    except PlanError:
        return ()
    on_cpu = all(rank.memory.device is None for rank in run.ranks)
    tiers = ("device",) if pool == Pool.DEVICE else ("host", "device") if on_cpu else ("host",)
    autocasts = any(rank.config.process.get("autocast") for rank in run.ranks)
    least_bytes = _MIN_SHARE_OF_NEED * (need_bytes or 0.0)
    return ladder_rungs(setup, need_bytes, tiers, least_bytes, autocasts=autocasts)


def _price_of_change(old: Row, new: Row, note: str) -> str:
    """Returns what a change costs: *note*, the bytes that a rank sends, and the seconds of a step."""
    phrases = [note] if note else []
    sent = new.communication_bytes - old.communication_bytes
    if sent:
        quantifier = "more" if sent > 0 else "less"
        phrases.append(f"a rank sends {human_bytes(abs(sent))} {quantifier} per step")
    if isinstance(old.time, StepTime) and isinstance(new.time, StepTime):
        longer = new.time.seconds - old.time.seconds
        if abs(longer) > 0.001 * old.time.seconds:
            adjective = "longer" if longer > 0 else "shorter"
            phrases.append(f"a step is about {human_seconds(abs(longer))} {adjective}")
    return "; ".join(phrases) or "none"


def _with(setup: Setup, **fields: object) -> Setup:
    return replace(setup, plan=replace(setup.plan, **fields))  # type: ignore[arg-type]


def _as_json(name: str, old: object, new: object) -> str:
    return f'"{name}": {old} -> {new}'


@dataclass(frozen=True, slots=True)
class _Setting:
    """A step that gives one field of a plan another value."""

    applies: Callable[[ShardPlan], bool]
    field: str
    value: Any
    change: str
    """With places for what *plan* has."""
    price: str = ""

    def __call__(self, s: Setup) -> _Change | None:
        if not self.applies(s.plan):
            return None
        return _Change(self.change.format(plan=s.plan), _with(s, **{self.field: self.value}), self.price)


def _is_zero_3(p: ShardPlan) -> bool:
    return p.framework == "deepspeed" and p.stage == ZeroStage.PARAMETERS


# ---- buckets and gathered parameters --------------------------------------------------------------

_BUCKET_VIEWS = _Setting(
    lambda p: p.framework == "ddp" and not p.bucket_views,
    "bucket_views", True, "gradient_as_bucket_view: False -> True",
)  # fmt: skip
_REDUCE_BUCKET = _Setting(
    lambda p: p.framework == "deepspeed" and p.stage > 0 and p.grad_bucket_numel > _SMALL_BUCKET,
    "grad_bucket_numel", _SMALL_BUCKET,
    f'"reduce_bucket_size": {{plan.grad_bucket_numel}} -> {_SMALL_BUCKET}', "more collectives",
)  # fmt: skip
_NO_OVERLAP = _Setting(
    lambda p: p.framework == "deepspeed" and p.stage in (1, 2) and p.grad_buckets > 1,
    "grad_buckets", 1, '"overlap_comm": true -> false', "compute hides no reduction of gradients",
)  # fmt: skip
_NO_PERSIST = _Setting(
    lambda p: _is_zero_3(p) and p.persistence_numel > 0,
    "persistence_numel", 0, '"stage3_param_persistence_threshold": {plan.persistence_numel} -> 0',
    "small parameters are gathered, too",
)  # fmt: skip
_NO_SECOND_COPY = _Setting(
    lambda p: p.stage == ZeroStage.PARAMETERS and p.secondary_ranks > 0,
    "secondary_ranks", 0, '"zero_hpz_partition_size": {plan.secondary_ranks} -> 1',
    "backward gathers parameters between nodes",
)  # fmt: skip


def _live_params(s: Setup) -> _Change | None:
    """Both, because the larger of them decides; not below one unit, which must be gathered."""
    if not _is_zero_3(s.plan):
        return None
    edits, fields = [], {}
    for name, field, small in (
        ("stage3_max_live_parameters", "live_numel", _SMALL_LIVE),
        ("stage3_max_reuse_distance", "reuse_numel", _SMALL_LIVE),
        ("stage3_prefetch_bucket_size", "prefetch_numel", _SMALL_PREFETCH),
    ):
        numel = getattr(s.plan, field)
        if numel > small:
            edits.append(_as_json(name, numel, small))
            fields[field] = small
    price = "compute hides less of the gathering of parameters"
    return _Change(", ".join(edits), _with(s, **fields), price) if fields else None


def _cut_linear(s: Setup) -> _Change | None:
    """Memory-centric tiling (Rajbhandari et al. 2021, arXiv 2104.07857, section 5.1.3)."""
    if not _is_zero_3(s.plan):
        return None
    sizes = sizes_under_plan(s, s.plan)
    size, units = sizes.linear_numel, sizes.unit_numels
    if not units or size > units[0]:
        return None
    full = memory_of(sizes, s.plan).role("unsharded_param", during=During.BACKWARD)
    itemsize = s.plan.precision.compute_bytes
    if size * itemsize < _TILED_SHARE * full:
        return None
    tile = -(-size // _TILES)
    cut = tuple(sorted((units[0] - size + tile, *units[1:]), reverse=True))
    tensor = sizes.largest_tensor_numel
    tensor = min(tensor, max(tile, *cut)) if tensor == size else tensor
    setup = replace(
        s, known=replace(sizes, unit_numels=cut, largest_tensor_numel=tensor, linear_numel=tile)
    )
    edit = (
        f"nn.Linear of {human_count(size)} weights, {size * itemsize / full:.0%} of what is gathered -> "
        f"deepspeed.zero.TiledLinear(..., out_splits={_TILES})"
    )
    return _Change(edit, setup, "its weights are gathered in parts, one after the other")


# ---- what is partitioned --------------------------------------------------------------------------


def _next_stage(s: Setup, below: ZeroStage) -> _Change | None:
    """The next stage of DeepSpeed, from a stage below *below*."""
    if s.plan.framework != "deepspeed" or s.plan.stage >= below:
        return None
    stage = ZeroStage(s.plan.stage + 1)
    # DeepSpeed refuses stages 2 and 3 under a pipeline
    if s.pipeline > 1 and stage >= ZeroStage.GRADIENTS:
        return None
    setup = _with(s, stage=stage, reshards=stage == ZeroStage.PARAMETERS)
    return _Change(_as_json("stage", int(s.plan.stage), int(stage)), setup)


def _cheap_stage(s: Setup) -> _Change | None:
    return _next_stage(s, ZeroStage.GRADIENTS)


def _stage_3(s: Setup) -> _Change | None:
    is_2 = s.plan.stage == ZeroStage.GRADIENTS
    if s.plan.framework == "deepspeed":
        return _next_stage(s, ZeroStage.PARAMETERS) if is_2 else None
    fields = {"stage": ZeroStage.PARAMETERS, "reshards": True}
    if s.plan.framework == "ddp":
        edit = "DistributedDataParallel(model) -> fully_shard(layer) for each layer, then the model"
        return _Change(edit, _with(s, framework="fsdp2", shard_ranks=0, **fields))
    if not is_2:
        return None
    if s.plan.framework == "fsdp1":
        return _Change("sharding_strategy: SHARD_GRAD_OP -> FULL_SHARD", _with(s, **fields))
    return _Change("reshard_after_forward: False -> True", _with(s, **fields))


_NOT_HYBRID = _Setting(
    lambda p: p.framework.startswith("fsdp") and p.shard_ranks != p.ranks,
    "shard_ranks", 0, "shards over {plan.shard_ranks} ranks (hybrid) -> over all {plan.ranks}",
    "parameters are gathered between nodes",
)  # fmt: skip

# ---- activations and types ------------------------------------------------------------------------


def _are_activations_known(s: Setup) -> bool:
    return s.batch is not None and bool(activation_terms(s))


_UNKNOWN = "activations are unknown here, so their bytes are not predicted"


def _micro_batch(s: Setup, *, to_one: bool = False) -> _Change | None:
    if s.batch is not None and s.batch.sequences == 1:
        return None
    if not _are_activations_known(s) or s.batch is None:
        return None if to_one else _Change("a smaller micro-batch, more accumulation", s, _UNKNOWN)
    sequences = s.batch.sequences
    # An odd micro-batch has no whole half: the global batch would change
    smaller = 1 if to_one or sequences % 2 else sequences // 2
    if sequences <= smaller:
        return None
    times = sequences // smaller
    measured = s.measured
    if measured is not None:
        measured = replace(measured, speeds=with_larger_batch(measured.speeds, 1 / times))
    setup = _with(s, accumulation=s.plan.accumulation * times)
    setup = replace(setup, batch=replace(s.batch, sequences=smaller), measured=measured)
    accumulates = f"accumulation {s.plan.accumulation} -> {s.plan.accumulation * times}"
    price = "the same global batch; less work for a device at once"
    return _Change(f"micro-batch {sequences} -> {smaller}, {accumulates}", setup, price)


def _recompute_on(s: Setup) -> _Change | None:
    edit = "activation checkpointing: off -> on"
    if s.batch is not None and s.batch.checkpointing:
        return None
    if not _are_activations_known(s) or s.batch is None:
        return _Change(edit, s, f"forward is computed twice; {_UNKNOWN}")
    setup, price = replace(s, batch=replace(s.batch, checkpointing=True)), ""
    if s.measured_activation_bytes is not None:
        stored_bytes = round(s.measured_activation_bytes * (1 - RECOMPUTED))
        setup = replace(setup, measured_activation_bytes=stored_bytes)
        price = f"an estimate: {RECOMPUTED:.0%} of the measured activations"
    if s.measured is not None:
        speeds = replace(s.measured.speeds, recompute_seconds=s.measured.speeds.forward_seconds or 0.0)
        setup = replace(setup, measured=replace(s.measured, speeds=speeds))
    twice = "forward is computed twice, a third more compute (Korthikanti et al. 2022)"
    return _Change(edit, setup, "; ".join(filter(None, (twice, price))))


def _to_bf16(s: Setup) -> _Change | None:
    p = s.plan
    if p.precision.compute_bytes < 4:
        return None
    if p.framework == "deepspeed":
        edit, precision = '"bf16": {"enabled": false} -> true', Precision.mixed()
    else:
        precision = replace(p.precision, compute_bytes=2)
        edit = {
            "ddp": "fp32 -> torch.autocast(device, torch.bfloat16)",
            "fsdp1": "fp32 -> MixedPrecision(param_dtype=torch.bfloat16)",
        }.get(p.framework, "fp32 -> MixedPrecisionPolicy(param_dtype=torch.bfloat16)")
    price = "accuracy: bf16 has 8 significant bits, and not every device computes in it"
    return _Change(edit, _with(s, precision=precision), price)


def _fused_optimizer(s: Setup) -> _Change | None:
    p = s.plan
    fused = OPTIMIZERS.get(f"{p.optimizer.name.removesuffix('-for-loop')}-fused")
    if fused is None or p.optimizer_on != "device":
        return None
    name = "AdamW" if p.optimizer.name.startswith("adamw") else "Adam"
    return _Change(f"torch.optim.{name}(..., fused=True)", _with(s, optimizer=fused), "none")


_OPTIMIZER_IN_8_BITS = _Setting(
    lambda p: p.optimizer_on == "device" and p.optimizer.name.startswith("adam")
    and p.optimizer.state_bytes == 4,
    "optimizer", OPTIMIZERS["adamw8bit"], "{plan.optimizer.name} -> adamw8bit",
    "accuracy: states are quantized by blocks (Dettmers et al. 2022, arXiv 2110.02861)",
)  # fmt: skip

# ---- offload --------------------------------------------------------------------------------------


def _to_host(s: Setup) -> _Change | None:
    p = s.plan
    if p.optimizer_on != "device" or not p.stage:
        return None
    price = "the optimizer runs on the host"
    if p.optimizer.name == "adamw8bit":  # that of the host has fp32 states
        s, price = _with(s, optimizer=OPTIMIZERS["adamw"]), f"{price}, in fp32 again"
    if p.framework == "deepspeed":
        edit = '"offload_optimizer": {"device": "cpu"}'
        return _Change(edit, _with(s, optimizer_on="host"), price)
    if p.stage != ZeroStage.PARAMETERS:
        return None
    edit = "CPUOffload(offload_params=True)" if p.framework == "fsdp1" else "CPUOffloadPolicy()"
    return _Change(edit, _with(s, optimizer_on="host", params_on="host"), price)


_OFFLOAD_PARAMETERS = _Setting(
    lambda p: _is_zero_3(p) and p.params_on == "device" != p.optimizer_on,
    "params_on", "host", '"offload_param": {{"device": "cpu"}}',
    "parameters come from the host for each pass",
)  # fmt: skip
_NOT_PINNED = _Setting(
    lambda p: p.pins and not p.optimizer_on == p.params_on == "device",
    "pins", False, '"pin_memory": true -> false', "copies to the device are slower",
)  # fmt: skip
_SUB_GROUPS = _Setting(
    lambda p: p.optimizer_on == "nvme" and p.sub_group_numel > _SMALL_GROUP,
    "sub_group_numel", _SMALL_GROUP, f'"sub_group_size": {{plan.sub_group_numel}} -> {_SMALL_GROUP}',
    "smaller reads and writes of NVMe",
)  # fmt: skip
_TO_NVME = _Setting(
    lambda p: _is_zero_3(p) and p.optimizer_on == "host",
    "optimizer_on", "nvme", '"offload_optimizer.device": "cpu" -> "nvme"',
    "states are read and written once a step; needs an nvme_path",
)  # fmt: skip
_PARAMETERS_TO_NVME = _Setting(
    lambda p: p.framework == "deepspeed" and p.params_on == "host" and p.optimizer_on == "nvme",
    "params_on", "nvme", '"offload_param.device": "cpu" -> "nvme"', "parameters are read for each pass",
)  # fmt: skip

# Listed twice are _cheap_stage, to reach stage 2 from stage 0, and _live_params, whose settings
# take effect only after _stage_3
_STEPS: tuple[_Step, ...] = (
    _BUCKET_VIEWS, _fused_optimizer, _cheap_stage, _cheap_stage, _NOT_PINNED, _SUB_GROUPS,
    _REDUCE_BUCKET, _NO_OVERLAP, _live_params, _NO_PERSIST, _cut_linear, _to_bf16, _micro_batch,
    _recompute_on, _stage_3, _NOT_HYBRID, _live_params, _NO_SECOND_COPY,
    partial(_micro_batch, to_one=True), _OPTIMIZER_IN_8_BITS, _to_host, _OFFLOAD_PARAMETERS, _TO_NVME,
    _PARAMETERS_TO_NVME,
)  # fmt: skip
"""In order of price: what costs nothing, what compute may hide, recomputation and more bytes on the
links, accuracy of the optimizer, and last the host and the disk."""
