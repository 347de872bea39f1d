"""When asynchronous collectives of a CPU have ended: callbacks of the backend."""

# without it each callback would evaluate its annotations
from __future__ import annotations

import time
from typing import Any

from zeromon_agents.runtime.hook_context import END, NBYTES, PLACE, WORD, Entry

_EXIT_TIMEOUT_NS = 200_000_000
_SMALL_BYTES = 64 << 10
"""Up to this size the end of a collective is not worth a callback while another one is to come."""


class Completions:
    """The callbacks, and which collectives need none."""

    def __init__(self) -> None:
        self._last: Entry | None = None
        """That of the newest callback."""
        self._last_completed: Entry | None = None
        self.waited_for: set[tuple[int, int]] = set()
        """WORD and PLACE of collectives whose works are waited for, not only their futures."""

    def call_back(self, work: Any, entry: Entry) -> None:
        """Gets the true completion time of an asynchronous collective from the backend's own thread.

        That thread has to get the interpreter's lock, which is what it costs. So of many small ones that
        are issued at once few are called back, if their kind is waited for. For the others the time at
        which they are waited for is an upper bound of their end.
        """
        last, kind = self._last, (entry[WORD], entry[PLACE])
        is_small = entry[NBYTES] <= _SMALL_BYTES
        if is_small and last is not None and not last[END] and kind in self.waited_for:
            return

        def completed(_: Any) -> None:
            if not entry[END]:
                entry[END] = time.monotonic_ns()
            self._last_completed = entry

        try:
            future = work.get_future()
        except RuntimeError:  # of torch 2.6 a reduce-scatter on gloo: it ends when it is waited for
            return
        self._last = entry
        future.add_done_callback(completed)

    def settle(self, timeout_ns: int = _EXIT_TIMEOUT_NS) -> None:
        """Waits, before the interpreter exits, until the backend's thread has run the newest callback.

        A thread that requests the interpreter's lock after the exit is ended in the middle of C++, which
        aborts the process.
        """
        entry = self._last
        if entry is None:
            return
        deadline = time.monotonic_ns() + timeout_ns
        while self._last_completed is not entry and time.monotonic_ns() < deadline:
            time.sleep(0.001)
        time.sleep(0.002)  # the callback has run; its thread still releases it
