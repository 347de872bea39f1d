"""Runs a line of Python inside a live CPython process that never loaded zeromon.

Invariants of this package:

* It stops one thread for the time it takes to read and set its registers (0.1 to 1 ms): a helper thread
  that is parked in a system call, never a training thread that computes, unless there is no other.
* Every change is complete before it can take effect: the code is written into padding behind a library's
  text, where nothing executes, before any thread is sent there. That code saves and restores every
  register, vectors too, and returns to where the thread was. So zeromon may be killed at any moment.
* It allocates, loads and resolves nothing in the target while one of its threads is stopped.
* Every wait has a timeout, and a refusal leaves the target unchanged.
"""

import os
import platform
import shutil
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import NamedTuple

from zeromon.attach.inject import parked
from zeromon.attach.inject.parked import Target, elf_images, read_mappings, wait_until_true
from zeromon.attach.inject.refusal import START, check_attachable, replaced_error, why_not_traced
from zeromon.base.errors import AttachRefused

SYMBOLS = (
    "Py_IsInitialized", "PyGILState_Ensure", "PyRun_SimpleString", "PyGILState_Release",
    "Py_AddPendingCall", "pthread_create", "pthread_detach", "mmap",
)  # fmt: skip
_NEEDED = ("PyGILState_Ensure", "PyGILState_Release", "PyRun_SimpleString", "pthread_create")
_WITHOUT_GIL = "_Py_DecRefShared"
"""A symbol of free-threaded builds only, where threads share reference counts."""
_OPTIONAL = ("__lll_lock_wait_private", "__lll_lock_wait", _WITHOUT_GIL)
_STOP_PATIENCE_SECONDS = 10.0
_PROOF_SECONDS = 5.0
_SLEEPER = "import time; print(flush=True); time.sleep(60)"


class Injected(NamedTuple):
    """The method that ran the line."""

    how: str
    tid: int
    """The stopped thread."""
    stopped_ns: int


def inject_line(pid: int, code: str, has_begun: Callable[[], bool], *, by_gdb: bool = False) -> Injected:
    """Runs *code* in process *pid*, once or twice; it must not raise, and must claim its work.

    *has_begun* returns whether it has begun. *by_gdb*: as on a processor for which there is no code.
    Raises :class:`AttachRefused`.
    """
    check_attachable(pid)
    target = resolve_target(pid)
    native = platform.machine() == "x86_64" and parked.processor_has_xsave()
    if by_gdb or not native:
        prove_gdb_works()
        return Injected("gdb", pid, execute_line(target, code, has_begun))
    # From a thread of ours: the kernel releases traced threads when their tracer ends
    outcome: list[Injected | BaseException] = []

    def trace_target() -> None:
        try:
            outcome.append(Injected(*parked.plant_code(target, code, resolve_target)))
        except (AttachRefused, OSError) as error:
            outcome.append(error)

    tracer = threading.Thread(target=trace_target, daemon=True)
    tracer.start()
    tracer.join(_STOP_PATIENCE_SECONDS)
    if not outcome:
        raise AttachRefused(f"no thread of process {target.pid} could be stopped")
    # Before OSError, its base class: a missing right is no process that has ended
    if isinstance(outcome[0], PermissionError):
        raise why_not_traced(target.pid) from outcome[0]
    if isinstance(outcome[0], OSError):
        raise AttachRefused(f"process {target.pid} has ended") from outcome[0]
    if isinstance(outcome[0], BaseException):
        raise outcome[0]
    return outcome[0]


@cache
def prove_gdb_works() -> None:
    """Raises :class:`AttachRefused` where gdb harms a process of ours on this machine, once tried.

    gdb 13 cannot write the registers of a processor with AMX: a process that sleeps dies of
    ``OSError: [Errno 514]`` when it is let go. The user's process is never the first try.
    """
    with tempfile.TemporaryDirectory() as folder:
        ran = Path(folder) / "ran"
        child = subprocess.Popen([sys.executable, "-c", _SLEEPER], stdout=subprocess.PIPE)
        try:
            assert child.stdout is not None
            # Before it prints, the process has no interpreter that could run the line
            child.stdout.readline()
            execute_line(resolve_target(child.pid), f"open({str(ran)!r}, 'w')", ran.exists)
            wait_until_true(lambda: ran.exists() or child.poll() is not None, _PROOF_SECONDS)
            if not ran.exists() or not _is_still_alive(child):
                raise AttachRefused("a process of zeromon's own died of it or did not run the line")
        except AttachRefused as error:
            raise AttachRefused(
                f"gdb does not work on this machine: {error}",
                error.hint if error.hint != AttachRefused.hint else START,
            ) from error
        finally:
            child.kill()
            child.wait()


def _is_still_alive(child: subprocess.Popen[bytes]) -> bool:
    """Returns whether *child* still lives a moment after it was let go."""
    try:
        child.wait(0.3)
    except subprocess.TimeoutExpired:
        return True
    return False


def resolve_target(pid: int) -> Target:
    """Resolves the addresses in process *pid*, without stopping it. Raises :class:`AttachRefused`."""
    try:
        with open(f"/proc/{pid}/mem", "rb", buffering=0) as memory:

            def read_memory(address: int, length: int) -> bytes:
                return os.pread(memory.fileno(), length, address)

            return _resolve_addresses(pid, read_memory)
    except PermissionError as error:
        raise why_not_traced(pid) from error
    except (FileNotFoundError, ProcessLookupError) as error:
        raise AttachRefused(f"process {pid} has ended") from error
    except struct.error as error:  # there were fewer bytes than the headers said
        raise replaced_error(pid) from error
    except (OSError, ValueError) as error:
        raise AttachRefused(f"the memory of process {pid} cannot be read: {error}") from error


def _resolve_addresses(pid: int, read_memory: Callable[[int, int], bytes]) -> Target:
    addresses: dict[str, int] = {}
    padding: tuple[int, int] = (0, 0)
    executable = str(Path(f"/proc/{pid}/exe").readlink()).removesuffix(" (deleted)")
    for image in elf_images(read_mappings(pid), read_memory):
        name = Path(image.path).name
        python = "libpython" in name or image.path.removesuffix(" (deleted)") == executable
        libc = name.startswith(("libc.so", "libc-", "ld-musl", "libpthread"))
        if python or libc:
            for symbol, address in image.symbols(SYMBOLS + _OPTIONAL, read_memory).items():
                addresses.setdefault(symbol, address)
        if image.padding()[1] > padding[1]:
            padding = image.padding()
    if not addresses.keys() >= set(_NEEDED):
        program = Path(executable).name
        if not read_mappings(pid):  # it is on its way out
            raise AttachRefused(f"process {pid} has ended")
        raise AttachRefused(f"process {pid} is not Python: it runs {program}", "Give a rank's pid.")
    if _WITHOUT_GIL in addresses:
        raise AttachRefused(
            f"process {pid} runs a Python without a GIL (a free-threaded build)",
            "The injected line would run in parallel to its other threads. Use a build with the GIL.",
        )
    return Target(pid, addresses, *padding)


# ---- injection on other processors --------------------------------------------------------------

# Injection on other processors: gdb makes the calls, zeromon resolves the addresses.
# By itself gdb would allocate strings in the target and read every library's symbols (4 s with
# torch). Here it gets addresses, loads no symbols, sets no breakpoint, and the text is in padding
# already. gdb stops all threads (0.3 s), and unlike the parked thread it must stay alive until the
# call has ended.

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
