"""What runs only while nothing executes a file leaves the interpreter as it was."""

from __future__ import annotations

import sys
import threading

from zeromon_agents.runtime.guard import run_when_not_executing


def test_several_at_once_leave_the_interval_between_threads_as_it_was() -> None:
    """A detach may come while the attach before it still waits for its moment."""
    before, done = sys.getswitchinterval(), list[bool]()

    def many() -> None:
        for _ in range(50):
            done.append(run_when_not_executing("nowhere.py", lambda: None, lambda: False))

    threads = [threading.Thread(target=many) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sys.getswitchinterval() == before
    assert done == [True] * 150
