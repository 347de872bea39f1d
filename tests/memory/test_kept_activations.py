"""What autograd keeps of a layer of each family that transformers makes, against the formula."""

from __future__ import annotations

import contextlib
import json
import math
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from support import PROGRAMS, ROOT as ROOT_FOLDER, clean_environment

from zeromon.memory.models import model_from_units
from zeromon.memory.predict import (
    Batch,
    During,
    autocast_copy_terms,
    layer_activation_bytes,
    transformer_activations,
)
from zeromon.memory.spec import ROOT, ModelSpec, Precision, ShardPlan, ZeroStage
from zeromon_agents.describe import hub_model, unit_rows

FOLDERS = os.pathsep.join(map(str, (PROGRAMS, ROOT_FOLDER / "agents")))
BATCH, LENGTH = 2, 64
ERROR = 0.03
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {}, "mistral": {"sliding_window": None}, "qwen2": {}, "qwen3": {}, "gemma": {},
    "gemma2": {}, "gemma3_text": {}, "phi3": {}, "phi": {}, "olmo2": {}, "glm4": {}, "stablelm": {},
    "starcoder2": {}, "granite": {}, "smollm3": {},
    "gpt_neox": {"num_key_value_heads": 4},
    "opt": {"ffn_dim": 160, "word_embed_proj_dim": 128, "dropout": 0.0, "num_key_value_heads": 4},
    "gpt2": {"n_embd": 128, "n_layer": 2, "n_head": 4, "n_inner": 160, "n_positions": 256,
             "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None},
    "qwen2_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 160,
                  "shared_expert_intermediate_size": 96},
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 160},
}  # fmt: skip
WITH_HEAD_DIM = ("llama", "mistral", "qwen3", "gemma", "gemma2", "gemma3_text", "glm4", "qwen3_moe")
IDS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Tensors this small take longer with several threads."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def configuration(family: str, layers: int) -> transformers.PretrainedConfig:
    settings = {
        "hidden_size": 128, "intermediate_size": 160, "num_hidden_layers": layers, "vocab_size": 64,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256, **IDS,
    }  # fmt: skip
    if family == "gpt2":
        settings = IDS | {"vocab_size": 64}
    if family in WITH_HEAD_DIM:
        settings["head_dim"] = 32
    settings |= FAMILIES[family]
    if family == "gpt2":
        settings["n_layer"] = layers
    return transformers.CONFIG_MAPPING[family](**settings)


def described(family: str, folder: Path) -> ModelSpec:
    path = folder / "config.json"
    path.write_text(json.dumps(configuration(family, 2).to_dict(), default=str))
    with torch.device("meta"):
        model, facts = hub_model(str(path))
    return model_from_units(family, unit_rows(model), config=facts["config"])


def kept_bytes(model: Any, *, autocast: bool) -> int:
    """The bytes of the storages that autograd keeps of a forward, without parameters and buffers."""
    standing = {t.untyped_storage().data_ptr() for t in [*model.parameters(), *model.buffers()]}
    kept: dict[int, torch.Tensor] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        pointer = tensor.untyped_storage().data_ptr()
        if pointer not in standing:
            kept.setdefault(pointer, tensor)  # held: a freed storage would give its address away
        return tensor

    tokens = torch.randint(3, 60, (BATCH, LENGTH), generator=torch.Generator().manual_seed(0))
    context = torch.autocast("cpu", torch.bfloat16) if autocast else contextlib.nullcontext()
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor), context:
        output = model(input_ids=tokens, use_cache=False)
    del output
    return sum(tensor.untyped_storage().nbytes() for tensor in kept.values())


def kept_of_a_layer(family: str, precision: str, attention: str, *, checkpointing: bool = False) -> int:
    """The difference that one more layer makes."""
    kept = []
    for layers in (1, 2):
        torch.manual_seed(0)
        config = configuration(family, layers)
        model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation=attention)
        model = model.to(torch.bfloat16 if precision == "bf16" else torch.float32).train()
        if checkpointing:  # non-reentrant checkpoints hide what they keep from the hooks
            model.gradient_checkpointing_enable({"use_reentrant": True})
        kept.append(kept_bytes(model, autocast=precision == "autocast"))
    return kept[1] - kept[0]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_layer_keeps_what_the_formula_says(family: str, tmp_path: Path) -> None:
    model = described(family, tmp_path)
    shape = model.architecture
    assert shape is not None, model.notes
    assert not any("nobody measured" in note for note in model.notes)
    ways = [("bf16", "eager"), ("fp32", "eager"), ("autocast", "eager")]
    if shape.has_fused_attention:
        ways[2:] = [("bf16", "sdpa"), ("autocast", "sdpa")]
    for precision, attention in ways:
        autocast = precision == "autocast"
        measured = kept_of_a_layer(family, precision, attention)
        if autocast:
            measured -= casts_of_a_layer(model)
        batch = Batch(sequences=BATCH, length=LENGTH, fused_attention=attention == "sdpa")
        itemsize = 4 if precision == "fp32" else 2
        planned = layer_activation_bytes(shape, batch, itemsize, autocast=autocast)
        assert planned == pytest.approx(measured, rel=ERROR), (precision, attention)


def casts_of_a_layer(model: ModelSpec) -> int:
    """The bytes of the casts of a layer's weights, as the plan counts them."""
    plan = ShardPlan(stage=ZeroStage.NONE, ranks=1, framework="ddp", precision=Precision.policy())
    (term,) = autocast_copy_terms(model, plan, Batch(sequences=1, length=1))
    roots = [math.prod(s) for u in model.units if u.name == ROOT for s in u.shapes if len(s) == 2]
    return (term.nbytes - 2 * max(roots)) // 2


@pytest.mark.parametrize("precision", ["bf16", "autocast"])
@pytest.mark.parametrize("family", ["llama", "gemma3_text", "phi3"])
def test_a_checkpoint_keeps_the_input_of_a_layer(family: str, precision: str, tmp_path: Path) -> None:
    model = described(family, tmp_path)
    assert model.architecture is not None
    batch = Batch(sequences=BATCH, length=LENGTH, checkpointing=True)
    terms = transformer_activations(model.architecture, batch, autocast=precision == "autocast")
    measured = kept_of_a_layer(family, precision, "sdpa", checkpointing=True)
    assert terms[0].nbytes / model.architecture.layers == pytest.approx(measured, rel=ERROR)


def test_checkpoints_keep_the_casts_of_one_layer_in_backward(tmp_path: Path) -> None:
    model = described("llama", tmp_path)
    plan = ShardPlan(stage=ZeroStage.NONE, ranks=1, framework="ddp", precision=Precision.policy())
    plain = list(autocast_copy_terms(model, plan, Batch(sequences=1, length=8)))
    again = list(autocast_copy_terms(model, plan, Batch(sequences=1, length=8, checkpointing=True)))
    assert [t.during for t in plain] == [During.ACTIVATIONS]
    assert [t.during for t in again] == [During.LOSS, During.BACKWARD]
    assert again[0].nbytes == plain[0].nbytes > again[1].nbytes == casts_of_a_layer(model)


def test_a_family_that_nobody_measured_has_a_note(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({
        "model_type": "cohere", "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 64, **IDS,
    }))  # fmt: skip
    with torch.device("meta"):
        built, facts = hub_model(str(path))
    notes = model_from_units("x", unit_rows(built), config=facts["config"]).notes
    assert any("nobody measured them for cohere" in note for note in notes)


TRACES = """
import runpy, sys
from torch import distributed
for flags in (), ("--checkpointing",), ("--no-fused-attention",):
    sys.argv[1:] = ["planned:build_wide", "--trace", "--ranks", "2", "--length", "64", *flags]
    runpy.run_module("zeromon_agents.describe", run_name="__main__")
    distributed.destroy_process_group()
"""
"""Three traces with one import of transformers, which takes longer than all of them."""


def test_a_trace_honours_checkpointing_and_attention() -> None:
    """Activations of a factory whose optimizer step needs more than its activations."""
    done = subprocess.run(
        [sys.executable, "-c", TRACES], env=clean_environment() | {"PYTHONPATH": FOLDERS},
        capture_output=True, text=True, timeout=300, check=True,
    )  # fmt: skip
    rows = [row for row in done.stdout.splitlines() if row.startswith("zeromon: ")]
    described = [json.loads(row.removeprefix("zeromon: ")) for row in rows]
    plain, again, unfused = (row["activation_bytes"] for row in described)
    assert 0 < again < plain < unfused
    # at least the scores of 4 heads and 4 layers, in fp32
    assert unfused - plain > 4 * 4 * 64 * 64 * 4 // 2
