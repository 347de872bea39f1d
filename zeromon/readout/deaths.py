"""How ranks and runs ended, in words. Pure."""

from collections.abc import Mapping, Sequence

from zeromon.focus import has_left, roles_of
from zeromon.snapshot import Death, DeathRole, RankSnapshot, RunSnapshot
from zeromon.units import human_bytes, human_count

_MAX_LISTED_RANKS = 4


def end_text(run: RunSnapshot, first: RankSnapshot) -> str:
    """How the run was stopped, or which rank ended it and how many died of that."""
    roles = roles_of(run)
    if roles[first.rank] is DeathRole.STOPPED:
        return f"{ended_text(first)} after step {human_count(first.step)}"
    if roles[first.rank] is DeathRole.VICTIM and run.unread:
        end = f"rank {first.rank} ended after step {human_count(first.step)} ({error_of(first)})"
        return f"died: cause unknown, the record of {numbered(run.unread)} is lost; {end}"
    culprits = [rank for rank in run.ranks if roles.get(rank.rank) is DeathRole.CULPRIT]
    alike = sum(rank.ended == first.ended for rank in culprits)
    more = f" (and {alike - 1} more)" if alike > 1 else ""
    name = first.ended if first.ended != "exception" else error_of(first).split()[0].rstrip(":")
    how = f", {name}, after step {human_count(first.step)}"
    if has_left(first):
        how = f" left after step {human_count(first.step)} ({exit_text(first)})"
    others = [rank.rank for rank in culprits if rank.ended != first.ended]
    victims = [rank for rank, role in roles.items() if role is DeathRole.VICTIM]
    count = len(victims) if run.fleet is None else run.fleet.failed - len(culprits)
    parts = [f"died: rank {first.rank}{more}{how}"]
    parts += [f"{numbered(others)} failed, too"] if others else []
    if count > 0:
        named = numbered(victims) if count == len(victims) else f"{human_count(count)} ranks"
        parts.append(f"{named} died of it")
    return "; ".join(parts)


def error_of(rank: RankSnapshot) -> str:
    """How *rank* ended: ``SIGKILL``, or its exception: ``ValueError at t.py:32: bad sample 4711``."""
    text = rank.exception if rank.ended == "exception" else ""
    return f"{text[:_MAX_ERROR]}..." if len(text) > _MAX_ERROR else text or rank.ended


_MAX_ERROR = 160


def ended_text(rank: RankSnapshot) -> str:
    """How *rank* ended, in a word or two: ``SIGKILL``, ``stopped by Ctrl-C``."""
    return f"stopped by {rank.stopped}" if rank.stopped else rank.ended


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


def left_text(run: RunSnapshot, rank: RankSnapshot, roles: Mapping[int, DeathRole]) -> str:
    """``left after step 60 (exit code 0) while rank 1 trained in step 61``."""
    victims = [other for other in run.ranks if roles.get(other.rank) is DeathRole.VICTIM]
    step = human_count(max((other.step for other in victims), default=0) + 1)
    others = numbered([other.rank for other in victims])
    how = f"left after step {human_count(rank.step)} ({exit_text(rank)})"
    return f"{how} while {others} trained in step {step}"


def consequence_text(run: RunSnapshot, rank: RankSnapshot, roles: Mapping[int, DeathRole]) -> str:
    """``; it died of rank 0`` of a victim; "" of any other rank."""
    if roles.get(rank.rank) is not DeathRole.VICTIM:
        return ""
    culprits = [other for other, role in roles.items() if role is DeathRole.CULPRIT]
    if culprits:
        return f"; it died of {numbered(culprits)}"
    if run.unread:
        return f"; the record of {numbered(run.unread)} is lost, and may have the cause"
    return "; another rank had failed"


def unread_text(run: RunSnapshot) -> str:
    """``the record of rank 0 cannot be read: what it does, and how it ended, is unknown``."""
    known = "what it does, and how it ended, is unknown"
    return f"the record of {numbered(run.unread)} cannot be read: {known}"


def numbered(ranks: Sequence[int]) -> str:
    """``rank 1``, ``ranks 1, 2, 3, 4 and 9 more``."""
    more = len(ranks) - _MAX_LISTED_RANKS
    listed = ", ".join(map(str, ranks[:_MAX_LISTED_RANKS]))
    return f"rank{'s' * (len(ranks) > 1)} {listed}{f' and {more} more' if more > 0 else ''}"
