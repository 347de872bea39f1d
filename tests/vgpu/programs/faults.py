"""A product and an all_reduce in each of four steps, and what NVML says then: one JSON object a rank."""

from __future__ import annotations

import datetime
import json
import os
import time

import torch
import torch.distributed as dist
from vgpu.marks import mark

from zeromon.probes.nvml import Nvml

STEPS, SIZE = 4, 1 << 10
WATCHDOG = datetime.timedelta(seconds=4)


def main() -> None:
    device = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", timeout=WATCHDOG)
    rank, sums, different, failure = dist.get_rank(), [], [], ""
    matrix = torch.zeros(4096, 4096, dtype=torch.bfloat16, device="cuda")
    ones = torch.ones(SIZE)
    try:
        for step in range(STEPS):
            mark(f"step {step}")
            total = ones.cuda()
            matrix @ matrix
            dist.all_reduce(total)
            values = total.cpu()
            sums.append(values[0].item())
            different.append(int((values != values[-1]).sum()))
        mark(f"step {STEPS}")
        torch.cuda.synchronize()
    except torch.AcceleratorError as error:
        failure = str(error).splitlines()[0]
    nvml = Nvml()
    uuids = nvml.uuids()
    reading = nvml.read(uuids[device], time.monotonic_ns()) if uuids else None
    facts = {
        "sums": sums, "different": different, "failure": failure, "xid": reading and reading.xid,
        "throttle": reading and reading.throttle_reasons, "ecc": reading and reading.ecc_errors,
        "memory": reading and reading.used_bytes,
    }  # fmt: skip
    print(f"rank {rank} facts {json.dumps(facts)}", flush=True)
    if not failure:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
