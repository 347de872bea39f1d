"""A rule: one decorated function of a run, and one page with its code. Pure.

::

    @rule("ZM320")
    def loader_is_slow(run: RunSnapshot) -> Iterable[Match]:
        \"\"\"Steps wait for their batches.\"\"\"
        ...
        text = f"{human_seconds(waits)} per step wait for the next batch"
        yield Match(text, rank.rank, waits=Waits(waits / rank.step_seconds, AVOIDABLE))

The function stands in the module of its family in :mod:`zeromon.diagnosis.rules`, and the page beside
that module in ``ZM320.md``. Nothing else names the rule.
"""

import difflib
import itertools
import json
import math
import re
import statistics
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from importlib.resources import files
from typing import Any, NamedTuple

from zeromon.base.errors import RuleNotFound
from zeromon.snapshot import Finding, RankSnapshot, RunSnapshot, Severity
from zeromon.snapshot.finding import ConfigFormat, Remedy
from zeromon.snapshot.focus import is_running_out, pool_of
from zeromon.snapshot.levels import CPU_WAIT, Level

_MIB = 1 << 20
_KEYWORD = re.compile(r"\b(\w+)=(?:[A-Za-z_]+\.)?([\w.]+)")
"""A keyword argument and its value, of an enumeration the member."""


def setting_of(rank: RankSnapshot, name: str) -> str:
    """The effective value of the DeepSpeed setting whose name ends with *name*; "" where unknown."""
    return next((s.effective for s in rank.config.settings if s.name.endswith(name)), "")


def as_number(literal: str) -> float | None:
    """A number as a setting shows it; None for anything else."""
    try:
        number = float(literal)
    except ValueError:
        return None
    # float() also reads "nan" and "inf", with which every comparison of a remedy is False
    return number if math.isfinite(number) else None


class Remaining(NamedTuple):
    """The rest of a remedy, without what is set already."""

    remedy: Remedy | None
    already: tuple[str, ...]
    """Settings of the remedy that are set already, as ``name=value``."""


def remaining_remedy(remedy: Remedy, rank: RankSnapshot) -> Remaining:
    """Returns *remedy* without what *rank* has set already; None where nothing is left."""
    rows = [(row, settings_in(row, remedy.dialect)) for row in remedy.diff.splitlines()]
    old = {name: value for row, at in rows if row[:1] == "-" for name, value in at}
    new = {name for row, at in rows if row[:1] == "+" for name, _ in at}
    current = {name: _current_value(rank, remedy.dialect, name) for name in {*old, *new}}
    done: dict[str, str] = {}
    for row, at in rows:
        if row[:1] == "+" and all(_is_met(current[n], target, old.get(n, "")) for n, target in at):
            done |= {name: current[name] or "" for name, _ in at}
    # A line that removes a setting which nobody has set would advise what is already so
    absent = {name for name in old.keys() - new if current[name] == ""}
    kept_rows = [
        _with_effective(row, at, current)
        for row, at in rows
        if not at or any(name not in done and name not in absent for name, _ in at)
    ]
    already = tuple(f"{name}={value}" for name, value in done.items())
    # The remedy of ZM201 is its rungs: its diff is empty, and it is not done
    has_changes = bool(remedy.rungs) or any(row[:1] in ("+", "-") for row in kept_rows)
    return Remaining(replace(remedy, diff="\n".join(kept_rows)) if has_changes else None, already)


def settings_in(row: str, dialect: str) -> list[tuple[str, str]]:
    """Returns the settings in a line of a diff: (name, value); [] for other code."""
    # Without the cut, the words of a comment count as variables, and JSON refuses the line
    code = row[1:].partition("  #")[0].strip()
    if row[:1] not in ("+", "-"):
        return []
    if dialect == ConfigFormat.ENVIRONMENT:
        pairs = (assignment.partition("=") for assignment in code.split())
        return [(name, value) for name, _, value in pairs]
    if dialect == ConfigFormat.DEEPSPEED:
        try:
            return list(_tree_leaves(json.loads(f"{{{code}}}")))
        except ValueError:
            return []
    return _KEYWORD.findall(code)


def _tree_leaves(tree: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    for key, value in tree.items():
        if isinstance(value, dict):
            yield from _tree_leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value if isinstance(value, str) else json.dumps(value)


def _current_value(rank: RankSnapshot, dialect: str, name: str) -> str | None:
    """The value that *rank* has set; "" where it has set none, None where that is unknown."""
    if dialect == ConfigFormat.ENVIRONMENT:
        variables = rank.config.process.get("variables", {})
        # torch reads PYTORCH_CUDA_ALLOC_CONF only where PYTORCH_ALLOC_CONF is not set
        newer = variables.get(name.replace("PYTORCH_CUDA_ALLOC", "PYTORCH_ALLOC"))
        return newer or variables.get(name)
    if dialect == ConfigFormat.DEEPSPEED:
        # Without the dots, a name would match every longer word that ends with it
        values = (s.effective for s in rank.config.settings if f".{s.name}".endswith(f".{name}"))
        return next(values, "" if rank.config.settings else None)
    if dialect == ConfigFormat.DATA_LOADER:
        workers = rank.config.loader.get("num_workers")
        if name == "persistent_workers":
            return str(rank.config.loader["persistent_workers"]) if name in rank.config.loader else None
        return str(workers) if name == "num_workers" and workers is not None else None
    model = rank.config.models[0] if rank.config.models else {}
    if name == "bucket_cap_mb":
        cap = model.get("bucket_cap_bytes")
        return None if cap is None else f"{cap / _MIB:g}"
    value = model.get(name)
    return None if value is None else str(value)


def _is_met(current: str | None, target: str, old: str) -> bool:
    """Returns True if *current* is *target*, or lies beyond it as seen from *old*, which it replaces."""
    if not current:
        return False
    number, goal, from_ = as_number(current), as_number(target), as_number(old)
    if number is None or goal is None:
        # PYTORCH_CUDA_ALLOC_CONF has several options: the advised one may stand among others
        return set(target.split(",")) <= set(current.split(","))
    return number == goal or (from_ is not None and (number - goal) * (goal - from_) > 0)


def _with_effective(row: str, at: list[tuple[str, str]], current: dict[str, str | None]) -> str:
    """*row*; where it removes one DeepSpeed setting, with the value of it that is in effect."""
    if len(at) != 1 or not row.startswith(f'- "{at[0][0]}": '):
        return row
    name, value = at[0]
    live = current[name]
    return f'- "{name}": {live}' if live and not _is_met(live, value, "") else row


ANY = -1


class Waits(NamedTuple):
    """The waiting time that a finding is about, and what it is judged by."""

    share: float
    """The share of a step."""
    level: Level
    rank: int = ANY
    """Whose lack of CPUs counts. :data:`ANY`: that of every rank, because all wait for the slowest."""
    excess: bool = False
    """Only what *rank* lacks beyond the other ranks counts, because the others wait for it alone."""
    is_needless: bool = False
    """The work need not be done at all, with however many CPUs: no lack of them explains it."""
    is_work: bool = False
    """The training thread works meanwhile: a lack of CPUs makes each part of a step longer alike."""


def explained_share(run: RunSnapshot, waits: Waits) -> float:
    """Share of a step that a lack of CPUs may explain, at most all of *waits*.

    A thread that sleeps or waits for a collective is not runnable, so the kernel's time on a run queue
    is that of threads which lack a CPU: an upper bound of what the lack adds to a step. A finding is
    judged by what is left of its waiting time; ZM605 alone says how large the lack is.
    """
    if waits.is_work or waits.is_needless:
        return 0.0
    lacks = {rank.rank: cpu_lack(rank) for rank in run.ranks}
    if waits.rank == ANY:
        lack_share = max(lacks.values(), default=0.0)
    else:
        other_lacks = [lack for rank, lack in lacks.items() if rank != waits.rank]
        usual_lack = statistics.median(other_lacks) if waits.excess and other_lacks else 0.0
        lack_share = lacks.get(waits.rank, 0.0) - usual_lack
    return max(0.0, min(lack_share, waits.share))


def lacks_cpus(rank: RankSnapshot) -> bool:
    """Returns True if *rank* lacks CPUs for so much of its steps that ZM605 reports it."""
    return (
        rank.machine.pressure is not None
        and rank.machine.pressure.held_cpu_wait_ratio >= CPU_WAIT.warning
    )


def cpu_lack(rank: RankSnapshot) -> float:
    """The share of the last steps in which *rank* had no CPU, at most that of ZM605; 0 without it."""
    if rank.machine.pressure is None or not lacks_cpus(rank):
        return 0.0
    return min(rank.machine.pressure.cpu_wait_ratio, rank.machine.pressure.minute_cpu_wait_ratio)


class Match(NamedTuple):
    """One place where a rule applies."""

    text: str
    """The evidence, with the figures of this run."""
    rank: int = -1
    """-1: the whole run."""
    remedy: Remedy | None = None
    severity: Severity | None = None
    """None: that of the rule."""
    waits: Waits | None = None
    """The waiting time that the match is about: it decides the severity, less what lacks CPUs."""
    action: str = ""
    """One sentence on what to do, where no remedy says it; "": the advice of the rule's page."""


Function = Callable[[RunSnapshot], Iterable[Match]]


@dataclass(frozen=True, slots=True)
class Rule:
    """A function that looks for one problem, and what all its findings have in common."""

    code: str
    """The code of its page: ``zeromon rule CODE``."""
    severity: Severity
    """Where a match names none."""
    function: Function
    once: bool = False
    """Only the first match is reported: the others would say the same."""

    @property
    def name(self) -> str:
        """The name of the function, which is also the name on the page."""
        return self.function.__name__

    def __call__(self, run: RunSnapshot) -> Iterator[Finding]:
        """Returns the findings of this rule about *run*."""
        for match in itertools.islice(self.function(run), 1 if self.once else None):
            remedy, already = _remedy_of_match(run, match)
            # Names of processes and exceptions have lines; a finding is one sentence in every view
            evidence = " ".join(match.text.splitlines())
            severity, share = match.severity or self.severity, None
            if already:
                evidence += f"; already set: {', '.join(already)}"
            if match.waits is not None:
                share = match.waits.share - explained_share(run, match.waits)
                severity = match.waits.level.severity_of_cost(share)
            yield Finding(
                rule=self.name, code=self.code, severity=severity, rank=match.rank, text=evidence,
                remedy=remedy, share=share, action="" if remedy is not None else match.action,
            )  # fmt: skip


def _remedy_of_match(run: RunSnapshot, match: Match) -> Remaining:
    """The remedy of *match* without what its rank, or for the whole run the first one, has set.

    None where it takes more of a memory that is running out.
    """
    rank = next((r for r in run.ranks if match.rank in (r.rank, -1)), None)
    if match.remedy is None or rank is None:
        return Remaining(match.remedy, ())
    if match.remedy.takes is not None and is_running_out(run.ranks, pool_of(rank, match.remedy.takes)):
        return Remaining(None, ())
    return remaining_remedy(match.remedy, rank)


def rule(
    code: str, *, severity: Severity = Severity.INFO, once: bool = False
) -> Callable[[Function], Rule]:
    """Makes a rule of a function. *severity*: that of a match that names none and waits for nothing."""
    return lambda function: Rule(code, severity, function, once)


# ---- pages of rules and checks -------------------------------------------------------------------


class Page(NamedTuple):
    """The page of one rule or check."""

    code: str
    name: str
    text: str
    """Markdown, without the first line."""

    @property
    def summary(self) -> str:
        """The first paragraph as one line."""
        return " ".join(self.text.strip().split("\n\n")[0].split())


@cache
def all_pages() -> dict[str, Page]:
    """All pages by code."""
    by_code = {}
    for file in files("zeromon.diagnosis.rules").iterdir():
        if file.name.startswith("ZM") and file.name.endswith(".md"):
            head, _, body = file.read_text().partition("\n")
            _, code, name = head.split()
            by_code[code] = Page(code, name, body)
    return dict(sorted(by_code.items()))


def action_of(finding: Finding) -> str:
    """Returns in one line what to do about *finding*: its own action, else its page's advice, or ""."""
    if finding.action:
        return finding.action
    page = all_pages().get(finding.code)
    _, _, advice = (page.text if page is not None else "").partition("## What to change\n")
    advice = advice.partition("\n## ")[0]
    prose = re.sub(r"```\w*\n(.*?)```", _code_in_prose, advice, flags=re.DOTALL)
    return " ".join(prose.replace("`", "").split())


def _code_in_prose(block: re.Match[str]) -> str:
    """Code of one line stays in a sentence, more does not."""
    code = block[1].strip()
    return "" if "\n" in code else f"{code}."


def find_page(code_or_name: str) -> Page:
    """Returns the page with *code_or_name*; raises :class:`RuleNotFound`."""
    by_code = all_pages()
    by_name = {page.name: page for page in by_code.values()}
    match = by_code.get(code_or_name.upper()) or by_name.get(code_or_name.lower().replace("-", "_"))
    if match is None:
        near_names = difflib.get_close_matches(code_or_name, [*by_code, *by_name], n=1)
        raise RuleNotFound(
            f"there is no rule {code_or_name}{f'; did you mean {near_names[0]}?' if near_names else ''}"
        )
    return match
