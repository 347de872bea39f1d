"""What a model was called with, by the shapes of its arguments; and the FLOPs of its matrices."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest
import torch
from support import ROOT
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from zeromon.memory.seconds import token_flops, training_flops
from zeromon.ring.codes import Kind, Padding
from zeromon_agents.observe import model_metadata
from zeromon_agents.observe.batches import Batches, named_inputs, sizes_of

IDS, IMAGES, HIDDEN = (
    torch.zeros(2, 5, dtype=torch.long),
    torch.zeros(3, 3, 8, 8),
    torch.zeros(2, 5, 7),
)
LABELS = torch.zeros(3, dtype=torch.long)


@pytest.mark.parametrize(
    ("args", "kwargs", "sizes"),
    [
        ((IDS,), {}, (2, 5)),
        ((IMAGES, IDS), {}, (2, 5)),
        ((IMAGES, LABELS), {}, (3, 0)),
        (({"labels": IDS[:1], "input_ids": IDS},), {}, (2, 5)),
        ((), {"attention_mask": IDS[:1], "input_ids": IDS}, (2, 5)),
        ((), {"inputs_embeds": HIDDEN, "input_ids": None}, (2, 5)),
        ((), {"x": HIDDEN, "labels": IDS}, (2, 0)),
        ((torch.ones(2, 5, dtype=torch.bool), IMAGES), {}, (2, 0)),
        (([IDS, IDS],), {}, (2, 5)),
        ((torch.zeros((), dtype=torch.long), "text", None), {}, None),
    ],
)
def test_sizes_of_arguments(args: Any, kwargs: Any, sizes: tuple[int, int] | None) -> None:
    assert sizes_of(named_inputs(args, kwargs)) == sizes


@pytest.mark.parametrize(
    ("batch", "length"),
    [
        ((IDS, IDS), 5), ({"labels": HIDDEN, "input_ids": IDS}, 5), (IDS, 5), ([IMAGES, IDS], 0),
        ((HIDDEN,), 0), (None, 0), ([], 0), ({}, 0), (["a", "b"], 0),
    ],
)  # fmt: skip
def test_the_first_part_of_a_loaders_batch_decides(batch: Any, length: int) -> None:
    assert Batches(Written()).loaded(batch) == length  # type: ignore[arg-type]


class Written:
    """Stands for the context, and keeps what is written."""

    def __init__(self) -> None:
        self.records: list[tuple[int, ...]] = []

    def write(self, _: int, kind: int, op: int, *rest: int) -> None:
        assert kind == Kind.BATCH
        self.records.append((op, *rest[4:]))


def test_micro_steps_add_up_and_padding_is_left_out_where_the_mask_is_here() -> None:
    written = Written()
    batches = Batches(written)  # type: ignore[arg-type]
    mask = torch.tensor([[1, 1, 1, 0, 0], [1, 1, 1, 1, 1]])
    batches.received(1, (), {"input_ids": IDS, "attention_mask": mask})
    batches.received(1, (torch.zeros(1, 3, dtype=torch.long),), {})
    with torch.no_grad():
        batches.received(2, (torch.zeros(8, 9, dtype=torch.long),), {})  # a reference model
    batches.received(3, (IDS[:1],), {})  # another model of the same step
    batches.loaded((IMAGES, LABELS))
    batches.write(0)
    batches.received(1, (), {"input_ids": IDS, "attention_mask": mask.to("meta")})
    batches.write(0)
    batches.loaded((IMAGES, LABELS))
    batches.loaded((IMAGES, LABELS))
    batches.write(0)
    batches.write(0)  # a second optimizer of the step
    assert written.records == [
        (Padding.LEFT_OUT, 3, 8 + 3, 10 + 3, 50 + 9),
        (Padding.INCLUDED, 2, 10, 10, 50),
        (Padding.NO_MASK, 6, -1, 0, 0),
    ]


def test_a_pipelines_loaders_do_not_count() -> None:
    """Each of its stages may have one; the first stage is called with the batch."""
    written = Written()
    batches = Batches(written)  # type: ignore[arg-type]
    batches.whole = True
    batches.loaded(IDS)
    batches.write(0)
    assert not written.records


def example(name: str = "train_gpt") -> Any:
    spec = importlib.util.spec_from_file_location(name, ROOT / "examples" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_flops_of_the_example_are_those_that_torch_counts() -> None:
    """Within 1 %, forward and backward. Scores count in full, also those that the mask hides."""
    width, layers, length = 128, 3, 64
    model = example().GPT(width, layers, 4, length, False)
    facts = model_metadata.matrix_facts(model, (), layers)
    assert facts == {"matrix_numel": 256 * width + layers * 12 * width**2, "attention": layers * width}
    tokens = torch.zeros(2, length, dtype=torch.long)
    # of the fused kernels of a CPU torch knows no FLOPs
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        loss = model(tokens).sum()
    weights, attention = facts["matrix_numel"], facts["attention"]
    assert counter.get_total_flops() == token_flops(weights, attention, length) * tokens.numel()
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        loss.backward()
    needed = training_flops(weights, weights, attention, length) - token_flops(
        weights, attention, length
    )
    assert counter.get_total_flops() == pytest.approx(needed * tokens.numel(), rel=0.01)


class Config:
    num_hidden_layers, hidden_size, num_attention_heads, head_dim = 7, 64, 4, 32
    num_experts_per_tok, num_local_experts = 2, 8


def test_tables_experts_and_shared_weights() -> None:
    model: Any = nn.Module()
    model.table, model.head = nn.Embedding(10, 4), nn.Linear(4, 10)
    assert model_metadata.matrix_facts(model, (), 2) == {"matrix_numel": 40, "attention": 8}
    model.head.weight = model.table.weight  # then it is a matrix, once
    assert model_metadata.matrix_facts(model, (), 2)["matrix_numel"] == 40
    model.experts = nn.ModuleList(nn.Linear(4, 4, bias=False) for _ in range(8))
    assert model_metadata.matrix_facts(model, (), 2) == {}
    model.config = Config()
    assert model_metadata.matrix_facts(model, (), 2) == {
        "matrix_numel": 40 + 2 * 16,
        "attention": 7 * 128,
    }
