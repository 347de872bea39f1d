"""Two ranks of which one fails: `faults.py STRATEGY FAULT [STEP [MOMENT [RANK]]]`.

STRATEGY: ddp, ddp-compiled, fsdp1, fsdp2, tp, zero1, zero2, zero3. MOMENT: forward, backward, optimizer
(before which of them the fault comes). The time of the fault is written to the file that FAULT_AT names.

sleep    it sleeps
loop     it is in an endless loop of Python
exit     it leaves with code 7
stop     SIGSTOP suspends its process
loader   it waits for a batch that its DataLoader's worker does not deliver
op       it calls a broadcast where the others go on
size     it reduces another number of elements than the others
short    it broadcasts fewer elements than the others expect; gloo lets that pass
types    it reduces whole numbers where the others reduce floats; gloo lets that pass
groups   it calls another group first, and the others call the world first
idle     all ranks sleep
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, Dataset

WIDTH = 64


def asleep() -> None:
    """The faults `sleep` and `idle`."""
    time.sleep(3600)


def spinning() -> None:
    """The fault `loop`."""
    while True:
        sum(range(1000))


class Batches(Dataset[Any]):
    """Batches of which number *stuck* is never delivered."""

    def __init__(self, stuck: int) -> None:
        self._stuck = stuck

    def __len__(self) -> int:
        return 100_000

    def __getitem__(self, number: int) -> torch.Tensor:
        if number == self._stuck:
            time.sleep(3600)
        return torch.ones(WIDTH)


class Fault:
    """What befalls a rank, and when."""

    def __init__(self, kind: str, step: int, moment: str, rank: int) -> None:
        self.kind, self.step, self.moment, self.rank = kind, step, moment, rank
        self.other: Any = None
        self.here = False

    def join(self) -> None:
        """Makes the second group; called by all ranks once the process group exists."""
        self.other = dist.new_group([0, 1], group_desc="other")
        self.here = dist.get_rank() == self.rank
        dist.all_reduce(torch.ones(4), group=self.other)

    def batches(self) -> Iterator[torch.Tensor]:
        """Batches of eight; the faulty rank's loader gets stuck where that is the fault."""
        sticks = self.kind == "loader" and self.here
        samples = Batches(8 * (self.step - 1) if sticks else -1)
        loader = DataLoader(samples, batch_size=8, num_workers=int(sticks))
        for number, batch in enumerate(loader, 1):
            if sticks and number == self.step - 1:
                self._told()  # the next batch does not come
            yield batch

    def at(self, step: int, moment: str) -> None:
        """Comes before *moment* of a step."""
        if (step, moment) != (self.step, self.moment) or self.kind == "loader":
            return
        if self.here:
            self._told()
            self._befalls()
        elif self.kind == "idle":
            asleep()
        elif self.kind in ("op", "size"):
            dist.all_reduce(torch.ones(16))
        elif self.kind == "short":
            dist.broadcast(torch.ones(32), self.rank)
        elif self.kind == "types":
            dist.all_reduce(torch.ones(16))
        elif self.kind == "groups":
            dist.all_reduce(torch.ones(16))
            dist.all_reduce(torch.ones(16), group=self.other)

    def _told(self) -> None:
        Path(os.environ["FAULT_AT"]).write_text(str(time.monotonic()))

    def _befalls(self) -> None:
        if self.kind in ("sleep", "idle"):
            asleep()
        elif self.kind == "loop":
            spinning()
        elif self.kind == "exit":
            os._exit(7)
        elif self.kind == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        elif self.kind == "op":
            dist.broadcast(torch.ones(16), self.rank)
        elif self.kind == "size":
            dist.all_reduce(torch.ones(32))
        elif self.kind == "short":
            dist.broadcast(torch.ones(16), self.rank)
        elif self.kind == "types":
            dist.all_reduce(torch.ones(16, dtype=torch.int32))
        elif self.kind == "groups":
            dist.all_reduce(torch.ones(16), group=self.other)
            dist.all_reduce(torch.ones(16))


def model_of() -> nn.Sequential:
    """Four layers with a ReLU between them."""
    return nn.Sequential(*(m for _ in range(4) for m in (nn.Linear(WIDTH, WIDTH), nn.ReLU())))


def train(strategy: str, fault: Fault) -> None:
    """Trains for ever, but for the fault."""
    if strategy.startswith("zero"):
        return train_deepspeed(int(strategy[-1]), fault)
    dist.init_process_group("gloo")
    fault.join()
    model = parallel(strategy, model_of())
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)

    def update() -> None:
        optimizer.step()
        optimizer.zero_grad()

    loop(fault, model, lambda loss: loss.backward(), update)
    return None


def loop(fault: Fault, model: Any, backward: Callable[[Any], Any], update: Callable[[], Any]) -> None:
    """Steps of a tenth of a second."""
    for step, batch in enumerate(fault.batches(), 1):
        time.sleep(0.1)
        fault.at(step, "forward")
        loss = model(batch).sum()
        fault.at(step, "backward")
        backward(loss)
        fault.at(step, "optimizer")
        update()


def parallel(strategy: str, model: nn.Sequential) -> Any:
    """The model, spread over the ranks by PyTorch."""
    if strategy.startswith("ddp"):
        wrapped = nn.parallel.DistributedDataParallel(model)
        return torch.compile(wrapped, backend="aot_eager") if "compiled" in strategy else wrapped
    if strategy == "fsdp1":
        from torch.distributed.fsdp import FullyShardedDataParallel
        from torch.distributed.fsdp.wrap import ModuleWrapPolicy

        return FullyShardedDataParallel(
            model, auto_wrap_policy=ModuleWrapPolicy({nn.Linear}), device_id=torch.device("cpu")
        )
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cpu", (2,))
    if strategy == "fsdp2":
        from torch.distributed.fsdp import fully_shard

        for layer in model:
            if isinstance(layer, nn.Linear):
                fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        return model
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    plan: Any = {"0": ColwiseParallel(), "2": RowwiseParallel(),
                 "4": ColwiseParallel(), "6": RowwiseParallel()}  # fmt: skip
    return parallelize_module(model, mesh, plan)


def train_deepspeed(stage: int, fault: Fault) -> None:
    """The same with an engine of DeepSpeed."""
    import deepspeed

    deepspeed.init_distributed("gloo")
    fault.join()
    model = model_of()
    config = {
        "train_micro_batch_size_per_gpu": 8, "bf16": {"enabled": True},
        "optimizer": {"type": "Adam", "params": {"lr": 1e-3, "torch_adam": True}},
        "zero_optimization": {"stage": stage}, "zero_allow_untested_optimizer": True,
    }  # fmt: skip
    engine = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)[0]
    loop(fault, lambda batch: engine(batch.bfloat16()), engine.backward, engine.step)


def dump_and_leave(seconds: float) -> None:
    """Writes, after a while, what torch's Flight Recorder has of this rank into the folder FLIGHT."""
    time.sleep(seconds)
    recorder = torch._C._distributed_c10d
    name = f"nccl_trace_rank_{dist.get_rank()}"
    folder = Path(os.environ["FLIGHT"])
    Path(folder, name).write_bytes(recorder._dump_fr_trace())
    Path(folder, "json", name).write_bytes(recorder._dump_fr_trace_json())
    time.sleep(4.0)  # until the others have written theirs
    os._exit(0)


if __name__ == "__main__":
    name, kind, *rest = sys.argv[1:]
    step, moment, rank = [*rest, *("6", "forward", "1")[len(rest) :]]
    if "FLIGHT" in os.environ:
        threading.Thread(target=dump_and_leave, args=(18.0,), daemon=True).start()
    train(name, Fault(kind, int(step), moment, int(rank)))
