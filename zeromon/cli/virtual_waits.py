"""The waits for collectives on virtual devices, by the unit that called them.

The device times each collective, and the ring of its rank says who called it and when.
"""

import re
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from itertools import chain
from operator import itemgetter
from pathlib import Path
from statistics import mode

from zeromon.base.errors import RingError
from zeromon.readout.preflight import UnitWait
from zeromon.ring.buffer import NameKind, RingReader
from zeromon.ring.events import Issued, decode_record
from zeromon.ring.paths import ring_paths
from zeromon_vgpu.timeline import Operation, uncovered_nanoseconds

Caller = tuple[int, str, str, str]
"""When it called, in nanoseconds of CLOCK_MONOTONIC; unit, operation and phase."""


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

    def callers(self, pid: int) -> list[Caller]:
        """Returns the collectives that a process called from Python, as far as its ring reaches back."""
        callers = []
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
                    callers.append((event.t_ns, unit, event.op.name.lower(), event.phase.name.lower()))
        return callers


def waits_by_unit(
    operations: Sequence[Operation], callers: Sequence[Caller], steps: Sequence[tuple[int, int]]
) -> tuple[UnitWait, ...]:
    """Returns what each unit's collectives take in a step, the longest wait first.

    With a host that takes its time for an operator. *steps*: when each began and ended on the device,
    in their order; the first only begins the count.
    """
    # A process that was ended had not written the operations of its last moments
    last_written = max((operation.start for operation in operations), default=0)
    calls_of_rank = list(_collective_calls(uncovered_nanoseconds(operations, kind=1), callers))
    steps_of_calls = [
        [call for call in calls_of_rank if begin_ns <= call[1].start < end_ns]
        for begin_ns, end_ns in steps[1:]
        if end_ns <= last_written
    ]
    # In a step that the agent only counts, no call is known; a window may hold two steps
    named = [calls for calls in steps_of_calls if any(unit for (unit, *_), *_ in calls)]
    candidates = named or steps_of_calls
    usual_count = mode(map(len, candidates)) if candidates else 0
    counted = [calls for calls in candidates if len(calls) == usual_count]
    sums: dict[tuple[str, str, str], list[int]] = defaultdict(lambda: [0, 0, 0, 0])
    for key, operation, exposed in chain.from_iterable(counted):
        start, finish = operation.unhindered[1]
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
