"""Which processes belong to which attempt of a run, and what earlier attempts did.

A launcher (torchrun with --max-restarts) ends all ranks when one fails, and starts them again. Each
process has its own ring, so all attempts are in the folder of the run. A program may also start ranks
again after those before have finished: such an attempt is another job of the run, and no restart.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import replace

from zeromon.collector.rank import RankFollower
from zeromon.focus import death_roles
from zeromon.fold.ledger import Observed, began_ns, ledger_rows, ledger_totals, lose
from zeromon.fold.summarize import summarize
from zeromon.readout.text import exit_text
from zeromon.snapshot import Attempt, Death, DeathRole
from zeromon.snapshot.ledger import added


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


def beginnings(attempts: Sequence[Sequence[RankFollower]], launched_ns: int) -> list[int]:
    """When each attempt began, CLOCK_MONOTONIC: the first at the launch, 0 where that is not known."""
    return [launched_ns, *(min(began_ns(f.state) for f in members) for members in attempts[1:])]


def lifetime(follower: RankFollower, since_ns: int, until_ns: int) -> Observed:
    """How *follower* ended, in an attempt from *since_ns* to *until_ns*."""
    ended, failed = follower.ending()
    return Observed(
        alive=follower.alive,
        ended=ended,
        failed=failed,
        since_ns=since_ns,
        until_ns=0 if follower.was_detached else until_ns,
        died_ns=follower.died_ns,
    )


def earlier(
    attempts: Sequence[Sequence[RankFollower]], launched_ns: int = 0
) -> tuple[Attempt, ...]:
    """All attempts but the newest, the oldest first."""
    goes_on = {follower.path for follower in present(attempts)}
    resumed = [_resumed_step(members) for members in attempts]
    began = beginnings(attempts, launched_ns)
    found = []
    for index, (number, members) in enumerate(zip(numbers(attempts), attempts[:-1], strict=False)):
        one, before = _attempt(number, members), resumed[index]
        lost = 0 if one.finished else _lost(before, one.steps, resumed[index + 1])
        rows = [
            row
            for follower in members
            if follower.path not in goes_on
            for row in lose(
                ledger_rows(follower.state, lifetime(follower, began[index], began[index + 1])),
                list(follower.state.history),
                lost or 0,
            )
        ]
        found.append(replace(one, resumed_step=before, lost_steps=lost, ledger=added(rows)))
    return tuple(found)


def totals_before(
    attempts: Sequence[Sequence[RankFollower]], launched_ns: int
) -> dict[int, Counter[str]]:
    """Rank -> its seconds by cause in all attempts but the newest, which the counter goes on from."""
    began = beginnings(attempts, launched_ns)
    newest = {follower.path for follower in present(attempts)}
    sums: defaultdict[int, Counter[str]] = defaultdict(Counter)
    for members, since_ns, until_ns in zip(attempts, began, began[1:], strict=False):
        for one in members:
            if one.path not in newest:
                totals = ledger_totals(one.state, lifetime(one, since_ns, until_ns))
                sums[one.state.rank].update(totals)
    return sums


def numbers(attempts: Iterable[Sequence[RankFollower]]) -> list[int]:
    """The number of each attempt, from 1, as the launcher counts; each job begins with 1 again.

    An attempt whose processes ended before they became ranks has a number, and no ring.
    """
    found: list[int] = []
    before = 0
    for members in attempts:
        number = max(1 + max(map(_restarts, members)), before + 1)
        found.append(number)
        before = 0 if has_finished(members) else number
    return found


def has_finished(members: Iterable[RankFollower]) -> bool:
    """Whether no rank of an attempt failed: what follows is another job of the program."""
    return not any(follower.alive or follower.ending()[1] for follower in members)


def _restarts(follower: RankFollower) -> int:
    restarts = follower.state.meta.get("restarts", 0)
    return restarts if isinstance(restarts, int) else 0


def _lost(before: int | None, steps: int, after: int | None) -> int | None:
    """Steps that are taken again; all three count what the optimizers had taken."""
    return None if before is None or after is None else max(0, before + steps - after)


def _attempt(number: int, members: Sequence[RankFollower]) -> Attempt:
    ends = [(follower, *follower.ending()) for follower in members]
    ranks = [
        summarize(follower.state, Observed(alive=False, ended=ended, failed=failed))
        for follower, ended, failed in ends
    ]
    roles = death_roles(ranks)
    deaths = [
        Death(
            rank=rank.rank,
            ended=rank.ended if rank.failed else f"left ({exit_text(rank)})",
            exception=rank.exception,
            role=roles[rank.rank],
        )
        for rank in ranks
        if rank.rank in roles
    ]
    return Attempt(
        number=number,
        started_wall=min(f.reader.header.wall_ns for f in members) / 1e9,
        ended_wall=max(map(_last_wall_ns, members)) / 1e9,
        steps=max(follower.state.steps for follower in members),
        resumed_step=None,
        lost_steps=None,
        finished=has_finished(members),
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
