"""Builds model descriptions: from a count, from units, from a Hugging Face configuration. Pure."""

import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from zeromon.errors import PlanError
from zeromon.memory.spec import ROOT, ModelSpec, Shape, Transformer, Unit

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

_NEEDED = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "vocab_size",
)
_NEEDED_OF: Mapping[str, tuple[str, ...]] = {
    "llama": _NEEDED,
    "mistral": (*_NEEDED, "num_key_value_heads"),
    "mixtral": (*_NEEDED, "num_key_value_heads", "num_local_experts"),
    "qwen2": (*_NEEDED, "num_key_value_heads"),
    "qwen3": (*_NEEDED, "num_key_value_heads", "head_dim"),
    "phi3": _NEEDED,
    "gpt2": ("n_embd", "n_layer", "n_head", "vocab_size", "n_positions"),
}  # fmt: skip
"""Model type -> the sizes that its configuration must have.

These families are counted without transformers; ``tests/memory/test_models.py`` holds each of them equal
to transformers' own model. Another size has a default of the family's own, which is not copied here.
"""

_CLASSES = {
    "llama": "LlamaForCausalLM", "mistral": "MistralForCausalLM", "mixtral": "MixtralForCausalLM",
    "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM", "phi3": "Phi3ForCausalLM",
    "gpt2": "GPT2LMHeadModel",
}  # fmt: skip


def from_config(config: Mapping[str, Any], name: str = "") -> ModelSpec:
    """Returns a model from a Hugging Face ``config.json``, without transformers.

    Raises :class:`PlanError` for a family that is not proven equal to transformers' own model, and for
    missing sizes.
    """
    kind = str(config.get("model_type", ""))
    hint = (
        "Install transformers and torch beside zeromon, which then counts the model itself, or give "
        "a number of parameters (7B) or a Python entry as module:factory."
    )
    if kind not in _NEEDED_OF:
        what = f"model type {kind!r}" if kind else "a configuration without a model_type"
        raise PlanError(f"{what} cannot be counted without transformers", hint)
    given = config.get("architectures")
    head = given[0] if isinstance(given, list) and given else _CLASSES[kind]
    if head != _CLASSES[kind]:
        raise PlanError(f"{head} cannot be counted without transformers", hint)
    missing = [key for key in _NEEDED_OF[kind] if not _find(config, key)]
    if missing:
        raise PlanError(f"the configuration has no {missing[0]}", hint)
    shapes = _gpt2 if kind == "gpt2" else _llama
    layer, root = shapes(config, kind)
    layers = _find(config, "num_hidden_layers", "n_layer")
    units = (Unit("layer", layer, layers), Unit(ROOT, root))
    return ModelSpec(
        name=name or str(config.get("_name_or_path") or kind),
        units=units,
        architecture=architecture(config, units),
    )


def _gpt2(config: Mapping[str, Any], _: str) -> tuple[tuple[Shape, ...], tuple[Shape, ...]]:
    """Returns the shapes of a layer and of the root of GPT-2."""
    h, vocab = _find(config, "n_embd"), _find(config, "vocab_size")
    f = _find(config, "n_inner") or 4 * h
    norms = ((h,),) * 4
    layer = ((h, 3 * h), (3 * h,), (h, h), (h,), (h, f), (f,), (f, h), (h,), *norms)
    root: tuple[Shape, ...] = ((vocab, h), (_find(config, "n_positions"), h), (h,), (h,))
    tied = config.get("tie_word_embeddings", True) is True
    return layer, root if tied else (*root, (vocab, h))


def _llama(config: Mapping[str, Any], kind: str) -> tuple[tuple[Shape, ...], tuple[Shape, ...]]:
    """Returns the shapes of a layer and of the root of LLaMA and its relatives."""
    h, f = _find(config, "hidden_size"), _find(config, "intermediate_size")
    heads = _find(config, "num_attention_heads")
    each = _find(config, "head_dim") or h // heads
    q, kv = heads * each, (_find(config, "num_key_value_heads") or heads) * each
    root: tuple[Shape, ...] = ((_find(config, "vocab_size"), h), (h,))
    if config.get("tie_word_embeddings", False) is not True:
        root += ((_find(config, "vocab_size"), h),)
    return (
        *_attention(config, kind, (h, q, kv, each)),
        *_mlp(config, kind, h, f),
        (h,),
        (h,),
    ), root


def _attention(
    config: Mapping[str, Any], kind: str, widths: tuple[int, int, int, int]
) -> Iterator[Shape]:
    h, q, kv, each = widths
    if kind == "phi3":
        yield from ((q + 2 * kv, h), (h, q))
        return
    yield from ((q, h), (kv, h), (kv, h), (h, q))
    all_biased = kind in ("llama", "qwen3") and config.get("attention_bias") is True
    if all_biased or kind == "qwen2":
        yield from ((q,), (kv,), (kv,))
    if all_biased:
        yield (h,)
    if kind == "qwen3":
        yield from ((each,), (each,))


def _mlp(config: Mapping[str, Any], kind: str, h: int, f: int) -> Iterator[Shape]:
    if kind == "mixtral":
        experts = _find(config, "num_local_experts")
        yield from ((experts, h), (experts, 2 * f, h), (experts, h, f))
    elif kind == "phi3":
        yield from ((2 * f, h), (h, f))
    else:
        yield from ((f, h), (f, h), (h, f))
        if kind == "llama" and config.get("mlp_bias") is True:
            yield from ((f,), (f,), (h,))


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
                        _is_positive(config.get(key)) for key in ("resid_pdrop", "hidden_dropout")
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


def _is_positive(value: Any) -> bool:
    return isinstance(value, (int, float)) and value > 0


def _find(config: Mapping[str, Any], *names: str) -> int:
    """Returns the first of *names* that is a positive whole number; 0 where none is."""
    for name in names:
        value = config.get(name)
        if isinstance(value, int) and not isinstance(value, bool) and 0 < value < _MOST:
            return value
    return 0
