"""The programs of test_gpu.py: `cases.py NAME` prints one JSON object. One process, NCCL, one GPU."""

import json
import os
import sys
import time

import torch
import torch.distributed as dist

import zeromon_agents


def begin() -> torch.optim.Optimizer:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29577")
    torch.cuda.set_device(0)
    dist.init_process_group("nccl", rank=0, world_size=1)
    zeromon_agents.start()
    return torch.optim.SGD([torch.zeros(8, device="cuda", requires_grad=True)], 0.1)


def step(optimizer: torch.optim.Optimizer) -> None:
    (optimizer.param_groups[0]["params"][0] * 1).sum().backward()
    optimizer.step()


def exposed() -> dict:
    optimizer = begin()
    side, main = torch.cuda.Stream(), torch.cuda.current_stream()
    total = 0.0
    for _ in range(8):
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
        with torch.cuda.stream(side):
            torch.cuda._sleep(50_000_000)
            work = dist.all_reduce(torch.ones(1 << 20, device="cuda"), async_op=True)
        torch.cuda._sleep(25_000_000)
        marks[0].record(main)
        work.wait()
        marks[1].record(main)
        step(optimizer)
        torch.cuda.synchronize()
        total += marks[0].elapsed_time(marks[1]) / 1e3
    step(optimizer)
    return {"exposed_seconds": total}


def memory() -> dict:
    optimizer = begin()
    kept = [torch.ones(1 << 20, device="cuda") for _ in range(5)]
    for _ in range(3):
        step(optimizer)
    facts = {
        "allocated": torch.cuda.memory_allocated(),
        "reserved": torch.cuda.memory_reserved(),
        "capacity": torch.cuda.mem_get_info()[1],
        "kept": len(kept),
    }
    time.sleep(2.5)  # the collector asks NVML once a second
    return facts


def out_of_memory() -> dict:
    optimizer = begin()
    step(optimizer)
    try:
        torch.empty(1 << 50, dtype=torch.uint8, device="cuda")
    except torch.OutOfMemoryError:
        pass
    for _ in range(9):
        step(optimizer)
    return {"ooms": torch.cuda.memory_stats()["num_ooms"]}


def no_sync() -> dict:
    optimizer = begin()
    step(optimizer)
    torch.cuda.set_sync_debug_mode("error")
    errors = 0
    for _ in range(20):
        try:
            dist.all_reduce(torch.ones(1 << 16, device="cuda"))
            step(optimizer)
        except RuntimeError:
            errors += 1
    torch.cuda.set_sync_debug_mode("default")
    return {"errors": errors}


def graph() -> dict:
    optimizer = begin()
    tensor = torch.ones(4, device="cuda")
    dist.all_reduce(tensor)
    torch.cuda.synchronize()
    captured = torch.cuda.CUDAGraph()
    with torch.cuda.graph(captured):
        tensor.mul_(2)
        dist.all_reduce(tensor)
    for _ in range(3):
        captured.replay()
    step(optimizer)
    return {"value": tensor.tolist(), "expected": [8.0] * 4}


if __name__ == "__main__":
    print(json.dumps(globals()[sys.argv[1]]()), flush=True)
    dist.destroy_process_group()
