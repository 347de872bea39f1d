"""The ledger of a job (every second of all ranks and attempts, in one cause) and its energy. Pure."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from statistics import fmean
from typing import Any

from zeromon.base.units import (
    counted,
    human_bytes,
    human_count,
    human_energy,
    human_ratio,
    human_seconds,
    printable,
)
from zeromon.fold.ledger import with_lost_steps
from zeromon.readout.breakdown import loading_text
from zeromon.readout.throughput import own_part
from zeromon.ring.codes import Phase
from zeromon.snapshot import RankSnapshot, RunSnapshot
from zeromon.snapshot.ledger import Cause, LedgerRow, sum_by_cause

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


def job_ledger(runs: Sequence[RunSnapshot]) -> JobLedger:
    """The ledger of one job: the runs that were submitted one after another, in any order."""
    ordered = sorted(runs, key=lambda run: run.started_wall)
    rows: list[LedgerRow] = []
    for run, later in zip_longest(ordered, ordered[1:]):
        for attempt in run.attempts:
            rows += attempt.ledger
        lost = unsaved_steps(run) if later is None else lost_steps(run, later)
        for rank in run.ranks:
            rows += with_lost_steps(rank.ledger.rows, rank.steps.recent, lost or 0)
        if later is not None:
            dead_seconds = max(0.0, later.started_wall - run.taken_wall) * len(later.ranks)
            rows.append(LedgerRow(cause=Cause.DEAD, seconds=dead_seconds))
    totals = sum_by_cause(rows)
    return JobLedger(
        rows=totals,
        rank_seconds=sum(row.seconds for row in totals),
        attempts=sum(1 + sum(not attempt.finished for attempt in run.attempts) for run in ordered),
        notes=tuple(dict.fromkeys(_notes_on_unknowns(ordered))),
        **_useful_work_rate(ordered[-1].ranks if ordered else ()),
    )


def _useful_work_rate(ranks: Sequence[RankSnapshot]) -> dict[str, Any]:
    """The unit and the rate of a ledger: tokens of *ranks* over their useful seconds."""
    for unit in ("tokens", "samples"):
        pairs = [(rank, share) for rank in ranks if (share := own_part(rank, unit)) is not None]
        useful = sum(row.seconds for rank, _ in pairs for row in rank.ledger.rows if row.cause in USEFUL)
        if useful > 0:
            return {"unit": unit, "per_second": sum(share for _, share in pairs) / useful}
    return {}


def unsaved_steps(run: RunSnapshot) -> int:
    """The last steps of *run* that no checkpoint has kept; 0 while it lives and where no rank failed."""
    saves = checkpoints_of(run)
    if saves is None or not run.ended or not any(rank.status.failed for rank in run.ranks):
        return 0
    return saves.unsaved_steps or 0


def lost_steps(run: RunSnapshot, later: RunSnapshot) -> int | None:
    """The last steps of *run* that the run *later* took again; None where steps are not counted."""
    resumed = later.attempts[0].resumed_step if later.attempts else None
    if resumed is None:
        resumed_steps = (rank.ledger.resumed_step for rank in later.ranks)
        resumed = max((step for step in resumed_steps if step is not None), default=None)
    steps = max((rank.steps.watched_steps for rank in run.ranks), default=0)
    start = max((rank.ledger.resumed_step or 0 for rank in run.ranks), default=0)
    return None if resumed is None else max(0, start + steps - resumed)


def _notes_on_unknowns(runs: Sequence[RunSnapshot]) -> Iterable[str]:
    uncounted = (
        "steps that were taken again after a restart are not known: the optimizer keeps no count of"
        " its steps that the agent can read"
    )
    for run, later in zip_longest(runs, runs[1:]):
        ranks = run.ranks
        if any(rank.status.joined for rank in ranks):
            yield "the agent was attached to a live process: earlier activity is unknown"
        if ranks and all(
            rank.communication.exposed_ratio is None and rank.steps.watched_steps for rank in ranks
        ):
            yield "communication was not timed: compute contains what was exposed"
        if any(attempt.lost_steps is None for attempt in run.attempts):
            yield uncounted
        if later is not None and lost_steps(run, later) is None:
            yield uncounted


def cause_text(row: LedgerRow) -> str:
    """``exposed communication of tp``, ``waiting for rank 3``."""
    name = NAMES[row.cause]
    if not row.of:
        return name
    return f"{name}{_JOINED.get(row.cause, ' of ')}{row.of}"


def cause_seconds(job: JobLedger, *, is_short: bool = False) -> dict[str, float]:
    """Seconds by cause; *is_short*: the parts of set-up together, and what is below 1 % in one row."""
    totals: dict[str, float] = {}
    for row in job.rows:
        is_part = is_short and row.cause is Cause.SET_UP
        name = NAMES[row.cause] if is_part else cause_text(row)
        totals[name] = totals.get(name, 0.0) + row.seconds
    small = [name for name, seconds in totals.items() if seconds < _MIN_PART * job.rank_seconds]
    if is_short and len(small) > 1:
        totals[f"{len(small)} causes below 1 %"] = sum(map(totals.pop, small))
    return totals


_JOINED = {Cause.WAITING: " for ", Cause.HANG: ", waiting for ", Cause.SET_UP: ": "}


def startup_parts_text(rank: RankSnapshot) -> str:
    """The parts of the time before the first step: ``imports 4 s, script 3 s``; "" where unknown."""
    names = {str(cause): name for cause, name in NAMES.items()}
    return ", ".join(
        f"{names.get(stage, stage)} {human_seconds(seconds)}"
        for stage, seconds in rank.ledger.startup_parts.items()
        if stage and seconds >= _MIN_PART * (rank.ledger.startup_seconds or 0.0)
    )


_MIN_PART = 0.01
"""A shorter part of the start-up, or of a ledger in a report, is not named."""


def activity_texts(run: RunSnapshot) -> list[str]:
    """The activities of the loops beside training: how often, for how long, and how fast."""
    totals: dict[tuple[str, str, bool], tuple[float, ...]] = {}
    for rank in run.ranks:
        for row in rank.ledger.activities:
            if row.phase == Phase.OTHER.label:
                continue  # a part of the set-up
            key = (row.phase, row.activity, row.background)
            amounts = (row.count, row.seconds, row.longest_seconds, row.nbytes)
            # The maximum, because all ranks save at once: a sum would count one checkpoint per rank
            totals[key] = tuple(map(max, totals.get(key, amounts), amounts))
    sentences = []
    for (phase, activity, background), (count, seconds, longest, nbytes) in totals.items():
        name = " ".join(filter(None, (phase.replace("_", " "), activity.replace("_", " "))))
        phrase = f"{name}{' in the background' if background else ''}: {counted(count, 'time')}"
        phrase += f", total {human_seconds(seconds)}"
        phrase += f", max {human_seconds(longest)}"
        if nbytes and seconds:
            phrase += f", {human_bytes(nbytes)} at {human_bytes(round(nbytes / seconds))}/s a rank"
        sentences.append(phrase)
    slowest = sorted(
        run.ranks, key=lambda r: -r.training.loading.fetch_seconds if r.training.loading else 0.0
    )[:1]
    return [*sentences, *filter(None, map(loading_text, slowest)), *compiled_texts(run)]


def compiled_texts(run: RunSnapshot) -> list[str]:
    """Counts of torch.compile on the rank that compiled most, as text; [] where nothing was compiled."""
    every = [rank.config.compiled for rank in run.ranks if rank.config.compiled]
    busiest = max(every, key=lambda counters: counters.get("frames", 0), default=None)
    if busiest is None:
        return []
    phrases = [f"torch.compile: {human_count(busiest.get('frames', 0))} frames compiled"]
    for count, event, reasons in (
        (busiest.get("graph_breaks"), "graph breaks", busiest.get("break_reasons")),
        (busiest.get("recompiles"), "recompilations", busiest.get("recompile_reasons")),
    ):
        because = f" ({'; '.join(map(printable, reasons))})" if reasons else ""
        phrases.append(f"{human_count(count or 0)} {event}{because}")
    return [", ".join(phrases)]


def goodput_headline(ledger: JobLedger) -> str:
    """``goodput 61 % of 3 h 12 min total rank time in 2 attempts``."""
    goodput = human_ratio(ledger.goodput)
    attempts = f" in {ledger.attempts} attempts" if ledger.attempts > 1 else ""
    return f"goodput {goodput} of {human_seconds(ledger.rank_seconds)} total rank time{attempts}"


def checkpoint_bytes(rank: RankSnapshot) -> list[tuple[tuple[str], float]]:
    """The bytes that were saved and loaded, where they are known."""
    rows = [row for row in rank.ledger.activities if row.activity in ("save", "load")]
    totals = {row.activity: sum(r.nbytes for r in rows if r.activity == row.activity) for row in rows}
    return [((activity,), nbytes) for activity, nbytes in totals.items() if nbytes]


def energy_text(run: RunSnapshot) -> str:
    """The energy that the run's node has used since the run was watched, or why that is unknown.

    "" from a Prometheus, where no collector has looked.
    """
    used = run.energy
    if used is None:
        return ""
    counted = (used.device_joules, "devices"), (used.host_joules, "processors and DRAM")
    uses = [f"{human_energy(joules)} by {meter}" for joules, meter in counted if joules is not None]
    missing = f"CPU n/a: {used.host_note}" if used.host_note else ""
    if not uses:
        return f"n/a: no device energy counter; {missing or 'CPU n/a'}"
    phrase = f"{', '.join(uses)} of {run.node} in {human_seconds(used.seconds)}"
    watts, cost = mean_watts(run), joules_per_unit(run)
    if watts is not None:
        phrase += f", mean {human_count(watts)} W, "
        phrase += f"J/token n/a: {cost}" if isinstance(cost, str) else f"{cost[0]:.3g} J/{cost[1]}"
    return "; ".join(filter(None, (phrase, missing)))


def mean_watts(run: RunSnapshot) -> float | None:
    """Returns the mean power of the run's node, of what counts it; None where unknown."""
    used = run.energy
    counters = [] if used is None else [used.device_joules, used.host_joules]
    joules = [amount for amount in counters if amount is not None]
    return sum(joules) / used.seconds if used is not None and joules and used.seconds else None


def joules_per_unit(run: RunSnapshot) -> tuple[float, str] | str:
    """Joules a ``token``, else a ``sample``, or why they are unknown.

    The mean power of the node for as long as its ranks live, over what they trained in that time.
    """
    watts = mean_watts(run)
    if watts is None:
        return "no counter of energy is known"
    for unit in ("token", "sample"):
        shares = [own_part(rank, f"{unit}s") for rank in run.ranks]
        counted = [share for share in shares if share is not None]
        if counted and len(counted) == len(shares):
            lifetime = fmean(sum(row.seconds for row in rank.ledger.rows) for rank in run.ranks)
            return watts * lifetime / sum(counted), unit
    return "batch size unknown for at least one rank"


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


def checkpoints_of(run: RunSnapshot) -> Checkpoints | None:
    """Returns what is known of the checkpoints of *run*; None before the first step."""
    stepped = [rank for rank in run.ranks if rank.ledger.unsaved_seconds is not None]
    if not stepped:
        return None
    savers = [rank for rank in stepped if rank.ledger.checkpoints]
    rank = max(savers or stepped, key=lambda saver: saver.ledger.unsaved_seconds or 0.0)
    # the training thread does not wait for a save in the background
    rows = [row for row in rank.ledger.activities if row.activity == "save" and not row.background]
    count = rank.ledger.checkpoints
    save_seconds = sum(row.seconds for row in rows)
    trained = sum(row.seconds for row in rank.ledger.rows if row.cause not in _BESIDE)
    is_known = bool(rows and count)
    failures = sum(not attempt.finished for attempt in run.attempts)
    lasted = run.taken_wall - min((attempt.started_wall for attempt in run.attempts), default=0.0)
    assumed = DEVICE_HOURS * 3600 / max(1, rank.world_size)
    return Checkpoints(
        count=count,
        cost_seconds=save_seconds / count if is_known else None,
        share=save_seconds / trained if is_known and trained else None,
        age_seconds=(run.taken_ns - max(row.last_ns for row in rows)) / 1e9 if is_known else None,
        unsaved_seconds=rank.ledger.unsaved_seconds or 0.0,
        unsaved_steps=rank.ledger.unsaved_steps,
        interval_seconds=trained / count if is_known and trained else None,
        failure_seconds=lasted / failures if failures else assumed,
        measured=failures > 0,
    )


def checkpoint_text(run: RunSnapshot) -> str:
    """Age and cost of the checkpoints, and what a death loses; "" where there is nothing to say."""
    saves = checkpoints_of(run)
    if saves is None:
        return ""
    phrases = []
    if saves.cost_seconds is not None and saves.age_seconds is not None:
        share = f" ({human_ratio(saves.share)} of the time)" if saves.share is not None else ""
        phrases = [
            f"checkpoints: {human_count(saves.count)}, {human_seconds(saves.cost_seconds)} each{share}",
            f"the last one {human_seconds(max(0.0, saves.age_seconds))} ago",
        ]
    if not run.ended:
        phrases.append(f"at risk: {unsaved_text(saves)}")
    elif any(rank.status.failed for rank in run.ranks):  # its seconds are a row of the ledger
        steps = human_count(saves.unsaved_steps)
        phrases.append(f"steps lost: {steps}, since {_last_save_text(saves)}")
    return "; ".join(phrases)


def unsaved_text(saves: Checkpoints) -> str:
    """``11 min 2 s of steps (812) since the last checkpoint``."""
    count = f" ({human_count(saves.unsaved_steps)})" if saves.unsaved_steps is not None else ""
    return f"{human_seconds(saves.unsaved_seconds)} of steps{count} since {_last_save_text(saves)}"


def _last_save_text(saves: Checkpoints) -> str:
    return "the last checkpoint" if saves.count else "the first step, and no checkpoint was seen"
