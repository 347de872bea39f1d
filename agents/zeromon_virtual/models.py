"""The model of a run: a decoder of transformer blocks, or what the user's own function returns."""

import importlib
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from zeromon_virtual.spec import ModelSpec, SpecError


class Block(nn.Module):  # type: ignore[misc]
    """A transformer block: attention and a feed-forward network, each behind a norm."""

    def __init__(self, model: ModelSpec) -> None:
        super().__init__()
        self.heads = model.heads
        self.norm1, self.norm2 = nn.LayerNorm(model.hidden), nn.LayerNorm(model.hidden)
        self.qkv = nn.Linear(model.hidden, 3 * model.hidden, bias=False)
        self.proj = nn.Linear(model.hidden, model.hidden, bias=False)
        self.up = nn.Linear(model.hidden, model.ffn, bias=False)
        self.down = nn.Linear(model.ffn, model.hidden, bias=False)

    def forward(self, x: Any) -> Any:
        """Returns the output of the block for *x*, (batch, sequence, hidden)."""
        batch, sequence, hidden = x.shape
        heads = self.qkv(self.norm1(x)).view(batch, sequence, 3, self.heads, -1)
        q, k, v = heads.permute(2, 0, 3, 1, 4).unbind(0)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(mixed.transpose(1, 2).reshape(batch, sequence, hidden))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Decoder(nn.Module):  # type: ignore[misc]
    """Embedding, blocks, norm and output layer."""

    def __init__(self, model: ModelSpec) -> None:
        super().__init__()
        self.embed = nn.Embedding(model.vocabulary, model.hidden)
        self.blocks = nn.ModuleList(Block(model) for _ in range(model.layers))
        self.norm = nn.LayerNorm(model.hidden)
        self.head = nn.Linear(model.hidden, model.vocabulary, bias=False)

    def forward(self, tokens: Any) -> Any:
        """Returns the logits for *tokens*, (batch, sequence)."""
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def build(model: ModelSpec) -> Any:
    """Returns the model that *model* describes, with parameters of its dtype."""
    dtype, before = getattr(torch, model.dtype, None), torch.get_default_dtype()
    if not isinstance(dtype, torch.dtype):
        raise SpecError(f"spec.model.dtype: torch has no dtype {model.dtype!r}")
    torch.set_default_dtype(dtype)
    try:
        return _factory(model.factory)() if model.factory else Decoder(model)
    finally:
        torch.set_default_dtype(before)


def _factory(name: str) -> Any:
    module, _, function = name.partition(":")
    try:
        return getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError, ValueError) as error:
        raise SpecError(f"spec.model.factory: {name!r} cannot be loaded: {error}") from error
