"""Why zeromon cannot attach to a process, and the command that helps."""

import os
from contextlib import suppress
from pathlib import Path

from zeromon.base.errors import AttachRefused

_PTRACE_BIT = 1 << 19
START = "Start the run under zeromon: zeromon run -- COMMAND"
_YAMA = {
    1: (
        "restricted: only an ancestor may trace",
        "sudo sysctl kernel.yama.ptrace_scope=0, or sudo -E zeromon attach ...;"
        " in a container: docker run --cap-add=SYS_PTRACE",
    ),
    2: (
        "admin-only: CAP_SYS_PTRACE is needed",
        "sudo -E zeromon attach ...; in a container: docker run --cap-add=SYS_PTRACE",
    ),
    3: ("no attach, until the machine restarts", START),
}
"""Scope of Yama -> its name, and what helps."""
_LOOK = "Without any right to trace: py-spy dump as root, or zeromon run from the start."


def check_attachable(pid: int) -> None:
    """Raises :class:`AttachRefused` for a process that zeromon must not change."""
    status = status_of(pid)
    if not status:
        raise AttachRefused(f"there is no process {pid}", "ps -C python lists running processes.")
    if pid == 1 or is_own_process(pid):
        role = "init" if pid == 1 else "zeromon itself or an ancestor of it"
        raise AttachRefused(f"refusing to attach to process {pid} ({role})", "Give the pid of a rank.")
    state = status.get("State", "?")[:1]
    if state in "ZX":
        hint = "Its parent has not collected its exit status yet."
        raise AttachRefused(f"process {pid} has ended", hint)
    # A tracer stops its target too: that is reported below, with the name of the tracer
    if state in "Tt" and status.get("TracerPid", "0") == "0":
        raise AttachRefused(f"process {pid} is stopped", f"Continue it first: kill -CONT {pid}")
    tracer = status.get("TracerPid", "0")
    if tracer != "0":
        name = status_of(int(tracer)).get("Name", "?")
        raise AttachRefused(
            f"process {pid} is being traced by {name} ({tracer})",
            "A process can have one tracer only; end that one first.",
        )
    owner = status.get("Uid", "?").split()[1]
    if owner != str(os.geteuid()):
        user = _user_name_of(owner)
        raise AttachRefused(f"process {pid} belongs to {user}", f"sudo -u {user} zeromon attach {pid}")


def is_own_process(pid: int) -> bool:
    """Returns whether *pid* is this process, or one of its ancestors."""
    return pid == os.getpid() or pid in _ancestor_pids(os.getpid())


def why_not_traced(pid: int) -> AttachRefused:
    """The missing right, after the kernel refused to let *pid* be traced."""
    status, ours = status_of(pid), status_of(os.getpid())
    may_trace = int(ours.get("CapEff", "0"), 16) & _PTRACE_BIT
    refused = f"process {pid} may not be traced from here"
    if "VmSize" not in status:  # it has given its memory back
        return AttachRefused(f"process {pid} has ended")
    can, reason, hint = right_to_trace()
    if not can:
        return AttachRefused(f"{refused}: {reason}", hint)
    if may_trace:
        cause = "it is in another user namespace, or a security module forbids it"
        return AttachRefused(f"{refused}: {cause}", _LOOK)
    if int(status.get("CapPrm", "0"), 16) & ~int(ours.get("CapEff", "0"), 16):
        return AttachRefused(
            f"{refused}: it has capabilities that this shell lacks",
            "Use the shell that started it, or sudo; in a container: --cap-add=SYS_PTRACE",
        )
    return AttachRefused(
        f"{refused}: CAP_SYS_PTRACE is missing (the process has changed its user or its"
        " groups, or a sandbox forbids ptrace)",
        "sudo zeromon attach ..., or in a container: docker run --cap-add=SYS_PTRACE",
    )


def right_to_trace(proc: Path = Path("/proc")) -> tuple[bool, str, str]:
    """Returns whether this user may trace its own processes, the reason, and a hint."""
    may_trace = int(_status_in_folder(proc / "self").get("CapEff", "0"), 16) & _PTRACE_BIT
    scope = _yama_scope(proc)
    # Scope 3 refuses even those who have CAP_SYS_PTRACE
    if scope in _YAMA and (not may_trace or scope == 3):
        name, hint = _YAMA[scope]
        return False, f"kernel.yama.ptrace_scope is {scope} ({name})", hint
    if may_trace:
        return True, "allowed (CAP_SYS_PTRACE)", ""
    return True, "allowed for processes of the same user", ""


def replaced_error(pid: int) -> AttachRefused:
    """The error for process *pid*: facts that were read about it are no longer true."""
    return AttachRefused(
        f"process {pid} is ending or starting another program", "Try again in a moment."
    )


def status_of(pid: int) -> dict[str, str]:
    """``/proc/PID/status``; empty when there is no such process."""
    return _status_in_folder(Path(f"/proc/{pid}"))


def _status_in_folder(folder: Path) -> dict[str, str]:
    with suppress(OSError):
        rows = (folder / "status").read_text(errors="replace").splitlines()
        return {key: value.strip() for key, _, value in (row.partition(":") for row in rows)}
    return {}


def _ancestor_pids(pid: int) -> set[int]:
    pids: set[int] = set()
    while pid > 1 and pid not in pids:
        parent = int(status_of(pid).get("PPid", "0"))
        pids.add(parent)
        pid = parent
    return pids


def _yama_scope(proc: Path) -> int:
    with suppress(OSError, ValueError):
        return int((proc / "sys/kernel/yama/ptrace_scope").read_text())
    return 0


def _user_name_of(uid: str) -> str:
    import pwd

    with suppress(KeyError, ValueError):
        return pwd.getpwuid(int(uid)).pw_name
    return f"#{uid}"
