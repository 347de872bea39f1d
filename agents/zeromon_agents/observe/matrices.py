"""Counts the matrices that each token of a transformer is multiplied with, by the shapes of parameters.

A lookup table (``nn.Embedding``) multiplies nothing, unless a linear layer shares its weight. Of experts
a token uses some: as many as the configuration of the model says.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch

from zeromon.ring.model_metadata import ModelMetadata

_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts")


def facts(module: Any, handles: Sequence[Any], layers: int) -> ModelMetadata:
    """Returns the matrices and the attention of *module*; empty where its experts are not described.

    *handles*: those of FSDP1, whose flat parameters know the shapes. *layers*: of its longest list.
    """
    config = getattr(_inner(module), "config", None)
    numel, widest, of_expert = 0.0, 0, _expert_share(config)
    for owner, name, shape in flat_parameters(handles) if handles else _parameters(module):
        share = of_expert if _is_expert(name) else 1.0
        if share is None:
            return {}
        if isinstance(owner, torch.nn.Embedding):
            widest = max(widest, int(shape[-1]))
        elif len(shape) >= 2:
            numel += math.prod(shape) * share
    return {"matrix_numel": round(numel), "attention": _attention(config, layers, widest)}


def _parameters(module: Any) -> Iterator[tuple[Any, str, Any]]:
    """Yields owner, name and whole shape of each parameter; a shared one is a linear layer's."""
    found: dict[int, tuple[Any, str, Any]] = {}
    for name, owner in module.named_modules():
        for param in owner.parameters(recurse=False):
            known = found.get(id(param))
            if known is None or isinstance(known[0], torch.nn.Embedding):
                found[id(param)] = owner, name, getattr(param, "ds_shape", None) or param.shape
    yield from found.values()


def flat_parameters(handles: Iterable[Any]) -> Iterator[tuple[Any, str, Any]]:
    """Yields owner, name and shape of each parameter in the flat parameters of FSDP1's *handles*."""
    for handle in handles:
        flat = handle.flat_param
        others = {id(info.prim_module): info.module for info in flat._shared_param_infos}
        for info, shape in zip(flat._param_infos, flat._shapes, strict=True):
            owner = info.module
            if isinstance(owner, torch.nn.Embedding):
                owner = others.get(id(owner), owner)
            yield owner, info.module_name, shape


def _inner(module: Any) -> Any:
    while hasattr(module, "module") and not hasattr(module, "config"):
        module = module.module
    return module


def _is_expert(name: str) -> bool:
    return "experts" in name and "shared" not in name


def _expert_share(config: Any) -> float | None:
    """Returns the share of the experts that a token uses; None where the model does not say."""
    used = getattr(config, "num_experts_per_tok", None)
    count = next((n for key in _EXPERTS if (n := getattr(config, key, None))), None)
    return used / count if isinstance(used, int) and isinstance(count, int) else None


def _attention(config: Any, layers: int, widest: int) -> int:
    """Returns layers times the width of the queries; by the *widest* table without a configuration."""
    depth = getattr(config, "num_hidden_layers", None)
    width = getattr(config, "hidden_size", None)
    heads, each = getattr(config, "num_attention_heads", None), getattr(config, "head_dim", None)
    if isinstance(heads, int) and isinstance(each, int):
        width = heads * each
    return depth * width if isinstance(depth, int) and isinstance(width, int) else layers * widest
