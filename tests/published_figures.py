"""The published runs of docs/evidence/data/memory.json, and the shapes of their models."""

from __future__ import annotations

from typing import Any, NamedTuple

from evidence_pages import read_entries

GIB = 1 << 30


def llama(hidden: int, layers: int, heads: int, ffn: int, vocab: int, **more: Any) -> dict[str, Any]:
    shape = {
        "model_type": "llama", "hidden_size": hidden, "num_hidden_layers": layers,
        "num_attention_heads": heads, "num_key_value_heads": heads, "intermediate_size": ffn,
        "vocab_size": vocab, "tie_word_embeddings": False,
    }  # fmt: skip
    return shape | more


def gpt2(hidden: int, layers: int, heads: int, vocab: int, length: int, **more: Any) -> dict[str, Any]:
    shape = {"model_type": "gpt2", "n_embd": hidden, "n_layer": layers, "n_head": heads}
    return shape | {"vocab_size": vocab, "n_positions": length} | more


PLAIN = {"activation_function": "gelu", "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
QWEN = {"model_type": "qwen2"}
MODELS = {
    "GPT-2 1.5B": gpt2(1600, 48, 16, 50304, 1024),
    "GPT-2 10B": gpt2(4096, 50, 32, 50304, 1024),
    "GPT-2 XL": gpt2(1600, 48, 25, 50257, 1024),
    "Llama 7B": llama(4096, 32, 32, 11008, 32000),
    "Llama 13B": llama(5120, 40, 40, 13824, 32000),
    "Llama 65B": llama(8192, 80, 64, 22016, 32000),
    "Llama-2 70B": llama(8192, 80, 64, 28672, 32000, num_key_value_heads=8),
    "Llama-3 8B": llama(4096, 32, 32, 14336, 128256, num_key_value_heads=8),
    "Llama-3 70B": llama(8192, 80, 64, 28672, 128256, num_key_value_heads=8),
    "Llama-3.2 3B": llama(
        3072, 28, 24, 8192, 128256, num_key_value_heads=8, head_dim=128, tie_word_embeddings=True
    ),
    "Qwen 7B": llama(4096, 32, 32, 11008, 151936, **QWEN),
    "Qwen1.5 72B": llama(8192, 80, 64, 24576, 152064, **QWEN),
    "Qwen2.5 7B": llama(3584, 28, 28, 18944, 152064, num_key_value_heads=4, **QWEN),
    "Baichuan2 13B": llama(5120, 40, 40, 13696, 125696),
    "MPT 1B": gpt2(2048, 24, 16, 50368, 2048, **PLAIN),
    "MPT 3B": gpt2(2560, 32, 20, 50368, 2048, **PLAIN),
    "MPT 7B": gpt2(4096, 32, 32, 50368, 2048, **PLAIN),
    "MPT 13B": gpt2(5120, 40, 40, 50368, 2048, **PLAIN),
    "MPT 30B": gpt2(7168, 48, 56, 50368, 8192, **PLAIN),
    "MPT 70B": gpt2(8192, 86, 64, 50368, 2048, **PLAIN),
}


class PublishedRun(NamedTuple):
    """A row of the file."""

    model: str
    options: str
    reported: str
    planned: str
    preflight: str
    source: str
    """The text of its link."""


def page_rows() -> list[PublishedRun]:
    """The published runs, without those of which `plan` differs."""
    entries = read_entries("memory")
    return [
        PublishedRun(c[0], c[1].strip("`"), *c[2:5], c[5][1:].split("](")[0])
        for name in ("peaks", "outcomes")
        for c in entries[name]["rows"]
    ]
