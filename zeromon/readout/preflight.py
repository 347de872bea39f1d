"""The answer of a preflight: does it start, does it fit, what does a step wait for. Pure."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from zeromon.base.units import human_bytes, human_calls, human_ratio, human_seconds
from zeromon.readout.death_report import deaths
from zeromon.readout.figures import BYTES, SECONDS, STEP
from zeromon.readout.report import by_role, finding_lines, memory_block
from zeromon.readout.tables import Column, Columns, text_table
from zeromon.readout.throughput import mfu_of_run, tokens_per_step
from zeromon.readout.verdict import judge_run
from zeromon.snapshot import Finding, RankSnapshot, RunSnapshot, Severity
from zeromon.snapshot.focus import DEVICE_OOM, death_cause
from zeromon.snapshot.levels import EXPOSED

_MODELLED = (
    "The devices are modelled: {device}. Kernels take modelled time and, without --arithmetic, compute "
    "nothing; the script, the framework, torch's allocator, the order of all calls and Python are real."
)


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitWait:
    """The collectives of a unit in a step, with a host that takes 9 us an operator."""

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
    """A step with a host that is always ahead of its devices, and one that takes 9 us an operator."""
    exposed_seconds: tuple[float, float] | None = None
    """The part of it that waits for communication, likewise."""
    mfu: tuple[float, float] | None = None
    """Likewise, the lower first."""
    wait_rank: int = -1
    """The rank that waits most, whose are the following."""
    waits: tuple[UnitWait, ...] = ()
    """The longest first."""
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
    most_waiting: tuple[int, Sequence[UnitWait]],
) -> Preflight:
    """Returns what *run* says.

    *modelled*: the device. *ranks*: those that ran, where others were simulated. *outcome*: why it
    ended early, if it did. *steps_of_ranks*: seconds of a step and of its exposed communication, of
    each rank whose devices told. *most_waiting*: the rank that waits most, and its waits.
    """
    ran_out = [rank for rank in run.ranks if death_cause(rank) == DEVICE_OOM]
    rank = max(ran_out or run.ranks, key=_used_bytes)
    device, slowest = rank.memory.device, max(run.ranks, key=lambda r: STEP.of_rank(r) or 0.0)
    steps = min(r.steps.watched_steps for r in run.ranks)
    oom = rank.memory.out_of_memory
    step, exposed = max(steps_of_ranks, default=(None, None))
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
        other_bytes=max((s.other_bytes for s in rank.steps.recent), default=-1),
        capacity_bytes=device.capacity_bytes if device else -1,
        host_seconds=STEP.of_rank(slowest),
        step_seconds=step,
        exposed_seconds=exposed,
        mfu=_mfu(run, step),
        wait_rank=most_waiting[0],
        waits=tuple(most_waiting[1]),
        findings=tuple(f for f in run.findings if _holds_on_device(f, step, exposed)),
    )


_ON_VALUE = re.compile("ZeroDivisionError|OverflowError|math domain error|not finite|nan", re.IGNORECASE)
_NO_VALUE_HINT = "; a loss reads as 0 where no kernel computes it: try --arithmetic on a small model"


def _holds_on_device(finding: Finding, step: Two | None, exposed: Two | None) -> bool:
    """Returns whether *finding* is one of a real device, too. That a rank died stands in the deaths."""
    if finding.severity == Severity.INFO or finding.rule == "rank_died":
        return False
    # A share of the time of steps is mostly one of waits, which a host that is always ahead has, too
    waits = step is not None and exposed is not None and exposed[0] >= EXPOSED.warning * step[0]
    return waits or finding.share is None


def _mfu(run: RunSnapshot, step: Two | None) -> Two | None:
    tokens = tokens_per_step(run)
    if step is None or not isinstance(tokens, float):
        return None
    low, high = (mfu_of_run(run, tokens / seconds) for seconds in reversed(step))
    return (low, high) if isinstance(low, float) and isinstance(high, float) else None


def _used_bytes(rank: RankSnapshot) -> int:
    device = rank.memory.device
    return max(device.peak_bytes, device.reserved_bytes) if device is not None else -1


def preflight_text(run: RunSnapshot, result: Preflight) -> str:
    """The answer first, then its proof; the whole run is in its report."""
    first_rank = run.ranks[0]
    head = [
        f"Preflight of {' '.join(run.command)}",
        f"  {_MODELLED.format(device=result.device)}",
        f"  ranks     {_ranks_sentence(result)}, {first_rank.strategy}",
        f"  memory    {_memory_sentence(result)}",
        f"  step      {_step_sentence(result)}",
    ]
    if result.outcome:
        head.append(f"  ended     after {result.steps} steps: {result.outcome}")
    blocks = [
        "\n".join(head), deaths(run) if result.outcome else "", _finding_block(result.findings),
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
        sentences.append("from a host that is always ahead to one that takes 9 us an operator")
    return ", ".join(sentences)


def _between_limits(format_number: Callable[[float], str], limits: Sequence[float]) -> str:
    """``120 ms``, or ``120 ms to 180 ms`` where both ends do not read the same."""
    return " to ".join(dict.fromkeys(map(format_number, limits)))


def _finding_block(findings: Sequence[Finding]) -> str:
    rows = [row for finding in findings for row in finding_lines(finding)]
    return "\n".join(("Findings (zeromon rule CODE explains them)", *rows)) if rows else ""


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
    blocks = [
        f"Waits of rank {result.wait_rank} per step, for a host that takes 9 us an operator",
        text_table(result.waits[:_MOST_WAITS], *_WAIT_COLUMNS),
    ]
    if hidden := result.waits[_MOST_WAITS:]:
        exposed = human_seconds(sum(row.exposed_seconds for row in hidden))
        blocks.append(f"  ... and {len(hidden)} more, {exposed} exposed")
    return "\n".join(blocks)
