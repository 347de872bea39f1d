"""Translates DeepSpeed and accelerate configurations into fields of a plan. Pure.

A value "auto" becomes the value that transformers' integration fills in, where the model's width is
known, else DeepSpeed's own default (``deepspeed/runtime/zero/config.py``).
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from reprlib import repr as short_repr  # limited in depth: aliases of a YAML file may nest without end
from typing import Any

from zeromon.base.errors import PlanError
from zeromon.memory.spec import Precision, ZeroStage, optim_named

AUTO = "auto"
"""A value that the framework fills in; also stands for a value that a script computes."""


def parse_number(value: Any) -> float | None:
    """Returns a number or the number in a text; None for "auto" and anything else."""
    # A switch is no number, but float(True) is 1.0
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        return None
    try:
        parsed = float(value)
    # An int of more than 308 digits makes float() raise OverflowError
    except (ValueError, OverflowError):
        return None
    # Also refuses "nan" and "inf", which float() takes and the int() of a caller does not
    return parsed if -1e18 < parsed < 1e18 else None


def parse_whole(value: Any) -> int | None:
    """Returns a whole number, or a text of one, as an int; None for anything else."""
    parsed = parse_number(value)
    return int(parsed) if parsed is not None and parsed == int(parsed) else None


def is_on(value: Any) -> bool | None:
    """Returns a switch as DeepSpeed and accelerate read it; None for "auto" and anything else."""
    if isinstance(value, str):
        return {"true": True, "false": False}.get(value.lower())
    return bool(value) if isinstance(value, (bool, int)) else None


_WHERE_AUTO: dict[str, Callable[[int], int]] = {
    # transformers/integrations/deepspeed.py, trainer_config_finalize
    "reduce_bucket_size": lambda hidden: hidden * hidden,
    "stage3_prefetch_bucket_size": lambda hidden: int(0.9 * hidden * hidden),
    "stage3_param_persistence_threshold": lambda hidden: 10 * hidden,
}

Changes = dict[str, Any]
"""Fields of a ShardPlan, and ``micro_batch``, that a configuration sets."""

_PLACES = {"cpu": "host", "nvme": "nvme", "none": "device", None: "device"}


def changes_of_config(config: Mapping[str, Any], hidden: int = 0) -> Changes:
    """Returns the fields that a DeepSpeed or accelerate configuration sets.

    *hidden*: the width of the model, 0 if unknown. Raises :class:`PlanError` for other configurations
    and for invalid values.
    """
    if "distributed_type" in config or "deepspeed_config" in config or "fsdp_config" in config:
        return changes_of_accelerate(config)
    # Keys of a YAML file may be numbers, which have no startswith()
    if any(key in config for key in ("zero_optimization", "bf16", "fp16", "optimizer")) or any(
        str(key).startswith("train_") for key in config
    ):
        return changes_of_deepspeed(config, hidden)
    raise PlanError(
        "this is neither a DeepSpeed configuration nor one of accelerate",
        hint="DeepSpeed's has zero_optimization, accelerate's distributed_type.",
    )


def changes_of_deepspeed(config: Mapping[str, Any], hidden: int = 0) -> Changes:
    """Returns the fields that a DeepSpeed configuration sets; raises :class:`PlanError`."""
    zero = dict(_section_of(config, "zero_optimization"))
    if config.get("zero_optimization") is True:  # the oldest form
        zero = {"stage": 1}
    if hidden:
        for name, value in _WHERE_AUTO.items():
            if zero.get(name) == AUTO:
                zero[name] = value(hidden)
    level = _int_setting(zero, "stage", 0)
    if level not in tuple(ZeroStage):
        raise PlanError(f"there is no ZeRO stage {level}; there are 0 to 3")
    stage = ZeroStage(level)
    fields: Changes = {"framework": "deepspeed", "stage": stage}
    half_on = [_is_switched_on(config.get(dtype)) for dtype in ("bf16", "fp16")]
    if True in half_on:
        fields["precision"] = Precision.mixed()
    elif None not in half_on:  # fp32; from stage 1 on there is still a flat fp32 copy of the partition
        fields["precision"] = replace(Precision.full(), has_master=stage > 0)
    fields |= _gradient_type_changes(config, fields.get("precision"))
    fields["optimizer_on"] = _offload_tier(zero, "offload_optimizer", "cpu_offload")
    fields["params_on"] = _offload_tier(zero, "offload_param", "")
    # ShardPlan raises for an offload at a stage that has none
    if not stage:
        fields["optimizer_on"] = "device"
    if stage < ZeroStage.PARAMETERS:
        fields["params_on"] = "device"
        if fields["optimizer_on"] == "nvme":  # DeepSpeed then keeps the optimizer on the host
            fields["optimizer_on"] = "host"
    overlap = zero.get("overlap_comm")
    contiguous = zero.get("contiguous_gradients", True)
    # settings of other stages are needed for the alternatives of the plan
    fields["grad_bucket_numel"] = _int_setting(zero, "reduce_bucket_size", 500_000_000)
    fields["grad_buckets"] = 2 if overlap is True and contiguous is not False else 1
    fields["prefetch_numel"] = _int_setting(
        zero, "stage3_prefetch_bucket_size", _int_setting(zero, "prefetch_bucket_size", 50_000_000)
    )
    fields["live_numel"] = _int_setting(zero, "stage3_max_live_parameters", 1_000_000_000)
    fields["persistence_numel"] = _int_setting(zero, "stage3_param_persistence_threshold", 100_000)
    fields |= _offload_buffer_sizes(zero)
    hpz = _int_setting(zero, "zero_hpz_partition_size", 1)
    fields["secondary_ranks"] = hpz if hpz > 1 else 0
    for name, key, default in _SWITCHES:
        switched = is_on(zero.get(key, default))
        fields[name] = default if switched is None else switched
    fields["accumulation"] = max(1, _int_setting(config, "gradient_accumulation_steps", 1))
    micro = _int_setting(config, "train_micro_batch_size_per_gpu", 0)
    if micro:
        fields["micro_batch"] = micro
    chosen = _section_of(config, "optimizer")
    if chosen.get("type"):
        params = _section_of(chosen, "params")
        momentum = params.get("momentum") or 0.0
        # DeepSpeed makes its own fused Adam of these names, unless torch_adam says otherwise
        step = "foreach" if params.get("torch_adam") else "fused"
        named = optim_named(str(chosen["type"]), momentum if isinstance(momentum, float) else 0.0, step)
        if named is not None:
            fields["optimizer"] = named
    return fields


_SWITCHES = (
    ("reduces_whole_buckets", "use_multi_rank_bucket_allreduce", True),
    ("quantized_weights", "zero_quantized_weights", False),
    ("quantized_grads", "zero_quantized_gradients", False),
)
"""Field of a plan, key of zero_optimization, default of DeepSpeed 0.19."""


def _offload_buffer_sizes(zero: Mapping[str, Any]) -> Changes:
    """Returns the sizes of sub-groups and buffers, with the defaults of DeepSpeed 0.19."""
    states, params = (
        section if isinstance(section := zero.get(name), Mapping) else {}
        for name in ("offload_optimizer", "offload_param")
    )
    ratio = parse_number(states.get("ratio", 1.0))
    return {
        "reuse_numel": _int_setting(zero, "stage3_max_reuse_distance", 1_000_000_000),
        "sub_group_numel": _int_setting(zero, "sub_group_size", 1_000_000_000),
        "offload_ratio": ratio if ratio is not None and 0 <= ratio <= 1 else 1.0,
        "optimizer_buffers": _int_setting(states, "buffer_count", 4),
        "param_buffer_numel": _int_setting(params, "buffer_count", 5)
        * _int_setting(params, "buffer_size", 100_000_000),
        "max_in_cpu": _int_setting(params, "max_in_cpu", 1_000_000_000),
        "pins": is_on((params if params.get("device") else states).get("pin_memory", True)) is not False,
    }


_BYTES = {"fp32": 4, "float32": 4, "float": 4, "fp16": 2, "float16": 2, "half": 2, "bf16": 2,
          "bfloat16": 2}  # fmt: skip


def _gradient_type_changes(config: Mapping[str, Any], precision: Precision | None) -> Changes:
    """Returns the precision with the types in which gradients accumulate, and are reduced.

    ``DeepSpeedEngine.communication_data_type`` reduces in the type of the model by default.
    """
    accum = _BYTES.get(str(_section_of(config, "data_types").get("grad_accum_dtype")).lower())
    sent = _BYTES.get(str(config.get("communication_data_type")).lower())
    if precision is None:
        precision = Precision.mixed()
    if accum is None and sent is None:
        return {}
    grads = accum or precision.grad_bytes
    sent = sent or precision.compute_bytes
    return {"precision": replace(precision, grad_bytes=grads, reduce_bytes=sent)}


def changes_of_accelerate(config: Mapping[str, Any]) -> Changes:
    """Returns the fields that an accelerate configuration sets: DeepSpeed, FSDP or DDP."""
    kind = str(config.get("distributed_type", "")).upper()
    fields: Changes = {}
    ranks = config.get("num_processes")
    if isinstance(ranks, int) and ranks > 0:
        fields["ranks"] = ranks
    is_half = str(config.get("mixed_precision", "no")) in ("bf16", "fp16", "fp8")
    if "DEEPSPEED" in kind:
        fields |= _accelerate_deepspeed(_section_of(config, "deepspeed_config"), is_half=is_half)
    elif "FSDP" in kind:
        fields |= _accelerate_fsdp_changes(_section_of(config, "fsdp_config"), is_half=is_half)
        machines = _int_setting(config, "num_machines", 1)
        # Popped, because a ShardPlan has no such field. FSDP's hybrid strategies shard within a machine
        if fields.pop("is_hybrid", False) and machines > 1 and fields.get("ranks", 0) % machines == 0:
            fields["shard_ranks"] = fields["ranks"] // machines
    else:
        fields |= _changes_of_ddp(is_half=is_half)
    return fields


def _changes_of_ddp(*, is_half: bool) -> Changes:
    """Returns the fields of DDP; under autocast parameters and gradients stay in fp32."""
    precision = Precision.policy() if is_half else Precision.full()
    return {"framework": "ddp", "stage": ZeroStage.NONE, "precision": precision}


def _accelerate_deepspeed(section: Mapping[str, Any], *, is_half: bool) -> Changes:
    zero: dict[str, Any] = {"stage": section.get("zero_stage", 2)}
    for role in ("optimizer", "param"):
        zero[f"offload_{role}"] = {"device": section.get(f"offload_{role}_device", "none")}
    accumulation = section.get("gradient_accumulation_steps", 1)
    return changes_of_deepspeed(
        {
            "zero_optimization": zero,
            "bf16": {"enabled": is_half},
            "gradient_accumulation_steps": accumulation,
        }
    )


def _accelerate_fsdp_changes(section: Mapping[str, Any], *, is_half: bool) -> Changes:
    version = str(section.get("fsdp_version", 1))
    # version 2 has no strategies, and reshards after forward by default
    key = "fsdp_reshard_after_forward" if version == "2" else "fsdp_sharding_strategy"
    strategy = str(section.get(key, ""))
    # As accelerate does, by the name of torch's ShardingStrategy or by its number
    is_stage_2 = strategy.upper() in ("SHARD_GRAD_OP", "2", "FALSE", "HYBRID_SHARD_ZERO2", "5")
    stage = ZeroStage.GRADIENTS if is_stage_2 else ZeroStage.PARAMETERS
    if strategy.upper() in ("NO_SHARD", "3"):
        return _changes_of_ddp(is_half=is_half)
    offloads = is_on(section.get("fsdp_offload_params")) is True
    return {
        "framework": "fsdp2" if version == "2" else "fsdp1",
        "stage": stage,
        "is_hybrid": "HYBRID" in strategy.upper() or strategy in ("4", "5"),
        # accelerate keeps fp32 shards, and computes and reduces in the lower precision
        "precision": replace(Precision.policy(), reduce_bytes=2) if is_half else Precision.full(),
        "params_on": "host" if offloads and stage == ZeroStage.PARAMETERS else "device",
        "optimizer_on": "host" if offloads else "device",
    }


def _section_of(config: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    section = config.get(name) or {}
    if section is True and name == "zero_optimization":
        return {}
    if not isinstance(section, Mapping):
        raise PlanError(f"{name} must be a section of its own, not {short_repr(section)}")
    return section


def _int_setting(config: Mapping[str, Any], name: str, default: int) -> int:
    value = config.get(name, default)
    if value == AUTO or value is None:
        return default
    exact = parse_number(value)
    if exact is None:
        raise PlanError(f"{name} must be a number, not {short_repr(value)}")
    if not 0 <= exact < 1e15 or exact != int(exact):
        raise PlanError(f"{name} must be a whole number that is not negative, not {short_repr(value)}")
    return int(exact)


def _is_switched_on(section: Any) -> bool | None:
    """Returns whether a section like ``bf16`` is enabled; None for "auto"."""
    enabled = section.get("enabled", False) if isinstance(section, Mapping) else section is True
    return None if enabled == AUTO else bool(is_on(enabled))


def _offload_tier(zero: Mapping[str, Any], name: str, old: str) -> str:
    section = zero.get(name)
    if isinstance(section, Mapping):
        device = section.get("device", "none")
        device = "none" if device == AUTO else device
        # A list or a section as a device is not hashable, and the look-up would raise TypeError
        if not isinstance(device, (str, type(None))) or device not in _PLACES:
            raise PlanError(f"{name}.device is {short_repr(device)}; known: none, cpu, nvme")
        return _PLACES[device]
    if section not in (None, False):
        raise PlanError(f"{name} must be a section with a device, not {short_repr(section)}")
    return "host" if old and zero.get(old) is True else "device"
