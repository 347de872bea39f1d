"""Programs that users write, unchanged, on two virtual GPUs, and what they read from the device."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from vgpu.conftest import CudaRun, CudaRunner
from vgpu.environment import Environment

pytestmark = pytest.mark.vgpu

SMALL = {"largest_payload": 64 << 10}
"""Collectives of control values move their bytes; those of parameters and gradients only take time."""
FLOAT, HALF = 4, 2


def check_training(run: CudaRun, steps: int, strategy: str, parameters: float, state_bytes: int) -> None:
    """Each rank has trained so many steps; its device held at least the states of its share."""
    losses = re.findall(rf"^trained {steps} (\S+)", run.output, re.MULTILINE)
    assert [float(loss) for loss in losses] == [0.0, 0.0], run.output
    for rank in run.record.ranks:
        assert rank.steps.watched_steps == steps
        assert rank.steps.skipped_steps == 0
        assert rank.strategy.startswith(strategy)
        peak = max(step.allocated_bytes for step in rank.steps.recent)
        assert peak > parameters * state_bytes
        assert rank.agent.errors == 0


LLAMA = 2 * 32000 * 256 + 4 * (2 * 256 * 256 + 2 * 256 * 128 + 3 * 256 * 1024)
GPT2 = 32000 * 256 + 1024 * 256 + 4 * 12 * 256 * 256
ADAM = 3 * FLOAT + FLOAT
"""Bytes a parameter of weights, gradients and two moments, all in 32 bits."""


@pytest.mark.parametrize(
    ("mode", "strategy", "state_bytes"),
    [
        ("ddp", "ddp", ADAM),
        ("fsdp", "fsdp", ADAM / 2),
        ("zero2", "deepspeed-zero2", HALF + 3 * FLOAT / 2),  # weights in 16 bits; half of the states
        ("zero3-offload", "deepspeed-zero3", HALF / 2),  # the states are on the host
    ],
)
def test_trainer(cuda_run: CudaRunner, mode: str, strategy: str, state_bytes: int) -> None:
    """DeepSpeed's JSON asks for AdamW: its FusedAdam, or its CPUAdam, which g++ compiles."""
    run = cuda_run("user_trainer.py", mode, changes=SMALL, watched=True)
    check_training(run, 4, strategy, LLAMA, state_bytes)
    assert "OVERFLOW" not in run.output


def need(environment: Environment, *packages: str) -> None:
    """Skips unless the environment has these packages."""
    for package in packages:
        if not (environment.site / package).exists():
            pytest.skip(f"no {package} for the virtual device: pip install --no-deps --target")


def test_sft_with_lora(virtual_cuda: Environment, cuda_run: CudaRunner) -> None:
    need(virtual_cuda, "trl", "peft", "datasets", "pyarrow")
    run = cuda_run("user_sft.py", changes=SMALL, watched=True)
    check_training(run, 4, "ddp", LLAMA, FLOAT)


@pytest.mark.parametrize(
    ("mode", "strategy", "state_bytes"), [("ddp", "ddp", ADAM), ("fsdp", "fsdp", 4)]
)
def test_lightning(
    virtual_cuda: Environment, cuda_run: CudaRunner, mode: str, strategy: str, state_bytes: int
) -> None:
    need(virtual_cuda, "lightning", "torchmetrics")
    run = cuda_run("user_lightning.py", mode, changes=SMALL, watched=True)
    check_training(run, 4, strategy, GPT2, state_bytes)


@pytest.mark.short
def test_a_loop_with_guards_and_counts(cuda_run: CudaRunner) -> None:
    """Convolutions by cuDNN; neither a NaN guard nor a division by a count ends the run."""
    run = cuda_run("user_accelerate.py", changes=SMALL, watched=True, forked=True)
    check_training(run, 4, "ddp", 90_000, 3 * FLOAT)
    assert run.output.count("['x', 'xx']") == 2


def read_facts(output: str, kind: str) -> list[dict[str, Any]]:
    """What each rank printed of that kind."""
    found = [re.search(rf"rank {rank} {kind} (\{{.*\}})", output) for rank in range(2)]
    assert all(found), output
    return [json.loads(match[1]) for match in found if match]


@pytest.mark.short
def test_values_that_the_host_reads(cuda_run: CudaRunner) -> None:
    """Known values are right; unknown ones are the same on each rank, whatever lay there before."""
    output = cuda_run("values.py").output
    for rank, known in enumerate(read_facts(output, "known")):
        assert known == {
            "numbers": [5, 9 + rank], "maximum": 6, "less": True, "sum": 12, "counter": [2.5, 0.0],
            "full": 65536.0, "objects": [1, 701], "sent": {"b": 1},
        }  # fmt: skip
    for unknown in read_facts(output, "unknown"):
        assert unknown == {
            "loss": 0.0, "norm": 0.0, "isfinite": True, "isnan": False, "all": True, "count": 1,
            "argmax": 1, "nonzero": [0, 1], "some": [0.0] * 4, "equal": True,
        }  # fmt: skip
    assert output.count("same weights True") == 2


def test_attention_takes_the_time_of_its_operations(cuda_run: CudaRunner) -> None:
    """4 b h s s d operations forward, 2.5 times as many backward, at 0.3 to 1 of a product's speed."""
    output = cuda_run("attention.py", ranks=1).output
    rows = re.findall(r"^(FLASH|EFFICIENT)_ATTENTION (\w+) (\d+) (\d+)", output, re.MULTILINE)
    assert len(rows) == 4, output
    ideal_us = 4 * 4 * 16 * 2048 * 2048 * 128 / 785e12 * 1e6
    for _, causal, forward, backward in rows:
        least = ideal_us / (2 if causal == "True" else 1)
        assert least < float(forward) < 3.3 * least
        assert 2.5 * least < float(backward) < 2.5 * 3.3 * least
