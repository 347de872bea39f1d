"""Finds the lines of the script that the training thread runs between the phases of its steps.

A timer would cost each step something. The heartbeat looks a few times a second at where the thread is,
and only while that is in no phase, so that most looks hit what takes most time. The callers of the
optimizer's step show which function is the training loop: what that function calls is the script's own
code, and what calls that function is not.
"""

import os
import sys
import time
from collections import Counter
from types import CodeType, FrameType
from typing import Any, NamedTuple

from zeromon.ring.codes import Phase
from zeromon.ring.model_metadata import INSTALLED
from zeromon_agents.runtime.guard import frames_outwards
from zeromon_agents.runtime.hook_context import OFF, HookContext

_LOOKS_A_SECOND = 4
_PAUSE_SECONDS = 0.017
"""Between two looks; no multiple of what steps usually take."""
_MIN_LOOKS = 8
_MAX_LOOKS = 256
"""Then all counts are halved: what the script does now outweighs what it did before."""
_SENT_LINES = 6
_MAX_RECORDS = 24
_RECORD_SECONDS = 10.0


class Line(NamedTuple):
    """A line that the training thread was at."""

    place: str
    communicates: bool
    """It waited there in a function of torch.distributed."""


class OwnCode:
    """Counts lines on the heartbeat's thread. *record_seconds* is a parameter for tests."""

    def __init__(self, context: HookContext, record_seconds: float = _RECORD_SECONDS) -> None:
        self._context = context
        self._record_seconds = record_seconds
        self._loop: frozenset[CodeType] = frozenset()
        """The functions that the optimizer's step was called from."""
        self._counts: Counter[Line] = Counter()
        self._of_step: list[Line] = []
        """Lines seen in the step under way, which may be none: the script may have left its loop."""
        self._step = 0
        self._sent: Line | None = None
        self._sent_total = 0
        self._records, self._next_record = 0, 0.0

    def remember_loop(self) -> None:
        """Takes the callers of the optimizer's step, on the training thread."""
        frames = frames_outwards(sys._getframe())
        self._loop = frozenset(f.f_code for f in frames if not _is_torch(f.f_code))

    def look(self) -> None:
        """Counts the lines at which the training thread is; stops at once where that is in a phase."""
        context = self._context
        for number in range(_LOOKS_A_SECOND):
            if context.phase != Phase.OTHER or context.mode == OFF or not self._loop:
                break
            if number:
                time.sleep(_PAUSE_SECONDS)
            self._count(self._innermost_line(sys._current_frames().get(context.thread)))
        self._send()

    def _count(self, script_line: Line | None) -> None:
        if self._context.step != self._step:
            self._counts.update(self._of_step)
            self._step, self._of_step = self._context.step, []
        # Asked again: the thread may have entered a phase while its frames were read
        if script_line is not None and self._context.phase == Phase.OTHER:
            self._of_step.append(script_line)
            del self._of_step[:-_MAX_LOOKS]

    def _innermost_line(self, innermost: FrameType | None) -> Line | None:
        """Returns the innermost line of the script below the training loop; None where that is unknown.

        Where the loop is a library's, such as a trainer's, and calls nothing of the script, that of the
        library.
        """
        library, communicates = None, False
        for frame in frames_outwards(innermost):
            code = frame.f_code
            communicates = communicates or "/torch/distributed/" in code.co_filename
            in_loop = code in self._loop
            if not any(marker in code.co_filename for marker in INSTALLED):
                is_own = in_loop or any(outer.f_code in self._loop for outer in frames_outwards(frame))
                return Line(_frame_place(frame), communicates) if is_own else None
            if library is None and (
                in_loop or ("-packages/" in code.co_filename and not _is_torch(code))
            ):
                library = frame
            if in_loop:
                return Line(_frame_place(library or frame), communicates)
        return None

    def _send(self) -> None:
        """Writes the counts when they say more than before: each record stays in the name table."""
        total = sum(self._counts.values())
        if total >= _MAX_LOOKS:
            self._counts = Counter({spot: n // 2 for spot, n in self._counts.items() if n > 1})
        top_lines, now_seconds = self._counts.most_common(_SENT_LINES), time.monotonic()
        if total < _MIN_LOOKS or now_seconds < self._next_record or self._records >= _MAX_RECORDS:
            return
        if top_lines[0][0] != self._sent or total >= 2 * self._sent_total:
            self._sent, self._sent_total = top_lines[0][0], total
            self._records, self._next_record = self._records + 1, now_seconds + self._record_seconds
            rows = [[*spot, count] for spot, count in top_lines]
            self._context.add_metadata(own_code={"looks": total, "lines": rows})


def _is_torch(code: CodeType) -> bool:
    return "/torch/" in code.co_filename or "/zeromon_agents/" in code.co_filename


def _frame_place(frame: Any) -> str:
    """``train.py:111 in log_metrics``; of an installed package its path within the packages."""
    name = frame.f_code.co_filename.rpartition("-packages/")[2].removeprefix(f"{os.getcwd()}/")
    return f"{name[-100:]}:{frame.f_lineno} in {frame.f_code.co_name[:40]}"
