"""The job of bench_fit.py under accelerate's `find_executable_batch_size`.

Prints a line for each size that a rank tries, and one for what it found. With --room, an allocation
beyond so many MiB fails, as on a device; without it the kernel decides.
"""

from __future__ import annotations

import argparse
import gc
import resource
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from accelerate.utils import find_executable_batch_size

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))

import train_gpt


def limit_allocations(room_mib: int) -> None:
    """Lets the process take so much more address space than it has."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    most = pages * resource.getpagesize() + (room_mib << 20)
    resource.setrlimit(resource.RLIMIT_AS, (most, most))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--strategy", default="ddp")
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--heads", type=int, default=2)
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--start", type=int, default=128, help="accelerate's default")
    parser.add_argument("--room", type=int, help="MiB")
    options = parser.parse_args()
    options.data, options.precision, options.seed, options.lr = None, "fp32", 0, 1e-3
    dist.init_process_group("gloo")
    rank, device = dist.get_rank(), torch.device("cpu")
    text = train_gpt.read_text(options)
    if options.room:
        dist.barrier()
        limit_allocations(options.room)

    @find_executable_batch_size(starting_batch_size=options.start)
    def train(batch_size: int) -> int:
        gc.collect()  # what the failed try still holds
        print(f"rank {rank} tries {batch_size}", flush=True)
        options.batch = batch_size
        torch.manual_seed(0)
        model = train_gpt.GPT(options.width, options.layers, options.heads, options.length, False)
        model = train_gpt.wrap(model, options, device)
        optimizer = train_gpt.make_optimizer(model, options)
        source = train_gpt.batches(options, text)
        for _ in range(options.steps):
            tokens, targets = next(source)
            F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten()).backward()
            optimizer.step()
            optimizer.zero_grad()
        return batch_size

    print(f"rank {rank} found {train()}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
