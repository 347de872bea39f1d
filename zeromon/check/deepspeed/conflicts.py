"""Checks of settings that contradict each other, or have no effect."""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from zeromon.check.deepspeed.fields import ZERO, fills_autos, precision_of, stage_of
from zeromon.check.problem import NAMES, Config, Machine, Path, Problem, load_schema, without_effect
from zeromon.memory.config_files import AUTO, is_on

_ONLY_STAGE_3: Sequence[str] = NAMES["deepspeed"]["only_stage_3"]
"""Settings that DeepSpeedEngine._configure_zero_optimizer passes to the stage 3 optimizer alone."""

_ONLY_STAGES_1_AND_2: Sequence[str] = NAMES["deepspeed"]["only_stages_1_and_2"]
"""Settings that the same method passes to the optimizer of stages 1 and 2 alone."""

_NOT_STAGE_0: Sequence[str] = NAMES["deepspeed"]["not_stage_0"]

_NEED_ZERO = (
    ("fp16", "fp16_master_weights_and_grads"),
    ("bf16", "bf16_master_weights_and_grads"),
    ("bf16", "bf16_optimizer_states"),
)


def duplicate_keys(config: Config, _: Machine) -> Iterator[Problem]:
    """Yields keys that the file gives twice."""
    for path in config.duplicates:
        outcome = "DeepSpeed refuses that, others take the last"
        message = f"{'.'.join(path)} is given twice: {outcome}"
        severity = "error" if config.dialect == "json" else "warning"
        yield config.problem("ZM105", severity, path, message, "keep one")


def two_precisions(config: Config, _: Machine) -> Iterator[Problem]:
    """Yields fp16 and bf16 together."""
    if precision_of(config, "fp16") and precision_of(config, "bf16"):
        message = "fp16 and bf16 are both enabled; DeepSpeed accepts only one"
        yield config.problem("ZM105", "error", ("fp16", "enabled"), message, _fp16_off(config))


def two_names(config: Config, _: Machine) -> Iterator[Problem]:
    """Yields settings under two names, and ``legacy_stage1``, which DeepSpeed removed."""
    for old, new in (("cpu_offload", "offload_optimizer"), ("cpu_offload_param", "offload_param")):
        if config.has(ZERO, old) and config.has(ZERO, new):
            message = f"{old} and {new} are both given, and DeepSpeed refuses that"
            yield config.problem("ZM105", "error", (ZERO, old), message, f"remove {old}")
    for name, field in load_schema()["deepspeed"]["sections"][ZERO]["fields"].items():
        if "alias" in field and config.has(ZERO, name) and config.has(ZERO, field["alias"]):
            message = f"{name} and {field['alias']} are one setting, and DeepSpeed refuses both"
            yield config.problem("ZM105", "error", (ZERO, name), message, f"remove {name}")
    if config.is_on(ZERO, "legacy_stage1"):
        message = "legacy_stage1 raises an exception: that stage 1 is gone since DeepSpeed 0.5.9"
        fix = "remove legacy_stage1"
        yield config.problem("ZM105", "error", (ZERO, "legacy_stage1"), message, fix)


def stage_conflicts(config: Config, _: Machine) -> Iterator[Problem]:
    """Yields settings that DeepSpeed refuses at the ZeRO stage of *config*, or beside others in bf16."""
    stage = stage_of(config)
    if stage is None:
        return
    ratio = config.number(ZERO, "offload_optimizer", "ratio")
    if ratio is not None and ratio < 1 and stage < 3:
        message = f"a part of the optimizer is offloaded only at stage 3, and this is stage {stage}"
        yield config.change("ZM105", "error", (ZERO, "offload_optimizer", "ratio"), message, 1.0)
    if config.is_on(ZERO, "compute_grad_norm") is False and stage not in (1, 2):
        path = (ZERO, "compute_grad_norm")
        message = f"compute_grad_norm can be off only at stages 1 and 2, and this is stage {stage}"
        yield config.problem("ZM105", "error", path, message, "remove compute_grad_norm")
    if str(config.get("gradient_allreduce_op", default="")).lower() == "sum" and stage == 3:
        message = "gradients cannot be summed at stage 3"
        yield config.change("ZM105", "error", ("gradient_allreduce_op",), message, "mean")
    for section, name in _NEED_ZERO:
        if config.is_on(section, name) and not stage:
            message = f"{name} needs ZeRO stage 1, 2 or 3, and this is stage 0"
            yield config.change("ZM105", "error", (section, name), message, False)
    if config.is_on("bf16", "bf16_optimizer_states") and not is_on(
        config.get("bf16", "bf16_master_weights_and_grads")
    ):
        message = "bf16_optimizer_states needs bf16_master_weights_and_grads"
        fix = config.write("bf16_master_weights_and_grads", True)
        yield config.problem("ZM105", "error", ("bf16", "bf16_optimizer_states"), message, fix)


def _fp16_off(config: Config) -> str:
    inner = config.write("enabled", False)
    return f"fp16: {{{inner}}}" if config.dialect == "yaml" else f'"fp16": {{{inner}}}'


def no_effect(config: Config, _: Machine) -> Iterator[Problem]:
    """Yields one problem for settings that the ZeRO stage ignores, and one for NVMe below stage 3."""
    stage = stage_of(config)
    if stage is None or not isinstance(config.get(ZERO), Mapping):
        return
    ignored = {0: (*_NOT_STAGE_0, *_ONLY_STAGE_3), 3: _ONLY_STAGES_1_AND_2}.get(stage, _ONLY_STAGE_3)
    unused = [name for name in config.section(ZERO) if name in ignored and _has_value(config, name)]
    if unused:
        message, fix = without_effect(unused, f"at stage {stage}")
        yield config.problem("ZM106", "info", (ZERO, unused[0]), message, fix)
    nvme = config.get(ZERO, "offload_optimizer", "device") == "nvme"
    if nvme and stage in (1, 2):
        message = f"at stage {stage} the optimizer goes to host memory: only stage 3 uses NVMe"
        yield config.change("ZM106", "warning", (ZERO, "offload_optimizer", "device"), message, "cpu")


def _has_value(config: Config, name: str) -> bool:
    """Returns whether a setting has a value; an offload to the device ``none`` has no value."""
    value = config.get(ZERO, name)
    if isinstance(value, Mapping):
        return value.get("device", "none") not in ("none", None, AUTO)
    return value is not None


def gradient_types(config: Config, _: Machine) -> Iterator[Problem]:
    """Yields a type of accumulated gradients that DeepSpeed refuses without ZeRO."""
    accum = config.get("data_types", "grad_accum_dtype")
    dtype = next((name for name in ("bf16", "fp16") if precision_of(config, name)), None)
    if stage_of(config) == 0 and dtype and accum in ("fp32", "bf16", "fp16") and accum != dtype:
        path: Path = ("data_types", "grad_accum_dtype")
        message = f"DeepSpeed refuses {dtype} with gradients in {accum} at stage 0"
        yield config.change("ZM105", "error", path, message, dtype)


_PEAKS = {"WarmupLR": "warmup_max_lr", "WarmupDecayLR": "warmup_max_lr",
          "LRRangeTest": "lr_range_test_min_lr", "OneCycle": "cycle_max_lr"}  # fmt: skip
"""Scheduler -> its parameter that replaces the learning rate of the optimizer."""


_DEFAULT_RATE = 0.001
"""Default of ``warmup_max_lr`` of WarmupDecayLR, and of ``lr_range_test_min_lr``."""


def scheduler_rate(config: Config, _: Machine) -> Iterator[Problem]:
    """Yields a scheduler whose learning rate, or whose default for it, replaces the optimizer's.

    Defaults of ``lr_schedules.py``: WarmupLR takes the optimizer's rate, WarmupCosineLR a ratio of it.
    """
    kind, rate = str(config.get("scheduler", "type")), config.get("optimizer", "params", "lr")
    path: Path = ("scheduler", "params", _PEAKS.get(kind, ""))
    peak, lr = config.number(*path), config.number("optimizer", "params", "lr")
    if kind in ("WarmupDecayLR", "LRRangeTest") and config.get(*path) is None and lr != _DEFAULT_RATE:
        message = f"{path[-1]} is missing, and {kind} takes its default of {_DEFAULT_RATE}"
        mine = (
            f"the optimizer's lr of {lr:g}" if lr is not None else "the learning rate of the optimizer"
        )
        fix = f"give {path[-1]} the learning rate of the optimizer"
        fix = config.write(path[-1], rate) if rate is not None else fix
        yield config.problem("ZM105", "warning", path, f"{message}: {mine} is never used", fix)
    low = config.number("scheduler", "params", "cycle_min_lr")
    if peak is not None and lr is not None and lr not in (peak, low):
        message = f"{path[-1]} is {peak:g}, and wins: the optimizer's lr of {lr:g} is never used"
        fix = f"{config.write(path[-1], rate)}, or {config.write('lr', config.get(*path))}"
        yield config.problem("ZM105", "warning", path, message, fix)


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
    if config.is_on(*path) and AUTO not in devices and devices != ["nvme", "nvme"]:
        message = "fast_init has no effect: it is for an optimizer and parameters that are both on NVMe"
        yield config.problem("ZM106", "info", path, message, "remove fast_init")


# ---- checks of the batch size and of checkpoints -------------------------------------------------

BATCH = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
NO_BATCH = (
    "neither train_batch_size nor train_micro_batch_size_per_gpu is given: DeepSpeed refuses that, "
    "unless the script sets one"
)
_OTHER_PARALLELISM = ("tensor_parallel", "sequence_parallel_size", "expert_parallel", "pipeline")
"""With these ranks may share samples: the number of ranks then does not give the batch size."""


class _Batch(NamedTuple):
    """The three batch settings; None where one is left open."""

    total: int | None
    micro: int | None
    steps: int | None
    ranks: int | None
    """Ranks that share the samples; None where unknown."""


def _batch_of(config: Config, machine: Machine) -> _Batch | None:
    """Returns the batch settings; None where a value is wrong, which :func:`wrong_values` reports."""
    total, micro, steps = (config.whole(name) for name in BATCH)
    if (total or 1) < 1 or (micro or 1) < 1 or (steps or 1) < 1:
        return None
    ranks = None if any(map(config.has, _OTHER_PARALLELISM)) else machine.devices or config.ranks
    return _Batch(total, micro, steps, ranks)


def batch_size(config: Config, machine: Machine) -> Iterator[Problem]:
    """Yields a train_batch_size other than micro-batch x accumulation x ranks, as DeepSpeed asserts."""
    batch = _batch_of(config, machine)
    if batch is None or not batch.total or AUTO in map(config.get, BATCH):
        return
    numbers = [number for number in batch[1:] if number]
    size, total = math.prod(numbers), batch.total
    factors = " x ".join(map(str, numbers)) + (" ranks" if batch.ranks else "")
    if len(numbers) == 3 and total != size:
        message = f"train_batch_size is {total}, but {factors} is {size}"
        yield config.change("ZM602", "error", ("train_batch_size",), message, size)
    elif total % size:
        product = f"{factors} = {size}" if len(numbers) > 1 else factors
        message = f"train_batch_size of {total} is no multiple of {product}"
        fix = config.write("train_batch_size", -(-total // size) * size)
        fix = "remove train_batch_size" if batch.micro and batch.steps else fix  # which give it
        yield config.problem("ZM602", "error", ("train_batch_size",), message, fix)


def missing_batch(config: Config, machine: Machine) -> Iterator[Problem]:
    """Yields a file without a batch size, which DeepSpeed refuses; accelerate replaces only "auto"."""
    if _batch_of(config, machine) is None or not isinstance(config.get(ZERO), Mapping):
        return
    if not any(config.get(name) is not None for name in BATCH[:2]):
        size = AUTO if fills_autos(config) else 1
        fix = config.write("train_micro_batch_size_per_gpu", size)
        steps = BATCH[2:]
        yield config.problem("ZM602", "warning", steps if config.has(*steps) else (), NO_BATCH, fix)


def batch_product(config: Config, machine: Machine) -> Iterator[Problem]:
    """Yields the number of samples of a step, as a quiet problem."""
    batch = _batch_of(config, machine)
    if batch is None or not batch.micro or not batch.ranks:
        return
    steps = batch.steps or 1
    samples = batch.micro * steps * batch.ranks
    if not batch.total or batch.total == samples:
        message = f"a step takes {batch.micro} x {steps} x {batch.ranks} ranks = {samples} samples"
        path = ("train_micro_batch_size_per_gpu",)
        yield config.problem("ZM603", "info", path, message, "nothing", quiet=True)


def save_without_gather(config: Config, _: Machine) -> Iterator[Problem]:
    """Yields stage 3 without gathering of the weights: a saved model consists of shards."""
    name = "stage3_gather_16bit_weights_on_model_save"
    aliases = ("gather_16bit_weights_on_model_save", "stage3_gather_fp16_weights_on_model_save")
    if stage_of(config) != 3 or any(config.has(ZERO, alias) for alias in aliases):
        return
    value = config.get(ZERO, name)
    if value != AUTO and not is_on(value):
        message = "a model is saved as shards, which zero_to_fp32.py must merge"
        path = (ZERO, name) if config.has(ZERO, name) else (ZERO, "stage")
        yield config.problem("ZM701", "info", path, message, config.write(name, True))
