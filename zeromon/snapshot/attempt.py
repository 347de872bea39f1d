"""Earlier attempts of a run whose launcher started its ranks again, and its earlier jobs."""

from dataclasses import dataclass

from zeromon.ring.codes import TextEnum
from zeromon.snapshot.ledger import LedgerRow


class DeathRole(TextEnum):
    """What the end of a failed rank has to do with the end of the run."""

    CULPRIT = "culprit"
    """It failed by itself."""
    VICTIM = "victim"
    """It ended because another rank had failed."""
    STOPPED = "stopped"
    """A person or a scheduler stopped the run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Death:
    """How a rank of an earlier attempt failed."""

    rank: int
    ended: str
    exception: str
    role: DeathRole


@dataclass(frozen=True, slots=True, kw_only=True)
class RankProcess:
    """A process of a rank that has not reported yet."""

    pid: int
    rank: int | None
    """By its launcher; None where that gives no number."""
    attempt: int
    at: str = ""
    """``train.py:21 in main``: where its Python stands; "" where that is not known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """All ranks from one start of the launcher to the next."""

    number: int
    """1: the first."""
    started_wall: float
    """Seconds since the epoch, as is the next."""
    ended_wall: float
    steps: int
    """Steps that ended in it; 0 also where no rank reported."""
    resumed_step: int | None
    """Steps that its optimizers had taken when it began; None where they do not count them."""
    lost_steps: int | None
    """Steps that the next attempt takes again; None where unknown."""
    finished: bool = False
    """No rank failed: the next is another job of the same program, and no restart."""
    deaths: tuple[Death, ...]
    """The culprits first."""
    ledger: tuple[LedgerRow, ...] = ()
    """The seconds of all its ranks, from the attempt before to the next one."""
