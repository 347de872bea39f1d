"""All sixteen ranks of a model of seven billion parameters run on one machine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from published_figures import GIB, MODELS

from vgpu.environment import Environment
from vgpu.preflights import launch_words, run_preflight

pytestmark = [pytest.mark.vgpu, pytest.mark.long]

SETTINGS = "--framework fsdp2 --precision fsdp-mixed --micro-batch 1 --length 2048 --steps 3".split()


def rank_figures(rank: dict[str, Any]) -> dict[str, Any]:
    """Peak, bytes by role, collectives of each step that has ended."""
    roles = {role["role"]: role["device_bytes"] for role in rank["memory"]["roles"]}
    steps = {s["step"]: (s["collectives"], s["collective_bytes"]) for s in rank["steps"]["recent"]}
    return {"peak": rank["memory"]["device"]["peak_bytes"], "roles": roles, "step": steps[1]}


def test_sixteen_ranks_run_and_four_stand_for_them(virtual_cuda: Environment, tmp_path: Path) -> None:
    """Two nodes of eight devices: peaks within 1 %, the same roles and collectives of a step."""
    config = tmp_path / "config.json"
    config.write_text(json.dumps(MODELS["Llama 7B"]))
    launch = launch_words(virtual_cuda.python, 8, "figure.py", str(config), *SETTINGS)
    options = ["--nodes", "2", "--steps", "2"]
    every, some = (
        run_preflight(tmp_path, [*options, "--processes", count], launch, seconds=1200)
        for count in ("16", "4")
    )
    assert every["preflight"]["fits"] and every["preflight"]["outcome"] == ""
    assert (every["preflight"]["representatives"], len(every["run"]["ranks"])) == ([], 16)
    assert some["preflight"]["representatives"] == [0, 1, 8, 15]
    of_rank = {rank["rank"]: rank for rank in every["run"]["ranks"]}
    for rank in some["run"]["ranks"]:
        few, all_ = rank_figures(rank), rank_figures(of_rank[rank["rank"]])
        assert few["peak"] == pytest.approx(all_["peak"], rel=0.01)
        assert (few["roles"], few["step"]) == (all_["roles"], all_["step"])
    shard_bytes = 4 * 6_738_415_616 / 16
    for rank in of_rank.values():
        assert rank["memory"]["rss_bytes"] < GIB  # the model is on no host
        roles = rank_figures(rank)["roles"]
        assert roles["sharded_param"] == pytest.approx(shard_bytes, rel=0.001)
        assert roles["optimizer_state"] == pytest.approx(2 * shard_bytes, rel=0.001)
