"""Models of transformers: what is counted, and of which layers the activations are known."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support import ROOT, clean_environment

from zeromon.memory.models import model_from_units, transformer_of_config
from zeromon.memory.spec import Unit

ROWS = [json.loads(line) for line in (ROOT / "tests/data/models.jsonl").read_text().splitlines()]
SIZES = {"hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 2, "vocab_size": 10}


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
    found = transformer_of_config(
        SIZES | config, [Unit("layer", tuple(shapes), 2), Unit("(root)", ((10, 64),))]
    )
    assert (found and (found.gated, found.kv_heads, found.ffn)) == expected
    layers = [{"name": "layer", "shapes": shapes, "count": 2}]
    notes = model_from_units("x", layers, config=SIZES | config).notes
    assert ("activations are not counted" in " ".join(notes)) is (expected is None)


@pytest.mark.long
def test_the_rows_are_what_transformers_makes_now() -> None:
    script = Path(__file__).with_name("model_counts.py")
    done = subprocess.run([sys.executable, script], env=clean_environment(), capture_output=True,
                          text=True, timeout=600)  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert [json.loads(line) for line in done.stdout.splitlines()] == ROWS
