"""Replaces attributes of classes and modules, and restores exactly what was there before."""

from collections.abc import Callable
from typing import Any

_ABSENT = object()


class Patches:
    """A stack of replaced attributes.

    Originals are read from ``owner.__dict__``: ``getattr`` on a pybind class strips the descriptor, and
    restoring the stripped value would lose ``self``.
    """

    def __init__(self) -> None:
        self._replaced: list[tuple[Any, str, Any, Any]] = []

    def original(self, owner: Any, name: str) -> Any:
        """Returns what *owner* itself holds under *name*. Raises KeyError when *owner* inherits it."""
        return vars(owner)[name]

    def set(self, owner: Any, name: str, replacement: Any) -> None:
        """Puts *replacement* in place of *owner*.*name*."""
        self._replaced.append((owner, name, vars(owner).get(name, _ABSENT), replacement))
        setattr(owner, name, replacement)

    def wrap(self, owner: Any, name: str, wrapper: Callable[[Any], Any]) -> None:
        """Replaces *owner*.*name* by ``wrapper(original)``. Raises KeyError as :meth:`original`."""
        self.set(owner, name, wrapper(self.original(owner, name)))

    def wrap_in(self, module: Any, function: str, wrapper: Callable[[Any], Any]) -> None:
        """Wraps a function or a ``Class.method`` of *module*, if its version has it."""
        owner_name, _, name = function.rpartition(".")
        owner = getattr(module, owner_name, None) if owner_name else module
        if owner is not None and name in vars(owner):
            self.wrap(owner, name, wrapper)

    def restore(self) -> list[str]:
        """Restores every original, newest first, and returns the names that could not be restored.

        An attribute that another tool has replaced since keeps the other tool's version, because
        restoring the original would remove that patch. The wrapper underneath then only passes calls on.
        """
        kept: list[str] = []
        while self._replaced:
            owner, name, original, replacement = self._replaced.pop()
            if vars(owner).get(name, _ABSENT) is not replacement:
                kept.append(f"{getattr(owner, '__name__', owner)}.{name}")
            elif original is _ABSENT:
                delattr(owner, name)
            else:
                setattr(owner, name, original)
        return kept
