"""Builds model descriptions from a count or from units, and divides them by TP and PP. Pure."""

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any, cast

from zeromon.base.errors import PlanError
from zeromon.memory.spec import (
    QUANTIZATIONS,
    ROOT,
    TABLES,
    Adapters,
    ModelSpec,
    Shape,
    Transformer,
    Unit,
)
from zeromon.ring.model_metadata import ModelMetadata
from zeromon.ring.strategy import Dim, dim_by_name
from zeromon.snapshot import RankSnapshot, RunSnapshot

_MAX_DIMENSION = 1 << 40


def from_count(params: int, name: str = "") -> ModelSpec:
    """Returns a model of which only the number of parameters is known."""
    if params < 1:
        raise PlanError(f"a model needs parameters, not {params}")
    unit = Unit("(all)", ((params,),))
    note = "only the number of parameters is known: gathered units and activations are not counted"
    return ModelSpec(
        name=name or f"{params:,} parameters", units=(unit,), has_units=False, notes=(note,)
    )


def model_from_units(
    name: str,
    units: Iterable[Mapping[str, Any]],
    buffer_bytes: int = 0,
    config: Mapping[str, Any] | None = None,
    notes: tuple[str, ...] = (),
    lora: Mapping[str, int] | None = None,
    quantization: str = "",
) -> ModelSpec:
    """Returns a model from a description of its units: name, shapes, count, trainable.

    *config*: the configuration of a transformer, from which its architecture is taken. *lora*: the rank
    of its adapters, and how many all layers have by place. *quantization*: the storage of the rest.
    """
    described = tuple(
        Unit(
            str(unit["name"]),
            tuple(tuple(int(n) for n in shape) for shape in unit["shapes"]),
            int(unit.get("count", 1)),
            bool(unit.get("trainable", True)),
            bool(unit.get("quantized", False)),
        )
        for unit in units
    )
    base = described if lora is None else tuple(_frozen_units(described))
    shape = transformer_of_config(config, base) if config is not None else None
    if shape is not None and lora is not None:
        # No activations for experts: they were not measured with LoRA
        adapter_counts = {name: round(n / shape.layers) for name, n in lora.items() if name != "rank"}
        adapters = Adapters(rank=lora["rank"], quantized=bool(quantization), **adapter_counts)
        shape = None if shape.experts else replace(shape, adapters=adapters)
    if config is not None and shape is None:
        notes += (
            "activations are not counted: there is no formula for these layers; "
            "--trace counts them where the model runs on fake tensors",
        )
    elif config is not None:
        notes += tuple(_formula_notes(config))
    return ModelSpec(
        name=name, units=described, architecture=shape, buffer_bytes=buffer_bytes, notes=notes,
        quantization=QUANTIZATIONS.get(quantization),
    )  # fmt: skip


def _frozen_units(units: Iterable[Unit]) -> Iterator[Unit]:
    """Yields the units without adapters: quantized and other weights of a layer together."""
    merged: dict[tuple[str, int], Unit] = {}
    for unit in units:
        if not unit.trainable:
            merged_unit = merged.get((unit.name, unit.count))
            shapes = (*merged_unit.shapes, *unit.shapes) if merged_unit is not None else unit.shapes
            merged[unit.name, unit.count] = replace(unit, shapes=shapes)
    yield from merged.values()


# ---- Hugging Face configurations ------------------------------------------------------------------


def transformer_of_config(config: Mapping[str, Any], units: Iterable[Unit]) -> Transformer | None:
    """Returns the dimensions that the activation formula needs, from a configuration.

    None where the layers are not equal, or their matrices are not those of a plain transformer layer:
    queries, keys, values, output, and an MLP of two or three matrices or experts with such MLPs. Their
    activations are then unknown.
    """
    layers = [unit for unit in units if unit.name != ROOT]
    hidden = _find_size(config, "hidden_size", "n_embd", "d_model")
    heads = _find_size(config, "num_attention_heads", "n_head", "num_heads")
    vocab = _find_size(config, "vocab_size")
    if config.get("is_encoder_decoder") is True or config.get("add_cross_attention") is True:
        return None
    if len(layers) != 1 or not (hidden and heads and vocab):
        return None
    if layers[0].count != _find_size(config, "num_hidden_layers", "n_layer", "num_layers"):
        return None
    head_dim = _find_size(config, "head_dim") or hidden // heads
    matrices = sum(math.prod(shape) for shape in layers[0].shapes if len(shape) > 1)
    config_kv_heads = _find_size(config, "num_key_value_heads", "num_kv_heads")
    # Multi-query models (GPT-BigCode, Falcon) have one head of keys, and a flag in place of its number
    for kv_heads in filter(None, (config_kv_heads, heads, 1)):
        attention = 2 * hidden * (heads + kv_heads) * head_dim
        for fields, total in _possible_mlps(config, hidden):
            if attention + total == matrices:
                family = str(config.get("model_type"))
                return Transformer(
                    layers=layers[0].count,
                    hidden=hidden,
                    heads=heads,
                    kv_heads=kv_heads,
                    head_dim=head_dim,
                    vocab=vocab,
                    dropout=any(
                        isinstance(share := config.get(key), (int, float)) and share > 0
                        for key in ("resid_pdrop", "hidden_dropout")
                    ),
                    fp32_norms="rms_norm_eps" in config,
                    fp32_softmax=family != "gpt2",
                    mlp_copies=_mlp_copies(config),
                    **{
                        "query_norms": layers[0].shapes.count((head_dim,)) >= 2,
                        "has_fused_attention": config.get("has_sdpa") is not False,
                        **fields,
                        **_FAMILIES.get(family, {}),
                    },
                )
    return None


def _mlp_copies(config: Mapping[str, Any]) -> int:
    """Returns how many tensors of its width an ungated MLP keeps, by its activation function.

    ReLU keeps its result alone, which is the input of the next matrix; a fused GELU its input, too.
    GPT-2's ``gelu_new`` is computed by single operations, of which five results are kept.
    """
    names = ("activation_function", "hidden_act", "hidden_activation")
    default = "gelu_new" if config.get("model_type") == "gpt2" else ""
    function = next((config[name] for name in names if config.get(name)), default)
    return {"relu": 1, "quick_gelu": 3, "gelu_new": 5, "gelu_fast": 5}.get(str(function), 2)


def _possible_mlps(config: Mapping[str, Any], hidden: int) -> Iterator[tuple[dict[str, Any], int]]:
    """Yields the possible MLPs of a layer: its fields of a Transformer, and its matrices' elements."""
    ffn = _find_size(config, "intermediate_size", "n_inner", "d_ff", "ffn_dim", "ffn_hidden_size")
    ffn = ffn or 4 * hidden
    for gated in (True, False):
        matrices = 3 if gated else 2
        yield {"gated": gated, "ffn": ffn, "mlp_readers": matrices - 1}, matrices * hidden * ffn
    experts = _find_size(config, "num_local_experts", "num_experts", "n_routed_experts")
    if experts:
        width = _find_size(config, "moe_intermediate_size") or ffn
        shared = _find_size(config, "shared_expert_intermediate_size")
        gate = hidden if shared else 0
        shared = shared or width * _find_size(config, "n_shared_experts")
        total = hidden * (experts * (1 + 3 * width) + 3 * shared) + gate
        active = _find_size(config, "num_experts_per_tok") or 2
        # the router reads the input, and a shared expert with its gate
        readers = 1 + 2 * bool(shared) + bool(gate)
        yield {
            "gated": True, "ffn": width * active + shared, "experts": active, "shared_ffn": shared,
            "mlp_readers": readers,
        }, total  # fmt: skip


_FAMILIES: Mapping[str, Mapping[str, Any]] = TABLES["families"]
"""``model_type`` -> how its layers differ from what their shapes and configuration say.

Each is measured by what autograd keeps of the layers that transformers 5 makes.
"""


def _formula_notes(config: Mapping[str, Any]) -> Iterator[str]:
    """Yields what the formula of the activations assumes of the model."""
    family = config.get("model_type")
    if family is not None and family not in _FAMILIES:
        yield f"activations are those of a plain layer: nobody measured them for {family}"
    if config.get("has_sdpa") is False:
        yield (
            f"attention of {family} writes its scores to memory, as transformers has no SDPA for it; "
            "attn_implementation=flash_attention_2 may not"
        )


def _find_size(config: Mapping[str, Any], *names: str) -> int:
    """Returns the first of *names* that is a positive whole number; 0 where none is."""
    for name in names:
        value = config.get(name)
        # True is an int: a switch would be read as a size of 1
        if isinstance(value, int) and not isinstance(value, bool) and 0 < value < _MAX_DIMENSION:
            return value
    return 0


def part_of_model(model: ModelSpec, tensor: int, pipeline: int) -> ModelSpec:
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
            shapes=tuple(_split_first_dimension(shape, tensor) for shape in unit.shapes),
            count=unit.count if unit.name == ROOT else math.ceil(unit.count / pipeline),
        )
        for unit in model.units
    )
    shape = model.architecture
    shape = None if shape is None else replace(shape, tensor_ranks=tensor)
    return replace(model, units=units, architecture=shape)


def _split_first_dimension(shape: Shape, ranks: int) -> Shape:
    return (math.ceil(shape[0] / ranks), *shape[1:]) if len(shape) > 1 else shape


# ---- the whole model of a run, of which each rank describes the part that it holds --------------

_ADDED = (
    "numel", "trainable", "shard_numel", "trainable_shard_numel", "factored_numel", "kept_numel",
    "buffer_bytes", "frozen_grad_numel", "whole_numel", "matrix_numel", "attention",
)  # fmt: skip


def model_of(rank: RankSnapshot) -> ModelMetadata | None:
    """The model of *rank*: the first one, and in a pipeline all its stages together."""
    if rank.communication.pipeline is None or len(rank.config.models) < 2:
        return rank.config.models[0] if rank.config.models else None
    stages = [cast("dict[str, Any]", model) for model in rank.config.models]
    # A sum over some of the stages would pass for that of all
    shared = {key for key in _ADDED if all(key in stage for stage in stages)}
    joined = {key: value for key, value in stages[0].items() if key not in _ADDED}
    joined |= {key: sum(stage[key] for stage in stages) for key in shared}
    if "units" in joined:
        # Descending, as Sizes.unit_numels must be: the first is taken for the largest
        joined["units"] = sorted((n for p in stages for n in p.get("units", ())), reverse=True)
    return cast(ModelMetadata, joined)


def ranks_of_dim(rank: RankSnapshot, dim: Dim) -> int:
    """Over how many ranks the model of *rank* is divided along *dim*."""
    return max((d.size for d in rank.dimensions if d.used and dim_by_name(d.name) is dim), default=1)


def largest_part(run: RunSnapshot) -> RankSnapshot | None:
    """The rank whose part of the model is the largest, among those of the first rank's pipeline."""
    first_rank = next((rank for rank in run.ranks if rank.config.models), None)
    if first_rank is None:
        return None
    stages = set(_pipeline_stage_ranks(first_rank))
    return max((r for r in run.ranks if r.rank in stages and r.config.models), key=_numel_of)


def equal_ranks(run: RunSnapshot, reference: RankSnapshot) -> list[RankSnapshot]:
    """The ranks that have a part of the model as large as that of *reference*."""
    return [rank for rank in run.ranks if rank.config.models and _numel_of(rank) == _numel_of(reference)]


def whole_numel(run: RunSnapshot) -> tuple[int | None, str]:
    """Parameters of the whole model; None, and why, where a part of it is unknown."""
    models, cause = whole_model_parts(run)
    return (sum(model.get("whole_numel", model.get("numel", 0)) for model in models) or None), cause


def whole_model_parts(run: RunSnapshot) -> tuple[tuple[ModelMetadata, ...], str]:
    """The models of all stages of the whole model; () and why, where a part of it is unknown."""
    first_rank = next((rank for rank in run.ranks if rank.config.models), None)
    if first_rank is None:
        return (), "no rank reported its model"
    stages = _pipeline_stage_ranks(first_rank)
    if len(set(stages)) < ranks_of_dim(first_rank, Dim.PP):
        return (), "it is not known which ranks the pipeline has"
    by_rank = {rank.rank: rank for rank in run.ranks if rank.config.models}
    missing = [number for number in stages if number not in by_rank]
    if missing:
        return (), f"rank {missing[0]} of the pipeline has not told its part to this node"
    ranks = [by_rank[number] for number in sorted(set(stages))]
    reason = next((gap for rank in ranks if (gap := _unknown_part_reason(rank))), "")
    return (() if reason else tuple(model_of(rank) or ModelMetadata() for rank in ranks)), reason


def _unknown_part_reason(rank: RankSnapshot) -> str:
    """Why the whole of what *rank* holds a part of is unknown; "" where it is known."""
    model = model_of(rank) or ModelMetadata()
    numel = model.get("numel", 0)
    if Dim.EP in rank.sharding_strategy.parts:
        return "each rank has experts of its own, and does not say how many there are"
    if ranks_of_dim(rank, Dim.TP) > 1 and model.get("whole_numel", numel) <= numel:
        return "the shards of tensor parallelism do not say how large the whole is"
    return ""


def _pipeline_stage_ranks(rank: RankSnapshot) -> tuple[int, ...]:
    """The ranks of the pipeline of *rank*, itself included; itself alone without one."""
    if rank.communication.pipeline is not None:
        return rank.communication.pipeline.stage_ranks
    groups = (
        group.ranks for group in rank.communication.groups if dim_by_name(group.dim or "") is Dim.PP
    )
    return max(groups, key=len, default=(rank.rank,))


def _numel_of(rank: RankSnapshot) -> int:
    return (model_of(rank) or ModelMetadata()).get("numel", 0)
