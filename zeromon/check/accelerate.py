"""Checks of an accelerate configuration. A check is one function, and one line in :data:`CHECKS`."""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from zeromon.base.units import human_bytes
from zeromon.check import fsdp_options
from zeromon.check.deepspeed.fields import ZERO, fields_by_name, stage_of
from zeromon.check.deepspeed.performance import NO_BF16
from zeromon.check.problem import (
    NAMES,
    Config,
    Machine,
    Path,
    Problem,
    did_you_mean,
    join_names,
    load_schema,
    set_instead,
    without_effect,
    yaml_literal,
)
from zeromon.memory.config_files import AUTO, is_on, parse_number

Check = Callable[[Config, "Config | None", Machine], Iterable[Problem]]
"""A check of (accelerate configuration, the DeepSpeed configuration that it names or None, machine)."""

DEEPSPEED, FSDP = "deepspeed_config", "fsdp_config"

_BESIDE_A_FILE: Sequence[str] = NAMES["accelerate"]["refused_beside_a_file"]
"""Settings that DeepSpeedPlugin._deepspeed_config_checks refuses together with a DeepSpeed file."""

_OLD = {"fp16": "mixed_precision", "dynamo_backend": "dynamo_config"}
"""Old name of a setting -> its new name, as BaseConfig.process_config converts it."""


def kind_of(config: Config) -> str:
    """Returns ``distributed_type`` in capitals, such as DEEPSPEED or FSDP; "" where it is missing."""
    return str(config.get("distributed_type", default="")).upper()


def fsdp_options_of(config: Config) -> fsdp_options.Options:
    """Returns the FSDP options of *config*."""
    return fsdp_options.Options(config=config, section=(FSDP,), reader="accelerate")


# ---- names and values -----------------------------------------------------------------------------


def unknown_names(config: Config, _ds_config: Config | None, _: Machine) -> Iterator[Problem]:
    """Yields unknown and old names; accelerate refuses unknown ones at the top, not in sections."""
    library = load_schema()["accelerate"]
    sagemaker = config.get("compute_environment") == "AMAZON_SAGEMAKER"
    # accelerate reads a file for SageMaker by another class, with settings of its own
    for name in () if sagemaker else config.data:
        if str(name) not in library["top"] and str(name) not in _OLD:
            fix = did_you_mean(name, library["top"], 0.7) or f"remove {name}"
            message = f"accelerate has no setting {name}, and refuses the file"
            yield config.problem("ZM102", "error", (str(name),), message, fix)
    yield from _ignored_settings(config)
    yield from fsdp_options.unknown_options(fsdp_options_of(config))
    for old, new in _OLD.items():
        if config.has(old):
            message = f"{old} is the old form of {new}"
            section = f"{new}: {{{old}: {config.get(old)}}}"
            setting = "mixed_precision: fp16" if old == "fp16" else section
            yield config.problem("ZM104", "info", (old,), message, set_instead(old, setting))


def _ignored_settings(config: Config) -> Iterator[Problem]:
    """Yields settings of the section for DeepSpeed that accelerate ignores.

    One problem for all that a DeepSpeed file takes, with that file, and one for each other.
    """
    library, misplaced = load_schema()["accelerate"], list[str]()
    for name in config.section(DEEPSPEED):
        if name in library["options"] or name in library[DEEPSPEED]:
            continue
        field = _zero_fields().get(str(name), {"type": ""})
        # offload_optimizer: cpu is offload_optimizer_device misspelt
        fits = field["type"] != "section" or isinstance(config.get(DEEPSPEED, name), Mapping)
        if fits and (field["type"] or name in load_schema()["deepspeed"]["top"]):
            misplaced.append(str(name))
            continue
        fix = did_you_mean(name, library[DEEPSPEED], 0.7) or f"remove {name}"
        message = f"{DEEPSPEED} has no {name}: accelerate ignores the setting"
        yield config.problem("ZM102", "warning", (DEEPSPEED, str(name)), message, fix)
    if misplaced:
        plural = "settings" if len(misplaced) > 1 else "setting"
        message = f"{DEEPSPEED} has no {join_names(misplaced)}: accelerate ignores the {plural}"
        path = (DEEPSPEED, misplaced[0])
        yield config.problem("ZM102", "warning", path, message, _in_a_file(config, misplaced))


def _zero_fields() -> Mapping[str, Any]:
    return fields_by_name(load_schema()["deepspeed"]["sections"][ZERO])


def _in_a_file(config: Config, misplaced: list[str]) -> str:
    """Returns the DeepSpeed file in which the *misplaced* settings work, and what it replaces.

    It has what accelerate's section sets, too, because accelerate refuses those settings beside a file.
    """
    section, zero_fields = config.section(DEEPSPEED), _zero_fields()
    top = {name: section[name] for name in misplaced if name not in zero_fields}
    top |= {name: {"enabled": True} for name in _HALF_TYPES if top.get(name) is True}
    zero = {name: section[name] for name in misplaced if name in zero_fields}
    inner = top.pop(ZERO, None)
    zero |= inner if isinstance(inner, Mapping) else {}
    file = section.get("deepspeed_config_file")
    if file:
        change = f"remove {join_names(misplaced)}, and add to {file}"
        return f"{change}:\n{_json_block(top | ({ZERO: zero} if zero else {}))}"
    excluded = [name for name in _BESIDE_A_FILE if name in section and name not in misplaced]
    excluded += ["mixed_precision"] if config.has("mixed_precision") else []
    # The settings of accelerate's section in DeepSpeed's names
    settings: dict[str, Any] = {"stage": section.get("zero_stage", zero.get("stage", 2))}
    for role in ("optimizer", "param"):
        device = section.get(f"offload_{role}_device")
        if device in ("cpu", "nvme"):
            path = section.get(f"offload_{role}_nvme_path")
            offload = zero.get(f"offload_{role}")
            settings[f"offload_{role}"] = (dict(offload) if isinstance(offload, Mapping) else {}) | (
                {"device": device} | ({"nvme_path": path} if device == "nvme" else {})
            )
    if is_on(section.get("zero3_save_16bit_model")):
        settings["stage3_gather_16bit_weights_on_model_save"] = True
    content = {ZERO: zero | settings, **top}
    content |= {key: section[key] for key in _OF_BOTH if key in section}
    half_type = config.get("mixed_precision")
    if half_type in _HALF_TYPES:
        content[str(half_type)] = {"enabled": True}
    if "train_batch_size" not in content:
        content.setdefault("train_micro_batch_size_per_gpu", AUTO)
    change = f"set deepspeed_config_file: ds.json, remove {join_names([*misplaced, *excluded])}"
    return f"{change}, and write ds.json:\n{_json_block(content)}"


def _json_block(content: Any) -> str:
    return json.dumps(_as_json(content), indent=2, default=str)


def _as_json(value: Any) -> Any:
    """Returns a value of YAML as JSON: YAML 1.1 reads 5e8 as a text, which DeepSpeed refuses."""
    if isinstance(value, Mapping):
        return {str(name): _as_json(inner) for name, inner in value.items()}
    number = parse_number(value) if isinstance(value, (str, float)) else None
    if number is None:
        return value
    is_count = isinstance(value, str) or number >= 1e6  # 1.0 stays a float, 5.0e+8 does not
    return int(number) if is_count and number.is_integer() else number


_HALF_TYPES = ("bf16", "fp16")
_OF_BOTH = ("gradient_accumulation_steps", "gradient_clipping")


def wrong_values(config: Config, _ds_config: Config | None, _: Machine) -> Iterator[Problem]:
    """Yields values that accelerate refuses, and processes that do not divide over the machines."""
    library = load_schema()["accelerate"]
    if not config.has("distributed_type"):
        fix = "distributed_type: FSDP, DEEPSPEED or MULTI_GPU"
        yield config.problem("ZM103", "error", (), "distributed_type is missing", fix)
    kinds: list[str] = library["distributed_type"]
    sagemaker = config.get("compute_environment") == "AMAZON_SAGEMAKER"
    value = config.get("distributed_type")
    if isinstance(value, str) and value not in kinds and not sagemaker:
        message = f"there is no distributed_type {value}"
        fix = f"one of {', '.join(kinds)}"
        yield config.problem("ZM103", "error", ("distributed_type",), message, fix)
    if config.get("mixed_precision") is False:
        message = "an unquoted no is false in YAML, and accelerate expects a text"
        fix = "mixed_precision: 'no'"
        yield config.problem("ZM103", "error", ("mixed_precision",), message, fix)
    for name in (DEEPSPEED, FSDP):
        if config.has(name) and not isinstance(config.get(name), (Mapping, type(None))):
            message = f"{name} must be a section of its own"
            yield config.problem("ZM103", "error", (name,), message, "indent its settings below it")
    for path, choices in _allowed_choices(config).items():
        value = config.get(*path)
        if value is not None and str(value).lower() not in choices:
            message = f"there is no {path[-1]} {value}"
            yield config.problem(
                "ZM103", "error", path, message, f"one of {', '.join(map(yaml_literal, choices))}"
            )
    machines, ranks = (config.whole("num_machines"), config.whole("num_processes"))
    if machines and ranks and machines > 0 and ranks > 0 and ranks % machines:
        message = f"{ranks} processes do not divide over {machines} machines: some are left out"
        fix = f"num_processes: {ranks - ranks % machines or machines}"
        yield config.problem("ZM105", "warning", ("num_processes",), message, fix)


def _allowed_choices(config: Config) -> dict[Path, list[str]]:
    library = load_schema()["accelerate"]
    choices: dict[Path, list[str]] = {}
    if config.get("mixed_precision") is not False:  # which has a message of its own
        choices["mixed_precision",] = library["mixed_precision"]
    if kind_of(config) == "DEEPSPEED":
        choices[DEEPSPEED, "zero_stage"] = ["0", "1", "2", "3"]
        for name in ("offload_optimizer_device", "offload_param_device"):
            choices[DEEPSPEED, name] = ["none", "cpu", "nvme"]
        choices[DEEPSPEED, "deepspeed_multinode_launcher"] = library["deepspeed_multinode_launcher"]
    return choices


# ---- DeepSpeed ------------------------------------------------------------------------------------


def excluding_settings(config: Config, ds_config: Config | None, _: Machine) -> Iterator[Problem]:
    """Yields duplicate keys, settings that a DeepSpeed file excludes, zero3_init_flag below stage 3."""
    for path in config.duplicates:
        message = f"{'.'.join(path)} is given twice, and the last one counts"
        yield config.problem("ZM105", "warning", path, message, "keep one")
    if kind_of(config) != "DEEPSPEED":
        return
    if config.get(DEEPSPEED, "deepspeed_config_file"):
        excluded: list[Path] = [
            (DEEPSPEED, name) for name in _BESIDE_A_FILE if config.has(DEEPSPEED, name)
        ]
        if config.get("mixed_precision") not in (None, False):
            excluded.append(("mixed_precision",))
        for path in excluded:
            message = f"accelerate refuses {path[-1]} beside deepspeed_config_file"
            fix = f"remove {path[-1]} here, and set it in the DeepSpeed file"
            yield config.problem("ZM105", "error", path, message, fix)
    stage = _zero_stage(config, ds_config)
    if config.is_on(DEEPSPEED, "zero3_init_flag") and stage is not None and stage < 3:
        message = f"zero3_init_flag is for stage 3, and this is stage {stage}: accelerate turns it off"
        path = (DEEPSPEED, "zero3_init_flag")
        yield config.problem("ZM105", "warning", path, message, "zero3_init_flag: false")


def _zero_stage(config: Config, ds_config: Config | None) -> int | None:
    """Returns the ZeRO stage of the DeepSpeed file, else of the YAML (2 by default); None if unknown."""
    if config.get(DEEPSPEED, "deepspeed_config_file"):
        return stage_of(ds_config) if ds_config is not None else None
    return config.whole(DEEPSPEED, "zero_stage", default=2)


def shards_parameters(config: Config, ds_config: Config | None) -> bool:
    """Returns whether a rank of the launch keeps a part of the parameters: ZeRO stage 3, or FSDP."""
    if kind_of(config) == "FSDP":
        return str(config.get(FSDP, "fsdp_sharding_strategy")) not in ("3", "NO_SHARD")
    return kind_of(config) == "DEEPSPEED" and _zero_stage(config, ds_config) == 3


def no_effect(config: Config, ds_config: Config | None, _: Machine) -> Iterator[Problem]:
    """Yields one problem for all settings that the ZeRO stage ignores."""
    stage = _zero_stage(config, ds_config)
    if kind_of(config) != "DEEPSPEED" or stage is None or stage >= 3:
        return
    unused = []
    if str(config.get(DEEPSPEED, "offload_param_device", default="none")).lower() != "none":
        unused.append("offload_param_device")
    if config.is_on(DEEPSPEED, "zero3_save_16bit_model"):
        unused.append("zero3_save_16bit_model")
    if unused:
        message, fix = without_effect(unused, f"at stage {stage}")
        yield config.problem("ZM106", "info", (DEEPSPEED, unused[0]), message, fix)


def nvme_paths(config: Config, _ds_config: Config | None, _: Machine) -> Iterator[Problem]:
    """Yields offloads to NVMe without a path, which go to a folder ``none``, and paths without one."""
    in_a_file = kind_of(config) != "DEEPSPEED" or config.get(DEEPSPEED, "deepspeed_config_file")
    for name in ("optimizer", "param"):
        device, path = f"offload_{name}_device", f"offload_{name}_nvme_path"
        target, folder = config.get(DEEPSPEED, device), config.get(DEEPSPEED, path)
        if target == "nvme" and not folder and not in_a_file:
            message, fix = f"{device} is nvme, but {path} is missing", f"{path}: /local_nvme"
            yield config.problem("ZM504", "error", (DEEPSPEED, device), message, fix)
        if target == "cpu" and folder not in (None, "", "none"):
            message = f"{device} is cpu, and {path} has no effect"
            fix = f"{device}: nvme, or remove {path}"
            yield config.problem("ZM106", "info", (DEEPSPEED, path), message, fix)


def at_stage_3(config: Config, ds_config: Config | None, machine: Machine) -> Iterator[Problem]:
    """Yields a model that every rank builds whole before its split, and one that is saved as shards."""
    if kind_of(config) != "DEEPSPEED" or _zero_stage(config, ds_config) != 3:
        return
    path: Path = (DEEPSPEED, "zero3_init_flag")
    if config.is_on(*path) is False:
        model = machine.model
        size = f"{human_bytes(4 * model.params)} in fp32" if model else "the whole model"
        message = f"every rank builds {size} before stage 3 splits it"
        yield config.problem("ZM704", "warning", path, message, "zero3_init_flag: true")
    name, gather = "zero3_save_16bit_model", "stage3_gather_16bit_weights_on_model_save"
    message = "a model is saved as shards, which zero_to_fp32.py must merge"
    if ds_config is not None:
        if ds_config.get(ZERO, gather) == AUTO:  # accelerate fills in false
            path = (DEEPSPEED, "deepspeed_config_file")
            fix = f"{ds_config.write(gather, True)} in that file"
            yield config.problem("ZM701", "info", path, message, fix)
    # A setting of DeepSpeed's here is ignored, and unknown_names() moves it to where it works
    elif not any(config.is_on(DEEPSPEED, setting) for setting in (name, gather)):
        path = (DEEPSPEED, name if config.has(DEEPSPEED, name) else "zero_stage")
        yield config.problem("ZM701", "info", path, message, f"{name}: true")


def bf16_device(config: Config, _ds_config: Config | None, machine: Machine) -> Iterator[Problem]:
    """Yields bf16 on a device that emulates it."""
    if machine.device in NO_BF16 and config.get("mixed_precision") == "bf16":
        message = f"a {machine.device.upper()} has no units for bf16: it is emulated, and slow"
        path = ("mixed_precision",)
        yield config.problem("ZM406", "warning", path, message, "mixed_precision: fp16")


def idle_devices(config: Config, _ds_config: Config | None, machine: Machine) -> Iterator[Problem]:
    """Yields fewer processes than the machines have devices: num_processes counts all machines."""
    ranks, hosts = config.whole("num_processes"), config.whole("num_machines")
    gpus = machine.devices_per_host
    # gpu_ids leaves devices out on purpose
    selects = config.get("gpu_ids") not in (None, "all")
    if ranks and hosts and hosts > 1 and gpus and ranks < hosts * gpus and not selects:
        message = f"num_processes is {ranks}, for all {hosts} machines of {gpus} devices together"
        path = ("num_processes",)
        yield config.problem("ZM602", "warning", path, message, config.write(path[0], hosts * gpus))


def mixed_precision(config: Config, _ds_config: Config | None, _: Machine) -> Iterator[Problem]:
    """Yields fp16 at ZeRO stage 3, and training in fp32."""
    if kind_of(config) != "DEEPSPEED" or config.get(DEEPSPEED, "deepspeed_config_file"):
        return
    stage = _zero_stage(config, None)
    value = str(config.get("mixed_precision", default="no")).lower()
    if value == "fp16" and stage == 3:
        message = "fp16 at stage 3 needs loss scaling, and skips steps that overflow"
        fix = "mixed_precision: bf16 where the hardware has it"
        yield config.problem("ZM402", "info", ("mixed_precision",), message, fix)
    if value in ("no", "none") and stage and config.get("mixed_precision") is not False:
        message = "without mixed_precision parameters, gradients and messages are fp32"
        path: Path = ("mixed_precision",) if config.has("mixed_precision") else (DEEPSPEED,)
        yield config.problem("ZM405", "info", path, message, "mixed_precision: bf16")


def fsdp_problems(config: Config, _ds_config: Config | None, _: Machine) -> Iterator[Problem]:
    """Yields the problems of the FSDP options."""
    for check in fsdp_options.CHECKS if kind_of(config) == "FSDP" else ():
        yield from check(fsdp_options_of(config))


CHECKS: tuple[Check, ...] = (
    unknown_names, wrong_values, excluding_settings, no_effect, nvme_paths, mixed_precision,
    at_stage_3, fsdp_problems, bf16_device, idle_devices,
)  # fmt: skip
