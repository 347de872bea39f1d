"""The memory of DataLoader workers, by a tree of processes made of files and by real ones."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from zeromon.probes.process import WorkersReader

MIB, SECOND = 1 << 20, 1_000_000_000


class Processes:
    """A ``/proc`` of a rank (pid 1) and what it has started."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def children(self, *pids: int) -> None:
        """The rank has started those, partly on another thread."""
        for task, part in ((1, pids[:1]), (9, pids[1:])):
            place = self.folder / "1" / "task" / str(task)
            place.mkdir(parents=True, exist_ok=True)
            (place / "children").write_text(" ".join(map(str, part)) + " ")

    def process(
        self, pid: int, pss: int, name: str = "pt_data_worker", command: str = "python\0train.py\0"
    ) -> None:
        place = self.folder / str(pid)
        place.mkdir(exist_ok=True)
        (place / "comm").write_text(f"{name}\n")
        (place / "cmdline").write_text(command)
        text = f"55e0-7ffd ---p 0 00:00 0 [rollup]\nRss: 99999999 kB\nPss: {pss // 1024} kB\n"
        (place / "smaps_rollup").write_text(text)


@pytest.fixture
def made(tmp_path: Path) -> Processes:
    return Processes(tmp_path)


def test_workers_are_told_from_other_children_and_their_growth_from_their_start(made: Processes) -> None:
    reader = WorkersReader(1, made.folder)
    assert reader.read(SECOND, 0) is None
    made.children(20, 21, 22)
    made.process(22, 900 * MIB, name="python3")  # multiprocessing's resource tracker
    for number, size in enumerate((100, 200, 300, 400)):
        made.process(20, size * MIB)
        made.process(21, size * MIB)
        workers = reader.read((number + 2) * 10 * SECOND, 50 * number)
        assert workers is not None and workers.forked
        assert (workers.count, workers.nbytes) == (2, 2 * size * MIB)
        grown = max(0, number - 1) * 200 * MIB  # by the second reading they have started
        assert workers.grown_bytes == grown
        rate = workers.growth_bytes_per_step
        assert rate == (4 * MIB if grown else None)


def test_workers_that_an_epoch_starts_again_have_not_grown(made: Processes) -> None:
    reader = WorkersReader(1, made.folder)
    for epoch in range(3):
        made.children(20 + epoch)
        made.process(20 + epoch, (1 + epoch) * 100 * MIB)
        workers = reader.read((epoch + 1) * 10 * SECOND, 100 * epoch)
        assert workers is not None and workers.growth_bytes_per_step is None


def test_the_last_reading_stands_between_two_epochs_and_not_for_ever(made: Processes) -> None:
    reader = WorkersReader(1, made.folder)
    made.children(20)
    made.process(20, MIB)
    assert reader.read(10 * SECOND, 1) is not None
    made.children()
    assert reader.read(20 * SECOND, 2) is not None
    assert reader.read(60 * SECOND, 3) is None


def test_spawned_workers_share_no_pages(made: Processes) -> None:
    made.children(20)
    made.process(20, MIB, command="python\0-c\0from multiprocessing.spawn import spawn_main\0")
    workers = WorkersReader(1, made.folder).read(10 * SECOND, 1)
    assert workers is not None and not workers.forked


def test_files_that_cannot_be_read_are_no_crash(made: Processes) -> None:
    made.children(20, 21)
    made.process(21, MIB)
    (made.folder / "21" / "smaps_rollup").unlink()
    assert WorkersReader(1, made.folder).read(10 * SECOND, 1) is None


class Rows(Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 8

    def __getitem__(self, n: int) -> torch.Tensor:
        return torch.zeros(2)


def test_torchs_own_workers_are_found() -> None:
    batches = iter(DataLoader(Rows(), num_workers=2, multiprocessing_context="fork"))
    for _ in range(2):  # one of each worker: a worker has its name before it sends a batch
        next(batches)
    workers = WorkersReader(os.getpid()).read(10 * SECOND, 1)
    assert workers is not None and workers.forked
    assert workers.count == 2 and workers.nbytes > MIB
