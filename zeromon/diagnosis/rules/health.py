"""Ranks that died, collectives that hang, nodes that are lost. Pure."""

import re
from collections.abc import Iterable, Mapping, Sequence

from zeromon.base.units import human_count, human_ratio, human_seconds
from zeromon.diagnosis.rule import Match, rule
from zeromon.diagnosis.rules.common import OF_ITERABLE, fill_remedy, ladder_remedy
from zeromon.diagnosis.stalls import find_stalls, severity_of_pause, worst_stall
from zeromon.diagnosis.stragglers import widest_drift
from zeromon.fold.summarize import STARTS
from zeromon.memory.forecast import SAFE_LEVEL
from zeromon.readout import text
from zeromon.readout.ledger import Checkpoints, checkpoints_of, unsaved_text
from zeromon.readout.verdict import hang_text, named_ranks
from zeromon.ring.strategy import Framework
from zeromon.snapshot import Hang, Pool, RankSnapshot, RiskCause, RunSnapshot, Severity
from zeromon.snapshot.finding import Remedy
from zeromon.snapshot.focus import HOST_OOM, death_cause, first_failed, has_left, roles_of
from zeromon.snapshot.memory import KILLED_FOR_MEMORY
from zeromon.snapshot.rank import CTRL_C
from zeromon.snapshot.run import DeathRole

_MAX_STALL_PLACES = 4


@rule("ZM001", severity=Severity.CRITICAL)
def rank_died(run: RunSnapshot) -> Iterable[Match]:
    """A rank ended abnormally, and its user did not stop the run with Ctrl-C."""
    roles = roles_of(run)
    first_failure = first_failed(run.ranks, run.hangs)
    for rank in (
        run.ranks if first_failure is not None and first_failure.status.stopped != CTRL_C else ()
    ):
        if (role := roles.get(rank.rank)) is not None:
            remedy, action = None, _IF_STOPPED if role is DeathRole.STOPPED else ""
            if role is DeathRole.CULPRIT:
                remedy, action = _ladder_after_death(run, rank), _action_after_death(rank)
            severity = _SEVERITY_OF_DEATH[role]
            yield Match(_end_of(run, rank, roles), rank.rank, remedy, severity, action=action)
    failed_away = [rank for rank in run.away if rank.failed]
    for peer in failed_away:
        yield Match(f"{peer.ended} on node {peer.node}, {peer.doing}", peer.rank)


def _end_of(run: RunSnapshot, rank: RankSnapshot, roles: Mapping[int, DeathRole]) -> str:
    """How *rank* ended, and what that has to do with the ends of the others."""
    if has_left(rank):
        return text.left_text(run, rank, roles)
    cause = text.host_evidence(rank) if rank.status.ended == KILLED_FOR_MEMORY else ""
    end_step = f"after step {rank.steps.last_step}, {text.doing(rank)}"
    # Behind a sentence of the script's own, another would read as its end
    message = f"{text.error_of(rank)} {f'({end_step})' if rank.status.exception else end_step}"
    return message + (cause and f"; {cause}") + text.consequence_text(run, rank, roles)


def _ladder_after_death(run: RunSnapshot, rank: RankSnapshot) -> Remedy | None:
    """The OOM ladder where the memory of *rank* ran out; None where it only grew too far."""
    oom = rank.memory.out_of_memory
    pool = Pool.HOST if oom is None else Pool.DEVICE
    if oom is None and rank.status.ended != KILLED_FOR_MEMORY:
        return None
    if any(risk.pool == pool and risk.cause == RiskCause.GROWTH for risk in rank.memory.risks):
        return None  # a smaller model would only die later
    limit = rank.memory.host.limit_bytes if rank.memory.host is not None else -1
    need = (1 - SAFE_LEVEL) * limit if limit > 0 else None
    if oom is not None:
        need = oom.requested_bytes - max(0, oom.free_bytes)
    return ladder_remedy(run, rank, pool, need)


def _action_after_death(rank: RankSnapshot) -> str:
    """Returns the first thing to do about the end of *rank*; "" where the rule's page says as much."""
    name, cause = f"rank {rank.rank}", death_cause(rank)
    if cause == "exception":
        raised_at = _RAISED_AT.search(rank.status.exception)
        location = f"Fix {raised_at[1]}, where {name} raised it" if raised_at else "Fix what raised it"
        return f"{location}; the whole traceback is in the output of {name}."
    if cause == HOST_OOM:
        return "Let ranks hold less host memory, or give them more; report --full shows what held it."
    if cause == "SIGKILL":
        return "Find out who sent SIGKILL: a scheduler at a limit, the kernel (dmesg), or a person."
    if cause in ("SIGSEGV", "SIGBUS", "SIGILL", "SIGFPE"):
        return f"Run again with PYTHONFAULTHANDLER=1: it prints where native code of {name} crashed."
    if cause.startswith("exit code"):
        return f"Read the last lines that {name} printed: it ended itself, with {cause}."
    return ""


_RAISED_AT = re.compile(r"^\S+ at (\S+:\d+)")
"""Begin of ``ValueError at t.py:32: bad sample 4711``."""

_IF_STOPPED = (
    "Nothing, if you stopped it. Else look in the logs of launcher and scheduler for the sender."
)

_SEVERITY_OF_DEATH = {
    DeathRole.CULPRIT: Severity.CRITICAL,
    DeathRole.VICTIM: Severity.INFO,
    DeathRole.STOPPED: Severity.WARNING,
}


@rule("ZM014", severity=Severity.WARNING)
def restarted(run: RunSnapshot) -> Iterable[Match]:
    """The launcher ended all ranks and started them again."""
    failed = [attempt for attempt in run.attempts if not attempt.finished]
    if failed and (run.ranks or failed[1:]):  # else it was not started again
        prior = failed[-1]
        if prior.number > run.attempt and run.ranks:  # the ranks are those of an earlier attempt
            yield Match(text.unreported_text([a for a in failed if a.number > run.attempt]))
            return
        lost_steps = [attempt.lost_steps for attempt in failed]
        lost = "n/a" if None in lost_steps else human_count(sum(filter(None, lost_steps)))
        reason = text.death_text(prior.deaths[0]) if prior.deaths else "no rank is known to have failed"
        yield Match(
            f"attempt {run.last_attempt}; attempt {prior.number} ended after"
            f" {human_count(prior.steps)} steps: {reason}; total steps lost: {lost}"
        )


_TOO_LONG = 2.0
"""From so many times the best interval on, saves and failures together lose a quarter more time."""
_NEVER_SECONDS = 3600.0
"""Steps for so long without any checkpoint are worth a word."""
_MIN_SAVES = 3
_COSTLY = 0.05
"""The share of the time from which saves on the training thread are worth a change."""


@rule("ZM015")
def checkpoint_interval(run: RunSnapshot) -> Iterable[Match]:
    """The last checkpoint is old, or saves take much of the time, against what failures cost."""
    saves = checkpoints_of(run)
    rank = next((rank for rank in run.ranks if rank.status.alive and rank.rank == 0), None)
    if saves is None or rank is None or run.ended:  # often rank 0 alone saves
        return
    optimum, severity = (saves.best_seconds, Severity.WARNING if saves.measured else Severity.INFO)
    if optimum is None:
        if saves.unsaved_seconds > _NEVER_SECONDS and not rank.status.joined:
            yield Match(f"at risk: {unsaved_text(saves)}")
        return
    every = "of this run" if saves.measured else "assumed"
    comparison = (
        f"; at one failure per {human_seconds(saves.failure_seconds)} ({every}), saving "
        f"({human_seconds(saves.cost_seconds)}) every {human_seconds(optimum)} loses the least time"
    )
    is_costly = saves.count >= _MIN_SAVES and (saves.share or 0.0) >= _COSTLY
    if saves.unsaved_seconds > _TOO_LONG * optimum:
        evidence = f"at risk: {unsaved_text(saves)}{comparison}"
        yield Match(evidence, remedy=_save_every(saves, rank, optimum), severity=severity)
    elif is_costly and (saves.interval_seconds or optimum) * _TOO_LONG < optimum:
        evidence = f"saves take {human_ratio(saves.share)} of the time, one every "
        evidence += f"{human_seconds(saves.interval_seconds)}{comparison}"
        yield Match(evidence, remedy=_save_every(saves, rank, optimum), severity=severity)


def _save_every(saves: Checkpoints, rank: RankSnapshot, interval: float) -> Remedy:
    steps = round(interval / rank.steps.median_seconds) if rank.steps.median_seconds else None
    condition = f"step % {steps} == 0" if steps else f"seconds since the last save > {interval:.0f}"
    price = "none known" if saves.measured else "the time between failures is an assumption"
    return fill_remedy("save_every", condition=condition, price=price)


@rule("ZM002", severity=Severity.CRITICAL)
def collective_in_flight(run: RunSnapshot) -> Iterable[Match]:
    """A collective does not end; information while a missing rank is in an expected pause."""
    for hang in run.hangs:
        # A hang of 0 s was ended by its backend, with an error: ZM003 is about those
        if hang.seconds:
            severity = severity_of_pause(hang.pause, hang.seconds)
            remedy, action = _uneven_batches_remedy(run, hang), _where_to_look(run, hang)
            yield Match(hang_text(run, hang), _blamed_rank(hang), remedy, severity, action=action)


@rule("ZM003", severity=Severity.CRITICAL)
def collective_mismatch(run: RunSnapshot) -> Iterable[Match]:
    """The backend ended a collective with an error because its members called different things."""
    for hang in run.hangs:
        if not hang.seconds:
            yield Match(hang_text(run, hang), _blamed_rank(hang), _uneven_batches_remedy(run, hang))


def _uneven_batches_remedy(run: RunSnapshot, hang: Hang) -> Remedy | None:
    """Returns what lets ranks with unequal numbers of batches end an epoch; None for other causes.

    ``join`` of DDP answers its own collectives alone (torch/nn/parallel/distributed.py), so a script
    whose steps call others needs equal numbers.
    """
    concerned = {call.rank for call in hang.calls}.union(hang.waiting, hang.missing, hang.dead)
    members = [rank for rank in run.ranks if rank.rank in concerned]
    empty = [rank for rank in members if rank.training.out_of_batches]
    if not 0 < len(empty) < len(members):
        return None
    calls_own = any(not row.unit for rank in members for row in rank.communication.traffic)
    joins = empty[0].sharding_strategy.framework is Framework.DDP and not calls_own
    is_sized = empty[0].config.loader.get("sampler", OF_ITERABLE) not in ("", OF_ITERABLE)
    name = "join" if joins else "fewest_batches" if is_sized else "fewest_of_iterable"
    return fill_remedy(name, ranks=named_ranks([rank.rank for rank in empty]))


@rule("ZM016", severity=Severity.CRITICAL)
def steps_apart(run: RunSnapshot) -> Iterable[Match]:
    """Ranks have ended different numbers of steps in the same collectives."""
    drift = widest_drift(run)
    if drift is not None:
        ahead, laggard = drift.ahead, drift.behind
        ahead_step, laggard_step = ahead.steps.last_step, laggard.steps.last_step
        yield Match(
            f"{human_count(ahead_step - laggard_step)} steps ahead of rank {laggard.rank} in the same "
            f"collectives ({human_count(ahead_step)} against {human_count(laggard_step)}): gradients of "
            "different steps are mixed",
            ahead.rank,
        )


@rule("ZM013", severity=Severity.CRITICAL)
def stalled(run: RunSnapshot) -> Iterable[Match]:
    """No step ends any more, and no collective that hangs says why."""
    if any(hang.seconds for hang in run.hangs):
        return
    stalls = find_stalls(run)
    if not stalls:
        return
    step = max(stall.rank.steps.last_step for stall in stalls) + 1
    lasts = f"no step has ended for {stalls[0].seconds:.0f} s"
    if run.ended:
        lasts = f"stalled at step {human_count(step)} for {text.rough_time(stalls[0].seconds)}"
    elif not any(stall.rank.steps.recent for stall in stalls):
        lasts = f"no step has ended since the start, {stalls[0].seconds:.0f} s ago"
    by_activity: dict[tuple[str, str], list[RankSnapshot]] = {}
    for stall in stalls:
        by_activity.setdefault((stall.rank.status.pause, text.doing(stall.rank)), []).append(stall.rank)
    phrases = [_stalled_ranks_text(ranks, is_over=run.ended) for ranks in by_activity.values()]
    if len(phrases) > _MAX_STALL_PLACES:
        phrases[_MAX_STALL_PLACES:] = [f"and in {len(phrases) - _MAX_STALL_PLACES} other places"]
    top_stall, severity = worst_stall(stalls)
    blamed = -1 if len(phrases) == 1 < len(stalls) else top_stall.rank.rank
    code_lines = dict.fromkeys(
        text.script_line(s.rank.status.stack) for s in stalls if s.rank.status.stack
    )
    action = (
        f"Look at {' and '.join(list(code_lines)[:2])}: no rank goes on from there."
        if code_lines
        else ""
    )
    yield Match(f"{lasts}: {'; '.join(phrases)}", blamed, severity=severity, action=action)


def _stalled_ranks_text(ranks: Sequence[RankSnapshot], *, is_over: bool) -> str:
    """``ranks 0, 1 are in own code, at t.py:32 in main``: of ranks that do the same."""
    head, names = ranks[0], named_ranks(sorted(rank.rank for rank in ranks))
    if head.status.pause and head.status.stack and head.status.pause != STARTS:
        script_place = text.script_line(head.status.stack)
        return f"{names}{':' if ranks[1:] else ''} {head.status.pause} (at {script_place})"
    verb = ("were" if is_over else "are") if ranks[1:] else ("was" if is_over else "is")
    return f"{names} {verb} {text.doing(head)}"


def _where_to_look(run: RunSnapshot, hang: Hang) -> str:
    """Where the missing ranks of *hang* are; "" where that is not known."""
    missing = [rank for rank in run.ranks if rank.rank in hang.missing and rank.status.stack]
    if not missing or hang.pause:
        return ""
    names, verbs = (
        named_ranks([rank.rank for rank in missing]),
        ("was", "were") if run.ended else ("is", "are"),
    )
    code_lines = " and ".join(dict.fromkeys(text.script_line(rank.status.stack) for rank in missing))
    stacks = "" if run.ended else f" zeromon doctor {run.run} prints the whole stacks."
    return (
        f"Look at {code_lines}, where {names} {verbs[len(missing) > 1]} instead: all ranks of a "
        f"group must make the same calls in the same order.{stacks}"
    )


def _blamed_rank(hang: Hang) -> int:
    """A member that is missing, else one that waits; -1 where a record names none."""
    return next(iter((*hang.dead, *hang.missing, *hang.elsewhere, *hang.waiting)), -1)


@rule("ZM010", severity=Severity.CRITICAL)
def node_silent(run: RunSnapshot) -> Iterable[Match]:
    """The collector of another node no longer reports, while the run goes on here."""
    for node in run.nodes:
        if node.silent:
            final = node.first_rank + node.ranks - 1
            ranks = f"ranks {node.first_rank} to {final}" if node.ranks > 1 else f"rank {final}"
            yield Match(f"{text.node_lost(node)} ({ranks}): it is down, or the network to it is cut")


@rule("ZM011")
def nodes_apart(run: RunSnapshot) -> Iterable[Match]:
    """The collectors of the nodes do not reach each other."""
    # At the end collectors stop one after another, and no longer reach each other
    if run.nodes_note and not run.ended:
        yield Match(run.nodes_note)
