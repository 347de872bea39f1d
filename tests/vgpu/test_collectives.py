"""NCCL on the virtual device: right values, and times that follow the links."""

from __future__ import annotations

import pytest

from vgpu.conftest import CudaRunner

pytestmark = pytest.mark.vgpu


@pytest.mark.parametrize("ranks", [pytest.param(2, marks=pytest.mark.short), 4, 8])
def test_every_collective_is_right(cuda_run: CudaRunner, ranks: int) -> None:
    """All functions of ProcessGroupNCCL, ten types, five reductions."""
    run = cuda_run("collectives.py", ranks=ranks)
    for rank in range(ranks):
        assert f"rank {rank}: 171 results are right" in run.output
    for one in run.truth(0).of("collective"):
        if "bus_bytes" in one.detail:  # latency of the node, and its bandwidth
            seconds = 12e-6 + int(one.detail["bus_bytes"]) / 360e9
            assert one.end - one.transfer == pytest.approx(seconds * 1e9, abs=2)
