"""How ranks ended, and what their memory was before that, as text. Pure."""

from itertools import pairwise

from zeromon.focus import has_left, roles_of
from zeromon.memory.forecast import SAFE_LEVEL
from zeromon.memory.ladder import of_risk
from zeromon.memory.reconcile import unattributed_memory
from zeromon.readout.remedy import ladder_lines
from zeromon.readout.text import (
    UNATTRIBUTED_NAMES,
    consequence_text,
    death_text,
    doing,
    host_evidence,
    left_text,
)
from zeromon.report.table import column_table, table
from zeromon.snapshot import (
    CTRL_C,
    KILLED_FOR_MEMORY,
    Attempt,
    DeathRole,
    Pool,
    RankSnapshot,
    RiskCause,
    RunSnapshot,
    StepSummary,
)
from zeromon.units import human_bytes, human_count, human_ratio, human_seconds


def deaths(run: RunSnapshot) -> str:
    """How each rank ended that failed or left, and what its memory was; "" where none did."""
    lines, roles = [], roles_of(run)
    for rank in run.ranks:
        if rank.rank not in roles or rank.stopped == CTRL_C:
            continue
        if has_left(rank):
            lines.append(f"  rank {rank.rank}: {left_text(run, rank, roles)}")
            continue
        seen = f"last seen in step {rank.step + 1}, {doing(rank)}"
        lines.append(
            f"  rank {rank.rank}: {rank.ended}; {seen}{consequence_text(run, rank, roles)}"
        )
        if rank.exception:
            lines.append(f"    {rank.exception}")
        if rank.ended == KILLED_FOR_MEMORY:
            lines.append(f"    {host_evidence(rank)}")
        largest = sorted(_held(rank), reverse=True)[:3]
        if largest and (rank.ended == KILLED_FOR_MEMORY or rank.out_of_memory is not None):
            parts = ", ".join(f"{name} {human_bytes(nbytes)}" for nbytes, name in largest if nbytes)
            lines.append(f"    most of it: {parts}")
        lines += [f"    {line}" for line in (*_out_of_memory(rank), *_ladder(run, rank))]
        lines += _before_death(rank)
    return "Deaths\n" + "\n".join(lines) if lines else ""


def attempts(run: RunSnapshot) -> str:
    """The other attempts of a run whose ranks were started again, and its earlier jobs; or ""."""
    jobs = [one for one in run.attempts if one.finished]
    rows = [(str(n), _lasted(one), human_count(one.steps)) for n, one in enumerate(jobs, 1)]
    header = ("job", "lasted", "steps")
    blocks = [f"Earlier jobs of this run\n{table(header, rows)}"] if jobs else []
    if run.last_attempt > 1:
        blocks.append(_attempts(run))
    return "\n\n".join(blocks)


def _lasted(one: Attempt) -> str:
    return human_seconds(max(0.0, one.ended_wall - one.started_wall))


def _attempts(run: RunSnapshot) -> str:
    failed = [one for one in run.attempts if not one.finished]
    rows = column_table(
        failed,
        ("attempt", lambda attempt: str(attempt.number)),
        ("lasted", _lasted),
        ("steps", lambda attempt: human_count(attempt.steps)),
        ("resumed at", lambda attempt: human_count(attempt.resumed_step)),
        ("steps lost", lambda attempt: human_count(attempt.lost_steps)),
    )
    lines = [rows] if failed else []
    if any(attempt.lost_steps is None for attempt in failed):
        lines.append("  n/a: the optimizer keeps no count of its steps that the agent can read")
    for attempt in failed:
        culprits = [death for death in attempt.deaths if death.role is DeathRole.CULPRIT]
        told = [death_text(death) for death in (culprits or attempt.deaths)[:_MOST_DEATHS]]
        why = "; ".join(told) or "no rank is known to have failed"
        lines.append(f"  attempt {attempt.number} ended: {why}")
    seen = sorted({run.attempt, *(attempt.number for attempt in failed)})
    for before, after in pairwise((0, *seen, max(run.restarting, seen[-1]))):
        if after - before > 1:
            unseen = f"{before + 1} to {after - 1}" if after - before > 2 else f"{after - 1}"
            lines.append(f"  attempt {unseen} ended before a rank reported")
    return "\n".join(("Other attempts", *lines))


_MOST_DEATHS = 3


def _held(rank: RankSnapshot) -> list[tuple[int, str]]:
    """(bytes, what) of a rank, where its memory ran out: the device's roles, or the host's."""
    place = "host" if rank.out_of_memory is None else "device"
    roles = [(getattr(row, f"{place}_bytes"), row.role.replace("_", " ")) for row in rank.roles]
    rest = [
        (r.nbytes, UNATTRIBUTED_NAMES[r.kind])
        for r in unattributed_memory(rank)
        if r.place == place
    ]
    return roles + rest


def _out_of_memory(rank: RankSnapshot) -> list[str]:
    """The report of the allocator when it failed."""
    oom = rank.out_of_memory
    if oom is None:
        return []
    lines = [
        f"asked for {human_bytes(oom.requested_bytes)}; {human_bytes(oom.free_bytes)} of "
        f"{human_bytes(oom.total_bytes)} were free on the device"
    ]
    if oom.largest_block_bytes >= 0:
        lines[0] += f", the largest block in the cache was {human_bytes(oom.largest_block_bytes)}"
    memory = rank.memory
    if memory is not None and memory.reserved_bytes > 0:
        slack = max(0, memory.reserved_bytes - memory.allocated_bytes)
        lines.append(
            f"reserved and not allocated at the last sample: {human_bytes(slack)} "
            f"({human_ratio(slack / memory.reserved_bytes)} of what was reserved)"
        )
    return lines


def _ladder(run: RunSnapshot, rank: RankSnapshot) -> list[str]:
    """The OOM ladder where the memory of *rank* ran out; none where it only grew too far."""
    oom = rank.out_of_memory
    pool = Pool.HOST if oom is None else Pool.DEVICE
    if oom is None and rank.ended != KILLED_FOR_MEMORY:
        return []
    if any(risk.pool == pool and risk.cause == RiskCause.GROWTH for risk in rank.risks):
        return []  # a smaller model would only die later
    limit = rank.host.limit_bytes if rank.host is not None else -1
    need = (1 - SAFE_LEVEL) * limit if limit > 0 else None
    if oom is not None:
        need = oom.requested_bytes - max(0, oom.free_bytes)
    rungs = of_risk(run, pool, need)
    return ["what frees memory, cheapest first:", *ladder_lines(rungs)] if rungs else []


_LOOK_BACK_SECONDS = (300, 60, 30, 10, 3, 0)


def _before_death(rank: RankSnapshot) -> list[str]:
    """The memory of the rank in the time before its death."""
    if not rank.recent:
        return []
    end = max(rank.last_event_ns, rank.recent[-1].end_ns)
    shown: dict[int, StepSummary] = {}
    for seconds in _LOOK_BACK_SECONDS:
        before = [s for s in rank.recent if end - s.end_ns >= seconds * 1e9]
        if before:
            shown[before[-1].step] = before[-1]
    if len(shown) < 2:
        return []
    rows = column_table(
        shown.values(),
        ("before", lambda step: f"-{(end - step.end_ns) / 1e9:.1f} s"),
        ("step", lambda step: human_count(step.step)),
        ("RSS", lambda step: human_bytes(step.rss_bytes)),
        ("allocated", lambda step: human_bytes(n) if (n := step.allocated_bytes) >= 0 else "-"),
        ("reserved", lambda step: human_bytes(n) if (n := step.reserved_bytes) >= 0 else "-"),
    )
    return [f"  {line}" for line in rows.splitlines()]
