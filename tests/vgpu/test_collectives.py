"""NCCL on the virtual device: right values, and times that follow the links."""

from __future__ import annotations

import pytest

from vgpu.conftest import CudaRunner
from vgpu.truth import bus_bandwidth

pytestmark = pytest.mark.vgpu


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_every_collective_is_right(cuda_run: CudaRunner, ranks: int) -> None:
    """All functions of ProcessGroupNCCL, ten types, five reductions."""
    run = cuda_run("collectives.py", ranks=ranks)
    for rank in range(ranks):
        assert f"rank {rank}: 171 results are right" in run.output
    largest = max(run.truth(0).of("collective"), key=lambda one: one.bytes)
    assert bus_bandwidth([largest]) == pytest.approx(360e9, rel=0.4)
