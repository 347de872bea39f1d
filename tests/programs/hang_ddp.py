"""Two DDP ranks of which rank 1 sleeps before its forward in step 4: `hang_ddp.py`.

Rank 0 then waits in the all-reduce that DDP's reducer issues from C++.
"""

import time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel


def oversleep() -> None:
    """What rank 1 does instead of its forward."""
    time.sleep(600)


dist.init_process_group("gloo")
model = DistributedDataParallel(torch.nn.Linear(64, 64))
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for step in range(1, 10):
    if step == 4 and dist.get_rank() == 1:
        oversleep()
    model(torch.ones(8, 64)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
