"""What NCCL itself says: Inspector's files and RAS's socket, in the format that NCCL documents.

No process of NCCL is here: the files and the server are stubs.
"""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from builders import changed, rank, run

from zeromon.collector.run import Nccl
from zeromon.diagnosis.communicators import group_of, ras_of
from zeromon.probes.nccl_ras import (
    Answer,
    InspectorReader,
    RasReader,
    ask_ras,
    is_local_address,
    ras_service_address,
)
from zeromon.readout.communication_report import nccl_block
from zeromon.readout.verdict import hang_text
from zeromon.snapshot import Hang, RankSnapshot
from zeromon.snapshot.communication import GroupProgress, HangKind, Ras
from zeromon.storage.run_store import decode_snapshot, encode_snapshot

HASH = "0xae94423cfbb2ef4a"


def record(number: int, place: int = 0, size: int = 2, **perf: Any) -> bytes:
    """A line as version 4 of the plugin writes it."""
    content = {
        "header": {"id": HASH, "rank": place, "n_ranks": size, "nnodes": 1},
        "metadata": {"inspector_output_format_version": "v4.0", "git_rev": "", "pid": 7},
        "coll_perf": {
            "coll": "AllReduce", "coll_sn": number, "coll_msg_size_bytes": 1 << 20,
            "coll_exec_time_us": 200, "coll_timing_source": "kernel_gpu",
            "coll_algobw_gbs": 5.2, "coll_busbw_gbs": 10.5,
        } | perf,
    }  # fmt: skip
    return json.dumps(content).encode() + b"\n"


def file_of(folder: Path, pid: int = os.getpid()) -> Path:
    return folder / f"{socket.gethostname()}-pid{pid}.log"


def reader(folder: Path, **variables: str) -> InspectorReader:
    on = {"NCCL_INSPECTOR_ENABLE": "1", "NCCL_INSPECTOR_DUMP_DIR": str(folder)}
    return InspectorReader(os.getpid(), on | variables, Path("/"))


def group(name: str, *members: int) -> GroupProgress:
    return GroupProgress(group_id=name, label=name, ranks=members, sequence=3)


def ranks(**variables: str) -> list[RankSnapshot]:
    """Two ranks on CUDA whose world has one group; rank 0 has the pid of this process."""
    process = {"variables": {"NCCL_DEBUG": "", **variables}, "packages": {"nccl": "2.29.1"}}
    facts = {"groups": (group("world", 0, 1),), "process": process, "device": "cuda:0"}
    return [replace(rank(0, **facts), pid=os.getpid()), rank(1, **facts)]


# ---- Inspector ------------------------------------------------------------------------------------


def test_means_by_operation_and_communicator_of_a_file_that_grows(tmp_path: Path) -> None:
    path, one = file_of(tmp_path), reader(tmp_path)
    path.write_bytes(record(4) + record(9, coll_exec_time_us=400)[:40])
    (row,) = one.read()
    assert (row.op, row.number, row.records, row.seconds) == ("all_reduce", 4, 1, 200e-6)
    assert (row.communicator, row.size, row.place, row.timing) == (HASH, 2, 0, "kernel_gpu")
    with path.open("ab") as file:  # the rest of the line, and a record of sends, which has no coll_perf
        file.write(record(9, coll_exec_time_us=400)[40:])
        file.write(json.dumps({"header": json.loads(record(0))["header"], "p2p_perf": {}}).encode())
        file.write(b"\n" + record(2, coll="ReduceScatter"))
    two, other = one.read()
    assert (two.number, two.records, two.seconds) == (9, 2, pytest.approx(300e-6))
    assert two.busbw_bytes_per_second == pytest.approx(10.5e9)
    assert other.op == "reduce_scatter"
    assert one.note == ""


def test_of_a_large_file_the_end_counts(tmp_path: Path) -> None:
    """The reader must not spend the collector's second on a file of gigabytes."""
    file_of(tmp_path).write_bytes(record(1, coll="Broadcast") + record(7) * 5000)
    (row,) = reader(tmp_path).read()
    assert (row.op, row.records) == ("all_reduce", 64)


@pytest.mark.parametrize(
    ("variables", "note"),
    [({"NCCL_INSPECTOR_ENABLE": "0"}, ""), ({"NCCL_INSPECTOR_PROM_DUMP": "1"}, "for Prometheus"),
     ({}, "No such file")],
)  # fmt: skip
def test_without_records_it_says_why(tmp_path: Path, variables: dict[str, str], note: str) -> None:
    one = reader(tmp_path, **variables)
    assert one.read() == ()
    assert note in one.note if note else one.note == ""


def test_records_of_another_version_are_counted_and_not_guessed(tmp_path: Path) -> None:
    broken = b'{"header": {"id": 5}}\n\xff\n' + record(3, coll_sn="3")
    file_of(tmp_path).write_bytes(broken + record(8))
    one = reader(tmp_path)
    assert [row.number for row in one.read()] == [8]
    assert one.note.startswith("3 records")


def test_the_folder_is_the_plugins_own_where_none_is_given(tmp_path: Path) -> None:
    folder = tmp_path / "nccl-inspector-77"
    folder.mkdir()
    file_of(folder).write_bytes(record(1))
    one = InspectorReader(os.getpid(), {"NCCL_INSPECTOR_ENABLE": "1", "SLURM_JOBID": "77"}, tmp_path)
    assert len(one.read()) == 1


def test_the_collector_joins_records_with_the_process_group(tmp_path: Path) -> None:
    """By the places of the ranks; with a second group of the same ranks it is n/a."""
    file_of(tmp_path).write_bytes(record(5, place=0))
    variables = {"NCCL_INSPECTOR_ENABLE": "1", "NCCL_INSPECTOR_DUMP_DIR": str(tmp_path)}
    one, other = Nccl().inspected(ranks(**variables))
    assert [(row.group_id, row.group, row.number) for row in one.communication.inspected] == [
        ("world", "world", 5)
    ]
    assert other.communication.inspected == () and "No such file" in other.communication.inspector_note
    text = nccl_block(run(one))
    assert "all_reduce" in text and "world(2)" in text and "200 us" in text
    assert "No such file" in nccl_block(run(other))
    two_groups = (group("world", 0, 1), group("dp", 0, 1))
    both = [changed(r, groups=two_groups) for r in ranks(**variables)]
    (row, *_) = Nccl().inspected(both)[0].communication.inspected
    assert (row.group_id, row.group) == ("", "")
    assert "n/a(2)" in nccl_block(run(*Nccl().inspected(both)))
    assert nccl_block(run(rank())) == ""


def test_a_group_is_found_by_the_places_of_its_members() -> None:
    groups = (group("world", 0, 1, 2, 3), group("rows", 0, 1), group("columns", 0, 2))
    members = [rank(0, groups=groups)]
    assert group_of(2, {0: 0}, members) is None, "rows or columns"
    found = group_of(2, {0: 0, 1: 2}, members)
    assert found is not None and found.group_id == "columns"
    assert group_of(2, {0: 0, 7: 1}, members) is None
    assert group_of(2, {}, members) is None


# ---- RAS ------------------------------------------------------------------------------------------


def member(place: int, pid: int, launched: int, **status: Any) -> dict[str, Any]:
    common = {"rank": place, "host": "127.0.0.1", "pid": pid, "cuda_dev": 0, "nvml_dev": 0}
    return common | {"status": status, "collective_counts": {"AllReduce": launched, "Broadcast": 0}}


def status(*members: dict[str, Any], missing: tuple[dict[str, Any], ...] = ()) -> bytes:
    one = {"hash": HASH, "secondary_hash": "0x1:0x2", "size": len(members) + len(missing)}
    one |= {"ranks": list(members), "missing_ranks": list(missing)}
    content = {"nccl_version": "2.29.1", "communicators_count": 1, "communicators": [one]}
    return json.dumps(content | {"ras": {"timeouts_count": 0}}).encode()


@pytest.fixture
def service() -> Iterator[Any]:
    """A server of RAS's protocol: ``said`` is what it answers, ``asked`` what it was asked."""

    class Service:
        said, has_json = b"", True

        def __init__(self) -> None:
            self.asked: list[bytes] = []
            self.listening = socket.create_server(("127.0.0.1", 0))
            self.port = self.listening.getsockname()[1]
            threading.Thread(target=self.serve, daemon=True).start()

        def serve(self) -> None:
            while True:
                try:
                    connection, _ = self.listening.accept()
                except OSError:
                    return
                with connection, connection.makefile("rwb") as file:
                    self.asked.append(file.readline())
                    file.write(b"OK\n" if self.has_json else b"ERROR: Unknown command\n")
                    file.flush()
                    if self.has_json:
                        self.asked.append(file.readline())
                        file.write(self.said)

    one = Service()
    yield one
    one.listening.close()


HANG = Hang(
    kind=HangKind.ALL_INSIDE, op="all_reduce", group="world", group_id="world", sequence=9, nbytes=4,
    seconds=60.0, waiting=(0, 1), missing=(), dead=(), elsewhere=(), calls=(), members=(0, 1),
)  # fmt: skip


def seen(said: bytes, service: Any, *, of: list[RankSnapshot] | None = None) -> Ras:
    """What the collector knows after it has asked."""
    service.said = said
    one, found = Nccl(), None
    members = of or ranks(NCCL_RAS_ADDR=f"127.0.0.1:{service.port}")
    deadline = time.monotonic() + 60
    while found is None and time.monotonic() < deadline:
        found = one.ras(members, (HANG,), time.monotonic_ns())
        time.sleep(0.01)
    assert found is not None
    return found


def test_a_hang_is_told_with_what_nccl_has_launched(service: Any) -> None:
    answer = seen(status(member(0, os.getpid(), 1406), member(1, 999_999, 1405)), service)
    assert service.asked == [b"SET FORMAT json\n", b"VERBOSE STATUS\n"]
    one = run(*ranks(), ras=answer)
    text = hang_text(one, HANG)
    assert text.endswith("; NCCL has launched 1,406 all_reduce, on rank 1 1,405")
    assert decode_snapshot(encode_snapshot(one)).ras == answer, "recorded and read again"
    answer = seen(status(member(0, os.getpid(), 7), member(1, 999_999, 7)), service)
    text = hang_text(run(*ranks(), ras=answer), HANG)
    assert text.endswith("; NCCL has launched 7 all_reduce on all ranks that answer")


def test_ranks_that_nccl_does_not_reach_are_named(service: Any) -> None:
    gone = member(1, 999_999, 0, unresponsive=True, considered_dead=False)
    answer = seen(status(member(0, os.getpid(), 7, async_error=6), missing=(gone,)), service)
    text = hang_text(run(*ranks(), ras=answer), HANG)
    assert "; NCCL does not reach rank 1; NCCL has met an error in rank 0; " in text
    gone["status"]["considered_dead"] = True
    answer = seen(status(member(0, os.getpid(), 7, async_error=7), missing=(gone,)), service)
    text = hang_text(run(*ranks(), ras=answer), HANG)
    assert "; NCCL gives up rank 1; " in text and "reach" not in text and "error" not in text


def test_a_missing_rank_is_read_without_its_comma(service: Any) -> None:
    """NCCL 2.28.9 leaves it out before the status of a rank that is missing."""
    gone = member(1, 999_999, 0, unresponsive=True, considered_dead=False)
    whole = status(member(0, os.getpid(), 7), missing=(gone,))
    broken = whole.replace(b'"nvml_dev": 0, "status": {"unr', b'"nvml_dev": 0\n "status": {"unr')
    assert broken != whole
    assert seen(broken, service) == seen(whole, service)
    assert seen(broken, service).communicators[0].unresponsive == (1,)


def test_what_cannot_be_joined_is_not_guessed(service: Any) -> None:
    """Another job on the node, a group twice, a pid on another node that is one of ours here."""
    foreign = seen(status(member(0, 999_998, 7), member(1, 999_999, 6)), service)
    assert foreign.communicators == () and "another job" in foreign.note
    both = status(member(0, os.getpid(), 7), member(1, 999_999, 6))
    content = json.loads(both)
    content["communicators"] *= 2
    twice = seen(json.dumps(content).encode(), service)
    assert [one.group_id for one in twice.communicators] == ["", ""]
    text = hang_text(run(*ranks(), ras=twice), HANG)
    assert text.endswith("NCCL's view is n/a: no single communicator has the ranks of this group")
    elsewhere = json.loads(both)["communicators"][0]["ranks"]
    assert (
        is_local_address("127.0.0.1")
        and not is_local_address("192.0.2.1")
        and not is_local_address("nonsense")
    )
    elsewhere[0]["host"] = "192.0.2.1"
    assert seen(status(*elsewhere), service).communicators == ()


def test_without_an_answer_the_reason_is_told(service: Any) -> None:
    assert "cannot be read" in seen(b"<html>", service).note
    assert "cannot be read" in seen(b"", service).note
    service.has_json = False
    assert "older than 2.28.7" in seen(b"", service).note
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    refused = ask_ras("127.0.0.1", port)
    assert "refused" in refused.note.lower()
    text = hang_text(run(*ranks(), ras=ras_of(refused, ranks(), is_local_address)), HANG)
    assert "; NCCL's view is n/a: NCCL's RAS at 127.0.0.1" in text
    for variables, note in (
        ({"NCCL_RAS_ENABLE": "0"}, "is off"), ({"NCCL_RAS_ADDR": "host"}, "is no host:port"),
    ):  # fmt: skip
        one = RasReader()
        one.ask(variables, 0)
        assert one.answer is not None and note in one.answer.note
    assert ras_service_address({}) == ("localhost", 28028)
    assert ras_service_address({"NCCL_RAS_ADDR": "[::1]:99"}) == ("::1", 99)


def test_nobody_is_asked_without_a_hang_of_nccl() -> None:
    """The question costs every process of the job something."""
    pausing = replace(HANG, pause="rank 0 compiles")
    on_cpu = [replace(one, device="cpu") for one in ranks()]
    for members, hangs in ((ranks(), ()), (ranks(), (pausing,)), (on_cpu, (HANG,))):
        one = Nccl()
        assert one.ras(members, hangs, 0) is None and one._ras._thread is None
    assert ras_of(Answer("why"), ranks(), is_local_address).note == "why"
