"""The model that is planned and measured: `zeromon plan planned:build` in this folder."""

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))
from train_gpt import GPT

WIDTH, LAYERS, HEADS, LENGTH, BATCH = 192, 4, 4, 128, 8


def build() -> GPT:
    """The example's GPT."""
    return GPT(WIDTH, LAYERS, HEADS, LENGTH, False)


def no_module() -> int:
    """What a factory should not return."""
    return 3


def build_wide() -> Any:
    """A model whose optimizer step needs more than its activations."""
    import transformers

    sizes = {"hidden_size": 128, "intermediate_size": 160, "vocab_size": 64, "head_dim": 32}
    shape = {"num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2}
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(max_position_embeddings=256, **sizes, **shape)
    )
