"""Judges what zeromon said of a drawn case: right, partly, silent or wrong. Pure.

A line is right if it names the cause and, where the fault befalls one rank, that rank. It is partly
right with one of the two, silent with neither, and wrong if it accuses another rank, or calls a run
well that is not. Live that is the verdict's first line while the fault lasts, afterwards the first two
lines of the report.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from drawn_faults import ALL_RANKS, FAULTS, Case

RANKS = 2
FLIP_SECONDS = 5.0
"""A verdict that changes and is back within so long has flipped."""
MAX_STEPS_EARLY = 3
MAX_STEPS_LATE = 15
"""How far "since step N" may be from the truth."""


class Mark(str, Enum):
    """How right a line is."""

    RIGHT = "right"
    PARTLY = "partly"
    SILENT = "silent"
    WRONG = "wrong"
    UNSEEN = "unseen"
    """No line was read while the fault lasted; not in the score."""


@dataclass(frozen=True, slots=True)
class Judged:
    """A mark and why it is not a better one."""

    mark: Mark
    reason: str = ""


_RANK = r"\branks? [\d, and]*{rank}\b(?! (waits?|is waiting)\b)"
_ANY = r"\branks? \d"
"""Of two ranks whose calls differ, each can be called the one that deviates."""


@dataclass(frozen=True, slots=True)
class Expected:
    """What must be said of a kind of fault, as regular expressions without case."""

    live: str
    after: str = ""
    """Of the report; as live where empty."""
    live_rank: str = _RANK
    """How the rank is named; "" where none has to be."""
    after_rank: str = ""
    """Of the report; as live where empty."""
    deadline: float = 12.0
    """Seconds from the fault to the first right line."""
    seen: float = 2.5
    """What ends sooner cannot be seen by who looks once a second at figures that are a second old."""
    begins: float = 0.0
    """Seconds after the fault from which lines count."""
    is_broken: bool = False
    """Whether "healthy" or "slow" over it is wrong and not just silent."""
    wrong: str = ""
    """What may not be said at any time."""


_LATE = r"\blate\b|others wait|wait(s|ed)? .*for (it|rank)|behind"
_MISSING = r"missing|never called|not called|not heard|hung|stuck|stalled|does not end"
_MISMATCH = r"mismatch|different (operation|collective|order)"
_DIVERGED = rf"{_MISMATCH}|never called|not called|missing|skipped|one call|ahead|behind|drift"
_LEFT = (
    r"rank {rank}\b[^;]*(left|leaves|exit|return|ended|finished|sys\.exit|gone|early)"
    r"|(left|exit|return|ended|finished|gone|early)[^;]*rank {rank}\b"
)
_ERROR = r"ValueError|label 99"
_INIT = r"init_process_group|Dist\w+Error|rendezvous|before (its|the) first step|before a rank reported"

EXPECTED = {
    "late_forward": Expected(_LATE),
    "late_backward": Expected(_LATE),
    "late_between": Expected(rf"{_LATE}|own code.* at drawn\.py:\d+"),
    "late_loader": Expected(_LATE),
    "hiccup": Expected(
        r"every \d+ steps|hiccup|paus|slow steps?|\d+ of (the )?(last )?\d+ steps", deadline=14
    ),
    "checkpoint": Expected(r"checkpoint|torch\.save|\bsav(e|es|ed|ing)\b", deadline=14),
    "stall_all": Expected(
        r"stall|no step|hung|asleep|sleep", r"stall|no step|hung", live_rank="", deadline=19,
        is_broken=True,
    ),
    "stall_loader": Expected(r"DataLoader|batch|data.?wait|loader", deadline=19, is_broken=True),
    "stall_workers": Expected(
        r"worker|DataLoader|batch|data.?wait|loader", deadline=19, is_broken=True
    ),
    "skipped": Expected(_DIVERGED, live_rank=_ANY, deadline=15, is_broken=True),
    "extra": Expected(_DIVERGED, live_rank=_ANY, deadline=15, is_broken=True),
    "size": Expected(
        r"mismatched sizes?|sizes? (differ|mismatch)", live_rank=_ANY, deadline=15, is_broken=True
    ),
    "operation": Expected(_DIVERGED, live_rank=_ANY, deadline=15, is_broken=True),
    "uneven": Expected(
        rf"{_DIVERGED}|fewer|left the loop|uneven|batches|begun no other", live_rank=_ANY, deadline=15,
        is_broken=True,
    ),
    "sleeps": Expected(_MISSING, is_broken=True, deadline=15),
    "leak": Expected(r"gr[eo]w|leak|r[ua]ns? out"),
    "leak_limited": Expected(r"gr[eo]w|leak|r[ua]ns? out|memory"),
    "exception": Expected(rf"exception|{_ERROR}", _ERROR, is_broken=True, deadline=5),
    "killed": Expected(r"SIGKILL|killed", is_broken=True, deadline=5),
    "exit_zero": Expected(_LEFT, seen=4, is_broken=True, deadline=6),
    "return_early": Expected(_LEFT, seen=4, is_broken=True),
    "nan": Expected(r"\bNaN\b|infinite|not a number"),
    "python": Expected(r"(own|script|python).*drawn\.py:\d+|drawn\.py:\d+", live_rank=""),
    "slow_start": Expected(
        r"^starting\b.*\d+(\.\d+)? ?s", r"finished", live_rank="", deadline=30,
        wrong=r"^(stalled|dead|dying|at risk)",
    ),
    "restart_recovers": Expected(
        r"^(healthy|slow|starting|restart)", r"finished[^\n]*attempt 2|attempt 2[^\n]*finished",
        live_rank="", begins=5, deadline=30, wrong=r"^(stalled|dying|dead)",
    ),
    "restart_repeats": Expected(
        r"restart|attempt 2|^starting", _ERROR, live_rank="", after_rank=_RANK
    ),
    "restart_fails": Expected(
        r"restart|attempt 2|^starting", rf"attempt 2[\s\S]*({_INIT})|({_INIT})", live_rank=""
    ),
}  # fmt: skip
"""Kind of fault -> what must be said of it. Live, a restart is no death. A rank that leaves takes a
second or two to end."""

_GREEN = re.compile(r"(?:^|verdict\s+)(healthy|slow|running|starting|finished|unknown)\b", re.I)
_GROUP = re.compile(r" ?\(ranks [^)]*\)")
"""The members of a group; naming them accuses none."""
_HANGS = re.compile(r"(?:^|verdict\s+)stalled|does not end|\bhung\b|stuck", re.I)
_STILL_RUNS = re.compile(r"^run \S+: (running|starting|stalled)\b")
_STOPPED = re.compile(r"stopped by \w+", re.I)
_ACCUSED = (
    r"rank {rank}( is| was)? late", r"rank {rank}: the others wait", r"wait(s|ed)? for rank {rank}\b",
    r"rank {rank}( is| was)? missing", r"rank {rank} (has not|never|did not) call",
    r"rank {rank}: (SIG|exception|exit|[A-Z]\w+Error)", r"rank {rank}, (SIG|exception|exit)",
    r"rank {rank} (died(?! of)|(has |had )?left|is dead|was dead|was killed|raised|exited|returned)",
    r"rank {rank} (leak|paus|sav)(s|es|ed)",
)  # fmt: skip
"""Ways to accuse a rank."""
_UNWELL = re.compile(
    r"(?:^|verdict\s+)(stalled|dying|dead|at risk)\b|\bdied\b|\blate\b|others wait .* for it"
    r"|does not end|hung\b|\bstuck\b",
    re.I,
)
"""What must not be said of a healthy run. A share of communication may be, and a lack of CPUs."""
_RARE = ("hiccup", "checkpoint")
_STEADY = re.compile(r"late by [^;]* per step|wait [^;]* a step for", re.I)
_ABOUT_ALL = re.compile(r"no CPU|waits for communication|exposed", re.I)
"""Says nothing of a fault, though it may name a rank."""
_SINCE = re.compile(r"since step ([\d,]+)")


def judge(case: Case, text: str, *, is_live: bool) -> Judged:
    """Returns how right *text* is about *case*."""
    text = _GROUP.sub("", text)
    if not is_live and (alive := _STILL_RUNS.search(text)):
        return Judged(Mark.WRONG, f"says {alive[1]!r} after the end")
    if case.is_healthy:
        unwell = _UNWELL.search(text)
        return Judged(Mark.WRONG, f"says {unwell[0]!r}") if unwell else Judged(Mark.RIGHT)
    expected = EXPECTED[case.kind]
    if accused := _accused(case, expected, text):
        return Judged(Mark.WRONG, f"accuses: {accused!r}")
    if expected.wrong and (told := re.search(expected.wrong, text, re.I)):
        return Judged(Mark.WRONG, f"says {told[0]!r}")
    cause = _pattern(case, expected.live if is_live else expected.after or expected.live)
    rank = "" if case.rank == ALL_RANKS else _pattern(case, _rank_of(expected, is_live))
    names_cause = bool(re.search(cause, text, re.I))
    names_rank = not rank or bool(re.search(rank, text, re.I))
    if names_cause and names_rank and case.kind in _RARE and _STEADY.search(text):
        return Judged(Mark.PARTLY, "told as a delay of each step")
    if names_cause and names_rank:
        return _with_step(case, text)
    if names_cause:
        return Judged(Mark.PARTLY, f"rank {case.rank} is not named")
    if expected.is_broken and _HANGS.search(text):
        return Judged(Mark.PARTLY, "hangs, without the cause")
    if expected.is_broken and is_live and _GREEN.search(text):
        return Judged(Mark.WRONG, f"{_word(text)!r} over a broken run")
    if rank and names_rank and not _ABOUT_ALL.search(text):
        return Judged(Mark.PARTLY, "cause is not named")
    if _STOPPED.search(text):
        return Judged(Mark.SILENT, "how it ended, not why")
    return Judged(Mark.SILENT, "neither cause nor rank")


def _word(text: str) -> str:
    return text.partition(":")[0]


def _rank_of(expected: Expected, is_live: bool) -> str:
    return expected.live_rank if is_live else expected.after_rank or expected.live_rank


def _pattern(case: Case, pattern: str) -> str:
    return pattern.replace("{rank}", str(case.rank))


_OF_ALL = ("stall_all", "stall_workers", "leak")


def _accused(case: Case, expected: Expected, text: str) -> str:
    """The words that accuse a rank that did nothing; "" where none are."""
    if expected.live_rank == _ANY or case.kind == "restart_fails":
        return ""  # any of them may be named; both fail to meet again
    if case.rank == ALL_RANKS and case.kind in _OF_ALL:
        return ""
    for rank in range(RANKS):
        if rank == case.rank:
            continue
        for pattern in _ACCUSED:
            accused = re.search(pattern.replace("{rank}", str(rank)), text)
            if accused:
                return accused[0]
    return ""


def _with_step(case: Case, text: str) -> Judged:
    """Right, unless the text names another step than the first that the fault touched."""
    since = _SINCE.search(text)
    if since is None or case.kind in ("leak", "leak_limited", "python", "checkpoint"):
        return Judged(Mark.RIGHT)
    step = int(since[1].replace(",", ""))
    if case.step - MAX_STEPS_EARLY <= step <= case.step + MAX_STEPS_LATE:
        return Judged(Mark.RIGHT)
    return Judged(Mark.PARTLY, f"since step {step}, true: {case.step}")


@dataclass(frozen=True, slots=True)
class Line:
    """The verdict of one reading."""

    seconds: float
    """Since the fault; negative before it."""
    text: str
    health: str = ""
    """The verdict's word; the text's where empty."""


@dataclass(frozen=True, slots=True)
class LiveJudged:
    """How right the verdict was while a fault lasted."""

    mark: Mark
    reason: str
    text: str
    """The last line, or the first that is wrong."""
    first_right: float | None
    """Seconds from the fault to the first right line."""
    stayed: bool
    """Whether all later lines were right."""


def judge_live(case: Case, lines: Sequence[Line]) -> LiveJudged:
    """Returns how right the lines since the fault are, taken together.

    Right: a right line came in time, the last line is right, and no line in between is wrong. Of a
    healthy run and of a start, every line counts.
    """
    since = -1e12 if case.is_healthy else EXPECTED[case.kind].begins
    after = [line for line in lines if line.seconds >= since]
    if not after:
        return LiveJudged(Mark.UNSEEN, "no line while it lasted", "", None, False)
    marks = [judge(case, line.text, is_live=True) for line in after]
    first = next((n for n, judged in enumerate(marks) if judged.mark is Mark.RIGHT), None)
    seconds = None if first is None else after[first].seconds
    stayed = first is not None and all(judged.mark is Mark.RIGHT for judged in marks[first:])
    worst = _first_wrong(case, lines, after, marks, first)
    if worst is not None:
        reason = marks[worst].reason
        return LiveJudged(Mark.WRONG, reason, after[worst].text, seconds, stayed)
    if first is None and not case.is_healthy and after[-1].seconds < EXPECTED[case.kind].seen:
        return LiveJudged(Mark.UNSEEN, "over before it could be seen", after[-1].text, None, False)
    if seconds is None or first is None:
        return LiveJudged(marks[-1].mark, marks[-1].reason, after[-1].text, None, False)
    if case.is_healthy:
        return LiveJudged(Mark.RIGHT, "", after[-1].text, seconds, stayed)
    deadline = EXPECTED[case.kind].deadline
    if seconds > deadline:
        reason = f"right after {seconds:.0f} s, not within {deadline:.0f} s"
        return LiveJudged(Mark.PARTLY, reason, after[first].text, seconds, stayed)
    last = first if case.kind in _PASSING else -1
    return LiveJudged(marks[last].mark, marks[last].reason, after[last].text, seconds, stayed)


_PASSING = ("slow_start", "restart_fails", "restart_repeats")
"""Kinds that are over before the run is, so that the last line is about something else."""


def _first_wrong(
    case: Case,
    lines: Sequence[Line],
    after: Sequence[Line],
    marks: Sequence[Judged],
    first_right: int | None,
) -> int | None:
    """Which line spoils the case: the first accusation, or the first wrong line after a right one.

    An accusation that was already there before the fault is a false alarm of its own.
    """
    before = [line for line in lines if line.seconds < 0 and not case.is_healthy]
    old = before[-1].text[:_SAME_LETTERS] if before else None
    for number, (line, judged) in enumerate(zip(after, marks, strict=True)):
        if judged.mark is not Mark.WRONG or line.text[:_SAME_LETTERS] == old:
            continue
        is_after = first_right is not None and number > first_right
        if case.is_healthy or is_after or judged.reason.startswith(("accuses", "says")):
            return number
    return None


_SAME_LETTERS = 12


def accusations(case: Case, lines: Sequence[Line]) -> list[str]:
    """Returns the lines before the fault that accuse a rank or call the run broken."""
    well = Case(0, "healthy", case.strategy, case.loading, 1, ALL_RANKS, case.step)
    before = [line.text for line in lines if line.seconds < 0]
    return [text for text in before if judge(well, text, is_live=True).mark is Mark.WRONG]


def flips(lines: Sequence[Line]) -> list[str]:
    """Returns the changes of the verdict's word that were taken back within 5 s: ``slow healthy``."""
    spells: list[tuple[str, float]] = []
    for line in lines:
        word = line.health or line.text.partition(":")[0]
        if not spells or spells[-1][0] != word:
            spells.append((word, line.seconds))
    return [
        f"{before[0]} -> {between[0]} -> {after[0]}"
        for before, between, after in zip(spells, spells[1:], spells[2:], strict=False)
        if before[0] == after[0] and after[1] - between[1] <= FLIP_SECONDS
    ]


def share(marks: Sequence[Mark]) -> float:
    """Returns the share of right ones, of those that were seen; 0 where none was."""
    seen = [mark for mark in marks if mark is not Mark.UNSEEN]
    return sum(mark is Mark.RIGHT for mark in seen) / len(seen) if seen else 0.0


assert set(EXPECTED) == set(FAULTS)
