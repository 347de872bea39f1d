"""The lab of examples/study: bytes of a small model, and jobs that end badly."""

from __future__ import annotations

from pathlib import Path

import pytest
from lab import OUT_OF_MEMORY, RANKS, Job, Lab, run_job

from vgpu.environment import CACHE, Environment

pytestmark = pytest.mark.vgpu

WIDTH, LAYERS, POSITIONS = 256, 2, 512
PSI = LAYERS * (12 * WIDTH**2 + 13 * WIDTH) + (2 * 256 + POSITIONS + 2) * WIDTH
SHAPE = {"width": WIDTH, "layers": LAYERS, "heads": 4, "positions": POSITIONS}


@pytest.mark.short
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


def test_a_job_ends_well_out_of_memory_or_with_its_error(
    virtual_cuda: Environment, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A job that fails ends the study and is not kept; one that runs out of memory is a result."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(CACHE))
    monkeypatch.setenv("ZEROMON_STORE", str(tmp_path))
    lab = Lab(virtual_cuda.python, tmp_path, lambda _: None)
    large = {**SHAPE, "width": 1024, "layers": 8}
    assert lab.run(Job("ddp", large, gpu="1GiB")).outcome == OUT_OF_MEMORY
    with pytest.raises(SystemExit, match=r"failed: .*fraction"):
        lab.run(Job("ddp", {**SHAPE, "fraction": 1}))
    assert len((tmp_path / "results.jsonl").read_text().splitlines()) == 1
