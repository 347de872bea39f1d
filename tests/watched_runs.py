"""Snapshots of real runs, every five seconds: `python tests/watched_runs.py [NAME ...]` records them.

A recording holds snapshots and no metrics: the tests export it anew, as a scrape of that moment would.
To record needs root and a memory controller, for the kernel kills one of the runs.
"""

from __future__ import annotations

import lzma
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import msgspec
from support import PROGRAMS, Node

from zeromon.export.prometheus.metrics import Writer
from zeromon.snapshot import RunSnapshot
from zeromon.snapshot.run import Health
from zeromon.storage.run_store import decode_snapshot, encode_snapshot

TESTS = Path(__file__).resolve().parent
RECORDED = TESTS / "data" / "runs"
SCRAPE_SECONDS = 5
_OOM_LIMIT = 1600 << 20


class Watched(NamedTuple):
    """A program of two ranks, and when it is ended from outside."""

    program: str
    arguments: tuple[str, ...]
    seconds: float = 600.0
    limited: bool = False
    """It runs in a memory cgroup."""


RUNS = {
    "healthy": Watched("slow_rank.py", ("none", "0", "1200", "ddp")),
    "slow": Watched("slow_rank.py", ("forward", "2.0", "100000"), 100.0),
    "hung": Watched("faults.py", ("fsdp2", "sleep", "500"), 120.0),
    "dead": Watched("../../examples/leak.py", ("--batch", "4"), limited=True),
}


class Scrape(NamedTuple):
    """The answer of a collector at a moment."""

    run: RunSnapshot
    collector: Health

    @property
    def at(self) -> float:
        """Seconds since the epoch; of a run that has ended the snapshot is older."""
        return self.collector.last_tick_wall

    def openmetrics(self) -> str:
        """Its samples with their time and the label of a scrape, as promtool reads them."""
        answer = Writer().write([self.run], self.collector, openmetrics=True).decode()
        label, taken = f'instance="{self.run.node}:9417"', f" {self.at:.3f}\n"
        lines = (line for line in answer.splitlines() if not line.startswith("#"))
        return "".join(_with_label(line, label) + taken for line in lines)


def _with_label(sample: str, label: str) -> str:
    name, brace, labels = sample.partition("{")
    if brace:
        return f"{name}{{{label},{labels}"
    name, _, number = sample.partition(" ")
    return f"{name}{{{label}}} {number}"


def scrapes(name: str) -> Iterator[Scrape]:
    """The recording *name*, from the run's first moment to half a minute after its end."""
    for line in lzma.decompress((RECORDED / f"{name}.xz").read_bytes()).splitlines():
        collector, snapshot = msgspec.json.decode(line, type=tuple[Health, msgspec.Raw])
        yield Scrape(decode_snapshot(bytes(snapshot)), collector)


def record(name: str) -> None:
    """Trains the run *name* and keeps its snapshots."""
    watched = RUNS[name]
    node = Node(Path(tempfile.mkdtemp(prefix="zeromon-record-")))
    cgroup = Path("/sys/fs/cgroup/memory", f"zeromon-record-{os.getpid()}")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += [str(PROGRAMS / watched.program), *watched.arguments]
    if watched.limited:
        cgroup.mkdir()
        (cgroup / "memory.limit_in_bytes").write_text(str(_OOM_LIMIT))
        command = ["sh", "-c", f'echo $$ > {cgroup}/cgroup.procs && exec "$@"', "sh", *command]
    environment = node.environment(name, FAULT_AT=str(node.folder / "at"))
    lines, due, left = [], 0.0, 30.0 / SCRAPE_SECONDS
    running = subprocess.Popen(
        command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    end = time.monotonic() + watched.seconds
    while left > 0:
        time.sleep(0.5)
        node.collector.tick()
        snapshot = node.snapshot(name)
        if running.poll() is None and time.monotonic() > end:
            running.send_signal(signal.SIGTERM)
        if snapshot is None or not snapshot.ranks or time.monotonic() < due:
            continue
        due = time.monotonic() + SCRAPE_SECONDS
        left -= snapshot.ended
        lines.append(
            b"[%b,%b]" % (msgspec.json.encode(node.collector.health), encode_snapshot(snapshot))
        )
    RECORDED.mkdir(exist_ok=True)
    content = b"\n".join(lines).replace(bytes(TESTS.parent), b"/zeromon")
    (RECORDED / f"{name}.xz").write_bytes(lzma.compress(content, preset=9 | lzma.PRESET_EXTREME))
    print(name, len(lines), "scrapes", (RECORDED / f"{name}.xz").stat().st_size, "bytes", flush=True)
    node.close()
    if watched.limited:
        time.sleep(2)
        cgroup.rmdir()


if __name__ == "__main__":
    for wanted in sys.argv[1:] or RUNS:
        record(wanted)
