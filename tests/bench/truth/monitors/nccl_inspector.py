"""NCCL Inspector: a profiler plugin that NCCL loads, one JSON line per sampled collective."""

from __future__ import annotations

import json
from collections import defaultdict
from typing import Any

from monitor import Monitor, Run

FIRST = 20
"""Records before this number of an operation are of the first steps."""


def _after(run: Run) -> dict[str, Any]:
    """Bytes and time of communication per step: means of records, times the calls that NCCL counts."""
    calls: defaultdict[str, list[dict[str, Any]]] = defaultdict(list)
    for path in (run.folder / "inspector").glob("*.log"):
        rows = [json.loads(line) for line in path.read_text().splitlines() if line.endswith("}")]
        for row in rows:
            if row["header"]["rank"] == 0:
                record, name = row["coll_perf"], row["coll_perf"]["coll"]
                if name in ("AllGather", "ReduceScatter"):  # the message is the part of one rank
                    record["coll_msg_size_bytes"] *= row["header"]["n_ranks"]
                calls[name].append(record)
    nbytes = seconds = 0.0
    for records in calls.values():
        per_step = (1 + max(record["coll_sn"] for record in records)) / run.case["steps"]
        if per_step < 0.5:  # set-up, not training
            continue
        later = [record for record in records if record["coll_sn"] >= FIRST] or records
        nbytes += per_step * sum(one["coll_msg_size_bytes"] for one in later) / len(later)
        seconds += per_step * sum(one["coll_exec_time_us"] for one in later) / len(later) / 1e6
    return {"bytes": nbytes, "communication": seconds} if calls else {}


MONITOR = Monitor(
    "NCCL Inspector", "torch", lines=0,
    answers={"gloo": [], "virtual": ["healthy-ddp", "healthy-fsdp2", "poor-ddp"]},
    environment={
        "NCCL_PROFILER_PLUGIN": "libnccl-profiler-inspector.so", "NCCL_INSPECTOR_ENABLE": "1",
        "NCCL_INSPECTOR_DUMP_THREAD_INTERVAL_MICROSECONDS": "500",
        "NCCL_INSPECTOR_DUMP_DIR": "{folder}/inspector",
    },
    after=_after, url="https://github.com/NVIDIA/nccl",
)  # fmt: skip
