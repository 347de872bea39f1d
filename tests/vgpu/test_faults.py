"""Faults by plan: each does what it says, to whom it says."""

from __future__ import annotations

import pytest

from vgpu.conftest import CudaRunner
from vgpu.machine import Fault

pytestmark = pytest.mark.vgpu

SMALL = ("--layers", "2", "--hidden", "64", "--steps", "4")


def test_a_slow_device_computes_longer(cuda_run: CudaRunner) -> None:
    run = cuda_run("train.py", "ddp", *SMALL, faults=[Fault("slow", rank=1, factor=5)])
    spent = [run.truth(rank).figures(*run.truth(rank).window(1, 3)).compute for rank in range(2)]
    assert spent[1] > 4 * spent[0]


def test_memory_ends_at_the_limit(cuda_run: CudaRunner) -> None:
    small = {"memory_bytes": 1 << 30}
    run = cuda_run("train.py", "ddp", "--hidden", "4096", changes=small, ends_well=False)
    assert run.result.code != 0
    assert "OutOfMemoryError: CUDA out of memory." in run.output
