"""Trains DDP on two ranks in several ways, each with a late rank: `ddp_ways.py STEPS [WAY ...]`.

The late rank of a way sleeps 20 ms of each step in forward, except in the first ones: rank 1 in the
first way, rank 0 in the next, and so on. Rank 0 prints a line of JSON: way -> when it ended (ns of the
monotonic clock), and its losses, exactly.
"""

import contextlib
import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from leave import leave
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

STEPS, WAYS = int(sys.argv[1]), sys.argv[2:]
LATE_S, PUNCTUAL = 0.02, 8
"""What comes late from a run's first steps on would have to do so for five seconds."""
WIDTH = 96


class Net(nn.Module):
    """Four layers; where *odd* is set, the last but one is used in every other step only."""

    def __init__(self, *, odd: bool = False, norm: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.norm = nn.BatchNorm1d(WIDTH) if norm else nn.Identity()
        self.odd, self.calls, self.late_s = odd, 0, 0.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        if "HURRY" not in os.environ:
            time.sleep(0.005 + self.late_s * (self.calls > PUNCTUAL))
        for number, layer in enumerate(self.layers):
            if not self.odd or number != 2 or self.calls % 2:
                x = layer(x).relu()
        return self.norm(x)


def ddp(net: nn.Module, **options: Any) -> DistributedDataParallel:
    return DistributedDataParallel(net, bucket_cap_mb=0.05, **options)


def plain(late_s: float, make: Callable[[], DistributedDataParallel], micro: int = 1) -> list[float]:
    """The losses of a loop with one model, whose gradients are sent in the last of *micro* passes."""
    model = make()
    model.module.late_s = late_s / micro
    optimizer = torch.optim.SGD((p for p in model.parameters() if p.requires_grad), 0.01)
    losses = []
    for _ in range(STEPS):
        for number in range(micro):
            with contextlib.nullcontext() if number == micro - 1 else model.no_sync():
                loss = model(torch.randn(8, WIDTH)).pow(2).mean()
                loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def joined(late_s: float) -> list[float]:
    """Uneven inputs: rank 1 has two batches less."""
    model = ddp(Net())
    model.module.late_s = late_s
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    losses = []
    with model.join():
        for _ in range(STEPS - 2 * dist.get_rank()):
            loss = model(torch.randn(8, WIDTH)).pow(2).mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    return losses


def two_models(late_s: float, optimizers: int, **options: Any) -> list[float]:
    """A generator and a discriminator with an optimizer each, or an encoder and a decoder with one."""
    first, second = ddp(Net(), **options), ddp(Net(), **options)
    first.module.late_s = late_s
    both = [*first.parameters(), *second.parameters()]
    losses = []
    if optimizers == 1:
        optimizer = torch.optim.SGD(both, 0.01)
        for _ in range(STEPS):
            loss = second(first(torch.randn(8, WIDTH))).pow(2).mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return losses
    of_first = torch.optim.SGD(first.parameters(), 0.01)
    of_second = torch.optim.SGD(second.parameters(), 0.01)
    for _ in range(STEPS):
        fake = first(torch.randn(8, WIDTH))
        loss = second(fake.detach()).pow(2).mean()
        loss.backward()
        of_second.step()
        of_second.zero_grad()
        loss = (fake - 1).pow(2).mean()
        loss.backward()
        of_first.step()
        of_first.zero_grad()
        losses.append(loss.item())
    return losses


def frozen() -> Net:
    net = Net()
    net.layers[0].requires_grad_(False)
    return net


def hooked(hook: Any, state: Any = None, **options: Any) -> DistributedDataParallel:
    model = ddp(Net(), **options)
    if isinstance(hook, dist.BuiltinCommHookType):
        model._register_builtin_comm_hook(hook)
    else:
        model.register_comm_hook(state, hook)
    return model


def delayed() -> DistributedDataParallel:
    """The gradients of the last two layers are sent together when those of the first one are there."""
    net = Net()
    named = [item for item in net.named_parameters() if item[0].startswith(("layers.2", "layers.3"))]
    first = net.layers[0].weight
    return ddp(net, delay_all_reduce_named_params=named, param_to_hook_all_reduce=first)


def power() -> DistributedDataParallel:
    """On gloo its compressed steps hang in torch, so all steps are those before it compresses."""
    state = powerSGD_hook.PowerSGDState(None, start_powerSGD_iter=1_000_000)
    return hooked(powerSGD_hook.powerSGD_hook, state)


TRAIN: dict[str, Callable[[float], list[float]]] = {
    "plain": lambda late_s: plain(late_s, lambda: ddp(Net())),
    "unused": lambda late_s: plain(late_s, lambda: ddp(Net(), find_unused_parameters=True)),
    "odd": lambda late_s: plain(late_s, lambda: ddp(Net(odd=True), find_unused_parameters=True)),
    "static": lambda late_s: plain(late_s, lambda: ddp(Net(), static_graph=True)),
    "static_unused": lambda late_s: plain(
        late_s, lambda: ddp(Net(), static_graph=True, find_unused_parameters=True)
    ),
    "views": lambda late_s: plain(late_s, lambda: ddp(Net(), gradient_as_bucket_view=True)),
    "unused_views": lambda late_s: plain(
        late_s, lambda: ddp(Net(), gradient_as_bucket_view=True, find_unused_parameters=True)
    ),
    "buffers": lambda late_s: plain(late_s, lambda: ddp(Net(norm=True))),
    "no_sync": lambda late_s: plain(late_s, lambda: ddp(Net()), 2),
    "unused_no_sync": lambda late_s: plain(late_s, lambda: ddp(Net(), find_unused_parameters=True), 2),
    "join": joined,
    "fp16": lambda late_s: plain(late_s, lambda: hooked(default_hooks.fp16_compress_hook)),
    "unused_fp16": lambda late_s: plain(
        late_s, lambda: hooked(default_hooks.fp16_compress_hook, find_unused_parameters=True)
    ),
    "builtin_fp16": lambda late_s: plain(late_s, lambda: hooked(dist.BuiltinCommHookType.FP16_COMPRESS)),
    "power": lambda late_s: plain(late_s, power),
    "delayed": lambda late_s: plain(late_s, delayed),
    "frozen": lambda late_s: plain(late_s, lambda: ddp(frozen())),
    "unused_frozen": lambda late_s: plain(late_s, lambda: ddp(frozen(), find_unused_parameters=True)),
    "two": lambda late_s: two_models(late_s, 1),
    "gan": lambda late_s: two_models(late_s, 2),
    "unused_gan": lambda late_s: two_models(late_s, 2, find_unused_parameters=True),
}

if __name__ == "__main__":
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    ended: dict[str, Any] = {}
    for number, way in enumerate(WAYS or TRAIN):
        torch.manual_seed(7)
        is_late = dist.get_rank() == (number + 1) % 2
        losses = TRAIN[way](LATE_S if is_late else 0.0)
        dist.barrier()
        ended[way] = time.monotonic_ns(), [loss.hex() for loss in losses]
    if dist.get_rank() == 0:
        print(json.dumps(ended))
    dist.destroy_process_group()
    leave()
