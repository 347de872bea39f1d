"""Processes of others: whether they live, and how they ended."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

from zeromon.probes.process import ProcessWatch, describe_wait_status


def grandchild(code: str) -> int:
    """The pid of a process that is not our child: somebody else reaps it."""
    program = (
        "import subprocess, sys\n"
        f"p = subprocess.Popen([sys.executable, '-c', {code!r}])\n"
        "print(p.pid, flush=True)\np.wait()\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    return int(parent.stdout.readline())


def wait_until_dead(watch: ProcessWatch) -> None:
    deadline = time.monotonic() + 60
    while watch.alive() and time.monotonic() < deadline:
        time.sleep(0.02)
    time.sleep(0.2)


def test_the_end_of_a_foreign_process_is_seen() -> None:
    """And its exit status, where the kernel tells (Linux 6.15)."""
    watch = ProcessWatch(grandchild("import time; time.sleep(0.3); raise SystemExit(7)"))
    assert watch.alive()
    wait_until_dead(watch)
    assert not watch.alive()
    if watch.status() is not None:  # an older kernel does not tell
        assert describe_wait_status(watch.status() or 0) == "exit code 7"


def test_a_signal_is_named() -> None:
    """SIGKILL from outside."""
    pid = grandchild("import time; time.sleep(60)")
    watch = ProcessWatch(pid)
    os.kill(pid, signal.SIGKILL)
    wait_until_dead(watch)
    assert describe_wait_status(9) == "SIGKILL"
    assert describe_wait_status(0) == "finished"
    assert watch.status() in (9, None)


def test_a_later_process_with_the_same_pid_is_another() -> None:
    """Born after the ring was made."""
    assert ProcessWatch(os.getpid(), time.monotonic_ns()).alive()
    assert not ProcessWatch(os.getpid(), 0).alive()
    assert not ProcessWatch(2**22 + 5).alive()
