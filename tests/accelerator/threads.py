"""A second accelerator: the device type ``threads``, whose streams are threads (see threads.cpp).

`python threads.py SCRIPT ...` runs a script with it as torch's accelerator, as a vendor's package would.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import runpy
import sys
import types
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.cpp_extension import load

NAME = "threads"


class Event:
    """An event of the device; a class of Python with the methods of ``torch.cuda.Event``."""

    def __init__(self, enable_timing: bool = False, **_: Any) -> None:
        self._event = torch.Event(device=torch.device(NAME, 0), enable_timing=True)

    def record(self, stream: Any = None) -> None:
        """Records the event in a stream, by default in the current one."""
        self._event.record(stream if stream is not None else current_stream())

    def wait(self, stream: Any = None) -> None:
        """Lets a stream wait for the event."""
        self._event.wait(stream if stream is not None else current_stream())

    def query(self) -> bool:
        """Whether the event has passed."""
        return self._event.query()

    def elapsed_time(self, end: Event) -> float:
        """Returns milliseconds."""
        return self._event.elapsed_time(end._event)

    def synchronize(self) -> None:
        """Lets the host wait."""
        self._event.synchronize()


class Stream(torch.Stream):
    """A stream of the device, whose waits pass through :class:`Event` as those of torch.cuda."""

    def __new__(cls, device: Any = None, priority: int = 0, **known: Any) -> Any:
        if known:
            return super().__new__(cls, **known)
        return super().__new__(cls, device=torch.device(NAME, 0), priority=priority)

    def record_event(self, event: Any = None) -> Event:
        """Records an event here."""
        event = event if event is not None else Event()
        event.record(self)
        return event

    def wait_event(self, event: Any) -> None:
        """Waits for an event."""
        event.wait(self)

    def wait_stream(self, stream: Any) -> None:
        """Waits for what another stream has been given."""
        self.wait_event(stream.record_event())


def current_stream(*_: Any) -> Stream:
    """Returns the stream that work goes to."""
    at = torch.accelerator.current_stream()
    return Stream(stream_id=at.stream_id, device_index=at.device_index, device_type=at.device_type)


def install() -> Any:
    """Registers the device and its module ``torch.threads``, and returns the compiled part."""
    torch.utils.rename_privateuse1_backend(NAME)
    source = str(Path(__file__).with_suffix(".cpp"))
    flags = ["-O0", "-DUSE_DISTRIBUTED", "-DUSE_C10D_GLOO"]
    compiled = load("zeromon_threads", [source], extra_cflags=flags)
    module: Any = types.ModuleType(f"torch.{NAME}")
    index = dict.fromkeys(("current_device", "_get_device_index"), lambda *_: 0)
    yes = dict.fromkeys(("is_available", "is_initialized"), lambda: True)
    nothing = dict.fromkeys(("set_device", "manual_seed_all", "set_rng_state"), lambda *_: None)
    vars(module).update(index | yes | nothing)
    vars(module).update(
        Stream=Stream,
        Event=Event,
        device_count=lambda: 1,
        current_stream=current_stream,
        stream=lambda stream: stream if stream is not None else contextlib.nullcontext(),
        synchronize=lambda *_: torch.accelerator.synchronize(),
        get_rng_state=lambda *_: torch.empty(0, dtype=torch.uint8),
        get_amp_supported_dtype=lambda: [torch.bfloat16],
        get_device_properties=lambda *_: types.SimpleNamespace(name="threads of the host"),
        memory_allocated=lambda *_: compiled.allocated(),
        _is_in_bad_fork=lambda: False,
    )
    torch._register_device_module(NAME, module)
    torch.utils.generate_methods_for_privateuse1_backend()
    dist.Backend.register_backend(NAME, _group(compiled), devices=[NAME])
    return compiled


def _group(compiled: Any) -> Any:
    def make(store: Any, rank: int, size: int, timeout: Any) -> Any:
        inner = dist.ProcessGroupGloo(dist.PrefixStore("inner", store), rank, size, timeout)
        return compiled.group(inner, rank, size)

    return make


if __name__ == "__main__":
    install()
    sys.argv = sys.argv[1:]
    runpy.run_path(sys.argv[0], run_name="__main__")
    atexit._run_exitfuncs()
    sys.stdout.flush()
    os._exit(0)  # threads of the streams are still there
