"""Checks of the batch size and of checkpoints."""

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from zeromon.check.deepspeed.readers import ZERO, has_auto, stage_of
from zeromon.check.problem import AUTO, Config, Machine, Problem, is_on, parse_whole

_BATCH = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
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
    total, micro, steps = (parse_whole(config.get(name)) for name in _BATCH)
    if (total or 1) < 1 or (micro or 1) < 1 or (steps or 1) < 1:
        return None
    ranks = None if any(map(config.has, _OTHER_PARALLELISM)) else machine.devices or config.ranks
    return _Batch(total, micro, steps, ranks)


def batch_size(config: Config, machine: Machine) -> Iterator[Problem]:
    """Yields a train_batch_size other than micro-batch x accumulation x ranks, as DeepSpeed asserts."""
    batch = _batch_of(config, machine)
    if batch is None:
        return
    total, micro, steps, ranks = batch
    if not total:
        return
    if micro and steps:
        size = micro * steps
        if ranks and total != size * ranks:
            product = f"{micro} x {steps} x {ranks} ranks is {size * ranks}"
            message = f"train_batch_size is {total}, but {product}"
            fix = config.write("train_batch_size", size * ranks)
            yield config.problem("ZM602", "error", ("train_batch_size",), message, fix)
        elif total % size:
            message = f"train_batch_size of {total} is no multiple of {micro} x {steps} = {size}"
            fix = config.write("train_batch_size", AUTO)
            yield config.problem("ZM602", "error", ("train_batch_size",), message, fix)
    elif ranks or micro or steps:
        factor = (micro or 1) * (steps or 1) * (ranks or 1)
        if total % factor and AUTO not in (config.get(name) for name in _BATCH):
            factors = [str(n) for n in (micro, steps) if n]
            factors += [f"{ranks} ranks"] if ranks else []
            message = f"train_batch_size of {total} is no multiple of {' x '.join(factors)}"
            fix = config.write("train_batch_size", -(-total // factor) * factor)
            yield config.problem("ZM602", "error", ("train_batch_size",), message, fix)


def missing_batch(config: Config, machine: Machine) -> Iterator[Problem]:
    """Yields a file without a batch size: accelerate adds the size, DeepSpeed refuses."""
    if _batch_of(config, machine) is None or not isinstance(config.get(ZERO), Mapping):
        return
    if not any(config.get(name) is not None for name in _BATCH[:2]):
        message = (
            "neither train_batch_size nor train_micro_batch_size_per_gpu is given: accelerate adds "
            "them, DeepSpeed refuses"
        )
        fix = config.write("train_micro_batch_size_per_gpu", AUTO)
        steps = ("gradient_accumulation_steps",)
        severity = "info" if has_auto(config) or config.ranks else "warning"
        yield config.problem("ZM602", severity, steps if config.has(*steps) else (), message, fix)


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
