"""Starts ranks from the bench's process that has imported torch: `forked_ranks.py N PROGRAM ...`.

Importing torch takes most of a short run. The bench listens on the socket FORKS; it gets the command,
the environment and the output of this process, which ends as the ranks do. :class:`Forks` is the bench's
side.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import tempfile
import threading
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from forks import ForkServer

MAX_BYTES = 1 << 20


class Forks:
    """Answers the requests of this script by a fork server."""

    def __init__(self, server: ForkServer) -> None:
        self.server = server
        self.path = Path(tempfile.mkdtemp(prefix="zeromon-forks-")) / "socket"
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listener.bind(str(self.path))
        self._listener.listen()
        self._one_request = threading.Lock()
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            connection, _ = self._listener.accept()
            threading.Thread(target=self._answer, args=(connection,), daemon=True).start()

    def _answer(self, connection: socket.socket) -> None:
        message, descriptors, _, _ = socket.recv_fds(connection, MAX_BYTES, 2)
        request = json.loads(message)
        with self._one_request:
            running = self.server.launch(
                request["command"], request["environment"], Path(request["cwd"]), *descriptors
            )
        for descriptor in descriptors:
            os.close(descriptor)
        with suppress(BrokenPipeError), connection:  # of a client that was killed
            connection.send(str(running.wait()).encode())


def request_ranks(command: list[str], environment: Mapping[str, str]) -> int:
    """Asks for ranks, and waits for their end; their exit code."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    connection.connect(environment["FORKS"])
    request = {"command": command, "environment": dict(environment), "cwd": os.getcwd()}
    socket.send_fds(connection, [json.dumps(request).encode()], [1, 2])
    return int(connection.recv(64) or b"1")


if __name__ == "__main__":
    sys.exit(request_ranks(sys.argv[1:], os.environ))
