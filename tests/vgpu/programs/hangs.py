"""Two ranks that do not agree on a collective: ``hangs.py sizes|operations|missing|abort``.

NCCL's watchdog ends it; or rank 0 does, by an abort.
"""

from __future__ import annotations

import datetime
import os
import sys
import time

import torch
import torch.distributed as dist

WATCHDOG = datetime.timedelta(seconds=5)


def main() -> None:
    case = sys.argv[1]
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    # Of a known device: the communicator is there before the first collective.
    dist.init_process_group("nccl", timeout=WATCHDOG, device_id=device)
    is_odd = dist.get_rank() == 1
    total = torch.ones(1 << 10, device="cuda")
    torch.cuda.synchronize()
    if case == "sizes":
        dist.all_reduce(total[: 1 << 9] if is_odd else total)
    elif case == "operations" and is_odd:
        dist.broadcast(total, src=0)
    elif case == "missing" and is_odd:
        time.sleep(60)
    elif case != "abort" or not is_odd:
        dist.all_reduce(total)
    if case == "abort":
        dist.distributed_c10d._abort_process_group()
    torch.cuda.synchronize()
    print(f"rank {int(is_odd)} went on", flush=True)


if __name__ == "__main__":
    main()
