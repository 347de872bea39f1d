"""Watches the rank processes of a launcher before they report, and those that end before they do."""

import threading
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace

from zeromon.attach.rank_processes import Process, processes, ranks_to_be
from zeromon.collector.rank import SETTLING_POLLS
from zeromon.focus import roles_of
from zeromon.probes.process import ProcessWatch, describe_status, main_frames
from zeromon.readout.text import script_frame
from zeromon.snapshot import Attempt, Death, DeathRole, RankProcess, RunSnapshot

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
        """Whether it has ended and nothing more about its end can become known."""
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
        """Whether a process lives that has not reported."""
        return any(not one.died_ns for one in self._waiting.values())

    @property
    def is_settling(self) -> bool:
        """Whether more may become known of how a process ended."""
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
            _attempt(number, members, clock_ns)
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


def _attempt(number: int, members: Collection[_Waiting], clock_ns: int) -> Attempt:
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
