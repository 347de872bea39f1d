"""Ranks whose collectives are operators: `functional.py FOLDER CASE ...`, on gloo.

Each case trains its own model. Writes FOLDER/RANK.json: the Flight Recorder's entries, the losses
(exactly), what torch.compile did, and how long all-reduces and waits took the program, by step.
"""

import gc
import json
import os
import pickle
import sys
import time
from collections import defaultdict
from pathlib import Path

import torch
import torch._dynamo as dynamo
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from leave import leave
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

STEPS, WIDTH, ROWS = 6, 64, 32
spent = defaultdict(float)
steps_taken = 0
swaps = {"calls": 0, "bytes": 0}
"""Sends, each with a receive of the same size."""


class Timer:
    """Calls an operator and adds the time: below the hook, because it was there before."""

    def __init__(self, operator) -> None:
        self.operator = operator

    def __hash__(self) -> int:
        return hash(self.operator)

    def __call__(self, *args, **kwargs):
        began = time.perf_counter()
        try:
            return self.operator(*args, **kwargs)
        finally:
            spent[steps_taken + 1] += time.perf_counter() - began


def time_operators() -> None:
    operators = torch.ops._c10d_functional
    for operator in (operators.all_reduce, operators.wait_tensor):
        for owner in (operator, operator.default):
            owner._op = Timer(owner._op)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(x)))


def tensor_parallel(mesh):
    model = nn.Sequential(Block(), Block())
    for block in model:
        parallelize_module(block, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    return model


def tp():
    return tensor_parallel(init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",)))


def tp_aot():
    return torch.compile(tp(), backend="aot_eager", fullgraph=True)


def tp_inductor():
    return torch.compile(tp(), backend="inductor", fullgraph=True)


def fsdp2_tp():
    from torch.distributed.fsdp import fully_shard

    world = dist.get_world_size()
    mesh = init_device_mesh("cpu", (max(1, world // 2), 2), mesh_dim_names=("dp", "tp"))
    model = tensor_parallel(mesh["tp"])
    for block in model:
        fully_shard(block, mesh=mesh["dp"])
    return fully_shard(model, mesh=mesh["dp"])


def fsdp2_compiled():
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp",))
    model = nn.Sequential(Block(), Block())
    for block in model:
        block.compile(backend="aot_eager")
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def ddp_compiled():
    model = nn.parallel.DistributedDataParallel(nn.Sequential(Block(), Block()))
    return torch.compile(model, backend="aot_eager")


class Experts(nn.Module):
    """Rows go to the ranks of their experts and come back: two all-to-alls forward, two backward."""

    def __init__(self) -> None:
        super().__init__()
        self.expert = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        size = dist.get_world_size()
        parts = [len(x) // size] * size
        exchange = functional.all_to_all_single_autograd
        there = exchange(x + self.expert.bias, parts, parts, dist.group.WORLD)
        return exchange(torch.relu(self.expert(there)), parts, parts, dist.group.WORLD)


def ep():
    return Experts()


class Attention(nn.Module):
    """Attention over a sequence that is sharded over the ranks: keys and values are gathered."""

    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(WIDTH, 3 * WIDTH)

    def forward(self, x):
        gather = getattr(functional, "all_gather_single_autograd", None)  # its name since torch 2.13
        gather = gather or functional.all_gather_tensor_autograd
        queries, *others = self.project(x).chunk(3, dim=-1)
        keys, values = (gather(each.contiguous(), 0, dist.group.WORLD) for each in others)
        return nn.functional.scaled_dot_product_attention(queries, keys, values)


def cp():
    return Attention()


class Enter(torch.autograd.Function):
    """The same on every rank; its gradient is the sum of the ranks'."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return functional.all_reduce(grad, "sum", dist.group.WORLD.group_name)


class Leave(torch.autograd.Function):
    """The sum over the ranks."""

    @staticmethod
    def forward(ctx, x):
        return functional.all_reduce(x, "sum", dist.group.WORLD.group_name)

    @staticmethod
    def backward(ctx, grad):
        return grad.clone()


class Sharded(nn.Module):
    """Tensor parallel without DTensor, of which inductor generates C++ that calls no Python."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.block = nn.Linear(WIDTH, WIDTH), Block()

    def forward(self, x):
        return Leave.apply(self.block(Enter.apply(self.first(x))))


def tp_cpp():
    return torch.compile(Sharded(), fullgraph=True, options={"cpp_wrapper": True})


class Odd(nn.Module):
    """Operators that issue several collectives, or wait themselves, or wait for several."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        operators, world = torch.ops._c10d_functional, dist.group.WORLD.group_name
        weight = self.linear.weight.detach()
        y = x @ torch.ops._dtensor.shard_dim_alltoall(weight, 0, 1, world).reshape(WIDTH, WIDTH)
        both = [operators.all_reduce(part, "sum", world) for part in y.chunk(2)]
        if hasattr(operators, "wait_tensors"):
            both = operators.wait_tensors(both)
        else:
            both = [operators.wait_tensor(part) for part in both]
        if hasattr(operators, "batch_p2p_ops"):
            other = dist.get_rank() ^ 1
            part = torch.empty_like(both[0])
            swapped = operators.batch_p2p_ops(
                ["isend", "irecv"], [other, other], [0, 0], [both[0], part], world
            )
            both = [operators.wait_tensor(each) for each in swapped]
            swaps["calls"] += 1
            swaps["bytes"] += part.nbytes
        return self.linear(x + sum(both[-1].sum(0)))


def odd():
    return Odd()


def flight() -> list[dict]:
    dump = getattr(torch._C._distributed_c10d, "_dump_fr_trace", None)
    if dump is None:  # torch 2.6 records what NCCL does, and nothing of gloo
        return []
    content = pickle.loads(dump(includeCollectives=True, includeStackTraces=False, onlyActive=False))
    wanted = (
        "profiling_name", "input_sizes", "input_dtypes", "output_sizes", "output_dtypes",
        "process_group",
    )  # fmt: skip
    return [{k: e[k] for k in wanted} for e in content["entries"]]


def compilation(metrics) -> tuple:
    """A frame that dynamo compiled: its function, guards, and whether it was compiled before."""
    again = bool(getattr(metrics, "recompile_reason", None))  # torch 2.6 does not know
    return metrics.co_name, metrics.guard_count, again


def main() -> None:
    global steps_taken
    folder, *cases = sys.argv[1:]
    torch.set_num_threads(1)
    torch.manual_seed(0)
    time_operators()
    dist.init_process_group("gloo")
    losses = []
    for case in cases:
        model = globals()[case]()
        optimizer = torch.optim.SGD(model.parameters(), 0.01)
        for number in range(STEPS):
            rows = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(number))
            loss = model(rows).square().mean()
            loss.backward()
            losses.append(loss.item().hex())
            optimizer.step()
            optimizer.zero_grad()
            steps_taken += 1
    counters = dynamo.utils.counters
    facts = {
        "flight": flight(),
        "losses": losses,
        "spent": spent,
        "swaps": swaps,
        "watched": "zeromon_agents.runtime.agent" in sys.modules,
        "compiled": {
            "breaks": sum(counters["graph_break"].values()),
            "graphs": counters["stats"]["unique_graphs"],
            "frames": dict(counters["frames"]),
            "compilations": [  # a backward graph has no name, and its place in the list varies
                compilation(each) for each in dynamo.utils.get_compilation_metrics() if each.co_name
            ],
        },
    }
    del model, optimizer
    gc.collect()
    Path(folder).mkdir(parents=True, exist_ok=True)
    Path(folder, f"{dist.get_rank()}.json").write_text(json.dumps(facts))
    dist.destroy_process_group()


if __name__ == "__main__":
    os.environ.setdefault("TORCH_FR_BUFFER_SIZE", "20000")
    main()
    leave()
