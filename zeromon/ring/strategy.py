"""How a run splits its model over ranks: the value that agents send and that rules ask.

JSON and the ``strategy`` label of metrics carry :attr:`Strategy.label`; rules never compare that text.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from functools import cache, lru_cache
from typing import Any, TypedDict

from zeromon.ring.codes import TextEnum


class Framework(TextEnum):
    """The framework that splits the model."""

    UNKNOWN = "unknown"
    DDP = "ddp"
    ZERO_REDUNDANCY = "zero-redundancy"
    """DDP with ``ZeroRedundancyOptimizer``."""
    FSDP1 = "fsdp1"
    FSDP2 = "fsdp2"
    DEEPSPEED = "deepspeed"


class Sharding(TextEnum):
    """The sharding strategy of FSDP, which decides what it frees after forward."""

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
    parts: tuple["Dim", ...] = ()
    """The model parallelism beside the framework, which then is of the data-parallel ranks alone."""

    @property
    def is_fsdp(self) -> bool:
        """Either version of FSDP."""
        return self.framework in (Framework.FSDP1, Framework.FSDP2)

    @property
    def is_sharding_fsdp(self) -> bool:
        """True if FSDP gathers parameters: FSDP1 with ``NO_SHARD`` does not."""
        return self.is_fsdp and self.stage >= 2

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
        prefix = [] if self.parts and self.framework is Framework.UNKNOWN else [self._framework_label]
        return _JOIN.join([*prefix, *map(str, self.parts)])

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
        """Returns the metadata that an agent writes: the label, and the fields beside it."""
        return {"strategy": self.label, "strategy_fields": asdict(self)}

    @classmethod
    def read(cls, metadata: Mapping[str, Any]) -> "Strategy":
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
    def parse(label: str) -> "Strategy":
        """The strategy behind a label (from a Prometheus, or from a record without fields)."""
        return _parse_label(label)


_FSDP1_LABELS = {
    (Sharding.FULL, False): "fsdp1-full",
    (Sharding.GRAD_OP, False): "fsdp1-grad-op",
    (Sharding.FULL, True): "fsdp1-hybrid",
    (Sharding.GRAD_OP, True): "fsdp1-hybrid-zero2",
    (Sharding.NONE, False): "fsdp1-no-shard",
}
_STAGES = {Sharding.FULL: 3, Sharding.GRAD_OP: 2, Sharding.NONE: 0, Sharding.UNKNOWN: 3}


def fsdp1_strategy(sharding: Sharding, *, hybrid: bool = False, offload: bool = False) -> Strategy:
    """FSDP1 with one of torch's sharding strategies."""
    offload_to = Offload.HOST if offload else Offload.NONE
    return Strategy(Framework.FSDP1, _STAGES[sharding], sharding, offload_to, hybrid)


def fsdp2_strategy(*, reshards: bool, hybrid: bool = False, offload: bool = False) -> Strategy:
    """FSDP2; *reshards*: parameters are freed after forward."""
    sharding = Sharding.FULL if reshards else Sharding.GRAD_OP
    base = fsdp1_strategy(sharding, hybrid=hybrid, offload=offload)
    return replace(base, framework=Framework.FSDP2)


def deepspeed_strategy(
    stage: int, *, offload: Offload = Offload.NONE, hybrid: bool = False, plus_plus: bool = False
) -> Strategy:
    """A DeepSpeed engine."""
    return Strategy(Framework.DEEPSPEED, stage, offload=offload, hybrid=hybrid, plus_plus=plus_plus)


ONE_PROCESS = "one process"
"""The label of a single rank without a framework: nothing is split."""
DDP = Strategy(Framework.DDP)
ZERO_REDUNDANCY = Strategy(Framework.ZERO_REDUNDANCY, 1)


_JOIN = " + "


@cache
def _parse_label(label: str) -> Strategy:
    by_label = {candidate.label: candidate for candidate in EVERY_FRAMEWORK}
    names = label.split(_JOIN)
    dims = tuple(dim for dim in MODEL_PARALLEL if dim in names)
    return replace(by_label.get(names[0], Strategy()), parts=dims)


EVERY_FRAMEWORK: tuple[Strategy, ...] = (
    DDP,
    ZERO_REDUNDANCY,
    fsdp2_strategy(reshards=True),
    fsdp2_strategy(reshards=False),
    *(fsdp1_strategy(sharding) for sharding in Sharding),
    fsdp1_strategy(Sharding.FULL, hybrid=True),
    fsdp1_strategy(Sharding.GRAD_OP, hybrid=True),
    *(
        deepspeed_strategy(stage, offload=offload, plus_plus=plus_plus)
        for stage in range(4)
        for offload in Offload
        for plus_plus in (False, True)
    ),
)
"""One of each label that an agent can send."""


# ---- dimensions of the parallelism --------------------------------------------------------------

_MESH = "mesh_"
"""DeviceMesh describes the group of its dimension ``tp`` as ``mesh_tp``."""
_MAX_NAME_CHARS = 40


class Dim(TextEnum):
    """The purpose of a process group."""

    DP = "dp"
    """Data parallel: the ranks hold the same parameters, or it is not known that they do not."""
    DP_REPLICATE = "dp_replicate"
    DP_SHARD = "dp_shard"
    TP = "tp"
    PP = "pp"
    CP = "cp"
    """Context or sequence parallel."""
    EP = "ep"
    WORLD = "world"
    """All ranks, for a purpose that is not known."""
    OTHER = "other"


MODEL_PARALLEL = (Dim.TP, Dim.PP, Dim.CP, Dim.EP)
"""The dimensions that split the model or a sample, not the batch."""
DATA_PARALLEL = (Dim.DP, Dim.DP_REPLICATE, Dim.DP_SHARD)
SAME_BATCH = (Dim.TP, Dim.PP, Dim.CP)
"""The dimensions whose ranks work on the same samples. Ranks of ``ep`` have samples of their own."""

_DATA = {"dp", "ddp", "fsdp", "replicate", "shard", "batch", "loss", "zero"}
_WORDS = {
    "tensor": Dim.TP, "tp": Dim.TP, "etp": Dim.TP, "pipeline": Dim.PP, "pipe": Dim.PP, "pp": Dim.PP,
    "context": Dim.CP, "cp": Dim.CP, "sequence": Dim.CP, "sp": Dim.CP, "expert": Dim.EP, "ep": Dim.EP,
}  # fmt: skip
_LONG = {"tensor", "pipeline", "context", "sequence", "expert"}
"""Words that name a dimension only beside ``parallel`` or alone."""


@lru_cache
def dim_by_name(name: str) -> Dim:
    """Returns what a group of this name is for; a name of several dimensions is ``other``."""
    bare_name = name.lower().removeprefix(_MESH).partition(":")[0]
    tokens = bare_name.split("_")
    if bare_name in ("world", "default_pg"):
        return Dim.WORLD
    explicit = "parallel" in tokens or len(tokens) == 1
    if "and" in tokens:
        return Dim.OTHER
    if _DATA.intersection(tokens) or ("data" in tokens and explicit):
        if {"shard", "fsdp", "hpz"}.intersection(tokens):
            return Dim.DP_SHARD
        return Dim.DP_REPLICATE if "replicate" in tokens else Dim.DP
    dims = {_WORDS[token] for token in tokens if token in _WORDS and (explicit or token not in _LONG)}
    if dims == {Dim.TP, Dim.EP} and "expert" in tokens:
        return Dim.TP  # Megatron: the tensor parallelism of the experts
    return dims.pop() if len(dims) == 1 else Dim.OTHER


def dim_name_of(label: str) -> str:
    """Returns the name of the dimension of a group with this *label*, else the label."""
    if label.startswith(_MESH):
        return label.removeprefix(_MESH)
    dim = dim_by_name(label)
    return label if dim is Dim.OTHER else str(dim)


class DimensionMetadata(TypedDict):
    """A dimension that an agent has found in the process, beyond what labels of groups say."""

    name: str
    size: int
    nodes: int
    """Over how many nodes its group spreads; 0 where the launcher does not say."""
    groups: list[int]
    """Ids of its process groups in the name table."""
    used: bool
    """A collective was issued on it, or parameters or pipeline stages are divided along it."""


def parse_dimension_metadata(raw: Any) -> list[DimensionMetadata]:
    """Returns the well-formed entries of *raw*."""
    return (
        [_dimension_entry(entry) for entry in raw if _is_dimension_entry(entry)]
        if isinstance(raw, list)
        else []
    )


def _is_dimension_entry(entry: Any) -> bool:
    return (
        isinstance(entry, Mapping)
        and isinstance(entry.get("name"), str)
        and isinstance(entry.get("groups"), list)
        and all(isinstance(entry.get(key), int) for key in ("size", "nodes"))
    )


def _dimension_entry(entry: Mapping[str, Any]) -> DimensionMetadata:
    return {
        "name": entry["name"][:_MAX_NAME_CHARS],
        "size": entry["size"],
        "nodes": entry["nodes"],
        "groups": [number for number in entry["groups"] if isinstance(number, int)],
        "used": entry.get("used") is True,
    }
