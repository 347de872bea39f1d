"""Device memory by each allocator, copies between devices, and a model that the host never holds."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from vgpu.conftest import CudaRunner
from zeromon_vgpu.machine import GIB

pytestmark = pytest.mark.vgpu


@pytest.mark.parametrize(
    ("settings", "backend", "segments", "page", "nvlink_devices"),
    [
        ("", "native", 8, 1, 8),
        ("expandable_segments:True", "native", 1, 20 << 20, 8),
        ("backend:cudaMallocAsync", "cudaMallocAsync", 0, 1, 1),
    ],
)
def test_each_allocator_takes_and_gives_back(
    cuda_run: CudaRunner, settings: str, backend: str, segments: int, page: int, nvlink_devices: int
) -> None:
    changes = {"nvlink_devices": nvlink_devices}
    link = 360e9 if nvlink_devices == 8 else 40e9
    run = cuda_run("memory.py", ranks=1, changes=changes, PYTORCH_CUDA_ALLOC_CONF=settings)
    output = run.output
    found = re.search(r"^facts (.*)", output, re.MULTILINE)
    assert found is not None, output
    facts: dict[str, Any] = json.loads(found[1])
    assert (facts["backend"], facts["segments"]) == (backend, segments)
    assert facts["allocated"] == GIB
    assert GIB <= facts["taken"] < GIB + page  # an expandable segment grows by 20 MiB
    assert facts["right"] and facts["back"] == 0
    assert facts["oom"].startswith("OutOfMemoryError:") and "100.00 GiB" in facts["oom"]
    assert facts["peer"] and facts["peer_right"]
    assert facts["peer_ms"] == pytest.approx((64 << 20) / link * 1e3, rel=0.05)
    assert facts["staged_ms"] == pytest.approx((64 << 20) / 27e9 * 1e3, rel=0.05)
    assert facts["peer_statuses"] == [0, 704, 0, 705, 101]


def test_two_processes_share_a_tensor_and_an_event(each_cuda_run: CudaRunner) -> None:
    output = each_cuda_run("ipc.py", ranks=1).output
    found = re.search(r"^facts (.*)", output, re.MULTILINE)
    assert found is not None, output
    facts: dict[str, Any] = json.loads(found[1])
    assert facts["total"] == facts["expected"] and facts["written"] and facts["code"] == 0
    assert (facts["early"], facts["late"]) == (False, True)
    assert facts["cleared"] == 0  # by dropping the pages of the file
    assert facts["refusals"] == {"host": 1, "itself": 201}


def test_seven_billion_parameters_fit_four_devices_and_a_small_host(cuda_run: CudaRunner) -> None:
    """Parameter, gradient and two moments in 32 bits: 16 bytes a parameter, sharded over four ranks."""
    ranks = 4
    output = cuda_run("large.py", ranks=ranks, changes={"largest_payload": 0}).output
    for rank in range(ranks):
        found = re.search(rf"rank {rank} facts (\{{.*?\}})", output)
        assert found is not None, output
        facts = json.loads(found[1])
        assert facts["parameters"] == pytest.approx(7e9, rel=0.01)
        assert facts["states"] == pytest.approx(16 * facts["parameters"] / ranks, rel=0.01)
        assert facts["states"] < facts["peak"] < 80 * GIB
        assert facts["host"] < GIB


@pytest.mark.short
@pytest.mark.parametrize("moves", [True, False])
def test_large_copies_take_no_memory_of_the_host(cuda_run: CudaRunner, moves: bool) -> None:
    """Eight times 128 MiB; what is small comes back either way."""
    output = cuda_run(
        "uploads.py", ranks=1, changes={} if moves else {"largest_payload": 64 << 10}
    ).output
    found = re.search(r"^facts (.*)", output, re.MULTILINE)
    assert found is not None, output
    facts = json.loads(found[1])
    assert facts["small"] and facts["large"] == moves
    assert (facts["grown_mib"] > 1000) if moves else (facts["grown_mib"] < 300)
