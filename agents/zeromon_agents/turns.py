"""Changes what another thread may be walking through: only while no thread is there.

torch calls its global optimizer hooks while it iterates over the dictionary that holds them: one that is
added or removed meanwhile, by another thread, would raise in the training loop.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from types import FrameType

_PATIENCE_SECONDS = 2.0
_PAUSE_SECONDS = 0.002
_LONG_TURN_SECONDS = 1.0


def outside_of(file: str, act: Callable[[], None], wanted: Callable[[], bool]) -> bool:
    """Runs *act* as soon as no thread executes code of *file*; whether it did within two seconds.

    After that a thread goes on trying for as long as it is *wanted*.
    """
    deadline = time.monotonic() + _PATIENCE_SECONDS
    while not _in_one_turn(file, act):
        if time.monotonic() > deadline:
            later = (file, act, wanted)
            threading.Thread(target=_go_on, args=later, name="zeromon", daemon=True).start()
            return False
        time.sleep(_PAUSE_SECONDS)
    return True


def _go_on(file: str, act: Callable[[], None], wanted: Callable[[], bool]) -> None:
    while wanted() and not _in_one_turn(file, act):
        time.sleep(10 * _PAUSE_SECONDS)


def _in_one_turn(file: str, act: Callable[[], None]) -> bool:
    """Looks and acts without giving the interpreter's lock away in between."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(_LONG_TURN_SECONDS)
    try:
        time.sleep(0)  # gives it away now, so that this turn has its whole length before it
        if any(is_within(frame, file) for frame in sys._current_frames().values()):
            return False
        act()
        return True
    finally:
        sys.setswitchinterval(interval)


def is_within(frame: FrameType | None, file: str) -> bool:
    """Whether *frame*, or one that it was called from, is code of *file*."""
    while frame is not None:
        if frame.f_code.co_filename == file:
            return True
        frame = frame.f_back
    return False
