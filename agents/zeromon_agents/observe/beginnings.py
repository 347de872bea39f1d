"""What ranks begin with and should have equal or different: parameters and batches, as checksums.

Only tensors on the CPU are read, of each a bounded sample, and only before the first steps. Nothing is
sent: the collector compares the checksums of the ranks.
"""

import zlib
from array import array
from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Any

import torch

from zeromon.ring.model_metadata import ProcessMetadata
from zeromon_agents.runtime.hook_context import HookContext

_BATCHES = 3
_MOST_TRIES = 64
_MOST_TENSORS = 64
_MOST_NUMBERS = 1024


def checksum(tensors: list[Any], most: int = _MOST_NUMBERS) -> int | None:
    """Returns a checksum of about *most* numbers, spread over *tensors*; None where one is elsewhere."""
    if not tensors or not all(map(_is_here, tensors)):
        return None
    every = max(1, -(-len(tensors) // _MOST_TENSORS))
    chosen = tensors[::every]
    each, found = max(1, most // len(chosen)), 0
    for tensor in chosen:
        flat = (
            tensor.detach().reshape(-1)
            if tensor.is_contiguous()
            else tensor.detach()[:1].reshape(-1)
        )
        some = flat[:: max(1, -(-flat.numel() // each))]
        found = zlib.crc32(array("d", some.to(torch.float64).tolist()).tobytes(), found)
    return found


def _is_here(tensor: Any) -> bool:
    """Whether *tensor* is a plain one on the CPU with numbers in it."""
    return (
        type(tensor) in (torch.Tensor, torch.nn.Parameter)
        and tensor.device.type == "cpu"
        and tensor.layout is torch.strided
        and not (tensor.is_complex() or tensor.is_quantized or tensor.is_nested)
    )


class Beginnings:
    """The checksums of the initial parameters, and of the first batches that the rank trains on."""

    def __init__(self, context: HookContext) -> None:
        self._context = context
        self._batches: list[int] = []
        self._newest: int | None = None
        self._tries = 0
        self.read_parameters = context.guard.guarded(self._read_parameters)

    def _read_parameters(self, optimizer: Any) -> None:
        """Writes the checksum of *optimizer*'s parameters, unless they are shards or on a device."""
        params = [p for group in optimizer.param_groups for p in group["params"]]
        if all(type(p) is torch.nn.Parameter and not hasattr(p, "ds_id") for p in params):
            mark = checksum(params)
            if mark is not None:
                nbytes = sum(p.numel() * p.element_size() for p in params)
                known: ProcessMetadata = {"params_mark": mark, "params_bytes": nbytes}
                self._context.add_metadata(initial=known)

    def batch_arrived(self, batch: Any) -> None:
        """Keeps the checksum of a batch that came from a DataLoader."""
        if len(self._batches) < _BATCHES and self._tries < _MOST_TRIES:
            self._tries += 1
            tensors = [t for t in islice(_tensors(batch), _MOST_TENSORS) if t.numel()]
            self._newest = checksum(tensors)

    def batch_trained(self) -> None:
        """A backward begins: the newest batch is one of training, and not of an evaluation."""
        if self._newest is not None and len(self._batches) < _BATCHES:
            self._batches.append(self._newest)
            if len(self._batches) == _BATCHES:
                self._context.add_metadata(batches=self._batches)
        self._newest = None


def _tensors(batch: Any) -> Iterator[Any]:
    if isinstance(batch, torch.Tensor):
        yield batch
    elif isinstance(batch, Mapping):
        for value in batch.values():
            yield from _tensors(value)
    elif isinstance(batch, (list, tuple)):
        for value in batch:
            yield from _tensors(value)
