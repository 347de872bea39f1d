"""Findings and their remedies."""

from dataclasses import dataclass

from zeromon.ring.codes import TextEnum
from zeromon.snapshot.levels import Severity as Severity
from zeromon.snapshot.memory import Pool


class ConfigFormat(TextEnum):
    """The format of a remedy's change: the configuration of a framework, or code that uses it."""

    DEEPSPEED = "DeepSpeed JSON"
    FSDP1 = "Python (FSDP1)"
    FSDP2 = "Python (FSDP2)"
    DDP = "Python (DDP)"
    PIPELINE = "Python (pipelining)"
    DATA_LOADER = "Python (DataLoader)"
    PYTHON = "Python"
    ENVIRONMENT = "environment"


@dataclass(frozen=True, slots=True, kw_only=True)
class Rung:
    """One change of the OOM ladder, on top of those above it; see :mod:`zeromon.memory.ladder`."""

    change: str
    """The setting, with the value of this run and the value to have."""
    frees_bytes: int | None
    """Memory of a rank that it frees; None where unknown."""
    price: str
    """The cost in time or accuracy, in words."""
    at_most: bool = False
    """It frees less where units are large, whose sizes are unknown."""
    enough: bool = False
    """It is the first rung with which, and with those above, as much is free as is needed."""


@dataclass(frozen=True, slots=True)
class Remedy:
    """A change that removes the cause of a finding."""

    cause: str
    dialect: str
    """The format that *diff* changes, mostly a :class:`ConfigFormat`."""
    diff: str
    """Removed lines begin with ``-``, added lines with ``+``."""
    gain_low_seconds: float | None = None
    """How much shorter a step is expected to become, at least and at most; None: no shorter."""
    gain_high_seconds: float | None = None
    frees_bytes: int | None = None
    """Memory of a rank that is expected to become free."""
    effect: str = ""
    """Other effects that are expected, in words."""
    price: str = ""
    """The cost of the change, in words."""
    takes: Pool | None = None
    """The memory that it needs more of; on a CPU the device's is the host's."""
    rungs: tuple[Rung, ...] = ()
    """The OOM ladder: several changes in order, in place of one diff."""
    tried_seconds: float | None = None
    """How much shorter a step was with the change in this run; None: not tried, or no verdict."""
    tried_error_seconds: float | None = None
    """The 99 % uncertainty of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """The statement of a rule about a run."""

    rule: str
    severity: Severity
    text: str
    rank: int = -1
    """-1: the whole run."""
    code: str = ""
    """The code of the rule's page: ``zeromon rule CODE``."""
    remedy: Remedy | None = None
    action: str = ""
    """One sentence on what to do, where no remedy says it; "": the advice of the rule's page."""
    share: float | None = None
    """The waiting time that it is about as a share of a step, less what a lack of CPUs may explain."""
    came: float = 0.0
    """When it was first shown, seconds since the epoch; 0 where unknown."""
    gone: float | None = None
    """When it ceased to hold, or its run ended; None while it stands."""

    @property
    def order(self) -> tuple[int, bool, int]:
        """The sort key: most urgent first; among equals those with a remedy, then by rank."""
        return Severity(self.severity).order, self.remedy is None, self.rank


# ---- changes that were tried in the live ranks --------------------------------------------------


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
        """True if nothing more will happen: the ranks are as before."""
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
        """True if the trial is still under way."""
        return not self.state.is_over

    @property
    def is_significant(self) -> bool:
        """True if the gain or loss is larger than its uncertainty."""
        return (
            self.gain_seconds is not None
            and self.error_seconds is not None
            and abs(self.gain_seconds) > self.error_seconds
        )
