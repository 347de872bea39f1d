"""The cost of one record and one wrapped call of a hook on this machine, measured before training.

The very hooks run around functions that do nothing, and write to a ring that is removed afterwards. The
collective is an asynchronous one with a callback, the most expensive kind on a CPU. In a training loop a
hook finds its code outside of the caches, so the figures are multiplied by :data:`COLD`.
"""

import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch

from zeromon.ring.buffer import RingWriter
from zeromon.ring.ring_file import remove_ring_file
from zeromon_agents.hooks.c10d import Collectives
from zeromon_agents.hooks.process_groups import PAYLOADS, Group
from zeromon_agents.observe.device_timer import DeviceTimer
from zeromon_agents.runtime.around import around
from zeromon_agents.runtime.guard import Guard
from zeromon_agents.runtime.hook_context import ON, HookContext

COLD = 2.0
"""How many times as long a hook takes in a training loop as in a loop of its own
(docs/evidence/cost.md)."""
_ROUNDS, _CALLS = 7, 100


class HookCost(NamedTuple):
    """Nanoseconds that a hook adds in a training loop."""

    record_ns: int
    """For each record; a collective writes two."""
    call_ns: int
    """For each call of a function that :func:`~zeromon_agents.runtime.around.around` wraps."""


class _Options:
    """The part of a collective's options that the hook reads."""

    asyncOp = True  # noqa: N815 (torch's name)


class _Work:
    """A collective that has ended already."""

    def get_future(self) -> Any:
        """Returns a completed future, whose callback runs at once."""
        future: Any = torch.futures.Future()
        future.set_result(None)
        return future


def measure_hook_cost() -> HookCost:
    """Returns what the hooks cost here. It takes some ten milliseconds."""
    with tempfile.TemporaryDirectory(prefix="zeromon-") as folder:
        ring = RingWriter(Path(folder) / "scratch", rank=0, capacity=1 << 9, names_size=1 << 12)
        remove_ring_file(ring.path)  # its memory, which nobody else would remove, goes with the last use
        context = HookContext(ring, Guard())
        context.mode = ON
        # A collective through the hook, and the wait for it
        collectives = Collectives(context, DeviceTimer(context))
        pg, payload, options = object(), [torch.ones(1)], _Options()
        group = Group(1, None, size=2, on_device=False, base=0)
        # As after the warm-up; else the hook would ask this bare object for a sequence number
        group.seen_sequences, group.even = None, {"allreduce"}
        collectives.groups[id(pg)] = group
        issue = collectives._issue_hook(_bare_issue, "allreduce", PAYLOADS["allreduce"])
        wait = collectives._wait_hook(_bare_wait)

        def issue_and_wait() -> None:
            wait(issue(pg, payload, options))

        record = (_median_ns(issue_and_wait) - _median_ns(_bare_collective)) / 2
        hook: Callable[[], None] = around(context, lambda *_: None, lambda *_: None, scoped=True)(
            _bare_method
        )
        call = _median_ns(hook) - _median_ns(_bare_method)
        ring.close()
        # A hook that fails takes less time: the figure would be too low
        if context.guard.errors:
            raise RuntimeError(f"the hooks failed while they were timed: {context.guard.first}")
    return HookCost(round(COLD * max(0.0, record)), round(COLD * max(0.0, call)))


def _median_ns(function: Callable[[], Any]) -> float:
    """Nanoseconds of one call, the median of some rounds."""
    rounds = []
    for _ in range(_ROUNDS):
        began_ns = time.perf_counter_ns()
        for _ in range(_CALLS):
            function()
        rounds.append((time.perf_counter_ns() - began_ns) / _CALLS)
    return statistics.median(rounds)


def _bare_issue(*_: Any) -> _Work:
    return _Work()


def _bare_wait(_: Any) -> bool:
    return True


def _bare_collective() -> None:
    _bare_wait(_bare_issue())


def _bare_method(*_: Any) -> None:
    return None
