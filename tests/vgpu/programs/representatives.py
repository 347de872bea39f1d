"""Collectives of a job of which some ranks run: prints their values as JSON, a line a rank.

Groups of a mesh of nodes and of their places have the same size, where there are as many of both.
"""

from __future__ import annotations

import json
import os
import resource
import time
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh


def reduce_sum(group: Any, value: float, dtype: torch.dtype, device: str) -> float:
    tensor = torch.full((1 << 12,), value).to(dtype).to(device)
    dist.all_reduce(tensor, group=group)
    return tensor.cpu()[0].item()


def main() -> None:
    started = time.monotonic()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    bound = {"device_id": device} if os.environ.get("BOUND") else {}
    dist.init_process_group("cpu:gloo,cuda:nccl", **bound)
    rank, ranks, per = dist.get_rank(), dist.get_world_size(), int(os.environ["LOCAL_WORLD_SIZE"])
    mesh = init_device_mesh("cuda", (ranks // per, per), mesh_dim_names=("across", "node"))
    facts: dict[str, Any] = {}
    groups = {
        "world": dist.group.WORLD,
        "across": mesh.get_group("across"),
        "node": mesh.get_group("node"),
    }
    for name, group in groups.items():
        facts[name] = reduce_sum(group, 1.5, torch.float32, "cuda")
        facts[f"{name} count"] = reduce_sum(group, 3, torch.int64, "cuda")
    facts["host"] = reduce_sum(dist.group.WORLD, 3, torch.int64, "cpu")
    gathered: list[Any] = [None] * ranks
    dist.all_gather_object(gathered, rank)
    facts["gathered"] = gathered
    collected: list[Any] = [None] * ranks
    dist.gather_object(rank, collected if rank == 0 else None)
    facts["collected"] = collected if rank == 0 else None
    given_list: list[Any] = [None]
    dist.scatter_object_list(given_list, list(range(ranks)) if rank == 0 else None)
    facts["scattered"] = given_list[0]
    sent = [{"from": 0} if rank == 0 else None]
    dist.broadcast_object_list(sent)
    facts["broadcast"] = sent[0]
    whole = torch.arange(ranks, dtype=torch.float32).cuda()
    received = torch.empty_like(whole)
    dist.all_to_all_single(received, whole)
    part = torch.empty(1, device="cuda")
    dist.reduce_scatter_tensor(part, whole)
    facts["part"] = part.cpu().item()
    following = [dist.P2POp(dist.isend, whole, (rank + 1) % ranks)]
    following += [dist.P2POp(dist.irecv, received, (rank - 1) % ranks)]
    for work in dist.batch_isend_irecv(following):
        work.wait()
    dist.barrier()
    torch.cuda.synchronize()
    facts["seconds"] = time.monotonic() - started
    facts["bytes"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    os.write(1, f"rank {rank} facts {json.dumps(facts)}\n".encode())  # in one piece
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
