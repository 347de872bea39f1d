"""The terminal view over a synthetic run: `tui_program.py RANKS`. Every snapshot is a step further."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tui.snapshots import FixedSource, snapshot

from zeromon.snapshot import RankSnapshot, RunSnapshot
from zeromon.tui.app import ZeromonApp

HZ = 4
_STEPS = 200
_PICTURES = 500
_VARIANTS = 8


class Synthetic(FixedSource):
    """A run whose ranks end a step between any two snapshots.

    Its ranks are made once, for three snapshots, and written over in turn: making a thousand anew took
    as long as showing them.
    """

    def __init__(self, ranks: int) -> None:
        last = snapshot(_VARIANTS, _STEPS + _PICTURES)
        super().__init__(last)
        self._recent: Sequence[Sequence[object]] = [rank.steps.recent for rank in last.ranks]
        self._turns = [
            tuple(_copy(last.ranks[n % _VARIANTS], n, ranks) for n in range(ranks)) for _ in range(3)
        ]
        self._number, self.wall = 0, 0.0

    def latest(self) -> RunSnapshot:
        run = super().latest()
        self._number = min(self._number + 1, _PICTURES)
        newest = _STEPS + self._number
        recent = [steps[self._number : newest] for steps in self._recent]
        wobble, self.wall = (self._number % 9) / 100, run.taken_wall + self._number / HZ
        ranks = self._turns[self._number % 3]
        for n, rank in enumerate(ranks):
            _change(
                rank.steps, recent=recent[n % _VARIANTS], last_step=newest, watched_steps=newest,
                median_seconds=0.4 + (n * 7 % 11) / 100 + wobble,
            )  # fmt: skip
            _change(rank.communication, exposed_ratio=0.05 + wobble + n % 23 / 100)
        return replace(
            run, ranks=ranks, taken_ns=ranks[0].steps.recent[-1].end_ns, taken_wall=self.wall,
        )  # fmt: skip


def _copy(rank: RankSnapshot, number: int, ranks: int) -> RankSnapshot:
    """*rank* as another one of *ranks*, with records of its own."""
    own = {"steps": replace(rank.steps), "communication": replace(rank.communication)}
    return replace(rank, rank=number, world_size=ranks, **own)


def _change(record: object, **facts: object) -> None:
    for name, value in facts.items():
        object.__setattr__(record, name, value)


if __name__ == "__main__":
    source = Synthetic(int(sys.argv[1]))
    ZeromonApp(source, every_seconds=1 / HZ, now=lambda: source.wall).run()
