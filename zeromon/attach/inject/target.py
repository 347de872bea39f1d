"""The process in which the injection runs a line, and the addresses that this needs."""

import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

THREAD_NAME = "zeromon-inject"
"""The name of an injected thread until it ends."""


class Target(NamedTuple):
    """A process, and the addresses that an injection needs."""

    pid: int
    symbols: dict[str, int]
    padding: int
    """Address of the padding for the code."""
    room: int
    """Length of the padding in bytes."""


def waits_for_interpreter(pid: int) -> bool:
    """Whether an injected thread is still in process *pid*, waiting for the interpreter's lock."""
    with suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            with suppress(OSError):
                if (task / "comm").read_text().strip() == THREAD_NAME:
                    return True
    return False


def wait_for(question: Callable[[], bool], seconds: float) -> bool:
    """Whether *question* becomes true within *seconds*."""
    deadline = time.monotonic() + seconds
    while not question():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.002)
    return True
