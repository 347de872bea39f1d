"""Runs an action only while no thread executes the code of one file.

torch calls its global optimizer hooks while it iterates over the dictionary that holds them. A hook that
another thread adds or removes meanwhile would raise in the training loop.
"""

import sys
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType

_TIMEOUT_SECONDS = 2.0
_PAUSE_SECONDS = 0.002
_LONG_SWITCH_INTERVAL_SECONDS = 1.0
_one_at_a_time = threading.Lock()
"""Two at once would take the other's long interval for the program's own, and leave it behind."""


def run_when_not_executing(
    file: str, act: Callable[[], None], is_wanted: Callable[[], bool]
) -> bool:
    """Runs *act* as soon as no thread executes code of *file*.

    Returns whether it ran within two seconds. After that a thread goes on trying while *is_wanted*
    returns True.
    """
    deadline = time.monotonic() + _TIMEOUT_SECONDS
    while not _try_once(file, act):
        if time.monotonic() > deadline:
            later = (file, act, is_wanted)
            threading.Thread(target=_keep_trying, args=later, name="zeromon", daemon=True).start()
            return False
        time.sleep(_PAUSE_SECONDS)
    return True


def _keep_trying(file: str, act: Callable[[], None], is_wanted: Callable[[], bool]) -> None:
    while is_wanted() and not _try_once(file, act):
        time.sleep(10 * _PAUSE_SECONDS)


def _try_once(file: str, act: Callable[[], None]) -> bool:
    """Checks and acts without releasing the interpreter's lock in between."""
    if not _one_at_a_time.acquire(timeout=_PAUSE_SECONDS):
        return False
    interval = sys.getswitchinterval()
    sys.setswitchinterval(_LONG_SWITCH_INTERVAL_SECONDS)
    try:
        time.sleep(0)  # releases the lock now, so that a whole switch interval lies ahead
        if any(is_within(frame, file) for frame in sys._current_frames().values()):
            return False
        act()
        return True
    finally:
        sys.setswitchinterval(interval)
        _one_at_a_time.release()


def is_within(frame: FrameType | None, file: str) -> bool:
    """Returns whether *frame* or one of its callers executes code of *file*."""
    return any(outer.f_code.co_filename == file for outer in frames_outwards(frame))


def frames_outwards(frame: FrameType | None) -> Iterator[FrameType]:
    """Yields *frame* and its callers, the innermost first."""
    while frame is not None:
        yield frame
        frame = frame.f_back
