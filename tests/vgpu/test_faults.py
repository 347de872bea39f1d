"""Faults by plan: each does what it says, to whom it says, and shows where a real one would."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from vgpu.conftest import SHORT_DUMP, CudaRun, CudaRunner
from zeromon.readout.report import render_run
from zeromon.readout.verdict import Health, judge_run
from zeromon.snapshot.communication import HangKind
from zeromon_vgpu.machine import Fault
from zeromon_vgpu.timeline import Operation

pytestmark = pytest.mark.vgpu

SMALL = ("--layers", "2", "--hidden", "64", "--steps", "4")
HARDWARE_THERMAL = 0x40
OFF_THE_BUS = 79


def facts(run: CudaRun, rank: int) -> dict[str, Any]:
    """Facts that a rank of programs/faults.py printed."""
    found = re.search(rf"rank {rank} facts (\{{.*?\}})", run.output)
    assert found is not None, run.output
    seen: dict[str, Any] = json.loads(found[1])
    return seen


def reductions(run: CudaRun, rank: int) -> list[Operation]:
    """The all_reduce of each step."""
    return list(run.truth(rank).of("collective"))


def died_of(run: CudaRun) -> list[tuple[int | None, str]]:
    """The ranks that died first, and of what, as zeromon has it."""
    return [
        (finding.rank, finding.text)
        for finding in run.record.findings
        if finding.rule == "rank_died" and "it died of" not in finding.text
    ]


def test_a_slow_device_computes_longer(cuda_run: CudaRunner) -> None:
    run = cuda_run("train.py", "ddp", *SMALL, faults=[Fault("slow", rank=1, factor=5)])
    spent = [run.truth(rank).figures(*run.truth(rank).window(1, 3)).compute for rank in range(2)]
    assert spent[1] > 4 * spent[0]


def test_a_late_rank_lets_the_others_wait(cuda_run: CudaRunner) -> None:
    run = cuda_run("faults.py", faults=[Fault("late", rank=1, call=2, seconds=0.2)])
    punctual, late = (reductions(run, rank)[2] for rank in range(2))
    begins = max(punctual.start, late.start + 200_000_000)
    assert punctual.transfer == late.transfer == begins
    assert punctual.end == late.end
    assert facts(run, 0)["sums"] == [2.0] * 4


def test_a_link_drops_from_a_moment_on(cuda_run: CudaRunner) -> None:
    def transfers(*faults: Fault) -> list[int]:
        run = cuda_run("faults.py", faults=faults)
        return [one.end - one.transfer for one in reductions(run, 0)]

    latency, whole = 12_000, transfers()[0]
    dropped = latency + 4 * (whole - latency)
    assert transfers(Fault("link", factor=4)) == pytest.approx([dropped] * 4, rel=1e-3)
    assert transfers(Fault("link", factor=4, at=3600)) == pytest.approx([whole] * 4, rel=1e-3)


def test_a_stream_never_ends_until_the_watchdog_does(cuda_run: CudaRunner) -> None:
    fault = Fault("stuck", rank=1, call=2)
    run = cuda_run("faults.py", faults=[fault], watched=True, ends_well=False, **SHORT_DUMP)
    assert run.result.code != 0
    assert "Watchdog caught collective operation timeout" in run.output
    assert len(reductions(run, 0)) == len(reductions(run, 1)) == 2
    (hang,) = run.record.hangs
    assert (hang.kind, hang.waiting) == (HangKind.ALL_INSIDE, (0, 1))


def test_a_flipped_bit_is_on_one_rank_in_one_call(cuda_run: CudaRunner) -> None:
    run = cuda_run("faults.py", faults=[Fault("flip", rank=1, call=2, bit=33)])
    assert facts(run, 0)["different"] == [0, 0, 0, 0]
    assert facts(run, 1)["different"] == [0, 0, 1, 0]


def test_a_device_with_less_memory_runs_out_of_it(cuda_run: CudaRunner) -> None:
    fault = Fault("full", device=1, factor=0.0075)  # 614 MiB: a context, and 94 more
    run = cuda_run("faults.py", faults=[fault], watched=True, ends_well=False)
    assert run.result.code != 0
    assert "GPU 1 has a total capacity of 614.40 MiB" in run.output
    ((rank, text),) = died_of(run)
    assert rank == 1 and text.startswith("OutOfMemoryError")


def test_memory_ends_at_the_limit(cuda_run: CudaRunner) -> None:
    small = {"memory_bytes": 1 << 30}
    run = cuda_run("train.py", "ddp", "--hidden", "4096", changes=small, ends_well=False)
    assert run.result.code != 0
    assert "OutOfMemoryError: CUDA out of memory." in run.output


def test_a_device_off_the_bus_fails_every_call(cuda_run: CudaRunner) -> None:
    fault = Fault("lost", device=1)
    run = cuda_run("faults.py", faults=[fault], watched=True, ends_well=False)
    assert run.result.code != 0
    ((rank, text),) = died_of(run)
    assert rank == 1 and "CUDA error: unknown error" in text


def test_nvml_reads_the_others_beside_a_lost_device(cuda_run: CudaRunner) -> None:
    run = cuda_run("faults.py", "--on-host", faults=[Fault("lost", device=1)])
    assert facts(run, 0)["memory"] == 0 and facts(run, 1)["memory"] is None


def test_nvml_tells_of_xids_memory_errors_and_throttling(cuda_run: CudaRunner) -> None:
    faults = [
        Fault("xid", device=1, code=OFF_THE_BUS),
        Fault("ecc", device=1, factor=3),
        Fault("throttle", device=1, code=HARDWARE_THERMAL),
    ]
    run = cuda_run("faults.py", faults=faults)
    seen = [{key: facts(run, rank)[key] for key in ("xid", "ecc", "throttle")} for rank in range(2)]
    assert seen[0] == {"xid": None, "ecc": 0, "throttle": []}
    assert seen[1] == {"xid": OFF_THE_BUS, "ecc": 3, "throttle": ["hardware thermal"]}


def test_a_leak_on_a_device_is_the_cause_of_running_out_of_memory(cuda_run: CudaRunner) -> None:
    """Told while it grows, with the step at which the device is full, and after the death."""
    less = Fault("full", device=1, factor=0.03)  # 2.4 GiB
    run = cuda_run("runs_out.py", "leak", faults=[less], watched=True, ends_well=False)
    judged = judge_run(run.record)
    assert judged.health is Health.DEAD
    assert re.search(r"^rank 1 ran out of device memory: use grew 2\d\.\d MiB per step", judged.cause)
    (_, text), *_ = died_of(run)
    assert "OutOfMemoryError at runs_out.py:" in text
    (rank,) = (rank for rank in run.record.ranks if rank.rank == 1)
    assert rank.memory.device is not None and rank.memory.device.ooms == 1
    foretold = re.search(r"it was to be full at about step (\d+)", judged.cause)
    assert foretold is not None and int(foretold[1]) == pytest.approx(rank.steps.last_step, rel=0.15)
    assert "what frees memory" not in render_run(run.record)


def test_one_large_batch_is_named_with_what_it_asked_for(cuda_run: CudaRunner) -> None:
    """No rung of a few MiB is offered where 2 GiB are missing, and no growth is told."""
    less = Fault("full", device=1, factor=0.02)  # 1.6 GiB
    run = cuda_run("runs_out.py", "batch", faults=[less], watched=True, ends_well=False)
    cause = judge_run(run.record).cause
    assert cause.startswith("rank 1: OutOfMemoryError at runs_out.py:")
    assert "Tried to allocate 2.00 GiB" in cause and "grew" not in cause
    text = render_run(run.record)
    assert "asked for 2.0 GiB" in text and "what frees memory" not in text
