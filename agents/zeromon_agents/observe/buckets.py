"""Collectives of DDP's reducer on a device, and how long the compute stream waits for each. Pure.

At the end of a backward the compute stream waits for each bucket in order, and copies it to the
gradients unless these are views of the bucket. Marks lie before the first wait and after the last copy,
and at the end of each collective.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from zeromon_agents.runtime.hook_context import EVENT, NBYTES, Entry

_HALVINGS = 40
_SMALLEST_COPY = 2 << 20
"""A copy within a device takes at least as long as one of so many bytes: to start it, some 1.5 us."""


@dataclass(slots=True, eq=False)
class Bucket:
    """An all-reduce of the reducer."""

    entry: Entry
    """Its event is where the gradients of the bucket are computed."""
    tensors: int
    """The number of gradients in it."""
    left: Any = None
    """The event on the compute stream behind the call."""
    end: Any = None
    """The event at the end of the collective."""

    @property
    def is_known(self) -> bool:
        """True where all its events were recorded."""
        return None not in (self.entry[EVENT], self.left, self.end)

    @property
    def copy_size(self) -> int:
        """How long it takes to copy its gradients, against that of other buckets."""
        return int(self.entry[NBYTES]) + self.tensors * _SMALLEST_COPY


@dataclass(slots=True, eq=False)
class HiddenWait:
    """A part of a phase in which the compute stream waits, in C++, for collectives of DDP's reducer."""

    reached: Any
    left: Any
    group: int
    calls: int
    sequence: int
    """The group's number of the last of them; 0 where unknown."""
    buckets: Sequence[Bucket]
    """The collectives, where their own events are known; all of *calls* then."""

    def has_ended(self) -> bool:
        """Returns whether the device has come to all events, also those of another stream."""
        return all(bucket.end.query() for bucket in self.buckets)


def waits_of_each(span: int, ends: Sequence[int], sizes: Sequence[int]) -> list[int]:
    """Returns the nanoseconds that the compute stream stands still for each bucket.

    *span*: nanoseconds from the first wait to the end of the last copy. *ends*: when each collective
    ends, from the first wait on; below 0 before it. *sizes*: :attr:`Bucket.copy_size` of each. Copies
    take a time in proportion to it, so that waits and copies add up to *span*.
    """
    low, high = 0.0, span / max(1, sum(sizes))
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        _, total = _waits(middle, ends, sizes)
        low, high = (low, middle) if total > span else (middle, high)
    return [round(wait) for wait in _waits(low, ends, sizes)[0]]


def _waits(copy_ns: float, ends: Sequence[int], sizes: Sequence[int]) -> tuple[list[float], float]:
    """Returns the wait for each bucket, and their sum with copies of *copy_ns* for each unit of size."""
    at, waits = 0.0, []
    for end, size in zip(ends, sizes, strict=True):
        waits.append(max(0.0, end - at))
        at += waits[-1] + copy_ns * size
    return waits, at
