"""Checks of communication, precision and offload: what costs time or memory."""

from collections.abc import Callable, Iterator

from zeromon.base.units import human_bytes
from zeromon.check.deepspeed.fields import ZERO, fills_autos, precision_of, stage_of
from zeromon.check.problem import Config, Machine, Path, Problem, set_instead
from zeromon.memory.config_files import AUTO, is_on, parse_number

_MIN_BUCKET = 1_000_000
_LARGE_SHARE = 0.1


def fp32_gradients(config: Config, _: Machine) -> Iterator[Problem]:
    """Yields gradients in fp32 with parameters in a lower precision."""
    # None is "auto", which the command may turn on
    if not any(precision_of(config, name) is not False for name in ("bf16", "fp16")):
        return
    if str(config.get("communication_data_type", default="")).lower() == "fp32":
        message = "gradients are reduced in fp32: twice the bytes on the wire"
        yield config.change("ZM208", "info", ("communication_data_type",), message, "bf16")
    if config.get("data_types", "grad_accum_dtype") in ("fp32", "float32", "float"):
        message = "gradients are accumulated in fp32: twice their memory"
        path = ("data_types", "grad_accum_dtype")
        yield config.change("ZM208", "info", path, message, "bf16")


def overlap_comm(config: Config, machine: Machine) -> Iterator[Problem]:
    """Yields ``overlap_comm`` that is off; DeepSpeed's default is on at stage 3 and off below."""
    stage = stage_of(config)
    path = (ZERO, "overlap_comm")
    absent = config.get(*path) is None and stage in (1, 2)
    # One rank reduces nothing
    is_single = (machine.devices or config.ranks) == 1
    if not stage or is_single or not (absent or config.is_on(*path) is False):
        return
    fix = config.write("overlap_comm", True)
    if stage == 3:
        message = (
            "overlap_comm is off, though DeepSpeed turns it on at stage 3: the reduction of "
            "gradients runs on the stream that computes"
        )
        yield config.problem("ZM302", "info", path, message, fix)
        return
    size = config.number(ZERO, "reduce_bucket_size", default=5e8)
    price = f" of {human_bytes(size * 2)}" if size else ""
    state = "missing, and off by default" if absent else "off"
    message = f"overlap_comm is {state}: at stage {stage} backward waits for the reduction of gradients"
    yield config.problem("ZM302", "info", path, message, f"{fix}; costs a second bucket{price}")


def bucket_size(config: Config, machine: Machine) -> Iterator[Problem]:
    """Yields buckets that are too small for the bandwidth, or too large for the device memory."""
    stage = stage_of(config)
    if not stage:
        return
    sizes = {"reduce_bucket_size": 5e8}
    if stage < 3:
        sizes["allgather_bucket_size"] = 5e8
    overlaps = config.is_on(ZERO, "overlap_comm") and stage < 3
    for name, default in sizes.items():
        path = (ZERO, name)
        size = config.number(*path, default=default)
        if size is None or size <= 0:
            continue
        if size < _MIN_BUCKET:
            message = f"{name} of {size:,.0f} elements makes many small messages"
            yield config.problem("ZM303", "warning", path, message, config.write(name, 50_000_000))
        # Below stage 3 overlap_comm adds a second bucket; an element takes 2 bytes in half precision
        nbytes = size * 2 * (2 if overlaps and name == "reduce_bucket_size" else 1)
        if machine.device_bytes and nbytes > _LARGE_SHARE * machine.device_bytes:
            share = nbytes / machine.device_bytes
            message = f"{name} takes {human_bytes(nbytes)} of the device, {share:.0%} of its memory"
            yield config.problem("ZM303", "warning", path, message, config.write(name, 200_000_000))


def fp16_with_zero3(config: Config, _: Machine) -> Iterator[Problem]:
    """Yields fp16 at stage 3: bf16 needs no loss scaling."""
    if precision_of(config, "fp16") and stage_of(config) == 3:
        message = "fp16 at stage 3 needs loss scaling, and skips steps that overflow"
        fix = set_instead(
            "fp16", f'"bf16": {{{config.write("enabled", True)}}} where the hardware has it'
        )
        yield config.problem("ZM402", "info", ("fp16", "enabled"), message, fix)


def loss_scale(config: Config, _: Machine) -> Iterator[Problem]:
    """Yields loss scaling that is fixed, starts too high, or changes too fast."""
    section, is_enabled = config.section("fp16"), precision_of(config, "fp16")
    if not section or is_enabled is False:
        return
    severity = "warning" if is_enabled else "info"  # "auto" may turn fp16 off
    fixed = parse_number(section.get("loss_scale", 0))
    if fixed is not None and fixed > 0:
        message = f"the loss scale is fixed at {fixed:g}: it does not follow an overflow"
        yield config.change("ZM404", severity, ("fp16", "loss_scale"), message, 0)
        return
    window, hysteresis = (
        parse_number(section.get(name)) or default
        for name, default in (("loss_scale_window", 1000), ("hysteresis", 2))
    )
    often = f"skips about {hysteresis:g} of {window + 1 + hysteresis:g} steps to find its limit again"
    limits: tuple[tuple[str, Callable[[float], bool], str, int], ...] = (
        ("initial_scale_power", lambda x: x > 24, "makes the first steps overflow one by one", 16),
        ("loss_scale_window", lambda x: 0 < x < 100, often, 1000),
        ("hysteresis", lambda x: x < 1, "is counted down to 1, so the scale is never lowered", 2),
    )
    for name, is_bad, effect, better in limits:
        value = parse_number(section.get(name))
        if value is not None and is_bad(value):
            message = f"{name} of {value:g} {effect}"
            yield config.change("ZM404", severity, ("fp16", name), message, better)


def no_mixed_precision(config: Config, _: Machine) -> Iterator[Problem]:
    """Yields ZeRO in fp32."""
    if not stage_of(config):
        return
    if any(precision_of(config, name) is not False for name in ("bf16", "fp16")):
        return
    if config.get("torch_autocast", "enabled") not in (None, False):
        return
    message = "neither bf16 nor fp16 is enabled: parameters, gradients and messages are fp32"
    fix = f'"bf16": {{{config.write("enabled", True)}}}'
    if fills_autos(config):  # a Trainer refuses another value than its argument's
        fix = f'"bf16": {{{config.write("enabled", AUTO)}}} with bf16=True, or mixed_precision: bf16'
    yield config.problem("ZM405", "info", (ZERO, "stage"), message, fix)


NO_BF16 = ("v100", "v100-16", "t4")
"""Names of devices without units for bf16, as ``--gpu`` takes them."""


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


_LARGE_PREFETCH = 500_000_000
"""Ten times DeepSpeed's default of ``stage3_prefetch_bucket_size``."""


def large_prefetch(config: Config, _: Machine) -> Iterator[Problem]:
    """Yields a prefetch of ten times the default: elements, not bytes."""
    path = (ZERO, "stage3_prefetch_bucket_size")
    size = config.number(*path)
    if stage_of(config) == 3 and size is not None and size >= _LARGE_PREFETCH:
        memory = human_bytes(2 * size)
        message = f"{size:,.0f} elements are gathered ahead, {memory} in half precision"
        yield config.change("ZM303", "info", path, message, 50_000_000)


def gradient_layout(config: Config, _: Machine) -> Iterator[Problem]:
    """Yields gradients that are not contiguous, or all-reduced where each rank needs its part only."""
    stage = stage_of(config)
    if not stage:
        return
    path: Path = (ZERO, "contiguous_gradients")
    # Below stage 3 DeepSpeed itself turns contiguous_gradients on with an offloaded optimizer
    offloads = config.get(ZERO, "offload_optimizer", "device") in ("cpu", "nvme")
    if config.is_on(*path) is False and not (stage < 3 and offloads):
        message = "gradients stay where backward allocates them, which fragments the memory"
        yield config.change("ZM205", "info", path, message, True)
    path = (ZERO, "reduce_scatter")
    if config.is_on(*path) is False:
        message = "every rank receives all gradients, of which it needs its own part: twice the bytes"
        fix = config.write(path[-1], True)
        if stage < 3:  # reduce_scatter alone all-reduces whole buckets there
            fix += f" and {config.write('use_multi_rank_bucket_allreduce', False)}"
        yield config.problem("ZM319", "warning", path, message, fix)


# ---- offload --------------------------------------------------------------------------------------


def pinned_memory(config: Config, _: Machine) -> Iterator[Problem]:
    """Yields offload through pageable memory, whose copies do not overlap; the default is pinned."""
    for name in ("offload_optimizer", "offload_param"):
        section = config.section(ZERO, name)
        used = section.get("device") in ("cpu", "nvme")
        if used and is_on(section.get("pin_memory")) is False:
            message = f"{name} copies through pageable memory: slower, and without overlap"
            yield config.change("ZM502", "warning", (ZERO, name, "pin_memory"), message, True)


def nvme_settings(config: Config, _: Machine) -> Iterator[Problem]:
    """Yields offload to NVMe without a path, or with a queue that limits the bandwidth."""
    used = [
        name
        for name in ("offload_optimizer", "offload_param")
        if config.get(ZERO, name, "device") == "nvme"
    ]
    # Below stage 3 nothing goes to NVMe: conflicts.no_effect reports that; None is "auto"
    if not used or stage_of(config) not in (3, None):
        return
    for name in used:
        if config.get(ZERO, name, "nvme_path") in (None, ""):
            message = f"{name} goes to NVMe, but nvme_path is missing"
            fix = config.write("nvme_path", "/local_nvme")
            yield config.problem("ZM504", "error", (ZERO, name, "device"), message, fix)
    aio = config.section("aio")
    if not aio:
        message = "NVMe without an aio section runs with a queue depth of 8 on one thread"
        fix = f'"aio": {{{config.write("queue_depth", 32)}}}; ds_nvme_tune measures what is best'
        yield config.problem("ZM504", "info", (ZERO, used[0], "device"), message, fix)
        return
    limits: tuple[tuple[str, float, float, int], ...] = (
        ("queue_depth", 4, 1024, 32), ("block_size", 64 << 10, 64 << 20, 1 << 20),
        ("intra_op_parallelism", 1, 64, 1),
    )  # fmt: skip
    for name, minimum, maximum, better in limits:
        value = parse_number(aio.get(name))
        if value is not None and not minimum <= value <= maximum:
            side = "low" if value < minimum else "high"
            message = f"aio.{name} of {value:g} is too {side} for the bandwidth of a drive"
            yield config.problem("ZM504", "warning", ("aio", name), message, config.write(name, better))
