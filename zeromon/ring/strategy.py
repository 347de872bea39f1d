"""How a run splits its model over ranks: the value that agents send and that rules ask.

JSON and the ``strategy`` label of metrics carry :attr:`Strategy.label`; rules never compare that text.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from functools import cache
from typing import Any

from zeromon.ring.codes import TextEnum
from zeromon.ring.dimensions import MODEL_PARALLEL, Dim


class Framework(TextEnum):
    """What splits the model."""

    UNKNOWN = "unknown"
    DDP = "ddp"
    ZERO_REDUNDANCY = "zero-redundancy"
    """DDP with ``ZeroRedundancyOptimizer``."""
    FSDP1 = "fsdp1"
    FSDP2 = "fsdp2"
    DEEPSPEED = "deepspeed"


class Sharding(TextEnum):
    """What FSDP frees after forward."""

    UNKNOWN = ""
    FULL = "full"
    GRAD_OP = "grad-op"
    NONE = "no-shard"


class Offload(TextEnum):
    """Where offloaded parameters or optimizer state live."""

    NONE = ""
    HOST = "offload"
    NVME = "nvme"


@dataclass(frozen=True, slots=True)
class Strategy:
    """Framework, ZeRO stage, and what modifies it. FSDP's stage is that of the ZeRO paper it equals."""

    framework: Framework = Framework.UNKNOWN
    stage: int = 0
    """0: nothing is sharded; 1: optimizer state; 2: gradients, too; 3: parameters, too."""
    sharding: Sharding = Sharding.UNKNOWN
    offload: Offload = Offload.NONE
    hybrid: bool = False
    """Shards within groups of ranks and replicates over them (HSDP, ``HYBRID_SHARD``, hpZ)."""
    plus_plus: bool = False
    """ZeRO++: hpZ, quantized weights or quantized gradients."""
    parts: tuple[Dim, ...] = ()
    """The model parallelism beside the framework, which then is of the data-parallel ranks alone."""

    @property
    def is_fsdp(self) -> bool:
        """Either version of FSDP."""
        return self.framework in (Framework.FSDP1, Framework.FSDP2)

    @property
    def is_deepspeed(self) -> bool:
        """Any DeepSpeed stage."""
        return self.framework is Framework.DEEPSPEED

    @property
    def is_ddp(self) -> bool:
        """Plain DDP, without ``ZeroRedundancyOptimizer``."""
        return self.framework is Framework.DDP

    @property
    def label(self) -> str:
        """The text for people, JSON and the ``strategy`` label: ``deepspeed-zero3``, ``fsdp2 + tp``."""
        own = [] if self.parts and self.framework is Framework.UNKNOWN else [self._framework_label]
        return _JOIN.join([*own, *map(str, self.parts)])

    @property
    def _framework_label(self) -> str:
        if self.framework is Framework.DEEPSPEED:
            offload = f"-{self.offload}" if self.offload else ""
            return f"deepspeed-zero{self.stage}{'++' if self.plus_plus else ''}{offload}"
        if self.framework is Framework.FSDP1:
            return _FSDP1_LABELS.get((self.sharding, self.hybrid), "fsdp1")
        if self.framework is Framework.FSDP2:
            return "fsdp2" if self.stage == 3 else "fsdp2-zero2"
        if self.framework is Framework.ZERO_REDUNDANCY:
            return "zero1"
        return str(self.framework)

    def metadata(self) -> dict[str, Any]:
        """What an agent writes into its metadata: the label, and the fields beside it."""
        return {"strategy": self.label, "strategy_fields": asdict(self)}

    @classmethod
    def read(cls, metadata: Mapping[str, Any]) -> Strategy:
        """The strategy in *metadata*; by its label where an older agent sent no fields."""
        fields = metadata.get("strategy_fields")
        if not isinstance(fields, Mapping):
            return cls.parse(str(metadata.get("strategy", "")))
        try:
            return cls(
                framework=Framework(fields["framework"]),
                stage=int(fields["stage"]),
                sharding=Sharding(fields["sharding"]),
                offload=Offload(fields["offload"]),
                hybrid=bool(fields["hybrid"]),
                plus_plus=bool(fields["plus_plus"]),
                parts=tuple(map(Dim, fields.get("parts", ()))),
            )
        except (KeyError, TypeError, ValueError):  # a newer agent, or a torn record
            return cls.parse(str(metadata.get("strategy", "")))

    @staticmethod
    def parse(label: str) -> Strategy:
        """The strategy behind a label (from a Prometheus, or from a record without fields)."""
        return _parse(label)


_FSDP1_LABELS = {
    (Sharding.FULL, False): "fsdp1-full",
    (Sharding.GRAD_OP, False): "fsdp1-grad-op",
    (Sharding.FULL, True): "fsdp1-hybrid",
    (Sharding.GRAD_OP, True): "fsdp1-hybrid-zero2",
    (Sharding.NONE, False): "fsdp1-no-shard",
}
_STAGES = {Sharding.FULL: 3, Sharding.GRAD_OP: 2, Sharding.NONE: 0, Sharding.UNKNOWN: 3}


def fsdp1(sharding: Sharding, *, hybrid: bool = False, offload: bool = False) -> Strategy:
    """FSDP1 with one of torch's sharding strategies."""
    kept = Offload.HOST if offload else Offload.NONE
    return Strategy(Framework.FSDP1, _STAGES[sharding], sharding, kept, hybrid)


def fsdp2(*, reshards: bool, hybrid: bool = False, offload: bool = False) -> Strategy:
    """FSDP2; *reshards*: parameters are freed after forward."""
    sharding = Sharding.FULL if reshards else Sharding.GRAD_OP
    one = fsdp1(sharding, hybrid=hybrid, offload=offload)
    return replace(one, framework=Framework.FSDP2)


def deepspeed(
    stage: int, *, offload: Offload = Offload.NONE, hybrid: bool = False, plus_plus: bool = False
) -> Strategy:
    """A DeepSpeed engine."""
    return Strategy(Framework.DEEPSPEED, stage, offload=offload, hybrid=hybrid, plus_plus=plus_plus)


DDP = Strategy(Framework.DDP)
ZERO_REDUNDANCY = Strategy(Framework.ZERO_REDUNDANCY, 1)


_JOIN = " + "


@cache
def _parse(label: str) -> Strategy:
    by_label = {known.label: known for known in EVERY_FRAMEWORK}
    names = label.split(_JOIN)
    parts = tuple(dim for dim in MODEL_PARALLEL if dim in names)
    return replace(by_label.get(names[0], Strategy()), parts=parts)


EVERY_FRAMEWORK: tuple[Strategy, ...] = (
    DDP,
    ZERO_REDUNDANCY,
    fsdp2(reshards=True),
    fsdp2(reshards=False),
    *(fsdp1(sharding) for sharding in Sharding),
    fsdp1(Sharding.FULL, hybrid=True),
    fsdp1(Sharding.GRAD_OP, hybrid=True),
    *(
        deepspeed(stage, offload=offload, plus_plus=plus_plus)
        for stage in range(4)
        for offload in Offload
        for plus_plus in (False, True)
    ),
)
"""One of each label that an agent can send."""
