"""`zeromon attach` with several live runs asks which one."""

from __future__ import annotations

import json
import os
import pty
import select
import subprocess
import sys
import time
from pathlib import Path

from builders import rank, run

from zeromon.collector.http import start_http_server
from zeromon.snapshot import RunSnapshot


class Fixed:
    view: tuple[RunSnapshot, ...] = (run(rank(0), run="first"), run(rank(1), run="second"))

    def was_read(self) -> None:
        """Nothing to note."""


def read_until(fd: int, text: str, timeout: float = 20.0) -> str:
    """What the terminal has shown when *text* appears."""
    seen, deadline = "", time.monotonic() + timeout
    while text not in seen and time.monotonic() < deadline:
        if select.select([fd], [], [], 0.2)[0]:
            seen += os.read(fd, 65536).decode(errors="replace")
    assert text in seen, seen
    return seen


def quit_view(fd: int, process: subprocess.Popen[bytes], timeout: float = 20.0) -> int:
    """Presses q, once a second, until *process* has ended; returns its exit status.

    A key that arrives while the view sets the terminal up is thrown away by the terminal.
    """
    deadline, pressed = time.monotonic() + timeout, 0.0
    while process.poll() is None and time.monotonic() < deadline:
        try:
            if time.monotonic() - pressed > 1.0:
                os.write(fd, b"q")
                pressed = time.monotonic()
            if select.select([fd], [], [], 0.1)[0]:
                os.read(fd, 65536)
        except OSError:  # the process has closed its side
            break
    return process.wait(timeout=60)


def test_several_live_runs_are_offered_and_a_number_chooses(tmp_path: Path) -> None:
    """A wrong number is asked again; the chosen run's view opens; q leaves with 0."""
    server = start_http_server(Fixed(), "127.0.0.1", 0)
    facts = {"pid": 1, "host": "127.0.0.1", "port": server.server_port}
    (tmp_path / "collector.json").write_text(json.dumps(facts))
    ours, theirs = pty.openpty()
    attach = subprocess.Popen(
        [sys.executable, "-m", "zeromon", "attach"],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        env=os.environ | {"ZEROMON_DIR": str(tmp_path), "TERM": "xterm-256color"},
        start_new_session=True,
    )
    os.close(theirs)
    offered = read_until(ours, "Which run? [1-2]")
    assert "1  first  1 ranks, live, step 20" in offered
    os.write(ours, b"7\n")
    read_until(ours, "Which run? [1-2]")
    os.write(ours, b"2\n")
    try:
        read_until(ours, "second")
        assert quit_view(ours, attach) == 0
    finally:
        attach.kill()
        server.shutdown()
