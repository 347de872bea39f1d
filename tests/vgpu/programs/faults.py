"""A product and an all_reduce in each of four steps, and what NVML says then: one JSON object a rank.

``--on-host``: NVML alone, without the device.
"""

from __future__ import annotations

import datetime
import json
import os
import sys
import time
from typing import Any

import torch
import torch.distributed as dist

from zeromon.probes.nvml import Nvml

STEPS, SIZE = 4, 1 << 22
WATCHDOG = datetime.timedelta(seconds=8)


def train(device: int) -> dict[str, Any]:
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", timeout=WATCHDOG)
    sums, different = [], []
    matrix = torch.zeros(4096, 4096, dtype=torch.bfloat16, device="cuda")
    ones = torch.ones(SIZE)
    for _ in range(STEPS):
        total = ones.cuda()
        matrix @ matrix
        dist.all_reduce(total)
        values = total.cpu()
        sums.append(values[-1].item())
        different.append(int((values != values[-1]).sum()))
    return {"sums": sums, "different": different}


def main() -> None:
    device = int(os.environ["LOCAL_RANK"])
    facts = {} if "--on-host" in sys.argv else train(device)
    nvml = Nvml()
    # As NVML spells what torch calls ZZZZ...: the last byte is the device.
    uuid = f"5a5a5a5a-5a5a-5a5a-5a5a-5a5a5a5a5a{device + 1:02x}"
    reading = nvml.read(uuid, time.monotonic_ns())
    facts |= {
        "xid": reading and reading.xid, "ecc": reading and reading.ecc_errors,
        "throttle": reading and reading.throttle_reasons, "memory": reading and reading.used_bytes,
    }  # fmt: skip
    sys.stdout.write(f"rank {os.environ['RANK']} facts {json.dumps(facts)}\n")
    sys.stdout.flush()
    if "--on-host" not in sys.argv:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
