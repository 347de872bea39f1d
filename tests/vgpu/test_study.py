"""The lab of examples/study: what ZeRO-2 holds and sends for a small model, to the byte."""

from __future__ import annotations

from pathlib import Path

import pytest
from lab import RANKS, Job, run_job

from vgpu.environment import CACHE, Environment

pytestmark = [pytest.mark.vgpu, pytest.mark.short]

WIDTH, LAYERS, POSITIONS = 256, 2, 512
PSI = LAYERS * (12 * WIDTH**2 + 13 * WIDTH) + (2 * 256 + POSITIONS + 2) * WIDTH
SHAPE = {"width": WIDTH, "layers": LAYERS, "heads": 4, "positions": POSITIONS}


def test_zero_2_has_the_states_of_the_paper_and_reduces_each_gradient_once(
    virtual_cuda: Environment, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """2 Psi of parameters and 14 Psi / N of the rest; 2 Psi are sent where no bucket is all-reduced."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(CACHE))
    monkeypatch.setenv("ZEROMON_STORE", str(tmp_path))
    job = Job("zero2", SHAPE, {"use_multi_rank_bucket_allreduce": False})
    result = run_job(job, virtual_cuda.python, lambda _: None)
    assert result.outcome == ""
    roles = {role: nbytes for role, nbytes in result.roles.items() if nbytes}
    states = {"unsharded_param": 2 * PSI, "master_param": PSI, "optimizer_state": 2 * PSI}
    assert {role: roles[role] for role in states} == states
    assert result.collectives["reduce"] == 2 * PSI
    assert result.collectives["all_gather"] == 2 * PSI
    assert RANKS == 4 and result.peak > sum(states.values())
