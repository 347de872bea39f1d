"""The terminal view over a synthetic run: `tui_program.py RANKS`. Every picture is a step further."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tui.pictures import FixedSource, picture

from zeromon.snapshot import RunSnapshot
from zeromon.tui.app import ZeromonApp

HZ = 4
_STEPS = 200
_PICTURES = 500
_VARIANTS = 8


class Synthetic(FixedSource):
    """A run whose ranks end a step between any two pictures."""

    def __init__(self, ranks: int) -> None:
        last = picture(_VARIANTS, _STEPS + _PICTURES)
        base = [last.ranks[n % _VARIANTS] for n in range(ranks)]
        ranks_of = tuple(replace(rank, rank=n, world_size=ranks) for n, rank in enumerate(base))
        super().__init__(replace(last, ranks=ranks_of))
        self._recent: Sequence[Sequence[object]] = [rank.recent for rank in last.ranks]
        self._number, self.wall = 0, 0.0

    def latest(self) -> RunSnapshot:
        run = super().latest()
        self._number = min(self._number + 1, _PICTURES)
        newest = _STEPS + self._number
        recent = [steps[self._number : newest] for steps in self._recent]
        wobble, self.wall = (self._number % 9) / 100, run.taken_wall + self._number / HZ
        ranks = tuple(
            replace(
                rank, recent=recent[n % _VARIANTS], step=newest, steps=newest,
                exposed_ratio=0.05 + wobble + n % 23 / 100,
                step_seconds=0.4 + (n * 7 % 11) / 100 + wobble,
            )
            for n, rank in enumerate(run.ranks)
        )  # fmt: skip
        return replace(
            run, ranks=ranks, taken_ns=ranks[0].recent[-1].end_ns, taken_wall=self.wall,
        )  # fmt: skip


if __name__ == "__main__":
    source = Synthetic(int(sys.argv[1]))
    ZeromonApp(source, every_seconds=1 / HZ, now=lambda: source.wall).run()
