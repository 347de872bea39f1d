"""The arguments of a Trainer, held against the DeepSpeed file that the Trainer fills in.

Sources: ``HfTrainerDeepSpeedConfig.trainer_config_process`` and ``trainer_config_finalize`` of
transformers ("auto" takes the argument, any other value must be equal, a missing key stays missing),
``deepspeed_optim_sched`` (an optimizer or scheduler of the file wins), ``DeepSpeedPlugin.__post_init__``
of accelerate (a missing accumulation is 1), and the defaults of ``DeepSpeedConfig``.
"""

import ast
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from zeromon.check.launch import Command
from zeromon.check.problem import NAMES, Config, Path, Problem
from zeromon.check.scripts import UNKNOWN, Call, Script, Unknown, is_arguments, is_open
from zeromon.memory.config_files import AUTO, parse_whole

DEFAULTS: Mapping[str, Any] = NAMES["transformers"]["defaults"]
"""Defaults of ``TrainingArguments`` of transformers; classes of trl have others."""

MATCHED: Mapping[str, tuple[Path, str]] = {
    "per_device_train_batch_size": (("train_micro_batch_size_per_gpu",), "ZM602"),
    "gradient_accumulation_steps": (("gradient_accumulation_steps",), "ZM602"),
    "max_grad_norm": (("gradient_clipping",), "ZM105"),
    "learning_rate": (("optimizer", "params", "lr"), "ZM105"),
    "weight_decay": (("optimizer", "params", "weight_decay"), "ZM105"),
    "adam_epsilon": (("optimizer", "params", "eps"), "ZM105"),
    "fp16": (("fp16", "enabled"), "ZM105"),
    "bf16": (("bf16", "enabled"), "ZM105"),
}
"""Argument of a Trainer -> (path of the DeepSpeed setting with the same value, rule code)."""

ENGINE_DEFAULTS: Mapping[Path, Any] = {
    ("gradient_accumulation_steps",): 1, ("gradient_clipping",): 1.0,
    ("fp16", "enabled"): False, ("bf16", "enabled"): False,
    ("scheduler", "params", "warmup_num_steps"): 1000,
}  # fmt: skip
"""DeepSpeed's own value of a missing key."""
_ADAM_DEFAULTS: Mapping[str, Any] = {"lr": 1e-3, "betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0.0}
"""Defaults of DeepSpeed's FusedAdam and DeepSpeedCPUAdam."""

_KINDS: Mapping[str, str] = NAMES["deepspeed"]["scheduler_of_type"]
"""``lr_scheduler_type`` -> DeepSpeed's scheduler of the same kind."""
_EFFECTS: Mapping[str, str] = NAMES["deepspeed"]["scheduler_effects"]
_PARSERS = frozenset(("HfArgumentParser", "TrlParser"))
"""Classes that make a Trainer's arguments of the command line."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Arguments:
    """The arguments of one Trainer, as a script or a launch command states them."""

    stated: Mapping[str, Any]
    """Name -> value; :data:`UNKNOWN` where only the running script knows it."""
    defaults: Mapping[str, Any]
    """The other arguments; empty where something else may state them."""
    report: Callable[[str, str, str, str, str, str], Problem]
    """Makes a problem of (code, severity, argument, message, fix, key)."""
    file: str = ""

    def get(self, name: str) -> Any:
        """Returns the value of an argument; :data:`UNKNOWN` where it is not certain."""
        return self.stated.get(name, self.defaults.get(name, UNKNOWN))

    def origin(self, name: str) -> str:
        """Returns ``here`` for a stated argument, and ``by default`` for any other."""
        return "here" if any(n in self.stated for n in name.split(" and ")) else "by default"


def script_arguments(script: Script, call: Call) -> Arguments:
    """Returns the arguments that *call* states."""
    stated = {k.arg: _argument_value(script, k.value) for k in call.node.keywords if k.arg}
    certain = call.name.startswith("transformers.") and not is_open(call)

    def report(code: str, severity: str, name: str, message: str, fix: str, key: str) -> Problem:
        node = script.argument(call, name.partition(" and ")[0]) or call.node
        return script.problem(code, severity, node, message, fix, key)

    defaults = DEFAULTS if certain else {}
    return Arguments(stated=stated, defaults=defaults, report=report, file=script.file)


def _argument_value(script: Script, node: ast.expr) -> Any:
    """Returns the value of an argument, from the launch command for ``args.name``."""
    value = script.value(node)
    if isinstance(value, Unknown) and isinstance(node, ast.Attribute):
        return script.passed.get(node.attr, value)
    return value


def command_arguments(command: Command, scripts: tuple[Script, ...]) -> Arguments | None:
    """Returns the arguments that *command* states; None where no script makes a Trainer's of them."""
    parsing = [script for script in scripts if script.words & _PARSERS]
    if not parsing:
        return None

    def report(code: str, severity: str, name: str, message: str, fix: str, _: str) -> Problem:
        return command.problem(code, severity, name.partition(" and ")[0], message, fix)

    # A file of arguments, or a variable of the shell, may state any of them
    certain = (
        command.arguments
        and "config" not in command.arguments
        and not any("$" in f"{name}{value}" for name, value in command.arguments.items())
    )
    defaults = _parsed_defaults(parsing[0]) if certain and len(parsing) == 1 else {}
    stated = {name: UNKNOWN if "$" in str(v) else v for name, v in command.arguments.items()}
    return Arguments(stated=stated, defaults=defaults, report=report)


def _parsed_defaults(script: Script) -> Mapping[str, Any]:
    """Returns the defaults of the class that a script parses; empty where it is not known."""
    for call in script.calls:
        if call.short != "HfArgumentParser" or not call.node.args:
            continue
        classes = call.node.args[0]
        for node in classes.elts if isinstance(classes, (ast.Tuple, ast.List)) else [classes]:
            if script.name_of(node) in _NAMES:
                return DEFAULTS
            variable = script.flow.owner(node)
            for bound in script.flow.bindings.get(variable, []) if variable else ():
                if isinstance(bound, ast.ClassDef) and any(
                    script.name_of(base) in _NAMES for base in bound.bases
                ):
                    return {**DEFAULTS, **dict(_field_defaults(script, bound))}
    return {}


_NAMES = tuple(
    f"transformers.{module}{kind}TrainingArguments"
    for kind in ("", "Seq2Seq")
    for module in ("", "training_args.", "training_args_seq2seq.")
)


def _field_defaults(script: Script, node: ast.ClassDef) -> Iterator[tuple[str, Any]]:
    """Yields the fields of a dataclass, each with its default."""
    for statement in node.body:
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
            value = statement.value
            if isinstance(value, ast.Call):  # dataclasses.field(default=...)
                value = next((k.value for k in value.keywords if k.arg == "default"), None)
            yield statement.target.id, script.value(value)


# ---- the checks ------------------------------------------------------------------------------------


def filled_values(arguments: Arguments) -> dict[Path, tuple[str, Any, str]]:
    """Returns what a Trainer writes for "auto": path -> (argument, value, rule code)."""
    values = {path: (name, arguments.get(name), code) for name, (path, code) in MATCHED.items()}
    betas = [arguments.get(f"adam_beta{n}") for n in (1, 2)]
    has_betas = not any(isinstance(beta, Unknown) for beta in betas)
    path: Path = ("optimizer", "params", "betas")
    values[path] = ("adam_beta1 and adam_beta2", betas if has_betas else UNKNOWN, "ZM105")
    values[_of_scheduler("warmup_max_lr")] = ("learning_rate", arguments.get("learning_rate"), "ZM105")
    warmup, steps = arguments.get("warmup_steps"), arguments.get("max_steps")
    # A fraction, and warmup_ratio of older releases, become a number when the data is known
    counts = isinstance(warmup, (int, float)) and not 0 < warmup < 1
    counts = counts and "warmup_ratio" not in arguments.stated
    warmup = max(1, int(warmup)) if counts else UNKNOWN
    values[_of_scheduler("warmup_num_steps")] = ("warmup_steps", warmup, "ZM105")
    total = steps if isinstance(steps, int) and steps > 0 else UNKNOWN
    values[_of_scheduler("total_num_steps")] = ("max_steps", total, "ZM105")
    return values


def _of_scheduler(name: str) -> Path:
    return "scheduler", "params", name


def refused_values(arguments: Arguments, config: Config) -> Iterator[Problem]:
    """Yields arguments that differ from a fixed value of the DeepSpeed file; Trainer refuses them."""
    for path, (name, mine, code) in filled_values(arguments).items():
        fixed, key = config.get(*path), ".".join(path)
        if fixed in (None, AUTO) or f"{name}_full_eval" in arguments.stated:
            continue
        in_file = _in_file(arguments, config, path[-1])
        if isinstance(mine, (Unknown, str)) or mine is None:
            if name == "max_steps" and arguments.defaults:
                message = (
                    f"{key} is {fixed}{in_file}: Trainer refuses any number but the steps it counts"
                )
                fix = f"{config.write(path[-1], AUTO)} takes it from the Trainer"
                yield arguments.report(code, "warning", name, message, fix, key)
        elif fixed != mine:  # as Trainer compares them: the text "8" is not 8
            literal = f'the text "{fixed}"' if isinstance(fixed, str) else fixed
            origin = arguments.origin(name)
            message = f"{name} is {mine} {origin}, and {key} is {literal}{in_file}: Trainer refuses"
            fix = f"{config.write(path[-1], AUTO)} takes it from here"
            if origin == "by default" and not isinstance(fixed, (str, list)):
                setting = f"{name}={fixed}" if arguments.file else f"--{name} {fixed}"
                fix = f"{setting} here, and {config.write(path[-1], AUTO)} there"
            yield arguments.report(code, "error", name, message, fix, key)


def missing_values(arguments: Arguments, config: Config) -> Iterator[Problem]:
    """Yields arguments for which the DeepSpeed file has no key: the engine takes its own default."""
    for path, (name, mine, code) in filled_values(arguments).items():
        above = config.get(*path[:-1]) if len(path) > 1 else config.data
        engine = engine_default(config, path)
        if not isinstance(above, Mapping) or config.get(*path) is not None or isinstance(mine, Unknown):
            continue
        if engine is None or mine == engine or isinstance(mine, str) or mine is None:
            continue
        in_file = _in_file(arguments, config, path[-1])
        key, origin = ".".join(path), arguments.origin(name)
        gap = "and missing" if key == name else f", and {key} is missing"
        message = f"{name} is {mine} {origin} {gap}{in_file}: DeepSpeed's engine takes {engine}"
        message = message.replace(" , ", ", ")
        severity = "warning"
        if name == "gradient_accumulation_steps":
            total, micro = config.get("train_batch_size"), config.has("train_micro_batch_size_per_gpu")
            if micro and total is not None:
                severity, message = "error", f"{message} and refuses the Trainer's train_batch_size"
            else:
                message += f", though accelerate steps every {mine} micro-batches"
        fix = f"{config.write(path[-1], AUTO)}{in_file or ' there'} takes it from here"
        yield arguments.report(code, severity, name, message, fix, key)


def engine_default(config: Config, path: Path) -> Any:
    """Returns what DeepSpeed takes for a missing key; None where that is not one known value."""
    if path[:-1] != ("optimizer", "params"):
        return ENGINE_DEFAULTS.get(path)
    kind = str(config.get("optimizer", "type", default="")).lower()
    # torch's AdamW decays by 0.01
    torch_adam = path[-1] == "weight_decay" and config.get("optimizer", "params", "torch_adam")
    return _ADAM_DEFAULTS.get(path[-1]) if kind in ("adam", "adamw") and not torch_adam else None


def replaced_kinds(arguments: Arguments, config: Config) -> Iterator[Problem]:
    """Yields a scheduler or optimizer of the arguments that the one of the DeepSpeed file replaces."""
    kind, theirs = arguments.stated.get("lr_scheduler_type"), config.get("scheduler", "type")
    mine = kind.rpartition(".")[2].lower() if isinstance(kind, str) else ""
    in_file = _in_file(arguments, config, "scheduler")
    if mine and isinstance(theirs, str) and theirs != AUTO and _KINDS.get(mine) != theirs:
        effect = f": {_EFFECTS[theirs]}" if theirs in _EFFECTS else ""
        message = f"lr_scheduler_type is {mine} here, and {theirs}{in_file} wins{effect}"
        fix = f"remove scheduler{in_file or ' there'}: Trainer then makes its own"
        yield arguments.report("ZM105", "warning", "lr_scheduler_type", message, fix, "scheduler.type")
    kind, theirs = arguments.stated.get("optim"), config.get("optimizer", "type")
    mine = kind.rpartition(".")[2].lower() if isinstance(kind, str) else ""
    if mine and isinstance(theirs, str) and not mine.startswith("adamw_torch"):
        message = f"optim is {mine} here, and {theirs}{in_file} wins"
        fix = f"remove optimizer{in_file or ' there'}: Trainer then makes its own"
        yield arguments.report("ZM105", "warning", "optim", message, fix, "optimizer.type")


def whole_batch(arguments: Arguments, config: Config, ranks: int | None) -> Iterator[Problem]:
    """Yields a fixed train_batch_size that is, or may be, other than the one that Trainer calculates."""
    total = config.whole("train_batch_size")
    names = ("per_device_train_batch_size", "gradient_accumulation_steps")
    micro, steps = (parse_whole(arguments.get(name)) for name in names)
    if not total or not micro or not steps:
        return
    batch = micro * steps
    in_file = _in_file(arguments, config, "train_batch_size")
    fault = f"train_batch_size is {total}{in_file}, and {micro} x {steps} per rank here: "
    if total != batch * ranks if ranks else total % batch:
        severity, fault = "error", fault + "Trainer refuses"
    elif not ranks:
        severity, fault = ("info", fault + f"Trainer refuses any number of ranks but {total // batch}")
    else:
        return
    name = next((name for name in names if name in arguments.stated), names[0])
    fix = f"{config.write('train_batch_size', AUTO)} takes it from here"
    yield arguments.report("ZM602", severity, name, fault, fix, "train_batch_size")


def argument_problems(arguments: Arguments, config: Config, ranks: int | None) -> Iterator[Problem]:
    """Yields the problems of the arguments of a Trainer with the DeepSpeed file that it fills in."""
    yield from refused_values(arguments, config)
    yield from missing_values(arguments, config)
    yield from replaced_kinds(arguments, config)
    yield from whole_batch(arguments, config, ranks)


def of_trainer(script: Script, call: Call, config: Config, ranks: int | None) -> Iterator[Problem]:
    """Yields the problems of the arguments that *call* makes."""
    if is_arguments(call):
        yield from argument_problems(script_arguments(script, call), config, ranks)


def _in_file(arguments: Arguments, config: Config, name: str) -> str:
    source = config.where(name)
    return "" if source == arguments.file else f" in {source}"
