"""Which ranks are stalled, and since when. Pure.

A rank is stalled when no step has ended for longer than its own rhythm explains, and its agent has seen
no progress of its steps and collectives in that time. :attr:`RankStatus.pause` says whether that is
expected: a checkpoint, a compilation, a debugger, and an evaluation without collectives take long, too.
"""

from collections.abc import Sequence
from typing import NamedTuple

from zeromon.fold.summarize import STARTS
from zeromon.snapshot import RankSnapshot, RunSnapshot
from zeromon.snapshot.focus import is_ending
from zeromon.snapshot.levels import PAUSE_SECONDS, STALL_SECONDS, STALL_STEPS, START_SECONDS, Severity
from zeromon.snapshot.rank import Halt

_LOOK_NS = 3_000_000_000


class Stall(NamedTuple):
    """A rank whose steps have stopped, or whose first step does not end."""

    rank: RankSnapshot
    seconds: float
    """Since the last step ended; of a rank without steps, since it started."""


def find_stalls(run: RunSnapshot) -> tuple[Stall, ...]:
    """The stalled ranks of *run*, the longest stall first.

    Where one rank is stalled, the others that make no progress count, too: ranks end a step at nearly,
    and not exactly, the same time. Of a run that has ended, those that were stalled when it was stopped.
    """
    now_ns = run.taken_ns
    if run.ended:
        # taken_ns may be long after the end, and would make each stall as old as the record
        now_ns = max((rank.status.last_event_ns for rank in run.ranks), default=now_ns)
    # A rank that finished by itself was not stalled, however old its last step is
    ranks = [rank for rank in run.ranks if (rank.status.failed if run.ended else rank.status.alive)]
    # The agent looks once a second, so what it said may be older than the rank's newest event
    still = [rank for rank in ranks if now_ns - rank.status.progress_ns >= _LOOK_NS]
    quiet = [
        Stall(rank, _idle_seconds(rank, now_ns))
        for rank in still
        if rank.status.stack or rank.status.halted is not Halt.NONE
    ]
    if not any(map(_is_long_stall, quiet)):
        return ()
    if is_ending(run) and max(stall.seconds for stall in quiet) < PAUSE_SECONDS:
        return ()  # the others have finished: it saves, evaluates or shuts down
    stalled = [stall for stall in quiet if stall.seconds >= STALL_SECONDS / 2]
    return tuple(sorted(stalled, key=lambda stall: (-stall.seconds, stall.rank.rank)))


def _idle_seconds(rank: RankSnapshot, now_ns: int) -> float:
    return (
        now_ns - (rank.steps.recent[-1].end_ns if rank.steps.recent else rank.status.started_ns)
    ) / 1e9


def _is_long_stall(stall: Stall) -> bool:
    lock = stall.rank.status.lock
    # A stale lock of torch's extension cache is waited for without end: no start-up explains it
    if not stall.rank.steps.recent and (lock is None or not lock.is_stale):
        return stall.seconds >= START_SECONDS
    return stall.seconds >= STALL_SECONDS + STALL_STEPS * (stall.rank.steps.median_seconds or 0.0)


def worst_stall(stalls: Sequence[Stall]) -> tuple[Stall, Severity]:
    """The stall of *stalls* that is most urgent, and how urgent it is.

    A rank that waits in a collective waits for others: it does not count beside one that does not.
    """
    free = [stall for stall in stalls if not stall.rank.communication.in_flight] or stalls
    judged = [(stall, _stall_severity(stall)) for stall in free]
    return min(judged, key=lambda pair: pair[1].order)


def _stall_severity(stall: Stall) -> Severity:
    """Critical without an expected pause; a process that may be in a long call is a warning first."""
    pause = stall.rank.status.pause or (STARTS if stall.rank.status.halted is Halt.UNRESPONSIVE else "")
    return severity_of_pause(pause, stall.seconds)


def severity_of_pause(pause: str, seconds: float) -> Severity:
    """How urgent it is that a rank makes no progress for *seconds*, in the *pause* that its stack shows.

    A start-up may load for minutes, so it is a warning first. No pause is expected for ever.
    """
    if not pause or (pause.endswith(STARTS) and seconds >= PAUSE_SECONDS):
        return Severity.CRITICAL
    if pause.endswith(STARTS) or seconds >= PAUSE_SECONDS:
        return Severity.WARNING
    return Severity.INFO
