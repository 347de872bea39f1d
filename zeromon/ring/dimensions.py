"""Dimensions of the parallelism: which one a process group serves, and how many ranks each has.

A name is free text: of a DeviceMesh, of Megatron, of DeepSpeed or of the user. :func:`dim_of` reads from
it what the group is for; metrics and rules use that value, and views show the name.
"""

from collections.abc import Mapping
from functools import lru_cache
from typing import Any, TypedDict

from zeromon.ring.codes import TextEnum

_MESH = "mesh_"
"""DeviceMesh describes the group of its dimension ``tp`` as ``mesh_tp``."""
_LONGEST = 40


class Dim(TextEnum):
    """What a process group is for."""

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
def dim_of(name: str) -> Dim:
    """Returns what a group of this name is for; a name of several dimensions is ``other``."""
    text = name.lower().removeprefix(_MESH).partition(":")[0]
    words = text.split("_")
    if text in ("world", "default_pg"):
        return Dim.WORLD
    says = "parallel" in words or len(words) == 1
    if "and" in words:
        return Dim.OTHER
    if _DATA.intersection(words) or ("data" in words and says):
        return _data_dim(words)
    found = {_WORDS[word] for word in words if word in _WORDS and (says or word not in _LONG)}
    if found == {Dim.TP, Dim.EP} and "expert" in words:
        return Dim.TP  # Megatron: the tensor parallelism of the experts
    return found.pop() if len(found) == 1 else Dim.OTHER


def _data_dim(words: list[str]) -> Dim:
    if {"shard", "fsdp", "hpz"}.intersection(words):
        return Dim.DP_SHARD
    return Dim.DP_REPLICATE if "replicate" in words else Dim.DP


def name_of(label: str) -> str:
    """Returns the name of the dimension of a group with this *label*, else the label."""
    if label.startswith(_MESH):
        return label.removeprefix(_MESH)
    dim = dim_of(label)
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


def dimension_metadata(raw: Any) -> list[DimensionMetadata]:
    """Returns the well-formed entries of *raw*."""
    return [_entry(one) for one in raw if _is_entry(one)] if isinstance(raw, list) else []


def _is_entry(one: Any) -> bool:
    return (
        isinstance(one, Mapping)
        and isinstance(one.get("name"), str)
        and isinstance(one.get("groups"), list)
        and all(isinstance(one.get(key), int) for key in ("size", "nodes"))
    )


def _entry(one: Mapping[str, Any]) -> DimensionMetadata:
    return {
        "name": one["name"][:_LONGEST],
        "size": one["size"],
        "nodes": one["nodes"],
        "groups": [number for number in one["groups"] if isinstance(number, int)],
        "used": one.get("used") is True,
    }
