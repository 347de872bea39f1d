"""One script on CPUs by gloo and in `zeromon preflight`: equal collectives, bytes and memory roles."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support import ROOT, clean_environment

from vgpu.environment import Environment

pytestmark = pytest.mark.vgpu

SCRIPT = ROOT / "tests" / "vgpu" / "programs" / "user_llama.py"
STEPS = 6
ROLES = {
    "parameters": ("sharded_param", "unsharded_param", "master_param"),
    "gradients": ("sharded_grad", "unsharded_grad"),
    "optimizer states": ("optimizer_state",),
}
LAUNCH = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(SCRIPT))


def rank_facts(rank: dict[str, Any]) -> dict[str, Any]:
    """Collectives of each step, collectives by kind, bytes by role: of one rank of a run's JSON."""
    steps = [(s["step"], s["collectives"], s["collective_bytes"]) for s in rank["steps"]["recent"]]
    kinds = {c["op"]: (c["count"], c["nbytes"]) for c in rank["communication"]["collectives"]}
    roles = {r["role"]: r["device_bytes"] + r["host_bytes"] for r in rank["memory"]["roles"]}
    return {"steps": steps, "kinds": kinds, "roles": roles}


def table_row(strategy: str, facts: dict[str, Any]) -> str:
    """The row of docs/preflight.md: the last step, and bytes by role."""
    _, count, nbytes = facts["steps"][-1]
    sizes = [sum(facts["roles"].get(role, 0) for role in roles) for roles in ROLES.values()]
    return " | ".join(["| " + strategy, *(f"{number:,}" for number in (count, nbytes, *sizes))]) + " |"


@pytest.mark.parametrize(
    ("name", "strategy"),
    [("DDP", "ddp"), ("FSDP1", "fsdp1"), pytest.param("FSDP2", "fsdp2", marks=pytest.mark.short),
     ("ZeRO-2", "zero2"), ("ZeRO-3", "zero3")],
)  # fmt: skip
def test_a_script_does_the_same_on_gloo(
    name: str, strategy: str, virtual_cuda: Environment, tmp_path: Path
) -> None:
    """All ranks, all steps; the page has the figures of rank 0."""
    variables = {
        **clean_environment(), "PYTHONPATH": str(ROOT), "ZEROMON_STORE": str(tmp_path / "store"),
        "XDG_CACHE_HOME": str(tmp_path.parent / "cache"),
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
    }  # fmt: skip

    def zeromon(*arguments: str, **extra: str) -> str:
        command = [sys.executable, "-m", "zeromon", *arguments]
        done = subprocess.run(
            command, env=variables | extra, cwd=tmp_path, capture_output=True, text=True, check=False,
            timeout=300,
        )  # fmt: skip
        assert done.returncode in (0, 1) and "Traceback" not in done.stderr, done.stderr
        return done.stdout

    on_cpu = (sys.executable, *LAUNCH, strategy)
    ring_folder = str(tmp_path / "live")
    zeromon(
        "run", "--quiet", "--name", "gloo", "--", *on_cpu, DS_ACCELERATOR="cpu", ZEROMON_DIR=ring_folder
    )
    real = json.loads(zeromon("report", "--json", "gloo", ZEROMON_DIR=ring_folder))
    in_preflight = (str(virtual_cuda.python), *LAUNCH, strategy)
    modelled = json.loads(zeromon("preflight", "--json", "--steps", "1000", "--", *in_preflight))["run"]
    devices = [[rank["device"] for rank in run["ranks"]] for run in (real, modelled)]
    assert devices == [["cpu", "cpu"], ["cuda:0", "cuda:1"]]
    for cpu, device in zip(real["ranks"], modelled["ranks"], strict=True):
        assert cpu["strategy"] == device["strategy"]
        facts = rank_facts(cpu)
        assert len(facts["steps"]) == STEPS and min(count for _, count, _ in facts["steps"]) > 0
        assert rank_facts(device) == facts
    row = table_row(name, rank_facts(modelled["ranks"][0]))
    assert row in (ROOT / "docs" / "preflight.md").read_text(), row
