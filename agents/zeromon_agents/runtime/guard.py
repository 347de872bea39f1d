"""Keeps errors of hooks away from the training loop: counts them, and keeps the first one's text.

Everything that a hook does beyond the wrapped call must be guarded: by
:func:`zeromon_agents.runtime.around.around`, by :meth:`Guard.guarded`, or, on the hot path, where one
more call would cost too much, by ``except Guard.CAUGHT`` and :meth:`Guard.note`.
"""

import functools
from collections.abc import Callable, Iterable
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
            message = mask_words([str(error)[:10_000]])[0]
            self.first = f"{hook_name}: {type(error).__name__}: {message}"[:500]
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
                self.note(error, hook.__qualname__)

    def guarded(self, hook: Callable[P, Any]) -> Callable[P, None]:
        """Returns *hook* wrapped so that it counts its errors and raises none of them."""

        @functools.wraps(hook)
        def guarded_hook(*args: P.args, **kwargs: P.kwargs) -> None:
            try:
                hook(*args, **kwargs)
            except Guard.CAUGHT as error:
                self.note(error, hook.__qualname__)

        return guarded_hook
