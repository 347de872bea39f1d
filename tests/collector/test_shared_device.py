"""Two ranks on one device: what is not torch's is what the process holds, less what it reserved."""

from __future__ import annotations

import os
import time
from pathlib import Path

from zeromon.collector.run import RunFollower
from zeromon.memory.reconcile import unattributed_memory
from zeromon.probes.devices import Devices
from zeromon.ring.buffer import NameKind, RingWriter
from zeromon.ring.codes import Kind
from zeromon.ring.events import pack_head
from zeromon.snapshot.host import Device

GIB = 1 << 30


class Driver:
    """A device with 60 GiB in use; *own*: what it says of each process."""

    def __init__(self, own: int | None, processes: int | None) -> None:
        self._own, self._processes = own, processes

    def read(self, uuid: str, now_ns: int, pid: int, /) -> Device:
        return Device(used_bytes=60 * GIB, own_bytes=self._own, processes=self._processes)

    def uuids(self) -> list[str]:
        return ["GPU-1"]

    def driver(self) -> str:
        return "1"

    def links(self, uuid: str) -> tuple[float | None, str]:
        return None, ""

    host_link = links


def not_torchs(folder: Path, driver: Driver, uuids: tuple[str, ...]) -> list[int | None]:
    """By rank; each has reserved 20 GiB."""
    folder.mkdir(mode=0o700)
    for number, uuid in enumerate(uuids):
        name = folder / f"rank{number}.{os.getpid()}.ring"
        ring = RingWriter(name, rank=number, pid=os.getpid(), capacity=1024)
        ring.name(NameKind.META, {"strategy": "ddp", "world_size": 2, "device_uuid": uuid})
        now = time.monotonic_ns()
        ring.write(now, pack_head(Kind.MEMORY), 0, 10 * GIB, 10 * GIB, 20 * GIB, 0)
    run = RunFollower(folder)
    run.poll()
    snapshot = run.snapshot(Devices(driver))
    rests = [{one.kind: one.nbytes for one in unattributed_memory(r)} for r in snapshot.ranks]
    assert [rest["reserved_unallocated"] for rest in rests] == [10 * GIB] * len(uuids)
    return [rest.get("non_torch") for rest in rests]


def test_by_process_where_the_driver_says_so(tmp_path: Path) -> None:
    found = not_torchs(tmp_path / "a", Driver(22 * GIB, 2), ("GPU-1", "GPU-1"))
    assert found == [2 * GIB, 2 * GIB]


def test_of_one_sum_the_part_of_a_rank_is_unknown(tmp_path: Path) -> None:
    """Also where the driver lists no process, as in a container: the ranks of the run are known."""
    for number, listed in enumerate((None, 0, 2)):
        found = not_torchs(tmp_path / str(number), Driver(None, listed), ("GPU-1", "GPU-1"))
        assert found == [None, None]
    assert not_torchs(tmp_path / "others", Driver(None, 3), ("GPU-1",)) == [None]


def test_a_rank_with_a_device_of_its_own_has_the_whole_sum(tmp_path: Path) -> None:
    found = not_torchs(tmp_path / "a", Driver(None, None), ("GPU-1", "GPU-2"))
    assert found == [40 * GIB, 40 * GIB]
