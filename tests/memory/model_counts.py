"""Counts models on transformers' own classes on the meta device, and prints tests/data/models.jsonl.

    python tests/memory/model_counts.py > tests/data/models.jsonl

Each line has the sizes and switches of a configuration as transformers writes it, the number of
parameters, and the units as [count, elements].
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

LLAMA = {"hidden_size": 512, "intermediate_size": 1376, "num_hidden_layers": 6,
         "num_attention_heads": 8, "num_key_value_heads": 2, "vocab_size": 1000}  # fmt: skip
MOE = LLAMA | {"num_local_experts": 4, "num_experts_per_tok": 2}
GPT2 = {"n_embd": 256, "n_layer": 4, "n_head": 4, "vocab_size": 1000, "n_positions": 128}

CASES: list[tuple[str, str, dict[str, Any]]] = [
    # plain transformers: as published, and with each switch of the family
    ("llama", "LlamaForCausalLM", {}),
    ("llama", "LlamaForCausalLM", LLAMA),
    ("llama", "LlamaForCausalLM", LLAMA | {"num_key_value_heads": None, "head_dim": 96}),
    ("llama", "LlamaForCausalLM", LLAMA | {"attention_bias": True, "mlp_bias": True}),
    ("llama", "LlamaForCausalLM", LLAMA | {"tie_word_embeddings": True}),
    ("mistral", "MistralForCausalLM", {}),
    ("mistral", "MistralForCausalLM", LLAMA | {"head_dim": 128, "tie_word_embeddings": True}),
    ("mixtral", "MixtralForCausalLM", {}),
    ("mixtral", "MixtralForCausalLM", MOE),
    ("mixtral", "MixtralForCausalLM", MOE | {"tie_word_embeddings": True, "head_dim": 32}),
    ("qwen2", "Qwen2ForCausalLM", LLAMA),
    ("qwen2", "Qwen2ForCausalLM", LLAMA | {"tie_word_embeddings": True, "attention_bias": False}),
    ("qwen3", "Qwen3ForCausalLM", LLAMA | {"head_dim": 128}),
    ("qwen3", "Qwen3ForCausalLM", LLAMA | {"head_dim": 64, "attention_bias": True}),
    ("qwen3", "Qwen3ForCausalLM", LLAMA | {"head_dim": 64, "tie_word_embeddings": True}),
    ("phi3", "Phi3ForCausalLM", {}),
    ("phi3", "Phi3ForCausalLM", LLAMA | {"pad_token_id": 0}),
    ("phi3", "Phi3ForCausalLM",
     LLAMA | {"pad_token_id": 0, "tie_word_embeddings": True, "head_dim": 32}),
    ("gpt2", "GPT2LMHeadModel", {}),
    ("gpt2", "GPT2LMHeadModel", GPT2 | {"n_inner": 700, "tie_word_embeddings": False}),
    # families that were counted wrongly by a formula, at the sizes of published models
    ("deepseek_v3", "DeepseekV3ForCausalLM", {}),
    ("falcon", "FalconForCausalLM", {}),
    ("bloom", "BloomForCausalLM",
     {"hidden_size": 4096, "n_layer": 30, "n_head": 32, "vocab_size": 250880}),
    ("phi", "PhiForCausalLM", {"hidden_size": 2560, "intermediate_size": 10240, "vocab_size": 51200,
                               "num_hidden_layers": 32, "num_attention_heads": 32}),
    ("t5", "T5ForConditionalGeneration",
     {"d_model": 1024, "d_ff": 4096, "num_layers": 24, "num_heads": 16}),
    ("bert", "BertForMaskedLM", {}),
    ("qwen2_moe", "Qwen2MoeForCausalLM", {}),
    ("opt", "OPTForCausalLM", {"hidden_size": 4096, "ffn_dim": 16384, "num_hidden_layers": 32,
                               "num_attention_heads": 32}),
    # and others
    ("llama", "LlamaForSequenceClassification", LLAMA),
    ("bart", "BartForConditionalGeneration", {}),
    ("gemma2", "Gemma2ForCausalLM", {}),
    ("gpt_neox", "GPTNeoXForCausalLM", {}),
    ("gptj", "GPTJForCausalLM", {}),
    ("llava", "LlavaForConditionalGeneration", {}),
    ("mamba", "MambaForCausalLM", {}),
    ("qwen3_moe", "Qwen3MoeForCausalLM", {}),
    ("starcoder2", "Starcoder2ForCausalLM", {}),
    ("whisper", "WhisperForConditionalGeneration", {}),
]  # fmt: skip


def counted() -> Iterator[dict[str, Any]]:
    """Yields a row for each case."""
    import torch
    import transformers

    from zeromon_agents import describe

    for kind, head, sizes in CASES:
        config = transformers.CONFIG_MAPPING[kind](**sizes, architectures=[head])
        with tempfile.TemporaryDirectory() as folder:
            config.save_pretrained(folder)
            path = Path(folder, "config.json")
            with torch.device("meta"):
                model, _ = describe.hub_model(str(path))
            content = json.loads(path.read_text())
        assert type(model).__name__ == head
        plain = {
            name: value
            for name, value in content.items()
            if value is None or isinstance(value, (bool, int)) or name in ("model_type", "architectures")
        }
        units = [
            [unit["count"], sum(torch.Size(shape).numel() for shape in unit["shapes"])]
            for unit in describe.unit_rows(model)
        ]
        params = sum(parameter.numel() for parameter in model.parameters())
        yield {"params": params, "units": units, "config": plain}


if __name__ == "__main__":
    for row in counted():
        print(json.dumps(row, sort_keys=True))
