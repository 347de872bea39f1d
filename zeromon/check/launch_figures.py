"""Each figure of a launch once: what wins, and what says otherwise. Pure."""

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from zeromon.check.accelerate import DEEPSPEED, FSDP, fsdp_options_of, kind_of
from zeromon.check.deepspeed.fields import ZERO, not_json
from zeromon.check.launch import COMMAND, Command
from zeromon.check.problem import AUTO, Config, Path, Problem, is_on, join_names, parse_whole
from zeromon.check.scripts import Call, Script, Unknown, is_arguments, is_open

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
        ("accumulation", [*_deepspeed_setting(s, "gradient_accumulation_steps"),
                          *_argument_of(s, "gradient_accumulation_steps")]),
        ("precision", stated_precisions(s)),
        ("clipping", [*_deepspeed_setting(s, "gradient_clipping"), *_argument_of(s, "max_grad_norm")]),
        ("ZeRO stage", _deepspeed_setting(s, ZERO, "stage", option="zero_stage")),
        *((f"offload of {role}", _deepspeed_setting(s, ZERO, key, "device", option=f"{key}_device"))
          for role, key in _OFFLOAD.items()),
        ("FSDP", _stated_fsdp(s)),
        ("FSDP offload", [*_accelerate_setting(s, (FSDP, "fsdp_offload_params")),
                          *_argument_of(s, "fsdp_cpu_offload")]),
        *((figure, _argument_of(s, name)) for figure, name in _OF_ARGUMENTS.items()),
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
        entries.append(Figure(name="whole batch", value=value, source=product))
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


def _stated_ranks(s: Sources) -> Iterator[Said]:
    if s.command.ranks:
        yield s.command.ranks, COMMAND
    if s.file is not None:
        yield parse_whole(s.file.get("num_processes")), s.file.file


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
    """Yields an argument of the script: on the command line, then in its text."""
    if name in s.command.arguments:
        yield s.command.arguments[name], COMMAND
    for script, call in _argument_calls(s):
        value = script.value(script.argument(call, name))
        if not isinstance(value, Unknown):
            yield value, script.file


def stated_precisions(s: Sources) -> Iterator[Said]:
    """Yields the precision; the script's own wins over that of the launch file."""
    if s.deepspeed is not None:
        for name in ("bf16", "fp16"):
            if is_on(s.deepspeed.get(name, "enabled")) is True:
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
                yield from against_arguments(script, call, config, launch.ranks)
                yield from whole_batch(script, call, config, parse_whole(launch.get("num_processes")))
        elif call.name.startswith("accelerate.") and call.short == "Accelerator":
            yield from _other_accumulation(script, call, launch, ds_config)
        if is_arguments(call) or call.short == "Accelerator":
            yield from _other_precision(script, call, launch)


def command_line_conflicts(
    command: Command, scripts: Iterable[Script], launch: Config | None, ds_config: Config | None
) -> Iterator[Problem]:
    """Yields arguments of a Trainer on the command line that DeepSpeed's configuration contradicts.

    Only scripts that parse their arguments into those of a Trainer take them so.
    """
    config = ds_config
    if config is None and launch is not None and kind_of(launch) == "DEEPSPEED":
        config = _plugin_config(launch)
    if config is None or not any(script.words & _PARSERS for script in scripts):
        return
    for name, (path, code) in MATCHED.items():
        fixed, mine = config.get(*path), command.arguments.get(name)
        if fixed in (None, AUTO) or mine in (None, fixed):
            continue
        source = config.where(path[-1])
        message = f"{name} is {mine} here, and {'.'.join(path)} is {fixed} in {source}: Trainer refuses"
        fix = f"{config.write(path[-1], AUTO)} takes it from here"
        yield command.problem(code, "error", name, message, fix)


_PARSERS = frozenset(("HfArgumentParser", "TrlParser"))
"""Classes that make a Trainer's arguments of the command line."""


def _plugin_config(launch: Config) -> Config:
    """Returns what accelerate's section sets of a DeepSpeed configuration."""
    section = launch.section(DEEPSPEED)
    data = {name: section[name] for name in _OF_THE_PLUGIN if name in section}
    return replace(launch, data=data)


def _other_accumulation(
    script: Script, call: Call, launch: Config, ds_config: Config | None
) -> Iterator[Problem]:
    """Yields an accumulation of ``Accelerator`` that DeepSpeed's replaces."""
    name = "gradient_accumulation_steps"
    node = script.argument(call, name)
    mine, config = script.value(node), ds_config or _plugin_config(launch)
    theirs = config.get(name)
    if node is None or kind_of(launch) != "DEEPSPEED" or isinstance(mine, (Unknown, str)):
        return
    if theirs not in (None, AUTO) and mine != theirs:
        message = f"{name} is {mine} here and {theirs} in {config.where(name)}, which wins"
        fix = f"{name}={theirs} here, or {config.write(name, AUTO)} there"
        yield script.problem("ZM602", "warning", node, message, fix, name)


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


def _in_file(script: Script, config: Config) -> str:
    return "" if config.file == script.file else f" in {config.file}"


def json_alone(script: Script, call: Call, config: Config, _: int | None) -> Iterator[Problem]:
    """Yields a file of Hjson that something else than DeepSpeed reads."""
    if config.refused is not None and not call.name.startswith("deepspeed."):
        message, fix = not_json(config, call.short)
        yield script.problem("ZM101", "error", call.node, message, fix)


MATCHED = {
    "per_device_train_batch_size": (("train_micro_batch_size_per_gpu",), "ZM602"),
    "gradient_accumulation_steps": (("gradient_accumulation_steps",), "ZM602"),
    "max_grad_norm": (("gradient_clipping",), "ZM105"),
    "learning_rate": (("optimizer", "params", "lr"), "ZM105"),
    "weight_decay": (("optimizer", "params", "weight_decay"), "ZM105"),
    "fp16": (("fp16", "enabled"), "ZM105"),
    "bf16": (("bf16", "enabled"), "ZM105"),
}
"""Argument of a Trainer -> (path of the DeepSpeed setting with the same value, rule code).

Source: HfTrainerDeepSpeedConfig.trainer_config_process.
"""


def against_arguments(script: Script, call: Call, config: Config, _: int | None) -> Iterator[Problem]:
    """Yields arguments that differ from a fixed value of the DeepSpeed file; Trainer refuses them."""
    for name, (path, code) in MATCHED.items() if is_arguments(call) else ():
        fixed, mine = config.get(*path), script.value(script.argument(call, name))
        if fixed in (None, AUTO) or isinstance(mine, (Unknown, str)) or mine is None:
            continue
        if fixed != mine:  # as Trainer compares them: the text "8" is not 8
            literal = f'the text "{fixed}"' if isinstance(fixed, str) else fixed
            message = (
                f"{name} is {mine} here, and {'.'.join(path)} is {literal}{_in_file(script, config)}: "
                "Trainer refuses"
            )
            node = script.argument(call, name) or call.node
            fix = f"{config.write(path[-1], AUTO)} takes it from here"
            yield script.problem(code, "error", node, message, fix, ".".join(path))


def whole_batch(script: Script, call: Call, config: Config, ranks: int | None) -> Iterator[Problem]:
    """Yields a fixed train_batch_size that is, or may be, other than the one that Trainer calculates."""
    total = parse_whole(config.get("train_batch_size"))
    nodes = {name: script.argument(call, name) for name in _OF_A_STEP}
    micro, steps = (
        parse_whole(default if nodes[name] is None else script.value(nodes[name]))
        for name, default in _OF_A_STEP.items()
    )
    open_ended = is_open(call) and None in nodes.values()
    if not is_arguments(call) or not total or not micro or not steps or open_ended:
        return
    batch = micro * steps
    fault = (
        f"train_batch_size is {total}{_in_file(script, config)}, and {micro} x {steps} per rank here: "
    )
    if total != batch * ranks if ranks else total % batch:
        severity, fault = "error", fault + "Trainer refuses"
    elif not ranks:
        severity, fault = ("info", fault + f"Trainer refuses any number of ranks but {total // batch}")
    else:
        return
    node = next(filter(None, nodes.values()), call.node)
    fix = f"{config.write('train_batch_size', AUTO)} takes it from here"
    yield script.problem("ZM602", severity, node, fault, fix, "train_batch_size")


_OF_A_STEP = {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 1}
"""Arguments of a Trainer that make up a step on one rank -> default."""


def early_config(script: Script, call: Call, config: Config, _: int | None) -> Iterator[Problem]:
    """Yields batch sizes that zero.Init refuses in a configuration registered before the model is made.

    ``HfDeepSpeedConfig`` replaces no "auto", and at that moment DeepSpeed counts one rank.
    """
    if call.short != "HfDeepSpeedConfig" or parse_whole(config.get("zero_optimization", "stage")) != 3:
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


CHECKS: tuple[Check, ...] = (json_alone, against_arguments, whole_batch, early_config, of_lightning)
