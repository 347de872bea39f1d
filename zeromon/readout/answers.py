"""The four answers that every overview begins with, in their order. Pure.

How is the run, and how was it before (:func:`~zeromon.readout.verdict.judge_run`,
:func:`life_of_run`); what does a step wait for (:func:`step_bars`); what should be changed
(:func:`findings_to_act_on`); will memory run out (:func:`memory_answer`).
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from statistics import median, median_low
from typing import NamedTuple

from zeromon.base.units import counted, human_bytes, human_count, human_ratio, human_seconds
from zeromon.memory.forecast import SAFE_LEVEL
from zeromon.readout.breakdown import PART_NAMES, PARTS, WINDOW, exposed_is_known, rank_parts
from zeromon.readout.charts import charts_of, limit_of
from zeromon.readout.figures import LAST_STEPS, run_step_seconds
from zeromon.readout.ledger import USEFUL, JobLedger, job_ledger, unsaved_steps
from zeromon.readout.text import STALLS, clock, exposed_unknown, has_died, pause_seconds, pause_text
from zeromon.readout.verdict import Health, health_of_finding, judge_run, nearly_full_text, risk_text
from zeromon.ring.codes import TextEnum
from zeromon.snapshot import Finding, Pool, RankSnapshot, RunSnapshot, Severity
from zeromon.snapshot.focus import (
    DEVICE_OOM,
    HOST_OOM,
    death_cause,
    first_failed,
    most_exposed,
    nearest_oom,
)
from zeromon.snapshot.ledger import Cause
from zeromon.snapshot.levels import OOM

# ---- how the run was, from its start to now -------------------------------------------------------


@dataclass(frozen=True, slots=True)
class VerdictPeriod:
    """A time in which the verdict on a run was the same."""

    health: Health
    start_wall: float
    """Seconds since the epoch."""
    end_wall: float
    finding: Finding | None = None
    """The finding that the verdict was about; None where all was well."""

    @property
    def severity(self) -> Severity | None:
        """Severity of the finding; None where all was well."""
        return self.health.severity if self.finding is None else self.finding.severity


def life_of_run(
    run: RunSnapshot, findings: Iterable[Finding], until_wall: float = 0.0
) -> tuple[VerdictPeriod, ...]:
    """The verdicts on *run* over time, from the *findings* of its whole record.

    They follow one another without a gap, from the launch to the moment of *run* or to *until_wall*,
    where that is later; () for a run that is read from a Prometheus, which keeps no findings.
    """
    if run.origin:
        return ()
    start_wall, end_wall = run.started_wall, max(run.started_wall, run.taken_wall, until_wall)

    def clamp(wall_seconds: float) -> float:
        return min(max(wall_seconds, start_wall), end_wall)

    begun_wall = _first_step_wall(run)
    changes: dict[float, list[tuple[int, Finding]]] = {start_wall: [], end_wall: []}
    if begun_wall is not None:
        begun_wall = clamp(begun_wall)
        changes[begun_wall] = []
    for number, finding in enumerate(dict.fromkeys(findings)):
        gone_wall = end_wall if finding.gone is None else finding.gone
        # A clock that was set back can end a finding before it came
        if finding.came and _health_while(finding) is not None and gone_wall >= finding.came:
            for change_wall in (finding.came, gone_wall):
                changes.setdefault(clamp(change_wall), []).append((number, finding))
    periods: list[VerdictPeriod] = []
    standing: dict[Health, dict[int, Finding]] = {health: {} for health in _FROM_THE_WORST}
    for since_wall, next_wall in pairwise(sorted(changes)):
        for number, finding in changes[since_wall]:  # at its beginning and at its end
            of_health = standing[_health_while(finding) or Health.SLOW]
            if of_health.pop(number, None) is None:
                of_health[number] = finding
        health = next((health for health in _FROM_THE_WORST if standing[health]), Health.HEALTHY)
        cause = next(iter(standing[health].values())) if health is not Health.HEALTHY else None
        if cause is None and (begun_wall is None or next_wall <= begun_wall):
            health = Health.STARTING
        if periods and periods[-1].health is health:
            periods[-1] = replace(periods[-1], end_wall=next_wall)
        else:
            periods.append(VerdictPeriod(health, since_wall, next_wall, cause))
    return tuple(periods)


_FROM_THE_WORST = (Health.DYING, Health.STALLED, Health.AT_RISK, Health.SLOW)


def _health_while(finding: Finding) -> Health | None:
    """The health of a run while *finding* stands alone; None where it changes nothing."""
    is_critical = finding.severity is Severity.CRITICAL
    if finding.rule in STALLS:
        return Health.STALLED if is_critical else None
    if finding.rule == "rank_died":  # less than critical: a victim, or a rank that its user stopped
        return Health.DYING if is_critical else None
    if is_critical:
        return Health.AT_RISK
    return health_of_finding(finding) if finding.severity is Severity.WARNING else None


def _first_step_wall(run: RunSnapshot) -> float | None:
    """When the first step ended on the slowest rank, or the run began to be watched; None before."""
    stepped = [rank.ledger.startup_seconds or 0.0 for rank in run.ranks if rank.steps.watched_steps]
    return run.started_wall + max(stepped) if stepped else None


def life_text(life: Sequence[VerdictPeriod]) -> str:
    """``starting from 13:17:10, healthy from 13:17:19, slow from 13:17:31``."""
    return ", ".join(f"{s.health} from {clock(s.start_wall).partition(' ')[2]}" for s in life)


# ---- what a step waits for ------------------------------------------------------------------------


class Kind(TextEnum):
    """The meaning of a part of a step, which a colour stands for in every view."""

    COMPUTE = "compute"
    COMMUNICATION = "communication"
    WAITING = "waiting"
    OWN = "own"
    """Whatever the script does besides: checkpoints, evaluation, garbage collection, its own code."""


class Segment(NamedTuple):
    """A part of a step of one rank."""

    name: str
    kind: Kind
    seconds: float
    late: bool = False
    """The others wait for this segment."""


@dataclass(frozen=True, slots=True)
class StepBar:
    """The parts of a step of one rank, in the order in which they are drawn."""

    rank: RankSnapshot
    placement: str
    """``median``, ``late``, ``most exposed``; "" for the only rank."""
    segments: tuple[Segment, ...]

    @property
    def seconds(self) -> float:
        """Seconds a step."""
        return sum(segment.seconds for segment in self.segments)

    @property
    def unknown(self) -> str:
        """Why the parts do not show what waits for communication; "" where they do."""
        return "" if exposed_is_known(self.rank) else f"communication n/a: {exposed_unknown(self.rank)}"

    @property
    def text(self) -> str:
        """``waits for rank 1 33 %, own code 29 %, compute 22 %``, and what is not known."""
        total_seconds = self.seconds
        shares = ", ".join(
            f"{s.name} {human_ratio(s.seconds / total_seconds)}{' (late)' * s.late}"
            for s in sorted(self.segments, key=lambda segment: -segment.seconds)
        )
        return "; ".join(filter(None, (shares, self.unknown)))


def step_bars(run: RunSnapshot) -> tuple[StepBar, ...]:
    """The median rank's step and the worst rank's; () before a step is known.

    The worst rank is the one that the others wait for, else the most exposed one. A snapshot of a large
    run has only some ranks, mostly bad ones, so there it is alone.
    """
    ranks = [rank for rank in run.ranks if any(rank_parts(rank).values())]
    if not ranks:
        return ()
    late_phases = {straggler.rank: straggler.phases for straggler in run.stragglers}
    worst_rank = next((rank for rank in ranks if rank.rank in late_phases), None) or most_exposed(ranks)
    assert worst_rank is not None
    other_ranks = [rank for rank in ranks if rank is not worst_rank]
    if not other_ranks or run.fleet is not None:
        phases = late_phases.get(worst_rank.rank, ())
        awaited = "other ranks" if other_ranks else ""
        placement = "" if not other_ranks else "late" if phases else "most exposed"
        return (StepBar(worst_rank, placement, _segments_of(worst_rank, phases, awaited)),)
    median_ratio = median_low([rank.communication.exposed_ratio or 0.0 for rank in other_ranks])
    median_rank = next(
        rank for rank in other_ranks if (rank.communication.exposed_ratio or 0.0) == median_ratio
    )
    blamed = run.stragglers[0].straggler_name if len(run.stragglers) == 1 else "other ranks"
    placement = "late" if worst_rank.rank in late_phases else "most exposed"
    return (
        StepBar(median_rank, "median", _segments_of(median_rank, (), blamed)),
        StepBar(
            worst_rank,
            placement,
            _segments_of(worst_rank, late_phases.get(worst_rank.rank, ()), "other ranks"),
        ),
    )


def bar_of_rank(rank: RankSnapshot) -> StepBar:
    """The step of one rank, without what others do."""
    return StepBar(rank, "", _segments_of(rank, (), "other ranks" if rank.world_size > 1 else ""))


_COMPUTE = {"forward", "backward", "optimizer", "cpu_optimizer", "generation"}


def _segments_of(rank: RankSnapshot, late_phases: Sequence[str], awaited: str) -> tuple[Segment, ...]:
    """The parts of a step of *rank*.

    *late_phases*: those that the others wait for; *awaited*: whom this rank waits for.
    """
    seconds = dict(rank_parts(rank))
    exposed = seconds.pop("exposed", 0.0)
    waiting = min(exposed, rank.communication.wait_seconds or 0.0) if awaited else 0.0
    compute = sum(seconds.pop(name, 0.0) for name in _COMPUTE if name not in late_phases)
    compute_name = "compute" if exposed_is_known(rank) else "compute and communication"
    segments = [Segment(compute_name, Kind.COMPUTE, compute)]
    segments += [Segment(name.replace("_", " "), Kind.COMPUTE, seconds.pop(name, 0.0), late=True)
              for name in PARTS if name in _COMPUTE and name in late_phases]  # fmt: skip
    segments += [
        Segment(f"waits for {awaited}", Kind.WAITING, waiting),
        Segment(
            "waits for data",
            Kind.WAITING,
            seconds.pop("data_wait", 0.0),
            late="data_wait" in late_phases,
        ),
        Segment("communication", Kind.COMMUNICATION, exposed - waiting),
    ]
    segments += [
        Segment(PART_NAMES[name], Kind.OWN, duration, name in late_phases)
        for name, duration in seconds.items()
    ]
    total_seconds = sum(segment.seconds for segment in segments)
    return tuple(
        segment
        for segment in segments
        if segment.seconds >= _VISIBLE * total_seconds and segment.seconds > 0
    )


_VISIBLE = 0.002
"""A smaller share of a step is not drawn."""


def window_text(run: RunSnapshot) -> str:
    """``mean of the last 20 steps``, ``mean of the last 60 s`` from a Prometheus; "" before any step."""
    if run.origin:
        return f"mean of the last {max(10.0, 4 * run.every_seconds):.0f} s"
    steps = max((rank.steps.watched_steps for rank in run.ranks), default=0)
    if steps < WINDOW:
        return f"mean of the last {counted(steps, 'step')}" if steps else ""
    is_stalled = any(finding.rule in STALLS for finding in run.findings)
    return f"mean of the {LAST_STEPS}{', before it stalled' * is_stalled}"


def pace_facts(run: RunSnapshot) -> list[tuple[str, str]]:
    """(value, what it is): the step time, and what it was before a rank was late."""
    spreads = {} if run.fleet is None else run.fleet.spreads
    seconds = run_step_seconds(run.ranks)
    if "step_seconds" in spreads:
        seconds = spreads["step_seconds"].median
    if seconds is None:
        return []
    pause = pause_seconds(run)
    note = "per step" if pause is None else f"per step; {pause_text(pause)}"
    late_since = max((s.since_step for s in run.stragglers), default=0)
    earlier_seconds = [
        s.seconds for rank in run.ranks for s in rank.steps.recent if 3 < s.step < late_since
    ]
    if earlier_seconds and (was := median(earlier_seconds)) < 0.9 * seconds:
        note += f", was {human_seconds(was)} until step {human_count(late_since - 1)}"
    return [(human_seconds(seconds), note)]


def goodput_facts(run: RunSnapshot) -> list[tuple[str, str]]:
    """(value, what it is): goodput, and what most of the other time went to; [] where unknown."""
    account = job_ledger([run])
    if run.fleet is not None or account.goodput is None:
        return []
    losses = [(share, name) for name, share in _group_shares(account).items() if name != "compute"]
    share, name = max(losses, default=(0.0, ""))
    unsaved = unsaved_steps(run)
    loss = f": the last {counted(unsaved, 'step')} not saved" if unsaved else ""
    loss += f"; {name} {human_ratio(share)}" if share > 0.1 else ""
    return [(human_ratio(account.goodput), f"of all ranks' time is goodput{loss}")]


def events_of(run: RunSnapshot, chart: str) -> tuple[tuple[int, str], ...]:
    """The steps from which on something was different, for the *chart* of that name."""
    if chart == "step-time":
        return tuple((s.since_step, f"{s.straggler_name} late") for s in run.stragglers if s.since_step)
    if not any(finding.rule == "oom_risk" for finding in run.findings):
        return ()  # caches that fill grow, too
    spec = next((spec for spec in charts_of(run.ranks) if spec.name == chart), None)
    limit = limit_of(spec, run.ranks) if spec is not None else None
    if limit is None or not limit.risk.growth_bytes_per_step or not limit.risk.since_step:
        return ()
    return ((limit.risk.since_step, "grows from here"),)


# ---- what to change -------------------------------------------------------------------------------


def no_change_text(run: RunSnapshot) -> str:
    """Why nothing should be changed, or why that is not known."""
    if not run.ranks:
        return "n/a: no rank has reported"
    is_well = judge_run(run).severity in (None, Severity.INFO) and not nearly_full_text(run)
    return "nothing: no finding asks for it" if is_well else "n/a: no finding names a change"


def findings_to_act_on(run: RunSnapshot, limit: int = 2) -> tuple[Finding, ...]:
    """The finding of the verdict, then the most urgent ones that come with a change; of each rule one.

    Where the verdict's names nothing to do, only those. Without any, those that are at least a warning.
    """
    finding = judge_run(run).finding
    other_findings = _findings_about_cause(run)
    by_rule = {} if finding is None else {finding.rule: finding}
    if finding is not None and finding.rule == "rank_died" and finding.remedy is None:
        failed = first_failed(run.ranks, run.hangs)
        led = [f for f in other_findings if f.rule == "oom_risk" and f.remedy is not None]
        if failed is not None and led and death_cause(failed) in _POOLS:
            by_rule = {led[0].rule: led[0]}  # the growth that filled the memory
    with_change = [f for f in other_findings if f.remedy is not None]
    if finding is not None and finding.remedy is None and not finding.action:
        # Its page speaks of all causes, a change of the one that was found
        by_rule = {} if with_change else by_rule
    for f in with_change:
        by_rule.setdefault(f.rule, f)
    if not by_rule:
        by_rule = {f.rule: f for f in other_findings if f.severity is not Severity.INFO}
    return tuple(by_rule.values())[:limit]


def findings_by_urgency(run: RunSnapshot) -> tuple[Finding, ...]:
    """All findings: first those to act on, last the ends of the ranks of a run that was stopped."""
    ordered = (*findings_to_act_on(run), *_findings_about_cause(run), *run.findings)
    return tuple(dict.fromkeys(ordered))


def _findings_about_cause(run: RunSnapshot) -> list[Finding]:
    is_stopped = run.ended and not has_died(run)  # then a rank that ended is no cause
    return [f for f in run.findings if not (is_stopped and f.rule == "rank_died")]


# ---- will memory run out --------------------------------------------------------------------------


_POOLS = {HOST_OOM: Pool.HOST, DEVICE_OOM: Pool.DEVICE}


def memory_answer(run: RunSnapshot) -> str:
    """``no, 18.0 GiB of host memory left``, ``yes, at about step 1,840``, or why it is not known."""
    failed = first_failed(run.ranks, run.hangs)
    if failed is not None and (pool := _POOLS.get(death_cause(failed))):
        return f"yes: rank {failed.rank} ran out of {pool} memory"
    nearest = nearest_oom(run.ranks)
    if not run.ranks:
        return "n/a: no rank has reported"
    if nearest is None:
        return "n/a: the run has ended" if run.ended else "n/a: the memory's limit is not known"
    rank, risk = nearest
    if risk.steps_left is not None:
        step = human_count(rank.steps.last_step + risk.steps_left)
        return f"{'yes' if rank.status.alive else 'it would have'}, at about step {step}"
    if OOM.severity(risk.ratio) in (Severity.WARNING, Severity.CRITICAL):
        return f"at risk: {risk_text(risk, rank)}"
    if risk.capacity_bytes < 0 or risk.used_bytes < 0:
        return f"n/a: the limit of {risk.pool} memory is not known"
    verb = "was left" if run.ended else "left"
    free = human_bytes(max(0, risk.capacity_bytes - risk.used_bytes))
    if risk.used_bytes > SAFE_LEVEL * risk.capacity_bytes:
        limit = human_bytes(risk.capacity_bytes)
        return f"not yet, but only {free} of {limit} of {risk.pool} memory {verb}"
    return f"no, {free} of {risk.pool} memory {verb}"


# ---- where all the time went ----------------------------------------------------------------------

_GROUPS = dict.fromkeys(USEFUL, "compute") | {
    Cause.EXPOSED: "communication", Cause.WAITING: "waiting", Cause.DATA: "waiting",
    Cause.HANG: "waiting", Cause.STALL: "waiting", Cause.SET_UP: "set-up", Cause.COMPILE: "set-up",
    Cause.SHUT_DOWN: "set-up", Cause.DEAD: "dead time", Cause.LOST: "steps not saved",
}  # fmt: skip


def ledger_summary(ledger: JobLedger) -> str:
    """``compute 16 %, communication 9 %, waiting 21 %, own code 54 %`` of all ranks' time."""
    shares = _group_shares(ledger)
    return ", ".join(f"{name} {human_ratio(share)}" for name, share in shares.items() if share > 0.005)


def _group_shares(ledger: JobLedger) -> dict[str, float]:
    """The share of each group of causes in all ranks' time."""
    shares: dict[str, float] = {}
    for row in ledger.rows:
        name = _GROUPS.get(row.cause, PART_NAMES["other"])
        shares[name] = shares.get(name, 0.0) + ledger.share(row)
    return shares
