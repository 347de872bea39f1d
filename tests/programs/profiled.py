"""One rank that trains, with a profiler of its own: `profiled.py none|on|later STEPS`.

on: from the first step to the last. later: from the step after somebody else's began. It must get all of
its own trace either way: the number of its steps is printed.
"""

import json
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from leave import leave
from torch.profiler import ProfilerActivity, profile, record_function

MODE, STEPS = sys.argv[1], int(sys.argv[2])

dist.init_process_group("gloo")
layer = torch.nn.Linear(32, 32)
optimizer = torch.optim.SGD(layer.parameters(), 0.01)
own = profile(activities=[ProfilerActivity.CPU])
began = 0
if MODE == "on":
    own.start()
    began = 1
for step in range(1, STEPS + 1):
    if MODE == "later" and not began and torch.autograd._profiler_enabled():
        own.start()
        began = step
    with record_function("own step"):
        layer(torch.ones(4, 32)).sum().backward()
        for parameter in layer.parameters():
            dist.all_reduce(parameter.grad)
        optimizer.step()
        optimizer.zero_grad()
        time.sleep(0.02)
if began:
    own.stop()
    path = Path(os.environ["OWN_TRACE"])
    own.export_chrome_trace(str(path))
    names = [event.get("name") for event in json.loads(path.read_text())["traceEvents"]]
    print(f"own steps {names.count('own step')} of {STEPS - began + 1}")
dist.destroy_process_group()
leave()
