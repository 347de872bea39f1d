"""Starts ranks as torchrun does, without importing torch: `launch.py N [--no-python] PROGRAM ...`.

`launch.py N --nodes M PROGRAM ...` numbers them as those of M nodes.
What a rank finds in its environment is the same, and so is the end: the first that fails takes the
others along by SIGTERM. tests/agents/runtime/test_bootstrap.py and tests/runs/test_example.py start
torchrun itself.
"""

from __future__ import annotations

import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Protocol

_PATIENCE_SECONDS = 30.0


def free_port() -> int:
    """As in tests/support.py: a port from bind(0) may be a connection's before rank 0 listens."""
    while True:
        port = random.SystemRandom().randrange(10_000, 32_000)
        with suppress(OSError), socket.socket() as listening:
            listening.bind(("127.0.0.1", port))
            return port


class Rank(Protocol):
    """What the launcher needs of a process: a Popen, or what fork_server.py has forked."""

    def poll(self) -> int | None: ...
    def terminate(self) -> None: ...
    def kill(self) -> None: ...


def environments(count: int, nodes: int = 1) -> list[dict[str, str]]:
    """What each of *count* ranks, on so many nodes, finds in its environment."""
    ranks_per_node = count // nodes
    shared = {
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(count),
        "LOCAL_WORLD_SIZE": str(ranks_per_node), "GROUP_WORLD_SIZE": str(nodes),
        "TORCHELASTIC_RUN_ID": "none", "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_MAX_RESTARTS": "0",
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
    }  # fmt: skip
    if place := os.environ.get("NODE_PLACE"):
        return on_node(place, shared)
    running = os.environ.get("VGPU_RANKS", "")  # the virtual device has no process for other ranks
    ranks = [int(rank) for rank in running.split(",")] if running else range(count)
    places = [(str(rank), *map(str, divmod(rank, ranks_per_node))) for rank in ranks]
    return [
        shared | {"RANK": rank, "GROUP_RANK": node, "LOCAL_RANK": local} for rank, node, local in places
    ]


def on_node(place: str, shared: dict[str, str]) -> list[dict[str, str]]:
    """The ranks of one node of several, which *place* has as `number nodes address port`."""
    number, nodes, address, port = place.split()
    each = int(shared["LOCAL_WORLD_SIZE"])
    shared |= {
        "MASTER_ADDR": address, "MASTER_PORT": port, "WORLD_SIZE": str(each * int(nodes)),
        "GROUP_WORLD_SIZE": nodes, "GROUP_RANK": number,
    }  # fmt: skip
    first = int(number) * each
    return [shared | {"RANK": str(first + n), "LOCAL_RANK": str(n)} for n in range(each)]


def split_nodes(words: list[str]) -> tuple[int, list[str]]:
    """The number of nodes, from ``--nodes M`` in front of a program, and the program's words."""
    return (int(words[1]), words[2:]) if words[0] == "--nodes" else (1, words)


def start(count: int, command: list[str], nodes: int = 1) -> list[subprocess.Popen[bytes]]:
    return [
        subprocess.Popen(command, env=os.environ | environment, start_new_session=True)
        for environment in environments(count, nodes)
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
    count = int(sys.argv[1])
    nodes, command = split_nodes(sys.argv[2:])
    bare = command[0] == "--no-python"
    program = command[1:] if bare else [sys.executable, "-u", *command]
    return supervise(start(count, program, nodes))


if __name__ == "__main__":
    sys.exit(main())
