"""Adapts torch.distributed to ranks that do not run: VGPU_RANKS names those that do.

A communicator gets a tag with the global ranks of its members, where NCCL's configuration names a
network. Groups of gloo connect to nobody: their collectives go through libnccl, on the host.
"""

from __future__ import annotations

import bisect
import copy
import ctypes
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

ALL_REDUCE, ALL_GATHER, REDUCE_SCATTER, BROADCAST, REDUCE, ALL_TO_ALL, GATHER, SCATTER = range(8)
"""Numbers of nccl::Function, and the two that the host has besides."""
DTYPES = (
    "int8",
    "uint8",
    "int32",
    "uint32",
    "int64",
    "uint64",
    "float16",
    "float32",
    "float64",
    "bfloat16",
)
REDUCTIONS = ("SUM", "PRODUCT", "MAX", "MIN", "AVG")
"""Names in the order of NCCL's numbers."""
SETTINGS = {"TORCH_NCCL_BCAST_UNIQUEID": "0", "TORCH_NCCL_RANKS_PER_ROOT": str(1 << 30)}
"""torch then waits for no identifier, which an absent first rank would make; the tag stands for it."""


def running_ranks() -> list[int]:
    """Global ranks that run, sorted; empty where all do."""
    return sorted(int(rank) for rank in os.environ.get("VGPU_RANKS", "").split(",") if rank)


def group_tag(name: str, ranks: Sequence[int]) -> str:
    """Returns the name from which the library reads the members of a group."""
    return f"vgpu {name} {','.join(map(str, ranks))}"


def wrap(owner: Any, name: str, wrapper: Callable[..., Any]) -> None:
    """Makes *wrapper*, which gets the method that it replaces first, a method of *owner*."""
    original = getattr(owner, name, None)
    if original is not None:
        setattr(owner, name, lambda *args, **options: wrapper(original, *args, **options))


def start_store(
    original: Any, store: Any, host_name: str, port: int, world_size: int | None = None,
    is_master: bool = False, *args: Any, **options: Any,
) -> None:  # fmt: skip
    """A store of the world waits for the ranks that run; the first of them hosts it."""
    ranks = running_ranks()
    if world_size == int(os.environ.get("WORLD_SIZE", -1)):
        world_size = len(ranks)
        has_agent_store = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        is_master = is_master or (not has_agent_store and int(os.environ["RANK"]) == ranks[0])
    original(store, host_name, port, world_size, is_master, *args, **options)


def wait_for_running(original: Any, rank: int, store: Any, name: str, count: int, *args: Any) -> None:
    """A barrier of the store has no absent rank; one of a part of the world does not wait."""
    if count == int(os.environ["WORLD_SIZE"]):
        original(rank, store, name, len(running_ranks()), *args)


class Adapter:
    """The changes of torch.distributed, on the library *nccl*."""

    def __init__(self, torch: Any, nccl: ctypes.CDLL) -> None:
        self.torch, self.nccl, self.c10d = torch, nccl, torch.distributed.distributed_c10d
        group = self.c10d.ProcessGroup
        wrap(torch.distributed.TCPStore, "__init__", start_store)
        wrap(self.c10d, "_store_based_barrier", wait_for_running)
        wrap(self.c10d.ProcessGroupNCCL, "__init__", self.start_nccl)
        wrap(self.c10d.ProcessGroupGloo, "__init__", self.start_gloo)
        wrap(group, "split_group", self.split_group)
        wrap(group, "barrier", self.barrier)
        for name, method in self.host_methods().items():
            wrap(group, name, self.on_host(method))
        wrap(group, "send", self.transfer)
        wrap(group, "recv", self.transfer)
        wrap(group, "gather", self.gather)

    def start_nccl(
        self, original: Any, backend: Any, store: Any, rank: int, size: int, options: Any = None,
        timeout: Any = None,
    ) -> None:  # fmt: skip
        """Tags the communicators of a backend."""
        kind = self.c10d.ProcessGroupNCCL.Options
        tagged = copy.deepcopy(options) if isinstance(options, kind) else kind()
        if not isinstance(options, kind):
            tagged._timeout = options or timeout or self.c10d.default_pg_timeout
        ranks = tagged.global_ranks_in_group or range(size)
        tagged.config.net_name = group_tag(tagged.group_name, ranks)
        original(backend, store, rank, size, tagged)

    def start_gloo(
        self, original: Any, backend: Any, store: Any, rank: int, size: int, *args: Any, **options: Any
    ) -> None:
        """Connects a backend to nobody."""
        own_store = self.c10d.PrefixStore(f"alone-{rank}/", store)
        original(backend, own_store, 0, 1, *args, **options)

    def split_group(self, original: Any, parent: Any, ranks: Sequence[int], **options: Any) -> Any:
        """Tags a group that is split off, and gives it a backend of gloo if its parent has one."""
        world, cpu = self.c10d.get_process_group_ranks(parent), self.torch.device("cpu")
        cuda = self.torch.device("cuda", self.torch.cuda.current_device())
        opts = copy.deepcopy(options.get("opts") or parent._get_backend(cuda).options)
        opts.config.net_name = group_tag(options["group_name"], [world[rank] for rank in ranks])
        types = [self.torch.device("cuda")]
        subgroup = original(parent, ranks, **{**options, "opts": opts, "device_types": types})
        if subgroup is not None and cpu in parent._device_types:
            lone = self.c10d.ProcessGroupGloo(
                subgroup.get_group_store(), subgroup.rank(), subgroup.size()
            )
            subgroup._register_backend(cpu, self.c10d.ProcessGroup.BackendType.GLOO, lone)
            subgroup._set_group_name(options["group_name"])
        return subgroup

    def transfer(self, original: Any, group: Any, tensors: Any, peer: int, tag: int) -> Any:
        """Says which pair a communicator of two ranks is for."""
        if self.is_gloo(group, tensors):
            raise NotImplementedError(
                "send and recv by gloo have no model where VGPU_RANKS is set: use nccl"
            )
        pair = sorted((group.rank(), peer))
        self.nccl.vgpu_next_pair(*pair)
        try:
            return original(group, tensors, peer, tag)
        finally:
            self.nccl.vgpu_next_pair(-1, -1)

    def gather(self, original: Any, group: Any, outputs: Any, inputs: Any, options: Any) -> Any:
        """Fills what absent ranks would send by NCCL with what the last rank before them sent."""
        work = original(group, outputs, inputs, options)
        ranks, running = self.c10d.get_process_group_ranks(group), set(running_ranks())
        if outputs and not self.is_gloo(group, inputs) and not running.issuperset(ranks):
            if work is not None:
                work.wait()
            present_slots = [slot for slot, rank in enumerate(ranks) if rank in running]
            for slot in set(range(len(ranks))).difference(present_slots):
                source = present_slots[max(0, bisect.bisect(present_slots, slot) - 1)]
                outputs[0][slot].copy_(outputs[0][source])
        return work

    def barrier(self, original: Any, group: Any, *args: Any, **options: Any) -> Any:
        """Waits, in a group of gloo alone, for its members that run."""
        if "nccl" in str(self.c10d.get_backend_config(group)):
            return original(group, *args, **options)
        empty = self.torch.zeros(1, dtype=self.torch.uint8)
        self.run(group, ALL_REDUCE, empty, empty, empty)
        return self.completed(None)

    def is_gloo(self, group: Any, values: Any) -> bool:
        """Returns whether the first tensor within *values* is one of gloo's."""
        while isinstance(values, (list, tuple)):
            values = next((value for value in values if not isinstance(value, list) or value), None)
        backend = group._get_backend(values.device)
        return isinstance(backend, self.c10d.ProcessGroupGloo)

    def on_host(self, method: Callable[..., None]) -> Callable[..., Any]:
        """Sends a call with gloo's tensors to *method*."""

        def call(original: Any, group: Any, *args: Any, **options: Any) -> Any:
            if not self.is_gloo(group, args[:2]):
                return original(group, *args, **options)
            method(group, *args, **options)
            return self.completed(args[0])

        return call

    def completed(self, value: Any) -> Any:
        """A work that has ended."""
        future = self.torch.futures.Future()
        future.set_result(value)
        return self.torch._C._distributed_c10d._create_work_from_future(future)

    def run(
        self, group: Any, function: int, source: Any, target: Any, shard: Any, reduction: Any = None,
        root: int = 0,
    ) -> None:  # fmt: skip
        """Runs a collective of the host; *shard*: a tensor of the size that each rank counts."""
        reduces = function in (ALL_REDUCE, REDUCE_SCATTER, REDUCE)
        sent, received = source.detach().cpu().contiguous(), target.detach().cpu().contiguous()
        has_type = reduces and shard.dtype != self.torch.bool
        kind = str(shard.dtype).removeprefix("torch.") if has_type else "uint8"
        count = shard.numel() if reduces else shard.numel() * shard.element_size()
        names = [name for name in REDUCTIONS if reduction == getattr(self.c10d.ReduceOp, name)]
        number = REDUCTIONS.index(names[0]) if names else 0
        if kind not in DTYPES or (reduction is not None and not names):
            raise NotImplementedError(f"no model of a reduction {reduction} of {shard.dtype} by gloo")
        tag = group_tag(group.group_name, self.c10d.get_process_group_ranks(group))
        error = self.nccl.vgpu_host_collective(
            tag.encode(), group.rank(), function, ctypes.c_void_p(sent.data_ptr()),
            ctypes.c_void_p(received.data_ptr()), ctypes.c_uint64(count), DTYPES.index(kind), number,
            root,
        )  # fmt: skip
        if error:
            raise RuntimeError(f"the virtual NCCL refuses a collective of {group.group_name}: {error}")
        if received.data_ptr() != target.data_ptr():
            target.copy_(received)

    def host_methods(self) -> dict[str, Callable[..., None]]:
        """Methods of a process group, on the host."""
        run, torch = self.run, self.torch

        def reduce_each(group: Any, tensors: Any, opts: Any) -> None:
            for tensor in tensors:
                run(group, ALL_REDUCE, tensor, tensor, tensor, opts.reduceOp)

        def broadcast_tensor(group: Any, tensors: Any, opts: Any) -> None:
            run(group, BROADCAST, tensors[0], tensors[0], tensors[0], root=opts.rootRank)

        def reduce_tensor(group: Any, tensors: Any, opts: Any) -> None:
            run(group, REDUCE, tensors[0], tensors[0], tensors[0], opts.reduceOp, opts.rootRank)

        def gather_into(group: Any, output: Any, shard: Any, _: Any) -> None:
            run(group, ALL_GATHER, shard, output, shard)

        def gather_tensors(group: Any, outputs: Any, shards: Any, opts: Any) -> None:
            root = getattr(opts, "rootRank", None)
            receives = root in (None, group.rank())
            flat = shards[0].new_empty((group.size(), *shards[0].shape)) if receives else shards[0]
            run(
                group, ALL_GATHER if root is None else GATHER, shards[0], flat, shards[0], root=root or 0
            )
            for output, received in zip(outputs[0] if receives else (), flat, strict=False):
                output.copy_(received)

        def scatter_tensors(group: Any, outputs: Any, inputs: Any, opts: Any) -> None:
            flat = torch.stack(list(inputs[0])) if inputs else outputs[0]
            run(group, SCATTER, flat, outputs[0], outputs[0], root=opts.rootRank)

        def reduce_scatter_into(group: Any, output: Any, full_tensor: Any, opts: Any) -> None:
            run(group, REDUCE_SCATTER, full_tensor, output, output, opts.reduceOp)

        def reduce_scatter(group: Any, outputs: Any, inputs: Any, opts: Any) -> None:
            reduce_scatter_into(group, outputs[0], torch.stack(list(inputs[0])), opts)

        def exchange_tensors(
            group: Any, output: Any, inputs: Any, received: Any, sent: Any, _: Any
        ) -> None:
            if len({*received, *sent}) > 1:
                raise NotImplementedError("all_to_all by gloo of unequal parts has no model")
            run(group, ALL_TO_ALL, inputs, output, inputs.reshape(group.size(), -1)[0])

        return {
            "allreduce": reduce_each, "allreduce_coalesced": reduce_each, "broadcast": broadcast_tensor,
            "reduce": reduce_tensor, "_allgather_base": gather_into, "all_gather_single": gather_into,
            "allgather": gather_tensors, "gather": gather_tensors, "scatter": scatter_tensors,
            "reduce_scatter": reduce_scatter,
            "_reduce_scatter_base": reduce_scatter_into, "reduce_scatter_single": reduce_scatter_into,
            "alltoall_base": exchange_tensors, "all_to_all_single": exchange_tensors,
        }  # fmt: skip


def adapt_process_groups(torch: Any, libraries: Path) -> None:
    """Adapts torch where VGPU_RANKS names the ranks that run."""
    if running_ranks() and torch.distributed.is_available():
        os.environ.update(SETTINGS)
        (library,) = libraries.glob("libnccl.so*")
        Adapter(torch, ctypes.CDLL(str(library)))
