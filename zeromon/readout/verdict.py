"""The verdict on a run: one word and one sentence with the most severe cause; hangs in words. Pure."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from zeromon.base.units import counted, human_bytes, human_count, human_ratio, human_seconds
from zeromon.fold.summarize import waits_for_batch
from zeromon.memory.forecast import SAFE_LEVEL
from zeromon.readout import text
from zeromon.readout.breakdown import PART_NAMES, rank_parts
from zeromon.ring.codes import TextEnum
from zeromon.snapshot import Finding, Hang, Pool, RankSnapshot, RiskCause, RunSnapshot
from zeromon.snapshot.communication import HangKind, MemberCall, Ras
from zeromon.snapshot.focus import (
    DEVICE_OOM,
    HOST_OOM,
    death_cause,
    first_failed,
    highest_exposed_ratio,
    is_ending,
    nearest_oom,
)
from zeromon.snapshot.levels import Severity
from zeromon.snapshot.memory import Risk
from zeromon.snapshot.rank import Halt

# ---- hangs in words ------------------------------------------------------------------------------

NOT_CALLED = "has not called it"
_MAX_CAUSES = 4
_MAX_LISTED_RANKS = 8


def hang_headline(run: RunSnapshot, hang: Hang) -> str:
    """The stuck collective and who is to blame, in one line; after the end, what hung in which step.

    ``all_reduce in dp is stuck: rank 0 has not called it (at ddp.py:41); rank 1 waits``;
    ``hung at step 50 for 110 s: rank 1 never called all_gather (t.py:32)``.
    """
    cause = _hang_cause_text(run, hang, _location_of_rank)
    if _hang_is_over(run, hang):
        waited = [rank.steps.last_step for rank in run.ranks if rank.rank in hang.waiting]
        step = human_count(max(waited, default=0) + 1)
        return f"hung at step {step} for {text.rough_time(hang.seconds)}: {cause}"
    if cause.startswith(str(hang.kind)):
        return cause
    return f"{hang.op} in {_short_group_name(hang)} {'waits' if hang.pause else 'is stuck'}: {cause}"


def hang_text(run: RunSnapshot, hang: Hang) -> str:
    """The hang as text: the collective, who waits, who is missing, what those do, and on which node."""
    lasts = f"has not ended for {text.rough_time(hang.seconds)}" if hang.seconds else "broke off"
    if _hang_is_over(run, hang):
        lasts = f"hung for {text.rough_time(hang.seconds)}"
    sentence = f"{_collective_text(hang)} {lasts}: {_hang_cause_text(run, hang, text.doing)}"
    return "; ".join((sentence, *_nccl_view_lines(run.ras, hang)))


def _hang_is_over(run: RunSnapshot, hang: Hang) -> bool:
    waited = [rank.status.alive for rank in run.ranks if rank.rank in hang.waiting]
    return bool(hang.seconds) and (run.ended or (bool(waited) and not any(waited)))


def _hang_cause_text(run: RunSnapshot, hang: Hang, locate: Callable[[RankSnapshot], str]) -> str:
    """The calls in which members differ, else which ranks wait and for whom."""
    is_over = _hang_is_over(run, hang)
    if HangKind(hang.kind).is_mismatch and hang.calls:
        return _call_mismatch_text(run, hang, with_lines=locate is text.doing)
    circle = [h for h in run.hangs if h.kind == HangKind.DEADLOCK]
    if hang in circle:
        waits = (f"{named_ranks(h.waiting)} in {h.op} of {_short_group_name(h)}" for h in circle)
        return f"{hang.kind}: {', '.join(waits)}{_who_is_ahead(run, _calls_in_hangs(run, circle))}"
    # A headline has room for the pause alone; hang_text goes on with who waits
    if hang.pause and locate is _location_of_rank:
        paused = next((r for r in run.ranks if r.rank in hang.missing and r.status.stack), None)
        return f"{hang.pause} ({locate(paused)})" if paused is not None else hang.pause
    activities = {peer.rank: peer.doing for peer in run.away}
    activities |= {rank.rank: locate(rank) for rank in run.ranks if rank.rank in hang.missing}
    has_culprit = bool(hang.missing + hang.dead)
    waiting = _waiting_ranks_text(run, hang)
    phrases = [] if has_culprit else [waiting]
    called = {call.rank for call in hang.calls}
    for rank in hang.missing[:_MAX_CAUSES]:
        activity = activities.get(rank, "")
        verb = f"never called {hang.op}" if is_over else NOT_CALLED
        if rank in called:
            verb = f"{'was' if is_over else 'is'} in it"
        activity = activity.removeprefix("at ") if is_over else activity
        phrases.append(f"{named_ranks((rank,), run.node_of)} {verb}{activity and f' ({activity})'}")
    if len(hang.missing) > _MAX_CAUSES:
        phrases.append(f"nor have {human_count(len(hang.missing) - _MAX_CAUSES)} more")
    phrases += [_absent_rank_text(run, rank, is_over) for rank in hang.dead[:_MAX_CAUSES]]
    if hang.elsewhere:
        silent = [node.node for node in run.nodes if node.silent]
        phrases.append(f"{named_ranks(hang.elsewhere, run.node_of)} not heard")
        phrases += [f"no report from node {', '.join(silent[:3])}"] if silent else []
    if not hang.missing and not hang.dead and not hang.elsewhere:
        phrases.append(str(hang.kind))
    cause = ", ".join([*phrases, hang.pause] if hang.pause else phrases)
    return f"{cause}; {waiting}" if has_culprit and not is_over else cause


def _waiting_ranks_text(run: RunSnapshot, hang: Hang) -> str:
    if run.fleet is not None:
        return f"{counted(run.fleet.waiting, 'rank')} wait{'s' * (run.fleet.waiting == 1)}"
    return f"{named_ranks(hang.waiting, run.node_of)} wait{'s' * (len(hang.waiting) == 1)}"


def _absent_rank_text(run: RunSnapshot, number: int, is_over: bool) -> str:
    """``rank 1 is dead (SIGKILL)``, ``rank 0 has left after step 60 (exit code 0)``."""
    rank_text = named_ranks((number,), run.node_of)
    rank = next((rank for rank in run.ranks if rank.rank == number), None)
    if rank is not None and not rank.status.failed:
        departure = f"left after step {human_count(rank.steps.last_step)} ({text.exit_text(rank)})"
        return f"{rank_text} {'had' if is_over else 'has'} {departure}"
    peer_end = next((peer.ended for peer in run.away if peer.rank == number), "")
    ending = rank.status.ended if rank is not None else peer_end
    return f"{rank_text} {'was' if is_over else 'is'} dead{ending and f' ({ending})'}"


def _location_of_rank(rank: RankSnapshot) -> str:
    """``at t.py:32``, or why the rank runs nothing, else its phase."""
    if rank.status.halted is not Halt.NONE or not rank.status.stack:
        return text.doing(rank)
    waits = "waits for a batch of the DataLoader, " if waits_for_batch(rank.status.stack) else ""
    return f"{waits}at {text.short_frame(rank.status.stack)}"


def _call_mismatch_text(run: RunSnapshot, hang: Hang, *, with_lines: bool) -> str:
    """``mismatched units in dp since #571: rank 0 called all_gather of experts.3, rank 1 of out``."""
    sequence = hang.calls[0].sequence
    is_earlier = 0 <= sequence < hang.sequence and len({c.sequence for c in hang.calls}) == 1
    start = f" since #{sequence}" if is_earlier else ""
    # The stack of a rank is of what it is in now, not of an earlier call
    has_lines = with_lines and hang.seconds and not is_earlier
    stacks = {
        rank.rank: rank.status.stack
        for rank in run.ranks
        if has_lines and any(call.group_id == hang.group_id for call in rank.communication.in_flight)
    }
    return f"{hang.kind} in {_short_group_name(hang)}{start}: {_calls_text(run, hang, stacks)}"


def _calls_text(run: RunSnapshot, hang: Hang, stacks: Mapping[int, tuple[str, ...]]) -> str:
    """The call of each rank where they differ, ranks with the same call at the same line together."""
    calls = hang.calls
    varies = {
        name: len({getattr(call, name) for call in calls}) > 1 for name in ("sequence", "unit", "phase")
    }
    callers: dict[str, list[int]] = {}
    for call in calls:
        stack = stacks.get(call.rank)
        location = f" (at {text.short_frame(stack)})" if stack else ""
        callers.setdefault(_call_text(call, varies) + location, []).append(call.rank)
    sentences = [f"{named_ranks(ranks)} called {call}" for call, ranks in callers.items()]
    return ", ".join(sentences[:_MAX_CAUSES]) + _who_is_ahead(run, calls)


def _call_text(call: MemberCall, varies: Mapping[str, bool]) -> str:
    if call.op == "none":
        return f"an unknown collective #{call.sequence}"
    number = f" #{call.sequence}" if varies["sequence"] else ""
    unit = f" of {text.unit_name(call.unit)}" if call.unit and varies["unit"] else ""
    size = f" ({call.nbytes:,} B)" if call.nbytes >= 0 else ""
    phase = "" if call.phase in ("", "other") or not varies["phase"] else f" in {call.phase}"
    return f"{call.op}{number}{unit}{size}{phase}"


def _who_is_ahead(run: RunSnapshot, calls: Sequence[MemberCall]) -> str:
    """``; rank 0 is one forward ahead``, or which steps the ranks have ended; "" where neither shows."""
    callers = {call.rank for call in calls}
    members = [rank for rank in run.ranks if rank.rank in callers]
    empty = [rank.rank for rank in members if rank.training.out_of_batches]
    forward = [call.rank for call in calls if call.phase == "forward" and call.is_repeated]
    # Not in backward, where recomputation gathers units again
    repeating = [c.rank for c in calls if c.is_repeated and c.phase not in ("forward", "backward")]
    outside = [call.rank for call in calls if call.phase == "other"]
    steps = {rank.steps.last_step for rank in members}
    if 0 < len(empty) < len(calls):
        return f"; {named_ranks(empty)} had no more batches after step {human_count(min(steps))}"
    if len(steps) > 1:
        return f"; they have ended {' and '.join(map(human_count, sorted(steps)))} steps"
    if 0 < len(forward) < len(calls):
        return f"; {named_ranks(forward)} {'are' if forward[1:] else 'is'} one forward ahead"
    if 0 < len(repeating) < len(calls):
        verb = "run" if repeating[1:] else "runs"
        return f"; {named_ranks(repeating)} {verb} one more forward of the same modules"
    if any(call.phase not in ("", "other") for call in calls) and outside:
        no_other = f"{'have' if outside[1:] else 'has'} begun no other"
        return f"; {named_ranks(outside)} ended step {human_count(min(steps))} and {no_other}"
    return ""


def _calls_in_hangs(run: RunSnapshot, hangs: Sequence[Hang]) -> list[MemberCall]:
    return [
        MemberCall(rank=rank.rank, sequence=call.sequence, op=call.op, phase=call.phase)
        for hang in hangs
        for rank in run.ranks
        if rank.rank in hang.waiting
        for call in rank.communication.in_flight
        if call.group_id == hang.group_id
    ]


def _short_group_name(hang: Hang) -> str:
    return text.group_name(hang.group, hang.dim)


def _nccl_view_lines(ras: Ras | None, hang: Hang) -> Iterator[str]:
    """Yields NCCL's view of the ranks of a hang, which RAS numbers by their place in the group."""
    if ras is None:
        return
    comm_view = next((comm for comm in ras.communicators if comm.group_id == hang.group_id), None)
    if comm_view is None:
        yield f"NCCL's view is n/a: {ras.note or 'no single communicator has the ranks of this group'}"
        return

    def listed_ranks(positions: Iterable[int]) -> str:
        # NCCL may name a place beyond the members that the agent knows
        return named_ranks([hang.members[p] if p < len(hang.members) else p for p in positions])

    for positions, verb in (
        (comm_view.dead, "NCCL gives up"),
        (set(comm_view.unresponsive) - set(comm_view.dead), "NCCL does not reach"),
        (comm_view.failed, "NCCL has met an error in"),
    ):
        if positions:
            yield f"{verb} {listed_ranks(positions)}"
    count = next((row for row in comm_view.counts if row.op == hang.op), None)
    if count is not None and count.behind:
        fewest = min(number for _, number in count.behind)
        late = listed_ranks(position for position, _ in count.behind)
        yield f"NCCL has launched {count.most:,} {count.op}, on {late} {fewest:,}"
    elif count is not None:
        yield f"NCCL has launched {count.most:,} {count.op} on all ranks that answer"


def _collective_text(hang: Hang) -> str:
    """``all_gather #12 of tp (ranks 2, 3; 1,000 B)``; without what is unknown."""
    if hang.nbytes < 0:  # read from Prometheus, which has neither
        return f"{hang.op} in {hang.group}"
    # Where members called different things, no one operation and size is that of the collective
    differs = len({call.op for call in hang.calls}) > 1 and HangKind(hang.kind).is_mismatch
    size = () if differs else (f"{hang.nbytes:,} B",)
    group = text.group_text(hang.group, hang.dim, hang.members, *size)
    return f"{'collective' if differs else hang.op} #{abs(hang.sequence)} of {group}"


def named_ranks(ranks: Sequence[int], node_of: Callable[[int], str] = lambda _: "") -> str:
    """``ranks 2, 3 on node-b``; a rank of this node comes without the node's name."""
    by_node: dict[str, list[int]] = {}
    for rank in ranks[:_MAX_LISTED_RANKS]:
        by_node.setdefault(node_of(rank), []).append(rank)
    listing = " and ".join(
        ", ".join(map(str, members)) + (f" on {node}" if node else "")
        for node, members in by_node.items()
    ) + (", ..." if len(ranks) > _MAX_LISTED_RANKS else "")
    return f"rank{'s' if len(ranks) > 1 else ''} {listing}"


# ---- the verdict on a run ------------------------------------------------------------------------


class Health(TextEnum):
    """How a run is, in one word; in the order of ``zeromon_run_health`` (docs/reference/metrics.md)."""

    HEALTHY = "healthy"
    SLOW = "slow"
    """Findings of severity warning say what steps wait for."""
    AT_RISK = "at risk"
    """It may run out of a memory or of disk, its results may be wrong, or some ranks are not seen."""
    STALLED = "stalled"
    """No rank makes progress, a hang included."""
    DYING = "dying"
    """A rank has failed while others live."""
    DEAD = "dead"
    STOPPED = "stopped"
    """By its user or scheduler."""
    FINISHED = "finished"
    STARTING = "starting"
    """No step has ended yet."""
    RESTARTING = "restarting"
    """The launcher starts the ranks again, and none has reported yet."""
    NOT_WATCHED = "not watched"
    UNKNOWN = "unknown"
    INCOMPLETE = "incomplete"
    """Its record has no end: how it went on is not known."""

    @property
    def severity(self) -> Severity | None:
        """Critical, warning; info where the run is over or not known; None where all is well."""
        return _SEVERITIES.get(self, Severity.INFO)


_SEVERITIES = {
    Health.HEALTHY: None,
    Health.SLOW: Severity.WARNING,
    Health.AT_RISK: Severity.WARNING,
    Health.RESTARTING: Severity.WARNING,
    Health.INCOMPLETE: Severity.WARNING,
    Health.STALLED: Severity.CRITICAL,
    Health.DYING: Severity.CRITICAL,
    Health.DEAD: Severity.CRITICAL,
}

SIGNS = {None: "●", Severity.INFO: "■", Severity.WARNING: "▲", Severity.CRITICAL: "✖"}
"""The mark of a verdict by its severity."""

LEVELS = {None: 0, Severity.INFO: 1, Severity.WARNING: 2, Severity.CRITICAL: 3}
"""The value of ``zeromon_run_severity`` by the severity of a verdict."""

_FAMILIES = {
    "ZM202": Health.SLOW, "ZM2": Health.AT_RISK, "ZM3": Health.SLOW, "ZM4": Health.AT_RISK,
    "ZM5": Health.SLOW, "ZM6": Health.SLOW,
}  # fmt: skip
"""The health that a warning means, by the family of its code: memory, communication, results, offload,
host. ZM202 is about memory that could save time. Other families are about zeromon or about checkpoints:
a run with such a warning is healthy."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """The state of a run that a person must know first."""

    health: Health
    severity: Severity | None
    """Whose colour it has; critical for a memory that is nearly full. None: all is well."""
    cause: str
    """One sentence: what threatens the run, or of an ended one, what threatened it last."""
    short: str = ""
    """The cause for a narrow view; "" where there is no shorter one."""
    outcome: str = ""
    """How a run ended that did not die: ``stopped by SIGTERM after step 49``; "" for any other."""
    finding: Finding | None = None
    """The finding that it is about; None where it is about none."""

    @property
    def headline(self) -> str:
        """The cause up to its first semicolon."""
        return text.leading_clauses(self.cause, 0)

    @property
    def detail(self) -> str:
        """The cause after its first semicolon; "" without one."""
        return self.cause[len(self.headline) + 2 :]

    @property
    def text(self) -> str:
        """``slow: rank 1 is late ...``, or ``rank 1 is late ...; finished after 90 steps``."""
        if not self.outcome:
            return f"{self.health}: {self.cause}"
        sentences = [self.cause, self.outcome]
        return "; ".join(reversed(sentences) if self.severity is Severity.INFO else sentences)


def exposed_severity(run: RunSnapshot) -> Severity | None:
    """The severity of the finding about exposed communication, as in the verdict; None without one."""
    return next((f.severity for f in run.findings if f.rule == "exposed_communication"), None)


def state_beside(health: Health, run: RunSnapshot) -> str:
    """The state of *run* beside the word for its health: ``after step 20``; "" where that says it."""
    state = "" if run.unfinished else text.run_state(run)
    return state.removeprefix("died: ").removeprefix(f"{health} ")


def judge_run(run: RunSnapshot) -> Verdict:
    """How *run* is, by what threatens it most; how an ended one was, by what threatened it last."""
    if run.unfinished:
        return _of_health(Health.INCOMPLETE, _incomplete_run_cause(run))
    if run.restarting:
        return _of_health(Health.RESTARTING, text.restarting_text(run))
    if not run.ranks:
        endings = [death.ended for attempt in run.attempts[-1:] for death in attempt.deaths]
        was_stopped = bool(endings) and all(ended in ("SIGTERM", "SIGINT") for ended in endings)
        end_health = Health.DEAD if run.attempts else Health.UNKNOWN
        end_health = Health.STOPPED if was_stopped else end_health
        return _of_health(end_health if run.ended else Health.STARTING, text.starting_text(run))
    if text.has_died(run):
        alive = not run.ended and any(rank.status.alive for rank in run.ranks)
        health = Health.DYING if alive else Health.DEAD
        unreported = text.unreported_text([a for a in run.attempts if a.number > run.attempt])
        causes = "; ".join(filter(None, (_first_death_sentence(run), unreported)))
        return _of_health(health, causes, _finding_of_death(run))
    is_stopped = any(rank.status.failed for rank in run.ranks)
    if all(rank.status.silent for rank in run.ranks) and not run.ended:
        return _of_health(Health.UNKNOWN, text.silent_text(run, run.ranks))
    threat = _stall_threat(run) or _at_risk_verdict(run) or _lost_time(run)
    if run.detached and not is_stopped and (threat is None or threat.health is not Health.STALLED):
        note = "what the ranks do now is not known; figures are the last ones"
        return _of_health(Health.NOT_WATCHED, note)
    if is_stopped or run.ended:
        health = Health.STOPPED if is_stopped else Health.FINISHED
        trained = any(rank.steps.watched_steps for rank in run.ranks)
        calm = f"{nearly_full_text(run) or 'no problem found'}; {_largest_wait(run)}"
        final = threat or _of_health(health, calm if trained else _no_step_text(run))
        has_room = trained and (threat is None or threat.health is Health.SLOW)
        cause = f"{_fits_text(run) if has_room else ''}{final.cause}"
        return replace(final, health=health, cause=cause, outcome=text.run_state(run))
    return threat or _verdict_when_healthy(run)


def _incomplete_run_cause(run: RunSnapshot) -> str:
    """From when on the record is missing, and what threatened the run or ended a rank before."""
    if run.ranks and text.has_died(run):
        died = _first_death_sentence(replace(run, unfinished=False, history_note=""))
        return f"{text.record_text(run)}; before: {died}"
    threat = _stall_threat(run) or _memory_risk(run) or _lost_time(run) if run.ranks else None
    return (
        text.record_text(run) if threat is None else f"{text.record_text(run)}; before: {threat.cause}"
    )


def state_and_cause(run: RunSnapshot) -> str:
    """The verdict in one line, for a list of runs: ``slow: rank 1 is late ...; running, step 105``."""
    judged = judge_run(run)
    is_said = judged.outcome or not run.ranks or text.has_died(run) or run.unfinished
    return judged.text if is_said else f"{judged.text}; {text.run_state(run)}"


def unanswered_verdict(run: RunSnapshot, seconds: float) -> Verdict:
    """The verdict on a live run of which nothing is known for *seconds*."""
    note = f"no answer from its collector for {human_seconds(seconds)}; before: {judge_run(run).text}"
    return Verdict(Health.UNKNOWN, Severity.WARNING, note)


def _of_health(health: Health, cause: str, finding: Finding | None = None) -> Verdict:
    return Verdict(health, health.severity, cause, finding=finding)


def _stall_threat(run: RunSnapshot) -> Verdict | None:
    """The collective that hangs, else the ranks without progress; None where a pause is expected."""
    hang = next((hang for hang in run.hangs if hang.seconds), None)
    if hang is not None and not hang.pause:
        return _of_health(Health.STALLED, hang_headline(run, hang), text.stall_finding(run))
    finding = text.stall_finding(run)
    if finding is None:
        return None
    return _of_health(Health.STALLED, text.finding_text(finding), finding)


def _first_death_sentence(run: RunSnapshot) -> str:
    """Returns the cause of the first death and what led to it; for SIGABRT, the finding before it."""
    broken = next((hang for hang in run.hangs if HangKind(hang.kind).is_mismatch), None)
    if broken is not None:
        return hang_headline(run, broken)
    failed = first_failed(run.ranks, run.hangs)
    finding = _finding_of_death(run)
    sentence = text.run_state(run) if finding is None else text.finding_text(finding)
    is_own = failed is not None and (finding is None or finding.rank == failed.rank)
    cause = death_cause(failed) if failed is not None and is_own else ""
    led = None
    if cause in (HOST_OOM, DEVICE_OOM):
        led = _memory_risk(run)
        if failed is not None and led is not None and (growth := _growth_before(run, led)):
            pool = Pool.HOST if cause == HOST_OOM else Pool.DEVICE
            return f"rank {failed.rank} ran out of {pool} memory: {growth}; {sentence}"
    elif cause in _ABORTED and not any(hang.dead for hang in run.hangs):  # else the hang followed
        led = _stall_threat(run)
    if led is not None and led.cause != sentence:
        return f"{led.cause}; {sentence}"
    earlier = _lost_time(run) if cause == "SIGABRT" and run.ended and not run.hangs else None
    return sentence if earlier is None else f"{sentence}; before: {earlier.cause}"


def _finding_of_death(run: RunSnapshot) -> Finding | None:
    """The finding on the rank that failed first; else on a death on another node, else the worst."""
    failed = first_failed(run.ranks, run.hangs)
    severe = (f for f in run.findings if f.severity == Severity.CRITICAL)
    return min(
        severe,
        key=lambda f: (f.rule != "rank_died", failed is None or f.rank != failed.rank),
        default=None,
    )


def _growth_before(run: RunSnapshot, led: Verdict) -> str:
    """The growth of the memory that *led* says to run out; "" without any."""
    ranks = [rank for rank in run.ranks if led.finding is not None and rank.rank == led.finding.rank]
    nearest = nearest_oom(ranks)
    growth = "" if nearest is None else _memory_growth_text(*nearest)
    if not growth or nearest is None or nearest[1].steps_left is None:
        return growth
    return f"{growth}; it was to be full at about {_full_at(*nearest)}"


_ABORTED = ("SIGABRT", "exception", "peer_lost")
"""How a backend ends a rank whose collective hangs for too long."""


def _memory_risk(run: RunSnapshot) -> Verdict | None:
    """The memory that runs out; None while none does."""
    finding = next((f for f in run.findings if f.rule == "oom_risk"), None)
    if finding is None or finding.severity is Severity.INFO:
        return None
    nearest = nearest_oom([rank for rank in run.ranks if rank.rank == finding.rank])
    if nearest is None:
        return _verdict_about(finding, Health.AT_RISK)
    headlines = risk_headline(*nearest), risk_headline(*nearest, short=True)
    return Verdict(Health.AT_RISK, finding.severity, *headlines, finding=finding)


def _verdict_about(finding: Finding, health: Health) -> Verdict:
    return Verdict(health, finding.severity, text.finding_text(finding), finding=finding)


def _at_risk_verdict(run: RunSnapshot) -> Verdict | None:
    if (risk := _memory_risk(run)) is not None:
        return risk
    silent = [rank for rank in run.ranks if rank.status.silent]
    if silent:
        return Verdict(Health.AT_RISK, Severity.WARNING, text.silent_text(run, silent))
    if run.unread:
        return Verdict(Health.AT_RISK, Severity.WARNING, text.unread_text(run))
    severe = _severe_findings(run, Severity.CRITICAL) or _severe_findings(run, Severity.WARNING)
    return _verdict_about(severe[0], Health.AT_RISK) if severe else None


def health_of_finding(finding: Finding) -> Health | None:
    """The health that a warning of its family means; None where it changes nothing."""
    return _FAMILIES.get(finding.code) or _FAMILIES.get(finding.code[:3])


def _severe_findings(run: RunSnapshot, severity: Severity) -> list[Finding]:
    """The findings of *severity* about memory or results; of the critical ones, those about all else."""
    return [
        f for f in run.findings if f.severity == severity
        and (severity is Severity.CRITICAL or health_of_finding(f) is Health.AT_RISK)
    ]  # fmt: skip


def _lost_time(run: RunSnapshot) -> Verdict | None:
    """The verdict on what steps wait for: an expected pause, else the finding of the largest share."""
    if any(hang.pause for hang in run.hangs):
        health = Health.SLOW if any(rank.steps.watched_steps for rank in run.ranks) else Health.STARTING
        return Verdict(health, Severity.WARNING, hang_headline(run, run.hangs[0]))
    findings = [
        f for f in run.findings
        if f.severity == Severity.WARNING and health_of_finding(f) is Health.SLOW
    ]  # fmt: skip
    if not findings:
        return None
    return _verdict_about(_most_severe_finding(findings), Health.SLOW)


_EXPLAINS = 0.25
_NAMED = ("straggler", "slow_steps", "uneven_work")
"""Rules that say which ranks others wait for: they stand before the waits that they explain."""


def _most_severe_finding(findings: Sequence[Finding]) -> Finding:
    """The finding about the largest share of a step; a busy machine only where nothing else is found."""
    candidates = [finding for finding in findings if finding.rule != "cpu_starved"] or findings
    largest = max(candidates, key=lambda finding: finding.share or 0.0)
    named = [finding for finding in candidates if finding.rule in _NAMED]
    blamed = max(named, key=lambda finding: finding.share or 0.0, default=largest)
    return blamed if (blamed.share or 0.0) >= _EXPLAINS * (largest.share or 0.0) else largest


def _ranks_without_agent(run: RunSnapshot) -> list[int]:
    size = max((rank.config.process.get("local_world_size", 0) for rank in run.ranks), default=0)
    is_whole = all(rank.world_size == size for rank in run.ranks)
    return sorted(set(range(size)) - {rank.rank for rank in run.ranks}) if is_whole else []


def nearly_full_text(run: RunSnapshot) -> str:
    """The memory that is nearly full, though nothing says that it runs out; "" without one."""
    nearest = nearest_oom(run.ranks)
    if nearest is None or nearest[1].used_bytes <= SAFE_LEVEL * nearest[1].capacity_bytes:
        return ""
    return f"{nearest[1].pool} memory is nearly full: {risk_level(nearest[1])}"


def _fits_text(run: RunSnapshot) -> str:
    """``fits, with a peak of 20.2 GiB of 79.1 GiB; ``, of a preflight's fullest device; else ""."""
    devices = [r.memory.device for r in run.ranks if r.on_virtual_device and r.memory.device is not None]
    fullest = max(devices, key=lambda device: device.peak_bytes, default=None)
    if fullest is None:
        return ""
    peak, capacity = human_bytes(fullest.peak_bytes), human_bytes(fullest.capacity_bytes)
    return f"fits, with a peak of {peak} of {capacity}; "


def _no_step_text(run: RunSnapshot) -> str:
    """``no step has ended after 20 s; rank 0 is in own code, at train.py:21``."""
    has, is_, verb, seconds = "has", "is", "still in", run.taken_wall - run.started_wall
    started_ns = min((rank.status.started_ns for rank in run.ranks), default=run.taken_ns)
    step = "no step"
    if run.attempt > 1:  # launched long ago, and started again since
        step, seconds = f"no step of attempt {run.attempt}", (run.taken_ns - started_ns) / 1e9
    if run.ended:
        has, is_, verb = "had", "was", "never left"
        seconds = (
            max((rank.status.last_event_ns - rank.status.started_ns for rank in run.ranks), default=0)
            / 1e9
        )
    still = [rank for rank in run.ranks if rank.status.stack]  # the others may wait for the last one
    stuck = min(still, key=lambda r: sum(g.sequence for g in r.communication.groups), default=None)
    activity = f"; rank {stuck.rank} {is_} {text.doing(stuck)}" if stuck is not None else ""
    absent = _ranks_without_agent(run)  # an agent starts when that call returns
    joins = f"; {text.members_text(absent)} {verb} init_process_group" if absent else ""
    return f"{step} {has} ended after {human_seconds(max(0.0, seconds))}{joins}{activity}"


def _verdict_when_healthy(run: RunSnapshot) -> Verdict:
    if not any(rank.steps.watched_steps for rank in run.ranks):
        return _of_health(Health.STARTING, _no_step_text(run))
    if is_ending(run):
        return Verdict(Health.HEALTHY, None, "the script has ended, its processes end")
    nearest = nearest_oom(run.ranks)
    if nearest is not None and nearest[1].steps_left is not None:  # in a long time
        headlines = risk_headline(*nearest), risk_headline(*nearest, short=True)
        return Verdict(Health.HEALTHY, None, *headlines)
    memory = "the memory's limit is not known"
    if nearest is not None:
        memory = nearly_full_text(run) or "no memory is running out"
    return Verdict(Health.HEALTHY, None, f"{memory}; {_largest_wait(run)}")


_WAITS = (
    "exposed", "data_wait", "evaluation", "checkpoint", "garbage_collection", "compile", "other",
)  # fmt: skip


def _largest_wait(run: RunSnapshot) -> str:
    """``exposed communication 4.4 % of a step``: the largest part of a rank's step that is no work."""
    highest = highest_exposed_ratio(run.ranks)
    if highest is None:
        return f"exposed communication n/a: {text.exposed_unknown(run.ranks[0])}"
    shares = {"exposed": highest}
    for rank in run.ranks:
        seconds = rank_parts(rank)
        total = sum(seconds.values())
        for label in _WAITS[1:]:
            share = seconds.get(label, 0.0) / total if total else 0.0
            shares[label] = max(shares.get(label, 0.0), share)
    label = max(shares, key=lambda label: shares[label])
    return f"{PART_NAMES[label]} {human_ratio(shares[label])} of a step"


# ---- sentences about memory that runs out, for every view ---------------------------------------


def risk_text(risk: Risk, rank: RankSnapshot) -> str:
    """``host memory runs out at about step 1,840 (in 231 steps, 12 min; ...): use grows ... per step``.

    Of a rank that has ended, what was known before.
    """
    level = risk_level(risk)
    grows = _memory_growth_text(rank, risk)
    if risk.steps_left is None:
        if grows:
            return f"{risk.pool} memory: {grows}, {level}"
        reason = "" if risk.cause == RiskCause.NONE else f" ({_CAUSES.get(risk.cause, risk.cause)})"
        in_use = "" if risk.pool == Pool.HOST else " in use"
        return f"{risk.pool} memory: {level}{in_use}{reason}"
    full = _full_at(rank, risk)
    if not rank.status.alive:
        return f"{risk.pool} memory: {grows}, to {level}; it was to be full at about {full}"
    details = [f"in {counted(risk.steps_left, 'step')}"]
    if rank.steps.median_seconds:
        details.append(human_seconds(risk.steps_left * rank.steps.median_seconds))
    if risk.steps_soonest is not None and risk.steps_latest is not None:
        low, high = human_count(risk.steps_soonest), human_count(risk.steps_latest)
        details += [f"between {low} and {high} steps"] if low != high else []
    forecast = f"{risk.pool} memory runs out at about {full} ({', '.join(details)})"
    # A Prometheus knows no growth where no headroom is left
    known_figures = [grows] * bool(grows) + [f"now {level}"] * (risk.used_bytes >= 0)
    return f"{forecast}: {', '.join(known_figures)}" if known_figures else forecast


def _full_at(rank: RankSnapshot, risk: Risk) -> str:
    return f"step {human_count(rank.steps.last_step + (risk.steps_left or 0))}"


def _memory_growth_text(rank: RankSnapshot, risk: Risk) -> str:
    """``use of rank 0 grows 4.0 MiB per step since step 61``; "" without growth."""
    if not risk.growth_bytes_per_step:
        return ""
    grower, ranks = _subject_of_trend(rank, risk), risk.growing_ranks
    owners = f" of {text.members_text(ranks)}" if ranks else ""
    verb = ("grow" if grower.endswith("s") else "grows") if rank.status.alive else "grew"
    start = f" since step {human_count(risk.since_step)}" if risk.since_step else ""
    return f"{grower}{owners} {verb} {human_bytes(risk.growth_bytes_per_step)} per step{start}"


_CAUSES = {
    RiskCause.STATIC: "no margin is left",
    RiskCause.SPIKE: "its largest steps, by their tail, will pass the capacity",
    RiskCause.FRAGMENTATION: "reserved and not used, and allocations had to be retried",
}
_OTHERS = "memory of others"
_TRENDS = {RiskCause.FRAGMENTATION: "memory that is reserved and not used"}


def risk_level(risk: Risk) -> str:
    """How much of a memory is in use.

    Of the host, what is available beside it: that changes with the use of other processes, so the sum is
    no limit.
    """
    if risk.pool != Pool.HOST:
        return f"{human_bytes(risk.used_bytes)} of {human_bytes(risk.capacity_bytes)}"
    free = max(0, risk.capacity_bytes - risk.used_bytes)
    available = human_bytes(free) if risk.capacity_bytes >= 0 else "n/a"
    return f"{human_bytes(risk.used_bytes)} in use by all ranks, {available} available"


def risk_headline(rank: RankSnapshot, risk: Risk, *, short: bool = False) -> str:
    """``rank 3 runs out of device memory at about step 1,840, in 12 min: ... grow 31 MiB per step``."""
    is_host = risk.pool == Pool.HOST
    if risk.steps_left is None or not rank.status.alive:
        return ("" if is_host else text.rank_prefix(rank.rank)) + risk_text(risk, rank)
    step = human_count(rank.steps.last_step + risk.steps_left)
    time = (
        text.rough_time(risk.steps_left * rank.steps.median_seconds) if rank.steps.median_seconds else ""
    )
    if short:
        owner = "host" if is_host else f"rank {rank.rank}: {risk.pool}"
        grower, rate = _subject_of_trend(rank, risk), human_bytes(risk.growth_bytes_per_step)
        return f"{owner} memory full at ~step {step}{time and f', {time}'}: {grower} +{rate}/step"
    owner = "the ranks run" if is_host else f"rank {rank.rank} runs"
    headline = f"{owner} out of {risk.pool} memory at about step {step}{time and f', in {time}'}"
    return f"{headline}: {_memory_growth_text(rank, risk)}".removesuffix(": ")  # a fleet tells no growth


def _subject_of_trend(rank: RankSnapshot, risk: Risk) -> str:
    """The subject of the trend; of growth, the role that has grown most."""
    if risk.cause != RiskCause.GROWTH:
        return _TRENDS.get(risk.cause, _OTHERS)
    grown = max(rank.memory.roles, key=lambda row: row.grown_bytes, default=None)
    if grown is None or grown.grown_bytes <= risk.grown_bytes / 2:
        return "use"
    name = grown.role.replace("_", " ")
    return name if name.endswith("state") else f"{name}s"
