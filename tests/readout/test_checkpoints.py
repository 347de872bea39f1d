"""The interval between checkpoints that the readout names, against failures that are drawn."""

from __future__ import annotations

import random

import pytest
from builders import run
from evidence import saved

from zeromon.readout.ledger import checkpoints_of
from zeromon.snapshot.run import Attempt

FAILURES = 20_000


def lost(interval: float, cost: float, between: float) -> float:
    """The share of the time that saves every *interval* and steps taken again cost, in seconds drawn."""
    draw = random.Random(7)
    elapsed = useful = 0.0
    for _ in range(FAILURES):
        lived = draw.expovariate(1 / between)
        elapsed += lived
        useful += lived // (interval + cost) * interval
    return 1 - useful / elapsed


@pytest.mark.parametrize("cost", [1.0, 10.0])
def test_failures_that_are_drawn_cost_least_at_the_interval(cost: float) -> None:
    """One failure an hour; half and twice the interval lose a quarter more, as ZM015 assumes."""
    failed = Attempt(number=1, started_wall=0.0, ended_wall=3600.0, steps=9, resumed_step=0,
                     lost_steps=1, deaths=())  # fmt: skip
    known = checkpoints_of(run(saved(ago_s=60.0, cost_s=cost), attempts=(failed,), taken_wall=3600.0))
    assert known is not None and known.measured and known.best_seconds is not None
    best = lost(known.best_seconds, cost, 3600.0)
    for factor in (0.5, 2.0):
        assert lost(factor * known.best_seconds, cost, 3600.0) / best == pytest.approx(1.25, abs=0.06)
