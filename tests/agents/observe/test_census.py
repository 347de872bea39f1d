"""Bytes by role: each storage once, only what was touched, nothing kept alive."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch

from zeromon.ring.codes import Role
from zeromon_agents.observe.census import (
    Count,
    OnDisk,
    census_step,
    role_counts,
    tensors_in,
    touched_bytes,
)

MIB = 1 << 20


def host(*claims: tuple[Role, Any]) -> dict[Role, int]:
    return {role: found.host for role, found in role_counts(claims).items()}


def test_views_and_shared_storages_count_once_and_for_the_first_role() -> None:
    """A flat partition and the parameters that are views of it are the same bytes."""
    flat = torch.zeros(1000)
    views = [flat[:400].view(20, 20), flat[400:]]
    tied = torch.zeros(8)
    assert host(
        (Role.SHARDED_PARAM, flat), (Role.UNSHARDED_PARAM, views), (Role.BUFFER, [tied, tied])
    ) == {Role.SHARDED_PARAM: 4000, Role.UNSHARDED_PARAM: 0, Role.BUFFER: 32}


def test_a_small_view_of_a_large_storage_holds_all_of_it() -> None:
    """What is kept alive counts, not what the view shows."""
    assert host((Role.BUFFER, torch.zeros(1000)[:1])) == {Role.BUFFER: 4000}


def test_pages_that_nothing_touched_cost_nothing() -> None:
    """A bucket of 64 MiB of which a quarter was written."""
    bucket = torch.empty(16 * MIB)  # 64 MiB; large enough to be mapped, not yet in memory
    bucket[: 4 * MIB] = 1.0
    found = host((Role.REDUCE_SCATTER, bucket))[Role.REDUCE_SCATTER]
    assert 16 * MIB <= found <= 20 * MIB  # huge pages round up


def test_touched_says_all_where_the_kernel_does_not_say() -> None:
    """An address that is not mapped."""
    assert touched_bytes(4096, 123) == 123


def test_meta_and_empty_and_odd_things_are_nothing() -> None:
    """Nested containers are walked; what is no tensor has no bytes."""
    meta, empty = torch.empty(5, device="meta"), torch.empty(0)
    nested = {"a": [meta, (empty, None, 3, "x")], "b": {"c": torch.zeros(2)}}
    assert host((Role.OPTIMIZER_STATE, nested)) == {Role.OPTIMIZER_STATE: 8}


def test_nested_containers_are_flattened() -> None:
    a, b = torch.zeros(1), torch.zeros(10)
    assert [t.numel() for t in tensors_in([{"x": (a,)}, [b], "text"])] == [1, 10]


def test_sparse_and_quantized_tensors() -> None:
    """A sparse one is its indices and values; a quantized one its integers."""
    sparse = torch.sparse_coo_tensor([[0, 2]], [1.0, 2.0], (1000,)).coalesce()
    assert host((Role.UNSHARDED_GRAD, [sparse])) == {Role.UNSHARDED_GRAD: 2 * 8 + 2 * 4}
    quantized = torch.quantize_per_tensor(torch.zeros(100), 0.1, 0, torch.qint8)
    assert host((Role.UNSHARDED_PARAM, quantized)) == {Role.UNSHARDED_PARAM: 100}


def test_what_is_on_disk_counts_there() -> None:
    assert role_counts([(Role.MASTER_PARAM, OnDisk(77))]) == {Role.MASTER_PARAM: Count(disk=77)}


def test_nothing_is_kept_alive() -> None:
    tensor = torch.zeros(10)
    gone = weakref.ref(tensor)
    role_counts([(Role.BUFFER, [tensor])])
    del tensor
    gc.collect()
    assert gone() is None


@pytest.mark.parametrize(
    ("steps", "expected"), [(range(1, 23), [1, 2, 3, 4, 13, 22]), (range(60, 200), [69, 134, 199])]
)
def test_the_first_steps_take_a_census_then_some(steps: range, expected: list[int]) -> None:
    assert [step for step in steps if census_step(step)] == expected
