"""What NCCL reports of itself: Inspector's records equal the timeline, and RAS names who hangs."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from vgpu.conftest import CudaRun, CudaRunner
from zeromon.probes.nccl_ras import ras_service_address
from zeromon.readout.communication_report import nccl_block
from zeromon.readout.verdict import hang_text
from zeromon.ring.codes import operation_by_name
from zeromon.snapshot import RunSnapshot
from zeromon.snapshot.communication import Ras, RasCount
from zeromon_vgpu.timeline import Operation

pytestmark = pytest.mark.vgpu

SMALL = ("--layers", "2", "--hidden", "64", "--steps", "12")
PLUGIN = {"NCCL_PROFILER_PLUGIN": "libnccl-profiler-inspector.so"}
INSPECTOR = {"NCCL_INSPECTOR_ENABLE": "1", "NCCL_INSPECTOR_DUMP_THREAD_INTERVAL_MICROSECONDS": "500"}


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
        rows = {row.op: row for row in rank.communication.inspected}
        assert {row.group for row in rows.values()} == {
            "world"
        } and rank.communication.inspector_note == ""
        functions = {one["coll"] for one in records}
        assert "AllReduce" in functions and len(functions) == len(rows)
        for function in functions:
            written = [one for one in records if one["coll"] == function][-64:]
            operations = find_operations(run, rank.rank, function)
            sampled = [operations[one["coll_sn"]] for one in written]
            row = rows[operation_by_name(function).label]
            seconds = [(one.end - one.start) / 1e9 for one in sampled]
            busbw = [
                int(one.detail["bus_bytes"]) / spent for one, spent in zip(sampled, seconds, strict=True)
            ]
            assert (row.records, row.size, row.place) == (len(written), 2, rank.rank)
            parts = 2 if function in ("AllGather", "ReduceScatter") else 1  # each rank sends its own
            assert (row.nbytes * parts, row.timing) == (sampled[-1].bytes, "kernel_gpu")
            assert row.seconds == pytest.approx(sum(seconds) / len(seconds), abs=2e-9)
            bandwidth = sum(busbw) / len(busbw)
            assert row.busbw_bytes_per_second == pytest.approx(bandwidth, rel=1e-3, abs=1e3)
    assert "all_reduce" in nccl_block(run.record) and "world(2)" in nccl_block(run.record)


def test_without_the_plugin_no_record_is_written(cuda_run: CudaRunner, tmp_path: Path) -> None:
    variables = INSPECTOR | {"NCCL_INSPECTOR_DUMP_DIR": str(tmp_path / "inspector")}
    run = cuda_run("train.py", "ddp", *SMALL, watched=True, **variables)
    assert not (tmp_path / "inspector").exists()
    assert all("No such file" in rank.communication.inspector_note for rank in run.record.ranks)


# ---- RAS ------------------------------------------------------------------------------------------

Look = Callable[[RunSnapshot], None]


def see_hang(cuda_run: CudaRunner, case: str, look: Look = lambda _: None) -> tuple[str, Ras]:
    """Zeromon's text for a hang of programs/hangs.py, and what RAS has answered; *look* sees it live."""
    reports: list[tuple[str, Ras]] = []

    def seen(run: RunSnapshot) -> None:
        if run.ras is None or reports:
            return
        try:
            look(run)
            reports.append((hang_text(run, run.hangs[0]), run.ras))
        finally:
            for rank in run.ranks:
                with suppress(ProcessLookupError):
                    os.kill(rank.pid, signal.SIGKILL)

    run = cuda_run("hangs.py", case, watched=True, ends_well=False, timeout=120, seen=seen)
    assert reports, run.output
    return reports[0]


def test_ras_counts_what_each_rank_has_launched(cuda_run: CudaRunner) -> None:
    text, ras = see_hang(cuda_run, "late")
    assert text.startswith("all_reduce #13 of group world")
    assert ": rank 1 has not called it" in text and "; rank 0 waits" in text
    assert text.endswith("; NCCL has launched 13 all_reduce, on rank 1 12")
    (communicator,) = ras.communicators
    assert communicator.counts == (RasCount(op="all_reduce", most=13, behind=((1, 12),)),)
    assert (communicator.size, communicator.unresponsive, ras.note) == (2, (), "")
    assert re.fullmatch("0x[0-9a-f]{16}", communicator.communicator)


def test_ras_does_not_reach_a_rank_that_was_killed(cuda_run: CudaRunner) -> None:
    """The process that is left answers: all of a node listen on one port."""
    text, ras = see_hang(cuda_run, "killed")
    assert "rank 1 is dead (SIGKILL); rank 0 waits; NCCL does not reach rank 1; " in text
    (communicator,) = ras.communicators
    assert (communicator.unresponsive, communicator.dead) == ((1,), ())
    assert communicator.counts == (RasCount(op="all_reduce", most=13, behind=()),)


def test_ras_speaks_the_protocol_of_its_client(cuda_run: CudaRunner) -> None:
    said: list[str] = []

    def look(run: RunSnapshot) -> None:
        host, port = ras_service_address(run.ranks[0].config.process["variables"])
        connection = socket.create_connection((host, port), 10)
        with connection, connection.makefile("rw") as file:
            for line in ("client protocol 2", "TIMEOUT 5", "set format xml", "Set Format JSON"):
                file.write(f"{line}\r\n")
                file.flush()
                said.append(file.readline())
            file.write("STATUS\n")
            file.flush()
            said.append(file.read())

    see_hang(cuda_run, "late", look)
    *answers, status = said
    assert answers == ["SERVER PROTOCOL 2\n", "OK\n", "ERROR: Invalid format xml\n", "OK\n"]
    content = json.loads(status)
    assert content["communicators_count"] == len(content["communicators"]) == 1
    (communicator,) = content["communicators"]
    assert (communicator["ranks_count"], communicator["missing_ranks_count"]) == (2, 0)
    counts = [rank["collective_counts"] for rank in communicator["ranks"]]
    assert [count["AllReduce"] for count in counts] == [13, 12]
    assert [*counts[0]] == ["Broadcast", "Reduce", "AllGather", "ReduceScatter", "AllReduce"]


def test_a_run_goes_on_where_the_port_is_taken(cuda_run: CudaRunner) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        cuda_run("hangs.py", "abort", NCCL_RAS_ADDR=address)
