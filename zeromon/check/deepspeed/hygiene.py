"""Checks of settings that are valid and rarely wanted: gradients, devices, clipping, dead paths."""

from collections.abc import Collection, Iterator, Mapping
from difflib import get_close_matches

from zeromon.base.units import human_bytes
from zeromon.check.deepspeed.fields import ZERO, precision_of, stage_of
from zeromon.check.problem import (
    AUTO,
    Config,
    Machine,
    Path,
    Problem,
    did_you_mean,
    is_on,
    join_names,
    load_schema,
    parse_number,
    set_instead,
)

NO_BF16 = ("v100", "v100-16", "t4")
"""Names of devices without units for bf16, as ``--gpu`` takes them."""

_LARGE_PREFETCH = 500_000_000
"""Ten times DeepSpeed's default of ``stage3_prefetch_bucket_size``."""


def gradient_layout(config: Config, _: Machine) -> Iterator[Problem]:
    """Yields gradients that are not contiguous, or all-reduced where each rank needs its part only."""
    stage = stage_of(config)
    if not stage:
        return
    path: Path = (ZERO, "contiguous_gradients")
    # Below stage 3 DeepSpeed itself turns contiguous_gradients on with an offloaded optimizer
    offloads = config.get(ZERO, "offload_optimizer", "device") in ("cpu", "nvme")
    if is_on(config.get(*path)) is False and not (stage < 3 and offloads):
        message = "gradients stay where backward allocates them, which fragments the memory"
        yield config.problem("ZM205", "info", path, message, config.write(path[-1], True))
    path = (ZERO, "reduce_scatter")
    if is_on(config.get(*path)) is False:
        message = "every rank receives all gradients, of which it needs its own part: twice the bytes"
        fix = config.write(path[-1], True)
        if stage < 3:  # reduce_scatter alone all-reduces whole buckets there
            fix += f" and {config.write('use_multi_rank_bucket_allreduce', False)}"
        yield config.problem("ZM319", "warning", path, message, fix)


def gradient_types(config: Config, _: Machine) -> Iterator[Problem]:
    """Yields a type of accumulated gradients that DeepSpeed refuses without ZeRO."""
    accum = config.get("data_types", "grad_accum_dtype")
    dtype = next((name for name in ("bf16", "fp16") if precision_of(config, name)), None)
    if stage_of(config) == 0 and dtype and accum in ("fp32", "bf16", "fp16") and accum != dtype:
        path: Path = ("data_types", "grad_accum_dtype")
        message = f"DeepSpeed refuses {dtype} with gradients in {accum} at stage 0"
        yield config.problem("ZM105", "error", path, message, config.write(path[-1], dtype))


def bf16_device(config: Config, machine: Machine) -> Iterator[Problem]:
    """Yields bf16 on a device that emulates it."""
    if machine.device in NO_BF16 and precision_of(config, "bf16"):
        message = f"a {machine.device.upper()} has no units for bf16: it is emulated, and slow"
        fix = set_instead("bf16", f'"fp16": {{{config.write("enabled", True)}}}')
        yield config.problem("ZM406", "warning", ("bf16", "enabled"), message, fix)


def missing_clipping(config: Config, _: Machine) -> Iterator[Problem]:
    """Yields fp16 without a limit of the gradient norm."""
    if precision_of(config, "fp16") and not config.get("gradient_clipping"):
        message = (
            "fp16 without gradient_clipping: gradient spikes are applied unclipped by DeepSpeed up to "
            "0.18, and clipped at 1.0 by 0.19"
        )
        if config.has("gradient_clipping"):
            message = "fp16 with gradient_clipping of 0: gradient spikes are applied unclipped"
        fix = config.write("gradient_clipping", 1.0)
        yield config.problem("ZM407", "info", ("fp16", "enabled"), message, fix)


def large_prefetch(config: Config, _: Machine) -> Iterator[Problem]:
    """Yields a prefetch of ten times the default: elements, not bytes."""
    path = (ZERO, "stage3_prefetch_bucket_size")
    size = parse_number(config.get(*path))
    if stage_of(config) == 3 and size is not None and size >= _LARGE_PREFETCH:
        memory = human_bytes(2 * size)
        message = f"{size:,.0f} elements are gathered ahead, {memory} in half precision"
        yield config.problem("ZM303", "info", path, message, config.write(path[-1], 50_000_000))


def dead_paths(config: Config, _: Machine) -> Iterator[Problem]:
    """Yields settings of an offload to NVMe beside an offload to the host, which never reads them."""
    for name in ("offload_optimizer", "offload_param"):
        folder = config.get(ZERO, name, "nvme_path")
        if config.get(ZERO, name, "device") == "cpu" and folder not in (None, "", AUTO, "none"):
            message = f"{name} goes to host memory, and nvme_path has no effect"
            fix = f"{config.write('device', 'nvme')}, or remove nvme_path"
            yield config.problem("ZM106", "info", (ZERO, name, "nvme_path"), message, fix)
    # stage3.py reads it where it creates fp32 partitions of parameters that are on NVMe
    devices = [config.get(ZERO, name, "device") for name in ("offload_optimizer", "offload_param")]
    path = (ZERO, "offload_optimizer", "fast_init")
    if is_on(config.get(*path)) and AUTO not in devices and devices != ["nvme", "nvme"]:
        message = "fast_init has no effect: it is for an optimizer and parameters that are both on NVMe"
        yield config.problem("ZM106", "info", path, message, "remove fast_init")


# ---- checks of the optimizer and the scheduler that DeepSpeed makes from its configuration ------

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
        matches = get_close_matches(kind.lower(), every, 1, 0.6)
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


_PEAKS = {"WarmupLR": "warmup_max_lr", "WarmupDecayLR": "warmup_max_lr",
          "LRRangeTest": "lr_range_test_min_lr", "OneCycle": "cycle_max_lr"}  # fmt: skip
"""Scheduler -> its parameter that replaces the learning rate of the optimizer."""


def scheduler_rate(config: Config, _: Machine) -> Iterator[Problem]:
    """Yields a scheduler whose learning rate, or whose default for it, replaces the optimizer's.

    Defaults of ``lr_schedules.py``: WarmupLR takes the optimizer's rate, WarmupCosineLR a ratio of it.
    """
    kind, rate = str(config.get("scheduler", "type")), config.get("optimizer", "params", "lr")
    path: Path = ("scheduler", "params", _PEAKS.get(kind, ""))
    peak, lr = parse_number(config.get(*path)), parse_number(rate)
    if kind in ("WarmupDecayLR", "LRRangeTest") and config.get(*path) is None and lr != _DEFAULT_RATE:
        message = f"{path[-1]} is missing, and {kind} takes its default of {_DEFAULT_RATE}"
        mine = (
            f"the optimizer's lr of {lr:g}" if lr is not None else "the learning rate of the optimizer"
        )
        fix = f"give {path[-1]} the learning rate of the optimizer"
        fix = config.write(path[-1], rate) if rate is not None else fix
        yield config.problem("ZM105", "warning", path, f"{message}: {mine} is never used", fix)
    low = parse_number(config.get("scheduler", "params", "cycle_min_lr"))
    if peak is not None and lr is not None and lr not in (peak, low):
        message = f"{path[-1]} is {peak:g}, and wins: the optimizer's lr of {lr:g} is never used"
        fix = f"{config.write(path[-1], rate)}, or {config.write('lr', config.get(*path))}"
        yield config.problem("ZM105", "warning", path, message, fix)


_DEFAULT_RATE = 0.001
"""Default of ``warmup_max_lr`` of WarmupDecayLR, and of ``lr_range_test_min_lr``."""


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
