"""Two ranks of DDP that lose time in known ways: `ledger.py STEPS [LOSS ...]`.

Each rank writes ``{"loss": [times, seconds]}``, measured around what it injected, to LEDGER_TRUTH.RANK.

save        a checkpoint whose file takes 0.5 s, in step 4
dcp         torch.distributed.checkpoint.save, in step 5
evaluate    eight batches of 50 ms and a model in evaluation mode, in steps 6 and 12
collect     a garbage collection that takes 0.4 s, in step 7
compile     a backend that takes 0.6 s, in step 8, and once more with another shape in step 10
loader      each batch takes 30 ms
late        rank 1 computes 60 ms longer in every step
collects    rank 0 collects garbage for 0.4 s after each step
saves       rank 0 alone saves a checkpoint, slowly, after each step
kill        rank 0 kills itself in step 14 of its first attempt; the next resumes after step 4
"""

from __future__ import annotations

import gc
import io
import json
import os
import signal
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # its import is none of a compilation
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

WIDTH = 64


def lifetime() -> float:
    """Seconds since this process began, by the kernel's clock ticks."""
    ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    return time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")


class Truth:
    """What was injected, by the program's own clock."""

    def __init__(self, file: str) -> None:
        self._file = Path(file)
        self.lost: dict[str, list[float]] = defaultdict(lambda: [0, 0.0])
        self.saved = 0.0
        """When the last step ended that a checkpoint holds."""

    @contextmanager
    def of(self, loss: str) -> Iterator[None]:
        """Adds the time of its body."""
        began = time.perf_counter()
        yield
        self.lost[loss][0] += 1
        self.lost[loss][1] += time.perf_counter() - began

    def write(self) -> None:
        """Writes what is known so far, and the life of the process until now."""
        self.lost["process"] = [1, lifetime()]
        if self.saved:
            since = time.perf_counter() - self.saved - self.lost["checkpoint"][1]
            self.lost["lost"] = [1, since]
        self._file.write_text(json.dumps(self.lost))


class SlowFile(io.BytesIO):
    """A file system that takes its time."""

    def write(self, content: Any) -> int:
        time.sleep(max(0.0, 0.5 - self.slept))
        self.slept = 0.5
        return super().write(content)

    slept = 0.0


class Slow(Dataset[Any]):
    """Batches that take their time."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds

    def __len__(self) -> int:
        return 1 << 20

    def __getitem__(self, _: int) -> torch.Tensor:
        time.sleep(self._seconds)
        return torch.ones(8, WIDTH)


class Cycle:
    """Garbage that only a collection finds, and that takes its time to go."""

    def __init__(self) -> None:
        self.own = self

    def __del__(self) -> None:
        time.sleep(0.4)


def backend(graph: Any, _: Any) -> Any:
    """A compiler that takes its time."""
    time.sleep(0.6)
    return graph.forward


class Job:
    """A training loop, and what is to be lost in it."""

    def __init__(self, losses: set[str]) -> None:
        self.losses = losses
        self.place = os.environ["LEDGER_TRUTH"]
        self.rank = int(os.environ["RANK"])
        self.attempt = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
        # a file of its own: torchrun's store keeps the addresses of the attempt before
        store = dist.FileStore(f"{self.place}.store.{self.attempt}", 2)
        dist.init_process_group("gloo", store=store, rank=self.rank, world_size=2)
        self.truth = Truth(f"{self.place}.{self.attempt}.{self.rank}")
        layers = nn.Sequential(nn.Linear(WIDTH, 512), nn.Linear(512, 1))
        self.model = DistributedDataParallel(layers)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), 1e-3)
        self.compiled = torch.compile(nn.Linear(WIDTH, 1), backend=backend, dynamic=False)
        self.saved = Path(f"{self.place}.optimizer.{self.rank}")
        self.first = 1
        if self.saved.exists():
            self.optimizer.load_state_dict(torch.load(self.saved))
            self.first = 5
        slow = Slow(0.03 if "loader" in losses else 0.0)
        self.training = iter(DataLoader(slow, batch_size=None))
        gc.disable()  # each collection is one of this program's

    def step(self) -> torch.Tensor:
        """One step of training; returns its batch."""
        with self.truth.of("data"):
            batch: torch.Tensor = next(self.training)
        loss = self.model(batch).mean()
        time.sleep(0.02)
        if "late" in self.losses and self.rank == 1:
            with self.truth.of("waiting"):
                time.sleep(0.06)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return batch

    def beside(self, step: int, batch: torch.Tensor) -> None:
        """What the script does after *step*."""
        truth, losses = self.truth, self.losses
        if "save" in losses and step == 4:
            truth.saved = time.perf_counter()
            with truth.of("checkpoint"):
                torch.save(self.model.state_dict(), SlowFile())
            with truth.of("checkpoint"):
                torch.save(self.optimizer.state_dict(), self.saved)
        if "dcp" in losses and step == 5:
            import torch.distributed.checkpoint as dcp

            with truth.of("checkpoint"):
                dcp.save(self.model.state_dict(), checkpoint_id=f"{self.place}.dcp")
        if "collects" in losses and self.rank == 0:
            Cycle()
            gc.collect()
        if "saves" in losses and self.rank == 0:
            torch.save(self.model.state_dict(), SlowFile())
        if "evaluate" in losses and step in (6, 12):
            with truth.of("evaluation"):
                self.evaluate()
        if "collect" in losses and step == 7:
            Cycle()
            with truth.of("garbage_collection"):
                gc.collect()
        if "compile" in losses and step in (8, 10):
            with truth.of("compile"):
                self.compiled(batch if step == 8 else batch[:4])
        if "kill" in losses and step == 14 and not self.attempt and self.rank == 0:
            truth.write()
            os.kill(os.getpid(), signal.SIGKILL)

    def evaluate(self) -> None:
        """Validates as a script does."""
        self.model.eval()
        with torch.no_grad():
            for number, batch in enumerate(DataLoader(Slow(0.05), batch_size=None)):
                if number == 8:
                    break
                self.model(batch)
        self.model.train()


def main() -> None:
    job = Job(set(sys.argv[2:]))
    try:
        for step in range(job.first, int(sys.argv[1]) + 1):
            job.beside(step, job.step())
    finally:
        job.truth.write()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
