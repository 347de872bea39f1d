"""Two ranks that do not agree on a collective: ``hangs.py sizes|operations|missing|abort|late|killed``.

NCCL's watchdog ends it; or rank 0 does, by an abort. After some steps, ``late`` lets rank 1 sleep and
``killed`` kills it; rank 0 waits until the test ends it.
"""

from __future__ import annotations

import datetime
import os
import signal
import sys
import time

import torch
import torch.distributed as dist

WATCHDOG = datetime.timedelta(seconds=10)
STEPS = 12


def train(total: torch.Tensor) -> None:
    """Steps that all ranks take together."""
    model = torch.nn.Linear(8, 8, device="cuda")
    optimizer = torch.optim.SGD(model.parameters())
    for _ in range(STEPS):
        model(torch.ones(8, 8, device="cuda")).sum().backward()
        dist.all_reduce(total)
        optimizer.step()
        optimizer.zero_grad()


def main() -> None:
    case = sys.argv[1]
    is_after_steps = case in ("late", "killed")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    # Of a known device: the communicator is there before the first collective.
    timeout = datetime.timedelta(minutes=5) if is_after_steps else WATCHDOG
    dist.init_process_group("nccl", timeout=timeout, device_id=device)
    is_odd = dist.get_rank() == 1
    total = torch.ones(1 << 10, device="cuda")
    if is_after_steps:
        train(total)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the launcher's, once rank 1 is killed
    torch.cuda.synchronize()
    if case == "sizes":
        dist.all_reduce(total[: 1 << 9] if is_odd else total)
    elif case == "operations" and is_odd:
        dist.broadcast(total, src=0)
    elif case in ("missing", "late") and is_odd:
        time.sleep(60)
    elif case == "killed" and is_odd:
        os.kill(os.getpid(), signal.SIGKILL)
    elif case != "abort" or not is_odd:
        dist.all_reduce(total)
    if case == "abort":
        dist.distributed_c10d._abort_process_group()
    torch.cuda.synchronize()
    print(f"rank {int(is_odd)} went on", flush=True)


if __name__ == "__main__":
    main()
