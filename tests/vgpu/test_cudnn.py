"""What torch leaves to cuDNN: its memory and its time, against counts from the sizes alone."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from vgpu.conftest import CudaRunner
from vgpu.environment import Environment
from vgpu.preflights import PROGRAMS, run_preflight

pytestmark = pytest.mark.vgpu

TF32, FP32, HALF, MEMORY, KERNEL_NS = 400e12, 51e12, 785e12, 3.0e12, 2000
"""Operations and bytes per second, and the shortest kernel, of src/machine.h."""
IMAGES = 32 * 3 * 224 * 224 * 4
LARGE = 32 * 64 * 112 * 112 * 4
"""Bytes of what the stem and the blocks make."""
OPERAND = 2 * 16 * 4096 * 128 * 2
"""Bytes of the queries; of their statistics, a 64th."""
SEQUENCE = 128 * 64 * 512 * 4
"""Bytes of what a recurrent layer makes."""

# Backward of the second block's last convolution: 8 activations are kept. The gradients of the block's
# sum, of the convolution's result and of its input are there, and copies of two for tensor cores. With
# channels last it needs no copies: the peak is the gradient of the last ReLU, where 10 are kept.
# Attention: operands and result are kept, the gradients of all four are there, that of the queries also
# in float32. Recurrent layers: input, result, their gradients, 2 layers of 4 gates, cell and output, and
# 4 gates of one layer.
PEAKS = [
    pytest.param(("resnet",), IMAGES + 13 * LARGE, marks=pytest.mark.short),
    (("resnet", "--channels-last"), IMAGES + 12 * LARGE),
    (("attention",), 10 * OPERAND + 2 * OPERAND // 64),
    (("lstm",), (4 + 2 * 6 + 4) * SEQUENCE),
]


@pytest.mark.parametrize(("arguments", "activations"), PEAKS, ids=str)
def test_the_peak_is_that_of_tensors_and_stated_workspaces(
    virtual_cuda: Environment, tmp_path: Path, arguments: Sequence[str], activations: int
) -> None:
    # Else cuBLAS takes 32 MiB on an H100
    launch = ["env", "CUBLAS_WORKSPACE_CONFIG=:16:8", str(virtual_cuda.python)]
    answer = run_preflight(tmp_path, [], [*launch, str(PROGRAMS / "cudnn.py"), *arguments])["preflight"]
    parameters = {"resnet": 931112, "attention": 3 * OPERAND, "lstm": 2 * 4 * 512 * (1024 + 2) * 4}
    states = parameters[arguments[0]] * (1 if arguments[0] == "attention" else 2)  # and the momentum
    assert answer["steps"] >= 4 and answer["outcome"] == ""
    assert answer["peak_bytes"] == pytest.approx(activations + states, rel=0.006)


def kernels(run: CudaRunner, *arguments: str) -> list[tuple[str, int]]:
    """Name and nanoseconds of each kernel of the second step."""
    truth = run("cudnn.py", *arguments, "--steps", "2", ranks=1).truth()
    begin, end = truth.window(1, 1)
    return [(one.name, one.end - one.start) for one in truth.of("kernel") if begin <= one.start < end]


# Channels and pixels of inputs and outputs, edge of the filter, for the five shapes of a step
CONVOLUTIONS = [(3, 224, 64, 112, 7), *[(64, 112, 64, 112, 3)] * 4, (64, 112, 128, 56, 3)]


@pytest.mark.parametrize(("arguments", "speed"), [((), TF32), (("--no-tf32",), FP32)], ids=str)
def test_a_convolution_takes_the_time_of_its_operations(
    cuda_run: CudaRunner, arguments: Sequence[str], speed: float
) -> None:
    found = [row for row in kernels(cuda_run, "resnet", *arguments) if "implicit_gemm" in row[0]]
    expected = []
    for inputs, from_edge, outputs, to_edge, edge in CONVOLUTIONS:
        weights = inputs * outputs * edge**2
        operations = 2 * 32 * to_edge**2 * weights
        nbytes = 4 * (32 * (inputs * from_edge**2 + outputs * to_edge**2) + weights)
        passes = 2 if inputs == 3 else 3  # images have no gradient
        expected += [KERNEL_NS + max(operations / speed, nbytes / MEMORY) * 1e9] * passes
    assert sorted(ns for _, ns in found) == pytest.approx(sorted(expected), abs=2)
    assert {"tf32" in name for name, _ in found} == {speed == TF32}


def test_no_kernel_unfolds_the_images(cuda_run: CudaRunner) -> None:
    names = [name for name, _ in kernels(cuda_run, "resnet", "--channels-last")]
    assert not [name for name in names if "im2col" in name or "nchwToNhwc" in name]
    assert sum("bn_fw_tr" in name for name in names) == sum("bn_bw" in name for name in names) == 6


def check_attention(run: CudaRunner, *arguments: str) -> None:
    """Two products forward and five backward, at what cuDNN reaches with heads of 128."""
    found = [ns for name, ns in kernels(run, "attention", *arguments) if "sdpa" in name]
    product = 2 * 2 * 16 * 4096**2 * 128 / (2 if "--causal" in arguments else 1)
    forward, backward = 2 * product / (0.76 * HALF), 5 * product / (0.66 * HALF)
    expected = [KERNEL_NS + seconds * 1e9 for seconds in (forward, backward)]
    assert sorted(found) == pytest.approx(expected, abs=2)


@pytest.mark.parametrize("arguments", [(), ("--causal",)], ids=str)
def test_attention_takes_the_time_of_its_products(
    cuda_run: CudaRunner, arguments: Sequence[str]
) -> None:
    check_attention(cuda_run, *arguments)


def test_the_newest_torch_has_another_graph_for_a_mask(newest_cuda_run: CudaRunner) -> None:
    check_attention(newest_cuda_run, "--causal")


def test_a_recurrent_layer_takes_its_steps_one_by_one(cuda_run: CudaRunner) -> None:
    """A kernel for each of 128 steps, forward and backward, which reads the recurrent weights."""
    found = [ns for name, ns in kernels(cuda_run, "lstm") if "RNN_steps" in name]
    nbytes = 4 * (64 * 512 + 512 * 2048 + 64 * 2048)
    assert len(found) == 2 * 2
    expected = 128 * (KERNEL_NS + max(2 * 64 * 512 * 2048 / TF32, nbytes / MEMORY) * 1e9)
    assert found == pytest.approx([expected] * 4, rel=1e-3)


def test_with_arithmetic_the_values_are_those_of_the_cpu(cuda_run: CudaRunner) -> None:
    """torch's own operators run then, which the CPU has too."""
    run = cuda_run("cudnn.py", "values", ranks=1, arithmetic=True)
    *differences, largest = map(float, run.output.partition("differences ")[2].split()[:8])
    assert len(differences) == 7 and max(differences) < 1e-5 < largest, run.output
