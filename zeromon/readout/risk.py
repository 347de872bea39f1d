"""Sentences about memory that runs out, for every view. Pure."""

from zeromon.readout.text import members_text, roughly, subject
from zeromon.snapshot import Pool, RankSnapshot, Risk, RiskCause
from zeromon.units import human_bytes, human_count, human_seconds


def risk_text(risk: Risk, rank: RankSnapshot) -> str:
    """``host memory runs out at about step 1,840 (in 231 steps, 12 min; ...): use grows ... per step``.

    Of a rank that has ended, what was known before.
    """
    level = risk_level(risk)
    grows = _growth_text(rank, risk)
    if risk.steps_left is None:
        if grows:
            return f"{risk.pool} memory: {grows}, {level}"
        why = "" if risk.cause == RiskCause.NONE else f" ({_CAUSES.get(risk.cause, risk.cause)})"
        in_use = "" if risk.pool == Pool.HOST else " in use"
        return f"{risk.pool} memory: {level}{in_use}{why}"
    full = f"step {human_count(rank.step + risk.steps_left)}"
    if not rank.alive:
        return f"{risk.pool} memory: {grows}, to {level}; it was to be full at about {full}"
    details = [f"in {human_count(risk.steps_left)} steps"]
    if rank.step_seconds:
        details.append(human_seconds(risk.steps_left * rank.step_seconds))
    if risk.steps_soonest is not None and risk.steps_latest is not None:
        soonest, latest = human_count(risk.steps_soonest), human_count(risk.steps_latest)
        details.append(f"between {soonest} and {latest} steps")
    text = f"{risk.pool} memory runs out at about {full} ({', '.join(details)})"
    return f"{text}: {grows}, now {level}"


def _growth_text(rank: RankSnapshot, risk: Risk) -> str:
    """``use of rank 0 grows 4.0 MiB per step since step 61``; "" without growth."""
    if not risk.growth_bytes_per_step:
        return ""
    what, ranks = _growing(rank, risk), risk.growing_ranks
    whose = f" of {members_text(ranks)}" if ranks else ""
    verb = ("grow" if what.endswith("s") else "grows") if rank.alive else "grew"
    since = f" since step {human_count(risk.since_step)}" if risk.since_step else ""
    return f"{what}{whose} {verb} {human_bytes(risk.growth_bytes_per_step)} per step{since}"


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
    left = max(0, risk.capacity_bytes - risk.used_bytes)
    available = human_bytes(left) if risk.capacity_bytes >= 0 else "n/a"
    return f"{human_bytes(risk.used_bytes)} in use by all ranks, {available} available"


def risk_headline(rank: RankSnapshot, risk: Risk, *, short: bool = False) -> str:
    """``rank 3 runs out of device memory at about step 1,840, in 12 min: ... grow 31 MiB per step``."""
    is_host = risk.pool == Pool.HOST
    if risk.steps_left is None or not rank.alive:
        return ("" if is_host else subject(rank.rank)) + risk_text(risk, rank)
    step = human_count(rank.step + risk.steps_left)
    time = roughly(risk.steps_left * rank.step_seconds) if rank.step_seconds else ""
    if short:
        who = "host" if is_host else f"rank {rank.rank}: {risk.pool}"
        what, rate = _growing(rank, risk), human_bytes(risk.growth_bytes_per_step)
        return f"{who} memory full at ~step {step}{time and f', {time}'}: {what} +{rate}/step"
    who = "the ranks run" if is_host else f"rank {rank.rank} runs"
    text = f"{who} out of {risk.pool} memory at about step {step}{time and f', in {time}'}"
    return f"{text}: {_growth_text(rank, risk)}"


def _growing(rank: RankSnapshot, risk: Risk) -> str:
    """What the trend is of; of growth, the role that has grown most."""
    if risk.cause != RiskCause.GROWTH:
        return _TRENDS.get(risk.cause, _OTHERS)
    grown = max(rank.roles, key=lambda row: row.grown_bytes, default=None)
    if grown is None or grown.grown_bytes <= risk.grown_bytes / 2:
        return "use"
    name = grown.role.replace("_", " ")
    return name if name.endswith("state") else f"{name}s"
