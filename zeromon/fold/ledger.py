"""The ledger of one rank: each second from the launch to the end of its run, in one cause. Pure.

A second of a step belongs to the phase that it was spent in; see
:class:`~zeromon.ring.events.PhaseSpan`. Of forward, backward and optimizer the exposed communication is
a cause of its own. Where it was not timed (control steps), a phase is exposed by the share that it has
in the timed steps. The split of exposed communication over dimensions and ranks is by the
sums of the collectives, which may overlap. A stall or hang takes its seconds from the phase that it
befell, while it lasts and after.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from zeromon.fold.state import LedgerSums, RankState, Silence, names
from zeromon.levels import STALL_SECONDS, START_SECONDS
from zeromon.ring.events import Activity, ExitKind, Phase, SetUp
from zeromon.snapshot import ExtensionLock, Halt, HostMemory, StepSummary
from zeromon.snapshot.ledger import ActivityRow, Cause, LedgerRow, added


@dataclass(frozen=True, slots=True, kw_only=True)
class Observed:
    """Facts about a rank's process, seen from outside it."""

    alive: bool = True
    halted: Halt = Halt.NONE
    ended: str = ""
    failed: bool = False
    since_ns: int = 0
    """When its attempt began, CLOCK_MONOTONIC as the next two; 0: with its process."""
    until_ns: int = 0
    """When the account of its time ends; 0: with its last record."""
    died_ns: int = 0
    """When its process was first seen dead; 0 where that is not known."""
    host: HostMemory | None = None
    lock: ExtensionLock | None = None


NOTHING_OBSERVED = Observed()
"""A live rank of which no probe knows anything."""


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
"""The cause of each phase, by its number, and whether its exposed communication is one of its own."""
_PARTS_OF_SET_UP = tuple(
    phase for phase in Phase if OF_PHASE[phase] in (Cause.COMPUTE, Cause.OTHER)
)
"""The phases that count as set-up before the first step."""
LAUNCHER = "launcher"
"""The part of the set-up before the process of the rank."""


def add_step(ledger: LedgerSums, step: StepSummary) -> None:
    """Adds a step of which everything is known to the sums of the ledger."""
    timed = step.timed and bool(step.phase_exposed_ns)
    phases, exposures = list(step.phase_ns), list(step.phase_exposed_ns)
    for phase, silent in _take(phases, step.silent_ns).items():
        if timed and 2 * exposures[phase] >= silent:  # the wait of a hang was blocked time as well
            exposures[phase] = max(0, exposures[phase] - silent)
    for phase, spent in enumerate(phases):
        if not spent:
            continue
        if timed:
            exposed = min(spent, exposures[phase])
            ledger.timed_ns[phase] += spent
            ledger.timed_exposed_ns[phase] += exposed
        else:
            known = ledger.timed_ns[phase]
            exposed = spent * ledger.timed_exposed_ns[phase] // known if known else 0
        ledger.spent_ns[phase] += spent
        ledger.exposed_ns[phase] += exposed
    ledger.offload_ns += step.offload_blocked_ns


def _take(phases: list[int], ns: int) -> dict[int, int]:
    """Takes *ns* out of the longest of *phases*; returns what it took, by phase."""
    taken: dict[int, int] = {}
    while ns > 0 and (longest := max(phases)) > 0:
        phase, part = phases.index(longest), min(ns, longest)
        phases[phase] -= part
        taken[phase] = part
        ns -= part
    return taken


def end_silence(state: RankState, t_ns: int) -> None:
    """Adds the stall or hang of *state*, which has ended at *t_ns*, to the sums."""
    silence, state.silence = state.silence, None
    if silence is None:
        return
    spent = max(t_ns, silence.counted_ns) - silence.since_ns
    state.window.silent_ns += spent
    ledger = state.ledger
    if silence.cause is Cause.HANG:
        ledger.hang_ns[silence.of] = ledger.hang_ns.get(silence.of, 0) + spent
    else:
        ledger.stall_ns += spent


def began_ns(state: RankState) -> int:
    """When the process of the rank began, or its agent where that was attached later."""
    start = state.meta.get("process_start_ns")
    if isinstance(start, int) and not state.meta.get("attached"):
        return start
    return state.first_event_ns


def ledger_rows(state: RankState, observed: Observed = NOTHING_OBSERVED) -> tuple[LedgerRow, ...]:
    """Every second of the rank in one cause each, from the launch to the end of its attempt."""
    until = observed.until_ns or state.last_event_ns
    end = min(observed.died_ns or until, until)
    silence = _silence(state, observed, end)
    causes = _of_steps(_with_last_step(state))
    exposed = causes.pop(Cause.EXPOSED, 0.0)
    silent = silence.counted_ns - silence.since_ns if silence is not None else 0
    set_up = _add_set_up(state, causes, end - (silent if state.startup_ns < 0 else 0))
    _add_step_under_way(state, causes, end - silent, observed)
    causes[Cause.DEAD if observed.failed else Cause.SHUT_DOWN] += max(0, until - end)
    found = [LedgerRow(cause=cause, seconds=ns / 1e9) for cause, ns in causes.items() if ns >= 1]
    set_up[LAUNCHER] = _launch_ns(state, observed)
    found += [
        LedgerRow(cause=Cause.SET_UP, of=part, seconds=ns / 1e9) for part, ns in set_up.items()
    ]
    return added((*found, *_split_exposed(state, exposed), *_silent_rows(state, silence)))


def _launch_ns(state: RankState, observed: Observed) -> int:
    """Nanoseconds from the beginning of the attempt to the process of the rank."""
    attached = state.meta.get("attached")
    return 0 if attached or not observed.since_ns else max(0, began_ns(state) - observed.since_ns)


def _silence(state: RankState, observed: Observed, end: int) -> Silence | None:
    """The stall or hang that lasts at *end*, counted up to there.

    A rank that failed may have been seen by no collector before: its last progress decides.
    """
    if state.silence is not None:
        return replace(state.silence, counted_ns=max(end, state.silence.since_ns))
    least = STALL_SECONDS if state.startup_ns >= 0 else START_SECONDS
    if not observed.failed or end - state.progress_ns < least * 1e9:
        return None
    waits = any(of_group.in_flight for of_group in state.group_calls.values())
    since = max(state.progress_ns, began_ns(state))
    return Silence(Cause.HANG if waits else Cause.STALL, "", since, max(end, since))


def _silent_rows(state: RankState, silence: Silence | None) -> list[LedgerRow]:
    """The stalls and hangs of the rank, with *silence*, which lasts."""
    ledger = state.ledger
    rows = [LedgerRow(cause=Cause.STALL, seconds=ledger.stall_ns / 1e9)]
    rows += [
        LedgerRow(cause=Cause.HANG, of=of, seconds=ns / 1e9) for of, ns in ledger.hang_ns.items()
    ]
    if silence is not None:
        spent = max(0, silence.counted_ns - silence.since_ns) / 1e9
        rows.append(LedgerRow(cause=silence.cause, of=silence.of, seconds=spent))
    return rows


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


def ledger_totals(state: RankState, observed: Observed = NOTHING_OBSERVED) -> dict[str, float]:
    """Seconds by cause, of which none decreases while the rank lives or after.

    Of a live rank all but the last step, whose times may still come, and the step under way.
    """
    totals: defaultdict[Cause, float] = defaultdict(float)
    if not observed.alive:
        for row in ledger_rows(state, observed):
            totals[Cause.EXPOSED if row.cause is Cause.WAITING else row.cause] += row.seconds
        return {str(cause): totals[cause] for cause in Cause if totals[cause] > 0}
    causes = _of_steps(state.ledger)
    if state.startup_ns >= 0:
        set_up = _add_set_up(state, causes, state.last_event_ns)
        causes[Cause.SET_UP] += sum(set_up.values()) + _launch_ns(state, observed)
    for row in _silent_rows(state, state.silence):
        causes[row.cause] += row.seconds * 1e9
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
    is_over = state.startup_ns >= 0
    spent = state.startup_ns if is_over else until - began_ns(state)
    phases = list(state.setup_ns if is_over else state.window.phase_ns)
    for phase in _PARTS_OF_SET_UP:
        phases[phase] = 0
    phases[Phase.OTHER] = max(0, spent - sum(phases))
    _take(phases, state.ledger.silent_set_up_ns if is_over else state.window.silent_ns)
    for phase, ns in zip(Phase, phases, strict=True):
        if phase is not Phase.OTHER:
            causes[OF_PHASE[phase]] += ns
    return _parts_of_set_up(state, phases[Phase.OTHER])


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


def has_exited(state: RankState) -> bool:
    """Returns True if the script of the rank has ended without an error."""
    return state.exit is not None and state.exit.how is ExitKind.CLEAN


def _add_step_under_way(
    state: RankState, causes: dict[Cause, float], until: int, observed: Observed
) -> None:
    """Adds the time since the last step, without that of a silence that lasts."""
    if not state.steps and state.startup_ns < 0:
        return
    since = state.recorded_ns or began_ns(state) + state.startup_ns
    window = state.device_window if state.on_device else state.window
    phases, silent = list(window.phase_ns), state.window.silent_ns
    if observed.failed:
        causes[Cause.LOST] += max(0, until - since - silent)
        return
    phases.append(max(0, until - since - sum(phases)))  # what no phase has had yet
    _take(phases, silent)
    for phase, ns in zip(Phase, phases, strict=False):
        causes[OF_PHASE[phase]] += ns
    is_over = has_exited(state) or not observed.alive
    causes[Cause.SHUT_DOWN if is_over else OF_PHASE[state.phase]] += phases[-1]


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
    """Returns the activities of the loop beside training, the longest first."""
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
