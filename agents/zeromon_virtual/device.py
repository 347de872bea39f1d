"""The device type ``virtual`` of torch: its streams and events are those of a :class:`Clock`.

torch lets one out-of-tree device (PrivateUse1) be implemented in Python. Frameworks reach a device by
its module, here ``torch.virtual``, and so run unchanged. Tensors are fake: they have no data.
"""

from contextlib import AbstractContextManager
from typing import Any, TypeAlias

import torch
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

from zeromon_virtual.clock import Clock, Event, Stream

NAME = "virtual"

AnyStream: TypeAlias = Stream
"""The class has a method of the name."""


class VirtualDevice:
    """The module ``torch.virtual``: the functions that torch and frameworks call on ``torch.cuda``."""

    def __init__(self) -> None:
        self.__name__ = f"torch.{NAME}"
        self.clock = Clock()

    # ---- streams and events, under the names that torch.cuda gives them -------------------------

    def Stream(self, device: Any = None, priority: int = 0) -> AnyStream:  # noqa: N802
        """Returns a new stream."""
        return self.clock.stream()

    @property
    def Event(self) -> type[Event]:  # noqa: N802
        """The class of events, one for each clock."""
        return self.clock.Event

    def current_stream(self, device: Any = None) -> AnyStream:
        """Returns the stream that work goes to."""
        return self.clock.current

    def default_stream(self, device: Any = None) -> AnyStream:
        """Returns the stream in which the model computes."""
        return self.clock.compute

    def stream(self, stream: AnyStream | None) -> AbstractContextManager[None]:
        """Returns a context in which *stream* is the current one."""
        return self.clock.on(stream)

    def synchronize(self, device: Any = None) -> None:
        """Lets the host wait for the compute stream."""
        self.clock.synchronize()

    def is_current_stream_capturing(self) -> bool:
        """Whether a graph is captured: never."""
        return False

    # ---- what torch asks of every device ----------------------------------------------------------

    def is_initialized(self) -> bool:
        """Whether the device can be used."""
        return True

    def is_available(self) -> bool:
        """Whether there is a device."""
        return True

    def current_device(self) -> int:
        """Returns the index of the device."""
        return 0

    def device_count(self) -> int:
        """Returns how many devices this process sees."""
        return 1

    def set_device(self, device: Any) -> None:
        """Selects a device: there is one."""

    def manual_seed_all(self, seed: int) -> None:
        """Seeds nothing: there are no random numbers, as tensors have no data."""

    def get_rng_state(self, device: Any = None) -> Any:
        """Returns a state that nothing depends on."""
        return torch.empty(0, dtype=torch.uint8, device="cpu")

    def set_rng_state(self, state: Any, device: Any = None) -> None:
        """Does nothing."""

    def get_amp_supported_dtype(self) -> list[Any]:
        """Returns the dtypes of torch.autocast; activation checkpointing asks for them."""
        return [torch.bfloat16, torch.float16]

    def _is_in_bad_fork(self) -> bool:
        return False


def install() -> VirtualDevice:
    """Returns ``torch.virtual``, registered at the first call; torch cannot remove a device again."""
    found: VirtualDevice | None = getattr(torch, NAME, None)
    if found is None:
        found = VirtualDevice()
        _setup_privateuseone_for_python_backend(NAME, found)
    return found
