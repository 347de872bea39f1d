"""A few ranks stand for all of a job: VGPU_RANKS names those that run, and NCCL simulates the others."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from vgpu.conftest import CudaRun, CudaRunner

pytestmark = pytest.mark.vgpu

CUBLAS_WORKSPACES = 64 << 20
SMALL = ("--layers", "2", "--hidden", "64", "--steps", "2", "--batch", "8")


def facts(run: CudaRun, rank: int) -> dict[str, Any]:
    """What a rank printed."""
    printed = re.search(rf"rank {rank} facts ", run.output)
    assert printed is not None, run.output
    values: dict[str, Any]
    values, _ = json.JSONDecoder().raw_decode(run.output[printed.end() :])
    return values


def collectives(run: CudaRun, rank: int) -> list[tuple[str, int, str, str, int]]:
    """Name, bytes, ranks, bytes on the bus and device time of each collective, in order.

    Transfers have no time: those of a group end one by one, from when each peer came.
    """
    found = []
    for o in run.truth(rank).of("collective"):
        taken = o.end - o.transfer if "bus_bytes" in o.detail else 0
        found.append((o.name, o.bytes, o.detail["ranks"], o.detail.get("bus_bytes", ""), taken))
    return found


@pytest.mark.parametrize("bound", ["", pytest.param("1", marks=pytest.mark.short)])
def test_sums_count_ranks_that_are_absent(cuda_run: CudaRunner, bound: str) -> None:
    """Groups by name and, of a bound device, groups that are split off; 8 nodes of 8 ranks."""
    run = cuda_run(
        "representatives.py", ranks=64, nodes=8, forked=True, arithmetic=True, VGPU_RANKS="0,1,8,63",
        BOUND=bound,
    )  # fmt: skip
    stand_ins = [0, *[1] * 7, *[8] * 55, 63]
    for rank in (0, 1, 8, 63):
        found = facts(run, rank)
        assert (found["world"], found["across"], found["node"]) == (96, 12, 12)
        counts = [found[name] for name in ("world count", "across count", "node count", "host")]
        assert counts == [192, 24, 24, 192]
        assert found["gathered"] == stand_ins
        assert found["part"] == 64 * rank
        assert (found["scattered"], found["broadcast"]) == (rank, {"from": 0})
    assert facts(run, 0)["collected"] == stand_ins
    exchange = [one for one in run.truth(8).of("collective") if "SendRecv" in one.name][-1]
    assert exchange.end - exchange.start == pytest.approx(
        30e3 + 256 / 45, abs=2
    )  # with rank 7, of node 0


def test_a_group_whose_first_rank_is_absent_works(cuda_run: CudaRunner) -> None:
    ranks = "0,3,9,13"
    run = cuda_run("representatives.py", ranks=16, nodes=2, arithmetic=True, VGPU_RANKS=ranks)
    for rank in (0, 3, 9, 13):
        assert [facts(run, rank)[name] for name in ("world", "across", "node")] == [24, 3, 12]


def test_collectives_are_those_of_a_job_all_of_whose_ranks_run(cuda_run: CudaRunner) -> None:
    """Each collective's ranks, bytes and time on the device are equal, to the nanosecond."""
    running = (0, 1, 8, 15)
    names = ",".join(map(str, running))
    some = cuda_run(
        "representatives.py", ranks=16, nodes=2, forked=True, arithmetic=True, VGPU_RANKS=names
    )
    all_ = cuda_run("representatives.py", ranks=16, nodes=2, forked=True, arithmetic=True)
    for rank in running:
        assert collectives(some, rank) == collectives(all_, rank)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp2", "hsdp", "zero3"])
def test_a_step_is_that_of_a_job_all_of_whose_ranks_run(cuda_run: CudaRunner, strategy: str) -> None:
    """Collectives and their times, and the peak of each device.

    Blocks of several streams are free once the host sees their events: the peak depends on its speed.
    """
    running = (0, 1, 8, 15)
    names = ",".join(map(str, running))
    words = ("train.py", strategy, *SMALL)
    some = cuda_run(*words, ranks=16, nodes=2, forked=strategy != "zero3", VGPU_RANKS=names)
    all_ = cuda_run(*words, ranks=16, nodes=2, forked=strategy != "zero3")
    for rank in running:
        assert collectives(some, rank) == collectives(all_, rank)
        assert peak(some, rank) == pytest.approx(peak(all_, rank), rel=0.01)


def peak(run: CudaRun, rank: int) -> int:
    """The most bytes that a rank's tensors held."""
    printed = re.search(rf"rank {rank} peak (\d+)", run.output)
    assert printed is not None, run.output
    return int(printed[1])


def test_four_ranks_stand_for_1024(cuda_run: CudaRunner) -> None:
    """7 B parameters in 1,024 shards, on 128 nodes."""
    changes = {"largest_payload": 0}
    run = cuda_run("large.py", ranks=1024, nodes=128, changes=changes, VGPU_RANKS="0,1,8,1023")
    for rank in (0, 1, 8, 1023):
        found = facts(run, rank)
        states = 16 * found["parameters"] / 1024
        assert found["states"] == pytest.approx(states + CUBLAS_WORKSPACES, rel=0.01)
        assert found["host"] < 1 << 30
        assert {sizes for _, _, sizes, _, _ in collectives(run, rank)} == {"1024"}
    seconds = collectives(run, 0)[0][4] / 1e9
    assert seconds == pytest.approx(30e-6 + int(collectives(run, 0)[0][3]) / 45e9, rel=1e-6)
