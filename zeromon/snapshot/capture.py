"""Traces on demand: their progress, and live figures beside those of the trace."""

from dataclasses import dataclass, field

from zeromon.ring.codes import TextEnum


class CaptureState(TextEnum):
    """How far a requested trace is, on one rank or on all of them."""

    WAITING = "waiting"
    """For the first step."""
    RECORDING = "recording"
    SAVED = "saved"
    """A rank has written its trace."""
    REFUSED = "refused"
    """A rank does not record."""
    ANALYSING = "analysing"
    """All ranks have answered; the traces are being read."""
    DONE = "done"
    FAILED = "failed"

    @property
    def is_over(self) -> bool:
        """Whether nothing more will happen."""
        return self in _OVER


_OVER = (CaptureState.SAVED, CaptureState.REFUSED, CaptureState.DONE, CaptureState.FAILED)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankCapture:
    """How far a rank is with the trace that was asked for last."""

    request: int
    state: CaptureState
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceCheck:
    """Live figures beside those of a trace, over the same steps of one rank."""

    steps: tuple[int, ...]
    live_exposed_seconds: float
    trace_exposed_seconds: float
    live_communication_seconds: float
    trace_communication_seconds: float

    @property
    def error_ratio(self) -> float | None:
        """By how much the live exposed time is off, as a share of the trace's; None without any."""
        if self.trace_exposed_seconds <= 0:
            return None
        return self.live_exposed_seconds / self.trace_exposed_seconds - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Capture:
    """A trace on demand."""

    number: int
    state: CaptureState
    first: int
    """Number of the first step."""
    steps: int
    ranks: tuple[int, ...]
    folder: str
    files: tuple[str, ...] = ()
    note: str = ""
    checks: dict[int, TraceCheck] = field(default_factory=dict)
    """By rank."""

    @property
    def is_open(self) -> bool:
        """Whether the capture is still under way."""
        return not self.state.is_over
