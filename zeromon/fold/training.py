"""What the training itself tells of a rank: its loss, its batches. Pure."""

from __future__ import annotations

import math
from dataclasses import asdict

from zeromon.fold.state import RankState
from zeromon.snapshot import BatchRow, ScalarRow


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
