"""Builds model descriptions from a count or from units, and divides them by TP and PP. Pure."""

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any, cast

from zeromon.errors import PlanError
from zeromon.memory.spec import ROOT, ModelSpec, Shape, Transformer, Unit
from zeromon.ring.model_metadata import ModelMetadata
from zeromon.ring.strategy import Dim, dim_of
from zeromon.snapshot import RankSnapshot, RunSnapshot

_MOST = 1 << 40


def from_count(params: int, name: str = "") -> ModelSpec:
    """Returns a model of which only the number of parameters is known."""
    if params < 1:
        raise PlanError(f"a model needs parameters, not {params}")
    unit = Unit("(all)", ((params,),))
    note = "only the number of parameters is known: gathered units and activations are not counted"
    return ModelSpec(
        name=name or f"{params:,} parameters", units=(unit,), has_units=False, notes=(note,)
    )


def from_units(
    name: str,
    units: Iterable[Mapping[str, Any]],
    buffer_bytes: int = 0,
    config: Mapping[str, Any] | None = None,
    notes: tuple[str, ...] = (),
) -> ModelSpec:
    """Returns a model from a description of its units: name, shapes, count, trainable.

    *config*: the configuration of a transformer, from which its architecture is taken.
    """
    described = tuple(
        Unit(
            str(unit["name"]),
            tuple(tuple(int(n) for n in shape) for shape in unit["shapes"]),
            int(unit.get("count", 1)),
            bool(unit.get("trainable", True)),
        )
        for unit in units
    )
    shape = architecture(config, described) if config is not None else None
    if config is not None and shape is None:
        notes += (
            "activations are not counted: there is no formula for these layers; "
            "--trace counts them where the model runs on fake tensors",
        )
    return ModelSpec(
        name=name, units=described, architecture=shape, buffer_bytes=buffer_bytes, notes=notes
    )


# ---- Hugging Face configurations ------------------------------------------------------------------


def architecture(config: Mapping[str, Any], units: Iterable[Unit]) -> Transformer | None:
    """Returns the dimensions that the activation formula needs, from a configuration.

    None where the layers are not equal, or their matrices are not those of a plain transformer layer:
    queries, keys, values, output, and an MLP of two or three matrices or experts with such MLPs. Their
    activations are then unknown.
    """
    layers = [unit for unit in units if unit.name != ROOT]
    hidden = _find(config, "hidden_size", "n_embd", "d_model")
    heads = _find(config, "num_attention_heads", "n_head", "num_heads")
    vocab = _find(config, "vocab_size")
    if config.get("is_encoder_decoder") is True or config.get("add_cross_attention") is True:
        return None
    if len(layers) != 1 or not (hidden and heads and vocab):
        return None
    if layers[0].count != _find(config, "num_hidden_layers", "n_layer", "num_layers"):
        return None
    each = _find(config, "head_dim") or hidden // heads
    matrices = sum(math.prod(shape) for shape in layers[0].shapes if len(shape) > 1)
    given = _find(config, "num_key_value_heads", "num_kv_heads")
    for kv_heads in filter(None, (given, heads, 1)):
        attention = 2 * hidden * (heads + kv_heads) * each
        for gated, total, active in _mlps(config, hidden):
            if attention + total == matrices:
                return Transformer(
                    layers=layers[0].count,
                    hidden=hidden,
                    heads=heads,
                    kv_heads=kv_heads,
                    head_dim=each,
                    ffn=active,
                    vocab=vocab,
                    gated=gated,
                    dropout=any(
                        isinstance(share := config.get(key), (int, float)) and share > 0
                        for key in ("resid_pdrop", "hidden_dropout")
                    ),
                )
    return None


def _mlps(config: Mapping[str, Any], hidden: int) -> Iterator[tuple[bool, int, int]]:
    """Yields the possible MLPs of a layer: (gated, elements of its matrices, width for one token)."""
    ffn = _find(config, "intermediate_size", "n_inner", "d_ff", "ffn_dim", "ffn_hidden_size")
    ffn = ffn or 4 * hidden
    for gated in (True, False):
        yield gated, (3 if gated else 2) * hidden * ffn, ffn
    experts = _find(config, "num_local_experts", "num_experts", "n_routed_experts")
    if experts:
        width = _find(config, "moe_intermediate_size") or ffn
        shared = _find(config, "shared_expert_intermediate_size")
        gate = hidden if shared else 0
        shared = shared or width * _find(config, "n_shared_experts")
        total = hidden * (experts * (1 + 3 * width) + 3 * shared) + gate
        yield True, total, width * (_find(config, "num_experts_per_tok") or 2) + shared


def _find(config: Mapping[str, Any], *names: str) -> int:
    """Returns the first of *names* that is a positive whole number; 0 where none is."""
    for name in names:
        value = config.get(name)
        if isinstance(value, int) and not isinstance(value, bool) and 0 < value < _MOST:
            return value
    return 0


def part_of(model: ModelSpec, tensor: int, pipeline: int) -> ModelSpec:
    """Returns the part of *model* on a rank of *tensor* x *pipeline* ranks, that of the largest stage.

    Tensor parallelism divides matrices and not vectors. A pipeline divides the layers; its first stage
    keeps the activations of as many micro-batches as there are stages, so of as many layers as without
    it (Korthikanti et al. 2022, arXiv 2205.05198, section 4.2.3). Embedding and head are counted on one
    stage. Raises :class:`PlanError` for more stages than layers.
    """
    if tensor == pipeline == 1:
        return model
    if not model.has_units:
        numel = math.ceil(model.params / (tensor * pipeline))
        return replace(model, units=(Unit("(all)", ((numel,),)),))
    layers = sum(unit.count for unit in model.units if unit.name != ROOT)
    if pipeline > layers:
        raise PlanError(f"{layers} layers cannot be split into {pipeline} stages")
    units = tuple(
        replace(
            unit,
            shapes=tuple(_split(shape, tensor) for shape in unit.shapes),
            count=unit.count if unit.name == ROOT else math.ceil(unit.count / pipeline),
        )
        for unit in model.units
    )
    shape = model.architecture
    shape = None if shape is None else replace(shape, tensor_ranks=tensor)
    return replace(model, units=units, architecture=shape)


def _split(shape: Shape, ranks: int) -> Shape:
    return (math.ceil(shape[0] / ranks), *shape[1:]) if len(shape) > 1 else shape


# ---- the whole model of a run, of which each rank describes the part that it holds --------------

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
