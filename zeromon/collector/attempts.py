"""Which processes belong to which attempt of a run, and what earlier attempts did.

A launcher (torchrun with --max-restarts) ends all ranks when one fails, and starts them again. Each
process has its own ring, so all attempts are in the folder of the run.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace

from zeromon.collector.rank import RankFollower
from zeromon.focus import death_roles
from zeromon.fold.ledger import began_ns, ledger_rows, lose
from zeromon.fold.observed import Observed
from zeromon.fold.summarize import summarize
from zeromon.snapshot import Attempt, Death, DeathRole
from zeromon.snapshot.ledger import Cause, LedgerRow, added


def attempts_of(followers: Iterable[RankFollower]) -> list[list[RankFollower]]:
    """*followers* by attempt, the oldest first.

    An attempt begins with a rank that another process was before, or with a restart that the launcher
    counts: its ranks may be fewer or more than those of the attempt before. A process to which an agent
    was attached again has a ring for each time, in one attempt.
    """
    attempts: list[list[RankFollower]] = []
    pids: dict[int, int] = {}
    counted = 0
    for follower in sorted(followers, key=_born_ns):
        restarts = _restarts(follower)
        rank, pid = follower.state.rank, follower.state.pid
        if not attempts or pids.get(rank, pid) != pid or restarts > counted:
            attempts.append([])
            pids.clear()
        pids[rank] = pid
        counted = max(counted, restarts)
        attempts[-1].append(follower)
    return attempts


def present(attempts: Sequence[Sequence[RankFollower]]) -> list[RankFollower]:
    """One follower per rank: those of the newest attempt, and ranks that went on when it began."""
    if not attempts:
        return []
    began_ns = min(map(_born_ns, attempts[-1]))
    newest = {
        follower.state.rank: follower
        for attempt in attempts
        for follower in attempt
        if attempt is attempts[-1] or follower.alive or follower.state.last_event_ns > began_ns
    }
    return [newest[rank] for rank in sorted(newest)]


def earlier(attempts: Sequence[Sequence[RankFollower]]) -> tuple[Attempt, ...]:
    """All attempts but the newest, the oldest first."""
    resumed = [_resumed_step(members) for members in attempts]
    numbered = zip(numbers(attempts), attempts[:-1], strict=False)
    found = [_attempt(number, members) for number, members in numbered]
    whole = tuple(
        replace(one, resumed_step=before, lost_steps=_lost(before, one.steps, after))
        for one, before, after in zip(found, resumed, resumed[1:], strict=False)
    )
    return tuple(
        replace(one, ledger=_ledger(one, members, after))
        for one, members, after in zip(whole, attempts, attempts[1:], strict=False)
    )


def _ledger(
    attempt: Attempt, members: Sequence[RankFollower], after: Sequence[RankFollower]
) -> tuple[LedgerRow, ...]:
    """The ledger of all ranks of *attempt*, up to the processes of the attempt *after* it."""
    rows = [
        row
        for one in members
        for row in lose(
            ledger_rows(one.state, failed=True), list(one.state.history), attempt.lost_steps or 0
        )
    ]
    ends = {one.state.rank: one.state.last_event_ns for one in members}
    last = max(ends.values())
    dead = sum(max(0, began_ns(one.state) - ends.get(one.state.rank, last)) / 1e9 for one in after)
    return added((*rows, LedgerRow(cause=Cause.DEAD, seconds=dead)))


def numbers(attempts: Iterable[Sequence[RankFollower]]) -> list[int]:
    """The number of each attempt, from 1, as the launcher counts.

    An attempt whose processes ended before they became ranks has a number, and no ring.
    """
    found: list[int] = []
    for members in attempts:
        counted = 1 + max(map(_restarts, members))
        found.append(max(counted, found[-1] + 1 if found else 1))
    return found


def _restarts(follower: RankFollower) -> int:
    restarts = follower.state.meta.get("restarts", 0)
    return restarts if isinstance(restarts, int) else 0


def _lost(before: int | None, steps: int, after: int | None) -> int | None:
    """Steps that are taken again; all three count what the optimizers had taken."""
    return None if before is None or after is None else max(0, before + steps - after)


def _attempt(number: int, members: Sequence[RankFollower]) -> Attempt:
    ends = [(follower, *follower.ending()) for follower in members]
    failed = [
        summarize(follower.state, Observed(alive=False, ended=ended, failed=True))
        for follower, ended, has_failed in ends
        if has_failed
    ]
    roles = death_roles(failed)
    deaths = [
        Death(rank=one.rank, ended=one.ended, exception=one.exception, role=roles[one.rank])
        for one in failed
    ]
    return Attempt(
        number=number,
        started_wall=min(f.reader.header.wall_ns for f in members) / 1e9,
        ended_wall=max(map(_last_wall_ns, members)) / 1e9,
        steps=max(follower.state.steps for follower in members),
        resumed_step=None,
        lost_steps=None,
        deaths=tuple(sorted(deaths, key=lambda d: (d.role is not DeathRole.CULPRIT, d.rank))),
    )


def _resumed_step(members: Iterable[RankFollower]) -> int | None:
    known = (follower.state.meta.get("resumed_step") for follower in members)
    return max((step for step in known if isinstance(step, int)), default=None)


def _born_ns(follower: RankFollower) -> int:
    return follower.reader.header.mono_ns


def _last_wall_ns(follower: RankFollower) -> int:
    header = follower.reader.header
    return header.wall_ns + max(0, follower.state.last_event_ns - header.mono_ns)
