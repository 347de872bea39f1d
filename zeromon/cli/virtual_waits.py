"""The run of a preflight on the clock of its virtual devices: steps, phases, and the waits by unit.

A device times each operation, and the ring of its rank says in which phase it was enqueued, and which
unit called a collective.
"""

import re
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import accumulate, chain, pairwise
from operator import attrgetter, itemgetter
from pathlib import Path
from statistics import fmean, median, mode
from typing import NamedTuple

from zeromon.base.errors import RingError
from zeromon.readout.preflight import UnitWait
from zeromon.ring.buffer import NameKind, RingReader
from zeromon.ring.codes import Flag, Phase, operation_by_name
from zeromon.ring.events import Issued, PhaseSpan, StepMark, decode_record
from zeromon.ring.paths import ring_paths
from zeromon.snapshot import CollectiveStatsRow, RankSnapshot, StepSummary
from zeromon.snapshot.communication import CollectiveRow, bus_factor, overlap_ratio
from zeromon_vgpu.intervals import Intervals, clip, length, subtract, union
from zeromon_vgpu.timeline import Operation, uncovered_nanoseconds

Caller = tuple[int, str, str, str]
"""When it called, in nanoseconds of CLOCK_MONOTONIC; unit, operation and phase."""


SLOW = 1
"""Index of the times for a host that takes its time for an operator: views show those."""


class HostCalls(NamedTuple):
    """Calls, phases and steps of a rank's Python with their times, as far as its ring reaches back."""

    callers: list[Caller]
    """The collectives."""
    phases: list[tuple[int, int, Phase]]
    """Begin and end of each, likewise, and which one."""
    step_ends: dict[int, int]
    """When the host had enqueued which step."""

    def windows(self, operations: Sequence[Operation]) -> list[tuple[int, int, int]]:
        """The number of each step, and from when until when the host enqueued it.

        Without the first two, which do once what the others do not, and without the last one of a
        process that was ended: it had not written all operations.
        """
        last_written = max((operation.enqueued for operation in operations), default=0)
        return [
            (step, begin_ns, end_ns)
            for (earlier, begin_ns), (step, end_ns) in pairwise(self.step_ends.items())
            if 1 < earlier == step - 1 and end_ns <= last_written
        ]

    def phase_at(self, time_ns: int) -> Phase:
        """The phase that goes on then, the inner one of two."""
        position = bisect_right(self.phases, time_ns, key=itemgetter(0))
        phases = (phase for _, end_ns, phase in reversed(self.phases[:position]) if time_ns <= end_ns)
        return next(phases, Phase.OTHER)


class RankRings:
    """The rings of a live run, held open: the collector removes them once the run has ended."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._readers: dict[Path, RingReader] = {}

    def open_new(self) -> None:
        """Opens the rings that have come."""
        for folder in self._folder.glob("*/"):
            for path in ring_paths(folder):
                if path not in self._readers:
                    with suppress(RingError, OSError):
                        self._readers[path] = RingReader(path)

    def calls(self, pid: int) -> HostCalls:
        """Returns what a process did, by its ring."""
        calls = HostCalls([], [], {})
        for reader in self._readers.values():
            if reader.header.pid != pid:
                continue
            units = {
                n.id: str(n.payload.get("fqn", "")) for n in reader.names() if n.kind == NameKind.UNIT
            }
            for record in reader.read(final=True):
                event = decode_record(record)
                if isinstance(event, Issued):
                    unit = units.get(event.unit, "")
                    calls.callers.append((event.t_ns, unit, event.op.label, event.phase.label))
                elif isinstance(event, PhaseSpan) and not event.flags & (Flag.DEVICE | Flag.ASYNC):
                    calls.phases.append((event.start_ns, event.t_ns, event.phase))
                elif isinstance(event, StepMark) and not event.flags & Flag.DEVICE:
                    calls.step_ends[event.step] = event.t_ns
        calls.phases.sort()
        return calls


def waits_by_unit(operations: Sequence[Operation], calls: HostCalls) -> tuple[UnitWait, ...]:
    """Returns what each unit's collectives take in a step, the longest wait first."""
    calls_of_rank = list(_collective_calls(uncovered_nanoseconds(operations, kind=SLOW), calls.callers))
    steps_of_calls = [
        [call for call in calls_of_rank if begin_ns < call[1].enqueued <= end_ns]
        for _, begin_ns, end_ns in calls.windows(operations)
    ]
    # In a step that the agent only counts, no call is known
    counts = [(len(calls), sum(bool(unit) for (unit, *_), *_ in calls)) for calls in steps_of_calls]
    usual_count = mode([count for count in counts if count[1]] or counts or [(0, 0)])
    counted = [
        calls for calls, count in zip(steps_of_calls, counts, strict=True) if count == usual_count
    ]
    sums: dict[tuple[str, str, str], list[int]] = defaultdict(lambda: [0, 0, 0, 0])
    for key, operation, exposed in chain.from_iterable(counted):
        start, finish = operation.unhindered[SLOW]
        for i, number in enumerate((1, operation.bytes, finish - start, exposed)):
            sums[key][i] += number
    n = len(counted)
    rows = [
        UnitWait(
            unit=unit, op=op, phase=phase, calls=calls / n, nbytes=round(size / n),
            seconds=duration / n / 1e9, exposed_seconds=exposed / n / 1e9,
        )
        for (unit, op, phase), (calls, size, duration, exposed) in sums.items()
    ]  # fmt: skip
    return tuple(sorted(rows, key=lambda row: row.exposed_seconds, reverse=True))


def _collective_calls(
    collectives: Iterable[tuple[Operation, int]], callers: Sequence[Caller]
) -> Iterator[tuple[tuple[str, str, str], Operation, int]]:
    """Yields each of the *collectives* with the unit, operation and phase of its caller."""
    used = -1
    for operation, exposed in sorted(collectives, key=lambda pair: pair[0].enqueued):
        position = bisect_right(callers, operation.enqueued, key=itemgetter(0)) - 1
        # all_reduce for ncclDevKernel_AllReduce_Sum_f32_RING_LL(...)
        camel = operation.name.removeprefix("ncclDevKernel_").partition("_")[0].partition("(")[0]
        kernel = re.sub(r"(?<!^)(?=[A-Z])", "_", camel).lower()
        # A second one after the same call was launched by C++, as those of DDP's reducer are
        is_known = position > used and kernel in (callers[position][2], _SEND_RECEIVE)
        used = max(used, position)
        yield callers[position][1:] if is_known else ("", kernel, ""), operation, exposed


_SEND_RECEIVE = "send_recv"
"""NCCL's kernel for sends, receives and all-to-all."""


# ---- the rank on that clock ----------------------------------------------------------------------


def modelled_steps(
    recent: Sequence[StepSummary], operations: Sequence[Operation], calls: HostCalls
) -> list[StepSummary]:
    """Returns the steps of *recent* with the times of the modelled devices, one right after the other.

    A step takes from the end of the last one on its device to its own.
    """
    ordered = sorted(operations, key=_ENQUEUED)
    finished = list(accumulate((op.unhindered[SLOW][1] for op in ordered), max))
    by_number, steps = {step.step: step for step in recent}, list[StepSummary]()
    for number, begin_ns, end_ns in calls.windows(operations):
        low, high = (bisect_right(ordered, at_ns, key=_ENQUEUED) for at_ns in (begin_ns, end_ns))
        if not 0 < low < high or number not in by_number:
            continue
        step, window = by_number[number], (finished[low - 1], finished[high - 1])
        of_step = ordered[low:high]
        sent = union(op.unhindered[SLOW] for op in of_step if op.kind == "collective")
        communication = clip(sent, *window)
        exposed = subtract(communication, union(op.unhindered[SLOW] for op in of_step if op.computes))
        phases, waits = _by_phase(of_step, window[0], exposed, calls)
        start_ns = steps[-1].end_ns if steps else step.start_ns
        steps.append(
            replace(
                step, start_ns=start_ns, end_ns=start_ns + window[1] - window[0], idle=False, untimed=0,
                communication_ns=length(communication), exposed_ns=length(exposed),
                phase_ns=phases, phase_exposed_ns=waits,
            )
        )  # fmt: skip
    return steps


_ENQUEUED = attrgetter("enqueued")


def _by_phase(
    operations: Iterable[Operation], reached: int, exposed: Intervals, calls: HostCalls
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Nanoseconds of a step, from *reached* on, by the phase that enqueued what ends; the exposed part.

    A gap before an operation belongs to the operation's phase, which waits.
    """
    durations, waits = [0] * len(Phase), [0] * len(Phase)
    in_order = sorted(operations, key=lambda op: op.unhindered[SLOW])
    for op in in_order:
        finish = op.unhindered[SLOW][1]
        if finish > reached:
            phase = calls.phase_at(op.enqueued)
            durations[phase] += finish - reached
            waits[phase] += length(clip(exposed, reached, finish))
            reached = finish
    return tuple(durations), tuple(waits)


def on_modelled_clock(
    rank: RankSnapshot, steps: Sequence[StepSummary], waits: Sequence[UnitWait]
) -> RankSnapshot:
    """Returns *rank* with the modelled *steps*, and with the *waits* of its units in one of them."""
    if not steps:
        return replace(rank, steps=replace(rank.steps, median_seconds=None, mean_seconds=None))
    seconds = [step.seconds for step in steps]
    exposed, duration = sum(step.exposed_ns for step in steps), sum(seconds)
    sent = sum(step.communication_ns for step in steps)
    return replace(
        rank,
        steps=replace(
            rank.steps, recent=tuple(steps), median_seconds=median(seconds), mean_seconds=fmean(seconds),
            total_seconds=duration,
            phase_seconds={p.label: sum(step.phase_ns[p] for step in steps) / 1e9 for p in Phase},
        ),
        communication=replace(
            rank.communication,
            overlap_ratio=overlap_ratio(sent, exposed), exposed_ratio=exposed / 1e9 / duration,
            exposed_seconds=exposed / 1e9 / len(steps), wait_seconds=None, late_seconds=None,
            untimed={},
            traffic=tuple(_stats_row(w, rank.communication.collectives, len(steps)) for w in waits),
        ),
    )  # fmt: skip


def _stats_row(wait: UnitWait, totals: Sequence[CollectiveRow], steps: int) -> CollectiveStatsRow:
    """The row of a unit's *wait* in so many *steps*; its group is known where one alone has such."""
    rows = [row for row in totals if row.op == wait.op]
    of_group = rows[0] if len(rows) == 1 else None
    rate = wait.nbytes / wait.seconds if wait.seconds else None
    factor = bus_factor(operation_by_name(wait.op), of_group.group_size) if of_group else None
    busbw = rate * factor if rate and factor else None
    return CollectiveStatsRow(
        op=wait.op, phase=wait.phase, unit=wait.unit, calls=wait.calls, nbytes=wait.nbytes,
        group=of_group.group if of_group else "", group_size=of_group.group_size if of_group else 0,
        nodes=of_group.nodes if of_group else 0, dim=of_group.dim if of_group else "",
        count=round(wait.calls * steps), seconds=wait.seconds,
        exposed_seconds=wait.exposed_seconds, exposed_total_seconds=steps * wait.exposed_seconds,
        wait_seconds=None, transfer_seconds=wait.seconds, algbw_bytes_per_second=rate,
        busbw_bytes_per_second=busbw, best_busbw_bytes_per_second=busbw or 0.0,
    )  # fmt: skip
