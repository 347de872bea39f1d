"""Triton on a device: ``graph`` compiles to CUDA graphs, ``kernel`` launches a kernel of its own."""

from __future__ import annotations

import sys

import torch
import triton
from vgpu.marks import mark

STEPS = 5


@triton.jit
def increment_values(values):  # type: ignore[no-untyped-def]
    pass


def replay_graphs() -> None:
    """Trains a layer by graphs, which inductor records in the second step."""
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.GELU()).cuda()
    compiled = torch.compile(model, mode="reduce-overhead")
    x = torch.zeros(64, 64, device="cuda")
    for number in range(STEPS):
        mark(f"step {number}")
        compiled(x).sum().backward()
        model.zero_grad(set_to_none=True)
        torch.cuda.synchronize()
    mark(f"step {STEPS}")


def main() -> None:
    torch.cuda.set_device(0)
    if sys.argv[1] == "graph":
        replay_graphs()
    else:
        increment_values[(1,)](torch.zeros(64, device="cuda"))
    torch.cuda.synchronize()


if __name__ == "__main__":
    main()
