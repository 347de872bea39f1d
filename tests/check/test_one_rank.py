"""Collectives that one rank alone calls: what check names, and what it accepts."""

from __future__ import annotations

from pathlib import Path

import pytest

from zeromon.check.problem import Problem
from zeromon.check.runner import check

HEAD = """
import os, sys, torch, deepspeed, torch.distributed as dist
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP, fully_shard
from torch.nn.parallel import DistributedDataParallel as DDP
from accelerate import Accelerator
import torch.distributed.checkpoint as dcp
from pathlib import Path
rank = dist.get_rank()
ZERO_3 = {'zero_optimization': {'stage': 3}, 'train_batch_size': 8}
ZERO_2 = {'zero_optimization': {'stage': 2}, 'train_batch_size': 8}
accelerator = Accelerator()
"""

ALONE = {
    "barrier": ("if rank == 0:\n    dist.barrier()\n"),
    "getrank": ("if dist.get_rank() == 0:\n    torch.distributed.all_reduce(x)\n"),
    "inlist": ("if local_rank in (-1, 0):\n    dist.barrier()\n"),
    "inlist2": ("if args.local_rank not in [-1, 0]:\n    dist.barrier()\n"),
    "main": ("if accelerator.is_main_process:\n    accelerator.wait_for_everyone()\n"),
    "gather": ("if accelerator.is_main_process:\n    y = accelerator.gather(x)\n"),
    "else": ("if rank != 0:\n    pass\nelse:\n    dist.barrier()\n"),
    "ret": ("def f():\n    if rank != 0:\n        return\n    dist.barrier()\nf()\n"),
    "cont": ("for i in d:\n    if rank > 0:\n        continue\n    dist.all_reduce(x)\n"),
    "exit": ("if rank != 0:\n    sys.exit(0)\ndist.barrier()\n"),
    "env": ("r = int(os.environ['RANK'])\nif r == 0:\n    dist.barrier()\n"),
    "env2": ("if int(os.environ.get('LOCAL_RANK', 0)) == 0:\n    dist.barrier()\n"),
    "master": (
        "ddp_rank = int(os.environ['RANK'])\n"
        "master_process = ddp_rank == 0\n"
        "if master_process:\n"
        "    dist.barrier()\n"
    ),
    "call": ("def save():\n    dist.barrier()\nif rank == 0:\n    save()\n"),
    "others": ("if rank != 0:\n    dist.barrier()\n"),
    "fsdpfwd": ("model = FSDP(m, auto_wrap_policy=p)\nif rank == 0:\n    model(x)\n"),
    "fsdpgen": ("model = FSDP(m, auto_wrap_policy=p)\nif rank == 0:\n    model.generate(x)\n"),
    "fsdp2": ("for b in m.layers:\n    fully_shard(b)\nfully_shard(m)\nif rank == 0:\n    m(x)\n"),
    "sd": (
        "model = FSDP(m, auto_wrap_policy=p)\nif rank == 0:\n    torch.save(model.state_dict(), 'x')\n"
    ),
    "full": ("if rank == 0:\n    t = {k: v.full_tensor() for k, v in m.state_dict().items()}\n"),
    "dcp": ("if rank == 0:\n    dcp.save(s, checkpoint_id='x')\n"),
    "z3": (
        "engine, *_ = deepspeed.initialize(model=m, config=ZERO_3)\n"
        "if rank == 0 and step % 30 == 0:\n"
        "    engine(x)\n"
    ),
    "z3gen": (
        "engine, o, _, _ = deepspeed.initialize(model=m, config=ZERO_3)\n"
        "if rank == 0:\n"
        "    engine.module.generate(x)\n"
    ),
    "ckpt": (
        "engine, *_ = deepspeed.initialize(model=m, config=c)\n"
        "if rank == 0:\n"
        "    engine.save_checkpoint('x')\n"
    ),
    "file": ("if os.path.isdir(best):\n    dist.barrier()\n"),
    "file2": ("if not os.path.exists(path):\n    build(path)\n    dist.barrier()\n"),
    "file3": ("from pathlib import Path\nif Path(p).exists():\n    dist.broadcast(x, 0)\n"),
    "deco": (
        "from accelerate import PartialState\n"
        "@accelerator.on_main_process\n"
        "def save():\n"
        "    dist.barrier()\n"
        "save()\n"
    ),
    "tern": ("x = dist.all_gather(a, b) if rank == 0 else None\n"),
    "gp": ("if rank == 0:\n    with deepspeed.zero.GatheredParameters(p):\n        pass\n"),
    "lt": ("if rank < 1:\n    dist.barrier()\n"),
    "rev": ("if 0 == rank:\n    dist.barrier()\n"),
    "objs": ("if rank == 0:\n    dist.broadcast_object_list([1], src=0)\n"),
}

MATCHED = {
    "resume": "if os.path.exists(p):\n    dcp.load(s, checkpoint_id=p)\n",
    "resume_engine": (
        "engine, *_ = deepspeed.initialize(model=m, config=c)\n"
        "if os.path.isdir(p):\n    engine.load_checkpoint(p)\n"
    ),
    "classic": ("if rank != 0:\n    dist.barrier()\nload()\nif rank == 0:\n    dist.barrier()\n"),
    "classic2": (
        "if args.local_rank not in [-1, 0]:\n"
        "    torch.distributed.barrier()\n"
        "load()\n"
        "if args.local_rank == 0:\n"
        "    torch.distributed.barrier()\n"
    ),
    "yolo": (
        "def first(local_rank):\n"
        "    if local_rank not in [-1, 0]:\n"
        "        dist.barrier(device_ids=[local_rank])\n"
        "    yield\n"
        "    if local_rank == 0:\n"
        "        dist.barrier(device_ids=[0])\n"
    ),
    "both": ("if rank == 0:\n    dist.broadcast(x, 0)\nelse:\n    dist.broadcast(y, 0)\n"),
    "world": ("if world_size == 1:\n    if rank == 0:\n        dist.barrier()\n"),
    "group": ("if rank == 0:\n    dist.all_reduce(x, group=g)\n"),
    "group2": ("if rank == 0:\n    dist.barrier(g)\n"),
    "none": ("if rank == 0:\n    print(1)\ndist.barrier()\n"),
    "send": ("if rank == 0:\n    dist.send(x, 1)\nelse:\n    dist.recv(x, 0)\n"),
    "ddpfwd": (
        "from torch.nn.parallel import DistributedDataParallel as DDP\n"
        "model = DDP(m)\n"
        "if rank == 0:\n"
        "    model.module(x)\n"
    ),
    "z2": ("engine, *_ = deepspeed.initialize(model=m, config=ZERO_2)\nif rank == 0:\n    engine(x)\n"),
    "sum": (
        "model = FSDP(m, auto_wrap_policy=p)\n"
        "with FSDP.summon_full_params(model):\n"
        "    if rank == 0:\n"
        "        model.generate(x)\n"
    ),
    "fn": (
        "def master():\n"
        "    dist.broadcast(x, 0)\n"
        "def worker():\n"
        "    dist.broadcast(x, 0)\n"
        "if rank == 0:\n"
        "    master()\n"
        "else:\n"
        "    worker()\n"
    ),
    "cond": ("if step % 10 == 0:\n    dist.barrier()\n"),
    "every": ("for i in range(4):\n    if i == 0:\n        dist.barrier()\n"),
    "filesame": ("if os.path.exists(p):\n    dist.barrier()\nelse:\n    b()\n    dist.barrier()\n"),
    "bc": (
        "f = torch.tensor(os.path.exists(p))\ndist.broadcast(f, 0)\nif f.item():\n    dist.barrier()\n"
    ),
    "zero3sd": (
        "engine, *_ = deepspeed.initialize(model=m, config=ZERO_2)\n"
        "if rank == 0:\n"
        "    torch.save(engine.module.state_dict(), 'x')\n"
    ),
    "gpctx": (
        "engine, *_ = deepspeed.initialize(model=m, config=ZERO_3)\n"
        "with deepspeed.zero.GatheredParameters(m.parameters()):\n"
        "    if rank == 0:\n"
        "        engine(x)\n"
    ),
    "init": ("if dist.is_initialized():\n    dist.barrier()\n"),
    "dcpnd": ("if rank == 0:\n    dcp.load(s, checkpoint_id='x', no_dist=True)\n"),
    "wait": ("if accelerator.is_main_process:\n    save()\naccelerator.wait_for_everyone()\n"),
    "andws": ("if rank == 0 and world_size == 1:\n    dist.barrier()\n"),
}


def mismatches(folder: Path, text: str) -> list[Problem]:
    file = folder / "train.py"
    file.write_text(HEAD + text)
    return [problem for problem in check([str(file)]).problems if problem.code == "ZM003"]


@pytest.mark.parametrize("text", ALONE.values(), ids=ALONE)
def test_a_collective_of_a_part_of_the_ranks_is_named(tmp_path: Path, text: str) -> None:
    (problem,) = mismatches(tmp_path, text)
    by_file = "exists" in text or "isdir" in text
    assert problem.severity == ("warning" if by_file else "error")
    assert ("ranks may see" in problem.message) is by_file


@pytest.mark.parametrize("text", MATCHED.values(), ids=MATCHED)
def test_a_collective_that_each_rank_calls_is_accepted(tmp_path: Path, text: str) -> None:
    assert mismatches(tmp_path, text) == []


FORWARD = """
model = accelerator.prepare(m)
if accelerator.is_main_process:
    accelerator.unwrap_model(model).generate(x)
"""
SECTIONS = {
    "DEEPSPEED": "deepspeed_config:\n  zero_stage: {}\n",
    "FSDP": "fsdp_config:\n  fsdp_sharding_strategy: {}\n",
}


@pytest.mark.parametrize(
    ("kind", "value", "shards"),
    [
        ("DEEPSPEED", "3", True), ("DEEPSPEED", "2", False), ("FSDP", "FULL_SHARD", True),
        ("FSDP", "NO_SHARD", False), ("MULTI_GPU", "", False),
    ],
)  # fmt: skip
def test_the_launch_file_says_whether_a_forward_gathers(
    tmp_path: Path, kind: str, value: str, shards: bool
) -> None:
    launch, script = tmp_path / "a.yaml", tmp_path / "train.py"
    section = SECTIONS.get(kind, "").format(value)
    launch.write_text(f"distributed_type: {kind}\nnum_processes: 8\n{section}")
    script.write_text(HEAD + FORWARD)
    codes = {problem.code for problem in check([str(launch), str(script)]).problems}
    assert ("ZM003" in codes) is shards


def test_a_name_that_prepares_itself_is_no_endless_loop(tmp_path: Path) -> None:
    assert mismatches(tmp_path, "x = y\ny = x.prepare(y)\nif rank == 0:\n    y.gather(x)") == []
