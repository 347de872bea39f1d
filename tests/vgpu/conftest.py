"""Runs on the virtual device."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
from support import FORKED, LAUNCH, Node, Result, free_port

from vgpu.environment import CUDA_12, DEFAULT, NEWEST, Environment, Missing, find
from vgpu.truth import Timeline
from zeromon.snapshot import RunSnapshot
from zeromon_vgpu.machine import Fault, write_machine

HERE = Path(__file__).resolve().parent
SHORT_DUMP = {"TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "1000"}
"""For a run that NCCL's watchdog ends: by default it waits a minute for the Flight Recorder's file."""


@dataclass
class CudaRun:
    """What a program did on the virtual device: zeromon's record beside the device's own timeline."""

    folder: Path
    result: Result
    record_folder: Path

    @property
    def output(self) -> str:
        """What the ranks printed."""
        return self.result.output

    @property
    def record(self) -> RunSnapshot:
        """What zeromon knows of the run at its end."""
        return self.result.snapshot

    def truth(self, rank: int = 0) -> Timeline:
        """What the device of a rank did."""
        return Timeline.read(self.folder, rank)

    def losses(self, rank: int = 0) -> list[float]:
        """The losses that programs/train.py read."""
        found = re.search(rf"rank {rank} losses \[(.*?)\]", self.output)
        assert found is not None, self.output
        return [float(loss) for loss in found[1].split(",") if loss.strip()]


CudaRunner = Callable[..., CudaRun]


@pytest.fixture(scope="session")
def virtual_cuda() -> Environment:
    """The environment of `make vgpu`; skips where it was not made."""
    return _found(DEFAULT)


@pytest.fixture
def cuda_run(virtual_cuda: Environment, node: Node, tmp_path: Path) -> CudaRunner:
    """Runs a program of programs/ (or a path) on so many ranks; asserts that it ends well.

    *forked*: one import of torch serves all ranks, which saves memory and time.
    """
    return _runner(virtual_cuda, node, tmp_path)


@pytest.fixture(params=[DEFAULT, CUDA_12])
def each_cuda_run(request: pytest.FixtureRequest, node: Node, tmp_path: Path) -> CudaRunner:
    """Runs a program with a torch of CUDA 13 and with one of CUDA 12."""
    return runner_of(request.param, node, tmp_path)


@pytest.fixture
def newest_cuda_run(node: Node, tmp_path: Path) -> CudaRunner:
    """Runs a program with the newest torch, whose "nccl" is another backend and calls hooks."""
    return runner_of(NEWEST, node, tmp_path)


def runner_of(version: str, node: Node, tmp_path: Path) -> CudaRunner:
    """Runs programs with that version of torch; skips where it was not made."""
    return _runner(_found(version), node, tmp_path)


def _found(version: str) -> Environment:
    try:
        return find(version)
    except Missing as reason:
        pytest.skip(str(reason))


def _runner(virtual_cuda: Environment, node: Node, tmp_path: Path) -> CudaRunner:
    def run(
        script: str | Path,
        *arguments: str,
        ranks: int = 2,
        nodes: int = 1,
        device: str = "h100",
        faults: Sequence[Fault] = (),
        changes: Mapping[str, float | str] | None = None,
        watched: bool = False,
        arithmetic: bool = False,
        ends_well: bool = True,
        forked: bool = False,
        timeout: float = 600,
        seen: Callable[[RunSnapshot], None] | None = None,
        **extra: str,
    ) -> CudaRun:
        folder = tmp_path / f"run{node.runs}"
        write_machine(folder, device, faults, changes)
        path = script if isinstance(script, Path) else HERE / "programs" / script
        launcher = FORKED[1:] if forked else LAUNCH[1:]
        launch = [*launcher, str(ranks), "--nodes", str(nodes)]
        command = [str(virtual_cuda.python), *launch, str(path)]
        ras = {"NCCL_RAS_ADDR": f"localhost:{free_port()}"}  # else any run of this machine answers
        variables = virtual_cuda.variables(folder) | ras | extra
        if arithmetic:
            variables["VGPU_ARITHMETIC"] = "1"
        result = node.run(
            [*command, *arguments], watched=watched, timeout=timeout, seen=seen, **variables
        )
        if ends_well:
            assert result.code == 0, result.output
        return CudaRun(folder, result, node.store.folder(result.run))

    return run
