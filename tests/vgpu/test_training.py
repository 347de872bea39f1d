"""Training on the virtual device, watched by zeromon."""

from __future__ import annotations

import re

import pytest
import torch
from torch import nn

from vgpu.conftest import CudaRunner

pytestmark = pytest.mark.vgpu

SMALL = ("--layers", "2", "--hidden", "64", "--steps", "6")


@pytest.mark.parametrize("strategy", ["ddp", "fsdp2", "zero2"])
def test_it_trains_watched_and_writes_its_timeline(cuda_run: CudaRunner, strategy: str) -> None:
    run = cuda_run("train.py", strategy, *SMALL, watched=True)
    record = run.record
    assert [rank.steps.watched_steps for rank in record.ranks] == [6, 6]
    for rank in range(2):
        truth = run.truth(rank)
        assert list(truth.steps) == list(range(6))
        whole = truth.figures(*truth.window(0, 5))
        assert whole.compute > 0 and whole.communication > 0
        phases = truth.phases(*truth.window(1, 5))
        assert {"forward", "backward", "optimizer"} <= set(phases)
        assert sum(one.span for one in phases.values()) == truth.figures(*truth.window(1, 5)).span


def reference(steps: int, layers: int = 2) -> list[float]:
    """The losses of programs/train.py by the CPU, in one process."""
    from vgpu.programs.train import Block

    torch.manual_seed(0)
    model = nn.Sequential(*(Block(64) for _ in range(layers)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=True)
    x = torch.sin(torch.arange(64 * 64, dtype=torch.float32)).reshape(64, 64)
    losses = []
    for _ in range(steps):
        loss = model(x).pow(2).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def test_losses_are_those_of_the_cpu(each_cuda_run: CudaRunner) -> None:
    """With arithmetic on: every rank has the same batch, so that the mean gradient is each one's."""
    run = each_cuda_run("train.py", "ddp", *SMALL, arithmetic=True)
    assert run.losses(0) == run.losses(1) == pytest.approx(reference(6), rel=1e-5)


def test_the_rank_of_a_loss_that_is_nan_is_named_though_nobody_reads_it(cuda_run: CudaRunner) -> None:
    """The agent copies it behind the forward, and reads the copy in a later step."""
    words = ("train.py", "ddp", *SMALL, "--log", "0", "--nan")
    run = cuda_run(*words, arithmetic=True, watched=True)
    (found,) = (one for one in run.record.findings if one.rule == "not_finite")
    # of steps that are shorter than 20 ms not each loss is read
    assert re.search("since step 2, on rank 1 first; rank 0 follows in step [34]", found.text)
    assert [rank.agent.errors for rank in run.record.ranks] == [0, 0]
