"""Which processes belong to which attempt of a run, and what earlier attempts did.

A launcher (torchrun with --max-restarts) ends all ranks when one fails, and starts them again. Each
process has its own ring, so all attempts are in the folder of the run. A program may also start ranks
again after those before have finished: such an attempt is another job of the run, and no restart.
"""

import threading
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace

from zeromon.attach.rank_processes import ranks_to_be, running_processes
from zeromon.collector.rank import SETTLING_POLLS, RankFollower
from zeromon.fold.ledger import Observed, ledger_rows, ledger_totals, process_began_ns, with_lost_steps
from zeromon.fold.summarize import summarize_rank
from zeromon.probes.process import ProcessWatch, describe_wait_status, main_thread_frames
from zeromon.readout.text import exit_text, script_frame
from zeromon.snapshot import RunSnapshot
from zeromon.snapshot.focus import death_roles, roles_of
from zeromon.snapshot.ledger import sum_by_cause
from zeromon.snapshot.run import Attempt, Death, DeathRole, RankProcess


def group_by_attempt(followers: Iterable[RankFollower]) -> list[list[RankFollower]]:
    """*followers* by attempt, the oldest first.

    An attempt begins with a rank that another process was before, or with a restart that the launcher
    counts: its ranks may be fewer or more than those of the attempt before. A process to which an agent
    was attached again has a ring for each time, in one attempt.
    """
    attempts: list[list[RankFollower]] = []
    pids: dict[int, int] = {}
    counted = 0
    for follower in sorted(followers, key=_ring_created_ns):
        restarts = _restart_count(follower)
        rank, pid = follower.state.rank, follower.state.pid
        if not attempts or pids.get(rank, pid) != pid or restarts > counted:
            attempts.append([])
            pids.clear()
        pids[rank] = pid
        counted = max(counted, restarts)
        attempts[-1].append(follower)
    return attempts


def current_followers(attempts: Sequence[Sequence[RankFollower]]) -> list[RankFollower]:
    """One follower per rank: those of the newest attempt, and ranks that went on when it began."""
    if not attempts:
        return []
    began_ns = min(map(_ring_created_ns, attempts[-1]))
    # By its last record too: a rank that another's restart leaves running may end before this poll
    by_rank = {
        follower.state.rank: follower
        for attempt in attempts
        for follower in attempt
        if attempt is attempts[-1] or follower.alive or follower.state.last_event_ns > began_ns
    }
    return [by_rank[rank] for rank in sorted(by_rank)]


def attempt_starts_ns(attempts: Sequence[Sequence[RankFollower]], launched_ns: int) -> list[int]:
    """When each attempt began, CLOCK_MONOTONIC: the first at the launch, 0 where that is not known."""
    return [launched_ns, *(min(process_began_ns(f.state) for f in members) for members in attempts[1:])]


def observed_lifetime(follower: RankFollower, since_ns: int, until_ns: int) -> Observed:
    """How *follower* ended, in an attempt from *since_ns* to *until_ns*."""
    end_cause, failed = follower.ending()
    return Observed(
        alive=follower.alive,
        ended=end_cause,
        failed=failed,
        since_ns=since_ns,
        # A detached process goes on unseen: its time after the last record has no cause
        until_ns=0 if follower.was_detached else until_ns,
        died_ns=follower.died_ns,
    )


def earlier_attempts(
    attempts: Sequence[Sequence[RankFollower]], launched_ns: int = 0
) -> tuple[Attempt, ...]:
    """All attempts but the newest, the oldest first."""
    goes_on = {follower.path for follower in current_followers(attempts)}
    resumed = [_highest_resumed_step(members) for members in attempts]
    starts_ns = attempt_starts_ns(attempts, launched_ns)
    past = []
    # The newest attempt has a number and no place here: strict=True would raise
    for i, (number, members) in enumerate(zip(attempt_numbers(attempts), attempts[:-1], strict=False)):
        attempt, resumed_step = _summarize_attempt(number, members), resumed[i]
        lost = 0 if attempt.finished else _lost_steps(resumed_step, attempt.steps, resumed[i + 1])
        rows = [
            row
            for follower in members
            if follower.path not in goes_on
            for row in with_lost_steps(
                ledger_rows(follower.state, observed_lifetime(follower, starts_ns[i], starts_ns[i + 1])),
                list(follower.state.history),
                lost or 0,
            )
        ]
        past.append(
            replace(attempt, resumed_step=resumed_step, lost_steps=lost, ledger=sum_by_cause(rows))
        )
    return tuple(past)


def earlier_ledger_totals(
    attempts: Sequence[Sequence[RankFollower]], launched_ns: int
) -> dict[int, Counter[str]]:
    """Rank -> its seconds by cause in all attempts but the newest, which the counter goes on from."""
    starts_ns = attempt_starts_ns(attempts, launched_ns)
    current_paths = {follower.path for follower in current_followers(attempts)}
    sums: defaultdict[int, Counter[str]] = defaultdict(Counter)
    for members, since_ns, until_ns in zip(attempts, starts_ns, starts_ns[1:], strict=False):
        for follower in members:
            if follower.path not in current_paths:
                totals = ledger_totals(follower.state, observed_lifetime(follower, since_ns, until_ns))
                sums[follower.state.rank].update(totals)
    return sums


def attempt_numbers(attempts: Iterable[Sequence[RankFollower]]) -> list[int]:
    """The number of each attempt, from 1, as the launcher counts; each job begins with 1 again.

    An attempt whose processes ended before they became ranks has a number, and no ring.
    """
    ordinals: list[int] = []
    previous = 0
    for members in attempts:
        number = max(1 + max(map(_restart_count, members)), previous + 1)
        ordinals.append(number)
        previous = 0 if has_job_finished(members) else number
    return ordinals


def has_job_finished(members: Iterable[RankFollower]) -> bool:
    """Returns whether no rank of an attempt failed: what follows is another job of the program."""
    return not any(follower.alive or follower.ending()[1] for follower in members)


def _restart_count(follower: RankFollower) -> int:
    restarts = follower.state.meta.get("restarts", 0)
    return restarts if isinstance(restarts, int) else 0


def _lost_steps(resumed: int | None, steps: int, next_resumed: int | None) -> int | None:
    """Steps that are taken again; all three count what the optimizers had taken."""
    return None if resumed is None or next_resumed is None else max(0, resumed + steps - next_resumed)


def _summarize_attempt(number: int, members: Sequence[RankFollower]) -> Attempt:
    endings = [(follower, *follower.ending()) for follower in members]
    ranks = [
        summarize_rank(follower.state, Observed(alive=False, ended=end_cause, failed=failed))
        for follower, end_cause, failed in endings
    ]
    roles = death_roles(ranks)
    deaths = [
        Death(
            rank=rank.rank,
            ended=rank.status.ended if rank.status.failed else f"left ({exit_text(rank)})",
            exception=rank.status.exception,
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
        finished=has_job_finished(members),
        deaths=tuple(sorted(deaths, key=lambda d: (d.role is not DeathRole.CULPRIT, d.rank))),
    )


def _highest_resumed_step(members: Iterable[RankFollower]) -> int | None:
    resumed_steps = (follower.state.meta.get("resumed_step") for follower in members)
    return max((step for step in resumed_steps if isinstance(step, int)), default=None)


def _ring_created_ns(follower: RankFollower) -> int:
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
        # Before Linux 6.15 no status comes: without the count of polls the run would never end
        is_explained = self.watch.status() is not None or self.dead_looks >= SETTLING_POLLS
        return bool(self.died_ns) and is_explained

    @property
    def ended(self) -> str:
        status = self.watch.status()
        return _UNKNOWN_END if status is None else describe_wait_status(status)


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
        return any(not waiting.died_ns for waiting in self._waiting.values())

    @property
    def is_settling(self) -> bool:
        """True if more may become known of how a process ended."""
        return any(w.died_ns and not w.has_settled for w in self._waiting.values())

    def look(self, reported: Collection[int], now_ns: int) -> None:
        """Finds new processes; forgets those of *reported*, by pid."""
        by_pid = {process.pid: process for process in ranks_to_be(self._pid, running_processes())}
        for pid, process in by_pid.items():
            if pid not in self._waiting and pid not in reported:
                restarts = process.environment.get("TORCHELASTIC_RESTART_COUNT", "")
                attempt = 1 + int(restarts) if restarts.isdigit() else 1
                watch = ProcessWatch(process.pid)
                self._waiting[process.pid] = _Waiting(watch, process.rank, attempt, now_ns)
                # Without this, the first stack of a new attempt may come a minute late
                self._pause_seconds = _FIRST_STACK_SECONDS
                self._next_stack_ns = now_ns + round(_FIRST_STACK_SECONDS * 1e9)
        for pid, waiting in list(self._waiting.items()):
            if pid in reported or (waiting.rank is None and pid not in by_pid):  # not a rank after all
                del self._waiting[pid]
            elif not waiting.watch.alive():
                waiting.died_ns = waiting.died_ns or now_ns
                waiting.dead_looks += 1
        if self.is_waiting:
            self._read_stacks(now_ns)

    def _read_stacks(self, now_ns: int) -> None:
        if now_ns < self._next_stack_ns or (self._reader and self._reader.is_alive()):
            return
        self._pause_seconds = min(2 * self._pause_seconds, _LONGEST_SECONDS)
        self._next_stack_ns = now_ns + round(self._pause_seconds * 1e9)
        alive = [(pid, waiting) for pid, waiting in self._waiting.items() if not waiting.died_ns]
        # In a thread: py-spy may take 10 s for each process, and the snapshots would stand still
        self._reader = threading.Thread(
            target=_read_script_frames, args=(alive[:_MAX_STACKS],), daemon=True, name="zeromon-stacks"
        )
        self._reader.start()

    def with_unreported(self, run: RunSnapshot, reported: Sequence[int], clock_ns: int) -> RunSnapshot:
        """Returns *run* with its processes and attempts that have not reported.

        *reported*: the numbers of the attempts that have; *clock_ns*: wall clock less monotonic clock.
        """
        starting = [
            RankProcess(pid=pid, rank=waiting.rank, attempt=waiting.attempt, at=waiting.at)
            for pid, waiting in self._waiting.items()
            if not waiting.died_ns
        ]
        starting.sort(key=lambda process: (process.rank is None, process.rank, process.pid))
        ended_attempts = self._ended_attempts(reported, clock_ns)
        number = max((*reported, *(attempt.number for attempt in ended_attempts)), default=0)
        updated = replace(run, starting=tuple(starting), attempts=(*run.attempts, *ended_attempts))
        return replace(updated, restarting=_attempt_to_come(updated, number))

    def _ended_attempts(self, reported: Collection[int], clock_ns: int) -> tuple[Attempt, ...]:
        by_attempt: dict[int, list[_Waiting]] = {}
        for waiting in self._waiting.values():
            if waiting.rank is not None and waiting.attempt not in reported:
                by_attempt.setdefault(waiting.attempt, []).append(waiting)
        return tuple(
            _attempt_without_rings(number, members, clock_ns)
            for number, members in sorted(by_attempt.items())
            if all(waiting.has_settled for waiting in members)
            and any(waiting.ended != "finished" for waiting in members)
        )


def _attempt_to_come(run: RunSnapshot, number: int) -> int:
    """The attempt that the launcher starts after *number*, the last that ended; 0 for none."""
    if run.ended or any(rank.status.alive for rank in run.ranks):
        return 0
    highest_begun = max((process.attempt for process in run.starting), default=0)
    if highest_begun > max(1, number):
        return highest_begun
    last_attempt = next((attempt for attempt in run.attempts if attempt.number == number), None)
    roles = [death.role for death in last_attempt.deaths] if last_attempt else roles_of(run).values()
    restarts = number <= max_restart_count(run.command)
    return number + 1 if restarts and DeathRole.CULPRIT in roles else 0


def _read_script_frames(waiting: Iterable[tuple[int, _Waiting]]) -> None:
    for pid, process in waiting:
        frames = main_thread_frames(pid)
        process.at = script_frame(frames) if frames else ""


def _attempt_without_rings(number: int, members: Collection[_Waiting], clock_ns: int) -> Attempt:
    failed = [process for process in members if process.ended != "finished"]
    # A launcher signals the other ranks when one fails: without this all would be culprits
    by_itself = [process for process in failed if process.ended not in _STOPPED]
    deaths = [
        Death(
            rank=process.rank or 0,
            ended=process.ended,
            exception="",
            # Signals may end all of them, and a restart is expected after a culprit only
            role=DeathRole.CULPRIT if process in (by_itself or failed[:1]) else DeathRole.VICTIM,
        )
        for process in failed
    ]
    return Attempt(
        number=number,
        started_wall=(min(process.began_ns for process in members) + clock_ns) / 1e9,
        ended_wall=(max(process.died_ns for process in members) + clock_ns) / 1e9,
        steps=0,
        resumed_step=None,
        lost_steps=0,
        deaths=tuple(sorted(deaths, key=lambda d: (d.role is not DeathRole.CULPRIT, d.rank))),
    )


def max_restart_count(command: Iterable[str]) -> int:
    """How often the launcher of *command* starts the ranks again; 0 where it does not say."""
    # torchrun accepts both --max-restarts and --max_restarts
    arguments = [argument.replace("_", "-") for argument in command]
    for index, argument in enumerate(arguments):
        name, _, value = argument.partition("=")
        if name == "--max-restarts":
            value = value or "".join(arguments[index + 1 : index + 2])
            return int(value) if value.isdigit() else 0
    return 0
