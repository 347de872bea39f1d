"""Rings of real runs, recorded once: `python tests/recordings.py [NAME ...]` records them anew.

A run of two ranks takes seconds; folding what its ranks wrote takes milliseconds. So each kind of run is
trained once in the tests, and its variants are recordings. `make recordings` needs a machine that nobody
else uses, for some are about time. A recording is a folder of tests/data/rings: a gzipped ring for each
rank as the store keeps it, and facts.json with the command, the versions, and what the program measured.
"""

from __future__ import annotations

import gzip
import json
import platform
import shutil
import struct
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

from support import ROOT, Node, Result, train_command

from zeromon.ring.buffer import HEADER_SIZE, RingReader
from zeromon.ring.events import RECORD_SIZE

RINGS = ROOT / "tests" / "data" / "rings"
_HEADER = struct.Struct("<8sIIQQqIiQQ")
"""Of a ring: magic, version, sizes of a record, all records and the names, pid, flags, rank, clocks."""


class Recording(NamedTuple):
    """What is trained for a recording."""

    program: str
    arguments: tuple[str, ...]
    ranks: int = 2
    deepspeed: bool = False


def _gpt(strategy: str) -> tuple[str, ...]:
    sizes = "--layers 3 --heads 2 --length 128 --log-every 100 --width 64 --batch 6".split()
    return (*strategy.split(), "--steps", "80", *sizes)


RECORDINGS = {
    "straggler-none": Recording("slow_rank.py", ("none", "0.3")),
    "straggler-data": Recording("slow_rank.py", ("data", "0.3")),
    "straggler-ddp": Recording("slow_rank.py", ("forward", "0.3", "60", "ddp")),
    "overlap-0.9": Recording("overlap.py", ("100", "90")),
    "overlap-hidden": Recording("overlap.py", ("40", "120")),
    "exposed-fsdp2-off": Recording("exposed.py", ("fsdp2", "off", "30")),
    "exposed-fsdp2-on": Recording("exposed.py", ("fsdp2", "on", "30")),
    "exposed-zero2": Recording("exposed.py", ("zero2", "on", "30"), deepspeed=True),
    "advised-units-before": Recording("advised.py", ("whole_model_unit", "before", "30")),
    "advised-units-after": Recording("advised.py", ("whole_model_unit", "after", "30")),
    "advised-reshard-before": Recording("advised.py", ("reshard_without_need", "before", "30")),
    "advised-reshard-after": Recording("advised.py", ("reshard_without_need", "after", "30")),
    "advised-data-before": Recording("advised.py", ("data_wait", "before", "30")),
    "advised-data-after": Recording("advised.py", ("data_wait", "after", "30")),
    "healthy-ddp": Recording("../../examples/train_gpt.py", _gpt("--strategy ddp")),
    "healthy-zero3": Recording(
        "../../examples/train_gpt_deepspeed.py", _gpt("--no-compile"), deepspeed=True
    ),
}


def facts_of(name: str) -> dict[str, Any]:
    """What was written beside the rings: `measured` is the program's own measurement, if it has one."""
    facts: dict[str, Any] = json.loads((RINGS / name / "facts.json").read_text())
    return facts


def replay(node: Node, name: str) -> Result:
    """The run as a collector shows it that finds the rings right after the last step.

    A process that waits stands for the ranks: the collector looks at them once while it lives, and then
    until it has seen their end.
    """
    folder = node.root / name
    folder.mkdir(mode=0o700)
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE) as rank:
        made = time.monotonic_ns()
        ends = [_lay(kept, folder, rank.pid, made) for kept in sorted((RINGS / name).glob("*.ring.gz"))]
        node.collector.tick()
        for path, at, record in ends:
            with path.open("r+b") as ring:
                ring.seek(at)
                ring.write(record)
        rank.communicate()
    return Result(name, 0, "", node.settle(name))


def _lay(kept: Path, folder: Path, pid: int, made_ns: int) -> tuple[Path, int, bytes]:
    """Puts a recorded ring into *folder* without its last record; returns where that belongs, and it."""
    ring = bytearray(gzip.decompress(kept.read_bytes()))
    header = list(_HEADER.unpack_from(ring))
    *_, wall_ns, mono_ns = header
    # the rank is born before its ring; what a moment of the record is by the wall clock stays the same
    header[5], header[8:] = pid, [wall_ns + made_ns - mono_ns, made_ns]
    _HEADER.pack_into(ring, 0, *header)
    path = folder / f"{kept.name.split('.')[0]}.{pid}.ring"
    path.write_bytes(ring)
    reader = RingReader(path)
    last = reader.newest()
    at = HEADER_SIZE + reader.header.names_size + (last - 1) % reader.header.capacity * RECORD_SIZE
    record = bytes(ring[at : at + RECORD_SIZE])
    ring[at : at + RECORD_SIZE] = bytes(RECORD_SIZE)
    path.write_bytes(ring)
    return path, at, record


def record(name: str) -> None:
    """Trains the recording *name* and keeps its rings."""
    what = RECORDINGS[name]
    node = Node(Path(tempfile.mkdtemp(prefix="zeromon-record-")))
    measured = node.folder / "measured.json"
    command = train_command(what.ranks, *what.arguments, program=what.program)
    extra = {"DS_ACCELERATOR": "cpu"} if what.deepspeed else {}
    result = node.run(command, run=name, TRUTH=str(measured), **extra)
    assert result.code == 0, result.output
    shutil.rmtree(RINGS / name, ignore_errors=True)
    (RINGS / name).mkdir(parents=True)
    size = 0
    for kept in sorted(node.store.folder(name).glob("rank*.ring.gz")):
        rank, _, _ = kept.name.partition(".")
        packed = gzip.compress(gzip.decompress(kept.read_bytes()), 9, mtime=0)
        (RINGS / name / f"{rank}.ring.gz").write_bytes(packed)
        size += len(packed)
    import torch

    facts = {
        "program": f"tests/programs/{what.program}".replace("tests/programs/../../", ""),
        "arguments": what.arguments,
        "ranks": what.ranks,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "measured": json.loads(measured.read_text()) if measured.exists() else None,
    }
    (RINGS / name / "facts.json").write_text(json.dumps(facts) + "\n")
    print(f"{name}: {size / 1024:.0f} KiB")
    node.close()


if __name__ == "__main__":
    for chosen in sys.argv[1:] or RECORDINGS:
        record(chosen)
