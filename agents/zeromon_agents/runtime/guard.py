"""Keeps errors of hooks away from the training loop, and changes hooks at a safe point.

Everything that a hook does beyond the wrapped call must be guarded: by
:func:`zeromon_agents.runtime.around.around`, by :meth:`Guard.guarded`, or, on the hot path, where one
more call would cost too much, by ``except Guard.CAUGHT`` and :meth:`Guard.note`.
"""

import functools
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from types import FrameType
from typing import Any, ParamSpec

from zeromon.ring.masking import mask_words

P = ParamSpec("P")

_LIMIT = 1000


class Guard:
    """Counts the agent's errors and calls :attr:`on_limit` after a thousand."""

    CAUGHT = Exception
    """Errors that hooks catch. KeyboardInterrupt and SystemExit belong to the user and pass through."""

    def __init__(self) -> None:
        self.errors = 0
        self.first: str | None = None
        self._reported = False
        self.on_limit: Callable[[], None] | None = None

    def note(self, error: BaseException, hook_name: str) -> None:
        """Counts *error*, raised by the hook named *hook_name*."""
        self.errors += 1
        if self.first is None:
            # Masked before it is cut: a rule does not recognize half of a secret
            message = mask_words([str(error)[:10_000]])[0]
            self.first = f"{hook_name}: {type(error).__name__}: {message}"[:500]
        # Not `>=`: each later error would call `on_limit` again
        if self.errors == _LIMIT and self.on_limit is not None:
            self.on_limit()

    def message(self) -> str | None:
        """Returns the message for the user once; None before the first error, and afterwards."""
        if self.first is None or self._reported:
            return None
        self._reported = True
        return f"zeromon: a hook failed and training goes on without it ({self.first})"

    def run(self, hooks: Iterable[Callable[[], Any]]) -> None:
        """Calls *hooks* one after the other; the failure of one does not affect the others."""
        for hook in hooks:
            try:
                hook()
            except Guard.CAUGHT as error:  # noqa: PERF203
                self.note(error, _name_of(hook))

    def guarded(self, hook: Callable[P, Any]) -> Callable[P, None]:
        """Returns *hook* wrapped so that it counts its errors and raises none of them."""

        @functools.wraps(hook)
        def guarded_hook(*args: P.args, **kwargs: P.kwargs) -> None:
            try:
                hook(*args, **kwargs)
            except Guard.CAUGHT as error:
                self.note(error, _name_of(hook))

        return guarded_hook


def _name_of(hook: Callable[..., Any]) -> str:
    """Returns the name of *hook*; a ``functools.partial`` has none, so that of its function."""
    return str(getattr(getattr(hook, "func", hook), "__qualname__", type(hook).__name__))


# ---- runs an action while no thread executes the code of one file --------------------------------

# torch calls its global optimizer hooks while it iterates over the dictionary that holds them. A hook
# that another thread adds or removes meanwhile would raise in the training loop.

_TIMEOUT_SECONDS = 2.0
_PAUSE_SECONDS = 0.002
_LONG_SWITCH_INTERVAL_SECONDS = 1.0
_one_at_a_time = threading.Lock()
"""Two at once would take the other's long interval for the program's own, and leave it behind."""


def run_when_not_executing(file: str, act: Callable[[], None], is_wanted: Callable[[], bool]) -> bool:
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
    # Without `is_wanted`, an attach that waits would install its hooks after the detach
    while is_wanted() and not _try_once(file, act):
        time.sleep(10 * _PAUSE_SECONDS)


def _try_once(file: str, act: Callable[[], None]) -> bool:
    """Checks and acts without releasing the interpreter's lock in between."""
    if not _one_at_a_time.acquire(timeout=_PAUSE_SECONDS):
        return False
    interval = sys.getswitchinterval()
    # By default another thread gets the interpreter after 5 ms: it could enter *file* before *act*
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
