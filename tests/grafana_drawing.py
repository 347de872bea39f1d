"""Boards drawn by Grafana's own components in a browser, from the answers of a Prometheus.

`python tests/grafana_drawing.py` gets the components, once, into build/grafana.
"""

from __future__ import annotations

import colorsys
import fcntl
import hashlib
import json
import os
import re
import shutil
import subprocess
import tempfile
import urllib.request
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlencode

from prometheus_server import Prometheus, promtool
from watched_runs import SCRAPE_SECONDS, Scrape

ROOT = Path(__file__).resolve().parents[1]
SOURCES = ROOT / "tests" / "export" / "grafana"
BUILD = ROOT / "build" / "grafana"
BROWSER = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
MISSING = [
    program
    for program, found in (
        ("npm", shutil.which("npm")),
        ("prometheus", shutil.which("prometheus")),
        ("promtool", shutil.which("promtool")),
        ("chromium", BROWSER),
    )
    if not found
]
"""Programs without which no board can be drawn."""
MUST_DRAW = bool(os.environ.get("CI") or os.environ.get("ZEROMON_CI"))
"""In CI, a missing program is a failure."""
WIDTH = 1440
_QUIET = ("--no-audit", "--no-fund", "--ignore-scripts", "--loglevel=error")
_POINTS = 240
"""Grafana asks for about so many points of a chart."""


def bundled_components() -> str:
    """The script that draws; Grafana's components are installed where they are not there yet."""
    BUILD.mkdir(parents=True, exist_ok=True)
    with (BUILD / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        sources = sorted(path for path in SOURCES.iterdir() if path.suffix in (".json", ".mjs", ".jsx"))
        _renew("installed", [SOURCES / "package-lock.json"], sources, ["npm", "ci", *_QUIET])
        _renew("bundled", sources, sources, ["node", "bundle.mjs"])
    return (BUILD / "draw.js").read_text()


def _renew(stamp: str, inputs: list[Path], sources: list[Path], command: list[str]) -> None:
    """Runs *command* beside the *sources*, unless it has succeeded with the same *inputs*."""
    digest = hashlib.sha256(b"".join(path.read_bytes() for path in inputs)).hexdigest()
    done = BUILD / stamp
    if not done.exists() or done.read_text() != digest:
        for path in sources:
            shutil.copy(path, BUILD)
        subprocess.run(command, cwd=BUILD, check=True)
        done.write_text(digest)


# ---- series that were scraped in the past ------------------------------------------------------------


@contextmanager
def backfilled(scrapes: Iterable[Scrape]) -> Iterator[Prometheus]:
    """A Prometheus that has scraped those moments.

    It forgets a series that the next scrape does not have, as after a scrape of its own.
    """
    with tempfile.TemporaryDirectory(prefix="zeromon-blocks-") as folder:
        samples = Path(folder, "samples")
        with samples.open("w") as file:
            file.writelines(scrape.openmetrics() for scrape in scrapes)
            file.write("# EOF\n")
        promtool("tsdb", "create-blocks-from", "openmetrics", samples, f"{folder}/data")
        arguments = (
            f"--query.lookback-delta={SCRAPE_SECONDS + 2}s",
            "--storage.tsdb.retention.time=100y",
        )
        with Prometheus([], data=Path(folder, "data"), arguments=arguments) as server:
            yield server


# ---- colours ------------------------------------------------------------------------------------------


def hue(colour: str) -> str:
    """The everyday name of a colour, as Grafana writes it in one theme or another."""
    digits = (
        re.findall(r"[\d.]+", colour)[:3]
        if colour.startswith("rgb")
        else re.findall("[0-9a-fA-F]{2}", colour)[:3]
    )
    red, green, blue = (float(one) if colour.startswith("rgb") else int(one, 16) for one in digits)
    turn, _, saturation = colorsys.rgb_to_hls(red / 255, green / 255, blue / 255)
    if saturation < 0.25:
        return "grey"
    names = (
        (18, "red"),
        (48, "orange"),
        (70, "yellow"),
        (165, "green"),
        (250, "blue"),
        (320, "violet"),
        (361, "red"),
    )
    return next(name for end, name in names if turn * 360 < end)


# ---- a board --------------------------------------------------------------------------------------


class Moment(NamedTuple):
    """The range of time and the variables, as in Grafana's head bar."""

    start: float
    end: float
    run: str
    rank: str = ".+"

    @property
    def step(self) -> int:
        """Seconds between two points of a chart."""
        return max(SCRAPE_SECONDS, round((self.end - self.start) / _POINTS))

    def fill(self, expression: str) -> str:
        """An expression with the variables as Grafana fills them in."""
        rate = max(self.step + SCRAPE_SECONDS, 4 * SCRAPE_SECONDS)
        for name, value in (
            ("__rate_interval", f"{rate}s"), ("run", self.run), ("rank", self.rank), ("node", ".+"),
        ):  # fmt: skip
            expression = re.sub(rf"\${name}\b", lambda _, value=value: value, expression)
        assert "$" not in expression, expression
        return expression


def panels_of(board: dict[str, Any]) -> list[dict[str, Any]]:
    """The panels of a board, also those in a closed row."""
    rows = [[panel, *panel.get("panels", ())] for panel in board["panels"]]
    return [panel for row in rows for panel in row if panel["type"] != "row"]


def answers(server: Prometheus, board: dict[str, Any], moment: Moment) -> dict[int, list[Any]]:
    """The answers of a Prometheus to each query of each drawn panel, by the panel's id."""
    return {
        panel["id"]: [_ask(server, target, moment) for target in panel["targets"]]
        for panel in board["panels"]
        if panel["type"] != "row"
    }


def _ask(server: Prometheus, target: dict[str, Any], moment: Moment) -> Any:
    expression = moment.fill(target["expr"])
    if target.get("instant"):
        return server.query(expression, at=moment.end)
    first = moment.start - moment.start % moment.step
    asked = {"query": expression, "start": first, "end": moment.end, "step": moment.step}
    address = f"{server.url}/api/v1/query_range?{urlencode(asked)}"
    with urllib.request.urlopen(address, timeout=60) as answer:
        return json.load(answer)["data"]["result"]


@dataclass
class Drawn:
    """A panel as a reader sees it."""

    title: str
    type: str
    texts: list[dict[str, Any]]
    """Each text with ``colour``, ``background``, ``size`` in pixels, and whether it is ``cut``."""
    series: list[dict[str, Any]]
    """Each series with ``name``, ``labels``, ``stroke`` and ``points``, and of the last point the
    ``value``, what is ``last`` shown of it, and the ``percent`` of a bar that it fills."""
    axis: list[str]
    """The labels of the axis of values, of a chart."""

    @property
    def value(self) -> float | None:
        """The last value of its only series, None without one."""
        return self.series[0]["value"] if self.series else None

    @property
    def words(self) -> list[str]:
        """Its texts alone."""
        return [text["text"] for text in self.texts]


def draw(
    page: Any, board: dict[str, Any], asked: dict[int, list[Any]], moment: Moment, *,
    dark: bool = True, width: int = WIDTH, screenshot: Path | None = None,
) -> dict[str, Drawn]:  # fmt: skip
    """The panels of *board* by their titles, as *page* (a tab of a browser) draws them."""
    given = {
        "board": board, "answers": asked, "from": moment.start, "to": moment.end, "step": moment.step,
        "dark": dark, "width": width,
    }  # fmt: skip
    style = (BUILD / "node_modules" / "uplot" / "dist" / "uPlot.min.css").read_text()
    head = f"<!doctype html><meta charset=utf-8><style>* {{box-sizing: border-box}} {style}</style>"
    errors: list[str] = []
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.set_viewport_size({"width": width, "height": 900})
    # A page of some origin: without one, the components may not read the browser's storage
    page.route(
        "**/*", lambda route: route.fulfill(body=f"{head}<div id=root></div>", content_type="text/html")
    )
    page.goto("http://grafana.invalid/")
    page.evaluate("given => { window.INPUT = given; window.ready = null }", given)
    page.add_script_tag(content=bundled_components())
    error = page.wait_for_function("window.ready", timeout=10_000).json_value()["error"]
    assert not error, error
    assert not errors, errors
    if screenshot is not None:
        page.screenshot(path=screenshot, full_page=True)
    panels = page.evaluate("window.read()")
    return {panel["title"]: Drawn(**{"axis": [], **panel}) for panel in panels}


if __name__ == "__main__":
    if "npm" in MISSING:
        raise SystemExit("npm is not installed")
    bundled_components()
