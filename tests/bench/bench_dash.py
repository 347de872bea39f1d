"""What the dashboard costs: `python tests/bench/bench_dash.py`.

Server CPU and bytes an update with 1, 8 and 64 tabs open on a live run of 8 ranks with 100,000
steps behind it, as a share of one core; the same when every update were the whole page. Then how long a
browser takes to draw that page, and the map of 1,024 ranks. With `--open SECONDS`: what an open tab of
that run takes over the time, in the browser and in the server.
"""

from __future__ import annotations

import gzip
import http.client
import json
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import psutil

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from builders import changed, rank, run, summary
from records import keep

from zeromon.snapshot import RunSnapshot
from zeromon.storage.run_store import Store
from zeromon.storage.snapshot_log import Past, Record
from zeromon.storage.step_history.rows import row_of

STEPS = 100_000
SECONDS = 12
BEGAN = time.monotonic()


class Stepping(Past):
    """A run that takes a step a second."""

    run, live = "live", True

    def __init__(self, folder: Path, ranks: int) -> None:
        super().__init__(folder)
        one = rank(0, recent=())
        self._ranks = [replace(one, rank=n, pid=n) for n in range(ranks)]

    def latest(self) -> RunSnapshot:
        """The snapshot of this second."""
        now = STEPS + int(time.monotonic() - BEGAN)
        recent = tuple(summary(n) for n in range(now - 100, now))
        ranks = (changed(one, recent=recent, last_step=now, watched_steps=now) for one in self._ranks)
        return run(*ranks, run="live", taken_wall=time.time())


def serve(folder: Path, ranks: int) -> None:
    """The server, in a process of its own."""
    import uvicorn

    from zeromon.cli.dash import open_listening_socket
    from zeromon_dashboard.hub import Followed, Hub
    from zeromon_dashboard.routes import make_app

    store = Store(folder)
    hub = Hub(store)
    source: Any = Stepping(store.folder("live"), ranks)
    hub._followed["live"] = Followed(source, store, time.monotonic)
    listening = open_listening_socket("127.0.0.1", None)
    port = listening.getsockname()[1]
    sys.stderr.write(f"port {port}\n")
    sys.stderr.flush()
    app = make_app(hub, token="t", port=port)
    uvicorn.Server(uvicorn.Config(app, log_level="error")).run(sockets=[listening])


@dataclass
class Server:
    """That process."""

    ranks: int
    folder: Path = field(default_factory=lambda: Path(tempfile.mkdtemp(prefix="zeromon-dash-")))

    def __enter__(self) -> Server:
        record = Record(Store(self.folder).folder("live"))
        steps = range(1, STEPS) if self.ranks <= 8 else range(1, 60)
        for n in steps:
            row = row_of(0, summary(n), 0)
            record.keep([(r, *row[1:]) for r in range(self.ranks)])
        record.close()
        command = [sys.executable, __file__, "--serve", str(self.folder), str(self.ranks)]
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        assert self.process.stderr is not None
        found = re.search(r"port (\d+)", self.process.stderr.readline())
        assert found is not None
        self.port = int(found[1])
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()
        shutil.rmtree(self.folder)


def tab(port: int, stop: threading.Event, told: list[int], *, whole: bool) -> None:
    """Asks once a second, as a page does."""
    connection = http.client.HTTPConnection("127.0.0.1", port)
    cursor: dict[str, Any] = {}
    while not stop.is_set():
        query = urlencode({"to": "/run/live/overview", **cursor})
        headers = {"Accept-Encoding": "gzip", "Authorization": "Bearer t"}
        connection.request("GET", f"/live?{query}", headers=headers)
        answer = connection.getresponse()
        content = answer.read()
        if answer.status != http.HTTPStatus.OK:
            raise RuntimeError(f"the server answers {answer.status}")
        if cursor or whole:  # the first answer is the page itself
            told.append(len(content))
        if answer.headers["Content-Encoding"] == "gzip":
            content = gzip.decompress(content)
        cursor = {} if whole else json.loads(content)["cursor"]
        stop.wait(1.0)


def load(server: Server, tabs: int, *, whole: bool) -> tuple[float, float]:
    """CPU of the server as a share of a core, and bytes an update."""
    stop, told = threading.Event(), []
    threads = [
        threading.Thread(target=tab, args=(server.port, stop, told), kwargs={"whole": whole})
        for _ in range(tabs)
    ]
    process = psutil.Process(server.process.pid)
    for thread in threads:
        thread.start()
    time.sleep(3)
    told.clear()
    before, begin = process.cpu_times(), time.monotonic()
    time.sleep(SECONDS)
    after, spent = process.cpu_times(), time.monotonic() - begin
    stop.set()
    for thread in threads:
        thread.join()
    used = after.user + after.system - before.user - before.system
    if not told:
        raise RuntimeError("no tab received an update")
    return used / spent, sum(told) / len(told)


@contextmanager
def browser() -> Iterator[Any]:
    """A page of a browser; it ends the benchmark where there is no browser."""
    path = shutil.which("chromium") or shutil.which("google-chrome")
    if path is None:
        raise SystemExit("no browser here: apt-get install chromium")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        made = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield made.new_page(extra_http_headers={"Authorization": "Bearer t"})
        made.close()


def drawn(server: Server, page: str, *seen: str) -> str:
    """How long a browser takes from the address until each of the selectors *seen* is there."""
    found = []
    with browser() as tab:
        for _ in range(4):
            begin, times = time.monotonic(), []
            tab.goto(f"http://127.0.0.1:{server.port}/run/live/{page}", wait_until="commit")
            for selector in seen:
                tab.wait_for_selector(selector, timeout=60_000, state="attached")
                times.append(time.monotonic() - begin)
            found.append(times)
    first, *later = (" and ".join(f"{t:.1f}" for t in times) for times in (found[0], min(found[1:])))
    return f"{first} s at first, {later[0]} s with what it keeps"


def keep_open(seconds: float) -> None:
    """Prints what an open tab takes, ten times in *seconds*."""
    with Server(8) as server, browser() as tab:
        process = psutil.Process(server.process.pid)
        tab.goto(f"http://127.0.0.1:{server.port}/run/live/overview")
        tab.wait_for_selector("#step-time .main-svg", timeout=60_000, state="attached")
        tools = tab.context.new_cdp_session(tab)
        tools.send("Performance.enable")
        print(f"{'minute':>7}{'heap, MiB':>11}{'nodes':>8}{'listeners':>11}{'server, MiB':>13}")
        begin = time.monotonic()
        for part in range(11):
            time.sleep(max(0.0, begin + seconds * part / 10 - time.monotonic()))
            tools.send("HeapProfiler.collectGarbage")
            known = {m["name"]: m["value"] for m in tools.send("Performance.getMetrics")["metrics"]}
            print(
                f"{(time.monotonic() - begin) / 60:7.0f}{known['JSHeapUsedSize'] / 2**20:11.1f}"
                f"{known['Nodes']:8,.0f}{known['JSEventListeners']:11,.0f}"
                f"{process.memory_info().rss / 2**20:13.0f}",
                flush=True,
            )


def main() -> None:
    """Prints the figures."""
    with Server(8) as server:
        print(
            f"{'tabs':>6}{'CPU, parts':>12}{'bytes':>9}{'CPU, whole page':>17}{'bytes':>10}{'ratio':>8}"
        )
        for tabs in (1, 8, 64):
            parts, nbytes = load(server, tabs, whole=False)
            keep(f"{tabs} tabs", parts, "of a core")
            keep(f"{tabs} tabs, an update", nbytes, "bytes")
            whole, all_bytes = load(server, tabs, whole=True)
            print(
                f"{tabs:6}{parts:12.1%}{nbytes:9,.0f}{whole:17.1%}{all_bytes:10,.0f}"
                f"{all_bytes / max(1, nbytes):8.1f}"
            )
        shown = drawn(server, "overview", "#waits .bar", "#step-time .main-svg")
        print(f"8 x {STEPS:,} steps, figures and charts: {shown}")
    with Server(1024) as server:
        print(f"1,024 ranks drawn: {drawn(server, 'ranks', '#rank-map .main-svg')}")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--serve"]:
        serve(Path(sys.argv[2]), int(sys.argv[3]))
    elif sys.argv[1:2] == ["--open"]:
        keep_open(float(sys.argv[2]))
    else:
        main()
