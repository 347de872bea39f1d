"""What runs of thousands of ranks cost to be looked at: `python tests/bench/bench_fleet.py [RANKS ...]`.

A synthetic fleet of 8 ranks a node behind a real Prometheus, and the views on it through
PrometheusSource: time to the first view; time, questions, bytes and the server's CPU for each snapshot;
and CPU of the views as a share of a core. All share this machine, also what serves the fleet.
"""

from __future__ import annotations

import fcntl
import http.client
import json
import os
import pty
import select
import statistics
import struct
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlencode

import psutil

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

from served import bearer  # noqa: E402
from support import free_port  # noqa: E402

from zeromon.sources.prometheus.client import Server  # noqa: E402
from zeromon.sources.prometheus.source import PrometheusSource  # noqa: E402

EACH = 8
PICTURES = 5
SECONDS = 20.0
INTERVALS = {64: "5s", 1024: "15s", 16384: "30s"}


@contextmanager
def fleet(ranks: int) -> Iterator[tuple[str, psutil.Process]]:
    """A fleet in a process of its own; the address of its Prometheus, and that."""
    interval = INTERVALS.get(ranks, "30s")
    command = [sys.executable, str(HERE.parent / "fleet.py"), str(ranks // EACH), str(EACH), "--core"]
    process = subprocess.Popen([*command, "--prometheus", interval], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        lines = [process.stdout.readline() for _ in range(2)]
        mine = psutil.Process(process.pid).children()
        yield lines[1].split()[1], next(one for one in mine if one.name() == "prometheus")
    finally:
        process.terminate()
        process.wait()


def used(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


def snapshots(url: str, server: psutil.Process) -> str:
    """What a snapshot costs, asked for by nobody else."""
    source = PrometheusSource(Server(url), "fleet")
    begin = time.monotonic()
    source.latest()
    first = time.monotonic() - begin
    begin = time.monotonic()
    source.series()
    series = time.monotonic() - begin
    walls, own, theirs, cost = [], time.process_time(), used(server), source.server.cost
    queries, nbytes = cost.queries, cost.nbytes
    for _ in range(PICTURES):
        source._due = 0.0
        source._reader.census_due = time.monotonic() + 60
        begin = time.monotonic()
        run = source.latest()
        walls.append(time.monotonic() - begin)
    shown = f"{len(run.ranks)} ranks read"
    return (
        f"first snapshot {first:.2f} s, charts {series:.2f} s; then {statistics.median(walls):.2f} s a "
        f"snapshot: {(cost.queries - queries) / PICTURES:.0f} questions, "
        f"{(cost.nbytes - nbytes) / PICTURES / 1024:,.0f} KiB, "
        f"own CPU {(time.process_time() - own) / PICTURES * 1e3:.0f} ms, "
        f"Prometheus's {(used(server) - theirs) / PICTURES * 1e3:.0f} ms; {shown}"
    )


def terminal(url: str, screen: str) -> str:
    """The terminal view in 200x60: from the command to the first snapshot, then its CPU."""
    pid, fd = pty.fork()
    if not pid:
        os.environ.update(TERM="xterm-256color", COLORTERM="truecolor")
        os.execv(sys.executable, [sys.executable, "-m", "zeromon", "attach", "--prometheus", url])
    fcntl.ioctl(fd, termios.TIOCSWINSZ, struct.pack("HHHH", 60, 200, 0, 0))
    begin, seen = time.monotonic(), b""
    while b"running, step" not in seen and time.monotonic() < begin + 120:
        seen += read(fd, 1.0)
    first = time.monotonic() - begin
    os.write(fd, screen.encode())
    drain(fd, 5.0)
    process = psutil.Process(pid)
    before = used(process)
    drain(fd, SECONDS)
    share = (used(process) - before) / SECONDS
    os.write(fd, b"q")
    drain(fd, 1.0)
    os.waitpid(pid, 0)
    return f"first view {first:.2f} s, then {share:.1%} of a core"


def read(fd: int, seconds: float) -> bytes:
    ready, _, _ = select.select([fd], [], [], seconds)
    try:
        return os.read(fd, 1 << 16) if ready else b""
    except OSError:
        return b""


def drain(fd: int, seconds: float) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        read(fd, 0.2)


def dashboard(url: str, page: str) -> str:
    """The dashboard with one tab: its first answer, then CPU and bytes an update."""
    port = free_port()
    command = [sys.executable, "-m", "zeromon", "dash", "--prometheus", url, "--no-browser"]
    process = subprocess.Popen([*command, "--port", str(port)], stderr=subprocess.DEVNULL)
    try:
        begin = time.monotonic()
        while True:
            try:
                connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
                connection.connect()
                break
            except OSError:
                time.sleep(0.05)
        started = time.monotonic() - begin
        told: list[int] = []
        cursor: dict[str, object] = {}
        begin = time.monotonic()

        def ask() -> None:
            nonlocal cursor
            asked = urlencode({"to": f"/run/fleet/{page}", **cursor})
            connection.request("GET", f"/live?{asked}", headers=bearer())
            content = connection.getresponse().read()
            told.append(len(content))
            cursor = json.loads(content)["cursor"]

        ask()
        first = time.monotonic() - begin
        for _ in range(5):
            threading.Event().wait(1.0)
            ask()
        told.clear()
        own = psutil.Process(process.pid)
        before, begin = used(own), time.monotonic()
        while time.monotonic() < begin + SECONDS:
            threading.Event().wait(1.0)
            ask()
        share = (used(own) - before) / (time.monotonic() - begin)
        return (
            f"server up in {started:.1f} s, first answer {first:.2f} s, then {share:.1%} of a core, "
            f"{statistics.mean(told) / 1024:.1f} KiB an update"
        )
    finally:
        process.terminate()
        process.wait()


def main() -> None:
    """Prints the figures."""
    for ranks in [int(word) for word in sys.argv[1:]] or [1024, 16384]:
        with fleet(ranks) as (url, server):
            series = Server(url).vector('count({__name__=~"zeromon_.+"})')[0].value
            memory = server.memory_info().rss / (1 << 20)
            every = INTERVALS.get(ranks, "30s")
            print(f"{ranks:,} ranks on {ranks // EACH:,} nodes: {series:,.0f} series", end="")
            print(f", scraped every {every}; Prometheus {memory:,.0f} MiB", flush=True)
            print(f"  PrometheusSource  {snapshots(url, server)}", flush=True)
            print(f"  terminal, overview {terminal(url, '1')}", flush=True)
            print(f"  terminal, ranks    {terminal(url, '5')}", flush=True)
            print(f"  dashboard, overview {dashboard(url, 'overview')}", flush=True)
            print(f"  dashboard, ranks    {dashboard(url, 'ranks')}", flush=True)


if __name__ == "__main__":
    main()
