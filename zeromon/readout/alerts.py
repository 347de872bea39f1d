"""When a person is told about a run, and what: the rules of ``zeromon run --notify``. Pure.

What is told comes from the verdict and the findings that every view shows. The clock is the snapshot's.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from datetime import datetime, timedelta, timezone
from typing import Any

from zeromon.levels import (
    ALERT_AGAIN_SECONDS,
    ALERT_OVER_SECONDS,
    ALERT_PATIENCE_SECONDS,
    ALERT_SECONDS,
    ALERTS_AN_HOUR,
    Severity,
)
from zeromon.readout.remedy import remedy_text
from zeromon.readout.text import finding_text, roughly, run_state
from zeromon.readout.verdict import Health, verdict
from zeromon.ring.codes import TextEnum
from zeromon.snapshot import Finding, RunSnapshot
from zeromon.units import human_count, printable

_HOUR_SECONDS = 3600.0
_LONGEST, _MOST_LINES = 400, 12
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


def problems(run: RunSnapshot) -> dict[Situation, Problem]:
    """The problems of *run* that a person must know now; of an ended run its death only."""
    judged = verdict(run)
    critical = [f for f in run.findings if f.severity == Severity.CRITICAL]
    said = [f for f in critical if finding_text(f) == judged.cause] or critical
    worst = Problem(judged.health, judged.cause, said[0] if said else None)
    found: dict[Situation, Problem] = {}
    if judged.health in (Health.DYING, Health.DEAD):
        return {Situation.DEATH: worst}
    if run.ended:
        return found
    if judged.severity is Severity.CRITICAL:
        died = next((f for f in critical if f.rule == "rank_died"), None)
        if died is not None:  # on another node
            found[Situation.DEATH] = Problem(Health.DYING, finding_text(died), died)
        else:
            stalled = judged.health is Health.STALLED
            found[Situation.STALL if stalled else Situation.RISK] = worst
    for late in run.findings:
        if late.rule == "straggler" and late.severity == Severity.WARNING:
            found[Situation.STRAGGLER] = Problem(Health.SLOW, finding_text(late), late)
            break
    return found


@dataclass(slots=True)
class _Standing:
    """One situation: since when it is there, and what was told of it; in seconds of the snapshots."""

    since: float | None = None
    seen: float = 0.0
    told: float | None = None
    """When the last message went out."""
    is_open: bool = False
    """True if it was reported, and its end was not."""

    def due(self, situation: Situation, *, ended: bool) -> float:
        """When its next message goes out: the longer it stands, the later."""
        since = self.seen if self.since is None else self.since
        if self.is_open and self.told is not None:
            return math.inf if ended else self.told + max(ALERT_AGAIN_SECONDS, self.told - since)
        if situation is Situation.DEATH:
            return since + (0.0 if ended else ALERT_SECONDS)
        late = situation is Situation.STRAGGLER
        first = since + (ALERT_PATIENCE_SECONDS if late else ALERT_SECONDS)
        return first if self.told is None else max(first, self.told + ALERT_AGAIN_SECONDS)


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
        told = {str(s): asdict(one) for s, one in self._standing.items() if one.told is not None}
        return {"attempt": self._attempt, "sent": self._sent, "standing": told}

    def observe(self, run: RunSnapshot) -> list[Message]:
        """The messages that *run* gives now; none on a node that does not lead the run."""
        if not leads(run):
            return []
        found = problems(run)
        restarted = self._restarted(run)
        return [*restarted, *self._found(run, found), *self._gone(run, found)]

    def _restarted(self, run: RunSnapshot) -> Iterator[Message]:
        """A death that was over before it could be told."""
        before, self._attempt = self._attempt, run.attempt
        death = self._standing[Situation.DEATH]
        said = next((finding for finding in run.findings if finding.rule == "restarted"), None)
        if before is None or run.attempt <= before or death.is_open or said is None:
            return
        death.since = death.seen = run.taken_ns / 1e9
        yield from self._tell(run, Situation.DEATH, Problem("restarted", said.text))

    def _found(self, run: RunSnapshot, found: Mapping[Situation, Problem]) -> Iterator[Message]:
        now = run.taken_ns / 1e9
        for situation, problem in found.items():
            one = self._standing[situation]
            one.since = now if one.since is None else one.since
            one.seen = now
            if now >= one.due(situation, ended=run.ended):
                yield from self._tell(run, situation, problem)

    def _gone(self, run: RunSnapshot, found: Mapping[Situation, Problem]) -> Iterator[Message]:
        now, over = run.taken_ns / 1e9, []
        for situation in [s for s in Situation if s not in found]:
            one = self._standing[situation]
            if Situation.DEATH in found:
                one.is_open, one.since = False, None  # nothing else matters any more
            elif not one.is_open:
                one.since = None
            elif any(_RANK[other] < _RANK[situation] for other in found) and not run.ended:
                one.seen = now  # a worse one hides it
            elif run.ended or now - one.seen >= ALERT_OVER_SECONDS:
                over.append(situation)
        if over and self._may_send(run):
            yield self._over(run, over)

    def _tell(self, run: RunSnapshot, situation: Situation, problem: Problem) -> Iterator[Message]:
        """A message about *problem*, unless this hour has had its share."""
        if not self._may_send(run):
            return
        one, now = self._standing[situation], run.taken_ns / 1e9
        still = "still " if one.is_open else ""
        one.is_open, one.told = True, now
        tone = Tone.WARNING if situation is Situation.STRAGGLER else Tone.FAILURE
        since = now if one.since is None else one.since
        lines = (*_of_problem(problem), *self._where(run, since), *self._last_words(run))
        yield message(tone, f"{still}{problem.word}: {run.run}", lines)

    def _over(self, run: RunSnapshot, over: list[Situation]) -> Message:
        now, judged = run.taken_ns / 1e9, verdict(run)
        since = min(self._standing[s].since or now for s in over)
        for situation in over:
            one = self._standing[situation]
            one.is_open, one.since, one.told = False, None, now
        wrong = run.ended and judged.severity is Severity.CRITICAL
        state = judged.text if run.ended else run_state(run)
        what = "" if wrong else f"{', '.join(over)}: over after {roughly(now - since)}"
        word = judged.health if run.ended else "over"
        lines = (state, what, *self._where(run, since), *self._last_words(run))
        return message(Tone.FAILURE if wrong else Tone.SUCCESS, f"{word}: {run.run}", lines)

    def _may_send(self, run: RunSnapshot) -> bool:
        """Returns whether a message may go out; counts it."""
        now = run.taken_ns / 1e9
        self._sent = [at for at in self._sent if now - at < _HOUR_SECONDS]
        if len(self._sent) >= ALERTS_AN_HOUR and not run.ended:
            return False
        self._sent.append(now)
        return True

    def _last_words(self, run: RunSnapshot) -> tuple[str, ...]:
        if len(self._sent) != ALERTS_AN_HOUR or run.ended:
            return ()
        until = _clock(run, self._sent[0] + _HOUR_SECONDS)
        return (f"{ALERTS_AN_HOUR} messages in an hour: the next ones are withheld until {until}",)

    def _where(self, run: RunSnapshot, since: float) -> Iterator[str]:
        nodes = f" and {len(run.nodes) - 1} more" if len(run.nodes) > 1 else ""
        step = max((rank.step for rank in run.ranks), default=0)
        yield f"node {run.node}{nodes}, step {human_count(step)}, since {_clock(run, since)}"
        yield f"look at it with: zeromon {'report' if run.ended else 'attach'} {run.run}"


def leads(run: RunSnapshot) -> bool:
    """Returns whether this node's snapshot speaks for *run*: that of the leader, or of rank 0."""
    return run.nodes[0].here if run.nodes else any(rank.rank == 0 for rank in run.ranks)


def message(tone: Tone, title: str, lines: tuple[str, ...]) -> Message:
    """A message of *lines* in which no name of a run is a mention, a link, or a line of its own."""
    return Message(tone, harmless(title), "\n".join(harmless(line) for line in lines if line))


def harmless(text: str) -> str:
    """*text* as one short line that no service takes for a mention, a link or a block of code."""
    text = printable(text)
    for mark in _MARKUP:
        text = text.replace(mark, mark[0] + _WORD_JOINER + mark[1:])
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."


def _of_problem(problem: Problem) -> Iterator[str]:
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
        yield from (line.text for line in change.diff[:_MOST_LINES])
        if len(change.diff) > _MOST_LINES:
            yield f"... zeromon rule {finding.code}"
        yield change.outlook


def _clock(run: RunSnapshot, seconds: float) -> str:
    """``18:02:11 UTC``: the wall clock at *seconds* of the snapshots."""
    taken = datetime.fromtimestamp(run.taken_wall, timezone.utc)
    at = taken + timedelta(seconds=seconds - run.taken_ns / 1e9)
    return f"{at:%Y-%m-%d %H:%M:%S} UTC"
