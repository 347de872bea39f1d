"""Which processes belong to which attempt of a run, and what earlier attempts did.

A launcher (torchrun with --max-restarts) ends all ranks when one fails, and starts them again. Each
process has its own ring, so all attempts are in the folder of the run. A program may also start ranks
again after those before have finished: such an attempt is another job of the run, and no restart.
"""

import threading
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace

from zeromon.attach.rank_processes import Process, processes, ranks_to_be
from zeromon.collector.rank import SETTLING_POLLS, RankFollower
from zeromon.focus import death_roles, roles_of
from zeromon.fold.ledger import Observed, began_ns, ledger_rows, ledger_totals, lose
from zeromon.fold.summarize import summarize
from zeromon.probes.process import ProcessWatch, describe_status, main_frames
from zeromon.readout.text import exit_text, script_frame
from zeromon.snapshot import Attempt, Death, DeathRole, RankProcess, RunSnapshot
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
    """Returns whether no rank of an attempt failed: what follows is another job of the program."""
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


_FIRST_STACK_SECONDS, _LONGEST_SECONDS = 5.0, 60.0
"""After how long a stack is read, and the longest time to the next; each is twice the one before."""
_MAX_STACKS = 4
_STOPPED = ("SIGTERM", "SIGINT", "SIGKILL")
"""How a launcher ends the other ranks."""
_UNKNOWN_END = "ended before it reported"


@dataclass(slots=True)
class _Waiting:
    """A process of a rank that has not reported."""

    watch: ProcessWatch
    rank: int | None
    attempt: int
    began_ns: int
    died_ns: int = 0
    dead_looks: int = 0
    at: str = ""

    @property
    def has_settled(self) -> bool:
        """True if it has ended and nothing more about its end can become known."""
        known = self.watch.status() is not None or self.dead_looks >= SETTLING_POLLS
        return bool(self.died_ns) and known

    @property
    def ended(self) -> str:
        status = self.watch.status()
        return _UNKNOWN_END if status is None else describe_status(status)


class Launched:
    """The rank processes below the launcher *pid* that have not reported."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._waiting: dict[int, _Waiting] = {}
        self._next_stack_ns = 0
        self._pause_seconds = _FIRST_STACK_SECONDS
        self._reader: threading.Thread | None = None

    @property
    def is_waiting(self) -> bool:
        """True if a process lives that has not reported."""
        return any(not one.died_ns for one in self._waiting.values())

    @property
    def is_settling(self) -> bool:
        """True if more may become known of how a process ended."""
        return any(one.died_ns and not one.has_settled for one in self._waiting.values())

    def look(self, reported: Collection[int], now_ns: int) -> None:
        """Finds new processes; forgets those of *reported*, by pid."""
        found = {process.pid: process for process in ranks_to_be(self._pid, processes())}
        for pid, process in found.items():
            if pid not in self._waiting and pid not in reported:
                self._add(process, now_ns)
        for pid, one in list(self._waiting.items()):
            if pid in reported or (one.rank is None and pid not in found):  # not a rank after all
                del self._waiting[pid]
            elif not one.watch.alive():
                one.died_ns = one.died_ns or now_ns
                one.dead_looks += 1
        if self.is_waiting:
            self._read_stacks(now_ns)

    def _add(self, process: Process, now_ns: int) -> None:
        restarts = process.environment.get("TORCHELASTIC_RESTART_COUNT", "")
        attempt = 1 + int(restarts) if restarts.isdigit() else 1
        watch = ProcessWatch(process.pid)
        self._waiting[process.pid] = _Waiting(watch, process.rank, attempt, now_ns)
        self._pause_seconds = _FIRST_STACK_SECONDS
        self._next_stack_ns = now_ns + round(_FIRST_STACK_SECONDS * 1e9)

    def _read_stacks(self, now_ns: int) -> None:
        if now_ns < self._next_stack_ns or (self._reader and self._reader.is_alive()):
            return
        self._pause_seconds = min(2 * self._pause_seconds, _LONGEST_SECONDS)
        self._next_stack_ns = now_ns + round(self._pause_seconds * 1e9)
        alive = [(pid, one) for pid, one in self._waiting.items() if not one.died_ns]
        self._reader = threading.Thread(
            target=_read, args=(alive[:_MAX_STACKS],), daemon=True, name="zeromon-stacks"
        )
        self._reader.start()

    def with_processes(self, run: RunSnapshot, known: Sequence[int], clock_ns: int) -> RunSnapshot:
        """Returns *run* with its processes and attempts that have not reported.

        *known*: the numbers of the attempts that have; *clock_ns*: wall clock less monotonic clock.
        """
        starting = [
            RankProcess(pid=pid, rank=one.rank, attempt=one.attempt, at=one.at)
            for pid, one in self._waiting.items()
            if not one.died_ns
        ]
        starting.sort(key=lambda one: (one.rank is None, one.rank, one.pid))
        ended = self._ended_attempts(known, clock_ns)
        number = max((*known, *(one.number for one in ended)), default=0)
        found = replace(run, starting=tuple(starting), attempts=(*run.attempts, *ended))
        return replace(found, restarting=_attempt_to_come(found, number))

    def _ended_attempts(self, known: Collection[int], clock_ns: int) -> tuple[Attempt, ...]:
        by_attempt: dict[int, list[_Waiting]] = {}
        for one in self._waiting.values():
            if one.rank is not None and one.attempt not in known:
                by_attempt.setdefault(one.attempt, []).append(one)
        return tuple(
            _attempt_of(number, members, clock_ns)
            for number, members in sorted(by_attempt.items())
            if all(one.has_settled for one in members)
            and any(one.ended != "finished" for one in members)
        )


def _attempt_to_come(run: RunSnapshot, number: int) -> int:
    """The attempt that the launcher starts after *number*, the last that ended; 0 for none."""
    if run.ended or any(rank.alive for rank in run.ranks):
        return 0
    begun = max((one.attempt for one in run.starting), default=0)
    if begun > max(1, number):
        return begun
    newest = next((one for one in run.attempts if one.number == number), None)
    roles = [death.role for death in newest.deaths] if newest else roles_of(run).values()
    restarts = number <= max_restarts(run.command)
    return number + 1 if restarts and DeathRole.CULPRIT in roles else 0


def _read(waiting: Iterable[tuple[int, _Waiting]]) -> None:
    for pid, one in waiting:
        frames = main_frames(pid)
        one.at = script_frame(frames) if frames else ""


def _attempt_of(number: int, members: Collection[_Waiting], clock_ns: int) -> Attempt:
    failed = [one for one in members if one.ended != "finished"]
    by_itself = [one for one in failed if one.ended not in _STOPPED]
    deaths = [
        Death(
            rank=one.rank or 0,
            ended=one.ended,
            exception="",
            role=DeathRole.CULPRIT if one in (by_itself or failed[:1]) else DeathRole.VICTIM,
        )
        for one in failed
    ]
    return Attempt(
        number=number,
        started_wall=(min(one.began_ns for one in members) + clock_ns) / 1e9,
        ended_wall=(max(one.died_ns for one in members) + clock_ns) / 1e9,
        steps=0,
        resumed_step=None,
        lost_steps=0,
        deaths=tuple(sorted(deaths, key=lambda d: (d.role is not DeathRole.CULPRIT, d.rank))),
    )


def max_restarts(command: Iterable[str]) -> int:
    """How often the launcher of *command* starts the ranks again; 0 where it does not say."""
    words = [word.replace("_", "-") for word in command]
    for index, word in enumerate(words):
        name, _, value = word.partition("=")
        if name == "--max-restarts":
            value = value or "".join(words[index + 1 : index + 2])
            return int(value) if value.isdigit() else 0
    return 0
