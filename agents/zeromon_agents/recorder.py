"""What all hooks of one process share: the ring's ``write``, the mode, the phase, the unit.

The mode is read by every hook on every call:

======  ==========================================================================
OFF     hooks only call through (detached, not started, forked child)
IDLE    collectives are counted, nothing is timed: what the agent costs is the
        difference between IDLE and ON steps
ON      everything is recorded
======  ==========================================================================
"""

from __future__ import annotations

import time
from typing import Any

from zeromon.events import Flag, Kind, Phase, head, place
from zeromon.ring import NameKind, RingWriter
from zeromon_agents.guard import Guard

OFF, IDLE, ON = 0, 1, 2

Entry = list[Any]
"""An open collective: a list, because a callback on another thread fills in END."""

WORD, PLACE, NBYTES, ISSUED_NS, SEQUENCE, END, EVENT, HELD_NS = range(8)
"""Its fields. WORD holds op, phase and flags where a record's head has them; HELD_NS is how long the
call that issued it held the caller, or -1 for a synchronous collective, which holds it to its end."""


class Recorder:
    """The state that hooks read and write; one a process."""

    __slots__ = (
        "_ahead",
        "_phase",
        "_units",
        "before",
        "context",
        "detailed",
        "engine",
        "guard",
        "mode",
        "ring",
        "step",
        "unit",
    )

    def __init__(self, ring: RingWriter, guard: Guard) -> None:
        self.ring = ring
        self.guard = guard
        self.mode = OFF
        self.detailed = False
        """Whether this step also takes what is too dear for every step."""
        self._phase: int = Phase.OTHER
        self._ahead = False
        self.context = 0
        """Phase and flags of a collective that is issued now, where a record's head has them."""
        self.engine = 0
        """Number of the DeepSpeed engine that is running, 0 for none."""
        self.unit = 0
        """Id of the FSDP unit that is communicating, 0 for none."""
        self.step = 0
        self.before = 0
        """Steps that the run had taken when the agent joined it."""
        self._units: dict[str, int] = {}

    @property
    def phase(self) -> int:
        """What the rank is doing; hooks that are hot read :attr:`context` instead."""
        return self._phase

    @phase.setter
    def phase(self, phase: int) -> None:
        self._phase = phase
        self.context = head(0, 0, phase, Flag.AHEAD if self._ahead else 0)

    @property
    def ahead(self) -> bool:
        """Whether what is issued now is a prefetch."""
        return self._ahead

    @ahead.setter
    def ahead(self, ahead: bool) -> None:
        self._ahead = ahead
        self.phase = self._phase

    def unit_id(self, fqn: str, describe: dict[str, Any]) -> int:
        """The id under which records speak of the unit *fqn*; 0 when the name table is full."""
        number = self._units.get(fqn)
        if number is None:
            number = self.ring.name(NameKind.UNIT, {"fqn": fqn, **describe})
            self._units[fqn] = number
        return number

    def meta(self, **facts: Any) -> None:
        """Adds facts about this rank; later ones win."""
        self.ring.name(NameKind.META, facts)

    def text(self, text: str) -> int:
        """Stores a text for a record to point at."""
        return self.ring.name(NameKind.TEXT, {"text": text[:4000]})

    # fmt: off
    def write(self, t_ns: int, kind: int, op: int, phase: int, flags: int, group: int, unit: int,
              a: int, b: int, c: int, d: int) -> None:
        """A record by its fields; hot paths pack ``head`` and ``place`` themselves."""
        self.ring.write(t_ns, head(kind, op, phase, flags), place(group, unit), a, b, c, d)
    # fmt: on

    def emit(self, kind: Kind, a: int = 0, b: int = 0, c: int = 0, d: int = 0, op: int = 0) -> None:
        """A record of *now*; for hooks that are not on the hot path."""
        now = time.monotonic_ns()
        self.ring.write(now, head(kind, op, self.phase), place(0, self.unit), a, b, c, d)
