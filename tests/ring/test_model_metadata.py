"""One declaration of the metadata of models and DataLoaders: what is written and read is declared."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, get_type_hints

import msgspec
import pytest
from builders import rank, run

import zeromon
from zeromon.memory.reconcile import read_model_facts
from zeromon.ring.model_metadata import LoaderMetadata, ModelMetadata, ProcessMetadata, declared_keys
from zeromon.storage.run_store import decode_snapshot, encode_snapshot

ROOT = Path(zeromon.__file__).parents[1]
AGENTS = ROOT / "agents" / "zeromon_agents"
MODEL: ModelMetadata = {
    "framework": "fsdp2", "stage": 3, "ranks": 2, "numel": 100, "trainable": 100, "shard_numel": 50,
    "trainable_shard_numel": 50, "param_bytes": 3.5, "compute_bytes": 2, "grad_bytes": 4,
    "units": [60], "blocks": [2, 30], "optimizer": "AdamW", "momentum": 0.0, "bucket_views": True,
}  # fmt: skip


def keys_in(function: ast.AST) -> Iterator[str]:
    """Keys of dictionaries that are written out, and of items that are assigned."""
    for node in ast.walk(function):
        if isinstance(node, ast.Dict):
            yield from (k.value for k in node.keys if isinstance(k, ast.Constant))
        elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Subscript):
            index = node.targets[0].slice
            if isinstance(index, ast.Constant):
                yield index.value


def trees() -> Iterator[ast.AST]:
    """Every module of the agents."""
    for file in AGENTS.rglob("*.py"):
        yield ast.parse(file.read_text())


def test_all_keys_that_agents_write_of_a_model_are_declared_and_no_others() -> None:
    """They are written by the functions that return this type."""
    written = {
        key
        for tree in trees()
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef) and node.returns is not None
        and "ModelMetadata" in ast.unparse(node.returns)
        for key in keys_in(node)
    }  # fmt: skip
    assert written == set(ModelMetadata.__annotations__)


def test_all_keys_that_agents_write_of_a_loader_are_declared_and_no_others() -> None:
    """They are written into names with this type, and into the attribute that is so declared."""
    written: set[str] = set()
    for node in (node for tree in trees() for node in ast.walk(tree)):
        typed = isinstance(node, ast.AnnAssign) and "LoaderMetadata" in ast.unparse(node.annotation)
        target = ast.unparse(node.targets[0]) if isinstance(node, ast.Assign) else ""
        if (typed or target == "self._loader_settings") and isinstance(node.value, ast.Dict):  # type: ignore[attr-defined]
            written |= set(keys_in(node))
    assert written == set(LoaderMetadata.__annotations__)


class Recording(dict[str, Any]):
    """A mapping that remembers which keys are read."""

    def __init__(self, content: Mapping[str, Any]) -> None:
        super().__init__(content)
        self.read: set[str] = set()

    def __getitem__(self, key: str) -> Any:
        self.read.add(key)
        return super().__getitem__(key)

    def get(self, key: str, default: Any = None) -> Any:
        self.read.add(key)
        return super().get(key, default)


def test_all_keys_that_the_prediction_reads_are_declared() -> None:
    numbers = {key: 1 for key, kind in get_type_hints(ModelMetadata).items() if kind is int}
    recording = Recording({**numbers, **MODEL})
    assert read_model_facts(recording) is not None  # type: ignore[arg-type]
    assert len(recording.read) > 30
    assert recording.read <= set(ModelMetadata.__annotations__)


def test_every_key_has_a_meaning() -> None:
    """A name says it alone, or a text below does; units are in the name or in the module's text."""
    source = inspect.getsource(inspect.getmodule(ModelMetadata))  # type: ignore[arg-type]
    told = {"numel", "trainable_shard_numel", "largest_tensor_numel", "grad_bucket_numel",
            "num_workers", "pin_memory"}  # fmt: skip
    for key in {*ModelMetadata.__annotations__, *LoaderMetadata.__annotations__} - told:
        line = next(n for n, text in enumerate(source.splitlines()) if text.startswith(f"    {key}: "))
        assert source.splitlines()[line + 1].startswith('    """'), key


@pytest.mark.parametrize(
    ("raw", "kept"),
    [
        ({"stage": 3, "numel": 5}, {"stage": 3, "numel": 5}),
        ({"stage": "x", "numel": True, "units": [1, "2"], "optimizer": 3, "has_master": 1}, {}),
        ({"new_in_a_later_version": 1, "units": [1, 2], "param_bytes": 2.5},
         {"units": [1, 2], "param_bytes": 2.5}),
        (None, {}), ([], {}), ("text", {}),
    ],
)  # fmt: skip
def test_what_is_not_declared_or_of_another_type_is_left_out(raw: Any, kept: Any) -> None:
    assert declared_keys(ModelMetadata, raw) == kept


def test_a_loader_is_read_in_the_same_way() -> None:
    raw = {"num_workers": 2, "pin_memory": True, "batch_size": "8", "more": 1}
    assert declared_keys(LoaderMetadata, raw) == {"num_workers": 2, "pin_memory": True}


def test_a_process_is_read_in_the_same_way() -> None:
    raw = {"variables": {"OMP_NUM_THREADS": "1"}, "threads": 1, "autocast": "", "more": 1}
    assert declared_keys(ProcessMetadata, raw) == {k: v for k, v in raw.items() if k != "more"}
    assert (
        declared_keys(ProcessMetadata, {"variables": {"A": 1}, "threads": "1", "autocast": None}) == {}
    )


def test_the_metadata_keep_their_json() -> None:
    """Numbers that are whole stay whole; keys of another version do not prevent decoding."""
    before = run(rank(models=(MODEL,), planned=MODEL, loader={"num_workers": 2}))
    text = encode_snapshot(before)
    after = decode_snapshot(text)
    assert after == before and encode_snapshot(after) == text
    newer = msgspec.json.decode(text)
    newer["ranks"][0]["config"]["models"][0]["new_in_a_later_version"] = 1
    assert decode_snapshot(msgspec.json.encode(newer)).ranks[0].config.models == (MODEL,)
