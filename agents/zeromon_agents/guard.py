"""The one broad except of the project: what goes wrong in a hook is counted, kept, and ends there.

A hook must never raise into the training loop. Everything a hook does beyond the wrapped call runs
inside :meth:`Guard.note`'s reach: callers catch ``Exception`` through :func:`guarded`, or, on the hot
path where a call more would cost too much, with ``except Guard.CAUGHT`` and :meth:`Guard.note`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, ParamSpec

P = ParamSpec("P")

_LIMIT = 1000


class Guard:
    """Counts the agent's errors; after too many it asks for the agent to be switched off."""

    CAUGHT = Exception
    """What hooks catch. KeyboardInterrupt and SystemExit are the user's and pass."""

    def __init__(self) -> None:
        self.errors = 0
        self.first: str | None = None
        self.told = False
        self.on_limit: Callable[[], None] | None = None

    def note(self, error: BaseException, where: str) -> None:
        """Takes note of *error* in the hook named *where*."""
        self.errors += 1
        if self.first is None:
            self.first = f"{where}: {type(error).__name__}: {error}"[:500]
        if self.errors == _LIMIT and self.on_limit is not None:
            self.on_limit()

    def message(self) -> str | None:
        """The line to tell the user, once; None when there is nothing (new) to say."""
        if self.first is None or self.told:
            return None
        self.told = True
        return f"zeromon: a hook failed and training goes on without it ({self.first})"

    def guarded(self, hook: Callable[P, Any]) -> Callable[P, None]:
        """*hook*, with its errors kept away from the caller."""

        @functools.wraps(hook)
        def safe(*args: P.args, **kwargs: P.kwargs) -> None:
            try:
                hook(*args, **kwargs)
            except Guard.CAUGHT as error:
                self.note(error, hook.__qualname__)

        return safe
