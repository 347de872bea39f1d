"""What batches are made of is timed where they are made; what the script gets stays the same."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from support import PROGRAMS, Node
from torch.utils.data import DataLoader, Dataset, IterableDataset
from torch.utils.data._utils import fetch

from zeromon.ring.codes import Kind
from zeromon_agents.observe.loading import (
    COLLATE,
    FETCH,
    TRANSFORM,
    TRANSFORMS,
    Fetches,
    Loading,
    nfs_bytes,
)
from zeromon_agents.runtime.guard import Guard

SLEEP = 0.005


class Transforms:
    """As torchvision's Compose."""

    def __call__(self, sample: torch.Tensor) -> torch.Tensor:
        time.sleep(SLEEP)
        return sample + 1


class Samples(Dataset[Any]):
    def __init__(self) -> None:
        self.transforms = Transforms()

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> torch.Tensor:
        time.sleep(SLEEP)
        made: torch.Tensor = self.transforms(torch.full((2,), float(index)))
        return made


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Any:
        for index in range(4):
            time.sleep(SLEEP)
            yield torch.full((2,), float(index))


def collate(samples: list[torch.Tensor]) -> torch.Tensor:
    time.sleep(SLEEP)
    return torch.stack(samples)


@pytest.fixture
def loading(tmp_path: Path) -> Any:
    made = Loading(Guard(), tmp_path / "rank0.1.ring", lambda: True)
    made.fetches.watch(fetch)
    yield made
    made.close()
    assert "__wrapped__" not in vars(fetch._MapDatasetFetcher.fetch)


def batches(dataset: Any, workers: int = 0) -> list[list[float]]:
    """All batches of two samples."""
    loader = DataLoader(dataset, batch_size=2, num_workers=workers, collate_fn=collate)
    return [batch.flatten().tolist() for batch in loader]


def written(loading: Loading) -> dict[Kind, tuple[int, ...]]:
    """What the heartbeat writes."""
    found: dict[Kind, tuple[int, ...]] = {}
    loading.write(lambda kind, *sums: found.update({kind: sums}))
    return found


@pytest.mark.parametrize("dataset", [Samples(), Stream()], ids=["map", "iterable"])
def test_batches_of_the_training_process(loading: Loading, dataset: Any) -> None:
    loading.close()
    expected = batches(dataset)
    loading.fetches.watch(fetch)
    assert batches(dataset) == expected
    count, fetch_ns, transform_ns, collate_ns = written(loading)[Kind.LOADING]
    assert count >= 2
    assert transform_ns == 0, "the time of a transform that no hook knows is that of reading"
    assert collate_ns >= 2 * SLEEP * 1e9
    assert fetch_ns - collate_ns >= 4 * SLEEP * 1e9
    assert len(written(loading)[Kind.LOADING_READ]) == 4


def test_transforms_of_a_known_library_are_told_apart(
    loading: Loading, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, method = TRANSFORMS[0]
    module = ModuleType(name)
    owner, _, function = method.partition(".")
    monkeypatch.setattr(module, owner, Transforms, raising=False)
    loading.fetches.watch_transforms(module)
    batches(Samples())
    sums = loading.fetches.sums
    assert sums[TRANSFORM] >= 4 * SLEEP * 1e9
    assert sums[FETCH] - sums[TRANSFORM] - sums[COLLATE] >= 4 * SLEEP * 1e9
    Transforms()(torch.ones(1))
    assert loading.fetches.sums == sums, "a transform outside of a batch is none of a loader"
    loading.close()
    assert not hasattr(vars(Transforms)[function], "__wrapped__")


def test_workers_write_to_the_file_of_their_rank(loading: Loading) -> None:
    """A forked worker has the hooks of its parent, but none of its sums."""
    expected = batches(Stream())
    before = written(loading)[Kind.LOADING][0]
    assert batches(Stream(), workers=1) == expected
    count, fetch_ns, _, collate_ns = written(loading)[Kind.LOADING]
    assert before < count <= before + 3
    assert fetch_ns > collate_ns > 0


def test_a_fetch_that_raises_is_counted_and_passed_on(loading: Loading) -> None:
    class Broken(Samples):
        def __getitem__(self, index: int) -> torch.Tensor:
            raise KeyError(index)

    with pytest.raises(KeyError):
        batches(Broken())
    assert loading.fetches._open == {}
    assert loading.fetches._guard.errors == 0


def test_evaluation_and_a_folder_that_is_gone(loading: Loading, tmp_path: Path) -> None:
    loading.fetches._is_training = lambda: False
    batches(Stream())
    assert written(loading) == {}
    loading.fetches._is_training = lambda: True
    (tmp_path / "rank0.1.loading").unlink()
    assert len(batches(Stream(), workers=1)) == 2
    assert written(loading) == {}


def test_a_process_that_is_no_worker_counts_nothing() -> None:
    """As a rank that a launcher has spawned, before its agent starts."""
    fetches = Fetches(Guard(), None)
    fetches.watch(fetch)
    batches(Stream())
    fetches.close()
    assert sum(fetches.sums) == 0


@pytest.mark.long
@pytest.mark.parametrize(("workers", "method"), [(0, ""), (2, "fork"), (2, "spawn")])
def test_every_start_method(node: Node, workers: int, method: str) -> None:
    """A third of a batch is collation; the batches are those without zeromon."""
    command = [sys.executable, str(PROGRAMS / "loaders.py"), str(workers), method]
    result, bare = node.run(command), node.run(command, watched=False)
    assert result.code == bare.code == 0, result.output
    lines = [[x for x in r.output.splitlines() if "batches" in x] for r in (result, bare)]
    assert lines[0] == lines[1] != []
    (rank,) = result.snapshot.ranks
    assert rank.training.loading is not None and rank.training.loading.batches > 20
    assert 0.2 < rank.training.loading.collate_seconds / rank.training.loading.fetch_seconds < 0.45


def test_what_a_node_reads_from_nfs_servers(tmp_path: Path) -> None:
    """A mount's ``bytes:`` are read, written, read and written directly, then from and to the server."""
    stats = tmp_path / "mountstats"
    mount = "device nas:/d mounted on /d with fstype nfs4 statvers=1.1\n\topts:\trw\n\tage:\t9\n"
    stats.write_text(
        f"device proc mounted on /proc with fstype proc\n{mount}\tbytes:\t9 8 7 6 500 4 3 2\n"
        f"{mount}\tbytes:\t9 8 7 6 70 4 3 2\n"
    )
    assert nfs_bytes(str(stats)) == 570
    stats.write_text(f"{mount}\tbytes:\t9 8\n")
    assert nfs_bytes(str(stats)) == 0 == nfs_bytes(str(tmp_path / "none"))
