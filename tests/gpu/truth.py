"""The truth table on a GPU: zeromon's figures beside what torch.profiler traced, in the same run.

Two ranks share the GPU. Each result is a line of ``--out``, for ``tests/vgpu/truth_table.py --publish``.
"""

from __future__ import annotations

import argparse
import gzip
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

HERE = Path(__file__).resolve().parent
TESTS = HERE.parent
if __name__ == "__main__":
    sys.path[:0] = [str(TESTS), *(str(TESTS.parent / name) for name in ("", "agents", "tools"))]

from evidence_pages import commit_here, today  # noqa: E402
from support import LAUNCH  # noqa: E402
from vgpu.truth import Timeline  # noqa: E402
from vgpu.truth_table import STRATEGIES, misses, run_cell, summary_row  # noqa: E402

SHAPES = {
    "device": ("--hidden", "1024", "--batch", "8192"),
    "launch": ("--hidden", "256", "--layers", "24"),
}


@dataclass(frozen=True)
class Gpu:
    """The GPU of this machine, shared by all ranks."""

    traces: Path | None = None

    def command(self, folder: Path, bound: str) -> list[str]:
        return [sys.executable, "-u", *LAUNCH[1:], str(HERE / "traced.py"), str(folder)]

    def shape(self, bound: str) -> Sequence[str]:
        return SHAPES[bound]

    def variables(self, folder: Path) -> dict[str, str]:
        return {}

    def server(self) -> None:
        return None

    def timeline(self, folder: Path, rank: int) -> Timeline:
        text = (folder / f"{rank}.json").read_bytes()
        if self.traces:
            self.traces.mkdir(parents=True, exist_ok=True)
            (self.traces / f"{time.time():.0f}-{rank}.json.gz").write_bytes(gzip.compress(text))
        content = json.loads(text)
        return Timeline.traced(content, content["marks"])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--only", nargs="*", default=[], help="titles of strategies that contain this")
    parser.add_argument("--bounds", nargs="*", default=list(SHAPES))
    parser.add_argument("--log", default="10")
    parser.add_argument("--traces", type=Path, help="keep the trace of each rank in this folder")
    given = parser.parse_args()
    cells: list[dict[str, Any]] = [
        {"device": torch.cuda.get_device_name(0), "version": torch.__version__.partition("+")[0],
         "world": 2, "strategy": strategy.title, "bound": bound, "log": given.log,
         "date": today(), "commit": commit_here()}
        for strategy in STRATEGIES
        if strategy.least_ranks <= 2
        and (not given.only or any(word in strategy.title for word in given.only))
        for bound in given.bounds
    ]  # fmt: skip
    by_title = {one.title: one for one in STRATEGIES}
    missed = 0
    for cell in cells:
        try:
            gpu = Gpu(given.traces)
            cell |= run_cell(gpu, by_title[cell["strategy"]], cell["bound"], cell["log"], 2)
        except Exception as error:  # one that fails does not stop the others
            cell["failed"] = f"{type(error).__name__}: {error}"[:3000]
        with given.out.open("a") as file:
            file.write(json.dumps(cell) + "\n")
        print(*summary_row(cell), sep=" | ", flush=True)
        missed += "ranks" not in cell or bool(list(misses(cell["ranks"])))
    return int(missed > 0)


if __name__ == "__main__":
    sys.exit(main())
