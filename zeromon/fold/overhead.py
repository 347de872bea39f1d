"""What watching costs a rank: accounted from its calls, and measured against control steps. Pure.

The accounted overhead is an estimate (docs/benchmarks.md has its error): each record and each wrapped
call is charged what the agent measured before training, hooks what they took in the steps that time
them, and samples what they took. The measured overhead compares steps with control steps; on a shared
machine its noise is often the larger.
"""

import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from zeromon.fold.state import Spent
from zeromon.stats.noise import estimate

_LEAST_SECONDS = 5


def accounted(beats: Sequence[Spent], meta: Mapping[str, Any]) -> float | None:
    """Returns the cost of the agent over the last minute as a share of the time.

    The time is that of steps: it begins after the first one, and ends with the last. None for an agent
    that has not measured its hooks, and before the first seconds.
    """
    record_ns, call_ns = meta.get("record_ns"), meta.get("call_ns")
    training = [beat for beat in beats if beat.step > 0]
    if not isinstance(record_ns, int) or not isinstance(call_ns, int) or not training:
        return None
    first = training[0]
    last = next(beat for beat in training if beat.step == training[-1].step)
    lasted = last.t_ns - first.t_ns
    if lasted < _LEAST_SECONDS * 10**9:
        return None
    spent = (
        (last.records - first.records) * record_ns
        + (last.calls - first.calls) * call_ns
        + last.spent_ns
        - first.spent_ns
    )
    return max(0.0, spent / lasted)


def measured(pairs: Iterable[tuple[int, int]]) -> tuple[float, float] | None:
    """Returns by which share steps exceed control steps, and the standard error of that share.

    *pairs*, in order of time, are (control step, mean of its neighbours). The share is the median of the
    ratios, which one checkpoint does not change. The error is that of batch means, because a busy
    neighbour lasts for many pairs (:mod:`zeromon.stats.noise`). None where too few pairs give no error.
    """
    ratios = [neighbours / control - 1 for control, neighbours in pairs if control > 0]
    if not ratios:
        return None
    found = estimate(ratios, statistics.median)
    return None if found.error is None else (found.value, found.error)
