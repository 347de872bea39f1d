"""Draws docs/images/virtual-exposed.svg: exposed time by unit, of FSDP2's schedule and of the agent.

``python docs/virtual_chart.py`` takes the cases of tests/programs/virtual_truth.py, about 20 seconds.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
IMAGE = ROOT / "docs" / "images" / "virtual-exposed.svg"
CASES = (
    "default", "no prefetch", "stays gathered after forward",
    "HSDP", "2 micro-steps", "2 micro-steps, one reduction",
)  # fmt: skip
UNITS = ("(root)", "blocks.0", "blocks.1", "blocks.2", "blocks.3")
PARTS = (
    ("all_gather", "forward", "#4477aa", "all-gather in forward"),
    ("all_gather", "backward", "#88bbdd", "all-gather in backward"),
    ("reduce_scatter", "backward", "#cc6677", "reduce-scatter"),
    ("all_reduce", "backward", "#ddaa33", "all-reduce"),
)
ACROSS, WIDTH, HEIGHT, LEFT, TOP = 3, 310, 210, 52, 92
INNER, LOW = (252, 128), 42
"""Width and height of a panel's plot, and the room below its title."""


def figures() -> list[dict[str, Any]]:
    """Returns what the schedule and the agent say of each case."""
    path = os.pathsep.join(map(str, (ROOT, ROOT / "agents", ROOT / "dashboard")))
    program = ROOT / "tests" / "programs" / "virtual_truth.py"
    done = subprocess.run(
        [sys.executable, str(program), *CASES],
        env=os.environ | {"PYTHONPATH": path}, stdout=subprocess.PIPE, check=True,
    )  # fmt: skip
    return [json.loads(line) for line in done.stdout.splitlines()]


def text(
    x: float, y: float, words: str, anchor: str = "start", size: int = 12, more: str = ""
) -> str:
    """Returns a text element."""
    return (
        f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}" font-size="{size}"{more}>{words}</text>'
    )


def panel(x: int, y: int, one: dict[str, Any], steps: int, most: float, tick: int) -> list[str]:
    """Returns one case: a stacked bar a unit for the schedule, a diamond for the agent."""
    width, height = INNER
    low = y + LOW + height
    said = sum(row[3] for row in one["agent"]) / steps / 1e6
    parts = [
        text(x, y + 14, one["case"], size=14, more=' font-weight="bold"'),
        text(x, y + 31, f"schedule {_total(one['schedule'], steps):.3f} ms, agent {said:.3f} ms",
             more=' fill="#555"'),
    ]  # fmt: skip
    for value in range(0, int(most) + 1, tick):
        at = low - value / most * height
        parts.append(f'<path d="M{x} {at:.1f}h{width}" stroke="#ddd"/>')
        parts.append(text(x - 6, at + 4, f"{value}", "end", more=' fill="#555"'))
    step = width / len(UNITS)
    for number, unit in enumerate(UNITS):
        middle, at = x + (number + 0.5) * step, float(low)
        for op, phase, color, _ in PARTS:
            tall = _sum(one["schedule"], steps, unit, op, phase) / most * height
            at -= tall
            if tall:
                parts.append(
                    f'<rect x="{middle - 14:.1f}" y="{at:.2f}" width="28" height="{tall:.2f}"'
                    f' fill="{color}"/>'
                )
        dot = low - _sum(one["agent"], steps, unit) / most * height
        parts.append(
            f'<path d="M{middle:.1f} {dot - 5:.2f}l5 5l-5 5l-5-5z" fill="#fff" stroke="#000"'
            ' stroke-width="1.5"/>'
        )
        parts.append(text(middle, low + 16, unit, "middle", 11))
    return parts


def _sum(rows: Any, steps: int, unit: str, op: str = "", phase: str = "") -> float:
    """Milliseconds a step of a unit."""
    return sum(
        row[3] for row in rows if row[1] == unit and op in ("", row[0]) and phase in ("", row[2])
    ) / (steps * 1e6)


def _total(rows: Any, steps: int) -> float:
    return sum(row[3] for row in rows) / (steps * 1e6)


def draw(cases: list[dict[str, Any]], steps: int = 2) -> str:
    """Returns the image."""
    most = max(_sum(one["schedule"], steps, unit) for one in cases for unit in UNITS)
    tick = 1 if most < 6 else 2 if most < 12 else 5
    most = -(-most // tick) * tick
    width, height = ACROSS * WIDTH + 40, -(-len(cases) // ACROSS) * HEIGHT + TOP + 4
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}"'
        f' viewBox="0 0 {width} {height}" font-family="sans-serif">',
        f'<rect width="{width}" height="{height}" fill="#fff"/>',
        text(24, 30, "Exposed communication of FSDP2 by unit, ms a step", size=18),
    ]
    at = 24
    for _, _, color, words in PARTS:
        parts.append(f'<rect x="{at}" y="50" width="14" height="14" fill="{color}"/>')
        parts.append(text(at + 20, 62, f"schedule: {words}"))
        at += 40 + round(6.3 * len(f"schedule: {words}"))
    parts.append(
        f'<path d="M{at + 7} 51l6 6l-6 6l-6-6z" fill="#fff" stroke="#000" stroke-width="1.5"/>'
    )
    parts.append(text(at + 20, 62, "agent"))
    for number, one in enumerate(cases):
        row, column = divmod(number, ACROSS)
        parts += panel(LEFT + column * WIDTH, TOP + row * HEIGHT, one, steps, most, tick)
    return "\n".join([*parts, "</svg>", ""])


if __name__ == "__main__":
    IMAGE.write_text(draw(figures()))
