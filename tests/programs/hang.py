"""Two ranks that come to a standstill in step 4: `hang.py KIND`.

late      rank 1 sleeps instead of calling the all-reduce
exit      rank 1 leaves without a word
op        rank 1 calls a broadcast where rank 0 calls an all-reduce
size      rank 1 reduces twice as many elements
deadlock  each rank calls another group first
asleep    both ranks sleep, and no collective is in flight
"""

import os
import sys
import time

import torch
import torch.distributed as dist

KIND = sys.argv[1] if len(sys.argv) > 1 else "late"
dist.init_process_group("gloo")
rank = dist.get_rank()
other = dist.new_group([0, 1], group_desc="other")
weight = torch.zeros(1, requires_grad=True)
optimizer = torch.optim.SGD([weight], 0.1)
for step in range(1, 10):
    (weight * 1).backward()
    if step == 4 and KIND == "asleep":
        time.sleep(600)
    if step == 4 and rank == 1:
        if KIND == "late":
            time.sleep(600)
        elif KIND == "exit":
            os._exit(7)
        elif KIND == "op":
            dist.broadcast(torch.ones(16), 1)
            time.sleep(600)
        elif KIND == "size":
            dist.all_reduce(torch.ones(32))
        elif KIND == "deadlock":
            dist.all_reduce(torch.ones(16), group=other)
    dist.all_reduce(torch.ones(16))
    if step == 4 and KIND == "deadlock" and rank == 0:
        dist.all_reduce(torch.ones(16), group=other)
    optimizer.step()
