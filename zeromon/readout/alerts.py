"""When a person is told about a run, and what: the rules of ``zeromon run --notify``. Pure.

What is told comes from the verdict and the findings that every view shows. The clock is the snapshot's.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from datetime import datetime, timedelta, timezone
from typing import Any

from zeromon.base.units import human_count, printable
from zeromon.readout.remedy import remedy_text
from zeromon.readout.text import finding_text, rough_time, run_state
from zeromon.readout.verdict import Health, judge_run
from zeromon.ring.codes import TextEnum
from zeromon.snapshot import Finding, RunSnapshot
from zeromon.snapshot.levels import (
    ALERT_AGAIN_SECONDS,
    ALERT_OVER_SECONDS,
    ALERT_PATIENCE_SECONDS,
    ALERT_SECONDS,
    ALERTS_AN_HOUR,
    Severity,
)

_HOUR_SECONDS = 3600.0
_LONGEST, _MAX_DIFF_LINES = 400, 12
_WORD_JOINER = "\u2060"
_MARKUP = ("@", "://", "](", "www.", "```")
"""Text that services take for a mention, a link or a block of code."""


class Situation(TextEnum):
    """The subject of a message; the worst first."""

    DEATH = "death"
    STALL = "stall"
    RISK = "risk"
    STRAGGLER = "straggler"


_RANK = {situation: number for number, situation in enumerate(Situation)}


class Tone(TextEnum):
    """The colour of a message, by the words of apprise."""

    FAILURE = "failure"
    WARNING = "warning"
    SUCCESS = "success"


@dataclass(frozen=True, slots=True)
class Message:
    """One message; its title is one line."""

    tone: Tone
    title: str
    body: str


@dataclass(frozen=True, slots=True)
class Problem:
    """A problem that a run has now."""

    word: str
    cause: str
    finding: Finding | None = None


def current_problems(run: RunSnapshot) -> dict[Situation, Problem]:
    """The problems of *run* that a person must know now; of an ended run its death only."""
    judged = judge_run(run)
    critical = [f for f in run.findings if f.severity == Severity.CRITICAL]
    matching = [f for f in critical if finding_text(f) == judged.cause] or critical
    main = Problem(judged.health, judged.cause, matching[0] if matching else None)
    by_situation: dict[Situation, Problem] = {}
    if judged.health in (Health.DYING, Health.DEAD):
        return {Situation.DEATH: main}
    if run.ended:
        return by_situation
    if judged.severity is Severity.CRITICAL:
        died = next((f for f in critical if f.rule == "rank_died"), None)
        if died is not None:  # on another node
            by_situation[Situation.DEATH] = Problem(Health.DYING, finding_text(died), died)
        else:
            stalled = judged.health is Health.STALLED
            by_situation[Situation.STALL if stalled else Situation.RISK] = main
    for late in run.findings:
        if late.rule == "straggler" and late.severity == Severity.WARNING:
            by_situation[Situation.STRAGGLER] = Problem(Health.SLOW, finding_text(late), late)
            break
    return by_situation


@dataclass(slots=True)
class _Standing:
    """One situation: since when it is there, and what was told of it; in seconds of the snapshots."""

    since: float | None = None
    seen: float = 0.0
    told: float | None = None
    """When the last message went out."""
    is_open: bool = False
    """True if it was reported, and its end was not."""

    def next_due_time(self, situation: Situation, *, is_over: bool) -> float:
        """When its next message goes out: the longer it stands, the later."""
        start = self.seen if self.since is None else self.since
        if self.is_open and self.told is not None:
            return math.inf if is_over else self.told + max(ALERT_AGAIN_SECONDS, self.told - start)
        if situation is Situation.DEATH:
            return start + (0.0 if is_over else ALERT_SECONDS)
        late = situation is Situation.STRAGGLER
        earliest = start + (ALERT_PATIENCE_SECONDS if late else ALERT_SECONDS)
        return earliest if self.told is None else max(earliest, self.told + ALERT_AGAIN_SECONDS)


class Alerts:
    """Which messages one run gives; *saved* is what :meth:`saved` gave to an earlier collector."""

    def __init__(self, saved: Mapping[str, Any] | None = None) -> None:
        self._standing = {situation: _Standing() for situation in Situation}
        self._sent: list[float] = []
        """When the messages of the last hour went out."""
        self._attempt: int | None = None
        if saved:
            self._attempt = int(saved["attempt"])
            self._sent = [float(at) for at in saved["sent"]]
            for name, facts in saved["standing"].items():
                self._standing[Situation(name)] = _Standing(**facts)

    def saved(self) -> dict[str, Any]:
        """The state that a restarted collector needs to report nothing twice."""
        sent = {str(s): asdict(case) for s, case in self._standing.items() if case.told is not None}
        return {"attempt": self._attempt, "sent": self._sent, "standing": sent}

    def observe(self, run: RunSnapshot) -> list[Message]:
        """The messages that *run* gives now; none on a node that does not lead the run."""
        if not leads_run(run):
            return []
        active = current_problems(run)
        restarted = self._restart_message(run)
        return [*restarted, *self._found(run, active), *self._gone(run, active)]

    def _restart_message(self, run: RunSnapshot) -> Iterator[Message]:
        """A death that was over before it could be told."""
        previous, self._attempt = self._attempt, run.attempt
        death = self._standing[Situation.DEATH]
        finding = next((finding for finding in run.findings if finding.rule == "restarted"), None)
        if previous is None or run.attempt <= previous or death.is_open or finding is None:
            return
        death.since = death.seen = run.taken_ns / 1e9
        yield from self._tell(run, Situation.DEATH, Problem("restarted", finding.text))

    def _found(self, run: RunSnapshot, active: Mapping[Situation, Problem]) -> Iterator[Message]:
        clock = run.taken_ns / 1e9
        for situation, problem in active.items():
            case = self._standing[situation]
            case.since = clock if case.since is None else case.since
            case.seen = clock
            if clock >= case.next_due_time(situation, is_over=run.ended):
                yield from self._tell(run, situation, problem)

    def _gone(self, run: RunSnapshot, active: Mapping[Situation, Problem]) -> Iterator[Message]:
        clock, cleared = run.taken_ns / 1e9, []
        for situation in [s for s in Situation if s not in active]:
            case = self._standing[situation]
            if Situation.DEATH in active:
                case.is_open, case.since = False, None  # nothing else matters any more
            elif not case.is_open:
                case.since = None
            elif any(_RANK[worse] < _RANK[situation] for worse in active) and not run.ended:
                case.seen = clock  # a worse one hides it
            elif run.ended or clock - case.seen >= ALERT_OVER_SECONDS:
                cleared.append(situation)
        if cleared and self._may_send_now(run):
            yield self._over(run, cleared)

    def _tell(self, run: RunSnapshot, situation: Situation, problem: Problem) -> Iterator[Message]:
        """A message about *problem*, unless this hour has had its share."""
        if not self._may_send_now(run):
            return
        case, clock = self._standing[situation], run.taken_ns / 1e9
        still = "still " if case.is_open else ""
        case.is_open, case.told = True, clock
        tone = Tone.WARNING if situation is Situation.STRAGGLER else Tone.FAILURE
        start = clock if case.since is None else case.since
        body = (*_lines_of_problem(problem), *self._closing_lines(run, start))
        yield safe_message(tone, f"{still}{problem.word}: {run.run}", body)

    def _over(self, run: RunSnapshot, cleared: list[Situation]) -> Message:
        clock, judged = run.taken_ns / 1e9, judge_run(run)
        start = min(self._standing[s].since or clock for s in cleared)
        for situation in cleared:
            case = self._standing[situation]
            case.is_open, case.since, case.told = False, None, clock
        wrong = run.ended and judged.severity is Severity.CRITICAL
        state = judged.text if run.ended else run_state(run)
        outcome = "" if wrong else f"{', '.join(cleared)}: over after {rough_time(clock - start)}"
        label = judged.health if run.ended else "over"
        body = (state, outcome, *self._closing_lines(run, start))
        return safe_message(Tone.FAILURE if wrong else Tone.SUCCESS, f"{label}: {run.run}", body)

    def _may_send_now(self, run: RunSnapshot) -> bool:
        """Returns whether a message may go out; counts it."""
        clock = run.taken_ns / 1e9
        self._sent = [at for at in self._sent if clock - at < _HOUR_SECONDS]
        # How a run ended is told even after the share of the hour
        if len(self._sent) >= ALERTS_AN_HOUR and not run.ended:
            return False
        self._sent.append(clock)
        return True

    def _closing_lines(self, run: RunSnapshot, start: float) -> Iterator[str]:
        nodes = f" and {len(run.nodes) - 1} more" if len(run.nodes) > 1 else ""
        step = human_count(run.last_step)
        yield f"node {run.node}{nodes}, step {step}, since {_clock_text(run, start)}"
        yield f"look at it with: zeromon {'report' if run.ended else 'attach'} {run.run}"
        if len(self._sent) == ALERTS_AN_HOUR and not run.ended:
            resume = _clock_text(run, self._sent[0] + _HOUR_SECONDS)
            yield f"{ALERTS_AN_HOUR} messages in an hour: the next ones are withheld until {resume}"


def leads_run(run: RunSnapshot) -> bool:
    """Returns whether this node's snapshot speaks for *run*: that of the leader, or of rank 0."""
    return run.nodes[0].here if run.nodes else any(rank.rank == 0 for rank in run.ranks)


def safe_message(tone: Tone, title: str, body: tuple[str, ...]) -> Message:
    """A message of *body* in which no name of a run is a mention, a link, or a line of its own."""
    return Message(tone, harmless_text(title), "\n".join(harmless_text(row) for row in body if row))


def harmless_text(message: str) -> str:
    """*message* as one short line that no service takes for a mention, a link or a block of code."""
    message = printable(message)
    for mark in _MARKUP:
        message = message.replace(mark, mark[0] + _WORD_JOINER + mark[1:])
    return message if len(message) <= _LONGEST else f"{message[:_LONGEST]}..."


def _lines_of_problem(problem: Problem) -> Iterator[str]:
    """The cause, the finding's sentence where it says more, and its change."""
    yield problem.cause
    finding = problem.finding
    if finding is None:
        return
    if finding_text(finding) != problem.cause:
        yield f"{finding.code} {finding_text(finding)}"
    if finding.remedy is not None:
        change = remedy_text(finding.remedy)
        yield change.reason
        yield from (row.text for row in change.diff[:_MAX_DIFF_LINES])
        if len(change.diff) > _MAX_DIFF_LINES:
            yield f"... zeromon rule {finding.code}"
        yield change.outlook


def _clock_text(run: RunSnapshot, seconds: float) -> str:
    """``18:02:11 UTC``: the wall clock at *seconds* of the snapshots."""
    snapshot_time = datetime.fromtimestamp(run.taken_wall, timezone.utc)
    at = snapshot_time + timedelta(seconds=seconds - run.taken_ns / 1e9)
    return f"{at:%Y-%m-%d %H:%M:%S} UTC"
