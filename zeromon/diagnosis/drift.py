"""Ranks whose steps drift apart while their collectives match, so that gradients mix. Pure.

Members of a group call the same collectives, so the group's number at the end of a step places that
step. A rank that has ended more steps than another at the same number, or at a lower one, is ahead.
"""

from typing import NamedTuple

from zeromon.snapshot import GroupProgress, RankSnapshot, RunSnapshot


class Drift(NamedTuple):
    """A rank that has ended more steps than another in the same collectives of a group."""

    ahead: RankSnapshot
    behind: RankSnapshot
    group: GroupProgress


def widest_drift(run: RunSnapshot) -> Drift | None:
    """The rank with most steps and the rank furthest behind it in its collectives; None for none."""
    ranks = [rank for rank in run.ranks if not rank.joined]
    ahead = max(ranks, key=lambda rank: rank.step, default=None)
    if ahead is None:
        return None
    drifts = [
        Drift(ahead, behind, group)
        for group in ahead.groups
        if group.step_sequence >= 0 and _is_of_gradients(ahead, group)
        for behind in ranks
        if behind.step < ahead.step and _reached(behind, group) >= group.step_sequence
    ]
    return max(drifts, key=lambda drift: drift.ahead.step - drift.behind.step, default=None)


def _reached(rank: RankSnapshot, group: GroupProgress) -> int:
    """The number of *group* when the last step of *rank* ended; -1 where that step called none."""
    own = (one.step_sequence for one in rank.groups if one.group_id == group.group_id)
    return next(own, -1)


def _is_of_gradients(rank: RankSnapshot, group: GroupProgress) -> bool:
    return any(row.phase == "backward" and row.group == group.label for row in rank.traffic)
