"""Writes zeromon/check/schema.json from the sources of the installed frameworks.

The names and types that DeepSpeed, accelerate and transformers know are read from their syntax trees;
nothing of them is imported. Run it with all three installed:

  python tools/read_check_schema.py > zeromon/check/schema.json
"""

from __future__ import annotations

import ast
import importlib.util
import json
import re
import sys
import textwrap
from collections.abc import Iterator, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

Schema = dict[str, Any]

_MODELS = {
    "zero_optimization": ("runtime/zero/config.py", "DeepSpeedZeroConfig"),
    "bf16": ("runtime/precision_config.py", "DeepSpeedBF16Config"),
    "fp16": ("runtime/precision_config.py", "DeepSpeedFP16Config"),
    "comms_logger": ("comm/config.py", "CommsLoggerConfig"),
    "tensorboard": ("monitor/config.py", "TensorBoardConfig"),
    "wandb": ("monitor/config.py", "WandbConfig"),
    "csv_monitor": ("monitor/config.py", "CSVConfig"),
    "comet": ("monitor/config.py", "CometConfig"),
    "compile": ("compile/config.py", "CompileConfig"),
    "hybrid_engine": ("runtime/config.py", "HybridEngineConfig"),
}
"""Sections that pydantic reads: an unknown name raises."""

_MODEL_FILES = (
    "runtime/zero/config.py", "runtime/zero/offload_config.py", "runtime/zero/leaf_module_config.py",
    "runtime/zenflow/zenflow_config.py", "runtime/precision_config.py", "comm/config.py",
    "monitor/config.py", "compile/config.py", "runtime/config.py",
)  # fmt: skip

_PLAIN = {
    "aio": ("runtime/swap_tensor/constants.py", "AIO_"),
    "activation_checkpointing": ("runtime/activation_checkpointing/config.py", "ACT_CHKPT_"),
    "flops_profiler": ("profiling/constants.py", "FLOPS_PROFILER_"),
    "torch_autocast": ("runtime/constants.py", "TORCH_AUTOCAST_"),
}
"""Sections whose names are constants with a prefix: an unknown name is ignored."""

_TOP_FILES = (
    "runtime/config.py", "runtime/precision_config.py", "runtime/zero/config.py", "comm/config.py",
    "profiling/config.py", "autotuning/config.py", "runtime/activation_checkpointing/config.py",
    "runtime/swap_tensor/aio_config.py", "runtime/data_pipeline/config.py", "datastates/config.py",
    "utils/config.py", "runtime/tensor_parallel/config.py", "runtime/model_checkpointing/config.py",
)  # fmt: skip
_TOP_CONSTANTS = (
    "runtime/constants.py", "runtime/precision_config.py", "profiling/constants.py",
    "autotuning/constants.py", "runtime/swap_tensor/constants.py",
    "runtime/data_pipeline/constants.py", "runtime/activation_checkpointing/config.py",
    "runtime/model_checkpointing/constants.py", "datastates/constants.py", "utils/config.py",
    "datastates/config.py", "runtime/config.py", "runtime/zero/config.py", "comm/constants.py",
)  # fmt: skip
_DICTS = {"param_dict", "_param_dict", "ds_config", "config"}
"""How DeepSpeed's own code calls the whole configuration."""


def folder_of(name: str) -> Path | None:
    """Returns where a package is installed; None where it is not. Imports nothing of it."""
    try:
        found = importlib.util.find_spec(name)
    except (ImportError, ValueError):
        return None
    places = list(found.submodule_search_locations or ()) if found else []
    return Path(places[0]) if places else None


def read_deepspeed(folder: Path) -> Schema:
    """The names of a DeepSpeed configuration."""
    classes: dict[str, ast.ClassDef] = {}
    for file in _MODEL_FILES:
        path = folder / file
        if path.is_file():
            tree = ast.parse(path.read_text(encoding="utf-8"))
            classes |= {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}
    sections = {name: _model(classes, entry) for name, (_, entry) in _MODELS.items()}
    for name, (file, prefix) in _PLAIN.items():
        sections[name] = {"strict": False, "fields": _constant_fields(folder / file, prefix)}
    constants = _constants(folder / "runtime/constants.py")
    types = ("GRAD_ACCUM_DTYPE", "PARAM_DTYPE", "BUFFER_DTYPE", "KEEP_IN_FP32_MODULES")
    fields = {constants[name]: {"type": "any"} for name in types if name in constants}
    sections["data_types"] = {"strict": False, "fields": fields}
    removed = _removed(folder / "runtime/config.py")
    return {
        "version": metadata.version("deepspeed"),
        "top": sorted(_top_names(folder) | set(sections) | {"bfloat16"}),
        **_optimizers(folder),
        "removed": removed.get("_REMOVED_TOP_LEVEL_CONFIG_KEYS", {}),
        "removed_zero": removed.get("_REMOVED_ZERO_CONFIG_KEYS", {}),
        "sections": sections,
    }


_OPTIMIZERS = {
    "adam": ("adam/fused_adam.py", "adam/cpu_adam.py"),
    "adamw": ("adam/fused_adam.py", "adam/cpu_adam.py"),
    "adagrad": ("adagrad/cpu_adagrad.py",),
    "lamb": ("lamb/fused_lamb.py",),
    "lion": ("lion/fused_lion.py", "lion/cpu_lion.py"),
}
"""Name of an optimizer -> the files of the classes of which DeepSpeedEngine._configure_basic_optimizer
takes one, besides the one of torch.optim."""
_ENGINE_TAKES = ("torch_adam", "adam_w_mode", "fp32_optimizer_states")


def _optimizers(folder: Path) -> Schema:
    """The parameters of optimizers and schedulers; None where a class is of another package."""
    torch = folder_of("torch")
    if torch is None:
        raise KeyError("torch")
    exported = ast.literal_eval(_assigned(torch / "optim/__init__.py", "__all__"))
    classes = _arguments(*sorted((torch / "optim").glob("*.py")))
    own: dict[str, list[str] | None] = {}
    by_case = {name.lower(): taken["all"] for name, taken in classes.items()}
    for name in _deepspeed_optimizers(folder):
        files = [folder / "ops" / file for file in _OPTIMIZERS.get(name, ())]
        taken = {p for given in _arguments(*files).values() for p in given["all"]}
        known = taken | set(by_case.get(name, ())) | set(_ENGINE_TAKES if "adam" in name else ())
        own[name] = sorted(known) if files else None
    return {
        "optimizers": own,
        "torch_optimizers": {
            name: given["all"]
            for name, given in sorted(classes.items())
            if name in exported and name != "Optimizer"
        },
        "schedulers": dict(
            sorted(
                {
                    name: given
                    for file in (folder / "runtime/lr_schedules.py", torch / "optim/lr_scheduler.py")
                    for name, given in _arguments(file).items()
                    if not name.startswith("_") and name != "LRScheduler"
                }.items()
            )
        ),
    }


def _deepspeed_optimizers(folder: Path) -> list[str]:
    constants = _constants(folder / "runtime/config.py")
    listed = _assigned(folder / "runtime/config.py", "DEEPSPEED_OPTIMIZERS")
    return sorted(constants[ast.unparse(node)] for node in getattr(listed, "elts", ()))


def _assigned(path: Path, name: str) -> ast.expr:
    """The value that a file assigns to a name."""
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == name:
            return node.value
    raise KeyError(name)


def _arguments(*files: Path) -> dict[str, dict[str, list[str]]]:
    """Class -> the arguments of its constructor after self and the first one, and the required ones."""
    found = {}
    for file in files:
        for node in ast.parse(file.read_text(encoding="utf-8")).body:
            made = next(
                (n for n in getattr(node, "body", ()) if getattr(n, "name", "") == "__init__"), None
            )
            if isinstance(node, ast.ClassDef) and isinstance(made, ast.FunctionDef):
                plain = [arg.arg for arg in (*made.args.posonlyargs, *made.args.args)][2:]
                needed = plain[: max(0, len(plain) - len(made.args.defaults))]
                everything = [*plain, *(arg.arg for arg in made.args.kwonlyargs)]
                found[node.name] = {"all": sorted(everything), "required": needed}
    return found


def _model(classes: Mapping[str, ast.ClassDef], name: str) -> Schema:
    """The fields of a pydantic class."""
    fields = {}
    node = classes[name]
    for entry in node.body:
        if isinstance(entry, ast.AnnAssign) and isinstance(entry.target, ast.Name):
            fields[entry.target.id] = _field(classes, entry)
    found: Schema = {"strict": True, "fields": fields}
    if any('mode="before"' in ast.unparse(d).replace("'", '"') for d in _validators(node)):
        found["coerced"] = True
    return found


def _validators(node: ast.ClassDef) -> Iterator[ast.expr]:
    for entry in node.body:
        if isinstance(entry, ast.FunctionDef):
            yield from (d for d in entry.decorator_list if "model_validator" in ast.unparse(d))


def _field(classes: Mapping[str, ast.ClassDef], entry: ast.AnnAssign) -> Schema:
    text = ast.unparse(entry.annotation)
    inner = text.removeprefix("Optional[").removesuffix("]") if text.startswith("Optional[") else ""
    found = _type(classes, inner or text)
    if inner:
        found["optional"] = True
    value = entry.value
    if isinstance(value, ast.Call) and ast.unparse(value.func) == "Field":
        for word in value.keywords:
            if word.arg in ("gt", "ge", "lt", "le", "alias"):
                found[word.arg] = ast.literal_eval(word.value)
            elif word.arg == "json_schema_extra" and isinstance(word.value, ast.Dict):
                found |= _extra(word.value)
    return found


def _extra(node: ast.Dict) -> Schema:
    pairs = {
        ast.literal_eval(key): value.value
        for key, value in zip(node.keys, node.values, strict=True)
        if key is not None and isinstance(value, ast.Constant)
    }
    return {"deprecated": str(pairs.get("new_param", ""))} if pairs.get("deprecated") else {}


def _type(classes: Mapping[str, ast.ClassDef], text: str) -> Schema:
    if text in ("bool", "int", "float", "str", "Path"):
        return {"type": text}
    node = classes.get(text)
    if node is None:
        return {"type": "any"}
    if any("Enum" in ast.unparse(base) for base in node.bases):
        choices = [ast.literal_eval(e.value) for e in node.body if isinstance(e, ast.Assign)]
        return {"type": "choice", "choices": list(dict.fromkeys(choices))}
    return {"type": "section", "section": _model(classes, text)}


def _constants(path: Path) -> dict[str, Any]:
    """The literals that a file names in capitals."""
    found = {}
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            try:
                found[node.targets[0].id] = ast.literal_eval(node.value)
            except (ValueError, TypeError):
                continue
    return found


def _constant_fields(path: Path, prefix: str) -> Schema:
    constants = _constants(path)
    fields = {}
    for name, value in constants.items():
        if name.startswith(prefix) and isinstance(value, str) and value.isidentifier():
            if name.endswith(("_DEFAULT", "_FORMAT")):
                continue
            default = constants.get(f"{name}_DEFAULT")
            known = isinstance(default, (bool, int)) and default is not None
            fields[value] = {"type": type(default).__name__ if known else "any"}
    return fields


def _removed(path: Path) -> dict[str, dict[str, str]]:
    """The tables of names that DeepSpeed once knew, and refuses now, with the first sentence."""
    found = {}
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Dict):
            name = ast.unparse(node.targets[0])
            if name.startswith("_REMOVED_"):
                found[name] = {
                    ast.literal_eval(key): _sentence(value)
                    for key, value in zip(node.value.keys, node.value.values, strict=True)
                    if key is not None
                }
    return found


def _sentence(node: ast.expr) -> str:
    parts = node.values if isinstance(node, ast.JoinedStr) else [node]
    text = "".join(str(p.value) for p in parts if isinstance(p, ast.Constant))
    return text.split(". ")[0].split("; ")[0].strip().removesuffix(".")


def _top_names(folder: Path) -> set[str]:
    """The names that DeepSpeed's code looks up in the whole configuration, by literal or by constant."""
    names: dict[str, Any] = {}
    for file in _TOP_CONSTANTS:
        if (folder / file).is_file():
            names |= _constants(folder / file)
    found = set()
    for file in _TOP_FILES:
        if (folder / file).is_file():
            tree = ast.parse((folder / file).read_text(encoding="utf-8"))
            for node in _looked_up(tree):
                value = node.value if isinstance(node, ast.Constant) else None
                if isinstance(node, ast.Name):
                    value = names.get(node.id)
                if isinstance(value, str) and value.isidentifier():
                    found.add(value)
    monitors = {"tensorboard", "wandb", "csv_monitor", "comet"}
    return found | monitors | {"sequence_parallel_size", "data_parallel_size"}


def _looked_up(tree: ast.AST) -> Iterator[ast.expr]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and len(node.args) > 0:
            function = ast.unparse(node.func)
            if function.startswith("get_") and len(node.args) > 1 and _is_whole(node.args[0]):
                yield node.args[1]
            elif function.endswith(".get") and _is_whole(function.removesuffix(".get")):
                yield node.args[0]
        elif isinstance(node, ast.Compare) and isinstance(node.ops[0], ast.In):
            if _is_whole(node.comparators[0]):
                yield node.left
        elif isinstance(node, ast.Subscript) and _is_whole(node.value):
            yield node.slice
        elif isinstance(node, ast.FunctionDef) and {a.arg for a in node.args.args[:1]} & _DICTS:
            yield from node.args.defaults  # a parameter says the name by default


def _is_whole(node: ast.expr | str) -> bool:
    name = node if isinstance(node, str) else ast.unparse(node)
    return name.removesuffix(".keys()").rpartition(".")[2] in _DICTS


def read_accelerate(folder: Path) -> Schema:
    """The names of an accelerate configuration."""
    tree = ast.parse((folder / "commands/config/config_args.py").read_text(encoding="utf-8"))
    classes = {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}
    top = {
        entry.target.id
        for name in ("BaseConfig", "ClusterConfig")
        for entry in classes[name].body
        if isinstance(entry, ast.AnnAssign) and isinstance(entry.target, ast.Name)
    }
    launch = ast.parse((folder / "commands/launch.py").read_text(encoding="utf-8"))
    options = sorted(
        node.value.removeprefix("--")
        for call in ast.walk(launch)
        if isinstance(call, ast.Call) and ast.unparse(call.func).endswith(".add_argument")
        for node in call.args
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.startswith("--")
    )
    groups: dict[str, set[str]] = {"deepspeed_args": set(), "fsdp_args": set()}
    for call in ast.walk(launch):
        if isinstance(call, ast.Call) and ast.unparse(call.func).endswith(".add_argument"):
            group = ast.unparse(call.func).partition(".")[0]
            if group in groups and isinstance(call.args[0], ast.Constant):
                groups[group].add(str(call.args[0].value).removeprefix("--"))
    constants = _constants(folder / "utils/constants.py")
    enums = ast.parse((folder / "utils/dataclasses.py").read_text(encoding="utf-8"))
    kinds = {node.name: node for node in enums.body if isinstance(node, ast.ClassDef)}
    return {
        "version": metadata.version("accelerate"),
        "environment": _environment(folder),
        "top": sorted(top),
        "options": options,
        "deepspeed_config": sorted(groups["deepspeed_args"]),
        # read by getattr, and no option of the launcher
        "fsdp_config": sorted(groups["fsdp_args"] | {"fsdp_ignored_modules"}),
        "distributed_type": _members(kinds["DistributedType"]),
        "mixed_precision": _members(kinds["PrecisionType"]),
        "fsdp_sharding_strategy": constants["FSDP_SHARDING_STRATEGY"],
        "fsdp_auto_wrap_policy": constants["FSDP_AUTO_WRAP_POLICY"],
        "fsdp_backward_prefetch": constants["FSDP_BACKWARD_PREFETCH"],
        "fsdp_state_dict_type": constants["FSDP_STATE_DICT_TYPE"],
        "deepspeed_multinode_launcher": constants["DEEPSPEED_MULTINODE_LAUNCHERS"],
    }


_VARIABLE = re.compile(r"(ACCELERATE|FSDP|MEGATRON_LM|PARALLELISM_CONFIG)_[A-Z0-9_]*")


def _environment(folder: Path) -> Schema:
    """Environment variable that accelerate reads -> the option of its launcher that sets it, or ""."""
    options: Schema = {}
    for file in sorted(folder.rglob("*.py")):
        if "test_utils" in file.parts:
            continue
        for function in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if not isinstance(function, ast.FunctionDef):
                continue
            prefixes = {
                node.targets[0].id: node.value.value
                for node in ast.walk(function)
                if isinstance(node, ast.Assign)
                and isinstance(node.targets[0], ast.Name)
                and isinstance(node.value, ast.Constant)
            }
            for node in ast.walk(function):
                name = _variable(node, prefixes)
                if name and _VARIABLE.fullmatch(name) and not name.endswith("_"):
                    options.setdefault(name, "")
                if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Subscript):
                    name = _variable(node.targets[0].slice, prefixes)
                    option = re.search(r"\b(?:args\.)?(\w+)\W*$", _passed(node.value))
                    if option and _VARIABLE.fullmatch(name):
                        options[name] = option[1]
    for name in options:
        # The launcher passes no path of NVMe on, and a plugin reads it
        plain = name.removeprefix("ACCELERATE_DEEPSPEED_").lower()
        options[name] = options[name] or (plain if plain.endswith("nvme_path") else "")
    return options


def _passed(value: ast.expr) -> str:
    """``args.zero_stage`` of ``str(args.zero_stage).lower()``; "" for other values."""
    options = [n for n in ast.walk(value) if isinstance(n, ast.Attribute) and _is_args(n.value)]
    names = [n for n in ast.walk(value) if isinstance(n, ast.Name) and n.id == "mixed_precision"]
    return ast.unparse([*options, *names][0]) if options or names else ""


def _is_args(node: ast.expr) -> bool:
    return isinstance(node, ast.Name) and node.id == "args"


def _variable(node: ast.AST, prefixes: Mapping[str, Any]) -> str:
    """The text of a constant, or of a constant behind a prefix that the function names; else ""."""
    if isinstance(node, ast.BinOp) and isinstance(node.left, ast.Name):
        prefix = prefixes.get(node.left.id)
        return f"{prefix}{_variable(node.right, {})}" if isinstance(prefix, str) else ""
    is_text = isinstance(node, ast.Constant) and isinstance(node.value, str)
    return node.value if is_text else ""


def read_transformers(folder: Path) -> Schema:
    """The names of the Trainer's arguments, and of what it looks up in ``fsdp_config``."""
    arguments = ast.parse((folder / "training_args.py").read_text(encoding="utf-8"))
    sources = [arguments]
    sources += [
        ast.parse((folder / file).read_text(encoding="utf-8"))
        for file in ("trainer.py", "integrations/tpu.py")
        if (folder / file).is_file()
    ]
    asked = [pair for tree in sources for pair in _asked_of(tree, "fsdp_config")]
    options = ast.parse((folder / "trainer_utils.py").read_text(encoding="utf-8"))
    fields = next(n for n in arguments.body if getattr(n, "name", "") == "TrainingArguments")
    return {
        "version": metadata.version("transformers"),
        "arguments": sorted(
            entry.target.id
            for entry in getattr(fields, "body", ())
            if isinstance(entry, ast.AnnAssign) and isinstance(entry.target, ast.Name)
        ),
        "fsdp": _members(next(n for n in options.body if getattr(n, "name", "") == "FSDPOption")),
        "fsdp_config": sorted({name.removeprefix("fsdp_") for name, _ in asked}),
        # version 1 was the only one, and had no name, until this was asked for
        "fsdp_version": next((d for name, d in asked if name.endswith("version") and d), 1),
    }


def _asked_of(tree: ast.AST, section: str) -> Iterator[tuple[str, Any]]:
    """(name, default) of what code looks up in an attribute called *section*."""
    for node in ast.walk(tree):
        key, default, holder = None, None, None
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.args:
            if node.func.attr in ("get", "setdefault", "pop"):
                key, default, holder = node.args[0], node.args[1:2], node.func.value
        elif isinstance(node, ast.Subscript):
            key, holder = node.slice, node.value
        elif isinstance(node, ast.Compare) and isinstance(node.ops[0], ast.In):
            key, holder = node.left, node.comparators[0]
        if isinstance(key, ast.Constant) and getattr(holder, "attr", "") == section:
            given = default[0] if default else None
            yield str(key.value), given.value if isinstance(given, ast.Constant) else None


def _members(node: Any) -> list[str]:
    return [ast.literal_eval(e.value) for e in node.body if isinstance(e, ast.Assign)]


_READERS = {
    "deepspeed": read_deepspeed,
    "accelerate": read_accelerate,
    "transformers": read_transformers,
}


def read_installed() -> Schema:
    """Returns the schema of the installed frameworks; raises :class:`KeyError` where one is missing."""
    found = {}
    for name, read in _READERS.items():
        folder = folder_of(name)
        if folder is None:
            raise KeyError(name)
        found[name] = read(folder)
    return found


_WIDTH, _WIDTH_OF_A_ROW = 105, 65
"""Characters of a line, and of a value that stays on one line."""


def dumped(content: Schema) -> str:
    """Returns the text of ``schema.json``: an entry a line, and lists of names wrapped."""
    return _entry(content, "") + "\n"


def _entry(value: Any, indent: str) -> str:
    line = json.dumps(value, sort_keys=True)
    if not isinstance(value, (dict, list)) or len(indent + line) < _WIDTH_OF_A_ROW:
        return line
    inside = indent + " "
    if isinstance(value, dict):
        rows = [f"{inside}{json.dumps(k)}: {_entry(v, inside)}" for k, v in sorted(value.items())]
        return "{\n" + ",\n".join(rows) + f"\n{indent}}}"
    body = textwrap.fill(line[1:-1], _WIDTH, initial_indent=inside, subsequent_indent=inside)
    return f"[\n{body}\n{indent}]"


if __name__ == "__main__":
    sys.stdout.write(dumped(read_installed()))
