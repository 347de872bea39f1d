"""Training that is forked from a process which has imported torch: programs/fork_server.py."""

from __future__ import annotations

import array
import atexit
import fcntl
import json
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

PROGRAMS = Path(__file__).resolve().parent / "programs"


class Launcher:
    """A launcher that the server has forked, with as much of Popen as the tests use."""

    def __init__(self, pid: int, code: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._code = code

    def __del__(self) -> None:
        if self._code >= 0:
            os.close(self._code)

    def poll(self) -> int | None:
        """The exit code; None while it runs."""
        return self._read(0.0)

    def wait(self, timeout: float | None = None) -> int:
        """The exit code, when the launcher has ended."""
        end = None if timeout is None else time.monotonic() + timeout
        while (code := self._read(1.0 if end is None else max(0.0, end - time.monotonic()))) is None:
            if end is not None and time.monotonic() >= end:
                raise subprocess.TimeoutExpired(f"launcher {self.pid}", timeout or 0.0)
        return code

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def _read(self, seconds: float) -> int | None:
        if self.returncode is None and select.select([self._code], [], [], seconds)[0]:
            written = os.read(self._code, 64)
            assert written, "the fork server has died"
            self.returncode = int(written)
            os.close(self._code)
            self._code = -1
        return self.returncode


class ForkServer:
    """One process that has imported torch, and perhaps DeepSpeed, for as long as the tests run.

    *place*: the path of its socket, where other processes find it: all workers of a test session share
    one. It ends with the last of those that use it.
    """

    def __init__(
        self,
        *words: str,
        environment: Mapping[str, str],
        python: str = sys.executable,
        place: Path | None = None,
    ) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        own = None if place else tempfile.mkdtemp(prefix="zeromon-forks-")
        place = place or Path(str(own), "server")
        command = [python, str(PROGRAMS / "fork_server.py"), *words]
        with Path(f"{place}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            while not self._connect(place):
                self._start(command, environment, place)
        if own is not None:
            shutil.rmtree(own)
        atexit.register(self.close)

    def _connect(self, place: Path) -> bool:
        self._control = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            self._control.connect(str(place))
            return self._control.recv(64) == b"ready"
        except OSError:  # no server yet, or one that has just ended
            self._control.close()
            return False

    def _start(self, command: list[str], environment: Mapping[str, str], place: Path) -> None:
        assert self._process is None, "the fork server has died"
        place.unlink(missing_ok=True)
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
            listener.bind(str(place))
            listener.listen(64)
            self._process = subprocess.Popen(
                command, stdin=listener, stdout=subprocess.DEVNULL, env=environment
            )

    def close(self) -> None:
        self._control.close()

    def launch(
        self, command: list[str], environment: Mapping[str, str], cwd: Path, output: int, errors: int
    ) -> Launcher:
        """Starts `launch.py` with the words of *command*."""
        request = {"command": command, "environment": dict(environment), "cwd": str(cwd)}
        mine, theirs = os.pipe()
        descriptors = array.array("i", [output, errors, theirs])
        self._control.sendmsg(
            [json.dumps(request).encode()], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, descriptors)]
        )
        os.close(theirs)
        return Launcher(int(self._control.recv(64)), mine)
