"""The ledger of a job (every second of all ranks and attempts, in one cause) and its energy. Pure."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from statistics import fmean
from typing import Any

from zeromon.fold.ledger import lose
from zeromon.readout.breakdown import loading_text
from zeromon.readout.throughput import own_part
from zeromon.ring.events import Phase
from zeromon.snapshot import RankSnapshot, RunSnapshot
from zeromon.snapshot.ledger import Cause, LedgerRow, added
from zeromon.units import (
    human_bytes,
    human_count,
    human_energy,
    human_ratio,
    human_seconds,
    printable,
)

USEFUL = frozenset((Cause.COMPUTE, Cause.OFFLOAD, Cause.GENERATION))
"""Causes in goodput: forwards, backwards, optimizers, rollouts of steps that were not taken again."""

NAMES = {cause: str(cause).replace("_", " ") for cause in Cause} | {
    Cause.EXPOSED: "exposed communication",
    Cause.COMPILE: "compilation",
    Cause.SET_UP: "set-up",
    Cause.SHUT_DOWN: "shut-down",
    Cause.DEAD: "dead time",
    Cause.LOST: "work lost",
}
"""The causes for people."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobLedger:
    """The seconds of all ranks of a job; the rows sum to :attr:`rank_seconds`."""

    rows: tuple[LedgerRow, ...]
    rank_seconds: float
    attempts: int
    notes: tuple[str, ...]
    """The facts that are not known, and why."""
    unit: str = ""
    """The unit that the job trains on: ``tokens``, else ``samples``; "" where neither is known."""
    per_second: float = 0.0
    """Tokens or samples in a useful second of a rank, in the last attempt."""

    @property
    def goodput(self) -> float | None:
        """The useful share of all seconds; None without any."""
        useful = sum(row.seconds for row in self.rows if row.cause in USEFUL)
        return useful / self.rank_seconds if self.rank_seconds > 0 else None

    def share(self, row: LedgerRow) -> float:
        """The share of *row* in all seconds."""
        return row.seconds / self.rank_seconds

    @property
    def unit_note(self) -> str:
        """The meaning of the column of tokens, or why there is none."""
        if not self.unit:
            return "tokens n/a: no batch of the last attempt is known"
        rate = f"{self.per_second:,.4g} {self.unit} in a useful second of a rank"
        return f"{self.unit}: what the seconds of a cause would have trained, at {rate}"


def job_ledger(runs: Sequence[RunSnapshot]) -> JobLedger:
    """The ledger of one job: the runs that were submitted one after another, in any order."""
    ordered = sorted(runs, key=lambda run: run.started_wall)
    rows: list[LedgerRow] = []
    for run, after in zip_longest(ordered, ordered[1:]):
        for attempt in run.attempts:
            rows += attempt.ledger
        lost = unsaved_steps(run) if after is None else lost_steps(run, after)
        for rank in run.ranks:
            rows += lose(rank.ledger, rank.recent, lost or 0)
        if after is not None:
            dead = max(0.0, after.started_wall - run.taken_wall) * len(after.ranks)
            rows.append(LedgerRow(cause=Cause.DEAD, seconds=dead))
    whole = added(rows)
    return JobLedger(
        rows=whole,
        rank_seconds=sum(row.seconds for row in whole),
        attempts=sum(1 + sum(not one.finished for one in run.attempts) for run in ordered),
        notes=tuple(dict.fromkeys(_notes(ordered))),
        **_work(ordered[-1].ranks if ordered else ()),
    )


def _work(ranks: Sequence[RankSnapshot]) -> dict[str, Any]:
    """The unit and the rate of a ledger: tokens of *ranks* over their useful seconds."""
    for unit in ("tokens", "samples"):
        known = [(rank, part) for rank in ranks if (part := own_part(rank, unit)) is not None]
        useful = sum(row.seconds for rank, _ in known for row in rank.ledger if row.cause in USEFUL)
        if useful > 0:
            return {"unit": unit, "per_second": sum(part for _, part in known) / useful}
    return {}


def unsaved_steps(run: RunSnapshot) -> int:
    """The last steps of *run* that no checkpoint has kept; 0 while it lives and where no rank failed."""
    found = checkpoints(run)
    if found is None or not run.ended or not any(rank.failed for rank in run.ranks):
        return 0
    return found.unsaved_steps or 0


def lost_steps(run: RunSnapshot, after: RunSnapshot) -> int | None:
    """The last steps of *run* that the run *after* it took again; None where steps are not counted."""
    resumed = (after.attempts[0].resumed_step if after.attempts else None) or max(
        (rank.resumed_step for rank in after.ranks if rank.resumed_step is not None), default=None
    )
    steps = max((rank.steps for rank in run.ranks), default=0)
    before = max((rank.resumed_step or 0 for rank in run.ranks), default=0)
    return None if resumed is None else max(0, before + steps - resumed)


def _notes(runs: Sequence[RunSnapshot]) -> Iterable[str]:
    again = (
        "steps that were taken again after a restart are not known: the optimizer keeps no count of"
        " its steps that the agent can read"
    )
    for run, after in zip_longest(runs, runs[1:]):
        ranks = run.ranks
        if any(rank.joined for rank in ranks):
            yield "the agent was attached to a live process: what was before is not known"
        if ranks and all(rank.exposed_ratio is None and rank.steps for rank in ranks):
            yield "communication was not timed: compute contains what was exposed"
        if any(attempt.lost_steps is None for attempt in run.attempts):
            yield again
        if after is not None and lost_steps(run, after) is None:
            yield again


def cause_text(row: LedgerRow) -> str:
    """``exposed communication of tp``, ``waiting for rank 3``."""
    name = NAMES[row.cause]
    if not row.of:
        return name
    return f"{name}{_JOINED.get(row.cause, ' of ')}{row.of}"


_JOINED = {Cause.WAITING: " for ", Cause.HANG: ", waiting for ", Cause.SET_UP: ": "}


def startup_parts_text(rank: RankSnapshot) -> str:
    """The parts of the time before the first step: ``imports 4 s, script 3 s``; "" where unknown."""
    names = {str(cause): name for cause, name in NAMES.items()}
    return ", ".join(
        f"{names.get(part, part)} {human_seconds(seconds)}"
        for part, seconds in rank.startup_parts.items()
        if part and seconds >= _LEAST_PART * (rank.startup_seconds or 0.0)
    )


_LEAST_PART = 0.01
"""A shorter part of the start-up is not named."""


def activity_texts(run: RunSnapshot) -> list[str]:
    """The activities of the loops beside training: how often, for how long, and how fast."""
    found: dict[tuple[str, str, bool], tuple[float, ...]] = {}
    for rank in run.ranks:
        for row in rank.activities:
            if row.phase == Phase.OTHER.label:
                continue  # a part of the set-up
            key = (row.phase, row.activity, row.background)
            amounts = (row.count, row.seconds, row.longest_seconds, row.nbytes)
            found[key] = tuple(map(max, found.get(key, amounts), amounts))
    lines = []
    for (phase, activity, background), (count, seconds, longest, nbytes) in found.items():
        name = " ".join(filter(None, (phase.replace("_", " "), activity.replace("_", " "))))
        text = f"{name}{' in the background' if background else ''}: {human_count(count)}"
        text += f", {human_seconds(seconds)} in all, {human_seconds(longest)} the longest"
        if nbytes and seconds:
            text += f", {human_bytes(nbytes)} at {human_bytes(round(nbytes / seconds))}/s a rank"
        lines.append(text)
    slowest = sorted(run.ranks, key=lambda r: -r.loading.fetch_seconds if r.loading else 0.0)[:1]
    return [*lines, *filter(None, map(loading_text, slowest)), *compiled_texts(run)]


def compiled_texts(run: RunSnapshot) -> list[str]:
    """Counts of torch.compile on the rank that compiled most, as text; [] where nothing was compiled."""
    every = [rank.compiled for rank in run.ranks if rank.compiled]
    most = max(every, key=lambda one: one.get("frames", 0), default=None)
    if most is None:
        return []
    parts = [f"torch.compile: {human_count(most.get('frames', 0))} frames compiled"]
    for count, what, reasons in (
        (most.get("graph_breaks"), "graph breaks", most.get("break_reasons")),
        (most.get("recompiles"), "recompilations", most.get("recompile_reasons")),
    ):
        why = f" ({'; '.join(map(printable, reasons))})" if reasons else ""
        parts.append(f"{human_count(count or 0)} {what}{why}")
    return [", ".join(parts)]


def headline(ledger: JobLedger) -> str:
    """``goodput 61 % of 3 h 12 min of ranks in 2 attempts``."""
    goodput = human_ratio(ledger.goodput)
    many = f" in {ledger.attempts} attempts" if ledger.attempts > 1 else ""
    return f"goodput {goodput} of {human_seconds(ledger.rank_seconds)} of ranks{many}"


def checkpoint_bytes(rank: RankSnapshot) -> list[tuple[tuple[str], float]]:
    """The bytes that were saved and loaded, where they are known."""
    rows = [row for row in rank.activities if row.activity in ("save", "load")]
    found = {
        row.activity: sum(r.nbytes for r in rows if r.activity == row.activity) for row in rows
    }
    return [((activity,), nbytes) for activity, nbytes in found.items() if nbytes]


def energy_text(run: RunSnapshot) -> str:
    """The energy that the run's node has used since the run was watched, or why that is unknown.

    "" from a Prometheus, where no collector has looked.
    """
    used = run.energy
    if used is None:
        return ""
    counted = (used.device_joules, "devices"), (used.host_joules, "processors and DRAM")
    known = [f"{human_energy(joules)} by {what}" for joules, what in counted if joules is not None]
    missing = f"of processors n/a: {used.host_note}" if used.host_note else ""
    if not known:
        return f"n/a: no device has a counter; {missing or 'of processors n/a'}"
    text = f"{', '.join(known)} of {run.node} in {human_seconds(used.seconds)}"
    watts, cost = mean_watts(run), joules_per_unit(run)
    if watts is not None:
        text += f", mean {human_count(watts)} W, "
        text += (
            f"J a token n/a: {cost}" if isinstance(cost, str) else f"{cost[0]:.3g} J a {cost[1]}"
        )
    return "; ".join(filter(None, (text, missing)))


def mean_watts(run: RunSnapshot) -> float | None:
    """Returns the mean power of the run's node, of what counts it; None where unknown."""
    used = run.energy
    known = [] if used is None else [used.device_joules, used.host_joules]
    joules = [each for each in known if each is not None]
    return sum(joules) / used.seconds if used is not None and joules and used.seconds else None


def joules_per_unit(run: RunSnapshot) -> tuple[float, str] | str:
    """Joules a ``token``, else a ``sample``, or why they are unknown.

    The mean power of the node for as long as its ranks live, over what they trained in that time.
    """
    watts = mean_watts(run)
    if watts is None:
        return "no counter of energy is known"
    for unit in ("token", "sample"):
        parts = [own_part(rank, f"{unit}s") for rank in run.ranks]
        known = [part for part in parts if part is not None]
        if known and len(known) == len(parts):
            lived = fmean(sum(row.seconds for row in rank.ledger) for rank in run.ranks)
            return watts * lived / sum(known), unit
    return "no batch is known of some rank"


# ---- checkpoints of a run -----------------------------------------------------------------------

_BESIDE = (Cause.SET_UP, Cause.SHUT_DOWN, Cause.DEAD)
"""Before the first step and after the last one."""
DEVICE_HOURS = 50_000
"""Assumed hours of a device between two failures that end a job: 419 in 54 days on 16,384 devices
(Grattafiori et al. 2024, arXiv 2407.21783, section 3.3.4). Cheaper machines fail more often."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoints:
    """The checkpoints of the ranks that save; of all ranks where none was seen to save."""

    count: int
    """In this attempt; 0: none was seen."""
    cost_seconds: float | None
    """For which the training thread stands still for one; None without any."""
    share: float | None
    """Their share of the time since the first step."""
    age_seconds: float | None
    """Since the end of the last one."""
    unsaved_seconds: float
    """Steps that a death would lose."""
    unsaved_steps: int | None
    interval_seconds: float | None
    """The mean time from one to the next."""
    failure_seconds: float
    """The mean time between failures: of this run, or assumed."""
    measured: bool
    """True if :attr:`failure_seconds` is of this run."""

    @property
    def best_seconds(self) -> float | None:
        """Young's interval."""
        cost = self.cost_seconds
        return math.sqrt(2 * cost * self.failure_seconds) if cost else None


def checkpoints(run: RunSnapshot) -> Checkpoints | None:
    """Returns what is known of the checkpoints of *run*; None before the first step."""
    stepped = [rank for rank in run.ranks if rank.unsaved_seconds is not None]
    if not stepped:
        return None
    savers = [rank for rank in stepped if rank.checkpoints]
    rank = max(savers or stepped, key=lambda one: one.unsaved_seconds or 0.0)
    # the training thread does not wait for a save in the background
    rows = [row for row in rank.activities if row.activity == "save" and not row.background]
    count = rank.checkpoints
    spent = sum(row.seconds for row in rows)
    trained = sum(row.seconds for row in rank.ledger if row.cause not in _BESIDE)
    is_known = bool(rows and count)
    failures = sum(not one.finished for one in run.attempts)
    lasted = run.taken_wall - min((one.started_wall for one in run.attempts), default=0.0)
    assumed = DEVICE_HOURS * 3600 / max(1, rank.world_size)
    return Checkpoints(
        count=count,
        cost_seconds=spent / count if is_known else None,
        share=spent / trained if is_known and trained else None,
        age_seconds=(run.taken_ns - max(row.last_ns for row in rows)) / 1e9 if is_known else None,
        unsaved_seconds=rank.unsaved_seconds or 0.0,
        unsaved_steps=rank.unsaved_steps,
        interval_seconds=trained / count if is_known and trained else None,
        failure_seconds=lasted / failures if failures else assumed,
        measured=failures > 0,
    )


def checkpoint_text(run: RunSnapshot) -> str:
    """Age and cost of the checkpoints, and what a death loses; "" where there is nothing to say."""
    found = checkpoints(run)
    if found is None:
        return ""
    parts = []
    if found.cost_seconds is not None and found.age_seconds is not None:
        share = f" ({human_ratio(found.share)} of the time)" if found.share is not None else ""
        parts = [
            f"checkpoints: {human_count(found.count)}, {human_seconds(found.cost_seconds)} each{share}",
            f"the last one {human_seconds(max(0.0, found.age_seconds))} ago",
        ]
    if not run.ended:
        parts.append(f"at risk: {unsaved_text(found)}")
    elif any(rank.failed for rank in run.ranks):  # its seconds are a row of the ledger
        steps = human_count(found.unsaved_steps)
        parts.append(f"steps lost: {steps}, since {_saved(found)}")
    return "; ".join(parts)


def unsaved_text(found: Checkpoints) -> str:
    """``11 min 2 s of steps (812) since the last checkpoint``."""
    many = f" ({human_count(found.unsaved_steps)})" if found.unsaved_steps is not None else ""
    return f"{human_seconds(found.unsaved_seconds)} of steps{many} since {_saved(found)}"


def _saved(found: Checkpoints) -> str:
    return "the last checkpoint" if found.count else "the first step, and no checkpoint was seen"
