"""Each figure of a launch once: what wins, and what says otherwise. Pure."""

import ast
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from zeromon.check.accelerate import DEEPSPEED, FSDP, fsdp_options_of, kind_of
from zeromon.check.deepspeed.conflicts import BATCH
from zeromon.check.deepspeed.fields import ZERO, not_json, open_autos
from zeromon.check.launch import COMMAND, ENVIRONMENT, Command
from zeromon.check.problem import NAMES, Config, Path, Problem, join_names
from zeromon.check.scripts import UNKNOWN, Call, Script, Unknown, is_arguments, is_open, names_key
from zeromon.memory.config_files import AUTO, is_on, parse_whole

# ---- the arguments of a Trainer against the DeepSpeed file that it fills in ---------------------

# The arguments of a Trainer, held against the DeepSpeed file that the Trainer fills in.
# Sources: ``HfTrainerDeepSpeedConfig.trainer_config_process`` and ``trainer_config_finalize`` of
# transformers ("auto" takes the argument, any other value must be equal, a missing key stays
# missing), ``deepspeed_optim_sched`` (an optimizer or scheduler of the file wins),
# ``DeepSpeedPlugin.__post_init__`` of accelerate (a missing accumulation is 1), and the defaults of
# ``DeepSpeedConfig``.

DEFAULTS: Mapping[str, Any] = NAMES["transformers"]["defaults"]
"""Defaults of ``TrainingArguments`` of transformers; classes of trl have others."""

MATCHED: Mapping[str, tuple[Path, str]] = {
    name: (tuple(path.split(".")), code)
    for name, (path, code) in NAMES["transformers"]["matched_settings"].items()
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


# ---- each figure of a launch once ---------------------------------------------------------------

Said = tuple[Any, str]
"""A value, and the file that says it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """One figure of a launch."""

    name: str
    value: Any
    source: str
    """The file, or ``command``."""
    others: tuple[Said, ...] = ()
    """Other values that lose."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sources:
    """All that a launch is made of."""

    command: Command
    launch: Config | None
    """The accelerate file as the command changes it."""
    file: Config | None
    """The accelerate file as it is."""
    deepspeed: Config | None
    scripts: tuple[Script, ...]
    trainers: tuple[Config, ...] = ()
    """The options that a trainer's YAML tells accelerate by the environment."""


_OFFLOAD = {"optimizer": "offload_optimizer", "parameters": "offload_param"}


def collect_figures(s: Sources) -> list[Figure]:
    """Returns the known figures; DeepSpeed's own file wins over accelerate's section and the script."""
    entries = []
    for name, claims in (
        ("ranks", _stated_ranks(s)),
        ("micro-batch", [*_deepspeed_setting(s, "train_micro_batch_size_per_gpu"),
                         *_argument_of(s, "per_device_train_batch_size")]),
        ("accumulation", _accumulation_claims(s)),
        ("precision", stated_precisions(s)),
        ("clipping", [*_deepspeed_setting(s, "gradient_clipping"),
                      *_engine_value(s, "gradient_clipping"), *_argument_of(s, "max_grad_norm")]),
        ("ZeRO stage", _deepspeed_setting(s, ZERO, "stage", option="zero_stage")),
        *((f"offload of {role}", _deepspeed_setting(s, ZERO, key, "device", option=f"{key}_device"))
          for role, key in _OFFLOAD.items()),
        ("FSDP", _stated_fsdp(s)),
        ("FSDP offload", [*_accelerate_setting(s, (FSDP, "fsdp_offload_params")),
                          *_argument_of(s, "fsdp_cpu_offload")]),
        *((label, _argument_of(s, name)) for label, name in _OF_ARGUMENTS.items()),
    ):  # fmt: skip
        stated = [(v, origin) for v, origin in claims if v not in (None, AUTO, "none", "null")]
        if stated:
            value, source = stated[0]
            losers = dict.fromkeys((v, w) for v, w in stated[1:] if v != value)
            entries.append(Figure(name=name, value=value, source=source, others=tuple(losers)))
    by_name = {entry.name: parse_whole(entry.value) for entry in entries}
    factors = [by_name.get(name) for name in ("micro-batch", "accumulation", "ranks")]
    if all(factors):
        value = math.prod(factor for factor in factors if factor)
        product = " x ".join(map(str, factors))
        # accelerate accumulates as the Trainer says, whatever the engine counts
        engine = next((int(v) for e in entries if e.name == "accumulation"
                       for v, origin in e.others if origin == _ENGINE), None)  # fmt: skip
        counted = ((value // (by_name["accumulation"] or 1) * engine, _ENGINE),) if engine else ()
        entries.append(Figure(name="whole batch", value=value, source=product, others=counted))
    return entries


_OF_ARGUMENTS = {
    "learning rate": "learning_rate",
    "scheduler": "lr_scheduler_type",
    "checkpointing": "gradient_checkpointing",
}
"""Figure -> the argument of a Trainer that alone sets it."""


def _stated_fsdp(s: Sources) -> Iterator[Said]:
    """Yields the version of FSDP, and when it shards the parameters again."""
    for config in (s.launch, s.file, *s.trainers):
        if config is not None and kind_of(config) == "FSDP":
            options = fsdp_options_of(config)
            keeps = is_on(options.get("reshard_after_forward", True)) is False
            strategy = options.strategy if options.version == 1 else _AFTER_FORWARD[keeps]
            if options.version:
                yield f"version {options.version}, {strategy}", config.where("distributed_type")


_AFTER_FORWARD = {True: "no reshard after forward", False: "reshard after forward"}
_ENGINE = "DeepSpeed's engine"


def _accumulation_claims(s: Sources) -> list[Said]:
    """Returns the accumulation; a Trainer's own counts where the DeepSpeed file has none."""
    name = "gradient_accumulation_steps"
    engine, stated = [*_engine_value(s, name)], [*_argument_of(s, name)]
    trains = any(is_arguments(call) for _, call in _argument_calls(s)) or bool(_parsed_arguments(s))
    variable = s.command.environment.get("ACCELERATE_GRADIENT_ACCUMULATION_STEPS")
    if variable is not None and not trains:  # Accelerator() takes it before its own argument
        stated.insert(0, (variable.value, ENVIRONMENT))
    return [*_deepspeed_setting(s, name), *(stated + engine if trains else engine + stated)]


def _engine_value(s: Sources, name: str) -> Iterator[Said]:
    """Yields what DeepSpeed takes where its file does not have the key *name*."""
    if s.deepspeed is not None and s.deepspeed.get(name) is None:
        yield ENGINE_DEFAULTS[name,], _ENGINE


def _parsed_arguments(s: Sources) -> list[Arguments]:
    arguments = command_arguments(s.command, s.scripts)
    return [arguments] if arguments is not None else []


def _stated_ranks(s: Sources) -> Iterator[Said]:
    if s.command.ranks:
        yield s.command.ranks, COMMAND
    if s.file is not None:
        yield s.file.whole("num_processes"), s.file.file


def _deepspeed_setting(s: Sources, *path: str, option: str = "") -> list[Said]:
    """Returns a setting of the DeepSpeed file, else of accelerate's section for DeepSpeed."""
    claims: list[Said] = []
    if s.deepspeed is not None:
        claims.append((s.deepspeed.get(*path), s.deepspeed.file))
    return [*claims, *_accelerate_setting(s, (DEEPSPEED, option or path[-1]))]


def _accelerate_setting(s: Sources, path: Path) -> Iterator[Said]:
    """Yields a setting of the accelerate file, as the command changes it and as it is."""
    kinds = {DEEPSPEED: "DEEPSPEED", FSDP: "FSDP"}
    for config in (s.launch, s.file, *s.trainers):
        if config is not None and kind_of(config) == kinds.get(path[0], kind_of(config)):
            yield config.get(*path), config.where(path[-1])


def _argument_calls(s: Sources) -> Iterator[tuple[Script, Call]]:
    for script in s.scripts:
        for call in script.calls:
            if is_arguments(call) or call.short == "Accelerator" or script.dialect == "yaml":
                yield script, call


def _argument_of(s: Sources, name: str) -> Iterator[Said]:
    """Yields an argument of the script: on the command line, in its text, and by default."""
    if name in s.command.arguments:
        yield s.command.arguments[name], COMMAND
    for script, call in _argument_calls(s):
        value = script.value(script.argument(call, name))
        if not isinstance(value, Unknown):
            yield value, script.file
    by_call = [
        script_arguments(script, call) for script, call in _argument_calls(s) if is_arguments(call)
    ]
    for arguments in (*by_call, *_parsed_arguments(s)):
        if name not in arguments.stated and name in arguments.defaults:
            yield arguments.defaults[name], "the default of TrainingArguments"


def stated_precisions(s: Sources) -> Iterator[Said]:
    """Yields the precision; the script's own wins over that of the launch file."""
    if s.deepspeed is not None:
        for name in ("bf16", "fp16"):
            if s.deepspeed.is_on(name, "enabled") is True:
                yield name, s.deepspeed.file
    for name in ("bf16", "fp16"):
        if s.command.arguments.get(name) is True:
            yield name, COMMAND
    for script, call in _argument_calls(s):
        value = script.value(script.argument(call, "mixed_precision"))
        if isinstance(value, str):
            yield value, script.file
        for name in ("bf16", "fp16"):
            if script.value(script.argument(call, name)) is True:
                yield name, script.file
    yield from _accelerate_setting(s, ("mixed_precision",))


def as_lines(entries: Iterable[Figure]) -> list[str]:
    """Returns the figures as text, one a line."""
    rows = [
        (f.name, str(f.value), f.source + "".join(f"; {v} in {w}" for v, w in f.others)) for f in entries
    ]
    widths = [max((len(row[n]) for row in rows), default=0) for n in range(2)]
    return [f"  {a:<{widths[0]}}  {b:<{widths[1]}}  {c}" for a, b, c in rows]


# ---- checks of a script against the accelerate file that is checked with it ---------------------

_OF_THE_PLUGIN = ("gradient_accumulation_steps", "gradient_clipping")
"""Settings of accelerate's section for DeepSpeed that Trainer compares with its arguments."""


def other_figures(script: Script, launch: Config, ds_config: Config | None) -> Iterator[Problem]:
    """Yields figures of *script* that are others in *launch*, or in the DeepSpeed file that it names."""
    for call in script.calls:
        if is_arguments(call) and kind_of(launch) == "DEEPSPEED":
            if script.argument(call, "deepspeed") is None:
                config = ds_config or _plugin_config(launch)
                yield from of_trainer(script, call, config, launch.whole("num_processes"))
        elif call.name.startswith("accelerate.") and call.short == "Accelerator":
            yield from _other_accumulation(script, call, launch, ds_config)
            if ds_config is not None:
                yield from _made_twice(script, call, ds_config)
        if is_arguments(call) or call.short == "Accelerator":
            yield from _other_precision(script, call, launch)


def command_line_conflicts(
    command: Command, scripts: Iterable[Script], launch: Config | None, ds_config: Config | None
) -> Iterator[Problem]:
    """Yields arguments of a Trainer on the command line that do not fit DeepSpeed's configuration."""
    config = ds_config
    if config is None and launch is not None and kind_of(launch) == "DEEPSPEED":
        config = _plugin_config(launch)
    arguments = command_arguments(command, tuple(scripts))
    if config is not None and arguments is not None:
        yield from argument_problems(arguments, config, command.ranks or config.ranks)


def _plugin_config(launch: Config) -> Config:
    """Returns what accelerate's section sets of a DeepSpeed configuration."""
    section = launch.section(DEEPSPEED)
    # What the section leaves out is "auto" in DeepSpeedPlugin
    return replace(launch, data={name: section.get(name, AUTO) for name in _OF_THE_PLUGIN})


def _other_accumulation(
    script: Script, call: Call, launch: Config, ds_config: Config | None
) -> Iterator[Problem]:
    """Yields an accumulation of ``Accelerator`` that DeepSpeed's replaces."""
    name = "gradient_accumulation_steps"
    node = script.argument(call, name)
    mine, config = script.value(node), ds_config or _plugin_config(launch)
    theirs = config.get(name, default=1)  # DeepSpeedPlugin writes 1 into a file without it
    if node is None or kind_of(launch) != "DEEPSPEED" or isinstance(mine, (Unknown, str)):
        return
    if theirs not in (None, AUTO) and mine != theirs:
        message = f"{name} is {mine} here and {theirs} in {config.where(name)}, which wins"
        if not config.has(name):
            message = f"{name} is {mine} here and missing in {config.file}: accelerate takes {theirs}"
        fix = f"{name}={theirs} here, or {config.write(name, AUTO)} there"
        yield script.problem("ZM602", "warning", node, message, fix, name)


def _made_twice(script: Script, call: Call, config: Config) -> Iterator[Problem]:
    """Yields an optimizer or scheduler that is in the script and the file, or in neither.

    Source: ``Accelerator._prepare_deepspeed``, which raises ValueError.
    """
    has_own = any(c.name.startswith("torch.optim.") and c.short[:1].isupper()
               and "lr_scheduler" not in c.name for c in script.calls)  # fmt: skip
    for section, dummy in (("optimizer", "DummyOptim"), ("scheduler", "DummyScheduler")):
        uses_dummy = dummy in script.words
        if config.has(section) and has_own and not uses_dummy and section == "optimizer":
            message = f"accelerate refuses an {section} in {config.file} beside the one of the script"
            fix = f"remove {section} in {config.file}, or use accelerate.utils.{dummy} here"
            yield script.problem("ZM105", "error", call.node, message, fix, section)
        lacks = uses_dummy and not config.has(section) and "lr_scheduler_callable" not in script.words
        if lacks and not names_key(script, section):
            message = f"accelerate refuses {dummy} without {section} in {config.file}"
            fix = f"add {section} to {config.file}, or make the {section} here"
            yield script.problem("ZM105", "error", call.node, message, fix, section)


def _other_precision(script: Script, call: Call, launch: Config) -> Iterator[Problem]:
    """Yields a precision of the script that replaces that of the launch file."""
    theirs = launch.get("mixed_precision")
    mine, node = None, script.argument(call, "mixed_precision")
    if is_arguments(call):
        enabled = (n for n in ("fp16", "bf16") if script.value(script.argument(call, n)) is True)
        mine = next(enabled, None)
        node = script.argument(call, mine) if mine else None
    elif node is not None:
        mine = script.value(node)
    if not isinstance(mine, str) or not isinstance(theirs, str) or mine == theirs:
        return
    source = launch.where("mixed_precision")
    message = f"the precision is {mine} here and {theirs} in {source}: this script wins"
    fix = f"mixed_precision: {mine} in {source}"
    yield script.problem("ZM105", "warning", node or call.node, message, fix, "mixed_precision")


# ---- checks of a DeepSpeed configuration against the call of a script that takes it -------------

Check = Callable[[Script, Call, Config, "int | None"], Iterable[Problem]]
"""A check of (script, the call, the configuration that the call takes, number of ranks or None)."""


def json_alone(script: Script, call: Call, config: Config, _: int | None) -> Iterator[Problem]:
    """Yields a file of Hjson that something else than DeepSpeed reads."""
    if config.refused is not None and not call.name.startswith("deepspeed."):
        message, fix = not_json(config, call.short)
        yield script.problem("ZM101", "error", call.node, message, fix)


def early_config(script: Script, call: Call, config: Config, _: int | None) -> Iterator[Problem]:
    """Yields batch sizes that zero.Init refuses in a configuration registered before the model is made.

    ``HfDeepSpeedConfig`` replaces no "auto", and at that moment DeepSpeed counts one rank.
    """
    if call.short != "HfDeepSpeedConfig" or config.whole("zero_optimization", "stage") != 3:
        return
    names = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    values = [config.get(name) for name in names]
    auto = [name for name, value in zip(names, values, strict=True) if value == AUTO]
    fix = "give the micro-batch and the accumulation as numbers, and no train_batch_size"
    # In a script "auto" stands for a computed value, which zero.Init accepts
    if auto and config.dialect != "python":
        message = f'HfDeepSpeedConfig leaves {join_names(auto)} "auto", and zero.Init refuses it'
        yield script.problem("ZM602", "error", call.node, message, fix, auto[0])
        return
    total, micro, steps = (parse_whole(value) for value in values)
    if total and micro and total != micro * (steps or 1):
        message = (
            f"train_batch_size is {total}, but zero.Init counts one rank before the process group "
            f"exists, and expects {micro} x {steps or 1}"
        )
        yield script.problem("ZM602", "error", call.node, message, fix, names[0])


def of_lightning(script: Script, call: Call, config: Config, _: int | None) -> Iterator[Problem]:
    """Yields an accumulation in the configuration of Lightning's DeepSpeedStrategy, which refuses it."""
    if call.short == "DeepSpeedStrategy" and config.has("gradient_accumulation_steps"):
        message = "Lightning refuses gradient_accumulation_steps in the DeepSpeed configuration"
        fix = "Trainer(accumulate_grad_batches=...), and no train_batch_size beside it"
        key = "gradient_accumulation_steps"
        yield script.problem("ZM105", "error", call.node, message, fix, key)


_TOP_REFUSED = {
    *BATCH, "gradient_clipping", "optimizer", "scheduler", "communication_data_type", "steps_per_print",
}  # fmt: skip
"""Settings and sections in which DeepSpeed itself takes "auto" for a value, and fails."""
_TOP_SILENT = {"bf16", "fp16", ZERO}
"""Sections from which DeepSpeedConfigModel drops "auto", so that the default counts."""


def unfilled_autos(script: Script, call: Call, config: Config, _: int | None) -> Iterator[Problem]:
    """Yields "auto" in the configuration of ``deepspeed.initialize``, which fills in nothing."""
    if call.name != "deepspeed.initialize" or script.words & {"Accelerator", "HfTrainerDeepSpeedConfig"}:
        return
    paths = [path for path in open_autos(config)
             if config.dialect == "python" or not names_key(script, path[-1])]  # fmt: skip
    refused = [path for path in paths if path[0] in _TOP_REFUSED]
    silent = [path for path in paths if path[0] in _TOP_SILENT and path[-1] in ("enabled", "stage")]
    if refused:
        names = join_names(".".join(path) for path in refused)
        message = f'deepspeed.initialize fills in no "{AUTO}", and fails: {names}'
        sizes = [config.write(name, 1) for name in BATCH[1:] if (name,) in refused]
        fix = f"give numbers, such as {', '.join(sizes)}" if sizes else "give numbers"
        fix += "; remove train_batch_size, which follows" if (BATCH[0],) in refused else ""
        yield config.problem("ZM103", "error", refused[0], message, fix)
    if silent:
        names = join_names(".".join(path) for path in silent)
        message = f'deepspeed.initialize fills in no "{AUTO}": {names} stays off'
        fix = config.write(silent[0][-1], True if silent[0][-1] == "enabled" else 2)
        yield config.problem("ZM103", "warning", silent[0], message, fix)


def needed_section(_: Script, call: Call, config: Config, _ranks: int | None) -> Iterator[Problem]:
    """Yields a file without zero_optimization, which DeepSpeedPlugin refuses."""
    plugin = is_arguments(call) or call.short == "DeepSpeedPlugin"
    if plugin and not config.has(ZERO):
        message = f"accelerate refuses a DeepSpeed configuration without {ZERO}"
        fix = f'"{ZERO}": {{{config.write("stage", 2)}}}'
        yield config.problem("ZM103", "error", (), message, fix)


def idle_checkpointing(script: Script, call: Call, config: Config, _: int | None) -> Iterator[Problem]:
    """Yields a section that only ``deepspeed.checkpointing.configure`` reads, where nothing calls it."""
    name = "activation_checkpointing"
    # A pipeline, and a module that the script imports, may configure it
    reads = script.words & {"checkpointing", "configure", "PipelineModule"}
    if not reads and any(is_on(value) for value in config.section(name).values()):
        message = f"{name} has no effect: only deepspeed.checkpointing.configure reads it"
        fix = "call it, and deepspeed.checkpointing.checkpoint() in the model"
        fix = "gradient_checkpointing=True of the Trainer" if is_arguments(call) else fix
        yield config.problem("ZM106", "info", (name,), message, fix)


CHECKS: tuple[Check, ...] = (
    json_alone, of_trainer, early_config, of_lightning, unfilled_autos, needed_section,
    idle_checkpointing,
)  # fmt: skip
