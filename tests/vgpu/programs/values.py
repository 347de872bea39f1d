"""Prints what the host reads from the device: known values, unknown ones, and objects of all ranks."""

import json
import os

import torch
import torch.distributed as dist


def main() -> None:
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl")
    rank = dist.get_rank()
    for size in range(40):  # leaves other bytes on each rank, which tensors get later
        torch.arange(64 + size + rank).cuda()
    numbers = torch.tensor([5, 9 + rank], device="cuda")
    maximum = torch.tensor(5 + rank, device="cuda")
    dist.all_reduce(maximum, op=dist.ReduceOp.MAX)
    objects: list[str] = [""] * dist.get_world_size()
    dist.all_gather_object(objects, "x" * (1 + 700 * rank))
    sent = ["a" * 600, {"b": 1}] if rank == 0 else [None, None]
    dist.broadcast_object_list(sent)
    counter = torch.zeros(2, device="cuda")
    counter[0] += 2.5
    known = {
        "numbers": numbers.tolist(), "maximum": maximum.item(), "less": bool(numbers[0] < numbers[1]),
        "sum": torch.sum(torch.tensor([3, 4, 5], device="cuda")).item(), "counter": counter.tolist(),
        "full": torch.full((), 65536.0, device="cuda").item(), "objects": [len(one) for one in objects],
        "sent": sent[1],
    }  # fmt: skip
    values = torch.randn(1000, device="cuda")
    loss = values.mean()
    mask = values > 0
    unknown = {
        "loss": loss.item(), "norm": values.norm().item(), "isfinite": bool(torch.isfinite(loss)),
        "isnan": bool(torch.isnan(values).any()), "all": bool(mask.all()), "count": mask.sum().item(),
        "argmax": values.argmax().item(), "nonzero": list(values.nonzero().shape),
        "some": values[:4].tolist(), "equal": torch.equal(values, values),
    }  # fmt: skip
    weights = torch.randn(100_000)
    print(f"rank {rank} known {json.dumps(known)}")
    print(f"rank {rank} unknown {json.dumps(unknown)}")
    print(f"rank {rank} same weights {torch.equal(weights.cuda().cpu(), weights)}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
