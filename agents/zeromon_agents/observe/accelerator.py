"""The accelerator of this process, whatever its type: CUDA, ROCm, XPU, NPU, any PrivateUse1 backend.

torch gives each type a device module (``torch.cuda``, ``torch.xpu``, ``torch.npu``) with the same
functions, of which a young backend may lack some. Nothing here initializes a device.
"""

import ctypes
import functools
import os
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from types import MethodDescriptorType
from typing import Any

import torch

NATIVE, ASYNC, UNCACHED = "native", "cudaMallocAsync", "uncached"
"""Allocators of torch: its caching one, CUDA's own, and none (``PYTORCH_NO_CUDA_MEMORY_CACHING``)."""
_UNCACHED = ("PYTORCH_NO_CUDA_MEMORY_CACHING", "PYTORCH_NO_HIP_MEMORY_CACHING")


class Accelerator:
    """A device type and its module. *module* is ``torch.cuda`` or has its interface."""

    def __init__(self, type: str, module: Any) -> None:
        self.type = type
        self.module = module
        self.Event: Any = getattr(module, "Event", torch.Event)
        base = self.Event.__base__
        is_in_c = isinstance(vars(base).get("record"), MethodDescriptorType)
        self.PlainEvent: Any = base if is_in_c else self.Event
        """The event in C that the other one wraps, whose methods enter no Python function."""
        # torch has 32 streams for each priority; a library may bring its own
        self._stream: Any = functools.lru_cache(256)(
            lambda number, index, kind: module.Stream(
                stream_id=number, device_index=index, device_type=kind
            )
        )
        captures = getattr(module, "is_current_stream_capturing", None)
        self.is_current_stream_capturing: Any = captures or (lambda: False)
        """Returns whether the current stream records a graph, in which no event may be used."""
        self._get_device = self._get_stream = None
        if hasattr(torch._C, f"_{type}_getDevice"):  # else torch puts stand-ins at the other names
            self._get_device = getattr(torch._C, f"_{type}_getDevice")
            self._get_stream = getattr(torch._C, f"_{type}_getCurrentStream", None)
            captures = getattr(torch._C, f"_{type}_isCurrentStreamCapturing", None)
            self.is_current_stream_capturing = captures or self.is_current_stream_capturing

    def current_stream(self, index: int | None = None) -> Any:
        """Returns the current stream of a device, by default of the current one.

        Only where the process uses the device already. The module's function enters 15 others.
        """
        if self._get_stream is None or self._get_device is None:
            return self.module.current_stream(index)
        return self._stream(*self._get_stream(self._get_device() if index is None else index))

    def is_initialized(self) -> bool:
        """Returns whether this process uses the device already.

        ``is_available()`` would initialize the driver, after which a forked process cannot use it.
        """
        query = getattr(self.module, "is_initialized", None)
        return bool(query()) if query is not None else False

    def describe(self, index: int) -> dict[str, str]:
        """Returns the metadata of a device: its place, name and UUID, "" where unknown."""
        get_properties = getattr(self.module, "get_device_properties", None)
        properties = get_properties(index) if get_properties is not None else None
        return {
            "device": f"{self.type}:{index}",
            "device_name": str(getattr(properties, "name", "")),
            "device_uuid": str(getattr(properties, "uuid", "")),
        }

    @functools.cached_property
    def memory_speed(self) -> float:
        """The bytes that the current device's memory moves in a second at most; 0 if unknown."""
        query = getattr(self.module, "get_device_properties", None)
        properties = query(self.module.current_device()) if query is not None else None
        kilohertz = getattr(properties, "memory_clock_rate", 0)  # torch before 2.8 lacks both
        return 2e3 * kilohertz * getattr(properties, "memory_bus_width", 0) / 8

    # ---- memory, for which the process must use the device already ------------------------------

    @functools.cached_property
    def allocator(self) -> str:
        """Returns what allocates memory on the device: :data:`NATIVE`, :data:`ASYNC`, ``pluggable``."""
        get_backend = getattr(self.module, "get_allocator_backend", None)
        backend = str(get_backend()) if get_backend is not None else NATIVE
        is_uncached = self.type == "cuda" and any(name in os.environ for name in _UNCACHED)
        return UNCACHED if backend == NATIVE and is_uncached else backend

    def memory_stats(self) -> Mapping[str, Any] | None:
        """Returns the allocator's counters as ``torch.cuda.memory_stats_as_nested_dict`` nests them."""
        get_stats = getattr(self.module, "memory_stats_as_nested_dict", None)
        if get_stats is not None:
            return get_stats(self.module.current_device()) or None
        get_device_stats = getattr(torch._C, "_accelerator_getDeviceStats", None)
        if get_device_stats is not None and torch._C._accelerator_isAllocatorInitialized():
            return dict(get_device_stats(self.module.current_device()))
        return None

    def memory_info(self) -> tuple[int, int]:
        """Returns the bytes that are free on the device and the bytes of it; -1 where unknown."""
        get_info = getattr(self.module, "mem_get_info", None)
        if get_info is None:
            get_info = getattr(torch._C, "_accelerator_getMemoryInfo", None)
        if get_info is None:
            return -1, -1
        with suppress(RuntimeError):  # an allocator of PrivateUse1 need not tell
            free, total = get_info(self.module.current_device())
            return int(free), int(total)
        return -1, -1

    def memory_fraction(self) -> float:
        """Returns the share of the device that ``set_per_process_memory_fraction`` leaves to us."""
        query = getattr(self.module, "get_per_process_memory_fraction", None)
        if query is None:
            query = getattr(torch._C, f"_{self.type}_getMemoryFraction", None)
        # cudaMallocAsync without a limit says 2**64 bytes over those of the device
        return min(1.0, float(query(self.module.current_device()))) if query is not None else 1.0

    def pinned_bytes(self) -> int:
        """Returns the bytes that torch's caching host allocator holds pinned; -1 where unknown."""
        get_stats = getattr(self.module, "host_memory_stats", None)
        return int(get_stats().get("allocated_bytes.current", -1)) if get_stats is not None else -1

    def out_of_memory_observers(self) -> Callable[..., None] | None:
        """Returns the function that attaches an observer of failed allocations; None without one."""
        name = f"_{self.type}_attach_out_of_memory_observer"
        vendor = getattr(sys.modules.get(f"torch_{self.type}"), "_C", None)  # torch_npu's own
        owners = ((torch._C, name), (vendor, name), (self.module, name.removeprefix(f"_{self.type}_")))
        attachers = (getattr(owner, attribute, None) for owner, attribute in owners)
        return next((attach for attach in attachers if attach is not None), None)


def current_accelerator() -> Accelerator | None:
    """Returns the accelerator that this torch was built for; None on a build for the CPU."""
    try:  # not suppress(), which enters three functions
        device = torch.accelerator.current_accelerator()
    except RuntimeError:  # torch 2.6 raises where later versions return None
        device = None
    if device is None or device.type == "cpu":
        return None
    module = getattr(torch, device.type, None)
    return _accelerator(device.type, module) if module is not None else None


_accelerator = functools.cache(Accelerator)


def is_capturing() -> bool:
    """Returns whether this thread's stream captures a graph: then no query to the device is allowed."""
    device = ready_device()
    return device is not None and bool(device.is_current_stream_capturing())


def known_index(device: Accelerator) -> int | None:
    """Returns the index of this rank's device as any thread knows it; None where none does.

    In CUDA each thread has a current device of its own. A process group may be bound to a device, and a
    process may see only one.
    """
    with suppress(RuntimeError, ValueError, AttributeError):
        bound = torch.distributed.distributed_c10d._get_default_group().bound_device_id
        if bound is not None and bound.type == device.type:
            return int(bound.index)
    return 0 if device.module.device_count() == 1 else None


def ready_device() -> Accelerator | None:
    """Returns the accelerator where this process uses it already, else None."""
    device = current_accelerator()
    return device if device is not None and device.is_initialized() else None


_RELAXED = 2
"""cudaStreamCaptureModeRelaxed, and HIP's."""
_CAPTURE_MODES = (
    ("libcuda.so.1", "cuThreadExchangeStreamCaptureMode"),
    ("libamdhip64.so", "hipThreadExchangeStreamCaptureMode"),
)


def leave_captures_alone(index: int | None = None) -> bool:
    """Lets the calling thread query the device while another thread captures a graph.

    In torch's default mode an event query of any other thread ends the capture, and the Flight Recorder
    queries the events of its collectives when it is read. NCCL does the same for its own threads. With
    *index* the thread takes that device, whose context the driver may want. Returns False while the
    driver is not in use: it is not loaded here.
    """
    device, done = ready_device(), False
    if device is None:
        return False
    if index is not None:
        device.module.set_device(index)
    for library, function in _CAPTURE_MODES:
        with suppress(OSError, AttributeError):
            exchange = getattr(ctypes.CDLL(library, mode=os.RTLD_NOLOAD), function)
            done = exchange(ctypes.byref(ctypes.c_int(_RELAXED))) == 0 or done
    return done
