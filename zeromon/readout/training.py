"""Loss, gradient norm and learning rate as text. Pure."""

from zeromon.readout.figures import NUMBER
from zeromon.ring.events import Scalar
from zeromon.snapshot import RankSnapshot, RunSnapshot, ScalarRow

NAMES = {
    Scalar.LOSS.label: "loss",
    Scalar.GRAD_NORM.label: "gradient norm",
    Scalar.LEARNING_RATE.label: "learning rate",
}


_UNSEEN = "seen only through a logger: W&B, TensorBoard, MLflow, Trainer, Lightning"


def telling(run: RunSnapshot) -> RankSnapshot | None:
    """The first of the ranks that know most of their loss, gradient norm and learning rate."""
    return max(run.ranks, key=lambda rank: len(rank.scalars), default=None)


def training_text(rank: RankSnapshot) -> str:
    """What a logger was given of them on *rank*, and why the others are unknown."""
    known = {row.name: row for row in rank.scalars}
    parts = [
        f"{called} {value_text(known[name])}" for name, called in NAMES.items() if name in known
    ]
    missing = [called for name, called in NAMES.items() if name not in known]
    if missing:
        which = " and ".join(filter(None, (", ".join(missing[:-1]), missing[-1])))
        parts.append(f"{which} n/a ({_UNSEEN})")
    return ", ".join(parts)


def value_text(row: ScalarRow) -> str:
    """The newest value, or since when it is not finite."""
    if row.value is None:
        return f"NaN or infinite (first in step {row.first_nonfinite_step})"
    return NUMBER.text(row.value)
