"""Makes the images of README and docs anew, from a real run: ``python tools/make_images.py``.

A small GPT trains with FSDP2 on two processes. ``first-minute.svg`` is the terminal view of its first
minute, drawn by Textual and played twice as fast; the images of the dashboard are of the same run.
``--recorded RUN`` replays the record of a run in place of training. ``preflight-overview.png`` is the
program on two virtual CUDA devices: ``--virtual PYTHON`` is a Python with the CUDA build of torch.
Needs Chromium, playwright and the extra ``dashboard``. ``perfetto.png`` is made by hand.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path

from zeromon.base.errors import ZeromonError
from zeromon.sources.base import Source
from zeromon.sources.live import find_live_runs
from zeromon.sources.replay import ReplaySource

ROOT = Path(__file__).resolve().parents[1]
IMAGES = ROOT / "docs" / "images"
TRAIN = (
    "torchrun", "--standalone", "--nproc-per-node", "2", str(ROOT / "examples" / "train_gpt.py"),
    "--strategy", "fsdp2", "--steps", "100000", "--width", "192", "--batch", "4",
)  # fmt: skip
PREFLIGHT = (
    "preflight", "--gpu", "8GiB", "--name", "gpt-preflight", "--",
    "{python}", "-m", "torch.distributed.run", "--nproc-per-node", "2",
    str(ROOT / "examples" / "train_gpt.py"), "--width", "1024", "--layers", "24", "--heads", "16",
    "--length", "1024", "--precision", "bf16", "--batch", "4", "--strategy", "fsdp2",
)  # fmt: skip
"""The program of docs/how-to/preflight.md."""
SIZE = (100, 30)
RUN, REPLAY_SPEED = "gpt-fsdp2", 2.0
FRAMES, SECONDS, SHOWN_SECONDS = 20, 3.0, 1.5
KEYS = {9: "3", 12: "2", 14: "6", 17: "1"}
"""Which screen is opened before which frame: communication, memory, findings, the overview again."""


# ---- one animated file of many frames ---------------------------------------------------------------


def animated(frames: Sequence[str], shown_seconds: float) -> str:
    """One SVG that shows *frames*, SVGs of Textual, in turn; what several have in common stands once."""
    head = re.sub(
        r"\.[\w-]+-r\d+ \{[^}]*\}\n?", "", frames[0][: frames[0].index('<g transform="translate(9')]
    )
    identity = re.search(r"terminal-\d+", head)[0]  # type: ignore[index]
    drawn: dict[str, dict[str, list[int]]] = {"rect": defaultdict(list), "text": defaultdict(list)}
    styles: dict[str, str] = {}
    names: dict[tuple[int, ...], str] = {}
    fills = Counter(re.findall(r'<rect fill="(#\w+)" x=', "".join(frames)))
    ground = fills.most_common(1)[0][0]
    for number, frame in enumerate(frames):
        for kind, element in _elements(frame, identity, styles):
            if f'<rect fill="{ground}"' not in element and number not in drawn[kind][element]:
                drawn[kind][element].append(number)
    parts, rules = [], [f".{name} {{ {rule} }}" for rule, name in styles.items()]
    for elements in drawn.values():
        by_frames: dict[tuple[int, ...], list[str]] = defaultdict(list)
        for element, numbers in elements.items():
            by_frames[tuple(numbers)].append(element)
        for numbers, together in by_frames.items():
            name = names.setdefault(numbers, f"f{len(names)}")
            if len(numbers) < len(frames):
                rules += _rules(name, numbers, len(frames), shown_seconds)
            parts.append(f'<g class="{name}">{"".join(together)}</g>')
    body = "\n".join(parts)
    style = "\n".join(dict.fromkeys(rules))
    return (
        head.replace("</style>", f"{style}\n</style>", 1)
        + f'<g transform="translate(9, 41)" clip-path="url(#{identity}-clip-terminal)">'
        + f'<rect fill="{ground}" width="100%" height="100%"/>'
        + f'<g class="{identity}-matrix">{body}</g></g></svg>\n'
    )


def _elements(frame: str, identity: str, styles: dict[str, str]) -> list[tuple[str, str]]:
    """The rectangles and texts of a frame, their classes replaced by those of all frames."""
    own = re.search(r"terminal-\d+", frame)[0]  # type: ignore[index]
    names = {
        name: styles.setdefault(rule.strip(), f"s{len(styles)}")
        for name, rule in re.findall(rf"\.{own}-(r\d+) \{{([^}}]*)\}}", frame)
    }
    body = frame[frame.index('<g transform="translate(9') :]
    found = []
    for element, kind in re.findall(r"(<(rect|text)\b[^>]*?(?:/>|>[^<]*</text>))", body):
        if kind == "text" and not re.sub(r"<[^>]*>|&#160;|\s", "", element):
            continue
        element = re.sub(r' clip-path="[^"]*"', "", element)
        element = re.sub(rf"{own}-(r\d+)", lambda m: names[m[1]], element)
        found.append((kind, element.replace(own, identity).replace(' shape-rendering="crispEdges"', "")))
    return found


def _rules(name: str, numbers: Sequence[int], frames: int, shown_seconds: float) -> list[str]:
    """CSS that shows a group in the frames *numbers* only."""
    known, steps, last = set(numbers), [], None
    for number in range(frames):
        if (is_on := number in known) != last:
            steps.append(f"{100 * number / frames:g}%{{visibility:{'visible' if is_on else 'hidden'}}}")
            last = is_on
    length = f"{frames * shown_seconds:g}s"
    return [
        f".{name}{{animation:{name} {length} step-end infinite}}",
        f"@keyframes {name}{{{''.join(steps)}}}",
    ]


# ---- the run ------------------------------------------------------------------------------------------


async def record(source: Source, seconds: float) -> list[str]:
    """Frames of the terminal view of *source*, one in so many *seconds*."""
    from zeromon.tui.app import ZeromonApp

    app = ZeromonApp(source, theme="zeromon-dark")
    frames = []
    async with app.run_test(size=SIZE) as pilot:
        for number in range(FRAMES):
            began = time.monotonic()
            if number in KEYS:
                await pilot.press(KEYS[number])
            await pilot.pause(0.5)
            frames.append(
                app.export_screenshot(title=f"zeromon {'attach' if source.live else 'replay'}")
            )
            await asyncio.sleep(max(0.0, seconds - (time.monotonic() - began)))
        return frames


def wait_for(run: str, training: subprocess.Popen[str]) -> None:
    """Returns when the first step of *run* has ended."""
    while training.poll() is None:
        try:
            if any(rank.steps for rank in find_live_runs(run)[0].open().latest().ranks):
                return
        except ZeromonError:
            pass  # not yet
        time.sleep(0.2)
    raise SystemExit("the training has ended before its first step")


def shoot(address: str, pictures: Sequence[tuple[str, str, str]]) -> None:
    """Takes the first screen of pages: *pictures* are (path of the page, colour scheme, file)."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=shutil.which("chromium") or shutil.which("google-chrome"),
            args=["--no-sandbox"],
        )
        base, _, query = address.partition("?")  # with the token of the page
        for path, scheme, name in pictures:
            page = browser.new_page(viewport={"width": 1440, "height": 900}, color_scheme=scheme)
            page.goto(f"{base.rstrip('/')}/{path}?{query}")
            page.wait_for_selector(".js-plotly-plot", timeout=60_000)
            page.wait_for_timeout(5000)
            page.screenshot(path=IMAGES / name)
        browser.close()


def main() -> None:
    """Trains, records the terminal, photographs the dashboard."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--recorded", metavar="RUN", help="of a recorded run; train nothing")
    parser.add_argument("--virtual", metavar="PYTHON", help="with the CUDA build of torch")
    options = parser.parse_args()
    recorded = options.recorded
    os.environ.pop("NO_COLOR", None)
    os.environ["COLORTERM"] = "truecolor"
    started: list[subprocess.Popen[str]] = []
    with tempfile.TemporaryDirectory(prefix="zeromon-images-", ignore_cleanup_errors=True) as home:
        try:
            if recorded is None:
                os.environ |= {"ZEROMON_DIR": f"{home}/rings", "ZEROMON_STORE": f"{home}/store"}
                started.append(begin("run", "--name", RUN, "--port", "9517", "--", *TRAIN))
                wait_for(RUN, started[0])
                source, seconds = find_live_runs(RUN)[0].open(), SECONDS
            else:
                source, seconds = ReplaySource(recorded, speed=REPLAY_SPEED), SECONDS / REPLAY_SPEED
            frames = asyncio.run(record(source, seconds))
            (IMAGES / "first-minute.svg").write_text(animated(frames, SHOWN_SECONDS))
            run = recorded or RUN
            pictures = [
                (f"run/{run}/overview", "light", "dashboard-overview.png"),
                (f"run/{run}/communication", "dark", "dashboard-communication.png"),
            ]
            started.append(begin("dash", "--no-browser", "--port", "9518"))
            address = address_of(started[-1])
            shoot(address, pictures)
            if options.virtual and recorded is None:
                os.killpg(started[0].pid, signal.SIGTERM)  # it shares the cores of the devices
                command = [word.format(python=options.virtual) for word in PREFLIGHT]
                begin(*command).communicate()
                shoot(address, [("run/gpt-preflight/overview", "light", "preflight-overview.png")])
        finally:
            for process in reversed(started):
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGTERM)
                    process.wait(30)


def begin(*words: str) -> subprocess.Popen[str]:
    """A command of zeromon in a session of its own."""
    command = [sys.executable, "-m", "zeromon", *words]
    output = subprocess.PIPE if words[0] == "dash" else subprocess.DEVNULL
    return subprocess.Popen(
        command, stdout=output, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )


def address_of(dashboard: subprocess.Popen[str]) -> str:
    """The address, with its token, that a dashboard prints when it serves."""
    assert dashboard.stdout is not None
    for printed in dashboard.stdout:
        if (found := re.search(r"http://\S+", printed)) is not None:
            return found[0]
    raise SystemExit("the dashboard has ended")


if __name__ == "__main__":
    main()
