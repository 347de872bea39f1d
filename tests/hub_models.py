"""Plain GPT-2 and LLaMA models by their sizes, as `zeromon plan` describes those of a config.json.

Building them with transformers takes seconds; test_plan.py holds one of each against that.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import json
import sys
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from zeromon.cli.plan_setup import read_model
from zeromon.memory.models import model_from_units
from zeromon.memory.spec import ModelSpec


def described(config: Mapping[str, Any]) -> dict[str, Any]:
    """What the child process of `zeromon plan` prints of *config*."""
    is_gpt2 = config["model_type"] == "gpt2"
    layer, root, count = _gpt2(config) if is_gpt2 else _llama(config)
    if not config.get("tie_word_embeddings", is_gpt2):  # transformers' defaults
        root = [*root, root[0]]
    units = [{"name": "layer", "shapes": layer, "count": count}, {"name": "(root)", "shapes": root}]
    return {"units": units, "buffer_bytes": 0, "config": dict(config)}


def from_config(config: Mapping[str, Any], name: str = "model") -> ModelSpec:
    """The model of *config*."""
    found = described(config)
    return model_from_units(name, found["units"], config=found["config"])


def written(folder: Path, monkeypatch: pytest.MonkeyPatch, config: Mapping[str, Any]) -> str:
    """The path of *config* as a config.json, which `zeromon plan` describes in this process."""
    path = folder / "config.json"
    path.write_text(json.dumps(config))
    read_model.cache_clear()
    monkeypatch.setattr("zeromon.cli.plan_setup.describe_entry", lambda *_: described(config))
    return str(path)


def describe_in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Has `zeromon plan` call describe.py here: a process each would import transformers anew."""

    def describe(entry: str, _: Any = None, __: int = 1, flags: tuple[str, ...] = ()) -> Any:
        monkeypatch.setattr("sys.argv", ["describe", entry, *flags])
        return _describe(Path(entry).read_text(), *flags)

    read_model.cache_clear()
    monkeypatch.setattr("zeromon.cli.plan_setup.describe_entry", describe)


@cache
def _describe(content: str, *flags: str) -> dict[str, Any]:
    """What the child process of `zeromon plan` prints of a config.json."""
    path = Path(sys.argv[1])
    assert path.read_text() == content
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        importlib.import_module("zeromon_agents.describe").main()
    found: dict[str, Any] = json.loads(printed.getvalue().split("zeromon: ")[1])
    return found


def _gpt2(config: Mapping[str, Any]) -> tuple[Any, Any, int]:
    h, vocab = config["n_embd"], config["vocab_size"]
    norms = [[h]] * 4
    layer = [[h, 3 * h], [3 * h], [h, h], [h], [h, 4 * h], [4 * h], [4 * h, h], [h], *norms]
    return layer, [[vocab, h], [config["n_positions"], h], [h], [h]], config["n_layer"]


def _llama(config: Mapping[str, Any]) -> tuple[Any, Any, int]:
    h, f = config["hidden_size"], config["intermediate_size"]
    layer = [[h, h]] * 4 + [[f, h], [f, h], [h, f], [h], [h]]
    return layer, [[config["vocab_size"], h], [h]], config["num_hidden_layers"]
