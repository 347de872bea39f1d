"""One script on CPUs by gloo and in `zeromon preflight`: equal collectives, bytes and memory roles."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from support import ROOT

from vgpu.environment import Environment
from vgpu.preflights import launch_words, run_preflight, run_zeromon

pytestmark = pytest.mark.vgpu

STEPS = 6
ROLES = {
    "parameters": ("sharded_param", "unsharded_param", "master_param"),
    "gradients": ("sharded_grad", "unsharded_grad"),
    "optimizer states": ("optimizer_state",),
}


def rank_facts(rank: dict[str, Any]) -> dict[str, Any]:
    """Collectives of each step, collectives by kind, bytes by role: of one rank of a run's JSON."""
    steps = [(s["step"], s["collectives"], s["collective_bytes"]) for s in rank["steps"]["recent"]]
    kinds = {c["op"]: (c["count"], c["nbytes"]) for c in rank["communication"]["collectives"]}
    roles = {r["role"]: r["device_bytes"] + r["host_bytes"] for r in rank["memory"]["roles"]}
    return {"steps": steps, "kinds": kinds, "roles": roles}


def table_row(strategy: str, facts: dict[str, Any]) -> str:
    """The row of docs/how-to/preflight.md: the last step, and bytes by role."""
    _, count, nbytes = facts["steps"][-1]
    sizes = [sum(facts["roles"].get(role, 0) for role in roles) for roles in ROLES.values()]
    return " | ".join(["| " + strategy, *(f"{number:,}" for number in (count, nbytes, *sizes))]) + " |"


@pytest.mark.parametrize(
    ("name", "strategy"),
    [("DDP", "ddp"), ("FSDP1", "fsdp1"), ("FSDP2", "fsdp2"),
     ("ZeRO-2", "zero2"), ("ZeRO-3", "zero3")],
)  # fmt: skip
def test_a_script_does_the_same_on_gloo(
    name: str, strategy: str, virtual_cuda: Environment, tmp_path: Path
) -> None:
    """All ranks, all modelled steps; the page has the figures of rank 0."""
    on_cpu = launch_words(sys.executable, 2, "user_llama.py", strategy)
    places = {"DS_ACCELERATOR": "cpu", "ZEROMON_DIR": str(tmp_path / "live")}
    run_zeromon(tmp_path, "run", "--quiet", "--name", "gloo", "--", *on_cpu, **places)
    real = json.loads(run_zeromon(tmp_path, "report", "--json", "gloo", **places))
    on_device = launch_words(virtual_cuda.python, 2, "user_llama.py", strategy)
    modelled = run_preflight(tmp_path, ["--steps", "1000"], on_device)["run"]
    devices = [[rank["device"] for rank in run["ranks"]] for run in (real, modelled)]
    assert devices == [["cpu", "cpu"], ["cuda:0 (virtual)", "cuda:1 (virtual)"]]
    for cpu, device in zip(real["ranks"], modelled["ranks"], strict=True):
        assert cpu["strategy"] == device["strategy"]
        facts = rank_facts(cpu)
        assert len(facts["steps"]) == STEPS and min(count for _, count, _ in facts["steps"]) > 0
        virtual = rank_facts(device)
        # The record of a preflight has the steps whose clock was modelled: not the first or last
        assert set(virtual.pop("steps")) == set(facts.pop("steps")[2:-1])
        assert virtual == facts
    row = table_row(name, rank_facts(modelled["ranks"][0]))
    assert row in (ROOT / "docs" / "how-to" / "preflight.md").read_text(), row
