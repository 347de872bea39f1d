"""Changes that were tried in the live ranks: their progress and their result."""

from dataclasses import dataclass

from zeromon.ring.codes import TextEnum


class TrialState(TextEnum):
    """How far a trial is, on one rank or on all of them."""

    WAITING = "waiting"
    """For its first step."""
    READY = "ready"
    """A rank has agreed to the first block."""
    OFF = "off"
    ON = "on"
    DONE = "done"
    WITHDRAWN = "withdrawn"
    """Ended before its last block; the ranks are as before."""
    REFUSED = "refused"
    """Nothing was changed."""

    @property
    def is_over(self) -> bool:
        """Whether nothing more will happen: the ranks are as before."""
        return self in _OVER


_OVER = (TrialState.DONE, TrialState.WITHDRAWN, TrialState.REFUSED)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankTrial:
    """How far a rank is with the newest trial."""

    number: int
    state: TrialState
    step: int
    """The first step in this state."""
    why: str
    undo_seconds: float
    """How long it took to undo the change, each time together."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """A change that was tried: off, on, on, off, and again, in blocks of steps."""

    number: int
    rule: str
    """The rule of the finding."""
    code: str
    change: str
    state: TrialState
    first: int
    """The first step of the first block."""
    size: int
    """Steps of a block."""
    blocks: int
    dialect: str
    diff: str
    """The change to make in the script."""
    gain_low_seconds: float | None = None
    """As the finding predicted it."""
    gain_high_seconds: float | None = None
    steps: int = 0
    """How many steps were compared, with and without the change together."""
    gain_seconds: float | None = None
    """How much shorter a step is with the change; None where it is not known."""
    error_seconds: float | None = None
    """The 99 % uncertainty of the gain."""
    note: str = ""
    """Why there is no result."""

    @property
    def is_open(self) -> bool:
        """Whether the trial is still under way."""
        return not self.state.is_over

    @property
    def significant(self) -> bool:
        """Whether the gain or loss is larger than its uncertainty."""
        return (
            self.gain_seconds is not None
            and self.error_seconds is not None
            and abs(self.gain_seconds) > self.error_seconds
        )
