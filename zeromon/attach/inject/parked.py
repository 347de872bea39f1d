"""The injection for x86-64: one parked thread executes a piece of code and returns.

The code (``parked.s``, and as assembled ``parked.hex``) creates a detached thread with
``pthread_create``, which waits for the interpreter's lock and runs the line. It ends with a jump to
where the thread was, so that an interrupted system call starts again as the kernel would have restarted
it. Once its registers are set, the thread does not depend on this process.

Where no thread is parked and the main thread runs, the main thread executes ``Py_AddPendingCall``
instead, which allocates nothing, so it may happen anywhere, also within malloc.
"""

import ctypes
import errno
import os
import struct
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from zeromon.attach.inject.refusal import replaced_error
from zeromon.base.errors import AttachRefused

# ---- libraries of a process ---------------------------------------------------------------------

# Loaded objects of a process: shared libraries, their exported symbols, the padding behind their
# code.
# All data comes from the memory of the process, so containers, deleted files and stripped files
# make no difference. 64-bit little-endian ELF; any architecture. Nothing here stops or changes the
# process.

Read = Callable[[int, int], bytes]
"""``read(address, length)`` of the process's memory."""

_PAGE = 4096
_LOAD, _DYNAMIC = 1, 2
_EXECUTABLE = 1
_STRTAB, _SYMTAB, _GNU_HASH = 5, 6, 0x6FFFFEF5
_LONGEST_NAME = 64


class Mapping(NamedTuple):
    """A line of ``/proc/PID/maps``."""

    start: int
    end: int
    mode: str
    offset: int
    path: str


def read_mappings(pid: int, proc: Path = Path("/proc")) -> list[Mapping]:
    """All mappings of a process; raises OSError."""
    maps = []
    for row in (proc / str(pid) / "maps").read_text(errors="replace").splitlines():
        span, mode, offset, _, _, *path = row.split(None, 5)
        start, _, stop = span.partition("-")
        maps.append(
            Mapping(int(start, 16), int(stop, 16), mode, int(offset, 16), path[0] if path else "")
        )
    return maps


@dataclass(frozen=True, slots=True)
class Image:
    """An ELF object in memory. *base* is added to the addresses in its headers."""

    path: str
    base: int
    segments: tuple[tuple[int, int, int, int], ...]
    """(type, flags, address, size in the file) of the program headers."""

    def padding(self) -> tuple[int, int]:
        """(address, length) of the padding between the end of its code and the end of that page."""
        largest = (0, 0)
        for kind, flags, address, size in self.segments:
            code_end = self.base + address + size
            if kind == _LOAD and flags & _EXECUTABLE and -code_end % _PAGE > largest[1]:
                largest = (code_end, -code_end % _PAGE)
        return largest

    def symbols(self, names: tuple[str, ...], read_memory: Read) -> dict[str, int]:
        """Addresses of those of *names* that the object exports."""
        table = next((s for s in self.segments if s[0] == _DYNAMIC), None)
        if table is None:
            return {}
        raw = read_memory(self.base + table[2], table[3] & ~15)
        dynamic = dict(struct.iter_unpack("<QQ", raw))
        if not {_STRTAB, _SYMTAB, _GNU_HASH} <= dynamic.keys():
            return {}
        # the loader relocates these in place, except where the section is read-only
        at = {
            tag: dynamic[tag] if dynamic[tag] >= self.base else dynamic[tag] + self.base
            for tag in (_STRTAB, _SYMTAB, _GNU_HASH)
        }
        addresses = {}
        for name in names:
            address = self._look_up(name.encode(), at, read_memory)
            if address:
                addresses[name] = address
        return addresses

    def _look_up(self, name: bytes, at: dict[int, int], read_memory: Read) -> int:
        """The address of one symbol through the GNU hash table, or 0."""
        table = at[_GNU_HASH]
        buckets, first_index, bloom, _ = struct.unpack("<IIII", read_memory(table, 16))
        if not buckets:
            return 0
        wanted_hash = gnu_hash(name)
        bucket_at = table + 16 + 8 * bloom
        (index,) = struct.unpack("<I", read_memory(bucket_at + 4 * (wanted_hash % buckets), 4))
        while index >= first_index:
            (link,) = struct.unpack(
                "<I", read_memory(bucket_at + 4 * (buckets + index - first_index), 4)
            )
            # The lowest bit of an entry ends its chain and is no part of the hash
            if link | 1 == wanted_hash | 1:
                name_at, _, _, section, value = struct.unpack(
                    "<IBBHQ", read_memory(at[_SYMTAB] + 24 * index, 16)
                )
                spelt = read_memory(at[_STRTAB] + name_at, _LONGEST_NAME).partition(b"\0")[0]
                # Section 0 is a symbol that the object imports and does not define
                if spelt == name and section and value:
                    return self.base + int(value)
            if link & 1:
                return 0
            index += 1
        return 0


def gnu_hash(name: bytes) -> int:
    """The GNU hash of a symbol name."""
    value = 5381
    for byte in name:
        value = (value * 33 + byte) & 0xFFFFFFFF
    return value


def elf_images(maps: list[Mapping], read_memory: Read) -> Iterator[Image]:
    """The ELF objects among the mappings."""
    for mapping in maps:
        if mapping.offset or not mapping.path.startswith("/") or "r" not in mapping.mode:
            continue
        with suppress(OSError):  # unmapped meanwhile, or a truncated file
            head = read_memory(mapping.start, 64)
            if head[:6] == b"\x7fELF\x02\x01":
                yield _elf_image(mapping, head, read_memory)


def _elf_image(mapping: Mapping, head: bytes, read_memory: Read) -> Image:
    (table,) = struct.unpack_from("<Q", head, 32)
    size, count = struct.unpack_from("<HH", head, 54)
    raw = read_memory(mapping.start + table, size * count)
    segments = []
    for number in range(count):
        kind, flags, _, address, _, nbytes = struct.unpack_from("<IIQQQQ", raw, number * size)
        segments.append((kind, flags, address, nbytes))
    lowest = min((a for kind, _, a, _ in segments if kind == _LOAD), default=0)
    # An executable without PIE is linked at its address: its base is 0
    return Image(mapping.path, mapping.start - (lowest & -_PAGE), tuple(segments))


# ---- the process in which the injection runs a line, and the addresses that this needs ----------

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
    """Returns whether an injected thread still waits in process *pid* for the interpreter's lock."""
    with suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            with suppress(OSError):
                if (task / "comm").read_text().strip() == THREAD_NAME:
                    return True
    return False


def wait_until_true(question: Callable[[], bool], seconds: float) -> bool:
    """Waits up to *seconds* for *question* to become true; returns whether it did."""
    deadline = time.monotonic() + seconds
    while not question():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.002)
    return True


# ---- one parked thread --------------------------------------------------------------------------

_MAGIC = b"zeromon1"
_DATA = struct.Struct("<8s8Q16s")
_BACK_AT = 64
_CODE = bytes.fromhex(Path(__file__).with_name("parked.hex").read_text(encoding="ascii"))

_SEIZE, _INTERRUPT, _GETREGS, _SETREGS, _CONT, _DETACH = 0x4206, 0x4207, 12, 13, 7, 17
_WALL = 0x40000000
_EVENT_STOP = 128
_STOP_SECONDS = 1.0
_ROUNDS, _GAP_SECONDS = 5, 0.004
_TRIES_SECONDS = 3.0
_STACK_ROOM = 16384
_LENGTH_OF_LOCK = 0x80
_RESTARTS, _RESTART_BLOCK, _INTERRUPTED = (-512, -513, -514), -516, -4
_RESTART_SYSCALL = 219
_SYSCALL = b"\x0f\x05"

# calls in which a thread may be parked, never in an allocator or a loader; the safest first
_CALM = {
    35: "nanosleep", 230: "clock_nanosleep", 7: "poll", 271: "ppoll", 23: "select", 270: "pselect6",
    232: "epoll_wait", 281: "epoll_pwait", 43: "accept", 288: "accept4", 61: "wait4", 0: "read",
    45: "recvfrom", 47: "recvmsg",
}  # fmt: skip
_FUTEX = 202
_PARKED = {**_CALM, _FUTEX: "futex"}
_ORDER = {number: order for order, number in enumerate(_PARKED)}


class _Registers(ctypes.Structure):
    """``struct user_regs_struct``."""

    _fields_ = tuple(
        (name, ctypes.c_ulonglong)
        for name in (
            "r15 r14 r13 r12 rbp rbx r11 r10 r9 r8 rax rcx rdx rsi rdi orig_rax rip cs eflags rsp ss"
            " fs_base gs_base ds es fs gs"
        ).split()
    )
    rax: int
    orig_rax: int
    rip: int
    rsp: int


class ParkedThread(NamedTuple):
    """A thread that waits in a system call."""

    tid: int
    call: int
    stack: int
    code: int


_libc = ctypes.CDLL(None, use_errno=True)
_libc.ptrace.restype = ctypes.c_long
# Without argtypes ctypes passes addresses as 32-bit integers
_libc.ptrace.argtypes = [ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p]


def _ptrace_call(request: int, tid: int, data: int = 0) -> None:
    if _libc.ptrace(request, tid, 0, data) == -1:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))


def plant_code(target: Target, code: str, resolve: Callable[[int], Target]) -> tuple[str, int, int]:
    """Runs *code* in a new thread of *target*; returns the stopped thread, and for how long (ns).

    *resolve* finds the addresses again: the memory that is opened here must be that of *target*. Raises
    :class:`AttachRefused`, or OSError when the process may not be traced or ends.
    """
    encoded = code.encode() + b"\0"
    if _DATA.size + len(_CODE) + len(encoded) > target.room:
        raise AttachRefused(f"process {target.pid} has no room for {len(encoded)} bytes of code")
    memory = os.open(f"/proc/{target.pid}/mem", os.O_RDWR)
    try:
        if resolve(target.pid) != target:
            raise replaced_error(target.pid)
        # The padding must be empty, or of an injection that has ended
        content = os.pread(memory, target.room, target.padding)
        if content.strip(b"\0") and not content.startswith(_MAGIC):
            raise AttachRefused(f"something else has put code into process {target.pid}")
        if not wait_until_true(lambda: not waits_for_interpreter(target.pid), 1.0):
            raise AttachRefused(
                f"an earlier attach still waits for the interpreter of process {target.pid}",
                "C code holds its interpreter's lock; try again later. py-spy dump shows the stacks.",
            )
        deadline = time.monotonic() + _TRIES_SECONDS
        while True:
            for thread in parked_threads(target):
                stopped = _run_in_thread(target, memory, encoded, thread)
                if stopped:
                    role = "main" if thread.tid == target.pid else "helper"
                    return f"{role} thread in {_PARKED[thread.call]}", thread.tid, stopped
            # a pending call of one that waits would wait with it
            with open(f"/proc/{target.pid}/stat") as file:
                state = file.read().rpartition(")")[2].split()[0]
            if state in "ZX":
                raise ProcessLookupError(errno.ESRCH, "it ended")
            stopped = _run_in_thread(target, memory, encoded, None) if state == "R" else 0
            if stopped:
                return "main thread, by a pending call", target.pid, stopped
            if time.monotonic() > deadline:
                raise AttachRefused(f"no thread of process {target.pid} stayed parked long enough")
    finally:
        os.close(memory)


def parked_threads(target: Target) -> list[ParkedThread]:
    """Threads found waiting in the same call repeatedly; helpers first, the longest-waiting first."""
    sightings: Counter[ParkedThread] = Counter()
    for _ in range(_ROUNDS):
        for task in Path(f"/proc/{target.pid}/task").iterdir():
            thread = _parked_call(target.pid, int(task.name))
            if thread is not None:
                sightings[thread] += 1
        time.sleep(_GAP_SECONDS)
    maps = read_mappings(target.pid)
    # Code in which a waiting thread may hold a lock that pthread_create needs
    ranges = [
        (mapping.start, mapping.end)
        for mapping in maps
        if "malloc" in mapping.path.rpartition("/")[2] or "/ld-linux" in mapping.path
    ]
    locks = (target.symbols.get(n) for n in ("__lll_lock_wait_private", "__lll_lock_wait"))
    avoid = ranges + [(lock, lock + _LENGTH_OF_LOCK) for lock in locks if lock]
    steady = [
        thread
        for thread, times in sightings.items()
        if times >= 2
        and not any(start <= thread.code < stop for start, stop in avoid)
        and _has_stack_room(maps, thread.stack)
    ]
    return sorted(steady, key=lambda p: (p.tid == target.pid, _ORDER[p.call], -sightings[p]))


def _parked_call(pid: int, tid: int) -> ParkedThread | None:
    """The call in which a thread is parked; None when it runs, or waits in any other call."""
    try:
        with open(f"/proc/{pid}/task/{tid}/syscall") as file:
            fields = file.read().split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    if len(fields) < 9 or int(fields[0]) not in _PARKED:
        return None
    return ParkedThread(tid, int(fields[0]), int(fields[7], 16), int(fields[8], 16))


def _run_in_thread(target: Target, memory: int, encoded: bytes, thread: ParkedThread | None) -> int:
    """Makes a thread execute the code: *thread* where it is parked, or else the main thread as it runs.

    Returns how long it was stopped, ns; 0 when it had moved and nothing was done.
    """
    tid = thread.tid if thread else target.pid
    loader = [m for m in read_mappings(target.pid) if "/ld-linux" in m.path] if thread is None else []
    os.pwrite(memory, _padding_content(target, encoded, pending=thread is None), target.padding)
    try:
        _ptrace_call(_SEIZE, tid)
    except OSError as error:
        # A helper thread may end at any moment, and the next one is tried; an ended process is final
        if error.errno == errno.ESRCH and tid != target.pid:
            return 0
        raise
    started = time.monotonic_ns()
    _ptrace_call(_INTERRUPT, tid)
    _wait_for_stop(tid)
    try:
        registers = _Registers()
        _ptrace_call(_GETREGS, tid, ctypes.addressof(registers))
        if not _has_injected_code(tid, target):
            raise replaced_error(target.pid)
        # In ld-linux a program may still be starting: its symbols are not relocated yet
        starts = any(mapping.start <= registers.rip < mapping.end for mapping in loader)
        if not starts and (thread is None or _is_still_parked(registers, thread)):
            back = _return_registers(registers, memory)
            if back is not None:
                os.pwrite(memory, struct.pack("<Q", back[0]), target.padding + _BACK_AT)
                # Without -1 the kernel restarts the interrupted call, and moves rip back by two bytes
                registers.rax, registers.orig_rax = back[1], (1 << 64) - 1
                registers.rip = target.padding + _DATA.size
                _ptrace_call(_SETREGS, tid, ctypes.addressof(registers))
                # At least 1: 0 says that nothing was done
                return max(1, time.monotonic_ns() - started)
        return 0
    finally:
        with suppress(OSError):  # killed meanwhile
            _ptrace_call(_DETACH, tid)


def _has_injected_code(tid: int, target: Target) -> bool:
    """Returns whether the stopped thread *tid* has the code in its memory: execve replaces all of it."""
    with suppress(OSError), open(f"/proc/{tid}/mem", "rb", buffering=0) as memory:
        return os.pread(memory.fileno(), len(_MAGIC), target.padding) == _MAGIC
    return False


def _padding_content(target: Target, encoded: bytes, *, pending: bool) -> bytes:
    symbols = target.symbols
    data = _DATA.pack(
        _MAGIC,
        symbols["Py_IsInitialized"],
        symbols["PyGILState_Ensure"],
        symbols["PyRun_SimpleString"],
        symbols["PyGILState_Release"],
        symbols["pthread_create"],
        symbols["pthread_detach"],
        symbols["Py_AddPendingCall"] if pending else 0,
        0,
        THREAD_NAME.encode(),
    )
    return data + _CODE + encoded


def _wait_for_stop(tid: int) -> None:
    """Waits until the thread stops; passes on signals that arrive first."""
    deadline = time.monotonic() + _STOP_SECONDS
    while time.monotonic() < deadline:
        # Without __WALL, waitpid ignores threads: their end sends no SIGCHLD
        changed, status = os.waitpid(tid, _WALL | os.WNOHANG)
        if not changed:
            time.sleep(0.00002)
        elif not os.WIFSTOPPED(status):
            raise ProcessLookupError(errno.ESRCH, "it ended")
        elif status >> 16 == _EVENT_STOP:
            return
        else:
            _ptrace_call(_CONT, tid, os.WSTOPSIG(status))
    raise AttachRefused("a thread did not stop: it is in an uninterruptible wait")


def _signed_register(register: int) -> int:
    return register - (1 << 64) if register >> 63 else register


def _is_still_parked(registers: _Registers, thread: ParkedThread) -> bool:
    """Returns whether it was interrupted in the same call and at the same stack depth as before."""
    waits = _signed_register(registers.rax) in (*_RESTARTS, _RESTART_BLOCK, _INTERRUPTED)
    return waits and (registers.orig_rax, registers.rsp) == (thread.call, thread.stack)


def _return_registers(registers: _Registers, memory: int) -> tuple[int, int] | None:
    """(address, rax) to continue the thread as the kernel would have continued it; None: unknown."""
    result = _signed_register(registers.rax)
    restarts = _signed_register(registers.orig_rax) >= 0 and result in (*_RESTARTS, _RESTART_BLOCK)
    if not restarts:
        return registers.rip, registers.rax
    # Stepping back by two bytes repeats the call only where they are a syscall instruction
    if os.pread(memory, 2, registers.rip - 2) != _SYSCALL:
        return None
    return registers.rip - 2, (_RESTART_SYSCALL if result == _RESTART_BLOCK else registers.orig_rax)


def _has_stack_room(maps: list[Mapping], stack: int) -> bool:
    """Returns whether a thread's stack has room for the code and its calls."""
    for mapping in maps:
        if mapping.start <= stack < mapping.end:
            # The kernel extends the main stack on demand, beyond what its mapping shows
            return mapping.path == "[stack]" or stack - mapping.start >= _STACK_ROOM
    return False


def processor_has_xsave() -> bool:
    """Returns whether this processor has the instruction that saves vector registers."""
    with suppress(OSError), open("/proc/cpuinfo") as file:
        return any(row.startswith("flags") and " xsave " in f"{row.strip()} " for row in file)
    return False
