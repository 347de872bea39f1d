"""A rank of a simulated group of two whose transfers take a set time: `delayed.py FILE CASE ...`.

Nothing leaves the process. A transfer begins when it was issued and the one before it has ended, and a
wait sleeps until its end: the exposed time of a step is the time of its transfers, less what the step
computed meanwhile. The group also measures how long its waits slept: a busy machine wakes it later.
Writes to FILE, for each step: case, transfers, and seconds transferred, computed meanwhile, and slept.
"""

import json
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from leave import leave
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

RANKS, STEPS, WIDTH, ROWS = 2, 6, 32, 16
TRANSFER, COMPUTE = 0.020, 0.008


@dataclass
class Step:
    """What the group did in one step."""

    case: str
    transfers: int = 0
    transferred: float = 0.0
    computed: float = 0.0
    slept: float = 0.0


steps = [Step("construction")]


class Transfer(dist.Work):
    """Ends TRANSFER seconds after it began."""

    free = 0.0
    """When the newest one ends."""

    def __init__(self) -> None:
        super().__init__()
        self.end = Transfer.free = max(Transfer.free, time.monotonic()) + TRANSFER
        steps[-1].transfers += 1
        steps[-1].transferred += TRANSFER

    def wait(self, timeout=None) -> bool:
        began = time.monotonic()
        time.sleep(max(0.0, self.end - began))
        steps[-1].slept += time.monotonic() - began
        return True


class Delayed(dist.ProcessGroup):
    """What each rank gets is made of this rank's own tensors."""

    def __init__(self, rank: int, size: int) -> None:
        super().__init__(rank, size)
        self.held = []

    def transfer(self) -> Transfer:
        self.held.append(Transfer())  # torch keeps the C++ half only
        return self.held[-1]

    def allreduce(self, tensors, opts=None):
        for tensor in tensors:
            tensor.mul_(RANKS)
        return self.transfer()

    def all_gather_single_coalesced(self, outputs, inputs, opts=None):
        for gathered, part in zip(outputs, inputs, strict=True):
            gathered.copy_(torch.cat([part] * RANKS))
        return self.transfer()

    def reduce_scatter_single_coalesced(self, outputs, inputs, opts=None):
        for part, whole in zip(outputs, inputs, strict=True):
            part.copy_(whole[: len(part)] * RANKS)
        return self.transfer()

    def all_to_all_single(self, output, input, output_sizes, input_sizes, opts=None):
        output.copy_(input)
        return self.transfer()

    def scatter(self, outputs, inputs, opts=None):  # of parameters
        outputs[0].copy_(inputs[0][0])
        return self.transfer()

    def broadcast(self, tensors, opts=None):
        return self.transfer()

    # their names before torch 2.13
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    alltoall_base = all_to_all_single

    def getBackendName(self) -> str:
        return "delayed"

    @property
    def group_name(self) -> str:
        return dist.distributed_c10d._world.pg_names[self]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(x)))


def tp():
    model = nn.Sequential(Block(), Block())
    mesh = init_device_mesh("cpu", (RANKS,), mesh_dim_names=("tp",))
    for block in model:
        parallelize_module(block, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    return model


def tp_aot():
    return torch.compile(tp(), backend="aot_eager", fullgraph=True)


def tp_inductor():
    return torch.compile(tp(), backend="inductor", fullgraph=True)


class Attention(nn.Module):
    """Context parallel: keys and values are gathered."""

    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(WIDTH, 3 * WIDTH)

    def forward(self, x):
        gather = getattr(functional, "all_gather_single_autograd", None)  # since torch 2.13
        gather = gather or functional.all_gather_tensor_autograd
        queries, *others = self.project(x).chunk(3, dim=-1)
        keys, values = (gather(each.contiguous(), 0, dist.group.WORLD) for each in others)
        return nn.functional.scaled_dot_product_attention(queries, keys, values)


def cp():
    return Attention()


class Experts(nn.Module):
    """Expert parallel: rows go to the ranks of their experts and come back."""

    def __init__(self) -> None:
        super().__init__()
        self.expert = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        parts = [len(x) // RANKS] * RANKS
        exchange = functional.all_to_all_single_autograd
        there = exchange(x + self.expert.bias, parts, parts, dist.group.WORLD)
        return exchange(torch.relu(self.expert(there)), parts, parts, dist.group.WORLD)


def ep():
    return Experts()


class Overlapped(nn.Module):
    """Computes, by sleeping, while a transfer is under way."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        total = functional.all_reduce(x, "sum", dist.group.WORLD)
        time.sleep(COMPUTE)
        steps[-1].computed += COMPUTE
        return self.linear(total * 1)


def overlapped():
    return Overlapped()


def main() -> None:
    path, *cases = sys.argv[1:]
    dist.Backend.register_backend(
        "delayed", lambda store, rank, size, timeout: Delayed(rank, size), devices=["cpu"]
    )
    dist.init_process_group("delayed", rank=0, world_size=RANKS, store=dist.HashStore())
    torch.manual_seed(0)
    torch.set_num_threads(1)
    for case in cases:
        steps.append(Step("construction"))
        model = globals()[case]()
        optimizer = torch.optim.SGD(model.parameters(), 0.01)
        for _ in range(STEPS):
            steps.append(Step(case))
            model(torch.randn(ROWS, WIDTH)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    Path(path).write_text(json.dumps([asdict(step) for step in steps]))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
    leave()
