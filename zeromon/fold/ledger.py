"""The ledger of one rank: each second since its process began, in one cause. Pure.

A second of a step belongs to the phase that it was spent in; see
:class:`~zeromon.ring.events.PhaseSpan`. Of forward, backward and optimizer the exposed communication is
a cause of its own. Where it was not timed (control steps), a phase is exposed by the share that it has
in the timed steps. The split of exposed communication over dimensions and ranks is by the
sums of the collectives, which may overlap.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import replace

from zeromon.fold.dimensions import names
from zeromon.fold.state import LedgerSums, RankState
from zeromon.levels import STALL_SECONDS
from zeromon.ring.events import Activity, Phase, SetUp
from zeromon.snapshot import StepSummary
from zeromon.snapshot.ledger import ActivityRow, Cause, LedgerRow, added

OF_PHASE = {
    Phase.OTHER: Cause.OTHER,
    Phase.FORWARD: Cause.COMPUTE,
    Phase.BACKWARD: Cause.COMPUTE,
    Phase.OPTIMIZER: Cause.COMPUTE,
    Phase.DATA_WAIT: Cause.DATA,
    Phase.CPU_OPTIMIZER: Cause.OFFLOAD,
    Phase.EVALUATION: Cause.EVALUATION,
    Phase.CHECKPOINT: Cause.CHECKPOINT,
    Phase.GARBAGE_COLLECTION: Cause.GARBAGE_COLLECTION,
    Phase.COMPILE: Cause.COMPILE,
    Phase.GENERATION: Cause.GENERATION,
}
_COMPUTES = tuple(phase for phase in Phase if OF_PHASE[phase] is Cause.COMPUTE)
_TRAINS = (*_COMPUTES, Phase.OTHER)
"""The phases whose exposed communication is a cause of its own."""
_KINDS = tuple((OF_PHASE[phase], phase in _TRAINS) for phase in Phase)
"""Of each phase, by its number: its cause, and whether its exposed communication is one of its own."""


def add_step(ledger: LedgerSums, step: StepSummary) -> None:
    """Adds a step of which everything is known to the sums of the ledger."""
    timed = step.timed and bool(step.phase_exposed_ns)
    for phase, spent in enumerate(step.phase_ns):
        if not spent:
            continue
        if timed:
            exposed = min(spent, step.phase_exposed_ns[phase])
            ledger.timed_ns[phase] += spent
            ledger.timed_exposed_ns[phase] += exposed
        else:
            known = ledger.timed_ns[phase]
            exposed = spent * ledger.timed_exposed_ns[phase] // known if known else 0
        ledger.spent_ns[phase] += spent
        ledger.exposed_ns[phase] += exposed
    ledger.offload_ns += step.offload_blocked_ns


def began_ns(state: RankState) -> int:
    """When the process of the rank began, or its agent where that was attached later."""
    start = state.meta.get("process_start_ns")
    if isinstance(start, int) and not state.meta.get("attached"):
        return start
    return state.first_event_ns


def ledger_rows(state: RankState, *, failed: bool = False) -> tuple[LedgerRow, ...]:
    """Every second of the rank up to its last record, in one cause each.

    *failed*: the step in which it ended is lost.
    """
    until = state.last_event_ns
    causes = _of_steps(_with_last_step(state))
    exposed = causes.pop(Cause.EXPOSED, 0.0)
    set_up = _add_set_up(state, causes, until)
    _add_step_under_way(state, causes, until, failed=failed)
    found = [LedgerRow(cause=cause, seconds=ns / 1e9) for cause, ns in causes.items() if ns >= 1]
    found += [
        LedgerRow(cause=Cause.SET_UP, of=part, seconds=ns / 1e9) for part, ns in set_up.items()
    ]
    found += _split_exposed(state, exposed)
    return added(found)


def _with_last_step(state: RankState) -> LedgerSums:
    """A copy of the sums, to which the last step, whose times may still come, is added."""
    sums = state.ledger
    found = replace(
        sums,
        spent_ns=[*sums.spent_ns],
        exposed_ns=[*sums.exposed_ns],
        timed_ns=[*sums.timed_ns],
        timed_exposed_ns=[*sums.timed_exposed_ns],
    )
    if state.history:
        add_step(found, state.history[-1])
    return found


def ledger_totals(state: RankState) -> dict[str, float]:
    """Seconds by cause of the set-up and of all steps but the last, whose times may still come."""
    causes = _of_steps(state.ledger)
    if state.startup_ns >= 0:
        causes[Cause.SET_UP] += sum(_add_set_up(state, causes, state.last_event_ns).values())
    return {str(cause): causes[cause] / 1e9 for cause in Cause if causes[cause] > 0}


def _of_steps(ledger: LedgerSums) -> defaultdict[Cause, float]:
    """Nanoseconds by cause."""
    causes: defaultdict[Cause, float] = defaultdict(float)
    for phase, spent in enumerate(ledger.spent_ns):
        if not spent:
            continue
        cause, trains = _KINDS[phase]
        exposed = ledger.exposed_ns[phase] if trains else 0
        causes[cause] += spent - exposed
        causes[Cause.EXPOSED] += exposed
    offload = min(causes[Cause.COMPUTE], ledger.offload_ns)
    causes[Cause.COMPUTE] -= offload
    causes[Cause.OFFLOAD] += offload
    return causes


def _add_set_up(state: RankState, causes: dict[Cause, float], until: int) -> dict[str, int]:
    """Adds what has a cause of its own, and returns the other nanoseconds of the set-up by part."""
    if state.meta.get("attached"):
        return {}
    spent = state.startup_ns if state.startup_ns >= 0 else until - began_ns(state)
    by_phase = state.setup_ns if state.startup_ns >= 0 else state.window.phase_ns
    for phase, ns in zip(Phase, by_phase, strict=True):
        if OF_PHASE[phase] not in (Cause.COMPUTE, Cause.OTHER):
            causes[OF_PHASE[phase]] += ns
            spent -= ns
    return _parts_of_set_up(state, max(0, spent))


def _parts_of_set_up(state: RankState, left: int) -> dict[str, int]:
    """Divides *left* nanoseconds; where nothing of them is known, "" has them all."""
    raw = state.meta.get("set_up")
    known = {part: raw[part] for part in SetUp if part in raw} if isinstance(raw, dict) else {}
    wrapped = state.activities.get((Phase.OTHER, Activity.WRAP, False))
    if wrapped is not None:
        known[SetUp.WRAP] = wrapped.ns
    found: dict[str, int] = {}
    for part, ns in known.items():
        if isinstance(ns, int) and ns > 0 and left > 0:
            found[str(part)] = min(left, ns)
            left -= found[str(part)]
    if left > 0:
        found[str(SetUp.SCRIPT) if known else ""] = left
    return found


def startup_parts(state: RankState) -> dict[str, int]:
    """Nanoseconds of the time before the first step, by part; {} where that time is not known."""
    if state.startup_ns < 0:
        return {}
    causes: defaultdict[Cause, float] = defaultdict(float)
    found = _add_set_up(state, causes, 0)
    found |= {str(cause): round(ns) for cause, ns in causes.items() if ns}
    return dict(sorted(found.items(), key=lambda part: -part[1])) if any(found) else {}


def _add_step_under_way(
    state: RankState, causes: dict[Cause, float], until: int, *, failed: bool
) -> None:
    """Adds the time since the last step."""
    if not state.steps:
        if state.startup_ns < 0:
            return
        since = began_ns(state) + state.startup_ns
    else:
        since = state.step_end_ns
    rest = until - since
    if failed:
        causes[Cause.LOST] += rest
        return
    for phase, ns in zip(Phase, state.window.phase_ns, strict=True):
        causes[OF_PHASE[phase]] += ns
        rest -= ns
    silent = until - max(since, state.progress_ns)
    stalled = min(rest, silent) if silent > STALL_SECONDS * 1e9 else 0
    causes[Cause.STALL] += max(0, stalled)
    causes[OF_PHASE[state.phase]] += max(0, rest - stalled)


def _split_exposed(state: RankState, total_ns: float) -> list[LedgerRow]:
    """Splits the exposed time of all steps by dimension, and by the rank that was waited for."""
    weights: dict[tuple[Cause, str], float] = defaultdict(float)
    dims = names(state)
    for (_, group, phase, _), row in state.traffic.items():
        if phase in _TRAINS and row.exposed_ns:
            of_matched = row.exposed_ns / max(1, row.matched_ns)
            left = float(row.exposed_ns)
            for rank, ns in row.waits.items():
                waited = min(left, ns * of_matched)
                weights[Cause.WAITING, f"rank {rank}"] += waited
                left -= waited
            weights[Cause.EXPOSED, dims.get(group, "")] += left
    whole = sum(weights.values())
    if total_ns < 1:
        return []
    if not whole:
        return [LedgerRow(cause=Cause.EXPOSED, seconds=total_ns / 1e9)]
    return [
        LedgerRow(cause=cause, of=of, seconds=weight * total_ns / whole / 1e9)
        for (cause, of), weight in weights.items()
        if weight * total_ns / whole >= 1
    ]


def lose(
    rows: Iterable[LedgerRow], recent: Sequence[StepSummary], lost_steps: int
) -> tuple[LedgerRow, ...]:
    """*rows* of a rank after its last *lost_steps* steps were taken again; *recent*: its last steps.

    Checkpoints saved or loaded in such a step are not lost. Where more steps were lost than are known,
    the others count as the known ones.
    """
    if lost_steps < 1 or not recent:
        return tuple(rows)
    known = recent[-lost_steps:]
    sums = LedgerSums()
    for step in known:
        add_step(sums, step)
    lost = _of_steps(sums)
    lost.pop(Cause.CHECKPOINT, None)
    found, whole = [], list(rows)
    for cause, ns in lost.items():
        of = (Cause.EXPOSED, Cause.WAITING) if cause is Cause.EXPOSED else (cause,)
        there = [row for row in whole if row.cause in of]
        total = sum(row.seconds for row in there)
        taken = min(total, ns / 1e9 * lost_steps / len(known))
        whole = [row for row in whole if row.cause not in of]
        found += [replace(row, seconds=row.seconds * (1 - taken / total)) for row in there]
        found.append(LedgerRow(cause=Cause.LOST, seconds=taken))
    return added((*whole, *found))


def activity_rows(state: RankState) -> tuple[ActivityRow, ...]:
    """What the loop did beside training, the longest first."""
    found = [
        ActivityRow(
            phase=phase.label,
            activity="" if activity is Activity.NONE else activity.name.lower(),
            background=background,
            count=totals.count,
            seconds=totals.ns / 1e9,
            longest_seconds=totals.longest_ns / 1e9,
            nbytes=totals.nbytes,
            last_ns=totals.last_end_ns,
            file=totals.file,
            file_bytes=totals.file_bytes,
        )
        for (phase, activity, background), totals in state.activities.items()
    ]
    return tuple(sorted(found, key=lambda row: -row.seconds))
