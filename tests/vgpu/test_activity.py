"""zeromon's reading of GPM against the kernels on the timeline."""

from __future__ import annotations

import json

import pytest

from vgpu.conftest import CudaRunner
from zeromon_vgpu.intervals import clip, length, union

pytestmark = pytest.mark.vgpu

HALF_SPEED, MEMORY_SPEED = 785e12, 3.0e12
"""Operations and bytes per second, of src/machine.h."""
PRODUCT = 2 * 8192**3


def test_activity_is_that_of_the_kernels(cuda_run: CudaRunner) -> None:
    run = cuda_run("activity.py", ranks=1)
    readings = json.loads(run.output.partition("readings ")[2].partition("\n")[0])
    kernels = list(run.truth().of("kernel"))
    for name, (start, end, sm, tensor, dram) in readings.items():
        within = [one for one in kernels if start <= one.start < end]
        seconds = (end - start) / 1e9
        busy = length(clip(union(one.span for one in within), start, end)) / (end - start)
        products = sum("gemm" in one.name for one in within) * PRODUCT / HALF_SPEED / seconds
        traffic = sum(one.bytes for one in within) / MEMORY_SPEED / seconds
        assert (sm, tensor, dram) == pytest.approx((busy, products, traffic), abs=0.08), name
    (_, _, busiest, tensor, _), (_, _, _, none, dram), (*_, idle, _, _) = readings.values()
    assert min(busiest, tensor, dram) > 0.1 and none == idle == 0


def test_an_a100_has_no_such_counters(cuda_run: CudaRunner) -> None:
    readings = json.loads(
        cuda_run("activity.py", ranks=1, device="a100").output.partition("readings ")[2]
    )
    assert {share for _, _, *shares in readings.values() for share in shares} == {None}
