"""What batches are made of, in words and in the advice on data waits."""

from __future__ import annotations

from dataclasses import replace

import pytest
from builders import changed, rank, run
from evidence import FIRES

from zeromon.diagnosis.engine import advise
from zeromon.fold.fold import fold_event
from zeromon.fold.state import RankState
from zeromon.fold.summarize import loader_totals_row
from zeromon.readout.breakdown import from_disk, from_storage, load_parts, loading_text
from zeromon.readout.ledger import activity_texts
from zeromon.ring.events import Loading, LoadingRead
from zeromon.snapshot.step import LoadingRow

MIB = 1 << 20


def made(*, transform: float | None = None, collate: float = 1.0, disk: int = 0) -> LoadingRow:
    """A hundred batches of 80 ms each."""
    return LoadingRow(
        batches=100, fetch_seconds=8.0, transform_seconds=transform, collate_seconds=collate,
        read_bytes=10 * MIB, disk_bytes=disk, major_faults=0,
    )  # fmt: skip


def test_the_newest_sums_of_a_rank_count() -> None:
    state = RankState()
    assert loader_totals_row(state) is None
    for count in (1, 100):
        fold_event(state, Loading(0, count, 80_000_000 * count, 0, 10_000_000 * count))
    fold_event(state, LoadingRead(0, 10 * MIB, 0, 0))
    assert loader_totals_row(state) == made()


def test_parts_sum_to_the_time_of_the_batches() -> None:
    """Without a transform that a hook knows nobody can tell it from reading."""
    assert load_parts(made()) == {"read and transform": 7.0, "collate": 1.0}
    assert load_parts(made(transform=5.0)) == {"transform": 5.0, "read": 2.0, "collate": 1.0}


def test_what_came_from_disks() -> None:
    assert from_disk(made(disk=9 * MIB)) == pytest.approx(0.9)
    assert from_disk(made(disk=20 * MIB)) == 1, "mapped files: read by no system call"
    assert from_disk(replace(made(), read_bytes=100)) is None
    text = loading_text(rank(0, loading=made(disk=9 * MIB)))
    assert text == (
        "batches: 100, 80.0 ms to make each: read and transform 87.5 %, collate 12.5 %; "
        "90.0 % of 10.0 MiB that were sampled came from disks"
    )
    mounted = replace(made(disk=9 * MIB), nfs_bytes=8 * MIB)
    assert loading_text(rank(0, loading=mounted)) == f"{text}, at most 80.0 % from NFS"
    assert from_storage(replace(mounted, disk_bytes=0)) == 0.8 and from_storage(made()) is None
    assert text in activity_texts(run(rank(0, loading=made(disk=9 * MIB))))
    assert loading_text(rank(0)) == ""


@pytest.mark.parametrize(
    ("loading", "part", "fix"),
    [
        (made(), "87.5 % to read and transform", "storing samples as they are used"),
        (made(disk=9 * MIB), "87.5 % to read and transform", "of which 90.0 % comes from storage"),
        (made(collate=6.0), "75.0 % to collate", "a collate_fn that makes a batch at once"),
        (made(transform=5.0, disk=9 * MIB), "62.5 % to transform", "storing what the transforms make"),
    ],
)  # fmt: skip
def test_the_advice_names_the_greatest_part(loading: LoadingRow, part: str, fix: str) -> None:
    base = FIRES["data_wait"]
    ranks = tuple(changed(one, loading=loading) for one in run(base).ranks)
    (finding,) = (f for f in advise(run(*ranks)) if f.rule == "data_wait")
    assert f"a batch takes 80.0 ms to make, {part}" in finding.text
    assert finding.remedy is not None and fix in finding.remedy.cause
