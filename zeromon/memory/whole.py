"""The whole model of a run, of which each rank describes the part that it holds. Pure.

Tensor parallelism divides matrices, and a rank says how large they are in all
(:attr:`~zeromon.ring.model_metadata.ModelMetadata.whole_numel`). A pipeline divides layers, and no rank
knows those of the other stages: they are added up here.
"""

from typing import Any, cast

from zeromon.ring.dimensions import Dim, dim_of
from zeromon.ring.model_metadata import ModelMetadata
from zeromon.snapshot import RankSnapshot, RunSnapshot

_ADDED = (
    "numel", "trainable", "shard_numel", "trainable_shard_numel", "factored_numel", "kept_numel",
    "buffer_bytes", "whole_numel", "matrix_numel", "attention",
)  # fmt: skip


def model_of(rank: RankSnapshot) -> ModelMetadata | None:
    """The model of *rank*: the first one, and in a pipeline all its stages together."""
    if rank.pipeline is None or len(rank.models) < 2:
        return rank.models[0] if rank.models else None
    parts = [cast("dict[str, Any]", model) for model in rank.models]
    shared = {key for key in _ADDED if all(key in part for part in parts)}
    joined = {key: value for key, value in parts[0].items() if key not in _ADDED}
    joined |= {key: sum(part[key] for part in parts) for key in shared}
    if "units" in joined:
        joined["units"] = sorted((n for p in parts for n in p.get("units", ())), reverse=True)
    return cast(ModelMetadata, joined)


def ranks_of_dim(rank: RankSnapshot, dim: Dim) -> int:
    """Over how many ranks the model of *rank* is divided along *dim*."""
    return max((d.size for d in rank.dimensions if d.used and dim_of(d.name) is dim), default=1)


def largest_part(run: RunSnapshot) -> RankSnapshot | None:
    """The rank whose part of the model is the largest, among those of the first rank's pipeline."""
    first = next((rank for rank in run.ranks if rank.models), None)
    if first is None:
        return None
    stages = set(_stage_ranks(first))
    return max((r for r in run.ranks if r.rank in stages and r.models), key=_numel)


def alike(run: RunSnapshot, one: RankSnapshot) -> list[RankSnapshot]:
    """The ranks that have a part of the model as large as that of *one*."""
    return [rank for rank in run.ranks if rank.models and _numel(rank) == _numel(one)]


def whole_numel(run: RunSnapshot) -> tuple[int | None, str]:
    """Parameters of the whole model; None, and why, where a part of it is unknown."""
    parts, why = whole_parts(run)
    return (sum(model.get("whole_numel", model.get("numel", 0)) for model in parts) or None), why


def whole_parts(run: RunSnapshot) -> tuple[tuple[ModelMetadata, ...], str]:
    """The models of all stages of the whole model; () and why, where a part of it is unknown."""
    first = next((rank for rank in run.ranks if rank.models), None)
    if first is None:
        return (), "no rank reported its model"
    stages = _stage_ranks(first)
    if len(set(stages)) < ranks_of_dim(first, Dim.PP):
        return (), "it is not known which ranks the pipeline has"
    by_rank = {rank.rank: rank for rank in run.ranks if rank.models}
    away = [number for number in stages if number not in by_rank]
    if away:
        return (), f"rank {away[0]} of the pipeline has not told its part to this node"
    ranks = [by_rank[number] for number in sorted(set(stages))]
    why = next((text for rank in ranks if (text := _unknown_part(rank))), "")
    return (() if why else tuple(model_of(rank) or ModelMetadata() for rank in ranks)), why


def _unknown_part(rank: RankSnapshot) -> str:
    """Why the whole of what *rank* holds a part of is unknown; "" where it is known."""
    model = model_of(rank) or ModelMetadata()
    own = model.get("numel", 0)
    if Dim.EP in rank.sharding_strategy.parts:
        return "each rank has experts of its own, and does not say how many there are"
    if ranks_of_dim(rank, Dim.TP) > 1 and model.get("whole_numel", own) <= own:
        return "the shards of tensor parallelism do not say how large the whole is"
    return ""


def _stage_ranks(rank: RankSnapshot) -> tuple[int, ...]:
    """The ranks of the pipeline of *rank*, itself included; itself alone without one."""
    if rank.pipeline is not None:
        return rank.pipeline.stage_ranks
    groups = (group.ranks for group in rank.groups if dim_of(group.dim or "") is Dim.PP)
    return max(groups, key=len, default=(rank.rank,))


def _numel(rank: RankSnapshot) -> int:
    return (model_of(rank) or ModelMetadata()).get("numel", 0)
