"""All-reduces of all ranks, of a node, across nodes and of pairs; each has a size of its own.

Sizes are those of SIZES, in elements of four bytes. Each rank sends to the next one, too.
"""

from __future__ import annotations

import os

import torch
import torch.distributed as dist

SIZES = {"world": 1 << 10, "node": 1 << 11, "across": 1 << 12, "pair": 1 << 13, "next": 1 << 14}


def reduce_in_groups(name: str, groups: list[list[int]]) -> None:
    """Sums the ranks of this rank's group among *groups*."""
    rank = dist.get_rank()
    made = [(members, dist.new_group(members)) for members in groups]
    members, group = next((members, group) for members, group in made if rank in members)
    tensor = torch.full((SIZES[name],), rank, dtype=torch.int32).cuda()
    dist.all_reduce(tensor, group=group)
    assert tensor.cpu().eq(sum(members)).all(), name


def main() -> None:
    local = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local)
    dist.init_process_group("nccl")
    rank, ranks, per = dist.get_rank(), dist.get_world_size(), int(os.environ["LOCAL_WORLD_SIZE"])
    everyone = list(range(ranks))
    reduce_in_groups("world", [everyone])
    reduce_in_groups("node", [everyone[first : first + per] for first in range(0, ranks, per)])
    reduce_in_groups("across", [everyone[place::per] for place in range(per)])
    reduce_in_groups("pair", [everyone[first : first + 2] for first in range(0, ranks, 2)])
    sent = torch.full((SIZES["next"],), rank, dtype=torch.int32).cuda()
    received = torch.empty_like(sent)
    works = [dist.P2POp(dist.isend, sent, (rank + 1) % ranks)]
    works += [dist.P2POp(dist.irecv, received, (rank - 1) % ranks)]
    for work in dist.batch_isend_irecv(works):
        work.wait()
    assert received.cpu().eq((rank - 1) % ranks).all()
    free, total = torch.cuda.mem_get_info()
    print(f"rank {rank} is right, {(total - free) >> 20} MiB used", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
