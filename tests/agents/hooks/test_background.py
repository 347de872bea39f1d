"""Collectives of a thread beside that of training: counted and timed, exposed to nobody, and no hang."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from support import Node, train_command

from zeromon.fold.fold import fold_event
from zeromon.fold.state import RankState
from zeromon.fold.summarize import summarize_rank
from zeromon.ring.buffer import RingWriter
from zeromon.ring.codes import Flag, Op, Phase
from zeromon.ring.events import Done, Issued
from zeromon_agents.runtime.guard import Guard
from zeromon_agents.runtime.hook_context import HookContext

WRITES = 3.0
SECOND = 10**9


@pytest.mark.fsdp2
def test_the_collectives_of_an_asynchronous_checkpoint_expose_nothing(
    node: Node, tmp_path: Path
) -> None:
    """The thread of rank 0 waits in them for the slow writer of rank 1, and its steps do not."""
    saved = str(tmp_path / "saved")
    result = node.run(train_command(2, saved, str(WRITES), program="background.py"))
    assert result.code == 0, result.output
    first = result.snapshot.ranks[0]
    writers = [row for row in first.communication.collectives if row.group == "writers"]
    assert sum(row.seconds for row in writers) > 0.9 * WRITES
    assert sum(row.count for row in writers) == sum(row.timed for row in writers) > 4
    assert sum(row.exposed_seconds for row in writers) == 0
    trains = [row for row in first.communication.collectives if row.op == "reduce_scatter"]
    assert [row.count for row in trains] == [3 * first.steps.watched_steps]
    assert not [f for f in result.snapshot.findings if f.rule in ("collective_in_flight", "stalled")]


APART, OF_TRAINING = 7, 3


def issued(at_s: float, sequence: int, unit: int) -> Issued:
    return Issued(round(at_s * SECOND), Op.ALL_GATHER, Phase.FORWARD, 0, 1, unit, 8, sequence, 0)


def flying(state: RankState) -> list[int]:
    return [one.sequence for one in summarize_rank(state).communication.in_flight]


def test_what_a_thread_waits_for_is_in_flight_only_where_training_stands_still() -> None:
    state = RankState(groups={1: {"label": "world", "ranks": [0, 1]}}, background_unit=APART)
    fold_event(state, issued(1, 1, OF_TRAINING))
    done = Done(
        2 * SECOND, Op.ALL_GATHER, Phase.FORWARD, Flag.SPAN_KNOWN, 1, OF_TRAINING, 8, SECOND, 0, 1
    )
    fold_event(state, done)
    fold_event(state, issued(3, 2, APART))
    assert flying(state) == []
    assert state.progress_ns == 2 * SECOND, "no progress of training"
    assert state.phase is Phase.FORWARD and state.unit == OF_TRAINING
    state.meta["stack"] = ["train.py:1 in <module>"]
    assert flying(state) == [2]
    late = Done(9 * SECOND, Op.ALL_GATHER, Phase.FORWARD, 0, 1, APART, 8, 3 * SECOND, 6 * SECOND, 2)
    fold_event(state, late)
    assert flying(state) == []
    assert state.exposed_ns == 0 and not state.window.blocked and not state.window.phase_exposed_ns[1]
    assert sum(totals.duration_ns for totals in state.ops.values()) == 7 * SECOND


def test_the_threads_of_a_program_are_apart_and_those_of_autograd_are_not(tmp_path: Path) -> None:
    """Autograd's threads are C++ ones, also once Python has been asked about them."""
    context = HookContext(RingWriter(tmp_path / "0.ring", rank=0, capacity=64), Guard())
    found: dict[str, bool] = {}

    def look() -> None:
        found["thread"] = context.is_apart()

    def run() -> None:
        thread = threading.Thread(target=look)
        thread.start()
        thread.join()

    run()
    assert found == {"thread": False}, "no backward yet: which thread trains is not known"
    context.thread = threading.get_ident()
    run()
    assert found == {"thread": True}
    assert not context.is_apart()

    def from_cpp(_: object) -> None:
        found["unknown to Python"] = context.is_apart()
        threading.current_thread()
        found["asked about"] = context.is_apart()

    run_in_cpp(from_cpp)
    assert not found["unknown to Python"] and not found["asked about"]


def run_in_cpp(function: Callable[[object], None]) -> None:
    """Calls *function* on a thread that Python has not made, as autograd's are."""
    library, thread = ctypes.CDLL(None), ctypes.c_ulong()
    entry = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(function)
    assert library.pthread_create(ctypes.byref(thread), None, entry, None) == 0
    library.pthread_join(thread, None)
