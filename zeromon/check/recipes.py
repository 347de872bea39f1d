"""Configurations of trainers, read as the call of transformers' TrainingArguments that they make.

LLaMA-Factory, TRL and their like pass their YAML to TrainingArguments, axolotl after it has renamed a
few settings. So a YAML becomes a script of one call, and all checks of such a script apply to it.

Sources: ``llamafactory/hparams/parser.py`` and ``finetuning_args.py`` (0.9.5), ``trl/scripts/utils.py``
(1.16), ``axolotl/core/builders/base.py``, ``utils/schemas/validation.py`` and ``peft.py`` (0.19),
``recipes/`` of torchtune (0.6.1).
"""

import ast
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path as File
from typing import Any

from zeromon.check.accelerate import FSDP
from zeromon.check.launch import COMMAND, Command, spell_options
from zeromon.check.problem import (
    ENVIRONMENT_DIALECT,
    NAMES,
    Config,
    Path,
    Problem,
    did_you_mean,
    load_schema,
    load_table,
    without_effect,
)
from zeromon.check.scripts import Call, Script, read_script
from zeromon.memory.config_files import is_on, parse_whole


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """How a trainer names its settings, and what it refuses; from ``trainers.json``."""

    name: str
    arguments: Mapping[str, str] = field(default_factory=dict)
    """Dotted name there -> argument of TrainingArguments, or of a figure; empty: all keep their name."""
    call: str = "transformers.TrainingArguments"
    refused: Sequence[Mapping[str, Any]] = ()
    """Settings that the trainer refuses under a condition: in words, as values, and with the fix."""
    idle: Sequence[Mapping[str, Any]] = ()
    """Settings that have no effect under a condition."""


RECIPES = {name: Recipe(name=name, **content) for name, content in load_table("trainers").items()}
LLAMA_FACTORY, AXOLOTL, TORCHTUNE, MS_SWIFT, TRANSFORMERS = RECIPES.values()

UNCHECKED: Mapping[str, str] = NAMES["projects"]["unchecked"]
"""Setting of a known project -> the project, whose configurations are not checked."""


def project_of(data: Mapping[Any, Any]) -> str:
    """Returns the project whose configurations are not checked, of which *data* is one; else ""."""
    names = (str(name).replace("-", "_") for name in data)
    return next((UNCHECKED[name] for name in names if name in UNCHECKED), "")


_STAGES = ("sft", "pt", "rm", "ppo", "dpo", "kto")
_OF_TRANSFORMERS: Sequence[str] = NAMES["transformers"]["telling_arguments"]
"""Arguments of a Trainer that configurations of other frameworks do not have."""
_OF_AXOLOTL = {
    "micro_batch_size", "datasets", "sequence_len", "adapter", "gradient_accumulation_steps",
}  # fmt: skip
_ENOUGH = 3
"""So many arguments of a Trainer at the top make a file a configuration of one."""


def recipe_of(data: Mapping[Any, Any]) -> str:
    """Returns the name of the recipe that *data* is of; "" for none."""
    if any(isinstance(value, Mapping) and "_component_" in value for value in data.values()):
        return TORCHTUNE.name
    if "base_model" in data and _OF_AXOLOTL & data.keys():
        return AXOLOTL.name
    is_stage = data.get("stage") in _STAGES and ("model_name_or_path" in data or "template" in data)
    if is_stage or "finetuning_type" in data:
        return LLAMA_FACTORY.name
    if "model" in data and any(name in data for name in ("train_type", "tuner_type", "sft_type")):
        return MS_SWIFT.name
    arguments = {*load_schema()["transformers"]["arguments"]}.intersection(data)
    is_trainer = len(arguments) >= _ENOUGH and arguments.intersection(_OF_TRANSFORMERS)
    return TRANSFORMERS.name if is_trainer else ""


# ---- a YAML as a script ---------------------------------------------------------------------------


def override(config: Config, command: Command | None) -> Config:
    """Returns *config* with what the command that names it sets."""
    if command is None or not is_named(config.file, command):
        return config
    data = dict(config.data)
    for name, value in command.arguments.items():
        *outer_keys, last_key = name.split(".")
        section = data
        for key in outer_keys:
            inner = section.get(key)
            section[key] = dict(inner) if isinstance(inner, Mapping) else {}
            section = section[key]
        section[last_key] = None if value == "null" else value
    return replace(config, data=data)


def is_named(file: str, command: Command) -> bool:
    """Returns whether *command* passes *file* to its script."""
    names = [*command.positionals, command.script, command.arguments.get("config")]
    return any(isinstance(name, str) and File(name).resolve() == File(file).resolve() for name in names)


def command_config(command: Command) -> Config | None:
    """Returns the arguments of a command that takes LLaMA-Factory's without a YAML; else None."""
    if recipe_of(command.arguments) != LLAMA_FACTORY.name:
        return None
    positions: dict[Path, tuple[int, int]] = {
        (name,): (command.line, column) for name, column in command.places.items()
    }
    return Config(file=command.file, data=command.arguments, places=positions, dialect=COMMAND)


def translate_arguments(command: Command, recipe: Recipe) -> Command:
    """Returns *command* with its arguments under the names of TrainingArguments."""
    renamed = {recipe.arguments.get(name, name): value for name, value in command.arguments.items()}
    positions = {recipe.arguments.get(name, name): at for name, at in command.places.items()}
    return replace(command, arguments=renamed, places=positions)


def as_script(config: Config, recipe: Recipe) -> Script:
    """Returns a script of one call, whose arguments are the settings of *config*."""
    names = recipe.arguments or {str(name): str(name) for name in config.data}
    keywords = []
    for name, argument in names.items():
        path = tuple(name.split(".")) if recipe.arguments else (name,)
        value = config.get(*path)
        # axolotl trains in bf16 where both are on; "auto" is known only on the machine
        is_idle = recipe is AXOLOTL and name == "fp16" and config.get("bf16") not in (None, False)
        if config.has(*path) and not is_idle:
            keywords.append(ast.keyword(argument, _as_node(config, path, value)))
    # The command line may set the same arguments, as where a script has this parser
    function = ast.Name("HfArgumentParser" if recipe is not TORCHTUNE else "recipe", ast.Load())
    node = ast.Call(function, [], keywords)
    tree = ast.fix_missing_locations(ast.Module([ast.Expr(node)], []))
    call = Call(name=recipe.call, node=node, loops=0)
    return replace(read_script(config.file, tree), calls=(call,), dialect="yaml")


_FLOAT = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)[eE][+-]?\d+")


def _as_node(config: Config, path: Path, value: Any) -> ast.expr:
    """Returns the literal of *value*, at the position of its key."""
    node: ast.expr
    if isinstance(value, Mapping):
        keys: list[ast.expr | None] = [ast.Constant(str(key)) for key in value]
        items = [_as_node(config, (*path, str(key)), inner) for key, inner in value.items()]
        for key, item in zip(keys, items, strict=True):
            ast.copy_location(key or item, item)
        node = ast.Dict(keys, items)
    elif isinstance(value, (list, tuple)):
        node = ast.List([_as_node(config, path, inner) for inner in value], ast.Load())
    else:
        # YAML 1.1 reads 1e-5 as a text, and each of the trainers makes a number of it
        is_float = isinstance(value, str) and _FLOAT.fullmatch(value)
        literal = value if isinstance(value, (bool, int, float, str, type(None))) else str(value)
        node = ast.Constant(float(value) if is_float else literal)
    line_number, column = config.place(path)
    node.lineno, node.col_offset = line_number, column - 1
    return node


_SETTING = re.compile(r"""(?<![\w"'])(\w+)=(True|False|None|-?[\d.]+|"[^"]*"|'[^']*'|\{.*?\})""")
_LITERALS = {"True": "true", "False": "false", "None": "null"}


def spell(problem: Problem, config: Config, recipe: Recipe) -> Problem:
    """Returns *problem* of :func:`as_script` in the names of the recipe, with a fix in its syntax."""

    def as_yaml(match: re.Match[str]) -> str:
        return f"{match[1]}: {re.sub(r'True|False|None', lambda m: _LITERALS[m[0]], match[2])}"

    fix, message = (_SETTING.sub(as_yaml, sentence) for sentence in (problem.fix, problem.message))
    message, key = message.replace("this script", "this file"), problem.key
    if config.dialect == COMMAND:
        return spell_options(replace(problem, fix=fix))
    if recipe is AXOLOTL:  # which has deprecated the prefix
        fix = re.sub(r"\bfsdp_(?!version|config)", "", fix)
    for name, argument in recipe.arguments.items():
        if name != argument:
            message = re.sub(rf"(?<![\w.]){argument}\b", name, message)
            fix = re.sub(rf"(?<![\w.\"']){argument}\b", name, fix)
            key = name if key == argument else key
    return replace(problem, message=message, fix=fix, key=key)


# ---- checks ---------------------------------------------------------------------------------------


def exclusions(config: Config, recipe: Recipe, stage: int | None) -> Iterator[Problem]:
    """Yields what the trainer refuses, and what has no effect; *stage*: of its DeepSpeed file."""
    fsdp_options = fsdp_config(config)
    pseudo = {
        "ZeRO stage": stage,
        "fsdp_version": fsdp_options and fsdp_options.get(FSDP, "fsdp_version"),
    }

    def read(name: str) -> Any:
        section, _, key = name.partition(".")
        names = (section, key), (section, f"fsdp_{key}"), (name,)
        value = pseudo.get(name) or next(
            (config.get(*path) for path in names if config.has(*path)), None
        )
        return None if value in (0, "", [], {}) or is_on(value) is False else value

    def holds(name: str, values: Sequence[Any]) -> bool:
        value = read(name)
        if values[0] == "not":
            return value is not None and value not in values
        return value in values or (values[0] == "*" and value is not None)

    for kind in (*recipe.refused, *recipe.idle):
        keys = [key for key in kind["keys"] if read(key) is not None]
        if not keys or not all(holds(*condition) for condition in kind["when"].items()):
            continue
        if kind in recipe.idle:
            yield config.problem("ZM106", "info", (keys[0],), *without_effect(keys, kind["condition"]))
            continue
        for key in keys:
            message = f"{recipe.name} refuses {key} {kind['condition']}"
            yield config.problem("ZM105", "error", (key,), message, kind["fix"].format(key=key))


def misspelt_arguments(config: Config, recipe: Recipe) -> Iterator[Problem]:
    """Yields keys that are all but an argument of a Trainer.

    The other keys are those of the trainer, or of a script, whose names are not known here. Of all
    names that LLaMA-Factory, TRL and older versions of transformers have, none is as like one.
    """
    arguments = load_schema()["transformers"]["arguments"]
    own_names = (name for name in config.data if (name,) in config.places)  # and not on the command line
    for name in own_names if not recipe.arguments else ():
        is_known = name in arguments or name == "accelerate_config"  # of TRL's launcher
        close = "" if is_known else did_you_mean(name, arguments, 0.91)
        if close and close[len("did you mean ") : -1] not in config.data:
            message = f"TrainingArguments has no {name}, and its parser refuses the file"
            yield config.problem("ZM102", "error", (str(name),), message, close)


def fsdp_config(config: Config) -> Config | None:
    """Returns what axolotl tells accelerate of FSDP by the environment; None without FSDP.

    Source: ``setup_fsdp_envs`` in ``axolotl/utils/trainer.py``.
    """
    section = config.section(FSDP)
    if not section and not config.get("fsdp"):
        return None
    versions = config.get("fsdp_version"), section.get("version"), section.get("fsdp_version")
    version = next(filter(None, map(parse_whole, versions)), 1)
    # axolotl passes the policy on where it is given, and transformers wraps by class without it
    options = {"auto_wrap_policy": "TRANSFORMER_BASED_WRAP", **section, "fsdp_version": version}
    options.pop("version", None)
    names = (
        config.get("fsdp") if isinstance(config.get("fsdp"), list) else str(config.get("fsdp")).split()
    )
    library = load_schema()["accelerate"]["fsdp_sharding_strategy"]
    strategies = [str(name).upper() for name in names if str(name).upper() in library]
    if strategies and version == 1:
        options["sharding_strategy"] = strategies[0]
    data = {"distributed_type": "FSDP", FSDP: options}
    return replace(config, data=data, dialect=ENVIRONMENT_DIALECT)
