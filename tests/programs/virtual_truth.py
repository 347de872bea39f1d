"""Watches FSDP2 on virtual streams with the real agent; prints what both say of the exposed time.

``virtual_truth.py NAME...`` takes the named cases, by default all. For each it prints a JSON object: the
exposed nanoseconds by operation, unit and phase, of the schedule and of the records of the agent.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import torch

import zeromon_agents.runtime.agent as agent_module
from zeromon.ring.buffer import NameKind, RingReader
from zeromon.ring.events import Done, Stall, decode
from zeromon_agents.observe.accelerator import Accelerator
from zeromon_agents.observe.device_timer import DeviceTimer
from zeromon_agents.runtime.agent import Agent
from zeromon_agents.runtime.rank_info import RankInfo
from zeromon_virtual.result import summarize
from zeromon_virtual.spec import from_json
from zeromon_virtual.step import Job, job

SPEC: dict[str, Any] = {
    "model": {
        "layers": 4, "hidden": 1024, "heads": 8, "ffn": 4096, "sequence": 512, "vocabulary": 8000,
    },
    "device": {"flops_per_second": {"default": 60e12}, "bytes_per_second": 2e12},
    "link": {"latency_seconds": 2e-5, "bytes_per_second": 20e9},
    "micro_batch": 4,
    "steps": 2,
}  # fmt: skip
"""A slow link: each case exposes some of its communication."""

HSDP = {"shards": 4, "replicas": 2}
CASES: dict[str, dict[str, Any]] = {
    "default": {},
    "no prefetch": {"prefetch": 0},
    "two units ahead": {"prefetch": 2},
    "stays gathered after forward": {"reshard_after_forward": False},
    "root reshards, too": {"reshard_after_forward": True},
    "mixed precision": {"param_dtype": "bfloat16", "reduce_dtype": "float32"},
    "HSDP": HSDP,
    "HSDP, mixed precision": HSDP | {"param_dtype": "bfloat16", "reduce_dtype": "float32"},
    "HSDP, no prefetch": HSDP | {"prefetch": 0},
    "2 micro-steps": {"micro_steps": 2},
    "2 micro-steps, one reduction": {"micro_steps": 2, "sync_each_micro_step": False},
    "2 micro-steps, gathered once": {
        "micro_steps": 2, "reshard_after_forward": False, "reshard_after_backward": False,
    },
    "HSDP, 2 micro-steps, one reduction": HSDP | {"micro_steps": 2, "sync_each_micro_step": False},
    "activation checkpointing": {"activation_checkpointing": True},
}  # fmt: skip

Figures = Counter[tuple[str, str, str]]


def by_schedule(running: Job, steps: int) -> tuple[Figures, dict[str, Any]]:
    """Takes the steps; what blocked the compute stream, by the schedule alone."""
    began = running.engine.clock.host_ns
    for _ in range(steps):
        running.step()
    result = summarize(running.engine, began, with_spans=False).as_json()
    exposed = running.engine.clock.exposed_ns
    return Counter({tuple(issue): ns for issue, ns in exposed.items() if ns}), result


def by_agent(ring: Path) -> Figures:
    """What the agent wrote as blocked, by the same keys."""
    reader, found = RingReader(ring), Counter()
    events = [decode(raw) for raw in reader.read(final=True)]
    units = {name.id: name.payload["fqn"] for name in reader.names() if name.kind == NameKind.UNIT}
    for event in events:
        if isinstance(event, (Done, Stall)) and event.blocked_ns:
            found[event.op.label, units.get(event.unit, ""), event.phase.label] += event.blocked_ns
    return found


def watched(case: str, folder: Path) -> dict[str, Any]:
    """Takes the steps of a case with the agent, whose device is the virtual one."""
    spec = from_json(SPEC | {"sharding": {"shards": 8} | CASES[case]})
    with job(spec) as running:
        device = Accelerator("virtual", torch.virtual)
        agent_module.DeviceTimer = lambda context: DeviceTimer(context, device)
        agent = Agent(folder, RankInfo())
        agent.start()
        truth, result = by_schedule(running, spec.steps)
        agent.device.poll()
        kept = agent.stop()
        return {
            "case": case,
            "schedule": sorted([*key, ns] for key, ns in truth.items()),
            "agent": sorted([*key, ns] for key, ns in by_agent(agent.ring.path).items()),
            "result": result,
            "errors": agent.guard.message() or "",
            "kept": kept,
        }


def main() -> None:
    # one node, and a collector elsewhere
    os.environ.update(LOCAL_RANK="0", LOCAL_WORLD_SIZE="8")
    agent_module.ensure_collector = lambda *_: None
    with tempfile.TemporaryDirectory() as folder:
        for number, case in enumerate(sys.argv[1:] or CASES):
            run_dir = Path(folder) / str(number)
            run_dir.mkdir()
            print(json.dumps(watched(case, run_dir)), flush=True)


if __name__ == "__main__":
    main()
