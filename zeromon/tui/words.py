"""The lines of words at the top: which run, how it is, what threatens it. Pure."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from statistics import median

from zeromon.advice import risk_in_words
from zeromon.expected import read_facts
from zeromon.report import first_of, verdict
from zeromon.snapshot import RankSnapshot, Risk, RunSnapshot
from zeromon.tui.line import Line, clean
from zeromon.tui.look import Look
from zeromon.units import human_bytes, human_count, human_ratio, human_seconds

_FLOPS_A_PARAMETER = 6
"""Forward 2, backward 4 a parameter and token; attention is left out."""


def level(ratio: float | None, warn: float, bad: float) -> str:
    """The tone of a ratio where more is worse."""
    if ratio is None:
        return "dim"
    return "bad" if ratio >= bad else "warn" if ratio >= warn else "good"


def head(run: RunSnapshot) -> Line:
    """Which run, on what, how far."""
    failed = any(rank.failed for rank in run.ranks) or bool(run.fleet and run.fleet.failed)
    sign, tone = ("✖", "bad") if failed else ("■", "dim") if run.ended else ("●", "good")
    line: Line = [(" zeromon ", "badge"), (f" {clean(run.run)} ", "bold"), (f" {sign} ", tone)]
    line.append((clean(verdict(run)), tone if failed else ""))
    if run.ranks:
        first = run.ranks[0]
        fleet = run.fleet
        seen = fleet.ranks - fleet.silent if fleet is not None else len(run.ranks)
        count = f"{human_count(seen)} of {human_count(first.world_size)} ranks"
        if seen == first.world_size:
            count = f"{human_count(first.world_size)} rank{'s' * (first.world_size != 1)}"
        facts = [first.strategy, count, f"on {run.node}", first.device.partition(":")[0]]
        line.append(("  " + " · ".join(clean(fact) for fact in facts if fact), "dim"))
    return line


def worst_risk(ranks: Sequence[RankSnapshot]) -> tuple[RankSnapshot, Risk] | None:
    """The rank and the memory that are closest to the end."""
    pairs = [(rank, risk) for rank in ranks for risk in rank.risks]
    return max(pairs, key=lambda pair: pair[1].ratio, default=None)


def risk(run: RunSnapshot, width: int = 200) -> Line:
    """What is most worth knowing, as one sentence that fits."""
    dead = [rank for rank in run.ranks if rank.failed]
    if dead:
        first = first_of(dead).rank
        grave = [f for f in run.findings if f.severity == "critical"]
        gravest = next((f for f in grave if f.rank == first), grave[0] if grave else None)
        text = gravest.text if gravest else verdict(run)
        who = f"rank {gravest.rank}: " if gravest and gravest.rank >= 0 else ""
        return [(" ✖ ", "bad"), (clean(who + text), "bad")]
    if run.hangs:
        hang = run.hangs[0]
        waiting = len(hang.waiting) if run.fleet is None else run.fleet.waiting
        text = f"{hang.op} in {hang.group} does not end: {human_count(waiting)} wait"
        if hang.missing:
            text += f", rank {', '.join(map(str, hang.missing[:4]))} has not come"
        unheard = [node.node for node in run.nodes if node.silent]
        if unheard:
            text += f", node {', '.join(unheard[:3])} is not heard"
        return [(" ✖ ", "bad"), (clean(text), "bad")]
    silent = [rank for rank in run.ranks if rank.silent]
    if silent and not run.ended:
        return [(" ▲ ", "warn"), (clean(silence(run, silent)), "warn")]
    worst = worst_risk(run.ranks)
    if worst is not None and (worst[1].ratio >= 0.5 or worst[1].steps_left is not None):
        tone = level(worst[1].ratio, 0.5, 0.8)
        text = danger(*worst)
        text = text if len(text) + 3 <= width else danger(*worst, short=True)
        return [(" ▲ " if tone != "good" else " · ", tone), (text, tone if tone != "good" else "")]
    if not run.ranks:
        return [(f" · {clean(run.note) or 'waiting for the first rank'}", "dim")]
    known = highest(run.ranks, lambda rank: rank.exposed_ratio)
    calm = f"exposed communication {human_ratio(known)} of a step" if known is not None else ""
    if worst is None and run.ended:  # nothing is at risk any more
        return [(" · ", "dim"), (calm or "nothing is known of its communication", "dim")]
    if worst is None:
        return [(" · ", "dim"), ("the memory's limit is not known; " + calm, "dim")]
    return [(" · ", "good"), ("no memory is running out; " + calm, "")]


def silence(run: RunSnapshot, silent: Sequence[RankSnapshot]) -> str:
    """``8 ranks on node0003 not seen for 40 s``."""
    count = len(silent) if run.fleet is None else max(len(silent), run.fleet.silent)
    nodes = sorted({rank.node for rank in silent})
    more = f" and {len(nodes) - 2} more" if len(nodes) > 2 else ""
    where = f"on {', '.join(nodes[:2])}{more}"
    return f"{human_count(count)} rank{'s' * (count != 1)} {where} {silent[0].ended}"


def danger(rank: RankSnapshot, found: Risk, *, short: bool = False) -> str:
    """``rank 3 runs out of device memory at about step 1,840, in 12 min: ... grow 31 MiB a step``."""
    is_host = found.pool == "host"
    if found.steps_left is None:
        return ("" if is_host else f"rank {rank.rank}: ") + risk_in_words(found, rank)
    step = human_count(rank.step + found.steps_left)
    time = roughly(found.steps_left * rank.step_seconds) if rank.step_seconds else ""
    what, grows = _growing(rank, found), human_bytes(found.growth_bytes_per_step)
    if short:
        who = "host" if is_host else f"rank {rank.rank}: {found.pool}"
        return f"{who} memory full at ~step {step}{time and f', {time}'}: {what} +{grows}/step"
    who = "the ranks run" if is_host else f"rank {rank.rank} runs"
    text = f"{who} out of {found.pool} memory at about step {step}{time and f', in {time}'}"
    return f"{text}: {what} grow{'s' * (not what.endswith('s'))} {grows} a step"


def _growing(rank: RankSnapshot, found: Risk) -> str:
    """What the trend is of; of growth, the role that has grown most."""
    if found.cause != "growth":
        is_split = found.cause == "fragmentation"
        return "what is reserved and not used" if is_split else "what others hold"
    grown = max(rank.roles, key=lambda row: row.grown_bytes, default=None)
    if grown is None or grown.grown_bytes <= 0:
        return "use"
    name = grown.role.replace("_", " ")
    return name if name.endswith("state") else f"{name}s"


def roughly(seconds: float) -> str:
    """``64 s``, ``12 min``, ``3.5 h``: a forecast has no more digits."""
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def highest(
    ranks: Sequence[RankSnapshot], read: Callable[[RankSnapshot], float | None]
) -> float | None:
    """The largest known value."""
    return max((v for v in map(read, ranks) if v is not None), default=None)


def lowest(
    ranks: Sequence[RankSnapshot], read: Callable[[RankSnapshot], float | None]
) -> float | None:
    """The smallest known value."""
    return min((v for v in map(read, ranks) if v is not None), default=None)


def step_seconds(ranks: Sequence[RankSnapshot]) -> float | None:
    """The median rank's step."""
    known = [rank.step_seconds for rank in ranks if rank.step_seconds]
    return median(known) if known else None


def tokens_per_second(run: RunSnapshot, look: Look) -> float | None:
    """Of all ranks, where the user says how many tokens a step has."""
    each = step_seconds(run.ranks)
    return look.tokens_per_step / each if look.tokens_per_step and each else None


def mfu(run: RunSnapshot, look: Look) -> float | None:
    """Model FLOPs utilization: 6 FLOPs a parameter and token over the devices' peak.

    None without the tokens and the peak, which only the user knows, or for several models.
    """
    rate, first = tokens_per_second(run, look), next(iter(run.ranks), None)
    if rate is None or not look.peak_flops or first is None or len(first.models) != 1:
        return None
    described = read_facts(first.models[0])
    if described is None:
        return None
    peak = look.peak_flops * first.world_size
    return _FLOPS_A_PARAMETER * described.sizes.numel * rate / peak


def figures(run: RunSnapshot, look: Look) -> list[tuple[str, str, str]]:
    """(name, value, tone): the run in numbers."""
    ranks, spreads = run.ranks, run.fleet.spreads if run.fleet is not None else {}
    each = spreads["step_seconds"].median if "step_seconds" in spreads else step_seconds(ranks)
    exposed = highest(ranks, lambda rank: rank.exposed_ratio)
    overlap = lowest(ranks, lambda rank: rank.overlap_ratio)
    if "overlap_ratio" in spreads:  # the ranks of the picture are not those that overlap least
        overlap = spreads["overlap_ratio"].least
    worst = worst_risk(ranks)
    rate, used = tokens_per_second(run, look), mfu(run, look)
    made = [
        ("step", human_seconds(each) if each else "n/a", "bold"),
        ("steps/s", f"{1 / each:.3g}" if each else "n/a", ""),
        ("exposed", human_ratio(exposed) + _off(ranks), level(exposed, 0.10, 0.25)),
        ("overlap", human_ratio(overlap), ""),
        ("OOM risk", human_ratio(worst[1].ratio if worst else None),
         level(worst[1].ratio if worst else None, 0.5, 0.8)),
        ("tokens/s", human_count(rate) if rate else "n/a", "" if rate else "dim"),
        ("MFU", _mfu_text(used), "" if used is not None and used <= 1 else "dim"),
    ]  # fmt: skip
    cost = highest(ranks, lambda rank: rank.overhead_ratio)
    if cost is not None:
        noise = highest(ranks, lambda rank: rank.overhead_noise_ratio) or 0.0
        made.append(("agent's cost", f"{cost * 100:+.1f} ± {noise * 100:.1f} %", "dim"))
    return made


def _mfu_text(used: float | None) -> str:
    if used is None:
        return "n/a"
    return human_ratio(used) if used <= 1 else "over 100 %: look at --peak-tflops"


def _off(ranks: Sequence[RankSnapshot]) -> str:
    """How far the live exposed time was off the last trace."""
    known = [r.check.error_ratio for r in ranks if r.check is not None]
    off = max((abs(error) for error in known if error is not None), default=None)
    return "" if off is None else f" (± {off * 100:.0f} % of it)"


def figures_line(run: RunSnapshot, look: Look) -> Line:
    """The run in numbers, on one line."""
    line: Line = []
    for name, value, tone in figures(run, look):
        line += [(f" {name} ", "dim"), (f"{value} ", tone)]
    return line


def clock(wall: float) -> str:
    """``12:04:31``, local time."""
    return time.strftime("%H:%M:%S", time.localtime(wall))


def ago(seconds: float) -> str:
    """``0.4 s ago`` without noise: whole seconds above one."""
    return human_seconds(seconds) if seconds >= 120 else f"{seconds:.0f} s"
