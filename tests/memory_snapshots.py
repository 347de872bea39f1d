"""Snapshots of torch's CUDA allocator, as `torch.cuda.memory._dump_snapshot` writes them, of any size.

They follow a model that trains: what lives when, and for what, is known. `pickle.dump` would need all
events in memory; this writes the same bytes piece by piece (a test holds the two together).
"""

from __future__ import annotations

import pickle
import struct
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO

BATCH = 1000
"""Items that pickle appends at once."""
Frame = dict[str, Any]
Event = dict[str, Any]


class Writer:
    """Writes plain data as the pickler of CPython does, protocol 4; lists may be iterators."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._frame = bytearray()
        self._known: dict[int, tuple[bytes, Any]] = {}
        self._lists: list[int] = []
        self._count = 0

    def dump(self, content: Any) -> None:
        self._file.write(b"\x80\x04")
        self._save(content)
        self._frame += b"."
        self._flush()

    def _flush(self) -> None:
        if len(self._frame) >= 4:
            self._file.write(b"\x95" + struct.pack("<Q", len(self._frame)))
        self._file.write(self._frame)
        self._frame.clear()

    def _save(self, value: Any, *, keep: bool = True) -> None:
        if len(self._frame) >= 64 << 10:
            self._flush()
        frame = self._frame
        if id(value) in self._known and not isinstance(value, int | None):
            frame += self._known[id(value)][0]
        elif value is None or isinstance(value, int | float):
            # a frame of its own length, and no memo: as pickle has it
            frame += pickle.dumps(value, 3)[2:-1]
        elif isinstance(value, str):
            data = value.encode()
            short = len(data) < 256
            frame += b"\x8c" + bytes((len(data),)) if short else b"X" + struct.pack("<I", len(data))
            frame += data
            self._memoize(value, keep)
        elif isinstance(value, tuple):
            for item in value:
                self._save(item)
            frame += {0: b")", 1: b"\x85", 2: b"\x86", 3: b"\x87"}[len(value)]
            self._memoize(value, keep)
        elif isinstance(value, dict):
            frame += b"}"
            self._memoize(value, keep)
            self._pairs(list(value.items()))
        else:
            frame += b"]"
            self._memoize(value, keep)
            self._items(value) if isinstance(value, list) else self._many(value)

    def _memoize(self, value: Any, keep: bool) -> None:
        self._frame += b"\x94"
        if keep:
            index = self._count
            get = bytes((0x68, index)) if index < 256 else b"j" + struct.pack("<I", index)
            self._known[id(value)] = get, value
            if isinstance(value, list):
                self._lists.append(id(value))
        self._count += 1

    def _pairs(self, pairs: list[tuple[Any, Any]]) -> None:
        if pairs:
            self._frame += b"(" * (len(pairs) > 1)
            for pair in pairs:
                for value in pair:
                    self._save(value)
            self._frame += b"u" if len(pairs) > 1 else b"s"

    def _items(self, items: list[Any]) -> None:
        if len(items) > 1 and isinstance(items[0], dict) and "line" in items[0]:
            with suppress(KeyError):  # a stack of known frames, at once
                known = [self._known[id(item)][0] for item in items]
                self._frame += b"(" + b"".join(known) + b"e"
                return
        if len(items) == 1:
            self._save(items[0])
            self._frame += b"a"
            return
        for begin in range(0, len(items), BATCH):
            self._batch(items[begin : begin + BATCH], keep=True)

    def _many(self, items: Iterator[Any]) -> None:
        """The same for two items or more that are made now, and of which none comes again."""
        while batch := list(islice(items, BATCH)):
            self._batch(batch, keep=False)
            for one in self._lists[: -2 * BATCH]:
                del self._known[one]
            del self._lists[: -2 * BATCH]

    def _batch(self, items: list[Any], *, keep: bool) -> None:
        self._frame += b"("
        for item in items:
            self._save(item, keep=keep)
        self._frame += b"e"


ROOT = "/usr/lib/python3.12/site-packages/"
MIB = 1 << 20


def frames(*places: str) -> list[Frame]:
    """``file:line:function``, the innermost first; the same dictionary for the same place."""
    if places not in _STACKS:
        for place in set(places) - set(_FRAMES):
            _FRAMES[place] = _frame(place)
        _STACKS[places] = [_FRAMES[place] for place in places]
    return list(_STACKS[places])


def _frame(place: str) -> Frame:
    file, line, name = place.split(":", 2)
    path = ROOT + file if file.startswith("torch/") else file
    return {"name": name, "filename": path, "line": int(line)}


_FRAMES: dict[str, Frame] = {}
_STACKS: dict[tuple[str, ...], list[Frame]] = {}
_CPP = tuple(
    f"??:0:{name}"
    for name in (
        "c10::cuda::CUDACachingAllocator::Native::DeviceCachingAllocator::malloc",
        "c10::StorageImpl::StorageImpl", "at::detail::empty_cuda", "at::native::empty_cuda",
        "c10::impl::wrap_kernel_functor_unboxed_", "at::_ops::empty_memory_format::redispatch",
    )
)  # fmt: skip
_MAIN = ("train.py:120:main", "train.py:140:<module>")
_CALL = (
    "torch/nn/modules/module.py:1787:_call_impl",
    "torch/nn/modules/module.py:1776:_wrapped_call_impl",
)
_STEP = ("torch/optim/optimizer.py:517:wrapper", *_MAIN)
_ADAM = ("torch/optim/adam.py:617:_multi_tensor_adam", *_STEP)
_FSDP = "torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py"
_GATHER = (f"{_FSDP}:181:foreach_all_gather", *_CALL, *_MAIN)
_ENGINE = tuple(
    f"??:0:{name}"
    for name in (
        "MmBackward0::apply", "torch::autograd::Node::operator()",
        "torch::autograd::Engine::evaluate_function", "torch::autograd::Engine::thread_main",
    )
)  # fmt: skip


@dataclass
class Training:
    """A model of *layers* that trains for *steps*: parameters and gradients of 2 MiB a layer and so on.

    ``live`` is what is allocated now: address -> (role, bytes); ``peak`` the roles when most was.
    """

    layers: int = 4
    steps: int = 3
    deep: int = 0
    """More frames of C++ on top of each stack."""
    live: dict[int, tuple[str, int, list[Frame]]] = field(default_factory=dict)
    peak: dict[str, int] = field(default_factory=dict)
    events: int = 0
    _free: dict[int, list[int]] = field(default_factory=dict)
    _next: int = 0x7F5400000000
    _newest: int = 0
    _now: int = 0
    _most: int = 0
    segments: list[tuple[int, int]] = field(default_factory=list)

    def run(self) -> Iterator[Event]:
        """All events, oldest first."""
        layers = range(self.layers)
        for n in layers:
            yield from self._alloc("parameters", 2 * MIB, n, "torch/nn/modules/module.py:1355:convert",
                                   "torch/nn/modules/module.py:942:_apply", *_MAIN)  # fmt: skip
        for step in range(self.steps):
            held = []
            for n in layers:
                gathered = yield from self._kept("communication buffers", 4 * MIB, n, *_GATHER)
                kept = yield from self._kept("activations", 6 * MIB, n, *self._forward(n))
                scratch = yield from self._kept("temporary", 3 * MIB, n, *self._forward(n))
                yield from self._freed(scratch, *self._forward(n))
                yield from self._freed(gathered, *_CALL, *_MAIN)
                held.append(kept)
            gradients = []
            for n in reversed(layers):
                yield from self._alloc("gradients", 8 * MIB, n, *_CPP, *_ENGINE)
                gradients.append(self._newest)
                scratch = yield from self._kept("temporary", MIB, n, *_CPP, *_ENGINE)
                yield from self._freed(scratch, *_ENGINE)
                yield from self._freed(held.pop(), *_ENGINE)
            for n in layers:
                if step == 0:
                    yield from self._alloc("optimizer state", 4 * MIB, n,
                                           "torch/optim/adamw.py:185:_init_group", *_STEP)  # fmt: skip
                scratch = yield from self._kept("temporary", MIB, n, *_ADAM)
                yield from self._freed(scratch, *_STEP)
            for address in gradients:
                yield from self._freed(address, "torch/optim/optimizer.py:1030:zero_grad", *_MAIN)

    def __post_init__(self) -> None:
        self._own = tuple(f"??:0:c10::inner::{n}" for n in range(self.deep))

    def _forward(self, layer: int) -> tuple[str, ...]:
        return (*_CPP, "torch/nn/modules/linear.py:134:forward", *_CALL,
                f"model.py:{40 + layer}:forward", *_CALL, *_MAIN)  # fmt: skip

    def _kept(self, role: str, size: int, n: int, *places: str) -> Any:
        yield from self._alloc(role, size, n, *places)
        return self._newest

    def _alloc(self, role: str, size: int, n: int, *places: str) -> Iterator[Event]:
        size -= n  # what is asked for is less than what is given
        waiting = self._free.setdefault(-(-size // MIB), [])
        stack = frames(*self._own, *places)
        if waiting:
            address = waiting.pop()
        else:
            address, given = self._next, -(-size // (2 * MIB)) * 2 * MIB
            self._next += given
            self.segments.append((address, given))
            yield self._event("segment_alloc", address, given, stack)
        self.live[address] = role, size, stack
        self._newest = address
        yield self._event("alloc", address, size, stack)
        self._now += size
        if self._now > self._most:
            self._most, self.peak = self._now, {}
            for of, nbytes, _ in self.live.values():
                self.peak[of] = self.peak.get(of, 0) + nbytes

    def _freed(self, address: int, *places: str) -> Iterator[Event]:
        _, size, _ = self.live.pop(address)
        self._now -= size
        stack = frames(*self._own, *places)
        yield self._event("free_requested", address, size, stack)
        yield self._event("free_completed", address, size, stack)
        self._free.setdefault(-(-size // MIB), []).append(address)

    def _event(self, action: str, address: int, size: int, stack: list[Frame]) -> Event:
        self.events += 1
        return {"action": action, "addr": address, "size": size, "stream": 0,
                "time_us": 1_795_000_000_000_000 + 11 * self.events, "compile_context": "N/A",
                "user_metadata": "", "frames": stack}  # fmt: skip

    def held(self) -> list[dict[str, Any]]:
        """The segments at the end."""
        found = []
        for address, given in self.segments:
            role, size, stack = self.live.get(address, ("", 0, []))
            state = "active_allocated" if role else "inactive"
            found.append({
                "device": 0, "address": address, "total_size": given,
                "allocated_size": given if role else 0, "active_size": given if role else 0,
                "requested_size": size, "stream": 0, "segment_type": "large",
                "segment_pool_id": (0, 0), "is_expandable": False, "frames": [],
                "blocks": [{"address": address, "size": given, "requested_size": size,
                            "state": state, "frames": stack}],
            })  # fmt: skip
        return found


def snapshot(training: Training, trace: Any) -> dict[str, Any]:
    """The content of a file; the segments are those of the end of *training*, which must have run."""
    return {
        "segments": training.held(), "device_traces": [trace],
        "allocator_settings": {"PYTORCH_CUDA_ALLOC_CONF": "", "max_split_size": -1,
                               "garbage_collection_threshold": 0.0, "expandable_segments": False},
        "external_annotations": [],
    }  # fmt: skip


def write(path: Path, training: Training) -> Training:
    """Writes the snapshot of a whole *training*, of which only the state at the end is kept."""
    for _ in (ended := replace(training, live={}, peak={}, segments=[], _free={})).run():
        pass
    with path.open("wb") as file:
        Writer(file).dump(snapshot(ended, training.run()))
    return training
