"""The terminal view in a browser, as `textual serve` shows it: drawn, and reached by mouse and keys."""

from __future__ import annotations

import importlib.util
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from support import clean_environment
from tui.snapshots import snapshot

from zeromon.collector.http import start_http_server
from zeromon.storage.snapshot_log import Past

BROWSER = shutil.which("chromium") or shutil.which("chromium-browser")
if BROWSER is None or importlib.util.find_spec("textual_serve") is None:
    pytest.skip("needs Chromium and textual-serve", allow_module_level=True)

SERVE = """
import sys
from textual_serve.server import Server
Server(sys.argv[1], port=int(sys.argv[2])).serve()
"""


class _View:
    """A collector with one snapshot."""

    view = (snapshot(2),)

    def was_read(self) -> None:
        pass

    def past(self, _: str) -> Past:
        return Past(Path("/dev/null"))


@pytest.fixture
def address(tmp_path: Path) -> Iterator[str]:
    """Where the view of a collector is served."""
    collector = start_http_server(_View(), "127.0.0.1", 0)  # type: ignore[arg-type]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = f"{sys.executable} -m zeromon attach 127.0.0.1:{collector.server_port}"
    environment = clean_environment() | {"ZEROMON_DIR": str(tmp_path), "PYTHONPATH": ":".join(sys.path)}
    with (tmp_path / "log").open("w") as log:
        serving = subprocess.Popen([sys.executable, "-c", SERVE, command, str(port)],
                                   env=environment, stdout=log, stderr=log)  # fmt: skip
    yield f"http://127.0.0.1:{port}"
    serving.terminate()
    serving.wait(60)
    collector.shutdown()


def test_it_is_drawn_in_a_browser_and_hears_mouse_and_keys(address: str) -> None:
    from playwright.sync_api import WebSocket, sync_playwright

    drawn: list[str] = []

    def heard(frame: str | bytes) -> None:
        drawn.append(frame if isinstance(frame, str) else frame.decode(errors="replace"))

    def follow(made: WebSocket) -> None:
        made.on("framereceived", heard)

    _until(lambda: _answers(address))
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=BROWSER, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 1400, "height": 800})
        page.on("websocket", follow)
        page.goto(address)

        def shows(text: str) -> None:
            _until(lambda: page.wait_for_timeout(100) or text in "".join(drawn))

        shows("running, step")
        drawn.clear()
        page.mouse.click(300, 43)  # the tab of the third screen
        shows("in flight")
        drawn.clear()
        page.keyboard.press("5")
        shows("micro-steps")
        browser.close()


def _answers(address: str) -> bool:
    with suppress(OSError):
        return urllib.request.urlopen(address, timeout=2).status == 200
    return False


def _until(holds: Callable[[], object], seconds: float = 30.0) -> None:
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end, "it did not come"
        time.sleep(0.05)
