"""How ranks and runs ended, in words. Pure."""

from __future__ import annotations

from zeromon.focus import has_left, roles_of
from zeromon.snapshot import Death, DeathRole, RankSnapshot, RunSnapshot
from zeromon.units import human_bytes, human_count


def end_text(run: RunSnapshot, first: RankSnapshot) -> str:
    """How the run was stopped, or which rank ended it and how many died of that."""
    roles = roles_of(run)
    if roles[first.rank] is DeathRole.STOPPED:
        return f"stopped by {first.stopped} after step {first.step}"
    culprits = sum(role is DeathRole.CULPRIT for role in roles.values())
    victims = [rank for rank, role in roles.items() if role is DeathRole.VICTIM]
    more = f" (and {culprits - 1} more)" if culprits > 1 else ""
    died_of_it = ""
    if run.fleet is not None and run.fleet.failed > culprits:
        died_of_it = f"; {human_count(run.fleet.failed - culprits)} died of it"
    elif victims:
        named = f"rank {victims[0]}" if len(victims) == 1 else f"{len(victims)} ranks"
        died_of_it = f"; {named} died of it"
    if has_left(first):
        how = f"left after step {first.step} ({exit_text(first)})"
        return f"died: rank {first.rank}{more} {how}{died_of_it}"
    return f"died: rank {first.rank}{more}, {first.ended}, after step {first.step}{died_of_it}"


def exit_text(rank: RankSnapshot) -> str:
    """How a rank ended that left without an error; the kernel may not tell the exit code."""
    return "exit code 0" if rank.ended == "finished" else "without an error"


def death_text(death: Death) -> str:
    """``rank 1, exception, ValueError: boom``: how a rank of an earlier attempt ended."""
    parts = (f"rank {death.rank}", death.ended, death.exception)
    return ", ".join(part for part in parts if part)


def host_evidence(rank: RankSnapshot) -> str:
    """What the kernel counted and what the rank held when the kernel killed it for memory."""
    host = rank.host
    if host is None:
        return ""
    where = f"cgroup {host.cgroup}" if host.cgroup and host.oom_kills >= 0 else "machine"
    times = "one such kill" if host.kills_at_end == 1 else f"{host.kills_at_end} such kills"
    text = f"the {where} counted {times} then; this rank held {human_bytes(rank.rss_bytes)}"
    return f"{text} of a limit of {human_bytes(host.limit_bytes)}" if host.limit_bytes > 0 else text
