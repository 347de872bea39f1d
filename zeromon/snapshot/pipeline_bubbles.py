"""The schedule of a pipeline: its actions, and the time that their order takes. Pure.

The bubble of a rank is the idle share of the pipeline's time, which is that of the rank with the longest
time from its first action to its last (Qi et al. 2023, arXiv 2401.10241, section 5.2). For GPipe and
1F1B with p equal stages and m micro-batches it is (p - 1) / (m + p - 1) (Narayanan et al. 2021, arXiv
2104.04473, section 2.2, as a share of the whole instead of the ideal time).
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from zeromon.ring.codes import StageAction

LETTERS = {
    StageAction.FORWARD: "F",
    StageAction.BACKWARD: "B",
    StageAction.BACKWARD_INPUT: "I",
    StageAction.BACKWARD_WEIGHT: "W",
}
"""torch's own letters."""
_ACTIONS = {letter: action for action, letter in LETTERS.items()}
_FORM = re.compile(r"(\d+)([FBIW])(\d+)")

Seconds = Mapping[tuple[int, StageAction], float]
"""(stage, action) -> seconds of one micro-batch."""


class Act(NamedTuple):
    """One action of a schedule."""

    stage: int
    action: StageAction
    micro_batch: int


class Run(NamedTuple):
    """When a rank computes: its first start, its last end, and the time it computes between them."""

    start: float
    end: float
    busy: float

    @property
    def span(self) -> float:
        """From the first start to the last end."""
        return self.end - self.start


def schedule_notation(order: Iterable[Act]) -> str:
    """Returns *order* in torch's notation: ``0F0 0F1 0B0``."""
    return " ".join(f"{a.stage}{LETTERS[a.action]}{a.micro_batch}" for a in order)


def parse_schedule(notation: str) -> list[Act]:
    """Reads what :func:`schedule_notation` wrote."""
    matches = (_FORM.fullmatch(token) for token in notation.split())
    return [Act(int(m[1]), _ACTIONS[m[2]], int(m[3])) for m in matches if m]


def simulate_schedule(orders: Sequence[Sequence[Act]], seconds: Seconds) -> list[Run] | None:
    """Returns when each rank computes, if it follows its order and messages take no time.

    None where the orders wait for each other, or for an action that none has.
    """
    final = max((act.stage for order in orders for act in order), default=0)
    times: dict[tuple[int, bool, int], float] = {}
    """(stage, forward?, micro-batch) -> when its result can be sent on."""
    free, busy = [0.0] * len(orders), [0.0] * len(orders)
    starts: list[float | None] = [None] * len(orders)
    done = [0] * len(orders)
    moved = True
    while moved:
        moved = False
        for rank, order in enumerate(orders):
            while done[rank] < len(order):
                act = order[done[rank]]
                ready_at = _input_time(act, final, times)
                if ready_at is None:
                    break
                start, cost = (max(free[rank], ready_at), seconds.get((act.stage, act.action), 0.0))
                if starts[rank] is None:
                    starts[rank] = start
                free[rank] = start + cost
                busy[rank] += cost
                if act.action is not StageAction.BACKWARD_WEIGHT:
                    is_forward = act.action is StageAction.FORWARD
                    times[act.stage, is_forward, act.micro_batch] = free[rank]
                done[rank] += 1
                moved = True
    if any(count < len(order) for count, order in zip(done, orders, strict=True)):
        return None
    return [Run(s or 0.0, stop, b) for s, stop, b in zip(starts, free, busy, strict=True)]


def _input_time(act: Act, final: int, times: Mapping[tuple[int, bool, int], float]) -> float | None:
    """When the input of *act* is there; None while that is open."""
    if act.action is StageAction.FORWARD:
        return 0.0 if act.stage == 0 else times.get((act.stage - 1, True, act.micro_batch))
    if act.action is StageAction.BACKWARD_WEIGHT or act.stage == final:
        return 0.0  # its own earlier action, which its rank's order has before it
    return times.get((act.stage + 1, False, act.micro_batch))


def balanced_seconds(seconds: Seconds) -> dict[tuple[int, StageAction], float]:
    """Returns *seconds* with the work of all stages spread evenly.

    Each stage keeps its own shares of forward and backward.
    """
    work: dict[int, float] = {}
    for (stage, _), duration in seconds.items():
        work[stage] = work.get(stage, 0.0) + duration
    mean = sum(work.values()) / len(work) if work else 0.0
    return {key: s * mean / work[key[0]] if work[key[0]] else s for key, s in seconds.items()}


def with_more(span: float, most_busy: float, factor: float = 2.0) -> float:
    """Returns *span* with *factor* times as many micro-batches, each smaller by that factor.

    The rank that computes most does so for *most_busy* in any case. What it waits besides is the filling
    and draining of the pipeline, which takes a fixed number of micro-batches.
    """
    return most_busy + (span - most_busy) / factor
