"""The allocator's figures as they are written; on figures of our own, since there is no CUDA here."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from zeromon.ring.buffer import RingReader, RingWriter
from zeromon.ring.events import MemoryPeak, MemorySample, decode
from zeromon_agents.observe import allocator
from zeromon_agents.runtime.guard import Guard
from zeromon_agents.runtime.hook_context import ON, HookContext

STATS: dict[str, Any] = {
    name: {"all": {"current": n}} for n, name in enumerate(allocator._WRITTEN, 1)
} | {"num_alloc_retries": 7, "num_ooms": 1}


@pytest.fixture
def parts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> tuple[allocator.Allocator, RingReader, list[str]]:
    """The allocator, its record, and the calls that went to the driver."""
    driver: list[str] = []

    def mem_get_info(_: int) -> tuple[int, int]:
        driver.append("mem_get_info")
        return 5, 80

    monkeypatch.setattr(allocator, "cuda_ready", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "mem_get_info", mem_get_info)
    monkeypatch.setattr(torch._C, "_cuda_memoryStats", lambda _: STATS, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_attach_out_of_memory_observer", None, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_getMemoryFraction", lambda _: 0.5, raising=False)
    ring = RingWriter(tmp_path / "r.ring", rank=0, capacity=64)
    context = HookContext(ring, Guard())
    context.mode = ON
    return allocator.Allocator(context), RingReader(ring.path), driver


def test_at_the_end_of_a_step_the_device_is_asked_too(parts: Any) -> None:
    """The first time for its capacity, then on detailed steps only."""
    one, reader, driver = parts
    one.sample()
    memory, peak = (decode(raw) for raw in reader.read())
    assert isinstance(memory, MemorySample) and isinstance(peak, MemoryPeak)
    assert memory[2:] == (1, 2, 3, 4)
    assert (peak.retries, peak.ooms, peak.free_bytes, peak.capacity_bytes) == (7, 1, 5, 40)
    one.sample()
    assert driver == ["mem_get_info"]


def test_before_backward_nothing_calls_the_driver(parts: Any) -> None:
    """A graph may be under capture: even the first time."""
    one, reader, driver = parts
    one.sample_tensors()
    assert [type(decode(raw)) for raw in reader.read()] == [MemorySample]
    assert driver == []


def test_without_cuda_nothing_is_written(parts: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    one, reader, _ = parts
    monkeypatch.setattr(allocator, "cuda_ready", lambda: False)
    one.sample()
    assert one.sample_tensors() is None
    assert reader.read() == []
