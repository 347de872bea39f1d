"""What is known of a process that something is to be run in."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

THREAD_NAME = "zeromon-inject"
"""Under which the kernel knows an injected thread until it ends."""


class Target(NamedTuple):
    """A process, and what is needed to run something in it."""

    pid: int
    symbols: dict[str, int]
    padding: int
    """Address of the padding that the code goes to."""
    room: int
    """Bytes of it."""

    @property
    def version(self) -> int:
        """Of its Python, as ``sys.hexversion`` has it; 0 before 3.11, which does not say."""
        return self.symbols.get("Py_Version", 0)


def waits_for_interpreter(pid: int) -> bool:
    """Whether an injected thread is still in process *pid*, waiting for the interpreter's lock."""
    with suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            with suppress(OSError):
                if (task / "comm").read_text().strip() == THREAD_NAME:
                    return True
    return False


def wait_for(question: Callable[[], bool], seconds: float) -> bool:
    """Whether *question* comes true within *seconds*."""
    deadline = time.monotonic() + seconds
    while not question():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.002)
    return True
