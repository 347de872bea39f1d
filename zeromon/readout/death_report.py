"""How ranks ended, and what their memory was before that, as text. Pure."""

import re
from itertools import pairwise

from zeromon.base.units import human_bytes, human_count, human_ratio, human_seconds
from zeromon.readout import text
from zeromon.readout.figures import BYTES, COUNT
from zeromon.readout.remedy import ladder_lines
from zeromon.readout.tables import Column, aligned_table, role_lines, text_table
from zeromon.snapshot import RankSnapshot, RunSnapshot, StepSummary
from zeromon.snapshot.focus import has_left, roles_of
from zeromon.snapshot.memory import KILLED_FOR_MEMORY
from zeromon.snapshot.rank import CTRL_C
from zeromon.snapshot.run import Attempt, DeathRole


def deaths(run: RunSnapshot) -> str:
    """How each rank ended that failed or left, and what its memory was; "" where none did."""
    rows, roles = [], roles_of(run)
    first_with: dict[str, int] = {}
    for rank in run.ranks:
        if rank.rank not in roles or rank.status.stopped == CTRL_C:
            continue
        if has_left(rank):
            rows.append(f"  rank {rank.rank}: {text.left_text(run, rank, roles)}")
            continue
        last_seen = f"last seen in step {rank.steps.last_step + 1}, {text.doing(rank)}"
        rows.append(
            f"  rank {rank.rank}: {rank.status.ended}; {last_seen}"
            + text.consequence_text(run, rank, roles)
        )
        details = [f"    {rank.status.exception}"] if rank.status.exception else []
        if rank.status.ended == KILLED_FOR_MEMORY:
            details.append(f"    {text.host_evidence(rank)}")
        largest = sorted(_held_memory_rows(rank), reverse=True)[:3] if rank.memory.roles else []
        if largest and (rank.status.ended == KILLED_FOR_MEMORY or rank.memory.out_of_memory is not None):
            items = ", ".join(f"{name} {human_bytes(nbytes)}" for nbytes, name in largest if nbytes)
            details.append(f"    most of it: {items}")
        details += [f"    {detail}" for detail in (*_out_of_memory(rank), *_ladder_of_death(run, rank))]
        # Ranks of one model mostly run out alike: eight times the same page hides what differs
        explained_rank = first_with.setdefault(re.sub(r"GPU \d+ ", "", "\n".join(details)), rank.rank)
        is_repeated = details and explained_rank != rank.rank
        rows += [f"    like rank {explained_rank}"] if is_repeated else details
        rows += _memory_before_death(rank)
    is_stopped = all(rank.status.stopped for rank in run.ranks if rank.rank in roles)
    sender = ": the launcher, the scheduler or a user sent the signals" * is_stopped
    return "\n".join((f"{'Ends' if is_stopped else 'Deaths'}{sender}", *rows)) if rows else ""


def attempt_block(run: RunSnapshot) -> str:
    """The other attempts of a run whose ranks were started again, and its earlier jobs; or ""."""
    jobs = [job for job in run.attempts if job.finished]
    rows = [(str(n), _attempt_time(job), human_count(job.steps)) for n, job in enumerate(jobs, 1)]
    header = ("job", "lasted", "steps")
    blocks = [f"Earlier jobs of this run\n{aligned_table(header, rows)}"] if jobs else []
    if run.last_attempt > 1:
        blocks.append(_other_attempts_block(run))
    return "\n\n".join(blocks)


def _attempt_time(attempt: Attempt) -> str:
    return human_seconds(max(0.0, attempt.ended_wall - attempt.started_wall))


def _other_attempts_block(run: RunSnapshot) -> str:
    failed = [attempt for attempt in run.attempts if not attempt.finished]
    rows = text_table(
        failed,
        Column("attempt", lambda attempt: str(attempt.number)),
        Column("lasted", _attempt_time),
        Column("steps", lambda attempt: attempt.steps, COUNT),
        Column("resumed at", lambda attempt: attempt.resumed_step, COUNT),
        Column("steps lost", lambda attempt: attempt.lost_steps, COUNT),
    )
    blocks = [rows] if failed else []
    if any(attempt.lost_steps is None for attempt in failed):
        blocks.append("  n/a: the optimizer keeps no count of its steps that the agent can read")
    for attempt in failed:
        culprits = [death for death in attempt.deaths if death.role is DeathRole.CULPRIT]
        sentences = [text.death_text(death) for death in (culprits or attempt.deaths)[:_MAX_DEATHS]]
        reason = "; ".join(sentences) or "no rank is known to have failed"
        blocks.append(f"  attempt {attempt.number} ended: {reason}")
    numbers = sorted({run.attempt, *(attempt.number for attempt in failed)})
    for previous, number in pairwise((0, *numbers, max(run.restarting, numbers[-1]))):
        if number - previous > 1:
            unseen = f"{previous + 1} to {number - 1}" if number - previous > 2 else f"{number - 1}"
            blocks.append(f"  attempt {unseen} ended before a rank reported")
    return "\n".join(("Other attempts", *blocks))


_MAX_DEATHS = 3


def _held_memory_rows(rank: RankSnapshot) -> list[tuple[int, str]]:
    """(bytes, what) of a rank, where its memory ran out: the device's roles, or the host's.

    What is reserved and not allocated is known of a sample after the failed allocation only.
    """
    tier = "host" if rank.memory.out_of_memory is None else "device"
    of_sample = text.UNATTRIBUTED_NAMES["reserved_unallocated"]
    return [(row.tiers.get(tier, 0), row.name) for row in role_lines(rank) if row.name != of_sample]


def _out_of_memory(rank: RankSnapshot) -> list[str]:
    oom = rank.memory.out_of_memory
    if oom is None:
        return []
    notes = [
        f"asked for {human_bytes(oom.requested_bytes)}{oom.phase and f' in {oom.phase}'}; "
        f"{human_bytes(oom.free_bytes)} of {human_bytes(oom.total_bytes)} were free on the device"
    ]
    if oom.largest_block_bytes >= 0:
        notes[0] += f", the largest block in the cache was {human_bytes(oom.largest_block_bytes)}"
    memory = rank.memory.device
    if memory is not None and memory.reserved_bytes > 0:
        slack = max(0, memory.reserved_bytes - memory.allocated_bytes)
        notes.append(
            f"reserved and not allocated at the last sample: {human_bytes(slack)} "
            f"({human_ratio(slack / memory.reserved_bytes)} of what was reserved)"
        )
    return notes


def _ladder_of_death(run: RunSnapshot, rank: RankSnapshot) -> list[str]:
    """The OOM ladder of the finding about the end of *rank*."""
    remedies = (f.remedy for f in run.findings if f.rule == "rank_died" and f.rank == rank.rank)
    rungs = [rung for remedy in remedies if remedy is not None for rung in remedy.rungs]
    return ["what frees memory, cheapest first:", *ladder_lines(rungs)] if rungs else []


_LOOK_BACK_SECONDS = (300, 60, 30, 10, 3, 0)


def _memory_before_death(rank: RankSnapshot) -> list[str]:
    if not rank.steps.recent:
        return []
    # The rank may have lived long after its last whole step
    death_ns = max(rank.status.last_event_ns, rank.steps.recent[-1].end_ns)
    steps: dict[int, StepSummary] = {}
    for seconds in _LOOK_BACK_SECONDS:
        earlier = [s for s in rank.steps.recent if death_ns - s.end_ns >= seconds * 1e9]
        if earlier:
            steps[earlier[-1].step] = earlier[-1]
    if len(steps) < 2:
        return []
    rows = text_table(
        steps.values(),
        Column("before", lambda step: f"-{(death_ns - step.end_ns) / 1e9:.1f} s"),
        Column("step", lambda step: step.step, COUNT),
        Column("RSS", lambda step: step.rss_bytes, BYTES),
        Column("allocated", lambda step: human_bytes(n) if (n := step.allocated_bytes) >= 0 else "-"),
        Column("reserved", lambda step: human_bytes(n) if (n := step.reserved_bytes) >= 0 else "-"),
    )
    return [f"  {row}" for row in rows.splitlines()]
