"""Replaces attributes and puts them back exactly as they were."""

from __future__ import annotations

from typing import Any

_ABSENT = object()


class Patches:
    """A stack of replaced attributes.

    Originals come from ``owner.__dict__``: ``getattr`` on a pybind class strips the descriptor, and
    restoring that would lose ``self``.
    """

    def __init__(self) -> None:
        self._done: list[tuple[Any, str, Any, Any]] = []

    def original(self, owner: Any, name: str) -> Any:
        """What *owner* itself holds under *name*; raises KeyError when it holds nothing."""
        return vars(owner)[name]

    def set(self, owner: Any, name: str, replacement: Any) -> None:
        """Puts *replacement* in place of *owner*.*name*."""
        self._done.append((owner, name, vars(owner).get(name, _ABSENT), replacement))
        setattr(owner, name, replacement)

    def restore(self) -> list[str]:
        """Undoes everything, newest first.

        An attribute that somebody else has replaced since keeps their version: taking it away would
        lose their patch. Those names are returned; our wrapper under theirs only passes calls on.
        """
        kept: list[str] = []
        while self._done:
            owner, name, original, replacement = self._done.pop()
            if vars(owner).get(name, _ABSENT) is not replacement:
                kept.append(f"{getattr(owner, '__name__', owner)}.{name}")
            elif original is _ABSENT:
                delattr(owner, name)
            else:
                setattr(owner, name, original)
        return kept
