"""The dashboard in a real browser, on a real run: it loads, lives, recovers, and asks nobody else."""

from __future__ import annotations

import base64
import gzip
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import axe_playwright_python
import pytest
from builders import rank, run
from served import get
from support import FORKED, ROOT, clean_environment, wait_for

from zeromon.snapshot import Finding
from zeromon.storage.run_store import Store
from zeromon_dashboard.charts import FEW
from zeromon_dashboard.url_state import PAGES

BROWSER = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
if BROWSER is None:
    pytest.skip("no Chromium is installed", allow_module_level=True)

EVIL = "<img src=x onerror=alert(1)>"
PACED = """
import itertools, runpy, sys, time
from torch.optim.optimizer import register_optimizer_step_post_hook
pauses = itertools.chain(itertools.repeat(0.05, 100), itertools.repeat(1.0))
register_optimizer_step_post_hook(lambda *_: time.sleep(next(pauses)))
sys.argv.pop(0)
runpy.run_path(sys.argv[0], run_name="__main__")
"""
"""Trains as a device would, and soon slower: what is left of a step leaves the CPUs to the browser."""


AXE = (Path(axe_playwright_python.__file__).parent / "axe.min.js").read_text()
DESK, PHONE = {"width": 1400, "height": 950}, {"width": 360, "height": 780}
WIDTH = "document.documentElement.scrollWidth"


SHOW_TIPS = """(shown) => {
  for (const figure of document.querySelectorAll('.js-plotly-plot')) {
    const n = figure.data.findIndex((trace) => (trace.z || trace.x || []).length);
    if (n < 0) continue;
    const { x, z } = figure.data[n];
    if (!shown) Plotly.Fx.unhover(figure);
    else if (z) Plotly.Fx.hover(figure, { xval: x ? x[0] : 0, yval: 0 });
    else Plotly.Fx.hover(figure, [{ curveNumber: n, pointNumber: 0 }]);
  }
}"""
PALE_TEXTS = (Path(__file__).parent / "pale_texts.js").read_text().partition("\n")[2]


@dataclass
class Site:
    """A live run, a record with hostile names, and a dashboard on both."""

    environment: dict[str, str]
    run: str = ""
    port: int = 0
    key: str = ""
    """What the printed address brings."""
    server: Any = None
    training: Any = None
    folder: Path = field(default_factory=Path)

    @property
    def base(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def serve(self) -> None:
        command = [sys.executable, "-m", "zeromon", "dash", "--no-browser"]
        self.server = subprocess.Popen(
            [*command, "--port", str(self.port)], env=self.environment, stderr=subprocess.PIPE, text=True
        )
        assert self.server.stderr is not None
        said = self.server.stderr.readline()
        found = re.search(r"127\.0\.0\.1:(\d+)/\?token=(\S+)", said)
        assert found, said
        self.port, self.key = int(found[1]), found[2]

    def stop(self) -> None:
        self.server.send_signal(signal.SIGINT)
        self.server.wait(60)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    folder = tmp_path_factory.mktemp("site")
    environment = clean_environment() | {
        "ZEROMON_DIR": str(folder / "rings"),
        "ZEROMON_STORE": str(folder / "store"),
        "PYTHONPATH": os.pathsep.join(str(ROOT / part) for part in ("", "agents", "dashboard")),
    }
    store = Store(folder / "store")
    evil = rank(0, node=EVIL, unit=EVIL, strategy=EVIL, exception=EVIL)
    finding = Finding(rule="x", code="ZM1", severity="warning", text=EVIL, rank=0)
    facts = {"run": "evil", "command": ("python", EVIL), "node": EVIL, "ended": True}
    store.save(run(evil, findings=(finding,), **facts))
    made = Site(environment, folder=folder)
    program = str(ROOT / "examples" / "train_gpt.py")
    small = ["--width", "32", "--layers", "2", "--length", "32", "--batch", "2"]
    watched = [sys.executable, "-m", "zeromon", "run", "--name", "live-run", "--"]
    paced = folder / "paced.py"
    paced.write_text(PACED)
    command = [*watched, *FORKED, "2", str(paced), program]
    with (folder / "training.log").open("w") as log:
        made.training = subprocess.Popen(
            [*command, "--steps", "1000000", "--log-every", "100000", *small],
            env=environment, stdout=log, stderr=log, start_new_session=True,
        )  # fmt: skip
    made.run = "live-run"
    try:
        manifest = folder / "store" / "runs" / "live-run" / "manifest.json"
        wait_for(lambda: manifest.exists() or made.training.poll() is not None, 90)
        assert manifest.exists(), (folder / "training.log").read_text()
        made.serve()
        yield made
        made.stop()
    finally:
        os.killpg(made.training.pid, signal.SIGINT)
        try:
            made.training.wait(20)
        except subprocess.TimeoutExpired:
            os.killpg(made.training.pid, signal.SIGKILL)


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A browser with a profile, which keeps the scripts of the pages and what it compiles of them."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        made = playwright.chromium.launch_persistent_context(
            tmp_path_factory.mktemp("profile"), executable_path=BROWSER, color_scheme="light",
            args=["--no-sandbox", "--disable-gpu"],
        )  # fmt: skip
        yield made
        made.close()


@dataclass
class Tab:
    """A tab, and everything that went wrong in it."""

    page: Any
    wrong: list[str] = field(default_factory=list)

    def go(self, address: str) -> None:
        self.page.goto(address)
        self.page.wait_for_selector("#verdict, #run-table .ag-row, #comparison", timeout=60_000)

    def points(self, graph: str) -> int:
        """How many points the first line of a graph has."""
        script = "id => document.querySelector(`#${id} .js-plotly-plot`)?.data?.[0]?.x?.length ?? 0"
        return int(self.page.evaluate(script, graph))

    def barriers(self) -> list[str]:
        """What axe-core finds, and the texts of figures and of their tool tips with little contrast.

        On a light and on a dark page, which is as it was afterwards, but is sent no changes any more.
        """
        self.page.evaluate(AXE)
        still = {"props": {}, "extend": {}, "cursor": None}
        self.page.route("**/live?*", lambda route: route.fulfill(json=still))
        self.page.wait_for_timeout(300)  # for an answer that is on its way
        size = self.page.viewport_size
        high = self.page.evaluate("document.documentElement.scrollHeight")
        self.page.set_viewport_size({"width": size["width"], "height": max(high, size["height"])})
        broken = self._broken_rules("{resultTypes: ['violations']}") + self._pale_texts()
        self._change_theme()
        broken += (
            self._broken_rules("{resultTypes: ['violations'], runOnly: ['color-contrast']}")
            + self._pale_texts()
        )
        self._change_theme()
        self.page.set_viewport_size(size)
        self.page.unroute("**/live?*")
        return broken

    def _change_theme(self) -> None:
        theme = "document.documentElement.dataset.mantineColorScheme"
        before = self.page.evaluate(theme)
        self.page.keyboard.press("d")
        wait_for(lambda: self.page.evaluate(theme) != before)
        changing = "document.getAnimations().some(a => a instanceof CSSTransition)"
        wait_for(lambda: not self.page.evaluate(changing))

    def _broken_rules(self, options: str) -> list[str]:
        found = self.page.evaluate(f"axe.run({options}).then(r => r.violations)")
        return [f"{one['id']}: {node['html']}" for one in found for node in one["nodes"]]

    def _pale_texts(self) -> list[str]:
        """Texts with less than 4.5 to 1 against what a picture without texts has in their place."""
        pale: list[str] = []
        if self.page.locator(".js-plotly-plot .main-svg").count():
            for where in (".main-svg text:not(.hoverlayer *)", ".hoverlayer text"):
                self.page.evaluate(SHOW_TIPS, where == ".hoverlayer text")
                self.page.wait_for_timeout(200)  # plotly draws at most one tip in 50 ms
                style = ".main-svg text { visibility: hidden !important }"
                hidden = self.page.add_style_tag(content=style)
                picture = base64.b64encode(self.page.screenshot()).decode()
                hidden.evaluate("style => style.remove()")
                texts, found = self.page.evaluate(PALE_TEXTS, [picture, where])
                assert texts
                pale += found
        return pale

    def open_all(self) -> None:
        """Opens what is folded, and waits until its figures are drawn."""
        self.page.evaluate("document.querySelectorAll('details').forEach(d => { d.open = true })")
        drawn = "[...document.querySelectorAll('.dash-graph')].every(g => g.querySelector('.main-svg'))"
        wait_for(lambda: self.page.evaluate(drawn))

    def text(self, name: str) -> str:
        return str(self.page.inner_text(f"#{name}"))


@pytest.fixture
def tab(site: Site, browser: Any) -> Iterator[Tab]:
    browser.request.get(f"{site.base}/?token={site.key}")  # the browser keeps the cookie
    made = Tab(browser.new_page())
    page, wrong = made.page, made.wrong
    page.set_viewport_size(DESK)
    page.on("console", lambda m: wrong.append(m.text) if m.type in ("error", "warning") else None)
    page.on("pageerror", lambda error: wrong.append(str(error)))
    page.on("dialog", lambda dialog: (wrong.append(f"a dialog: {dialog.message}"), dialog.dismiss()))
    inside = (site.base, "data:", "blob:")
    page.on("request", lambda r: None if r.url.startswith(inside) else wrong.append(f"asked {r.url}"))
    yield made
    if page.url.startswith(site.base):
        page.evaluate("localStorage.clear()")
    page.close()
    browser.clear_cookies()


def test_every_page_loads_without_an_error_and_asks_nobody_else(site: Site, tab: Tab) -> None:
    for name in PAGES:
        tab.go(f"{site.base}/run/{site.run}/{name}")
        assert tab.text("state").lower() == "live"
        tab.page.wait_for_selector(
            ".js-plotly-plot .main-svg, .finding, #earlier, #prediction", timeout=30_000
        )
        tab.open_all()
        assert tab.barriers() == []
        tab.page.set_viewport_size(PHONE)
        wait_for(lambda: tab.page.evaluate(WIDTH) <= PHONE["width"])
        tab.page.set_viewport_size(DESK)
    tab.go(site.base)
    assert tab.barriers() == []
    assert tab.page.title() == "runs · zeromon"
    hidden_width = "view => view.scrollWidth - view.clientWidth"
    assert tab.page.eval_on_selector("#run-table .ag-center-cols-viewport", hidden_width) <= 0
    tab.page.get_by_label("run Filter Input").fill("evil")
    search = "decodeURIComponent(location.search)"
    wait_for(lambda: tab.page.evaluate(search) == "?is-link=evil")
    tab.page.locator("#run-table .ag-header-cell-text", has_text="step, ms").click()
    wait_for(lambda: tab.page.evaluate(search) == "?sort=step:asc&is-link=evil")
    tab.go(f"{site.base}/{tab.page.evaluate('location.search')}")
    wait_for(
        lambda: tab.page.locator("#run-table [col-id=link]").all_inner_texts() == ["run", "", "evil"]
    )
    assert tab.page.evaluate(search) == "?sort=step:asc&is-link=evil"
    tab.go(f"{site.base}/?compare=live-run,evil")
    tab.open_all()
    assert tab.barriers() == [] and tab.page.title() == "live-run against evil · zeromon"
    tab.go(site.base)
    wait_for(lambda: {"live-run", "evil"} <= set(tab.page.locator("[col-id=link]").all_inner_texts()))
    assert tab.wrong == []


def test_no_bar_of_a_step_shows_half_a_figure(site: Site, tab: Tab) -> None:
    """What does not fit is out of sight: ``6`` is not the first digit of ``68.9 ms``."""
    cut = """[...document.querySelectorAll(".part")].flatMap(
    (part) => [...part.childNodes].filter((label) => {
      const range = document.createRange();
      range.selectNode(label);
      const [mine, whole] = [range.getBoundingClientRect(), part.getBoundingClientRect()];
      return mine.top < whole.bottom - 1 && mine.right > whole.right + 1;
    }).map((label) => label.textContent))"""
    tab.go(f"{site.base}/run/{site.run}/overview")
    tab.page.wait_for_selector(".part > b")
    for width in (1440, 1024, 360):
        tab.page.set_viewport_size({"width": width, "height": 800})
        assert tab.page.evaluate(cut) == []


def test_points_arrive_by_themselves_and_come_again_after_a_restart(site: Site, tab: Tab) -> None:
    tab.go(f"{site.base}/run/{site.run}/overview?last=1000")
    first = wait_for(lambda: tab.points("step-time"))
    wait_for(lambda: tab.points("step-time") > first)
    figures = tab.page.evaluate("document.querySelectorAll('.js-plotly-plot').length")
    assert figures == 6 and tab.wrong == []  # breakdown, ledger, step, memory, exposed, throughput
    site.stop()
    wait_for(lambda: "does not answer" in tab.text("lost"))
    site.serve()
    wait_for(lambda: tab.text("lost") == "")
    then = wait_for(lambda: tab.points("step-time"))
    wait_for(lambda: tab.points("step-time") > then)
    expected = ("ERR_CONNECTION_REFUSED", "ERR_EMPTY_RESPONSE", "ERR_CONNECTION_RESET", "ERR_SOCKET")
    assert [text for text in tab.wrong if not any(known in text for known in expected)] == []


def test_points_of_a_slow_answer_are_drawn_once(site: Site, tab: Tab) -> None:
    """Dash drops the result of a poll that is still under way at the next tick, and so the cursor."""
    tab.page.route("**/live?*", lambda asked: (time.sleep(1.4), asked.continue_()))
    tab.go(f"{site.base}/run/{site.run}/overview")
    wait_for(lambda: tab.points("step-time") > FEW)
    first = tab.points("step-time")
    wait_for(lambda: tab.points("step-time") >= first + 6)
    steps = tab.page.evaluate("document.querySelector('#step-time .js-plotly-plot').data[0].x")
    assert steps == sorted(set(steps))


def test_the_steps_that_are_drawn_are_those_that_were_trained(site: Site, tab: Tab) -> None:
    """Against the collector's own count, asked for beside the page."""
    tab.go(f"{site.base}/run/{site.run}/overview?ranks=1")
    wait_for(lambda: tab.points("step-time"))
    graph = "document.querySelector('#step-time .js-plotly-plot')"
    names = tab.page.evaluate(f"{graph}.data.map(d => d.name)")
    assert names == ["rank 1"]
    port = json.loads((site.folder / "rings" / "collector.json").read_text())["port"]
    listed = json.loads(get(port, "/api/runs")[1])
    told = next(r["step"] for r in listed if r["run"] == "live-run")
    last = tab.page.evaluate(f"{graph}.data[0].x.at(-1)")
    shown = int(re.sub(r"\D", "", tab.text("verdict")))
    rate = 200  # steps a second, at most, between the two readings
    assert abs(shown - told) < 5 * rate and abs(last - told) < 5 * rate and min(shown, last) > 10
    assert tab.wrong == []


@pytest.mark.long  # on a busy machine the drag of the mouse may meet a page that is made anew
def test_a_range_of_steps_is_that_of_every_chart_and_in_the_address(site: Site, tab: Tab) -> None:
    """Dragged in one chart, drawn with every step in all; gone again with one click."""
    chart = "document.querySelector('#{} .js-plotly-plot')"
    axis = "?._fullLayout?.xaxis.range"
    span = lambda name: tab.page.evaluate(f"{chart.format(name)}{axis}")  # noqa: E731
    tab.go(f"{site.base}/run/{site.run}/overview?ranks=0")
    wait_for(lambda: tab.points("step-time") > 30)

    def dragged() -> bool:
        tab.page.locator("#exposed").scroll_into_view_if_needed()
        box = tab.page.locator("#exposed .nsewdrag").first.bounding_box()
        middle = box["y"] + box["height"] / 2
        tab.page.mouse.move(box["x"] + 0.3 * box["width"], middle)
        tab.page.mouse.down()
        tab.page.mouse.move(box["x"] + 0.5 * box["width"], middle, steps=5)
        tab.page.mouse.up()
        tab.page.wait_for_timeout(500)
        return "steps=" in tab.page.url

    wait_for(dragged)  # again, where the page has moved below the mouse
    first, last = map(int, re.findall(r"steps=(\d+)-(\d+)", tab.page.url)[0])
    names = ("step-time", "memory", "exposed")
    for _ in range(2):  # the second time: the address alone, opened again
        for name in names:
            wait_for(lambda name=name: span(name) == [first - 0.5, last + 0.5])
            wait_for(lambda name=name: tab.points(name) == last - first + 1)
        tab.go(tab.page.url)
    tab.page.fill("#steps", f"{first}-{first + 4}")
    tab.page.press("#steps", "Enter")
    wait_for(lambda: tab.points("memory") == 5)
    assert "charts only; cards and tables: last 20 steps" in tab.text("steps-scope")
    tab.page.keyboard.press("2")
    wait_for(lambda: tab.page.locator("#roles").count())
    wait_for(lambda: span("memory") == [first - 0.5, first + 4.5])
    tab.page.click("text=all steps")
    wait_for(lambda: "steps=" not in tab.page.url and tab.points("memory") > last - first + 1)
    wait_for(lambda: not tab.page.locator("#steps-scope").count())
    assert tab.wrong == []


def test_runs_that_are_selected_are_laid_over_each_other(site: Site, tab: Tab) -> None:
    tab.go(site.base)
    boxes = tab.page.locator("#run-table .ag-row input[type=checkbox]")
    wait_for(lambda: boxes.count() == 2)
    for n in range(2):
        boxes.nth(n).click()
    tab.page.click("#lay")
    names = "document.querySelector('#step-time .js-plotly-plot')?.data?.map(d => d.name)"
    wait_for(lambda: tab.page.evaluate(names) == ["A live-run", "B evil"])
    assert tab.page.url.endswith("/run/live-run/overview?with=evil")
    assert "strategy" in tab.text("differences").lower() and tab.barriers() == []
    tab.page.locator("#with").focus()
    tab.page.keyboard.press("Backspace")
    wait_for(lambda: tab.page.evaluate(names) == ["rank 0", "rank 1"])
    assert tab.wrong == [] and "with=" not in tab.page.url


def test_a_moment_of_the_past_can_be_gone_to_played_and_left(site: Site, tab: Tab) -> None:
    tab.go(f"{site.base}/run/{site.run}/overview")
    spans = tab.page.evaluate("document.querySelector('#when [role=slider]').ariaValueMin")
    begin = float(spans)
    tab.go(f"{site.base}/run/{site.run}/memory?at={begin + 1:.3f}&last=100")
    wait_for(lambda: tab.text("state").lower().startswith("as at"))
    early = int(re.sub(r"\D", "", tab.text("verdict")))
    tab.page.click("#play")
    wait_for(lambda: tab.text("play").lower() == "pause")
    wait_for(lambda: int(re.sub(r"\D", "", tab.text("verdict"))) > early)
    tab.page.click("#now")
    wait_for(lambda: tab.text("state").lower() == "live")
    assert "last=100" in tab.page.url and "at=" not in tab.page.url
    assert tab.wrong == []


def test_a_trace_is_asked_for_only_by_who_has_the_key(site: Site, tab: Tab) -> None:
    tab.page.context.clear_cookies()
    tab.page.goto(f"{site.base}/run/{site.run}/communication")
    assert "open the address that zeromon dash printed" in tab.page.inner_text("body")
    tab.page.wait_for_load_state("networkidle")  # the icon, too, is refused
    assert tab.wrong and all("401" in text for text in tab.wrong)
    tab.wrong.clear()
    tab.go(f"{site.base}/run/{site.run}/communication?token={site.key}")
    assert "token" not in tab.page.url
    tab.page.click("#capture")
    wait_for(lambda: "was requested" in tab.text("capture-result"))
    wait_for(lambda: "done" in tab.text("capture-state"), 60)
    assert tab.wrong == []


def test_keys_change_pages_and_the_dark_stays(site: Site, tab: Tab) -> None:
    tab.go(f"{site.base}/run/{site.run}/overview?ranks=0")
    tab.page.keyboard.press("4")
    tab.page.wait_for_selector("#rank-map .main-svg", timeout=30_000)
    assert tab.page.url.endswith("/ranks?ranks=0")
    numbers = "#rank-table .ag-right-aligned-cell"
    # rows come before their cells
    wait_for(lambda: all(tab.page.locator(numbers).all_inner_texts() or [""]))
    cells = tab.page.locator(numbers).all_inner_texts()
    legible = r"n/a|[\d,]+|\d\d\.\d|\d\.\d\d|0\.\d{3}"  # three digits
    assert [text for text in cells if not re.fullmatch(legible, text)] == []
    background = "getComputedStyle(document.body).backgroundColor"
    light = tab.page.evaluate(background)
    tab.page.keyboard.press("d")
    wait_for(lambda: tab.page.evaluate(background) != light)
    dark = tab.page.evaluate(background)
    assert tab.page.evaluate("document.body.dataset.agThemeMode") == "dark"
    tab.go(f"{site.base}/run/{site.run}/memory")
    wait_for(lambda: tab.page.evaluate(background) == dark)
    tab.page.keyboard.press("0")
    wait_for(lambda: tab.page.locator("#run-table .ag-row").count())
    assert [text for text in tab.wrong if "404" not in text] == []  # a page that was left meanwhile


def test_a_run_and_a_rank_open_without_a_mouse(site: Site, tab: Tab) -> None:
    """Tab reaches the table, arrows a row, Enter opens it."""
    tab.go(site.base)
    enter = "document.activeElement.closest('.ag-cell')?.innerText"
    for _ in range(30):
        tab.page.keyboard.press("Tab")
        if tab.page.evaluate("document.activeElement.closest('.ag-header-cell') !== null"):
            break
    for _ in range(4):  # through the header and the filters to the rows
        tab.page.keyboard.press("ArrowDown")
    for _ in range(9):
        if (at := tab.page.evaluate(enter)) == "live-run":
            break
        tab.page.keyboard.press("ArrowUp" if at else "ArrowDown")
    tab.page.keyboard.press("Enter")
    tab.page.wait_for_selector("#verdict", timeout=30_000)
    assert f"/run/{site.run}" in tab.page.url
    tab.page.keyboard.press("4")
    tab.page.wait_for_selector("#rank-table .ag-row", timeout=30_000)
    tab.page.locator("#rank-table .ag-row[row-index='1'] .ag-cell").first.focus()
    tab.page.keyboard.press("Enter")
    wait_for(lambda: tab.page.evaluate("location.search") == "?ranks=1")


def test_a_change_is_predicted_and_its_address_shows_it_again(site: Site, tab: Tab) -> None:
    tab.go(f"{site.base}/run/{site.run}/whatif")
    tab.page.fill("#changes", "stage=0,3 accumulation=2")
    tab.page.keyboard.press("Enter")
    rows = "#prediction .ag-pinned-left-cols-container [col-id=change]"
    shown = lambda: {text.lstrip("* ") for text in tab.page.locator(rows).all_inner_texts()}  # noqa: E731
    asked = {"as it is", "stage=0 accumulation=2", "stage=3 accumulation=2"}
    wait_for(lambda: shown() == asked)
    tab.go(tab.page.url)
    wait_for(lambda: shown() == asked)
    tab.page.fill("#changes", "steps=3")
    tab.page.click("#predict")
    wait_for(lambda: "'steps' is no setting" in tab.text("predicted"))


def test_the_collectives_of_the_last_steps_are_on_one_timeline(site: Site, tab: Tab) -> None:
    tab.go(f"{site.base}/run/{site.run}/timeline")
    labels = lambda: tab.page.locator("#lanes-chart .ytick text").all_text_contents()  # noqa: E731
    wait_for(lambda: {"rank 0", "rank 1"} <= set(labels()))
    assert any("all_gather" in label or "all_reduce" in label for label in labels())
    named = tab.page.locator("#lanes-chart .annotation-text").all_text_contents()
    assert sum(text.isdecimal() for text in named) == 3
    tab.page.locator("#lane-steps label", has_text="10").click()
    wait_for(
        lambda: (
            sum(
                text.isdecimal()
                for text in tab.page.locator("#lanes-chart .annotation-text").all_text_contents()
            )
            == 10
        )
    )
    plot = "document.querySelector('#lanes-chart .js-plotly-plot')"
    tab.page.evaluate(f"Plotly.relayout({plot}, {{'xaxis.range[0]': 5, 'xaxis.range[1]': 25.5}})")
    wait_for(lambda: tab.page.evaluate("location.search") == "?lanes=10&zoom=5.000%3A25.500")
    tab.go(tab.page.url)
    wait_for(lambda: tab.page.evaluate(f"{plot} && {plot}.layout.xaxis.range") == [5, 25.5])
    tab.page.locator("#lane-steps label", has_text="1").first.click()
    wait_for(lambda: tab.page.evaluate("location.search") == "?lanes=1")
    answer = tab.page.request.get(f"{site.base}/trace/{site.run}.json.gz")
    events = json.loads(gzip.decompress(answer.body()))["traceEvents"]
    assert {event["ph"] for event in events} >= {"X", "C", "M"}
    assert tab.wrong == []


def test_a_notebook_of_this_machine_shows_the_page(site: Site, tab: Tab) -> None:
    """By the name that its own address has: to a browser, localhost and 127.0.0.1 are two sites."""
    tab.page.context.clear_cookies()
    address = f"http://localhost:{site.port}/run/{site.run}/overview?token={site.key}"
    page = f"<iframe src='{address}' width=900 height=600></iframe>".encode()

    class Notebook(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("Content-Type", "text/html")
            self.end_headers()
            self.wfile.write(page)

        def log_message(self, *_: object) -> None:
            pass

    with HTTPServer(("localhost", 0), Notebook) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        tab.page.goto(f"http://localhost:{server.server_port}/")
        inside = tab.page.frame_locator("iframe").locator("#verdict")
        inside.wait_for(timeout=60_000)
        wait_for(lambda: "step" in inside.inner_text())
        server.shutdown()


def test_a_click_on_the_map_leads_to_the_rank(site: Site, tab: Tab) -> None:
    tab.go(f"{site.base}/run/{site.run}/ranks")
    tab.page.wait_for_selector("#rank-map .main-svg", timeout=30_000)
    box = tab.page.locator("#rank-map .nsewdrag").first.bounding_box()
    assert box is not None  # the first cell is rank 0
    tab.page.mouse.click(box["x"] + 10, box["y"] + box["height"] / 2)
    wait_for(lambda: tab.page.evaluate("location.pathname + location.search").endswith("?ranks=0"))
    assert tab.page.evaluate("location.pathname").endswith("/overview")


def test_hostile_names_are_text(site: Site, tab: Tab) -> None:
    for name in ("overview", "communication", "ranks"):
        tab.go(f"{site.base}/run/evil/{name}")
        time.sleep(0.3)
        assert tab.page.locator("img").count() == 0
    tab.go(f"{site.base}/run/evil/advice")
    assert EVIL in tab.text("findings")
    tab.page.goto(f"{site.base}/report/evil.html")
    assert EVIL in tab.page.inner_text("body") and tab.page.locator("img").count() == 0
    tab.page.goto(f"{site.base}/run/no-such-run/memory")
    tab.page.wait_for_selector("text=no run named no-such-run", timeout=30_000)
    assert all("404" in text for text in tab.wrong)
    tab.page.click("text=all runs")
    tab.page.wait_for_selector("#run-table .ag-row", timeout=30_000)
