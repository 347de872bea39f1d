"""The difference between two states of one run that take turns: off, on, on, off. Pure.

A drift of the machine that is linear over four blocks cancels. The differences of the rounds are the
sample: blocks hold many steps, so neighbouring steps that resemble each other do not narrow the error.
"""

import math
import statistics
from collections.abc import Sequence

from zeromon.stats.noise import Estimate

A_ROUND = 4
LEAST_ROUNDS = 3


def gain_in_turns(blocks: Sequence[float]) -> Estimate | None:
    """Returns by how much *on* is below *off*; None without a whole round.

    *blocks* has the figure of each block, in order: off, on, on, off, and again.
    """
    rounds = len(blocks) // A_ROUND
    if not rounds:
        return None
    each = []
    for at in range(0, rounds * A_ROUND, A_ROUND):
        off, on, on_again, off_again = blocks[at : at + A_ROUND]
        each.append((off + off_again - on - on_again) / 2)
    value = statistics.fmean(each)
    if rounds < LEAST_ROUNDS:
        return Estimate(value, None, 0)
    return Estimate(value, statistics.stdev(each) / math.sqrt(rounds), rounds - 1)
