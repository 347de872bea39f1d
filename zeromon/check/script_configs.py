"""Checks of a DeepSpeed configuration against the call of a script that takes it."""

from collections.abc import Callable, Iterable, Iterator

from zeromon.check.deepspeed.readers import not_json
from zeromon.check.problem import AUTO, Config, Problem, listed, whole
from zeromon.check.scripts import Call, Script, Unknown, is_arguments, is_open

Check = Callable[[Script, Call, Config, "int | None"], Iterable[Problem]]
"""A check of (script, the call, the configuration that the call takes, number of ranks or None)."""


def _where(script: Script, config: Config) -> str:
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


def against_arguments(
    script: Script, call: Call, config: Config, _: int | None
) -> Iterator[Problem]:
    """Yields arguments that differ from a fixed value of the DeepSpeed file; Trainer refuses them."""
    for name, (path, code) in MATCHED.items() if is_arguments(call) else ():
        fixed, mine = config.get(*path), script.value(script.argument(call, name))
        if fixed in (None, AUTO) or isinstance(mine, (Unknown, str)) or mine is None:
            continue
        if fixed != mine:  # as Trainer compares them: the text "8" is not 8
            shown = f'the text "{fixed}"' if isinstance(fixed, str) else fixed
            message = (
                f"{name} is {mine} here, and {'.'.join(path)} is {shown}{_where(script, config)}: "
                "Trainer refuses"
            )
            node = script.argument(call, name) or call.node
            fix = f"{config.write(path[-1], AUTO)} takes it from here"
            yield script.problem(code, "error", node, message, fix, ".".join(path))


def whole_batch(script: Script, call: Call, config: Config, ranks: int | None) -> Iterator[Problem]:
    """Yields a fixed train_batch_size that is, or may be, other than the one that Trainer calculates."""
    total = whole(config.get("train_batch_size"))
    nodes = {name: script.argument(call, name) for name in _OF_A_STEP}
    micro, steps = (
        whole(default if nodes[name] is None else script.value(nodes[name]))
        for name, default in _OF_A_STEP.items()
    )
    open_ended = is_open(call) and None in nodes.values()
    if not is_arguments(call) or not total or not micro or not steps or open_ended:
        return
    each = micro * steps
    text = (
        f"train_batch_size is {total}{_where(script, config)}, and {micro} x {steps} a rank here: "
    )
    if total != each * ranks if ranks else total % each:
        severity, text = "error", text + "Trainer refuses"
    elif not ranks:
        severity, text = "info", text + f"Trainer refuses any number of ranks but {total // each}"
    else:
        return
    node = next(filter(None, nodes.values()), call.node)
    fix = f"{config.write('train_batch_size', AUTO)} takes it from here"
    yield script.problem("ZM602", severity, node, text, fix, "train_batch_size")


_OF_A_STEP = {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 1}
"""Arguments of a Trainer that make up a step on one rank -> default."""


def early_config(script: Script, call: Call, config: Config, _: int | None) -> Iterator[Problem]:
    """Yields batch sizes that zero.Init refuses in a configuration registered before the model is made.

    ``HfDeepSpeedConfig`` replaces no "auto", and at that moment DeepSpeed counts one rank.
    """
    if call.short != "HfDeepSpeedConfig" or whole(config.get("zero_optimization", "stage")) != 3:
        return
    names = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    values = [config.get(name) for name in names]
    auto = [name for name, value in zip(names, values, strict=True) if value == AUTO]
    fix = "give the micro-batch and the accumulation as numbers, and no train_batch_size"
    if auto and config.dialect != "python":
        message = f'HfDeepSpeedConfig leaves {listed(auto)} "auto", and zero.Init refuses it'
        yield script.problem("ZM602", "error", call.node, message, fix, auto[0])
        return
    total, micro, steps = (whole(value) for value in values)
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
