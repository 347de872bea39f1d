"""One rank whose model fits into the memory of its cgroup, and whose optimizer's state does not."""

import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

WIDTH = 9500  # 20 bytes of each of its squares: parameters, gradients, buckets, two states of Adam

dist.init_process_group("gloo")
model = DistributedDataParallel(nn.Linear(WIDTH, WIDTH, bias=False))
optimizer = torch.optim.Adam(model.parameters())
optimizer.register_step_pre_hook(lambda *_: time.sleep(2))  # as long as a large one takes
for _ in range(3):
    model(torch.ones(1, WIDTH)).sum().backward()
    optimizer.step()
dist.destroy_process_group()
