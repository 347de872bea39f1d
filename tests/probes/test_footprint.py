"""The memory of a process and of those that it starts."""

from __future__ import annotations

import os
import subprocess
import sys
import time

import pytest

from zeromon.probes.host import Footprint, HostReader

_CHILD = "x = bytearray(64 << 20); del x; print('held', flush=True); import time; time.sleep(60)"
_PARENT = f"""
import subprocess, sys, time
subprocess.run([sys.executable, "-S", "-c", {_CHILD!r}])
time.sleep(60)  # the child may be ended first, and its parent must not end by itself then
"""


def test_what_stays_free_is_not_headroom_unless_a_cgroup_limits() -> None:
    feet = Footprint(os.getpid(), deep=False)
    is_limited = HostReader().read(os.getpid()).limit_bytes > 0
    free, spare = feet.headroom()[0], 2 << 30
    assert free - feet.headroom(spare)[0] == pytest.approx(0 if is_limited else spare, abs=1 << 30)
    assert feet.headroom(1 << 60)[0] == pytest.approx(free if is_limited else 0, abs=1 << 30)


def test_the_peak_of_a_child_counts_after_it_is_over_and_the_tree_ends() -> None:
    process = subprocess.Popen([sys.executable, "-S", "-c", _PARENT], stdout=subprocess.PIPE)
    feet = Footprint(process.pid)
    try:
        assert process.stdout is not None and process.stdout.readline() == b"held\n"
        deadline = time.monotonic() + 20
        while feet.peak() < 64 << 20 and time.monotonic() < deadline:
            now = feet.read()
            time.sleep(0.05)
        assert feet.peak() >= 64 << 20 > now > 0
        feet.end(patience_seconds=20)
        assert process.wait(20) < 0
        assert feet.read() == 0
    finally:
        feet.kill()
        process.wait(20)
