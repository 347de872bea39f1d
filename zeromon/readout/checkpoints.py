"""Checkpoints of a run: how old the last one is, what they cost, what a death would lose. Pure.

The interval that loses least is Young's, the square root of 2 C M (Young 1974, "A first order
approximation to the optimum checkpoint interval", CACM 17(9)): C is the cost of a save, M the mean time
between failures.
"""

import math
from dataclasses import dataclass

from zeromon.snapshot import RankSnapshot, RunSnapshot
from zeromon.snapshot.ledger import ActivityRow, Cause
from zeromon.units import human_count, human_ratio, human_seconds

_BESIDE = (Cause.SET_UP, Cause.SHUT_DOWN, Cause.DEAD)
"""Before the first step and after the last one."""
DEVICE_HOURS = 50_000
"""Assumed hours of a device between two failures that end a job: 419 in 54 days on 16,384 devices
(Grattafiori et al. 2024, arXiv 2407.21783, section 3.3.4). Cheaper machines fail more often."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoints:
    """Of the ranks that save; of all where none was seen to save."""

    count: int
    """In this attempt; 0: none was seen."""
    cost_seconds: float | None
    """For which the training thread stands still for one; None without any."""
    share: float | None
    """Of the time since the first step."""
    age_seconds: float | None
    """Since the end of the last one."""
    unsaved_seconds: float
    """Steps that a death would lose."""
    unsaved_steps: int | None
    interval_seconds: float | None
    """The mean time from one to the next."""
    failure_seconds: float
    """The mean time between failures: of this run, or assumed."""
    measured: bool
    """Whether it is of this run."""

    @property
    def best_seconds(self) -> float | None:
        """Young's interval."""
        cost = self.cost_seconds
        return math.sqrt(2 * cost * self.failure_seconds) if cost else None


def checkpoints(run: RunSnapshot) -> Checkpoints | None:
    """Returns what is known of the checkpoints of *run*; None before the first step."""
    stepped = [rank for rank in run.ranks if rank.unsaved_seconds is not None]
    if not stepped:
        return None
    savers = [rank for rank in stepped if rank.checkpoints]
    rank = max(savers or stepped, key=lambda one: one.unsaved_seconds or 0.0)
    rows, count = _saves(rank), rank.checkpoints
    spent = sum(row.seconds for row in rows)
    trained = sum(row.seconds for row in rank.ledger if row.cause not in _BESIDE)
    is_known = bool(rows and count)
    failures = sum(not one.finished for one in run.attempts)
    lasted = run.taken_wall - min((one.started_wall for one in run.attempts), default=0.0)
    assumed = DEVICE_HOURS * 3600 / max(1, rank.world_size)
    return Checkpoints(
        count=count,
        cost_seconds=spent / count if is_known else None,
        share=spent / trained if is_known and trained else None,
        age_seconds=(run.taken_ns - max(row.last_ns for row in rows)) / 1e9 if is_known else None,
        unsaved_seconds=rank.unsaved_seconds or 0.0,
        unsaved_steps=rank.unsaved_steps,
        interval_seconds=trained / count if is_known and trained else None,
        failure_seconds=lasted / failures if failures else assumed,
        measured=failures > 0,
    )


def _saves(rank: RankSnapshot) -> list[ActivityRow]:
    """Returns the saves that the training thread of *rank* waited for."""
    return [row for row in rank.activities if row.activity == "save" and not row.background]


def checkpoint_text(run: RunSnapshot) -> str:
    """Age and cost of the checkpoints, and what a death loses; "" where there is nothing to say."""
    found = checkpoints(run)
    if found is None:
        return ""
    parts = []
    if found.cost_seconds is not None and found.age_seconds is not None:
        share = f" ({human_ratio(found.share)} of the time)" if found.share is not None else ""
        parts = [
            f"checkpoints: {human_count(found.count)}, {human_seconds(found.cost_seconds)} each{share}",
            f"the last one {human_seconds(max(0.0, found.age_seconds))} ago",
        ]
    if not run.ended:
        parts.append(f"at risk: {unsaved_text(found)}")
    elif any(rank.failed for rank in run.ranks):  # its seconds are a row of the ledger
        steps = "n/a" if found.unsaved_steps is None else human_count(found.unsaved_steps)
        parts.append(f"steps lost: {steps}, since {_saved(found)}")
    return "; ".join(parts)


def unsaved_text(found: Checkpoints) -> str:
    """``11 min 2 s of steps (812) since the last checkpoint``."""
    many = f" ({human_count(found.unsaved_steps)})" if found.unsaved_steps is not None else ""
    return f"{human_seconds(found.unsaved_seconds)} of steps{many} since {_saved(found)}"


def _saved(found: Checkpoints) -> str:
    return "the last checkpoint" if found.count else "the first step, and no checkpoint was seen"
