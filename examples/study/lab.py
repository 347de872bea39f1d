"""Runs train.py on virtual CUDA devices, and returns what the frameworks did there."""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import socket
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

from zeromon.base.errors import LaunchError
from zeromon.cli.measured_launch import Request, lasting_hang, run_launch
from zeromon.cli.report import snapshot_or_none
from zeromon.cli.virtual_machine import RankRings, placed_launch, virtual_machine, waits_by_unit
from zeromon.memory.fit import Trial
from zeromon.snapshot import RankSnapshot, RunSnapshot
from zeromon_vgpu.intervals import length, union
from zeromon_vgpu.machine import write_machine
from zeromon_vgpu.timeline import read_timeline, unhindered_steps

TRAIN = Path(__file__).parent / "train.py"
RANKS = 4
GB = 1e9
MAX_SECONDS = 570
OUT_OF_MEMORY = "out of memory"


@dataclass(frozen=True)
class Job:
    """One training run: what trains, and the machine that is modelled."""

    strategy: str
    shape: Mapping[str, int] = field(default_factory=dict)
    """Options of train.py: width, layers, batch, length, recomputed."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """What differs from the defaults of DeepSpeed's zero_optimization, or of DDP."""
    gpu: str = "h100"
    changes: Mapping[str, float] = field(default_factory=dict)
    """Speeds of the virtual machine, by the names of zeromon_vgpu/machine.py."""

    @property
    def key(self) -> str:
        """The job and the program as text."""
        program = hashlib.sha256(TRAIN.read_bytes()).hexdigest()[:8]
        return json.dumps({**asdict(self), "program": program}, sort_keys=True)

    def words(self) -> list[str]:
        """Arguments of train.py."""
        words = [self.strategy]
        for name, value in self.shape.items():
            words += [f"--{name}", str(value)]
        for name, value in self.settings.items():
            words += ["--set", f"{name}={json.dumps(value)}"]
        return words


@dataclass(frozen=True)
class Result:
    """What one job did, of rank 0. Bytes, and seconds of the virtual device."""

    outcome: str = ""
    """"" where it trained, "out of memory", or why it failed."""
    roles: Mapping[str, int] = field(default_factory=dict)
    """Role -> bytes that zeromon counted on the device."""
    host_bytes: int = 0
    """States on the host."""
    after_backward: int = 0
    """Bytes that torch's allocator has handed out between backward and the optimizer's step."""
    peak: int = 0
    """The most bytes that it has handed out."""
    peak_phase: str = ""
    collectives: Mapping[str, int] = field(default_factory=dict)
    """Operation -> bytes in a step, by zeromon's record of the calls."""
    step: float = 0.0
    exposed: float = 0.0
    communication: float = 0.0
    copied_bytes: int = 0
    copies: float = 0.0
    """Seconds of copies to and from the host in a step."""


class Lab:
    """A folder of results: each job runs once."""

    def __init__(self, python: Path, folder: Path, say: Callable[[str], None]) -> None:
        self.python, self.folder, self.say = python, folder, say
        folder.mkdir(parents=True, exist_ok=True)
        self._file = folder / "results.jsonl"
        rows = self._file.read_text().splitlines() if self._file.exists() else []
        self._known = {row["job"]: Result(**row["result"]) for row in map(json.loads, rows)}

    def run(self, job: Job) -> Result:
        """Returns the result of *job*, which runs unless it is known. One that fails ends the study."""
        if job.key not in self._known:
            self.say(" ".join(job.words()))
            result = run_job(job, self.python, self.say)
            if result.outcome not in ("", OUT_OF_MEMORY):
                raise SystemExit(f"{' '.join(job.words())} failed: {result.outcome}")
            self._known[job.key] = result
            row = {"job": job.key, "result": asdict(result)}
            with self._file.open("a") as file:
                file.write(json.dumps(row) + "\n")
        return self._known[job.key]


def run_job(job: Job, python: Path, say: Callable[[str], None]) -> Result:
    """Trains once. One process runs as rank 0 and stands for all ranks, which do the same."""
    launcher = ("-m", "torch.distributed.run", "--nproc-per-node", str(RANKS))
    command = [str(python), *launcher, str(TRAIN), *job.words()]
    machine_options = argparse.Namespace(gpu=job.gpu, link=None, network=4e11, arithmetic=False)
    name = f"study-{os.getpid()}"
    with (
        tempfile.TemporaryDirectory() as folder,
        mock.patch.dict(os.environ, ZEROMON_STORE=folder),
        virtual_machine(command, machine_options, name) as machine,
    ):
        write_machine(machine.folder, changes={**machine.values, **job.changes})
        # The one process that runs needs no launcher, whose import of torch takes seconds
        environment = {**placed_launch(command, None, 1, machine.environment).environment, **_FIRST_RANK}
        environment["MASTER_PORT"] = str(free_port())
        rings = RankRings(machine.folder / "live")
        request = Request(
            trial=Trial(stage="", micro_batch=1), command=[str(python), str(TRAIN), *job.words()],
            name=name, ranks=1, environment=environment, log=Path(folder, "output"), steps=5,
            most_seconds=MAX_SECONDS, poll_seconds=0.1, stop_reason=partial(_stop_reason, rings),
        )  # fmt: skip
        try:
            outcome = run_launch(request, say).outcome
        except LaunchError as failure:
            outcome = str(failure)
        output = request.log.read_text(errors="replace")
        run = snapshot_or_none(name)
        if run is None or not run.ranks:
            return Result(outcome or output[-500:])
        return read_result(run, machine.folder, rings, output, outcome)


_FIRST_RANK = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1"}
"""What torchrun sets where it starts one process."""


def free_port() -> int:
    """Returns a port that nobody listens at."""
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        return int(server.getsockname()[1])


def _stop_reason(rings: RankRings, run: RunSnapshot) -> str:
    rings.open_new()
    return lasting_hang(run)


def read_result(run: RunSnapshot, folder: Path, rings: RankRings, output: str, outcome: str) -> Result:
    """Returns the figures of rank 0."""
    rank = run.ranks[0]
    facts = [json.loads(row) for row in re.findall(r"^.*?facts (\{.*\})$", output, re.MULTILINE)]
    device = rank.memory.device
    if rank.memory.out_of_memory:
        return Result(OUT_OF_MEMORY)
    figures = step_figures(rank, folder, rings)
    if outcome or not facts or device is None or "step" not in figures:
        return Result(outcome or f"no two steps on the device's clock: {output[-500:]}")
    return Result(
        outcome="",
        roles={row.role: row.device_bytes for row in rank.memory.roles},
        host_bytes=sum(row.host_bytes for row in rank.memory.roles),
        after_backward=facts[-1]["after_backward"],
        peak=facts[-1]["peak"],
        peak_phase=device.peak_phase,
        **figures,
    )


def step_figures(rank: RankSnapshot, folder: Path, rings: RankRings) -> dict[str, Any]:
    """Seconds and bytes of a step, on the device's clock for a host that is always ahead of it."""
    operations = list(read_timeline(folder, f"{rank.rank}-{rank.pid}"))
    calls = rings.calls(rank.pid)
    carried: dict[str, int] = {}
    for row in waits_by_unit(operations, calls):
        carried[row.op] = carried.get(row.op, 0) + row.nbytes
    windows = [(step.start_ns, step.end_ns) for step in rank.steps.recent if step.step > 1]
    kinds = unhindered_steps(operations, windows)
    if kinds is None:
        return {"collectives": carried}
    ahead, count = kinds[0], len(windows)
    copied = [op for op in operations if op.direction in ("to host", "to device")]
    copied = [op for op in copied if windows[0][0] <= op.start < windows[-1][1]]
    spans = union(op.unhindered[0] for op in copied)
    return {
        "collectives": carried, "step": ahead.span / 1e9, "exposed": ahead.exposed / 1e9,
        "communication": ahead.communication / 1e9, "copies": length(spans) / count / 1e9,
        "copied_bytes": round(sum(op.bytes for op in copied) / count),
    }  # fmt: skip


def print_progress(message: str) -> None:
    """Shows *message* in place of the previous one."""
    sys.stderr.write(f"\r\033[K{message}")
    sys.stderr.flush()
