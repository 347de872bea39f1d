"""The answer of a preflight: does it start, does it fit, what does a step wait for. Pure."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from zeromon.base.errors import LaunchError
from zeromon.base.units import (
    counted,
    human_bytes,
    human_calls,
    human_count,
    human_rate,
    human_ratio,
    human_seconds,
)
from zeromon.memory.forecast import early_growth
from zeromon.readout.breakdown import WINDOW, pace
from zeromon.readout.death_report import deaths
from zeromon.readout.figures import BYTES, SECONDS
from zeromon.readout.report import by_role, finding_lines, memory_block
from zeromon.readout.tables import Column, Columns, text_table
from zeromon.readout.throughput import mfu_of_run, tokens_per_step
from zeromon.readout.verdict import judge_run
from zeromon.ring.codes import Phase
from zeromon.snapshot import Finding, RankSnapshot, RunSnapshot, Severity
from zeromon.snapshot.focus import DEVICE_OOM, death_cause
from zeromon.snapshot.levels import HOST_BOUND
from zeromon.snapshot.step import settled_steps

_MODELLED = (
    "The devices are modelled: {device}. Kernels take modelled time and, without --arithmetic, compute "
    "nothing; the script, the framework, torch's allocator, the order of all calls and Python are real."
)


OPERATOR_SECONDS = 9e-6
"""Seconds of a host for an operator of torch: that of an H200 (docs/evidence/virtual-device.md)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitWait:
    """The collectives of a unit in a step, for the slower of the two kinds of host."""

    unit: str
    """"" where C++ launched them, as DDP's reducer does."""
    op: str
    phase: str
    calls: float
    nbytes: int
    seconds: float
    exposed_seconds: float
    """The part in which nothing is computed; of two at once, both."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Preflight:
    """The outcome of a run on virtual devices."""

    device: str
    world_size: int
    representatives: tuple[int, ...]
    """The ranks that ran, where the others were simulated; () where all ran."""
    fits: bool | None
    """None where it ended before its memory was known."""
    steps: int
    outcome: str
    """Why it ended early; "" where it took all its steps."""
    peak_rank: int = -1
    """The rank whose device is the fullest; the following are of that one."""
    peak_bytes: int = -1
    """The most that torch's allocator has handed out."""
    peak_phase: str = ""
    peak_step: int = 0
    asked_bytes: int = -1
    """The allocation that failed, where one did; then in the phase and the step above."""
    reserved_bytes: int = -1
    other_bytes: int = -1
    """Beside what the allocator has reserved: contexts, NCCL."""
    capacity_bytes: int = -1
    host_seconds: float | None = None
    """A step of the slowest rank on the host of this machine, whose cores all ranks share."""
    step_seconds: tuple[float, float] | None = None
    """A step with a host that is always ahead of its devices, and one that takes its time."""
    operator_seconds: float = OPERATOR_SECONDS
    """Seconds of that one for an operator."""
    exposed_seconds: tuple[float, float] | None = None
    """The part of it that waits for communication, likewise."""
    mfu: tuple[float, float] | None = None
    """Likewise, the lower first."""
    mfu_unknown: str = ""
    """Why it is."""
    wait_rank: int = -1
    """The rank that waits most, whose are the following."""
    waits: tuple[UnitWait, ...] = ()
    """The longest first."""
    host_bytes: int | None = None
    """Offloaded states of the ranks of one node; None before a step has counted them."""
    pinned_bytes: int | None = None
    """Pinned on one node, with what torch's allocator of pinned memory rounds up."""
    ranks_per_node: int = 0
    growth_bytes: float = 0.0
    """By which the memory of the rank that grows most does so in each step; 0: by nothing."""
    growth_steps: int = 0
    """The steps that say so."""
    full_step: int = 0
    """About the step in which that memory runs out."""
    findings: tuple[Finding, ...] = ()
    """Those that a real device would have, too."""


Two = tuple[float, float]
"""For both kinds of host."""


def preflight_result(
    run: RunSnapshot,
    modelled: str,
    ranks: tuple[int, ...],
    outcome: str,
    asked_steps: int,
    steps_of_ranks: Sequence[tuple[Two, Two]],
    waits: Mapping[int, Sequence[UnitWait]],
    host_seconds: float | None,
    operator_seconds: float = OPERATOR_SECONDS,
) -> Preflight:
    """Returns what *run* says, whose steps have the times of the devices.

    *modelled*: the device. *ranks*: those that ran, where others were simulated. *outcome*: why it
    ended early, if it did. *steps_of_ranks*: seconds of a step and of its exposed communication, of
    each rank that was timed. *waits*: those of such a rank.
    """
    ran_out = [rank for rank in run.ranks if death_cause(rank) == DEVICE_OOM]
    rank = max(ran_out or run.ranks, key=_used_bytes)
    device, waiting_rank = rank.memory.device, max(waits, key=lambda number: _exposed(waits[number]))
    steps = min(r.steps.watched_steps for r in run.ranks)
    oom = rank.memory.out_of_memory
    step, exposed = max(steps_of_ranks, default=(None, None))
    mfu = _mfu_of_step(run, step)
    per_node = run.ranks[0].config.process.get("local_world_size", 0) or run.ranks[0].world_size
    early_end = outcome if steps < asked_steps else ""
    if any(r.status.exception for r in run.ranks):
        early_end = judge_run(run).cause
        early_end += _NO_VALUE_HINT if _ON_VALUE.search(early_end) else ""
    return Preflight(
        device=modelled,
        world_size=run.ranks[0].world_size,
        representatives=ranks,
        fits=False if ran_out else True if device is not None and steps else None,
        steps=steps,
        outcome="out of memory" if ran_out else early_end,
        peak_rank=rank.rank,
        peak_bytes=device.peak_bytes if device else -1,
        peak_phase=oom.phase if oom else device.peak_phase if device else "",
        peak_step=rank.steps.last_step + 1 if oom else device.peak_step if device else 0,
        asked_bytes=oom.requested_bytes if oom else -1,
        reserved_bytes=device.reserved_bytes if device else -1,
        other_bytes=_other_bytes(rank),
        capacity_bytes=device.capacity_bytes if device else -1,
        host_seconds=host_seconds,
        step_seconds=step,
        exposed_seconds=exposed,
        wait_rank=waiting_rank,
        waits=tuple(waits[waiting_rank]),
        operator_seconds=operator_seconds,
        mfu=None if isinstance(mfu, str) else mfu,
        mfu_unknown=mfu if isinstance(mfu, str) else "",
        ranks_per_node=per_node,
        **_host_bytes_of_node(run.ranks, per_node),
        **_growth_until_full(run.ranks),
        # That a rank died stands in the deaths
        findings=tuple(f for f in run.findings if f.severity != Severity.INFO and f.rule != "rank_died"),
    )


def _exposed(rows: Sequence[UnitWait]) -> float:
    return sum(row.exposed_seconds for row in rows)


_ON_VALUE = re.compile("ZeroDivisionError|OverflowError|math domain error|not finite|nan", re.IGNORECASE)
_NO_VALUE_HINT = "; a loss reads as 0 where no kernel computes it: try --arithmetic on a small model"


def _mfu_of_step(run: RunSnapshot, step: Two | None) -> Two | str:
    tokens = tokens_per_step(run)
    if step is None or isinstance(tokens, str):
        return tokens if isinstance(tokens, str) else "no two steps have ended"
    low, high = (mfu_of_run(run, tokens / seconds) for seconds in reversed(step))
    return low if isinstance(low, str) else high if isinstance(high, str) else (low, high)


def _host_bytes_of_node(ranks: Sequence[RankSnapshot], per_node: int) -> dict[str, Any]:
    """The states on the host of one node: those of the rank with the most, for each of its ranks."""
    if not all(rank.memory.roles for rank in ranks):
        return {}
    pinned = [sum(row.pinned_bytes for row in rank.memory.roles) for rank in ranks]
    # The allocator's own figure is read once in a while, and may be older than the count of the states
    pools = [max(n, rank.memory.pinned_bytes) for n, rank in zip(pinned, ranks, strict=True)]
    offloaded = max(sum(row.host_bytes for row in rank.memory.roles) for rank in ranks)
    return {
        "host_bytes": per_node * offloaded,
        "pinned_bytes": per_node * max(pools) if any(pinned) else 0,
    }


def _growth_until_full(ranks: Sequence[RankSnapshot]) -> dict[str, Any]:
    """The growth that fills a device soonest, where it does so in a run of usual length."""
    trends = [
        (
            round(ended_step + trend.steps_left(device.capacity_bytes - max(0, _other_bytes(rank)))[0]),
            trend.slope,
            trend.window,
        )
        for rank in ranks
        if (device := rank.memory.device) is not None
        and (trend := early_growth(device.peaks, ended_step := rank.steps.last_step)) is not None
    ]
    full_step, slope, window = min(trends, default=(_LONGEST_STEPS, 0.0, 0))
    if full_step >= _LONGEST_STEPS:
        return {}
    return {"full_step": full_step, "growth_bytes": slope, "growth_steps": window}


_LONGEST_STEPS = 100_000


def _other_bytes(rank: RankSnapshot) -> int:
    return max((step.other_bytes for step in rank.steps.recent), default=-1)


def _used_bytes(rank: RankSnapshot) -> tuple[int, int]:
    """The fullest device first; of equally full ones, that of the higher peak."""
    device = rank.memory.device
    peak, reserved = (device.peak_bytes, device.reserved_bytes) if device is not None else (-1, -1)
    return max(peak, reserved), peak


def preflight_text(run: RunSnapshot, result: Preflight) -> str:
    """The answer first, then its proof; the whole run is in its report."""
    strategy = run.ranks[0].strategy
    head = [
        f"Preflight of {' '.join(run.command)}",
        f"  {_MODELLED.format(device=result.device)}",
        f"  ranks     {_ranks_sentence(result)}, {'strategy ' * (strategy == 'unknown')}{strategy}",
        f"  memory    {_memory_sentence(result)}",
        f"  step      {_step_sentence(result)}",
    ]
    if result.steps and result.host_bytes != 0:
        head.insert(-1, f"  host      {_host_sentence(result)}")
    if result.growth_bytes:
        head.append(f"  leak      {_growth_sentence(result)}")
    if result.outcome:
        head.append(f"  ended     after {counted(result.steps, 'step')}: {result.outcome}")
    rows = [row for finding in result.findings for row in finding_lines(finding)]
    rows[:0] = ["Findings (zeromon rule CODE explains them)"] if rows else []
    blocks = [
        "\n".join(head), deaths(run) if result.outcome else "", "\n".join(rows),
        memory_block(run.ranks[:8]), by_role(run), _waits_block(result),
        f"All of it: zeromon report {run.run}",
    ]  # fmt: skip
    return "\n\n".join(block for block in blocks if block) + "\n"


def _ranks_sentence(result: Preflight) -> str:
    if not result.representatives:
        return str(result.world_size)
    ran = ", ".join(map(str, result.representatives))
    return f"{result.world_size}, of which {ran} ran; all others are taken to come with the last of them"


def _memory_sentence(result: Preflight) -> str:
    peak_place = f"in {result.peak_phase} of step {result.peak_step}, rank {result.peak_rank}"
    if result.fits is None:
        return "n/a: no step has ended"
    if not result.fits and result.asked_bytes < 0:
        return f"does not fit: rank {result.peak_rank} ran out before the first backward"
    peak = human_bytes(result.peak_bytes)
    if not result.fits:
        requested = human_bytes(result.asked_bytes)
        return f"does not fit: {peak_place}, torch asks for {requested} more than {peak}"
    used = result.reserved_bytes + max(0, result.other_bytes)
    return (
        f"fits: peak {peak} {peak_place}; {human_bytes(used)} of "
        f"{human_bytes(result.capacity_bytes)} reserved or in use beside torch"
    )


def _host_sentence(result: Preflight) -> str:
    if result.host_bytes is None:
        return "n/a: no optimizer step has counted the states"
    states = f"{human_bytes(result.host_bytes)} of offloaded states per node"
    pinned = f"{human_bytes(result.pinned_bytes)} pinned, as torch's allocator rounds it"
    return f"{states} of {result.ranks_per_node} ranks; {pinned}"


def _growth_sentence(result: Preflight) -> str:
    sentence = f"memory grows {human_bytes(round(result.growth_bytes))} per step"
    if result.fits:
        sentence += f": full at about step {human_count(result.full_step)}"
    return f"{sentence}, by the peaks of {result.growth_steps} steps"


def _step_sentence(result: Preflight) -> str:
    if result.step_seconds is None or result.exposed_seconds is None:
        return "n/a: no two steps have ended"
    shares = [e / s for e, s in zip(result.exposed_seconds, result.step_seconds, strict=True)]
    sentences = [
        _between_limits(human_seconds, result.step_seconds),
        f"{_between_limits(human_ratio, sorted(shares))} of it waits for communication",
    ]
    if result.mfu is not None:
        sentences.append(f"MFU {_between_limits(human_ratio, result.mfu)}")
    if len(set(result.step_seconds)) > 1:
        operator = human_seconds(result.operator_seconds)
        sentences.append(f"from a host that is always ahead to one that takes {operator} an operator")
    if result.mfu is None:
        sentences.append(f"MFU n/a ({result.mfu_unknown})")
    return ", ".join(sentences)


def _between_limits(format_number: Callable[[float], str], limits: Sequence[float]) -> str:
    """``120 ms``, or ``120 ms to 180 ms`` where both ends do not read the same."""
    return " to ".join(dict.fromkeys(map(format_number, limits)))


_WAIT_COLUMNS: Columns[UnitWait] = (
    Column("unit", lambda row: row.unit or "-"),
    Column("op", lambda row: row.op),
    Column("phase", lambda row: row.phase or "-"),
    Column("calls", lambda row: human_calls(row.calls)),
    Column("bytes", lambda row: row.nbytes, BYTES),
    Column("time", lambda row: row.seconds, SECONDS),
    Column("exposed", lambda row: row.exposed_seconds, SECONDS),
)
_MOST_WAITS = 8


def _waits_block(result: Preflight) -> str:
    if not result.waits:
        return ""
    operator = human_seconds(result.operator_seconds)
    blocks = [
        f"Waits of rank {result.wait_rank} per step, for a host that takes {operator} an operator",
        text_table(result.waits[:_MOST_WAITS], *_WAIT_COLUMNS),
    ]
    if hidden := result.waits[_MOST_WAITS:]:
        exposed = human_seconds(_exposed(hidden))
        blocks.append(f"  ... and {len(hidden)} more, {exposed} exposed")
    return "\n".join(blocks)


# ---- calibration by a run on real devices --------------------------------------------------------

_LARGE_BYTES = 1 << 20
"""A collective of fewer bytes shows a latency, not a bandwidth."""


def calibrated_speeds(run: RunSnapshot, modelled: Sequence[tuple[Two, Two]]) -> dict[str, float]:
    """Returns values of the file of a virtual machine, by *run* on real devices.

    *modelled*: seconds of a step and of its exposed communication on each virtual device, for the
    command of *run*. Who sets the pace of the run decides what its time says: the devices, how long
    kernels take; the host, how long it takes for an operator. Raises :class:`LaunchError` for a run
    that was not timed on devices.
    """
    paces = [(measured, rank) for rank in run.ranks if (measured := pace(rank)) is not None]
    if not paces or not modelled:
        raise LaunchError(
            f"no steps of {run.run if not paces else 'the virtual devices'} are timed",
            "--calibrate needs a run on GPUs, of several steps under FSDP, DDP or DeepSpeed.",
        )
    computed = [
        measured.compute_seconds + _optimizer_seconds(rank) - (rank.communication.exposed_seconds or 0.0)
        for measured, rank in paces
    ]
    slowest = max(range(len(paces)), key=computed.__getitem__)
    device, host = (max(step[k] - wait[k] for step, wait in modelled) for k in (0, 1))
    speeds = {"slow": 1.0, "operator_ns": OPERATOR_SECONDS * 1e9}
    if paces[slowest][0].starved_ratio >= HOST_BOUND:
        speeds["operator_ns"] *= computed[slowest] / host
    else:
        speeds["slow"] = (computed[slowest] - paces[slowest][0].starved_seconds) / device
    for names, far in ((("node_speed", "pcie_speed"), False), (("network_speed",), True)):
        messages = [
            (round(row.nbytes / row.calls), row.busbw_bytes_per_second)
            for rank in run.ranks
            for row in rank.communication.traffic
            if row.calls and row.busbw_bytes_per_second and (row.nodes > 1) == far
        ]
        # Of the largest, on the rank that waits least for the others
        nbytes, rate = max(messages, default=(0, 0.0))
        if nbytes >= _LARGE_BYTES:
            speeds |= dict.fromkeys(names, rate)
    return speeds


def _optimizer_seconds(rank: RankSnapshot) -> float:
    steps = settled_steps(rank.steps.recent[-WINDOW:])
    return fmean(step.phase_ns[Phase.OPTIMIZER] for step in steps) / 1e9


def calibration_text(run: str, speeds: Mapping[str, float]) -> str:
    """``calibrated by NAME: kernels take 1.50 times as long, an operator 9 us, ...``."""
    links = [
        f"{place} {human_rate(speeds[name]) if name in speeds else 'as modelled (no large collective)'}"
        for name, place in (("node_speed", "within a node"), ("network_speed", "between nodes"))
    ]
    operator = f"an operator takes the host {human_seconds(speeds['operator_ns'] / 1e9)}"
    kernels = f"kernels take {speeds['slow']:.2f} times as long, {operator}"
    return f"calibrated by {run}: {kernels}, busbw {', '.join(links)}"
