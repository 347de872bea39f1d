"""What NCCL reports of itself: Inspector's records equal the timeline."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from vgpu.conftest import CudaRun, CudaRunner
from vgpu.truth import Operation
from zeromon.report.communication import inspected
from zeromon.ring.codes import operation_named

pytestmark = pytest.mark.vgpu

SMALL = ("--layers", "2", "--hidden", "64", "--steps", "12")
PLUGIN = {"NCCL_PROFILER_PLUGIN": "libnccl-profiler-inspector.so"}
INSPECTOR = {
    "NCCL_INSPECTOR_ENABLE": "1",
    "NCCL_INSPECTOR_DUMP_THREAD_INTERVAL_MICROSECONDS": "500",
}


def read_records(folder: Path, pid: int) -> list[dict[str, Any]]:
    """The collectives that Inspector wrote of a process."""
    (path,) = folder.glob(f"*-pid{pid}.log")
    return [json.loads(line)["coll_perf"] for line in path.read_text().splitlines()]


def find_operations(run: CudaRun, rank: int, function: str) -> list[Operation]:
    """The collectives of a function, in NCCL's order: the number of a record is its place."""
    return [
        one
        for one in run.truth(rank).of("collective")
        if one.name.removeprefix("ncclDevKernel_").startswith(f"{function}_")
    ]


def test_inspector_has_the_times_of_the_device(cuda_run: CudaRunner, tmp_path: Path) -> None:
    logs = tmp_path / "inspector"
    variables = PLUGIN | INSPECTOR | {"NCCL_INSPECTOR_DUMP_DIR": str(logs)}
    run = cuda_run("train.py", "ddp", *SMALL, watched=True, **variables)
    for rank in run.record.ranks:
        records = read_records(logs, rank.pid)
        rows = {row.op: row for row in rank.inspected}
        assert {row.group for row in rows.values()} == {"world"} and rank.inspector_note == ""
        functions = {one["coll"] for one in records}
        assert "AllReduce" in functions and len(functions) == len(rows)
        for function in functions:
            written = [one for one in records if one["coll"] == function][-64:]
            operations = find_operations(run, rank.rank, function)
            sampled = [operations[one["coll_sn"]] for one in written]
            row = rows[operation_named(function).label]
            seconds = [(one.end - one.start) / 1e9 for one in sampled]
            busbw = [
                int(one.detail["bus_bytes"]) / spent
                for one, spent in zip(sampled, seconds, strict=True)
            ]
            assert (row.records, row.size, row.place) == (len(written), 2, rank.rank)
            parts = (
                2 if function in ("AllGather", "ReduceScatter") else 1
            )  # each rank sends its own
            assert (row.nbytes * parts, row.timing) == (sampled[-1].bytes, "kernel_gpu")
            assert row.seconds == pytest.approx(sum(seconds) / len(seconds), abs=2e-9)
            bandwidth = sum(busbw) / len(busbw)
            assert row.busbw_bytes_per_second == pytest.approx(bandwidth, rel=1e-3, abs=1e3)
    assert "all_reduce" in inspected(run.record) and "world(2)" in inspected(run.record)


def test_without_the_plugin_no_record_is_written(cuda_run: CudaRunner, tmp_path: Path) -> None:
    variables = INSPECTOR | {"NCCL_INSPECTOR_DUMP_DIR": str(tmp_path / "inspector")}
    run = cuda_run("train.py", "ddp", *SMALL, watched=True, **variables)
    assert not (tmp_path / "inspector").exists()
    assert all("No such file" in rank.inspector_note for rank in run.record.ranks)
