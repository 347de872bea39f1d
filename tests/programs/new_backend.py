"""Trains a few steps of `shardlib` with a backend that the recipe in CONTRIBUTING.md makes.

Run by tests/docs/test_recipes.py as `new_backend.py FOLDER LINE`: the folder holds the recipe's module,
and the line is what the recipe adds to BACKENDS.
"""

import os
import sys

import torch
import torch.distributed as dist
from leave import leave

folder, line = sys.argv[1:]
sys.path.insert(0, folder)
sys.argv = sys.argv[:1]

import recipe

import zeromon_agents
from zeromon_agents.hooks import backends

backends.BACKENDS = (*backends.BACKENDS, eval(line, vars(recipe)))

dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
zeromon_agents.start()

import shardlib

engine = shardlib.Engine(width=4, layers=2)
optimizer = torch.optim.SGD(engine.parameters(), 0.001)
for _ in range(6):
    engine(torch.ones(2, 4)).sum().backward()
    optimizer.step()

from zeromon_agents.runtime.bootstrap import BOOTSTRAP

guard = BOOTSTRAP.agent.guard
zeromon_agents.stop()
unpatched = not hasattr(shardlib.Layer.gather, "__wrapped__")
os.write(1, f"\nerrors {guard.errors} {guard.first}, unpatched {unpatched}\n".encode())
dist.destroy_process_group()
leave()
