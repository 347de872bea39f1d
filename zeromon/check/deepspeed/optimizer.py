"""Checks of the optimizer and the scheduler that DeepSpeed makes from its configuration."""

from collections.abc import Collection, Iterator
from difflib import get_close_matches

from zeromon.check.deepspeed.settings import stage_of
from zeromon.check.problem import Config, Machine, Path, Problem, listed, meant
from zeromon.check.schema import schema

_ONE_BIT = ("onebitadam", "zerooneadam", "onebitlamb")
_OTHER_NAMES = {"learning_rate": "lr", "beta": "betas", "epsilon": "eps", "wd": "weight_decay"}


def optimizer(config: Config, _: Machine) -> Iterator[Problem]:
    """Yields an optimizer that neither DeepSpeed nor torch has, and parameters that it refuses."""
    known = schema()["deepspeed"]
    path: Path = ("optimizer", "type")
    kind = config.get(*path)
    if not isinstance(kind, str):
        return
    if kind.lower() in _ONE_BIT:
        yield from _one_bit(config, kind)
        return
    own, torch = known["optimizers"], known["torch_optimizers"]
    if kind.lower() not in own and kind not in torch:
        every = {name.lower(): name for name in (*own, *torch)}
        near = get_close_matches(kind.lower(), every, 1, 0.6)
        fix = f"did you mean {every[near[0]]}?" if near else f"one of {', '.join(torch)}"
        message = f"there is no optimizer {kind} in DeepSpeed {known['version']} or torch.optim"
        yield config.problem("ZM103", "error", path, message, fix)
        return
    taken = own[kind.lower()] if kind.lower() in own else torch[kind]
    if taken is not None:
        yield from _refused(config, "optimizer", kind, {*taken, "max_grad_norm"})


def _one_bit(config: Config, kind: str) -> Iterator[Problem]:
    stage = stage_of(config)
    if stage:
        message = f"{kind} is not compatible with ZeRO, and this is stage {stage}"
    else:
        message = f"DeepSpeed {schema()['deepspeed']['version']} no longer has {kind}"
    fix = config.write("type", "AdamW")
    yield config.problem("ZM105", "error", ("optimizer", "type"), message, fix)


def scheduler(config: Config, _: Machine) -> Iterator[Problem]:
    """Yields an unknown scheduler, and parameters that a scheduler needs or refuses."""
    known = schema()["deepspeed"]["schedulers"]
    path: Path = ("scheduler", "type")
    kind = config.get(*path)
    if not isinstance(kind, str):
        return
    if kind not in known:
        fix = meant(kind, known) or "one of WarmupLR, WarmupDecayLR, OneCycle"
        message = f"DeepSpeed does not recognize the scheduler {kind}"
        yield config.problem("ZM103", "error", path, message, fix)
        return
    given = config.section("scheduler", "params")
    missing = [name for name in known[kind]["required"] if name not in given]
    if missing:
        message = f"{kind} needs {listed(missing)}"
        fix = " and ".join(config.write(name, "auto") for name in missing)
        fix = (
            f"{fix} with transformers, else a number"
            if missing == ["total_num_steps"]
            else "add it"
        )
        yield config.problem("ZM103", "error", path, message, fix)
    yield from _refused(config, "scheduler", kind, known[kind]["all"])


def _refused(config: Config, part: str, kind: str, taken: Collection[str]) -> Iterator[Problem]:
    """Yields parameters that the constructor of *kind* does not have."""
    for name in config.section(part, "params"):
        if str(name) not in taken:
            better = _OTHER_NAMES.get(str(name))
            near = f"did you mean {better}?" if better else meant(name, taken)
            message = f"{kind} has no parameter {name}, and refuses it"
            yield config.problem(
                "ZM102", "error", (part, "params", str(name)), message, near or f"remove {name}"
            )
