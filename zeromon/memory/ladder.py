"""The OOM ladder: the settings that free memory on one run, cheapest first. Pure.

Each rung is one change of a :class:`~zeromon.memory.plan.Setup`, on top of the rungs above it. Its bytes
are the difference of two predictions (:func:`zeromon.memory.plan.row`), its seconds that of their steps.
The plan, the check, the live finding and the report of a death show the same ladder.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import NamedTuple

from zeromon.errors import PlanError
from zeromon.memory.plan import Row, Setup, activations, of_run, row, sizes_of
from zeromon.memory.predict import During, predict
from zeromon.memory.seconds import StepTime
from zeromon.memory.spec import OPTIMIZERS, Precision, ZeroStage
from zeromon.memory.speeds import larger
from zeromon.snapshot import Pool, Rung, RunSnapshot
from zeromon.units import human_bytes, human_count, human_seconds

RECOMPUTED = 0.5
"""The share of measured activations that checkpointing frees; an estimate, not measured."""

_LEAST_SHARE = 0.005
"""A rung that frees less than this share of the memory in use is left out."""
_LEAST_OF_NEED = 0.05
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


def ladder(
    setup: Setup,
    need_bytes: float | None,
    places: tuple[str, ...] = ("device",),
    least_bytes: float = 0.0,
) -> tuple[Rung, ...]:
    """Returns the rungs that free memory in *places*, in order.

    *need_bytes*: how many bytes must become free; None where unknown, and then no rung is called enough.
    *least_bytes*: a rung that frees less is left out.
    """
    rungs: list[Rung] = []
    freed, exact, before = 0, True, row(setup, setup.plan)
    held = _peak(before, places)
    for step in _STEPS:
        change = step(setup)
        if change is None:
            continue
        if change.after is setup:  # of activations, which are unknown
            rungs.append(Rung(change=change.text, frees_bytes=None, price=change.price))
            continue
        try:
            after = row(change.after, change.after.plan)
        except PlanError:  # the framework refuses it
            continue
        frees = _peak(before, places) - _peak(after, places)
        if frees < max(_LEAST_SHARE * held, least_bytes):
            continue
        bound = _is_bound(setup, change.after)
        exact = exact and not bound
        enough = exact and need_bytes is not None and freed < need_bytes <= freed + frees
        rungs.append(
            Rung(
                change=change.text,
                frees_bytes=frees,
                at_most=bound,
                price=_price(before, after, change.price),
                enough=enough,
            )
        )
        setup, before, freed = change.after, after, freed + frees
    return tuple(rungs)


def of_risk(run: RunSnapshot, pool: Pool, need_bytes: float | None) -> tuple[Rung, ...]:
    """Returns the ladder of *run*, whose *pool* is full; empty where the model is unknown."""
    try:
        setup = of_run(run)
    except PlanError:
        return ()
    on_cpu = all(rank.memory is None for rank in run.ranks)
    places = ("device",) if pool == Pool.DEVICE else ("host", "device") if on_cpu else ("host",)
    return ladder(setup, need_bytes, places, _LEAST_OF_NEED * (need_bytes or 0.0))


def _peak(of: Row, places: tuple[str, ...]) -> int:
    """Returns the bytes of *places* together at their peak."""
    return max(sum(of.memory.total(place, part) for place in places) for part in During)


def _is_bound(before: Setup, after: Setup) -> bool:
    """Returns True if the change gathers units whose sizes are unknown: it may free less."""
    gathers = after.plan.stage == ZeroStage.PARAMETERS > before.plan.stage
    return gathers and not sizes_of(after, after.plan).unit_numels


def _price(before: Row, after: Row, words: str) -> str:
    """Returns what a change costs: *words*, the bytes that a rank sends, and the seconds of a step."""
    said = [words] if words else []
    sent = after.communication_bytes - before.communication_bytes
    if sent:
        more = "more" if sent > 0 else "less"
        said.append(f"a rank sends {human_bytes(abs(sent))} {more} a step")
    if isinstance(before.time, StepTime) and isinstance(after.time, StepTime):
        longer = after.time.seconds - before.time.seconds
        if abs(longer) > 0.001 * before.time.seconds:
            how = "longer" if longer > 0 else "shorter"
            said.append(f"a step is about {human_seconds(abs(longer))} {how}")
    return "; ".join(said) or "none"


def _with(setup: Setup, **fields: object) -> Setup:
    return replace(setup, plan=replace(setup.plan, **fields))  # type: ignore[arg-type]


def _json(name: str, now: object, then: object) -> str:
    return f'"{name}": {now} -> {then}'


# ---- buckets and gathered parameters --------------------------------------------------------------


def _bucket_views(s: Setup) -> _Change | None:
    if s.plan.framework != "ddp" or s.plan.bucket_views:
        return None
    text = "gradient_as_bucket_view: False -> True"
    return _Change(text, _with(s, bucket_views=True))


def _reduce_bucket(s: Setup) -> _Change | None:
    now = s.plan.grad_bucket_numel
    if s.plan.framework != "deepspeed" or now <= _SMALL_BUCKET or not s.plan.stage:
        return None
    after = _with(s, grad_bucket_numel=_SMALL_BUCKET)
    return _Change(_json("reduce_bucket_size", now, _SMALL_BUCKET), after, "more collectives")


def _overlap(s: Setup) -> _Change | None:
    is_1_or_2 = s.plan.stage in (ZeroStage.OPTIMIZER, ZeroStage.GRADIENTS)
    if s.plan.framework != "deepspeed" or s.plan.grad_buckets < 2 or not is_1_or_2:
        return None
    price = "compute hides no reduction of gradients"
    return _Change(_json("overlap_comm", "true", "false"), _with(s, grad_buckets=1), price)


def _live_parameters(s: Setup) -> _Change | None:
    """Both, because the larger of them decides; not below one unit, which must be gathered."""
    if s.plan.framework != "deepspeed" or s.plan.stage != ZeroStage.PARAMETERS:
        return None
    texts, fields = [], {}
    for name, field, least in (
        ("stage3_max_live_parameters", "live_numel", _SMALL_LIVE),
        ("stage3_max_reuse_distance", "reuse_numel", _SMALL_LIVE),
        ("stage3_prefetch_bucket_size", "prefetch_numel", _SMALL_PREFETCH),
    ):
        now = getattr(s.plan, field)
        if now > least:
            texts.append(_json(name, now, least))
            fields[field] = least
    price = "compute hides less of the gathering of parameters"
    return _Change(", ".join(texts), _with(s, **fields), price) if fields else None


def _persistence(s: Setup) -> _Change | None:
    now = s.plan.persistence_numel
    if s.plan.framework != "deepspeed" or s.plan.stage != ZeroStage.PARAMETERS or not now:
        return None
    text = _json("stage3_param_persistence_threshold", now, 0)
    return _Change(text, _with(s, persistence_numel=0), "small parameters are gathered, too")


def _tiled(s: Setup) -> _Change | None:
    """Memory-centric tiling (Rajbhandari et al. 2021, arXiv 2104.07857, section 5.1.3)."""
    if s.plan.framework != "deepspeed" or s.plan.stage != ZeroStage.PARAMETERS:
        return None
    sizes = sizes_of(s, s.plan)
    now, units = sizes.linear_numel, sizes.unit_numels
    if not units or now > units[0]:
        return None
    gathered = predict(sizes, s.plan).role("unsharded_param", during=During.BACKWARD)
    each = s.plan.precision.compute_bytes
    if now * each < _TILED_SHARE * gathered:
        return None
    tile = -(-now // _TILES)
    cut = tuple(sorted((units[0] - now + tile, *units[1:]), reverse=True))
    tensor = sizes.largest_tensor_numel
    tensor = min(tensor, max(tile, *cut)) if tensor == now else tensor
    after = replace(
        s, known=replace(sizes, unit_numels=cut, largest_tensor_numel=tensor, linear_numel=tile)
    )
    text = (
        f"nn.Linear of {human_count(now)} weights, {now * each / gathered:.0%} of what is gathered -> "
        f"deepspeed.zero.TiledLinear(..., out_splits={_TILES})"
    )
    return _Change(text, after, "its weights are gathered in parts, one after the other")


def _second_copy(s: Setup) -> _Change | None:
    now = s.plan.secondary_ranks
    if not now or s.plan.stage != ZeroStage.PARAMETERS:
        return None
    price = "backward gathers parameters between nodes"
    return _Change(_json("zero_hpz_partition_size", now, 1), _with(s, secondary_ranks=0), price)


# ---- what is partitioned --------------------------------------------------------------------------


def _next_stage(s: Setup, below: ZeroStage) -> _Change | None:
    """The next stage of DeepSpeed, from a stage below *below*."""
    if s.plan.framework != "deepspeed" or s.plan.stage >= below or s.pipeline > 1 < s.plan.stage:
        return None
    stage = ZeroStage(s.plan.stage + 1)
    after = _with(s, stage=stage, reshards=stage == ZeroStage.PARAMETERS)
    return _Change(_json("stage", int(s.plan.stage), int(stage)), after)


def _cheap_stage(s: Setup) -> _Change | None:
    return _next_stage(s, ZeroStage.GRADIENTS)


def _stage_3(s: Setup) -> _Change | None:
    is_2 = s.plan.stage == ZeroStage.GRADIENTS
    if s.plan.framework == "deepspeed":
        return _next_stage(s, ZeroStage.PARAMETERS) if is_2 else None
    after = {"stage": ZeroStage.PARAMETERS, "reshards": True}
    if s.plan.framework == "ddp":
        text = "DistributedDataParallel(model) -> fully_shard(layer) for each layer, then the model"
        return _Change(text, _with(s, framework="fsdp2", shard_ranks=0, **after))
    if not is_2:
        return None
    if s.plan.framework == "fsdp1":
        return _Change("sharding_strategy: SHARD_GRAD_OP -> FULL_SHARD", _with(s, **after))
    return _Change("reshard_after_forward: False -> True", _with(s, **after))


def _not_hybrid(s: Setup) -> _Change | None:
    if not s.plan.framework.startswith("fsdp") or s.plan.shard_ranks == s.plan.ranks:
        return None
    text = f"shards over {s.plan.shard_ranks} ranks (hybrid) -> over all {s.plan.ranks}"
    return _Change(text, _with(s, shard_ranks=0), "parameters are gathered between nodes")


# ---- activations and types ------------------------------------------------------------------------


def _known_activations(s: Setup) -> bool:
    return s.batch is not None and bool(activations(s))


_UNKNOWN = "activations are unknown here, so their bytes are not predicted"


def _micro_batch(s: Setup, *, to_one: bool = False) -> _Change | None:
    if not _known_activations(s) or s.batch is None:
        return None if to_one else _Change("a smaller micro-batch, more accumulation", s, _UNKNOWN)
    now = s.batch.sequences
    then = 1 if to_one or now % 2 else now // 2
    if now <= then:
        return None
    times = now // then
    measured = s.measured
    if measured is not None:
        measured = replace(measured, speeds=larger(measured.speeds, 1 / times))
    after = _with(s, accumulation=s.plan.accumulation * times)
    after = replace(after, batch=replace(s.batch, sequences=then), measured=measured)
    accumulates = f"accumulation {s.plan.accumulation} -> {s.plan.accumulation * times}"
    price = "the same global batch; less work for a device at once"
    return _Change(f"micro-batch {now} -> {then}, {accumulates}", after, price)


def _checkpointing(s: Setup) -> _Change | None:
    text = "activation checkpointing: off -> on"
    if not _known_activations(s) or s.batch is None:
        return _Change(text, s, f"forward is computed twice; {_UNKNOWN}")
    if s.batch.checkpointing:
        return None
    after, price = replace(s, batch=replace(s.batch, checkpointing=True)), ""
    if s.measured_activation_bytes is not None:
        kept = round(s.measured_activation_bytes * (1 - RECOMPUTED))
        after = replace(after, measured_activation_bytes=kept)
        price = f"an estimate: {RECOMPUTED:.0%} of the measured activations"
    if s.measured is not None:
        again = replace(
            s.measured.speeds, recompute_seconds=s.measured.speeds.forward_seconds or 0.0
        )
        after = replace(after, measured=replace(s.measured, speeds=again))
    twice = "forward is computed twice, a third more compute (Korthikanti et al. 2022)"
    return _Change(text, after, "; ".join(filter(None, (twice, price))))


def _half(s: Setup) -> _Change | None:
    p = s.plan
    if p.precision.compute_bytes < 4:
        return None
    if p.framework == "deepspeed":
        text, precision = '"bf16": {"enabled": false} -> true', Precision.mixed()
    else:
        precision = replace(p.precision, compute_bytes=2)
        text = {
            "ddp": "fp32 -> torch.autocast(device, torch.bfloat16)",
            "fsdp1": "fp32 -> MixedPrecision(param_dtype=torch.bfloat16)",
        }.get(p.framework, "fp32 -> MixedPrecisionPolicy(param_dtype=torch.bfloat16)")
    price = "accuracy: bf16 has 8 significant bits, and not every device computes in it"
    return _Change(text, _with(s, precision=precision), price)


def _optimizer_in_8_bits(s: Setup) -> _Change | None:
    p = s.plan
    if p.optimizer.name not in ("adam", "adamw") or p.optimizer_on != "device":
        return None
    price = "accuracy: states are quantized by blocks (Dettmers et al. 2022, arXiv 2110.02861)"
    return _Change(
        f"{p.optimizer.name} -> adamw8bit", _with(s, optimizer=OPTIMIZERS["adamw8bit"]), price
    )


# ---- offload --------------------------------------------------------------------------------------


def _offload(s: Setup) -> _Change | None:
    p = s.plan
    if p.optimizer_on != "device" or not p.stage:
        return None
    price = "the optimizer runs on the host"
    if p.optimizer.name == "adamw8bit":  # that of the host has fp32 states
        s, price = _with(s, optimizer=OPTIMIZERS["adamw"]), f"{price}, in fp32 again"
    if p.framework == "deepspeed":
        text = '"offload_optimizer": {"device": "cpu"}'
        return _Change(text, _with(s, optimizer_on="host"), price)
    if p.stage != ZeroStage.PARAMETERS:
        return None
    text = "CPUOffload(offload_params=True)" if p.framework == "fsdp1" else "CPUOffloadPolicy()"
    return _Change(text, _with(s, optimizer_on="host", params_on="host"), price)


def _offload_parameters(s: Setup) -> _Change | None:
    p = s.plan
    if p.framework != "deepspeed" or p.stage != ZeroStage.PARAMETERS or p.params_on != "device":
        return None
    if p.optimizer_on == "device":
        return None
    text = '"offload_param": {"device": "cpu"}'
    return _Change(text, _with(s, params_on="host"), "parameters come from the host for each pass")


def _unpinned(s: Setup) -> _Change | None:
    p = s.plan
    if not p.pins or p.optimizer_on == p.params_on == "device":
        return None
    return _Change(
        _json("pin_memory", "true", "false"),
        _with(s, pins=False),
        "copies to the device are slower",
    )


def _sub_groups(s: Setup) -> _Change | None:
    now = s.plan.sub_group_numel
    if s.plan.optimizer_on != "nvme" or now <= _SMALL_GROUP:
        return None
    price = "smaller reads and writes of NVMe"
    return _Change(
        _json("sub_group_size", now, _SMALL_GROUP), _with(s, sub_group_numel=_SMALL_GROUP), price
    )


def _to_nvme(s: Setup) -> _Change | None:
    p = s.plan
    if p.framework != "deepspeed" or p.stage != ZeroStage.PARAMETERS or p.optimizer_on != "host":
        return None
    text = _json("offload_optimizer.device", '"cpu"', '"nvme"')
    price = "states are read and written once a step; needs an nvme_path"
    return _Change(text, _with(s, optimizer_on="nvme"), price)


def _parameters_to_nvme(s: Setup) -> _Change | None:
    p = s.plan
    if p.framework != "deepspeed" or p.params_on != "host" or p.optimizer_on != "nvme":
        return None
    text = _json("offload_param.device", '"cpu"', '"nvme"')
    return _Change(text, _with(s, params_on="nvme"), "parameters are read for each pass")


_STEPS: tuple[_Step, ...] = (
    _bucket_views, _cheap_stage, _cheap_stage, _unpinned, _sub_groups, _reduce_bucket, _overlap,
    _live_parameters, _persistence, _tiled, _half, _micro_batch, _checkpointing, _stage_3, _not_hybrid,
    _live_parameters, _second_copy, partial(_micro_batch, to_one=True), _optimizer_in_8_bits, _offload,
    _offload_parameters, _to_nvme, _parameters_to_nvme,
)  # fmt: skip
"""In order of price: what costs nothing, what compute may hide, recomputation and more bytes on the
links, accuracy of the optimizer, and last the host and the disk."""
