"""The accelerator of this process, whatever its type: CUDA, ROCm, XPU, NPU, any PrivateUse1 backend.

torch gives each type a device module (``torch.cuda``, ``torch.xpu``, ``torch.npu``) with the same
functions, of which a young backend may lack some. Nothing here initializes a device.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import torch


class Accelerator:
    """A device type and its module. *module* is ``torch.cuda`` or has its interface."""

    def __init__(self, type: str, module: Any) -> None:
        self.type = type
        self.module = module
        self.Event: Any = getattr(module, "Event", torch.Event)
        self.current_stream: Any = getattr(module, "current_stream", None)
        self.is_current_stream_capturing: Any = getattr(
            module, "is_current_stream_capturing", _no_graphs
        )
        """Whether the current stream records a graph, in which no event may be used."""

    def is_initialized(self) -> bool:
        """Whether this process uses the device already.

        ``is_available()`` would initialize the driver, after which a forked process cannot use it.
        """
        known = getattr(self.module, "is_initialized", None)
        return bool(known()) if known is not None else False

    def describe(self) -> dict[str, str]:
        """Returns the metadata of the current device: its place, name and UUID, "" where unknown."""
        index = self.module.current_device()
        read = getattr(self.module, "get_device_properties", None)
        properties = read(index) if read is not None else None
        return {
            "device": f"{self.type}:{index}",
            "device_name": str(getattr(properties, "name", "")),
            "device_uuid": str(getattr(properties, "uuid", "")),
        }


def _no_graphs() -> bool:
    return False


def current() -> Accelerator | None:
    """Returns the accelerator that this torch was built for; None on a build for the CPU."""
    found = None
    with suppress(RuntimeError):  # torch 2.6 raises where later versions return None
        found = torch.accelerator.current_accelerator()
    if found is None or found.type == "cpu":
        return None
    module = getattr(torch, found.type, None)
    return Accelerator(found.type, module) if module is not None else None


def ready() -> Accelerator | None:
    """Returns the accelerator where this process uses it already, else None."""
    found = current()
    return found if found is not None and found.is_initialized() else None
