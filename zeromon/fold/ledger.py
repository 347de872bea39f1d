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

from zeromon.fold.state import LedgerSums, RankState, Silence
from zeromon.ring.codes import Activity, ExitKind, Phase, SetUp
from zeromon.snapshot import StepSummary
from zeromon.snapshot.host import ExtensionLock, HostMemory
from zeromon.snapshot.ledger import ActivityRow, Cause, LedgerRow, sum_by_cause
from zeromon.snapshot.levels import STALL_SECONDS, START_SECONDS
from zeromon.snapshot.rank import Halt


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
_COMPUTE_PHASES = tuple(phase for phase in Phase if OF_PHASE[phase] is Cause.COMPUTE)
_TRAINING_PHASES = (*_COMPUTE_PHASES, Phase.OTHER)
"""The phases whose exposed communication is a cause of its own."""
_KINDS = tuple((OF_PHASE[phase], phase in _TRAINING_PHASES) for phase in Phase)
"""The cause of each phase, by its number, and whether its exposed communication is one of its own."""
_PARTS_OF_SET_UP = tuple(phase for phase in Phase if OF_PHASE[phase] in (Cause.COMPUTE, Cause.OTHER))
"""The phases that count as set-up before the first step."""
LAUNCHER = "launcher"
"""The part of the set-up before the process of the rank."""


def add_ledger_step(ledger: LedgerSums, step: StepSummary) -> None:
    """Adds a step of which everything is known to the sums of the ledger."""
    # Steps of a history or of Prometheus may lack the split by phase, and the index would raise
    timed = step.timed and bool(step.phase_exposed_ns)
    phases, exposures = list(step.phase_ns), list(step.phase_exposed_ns)
    for phase, silent in _take_longest(phases, step.silent_ns).items():
        if timed and 2 * exposures[phase] >= silent:  # the wait of a hang was blocked time as well
            exposures[phase] = max(0, exposures[phase] - silent)
    for phase, spent_ns in enumerate(phases):
        if not spent_ns:
            continue
        if timed:
            exposed = min(spent_ns, exposures[phase])
            ledger.timed_ns[phase] += spent_ns
            ledger.timed_exposed_ns[phase] += exposed
        else:
            timed_ns = ledger.timed_ns[phase]
            exposed = spent_ns * ledger.timed_exposed_ns[phase] // timed_ns if timed_ns else 0
        ledger.spent_ns[phase] += spent_ns
        ledger.exposed_ns[phase] += exposed
    ledger.offload_ns += step.offload_blocked_ns


def _take_longest(phases: list[int], ns: int) -> dict[int, int]:
    """Takes *ns* out of the longest of *phases*; returns what it took, by phase."""
    by_phase: dict[int, int] = {}
    while ns > 0 and (longest := max(phases)) > 0:
        phase, part_ns = phases.index(longest), min(ns, longest)
        phases[phase] -= part_ns
        by_phase[phase] = part_ns
        ns -= part_ns
    return by_phase


def end_silence(state: RankState, t_ns: int) -> None:
    """Adds the stall or hang of *state*, which has ended at *t_ns*, to the sums."""
    silence, state.silence = state.silence, None
    if silence is None:
        return
    silent_ns = max(t_ns, silence.counted_ns) - silence.since_ns
    state.window.silent_ns += silent_ns
    ledger = state.ledger
    if silence.cause is Cause.HANG:
        ledger.hang_ns[silence.of] = ledger.hang_ns.get(silence.of, 0) + silent_ns
    else:
        ledger.stall_ns += silent_ns


def process_began_ns(state: RankState) -> int:
    """When the process of the rank began, or its agent where that was attached later."""
    start = state.meta.get("process_start_ns")
    if isinstance(start, int) and not state.meta.get("attached"):
        return start
    return state.first_event_ns


def ledger_rows(state: RankState, observed: Observed = NOTHING_OBSERVED) -> tuple[LedgerRow, ...]:
    """Every second of the rank in one cause each, from the launch to the end of its attempt."""
    until_ns = observed.until_ns or state.last_event_ns
    end_ns = min(observed.died_ns or until_ns, until_ns)
    silence = _current_silence(state, observed, end_ns)
    # The times of the last step may still come: it is added to a copy of the sums.
    sums = state.ledger
    # Without the copies, replace() shares the lists: each tick adds the last step to the live sums
    with_step = replace(
        sums,
        spent_ns=[*sums.spent_ns],
        exposed_ns=[*sums.exposed_ns],
        timed_ns=[*sums.timed_ns],
        timed_exposed_ns=[*sums.timed_exposed_ns],
    )
    if state.history:
        add_ledger_step(with_step, state.history[-1])
    causes = _sum_causes(with_step)
    exposed = causes.pop(Cause.EXPOSED, 0.0)
    silent = silence.counted_ns - silence.since_ns if silence is not None else 0
    set_up = _add_set_up(state, causes, end_ns - (silent if state.startup_ns < 0 else 0))
    _add_step_under_way(state, causes, end_ns - silent, observed)
    causes[Cause.DEAD if observed.failed else Cause.SHUT_DOWN] += max(0, until_ns - end_ns)
    rows = [LedgerRow(cause=cause, seconds=ns / 1e9) for cause, ns in causes.items() if ns >= 1]
    set_up[LAUNCHER] = _launch_duration_ns(state, observed)
    rows += [LedgerRow(cause=Cause.SET_UP, of=name, seconds=ns / 1e9) for name, ns in set_up.items()]
    return sum_by_cause(
        (*rows, *_split_exposed_time(state, exposed), *_silence_ledger_rows(state, silence))
    )


def _launch_duration_ns(state: RankState, observed: Observed) -> int:
    """Nanoseconds from the beginning of the attempt to the process of the rank."""
    if state.meta.get("attached") or not observed.since_ns:
        return 0
    return max(0, process_began_ns(state) - observed.since_ns)


def _current_silence(state: RankState, observed: Observed, end_ns: int) -> Silence | None:
    """The stall or hang that lasts at *end_ns*, counted up to there.

    A rank that failed may have been seen by no collector before: its last progress decides.
    """
    if state.silence is not None:
        return replace(state.silence, counted_ns=max(end_ns, state.silence.since_ns))
    min_seconds = STALL_SECONDS if state.startup_ns >= 0 else START_SECONDS
    if not observed.failed or end_ns - state.progress_ns < min_seconds * 1e9:
        return None
    waits = any(of_group.in_flight for of_group in state.group_calls.values())
    # Before the first record of training progress_ns is 0: the silence would begin at boot
    since_ns = max(state.progress_ns, process_began_ns(state))
    return Silence(Cause.HANG if waits else Cause.STALL, "", since_ns, max(end_ns, since_ns))


def _silence_ledger_rows(state: RankState, silence: Silence | None) -> list[LedgerRow]:
    """The stalls and hangs of the rank, with *silence*, which lasts."""
    ledger = state.ledger
    rows = [LedgerRow(cause=Cause.STALL, seconds=ledger.stall_ns / 1e9)]
    rows += [LedgerRow(cause=Cause.HANG, of=of, seconds=ns / 1e9) for of, ns in ledger.hang_ns.items()]
    if silence is not None:
        seconds = max(0, silence.counted_ns - silence.since_ns) / 1e9
        rows.append(LedgerRow(cause=silence.cause, of=silence.of, seconds=seconds))
    return rows


def ledger_totals(state: RankState, observed: Observed = NOTHING_OBSERVED) -> dict[str, float]:
    """Seconds by cause, of which none decreases while the rank lives or after.

    Of a live rank all but the last step, whose times may still come, and the step under way.
    """
    totals: defaultdict[Cause, float] = defaultdict(float)
    if not observed.alive:
        for row in ledger_rows(state, observed):
            # The split of exposed time moves as matches arrive: as counters, both could decrease
            totals[Cause.EXPOSED if row.cause is Cause.WAITING else row.cause] += row.seconds
        return {str(cause): totals[cause] for cause in Cause if totals[cause] > 0}
    causes = _sum_causes(state.ledger)
    if state.startup_ns >= 0:
        set_up = _add_set_up(state, causes, state.last_event_ns)
        causes[Cause.SET_UP] += sum(set_up.values()) + _launch_duration_ns(state, observed)
    for row in _silence_ledger_rows(state, state.silence):
        causes[row.cause] += row.seconds * 1e9
    return {str(cause): causes[cause] / 1e9 for cause in Cause if causes[cause] > 0}


def _sum_causes(ledger: LedgerSums) -> defaultdict[Cause, float]:
    """Nanoseconds by cause."""
    causes: defaultdict[Cause, float] = defaultdict(float)
    for phase, spent_ns in enumerate(ledger.spent_ns):
        if not spent_ns:
            continue
        cause, trains = _KINDS[phase]
        exposed = ledger.exposed_ns[phase] if trains else 0
        causes[cause] += spent_ns - exposed
        causes[Cause.EXPOSED] += exposed
    # Offload may also block outside of the computing phases: without min(), compute is negative
    offload = min(causes[Cause.COMPUTE], ledger.offload_ns)
    causes[Cause.COMPUTE] -= offload
    causes[Cause.OFFLOAD] += offload
    return causes


def _add_set_up(state: RankState, causes: dict[Cause, float], until_ns: int) -> dict[str, int]:
    """Adds what has a cause of its own, and returns the other nanoseconds of the set-up by part."""
    # An attached agent starts after the set-up: it knows neither its length nor its parts
    if state.meta.get("attached"):
        return {}
    is_over = state.startup_ns >= 0
    set_up_ns = state.startup_ns if is_over else until_ns - process_began_ns(state)
    phases = list(state.setup_ns if is_over else state.window.phase_ns)
    for phase in _PARTS_OF_SET_UP:
        phases[phase] = 0
    phases[Phase.OTHER] = max(0, set_up_ns - sum(phases))
    _take_longest(phases, state.ledger.silent_set_up_ns if is_over else state.window.silent_ns)
    for phase, ns in zip(Phase, phases, strict=True):
        if phase is not Phase.OTHER:
            causes[OF_PHASE[phase]] += ns
    return _parts_of_set_up(state, phases[Phase.OTHER])


def _parts_of_set_up(state: RankState, left_ns: int) -> dict[str, int]:
    """Divides *left_ns*; where nothing of them is known, "" has them all."""
    raw = state.meta.get("set_up")
    known_ns = {stage: raw[stage] for stage in SetUp if stage in raw} if isinstance(raw, dict) else {}
    wrapped = state.activities.get((Phase.OTHER, Activity.WRAP, False))
    if wrapped is not None:
        known_ns[SetUp.WRAP] = wrapped.ns
    stage_ns: dict[str, int] = {}
    for stage, ns in known_ns.items():
        if isinstance(ns, int) and ns > 0 and left_ns > 0:
            # A stage may contain a compilation, a cause of its own: without min(), it counts twice
            stage_ns[str(stage)] = min(left_ns, ns)
            left_ns -= stage_ns[str(stage)]
    if left_ns > 0:
        stage_ns[str(SetUp.SCRIPT) if known_ns else ""] = left_ns
    return stage_ns


def startup_ns_by_part(state: RankState) -> dict[str, int]:
    """Nanoseconds of the time before the first step, by part; {} where that time is not known."""
    if state.startup_ns < 0:
        return {}
    causes: defaultdict[Cause, float] = defaultdict(float)
    # The end is not read: the set-up is over
    stage_ns = _add_set_up(state, causes, 0)
    stage_ns |= {str(cause): round(ns) for cause, ns in causes.items() if ns}
    # By the keys: "" alone means that no part is known
    return dict(sorted(stage_ns.items(), key=lambda item: -item[1])) if any(stage_ns) else {}


def has_exited_cleanly(state: RankState) -> bool:
    """Returns True if the script of the rank has ended without an error."""
    return state.exit is not None and state.exit.how is ExitKind.CLEAN


def _add_step_under_way(
    state: RankState, causes: dict[Cause, float], until_ns: int, observed: Observed
) -> None:
    """Adds the time since the last step, without that of a silence that lasts."""
    # Before the loop begins, the same seconds are in the set-up
    if not state.steps and state.startup_ns < 0:
        return
    since_ns = state.recorded_ns or process_began_ns(state) + state.startup_ns
    window = state.device_window if state.on_device else state.window
    phases, silent = list(window.phase_ns), state.window.silent_ns
    if observed.failed:
        causes[Cause.LOST] += max(0, until_ns - since_ns - silent)
        return
    phases.append(max(0, until_ns - since_ns - sum(phases)))  # what no phase has had yet
    _take_longest(phases, silent)
    # Not strict: the last item is of no phase, and is added below
    for phase, ns in zip(Phase, phases, strict=False):
        causes[OF_PHASE[phase]] += ns
    is_over = has_exited_cleanly(state) or not observed.alive
    causes[Cause.SHUT_DOWN if is_over else OF_PHASE[state.phase]] += phases[-1]


def _split_exposed_time(state: RankState, total_ns: float) -> list[LedgerRow]:
    """Splits the exposed time of all steps by dimension, and by the rank that was waited for."""
    weights: dict[tuple[Cause, str], float] = defaultdict(float)
    dims = state.dimension_names()
    for (_, group, phase, _), row in state.traffic.items():
        if phase in _TRAINING_PHASES and row.exposed_ns:
            # Waits are known of matched calls alone: scaled, they stand for the calls without a match
            of_matched = row.exposed_ns / max(1, row.matched_ns)
            left_ns = float(row.exposed_ns)
            for rank, ns in row.waits.items():
                waited = min(left_ns, ns * of_matched)
                weights[Cause.WAITING, f"rank {rank}"] += waited
                left_ns -= waited
            weights[Cause.EXPOSED, dims.get(group, "")] += left_ns
    total_weight = sum(weights.values())
    if total_ns < 1:
        return []
    if not total_weight:
        return [LedgerRow(cause=Cause.EXPOSED, seconds=total_ns / 1e9)]
    return [
        LedgerRow(cause=cause, of=of, seconds=weight * total_ns / total_weight / 1e9)
        for (cause, of), weight in weights.items()
        if weight * total_ns / total_weight >= 1
    ]


def with_lost_steps(
    rows: Iterable[LedgerRow], recent: Sequence[StepSummary], lost_steps: int
) -> tuple[LedgerRow, ...]:
    """*rows* of a rank after its last *lost_steps* steps were taken again; *recent*: its last steps.

    Checkpoints saved or loaded in such a step are not lost. Where more steps were lost than are known,
    the others count as the known ones.
    """
    if lost_steps < 1 or not recent:
        return tuple(rows)
    known_steps = recent[-lost_steps:]
    sums = LedgerSums()
    for step in known_steps:
        add_ledger_step(sums, step)
    lost = _sum_causes(sums)
    lost.pop(Cause.CHECKPOINT, None)
    new_rows, remaining = [], list(rows)
    for cause, ns in lost.items():
        of = (Cause.EXPOSED, Cause.WAITING) if cause is Cause.EXPOSED else (cause,)
        affected = [row for row in remaining if row.cause in of]
        total = sum(row.seconds for row in affected)
        lost_seconds = min(total, ns / 1e9 * lost_steps / len(known_steps))
        remaining = [row for row in remaining if row.cause not in of]
        new_rows += [replace(row, seconds=row.seconds * (1 - lost_seconds / total)) for row in affected]
        new_rows.append(LedgerRow(cause=Cause.LOST, seconds=lost_seconds))
    return sum_by_cause((*remaining, *new_rows))


def loop_activity_rows(state: RankState) -> tuple[ActivityRow, ...]:
    """Returns the activities of the loop beside training, the longest first."""
    rows = [
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
    return tuple(sorted(rows, key=lambda row: -row.seconds))
