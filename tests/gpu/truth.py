"""The truth table on a GPU: zeromon's figures beside what torch.profiler traced, in the same run.

Two ranks share the GPU. Each result is a line of ``--out``; ``tests/vgpu/truth_table.py --publish`` reads it.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

HERE = Path(__file__).resolve().parent
TESTS = HERE.parent
if __name__ == "__main__":
    sys.path[:0] = [str(TESTS), str(TESTS.parent), str(TESTS.parent / "agents")]

from support import LAUNCH  # noqa: E402

from vgpu.truth import Timeline  # noqa: E402
from vgpu.truth_table import STRATEGIES, misses, render_row, run_cell  # noqa: E402

SHAPES = {
    "device": ("--hidden", "1024", "--batch", "8192"),
    "launch": ("--hidden", "256"),
}


@dataclass(frozen=True)
class Gpu:
    """The GPU of this machine, shared by all ranks."""

    def command(self, folder: Path, bound: str) -> list[str]:
        return [sys.executable, "-u", *LAUNCH[1:], str(HERE / "traced.py"), str(folder)]

    def shape(self, bound: str) -> Sequence[str]:
        return SHAPES[bound]

    def variables(self, folder: Path) -> dict[str, str]:
        return {}

    def timeline(self, folder: Path, rank: int) -> Timeline:
        content = json.loads((folder / f"{rank}.json").read_text())
        return Timeline.traced(content, content["marks"])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--only", nargs="*", default=[], help="titles of strategies that contain this")
    parser.add_argument("--bounds", nargs="*", default=list(SHAPES))
    parser.add_argument("--log", default="10")
    parser.add_argument("--lanes", type=int, default=1, help="runs at a time")
    given = parser.parse_args()
    cells: list[dict[str, Any]] = [
        {"version": torch.__version__.partition("+")[0], "world": 2, "strategy": strategy.title,
         "bound": bound, "log": given.log}
        for strategy in STRATEGIES
        if strategy.least_ranks <= 2
        and (not given.only or any(word in strategy.title for word in given.only))
        for bound in given.bounds
    ]  # fmt: skip
    by_title = {one.title: one for one in STRATEGIES}

    def run(cell: dict[str, Any]) -> bool:
        try:
            cell |= run_cell(Gpu(), by_title[cell["strategy"]], cell["bound"], cell["log"], 2)
        except Exception as error:  # one that fails does not stop the others
            cell["failed"] = f"{type(error).__name__}: {error}"[:3000]
        with given.out.open("a") as file:
            file.write(json.dumps(cell) + "\n")
        print(render_row(cell), flush=True)
        return "ranks" in cell and not list(misses(cell["ranks"]))

    with ThreadPoolExecutor(given.lanes) as pool:
        return int(not all(list(pool.map(run, cells))))


if __name__ == "__main__":
    sys.exit(main())
