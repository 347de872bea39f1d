"""Each figure of a launch once: what wins, and what says otherwise. Pure."""

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from zeromon.check.accelerate import DEEPSPEED, FSDP, fsdp_options_of, kind_of
from zeromon.check.deepspeed.conflicts import BATCH
from zeromon.check.deepspeed.fields import ZERO, not_json, open_autos
from zeromon.check.launch import COMMAND, ENVIRONMENT, Command
from zeromon.check.problem import Config, Path, Problem, join_names
from zeromon.check.scripts import Call, Script, Unknown, is_arguments, names_key
from zeromon.check.trainer_arguments import (
    ENGINE_DEFAULTS,
    Arguments,
    argument_problems,
    command_arguments,
    of_trainer,
    script_arguments,
)
from zeromon.memory.config_files import AUTO, is_on, parse_whole

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
