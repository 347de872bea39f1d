"""Starts ranks as torchrun does, without importing torch: `launch.py N [--no-python] PROGRAM ...`.

What a rank finds in its environment is the same, and so is the end: the first that fails takes the
others along by SIGTERM. torchrun itself is what tests/agents/test_launch.py and test_example.py start.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time

_PATIENCE_SECONDS = 30.0


def free_port() -> int:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        return int(listening.getsockname()[1])


def start(count: int, command: list[str]) -> list[subprocess.Popen[bytes]]:
    port = str(free_port())
    shared = {
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": str(count),
        "LOCAL_WORLD_SIZE": str(count), "GROUP_RANK": "0", "GROUP_WORLD_SIZE": "1",
        "TORCHELASTIC_RUN_ID": "none", "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_MAX_RESTARTS": "0",
    }  # fmt: skip
    shared["OMP_NUM_THREADS"] = os.environ.get("OMP_NUM_THREADS", "1")
    return [
        subprocess.Popen(
            command,
            env=os.environ | shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            start_new_session=True,
        )
        for rank in range(count)
    ]


def end(ranks: list[subprocess.Popen[bytes]]) -> None:
    for rank in ranks:
        if rank.poll() is None:
            rank.terminate()
    deadline = time.monotonic() + _PATIENCE_SECONDS
    for rank in ranks:
        try:
            rank.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            rank.kill()


def main() -> int:
    count, command = int(sys.argv[1]), sys.argv[2:]
    bare = command[0] == "--no-python"
    ranks = start(count, command[1:] if bare else [sys.executable, "-u", *command])
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: (end(ranks), os._exit(1)))
    while True:
        codes = [rank.poll() for rank in ranks]
        if any(codes):
            end(ranks)
            return 1
        if all(code == 0 for code in codes):
            return 0
        time.sleep(0.05)


if __name__ == "__main__":
    sys.exit(main())
