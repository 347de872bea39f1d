"""The frames of a stack that tell where it comes from. Pure.

A frame is ``file:line:function``, the innermost first. C++ has files without a path to Python.
"""

import re
from collections.abc import Sequence

_PYTHON = re.compile(r"\.py:|<[\w ]+>:\d|^/tmp/ipykernel")
_LIBRARY = re.compile(r"/(?:site|dist)-packages/|/lib/python\d|<(?:frozen|string)|^torch/|/torch/")
_PLUMBING = re.compile(
    r":(?:_?_?\w*call_impl|_fn|decorate_context|wrapper|inner)$"
    r"|unwind::unwind|CapturedTraceback::|gather_with_cpp|CachingAllocator|:_start$|__libc_start"
    r"|_?Py(?:Eval|Object|Function|Run)_|core/boxing|/Register|/Redispatch|Modules/main\.c|ceval\.c"
)
_OF_EVERY_CALL = re.compile(r":\d+:(?:\w+ )?(?:c10|at|std|torch::autograd::Node)::")
NO_STACK = "no stack"


def told(stack: Sequence[str]) -> list[str]:
    """The frames of Python without what passes calls on; without any, those of C++ that tell."""
    frames = [frame for frame in stack if not _PLUMBING.search(frame)]
    python = [frame for frame in frames if _PYTHON.search(frame)]
    return python or [frame for frame in frames if not _OF_EVERY_CALL.search(frame)] or frames


def frame_text(frame: str) -> str:
    """``linear.py:134 forward``."""
    place, _, name = frame.partition(":")
    line, _, name = name.partition(":")
    place = place.rpartition("/")[2]
    return name or place if place in ("", "??") else f"{place}:{line} {name}"


def origin(stack: Sequence[str], *, alone: bool = False) -> str:
    """The innermost frame of the user's own, *alone* or with what it has called; :data:`NO_STACK`."""
    frames = told(stack)
    if not frames:
        return NO_STACK
    own = next(
        (frame for frame in frames if _PYTHON.search(frame) and not _LIBRARY.search(frame)), ""
    )
    shown = (own,) if own and alone else (own, frames[0])
    parts = dict.fromkeys(frame_text(frame) for frame in shown if frame)
    return " from ".join(reversed(parts))
