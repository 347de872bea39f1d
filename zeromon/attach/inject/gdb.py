"""Injection on other processors: gdb makes the calls, zeromon resolves the addresses.

By itself gdb would allocate strings in the target and read every library's symbols (4 s with torch).
Here it gets addresses, loads no symbols, sets no breakpoint, and the text is in padding already. gdb
stops all threads (0.3 s), and unlike the parked thread it must stay alive until the call has ended.
"""

import os
import shutil
import subprocess
import time
from collections.abc import Callable

from zeromon.attach.inject.elf import Target, wait_until_true
from zeromon.base.errors import AttachRefused

_PATIENCE_SECONDS = 20.0
_QUEUE_SECONDS = 2.0


def execute_line(target: Target, code: str, has_begun: Callable[[], bool]) -> int:
    """Runs *code* in the main thread by gdb; returns the duration in ns. Raises AttachRefused.

    A thread that waits runs it at once. A thread that computes finds it queued; when the thread begins
    to wait before it executes the queue, the call is repeated.
    """
    gdb = shutil.which("gdb")
    if gdb is None:
        raise AttachRefused("this processor needs gdb to attach", "apt-get install gdb")
    encoded = code.encode() + b"\0"
    if len(encoded) > target.room:
        raise AttachRefused(f"process {target.pid} has no room for {len(encoded)} bytes of code")
    # /proc/PID/mem writes to the text of a library, which is mapped read-only
    with open(f"/proc/{target.pid}/mem", "r+b", buffering=0) as memory:
        os.pwrite(memory.fileno(), encoded, target.padding)
    waits = _main_thread_waits(target.pid)
    stopped_ns = _run_gdb(gdb, target, waits=waits)
    if not waits and not wait_until_true(has_begun, _QUEUE_SECONDS) and _main_thread_waits(target.pid):
        stopped_ns += _run_gdb(gdb, target, waits=True)
    return stopped_ns


def _run_gdb(gdb: str, target: Target, *, waits: bool) -> int:
    started = time.monotonic_ns()
    try:
        done = subprocess.run(
            [gdb, *_gdb_options(target, waits=waits)],
            capture_output=True,
            text=True,
            timeout=_PATIENCE_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise AttachRefused(f"gdb did not come back from process {target.pid}") from error
    if "zeromon: 0" not in done.stdout:
        reason = (done.stderr.strip().splitlines() or ["gdb printed nothing"])[-1]
        raise AttachRefused(f"gdb could not attach to process {target.pid}: {reason}")
    return time.monotonic_ns() - started


def _gdb_options(target: Target, *, waits: bool) -> list[str]:
    symbols, code_at = target.symbols, target.padding
    if waits:  # a pending call would wait with it
        commands = [
            f"set $state = ((int(*)(void)){symbols['PyGILState_Ensure']})()",
            f"set $result = ((int(*)(void*)){symbols['PyRun_SimpleString']})((void*){code_at})",
            f"call ((void(*)(int)){symbols['PyGILState_Release']})($state)",
        ]
    else:
        call = f"((int(*)(void*,void*)){symbols['Py_AddPendingCall']})"
        run = symbols["PyRun_SimpleString"]
        commands = [f"set $result = {call}((void*){run}, (void*){code_at})"]
    # debuginfod would ask the network while all threads of the target are stopped
    quiet = ["-iex", "set auto-solib-add off", "-iex", "set debuginfod enabled off"]
    # Without unwindonsignal, a signal within the call leaves the target in a frame of gdb
    commands = ["set unwindonsignal on", *commands, 'printf "zeromon: %d\\n", $result']
    # Without -nx, the user's .gdbinit runs commands in the target
    return [
        "-nx", "-batch", *quiet, "-p", str(target.pid), *(w for c in commands for w in ("-ex", c)),
    ]  # fmt: skip


def _main_thread_waits(pid: int) -> bool:
    with open(f"/proc/{pid}/stat") as file:
        return file.read().rpartition(")")[2].split()[0] != "R"
