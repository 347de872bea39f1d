"""Two ranks of DDP that lose time in known ways: `ledger.py STEPS [LOSS ...]`.

Each rank writes ``{"loss": [times, seconds]}``, measured around what it injected, to LEDGER_TRUTH.RANK.

save        a checkpoint whose file takes 0.5 s, in step 4
dcp         torch.distributed.checkpoint.save, in step 5
evaluate    eight batches of 50 ms and a model in evaluation mode, in steps 6 and 12
collect     a garbage collection that takes 0.4 s, in step 7
compile     a backend that takes 0.6 s, in step 8, and once more with another shape in step 10
loader      each batch takes 30 ms
late        rank 1 computes 60 ms longer in every step
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
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

WIDTH = 64


class Truth:
    """What was injected, by the program's own clock."""

    def __init__(self, file: str) -> None:
        self._file = Path(file)
        self.lost: dict[str, list[float]] = defaultdict(lambda: [0, 0.0])

    @contextmanager
    def of(self, loss: str) -> Iterator[None]:
        """Adds the time of its body."""
        began = time.perf_counter()
        yield
        self.add(loss, time.perf_counter() - began)

    def add(self, loss: str, seconds: float) -> None:
        """Adds one loss."""
        self.lost[loss][0] += 1
        self.lost[loss][1] += seconds

    def write(self) -> None:
        """Writes what is known so far."""
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


def backend(truth: Truth) -> Any:
    """A compiler that takes its time."""

    def compile_graph(graph: Any, _: Any) -> Any:
        time.sleep(0.6)
        truth.add("compile", 0.6)
        return graph.forward

    return compile_graph


def main() -> None:
    steps, losses = int(sys.argv[1]), set(sys.argv[2:])
    rank, attempt = int(os.environ["RANK"]), int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
    # a file of its own: torchrun's store keeps the addresses of the attempt before
    store = dist.FileStore(f"{os.environ['LEDGER_TRUTH']}.store.{attempt}", 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    truth = Truth(f"{os.environ['LEDGER_TRUTH']}.{attempt}.{rank}")
    model = DistributedDataParallel(nn.Sequential(nn.Linear(WIDTH, 512), nn.Linear(512, 1)))
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    compiled = torch.compile(nn.Linear(WIDTH, 1), backend=backend(truth), dynamic=False)
    saved = Path(f"{os.environ['LEDGER_TRUTH']}.optimizer.{rank}")
    first = 1
    if saved.exists():
        optimizer.load_state_dict(torch.load(saved))
        first = 5
    training = iter(DataLoader(Slow(0.03 if "loader" in losses else 0.0), batch_size=None))
    for step in range(first, steps + 1):
        batch = next(training)
        if "loader" in losses:
            truth.add("loader", 0.03)
        loss = model(batch).mean()
        time.sleep(0.02)
        if "late" in losses and rank == 1:
            with truth.of("late"):
                time.sleep(0.06)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if "save" in losses and step == 4:
            with truth.of("checkpoint"):
                torch.save(model.state_dict(), SlowFile())
            with truth.of("checkpoint"):
                torch.save(optimizer.state_dict(), saved)
        if "dcp" in losses and step == 5:
            import torch.distributed.checkpoint as dcp

            with truth.of("checkpoint"):
                dcp.save(model.state_dict(), checkpoint_id=f"{os.environ['LEDGER_TRUTH']}.dcp")
        if "evaluate" in losses and step in (6, 12):
            with truth.of("evaluation"):
                evaluate(model)
        if "collect" in losses and step == 7:
            Cycle()
            with truth.of("garbage_collection"):
                gc.collect()
        if "compile" in losses and step in (8, 10):
            compiled(batch if step == 8 else batch[:4]).sum()
        if "kill" in losses and step == 14 and not attempt and rank == 0:
            truth.write()
            os.kill(os.getpid(), signal.SIGKILL)
        truth.write()
    dist.destroy_process_group()


def evaluate(model: nn.Module) -> None:
    """Validates as a script does."""
    model.eval()
    with torch.no_grad():
        for number, batch in enumerate(DataLoader(Slow(0.05), batch_size=None)):
            if number == 8:
                break
            model(batch)
    model.train()


if __name__ == "__main__":
    main()
