"""The kernel on processes: cgroups, exit status, output, stacks, locks, git commit."""

import fcntl
import json
import os
import re
import select
import shutil
import signal
import stat
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path

from zeromon.base.errors import LaunchError, SourceError
from zeromon.base.units import printable
from zeromon.ring import paths
from zeromon.ring.files import replace_file
from zeromon.snapshot.host import ExtensionLock, WorkerMemory
from zeromon.snapshot.rank import Halt

PROC, CGROUP = Path("/proc"), Path("/sys/fs/cgroup")


def read_small_file(path: str | Path) -> str:
    """Returns the text of a small file, at less cost than a Python file. Raises :class:`OSError`."""
    fd = os.open(path, os.O_RDONLY)
    try:
        content = b""
        # A read of /proc may return less than the file: a single one would cut it
        while chunk := os.read(fd, 1 << 16):
            content += chunk
    finally:
        os.close(fd)
    return content.decode(errors="replace")


def cgroup_folders(pid: int, controller: str, proc: Path = PROC, cgroup: Path = CGROUP) -> list[Path]:
    """Returns the cgroup folders of *controller* that contain *pid*, the innermost first."""
    try:
        rows = read_small_file(proc / str(pid) / "cgroup").splitlines()
    except OSError:
        return []
    cgroups: list[Path] = []
    for row in rows:
        _, _, tail = row.partition(":")
        controllers, _, path = tail.partition(":")
        if controller in controllers.split(","):
            base = cgroup / controller
        elif not controllers:
            # systemd's hybrid mode mounts version 2 there, beside the controllers of version 1
            base = cgroup / "unified" if (cgroup / "unified").is_dir() else cgroup
        else:
            continue
        folder = base / path.strip("/")
        # a container may lack the host's path: the limit is then at the root of its cgroups
        levels = [folder, *folder.parents] if folder.is_dir() else [base]
        cgroups += [level for level in levels if level == base or base in level.parents]
    # With version 1 alone, /sys/fs/cgroup is a tmpfs and no cgroup
    return [level for level in cgroups if (level / "cgroup.procs").exists()]


def read_word_lines(path: str | Path) -> list[list[str]]:
    """Returns the words of each non-empty line; [] where the file cannot be read."""
    with suppress(OSError, ValueError):
        return [fields for row in read_small_file(path).splitlines() if (fields := row.split())]
    return []


# ---- a process that is no child of this one ------------------------------------------------------

MAX_OUTPUT_BYTES = 64 << 10


def read_output_tail(pid: int) -> tuple[str, tuple[str, ...]]:
    """Returns the file and the last lines of the standard output of *pid*, a process of this user here.

    Raises :class:`SourceError` where it is a terminal or a pipe, which keep nothing, or another user's.
    """
    link = Path(f"/proc/{pid}/fd/1")
    try:
        path = str(link.readlink())
        if not stat.S_ISREG(link.stat().st_mode):
            raise SourceError(
                f"the output of process {pid} goes to a {_output_kind(path)}, which keeps nothing",
                "It can be read where it goes to a file: torchrun ... > train.log, or Slurm's file.",
            )
        with link.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - MAX_OUTPUT_BYTES))
            output = file.read(MAX_OUTPUT_BYTES).decode(errors="replace")
    except OSError as error:
        raise SourceError(f"the output of process {pid} cannot be read: {error.strerror}") from error
    output_lines = output.splitlines()
    return printable(path), tuple(output_lines[1:] if size > MAX_OUTPUT_BYTES else output_lines)


def _output_kind(path: str) -> str:
    if path.startswith("pipe:"):
        return "pipe"
    return "terminal" if path.startswith(("/dev/pts", "/dev/tty")) else "device"


_INFO_SIZE = 64
_GET_INFO = (3 << 30) | (_INFO_SIZE << 16) | (0xFF << 8) | 11  # PIDFD_GET_INFO, linux/pidfd.h
_INFO_EXIT = 1 << 3
_EXIT_CODE_AT = 60
_TICKS = os.sysconf("SC_CLK_TCK")


class ProcessWatch:
    """A process by its pid, distinguished from a later one with the same pid.

    *born_before_ns*: CLOCK_MONOTONIC at a time when the process existed already.
    Linux 6.15 and later gives the exit status of a process that is not a child, to holders of a pidfd;
    elsewhere :meth:`status` stays None.
    """

    def __init__(self, pid: int, born_before_ns: int | None = None) -> None:
        self.pid = pid
        self._fd = -1
        self._status: int | None = None
        self.ended_ns = 0
        """When the process ended, CLOCK_MONOTONIC; 0 without :meth:`note_end_time`."""
        self._born = process_start_ticks(pid)
        if born_before_ns is not None and was_started_after(pid, born_before_ns):
            self._born = None
        if self._born is not None:
            # some builds of Python lack it, and some sandboxes refuse it: alive() then reads /proc
            with suppress(OSError, AttributeError, OverflowError):
                self._fd = os.pidfd_open(pid)

    def alive(self) -> bool:
        """Returns True if the process still runs; a zombie does not run."""
        if self._born is None:
            return False
        if self._fd < 0:
            return process_start_ticks(self.pid) == self._born
        return not self._ends_within(0)

    def _ends_within(self, milliseconds: int | None) -> bool:
        # Not select(): it raises ValueError for descriptors above 1023
        poll = select.poll()
        poll.register(self._fd, select.POLLIN)
        return bool(poll.poll(milliseconds))

    def note_end_time(self) -> None:
        """Notes the moment of the end, from a thread that waits for it, where the kernel has pidfds."""
        if self._fd >= 0:
            threading.Thread(target=self._wait, daemon=True, name="zeromon-end").start()

    def _wait(self) -> None:
        if self._ends_within(None):
            self.ended_ns = time.monotonic_ns()

    def status(self) -> int | None:
        """Returns the wait status, as of ``os.waitpid``; None while unknown."""
        if self._status is None and self._fd >= 0:
            buffer = bytearray(_INFO_SIZE)
            struct.pack_into("<Q", buffer, 0, _INFO_EXIT)
            with suppress(OSError):
                fcntl.ioctl(self._fd, _GET_INFO, buffer)
                (mask,) = struct.unpack_from("<Q", buffer, 0)
                if mask & _INFO_EXIT:
                    (self._status,) = struct.unpack_from("<i", buffer, _EXIT_CODE_AT)
        return self._status

    def _close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    __del__ = _close


def process_start_ticks(pid: int) -> int | None:
    """Returns when *pid* started, in clock ticks since boot; None when it does not run."""
    try:
        fields = read_small_file(f"/proc/{pid}/stat").rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else int(fields[19])


def child_process_ids(pid: int, proc: Path = PROC) -> set[int]:
    """Returns the processes that *pid* has started."""
    files = (proc / str(pid) / "task").glob("*/children")
    return {int(pid_text) for file in files for fields in read_word_lines(file) for pid_text in fields}


def main_thread_halt(pid: int) -> Halt:
    """Returns whether a signal or a debugger has stopped the main thread of *pid*."""
    return {"T": Halt.SUSPENDED, "t": Halt.TRACED}.get(process_state_letter(pid), Halt.NONE)


def process_state_letter(pid: int, proc: Path = PROC) -> str:
    """Returns the letter of the state of *pid*; "" where there is no such process."""
    with suppress(OSError, IndexError):
        return read_small_file(proc / str(pid) / "stat").rpartition(")")[2].split()[0]
    return ""


def was_started_after(pid: int, mono_ns: int) -> bool:
    """Returns True if *pid* was started after *mono_ns*, so that it is another process."""
    ticks = process_start_ticks(pid)
    # ticks include suspends, CLOCK_MONOTONIC does not: only a clear difference counts
    return ticks is None or ticks / _TICKS * 1e9 > mono_ns + 2e9


def describe_wait_status(status: int) -> str:
    """Returns the wait status as text: ``finished``, ``exit code 1``, ``SIGKILL``."""
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        with suppress(ValueError):
            return signal.Signals(number).name
        return f"signal {number}"
    code = os.waitstatus_to_exitcode(status)
    return "finished" if code == 0 else f"exit code {code}"


_PATIENCE_SECONDS = 10.0
_FRAME = re.compile(r"^    (.+) \((.+):(\d+)\)$", re.MULTILINE)


def find_py_spy() -> str | None:
    """The path of py-spy: on PATH, or beside the Python that runs zeromon."""
    return shutil.which("py-spy") or shutil.which("py-spy", path=str(Path(sys.executable).parent))


def python_stack_text(pid: int, *options: str) -> str:
    """The Python stacks of a process, or why they are unavailable."""
    spy = find_py_spy()
    if spy is None:
        return "py-spy is not installed: pip install py-spy"
    try:
        done = subprocess.run(
            [spy, "dump", "--pid", str(pid), *options],
            capture_output=True, text=True, timeout=_PATIENCE_SECONDS, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return f"py-spy did not answer in {_PATIENCE_SECONDS:.0f} s"
    except OSError as error:
        return f"py-spy cannot be started: {error.strerror}"
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        return f"py-spy: {reason} (same user, or CAP_SYS_PTRACE, is needed)"
    return done.stdout.strip()


def main_thread_frames(pid: int) -> tuple[str, ...]:
    """``train.py:21 in main``: the frames of a process's main thread, the innermost last.

    The process is not stopped meanwhile. () where the stack cannot be read.
    """
    _, marker, dump = python_stack_text(pid, "--nonblocking", "--full-filenames").partition(
        '"MainThread"'
    )
    frames = _FRAME.findall(dump.partition("\nThread ")[0]) if marker else []
    return tuple(f"{file}:{number} in {function}" for function, file, number in reversed(frames))


TASKS = "task.*.json"


def announce_task(folder: Path) -> bool:
    """Writes the file of this process, which becomes the task; returns whether it is the first alive."""
    started_ns = time.monotonic_ns()
    facts = {"pid": os.getpid(), "mono_ns": started_ns}
    replace_file(folder / f"task.{os.getpid()}.json", json.dumps(facts))
    tasks = (task for path in folder.glob(TASKS) if (task := _read_task(path)) is not None)
    # The file of this process is not older than itself
    return not any(born < started_ns and ProcessWatch(pid, born).alive() for pid, born in tasks)


def withdraw_task(folder: Path) -> None:
    """Removes the file of this process."""
    (folder / f"task.{os.getpid()}.json").unlink(missing_ok=True)


class TaskWatch:
    """The tasks whose files are in *folder*, now or since they were seen."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._known: dict[str, ProcessWatch | None] = {}
        """Name of a file -> its process; None once that has ended."""

    @property
    def count(self) -> int:
        """How many tasks have been seen, alive or not."""
        return len(self._known)

    def alive(self) -> bool:
        """Returns True if a task lives; looks for new ones first."""
        for path in self._folder.glob(TASKS):
            if path.name not in self._known and (task := _read_task(path)) is not None:
                self._known[path.name] = ProcessWatch(*task)
        for name, process in self._known.items():
            if process is not None and not process.alive():
                self._known[name] = None
        return any(process is not None for process in self._known.values())


def _read_task(path: Path) -> tuple[int, int] | None:
    with suppress(OSError, ValueError, KeyError, TypeError):
        facts = json.loads(path.read_text())
        return int(facts["pid"]), int(facts["mono_ns"])
    return None


_EVERY_NS = 5_000_000_000
"""The kernel walks all pages of a process for its share of each."""
_KEPT_NS = 30_000_000_000
"""The last reading stands for so long without a worker: between two epochs, and when a run ends."""
_NAME = "pt_data_worker"
"""The name that torch gives the main thread of a worker."""


class WorkersReader:
    """Follows the workers of the process *pid*; *proc* is a parameter for tests."""

    def __init__(self, pid: int, proc: Path = PROC) -> None:
        self._proc, self._pid = proc, pid
        self._next_ns = self._seen_ns = 0
        self._pids: frozenset[int] = frozenset()
        self._first: tuple[int, int] | None = None
        """Step and bytes at the second reading of these workers: before, they start."""
        self._last: WorkerMemory | None = None

    def read(self, now_ns: int, step: int) -> WorkerMemory | None:
        """Returns what they hold, by the reading of the last seconds; None without a worker."""
        if now_ns >= self._next_ns:
            self._next_ns = now_ns + _EVERY_NS
            memory = self._read(step)
            if memory is not None or now_ns > self._seen_ns + _KEPT_NS:
                self._last, self._seen_ns = memory, now_ns
        return self._last

    def _read(self, step: int) -> WorkerMemory | None:
        sizes = {pid: nbytes for pid in self._workers() if (nbytes := self._pss_bytes(pid)) is not None}
        if not sizes:
            return None
        total = sum(sizes.values())
        if self._pids != sizes.keys():  # an epoch starts its workers again
            self._pids, self._first = frozenset(sizes), None
        elif self._first is None:
            self._first = step, total
        step0, bytes0 = self._first or (step, total)
        return WorkerMemory(
            count=len(sizes),
            nbytes=total,
            grown_bytes=total - bytes0,
            growth_bytes_per_step=(total - bytes0) / (step - step0) if step > step0 else None,
            forked=not any("multiprocessing" in self._text(pid, "cmdline") for pid in sizes),
        )

    def _workers(self) -> list[int]:
        pids = child_process_ids(self._pid, self._proc)
        return [pid for pid in pids if self._text(pid, "comm").strip() == _NAME]

    def _pss_bytes(self, pid: int) -> int | None:
        """A page that several processes share counts in equal parts in each of them."""
        for fields in read_word_lines(self._proc / str(pid) / "smaps_rollup"):
            if fields[0] == "Pss:":
                return int(fields[1]) * 1024
        return None

    def _text(self, pid: int, name: str) -> str:
        with suppress(OSError):
            return read_small_file(self._proc / str(pid) / name)
        return ""


# ---- the git commit of a run's script, read once and without waiting for git --------------------

REVISION = "revision.txt"
_SECONDS = 30.0
_COMMIT = re.compile(r"[0-9a-f]{40,64}(-dirty)?")
# fsmonitor off: git would run the program that the configuration of the repository names
# Without --exclude it prints the name of a tag, which is no commit
_DESCRIBE = (
    "git", "-c", "core.fsmonitor=false", "describe", "--always", "--abbrev=64", "--exclude=*", "--dirty",
)  # fmt: skip


class Revision:
    """The commit of the folder that :meth:`of` is called with first.

    It is kept in the folder of the run, because a collector that starts later would read a later commit.
    """

    def __init__(self, run_folder: Path) -> None:
        self._file = run_folder / REVISION
        self._git: subprocess.Popen[bytes] | None = None
        self._until = 0.0
        self._text: str | None = None
        with suppress(OSError, ValueError):
            self._text = _valid_commit(self._file.read_text())

    def of(self, folder: str) -> str:
        """Returns ``COMMIT`` or ``COMMIT-dirty`` of *folder*; "" while unknown, and without git."""
        if self._text is None and folder:
            self._look(folder)
        return self._text or ""

    def _look(self, folder: str) -> None:
        if self._git is None:
            # Without it, --dirty locks the index, and a git command of the user fails meanwhile
            quiet = os.environ | {"GIT_OPTIONAL_LOCKS": "0", "GIT_TERMINAL_PROMPT": "0"}
            self._until = time.monotonic() + _SECONDS
            try:
                self._git = subprocess.Popen(
                    _DESCRIBE,
                    cwd=folder,
                    env=quiet,
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.DEVNULL,
                )
            except OSError:
                self._text = ""
        elif self._git.poll() is not None:
            assert self._git.stdout is not None
            with self._git.stdout as output:  # one line, which a pipe holds
                self._text = _valid_commit(output.read().decode(errors="replace"))
            with suppress(OSError):
                replace_file(self._file, self._text)
        elif time.monotonic() > self._until:
            self._git.kill()


def _valid_commit(commit: str) -> str:
    return commit.strip() if _COMMIT.fullmatch(commit.strip()) else ""


# ---- where zeromon is installed: beside the torch of a training, or in an environment of its own ---


def find_training_python() -> str:
    """Returns this Python if it has torch, else that of the path: a tool's environment has none."""
    has_torch = find_spec("torch") is not None
    return sys.executable if has_torch else shutil.which("python") or sys.executable


def own_package_folders() -> tuple[str, str]:
    """The folders of the packages ``zeromon`` and ``zeromon_agents``, for another Python to load."""
    agents = find_spec("zeromon_agents")
    if agents is None or agents.origin is None:
        raise LaunchError("this installation has no zeromon_agents", "Reinstall zeromon.")
    return str(paths.CORE), str(Path(agents.origin).resolve().parents[1])


# ---- reads the lock files of torch's extension cache, and who holds them -------------------------

# ``torch.utils.file_baton`` makes such a file while a process compiles an extension, and keeps it open.
# When the process is killed, the file stays, and every later process waits for its removal without an
# end.


class ExtensionLockReader:
    """Reads the lock that one rank waits for; *proc* is for tests."""

    def __init__(self, proc: Path = PROC) -> None:
        self._proc = proc
        self._newest: ExtensionLock | None = None
        self._read_ns = -_EVERY_NS

    def read(self, path: str, now_ns: int) -> ExtensionLock | None:
        """Returns the lock at *path*; None where *path* is "" or there is no such file any more."""
        if not path:
            self._newest = None
        elif self._newest is None or now_ns - self._read_ns >= _EVERY_NS:
            self._newest, self._read_ns = read_extension_lock(path, self._proc), now_ns
        return self._newest


def read_extension_lock(path: str, proc: Path = PROC) -> ExtensionLock | None:
    """Returns the lock at *path* with its age and its owner; None where there is no such file."""
    try:
        file = Path(path).stat()
    except (OSError, ValueError):
        return None
    # The links in /proc/PID/fd lead to the path without symbolic links
    owner = _find_owner(os.path.realpath(path), proc)
    return ExtensionLock(
        path=path,
        age_seconds=max(0.0, time.time() - file.st_mtime),
        owner=owner,
        is_stale=owner is None and file.st_uid == os.getuid(),
    )


def _find_owner(path: str, proc: Path) -> int | None:
    """The pid of a process that has the file at *path* open, among those that this user may ask."""
    for folder in proc.glob("[0-9]*"):
        with suppress(OSError):
            for open_file in (folder / "fd").iterdir():
                with suppress(OSError):
                    if str(open_file.readlink()) == path:
                        return int(folder.name)
    return None


def extension_cache_folder(environment: Mapping[str, str]) -> Path:
    """Where torch keeps compiled extensions (``torch.utils.cpp_extension.get_default_build_root``)."""
    if environment.get("TORCH_EXTENSIONS_DIR"):
        return Path(environment["TORCH_EXTENSIONS_DIR"])
    cache = environment.get("XDG_CACHE_HOME") or Path("~/.cache").expanduser()
    return Path(cache) / "torch_extensions"


def cached_extension_locks(folder: Path) -> list[ExtensionLock]:
    """Returns the locks in the cache at *folder*, which has a folder for each Python and extension."""
    paths = sorted({*folder.glob("*/lock"), *folder.glob("*/*/lock")})
    return [lock for path in paths if (lock := read_extension_lock(str(path))) is not None]
