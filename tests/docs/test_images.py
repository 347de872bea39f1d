"""The program that makes the images: an animated SVG shows each frame, and nothing of another."""

from __future__ import annotations

import importlib.util
import re

from support import ROOT
from textual.app import App, ComposeResult
from textual.widgets import Static


class Shown(App[None]):
    def __init__(self, text: str) -> None:
        super().__init__()
        self.text = text

    def compose(self) -> ComposeResult:
        yield Static(self.text)


async def test_an_animated_svg_shows_each_frame_in_turn() -> None:
    """Three frames: what is in two of them is in the file once, and visible in both."""
    spec = importlib.util.spec_from_file_location("make_images", ROOT / "tools" / "make_images.py")
    assert spec is not None
    assert spec.loader is not None
    tool = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tool)
    frames = []
    for text in ("alpha\nsame", "beta\nother", "[red]gamma[/]\nsame"):
        app = Shown(text)
        async with app.run_test(size=(20, 4)):
            frames.append(app.export_screenshot(title="run"))
    made = tool.animated(frames, 2.0)
    assert len(made) < sum(map(len, frames))
    assert made.count(">same</text>") == 1
    for word, visible in (("alpha", "100"), ("beta", "010"), ("gamma", "001"), ("same", "101")):
        (name,) = re.findall(rf'<g class="(f\d+)">(?:(?!</g>).)*>{word}</text>', made)
        steps = dict(re.findall(r"([\d.]+)%\{visibility:(\w+)\}", _keyframes(made, name)))
        now, shown = "hidden", ""
        for number in range(3):
            now = steps.get(f"{100 * number / 3:g}", now)
            shown += "1" if now == "visible" else "0"
        assert shown == visible
    assert "infinite" in made
    assert "6s" in made


def _keyframes(made: str, name: str) -> str:
    found = re.search(rf"@keyframes {name}\{{(.*)\}}", made)
    assert found is not None
    return found[1]
