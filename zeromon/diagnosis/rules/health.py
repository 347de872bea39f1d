"""Ranks that died, collectives that hang, nodes that are lost. Pure."""

from collections.abc import Iterable, Mapping, Sequence

from zeromon.diagnosis.rule import Match, rule
from zeromon.diagnosis.rules.common import ASYNC_SAVE
from zeromon.diagnosis.stalls import severity_of_pause, stalls, worst_stall
from zeromon.diagnosis.stragglers import widest_drift
from zeromon.focus import first_failed, has_left, roles_of
from zeromon.fold.pauses import STARTS
from zeromon.readout.hang import hang_text, named_ranks
from zeromon.readout.ledger import Checkpoints, checkpoints, unsaved_text
from zeromon.readout.text import (
    consequence_text,
    death_text,
    doing,
    error_of,
    host_evidence,
    left_text,
    node_lost,
    roughly,
    script_line,
)
from zeromon.snapshot import (
    CTRL_C,
    KILLED_FOR_MEMORY,
    ConfigFormat,
    DeathRole,
    Hang,
    RankSnapshot,
    Remedy,
    RunSnapshot,
    Severity,
)
from zeromon.units import human_count, human_ratio, human_seconds

_MOST_STALLED = 4


@rule("ZM001", severity=Severity.CRITICAL)
def rank_died(run: RunSnapshot) -> Iterable[Match]:
    """A rank ended abnormally, and its user did not stop the run with Ctrl-C."""
    roles = roles_of(run)
    first = first_failed(run.ranks, run.hangs)
    for rank in run.ranks if first is not None and first.stopped != CTRL_C else ():
        if (role := roles.get(rank.rank)) is not None:
            yield Match(_end_of(run, rank, roles), rank.rank, severity=_SEVERITY_OF_DEATH[role])
    away = [rank for rank in run.away if rank.failed]
    for other in away:
        yield Match(f"{other.ended} on node {other.node}, {other.doing}", other.rank)


def _end_of(run: RunSnapshot, rank: RankSnapshot, roles: Mapping[int, DeathRole]) -> str:
    """How *rank* ended, and what that has to do with the ends of the others."""
    if has_left(rank):
        return left_text(run, rank, roles)
    why = host_evidence(rank) if rank.ended == KILLED_FOR_MEMORY else ""
    text = f"{error_of(rank)} after step {rank.step}, {doing(rank)}{why and f'; {why}'}"
    return text + consequence_text(run, rank, roles)


_SEVERITY_OF_DEATH = {
    DeathRole.CULPRIT: Severity.CRITICAL,
    DeathRole.VICTIM: Severity.INFO,
    DeathRole.STOPPED: Severity.WARNING,
}


@rule("ZM014", severity=Severity.WARNING)
def restarted(run: RunSnapshot) -> Iterable[Match]:
    """The launcher ended all ranks and started them again."""
    failed = [attempt for attempt in run.attempts if not attempt.finished]
    if failed:
        last = failed[-1]
        known = [attempt.lost_steps for attempt in failed]
        lost = "n/a" if None in known else human_count(sum(filter(None, known)))
        why = death_text(last.deaths[0]) if last.deaths else "no rank is known to have failed"
        yield Match(
            f"attempt {run.last_attempt}; attempt {last.number} ended after"
            f" {human_count(last.steps)} steps: {why}; steps lost in all: {lost}"
        )


_TOO_LONG = 2.0
"""From so many times the best interval on, saves and failures together lose a quarter more time."""
_NEVER_SECONDS = 3600.0
"""Steps for so long without any checkpoint are worth a word."""
_LEAST_SAVES = 3
_COSTLY = 0.05
"""The share of the time from which saves on the training thread are worth a change."""


@rule("ZM015")
def checkpoint_interval(run: RunSnapshot) -> Iterable[Match]:
    """The last checkpoint is old, or saves take much of the time, against what failures cost."""
    found = checkpoints(run)
    rank = next((rank for rank in run.ranks if rank.alive and rank.rank == 0), None)
    if found is None or rank is None or run.ended:  # often rank 0 alone saves
        return
    best, severity = found.best_seconds, Severity.WARNING if found.measured else Severity.INFO
    if best is None:
        if found.unsaved_seconds > _NEVER_SECONDS and not rank.joined:
            yield Match(f"at risk: {unsaved_text(found)}")
        return
    every = "of this run" if found.measured else "assumed"
    why = (
        f"; with a failure every {human_seconds(found.failure_seconds)} ({every}), a save of "
        f"{human_seconds(found.cost_seconds)} every {human_seconds(best)} loses least"
    )
    is_costly = found.count >= _LEAST_SAVES and (found.share or 0.0) >= _COSTLY
    if found.unsaved_seconds > _TOO_LONG * best:
        text = f"at risk: {unsaved_text(found)}{why}"
        yield Match(text, remedy=_save_every(found, rank, best), severity=severity)
    elif is_costly and (found.interval_seconds or best) * _TOO_LONG < best:
        text = f"saves take {human_ratio(found.share)} of the time, one every "
        text += f"{human_seconds(found.interval_seconds)}{why}"
        yield Match(text, remedy=_save_every(found, rank, best), severity=severity)


def _save_every(found: Checkpoints, rank: RankSnapshot, best: float) -> Remedy:
    steps = round(best / rank.step_seconds) if rank.step_seconds else None
    when = f"step % {steps} == 0" if steps else f"seconds since the last save > {best:.0f}"
    return Remedy(
        cause="the interval between checkpoints is far from the square root of 2 x cost of a save x "
        "time between failures (Young 1974)",
        dialect=ConfigFormat.PYTHON,
        diff=f"+ savers = torch.distributed.new_group(backend='gloo')  # once\n"
        f"+ if {when}:\n+     {ASYNC_SAVE}",
        effect="saves and steps taken again together cost least; async_save writes in the background",
        price="none known" if found.measured else "the time between failures is an assumption",
    )


@rule("ZM002", severity=Severity.CRITICAL)
def collective_in_flight(run: RunSnapshot) -> Iterable[Match]:
    """A collective does not end; information while a missing rank is in an expected pause."""
    for hang in run.hangs:
        if hang.seconds:
            severity = severity_of_pause(hang.pause, hang.seconds)
            yield Match(hang_text(run, hang), _blamed(hang), severity=severity)


@rule("ZM003", severity=Severity.CRITICAL)
def collective_mismatch(run: RunSnapshot) -> Iterable[Match]:
    """The backend ended a collective with an error because its members called different things."""
    for hang in run.hangs:
        if not hang.seconds:
            yield Match(hang_text(run, hang), _blamed(hang))


@rule("ZM016", severity=Severity.CRITICAL)
def steps_apart(run: RunSnapshot) -> Iterable[Match]:
    """Ranks have ended different numbers of steps in the same collectives."""
    drift = widest_drift(run)
    if drift is not None:
        ahead, behind = drift.ahead, drift.behind
        yield Match(
            f"{human_count(ahead.step - behind.step)} steps ahead of rank {behind.rank} in the same "
            f"collectives ({human_count(ahead.step)} against {human_count(behind.step)}): gradients of "
            "different steps are mixed",
            ahead.rank,
        )


@rule("ZM013", severity=Severity.CRITICAL)
def stalled(run: RunSnapshot) -> Iterable[Match]:
    """No step ends any more, and no collective that hangs says why."""
    if any(hang.seconds for hang in run.hangs):
        return
    found = stalls(run)
    if not found:
        return
    step = max(stall.rank.step for stall in found) + 1
    lasts = f"no step has ended for {found[0].seconds:.0f} s"
    if run.ended:
        lasts = f"stalled at step {human_count(step)} for {roughly(found[0].seconds)}"
    elif not any(stall.rank.recent for stall in found):
        lasts = f"no step has ended since the start, {found[0].seconds:.0f} s ago"
    places: dict[tuple[str, str], list[RankSnapshot]] = {}
    for stall in found:
        places.setdefault((stall.rank.pause, doing(stall.rank)), []).append(stall.rank)
    told = [_stalled_at(ranks, is_over=run.ended) for ranks in places.values()]
    if len(told) > _MOST_STALLED:
        told[_MOST_STALLED:] = [f"and in {len(told) - _MOST_STALLED} other places"]
    worst, severity = worst_stall(found)
    blamed = -1 if len(told) == 1 < len(found) else worst.rank.rank
    yield Match(f"{lasts}: {'; '.join(told)}", blamed, severity=severity)


def _stalled_at(ranks: Sequence[RankSnapshot], *, is_over: bool) -> str:
    """``ranks 0, 1 are between phases, at t.py:32 in main``: of ranks that do the same."""
    first, who = ranks[0], named_ranks(sorted(rank.rank for rank in ranks))
    if first.pause and first.stack and first.pause != STARTS:
        return f"{who}{':' if ranks[1:] else ''} {first.pause} (at {script_line(first.stack)})"
    verb = ("were" if is_over else "are") if ranks[1:] else ("was" if is_over else "is")
    return f"{who} {verb} {doing(first)}"


def _blamed(hang: Hang) -> int:
    """A member that is missing, else one that waits; -1 where a record names none."""
    return next(iter((*hang.dead, *hang.missing, *hang.elsewhere, *hang.waiting)), -1)


@rule("ZM010", severity=Severity.CRITICAL)
def node_silent(run: RunSnapshot) -> Iterable[Match]:
    """The collector of another node no longer reports, while the run goes on here."""
    for node in run.nodes:
        if node.silent:
            last = node.first_rank + node.ranks - 1
            ranks = f"ranks {node.first_rank} to {last}" if node.ranks > 1 else f"rank {last}"
            yield Match(f"{node_lost(node)} ({ranks}): it is down, or the network to it is cut")


@rule("ZM011")
def nodes_apart(run: RunSnapshot) -> Iterable[Match]:
    """The collectors of the nodes do not reach each other."""
    if run.nodes_note and not run.ended:
        yield Match(run.nodes_note)
