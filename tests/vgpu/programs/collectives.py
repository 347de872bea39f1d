"""Every collective of NCCL with every type and reduction, each held against a sum by the CPU."""

from __future__ import annotations

import itertools
import os

import torch
import torch.distributed as dist

INTEGERS = (torch.int8, torch.uint8, torch.int32, torch.int64)
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
SIZE = 6


def value(rank: int, dtype: torch.dtype, size: int = SIZE) -> torch.Tensor:
    """Small whole numbers, so that every type holds every sum exactly."""
    return ((torch.arange(size) * 3 + rank * 5) % 7 - (0 if dtype == torch.uint8 else 1)).to(dtype)


def expected(op: str, ranks: int, dtype: torch.dtype, size: int = SIZE) -> torch.Tensor:
    all_ = torch.stack([value(rank, dtype, size).double() for rank in range(ranks)])
    reduced = {
        "SUM": all_.sum(0), "PRODUCT": all_.prod(0), "MIN": all_.min(0).values,
        "MAX": all_.max(0).values, "AVG": all_.mean(0),
    }[op]  # fmt: skip
    if op == "PRODUCT" and dtype in INTEGERS:  # wraps around, as in C
        wide = torch.stack([value(rank, dtype, size) for rank in range(ranks)]).prod(
            0, dtype=torch.int64
        )
        return wide.to(dtype)
    return reduced.to(dtype)


def check(what: str, found: torch.Tensor, wanted: torch.Tensor) -> None:
    found = found.cpu()
    close = torch.allclose(
        found.double(), wanted.double(), rtol=2e-2 if found.element_size() == 2 else 1e-6
    )
    assert close, f"{what}: {found.tolist()} is not {wanted.tolist()}"


def reductions(rank: int, ranks: int) -> int:
    count = 0
    for dtype, op in itertools.product((*INTEGERS, *FLOATS), ("SUM", "PRODUCT", "MIN", "MAX", "AVG")):
        if op == "AVG" and dtype in INTEGERS:
            continue
        reduction = getattr(dist.ReduceOp, op)
        mine = value(rank, dtype).cuda()
        dist.all_reduce(mine, op=reduction)
        check(f"all_reduce {dtype} {op}", mine, expected(op, ranks, dtype))
        mine = value(rank, dtype).cuda()
        dist.reduce(mine, dst=ranks - 1, op=reduction)
        if rank == ranks - 1:
            check(f"reduce {dtype} {op}", mine, expected(op, ranks, dtype))
        out = torch.empty(SIZE, dtype=dtype, device="cuda")
        dist.reduce_scatter_tensor(out, value(rank, dtype, SIZE * ranks).cuda(), op=reduction)
        wanted = expected(op, ranks, dtype, SIZE * ranks)[rank * SIZE : (rank + 1) * SIZE]
        check(f"reduce_scatter {dtype} {op}", out, wanted)
        count += 3
    return count


def exchanges(rank: int, ranks: int) -> int:
    count = 0
    for dtype in (*INTEGERS, *FLOATS, torch.float8_e4m3fn, torch.bool):
        all_ = [value(other, torch.int32).to(dtype) for other in range(ranks)]
        mine = all_[rank].cuda()
        out = torch.empty(SIZE * ranks, dtype=dtype, device="cuda")
        dist.all_gather_into_tensor(out, mine)
        check(f"all_gather {dtype}", out, torch.cat(all_))
        got = all_[rank].cuda()
        dist.broadcast(got, src=ranks - 1)
        check(f"broadcast {dtype}", got, all_[-1])
        whole = torch.arange(ranks).repeat_interleave(2).to(dtype).cuda()
        out = torch.empty_like(whole)
        dist.all_to_all_single(out, whole)
        check(f"all_to_all {dtype}", out, torch.full((2 * ranks,), rank).to(dtype))
        parts = [torch.empty_like(mine) for _ in range(ranks)]
        dist.gather(mine, parts if rank == 0 else None, dst=0)
        if rank == 0:
            check(f"gather {dtype}", torch.cat([part.cpu() for part in parts]), torch.cat(all_))
        one = torch.empty_like(mine)
        dist.scatter(one, [part.cuda() for part in all_] if rank == 0 else None, src=0)
        check(f"scatter {dtype}", one, all_[rank])
        sends = dist.P2POp(dist.isend, mine, (rank + 1) % ranks)
        receives = dist.P2POp(dist.irecv, one, (rank - 1) % ranks)
        for work in dist.batch_isend_irecv([sends, receives]):
            work.wait()
        check(f"send and receive {dtype}", one, all_[(rank - 1) % ranks])
        count += 6
    return count


def main() -> None:
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)  # of a known device, groups are split off
    rank, ranks = dist.get_rank(), dist.get_world_size()
    count = reductions(rank, ranks) + exchanges(rank, ranks)
    half = dist.new_group(list(range(ranks // 2, ranks)))
    if rank >= ranks // 2:
        mine = value(rank, torch.float32).cuda()
        dist.all_reduce(mine, group=half)
        check("subgroup", mine, sum(value(r, torch.float32) for r in range(ranks // 2, ranks)))  # type: ignore[arg-type]
    scaled = value(rank, torch.float32).cuda()
    dist.all_reduce(scaled, op=dist._make_nccl_premul_sum(0.5))
    check("premultiplied sum", scaled, expected("SUM", ranks, torch.float32) / 2)
    large = torch.full((1 << 20,), float(rank)).cuda()
    dist.all_reduce(large)
    check("large", large, torch.full((1 << 20,), float(ranks * (ranks - 1) // 2)))
    print(f"rank {rank}: {count + 3} results are right", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
