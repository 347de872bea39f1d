"""One profiled step of the example's GPT under FSDP2: `peak.py`; rank 0 prints JSON.

torch's profiler hears of every allocation on the CPU: the most that was alive at once in a step, on top
of what stood when it began (the shards and the optimizer's state, counted from the tensors themselves).
"""

import json
import sys
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from leave import leave
from torch.distributed.fsdp import fully_shard
from torch.profiler import ProfilerActivity, profile

sys.path.insert(0, str(Path(__file__).parent))
from planned import BATCH, LENGTH, build


def peak_of(trace: Path) -> int:
    """The highest running sum of allocations and frees."""
    events = json.loads(trace.read_text())["traceEvents"]
    memory = sorted(
        (e["ts"], e["args"]["Bytes"])
        for e in events
        if e.get("name") == "[memory]" and e["args"].get("Device Type") == 0
    )
    now = peak = 0
    for _, nbytes in memory:
        now += nbytes
        peak = max(peak, now)
    return peak


def main() -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = build()
    for block in model.layers:
        fully_shard(block)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    tokens = torch.zeros((BATCH, LENGTH), dtype=torch.long)

    def step() -> None:
        model(tokens).float().pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(3):
        step()
    shards = [p.to_local() for p in model.parameters()]
    states = [v for s in optimizer.state.values() for v in s.values() if v.ndim]
    standing = sum(t.nbytes for t in shards) + sum(s.to_local().nbytes for s in states)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        step()
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(trace))
        found = {"standing": standing, "peak": standing + peak_of(trace)}
    if dist.get_rank() == 0:
        print(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
    leave()
