"""Checks of names and values against DeepSpeed's own models."""

import operator
import re
from collections.abc import Collection, Iterator, Mapping
from difflib import get_close_matches
from typing import Any

from zeromon.check.problem import (
    NAMES,
    Config,
    Machine,
    Path,
    Problem,
    Schema,
    did_you_mean,
    join_names,
    load_schema,
    set_instead,
)
from zeromon.memory.config_files import AUTO, is_on, parse_number, parse_whole

_RENAMED = {("aio", "thread_count"): "intra_op_parallelism", ("bfloat16",): "bf16"}

_REMARKS = ("_", "//", "#", "comment")
"""Prefixes of keys that users add as comments."""


def unknown_names(config: Config, _: Machine) -> Iterator[Problem]:
    """Yields unknown names. DeepSpeed ignores them at the top level and refuses them in its models."""
    library = load_schema()["deepspeed"]
    fields = set(fields_by_name(library["sections"][ZERO]))
    for name in config.data:
        key = str(name)
        if key in library["top"] or key in library["removed"] or (key,) in _RENAMED:
            continue
        if key in fields:
            yield config.problem(
                "ZM102", "warning", (key,), f"{key} has no effect here: it belongs in {ZERO}",
                f"move it into {ZERO}",
            )  # fmt: skip
        elif not key.lower().startswith(_REMARKS):
            # Other programs keep keys of their own here: only a near name is surely a mistake
            hint = did_you_mean(key, library["top"], 0.8)
            yield config.problem(
                "ZM102", "warning" if hint else "info", (key,),
                f"DeepSpeed does not know {key} and silently ignores it",
                hint or "remove it, if nothing else reads it",
            )  # fmt: skip
    for name, section in library["sections"].items():
        yield from _unknown_fields(config, (name,), section, library)


def fields_by_name(section: Schema) -> dict[str, Schema]:
    """Returns the fields of a section by name and alias."""
    fields: dict[str, Schema] = dict(section["fields"])
    for field in section["fields"].values():
        if "alias" in field:
            fields[field["alias"]] = field
    return fields


def _unknown_fields(config: Config, path: Path, section: Schema, library: Schema) -> Iterator[Problem]:
    fields = fields_by_name(section)
    for name, value in config.section(*path).items():
        field_path = (*path, str(name))
        field = fields.get(str(name))
        if field is None:
            if field_path in _RENAMED or (path == (ZERO,) and name in library["removed_zero"]):
                continue
            strict = section["strict"]
            reaction = "refuses it" if strict else "silently ignores it"
            yield config.problem(
                "ZM102", "error" if strict else "warning", field_path,
                f"{'.'.join(path)} has no {name}, and DeepSpeed {reaction}",
                did_you_mean(name, fields) or "remove it",
            )  # fmt: skip
        elif field["type"] == "section" and isinstance(value, Mapping):
            yield from _unknown_fields(config, field_path, field["section"], library)


def wrong_values(config: Config, _: Machine) -> Iterator[Problem]:
    """Yields values whose type or range DeepSpeed's models refuse or misread."""
    for name, section in load_schema()["deepspeed"]["sections"].items():
        value = config.get(name)
        if name == ZERO and isinstance(value, bool):
            continue  # the old form
        if config.has(name) and not isinstance(value, Mapping):
            if value not in (None, AUTO):
                message = f"{name} must be a section of its own, not {_value_text(value)}"
                fix = config.write("enabled", True)
                fix = f'"{name}": {{{fix}}}' if config.dialect != "yaml" else f"put it into {name}"
                yield config.problem("ZM103", "error", (name,), message, fix)
            continue
        yield from _wrong_fields(config, (name,), section)
    yield from _out_of_range(config)


def _wrong_fields(config: Config, path: Path, section: Schema) -> Iterator[Problem]:
    fields = fields_by_name(section)
    # A validator of DeepSpeed converts this section before pydantic checks the types
    if section.get("coerced"):
        return
    for name, value in config.section(*path).items():
        field = fields.get(str(name))
        if field is None or value == AUTO:
            continue
        field_path = (*path, str(name))
        if field["type"] == "section":
            if isinstance(value, Mapping):
                yield from _wrong_fields(config, field_path, field["section"])
                continue
            if value is None and (field.get("optional") or field["section"].get("coerced")):
                continue
        fault = _value_fault(value, field, strict=section["strict"])
        if fault:
            severity = "error" if section["strict"] else "warning"
            message = f"{'.'.join(field_path)} {fault}, not {_value_text(value)}"
            yield config.problem(
                "ZM103", severity, field_path, message, _right_value(config, name, value, field)
            )


def _right_value(config: Config, name: str, value: Any, field: Schema) -> str:
    exact = parse_number(value)
    if field["type"] == "int" and isinstance(value, str) and exact is not None:
        return config.write(name, int(exact))
    if field["type"] == "choice":
        return f"one of {', '.join(map(str, field['choices']))}"
    if field["type"] == "bool" and is_on(value) is not None:
        return config.write(name, is_on(value))
    kinds = {"bool": "true or false", "int": "a whole number", "section": "a section of its own"}
    return f"remove {name}, or give {kinds.get(field['type'], 'a value of its type')}"


_SWITCHES = {"true", "false", "t", "f", "yes", "no", "y", "n", "on", "off", "1", "0"}


def _value_fault(value: Any, field: Schema, *, strict: bool) -> str:
    """Returns the requirement that a value violates after pydantic's coercion; "" for a valid value."""
    kind = field["type"]
    if value is None:
        return "" if field.get("optional") or not strict else f"must be {_type_phrase(kind, field)}"
    if kind == "any":
        return ""
    if not strict:  # DeepSpeed does not convert it: the text "false" is true
        return (
            f"must be {_type_phrase(kind, field)}" if kind == "bool" and isinstance(value, str) else ""
        )
    coerced = _coerced_value(value, kind, field)
    if coerced is None:
        return f"must be {_type_phrase(kind, field)}"
    if kind in ("int", "float"):
        # By the names of pydantic, which are those of the operators
        signs = {"gt": "more than", "ge": "at least", "lt": "less than", "le": "at most"}
        for bound, phrase in signs.items():
            if bound in field and not getattr(operator, bound)(coerced, field[bound]):
                return f"must be {phrase} {field[bound]:g}"
    return ""


def _type_phrase(kind: str, field: Schema) -> str:
    if kind == "choice":
        return f"one of {', '.join(map(str, field['choices']))}"
    return {
        "bool": "true or false", "int": "a whole number", "float": "a number", "str": "a text",
        "Path": "a path", "section": "a section of its own",
    }[kind]  # fmt: skip


def _coerced_value(value: Any, kind: str, field: Schema) -> Any:
    """Returns the value after pydantic's lax coercion; None where pydantic refuses the value."""
    if kind == "bool":
        is_valid = value in (0, 1) if isinstance(value, (bool, int, float)) else False
        return True if is_valid or (isinstance(value, str) and value.lower() in _SWITCHES) else None
    if kind == "choice":
        exact = parse_number(value) if isinstance(value, (str, float)) else value
        is_valid = any(value == c or (isinstance(c, int) and exact == c) for c in field["choices"])
        return True if is_valid else None
    if kind == "section":
        return value if isinstance(value, Mapping) else None
    if kind in ("str", "Path"):
        return value if isinstance(value, str) else None
    if isinstance(value, bool):
        return int(value)
    exact = parse_number(value)
    if exact is None or kind == "float":
        return exact
    if isinstance(value, str):  # pydantic takes no exponent in a text for an int: "5e8"
        digits = value.strip().lstrip("+-").replace("_", "").partition(".")
        return exact if digits[0].isdigit() and not digits[2].strip("0") else None
    return exact if exact == int(exact) else None


def _value_text(value: Any) -> str:
    if value is None:
        return "null"
    literal = f'"{value}"' if isinstance(value, str) else str(value).lower()
    literal = "a section" if isinstance(value, Mapping) else literal
    return literal if len(literal) <= 40 else f"{literal[:37]}..."


def _out_of_range(config: Config) -> Iterator[Problem]:
    """Yields values that DeepSpeed's code refuses beyond its models."""
    for name in ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"):
        value = config.get(name)
        if config.has(name) and value not in (AUTO, None) and not (parse_whole(value) or 0) > 0:
            message = f"{name} must be a whole number from 1 on, not {_value_text(value)}"
            yield config.problem("ZM103", "error", (name,), message, f'a number, or "{AUTO}"')
        elif isinstance(value, str) and value != AUTO:  # compared as it is, and never equal
            message = f"{name} must be a number, not the text {_value_text(value)}"
            yield config.change("ZM103", "error", (name,), message, parse_whole(value))
    for name in ("communication_data_type", "seq_parallel_communication_data_type"):
        value = config.get(name)
        if value not in (None, AUTO) and str(value).lower() not in ("fp16", "bf16", "fp32"):
            message = f"{name} must be fp16, bf16 or fp32, not {_value_text(value)}"
            yield config.problem("ZM103", "error", (name,), message, config.write(name, "bf16"))
    if precision_of(config, "fp16") and not config.number("fp16", "loss_scale", default=0):
        for name in ("loss_scale_window", "min_loss_scale"):
            value = config.number("fp16", name)
            if value is not None and value <= 0:
                message = f"fp16.{name} must be more than 0 where the loss scale is dynamic"
                default = {"loss_scale_window": 1000, "min_loss_scale": 1}[name]
                yield config.change("ZM103", "error", ("fp16", name), message, default)


def deprecated_names(config: Config, _: Machine) -> Iterator[Problem]:
    """Yields deprecated, renamed and removed names."""
    library = load_schema()["deepspeed"]
    version = f"DeepSpeed {library['version']}"
    for name, note in library["removed"].items():
        if config.has(name):
            message = (
                f"{version} refuses {name}: {note[:1].lower() if note[1:2].islower() else note[:1]}"
            )
            yield config.problem("ZM104", "error", (name,), message + note[1:], f"remove {name}")
    for name, note in library["removed_zero"].items():
        if config.has(ZERO, name):
            message = f"{version} refuses {name}: {note}"
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
    for name, field in library["sections"][ZERO]["fields"].items():
        if "deprecated" in field and config.has(ZERO, name):
            new, fix = field["deprecated"], f"remove {name}"
            message = f"{name} is deprecated: DeepSpeed's name for it is {new}"
            is_off = name in _OLD_OFFLOADS and config.is_on(ZERO, name) is False
            if not config.has(ZERO, new) and not is_off:  # DeepSpeed refuses both
                fix = set_instead(name, _new_setting(config, name, new))
            yield config.problem("ZM104", "warning", (ZERO, name), message, fix)
    path = ("optimizer", "params", "max_grad_norm")
    if (config.number(*path) or 0) > 0:
        message = "DeepSpeed does not support max_grad_norm as a parameter of the optimizer"
        fix = config.write("gradient_clipping", config.get(*path)) + " at the top"
        fix = set_instead(path[-1], fix)
        yield config.problem("ZM104", "warning", path, message, fix)


_OLD_OFFLOADS = ("cpu_offload", "cpu_offload_param")


def _new_setting(config: Config, old: str, new: str) -> str:
    if old in _OLD_OFFLOADS:
        inner = config.write("device", "cpu")
        return f'"{new}": {{{inner}}}' if config.dialect != "yaml" else f"{new}: {{{inner}}}"
    if old == "cpu_offload_use_pin_memory":
        return f"{config.write('pin_memory', config.get(ZERO, old))} in {new}"
    fields = load_schema()["deepspeed"]["sections"][ZERO]["fields"]
    return config.write(fields.get(new, {}).get("alias", new), config.get(ZERO, old))


# ---- the optimizer and the scheduler that DeepSpeed makes -----------------------------------------

_ONE_BIT = ("onebitadam", "zerooneadam", "onebitlamb")


_OTHER_NAMES = {"learning_rate": "lr", "beta": "betas", "epsilon": "eps", "wd": "weight_decay"}


def unknown_optimizer(config: Config, _: Machine) -> Iterator[Problem]:
    """Yields an optimizer that neither DeepSpeed nor torch has, and parameters that it refuses."""
    library = load_schema()["deepspeed"]
    path: Path = ("optimizer", "type")
    kind = config.get(*path)
    if not isinstance(kind, str):
        return
    if kind.lower() in _ONE_BIT:
        yield from _one_bit_optimizer(config, kind)
        return
    optimizers, torch = library["optimizers"], library["torch_optimizers"]
    if kind.lower() not in optimizers and kind not in torch:
        every = {name.lower(): name for name in (*optimizers, *torch)}
        # DeepSpeed makes FusedAdam and DeepSpeedCPUAdam of the type Adam
        family = re.sub(r"^(deepspeed)?(fused|cpu)", "", kind.lower())
        matches = get_close_matches(family, every, 1, 0.6)
        fix = f"did you mean {every[matches[0]]}?" if matches else f"one of {', '.join(torch)}"
        message = f"there is no optimizer {kind} in DeepSpeed {library['version']} or torch.optim"
        yield config.problem("ZM103", "error", path, message, fix)
        return
    accepted = optimizers[kind.lower()] if kind.lower() in optimizers else torch[kind]
    # None: the optimizer is of a package of its own, whose parameters are unknown
    if accepted is not None:
        # fields.deprecated_names reports max_grad_norm, with the setting that replaces it
        yield from _refused_parameters(config, "optimizer", kind, {*accepted, "max_grad_norm"})


def _one_bit_optimizer(config: Config, kind: str) -> Iterator[Problem]:
    stage = stage_of(config)
    if stage:
        message = f"{kind} is not compatible with ZeRO, and this is stage {stage}"
    else:
        message = f"DeepSpeed {load_schema()['deepspeed']['version']} no longer has {kind}"
    fix, accepted = config.write("type", "AdamW"), load_schema()["deepspeed"]["optimizers"]["adamw"]
    refused = [name for name in config.section("optimizer", "params") if name not in accepted]
    fix = set_instead(join_names(refused), fix) if refused else fix
    yield config.problem("ZM105", "error", ("optimizer", "type"), message, fix)


def unknown_scheduler(config: Config, _: Machine) -> Iterator[Problem]:
    """Yields an unknown scheduler, and parameters that a scheduler needs or refuses."""
    schedulers = load_schema()["deepspeed"]["schedulers"]
    path: Path = ("scheduler", "type")
    kind = config.get(*path)
    if not isinstance(kind, str):
        return
    if kind not in schedulers:
        fix = did_you_mean(kind, schedulers) or "one of WarmupLR, WarmupDecayLR, OneCycle"
        message = f"DeepSpeed does not recognize the scheduler {kind}"
        yield config.problem("ZM103", "error", path, message, fix)
        return
    params = config.section("scheduler", "params")
    missing = [name for name in schedulers[kind]["required"] if name not in params]
    if missing:
        message = f"{kind} needs {join_names(missing)}"
        fix = " and ".join(config.write(name, "auto") for name in missing) + " in params"
        fix = f"{fix} with transformers, else a number" if missing == ["total_num_steps"] else "add it"
        yield config.problem("ZM103", "error", path, message, fix)
    elif not isinstance(config.get("scheduler", "params"), Mapping):
        message = f"{kind} has no section params, and DeepSpeed refuses that"
        fix = f'"params": {{{config.write("warmup_num_steps", 100)}}}'
        yield config.problem("ZM103", "error", path, message, fix)
    yield from _refused_parameters(config, "scheduler", kind, schedulers[kind]["all"])


def _refused_parameters(
    config: Config, section: str, kind: str, accepted: Collection[str]
) -> Iterator[Problem]:
    """Yields parameters that the constructor of *kind* does not have."""
    for name in config.section(section, "params"):
        if str(name) not in accepted:
            better = _OTHER_NAMES.get(str(name))
            hint = f"did you mean {better}?" if better else did_you_mean(name, accepted)
            message = f"{kind} has no parameter {name}, and refuses it"
            yield config.problem(
                "ZM102", "error", (section, "params", str(name)), message, hint or f"remove {name}"
            )


# ---- who reads a file ----------------------------------------------------------------------------

# DeepSpeed reads Hjson, transformers and accelerate read JSON with "auto".

ZERO = "zero_optimization"


def stage_of(config: Config) -> int | None:
    """Returns the ZeRO stage, 0 by default; None for "auto" and for invalid values."""
    section = config.get(ZERO)
    if isinstance(section, bool):
        return int(section)
    value = config.get(ZERO, "stage", default=0)
    stage = int(value) if isinstance(value, bool) else parse_whole(value)
    return stage if stage in (0, 1, 2, 3) else None


def precision_of(config: Config, name: str) -> bool | None:
    """Returns whether *name*, bf16 or fp16, is enabled; None for "auto"."""
    section = config.get(name)
    # DeepSpeed reads bfloat16 where there is no bf16
    if name == "bf16" and section is None:
        section = config.get("bfloat16")
    if section is True or section is False or section is None:
        return bool(section)
    value = section.get("enabled", False) if isinstance(section, Mapping) else False
    return None if value == AUTO else bool(is_on(value))


_FILLED: Collection[str] = NAMES["deepspeed"]["filled"]
"""Settings whose "auto" is replaced, by HfTrainerDeepSpeedConfig or DeepSpeedPlugin."""

HJSON_FIX = "remove comments and trailing commas, and quote keys with double quotes"


def not_json(config: Config, reader: str) -> tuple[str, str]:
    """Returns message and fix for a file of Hjson that *reader* reads as JSON."""
    refused = config.refused
    position = f"line {refused.line}: {refused.message}" if refused is not None else ""
    return f"{reader} reads {config.file} as JSON, and it is Hjson ({position})", HJSON_FIX


def hjson_file(config: Config, _: Machine) -> Iterator[Problem]:
    """Yields a file of Hjson: an error where "auto" shows that transformers or accelerate reads it."""
    if config.refused is None:
        return
    position = config.refused.line, config.refused.column
    message = (
        f"this is Hjson, not JSON ({config.refused.message}): DeepSpeed reads it, "
        "transformers and accelerate refuse it"
    )
    severity = "error" if open_autos(config) else "info"
    yield Problem(config.file, *position, "ZM101", severity, message, HJSON_FIX)


def open_autos(config: Config) -> list[Path]:
    """Returns the paths whose value is the text "auto", and not computed by a script."""
    paths = _auto_paths(config.data, ())
    return [path for path in paths if type(config.get(*path)) is str]


def fills_autos(config: Config) -> bool:
    """Returns whether transformers or accelerate takes *config*: it has an "auto", or they name it."""
    return config.is_filled or any(True for _ in _auto_paths(config.data, ()))


def _auto_paths(data: Mapping[str, Any], path: Path) -> Iterator[Path]:
    for name, value in data.items():
        key_path = (*path, str(name))
        if isinstance(value, Mapping):
            yield from _auto_paths(value, key_path)
        elif value == AUTO:
            yield key_path


def unfilled_autos(config: Config, _: Machine) -> Iterator[Problem]:
    """Yields settings whose "auto" nothing replaces; in scripts it stands for any computed value."""
    paths = [auto for auto in _auto_paths(config.data, ()) if ".".join(auto) not in _FILLED]
    # The autotuner of DeepSpeed replaces "auto" by what it tries
    if config.dialect == "python" or config.has("autotuning") or not paths:
        return
    names = join_names(".".join(auto) for auto in paths)
    message = (
        f'nothing replaces "{AUTO}" in {names}: accelerate and Trainer refuse that, and DeepSpeed '
        "alone takes its default"
    )
    yield config.problem("ZM103", "error", paths[0], message, f"remove {names}, or give a number")
