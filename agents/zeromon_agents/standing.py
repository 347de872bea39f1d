"""A run that was joined and stands still: what torch itself knows of the collectives it waits in.

Hooks that came later have not seen them. The c10d Flight Recorder lists what was issued and has not
retired, with the moment and the sizes; a group's sequence number says how far this rank has come in it.
Both are read by the beat, and only while nothing moves. Where the Flight Recorder is off, the sequence
numbers alone are told.
"""

from __future__ import annotations

import sys
import threading
import time
from typing import Any

from zeromon.events import Flag, Kind, head, place
from zeromon_agents.c10d import Collectives, Group, sequence_number
from zeromon_agents.recorder import Recorder
from zeromon_agents.unseen import op_of, payload_bytes, read_flight_recorder

_QUIET_LOOKS = 2
_LONG_NS = 5_000_000_000
_MOST_FRAMES = 24
_MOST_STACKS = 50


class Standing:
    """Notices that nothing moves, and tells what is in flight and where the script is."""

    def __init__(self, recorder: Recorder, collectives: Collectives) -> None:
        self._recorder = recorder
        self._collectives = collectives
        self._last: object = None
        self._quiet = 0
        self._shown: dict[tuple[int, int], int] = {}
        """(group, sequence number) -> the word of the record, of what was told to be in flight."""
        self._stack: list[str] = []
        self._stacks = 0

    def look(self) -> bool:
        """Whether the run stands still; called once a second, and at once when it was joined."""
        groups = [(g, pg) for g in self._groups() if (pg := g.ref()) is not None]
        numbers = {group.id: sequence_number(pg) for group, pg in groups}
        moment = (self._recorder.step, numbers)
        first, moved = self._last is None, moment != self._last
        self._last = moment
        self._quiet = 0 if moved else self._quiet + 1
        if self._quiet < _QUIET_LOOKS and not first:
            self._take_back(set())
            self._tell_stack([])
            return False
        flying = in_flight({str(pg.group_name): group for group, pg in groups})
        self._tell_place(numbers)
        if first and not any(time.monotonic_ns() - e[1] > _LONG_NS for e in flying.values()):
            return False
        self._take_back(set(flying))
        self._tell(flying)
        return True

    def _groups(self) -> list[Group]:
        return list(self._collectives.groups.values())

    def _tell(self, flying: dict[tuple[int, int], Any]) -> None:
        write = self._recorder.ring.write
        ours = {(group.id, number) for group in self._groups() for number in group.numbers}
        for key, (op, issued_ns, nbytes) in flying.items():
            if key not in ours and key not in self._shown:
                word = self._shown[key] = head(0, op, self._recorder.phase, Flag.INFERRED)
                issued = head(Kind.ISSUED) | word
                write(issued_ns, issued, place(key[0]), nbytes, key[1], 0, 0)

    def _tell_place(self, numbers: dict[int, int]) -> None:
        """How far this rank is in each group, and in its script."""
        now = time.monotonic_ns()
        for group, number in numbers.items():
            word = head(Kind.GROUP_SEQUENCE)
            self._recorder.ring.write(now, word, place(group), number, 0, 0, 0)
        self._tell_stack(main_stack())

    def _tell_stack(self, stack: list[str]) -> None:
        if stack != self._stack and self._stacks < _MOST_STACKS:
            self._stack, self._stacks = stack, self._stacks + bool(stack)
            self._recorder.meta(stack=stack)

    def _take_back(self, still: set[tuple[int, int]]) -> None:
        """What was told and is over, is over; nothing is said of how long it took."""
        now = time.monotonic_ns()
        for key in self._shown.keys() - still:
            word = head(Kind.DONE, flags=Flag.FAILED) | self._shown.pop(key)
            self._recorder.ring.write(now, word, place(key[0]), 0, now, 0, key[1])


def in_flight(groups: dict[str, Group]) -> dict[tuple[int, int], tuple[int, int, int]]:
    """(group, number) -> (operation, CLOCK_MONOTONIC of its issue, bytes), by torch's own record."""
    found = {}
    shift = time.monotonic_ns() - time.time_ns()
    for entry in read_flight_recorder(only_active=True):
        group = groups.get(str((entry.get("process_group") or ("",))[0]))
        if group is None or entry.get("retired") or entry.get("is_p2p"):
            continue
        op = op_of(str(entry.get("profiling_name", "")))
        issued = int(entry.get("time_created_ns") or 0) + shift
        key = group.id, int(entry.get("collective_seq_id", 0))
        found[key] = int(op), issued, payload_bytes(op, entry)
    return found


def main_stack() -> list[str]:
    """Where the main thread is in Python, the outermost call first: ``train.py:41 in main``."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    lines: list[str] = []
    while frame is not None and len(lines) < _MOST_FRAMES:
        code = frame.f_code
        lines.append(f"{code.co_filename[-120:]}:{frame.f_lineno} in {code.co_name[:60]}")
        frame = frame.f_back
    return lines[::-1]
