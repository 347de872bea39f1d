"""What the training itself tells of a rank: its loss, its batches. Pure."""

import math
from dataclasses import asdict

from zeromon.fold.state import RankState, folds
from zeromon.ring.events import Loading, LoadingRead
from zeromon.snapshot import BatchRow, LoadingRow, ScalarRow


def scalar_rows(state: RankState) -> tuple[ScalarRow, ...]:
    """Loss, gradient norm and learning rate, those that the host knows."""
    return tuple(
        ScalarRow(
            name=scalar.label,
            value=known.value if math.isfinite(known.value) else None,
            step=known.step,
            nonfinite=known.nonfinite,
            first_nonfinite_step=known.first_nonfinite_step,
        )
        for scalar, known in sorted(state.scalars.items())
    )


def first_batches(state: RankState) -> tuple[int, ...]:
    """The checksums of the first batches; () where unknown."""
    marks = state.meta.get("batches")
    return tuple(m for m in marks if isinstance(m, int)) if isinstance(marks, list) else ()


def batch_row(state: RankState) -> BatchRow | None:
    """What the model was called with; None where nothing tells it."""
    return BatchRow(**asdict(state.batches)) if state.batches.steps else None


@folds(Loading)
def _fold_loading(state: RankState, e: Loading) -> None:
    state.loading = e


@folds(LoadingRead)
def _fold_loading_read(state: RankState, e: LoadingRead) -> None:
    state.loading_read = e


def loading_row(state: RankState) -> LoadingRow | None:
    """What batches were made of; None where none was timed."""
    made, read = state.loading, state.loading_read or LoadingRead(0, 0, 0, 0)
    if made is None:
        return None
    return LoadingRow(
        batches=made.batches,
        fetch_seconds=made.fetch_ns / 1e9,
        transform_seconds=made.transform_ns / 1e9 if made.transform_ns else None,
        collate_seconds=made.collate_ns / 1e9,
        read_bytes=read.read_bytes,
        disk_bytes=read.disk_bytes,
        major_faults=read.major_faults,
        nfs_bytes=read.nfs_bytes,
    )
