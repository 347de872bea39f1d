"""Starts ranks as torchrun does, without importing torch: `launch.py N [--no-python] PROGRAM ...`.

What a rank finds in its environment is the same, and so is the end: the first that fails takes the
others along by SIGTERM. tests/agents/runtime/test_bootstrap.py and tests/runs/test_example.py start
torchrun itself.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Protocol

_PATIENCE_SECONDS = 30.0


def free_port() -> int:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        return int(listening.getsockname()[1])


class Rank(Protocol):
    """What the launcher needs of a process: a Popen, or what fork_server.py has forked."""

    def poll(self) -> int | None: ...
    def terminate(self) -> None: ...
    def kill(self) -> None: ...


def environments(count: int) -> list[dict[str, str]]:
    """What each of *count* ranks finds in its environment."""
    shared = {
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(count),
        "LOCAL_WORLD_SIZE": str(count), "GROUP_RANK": "0", "GROUP_WORLD_SIZE": "1",
        "TORCHELASTIC_RUN_ID": "none", "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_MAX_RESTARTS": "0",
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
    }  # fmt: skip
    return [shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(count)]


def start(count: int, command: list[str]) -> list[subprocess.Popen[bytes]]:
    return [
        subprocess.Popen(command, env=os.environ | environment, start_new_session=True)
        for environment in environments(count)
    ]


def end(ranks: Sequence[Rank]) -> None:
    for rank in ranks:
        if rank.poll() is None:
            rank.terminate()
    deadline = time.monotonic() + _PATIENCE_SECONDS
    while any(rank.poll() is None for rank in ranks):
        if time.monotonic() > deadline:
            for rank in ranks:
                if rank.poll() is None:
                    rank.kill()
            return
        time.sleep(0.02)


def supervise(ranks: Sequence[Rank]) -> int:
    """Waits for *ranks*; returns the launcher's exit code."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: (end(ranks), os._exit(1)))
    while True:
        codes = [rank.poll() for rank in ranks]
        if any(codes):
            end(ranks)
            return 1
        if all(code == 0 for code in codes):
            return 0
        time.sleep(0.02)


def main() -> int:
    count, command = int(sys.argv[1]), sys.argv[2:]
    bare = command[0] == "--no-python"
    return supervise(start(count, command[1:] if bare else [sys.executable, "-u", *command]))


if __name__ == "__main__":
    sys.exit(main())
