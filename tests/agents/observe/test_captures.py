"""While a graph is captured nothing of the agent asks the device, on any thread; and whose device it is.

The Flight Recorder queries the events of collectives when it is read, cudaMemGetInfo and torch.profiler
call the driver. What a GPU says to it is row 7 of tests/gpu.
"""

from __future__ import annotations

import ctypes
import os
import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from virtual_device import VirtualDevice

from zeromon_agents.observe import accelerator, trace_capture
from zeromon_agents.observe.census import census_step
from zeromon_agents.runtime.agent import Agent
from zeromon_agents.runtime.guard import Guard
from zeromon_agents.runtime.hook_context import ON


class Driver:
    """The driver's library, which is loaded already; it keeps the modes that it is given."""

    def __init__(self, name: str, answer: int = 0) -> None:
        self.name, self.answer = name, answer
        self.modes: list[int] = []
        setattr(self, accelerator._CAPTURE_MODES[0][1], self.exchange)

    def exchange(self, mode: Any) -> int:
        self.modes.append(mode._obj.value)
        return self.answer


@pytest.mark.parametrize("answer", [0, 3])
def test_a_thread_of_the_agent_exchanges_its_capture_mode(
    device: Any, monkeypatch: pytest.MonkeyPatch, answer: int
) -> None:
    """3: the driver is not initialized yet, and the next heartbeat tries again."""
    driver = Driver("libcuda.so.1", answer)

    def load(name: str, mode: int) -> Driver:
        assert mode == os.RTLD_NOLOAD, "a process without a GPU must not load the driver"
        if name != driver.name:
            raise OSError
        return driver

    monkeypatch.setattr(ctypes, "CDLL", load)
    taken: list[int] = []
    device.set_device = taken.append
    assert accelerator.leave_captures_alone() is (answer == 0)
    assert accelerator.leave_captures_alone(1) is (answer == 0)
    assert (driver.modes, taken) == ([accelerator._RELAXED] * 2, [1])


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> VirtualDevice:
    """Two devices of a type; the training thread uses the second, other threads the first."""
    found: Any = VirtualDevice()
    main = threading.main_thread()
    found.current_device = lambda: int(threading.current_thread() is main)
    found.device_count = lambda: 2
    found.get_device_properties = lambda index: SimpleNamespace(name=f"number {index}")
    monkeypatch.setattr(torch, "npu", found, raising=False)
    known = SimpleNamespace(type="npu")
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: known)
    return found  # type: ignore[no-any-return]


def agent(written: list[Any], **more: Any) -> Any:
    context = SimpleNamespace(
        add_metadata=lambda **facts: written.append(facts["device"]), mode=ON, steps_before=0, step=1
    )
    return SimpleNamespace(_device_index=None, context=context, **more)


def test_the_device_of_a_rank_is_that_of_its_training_thread(
    device: VirtualDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The heartbeat says nothing of it unless the process group, or the only device, does."""
    written: list[str] = []
    one = agent(written)

    def heartbeat() -> None:
        thread = threading.Thread(
            target=Agent._write_device_metadata, args=(one,), kwargs={"training": False}
        )
        thread.start()
        thread.join()

    heartbeat()
    assert written == []
    Agent._write_device_metadata(one, training=True)
    assert written == ["npu:1"]
    bound = SimpleNamespace(bound_device_id=SimpleNamespace(type="npu", index=1))
    c10d = torch.distributed.distributed_c10d
    monkeypatch.setattr(c10d, "_get_default_group", lambda: bound)
    one._device_index = None
    heartbeat()
    assert written == ["npu:1"] * 2
    monkeypatch.undo()


def test_the_end_of_a_step_in_a_capture_asks_nothing_of_the_device(device: VirtualDevice) -> None:
    """A graph of a whole step contains the optimizer: it is counted, not sampled, and has no census."""
    called: list[str] = []
    one = agent(
        [],
        guard=Guard(),
        _count=lambda _: called.append("count"),
        _look=lambda _: called.append("look"),
        _sampling=(lambda: called.append("sample"),),
        _sampling_device=(lambda: called.append("device"),),
        _census_of=0,
        census=SimpleNamespace(take=lambda: called.append("census")),
        models=SimpleNamespace(register_optimizer=lambda _: None),
        scalars=SimpleNamespace(optimizer_steps=lambda _: None),
        collectives=SimpleNamespace(end_warm_up=lambda: None),
    )
    assert census_step(2)
    with device.graph():
        Agent._before_step_mark(one, 2)
        Agent._optimizer_begins(one, None)
    assert called == ["count"]
    Agent._optimizer_begins(one, None)
    Agent._before_step_mark(one, 2)
    assert called == ["count", "census", "count", "look", "sample", "device"]


def test_what_seldom_changes_is_looked_for_in_the_first_steps_and_then_by_the_clock() -> None:
    """A model or an optimizer that is new is described at once."""
    steps: list[int] = []
    one: Any = SimpleNamespace(
        guard=Guard(), backends=SimpleNamespace(looks=(lambda: 1 / 0,)),
        models=SimpleNamespace(changed=False), _describing=steps.append, _looks_from_ns=0,
    )  # fmt: skip
    for step in (1, 20, 21, 22):
        Agent._look(one, step)
    assert steps == [1, 20]
    one.models.changed = True
    Agent._look(one, 23)
    one.models.changed, one._looks_from_ns = False, 1
    Agent._look(one, 24)
    Agent._look(one, 25)
    assert steps == [1, 20, 23, 24]
    assert one.guard.errors == 4, "the failure of a look keeps nothing else back"


def test_the_device_is_met_at_the_first_backward_that_is_watched(device: VirtualDevice) -> None:
    """Also where the agent was attached after many steps; later, at the end of a step."""
    sampled: list[int] = []
    one = agent(
        [],
        allocator=SimpleNamespace(kind="", sample_tensors=lambda _: sampled.append(1)),
        _write_device_metadata=lambda training: None,
    )
    one.context.step = one.context.steps_before = 70
    Agent._backward_begins(one)
    one.context.step = 71
    Agent._backward_begins(one)
    assert len(sampled) == 1
    one.allocator.kind = "native"
    Agent._backward_begins(one)
    assert len(sampled) == 2


def test_a_trace_begins_after_the_capture(device: VirtualDevice) -> None:
    begun: list[int] = []
    one: Any = SimpleNamespace(
        _request=SimpleNamespace(first=5), _profile=None, _withdrawn=False, _start=begun.append
    )
    with device.graph():
        trace_capture.Capture._boundary(one, 5)
    assert begun == []
    trace_capture.Capture._boundary(one, 5)
    assert len(begun) == 1
