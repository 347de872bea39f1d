"""What is asked for: the model, the device, the links and how the run is sharded. Frozen data.

:func:`from_json` reads it strictly: an unknown key or a value of another type is an error that names it.
"""

import dataclasses
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

DEFAULT_RATE = "default"


class SpecError(ValueError):
    """The specification cannot be read; the text names the place."""


@dataclass(frozen=True)
class LinkSpec:
    """A network: one transfer at a time, in the order of issue."""

    latency_seconds: float
    bytes_per_second: float
    """Bus bandwidth as nccl-tests define it."""


@dataclass(frozen=True)
class DeviceSpec:
    """The rates that kernels reach, not those of the data sheet."""

    flops_per_second: dict[str, float]
    """By dtype ("bfloat16"); "default" for any other."""
    bytes_per_second: float
    launch_seconds: float = 5e-6
    """What the host needs to launch a kernel."""
    collective_launch_seconds: float = 10e-6

    def rate(self, dtype: str) -> float:
        """Returns the FLOPs per second that matrix kernels of *dtype* reach."""
        rates = self.flops_per_second
        return rates[dtype] if dtype in rates else rates[DEFAULT_RATE]


@dataclass(frozen=True)
class ModelSpec:
    """A decoder of transformer blocks; or *factory*, "package.module:function", called for the model.

    A unit of FSDP2 is a child of the model's list *blocks*, and the model itself.
    """

    layers: int = 2
    hidden: int = 1024
    heads: int = 8
    ffn: int = 4096
    vocabulary: int = 32000
    sequence: int = 1024
    dtype: str = "float32"
    factory: str = ""
    blocks: str = "blocks"


@dataclass(frozen=True)
class ShardingSpec:
    """How FSDP2 shards the model, and how the steps are taken."""

    shards: int
    replicas: int = 1
    """More than one: HSDP, gradients are reduced between the replicas, too."""
    reshard_after_forward: bool | None = None
    """None: as FSDP2 does by itself, which keeps the root alone gathered."""
    prefetch: int | None = None
    """None: as FSDP2 does by itself. 0: no gather before its unit needs it. n: n units ahead."""
    micro_steps: int = 1
    sync_each_micro_step: bool = True
    """False: gradients are reduced in the last micro-step only (set_requires_gradient_sync)."""
    reshard_after_backward: bool = True
    """False: parameters stay gathered until the last micro-step (set_reshard_after_backward)."""
    param_dtype: str | None = None
    reduce_dtype: str | None = None
    activation_checkpointing: bool = False


@dataclass(frozen=True)
class Spec:
    """One question: what would a step cost?"""

    model: ModelSpec
    device: DeviceSpec
    sharding: ShardingSpec
    link: LinkSpec
    """Between the shards."""
    replica_link: LinkSpec | None = None
    """Between the replicas; None: they share *link*."""
    micro_batch: int = 1
    steps: int = 3
    """Steps to take; the last one is reported. The first creates the state of the optimizer."""
    clip_gradients: bool = False
    """Whether gradients are clipped to a norm, which is reduced over all ranks before the optimizer."""
    spans: bool = False
    """Whether the result lists each kernel, collective and wait."""


def from_json(value: Any) -> Spec:
    """Returns the specification in *value*, a decoded JSON object."""
    spec = _build(Spec, value, "spec")
    assert isinstance(spec, Spec)
    for place, number in (
        ("steps", spec.steps),
        ("micro_batch", spec.micro_batch),
        ("sharding.shards", spec.sharding.shards),
        ("sharding.replicas", spec.sharding.replicas),
        ("sharding.micro_steps", spec.sharding.micro_steps),
    ):
        if number < 1:
            raise SpecError(f"spec.{place}: expected 1 or more, found {number}")
    if DEFAULT_RATE not in spec.device.flops_per_second:
        raise SpecError(f'spec.device.flops_per_second: the rate "{DEFAULT_RATE}" is missing')
    return spec


def _build(kind: Any, value: Any, place: str) -> Any:
    origin = typing.get_origin(kind)
    if origin in (types.UnionType, typing.Union):
        if value is None:
            return None
        (kind,) = (arg for arg in typing.get_args(kind) if arg is not type(None))
        return _build(kind, value, place)
    if dataclasses.is_dataclass(kind):
        return _build_fields(kind, value, place)
    if origin is dict:
        if not isinstance(value, Mapping):
            raise SpecError(f"{place}: expected an object, found {value!r}")
        return {key: _build(float, item, f"{place}.{key}") for key, item in value.items()}
    if kind is float and type(value) is int:
        return float(value)
    if type(value) is not kind:
        raise SpecError(f"{place}: expected {kind.__name__}, found {value!r}")
    return value


def _build_fields(kind: Any, value: Any, place: str) -> Any:
    if not isinstance(value, Mapping):
        raise SpecError(f"{place}: expected an object, found {value!r}")
    hints = typing.get_type_hints(kind)
    unknown = sorted(set(value) - set(hints))
    if unknown:
        raise SpecError(f"{place}: unknown key {unknown[0]!r}; known are {', '.join(hints)}")
    needed = {
        f.name
        for f in dataclasses.fields(kind)
        if f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING
    }
    missing = sorted(needed - set(value))
    if missing:
        raise SpecError(f"{place}: the key {missing[0]!r} is missing")
    return kind(**{key: _build(hints[key], item, f"{place}.{key}") for key, item in value.items()})
