"""Starts ranks from a process that has imported torch: `fork_server.py [deepspeed]`.

Its listening socket is stdin; it ends with the last connection.
`fork_server.py ranks N [--nodes M] PROGRAM ...` is launch.py with one import of torch for all ranks,
where the ranks must be descendants of a `zeromon run` or in its memory cgroup. PRELOAD has the names
of further modules to import. `fork_server.py asked SOCKET N PROGRAM ...` imports nothing: the server at
that socket forks the ranks, into the namespaces of the asking process.

Importing torch takes 1.5 s of a CPU for each rank; a fork takes some milliseconds. A request is one
message: a launch.py command line, its environment and its folder, and the descriptors for its output
and for its exit code. The launcher and its ranks then run as launch.py would run them. What the
start-up shim does at the import of torch.distributed is done here after it, as
`zeromon_agents.start()` does it; tests/agents/runtime/test_bootstrap.py covers the shim itself.
"""

from __future__ import annotations

import array
import contextlib
import ctypes
import gc
import importlib
import json
import os
import runpy
import signal
import socket
import sys
from pathlib import Path
from typing import Any

import launch
from leave import hold_groups

MOST_BYTES = 1 << 20
MODULES = ("torch.distributed.fsdp", "torch.nn.parallel", "torch.distributed.optim", "torch._dynamo")


def preload(with_deepspeed: bool) -> None:
    """Imports what ranks import, and runs nothing: a thread would be missing in the ranks."""
    os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"  # before torch 2.7 the import starts them
    gc.disable()  # a tenth of the time: collections find little to free among modules
    for name in (*MODULES, *os.environ.get("PRELOAD", "").split()):
        importlib.import_module(name)
    if with_deepspeed:
        import torch

        importlib.import_module("deepspeed")
        # an optimizer of DeepSpeed is decorated so, which imports what compiles
        torch.compile(lambda x: x)
    hold_groups()
    gc.collect()
    gc.freeze()  # a collection in a rank would visit, and so copy, all that was imported here
    gc.enable()
    threads = os.listdir("/proc/self/task")
    if len(threads) != 1:
        raise RuntimeError(f"{len(threads)} threads after the imports: not safe to fork")


def receive(control: socket.socket) -> tuple[dict[str, Any], list[int]] | None:
    """The next request and its descriptors; None when the tests have ended."""
    size = array.array("i").itemsize
    message, ancillary, _, _ = control.recvmsg(MOST_BYTES, socket.CMSG_SPACE(3 * size))
    if not message:
        return None
    descriptors = array.array("i")
    for level, kind, content in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            descriptors.frombytes(content[: len(content) - len(content) % size])
    return json.loads(message), list(descriptors)


def serve(listener: socket.socket) -> list[str] | None:
    """Answers requests. Returns in a rank, with its command line, or with None at the end."""
    exits: dict[int, int] = {}
    """Launcher -> where its exit code goes."""
    clients: list[socket.socket] = []
    wakes, wake = os.pipe()
    os.set_blocking(wake, False)
    signal.set_wakeup_fd(wake)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    import select

    while True:
        ready, _, _ = select.select([listener, wakes, *clients], [], [])
        if wakes in ready:
            os.read(wakes, 4096)
            for pid in list(exits):
                ended, status = os.waitpid(pid, os.WNOHANG)
                if ended:
                    descriptor = exits.pop(pid)
                    # who asked may be gone
                    with contextlib.suppress(BrokenPipeError):
                        os.write(descriptor, str(os.waitstatus_to_exitcode(status)).encode())
                    os.close(descriptor)
        if listener in ready:
            clients.append(listener.accept()[0])
            clients[-1].send(b"ready")
        control = next((client for client in clients if client in ready), None)
        if control is None:
            continue
        request = receive(control)
        if request is None:
            clients.remove(control)
            control.close()
            if not clients:
                return None
            continue
        facts, (output, errors, code) = request
        pid = os.fork()
        if pid:
            exits[pid] = code
            os.close(output)
            os.close(errors)
            control.send(str(pid).encode())
            continue
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for descriptor in (wakes, wake, code, *exits.values()):
            os.close(descriptor)
        for inherited in (listener, *clients):
            inherited.close()
        os.dup2(output, 1)
        os.dup2(errors, 2)
        os.close(output)
        os.close(errors)
        if "like" in facts:
            enter_namespaces(facts["like"])
            os.umask(facts["umask"])
        os.chdir(facts["cwd"])
        os.environ.clear()
        os.environ.update(facts["environment"])
        return launch_ranks(facts["command"])


def enter_namespaces(pid: int) -> None:
    """Makes this process see the file systems, the network and the shared memory that *pid* sees."""
    for name in ("ipc", "uts", "net", "mnt"):
        theirs = f"/proc/{pid}/ns/{name}"
        if os.stat(theirs).st_ino != os.stat(f"/proc/self/ns/{name}").st_ino:
            with open(theirs) as namespace:
                if ctypes.CDLL(None, use_errno=True).setns(namespace.fileno(), 0):
                    raise OSError(ctypes.get_errno(), f"setns {theirs}")


def ask(place: str, command: list[str]) -> int:
    """Has the server at *place* fork the ranks of *command* as if from here; returns the exit code."""
    umask = os.umask(0)
    os.umask(umask)
    request = {
        "command": command, "environment": dict(os.environ), "cwd": os.getcwd(),
        "like": os.getpid(), "umask": umask,
    }  # fmt: skip
    reading, writing = os.pipe()
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as control:
        control.connect(place)
        control.recv(64)
        descriptors = array.array("i", [1, 2, writing])
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, descriptors)]
        control.sendmsg([json.dumps(request).encode()], rights)
        pid = int(control.recv(64))
    os.close(writing)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda number, _: os.kill(pid, number))
    return int(os.read(reading, 64))


class Rank:
    """A forked rank, with as much of Popen as the launcher uses."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._code: int | None = None

    def poll(self) -> int | None:
        if self._code is None:
            ended, status = os.waitpid(self.pid, os.WNOHANG)
            if ended:
                self._code = os.waitstatus_to_exitcode(status)
        return self._code

    def terminate(self) -> None:
        os.kill(self.pid, signal.SIGTERM)

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)


def launch_ranks(command: list[str]) -> list[str]:
    """The launcher's part: ends the process in the launcher, returns in each rank.

    Of no ranks: this process is to run the program, with nothing of a launcher in its environment.
    """
    count = int(command[0])
    nodes, program = launch.split_nodes(command[1:])
    if count == 0:
        return program
    ranks = []
    for environment in launch.environments(count, nodes):
        pid = os.fork()
        if pid == 0:
            os.setsid()
            os.environ.update(environment)
            return program
        ranks.append(Rank(pid))
    os._exit(launch.supervise(ranks))


def watch() -> None:
    """What the start-up shim does once torch.distributed has been imported."""
    if os.environ.get("ZEROMON_SHIM") != "1":
        return
    sys.path[:0] = [os.environ["ZEROMON_CORE"], os.environ["ZEROMON_AGENTS"]]
    from torch.distributed import distributed_c10d

    from zeromon_agents.runtime import bootstrap

    bootstrap.install(distributed_c10d)


def main() -> list[str] | None:
    if sys.argv[1:2] == ["asked"]:
        sys.exit(ask(sys.argv[2], sys.argv[3:]))
    preload("deepspeed" in sys.argv[1:])
    if sys.argv[1:2] == ["ranks"]:
        return launch_ranks(sys.argv[2:])
    listener = socket.socket(fileno=os.dup(0))
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    return serve(listener)


if __name__ == "__main__":
    program = main()
    if program is not None:
        # at the top level, so that the process ends as one whose main module this is
        watch()
        sys.argv = program
        sys.path.insert(0, str(Path(program[0]).resolve().parent))
        sys.stdout.reconfigure(write_through=True)  # type: ignore[union-attr]
        runpy.run_path(program[0], run_name="__main__")
