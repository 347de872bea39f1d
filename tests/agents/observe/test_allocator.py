"""The allocator's figures as they are written; on figures of our own, since there is no device here."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from zeromon.ring.buffer import RingReader, RingWriter
from zeromon.ring.codes import Phase
from zeromon.ring.events import AllocatedPeak, MemoryPeak, MemorySample, Oom, decode_record
from zeromon_agents.observe import accelerator, allocator
from zeromon_agents.observe.accelerator import Accelerator
from zeromon_agents.runtime.guard import Guard
from zeromon_agents.runtime.hook_context import ON, HookContext

STATS: dict[str, Any] = {
    name: {"all": {"current": n, "peak": 10 * n}} for n, name in enumerate(allocator._WRITTEN, 1)
} | {"num_alloc_retries": 7, "num_ooms": 1}


class Module:
    """A device module with what torch.cuda, torch.xpu and torch.npu share; notes calls of the driver."""

    def __init__(self) -> None:
        self.driver: list[str] = []
        self.kind = "native"
        self.observers: list[Any] = []
        self.memory = SimpleNamespace(_dump_snapshot=lambda path: self.driver.append(path))

    def is_initialized(self) -> bool:
        return True

    def current_device(self) -> int:
        return 2

    def get_allocator_backend(self) -> str:
        return self.kind

    def memory_stats_as_nested_dict(self, device: int) -> dict[str, Any]:
        assert device == 2
        return STATS

    def memory_allocated(self) -> int:
        return 1

    def mem_get_info(self, device: int) -> tuple[int, int]:
        self.driver.append("mem_get_info")
        return 5, 80

    def get_per_process_memory_fraction(self, device: int) -> float:
        return 0.5

    def host_memory_stats(self) -> dict[str, int]:
        return {"allocated_bytes.current": 77}

    def memory_snapshot(self) -> list[dict[str, Any]]:
        blocks = [{"size": 9, "state": "inactive"}, {"size": 99, "state": "active_allocated"}]
        return [{"blocks": blocks}]

    def attach_out_of_memory_observer(self, observer: Any) -> None:
        self.observers.append(observer)


class Parts:
    """An allocator of a device of *type*, and the record that it writes."""

    def __init__(self, folder: Path, patch: pytest.MonkeyPatch, type: str, module: Any) -> None:
        ring = RingWriter(folder / "r.ring", rank=0, capacity=64)
        self.context = HookContext(ring, Guard())
        self.context.mode = ON
        self.reader = RingReader(ring.path)
        self.device = Accelerator(type, module)
        patch.setattr(accelerator, "ready_device", lambda: self.device)
        self.allocator = allocator.Allocator(self.context)

    def events(self) -> list[Any]:
        return [decode_record(raw) for raw in self.reader.read()]


@pytest.fixture(params=["cuda", "xpu", "npu", "mine"])
def parts(request: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Parts:
    """On each type of device: nothing asks which one it is."""
    monkeypatch.setattr(torch._C, "_cuda_attach_out_of_memory_observer", None, raising=False)
    return Parts(tmp_path, monkeypatch, request.param, Module())


def test_at_the_end_of_a_step_the_device_is_asked_too(parts: Parts) -> None:
    """The first time for its capacity, then on detailed steps only."""
    parts.allocator.sample()
    memory, most, peak = parts.events()
    assert isinstance(memory, MemorySample) and isinstance(peak, MemoryPeak)
    assert most[1:] == (Phase.OPTIMIZER, 10, 1)
    assert memory[2:] == (1, 2, 3, 4)
    assert (peak.retries, peak.ooms, peak.free_bytes, peak.capacity_bytes) == (7, 1, 5, 40)
    parts.allocator.sample()
    assert parts.device.module.driver == ["mem_get_info"]
    assert allocator.allocated_bytes() == 1
    assert allocator.pinned_bytes() == 77


def test_without_a_limit_the_capacity_is_that_of_the_device(
    parts: Parts, monkeypatch: pytest.MonkeyPatch
) -> None:
    """cudaMallocAsync, which nobody limited, says 2**64 bytes over the device's."""
    monkeypatch.setattr(Module, "get_per_process_memory_fraction", lambda *_: 2**64 / 80)
    parts.allocator.sample()
    (peak,) = (event for event in parts.events() if isinstance(event, MemoryPeak))
    assert peak.capacity_bytes == 80


def test_before_backward_nothing_calls_the_driver(parts: Parts) -> None:
    """A graph may be under capture: even the first time."""
    parts.allocator.sample_tensors(Phase.FORWARD)
    assert [type(event) for event in parts.events()] == [MemorySample, AllocatedPeak]
    assert parts.device.module.driver == []


def test_a_peak_is_written_once_with_its_phase(parts: Parts, monkeypatch: pytest.MonkeyPatch) -> None:
    parts.allocator.phase_ends(Phase.OTHER)
    parts.allocator.sample_tensors(Phase.FORWARD)
    higher = {**STATS, "allocated_bytes": {"all": {"current": 1, "peak": 30}}}
    monkeypatch.setattr(Module, "memory_stats_as_nested_dict", lambda *_: higher)
    parts.allocator.phase_ends(Phase.BACKWARD)
    peaks = [event[1:] for event in parts.events() if isinstance(event, AllocatedPeak)]
    assert peaks == [(Phase.OTHER, 10, 1), (Phase.BACKWARD, 30, 1)]
    assert parts.device.module.driver == []


def test_an_allocation_that_fails_is_written(parts: Parts) -> None:
    """With the largest block of the cache."""
    parts.allocator.sample_tensors(Phase.FORWARD)
    parts.allocator.sample_tensors(Phase.FORWARD)
    (observer,) = parts.device.module.observers
    observer(2, 1000, 80, 5)
    (oom,) = (event for event in parts.events() if isinstance(event, Oom))
    assert (oom.requested_bytes, oom.free_bytes, oom.largest_block_bytes) == (1000, 5, 9)


def test_a_vendors_observers_are_found_by_the_type(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's own, then those of the package torch_npu, then those of the module."""
    found = Accelerator("npu", SimpleNamespace())
    assert found.out_of_memory_observers() is None
    attach = object()
    vendor = SimpleNamespace(_C=SimpleNamespace(_npu_attach_out_of_memory_observer=attach))
    monkeypatch.setitem(sys.modules, "torch_npu", vendor)  # type: ignore[arg-type]
    assert found.out_of_memory_observers() is attach


def test_a_device_that_is_not_in_use_has_no_figures(
    parts: Parts, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(accelerator, "ready_device", lambda: None)
    parts.allocator.sample()
    assert parts.allocator.sample_tensors(Phase.FORWARD) is None
    assert parts.events() == []
    assert (allocator.allocated_bytes(), allocator.pinned_bytes()) == (-1, -1)


# ---- modes of the allocator ------------------------------------------------------------------------


def test_cudas_own_allocator_leaves_counters_at_zero(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are unknown. It refuses observers, and its figures come from the driver."""
    module: Any = Module()
    module.kind = "cudaMallocAsync"

    def refuse(_: Any) -> None:
        raise RuntimeError("cudaMallocAsync does not yet support attachOutOfMemoryObserver")

    monkeypatch.setattr(torch._C, "_cuda_attach_out_of_memory_observer", refuse, raising=False)
    module.is_current_stream_capturing = lambda: captures
    captures = True
    parts = Parts(tmp_path, monkeypatch, "cuda", module)
    assert parts.allocator.sample_tensors(Phase.FORWARD) is None
    assert allocator.allocated_bytes() == -1
    captures = False
    parts.allocator.sample()
    memory, _, peak = parts.events()
    assert memory[2:] == (1, 2, 3, -1)
    assert (peak.retries, peak.ooms, peak.capacity_bytes) == (-1, -1, 40)
    assert parts.allocator.kind == "cudaMallocAsync"


def test_without_a_cache_torch_counts_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its counters are 0, which is not what is allocated."""
    monkeypatch.setenv("PYTORCH_NO_CUDA_MEMORY_CACHING", "1")
    parts = Parts(tmp_path, monkeypatch, "cuda", Module())
    parts.allocator.sample()
    assert parts.events() == []
    assert (parts.allocator.kind, allocator.allocated_bytes()) == ("uncached", -1)


def test_an_allocator_that_is_plugged_in_is_asked_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []
    module: Any = Module()
    module.kind = "pluggable"

    def refuse(device: int) -> dict[str, Any]:
        asked.append(device)
        raise RuntimeError("CUDAPluggableAllocator does not yet support getDeviceStats.")

    module.memory_stats_as_nested_dict = refuse
    parts = Parts(tmp_path, monkeypatch, "cuda", module)
    parts.allocator.sample()
    parts.allocator.sample()
    assert (asked, parts.events(), parts.context.guard.errors) == ([2], [], 0)


def test_a_young_backend_tells_what_it_can(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's own interface of allocators, where the module has none; without it nothing is known."""
    module = SimpleNamespace(is_initialized=lambda: True, current_device=lambda: 0)
    parts = Parts(tmp_path, monkeypatch, "mine", module)
    ready = [False]
    monkeypatch.setattr(torch._C, "_accelerator_isAllocatorInitialized", lambda: ready[0], raising=False)
    monkeypatch.setattr(
        torch._C,
        "_accelerator_getDeviceStats",
        lambda _: {"allocated_bytes": STATS["allocated_bytes"]},
        raising=False,
    )

    def untold(_: int) -> tuple[int, int]:
        raise RuntimeError("getMemoryInfo is not implemented")

    monkeypatch.setattr(torch._C, "_accelerator_getMemoryInfo", untold, raising=False)
    parts.allocator.sample()
    assert parts.events() == []
    ready[0] = True
    parts.allocator.sample()
    memory, _, peak = parts.events()
    assert memory[2:] == (1, -1, -1, -1)
    assert (peak.retries, peak.free_bytes, peak.capacity_bytes) == (-1, -1, -1)
