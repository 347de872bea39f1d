"""Parameters of models, against transformers' own classes, which model_counts.py counted."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support import ROOT, clean_environment

from zeromon.errors import PlanError
from zeromon.memory.models import architecture, from_config, from_units
from zeromon.memory.spec import Unit

ROWS = [json.loads(line) for line in (ROOT / "tests/data/models.jsonl").read_text().splitlines()]
PROVEN = {"LlamaForCausalLM", "MistralForCausalLM", "MixtralForCausalLM", "Qwen2ForCausalLM",
          "Qwen3ForCausalLM", "Phi3ForCausalLM", "GPT2LMHeadModel"}  # fmt: skip
SIZES = {"hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 2, "vocab_size": 10}


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row["config"]["architectures"][0])
def test_a_count_without_transformers_is_exact_or_refused(row: dict[str, Any]) -> None:
    """Never a number that is wrong: DeepSeek-V3 was 38.6 B, falcon 61 % too large."""
    if row["config"]["architectures"][0] in PROVEN:
        model = from_config(row["config"])
        assert [[unit.count, unit.numel] for unit in model.units] == row["units"]
        assert model.params == row["params"]
        assert model.architecture is not None
    else:
        with pytest.raises(PlanError, match="cannot be counted without transformers") as caught:
            from_config(row["config"])
        assert "Install transformers" in caught.value.hint


@pytest.mark.parametrize("kind", sorted({row["config"]["model_type"] for row in ROWS[:20]}))
def test_a_missing_size_is_not_guessed(kind: str) -> None:
    """transformers has another default for each family."""
    config = next(row["config"] for row in ROWS if row["config"]["model_type"] == kind)
    for name in ("intermediate_size", "vocab_size", "n_positions"):
        if name in config:
            with pytest.raises(PlanError, match=f"no {name}"):
                from_config({key: size for key, size in config.items() if key != name})
    with pytest.raises(PlanError, match="without a model_type"):
        from_config({key: size for key, size in config.items() if key != "model_type"})


@pytest.mark.parametrize(
    ("config", "shapes", "expected"),
    [
        # one key and value for all heads, though the configuration says nothing of it
        ({}, [(64 + 2 * 16, 64), (64, 64), (256, 64), (64, 256), (64,)], (False, 1, 256)),
        ({"intermediate_size": 100}, [(64, 64)] * 4 + [(100, 64)] * 3, (True, 4, 100)),
        ({"num_experts": 8, "moe_intermediate_size": 32, "num_experts_per_tok": 2,
          "shared_expert_intermediate_size": 80},
         [(64, 64)] * 4 + [(8, 64), (8, 64, 64), (8, 64, 32), (80, 64), (80, 64), (64, 80), (1, 64)],
         (True, 4, 2 * 32 + 80)),
        ({}, [(64, 16), (16, 64), (64, 64), (256, 64), (64, 256)], None),  # latent attention
        ({"is_encoder_decoder": True}, [(64, 64)] * 4 + [(256, 64)] * 3, None),
    ],
)  # fmt: skip
def test_activations_are_known_for_plain_layers_alone(
    config: dict[str, Any], shapes: list[tuple[int, ...]], expected: tuple[bool, int, int] | None
) -> None:
    found = architecture(
        SIZES | config, [Unit("layer", tuple(shapes), 2), Unit("(root)", ((10, 64),))]
    )
    assert (found and (found.gated, found.kv_heads, found.ffn)) == expected
    layers = [{"name": "layer", "shapes": shapes, "count": 2}]
    notes = from_units("x", layers, config=SIZES | config).notes
    assert ("activations are not counted" in " ".join(notes)) is (expected is None)


@pytest.mark.long
def test_the_rows_are_what_transformers_makes_now() -> None:
    script = Path(__file__).with_name("model_counts.py")
    done = subprocess.run([sys.executable, script], env=clean_environment(), capture_output=True,
                          text=True, timeout=600)  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert [json.loads(line) for line in done.stdout.splitlines()] == ROWS
