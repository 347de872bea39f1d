"""Two ranks, one setting that moves exposed communication: `exposed.py KIND off|on [STEPS]`.

fsdp2: prefetch of the next unit. ddp: small buckets. zero2: overlap_comm.
"""

import itertools
import sys
from typing import Any

import torch
import torch.distributed as dist
from leave import leave
from torch import nn

KIND, ON = sys.argv[1], sys.argv[2] == "on"
STEPS = int(sys.argv[3]) if len(sys.argv) > 3 else 40
WIDTH, LAYERS, BATCH = 512, 6, 512


def fsdp2(model: nn.Sequential) -> Any:
    from torch.distributed.fsdp import fully_shard

    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    if ON:
        model._set_unshard_async_op(True)  # without it the gathers are synchronous on gloo
        layers = list(model)
        for this, following in itertools.pairwise(layers):
            this.set_modules_to_forward_prefetch([following])
            following.set_modules_to_backward_prefetch([this])
    return model


def zero2(model: nn.Sequential) -> Any:
    import deepspeed

    config = {
        "train_micro_batch_size_per_gpu": BATCH,
        "zero_optimization": {"stage": 2, "overlap_comm": ON, "reduce_bucket_size": 600_000},
        "zero_allow_untested_optimizer": True,
    }
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    return engine


if KIND == "zero2":
    import deepspeed
    from deepspeed.ops import __compatible_ops__

    __compatible_ops__["deepspeed_shm_comm"] = False  # it would be compiled first
    deepspeed.init_distributed("gloo")
else:
    dist.init_process_group("gloo")
torch.manual_seed(0)
net = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))
if KIND == "zero2":
    engine = zero2(net)
    for _ in range(STEPS):
        engine.backward(engine(torch.ones(BATCH, WIDTH)).sum() * 1e-6)
        engine.step()
else:
    wrapped = (
        fsdp2(net)
        if KIND == "fsdp2"
        else nn.parallel.DistributedDataParallel(net, bucket_cap_mb=1 if ON else 25)
    )
    optimizer = torch.optim.SGD(wrapped.parameters(), 0.01)
    for _ in range(STEPS):
        (wrapped(torch.ones(BATCH, WIDTH)).sum() * 1e-6).backward()
        optimizer.step()
        optimizer.zero_grad()
dist.destroy_process_group()
leave()
