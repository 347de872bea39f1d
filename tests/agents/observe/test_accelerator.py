"""The accelerator by its type, with a stand-in device module: nothing below says CUDA."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from virtual_device import VirtualDevice

from zeromon.ring.buffer import RingWriter
from zeromon_agents.hooks import c10d, process_groups
from zeromon_agents.observe import accelerator
from zeromon_agents.observe.accelerator import Accelerator
from zeromon_agents.observe.device_timer import DeviceTimer
from zeromon_agents.runtime.around import Patches
from zeromon_agents.runtime.guard import Guard
from zeromon_agents.runtime.hook_context import ON, HookContext


@pytest.fixture
def npu(monkeypatch: pytest.MonkeyPatch) -> VirtualDevice:
    """torch as it is with a backend of another vendor: the module is the virtual device."""
    device: Any = VirtualDevice()
    device.current_device = lambda: 3
    device.get_device_properties = lambda _: SimpleNamespace(name="an accelerator")
    found = SimpleNamespace(type="npu")
    monkeypatch.setattr(torch, "npu", device, raising=False)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: found)
    return device


def test_the_device_module_is_chosen_by_the_type(npu: VirtualDevice) -> None:
    found = accelerator.ready_device()
    assert found is not None and found.module is npu
    assert found.describe(3) == {"device": "npu:3", "device_name": "an accelerator", "device_uuid": ""}


def test_a_device_that_is_not_in_use_is_not_touched(
    npu: VirtualDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(npu, "is_initialized", lambda: False)
    assert accelerator.current_accelerator() is not None
    assert accelerator.ready_device() is None


def test_torch_without_an_accelerator_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """2.6 raises, later versions return None."""
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: None)
    assert accelerator.current_accelerator() is None

    def refuse() -> None:
        raise RuntimeError("Cannot access accelerator device when none is available.")

    monkeypatch.setattr(torch.accelerator, "current_accelerator", refuse)
    assert accelerator.current_accelerator() is None


def test_a_young_backend_has_no_graphs_and_torchs_own_events() -> None:
    found = Accelerator("openreg", SimpleNamespace(current_stream=lambda: None))
    assert found.Event is torch.Event
    assert not found.is_current_stream_capturing()
    assert not found.is_initialized()


def test_torchs_own_event_stays_as_it_is(tmp_path: Path) -> None:
    """It is a class in C: waits between streams are then not followed."""
    found = Accelerator("openreg", SimpleNamespace(current_stream=lambda: None))
    context, patches = HookContext(RingWriter(tmp_path / "r.ring", rank=0), Guard()), Patches()
    DeviceTimer(context, found).install(patches)
    assert patches.restore() == []
    assert torch.Event is found.Event


def test_the_timer_takes_the_accelerator_of_the_process(npu: VirtualDevice, tmp_path: Path) -> None:
    """And c10d's hooks take tensors of that type for device work."""
    context = HookContext(RingWriter(tmp_path / "r.ring", rank=0, capacity=64), Guard())
    context.mode = ON
    timer = DeviceTimer(context)
    assert timer.device_type == "npu"
    collectives = c10d.Collectives(context, timer)
    collectives.end_warm_up()
    pg = SimpleNamespace()
    group = c10d.Group(1, None, size=2, on_device=True, base=0)  # type: ignore[arg-type]
    group.seen_sequences, group.extras["allreduce"] = None, 0
    collectives.groups[id(pg)] = group
    issue = collectives._issue_hook(
        lambda *_: SimpleNamespace(), "allreduce", process_groups.PAYLOADS["allreduce"]
    )
    for device, events in (("npu", 1), ("cpu", 1), ("npu", 2)):
        issue(pg, Tensor(device), SimpleNamespace(asyncOp=True))
        assert npu.made == events


class Tensor(torch.Tensor):
    """A tensor that says of which type its device is."""

    def __new__(cls, device: str) -> Tensor:
        made = torch.empty(4).as_subclass(cls)
        made.__dict__["where"] = device
        return made

    @property
    def device(self) -> Any:
        return SimpleNamespace(type=self.__dict__["where"])

    @property
    def is_cpu(self) -> bool:
        return bool(self.__dict__["where"] == "cpu")
