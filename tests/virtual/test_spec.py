"""What is asked of a virtual run: read strictly, each error names its place."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from zeromon_virtual.spec import SpecError, from_json

SPEC: dict[str, Any] = {
    "model": {"layers": 2},
    "device": {"flops_per_second": {"default": 1e12, "bfloat16": 2e12}, "bytes_per_second": 1e12},
    "sharding": {"shards": 4, "prefetch": None},
    "link": {"latency_seconds": 0, "bytes_per_second": 1e9},
}


def test_defaults_fill_what_is_left_out() -> None:
    spec = from_json(SPEC)
    assert (spec.model.layers, spec.sharding.replicas, spec.sharding.prefetch) == (2, 1, None)
    assert spec.link.latency_seconds == 0.0
    assert (spec.device.rate("bfloat16"), spec.device.rate("float32")) == (2e12, 1e12)


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("model.layers", "two", "spec.model.layers: expected int"),
        ("model.depth", 3, "spec.model: unknown key 'depth'"),
        ("sharding.shards", 0, "spec.sharding.shards: expected 1 or more"),
        ("sharding.shards", True, "spec.sharding.shards: expected int"),
        ("link", None, "spec.link: expected an object"),
        ("device.flops_per_second", {"bfloat16": 1.0}, ".default. is missing"),
        ("device", {"flops_per_second": {}}, "spec.device: the key 'bytes_per_second' is missing"),
    ],
)
def test_an_error_names_the_place(path: str, value: Any, message: str) -> None:
    spec = copy.deepcopy(SPEC)
    *parents, last = path.split(".")
    owner = spec
    for parent in parents:
        owner = owner[parent]
    owner[last] = value
    with pytest.raises(SpecError, match=message):
        from_json(spec)
