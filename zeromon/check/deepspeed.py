"""Checks of a DeepSpeed configuration. A check is one function, and one line in :data:`CHECKS`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from difflib import get_close_matches
from typing import Any

from zeromon.check.problem import AUTO, Config, Machine, Path, Problem, is_on, listed, number, whole
from zeromon.check.schema import Schema, schema
from zeromon.units import human_bytes

Check = Callable[[Config, Machine], Iterable[Problem]]

ZERO = "zero_optimization"

_ONLY_STAGE_3 = (
    "stage3_prefetch_bucket_size", "stage3_param_persistence_threshold",
    "stage3_model_persistence_threshold", "stage3_max_live_parameters", "stage3_max_reuse_distance",
    "stage3_gather_16bit_weights_on_model_save", "stage3_module_granularity_threshold",
    "stage3_use_all_reduce_for_fetch_params", "stage3_allgather_sequential", "prefetch_bucket_size",
    "param_persistence_threshold", "model_persistence_threshold", "max_live_parameters",
    "max_reuse_distance", "gather_16bit_weights_on_model_save", "sub_group_size", "offload_param",
    "zero_hpz_partition_size", "zero_quantized_weights", "zero_quantized_nontrainable_weights",
    "memory_efficient_linear",
)  # fmt: skip
"""DeepSpeedEngine._configure_zero_optimizer passes these to the stage 3 optimizer alone."""

_ONLY_STAGES_1_AND_2 = (
    "allgather_bucket_size", "use_multi_rank_bucket_allreduce", "ignore_unused_parameters",
    "round_robin_gradients", "parameter_alignment",
)  # fmt: skip
"""And these to that of stages 1 and 2."""

_NOT_STAGE_0 = (
    "reduce_bucket_size", "overlap_comm", "reduce_scatter", "contiguous_gradients",
    "allgather_partitions", "use_multi_rank_bucket_allreduce", "ignore_unused_parameters",
    "round_robin_gradients", "parameter_alignment",
)  # fmt: skip

_NEED_ZERO = (
    ("fp16", "fp16_master_weights_and_grads"),
    ("bf16", "bf16_master_weights_and_grads"),
    ("bf16", "bf16_optimizer_states"),
)

_RENAMED = {("aio", "thread_count"): "intra_op_parallelism", ("bfloat16",): "bf16"}

_LEAST_BUCKET = 1_000_000
_LARGE_SHARE = 0.1
_REMARKS = ("_", "//", "#", "comment")
"""How people begin a key that is a remark."""


def stage_of(config: Config) -> int | None:
    """The ZeRO stage; 0 where none is set, None where it is left open or makes no sense."""
    part = config.get(ZERO)
    if isinstance(part, bool):
        return int(part)
    value = config.get(ZERO, "stage", default=0)
    found = int(value) if isinstance(value, bool) else whole(value)
    return found if found in (0, 1, 2, 3) else None


def precision_of(config: Config, name: str) -> bool | None:
    """Whether bf16 or fp16 is enabled; None for "auto"."""
    part = config.get(name)
    if name == "bf16" and part is None:
        part = config.get("bfloat16")
    if part is True or part is False or part is None:
        return bool(part)
    value = part.get("enabled", False) if isinstance(part, Mapping) else False
    return None if value == AUTO else bool(is_on(value))


# ---- names and values -----------------------------------------------------------------------------


def names(config: Config, _: Machine) -> Iterator[Problem]:
    """Names that DeepSpeed does not know: ignored at the top, refused in the sections it models."""
    known = schema()["deepspeed"]
    fields = set(_fields(known["sections"][ZERO]))
    for name in config.data:
        key = str(name)
        if key in known["top"] or key in known["removed"] or (key,) in _RENAMED:
            continue
        if key in fields:
            yield config.problem(
                "ZM102", "warning", (key,), f"{key} has no effect here: it belongs in {ZERO}",
                f"move it into {ZERO}",
            )  # fmt: skip
        elif not key.lower().startswith(_REMARKS):
            near = get_close_matches(key, known["top"], 1, 0.8)
            yield config.problem(
                "ZM102", "warning" if near else "info", (key,),
                f"DeepSpeed knows no {key}, and ignores it without a word",
                f"did you mean {near[0]}?" if near else "remove it, if nothing else reads it",
            )  # fmt: skip
    for name, part in known["sections"].items():
        yield from _unknown(config, (name,), part, known)


def _fields(part: Schema) -> dict[str, Schema]:
    """By every name that is accepted."""
    found: dict[str, Schema] = dict(part["fields"])
    for field in part["fields"].values():
        if "alias" in field:
            found[field["alias"]] = field
    return found


def _unknown(config: Config, path: Path, part: Schema, known: Schema) -> Iterator[Problem]:
    fields = _fields(part)
    for name, value in config.section(*path).items():
        here = (*path, str(name))
        field = fields.get(str(name))
        if field is None:
            if here in _RENAMED or (path == (ZERO,) and name in known["removed_zero"]):
                continue
            near = get_close_matches(str(name), list(fields), 1, 0.6)
            strict = part["strict"]
            says = "refuses it" if strict else "ignores it without a word"
            yield config.problem(
                "ZM102", "error" if strict else "warning", here,
                f"{'.'.join(path)} has no {name}, and DeepSpeed {says}",
                f"did you mean {near[0]}?" if near else "remove it",
            )  # fmt: skip
        elif field["type"] == "section" and isinstance(value, Mapping):
            yield from _unknown(config, here, field["section"], known)


def values(config: Config, _: Machine) -> Iterator[Problem]:
    """Values of a wrong type or range, as DeepSpeed's own models read them."""
    for name, part in schema()["deepspeed"]["sections"].items():
        value = config.get(name)
        if name == ZERO and isinstance(value, bool):
            continue  # the old form
        if config.has(name) and not isinstance(value, Mapping):
            if value not in (None, AUTO):
                message = f"{name} must be a section of its own, not {_shown(value)}"
                fix = config.write("enabled", True)
                fix = f'"{name}": {{{fix}}}' if config.dialect != "yaml" else f"put it into {name}"
                yield config.problem("ZM103", "error", (name,), message, fix)
            continue
        yield from _wrong(config, (name,), part)
    yield from _ranges(config)


def _wrong(config: Config, path: Path, part: Schema) -> Iterator[Problem]:
    fields = _fields(part)
    if part.get("coerced"):
        return
    for name, value in config.section(*path).items():
        field = fields.get(str(name))
        if field is None or value == AUTO:
            continue
        here = (*path, str(name))
        if field["type"] == "section":
            if isinstance(value, Mapping):
                yield from _wrong(config, here, field["section"])
                continue
            if value is None and (field.get("optional") or field["section"].get("coerced")):
                continue
        fault = _fault(value, field, strict=part["strict"])
        if fault:
            severity = "error" if part["strict"] else "warning"
            message = f"{'.'.join(here)} {fault}, not {_shown(value)}"
            yield config.problem(
                "ZM103", severity, here, message, _right(config, name, value, field)
            )


def _right(config: Config, name: str, value: Any, field: Schema) -> str:
    exact = number(value)
    if field["type"] == "int" and isinstance(value, str) and exact is not None:
        return config.write(name, int(exact))
    if field["type"] == "choice":
        return f"one of {', '.join(map(str, field['choices']))}"
    kinds = {"bool": "true or false", "int": "a whole number", "section": "a section of its own"}
    return f"give {kinds.get(field['type'], 'what it asks for')}, or leave it out"


_SWITCHES = {"true", "false", "t", "f", "yes", "no", "y", "n", "on", "off", "1", "0"}


def _fault(value: Any, field: Schema, *, strict: bool) -> str:
    """What a value must be, where it is not; as pydantic coerces, "" where it can."""
    kind = field["type"]
    if value is None:
        return "" if field.get("optional") or not strict else f"must be {_a(kind, field)}"
    if kind == "any":
        return ""
    if not strict:  # nothing converts it: a "false" is true
        return f"must be {_a(kind, field)}" if kind == "bool" and isinstance(value, str) else ""
    found = _coerced(value, kind, field)
    if found is None:
        return f"must be {_a(kind, field)}"
    if kind in ("int", "float"):
        signs = {"gt": "more than", "ge": "at least", "lt": "less than", "le": "at most"}
        good = {
            "gt": lambda a, b: a > b, "ge": lambda a, b: a >= b,
            "lt": lambda a, b: a < b, "le": lambda a, b: a <= b,
        }  # fmt: skip
        for bound, words in signs.items():
            if bound in field and not good[bound](found, field[bound]):
                return f"must be {words} {field[bound]:g}"
    return ""


def _a(kind: str, field: Schema) -> str:
    if kind == "choice":
        return f"one of {', '.join(map(str, field['choices']))}"
    return {
        "bool": "true or false", "int": "a whole number", "float": "a number", "str": "a text",
        "Path": "a path", "section": "a section of its own",
    }[kind]  # fmt: skip


def _coerced(value: Any, kind: str, field: Schema) -> Any:
    """The value as pydantic takes it without strictness; None where it does not."""
    if kind == "bool":
        fine = value in (0, 1) if isinstance(value, (bool, int, float)) else False
        return True if fine or (isinstance(value, str) and value.lower() in _SWITCHES) else None
    if kind == "choice":
        exact = number(value) if isinstance(value, (str, float)) else value
        fine = any(value == c or (isinstance(c, int) and exact == c) for c in field["choices"])
        return True if fine else None
    if kind == "section":
        return value if isinstance(value, Mapping) else None
    if kind in ("str", "Path"):
        return value if isinstance(value, str) else None
    if isinstance(value, bool):
        return int(value)
    exact = number(value)
    if exact is None or kind == "float":
        return exact
    if isinstance(value, str):  # "5e8" is a number to nobody but a reader
        digits = value.strip().lstrip("+-").replace("_", "").partition(".")
        return exact if digits[0].isdigit() and not digits[2].strip("0") else None
    return exact if exact == int(exact) else None


def _shown(value: Any) -> str:
    if value is None:
        return "null"
    text = f'"{value}"' if isinstance(value, str) else str(value).lower()
    text = "a section" if isinstance(value, Mapping) else text
    return text if len(text) <= 40 else f"{text[:37]}..."


def _ranges(config: Config) -> Iterator[Problem]:
    """What DeepSpeed checks beyond its models."""
    for name in (
        "train_batch_size",
        "train_micro_batch_size_per_gpu",
        "gradient_accumulation_steps",
    ):
        value = config.get(name)
        if config.has(name) and value not in (AUTO, None) and not (whole(value) or 0) > 0:
            message = f"{name} must be a whole number from 1 on, not {_shown(value)}"
            yield config.problem("ZM103", "error", (name,), message, f'a number, or "{AUTO}"')
    for name in ("communication_data_type", "seq_parallel_communication_data_type"):
        value = config.get(name)
        if value not in (None, AUTO) and str(value).lower() not in ("fp16", "bf16", "fp32"):
            message = f"{name} must be fp16, bf16 or fp32, not {_shown(value)}"
            yield config.problem("ZM103", "error", (name,), message, config.write(name, "bf16"))
    if precision_of(config, "fp16") and not number(config.get("fp16", "loss_scale", default=0)):
        for name in ("loss_scale_window", "min_loss_scale"):
            value = number(config.get("fp16", name))
            if value is not None and value <= 0:
                message = f"fp16.{name} must be more than 0 where the loss scale is dynamic"
                default = {"loss_scale_window": 1000, "min_loss_scale": 1}[name]
                fix = config.write(name, default)
                yield config.problem("ZM103", "error", ("fp16", name), message, fix)


def deprecated(config: Config, _: Machine) -> Iterator[Problem]:
    """Names of the past: still read, renamed, or refused."""
    known = schema()["deepspeed"]
    version = f"DeepSpeed {known['version']}"
    for name, why in known["removed"].items():
        if config.has(name):
            message = (
                f"{version} refuses {name}: {why[:1].lower() if why[1:2].islower() else why[:1]}"
            )
            yield config.problem("ZM104", "error", (name,), message + why[1:], f"remove {name}")
    for name, why in known["removed_zero"].items():
        if config.has(ZERO, name):
            message = f"{version} refuses {name}: {why}"
            yield config.problem("ZM104", "error", (ZERO, name), message, f"remove {name}")
    if isinstance(config.get(ZERO), bool):
        message = f"{ZERO} as true or false is the form of the first releases, and means stage 1"
        fix = f'"{ZERO}": {{{config.write("stage", 1)}}}'
        yield config.problem("ZM104", "warning", (ZERO,), message, fix)
    for path, name in _RENAMED.items():
        if config.has(*path):
            message = f"{path[-1]} is now called {name}"
            ignored = path[0] == "aio"
            message += ", and ignored under its old name" if ignored else ""
            severity = "warning" if ignored else "info"
            yield config.problem("ZM104", severity, path, message, f"write {name}")
    for name, field in known["sections"][ZERO]["fields"].items():
        if "deprecated" in field and config.has(ZERO, name):
            new = field["deprecated"]
            message = f"{name} is deprecated: DeepSpeed's name for it is {new}"
            yield config.problem("ZM104", "warning", (ZERO, name), message, _new(config, name, new))
    if (number(config.get("optimizer", "params", "max_grad_norm")) or 0) > 0:
        path = ("optimizer", "params", "max_grad_norm")
        message = "DeepSpeed does not support max_grad_norm as a parameter of the optimizer"
        fix = config.write("gradient_clipping", config.get(*path)) + " at the top"
        yield config.problem("ZM104", "warning", path, message, fix)


def _new(config: Config, old: str, new: str) -> str:
    if old in ("cpu_offload", "cpu_offload_param"):
        inner = config.write("device", "cpu")
        return f'"{new}": {{{inner}}}' if config.dialect != "yaml" else f"{new}: {{{inner}}}"
    if old == "cpu_offload_use_pin_memory":
        return f"{config.write('pin_memory', config.get(ZERO, old))} in {new}"
    fields = schema()["deepspeed"]["sections"][ZERO]["fields"]
    return config.write(fields.get(new, {}).get("alias", new), config.get(ZERO, old))


# ---- what contradicts itself, or does nothing ------------------------------------------------------


def contradictions(config: Config, _: Machine) -> Iterator[Problem]:
    """What DeepSpeed refuses to start with, though each value alone is right."""
    path: Path
    for path in config.duplicates:
        where = "DeepSpeed refuses that, others take the last"
        message = f"{'.'.join(path)} is given twice: {where}"
        severity = "error" if config.dialect == "json" else "warning"
        yield config.problem("ZM105", severity, path, message, "keep one")
    stage = stage_of(config)
    if precision_of(config, "fp16") and precision_of(config, "bf16"):
        message = "fp16 and bf16 are both enabled, and DeepSpeed takes one"
        yield config.problem("ZM105", "error", ("fp16", "enabled"), message, _off(config))
    for old, new in (("cpu_offload", "offload_optimizer"), ("cpu_offload_param", "offload_param")):
        if config.has(ZERO, old) and config.has(ZERO, new):
            message = f"{old} and {new} are both given, and DeepSpeed refuses that"
            yield config.problem("ZM105", "error", (ZERO, old), message, f"remove {old}")
    for name, field in schema()["deepspeed"]["sections"][ZERO]["fields"].items():
        if "alias" in field and config.has(ZERO, name) and config.has(ZERO, field["alias"]):
            message = f"{name} and {field['alias']} are one setting, and DeepSpeed refuses both"
            yield config.problem("ZM105", "error", (ZERO, name), message, f"remove {name}")
    if is_on(config.get(ZERO, "legacy_stage1")):
        message = "legacy_stage1 raises an exception: that stage 1 is gone since DeepSpeed 0.5.9"
        fix = "remove legacy_stage1"
        yield config.problem("ZM105", "error", (ZERO, "legacy_stage1"), message, fix)
    if stage is None:
        return
    ratio = number(config.get(ZERO, "offload_optimizer", "ratio"))
    if ratio is not None and ratio < 1 and stage < 3:
        path = (ZERO, "offload_optimizer", "ratio")
        message = f"a part of the optimizer is offloaded only at stage 3, and this is stage {stage}"
        yield config.problem("ZM105", "error", path, message, config.write("ratio", 1.0))
    if is_on(config.get(ZERO, "compute_grad_norm")) is False and stage not in (1, 2):
        path = (ZERO, "compute_grad_norm")
        message = f"compute_grad_norm can be off only at stages 1 and 2, and this is stage {stage}"
        yield config.problem("ZM105", "error", path, message, "remove compute_grad_norm")
    if str(config.get("gradient_allreduce_op", default="")).lower() == "sum" and stage == 3:
        path = ("gradient_allreduce_op",)
        message = "gradients cannot be summed at stage 3"
        yield config.problem(
            "ZM105", "error", path, message, config.write("gradient_allreduce_op", "mean")
        )
    for part, name in _NEED_ZERO:
        if is_on(config.get(part, name)) and not stage:
            message = f"{name} needs ZeRO stage 1, 2 or 3, and this is stage 0"
            fix = config.write(name, False)
            yield config.problem("ZM105", "error", (part, name), message, fix)
    if is_on(config.get("bf16", "bf16_optimizer_states")) and not is_on(
        config.get("bf16", "bf16_master_weights_and_grads")
    ):
        message = "bf16_optimizer_states needs bf16_master_weights_and_grads"
        fix = config.write("bf16_master_weights_and_grads", True)
        yield config.problem("ZM105", "error", ("bf16", "bf16_optimizer_states"), message, fix)


def _off(config: Config) -> str:
    inner = config.write("enabled", False)
    return f"fp16: {{{inner}}}" if config.dialect == "yaml" else f'"fp16": {{{inner}}}'


def no_effect(config: Config, _: Machine) -> Iterator[Problem]:
    """Settings that the stage ignores, all in one problem."""
    stage = stage_of(config)
    if stage is None or not isinstance(config.get(ZERO), Mapping):
        return
    ignored = {0: (*_NOT_STAGE_0, *_ONLY_STAGE_3), 3: _ONLY_STAGES_1_AND_2}.get(
        stage, _ONLY_STAGE_3
    )
    found = [name for name in config.section(ZERO) if name in ignored and _says(config, name)]
    if found:
        does = "has" if len(found) == 1 else "have"
        message = f"{listed(found)} {does} no effect at stage {stage}"
        fix = "remove them" if len(found) > 1 else f"remove {found[0]}"
        yield config.problem("ZM106", "info", (ZERO, found[0]), message, fix)
    nvme = config.get(ZERO, "offload_optimizer", "device") == "nvme"
    if nvme and stage in (1, 2):
        message = f"at stage {stage} the optimizer goes to host memory: only stage 3 uses NVMe"
        path = (ZERO, "offload_optimizer", "device")
        yield config.problem("ZM106", "warning", path, message, config.write("device", "cpu"))


def _says(config: Config, name: str) -> bool:
    """Whether a setting asks for something; an offload to nowhere does not."""
    value = config.get(ZERO, name)
    if isinstance(value, Mapping):
        return value.get("device", "none") not in ("none", None, AUTO)
    return value is not None


# ---- communication and precision ------------------------------------------------------------------


def fp32_gradients(config: Config, _: Machine) -> Iterator[Problem]:
    """Gradients in fp32 beside parameters in a lower precision."""
    if not any(precision_of(config, name) is not False for name in ("bf16", "fp16")):
        return
    if str(config.get("communication_data_type", default="")).lower() == "fp32":
        message = "gradients are reduced in fp32: twice the bytes on the wire"
        fix = config.write("communication_data_type", "bf16")
        yield config.problem("ZM208", "info", ("communication_data_type",), message, fix)
    if config.get("data_types", "grad_accum_dtype") in ("fp32", "float32", "float"):
        message = "gradients are accumulated in fp32: twice their memory"
        path = ("data_types", "grad_accum_dtype")
        yield config.problem("ZM208", "info", path, message, config.write(path[-1], "bf16"))


def overlap_comm(config: Config, _: Machine) -> Iterator[Problem]:
    """The default is on at stage 3, off below; only what is written counts, and it may be meant."""
    stage = stage_of(config)
    path = (ZERO, "overlap_comm")
    if not stage or is_on(config.get(*path)) is not False:
        return
    fix = config.write("overlap_comm", True)
    if stage == 3:
        message = (
            "overlap_comm is off, though DeepSpeed turns it on at stage 3: the reduction of "
            "gradients runs on the stream that computes"
        )
        yield config.problem("ZM302", "info", path, message, fix)
        return
    size = number(config.get(ZERO, "reduce_bucket_size", default=5e8))
    price = f" of {human_bytes(size * 2)}" if size else ""
    message = f"overlap_comm is off: at stage {stage} backward waits for the reduction of gradients"
    yield config.problem("ZM302", "info", path, message, f"{fix}; costs a second bucket{price}")


def bucket_size(config: Config, machine: Machine) -> Iterator[Problem]:
    """Buckets so small that latency counts, or so large that memory does."""
    stage = stage_of(config)
    if not stage:
        return
    sizes = {"reduce_bucket_size": 5e8}
    if stage < 3:
        sizes["allgather_bucket_size"] = 5e8
    overlaps = is_on(config.get(ZERO, "overlap_comm")) and stage < 3
    for name, default in sizes.items():
        path = (ZERO, name)
        size = number(config.get(*path, default=default))
        if size is None or size <= 0:
            continue
        if size < _LEAST_BUCKET:
            message = f"{name} of {size:,.0f} elements makes many small messages"
            yield config.problem("ZM303", "warning", path, message, config.write(name, 50_000_000))
        nbytes = size * 2 * (2 if overlaps and name == "reduce_bucket_size" else 1)
        if machine.device_bytes and nbytes > _LARGE_SHARE * machine.device_bytes:
            share = nbytes / machine.device_bytes
            message = f"{name} takes {human_bytes(nbytes)} of the device, {share:.0%} of its memory"
            yield config.problem("ZM303", "warning", path, message, config.write(name, 200_000_000))


def fp16_with_zero3(config: Config, _: Machine) -> Iterator[Problem]:
    """A scaled loss, where the hardware may need none."""
    if precision_of(config, "fp16") and stage_of(config) == 3:
        message = "fp16 at stage 3 needs loss scaling, and skips steps that overflow"
        fix = f'"bf16": {{{config.write("enabled", True)}}} where the hardware has it'
        yield config.problem("ZM402", "info", ("fp16", "enabled"), message, fix)


def loss_scale(config: Config, _: Machine) -> Iterator[Problem]:
    """Loss scaling that is fixed, starts too high, or moves too fast."""
    part = config.section("fp16")
    if not part or precision_of(config, "fp16") is False:
        return
    fixed = number(part.get("loss_scale", 0))
    if fixed is not None and fixed > 0:
        message = f"the loss scale is fixed at {fixed:g}: it does not follow an overflow"
        fix = config.write("loss_scale", 0)
        yield config.problem("ZM404", "warning", ("fp16", "loss_scale"), message, fix)
        return
    window, hysteresis = (
        number(part.get(name)) or usual
        for name, usual in (("loss_scale_window", 1000), ("hysteresis", 2))
    )
    often = (
        f"skips about {hysteresis:g} of {window + 1 + hysteresis:g} steps to find its limit anew"
    )
    limits: tuple[tuple[str, Callable[[float], bool], str, int], ...] = (
        ("initial_scale_power", lambda x: x > 24, "makes the first steps overflow one by one", 16),
        ("loss_scale_window", lambda x: 0 < x < 100, often, 1000),
        ("hysteresis", lambda x: x < 1, "is counted down to 1, so the scale is never lowered", 2),
    )
    for name, is_bad, why, better in limits:
        value = number(part.get(name))
        if value is not None and is_bad(value):
            message = f"{name} of {value:g} {why}"
            fix = config.write(name, better)
            yield config.problem("ZM404", "warning", ("fp16", name), message, fix)


def no_mixed_precision(config: Config, _: Machine) -> Iterator[Problem]:
    """ZeRO in fp32."""
    if not stage_of(config):
        return
    if any(precision_of(config, name) is not False for name in ("bf16", "fp16")):
        return
    if config.get("torch_autocast", "enabled") not in (None, False):
        return
    message = "neither bf16 nor fp16 is enabled: parameters, gradients and messages are fp32"
    fix = f'"bf16": {{{config.write("enabled", True)}}}'
    yield config.problem("ZM405", "info", (ZERO, "stage"), message, fix)


# ---- offload --------------------------------------------------------------------------------------


def pinned_memory(config: Config, _: Machine) -> Iterator[Problem]:
    """Pinned is the default; pageable copies do not overlap."""
    for name in ("offload_optimizer", "offload_param"):
        part = config.section(ZERO, name)
        used = part.get("device") in ("cpu", "nvme")
        if used and is_on(part.get("pin_memory")) is False:
            message = f"{name} copies through pageable memory: slower, and not beside computation"
            path = (ZERO, name, "pin_memory")
            yield config.problem(
                "ZM502", "warning", path, message, config.write("pin_memory", True)
            )


def nvme(config: Config, _: Machine) -> Iterator[Problem]:
    """Offload to NVMe: a path is needed, and the queue decides the bandwidth."""
    used = [
        name
        for name in ("offload_optimizer", "offload_param")
        if config.get(ZERO, name, "device") == "nvme"
    ]
    if not used or stage_of(config) not in (3, None):
        return
    for name in used:
        if config.get(ZERO, name, "nvme_path") in (None, ""):
            message = f"{name} goes to NVMe, and no nvme_path says where"
            fix = config.write("nvme_path", "/local_nvme")
            yield config.problem("ZM504", "error", (ZERO, name, "device"), message, fix)
    part = config.section("aio")
    if not part:
        message = "NVMe without an aio section runs with a queue depth of 8 on one thread"
        fix = f'"aio": {{{config.write("queue_depth", 32)}}}; ds_nvme_tune measures what is best'
        yield config.problem("ZM504", "info", (ZERO, used[0], "device"), message, fix)
        return
    limits: tuple[tuple[str, float, float, int], ...] = (
        ("queue_depth", 4, 1024, 32), ("block_size", 64 << 10, 64 << 20, 1 << 20),
        ("intra_op_parallelism", 1, 64, 1),
    )  # fmt: skip
    for name, least, most, better in limits:
        value = number(part.get(name))
        if value is not None and not least <= value <= most:
            side = "low" if value < least else "high"
            message = f"aio.{name} of {value:g} is too {side} for the bandwidth of a drive"
            yield config.problem(
                "ZM504", "warning", ("aio", name), message, config.write(name, better)
            )


# ---- batch and checkpoints ------------------------------------------------------------------------

_BATCH = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")


def batch(config: Config, machine: Machine) -> Iterator[Problem]:
    """DeepSpeed asserts that the three agree, over the ranks that share the data."""
    total, micro, steps = (whole(config.get(name)) for name in _BATCH)
    if (total or 1) < 1 or (micro or 1) < 1 or (steps or 1) < 1:
        return  # said as a wrong value
    ranks = machine.devices or config.ranks
    split = _other_parallelism(config)
    if total and micro and steps:
        each = micro * steps
        if ranks and not split and total != each * ranks:
            product = f"{micro} x {steps} x {ranks} ranks is {each * ranks}"
            message = f"train_batch_size is {total}, but {product}"
            fix = config.write("train_batch_size", each * ranks)
            yield config.problem("ZM602", "error", ("train_batch_size",), message, fix)
        elif total % each:
            message = f"train_batch_size of {total} is no multiple of {micro} x {steps} = {each}"
            fix = config.write("train_batch_size", AUTO)
            yield config.problem("ZM602", "error", ("train_batch_size",), message, fix)
    elif total and ranks and not split:
        known = (micro or 1) * (steps or 1) * ranks
        if total % known and AUTO not in (config.get(name) for name in _BATCH):
            parts = [*(str(n) for n in (micro, steps) if n), f"{ranks} ranks"]
            message = f"train_batch_size of {total} is no multiple of {' x '.join(parts)}"
            fix = config.write("train_batch_size", -(-total // known) * known)
            yield config.problem("ZM602", "error", ("train_batch_size",), message, fix)
    given = [config.has(name) for name in _BATCH]
    if isinstance(config.get(ZERO), Mapping) and not given[0] and not given[1] and given[2]:
        message = "neither train_batch_size nor train_micro_batch_size_per_gpu is given"
        fix = config.write("train_micro_batch_size_per_gpu", AUTO)
        severity = "info"  # accelerate fills it in, DeepSpeed alone refuses
        yield config.problem("ZM602", severity, ("gradient_accumulation_steps",), message, fix)
    if micro and ranks and not split and not (total and total != micro * (steps or 1) * ranks):
        product = f"{micro} x {steps or 1} x {ranks} ranks = {micro * (steps or 1) * ranks}"
        message = f"a step takes {product} samples"
        path = ("train_micro_batch_size_per_gpu",)
        yield config.problem("ZM603", "info", path, message, "nothing", quiet=True)


def _other_parallelism(config: Config) -> bool:
    """Whether ranks may share samples, so that the ranks of the launch do not count them."""
    return any(config.has(name) for name in ("tensor_parallel", "sequence_parallel_size",
                                             "expert_parallel", "pipeline"))  # fmt: skip


def save_without_gather(config: Config, _: Machine) -> Iterator[Problem]:
    """Stage 3 saves shards unless it is told to gather them."""
    name = "stage3_gather_16bit_weights_on_model_save"
    others = ("gather_16bit_weights_on_model_save", "stage3_gather_fp16_weights_on_model_save")
    if stage_of(config) != 3 or any(config.has(ZERO, other) for other in others):
        return
    value = config.get(ZERO, name)
    if value != AUTO and not is_on(value):
        message = "a model is saved as shards, which zero_to_fp32.py must put together"
        path = (ZERO, name) if config.has(ZERO, name) else (ZERO, "stage")
        yield config.problem("ZM701", "info", path, message, config.write(name, True))


CHECKS: tuple[Check, ...] = (
    names,
    values,
    deprecated,
    contradictions,
    no_effect,
    fp32_gradients,
    overlap_comm,
    bucket_size,
    fp16_with_zero3,
    loss_scale,
    no_mixed_precision,
    pinned_memory,
    nvme,
    batch,
    save_without_gather,
)
