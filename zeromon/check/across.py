"""Checks of a script against the accelerate file that is checked with it: which of two figures wins.

Sources: ``Accelerator._prepare_deepspeed`` ("Using DeepSpeed's value") and ``AcceleratorState`` of
accelerate; ``propagate_args_to_deepspeed`` and ``TrainingArguments`` of transformers.
"""

from collections.abc import Iterable, Iterator
from dataclasses import replace

from zeromon.check.accelerate import DEEPSPEED, kind_of
from zeromon.check.launch import Command
from zeromon.check.problem import AUTO, Config, Problem, whole
from zeromon.check.script_configs import MATCHED, against_arguments, whole_batch
from zeromon.check.scripts import Call, Script, Unknown, is_arguments

_OF_THE_PLUGIN = ("gradient_accumulation_steps", "gradient_clipping")
"""Settings of accelerate's section for DeepSpeed that Trainer compares with its arguments."""


def differences(script: Script, launch: Config, other: Config | None) -> Iterator[Problem]:
    """Yields figures of *script* that are others in *launch*, or in the DeepSpeed file that it names."""
    for call in script.calls:
        if is_arguments(call) and kind_of(launch) == "DEEPSPEED":
            if script.argument(call, "deepspeed") is None:
                config = other or _plugin(launch)
                yield from against_arguments(script, call, config, launch.ranks)
                yield from whole_batch(script, call, config, whole(launch.get("num_processes")))
        elif call.name.startswith("accelerate.") and call.short == "Accelerator":
            yield from _accumulation(script, call, launch, other)
        if is_arguments(call) or call.short == "Accelerator":
            yield from _precision(script, call, launch)


def of_arguments(
    command: Command, scripts: Iterable[Script], launch: Config | None, other: Config | None
) -> Iterator[Problem]:
    """Yields arguments of a Trainer on the command line that DeepSpeed's configuration contradicts.

    Only scripts that parse their arguments into those of a Trainer take them so.
    """
    config = other
    if config is None and launch is not None and kind_of(launch) == "DEEPSPEED":
        config = _plugin(launch)
    if config is None or not any(script.words & _PARSERS for script in scripts):
        return
    for name, (path, code) in MATCHED.items():
        fixed, mine = config.get(*path), command.arguments.get(name)
        if fixed in (None, AUTO) or mine in (None, fixed):
            continue
        where = config.where(path[-1])
        message = (
            f"{name} is {mine} here, and {'.'.join(path)} is {fixed} in {where}: Trainer refuses"
        )
        fix = f"{config.write(path[-1], AUTO)} takes it from here"
        yield command.problem(code, "error", name, message, fix)


_PARSERS = frozenset(("HfArgumentParser", "TrlParser"))
"""Classes that make a Trainer's arguments of the command line."""


def _plugin(launch: Config) -> Config:
    """Returns what accelerate's section sets of a DeepSpeed configuration."""
    part = launch.section(DEEPSPEED)
    data = {name: part[name] for name in _OF_THE_PLUGIN if name in part}
    return replace(launch, data=data)


def _accumulation(
    script: Script, call: Call, launch: Config, other: Config | None
) -> Iterator[Problem]:
    """Yields an accumulation of ``Accelerator`` that DeepSpeed's replaces."""
    name = "gradient_accumulation_steps"
    node = script.argument(call, name)
    mine, config = script.value(node), other or _plugin(launch)
    theirs = config.get(name)
    if node is None or kind_of(launch) != "DEEPSPEED" or isinstance(mine, (Unknown, str)):
        return
    if theirs not in (None, AUTO) and mine != theirs:
        message = f"{name} is {mine} here and {theirs} in {config.where(name)}, which wins"
        fix = f"{name}={theirs} here, or {config.write(name, AUTO)} there"
        yield script.problem("ZM602", "warning", node, message, fix, name)


def _precision(script: Script, call: Call, launch: Config) -> Iterator[Problem]:
    """Yields a precision of the script that replaces that of the launch file."""
    theirs = launch.get("mixed_precision")
    mine, node = None, script.argument(call, "mixed_precision")
    if is_arguments(call):
        on = (n for n in ("fp16", "bf16") if script.value(script.argument(call, n)) is True)
        mine = next(on, None)
        node = script.argument(call, mine) if mine else None
    elif node is not None:
        mine = script.value(node)
    if not isinstance(mine, str) or not isinstance(theirs, str) or mine == theirs:
        return
    where = launch.where("mixed_precision")
    message = f"the precision is {mine} here and {theirs} in {where}: this script wins"
    fix = f"mixed_precision: {mine} in {where}"
    yield script.problem("ZM105", "warning", node or call.node, message, fix, "mixed_precision")
