"""ZeRO-Infinity on a real disk: `make test-nvme`. Needs libaio-dev and g++; as root also a slow disk.

DeepSpeed's asynchronous I/O is compiled once (about 4 minutes) into .nvme-build.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from support import ROOT, TORCHRUN, Node, Result

from zeromon.diagnosis.engine import advise
from zeromon.snapshot import RankSnapshot
from zeromon.snapshot.memory import TransferRow

pytestmark = pytest.mark.nvme

STEPS = 12
BLKIO = Path("/sys/fs/cgroup/blkio")
SLOW, UNBOUND = 40 << 20, 1 << 40
LIBRARIES = 100 << 20
BUILDS = os.environ.get("TORCH_EXTENSIONS_DIR") or str(ROOT / ".nvme-build")
MODEL = "--width 512 --layers 2 --batch 2 --length 32 --no-compile".split()


@pytest.fixture(scope="module", autouse=True)
def operators() -> None:
    """In one process: two ranks that build at once would wait for each other's lock."""
    build = "from deepspeed.ops.op_builder import AsyncIOBuilder; AsyncIOBuilder().load(verbose=False)"
    subprocess.run(
        [sys.executable, "-c", build],
        env={**os.environ, "TORCH_EXTENSIONS_DIR": BUILDS, "DS_ACCELERATOR": "cpu"},
        check=True,
        timeout=1200,
    )


@dataclass
class Group:
    """A cgroup of the block layer: counts and throttles what its tasks do."""

    folder: Path

    def moved(self) -> dict[str, int]:
        """Bytes that the kernel counted on all devices: Read, Write."""
        text = (self.folder / "blkio.throttle.io_service_bytes_recursive").read_text()
        sums = {"Read": 0, "Write": 0}
        for line in text.splitlines():
            words = line.split()
            if len(words) == 3 and words[1] in sums:
                sums[words[1]] += int(words[2])
        return sums

    def throttle(self, path: Path, rate: int) -> None:
        """At most *rate* bytes a second each way on the device of *path*."""
        number = path.stat().st_dev
        for way in ("read", "write"):
            file = self.folder / f"blkio.throttle.{way}_bps_device"
            file.write_text(f"{os.major(number)}:{os.minor(number)} {rate}")

    def inside(self, command: list[str]) -> list[str]:
        """*command*, started in the group."""
        script = f'echo $$ > {self.folder}/cgroup.procs && exec "$@"'
        return ["sh", "-c", script, "sh", *command]


@pytest.fixture
def group() -> Iterator[Group]:
    folder = BLKIO / f"zeromon-test-{os.getpid()}"
    try:
        folder.mkdir()
    except OSError:
        pytest.skip("needs root and the blkio controller of cgroup v1")
    yield Group(folder)
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        try:
            return folder.rmdir()
        except OSError:  # a task is still leaving
            time.sleep(0.1)


CONFIG = ROOT / "examples/deepspeed/zero3-nvme.json"


def train(
    node: Node, tmp_path: Path, group: Group, *more: str, config: Path = CONFIG, steps: int = STEPS
) -> Result:
    command = [
        *TORCHRUN, "2", str(ROOT / "examples/train_gpt_deepspeed.py"), "--steps", str(steps),
        "--config", str(config), "--nvme", str(tmp_path), *MODEL, *more,
    ]  # fmt: skip
    result = node.run(
        group.inside(command), timeout=400, DS_ACCELERATOR="cpu", TORCH_EXTENSIONS_DIR=BUILDS
    )
    assert result.code == 0, result.output
    return result


def paths(rank: RankSnapshot) -> dict[str, TransferRow]:
    return {row.path: row for row in rank.memory.transfers}


@pytest.mark.parametrize("accumulate", [1, 2])
def test_bytes_to_and_from_the_disk_are_the_kernels(
    node: Node, tmp_path: Path, group: Group, accumulate: int
) -> None:
    """What the ranks say they moved is what the block layer counted, and the roles are there."""
    group.throttle(tmp_path, UNBOUND)  # some kernels count only where there is a limit
    result = train(node, tmp_path, group, "--accumulate", str(accumulate))
    counted = group.moved()
    ranks = result.snapshot.ranks
    for way, path in (("Read", "disk_read"), ("Write", "disk_write")):
        told = sum(paths(rank)[path].nbytes for rank in ranks)
        print(f"accumulation {accumulate}: {path} {told} B, the kernel's count {counted[way]} B")
        beside = counted[way] - told  # programs and libraries are read from the disk, too
        assert 0 <= beside < LIBRARIES if way == "Read" else abs(beside) < 0.01 * told
        assert all(paths(rank)[path].bytes_per_second > 1 << 20 for rank in ranks)
    roles = {row.role: row.disk_bytes for row in ranks[0].memory.roles}
    assert roles["optimizer_state"] == 2 * roles["master_param"] > 0  # Adam: two of fp32
    assert ranks[0].strategy == "deepspeed-zero3-nvme"
    assert ranks[0].machine.disk is not None
    assert ranks[0].machine.disk.free_bytes
    for row in ranks[0].memory.transfers:
        print(f"{row.path}: {(row.bytes_per_second or 0) / 1e6:.0f} MB/s, {row.blocked_seconds:.1f} s")


def test_a_slow_disk_is_named(node: Node, tmp_path: Path, group: Group) -> None:
    """Throttled by the kernel, the disk is what steps wait for; its speed is the throttle's."""
    group.throttle(tmp_path, SLOW)
    result = train(node, tmp_path, group)
    found = {finding.rule: finding for finding in advise(result.snapshot)}
    finding = found["offload_waits"]
    print(finding.text, finding.remedy)
    assert finding.severity == "warning"
    assert "disk" in finding.text
    assert finding.remedy is not None
    assert "the cgroup allows no more than 42 MB/s" in finding.remedy.cause
    for rank in result.snapshot.ranks:  # the throttle is shared by both
        assert paths(rank)["disk_read"].bytes_per_second < 1.1 * SLOW


def test_a_disk_that_is_asked_for_little_is_told_from_a_slow_one(
    node: Node, tmp_path: Path, group: Group
) -> None:
    """Two rounds in turns: the finding names the settings, and with its diff the disk gives more."""
    before: dict[str, object] = {
        "block_size": 65536, "queue_depth": 1, "single_submit": True, "overlap_events": False,
    }  # fmt: skip
    after = {
        "block_size": 8388608, "queue_depth": 32, "intra_op_parallelism": 8,
        "single_submit": False, "overlap_events": True,
    }  # fmt: skip
    seconds: dict[str, list[float]] = {"before": [], "after": []}
    rates: dict[str, list[float]] = {"before": [], "after": []}
    for _ in range(2):
        for state, aio in (("before", before), ("after", after)):
            config = json.loads(CONFIG.read_text())
            config["aio"].update(aio)
            file = tmp_path / f"{state}.json"
            file.write_text(json.dumps(config))
            rank = train(node, tmp_path, group, config=file, steps=40).snapshot.ranks[0]
            seconds[state].append(rank.steps.median_seconds or 0.0)
            rates[state].append(paths(rank)["disk_read"].bytes_per_second or 0.0)
            found = {f.rule: f for f in advise(node.collector.view[-1])}.get("offload_waits")
            if state == "before":
                assert found is not None and found.remedy is not None
                assert '"queue_depth": 32' in found.remedy.diff.splitlines()[1]
                low, high = found.remedy.gain_low_seconds, found.remedy.gain_high_seconds
                print(f"{found.text}; {found.remedy.cause}: {low} to {high} s shorter")
    print(f"steps of {seconds} s; reads at {rates} B/s")
    assert min(rates["after"]) > max(rates["before"])
