"""The model that is planned and measured: `zeromon plan planned:build` in this folder."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))
from train_gpt import GPT

WIDTH, LAYERS, HEADS, LENGTH, BATCH = 192, 4, 4, 128, 8


def build() -> GPT:
    """The example's GPT."""
    return GPT(WIDTH, LAYERS, HEADS, LENGTH, False)


def no_module() -> int:
    """What a factory should not return."""
    return 3
